"""The types that describe a stage, a call of a stage, and a stage's kernels.

``stages/`` has one file per contract. ``triton/`` and ``mosaic_gpu/`` have the kernels, in files of
the same names, and ``dispatch.py`` finds them.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas.tiles import Precision, blocks_over
from mlstm_pallas.problem.arrays import heads_as_rows, rows_as_heads
from mlstm_pallas.problem.dimensions import MIN_TILE, Problem, accumulator_dtype, next_power_of_two
from mlstm_pallas.problem.gpu import UNKNOWN, Gpu
from mlstm_pallas.problem.validation import check_flag, check_integer


class Lowering(enum.StrEnum):
    """How a stage runs: as a kernel, compiled or interpreted, or in plain jnp."""

    TRITON = "triton"
    INTERPRET = "interpret"
    MOSAIC_GPU = "mosaic_gpu"
    XLA = "xla"

    @property
    def interpret(self) -> bool:
        return self is Lowering.INTERPRET

    @property
    def folder(self) -> str:
        """The folder of its kernels."""
        return {"interpret": "triton", "xla": "stages"}.get(self, self)


# Triton's blocks have at most 2**20 elements, and a side has at least MIN_TILE.
MAX_TILE_SIZE = 2**20 // MIN_TILE


def dividing(tile: int, size: int) -> int:
    """The largest power of two up to the tile (itself a power of two) that divides the size."""
    return min(tile, size & -size)


def least_padding(tile: int, *sizes: int, overhead: int = 32) -> int:
    """The power of two up to the tile whose blocks cover axes of these sizes at the least cost.

    The last block may reach beyond the axis, where it is masked. A block costs as much as its own
    columns and ``overhead`` more.
    """
    tile = min(tile, next_power_of_two(min(sizes)))
    candidates = (tile >> n for n in range(tile.bit_length()))
    return min(candidates, key=lambda x: (x + overhead) * sum(blocks_over(y, x) for y in sizes))


def largest_block(size: int, most: int = 256, unit: int = 64) -> int:
    """The largest multiple of unit, up to most, that divides the size; 0: none."""
    return max((x for x in range(unit, most + 1, unit) if size % x == 0), default=0)


_SIZE = functools.partial(check_integer, least=MIN_TILE, most=MAX_TILE_SIZE, power_of_two=True)
BLOCK = functools.partial(check_integer, least=MIN_TILE, most=1024)
# The checks of the fields of tiles. Each gets the field as messages name it, and its value.
FIELDS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(
        ("siz_b_LQ", "siz_b_LKV", "siz_b_L", "siz_b_DHQK", "siz_b_DHHV", "block_k"), _SIZE
    ),
    **dict.fromkeys(("state_rows", "state_columns"), BLOCK),
    **dict.fromkeys(
        ("num_warps", "score_warps"),
        functools.partial(check_integer, least=1, most=16, power_of_two=True),
    ),
    "num_stages": functools.partial(check_integer, least=1, most=8),
    "num_splits": functools.partial(check_integer, least=1, power_of_two=True),
    "num_ctas": functools.partial(check_integer, least=1),
    "keep_q": check_flag,
}


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """What the tiles of a kernel depend on beside the problem and the dtype.

    A kernel reads the fields that concern it. The defaults are those of most calls.

    Attributes:
      gpu: that the kernel is compiled for.
      normalise: whether the gradients have a normaliser.
      recurrences: how many recurrences share the launch.
      weighted, has_vector, has_h: whether the kernel of a recurrence reads the weights r, computes
        x, and reads h; has_h also of parallel_bw_dP.
      stores_states: whether the states at the chunk boundaries are stored.
      in_list: whether the fused scan runs over a ``ChunkList``.
      adds_to_h: whether a preceding launch of the fused scan has computed a part of h.
    """

    gpu: Gpu = UNKNOWN
    normalise: bool = True
    recurrences: int = 1
    weighted: bool = True
    has_vector: bool = False
    has_h: bool = False
    stores_states: bool = True
    in_list: bool = False
    adds_to_h: bool = False


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The base of the tiles of a kernel: what it reads, and what planning asks of it.

    Fields of several kernels:
      siz_b_LQ, siz_b_LKV, siz_b_L: queries, keys, or both in a tile, along the sequence.
      siz_b_DHQK, siz_b_DHHV: columns of q and k, and of v and h, in a tile.
      block_k: columns that an iteration of a loop over a head dimension reads.
      state_rows, state_columns: the block of the state that a CTA holds in registers.
      num_splits: parts of the sequence that run at the same time.
      num_warps, num_stages: warps per CTA, and tiles in flight.
      num_ctas: CTAs of a persistent kernel.
    """

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, options: KernelOptions) -> Self | None:
        """The tiles for a problem; None: the kernel does not support it."""
        return cls()

    def supports(self, p: Problem, options: KernelOptions) -> bool:
        """Whether the kernel can run with these tiles."""
        return True

    def grid(self, p: Problem) -> tuple[int, ...]:
        """The CTAs of a launch, by axis; p: with splits as heads. By default one per chunk."""
        return p.NC, p.BNH

    def shared_bytes(self, p: Problem, dtype: Any, options: KernelOptions) -> int:
        """The shared memory of a CTA; an estimate for Triton, whose compiler decides."""
        return 0

    def clamped(self, p: Problem) -> Self:
        """The tiles with sizes up to the dimensions; those of steps divide a chunk."""
        L, K, V = p.L, p.DHQK, p.DHV
        sizes = dict.fromkeys(("siz_b_LQ", "siz_b_LKV", "siz_b_L"), L)
        sizes |= dict(siz_b_DHQK=next_power_of_two(K), siz_b_DHHV=next_power_of_two(V))
        sizes |= dict(state_rows=K, state_columns=V)  # which need not be powers of two
        fields = {
            name: dividing(x, L) if "siz_b_L" in name else min(x, sizes[name])
            for name, x in vars(self).items()
            if name in sizes
        }
        return dataclasses.replace(self, **fields)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a stage runs in a call.

    Attributes:
      problem: in the chunks of the stage.
      tiles: of its kernel, a subclass of ``Tiles``; None in plain jnp.
      precision: of float32 products in the kernels; plain jnp multiplies in full float32.
      lowering: the kernel or plain jnp.
    """

    problem: Problem
    tiles: Any
    precision: Precision
    lowering: Lowering

    @property
    def interpret(self) -> bool:
        return self.lowering.interpret

    def processing_order(self, arrays: Any) -> Any:
        """Arrays (B * NH, ...) of steps, tiles or chunks in the order of time, or back."""
        if self.problem.reverse:
            arrays = jax.tree.map(jax.vmap(jnp.flip), arrays)
        return arrays

    def chunks(self, x: Array) -> Array:
        """(B * NH, S, ...), or (B, S, NH, D), to (B * NH, NC, L, ...); zeros in steps beyond x."""
        p = self.problem
        x = heads_as_rows(with_steps(x, p.S))
        return x.reshape(p.BNH, p.NC, p.L, *x.shape[2:])

    def product(self, subscripts: str, *operands: Array) -> Array:
        """jnp.einsum in the launch's precision, summed in at least float32."""
        acc = accumulator_dtype(operands[0].dtype)
        return jnp.einsum(
            subscripts, *operands, precision=self.precision, preferred_element_type=acc
        )

    def unchunked(self, x: Array, like: Array) -> Array:
        """The inverse of ``chunks``: (B * NH, NC, L, D) to the layout and the steps of ``like``."""
        x = rows_as_heads(x.reshape(x.shape[0], self.problem.S, x.shape[-1]), like)
        return with_steps(x, like.shape[1])


