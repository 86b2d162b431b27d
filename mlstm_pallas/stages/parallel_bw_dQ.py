"""Stage parallel_bw_dQ: the gradient of q, for chunks of any size.

    dq_t = scale (w_t (C_c dnum_t + dz_t n_c) + sum_s dP_ts k_s)        dP_ts = D_ts (dnum_t . v_s + dz_t)

Grid (DHQK / siz_b_DHQK, S / siz_b_LQ, B * NH). A program owns siz_b_LQ rows of siz_b_DHQK columns of dq. After the state's part it loops
over the key tiles of siz_b_LKV rows at and before its own rows in the chunk. For the gates' gradients it sums W_ts = dP_ts scale q_t . k_s
over the steps before t, those of t's own tile of T steps (the diagonal left out) apart from those of earlier tiles, and over whole tiles.

FLOPs: B NH S (2 DHQK DHHV + L (DHHV DHQK / siz_b_DHQK + 2 DHQK)), L counted twice where a chunk is one tile.
Bytes: B NH (S (3 DHQK + 2 DHHV) + NC DHQK DHHV) itemsize.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gate_gradients import RowGradients
from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.problem import Problem
from mlstm_pallas.tiles import Precision, block_at, blocks, causal_mask, decay_tile, divide, dot, loop, remainder, sum_of


class QuerySums(NamedTuple):
    """float32; T the steps of a tile, LQ and LKV the rows and keys that a program takes at a time."""

    from_state: jax.Array  # (B, NH, S) q_t with the part of dq_t that comes from the chunk's first state
    from_before: jax.Array  # (B, NH, S) sum of W_ts over earlier tiles of the chunk
    from_own: jax.Array  # (B, NH, S) over s < t in t's own tile
    between: jax.Array  # (B, NH, NC, L / LQ, L / LKV) over pairs of blocks


def _parallel_bw_dQ_kernel(
    q_ref,  # (siz_b_LQ, DHQK)
    k_ref,  # (L, DHQK)
    v_ref,  # (L, DHHV)
    dh_ref,  # (siz_b_LQ, DHHV)
    C_ref,  # (siz_b_DHQK, DHHV)
    n_ref,  # (siz_b_DHQK,), absent without a normaliser
    e_hi_ref,  # (L,)
    e_lo_ref,  # (L,)
    u_hi_ref,  # (siz_b_LQ,), as all that follow
    u_lo_ref,
    w_ref,
    inv_den_ref,  # absent without a normaliser
    dz_ref,  # likewise
    dq_ref,  # out (siz_b_LQ, siz_b_DHQK)
    from_state_ref,  # out (siz_b_LQ,)
    from_before_ref,  # out (siz_b_LQ,)
    from_own_ref,  # out (siz_b_LQ,)
    between_ref,  # out (L / siz_b_LKV,)
    *,
    scale: float,
    L: int,
    T: int,
    siz_b_LKV: int,
    siz_b_loop: int,
    precision: Precision,
):
    LQ, DHHV = dh_ref.shape
    DHQK, columns = q_ref.shape[1], dq_ref.shape[1]
    row = remainder(pl.program_id(1), L // LQ) * LQ  # of the first query, inside its chunk
    tile_start = divide(row, T) * T
    own_columns = block_at(pl.program_id(0), columns)

    def dh_times_C(i):
        return dot(dh_ref[:, block_at(i, siz_b_loop)], C_ref[:, block_at(i, siz_b_loop)], precision, b_axis=1)

    w = w_ref[...] * scale
    dq = sum_of(DHHV // siz_b_loop, dh_times_C, (LQ, columns))
    if inv_den_ref is None:
        dq = dq * w[:, None]
    else:
        inv_den, dz = inv_den_ref[...], dz_ref[...]
        dq = dq * (w * inv_den)[:, None] + (w * dz)[:, None] * n_ref[...][None, :]
    from_state_ref[...] = jnp.sum(dq * q_ref[:, own_columns].astype(jnp.float32), axis=1)
    u_hi, u_lo = u_hi_ref[...], u_lo_ref[...]

    def from_keys(j, carry):
        dq, before, own = carry
        rows = block_at(j, siz_b_LKV)

        def dh_times_v(i):
            return dot(dh_ref[:, block_at(i, siz_b_loop)], v_ref[rows, block_at(i, siz_b_loop)], precision, b_axis=1)

        def q_times_k(i):
            return dot(q_ref[:, block_at(i, siz_b_loop)], k_ref[rows, block_at(i, siz_b_loop)], precision, b_axis=1)

        offset = row - j * siz_b_LKV
        D = decay_tile(e_hi_ref[rows], e_lo_ref[rows], u_hi, u_lo, causal_mask(LQ, siz_b_LKV, offset))
        dA = sum_of(DHHV // siz_b_loop, dh_times_v, (LQ, siz_b_LKV))
        dP = D * (dA if inv_den_ref is None else dA * inv_den[:, None] + dz[:, None])
        W = jnp.where(causal_mask(LQ, siz_b_LKV, offset - 1), dP, 0.0)
        W = W * sum_of(DHQK // siz_b_loop, q_times_k, (LQ, siz_b_LKV))
        total = jnp.sum(W, axis=1) * scale
        between_ref[j] = jnp.sum(total)
        is_own = j * siz_b_LKV >= tile_start
        dq += dot(dP.astype(q_ref.dtype), k_ref[rows, own_columns], precision) * scale
        return dq, before + jnp.where(is_own, 0.0, total), own + jnp.where(is_own, total, 0.0)

    num_keys = divide(row + LQ + siz_b_LKV - 1, siz_b_LKV)
    zeros = jnp.zeros((LQ,), jnp.float32)
    dq, before, own = loop(num_keys, from_keys, (dq, zeros, zeros))
    dq_ref[...] = dq.astype(dq_ref.dtype)
    from_before_ref[...] = before
    from_own_ref[...] = own

    def unseen(j, _):
        between_ref[num_keys + j] = jnp.float32(0.0)
        return _

    loop(L // siz_b_LKV - num_keys, unseen, ())


def parallel_bw_dQ(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    rows: RowGradients,
    matC_states: jax.Array,
    vecN_states: jax.Array,
    *,
    problem: Problem,
    config: KernelConfig,
    interpret: bool = False,
) -> tuple[jax.Array, QuerySums]:
    """Launches the stage. Config: siz_b_LQ, siz_b_LKV (both at most T), siz_b_DHQK, siz_b_loop.

    Args:
      matQ, matK, matV, matDeltaH: in the kernel dtype.
      matC_states, vecN_states: before each chunk, (B, NH, NC, DHQK, DHHV) in the kernel dtype and (B, NH, NC, DHQK) float32.

    Returns:
      matDeltaQ (B, NH, S, DHQK) in the kernel dtype, and the sums.
    """
    p, stage = problem, config.stage("parallel_bw_dQ").fitted(problem)
    LQ, LKV, BK = min(stage.siz_b_LQ, p.T), min(stage.siz_b_LKV, p.T), stage.siz_b_DHQK
    tiles, columns = blocks(p.L, LQ), blocks(p.DHQK, BK)
    normalised = rows.vecInvDen is not None
    rows_spec = pl.BlockSpec((None, LQ), lambda ik, iq, b: (b, iq))
    chunk = pl.BlockSpec((None, p.L), lambda ik, iq, b: (b, iq // tiles))
    # Each column block makes the same sums of W; from_state is a part of its own.
    sums_spec = pl.BlockSpec((None, None, LQ), lambda ik, iq, b: (b, ik, iq))
    sums_shape = jax.ShapeDtypeStruct((p.BNH, columns, p.S), jnp.float32)
    dq, from_state, from_before, from_own, between = kernel_call(
        _parallel_bw_dQ_kernel,
        name="parallel_bw_dQ",
        grid=(columns, p.NC * tiles, p.BNH),
        in_specs=[
            pl.BlockSpec((None, LQ, p.DHQK), lambda ik, iq, b: (b, iq, 0)),
            pl.BlockSpec((None, p.L, p.DHQK), lambda ik, iq, b: (b, iq // tiles, 0)),
            pl.BlockSpec((None, p.L, p.DHHV), lambda ik, iq, b: (b, iq // tiles, 0)),
            pl.BlockSpec((None, LQ, p.DHHV), lambda ik, iq, b: (b, iq, 0)),
            pl.BlockSpec((None, None, BK, p.DHHV), lambda ik, iq, b: (b, iq // tiles, ik, 0)),
            pl.BlockSpec((None, None, BK), lambda ik, iq, b: (b, iq // tiles, ik)) if normalised else None,
            chunk,
            chunk,
            *[rows_spec] * 3,
            *[rows_spec if normalised else None] * 2,
        ],
        out_specs=[
            pl.BlockSpec((None, LQ, BK), lambda ik, iq, b: (b, iq, ik)),
            *[sums_spec] * 3,
            pl.BlockSpec((None, None, None, p.L // LKV), lambda ik, iq, b: (b, ik, iq, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((p.BNH, p.S, p.DHQK), matQ.dtype),
            *[sums_shape] * 3,
            jax.ShapeDtypeStruct((p.BNH, columns, p.NC * tiles, p.L // LKV), jnp.float32),
        ],
        stage=stage,
        interpret=interpret,
        scale=p.qk_scale,
        L=p.L,
        T=p.T,
        siz_b_LKV=LKV,
        siz_b_loop=stage.siz_b_loop,
        precision=config.dot_precision(matQ.dtype, interpret),
    )(
        matQ.reshape(p.BNH, p.S, p.DHQK),
        matK.reshape(p.BNH, p.S, p.DHQK),
        matV.reshape(p.BNH, p.S, p.DHHV),
        matDeltaH.reshape(p.BNH, p.S, p.DHHV),
        matC_states.reshape(p.BNH, -1, p.DHQK, p.DHHV),
        vecN_states.reshape(p.BNH, -1, p.DHQK) if normalised else None,
        *(x.reshape(p.BNH, p.S) for x in (*gates.vecE, *gates.vecU, gates.vecW)),
        *(None if x is None else x.reshape(p.BNH, p.S) for x in (rows.vecInvDen, rows.vecDz)),
    )
    heads = (p.B, p.NH)
    sums = QuerySums(
        from_state.sum(1).reshape(*heads, p.S),
        from_before[:, 0].reshape(*heads, p.S),
        from_own[:, 0].reshape(*heads, p.S),
        between[:, 0].reshape(*heads, p.NC, tiles, p.L // LKV),
    )
    return dq.reshape(*heads, p.S, p.DHQK), sums
