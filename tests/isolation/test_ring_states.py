"""What ring states must not show: rejected drafts, the request that had the row before, the dtype
of m; phases, gates, warnings, argument errors and exports. test_ring.py has the numbers."""

import functools
import itertools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_checks import restabilised
from oracle import (
    NAMES,
    assert_close,
    assert_same_bits,
    oracle,
    random_inputs,
    refused,
    tolerance,
)

from mlstm_pallas import (
    mlstm_recurrent_sequence,
    mlstm_recurrent_step,
    mlstm_ring_flush,
    mlstm_ring_states,
    mlstm_ring_step,
)
from mlstm_pallas.export import export

BACKENDS = "xla", "interpret"
TOKEN = NAMES[:5]
BAD = np.nan, np.inf, -np.inf
# One batch entry for each: all entries of a call are compiled once.
FORMER = [*itertools.product(("c", "n", "m", "k", "v", "i", "f"), BAD)]
REJECTED = [*itertools.islice(itertools.cycle(itertools.product("qkvif", BAD)), len(FORMER))]
B, NH, D = len(FORMER), 2, 8


@functools.cache
def step_of(backend):
    """The jitted step, shared by the tests, which take arrays of the same shapes."""
    return jax.jit(functools.partial(mlstm_ring_step, backend=backend))


flush = jax.jit(mlstm_ring_flush)


def drawn_tokens(seed, T):
    """q, k, v, i, f of T tokens, as NumPy arrays that may be written; a single one has no axis."""
    x = random_inputs(seed, B, NH, T, D, D)
    x = {name: np.array(x[name]) for name in TOKEN}
    return {name: y[:, :, 0] for name, y in x.items()} if T == 1 else x


def drawn_states(seed, length, gate="exp", **options):
    x = random_inputs(seed, B, NH, 1, D, D)
    c, n, m = (x[name] for name in NAMES[5:])
    options = dict(dtype="float32", length=length, input_gate=gate) | options
    return mlstm_ring_states(c, n, m if gate == "exp" else None, **options)


def all_finite(tree):
    return all(np.isfinite(y).all() for y in jax.tree.leaves(tree))


# ---------------- rejected drafts


def rejecting(backend, length, poisoned):
    """Calls of 4 drafts and of a single one, of which random numbers are accepted, until every head
    has flushed twice. Of head 0 the rejected drafts are noise, or what REJECTED has for the entry.

    Returns:
      h of the accepted tokens and of head 1, and flushed states, of all calls; how often each
      combination of tokens and flushes was there.
    """
    states, seen, flushes = drawn_states(1, length, phase=np.arange(B)), [], set()
    accepted, draw = np.zeros(B, "int32"), np.random.default_rng(2)
    while True:
        T = 4 if len(seen) % 3 else 1
        x, noise = (drawn_tokens(10 + len(seen) + 1000 * z, T) for z in (False, poisoned))
        count = draw.integers(T + 1, size=B).astype("int32")
        for b, (name, value) in enumerate(REJECTED):
            if T > 1:
                for each in TOKEN:
                    x[each][b, 0, count[b] :] = noise[each][b, 0, count[b] :]
                if poisoned:
                    x[name][b, 0, count[b] :] = value
            elif not count[b]:
                for each in TOKEN:
                    x[each][b, 0] = noise[each][b, 0]
                if poisoned:
                    x[name][b, 0] = value
        before, rejected = states.start, accepted < states.pending[:, 0]
        h, states = step_of(backend)(*x.values(), states, accepted=accepted)
        flushes |= {(T, bool(y)) for y in ((before != states.start) & rejected[:, None]).ravel()}
        h, accepted = np.array(h).reshape(B, NH, T, D), count
        of_head_0 = [h[b, 0, : count[b]] for b in range(B)]
        seen.append((of_head_0, h[:, 1], flush(states, accepted=accepted)))
        if len(seen) == 3 * length:
            assert flushes == {(1, True), (1, False), (4, True), (4, False)}
            return seen


