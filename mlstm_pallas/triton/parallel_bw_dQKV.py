"""parallel_bw_dQKV in Triton.

Grid (blocks of a chunk's gradients, NC, B * NH): the CTAs of one chunk run at the same time and
share operands through L2. A CTA owns siz_b_LQ steps and siz_b_DHQK columns of dq or dk, or
siz_b_DHHV columns of dv. It adds a product with the state, which it then weights, and one with the
tiles, both in loops over block_k that hold only products. For the gradients of the gates it sums
the products of q and k with their inter-chunk parts in float32. Further CTAs own
one siz_b_DHQK x siz_b_DHHV block of the states each and sum <C_c, dC_{c+1}>.

FLOPs: 6 tokens K V + tokens (L + 1) (2 K + V). Bytes: q, k, v, dh, dq, dk, dv, P, dP and both
states, (tokens (4 K + 3 V + 2 L) + 2 B NH NC K V) itemsize; the operands again for each column and
row block, mostly from L2.
"""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.gate_gradients import inner
from mlstm_pallas.formulas.normaliser import query_scale
from mlstm_pallas.formulas.tile_sizes import least_padding
from mlstm_pallas.formulas.tiles import (
    block_at,
    blocks,
    blocks_over,
    divide,
    dot,
    loop,
    product,
    remainder,
    rounded_up,
    weighted,
)
from mlstm_pallas.launches.kernel_tiles import KernelSpec
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages.parallel_bw_dQKV import Gradients, Operands
from mlstm_pallas.triton.launch import floats, kernel_call, operands, stages_that_fit
from mlstm_pallas.triton.parallel_bw_dP import BlockedTiles


