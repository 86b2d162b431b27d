"""Copies of tiles between global and shared memory, and the steps of a head that they address.

wgmma reads tiles in groups of 8 rows, and TMA copies of such tiles see their array as such groups.
plgpu's take no array that has a number of steps that they do not divide. For these the copies here
are written in MLIR. A tile that lies in whole groups of the array is copied at once, as others are.
One that reaches beyond them, the last of a head, is copied group by group from and to the rows as
they are. A tile of one swizzled part, 128 bytes wide, lies row by row: one copy takes any.
Reads beyond the array are zeros, and nothing is written there.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import launch_context, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from mlstm_pallas.mosaic_gpu.interpreter import interpretable
from mlstm_pallas.mosaic_gpu.launch import barrier_address, plgpu, tile_transforms
from mlstm_pallas.problem import Problem
from mlstm_pallas.tiles import divide, remainder

GROUP = 8  # rows
THREADS = 128  # of a warpgroup: all of them arrive on a barrier


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps and columns of a head, of an array whose steps are no multiple of 8.

    As a reference it has ``at``, for a block of the steps, or of these and the columns.
    """

    array: Any  # (..., S, ..., D), as the kernel has it
    before: tuple[Any, ...]  # indices of the axes before the steps, and of those behind
    behind: tuple[Any, ...]
    start: Any
    column: Any
    shape: tuple[int, int]

    @property
    def at(self) -> "Steps":
        return self

    def __getitem__(self, index: Any) -> "Steps":
        steps, columns = index if isinstance(index, tuple) else (index, slice(None))
        starts, shape = zip(*map(_start_and_size, (steps, columns), self.shape), strict=True)
        place = self.start + starts[0], self.column + starts[1]
        return Steps(self.array, self.before, self.behind, *place, shape)

    @property
    def S(self) -> int:
        return int(self.array.shape[len(self.before)])


def _start_and_size(index: Any, size: int) -> tuple[Any, int]:
    if isinstance(index, slice):
        start, stop, _ = index.indices(size)
        return start, stop - start
    return index.start, index.size


def head_of(ref: Any, n: Any, p: Problem) -> Any:
    """(S, D) of head n, in the layouts of Triton's ``sequence_spec``; splits count as heads.

    The array may have fewer steps. TMA copies read zeros beyond them and write nothing there.
    """
    strided = len(ref.shape) == 4
    B, NH = ref.shape[0], ref.shape[2] if strided else 1
    num_splits, head = p.BNH // (B * NH), n
    steps: Any = slice(None)
    if num_splits > 1:
        head, steps = divide(n, num_splits), pl.ds(remainder(n, num_splits) * p.S, p.S)
    before = (divide(head, NH),) if strided else (head,)
    behind = (remainder(head, NH),) if strided else ()
    if not copied_by_groups(ref.shape[1]):
        return ref.at[(*before, steps, *behind)]
    start, size = _start_and_size(steps, ref.shape[1])
    return Steps(ref, before, behind, start, 0, (size, ref.shape[-1]))


@interpretable
def copied_by_groups(steps: int) -> bool:
    """Whether plgpu's copies refuse arrays of so many steps. Those of GPU interpret mode do not."""
    return steps % GROUP != 0


@interpretable
def copy_in(source: Any, tile: Any, barrier: Any, *, interpret: Any = None) -> None:
    """Starts a copy to shared memory, which arrives on the barrier."""
    if isinstance(source, Steps):
        _copy(source, tile, barrier)
    else:
        plgpu.copy_gmem_to_smem(source, tile, barrier)


@interpretable
def copy_out(tile: Any, destination: Any, where: Any = None, *, interpret: Any = None) -> None:
    """Starts a copy to global memory, where the condition holds."""
    if isinstance(destination, Steps):
        start = functools.partial(_copy, destination, tile)
        start() if where is None else pl.when(where)(start)
    else:
        plgpu.copy_smem_to_gmem(tile, destination, predicate=where)


def groups_alone(first: Any, S: int, rows: int) -> jax.Array:
    """How many groups of the tile from row ``first`` of S on go one by one; 0: it goes at once."""
    whole = first <= S // GROUP * GROUP - rows
    return jnp.where(whole, np.int32(0), np.int32(rows // GROUP))


def _copy(steps: Steps, tile: Any, barrier: Any = None) -> None:
    """Starts copies of a tile from an array, or to it without a barrier."""
    (rows, columns), itemsize = steps.shape, tile.dtype.itemsize
    transforms = tile_transforms(columns, itemsize)
    tiling, swizzle = transforms[0].tiling, transforms[1].swizzle
    axis = len(steps.before)
    groups = launch_context.TileTransform(tiling, rounding=launch_context.Rounding.DOWN)
    # A group: its parts, as wide as the swizzle, one after another.
    parts = launch_context.TileTransform(tiling[1:]), launch_context.TransposeTransform((1, 0, 2))

    def start(context, array, tile, *scalars):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        *at, count, address = (x.registers.item() for x in scalars)
        first = at.pop(axis)
        *others, column = (arith.index_cast(index, x) for x in at)
        before, behind = others[:axis], others[axis:]
        full = None
        if barrier is not None:
            shared = llvm.PointerType.get(utils.WORKGROUP_NVPTX_ADDRESS_SPACE)
            pointer = llvm.inttoptr(shared, address)
            no_phases: Any = None  # nothing waits here
            full = utils.BarrierRef(pointer, utils.c(0, i32), no_phases, 1)
            full.arrive_expect_tx(rows * columns * itemsize // THREADS)

        def copy(piece, row, size, transform, where):
            steps = utils.ds(arith.index_cast(index, row), size)
            sides = dict(src_ref=array, dst_ref=piece)
            if full is None:
                sides = dict(src_ref=piece, dst_ref=array)
            context.async_copy(
                **sides,
                gmem_slice=(*before, steps, *behind, utils.ds(column, columns)),
                gmem_transform=transform,
                barrier=full,
                swizzle=swizzle,
                arrive=False,
                predicate=where,
            )

        leader = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        if columns == tiling[1]:
            copy(utils.memref_reshape(tile, (rows, columns)), first, rows, (), leader)
        else:
            inside = arith.cmpi(arith.CmpIPredicate.eq, count, utils.c(0, i32))
            copy(tile, first, rows, groups, arith.andi(leader, inside))

            def group(g, carry):
                row = arith.addi(first, arith.muli(g, utils.c(GROUP, i32)))
                piece = utils.memref_slice(tile, arith.index_cast(index, g))
                copy(piece, row, GROUP, parts, leader)
                return carry

            utils.fori(count, [])(group)

        if full is None:
            nvvm.cp_async_bulk_commit_group()

    address = 0 if barrier is None else barrier_address(barrier)
    at = *steps.before, steps.start, *steps.behind, steps.column
    count = groups_alone(steps.start, steps.S, rows)
    scalars = [jnp.asarray(x, jnp.int32) for x in (*at, count, address)]
    types = plgpu.RefType(), plgpu.RefType(transforms), *[plgpu.Layout.WG_SPLAT] * len(scalars)
    plgpu.inline_mgpu(arg_types=types)(start)(steps.array, tile, *scalars)
