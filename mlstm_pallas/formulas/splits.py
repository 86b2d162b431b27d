"""States at the boundaries of splits: equal parts of a sequence that run at the same time.

The recurrence X_{c+1} = gamma_c X_c + sum_t a_t b_t^T, where a are the scaled keys or queries of
chunk c, is linear in the state before a split. With c(t) the chunk of step t,

    X after a split = (prod_c gamma_c) X before it + sum_t [prod_{c' > c(t)} gamma_c'] a_t b_t^T

with c' < c(t) where time runs backward. All weights are at most 1. Once the state before each split
is known, splits are as independent as heads. ``split_products`` computes sum_t [...] a_t b_t^T.
"""

import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.formulas.tiles import weighted

MIN_SPLITS, MAX_SPLITS = 4, 16  # fewer gain less than the second launch and their sums cost


def splits_of(NC: int, most: int) -> int:
    """The most splits of NC chunks, up to ``most``: a power of two that divides NC; 1: too few."""
    most = min(most, MAX_SPLITS, NC & -NC)
    return 1 << (most.bit_length() - 1) if most >= MIN_SPLITS else 1


def other_decays(gamma: Array, *, backward: bool = False) -> Array:
    """prod of gamma over the later chunks (earlier ones with backward), along the last axis."""
    products = lax.cumprod(gamma, axis=gamma.ndim - 1, reverse=not backward)
    one = jnp.ones_like(gamma[..., :1])
    return jnp.concatenate(
        [one, products[..., :-1]] if backward else [products[..., 1:], one], axis=-1
    )


def decays_in_splits(gamma: Array, num_splits: int, S: int, *, backward: bool = False) -> Array:
    """prod of gamma over the later chunks of each step's split (earlier ones with backward).

    gamma: (B * NH, NC). Returns (B * NH, S).
    """
    BNH, NC = gamma.shape
    decays = other_decays(gamma.reshape(BNH, num_splits, NC // num_splits), backward=backward)
    return jnp.broadcast_to(decays.reshape(BNH, NC, 1), (BNH, NC, S // NC)).reshape(BNH, S)


def split_states(
    added: Array, gamma: Array, initial: Array | None, *, backward: bool = False
) -> Array:
    """X before each split, after it with backward: (B * NH * num_splits, ...) float32.

    Args:
      added: (B * NH, num_splits - 1, ...) float32, what each split adds to X: all splits but the
        last, with backward all but the first.
      gamma: (B * NH, NC) float32, NC a multiple of num_splits.
      initial: X before the sequence, after it with backward: (B * NH, ...) float32; None: zeros.
    """
    BNH, others = added.shape[:2]
    gamma = jnp.prod(gamma.reshape(BNH, others + 1, gamma.shape[1] // (others + 1)), axis=-1)
    gamma = jnp.expand_dims(gamma, tuple(range(2, added.ndim)))
    gamma = gamma[:, 1:] if backward else gamma[:, :-1]
    states = [jnp.zeros_like(added[:, 0]) if initial is None else initial]
    for j in reversed(range(others)) if backward else range(others):
        states.append(weighted(gamma[:, j], states[-1]) + added[:, j])
    return jnp.stack(states[::-1] if backward else states, axis=1).reshape(
        BNH * (others + 1), *added.shape[2:]
    )


def splits_as_heads(x: Array, num_splits: int, S: int) -> Array:
    """(B * NH, n, ...) to (B * NH * num_splits, n / num_splits, ...); n is S steps, or chunks.

    (B, S, NH, D) stays as it is, and so does (B * NH, S', D) with other steps than S, whose last
    split is shorter: ``kernel_call`` addresses their splits.
    """
    if x.ndim == 4 or (x.ndim == 3 and x.shape[1] != S):
        return x
    return x.reshape(x.shape[0] * num_splits, x.shape[1] // num_splits, *x.shape[2:])


def group_splits(x: Array, num_splits: int) -> Array:
    """(B * NH * num_splits, ...) to (B * NH, num_splits, ...)."""
    return x.reshape(x.shape[0] // num_splits, num_splits, *x.shape[1:])
