"""A ring of slots in shared memory: copies run ahead of the warpgroups that read them.

A sequence of steps goes through the slots in order, step x through slot x mod num_slots. Each slot
has two barriers: ``full``, on which its copies arrive, and ``empty``, on which every reading
warpgroup arrives when it has read the slot.

Who starts the copies is a static choice. Shared: the readers do, each for its share of the slots,
so that no warpgroup stalls more often than another. Dedicated: a further warpgroup, number 2, calls
``load`` for every step. Two warpgroups have 255 registers per thread from the launch on, three
have 168.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.mosaic_gpu import products
from mlstm_pallas.mosaic_gpu.launch import plgpu
from mlstm_pallas.mosaic_gpu.tile_copies import copy_in
from mlstm_pallas.tiles import divide, loop, remainder


class RingBarriers(NamedTuple):
    full: Any  # one per slot
    empty: Any


def ring_barriers(num_slots: int, copies: int, readers: int = 2) -> RingBarriers:
    """The barriers of a ring. copies: the number that each step issues."""
    full = plgpu.Barrier(num_arrivals=copies, num_barriers=num_slots)
    return RingBarriers(full, plgpu.Barrier(num_arrivals=readers, num_barriers=num_slots))


@dataclasses.dataclass(frozen=True)
class CopyRing:
    """A ring, as one CTA sees it.

    Attributes:
      barriers: those of ``ring_barriers``, in the kernel.
      num_slots: slots.
      steps: how many steps go through the ring, or None: ``load`` and ``epilogue`` alone are called.
      copies: copies(step, copy) starts the copies of a step, each by copy(source, buffer, *index),
        where index selects of the buffer's slot; None with ``steps``.
      readers: warpgroups that share the copying; 0: a further warpgroup does it.
      steps_of_item: copies(item, step, copy) then takes an item, of so many steps, and its step.
    """

    barriers: RingBarriers
    num_slots: int
    steps: Any
    copies: Any
    readers: int = 2
    steps_of_item: int | None = None

    def slot(self, step: Any) -> Any:
        return remainder(step, self.num_slots)

    def load(self, step: Any, copies: Callable[..., None] | None = None) -> None:
        """Starts the copies of a step, once the slot's last reader has released it.

        copies: in place of the ring's.
        """
        slot = self.slot(step)
        pl.when(step >= self.num_slots)(lambda: products.wait_empty(self.barriers.empty.at[slot]))
        (copies or self._start)(step, functools.partial(self._copy, slot))

    def _copy(self, slot: Any, source: Any, buffer: Any, *index: Any) -> None:
        copy_in(source, buffer.at[(slot, *index)], self.barriers.full.at[slot])

    def _start(self, step: Any, copy: Callable[..., None], item: Any = None) -> None:
        """item: the step's own or the one before it, which spares a division."""
        n = self.steps_of_item
        if n is None:
            self.copies(step, copy)
        elif item is None:
            self.copies(divide(step, n), remainder(step, n), copy)
        else:
            x = step - lax.optimization_barrier(item) * n
            here = x < n
            self.copies(jnp.where(here, item, item + 1), jnp.where(here, x, x - n), copy)

    def wait(self, step: Any) -> Any:
        """Waits for the copies of a step; its slot."""
        slot = self.slot(step)
        products.acquire(self.barriers.full.at[slot], self.barriers.empty.at[slot])
        return slot

    def release(self, *steps: Any) -> None:
        """The warpgroup has read these steps."""
        products.release(*(self.barriers.empty.at[self.slot(step)] for step in steps))

    def _by_copier(self, slot: Any, condition: Any, run: Callable[[], None]) -> None:
        """Runs in the warpgroup that copies into the slot."""
        copier = remainder(slot, self.readers) if self.readers else np.int32(2)
        pl.when((lax.axis_index("wg") == copier) & condition)(run)

    def prologue(self) -> None:
        """Starts the copies of the first steps, one per slot."""

        def first(step, carry):
            self._by_copier(step, step < self.steps, lambda: self.load(step))

        if self.readers:
            loop(self.num_slots, first, None)

    def refill(self, *steps: Any, item: Any = None) -> None:
        """Starts the copies into the slots of these steps, which this warpgroup has released.

        item: theirs.
        """
        if not self.readers:
            return
        for step in steps:
            # What follows from the step is computed here, not kept in registers meanwhile.
            following = lax.optimization_barrier(step) + self.num_slots
            load = functools.partial(
                self.load, following, functools.partial(self._start, item=item)
            )
            self._by_copier(self.slot(step), following < self.steps, load)

    def advance(self, step: Any) -> None:
        """Releases a step and refills its slot."""
        self.release(step)
        self.refill(step)

    def epilogue(self, steps: Any = None) -> None:
        """Waits for the last releases: no barrier may be left in the middle of a phase."""
        total = lax.convert_element_type(self.steps if steps is None else steps, np.int32)
        for x in range(self.num_slots):
            step = total - np.int32(self.num_slots - x)
            slot = self.slot(step)
            wait = functools.partial(products.wait_empty, self.barriers.empty.at[slot])
            self._by_copier(slot, step >= 0, wait)
