"""Stage parallel_bw_dQKV: the gradients of q, k and v of a chunk in one program, for chunks of one tile.

    P_ts = D_ts scale q_t . k_s        dP_ts = D_ts (dnum_t . v_s + dz_t)        dnum_t = dh_t / den_t
    dq_t = scale (w_t (C_c dnum_t + dz_t n_c) + sum_s dP_ts k_s)
    dk_s = abar_s (dC_{c+1} v_s + dn_{c+1}) + sum_t dP_ts scale q_t
    dv_s = abar_s dC_{c+1}^T k_s + sum_t P_ts dnum_t

Grid (NC, B * NH). A program owns a chunk: it makes P and dP once, L x L, and keeps them on chip; then come dq and dk in column blocks of
siz_b_DHQK, dv in column blocks of siz_b_DHHV, each summed over the other head dimension in steps of siz_b_loop. All scalings are of
accumulators or of P and dP. The row sums that the gates' gradients need are taken in fp32 from dq, dk and W = dP scale q . k before they
are rounded; those inside the tile leave out the diagonal, which cancels, and which is all there is when the forget gates are closed.

FLOPs: B NH S (6 DHQK DHHV + L (6 DHQK + 4 DHHV)). Bytes: B NH (S (4 DHQK + 3 DHHV) + 2 NC DHQK DHHV) itemsize.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gate_gradients import RowGradients, RowSums, suffix_sums
from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.problem import Problem
from mlstm_pallas.tiles import Precision, block_at, causal_mask, decay_tile, dot, loop, sum_of


class Gradients(NamedTuple):
    """Gradients in the kernel dtype, and the row sums that the gates' gradients need."""

    matDeltaQ: jax.Array  # (B, NH, S, DHQK)
    matDeltaK: jax.Array  # (B, NH, S, DHQK)
    matDeltaV: jax.Array  # (B, NH, S, DHHV)
    sums: RowSums


