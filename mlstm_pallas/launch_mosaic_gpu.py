"""The seam to Mosaic GPU: the only importer of jax.experimental.pallas.mosaic_gpu. For Hopper and jax 0.11, from 0.11.2 on.

Its interface changes between versions of jax, so what the kernels share of it is here: a launch, the layout of tiles in shared memory,
products on the tensor cores (wgmma), and sums over the rows of a tile, which are written in MLIR. In GPU interpret mode, which knows no
accumulator that starts from a value and no left operand in registers, the products are jnp.dot.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from mlstm_pallas.problem import Problem
from mlstm_pallas.tiles import divide, loop, remainder

BY_ROWS, BY_COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # of a vector beside the rows, the columns of a tile
REGISTER_ROWS = 64  # of an accumulator in the registers of one warpgroup
SUM_SCRATCH = 4 * REGISTER_ROWS  # float32 elements, for ``Products.sum_over_rows``


def by_lanes(columns: int) -> Any:
    """The layout of a vector that every warp holds, 32 or 64 elements, neighbouring ones in a lane."""
    tiling = plgpu.Tiling(((columns,), (columns // 32,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1)


BY_LANES = by_lanes(64)


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

        def entry(*refs: Any, **scratch_refs: Any) -> None:
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


@dataclasses.dataclass
class _Sum:
    value: jax.Array


@dataclasses.dataclass(frozen=True)
class Products:
    """Products of one warpgroup. They run asynchronously: see ``read`` and ``wait``."""

    interpret: bool

    def add(self, accumulator: Any, a: Any, b: Any) -> None:
        """accumulator += a b; a in shared memory or registers, b in shared memory."""
        if self.interpret:
            accumulator.value += jnp.dot(_loaded(a), _loaded(b), preferred_element_type=jnp.float32)
        else:
            plgpu.wgmma(accumulator, a, b)

    def wait(self, pending: int) -> None:
        """Until no more than so many products are running."""
        if not self.interpret:
            plgpu.wgmma_wait(pending)

    def read(self, accumulator: Any, pending: int) -> jax.Array:
        """Waits until no more than ``pending`` products, issued after the accumulator's own, are running; its value."""
        return accumulator.value if self.interpret else plgpu.wgmma_accumulator_load(accumulator, wait_n=pending)

    def zeros(self, rows: int, columns: int) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)

    def from_zeros(self, issue: Callable[[Any], None], rows: int, columns: int) -> jax.Array:
        """The accumulator after ``issue(accumulator)``."""
        return self.all_from_zeros(issue, (rows, columns))[1]

    def all_from_zeros(self, issue: Callable[..., Any], *shapes: tuple[int, int]) -> Sequence[Any]:
        """What ``issue(*accumulators)`` returns, and the accumulators after it."""

        def scope(*accumulators):
            found = issue(*accumulators)
            return found, *(self.read(x, 0) for x in accumulators)

        if not self.interpret:
            return pl.run_scoped(scope, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))
        found = scope(*(_Sum(jnp.zeros(shape, jnp.float32)) for shape in shapes))
        plgpu.commit_smem()
        return found

    def onto(self, issue: Callable[..., None], *initial: jax.Array) -> Sequence[jax.Array]:
        """The accumulators, which start from these values, after ``issue(*accumulators)``."""
        if self.interpret:
            sums = [_Sum(x) for x in initial]
            issue(*sums)
            plgpu.commit_smem()
            return [x.value for x in sums]
        return pl.run_state(lambda refs: issue(*refs))(tuple(plgpu.ACC.init(x) for x in initial))

    def loop(self, accumulators: Any, count: Any, body: Callable[[jax.Array, Any], Any], init: Any = None) -> Any:
        """``tiles.loop`` of a body that adds to the accumulators: one, or a tuple."""
        if not self.interpret:
            return loop(count, body, init)
        sums = accumulators if isinstance(accumulators, tuple) else (accumulators,)

        def put(values):
            for x, value in zip(sums, values, strict=True):
                x.value = value

        def step(j, carry):
            values, carry = carry
            put(values)
            carry = body(j, carry)
            return [x.value for x in sums], carry

        values, carry = loop(count, step, ([x.value for x in sums], init))
        put(values)
        return carry

    def sum_over_rows(self, x: jax.Array, scratch: Any) -> jax.Array:
        """The sums over axis 0 of a float32 tile (64, 32 or 64), ``by_lanes``; scratch: SUM_SCRATCH elements, of this warpgroup alone.

        jnp.sum has one scratch for the CTA. It also exchanges each sum with all lanes that hold a part of it, 48 shuffles a lane.
        """
        if self.interpret:
            return jnp.sum(x, axis=0)
        columns = plgpu.ShapeDtypeStruct(x.shape[1:], jnp.float32, layout=by_lanes(x.shape[1]))
        return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=columns)(_sum_over_rows)(x, scratch)

    def sum_over_columns(self, x: jax.Array) -> jax.Array:
        """jnp.sum(x, axis=1), BY_ROWS, without the 2 KB of shared memory that it sets aside for sums over the other axis."""
        if self.interpret:
            return jnp.sum(x, axis=1)
        shape = plgpu.ShapeDtypeStruct(x.shape[:1], jnp.float32, layout=BY_ROWS)

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=shape)
        def sums(_, tile):
            return tile.reduce("add", 1)

        return sums(x)

    def release(self, *barriers: Any) -> None:
        """The warpgroup has read what these barriers guard."""
        if self.interpret:
            plgpu.commit_smem()
        for barrier in barriers:
            plgpu.barrier_arrive(barrier)


