"""parallel_fw_H in Triton.

Grid (DHV / siz_b_DHHV, S / siz_b_LQ, B * NH). A CTA owns siz_b_LQ queries and siz_b_DHHV columns
of h, in float32 registers. It loops over DHQK in steps of siz_b_DHQK for the inter-chunk part, then
over the chunk's tiles of siz_b_LKV keys up to its queries. The stabilisers are known, so nothing is
rescaled on the way. The column blocks of the same queries run next to each other: q, k and the
gates come from memory once, then from L2.

FLOPs: 2 tokens K V + tokens (L + 1) (K + V), q.k again for each column block. Bytes: q, k, v, h and
C, (tokens (2 K + 2 V) + B NH NC K V) itemsize.
"""

import dataclasses
import functools
import operator
from typing import Any, Self

import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.formulas.rows import sequence_shape
from mlstm_pallas.formulas.scores import causal_scores, decays, tile_steps
from mlstm_pallas.formulas.tile_sizes import least_padding
from mlstm_pallas.formulas.tiles import (
    block_at,
    blocks,
    blocks_over,
    divide,
    dot,
    loop,
    pieces,
    product,
    remainder,
    rounded_up,
    sum_of,
    weighted,
)
from mlstm_pallas.launches.kernel_tiles import KernelSpec
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages.parallel_fw_H import Operands, Outputs
from mlstm_pallas.triton.launch import (
    PipelinedTiles,
    floats,
    kernel_call,
    operands,
    stages_that_fit,
)


def _parallel_fw_H_kernel(
    matQ,  # (siz_b_LQ, DHQK)
    matK,  # (L, DHQK)
    matV,  # (L, siz_b_DHHV)
    matC_states,  # (DHQK, siz_b_DHHV)
    vecN_states,  # (DHQK,), absent without a normaliser
    vecE,  # two (L,)
    vecU,  # two (siz_b_LQ,)
    vecW,  # (siz_b_LQ,)
    vecM,  # (siz_b_LQ,), absent without a normaliser
    matH,  # out (siz_b_LQ, siz_b_DHHV)
    vecZ,  # out (siz_b_LQ,), absent without a normaliser
    *,
    call,
    normaliser,
):
    p, tiles, precision = call.problem, call.tiles, call.precision
    siz_b_LKV, siz_b_DHQK, keep_q = tiles.siz_b_LKV, tiles.siz_b_DHQK, tiles.keep_q
    (LQ, DHQK), columns = matQ.shape, pl.ds(0, matH.shape[1])
    num_k, queries, n = blocks_over(DHQK, siz_b_DHQK), pl.ds(0, LQ), p.L // LQ
    tile = remainder(pl.program_id(1), n)  # of the chunk's queries, in memory

    # q . n is a separate loop: if a pipelined tile feeds both a product and other arithmetic,
    # Triton gives it one buffer too few, and the copy of a later tile overwrites it under the
    # running product.
    def norm(q, n):
        return jnp.sum(q.astype(jnp.float32) * n[None, :], axis=1)

    def norm_of(ik):
        at = block_at(ik, siz_b_DHQK)
        return norm(matQ[:, at], vecN_states[at])

    num, z = product(matQ, matC_states, queries, columns, siz_b_DHQK, precision), []
    whole_q = [(at, matQ[:, at]) for at in pieces(DHQK, DHQK)] if keep_q else []
    if normaliser is not None:
        parts = [norm(q, vecN_states[at]) for at, q in whole_q] or [sum_of(num_k, norm_of, (LQ,))]
        z = [functools.reduce(operator.add, parts)]
    w = query_scale(vecW[...], p.qk_scale)
    num, z = weighted(w[:, None], num, p), [weighted(w, x, p) for x in z]
    u = [ref[...] for ref in vecU]

    def add_keys(j, carry):
        num, z = carry
        keys = block_at(p.memory_index(j, blocks(p.L, siz_b_LKV)), siz_b_LKV)
        if keep_q:
            parts = (dot(q, matK[keys, at], precision, b_axis=1) for at, q in whole_q)
            qk = functools.reduce(operator.add, parts)
        else:
            qk = product(matQ, matK, queries, keys, siz_b_DHQK, precision, b_axis=1)
        e = [ref[keys] for ref in vecE]
        t, s = tile_steps(qk.shape, tile * LQ - keys.start, p)
        P = causal_scores(qk, decays(e, u), s <= t, p)
        num += dot(P.astype(matV.dtype), matV[keys, :], precision)
        return num, [x + jnp.sum(P, axis=1) for x in z]

    num_keys = divide((p.memory_index(tile, n) + 1) * LQ + siz_b_LKV - 1, siz_b_LKV)
    num, z = loop(num_keys, add_keys, (num, z))
    if normaliser is None:
        matH[...] = num.astype(matH.dtype)
        return

    den = normaliser.denominator(*z, vecM[...])
    matH[...] = (num / den[:, None]).astype(matH.dtype)

    @pl.when(pl.program_id(0) == 0)
    def _():
        (vecZ[...],) = z


