"""The denominator of h: values that a hand can check."""

import jax
import numpy as np
from oracle import assert_values

from mlstm_pallas.formulas.normaliser import (
    DEFAULT_NORMALISER,
    Normaliser,
    NormaliserGradients,
    at_least,
    inverse,
    normaliser_gradients,
    query_scale,
)


def call(function, *arrays):
    return jax.tree.map(np.asarray, jax.jit(function)(*arrays))


def test_the_floor_is_norm_val_exp_of_minus_m():
    """Its floor is norm_val exp(-m), or norm_val; here exp(-m) is 1/4, 1 and 4."""
    z, m = np.float32([[-9], [-1], [0], [0.25], [9]]), np.log(np.float32([4, 1, 0.25]))
    z, m = np.broadcast_arrays(z, m)
    x = Normaliser(eps=0.5, norm_val=2.0)
    assert (x.floor_needs_m, Normaliser(norm_val=0.0).floor_needs_m) == (True, False)
    assert_values(
        [call(x.floor, m[0]), call(x.denominator, z, m)],
        [
            [0.5, 2.0, 8.0],
            [[9.5, 9.5, 9.5], [1.5, 2.5, 8.5], [1.0, 2.5, 8.5], [1.0, 2.5, 8.5], [9.5, 9.5, 9.5]],
        ],
        decimals=4,
    )
    assert_values(
        [call(x.normalise, 10 + np.stack([z, z], -1), z, m)[..., 1]],
        [
            [
                [0.1053, 0.1053, 0.1053],
                [6.0, 3.6, 1.0588],
                [10.0, 4.0, 1.1765],
                [10.25, 4.1, 1.2059],
                [2.0, 2.0, 2.0],
            ]
        ],
        decimals=4,
    )


def test_gradients_on_the_floor_and_above():
    """delta is 1 here. On the floor z has no gradient. dm is -eps / den."""
    z, m = np.float32([[-9], [-1], [0], [0.25], [9]]), np.log(np.float32([4, 1, 0.25]))
    z, m = np.broadcast_arrays(z, m)
    ones = np.ones_like(z)
    x = Normaliser(eps=0.5, norm_val=2.0)
    assert_values(
        [*call(x.gradients, ones, z, m)],
        [
            [
                [0.1053, 0.1053, 0.1053],
                [0.6667, 0.4, 0.1176],
                [1.0, 0.4, 0.1176],
                [1.0, 0.4, 0.1176],
                [0.1053, 0.1053, 0.1053],
            ],
            [
                [0.1053, 0.1053, 0.1053],
                [0.6667, 0.0, 0.0],
                [0.0, 0.0, 0.0],
                [0.0, 0.0, 0.0],
                [-0.1053, -0.1053, -0.1053],
            ],
            [
                [1.0, 1.0, 1.0],
                [1.0, 0.0, 0.0],
                [0.0, 0.0, 0.0],
                [0.0, 0.0, 0.0],
                [-1.0, -1.0, -1.0],
            ],
            [
                [-0.0526, -0.0526, -0.0526],
                [-0.3333, -0.2, -0.0588],
                [-0.5, -0.2, -0.0588],
                [-0.5, -0.2, -0.0588],
                [-0.0526, -0.0526, -0.0526],
            ],
        ],
        decimals=4,
    )


def test_a_constant_floor():
    """With a constant floor, on which dm is -1."""
    z, m = np.float32([[-9], [-1], [0], [0.25], [9]]), np.log(np.float32([4, 1, 0.25]))
    z, m = np.broadcast_arrays(z, m)
    ones = np.ones_like(z)
    x = Normaliser(0.5, 2.0, False)
    assert not (x.floor_needs_m)
    assert_values(
        [x.floor(None), call(x.denominator, z, m)],
        [
            2.0,
            [[9.5, 9.5, 9.5], [2.5, 2.5, 2.5], [2.5, 2.5, 2.5], [2.5, 2.5, 2.5], [9.5, 9.5, 9.5]],
        ],
        decimals=4,
    )
    assert_values(
        [call(x.normalise, 10 + z[..., None], z, m)[..., 0]],
        [
            [
                [0.1053, 0.1053, 0.1053],
                [3.6, 3.6, 3.6],
                [4.0, 4.0, 4.0],
                [4.1, 4.1, 4.1],
                [2.0, 2.0, 2.0],
            ]
        ],
        decimals=4,
    )
    assert_values(
        [*call(x.gradients, ones, z, m)],
        [
            [
                [0.1053, 0.1053, 0.1053],
                [0.4, 0.4, 0.4],
                [0.4, 0.4, 0.4],
                [0.4, 0.4, 0.4],
                [0.1053, 0.1053, 0.1053],
            ],
            [
                [0.1053, 0.1053, 0.1053],
                [0.0, 0.0, 0.0],
                [0.0, 0.0, 0.0],
                [0.0, 0.0, 0.0],
                [-0.1053, -0.1053, -0.1053],
            ],
            [
                [1.0, 1.0, 1.0],
                [0.0, 0.0, 0.0],
                [0.0, 0.0, 0.0],
                [0.0, 0.0, 0.0],
                [-1.0, -1.0, -1.0],
            ],
            [
                [-0.0526, -0.0526, -0.0526],
                [-1.0, -1.0, -1.0],
                [-1.0, -1.0, -1.0],
                [-1.0, -1.0, -1.0],
                [-0.0526, -0.0526, -0.0526],
            ],
        ],
        decimals=4,
    )


