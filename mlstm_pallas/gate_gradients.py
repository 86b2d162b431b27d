"""Gradients of the gates: what the normaliser, the stabilisers and the sums of the stages pass back to the gate pre-activations."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mlstm_pallas.gates import MASKED, ChunkGates, log_forget_gate
from mlstm_pallas.problem import InputGate, accumulator_dtype

# exp of anything below these is 0, subnormals included.
_LEAST_EXPONENT = {"float32": -104.0, "float64": -746.0}


class TileSums(NamedTuple):
    """Inner products that the gates' gradients are sums of, for tiles of T steps; (B * NH, S / T, T) each."""

    vecQ_inter: jax.Array  # q_t with the part of dq_t that comes from before the tile
    vecK_inter: jax.Array  # k_s with the part of dk_s that goes beyond the tile
    vecK_intra: jax.Array  # k_s with the rest of dk_s: sum over t of W_ts = dP_ts scale q_t . k_s
    vecPairs: jax.Array  # at r: sum of W_ts over t >= r > s


class TilePairs(NamedTuple):
    """Sums of W_ts = dP_ts scale q_t . k_s, float32, for chunks of n tiles of T steps.

    Where the tile of queries lies before that of keys nothing is written.
    """

    per_query: jax.Array  # (B * NH, n, NC, n, T): [j, chunk, i, t] over s < t in tile j
    per_key: jax.Array  # (B * NH, n, NC, n, T): [i, chunk, j, s] over t > s in tile i
    diagonal: jax.Array  # (B * NH, NC, n, T): W_tt


def inner(a: jax.Array, b: jax.Array, axes: int = 1) -> jax.Array:
    """Inner product over the last axes, in at least float32."""
    acc = accumulator_dtype(a.dtype)
    return jnp.sum(a.astype(acc) * b.astype(acc), axis=tuple(range(-axes, 0)))


def suffix_sums(x: jax.Array) -> jax.Array:
    """sum over tau >= t along the last axis, which is short: a product with a triangle of ones, exact to float32."""
    T = x.shape[-1]
    return jnp.einsum("...s,st->...t", x, jnp.tri(T, dtype=x.dtype), precision="highest")


def tile_sums(pairs: TilePairs, vecQ_inter: jax.Array, vecK_inter: jax.Array, through: jax.Array) -> tuple[TileSums, jax.Array]:
    """TileSums, and what goes through each tile (B * NH, S / T), from the sums of the stages.

    Args:
      vecQ_inter, vecK_inter: (B * NH, S): of parallel_bw_dQKV, with the inter-chunk parts.
      through: (B * NH, NC) what goes through each chunk.
    """
    BNH, NC, n, T = pairs.diagonal.shape
    index = jnp.arange(n)
    later = index[:, None] > index[None, :]  # [i, j]: tile i lies after tile j

    def only(x, where):  # what is not in the chunk's triangle was never written
        return jnp.where(jnp.broadcast_to(where.reshape(1, n, 1, n, 1), x.shape), x, 0.0)

    before = only(pairs.per_query, later.T)  # [j, chunk, i, t]
    after = only(pairs.per_key, later)  # [i, chunk, j, s]
    same = jnp.eye(n, dtype=bool)
    queries_intra, keys_intra = jnp.sum(only(pairs.per_query, same), axis=1), jnp.sum(only(pairs.per_key, same), axis=1)
    q_inter, k_inter = (x.reshape(pairs.diagonal.shape) for x in (vecQ_inter, vecK_inter))

    einsum = functools.partial(jnp.einsum, precision="highest")
    weight = later.astype(through.dtype)
    # Through tile m: from the state to later tiles, from earlier ones to the state, and from an earlier tile j to a later one i.
    read, written, between = (jnp.sum(x, axis=-1) for x in (q_inter, k_inter, before))
    through = through[..., None] + einsum("im,...i->...m", weight, read) + einsum("mj,...j->...m", weight, written)
    through += einsum("...jci,im,mj->...cm", between, weight, weight)
    sums = TileSums(
        q_inter + jnp.sum(before, axis=1),
        k_inter + jnp.sum(after, axis=1),
        keys_intra + pairs.diagonal,
        suffix_sums(queries_intra - keys_intra),
    )
    return TileSums(*(x.reshape(BNH, NC * n, T) for x in sums)), through.reshape(BNH, NC * n)


def carried_steps(gates: ChunkGates, vecF: jax.Array) -> jax.Array:
    """Where m_t is log sigmoid(f_t) + m_{t-1}, not i_t: (B * NH, NC, L), as vecF."""
    (e_hi, e_lo), (u_hi, u_lo) = gates.vecE, gates.vecU
    return ((e_hi != u_hi) | (e_lo != u_lo)) & (vecF > MASKED)


_GROUP = 16  # steps that are summed at once; the work is so many times the length


