"""Stage parallel_bw_P: what recurrent_bw_dQ, recurrent_bw_dK and recurrent_bw_dV multiply, all chunks in parallel.

    P_ts = D_ts scale q_t . k_s / den_t        dP_ts = D_ts (dnum_t . v_s + dz_t),  s <= t inside the chunk
    kbar_s = abar_s k_s        qbar_t = w_t scale / den_t q_t

Grid (NC, B * NH). A program makes one chunk, of L steps, from siz_b_DHQK columns of q and k, and siz_b_loop of v and dh, at a time. The
tiles are made once here, not once a column block of each gradient, and with them what the gates' gradients need of q and k: sums of
W_ts = dP_ts scale q_t . k_s, and the parts of n and dn.

FLOPs: 2 B NH S L (DHQK + DHHV). Bytes: B NH S (4 DHQK + 2 DHHV + 2 L) itemsize.
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
from mlstm_pallas.tiles import Precision, block_at, causal_mask, decay_tile, dot, sum_of


class GradientScores(NamedTuple):
    """What goes into the gradients, in the kernel dtype; column s - the chunk's first step."""

    matP: jax.Array  # (B, NH, S, L)
    matDeltaP: jax.Array  # (B, NH, S, L) scale dP_ts
    matQ_scaled: jax.Array  # (B, NH, S, DHQK) qbar
    matK_scaled: jax.Array  # (B, NH, S, DHQK) kbar


class PairSums(NamedTuple):
    """(B, NH, S) float32."""

    from_own: jax.Array  # sum of W_ts over s < t of the chunk
    to_own: jax.Array  # over t > s
    diagonal: jax.Array  # W_tt
    from_norm: jax.Array  # w_t scale dz_t q_t . n_c
    to_norm: jax.Array  # abar_s k_s . dn_{c+1}


