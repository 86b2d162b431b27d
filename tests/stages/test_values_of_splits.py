"""Splits of a sequence: values that a hand can check."""

import functools

import jax
import numpy as np
from oracle import assert_values

from mlstm_pallas.formulas.splits import (
    decays_in_splits,
    group_splits,
    other_decays,
    split_states,
    splits_as_heads,
    splits_of,
)


def call(function, *arrays, **options):
    return np.asarray(jax.jit(functools.partial(function, **options))(*arrays))


def test_the_number_of_splits():
    """There are 4 to 16 of them, a power of two that divides the chunks."""
    assert [splits_of(64, most) for most in (0, 1, 3, 4, 7, 8, 16, 99)] == [
        1,
        1,
        1,
        4,
        4,
        8,
        16,
        16,
    ]
    assert [splits_of(NC, 99) for NC in (1, 2, 4, 6, 8, 12, 40, 64)] == [1, 1, 4, 1, 8, 4, 8, 16]


def test_decays_of_the_other_chunks():
    """Two heads have four chunks. Each weight is the product of gamma over the other chunks."""
    gamma = np.float32([[0.5, 0.25, 2, 4], [1, 0, 3, 5]])
    assert_values([call(other_decays, gamma)], [[[2.0, 8.0, 4.0, 1.0], [0.0, 15.0, 5.0, 1.0]]])
    assert_values(
        [call(other_decays, gamma, backward=True)],
        [[[1.0, 0.5, 0.125, 0.25], [1.0, 1.0, 0.0, 0.0]]],
    )


def test_decays_in_two_splits():
    """In two splits, for eight steps."""
    gamma = np.float32([[0.5, 0.25, 2, 4], [1, 0, 3, 5]])
    assert_values(
        [call(decays_in_splits, gamma, num_splits=2, S=8)],
        [[[0.25, 0.25, 1.0, 1.0, 4.0, 4.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0, 5.0, 5.0, 1.0, 1.0]]],
    )
    assert_values(
        [call(decays_in_splits, gamma, num_splits=2, S=8, backward=True)],
        [[[1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0]]],
    )


def test_states_of_two_splits():
    """The states before two splits, and after them where time runs backward: the initial state
    of a head, and what is left of it, 0.125 and 0 of it or 8 and 15 times as much, with what
    the split adds."""
    gamma = np.float32([[0.5, 0.25, 2, 4], [1, 0, 3, 5]])
    added, initial = np.float32([[[[10]]], [[[20]]]]), np.float32([[[3]], [[7]]])
    assert call(split_states, added, gamma, initial).shape == (4, 1, 1)
    assert_values([call(split_states, added, gamma, initial).ravel()], [[3.0, 10.375, 7.0, 20.0]])
    assert_values([call(split_states, added, gamma, None).ravel()], [[0.0, 10.0, 0.0, 20.0]])
    assert_values(
        [call(split_states, added, gamma, initial, backward=True).ravel()],
        [[34.0, 3.0, 125.0, 7.0]],
    )
    assert_values(
        [call(split_states, added, gamma, None, backward=True).ravel()], [[10.0, 0.0, 20.0, 0.0]]
    )


def test_states_of_three_splits():
    """Three splits follow one another: 2 * 1 + 10, 3 * 12 + 20; backward 5 * 1 + 20, 3 * 25 +
    10."""
    added, gamma = np.float32([[[[10]], [[20]]]]), np.float32([[2, 3, 5]])
    assert_values(
        [call(split_states, added, gamma, np.float32([[[1]]])).ravel()], [[1.0, 12.0, 56.0]]
    )
    assert_values(
        [call(split_states, added, gamma, np.float32([[[1]]]), backward=True).ravel()],
        [[85.0, 25.0, 1.0]],
    )


def test_splits_as_heads():
    """Splits count as heads, except where a row has other steps or an axis of heads."""
    x = np.arange(24).reshape(2, 12)
    assert_values(
        [splits_as_heads(x, 3, 12)],
        [
            [
                [0, 1, 2, 3],
                [4, 5, 6, 7],
                [8, 9, 10, 11],
                [12, 13, 14, 15],
                [16, 17, 18, 19],
                [20, 21, 22, 23],
            ]
        ],
    )
    assert bool((group_splits(splits_as_heads(x, 3, 12), 3) == x.reshape(2, 3, 4)).all())
    assert splits_as_heads(x[..., None], 3, 12).shape == (6, 4, 1)
    assert splits_as_heads(x[..., None], 3, 13).shape == (2, 12, 1)
    assert splits_as_heads(x[:, :, None, None], 3, 12).shape == (2, 12, 1, 1)
    assert splits_as_heads(x, 3, 13).shape == (6, 4)
