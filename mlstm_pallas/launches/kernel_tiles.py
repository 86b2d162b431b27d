"""The tiles of a kernel, what they depend on, and the checks of their fields."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax.numpy as jnp

from mlstm_pallas.formulas.tile_sizes import dividing
from mlstm_pallas.problem.dimensions import MIN_TILE, Problem, next_power_of_two
from mlstm_pallas.problem.gpu import Gpu
from mlstm_pallas.problem.validation import check_flag, check_integer

# Triton's blocks have at most 2**20 elements, and a side has at least MIN_TILE.
MAX_TILE_SIZE = 2**20 // MIN_TILE

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


class KernelSpec(NamedTuple):
    """A kernel of a call: what its tiles depend on beside the problem and the dtype.

    Attributes:
      stage: that the kernel runs.
      gpu: that the kernel is compiled for.
      stores_states: whether the forward pass stores C for the backward pass.
    """

    stage: str
    gpu: Gpu
    stores_states: bool

    @property
    def recurrences(self) -> int:
        """How many share a launch: with dC runs C, unless it is stored."""
        return 2 if self.stage == "recurrent_bw_dC" and not self.stores_states else 1


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The base of the tiles of a kernel: what it reads, and what planning asks of it.

    Fields of several kernels. Tiles that give one a second meaning say so in their docstring.
      siz_b_LQ, siz_b_LKV, siz_b_L: queries, keys, or both in a tile, along the sequence.
      siz_b_DHQK, siz_b_DHHV: columns of q and k, and of v and h, in a tile.
      block_k: columns that an iteration of a loop over a head dimension reads.
      state_rows, state_columns: the block of the state that a CTA holds in registers.
      num_splits: parts of the sequence that run at the same time.
      num_warps, num_stages: warps per CTA, and tiles in flight.
      num_ctas: CTAs of a persistent kernel.
    """

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, kernel: KernelSpec) -> Self | None:
        """The tiles for a problem; None: the kernel does not support it."""
        return cls()

    def supports(self, p: Problem, kernel: KernelSpec) -> bool:
        """Whether the kernel can run with these tiles."""
        return True

    def grid(self, p: Problem) -> tuple[int, ...]:
        """The CTAs of a launch, by axis; p: with splits as heads. By default one per chunk."""
        return p.NC, p.BNH

    def shared_bytes(self, p: Problem, dtype: Any, kernel: KernelSpec) -> int:
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
