"""segment_ids as loaders have them, their dtypes, and where segments end. The table has values."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_evaluator import in_numpy
from oracle import NAMES, OUTPUTS, assert_same_bits, compare, oracle, random_inputs, tolerance

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.formulas.gates import segment_ends
from mlstm_pallas.planning.options import Options
from mlstm_pallas.prepare import Arguments, as_int32, padded, prepare
from mlstm_pallas.problem.steps import Steps
from mlstm_pallas.problem.validation import check_indices

STATES = NAMES[5:]


def states_of_segments(x, count):
    """Other initial states, (B, count, NH, ...), of so many segments for each batch entry of x."""
    (B, NH, _, DHQK), DHV = x["q"].shape, x["v"].shape[-1]
    drawn = random_inputs(5, B * count, NH, 1, DHQK, DHV)
    return {name: drawn[name].reshape(B, count, *x[name].shape[1:]) for name in {*STATES} & {*x}}


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
