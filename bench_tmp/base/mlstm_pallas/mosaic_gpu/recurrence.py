"""The recurrences of ``stages/recurrence.py`` on Mosaic GPU.

Grid (B * NH times the number of recurrences and of splits, DHQK / rows, DHHV / 128). A CTA owns up
to 256 rows and 128 columns of X. It has two warpgroups, and each keeps 64 columns transposed in
registers. If CTAs are few, or 128 does not divide DHHV, a CTA has 64 columns and one warpgroup. The
warpgroups share the copying, num_stages tiles of 64 steps ahead.

If that makes too few CTAs, the sequence is cut into splits. A preceding launch of the same kernel
computes each split's contribution to X and stores no per-chunk states (splits.py).

With r the left operand of the transposed product is r b, scaled in registers, because (r b)^T a =
b^T (r a) and a tile of b has only 64 columns per warpgroup. The operand of a step is computed while
the product of the preceding step runs.

A recurrence with an h also computes the inner products b_t . h_t, 64 columns per warpgroup: while
the product of a step runs, the warpgroup multiplies its tile of b with the tile of h. The CTAs of
the first row block do this. The tiles of h have a ring of their own.

A recurrence with an x also sums r_t a_t while products run, 64 columns of a per warpgroup. The CTAs
of the first column block do this, in blocks of at most 64 rows per warpgroup.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.gpu import Gpu
from mlstm_pallas.mosaic_gpu import products
from mlstm_pallas.mosaic_gpu.copy_ring import CopyRing, ring_barriers
from mlstm_pallas.mosaic_gpu.fragments import across_columns, across_rows
from mlstm_pallas.mosaic_gpu.launch import (
    BY_COLUMNS,
    BY_ROWS,
    WG_ROWS,
    block,
    float32,
    load,
    load_float32,
    mosaic_call,
    plgpu,
    shared_tiles,
)
from mlstm_pallas.mosaic_gpu.limits import HEADS, HopperTiles
from mlstm_pallas.mosaic_gpu.products import BY_LANES, SUM_SCRATCH
from mlstm_pallas.mosaic_gpu.tile_copies import head_of
from mlstm_pallas.problem import Problem
from mlstm_pallas.splits import heads_of_splits, split_states, splits_of
from mlstm_pallas.stage import Launch, largest_rows
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs
from mlstm_pallas.stages.split_products import Operands
from mlstm_pallas.tiles import blocks, divide, loop, remainder

STEPS, COLUMNS = 64, 128  # steps per tile, and columns of X per CTA if they divide DHHV
H_STAGES = 3  # tiles of h in shared memory
MIN_SPLIT_STEPS = 1024  # shorter splits gain less than the second launch and their sums cost


class Splits(NamedTuple):
    """The splits of a launch.

    Attributes:
      of_sequence: the number of equal parts of a sequence, each of whole chunks.
      sums: whether the launch computes what each split adds, starting from zeros.
      all: whether it computes that also for the split that no other split follows.
    """

    of_sequence: int = 1
    sums: bool = False
    all: bool = True

    @property
    def of_head(self) -> int:
        """Splits per head in the launch."""
        return self.of_sequence - (not self.all)

    def first(self, backward: bool) -> int:
        return int(backward and not self.all)

    def last_state(self, head, split, backward: bool) -> tuple[Any, Any]:
        """Where the last state of a split is stored, and whether it is."""
        if self.sums:
            return head * self.of_head + (split - self.first(backward)), True
        return head, self.of_sequence == 1 or split == (0 if backward else self.of_sequence - 1)


def _store_state(index, XT, X_gmem, X_columns, tiles_smem):
    """Stores X^T, (64, rows), before the index-th chunk in the order of the recurrence.

    X_gmem: (DHQK, DHHV); tiles_smem: (2, 64, 64).
    """
    n = XT.shape[1] // WG_ROWS
    for j in range(n):
        tile = tiles_smem.at[remainder(index * n + j, 2)]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        products.store(tile.T, XT[:, j * WG_ROWS : (j + 1) * WG_ROWS].astype(tile.dtype))
        plgpu.commit_smem()
        at = block(lax.axis_index("rows") * n + j, WG_ROWS)
        plgpu.copy_smem_to_gmem(tile, X_gmem.at[at, X_columns])


def _initial(x, at, X_columns, X_rows, x_rows):
    """X^T and x before the first chunk; x_rows None: x is not computed."""
    XT, vector = products.zeros(WG_ROWS, X_rows.size), None
    if x.X_initial is not None:
        XT = load(x.X_initial.at[at, X_columns, X_rows], optimized=False)
    if x_rows is not None and x.x_initial is None:
        vector = products.zeros(WG_ROWS, layout=BY_LANES)
    elif x_rows is not None:
        vector = load(x.x_initial.at[at, x_rows], BY_LANES, optimized=False)
    return XT, vector


def _store_x(vector, x_gmem, rows):
    """Stores 64 rows of x. The warpgroups of a block of 64 rows have the same ones."""

    @pl.when(rows > WG_ROWS or lax.axis_index("wg") == 0)
    def store():
        x_gmem[...] = vector


def _add_tiles(accumulator, first, n, ring, a_smem, left, scaled, meanwhile):
    """Adds left(slot) a of the tiles first to first + n - 1, and returns the sum of scaled(slot).

    scaled and meanwhile(step, tile) run while the tile's product does; None: they do not.
    """
    unrolled = 2 - n % 2  # steps whose left operands have registers of their own

    def some(i, total):
        for j in range(unrolled):
            step = first + i * unrolled + j
            slot = ring.wait(step)
            products.add(accumulator, left(slot), a_smem.at[slot])
            if scaled is not None:
                total += scaled(slot)
            products.wait(1)
            release = functools.partial(ring.release, step - 1)
            pl.when(j > 0 or i > 0)(release)
            if meanwhile is not None:
                meanwhile(step, i * unrolled + j)
            pl.when(step > 0)(functools.partial(ring.refill, step - 1))
        return total

    total = None if scaled is None else products.zeros(WG_ROWS, WG_ROWS)
    total = loop(n // unrolled, some, total)
    products.wait(0)
    ring.release(first + n - 1)
    return total


def _recurrence(
    x,  # a Recurrence whose a, b and h are of the head; X_initial is transposed, one per split
    out,  # RecurrenceOutputs
    *,
    p,
    splits,
    head,
    split,
    a_smem,  # (stages, 64, rows)
    b_smem,  # (stages, 64, columns), 128 or 64 of them, 64 per warpgroup
    weights_smem,  # (stages, 64) float32, None without r
    h_smem,  # (H_STAGES, 64, columns), None if no recurrence has an h
    out_smem,  # (warpgroups, 2, 64, 64), None if X is not stored
    sum_smem,  # (warpgroups, SUM_SCRATCH) float32, None if no recurrence has an x
    barriers,  # of the ring of operands
    h_barriers,  # of the ring of tiles of h, None if no recurrence has an h
):
    """A recurrence, as the warpgroup of 64 columns of a block of X runs it."""
    wg, rows, columns = lax.axis_index("wg"), a_smem.shape[-1], b_smem.shape[-1]
    readers, row_block, column_block = columns // WG_ROWS, *map(lax.axis_index, ("rows", "columns"))
    n = p.L // STEPS  # tiles per chunk
    num_chunks: Any = p.NC // splits.of_sequence  # per split
    if x.num_live is not None:
        num_chunks = x.num_live[head]
    of_rows, of_columns = block(row_block, rows), block(column_block, columns)
    part = column_block * readers + wg  # which 64 columns of X the warpgroup has
    X_columns, tile_columns = block(part, WG_ROWS), block(wg, WG_ROWS)
    x_part = wg if rows > WG_ROWS else 0  # which 64 rows of the block x is of
    x_rows = block(row_block * (rows // WG_ROWS) + x_part, WG_ROWS)
    x_columns = block(x_part, WG_ROWS)
    sums_x = out.x_last is not None

    def chunk_at(index):
        index = num_chunks - 1 - index if x.backward else index
        return index if splits.of_sequence == 1 else split * num_chunks + index

    def steps_at(step):
        return block(chunk_at(divide(step, n)) * n + remainder(step, n), STEPS)

    def copy_operands(step, copy):
        steps = steps_at(step)
        copy(x.a.at[steps, of_rows], a_smem)
        copy(x.b.at[steps, of_columns], b_smem)
        if x.r is not None:
            copy(x.r.at[head, steps], weights_smem)

    def copy_h(step, copy):
        copy(x.h.at[steps_at(step), of_columns], h_smem)

    total = num_chunks * n
    rings = [CopyRing(barriers, total, copy_operands, readers=readers)]
    if x.h is not None:
        rings.append(CopyRing(h_barriers, total, copy_h, readers=readers))
    ring, h_ring = rings[0], rings[-1]

    def left(slot):
        bT = b_smem.at[slot, :, tile_columns].T
        if weights_smem is None:
            return bT
        weights = across_rows(load(weights_smem.at[slot], BY_COLUMNS))
        return (load_float32(bT) * weights).astype(bT.dtype)

    def scaled(slot):
        """A tile of a, (64 steps, 64 rows of x), whose steps are scaled by r."""
        a = load_float32(a_smem.at[slot, :, x_columns])
        return a * across_columns(load(weights_smem.at[slot], BY_ROWS))

    def store_inner(first, step, tile):
        """Stores the sums of b h over the warpgroup's columns, for a tile of a chunk's steps."""
        tiles = b_smem.at[ring.slot(step)], h_smem.at[h_ring.wait(step)]
        b, h = (load_float32(y.at[:, tile_columns]) for y in tiles)
        h_ring.release(step)
        out.inner.at[head, part, block(first + tile, STEPS)][...] = products.sum_over_columns(b * h)
        h_ring.refill(step)

    def join(index, carry):
        """Stores X before a chunk, and adds the chunk; carry: X^T, x and the chunk's gamma."""
        XT, vector, decay = carry
        chunk = chunk_at(index)
        last = lax.convert_element_type(num_chunks - 1, np.int32)
        following = x.gamma[head, chunk_at(lax.min(index + 1, last))]
        if out.X is not None:
            _store_state(index, XT, out.X.at[head, chunk], X_columns, out_smem.at[wg])
        add = functools.partial(
            _add_tiles,
            first=index * n,
            n=n,
            ring=ring,
            a_smem=a_smem,
            left=left,
            scaled=scaled if sums_x else None,
            meanwhile=functools.partial(store_inner, chunk * n) if x.h is not None else None,
        )
        if not sums_x:
            (XT,) = products.onto(add, XT * decay)
            return XT, None, following
        if out.x is not None:
            _store_x(vector, out.x.at[head, chunk, x_rows], rows)
        # Only ``all_from_zeros`` returns other values beside the accumulators.
        total, added = products.all_from_zeros(add, (WG_ROWS, rows))
        sums = products.sum_over_rows(total, sum_smem.at[wg])
        return XT * decay + added, vector * decay + sums, following

    for y in rings:
        y.prologue()
    gamma, at = x.gamma[head, chunk_at(np.int32(0))], head * splits.of_sequence + split
    initial = _initial(x, at, X_columns, of_rows, x_rows if sums_x else None)
    XT, vector, _ = loop(num_chunks, join, (*initial, gamma))
    at, is_last = splits.last_state(head, split, x.backward)

    @pl.when(is_last)
    def store_last():
        if out.X_last is not None:
            out.X_last[at, X_columns, of_rows] = XT
        if sums_x:
            _store_x(vector, out.x_last.at[at, x_rows], rows)

    plgpu.wait_smem_to_gmem(0)
    for y in rings:
        y.epilogue()


