"""The layer benchmark: FLOPs, and what it prints of products; test_benchmarks.py has its rows."""

import functools

import jax
import layer_benchmark
import pytest
from benchmark_runs import dot_flops
from shapes import Shape


@pytest.mark.parametrize("direction", ["fwd", "fwbw"])
@pytest.mark.parametrize("impl", ["products", "without_mlstm"])
def test_what_is_left_without_the_mlstm_are_the_counted_products(impl, direction):
    shape = Shape(2, 3, 32, 16, 24)
    inputs = jax.eval_shape(lambda: layer_benchmark.random_inputs(shape))
    outputs = functools.partial(layer_benchmark.outputs, impl, None, direction)
    flops = dot_flops(jax.make_jaxpr(outputs)(inputs).jaxpr)
    assert flops == layer_benchmark.product_flops(shape, direction)


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
