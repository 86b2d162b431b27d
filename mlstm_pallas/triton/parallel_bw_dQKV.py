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

from mlstm_pallas.gate_gradients import inner
from mlstm_pallas.gpu import Gpu
from mlstm_pallas.normaliser import query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Launch
from mlstm_pallas.stages.parallel_bw_dQKV import Gradients, Operands
from mlstm_pallas.tiles import block_at, blocks, divide, dot, loop, remainder, sum_of
from mlstm_pallas.triton.launch import floats, kernel_call, stages_that_fit
from mlstm_pallas.triton.parallel_bw_dP import BlockedTiles


def _parallel_bw_dQKV_kernel(
    q_gmem,  # (L, DHQK)
    k_gmem,  # (L, DHQK)
    v_gmem,  # (L, DHHV)
    dh_gmem,  # (L, DHHV)
    C_gmem,  # (DHQK, DHHV) before the chunk
    n_gmem,  # (DHQK,) before the chunk, absent without a normaliser
    dC_gmem,  # (DHQK, DHHV) after the chunk
    dn_gmem,  # (DHQK,) after the chunk
    P_gmem,  # (L, L)
    dP_gmem,  # (L, L)
    w_gmem,  # (L,), like all inputs below
    abar_gmem,
    inv_den_gmem,  # absent without a normaliser
    dz_den_gmem,  # absent without a normaliser
    dq_gmem,  # out (L, DHQK)
    q_inter_gmem,  # out (column blocks, L)
    dk_gmem,  # out (L, DHQK)
    k_inter_gmem,  # out (column blocks, L)
    dv_gmem,  # out (L, DHHV)
    states_gmem,  # out (blocks,)
    *,
    call,
):
    L, scale, precision, tiles = q_gmem.shape[0], call.problem.qk_scale, call.precision, call.tiles
    siz_b_LQ, siz_b_DHQK, siz_b_DHHV = tiles.siz_b_LQ, tiles.siz_b_DHQK, tiles.siz_b_DHHV

    def times_state(steps, columns, a_gmem, X_gmem, size, *, transposed):
        def product(x):
            rows = block_at(x, tiles.block_k)
            X = X_gmem[columns, rows] if transposed else X_gmem[rows, columns]
            a = a_gmem[steps, block_at(x, tiles.block_k)]
            return dot(a, X, precision, b_axis=int(transposed))

        return sum_of(a_gmem.shape[1] // tiles.block_k, product, (siz_b_LQ, size))

    def plus_tiles(acc, row, columns, tile_gmem, operand_gmem, *, transposed):
        """Adds the tiles times the keys for a row of queries, or transposed for a row of keys."""
        step, steps = min(tiles.block_k, siz_b_LQ), block_at(row, siz_b_LQ)
        first = row * (siz_b_LQ // step) if transposed else 0

        def add(x, acc):
            others = block_at(first + x, step)
            tile = tile_gmem[others, steps] if transposed else tile_gmem[steps, others]
            operand, a_axis = operand_gmem[others, columns], 0 if transposed else 1
            return acc + dot(tile, operand, precision, a_axis=a_axis)

        return loop(L // step - first if transposed else (row + 1) * (siz_b_LQ // step), add, acc)

    def dq(row, column, steps, columns):
        r = query_scale(w_gmem[steps], scale, None if inv_den_gmem is None else inv_den_gmem[steps])
        acc = times_state(steps, columns, dh_gmem, C_gmem, siz_b_DHQK, transposed=True) * r[:, None]
        if n_gmem is not None:
            acc += (r * dz_den_gmem[steps])[:, None] * n_gmem[columns][None, :]
        q = q_gmem[steps, columns].astype(jnp.float32)
        q_inter_gmem[column, steps] = jnp.sum(acc * q, axis=1)
        acc = plus_tiles(acc, row, columns, dP_gmem, k_gmem, transposed=False)
        dq_gmem[steps, columns] = acc.astype(dq_gmem.dtype)

    def dk(row, column, steps, columns):
        acc = times_state(steps, columns, v_gmem, dC_gmem, siz_b_DHQK, transposed=True)
        acc = (acc + dn_gmem[columns][None, :]) * abar_gmem[steps][:, None]
        k = k_gmem[steps, columns].astype(jnp.float32)
        k_inter_gmem[column, steps] = jnp.sum(acc * k, axis=1)
        acc = plus_tiles(acc, row, columns, dP_gmem, q_gmem, transposed=True)
        dk_gmem[steps, columns] = acc.astype(dk_gmem.dtype)

    def dv(row, column, steps, columns):
        acc = times_state(steps, columns, k_gmem, dC_gmem, siz_b_DHHV, transposed=False)
        acc *= abar_gmem[steps][:, None]
        acc = plus_tiles(acc, row, columns, P_gmem, dh_gmem, transposed=True)
        dv_gmem[steps, columns] = acc.astype(dv_gmem.dtype)

    def states(row, column, rows, columns):
        C, dC = (ref[rows, columns].astype(jnp.float32) for ref in (C_gmem, dC_gmem))
        states_gmem[row * blocks(C_gmem.shape[1], siz_b_DHHV) + column] = jnp.sum(C * dC)

    index = pl.program_id(0)

    def run(role, start, of_rows, of_columns):
        """Runs a role in the CTAs from ``start`` on, one per block; returns their end."""
        columns = blocks(*of_columns)
        end = start + blocks(*of_rows) * columns

        @pl.when((start <= index) & (index < end))
        def _():
            row, column = divide(index - start, columns), remainder(index - start, columns)
            role(row, column, block_at(row, of_rows[1]), block_at(column, of_columns[1]))

        return end

    of_L, of_DHQK = (L, siz_b_LQ), (q_gmem.shape[1], siz_b_DHQK)
    of_DHHV = v_gmem.shape[1], siz_b_DHHV
    end = run(dq, 0, of_L, of_DHQK)
    end = run(dk, end, of_L, of_DHQK)
    end = run(dv, end, of_L, of_DHHV)
    run(states, end, of_DHQK, of_DHHV)


def parallel_bw_dQKV(x: Operands, *, call: Launch) -> Gradients:
    """Runs the stage: ``stages/parallel_bw_dQKV.py``."""
    p, g, gradients, n = call.problem, x.gates.per_step(), x.normaliser_gradients, x.vecN_states
    K, V = blocks(p.DHQK, call.tiles.siz_b_DHQK), blocks(p.DHHV, call.tiles.siz_b_DHHV)
    inter = floats(p.BNH, K, p.S), "b0t"
    y = kernel_call(
        _parallel_bw_dQKV_kernel,
        dict(
            q=(x.matQ, "bt0"),
            k=(x.matK, "bt0"),
            v=(x.matV, "bt0"),
            dh=(x.matDeltaH, "bt0"),
            C=(x.matC_states, "bc00"),
            n=(None if gradients.vecInvDen is None else n, "bc0"),
            dC=(x.matDeltaC_states, "bc00"),
            dn=(x.vecDeltaN_states, "bc0"),
            P=(x.scores.matP, "bt0"),
            dP=(x.scores.matDeltaP, "bt0"),
            w=(g.vecW, "bt"),
            abar=(g.vecAbar, "bt"),
            inv_den=(gradients.vecInvDen, "bt"),
            dz_den=(gradients.vecDzDen, "bt"),
        ),
        dict(
            dq=(x.matQ, "bt0"),
            q_inter=inter,
            dk=(x.matK, "bt0"),
            k_inter=inter,
            dv=(x.matV, "bt0"),
            states=(floats(p.BNH, p.NC, K * V), "bc0"),
        ),
        call=call,
    )
    through = x.gates.scaGamma * (y["states"].sum(-1) + inner(n, x.vecDeltaN_states))
    q_inter, k_inter = y["q_inter"].sum(1), y["k_inter"].sum(1)
    return Gradients(y["dq"], y["dk"], y["dv"], q_inter, k_inter, through)


@dataclasses.dataclass(frozen=True)
class Tiles(BlockedTiles):
    siz_b_LQ: int
    siz_b_DHQK: int
    siz_b_DHHV: int
    block_k: int
    num_warps: int
    num_stages: int

    def grid(self, p: Problem, **asked: Any) -> tuple[int, ...]:
        K, V = blocks(p.DHQK, self.siz_b_DHQK), blocks(p.DHHV, self.siz_b_DHHV)
        return blocks(p.L, self.siz_b_LQ) * (2 * K + V) + K * V, p.NC, p.BNH

    def elements(self, p: Problem) -> tuple[int, int]:
        return self.block_k * (self.siz_b_LQ + max(self.siz_b_DHQK, self.siz_b_DHHV)), 0

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, gpu: Gpu, **asked: Any) -> Self:
        """Blocks of 128 x 128, or of 64 x 64 in float32 and for short chunks."""
        wide = dtype.itemsize > 2
        size = 64 if wide or p.L < 128 else 128
        depth = 32 if wide or p.DHQK == 64 else 64
        tiles = cls(size, size, size, depth, 4, 3).clamped(p).fitted(p, dtype, gpu)
        stages = tiles.num_stages
        if wide:
            stages = max(stages_that_fit(gpu, tiles.elements(p)[0] * dtype.itemsize), 1)
        elif size == tiles.block_k == 64:
            stages = 2  # for seven CTAs per SM
        return dataclasses.replace(tiles, num_stages=stages)
