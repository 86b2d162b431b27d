"""The seam to Mosaic GPU: the only importer of jax.experimental.pallas.mosaic_gpu. For Hopper GPUs, and jax from 0.11.2 on.

Its interface changes between versions of jax, so what the kernels share of it is here: a launch, the layout of tiles in shared memory,
copies. ``stages/mosaic_gpu/products.py`` has the products on the tensor cores.
"""
import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from mlstm_pallas.mosaic_gpu.in_flight import InFlight
from mlstm_pallas.mosaic_gpu.limits import MOVES_REGISTERS
from mlstm_pallas.problem import Problem
from mlstm_pallas.tiles import divide, remainder

BY_ROWS, BY_COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # of a vector beside the rows, the columns of a tile
REGISTER_ROWS = 64  # of an accumulator in the registers of one warpgroup


def mosaic_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: Mapping[str, int],
    warpgroups: int,
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    scratch: Mapping[str, Any | None],
    interpret: bool,
    infer_layouts: bool = True,
    approx_math: bool = True,
) -> Callable[..., dict[str, Any]]:
    """plgpu.kernel of ``kernel(**refs)``; the last grid axis varies fastest.

    The function returned takes the inputs by name and gives the outputs by name. Absent ones are None, for the kernel too. The axis of
    the warpgroups is called "wg".

    Args:
      infer_layouts: False for a kernel that gives the layouts of all its arrays. Inferring them may take Python seconds. LLVM unrolls
        loops around products where they are not inferred.
      approx_math: False for exp and log to a unit or two in the last place.
    """
    semantics = plgpu.LoweringSemantics.Warpgroup if infer_layouts else plgpu.LoweringSemantics.Lane

    def launch(**inputs: jax.Array | None) -> dict[str, Any]:
        present = {name: x for name, x in inputs.items() if x is not None}
        wanted = {name: x for name, x in outputs.items() if x is not None}
        buffers = {name: x for name, x in scratch.items() if x is not None}
        absent = dict.fromkeys({*inputs, *outputs, *scratch} - {*present, *wanted, *buffers})
        # Inside a shard_map that checks it, outputs have to say over which axes they vary. plgpu.kernel itself knows of no such axes.
        varying = tuple(frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in present.values())))

        in_flight = InFlight(name) if interpret else None

        def entry(*refs: Any, **scratch_refs: Any) -> None:
            with contextlib.nullcontext() if in_flight is None else in_flight.traced(scratch_refs):
                kernel(**dict(zip((*present, *wanted), refs, strict=True)), **absent, **scratch_refs)

        found = plgpu.kernel(
            entry,
            out_type=list(wanted.values()),
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            num_threads=warpgroups,
            thread_name="wg",
            scratch_types=buffers,
            # Each kernel orders its own accesses to shared memory: a barrier for every read that a later copy overwrites.
            compiler_params=plgpu.CompilerParams(approx_math=approx_math, unsafe_no_auto_barriers=True, lowering_semantics=semantics),
            interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,  # type: ignore[attr-defined]
            kernel_name=name,
        )(*(_varying_nowhere.bind(x) if varying else x for x in present.values()))
        if in_flight is not None:
            in_flight.report()
        found = [lax.pcast(x, varying, to="varying") for x in found] if varying else found
        return dict.fromkeys(outputs) | dict(zip(wanted, found, strict=True))

    return launch


# The identity, but for the manual axes over which its result varies.
_varying_nowhere = Primitive("varying_nowhere")
_varying_nowhere.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
_varying_nowhere.def_impl(lambda x: x)
batching.defvectorized(_varying_nowhere)
mlir.register_lowering(_varying_nowhere, lambda _, x: [x])


def multiprocessors(interpret: bool) -> int:
    """CTAs of a kernel that has one an SM: the SMs of the GPU that the computation is for, or if unknown those of an H100 and an H200."""
    if interpret:
        return 2
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    device = jax.devices()[0] if abstract is None else abstract
    known = getattr(device, "core_count" if abstract is None else "num_cores", None)
    return known if device.platform == "gpu" and known else 132


def tile_transforms(columns: int, itemsize: int) -> tuple[Any, ...]:
    """The layout in shared memory of tiles that wgmma reads, whose rows have so many columns."""
    swizzle = min(columns * itemsize, 128)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def load(ref: Any, layout: Any = plgpu.Layout.WGMMA, *, optimized: bool = True) -> jax.Array:
    """A tile in registers, as an accumulator is, or a vector beside one. Not optimized: from global memory, element by element."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # type: ignore[call-arg]


def move_registers(count: int) -> None:
    """Gives the warpgroup so many registers a thread, where the compiler can.

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


def copy_where(where: jax.Array | None, tile: Any, destination: Any, *, interpret: bool) -> None:
    """Starts a copy of a tile to global memory, where the condition holds. GPU interpret mode has no predicates."""
    if interpret and where is not None:
        pl.when(where)(lambda: plgpu.copy_smem_to_gmem(tile, destination))
    else:
        plgpu.copy_smem_to_gmem(tile, destination, predicate=where)


def block(index: Any, size: int) -> Any:
    """The elements of a block of an axis."""
    start = index * size
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, size), size)


def drain(empty: Any, steps: jax.Array, num_stages: int) -> None:
    """Waits for the last releases of so many steps: no barrier may be left in the middle of a phase."""
    for x in range(num_stages):
        step = steps - num_stages + x
        pl.when(step >= 0)(functools.partial(plgpu.barrier_wait, empty.at[remainder(step, num_stages)]))


def one_of(*tiles: Any, interpret: bool) -> Any:
    """Arrays in shared memory that take the same place, slot by slot; their slots have the same bytes.

    The race detector of GPU interpret mode tells no slots apart: there, each array has a place of its own.
    """
    return list(tiles) if interpret else plgpu.RefUnion(*tiles)


def head_of(ref: Any, n: Any, p: Problem) -> Any:
    """(S, D) of head n, in the layouts of ``stage.sequence_spec``; splits count as heads."""
    if len(ref.shape) == 3:
        return ref.at[n]
    B, _, NH, _ = ref.shape
    num_splits = p.BNH // (B * NH)
    head, split = (n, 0) if num_splits == 1 else (divide(n, num_splits), remainder(n, num_splits))
    return ref.at[divide(head, NH), pl.ds(split * p.S, p.S), remainder(head, NH)]
