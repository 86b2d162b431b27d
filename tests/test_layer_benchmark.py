"""The layer benchmark: FLOPs, bytes, checks of outputs, records."""

import functools
import re

import benchmark_runs
import jax
import layer_benchmark
import peers
import pytest
import roofline
from benchmark_runs import dot_flops, missing, quick_mlstm
from shapes import Shape

request = "--shape=2x2x32x16x32", "--repeats=1", "--direction=fwbw", "--layout=BNTH,BTNH"
run = functools.partial(benchmark_runs.measured, layer_benchmark, *request)


@pytest.mark.parametrize("direction", ["fwd", "fwbw"])
@pytest.mark.parametrize("impl", ["products", "without_mlstm"])
def test_what_is_left_without_the_mlstm_are_the_counted_products(impl, direction):
    shape = Shape(2, 3, 32, 16, 24)
    inputs = jax.eval_shape(lambda: layer_benchmark.random_inputs(shape))
    outputs = functools.partial(layer_benchmark.outputs, impl, None, direction)
    flops = dot_flops(jax.make_jaxpr(outputs)(inputs).jaxpr)
    assert flops == layer_benchmark.product_flops(shape, direction)


@pytest.mark.slow
def test_measures_both_layouts_and_skips_a_peer_that_is_not_there(monkeypatch):
    monkeypatch.setattr(peers, "limit_chunk", missing)
    monkeypatch.setattr(roofline, "DEVICE_RATES", {jax.devices()[0].device_kind: (1e9, 1e8)})
    code, (*ours, peer) = run()
    assert code == 0
    without = [(impl, None) for impl in layer_benchmark.WITHOUT]
    expected = [("xla", "BNTH"), ("xla", "BTNH"), *without]
    assert [(row["impl"], row["layout"]) for row in ours] == expected
    assert peer["note"] == benchmark_runs.MISSING
    for row in ours:
        assert (row["status"], row["elementwise_bytes"]) == ("ok", 64 * (8 * 64 * 2 + 14 * 2 * 2))
        assert row["product_pct"] == pytest.approx(100 * row["product_flops"] / 1e6 / row["ms"])
    names = {"y", "x", *layer_benchmark.Params._fields} - {"input_bias", "forget_bias"}
    assert ours[0]["errors"].keys() == ours[1]["errors"].keys() == names


def test_a_wrong_gradient_in_a_layout_is_not_timed(monkeypatch):
    def wrong(*args, layout="BNTH", **options):
        h = quick_mlstm(*args, layout=layout)  # its gradient is scaled by 0.9 in "BTNH"
        return 0.9 * h + jax.lax.stop_gradient(0.1 * h) if layout == "BTNH" else h

    monkeypatch.setattr(layer_benchmark, "mlstm_chunkwise", wrong)
    code, (first, second) = run("--impl=xla")
    assert (code, first["status"], second["status"], "ms" in second) == (1, "ok", "wrong", False)
    assert re.match("wrong: error .* in query, ", second["note"])
