"""Lists of chunks: values that a hand can check."""

import functools

import jax
import numpy as np

from mlstm_pallas.formulas import chunk_list
from mlstm_pallas.problem.dimensions import Problem


def call(function, *arrays, **sizes):
    return jax.tree.map(np.asarray, jax.jit(functools.partial(function, **sizes))(*arrays))


def check_arrays(arrays, expected):
    """Dtypes and values; heads are side by side where there is a third axis."""
    for x, (dtype, values) in zip(arrays, expected, strict=True):
        assert x.dtype == dtype
        np.testing.assert_array_equal(x, values)


steps = np.arange(1, 25, dtype=np.float32).reshape(2, 12, 1)
p = Problem(2, 3, 12, 16, 16, L=4, qk_scale=1.0)


def test_chunks_of_segments():
    """Two rows of 20 steps. The first has
    segments of 5 and 4 steps, a rest of 8 and a tail of 3. In the second one the first
    segment has no step and the second one has all. An entry without steps is before each
    part; the other entries have up to 4 steps."""
    x = call(
        chunk_list.chunks_by_segment, np.int32([[5, 9], [0, 20]]), np.int32([17, 20]), S=20, L=4
    )
    assert (x.N, x.NC) == (2, 16)
    check_arrays(
        [x.parts.start_steps, x.parts.first[:, :3]],
        [("int32", [[0, 5, 9, 17, 20], [0, 0, 20, 20, 20]]), ("int32", [[1, 4, 6], [1, 2, 8]])],
    )
    check_arrays(
        [x.entries.steps, x.entries.sizes, x.entry_parts],
        [
            (
                "int32",
                [
                    [0, 0, 4, 0, 5, 0, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0],
                    [0, 0, 0, 4, 8, 12, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                ],
            ),
            (
                "int32",
                [
                    [0, 4, 1, 0, 4, 0, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0],
                    [0, 0, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                ],
            ),
            (
                "int32",
                [
                    [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2],
                    [0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2],
                ],
            ),
        ],
    )


def test_the_size_of_a_list():
    """The list has room for all chunks, the entries before them, and one more."""
    assert chunk_list.num_entries(20, 2, 4) == 16
    assert [chunk_list.num_entries(S, 0, 4) for S in (19, 20, 51, 52)] == [8, 8, 16, 16]


def test_steps_are_gathered_and_scattered():
    """Two rows of 12 steps have one segment. They are read and written in both layouts; steps of
    no entry are 0. Here the first row has a tail, from step 9 on."""
    x = call(chunk_list.chunks_by_segment, np.int32([[5], [0]]), np.int32([9, 12]), S=12, L=4)
    chunks = call(x.gather, steps, L=4)
    check_arrays(
        [chunks[..., 0]],
        [
            (
                "float32",
                [
                    [
                        [0.0, 0.0, 0.0, 0.0],
                        [1.0, 2.0, 3.0, 4.0],
                        [5.0, 0.0, 0.0, 0.0],
                        [0.0, 0.0, 0.0, 0.0],
                        [6.0, 7.0, 8.0, 9.0],
                        [0.0, 0.0, 0.0, 0.0],
                        [0.0, 0.0, 0.0, 0.0],
                        [0.0, 0.0, 0.0, 0.0],
                    ],
                    [
                        [0.0, 0.0, 0.0, 0.0],
                        [0.0, 0.0, 0.0, 0.0],
                        [13.0, 14.0, 15.0, 16.0],
                        [17.0, 18.0, 19.0, 20.0],
                        [21.0, 22.0, 23.0, 24.0],
                        [0.0, 0.0, 0.0, 0.0],
                        [0.0, 0.0, 0.0, 0.0],
                        [0.0, 0.0, 0.0, 0.0],
                    ],
                ],
            )
        ],
    )
    check_arrays(
        [call(x.scatter, chunks, steps, L=4)[..., 0]],
        [
            (
                "float32",
                [
                    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 0.0, 0.0, 0.0],
                    [13.0, 14.0, 15.0, 16.0, 17.0, 18.0, 19.0, 20.0, 21.0, 22.0, 23.0, 24.0],
                ],
            )
        ],
    )
    swapped = steps.swapaxes(0, 1)[None]
    assert np.array_equal(call(x.gather, swapped, L=4), chunks)
    assert call(x.gather, np.tile(steps, 2), L=4).shape == (2, 8, 4, 2)
    check_arrays(
        [call(x.scatter, chunks, swapped, L=4)[0, ..., 0]],
        [
            (
                "float32",
                [
                    [1.0, 13.0],
                    [2.0, 14.0],
                    [3.0, 15.0],
                    [4.0, 16.0],
                    [5.0, 17.0],
                    [6.0, 18.0],
                    [7.0, 19.0],
                    [8.0, 20.0],
                    [9.0, 21.0],
                    [0.0, 22.0],
                    [0.0, 23.0],
                    [0.0, 24.0],
                ],
            )
        ],
    )
    assert call(x.scatter, chunks, swapped, L=4).shape == (1, 12, 2, 1)


def test_gates_of_the_entry_before_a_segment():
    """The entry before a segment has the m with which it starts as its input gate, and resets
    the state. Other resets are those of steps behind the first of a part."""
    x = call(chunk_list.chunks_by_segment, np.int32([[5], [0]]), np.int32([9, 12]), S=12, L=4)
    i, m = steps[..., 0], np.float32([[0.5], [0.25]])
    i, f, starts = call(x.gates, i, -i, np.ones((2, 12), np.int32), m, L=4)
    check_arrays(
        [i.reshape(2, 8, 4), f.reshape(2, 8, 4), starts.reshape(2, 8, 4)],
        [
            (
                "float32",
                [
                    [
                        [0.5, -np.inf, -np.inf, -np.inf],
                        [1.0, 2.0, 3.0, 4.0],
                        [5.0, -np.inf, -np.inf, -np.inf],
                        [0.0, -np.inf, -np.inf, -np.inf],
                        [6.0, 7.0, 8.0, 9.0],
                        [-np.inf, -np.inf, -np.inf, -np.inf],
                        [-np.inf, -np.inf, -np.inf, -np.inf],
                        [-np.inf, -np.inf, -np.inf, -np.inf],
                    ],
                    [
                        [0.25, -np.inf, -np.inf, -np.inf],
                        [0.0, -np.inf, -np.inf, -np.inf],
                        [13.0, 14.0, 15.0, 16.0],
                        [17.0, 18.0, 19.0, 20.0],
                        [21.0, 22.0, 23.0, 24.0],
                        [-np.inf, -np.inf, -np.inf, -np.inf],
                        [-np.inf, -np.inf, -np.inf, -np.inf],
                        [-np.inf, -np.inf, -np.inf, -np.inf],
                    ],
                ],
            ),
            (
                "float32",
                [
                    [
                        [-np.inf, np.inf, np.inf, np.inf],
                        [-1.0, -2.0, -3.0, -4.0],
                        [-5.0, np.inf, np.inf, np.inf],
                        [-np.inf, np.inf, np.inf, np.inf],
                        [-6.0, -7.0, -8.0, -9.0],
                        [np.inf, np.inf, np.inf, np.inf],
                        [np.inf, np.inf, np.inf, np.inf],
                        [np.inf, np.inf, np.inf, np.inf],
                    ],
                    [
                        [-np.inf, np.inf, np.inf, np.inf],
                        [-np.inf, np.inf, np.inf, np.inf],
                        [-13.0, -14.0, -15.0, -16.0],
                        [-17.0, -18.0, -19.0, -20.0],
                        [-21.0, -22.0, -23.0, -24.0],
                        [np.inf, np.inf, np.inf, np.inf],
                        [np.inf, np.inf, np.inf, np.inf],
                        [np.inf, np.inf, np.inf, np.inf],
                    ],
                ],
            ),
            (
                "int32",
                [
                    [
                        [0, 0, 0, 0],
                        [0, 1, 1, 1],
                        [1, 0, 0, 0],
                        [0, 0, 0, 0],
                        [0, 1, 1, 1],
                        [0, 0, 0, 0],
                        [0, 0, 0, 0],
                        [0, 0, 0, 0],
                    ],
                    [
                        [0, 0, 0, 0],
                        [0, 0, 0, 0],
                        [0, 1, 1, 1],
                        [1, 1, 1, 1],
                        [1, 1, 1, 1],
                        [0, 0, 0, 0],
                        [0, 0, 0, 0],
                        [0, 0, 0, 0],
                    ],
                ],
            ),
        ],
    )


def test_states_before_and_behind_segments():
    """States before and behind segments."""
    x = call(chunk_list.chunks_by_segment, np.int32([[5], [0]]), np.int32([9, 12]), S=12, L=4)
    states = np.arange(32, dtype=np.float32).reshape(2, 8, 2)
    check_arrays(
        [call(x.with_initial, states, np.float32([[[-1, -2]], [[-3, -4]]]))],
        [
            (
                "float32",
                [
                    [
                        [-1.0, -2.0],
                        [2.0, 3.0],
                        [4.0, 5.0],
                        [0.0, 0.0],
                        [8.0, 9.0],
                        [10.0, 11.0],
                        [12.0, 13.0],
                        [14.0, 15.0],
                    ],
                    [
                        [-3.0, -4.0],
                        [0.0, 0.0],
                        [20.0, 21.0],
                        [22.0, 23.0],
                        [24.0, 25.0],
                        [26.0, 27.0],
                        [28.0, 29.0],
                        [30.0, 31.0],
                    ],
                ],
            )
        ],
    )
    check_arrays([states[call(x.behind_segments)]], [("float32", [[[6.0, 7.0]], [[18.0, 19.0]]])])


def test_the_place_of_a_segments_state():
    """The place of a segment's state in (B, N, NH): the parts behind the last segment share its
    place."""
    head, part = np.broadcast_arrays(np.int32([[0], [2], [3], [5]]), np.int32([0, 1, 3]))
    check_arrays(
        [call(functools.partial(chunk_list.state_of, p, 2), head, part)],
        [("int32", [[0, 3, 3], [2, 5, 5], [6, 9, 9], [8, 11, 11]])],
    )


def test_rows_with_one_segment_and_no_entry_before_it():
    """Rows with one segment and no entry before it."""
    x = call(chunk_list.chunks_by_length, np.int32([0, 6, 12]), S=12, p=p)
    check_arrays(
        [x.parts.start_steps, x.parts.first[:, :2], *x.entries, x.entry_parts],
        [
            ("int32", [[0, 0, 0, 12], [0, 6, 6, 12], [0, 12, 12, 12]]),
            ("int32", [[0, 0], [0, 0], [0, 0]]),
            ("int32", [[0, 4, 8], [0, 4, 8], [0, 4, 8]]),
            ("int32", [[0, 0, 0], [4, 2, 0], [4, 4, 4]]),
            ("int32", [[0, 0, 0], [0, 0, 0], [0, 0, 0]]),
        ],
    )


def test_active_chunks():
    """The chunks with steps are active, and the first ones in an order of the chunks of all
    rows."""
    x = call(chunk_list.chunks_by_length, np.int32([1, 4, 5, 12]), S=12, p=p)
    check_arrays(
        [*call(x.with_active_first).active_first, call(lambda: x.num_active), x.has_steps],
        [
            ("int32", [7]),
            ("int32", [0, 3, 6, 7, 9, 10, 11, 1, 2, 4, 5, 8]),
            ("int32", [1, 1, 2, 3]),
            (
                "bool",
                [
                    [True, False, False],
                    [True, False, False],
                    [True, True, False],
                    [True, True, True],
                ],
            ),
        ],
    )
