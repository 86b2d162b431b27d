"""Dimensions, splits, lists of chunks and the denominator of h against their definitions, in
NumPy."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from numpy_evaluator import in_numpy

from mlstm_pallas.formulas import chunk_list, normaliser, splits
from mlstm_pallas.formulas.normaliser import Normaliser
from mlstm_pallas.problem import dimensions
from mlstm_pallas.problem.dimensions import Problem, make_problem

equal, close = np.testing.assert_array_equal, np.testing.assert_allclose


# ---------------- dimensions


def test_dimensions():
    """Heads are multiples of 16. A chunk is no longer than the next power of two of the sequence,
    and at least 16. The scale is that of the heads as they are."""
    assert [x for x in range(-2, 10) if dimensions.is_power_of_two(x)] == [1, 2, 4, 8]
    assert [dimensions.next_power_of_two(x) for x in (0, 1, 2, 3, 4, 5, 257)] == [
        *(1, 1, 2, 4, 4, 8, 512)
    ]
    assert make_problem((2, 3, 100, 25), 64, 64, pad_heads=True) == Problem(
        2, 3, 128, 32, 64, 64, 0.2
    )
    assert make_problem((2, 3, 16, 25), 65, 64, pad_heads=False) == Problem(
        2, 3, 16, 25, 65, 16, 0.2
    )
    sizes = {S: make_problem((1, 1, S, 1), 17, 256, pad_heads=True) for S in (1, 16, 17, 200, 900)}
    assert {S: p.L for S, p in sizes.items()} == {1: 16, 16: 16, 17: 32, 200: 256, 900: 256}
    assert {(p.DHQK, p.DHV) for p in sizes.values()} == {(16, 32)}
    p = Problem(2, 3, 1024, 16, 32, L=256, qk_scale=0.25)
    assert (p.NC, p.T, p.BNH, p.in_chunks_of(512)) == (4, 128, 6, p)
    assert (p.in_chunks_of(64).L, p.in_chunks_of(64).T, p.in_splits(2).L) == (64, 64, 512)
    assert p.split(2) == Problem(2, 6, 512, 16, 32, L=256, qk_scale=0.25)
    with pytest.raises(ValueError, match="S = 1000 is not a multiple of the chunk size L = 256"):
        Problem(2, 3, 1000, 16, 32, 256, 1.0)
    x, y, z = map(jnp.dtype, ("float16", "float32", "float64"))
    assert (dimensions.accumulator_dtype(x, y), dimensions.accumulator_dtype(y, z)) == (y, z)


# ---------------- splits


def test_the_number_of_splits():
    """A power of two from 4 to 16 that divides the chunks, or 1."""
    for NC, most in itertools.product(range(1, 70), (0, 1, 3, 4, 7, 8, 16, 99)):
        possible = [n for n in (4, 8, 16) if NC % n == 0 and n <= most]
        assert splits.splits_of(NC, most) == max(possible, default=1), (NC, most)


@pytest.mark.parametrize("n", [2, 4])
def test_decays_and_states_of_splits(n):
    """Of two heads; time that runs backward is the sequence in reverse."""
    draw = np.random.default_rng(n)
    gamma, added = np.float32(draw.random((2, 8))), np.float32(draw.normal(size=(2, n - 1, 3)))
    gamma[1, 3], initial = 0, np.float32(draw.normal(size=(2, 3)))
    parts, states = gamma.reshape(2, n, -1), [initial]
    later = [[[x[c + 1 :].prod() for c in range(len(x))] for x in head] for head in parts]
    steps = np.reshape(later, (2, 8)).repeat(2, axis=1)
    for j in range(n - 1):
        states.append(parts[:, j].prod(1)[:, None] * states[-1] + added[:, j])
    states = np.stack(states, 1)
    for flip, options in ((slice(None), {}), (slice(None, None, -1), dict(backward=True))):

        def run(gamma, added, initial, options=options):
            decays = splits.decays_in_splits(gamma, n, 16, **options)
            states = splits.split_states(added, gamma, initial, **options)
            return decays, splits.group_splits(states, n)

        x = gamma[:, flip], added[:, flip]
        result = in_numpy(run)(*x, initial)
        for actual, desired in zip(result, (steps, states), strict=True):
            close(actual, desired[:, flip], rtol=1e-6)
        equal(in_numpy(run)(*x, None)[1], in_numpy(run)(*x, 0 * initial)[1])


def test_splits_as_heads():
    """But for rows of other steps, and with an axis of heads."""
    x = np.arange(24).reshape(2, 12)
    equal(splits.splits_as_heads(x, 3, 12), x.reshape(6, 4))
    sizes = [((2, 12, 1), 12, (6, 4, 1)), ((2, 12, 1), 13, (2, 12, 1)), ((2, 12), 13, (6, 4))]
    for shape, S, expected in [*sizes, ((2, 12, 1, 1), 12, (2, 12, 1, 1))]:
        assert splits.splits_as_heads(x.reshape(shape), 3, S).shape == expected


# ---------------- lists of chunks

L = 4


def entries_of(starts):
    """(first step, steps, part) of the entries of a row: one without steps before each part."""
    for part, (begin, end) in enumerate(itertools.pairwise(starts)):
        yield 0, 0, part
        yield from ((t, min(L, end - t), part) for t in range(begin, end, L))


@pytest.mark.parametrize(
    ("ends", "end", "S"), [([[5, 9], [0, 20]], [17, 20], 20), ([[5], [0]], [9, 12], 12)]
)
def test_lists_of_chunks_by_segment(ends, end, S):
    """Two rows, of which the first has a tail. An entry before a segment has the m with which it
    starts as its input gate and resets the state; other resets are behind the first step."""
    draw, N = np.random.default_rng(0), len(ends[0])
    x = in_numpy(lambda *y: chunk_list.chunks_by_segment(*y, S, L))(np.int32(ends), np.int32(end))
    steps = np.float32(draw.normal(size=(2, S, 1)))
    m, states, initial = (np.float32(draw.normal(size=(2, n))) for n in (N, x.NC, N))
    gates, heads = steps[..., 0], steps[None].swapaxes(1, 2)

    @in_numpy
    def run(x, steps, heads, m, states, initial):
        i, chunks = steps[..., 0], x.gather(steps, L)
        return (
            (chunks, x.gather(heads, L), *x.gates(i, -i, i != 0, m, L)),
            (x.scatter(chunks, steps, L), x.scatter(chunks, heads, L)),
            (x.with_initial(states, initial), states[x.behind_segments()]),
        )

    chunks, scattered, (with_initial, behind) = run(x, steps, heads, m, states, initial)
    chunks = [y.reshape(2, -1, L) for y in chunks]
    equal(x.parts.start_steps, [[0, *ends[row], end[row], S] for row in range(2)])
    for row in range(2):
        starts = [0, *ends[row], end[row]]
        entries = [*entries_of(starts)]
        lists = *x.entries, x.entry_parts
        equal(np.stack([y[row, : len(entries)] for y in lists], 1), entries)
        before = [n for n, (_, size, _) in enumerate(entries) if not size]
        assert len(entries) < x.NC <= len(entries) + 11
        assert x.parts.first[row, : N + 1].tolist() == [n + 1 for n in before]
        expected = np.full((5, x.NC, L), np.array([0, 0, -np.inf, np.inf, 0])[:, None, None])
        for n, (t, size, part) in enumerate(entries):
            y = gates[row, t : t + size]
            expected[:, n, :size] = y, y, y, -y, np.ones(size)
            expected[4, n, 0] *= t > starts[part]
            if not size:
                expected[2:4, n, 0] = [*m[row], 0][part], -np.inf
        equal([y[row] for y in chunks], expected)
        equal(behind[row], states[row, before[1:]])
        states[row, before] = *initial[row], 0
        equal(with_initial[row], states[row])
        steps[row, end[row] :] = 0
    equal(scattered[0], steps)
    equal(scattered[1], steps[None].swapaxes(1, 2))


def test_lists_of_chunks_by_length():
    """Those with steps are the first of all rows in an order of the active ones."""
    p = Problem(2, 3, 12, 16, 16, L, 1.0)
    lengths = np.int32([0, 1, 4, 6, 12])

    def run(lengths):
        x = chunk_list.chunks_by_length(lengths, 12, p)
        return x, x.num_active, x.with_active_first().active_first

    x, num_active, ([count], order) = in_numpy(run)(lengths)
    sizes = np.clip(lengths[:, None] - [0, 4, 8], 0, 4)
    equal(x.parts.start_steps, np.stack([0 * lengths, lengths, lengths, 0 * lengths + 12], 1))
    equal(x.entries.steps, [[0, 4, 8]] * 5)
    equal(x.entries.sizes, sizes)
    assert not np.any(x.parts.first) | np.any(x.entry_parts)
    equal(num_active, (sizes > 0).sum(1))
    active = sizes.ravel() > 0
    assert (count, order.tolist()) == (
        active.sum(),
        [*np.flatnonzero(active), *np.flatnonzero(~active)],
    )


def test_the_place_of_a_segments_state():
    """In (B, N, NH); the parts behind the last segment share its place."""
    p, places = Problem(2, 3, 12, 16, 16, L, 1.0), np.arange(12).reshape(2, 2, 3)
    head, part = np.meshgrid(np.arange(6), np.arange(4))
    places_of = in_numpy(lambda *x: chunk_list.state_of(p, 2, *x))(np.int32(head), np.int32(part))
    equal(places_of, places[head // 3, np.minimum(part, 1), head % 3])


# ---------------- the denominator

NORMALISERS = Normaliser(0.5, 2.0), Normaliser(0.5, 2.0, False), Normaliser(0.0, 0.0)


@pytest.mark.parametrize("x", NORMALISERS, ids=str)
def test_the_denominator_and_its_gradients(x):
    """On the floor z has no gradient, and m has one through eps, or through a floor that it does
    not move. 0 / 0 is 0, as its gradients are."""
    z, m = np.meshgrid(np.float32([-9, -1, 0, 0.25, 9]), np.log(np.float32([4, 1, 0.25])))
    floor = x.norm_val * (np.exp(-m) if x.stabilize_correctly else np.ones_like(m))
    den, above, delta = np.maximum(np.abs(z), floor) + x.eps, np.abs(z) >= floor, 3 + z
    inverse = np.divide(1, den, out=np.zeros_like(den), where=den > 0)
    dz, share = -delta * np.sign(z) * above, x.eps * inverse
    if not x.stabilize_correctly:
        share = np.where(above, share, 1)
    expected = np.where(den > 0, den, 1), (delta * inverse)[..., None]
    expected += inverse, dz * inverse, dz, -delta * share

    @in_numpy
    def run(delta, z, m):
        return x.denominator(z, m), x.normalise(delta[..., None], z, m), *x.gradients(delta, z, m)

    for actual, desired in zip(run(delta, z, m), expected, strict=True):
        close(actual, desired, rtol=1e-6)


def test_h_is_finite_for_any_m_and_nan_stays():
    x, m = Normaliser(), np.float32([-np.inf, -1e38, -1e4, -3, 1e4, 1e38])
    h = in_numpy(x.normalise)(np.ones((6, 1)), np.ones(6), m)
    close(h[:, 0], [0, 0, 0, np.exp(-3), 1, 1], rtol=1e-5)

    nan = np.full((1, 1), np.nan)

    @in_numpy
    def run(z, m):
        return x.denominator(z, m), x.normalise(z, z[0], m[0]), x.gradients(z, z, m).vecDz

    assert np.isnan(run(nan, 0 * m[None, 4:5])).all()
    equal(normaliser.at_least(np.float32([1, 3, np.nan]), 2.0), [2, 3, np.nan])


def test_a_query_of_weight_0_has_scale_0_whatever_its_denominator():
    w, inverse = np.float32([0, 0, 0, 2]), np.float32([np.inf, np.nan, -np.inf, 4])
    equal(normaliser.query_scale(w, 0.5, inverse), [0, 0, 0, 4])
    equal(normaliser.query_scale(w, 0.5), [0, 0, 0, 1])
