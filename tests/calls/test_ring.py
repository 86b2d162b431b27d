"""Steps with a ring buffer against the recurrence in float64; drafts; flushes."""

import functools
import math
import re
from typing import NamedTuple

import compile_report
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_checks import restabilised
from oracle import (
    BACKENDS,
    NAMES,
    assert_close,
    assert_same_bits,
    compare,
    error,
    in_float64,
    in_layout,
    joined_arrays,
    loss_of,
    lowered_for_cuda,
    oracle,
    param,
    random_inputs,
    refusal,
    refused,
    swapped,
    tolerance,
)

from mlstm_pallas import (
    KernelConfig,
    RingStates,
    mlstm_recurrent_sequence,
    mlstm_recurrent_step,
    mlstm_ring_flush,
    mlstm_ring_states,
    mlstm_ring_step,
)

TOKEN, INITIAL = NAMES[:5], NAMES[5:]


def tokens_of(x, start=0, end=None):
    return [x[name][:, :, start:end] for name in TOKEN]


def ring_of(x, *, state_dtype=None, **options):
    c, n, *m = (x[name] for name in INITIAL if name in x)
    options = dict(dtype=x["q"].dtype, length=8) | options
    return mlstm_ring_states(c.astype(state_dtype or c.dtype), n, *(m or [None]), **options)


def generate(x, states, run, T, seed=0):
    """Calls run(tokens, states, accepted) with T tokens until all of x are accepted.

    The number accepted is random per entry and call. Other drafts are noise.

    Returns:
      h, (B, NH, S, DHV), the states and the number accepted of the last call.
    """
    draw, arrays = np.random.default_rng(seed), [np.asarray(swapped(y)) for y in tokens_of(x)]
    (B, S, *_), accepted = arrays[0].shape, None
    h, at = np.zeros(arrays[2].shape, "float32"), np.zeros(B, int)
    while (at < S).any():
        count = np.minimum(draw.integers(T == 1, T + 1, size=B), S - at)
        drafts = [draw.normal(size=(B, T, *y.shape[2:])).astype(y.dtype) for y in arrays]
        b, t = np.nonzero(np.arange(T) < count[:, None])
        for y, z in zip(drafts, arrays, strict=True):
            y[b, t] = z[b, at[b] + t]
        new, states = run([*map(swapped, drafts)], states, accepted)
        h[b, at[b] + t] = np.asarray(swapped(new))[b, t]
        at, accepted = at + count, count
    return swapped(h), states, accepted


def runner_of(*, layout="BNTH", slots=None, joined=False, **options):
    """A jitted call for ``generate``; one token has no axis T."""

    @jax.jit
    def run(drafts, states, accepted):
        one = drafts[0].shape[2] == 1
        drafts = in_layout(layout, TOKEN, drafts)
        if one:
            drafts = [y[:, :, 0] for y in drafts]
        if joined:
            drafts = joined_arrays(*drafts)
        h, states = mlstm_ring_step(
            *drafts, states, accepted=accepted, layout=layout, slots=slots, **options
        )
        return (h[:, :, None] if one else in_layout(layout, "h", [h])[0]), states

    return run


SMALL = KernelConfig(triton_ring_step=dict(siz_b_DHQK=16, siz_b_DHHV=16))


# T, then options.
CASES = [
    param(1, dtype="float32", heads=(80, 37)),
    param(3, dtype="bfloat16"),
    param(4, dtype="float32", gate="sigmoid"),
    param(4, dtype="float32", gate="sigmoid", normalize=False),
    param(3, dtype="bfloat16", state_dtype="bfloat16", length=16),
    param(3, dtype="float16", state_dtype="float16", layout="BTNH"),
    param(2, dtype="float32", slots=True),
    param(1, dtype="float32", heads=(80, 37), joined=True),
    param(3, dtype="bfloat16", gate="sigmoid", layout="BTNH", joined=True, slots=True),
]


@pytest.mark.quick('1 dtype="float32", heads=(80, 37)')
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("T", "options"), CASES)
def test_calls_are_the_recurrence(backend, T, options):
    """Odd head sizes, with resets and masked tokens at any place of the ring."""
    check_calls(T, backend, SMALL, **options)


