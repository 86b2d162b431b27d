"""segment_ids as loaders have them, their dtypes, and where segments end. The table has values."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine import STATES, TOKENS, Call, Ids, arrays
from numpy_evaluator import in_numpy
from oracle import OUTPUTS, assert_same_bits, compare, random_inputs, tolerance

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.formulas.gates import segment_ends
from mlstm_pallas.planning.options import Options
from mlstm_pallas.prepare import Arguments, as_int32, padded, prepare
from mlstm_pallas.problem.steps import Steps
from mlstm_pallas.problem.validation import check_indices


@pytest.mark.slow
def test_ids_of_any_integer_dtype():
    """The least and the largest id of each, with fewer segments and with more than int8 has."""
    x = random_inputs(3, 1, 1, 4, 8, 8)
    dtypes = "int8", "int64", "uint8", "uint32", "uint64"
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
LOADERS = [
    [[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 0]],
    [[0, 0, 1, 1, 1, 2, 2, 0, 0], [-1, -1, 0, 1, 1, 2, -1, -1, -1]],
    [[0, 0, 0, 1, 1, 2, 2, -1, -1], [-3, -1, -2, 0, 1, 1, -1, 0, -1]],
    [[1, 1, 2, 9, 9, 7, 7, 3, 0], [1, 2, 2, 4, 4, 4, 3, 3, 0]],
    [[0] * 9, [-1] * 9],
]


@pytest.mark.slow
@pytest.mark.parametrize("loader", range(len(LOADERS)))
def test_ids_of_loaders_are_read_alike_from_numpy_and_jax(loader):
    """As those of the table: -1 before the segments, 3 behind them, from the first descent on."""
    call = Call("mlstm_chunkwise", (2, 2, 27, 16, 16), steps=(Ids(((9,) * 3,) * 2, True, True),))
    ids = np.repeat(LOADERS[loader], 3, axis=1).astype("int32")
    row = np.maximum(ids, -1).clip(max=3)
    row[np.cumsum(np.diff(row, axis=1, prepend=-1) < 0, axis=1) > 0] = 3
    x = [y for name, y in arrays(call, 8).items() if name in TOKENS + STATES]
    options = dict(num_segments=3, return_last_states=True, backend="xla", layout="BNTH")
    run = jax.jit(functools.partial(mlstm_chunkwise, *x, **options))
    counts = ((row >= 0) & (row < 3))[:, None, :, None]
    (h, states), *results = (run(segment_ids=y) for y in (row, ids, jnp.asarray(ids)))
    for other, last in results:
        compare(OUTPUTS, (other * counts, *last), (h * counts, *states), tolerance("float32", 27))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int64", "uint8"])
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


@pytest.mark.parametrize("count", [1, 6, 70])
@pytest.mark.parametrize("lengths", [None, (0, 3, 7, 24, 60)])
def test_ends_of_segments_take_no_array_of_steps_by_segments(count, lengths):
    ids = np.sort(np.random.default_rng(0).integers(8, size=(5, 60))).astype("int32")
    lengths = lengths and np.array(lengths, "int32")

    def run(ids):
        return segment_ends(Steps(lengths, segment_ids=ids), count)

    shapes = re.findall(r"\[([\d,]+)\]", str(jax.make_jaxpr(run)(ids)))
    assert max(np.prod([*map(int, shape.split(","))]) for shape in shapes) <= 5 * (60 + count)
