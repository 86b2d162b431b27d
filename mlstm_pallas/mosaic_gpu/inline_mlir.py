"""Hand-written MLIR for what Pallas cannot express.

``inline_load_transposed`` and ``inline_store_transposed`` move a tile between registers and its
transpose in global memory, which plgpu refuses because registers hold pairs of columns.
``copy_steps`` copies a tile in the layout that wgmma reads, from or to an array whose number of
steps is no multiple of 8. plgpu's TMA copies refuse such an array, because they view it as whole
groups of 8 rows. ``inline_sum_over_rows`` sums over the rows of a tile. jnp.sum cannot be used for
it, because it has one scratch in shared memory for all warpgroups of a CTA, which is a race. A
search for a jax issue about either found none (November 2026). When jax has both, this file can go.

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
from mlstm_pallas.mosaic_gpu.launch import plgpu, tile_transforms

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
    whole = (first <= S // GROUP * GROUP - rows) & (remainder(first, GROUP) == 0)
    return jnp.where(whole, np.int32(0), np.int32(rows // GROUP))


def copy_steps(steps, tile, pieces, barrier=None) -> None:
    """Starts copies of a tile: from an array with a barrier, to the array without one.

    pieces: how many; 0: the tile is copied at once.
    """
    (rows, columns), itemsize = steps.shape, tile.dtype.itemsize
    transforms = tile_transforms(min(steps.atom, columns), itemsize)
    tiling, swizzle = transforms[0].tiling, transforms[1].swizzle
    axis = len(steps.before)
    groups = launch_context.TileTransform(tiling, rounding=launch_context.Rounding.DOWN)
    # A group of rows consists of swizzle atoms, one after another.
    atoms = launch_context.TileTransform(tiling[1:]), launch_context.TransposeTransform((1, 0, 2))

    one_atom = steps.rows_of_piece == 1

    def start(context, array, tile, *scalars):
        index = ir.IndexType.get()
        *at, count, address = (x.registers.item() for x in scalars)
        first = at.pop(axis)
        *others, column = (arith.index_cast(index, x) for x in at)
        before, behind = others[:axis], others[axis:]
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
                gmem_slice=(*before, steps, *behind, utils.ds(column, columns)),
                gmem_transform=transform,
                barrier=full,
                swizzle=swizzle,
                arrive=False,
                predicate=where,
            )

        leader = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        whole, transform = ((), ()) if one_atom else (groups, atoms)
        if one_atom:
            tile = utils.memref_reshape(tile, (rows, columns))
        at_once = arith.cmpi(arith.CmpIPredicate.eq, count, _i32(0))
        copy(tile, first, rows, whole, arith.andi(leader, at_once))

        def piece(g, carry):
            row = arith.addi(first, arith.muli(g, _i32(steps.rows_of_piece)))
            place = arith.index_cast(index, g)
            rows_at_once = utils.memref_slice(tile, utils.ds(place, 1) if one_atom else place)
            copy(rows_at_once, row, steps.rows_of_piece, transform, leader)
            return carry

        utils.fori(count, [])(piece)

        if full is None:
            nvvm.cp_async_bulk_commit_group()

    address = 0 if barrier is None else barrier_address(barrier)
    at = *steps.before, steps.start, *steps.behind, steps.column
    scalars = [jnp.asarray(x, jnp.int32) for x in (*at, pieces, address)]
    types = plgpu.RefType(), plgpu.RefType(transforms), *[plgpu.Layout.WG_SPLAT] * len(scalars)
    plgpu.inline_mgpu(arg_types=types)(start)(steps.array, tile, *scalars)


def inline_load_transposed(_, zeros, array) -> mgpu.FragmentedArray:
    """The transposed tile in global memory, with the layout of ``zeros``, element by element."""
    tile: mgpu.FragmentedArray = zeros.foreach(
        lambda _, at: memref.load(array, at[::-1]), create_array=True
    )
    return tile


def inline_store_transposed(_, tile, array) -> None:
    tile.foreach(lambda x, at: memref.store(x, array, at[::-1]))


def by_lanes(columns: int):
    """The layout of 32 or 64 elements: every warp has all, every lane has neighbouring ones."""
    tiling = plgpu.Tiling(((columns,), (columns // 32,)))
    return plgpu.Layout.TILED(
        tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
    )


def inline_sum_over_rows(_, tile, scratch) -> mgpu.FragmentedArray:
    """Sums over the rows of a tile by exchanges between lanes.

    Each lane holds 16 or 8 columns of two rows. In each round two lanes with the same columns
    exchange halves of their sums.

    After the rounds each lane has the sums of two neighbouring columns over the warp's 16 rows.
    With 64 columns lane x has columns 2 x and 2 x + 1. With 32 columns two lanes have the same
    columns, because in the last round they add up their halves. The sums of the four warps meet in
    shared memory.
    """
    index, columns = ir.IndexType.get(), tile.shape[1]
    # Each entry has two neighbouring columns: [columns from 8 j on, row of the lane].
    sums = [arith.addf(x, y) for x, y in tile.registers.reshape(columns // 8, 2)]
    thread = arith.remui(utils.thread_idx(), _i32(128))
    lane, warp = arith.remui(thread, _i32(32)), arith.divui(thread, _i32(32))
    for distance in (16, 8, 4):
        half = len(sums) // 2
        if half == 0:
            sums = [arith.addf(sums[0], utils.shfl_bfly(sums[0], distance))]
            continue
        bit = arith.andi(lane, _i32(distance))
        upper = arith.cmpi(arith.CmpIPredicate.ne, bit, _i32(0))
        halves = sums[:half], sums[half:]
        kept = [arith.select(upper, y, x) for x, y in zip(*halves, strict=True)]
        sent = [arith.select(upper, x, y) for x, y in zip(*halves, strict=True)]
        sums = [
            arith.addf(x, utils.shfl_bfly(y, distance)) for x, y in zip(kept, sent, strict=True)
        ]

    def place(warp, column):
        return [arith.index_cast(index, arith.addi(arith.muli(warp, _i32(columns)), column))]

    per_lane = columns // 32
    group = arith.divui(lane, _i32(8 // per_lane))
    in_group = arith.muli(arith.remui(lane, _i32(4)), _i32(2))
    first = arith.addi(arith.muli(group, _i32(8)), in_group)
    vector.store(sums[0], scratch, place(warp, first))
    utils.warpgroup_barrier()
    of_lane = ir.VectorType.get((per_lane,), ir.F32Type.get())
    column = arith.muli(lane, _i32(per_lane))
    a, b, c, d = (vector.load(of_lane, scratch, place(_i32(other), column)) for other in range(4))
    utils.warpgroup_barrier()  # because the next sums reuse the scratch
    total, layout = arith.addf(arith.addf(a, b), arith.addf(c, d)), by_lanes(columns).to_mgpu()
    registers = np.full(layout.registers_shape((columns,)), total, dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
