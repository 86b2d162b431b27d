"""``vectors.scan.PrefixScan`` on Mosaic GPU.

A thread holds whole rows of up to 4 consecutive steps, 16 bytes, which it reads and writes at once.
A scan first runs inside the rows. The totals of the rows then meet in shared memory, in
log4(rows per chunk) rounds.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.tiles import divide
from mlstm_pallas.mosaic_gpu.common.launch import load, plgpu, write
from mlstm_pallas.vectors.scan import Join

LANES = 128  # per warpgroup
STEPS = 4  # per row
_RADIX = 4  # rows, or groups of rows, that are joined per round


def rows_layout(vector: int = 1):
    """The layout of a tile whose whole rows are in one thread each, ``vector`` columns per access.

    Blackwell's tensor memory, which gave the layout its name, is not involved.
    """
    return plgpu.Layout.TCGEN05_TMEM_NATIVE(vector)


def load_rows(tile):
    layout = rows_layout(tile.shape[-1])
    return plgpu.layout_cast(load(tile, layout, optimized=False), rows_layout())


def store_rows(tile, x: Array) -> None:
    tile[...] = plgpu.layout_cast(x, rows_layout(x.shape[1]))


def row_index(shape: tuple[int, int]):
    """The index of the row of each element."""
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), rows_layout())


def split_columns(x: Array) -> list[Array]:
    return [lax.slice(x, (0, k), (x.shape[0], k + 1)) for k in range(x.shape[1])]


def scan_buffers(*arrays: int, rows: int, chunk_rows: int) -> list[Any]:
    """Shared memory of scans of so many arrays at once, in two slots each.

    A chunk of rows before or behind those of the scan is read but not used. Each row has the
    elements of all arrays side by side. There are at least two, because a single contiguous column
    would be read by ldmatrix, which starts only at multiples of 16 bytes.
    """
    return [plgpu.SMEM((2, chunk_rows + rows, n), jnp.float32) for n in arrays]


class Slots:
    """The slots of ``scan_buffers``, in turns.

    All threads meet after each write to a slot. So when a slot is written again, they have read it.
    """

    def __init__(self, buffers: Sequence[Any]):
        self.buffers, self._turn = buffers, 0

    def next(self, arrays: int) -> Any:
        """The next slot of the narrowest buffer for so many arrays."""
        self._turn = 1 - self._turn
        fits = (x for x in self.buffers if x.shape[-1] >= arrays)
        return min(fits, key=lambda x: x.shape[-1]).at[self._turn]


@dataclasses.dataclass(frozen=True)
class TilePrefixScan:
    """``vectors.scan.PrefixScan`` of tiles (rows, steps).

    What it returns per chunk is such a tile, too.

    Attributes:
      chunk_rows: rows of a chunk, a power of two.
      slots: shared memory.
      backward: from the last step of each chunk to its first.
    """

    chunk_rows: int
    slots: Slots
    backward: bool = False

    @property
    def L(self) -> int:
        return self.chunk_rows * STEPS

    def _neighbours(
        self, columns: Sequence[Array], edges: Sequence[Any]
    ) -> Callable[[int], list[Array]]:
        """Writes columns (rows, 1) to a slot.

        Returns a function of a distance in rows. It returns what the row at this distance before
        each row in the order of the scan wrote, and the edges where the chunk has no such row.
        """
        rows, buffer = columns[0].shape[0], self.slots.next(len(columns))
        copies = buffer.shape[-1] // len(columns)
        start = 0 if self.backward else self.chunk_rows
        write(buffer.at[pl.ds(start, rows)], jnp.concatenate([*columns] * copies, axis=1))
        plgpu.commit_smem()
        chunk_row = row_index((rows, 1)) & (self.chunk_rows - 1)

        def at(distance):
            if self.backward:
                inside, first = chunk_row < self.chunk_rows - distance, start + distance
            else:
                inside, first = chunk_row >= distance, start - distance
            x = load(buffer.at[pl.ds(first, rows)], rows_layout(), optimized=False)
            # The columns beyond those with an edge are copies.
            return [jnp.where(inside, *pair) for pair in zip(split_columns(x), edges, strict=False)]

        return at

    def running(self, join: Join, x: Sequence[Array], identities: Sequence[float]) -> Any:
        """Inclusive prefix scans over the steps of each chunk."""
        x = [plgpu.layout_cast(y, rows_layout()) for y in x]
        columns: list[Sequence[Array]] = list(zip(*map(split_columns, x), strict=True))
        if self.backward:
            columns.reverse()
        for k in range(1, len(columns)):
            columns[k] = join(columns[k - 1], columns[k])

        before, reach = columns[-1], 1
        while reach < self.chunk_rows:
            at = self._neighbours(before, identities)
            # In the first round these are totals of rows, later of ``reach`` rows before each.
            shift = 1 if reach == 1 else 0
            distances = [shift + k * reach for k in reversed(range(_RADIX))]
            totals = [at(x) if x else before for x in distances if x < self.chunk_rows]
            before = functools.reduce(join, totals)
            reach *= _RADIX
        columns = [join(before, column) for column in columns]
        if self.backward:
            columns.reverse()
        return [jnp.concatenate(y, axis=1) for y in zip(*columns, strict=True)]

    @property
    def step(self) -> Array:
        shape = LANES, STEPS
        column = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), rows_layout())
        step = (row_index(shape) & (self.chunk_rows - 1)) * STEPS + column
        return self.L - 1 - step if self.backward else step

    def sums(self, *x: Array, T: int | None = None) -> Any:
        def add(left, x):
            return [a + y for a, y in zip(left, x, strict=True)]

        scan = self if T is None else dataclasses.replace(self, chunk_rows=T // STEPS)
        return scan.running(add, x, (0.0,) * len(x))

    def against(self, function: Callable[..., Array], *x: Array) -> Array:
        return function(dataclasses.replace(self, backward=not self.backward), *x)

    def over_tiles(self, n: int, function: Callable[..., Any], carry: Any) -> tuple[Any, Array]:
        tile, x, total = divide(self.step, self.L // n), {}, carry[0]
        for other in reversed(range(n)):
            carry, x[other] = function(other, carry)
        totals = self.totals(*((jnp.add, 0.0, y) for y in x.values()))
        for other, y in zip(x, totals, strict=True):
            total = jnp.where(tile == other, y, total)
        return carry, total

    def totals(self, *kinds: tuple[Callable[..., Array], float, Array]) -> list[Array]:
        joins, identities, x = zip(*kinds, strict=True)

        def join(left, x):
            return [function(*pair) for function, *pair in zip(joins, left, x, strict=True)]

        return self.last(*self.running(join, x, identities))

    def last(self, *x: Array) -> list[Array]:
        columns = chunk_columns(self.ends(*x), x[0].shape[0])
        return [across(column, x[0].shape[1]) for column in columns]

    def shifted(self, x: Array, edge) -> Array:
        """x of the preceding step; ``edge``, a tile or a number, where the chunk has none."""
        columns = split_columns(plgpu.layout_cast(x, rows_layout()))
        first, last = (-1, 0) if self.backward else (0, -1)
        edges = [split_columns(edge)[first] if jnp.ndim(edge) else edge]
        (neighbour,) = self._neighbours([columns.pop(last)], edges)(1)
        columns.insert(len(columns) if self.backward else 0, neighbour)
        return jnp.concatenate(columns, axis=1)

    def ends(self, *x: Array) -> list[list[Array]]:
        """The elements of each tile at the last step of each chunk, as scalars."""
        columns = [split_columns(y)[0 if self.backward else -1] for y in x]
        buffer, rows = self.slots.next(len(columns)), x[0].shape[0]
        write(buffer.at[:rows, : len(columns)], jnp.concatenate(columns, axis=1))
        plgpu.commit_smem()
        first = 0 if self.backward else self.chunk_rows - 1
        return [
            [buffer[end, k] for end in range(first, rows, self.chunk_rows)]
            for k in range(len(columns))
        ]


def chunk_columns(columns: Sequence[Sequence[Array]], rows: int) -> list[Array]:
    """Arrays (rows, 1), from one scalar per chunk."""
    num_chunks, row = len(columns[0]), row_index((rows, 1))
    # Compared once for all columns, because Mosaic GPU repeats equal operations, which takes
    # compile time.
    from_chunk = [row >= chunk * (rows // num_chunks) for chunk in range(1, num_chunks)]

    def column(first, *others):
        x = plgpu.layout_cast(jnp.full((rows, 1), first, jnp.float32), rows_layout())
        for here, value in zip(from_chunk, others, strict=True):
            x = jnp.where(here, value, x)
        return x

    return [column(*values) for values in columns]


def across(column: Array, steps: int = STEPS):
    return jnp.concatenate([column] * steps, axis=1)
