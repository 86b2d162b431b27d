"""Launches of Triton kernels. Only this module imports jax.experimental.pallas.triton.

Every Triton kernel is launched through ``kernel_call``: compiled on a GPU, or interpreted.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh

from mlstm_pallas.formulas.tiles import divide, remainder
from mlstm_pallas.launches.kernel_tiles import KernelSpec, Tiles
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.problem.arrays import varying_axes
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.problem.gpu import Gpu, export_gpu

plgpu: Any
try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # jax will remove this backend; the plain forms need no kernels
    plgpu = None


class PipelinedTiles(Tiles):
    """The tiles of a kernel whose loop is a pipeline."""

    num_stages: int

    def elements(self, p: Problem) -> tuple[int, int]:
        """The elements that an iteration reads, and those that stay in shared memory."""
        raise NotImplementedError

    def shared_bytes(self, p: Problem, dtype: Any, kernel: KernelSpec) -> int:
        """The estimate of ``stages_that_fit``."""
        (iteration, kept), mma = self.elements(p), not kernel.gpu.multiplies_from_shared
        return ((self.num_stages - mma) * iteration + kept) * dtype.itemsize + 8192 * mma


def stages_that_fit(
    gpu: Gpu, iteration_bytes: int, kept_bytes: int = 0, most: int = 3, ctas_per_sm: int = 2
) -> int:
    """An estimate of the pipeline stages that fit in shared memory; the compiler decides.

    wgmma and tcgen05 read a stage from shared memory. mma reads registers, so the pipeline has one
    stage less in shared memory, beside some 8 KiB for tiles that change their layout.

    Args:
      iteration_bytes: bytes of the tiles that an iteration reads.
      kept_bytes: bytes of the tiles that stay in shared memory.
    """
    available = min(gpu.shared_bytes, gpu.sm_shared_bytes // ctas_per_sm) - 1024 - kept_bytes
    in_registers, other = (0, 2048) if gpu.multiplies_from_shared else (1, 8192)
    return min(max((available - other) // iteration_bytes, 0) + in_registers, most)


def depth_and_stages(gpu: Gpu, elements: int, depth: int, dtype: Any) -> tuple[int, int]:
    """The largest depth of a pipeline, halved down to 32, at which two CTAs with three stages fit.

    With two stages an iteration waits for the copies that it issues. float32 has two stages,
    because its products take longer than the copies.

    Args:
      elements: how many an iteration reads per step or column of its depth.
    """
    most = 2 if dtype.itemsize > 2 else 3
    while True:
        stages = stages_that_fit(gpu, depth * elements * dtype.itemsize, most=most)
        if stages >= most or depth <= 32:
            return depth, max(stages, 1)
        depth //= 2


# jax >= 0.11 lowers for a device of some twenty names. The name matters for casts to float8 alone.
_KNOWN_TO_JAX = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA A100", None, "gpu"))

# Arrays, or shapes of outputs, and a letter per axis of the layout "BNTH": see ``kernel_call``.
Operand = tuple[Any, str]


@dataclasses.dataclass(frozen=True)
class Columns:
    """Neighbouring places of an array's last axis: an operand of its own, which nothing copies.

    Attributes:
      size: how many places; None: one, without the axis.
    """

    array: Any
    start: int
    size: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.array.shape[:-1], *(() if self.size is None else (self.size,))

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def operands(source: Any, **axes: str) -> dict[str, Operand]:
    """Operands that are fields of a NamedTuple, with their letters; source None: None."""
    return {
        name: (None if source is None else getattr(source, name), at) for name, at in axes.items()
    }


def default_index(*grid: Any) -> dict[str, Any]:
    """The indices of blocks, by letter: b of the head, c of the chunk, i inside it."""
    return dict(zip("bci", reversed(grid), strict=False))


def kernel_call(
    kernel: Callable[..., None],
    inputs: Mapping[str, Operand],
    outputs: Mapping[str, Operand],
    *,
    call: Launch,
    name: str = "",
    grid: tuple[int, ...] = (),
    index: Callable[..., dict[str, Any]] = default_index,
    sizes: Mapping[str, int] = MappingProxyType({}),
    updates: Mapping[str, Operand] = MappingProxyType({}),
    **statics: Any,
) -> dict[str, Any]:
    """Launches ``kernel(**references, call=call, **statics)``; returns its outputs by name.

    References are to the block of each operand that a CTA reads or writes, in global memory. They
    have the names of the operands, and are None where the operand is None. The letter of an axis
    names the block: ``index`` has its index, otherwise it is block 0, and ``sizes`` its size. The
    reference lacks an axis whose letter has no size. "0" is the whole axis, as are those behind the
    last letter, "s" all steps and "t" the L steps of chunk c.

    Args:
      name: of the launch; empty: the kernel's name.
      grid: on the GPU axis 0 varies fastest; empty: the grid of the call's tiles.
      index: the indices of blocks, by letter, from those of the grid.
      sizes: the sizes of blocks, by letter.
      updates: operands that are written in place, by the references ``<name>_new``.
    """
    name = name or kernel.__name__.removeprefix("_").removesuffix("_kernel")
    if plgpu is None:
        raise RuntimeError(
            f"{name} is a Triton kernel, and jax {jax.__version__} has no Triton backend of "
            "Pallas: expected a jax that has one, such as 0.11.2 and 0.12.0.1, or backend None, "
            "'mosaic_gpu' or 'xla'"
        )
    grid = grid or call.tiles.grid(call.problem)
    inputs, count = {**updates, **inputs}, len(updates) + len(inputs)
    outputs = {**{f"{name}_new": x for name, x in updates.items()}, **outputs}
    all_operands = {**inputs, **outputs}
    arrays = [x for x, _ in all_operands.values()]
    in_place = len(jax.tree.leaves(arrays[: len(updates)]))
    sizes = dict(s=call.problem.S, t=call.problem.L, **sizes)

    blocks = [
        jax.tree.map(functools.partial(_block_spec, at, call.problem, sizes, index), x)
        for x, at in all_operands.values()
    ]

    def body(*refs):
        guarded = functools.partial(_guarded, grid)
        refs = jax.tree.map(guarded, [*refs], blocks, arrays)
        kernel(**dict(zip(all_operands, refs, strict=True)), call=call, **statics)

    passed = jax.tree.map(lambda x: x.array if isinstance(x, Columns) else x, arrays[:count])
    # A shard_map with check_vma needs the axes over which outputs vary.
    kind = jax.sharding.ManualAxisType(varying=varying_axes(passed))
    launch = pl.pallas_call(
        body,
        grid=grid,
        in_specs=blocks[:count],
        out_specs=blocks[count:],
        out_shape=jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind), arrays[count:]
        ),
        compiler_params=plgpu.CompilerParams(
            num_warps=call.tiles.num_warps, num_stages=getattr(call.tiles, "num_stages", 1)
        ),
        interpret=call.interpret,
        input_output_aliases={n: n for n in range(in_place)},
        name=name,
    )
    if export_gpu.get():
        # Pallas lowers a launch for the device of the mesh in which it is bound. That of a
        # shard_map has a device of this process, and is needed where the kernel is traced.
        [bound] = jax.make_jaxpr(launch)(*passed).eqns
        with jax.sharding.use_abstract_mesh(_KNOWN_TO_JAX):
            results = bound.primitive.bind(*jax.tree.leaves(passed), **bound.params)
        results = jax.tree.unflatten(jax.tree.structure(arrays[count:]), results)
    else:
        results = launch(*passed)
    return dict(zip(outputs, results, strict=True))


def _block_spec(
    at: str, p: Problem, sizes: Mapping[str, int], index: Callable[..., dict[str, Any]], x: Any
) -> pl.BlockSpec:
    """The blocks of the array x, whose axes have the letters ``at``.

    Rows of steps (s, t, or q for a tile of queries) may be in either layout, and splits of theirs
    may count as heads. The last block of an axis may reach beyond it.
    """
    if isinstance(x, Columns):
        whole: Any = _block_spec(at, p, sizes, index, x.array)
        last = None if x.size is None else pl.Element(x.size)
        return pl.BlockSpec(
            (*whole.block_shape[:-1], last), lambda *grid: (*whole.index_map(*grid)[:-1], x.start)
        )

    def index_map(*grid):
        by_letter = index(*grid)
        return tuple(by_letter.get("c" if letter == "t" else letter, 0) for letter in at)

    if len(at) != 3 or at[1] not in "stq":
        at = at.ljust(x.ndim, "0")[: x.ndim]
        shape = zip(at, x.shape, strict=True)
        return pl.BlockSpec([y if a == "0" else sizes.get(a) for a, y in shape], index_map)
    rows, columns = sizes[at[1]], sizes.get(at[2], x.shape[-1])
    B, _, *NH, _ = x.shape
    num_splits, row_blocks = p.BNH // math.prod(NH, start=B), p.S // rows

    def head_block(*grid):
        n, row, column = index_map(*grid)
        if num_splits > 1:
            n, row = divide(n, num_splits), remainder(n, num_splits) * row_blocks + row
        if not NH:
            return n, row, column
        return divide(n, *NH), row, remainder(n, *NH), column

    return pl.BlockSpec((None, rows, *[None for _ in NH], columns), head_block)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@dataclasses.dataclass(frozen=True)
class _PartialBlock:
    """A block that may reach beyond its array, where reads are 0 and writes are dropped.

    Attributes:
      ends: how many of the block's rows, columns, ... the array has; None: all.
    """

    ref: Any
    ends: tuple[Any, ...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ref, name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The block's shape, without what is beyond the array in every CTA."""
        pairs = zip(self.ref.shape, self.ends, strict=True)
        return tuple(min(size, end) if isinstance(end, int) else size for size, end in pairs)

    def _part(self, index: Any) -> tuple[Any, Array | None]:
        """The reference to a part of the block, and which of its elements the array has."""
        indices, masks = [*self.ref.at[index].transforms[-1].indices], []
        slices = [axis for axis, x in enumerate(indices) if isinstance(x, pl.Slice)]
        for axis in slices:
            start, size, end = indices[axis].start, indices[axis].size, self.ends[axis]
            # The interpreter's masked stores need starts of one dtype.
            first = lax.convert_element_type(start, np.int32)
            indices[axis] = pl.ds(first, size)
            static = isinstance(start, int) and isinstance(end, int)
            if end is not None and not (static and start + size <= end):
                inside = first + lax.iota(np.int32, size) < end
                others = [n for n, other in enumerate(slices) if other != axis]
                masks.append(jnp.expand_dims(inside, others))
        part = self.ref.at[tuple(indices)]
        if not masks:
            return part, None
        return part, jnp.broadcast_to(functools.reduce(operator.and_, masks), part.shape)

    def __getitem__(self, index: Any) -> Array:
        return masked_load(*self._part(index))

    def __setitem__(self, index: Any, x: Array) -> None:
        part, inside = self._part(index)
        masked_store(part, x, inside)


