"""Stage step_gradients: the gradients of log i and f from the sums of the other stages.

f_r decays everything that passes from before r to r or later. In a tile of T steps these are the
pairs s < r <= t, what queries from r on read from before the tile, what keys before r add beyond
it, and what passes through the whole tile. No difference of long sums is taken.

m_t is i_t or log sigmoid(f_t) + m_{t-1}. In the first case the gradient that reaches m_t goes to
i_t. In the second it goes to f_t and, unless a packed segment begins at t, on to m_{t-1}.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas.gate_gradients import (
    TileSums,
    later_tiles,
    only,
    pass_through_tiles,
    segmented_suffix_sum,
)
from mlstm_pallas.formulas.gates import DECAY_NONZERO, M_FROM_PREVIOUS, M_GRAD_FLOWS
from mlstm_pallas.stages.stage import Launch


class Operands(NamedTuple):
    vecF: Array  # (B * NH, S) float32, like all floats here
    tile_sums: TileSums
    q_dot_dq_inter: Array  # (B * NH, S), of parallel_bw_dQKV, with the inter-chunk parts
    k_dot_dk_inter: Array  # (B * NH, S)
    pass_through: Array  # (B * NH, NC), what passes through each chunk
    flags: Array  # (B * NH, S) int32, of ``gates.join_flags``
    dm: Array | None  # (B * NH, S); None: m is a constant


def step_gradients(x: Operands, *, call: Launch) -> tuple[Array, Array, Array]:
    """The gradients of log i_t and f_t, (B * NH, S), and the one that reaches m_1, (B * NH,)."""
    x = call.processing_order(x)
    vecF, tile_sums, q_dot_dq_inter, k_dot_dk_inter, pass_through, flags, dm = x
    BNH, NC, n, T = tile_sums.diagonal.shape
    later, same = later_tiles(n), jnp.eye(n, dtype=bool)

    def total(x: Array, where: Array) -> Array:
        return jnp.sum(only(x, where, 1, 3), axis=1)

    keys_intra = total(tile_sums.per_key, same)
    shape = tile_sums.diagonal.shape
    q_inter, k_inter = (y.reshape(shape) for y in (q_dot_dq_inter, k_dot_dk_inter))
    tile_terms = (
        # At t: q_t with the part of dq_t from before the tile, and the sum of W_ts - W_st over the
        # steps s of the tile.
        q_inter + (total(tile_sums.per_query, ~later) - keys_intra),
        # At s: k_s with the part of dk_s from beyond the tile, and with the rest of dk_s.
        k_inter + total(tile_sums.per_key, later),
        keys_intra + tile_sums.diagonal,
    )
    queries, keys, keys_intra = (x.reshape(BNH, NC * n, T) for x in tile_terms)
    pass_through = pass_through_tiles(tile_sums, q_dot_dq_inter, k_dot_dk_inter, pass_through)
    triangle = jnp.tri(T, dtype=pass_through.dtype)
    product = functools.partial(jnp.matmul, precision="highest")  # exact to float32
    # The queries from t on, the keys before t.
    within_tile = product(queries, triangle) + product(keys, jnp.triu(jnp.ones_like(triangle), k=1))
    dfbar = jnp.where(
        (flags & DECAY_NONZERO) > 0,
        (within_tile + pass_through[..., None]).reshape(vecF.shape),
        0.0,
    )
    di = (keys + keys_intra).reshape(vecF.shape)
    first = jnp.zeros_like(pass_through[:, 0])
    if dm is not None:
        flows, from_previous = (flags & M_GRAD_FLOWS) > 0, (flags & M_FROM_PREVIOUS) > 0
        # At t: whether step t + 1 passes its gradient on to t.
        dm_sums = segmented_suffix_sum(dm, jnp.pad(flows[:, 1:], [(0, 0), (0, 1)]))
        di += jnp.where(from_previous, 0.0, dm_sums)
        dfbar += jnp.where(from_previous, dm_sums, 0.0)
        first = dm_sums[:, 0]
    return *call.processing_order((di, dfbar * jax.nn.sigmoid(-vecF))), first