def _kernel(each, outputs, *, p, splits, **shared):
    rows, columns = (shared[x].shape[-1] for x in ("a_smem", "b_smem"))
    index = lax.axis_index("head")
    head = remainder(index, p.BNH * splits.of_head)
    split: Any = np.int32(0)
    if splits.of_head > 1:
        head, split = divide(head, splits.of_head), remainder(head, splits.of_head)

    def run(x, out, first):
        a, b = head_of(x.a, head, p), head_of(x.b, head, p)
        h = head_of(x.h, head, p) if first and x.h is not None else None
        _recurrence(
            dataclasses.replace(x, a=a, b=b, h=h),
            out if first else out._replace(x_last=None),
            p=p,
            splits=splits,
            head=head,
            split=split + splits.first(x.backward),
            **shared,
        )

    for j, (x, out) in enumerate(zip(each, outputs, strict=True)):
        here, axis = divide(index, p.BNH * splits.of_head) == j, ""
        if x.h is not None and rows < p.DHQK:
            axis = "rows"
        elif out.x_last is not None and columns < p.DHHV:
            axis = "columns"
        if not axis:
            pl.when(here)(functools.partial(run, x, out, True))
            continue
        for first in (True, False):  # so that the loop over steps has no branch
            firsts = (lax.axis_index(axis) == 0) == first
            pl.when(here & firsts)(functools.partial(run, x, out, first))


