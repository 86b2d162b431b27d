"""Stage parallel_bw_dP: what recurrent_bw_dC and parallel_bw_dQKV multiply, all tiles in parallel.

    P_ts = D_ts scale q_t . k_s / den_t        dP_ts = D_ts (dnum_t . v_s + dz_t),  s <= t inside the chunk        dnum_t = dh_t / den_t
    kbar_s = abar_s k_s                        qbar_t = w_t scale / den_t q_t                                delta_t = dh_t . h_t

The normaliser's gradients, dz among them, are multiples of delta. The Mosaic GPU kernel computes delta, as it reads dh anyway. For
the Triton kernel XLA does, in a pass over h and dh. Where parallel_bw_dQKV makes P and dP, recurrent_bw_dC computes delta.

Grid (CTAs of a chunk, NC, B * NH). With T = siz_b_LQ a chunk has n = L / T tiles of queries: n (n + 1) / 2 CTAs own a T x T tile of P
and dP each, from siz_b_loop columns of q and k, of v and dh, at a time; n more scale T queries and keys. For the gates' gradients the
former sum W_ts = dP_ts scale q_t . k_s over the queries and the keys of their tile; the latter sum what their steps add to dn.

FLOPs: R (L + 1) (K + V). Bytes: q, k, v, dh, h, qbar, kbar, P and dP, R (4 K + 3 V + 2 L) itemsize.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.gate_gradients import TilePairs, inner
from mlstm_pallas.gates import ChunkGates, causal, decay_matrix, fusion_barrier
from mlstm_pallas.launch import kernel_call, masked_store
from mlstm_pallas.normaliser import DEFAULT_NORMALISER, Normaliser, NormaliserGradients, query_scale
from mlstm_pallas.problem import MAX_TILE, Problem
from mlstm_pallas.stage import (
    MOSAIC_GPU_SHARED_BYTES,
    Cost,
    LoopOperands,
    MosaicGpu,
    Stage,
    StageCall,
    StageConfig,
    search_of,
    sequence_spec,
    steps_like,
    steps_of,
)
from mlstm_pallas.tiles import Precision, block_at, blocks, causal_mask, decay_tile, dot, loop, sum_of


class GradientTiles(NamedTuple):
    """Tiles and scaled operands in the kernel dtype, sums in float32.

    A tile's column is s - the chunk's first step. Above the diagonal, P and dP are 0 in the diagonal blocks of MAX_TILE steps, and
    nothing is written elsewhere.
    """

    matP: Any  # (B * NH, S, L); None, as matDeltaP and pairs, where parallel_bw_dQKV computes them itself
    matDeltaP: Any  # (B * NH, S, L), times scale
    matQ_scaled: Any  # (B * NH, S, DHQK) qbar, on Mosaic GPU in the layout of q; None where recurrent_bw_dC weights the queries
    matK_scaled: Any  # (B * NH, S, DHQK) kbar, likewise; None where it weights the keys, or C is not recomputed
    pairs: Any  # TilePairs
    normaliser_gradients: NormaliserGradients
    vecDeltaN_added: jax.Array | None  # (B * NH, NC, DHQK) sum of w_t scale dz_t q_t; None without a normaliser, and before ``with_delta``


def normaliser_gradients(
    normaliser: Normaliser | None, matDeltaH: jax.Array, matH: jax.Array | None, vecZ: Any, gates: ChunkGates
) -> NormaliserGradients:
    """What the normaliser passes back; the arguments are those of the stage."""
    if normaliser is None:
        return NormaliserGradients()
    delta = jnp.zeros_like(vecZ) if matH is None else steps_of(inner(matDeltaH, matH))
    return normaliser.gradients(delta, vecZ, gates.per_step().vecM)


def _parallel_bw_dP_kernel(
    q_ref,  # (L, DHQK)
    k_ref,  # (L, DHQK)
    v_ref,  # (L, DHHV)
    dh_ref,  # (L, DHHV)
    e_hi_ref,  # (L,), as all that follow
    e_lo_ref,
    u_hi_ref,
    u_lo_ref,
    w_ref,
    abar_ref,
    inv_den_ref,  # absent without a normaliser
    dz_den_ref,  # likewise
    P_ref,  # out (L, L)
    dP_ref,  # out (L, L)
    qbar_ref,  # out (L, DHQK)
    per_query_ref,  # out (n, L) sum of W_ts over s < t in each tile of keys
    per_key_ref,  # out (n, L) sum of W_ts over t > s in each tile of queries
    diagonal_ref,  # out (L,) W_tt
    *more_refs,  # out, as wanted: kbar (L, DHQK); with a normaliser dn_added (n, DHQK)
    T: int,
    scale_keys: bool,
    scale: float,
    siz_b_loop: int,
    precision: Precision,
):
    (L, DHQK), DHHV = q_ref.shape, v_ref.shape[1]
    more = iter(more_refs)
    kbar_ref: Any = next(more) if scale_keys else None
    dn_added_ref: Any = next(more, None)
    n = L // T
    index, pairs = pl.program_id(0), n * (n + 1) // 2
    # The tiles in order of queries, tile i of them having i + 1 tiles of keys.
    i: Any = sum(((index >= m * (m + 1) // 2).astype(jnp.int32) for m in range(1, n)), np.int32(0))
    j = index - lax.div(i * (i + 1), np.int32(2))
    step_k, step_v = min(siz_b_loop, DHQK), min(siz_b_loop, DHHV)

    @pl.when(index < pairs)
    def _tile():
        queries, keys = block_at(i, T), block_at(j, T)

        def dh_times_v(x):
            return dot(dh_ref[queries, block_at(x, step_v)], v_ref[keys, block_at(x, step_v)], precision, b_axis=1)

        def q_times_k(x):
            return dot(q_ref[queries, block_at(x, step_k)], k_ref[keys, block_at(x, step_k)], precision, b_axis=1)

        dA = sum_of(DHHV // step_v, dh_times_v, (T, T))
        scores = sum_of(DHQK // step_k, q_times_k, (T, T)) * scale
        offset = (i - j) * T
        D = decay_tile(e_hi_ref[keys], e_lo_ref[keys], u_hi_ref[queries], u_lo_ref[queries], causal_mask(T, T, offset))
        P = D * scores
        if inv_den_ref is not None:
            inv_den = inv_den_ref[queries][:, None]
            P, dA = P * inv_den, (dA + dz_den_ref[queries][:, None]) * inv_den
        dP = D * dA
        W, strict = dP * scores, causal_mask(T, T, offset - 1)
        before = jnp.where(strict, W, 0.0)
        per_query_ref[j, queries] = jnp.sum(before, axis=1)
        per_key_ref[i, keys] = jnp.sum(before, axis=0)
        P_ref[queries, keys] = P.astype(P_ref.dtype)
        dP_ref[queries, keys] = (dP * scale).astype(P_ref.dtype)

        # Summed in every tile: a branch that reads W takes as many registers, fifty.
        masked_store(diagonal_ref.at[queries], jnp.sum(jnp.where(strict, 0.0, W), axis=1), jnp.full((T,), i == j))

        whole = max(MAX_TILE // T, 1)  # tiles on a side of a block

        def above(x, _):
            zeros = jnp.zeros((T, T), P_ref.dtype)
            P_ref[queries, block_at(x, T)] = zeros
            dP_ref[queries, block_at(x, T)] = zeros
            return _

        if whole > 1:
            end = lax.min(lax.div(i, np.int32(whole)) * whole + whole, np.int32(n))
            lax.fori_loop(j + 1, jnp.where(i == j, end, j + 1), above, ())

    @pl.when(index >= pairs)
    def _scaled_operands():
        tile = index - pairs
        steps = block_at(tile, T)
        abar, r = abar_ref[steps][:, None], query_scale(w_ref[steps], scale, None if inv_den_ref is None else inv_den_ref[steps])
        dz_den = None if dz_den_ref is None else dz_den_ref[steps][:, None]

        def scaled(x, _):
            columns = block_at(x, step_k)
            q = q_ref[steps, columns].astype(jnp.float32) * r[:, None]
            qbar_ref[steps, columns] = q.astype(qbar_ref.dtype)
            if kbar_ref is not None:
                k = k_ref[steps, columns].astype(jnp.float32) * abar
                kbar_ref[steps, columns] = k.astype(kbar_ref.dtype)
            if dn_added_ref is not None:
                dn_added_ref[tile, columns] = jnp.sum(q * dz_den, axis=0)
            return _

        loop(DHQK // step_k, scaled, ())


def parallel_bw_dP(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    matH: jax.Array | None,
    vecZ: jax.Array | None,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    scale_keys: bool = True,
    scaled: bool = True,
    call: StageCall,
) -> GradientTiles:
    """Runs the stage.

    Args:
      matQ, matK: (B * NH, S, DHQK), matV, matDeltaH: (B * NH, S, DHHV), in the kernel dtype.
      gates: of chunk_gates.
      matH, vecZ: of the forward pass, (B * NH, S, DHHV) in the kernel dtype and (B * NH, S) float32. Without a normaliser neither is
        read. matH None: the denominator is a constant, as of an h of zeros.
      normaliser: None: h is the numerator.
      scale_keys: whether kbar, from which C is recomputed, is wanted.
      scaled: whether qbar and kbar are; on Mosaic GPU recurrent_bw_dC may weight queries and keys itself.
    """
    if call.lowering.mosaic_gpu:
        return _on_mosaic_gpu(matQ, matK, matV, matDeltaH, gates, matH, vecZ, normaliser, scale_keys, scaled, call)
    gradients = normaliser_gradients(normaliser, matDeltaH, matH, vecZ, gates)
    if call.plain:
        return _plain(matQ, matK, matV, matDeltaH, gates, gradients, scale_keys, call)
    p, T = call.problem, call.tiles.siz_b_LQ
    n = blocks(p.L, T)
    vector = pl.BlockSpec((None, p.L), lambda x, c, b: (b, c))
    normalise = gradients.vecInvDen is not None
    q, k, v, dh = (
        sequence_spec(x, p, p.L, width, lambda x, c, b: (b, c, 0))
        for x, width in ((matQ, p.DHQK), (matK, p.DHQK), (matV, p.DHHV), (matDeltaH, p.DHHV))
    )
    tile = pl.BlockSpec((None, p.L, p.L), lambda x, c, b: (b, c, 0)), jax.ShapeDtypeStruct((p.BNH, p.S, p.L), matQ.dtype)
    operand = (
        pl.BlockSpec((None, p.L, p.DHQK), lambda x, c, b: (b, c, 0)),
        jax.ShapeDtypeStruct((p.BNH, p.S, p.DHQK), matQ.dtype),
    )
    sums = pl.BlockSpec((None, n, p.L), lambda x, c, b: (b, 0, c)), jax.ShapeDtypeStruct((p.BNH, n, p.S), jnp.float32)
    norm = (
        pl.BlockSpec((None, n, p.DHQK), lambda x, c, b: (b, c, 0)),
        jax.ShapeDtypeStruct((p.BNH, p.NC * n, p.DHQK), jnp.float32),
    )
    outputs = [tile, tile, operand, sums, sums, (vector, jax.ShapeDtypeStruct((p.BNH, p.S), jnp.float32))]
    outputs += [operand] * scale_keys + [norm] * normalise
    g = gates.per_step()
    P, dP, qbar, per_query, per_key, diagonal, *more = kernel_call(
        _parallel_bw_dP_kernel,
        name="parallel_bw_dP",
        grid=(n * (n + 1) // 2 + n, p.NC, p.BNH),
        in_specs=[q, k, v, dh, *[vector] * 6, *[vector if normalise else None] * 2],
        out_specs=[spec for spec, _ in outputs],
        out_shape=[shape for _, shape in outputs],
        call=call,
        T=T,
        scale_keys=scale_keys,
        scale=p.qk_scale,
        siz_b_loop=call.tiles.siz_b_loop,
        precision=call.precision,
    )(matQ, matK, matV, matDeltaH, *g.vecE, *g.vecU, g.vecW, g.vecAbar, gradients.vecInvDen, gradients.vecDzDen)
    kbar = more.pop(0) if scale_keys else None
    dn_added = jnp.sum(more.pop().reshape(p.BNH, p.NC, n, p.DHQK), axis=2) if normalise else None
    tiles = (p.BNH, n, p.NC, n, T)
    pairs = TilePairs(per_query.reshape(tiles), per_key.reshape(tiles), diagonal.reshape(p.BNH, p.NC, n, T))
    return GradientTiles(P, dP, qbar, kbar, pairs, gradients, dn_added)


def _on_mosaic_gpu(matQ, matK, matV, matDeltaH, gates, matH, vecZ, normaliser, scale_keys, scaled, call) -> GradientTiles:
    from mlstm_pallas.stages.mosaic_gpu.parallel_bw_dP import parallel_bw_dP as on_mosaic_gpu

    gradients = NormaliserGradients()
    if normaliser is None:
        P, dP, pairs, _ = on_mosaic_gpu(matQ, matK, matV, matDeltaH, gates, None, None, None, call)
    else:
        m = gates.per_step().vecM
        per_delta = normaliser.gradients(jnp.ones_like(vecZ), vecZ, m)  # which are linear in delta
        of_normaliser = per_delta.vecInvDen, per_delta.vecDzDen
        P, dP, pairs, delta = on_mosaic_gpu(matQ, matK, matV, matDeltaH, gates, matH, *of_normaliser, call)
        gradients = normaliser.gradients(jnp.zeros_like(vecZ) if delta is None else delta, vecZ, m)
    return _beside_tiles(matQ, matK, gates, gradients, scale_keys, scaled, call)._replace(matP=P, matDeltaP=dP, pairs=pairs)


def without_tiles(
    matQ: jax.Array,
    matK: jax.Array,
    gates: ChunkGates,
    vecZ: Any,
    *,
    normaliser: Normaliser | None,
    needs_delta: bool,
    scale_keys: bool,
    scaled: bool,
    call: StageCall,
) -> GradientTiles:
    """What the stage returns beside tiles and pairs, where parallel_bw_dQKV computes these on Mosaic GPU.

    Args:
      needs_delta: whether delta is still to be computed. Of the normaliser there is 1 / den alone then; ``with_delta`` adds the rest.
        Else delta is 0.
      call: of parallel_bw_dQKV; the others are those of ``parallel_bw_dP``.
    """
    gradients = NormaliserGradients()
    if normaliser is not None:
        gradients = normaliser.gradients(jnp.zeros_like(vecZ), vecZ, gates.per_step().vecM)
        gradients = NormaliserGradients(gradients.vecInvDen) if needs_delta else gradients
    return _beside_tiles(matQ, matK, gates, gradients, scale_keys, scaled, call)


def with_delta(
    tiles: GradientTiles,
    matQ: jax.Array,
    gates: ChunkGates,
    vecZ: Any,
    vecDelta: jax.Array,
    *,
    normaliser: Normaliser,
    call: StageCall,
) -> GradientTiles:
    """What ``without_tiles`` returned, with what takes delta, (B * NH, S) float32; call: of parallel_bw_dQKV."""
    gradients = normaliser.gradients(vecDelta, vecZ, gates.per_step().vecM)
    return tiles._replace(normaliser_gradients=gradients, vecDeltaN_added=_dn_added(matQ, gates, gradients, call))


def _dn_added(matQ, gates, gradients, call) -> jax.Array:
    from mlstm_pallas.stages.mosaic_gpu.step_sums import step_sums

    r = query_scale(gates.per_step().vecW, call.problem.qk_scale, gradients.vecInvDen)
    return step_sums(matQ, r * gradients.vecDzDen, call)


def _beside_tiles(matQ, matK, gates, gradients, scale_keys, scaled, call) -> GradientTiles:
    g = gates.per_step()
    r = query_scale(g.vecW, call.problem.qk_scale, gradients.vecInvDen)

    def times(x, weights):
        return (x.astype(jnp.float32) * steps_like(weights, x)).astype(x.dtype)

    qbar, kbar = times(matQ, r) if scaled else None, times(matK, g.vecAbar) if scaled and scale_keys else None
    dn_added = None if gradients.vecDzDen is None else _dn_added(matQ, gates, gradients, call)
    return GradientTiles(None, None, qbar, kbar, None, gradients, dn_added)


def _plain(matQ, matK, matV, matDeltaH, gates, gradients, scale_keys, call) -> GradientTiles:
    p = call.problem
    q, k, v, dh = map(call.chunks, (matQ, matK, matV, matDeltaH))

    def product(subscripts, *operands):
        return jnp.einsum(subscripts, *operands, preferred_element_type=gates.vecW.dtype, precision=call.precision)

    D, scores = decay_matrix(gates), product("nctk,ncsk->ncts", q, k) * p.qk_scale
    P, dA = D * scores, product("nctv,ncsv->ncts", dh, v)
    inv_den = dz_den = None
    if gradients.vecInvDen is not None:
        inv_den, dz_den = fusion_barrier((call.chunks(gradients.vecInvDen), call.chunks(gradients.vecDzDen)), gradients.vecInvDen)
        P, dA = P * inv_den[..., None], (dA + dz_den[..., None]) * inv_den[..., None]
    dP = D * dA
    n, T = p.L // p.T, p.T
    W = dP * scores
    strict = causal(W, offset=-1).reshape(p.BNH, p.NC, n, T, n, T)
    diagonal = jnp.diagonal(W, axis1=-2, axis2=-1).reshape(p.BNH, p.NC, n, T)
    pairs = TilePairs(jnp.moveaxis(jnp.sum(strict, axis=-1), -1, 1), jnp.moveaxis(jnp.sum(strict, axis=-3), 2, 1), diagonal)
    acc = gates.vecW.dtype
    qbar = q.astype(acc) * query_scale(gates.vecW, p.qk_scale, inv_den)[..., None]
    kbar = k.astype(acc) * gates.vecAbar[..., None]
    P, dP, Q_scaled, K_scaled = (x.reshape(p.BNH, p.S, x.shape[-1]).astype(q.dtype) for x in (P, dP * p.qk_scale, qbar, kbar))
    dn_added = None if dz_den is None else jnp.sum(qbar * dz_den[..., None], axis=2)
    return GradientTiles(P, dP, Q_scaled, K_scaled if scale_keys else None, pairs, gradients, dn_added)


def _heuristic(DHQK: int, dtype: jnp.dtype) -> StageConfig:
    wide = dtype.itemsize > 2
    return StageConfig(siz_b_LQ=64, siz_b_loop=32 if wide else 64, num_warps=4, num_stages=2 if wide else 3)


def _cost(p: Problem, itemsize: int) -> Cost:
    """Beside the above in float32 e, u, w, abar, m, z, 1/den, dz, dz den, dm, three sums for the gates, what a chunk adds to dn."""
    R, K, V = p.BNH * p.S, p.DHQK, p.DHHV
    floats = 15 * R + p.BNH * p.NC * K
    return Cost(R * (p.L + 1) * (K + V), itemsize * R * (4 * K + 3 * V + 2 * p.L) + 4 * floats)


def _loops(tiles: StageConfig, p: Problem) -> Sequence[LoopOperands]:
    T, step = tiles.siz_b_LQ, tiles.siz_b_loop
    return [LoopOperands(step < max(p.DHQK, p.DHHV), T, T * step, (T * step,))]


def clamp_to_tile(tiles: StageConfig, p: Problem) -> StageConfig:
    """At most MAX_TILE queries: no difference of sums over more than that is taken."""
    tiles = tiles.clamped(p)
    return tiles.replace(siz_b_LQ=min(tiles.siz_b_LQ, p.T))


def _mosaic_gpu_takes(tiles: StageConfig, p: Problem) -> bool:
    """Stages of two tiles of 128 x 64, three such tiles of h, read or not, four of 64 x 64 for outputs, what sums take, and barriers."""
    shared = 2 * ((tiles.num_stages * 2 + 3) * 128 * 64 + 4 * 64 * 64) + 4 * 2 * 256 + 2048 + 1024
    fits = tiles.num_stages >= 2 and shared <= MOSAIC_GPU_SHARED_BYTES
    return fits and p.DHQK % 64 == 0 and p.DHHV % 64 == 0 and p.L % 128 == 0


STAGE = Stage(
    name="parallel_bw_dP",
    run=parallel_bw_dP,
    inputs=("matQ", "matK", "matV", "matDeltaH", "chunk_gates", "matH", "vecZ"),
    search=search_of("siz_b_loop", siz_b_LQ=(16, 32, 64, 128)),
    heuristic=_heuristic,
    cost=_cost,
    loops=_loops,
    clamp=clamp_to_tile,
    mosaic_gpu=MosaicGpu(
        search=dict(num_stages=(2, 3, 4)),
        heuristic=lambda p: StageConfig(num_stages=4),
        takes=_mosaic_gpu_takes,
    ),
)
