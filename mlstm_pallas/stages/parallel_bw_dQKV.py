"""Stage parallel_bw_dQKV: the gradients of q, k and v, from states and tiles, for chunks of any size.

    dq_t = r_t (C_c dh_t + dz_t den_t n_c) + sum_s scale dP_ts k_s          r_t = w_t scale / den_t
    dk_s = abar_s (dC_{c+1} v_s + dn_{c+1}) + sum_t scale dP_ts q_t
    dv_s = abar_s dC_{c+1}^T k_s + sum_t (P_ts / den_t) dh_t                (P / den and scale dP: parallel_bw_dP)

Grid (blocks of a chunk's gradients, NC, B * NH): those of one chunk run at the same time and find what they share in the L2. A CTA
owns siz_b_LQ steps and siz_b_DHQK columns of dq or dk, or siz_b_DHHV columns of dv: one product with the state, whose sum is then
weighted, and one with the tiles, both siz_b_loop at a time. Its loops hold products alone. For the gates' gradients the inner
products of q and k with the inter-chunk part are taken in float32; CTAs that own a siz_b_DHQK x siz_b_DHHV block of the states take
<C_c, dC_{c+1}>.

Where a CTA of the Mosaic GPU kernel makes all gradients of a chunk, it also computes P and dP, which stay in shared memory, and the sums
of W. parallel_bw_dP then does not run.

FLOPs: 6 R K V + R (L + 1) (2 K + V). Bytes: q, k, v, dh, dq, dk, dv, P, dP and both states,
(R (4 K + 3 V + 2 L) + 2 B NH NC K V) itemsize; the operands again for each column and row block, mostly from L2.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.gates import ChunkGates, causal
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.normaliser import NormaliserGradients, query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import (
    MOSAIC_GPU_SHARED_BYTES,
    MOVES_REGISTERS,
    Cost,
    LoopOperands,
    MosaicGpu,
    Stage,
    StageCall,
    StageConfig,
    search_of,
    sequence_shape,
    sequence_spec,
)
from mlstm_pallas.stages.parallel_bw_dP import GradientTiles, clamp_to_tile
from mlstm_pallas.tiles import Precision, block_at, blocks, divide, dot, loop, remainder, sum_of


class Gradients(NamedTuple):
    matDeltaQ: jax.Array  # (B * NH, S, DHQK) in the kernel dtype
    matDeltaK: jax.Array  # (B * NH, S, DHQK)
    matDeltaV: jax.Array  # (B * NH, S, DHHV)
    vecQ_inter: jax.Array  # (B * NH, S) float32: q_t with the inter-chunk part of dq_t
    vecK_inter: jax.Array  # (B * NH, S) float32: k_s with the inter-chunk part of dk_s
    scaStates: jax.Array  # (B * NH, NC) float32: <C_c, dC_{c+1}>
    pairs: Any = None  # TilePairs, with n = 2; None where parallel_bw_dP returns them


def _parallel_bw_dQKV_kernel(
    q_ref,  # (L, DHQK)
    k_ref,  # (L, DHQK)
    v_ref,  # (L, DHHV)
    dh_ref,  # (L, DHHV)
    C_ref,  # (DHQK, DHHV) before the chunk
    n_ref,  # (DHQK,) before the chunk, absent without a normaliser
    dC_ref,  # (DHQK, DHHV) after the chunk
    dn_ref,  # (DHQK,) after the chunk
    P_ref,  # (L, L)
    dP_ref,  # (L, L)
    w_ref,  # (L,), as all that follow
    abar_ref,
    inv_den_ref,  # absent without a normaliser
    dz_den_ref,  # likewise
    dq_ref,  # out (L, DHQK)
    q_inter_ref,  # out (column blocks, L)
    dk_ref,  # out (L, DHQK)
    k_inter_ref,  # out (column blocks, L)
    dv_ref,  # out (L, DHHV)
    states_ref,  # out (blocks,)
    *,
    scale: float,
    siz_b_LQ: int,
    siz_b_DHQK: int,
    siz_b_DHHV: int,
    siz_b_loop: int,
    precision: Precision,
):
    L = q_ref.shape[0]

    def times_state(steps, columns, a_ref, X_ref, size, *, transposed):
        step = min(siz_b_loop, a_ref.shape[1])

        def product(x):
            X = X_ref[columns, block_at(x, step)] if transposed else X_ref[block_at(x, step), columns]
            return dot(a_ref[steps, block_at(x, step)], X, precision, b_axis=1 if transposed else 0)

        return sum_of(a_ref.shape[1] // step, product, (siz_b_LQ, size))

    def plus_tiles(acc, row, columns, tile_ref, operand_ref, *, transposed):
        """Adds a product with the tiles: of queries with the keys up to them, transposed of keys with the queries from them on."""
        step, steps = min(siz_b_loop, siz_b_LQ), block_at(row, siz_b_LQ)
        first = row * (siz_b_LQ // step) if transposed else 0

        def add(x, acc):
            others = block_at(first + x, step)
            tile = tile_ref[others, steps] if transposed else tile_ref[steps, others]
            return acc + dot(tile, operand_ref[others, columns], precision, a_axis=0 if transposed else 1)

        return loop(L // step - first if transposed else (row + 1) * (siz_b_LQ // step), add, acc)

    def dq(row, column, steps, columns):
        r = query_scale(w_ref[steps], scale, None if inv_den_ref is None else inv_den_ref[steps])
        acc = times_state(steps, columns, dh_ref, C_ref, siz_b_DHQK, transposed=True) * r[:, None]
        if n_ref is not None:
            acc += (r * dz_den_ref[steps])[:, None] * n_ref[columns][None, :]
        q_inter_ref[column, steps] = jnp.sum(acc * q_ref[steps, columns].astype(jnp.float32), axis=1)
        dq_ref[steps, columns] = plus_tiles(acc, row, columns, dP_ref, k_ref, transposed=False).astype(dq_ref.dtype)

    def dk(row, column, steps, columns):
        acc = times_state(steps, columns, v_ref, dC_ref, siz_b_DHQK, transposed=True)
        acc = (acc + dn_ref[columns][None, :]) * abar_ref[steps][:, None]
        k_inter_ref[column, steps] = jnp.sum(acc * k_ref[steps, columns].astype(jnp.float32), axis=1)
        dk_ref[steps, columns] = plus_tiles(acc, row, columns, dP_ref, q_ref, transposed=True).astype(dk_ref.dtype)

    def dv(row, column, steps, columns):
        acc = times_state(steps, columns, k_ref, dC_ref, siz_b_DHHV, transposed=False) * abar_ref[steps][:, None]
        dv_ref[steps, columns] = plus_tiles(acc, row, columns, P_ref, dh_ref, transposed=True).astype(dv_ref.dtype)

    def states(row, column, rows, columns):
        C, dC = C_ref[rows, columns].astype(jnp.float32), dC_ref[rows, columns].astype(jnp.float32)
        states_ref[row * blocks(C_ref.shape[1], siz_b_DHHV) + column] = jnp.sum(C * dC)

    start, index = 0, pl.program_id(0)
    of_L, of_DHQK, of_DHHV = (L, siz_b_LQ), (q_ref.shape[1], siz_b_DHQK), (v_ref.shape[1], siz_b_DHHV)
    for role, of_rows, of_columns in ((dq, of_L, of_DHQK), (dk, of_L, of_DHQK), (dv, of_L, of_DHHV), (states, of_DHQK, of_DHHV)):
        columns = blocks(*of_columns)
        end = start + blocks(*of_rows) * columns

        @pl.when((start <= index) & (index < end))
        def _(role=role, start=start, columns=columns, height=of_rows[1], width=of_columns[1]):
            row, column = divide(index - start, columns), remainder(index - start, columns)
            role(row, column, block_at(row, height), block_at(column, width))

        start = end


def parallel_bw_dQKV(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    gradients: NormaliserGradients,
    tiles: GradientTiles,
    matC_states: jax.Array,
    vecN_states: jax.Array,
    matDeltaC_states: jax.Array,
    vecDeltaN_states: jax.Array,
    *,
    call: StageCall,
) -> Gradients:
    """Runs the stage.

    Args:
      matQ, matK, matV, matDeltaH: in the kernel dtype.
      gates, gradients, tiles: of chunk_gates, of the normaliser and of parallel_bw_dP; a kernel that computes P and dP reads no tiles.
      matC_states, vecN_states: before each chunk; matDeltaC_states, vecDeltaN_states: after each chunk. (B * NH, NC, DHQK, DHHV) in
        the kernel dtype and (B * NH, NC, DHQK) float32.
    """
    states = matC_states, vecN_states, matDeltaC_states, vecDeltaN_states
    if call.plain:
        return _plain(matQ, matK, matV, matDeltaH, gates, gradients, tiles, *states, call)
    if call.lowering.mosaic_gpu:
        from mlstm_pallas.stages.mosaic_gpu.parallel_bw_dQKV import parallel_bw_dQKV as on_mosaic_gpu

        return Gradients(*on_mosaic_gpu(matQ, matK, matV, matDeltaH, gates, gradients, tiles, *states, call))
    p, LQ, BK, BV = call.problem, call.tiles.siz_b_LQ, call.tiles.siz_b_DHQK, call.tiles.siz_b_DHHV
    normalise = gradients.vecInvDen is not None
    tile = pl.BlockSpec((None, p.L, p.L), lambda x, c, b: (b, c, 0))
    q, k, v, dh = (
        sequence_spec(x, p, p.L, width, lambda x, c, b: (b, c, 0))
        for x, width in ((matQ, p.DHQK), (matK, p.DHQK), (matV, p.DHHV), (matDeltaH, p.DHHV))
    )
    state = pl.BlockSpec((None, None, p.DHQK, p.DHHV), lambda x, c, b: (b, c, 0, 0))
    norm = pl.BlockSpec((None, None, p.DHQK), lambda x, c, b: (b, c, 0))
    vector = pl.BlockSpec((None, p.L), lambda x, c, b: (b, c))
    blocks_of_DHQK, blocks_of_DHHV = blocks(p.DHQK, BK), blocks(p.DHHV, BV)
    inter = (
        pl.BlockSpec((None, blocks_of_DHQK, p.L), lambda x, c, b: (b, 0, c)),
        jax.ShapeDtypeStruct((p.BNH, blocks_of_DHQK, p.S), jnp.float32),
    )
    blocks_of_state = blocks_of_DHQK * blocks_of_DHHV
    inner = (
        pl.BlockSpec((None, None, blocks_of_state), lambda x, c, b: (b, c, 0)),
        jax.ShapeDtypeStruct((p.BNH, p.NC, blocks_of_state), jnp.float32),
    )
    dq, dk, dv = (sequence_shape(x, x.shape[-1], matQ.dtype) for x in (matQ, matK, matV))
    outputs = [(q, dq), inter, (k, dk), inter, (v, dv), inner]
    g = gates.per_step()
    dQ, q_inter, dK, k_inter, dV, states_inner = kernel_call(
        _parallel_bw_dQKV_kernel,
        name="parallel_bw_dQKV",
        grid=(p.L // LQ * (2 * blocks_of_DHQK + blocks_of_DHHV) + blocks_of_state, p.NC, p.BNH),
        in_specs=[
            *(q, k, v, dh, state, norm if normalise else None, state, norm, tile, tile),
            *[vector] * 2,
            *[vector if normalise else None] * 2,
        ],
        out_specs=[spec for spec, _ in outputs],
        out_shape=[shape for _, shape in outputs],
        call=call,
        scale=p.qk_scale,
        siz_b_LQ=LQ,
        siz_b_DHQK=BK,
        siz_b_DHHV=BV,
        siz_b_loop=call.tiles.siz_b_loop,
        precision=call.precision,
    )(
        *(matQ, matK, matV, matDeltaH),
        *(matC_states, vecN_states if normalise else None, matDeltaC_states, vecDeltaN_states),
        *(tiles.matP, tiles.matDeltaP, g.vecW, g.vecAbar, gradients.vecInvDen, gradients.vecDzDen),
    )
    return Gradients(dQ, dK, dV, q_inter.sum(1), k_inter.sum(1), states_inner.sum(-1))


def _plain(matQ, matK, matV, matDeltaH, gates, gradients, tiles, C, n, dC, dn, call) -> Gradients:
    p, acc = call.problem, gates.vecW.dtype
    q, k, v, dh, P, dP = map(call.chunks, (matQ, matK, matV, matDeltaH, tiles.matP, tiles.matDeltaP))
    if p.L > p.T:  # the kernels of parallel_bw_dP write no tile in which all keys are later than all queries
        P, dP = causal(P), causal(dP)

    def product(subscripts, *operands):
        return jnp.einsum(subscripts, *operands, preferred_element_type=acc, precision=call.precision)

    abar, inv_den = gates.vecAbar[..., None], None
    dq = product("nctv,nckv->nctk", dh, C)
    if gradients.vecInvDen is not None:
        inv_den = call.chunks(gradients.vecInvDen)
        dq += call.chunks(gradients.vecDzDen)[..., None] * n[:, :, None]
    dq = query_scale(gates.vecW, p.qk_scale, inv_den)[..., None] * dq
    dk = abar * (product("ncsv,nckv->ncsk", v, dC) + dn[:, :, None])
    dv = abar * product("ncsk,nckv->ncsv", k, dC) + product("ncts,nctv->ncsv", P, dh)
    inner = (
        jnp.sum(q.astype(acc) * dq, axis=-1),
        jnp.sum(k.astype(acc) * dk, axis=-1),
        jnp.sum(C.astype(acc) * dC.astype(acc), axis=(-2, -1)),
    )
    dq += product("ncts,ncsk->nctk", dP, k)
    dk += product("ncts,nctk->ncsk", dP, q)
    dQ, dK, dV = (call.steps(dx, x).astype(x.dtype) for dx, x in ((dq, matQ), (dk, matK), (dv, matV)))
    return Gradients(dQ, dK, dV, inner[0].reshape(p.BNH, p.S), inner[1].reshape(p.BNH, p.S), inner[2])


def _heuristic(DHQK: int, dtype: jnp.dtype) -> StageConfig:
    stages, step, columns = (2, 32, 64) if dtype.itemsize > 2 else (3, 64, 128)
    return StageConfig(siz_b_LQ=64, siz_b_DHQK=columns, siz_b_DHHV=columns, siz_b_loop=step, num_warps=4, num_stages=stages)


def _cost(p: Problem, itemsize: int) -> Cost:
    """Beside the above in float32 n, dn, w, abar, 1/den, dz den, two sums a step and one a chunk for the gates' gradients."""
    R, K, V, states = p.BNH * p.S, p.DHQK, p.DHHV, p.BNH * p.NC
    flops = 6 * R * K * V + R * (p.L + 1) * (2 * K + V)
    floats = 2 * states * K + 6 * R + states
    return Cost(flops, itemsize * (R * (4 * K + 3 * V + 2 * p.L) + 2 * states * K * V) + 4 * floats)


