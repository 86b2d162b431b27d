"""GPU interpret mode: replacements of operations that only a GPU has, and protocol checks.

``mosaic_call`` imports this module, and makes an ``Interpreter`` current, while it traces an
interpreted kernel. An ``interpretable`` function then runs as the method of the same name, without
the kernel's knowledge. jax has no public way to wake the interpreted warpgroups that wait for one
that fails, hence jax._src.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import io_callback
from jax.experimental import pallas as pl

from mlstm_pallas.mosaic_gpu.interpretable import current

gpu_interpreter: Any = gpu_callbacks  # jax 0.10 lacks parts of it
Region = list[tuple[Any, Any]]  # start and size along the first axes; all other axes are whole


class _Accumulator(NamedTuple):
    shape: tuple[int, ...]


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

    Methods that take a ``_Warpgroup`` run on the host, in the order of the calls.
    """

    def __init__(self, plgpu, kernel: str, warpgroups: int) -> None:
        self.plgpu = plgpu  # only launch.py imports it
        self.kernel = kernel
        self._warpgroups = [_Warpgroup(wg, {}, [], []) for wg in range(warpgroups)]
        self._names: dict[int, tuple[Any, str]] = {}  # by id: the object and its name
        self._filled: dict[str, list[str]] = {}  # by full barrier: the buffers that it guards
        self._full: dict[str, str] = {}  # by empty barrier: the full barrier

    @contextlib.contextmanager
    def traced(self, scratch: Mapping[str, Any]) -> Iterator[None]:
        """Makes this object current; error messages use the names of the scratch."""
        for path, x in jax.tree.leaves_with_path(dict(scratch)):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            self._names[id(_base(x))] = _base(x), name
        token = current.set(self)
        try:
            self._call(self._begin)
            yield
            self._call(self._finish)
        finally:
            current.reset(token)
            self._names.clear()

    def add(self, accumulator: _Accumulator, a, b) -> None:
        shared = [x for x in (a, b) if not isinstance(x, jax.Array)]
        names = [self._name(x) for x in shared]
        product = jnp.dot(_loaded(a), _loaded(b), preferred_element_type=jnp.float32)
        values = [*map(_region, shared)], product
        self._call(self._add, self._name(accumulator), names, values=values)

    def wait(self, pending: int) -> None:
        self._call(self._wait, pending)

    def read(self, accumulator: _Accumulator, pending: int):
        self.wait(pending)
        value = jax.ShapeDtypeStruct(accumulator.shape, jnp.float32)
        return self._call(self._read, self._name(accumulator), result=value)

    def all_from_zeros(self, issue: Callable[..., Any], *shapes: tuple[int, int]):
        return self._accumulated(issue, [jnp.zeros(shape, jnp.float32) for shape in shapes])

    def onto(self, issue: Callable[..., None], *initial: jax.Array):
        return self._accumulated(issue, initial)[1:]

    def _accumulated(self, issue: Callable[..., Any], initial: Sequence[jax.Array]):
        sums = [*map(self._accumulator, initial)]
        results = issue(*sums), *(self.read(x, 0) for x in sums)
        self.plgpu.commit_smem()
        return results

    def sum_over_rows(self, x: jax.Array, scratch) -> jax.Array:
        return jnp.sum(x, axis=0)

    def sum_over_columns(self, x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=1)

    def load_transposed(self, array):
        return array[...].T

    def store_transposed(self, array, tile) -> None:
        array[...] = tile.T

    def copied_by_groups(self, steps: int) -> bool:
        return False

    def copy_in(self, source, tile, barrier) -> None:
        self.guard(barrier, tile)
        self.plgpu.copy_gmem_to_smem(source, tile, barrier)

    def copy_out(self, tile, destination, where=None, size=None) -> None:
        copy = self.plgpu.copy_smem_to_gmem
        if size is not None:
            where = size == tile.shape[0]
            for row in range(tile.shape[0]):
                sides = (x.at[pl.ds(row, 1)] for x in (tile, destination))
                pl.when((row < size) & ~where)(functools.partial(copy, *sides))
        pl.when(where is None or where)(lambda: copy(tile, destination))

    def guard(self, full, *buffers) -> None:
        filled = self._filled.setdefault(self._name(full), [])
        filled.extend(map(self._name, buffers))

    def store(self, tile, value: jax.Array) -> None:
        self._call(self._end, "writes", [self._name(tile)], values=_region(tile))
        tile[...] = value

    def acquire(self, full, empty) -> None:
        if empty is None:
            self.plgpu.barrier_wait(full)
        else:
            self._full[self._name(empty)] = self._name(full)
            self._block(full, self._acquire, empty)

    def wait_empty(self, empty) -> None:
        self._block(empty, self._wait_empty, empty)

    def release(self, *barriers) -> None:
        for barrier in barriers:
            self._call(self._release, self._name(barrier), values=_slot(barrier))
        self.plgpu.commit_smem()
        for barrier in barriers:
            self.plgpu.barrier_arrive(barrier)

    def separate(self, scratch: Mapping[str, Any]):
        """The scratch with each ``one_of`` as a list: the race detector does not know slots."""
        return jax.tree.map(
            lambda x: list(x.refs) if isinstance(x, self.plgpu.RefUnion) else x, dict(scratch)
        )

    def _name(self, x) -> str:
        x = _base(x)
        unnamed = f"{type(x).__name__.strip('_').lower()} {len(self._names)}"
        return self._names.setdefault(id(x), (x, unnamed))[1]

    def _accumulator(self, initial: jax.Array) -> _Accumulator:
        accumulator = _Accumulator(initial.shape)
        self._call(self._start, self._name(accumulator), values=initial)
        return accumulator

    def _call(self, function, *static, values=(), result=None):
        def on_host(wg, values):
            value = function(*static, self._warpgroups[int(wg)], values)
            return result if value is None else value

        return io_callback(on_host, result, lax.axis_index("wg"), values, ordered=True)

    def _block(self, barrier, check, empty) -> None:
        """Waits on the barrier after the check; the index depends on it, so XLA keeps the order."""
        zero = self._call(check, self._name(empty), values=_slot(empty), result=np.int32(0))
        [(index, _)] = _slot(barrier) or [(0, 1)]
        self.plgpu.barrier_wait(_base(barrier).at[index + zero])

    def _begin(self, wg: _Warpgroup, _) -> None:
        self._warpgroups[wg.index] = _Warpgroup(wg.index, {}, [], [])

    def _start(self, accumulator: str, wg: _Warpgroup, value) -> None:
        wg.values[accumulator] = np.asarray(value)

    def _add(self, accumulator: str, names: list[str], wg: _Warpgroup, operands) -> None:
        regions, product = operands
        wg.running.append(_Product(accumulator, list(zip(names, regions, strict=True))))
        wg.values[accumulator] = wg.values[accumulator] + np.asarray(product)

    def _wait(self, pending: int, wg: _Warpgroup, _) -> None:
        del wg.running[: max(len(wg.running) - pending, 0)]

    def _read(self, accumulator: str, wg: _Warpgroup, _):
        if any(x.accumulator == accumulator for x in wg.running):
            self._refuse(wg, f"reads {accumulator}, to which a running product adds")
        return wg.values[accumulator]

    def _end(self, doing: str, names: list[str], wg: _Warpgroup, region: Region) -> None:
        """Checks that no running product of the warpgroup reads this part of the buffers."""
        for name, own in (read for x in wg.running for read in x.reads):
            if name in names and _overlap(own, region):
                self._refuse(wg, f"{doing} {name}, which a running product reads")

    def _acquire(self, name: str, wg: _Warpgroup, slot: Region) -> None:
        if (barrier := _indexed(name, slot)) in wg.acquired:
            self._refuse(wg, f"acquires {barrier} again", "release")
        wg.acquired.append(barrier)

    def _wait_empty(self, name: str, wg: _Warpgroup, slot: Region) -> None:
        if (barrier := _indexed(name, slot)) in wg.acquired:
            self._refuse(wg, f"waits for {barrier}, which it has itself", "release")

    def _release(self, name: str, wg: _Warpgroup, slot: Region) -> None:
        if (barrier := _indexed(name, slot)) not in wg.acquired:
            self._refuse(wg, f"releases {barrier}", "acquire")
        wg.acquired.remove(barrier)
        buffers = self._filled.get(self._full[name])
        if buffers is None:
            self._refuse(wg, f"releases {name}, which guards no buffer", "copy_in or guard")
        self._end(f"releases {name} of", buffers, wg, slot)

    def _finish(self, wg: _Warpgroup, _) -> None:
        for barrier in wg.acquired:
            self._refuse(wg, f"ends with {barrier}", "release")

    def _refuse(self, wg: _Warpgroup, what: str, expected: str = "wait") -> NoReturn:
        error = RuntimeError(
            f"{self.kernel}: warpgroup {wg.index} {what}, expected {expected} before"
        )
        # Wakes the warpgroups that wait for this one. A single warpgroup has no thread of its own.
        alone = len(self._warpgroups) == 1
        gpu_interpreter._get_shared_memory().set_failed(error, top_level=alone)
        raise error


