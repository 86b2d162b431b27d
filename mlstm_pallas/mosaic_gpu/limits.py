"""What a Hopper GPU has for a kernel, and what its kernels say of themselves."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Kernel, StageConfig

KERNEL_DTYPE = jnp.dtype("bfloat16")  # float16 is of the same size
SHARED_BYTES = 232_448  # that a CTA may have
HEADS = 65_535  # CTAs along a grid axis of CUDA's other than the first

# ptxas moves registers between warpgroups (setmaxnreg). nvJitLink, with which jax compiles from
# 0.12 on where it finds the library, ignores that: every thread keeps what it has at the launch.
MOVES_REGISTERS = jax.__version_info__ < (0, 12)


def state_rows(DHQK: int, most: int = 256) -> int:
    """Rows of a block of the state in registers, a multiple of 64 that divides DHQK; 0: none."""
    sizes = (DHQK // n for n in range(1, DHQK // 64 + 1) if DHQK % (64 * n) == 0)
    return next((rows for rows in sizes if rows <= most), 0)


def kernel(
    *,
    search: Mapping[str, Sequence[Any]],
    heuristic: Callable[[Problem], StageConfig],
    takes: Callable[[StageConfig, Problem], bool],
    **more: Any,
) -> Kernel:
    """A kernel for dtypes of 16 bits, which runs with the tiles as they are."""
    return Kernel(
        search=search,
        heuristic=lambda p, dtype: heuristic(p),
        clamp=lambda tiles, p: tiles,
        takes=lambda tiles, p, dtype: jnp.dtype(dtype).itemsize == 2 and takes(tiles, p),
        **more,
    )
