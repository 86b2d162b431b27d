"""Stage parallel_fw_P: what recurrent_fw_H multiplies, all chunks in parallel.

    P_ts = D_ts scale q_t . k_s / den_t,  s <= t inside the chunk        r_t = w_t scale / den_t        kbar_s = abar_s k_s
    z_t  = w_t scale n_c . q_t + den_t sum_s P_ts        den_t = max(|z_t|, norm_val exp(-m_t)) + eps, or 1, in which case z is not made

Grid (NC, B * NH). A program makes one chunk, of L steps, from siz_b_DHQK columns of q and k at a time. The tile of decays is made once
here, not once a column block of v.

FLOPs: 2 B NH S L DHQK. Bytes: B NH S ((3 DHQK + L) itemsize + 4 DHQK / L).

key_sums: sum_s kbar_s of each chunk, from which n_c follows in plain jnp. Grid (NC, B * NH). XLA may make a product of it, and transpose
the keys for that in memory. Bytes: B NH S DHQK itemsize.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gates import ChunkGates, vector_states
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.problem import Problem
from mlstm_pallas.tiles import Precision, causal_mask, decay_tile, denominator, dot


class Scores(NamedTuple):
    """What goes into h: all but v."""

    matP: jax.Array  # (B, NH, S, L) in the kernel dtype, column s - the chunk's first step
    matK_scaled: jax.Array  # (B, NH, S, DHQK) in the kernel dtype
    vecR: jax.Array  # (B, NH, S) float32


def _parallel_fw_P_kernel(
    q_ref,  # (L, DHQK)
    k_ref,  # (L, DHQK)
    n_ref,  # (DHQK,), absent without a normaliser
    e_hi_ref,  # (L,)
    e_lo_ref,  # (L,)
    u_hi_ref,  # (L,)
    u_lo_ref,  # (L,)
    w_ref,  # (L,)
    abar_ref,  # (L,)
    m_ref,  # (L,), absent where the floor does not need it
    P_ref,  # out (L, L)
    kbar_ref,  # out (L, DHQK)
    r_ref,  # out (L,)
    z_ref=None,  # out (L,), absent without a normaliser
    *,
    siz_b_DHQK: int,
    scale: float,
    eps: float,
    norm_val: float,
    precision: Precision,
):
    L, DHQK = q_ref.shape
    scores, q_n, abar = jnp.zeros((L, L), jnp.float32), jnp.zeros((L,), jnp.float32), abar_ref[...][:, None]
    for start in range(0, DHQK, siz_b_DHQK):
        columns = pl.ds(start, siz_b_DHQK)
        q, k = q_ref[:, columns], k_ref[:, columns]
        scores += dot(q, k, precision, b_axis=1)
        if n_ref is not None:
            q_n += jnp.sum(q.astype(jnp.float32) * n_ref[columns][None, :], axis=1)
        kbar_ref[:, columns] = (k.astype(jnp.float32) * abar).astype(kbar_ref.dtype)
    # Masked after the product, not before: a NaN in k reaches no earlier row.
    D = decay_tile(e_hi_ref[...], e_lo_ref[...], u_hi_ref[...], u_lo_ref[...], None)
    P = jnp.where(causal_mask(L, L, 0), scores * (D * scale), 0.0)
    r = w_ref[...] * scale
    if z_ref is not None:
        z = r * q_n + jnp.sum(P, axis=1)
        inv_den = 1.0 / denominator(z, None if m_ref is None else m_ref[...], norm_val, eps)
        P, r = P * inv_den[:, None], r * inv_den
        z_ref[...] = z
    P_ref[...] = P.astype(P_ref.dtype)
    r_ref[...] = r


def _key_sums_kernel(
    k_ref,  # (L, DHQK)
    abar_ref,  # (L,)
    sums_ref,  # out (DHQK,)
    *,
    siz_b_DHQK: int,
    rounded: bool,
):
    abar = abar_ref[...][:, None]
    for start in range(0, k_ref.shape[1], siz_b_DHQK):
        columns = pl.ds(start, siz_b_DHQK)
        k = k_ref[:, columns]
        scaled = k.astype(jnp.float32) * abar
        sums_ref[columns] = jnp.sum(scaled.astype(k.dtype).astype(jnp.float32) if rounded else scaled, axis=0)


def key_sums(
    matK: jax.Array, gates: ChunkGates, *, rounded: bool, problem: Problem, config: KernelConfig, interpret: bool = False
) -> jax.Array:
    """What each chunk adds to n, (B, NH, NC, DHQK) float32; rounded: of kbar in the kernel dtype. Config: that of parallel_fw_P."""
    p, stage = problem, config.stage("parallel_fw_P").fitted(problem)
    (sums,) = kernel_call(
        _key_sums_kernel,
        name="key_sums",
        grid=(p.NC, p.BNH),
        in_specs=[pl.BlockSpec((None, p.L, p.DHQK), lambda c, b: (b, c, 0)), pl.BlockSpec((None, p.L), lambda c, b: (b, c))],
        out_specs=[pl.BlockSpec((None, None, p.DHQK), lambda c, b: (b, c, 0))],
        out_shape=[jax.ShapeDtypeStruct((p.BNH, p.NC, p.DHQK), jnp.float32)],
        stage=stage,
        interpret=interpret,
        siz_b_DHQK=stage.siz_b_DHQK,
        rounded=rounded,
    )(matK.reshape(p.BNH, p.S, p.DHQK), gates.vecAbar.reshape(p.BNH, p.S))
    return sums.reshape(p.B, p.NH, p.NC, p.DHQK)


def parallel_fw_P(
    matQ: jax.Array,
    matK: jax.Array,
    gates: ChunkGates,
    vecN_initial: jax.Array,
    *,
    problem: Problem,
    config: KernelConfig,
    eps: float,
    stabilize_correctly: bool,
    norm_val: float,
    normalize: bool = True,
    interpret: bool = False,
) -> tuple[Scores, jax.Array | None, tuple[jax.Array, jax.Array]]:
    """Launches the stage. Config: siz_b_DHQK. The problem has the chunks of recurrent_fw_H.

    Args:
      matQ, matK: (B, NH, S, DHQK) in the kernel dtype.
      gates: of chunks of L steps.
      vecN_initial: (B, NH, DHQK), float32.

    Returns:
      The scores; the signed normaliser z (B, NH, S), float32, None with normalize=False; n before each chunk (B, NH, NC, DHQK) and the
      last n (B, NH, DHQK), float32.
    """
    p, stage = problem, config.stage("parallel_fw_P").fitted(problem)
    added = key_sums(matK, gates, rounded=False, problem=problem, config=config, interpret=interpret)
    n, n_last = vector_states(added, gates.scaGamma, vecN_initial)
    rows = pl.BlockSpec((None, p.L), lambda c, b: (b, c))
    keys = pl.BlockSpec((None, p.L, p.DHQK), lambda c, b: (b, c, 0))
    floor_needs_m = normalize and stabilize_correctly and norm_val > 0
    row_shape = jax.ShapeDtypeStruct((p.BNH, p.S), jnp.float32)
    P, kbar, r, *z = kernel_call(
        _parallel_fw_P_kernel,
        name="parallel_fw_P",
        grid=(p.NC, p.BNH),
        in_specs=[
            keys,
            keys,
            pl.BlockSpec((None, None, p.DHQK), lambda c, b: (b, c, 0)) if normalize else None,
            *[rows] * 6,
            rows if floor_needs_m else None,
        ],
        out_specs=[pl.BlockSpec((None, p.L, p.L), lambda c, b: (b, c, 0)), keys, rows, *[rows] * normalize],
        out_shape=[
            jax.ShapeDtypeStruct((p.BNH, p.S, p.L), matQ.dtype),
            jax.ShapeDtypeStruct((p.BNH, p.S, p.DHQK), matQ.dtype),
            row_shape,
            *[row_shape] * normalize,
        ],
        stage=stage,
        interpret=interpret,
        siz_b_DHQK=stage.siz_b_DHQK,
        scale=p.qk_scale,
        eps=eps,
        norm_val=norm_val,
        precision=config.dot_precision(matQ.dtype, interpret),
    )(
        matQ.reshape(p.BNH, p.S, p.DHQK),
        matK.reshape(p.BNH, p.S, p.DHQK),
        n.reshape(p.BNH, p.NC, p.DHQK) if normalize else None,
        *(x.reshape(p.BNH, p.S) for x in (*gates.vecE, *gates.vecU, gates.vecW, gates.vecAbar)),
        gates.vecM.reshape(p.BNH, p.S) if floor_needs_m else None,
    )
    heads = (p.B, p.NH, p.S)
    scores = Scores(P.reshape(*heads, p.L), kbar.reshape(*heads, p.DHQK), r.reshape(heads))
    return scores, z[0].reshape(heads) if normalize else None, (n, n_last)
