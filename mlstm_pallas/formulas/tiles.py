"""Algebra on loaded tiles, shared by the kernels.

Functions without a matrix product lower to Triton and to Mosaic GPU.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from mlstm_pallas.problem.dimensions import Problem

Precision = lax.Precision | lax.DotAlgorithmPreset | None


def dot(a: Array, b: Array, precision: Precision, *, a_axis: int = 1, b_axis: int = 0) -> Array:
    """Contracts axis a_axis of the tile a with axis b_axis of the tile b, with float32 sums."""
    if precision is lax.Precision.HIGHEST:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    dims = (((a_axis,), (b_axis,)), ((), ()))
    precision = precision or lax.Precision.DEFAULT  # jax's default may be set by the caller
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def weighted(w: Array, x: Array, p: Problem | None = None) -> Array:
    """w x, and 0 where w is 0, even if x is inf or NaN; with p only if ``p.isolates``."""
    if p is None or p.isolates:
        shape = jnp.broadcast_shapes(w.shape, x.shape)
        x = jnp.where(jnp.broadcast_to(w == 0, shape), 0.0, x)
    return w * x


Carry = TypeVar("Carry")
Index = TypeVar("Index", int, Array)


# Indices are not negative. Traced ones stay int32 under jax_enable_x64 and avoid jnp's // and %,
# which round towards minus infinity. Integers of the host stay on the host: jax refuses to run an
# operation on them eagerly inside a shard_map.


def divide(x: Index, n: int) -> Index:
    return lax.div(x, np.int32(n)) if isinstance(x, Array) else x // n


def remainder(x: Index, n: int) -> Index:
    return lax.rem(x, np.int32(n)) if isinstance(x, Array) else x % n


def triangle_tile(index: Array, n: int) -> tuple[Any, Any]:
    """(i, j), the index-th of the n (n + 1) / 2 tiles with j <= i < n, ordered by i, then by j."""
    later = (index >= m * (m + 1) // 2 for m in range(1, n))
    i: Any = sum((lax.convert_element_type(x, np.int32) for x in later), np.int32(0))
    return i, index - divide(i * (i + 1), 2)


def loop(count: int | Array, body: Callable[[Array, Carry], Carry], init: Carry) -> Carry:
    """body(0), ..., body(count - 1), carrying its result."""

    def step(index: Array, carry: Carry) -> Carry:
        return body(lax.convert_element_type(index, np.int32), carry)

    return lax.fori_loop(0, count, step, init)


def fori(count: int | Array) -> Callable[[Callable[[Array], None]], None]:
    """Calls the decorated body(0), ..., body(count - 1), as ``pl.when`` calls what it decorates."""

    def run(body: Callable[[Array], None]) -> None:
        loop(count, lambda index, _: body(index), None)

    return run


def sum_of(count: int, product: Callable[[Array], Array], shape: tuple[int, ...]) -> Array:
    """product(0) + ... + product(count - 1), in float32."""
    return loop(count, lambda index, acc: acc + product(index), jnp.zeros(shape, jnp.float32))


def product(
    a: Any, b: Any, rows: Any, columns: Any, block: int, precision: Precision, *, b_axis: int = 0
) -> Array:
    """Rows of a times columns of b (with b_axis 1 rows of b^T), in float32; both are references.

    An iteration reads ``block`` elements of the axis that is contracted.
    """

    def block_product(index: Array) -> Array:
        inner = block_at(index, block)
        at = (columns, inner) if b_axis else (inner, columns)
        return dot(a[rows, inner], b[at], precision, b_axis=b_axis)

    return sum_of(blocks_over(a.shape[1], block), block_product, (rows.size, columns.size))


def block_at(index: Array, size: int) -> Any:
    return pl.ds(index * size, size)


def blocks(total: int, block: int) -> int:
    """The number of blocks of an axis, which they must divide, because no block is masked."""
    if total % block:
        raise ValueError(f"a tile of {block} does not divide an axis of {total}")
    return total // block


def blocks_over(total: int, block: int) -> int:
    """The number of blocks that cover an axis; the last one may reach beyond it, masked."""
    return -(-total // block)


def rounded_up(total: int, *tiles: int) -> int:
    """The size of the blocks that cover an axis; the largest tile is a multiple of the others."""
    return blocks_over(total, max(tiles)) * max(tiles)


def pieces(total: int, most: int) -> Iterator[Any]:
    """Slices that make up an axis, of sizes that are powers of two up to ``most``."""
    start = 0
    while start < total:
        size = min(1 << ((total - start).bit_length() - 1), most)
        yield pl.ds(start, size)
        start += size
