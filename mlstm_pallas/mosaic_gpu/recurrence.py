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
    mosaic_call,
    plgpu,
    shared_bytes,
    shared_tiles,
)
from mlstm_pallas.mosaic_gpu.limits import (
    HEADS,
    HopperTiles,
)
from mlstm_pallas.mosaic_gpu.products import BY_LANES, SUM_SCRATCH
from mlstm_pallas.mosaic_gpu.tile_copies import head_of
from mlstm_pallas.problem import Problem
from mlstm_pallas.splits import split_states
from mlstm_pallas.stage import Launch, largest_rows
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs
from mlstm_pallas.stages.split_products import Operands
from mlstm_pallas.tiles import blocks, divide, loop, remainder

STEPS, COLUMNS = 64, 128  # steps per tile, and columns of X per CTA if they divide DHHV
H_STAGES = 3  # tiles of h in shared memory
# Shorter or fewer splits gain less than the second launch and joining their sums cost.
MIN_SPLIT_STEPS, MIN_SPLITS, MAX_SPLITS = 1024, 4, 16


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


class _Operands(NamedTuple):
    """Inputs of a recurrence."""

    a: Any  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    b: Any  # (B * NH, S, DHHV) or (B, S, NH, DHHV)
    r: Any  # (B * NH, S), may be absent
    h: Any  # as b, may be absent
    gamma: Any  # (B * NH, NC)
    X_initial: Any  # (B * NH * splits, DHHV, DHQK) transposed, may be absent
    x_initial: Any  # (B * NH * splits, DHQK), may be absent


