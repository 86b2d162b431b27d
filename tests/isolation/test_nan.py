"""Where a NaN goes: to its own batch element and head, to later steps only; and JAX's NaN checks
pass for good inputs. test_packed_sequences has NaN in segments, test_ring_states in drafts."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_checks import reversed_in_time
from oracle import (
    BACKENDS,
    assert_close,
    assert_same_bits,
    check_isolated,
    loss_of,
    random_inputs,
    results_of,
    tolerance,
)

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_recurrent_sequence,
    mlstm_recurrent_step,
    reference,
)

B, NH, S, L = 2, 2, 64, 32
BATCH, HEAD, COLUMN = 1, 0, 3
STEP = 37  # inside the second chunk, inside a tile
OTHERS = np.array([[True, True], [False, True]])  # the other heads
TILES = KernelConfig(
    triton_parallel_fw_H=dict(
        siz_b_LQ=16, siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=16, keep_q=False
    ),
)


INPUTS = random_inputs(0, B, NH, S, 16, 16, resets=True)


chunkwise = functools.partial(mlstm_chunkwise, return_last_states=True)


@functools.cache
def jitted(backend, reverse):
    options = dict(chunk_size=L, config=TILES, backend=backend, reverse=reverse)
    run = functools.partial(chunkwise, **options)
    run = reversed_in_time(run, None) if reverse else run
    return jax.jit(lambda x: run(**x))


@pytest.mark.quick("xla-False", "interpret-True")
@pytest.mark.parametrize("name", [*"qkvif", "i=inf"])
@pytest.mark.parametrize(
    ("backend", "reverse"),
    [
        *((backend, reverse) for backend in ("xla", "interpret") for reverse in (False, True)),
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


@pytest.mark.quick("mlstm_recurrent_sequence-xla", "recurrence")
@pytest.mark.parametrize(
    ("function", "backend"),
    [
        (chunkwise, "xla"),
        (chunkwise, "interpret"),
        pytest.param(chunkwise, "triton", marks=pytest.mark.gpu),
        (mlstm_recurrent_sequence, "xla"),
        (mlstm_recurrent_sequence, "interpret"),
        pytest.param(mlstm_recurrent_sequence, "triton", marks=pytest.mark.gpu),
        (reference.recurrence, None),
    ],
)
def test_a_nan_in_an_initial_state_reaches_all_of_its_head(function, backend):
    """In n and m all steps and all gradients, though no product of q, k and v has it; in c all
    steps of its column alone. Each is in a head of its own, beside one without."""
    run = functools.partial(function, backend=backend) if backend else function
    if function is not mlstm_recurrent_sequence or backend == "xla":  # it has derivatives
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
    """Resets, masked input gates, padded steps and columns, skipped chunks: no NaN on the way.

    In one jit only what comes out is checked.
    """
    x, lengths = random_inputs(1, 2, 2, 20, 12, 20, resets=True).values(), np.array([20, 1])
    call = functools.partial(chunkwise, chunk_size=16, backend=backend, sequence_lengths=lengths)
    gradient = jax.grad(lambda *x: loss_of(*call(*x)), tuple(range(8)))
    with jax.debug_nans(True), jax.enable_checks(True):
        for f in (gradient, jax.jit(gradient)) if backend == "xla" else (gradient,):
            assert all(jnp.isfinite(y).all() for y in jax.tree.leaves(f(*x)))


# ---------------- the request before

# One batch entry for each: a state, or an array of the token before the reset, that is not finite.
BAD = np.nan, np.inf, -np.inf
FORMER = [*itertools.product(("c_initial", "n_initial", "m_initial", *"qkvif"), BAD)]


@functools.cache
def steps_of(backend, gate, pooled, tokens):
    """A jitted function of arrays by name: h from the reset on and the rows of the states."""
    slots = np.random.default_rng(0).permutation(len(FORMER)) if pooled else None
    options = dict(input_gate=gate, backend=backend, slots=slots)

    def run(x):
        if pooled:
            x = x | {name: y[np.argsort(slots)] for name, y in x.items() if "initial" in name}
        if tokens == 1:
            x = {name: y if "initial" in name else y[:, :, 0] for name, y in x.items()}
            h, states = mlstm_recurrent_step(**x, **options)
        else:
            h, states = mlstm_recurrent_sequence(**x, layout="BNTH", **options)
            h = h[:, :, 1:]
        return h, [y[slots] for y in states] if pooled else states

    return jax.jit(run)


@pytest.mark.quick("interpret-step-exp-pools", "interpret-sequence-exp-states", "xla")
@pytest.mark.parametrize("pooled", [False, True], ids=["states", "pools"])
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("tokens", [1, 3], ids=["step", "sequence"])
@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_nothing_of_a_former_request_passes_a_reset(backend, tokens, gate, pooled):
    """f = -inf leaves the former states out, whatever they are. A sequence resets at its second
    step."""
    names = (*"qkvif", "c_initial", "n_initial", *["m_initial"] * (gate == "exp"))
    drawn = random_inputs(3, len(FORMER), 2, tokens, 8, 8)
    run, results = steps_of(backend, gate, pooled, tokens), []
    for poisoned in False, True:
        x = {name: np.array(drawn[name]) for name in names}
        x["f"][:, :, int(tokens > 1)] = -np.inf
        for b, (name, value) in enumerate(FORMER):
            if name in x and ("initial" in name or tokens > 1):
                x[name][(b, 0) if "initial" in name else (b, 0, 0)] = value if poisoned else 2.0
        results.append(run(x))
    assert_same_bits(*results)
    assert all(np.isfinite(y).all() for y in jax.tree.leaves(results))
