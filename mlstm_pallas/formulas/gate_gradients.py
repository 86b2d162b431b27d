"""The gradients of the gates: the sums over tiles that step_gradients reads."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.problem.dimensions import accumulator_dtype


class TileSums(NamedTuple):
    """Sums of W_ts = dP_ts scale q_t . k_s, float32, for chunks of n tiles of T steps.

    Values are undefined where the tile of queries comes before the tile of keys.
    """

    per_query: Array  # (B * NH, n, S): [:, j, t] over s < t in tile j of the chunk
    per_key: Array  # (B * NH, n, S): [:, i, s] over t > s in tile i of the chunk
    diagonal: Array  # (B * NH, S): W_tt


def inner(a: Array, b: Array, axes: int = 1) -> Array:
    """Inner product over the last axes, in at least float32; zeros of a leave out what is in b."""
    acc = accumulator_dtype(a.dtype)
    return jnp.sum(weighted(a.astype(acc), b.astype(acc)), axis=tuple(range(-axes, 0)))


def only(x: Array, where: Array, *axes: int) -> Array:
    """x where the mask, over these axes of x, holds, else 0: the rest of x may be undefined."""
    shape = [size if axis in axes else 1 for axis, size in enumerate(x.shape)]
    return jnp.where(jnp.broadcast_to(where.reshape(shape), x.shape), x, 0.0)