@dataclasses.dataclass(frozen=True)
class _Recurrence:
    """A recurrence, as the warpgroup of a block of X sees it."""

    x: _Operands  # its a, b and h are those of the head
    out: Any  # RecurrenceOutputs
    p: Problem
    rows: int
    backward: bool
    splits: Splits
    owns_x: bool
    wg: Any
    head: Any
    split: Any
    of_rows: Any  # the CTA's rows of X
    of_columns: Any  # the CTA's columns of X
    part: Any  # which 64 columns of X the warpgroup has
    X_columns: Any  # these columns
    tile_columns: Any  # these columns in a tile of b or h
    x_rows: Any  # 64 rows of x
    x_part: Any  # these rows in a tile of a
    a_smem: Any  # (stages, 64, rows)
    b_smem: Any  # (stages, 64, 128)
    weights_smem: Any  # (stages, 64) float32, None without r
    h_smem: Any  # (H_STAGES, 64, 128), None if no recurrence has an h
    out_smem: Any  # (warpgroups, 2, 64, 64), None if X is not stored
    sum_smem: Any  # (warpgroups, SUM_SCRATCH) float32, None if no recurrence has an x
    barriers: Any  # of the ring of operands
    h_barriers: Any  # of the ring of tiles of h, None if no recurrence has an h

    @property
    def tiles_of_chunk(self):
        return self.p.L // STEPS

    @property
    def num_chunks(self):
        """Chunks per split."""
        return self.p.NC // self.splits.of_sequence

    def chunk(self, index):
        index = self.num_chunks - 1 - index if self.backward else index
        of_sequence = self.splits.of_sequence
        return index if of_sequence == 1 else self.split * self.num_chunks + index

    def steps(self, step):
        n = self.tiles_of_chunk
        return block(self.chunk(divide(step, n)) * n + remainder(step, n), STEPS)

    def copy(self, step, copy):
        steps = self.steps(step)
        copy(self.x.a.at[steps, self.of_rows], self.a_smem)
        copy(self.x.b.at[steps, self.of_columns], self.b_smem)
        if self.x.r is not None:
            copy(self.x.r.at[self.head, steps], self.weights_smem)

    def copy_h(self, step, copy):
        copy(self.x.h.at[self.steps(step), self.of_columns], self.h_smem)

    def left(self, slot):
        """Returns the transposed tile of b, (64 columns, 64 steps), scaled if there are weights."""
        bT = self.b_smem.at[slot, :, self.tile_columns].T
        if self.weights_smem is None:
            return bT
        weights = across_rows(load(self.weights_smem.at[slot], BY_COLUMNS))
        return (load(bT).astype(jnp.float32) * weights).astype(bT.dtype)

    def store_inner(self, ring, h_ring, step, tile):
        """Stores the sums of b h over the warpgroup's columns, for the steps of a tile."""
        slot, h_slot = ring.slot(step), h_ring.wait(step)
        tiles = self.b_smem.at[slot], self.h_smem.at[h_slot]
        b, h = (load(x.at[:, self.tile_columns]).astype(jnp.float32) for x in tiles)
        h_ring.release(step)
        sums = products.sum_over_columns(b * h)
        self.out.inner.at[self.head, self.part, block(tile, STEPS)][...] = sums

    def store_state(self, index, at, XT):
        """Stores X before chunk ``at``, the index-th chunk in the order of the recurrence."""
        n = self.rows // WG_ROWS
        for x in range(n):
            tile = self.out_smem.at[self.wg, remainder(index * n + x, 2)]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            products.store(tile.T, XT[:, x * WG_ROWS : (x + 1) * WG_ROWS].astype(tile.dtype))
            plgpu.commit_smem()
            rows = block(lax.axis_index("rows") * n + x, WG_ROWS)
            plgpu.copy_smem_to_gmem(tile, self.out.X.at[self.head, at, rows, self.X_columns])

    def weighted(self, slot):
        """Loads a tile of a, (64 steps, 64 rows of x), and scales its steps by r."""
        a = load(self.a_smem.at[slot, :, self.x_part]).astype(jnp.float32)
        return a * across_columns(load(self.weights_smem.at[slot], BY_ROWS))

    def once(self, store):
        """Calls ``store`` in one warpgroup only if both have the same x: with blocks of 64 rows."""
        if self.rows == WG_ROWS:
            pl.when(self.wg == 0)(store)
        else:
            store()

    def join(self, ring, h_ring, index, carry):
        """Stores X before a chunk, and adds the chunk; carry: X^T, x and the chunk's gamma."""
        n = self.tiles_of_chunk
        unrolled = 2 - n % 2  # steps whose left operands have registers of their own
        XT, vector, decay = carry
        at, last = self.chunk(index), np.int32(self.num_chunks - 1)
        following = self.x.gamma[self.head, self.chunk(lax.min(index + 1, last))]
        if self.out.X is not None:
            self.store_state(index, at, XT)

        def add(accumulator):
            def some(i, total):
                for x in range(unrolled):
                    step = index * n + i * unrolled + x
                    slot = ring.wait(step)
                    products.add(accumulator, self.left(slot), self.a_smem.at[slot])
                    if total is not None:
                        total += self.weighted(slot)
                    products.wait(1)
                    release = functools.partial(ring.release, step - 1)
                    if x == 0:
                        pl.when(i > 0)(release)
                    else:
                        release()
                    if h_ring is not None:
                        self.store_inner(ring, h_ring, step, at * n + i * unrolled + x)
                        h_ring.refill(step)
                    pl.when(step > 0)(functools.partial(ring.refill, step - 1))
                return total

            total = products.zeros(WG_ROWS, WG_ROWS) if self.owns_x else None
            total = loop(n // unrolled, some, total)
            products.wait(0)
            ring.release((index + 1) * n - 1)
            return total

        if not self.owns_x:
            (XT,) = products.onto(add, XT * decay)
            return XT, None, following
        if self.out.x is not None:

            def store_x():
                self.out.x.at[self.head, at, self.x_rows][...] = vector

            self.once(store_x)
        # Only ``all_from_zeros`` returns other values beside the accumulators.
        total, added = products.all_from_zeros(add, (WG_ROWS, self.rows))
        sums = products.sum_over_rows(total, self.sum_smem.at[self.wg])
        return XT * decay + added, vector * decay + sums, following

    def initial(self):
        """X^T and x before the first chunk."""
        x = self.x
        at = self.head * self.splits.of_sequence + self.split
        if x.X_initial is None:
            XT = products.zeros(WG_ROWS, self.rows)
        else:
            XT = load(x.X_initial.at[at, self.X_columns, self.of_rows], optimized=False)
        if not self.owns_x:
            return XT, None
        if x.x_initial is None:
            return XT, plgpu.layout_cast(jnp.zeros((WG_ROWS,), jnp.float32), BY_LANES)
        return XT, load(x.x_initial.at[at, self.x_rows], BY_LANES, optimized=False)

    def store_last(self, XT, vector):
        """Stores X and x after the last chunk, or with splits.sums after every split."""
        out, splits = self.out, self.splits

        def store(index):
            if out.X_last is not None:
                out.X_last[index, self.X_columns, self.of_rows] = XT
            if vector is not None:

                def store_x():
                    out.x_last.at[index, self.x_rows][...] = vector

                self.once(store_x)

        if splits.sums:
            store(self.head * splits.of_head + (self.split - splits.first(self.backward)))
        elif splits.of_sequence == 1:
            store(self.head)
        else:
            last = 0 if self.backward else splits.of_sequence - 1
            pl.when(self.split == last)(lambda: store(self.head))

    def run(self, num_stages, reads_h):
        x = self.x
        total, readers = self.num_chunks * self.tiles_of_chunk, self.b_smem.shape[-1] // WG_ROWS
        ring, h_ring = (
            CopyRing(self.barriers, num_stages, total, self.copy, readers=readers),
            None,
        )
        rings = [ring]
        if reads_h:
            h_ring = CopyRing(self.h_barriers, H_STAGES, total, self.copy_h, readers=readers)
            rings.append(h_ring)
        for y in rings:
            y.prologue()
        gamma = x.gamma[self.head, self.chunk(np.int32(0))]
        step = functools.partial(self.join, ring, h_ring)
        XT, vector, _ = loop(self.num_chunks, step, (*self.initial(), gamma))
        self.store_last(XT, vector)
        plgpu.wait_smem_to_gmem(0)
        for y in rings:
            y.epilogue()


def _kernel(
    operands: Sequence[_Operands],
    outputs: Sequence[RecurrenceOutputs],
    *,
    p: Problem,
    rows: int,
    backward: Sequence[bool],
    splits: Splits,
    num_stages: int,
    **shared: Any,
) -> None:
    wg, index, columns = lax.axis_index("wg"), lax.axis_index("head"), shared["b_smem"].shape[-1]
    blocks_of_X = block(lax.axis_index("rows"), rows), block(lax.axis_index("columns"), columns)
    part = lax.axis_index("columns") * (columns // WG_ROWS) + wg
    x_part = wg if rows > WG_ROWS else 0
    x_rows = block(lax.axis_index("rows") * (rows // WG_ROWS) + x_part, WG_ROWS)
    of_wg = part, block(part, WG_ROWS), block(wg, WG_ROWS), x_rows, block(x_part, WG_ROWS)
    head = remainder(index, p.BNH * splits.of_head)
    split: Any = np.int32(0)
    if splits.of_head > 1:
        head, split = divide(head, splits.of_head), remainder(head, splits.of_head)

    def run(j, first):
        x, out = operands[j], outputs[j]
        reads_h, owns_x = first and x.h is not None, first and out.x_last is not None
        a, b = head_of(x.a, head, p), head_of(x.b, head, p)
        x = x._replace(a=a, b=b, h=head_of(x.h, head, p) if reads_h else None)
        place = wg, head, split + splits.first(backward[j]), *blocks_of_X, *of_wg
        statics = p, rows, backward[j], splits, owns_x
        _Recurrence(x, out, *statics, *place, **shared).run(num_stages, reads_h)

    for j, (x, out) in enumerate(zip(operands, outputs, strict=True)):
        here, axis = divide(index, p.BNH * splits.of_head) == j, ""
        if x.h is not None and rows < p.DHQK:
            axis = "rows"
        elif out.x_last is not None and columns < p.DHHV:
            axis = "columns"
        if not axis:
            pl.when(here)(functools.partial(run, j, True))
            continue
        for first in (True, False):  # so that the loop over steps has no branch
            firsts = (lax.axis_index(axis) == 0) == first
            pl.when(here & firsts)(functools.partial(run, j, first))


def scratch(
    rows: int,
    columns: int,
    num_stages: int,
    dtype: Any,
    *,
    weighted: bool,
    has_h: bool = False,
    has_x: bool = False,
    stores_X: bool = True,
) -> dict[str, Any]:
    """Shared memory of the kernel, for blocks of X with these numbers of rows and columns."""
    tiles, readers = functools.partial(shared_tiles, dtype=dtype), columns // WG_ROWS
    return {
        "a_smem": tiles(num_stages, STEPS, rows),
        "b_smem": tiles(num_stages, STEPS, columns),
        "weights_smem": plgpu.SMEM((num_stages, STEPS), jnp.float32) if weighted else None,
        "h_smem": tiles(H_STAGES, STEPS, columns) if has_h else None,
        "out_smem": tiles(readers, 2, WG_ROWS, WG_ROWS) if stores_X else None,
        "sum_smem": plgpu.SMEM((readers, SUM_SCRATCH), jnp.float32) if has_x else None,
        "barriers": ring_barriers(num_stages, copies=3 if weighted else 2, readers=readers),
        "h_barriers": ring_barriers(H_STAGES, copies=1, readers=readers) if has_h else None,
    }


def _launch(
    name: str, each: Sequence[Recurrence], splits: Splits, call: Launch
) -> list[RecurrenceOutputs]:
    """One launch; X_initial and X_last are transposed, and each split has an X_initial."""
    p, dtype, num_stages = call.problem, each[0].a.dtype, call.tiles.num_stages
    weighted = each[0].r is not None
    has_h, has_x = (any(getattr(x, y) is not None for x in each) for y in ("h", "x_initial"))
    if any((x.r is not None) != weighted for x in each) or (has_x and not weighted):
        raise NotImplementedError(
            f"{name} has r in some of its recurrences alone, or x without r, expected r in all or "
            "in none"
        )
    initial = [(None, None) if splits.sums else (x.X_initial, x.x_initial) for x in each]
    operands = [
        _Operands(x.a, x.b, x.r, x.h, x.gamma, *y) for x, y in zip(each, initial, strict=True)
    ]
    lasts = p.BNH * (splits.of_head if splits.sums else 1)
    X = jax.ShapeDtypeStruct((p.BNH, p.NC, p.DHQK, p.DHHV), dtype)
    shapes = dict(
        X=None if splits.sums else X,
        X_last=float32(lasts, p.DHHV, p.DHQK),
        x=None if splits.sums else float32(p.BNH, p.NC, p.DHQK),
        x_last=float32(lasts, p.DHQK),
        inner=float32(p.BNH, blocks(p.DHHV, WG_ROWS), p.S),
    )
    outputs = []
    for y in each:
        absent = [] if y.return_last else ["X_last"]
        absent += ["x", "x_last"] if y.x_initial is None else []
        absent += ["inner"] if y.h is None else []
        outputs.append(RecurrenceOutputs(**shapes | dict.fromkeys(absent)))
    rows, columns = call.tiles.state_rows, call.tiles.state_columns
    results: list[RecurrenceOutputs] = mosaic_call(
        functools.partial(
            _kernel,
            p=p,
            rows=rows,
            backward=tuple(x.backward for x in each),
            splits=splits,
            num_stages=num_stages,
        ),
        name=name,
        grid=dict(
            zip(
                ("head", "rows", "columns"),
                (len(each) * p.BNH * splits.of_head, *call.tiles.grid(p)[1:]),
                strict=True,
            )
        ),
        warpgroups=columns // WG_ROWS,
        outputs={"outputs": outputs},
        scratch=scratch(
            *(rows, columns, num_stages, dtype),
            weighted=weighted,
            has_h=has_h,
            has_x=has_x,
            stores_X=not splits.sums,
        ),
        interpret=call.interpret,
    )(operands=operands)["outputs"]
    return results


def _sums_of_splits(
    name: str, each: Sequence[Recurrence], splits: Splits, call: Launch
) -> list[tuple[jax.Array, Any]]:
    """What splits add to X and to x.

    They are (B * NH, splits.of_head, DHHV, DHQK), transposed, and (B * NH, splits.of_head, DHQK).
    """
    each = [dataclasses.replace(x, h=None, return_last=True) for x in each]
    outputs = _launch(name, each, splits, call)

    def of_heads(x):
        return x.reshape(-1, splits.of_head, *x.shape[1:])

    return [(of_heads(y.X_last), jax.tree.map(of_heads, y.x_last)) for y in outputs]


def _from_splits(
    x: Recurrence, added: tuple[jax.Array, Any], XT_initial: jax.Array | None
) -> Recurrence:
    """The recurrence with the states before every split, from what splits add."""
    of_X, of_x = added
    states = functools.partial(split_states, gamma=x.gamma, backward=x.backward)
    x = dataclasses.replace(x, X_initial=states(of_X, initial=XT_initial))
    if x.x_initial is None:
        return x
    vectors = states(of_x[..., None], initial=x.x_initial[..., None])
    return dataclasses.replace(x, x_initial=vectors[..., 0])


def recurrences(name: str, *each: Recurrence, call: Launch) -> list[RecurrenceOutputs]:
    """``recurrences`` of stages/recurrence.py, in one launch, or in two with splits."""
    num_splits = call.tiles.num_splits
    initial = [None if x.X_initial is None else x.X_initial.mT for x in each]
    if num_splits == 1:
        each = tuple(
            dataclasses.replace(x, X_initial=X) for x, X in zip(each, initial, strict=True)
        )
    else:
        of_sums = Splits(num_splits, sums=True, all=False)
        added = _sums_of_splits("split_products", each, of_sums, call)
        each = tuple(map(_from_splits, each, added, initial))
    return [
        x._replace(
            inner=None if x.inner is None else jnp.sum(x.inner, axis=1),
            X_last=None if x.X_last is None else x.X_last.mT,
        )
        for x in _launch(name, each, Splits(num_splits), call)
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
    return _sums_of_splits("split_products", [whole], splits, call)[0][0].mT


def _block_columns(p: Problem) -> int:
    """The most columns of X per CTA; 0 if no such blocks fit."""
    return next((x for x in (COLUMNS, WG_ROWS) if p.DHHV % x == 0), 0)


def _num_ctas(rows: int, p: Problem) -> int:
    """CTAs of one recurrence without splits; 0 if no such blocks fit."""
    columns = _block_columns(p)
    return p.BNH * (p.DHQK // rows) * (p.DHHV // columns) if rows and columns else 0


@dataclasses.dataclass(frozen=True)
class Tiles(HopperTiles):
    """The block of X per CTA, which has one warpgroup per 64 columns."""

    state_rows: int
    state_columns: int
    num_stages: int
    num_splits: int = 1

    def grid(self, p: Problem, *, recurrences: int = 1, **asked: Any) -> tuple[int, ...]:
        rows, columns = blocks(p.DHQK, self.state_rows), blocks(p.DHHV, self.state_columns)
        return recurrences * p.BNH, rows, columns

    def shared_bytes(
        self,
        p: Problem,
        dtype: Any,
        *,
        has_h: bool = False,
        has_x: bool = False,
        stores_X: bool = True,
        **asked: Any,
    ) -> int:
        sizes = self.state_rows, self.state_columns, self.num_stages, dtype
        shapes = scratch(*sizes, weighted=True, has_h=has_h, has_x=has_x, stores_X=stores_X)
        return shared_bytes(shapes)

    @classmethod
    def candidates(
        cls, p: Problem, gpu: Gpu, *, recurrences: int = 1, has_x: bool = False, **asked: Any
    ) -> Iterable[Self]:
        """The most rows per block with which the launch fills the GPU; else splits."""
        columns = _block_columns(p)
        most = columns if has_x else 256

        def rows_of(size):
            return largest_rows(p.DHQK, min(size, most))

        rows = next(
            (x for x in map(rows_of, (256, 128)) if gpu.filled_by(recurrences * _num_ctas(x, p))),
            rows_of(64),
        )
        if not rows or not columns:
            return
        ctas = recurrences * _num_ctas(rows, p)
        filling = min(gpu.sms // max(ctas, 1), p.S // MIN_SPLIT_STEPS, MAX_SPLITS, p.NC & -p.NC)
        splits = 1 << (filling.bit_length() - 1) if filling >= MIN_SPLITS else 1
        if rows == WG_ROWS and 2 * ctas * splits <= gpu.sms:
            columns = WG_ROWS  # twice the CTAs, whose warpgroups do not wait for each other
        yield cls(rows, columns, 6 if has_x and rows == WG_ROWS else 4, splits)

    def divides(self, p: Problem, *, has_x: bool = False, **asked: Any) -> bool:
        rows, columns = self.state_rows, self.state_columns
        if (
            rows % WG_ROWS
            or p.DHQK % rows
            or rows > 256
            or p.L % STEPS
            or (has_x and rows > columns)
        ):
            return False
        # A slot becomes free while the next step's product runs, so a ring needs two.
        if columns not in (WG_ROWS, COLUMNS) or p.DHHV % columns or self.num_stages < 2:
            return False
        return p.NC % self.num_splits == 0 and 2 * p.BNH * self.num_splits <= HEADS
