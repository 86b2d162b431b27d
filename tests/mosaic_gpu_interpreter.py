"""GPU interpret mode: replacements of operations that only a GPU has, and protocol checks.

Inside ``interpreted_mosaic_gpu()`` kernels run on a CPU. While one is traced, the methods of an
``Interpreter`` replace the functions of ``OPERATIONS``, without the kernel's knowledge. jax has no
public way to wake the interpreted warpgroups that wait for one that fails, hence jax._src.

On the GPU a product reads shared memory and adds to its accumulator until a wait for it returns.
jax's interpreter supports neither an accumulator that starts from a value nor a left operand in
registers, and a kernel with a missing wait would still compute the right result here. So an
``Interpreter`` computes products with jnp.dot. On the host it tracks the accumulators, the products
that each warpgroup has issued and not waited for, and the slots of rings that it has acquired and
not released. It raises an error if the warpgroup writes, reads or releases what a product still
uses, and if it breaks the protocol of a ring, before any warpgroup waits for ever.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.pallas.mosaic.interpret import thread_map, vector_clock
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from numpy_evaluator import evaluate, kernels_in_numpy, on_host

from mlstm_pallas.launches.lowering import Lowering
from mlstm_pallas.mosaic_gpu.common import copies, products
from mlstm_pallas.mosaic_gpu.common.launch import plgpu
from mlstm_pallas.mosaic_gpu.common.references import Region, base, selected, tiling
from mlstm_pallas.planning.dispatch import tiles_class
from mlstm_pallas.sharding import on_shards
from mlstm_pallas.sharding.work import on_shard

gpu_interpreter: Any = gpu_callbacks  # jax 0.10 lacks parts of it
# An ``Interpreter`` has methods of these names.
OPERATIONS = (
    *(products.add, products.wait, products.read, products.all_from_zeros, products.onto),
    *(products.sum_over_rows, products.sum_over_columns, products.store, products.guard),
    *(products.acquire, products.wait_empty, products.release),
    *(copies.copy_in, copies.copy_out, copies.load_transposed, copies.store_transposed),
)
# A part of the key of jax's caches, so that a function that was traced is traced again inside.
in_interpreter = jax.make_user_context(False)


@contextlib.contextmanager
def interpreted_mosaic_gpu() -> Iterator[None]:
    """Inside, a CPU runs all kernels, interpreted: backend "mosaic_gpu", planned for Hopper.

    The stages without a Mosaic GPU kernel run the Triton kernel, interpreted as well. All of them
    run in NumPy. Calls run on one device: ordered callbacks exclude custom_partitioning. A
    persistent kernel has two CTAs, so that each has several items.
    """
    compiled = plgpu.kernel

    def kernel(entry, *, kernel_name, num_threads, scratch_types, **options):
        interpreter = Interpreter(kernel_name, num_threads)

        def traced(*refs, **scratch):
            with interpreter.traced(scratch):
                entry(*refs, **scratch)

        return compiled(
            traced,
            kernel_name=kernel_name,
            num_threads=num_threads,
            scratch_types=interpreter.separate(scratch_types),
            # Copies take turns on these threads; one that follows on a thread hides races.
            interpret=plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64),
            **options,
        )

    interprets = property(lambda lowering: lowering is not Lowering.XLA)
    with contextlib.ExitStack() as stack:
        for context in (
            in_interpreter(True),
            mock.patch.object(plgpu, "kernel", kernel),
            mock.patch.object(Lowering, "interpret", interprets),
            mock.patch.object(
                on_shards, "partitioned", lambda work, _: functools.partial(on_shard, work)
            ),
            *map(_two_ctas, ("parallel_bw_dP", "parallel_bw_dQKV", "chunk_gradients")),
            mock.patch.object(thread_map, "_run_jaxpr", _run_in_numpy),
            kernels_in_numpy(),
            on_host(interpret_pallas_call, "interpret_pallas_call"),
            mock.patch.object(vector_clock.NpVectorClock, "ordered", _ordered),
        ):
            stack.enter_context(context)
        yield


def _run_in_numpy(jaxpr, consts, *args) -> None:
    """Runs the program of a warpgroup, which jax's form compiles."""
    evaluate(jaxpr, *args, consts=consts)


def _ordered(x: Any, y: Any) -> bool:
    """Whether one of two accesses happened before the other: no count of its clock is larger, and
    one is smaller.

    The race detector asks this of each pair of accesses to a buffer. The clock of an access does
    not change, so it is kept as one number of 32 bits per count.
    """
    (a, signs), (b, _) = _as_number(x), _as_number(y)
    return a != b and (((b | signs) - a) & signs == signs or ((a | signs) - b) & signs == signs)