def _guarded(grid: tuple[int, ...], ref: Any, spec: Any, x: Any) -> Any:
    """The reference to a block of x, guarded along axes that blocks reach beyond."""
    if isinstance(x, Columns):
        return ref
    axes = [axis for axis, size in enumerate(spec.block_shape) if size is not None]

    def left_from(*grid):
        """What x has from the beginning of a block on, by axis."""
        at = spec.index_map(*grid)
        return [x.shape[axis] - at[axis] * spec.block_shape[axis] for axis in axes]

    # No block is further down than the block at the last indices.
    least = left_from(*(size - 1 for size in grid))
    each = zip(left_from(*map(pl.program_id, range(len(grid)))), least, ref.shape, strict=True)
    ends = tuple(left if fewest < size else None for left, fewest, size in each)
    return ref if all(end is None for end in ends) else _PartialBlock(ref, ends)


def up_to(end: Array, ref: Any) -> Any:
    """The reference to a block, of which only the rows before ``end`` are read and written."""
    if not isinstance(ref, _PartialBlock):
        ref = _PartialBlock(ref, (None,) * len(ref.shape))
    rows, *others = ref.ends
    end = end if rows is None else lax.min(end, jnp.int32(rows))
    return dataclasses.replace(ref, ends=(end, *others))


def entry_rows(entry: Any, call: Launch, *refs: Any) -> tuple[Any, ...]:
    """The rows of a CTA's chunk in the references, and the references limited to its steps.

    entry: references to the first step and the number of steps of an entry of a ``ChunkList``;
        None: the references are to the blocks of the chunk.
    """
    if entry is None:
        return slice(None), *refs
    start = entry.steps[...]
    end = start + entry.sizes[...]
    return pl.ds(start, call.problem.L), *(up_to(end, ref) for ref in refs)


def masked_load(ref: Any, mask: Array | None) -> Array:
    """ref[...] where mask holds, else 0; mask None: ref[...]."""
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)


def masked_store(ref: Any, x: Array, mask: Array | None) -> None:
    plgpu.store(ref, x, mask=mask)


def barrier(call: Launch) -> None:
    """All threads of the CTA read after it what any has stored before it."""
    if not call.interpret:
        plgpu.debug_barrier()