def run_sums(x: jax.Array, goes_on: jax.Array) -> jax.Array:
    """R_t = x_t + R_{t+1} where goes_on_t holds, x_t elsewhere, along the last axis; R after it is 0.

    Runs of steps are summed within groups, then groups in groups of those: no difference is taken.
    """
    n, size = x.shape[-1], _GROUP if x.shape[-1] > 2 * _GROUP else x.shape[-1]
    padding = [*[(0, 0)] * (x.ndim - 1), (0, -n % size)]
    groups = *x.shape[:-1], -(-n // size), size
    x, goes_on = jnp.pad(x, padding).reshape(groups), jnp.pad(goes_on, padding).reshape(groups)
    ends = jnp.cumsum(~goes_on, axis=-1)
    before = ends - (~goes_on).astype(ends.dtype)
    same_run = before[..., None, :] == before[..., :, None]
    same_run &= jnp.broadcast_to(jnp.tri(size, dtype=bool).T, same_run.shape)
    R = jnp.sum(jnp.where(same_run, x[..., None, :], 0.0), axis=-1)
    if groups[-2] > 1:
        reached = run_sums(R[..., 0], ends[..., -1] == 0)
        after = jnp.concatenate([reached[..., 1:], jnp.zeros_like(reached[..., :1])], axis=-1)
        R = R + jnp.where(before == ends[..., -1:], after[..., None], 0.0)
    return R.reshape(*groups[:-2], groups[-2] * size)[..., :n]


def stabiliser_gradients(
    gates: ChunkGates, vecF: jax.Array, dm: jax.Array, begins: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Passes dm_t on to what won the maximum in m_t: (parts of di, of dfbar, of dm_initial).

    m_t is either i_t or log sigmoid(f_t) + m_{t-1}: what arrives at t, its own dm_t included, goes to i_t in the first case, through f_t to
    t - 1 in the second, and no further than f_t where a packed segment begins. vecF, dm, begins: (B * NH, NC, L).
    """
    carried = carried_steps(gates, vecF)
    steps = dm.shape[0], dm.shape[1] * dm.shape[2]
    goes_on = (carried if begins is None else carried & ~begins).reshape(steps)
    leaves = run_sums(jnp.where(goes_on, dm.reshape(steps), 0.0), goes_on)  # to the step before
    after = jnp.concatenate([leaves[..., 1:], jnp.zeros_like(leaves[..., :1])], axis=-1)
    arrives = (dm.reshape(steps) + after).reshape(dm.shape)
    return jnp.where(carried, 0.0, arrives), jnp.where(carried, arrives, 0.0), leaves[..., 0]


def any_passes(gates: ChunkGates, vecF: jax.Array, begins: jax.Array | None) -> jax.Array:
    """Whether any weight of what is before t at t or later is not 0; else the sums for f_t hold rounding errors alone. (B * NH, NC, L)"""
    fbar, reset = log_forget_gate(vecF)
    m_before = jnp.concatenate([gates.scaM_states[..., :-1, None], gates.vecM[..., :-1]], axis=-1)
    decays = fbar + m_before - gates.vecM > _LEAST_EXPONENT[fbar.dtype.name]  # not a number where nothing was stored
    return decays & ~(reset if begins is None else reset | begins)


def gate_gradients(
    gates: ChunkGates,
    vecI: jax.Array,
    vecF: jax.Array,
    sums: TileSums,
    through: jax.Array,
    dm: jax.Array | None,
    starts: jax.Array | None = None,
    input_gate: InputGate = InputGate.EXP,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the gate pre-activations and of m_initial, the latter without its share in the initial states.

    f_r takes part in everything that passes from before r to r or later. Per tile of T steps that is: pairs inside the tile, the state's
    part in the queries from r on, the keys before r that go beyond the tile, and what goes through the whole tile. No difference of
    long sums is taken.

    Args:
      gates, vecI, vecF, starts: of chunks, (B * NH, NC, L).
      sums: for tiles of T steps, a tile being a chunk or less.
      through: (B * NH, S / T) what goes through the tile.
      dm: dm_t (B * NH, S); None: m is a constant.

    Returns:
      vecDeltaI, vecDeltaF: (B * NH, S); scaDeltaM: (B * NH,).
    """
    T = sums.vecPairs.shape[-1]
    before = jnp.einsum("...s,ts->...t", sums.vecK_inter, jnp.tri(T, k=-1, dtype=through.dtype), precision="highest")
    dfbar = (sums.vecPairs + suffix_sums(sums.vecQ_inter) + before + through[..., None]).reshape(vecF.shape)
    begins = None if starts is None else starts > 0
    dfbar = jnp.where(any_passes(gates, vecF, begins), dfbar, 0.0)
    di = (sums.vecK_inter + sums.vecK_intra).reshape(vecI.shape)
    dm_initial = jnp.zeros(vecI.shape[:1], di.dtype)
    if dm is not None:
        di_m, dfbar_m, dm_initial = stabiliser_gradients(gates, vecF, dm.reshape(vecF.shape), begins)
        di, dfbar = di + di_m, dfbar + dfbar_m
    if input_gate is InputGate.SIGMOID:
        di = jnp.where(vecI <= MASKED, 0.0, di * jax.nn.sigmoid(-vecI))
    steps = vecF.shape[0], vecF.shape[1] * vecF.shape[2]
    return di.reshape(steps), (dfbar * jax.nn.sigmoid(-vecF)).reshape(steps), dm_initial


def last_stabiliser_cotangent(dm: jax.Array, last: Any, C_last: jax.Array, n_last: jax.Array) -> jax.Array:
    """dm with what the last m adds at the last step; dm: (B * NH, S), last: cotangents of the last states (c, n, m).

    The true state is exp(m) (C, n): what m has in C and n is not its own.
    """
    return dm.at[..., -1].add(last.m - inner(last.c, C_last, 2) - inner(last.n, n_last))


def initial_stabiliser_gradient(dC: jax.Array, dn: jax.Array, C: jax.Array, n: jax.Array) -> jax.Array:
    """What the initial m has in the initial states: <dC, C> + dn . n, (B * NH,)."""
    return inner(dC, C, 2) + inner(dn, n)


def zero_states(like: jax.Array, DHQK: int, DHHV: int) -> jax.Array:
    """Zeros (B * NH, DHQK, DHHV) that vary over the mesh axes that ``like``, (B * NH,), varies over."""
    return jnp.zeros_like(jnp.broadcast_to(like[:, None, None], (like.shape[0], DHQK, DHHV)))
