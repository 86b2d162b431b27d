"""parallel_bw_dP in Triton; XLA computes delta, in a pass over h and dh.

Grid (CTAs of a chunk, NC, B * NH). With T = siz_b_LQ a chunk has n = L / T tiles of queries. Of its
CTAs n (n + 1) / 2 own a T x T tile of P and dP each, and read block_k columns of q, k, v and dh
at a time. They sum W_ts = dP_ts scale q_t . k_s over the queries and over the keys of their tile,
for the gradients of the gates. n more CTAs scale T queries and keys each, and sum what these steps
add to dn.

FLOPs: R (L + 1) (K + V). Bytes: q, k, v, dh, h, qbar, kbar, P and dP,
R (4 K + 3 V + 2 L) itemsize.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.gate_gradients import TileSums
from mlstm_pallas.gpu import Gpu
from mlstm_pallas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.problem import MAX_TILE, Problem
from mlstm_pallas.stage import Launch, ScaledRows, clamped
from mlstm_pallas.stages.parallel_bw_dP import Operands, ScoreGradients, normaliser_gradients
from mlstm_pallas.tiles import (
    Precision,
    block_at,
    blocks,
    causal_mask,
    decay_tile,
    divide,
    dot,
    loop,
    sum_of,
)
from mlstm_pallas.triton.launch import (
    PipelinedTiles,
    depth_and_stages,
    kernel_call,
    masked_store,
    sequence_spec,
)


def _parallel_bw_dP_kernel(
    q_ref: Any,  # (L, DHQK)
    k_ref: Any,  # (L, DHQK)
    v_ref: Any,  # (L, DHHV)
    dh_ref: Any,  # (L, DHHV)
    e_hi_ref: Any,  # (L,), as all that follow
    e_lo_ref: Any,
    u_hi_ref: Any,
    u_lo_ref: Any,
    w_ref: Any,
    abar_ref: Any,
    inv_den_ref: Any,  # absent without a normaliser
    dz_den_ref: Any,  # likewise
    P_ref: Any,  # out (L, L)
    dP_ref: Any,  # out (L, L)
    qbar_ref: Any,  # out (L, DHQK)
    per_query_ref: Any,  # out (n, L) sum of W_ts over s < t in each tile of keys
    per_key_ref: Any,  # out (n, L) sum of W_ts over t > s in each tile of queries
    diagonal_ref: Any,  # out (L,) W_tt
    *more_refs: Any,  # out: with scale_keys kbar (L, DHQK); with a normaliser dn_added (n, DHQK)
    T: int,
    scale_keys: bool,
    scale: float,
    block_k: int,
    precision: Precision,
) -> None:
    (L, DHQK), DHHV = q_ref.shape, v_ref.shape[1]
    more = iter(more_refs)
    kbar_ref: Any = next(more) if scale_keys else None
    dn_added_ref: Any = next(more, None)
    n = L // T
    index, num_tiles = pl.program_id(0), n * (n + 1) // 2
    # Tiles are numbered by queries; tile i of queries has i + 1 tiles of keys.
    i: Any = sum(((index >= m * (m + 1) // 2).astype(jnp.int32) for m in range(1, n)), np.int32(0))
    j = index - divide(i * (i + 1), 2)
    step_k, step_v = min(block_k, DHQK), min(block_k, DHHV)

    @pl.when(index < num_tiles)
    def _tile() -> None:
        queries, keys = block_at(i, T), block_at(j, T)

        def product(rows_ref: Any, columns_ref: Any, step: int) -> jax.Array:
            def add(x: jax.Array) -> jax.Array:
                rows = rows_ref[queries, block_at(x, step)]
                return dot(rows, columns_ref[keys, block_at(x, step)], precision, b_axis=1)

            return sum_of(rows_ref.shape[1] // step, add, (T, T))

        dA = product(dh_ref, v_ref, step_v)
        scores = product(q_ref, k_ref, step_k) * scale
        offset = (i - j) * T
        e, u = (e_hi_ref[keys], e_lo_ref[keys]), (u_hi_ref[queries], u_lo_ref[queries])
        D = decay_tile(*e, *u, causal_mask(T, T, offset))
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

        # Every tile computes this sum: a branch that reads W would take fifty registers.
        masked_store(
            diagonal_ref.at[queries],
            jnp.sum(jnp.where(strict, 0.0, W), axis=1),
            jnp.full((T,), i == j),
        )

        whole = max(MAX_TILE // T, 1)  # tiles on a side of a block

        def above(x: jax.Array, _: tuple[()]) -> tuple[()]:
            zeros = jnp.zeros((T, T), P_ref.dtype)
            P_ref[queries, block_at(x, T)] = zeros
            dP_ref[queries, block_at(x, T)] = zeros
            return _

        if whole > 1 and n > 1:
            end = lax.min(divide(i, whole) * whole + whole, np.int32(n))
            lax.fori_loop(j + 1, jnp.where(i == j, end, j + 1), above, ())

    @pl.when(index >= num_tiles)
    def _scaled_operands() -> None:
        tile = index - num_tiles
        steps = block_at(tile, T)
        abar, w = abar_ref[steps][:, None], w_ref[steps]
        r = query_scale(w, scale, None if inv_den_ref is None else inv_den_ref[steps])
        dz_den = None if dz_den_ref is None else dz_den_ref[steps][:, None]

        def scaled(x: jax.Array, _: tuple[()]) -> tuple[()]:
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
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    return_keys: bool = True,
    call: Launch,
) -> ScoreGradients:
    """Runs the stage: ``stages/parallel_bw_dP.py``."""
    gradients = normaliser_gradients(normaliser, x)
    p, T = call.problem, call.tiles.siz_b_LQ
    n = blocks(p.L, T)
    vector = pl.BlockSpec((None, p.L), lambda x, c, b: (b, c))
    normalise = gradients.vecInvDen is not None
    q, k, v, dh = (sequence_spec(y, p, p.L, y.shape[-1], lambda i, c, b: (b, c, 0)) for y in x[:4])
    tile = (
        pl.BlockSpec((None, p.L, p.L), lambda x, c, b: (b, c, 0)),
        jax.ShapeDtypeStruct((p.BNH, p.S, p.L), x.matQ.dtype),
    )
    operand = (
        pl.BlockSpec((None, p.L, p.DHQK), lambda x, c, b: (b, c, 0)),
        # With the caller's steps: XLA gives it the memory of a gradient.
        jax.ShapeDtypeStruct((p.BNH, x.matQ.shape[1], p.DHQK), x.matQ.dtype),
    )
    sums = (
        pl.BlockSpec((None, n, p.L), lambda x, c, b: (b, 0, c)),
        jax.ShapeDtypeStruct((p.BNH, n, p.S), jnp.float32),
    )
    norm = (
        pl.BlockSpec((None, n, p.DHQK), lambda x, c, b: (b, c, 0)),
        jax.ShapeDtypeStruct((p.BNH, p.NC * n, p.DHQK), jnp.float32),
    )
    outputs = [
        tile,
        tile,
        operand,
        sums,
        sums,
        (vector, jax.ShapeDtypeStruct((p.BNH, p.S), jnp.float32)),
    ]
    outputs += [operand] * return_keys + [norm] * normalise
    g = x.gates.per_step()
    P, dP, qbar, per_query, per_key, diagonal, *more = kernel_call(
        _parallel_bw_dP_kernel,
        name="parallel_bw_dP",
        grid=call.tiles.grid(p),
        in_specs=[q, k, v, dh, *[vector] * 6, *[vector if normalise else None] * 2],
        out_specs=[spec for spec, _ in outputs],
        out_shape=[shape for _, shape in outputs],
        call=call,
        T=T,
        scale_keys=return_keys,
        scale=p.qk_scale,
        block_k=call.tiles.block_k,
        precision=call.precision,
    )(
        *x[:4],
        *g.vecE,
        *g.vecU,
        g.vecW,
        g.vecAbar,
        gradients.vecInvDen,
        gradients.vecDzDen,
    )
    keys = ScaledRows(more.pop(0), None) if return_keys else None
    dn_added = jnp.sum(more.pop().reshape(p.BNH, p.NC, n, p.DHQK), axis=2) if normalise else None
    shape = p.BNH, n, p.NC, n, T
    pairs = TileSums(
        per_query.reshape(shape), per_key.reshape(shape), diagonal.reshape(p.BNH, p.NC, n, T)
    )
    return ScoreGradients(P, dP, ScaledRows(qbar, None), keys, pairs, gradients, dn_added)


class BlockedTiles(PipelinedTiles):
    """Tiles with a block_k: columns that an iteration reads, along either head dimension."""

    def clamped(self, p: Problem) -> Self:
        """With the queries clamped to a tile of ``Problem.T`` steps too."""
        x: Any = super().clamped(p)
        block_k = min(clamped(x.block_k, p.DHQK), clamped(x.block_k, p.DHHV))
        result: Self = dataclasses.replace(x, siz_b_LQ=min(x.siz_b_LQ, p.T), block_k=block_k)
        return result


@dataclasses.dataclass(frozen=True)
class Tiles(BlockedTiles):
    siz_b_LQ: int
    block_k: int
    num_warps: int
    num_stages: int

    def grid(self, p: Problem, **asked: Any) -> tuple[int, ...]:
        n = blocks(p.L, self.siz_b_LQ)
        return n * (n + 1) // 2 + n, p.NC, p.BNH

    def elements(self, p: Problem) -> tuple[int, int]:
        return 2 * self.siz_b_LQ * self.block_k, 0

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, gpu: Gpu, **asked: Any) -> Self:
        """Tiles of 64 x 64: P, dP and their gradients take a third of the registers of an SM."""
        tiles = cls(64, 32 if dtype.itemsize > 2 else 128, 4, 3).clamped(p)
        narrow = p.DHQK + p.DHHV <= 128  # for as many iterations as stages
        depth = min(tiles.block_k, 32) if narrow else tiles.block_k
        depth, stages = depth_and_stages(gpu, 2 * tiles.siz_b_LQ, depth, dtype)
        return dataclasses.replace(tiles, block_k=depth, num_stages=stages)