def _parallel_bw_P_kernel(
    q_ref,  # (L, DHQK)
    k_ref,  # (L, DHQK)
    v_ref,  # (L, DHHV)
    dh_ref,  # (L, DHHV)
    n_ref,  # (DHQK,) before the chunk, absent without a normaliser
    dn_ref,  # (DHQK,) behind the chunk
    e_hi_ref,  # (L,), as all that follow
    e_lo_ref,
    u_hi_ref,
    u_lo_ref,
    w_ref,
    abar_ref,
    inv_den_ref,  # absent without a normaliser
    dz_ref,  # likewise
    P_ref,  # out (L, L)
    dP_ref,  # out (L, L)
    qbar_ref,  # out (L, DHQK)
    kbar_ref,  # out (L, DHQK)
    from_own_ref,  # out (L,)
    to_own_ref,  # out (L,)
    diagonal_ref,  # out (L,)
    from_norm_ref,  # out (L,)
    to_norm_ref,  # out (L,)
    *,
    scale: float,
    siz_b_DHQK: int,
    siz_b_loop: int,
    precision: Precision,
):
    (L, DHQK), DHHV = q_ref.shape, v_ref.shape[1]
    mask, strict = causal_mask(L, L, 0), causal_mask(L, L, -1)
    D = decay_tile(e_hi_ref[...], e_lo_ref[...], u_hi_ref[...], u_lo_ref[...], mask)

    def dh_times_v(i):
        return dot(dh_ref[:, block_at(i, siz_b_loop)], v_ref[:, block_at(i, siz_b_loop)], precision, b_axis=1)

    dA, w, abar = sum_of(DHHV // siz_b_loop, dh_times_v, (L, L)), w_ref[...] * scale, abar_ref[...]
    inv_den = None if inv_den_ref is None else inv_den_ref[...]
    r = w if inv_den is None else w * inv_den
    scores, from_norm, to_norm = jnp.zeros((L, L), jnp.float32), jnp.zeros((L,), jnp.float32), jnp.zeros((L,), jnp.float32)
    for start in range(0, DHQK, siz_b_DHQK):
        columns = pl.ds(start, siz_b_DHQK)
        q, k = q_ref[:, columns], k_ref[:, columns]
        scores += dot(q, k, precision, b_axis=1)
        wide_q, wide_k = q.astype(jnp.float32), k.astype(jnp.float32)
        if n_ref is not None:
            from_norm += jnp.sum(wide_q * n_ref[columns][None, :], axis=1)
        to_norm += jnp.sum(wide_k * dn_ref[columns][None, :], axis=1)
        qbar_ref[:, columns] = (wide_q * r[:, None]).astype(qbar_ref.dtype)
        kbar_ref[:, columns] = (wide_k * abar[:, None]).astype(kbar_ref.dtype)
    scores *= scale
    P = D * scores
    if inv_den is not None:
        dz = dz_ref[...]
        from_norm *= w * dz
        P, dA = P * inv_den[:, None], dA * inv_den[:, None] + dz[:, None]
    dP = D * dA
    W = dP * scores
    before = jnp.where(strict, W, 0.0)
    from_own_ref[...] = jnp.sum(before, axis=1)
    to_own_ref[...] = jnp.sum(before, axis=0)
    diagonal_ref[...] = jnp.sum(jnp.where(strict, 0.0, W), axis=1)
    from_norm_ref[...] = from_norm
    to_norm_ref[...] = to_norm * abar
    P_ref[...] = P.astype(P_ref.dtype)
    dP_ref[...] = (dP * scale).astype(dP_ref.dtype)


def parallel_bw_P(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    rows: RowGradients,
    vecN_states: jax.Array,
    vecDeltaN_states: jax.Array,
    *,
    problem: Problem,
    config: KernelConfig,
    interpret: bool = False,
) -> tuple[GradientScores, PairSums]:
    """Launches the stage. Config: siz_b_DHQK, siz_b_loop. The problem has the chunks of recurrent_bw_dQ.

    Args:
      matQ, matK: (B, NH, S, DHQK), matV, matDeltaH: (B, NH, S, DHHV), in the kernel dtype.
      vecN_states, vecDeltaN_states: before and behind each chunk, (B, NH, NC, DHQK) float32.
    """
    p, stage = problem, config.stage("parallel_bw_P").fitted(problem)
    row = pl.BlockSpec((None, p.L), lambda c, b: (b, c))
    norm = pl.BlockSpec((None, None, p.DHQK), lambda c, b: (b, c, 0))
    normalised = rows.vecInvDen is not None
    tile, keys, values = (pl.BlockSpec((None, p.L, width), lambda c, b: (b, c, 0)) for width in (p.L, p.DHQK, p.DHHV))
    widths, heads = (p.L, p.L, p.DHQK, p.DHQK), (p.B, p.NH, p.S)
    made = kernel_call(
        _parallel_bw_P_kernel,
        name="parallel_bw_P",
        grid=(p.NC, p.BNH),
        in_specs=[keys, keys, values, values, norm if normalised else None, norm, *[row] * 6, *[row if normalised else None] * 2],
        out_specs=[tile, tile, keys, keys, *[row] * 5],
        out_shape=[
            *[jax.ShapeDtypeStruct((p.BNH, p.S, width), matQ.dtype) for width in widths],
            *[jax.ShapeDtypeStruct((p.BNH, p.S), jnp.float32)] * 5,
        ],
        stage=stage,
        interpret=interpret,
        scale=p.qk_scale,
        siz_b_DHQK=stage.siz_b_DHQK,
        siz_b_loop=stage.siz_b_loop,
        precision=config.dot_precision(matQ.dtype, interpret),
    )(
        *(x.reshape(p.BNH, p.S, -1) for x in (matQ, matK, matV, matDeltaH)),
        vecN_states.reshape(p.BNH, p.NC, p.DHQK) if normalised else None,
        vecDeltaN_states.reshape(p.BNH, p.NC, p.DHQK),
        *(x.reshape(p.BNH, p.S) for x in (*gates.vecE, *gates.vecU, gates.vecW, gates.vecAbar)),
        *(None if x is None else x.reshape(p.BNH, p.S) for x in (rows.vecInvDen, rows.vecDz)),
    )
    return GradientScores(*(x.reshape(*heads, -1) for x in made[:4])), PairSums(*(x.reshape(heads) for x in made[4:]))
