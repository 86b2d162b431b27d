"""The race that pipelines.py looks for is found in a kernel that has it on a GPU, and not in one
without."""

import contextlib

import compile_report
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from mlstm_pallas import StageConfig
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering, StageCall
from mlstm_pallas.tiles import dot, loop
from mlstm_pallas.triton.launch import kernel_call

D, STEPS = 64, 8


def product_and_sum(a_ref, b_ref, product_ref, sum_ref, *, apart):
    """a b, and the sums of a's rows. A tile of a feeds both in one loop, or each in its own."""

    def tile(ref, i):
        return ref[:, pl.ds(i * D, D)] if ref is a_ref else ref[pl.ds(i * D, D), :]

    def add(i, total):
        return total + jnp.sum(tile(a_ref, i).astype(jnp.float32), axis=1)

    def step(i, carry):
        product, total = carry
        product += dot(tile(a_ref, i), tile(b_ref, i), None)
        return product, total if apart else add(i, total)

    zeros = jnp.zeros((D, D), jnp.float32), jnp.zeros(D, jnp.float32)
    product_ref[...], total = loop(STEPS, step, zeros)
    sum_ref[...] = loop(STEPS, add, total) if apart else total


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["one_loop", "two_loops"])
def test_a_tile_that_feeds_a_product_and_plain_arithmetic_is_found(apart):
    pytest.importorskip("triton")
    shapes = (D, D * STEPS), (D * STEPS, D), (D, D), (D,)
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(shapes, ["bfloat16"] * 2 + ["float32"] * 2, strict=True)
    ]
    specs = [pl.BlockSpec(shape, lambda i, shape=shape: (0,) * len(shape)) for shape in shapes]
    config, problem = StageConfig(num_warps=4, num_stages=3), Problem(1, 1, D, D, D, D, 1.0)
    options = dict(grid=(1,), in_specs=specs[:2], out_specs=specs[2:], out_shape=arrays[2:])
    run = kernel_call(
        product_and_sum,
        name="product_and_sum",
        call=StageCall(problem, config, None, Lowering.TRITON),
        apart=apart,
        **options,
    )
    device = compile_report.DEVICES["H200"]
    [kernel] = compile_report.lowered_kernels(run, *arrays[:2], device=device)
    found = pytest.raises(
        compile_report.CompileError,
        match="a copy may overwrite what a running product reads, in 1 pipelined tiles",
    )
    with contextlib.nullcontext() if apart else found:
        launch = kernel.num_warps, kernel.num_stages
        assert compile_report.compile_kernel(kernel.ir, *launch, 90).wgmma > 0