def check_calls(
    T, backend, config=None, *, dtype, gate="exp", normalize=True, slots=False, heads=(40, 37),
    S=25, f_shift=2.0, state_dtype=None, length=8, layout="BNTH", joined=False,
):  # fmt: skip
    recipe = dict(resets=True, f_shift=f_shift, m_initial=gate == "exp")
    x = random_inputs(3, 3, 2, S, *heads, dtype=dtype, **recipe)
    options = dict(normalize=normalize)
    states = ring_of(x, state_dtype=state_dtype, length=length, input_gate=gate)
    index = np.array([4, 0, 2], "int32") if slots else None
    if slots:
        states = jax.tree.map(lambda y: y[np.array([1, 0, 2, 0, 0])], states)
    options |= dict(backend=backend, config=config)
    run = runner_of(layout=layout, slots=index, joined=joined, **options)
    h, states, accepted = generate(x, states, run, T)
    if slots:
        states = jax.tree.map(lambda y: y[index], states)
    expected_h, *expected = oracle(x, input_gate=gate, normalize=normalize)
    bound = max(tolerance(dtype, heads[0]), tolerance(state_dtype or "float32", heads[0]))
    assert_close(h, expected_h, bound, "h")
    last = mlstm_ring_flush(states, accepted=accepted)
    compare("cn", restabilised(last, expected[2]), expected[:2], bound)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_that_are_taken_back_leave_no_bit(backend):
    """The same tokens in calls that accept others have the bits of the same states."""
    x = random_inputs(4, 2, 2, 30, 16, 24, resets=True)
    results = []
    for T, seed in [(4, 0), (4, 1), (1, 2)] if backend != "xla" else [(4, 0), (4, 1)]:
        _, states, accepted = generate(x, ring_of(x), runner_of(backend=backend), T, seed)
        results.append(mlstm_ring_flush(states, accepted=accepted))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.quick("3-1-8")
