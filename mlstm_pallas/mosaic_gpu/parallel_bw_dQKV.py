"""parallel_bw_dQKV on Mosaic GPU: the products of ``stages/parallel_bw_dQKV.py``.

An item of ``persistent.py`` is a block of 128 rows and siz_b_DHHV columns of dq, dk or dv, or 128
rows of the states for <C_c, dC_{c+1}>. The last block of a head may reach beyond it, where TMA
reads zeros and writes nothing. An item is a sequence of steps, each with one tile of the left
operand and one of the right operand. A producer copies the tiles num_stages steps ahead, across
items too. Two consumers have 64 rows each. The accumulator gets the product with the state,
which is then scaled, and after that the products with the tiles of P or dP. Between the two it is
read a part of its columns at a time, so that 168 registers per thread are enough.

128 x 256 is the largest item for which two warpgroups have registers. It reads three quarters of
what two items of 128 x 128 read, and the rate of the L2 limits this stage.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.normaliser import query_scale
from mlstm_pallas.formulas.tiles import blocks_over, fori, loop, rounded_up, weighted
from mlstm_pallas.launches.kernel_tiles import KernelSpec
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.mosaic_gpu.common import products
from mlstm_pallas.mosaic_gpu.common.copies import (
    CopyRing,
    copy_out,
    head_of,
    ring_barriers,
    starts_within,
    write_out,
)
from mlstm_pallas.mosaic_gpu.common.fragments import (
    across_columns,
    across_rows,
    load_by_rows,
)
from mlstm_pallas.mosaic_gpu.common.gradients import (
    gradient_operands,
    gradient_shapes,
    gradients_of,
)
from mlstm_pallas.mosaic_gpu.common.launch import (
    BY_COLUMNS,
    WG_ROWS,
    Ref,
    aligned,
    atom_columns,
    block,
    chunk_and_item,
    load,
    load_float32,
    plgpu,
    shared_tiles,
    unravel,
)
from mlstm_pallas.mosaic_gpu.common.limits import RingTiles
from mlstm_pallas.mosaic_gpu.common.persistent import PersistentKernel, persistent_call
from mlstm_pallas.mosaic_gpu.common.phases import Phase, Phases
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages.parallel_bw_dQKV import Gradients, Operands

ROWS = 128  # per item
DEPTH = 64  # columns that a step multiplies
FEW_ITEMS = 3  # per CTA

_DQ, _DK, _DV, _INNER = _ROLES = range(4)  # the output to which an item belongs
_PHASES = "states", "dotted", "vector", "scores"  # of an item; roles differ in which they have


class _Items(NamedTuple):
    """The items of a role per chunk, rows x columns."""

    rows: int
    columns: int


def _items(p: Problem, columns: int) -> list[_Items]:
    row_blocks = blocks_over(p.L, ROWS)
    qk_blocks, v_blocks = blocks_over(p.DHQK, columns), blocks_over(p.DHV, columns)
    return [
        _Items(row_blocks, qk_blocks),
        _Items(row_blocks, qk_blocks),
        _Items(row_blocks, v_blocks),
        _Items(blocks_over(p.DHQK, ROWS), 1),
    ]


def _items_per_chunk(roles: Sequence[_Items]) -> int:
    return sum(x.rows * x.columns for x in roles)


def _tile_steps(role: int, row, p: Problem) -> tuple[Any, Any]:
    """The number of steps with tiles of P and dP, and the first tile.

    Queries see the keys up to their own step, and keys see the queries from their own step on.
    """
    row_steps = ROWS // DEPTH
    if role == _INNER:
        return np.int32(0), np.int32(0)
    if (role == _DQ) != p.reverse:
        return (row + 1) * row_steps, np.int32(0)
    return p.L // DEPTH - row * row_steps, row * row_steps


class _Item(NamedTuple):
    head: Any
    chunk: Any
    role: Any
    row: Any
    column: Any
    num_tiles: Any  # of P or dP
    first_tile: Any  # the index in the chunk of the first one
    start: Any  # its first step, among all steps of the CTA
    first: Any = None  # the first step of each phase
    end: Any = None  # the first step behind it


class _References(NamedTuple):
    """None: absent. Shared memory and barriers: see ``ParallelBwDQKVTiles.scratch``."""

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
    matP: Ref  # (B * NH, S, L)
    matDeltaP: Ref  # (B * NH, S, L)
    matDeltaQ: Ref  # out, like matQ
    q_dot_dq_inter: Ref  # out (B * NH, column blocks, S)
    matDeltaK: Ref  # out, like matK
    k_dot_dk_inter: Ref  # out (B * NH, column blocks, S)
    matDeltaV: Ref  # out, like matV
    inner_C_dC: Ref  # out (B * NH, NC, whole blocks of DHQK), sums over the columns
    operands_smem: Ref
    out_smem: Ref
    barriers: Ref


class _Kernel(PersistentKernel):
    """Runs a CTA."""

    References = _References
    refs: _References
    tiles: "ParallelBwDQKVTiles"
    has_producer = True

    def __init__(self, *args) -> None:
        super().__init__(*args)
        refs = self.refs
        self.columns = self.tiles.siz_b_DHHV
        self.roles = _items(self.p, self.columns)
        self.steps_k, self.steps_v = (blocks_over(x, DEPTH) for x in (self.p.DHQK, self.p.DHV))
        self.parts = [slice(j, j + self.atom) for j in range(0, self.columns, self.atom)]
        self.ring = CopyRing(refs.barriers, None, None, has_producer=True)
        self.tile_rows = block(self.wg, WG_ROWS)
        left, right = refs.operands_smem
        self.left, self.left_transposed = left
        self.right, self.right_transposed, self.right_vector = right

    def in_chunk(self, x, item):
        return head_of(x, item.head, self.p).at[block(item.chunk, self.p.L)]

    def rows(self, item):
        """The warpgroup's rows of an item."""
        return aligned(item.row * ROWS + self.wg * WG_ROWS, WG_ROWS)

    def steps(self, item):
        """These rows in the sequence."""
        return aligned(item.chunk * self.p.L + self.rows(item).start, WG_ROWS)

    def item(self, index, step):
        index, items_per_chunk = self.item_of(index), _items_per_chunk(self.roles)
        chunks = self.p.BNH * self.p.NC
        # With inactive chunks their number is not static.
        few = items_per_chunk * chunks <= FEW_ITEMS * self.tiles.num_ctas and self.active is None
        chunk, x = chunk_and_item(index, chunks, items_per_chunk, few)
        head, chunk = self.head_and_chunk(chunk)
        item: Any = None
        start = 0
        for role, items in enumerate(self.roles):
            row, column = unravel(x - start, items.columns)
            # A CTA's long items of dk or dv follow short ones of dq.
            if few and (role in (_DK, _DV)) != self.p.reverse:
                row = items.rows - 1 - row
            position = head, chunk, np.int32(role), row, column
            candidate = _Item(*position, *_tile_steps(role, row, self.p), step)
            phases = _phases(self, role, candidate)
            first = {x: step + phases.first.get(x, 0) for x in _PHASES}
            candidate = candidate._replace(first=first, end=step + phases.num_steps)
            # The item is that of the last role whose items do not start behind it.
            select = functools.partial(jnp.where, x >= start)
            item = candidate if item is None else jax.tree.map(select, candidate, item)
            start += items.rows * items.columns
        return item

    def for_each_item(self, run):
        """Runs all items; returns the number of their steps."""

        def one(index, step):
            item = self.item(index, step)
            run(item)
            return item.end

        return loop(self.num_items, one, np.int32(0))

    def produce(self) -> None:
        def copy_item(item):
            for role in _ROLES:
                load = functools.partial(_phases(self, role, item).load, self.ring, item.start)
                pl.when(item.role == role)(load)

        self.ring.epilogue(self.for_each_item(copy_item))

    def consume(self) -> None:
        def run_item(item):
            is_inner = item.role == _INNER
            pl.when(is_inner)(functools.partial(_inner_C_dC, self, item))
            pl.when(~is_inner)(functools.partial(_gradient, self, item))

        self.for_each_item(run_item)
        refs = self.refs
        self.clear(refs.out_smem.at[self.wg, 0], refs.matDeltaQ, refs.matDeltaK, refs.matDeltaV)


