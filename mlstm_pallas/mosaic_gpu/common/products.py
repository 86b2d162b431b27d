"""Products on the tensor cores (wgmma), sums of tiles, and the protocol of shared buffers.

The products of a warpgroup run asynchronously: see ``read`` and ``wait``. Some arguments, such as
the buffers of ``guard``, only declare the protocol: tests replace these functions and check it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.mosaic_gpu.common.inline_mlir import inline_sum_by_warps
from mlstm_pallas.mosaic_gpu.common.launch import BY_ROWS, WG_ROWS, by_lanes, load, plgpu

SUM_SCRATCH = 4 * WG_ROWS  # float32 elements, for ``sum_over_rows``


def add(accumulator, a, b) -> None:
    """accumulator += a b; a is in shared memory or registers, b in shared memory."""
    plgpu.wgmma(accumulator, a, b)


def wait(pending: int) -> None:
    """Waits until at most ``pending`` products of the warpgroup are running."""
    plgpu.wgmma_wait(pending)


def read(accumulator, pending: int):
    """The value of the accumulator after all its products.

    pending: how many later products may still run.
    """
    return plgpu.wgmma_accumulator_load(accumulator, wait_n=pending)


def zeros(*shape: int, layout=plgpu.Layout.WGMMA):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def from_zeros(issue: Callable[[Any], None], rows: int, columns: int):
    """The accumulator after ``issue(accumulator)``."""
    return all_from_zeros(issue, (rows, columns))[1]


def all_from_zeros(issue: Callable[..., Any], *shapes: tuple[int, int]):
    """The result of ``issue(*accumulators)``, and the accumulators after it."""

    def scope(*accumulators):
        result = issue(*accumulators)
        return result, *(read(x, 0) for x in accumulators)

    return pl.run_scoped(scope, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def onto(issue: Callable[..., None], *initial: jax.Array) -> Sequence[jax.Array]:
    """The accumulators, which start from these values, after ``issue(*accumulators)``."""
    return pl.run_state(lambda refs: issue(*refs))(tuple(plgpu.ACC.init(x) for x in initial))


def sum_over_rows(x: jax.Array, scratch):
    """jnp.sum(x, axis=0), ``by_lanes``, of a float32 tile of 64 rows and 32 or 64 columns.

    scratch: SUM_SCRATCH elements that no other warpgroup uses.
    """
    types, columns = (plgpu.Layout.WGMMA, plgpu.RefType()), x.shape[1]
    plgpu.inline_mgpu(arg_types=types)(inline_sum_by_warps)(x, scratch)
    warps = (load(scratch.at[pl.ds(n * columns, columns)], by_lanes(columns)) for n in range(4))
    return functools.reduce(jnp.add, warps)


def sum_over_columns(x: jax.Array):
    """jnp.sum(x, axis=1), BY_ROWS, without the 2 KiB of shared memory that jnp.sum takes."""
    shape = plgpu.ShapeDtypeStruct(x.shape[:1], jnp.float32, layout=BY_ROWS)
    inline = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=shape)
    return inline(lambda _, tile: tile.reduce("add", 1))(x)


def acquire(full, empty) -> None:
    """Waits on ``full``; the warpgroup holds what the copies filled until ``release(empty)``.

    empty: None if nothing is written to the buffers again.
    """
    plgpu.barrier_wait(full)


def release(*barriers) -> None:
    """Releases what the warpgroup acquired with these barriers, after it has read it."""
    for barrier in barriers:
        plgpu.barrier_arrive(barrier)


def guard(full, *buffers) -> None:
    """Declares that warpgroups, not ``copy_in``, fill these buffers and arrive on ``full``."""


def wait_empty(empty) -> None:
    """Waits until all warpgroups have called ``release(empty)``."""
    plgpu.barrier_wait(empty)


def store(tile, value: jax.Array) -> None:
    """tile[...] = value; the tile is in shared memory."""
    tile[...] = value
