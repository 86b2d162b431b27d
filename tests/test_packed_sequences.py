"""Packed sequences (segment_ids): each is computed as if it were alone. The states of each.

Their gradients: test_gradients.py, test_gradients_of_gates.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    NAMES,
    beyond,
    compare,
    in_float64,
    in_layout,
    oracle,
    random_inputs,
    recurrence_of_lengths,
    slow,
    tolerance,
)

from mlstm_pallas import mlstm_chunkwise, pack_lengths

S, L = 90, 32
STATES = NAMES[5:]


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_nothing_leaks_from_one_sequence_into_the_next(backend):
    """The first sequence is 1e15 times as large, and its forget gates are open: far below a very
    negative forget gate's leak."""
    inputs = random_inputs(1, 2, 2, S, 16, 32, f_shift=20.0)
    first = np.arange(S) < 40
    large = inputs | {
        "v": inputs["v"] * np.where(first, np.float32(1e15), 1)[:, None],
        "i": inputs["i"] + np.float32(60.0) * first,
    }
    options = dict(return_last_states=True, chunk_size=L, backend=backend)
    run = jax.jit(functools.partial(mlstm_chunkwise, **options))
    h, states = run(**large, segment_ids=np.stack([~first, 0 * first]))
    expected = oracle({name: inputs[name][:1, :, 40:] for name in "qkvif"})
    result = h[:1, :, 40:], *(y[:1] for y in states)
    compare("hcnm", result, expected, tolerance("float32", S))


def states_of_segments(x, count):
    """Other initial states, (B, count, NH, ...), of so many segments for each batch entry of x."""
    (B, NH, _, DHQK), DHHV = x["q"].shape, x["v"].shape[-1]
    drawn = random_inputs(5, B * count, NH, 1, DHQK, DHHV)
    return {name: drawn[name].reshape(B, count, *x[name].shape[1:]) for name in x if name in STATES}


def check_prompts(
    count, DHQK, DHHV, *, dtype="float32", layout="BNTH", go_on=False, rows=None, backend, **options
):
    """A prefill of packed prompts: h and the states of each prompt are those of the prompt alone in
    float64.

    One row has so many short prompts, the other a few, one of them in one chunk more.

    The first one of a row goes on from initial states; with go_on every prompt does. One more
    segment is asked for than there is: its states stay as they were. Beyond the prompts h is 0.
    """
    rows = rows or ([*np.random.default_rng(0).integers(1, 11, size=count)], [5, 40, 1])
    NH, (ids, ends) = 2, pack_lengths(rows, max(map(sum, rows)) + 4)
    sizes = np.diff(ends, axis=1, prepend=0)
    batch, number = np.nonzero(sizes)
    lengths, starts = sizes[batch, number], (ends - sizes)[batch, number]
    S, most = ids.shape[1], max(lengths)
    gate = {name: y for name, y in options.items() if name in ("input_gate", "normalize")}
    x = random_inputs(
        4, len(rows), NH, S, DHQK, DHHV, dtype=dtype, m_initial="input_gate" not in gate
    )
    if go_on:
        x |= states_of_segments(x, ends.shape[1] + 1)
    given = dict(zip(x, in_layout(layout, x, x.values()), strict=True))
    call = functools.partial(
        mlstm_chunkwise, segment_ids=ids, return_last_states=True, layout=layout, backend=backend
    )
    of_rows = dict(num_segments=ends.shape[1] + 1, sequence_lengths=ends[:, -1])
    h, states = jax.device_get(jax.jit(functools.partial(call, **of_rows, **options))(**given))
    h = np.swapaxes(h, 1, 2) if layout == "BTNH" else h
    for b, row in enumerate(rows):
        assert not np.any(h[b, :, sum(row) :])
        for y, name in zip(states, STATES, strict=True):
            before = given[name][b, len(row) :] if go_on and name in given else 0
            np.testing.assert_allclose(y[b, len(row) :], before + 0 * y[b, len(row) :], rtol=1e-6)

    steps = np.minimum(starts[:, None] + np.arange(most), S - 1)

    def of_prompts(y):
        """(prompts, NH, most, ...), with what is behind each prompt."""
        pairs = zip(np.asarray(y)[batch], steps, strict=True)
        return np.stack([of_row[:, t] for of_row, t in pairs])

    alone = {}
    for name, y in x.items():
        if name in "qkvif":
            alone[name] = of_prompts(y)
        elif go_on:
            alone[name] = y[batch, number]
        else:
            alone[name] = np.asarray(y)[batch]
            alone[name][number > 0] = 0
    recurrence = jax.jit(functools.partial(recurrence_of_lengths(lengths), **gate))
    expected = jax.tree.leaves(in_float64(lambda x: recurrence(**x), alone))
    h = np.where(beyond(lengths, expected[0]), 0, of_prompts(h))
    result = h, *(y[batch, number] for y in states)
    compare("hcnm", result, expected, tolerance(dtype, S + DHQK))


