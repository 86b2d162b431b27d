"""In-kernel algebra that the stages share. It works on loaded tiles; what has no product lowers to Mosaic GPU as well as to Triton."""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

Precision = lax.Precision | lax.DotAlgorithmPreset | None

_NEG_INF = float("-inf")
_LOG2_E = math.log2(math.e)


def dot(
    a: jax.Array, b: jax.Array, precision: Precision, *, a_axis: int = 1, b_axis: int = 0
) -> jax.Array:
    """Contracts axis a_axis of the tile a with axis b_axis of the tile b; float32 sums."""
    dims = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def causal_mask(rows: int, columns: int, offset: jax.Array | int) -> jax.Array:
    """Where step s (columns) may be seen from step t (rows): s <= t + offset."""
    t = lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    s = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
    return s <= t + offset


def decay_tile(e_hi, e_lo, u_hi, u_lo, mask: jax.Array | None) -> jax.Array:
    """D_ts = exp(e_s - u_t) where mask holds, else 0, (rows t, columns s); e and u are two-float pairs.

    With no mask the caller has one: where s > t the exponent has no bound.
    """
    hi = e_hi[None, :] - u_hi[:, None]
    lo = (e_lo * _LOG2_E)[None, :] - (u_lo * _LOG2_E)[:, None]
    exponent = hi * _LOG2_E + lo
    return jnp.exp2(exponent if mask is None else jnp.where(mask, exponent, _NEG_INF))


Carry = TypeVar("Carry")


# Index arithmetic stays int32 where jax_enable_x64 is set, and clear of jnp's // and %, which round towards minus infinity.


def divide(x: jax.Array, n: int) -> jax.Array:
    return lax.div(x, np.int32(n))


def remainder(x: jax.Array, n: int) -> jax.Array:
    return lax.rem(x, np.int32(n))


def loop(count: int | jax.Array, body: Callable[[jax.Array, Carry], Carry], init: Carry) -> Carry:
    """body(0), ..., body(count - 1), carrying its result."""
    return lax.fori_loop(
        0, count, lambda index, carry: body(lax.convert_element_type(index, np.int32), carry), init
    )


def sum_of(
    count: int, product: Callable[[jax.Array], jax.Array], shape: tuple[int, int]
) -> jax.Array:
    """product(0) + ... + product(count - 1), in float32."""
    return loop(count, lambda index, acc: acc + product(index), jnp.zeros(shape, jnp.float32))


def block_at(index: jax.Array, size: int):
    return pl.ds(index * size, size)


def blocks(total: int, block: int) -> int:
    """How many blocks tile an axis; they must divide it, as a partial block is not masked."""
    if total % block:
        raise ValueError(f"a tile of {block} does not divide an axis of {total}")
    return total // block
