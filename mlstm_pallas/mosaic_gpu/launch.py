"""The only importer of jax.experimental.pallas.mosaic_gpu, for Hopper GPUs and jax >= 0.11.2.

Its interface changes between versions of jax, so what the kernels share of it is here: a launch,
the layout of tiles in shared memory, and references.
``mosaic_gpu/products.py`` has the products on the tensor cores.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from mlstm_pallas.mosaic_gpu.interpreter import Interpreter
from mlstm_pallas.mosaic_gpu.limits import MOVES_REGISTERS
from mlstm_pallas.tiles import divide

plgpu: Any = mosaic_gpu  # which has no annotations
BY_ROWS, BY_COLUMNS = (
    plgpu.Layout.WGMMA.reduce(1),
    plgpu.Layout.WGMMA.reduce(0),
)  # of a vector beside the rows, the columns of a tile
WG_ROWS = 64  # of an accumulator in the registers of one warpgroup


def mosaic_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: Mapping[str, int],
    warpgroups: int,
    outputs: Mapping[str, Any],
    scratch: Mapping[str, Any],
    interpret: bool,
    infer_layouts: bool = True,
    approx_math: bool = True,
) -> Callable[..., dict[str, Any]]:
    """plgpu.kernel of ``kernel(**refs)``; the last grid axis varies fastest.

    The function returned takes the inputs by name and gives the outputs by name: arrays or trees of
    them. Absent ones are None, for the kernel too. The axis of the warpgroups is called "wg".

    Args:
      infer_layouts: False for a kernel that gives the layouts of all its arrays. Inferring them may
        take Python seconds. LLVM unrolls loops around products where they are not inferred.
      approx_math: False for exp and log to a unit or two in the last place.
    """
    semantics = plgpu.LoweringSemantics
    shapes, out_tree = jax.tree.flatten([*outputs.values()])

    def launch(**inputs):
        arrays, in_tree = jax.tree.flatten([*inputs.values()])
        # Inside a shard_map that checks it, outputs have to say over which axes they vary.
        # plgpu.kernel itself knows of no such axes.
        axes = (jax.typeof(x).manual_axis_type.varying for x in arrays)
        varying = tuple(frozenset().union(*axes))

        interpreter = Interpreter(plgpu, name, warpgroups) if interpret else None

        def entry(*refs, **scratch_refs):
            with interpreter.traced(scratch_refs) if interpreter else contextlib.nullcontext():
                operands = jax.tree.unflatten(in_tree, refs[: len(arrays)])
                results = jax.tree.unflatten(out_tree, refs[len(arrays) :])
                names = zip((*inputs, *outputs), (*operands, *results), strict=True)
                kernel(**dict(names), **dict.fromkeys(scratch) | scratch_refs)

        buffers = {x: buffer for x, buffer in scratch.items() if buffer is not None}
        results = plgpu.kernel(
            entry,
            out_type=shapes,
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            num_threads=warpgroups,
            thread_name="wg",
            scratch_types=interpreter.separate(buffers) if interpreter else buffers,
            # Each kernel orders its own accesses to shared memory: a barrier for every read that a
            # later copy overwrites.
            compiler_params=plgpu.CompilerParams(
                approx_math=approx_math,
                unsafe_no_auto_barriers=True,
                lowering_semantics=semantics.Warpgroup if infer_layouts else semantics.Lane,
            ),
            interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
            kernel_name=name,
        )(*(_varying_nowhere.bind(x) if varying else x for x in arrays))
        if varying:
            results = [lax.pcast(x, varying, to="varying") for x in results]
        return dict(zip(outputs, jax.tree.unflatten(out_tree, results), strict=True))

    return launch


# The identity, but for the manual axes over which its result varies.
_varying_nowhere = Primitive("varying_nowhere")
_varying_nowhere.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
_varying_nowhere.def_impl(lambda x: x)
batching.defvectorized(_varying_nowhere)
mlir.register_lowering(_varying_nowhere, lambda _, x: [x])


class PersistentScheduler(NamedTuple):
    """The items of a CTA that stays: every num_ctas-th, from that of its index on."""

    program: jax.Array
    num_ctas: int

    def item(self, index: Any) -> Any:
        return self.program + index * self.num_ctas

    def num_items(self, items: int) -> jax.Array:
        return divide(items - 1 - self.program, self.num_ctas) + 1


def tile_transforms(columns: int, itemsize: int) -> tuple[Any, ...]:
    """The layout in shared memory of tiles with so many columns that wgmma reads."""
    swizzle = min(columns * itemsize, 128)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def shared_tiles(*shape: int, dtype: Any) -> Any:
    """Tiles in shared memory, of the last two axes, that wgmma reads."""
    return plgpu.SMEM(shape, dtype, transforms=tile_transforms(shape[-1], dtype.itemsize))


def shared_bytes(scratch: Mapping[str, Any], *, has_sum: bool = False) -> int:
    """Shared memory of a CTA. Each array, and all barriers, begin at a multiple of 1024 bytes.

    has_sum: whether the kernel has a jnp.sum of a tile, which takes 2 KiB.
    """
    buffers = (x for x in jax.tree.leaves(dict(scratch)) if not isinstance(x, plgpu.Barrier))
    sizes = (math.prod(x.shape) * x.dtype.itemsize for x in buffers)
    total: int = 1024 + sum(-(-size // 1024) * 1024 for size in sizes)
    return total + 2048 * has_sum


def float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def load(ref: Any, layout: Any = plgpu.Layout.WGMMA, *, optimized: bool = True) -> Any:
    """A tile in registers, in the layout of an accumulator, or a vector beside one.

    optimized: False from global memory, element by element.
    """
    return plgpu.load(ref, layout=layout, optimized=optimized)


def move_registers(count: int) -> None:
    """Gives the warpgroup ``count`` registers per thread, where the compiler can.

    For a kernel that a copying warpgroup leaves too few. All others have enough without it.
    """
    if MOVES_REGISTERS:
        plgpu.set_max_registers(count, action="increase" if count > 168 else "decrease")


def write(ref: Any, x: jax.Array) -> None:
    """Writes to shared memory, in a kernel that gives its layouts, also where banks conflict.

    jax 0.12 refuses such a store unless told so; jax 0.11 knows no other.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def block(index: Any, size: int) -> Any:
    """The elements of a block of an axis."""
    start = index * size
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, size), size)


def one_of(*tiles: Any) -> Any:
    """Arrays in the same place of shared memory, slot by slot; their slots have the same bytes."""
    return plgpu.RefUnion(*tiles)