def test_without_a_floor_and_eps():
    """Without a floor and without eps 0 / 0 is 0, and its gradients are 0."""
    z, m = np.float32([[-9], [-1], [0], [0.25], [9]]), np.log(np.float32([4, 1, 0.25]))
    z, m = np.broadcast_arrays(z, m)
    ones = np.ones_like(z)
    x = Normaliser(0.0, 0.0)
    assert_values(
        [call(lambda z: x.denominator(z, None), z)[:, 0]], [[9.0, 1.0, 1.0, 0.25, 9.0]], decimals=4
    )
    assert_values(
        [call(x.normalise, z[..., None], z, m)[:, 0, 0]], [[-1.0, -1.0, 0.0, 1.0, 1.0]], decimals=4
    )
    assert_values(
        [*(y[:, 0] for y in call(x.gradients, ones, z, m))],
        [
            [0.1111, 1.0, 0.0, 4.0, 0.1111],
            [0.1111, 1.0, 0.0, -4.0, -0.1111],
            [1.0, 1.0, 0.0, -1.0, -1.0],
            [0.0, 0.0, 0.0, 0.0, 0.0],
        ],
        decimals=4,
    )


def test_h_is_finite_for_any_m():
    """h is finite for any m, and NaN stays NaN."""
    x, m = Normaliser(), np.float32([-np.inf, -1e38, -1e4, -3, 1e4, 1e38])
    assert_values(
        [call(x.normalise, np.ones((6, 1)), np.ones(6), m)[:, 0]],
        [[0.0, 0.0, 0.0, 0.0498, 1.0, 1.0]],
        decimals=4,
    )
    nan = np.full(2, np.nan)
    assert_values(
        [call(x.normalise, nan[:, None], nan, m[3:5])[:, 0], call(x.denominator, nan, m[3:5])],
        [[np.nan, np.nan], [np.nan, np.nan]],
    )
    assert_values([call(x.gradients, nan, nan, m[3:5]).vecDz], [[np.nan, np.nan]])


def test_defaults():
    """Defaults; without a normaliser there are no gradients, and delta None is 0."""
    x = Normaliser()
    assert Normaliser(eps=1e-06, norm_val=1.0, stabilize_correctly=True) == DEFAULT_NORMALISER
    assert normaliser_gradients(None, None, None, None) == NormaliserGradients(
        vecInvDen=None, vecDz=None, vecDzDen=None, vecDm=None
    )
    assert_values(
        [*call(lambda *y: normaliser_gradients(x, None, *y), np.float32([2, 4]), np.zeros(2))],
        [[0.5, 0.25], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
        decimals=4,
    )
    assert_values(
        [call(inverse, np.float32([0, 4])), call(at_least, np.float32([1, 3, np.nan]), 2.0)],
        [[0.0, 0.25], [2.0, 3.0, np.nan]],
    )
    w = np.float32([2, 3])
    assert_values(
        [query_scale(w, 0.5), query_scale(w, 0.5, np.float32([4, 8]))], [[1.0, 1.5], [4.0, 12.0]]
    )


def test_a_query_of_weight_0_has_scale_0_whatever_its_denominator():
    w, inv_den = np.float32([0, 0, 0, 2]), np.float32([np.inf, np.nan, -np.inf, 4])
    assert_values(query_scale(w, 0.5, inv_den), [0.0, 0.0, 0.0, 4.0])
