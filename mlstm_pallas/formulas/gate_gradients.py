"""The gradients of the gates: sums of tiles, and what all forms of step_gradients share."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from mlstm_pallas.problem.dimensions import accumulator_dtype


class TileSums(NamedTuple):
    """Sums of W_ts = dP_ts scale q_t . k_s, float32, for chunks of n tiles of T steps.

    Values are undefined where the tile of queries comes before the tile of keys.
    """

    per_query: Array  # (B * NH, n, NC, n, T): [j, chunk, i, t] over s < t in tile j
    per_key: Array  # (B * NH, n, NC, n, T): [i, chunk, j, s] over t > s in tile i
    diagonal: Array  # (B * NH, NC, n, T): W_tt


def inner(a: Array, b: Array, axes: int = 1) -> Array:
    """Inner product over the last axes, in at least float32."""
    acc = accumulator_dtype(a.dtype)
    return jnp.sum(a.astype(acc) * b.astype(acc), axis=tuple(range(-axes, 0)))


def later_tiles(n: int) -> Array:
    """[i, j]: whether tile i of a chunk is after tile j."""
    return jnp.tri(n, k=-1, dtype=bool)


def only(x: Array, where: Array, *axes: int) -> Array:
    """x where the mask, over these axes of x, holds, else 0: the rest of x may be undefined."""
    shape = [size if axis in axes else 1 for axis, size in enumerate(x.shape)]
    return jnp.where(jnp.broadcast_to(where.reshape(shape), x.shape), x, 0.0)


def pass_through_tiles(
    tile_sums: TileSums, q_dot_dq_inter: Array, k_dot_dk_inter: Array, pass_through: Array
) -> Array:
    """Sums of W_ts with s before and t after each tile, (B * NH, S / T), in processing order."""
    BNH, NC, n, _ = tile_sums.diagonal.shape
    if n == 1:
        return pass_through
    later = later_tiles(n)
    read, written = (
        jnp.sum(x.reshape(tile_sums.diagonal.shape), axis=-1)
        for x in (q_dot_dq_inter, k_dot_dk_inter)
    )
    between = jnp.sum(only(tile_sums.per_query, later.T, 1, 3), axis=-1)  # [j, chunk, i]
    # What tile i reads from before tile m, the state included: [m, chunk, i].
    before = read[:, None] + jnp.cumsum(
        jnp.pad(between[:, :-1], [(0, 0), (1, 0), (0, 0), (0, 0)]), axis=1
    )
    before = jnp.swapaxes(jnp.sum(only(before, later.T, 1, 3), axis=-1), 1, 2)
    written = jnp.sum(
        only(jnp.broadcast_to(written[..., None, :], (BNH, NC, n, n)), later, 2, 3), axis=-1
    )
    return (pass_through[..., None] + before + written).reshape(BNH, NC * n)


_GROUP = 16  # steps summed at once; the work is this many times the length


def segmented_suffix_sum(x: Array, flows: Array) -> Array:
    """R_t = x_t + R_{t+1} where flows_t holds, else x_t, along the last axis.

    Steps are summed within groups, then groups within groups of groups, without any difference.
    """
    n, size = x.shape[-1], _GROUP if x.shape[-1] > 2 * _GROUP else x.shape[-1]
    padding = [*[(0, 0)] * (x.ndim - 1), (0, -n % size)]
    groups = *x.shape[:-1], -(-n // size), size
    x, flows = jnp.pad(x, padding).reshape(groups), jnp.pad(flows, padding).reshape(groups)
    ends = jnp.cumsum(~flows, axis=-1)
    before = ends - (~flows).astype(ends.dtype)
    same_segment = before[..., None, :] == before[..., :, None]
    same_segment &= jnp.broadcast_to(jnp.tri(size, dtype=bool).T, same_segment.shape)
    R = jnp.sum(jnp.where(same_segment, x[..., None, :], 0.0), axis=-1)
    if groups[-2] > 1:
        reached = segmented_suffix_sum(R[..., 0], ends[..., -1] == 0)
        after = jnp.concatenate([reached[..., 1:], jnp.zeros_like(reached[..., :1])], axis=-1)
        R = R + jnp.where(before == ends[..., -1:], after[..., None], 0.0)
    return R.reshape(*groups[:-2], groups[-2] * size)[..., :n]
