"""The scaling benchmark: shapes of n devices, checks of outputs, efficiency."""

import functools
from unittest import mock

import benchmark_runs
import jax
import numpy as np
import pytest
import scaling_benchmark as scaling
from benchmark_runs import quick_mlstm
from shapes import Shape

OF = Shape(2, 2, 32, 16, 16)
run = functools.partial(benchmark_runs.measured, scaling, f"--shape={OF}", "--backend=xla")


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
    code, (one, two, four) = run(
        "--devices=4,1,2", "--mode=weak-batch", "--repeats=3", "--mean_f=4"
    )
    assert (code, one.get("ms"), shapes) == (0, None, [(4, 2, 32, 16), (8, 2, 32, 16)])
    assert one["note"].startswith("skipped: ")
    assert one["note"].endswith(": RESOURCE_EXHAUSTED: 9 GiB")
    assert two["efficiency_range"] == [100, 100]
    figures = dict(ms=3e3, spread=5 / 3, efficiency_pct=100, tokens_per_second=4 * 32 / 3)
    benchmark_runs.assert_row(two, **figures, peak_mib=1.5)
    figures |= dict(ms=6e3, efficiency_pct=50, tokens_per_second=8 * 32 / 6)
    benchmark_runs.assert_row(four, **figures)


def test_other_errors_of_the_device_are_failures(monkeypatch):
    error = jax.errors.JaxRuntimeError("no such\nthing")
    monkeypatch.setattr(scaling.Spread, "inputs", mock.Mock(side_effect=error))
    code, [row] = run("--devices=1", "--mode=weak-batch", "--mean_f=4")
    assert (code, row["status"]) == (1, "failed")
    assert row["note"].endswith(": no such thing")


@pytest.mark.slow
def test_rows_for_gates_that_close_and_for_gates_that_stay_open(monkeypatch):
    monkeypatch.setattr(scaling, "mlstm_chunkwise", quick_mlstm)
    monkeypatch.setattr(scaling.Spread, "oracle", staticmethod(quick_mlstm))
    drawn = []
    inputs = scaling.Spread.inputs
    monkeypatch.setattr(scaling.Spread, "inputs", lambda *x: drawn.append(inputs(*x)) or drawn[-1])
    code, rows = run("--devices=1", "--mode=weak-batch", "--repeats=1", "--dtype=float32")
    assert code == 0
    assert [row["mean_f"] for row in rows] == [4, 10]
    closing, stays_open = (x.f for x in drawn[1::2])  # after those of the check, one head
    np.testing.assert_allclose(stays_open - closing, 6, atol=1e-5)
