"""chunk_gradients on Mosaic GPU: one CTA computes P, dP and all gradients of a chunk.

L is 128, and DHQK is at most 128. An item of ``persistent.py`` is a chunk. Each of the two
warpgroups has 64 rows of it. Tiles of 64 or 96 columns are copied num_stages tiles ahead, across
chunks too. The last tile of a head may reach beyond it, where it has zeros. k stays
in shared memory for the whole chunk. Up to DHQK 64 there is room for the k of the next chunk as
well; beyond 64 its copy waits for the end of the chunk.

The two warpgroups share the copying and have 255 registers per thread.

The phase "scores" of a chunk computes dh . v over DHV, and "queries" q . k over DHQK; P, dP and
the sums of W follow from these. P and dP stay in shared memory. Each warpgroup computes the block
of 64 x 64 on the diagonal that has its queries, and half the keys of the block below the diagonal.

In the phase "gradients" a warpgroup keeps its rows of dq and dk, 64 x DHQK each, in registers, and
the columns of v and dh are read once more. A repeat reads tiles of v, dC, C and dh from shared
memory, adds to dq, dk and <C_c, dC_{c+1}>, and computes a tile of dv. The order is descending,
because the last columns of v and dh are still in the L2.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.normaliser import query_scale
from mlstm_pallas.formulas.scores import tile_steps
from mlstm_pallas.formulas.tiles import blocks_over, fori, loop, remainder, rounded_up, weighted
from mlstm_pallas.launches.kernel_tiles import KernelSpec
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.mosaic_gpu.common import products
from mlstm_pallas.mosaic_gpu.common.copies import CopyRing, copy_out, head_of, ring_barriers
from mlstm_pallas.mosaic_gpu.common.fragments import (
    across_columns,
    across_rows,
    load_by_rows,
    tile_iota,
    w_sum_shapes,
    write_tiles,
)
from mlstm_pallas.mosaic_gpu.common.gradients import (
    gradient_operands,
    gradient_shapes,
    gradients_of,
)
from mlstm_pallas.mosaic_gpu.common.launch import (
    BY_COLUMNS,
    BY_ROWS,
    WG_ROWS,
    Ref,
    aligned,
    anywhere,
    atom_columns,
    block,
    load,
    load_float32,
    plgpu,
    shared_tiles,
)
from mlstm_pallas.mosaic_gpu.common.limits import RingTiles
from mlstm_pallas.mosaic_gpu.common.persistent import PersistentKernel, persistent_call
from mlstm_pallas.mosaic_gpu.common.phases import Phase, Phases
from mlstm_pallas.mosaic_gpu.common.products import SUM_SCRATCH
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages.chunk_gradients import ChunkGradients, Operands

CHUNK = 128  # steps of a chunk
HALF = 32  # keys of the block below the diagonal, per warpgroup
_E_HI, _E_LO, _DN, _N = range(4)  # rows of the vectors in shared memory; N only with a normaliser


def _tile_columns(p: Problem) -> int:
    """The columns of a tile: 96 if all tiles are full, because fewer steps take less time."""
    return 96 if p.DHQK == 96 and p.DHV % 96 == 0 else 64


class _References(NamedTuple):
    """None: absent. Shared memory and barriers: see ``ChunkGradientsTiles.scratch``."""

    matQ: Ref  # (B * NH, S, DHQK); with the layout "BTNH" (B, S, NH, DHQK)
    matK: Ref  # like matQ
    matV: Ref  # likewise, of DHV columns
    matDeltaH: Ref  # like matV
    active: Ref  # ``ChunkList.active_first``; None if all chunks are active
    matC_states: Ref  # (B * NH, NC, DHQK, DHV)
    vecN_states: Ref  # (B * NH, NC, DHQK); None without a normaliser
    matDeltaC_states: Ref  # (B * NH, NC, DHQK, DHV)
    vecDeltaN_states: Ref  # (B * NH, NC, DHQK)
    vecW: Ref  # (B * NH, S)
    vecAbar: Ref  # (B * NH, S)
    vecInvDen: Ref  # (B * NH, S); None without a normaliser
    vecDzDen: Ref  # (B * NH, S); None without a normaliser
    vecE: Ref  # two (B * NH, S)
    vecU: Ref  # two (B * NH, S)
    matDeltaQ: Ref  # out, like matQ
    q_dot_dq_inter: Ref  # out (B * NH, 1, S)
    matDeltaK: Ref  # out, like matK
    k_dot_dk_inter: Ref  # out (B * NH, 1, S)
    matDeltaV: Ref  # out, like matV
    inner_C_dC: Ref  # out (B * NH, NC, 128), parts of <C_c, dC_{c+1}>
    # Out, see ``w_sum_shapes``. The part of per_query whose keys are all later is scratch.
    tile_sums: Ref
    tiles_smem: Ref
    k_smem: Ref
    P_smem: Ref
    dP_smem: Ref
    staging_smem: Ref
    vectors_smem: Ref
    barriers: Ref
    k_barriers: Ref
    tiles_full: Ref
    tiles_empty: Ref


class _Kernel(PersistentKernel):
    """Runs a CTA."""

    References = _References
    refs: _References

    def __init__(self, *args) -> None:
        super().__init__(*args)
        refs, p, chunks = self.refs, self.p, self.num_items
        self.depth = _tile_columns(p)
        blocks, self.parts = blocks_over(p.DHV, self.depth), blocks_over(p.DHQK, self.depth)
        self.state_rows = rounded_up(p.DHQK, WG_ROWS)  # in a tile: 64 or 128
        q, v, dh = (
            functools.partial(self.copy_rows, x) for x in (refs.matQ, refs.matV, refs.matDeltaH)
        )
        C, dC = (
            functools.partial(self.copy_state, x) for x in (refs.matC_states, refs.matDeltaC_states)
        )
        self.phases = Phases(  # the tiles of a chunk, each a block of columns
            scores=Phase(blocks, (dh, v)),
            queries=Phase(self.parts, (q,)),
            gradients=Phase(blocks, (v, dC, C, dh), descending=True),
            queries_again=Phase(self.parts, (q,)),
        )
        products.guard(refs.tiles_full, refs.P_smem, refs.dP_smem)
        self.ring = self.phases.ring(refs.barriers, chunks, self.item_index)
        self.k_ring = CopyRing(refs.k_barriers, chunks, self.copy_k)
        self.rings = self.ring, self.k_ring

    def item_index(self, index) -> tuple[Any, Any]:
        """The head and the chunk of the CTA's index-th item."""
        return self.head_and_chunk(self.item_of(index))

    def copy_rows(self, x, head, chunk, column, copy) -> None:
        rows, columns = block(chunk, CHUNK), block(column, self.depth)
        copy(head_of(x, head, self.p).at[rows, columns], self.refs.tiles_smem)

    def copy_state(self, x, head, chunk, column, copy) -> None:
        rows, columns = anywhere(0, self.state_rows), block(column, self.depth)
        copy(x.at[head, chunk, rows, columns], self.refs.tiles_smem, slice(rows.size))

    def copy_k(self, index, copy):
        """Copies k and the vectors of a chunk."""
        head, chunk = self.item_index(index)
        refs, rows = self.refs, block(chunk, CHUNK)
        for y in range(self.parts):
            columns = anywhere(y * self.depth, self.depth)
            source = head_of(refs.matK, head, self.p).at[rows, columns]
            copy(source, refs.k_smem, block(y, CHUNK))
        for y, x in enumerate(refs.vecE):
            copy(x.at[head, rows], refs.vectors_smem, y)
        for y, x in enumerate((refs.vecDeltaN_states, refs.vecN_states), _DN):
            if x is not None:
                copy(x.at[head, chunk], refs.vectors_smem, y, slice(self.p.DHQK))

    def consume(self) -> None:
        fori(self.num_items)(lambda index: _run_chunk(_Chunk(self, index)))
        refs = self.refs
        if refs.tiles_empty is not None:
            has_items = self.active is None or self.num_items > 0
            pl.when(has_items)(lambda: plgpu.barrier_wait(refs.tiles_empty))
        self.clear(refs.staging_smem[0].at[self.wg], refs.matDeltaQ, refs.matDeltaK, refs.matDeltaV)