@pytest.mark.parametrize(("B", "NH", "L"), [(4, 4, 8), (1, 8, 16), (3, 1, 8)])
def test_flushes_are_spread_over_steps(B, NH, L):
    x = random_inputs(5, B, NH, 2 * L, 4, 4)
    states, run, flushes = ring_of(x, length=L), runner_of(backend="xla"), []
    for t in range(2 * L):
        before = states.start
        _, states = run(tokens_of(x, t, t + 1), states, None)
        flushes.append(int(np.sum(states.start != before)))
    assert max(flushes) <= -(-B * NH // L)
    assert sum(flushes[L:]) == B * NH


def test_a_full_ring_resumes():
    x = random_inputs(6, 1, 1, 12, 8, 8)
    states, run = ring_of(x, phase=0), runner_of(backend="xla")
    for t in range(8):
        _, states = run(tokens_of(x, t, t + 1), states, None)
    assert np.all(states.fill + states.pending == 8)
    stored = jax.tree.map(np.asarray, states)
    first = {name: y if name in INITIAL else y[:, :, :8] for name, y in x.items()}
    assert_close(mlstm_ring_flush(stored)[0], oracle(first)[1], 1e-6)
    h, _ = runner_of(backend="xla")(tokens_of(x, 8), stored, np.array([1]))
    assert_close(h, oracle(x)[0][:, :, 8:], 1e-6)


@pytest.mark.quick("xla")
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_accepted_tokens_than_are_pending_are_these(backend):
    """In a step and in a flush; before the first call none is pending."""
    x, run, most = random_inputs(10, 2, 2, 4, 8, 8), runner_of(backend=backend), np.int8([127, 3])
    states = ring_of(x)
    for start, pending in (0, 0), (2, 2):
        tokens, as_many = tokens_of(x, start, start + 2), np.full(2, pending, "int8")
        result, expected = (run(tokens, states, accepted) for accepted in (most, as_many))
        assert_same_bits(result, expected)
        states = result[1]
    assert_same_bits(*(mlstm_ring_flush(states, accepted=y) for y in (most, as_many)))


@pytest.mark.quick("interpret")
@pytest.mark.parametrize("backend", BACKENDS)
def test_entries_without_a_row(backend):
    """Their h is 0 whatever they are; rows without an entry keep their bits."""
    x = random_inputs(7, 3, 2, 2, 16, 24)
    pools = jax.tree.map(lambda y: jnp.concatenate([y, y]), ring_of(x))
    tokens = [*map(np.array, tokens_of(x))]
    for y in tokens:
        y[1] = np.nan
    slots = np.array([5, -1, 1], "int8")
    h, after = runner_of(slots=slots, backend=backend)(tokens, pools, None)
    assert not h[1].any()
    assert np.isfinite(h).all()
    unused = np.array([0, 2, 3, 4])
    assert_same_bits(*(jax.tree.map(lambda y: y[unused], tree) for tree in (after, pools)))
    assert np.all(after.pending[slots[[0, 2]]] == 2)


@pytest.mark.slow
def test_gradients_through_xla():
    """They are those of mlstm_recurrent_sequence, through flushes and drafts."""
    x = random_inputs(8, 2, 2, 12, 16, 8, f_shift=1.0)

    def of_ring(x):
        states, h = ring_of(x), []
        for t in range(0, 12, 4):
            new, states = mlstm_ring_step(*tokens_of(x, t, t + 4), states, backend="xla")
            h.append(new)
        return loss_of(jnp.concatenate(h, axis=2), mlstm_ring_flush(states)[:2])

    def of_sequence(x):
        h, (c, n, _) = mlstm_recurrent_sequence(*(x[name] for name in NAMES), backend="xla")
        return loss_of(h, (c, n))

    result, expected = jax.jit(jax.grad(of_ring))(x), jax.jit(jax.grad(of_sequence))(x)
    for name, y in expected.items():
        assert_close(result[name], y, 1e-4, name)


@pytest.mark.parametrize("joined", [False, True])
def test_a_step_updates_the_states_in_place(joined):
    """It is two launches, and nothing is sliced."""
    x = random_inputs(11, 2, 2, 1, 32, 48, dtype="bfloat16")
    run = functools.partial(mlstm_ring_step, backend="triton")
    tokens = [x[name][:, :, 0] for name in TOKEN]
    tokens = joined_arrays(*tokens) if joined else tokens
    text = lowered_for_cuda(jax.jit(run), *tokens, ring_of(x))
    calls = [line for line in text.splitlines() if "custom_call @__gpu" in line]
    assert len(calls) == 2
    assert sum(line.count("operand_index") for line in calls) == 10
    assert not {"concatenate", "slice"} & {*re.findall(r"stablehlo\.(\w+)", text)}


@pytest.mark.slow
def test_mapped_and_exported():
    x = random_inputs(12, 3, 2, 2, 16, 16)
    operands = *tokens_of(x), ring_of(x)
    run, plain = (
        jax.jit(functools.partial(mlstm_ring_step, backend=y)) for y in ("interpret", "xla")
    )
    expected = run(*operands)
    mapped = jax.jit(jax.vmap(run))(*jax.tree.map(lambda y: y[:, None], operands))
    for y, z in zip(*map(jax.tree.leaves, (mapped, expected)), strict=True):
        assert_close(y[:, 0], z, 1e-6)
    exported = jax.export.export(plain)(*operands)
    assert_close(exported.call(*operands)[0], expected[0], 1e-6)


@pytest.mark.parametrize("pooled", [False, True], ids=["states", "slots"])
@pytest.mark.parametrize("step", [mlstm_recurrent_step, mlstm_ring_step])
def test_vmap_joins_its_axis_to_the_batch_unless_there_are_slots(step, pooled):
    """One launch of all mapped elements, or a loop over them, as the docstring says."""
    B, NH, D = 2, 2, 16
    rows, gates = jnp.zeros((B, NH, D)), jnp.zeros((B, NH))
    states = jnp.zeros((B, NH, D, D)), rows, gates
    if step is mlstm_ring_step:
        states = [mlstm_ring_states(*states, dtype=rows.dtype)]
    slots = jnp.arange(B) if pooled else None

    def run(states, slots):
        return step(rows, rows, rows, gates, gates, *states, slots=slots, backend="interpret")

    def launched(run, *operands):
        """How many instances of a kernel each launch has, and the loops, also in kernels."""
        jaxpr = jax.make_jaxpr(run)(*operands).jaxpr
        launches = compile_report.equations(jaxpr, "pallas_call")
        loops = [y for x in ("scan", "while") for y in compile_report.equations(jaxpr, x)]
        return [math.prod(x.params["grid_mapping"].grid) for x in launches], len(loops)

    alone, loops = launched(run, states, slots)
    operands = jax.tree.map(lambda x: jnp.stack([x] * 3), (states, slots))
    expected = (alone, loops + 1) if pooled else ([3 * n for n in alone], loops)
    assert launched(jax.vmap(run), *operands) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forget", "S"),
    [(6.0, 1024), (10.0, 1024), *((forget, 8192) for forget in (0.0, 4.0, 6.0, 10.0))],
)
def test_16_bits_round_less_often(forget, S):
    """h of the last tokens has a smaller error than that of steps that round C at every token."""
    x = random_inputs(13, 1, 2, S, 32, 16, f_shift=forget)
    x |= {name: 0 * x[name] for name in INITIAL}
    ring, expected = ring_of(x, state_dtype="bfloat16", length=16), oracle(x)[0]
    steps = [jnp.moveaxis(y, 2, 0) for y in tokens_of(x)]

    def of_ring(states, token):
        return mlstm_ring_step(*token, states, backend="xla")[::-1]

    def of_steps(states, token):
        return mlstm_recurrent_step(*token, *states, backend="xla")[::-1]

    def error_of(step, states):
        h = jax.jit(lambda states: jax.lax.scan(step, states, steps)[1])(states)
        return error(jnp.moveaxis(h, 0, 2)[:, :, -64:], expected[:, :, -64:])

    plain = ring.c, ring.n, ring.m
    assert error_of(of_ring, ring) < 0.7 * error_of(of_steps, plain)


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 4])
def test_10000_tokens(T):
    check_calls(T, "xla", dtype="float32", S=10_000, f_shift=4.0, length=16)


