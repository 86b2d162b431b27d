"""sequence_lengths: every batch entry is computed as if it were cut to its length.

On Mosaic GPU: mosaic_gpu_cases.py; sharded: test_sharding.py; of split sequences:
test_distributed.py.
"""

import functools

import call_checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, beyond, random_inputs, tolerance

from mlstm_pallas import mlstm_chunkwise, reference


@pytest.mark.parametrize("call", [*call_checks.calls_of(call_checks.OF_LENGTHS)])
def test_against_float64(call):
    call_checks.check_call(**call)


def test_skipped_chunks_pass_jax_debug_nans():
    """What kernels leave undefined is NaN in interpreted ones."""
    *x, f = random_inputs(3, 2, 1, 48, 16, 16, states=False).values()
    lengths = np.array([1, 20])
    call = functools.partial(mlstm_chunkwise, *x, chunk_size=16, backend="interpret")
    with jax.debug_nans(True):
        df = jax.grad(lambda f: jnp.sum(call(f=f, sequence_lengths=lengths)))(f)
    assert not np.any(df[beyond(lengths, df)])


@pytest.mark.slow
def test_jit_vmap_scan_remat_and_the_plain_function():
    """Values and lengths are traced."""
    q, k, v, i, f = random_inputs(1, 2, 1, 24, 16, 16, states=False).values()

    def loss(run, v, lengths):
        options = dict(chunk_size=16, sequence_lengths=lengths)
        layer = jax.checkpoint(lambda v, _: (run(q, k, v, i, f, **options), None))
        return jnp.sum(jnp.sin(jax.lax.scan(layer, v, length=2)[0]))

    values, lengths = np.stack([v, 2 * v]), np.array([[5, 24], [17, 0]])
    result, expected = (
        jax.jit(jax.vmap(jax.grad(functools.partial(loss, run))))(values, lengths)
        for run in (mlstm_chunkwise, reference.chunkwise)
    )
    # Two layers, both results in float32.
    assert_close(result, expected, 4 * call_checks.backward_bound("float32", 24 + 2 * 16))
    for dv, each in zip(result, lengths, strict=True):
        assert not np.any(dv[beyond(each, dv)])


@pytest.mark.parametrize("dtype", ["int8", "uint32"])
def test_any_integer_dtype_is_clipped(dtype):
    """S does not fit int8, and int32 does not have all of uint32."""
    x = random_inputs(2, 2, 1, 300, 16, 16, states=False).values()
    bounds = np.iinfo(dtype)
    result, expected = (
        mlstm_chunkwise(*x, sequence_lengths=lengths, backend="xla")
        for lengths in (
            jnp.array([bounds.min, bounds.max], dtype),
            jnp.array([0, min(bounds.max, 300)]),
        )
    )
    assert_close(result, expected, tolerance("float32", 300 + 16))
