"""Tiles in the registers of a warpgroup, in the layout of an accumulator, and vectors beside them.

A vector has one element per row of a tile (BY_ROWS) or per column (BY_COLUMNS). The kernels that
compute P write tiles of P and dP, and sum W = dP * scores over them.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.gate_gradients import TileSums
from mlstm_pallas.formulas.normaliser import Normaliser
from mlstm_pallas.formulas.scores import decays, score_gradients
from mlstm_pallas.formulas.tiles import blocks, loop
from mlstm_pallas.mosaic_gpu.common import products
from mlstm_pallas.mosaic_gpu.common.launch import (
    BY_COLUMNS,
    BY_ROWS,
    WG_ROWS,
    block,
    float32,
    load,
    load_float32,
    plgpu,
)
from mlstm_pallas.problem.dimensions import Problem

tile_iota = functools.partial(plgpu.broadcasted_iota, layout=plgpu.Layout.WGMMA)


def across_columns(x: jax.Array, columns: int = WG_ROWS) -> jax.Array:
    """x[:, None], repeated; x is BY_ROWS."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def across_rows(x: jax.Array) -> jax.Array:
    """x[None, :], repeated; x is BY_COLUMNS."""
    return lax.broadcast_in_dim(x, (WG_ROWS, x.shape[0]), [1])


def load_or_zeros(ref, index, layout=plgpu.Layout.WGMMA):
    """A part of an array in global memory; zeros if the reference is absent."""
    if ref is None:
        shape: Any = [x.size for x in index if isinstance(x, pl.Slice)]
        return products.zeros(*shape, layout=layout)
    return load(ref.at[index], layout, optimized=False)


def load_by_rows(ref, *index):
    """A vector from global memory; None if the reference is absent."""
    return None if ref is None else load(ref.at[index], BY_ROWS, optimized=False)


def q_times_n(q_tile: Callable[[Any], Any], columns: int, n, *chunk) -> jax.Array:
    """The products q_tile(x) * n, summed over the tiles x of 64 queries and so many columns.

    The row sums are q_t . n. n: in global memory, for all chunks.
    """

    def add(x, total):
        q = load_float32(q_tile(x))
        n_tile = load(n.at[(*chunk, block(x, columns))], BY_COLUMNS, optimized=False)
        return total + q * across_rows(n_tile)

    tiles = blocks(n.shape[-1], columns)
    return loop(tiles, add, products.zeros(WG_ROWS, columns))


def score_operands(x, normaliser: Normaliser | None) -> dict[str, Any]:
    """The inputs, by name, of a kernel that computes P: queries, keys and what weights them.

    vecN_states is None without a normaliser, and vecM also if the floor does not need it.
    """
    g, needs_m = x.gates.per_step(), normaliser is not None and normaliser.floor_needs_m
    return dict(
        matQ=x.matQ,
        matK=x.matK,
        vecN_states=None if normaliser is None else x.vecN_states,
        vecE=g.vecE,
        vecU=g.vecU,
        vecW=g.vecW,
        vecM=g.vecM if needs_m else None,
    )


def write_tiles(
    P,
    dP,
    qk: jax.Array,
    dh_v: jax.Array,
    e: Iterable[jax.Array],
    queries: Sequence[Any],
    mask: jax.Array | None,
    p: Problem,
) -> jax.Array:
    """Writes P and dP to shared memory; returns W. See ``score_gradients``.

    Args:
      P, dP: references to one tile each.
      e: see ``decays``.
      queries: u_hi, u_lo, inv_den and dz_den.
      mask: where s <= t; None: everywhere.
    """
    *u, inv_den, dz_den = queries
    *tiles, W = score_gradients(qk, dh_v, decays(e, u, mask), p, inv_den, dz_den)
    for ref, tile in zip((P, dP), tiles, strict=True):
        products.store(ref, tile.astype(ref.dtype))
    return W


def w_sum_shapes(p: Problem) -> TileSums:
    """The output "tile_sums" of a kernel that sums W.

    per_query: the sums of W_ts over s < t in each tile of 64 keys; per_key: the sums over t > s in
    each tile of 64 queries; diagonal: W_tt.
    """
    per_tile: Any = float32(p.BNH, p.L // WG_ROWS, p.S)
    per_step: Any = float32(p.BNH, p.S)
    return TileSums(per_tile, per_tile, per_step)
