"""Stage parallel_bw_dV: the gradient of v, for chunks of any size.

    dv_s = abar_s dC_{c+1}^T k_s + sum_t P_ts dnum_t        P_ts = D_ts scale q_t . k_s        dnum_t = dh_t / den_t

Grid (DHHV / siz_b_DHHV, S / siz_b_LKV, B * NH). A program owns siz_b_LKV rows of siz_b_DHHV columns of dv. After the state's part it loops
over the query tiles of siz_b_LQ rows at and behind its own rows in the chunk; the tiles are made transposed, keys by queries, and
carry 1 / den_t, so that dh enters as it is.

FLOPs: B NH S (2 DHQK DHHV + L (DHQK DHHV / siz_b_DHHV + DHHV)), L counted twice where a chunk is one tile.
Bytes: B NH (S (2 DHQK + 2 DHHV) + NC DHQK DHHV) itemsize.
"""

import jax
from jax.experimental import pallas as pl

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gate_gradients import RowGradients
from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.problem import Problem
from mlstm_pallas.tiles import Precision, block_at, blocks, causal_mask, decay_tile, divide, dot, loop, remainder, sum_of


def _parallel_bw_dV_kernel(
    q_ref,  # (L, DHQK)
    k_ref,  # (siz_b_LKV, DHQK)
    dh_ref,  # (L, siz_b_DHHV)
    dC_ref,  # (DHQK, siz_b_DHHV)
    e_hi_ref,  # (siz_b_LKV,)
    e_lo_ref,  # (siz_b_LKV,)
    abar_ref,  # (siz_b_LKV,)
    u_hi_ref,  # (L,)
    u_lo_ref,  # (L,)
    inv_den_ref,  # (L,), absent without a normaliser
    dv_ref,  # out (siz_b_LKV, siz_b_DHHV)
    *,
    scale: float,
    L: int,
    siz_b_LQ: int,
    siz_b_loop: int,
    precision: Precision,
):
    LKV, DHQK = k_ref.shape
    key = remainder(pl.program_id(1), L // LKV) * LKV  # the first key, inside its chunk

    def k_times_dC(i):
        return dot(k_ref[:, block_at(i, siz_b_loop)], dC_ref[block_at(i, siz_b_loop), :], precision)

    dv = sum_of(DHQK // siz_b_loop, k_times_dC, (LKV, dv_ref.shape[1])) * abar_ref[...][:, None]
    e_hi, e_lo = e_hi_ref[...], e_lo_ref[...]
    first = divide(key, siz_b_LQ)

    def from_queries(index, dv):
        j = first + index
        rows = block_at(j, siz_b_LQ)

        def k_times_q(i):
            return dot(k_ref[:, block_at(i, siz_b_loop)], q_ref[rows, block_at(i, siz_b_loop)], precision, b_axis=1)

        mask = causal_mask(LKV, siz_b_LQ, j * siz_b_LQ - key, transposed=True)
        D = decay_tile(e_hi, e_lo, u_hi_ref[rows], u_lo_ref[rows], mask, transposed=True)
        weight = D * scale if inv_den_ref is None else D * (inv_den_ref[rows] * scale)[None, :]
        P = sum_of(DHQK // siz_b_loop, k_times_q, (LKV, siz_b_LQ)) * weight
        return dv + dot(P.astype(dh_ref.dtype), dh_ref[rows, :], precision)

    dv_ref[...] = loop(L // siz_b_LQ - first, from_queries, dv).astype(dv_ref.dtype)


def parallel_bw_dV(
    matQ: jax.Array,
    matK: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    rows: RowGradients,
    matDeltaC_states: jax.Array,
    *,
    problem: Problem,
    config: KernelConfig,
    interpret: bool = False,
) -> jax.Array:
    """Launches the stage. Config: siz_b_LQ, siz_b_LKV, siz_b_DHHV, siz_b_loop.

    Args:
      matQ, matK, matDeltaH: in the kernel dtype.
      matDeltaC_states: after each chunk, (B, NH, NC, DHQK, DHHV) in the kernel dtype.

    Returns:
      matDeltaV (B, NH, S, DHHV) in the kernel dtype.
    """
    p, stage = problem, config.stage("parallel_bw_dV").fitted(problem)
    LKV, BV = stage.siz_b_LKV, stage.siz_b_DHHV
    tiles = blocks(p.L, LKV)
    keys = pl.BlockSpec((None, LKV), lambda iv, s, b: (b, s))
    chunk = pl.BlockSpec((None, p.L), lambda iv, s, b: (b, s // tiles))
    (dv,) = kernel_call(
        _parallel_bw_dV_kernel,
        name="parallel_bw_dV",
        grid=(blocks(p.DHHV, BV), p.NC * tiles, p.BNH),
        in_specs=[
            pl.BlockSpec((None, p.L, p.DHQK), lambda iv, s, b: (b, s // tiles, 0)),
            pl.BlockSpec((None, LKV, p.DHQK), lambda iv, s, b: (b, s, 0)),
            pl.BlockSpec((None, p.L, BV), lambda iv, s, b: (b, s // tiles, iv)),
            pl.BlockSpec((None, None, p.DHQK, BV), lambda iv, s, b: (b, s // tiles, 0, iv)),
            *[keys] * 3,
            *[chunk] * 2,
            None if rows.vecInvDen is None else chunk,
        ],
        out_specs=[pl.BlockSpec((None, LKV, BV), lambda iv, s, b: (b, s, iv))],
        out_shape=[jax.ShapeDtypeStruct((p.BNH, p.S, p.DHHV), matQ.dtype)],
        stage=stage,
        interpret=interpret,
        scale=p.qk_scale,
        L=p.L,
        siz_b_LQ=stage.siz_b_LQ,
        siz_b_loop=stage.siz_b_loop,
        precision=config.dot_precision(matQ.dtype, interpret),
    )(
        matQ.reshape(p.BNH, p.S, p.DHQK),
        matK.reshape(p.BNH, p.S, p.DHQK),
        matDeltaH.reshape(p.BNH, p.S, p.DHHV),
        matDeltaC_states.reshape(p.BNH, -1, p.DHQK, p.DHHV),
        *(x.reshape(p.BNH, p.S) for x in (*gates.vecE, gates.vecAbar, *gates.vecU)),
        None if rows.vecInvDen is None else rows.vecInvDen.reshape(p.BNH, p.S),
    )
    return dv.reshape(p.B, p.NH, p.S, p.DHHV)
