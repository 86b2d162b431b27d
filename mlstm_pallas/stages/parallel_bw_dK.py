"""Stage parallel_bw_dK: the gradient of k, for chunks of any size.

    dk_s = abar_s (dC_{c+1} v_s + dn_{c+1}) + sum_t dP_ts scale q_t        dP_ts = D_ts (dnum_t . v_s + dz_t)

Grid (DHQK / siz_b_DHQK, S / siz_b_LKV, B * NH). A program owns siz_b_LKV rows of siz_b_DHQK columns of dk. After the state's part it loops
over the query tiles of siz_b_LQ rows at and behind its own rows in the chunk; the tiles are made transposed, keys by queries. For the
gates' gradients it sums W_ts = dP_ts scale q_t . k_s over the steps behind s: those of s's own tile of T steps apart from later tiles.

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


class KeySums(NamedTuple):
    """(B, NH, S) float32; T the steps of a tile."""

    to_state: jax.Array  # k_s with the part of dk_s that goes to the chunk's last state
    to_behind: jax.Array  # sum of W_ts over later tiles of the chunk
    to_own: jax.Array  # over t > s in s's own tile
    diagonal: jax.Array  # W_ss


def _parallel_bw_dK_kernel(
    q_ref,  # (L, DHQK)
    k_ref,  # (siz_b_LKV, DHQK)
    v_ref,  # (siz_b_LKV, DHHV)
    dh_ref,  # (L, DHHV)
    dC_ref,  # (siz_b_DHQK, DHHV)
    dn_ref,  # (siz_b_DHQK,)
    e_hi_ref,  # (siz_b_LKV,)
    e_lo_ref,  # (siz_b_LKV,)
    abar_ref,  # (siz_b_LKV,)
    u_hi_ref,  # (L,)
    u_lo_ref,  # (L,)
    inv_den_ref,  # (L,), absent without a normaliser
    dz_ref,  # likewise
    dk_ref,  # out (siz_b_LKV, siz_b_DHQK)
    to_state_ref,  # out (siz_b_LKV,), as all that follow
    to_behind_ref,
    to_own_ref,
    diagonal_ref,
    *,
    scale: float,
    L: int,
    T: int,
    siz_b_LQ: int,
    siz_b_loop: int,
    precision: Precision,
):
    LKV, DHHV = v_ref.shape
    DHQK, columns = q_ref.shape[1], dk_ref.shape[1]
    key = remainder(pl.program_id(1), L // LKV) * LKV  # the first key, inside its chunk
    tile_end = divide(key, T) * T + T
    own_columns = block_at(pl.program_id(0), columns)

    def v_times_dC(i):
        return dot(v_ref[:, block_at(i, siz_b_loop)], dC_ref[:, block_at(i, siz_b_loop)], precision, b_axis=1)

    dk = (sum_of(DHHV // siz_b_loop, v_times_dC, (LKV, columns)) + dn_ref[...][None, :]) * abar_ref[...][:, None]
    to_state_ref[...] = jnp.sum(dk * k_ref[:, own_columns].astype(jnp.float32), axis=1)
    e_hi, e_lo = e_hi_ref[...], e_lo_ref[...]
    first = divide(key, siz_b_LQ)

    def from_queries(index, carry):
        dk, behind, own, diagonal = carry
        j = first + index
        rows = block_at(j, siz_b_LQ)

        def v_times_dh(i):
            return dot(v_ref[:, block_at(i, siz_b_loop)], dh_ref[rows, block_at(i, siz_b_loop)], precision, b_axis=1)

        def k_times_q(i):
            return dot(k_ref[:, block_at(i, siz_b_loop)], q_ref[rows, block_at(i, siz_b_loop)], precision, b_axis=1)

        offset = j * siz_b_LQ - key
        D = decay_tile(e_hi, e_lo, u_hi_ref[rows], u_lo_ref[rows], causal_mask(LKV, siz_b_LQ, offset, transposed=True), transposed=True)
        dA = sum_of(DHHV // siz_b_loop, v_times_dh, (LKV, siz_b_LQ))
        dP = D * (dA if inv_den_ref is None else dA * inv_den_ref[rows][None, :] + dz_ref[rows][None, :])
        W = dP * sum_of(DHQK // siz_b_loop, k_times_q, (LKV, siz_b_LQ)) * scale
        strict = causal_mask(LKV, siz_b_LQ, offset - 1, transposed=True)
        total = jnp.sum(jnp.where(strict, W, 0.0), axis=1)
        diagonal += jnp.sum(jnp.where(strict, 0.0, W), axis=1)
        is_own = j * siz_b_LQ < tile_end
        dk += dot(dP.astype(q_ref.dtype), q_ref[rows, own_columns], precision) * scale
        return dk, behind + jnp.where(is_own, 0.0, total), own + jnp.where(is_own, total, 0.0), diagonal

    zeros = jnp.zeros((LKV,), jnp.float32)
    dk, behind, own, diagonal = loop(L // siz_b_LQ - first, from_queries, (dk, zeros, zeros, zeros))
    dk_ref[...] = dk.astype(dk_ref.dtype)
    to_behind_ref[...] = behind
    to_own_ref[...] = own
    diagonal_ref[...] = diagonal


def parallel_bw_dK(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    rows: RowGradients,
    matDeltaC_states: jax.Array,
    vecDeltaN_states: jax.Array,
    *,
    problem: Problem,
    config: KernelConfig,
    interpret: bool = False,
) -> tuple[jax.Array, KeySums]:
    """Launches the stage. Config: siz_b_LQ, siz_b_LKV (both at most T), siz_b_DHQK, siz_b_loop.

    Args:
      matQ, matK, matV, matDeltaH: in the kernel dtype.
      matDeltaC_states, vecDeltaN_states: after each chunk, (B, NH, NC, DHQK, DHHV) in the kernel dtype and (B, NH, NC, DHQK) float32.

    Returns:
      matDeltaK (B, NH, S, DHQK) in the kernel dtype, and the sums.
    """
    p, stage = problem, config.stage("parallel_bw_dK").fitted(problem)
    LQ, LKV, BK = min(stage.siz_b_LQ, p.T), min(stage.siz_b_LKV, p.T), stage.siz_b_DHQK
    tiles, columns = blocks(p.L, LKV), blocks(p.DHQK, BK)
    keys = pl.BlockSpec((None, LKV), lambda ik, s, b: (b, s))
    chunk = pl.BlockSpec((None, p.L), lambda ik, s, b: (b, s // tiles))
    # Each column block makes the same sums of W; to_state is a part of its own.
    sums_spec = pl.BlockSpec((None, None, LKV), lambda ik, s, b: (b, ik, s))
    dk, to_state, *sums = kernel_call(
        _parallel_bw_dK_kernel,
        name="parallel_bw_dK",
        grid=(columns, p.NC * tiles, p.BNH),
        in_specs=[
            pl.BlockSpec((None, p.L, p.DHQK), lambda ik, s, b: (b, s // tiles, 0)),
            pl.BlockSpec((None, LKV, p.DHQK), lambda ik, s, b: (b, s, 0)),
            pl.BlockSpec((None, LKV, p.DHHV), lambda ik, s, b: (b, s, 0)),
            pl.BlockSpec((None, p.L, p.DHHV), lambda ik, s, b: (b, s // tiles, 0)),
            pl.BlockSpec((None, None, BK, p.DHHV), lambda ik, s, b: (b, s // tiles, ik, 0)),
            pl.BlockSpec((None, None, BK), lambda ik, s, b: (b, s // tiles, ik)),
            *[keys] * 3,
            *[chunk] * 2,
            *[chunk if rows.vecInvDen is not None else None] * 2,
        ],
        out_specs=[pl.BlockSpec((None, LKV, BK), lambda ik, s, b: (b, s, ik)), *[sums_spec] * 4],
        out_shape=[
            jax.ShapeDtypeStruct((p.BNH, p.S, p.DHQK), matQ.dtype),
            *[jax.ShapeDtypeStruct((p.BNH, columns, p.S), jnp.float32)] * 4,
        ],
        stage=stage,
        interpret=interpret,
        scale=p.qk_scale,
        L=p.L,
        T=p.T,
        siz_b_LQ=LQ,
        siz_b_loop=stage.siz_b_loop,
        precision=config.dot_precision(matQ.dtype, interpret),
    )(
        matQ.reshape(p.BNH, p.S, p.DHQK),
        matK.reshape(p.BNH, p.S, p.DHQK),
        matV.reshape(p.BNH, p.S, p.DHHV),
        matDeltaH.reshape(p.BNH, p.S, p.DHHV),
        matDeltaC_states.reshape(p.BNH, -1, p.DHQK, p.DHHV),
        vecDeltaN_states.reshape(p.BNH, -1, p.DHQK),
        *(x.reshape(p.BNH, p.S) for x in (*gates.vecE, gates.vecAbar, *gates.vecU)),
        *(None if x is None else x.reshape(p.BNH, p.S) for x in (rows.vecInvDen, rows.vecDz)),
    )
    heads = (p.B, p.NH, p.S)
    return dk.reshape(*heads, p.DHQK), KeySums(to_state.sum(1).reshape(heads), *(x[:, 0].reshape(heads) for x in sums))
