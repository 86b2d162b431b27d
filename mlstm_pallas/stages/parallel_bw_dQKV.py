"""Stage parallel_bw_dQKV: the gradients of q, k and v from states and tiles, at any chunk size.

    dq_t = r_t (C_c dh_t + dz_t den_t n_c) + sum_s scale dP_ts k_s
    dk_s = abar_s (dC_{c+1} v_s + dn_{c+1}) + sum_t scale dP_ts q_t
    dv_s = abar_s dC_{c+1}^T k_s + sum_t P_ts dh_t
    r_t  = w_t scale / den_t

P (which includes 1 / den) and scale dP are those of parallel_bw_dP.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mlstm_pallas.gate_gradients import inner
from mlstm_pallas.gates import ChunkGates, causal
from mlstm_pallas.normaliser import NormaliserGradients, query_scale
from mlstm_pallas.stage import (
    Launch,
    Stage,
)
from mlstm_pallas.stages.parallel_bw_dP import GradientTiles


class Gradients(NamedTuple):
    matDeltaQ: jax.Array  # (B * NH, S, DHQK) in the kernel dtype
    matDeltaK: jax.Array  # (B * NH, S, DHQK)
    matDeltaV: jax.Array  # (B * NH, S, DHHV)
    vecQ_inter: jax.Array  # (B * NH, S) float32: q_t with the inter-chunk part of dq_t
    vecK_inter: jax.Array  # (B * NH, S) float32: k_s with the inter-chunk part of dk_s
    scaStates: jax.Array  # (B * NH, NC) float32: gamma_c (<C_c, dC_{c+1}> + n_c . dn_{c+1})
    pairs: Any = None  # TilePairs, with n = 2; None where parallel_bw_dP returns them


def parallel_bw_dQKV(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    gradients: NormaliserGradients,
    tiles: GradientTiles,
    matC_states: jax.Array,
    vecN_states: jax.Array,
    matDeltaC_states: jax.Array,
    vecDeltaN_states: jax.Array,
    *,
    call: Launch,
) -> Gradients:
    """Runs the stage.

    Args:
      matQ, matK, matV, matDeltaH: in the kernel dtype.
      gates, gradients, tiles: of chunk_gates, of the normaliser and of parallel_bw_dP. A kernel
        that computes P and dP reads no tiles.
      matC_states, vecN_states: before each chunk, (B * NH, NC, DHQK, DHHV) in the kernel dtype and
        (B * NH, NC, DHQK) float32.
      matDeltaC_states, vecDeltaN_states: after each chunk, shaped likewise.
    """
    C, n, dC, dn = matC_states, vecN_states, matDeltaC_states, vecDeltaN_states
    p, acc = call.problem, gates.vecW.dtype
    q, k, v, dh, P, dP = map(
        call.chunks, (matQ, matK, matV, matDeltaH, tiles.matP, tiles.matDeltaP)
    )
    if p.L > p.T:  # parallel_bw_dP leaves tiles above the diagonal undefined
        P, dP = causal(P), causal(dP)
    product = functools.partial(jnp.einsum, preferred_element_type=acc, precision=call.precision)

    abar, inv_den = gates.vecAbar[..., None], None
    dq = product("nctv,nckv->nctk", dh, C)
    if gradients.vecInvDen is not None:
        inv_den = call.chunks(gradients.vecInvDen)
        dq += call.chunks(gradients.vecDzDen)[..., None] * n[:, :, None]
    dq = query_scale(gates.vecW, p.qk_scale, inv_den)[..., None] * dq
    dk = abar * (product("ncsv,nckv->ncsk", v, dC) + dn[:, :, None])
    dv = abar * product("ncsk,nckv->ncsv", k, dC) + product("ncts,nctv->ncsv", P, dh)
    q_inter, k_inter = (inner(x, dx).reshape(p.BNH, p.S) for x, dx in ((q, dq), (k, dk)))
    dq += product("ncts,ncsk->nctk", dP, k)
    dk += product("ncts,nctk->ncsk", dP, q)
    dQ, dK, dV = (
        call.steps(dx, x).astype(x.dtype) for dx, x in ((dq, matQ), (dk, matK), (dv, matV))
    )
    through = gates.scaGamma * (inner(C, dC, 2) + inner(n, dn))
    return Gradients(dQ, dK, dV, q_inter, k_inter, through)


STAGE = Stage(
    name="parallel_bw_dQKV",
    inputs=(
        *("matQ", "matK", "matV", "matDeltaH"),
        *("chunk_gates", "normaliser_gradients", "parallel_bw_dP"),
        *("matC_states", "vecN_states", "matDeltaC_states", "vecDeltaN_states"),
    ),
)
