"""The dimensions of a call as the kernels see them, its input gates, layouts and dtypes of sums.

Notation: B batch, NH heads, S sequence length, DHQK head dimension of q and k, DHV head dimension
of v and h, NC chunks of L steps.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

MIN_CHUNK_SIZE = 16
MIN_TILE = 16
MAX_TILE = 128


class InputGate(enum.StrEnum):
    """exp(i) with a stabiliser (xLSTM), or sigmoid(i) without one (mLSTMsig of the TFLA paper)."""

    EXP = "exp"
    SIGMOID = "sigmoid"

    @property
    def stabilised(self) -> bool:
        """Whether m is computed; else every m is 0."""
        return self is InputGate.EXP


class Layout(enum.StrEnum):
    """The layout of q, k, v, h and their gradients: (B, NH, S, D) or (B, S, NH, D)."""

    BNTH = "BNTH"
    BTNH = "BTNH"


def accumulator_dtype(*dtypes: Any) -> jnp.dtype:
    """The dtype of sums over arrays of these dtypes: float64 if one of them is, else float32."""
    return jnp.dtype("float64" if any(dtype == jnp.float64 for dtype in dtypes) else "float32")


def next_power_of_two(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()


def is_power_of_two(x: int) -> bool:
    return x > 0 and x & (x - 1) == 0


def padded_head_dim(dim: int) -> int:
    """The head dimension of the kernels: a multiple of 16, the least that tensor cores multiply."""
    return -(-dim // MIN_TILE) * MIN_TILE


@dataclasses.dataclass(frozen=True)
class Problem:
    """The dimensions of a call as the kernels see them: S in whole chunks, padded heads."""

    B: int
    NH: int
    S: int
    DHQK: int
    DHV: int
    L: int
    qk_scale: float  # DHQK ** -0.5 of the unpadded head dimension
    # Whether time runs from the last step to the first.
    reverse: bool = dataclasses.field(default=False, repr=False)
    # Whether packed segments or lengths make weights 0, which leave out even inf and NaN.
    isolates: bool = dataclasses.field(default=False, repr=False)
    packed: bool = dataclasses.field(default=False, repr=False)  # with segment_ids

    def __post_init__(self) -> None:
        if self.S % self.L:
            raise ValueError(f"S = {self.S} is not a multiple of the chunk size L = {self.L}")

    @property
    def NC(self) -> int:
        return self.S // self.L

    @property
    def T(self) -> int:
        """Steps of a tile; differences are taken only of sums over at most this many steps."""
        return min(self.L, MAX_TILE)

    @property
    def BNH(self) -> int:
        return self.B * self.NH

    def memory_index(self, index: Any, count: Any) -> Any:
        """The index in memory of a block by its index in processing order, and the inverse."""
        return count - 1 - index if self.reverse else index

    def in_chunks_of(self, L: int) -> "Problem":
        return dataclasses.replace(self, L=min(L, self.L))

    def in_splits(self, num_splits: int) -> "Problem":
        """The problem with one chunk per split, for equal splits."""
        return dataclasses.replace(self, L=self.S // num_splits)

    def split(self, num_splits: int) -> "Problem":
        """The problem with every sequence cut into equal splits that count as heads."""
        return dataclasses.replace(self, NH=self.NH * num_splits, S=self.S // num_splits)


def make_problem(
    q_shape: Sequence[int], DHV: int, L: int, *, pad_heads: bool, reverse: bool = False
) -> Problem:
    """The padded problem for q (B, NH, S, DHQK) and value dimension DHV.

    A chunk size L beyond S is clamped to the next power of two >= S.
    """
    B, NH, S, DHQK = q_shape
    L = min(L, max(next_power_of_two(S), MIN_CHUNK_SIZE))
    pad = padded_head_dim if pad_heads else int
    return Problem(B, NH, -(-S // L) * L, pad(DHQK), pad(DHV), L, DHQK**-0.5, reverse)
