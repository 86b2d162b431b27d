"""float16 kernels against float64: forward, backward, one token at a time; what is beyond 65504 is
inf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_checks import FLOAT16, FLOAT16_ON_A_GPU, calls_of, check_call, gpu_calls_of
from oracle import assert_close, random_inputs, token_at, tolerance

from mlstm_pallas import KernelConfig, mlstm_chunkwise, mlstm_recurrent_step

UNIT = 2.0**-11


@pytest.mark.parametrize("call", [*calls_of(FLOAT16), *gpu_calls_of(FLOAT16_ON_A_GPU)])
def test_against_float64(call):
    check_call(**call)


def overflowing(S, q, k, v):
    """Constant rows with open gates: h is v at every step, whatever lies between."""
    x, rows = random_inputs(0, 1, 2, S, 16, 16, dtype="float16", states=False), (q, k, v, 0, 20)
    return {name: jnp.full_like(x[name], y) for name, y in zip("qkvif", rows, strict=True)}


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_beyond_the_largest_number_is_inf_or_right(fused):
    """C = 8 * 2048 t after t steps, beyond 65504 after a chunk of 16; the steps of the first chunk
    do not read it.

    q k may be 2^18 after the scale, of a C of at most 2^14: a kernel that rounds its scores has
    inf, one that keeps them in float32 has h.
    """
    config = KernelConfig(chunk_size=16, fused=fused)
    run = jax.jit(functools.partial(mlstm_chunkwise, backend="interpret", config=config))
    of_states, of_scores = (
        np.asarray(run(**overflowing(64, *x))) for x in ((1, 8, 2048), (256, 256, 1))
    )
    bound = tolerance("float16", 32)
    assert_close(of_states[:, :, :16], np.full((1, 2, 16, 16), 2048.0), bound)
    assert np.isposinf(of_states[:, :, 16:]).all()
    finite = np.isfinite(of_scores)
    assert np.isposinf(of_scores[~finite]).all()
    assert_close(of_scores[finite], np.ones(finite.sum()), bound)


def test_states_of_a_step_beyond_the_largest_number_are_inf():
    x = token_at(overflowing(1, q=1, k=64, v=2048), 0)
    for name, shape in dict(c_initial=(16, 16), n_initial=(16,), m_initial=()).items():
        x[name] = jnp.zeros((1, 2, *shape), "float16")
    h, (c, n, _) = mlstm_recurrent_step(**x, backend="interpret")
    assert jnp.isposinf(c).all()  # 64 * 2048
    assert (n == 64).all()
    assert_close(h, np.full(h.shape, 2048.0), UNIT, "h")  # of float32 states