@pytest.mark.quick("xla-8")
@pytest.mark.parametrize("length", [8, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rejected_drafts_of_nan_and_inf_leave_no_bit(backend, length):
    """Neither in h of the accepted drafts of their call and of the other head, nor in what later
    calls and flushes return, at any fill and wherever the ring wraps around."""
    clean, poisoned = (rejecting(backend, length, x) for x in (False, True))
    assert all_finite(clean)
    assert_same_bits(poisoned, clean)


# ---------------- the request before


def after_a_reset(backend, gate, T, reset_at, poisoned, slots=None):
    """h from a reset on, and the flushed states 40 tokens later. The tokens and states before it
    hold, in head 0, a finite number or what FORMER has for the entry."""
    step = functools.partial(step_of(backend), slots=slots)
    states, former = drawn_states(3, 8, gate, phase=np.arange(B)), drawn_tokens(4, 4)
    x = drawn_tokens(5, T)
    fields = {name: np.array(y) for name, y in states._asdict().items() if y is not None}
    for b, (name, value) in enumerate(FORMER):
        value = value if poisoned else 1.5
        if name in former:
            former[name][b, 0, 1] = value
            if T > 1:
                x[name][b, 0, :reset_at] = value
        elif name in fields:
            fields[name][b, 0] = value
    x["f"][(..., reset_at) if T > 1 else ...] = -np.inf
    states = states._replace(**{name: jnp.asarray(y) for name, y in fields.items()})
    if slots is not None:
        states = jax.tree.map(lambda y: y[np.argsort(slots)], states)
    _, states = step(*former.values(), states, accepted=np.zeros(B, "int32"))
    h, states = step(*x.values(), states, accepted=np.full(B, 4))
    results = [h[:, :, reset_at:] if T > 1 else h]
    for n in range(40 // T):
        h, states = step(*drawn_tokens(6 + n, T).values(), states, accepted=np.full(B, T))
        results.append(h)
    rows = states if slots is None else jax.tree.map(lambda y: y[slots], states)
    return results, flush(rows, accepted=np.full(B, T))


PLACES = (1, 0, False), (4, 0, False), (4, 2, False), (1, 0, True)


@pytest.mark.quick("xla-exp")
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_of_a_former_request_passes_a_reset(backend, gate):
    """Its NaN and inf neither reach the first token nor one 40 tokens later, also in pools."""
    for T, reset_at, pooled in PLACES:
        if pooled and gate == "sigmoid":
            continue
        slots = np.random.default_rng(0).permutation(B) if pooled else None
        clean, poisoned = (
            after_a_reset(backend, gate, T, reset_at, x, slots) for x in (False, True)
        )
        assert all_finite(clean)
        assert_same_bits(poisoned, clean)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_fresh_rows_in_a_used_pool_are_those_of_a_fresh_pool(backend):
    """Whatever was there before, and at any number of pending tokens."""
    used = drawn_states(7, 8)
    for n in range(3):
        tokens = drawn_tokens(n, 4)
        _, used = step_of(backend)(*tokens.values(), used, accepted=np.arange(B) % 5)
    used = jax.tree.map(lambda y: y if y.dtype == "int32" else y * jnp.nan, used)
    rows = np.arange(0, B, 2)
    fresh = drawn_states(8, 8, phase=np.arange(B))
    pools = jax.tree.map(lambda pool, y: pool.at[rows].set(y[rows]), used, fresh)
    accepted = np.full(B, 4)  # none of them is pending in a new row
    for n, T in enumerate((1, 4, 4, 1, 4)):
        tokens = drawn_tokens(20 + n, T).values()
        h, pools = step_of(backend)(*tokens, pools, accepted=accepted)
        expected, fresh = step_of(backend)(*tokens, fresh, accepted=accepted)
        assert_same_bits(h[rows], expected[rows])
    assert all_finite(h[rows])
    assert_same_bits(*(jax.tree.map(lambda y: y[rows], x) for x in (pools, fresh)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reset_that_is_taken_back_restores_the_former_states(backend):
    before, zeros = drawn_states(9, 8), np.zeros(B, "int32")
    for n in range(3):
        _, before = step_of(backend)(*drawn_tokens(n, 4).values(), before, accepted=zeros + 4)
    reset, token = drawn_tokens(4, 4), drawn_tokens(5, 1).values()
    reset["f"][:, :, 0] = -np.inf
    _, after = step_of(backend)(*reset.values(), before, accepted=zeros + 2)
    taken_back, _ = step_of(backend)(*token, after, accepted=zeros)
    expected, _ = step_of(backend)(*token, before, accepted=zeros + 2)
    # The call of the reset may have flushed, which rounds otherwise.
    assert_close(taken_back, expected, 1e-6)
    same = np.asarray(before.start == after.start)
    assert same.any()
    assert not same.all()
    assert_same_bits(*(np.asarray(y)[same] for y in (taken_back, expected)))


# ---------------- phases


@pytest.mark.quick("1-8", "67-16")
@pytest.mark.parametrize("length", [8, 16, 32, 64])
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 67])
def test_heads_and_entries_begin_at_their_phases(heads, length):
    phases = {
        "left out": (None, range(4)),
        "5": (5, [5] * 4),
        "200": (200, [200] * 4),
        "int64 scalar": (np.int64(7), [7] * 4),
        "int8": (np.array([0, 3, 127, 64], "int8"), [0, 3, 127, 64]),
        "uint8": (np.array([255, 1, 0, 9], "uint8"), [255, 1, 0, 9]),
        "uint32": (np.array([2**32 - 1, 2**31, 0, 5], "uint32"), [2**32 - 1, 2**31, 0, 5]),
        "int32 on a device": (jnp.array([2**31 - 1, 4, 4, 100]), [2**31 - 1, 4, 4, 100]),
    }
    c, n = jnp.zeros((4, heads, 1, 1)), jnp.zeros((4, heads, 1))
    for name, (phase, numbers) in phases.items():
        states = mlstm_ring_states(c, n, None, dtype="float32", length=length, phase=phase)
        expected = [[(h * length // heads + b) % length for h in range(heads)] for b in numbers]
        assert states.fill.dtype == "int32"
        assert np.array_equal(states.fill, expected), name
        assert not np.any(states.start)
        assert not np.any(states.pending)


# ---------------- dtypes of the states


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "of_c", "of_m"),
    [
        ("xla", "float32", "bfloat16"),
        ("xla", "float32", "float16"),
        ("xla", "bfloat16", "bfloat16"),
        ("interpret", "float32", "bfloat16"),
        ("interpret", "float16", "float16"),
    ],
)
def test_a_rounded_m_costs_no_digits(backend, of_c, of_m):
    """After flushes exp(m) C is as exact as the dtype of C is: C is scaled by the rounded m."""
    x, S = random_inputs(11, 2, 2, 24, 8, 8, i_scale=4.0), 24
    for name, dtype in zip(NAMES[5:], (of_c, of_c, of_m), strict=True):
        x[name] = x[name].astype(dtype)
    states = mlstm_ring_states(*(x[name] for name in NAMES[5:]), dtype="float32", length=8)
    hs = []
    for t in range(0, S, 4):
        tokens = (x[name][:, :, t : t + 4] for name in TOKEN)
        h, states = step_of(backend)(*tokens, states)
        hs.append(h)
    assert np.all(states.fill < 16)  # of 24 tokens and of phases up to 5
    expected_h, *expected = oracle(x)
    last = mlstm_ring_flush(states)
    assert [y.dtype for y in last] == [of_c, of_c, of_m]
    bound = 3 * tolerance(of_c, 8 + S)  # C is rounded at three flushes
    for name, y, z in zip("cn", restabilised(last, expected[2]), expected, strict=False):
        assert_close(y, z, bound, name)
    assert_close(jnp.concatenate(hs, axis=2), expected_h, bound, "h")


# ---------------- gates


@pytest.mark.parametrize("backend", BACKENDS)
def test_rings_hold_their_gate(backend):
    """Neither a step nor a flush needs to be told it; the results are those of plain steps."""
    x, zeros = random_inputs(12, B, NH, 12, D, D, m_initial=False), np.zeros(B, "int32")
    states, hs = drawn_states(3, 8, "sigmoid"), []
    options = dict(input_gate="sigmoid", layout="BNTH", backend="xla")
    expected_h, expected = mlstm_recurrent_sequence(
        *(x[name] for name in TOKEN), states.c, states.n, **options
    )
    for t in range(0, 12, 4):
        tokens = (x[name][:, :, t : t + 4] for name in TOKEN)
        h, states = step_of(backend)(*tokens, states, accepted=zeros + 4)
        hs.append(h)
    assert states.m is None
    c, n, m = flush(states, accepted=zeros + 4)
    bound = tolerance("float32", 12 + D)
    assert_close(jnp.concatenate(hs, axis=2), expected_h, bound, "h")
    assert_close(c, expected[0], bound, "c")
    assert_close(n, expected[1], bound, "n")
    assert (m.shape, m.dtype) == ((B, NH), "float32")
    assert not np.any(m)


def test_pools_of_two_gates_do_not_mix():
    pools = drawn_states(1, 8), drawn_states(1, 8, "sigmoid")
    for states in pools, pools[::-1]:
        with pytest.raises((TypeError, ValueError), match="None"):
            jax.tree.map(lambda pool, y: pool.at[:1].set(y[:1]), *states)


# ---------------- warnings


def shapes(heads, T, layout="BNTH", D=8):
    """q, k, v, i and f as shapes."""
    lead = (2, heads, T) if layout == "BNTH" else (2, T, heads)
    x, gate = jax.ShapeDtypeStruct((*lead, D), "float32"), jax.ShapeDtypeStruct(lead, "float32")
    return x, x, x, gate, gate


def ring_call(heads, *tokens, **options):
    c, n = jnp.zeros((2, heads, 8, 8)), jnp.zeros((2, heads, 8))
    states = mlstm_ring_states(c, n, None, dtype="float32")
    return jax.eval_shape(lambda *x: mlstm_ring_step(*x, states, backend="xla", **options), *tokens)


def sequence_call(heads, *tokens, **options):
    states = jnp.zeros((2, heads, 8, 8)), jnp.zeros((2, heads, 8)), jnp.zeros((2, heads))
    return jax.eval_shape(
        lambda *x: mlstm_recurrent_sequence(*x, *states, backend="xla", **options), *tokens
    )


@pytest.mark.quick("sequence")
@pytest.mark.parametrize("call", [ring_call, sequence_call], ids=["ring_step", "sequence"])
def test_as_many_tokens_as_heads_get_a_warning(call):
    """In both layouts such arrays have one shape. Where the shapes tell, none is given."""
    with pytest.warns(
        UserWarning, match='layout="BNTH", the default, reads q as .* S = NH'
    ) as said:
        call(8, *shapes(8, 8))
    assert {x.filename for x in said} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for layout in "BNTH", "BTNH":
            call(8, *shapes(8, 8, layout), layout=layout)
        for heads, T in (8, 7), (2, 8), (8, 1), (1, 1), (1, 4):
            call(heads, *shapes(heads, T))


# ---------------- argument errors


class Refused(NamedTuple):
    """What is said of wrong arguments of a function."""

    name: str
    kind: type[Exception]
    message: str
    call: Any


C, N, M = jnp.zeros((2, 2, 16, 8)), jnp.zeros((2, 2, 16)), jnp.zeros((2, 2))
new = functools.partial(mlstm_ring_states, C, N, M, dtype="float32")


def token_of(**dtypes):
    """A token whose arrays are float32 but for these."""
    sizes = dict(q=(16,), k=(16,), v=(8,), i=(), f=())
    return [jnp.zeros((2, 2, *y), dtypes.get(name, "float32")) for name, y in sizes.items()]


def rings_of_rows(count):
    """States made by hand, whose rings have so many rows."""
    states = new()
    rows = (jnp.zeros((2, 2, count, *y.shape[3:]), y.dtype) for y in states[3:7])
    return type(states)(*states[:3], *rows, *states[7:])


def with_slots(*slots):
    return mlstm_ring_step(*token_of(), new(), slots=np.array(slots))


PHASES = [
    Refused(
        f"phase-{phase}",
        ValueError,
        f"phase is {phase}, expected an integer from 0 to 2147483647 or an array (B,)",
        functools.partial(new, phase=phase),
    )
    for phase in (0.5, np.nan, True, 2**40, -1)
]
ROWS = "expected a power of two from 16 to 128"
ERRORS = [
    *PHASES,
    Refused(
        "phase-floats",
        TypeError,
        "phase has dtype float32, expected an integer dtype",
        lambda: new(phase=np.zeros(2, "float32")),
    ),
    Refused(
        "phase-shape",
        ValueError,
        "phase has shape (3,), expected (B,) = (2,)",
        lambda: new(phase=np.zeros(3, int)),
    ),
    Refused(
        "n-None",
        TypeError,
        "n has type NoneType, expected an array",
        lambda: mlstm_ring_states(C, None, None, dtype="float32"),
    ),
    Refused(
        "c-None",
        TypeError,
        "c has type NoneType, expected an array",
        lambda: mlstm_ring_states(None, N, M, dtype="float32"),
    ),
    Refused(
        "n-shape",
        ValueError,
        "n has shape (2, 2, 15), expected (B, NH, DHQK) = (2, 2, 16), as c has shape (2, 2, 16, 8)",
        lambda: mlstm_ring_states(C, N[..., 1:], M, dtype="float32"),
    ),
    Refused(
        "m-shape",
        ValueError,
        "m has shape (2, 1), expected (B, NH) = (2, 2), as c has shape (2, 2, 16, 8): repeat its "
        "heads, jnp.repeat(m, 2, axis=1)",
        lambda: mlstm_ring_states(C, N, M[:, 1:], dtype="float32"),
    ),
    Refused(
        "v-dtype",
        TypeError,
        "v has dtype float32, expected bfloat16, that of the ring",
        lambda: mlstm_ring_step(*token_of(), new()._replace(v=new().v.astype("bfloat16"))),
    ),
    Refused(
        "rows-24",
        ValueError,
        f"states.i.shape[2] is 24, {ROWS}",
        lambda: mlstm_ring_step(*token_of(), rings_of_rows(24)),
    ),
    Refused(
        "rows-8",
        ValueError,
        f"states.i.shape[2] is 8, {ROWS}",
        lambda: mlstm_ring_flush(rings_of_rows(8)),
    ),
    Refused(
        "rings-as-c",
        TypeError,
        "c_initial has type RingStates, expected an array",
        lambda: mlstm_recurrent_step(*token_of(), new()),
    ),
    Refused(
        "slots-twice",
        ValueError,
        "slots[1] is 0, expected -1 for none, or a row below P = 2 that no entry before it has",
        lambda: with_slots(0, 0),
    ),
]


@pytest.mark.parametrize("case", ERRORS, ids=[case.name for case in ERRORS])
def test_arguments_are_refused_by_name(case):
    refused(case.kind, case.message, case.call)


# ---------------- exports and checks


SLOTS = np.array([1, 0])


def pooled(slots, states, *token):
    return mlstm_ring_step(*token, states, slots=slots, backend="xla")


@pytest.mark.slow
def test_a_step_is_exported_with_its_states():
    """RingStates are serialised by their name."""
    operands = SLOTS, new(), *token_of()
    data = jax.export.export(jax.jit(pooled))(*operands).serialize()
    h, states = jax.export.deserialize(data).call(*operands)
    expected, after = jax.jit(pooled)(*operands)
    assert type(states) is type(after)
    assert_same_bits((h, states), (expected, after))
    sigmoid = new(input_gate="sigmoid")
    data = export(pooled, SLOTS, sigmoid, *token_of(), platform="cpu").serialize()
    assert jax.export.deserialize(data).call(SLOTS, sigmoid, *token_of())[1].m is None


@pytest.mark.parametrize("value", ["0", "", None, "1", "yes"])
def test_checks_are_on_if_the_variable_is_1(monkeypatch, value):
    """With 0 they are off, as without the variable: nothing calls the host, and exports work."""
    monkeypatch.setenv("MLSTM_PALLAS_CHECKS", value or "")
    if value is None:
        monkeypatch.delenv("MLSTM_PALLAS_CHECKS")
    operands = SLOTS, new(), *token_of()
    run = jax.jit(lambda *x: pooled(*x))
    if value == "yes":
        refused(ValueError, "MLSTM_PALLAS_CHECKS is 'yes', expected 0 or 1", run.lower, *operands)
        return
    assert ("callback" in run.lower(*operands).as_text()) == (value == "1")
    if value == "1":
        message = "MLSTM_PALLAS_CHECKS is 1, expected 0: its checks cannot be exported"
        refused(ValueError, message, export, run, *operands, platform="cpu")
    else:
        export(run, *operands, platform="cpu")
