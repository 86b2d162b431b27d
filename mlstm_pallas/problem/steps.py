"""Which steps of a call's rows count, and where its packed segments are: one record per call."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Steps(NamedTuple):
    """The steps of each row. Inside a shard B and NH are one axis."""

    lengths: Any = None  # (B, NH) int32, the steps that count; None: all
    # (B, NH, S), in whole chunks, int32, 1 where a packed segment begins; None: there are none
    segment_starts: Any = None
    segment_ids: Any = None  # (B, NH, S), before segment_starts are known
    segment_ends: Any = None  # (B, NH, N) int32, ascending, of segments with states

    def that_count(self, S: int) -> Array | None:
        """Which of S steps count, (B, NH, S); None: all.

        In the others h is 0, and the gates carry the states on.
        """
        if self.lengths is None:
            return None
        steps = lax.broadcasted_iota(jnp.int32, (1,) * self.lengths.ndim + (S,), self.lengths.ndim)
        return steps < self.lengths[..., None]
