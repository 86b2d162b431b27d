"""parallel_fw_H in Triton.

Grid (DHHV / siz_b_DHHV, S / siz_b_LQ, B * NH). A CTA owns siz_b_LQ queries and siz_b_DHHV columns
of h, in float32 registers. It loops over DHQK in steps of siz_b_DHQK for the inter-chunk part, then
over the chunk's tiles of siz_b_LKV keys up to its queries. The stabilisers are known, so nothing is
rescaled on the way. The column blocks of the same queries run next to each other: q, k and the
gates come from memory once, then from L2.

FLOPs: 2 tokens K V + tokens (L + 1) (K + V), q.k again for each column block. Bytes: q, k, v, h and
C, (tokens (2 K + 2 V) + B NH NC K V) itemsize.
"""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.gpu import Gpu
from mlstm_pallas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.problem import Problem, is_power_of_two
from mlstm_pallas.stage import Launch, clamped, sequence_shape
from mlstm_pallas.stages.parallel_fw_H import Operands, Outputs
from mlstm_pallas.tiles import (
    block_at,
    blocks,
    causal_mask,
    decay_tile,
    divide,
    dot,
    loop,
    remainder,
    sum_of,
)
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
    vecM,  # (siz_b_LQ,), absent if the floor does not need it
    matH,  # out (siz_b_LQ, siz_b_DHHV)
    vecZ,  # out (siz_b_LQ,), absent without a normaliser
    *,
    call,
    normaliser,
):
    p, tiles, precision = call.problem, call.tiles, call.precision
    siz_b_LKV, siz_b_DHQK, keep_q = tiles.siz_b_LKV, tiles.siz_b_DHQK, tiles.keep_q
    LQ, DHQK = matQ.shape
    first = remainder(pl.program_id(1), p.L // LQ) * LQ  # of the first query, inside its chunk
    num_k = DHQK // siz_b_DHQK

    # q . n is a separate loop: if a pipelined tile feeds both a product and other arithmetic,
    # Triton gives it one buffer too few, and the copy of a later tile overwrites it under the
    # running product.
    def norm(ik):
        columns = block_at(ik, siz_b_DHQK)
        q = matQ[:, columns].astype(jnp.float32)
        return jnp.sum(q * vecN_states[columns][None, :], axis=1)

    def state(ik):
        columns = block_at(ik, siz_b_DHQK)
        return dot(matQ[:, columns], matC_states[columns, :], precision)

    num = sum_of(num_k, state, matH.shape)
    if keep_q:
        q_whole = matQ[...]
    if normaliser is None:
        z = None
    elif keep_q:
        z = jnp.sum(q_whole.astype(jnp.float32) * vecN_states[...][None, :], axis=1)
    else:
        z = sum_of(num_k, norm, (LQ,))
    w = query_scale(vecW[...], p.qk_scale)
    num, z = num * w[:, None], None if z is None else z * w
    u = [ref[...] for ref in vecU]

    def add_keys(j, carry):
        num, z = carry
        keys = block_at(j, siz_b_LKV)
        if keep_q:
            scores = dot(q_whole, matK[keys, :], precision, b_axis=1)
        else:

            def columns_of_scores(ik):
                columns = block_at(ik, siz_b_DHQK)
                return dot(matQ[:, columns], matK[keys, columns], precision, b_axis=1)

            scores = sum_of(num_k, columns_of_scores, (LQ, siz_b_LKV))
        # Masked after the product, not before, so that a NaN in k reaches no earlier step.
        D = decay_tile((ref[keys] for ref in vecE), u, None)
        mask = causal_mask(LQ, siz_b_LKV, first - j * siz_b_LKV)
        P = jnp.where(mask, scores * (D * p.qk_scale), 0.0)
        num += dot(P.astype(matV.dtype), matV[keys, :], precision)
        return num, None if z is None else z + jnp.sum(P, axis=1)

    num_keys = divide(first + LQ + siz_b_LKV - 1, siz_b_LKV)
    num, z = loop(num_keys, add_keys, (num, z))
    if normaliser is None:
        matH[...] = num.astype(matH.dtype)
        return

    den = normaliser.denominator(z, None if vecM is None else vecM[...])
    matH[...] = (num / den[:, None]).astype(matH.dtype)

    @pl.when(pl.program_id(0) == 0)
    def _():
        vecZ[...] = z


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
        operands(x, matQ="bq0", matK="bt0", matV="btv", matC_states="bc0v")
        | operands(normaliser and x, vecN_states="bc0")
        | operands(g, vecE="bt", vecU="bq", vecW="bq")
        | operands(g if normaliser and normaliser.floor_needs_m else None, vecM="bq"),
        dict(
            matH=(sequence_shape(x.matV, p.DHHV, output_dtype), "bqv"),
            vecZ=(floats(p.BNH, p.S) if normaliser else None, "bq"),
        ),
        axes="vqb",
        sizes=dict(q=LQ, v=call.tiles.siz_b_DHHV),
        indices=dict(c=lambda iv, iq, b: iq // n),
        call=call,
        normaliser=normaliser,
    )
    return Outputs(**y)


@dataclasses.dataclass(frozen=True)
class Tiles(PipelinedTiles):
    """keep_q: whether a tile's queries stay in shared memory, whole, during the loop over keys."""

    siz_b_LQ: int
    siz_b_LKV: int
    siz_b_DHQK: int
    siz_b_DHHV: int
    num_warps: int
    num_stages: int
    keep_q: bool

    def grid(self, p: Problem, **asked: Any) -> tuple[int, ...]:
        return blocks(p.DHHV, self.siz_b_DHHV), p.NC * blocks(p.L, self.siz_b_LQ), p.BNH

    def elements(self, p: Problem) -> tuple[int, int]:
        """The elements that the loop over keys reads, and those that stay."""
        LQ, LKV, depth = self.siz_b_LQ, self.siz_b_LKV, self.siz_b_DHQK
        keys = LKV * p.DHQK if self.keep_q else depth * (LKV + LQ)
        return keys + LKV * self.siz_b_DHHV, LQ * p.DHQK * self.keep_q

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, gpu: Gpu, **asked: Any) -> Self:
        """As many columns as possible, up to 256, because each block repeats the scores.

        An SM has two CTAs of 64 queries, or one of 128 where the queries take half of it.
        """
        wide, itemsize = dtype.itemsize > 2, dtype.itemsize
        depth = clamped(32 if wide else 64, p.DHQK)
        keep_q = not wide and p.DHQK <= 256 and is_power_of_two(p.DHQK)
        columns = clamped(128 if wide else 256, p.DHHV)
        low = 64, 32, min(columns, 128), 4
        sizes = [(*low, 3), (*low, 2), (64, 32, 64, 4, 2)]
        if wide or p.DHQK + p.DHHV <= 128:
            sizes = sizes[1:]
        elif columns == 256 and p.DHQK > 128 and p.L >= 128:
            sizes = [(128, 32, columns, 8, 3), (128, 32, columns, 8, 2), *sizes]
        elif columns == 256 and p.DHQK <= 128:
            sizes = [(64, 64, 256, 4, 2), *sizes]

        def fits(x):
            loops = (depth * (x.siz_b_LQ + x.siz_b_DHHV), 0), x.elements(p)
            return all(
                stages_that_fit(gpu, size * itemsize, kept * itemsize, x.num_stages, ctas_per_sm=1)
                == x.num_stages
                for size, kept in loops
            )

        candidates = [cls(*x[:2], depth, *x[2:], keep_q).clamped(p) for x in sizes]
        return next(filter(fits, candidates), candidates[-1])

    def supports(self, p: Problem, **asked: Any) -> bool:
        return not self.keep_q or is_power_of_two(p.DHQK)
