"""parallel_fw_H on Mosaic GPU: the outputs of ``stages/parallel_fw_H.py``.

Grid (B * NH * NC * L / siz_b_LQ * DHHV / siz_b_DHHV). A CTA owns siz_b_LQ queries of a chunk and
siz_b_DHHV columns of h; each of its warpgroups has 64 of the queries. The state of the chunk comes
first, 64 rows at a time, then the keys and the values up to the queries, 64 steps at a time. P
stays in registers. Keys have a ring of num_stages slots, rows of the state and values another one.
h leaves through the shared memory of the queries.

FLOPs: 2 R K V + R (L + 1) (K + V), q.k again for each column block. Bytes: q, k, v, h and C,
(R (2 K + 2 V) + B NH NC K V) itemsize, with repeats from the L2.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.gpu import Gpu
from mlstm_pallas.mosaic_gpu import products
from mlstm_pallas.mosaic_gpu.copy_ring import CopyRing, ring_barriers
from mlstm_pallas.mosaic_gpu.fragments import (
    across_columns,
    across_rows,
    decay_tile,
    load_by_rows,
    rows_and_columns,
)
from mlstm_pallas.mosaic_gpu.launch import (
    BY_COLUMNS,
    BY_ROWS,
    REGISTER_ROWS,
    block,
    float32,
    load,
    mosaic_call,
    plgpu,
    shared_bytes,
    shared_tiles,
)
from mlstm_pallas.mosaic_gpu.limits import KERNEL_DTYPE, HopperTiles
from mlstm_pallas.mosaic_gpu.tile_copies import copy_in, copy_out, head_of
from mlstm_pallas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Launch, sequence_shape
from mlstm_pallas.stages.parallel_fw_H import Operands, Outputs
from mlstm_pallas.tiles import blocks, divide, loop, remainder

R = REGISTER_ROWS
FEW_CTAS = 528  # four an SM of an H200
SM_BYTES = 233_472  # shared memory of an SM; each CTA takes 1 KiB more


class _Refs(NamedTuple):
    q: Any  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    k: Any
    v: Any  # (B * NH, S, DHHV), or likewise
    C: Any  # (B * NH, NC, DHQK, DHHV)
    n: Any  # (B * NH, NC, DHQK), absent without a normaliser
    e_hi: Any  # (B * NH, S), as all that follow
    e_lo: Any
    u_hi: Any
    u_lo: Any
    w: Any
    m: Any  # absent where the floor does not need it
    h: Any  # out, like v
    z: Any  # out (B * NH, S), absent without a normaliser
    q_tiles: Any  # shared (warpgroups, DHQK / 64, 64, 64)
    k_tiles: Any  # shared (num_stages, parts, 64, columns)
    v_tiles: Any  # shared (num_stages, 64, siz_b_DHHV): of the state, then of v
    q_full: Any  # a barrier a warpgroup
    k_barriers: Any
    v_barriers: Any


@dataclasses.dataclass(frozen=True)
class _Queries:
    """64 queries, as their warpgroup sees them."""

    refs: _Refs
    p: Problem
    columns: int  # of h
    normaliser: Normaliser | None
    k_ring: CopyRing
    v_ring: CopyRing
    wg: jax.Array
    head: jax.Array
    chunk: jax.Array
    tile: jax.Array  # which 64 of the chunk

    @property
    def steps_k(self):
        """Steps of the products with the state."""
        return self.p.DHQK // R

    def steps(self, tile):
        return block(self.chunk * (self.p.L // R) + tile, R)

    def inter(self, accumulator):
        """q C."""
        ring, refs = self.v_ring, self.refs
        pending = 0 if ring.num_slots == 1 else 1

        def free(step):
            ring.release(step)
            ring.refill(step)

        def add(x, carry):
            slot = ring.wait(x)
            products.add(accumulator, refs.q_tiles.at[self.wg, x], refs.v_tiles.at[slot])
            products.wait(pending)
            if pending:
                pl.when(x > 0)(lambda: free(x - 1))
            else:
                free(x)

        loop(self.steps_k, add, None)
        products.wait(0)
        if pending:
            free(np.int32(self.steps_k - 1))

    def n_products(self):
        """n . q_t."""
        refs = self.refs

        def add(x, total):
            q = load(refs.q_tiles.at[self.wg, x]).astype(jnp.float32)
            n = load(refs.n.at[self.head, self.chunk, block(x, R)], BY_COLUMNS, optimized=False)
            return total + q * across_rows(n)

        total = loop(self.steps_k, add, products.zeros(R, R))
        return products.sum_over_columns(total)

    def scores(self, slot, accumulator):
        """q k^T."""
        q, k = self.refs.q_tiles.at[self.wg], self.refs.k_tiles.at[slot]
        parts = self.refs.k_tiles.shape[1]

        def add(x, carry):
            products.add(accumulator, q.at[x], k.at[x].T)

        if parts > 1:  # unrolled, eight products spill
            loop(parts, add, None)
            return
        for x in range(self.steps_k):
            products.add(accumulator, q.at[x], k.at[0, :, x * R : (x + 1) * R].T)

    def intra(self, u, j, carry):
        """Adds a tile of keys and values; carry: the numerators and the sums of P."""
        refs, k_ring, v_ring = self.refs, self.k_ring, self.v_ring
        num, z = carry
        keys = self.steps(j)
        e = [
            load(x.at[self.head, keys], BY_COLUMNS, optimized=False) for x in (refs.e_hi, refs.e_lo)
        ]
        slot = k_ring.wait(j)
        S = products.from_zeros(functools.partial(self.scores, slot), R, R)
        k_ring.release(j)
        k_ring.refill(j)
        t, s = rows_and_columns(R, R)
        # Masked after the product, not before: a NaN in k reaches no earlier step.
        seen = s <= t + (self.tile - j) * R
        P = jnp.where(seen, S * (decay_tile(e, u) * self.p.qk_scale), 0.0)
        if self.normaliser is not None:
            z += products.sum_over_columns(P)
        step = j + self.steps_k
        slot = v_ring.wait(step)

        def add(accumulator):
            products.add(accumulator, P.astype(refs.q.dtype), refs.v_tiles.at[slot])
            products.wait(0)

        (num,) = products.onto(add, num)
        v_ring.release(step)
        v_ring.refill(step)
        return num, z

    def skip(self, j):
        """A tile of keys that only the other warpgroup reads."""
        for ring, step in ((self.k_ring, j), (self.v_ring, j + self.steps_k)):
            ring.wait(step)
            ring.release(step)
            ring.refill(step)

    def run(self, num_tiles, column):
        refs, normaliser = self.refs, self.normaliser
        rows = self.steps(self.tile)
        # Loaded before the products and used after them: their latency is hidden.
        u = [load_by_rows(x, self.head, rows) for x in (refs.u_hi, refs.u_lo)]
        w, m = (load_by_rows(x, self.head, rows) for x in (refs.w, refs.m))
        row_scale = query_scale(w, self.p.qk_scale)
        plgpu.barrier_wait(refs.q_full.at[self.wg])
        z = plgpu.layout_cast(jnp.zeros((R,), jnp.float32), BY_ROWS)
        if normaliser is not None:
            z += self.n_products() * row_scale
        num = products.from_zeros(self.inter, R, self.columns)
        num *= across_columns(row_scale, self.columns)
        num, z = loop(self.tile + 1, functools.partial(self.intra, u), (num, z))
        loop(num_tiles - self.tile - 1, lambda x, carry: self.skip(self.tile + 1 + x), None)
        if normaliser is not None:
            num *= across_columns(1.0 / normaliser.denominator(z, m), self.columns)

            @pl.when(column == 0)
            def _():
                refs.z.at[self.head, rows][...] = z

        free = refs.q_tiles.shape[1]
        h = head_of(refs.h, self.head, self.p)
        for x in range(self.columns // R):
            tile = refs.q_tiles.at[self.wg, x % free]
            plgpu.wait_smem_to_gmem(free - 1, wait_read_only=True)
            products.store(tile, num[:, x * R : (x + 1) * R].astype(tile.dtype))
            plgpu.commit_smem()
            columns = block(column * (self.columns // R) + x, R)
            copy_out(tile, h.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)


def _kernel(
    *,
    p: Problem,
    config: "Tiles",
    normaliser: Normaliser | None,
    **refs_by_name: Any,
) -> None:
    refs = _Refs(**refs_by_name)
    columns, num_stages, warpgroups = config.siz_b_DHHV, config.num_stages, config.siz_b_LQ // R
    wg, index = lax.axis_index("wg"), lax.axis_index("program")
    of_h, of_chunk = blocks(p.DHHV, columns), blocks(p.L, config.siz_b_LQ)
    column, index = remainder(index, of_h), divide(index, of_h)
    # Those with the most keys first. Many CTAs have those of a chunk together, for the L2.
    chunks = p.BNH * p.NC
    if chunks * of_chunk * of_h <= FEW_CTAS:
        i, index = of_chunk - 1 - divide(index, chunks), remainder(index, chunks)
    else:
        i, index = of_chunk - 1 - remainder(index, of_chunk), divide(index, of_chunk)
    head, chunk = divide(index, p.NC), remainder(index, p.NC)
    num_tiles, steps_k = (i + 1) * warpgroups, p.DHQK // R
    q, k, v = (head_of(x, head, p) for x in (refs.q, refs.k, refs.v))

    def steps(tile):
        return block(chunk * (p.L // R) + tile, R)

    def copy_k(j, copy):
        _, parts, _, of_part = refs.k_tiles.shape
        for x in range(parts):
            copy(k.at[steps(j), x * of_part : (x + 1) * of_part], refs.k_tiles, x)

    def copy_v(step, copy):
        of_C = refs.C.at[head, chunk, block(step, R), block(column, columns)]
        of_v = v.at[steps(step - steps_k), block(column, columns)]
        pl.when(step < steps_k)(lambda: copy(of_C, refs.v_tiles))
        pl.when(step >= steps_k)(lambda: copy(of_v, refs.v_tiles))

    k_ring, v_ring = (
        CopyRing(barriers, num_stages, total, copies, readers=warpgroups)
        for barriers, total, copies in (
            (refs.k_barriers, num_tiles, copy_k),
            (refs.v_barriers, num_tiles + steps_k, copy_v),
        )
    )
    tile = i * warpgroups + wg
    for x in range(steps_k):
        source = q.at[steps(tile), x * R : (x + 1) * R]
        copy_in(source, refs.q_tiles.at[wg, x], refs.q_full.at[wg])
    v_ring.start()
    k_ring.start()
    queries = _Queries(refs, p, columns, normaliser, k_ring, v_ring, wg, head, chunk, tile)
    queries.run(num_tiles, column)
    k_ring.drain()
    v_ring.drain()


def scratch(p: Problem, config: "Tiles", dtype: Any) -> dict[str, Any]:
    """Shared memory of the kernel."""
    tiles, warpgroups, n = shared_tiles, config.siz_b_LQ // R, config.num_stages
    of_part = p.DHQK if p.DHQK <= 256 else R
    parts = p.DHQK // of_part
    return {
        "q_tiles": tiles(warpgroups, p.DHQK // R, R, R, dtype=dtype),
        "k_tiles": tiles(n, parts, R, of_part, dtype=dtype),
        "v_tiles": tiles(n, R, config.siz_b_DHHV, dtype=dtype),
        "q_full": plgpu.Barrier(num_arrivals=p.DHQK // R, num_barriers=warpgroups),
        "k_barriers": ring_barriers(n, copies=parts, readers=warpgroups),
        "v_barriers": ring_barriers(n, copies=1, readers=warpgroups),
    }


def parallel_fw_H(
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    call: Launch,
) -> Outputs:
    """Runs the stage: ``stages/parallel_fw_H.py``."""
    matQ, matK, matV, gates, matC_states, vecN_states = x
    p, config, g = call.problem, call.tiles, gates.per_step()
    y = mosaic_call(
        functools.partial(_kernel, p=p, config=config, normaliser=normaliser),
        name="parallel_fw_H",
        grid={"program": config.grid(p)[0]},
        warpgroups=config.siz_b_LQ // R,
        outputs={
            "h": sequence_shape(matV, p.DHHV, matQ.dtype),
            "z": None if normaliser is None else float32(p.BNH, p.S),
        },
        scratch=scratch(p, config, matQ.dtype),
        interpret=call.interpret,
    )(
        q=matQ,
        k=matK,
        v=matV,
        C=matC_states,
        n=None if normaliser is None else vecN_states,
        e_hi=g.vecE[0],
        e_lo=g.vecE[1],
        u_hi=g.vecU[0],
        u_lo=g.vecU[1],
        w=g.vecW,
        m=g.vecM if normaliser is not None and normaliser.floor_needs_m else None,
    )
    return Outputs(y["h"], y["z"])


@dataclasses.dataclass(frozen=True)
class Tiles(HopperTiles):
    siz_b_LQ: int
    siz_b_DHHV: int
    num_stages: int

    def grid(self, p: Problem, **asked: Any) -> tuple[int, ...]:
        return (p.BNH * p.NC * blocks(p.L, self.siz_b_LQ) * blocks(p.DHHV, self.siz_b_DHHV),)

    def shared_bytes(self, p: Problem, dtype: Any, **asked: Any) -> int:
        return shared_bytes(scratch(p, self, dtype))

    @classmethod
    def candidates(cls, p: Problem, gpu: Gpu, **asked: Any) -> Iterable[Self]:
        """Tiles of which an SM has room for two CTAs of 64 queries, else for one of 128.

        With 64 queries, DHQK 256 and 256 columns ptxas spills 132 bytes and more.
        """
        columns = next((x for x in (256, 128) if p.DHHV % x == 0), 64)
        few = min(columns, 128)
        two = cls(R, columns, 2)
        if (
            p.DHQK % R == 0
            and 2 * (two.shared_bytes(p, KERNEL_DTYPE) + 1024) <= gpu.sm_shared_bytes
        ):
            yield two
        for sizes in ((128, columns, 2), (128, columns, 1), (R, few, 2), (R, few, 1), (R, 64, 1)):
            yield cls(*sizes)

    def divides(self, p: Problem, **asked: Any) -> bool:
        LQ, columns = self.siz_b_LQ, self.siz_b_DHHV
        known = columns in (64, 128, 256) and LQ in (R, 2 * R)
        return known and p.DHQK % R == p.DHHV % columns == p.L % LQ == 0
