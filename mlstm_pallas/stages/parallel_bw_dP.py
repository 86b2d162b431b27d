"""Stage parallel_bw_dP: the operands of recurrent_bw_dC and parallel_bw_dQKV, tiles in parallel.

    P_ts    = D_ts scale q_t . k_s             s <= t inside the chunk
    dP_ts   = D_ts (dnum_t . v_s + dz_t)       likewise
    W_ts    = dP_ts scale q_t . k_s
    kbar_s  = abar_s k_s
    qbar_t  = w_t scale / den_t q_t
    dnum_t  = dh_t / den_t
    delta_t = dh_t . h_t
    dn_c    = gamma_c dn_{c+1} + sum_t w_t scale dz_t q_t

The tiles that it returns have P_ts / den_t and scale dP_ts. Of W_ts it returns sums over the keys
and over the queries of a tile, and of dn_c the sum over t. normaliser.py has den_t and dz_t, which
is a multiple of delta_t. Without h dz_t is 0; without a normaliser dz_t is 0 and den_t is 1.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas.gate_gradients import TileSums, inner
from mlstm_pallas.formulas.gates import ChunkGates, fusion_barrier
from mlstm_pallas.formulas.normaliser import (
    DEFAULT_NORMALISER,
    Normaliser,
    NormaliserGradients,
    normaliser_gradients,
    query_scale,
)
from mlstm_pallas.formulas.rows import by_head
from mlstm_pallas.formulas.scores import decays, score_gradients, tile_steps
from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.operands.chunk_list import ChunkList
from mlstm_pallas.operands.scaled_rows import ScaledRows


class Operands(NamedTuple):
    matQ: Array  # (B * NH, S, DHQK) in the kernel dtype, like all matrices
    matK: Array  # (B * NH, S, DHQK)
    matV: Array  # (B * NH, S, DHV)
    matDeltaH: Array  # (B * NH, S, DHV)
    gates: ChunkGates
    matH: Array | None  # (B * NH, S, DHV); None: delta is not computed, and 0 in dP
    vecZ: Any  # (B * NH, S) float32; not read without a normaliser
    active: ChunkList | None = None  # the chunks with steps are active; None: all


class ScoreTiles(NamedTuple):
    """Tiles in the kernel dtype, and sums of W_ts.

    A tile's column is s - the chunk's first step. Above the diagonal both tiles are 0 in the
    diagonal blocks of MAX_TILE steps and undefined elsewhere. All may be undefined in inactive
    chunks.
    """

    matP: Array  # (B * NH, S, L) P_ts / den_t
    matDeltaP: Array  # (B * NH, S, L) scale dP_ts
    tile_sums: TileSums  # float32


class ScoreGradients(NamedTuple):
    """Matrices in the kernel dtype, sums in float32."""

    scores: ScoreTiles
    queries: ScaledRows  # (B * NH, S, DHQK), scaled: qbar
    keys: ScaledRows | None  # (B * NH, S, DHQK), scaled: kbar; None if C is not recomputed
    vecDelta: Array | None  # (B * NH, S), may be undefined in inactive chunks; None without matH
    # (B * NH, NC, DHQK) sum of w_t scale dz_t q_t; None without a normaliser, and on Mosaic GPU,
    # where step_sums computes it
    vecDeltaN_added: Array | None


def delta_and_gradients(
    x: Operands, normaliser: Normaliser | None
) -> tuple[Array | None, NormaliserGradients]:
    """delta by XLA, and the normaliser's gradients; delta is None without matH."""
    g, delta = x.gates.per_step(), None
    if x.matH is not None:
        delta = by_head(inner(x.matDeltaH, x.matH), g.vecM.shape[-1])
    return delta, normaliser_gradients(normaliser, delta, x.vecZ, g.vecM)


def score_tiles(x: Any, gradients: NormaliserGradients, call: Launch) -> ScoreTiles:
    """The tiles by XLA; x: operands with q, k, v, dh and the gates."""
    p, gates = call.problem, x.gates
    q, k, v, dh = map(call.chunks, (x.matQ, x.matK, x.matV, x.matDeltaH))
    qk, dh_v = call.product("nctk,ncsk->ncts", q, k), call.product("nctv,ncsv->ncts", dh, v)
    normaliser = gradients.vecInvDen, gradients.vecDzDen
    inv_den, dz_den = (None if y is None else call.chunks(y) for y in normaliser)
    t, s = tile_steps(qk.shape, 0, p)
    D = decays(gates.vecE, gates.vecU, s <= t, in_kernel=False)
    P, dP, W = score_gradients(qk, dh_v, D, p, inv_den, dz_den)
    n, T = p.L // p.T, p.T
    strict = jnp.where(s < t, W, 0.0).reshape(p.BNH, p.NC, n, T, n, T)
    sums = jnp.moveaxis(jnp.sum(strict, axis=-1), -1, 1), jnp.moveaxis(jnp.sum(strict, -3), 2, 1)
    per_query, per_key = (y.reshape(p.BNH, n, p.S) for y in sums)
    diagonal = jnp.diagonal(W, axis1=-2, axis2=-1).reshape(p.BNH, p.S)
    P, dP = (y.reshape(p.BNH, p.S, p.L).astype(q.dtype) for y in (P, dP))
    return ScoreTiles(P, dP, TileSums(per_query, per_key, diagonal))


def parallel_bw_dP(
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    return_keys: bool = True,
    call: Launch,
) -> ScoreGradients:
    """Runs the stage.

    Args:
      normaliser: None: h is the numerator.
      return_keys: whether to return the keys, from which C is recomputed.
    """
    delta, gradients = delta_and_gradients(x, normaliser)
    p, gates = call.problem, x.gates
    q, k = map(call.chunks, (x.matQ, x.matK))
    acc, inv_den, dz_den = gates.vecW.dtype, None, None
    if gradients.vecInvDen is not None:
        read = gradients._replace(vecDz=None, vecDm=None)
        gradients = fusion_barrier(read, gradients.vecInvDen)
        inv_den, dz_den = call.chunks(gradients.vecInvDen), call.chunks(gradients.vecDzDen)
    r = query_scale(gates.vecW, p.qk_scale, inv_den)[..., None]
    qbar = q.astype(acc) * r
    kbar = k.astype(acc) * gates.vecAbar[..., None]
    Q_scaled, K_scaled = (y.reshape(p.BNH, p.S, p.DHQK).astype(q.dtype) for y in (qbar, kbar))
    dn_added = None
    if dz_den is not None:
        dn_added = jnp.sum(q.astype(acc) * weighted(r, dz_den[..., None], p), axis=2)
    keys = ScaledRows(K_scaled, None) if return_keys else None
    scores = score_tiles(x, gradients, call)
    return ScoreGradients(scores, ScaledRows(Q_scaled, None), keys, delta, dn_added)