ODD, ODD_ON_A_GPU = ([1, 2, 31, 32, 33], [65]), ([1, 2, 63, 64, 65, 1000], [130])


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (30, dict(backend="interpret", layout="BTNH")),
        (9, dict(backend="xla", layout="BTNH", input_gate="sigmoid")),
        (9, dict(backend="xla", layout="BTNH", go_on=True)),
        (0, dict(backend="interpret", go_on=True, rows=ODD)),
        slow(9, dict(backend="interpret", dtype="bfloat16")),
    ],
    ids=["triton", "plain", "plain_go_on", "triton_go_on", "bfloat16"],
)
def test_prompts_are_read_at_once(count, options):
    check_prompts(count, 16, 32, chunk_size=L, **options)


@pytest.mark.parametrize(
    ("backend", "layout", "go_on"),
    [("xla", "BNTH", True), ("interpret", "BTNH", True), ("interpret", "BNTH", False)],
    ids=["plain", "triton", "first_segment"],
)
def test_a_vmap_of_packed_prompts_equals_the_calls_one_by_one(backend, layout, go_on):
    """Mapped over everything but k. Without go_on the initial states are the first segments'."""
    calls, B, NH, N = 2, 2, 2, 3
    x = random_inputs(6, calls * B, NH, S, 16, 16)
    if go_on:
        x |= states_of_segments(x, N)
    x = dict(zip(x, in_layout(layout, x, x.values()), strict=True))
    x = {name: y.reshape(calls, B, *y.shape[1:]) for name, y in x.items()} | dict(k=x["k"][:B])
    rows = [[5, 40, 30], [64, 1]], [[33], [10, 31, 32]]
    packed = [pack_lengths(lengths, S) for lengths in rows]
    ids, ends = np.stack([y for y, _ in packed]), np.stack([y[:, -1] for _, y in packed])

    def run(x, ids, lengths):
        options = dict(num_segments=N, sequence_lengths=lengths, return_last_states=True)
        return mlstm_chunkwise(
            **x, segment_ids=ids, layout=layout, chunk_size=L, backend=backend, **options
        )

    mapped = dict.fromkeys(x, 0) | dict(k=None)
    result = jax.jit(jax.vmap(run, (mapped, 0, 0)))(x, ids, ends)
    for n in range(calls):
        of_call = {name: y if name == "k" else y[n] for name, y in x.items()}
        h, states = jax.jit(run)(of_call, ids[n], ends[n])
        of_vmap = result[0][n], *(y[n] for y in result[1])
        compare("hcnm", of_vmap, (h, *states), tolerance("float32", S))


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_the_states_of_a_segment_see_no_nan_of_the_next(backend):
    inputs, ids = random_inputs(5, 1, 2, S, 16, 16, states=False), np.repeat([0, 1], [40, 50])
    options = dict(return_last_states=True, num_segments=1, backend=backend)
    run = jax.jit(functools.partial(mlstm_chunkwise, **options))
    poisoned = {name: inputs[name].at[:, :, 40:].set(jnp.nan) for name in "qkvif"}
    for x, y in zip(*(run(**z, segment_ids=ids[None])[1] for z in (inputs, poisoned)), strict=True):
        assert np.isfinite(x).all()
        assert np.array_equal(x, y)


def test_states_of_segments_have_no_derivatives():
    inputs = random_inputs(3, 1, 1, 40, 16, 16, states=False)
    run = functools.partial(
        mlstm_chunkwise, segment_ids=np.zeros((1, 40), int), return_last_states=True, num_segments=1
    )
    message = r"^mlstm_chunkwise with num_segments has no derivatives; leave num_segments out"
    with pytest.raises(TypeError, match=message):
        jax.jit(jax.grad(lambda x: jnp.sum(run(**x)[0])))(inputs)


def test_lengths_of_prompts_as_arrays():
    for lengths in (np.array([[2, 1], [4, 0]], np.uint8), jnp.array([[2, 1], [4, 0]])):
        ids, ends = pack_lengths(lengths)
        assert ids.tolist() == [[0, 0, 1, 2], [0, 0, 0, 0]]
        assert ends.tolist() == [[2, 3], [4, 4]]
    assert pack_lengths([[], [1, 2]], np.int64(4))[0].tolist() == [[2, 2, 2, 2], [0, 1, 1, 2]]


@pytest.mark.parametrize(
    ("lengths", "S", "message"),
    [
        (3, None, "lengths is 3, expected the steps of each prompt, integers >= 1, of one row"),
        ([3, 0, 2], None, r"lengths is \[3, 0, 2\], .*; zeros may stand behind the last one"),
        ([], None, r"lengths is \[\], expected"),
        ([1.5], None, r"lengths is \[1.5\], expected"),
        ([[1], 2], None, r"lengths is \[\[1\], 2\], expected"),
        ([[3, 5], [6]], 7, "S is 7, expected an integer >= 8"),
    ],
)
def test_lengths_that_cannot_be_packed(lengths, S, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        pack_lengths(lengths, S)
    if S is None and lengths:
        with pytest.raises(TypeError, match="lengths is traced, expected integers: pack prompts"):
            jax.jit(pack_lengths)(jnp.ones(3, int))
