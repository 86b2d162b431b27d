"""normaliser.py on numbers written by hand: h = num / (max(|z|, floor) + eps)."""

import jax.numpy as jnp
import numpy as np
import pytest

from mlstm_pallas.normaliser import (
    Normaliser,
    NormaliserGradients,
    inverse,
    normaliser_gradients,
    query_scale,
)

# eps, norm_val, whether the floor has m; the last ones have no floor.
OPTIONS = [(0.5, 2.0, True), (0.5, 2.0, False), (0.5, 0.0, True), (0.0, 0.0, False)]
Z = np.float32([-9, -1, 0, 0.25, 9])
M = np.float32([np.log(4), 0, -np.log(4)])
z, m = (x.reshape(-1).astype("float64") for x in np.meshgrid(Z, M))


def terms(eps, norm_val, correctly):
    """The floor and the denominator in float64."""
    floor = norm_val * np.exp(-m) if correctly else np.full_like(m, norm_val)
    return floor, np.maximum(np.abs(z), floor) + eps


def close(x, expected):
    np.testing.assert_allclose(x, expected, rtol=2.0**-20)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients(options):
    x, (floor, den) = Normaliser(*options), terms(*options)
    eps, norm_val, correctly = options
    assert x.floor_needs_m == (correctly and norm_val > 0)
    close(x.floor(m) * np.ones_like(m), floor)
    filled = np.where(den == 0, 1, den)  # 0 / 0 is 0
    close(x.denominator(np.float32(z), np.float32(m)), filled)
    num = np.where(den == 0, 0, 3 + z)[:, None] * np.array([1.0, -2.0])
    close(x.normalise(np.float32(num), np.float32(z), np.float32(m)), num / filled[:, None])

    delta = 1 + np.arange(len(z))
    found = x.gradients(jnp.float32(delta), jnp.float32(z), jnp.float32(m))
    on_floor = np.abs(z) < floor
    inv_den = np.where(den == 0, 0, 1 / filled)
    dz_den = np.where(on_floor, 0, -np.sign(z) * delta)
    share = np.where(on_floor & (not correctly), 1, eps * inv_den)
    expected = NormaliserGradients(inv_den, dz_den * inv_den, dz_den, -delta * share)
    for name, y, desired in zip(found._fields, found, expected, strict=True):
        np.testing.assert_allclose(y, desired, rtol=2.0**-20, err_msg=name)


def test_it_is_finite_for_any_m_and_passes_nan():
    x = Normaliser()
    m = np.float32([-1e38, -1e4, 1e4, 1e38, -np.inf])
    assert np.isfinite(x.normalise(np.ones((5, 1), "float32"), np.ones(5, "float32"), m)).all()
    nan = np.full(1, np.nan, "float32")
    for y in (x, Normaliser(eps=0.0, norm_val=0.0)):
        assert np.isnan(y.normalise(nan[None], nan, m[:1])).all()
        assert np.isnan(y.denominator(nan, m[2:3])).all()
        assert np.isnan(y.gradients(nan, nan, m[2:3]).vecDz).all()


def test_defaults():
    assert Normaliser() == Normaliser(1e-6, 1.0, True)
    assert normaliser_gradients(None, None, None, m) == NormaliserGradients(None, None, None, None)
    found = normaliser_gradients(Normaliser(), None, jnp.float32(z), jnp.float32(m))
    close(found.vecInvDen, 1 / terms(1e-6, 1.0, True)[1])
    assert not np.any(found[1:])


def test_inverse_and_scale():
    assert inverse(jnp.float32([0, 4])).tolist() == [0, 0.25]
    w = jnp.float32([2, 3])
    assert query_scale(w, 0.5).tolist() == [1, 1.5]
    assert query_scale(w, 0.5, jnp.float32([4, 8])).tolist() == [4, 12]