@pytest.mark.slow
def test_float64():
    x = random_inputs(15, 1, 2, 4, 16, 8)

    def run(x):
        return mlstm_ring_step(*tokens_of(x), ring_of(x), backend="xla")[0]

    assert_close(in_float64(run, x), oracle(x)[0], 1e-13)


class Arguments(NamedTuple):
    inputs: dict[str, jax.Array]
    tokens: list[jax.Array]
    states: RingStates
    first: list[jax.Array]  # two tokens


MESSAGES = [
    refusal(
        ValueError,
        "q has 5 tokens, expected at most 4, half the ring's length 8",
        lambda x: mlstm_ring_step(*x.tokens, x.states),
    ),
    refusal(
        TypeError,
        "states has type tuple, expected RingStates alone: mlstm_ring_states(c, n, m, "
        "dtype=q.dtype) makes them, and keeps the input gate",
        lambda x: mlstm_ring_step(*x.first, tuple(x.states)),
    ),
    refusal(
        ValueError,
        (
            "states.n has shape (2, 2, 15), expected (B, NH, DHQK) = (2, 2, 16), as states.c has "
            "shape (2, 2, 16, 8)"
        ),
        lambda x: mlstm_ring_flush(x.states._replace(n=x.states.n[..., 1:])),
    ),
    refusal(
        TypeError,
        "k has dtype float32, expected bfloat16, that of the ring",
        lambda x: mlstm_ring_step(*x.first, ring_of(x.inputs, dtype="bfloat16")),
    ),
    refusal(
        ValueError,
        "k is None, expected v and f None too, q with q, k and v on its last axis, (..., "
        "2 * DHQK + DHV or more), i (..., 2) and the states; the shapes of q, i and c are "
        "(2, 2, 2, 16), (2, 2, 2) and (2, 2, 16, 8)",
        lambda x: mlstm_ring_step(x.first[0], None, None, x.first[3], None, x.states),
    ),
    refusal(
        ValueError,
        "accepted has shape (3,), expected (B,) = (2,), as q has shape (2, 2, 2, 16)",
        lambda x: mlstm_ring_step(*x.first, x.states, accepted=np.zeros(3, int)),
    ),
    refusal(
        ValueError,
        "slots[1] is 1, expected -1 for none, or a row below P = 2 that no entry before it has",
        lambda x: mlstm_ring_step(*x.first, x.states, slots=np.array([1, 1])),
    ),
    refusal(
        TypeError,
        "accepted has dtype float64, expected an integer dtype",
        lambda x: mlstm_ring_step(*x.first, x.states, accepted=np.zeros(2)),
    ),
    refusal(
        ValueError,
        "length is 12, expected a power of two from 8 to 64",
        lambda x: ring_of(x.inputs, length=12),
    ),
    refusal(
        TypeError,
        "states.fill has dtype float32, expected int32",
        lambda x: mlstm_ring_step(*x.first, x.states._replace(fill=x.states.m)),
    ),
    refusal(
        TypeError,
        "states.start has dtype float32, expected int32",
        lambda x: mlstm_ring_flush(x.states._replace(start=x.states.m)),
    ),
    refusal(
        ValueError,
        "m has values other than 0 with input_gate 'sigmoid', expected None or zeros",
        lambda x: ring_of(x.inputs, input_gate="sigmoid"),
    ),
]


@pytest.mark.parametrize(("kind", "message", "call"), MESSAGES)
def test_messages(kind, message, call):
    x = random_inputs(16, 2, 2, 5, 16, 8)
    refused(kind, message, call, Arguments(x, tokens_of(x), ring_of(x), tokens_of(x, 0, 2)))
