"""A ring of slots in shared memory: copies run ahead of the warpgroups that read them.

The steps of a sequence go through the slots in order: step x uses slot x mod num_slots. Each slot
has two barriers. Its copies arrive on ``full``, and every reading warpgroup arrives on ``empty``
when it has read the slot.

Which warpgroups issue the copies is a static choice. Shared: each reader issues the copies of its
share of the slots, so no warpgroup stalls more often than another. Dedicated: a further warpgroup,
number 2, calls ``load`` for every step. A CTA of two warpgroups has 255 registers per thread from
the launch on, and a CTA of three has 168.
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
from mlstm_pallas.tiles import divide, each, remainder


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
      readers: the number of warpgroups that share the copying; 0: a dedicated warpgroup copies.
      steps_of_item: the number of steps per item. ``copies`` is then copies(item, step, copy),
        where the step is counted from the item's first.
    """

    barriers: RingBarriers
    steps: Any
    copies: Any
    readers: int = 2
    steps_of_item: int | None = None

    @property
    def num_slots(self) -> int:
        return self.barriers.full.shape[0]

    def slot(self, step):
        return remainder(step, self.num_slots)

    def load(self, step, copies: Callable[..., None] | None = None, item=None) -> None:
        """Starts the copies of a step as soon as the slot's last reader has released it.

        Args:
          copies: copies(step, copy) replaces the ring's copies.
          item: see ``_start``.
        """
        slot = self.slot(step)

        def copy(source, buffer, *index):
            copy_in(source, buffer.at[(slot, *index)], self.barriers.full.at[slot])

        pl.when(step >= self.num_slots)(lambda: products.wait_empty(self.barriers.empty.at[slot]))
        (copies or functools.partial(self._start, item=item))(step, copy)

    def _start(self, step, copy: Callable[..., None], item) -> None:
        """Calls ``copies``. item: the step's item or the one before it, which saves a division."""
        n = self.steps_of_item
        if n is None:
            self.copies(step, copy)
        elif item is None:
            self.copies(divide(step, n), remainder(step, n), copy)
        else:
            x = step - lax.optimization_barrier(item) * n
            here = x < n
            self.copies(jnp.where(here, item, item + 1), jnp.where(here, x, x - n), copy)

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
        copier = remainder(slot, self.readers) if self.readers else np.int32(2)
        pl.when((lax.axis_index("wg") == copier) & condition)(run)

    def prologue(self) -> None:
        """Starts the copies of the first steps, one per slot."""
        if self.readers:

            @each(self.num_slots)
            def first(step):
                self._by_copier(step, step < self.steps, lambda: self.load(step))

    def refill(self, *steps, item=None) -> None:
        """Starts the next copies into the slots of these steps, which this warpgroup has released.

        item: the item of these steps.
        """
        if not self.readers:
            return
        for step in steps:
            # The barrier keeps values derived from the step out of registers until this point.
            following = lax.optimization_barrier(step) + self.num_slots
            load = functools.partial(self.load, following, item=item)
            self._by_copier(self.slot(step), following < self.steps, load)

    def advance(self, *steps, item=None) -> None:
        """Releases steps and refills their slots; item: see ``refill``."""
        self.release(*steps)
        self.refill(*steps, item=item)

    def epilogue(self, steps=None) -> None:
        """Waits for the last releases, because no barrier may end in the middle of a phase."""
        total = lax.convert_element_type(self.steps if steps is None else steps, np.int32)
        for x in range(self.num_slots):
            step = total - np.int32(self.num_slots - x)
            slot = self.slot(step)
            wait = functools.partial(products.wait_empty, self.barriers.empty.at[slot])
            self._by_copier(slot, step >= 0, wait)