class _Chunk:
    """A chunk, as one warpgroup sees it.

    Attributes:
      index: among the CTA's chunks.
      steps: steps(phase, j) are the steps in the ring of the j-th repeat of a phase.
      here: the index in memory of the warpgroup's block of 64 steps; warpgroup 0 has the earlier
        one.
      earlier, later: the places in memory of the two blocks.
      tile_rows: the warpgroup's rows in the chunk.
      rows: these rows in the sequence.
      out_tile: for an output.
    """

    def __init__(self, cta: _Kernel, index) -> None:
        self.refs, self.p, self.index = cta.refs, cta.p, index
        self.depth, self.parts, self.state_rows = cta.depth, cta.parts, cta.state_rows
        self.wg = lax.optimization_barrier(cta.wg)  # keeps what is derived from it out of registers
        self.head, self.chunk = cta.item_index(index)
        self.ring, self.k_ring = dataclasses.replace(cta.ring, item=index), cta.k_ring
        self.phases, self.steps = cta.phases, cta.phases.of_item(index)
        self.here, self.earlier, self.later = (self.p.memory_index(x, 2) for x in (self.wg, 0, 1))
        self.tile_rows = block(self.here, WG_ROWS)
        self.rows = block(self.chunk * 2 + self.here, WG_ROWS)
        self.k_slot = cta.k_ring.slot(index)
        self.k_tile = cta.refs.k_smem.at[self.k_slot]
        self.out_tile = cta.refs.staging_smem[0].at[self.wg]

    def columns(self, y) -> slice:
        """The columns of q and k in their y-th tile; the others are zeros."""
        return slice(min(self.p.DHQK - y * self.depth, self.depth))

    def k_columns(self, y):
        """The warpgroup's rows of the y-th tile of k."""
        return self.k_tile.at[block(y * (CHUNK // WG_ROWS) + self.here, WG_ROWS)]

    def tile(self, step):
        return self.refs.tiles_smem.at[self.ring.slot(step)]

    def store_per_key(self, W, tile, start):
        """Stores sums over the queries of a tile, for keys from ``start`` on in the chunk."""
        sums = products.sum_over_rows(W, self.refs.staging_smem[1].at[self.wg, :SUM_SCRATCH])
        keys = pl.ds(pl.multiple_of(self.chunk * CHUNK + start, HALF), W.shape[1])
        self.refs.tile_sums.per_key.at[self.head, tile, keys][...] = sums

    def row_dots(self, x, tile):
        return products.sum_over_columns(x * load_float32(tile))

    def vector(self, x, start, size):
        return load(self.refs.vectors_smem.at[self.k_slot, x, pl.ds(start, size)], BY_COLUMNS)

    def store(self, gradients):
        """Stores values in outputs, through tiles that no copy reads now.

        A value has fewer columns than its tile only where the output ends.
        """
        for x, tile, _, _ in gradients:
            products.store(tile.at[:, : x.shape[1]], x.astype(tile.dtype))
        plgpu.commit_smem()
        for _, tile, out, column in gradients:
            copy_out(tile, head_of(out, self.head, self.p).at[self.rows, column])


class _Block(NamedTuple):
    """The block of P and dP on the diagonal, or half of the block below it."""

    tile_rows: Any  # rows of the queries
    key: Any  # the first key
    keys: int
    row: Any  # its row in the shared memory of P
    vectors: Sequence[Any]  # u_hi, u_lo, inv_den and dz_den of the queries
    scores: Any = None
    dh_v: Any = None


def _blocks_and_weights(c: _Chunk) -> tuple[_Block, _Block, Array, Array]:
    """The block on the diagonal, the one below, and the weights of queries and keys.

    The vectors are loaded before the products and used after them, so their latency is hidden.
    """
    refs, later = c.refs, block(c.chunk * 2 + c.later, WG_ROWS)
    half, key = (pl.multiple_of(c.here * keys, keys) for keys in (HALF, WG_ROWS))

    def vectors(rows):
        sources = *refs.vecU, refs.vecInvDen, refs.vecDzDen
        return [load_by_rows(x, c.head, rows) for x in sources]

    diagonal = _Block(c.tile_rows, key, WG_ROWS, 2 * c.wg * WG_ROWS, vectors(c.rows))
    key = c.earlier * WG_ROWS + half
    below = _Block(block(c.later, WG_ROWS), key, HALF, WG_ROWS + half, vectors(later))
    w = load_by_rows(refs.vecW, c.head, c.rows)
    weights = query_scale(w, c.p.qk_scale, diagonal.vectors[2])
    return diagonal, below, weights, load_by_rows(refs.vecAbar, c.head, c.rows)


def _scores_and_dh_v(c: _Chunk, both: Sequence[_Block]) -> list[_Block]:
    """The blocks with their q k^T and dh v^T."""
    ring, slots, num_steps = c.ring, c.refs.tiles_smem, c.phases["scores"].repeats

    def add_blocks(sums, left, right, start=0):
        for x, part in zip(sums, both, strict=True):
            keys = pl.ds(start + part.key, part.keys)
            products.add(x, left.at[part.tile_rows], right.T.at[:, keys])

    def issue(*sums):
        scores, dh_v = sums[:2], sums[2:]

        @fori(num_steps)
        def add(j):
            dh, v = c.steps("scores", j)
            add_blocks(dh_v, slots.at[ring.wait(dh)], slots.at[ring.wait(v)])
            products.wait(2)

            pl.when(j > 0)(lambda: ring.advance(*c.steps("scores", j - 1)))
            pl.when((j == 0) & (c.index > 0))(lambda: c.k_ring.refill(c.index - 1))

        last = c.steps("scores", num_steps - 1)
        for y, q in enumerate(queries := c.steps("queries")):
            slot = ring.wait(q)
            if y == 0:
                c.k_ring.wait(c.index)
            add_blocks(scores, slots.at[slot], c.k_tile, y * CHUNK)
            if y == 0:
                products.wait(2)
                ring.release(*last)
        products.wait(0)
        ring.release(*queries)
        ring.refill(*last, *queries)

    shapes = [(WG_ROWS, part.keys) for part in both]
    _, *sums = products.all_from_zeros(issue, *shapes, *shapes)
    return [x._replace(scores=sums[j], dh_v=sums[2 + j]) for j, x in enumerate(both)]


def _write_keys(c: _Chunk, x: _Block, start: int, mask: Array | None = None):
    """Stores P and dP of half a block, the keys from ``start`` on; returns their W."""
    refs, columns = c.refs, slice(start, start + HALF)
    key, row = (pl.multiple_of(y + start, HALF) for y in (x.key, x.row))
    at = pl.ds(row, HALF)
    e = (c.vector(y, key, HALF) for y in (_E_HI, _E_LO))
    tiles = refs.P_smem.at[at].T, refs.dP_smem.at[at].T
    scores, dh_v = x.scores[:, columns], x.dh_v[:, columns]
    return write_tiles(*tiles, scores, dh_v, e, x.vectors, mask, c.p)


def _write_below(c: _Chunk, below: _Block):
    """Stores P, dP and sums of W of half the block below the diagonal.

    It returns the sums over keys.
    """
    refs = c.refs
    W = _write_keys(c, below, 0)
    sums = products.sum_over_columns(W)

    @pl.when(c.wg == 0)
    def hand_over():  # warpgroup 1 adds its own sums
        refs.tile_sums.per_query.at[c.head, c.later, c.rows][...] = sums

    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.tiles_full)
    c.store_per_key(W, c.later, below.key)
    return sums


def _write_diagonal(c: _Chunk, diagonal: _Block) -> None:
    """Stores P, dP and the sums of W of the block on the diagonal.

    Computing half the keys at a time takes fewer registers.
    """
    refs, sum_over_columns = c.refs, products.sum_over_columns
    diagonal_sums, earlier_sums = [], []
    for start in range(0, WG_ROWS, HALF):
        t, s = tile_steps((WG_ROWS, HALF), -start, c.p, tile_iota)
        W = _write_keys(c, diagonal, start, s <= t)
        diagonal_sums.append(sum_over_columns(jnp.where(s == t, W, 0.0)))
        W = jnp.where(s < t, W, 0.0)
        earlier_sums.append(sum_over_columns(W))
        c.store_per_key(W, c.here, diagonal.key + start)
    refs.tile_sums.diagonal.at[c.head, c.rows][...] = functools.reduce(jnp.add, diagonal_sums)
    refs.tile_sums.per_query.at[c.head, c.here, c.rows][...] = functools.reduce(
        jnp.add, earlier_sums
    )


def _add_for_keys(c: _Chunk, accumulator, tile, x, columns=slice(None)) -> None:
    """Adds the tile times columns of x, over the queries from the warpgroup's keys on."""

    @fori(2 - c.wg)
    def add(j):
        products.add(
            accumulator,
            tile.at[block(2 * c.wg + j, WG_ROWS)],
            x.at[block(c.p.memory_index(c.wg + j, 2), WG_ROWS), columns],
        )


def _gradient_step(c: _Chunk, key_weights: Array, j, carry):
    """Adds to the inter-chunk parts of dq and dk and to <C, dC>; stores a tile of dv.

    carry: <C, dC>, dq, dk.
    """
    refs, ring, DHQK = c.refs, c.ring, c.p.DHQK
    total, *sums = carry
    parts = c.parts
    v, dC, C, dh = c.steps("gradients", j)
    column = c.phases["gradients"].nth(j)

    def multiply_states(dq, dk, dv):
        ring.wait(v)
        ring.wait(dC)
        products.add(dk, c.tile(v).at[c.tile_rows], c.tile(dC).at[:DHQK].T)
        for y in range(parts):
            products.add(dv, c.k_columns(y), c.tile(dC).at[block(y, c.depth)])
        ring.wait(C)
        ring.wait(dh)
        products.add(dq, c.tile(dh).at[c.tile_rows], c.tile(C).at[:DHQK].T)

    *sums, new = products.onto(multiply_states, *sums, products.zeros(WG_ROWS, c.depth))

    def inner(total):
        rows = block(c.wg if c.state_rows > WG_ROWS else 0, WG_ROWS)
        x, y = (load_float32(z.at[rows]) for z in (c.tile(dC), c.tile(C)))
        return total + products.sum_over_columns(weighted(x, y, c.p))

    # A warpgroup sums 64 of the 128 rows of a tile. If a tile has only 64, the two take turns.
    if c.state_rows > WG_ROWS:
        total = inner(total)
    else:
        total = lax.cond(remainder(j, 2) == c.wg, inner, lambda total: total, total)
    ring.release(v, dC, C)
    new = weighted(across_columns(key_weights, c.depth), new, c.p)

    def multiply_P(dv):
        _add_for_keys(c, dv, refs.P_smem, c.tile(dh))
        c.ring.refill(v, dC, C)  # while the product runs

    (new,) = products.onto(multiply_P, new)
    c.ring.advance(dh)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    c.store([(new, c.out_tile, refs.matDeltaV, block(column, c.depth))])
    return total, *sums


def _weighted(
    c: _Chunk,
    gradients: Sequence[Array],
    weights: Array,
    dz_den: Array | None,
    key_weights: Array,
) -> list[Array]:
    """The scaled inter-chunk parts of dq and dk, a tile each; stores q . dq and k . dk."""
    inter, q_dots, k_dots = [], [], []
    for y, q in enumerate(c.steps("queries_again")):
        c.ring.wait(q)
        dq, dk = (x[:, y * c.depth : (y + 1) * c.depth] for x in gradients)
        columns, n = c.columns(y), dq.shape[1]
        if dz_den is not None:
            dq += across_columns(dz_den, n) * across_rows(c.vector(_N, y * c.depth, n))
        dk += across_rows(c.vector(_DN, y * c.depth, n))
        dq, dk = (
            weighted(across_columns(w, n), x, c.p) for w, x in ((weights, dq), (key_weights, dk))
        )
        q_dots.append(c.row_dots(dq, c.tile(q).at[c.tile_rows, columns]))
        k_dots.append(c.row_dots(dk, c.k_columns(y).at[:, columns]))
        inter += [dq, dk]
    c.refs.q_dot_dq_inter.at[c.head, 0, c.rows][...] = functools.reduce(jnp.add, q_dots)
    c.refs.k_dot_dk_inter.at[c.head, 0, c.rows][...] = functools.reduce(jnp.add, k_dots)
    return inter


def _store_dq_and_dk(c: _Chunk, inter: Sequence[Array], corner) -> None:
    """Adds the intra-chunk parts to dq and dk and stores them."""
    refs, parts, queries = c.refs, range(c.parts), c.steps("queries_again")

    def multiply_dP(*sums):
        for y in parts:

            @fori(c.wg + 1)
            def add_keys(j, y=y):
                """The keys up to the warpgroup's queries."""
                dP = refs.dP_smem.at[block(c.wg + j, WG_ROWS)].T
                keys = c.k_tile.at[block(2 * y + c.p.memory_index(j, 2), WG_ROWS), c.columns(y)]
                products.add(sums[2 * y], dP, keys)

            _add_for_keys(c, sums[2 * y + 1], refs.dP_smem, c.tile(queries[y]), c.columns(y))

    gradients = products.onto(multiply_dP, *inter)
    c.k_ring.release(c.index)
    c.ring.advance(*queries)
    if refs.tiles_empty is not None:
        products.release(refs.tiles_empty)
    columns = [anywhere(y * c.depth, c.depth) for y in parts]
    places = [(output, y) for y in columns for output in (refs.matDeltaQ, refs.matDeltaK)]
    outputs = [*zip(gradients, places, strict=True)]
    # Only the warpgroup that wrote a corner block of P or dP reads it.
    free_tiles = [c.out_tile]
    if c.depth == WG_ROWS:
        free_tiles += [refs.P_smem.at[corner], refs.dP_smem.at[corner]]
    for start in range(0, len(outputs), len(free_tiles)):
        free = len(free_tiles) - 1 if start else 0  # for one tile, or for all
        plgpu.wait_smem_to_gmem(free, wait_read_only=True)
        remaining = zip(outputs[start:], free_tiles, strict=False)
        c.store([(x, tile, *position) for (x, position), tile in remaining])


def _run_chunk(c: _Chunk) -> None:
    """Runs both phases of a chunk."""
    refs = c.refs
    diagonal, below, weights, key_weights = _blocks_and_weights(c)
    diagonal, below = _scores_and_dh_v(c, (diagonal, below))
    # Waits because the previous chunk stores its gradients from the shared memory of P and dP.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if refs.tiles_empty is not None:
        pl.when(c.index > 0)(lambda: plgpu.barrier_wait(refs.tiles_empty))
    half_sums = _write_below(c, below)
    _write_diagonal(c, diagonal)
    plgpu.commit_smem()
    products.acquire(refs.tiles_full, refs.tiles_empty)
    zeros = products.zeros(WG_ROWS, c.p.DHQK)
    total = products.zeros(WG_ROWS, layout=BY_ROWS)
    step = functools.partial(_gradient_step, c, key_weights)
    total, *gradients = loop(c.phases["gradients"].repeats, step, (total, zeros, zeros))
    refs.inner_C_dC.at[c.head, c.chunk, c.tile_rows][...] = total

    @pl.when(c.wg == 1)
    def add_halves():
        earlier = block(c.chunk * 2 + c.earlier, WG_ROWS)
        other = load_by_rows(refs.tile_sums.per_query.at[:, c.later], c.head, earlier)
        refs.tile_sums.per_query.at[c.head, c.earlier, c.rows][...] = half_sums + other

    inter = _weighted(c, gradients, weights, diagonal.vectors[3], key_weights)
    _store_dq_and_dk(c, inter, aligned(diagonal.row, WG_ROWS))


def chunk_gradients(x: Operands, *, call: Launch) -> ChunkGradients:
    """Runs the stage: ``stages/chunk_gradients.py``. The sums of W are in tiles of 64 steps."""
    p, g = call.problem, x.gates.per_step()
    normalise = x.normaliser_gradients.vecInvDen is not None
    y = persistent_call(
        _Kernel,
        "chunk_gradients",
        x,
        call,
        gradient_shapes(x, p, column_blocks=1, inner_parts=CHUNK) | {"tile_sums": w_sum_shapes(p)},
        call.tiles.scratch(p, x.matQ.dtype, normalise),
        **gradient_operands(x),
        vecE=g.vecE,
        vecU=g.vecU,
    )
    # One sum over everything, because XLA runs it as one kernel.
    inner_n_dn = weighted(x.vecDeltaN_states, x.vecN_states)
    inner_states = jnp.concatenate([y["inner_C_dC"], inner_n_dn], axis=-1)
    return ChunkGradients(gradients_of(x, y, inner_states), y["tile_sums"])


@dataclasses.dataclass(frozen=True)
class ChunkGradientsTiles(RingTiles):
    def items(self, p: Problem) -> int:
        return p.BNH * p.NC

    def scratch(self, p: Problem, dtype, normalise=True) -> dict[str, Any]:
        tiles = functools.partial(shared_tiles, dtype=dtype, atom=atom_columns(p))
        depth = _tile_columns(p)
        parts = blocks_over(p.DHQK, depth)
        k_stages = 2 if p.DHQK <= 64 else 1  # chunks whose k is in shared memory
        P_blocks = tiles(3 * WG_ROWS, WG_ROWS)
        sums = plgpu.SMEM((2, WG_ROWS * depth * dtype.itemsize // 4), jnp.float32)
        return {
            # Columns of q, v or dh, or of a state, which has up to 128 rows.
            "tiles_smem": tiles(self.num_stages, CHUNK, depth),
            "k_smem": tiles(k_stages, parts * CHUNK, depth),
            # Blocks of 64 x 64, transposed: block s + t has the keys of block s and the queries of
            # t, numbered in processing order.
            "P_smem": P_blocks,
            "dP_smem": P_blocks,
            # Per warpgroup a tile of an output, or sums over queries in the same place.
            "staging_smem": plgpu.RefUnion(tiles(2, WG_ROWS, depth), sums),
            "vectors_smem": plgpu.SMEM((k_stages, 4, CHUNK), jnp.float32),  # see _E_HI
            "barriers": ring_barriers(self.num_stages, copies=1),
            "k_barriers": ring_barriers(k_stages, copies=parts + 3 + normalise),
            # P and dP are written, and so are the sums that warpgroup 0 hands to warpgroup 1.
            "tiles_full": plgpu.Barrier(num_arrivals=2, num_barriers=1),
            # With one stage of k both warpgroups wait for the next k anyway before they write.
            "tiles_empty": plgpu.Barrier(num_arrivals=2, num_barriers=1) if k_stages > 1 else None,
        }

    @classmethod
    def candidates(cls, p: Problem, kernel: KernelSpec) -> Iterable[Self]:
        """At DHQK 128, six stages: more would leave spilled registers too little L1."""
        for num_stages in range(7 if p.DHQK <= 64 else 6, 3, -1):
            yield cls(num_stages, kernel.gpu.sms)

    def divides(self, p: Problem) -> bool:
        """A warpgroup has registers for 64 x 128 elements of dq and of dk.

        A repeat of the phase "gradients" holds four slots.
        """
        return p.L == CHUNK and p.DHQK <= 128 and self.num_stages >= 4