def _loops(tiles: StageConfig, p: Problem) -> Sequence[LoopOperands]:
    LQ, BK, BV, step = tiles.siz_b_LQ, tiles.siz_b_DHQK, tiles.siz_b_DHHV, tiles.siz_b_loop
    tile_step = min(step, LQ)
    of_states = [LoopOperands(step < depth, LQ, LQ * step, (width * step,)) for depth, width in ((p.DHHV, BK), (p.DHQK, BV))]
    return [*of_states, *(LoopOperands(tile_step < p.L, LQ, LQ * tile_step, (tile_step * width,)) for width in (BK, BV))]


def mosaic_gpu_by_chunk(p: Problem) -> bool:
    """Whether a CTA of the Mosaic GPU kernel makes P, dP and all gradients of a chunk.

    A warpgroup has registers for 64 x 128 of dq and of dk.
    """
    return p.L == 128 and p.DHQK in (64, 128)


def _mosaic_gpu_heuristic(p: Problem) -> StageConfig:
    """By chunk six stages where registers spill: with more, shared memory leaves too little L1 for them."""
    if not mosaic_gpu_by_chunk(p):
        return StageConfig(num_stages=4)
    return StageConfig(num_stages=7 if p.DHQK == 64 and MOVES_REGISTERS else 6)


