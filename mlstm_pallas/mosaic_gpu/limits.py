"""What a Hopper GPU has for a kernel, and the base of the tiles of the kernels."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Self

import jax
import jax.numpy as jnp

from mlstm_pallas.gpu import Gpu
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Tiles

KERNEL_DTYPE = jnp.dtype("bfloat16")  # float16 is of the same size
SHARED_BYTES = 232_448  # that a CTA may have
HEADS = 65_535  # CTAs along a grid axis of CUDA's other than the first

# ptxas moves registers between warpgroups (setmaxnreg). nvJitLink, with which jax compiles from
# 0.12 on where it finds the library, ignores that: every thread keeps what it has at the launch.
MOVES_REGISTERS = jax.__version_info__ < (0, 12)


class HopperTiles(Tiles):
    """The tiles of a kernel for Hopper and dtypes of 16 bits."""

    @classmethod
    def candidates(cls, p: Problem, gpu: Gpu, **asked: Any) -> Iterable[Self]:
        """Tiles to plan with, the best first."""
        return [cls()]

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, gpu: Gpu, **asked: Any) -> Self | None:
        if dtype.itemsize != 2:
            return None
        return next((x for x in cls.candidates(p, gpu, **asked) if x.supports(p, **asked)), None)

    def divides(self, p: Problem, **asked: Any) -> bool:
        """Whether whole tiles make up the problem, and the grid has its CTAs."""
        raise NotImplementedError

    def supports(self, p: Problem, **asked: Any) -> bool:
        fits = self.divides(p, **asked)
        return fits and self.shared_bytes(p, KERNEL_DTYPE, **asked) <= SHARED_BYTES


@dataclasses.dataclass(frozen=True)
class RingTiles(HopperTiles):
    """The tiles of a persistent kernel: the slots of its ring of copies, and its CTAs."""

    num_stages: int
    num_ctas: int

    def items(self, p: Problem) -> int:
        """The items that the CTAs share."""
        raise NotImplementedError

    def grid(self, p: Problem, **asked: Any) -> tuple[int, ...]:
        return (self.num_ctas,)

    def clamped(self, p: Problem) -> Self:
        """With no CTA without an item."""
        return dataclasses.replace(self, num_ctas=min(self.num_ctas, self.items(p)))
