"""The denominator of h, its floor, and its gradients.

h_t     = num_t / den_t, and 0/0 is 0
den_t   = max(|z_t|, floor_t) + eps
floor_t = norm_val exp(-m_t), or norm_val
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas.tiles import weighted


class NormaliserGradients(NamedTuple):
    """The normaliser's gradients of every step, (B * NH, S) each; all None without a normaliser."""

    vecInvDen: Any = None  # 1 / den_t
    vecDz: Array | None = None  # dz_t
    vecDzDen: Any = None  # dz_t den_t
    vecDm: Array | None = None  # dm_t


@dataclasses.dataclass(frozen=True)
class Normaliser:
    """The options of the denominator.

    Attributes:
      eps: added to the denominator.
      norm_val: the floor of |z|.
      stabilize_correctly: True: the floor is norm_val exp(-m), so that h does not depend on the
        stabiliser m. False: it is norm_val.
    """

    eps: float = 1e-6
    norm_val: float = 1.0
    stabilize_correctly: bool = True

    @property
    def floor_needs_m(self) -> bool:
        return self.stabilize_correctly and self.norm_val > 0

    def floor(self, m: Any) -> Any:
        """floor_t; m may be None unless ``floor_needs_m``."""
        return self.norm_val * jnp.exp(-m) if self.floor_needs_m else self.norm_val

    def denominator(self, z: Array, m: Array | None) -> Array:
        """den, or 1 where it is 0, because 0/0 is 0. It lowers to Triton and Mosaic GPU."""
        den = at_least(jnp.abs(z), self.floor(m)) + self.eps
        return jnp.where(den == 0, 1.0, den) if self.eps == 0 else den

    def normalise(self, num: Array, z: Array, m: Array) -> Array:
        """h = num / den; num: (..., DHV), z and m: (...)."""
        return num * self.reciprocal(z, m)[..., None]

    def reciprocal(self, z: Array, m: Array) -> Array:
        """1 / den.

        Differentiable, and finite for any m: numerator and denominator are scaled by
        exp(min(m, 0)), so that neither the floor nor its derivative overflows.
        """
        if self.floor_needs_m:
            m = jnp.maximum(m, -1e30)
            factor = jnp.exp(jnp.minimum(m, 0.0))
            floor = self.norm_val * jnp.exp(jnp.minimum(-m, 0.0))
        else:
            factor, floor = jnp.ones_like(m), jnp.full_like(m, self.norm_val)
        den = at_least(jnp.abs(z) * factor, floor) + self.eps * factor
        return inverse(den, factor)

    def gradients(self, delta: Array, z: Array, m: Array) -> NormaliserGradients:
        """delta_t = dh_t . h_t; delta, z and m have one shape. The result is linear in delta."""
        floor = self.floor(m)
        inv_den = inverse(at_least(jnp.abs(z), floor) + self.eps)
        on_floor = jnp.abs(z) < floor  # False for NaN, which reaches dz
        dz_den = jnp.where(on_floor, 0.0, -weighted(delta, jnp.sign(z)))
        share = self.eps * inv_den
        if not self.stabilize_correctly:
            share = jnp.where(on_floor, 1.0, share)
        return NormaliserGradients(
            inv_den, weighted(dz_den, inv_den), dz_den, -weighted(delta, share)
        )


DEFAULT_NORMALISER = Normaliser()


def normaliser_gradients(
    normaliser: Normaliser | None, delta: Array | None, z: Any, m: Array
) -> NormaliserGradients:
    """``Normaliser.gradients``, if there is a normaliser; delta None: 0."""
    if normaliser is None:
        return NormaliserGradients()
    return normaliser.gradients(jnp.zeros_like(z) if delta is None else delta, z, m)


def at_least(x: Array, floor: Any) -> Array:
    """max(x, floor), and NaN where x is NaN, for which jnp.maximum returns the floor on Triton."""
    return jnp.where(x < floor, floor, x)


def inverse(den: Array, factor: Any = 1.0) -> Array:
    """factor / den, and 0 where den is 0; NaN where den is NaN."""
    return jnp.where(den == 0, 0.0, factor / jnp.where(den == 0, 1.0, den))


def query_scale(w: Array, qk_scale: float, inv_den: Array | None = None) -> Array:
    """r_t = w_t scale / den_t, the scale of a query's inter-chunk part; inv_den None: den is 1."""
    r = w * qk_scale
    return r if inv_den is None else weighted(r, inv_den)
