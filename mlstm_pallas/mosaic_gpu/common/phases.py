"""What goes through a ring for an item, declared once for the producer and the consumers.

    phases = Phases(scores=Phase(2, (dh, v)), gradients=Phase(2, (v, C, dh), descending=True))

declares 10 steps per item: dh and v of index 0, dh and v of index 1; v, C and dh of index 1, v, C
and dh of index 0. ``ring`` makes the ring that copies them, and a consumer names its steps:

    steps = phases.of_item(index)
    v, C, dh = steps("gradients", j)
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.tiles import each
from mlstm_pallas.mosaic_gpu.common.copies import CopyRing, RingBarriers
from mlstm_pallas.mosaic_gpu.common.launch import unravel

Operand = Callable[..., None]


class Phase(NamedTuple):
    """A sequence of steps, repeated.

    operands: one per step; operand(*item, index, copy) starts the copies of the step in the
      repeat with this index. See ``CopyRing`` for copy.
    descending: whether the indices of the repeats go down to 0.
    """

    repeats: Any
    operands: Sequence[Operand]
    descending: bool = False

    @property
    def num_steps(self):
        return self.repeats * len(self.operands)

    def nth(self, j):
        """The index of the j-th repeat."""
        return self.repeats - 1 - j if self.descending else j


class Phases:
    """The phases of an item, in order; first: the first step of each, counted from the item's."""

    def __init__(self, **phases: Phase) -> None:
        self.phases, self.first = phases, dict[str, Any]()
        self.num_steps: Any = 0
        for name, x in phases.items():
            self.first[name] = self.num_steps
            self.num_steps += x.num_steps

    def __getitem__(self, name: str) -> Phase:
        return self.phases[name]

    def steps(self, start, name: str, j=0) -> list[Any]:
        """The steps in the ring of a phase's j-th repeat; start: the item's first step."""
        count = len(self[name].operands)
        return [start + self.first[name] + count * j + x for x in range(count)]

    def of_item(self, index) -> Callable[..., list[Any]]:
        """steps(name, j) of a CTA's index-th item, if all its items have equally many steps."""
        return functools.partial(self.steps, index * self.num_steps)

    def load(self, ring: CopyRing, start, *item) -> None:
        """Loads all steps of an item into the ring of a producer."""
        for name, x in self.phases.items():

            @each(x.repeats)
            def load_repeat(j, name=name, x=x):
                for step, operand in zip(self.steps(start, name, j), x.operands, strict=True):
                    ring.load(step, functools.partial(operand, *item, x.nth(j)))

    def ring(self, barriers: RingBarriers, num_items, item: Callable[[Any], Any]) -> CopyRing:
        """The ring of a CTA; item(index): what operands get to know of the CTA's items."""

        def copies(index, step, copy):
            self._copy(item(index), step, copy)

        return CopyRing(barriers, num_items * self.num_steps, copies, item_steps=self.num_steps)

    def _copy(self, item: Sequence[Any], step, copy) -> None:
        """Starts the copies of a step, counted from the item's first.

        An operand of several phases has one body, because copies are long code.
        """
        numbers: dict[Operand, list[int]] = {}
        chosen: Any = None
        count = 0
        for name, x in self.phases.items():
            j, place = unravel(step - self.first[name], len(x.operands))
            candidate = count + place, x.nth(j)
            # The step is that of the last phase that has begun.
            select = functools.partial(jnp.where, step >= self.first[name])
            chosen = jax.tree.map(select, candidate, chosen) if chosen else candidate
            for operand in x.operands:
                numbers.setdefault(operand, []).append(count)
                count += 1
        number, index = chosen
        for operand, places in numbers.items():
            is_chosen = functools.reduce(operator.or_, (number == n for n in places))
            pl.when(is_chosen)(functools.partial(operand, *item, index, copy))