def _launch(
    name: str, each: Sequence[Recurrence], splits: Splits, call: Launch
) -> list[RecurrenceOutputs]:
    """One launch of recurrences of which all have r or none has.

    X_initial and X_last are transposed, and each split has an X_initial.
    """
    p, dtype = call.problem, each[0].a.dtype
    weighted = each[0].r is not None
    has_h, has_x = (any(getattr(x, y) is not None for x in each) for y in ("h", "x_initial"))
    inputs = each
    if splits.sums:  # from zeros
        inputs = [dataclasses.replace(x, X_initial=None, x_initial=None) for x in each]
    lasts = p.BNH * (splits.of_head if splits.sums else 1)
    X = jax.ShapeDtypeStruct((p.BNH, p.NC, p.DHQK, p.DHHV), dtype)
    outputs = [
        RecurrenceOutputs(
            X=None if splits.sums else X,
            X_last=float32(lasts, p.DHHV, p.DHQK) if x.return_last else None,
            x=None if splits.sums or x.x_initial is None else float32(p.BNH, p.NC, p.DHQK),
            x_last=None if x.x_initial is None else float32(lasts, p.DHQK),
            inner=None if x.h is None else float32(p.BNH, blocks(p.DHHV, WG_ROWS), p.S),
        )
        for x in each
    ]
    heads, rows, columns = call.tiles.grid(p, recurrences=len(each))
    return mosaic_call(
        functools.partial(_kernel, p=p, splits=splits),
        name=name,
        grid={"head": heads * splits.of_head, "rows": rows, "columns": columns},
        warpgroups=call.tiles.state_columns // WG_ROWS,
        outputs={"outputs": outputs},
        scratch=call.tiles.scratch(
            p, dtype, weighted=weighted, has_h=has_h, has_x=has_x, stores_X=not splits.sums
        ),
        interpret=call.interpret,
    )(each=inputs)["outputs"]


