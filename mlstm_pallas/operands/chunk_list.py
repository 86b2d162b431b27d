"""Lists of chunks: the chunks of a row whose parts do not begin at multiples of L steps.

A row of S steps has N segments, each with states of its own, and padding in which h is 0. These
parts follow one another. A segment has chunks of its own, the last of which may have fewer than L
steps. The list has all chunks of a row. Gates, P and all else that is
computed per step are in the chunks of the list. q, k, v and h stay as they are: the kernels read
and write the steps of a chunk where they are in the row.

``chunks_by_segment`` puts an entry without steps before each segment, and one behind the last. The
gates of this entry reset the state, and its input gate is the m with which the segment starts. So
the recurrences over chunks need not know where segments start.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mlstm_pallas.formulas.tiles import divide, remainder, rounded_up
from mlstm_pallas.problem.arrays import heads_as_rows, rows_as_heads
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.problem.steps import Steps

# On Triton the grid of the fused scan has the parts of a row on its second axis, which CUDA limits.
MAX_SEGMENTS = 2**16 - 2


def num_parts(N: int) -> int:
    """The parts of a row with N segments: these and the padding."""
    return N + 1


class Part(NamedTuple):
    """A part of a row, as a kernel sees it. The defaults are those of a row without a list."""

    num_chunks: Any  # that are computed
    # The entry of its first chunk. Kernels read ahead there, also in a part without chunks.
    first_entry: Any = 0
    has_state: Any = True
    begin: Any = 0  # the first step
    end: Any = None  # the step behind the last one
    num_zeros: Any = 0  # chunks that are not computed, in which h is 0

    def start_step(self, chunk: Any, L: int) -> Any:
        """Where a chunk of the part begins in the row."""
        return self.begin + chunk * L

    def size(self, chunk: Any, L: int) -> Any:
        """The number of steps of a chunk, in a list."""
        return lax.min(self.end - self.begin - chunk * L, np.int32(L))


class Parts(NamedTuple):
    """The parts of each row and the end of the row; in a kernel, references, also to one row."""

    start_steps: Array  # (B * NH, N + 2) int32
    first: Array  # (B * NH, N + 2) int32, the entry of the first chunk; not used of the last

    @property
    def N(self) -> int:
        """The number of segments."""
        return self.start_steps.shape[-1] - 2

    def part(self, index: Any, *row: Any, p: Problem) -> Part:
        """A part of a row, which references to several rows have to be told."""
        begin, end = (self.start_steps[(*row, index + x)] for x in range(2))
        chunks, none = divide(end - begin + (p.L - 1), p.L), np.int32(0)
        is_padding = index == self.N
        return Part(
            lax.select(is_padding, none, chunks),
            lax.min(self.first[(*row, index)], np.int32(p.NC - 1)),
            ~is_padding,
            begin,
            end,
            lax.select(is_padding, chunks, none),
        )

    def problem_of_part(self, p: Problem) -> Problem:
        """The problem in a part. Of several segments each has a part, which isolates it."""
        return dataclasses.replace(p, isolates=p.packed and self.N == 1)


class Entries(NamedTuple):
    """The entries of each list."""

    steps: Array  # (B * NH, NC) int32, the first step
    sizes: Array  # (B * NH, NC) int32, the number of steps, at most L; 0: no steps


class ActiveFirst(NamedTuple):
    """The entries of all rows, places in (B * NH, NC), those with steps first; int32."""

    num_active: Array  # (1,), the number of entries with steps
    entries: Array  # (B * NH * NC,)


class ChunkList(NamedTuple):
    parts: Parts
    entries: Entries
    entry_parts: Array  # (B * NH, NC) int32
    active_first: ActiveFirst | None = None  # of ``active_chunks``

    @property
    def N(self) -> int:
        """The number of segments with states."""
        return self.parts.N

    @property
    def num_parts(self) -> int:
        return num_parts(self.N)

    @property
    def NC(self) -> int:
        """The number of entries."""
        return self.entries.sizes.shape[1]

    @property
    def has_steps(self) -> Array:
        """Which entries have steps, (B * NH, NC)."""
        return self.entries.sizes > 0

    @property
    def num_active(self) -> Array:
        """The number of each row's entries with steps, (B * NH,) int32."""
        return jnp.sum(self.has_steps, axis=1, dtype=jnp.int32)

    def with_active_first(self) -> "ChunkList":
        active = self.has_steps.reshape(-1)
        order = jnp.argsort(~active, stable=True).astype(jnp.int32)
        num_active = jnp.sum(active, dtype=jnp.int32, keepdims=True)
        return self._replace(active_first=ActiveFirst(num_active, order))

    def states(self, C: Array, p: Problem) -> Array:
        """C of the segments, (B * NH, N, ...), as the fused scan reads it, (B, N, NH, ...)."""
        return jnp.swapaxes(C.reshape(p.B, p.NH, *C.shape[1:]), 1, 2)

    def gates(self, i: Array, f: Array, m: Array, L: int) -> tuple[Array, Array]:
        """The gates of the entries' steps, (B * NH, NC * L).

        The entry before a segment resets the state and stores something with the input gate m,
        (B * NH, N): the segment starts with this stabiliser.
        """
        index, within = self.steps(L)

        def gathered(x: Array, where: Array, beyond: float) -> Array:
            return jnp.where(where, jnp.take_along_axis(x, index, axis=1, mode="clip"), beyond)

        i, f = gathered(i, within, -jnp.inf), gathered(f, within, jnp.inf)
        rows, entries = self.before_segments()
        return i.at[rows, entries * L].set(m), f.at[rows, entries * L].set(-jnp.inf)

    def with_initial(self, x: Array, initial: Array) -> Array:
        """x, (B * NH, NC, ...), with ``initial``, (B * NH, N, ...), before the segments."""
        return x.at[self.before_segments()].set(initial)

    def before_segments(self, behind: int = 0) -> tuple[Array, Array]:
        """The rows and the entries before the segments: the indices of an array (B * NH, NC)."""
        rows = lax.broadcasted_iota(jnp.int32, (self.parts.first.shape[0], 1), 0)
        return rows, self.parts.first[:, behind : self.N + behind] - 1

    def behind_segments(self) -> tuple[Array, Array]:
        """The rows and the entries behind the segments."""
        return self.before_segments(1)

    def steps(self, L: int) -> tuple[Array, Array]:
        """The steps of all entries, and which of them are of the entry: (B * NH, NC * L) each."""
        steps, sizes = self.entries
        in_chunk = lax.broadcasted_iota(jnp.int32, (1, 1, L), 2)
        index, within = steps[..., None] + in_chunk, in_chunk < sizes[..., None]
        shape = steps.shape[0], steps.shape[1] * L
        return index.reshape(shape), within.reshape(shape)

    def gather(self, x: Array, L: int) -> Array:
        """The steps of x, (B * NH, S, D) or (B, S, NH, D), in chunks: (B * NH, NC, L, D).

        Steps that an entry does not have are zeros.
        """
        index, within = self.steps(L)
        y = jnp.take_along_axis(heads_as_rows(x), index[..., None], axis=1, mode="clip")
        y = jnp.where(within[..., None], y, 0)
        return y.reshape(*self.entries.sizes.shape, L, x.shape[-1])

    def scatter(self, y: Array, like: Array, L: int) -> Array:
        """The inverse of ``gather``, in the layout of ``like``; zeros in steps of no entry."""
        index, within = self.steps(L)
        S, D = like.shape[1], y.shape[-1]
        rows = lax.broadcasted_iota(jnp.int32, (y.shape[0], 1), 0)
        x = jnp.zeros((y.shape[0], S, D), y.dtype)
        index = jnp.where(within, index, S)
        x = x.at[rows, index].set(y.reshape(*index.shape, D), mode="drop")
        return rows_as_heads(x, like)

    def scatter_steps(self, y: Array, like: Array, L: int) -> Array:
        """``scatter`` of one number per step, (B * NH, NC * L)."""
        return self.scatter(y[..., None], like[..., None], L)[..., 0]


