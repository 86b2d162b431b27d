"""The race that pipelines.py looks for is found in a kernel that has it on a GPU, and not in one
without."""

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

COLUMNS, STEPS = 64, 8


def product_and_sum(a_ref, b_ref, w_ref, product_ref, sum_ref, *, apart):
    """a b and a w. A tile of a feeds both in one loop, or each in a loop of its own (apart)."""

    def tile(i):
        return a_ref[:, pl.ds(i * COLUMNS, COLUMNS)]

    def weighted(i, a):
        return jnp.sum(a.astype(jnp.float32) * w_ref[pl.ds(i * COLUMNS, COLUMNS)][None, :], axis=1)

    def step(i, carry):
        a, (product, total) = tile(i), carry
        product += dot(a, b_ref[pl.ds(i * COLUMNS, COLUMNS), :], None)
        return product, total if apart else total + weighted(i, a)

    total = jnp.zeros((64,), jnp.float32)
    product, total = loop(STEPS, step, (jnp.zeros((64, 64), jnp.float32), total))
    if apart:
        total = loop(STEPS, lambda i, total: total + weighted(i, tile(i)), total)
    product_ref[...] = product
    sum_ref[...] = total


@pytest.mark.parametrize("apart", [False, True], ids=["one_loop", "two_loops"])
def test_a_tile_that_feeds_a_product_and_plain_arithmetic_is_found(apart):
    pytest.importorskip("triton")
    shapes = (64, COLUMNS * STEPS), (COLUMNS * STEPS, 64), (COLUMNS * STEPS,), (64, 64), (64,)
    specs = [pl.BlockSpec(shape, lambda i, shape=shape: (0,) * len(shape)) for shape in shapes]
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes[3:]]
    call = StageCall(
        Problem(1, 1, 64, 64, 64, 64, 1.0),
        StageConfig(num_warps=4, num_stages=3),
        None,
        Lowering.TRITON,
    )

    def run(*arrays):
        options = dict(
            grid=(1,), in_specs=specs[:3], out_specs=specs[3:], out_shape=outputs, call=call
        )
        return kernel_call(product_and_sum, name="product_and_sum", **options, apart=apart)(*arrays)

    arguments = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(shapes, ("bfloat16", "bfloat16", "float32"), strict=False)
    ]
    [kernel] = compile_report.lowered_kernels(
        run, *arguments, device=compile_report.DEVICES["H200"]
    )
    assert not kernel.cause
    if apart:
        assert (
            compile_report.compile_kernel(kernel.ir, kernel.num_warps, kernel.num_stages, 90).wgmma
            > 0
        )
    else:
        with pytest.raises(
            compile_report.CompileError,
            match="a copy may overwrite what a running product reads, in 1 pipelined tiles",
        ):
            compile_report.compile_kernel(kernel.ir, kernel.num_warps, kernel.num_stages, 90)
