"""Stage parallel_bw_dP: what recurrent_fw_C, recurrent_bw_dC and parallel_bw_dQKV multiply, all tiles in parallel.

    P_ts = D_ts scale q_t . k_s / den_t        dP_ts = D_ts (dnum_t . v_s + dz_t),  s <= t inside the chunk        dnum_t = dh_t / den_t
    kbar_s = abar_s k_s                        qbar_t = w_t scale / den_t q_t

Grid (programs of a chunk, NC, B * NH). With T = siz_b_LQ a chunk has n = L / T tiles of rows: n (n + 1) / 2 programs make a tile of P and
dP each, T x T, from siz_b_loop columns of q and k, of v and dh, at a time; n more scale T rows of q and k. For the gates' gradients the
former sum W_ts = dP_ts scale q_t . k_s over rows and columns of their tile; the latter sum what their rows add to n and dn.

FLOPs: B NH S (L + T) (DHQK + DHHV). Bytes: B NH S (4 DHQK + 2 DHHV + 2 L) itemsize.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gate_gradients import RowGradients, TilePairs
from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.launch import kernel_call, masked_store
from mlstm_pallas.problem import MAX_TILE, Problem
from mlstm_pallas.tiles import Precision, block_at, blocks, causal_mask, decay_tile, dot, loop, sum_of


class GradientTiles(NamedTuple):
    """In the kernel dtype; column s - the chunk's first step. Of P and dP what lies above the diagonal is 0 in the diagonal blocks of
    MAX_TILE steps, and not written elsewhere."""

    matP: jax.Array  # (B, NH, S, L)
    matDeltaP: jax.Array  # (B, NH, S, L), times scale
    matQ_scaled: jax.Array  # (B, NH, S, DHQK) qbar
    matK_scaled: Any  # (B, NH, S, DHQK) kbar; None where it is not wanted


class AddedNorms(NamedTuple):
    """(B, NH, NC, DHQK) float32; added_n None where it is not wanted, added_dn None without a normaliser."""

    added_n: Any  # sum of abar_s k_s
    added_dn: jax.Array | None  # sum of w_t scale dz_t q_t


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
    from_ref,  # out (n, L) sum of W_ts over s < t in each tile of columns
    to_ref,  # out (n, L) sum of W_ts over t > s in each tile of rows
    diagonal_ref,  # out (L,) W_tt
    *more_refs,  # out: kbar (L, DHQK) and added_n (n, DHQK) where they are wanted; with a normaliser added_dn (n, DHQK)
    T: int,
    of_keys: bool,
    scale: float,
    siz_b_loop: int,
    precision: Precision,
):
    (L, DHQK), DHHV = q_ref.shape, v_ref.shape[1]
    more = iter(more_refs)
    kbar_ref: Any = next(more) if of_keys else None
    added_n_ref: Any = next(more) if of_keys else None
    added_dn_ref: Any = next(more, None)
    n = L // T
    index, pairs = pl.program_id(0), n * (n + 1) // 2
    # The tiles in order of rows, row i having i + 1.
    i: Any = sum(((index >= m * (m + 1) // 2).astype(jnp.int32) for m in range(1, n)), np.int32(0))
    j = index - lax.div(i * (i + 1), np.int32(2))
    step_k, step_v = min(siz_b_loop, DHQK), min(siz_b_loop, DHHV)

    @pl.when(index < pairs)
    def _tile():
        rows, columns = block_at(i, T), block_at(j, T)

        def dh_times_v(x):
            return dot(dh_ref[rows, block_at(x, step_v)], v_ref[columns, block_at(x, step_v)], precision, b_axis=1)

        def q_times_k(x):
            return dot(q_ref[rows, block_at(x, step_k)], k_ref[columns, block_at(x, step_k)], precision, b_axis=1)

        dA = sum_of(DHHV // step_v, dh_times_v, (T, T))
        scores = sum_of(DHQK // step_k, q_times_k, (T, T)) * scale
        offset = (i - j) * T
        D = decay_tile(e_hi_ref[columns], e_lo_ref[columns], u_hi_ref[rows], u_lo_ref[rows], causal_mask(T, T, offset))
        P = D * scores
        if inv_den_ref is not None:
            inv_den = inv_den_ref[rows][:, None]
            P, dA = P * inv_den, (dA + dz_den_ref[rows][:, None]) * inv_den
        dP = D * dA
        W, strict = dP * scores, causal_mask(T, T, offset - 1)
        before = jnp.where(strict, W, 0.0)
        from_ref[j, rows] = jnp.sum(before, axis=1)
        to_ref[i, columns] = jnp.sum(before, axis=0)
        P_ref[rows, columns] = P.astype(P_ref.dtype)
        dP_ref[rows, columns] = (dP * scale).astype(P_ref.dtype)

        # Summed in every tile: a branch that reads W takes as many registers, fifty.
        masked_store(diagonal_ref.at[rows], jnp.sum(jnp.where(strict, 0.0, W), axis=1), jnp.full((T,), i == j))

        whole = max(MAX_TILE // T, 1)  # tiles on a side of a block

        def above(x, _):
            zeros = jnp.zeros((T, T), P_ref.dtype)
            P_ref[rows, block_at(x, T)] = zeros
            dP_ref[rows, block_at(x, T)] = zeros
            return _

        if whole > 1:
            end = lax.min(lax.div(i, np.int32(whole)) * whole + whole, np.int32(n))
            lax.fori_loop(j + 1, jnp.where(i == j, end, j + 1), above, ())

    @pl.when(index >= pairs)
    def _rows():
        tile = index - pairs
        rows = block_at(tile, T)
        abar, r = abar_ref[rows][:, None], w_ref[rows] * scale
        if inv_den_ref is not None:
            r, dz_den = r * inv_den_ref[rows], dz_den_ref[rows][:, None]

        def scaled(x, _):
            columns = block_at(x, step_k)
            q = q_ref[rows, columns].astype(jnp.float32) * r[:, None]
            qbar_ref[rows, columns] = q.astype(qbar_ref.dtype)
            if kbar_ref is not None:
                k = k_ref[rows, columns].astype(jnp.float32) * abar
                kbar_ref[rows, columns] = k.astype(kbar_ref.dtype)
                added_n_ref[tile, columns] = jnp.sum(k, axis=0)
            if added_dn_ref is not None:
                added_dn_ref[tile, columns] = jnp.sum(q * dz_den, axis=0)
            return _

        loop(DHQK // step_k, scaled, ())


def parallel_bw_dP(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    rows: RowGradients,
    *,
    problem: Problem,
    config: KernelConfig,
    of_keys: bool = True,
    interpret: bool = False,
) -> tuple[GradientTiles, AddedNorms, TilePairs]:
    """Launches the stage. Config: siz_b_LQ (rows and columns of a tile, at most MAX_TILE), siz_b_loop.

    Args:
      matQ, matK: (B, NH, S, DHQK), matV, matDeltaH: (B, NH, S, DHHV), in the kernel dtype.
      gates, rows: of chunks of L steps.
      of_keys: whether kbar and added_n, of which the states are made, are wanted.
    """
    p, stage = problem, config.stage("parallel_bw_dP").fitted(problem, "parallel_bw_dP")
    T = stage.siz_b_LQ
    n = blocks(p.L, T)
    row = pl.BlockSpec((None, p.L), lambda x, c, b: (b, c))
    normalised = rows.vecInvDen is not None
    tile, keys, values = (pl.BlockSpec((None, p.L, width), lambda x, c, b: (b, c, 0)) for width in (p.L, p.DHQK, p.DHHV))
    sums = pl.BlockSpec((None, n, p.L), lambda x, c, b: (b, 0, c))
    norm = pl.BlockSpec((None, n, p.DHQK), lambda x, c, b: (b, c, 0))
    norm_shape = jax.ShapeDtypeStruct((p.BNH, p.NC * n, p.DHQK), jnp.float32)

    def steps(width):
        return jax.ShapeDtypeStruct((p.BNH, p.S, width), matQ.dtype)

    sums_shape, row_shape = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((p.BNH, n, p.S), (p.BNH, p.S)))
    made = [(tile, steps(p.L))] * 2 + [(keys, steps(p.DHQK)), (sums, sums_shape), (sums, sums_shape), (row, row_shape)]
    made += [(keys, steps(p.DHQK)), (norm, norm_shape)] * of_keys + [(norm, norm_shape)] * normalised
    P, dP, qbar, from_tiles, to_tiles, diagonal, *more = kernel_call(
        _parallel_bw_dP_kernel,
        name="parallel_bw_dP",
        grid=(n * (n + 1) // 2 + n, p.NC, p.BNH),
        in_specs=[keys, keys, values, values, *[row] * 6, *[row if normalised else None] * 2],
        out_specs=[spec for spec, _ in made],
        out_shape=[shape for _, shape in made],
        stage=stage,
        interpret=interpret,
        T=T,
        of_keys=of_keys,
        scale=p.qk_scale,
        siz_b_loop=stage.siz_b_loop,
        precision=config.dot_precision(matQ.dtype, interpret),
    )(
        *(x.reshape(p.BNH, p.S, -1) for x in (matQ, matK, matV, matDeltaH)),
        *(x.reshape(p.BNH, p.S) for x in (*gates.vecE, *gates.vecU, gates.vecW, gates.vecAbar)),
        *(None if x is None else x.reshape(p.BNH, p.S) for x in (rows.vecInvDen, rows.vecDzDen)),
    )
    heads = (p.B, p.NH)
    P, dP, qbar, *kbar = (x.reshape(*heads, p.S, -1) for x in (P, dP, qbar, *([more.pop(0)] if of_keys else [])))
    added = [jnp.sum(x.reshape(*heads, p.NC, n, p.DHQK), axis=3) for x in more]
    tiles = (*heads, n, p.NC, n, T)
    return (
        GradientTiles(P, dP, qbar, *(kbar or [None])),
        AddedNorms(added.pop(0) if of_keys else None, added.pop(0) if normalised else None),
        TilePairs(from_tiles.reshape(tiles), to_tiles.reshape(tiles), diagonal.reshape(*heads, p.NC, n, T)),
    )
