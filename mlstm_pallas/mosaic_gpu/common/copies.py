"""Copies of tiles between global and shared memory, and rings of slots into which they run ahead.

wgmma reads tiles in groups of 8 rows, so a TMA copy of such a tile views its array as groups of 8
rows too. plgpu's copies refuse an array whose number of steps is no multiple of 8, so
``inline_mlir.py`` has the copies for such arrays. A tile within whole groups of the array is copied
at once. The last tile of a head, which reaches beyond them, is copied one group at a time, from and
to the rows as they are. A tile that is one swizzle atom wide is stored row by row, so one copy is
always enough. Reads beyond the array return zeros, and nothing is written there.

The steps of a sequence go through the slots of a ``CopyRing`` in order: step x uses slot x mod
num_slots. Each slot has two barriers. Its copies arrive on ``full``, and every reading warpgroup
arrives on ``empty`` when it has read the slot.

Which warpgroups issue the copies is a static choice. Shared: each reader issues the copies of its
share of the slots, so no warpgroup stalls more often than another. Dedicated: a further warpgroup,
number 2, calls ``load`` for every step. A CTA of two warpgroups has 255 registers per thread from
the launch on, and a CTA of three has 168.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.tiles import fori, remainder, rounded_up
from mlstm_pallas.mosaic_gpu.common import products
from mlstm_pallas.mosaic_gpu.common.inline_mlir import (
    GROUP,
    copy_steps,
    groups_alone,
    inline_load_transposed,
    inline_store_transposed,
)
from mlstm_pallas.mosaic_gpu.common.launch import load_float32, plgpu, unravel
from mlstm_pallas.mosaic_gpu.common.references import base, selected, tiling
from mlstm_pallas.problem.dimensions import Problem


@dataclasses.dataclass(frozen=True)
class StepsReference:
    """A reference to steps of a head, of an array whose number of steps is no multiple of 8.

    Like a reference it has ``at``, which selects a block of the steps, or of the steps and columns.
    """

    reference: Any

    @property
    def at(self) -> "StepsReference":
        return self

    def __getitem__(self, index) -> "StepsReference":
        return StepsReference(self.reference.at[index])

    @property
    def start_and_count(self) -> tuple[Any, int]:
        """The first step, and how many the array has."""
        region, _ = selected(self.reference)
        return region[1][0], base(self.reference).shape[1]

    def piece_rows(self, tile) -> int:
        """The rows that are copied at a time where a tile is not copied at once."""
        return 1 if tile.shape[1] == tiling(tile)[1] else GROUP

    def pieces(self, tile, size=None) -> Any:
        """How many pieces are copied one by one; 0: the tile is copied at once.

        size: how many rows are written, for a tile that is one swizzle atom wide; None: all.
        """
        rows = tile.shape[0]
        if size is not None:
            return jnp.where(size == rows, np.int32(0), size)
        return 0 if self.piece_rows(tile) == 1 else groups_alone(*self.start_and_count, rows)


def head_of(ref, n, p: Problem, *, any_step: bool = False):
    """Head n, (S, D), of an array (B * NH, S, D) or (B, S, NH, D).

    Splits count as heads. The array may have fewer steps than S, because TMA copies read zeros
    beyond them and write nothing there.

    any_step: whether tiles begin at any step, not only at multiples of 8.
    """
    strided = len(ref.shape) == 4
    B, NH = ref.shape[0], ref.shape[2] if strided else 1
    num_splits = p.BNH // (B * NH)
    steps: Any = slice(None)
    if num_splits > 1:
        n, split = unravel(n, num_splits)
        steps = pl.ds(split * p.S, p.S)
    batch, head = unravel(n, NH)
    head_steps = ref.at[(batch, steps, head) if strided else (n, steps)]
    return StepsReference(head_steps) if any_step or ref.shape[1] % GROUP else head_steps


def load_transposed(array):
    """The transposed tile of float32 in global memory, in the layout of an accumulator."""
    shape = plgpu.ShapeDtypeStruct(array.shape[::-1], jnp.float32, layout=plgpu.Layout.WGMMA)
    types = plgpu.Layout.WGMMA, plgpu.RefType()
    load = plgpu.inline_mgpu(arg_types=types, return_type=shape)(inline_load_transposed)
    return load(products.zeros(*shape.shape), array)


def store_transposed(array, tile) -> None:
    """Stores the transpose of an accumulator's value in global memory."""
    types = plgpu.Layout.WGMMA, plgpu.RefType()
    plgpu.inline_mgpu(arg_types=types)(inline_store_transposed)(tile, array)


def copy_in(source, tile, barrier) -> None:
    """Starts a copy to shared memory that arrives on the barrier."""
    if isinstance(source, StepsReference):
        copy_steps(source.reference, tile, source.pieces(tile), barrier)
    else:
        plgpu.copy_gmem_to_smem(source, tile, barrier)


def copy_out(tile, destination, where=None, size=None) -> None:
    """Starts a copy to global memory, if the condition holds; size: of so many rows, None: all.

    Whether a copy that does not start counts as pending depends on the kind of array.
    """
    if isinstance(destination, StepsReference):
        pieces = destination.pieces(tile, size)
        start = functools.partial(copy_steps, destination.reference, tile, pieces)
        pl.when(where is None or where)(start)
    else:
        plgpu.copy_smem_to_gmem(tile, destination, predicate=where)


def starts_within(*axes: tuple[Any, int, int]) -> tuple[Any, int]:
    """Whether a part of a tile begins within its array, and how many copies may be pending before.

    A copy out that begins beyond must not start. jax's TMA copies drop the index along an axis of
    which the array and the copy have one block each, and would overwrite this block. Where no part
    begins beyond, the result is None and 1.

    axes: the slice of the part, the size of the tile and that of the array.
    """
    within = [
        part.start < size
        for part, tile, size in axes
        if rounded_up(size, part.size) < rounded_up(size, tile)
    ]
    return (functools.reduce(operator.and_, within), 0) if within else (None, 1)


