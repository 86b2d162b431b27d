"""What goes through a ring for an item, declared once for the producer and the consumers.

    phases = Phases(scores=Phase(2, (dh, v)), gradients=Phase(2, (v, C, dh), descending=True))

declares 10 steps per item: dh and v of index 0, dh and v of index 1; v, C and dh of index 1, v, C
and dh of index 0. ``ring`` makes the ring that copies them, and a consumer names its steps:

    steps = phases.of_item(index)
    v, C, dh = steps("gradients", j)

If a CTA has one item, its phases may have any number of repeats, known when the kernel runs.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.tiles import fori
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

    def nth(self, j):
        """The index of the j-th repeat."""
        return self.repeats - 1 - j if self.descending else j


class Phases(dict[str, Phase]):
    """The phases of an item, in order; first: the first step of each, counted from the item's."""

    def __init__(self, **phases: Phase) -> None:
        super().__init__(phases)
        self.first, self.num_steps = dict[str, Any](), 0
        for name, x in phases.items():
            self.first[name] = self.num_steps
            self.num_steps += x.repeats * len(x.operands)

    def steps(self, start, name: str, j=None) -> list[Any]:
        """The steps in the ring of a phase's j-th repeat, of all repeats without j.

        start: the item's first step.
        """
        x, start = self[name], start + self.first[name]
        repeats, count = range(x.repeats) if j is None else [j], len(x.operands)
        return [start + j * count + n for j in repeats for n in range(count)]

    def of_item(self, index=None) -> Callable[..., list[Any]]:
        """steps(name, j) of a CTA's index-th item, if all its items have equally many steps.

        index: None: of its only item.
        """
        start = np.int32(0) if index is None else index * self.num_steps
        return functools.partial(self.steps, start)

    def load(self, ring: CopyRing, start) -> None:
        """Loads all steps of an item, which the operands know, into the ring of a producer."""
        for name, x in self.items():

            @fori(x.repeats)
            def load_repeat(j, name=name, x=x):
                for step, operand in zip(self.steps(start, name, j), x.operands, strict=True):
                    ring.load(step, functools.partial(operand, x.nth(j)))

    def ring(
        self,
        barriers: RingBarriers,
        num_items: Any = None,
        item: Callable[[Any], Sequence[Any]] = lambda index: (),
        readers: int = 2,
    ) -> CopyRing:
        """The ring of a CTA.

        num_items: None: the CTA has one item, which the operands know.
        item: item(index): what operands get to know of the CTA's items.
        """

        def copies(step, copy, near=None):
            index, step = (0, step) if num_items is None else self._position(step, near)
            self._copy(item(index), step, copy)

        num_steps = self.num_steps * (1 if num_items is None else num_items)
        return CopyRing(barriers, num_steps, copies, readers)

    def _position(self, step, near=None) -> tuple[Any, Any]:
        """The item of a step, and the step counted from the item's first.

        near: this item or the one before; None: not known.
        """
        n = self.num_steps
        if near is None:
            return unravel(step, n)
        x = step - lax.optimization_barrier(near) * n
        here = x < n
        return jnp.where(here, near, near + 1), jnp.where(here, x, x - n)

    def _copy(self, item: Sequence[Any], step, copy) -> None:
        """Starts the copies of a step, counted from the item's first.

        An operand of several phases has one body, because copies are long code. Its index is then
        chosen with its number, and so are the indices of all others.
        """
        operands: list[Operand] = []
        indices: list[Any] = []
        chosen: Any = None
        for name, x in self.items():
            j, place = unravel(step - self.first[name], len(x.operands))
            candidate = len(operands) + place, x.nth(j)
            # The step is that of the last phase that has begun.
            select = functools.partial(jnp.where, step >= self.first[name])
            chosen = jax.tree.map(select, candidate, chosen) if chosen else candidate
            operands += x.operands
            indices += [x.nth(j)] * len(x.operands)
        number, index = chosen
        bodies = list(dict.fromkeys(operands))
        if len(bodies) < len(operands):
            indices = [index] * len(bodies)
        for operand, at in zip(bodies, indices, strict=True):
            places = (number == n for n, x in enumerate(operands) if x == operand)
            is_chosen = functools.reduce(operator.or_, places)
            pl.when(is_chosen)(functools.partial(operand, *item, at, copy))
