"""Scans over the steps of each chunk, for the kernels of ``chunk_gates.py``.

A thread holds whole rows of 4 consecutive steps: 16 bytes, which it reads and writes at once.
Running sums and maxima are taken inside the rows first. The totals of the rows then meet in shared
memory, in log4(rows of a chunk) rounds.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.mosaic_gpu.launch import load, plgpu, write

LANES = 128  # of a warpgroup
STEPS = 4  # of a row
_RADIX = 4  # rows, or groups of rows, that are joined in a round


def rows_layout(vector: int = 1) -> Any:
    """The layout of a tile of which a thread holds whole rows, in registers of so many columns.

    Blackwell's tensor memory, which gave the layout its name, is not involved.
    """
    return plgpu.Layout.TCGEN05_TMEM_NATIVE(vector)


def load_rows(tile: Any) -> Any:
    return plgpu.layout_cast(load(tile, rows_layout(STEPS), optimized=False), rows_layout())


def store_rows(tile: Any, x: jax.Array) -> None:
    tile[...] = plgpu.layout_cast(x, rows_layout(STEPS))


def row_index(shape: tuple[int, int]) -> Any:
    """The index of the row of each element."""
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), rows_layout())


def split_columns(x: jax.Array) -> list[jax.Array]:
    return [lax.slice(x, (0, k), (x.shape[0], k + 1)) for k in range(x.shape[1])]


def _load_columns(tile: Any) -> list[jax.Array]:
    return split_columns(load(tile, rows_layout(), optimized=False))


def scan_buffer(arrays: int, rows: int, chunk_rows: int) -> Any:
    """Shared memory of ``running``, in two slots.

    It begins with a chunk of rows whose values are read but not used. A row's numbers, of all
    arrays, are contiguous. A contiguous column would be read by ldmatrix, at multiples of 16 bytes
    only.
    """
    return plgpu.SMEM((2, chunk_rows + rows, arrays), jnp.float32)


def running(
    join: Callable[..., Sequence[jax.Array]],
    x: Sequence[jax.Array],
    identities: Sequence[float],
    chunk_rows: int,
    buffer: Any,
) -> Sequence[jax.Array]:
    """Inclusive scans over the steps of each chunk, with join(of earlier steps, of later ones).

    Args:
      x: tiles (rows, STEPS), float32.
      identities: what join takes for no steps, of each tile.
      chunk_rows: rows of a chunk, a power of two.
      buffer: a ``scan_buffer``; at least two arrays.
    """
    rows = x[0].shape[0]
    row_of_chunk = row_index((rows, 1)) & (chunk_rows - 1)
    columns: list[Sequence[jax.Array]] = list(zip(*map(split_columns, x), strict=True))
    for k in range(1, STEPS):
        columns[k] = join(columns[k - 1], columns[k])

    def earlier(slot: Any, distance: int) -> list[jax.Array]:
        """What the slot has of the row so many rows before each."""
        shifted = slot.at[pl.ds(chunk_rows - distance, rows)]
        return [
            jnp.where(row_of_chunk >= distance, y, identity)
            for y, identity in zip(_load_columns(shifted), identities, strict=True)
        ]

    before, reach, slot = columns[-1], 1, 0
    while reach < chunk_rows:
        write(buffer.at[slot, chunk_rows:], jnp.concatenate(before, axis=1))
        plgpu.commit_smem()
        # In the first round these are totals of rows, later ones of ``reach`` rows before each.
        shift = 1 if reach == 1 else 0
        distances = [shift + k * reach for k in reversed(range(_RADIX))]
        before = functools.reduce(
            join,
            [earlier(buffer.at[slot], n) if n else before for n in distances if n < chunk_rows],
        )
        reach, slot = reach * _RADIX, 1 - slot
    return [
        jnp.concatenate(y, axis=1)
        for y in zip(*(join(before, column) for column in columns), strict=True)
    ]


def last_of_chunks(columns: Sequence[jax.Array], chunk_rows: int, buffer: Any) -> list[jax.Array]:
    """For every row what the last row of its chunk has.

    columns: (rows, 1); buffer: shared (rows, number of columns).
    """
    rows = columns[0].shape[0]
    write(buffer, jnp.concatenate(columns, axis=1))
    plgpu.commit_smem()
    ends = range(chunk_rows - 1, rows, chunk_rows)
    return of_chunks([[buffer[end, k] for end in ends] for k in range(len(columns))], rows)


def of_chunks(columns: Sequence[Sequence[jax.Array]], rows: int) -> list[jax.Array]:
    """Arrays (rows, 1), from one scalar per chunk."""
    num_chunks, row = len(columns[0]), row_index((rows, 1))
    # Compared once for all columns: Mosaic GPU repeats equal operations, which takes compile time.
    from_chunk = [row >= chunk * (rows // num_chunks) for chunk in range(1, num_chunks)]

    def column(first: Any, *others: Any) -> Any:
        x = plgpu.layout_cast(jnp.full((rows, 1), first, jnp.float32), rows_layout())
        for here, value in zip(from_chunk, others, strict=True):
            x = jnp.where(here, value, x)
        return x

    return [column(*values) for values in columns]


def across(column: jax.Array) -> Any:
    return jnp.concatenate([column] * STEPS, axis=1)


def last_columns(*x: jax.Array) -> list[jax.Array]:
    return [split_columns(y)[-1] for y in x]


def row_before(column: jax.Array, first: jax.Array, chunk_rows: int, buffer: Any) -> Any:
    """What the row before has of a column, and in the first row of a chunk ``first``.

    column, first: (rows, 1); buffer: a ``scan_buffer``.
    """
    rows = column.shape[0]
    write(buffer.at[0, chunk_rows:], jnp.concatenate([column] * buffer.shape[-1], axis=1))
    plgpu.commit_smem()
    before = _load_columns(buffer.at[0, pl.ds(chunk_rows - 1, rows)])[0]
    return jnp.where((row_index((rows, 1)) & (chunk_rows - 1)) > 0, before, first)