def _sums_of_splits(
    each: Sequence[Recurrence], splits: Splits, call: Launch
) -> list[tuple[jax.Array, Any]]:
    """What splits add to X and to x.

    They are (B * NH, splits.of_head, DHHV, DHQK), transposed, and (B * NH, splits.of_head, DHQK).
    """
    each = [dataclasses.replace(x, h=None, return_last=True) for x in each]
    of_heads = functools.partial(heads_of_splits, num_splits=splits.of_head)
    outputs = _launch("split_products", each, splits, call)
    return [jax.tree.map(of_heads, (y.X_last, y.x_last)) for y in outputs]


def _from_splits(x: Recurrence, added: tuple[jax.Array, Any]) -> Recurrence:
    """The recurrence with the states before every split, from what splits add."""
    of_X, of_x = added
    states = functools.partial(split_states, gamma=x.gamma, backward=x.backward)
    x = dataclasses.replace(x, X_initial=states(of_X, initial=x.X_initial))
    if x.x_initial is None:
        return x
    vectors = states(of_x[..., None], initial=x.x_initial[..., None])
    return dataclasses.replace(x, x_initial=vectors[..., 0])


def recurrences(name: str, *each: Recurrence, call: Launch) -> list[RecurrenceOutputs]:
    """``recurrences`` of stages/recurrence.py, in one launch, or in two with splits."""
    num_splits = call.tiles.num_splits
    transposed = functools.partial(jax.tree.map, jnp.matrix_transpose)
    inputs = [dataclasses.replace(x, X_initial=transposed(x.X_initial)) for x in each]
    if num_splits > 1:  # splits run all their chunks
        inputs = [dataclasses.replace(x, num_live=None) for x in inputs]
        of_sums = Splits(num_splits, sums=True, all=False)
        added = _sums_of_splits(inputs, of_sums, call)
        inputs = [*map(_from_splits, inputs, added)]
    return [
        x._replace(
            inner=None if x.inner is None else jnp.sum(x.inner, axis=1),
            X_last=transposed(x.X_last),
        )
        for x in _launch(name, inputs, Splits(num_splits), call)
    ]