def state_of(p: Problem, N: int, head: Array, part: Array) -> Array:
    """The place of a segment's state in an array (B, N, NH, ...), as if its axes were one.

    It is the last segment's for the padding, which has no state.
    """
    segment = lax.min(part, np.int32(N - 1)) if isinstance(part, Array) else min(part, N - 1)
    return (divide(head, p.NH) * N + segment) * p.NH + remainder(head, p.NH)


def num_entries(S: int, N: int, L: int) -> int:
    """The entries of the list of a row of S steps with N segments.

    Each has an entry without steps, and its chunks hold at most L - 1 steps more than it has. One
    more entry follows, and kernels of the gates prefer multiples of 8.
    """
    return rounded_up(S // L + 2 * N + 2, 8)


def chunks_that_count(rows: Steps, S: int, p: Problem) -> ChunkList | None:
    """The list in which chunk c has those of its steps that count; None: all steps do."""
    return None if rows.lengths is None else chunks_by_length(rows.lengths, S, p)


def active_chunks(rows: Steps, S: int, p: Problem) -> ChunkList | None:
    """The list of chunks that a backward pass computes, those with steps; None: all.

    The first chunk of a row is always one, so that every recurrence has one. All others have no
    gradients.
    """
    if rows.lengths is None:
        return None
    return chunks_by_length(jnp.maximum(rows.lengths, 1), S, p).with_active_first()


def chunks_by_segment(ends: Array, S: int, L: int) -> ChunkList:
    """The list of rows with N segments.

    Args:
      ends: (B * NH, N) int32, the number of steps up to the end of each segment, ascending.
      S: steps of a row.
    """
    N = ends.shape[1]
    start_steps = jnp.pad(ends, [(0, 0), (1, 0)])
    start_steps = jnp.pad(start_steps, [(0, 0), (0, 1)], constant_values=S)
    counts = lax.div(start_steps[:, 1:] - start_steps[:, :-1] + np.int32(L - 1), np.int32(L))
    first = jnp.cumsum(counts + 1, axis=1, dtype=jnp.int32) - counts
    entry = lax.broadcasted_iota(jnp.int32, (1, num_entries(S, N, L)), 1)
    begun = first[:, None, 1:] - 1 <= entry[..., None]
    part = jnp.sum(begun, axis=-1, dtype=jnp.int32)

    def at_part(x: Array) -> Array:
        return jnp.take_along_axis(x, part, axis=1)

    chunk = entry - at_part(first)
    steps = at_part(start_steps) + chunk * L
    sizes = jnp.clip(at_part(start_steps[:, 1:]) - steps, 0, L)
    sizes = jnp.where((chunk < 0) | (part == N), 0, sizes)
    entries = Entries(jnp.where(sizes > 0, steps, 0), sizes)
    return ChunkList(Parts(start_steps, first), entries, part)


def chunks_by_length(lengths: Array, S: int, p: Problem) -> ChunkList:
    """The list of rows with one segment, from step 0 on, without an entry before it.

    Entry c is chunk c, and those beyond the length have no steps.

    Args:
      lengths: (B * NH,) int32, of the segments.
      S: steps of a row.
    """
    zeros = jnp.zeros_like(lengths)
    start_steps = jnp.stack([zeros, lengths, jnp.full_like(lengths, S)], axis=1)
    steps = lax.broadcasted_iota(jnp.int32, (lengths.shape[0], p.NC), 1) * p.L
    entries = Entries(steps, jnp.clip(lengths[:, None] - steps, 0, p.L))
    return ChunkList(
        Parts(start_steps, jnp.zeros_like(start_steps)), entries, jnp.zeros_like(steps)
    )
