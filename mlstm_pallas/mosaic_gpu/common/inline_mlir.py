"""Hand-written MLIR for what Pallas cannot express.

``inline_load_transposed`` and ``inline_store_transposed`` move a tile between registers and its
transpose in global memory, which plgpu refuses because registers hold pairs of columns.
``copy_steps`` copies a tile in the layout that wgmma reads, from or to an array whose number of
steps is no multiple of 8. plgpu's TMA copies refuse such an array, because they view it as whole
groups of 8 rows. A search for a jax issue about it found none (November 2026).
``inline_sum_by_warps`` sums the rows of a tile with fewer shuffles and barriers than plgpu's
reduction has.

The lowering rule of ``barrier_address`` needs jax._src, which is imported when a kernel has such an
address: inline_mgpu passes arrays and references to memory, no barriers, and jax has no public way
to register a primitive for kernels.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import launch_context, utils
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

from mlstm_pallas.formulas.tiles import remainder
from mlstm_pallas.mosaic_gpu.common.launch import plgpu, tile_transforms
from mlstm_pallas.mosaic_gpu.common.references import base, selected, tiling

GROUP = 8  # rows per group
THREADS = 128  # per warpgroup; all of them arrive on a barrier


def _i32(x: int):
    return utils.c(x, ir.IntegerType.get_signless(32))


def barrier_address(barrier) -> jax.Array:
    """The address of a barrier in shared memory, for MLIR, because inline_mgpu takes no barriers.

    It works only in kernels whose layouts are inferred.
    """
    base, index = barrier, 0
    if hasattr(barrier, "transforms"):
        base, ((index,),) = barrier.ref, (x.indices for x in barrier.transforms)
    return _barrier_address().bind(base, jnp.asarray(index, jnp.int32))


@functools.cache
def _barrier_address() -> Primitive:
    from jax._src.pallas.mosaic_gpu import lowering

    primitive = Primitive("barrier_address")
    primitive.def_abstract_eval(lambda barriers, index: jax.core.ShapedArray((), jnp.int32))

    @lowering.register_lowering_rule(primitive, plgpu.LoweringSemantics.Warpgroup)
    def lower(_, barriers, index):
        index = index if isinstance(index, ir.Value) else int(index)
        return llvm.ptrtoint(ir.IntegerType.get_signless(32), barriers[index].get_ptr())

    return primitive


def groups_alone(first, S: int, rows: int) -> jax.Array:
    """How many groups of the tile at row ``first`` of S are copied one by one; 0: all at once."""
    in_groups = (first <= S // GROUP * GROUP - rows) & (remainder(first, GROUP) == 0)
    return jnp.where(in_groups, np.int32(0), np.int32(rows // GROUP))


def copy_steps(steps, tile, pieces, barrier=None) -> None:
    """Starts copies of a tile: from an array with a barrier, to the array without one.

    Args:
      steps: the reference to the steps and columns of the array; the steps are its axis 1.
      pieces: how many; 0: the tile is copied at once.
    """
    (rows, columns), itemsize, atom = steps.shape, tile.dtype.itemsize, tiling(tile)
    transforms = tile_transforms(atom[1], itemsize)
    groups = launch_context.TileTransform(atom, rounding=launch_context.Rounding.DOWN)
    # A group of rows consists of swizzle atoms, one after another.
    atoms = launch_context.TileTransform(atom[1:]), launch_context.TransposeTransform((1, 0, 2))
    one_atom = columns == atom[1]
    piece_rows = 1 if one_atom else GROUP

    def start(context, array, tile, *scalars):
        index = ir.IndexType.get()
        *at, count, address = (x.registers.item() for x in scalars)
        first = at.pop(1)
        before, *behind, column = (arith.index_cast(index, x) for x in at)
        full = None
        if barrier is not None:
            shared = llvm.PointerType.get(utils.WORKGROUP_NVPTX_ADDRESS_SPACE)
            pointer = llvm.inttoptr(shared, address)
            no_phases: Any = None  # nothing waits on the barrier here
            full = utils.BarrierRef(pointer, _i32(0), no_phases, 1)
            full.arrive_expect_tx(rows * columns * itemsize // THREADS)

        def copy(piece, row, size, transform, where):
            steps = utils.ds(arith.index_cast(index, row), size)
            sides = dict(src_ref=array, dst_ref=piece)
            if full is None:
                sides = dict(src_ref=piece, dst_ref=array)
            context.async_copy(
                **sides,
                gmem_slice=(before, steps, *behind, utils.ds(column, columns)),
                gmem_transform=transform,
                barrier=full,
                swizzle=transforms[1].swizzle,
                arrive=False,
                predicate=where,
            )

        leader = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        order, transform = ((), ()) if one_atom else (groups, atoms)
        if one_atom:
            tile = utils.memref_reshape(tile, (rows, columns))
        at_once = arith.cmpi(arith.CmpIPredicate.eq, count, _i32(0))
        copy(tile, first, rows, order, arith.andi(leader, at_once))

        def piece(g, carry):
            row = arith.addi(first, arith.muli(g, _i32(piece_rows)))
            position = arith.index_cast(index, g)
            rows_at_once = utils.memref_slice(tile, utils.ds(position, 1) if one_atom else position)
            copy(rows_at_once, row, piece_rows, transform, leader)
            return carry

        utils.fori(count, [])(piece)

        if full is None:
            nvvm.cp_async_bulk_commit_group()

    address = 0 if barrier is None else barrier_address(barrier)
    starts = (start for start, _ in selected(steps)[0])
    scalars = [jnp.asarray(x, jnp.int32) for x in (*starts, pieces, address)]
    types = plgpu.RefType(), plgpu.RefType(transforms), *[plgpu.Layout.WG_SPLAT] * len(scalars)
    plgpu.inline_mgpu(arg_types=types)(start)(base(steps), tile, *scalars)


def inline_load_transposed(_, zeros, array) -> mgpu.FragmentedArray:
    """The transposed tile in global memory, with the layout of ``zeros``, element by element."""
    return zeros.foreach(lambda _, at: memref.load(array, at[::-1]), create_array=True)


def inline_store_transposed(_, tile, array) -> None:
    tile.foreach(lambda x, at: memref.store(x, array, at[::-1]))


def inline_sum_by_warps(_, tile, scratch) -> None:
    """Writes the sums over each warp's 16 rows of a tile to scratch, (4 * columns,).

    A lane has two rows of the tile, and of each 8 columns two neighbouring ones. In each round two
    lanes with the same columns exchange halves of their sums: 14 shuffles for 64 columns, and one
    barrier, where FragmentedArray.reduce has 48 shuffles, and a barrier per 8 columns.

    tile: 64 rows and 32 or 64 columns.
    """
    columns = tile.shape[1]
    sums = [arith.addf(x, y) for x, y in tile.registers.reshape(columns // 8, 2)]
    thread = arith.remui(utils.thread_idx(), _i32(THREADS))
    lane = arith.remui(thread, _i32(32))
    for distance in (16, 8, 4):
        if len(sums) == 1:  # two lanes have the same sum
            sums *= 2
        upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, _i32(distance)), _i32(0))
        half = len(sums) // 2
        pairs = list(zip(sums[:half], sums[half:], strict=True))
        kept = [arith.select(upper, y, x) for x, y in pairs]
        sent = [arith.select(upper, x, y) for x, y in pairs]
        sums = [
            arith.addf(x, utils.shfl_bfly(y, distance)) for x, y in zip(kept, sent, strict=True)
        ]
    of_warp = arith.muli(arith.divui(thread, _i32(32)), _i32(columns))
    group = arith.muli(arith.divui(lane, _i32(256 // columns)), _i32(8))
    in_group = arith.muli(arith.remui(lane, _i32(4)), _i32(2))
    place = arith.addi(of_warp, arith.addi(group, in_group))
    utils.warpgroup_barrier()  # the sums before these were read
    vector.store(sums[0], scratch, [arith.index_cast(ir.IndexType.get(), place)])
    utils.warpgroup_barrier()
