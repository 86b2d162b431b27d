"""In-kernel algebra that the stages share. Everything here works on loaded tiles and lowers to Triton."""

import jax
import jax.numpy as jnp
from jax import lax

Precision = lax.Precision | lax.DotAlgorithmPreset | None

_NEG_INF = float("-inf")


def dot(a: jax.Array, b: jax.Array, precision: Precision, *, a_axis: int = 1, b_axis: int = 0) -> jax.Array:
    """Contracts axis a_axis of the tile a with axis b_axis of the tile b; float32 sums."""
    dims = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def causal_mask(rows: int, columns: int, offset: jax.Array | int) -> jax.Array:
    """Where column s may be seen from row t: s <= t + offset. (rows, columns)"""
    t = lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    s = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
    return s <= t + offset


def decay_tile(e_hi, e_lo, u_hi, u_lo, mask: jax.Array) -> jax.Array:
    """D_ts = exp(e_s - u_t) where mask holds, else 0. e: (columns,), u: (rows,), both as two-float pairs."""
    exponent = (e_hi[None, :] - u_hi[:, None]) + (e_lo[None, :] - u_lo[:, None])
    return jnp.exp(jnp.where(mask, exponent, _NEG_INF))


def blocks(total: int, block: int) -> int:
    """How many blocks tile an axis; they must divide it, as a partial block is not masked."""
    if total % block:
        raise ValueError(f"a tile of {block} does not divide an axis of {total}")
    return total // block