def _copy_halves(copy, x, start, size: int, tile, *index) -> None:
    """Copies a tile in two, at multiples of 128 bytes, because every step has two copies."""
    half = size // 2
    for y in (0, half):
        copy(x.at[(pl.ds(start + y, half), *index)], tile, pl.ds(y, half))


class _Sources(NamedTuple):
    """An item of dq, dk or dv: weights (rows states + factor vectors) + scores others.

    dotted: q or k, whose inner products with the first summand are computed; only for dq and dk,
      like the vectors, n or dn. The factor is dz den for dq, 1 for dk.
    """

    rows: Any
    states: Any
    scores: Any
    others: Any
    dotted: Any = None
    vectors: Any = None


def _sources(refs, role: int) -> _Sources:
    q, k = refs.matQ, refs.matK
    if role == _DQ:
        return _Sources(
            refs.matDeltaH, refs.matC_states, refs.matDeltaP, k, dotted=q, vectors=refs.vecN_states
        )
    if role == _DK:
        return _Sources(
            refs.matV,
            refs.matDeltaC_states,
            refs.matDeltaP,
            q,
            dotted=k,
            vectors=refs.vecDeltaN_states,
        )
    return _Sources(k, refs.matDeltaC_states, refs.matP, refs.matDeltaH)


def _phases(cta: _Kernel, role: int, item: _Item) -> Phases:
    """The steps of an item. Each has a tile of the left operand and one of the right operand."""
    refs, left, right = cta.refs, cta.left, cta.right
    rows, columns = block(item.row, ROWS), block(item.column, cta.columns)
    state = item.head, item.chunk

    def both_states(j, copy):
        position = *state, rows, block(j, DEPTH)
        copy(refs.matC_states.at[position], left)
        copy(refs.matDeltaC_states.at[position], cta.right_transposed, slice(ROWS))

    if role == _INNER:
        return Phases(states=Phase(cta.steps_v, (both_states,)))
    x = _sources(refs, role)

    def state_operands(j, copy):
        depth = block(j, DEPTH)
        copy(cta.in_chunk(x.rows, item).at[rows, depth], left)
        if role == _DV:
            copy(x.states.at[(*state, depth, columns)], right)
        else:
            copy(x.states.at[(*state, columns, depth)], cta.right_transposed)

    def dotted(j, copy):
        start = rows.start + j * WG_ROWS
        _copy_halves(copy, cta.in_chunk(x.dotted, item), start, WG_ROWS, right, columns)

    def vector(_, copy):
        _copy_halves(copy, x.vectors.at[state], columns.start, cta.columns, cta.right_vector)

    def score_operands(j, copy):
        others, scores = block(item.first_tile + j, DEPTH), cta.in_chunk(x.scores, item)
        if role == _DQ:
            copy(scores.at[rows, others], left)
        else:
            copy(scores.at[others, rows], cta.left_transposed)
        copy(cta.in_chunk(x.others, item).at[others, columns], right)

    scores = Phase(item.num_tiles, (score_operands,))
    if role == _DV:
        return Phases(states=Phase(cta.steps_k, (state_operands,)), scores=scores)
    return Phases(
        states=Phase(cta.steps_v, (state_operands,)),
        dotted=Phase(2, (dotted,)),  # the queries or keys of each warpgroup
        vector=Phase(1, () if x.vectors is None else (vector,)),
        scores=scores,
    )


