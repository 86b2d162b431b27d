"""The parts of Pallas Mosaic GPU that the kernels share: launches, tile layouts and references.

Only this module imports jax.experimental.pallas.mosaic_gpu, because its interface changes between
versions of jax. It needs a Hopper GPU and jax >= 0.11.2. ``mosaic_gpu/common/products.py`` has the
products on the tensor cores.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from mlstm_pallas.formulas.tiles import divide, remainder
from mlstm_pallas.problem.arrays import varying_axes
from mlstm_pallas.problem.dimensions import Problem

plgpu: Any = mosaic_gpu  # it has no type annotations
Ref = Any  # a reference to global or shared memory, or to barriers; a tuple of some; None: absent
# The layouts of a vector with one element per row or per column of a tile.
BY_ROWS, BY_COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
WG_ROWS = 64  # rows of an accumulator in the registers of one warpgroup


def mosaic_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: Mapping[str, int],
    warpgroups: int = 1,
    outputs: Mapping[str, Any],
    scratch: Mapping[str, Any],
    infer_layouts: bool = True,
    approx_math: bool = True,
) -> Callable[..., dict[str, Any]]:
    """Wraps ``kernel(**refs)`` in plgpu.kernel; the last grid axis varies fastest.

    The function returned takes its inputs by name and returns its outputs by name. Each is an array
    or a tree of arrays. An absent one is None, and so is its reference in the kernel. The axis of
    the warpgroups is called "wg".

    Args:
      infer_layouts: False for a kernel that states the layouts of all its arrays. Inferring them
        may take seconds of Python time. LLVM unrolls loops around products without it.
      approx_math: False for exp and log that are accurate to one or two units in the last place.
    """
    semantics = plgpu.LoweringSemantics
    shapes, out_tree = jax.tree.flatten([*outputs.values()])

    def launch(**inputs):
        arrays = jax.tree.leaves([*inputs.values()])
        tree = jax.tree.structure([*inputs.values(), *outputs.values()])
        # In a shard_map with check_vma, outputs must declare the axes over which they vary, and
        # plgpu.kernel knows of no such axes.
        varying = tuple(varying_axes(arrays))

        def entry(*refs, **scratch_refs):
            # Without jit a loop would run here, and its indices would be constants.
            with jax.disable_jit(False):
                arguments = jax.tree.unflatten(tree, refs)
                names = zip((*inputs, *outputs), arguments, strict=True)
                kernel(**dict(names), **dict.fromkeys(scratch) | scratch_refs)

        buffers = {x: buffer for x, buffer in scratch.items() if buffer is not None}
        results = plgpu.kernel(
            entry,
            out_type=shapes,
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            num_threads=warpgroups,
            thread_name="wg",
            scratch_types=buffers,
            # Each kernel orders its accesses to shared memory itself: a barrier separates every
            # read from the copy that overwrites what was read.
            compiler_params=plgpu.CompilerParams(
                approx_math=approx_math,
                unsafe_no_auto_barriers=True,
                lowering_semantics=semantics.Warpgroup if infer_layouts else semantics.Lane,
            ),
            kernel_name=name,
        )(*(_varying_nowhere.bind(x) if varying else x for x in arrays))
        if varying:
            results = [lax.pcast(x, varying, to="varying") for x in results]
        return dict(zip(outputs, jax.tree.unflatten(out_tree, results), strict=True))

    return launch


# The identity, except that its result varies over no manual axis.
_varying_nowhere = Primitive("varying_nowhere")
_varying_nowhere.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
_varying_nowhere.def_impl(lambda x: x)
batching.defvectorized(_varying_nowhere)
mlir.register_lowering(_varying_nowhere, lambda _, x: [x])


def tile_transforms(columns: int, itemsize: int) -> tuple[Any, ...]:
    """The layout in shared memory of tiles that wgmma reads; columns: of a swizzle atom."""
    swizzle = columns * itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)


def atom_columns(p: Problem) -> int:
    """The columns of a swizzle atom, 8 rows of a tile: up to 64, a divisor of both head dimensions.

    Whole atoms of a tile may lie beyond the columns of its array: TMA reads zeros there and writes
    nothing. Both operands of a product need atoms of the same size.
    """
    return min((p.DHQK | p.DHV) & -(p.DHQK | p.DHV), WG_ROWS)


def shared_tiles(*shape: int, dtype, atom: int = 64):
    """Tiles in shared memory that wgmma reads; the last two axes are those of a tile.

    atom: the columns of a swizzle atom, see ``atom_columns``.
    """
    transforms = tile_transforms(min(atom, shape[-1]), dtype.itemsize)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def by_lanes(columns: int):
    """The layout of 32 or 64 elements: every warp has all, every lane has neighbouring ones."""
    tiling = plgpu.Tiling(((columns,), (columns // 32,)))
    return plgpu.Layout.TILED(
        tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
    )


def load(ref, layout=plgpu.Layout.WGMMA, *, optimized: bool = True):
    """Loads a tile in the layout of an accumulator, or in the given layout a vector beside one.

    optimized: False for loads from global memory, which are element by element.
    """
    return plgpu.load(ref, layout=layout, optimized=optimized)


def load_float32(ref, layout=plgpu.Layout.WGMMA):
    """Loads a tile as float32."""
    return load(ref, layout).astype(jnp.float32)


def write(ref, x: jax.Array) -> None:
    """Writes to memory, even if banks conflict or a part of a cache line is left out.

    jax 0.12 refuses such a store unless optimized is False; jax 0.11 has no such option.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def block(index, size: int):
    """The slice of an axis that is block ``index`` of ``size`` elements."""
    return aligned(index * size, size)


def anywhere(start: int, size: int):
    """A slice with a static start that may reach beyond the array, which only TMA may copy.

    plgpu refuses such a slice if its start is a Python integer.
    """
    return pl.ds(remainder(lax.axis_index("wg"), 1) + start, size)


def aligned(start, size: int):
    """The slice of ``size`` elements from a multiple of ``size`` on."""
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, size), size)


def unravel(index, n: int) -> tuple[Any, Any]:
    """The row and the column of an element of an array with n columns."""
    return divide(index, n), remainder(index, n)


def chunk_and_item(index, chunks: int, items_per_chunk: int, few: bool) -> tuple[Any, Any]:
    """The chunk, of all heads, and its item at a place in the order in which CTAs run items.

    The items of a chunk are neighbours, so that they share the L2. If items are few, the chunks of
    an item are, so that no CTA, or SM, has several of the long ones.
    """
    if few:
        return unravel(index, chunks)[::-1]
    return unravel(index, items_per_chunk)
