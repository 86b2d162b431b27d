"""Copies of tiles between global and shared memory, and the steps of a head that they address.

wgmma reads tiles in groups of 8 rows, so a TMA copy of such a tile views its array as groups of 8
rows too. plgpu's copies refuse an array whose number of steps is no multiple of 8, so
``inline_mlir.py`` has the copies for such arrays. A tile within whole groups of the array is copied
at once. The last tile of a head, which reaches beyond them, is copied one group at a time, from and
to the rows as they are. A tile with one swizzled part, 128 bytes wide, is stored row by row, so one
copy is always enough. Reads beyond the array return zeros, and nothing is written there.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.mosaic_gpu import products
from mlstm_pallas.mosaic_gpu.inline_mlir import (
    GROUP,
    copy_steps,
    inline_load_transposed,
    inline_store_transposed,
)
from mlstm_pallas.mosaic_gpu.interpretable import interpretable
from mlstm_pallas.mosaic_gpu.launch import plgpu
from mlstm_pallas.problem import Problem
from mlstm_pallas.tiles import divide, remainder


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps and columns of a head, of an array whose number of steps is no multiple of 8.

    Like a reference it has ``at``, which selects a block of the steps, or of the steps and columns.
    """

    array: Any  # (..., S, ..., D), as the kernel receives it
    before: tuple[Any, ...]  # indices of the axes before the steps, and of the axes behind
    behind: tuple[Any, ...]
    start: Any
    column: Any
    shape: tuple[int, int]

    @property
    def at(self) -> "Steps":
        return self

    def __getitem__(self, index) -> "Steps":
        steps, columns = index if isinstance(index, tuple) else (index, slice(None))
        starts, shape = zip(*map(_start_and_size, (steps, columns), self.shape), strict=True)
        place = self.start + starts[0], self.column + starts[1]
        return Steps(self.array, self.before, self.behind, *place, shape)

    @property
    def S(self) -> int:
        return int(self.array.shape[len(self.before)])


def _start_and_size(index, size: int) -> tuple[Any, int]:
    if isinstance(index, slice):
        start, stop, _ = index.indices(size)
        return start, stop - start
    return index.start, index.size


def head_of(ref, n, p: Problem, *, any_step: bool = False):
    """Head n, (S, D), of an array (B * NH, S, D) or (B, S, NH, D).

    Splits count as heads. The array may have fewer steps than S, because TMA copies read zeros
    beyond them and write nothing there.

    any_step: whether tiles begin at any step, not only at multiples of 8.
    """
    strided = len(ref.shape) == 4
    B, NH = ref.shape[0], ref.shape[2] if strided else 1
    num_splits, head = p.BNH // (B * NH), n
    steps: Any = slice(None)
    if num_splits > 1:
        head, steps = divide(n, num_splits), pl.ds(remainder(n, num_splits) * p.S, p.S)
    before = (divide(head, NH),) if strided else (head,)
    behind = (remainder(head, NH),) if strided else ()
    if not copied_by_groups(1 if any_step else ref.shape[1]):
        return ref.at[(*before, steps, *behind)]
    start, size = _start_and_size(steps, ref.shape[1])
    return Steps(ref, before, behind, start, 0, (size, ref.shape[-1]))


@interpretable
def load_transposed(array):
    """The transposed tile of float32 in global memory, in the layout of an accumulator."""
    shape = plgpu.ShapeDtypeStruct(array.shape[::-1], jnp.float32, layout=plgpu.Layout.WGMMA)
    types = plgpu.Layout.WGMMA, plgpu.RefType()
    load = plgpu.inline_mgpu(arg_types=types, return_type=shape)(inline_load_transposed)
    return load(products.zeros(*shape.shape), array)


@interpretable
def store_transposed(array, tile) -> None:
    """Stores the transpose of an accumulator's value in global memory."""
    types = plgpu.Layout.WGMMA, plgpu.RefType()
    plgpu.inline_mgpu(arg_types=types)(inline_store_transposed)(tile, array)


@interpretable
def copied_by_groups(steps: int) -> bool:
    """Whether plgpu's copies refuse this number of steps; in GPU interpret mode they never do."""
    return steps % GROUP != 0


@interpretable
def copy_in(source, tile, barrier) -> None:
    """Starts a copy to shared memory that arrives on the barrier."""
    if isinstance(source, Steps):
        copy_steps(source, tile, barrier)
    else:
        plgpu.copy_gmem_to_smem(source, tile, barrier)


@interpretable
def copy_out(tile, destination, where=None, size=None) -> None:
    """Starts a copy to global memory, if the condition holds; size: of so many rows, None: all."""
    if isinstance(destination, Steps):
        start = functools.partial(copy_steps, destination, tile, size=size)
        pl.when(where is None or where)(start)
    else:
        plgpu.copy_smem_to_gmem(tile, destination, predicate=where)
