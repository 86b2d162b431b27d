"""Products on the tensor cores (wgmma), and sums over the rows of a tile, written in MLIR.

The products of a warpgroup run asynchronously: see ``read`` and ``wait``.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from mlstm_pallas import tiles
from mlstm_pallas.mosaic_gpu.interpreter import interpretable
from mlstm_pallas.mosaic_gpu.launch import BY_ROWS, REGISTER_ROWS, plgpu

SUM_SCRATCH = 4 * REGISTER_ROWS  # float32 elements, for ``sum_over_rows``


def by_lanes(columns: int) -> Any:
    """The layout of 32 or 64 elements that every warp holds, neighbouring ones in a lane."""
    tiling = plgpu.Tiling(((columns,), (columns // 32,)))
    return plgpu.Layout.TILED(
        tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
    )


BY_LANES = by_lanes(64)


@interpretable
def add(accumulator: Any, a: Any, b: Any) -> None:
    """accumulator += a b; a in shared memory or registers, b in shared memory."""
    plgpu.wgmma(accumulator, a, b)


@interpretable
def wait(pending: int) -> None:
    """Until no more than ``pending`` products of the warpgroup are running."""
    plgpu.wgmma_wait(pending)


@interpretable
def read(accumulator: Any, pending: int) -> Any:
    """The value, once all its products have run.

    pending: how many later products may run on.
    """
    return plgpu.wgmma_accumulator_load(accumulator, wait_n=pending)


def zeros(rows: int, columns: int) -> Any:
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)


def from_zeros(issue: Callable[[Any], None], rows: int, columns: int) -> Any:
    """The accumulator after ``issue(accumulator)``."""
    return all_from_zeros(issue, (rows, columns))[1]


@interpretable
def all_from_zeros(issue: Callable[..., Any], *shapes: tuple[int, int]) -> Any:
    """What ``issue(*accumulators)`` returns, and the accumulators after it."""

    def scope(*accumulators):
        result = issue(*accumulators)
        return result, *(read(x, 0) for x in accumulators)

    return pl.run_scoped(scope, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


@interpretable
def onto(issue: Callable[..., None], *initial: jax.Array) -> Sequence[jax.Array]:
    """The accumulators, which start from these values, after ``issue(*accumulators)``."""
    return pl.run_state(lambda refs: issue(*refs))(tuple(plgpu.ACC.init(x) for x in initial))


@interpretable
def sum_over_rows(x: jax.Array, scratch: Any) -> Any:
    """The sums over axis 0 of a float32 tile (64, 32 or 64), ``by_lanes``.

    jnp.sum has one scratch for the CTA. It also exchanges each sum with all lanes that hold a part
    of it, 48 shuffles per lane.

    scratch: SUM_SCRATCH elements, of this warpgroup alone.
    """
    columns = plgpu.ShapeDtypeStruct(x.shape[1:], jnp.float32, layout=by_lanes(x.shape[1]))
    types = plgpu.Layout.WGMMA, plgpu.RefType()
    return plgpu.inline_mgpu(arg_types=types, return_type=columns)(_sum_over_rows)(x, scratch)


@interpretable
def sum_over_columns(x: jax.Array) -> Any:
    """jnp.sum(x, axis=1), BY_ROWS, which would set aside 2 KiB of shared memory."""
    shape = plgpu.ShapeDtypeStruct(x.shape[:1], jnp.float32, layout=BY_ROWS)
    inline = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=shape)
    return inline(lambda _, tile: tile.reduce("add", 1))(x)


@interpretable
def acquire(full: Any, empty: Any) -> None:
    """Waits on ``full``: until ``release(empty)`` the warpgroup has what the copies filled.

    empty: may be None, where nothing is written again.
    """
    plgpu.barrier_wait(full)


@interpretable
def release(*barriers: Any) -> None:
    """The warpgroup has read what it acquired with these barriers."""
    for barrier in barriers:
        plgpu.barrier_arrive(barrier)


@interpretable
def guard(full: Any, *buffers: Any) -> None:
    """Warpgroups, not ``copy_in``, fill these buffers and arrive on ``full``."""


@interpretable
def wait_empty(empty: Any) -> None:
    """Until all warpgroups have called ``release(empty)``."""
    plgpu.barrier_wait(empty)


@interpretable
def store(tile: Any, value: jax.Array) -> None:
    """tile[...] = value; a tile in shared memory."""
    tile[...] = value


# What follows, for kernels that pass ``products`` and ``interpret`` on: until they call the
# functions.


if TYPE_CHECKING:
    Products: TypeAlias = Any
else:

    class Products:
        interpret = None

        def __init__(self, interpret):
            pass

        def __getattr__(self, name):
            return globals()[name]


def loop(_: Any, count: Any, body: Callable[[jax.Array, Any], Any], init: Any = None) -> Any:
    return tiles.loop(count, body, init)


def cond(
    condition: Any, this: Callable[[Any], None], that: Callable[[Any], None], accumulator: Any
) -> None:
    pl.when(condition)(lambda: this(accumulator))
    pl.when(jnp.logical_not(condition))(lambda: that(accumulator))


def _sum_over_rows(_: Any, tile: Any, scratch: Any) -> mgpu.FragmentedArray:
    """Each lane holds 16 columns of two rows, or 8. In a round two lanes with the same columns
    exchange halves of their sums.

    After the rounds each lane has the sums of two neighbouring columns over the warp's 16 rows. Of
    64 columns lane x has 2 x and 2 x + 1. Of 32, two lanes have both: in the last round they add up
    their halves. The sums of the four warps meet in shared memory.
    """
    i32, index, columns = ir.IntegerType.get_signless(32), ir.IndexType.get(), tile.shape[1]
    # Two neighbouring columns each: [columns from 8 j on, row of the lane].
    sums = [arith.addf(x, y) for x, y in tile.registers.reshape(columns // 8, 2)]
    thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
    lane, warp = arith.remui(thread, utils.c(32, i32)), arith.divui(thread, utils.c(32, i32))
    for distance in (16, 8, 4):
        half = len(sums) // 2
        if half == 0:
            sums = [arith.addf(sums[0], utils.shfl_bfly(sums[0], distance))]
            continue
        bit = arith.andi(lane, utils.c(distance, i32))
        upper = arith.cmpi(arith.CmpIPredicate.ne, bit, utils.c(0, i32))
        halves = sums[:half], sums[half:]
        kept = [arith.select(upper, y, x) for x, y in zip(*halves, strict=True)]
        sent = [arith.select(upper, x, y) for x, y in zip(*halves, strict=True)]
        sums = [
            arith.addf(x, utils.shfl_bfly(y, distance)) for x, y in zip(kept, sent, strict=True)
        ]

    def place(warp, column):
        return [
            arith.index_cast(index, arith.addi(arith.muli(warp, utils.c(columns, i32)), column))
        ]

    per_lane = columns // 32
    group = arith.divui(lane, utils.c(8 // per_lane, i32))
    in_group = arith.muli(arith.remui(lane, utils.c(4, i32)), utils.c(2, i32))
    first = arith.addi(arith.muli(group, utils.c(8, i32)), in_group)
    vector.store(sums[0], scratch, place(warp, first))
    utils.warpgroup_barrier()
    of_lane = ir.VectorType.get((per_lane,), ir.F32Type.get())
    column = arith.muli(lane, utils.c(per_lane, i32))
    a, b, c, d = (
        vector.load(of_lane, scratch, place(utils.c(other, i32), column)) for other in range(4)
    )
    utils.warpgroup_barrier()  # the next sums go to the same place
    total, layout = arith.addf(arith.addf(a, b), arith.addf(c, d)), by_lanes(columns).to_mgpu()
    registers = np.full(layout.registers_shape((columns,)), total, dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
