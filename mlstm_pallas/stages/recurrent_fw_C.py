"""Stage recurrent_fw_C: the states at the chunk borders.

    C_{c+1} = gamma_c C_c + sum_t abar_t k_t v_t^T        n_{c+1} = gamma_c n_c + sum_t abar_t k_t

Grid (DHHV / siz_b_DHHV, DHQK / siz_b_DHQK, B * NH). A program owns a siz_b_DHQK x siz_b_DHHV block of C, in fp32 registers, and walks
over the sequence in tiles of siz_b_LKV rows; at a chunk's start it stores the block in the kernel dtype. The programs of the first
column block also own n. The block is kept transposed: k has to be scaled, hence to pass through registers, and goes from there to
shared memory row by row as the right operand, while v is read transposed from where the copy put it.

FLOPs: 2 B NH S DHQK DHHV. Bytes: k and v once for each column and row block (the repeats mostly from L2), the states once:
B NH (S (DHQK + DHHV) + NC DHQK DHHV) itemsize.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.problem import Problem
from mlstm_pallas.tiles import Precision, blocks, divide, dot, loop, remainder


def _recurrent_fw_C_kernel(
    k_ref,  # (S, siz_b_DHQK)
    v_ref,  # (S, siz_b_DHHV)
    abar_ref,  # (S,)
    gamma_ref,  # (NC,)
    C_initial_ref,  # (siz_b_DHQK, siz_b_DHHV)
    n_initial_ref,  # (siz_b_DHQK,)
    C_ref,  # out (stored, siz_b_DHQK, siz_b_DHHV)
    n_ref,  # out (stored, siz_b_DHQK)
    C_last_ref,  # out (siz_b_DHQK, siz_b_DHHV)
    n_last_ref,  # out (siz_b_DHQK,)
    *,
    num_chunks: int,
    tiles: int,
    siz_b_LKV: int,
    save_every: int,
    precision: Precision,
):
    owns_n = pl.program_id(0) == 0

    def step(tile, carry):
        CT, n = carry
        chunk = divide(tile, tiles)
        starts = remainder(tile, tiles) == 0

        @pl.when(remainder(tile, tiles * save_every) == 0)
        def _store_border():
            C_ref[divide(chunk, save_every), :, :] = CT.astype(C_ref.dtype).T

            @pl.when(owns_n)
            def _():
                n_ref[divide(chunk, save_every), :] = n

        rows = pl.ds(tile * siz_b_LKV, siz_b_LKV)
        k = k_ref[rows, :]
        kbar = k.astype(jnp.float32) * abar_ref[rows][:, None]
        gamma = jnp.where(starts, gamma_ref[chunk], 1.0)
        CT = CT * gamma + dot(v_ref[rows, :], kbar.astype(k.dtype), precision, a_axis=0)
        return CT, n * gamma + jnp.sum(kbar, axis=0)

    CT, n = loop(num_chunks * tiles, step, (C_initial_ref[...].T, n_initial_ref[...]))
    C_last_ref[...] = CT.T

    @pl.when(owns_n)
    def _():
        n_last_ref[...] = n


def recurrent_fw_C(
    matK: jax.Array,
    matV: jax.Array,
    gates: ChunkGates,
    matC_initial: jax.Array,
    vecN_initial: jax.Array,
    *,
    problem: Problem,
    config: KernelConfig,
    save_every: int = 1,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Launches the stage. Config: siz_b_LKV, siz_b_DHQK, siz_b_DHHV.

    Args:
      matK, matV: (B, NH, S, DHQK), (B, NH, S, DHHV) in the kernel dtype.
      gates: of chunks of L steps.
      matC_initial, vecN_initial: (B, NH, DHQK, DHHV), (B, NH, DHQK), float32.
      save_every: only the states before chunks 0, n, 2n, ... are stored.

    Returns:
      matC_states (B, NH, ceil(NC / save_every), DHQK, DHHV) in the kernel dtype, vecN_states (B, NH, ceil(NC / save_every), DHQK) float32,
      and the last C and n, float32, shaped as the initial ones.
    """
    p, stage = problem, config.stage("recurrent_fw_C").fitted(problem)
    LKV, BK, BV = stage.siz_b_LKV, stage.siz_b_DHQK, stage.siz_b_DHHV
    stored = -(-p.NC // save_every)

    state = pl.BlockSpec((None, BK, BV), lambda iv, ik, b: (b, ik, iv))
    norm = pl.BlockSpec((None, BK), lambda iv, ik, b: (b, ik))
    C, n, C_last, n_last = kernel_call(
        _recurrent_fw_C_kernel,
        name="recurrent_fw_C",
        grid=(blocks(p.DHHV, BV), blocks(p.DHQK, BK), p.BNH),
        in_specs=[
            pl.BlockSpec((None, p.S, BK), lambda iv, ik, b: (b, 0, ik)),
            pl.BlockSpec((None, p.S, BV), lambda iv, ik, b: (b, 0, iv)),
            pl.BlockSpec((None, p.S), lambda iv, ik, b: (b, 0)),
            pl.BlockSpec((None, p.NC), lambda iv, ik, b: (b, 0)),
            state,
            norm,
        ],
        out_specs=[
            pl.BlockSpec((None, stored, BK, BV), lambda iv, ik, b: (b, 0, ik, iv)),
            pl.BlockSpec((None, stored, BK), lambda iv, ik, b: (b, 0, ik)),
            state,
            norm,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((p.BNH, stored, p.DHQK, p.DHHV), matK.dtype),
            jax.ShapeDtypeStruct((p.BNH, stored, p.DHQK), jnp.float32),
            jax.ShapeDtypeStruct((p.BNH, p.DHQK, p.DHHV), jnp.float32),
            jax.ShapeDtypeStruct((p.BNH, p.DHQK), jnp.float32),
        ],
        stage=stage,
        interpret=interpret,
        num_chunks=p.NC,
        tiles=blocks(p.L, LKV),
        siz_b_LKV=LKV,
        save_every=save_every,
        precision=config.dot_precision(matK.dtype, interpret),
    )(
        matK.reshape(p.BNH, p.S, p.DHQK),
        matV.reshape(p.BNH, p.S, p.DHHV),
        gates.vecAbar.reshape(p.BNH, p.S),
        gates.scaGamma.reshape(p.BNH, p.NC),
        matC_initial.reshape(p.BNH, p.DHQK, p.DHHV),
        vecN_initial.reshape(p.BNH, p.DHQK),
    )
    return (
        C.reshape(p.B, p.NH, stored, p.DHQK, p.DHHV),
        n.reshape(p.B, p.NH, stored, p.DHQK),
        C_last.reshape(p.B, p.NH, p.DHQK, p.DHHV),
        n_last.reshape(p.B, p.NH, p.DHQK),
    )
