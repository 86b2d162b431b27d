"""parallel_bw_dP on Mosaic GPU: P, dP, the sums of W and delta of ``stages/parallel_bw_dP.py``.

Queries and keys are not scaled here.

One CTA an SM. Each takes every n-th item, a tile of 128 queries and 128 keys of a chunk. Operands
are copied num_stages steps ahead, into the next item too. A step is 64 columns of q and k, or of dh
and v, and the last one has e_s. The two warpgroups have 64 queries each: scores and dh . v in two
accumulators, from which they compute what is written, 32 keys at a time.

With a normaliser dz_t den_t = slope_t delta_t; slope_t is -sign(z_t), or 0 where the floor is
larger than |z_t|. While a product with a tile of dh runs, its warpgroup multiplies its rows of that
tile with those of h for delta. The tiles of h have stages of their own. All items of a tile of
queries compute the same delta to the bit; the one on the diagonal writes it.

An item reads 256 (DHQK + DHHV) elements, and 128 DHHV of h. Tiles of 64 x 64 would read twice as
much through the L2.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from mlstm_pallas.gate_gradients import TileSums
from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.gpu import Gpu
from mlstm_pallas.mosaic_gpu import products
from mlstm_pallas.mosaic_gpu.copy_ring import CopyRing, ring_barriers
from mlstm_pallas.mosaic_gpu.fragments import load_by_rows, rows_and_columns
from mlstm_pallas.mosaic_gpu.gradient_tiles import tile_pairs, w_sum_shapes, write_tiles
from mlstm_pallas.mosaic_gpu.launch import (
    BY_COLUMNS,
    BY_ROWS,
    REGISTER_ROWS,
    PersistentScheduler,
    block,
    float32,
    load,
    mosaic_call,
    one_of,
    plgpu,
    shared_bytes,
    shared_tiles,
    tile_transforms,
)
from mlstm_pallas.mosaic_gpu.limits import RingTiles
from mlstm_pallas.mosaic_gpu.products import SUM_SCRATCH
from mlstm_pallas.mosaic_gpu.step_sums import step_sums
from mlstm_pallas.mosaic_gpu.tile_copies import head_of
from mlstm_pallas.normaliser import DEFAULT_NORMALISER, Normaliser, NormaliserGradients, query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Launch, ScaledRows
from mlstm_pallas.stages.parallel_bw_dP import Operands, ScoreGradients
from mlstm_pallas.stages.step_sums import Operands as StepSums
from mlstm_pallas.tiles import blocks, divide, loop, remainder

R = REGISTER_ROWS
TILE = 128  # queries, and keys, of an item
DEPTH = 64  # of the product of a step
H_STAGES = 3  # tiles of h in shared memory
SLICE = 32  # keys whose P and dP a warpgroup computes at a time: more take too many registers


class _Refs(NamedTuple):
    q: Any  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    k: Any
    v: Any  # (B * NH, S, DHHV) or (B, S, NH, DHHV)
    dh: Any
    h: Any  # likewise; absent where delta is 0 and without a normaliser
    e_hi: Any  # (B * NH, S), as all that follow
    e_lo: Any
    u_hi: Any
    u_lo: Any
    inv_den: Any  # absent without a normaliser
    slope: Any  # absent where h is
    P: Any  # out (B * NH, S, L)
    dP: Any
    per_query: Any  # out, see w_sum_shapes
    per_key: Any
    diagonal: Any
    delta: Any  # out (B * NH, S); absent where h is
    operands: Any  # shared: the tiles of a step, and the vectors that take their place
    h_tiles: Any  # shared (H_STAGES, 128, 64)
    out_tiles: Any  # shared (2 warpgroups, 2, 64, 64)
    scratch: Any  # shared (2 warpgroups, 256), for sums over queries
    barriers: Any  # of the ring of operands
    h_barriers: Any  # of the ring of tiles of h; absent where h is


@dataclasses.dataclass(frozen=True)
class _CTA:
    """The items of a CTA, and their copies."""

    refs: _Refs
    p: Problem
    scheduler: PersistentScheduler
    num_tiles: int  # of queries, in a chunk
    steps_k: int
    steps_v: int
    steps_of_item: int

    def item(self, index) -> tuple[Any, ...]:
        """Head, chunk, and the tiles of queries and of keys: tile i of queries has the first i + 1
        tiles of keys."""
        items_of_chunk, NC = _items_of_chunk(self.p), self.p.NC
        index = self.scheduler.item(index)
        x, chunk = remainder(index, items_of_chunk), divide(index, items_of_chunk)
        later = (x >= m * (m + 1) // 2 for m in range(1, self.num_tiles))
        i: Any = sum((lax.convert_element_type(y, jnp.int32) for y in later), np.int32(0))
        j = x - divide(i * (i + 1), 2)
        return divide(chunk, NC), remainder(chunk, NC), i, j

    def copy(self, index, x, copy) -> None:
        """Step x of an item: q and k, dh and v, or the vectors of the keys."""
        refs, steps_k, steps_v = self.refs, self.steps_k, self.steps_v
        head, chunk, i, j = self.item(index)
        queries, keys = (block(chunk * self.num_tiles + y, TILE) for y in (i, j))
        left, right = refs.operands

        def operands(a, b, x):
            for y, rows, buffers in ((a, queries, left), (b, keys, right)):
                copy(head_of(y, head, self.p).at[rows, block(x, DEPTH)], buffers[0])

        def vectors():
            for y, buffers in ((refs.e_hi, left), (refs.e_lo, right)):
                copy(y.at[head, keys], buffers[1], slice(TILE))

        pl.when(x < steps_k)(lambda: operands(refs.q, refs.k, x))
        of_v = (x >= steps_k) & (x < steps_k + steps_v)
        pl.when(of_v)(lambda: operands(refs.dh, refs.v, x - steps_k))
        pl.when(x == steps_k + steps_v)(vectors)

    def copy_h(self, step, copy) -> None:
        head, chunk, i, _ = self.item(divide(step, self.steps_v))
        rows = block(chunk * self.num_tiles + i, TILE)
        columns = block(remainder(step, self.steps_v), DEPTH)
        copy(head_of(self.refs.h, head, self.p).at[rows, columns], self.refs.h_tiles)


@dataclasses.dataclass(frozen=True)
class _Item(_CTA):
    """An item, as a warpgroup sees it."""

    ring: CopyRing
    h_ring: Any
    wg: Array
    index: Array  # of the CTA's items
    head: Array
    chunk: Array
    i: Array
    j: Array
    tile_rows: Any  # of the warpgroup
    rows: Any  # likewise, in the sequence
    first: Array  # the first step in the ring

    def refill(self, step) -> None:
        self.ring.refill(step, item=self.index)


def _scores_dA_and_delta(c: _Item):
    """delta, None where h is absent, q k^T and dh v^T."""
    refs, ring, first = c.refs, c.ring, c.first
    (left, _), (right, _) = refs.operands

    def delta_of(x, slot):
        """dh_t . h_t over the columns of a step."""
        step = c.index * c.steps_v + x
        h_slot = c.h_ring.wait(step)
        tiles = left.at[slot, c.tile_rows], refs.h_tiles.at[h_slot, c.tile_rows]
        dh, h = (load(tile).astype(jnp.float32) for tile in tiles)
        c.h_ring.release(step)
        return products.sum_over_columns(dh * h)

    def add(accumulator, start, count, delta=None):
        def one(x, delta):
            step = first + start + x
            slot = ring.wait(step)
            products.add(accumulator, left.at[slot, c.tile_rows], right.at[slot].T)
            products.wait(1)
            pl.when(start + x > 0)(lambda: ring.release(step - 1))
            if delta is not None:
                delta += delta_of(x, slot)
                c.h_ring.refill(c.index * c.steps_v + x)
            pl.when(step > 0)(lambda: c.refill(step - 1))
            return delta

        return loop(count, one, delta)

    def issue(scores, dA):
        add(scores, 0, c.steps_k)
        delta = None
        if refs.h is not None:
            delta = plgpu.layout_cast(jnp.zeros((R,), jnp.float32), BY_ROWS)
        delta = add(dA, c.steps_k, c.steps_v, delta)
        products.wait(0)
        ring.release(first + c.steps_k + c.steps_v - 1)
        c.refill(first + c.steps_k + c.steps_v - 1)
        return delta

    return products.all_from_zeros(issue, (R, TILE), (R, TILE))


def _multiply(c: _Item) -> None:
    """The products of an item, P, dP, the sums of W and delta."""
    refs, rows = c.refs, c.rows
    (_, left_vector), (_, right_vector) = refs.operands
    # Loaded before the products and used after them: their latency is hidden.
    *u, inv_den, slope = (
        load_by_rows(x, c.head, rows) for x in (refs.u_hi, refs.u_lo, refs.inv_den, refs.slope)
    )
    delta, scores, dA = _scores_dA_and_delta(c)
    # Where the floor is larger nothing passes back, also where h is inf.
    dz_den = None if delta is None else jnp.where(slope == 0.0, 0.0, slope * delta)
    last = c.first + c.steps_of_item - 1
    slot = c.ring.wait(last)
    t, s = rows_and_columns(R, SLICE)
    on_diagonal = 0.0

    def write(start):
        """P and dP of SLICE keys, from ``start`` on; sums over them of W_tt and of W_ts, s < t."""
        columns, in_tile = slice(start, start + SLICE), slice(start % R, start % R + SLICE)
        last_seen = t + ((c.i - c.j) * TILE + c.wg * R - start)  # the key of a query's own step
        e = (load(x.at[slot, columns], BY_COLUMNS) for x in (left_vector, right_vector))
        P, dP = (refs.out_tiles.at[c.wg, x, :, in_tile] for x in range(2))
        operands = scores[:, columns], dA[:, columns], e, u, inv_den, dz_den, s <= last_seen
        W = write_tiles(P, dP, *operands, c.p.qk_scale)
        earlier = jnp.where(s < last_seen, W, 0.0)
        keys = pl.ds(pl.multiple_of((c.chunk * c.num_tiles + c.j) * TILE + start, SLICE), SLICE)
        sums = products.sum_over_rows(earlier, refs.scratch.at[c.wg])
        refs.per_key.at[c.head, c.i * (TILE // R) + c.wg, keys][...] = sums
        at_t = products.sum_over_columns(jnp.where(s == last_seen, W, 0.0))
        return at_t, products.sum_over_columns(earlier)

    for b in range(TILE // R):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sums = [write(start) for start in range(b * R, (b + 1) * R, SLICE)]
        of_diagonal, of_earlier = (functools.reduce(jnp.add, x) for x in zip(*sums, strict=True))
        on_diagonal += of_diagonal
        column = c.j * (TILE // R) + b
        refs.per_query.at[c.head, column, rows][...] = of_earlier
        plgpu.commit_smem()
        for x, output in enumerate((refs.P, refs.dP)):
            destination = output.at[c.head, rows, block(column, R)]
            plgpu.copy_smem_to_gmem(refs.out_tiles.at[c.wg, x], destination)
    c.ring.release(last)

    @pl.when(c.i == c.j)
    def store():
        refs.diagonal.at[c.head, rows][...] = on_diagonal
        if delta is not None:
            refs.delta.at[c.head, rows][...] = delta


def _items_of_chunk(p: Problem) -> int:
    num_tiles = blocks(p.L, TILE)
    return num_tiles * (num_tiles + 1) // 2


def _kernel(*, p: Problem, num_ctas: int, num_stages: int, **refs_by_name) -> None:
    refs = _Refs(**refs_by_name)
    wg = lax.axis_index("wg")
    scheduler = PersistentScheduler(lax.axis_index("program"), num_ctas)
    steps = blocks(p.DHQK, DEPTH), blocks(p.DHHV, DEPTH)
    of_item = sum(steps) + 1
    of_cta = refs, p, scheduler, blocks(p.L, TILE), *steps, of_item
    cta = _CTA(*of_cta)
    items = scheduler.num_items(p.BNH * p.NC * _items_of_chunk(p))
    ring = CopyRing(refs.barriers, num_stages, items * of_item, cta.copy, steps_of_item=of_item)
    rings, h_ring = [ring], None
    if refs.h is not None:
        h_ring = CopyRing(refs.h_barriers, H_STAGES, items * cta.steps_v, cta.copy_h)
        rings.append(h_ring)

    def multiply(index, carry):
        head, chunk, i, j = cta.item(index)
        tile_rows, rows = block(wg, R), block((chunk * cta.num_tiles + i) * 2 + wg, R)
        place = wg, index, head, chunk, i, j, tile_rows, rows, index * of_item
        _multiply(_Item(*of_cta, ring, h_ring, *place))

    for x in rings:
        x.start()
    loop(items, multiply, None)
    plgpu.wait_smem_to_gmem(0)
    for x in rings:
        x.drain()


def scratch(config: RingTiles, dtype, *, reads_h: bool) -> dict[str, Any]:
    """Shared memory of the kernel."""
    # The tile and the vector have the same bytes, so that a slot has the same place in both.
    tile = shared_tiles(config.num_stages, TILE, DEPTH, dtype=dtype)
    vector = plgpu.SMEM((config.num_stages, TILE * DEPTH * dtype.itemsize // 4), jnp.float32)
    transforms = tile_transforms(SLICE, dtype.itemsize)
    return {
        "operands": [one_of(tile, vector) for _ in range(2)],
        "h_tiles": shared_tiles(H_STAGES, TILE, DEPTH, dtype=dtype) if reads_h else None,
        "out_tiles": plgpu.SMEM((2, 2, R, R), dtype, transforms=transforms),
        "scratch": plgpu.SMEM((2, SUM_SCRATCH), jnp.float32),
        "barriers": ring_barriers(config.num_stages, copies=2),
        "h_barriers": ring_barriers(H_STAGES, copies=1) if reads_h else None,
    }


def _launch(
    matQ: Array,
    matK: Array,
    matV: Array,
    matDeltaH: Array,
    gates: ChunkGates,
    matH: Array | None,
    vecInvDen: Array | None,
    vecSlope: Array | None,
    call: Launch,
) -> tuple[Array, Array, TileSums, Array | None]:
    """P, dP, the sums of W in tiles of 64 steps, and delta.

    Args:
      matH: as matDeltaH; None: delta is 0.
      vecInvDen, vecSlope: 1 / den_t and slope_t, (B * NH, S) float32; None without a normaliser.
    """
    p, config, dtype, g = call.problem, call.tiles, matQ.dtype, gates.per_step()
    reads_h = matH is not None
    num_ctas = config.num_ctas
    matrix = jax.ShapeDtypeStruct((p.BNH, p.S, p.L), dtype)
    outputs = {"P": matrix, "dP": matrix, **w_sum_shapes(p)}
    x = mosaic_call(
        functools.partial(_kernel, p=p, num_ctas=num_ctas, num_stages=config.num_stages),
        name="parallel_bw_dP",
        grid={"program": num_ctas},
        warpgroups=2,
        outputs=outputs | {"delta": float32(p.BNH, p.S) if reads_h else None},
        scratch=scratch(config, dtype, reads_h=reads_h),
        interpret=call.interpret,
    )(
        q=matQ,
        k=matK,
        v=matV,
        dh=matDeltaH,
        h=matH,
        e_hi=g.vecE[0],
        e_lo=g.vecE[1],
        u_hi=g.vecU[0],
        u_lo=g.vecU[1],
        inv_den=vecInvDen,
        slope=vecSlope if reads_h else None,
    )
    return x["P"], x["dP"], tile_pairs(x, p), x["delta"]


def parallel_bw_dP(
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    return_keys: bool = True,
    call: Launch,
) -> ScoreGradients:
    """Runs the stage: ``stages/parallel_bw_dP.py``. Queries and keys come with their weights."""
    matQ, matK, *_, gates, matH, z = x
    arrays, g = x[:5], gates.per_step()
    gradients, dn_added = NormaliserGradients(), None
    if normaliser is None:
        P, dP, pairs, _ = _launch(*arrays, None, None, None, call)
    else:  # The gradients are linear in delta.
        slope = normaliser.gradients(jnp.ones_like(z), z, g.vecM)
        P, dP, pairs, delta = _launch(*arrays, matH, slope.vecInvDen, slope.vecDzDen, call)
        delta = jnp.zeros_like(z) if delta is None else delta
        gradients = normaliser.gradients(delta, z, g.vecM)
    r = query_scale(g.vecW, call.problem.qk_scale, gradients.vecInvDen)
    if gradients.vecDzDen is not None:
        dn_added = step_sums(StepSums(matQ, r * gradients.vecDzDen), call=call)
    keys = ScaledRows(matK, g.vecAbar) if return_keys else None
    return ScoreGradients(P, dP, ScaledRows(matQ, r), keys, pairs, gradients, dn_added)


@dataclasses.dataclass(frozen=True)
class Tiles(RingTiles):
    def clamped(self, p: Problem) -> Self:
        """With no CTA without an item."""
        items = p.BNH * p.NC * _items_of_chunk(p)
        return dataclasses.replace(self, num_ctas=min(self.num_ctas, items))

    def shared_bytes(self, p: Problem, dtype, **asked) -> int:
        """With tiles of h, read or not."""
        return shared_bytes(scratch(self, dtype, reads_h=True), has_sum=True)

    @classmethod
    def candidates(cls, p: Problem, gpu: Gpu, **asked) -> Iterable[Self]:
        if p.L % TILE == 0:
            yield cls(4, num_ctas=gpu.sms).clamped(p)

    def divides(self, p: Problem, **asked) -> bool:
        return self.num_stages >= 2 and p.DHQK % 64 == p.DHHV % 64 == p.L % TILE == 0
