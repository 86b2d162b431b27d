"""parallel_bw_dP on Mosaic GPU: P, dP, the sums of W and delta of ``stages/parallel_bw_dP.py``.

The kernel does not scale queries and keys.

An item of ``persistent.py`` is a tile of 128 queries and 128 keys of a chunk. Its operands are
copied num_stages steps ahead, across items too. A step has 64 columns of q and k, or of dh and v,
and the last step has e_s. Each of the two warpgroups has 64 queries. It accumulates the scores and
dh . v in two accumulators, from which it computes the outputs for 32 keys at a time.

With a normaliser, dz_t den_t = slope_t delta_t, where slope_t is -sign(z_t), or 0 if the floor is
larger than |z_t|. While a product with a tile of dh runs, its warpgroup multiplies its rows of that
tile with the same rows of h for delta. The tiles of h have a ring of their own. All items of a tile
of queries compute bit-identical delta, and the item on the diagonal stores it.

An item reads 256 (DHQK + DHV) elements, and 128 DHV elements of h. Tiles of 64 x 64 would read
twice as much through the L2.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.normaliser import (
    DEFAULT_NORMALISER,
    Normaliser,
    NormaliserGradients,
    query_scale,
)
from mlstm_pallas.formulas.scores import tile_steps
from mlstm_pallas.formulas.tiles import blocks, blocks_over, fori, loop, triangle_tile
from mlstm_pallas.launches.kernel_tiles import KernelSpec
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.mosaic_gpu.common import products
from mlstm_pallas.mosaic_gpu.common.copies import copy_out, head_of, ring_barriers
from mlstm_pallas.mosaic_gpu.common.fragments import (
    load_by_rows,
    tile_iota,
    w_sum_shapes,
    write_tiles,
)
from mlstm_pallas.mosaic_gpu.common.launch import (
    BY_COLUMNS,
    BY_ROWS,
    WG_ROWS,
    Ref,
    aligned,
    atom_columns,
    block,
    float32,
    load,
    plgpu,
    shared_tiles,
    tile_transforms,
    unravel,
)
from mlstm_pallas.mosaic_gpu.common.limits import RingTiles
from mlstm_pallas.mosaic_gpu.common.persistent import PersistentKernel, persistent_call
from mlstm_pallas.mosaic_gpu.common.phases import Phase, Phases
from mlstm_pallas.mosaic_gpu.common.products import SUM_SCRATCH
from mlstm_pallas.operands.scaled_rows import ScaledRows
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages.parallel_bw_dP import Operands, ScoreGradients, ScoreTiles

TILE = 128  # queries per item, and keys
DEPTH = 64  # columns that a step multiplies
H_STAGES = 3  # tiles of h in shared memory
SLICE = 32  # keys whose P and dP a warpgroup computes at a time; more would take too many registers


def _items_per_chunk(p: Problem) -> int:
    num_tiles = blocks_over(p.L, TILE)
    return num_tiles * (num_tiles + 1) // 2


class _References(NamedTuple):
    """None: absent. Shared memory and barriers: see ``ParallelBwDPTiles.scratch``."""

    matQ: Ref  # (B * NH, S, DHQK); with the layout "BTNH" (B, S, NH, DHQK)
    matK: Ref  # like matQ
    matV: Ref  # likewise, of DHV columns
    matDeltaH: Ref  # like matV
    matH: Ref  # like matV; None if delta is not computed
    active: Ref  # ``ChunkList.active_first``; None if all chunks are active
    vecE: Ref  # two (B * NH, S)
    vecU: Ref  # two (B * NH, S)
    vecInvDen: Ref  # (B * NH, S); None without a normaliser
    vecSlope: Ref  # (B * NH, S); None without a normaliser or matH
    matP: Ref  # out (B * NH, S, L)
    matDeltaP: Ref  # out (B * NH, S, L)
    tile_sums: Ref  # out, see ``w_sum_shapes``
    vecDelta: Ref  # out (B * NH, S); None without matH
    operands_smem: Ref
    h_smem: Ref
    out_smem: Ref
    sums_smem: Ref
    barriers: Ref
    h_barriers: Ref


class _Kernel(PersistentKernel):
    """Runs a CTA."""

    References = _References
    refs: _References
    h_ring: Any  # None without h

    def __init__(self, *args) -> None:
        super().__init__(*args)
        refs, p = self.refs, self.p
        (self.left, self.e_hi), (self.right, self.e_lo) = refs.operands_smem
        steps_k, steps_v = blocks_over(p.DHQK, DEPTH), blocks_over(p.DHV, DEPTH)
        q_and_k = functools.partial(self.copy_tiles, refs.matQ, refs.matK)
        dh_and_v = functools.partial(self.copy_tiles, refs.matDeltaH, refs.matV)
        self.phases = Phases(
            scores=Phase(steps_k, (q_and_k,)),
            dh_v=Phase(steps_v, (dh_and_v,)),
            weights=Phase(1, (self.copy_e,)),
        )
        self.ring = self.phases.ring(refs.barriers, self.num_items, self.item)
        self.rings, self.h_ring = [self.ring], None
        if refs.matH is not None:
            self.h_phases = Phases(dh_v=Phase(steps_v, (self.copy_h,)))
            self.h_ring = self.h_phases.ring(refs.h_barriers, self.num_items, self.item)
            self.rings.append(self.h_ring)

    def item(self, index):
        """The head, the chunk, the tile of queries and the tile of keys, which is not later."""
        chunk, x = unravel(self.item_of(index), _items_per_chunk(self.p))
        n = blocks(self.p.L, TILE)
        return *self.head_and_chunk(chunk), *(
            self.p.memory_index(y, n) for y in triangle_tile(x, n)
        )

    def tile(self, chunk, tile):
        """The index of a chunk's tile in the sequence."""
        return chunk * blocks(self.p.L, TILE) + tile

    def copy_tiles(self, left, right, head, chunk, i, j, column, copy) -> None:
        """Copies the rows of the queries of one array and of the keys of another one."""
        for x, tile, buffer in ((left, i, self.left), (right, j, self.right)):
            rows = block(self.tile(chunk, tile), TILE)
            copy(head_of(x, head, self.p).at[rows, block(column, DEPTH)], buffer)

    def copy_e(self, head, chunk, i, j, _, copy) -> None:
        keys = block(self.tile(chunk, j), TILE)
        for x, buffer in zip(self.refs.vecE, (self.e_hi, self.e_lo), strict=True):
            copy(x.at[head, keys], buffer, slice(TILE))

    def copy_h(self, head, chunk, i, j, column, copy) -> None:
        position = block(self.tile(chunk, i), TILE), block(column, DEPTH)
        copy(head_of(self.refs.matH, head, self.p).at[position], self.refs.h_smem)

    def consume(self) -> None:
        fori(self.num_items)(functools.partial(_run_item, self))


