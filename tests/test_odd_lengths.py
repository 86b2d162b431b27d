"""Sequences that do not fill their last chunk: q, k, v, h and their gradients keep their length."""

import functools

import jax
import jax.numpy as jnp
import pytest
from oracle import (
    assert_below,
    cotangents_for,
    errors_of,
    expected_of,
    outputs_and_gradients,
    random_inputs,
    tolerance,
)
from test_gpu import recurrence_in_parts

from mlstm_pallas import KernelConfig, StageConfig, mlstm_chunkwise

SPLITS = StageConfig(siz_b_LKV=16, num_splits=2)
CONFIGS = {
    "materialised": KernelConfig(chunk_size=32, fused_min_heads=0),
    "fused": KernelConfig(chunk_size=32, fused_min_heads=1, recurrent_fw_H=SPLITS.replace(
        num_splits=None, siz_b_loop=16, siz_b_DHQK=16)),  # in two launches
    "splits": KernelConfig(
        chunk_size=16, fused_min_heads=1,
        recurrent_fw_H=SPLITS, recurrent_fw_C=SPLITS, recurrent_bw_dC=SPLITS,
    ),
}  # fmt: skip


@pytest.fixture
def quick_on_the_cpu():
    """quick_compilation, but not of the tests on a GPU in this module, which measure memory."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


FUSED_ON_A_GPU = KernelConfig(fused_min_heads=1)


@functools.lru_cache(maxsize=1)
def case(S, B, NH, DHQK, DHHV, dtype):
    """Inputs, cotangents, outputs and gradients in float64."""
    inputs = random_inputs(S, B, NH, S, DHQK, DHHV, dtype=dtype)
    cotangents = cotangents_for(inputs, dtype)
    return inputs, cotangents, expected_of(inputs, cotangents, recurrence_in_parts)


def check(S, layout, bound, heads=(1, 2), DHQK=32, DHHV=16, dtype="float32", **options):
    inputs, cotangents, expected = case(S, *heads, DHQK, DHHV, dtype)
    run = functools.partial(mlstm_chunkwise, return_last_states=True, layout=layout, **options)
    result = outputs_and_gradients(run, layout)(inputs, cotangents)
    for errors in errors_of(inputs, result, expected):
        assert_below(errors, bound)


@pytest.mark.usefixtures("quick_on_the_cpu")
@pytest.mark.parametrize(
    ("S", "layout", "config", "heads"),
    [
        (1, "BNTH", "materialised", (1, 17)),
        (61, "BTNH", "splits", (32, 16)),
        *(
            pytest.param(*x, (32, 16), marks=pytest.mark.slow)
            for x in [
                (17, "BTNH", "materialised"),
                (48, "BNTH", "fused"),  # whole blocks of the scan, no whole chunk
                (127, "BTNH", "fused"),
                (129, "BNTH", "splits"),
                (2, "BNTH", "splits"),
            ]
        ),
    ],
)
def test_outputs_and_gradients(S, layout, config, heads):
    """Interpreted, what a kernel reads beyond an array is NaN."""
    bound = 4 * tolerance("float32", S + 32)
    check(S, layout, bound, (2, 3), *heads, backend="interpret", config=CONFIGS[config])


def test_interpreted_kernels_lower_with_64_bit_indices():
    x = random_inputs(0, 1, 2, 61, 16, 16, states=False)
    run = functools.partial(mlstm_chunkwise, backend="interpret", config=CONFIGS["materialised"])
    with jax.enable_x64(True):
        jax.jit(jax.grad(lambda x: jnp.sum(run(**x)))).lower(x)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["BNTH", "BTNH"])
@pytest.mark.parametrize("S", [1, 2, 17, 127, 129, 992, 1001, 4095, 8191])
@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
def test_on_a_gpu(backend, S, layout):
    """A store beyond an array would be in the next head."""
    heads = (1, 8) if S > 4000 else (4, 12)  # the reference takes memory
    sizes = ((1, 24), 256, 256) if S in (992, 1001) else (heads, 64, 128)
    check(S, layout, 2e-2, *sizes, "bfloat16", backend=backend, config=FUSED_ON_A_GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["BNTH", "BTNH"])
@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
def test_memory(backend, layout):
    """No array is padded: a copy of v alone would be a tenth."""
    run = functools.partial(mlstm_chunkwise, backend=backend, layout=layout)

    def both(dh, *x):
        return jax.vjp(run, *x)[1](dh)

    def size(S):
        shape = (8, S, 8) if layout == "BTNH" else (8, 8, S)
        gates = [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2
        dh, q, k, v = (
            jax.ShapeDtypeStruct((*shape, D), jnp.bfloat16) for D in (512, 256, 256, 512)
        )
        memory = jax.jit(both).lower(dh, q, k, v, *gates).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    assert size(8191) <= 1.03 * size(8192)
