"""Stage parallel_fw_H: the outputs, all chunks in parallel.

    num_t = w_t scale C_c^T q_t + sum_s P_ts v_s        P_ts = D_ts scale q_t . k_s,  s <= t inside the chunk
    z_t   = w_t scale n_c . q_t + sum_s P_ts
    h_t   = num_t / (max(|z_t|, norm_val exp(-m_t)) + eps), or num_t, in which case z is not made

Grid (DHHV / siz_b_DHHV, S / siz_b_LQ, B * NH). A program owns siz_b_LQ rows of siz_b_DHHV columns of h, in fp32 registers. It loops
over DHQK in steps of siz_b_DHQK for the part of the state, then over the key tiles of siz_b_LKV rows at and before its own rows in the
chunk. The stabilisers are known, so nothing is rescaled on the way. The column blocks of the same rows run next to each other: q, k
and the gates come from L2 but once.

FLOPs: 2 B NH S DHQK DHHV + B NH S L (DHQK DHHV / siz_b_DHHV + DHHV). Bytes: B NH (S (2 DHQK + 2 DHHV) + NC DHQK DHHV) itemsize.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.problem import Problem
from mlstm_pallas.tiles import Precision, blocks, causal_mask, decay_tile, denominator, divide, dot, loop, remainder


def _parallel_fw_H_kernel(
    q_ref,  # (siz_b_LQ, DHQK)
    k_ref,  # (L, DHQK)
    v_ref,  # (L, siz_b_DHHV)
    C_ref,  # (DHQK, siz_b_DHHV)
    n_ref,  # (DHQK,), absent without a normaliser
    e_hi_ref,  # (L,)
    e_lo_ref,  # (L,)
    u_hi_ref,  # (siz_b_LQ,)
    u_lo_ref,  # (siz_b_LQ,)
    w_ref,  # (siz_b_LQ,)
    m_ref,  # (siz_b_LQ,), absent where the floor does not need it
    h_ref,  # out (siz_b_LQ, siz_b_DHHV)
    z_ref=None,  # out (siz_b_LQ,), absent without a normaliser
    *,
    scale: float,
    eps: float,
    norm_val: float,
    L: int,
    siz_b_LKV: int,
    siz_b_DHQK: int,
    keep_q: bool,
    precision: Precision,
):
    LQ, DHQK = q_ref.shape
    row = remainder(pl.program_id(1), L // LQ) * LQ  # of the first query, inside its chunk
    num_k = DHQK // siz_b_DHQK

    # q . n has a loop of its own: where a tile that the pipeline loads feeds a product and plain arithmetic as well, Triton gives it one
    # buffer too few, and the copy of a later tile overwrites it under the running product.
    def add_norm(ik, z):
        columns = pl.ds(ik * siz_b_DHQK, siz_b_DHQK)
        return z + jnp.sum(q_ref[:, columns].astype(jnp.float32) * n_ref[columns][None, :], axis=1)

    def add_state(ik, num):
        columns = pl.ds(ik * siz_b_DHQK, siz_b_DHQK)
        return num + dot(q_ref[:, columns], C_ref[columns, :], precision)

    num = loop(num_k, add_state, jnp.zeros((LQ, h_ref.shape[1]), jnp.float32))
    if keep_q:
        q_whole = q_ref[...]
    if z_ref is None:
        z = None
    elif keep_q:
        z = jnp.sum(q_whole.astype(jnp.float32) * n_ref[...][None, :], axis=1)
    else:
        z = loop(num_k, add_norm, jnp.zeros((LQ,), jnp.float32))
    w = w_ref[...] * scale
    num, z = num * w[:, None], None if z is None else z * w
    u_hi, u_lo = u_hi_ref[...], u_lo_ref[...]

    def from_keys(j, carry):
        num, z = carry
        rows = pl.ds(j * siz_b_LKV, siz_b_LKV)
        if keep_q:
            scores = dot(q_whole, k_ref[rows, :], precision, b_axis=1)
        else:

            def add_columns(ik, scores):
                columns = pl.ds(ik * siz_b_DHQK, siz_b_DHQK)
                return scores + dot(q_ref[:, columns], k_ref[rows, columns], precision, b_axis=1)

            scores = loop(num_k, add_columns, jnp.zeros((LQ, siz_b_LKV), jnp.float32))
        # Masked after the product, not before: a NaN in k reaches no earlier row.
        D = decay_tile(e_hi_ref[rows], e_lo_ref[rows], u_hi, u_lo, None)
        P = jnp.where(causal_mask(LQ, siz_b_LKV, row - j * siz_b_LKV), scores * (D * scale), 0.0)
        return num + dot(P.astype(v_ref.dtype), v_ref[rows, :], precision), None if z is None else z + jnp.sum(P, axis=1)

    num_keys = divide(row + LQ + siz_b_LKV - 1, siz_b_LKV)
    num, z = loop(num_keys, from_keys, (num, z))
    if z is None:
        h_ref[...] = num.astype(h_ref.dtype)
        return

    den = denominator(z, None if m_ref is None else m_ref[...], norm_val, eps)
    h_ref[...] = (num / den[:, None]).astype(h_ref.dtype)

    @pl.when(pl.program_id(0) == 0)
    def _():
        z_ref[...] = z


def parallel_fw_H(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    gates: ChunkGates,
    matC_states: jax.Array,
    vecN_states: jax.Array,
    *,
    problem: Problem,
    config: KernelConfig,
    eps: float,
    stabilize_correctly: bool,
    norm_val: float,
    normalize: bool = True,
    output_dtype: jnp.dtype,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Launches the stage. Config: siz_b_LQ, siz_b_LKV, siz_b_DHQK, siz_b_DHHV, keep_q.

    Args:
      matQ, matK: (B, NH, S, DHQK), matV: (B, NH, S, DHHV), in the kernel dtype.
      gates: of chunks of L steps.
      matC_states, vecN_states: (B, NH, NC or more, DHQK, DHHV) in the kernel dtype, (B, NH, NC or more, DHQK) float32.

    Returns:
      matH (B, NH, S, DHHV) in output_dtype and the signed normaliser z (B, NH, S), float32; with normalize=False the numerators and None.
    """
    p, stage = problem, config.stage("parallel_fw_H").fitted(problem)
    LQ, LKV, BK, BV = stage.siz_b_LQ, stage.siz_b_LKV, stage.siz_b_DHQK, stage.siz_b_DHHV
    row_blocks = blocks(p.L, LQ)

    rows = pl.BlockSpec((None, LQ), lambda iv, iq, b: (b, iq))
    chunk = pl.BlockSpec((None, p.L), lambda iv, iq, b: (b, iq // row_blocks))
    floor_needs_m = normalize and stabilize_correctly and norm_val > 0
    H, *z = kernel_call(
        _parallel_fw_H_kernel,
        name="parallel_fw_H",
        grid=(blocks(p.DHHV, BV), p.NC * row_blocks, p.BNH),
        in_specs=[
            pl.BlockSpec((None, LQ, p.DHQK), lambda iv, iq, b: (b, iq, 0)),
            pl.BlockSpec((None, p.L, p.DHQK), lambda iv, iq, b: (b, iq // row_blocks, 0)),
            pl.BlockSpec((None, p.L, BV), lambda iv, iq, b: (b, iq // row_blocks, iv)),
            pl.BlockSpec((None, None, p.DHQK, BV), lambda iv, iq, b: (b, iq // row_blocks, 0, iv)),
            pl.BlockSpec((None, None, p.DHQK), lambda iv, iq, b: (b, iq // row_blocks, 0)) if normalize else None,
            chunk,
            chunk,
            rows,
            rows,
            rows,
            rows if floor_needs_m else None,
        ],
        out_specs=[pl.BlockSpec((None, LQ, BV), lambda iv, iq, b: (b, iq, iv)), *[rows] * normalize],
        out_shape=[
            jax.ShapeDtypeStruct((p.BNH, p.S, p.DHHV), output_dtype),
            *[jax.ShapeDtypeStruct((p.BNH, p.S), jnp.float32)] * normalize,
        ],
        stage=stage,
        interpret=interpret,
        scale=p.qk_scale,
        eps=eps,
        norm_val=norm_val,
        L=p.L,
        siz_b_LKV=LKV,
        siz_b_DHQK=BK,
        keep_q=stage.keep_q,
        precision=config.dot_precision(matQ.dtype, interpret),
    )(
        matQ.reshape(p.BNH, p.S, p.DHQK),
        matK.reshape(p.BNH, p.S, p.DHQK),
        matV.reshape(p.BNH, p.S, p.DHHV),
        matC_states.reshape(p.BNH, -1, p.DHQK, p.DHHV),
        vecN_states.reshape(p.BNH, -1, p.DHQK) if normalize else None,
        *(x.reshape(p.BNH, p.S) for x in (*gates.vecE, *gates.vecU, gates.vecW)),
        gates.vecM.reshape(p.BNH, p.S) if floor_needs_m else None,
    )
    return H.reshape(p.B, p.NH, p.S, p.DHHV), z[0].reshape(p.B, p.NH, p.S) if normalize else None