def _loaded(x) -> jax.Array:
    return x if isinstance(x, jax.Array) else x[...]


def _base(x):
    """The buffer, or the array of barriers, to which a reference belongs."""
    return x.ref if hasattr(x, "transforms") else x


def _region(x) -> Region:
    """The part of its buffer that a reference selects."""
    region: Region = []
    axes: list[int] = []  # the axes of the buffer that the reference still has
    for transform in getattr(x, "transforms", ()):
        if hasattr(transform, "permutation"):
            axes = axes or [*range(len(transform.permutation))]
            axes = [axes[axis] for axis in transform.permutation]
        elif hasattr(transform, "indices"):
            axes, kept = axes or [*range(len(transform.indices))], []
            region = region or [(0, 0)] * len(axes)  # the first transform indexes all axes
            for axis, index in zip(axes, transform.indices, strict=True):
                first = region[axis][0]
                if isinstance(index, pl.Slice):
                    region[axis] = first + index.start, index.size
                    kept.append(axis)
                else:
                    region[axis] = first + index, 1
            axes = kept
    return region


def _slot(barrier) -> Region:
    """The slot that a barrier guards; a single barrier guards all slots."""
    return _region(barrier) if _base(barrier).shape[:1] > (1,) else []


def _indexed(name: str, slot: Region) -> str:
    return name + "".join(f"[{int(start)}]" for start, _ in slot)


def _overlap(x: Region, y: Region) -> bool:
    return all(a < b + m and b < a + n for (a, n), (b, m) in zip(x, y, strict=False))
