"""Stage parallel_fw_P: what recurrent_fw_H multiplies, all chunks in parallel.

    P_ts = D_ts scale q_t . k_s / den_t,  s <= t inside the chunk        r_t = w_t scale / den_t        kbar_s = abar_s k_s
    z_t  = w_t scale n_c . q_t + den_t sum_s P_ts        den_t: normaliser.py; without a normaliser 1, and z is not computed

Grid (NC, B * NH). A CTA owns one chunk of L steps and reads siz_b_DHQK columns of q and k at a time. So each tile of decays is computed
once, not once for each column block of v.

key_sums: sum_s kbar_s of each chunk, from which n_c follows. Grid (NC, B * NH). XLA may turn this sum into a product and transpose the
keys for it in memory. Bytes: R K itemsize.

FLOPs: R (L + 1) K. Bytes: q, k, kbar and P, R (3 K + L) itemsize.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.gates import ChunkGates, causal, decay_matrix, vector_states
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import MOSAIC_GPU_HEADS, MOSAIC_GPU_SHARED_BYTES, Cost, MosaicGpu, Stage, StageCall, StageConfig, sequence_spec
from mlstm_pallas.tiles import Precision, causal_mask, decay_tile, dot


class Scores(NamedTuple):
    """What goes into h: all but v."""

    matP: jax.Array  # (B * NH, S, L) in the kernel dtype, column s - the chunk's first step
    matK_scaled: jax.Array  # (B * NH, S, DHQK) kbar in the kernel dtype; matK as it is where vecAbar is there
    vecR: jax.Array  # (B * NH, S) float32, as what follows
    vecZ: jax.Array | None  # (B * NH, S) the signed z_t; None without a normaliser
    vecN_states: jax.Array  # (B * NH, NC, DHQK) n before each chunk
    vecN_last: jax.Array  # (B * NH, DHQK)
    vecAbar: jax.Array | None = None  # (B * NH, S), with which recurrent_fw_H is to scale the keys


PER_STEP = ("matP", "matK_scaled", "vecR", "vecAbar")  # what recurrent_fw_H reads of it


def _parallel_fw_P_kernel(
    q_ref,  # (L, DHQK)
    k_ref,  # (L, DHQK)
    n_ref,  # (DHQK,), absent without a normaliser
    e_hi_ref,  # (L,)
    e_lo_ref,  # (L,)
    u_hi_ref,  # (L,)
    u_lo_ref,  # (L,)
    w_ref,  # (L,)
    abar_ref,  # (L,), absent where keys are not scaled
    m_ref,  # (L,), absent where the floor does not need it
    P_ref,  # out (L, L)
    r_ref,  # out (L,)
    *more_refs,  # out, as wanted: kbar (L, DHQK); with a normaliser z (L,)
    scale_keys: bool,
    siz_b_DHQK: int,
    scale: float,
    normaliser: Normaliser | None,
    precision: Precision,
):
    (L, DHQK), more = q_ref.shape, iter(more_refs)
    kbar_ref: Any = next(more) if scale_keys else None
    z_ref: Any = next(more, None)
    scores, q_n = jnp.zeros((L, L), jnp.float32), jnp.zeros((L,), jnp.float32)
    for start in range(0, DHQK, siz_b_DHQK):
        columns = pl.ds(start, siz_b_DHQK)
        q, k = q_ref[:, columns], k_ref[:, columns]
        scores += dot(q, k, precision, b_axis=1)
        if n_ref is not None:
            q_n += jnp.sum(q.astype(jnp.float32) * n_ref[columns][None, :], axis=1)
        if scale_keys:
            kbar_ref[:, columns] = (k.astype(jnp.float32) * abar_ref[...][:, None]).astype(kbar_ref.dtype)
    # Masked after the product, not before: a NaN in k reaches no earlier step.
    D = decay_tile(e_hi_ref[...], e_lo_ref[...], u_hi_ref[...], u_lo_ref[...], None)
    P = jnp.where(causal_mask(L, L, 0), scores * (D * scale), 0.0)
    r = query_scale(w_ref[...], scale)
    if normaliser is not None:
        z = r * q_n + jnp.sum(P, axis=1)
        inv_den = 1.0 / normaliser.denominator(z, None if m_ref is None else m_ref[...])
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
):
    abar = abar_ref[...][:, None]
    for start in range(0, k_ref.shape[1], siz_b_DHQK):
        columns = pl.ds(start, siz_b_DHQK)
        sums_ref[columns] = jnp.sum(k_ref[:, columns].astype(jnp.float32) * abar, axis=0)


def _key_sums(matK: jax.Array, gates: ChunkGates, call: StageCall) -> jax.Array:
    """What each chunk adds to n, (B * NH, NC, DHQK) float32."""
    p = call.problem
    return kernel_call(
        _key_sums_kernel,
        name="key_sums",
        grid=(p.NC, p.BNH),
        in_specs=[sequence_spec(matK, p, p.L, p.DHQK, lambda c, b: (b, c, 0)), pl.BlockSpec((None, p.L), lambda c, b: (b, c))],
        out_specs=[pl.BlockSpec((None, None, p.DHQK), lambda c, b: (b, c, 0))],
        out_shape=[jax.ShapeDtypeStruct((p.BNH, p.NC, p.DHQK), jnp.float32)],
        call=call,
        siz_b_DHQK=call.tiles.siz_b_DHQK,
    )(matK, gates.per_step().vecAbar)[0]


def parallel_fw_P(
    matQ: jax.Array,
    matK: jax.Array,
    gates: ChunkGates,
    vecN_initial: jax.Array,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    scale_keys: bool = True,
    call: StageCall,
) -> Scores:
    """Runs the stage, in the chunks of recurrent_fw_H.

    Args:
      matQ, matK: (B * NH, S, DHQK) in the kernel dtype.
      gates: of chunk_gates.
      vecN_initial: (B * NH, DHQK), float32.
      scale_keys: whether keys are scaled here; else recurrent_fw_H does it.
    """
    if call.plain:
        return _plain(matQ, matK, gates, vecN_initial, normaliser, scale_keys, call)
    p = call.problem
    if call.lowering.mosaic_gpu:
        from mlstm_pallas.stages.mosaic_gpu.parallel_fw_P import parallel_fw_P as on_mosaic_gpu

        P, r, z, n, n_last = on_mosaic_gpu(matQ, matK, gates, vecN_initial, normaliser, call)
        return Scores(P, matK, r, z, n, n_last, gates.per_step().vecAbar)
    n, n_last = vector_states(_key_sums(matK, gates, call), gates.scaGamma, vecN_initial)
    steps = pl.BlockSpec((None, p.L), lambda c, b: (b, c))
    q, k = (sequence_spec(x, p, p.L, p.DHQK, lambda c, b: (b, c, 0)) for x in (matQ, matK))
    kbar = pl.BlockSpec((None, p.L, p.DHQK), lambda c, b: (b, c, 0))
    normalise, needs_m = normaliser is not None, normaliser is not None and normaliser.floor_needs_m
    vector, g = jax.ShapeDtypeStruct((p.BNH, p.S), jnp.float32), gates.per_step()
    P, r, *more = kernel_call(
        _parallel_fw_P_kernel,
        name="parallel_fw_P",
        grid=(p.NC, p.BNH),
        in_specs=[
            q,
            k,
            pl.BlockSpec((None, None, p.DHQK), lambda c, b: (b, c, 0)) if normalise else None,
            *[steps] * 5,
            steps if scale_keys else None,
            steps if needs_m else None,
        ],
        out_specs=[pl.BlockSpec((None, p.L, p.L), lambda c, b: (b, c, 0)), steps, *[kbar] * scale_keys, *[steps] * normalise],
        out_shape=[
            jax.ShapeDtypeStruct((p.BNH, p.S, p.L), matQ.dtype),
            vector,
            *[jax.ShapeDtypeStruct((p.BNH, p.S, p.DHQK), matQ.dtype)] * scale_keys,
            *[vector] * normalise,
        ],
        call=call,
        scale_keys=scale_keys,
        siz_b_DHQK=call.tiles.siz_b_DHQK,
        scale=p.qk_scale,
        normaliser=normaliser,
        precision=call.precision,
    )(matQ, matK, n if normalise else None, *g.vecE, *g.vecU, g.vecW, g.vecAbar if scale_keys else None, g.vecM if needs_m else None)
    keys, abar = (more.pop(0), None) if scale_keys else (matK, g.vecAbar)
    return Scores(P, keys, r, more.pop() if normalise else None, n, n_last, abar)


def _plain(matQ, matK, gates, vecN_initial, normaliser, scale_keys, call) -> Scores:
    p, q, k = call.problem, call.chunks(matQ), call.chunks(matK)
    kbar = k.astype(gates.vecW.dtype) * gates.vecAbar[..., None]
    n, n_last = vector_states(jnp.sum(kbar, axis=2), gates.scaGamma, vecN_initial)
    P = jnp.einsum("nctk,ncsk->ncts", q, k, preferred_element_type=gates.vecW.dtype, precision=call.precision)
    P = causal(P * (decay_matrix(gates) * p.qk_scale))
    r, z = query_scale(gates.vecW, p.qk_scale), None
    if normaliser is not None:
        z = r * jnp.sum(q.astype(n.dtype) * n[:, :, None], axis=-1) + jnp.sum(P, axis=-1)
        made = normaliser.normalise(jnp.concatenate([P, r[..., None]], axis=-1), z, gates.vecM)
        P, r = made[..., :-1], made[..., -1]
    P, kbar, r = (x.reshape(p.BNH, p.S, *x.shape[3:]) for x in (P.astype(q.dtype), kbar.astype(q.dtype), r))
    keys, abar = (kbar, None) if scale_keys else (matK, gates.per_step().vecAbar)
    return Scores(P, keys, r, None if z is None else z.reshape(p.BNH, p.S), n, n_last, abar)


def _cost(p: Problem, itemsize: int) -> Cost:
    """Beside the above in float32 e, u, w, abar, m, r, z; gamma, and n at all chunk boundaries."""
    R, K = p.BNH * p.S, p.DHQK
    floats = 9 * R + p.BNH * p.NC + p.BNH * (p.NC + 2) * K
    return Cost(R * (p.L + 1) * K, itemsize * R * (3 * K + p.L) + 4 * floats)


def _mosaic_gpu_takes(tiles: StageConfig, p: Problem) -> bool:
    """q and k of a chunk are in shared memory, whole."""
    return (
        p.BNH <= MOSAIC_GPU_HEADS
        and p.L == 64
        and p.DHQK % 64 == 0
        and 2 * (2 * p.L * p.DHQK + p.L * p.L) + 1024 <= MOSAIC_GPU_SHARED_BYTES
    )


_TILES = StageConfig(num_warps=4, num_stages=1)
STAGE = Stage(
    name="parallel_fw_P",
    run=parallel_fw_P,
    inputs=("matQ", "matK", "chunk_gates", "vecN_initial"),
    search={"siz_b_DHQK": (32, 64, 128, 256), "num_warps": (1, 2, 4, 8)},
    heuristic=lambda DHQK, dtype: _TILES,
    cost=_cost,
    loops=lambda tiles, p: (),  # no product in a loop, and little of the rest
    fused=True,
    mosaic_gpu=MosaicGpu(search={}, heuristic=lambda p: StageConfig(), takes=_mosaic_gpu_takes),
)