def _sum_over_rows(_: Any, tile: Any, scratch: Any) -> mgpu.FragmentedArray:
    """Each lane holds 16 columns of two rows, or 8. In a round two lanes with the same columns exchange halves of their sums.

    After the rounds each lane has the sums of two neighbouring columns over the warp's 16 rows. Of 64 columns lane x has 2 x and 2 x + 1.
    Of 32, two lanes have each pair: in the last round they add up their halves. The sums of the four warps meet in shared memory.
    """
    i32, index, columns = ir.IntegerType.get_signless(32), ir.IndexType.get(), tile.shape[1]
    pairs = tile.registers.reshape(columns // 8, 2)  # of neighbouring columns: [columns from 8 j on, row of the lane]
    sums = [arith.addf(x, y) for x, y in pairs]
    thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
    lane, warp = arith.remui(thread, utils.c(32, i32)), arith.divui(thread, utils.c(32, i32))
    for distance in (16, 8, 4):
        half = len(sums) // 2
        if half == 0:
            sums = [arith.addf(sums[0], utils.shfl_bfly(sums[0], distance))]
            continue
        upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, utils.c(distance, i32)), utils.c(0, i32))
        kept = [arith.select(upper, y, x) for x, y in zip(sums[:half], sums[half:], strict=True)]
        given = [arith.select(upper, x, y) for x, y in zip(sums[:half], sums[half:], strict=True)]
        sums = [arith.addf(x, utils.shfl_bfly(y, distance)) for x, y in zip(kept, given, strict=True)]

    def place(warp, column):
        return [arith.index_cast(index, arith.addi(arith.muli(warp, utils.c(columns, i32)), column))]

    per_lane = columns // 32
    group = arith.divui(lane, utils.c(8 // per_lane, i32))
    first = arith.addi(arith.muli(group, utils.c(8, i32)), arith.muli(arith.remui(lane, utils.c(4, i32)), utils.c(2, i32)))
    vector.store(sums[0], scratch, place(warp, first))
    utils.warpgroup_barrier()
    of_lane, column = ir.VectorType.get((per_lane,), ir.F32Type.get()), arith.muli(lane, utils.c(per_lane, i32))
    a, b, c, d = (vector.load(of_lane, scratch, place(utils.c(other, i32), column)) for other in range(4))
    utils.warpgroup_barrier()  # the next sums go to the same place
    total, layout = arith.addf(arith.addf(a, b), arith.addf(c, d)), by_lanes(columns).to_mgpu()
    registers = np.full(layout.registers_shape((columns,)), total, dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _loaded(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else x[...]
