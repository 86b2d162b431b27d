"""The scaling benchmark: which devices are timed. test_benchmarks has its rows."""

import benchmark_runs
import jax
import pytest
import scaling_benchmark as scaling
from benchmark_runs import quick_mlstm


@pytest.mark.slow
def test_figures_of_the_devices_that_could_run(monkeypatch):
    """One cannot; two and then four take turns, four in twice the time."""
    if jax.local_device_count() < 4:
        pytest.skip("needs four devices")

    def inputs(spread, *args, right=scaling.Spread.inputs):
        if spread.mesh.size == 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB")
        return right(spread, *args)

    monkeypatch.setattr(scaling.Spread, "inputs", inputs)
    monkeypatch.setattr(scaling, "mlstm_chunkwise", quick_mlstm)
    monkeypatch.setattr(scaling.Spread, "oracle", staticmethod(quick_mlstm))
    shapes = benchmark_runs.timed(monkeypatch)
    request = "--shape=2x2x32x16x16", "--backend=xla", "--repeats=3", "--mean_f=4"
    code, (one, two, four) = benchmark_runs.measured(
        scaling, *request, "--devices=4,1,2", "--mode=weak-batch"
    )
    assert (code, one.get("ms"), shapes) == (0, None, [(4, 2, 32, 16), (8, 2, 32, 16)])
    assert one["note"].startswith("skipped: ")
    assert one["note"].endswith(": RESOURCE_EXHAUSTED: 9 GiB")
    assert two["efficiency_range"] == [100, 100]
    figures = dict(ms=3e3, spread=5 / 3, efficiency_pct=100, tokens_per_second=4 * 32 / 3)
    benchmark_runs.assert_row(two, **figures, peak_mib=1.5)
    figures |= dict(ms=6e3, efficiency_pct=50, tokens_per_second=8 * 32 / 6)
    benchmark_runs.assert_row(four, **figures)
