"""Where a NaN goes: to its own batch element and head, to later steps only; and JAX's NaN checks
pass for good inputs. The table has NaN in heads, drafts, slots and before resets."""

import functools
import itertools

import engine
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    BACKENDS,
    assert_close,
    check_isolated,
    loss_of,
    random_inputs,
    results_of,
    tolerance,
)

from mlstm_pallas import KernelConfig, mlstm_chunkwise, reference

B, NH, S, L = 2, 2, 64, 32
BATCH, HEAD, COLUMN = 1, 0, 3
STEP = 37  # inside the second chunk, inside a tile
OTHERS = np.array([[True, True], [False, True]])  # the other heads
TILES = KernelConfig(
    triton_parallel_fw_H=dict(
        siz_b_LQ=16, siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=16, keep_q=False
    ),
)


def reversed_in_time(run, lengths):
    """The function on sequences that run from their last step to their first; all of these are
    within the lengths."""

    def flipped(x, axis):
        S = x.shape[axis]
        ends = np.full(len(x), S) if lengths is None else np.clip(lengths, 0, S)
        steps, ends = np.arange(S), ends[:, None]
        places = np.where(steps < ends, ends - 1 - steps, steps)
        return jax.vmap(functools.partial(jnp.take, axis=axis - 1))(x, places)

    def run_flipped(*, segment_ids=None, **x):
        x |= {name: flipped(x[name], 2) for name in "qkvif"}
        ids = None if segment_ids is None else flipped(segment_ids, 1)
        h, states = run(**x, segment_ids=ids)
        return flipped(h, 2), states

    return run_flipped


INPUTS = random_inputs(0, B, NH, S, 16, 16, resets=True)


chunkwise = functools.partial(mlstm_chunkwise, return_last_states=True)


@functools.cache
def jitted(backend, reverse):
    options = dict(chunk_size=L, config=TILES, backend=backend, reverse=reverse)
    run = functools.partial(chunkwise, **options)
    run = reversed_in_time(run, None) if reverse else run
    return jax.jit(lambda x: run(**x))


@pytest.mark.parametrize("name", [*"qkvif", "i=inf"])
@pytest.mark.parametrize(
    ("backend", "reverse"),
    [
        ("xla", False),
        ("interpret", True),
        pytest.param("triton", False, marks=pytest.mark.gpu),
    ],
)
def test_a_nan_reaches_no_other_head_and_no_earlier_step(backend, reverse, name):
    """In q it reaches its own step only; in v its own column, where 0 times NaN spares no earlier
    step of its chunk, see mlstm_chunkwise. An inf in i may reach its whole chunk, too."""
    name, _, value = name.partition("=")
    x = np.array(INPUTS[name])
    x[BATCH, HEAD, STEP, COLUMN if name in "qkv" else ...] = float(value or "nan")

    def of_others(results):
        h, (c, n, _) = results
        return [y[OTHERS] for y in (h, c, n)]

    results = check_isolated(jitted(backend, reverse), INPUTS, INPUTS | {name: x}, of_others)
    expected, h = (np.array(h[BATCH, HEAD]) for h, _ in results)
    reached = {"q": np.s_[STEP], "v": np.s_[STEP:, COLUMN]}.get(name, np.s_[STEP:])
    assert np.isnan(h[reached]).all()
    of_chunk = STEP // L * L
    may_be = np.s_[of_chunk:, COLUMN] if name == "v" else np.s_[of_chunk:] if value else reached
    h[may_be] = expected[may_be]
    # A NaN in k or in a gate changes how other steps of its chunk are rounded.
    assert_close(h, expected, 0.0 if name in "qv" else tolerance("float32", S + 16))


def steps(*x, backend):
    """mlstm_recurrent_step, token by token."""
    h, *states = engine.steps(None, x[:5], x[5:], backend=backend)
    return h, states


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "backend"),
    [
        (chunkwise, "xla"),
        (chunkwise, "interpret"),
        pytest.param(chunkwise, "triton", marks=pytest.mark.gpu),
        (steps, "xla"),
        (steps, "interpret"),
        pytest.param(steps, "triton", marks=pytest.mark.gpu),
        (reference.recurrence, None),
    ],
)
def test_a_nan_in_an_initial_state_reaches_all_of_its_head(function, backend):
    """In n and m all steps and all gradients, though no product of q, k and v has it; in c all
    steps of its column alone. Each is in a head of its own, beside one without."""
    run = functools.partial(function, backend=backend) if backend else function
    if function is not steps or backend == "xla":  # it has derivatives
        run = results_of(run)
    x = random_inputs(2, B, NH, 32, 16, 16)
    of_c, of_n, of_m, clean = itertools.product(range(B), range(NH))
    places = dict(c_initial=(*of_c, 5, COLUMN), n_initial=(*of_n, 5), m_initial=of_m)
    poisoned = x | {name: x[name].at[place].set(np.nan) for name, place in places.items()}

    def h_and_gradients(x):
        h, _, _, _, *gradients = jax.tree.leaves(run(*x.values()))
        return h, *gradients

    def unaffected(results):
        return [y[clean] for y in results], np.delete(results[0][of_c], COLUMN, axis=-1)

    _, reached = check_isolated(h_and_gradients, x, poisoned, unaffected)
    assert np.isnan(reached[0][*of_c, ..., COLUMN]).all()
    assert all(np.isnan(y[place]).all() for y in reached for place in (of_n, of_m))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_checks_of_jax_are_silent(backend):
    """jax_debug_nans: resets, masked input gates, padded steps, skipped chunks, no NaN on the way.

    In one jit only what comes out is checked.
    """
    x, lengths = random_inputs(1, 2, 2, 20, 12, 20, resets=True).values(), np.array([20, 1])
    call = functools.partial(chunkwise, chunk_size=16, backend=backend, sequence_lengths=lengths)
    gradient = jax.grad(lambda *x: loss_of(*call(*x)), tuple(range(8)))
    with jax.debug_nans(True), jax.enable_checks(True):
        for f in (gradient, jax.jit(gradient)) if backend == "xla" else (gradient,):
            assert all(jnp.isfinite(y).all() for y in jax.tree.leaves(f(*x)))
