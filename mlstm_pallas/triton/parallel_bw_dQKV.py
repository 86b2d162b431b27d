"""parallel_bw_dQKV in Triton.

Grid (blocks of a chunk's gradients, NC, B * NH): the CTAs of one chunk run at the same time and
share operands through L2. A CTA owns siz_b_LQ steps and siz_b_DHQK columns of dq or dk, or
siz_b_DHHV columns of dv. It adds a product with the state, which it then weights, and one with the
tiles, both in loops of block_k that hold products alone. For the gradients of the gates it sums
the products of q and k with their inter-chunk parts in float32. More CTAs own a
siz_b_DHQK x siz_b_DHHV block of the states each and sum <C_c, dC_{c+1}>.

FLOPs: 6 R K V + R (L + 1) (2 K + V). Bytes: q, k, v, dh, dq, dk, dv, P, dP and both states,
(R (4 K + 3 V + 2 L) + 2 B NH NC K V) itemsize; the operands again for each column and row block,
mostly from L2.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.gate_gradients import inner
from mlstm_pallas.gpu import Gpu
from mlstm_pallas.normaliser import query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Launch, sequence_shape
from mlstm_pallas.stages.parallel_bw_dQKV import Gradients, Operands
from mlstm_pallas.tiles import Precision, block_at, blocks, divide, dot, loop, remainder, sum_of
from mlstm_pallas.triton.launch import (
    depth_and_stages,
    kernel_call,
    sequence_spec,
    stages_that_fit,
)
from mlstm_pallas.triton.parallel_bw_dP import BlockedTiles


def _parallel_bw_dQKV_kernel(
    q_ref: Any,  # (L, DHQK)
    k_ref: Any,  # (L, DHQK)
    v_ref: Any,  # (L, DHHV)
    dh_ref: Any,  # (L, DHHV)
    C_ref: Any,  # (DHQK, DHHV) before the chunk
    n_ref: Any,  # (DHQK,) before the chunk, absent without a normaliser
    dC_ref: Any,  # (DHQK, DHHV) after the chunk
    dn_ref: Any,  # (DHQK,) after the chunk
    P_ref: Any,  # (L, L)
    dP_ref: Any,  # (L, L)
    w_ref: Any,  # (L,), as all that follow
    abar_ref: Any,
    inv_den_ref: Any,  # absent without a normaliser
    dz_den_ref: Any,  # likewise
    dq_ref: Any,  # out (L, DHQK)
    q_inter_ref: Any,  # out (column blocks, L)
    dk_ref: Any,  # out (L, DHQK)
    k_inter_ref: Any,  # out (column blocks, L)
    dv_ref: Any,  # out (L, DHHV)
    states_ref: Any,  # out (blocks,)
    *,
    scale: float,
    siz_b_LQ: int,
    siz_b_DHQK: int,
    siz_b_DHHV: int,
    block_k: int,
    precision: Precision,
) -> None:
    L = q_ref.shape[0]

    def times_state(
        steps: Any, columns: Any, a_ref: Any, X_ref: Any, size: int, *, transposed: bool
    ) -> jax.Array:
        step = min(block_k, a_ref.shape[1])

        def product(x: jax.Array) -> jax.Array:
            rows = block_at(x, step)
            X = X_ref[columns, rows] if transposed else X_ref[rows, columns]
            return dot(a_ref[steps, block_at(x, step)], X, precision, b_axis=1 if transposed else 0)

        return sum_of(a_ref.shape[1] // step, product, (siz_b_LQ, size))

    def plus_tiles(
        acc: jax.Array,
        row: jax.Array,
        columns: Any,
        tile_ref: Any,
        operand_ref: Any,
        *,
        transposed: bool,
    ) -> jax.Array:
        """Adds the tiles times the keys of a row of queries, or transposed, for a row of keys."""
        step, steps = min(block_k, siz_b_LQ), block_at(row, siz_b_LQ)
        first = row * (siz_b_LQ // step) if transposed else 0

        def add(x: jax.Array, acc: jax.Array) -> jax.Array:
            others = block_at(first + x, step)
            tile = tile_ref[others, steps] if transposed else tile_ref[steps, others]
            operand, a_axis = operand_ref[others, columns], 0 if transposed else 1
            return acc + dot(tile, operand, precision, a_axis=a_axis)

        return loop(L // step - first if transposed else (row + 1) * (siz_b_LQ // step), add, acc)

    def dq(row: jax.Array, column: jax.Array, steps: Any, columns: Any) -> None:
        r = query_scale(w_ref[steps], scale, None if inv_den_ref is None else inv_den_ref[steps])
        acc = times_state(steps, columns, dh_ref, C_ref, siz_b_DHQK, transposed=True) * r[:, None]
        if n_ref is not None:
            acc += (r * dz_den_ref[steps])[:, None] * n_ref[columns][None, :]
        q = q_ref[steps, columns].astype(jnp.float32)
        q_inter_ref[column, steps] = jnp.sum(acc * q, axis=1)
        acc = plus_tiles(acc, row, columns, dP_ref, k_ref, transposed=False)
        dq_ref[steps, columns] = acc.astype(dq_ref.dtype)

    def dk(row: jax.Array, column: jax.Array, steps: Any, columns: Any) -> None:
        acc = times_state(steps, columns, v_ref, dC_ref, siz_b_DHQK, transposed=True)
        acc = (acc + dn_ref[columns][None, :]) * abar_ref[steps][:, None]
        k = k_ref[steps, columns].astype(jnp.float32)
        k_inter_ref[column, steps] = jnp.sum(acc * k, axis=1)
        acc = plus_tiles(acc, row, columns, dP_ref, q_ref, transposed=True)
        dk_ref[steps, columns] = acc.astype(dk_ref.dtype)

    def dv(row: jax.Array, column: jax.Array, steps: Any, columns: Any) -> None:
        acc = times_state(steps, columns, k_ref, dC_ref, siz_b_DHHV, transposed=False)
        acc *= abar_ref[steps][:, None]
        acc = plus_tiles(acc, row, columns, P_ref, dh_ref, transposed=True)
        dv_ref[steps, columns] = acc.astype(dv_ref.dtype)

    def states(row: jax.Array, column: jax.Array, rows: Any, columns: Any) -> None:
        C, dC = C_ref[rows, columns].astype(jnp.float32), dC_ref[rows, columns].astype(jnp.float32)
        states_ref[row * blocks(C_ref.shape[1], siz_b_DHHV) + column] = jnp.sum(C * dC)

    start, index = 0, pl.program_id(0)
    of_L, of_DHQK = (L, siz_b_LQ), (q_ref.shape[1], siz_b_DHQK)
    of_DHHV = v_ref.shape[1], siz_b_DHHV
    for role, of_rows, of_columns in (
        (dq, of_L, of_DHQK),
        (dk, of_L, of_DHQK),
        (dv, of_L, of_DHHV),
        (states, of_DHQK, of_DHHV),
    ):
        columns = blocks(*of_columns)
        end = start + blocks(*of_rows) * columns

        @pl.when((start <= index) & (index < end))
        def _(
            role: Callable[..., None] = role,
            start: int = start,
            columns: int = columns,
            height: int = of_rows[1],
            width: int = of_columns[1],
        ) -> None:
            row, column = divide(index - start, columns), remainder(index - start, columns)
            role(row, column, block_at(row, height), block_at(column, width))

        start = end


def parallel_bw_dQKV(x: Operands, *, call: Launch) -> Gradients:
    """Runs the stage: ``stages/parallel_bw_dQKV.py``."""
    p, LQ, BK, BV = call.problem, call.tiles.siz_b_LQ, call.tiles.siz_b_DHQK, call.tiles.siz_b_DHHV
    gradients, n = x.normaliser_gradients, x.vecN_states
    normalise = gradients.vecInvDen is not None
    tile = pl.BlockSpec((None, p.L, p.L), lambda x, c, b: (b, c, 0))
    q, k, v, dh = (sequence_spec(y, p, p.L, y.shape[-1], lambda i, c, b: (b, c, 0)) for y in x[:4])
    state = pl.BlockSpec((None, None, p.DHQK, p.DHHV), lambda x, c, b: (b, c, 0, 0))
    norm = pl.BlockSpec((None, None, p.DHQK), lambda x, c, b: (b, c, 0))
    vector = pl.BlockSpec((None, p.L), lambda x, c, b: (b, c))
    blocks_of_DHQK, blocks_of_DHHV = blocks(p.DHQK, BK), blocks(p.DHHV, BV)
    inter = (
        pl.BlockSpec((None, blocks_of_DHQK, p.L), lambda x, c, b: (b, 0, c)),
        jax.ShapeDtypeStruct((p.BNH, blocks_of_DHQK, p.S), jnp.float32),
    )
    blocks_of_state = blocks_of_DHQK * blocks_of_DHHV
    states = (
        pl.BlockSpec((None, None, blocks_of_state), lambda x, c, b: (b, c, 0)),
        jax.ShapeDtypeStruct((p.BNH, p.NC, blocks_of_state), jnp.float32),
    )
    dq, dk, dv = (sequence_shape(y, y.shape[-1], y.dtype) for y in x[:3])
    outputs = [(q, dq), inter, (k, dk), inter, (v, dv), states]
    g = x.gates.per_step()
    dQ, q_inter, dK, k_inter, dV, states_inner = kernel_call(
        _parallel_bw_dQKV_kernel,
        name="parallel_bw_dQKV",
        grid=call.tiles.grid(p),
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
        block_k=call.tiles.block_k,
        precision=call.precision,
    )(
        *x[:4],
        *(x.matC_states, n if normalise else None, x.matDeltaC_states, x.vecDeltaN_states),
        *(
            x.scores.matP,
            x.scores.matDeltaP,
            g.vecW,
            g.vecAbar,
            gradients.vecInvDen,
            gradients.vecDzDen,
        ),
    )
    through = x.gates.scaGamma * (states_inner.sum(-1) + inner(n, x.vecDeltaN_states))
    return Gradients(dQ, dK, dV, q_inter.sum(1), k_inter.sum(1), through)


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
        """Blocks of 128 x 128; of 64 x 64 in float32 and where chunks are short."""
        wide = dtype.itemsize > 2
        size = 64 if wide or p.L < 128 else 128
        tiles = cls(size, size, size, 32 if wide or p.DHQK == 64 else 64, 4, 3).clamped(p)
        rows = tiles.siz_b_LQ + max(tiles.siz_b_DHQK, tiles.siz_b_DHHV)
        depth, stages = depth_and_stages(gpu, rows, tiles.block_k, dtype)
        if wide:
            stages = max(stages_that_fit(gpu, depth * rows * dtype.itemsize), 1)
        elif size == depth == 64:
            stages = 2  # for seven CTAs per SM
        return dataclasses.replace(tiles, block_k=depth, num_stages=stages)
