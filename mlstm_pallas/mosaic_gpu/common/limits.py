"""Limits of a Hopper GPU, and the base classes of the kernels' tiles."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Self

import jax
import jax.numpy as jnp

from mlstm_pallas.formulas.tiles import rounded_up
from mlstm_pallas.launches.kernel_tiles import KernelSpec, Tiles
from mlstm_pallas.problem.dimensions import Problem

KERNEL_DTYPE = jnp.dtype("bfloat16")  # float16 has the same size
HEADS = 65_535  # the most CTAs along a CUDA grid axis other than the first


def bytes_of(scratch: dict[str, Any]) -> int:
    """Each array begins at a multiple of 1024 bytes; so do the barriers."""
    buffers = jax.tree.leaves(scratch)
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in buffers if hasattr(x, "dtype")]
    return 1024 + sum(rounded_up(size, 1024) for size in sizes)


class HopperTiles(Tiles):
    """The tiles of a Hopper kernel for 16-bit dtypes."""

    @classmethod
    def candidates(cls, p: Problem, kernel: KernelSpec) -> Iterable[Self]:
        """Tiles to choose from, the best first."""
        return [cls()]

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, kernel: KernelSpec) -> Self | None:
        if dtype.itemsize != 2:
            return None
        return next((x for x in cls.candidates(p, kernel) if x.supports(p, kernel)), None)

    def scratch(self, p: Problem, dtype) -> dict[str, Any]:
        """The kernel's shared memory and barriers by name.

        Keywords say what a launch reads, computes and stores.
        """
        return {}

    def shared_bytes(self, p: Problem, dtype, kernel: KernelSpec) -> int:
        """At most, for all launches of such a kernel."""
        return bytes_of(self.scratch(p, dtype))

    def clamped(self, p: Problem) -> Self:
        """Keeps the columns of tiles of v, which may reach beyond a head."""
        columns = {x: y for x, y in vars(self).items() if x in ("siz_b_DHHV", "state_columns")}
        return dataclasses.replace(super().clamped(p), **columns)

    def divides(self, p: Problem) -> bool:
        """Whether the kernel has such tiles for the problem, and CUDA such a grid."""
        return True

    def supports(self, p: Problem, kernel: KernelSpec) -> bool:
        fits = self.divides(p)
        return fits and self.shared_bytes(p, KERNEL_DTYPE, kernel) <= kernel.gpu.shared_bytes


@dataclasses.dataclass(frozen=True)
class RingTiles(HopperTiles):
    """The tiles of a persistent kernel: the slots of its copy ring, and its CTAs."""

    num_stages: int
    num_ctas: int

    def items(self, p: Problem) -> int:
        """The number of items that the CTAs share."""
        raise NotImplementedError

    def grid(self, p: Problem) -> tuple[int, ...]:
        return (self.num_ctas,)

    def clamped(self, p: Problem) -> Self:
        """Leaves out CTAs that would have no item."""
        return dataclasses.replace(self, num_ctas=min(self.num_ctas, self.items(p)))
