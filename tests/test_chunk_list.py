"""chunk_list.py on numbers written by hand: where the chunks of a packed row are, and what is read
and written there."""

import jax
import jax.numpy as jnp
import numpy as np

from mlstm_pallas import chunk_list
from mlstm_pallas.problem import Problem

S, L, N = 20, 4, 2


def rows(text, dtype=int):
    return np.array([row.split() for row in text.split("|")], dtype)


# Two rows. The first has segments of 5 and 4 steps, a rest of 8 and a tail of 3; in the second one
# the first segment has no step and the second one has all.
ENDS, END = np.int32([[5, 9], [0, 20]]), np.int32([17, 20])
BEGINS = rows("0 5 9 17 20 | 0 0 20 20 20")
FIRST = rows("1 4 6 | 1 2 8")
STEPS = rows("0 0 4 0 5 0 9 13 0 0 0 0 0 0 0 0 | 0 0 0 4 8 12 16 0 0 0 0 0 0 0 0 0")
SIZES = rows("0 4 1 0 4 0 4 4 0 0 0 0 0 0 0 0 | 0 0 4 4 4 4 4 0 0 0 0 0 0 0 0 0")
PARTS = rows("0 0 0 1 1 2 2 2 2 2 2 2 2 2 2 2 | 0 1 1 1 1 1 1 2 2 2 2 2 2 2 2 2")
LIST = chunk_list.of_segments(ENDS, END, S, L)
BEFORE = FIRST - 1  # the entries before the parts
HAS = np.arange(L) < SIZES[..., None]  # (2, 16, 4), the steps that entries have
AT = STEPS[..., None] + np.arange(L)


def equal(x, expected):
    np.testing.assert_array_equal(x, expected)
    assert x.dtype == jnp.dtype(np.asarray(expected).dtype.name.replace("64", "32"))


def test_segments_and_the_rest_have_chunks_of_their_own():
    assert (LIST.N, LIST.NC) == (N, 16)
    equal(LIST.parts.begins, BEGINS)
    equal(LIST.parts.first[:, : N + 1], FIRST)
    equal(LIST.entries.steps, STEPS)
    equal(LIST.entries.sizes, SIZES)
    equal(LIST.part_of_entries(), PARTS)


def test_the_list_has_room_for_all_chunks():
    found = [chunk_list.num_entries(*x) for x in ((20, 2, 4), (20, 3, 4), (39, 0, 4), (56, 0, 4))]
    assert found == [16, 16, 16, 24]


def gathered(x):
    return np.where(HAS, np.take_along_axis(x[:, None], np.minimum(AT, S - 1), axis=2), 0)


def test_steps_are_gathered_and_scattered():
    x = np.float32(np.arange(1, 2 * S + 1)).reshape(2, S)
    columns = np.stack([x, -x], axis=-1)  # (B * NH, S, D)
    expected = np.stack([gathered(x), gathered(-x)], axis=-1)
    within = columns * (np.arange(S) < END[:, None])[..., None]
    for like, layout in ((columns, lambda y: y), (columns[None], lambda y: y.swapaxes(1, 2))):
        chunks = LIST.gather(layout(like), L)
        equal(chunks, expected)
        equal(LIST.scatter(chunks, layout(like), L), layout(within.reshape(like.shape)))


def test_an_entry_before_each_part_has_its_gates():
    i = np.float32(np.arange(2 * S)).reshape(2, S)
    m, starts = np.float32([[100, 101], [102, 103]]), np.ones((2, S), np.int32)
    by_entry = (x.reshape(2, 16, L) for x in LIST.gates(i, -i, starts, m, L))
    i_found, f_found, resets = by_entry
    at = np.arange(2)[:, None], BEFORE, 0
    expected = np.where(HAS, gathered(i), -np.inf).astype("float32")
    expected[at] = np.pad(m, [(0, 0), (0, 1)])
    equal(i_found, expected)
    expected = np.where(HAS, gathered(-i), np.inf).astype("float32")
    expected[at] = -np.inf
    equal(f_found, expected)
    # The first step of the rest follows a reset already.
    equal(resets, np.int32(HAS & (PARTS == N)[..., None] & (AT > 9)))


def test_states_before_and_behind_segments():
    x = np.float32(np.arange(1, 65)).reshape(2, 16, 2)
    initial = -np.float32(np.arange(1, 9)).reshape(2, N, 2)
    expected = x.copy()
    expected[np.arange(2)[:, None], BEFORE] = np.pad(initial, [(0, 0), (0, 1), (0, 0)])
    equal(LIST.with_initial(jnp.asarray(x), initial), expected)
    equal(LIST.behind_segments(jnp.asarray(x)), np.stack([x[0, [3, 5]], x[1, [1, 7]]]))


def test_the_place_of_a_segments_state():
    """In (B, N, NH) with 3 heads; parts beyond the last segment share its place."""
    p, heads, parts = Problem(2, 3, S, 16, 16, L, 1.0), np.int32([0, 2, 3, 5]), np.int32([0, 1, 3])
    place = jax.jit(
        jax.vmap(jax.vmap(lambda *x: chunk_list.state_of(p, N, *x), (None, 0)), (0, None))
    )
    equal(place(heads, parts), rows("0 3 3 | 2 5 5 | 6 9 9 | 8 11 11"))


def test_the_list_of_lengths():
    p = Problem(1, 3, S, 16, 16, L, 1.0)
    found = chunk_list.of_lengths(jnp.int32([0, 6, 20]), S, p)
    equal(found.parts.begins, rows("0 0 0 20 | 0 6 6 20 | 0 20 20 20"))
    equal(found.parts.first[:, :2], rows("0 6 | 0 6 | 0 6"))
    equal(found.entries.steps, rows("0 4 8 12 16 | 0 4 8 12 16 | 0 4 8 12 16"))
    equal(found.entries.sizes, rows("0 0 0 0 0 | 4 2 0 0 0 | 4 4 4 4 4"))
    equal(found.part_of_entries(), np.zeros((3, 5), int))


def test_the_first_chunk_and_those_before_the_length_are_live():
    p = Problem(1, 4, 12, 16, 16, L, 1.0)
    found = chunk_list.live_chunks(jnp.int32([0, 4, 5, 12]), p)
    equal(found.num_live, np.int32([1, 1, 2, 3]))
    equal(found.total, np.int32([7]))
    equal(found.order, np.int32([0, 3, 6, 7, 9, 10, 11, 1, 2, 4, 5, 8]))
    equal(found.mask, np.arange(3) < np.array([[1], [1], [2], [3]]))