def write_out(tile, value, pending: int) -> None:
    """Stores a value for copies out, once at most ``pending`` earlier copies still read tiles."""
    plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
    products.store(tile, value.astype(tile.dtype))
    plgpu.commit_smem()


class RingBarriers(NamedTuple):
    full: Any  # one per slot
    empty: Any


def ring_barriers(num_slots: int, copies: int, readers: int = 2) -> RingBarriers:
    """The barriers of a ring in which each step issues ``copies`` copies."""
    full = plgpu.Barrier(num_arrivals=copies, num_barriers=num_slots)
    return RingBarriers(full, plgpu.Barrier(num_arrivals=readers, num_barriers=num_slots))


@dataclasses.dataclass(frozen=True)
class CopyRing:
    """A ring, as one CTA sees it.

    Attributes:
      barriers: references to what ``ring_barriers`` declares.
      steps: the number of steps that go through the ring; None if ``load`` issues every copy and
        ``epilogue`` receives the number.
      copies: copies(step, copy) starts the copies of a step. It calls copy(source, buffer, *index)
        for each, where index selects a part of the buffer's slot. It is None if ``steps`` is.
      readers: the number of warpgroups that read the slots.
      item: the item of the steps that are released (see ``phases.py``), or the item before, passed
        on as copies(step, copy, item); None: not known. It saves a division per refill.
      has_producer: whether a dedicated warpgroup copies; otherwise the readers share the copying.
    """

    barriers: RingBarriers
    steps: Any
    copies: Any
    readers: int = 2
    item: Any = None
    has_producer: bool = False

    @property
    def num_slots(self) -> int:
        return self.barriers.full.shape[0]

    def slot(self, step):
        return remainder(step, self.num_slots)

    def load(self, step, copies: Callable[..., None] | None = None) -> None:
        """Starts the copies of a step as soon as the slot's last reader has released it.

        copies: copies(copy) replaces the ring's copies.
        """
        slot = self.slot(step)

        def copy(source, buffer, *index):
            copy_in(source, buffer.at[(slot, *index)], self.barriers.full.at[slot])

        pl.when(step >= self.num_slots)(lambda: products.wait_empty(self.barriers.empty.at[slot]))
        if copies is not None:
            copies(copy)
        elif self.item is None:
            self.copies(step, copy)
        else:
            self.copies(step, copy, self.item)

    def wait(self, step):
        """Waits for the copies of a step and returns its slot."""
        slot = self.slot(step)
        products.acquire(self.barriers.full.at[slot], self.barriers.empty.at[slot])
        return slot

    def release(self, *steps) -> None:
        """Tells the ring that this warpgroup has read these steps."""
        products.release(*(self.barriers.empty.at[self.slot(step)] for step in steps))

    def _by_copier(self, slot, condition, run: Callable[[], None]) -> None:
        """Calls ``run`` in the warpgroup that copies into the slot, if the condition holds."""
        readers = np.int32(self.readers)
        copier = readers if self.has_producer else remainder(slot, self.readers)
        pl.when((lax.axis_index("wg") == copier) & condition)(run)

    def prologue(self) -> None:
        """Starts the copies of the first steps, one per slot."""
        if not self.has_producer:

            @fori(self.num_slots)
            def fill(step):
                self._by_copier(step, step < self.steps, lambda: self.load(step))

    def refill(self, *steps) -> None:
        """Starts the next copies into the slots of these steps, which this warpgroup has released.

        A dedicated warpgroup does that by itself.
        """
        for step in () if self.has_producer else steps:
            # The barrier keeps values derived from the step out of registers until this point.
            following = lax.optimization_barrier(step) + self.num_slots
            load = functools.partial(self.load, following)
            self._by_copier(self.slot(step), following < self.steps, load)

    def advance(self, *steps) -> None:
        """Releases steps and refills their slots."""
        self.release(*steps)
        self.refill(*steps)

    def mma(self, step, issue: Callable[..., None], work=None, *, follows: Any = True):
        """Starts a step's product, which runs beside the product of the preceding step.

        Once the preceding product has ended, its step is released and its slot refilled. The caller
        waits for the last product and releases its step. With a single slot the product of the step
        itself ends instead, and this step is released.

        Args:
          issue: issue(slot) starts the product.
          work: work(slot) runs beside the product; its result is returned.
          follows: False if the preceding step is released already.
        """
        overlap = min(self.num_slots - 1, 1)
        slot, ended = self.wait(step), step - overlap
        issue(slot)
        products.wait(overlap)
        pl.when(follows if overlap else True)(lambda: self.release(ended))
        result = None if work is None else work(slot)
        pl.when(step >= overlap)(lambda: self.refill(ended))
        return result

    def row_products(self, step, tile, others, *index):
        """The inner products of a tile's rows with those in a step's slot, which it advances.

        others: the slots, of which ``index`` selects a part.
        """
        x, y = (load_float32(z) for z in (tile, others.at[(self.wait(step), *index)]))
        self.release(step)
        sums = products.sum_over_columns(x * y)
        self.refill(step)
        return sums

    def epilogue(self, steps=None) -> None:
        """Waits for the last releases, because no barrier may end in the middle of a phase."""
        total = lax.convert_element_type(self.steps if steps is None else steps, np.int32)
        for x in range(self.num_slots):
            step = total - np.int32(self.num_slots - x)
            slot = self.slot(step)
            wait = functools.partial(products.wait_empty, self.barriers.empty.at[slot])
            self._by_copier(slot, step >= 0, wait)