def _scores_dh_v_and_delta(cta: _Kernel, index, tile_rows):
    """Returns delta, or None without h, and q k^T and dh v^T.

    tile_rows: the warpgroup's rows in the tile.
    """
    ring, h_ring = dataclasses.replace(cta.ring, item=index), cta.h_ring
    steps, steps_v = cta.phases.of_item(index), cta.phases["dh_v"].repeats

    def add_to(accumulator):
        return lambda slot: products.add(
            accumulator, cta.left.at[slot, tile_rows], cta.right.at[slot].T
        )

    def issue(scores_acc, dh_v_acc):
        @fori(cta.phases["scores"].repeats)
        def add_scores(j):
            (step,) = steps("scores", j)
            ring.mma(step, add_to(scores_acc), follows=j > 0)

        def add_dh_v(j, delta):
            def add_delta(slot):
                (h,), dh = cta.h_phases.of_item(index)("dh_v", j), cta.left.at[slot, tile_rows]
                return delta + h_ring.row_products(h, dh, cta.refs.h_smem, tile_rows)

            (step,) = steps("dh_v", j)
            return ring.mma(step, add_to(dh_v_acc), add_delta if h_ring else None)

        delta = products.zeros(WG_ROWS, layout=BY_ROWS) if h_ring else None
        delta = loop(steps_v, add_dh_v, delta)
        products.wait(0)
        ring.advance(*steps("dh_v", steps_v - 1))
        return delta

    return products.all_from_zeros(issue, (WG_ROWS, TILE), (WG_ROWS, TILE))


