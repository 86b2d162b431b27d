"""Stage parallel_bw_P: what recurrent_bw_dQ, recurrent_bw_dK and recurrent_bw_dV multiply, all chunks in parallel.

    P_ts = D_ts scale q_t . k_s / den_t        dP_ts = D_ts (dnum_t . v_s + dz_t),  s <= t inside the chunk
    dq_t = sum_s scale dP_ts k_s + w_t scale dz_t n_c        dk_s = sum_t scale dP_ts q_t, what takes no C or dC
    kbar_s = abar_s k_s        qbar_t = w_t scale / den_t q_t

Grid (NC, B * NH). A program makes one chunk, of L steps, from siz_b_DHQK columns of q and k, and siz_b_loop of v and dh, at a time. The
tiles are made once here, not once a column block of each gradient, and with them what the gates' gradients need of pairs inside the
chunk: sums of W_ts = dP_ts scale q_t . k_s. The sum of dz den qbar, as rounded, is what a chunk adds to dn.

FLOPs: 2 B NH S L (3 DHQK + DHHV). Bytes: B NH S (6 DHQK + 2 DHHV + L) itemsize.
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
    matQ_scaled: jax.Array  # (B, NH, S, DHQK) qbar
    matK_scaled: jax.Array  # (B, NH, S, DHQK) kbar
    matDeltaQ_own: jax.Array  # (B, NH, S, DHQK)
    matDeltaK_own: jax.Array  # (B, NH, S, DHQK)


class NormSums(NamedTuple):
    """Of the rounded qbar, as dC, so that what one gives and the other takes is the same; float32. Both None without a normaliser."""

    added_dn: jax.Array | None  # (B, NH, NC, DHQK) sum of dz_t den_t qbar_t
    from_norm: jax.Array | None  # (B, NH, S) dz_t den_t qbar_t . n_c


class PairSums(NamedTuple):
    """(B, NH, S) float32."""

    from_own: jax.Array  # sum of W_ts over s < t of the chunk
    to_own: jax.Array  # over t > s
    diagonal: jax.Array  # W_tt


def _parallel_bw_P_kernel(
    q_ref,  # (L, DHQK)
    k_ref,  # (L, DHQK)
    v_ref,  # (L, DHHV)
    dh_ref,  # (L, DHHV)
    n_ref,  # (DHQK,), before the chunk, absent without a normaliser
    e_hi_ref,  # (L,), as all that follow
    e_lo_ref,
    u_hi_ref,
    u_lo_ref,
    w_ref,
    abar_ref,
    inv_den_ref,  # absent without a normaliser
    dz_den_ref,  # likewise
    P_ref,  # out (L, L)
    qbar_ref,  # out (L, DHQK)
    kbar_ref,  # out (L, DHQK)
    dq_ref,  # out (L, DHQK)
    dk_ref,  # out (L, DHQK)
    from_own_ref,  # out (L,)
    to_own_ref,  # out (L,)
    diagonal_ref,  # out (L,)
    added_dn_ref=None,  # out (DHQK,), absent without a normaliser
    from_norm_ref=None,  # out (L,), likewise
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

    def q_times_k(i):
        return dot(q_ref[:, block_at(i, siz_b_DHQK)], k_ref[:, block_at(i, siz_b_DHQK)], precision, b_axis=1)

    dA = sum_of(DHHV // siz_b_loop, dh_times_v, (L, L))
    scores = sum_of(DHQK // siz_b_DHQK, q_times_k, (L, L)) * scale
    P, r = D * scores, w_ref[...] * scale
    if inv_den_ref is not None:
        inv_den, dz_den = inv_den_ref[...], dz_den_ref[...]
        P, r, dA = P * inv_den[:, None], r * inv_den, (dA + dz_den[:, None]) * inv_den[:, None]
    dP = D * dA
    W = dP * scores
    before = jnp.where(strict, W, 0.0)
    from_own_ref[...] = jnp.sum(before, axis=1)
    to_own_ref[...] = jnp.sum(before, axis=0)
    diagonal_ref[...] = jnp.sum(jnp.where(strict, 0.0, W), axis=1)
    P_ref[...] = P.astype(P_ref.dtype)
    dP, abar = (dP * scale).astype(P_ref.dtype), abar_ref[...]
    from_norm = jnp.zeros((L,), jnp.float32)
    # No loop: what a pipeline copies for products is not to feed plain arithmetic too (see parallel_fw_H).
    for start in range(0, DHQK, siz_b_DHQK):
        columns = pl.ds(start, siz_b_DHQK)
        q, k = q_ref[:, columns], k_ref[:, columns]
        dq = dot(dP, k, precision)
        dk_ref[:, columns] = dot(dP, q, precision, a_axis=0).astype(dk_ref.dtype)
        qbar = (q.astype(jnp.float32) * r[:, None]).astype(qbar_ref.dtype)
        kbar = (k.astype(jnp.float32) * abar[:, None]).astype(kbar_ref.dtype)
        qbar_ref[:, columns], kbar_ref[:, columns] = qbar, kbar
        if n_ref is not None:
            weighted, n = qbar.astype(jnp.float32) * dz_den[:, None], n_ref[columns][None, :]
            added_dn_ref[columns] = jnp.sum(weighted, axis=0)
            from_norm += jnp.sum(weighted * n, axis=1)
            dq += (r * dz_den)[:, None] * n
        dq_ref[:, columns] = dq.astype(dq_ref.dtype)
    if from_norm_ref is not None:
        from_norm_ref[...] = from_norm


def parallel_bw_P(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    rows: RowGradients,
    vecN_states: jax.Array | None,
    *,
    problem: Problem,
    config: KernelConfig,
    interpret: bool = False,
) -> tuple[GradientScores, NormSums, PairSums]:
    """Launches the stage. Config: siz_b_DHQK, siz_b_loop. The problem has the chunks of recurrent_bw_dQ.

    Args:
      matQ, matK: (B, NH, S, DHQK), matV, matDeltaH: (B, NH, S, DHHV), in the kernel dtype.
      gates, rows: of chunks of L steps.
      vecN_states: before each chunk, (B, NH, NC, DHQK) float32; None without a normaliser.
    """
    p, stage = problem, config.stage("parallel_bw_P").fitted(problem)
    row = pl.BlockSpec((None, p.L), lambda c, b: (b, c))
    normalised = rows.vecInvDen is not None
    tile, keys, values = (pl.BlockSpec((None, p.L, width), lambda c, b: (b, c, 0)) for width in (p.L, p.DHQK, p.DHHV))
    norm = pl.BlockSpec((None, None, p.DHQK), lambda c, b: (b, c, 0))
    row_shape, norm_shape = (jax.ShapeDtypeStruct((p.BNH, *shape), jnp.float32) for shape in ((p.S,), (p.NC, p.DHQK)))
    P, qbar, kbar, dq, dk, *sums = kernel_call(
        _parallel_bw_P_kernel,
        name="parallel_bw_P",
        grid=(p.NC, p.BNH),
        in_specs=[keys, keys, values, values, norm if normalised else None, *[row] * 6, *[row if normalised else None] * 2],
        out_specs=[tile, *[keys] * 4, *[row] * 3, *[norm, row] * normalised],
        out_shape=[
            *[jax.ShapeDtypeStruct((p.BNH, p.S, width), matQ.dtype) for width in (p.L, *[p.DHQK] * 4)],
            *[row_shape] * 3,
            *[norm_shape, row_shape] * normalised,
        ],
        stage=stage,
        interpret=interpret,
        scale=p.qk_scale,
        siz_b_DHQK=stage.siz_b_DHQK,
        siz_b_loop=stage.siz_b_loop,
        precision=config.dot_precision(matQ.dtype, interpret),
    )(
        *(x.reshape(p.BNH, p.S, -1) for x in (matQ, matK, matV, matDeltaH)),
        None if vecN_states is None else vecN_states.reshape(p.BNH, p.NC, p.DHQK),
        *(x.reshape(p.BNH, p.S) for x in (*gates.vecE, *gates.vecU, gates.vecW, gates.vecAbar)),
        *(None if x is None else x.reshape(p.BNH, p.S) for x in (rows.vecInvDen, rows.vecDzDen)),
    )
    heads = (p.B, p.NH)
    scores = GradientScores(*(x.reshape(*heads, p.S, -1) for x in (P, qbar, kbar, dq, dk)))
    pairs = PairSums(*(x.reshape(*heads, p.S) for x in sums[:3]))
    if not normalised:
        return scores, NormSums(None, None), pairs
    added_dn, from_norm = sums[3:]
    return scores, NormSums(added_dn.reshape(*heads, p.NC, p.DHQK), from_norm.reshape(*heads, p.S)), pairs