def _inner_C_dC(cta: _Kernel, item: _Item) -> None:
    ring = cta.ring

    def add(j, total):
        slot = ring.wait(item.start + j)
        C, dC = (load_float32(x.at[slot, cta.tile_rows]) for x in (cta.left, cta.right_transposed))
        ring.release(item.start + j)
        return total + weighted(dC, C, cta.p)

    total = loop(cta.steps_v, add, products.zeros(WG_ROWS, DEPTH))
    sums = products.sum_over_columns(total)
    cta.refs.inner_C_dC.at[item.head, item.chunk, cta.rows(item)][...] = sums


def _add_products(
    cta: _Kernel, accumulator, start, count, operands: Callable[[Any], Sequence[Any]]
) -> None:
    """Adds the products of operands(slot) over ``count`` steps."""

    @fori(count)
    def add(j):
        cta.ring.mma(
            start + j, lambda slot: products.add(accumulator, *operands(slot)), follows=j > 0
        )

    products.wait(0)
    cta.ring.release(start + count - 1)


def _scaled(cta: _Kernel, acc: Array, weights: Array) -> list[Array]:
    """The scaled accumulator by parts of its columns, because few registers are left."""
    factor = across_columns(weights, cta.atom)
    return [weighted(factor, acc[:, part], cta.p) for part in cta.parts]