def _parallel_bw_dQKV_kernel(
    q_ref,  # (L, DHQK)
    k_ref,  # (L, DHQK)
    v_ref,  # (L, DHHV)
    dh_ref,  # (L, DHHV)
    C_ref,  # (DHQK, DHHV) before the chunk
    n_ref,  # (DHQK,), absent without a normaliser
    dC_ref,  # (DHQK, DHHV) after the chunk
    dn_ref,  # (DHQK,)
    e_hi_ref,  # (L,), as all that follow
    e_lo_ref,
    u_hi_ref,
    u_lo_ref,
    w_ref,
    abar_ref,
    inv_den_ref,  # absent without a normaliser
    dz_ref,  # likewise
    dq_ref,  # out (L, DHQK)
    dk_ref,  # out (L, DHQK)
    dv_ref,  # out (L, DHHV)
    q_inter_ref,  # out (L,), as all that follow
    k_inter_ref,
    k_intra_ref,
    from_before_ref,  # sum over s < t of W_ts
    to_behind_ref,  # sum over t > s of W_ts
    *,
    scale: float,
    siz_b_DHQK: int,
    siz_b_DHHV: int,
    siz_b_loop: int,
    precision: Precision,
):
    L, DHQK = q_ref.shape
    DHHV = v_ref.shape[1]
    dtype = q_ref.dtype
    step_k, step_v = min(siz_b_loop, DHQK), min(siz_b_loop, DHHV)

    def q_times_k(j):
        return dot(q_ref[:, block_at(j, step_k)], k_ref[:, block_at(j, step_k)], precision, b_axis=1)

    def dh_times_v(j):
        return dot(dh_ref[:, block_at(j, step_v)], v_ref[:, block_at(j, step_v)], precision, b_axis=1)

    D = decay_tile(e_hi_ref[...], e_lo_ref[...], u_hi_ref[...], u_lo_ref[...], causal_mask(L, L, 0))
    scores = sum_of(DHQK // step_k, q_times_k, (L, L)) * scale
    P, dA, w = D * scores, sum_of(DHHV // step_v, dh_times_v, (L, L)), w_ref[...] * scale
    w_inv_den = w
    if inv_den_ref is not None:
        inv_den, dz = inv_den_ref[...], dz_ref[...]
        P, dA, w_inv_den = P * inv_den[:, None], dA * inv_den[:, None] + dz[:, None], w * inv_den  # P of dh instead of dnum
    P, dP = P.astype(dtype), D * dA
    W = dP * scores
    k_intra_ref[...] = jnp.sum(W, axis=0)
    W = jnp.where(causal_mask(L, L, -1), W, 0.0)
    from_before_ref[...], to_behind_ref[...] = jnp.sum(W, axis=1), jnp.sum(W, axis=0)
    dP = dP.astype(dtype)
    abar = abar_ref[...]

    def dq_columns(j, q_inter):
        columns = block_at(j, siz_b_DHQK)

        def dh_times_C(i):
            return dot(dh_ref[:, block_at(i, step_v)], C_ref[columns, block_at(i, step_v)], precision, b_axis=1)

        inter = sum_of(DHHV // step_v, dh_times_C, (L, siz_b_DHQK)) * w_inv_den[:, None]
        if inv_den_ref is not None:
            inter += (w * dz)[:, None] * n_ref[columns][None, :]
        intra = dot(dP, k_ref[:, columns], precision) * scale
        dq_ref[:, columns] = (inter + intra).astype(dq_ref.dtype)
        q = q_ref[:, columns].astype(jnp.float32)
        return q_inter + jnp.sum(inter * q, axis=1)

    def dk_columns(j, k_inter):
        columns = block_at(j, siz_b_DHQK)

        def v_times_dC(i):
            return dot(v_ref[:, block_at(i, step_v)], dC_ref[columns, block_at(i, step_v)], precision, b_axis=1)

        inter = (sum_of(DHHV // step_v, v_times_dC, (L, siz_b_DHQK)) + dn_ref[columns][None, :]) * abar[:, None]
        intra = dot(dP, q_ref[:, columns], precision, a_axis=0) * scale
        dk_ref[:, columns] = (inter + intra).astype(dk_ref.dtype)
        k = k_ref[:, columns].astype(jnp.float32)
        return k_inter + jnp.sum(inter * k, axis=1)

    def dv_columns(j, _):
        columns = block_at(j, siz_b_DHHV)

        def k_times_dC(i):
            return dot(k_ref[:, block_at(i, step_k)], dC_ref[block_at(i, step_k), columns], precision)

        inter = sum_of(DHQK // step_k, k_times_dC, (L, siz_b_DHHV)) * abar[:, None]
        dv_ref[:, columns] = (inter + dot(P, dh_ref[:, columns], precision, a_axis=0)).astype(dv_ref.dtype)
        return _

    q_inter_ref[...] = loop(DHQK // siz_b_DHQK, dq_columns, jnp.zeros((L,), jnp.float32))
    k_inter_ref[...] = loop(DHQK // siz_b_DHQK, dk_columns, jnp.zeros((L,), jnp.float32))
    loop(DHHV // siz_b_DHHV, dv_columns, ())


def parallel_bw_dQKV(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    rows: RowGradients,
    matC_states: jax.Array,
    vecN_states: jax.Array,
    matDeltaC_states: jax.Array,
    vecDeltaN_states: jax.Array,
    *,
    problem: Problem,
    config: KernelConfig,
    interpret: bool = False,
) -> Gradients:
    """Launches the stage. Config: siz_b_DHQK, siz_b_DHHV, siz_b_loop. The chunk size must be a tile: at most 128.

    Args:
      matQ, matK, matV, matDeltaH: in the kernel dtype.
      matC_states, vecN_states: before each chunk; matDeltaC_states, vecDeltaN_states: after each chunk. (B, NH, NC, DHQK, DHHV) in the
        kernel dtype and (B, NH, NC, DHQK) float32.
    """
    p, stage = problem, config.stage("parallel_bw_dQKV").fitted(problem)
    normalised = rows.vecInvDen is not None
    keys = pl.BlockSpec((None, p.L, p.DHQK), lambda c, b: (b, c, 0))
    values = pl.BlockSpec((None, p.L, p.DHHV), lambda c, b: (b, c, 0))
    state = pl.BlockSpec((None, None, p.DHQK, p.DHHV), lambda c, b: (b, c, 0, 0))
    norm = pl.BlockSpec((None, None, p.DHQK), lambda c, b: (b, c, 0))
    row = pl.BlockSpec((None, p.L), lambda c, b: (b, c))
    dq, dk, dv, q_inter, k_inter, k_intra, from_before, to_behind = kernel_call(
        _parallel_bw_dQKV_kernel,
        name="parallel_bw_dQKV",
        grid=(p.NC, p.BNH),
        in_specs=[
            keys,
            keys,
            values,
            values,
            state,
            norm if normalised else None,
            state,
            norm,
            *[row] * 6,
            *[row if normalised else None] * 2,
        ],
        out_specs=[keys, keys, values, *[row] * 5],
        out_shape=[
            jax.ShapeDtypeStruct((p.BNH, p.S, p.DHQK), matQ.dtype),
            jax.ShapeDtypeStruct((p.BNH, p.S, p.DHQK), matQ.dtype),
            jax.ShapeDtypeStruct((p.BNH, p.S, p.DHHV), matQ.dtype),
            *[jax.ShapeDtypeStruct((p.BNH, p.S), jnp.float32)] * 5,
        ],
        stage=stage,
        interpret=interpret,
        scale=p.qk_scale,
        siz_b_DHQK=stage.siz_b_DHQK,
        siz_b_DHHV=stage.siz_b_DHHV,
        siz_b_loop=stage.siz_b_loop,
        precision=config.dot_precision(matQ.dtype, interpret),
    )(
        matQ.reshape(p.BNH, p.S, p.DHQK),
        matK.reshape(p.BNH, p.S, p.DHQK),
        matV.reshape(p.BNH, p.S, p.DHHV),
        matDeltaH.reshape(p.BNH, p.S, p.DHHV),
        matC_states.reshape(p.BNH, -1, p.DHQK, p.DHHV),
        vecN_states.reshape(p.BNH, -1, p.DHQK) if normalised else None,
        matDeltaC_states.reshape(p.BNH, -1, p.DHQK, p.DHHV),
        vecDeltaN_states.reshape(p.BNH, -1, p.DHQK),
        *(x.reshape(p.BNH, p.S) for x in (*gates.vecE, *gates.vecU, gates.vecW, gates.vecAbar)),
        *(None if x is None else x.reshape(p.BNH, p.S) for x in (rows.vecInvDen, rows.vecDz)),
    )
    q_inter, k_inter, k_intra, difference = (x.reshape(p.B, p.NH, p.NC, p.L) for x in (q_inter, k_inter, k_intra, from_before - to_behind))
    return Gradients(
        dq.reshape(p.B, p.NH, p.S, p.DHQK),
        dk.reshape(p.B, p.NH, p.S, p.DHQK),
        dv.reshape(p.B, p.NH, p.S, p.DHHV),
        RowSums(q_inter, k_inter, k_intra, suffix_sums(difference)),
    )
