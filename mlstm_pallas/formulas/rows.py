"""Arrays whose rows are the steps of a sequence, in either layout."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mlstm_pallas.problem.arrays import heads_as_rows, rows_as_heads

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