def _as_number(clock: Any) -> tuple[int, int]:
    """The counts of a clock, and their sign bits, which survive a subtraction of smaller counts."""
    if not hasattr(clock, "number"):
        parts = clock.clock.astype("<u4"), np.full(clock.clock.shape, 1 << 31, "<u4")
        clock.number = tuple(int.from_bytes(x.tobytes(), "little") for x in parts)
    return clock.number


def _two_ctas(stage: str):
    """Plans at most two CTAs of a persistent kernel, unless a config asks for more."""
    kind: Any = tiles_class(stage, "mosaic_gpu")
    plan = kind.plan

    def planned(*args, **options):
        tiles = plan(*args, **options)
        return tiles and dataclasses.replace(tiles, num_ctas=min(tiles.num_ctas, 2))

    return mock.patch.object(kind, "plan", planned)


@contextlib.contextmanager
def _replaced(function: Callable[..., Any], form: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function in all modules that have it."""
    name = function.__name__
    with contextlib.ExitStack() as stack:
        for module in [*sys.modules.values()]:
            if getattr(module, "__dict__", {}).get(name) is function:
                stack.enter_context(mock.patch.object(module, name, form))
        yield


class _Product(NamedTuple):
    accumulator: str
    reads: list[tuple[str, Region]]


@dataclasses.dataclass
class _Warpgroup:
    """What the host knows of a warpgroup."""

    index: int
    values: dict[str, Any]  # by accumulator
    running: list[_Product]  # in order of issue
    acquired: list[str]  # barriers


class Interpreter:
    """The products of one launch. A kernel calls the public methods while it is traced.

    Functions that take a ``_Warpgroup`` run on the host, in the order of the calls.
    """

    def __init__(self, kernel: str, warpgroups: int) -> None:
        self.kernel = kernel
        self._warpgroups = [_Warpgroup(wg, {}, [], []) for wg in range(warpgroups)]
        self._names: dict[int, tuple[Any, str]] = {}  # by id: the object and its name
        self._filled: dict[str, list[str]] = {}  # by full barrier: the buffers that it guards
        self._full: dict[str, str] = {}  # by empty barrier: the full barrier
        self._unions: list[str] = []  # of arrays that share their memory
        self._sharing: dict[str, list[Any]] = {}  # the other arrays of a union, by array

    @contextlib.contextmanager
    def traced(self, scratch: Mapping[str, Any]) -> Iterator[None]:
        """Replaces the operations; error messages use the names of the scratch."""
        leaves = {_name_of(path): x for path, x in jax.tree.leaves_with_path(dict(scratch))}
        self._names.update((id(base(x)), (base(x), name)) for name, x in leaves.items())
        for union in self._unions:
            names = [name for name in leaves if name.startswith(f"{union}.")]
            self._sharing |= {x: [leaves[y] for y in names if x != y] for x in names}

        def begin(wg: _Warpgroup, _) -> None:
            self._warpgroups[wg.index] = _Warpgroup(wg.index, {}, [], [])

        def finish(wg: _Warpgroup, _) -> None:
            for barrier in wg.acquired:
                self._refuse(wg, f"ends with {barrier}", "release before")

        with contextlib.ExitStack() as stack:
            stack.callback(self._names.clear)
            stack.callback(self._sharing.clear)
            for function in OPERATIONS:
                stack.enter_context(_replaced(function, getattr(self, function.__name__)))
            self._call(begin)
            yield
            self._call(finish)

    def add(self, accumulator: jax.ShapeDtypeStruct, a, b) -> None:
        shared = [x for x in (a, b) if not isinstance(x, jax.Array)]
        name, names = self._name(accumulator), [self._name(x) for x in shared]
        loaded = (x if isinstance(x, jax.Array) else x[...] for x in (a, b))

        def issue(wg: _Warpgroup, values) -> None:
            regions, product = values
            wg.running.append(_Product(name, list(zip(names, regions, strict=True))))
            wg.values[name] = wg.values[name] + np.asarray(product)

        product = jnp.dot(*loaded, preferred_element_type=jnp.float32)
        self._call(issue, ([*map(_region, shared)], product))

    def wait(self, pending: int) -> None:
        def end(wg: _Warpgroup, _) -> None:
            del wg.running[: -pending or None]

        self._call(end)

    def read(self, accumulator: jax.ShapeDtypeStruct, pending: int):
        name = self._name(accumulator)

        def value(wg: _Warpgroup, _):
            if any(x.accumulator == name for x in wg.running):
                self._refuse(wg, f"reads {name}, to which a running product adds")
            return wg.values[name]

        self.wait(pending)
        return self._call(value, result=accumulator)

    def all_from_zeros(self, issue: Callable[..., Any], *shapes: tuple[int, int]):
        return self._accumulated(issue, [jnp.zeros(shape, jnp.float32) for shape in shapes])

    def onto(self, issue: Callable[..., None], *initial: jax.Array):
        return self._accumulated(issue, initial)[1:]

    def _accumulated(self, issue: Callable[..., Any], initial: Sequence[jax.Array]):
        sums = [*map(self._accumulator, initial)]
        results = issue(*sums), *(self.read(x, 0) for x in sums)
        plgpu.commit_smem()
        return results

    def sum_over_rows(self, x: jax.Array, scratch) -> jax.Array:
        self.store(scratch, jnp.zeros(scratch.shape, scratch.dtype))
        return jnp.sum(x, axis=0)

    def sum_over_columns(self, x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=1)

    def load_transposed(self, array):
        return array[...].T

    def store_transposed(self, array, tile) -> None:
        array[...] = tile.T

    def copy_in(self, source, tile, barrier) -> None:
        self.guard(barrier, tile)
        self._overwrite(tile)
        source = self._all_steps(source, tile)
        self._check_copy(tile, source)
        plgpu.copy_gmem_to_smem(source, tile, barrier)

    def copy_out(self, tile, destination, where=None, size=None) -> None:
        rows = tile.shape[0]
        destination = self._all_steps(destination, tile, size)
        self._check_copy(tile, destination, where)
        copy, whole = plgpu.copy_smem_to_gmem, where is None or where
        if size is not None:
            for row in range(rows):
                sides = (x.at[pl.ds(row, 1)] for x in (tile, destination))
                pl.when((row < size) & (size < rows) & whole)(functools.partial(copy, *sides))
            whole &= size == rows
        pl.when(whole)(lambda: copy(tile, destination))

    def _all_steps(self, steps, tile, size=None):
        """The reference to steps that are copied at once or in pieces, after a check."""
        if not hasattr(steps, "pieces"):
            return steps
        (start, S), rows, piece_rows = steps.start_and_count, tile.shape[0], steps.piece_rows(tile)

        def check(wg: _Warpgroup, values) -> None:
            start, pieces, size = map(int, values)
            in_groups = start % 8 == 0 and start + rows <= S // 8 * 8
            if not (pieces or piece_rows == 1 or in_groups):
                self._refuse(wg, f"copies {rows} of {S} steps from {start} on at once", "pieces")
            if (copied := pieces * piece_rows or rows) != size:
                self._refuse(wg, f"copies {copied} steps", f"{size} steps")

        self._call(check, (start, steps.pieces(tile, size), rows if size is None else size))
        return steps.reference

    def _check_copy(self, tile, array, where=None) -> None:
        """Checks a copy against TMA's limits, and that it begins within the array.

        It may begin beyond along an axis of which it has several blocks, where TMA reads zeros. The
        index of a single block is dropped if the array has a single one, too.
        """
        shape, (region, axes) = base(array).shape, selected(array)
        atom = tiling(tile)
        tiles = dict(zip(axes[::-1], atom[::-1], strict=False))
        blocks = [size // tiles.get(axis, 1) for axis, (_, size) in enumerate(region)]
        strides = np.cumprod(shape[:0:-1]) * tile.dtype.itemsize
        kept = {x for x, count in enumerate(blocks) if count > 1 or shape[x] > tiles.get(x, 1)}
        squeezed = len(kept - {*axes})  # becomes one axis if there are more than five
        rank = len(kept) + len(tiles) - max(squeezed - 1, 0)

        def expect(is_met: bool, limit: str) -> None:
            if not is_met:
                what = f"{self.kernel} copies {tile.shape} of {shape} in blocks of {atom}"
                raise ValueError(f"{what}, expected {limit}")

        expect(rank <= 5, "five axes or fewer")
        expect(max(blocks) <= 256, "256 blocks or fewer along each axis")
        expect(max(atom, default=1) <= 256, "blocks of 256 elements or fewer along each axis")
        expect(not any(strides % 16), "strides of whole 16 bytes")
        one = [x for x, count in enumerate(blocks) if count == 1]

        def check(wg: _Warpgroup, values) -> None:
            offsets, where = values
            for axis, start in zip(one, map(int, offsets), strict=True):
                size = shape[axis]
                if where and not 0 <= start < size:
                    self._refuse(wg, f"copies a block at {start} of an axis of {size}", "it within")

        self._call(check, ([region[x][0] for x in one], where is None or where))

    def guard(self, full, *buffers) -> None:
        filled = self._filled.setdefault(self._name(full), [])
        filled.extend(map(self._name, buffers))

    def store(self, tile, value: jax.Array) -> None:
        self._overwrite(tile)
        self._check_unread("writes", tile)
        tile[...] = value

    def _overwrite(self, tile) -> None:
        """Makes the same slot NaN in the arrays that share the tile's memory."""
        for other in self._sharing.get(self._name(tile), ()):
            slot = other.at[_region(tile)[0][0]]
            unknown = jnp.full(slot.shape, jnp.nan, slot.dtype)
            self._check_unread("overwrites", slot)
            slot[...] = unknown
            plgpu.commit_smem()

    def acquire(self, full, empty) -> None:
        if empty is None:
            plgpu.barrier_wait(full)
        else:
            self._full[self._name(empty)] = self._name(full)
            self._block(full, empty)

    def wait_empty(self, empty) -> None:
        self._block(empty, empty)

    def release(self, *barriers) -> None:
        for barrier in barriers:
            release = functools.partial(self._release, self._name(barrier))
            self._call(release, _slot(barrier))
        plgpu.commit_smem()
        for barrier in barriers:
            plgpu.barrier_arrive(barrier)

    def separate(self, scratch: Mapping[str, Any]):
        """The scratch with each ``RefUnion`` as a list: the race detector does not know slots."""

        def members(path, x):
            if not isinstance(x, plgpu.RefUnion):
                return x
            self._unions.append(_name_of(path))
            return list(x.refs)

        return jax.tree.map_with_path(members, dict(scratch))

    def _name(self, x) -> str:
        x = base(x)
        return self._names.setdefault(id(x), (x, f"accumulator {len(self._names)}"))[1]

    def _accumulator(self, initial: jax.Array) -> jax.ShapeDtypeStruct:
        accumulator = jax.ShapeDtypeStruct(initial.shape, jnp.float32)
        name = self._name(accumulator)

        def start(wg: _Warpgroup, value) -> None:
            wg.values[name] = np.array(value)

        self._call(start, initial)
        return accumulator

    def _call(self, function: Callable[[_Warpgroup, Any], Any], values: Any = (), result=None):
        def on_host(wg, values):
            value = function(self._warpgroups[int(wg)], values)
            return result if value is None else value

        return io_callback(on_host, result, lax.axis_index("wg"), values, ordered=True)

    def _block(self, barrier, empty) -> None:
        """Waits on the barrier after a check; the index depends on it, so XLA keeps the order."""
        name, acquires = self._name(empty), barrier is not empty

        def check(wg: _Warpgroup, slot: Region) -> None:
            if (barrier := _indexed(name, slot)) in wg.acquired:
                does = "acquires" if acquires else "waits for"
                self._refuse(wg, f"{does} {barrier}, which it has itself", "release before")
            if acquires:
                wg.acquired.append(barrier)

        zero = self._call(check, _slot(empty), np.int32(0))
        [(index, _)] = _slot(barrier) or [(0, 1)]
        plgpu.barrier_wait(base(barrier).at[index + zero])

    def _check_unread(self, doing: str, tile) -> None:
        self._call(functools.partial(self._end, doing, [self._name(tile)]), _region(tile))

    def _end(self, doing: str, names: list[str], wg: _Warpgroup, region: Region) -> None:
        """Checks that no running product of the warpgroup reads this part of the buffers."""
        for name, region_read in (read for x in wg.running for read in x.reads):
            if name in names and _overlap(region_read, region):
                self._refuse(wg, f"{doing} {name}, which a running product reads")

    def _release(self, name: str, wg: _Warpgroup, slot: Region) -> None:
        if (barrier := _indexed(name, slot)) not in wg.acquired:
            self._refuse(wg, f"releases {barrier}", "acquire before")
        wg.acquired.remove(barrier)
        buffers = self._filled.get(self._full[name])
        if buffers is None:
            self._refuse(wg, f"releases {name}, which guards no buffer", "copy_in or guard before")
        self._end(f"releases {name} of", buffers, wg, slot)

    def _refuse(self, wg: _Warpgroup, what: str, expected: str = "wait before") -> NoReturn:
        error = RuntimeError(f"{self.kernel}: warpgroup {wg.index} {what}, expected {expected}")
        # Wakes the warpgroups that wait for this one. A single warpgroup has no thread of its own.
        alone = len(self._warpgroups) == 1
        gpu_interpreter._get_shared_memory().set_failed(error, top_level=alone)
        raise error


def _name_of(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _region(x) -> Region:
    """The part of its buffer that a reference selects; empty: all of it."""
    selects = any(hasattr(y, "indices") for y in getattr(x, "transforms", ()))
    return selected(x)[0] if selects else []


def _slot(barrier) -> Region:
    """The slot that a barrier guards; a single barrier guards all slots."""
    return _region(barrier) if base(barrier).shape[:1] > (1,) else []


def _indexed(name: str, slot: Region) -> str:
    return name + "".join(f"[{int(start)}]" for start, _ in slot)


def _overlap(x: Region, y: Region) -> bool:
    return all(a < b + m and b < a + n for (a, n), (b, m) in zip(x, y, strict=False))
