"""Which products are running, in GPU interpret mode, where each is computed at once.

On the GPU a product reads shared memory and adds to its accumulator until a wait for it returns.
In interpret mode a kernel with a missing wait still computes the right result. ``InFlight`` keeps,
on the host, the products that each warpgroup has issued and not waited for, and the slots of rings
that it has acquired and not released. It raises where the warpgroup writes, reads or releases what
a product still uses, and where it breaks the protocol of a ring, before any warpgroup waits for
ever.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import jax
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import io_callback
from jax.experimental import pallas as pl

interpreter: Any = gpu_callbacks  # jax 0.10 has less of it
Region = list[tuple[Any, Any]]  # start and size along the first axes; of all others, the whole


class _Product(NamedTuple):
    accumulator: str
    reads: list[tuple[str, Region]]


class InFlight:
    """The products of one launch. A kernel calls the methods while it is traced.

    Those with an underscore that take a warpgroup run on the host, in the order of the calls.
    """

    def __init__(self, kernel: str, warpgroups: int) -> None:
        self.kernel = kernel
        self.warpgroups = warpgroups
        self._names: dict[int, tuple[Any, str]] = {}  # by id: what has it, and a name
        self._guarded: dict[str, list[str]] = {}  # of barriers: the buffers
        self._running: dict[int, list[_Product]] = {}  # of a warpgroup, in order of issue
        self._acquired: dict[int, list[str]] = {}  # barriers, of a warpgroup

    @contextlib.contextmanager
    def traced(self, scratch: Mapping[str, Any]) -> Iterator[None]:
        """Meanwhile ``current()`` is this object, and messages have the names of the scratch."""
        for path, x in jax.tree.leaves_with_path(dict(scratch)):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            self._names[id(_base(x))] = _base(x), name
        token = _current.set(self)
        try:
            self._call(self._begin)
            yield
            self.finish()
        finally:
            _current.reset(token)
            self._names.clear()

    def guard(self, barriers: Any, *buffers: Any) -> None:
        name = self._name(barriers)
        if not buffers:
            raise ValueError(f"{self.kernel}: {name} guards no buffers, expected one or more")
        self._guarded[name] = [self._name(x) for x in buffers]

    def issue(self, accumulator: Any, *operands: Any) -> None:
        shared = [x for x in operands if not isinstance(x, jax.Array)]
        names = [self._name(x) for x in shared]
        self._call(self._issue, self._name(accumulator), names, values=[*map(_region, shared)])

    def wait(self, pending: int) -> None:
        self._call(self._wait, pending)

    def read(self, accumulator: Any) -> None:
        self._call(self._read, self._name(accumulator))

    def overwrite(self, buffer: Any) -> None:
        self._call(self._end, "writes", [self._name(buffer)], values=_region(buffer))

    def acquire(self, barrier: Any) -> None:
        self._call(self._acquire, self._name(barrier), values=_slot(barrier))

    def release(self, barrier: Any) -> None:
        name = self._name(barrier)
        if name not in self._guarded:
            why = "of which no Products.guard says what it guards"
            raise ValueError(f"{self.kernel} releases {name}, {why}")
        self._call(self._release, name, values=_slot(barrier))

    def finish(self) -> None:
        """The warpgroup has released all that it has acquired."""
        self._call(self._finish)

    def _name(self, x: Any) -> str:
        x = _base(x)
        unnamed = f"{type(x).__name__.strip('_').lower()} {len(self._names)}"
        return self._names.setdefault(id(x), (x, unnamed))[1]

    def _call(self, function: Any, *static: Any, values: Any = ()) -> None:
        function = functools.partial(function, *static)
        io_callback(function, None, lax.axis_index("wg"), values, ordered=True)

    def _begin(self, wg: Any, _: Any) -> None:
        self._running[int(wg)], self._acquired[int(wg)] = [], []

    def _issue(self, accumulator: str, names: list[str], wg: Any, regions: list[Region]) -> None:
        reads = list(zip(names, regions, strict=True))
        self._running[int(wg)].append(_Product(accumulator, reads))

    def _wait(self, pending: int, wg: Any, _: Any) -> None:
        running = self._running[int(wg)]
        del running[: max(len(running) - pending, 0)]

    def _read(self, accumulator: str, wg: Any, _: Any) -> None:
        if any(x.accumulator == accumulator for x in self._running[int(wg)]):
            self._refuse(wg, f"reads {accumulator}, to which a running product adds")

    def _end(self, doing: str, names: list[str], wg: Any, region: Region) -> None:
        """The warpgroup has no more use for what is in this part of the buffers."""
        for name, own in (read for x in self._running[int(wg)] for read in x.reads):
            if name in names and _overlap(own, region):
                self._refuse(wg, f"{doing} {name}, which a running product reads")

    def _acquire(self, name: str, wg: Any, slot: Region) -> None:
        if (barrier := _indexed(name, slot)) in self._acquired[int(wg)]:
            self._refuse(wg, f"acquires {barrier} again", "Products.release")
        self._acquired[int(wg)].append(barrier)

    def _release(self, name: str, wg: Any, slot: Region) -> None:
        if (barrier := _indexed(name, slot)) not in self._acquired[int(wg)]:
            self._refuse(wg, f"releases {barrier}", "Products.acquire")
        self._acquired[int(wg)].remove(barrier)
        self._end(f"releases {name} of", self._guarded[name], wg, slot)

    def _finish(self, wg: Any, _: Any) -> None:
        for barrier in self._acquired[int(wg)]:
            self._refuse(wg, f"ends with {barrier}", "Products.release")

    def _refuse(self, wg: Any, what: str, expected: str = "Products.wait") -> NoReturn:
        error = RuntimeError(
            f"{self.kernel}: warpgroup {int(wg)} {what}, expected {expected} before"
        )
        # Wakes the warpgroups that wait for this one. Only one that is alone is no thread.
        interpreter._get_shared_memory().set_failed(error, top_level=self.warpgroups == 1)
        raise error


_current: ContextVar[InFlight] = ContextVar("in_flight")
current = _current.get


def _base(x: Any) -> Any:
    """The buffer, or the barriers, that a reference is a part of."""
    return x.ref if hasattr(x, "transforms") else x


def _region(x: Any) -> Region:
    """What the indices of a reference select of its buffer."""
    region: Region = []
    axes: list[int] = []  # of the buffer, that the reference has
    for transform in getattr(x, "transforms", ()):
        if hasattr(transform, "permutation"):
            axes = axes or list(range(len(transform.permutation)))
            axes = [axes[axis] for axis in transform.permutation]
        elif hasattr(transform, "indices"):
            axes = axes or list(range(len(transform.shape)))
            pairs = list(zip(axes, transform.indices, strict=True))
            if not region:
                region = [(0, n) for _, n in sorted(zip(axes, transform.shape, strict=True))]
            for axis, index in pairs:
                is_slice = isinstance(index, pl.Slice)
                start, size = (index.start, index.size) if is_slice else (index, 1)
                region[axis] = region[axis][0] + start, size
            axes = [axis for axis, index in pairs if isinstance(index, pl.Slice)]
    return region


def _slot(barrier: Any) -> Region:
    """The slot that a barrier guards; the only barrier guards all slots."""
    return _region(barrier) if _base(barrier).shape[0] > 1 else []


def _indexed(name: str, slot: Region) -> str:
    return name + "".join(f"[{int(start)}]" for start, _ in slot)


def _overlap(x: Region, y: Region) -> bool:
    return all(a < b + m and b < a + n for (a, n), (b, m) in zip(x, y, strict=False))
