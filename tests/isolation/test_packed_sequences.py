"""Packed sequences (segment_ids): each is computed as if it were alone. The states of each.

Gradients without states of segments: test_calls.py, the rows gradients_of_gates.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_checks import check_call, recurrence
from numpy_evaluator import in_numpy
from oracle import (
    NAMES,
    OUTPUTS,
    array,
    assert_same_bits,
    check_isolated,
    compare,
    cotangents_for,
    in_layout,
    oracle,
    param,
    random_inputs,
    slow_param,
    swapped,
    tolerance,
)

from mlstm_pallas import KernelConfig, mlstm_chunkwise, pack_lengths
from mlstm_pallas.formulas.gates import segment_ends
from mlstm_pallas.planning.options import Options
from mlstm_pallas.prepare import Arguments, as_int32, padded, prepare
from mlstm_pallas.problem.steps import Steps
from mlstm_pallas.problem.validation import check_indices

S, L = 90, 32
STATES = NAMES[5:]


@pytest.mark.quick("interpret")
@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_nothing_leaks_from_one_sequence_into_the_next(backend):
    """The first sequence is 1e15 times as large, and its forget gates are open: far below a very
    negative forget gate's leak."""
    inputs = random_inputs(1, 1, 2, S, 16, 32, f_shift=20.0)
    first = np.arange(S) < 40
    large = inputs | {
        "v": inputs["v"] * np.where(first, np.float32(1e15), 1)[:, None],
        "i": inputs["i"] + np.float32(60.0) * first,
        "segment_ids": 1 - first[None],
    }
    options = dict(return_last_states=True, chunk_size=L, backend=backend)
    h, states = jax.jit(functools.partial(mlstm_chunkwise, **options))(**large)
    expected = oracle({name: inputs[name][:, :, 40:] for name in "qkvif"})
    compare(OUTPUTS, (h[:, :, 40:], *states), expected, tolerance("float32", S))


def states_of_segments(x, count):
    """Other initial states, (B, count, NH, ...), of so many segments for each batch entry of x."""
    (B, NH, _, DHQK), DHV = x["q"].shape, x["v"].shape[-1]
    drawn = random_inputs(5, B * count, NH, 1, DHQK, DHV)
    return {name: drawn[name].reshape(B, count, *x[name].shape[1:]) for name in {*STATES} & {*x}}


def prompts_alone(ends, sizes):
    """A function that returns what mlstm_chunkwise does, by the recurrence of each prompt alone.

    Behind a prompt nothing is stored and nothing forgets.
    """
    batch, number = np.nonzero(sizes)
    steps = np.arange(np.max(sizes))
    inside = (steps < sizes[batch, number, None])[:, None]
    places = (
        batch[:, None],
        slice(None),
        np.minimum((ends - sizes)[batch, number, None] + steps, np.max(ends) - 1),
    )

    def run(**x):
        before = {name: y for name, y in x.items() if name in STATES}
        alone = x | {name: swapped(x[name][places]) for name in "qkvif"}
        alone["i"] = jnp.where(inside, alone["i"], -jnp.inf)
        alone["f"] = jnp.where(inside, alone["f"], jnp.inf)
        alone |= {name: y[batch, number] for name, y in before.items()}
        h, after = recurrence(**alone)
        pairs = zip(STATES, after, strict=True)
        states = tuple(before[name].at[batch, number].set(y) for name, y in pairs)
        h = jnp.where(inside[..., None], h, 0)
        return jnp.zeros(x["v"].shape, h.dtype).at[places].add(swapped(h)), states

    return run