def _scaled_with_sums(cta: _Kernel, item: _Item, weights: Array, dz_den: Array | None, acc: Array):
    """The inter-chunk part of dq or dk; stores its inner products with the queries or keys."""
    refs, ring, is_dq, vector = cta.refs, cta.ring, item.role == _DQ, item.first["vector"]
    has_vector = ~is_dq if refs.vecN_states is None else True
    parts = _scaled(cta, acc, weights)
    dotted = [item.first["dotted"] + x for x in range(2)]
    for step in dotted:
        ring.wait(step)
    vector_weights = weights
    if dz_den is not None:
        vector_weights = lax.cond(is_dq, lambda: weighted(weights, dz_den, cta.p), lambda: weights)

    def add_vector(*parts):
        slot = ring.wait(vector)
        rows = [
            across_rows(load(cta.right_vector.at[slot, part], BY_COLUMNS)) for part in cta.parts
        ]
        factor = across_columns(vector_weights, cta.atom)
        return [x + weighted(factor, y, cta.p) for x, y in zip(parts, rows, strict=True)]

    parts = lax.cond(has_vector, add_vector, lambda *parts: list(parts), *parts)
    slot = ring.slot(item.first["dotted"] + cta.wg)
    tiles = (load_float32(cta.right.at[slot, :, part]) for part in cta.parts)
    sums = [products.sum_over_columns(x * y) for x, y in zip(parts, tiles, strict=True)]
    inter = functools.reduce(jnp.add, sums)
    ring.release(*dotted)
    pl.when(has_vector)(lambda: ring.release(vector))
    for role, output in enumerate((refs.q_dot_dq_inter, refs.k_dot_dk_inter)):

        @pl.when(item.role == role)
        def store(output=output):
            output.at[item.head, item.column, cta.steps(item)][...] = inter

    return jnp.concatenate(parts, axis=1)


def _store(cta: _Kernel, item: _Item, acc: Array) -> None:
    refs, rows = cta.refs, cta.rows(item)
    for j, part in enumerate(cta.parts):
        tile, outputs = (
            refs.out_smem.at[cta.wg, j % 2],
            (refs.matDeltaQ, refs.matDeltaK, refs.matDeltaV),
        )
        columns = aligned(item.column * cta.columns + part.start, cta.atom)
        within = [starts_within((columns, cta.columns, x.shape[-1])) for x in outputs]
        # If the number of parts is odd, the previous item stored its last one from the same tile.
        pending = 1 if j else (len(cta.parts) + 1) % 2
        write_out(tile, acc[:, part], min(pending, *(x for _, x in within)))
        for role, (x, (where, _)) in enumerate(zip(outputs, within, strict=True)):
            to = cta.in_chunk(x, item).at[rows, columns]
            pl.when(item.role == role)(functools.partial(copy_out, tile, to, where))


