"""Stage parallel_bw_dQKV: the gradients of q, k and v from states and tiles, at any chunk size.

    dq_t = r_t (C_c dh_t + dz_t den_t n_c) + sum_s scale dP_ts k_s
    dk_s = abar_s (dC_{c+1} v_s + dn_{c+1}) + sum_t scale dP_ts q_t
    dv_s = abar_s dC_{c+1}^T k_s + sum_t (P_ts / den_t) dh_t
    r_t  = w_t scale / den_t

parallel_bw_dP computes P_ts / den_t and scale dP_ts.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas.gate_gradients import inner, only
from mlstm_pallas.formulas.gates import ChunkGates
from mlstm_pallas.formulas.normaliser import NormaliserGradients, query_scale
from mlstm_pallas.formulas.scores import tile_steps
from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.operands.chunk_list import ChunkList
from mlstm_pallas.stages.parallel_bw_dP import ScoreTiles


class Operands(NamedTuple):
    matQ: Array  # (B * NH, S, DHQK) in the kernel dtype, like all matrices
    matK: Array  # (B * NH, S, DHQK)
    matV: Array  # (B * NH, S, DHV)
    matDeltaH: Array  # (B * NH, S, DHV)
    gates: ChunkGates
    normaliser_gradients: NormaliserGradients
    scores: ScoreTiles
    matC_states: Array  # (B * NH, NC, DHQK, DHV) before each chunk
    vecN_states: Array  # (B * NH, NC, DHQK) float32
    matDeltaC_states: Array  # (B * NH, NC, DHQK, DHV) after each chunk
    vecDeltaN_states: Array  # (B * NH, NC, DHQK) float32
    active: ChunkList | None = None  # the chunks with steps are active; None: all


class Gradients(NamedTuple):
    """In inactive chunks the gradients of q, k and v are 0.

    The other fields may be undefined there.
    """

    matDeltaQ: Array  # (B * NH, S, DHQK) in the kernel dtype
    matDeltaK: Array  # (B * NH, S, DHQK)
    matDeltaV: Array  # (B * NH, S, DHV)
    q_dot_dq_inter: Array  # (B * NH, S) float32: q_t with the inter-chunk part of dq_t
    k_dot_dk_inter: Array  # (B * NH, S) float32: k_s with the inter-chunk part of dk_s
    pass_through: Array  # (B * NH, NC) float32: gamma_c (<C_c, dC_{c+1}> + n_c . dn_{c+1})


def parallel_bw_dQKV(x: Operands, *, call: Launch) -> Gradients:
    """Runs the stage."""
    C, n, dC, dn = x.matC_states, x.vecN_states, x.matDeltaC_states, x.vecDeltaN_states
    p, gates, gradients = call.problem, x.gates, x.normaliser_gradients
    q, k, v, dh = map(call.chunks, (x.matQ, x.matK, x.matV, x.matDeltaH))
    P, dP, product = call.chunks(x.scores.matP), call.chunks(x.scores.matDeltaP), call.product
    if x.active is not None:  # undefined in other chunks
        C, dC, P, dP = (only(y, x.active.has_steps, 0, 1) for y in (C, dC, P, dP))
    if p.L > p.T:  # parallel_bw_dP leaves tiles above the diagonal undefined
        t, s = tile_steps(P.shape, 0, p)
        P, dP = (jnp.where(s <= t, y, 0.0) for y in (P, dP))
    abar, inv_den = gates.vecAbar[..., None], None
    dq = product("nctv,nckv->nctk", dh, C)
    if gradients.vecInvDen is not None:
        inv_den = call.chunks(gradients.vecInvDen)
        dq += call.chunks(gradients.vecDzDen)[..., None] * n[:, :, None]
    dq = weighted(query_scale(gates.vecW, p.qk_scale, inv_den)[..., None], dq, p)
    dk = weighted(abar, product("ncsv,nckv->ncsk", v, dC) + dn[:, :, None], p)
    dv = weighted(abar, product("ncsk,nckv->ncsv", k, dC), p) + product("ncts,nctv->ncsv", P, dh)
    q_inter, k_inter = (inner(y, dy).reshape(p.BNH, p.S) for y, dy in ((q, dq), (k, dk)))
    dq += product("ncts,ncsk->nctk", dP, k)
    dk += product("ncts,nctk->ncsk", dP, q)
    dQ, dK, dV = (
        call.unchunked(dy, y).astype(y.dtype)
        for dy, y in ((dq, x.matQ), (dk, x.matK), (dv, x.matV))
    )
    pass_through = weighted(gates.scaGamma, inner(dC, C, 2) + inner(dn, n))
    return Gradients(dQ, dK, dV, q_inter, k_inter, pass_through)
