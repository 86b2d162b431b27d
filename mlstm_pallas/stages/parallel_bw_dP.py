"""Stage parallel_bw_dP: the operands of recurrent_bw_dC and parallel_bw_dQKV, tiles in parallel.

    P_ts    = D_ts scale q_t . k_s / den_t        s <= t inside the chunk
    dP_ts   = D_ts (dnum_t . v_s + dz_t)          likewise
    kbar_s  = abar_s k_s
    qbar_t  = w_t scale / den_t q_t
    dnum_t  = dh_t / den_t
    delta_t = dh_t . h_t

The normaliser's gradients, dz among them, are multiples of delta, which is 0 without h.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas.chunk_list import ChunkList
from mlstm_pallas.formulas.gate_gradients import TileSums, inner
from mlstm_pallas.formulas.gates import ChunkGates, causal, decay_matrix, fusion_barrier
from mlstm_pallas.formulas.normaliser import (
    DEFAULT_NORMALISER,
    Normaliser,
    NormaliserGradients,
    normaliser_gradients,
    query_scale,
)
from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.stages.stage import Launch, ScaledRows, by_head


class Operands(NamedTuple):
    matQ: Array  # (B * NH, S, DHQK) in the kernel dtype, like all matrices
    matK: Array  # (B * NH, S, DHQK)
    matV: Array  # (B * NH, S, DHV)
    matDeltaH: Array  # (B * NH, S, DHV)
    gates: ChunkGates
    matH: Array | None  # (B * NH, S, DHV); None: delta is not computed, and 0 in dP
    vecZ: Any  # (B * NH, S) float32; not read without a normaliser
    active: ChunkList | None = None  # the chunks with steps are active; None: all


class ScoreGradients(NamedTuple):
    """Tiles and operands in the kernel dtype, sums in float32.

    A tile's column is s - the chunk's first step. Above the diagonal P and dP are 0 in the diagonal
    blocks of MAX_TILE steps and undefined elsewhere. P, dP, tile_sums and delta may be undefined in
    inactive chunks. matP, matDeltaP and tile_sums are None if parallel_bw_dQKV computes them;
    it does not read the other fields.
    """

    matP: Any = None  # (B * NH, S, L)
    matDeltaP: Any = None  # (B * NH, S, L), times scale
    queries: Any = None  # (B * NH, S, DHQK), scaled: qbar
    keys: ScaledRows | None = None  # (B * NH, S, DHQK), scaled: kbar; None if C is not recomputed
    tile_sums: Any = None  # TileSums
    vecDelta: Array | None = None  # (B * NH, S); None without matH
    # (B * NH, NC, DHQK) sum of w_t scale dz_t q_t; None without a normaliser, and on Mosaic GPU,
    # where step_sums computes it
    vecDeltaN_added: Array | None = None


def delta_and_gradients(
    x: Operands, normaliser: Normaliser | None
) -> tuple[Array | None, NormaliserGradients]:
    """delta by XLA, and the normaliser's gradients; delta is None without matH."""
    g, delta = x.gates.per_step(), None
    if x.matH is not None:
        delta = by_head(inner(x.matDeltaH, x.matH), g.vecM.shape[-1])
    return delta, normaliser_gradients(normaliser, delta, x.vecZ, g.vecM)


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
    q, k, v, dh = map(call.chunks, (x.matQ, x.matK, x.matV, x.matDeltaH))
    D, scores = decay_matrix(gates, p), call.product("nctk,ncsk->ncts", q, k) * p.qk_scale
    P, dA = scores, call.product("nctv,ncsv->ncts", dh, v)
    inv_den = dz_den = None
    if gradients.vecInvDen is not None:
        inv_den, dz_den = fusion_barrier(
            (call.chunks(gradients.vecInvDen), call.chunks(gradients.vecDzDen)), gradients.vecInvDen
        )
        P, dA = P * inv_den[..., None], (dA + dz_den[..., None]) * inv_den[..., None]
    P, dP = weighted(D, P, p), weighted(D, dA, p)
    n, T = p.L // p.T, p.T
    W = weighted(dP, scores, p)
    strict = causal(W, p, offset=-1).reshape(p.BNH, p.NC, n, T, n, T)
    sums = jnp.moveaxis(jnp.sum(strict, axis=-1), -1, 1), jnp.moveaxis(jnp.sum(strict, -3), 2, 1)
    per_query, per_key = (y.reshape(p.BNH, n, p.S) for y in sums)
    diagonal = jnp.diagonal(W, axis1=-2, axis2=-1).reshape(p.BNH, p.S)
    tile_sums = TileSums(per_query, per_key, diagonal)
    acc = gates.vecW.dtype
    r = query_scale(gates.vecW, p.qk_scale, inv_den)[..., None]
    qbar = q.astype(acc) * r
    kbar = k.astype(acc) * gates.vecAbar[..., None]
    P, dP, Q_scaled, K_scaled = (
        y.reshape(p.BNH, p.S, y.shape[-1]).astype(q.dtype) for y in (P, dP * p.qk_scale, qbar, kbar)
    )
    dn_added = None
    if dz_den is not None:
        dn_added = jnp.sum(q.astype(acc) * weighted(r, dz_den[..., None], p), axis=2)
    keys = ScaledRows(K_scaled, None) if return_keys else None
    return ScoreGradients(P, dP, ScaledRows(Q_scaled, None), keys, tile_sums, delta, dn_added)
