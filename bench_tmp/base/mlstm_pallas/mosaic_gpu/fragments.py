"""Tiles in the registers of a warpgroup, in the layout of an accumulator, and vectors beside them.

A vector has one element per row of a tile (BY_ROWS) or per column (BY_COLUMNS).
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlstm_pallas.mosaic_gpu import products
from mlstm_pallas.mosaic_gpu.launch import (
    BY_COLUMNS,
    BY_ROWS,
    WG_ROWS,
    block,
    load,
    load_float32,
    plgpu,
)
from mlstm_pallas.tiles import blocks, loop

_LOG2_E = float(np.log2(np.e))


def across_columns(x: jax.Array, columns: int = WG_ROWS) -> jax.Array:
    """x[:, None], repeated; x is BY_ROWS."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def across_rows(x: jax.Array, rows: int = WG_ROWS) -> jax.Array:
    """x[None, :], repeated; x is BY_COLUMNS."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])


def load_by_rows(ref, *index):
    """A vector from global memory; None if the reference is absent."""
    return None if ref is None else load(ref.at[index], BY_ROWS, optimized=False)


def rows_and_columns(rows: int, columns: int) -> list[jax.Array]:
    """The row and the column of each element of a tile."""
    layout = plgpu.Layout.WGMMA
    return [plgpu.broadcasted_iota(jnp.int32, (rows, columns), x, layout=layout) for x in (0, 1)]


def q_times_n(q_tile: Callable[[Any], Any], n, *chunk) -> jax.Array:
    """The products q_tile(x) * n, summed over the tiles x of 64 columns of 64 queries.

    The row sums are q_t . n. n: in global memory, for all chunks.
    """

    def add(x, total):
        q = load_float32(q_tile(x))
        of_tile = load(n.at[(*chunk, block(x, WG_ROWS))], BY_COLUMNS, optimized=False)
        return total + q * across_rows(of_tile)

    tiles = blocks(n.shape[-1], WG_ROWS)
    return loop(tiles, add, products.zeros(WG_ROWS, WG_ROWS))


def decay_tile(e: Iterable[jax.Array], u: Iterable[jax.Array]) -> jax.Array:
    """exp(e_s - u_t) with queries t in rows and keys s in columns; e and u are (hi, lo).

    It is unbounded where s > t.
    """
    hi, lo = (
        across_rows(x, y.shape[0]) - across_columns(y, x.shape[0])
        for x, y in zip(e, u, strict=True)
    )
    return jnp.exp2(hi * _LOG2_E + lo * _LOG2_E)
