"""Where a NaN goes: to its own batch element and head, to later steps only; and JAX's NaN checks
pass for good inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import loss_of, random_inputs, step_names

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_recurrent_step,
    reference,
)

BACKENDS = ("xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu))
B, NH, S, L = 2, 2, 64, 32
BATCH, HEAD, COLUMN = 1, 0, 3
STEP = 37  # inside the second chunk, inside a tile
TILES = KernelConfig(
    triton_chunk_gates=dict(siz_b_LQ=16),
    triton_parallel_fw_H=dict(
        siz_b_LQ=16, siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=16, keep_q=False
    ),
)


INPUTS = random_inputs(0, B, NH, S, 16, 16, resets=True)


@functools.partial(jax.jit, static_argnames="backend")
def run(x, backend):
    options = dict(chunk_size=L, config=TILES, return_last_states=True)
    return mlstm_chunkwise(**x, **options, backend=backend)


@functools.cache
def clean(backend):
    return np.asarray(run(INPUTS, backend)[0])


@pytest.mark.parametrize("name", "qkvif")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_reaches_no_other_head_and_no_earlier_step(backend, name):
    """In q it reaches its own step only; in v its own column, where 0 times NaN spares no earlier
    step of its chunk, see mlstm_chunkwise."""
    where = (BATCH, HEAD, STEP, COLUMN) if name in "qkv" else (BATCH, HEAD, STEP)
    x = {key: np.array(y) for key, y in INPUTS.items()}
    x[name][where] = np.nan
    h, states = run(x, backend)
    others = np.arange(B * NH).reshape(B, NH) != BATCH * NH + HEAD
    assert np.array_equal(np.asarray(h)[others], clean(backend)[others])
    assert all(np.isfinite(np.asarray(y)[others]).all() for y in states[:2])
    h, expected = np.asarray(h)[BATCH, HEAD], clean(backend)[BATCH, HEAD]
    if name == "q":
        assert np.isnan(h[STEP]).all()
        assert np.array_equal(np.delete(h, STEP, axis=0), np.delete(expected, STEP, axis=0))
    elif name == "v":
        start = STEP // L * L
        assert np.isnan(h[STEP:, COLUMN]).all()
        assert np.array_equal(np.delete(h, COLUMN, axis=1), np.delete(expected, COLUMN, axis=1))
        assert np.array_equal(h[:start], expected[:start])
    else:
        assert np.isnan(h[STEP:]).all()
        np.testing.assert_allclose(h[:STEP], expected[:STEP], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_in_an_initial_n_is_seen_in_its_head_alone(backend):
    """In h, of a step and of the reference too, and in dq."""
    x = random_inputs(0, B, NH, S, 16, 16)
    x["n_initial"] = x["n_initial"].at[BATCH, HEAD, COLUMN].set(jnp.nan)
    call = functools.partial(mlstm_chunkwise, chunk_size=L, backend=backend)
    h, vjp = jax.vjp(call, *x.values())
    step = mlstm_recurrent_step(**step_names(x, 0), backend=backend)[0]
    for y in (h, step, reference.recurrence(**x)[0], vjp(jnp.ones_like(h))[0]):
        nan = np.isnan(y)
        assert nan[BATCH, HEAD].all()
        assert nan.sum() == nan[BATCH, HEAD].size


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_checks_of_jax_are_silent(backend):
    """Resets, masked input gates, padded steps and columns: no NaN on the way.

    In one jit only what comes out is checked.
    """
    x = list(random_inputs(1, 1, 2, 20, 12, 20, resets=True).values())
    options = dict(chunk_size=16, backend=backend, return_last_states=True)
    call = functools.partial(mlstm_chunkwise, **options)
    gradient = jax.grad(lambda *x: loss_of(*call(*x)), tuple(range(8)))
    with jax.debug_nans(True), jax.enable_checks(True):
        for f in (gradient, jax.jit(gradient)) if backend == "xla" else (gradient,):
            assert all(jnp.isfinite(y).all() for y in jax.tree.leaves(f(*x)))