class Stage(NamedTuple):
    """A stage, by whose name its contract, function, kernels and field of KernelConfig go.

    It is also the benchmark's flag, the test id and the name in a profile.
    """

    operands: type[Any]  # the NamedTuple of its operands
    file: str  # of its kernels in the folder of a lowering


# q, k, v, h and their gradients are (B * NH, S, D) in memory or, with the layout "BTNH",
# (B, S, NH, D); the number of axes tells which. Gates, tiles and states have one layout.
#
# q, k, v, h and their gradients may have the caller's steps, fewer than Problem.S, and so may the
# scaled operands made of them; all code treats the steps beyond as zeros. All other arrays have
# Problem.S steps, whole chunks. The gates beyond the caller's steps store and decay nothing.


def with_steps(x: Array, S: int) -> Array:
    """x with S steps along axis 1, padded with zeros or cut."""
    if x.shape[1] > S:
        return x[:, :S]
    behind = S - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, behind), *[(0, 0)] * (x.ndim - 2)]) if behind else x


def sequence_shape(like: Array, columns: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array in the layout of ``like``."""
    return jax.ShapeDtypeStruct((*like.shape[:-1], columns), dtype)


def as_factors(vec: Array, x: Array) -> Array:
    """One number per step, (B * NH, S), as a factor of x: (B * NH, S, 1) or (B, S, NH, 1)."""
    return rows_as_heads(with_steps(vec, x.shape[1])[..., None], x)


def by_head(vec: Array, S: int) -> Array:
    """The inverse of ``as_factors``: (B, S', NH) or (B * NH, S') to (B * NH, S), zero padded."""
    return with_steps(heads_as_rows(vec[..., None])[..., 0], S)


class ScaledRows(NamedTuple):
    """An operand whose rows (steps) are scaled, in the kernel or before it."""

    array: Array  # (B * NH, S, D) or (B, S, NH, D)
    weights: Array | None  # (B * NH, S) float32; None: the array is already scaled

    def product(self) -> Array:
        """The scaled array, in its dtype."""
        if self.weights is None:
            return self.array
        weights = as_factors(self.weights, self.array)
        return (self.array.astype(weights.dtype) * weights).astype(self.array.dtype)

    def times(self, factors: Array) -> Array:
        """The weights of ``array`` for the scaled array times the factors (B * NH, S)."""
        return factors if self.weights is None else factors * self.weights
