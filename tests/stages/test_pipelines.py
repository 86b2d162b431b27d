"""The race that pipelines.py looks for is found in a kernel that has it on a GPU.

It is not found in those of the package: test_compile_report.py.
"""

import types

import compile_report
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from stage_calls import Launch, Lowering, Problem
from worker import ProcessEnded

from mlstm_pallas.formulas.tiles import dot, loop
from mlstm_pallas.triton.launch import kernel_call

D, STEPS = 64, 8


def product_and_sum(matA, matB, products, sums, *, call):
    """a b, and the sums of a's rows: a tile of a feeds both in one loop."""

    def step(i, carry):
        product, total = carry
        a, b = matA[:, pl.ds(i * D, D)], matB[pl.ds(i * D, D), :]
        return product + dot(a, b, None), total + jnp.sum(a.astype(jnp.float32), axis=1)

    zeros = jnp.zeros((D, D), jnp.float32), jnp.zeros(D, jnp.float32)
    products[...], sums[...] = loop(STEPS, step, zeros)


@pytest.mark.slow
def test_a_tile_that_feeds_a_product_and_plain_arithmetic_is_found():
    pytest.importorskip("triton")
    array = jax.ShapeDtypeStruct
    tiles = types.SimpleNamespace(num_warps=4, num_stages=3)
    outputs = dict(products=(array((D, D), "float32"), "00"), sums=(array((D,), "float32"), "0"))
    call = Launch(Problem(1, 1, D, D, D, D, 1.0), tiles, None, Lowering.TRITON)

    def run(a, b):
        inputs = dict(matA=(a, "00"), matB=(b, "00"))
        return kernel_call(product_and_sum, inputs, outputs, grid=(1,), call=call)

    x = array((D, D * STEPS), "bfloat16"), array((D * STEPS, D), "bfloat16")
    traced = compile_report.trace(run, *x, device=compile_report.DEVICES["H200"])
    [kernel] = compile_report.lowered_kernels(traced)
    message = "a copy may overwrite what a running product reads, in 1 pipelined tiles"
    with pytest.raises(ProcessEnded, match=message):
        compile_report.compile_kernel(kernel.ir, kernel.num_warps, kernel.num_stages, 90)
