"""The layer benchmark: FLOPs, bytes, checks of outputs, records."""

import functools

import benchmark_runs
import jax
import layer_benchmark
import pytest
import roofline
from benchmark_runs import dot_flops, quick_mlstm
from shapes import Shape

request = "--shape=2x2x32x16x32", "--repeats=3", "--direction=fwbw", "--layout=BNTH,BTNH"
run = functools.partial(benchmark_runs.measured, layer_benchmark, *request)


@pytest.mark.parametrize("direction", ["fwd", "fwbw"])
@pytest.mark.parametrize("impl", ["products", "without_mlstm"])
def test_what_is_left_without_the_mlstm_are_the_counted_products(impl, direction):
    shape = Shape(2, 3, 32, 16, 24)
    inputs = jax.eval_shape(lambda: layer_benchmark.random_inputs(shape))
    outputs = functools.partial(layer_benchmark.outputs, impl, None, direction)
    flops = dot_flops(jax.make_jaxpr(outputs)(inputs).jaxpr)
    assert flops == layer_benchmark.product_flops(shape, direction)


def test_figures_of_a_layer(monkeypatch, capsys):
    monkeypatch.setattr(roofline, "DEVICE_RATES", {jax.devices()[0].device_kind: (4e6, 1e5)})
    monkeypatch.setattr(layer_benchmark, "mlstm_chunkwise", quick_mlstm)
    benchmark_runs.timed(monkeypatch)
    code, rows = run("--impl=xla,without_mlstm", "--direction=fwd,fwbw")
    assert (code, [row["direction"] for row in rows]) == (0, ["fwd"] * 3 + ["fwbw"] * 3)
    E, tokens, heads = 64, 64, 128
    forward = 2 * tokens * E * (2 * 2 * 16 + 3 * E + 2 * 2), 3 * tokens * E * 2 + 2 * heads * 6
    both = 3 * forward[0], forward[1] + 5 * tokens * E * 2 + 2 * heads * 8
    for row in rows:
        flops, nbytes = forward if row["direction"] == "fwd" else both
        benchmark_runs.assert_row(
            row,
            **benchmark_runs.TIMED,
            tokens_per_s=tokens / 3,
            product_flops=flops,
            elementwise_bytes=nbytes,
            product_floor_ms=flops / 4e3,
            elementwise_floor_ms=nbytes / 1e2,
            product_pct=flops / 4e3 / 30,
        )


def test_what_is_left_beside_products_is_printed(capsys):
    row = dict(name="a", direction="fwd", product_flops=2e9, elementwise_bytes=3e6)
    row |= dict(product_floor_ms=0.5, elementwise_floor_ms=0.25)
    rows = [
        row | dict(impl=impl, ms=ms) for impl, ms in (("without_mlstm", 4.0), ("products", 1.5))
    ]
    layer_benchmark.remainders([*rows, dict(rows[0], name="b", product_floor_ms=None)])
    text = (
        "\n{}, forward: products 2.000e+09 FLOP, floor {}; the rest 3.000e+06 bytes, floor "
        "0.250 ms; without_mlstm less products {}, less the floor of products {}\n"
    ).format
    expected = text("a", "0.500 ms", "2.500 ms", "3.500 ms") + text("b", "-", "-", "-")
    assert capsys.readouterr().out == expected
