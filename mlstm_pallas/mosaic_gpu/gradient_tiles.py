"""Tiles of P and dP, and the sums of W = dP * scores over them, for the kernels that compute P."""

from collections.abc import Iterable, Mapping, Sequence

import jax
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
    u: Sequence[Array],
    inv_den: Array | None,
    dz_den: Array | None,
    mask: Array | None,
    scale: float,
) -> Array:
    """Writes P and dP to shared memory; returns W.

    Args:
      P, dP: references to one tile each.
      scores, dA: q k^T and dh v^T.
      e, u: see ``decay_tile``.
      inv_den, dz_den: 1 / den_t and dz_t den_t; None without a normaliser. dz_den is also None if
        it is 0 everywhere.
      mask: where s <= t; None: everywhere.
    """
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


def w_sum_shapes(p: Problem) -> dict[str, jax.ShapeDtypeStruct]:
    """The outputs of a kernel that sums W.

    per_query: the sums of W_ts over s < t in each tile of 64 keys; per_key: the sums over t > s in
    each tile of 64 queries; diagonal: W_tt.
    """
    per_tile = float32(p.BNH, p.L // WG_ROWS, p.S)
    return {"per_query": per_tile, "per_key": per_tile, "diagonal": float32(p.BNH, p.S)}


def tile_pairs(outputs: Mapping[str, Array], p: Problem) -> TileSums:
    """The sums that a kernel wrote to outputs with ``w_sum_shapes``."""
    sums = [outputs[name] for name in TileSums._fields]
    return TileSums(*(x.reshape(*x.shape[:-1], p.NC, p.L // WG_ROWS, WG_ROWS) for x in sums))