def parallel_fw_H(
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    output_dtype: Any = None,
    call: Launch,
) -> Outputs:
    """Runs the stage: ``stages/parallel_fw_H.py``."""
    p, g, LQ = call.problem, x.gates.per_step(), call.tiles.siz_b_LQ
    output_dtype = x.matQ.dtype if output_dtype is None else output_dtype
    n = blocks(p.L, LQ)  # tiles of a chunk
    y = kernel_call(
        _parallel_fw_H_kernel,
        operands(x, matQ="bqK", matK="btK", matV="btv", matC_states="bcKv")
        | operands(normaliser and x, vecN_states="bcK")
        | operands(g, vecE="bt", vecU="bq", vecW="bq")
        | operands(normaliser and g, vecM="bq"),
        dict(
            matH=(sequence_shape(x.matV, p.DHV, output_dtype), "bqv"),
            vecZ=(floats(p.BNH, p.S) if normaliser else None, "bq"),
        ),
        sizes=dict(q=LQ, v=call.tiles.siz_b_DHHV, K=rounded_up(p.DHQK, call.tiles.siz_b_DHQK)),
        index=lambda v, q, b: dict(v=v, q=q, c=q // n, b=b),
        call=call,
        normaliser=normaliser,
    )
    return Outputs(**y)


@dataclasses.dataclass(frozen=True)
class ParallelFwHTiles(PipelinedTiles):
    """keep_q: whether a tile's queries stay in shared memory, whole, during the loop over keys."""

    siz_b_LQ: int
    siz_b_LKV: int
    siz_b_DHQK: int
    siz_b_DHHV: int
    num_warps: int
    num_stages: int
    keep_q: bool

    def grid(self, p: Problem) -> tuple[int, ...]:
        return blocks_over(p.DHV, self.siz_b_DHHV), p.NC * blocks(p.L, self.siz_b_LQ), p.BNH

    def elements(self, p: Problem) -> tuple[int, int]:
        """The elements that the loop over keys reads, and those that stay."""
        LQ, LKV, depth = self.siz_b_LQ, self.siz_b_LKV, self.siz_b_DHQK
        keys = LKV * p.DHQK if self.keep_q else depth * (LKV + LQ)
        return keys + LKV * self.siz_b_DHHV, LQ * p.DHQK * self.keep_q

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, kernel: KernelSpec) -> Self:
        """As many columns as possible, up to 256, because each block repeats the scores.

        An SM has two CTAs of 64 queries, or one of 128 where the queries take half of it.
        """
        wide, itemsize = dtype.itemsize > 2, dtype.itemsize
        depth = least_padding(32 if wide else 64, p.DHQK, overhead=16)
        keep_q = not wide and p.DHQK <= 256
        columns = least_padding(128 if wide else 256, p.DHV)
        low = 64, 32, least_padding(128, p.DHV), 4
        sizes = [(*low, 3), (*low, 2), (64, 32, 64, 4, 2)]
        if wide or p.DHQK + p.DHV <= 128:
            sizes = sizes[1:]
        elif columns == 256 and p.DHQK > 128 and p.L >= 128:
            sizes = [(128, 32, columns, 8, 3), (128, 32, columns, 8, 2), *sizes]
        elif columns == 256 and p.DHQK <= 128:
            sizes = [(64, 64, 256, 4, 2), *sizes]

        def fits(x):
            loops = (depth * (x.siz_b_LQ + x.siz_b_DHHV), 0), x.elements(p)
            return all(
                stages_that_fit(
                    kernel.gpu, size * itemsize, kept * itemsize, x.num_stages, ctas_per_sm=1
                )
                == x.num_stages
                for size, kept in loops
            )

        candidates = [cls(*x[:2], depth, *x[2:], keep_q).clamped(p) for x in sizes]
        return next(filter(fits, candidates), candidates[-1])
