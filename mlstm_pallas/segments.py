"""States where segments of a sequence begin, from matrix products over whole segments.

X_{c+1} = gamma_c X_c + sum_t a_t b_t^T, with a the scaled keys or queries of chunk c, is linear in the state before a segment:

    X behind a segment = (prod_c gamma_c) X before it + sum_t [prod_{c' > c(t)} gamma_c'] a_t b_t^T        (c(t): the chunk of t)

and with earlier chunks for later ones where time runs backward. All these weights are at most 1. With the state before each of them known,
segments are as independent as heads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.tiles import Precision


class SegmentProducts(NamedTuple):
    """What each segment adds to the state that comes next, times exp(m); float32."""

    X: jax.Array  # (B, NH, segments, DHQK, DHHV)
    m: jax.Array  # (B, NH, segments)

    def of(self, segments: int, m: jax.Array) -> jax.Array | None:
        """X of all but the last of so many segments, if it is of these, for stabilisers m at all chunk borders, (B, NH, NC + 1), no
        smaller than its own."""
        if self.X.shape[2] != segments:
            return None
        every = (m.shape[2] - 1) // segments
        weight = jnp.where(self.m == -jnp.inf, 0.0, jnp.exp(self.m - m[..., every::every]))
        return (weight[..., None, None] * self.X)[:, :, :-1]


def decays_of_others(gamma: jax.Array, *, backward: bool = False) -> jax.Array:
    """prod of gamma over the later chunks (earlier ones with backward), along the last axis."""
    products = lax.cumprod(gamma, axis=gamma.ndim - 1, reverse=not backward)
    one = jnp.ones_like(gamma[..., :1])
    return jnp.concatenate([one, products[..., :-1]] if backward else [products[..., 1:], one], axis=-1)


def decays_in_segments(gamma: jax.Array, segments: int, S: int, *, backward: bool = False) -> jax.Array:
    """By step, the prod of gamma over the later chunks of its segment (earlier ones with backward); gamma (B, NH, NC) to (B, NH, S)."""
    B, NH, NC = gamma.shape
    decays = decays_of_others(gamma.reshape(B, NH, segments, NC // segments), backward=backward)
    return jnp.broadcast_to(decays.reshape(B, NH, NC, 1), (B, NH, NC, S // NC)).reshape(B, NH, S)


def segment_products(a: jax.Array, b: jax.Array, r: jax.Array, segments: int, precision: Precision) -> jax.Array:
    """sum_t r_t a_t b_t^T over each segment, (B, NH, segments, DHQK, DHHV) in the dtype of r.

    Args:
      a: (B, NH, S, DHQK), b: (B, NH, S, DHHV), in the kernel dtype; r: (B, NH, S) in the accumulator's.
    """

    def split(x):
        return x.reshape(*x.shape[:2], segments, x.shape[2] // segments, x.shape[-1])

    scaled = split((a * r[..., None]).astype(a.dtype))
    return jnp.einsum("bhpsk,bhpsv->bhpkv", scaled, split(b), precision=precision, preferred_element_type=r.dtype)


def segment_states(added: jax.Array, gamma: jax.Array, initial: jax.Array | None, *, backward: bool = False) -> jax.Array:
    """X where each segment begins, with backward where it ends: (B, NH, segments, DHQK, DHHV) float32.

    Args:
      added: what each segment but the last one adds to X, with backward but the first: (B, NH, segments - 1, DHQK, DHHV) float32.
      gamma: (B, NH, NC) float32, NC a multiple of the number of segments.
      initial: (B, NH, DHQK, DHHV) float32 where the sequence begins, or ends; None: zeros.
    """
    B, NH, others = added.shape[:3]
    gamma = jnp.prod(gamma.reshape(B, NH, others + 1, gamma.shape[2] // (others + 1)), axis=-1)[..., None, None]
    gamma = gamma[:, :, 1:] if backward else gamma[:, :, :-1]
    X = [jnp.zeros_like(added[:, :, 0]) if initial is None else initial]
    for j in reversed(range(others)) if backward else range(others):
        X.append(gamma[:, :, j] * X[-1] + added[:, :, j])
    return jnp.stack(X[::-1] if backward else X, axis=2)
