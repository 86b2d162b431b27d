"""Stage recurrent_fw_H: the outputs, without a state in memory.

    h_t = r_t C_c^T q_t + sum_s P_ts v_s        C_{c+1} = gamma_c C_c + sum_s kbar_s v_s^T        (P, r, kbar: parallel_fw_P)

Grid (DHHV / siz_b_DHHV, B * NH). A program owns siz_b_DHHV columns of C, in fp32 registers, and of h, and walks over the sequence chunk
by chunk. The block of C is kept transposed, so that it is the left operand of C^T q: what a product leaves in registers is what the next
takes from there, rounded to the kernel dtype, and nothing of it goes through shared memory. It is held as DHQK / siz_b_DHQK tiles: one of
them rounded at a time is all that fits beside it. No tile that the pipeline loads feeds plain arithmetic (see parallel_fw_H).

FLOPs: 4 B NH S DHQK DHHV + 2 B NH S L DHHV. Bytes: B NH S (2 DHQK + 2 DHHV + L) itemsize; q, kbar and P once for each column block,
the repeats mostly from L2.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.parallel_fw_P import Scores
from mlstm_pallas.tiles import Precision, block_at, blocks, dot, loop


def _recurrent_fw_H_kernel(
    q_ref,  # (S, DHQK)
    kbar_ref,  # (S, DHQK)
    v_ref,  # (S, siz_b_DHHV)
    P_ref,  # (S, L)
    r_ref,  # (S,)
    gamma_ref,  # (NC,)
    C_initial_ref,  # (DHQK, siz_b_DHHV)
    h_ref,  # out (S, siz_b_DHHV)
    C_last_ref,  # out (DHQK, siz_b_DHHV)
    *,
    L: int,
    siz_b_DHQK: int,
    precision: Precision,
):
    S, DHQK = q_ref.shape
    columns = [pl.ds(start, siz_b_DHQK) for start in range(0, DHQK, siz_b_DHQK)]

    def step(chunk, CT):
        rows = block_at(chunk, L)
        v = v_ref[rows, :]
        hT = jnp.zeros((v.shape[1], L), jnp.float32)
        for part, CT_part in zip(columns, CT, strict=True):
            hT += dot(CT_part.astype(v.dtype), q_ref[rows, part], precision, b_axis=1)
        hT = hT * r_ref[rows][None, :] + dot(v, P_ref[rows, :], precision, a_axis=0, b_axis=1)
        h_ref[rows, :] = hT.astype(h_ref.dtype).T
        gamma = gamma_ref[chunk]
        return tuple(CT_part * gamma + dot(v, kbar_ref[rows, part], precision, a_axis=0) for part, CT_part in zip(columns, CT, strict=True))

    CT = loop(S // L, step, tuple(C_initial_ref[part, :].T for part in columns))
    for part, CT_part in zip(columns, CT, strict=True):
        C_last_ref[part, :] = CT_part.T


def recurrent_fw_H(
    matQ: jax.Array,
    matV: jax.Array,
    scores: Scores,
    scaGamma: jax.Array,
    matC_initial: jax.Array,
    *,
    problem: Problem,
    config: KernelConfig,
    output_dtype: jnp.dtype,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Launches the stage. Config: siz_b_DHQK, siz_b_DHHV; siz_b_LKV is the chunk that its caller gave the problem.

    Args:
      matQ: (B, NH, S, DHQK), matV: (B, NH, S, DHHV), in the kernel dtype.
      scores, scaGamma: of chunks of L steps; (B, NH, NC).
      matC_initial: (B, NH, DHQK, DHHV), float32.

    Returns:
      matH (B, NH, S, DHHV) in output_dtype and the last C (B, NH, DHQK, DHHV), float32.
    """
    p, stage = problem, config.stage("recurrent_fw_H").fitted(problem)
    BV = stage.siz_b_DHHV
    keys = pl.BlockSpec((None, p.S, p.DHQK), lambda iv, b: (b, 0, 0))
    values = pl.BlockSpec((None, p.S, BV), lambda iv, b: (b, 0, iv))
    state = pl.BlockSpec((None, p.DHQK, BV), lambda iv, b: (b, 0, iv))
    H, C_last = kernel_call(
        _recurrent_fw_H_kernel,
        name="recurrent_fw_H",
        grid=(blocks(p.DHHV, BV), p.BNH),
        in_specs=[
            keys,
            keys,
            values,
            pl.BlockSpec((None, p.S, p.L), lambda iv, b: (b, 0, 0)),
            pl.BlockSpec((None, p.S), lambda iv, b: (b, 0)),
            pl.BlockSpec((None, p.NC), lambda iv, b: (b, 0)),
            state,
        ],
        out_specs=[values, state],
        out_shape=[
            jax.ShapeDtypeStruct((p.BNH, p.S, p.DHHV), output_dtype),
            jax.ShapeDtypeStruct((p.BNH, p.DHQK, p.DHHV), jnp.float32),
        ],
        stage=stage,
        interpret=interpret,
        L=p.L,
        siz_b_DHQK=stage.siz_b_DHQK,
        precision=config.dot_precision(matQ.dtype, interpret),
    )(
        matQ.reshape(p.BNH, p.S, p.DHQK),
        scores.matK_scaled.reshape(p.BNH, p.S, p.DHQK),
        matV.reshape(p.BNH, p.S, p.DHHV),
        scores.matP.reshape(p.BNH, p.S, p.L),
        scores.vecR.reshape(p.BNH, p.S),
        scaGamma.reshape(p.BNH, p.NC),
        matC_initial.reshape(p.BNH, p.DHQK, p.DHHV),
    )
    return H.reshape(p.B, p.NH, p.S, p.DHHV), C_last.reshape(p.B, p.NH, p.DHQK, p.DHHV)