def _parallel_bw_dQKV_kernel(
    matQ,  # (L, DHQK)
    matK,  # (L, DHQK)
    matV,  # (L, DHV)
    matDeltaH,  # (L, DHV)
    matC_states,  # (DHQK, DHV) before the chunk
    vecN_states,  # (DHQK,) before the chunk
    matDeltaC_states,  # (DHQK, DHV) after the chunk
    vecDeltaN_states,  # (DHQK,) after the chunk
    matP,  # (L, L)
    matDeltaP,  # (L, L)
    vecW,  # (L,), like all inputs below
    vecAbar,
    vecInvDen,  # absent without a normaliser
    vecDzDen,  # absent without a normaliser
    sizes,  # () steps of the chunk in the list; absent if all chunks are active
    matDeltaQ,  # out (L, DHQK)
    q_dot_dq_inter,  # out (column blocks, L)
    matDeltaK,  # out (L, DHQK)
    k_dot_dk_inter,  # out (column blocks, L)
    matDeltaV,  # out (L, DHV)
    inner_C_dC,  # out (blocks,)
    *,
    call,
):
    L, scale, precision, tiles = matQ.shape[0], call.problem.qk_scale, call.precision, call.tiles
    siz_b_LQ, block_k = tiles.siz_b_LQ, tiles.block_k

    index = pl.program_id(0)
    is_active: Any = True if sizes is None else sizes[...] > 0

    def run(role, start, row_blocks, column_blocks, out=None):
        """Runs a role in the CTAs from ``start`` on, one per block; returns their end.

        out: the gradient, which is 0 in an inactive chunk.
        """
        columns = blocks_over(*column_blocks)
        end = start + blocks_over(*row_blocks) * columns

        @pl.when((start <= index) & (index < end))
        def _():
            row, column = divide(index - start, columns), remainder(index - start, columns)
            at = block_at(row, row_blocks[1]), block_at(column, column_blocks[1])
            pl.when(is_active)(lambda: role(row, column, *at))
            if out is not None and sizes is not None:

                @pl.when(~is_active)
                def _():
                    out[at] = jnp.zeros((row_blocks[1], column_blocks[1]), out.dtype)

        return end

    def gradient(inter, start, column_blocks, scores, others, out, x=None, sums=None):
        """Runs the role of dq, dk or dv.

        Args:
          inter: computes the inter-chunk part.
          others: what the tiles multiply: keys for dq, otherwise queries and transposed tiles.
          x, sums: q or k, whose products with the inter-chunk part are summed; None: they are not.
        """
        step, transposed = min(block_k, siz_b_LQ), others is not matK
        to_end = transposed != call.problem.reverse  # else up to these steps

        def role(row, column, steps, columns):
            first = row * (siz_b_LQ // step) if to_end else 0

            def add(index, acc):
                block = block_at(first + index, step)
                tile = scores[block, steps] if transposed else scores[steps, block]
                return acc + dot(tile, others[block, columns], precision, a_axis=1 - transposed)

            acc = inter(steps, columns)
            if x is not None:
                products = acc * x[steps, columns].astype(jnp.float32)
                sums[column, steps] = jnp.sum(products, axis=1)
            count = L // step - first if to_end else (row + 1) * (siz_b_LQ // step)
            out[steps, columns] = loop(count, add, acc).astype(out.dtype)

        return run(role, start, (L, siz_b_LQ), column_blocks, out)

    def by_step(w, acc):
        return weighted(w[:, None], acc, call.problem)

    def dq(steps, columns):
        r = query_scale(vecW[steps], scale, None if vecInvDen is None else vecInvDen[steps])
        acc = product(matDeltaH, matC_states, steps, columns, block_k, precision, b_axis=1)
        if vecDzDen is not None:
            acc += vecDzDen[steps][:, None] * vecN_states[columns][None, :]
        return by_step(r, acc)

    def dk(steps, columns):
        acc = product(matV, matDeltaC_states, steps, columns, block_k, precision, b_axis=1)
        return by_step(vecAbar[steps], acc + vecDeltaN_states[columns][None, :])

    def dv(steps, columns):
        acc = product(matK, matDeltaC_states, steps, columns, block_k, precision)
        return by_step(vecAbar[steps], acc)

    def inner_states(row, column, rows, columns):
        C, dC = (ref[rows, columns].astype(jnp.float32) for ref in (matC_states, matDeltaC_states))
        inner_C_dC[row * blocks_over(*DHHV_blocks) + column] = jnp.sum(
            weighted(dC, C, call.problem)
        )

    DHQK_blocks, DHHV_blocks = (matQ.shape[1], tiles.siz_b_DHQK), (matV.shape[1], tiles.siz_b_DHHV)
    end = gradient(dq, 0, DHQK_blocks, matDeltaP, matK, matDeltaQ, matQ, q_dot_dq_inter)
    end = gradient(dk, end, DHQK_blocks, matDeltaP, matQ, matDeltaK, matK, k_dot_dk_inter)
    end = gradient(dv, end, DHHV_blocks, matP, matDeltaH, matDeltaV)
    run(inner_states, end, DHQK_blocks, DHHV_blocks)


def parallel_bw_dQKV(x: Operands, *, call: Launch) -> Gradients:
    """Runs the stage: ``stages/parallel_bw_dQKV.py``."""
    p, tiles = call.problem, call.tiles
    K, V = tiles.columns(p)
    inter = floats(p.BNH, K, p.S), "b0t"
    y = kernel_call(
        _parallel_bw_dQKV_kernel,
        operands(
            x,
            **dict.fromkeys(("matQ", "matK"), "btK"),
            **dict.fromkeys(("matV", "matDeltaH"), "btV"),
            matC_states="bcKV",
            vecN_states="bcK",
            matDeltaC_states="bcKV",
            vecDeltaN_states="bcK",
        )
        | operands(x.scores, matP="bt0", matDeltaP="bt0")
        | operands(x.gates.per_step(), vecW="bt", vecAbar="bt")
        | operands(x.normaliser_gradients, vecInvDen="bt", vecDzDen="bt")
        | operands(x.active and x.active.entries, sizes="bc"),
        dict(
            matDeltaQ=(x.matQ, "btK"),
            q_dot_dq_inter=inter,
            matDeltaK=(x.matK, "btK"),
            k_dot_dk_inter=inter,
            matDeltaV=(x.matV, "btV"),
            inner_C_dC=(floats(p.BNH, p.NC, K * V), "bc0"),
        ),
        sizes=dict(
            K=rounded_up(p.DHQK, tiles.siz_b_DHQK, tiles.block_k),
            V=rounded_up(p.DHV, tiles.siz_b_DHHV, tiles.block_k),
        ),
        call=call,
    )
    states = y.pop("inner_C_dC").sum(-1) + inner(x.vecDeltaN_states, x.vecN_states)
    y["pass_through"] = weighted(x.gates.scaGamma, states)
    for name in ("q_dot_dq_inter", "k_dot_dk_inter"):
        y[name] = y[name].sum(1)
    return Gradients(**y)


@dataclasses.dataclass(frozen=True)
class ParallelBwDQKVTiles(BlockedTiles):
    """siz_b_LQ: steps of a block of gradients, which are queries in dq and keys in dk and dv."""

    siz_b_LQ: int
    siz_b_DHQK: int
    siz_b_DHHV: int
    block_k: int
    num_warps: int
    num_stages: int

    def columns(self, p: Problem) -> tuple[int, int]:
        """The column blocks of dq and dk, and of dv."""
        return blocks_over(p.DHQK, self.siz_b_DHQK), blocks_over(p.DHV, self.siz_b_DHHV)

    def grid(self, p: Problem) -> tuple[int, ...]:
        K, V = self.columns(p)
        return blocks(p.L, self.siz_b_LQ) * (2 * K + V) + K * V, p.NC, p.BNH

    def elements(self, p: Problem) -> tuple[int, int]:
        return self.block_k * (self.siz_b_LQ + max(self.siz_b_DHQK, self.siz_b_DHHV)), 0

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, kernel: KernelSpec) -> Self:
        """Blocks of 128 x 128, or of 64 x 64 in float32 and for short chunks."""
        wide = dtype.itemsize > 2
        size = 64 if wide or p.L < 128 else 128
        depth = least_padding(32 if wide or p.DHQK <= 64 else 64, p.DHQK, p.DHV, overhead=16)
        K, V = least_padding(size, p.DHQK), least_padding(size, p.DHV)
        tiles = cls(size, K, V, depth, 4, 3).clamped(p).fitted(p, dtype, kernel.gpu)
        stages = tiles.num_stages
        if wide:
            stages = max(stages_that_fit(kernel.gpu, tiles.elements(p)[0] * dtype.itemsize), 1)
        elif size == tiles.block_k == 64:
            stages = 2  # for seven CTAs per SM
        return dataclasses.replace(tiles, num_stages=stages)