def check_prompts(
    count, DHQK, DHV, *, go_on=False, rows=None, states=True, others=(0, 0), padding=4, **options
):
    """check_call of a prefill of packed prompts: h, the states of each prompt and all gradients are
    those of the prompts alone in float64.

    One row has so many short prompts, the other a few, one of them in one chunk more.

    The first one of a row goes on from initial states; with go_on every prompt does. One more
    segment is asked for than there is: its states stay as they were. Beyond the prompts h is 0.

    Args:
      states: whether there are initial states.
      others: so many of the first and of the last segments have ids that are none of a state.
      padding: so many steps are behind the longest row; 0: its last segment ends with the row.
    """
    rows = rows or ([*np.random.default_rng(0).integers(1, 11, size=count)], [5, 40, 1])
    ids, ends = pack_lengths(rows, max(map(sum, rows)) + padding)
    sizes = np.diff(ends, axis=1, prepend=0, append=ends[:, -1:])
    (B, S), segments, (front, behind) = ids.shape, sizes.shape[1], others
    of_call, count = slice(front, segments - behind), segments - front - behind
    alone = prompts_alone(np.append(ends, ends[:, -1:], axis=1), sizes)
    zeros = dict(zip(STATES, ((DHQK, DHV), (DHQK,), ()), strict=True))

    def change(x):
        if go_on:
            return x | states_of_segments(x, count)
        return x if states else {name: x[name] for name in "qkvif"}

    def draw(x, dtype, _):
        h, *of_states = cotangents_for(x, dtype)
        draw = np.random.default_rng(2)
        of_states = (draw.normal(size=(B, count, *y.shape[1:])) for y in of_states)
        return h, *(array(array(y, dtype), "float32") for y in of_states)

    def of_prompts(segment_ids, **x):
        for name, shape in zeros.items():  # others begin with zeros
            y = x.get(name, jnp.zeros((B, count, 2, *shape), x["i"].dtype))
            y = y if y.ndim == len(shape) + 3 else y[:, None]
            widths = (0, 0), (front, segments - front - y.shape[1])
            x[name] = jnp.pad(y, [*widths, *[(0, 0)] * (y.ndim - 2)])
        h, after = alone(**x)
        return h, tuple(y[:, of_call] for y in after)

    options |= dict(seed=4, change=change, draw=draw, run=of_prompts, num_segments=count)
    options |= dict(recipe=dict(m_initial="input_gate" not in options), lengths=ends[:, -1])
    check_call((B, 2, S, DHQK, DHV), segment_ids=ids - front, **options)


ODD = [1, 2, 0, 31, 32, 33], [0, 0, 65], [0]
ODD_ON_A_GPU = [1, 2, 0, 63, 64, 65, 600], [0, 130]
# In front -3, -2 and -1; some rows have no -1, no 0 or nothing else; 3 and 4 are behind. The steps
# of these have the h of segments of their own.
OUTSIDE = dict(others=(3, 3), rows=([3, 0, 20, 0, 33, 5, 7, 9], [0, 0, 0, 17, 1],
                                    [0, 40, 0, 0, 0, 0, 3], [9]))  # fmt: skip
FEW = [1, 2, 15, 16, 17], [33]
TILES = dict(siz_b_DHQK=16, siz_b_DHHV=16, state_rows=16)
BLOCKS = KernelConfig(chunk_size=16, triton_recurrent_fw_H=TILES)
PROMPTS = [
    slow_param(30, id="prompts_are_read_at_once-triton", backend="interpret", layout="BTNH"),
    slow_param(
        9, id="prompts_are_read_at_once-plain", backend="xla", layout="BTNH", input_gate="sigmoid"
    ),
    slow_param(
        9, id="prompts_are_read_at_once-plain_go_on", backend="xla", layout="BTNH", go_on=True
    ),
    slow_param(
        0, id="prompts_are_read_at_once-triton_go_on", backend="interpret", go_on=True, rows=ODD
    ),
    # Two launches of the scan, each with two blocks of columns.
    slow_param(
        0,
        id="in_several_blocks",
        backend="interpret",
        go_on=True,
        DHQK=32,
        chunk_size=None,
        config=BLOCKS,
        rows=FEW,
    ),
    # Ids below 0 and from n on.
    slow_param(0, id="belong_to_no_segment-plain", backend="xla", states=False, **OUTSIDE),
    slow_param(
        0,
        id="belong_to_no_segment-plain_go_on",
        backend="xla",
        go_on=True,
        input_gate="sigmoid",
        **OUTSIDE,
    ),
    slow_param(
        0,
        id="belong_to_no_segment-triton_go_on",
        backend="interpret",
        go_on=True,
        layout="BTNH",
        **OUTSIDE,
    ),
    slow_param(
        0, id="belong_to_no_segment-without_states", backend="interpret", states=False, **OUTSIDE
    ),
    # A segment ends with the row; the rows have 1, 63, 64 and 65 steps.
    *(
        (param if quick else slow_param)(
            0,
            id=f"end_with_a_row_of_{sum(rows[0])}-{backend}",
            backend=backend,
            layout="BTNH",
            go_on=True,
            padding=0,
            rows=rows,
        )
        for rows, backend, quick in (
            ([[0, 1], [1]], "xla", False),
            ([[1, 0, 62], [63]], "xla", False),
            ([[1, 0, 63], [31, 33]], "xla", True),
            ([[1, 0, 64], [65]], "xla", False),
            ([[0, 1], [1]], "interpret", False),
            ([[1, 0, 63], [31, 33]], "interpret", False),
        )
    ),
]