def _mosaic_gpu_takes(tiles: StageConfig, p: Problem) -> bool:
    """Whether there are enough stages, and shared memory for them. With fewer stages than a step holds at once it would wait for ever.

    A step holds two stages of 2 x 128 x 64 elements where a CTA makes a whole chunk. Beside the stages that kernel has 128 columns
    of k, of two chunks at DHQK 64, and for each of these chunks four vectors in float32; three blocks of 64 x 64 of P and of dP each, and
    two for outputs. In the other kernel a step holds three stages of (128 + 256) x 64; it has four blocks for outputs.
    """
    if mosaic_gpu_by_chunk(p):
        shared = 2 * (128 * 64 * tiles.num_stages + 128 * 128 + (3 + 3 + 2) * 64 * 64) + 128 // p.DHQK * 2048 + 512
        return tiles.num_stages >= 4 and p.DHHV % 128 == 0 and shared <= MOSAIC_GPU_SHARED_BYTES
    shared = 2 * (tiles.num_stages * 64 * (128 + 256) + 4 * 64 * 64) + 2048 + 1024
    return tiles.num_stages >= 3 and shared <= MOSAIC_GPU_SHARED_BYTES and p.L % 128 == 0 and p.DHQK % 256 == 0 and p.DHHV % 256 == 0


STAGE = Stage(
    name="parallel_bw_dQKV",
    run=parallel_bw_dQKV,
    inputs=(
        *("matQ", "matK", "matV", "matDeltaH", "chunk_gates", "normaliser_gradients", "parallel_bw_dP"),
        *("matC_states", "vecN_states", "matDeltaC_states", "vecDeltaN_states"),
    ),
    search=search_of("siz_b_DHQK", "siz_b_DHHV", "siz_b_loop", siz_b_LQ=(16, 32, 64, 128)),
    heuristic=_heuristic,
    cost=_cost,
    loops=_loops,
    clamp=clamp_to_tile,
    mosaic_gpu=MosaicGpu(
        search=dict(num_stages=(2, 3, 4, 5, 6, 7, 8)),
        heuristic=_mosaic_gpu_heuristic,
        takes=_mosaic_gpu_takes,
    ),
)
