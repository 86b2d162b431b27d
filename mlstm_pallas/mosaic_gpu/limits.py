"""What a Hopper GPU has for a kernel, and the constructor of the kernels' specs."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mlstm_pallas.gpu import Gpu
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Kernel, Tiles

KERNEL_DTYPE = jnp.dtype("bfloat16")  # float16 is of the same size
SHARED_BYTES = 232_448  # that a CTA may have
HEADS = 65_535  # CTAs along a grid axis of CUDA's other than the first

# ptxas moves registers between warpgroups (setmaxnreg). nvJitLink, with which jax compiles from
# 0.12 on where it finds the library, ignores that: every thread keeps what it has at the launch.
MOVES_REGISTERS = jax.__version_info__ < (0, 12)


@dataclasses.dataclass(frozen=True)
class NoTiles(Tiles):
    """Of a kernel with one tiling."""


@dataclasses.dataclass(frozen=True)
class RingTiles(Tiles):
    """Of a persistent kernel: the slots of its ring of copies, and its CTAs."""

    num_stages: int
    num_ctas: int

    def grid(self, p: Problem, **asked: Any) -> tuple[int, ...]:
        return (self.num_ctas,)


def kernel(
    tiles: type[Tiles],
    candidates: Callable[..., Iterable[Tiles]],
    supports: Callable[..., bool],
    search: Mapping[str, Sequence[Any]],
) -> Kernel:
    """A kernel for Hopper and dtypes of 16 bits.

    Args:
      candidates: (problem, gpu) -> tiles, the best first; its plan is the first one supported.
    """

    def plan(p: Problem, dtype: jnp.dtype, gpu: Gpu, **asked: Any) -> Tiles | None:
        if dtype.itemsize != 2:
            return None
        return next((x for x in candidates(p, gpu, **asked) if supports(x, p, **asked)), None)

    return Kernel(tiles, plan, search, supports)