@pytest.mark.parametrize(("count", "options"), PROMPTS)
def test_each_segment_is_computed_alone(count, options):
    check_prompts(count, **dict(DHQK=16, DHV=32, chunk_size=L) | options)


LARGE_STATES = dict(
    fused=dict(backend="interpret", config=KernelConfig(chunk_size=16, fused=True)),
    two_blocks_of_rows=dict(backend="interpret", DHQK=32, config=BLOCKS),
    materialised=dict(backend="interpret", config=KernelConfig(chunk_size=16, fused=False)),
    plain=dict(backend="xla", config=KernelConfig(chunk_size=16)),
)


def check_large_states(backend, config, dtype="float32", NH=2, DHQK=16, DHV=16, L=16):
    """Initial states of segments are 1e4 times as large as what steps store. Steps in front of the
    first segment and behind the last one, which are several chunks, see none of them."""
    ids = np.repeat([[-1, 0, 1, 3], [0, 1, 2, 7]], [L + 3, L - 5, L + 7, 3 * L - 5], axis=1)
    x = random_inputs(7, 2, NH, 6 * L, DHQK, DHV, dtype=dtype)
    x |= states_of_segments(x, 3)
    x |= dict(c_initial=1e4 * x["c_initial"], n_initial=0 * x["n_initial"])
    options = dict(num_segments=3, return_last_states=True, layout="BNTH")
    run = jax.jit(functools.partial(mlstm_chunkwise, backend=backend, config=config, **options))
    h, states = run(**x, segment_ids=ids)
    bound = tolerance(dtype, 3 * L + DHQK)
    for b, row in enumerate(ids):
        seen = set()
        for n in dict.fromkeys(row.tolist()):
            at = np.flatnonzero(row == n)
            within = b, slice(None), slice(at[0], at[-1] + 1)
            alone = {name: x[name][within][None] for name in "qkvif"}
            if 0 <= n < 3:
                alone |= {name: x[name][b : b + 1, n] for name in STATES}
                seen.add(n)
            expected, *after = oracle(alone)
            compare("h", [h[within][None]], [expected], bound)
            if n in seen:
                compare("cnm", [y[b : b + 1, n] for y in states], after, bound)
        for n in {*range(3)} - seen:
            compare("cnm", [y[b, n] for y in states], [x[name][b, n] for name in STATES], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", LARGE_STATES)
def test_large_states_stay_in_their_segments(schedule):
    check_large_states(**LARGE_STATES[schedule])


@pytest.mark.slow
def test_ids_of_any_integer_dtype():
    """The least and the largest id of each, with fewer segments and with more than int8 has."""
    x = random_inputs(3, 1, 1, 4, 8, 8)
    dtypes = "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"
    with jax.enable_x64(True):
        for dtype, states, count in itertools.product(dtypes, (False, True), (3, 300)):
            limits = np.iinfo(dtype)
            ids = jnp.array([[limits.min, 1, 2, limits.max]], dtype)
            options = Options(num_segments=count, return_last_states=True, backend="xla")
            arrays = [*x.values()][: 8 if states else 5]
            call = Arguments(*arrays)._replace(segment_ids=ids)
            spec, _ = prepare(call, options, None)
            front = states and limits.min < 0  # a segment of ids below 0
            expected = np.array([max(limits.min, -1), 1, 2, min(limits.max, count)]) + front
            assert np.array_equal(padded(spec, call).steps.segment_ids, [[expected]])
            assert (spec.num_segments, spec.negative_segments) == (count + front, front)


def test_ids_are_compared_in_64_bits_under_x64():
    """Those of JAX; test_errors.py has NumPy's, which are refused beyond 32 bits."""
    x = random_inputs(3, 1, 1, 8, 8, 8, states=False)

    @in_numpy
    def run(x, ids):
        return mlstm_chunkwise(**x, segment_ids=ids, backend="xla")

    ids = np.repeat([[7, 7 + 2**32]], 4, axis=1)
    with jax.enable_x64(True):
        assert_same_bits(run(x, jnp.asarray(ids)), run(x, jnp.asarray(ids // 2**32)))


# Rows of ids for 3 segments. Documents of grain, MaxText and T5X are 1 to N, with padding of 0.
LOADERS = dict(
    padding_behind=[[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 1, 2, 0, 0, 0, 0, 0, 0]],
    no_padding=[[1, 1, 1, 2, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 1, 0]],
    padding_in_front=[[0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1, 2]],
    padding_at_both_ends=[[0, 0, 1, 1, 1, 2, 2, 0, 0], [-1, -1, 0, 1, 1, 2, -1, -1, -1]],
    negative_padding=[[0, 0, 0, 1, 1, 2, 2, -1, -1], [-3, -1, -2, 0, 1, 1, -1, 0, -1]],
    ids_without_states=[[1, 1, 2, 9, 9, 7, 7, 3, 0], [1, 2, 2, 4, 4, 4, 3, 3, 0]],
    nothing_but_padding=[[0] * 9, [-1] * 9],
)


@pytest.mark.slow
@pytest.mark.parametrize("go_on", [False, True], ids=["from_zeros", "from_states"])
@pytest.mark.parametrize("loader", LOADERS)
def test_ids_of_loaders_are_read_alike_from_numpy_and_jax(loader, go_on):
    """The states are those of the steps with an id, before the first descent."""
    ids = np.repeat(LOADERS[loader], 3, axis=1).astype("int32")
    x = random_inputs(8, *(2, 2, 27), 16, 16, states=go_on)
    x |= states_of_segments(x, 3) if go_on else {}
    options = dict(num_segments=3, return_last_states=True, backend="xla", layout="BNTH")
    run = functools.partial(mlstm_chunkwise, **x, **options)
    results = run(segment_ids=ids), run(segment_ids=jnp.asarray(ids))
    compare(OUTPUTS, *map(jax.tree.leaves, results), tolerance("float32", 27))
    for b, n in itertools.product(range(2), range(3)):
        row = np.maximum(ids[b], -1).clip(max=3)
        steps = (row == n) & (np.cumsum(np.diff(row, prepend=-1) < 0) == 0)
        before = [x[name][b, n] for name in STATES] if go_on else [0, 0, 0]
        if np.any(steps):
            alone = {name: x[name][b : b + 1, :, steps] for name in "qkvif"}
            alone |= {name: x[name][b : b + 1, n] for name in STATES} if go_on else {}
            before = [y[0] for y in oracle(alone)[1:]]
        after = [y[b, n] for y in results[0][1]]
        before = [np.broadcast_to(y, z.shape) for y, z in zip(before, after, strict=True)]
        compare("cnm", after, before, tolerance("float32", 27))


@pytest.mark.quick("int64")
@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8", "uint64"])
def test_ids_are_refused_if_a_segment_would_lose_steps(dtype):
    """Of random rows: NumPy arrays are refused where ``segment_ends`` leaves out an id above 0."""
    draw, count, refused = np.random.default_rng(1), 3, 0
    for _ in range(300):
        ids = draw.integers(-2 if dtype.startswith("i") else 0, 6, size=(1, 5)).astype(dtype)
        with jax.enable_x64(True):
            clipped = as_int32(jnp.asarray(ids), -1, count)
        ends = [0, *np.asarray(segment_ends(Steps(segment_ids=clipped), count))[0].tolist()]
        lost = [t for t, n in enumerate(ids[0]) if n in (1, 2) and not ends[n] <= t < ends[n + 1]]
        try:
            check_indices("segment_ids", count, ids)
        except ValueError:
            assert lost, ids
            refused += 1
        else:
            assert not lost, ids
    assert 50 < refused < 250


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "layout", "go_on"),
    [("xla", "BNTH", True), ("interpret", "BTNH", True), ("interpret", "BNTH", False)],
    ids=["plain", "triton", "first_segment"],
)
def test_a_vmap_of_packed_prompts_equals_the_calls_one_by_one(backend, layout, go_on):
    """Mapped over everything but k. Without go_on the initial states are the first segments'."""
    x = random_inputs(6, 4, 2, S, 16, 16)
    if go_on:
        x |= states_of_segments(x, 3)
    x = dict(zip(x, in_layout(layout, x, x.values()), strict=True))
    options = dict(num_segments=3, return_last_states=True, layout=layout, backend=backend)
    run = jax.jit(functools.partial(mlstm_chunkwise, k=x.pop("k")[:2], chunk_size=L, **options))
    ids, ends = pack_lengths([[5, 40, 30], [64, 1], [33], [10, 31, 32]], S)
    x |= dict(segment_ids=ids, sequence_lengths=ends[:, -1])
    x = {name: y.reshape(2, 2, *y.shape[1:]) for name, y in x.items()}
    result = jax.vmap(run)(**x)
    for n in range(2):
        of_call, of_vmap = jax.tree.map(lambda y, n=n: y[n], (x, result))
        both = map(jax.tree.leaves, (of_vmap, run(**of_call)))
        compare(OUTPUTS, *both, tolerance("float32", S))


@pytest.mark.quick("interpret")
@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_the_states_of_a_segment_see_no_nan_of_the_next(backend):
    inputs, ids = random_inputs(5, 1, 2, S, 16, 16, states=False), np.repeat([0, 1], [40, 50])
    options = dict(return_last_states=True, num_segments=1, backend=backend)
    run = jax.jit(lambda x: mlstm_chunkwise(**x, segment_ids=ids[None], **options)[1])
    poisoned = {name: x.at[:, :, 40:].set(jnp.nan) for name, x in inputs.items()}
    check_isolated(run, inputs, poisoned, lambda states: states)


@pytest.mark.quick("6-", "1-", "8-32")
@pytest.mark.parametrize("lengths", [None, (0, 3, 7, 24, 60)])
@pytest.mark.parametrize(
    ("count", "S"), [(1, 60), (6, 60), (70, 60), (8, 1), (8, 31), (8, 32), (8, 33)]
)
def test_ends_of_segments_take_no_array_of_steps_by_segments(count, S, lengths):
    """Ids skip numbers, and come again; the last of 8 segments ends with the row."""
    ids = np.sort(np.random.default_rng(0).integers(8, size=(5, -(-S // 4))))
    ids = ids.repeat(4, axis=1)[:, :S]
    ids[1, 2 * S // 3 :][:4] = 0
    number = np.where(np.logical_or.accumulate(np.diff(ids, prepend=0) < 0, axis=1), count, ids)
    if lengths is not None:
        lengths = np.minimum(lengths, S).astype("int32")
        number[np.arange(S) >= lengths[:, None]] = count

    def run(ids):
        return segment_ends(Steps(lengths, segment_ids=ids), count)

    ids = ids.astype("int32")
    expected = [[np.sum(row <= n) for n in range(count)] for row in number]
    assert np.array_equal(run(ids), expected)
    shapes = re.findall(r"\[([\d,]+)\]", str(jax.make_jaxpr(run)(ids)))
    assert max(np.prod([*map(int, shape.split(","))]) for shape in shapes) <= 5 * (S + count)
