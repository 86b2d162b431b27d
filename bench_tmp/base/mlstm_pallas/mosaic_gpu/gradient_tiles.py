"""Tiles of P and dP, and the sums of W = dP * scores over them, for the kernels that compute P."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from mlstm_pallas.gate_gradients import TileSums
from mlstm_pallas.mosaic_gpu import products
from mlstm_pallas.mosaic_gpu.fragments import across_columns, decay_tile
from mlstm_pallas.mosaic_gpu.launch import WG_ROWS, float32
from mlstm_pallas.problem import Problem


def write_tiles(
    P,
    dP,
    scores: Array,
    dA: Array,
    e: Iterable[Array],
    queries: Sequence[Any],
    mask: Array | None,
    scale: float,
) -> Array:
    """Writes P and dP to shared memory; returns W.

    Args:
      P, dP: references to one tile each.
      scores, dA: q k^T and dh v^T.
      e: see ``decay_tile``.
      queries: u_hi, u_lo, 1 / den_t and dz_t den_t. The last two are None without a normaliser; the
        last one is also None if it is 0 everywhere.
      mask: where s <= t; None: everywhere.
    """
    *u, inv_den, dz_den = queries
    columns = scores.shape[1]

    def scaled(x):
        return x * (scale if inv_den is None else across_columns(inv_den * scale, columns))

    D = decay_tile(e, u)
    D = D if mask is None else jnp.where(mask, D, 0.0)
    scores = D * scores
    products.store(P, scaled(scores).astype(P.dtype))
    dA = scaled(dA if dz_den is None else dA + across_columns(dz_den, columns))
    products.store(dP, (D * dA).astype(dP.dtype))
    return scores * dA


def w_sum_shapes(p: Problem) -> TileSums:
    """The output "pairs" of a kernel that sums W.

    per_query: the sums of W_ts over s < t in each tile of 64 keys; per_key: the sums over t > s in
    each tile of 64 queries; diagonal: W_tt.
    """
    per_tile: Any = float32(p.BNH, p.L // WG_ROWS, p.S)
    per_step: Any = float32(p.BNH, p.S)
    return TileSums(per_tile, per_tile, per_step)


def tile_pairs(sums: TileSums, p: Problem) -> TileSums:
    """The sums that a kernel wrote to outputs of ``w_sum_shapes``, by chunk."""
    return TileSums(*(x.reshape(*x.shape[:-1], p.NC, p.L // WG_ROWS, WG_ROWS) for x in sums))