def _run_item(cta: _Kernel, index) -> None:
    """Computes and stores P, dP, the sums of W and delta of an item."""
    refs, wg = cta.refs, cta.wg
    head, chunk, i, j = cta.item(index)
    tile_rows = block(wg, WG_ROWS)
    rows = block(cta.tile(chunk, i) * (TILE // WG_ROWS) + wg, WG_ROWS)  # in the sequence
    # Loaded before the products and used after them, so that their latency is hidden.
    vectors = *refs.vecU, refs.vecInvDen, refs.vecSlope
    *queries, slope = (load_by_rows(x, head, rows) for x in vectors)
    delta, scores, dh_v = _scores_dh_v_and_delta(cta, index, tile_rows)
    # No gradient flows back where the floor is larger, even if h is inf.
    dz_den = None if slope is None else jnp.where(slope == 0.0, 0.0, slope * delta)
    (weights,) = cta.phases.of_item(index)("weights")
    slot = cta.ring.wait(weights)
    on_diagonal = 0.0

    def write(start):
        """Writes P and dP of SLICE keys; returns the sums over them of W_tt and of W_ts, s < t."""
        columns = slice(start, start + SLICE)
        in_tile = pl.ds(start % WG_ROWS, SLICE)
        distance = (i - j) * TILE + wg * WG_ROWS - start
        t, s = tile_steps((WG_ROWS, SLICE), distance, cta.p, tile_iota)
        e = (load(x.at[slot, columns], BY_COLUMNS) for x in (cta.e_hi, cta.e_lo))
        P, dP = (refs.out_smem.at[wg, x, :, in_tile] for x in range(2))
        operands = scores[:, columns], dh_v[:, columns], e, (*queries, dz_den)
        W = write_tiles(P, dP, *operands, s <= t, cta.p)
        earlier = jnp.where(s < t, W, 0.0)
        keys = aligned(cta.tile(chunk, j) * TILE + start, SLICE)
        sums = products.sum_over_rows(earlier, refs.sums_smem.at[wg])
        refs.tile_sums.per_key.at[head, i * (TILE // WG_ROWS) + wg, keys][...] = sums
        at_t = products.sum_over_columns(jnp.where(s == t, W, 0.0))
        return at_t, products.sum_over_columns(earlier)

    for b in range(TILE // WG_ROWS):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sums = [write(start) for start in range(b * WG_ROWS, (b + 1) * WG_ROWS, SLICE)]
        diagonal, earlier = (functools.reduce(jnp.add, x) for x in zip(*sums, strict=True))
        on_diagonal += diagonal
        column = j * (TILE // WG_ROWS) + b
        refs.tile_sums.per_query.at[head, column, rows][...] = earlier
        plgpu.commit_smem()
        for x, output in enumerate((refs.matP, refs.matDeltaP)):
            destination = output.at[head, rows, block(column, WG_ROWS)]
            copy_out(refs.out_smem.at[wg, x], destination)
    cta.ring.release(weights)

    @pl.when(i == j)
    def store():
        refs.tile_sums.diagonal.at[head, rows][...] = on_diagonal
        if delta is not None:
            refs.vecDelta.at[head, rows][...] = delta


def parallel_bw_dP(
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    return_keys: bool = True,
    call: Launch,
) -> ScoreGradients:
    """Runs the stage: ``stages/parallel_bw_dP.py``.

    It returns unscaled queries and keys with their weights, and sums of W in tiles of 64 steps.
    """
    p, dtype, g, z = call.problem, x.matQ.dtype, x.gates.per_step(), x.vecZ
    reads_h, slopes = x.matH is not None, NormaliserGradients()
    if normaliser is not None:
        # Linear in delta, so those for a delta of 1 are the slopes that the kernel multiplies.
        slopes = normaliser.gradients(jnp.ones_like(z), z, g.vecM)
    matrix = jax.ShapeDtypeStruct((p.BNH, p.S, p.L), dtype)
    delta = float32(p.BNH, p.S) if reads_h else None
    y = persistent_call(
        _Kernel,
        "parallel_bw_dP",
        x,
        call,
        {"matP": matrix, "matDeltaP": matrix, "tile_sums": w_sum_shapes(p), "vecDelta": delta},
        call.tiles.scratch(p, dtype, reads_h),
        matH=x.matH,
        vecE=g.vecE,
        vecU=g.vecU,
        vecInvDen=slopes.vecInvDen,
        vecSlope=slopes.vecDzDen if reads_h else None,
    )
    queries = ScaledRows(x.matQ, query_scale(g.vecW, p.qk_scale, slopes.vecInvDen))
    keys = ScaledRows(x.matK, g.vecAbar) if return_keys else None
    tiles = ScoreTiles(y["matP"], y["matDeltaP"], y["tile_sums"])
    return ScoreGradients(tiles, queries, keys, y["vecDelta"], None)


@dataclasses.dataclass(frozen=True)
class ParallelBwDPTiles(RingTiles):
    def items(self, p: Problem) -> int:
        return p.BNH * p.NC * _items_per_chunk(p)

    def scratch(self, p: Problem, dtype, has_h=True) -> dict[str, Any]:
        # The tile and the vector have equally many bytes, so a slot has the same place in both.
        tiles = functools.partial(shared_tiles, dtype=dtype, atom=atom_columns(p))
        tile = tiles(self.num_stages, TILE, DEPTH)
        vector = plgpu.SMEM((self.num_stages, TILE * DEPTH * dtype.itemsize // 4), jnp.float32)
        transforms = tile_transforms(SLICE, dtype.itemsize)
        return {
            "operands_smem": [plgpu.RefUnion(tile, vector) for _ in range(2)],  # left and right
            "h_smem": tiles(H_STAGES, TILE, DEPTH) if has_h else None,
            # One entry per warpgroup:
            "out_smem": plgpu.SMEM((2, 2, WG_ROWS, WG_ROWS), dtype, transforms=transforms),  # P, dP
            "sums_smem": plgpu.SMEM((2, SUM_SCRATCH), jnp.float32),
            "barriers": ring_barriers(self.num_stages, copies=2),
            "h_barriers": ring_barriers(H_STAGES, copies=1) if has_h else None,
        }

    @classmethod
    def candidates(cls, p: Problem, kernel: KernelSpec) -> Iterable[Self]:
        return [cls(4, num_ctas=kernel.gpu.sms)]

    def divides(self, p: Problem) -> bool:
        return self.num_stages >= 2 and p.L % TILE == 0