def _gradient(cta: _Kernel, item: _Item) -> None:
    """Runs an item of dq, dk or dv, all in one body.

    A body for each takes 6,032 instructions and 40 s to lower and compile at 256/512, one for all
    4,680 and 26 s (jax 0.11.2, two cores).
    """
    refs, tile_rows = cta.refs, cta.tile_rows
    is_dq, is_dv = item.role == _DQ, item.role == _DV

    def plain(slot):
        return cta.left.at[slot, tile_rows], cta.right.at[slot]

    def times_transposed(slot):
        return cta.left.at[slot, tile_rows], cta.right_transposed.at[slot].T

    def transposed_times(slot):
        return cta.left_transposed.at[slot, :, tile_rows].T, cta.right.at[slot]

    def multiply_states(acc):
        add = functools.partial(_add_products, cta, acc, item.start)
        pl.when(is_dv)(lambda: add(cta.steps_k, plain))
        pl.when(~is_dv)(lambda: add(cta.steps_v, times_transposed))

    def multiply_scores(acc):
        add = functools.partial(_add_products, cta, acc, item.first["scores"], item.num_tiles)
        pl.when(is_dq)(lambda: add(plain))
        pl.when(~is_dq)(lambda: add(transposed_times))

    # Loaded before the product and used after it, so that their latency is hidden.
    query_weights, key_weights, inv_den, dz_den = (
        load_by_rows(x, item.head, cta.steps(item))
        for x in (refs.vecW, refs.vecAbar, refs.vecInvDen, refs.vecDzDen)
    )
    acc = products.from_zeros(multiply_states, WG_ROWS, cta.columns)
    weights = lax.cond(
        is_dq, lambda: query_scale(query_weights, cta.p.qk_scale, inv_den), lambda: key_weights
    )
    acc = lax.cond(
        is_dv,
        lambda acc: jnp.concatenate(_scaled(cta, acc, weights), axis=1),
        functools.partial(_scaled_with_sums, cta, item, weights, dz_den),
        acc,
    )
    (acc,) = products.onto(multiply_scores, acc)
    _store(cta, item, acc)


def parallel_bw_dQKV(x: Operands, *, call: Launch) -> Gradients:
    """Runs the stage: ``stages/parallel_bw_dQKV.py``."""
    p = call.problem
    column_blocks = blocks_over(p.DHQK, call.tiles.siz_b_DHHV)
    y = persistent_call(
        _Kernel,
        "parallel_bw_dQKV",
        x,
        call,
        gradient_shapes(x, p, column_blocks, rounded_up(p.DHQK, ROWS)),
        call.tiles.scratch(p, x.matQ.dtype),
        **gradient_operands(x),
        matP=x.scores.matP,
        matDeltaP=x.scores.matDeltaP,
    )
    inner_states = y["inner_C_dC"][..., : p.DHQK] + weighted(x.vecDeltaN_states, x.vecN_states)
    return gradients_of(x, y, inner_states)


def _columns(p: Problem) -> int:
    """The columns of an item, measured for heads of 160/320 to 384/640."""
    if p.DHQK % 256 == p.DHV % 256 == 0:
        return 256
    return 192 if p.DHQK <= 192 else 128


@dataclasses.dataclass(frozen=True)
class ParallelBwDQKVTiles(RingTiles):
    """siz_b_DHHV: columns of an item, of dv as well as of dq and dk."""

    siz_b_DHHV: int

    def items(self, p: Problem) -> int:
        return p.BNH * p.NC * _items_per_chunk(_items(p, self.siz_b_DHHV))

    def scratch(self, p: Problem, dtype) -> dict[str, Any]:
        columns, atom = self.siz_b_DHHV, atom_columns(p)
        tiles = functools.partial(shared_tiles, self.num_stages, dtype=dtype, atom=atom)
        # All shapes of a tile have equally many bytes, so a slot has the same place in all of them.
        left = tiles(ROWS, DEPTH), tiles(DEPTH, ROWS)
        vector = plgpu.SMEM((self.num_stages, DEPTH * columns * dtype.itemsize // 4), jnp.float32)
        right = tiles(DEPTH, columns), tiles(columns, DEPTH), vector
        return {
            "operands_smem": [plgpu.RefUnion(*left), plgpu.RefUnion(*right)],
            "out_smem": shared_tiles(2, 2, WG_ROWS, atom, dtype=dtype),  # per warpgroup
            "barriers": ring_barriers(self.num_stages, copies=2),
        }

    @classmethod
    def candidates(cls, p: Problem, kernel: KernelSpec) -> Iterable[Self]:
        for num_stages in range(3 if p.DHQK >= 512 else 4, 2, -1):
            yield cls(num_stages, kernel.gpu.sms, _columns(p))

    def divides(self, p: Problem) -> bool:
        """A warpgroup holds three slots at once, so with fewer stages the kernel would deadlock.

        A tile of dC, ROWS x DEPTH, lies in a slot of columns x DEPTH elements.
        """
        fits = self.siz_b_DHHV in (ROWS, 192, 256) and self.num_stages >= 3
        return fits and p.L % ROWS == 0
