"""parallel_bw_dP in Triton; XLA computes delta, in a pass over h and dh.

Grid (CTAs per chunk, NC, B * NH). With T = siz_b_LQ a chunk has n = L / T tiles of queries and n
of keys. n (n + 1) / 2 CTAs own one T x T tile of P and dP each, and read block_k columns of q, k, v
and dh at a time. They sum W_ts = dP_ts scale q_t . k_s over the queries and over the keys of their
tile, for the gradients of the gates. n more CTAs scale T queries and keys each, and sum what these
steps add to dn.

FLOPs: tokens (L + 1) (K + V). Bytes: q, k, v, dh, h, qbar, kbar, P and dP, tokens (4 K + 3 V + 2 L)
itemsize.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.gate_gradients import TileSums
from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.formulas.scores import decays, score_gradients, tile_steps
from mlstm_pallas.formulas.tile_sizes import least_padding
from mlstm_pallas.formulas.tiles import (
    block_at,
    blocks,
    blocks_over,
    fori,
    product,
    remainder,
    rounded_up,
    triangle_tile,
    weighted,
)
from mlstm_pallas.launches.kernel_tiles import KernelSpec
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.operands.scaled_rows import ScaledRows
from mlstm_pallas.problem.dimensions import MAX_TILE, Problem, next_power_of_two
from mlstm_pallas.problem.gpu import Gpu
from mlstm_pallas.stages.parallel_bw_dP import (
    Operands,
    ScoreGradients,
    ScoreTiles,
    delta_and_gradients,
)
from mlstm_pallas.triton.launch import (
    PipelinedTiles,
    depth_and_stages,
    floats,
    kernel_call,
    masked_store,
    operands,
)


def _parallel_bw_dP_kernel(
    matQ,  # (L, DHQK)
    matK,  # (L, DHQK)
    matV,  # (L, DHV)
    matDeltaH,  # (L, DHV)
    vecE,  # two (L,); all inputs below are (L,)
    vecU,  # two
    vecW,
    vecAbar,
    vecInvDen,  # absent without a normaliser
    vecDzDen,  # absent without a normaliser
    sizes,  # () steps of the chunk in the list; absent if all chunks are active
    matP,  # out (L, L)
    matDeltaP,  # out (L, L)
    matQbar,  # out (L, DHQK)
    per_query,  # out (n, L) sum of W_ts over s < t in each tile of keys
    per_key,  # out (n, L) sum of W_ts over t > s in each tile of queries
    diagonal,  # out (L,) W_tt
    matKbar,  # out (L, DHQK), may be absent
    vecDeltaN_added,  # out (n, DHQK), absent without a normaliser
    *,
    call,
):
    (L, DHQK), p = matQ.shape, call.problem
    T, block_k, scale = call.tiles.siz_b_LQ, call.tiles.block_k, p.qk_scale
    n = L // T
    index, num_tiles = pl.program_id(0), n * (n + 1) // 2
    i, j = triangle_tile(index, n)  # of queries and of keys, in processing order

    in_tile = index < num_tiles
    if sizes is not None:
        in_tile &= sizes[...] > 0

    @pl.when(in_tile)
    def _tile():
        row, column = p.memory_index(i, n), p.memory_index(j, n)
        queries, keys = block_at(row, T), block_at(column, T)

        dh_v, qk = (
            product(a, b, queries, keys, block_k, call.precision, b_axis=1)
            for a, b in ((matDeltaH, matV), (matQ, matK))
        )
        e, u = [ref[keys] for ref in vecE], [ref[queries] for ref in vecU]
        normaliser = vecInvDen, vecDzDen
        inv_den, dz_den = (None if ref is None else ref[queries] for ref in normaliser)
        t, s = tile_steps((T, T), (row - column) * T, p)
        P, dP, W = score_gradients(qk, dh_v, decays(e, u, s <= t), p, inv_den, dz_den)
        before = jnp.where(s < t, W, 0.0)
        per_query[column, queries] = jnp.sum(before, axis=1)
        per_key[row, keys] = jnp.sum(before, axis=0)
        matP[queries, keys] = P.astype(matP.dtype)
        matDeltaP[queries, keys] = dP.astype(matP.dtype)

        # Every tile computes this sum, because a branch that reads W would take fifty registers.
        masked_store(
            diagonal.at[queries],
            jnp.sum(jnp.where(s < t, 0.0, W), axis=1),
            jnp.full((T,), i == j),
        )

        side = MAX_TILE // T  # of a block, in tiles
        if side > 1 and n > 1:
            after = lax.min(side - 1 - remainder(i, side), n - 1 - i)

            @fori(jnp.where(i == j, after, 0))
            def _above(x):
                above = queries, block_at(p.memory_index(i + 1 + x, n), T)
                matP[above] = matDeltaP[above] = jnp.zeros((T, T), matP.dtype)

    @pl.when(index >= num_tiles)
    def _scaled_operands():
        tile = index - num_tiles
        steps = block_at(tile, T)
        abar, w = vecAbar[steps][:, None], vecW[steps]
        r = query_scale(w, scale, None if vecInvDen is None else vecInvDen[steps])
        dn = None if vecDzDen is None else weighted(r, vecDzDen[steps], p)[:, None]

        @fori(blocks_over(DHQK, block_k))
        def _(x):
            columns = block_at(x, block_k)
            q = matQ[steps, columns].astype(jnp.float32)
            matQbar[steps, columns] = (q * r[:, None]).astype(matQbar.dtype)
            if matKbar is not None:
                k = matK[steps, columns].astype(jnp.float32) * abar
                matKbar[steps, columns] = k.astype(matKbar.dtype)
            if vecDeltaN_added is not None:
                vecDeltaN_added[tile, columns] = jnp.sum(q * dn, axis=0)


def parallel_bw_dP(
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    return_keys: bool = True,
    call: Launch,
) -> ScoreGradients:
    """Runs the stage: ``stages/parallel_bw_dP.py``."""
    (delta, gradients), g = delta_and_gradients(x, normaliser), x.gates.per_step()
    p, T, dtype = call.problem, call.tiles.siz_b_LQ, x.matQ.dtype
    block_k = call.tiles.block_k
    n = blocks(p.L, T)
    tile = jax.ShapeDtypeStruct((p.BNH, p.S, p.L), dtype), "bt0"
    # It has the caller's steps, so that XLA can give it the memory of a gradient.
    scaled = jax.ShapeDtypeStruct((p.BNH, x.matQ.shape[1], p.DHQK), dtype)
    sums = floats(p.BNH, n, p.S), "b0t"
    y = kernel_call(
        _parallel_bw_dP_kernel,
        operands(x, matQ="btK", matK="btK", matV="btV", matDeltaH="btV")
        | operands(g, vecE="bt", vecU="bt", vecW="bt", vecAbar="bt")
        | operands(gradients, vecInvDen="bt", vecDzDen="bt")
        | operands(x.active and x.active.entries, sizes="bc"),
        dict(
            matP=tile,
            matDeltaP=tile,
            matQbar=(scaled, "btK"),
            per_query=sums,
            per_key=sums,
            diagonal=(floats(p.BNH, p.S), "bt"),
            matKbar=(scaled if return_keys else None, "btK"),
            vecDeltaN_added=(floats(p.BNH, p.NC, n, p.DHQK) if normaliser else None, "bc0K"),
        ),
        sizes=dict(K=rounded_up(p.DHQK, block_k), V=rounded_up(p.DHV, block_k)),
        call=call,
    )
    dn_added = y["vecDeltaN_added"]
    if dn_added is not None:
        dn_added = jnp.sum(dn_added, axis=2)
    tile_sums = TileSums(y["per_query"], y["per_key"], y["diagonal"])
    return ScoreGradients(
        ScoreTiles(y["matP"], y["matDeltaP"], tile_sums),
        ScaledRows(y["matQbar"], None),
        ScaledRows(y["matKbar"], None) if return_keys else None,
        delta,
        dn_added,
    )


class BlockedTiles(PipelinedTiles):
    """Tiles with a block_k: columns that an iteration reads, along either head dimension."""

    def clamped(self, p: Problem) -> Self:
        """Also clamps siz_b_LQ to ``Problem.T`` steps."""
        x: Any = super().clamped(p)
        block_k = min(x.block_k, next_power_of_two(min(p.DHQK, p.DHV)))
        return dataclasses.replace(x, siz_b_LQ=min(x.siz_b_LQ, p.T), block_k=block_k)

    def fitted(self, p: Problem, dtype: jnp.dtype, gpu: Gpu) -> Self:
        """The tiles with the columns per iteration and the stages of ``depth_and_stages``."""
        x: Any = self
        depth, stages = depth_and_stages(gpu, x.elements(p)[0] // x.block_k, x.block_k, dtype)
        return dataclasses.replace(x, block_k=depth, num_stages=stages)


@dataclasses.dataclass(frozen=True)
class ParallelBwDPTiles(BlockedTiles):
    """siz_b_LQ: queries of a tile of P and dP, which has equally many keys."""

    siz_b_LQ: int
    block_k: int
    num_warps: int
    num_stages: int

    def grid(self, p: Problem) -> tuple[int, ...]:
        n = blocks(p.L, self.siz_b_LQ)
        return n * (n + 1) // 2 + n, p.NC, p.BNH

    def elements(self, p: Problem) -> tuple[int, int]:
        return 2 * self.siz_b_LQ * self.block_k, 0

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, kernel: KernelSpec) -> Self:
        """Tiles of 64 x 64; P, dP and their gradients take a third of an SM's registers."""
        # In narrow heads 32 columns, for as many iterations as stages.
        depth = 32 if dtype.itemsize > 2 or p.DHQK + p.DHV <= 128 else 128
        # A head that is one masked block would have no pipeline.
        depth = min(depth, 128 if p.DHQK % 128 == p.DHV % 128 == 0 else 64)
        depth = least_padding(depth, p.DHQK, p.DHV, overhead=16)
        return cls(64, depth, 4, 3).clamped(p).fitted(p, dtype, kernel.gpu)