def split_products(
    x: Operands,
    *,
    num_splits: int,
    backward: bool = False,
    all_splits: bool = False,
    call: Launch,
) -> jax.Array:
    """Runs the stage: ``stages/split_products.py``."""
    p = call.problem.in_splits(num_splits)
    call = dataclasses.replace(call, problem=p)
    gamma = jnp.ones((p.BNH, num_splits), jnp.float32)
    whole = Recurrence(x.a, x.b, gamma, None, return_last=True, backward=backward, r=x.r)
    splits = Splits(num_splits, sums=True, all=all_splits)
    return _sums_of_splits([whole], splits, call)[0][0].mT


@dataclasses.dataclass(frozen=True)
class Tiles(HopperTiles):
    """The block of X per CTA, which has one warpgroup per 64 columns."""

    state_rows: int
    state_columns: int
    num_stages: int
    num_splits: int = 1

    def grid(self, p: Problem, *, recurrences: int = 1, **asked) -> tuple[int, ...]:
        rows, columns = blocks(p.DHQK, self.state_rows), blocks(p.DHHV, self.state_columns)
        return recurrences * p.BNH, rows, columns

    def scratch(
        self,
        p: Problem,
        dtype,
        *,
        weighted: bool = True,
        has_h: bool = False,
        has_x: bool = False,
        stores_X: bool = True,
        **asked,
    ) -> dict[str, Any]:
        tiles, n = functools.partial(shared_tiles, dtype=dtype), self.num_stages
        columns, readers = self.state_columns, self.state_columns // WG_ROWS
        return {
            "a_smem": tiles(n, STEPS, self.state_rows),
            "b_smem": tiles(n, STEPS, columns),
            "weights_smem": plgpu.SMEM((n, STEPS), jnp.float32) if weighted else None,
            "h_smem": tiles(H_STAGES, STEPS, columns) if has_h else None,
            "out_smem": tiles(readers, 2, WG_ROWS, WG_ROWS) if stores_X else None,
            "sum_smem": plgpu.SMEM((readers, SUM_SCRATCH), jnp.float32) if has_x else None,
            "barriers": ring_barriers(n, copies=3 if weighted else 2, readers=readers),
            "h_barriers": ring_barriers(H_STAGES, copies=1, readers=readers) if has_h else None,
        }

    @classmethod
    def candidates(
        cls, p: Problem, gpu: Gpu, *, recurrences: int = 1, has_x: bool = False, **asked
    ) -> Iterable[Self]:
        """The most rows per block with which the launch fills the GPU; else splits."""
        columns = next((x for x in (COLUMNS, WG_ROWS) if p.DHHV % x == 0), 0)
        if p.DHQK % WG_ROWS or not columns:
            return
        most = columns if has_x else 256
        sizes = [largest_rows(p.DHQK, min(size, most)) for size in (256, 128, WG_ROWS)]
        most_ctas = recurrences * p.BNH * p.DHQK * (p.DHHV // columns)  # with blocks of one row
        rows = next((x for x in sizes if gpu.filled_by(most_ctas // x)), sizes[-1])
        ctas = most_ctas // rows
        splits = splits_of(p.NC, min(gpu.sms // max(ctas, 1), p.S // MIN_SPLIT_STEPS))
        if rows == WG_ROWS and 2 * ctas * splits <= gpu.sms:
            columns = WG_ROWS  # twice the CTAs, whose warpgroups do not wait for each other
        yield cls(rows, columns, 6 if has_x and rows == WG_ROWS else 4, splits)

    def divides(self, p: Problem, *, has_x: bool = False, **asked) -> bool:
        rows, columns = self.state_rows, self.state_columns
        return (
            rows % WG_ROWS == p.DHQK % rows == p.DHHV % columns == p.L % STEPS == 0
            and rows <= (columns if has_x else 256)
            and columns in (WG_ROWS, COLUMNS)
            and self.num_stages >= 2  # a slot becomes free while the next step's product runs
            and p.NC % self.num_splits == 0
            and 2 * p.BNH * self.num_splits <= HEADS
        )
