"""Products on the tensor cores (wgmma), and sums over the rows of a tile, written in MLIR.

GPU interpret mode knows no accumulator that starts from a value and no left operand in registers.
There the products are jnp.dot.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from mlstm_pallas.mosaic_gpu import in_flight
from mlstm_pallas.mosaic_gpu.launch import BY_ROWS, REGISTER_ROWS, plgpu
from mlstm_pallas.tiles import loop

SUM_SCRATCH = 4 * REGISTER_ROWS  # float32 elements, for ``Products.sum_over_rows``


def by_lanes(columns: int) -> Any:
    """The layout of 32 or 64 elements that every warp holds, neighbouring ones in a lane."""
    tiling = plgpu.Tiling(((columns,), (columns // 32,)))
    return plgpu.Layout.TILED(
        tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
    )


BY_LANES = by_lanes(64)


@dataclasses.dataclass
class _Accumulator:
    value: jax.Array


@dataclasses.dataclass(frozen=True)
class Products:
    """Products of one warpgroup. They run asynchronously: see ``read`` and ``wait``."""

    interpret: bool

    def add(self, accumulator: Any, a: Any, b: Any) -> None:
        """accumulator += a b; a in shared memory or registers, b in shared memory."""
        if self.interpret:
            in_flight.current().issue(accumulator, a, b)
            accumulator.value += jnp.dot(_loaded(a), _loaded(b), preferred_element_type=jnp.float32)
        else:
            plgpu.wgmma(accumulator, a, b)

    def wait(self, pending: int) -> None:
        """Until no more than so many products are running."""
        if self.interpret:
            in_flight.current().wait(pending)
        else:
            plgpu.wgmma_wait(pending)

    def read(self, accumulator: Any, pending: int) -> Any:
        """The value, once all its products have run.

        pending: how many later products may run on.
        """
        if not self.interpret:
            return plgpu.wgmma_accumulator_load(accumulator, wait_n=pending)
        self.wait(pending)
        in_flight.current().read(accumulator)
        return accumulator.value

    def zeros(self, rows: int, columns: int) -> Any:
        return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)

    def from_zeros(self, issue: Callable[[Any], None], rows: int, columns: int) -> Any:
        """The accumulator after ``issue(accumulator)``."""
        return self.all_from_zeros(issue, (rows, columns))[1]

    def all_from_zeros(self, issue: Callable[..., Any], *shapes: tuple[int, int]) -> Any:
        """What ``issue(*accumulators)`` returns, and the accumulators after it."""

        def scope(*accumulators: Any) -> tuple[Any, ...]:
            result = issue(*accumulators)
            return result, *(self.read(x, 0) for x in accumulators)

        if not self.interpret:
            accumulators = (plgpu.ACC(shape, jnp.float32) for shape in shapes)
            return pl.run_scoped(scope, *accumulators)
        results = scope(*(_Accumulator(jnp.zeros(shape, jnp.float32)) for shape in shapes))
        plgpu.commit_smem()
        return results

    def onto(self, issue: Callable[..., None], *initial: jax.Array) -> Sequence[jax.Array]:
        """The accumulators, which start from these values, after ``issue(*accumulators)``."""
        if self.interpret:
            sums = [_Accumulator(x) for x in initial]
            issue(*sums)
            self.wait(0)
            plgpu.commit_smem()
            return [x.value for x in sums]
        return pl.run_state(lambda refs: issue(*refs))(tuple(plgpu.ACC.init(x) for x in initial))

    def loop(
        self,
        accumulators: Any,
        count: Any,
        body: Callable[[jax.Array, Any], Any],
        init: Any = None,
    ) -> Any:
        """``tiles.loop`` of a body that adds to the accumulators: one, or a tuple."""
        if not self.interpret:
            return loop(count, body, init)
        sums = accumulators if isinstance(accumulators, tuple) else (accumulators,)

        def put(values: Sequence[jax.Array]) -> None:
            for x, value in zip(sums, values, strict=True):
                x.value = value

        def step(j: jax.Array, carry: Any) -> Any:
            values, carry = carry
            put(values)
            carry = body(j, carry)
            return [x.value for x in sums], carry

        values, carry = loop(count, step, ([x.value for x in sums], init))
        put(values)
        return carry

    def cond(
        self,
        condition: Any,
        this: Callable[[Any], None],
        that: Callable[[Any], None],
        accumulator: Any,
    ) -> None:
        """lax.cond of issuing functions: this(accumulator) or that(accumulator)."""
        if not self.interpret:
            pl.when(condition)(lambda: this(accumulator))
            pl.when(jnp.logical_not(condition))(lambda: that(accumulator))
            return

        def added(issue: Callable[[Any], None]) -> Callable[[jax.Array], jax.Array]:
            def run(value: jax.Array) -> jax.Array:
                total = _Accumulator(value)
                issue(total)
                return total.value

            return run

        accumulator.value = lax.cond(condition, added(this), added(that), accumulator.value)

    def sum_over_rows(self, x: jax.Array, scratch: Any) -> Any:
        """The sums over axis 0 of a float32 tile (64, 32 or 64), ``by_lanes``.

        jnp.sum has one scratch for the CTA. It also exchanges each sum with all lanes that hold a
        part of it, 48 shuffles a lane.

        scratch: SUM_SCRATCH elements, of this warpgroup alone.
        """
        if self.interpret:
            return jnp.sum(x, axis=0)
        columns = plgpu.ShapeDtypeStruct(x.shape[1:], jnp.float32, layout=by_lanes(x.shape[1]))
        types = plgpu.Layout.WGMMA, plgpu.RefType()
        inline = plgpu.inline_mgpu(arg_types=types, return_type=columns)
        return inline(_sum_over_rows)(x, scratch)

    def sum_over_columns(self, x: jax.Array) -> Any:
        """jnp.sum(x, axis=1), BY_ROWS, which would set aside 2 KiB of shared memory."""
        if self.interpret:
            return jnp.sum(x, axis=1)
        shape = plgpu.ShapeDtypeStruct(x.shape[:1], jnp.float32, layout=BY_ROWS)

        inline = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=shape)
        return inline(lambda _, tile: tile.reduce("add", 1))(x)

    def guard(self, barriers: Any, *buffers: Any) -> None:
        """``release`` of barrier i of these gives up slot i of the buffers.

        The only barrier gives up all slots. Absent buffers are None, absent barriers too.
        """
        if self.interpret and barriers is not None:
            in_flight.current().guard(barriers, *(x for x in buffers if x is not None))

    def acquire(self, full: Any, empty: Any) -> None:
        """Waits on ``full``: until ``release(empty)`` the warpgroup has what ``empty`` guards.

        empty: may be None, where nothing is written again.
        """
        if self.interpret and empty is not None:
            in_flight.current().acquire(empty)
        plgpu.barrier_wait(full)

    def finish(self) -> None:
        """The warpgroup has released all that it has acquired."""
        if self.interpret:
            in_flight.current().finish()

    def store(self, tile: Any, value: jax.Array) -> None:
        """tile[...] = value; a tile in shared memory."""
        if self.interpret:
            in_flight.current().overwrite(tile)
        tile[...] = value

    def release(self, *barriers: Any) -> None:
        """The warpgroup has read what these barriers guard: see ``guard``."""
        if self.interpret:
            for barrier in barriers:
                in_flight.current().release(barrier)
            plgpu.commit_smem()
        for barrier in barriers:
            plgpu.barrier_arrive(barrier)


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

    def place(warp: Any, column: Any) -> list[Any]:
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


def _loaded(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else x[...]
