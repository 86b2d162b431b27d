"""Gradients of the gates: what the normaliser, the stabilisers and the sums of the stages pass back to the gate pre-activations."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.gates import MASKED, ChunkGates, log_sigmoid_gate
from mlstm_pallas.problem import InputGate

# exp of anything below these is 0, subnormals included.
_LEAST_EXPONENT = {"float32": -104.0, "float64": -746.0}


class RowGradients(NamedTuple):
    """What the normaliser passes back, elementwise; (B, NH, S) each. NO_NORMALISER, all None, where h is the numerator."""

    vecInvDen: jax.Array | None  # 1 / den_t
    vecDz: jax.Array | None  # dz_t
    vecDzDen: jax.Array | None  # dz_t den_t
    vecDm: jax.Array | None  # dm_t


class RowSums(NamedTuple):
    """Inner products that the gates' gradients are made of, for tiles of T steps; (B, NH, S / T, T) each."""

    vecQ_inter: jax.Array  # q_t with the part of dq_t that comes from before the tile
    vecK_inter: jax.Array  # k_s with the part of dk_s that goes on behind the tile
    vecK_intra: jax.Array  # k_s with the rest of dk_s: sum over t of W_ts = dP_ts scale q_t . k_s
    vecPairs: jax.Array  # at r: sum of W_ts over t >= r > s


class TilePairs(NamedTuple):
    """Sums of W_ts = dP_ts scale q_t . k_s, float32, for chunks of n tiles of T steps. Where the tile of rows lies before that of columns
    nothing is written."""

    from_tiles: jax.Array  # (B, NH, n, NC, n, T): [j, chunk, i, t] over s < t in tile j
    to_tiles: jax.Array  # (B, NH, n, NC, n, T): [i, chunk, j, s] over t > s in tile i
    diagonal: jax.Array  # (B, NH, NC, n, T): W_tt


NO_NORMALISER = RowGradients(None, None, None, None)


def row_gradients(delta: jax.Array, z: jax.Array, m: jax.Array, *, eps: float, stabilize_correctly: bool, norm_val: float) -> RowGradients:
    """Gradients at h = num / den, den = max(|z|, floor) + eps; delta_t = dh_t . h_t, z and m: (B, NH, S)."""
    floor = norm_val * jnp.exp(-m) if stabilize_correctly and norm_val > 0 else jnp.full_like(m, norm_val)
    den = jnp.maximum(jnp.abs(z), floor) + eps
    inv_den = jnp.where(den > 0, 1.0 / jnp.where(den > 0, den, 1.0), 0.0)
    larger = jnp.abs(z) >= floor
    dz_den = jnp.where(larger, -jnp.sign(z) * delta, 0.0)
    share = eps * inv_den if stabilize_correctly else jnp.where(larger, eps * inv_den, 1.0)
    return RowGradients(inv_den, dz_den * inv_den, dz_den, -delta * share)


def suffix_sums(x: jax.Array) -> jax.Array:
    """sum over tau >= t along the last axis, which is short: a product with a triangle of ones, exact to float32."""
    T = x.shape[-1]
    return jnp.einsum("...s,st->...t", x, jnp.tri(T, dtype=x.dtype), precision="highest")


def tile_sums(pairs: TilePairs, from_state: jax.Array, to_state: jax.Array, through: jax.Array) -> tuple[RowSums, jax.Array]:
    """RowSums for the tiles of T steps, and what goes through each tile (B, NH, S / T), from the sums of the stages.

    Args:
      from_state, to_state: (B, NH, S): of parallel_bw_dQKV.
      through: (B, NH, NC) what goes through each chunk.
    """
    *heads, NC, n, T = pairs.diagonal.shape
    index = jnp.arange(n)
    behind = index[:, None] > index[None, :]  # [i, j]: tile i lies behind tile j

    def only(x, where):  # what is not in the chunk's triangle was never written
        return jnp.where(where.reshape(n, 1, n, 1), x, 0.0)

    before = only(pairs.from_tiles, behind.T)  # [j, chunk, i, t]
    after = only(pairs.to_tiles, behind)  # [i, chunk, j, s]
    own = jnp.eye(n, dtype=bool)
    from_own, to_own = jnp.sum(only(pairs.from_tiles, own), axis=2), jnp.sum(only(pairs.to_tiles, own), axis=2)
    from_state, to_state = (x.reshape(pairs.diagonal.shape) for x in (from_state, to_state))

    einsum = functools.partial(jnp.einsum, precision="highest")
    weight = behind.astype(through.dtype)
    # Through tile m: from the state to later tiles, from earlier ones to the state, and from an earlier tile j to a later one i.
    taken, given, between = (jnp.sum(x, axis=-1) for x in (from_state, to_state, before))
    through = through[..., None] + einsum("im,...i->...m", weight, taken) + einsum("mj,...j->...m", weight, given)
    through += einsum("...jci,im,mj->...cm", between, weight, weight)
    sums = RowSums(
        from_state + jnp.sum(before, axis=2),
        to_state + jnp.sum(after, axis=2),
        to_own + pairs.diagonal,
        suffix_sums(from_own - to_own),
    )
    tiles = (*heads, NC * n)
    return RowSums(*(x.reshape(*tiles, T) for x in sums)), through.reshape(tiles)


def chunk_sums(gates: ChunkGates, from_own, to_own, diagonal, from_state, to_state, enters, resolution: float) -> tuple[RowSums, jax.Array]:
    """RowSums for tiles of one chunk, and what goes through each chunk (B, NH, NC), from the sums of the stages that store no states.

    What goes through a chunk is what goes through the one before, with what that one gives and without what this one takes. The difference
    has to be right where the gates are nearly closed, so the sums have more digits than the kernel dtype.

    Args:
      from_own, to_own, diagonal: (B, NH, S), of parallel_bw_P; from_state, to_state: with n and dn, of recurrent_bw_dQ and recurrent_bw_dK.
      enters: (B, NH) <C, dC> + n . dn where the sequence begins.
      resolution: of these sums. Where less of the state is left behind a chunk, nothing goes through, unless more does than is lost in
        rounding: next to an old state new keys may be as good as nothing.
    """
    B, NH, NC, L = gates.vecW.shape

    def tiles(x):
        return x.reshape(B, NH, NC, L)

    from_state, to_state = tiles(from_state), tiles(to_state)
    taken, given = jnp.sum(from_state, axis=-1), jnp.sum(to_state, axis=-1)
    gain = jnp.concatenate([enters[..., None], given[..., :-1]], axis=-1) - taken

    def join(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    def goes_through(least):
        carried = (gates.scaGamma > least).astype(taken.dtype)
        return lax.associative_scan(join, (carried, carried * gain), axis=-1)[1]

    everything, through = goes_through(0.0), goes_through(resolution)
    largest = lax.cummax(jnp.abs(everything) + jnp.abs(taken), axis=2)
    through = jnp.where(jnp.abs(everything - through) > 16 * resolution * largest, everything, through)
    return RowSums(from_state, to_state, tiles(to_own + diagonal), suffix_sums(tiles(from_own - to_own))), through


def carried_steps(gates: ChunkGates, vecF: jax.Array) -> jax.Array:
    """Where m_t is log sigmoid(f_t) + m_{t-1}, not i_t: (B, NH, NC, L), as vecF."""
    (e_hi, e_lo), (u_hi, u_lo) = gates.vecE, gates.vecU
    return ((e_hi != u_hi) | (e_lo != u_lo)) & (vecF > MASKED)


_GROUP = 16  # steps that are summed at once; the work is so many times the length


def runs_summed(x: jax.Array, goes_on: jax.Array) -> jax.Array:
    """R_t = x_t + R_{t+1} where goes_on_t holds, x_t elsewhere, along the last axis; R behind it is 0.

    Sums over runs of steps, in groups, what reaches the groups in groups of those: no difference is taken.
    """
    n, size = x.shape[-1], _GROUP if x.shape[-1] > 2 * _GROUP else x.shape[-1]
    padding = [*[(0, 0)] * (x.ndim - 1), (0, -n % size)]
    groups = *x.shape[:-1], -(-n // size), size
    x, goes_on = jnp.pad(x, padding).reshape(groups), jnp.pad(goes_on, padding).reshape(groups)
    ends = jnp.cumsum(~goes_on, axis=-1)
    before = ends - ~goes_on
    same_run = (before[..., None, :] == before[..., :, None]) & jnp.tri(size, dtype=bool).T
    R = jnp.sum(jnp.where(same_run, x[..., None, :], 0.0), axis=-1)
    if groups[-2] > 1:
        reached = runs_summed(R[..., 0], ends[..., -1] == 0)
        behind = jnp.concatenate([reached[..., 1:], jnp.zeros_like(reached[..., :1])], axis=-1)
        R = R + jnp.where(before == ends[..., -1:], behind[..., None], 0.0)
    return R.reshape(*groups[:-2], groups[-2] * size)[..., :n]


def stabiliser_gradients(
    gates: ChunkGates, vecF: jax.Array, dm: jax.Array, begins: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Passes dm_t on to what won the maximum in m_t: (parts of di, of dfbar, of dm_initial).

    m_t is either i_t or log sigmoid(f_t) + m_{t-1}: what arrives at t, its own dm_t included, goes to i_t in the first case, through f_t to
    t - 1 in the second, and no further than f_t where a packed sequence begins. vecF, dm, begins: (B, NH, NC, L).
    """
    shape, steps = dm.shape, (*dm.shape[:2], dm.shape[2] * dm.shape[3])
    carried = carried_steps(gates, vecF)
    goes_on = (carried if begins is None else carried & ~begins).reshape(steps)
    dm = dm.reshape(steps)
    leaves = runs_summed(jnp.where(goes_on, dm, 0.0), goes_on)  # for the step before
    behind = jnp.concatenate([leaves[..., 1:], jnp.zeros_like(leaves[..., :1])], axis=-1)
    arrives = (dm + behind).reshape(shape)
    return jnp.where(carried, 0.0, arrives), jnp.where(carried, arrives, 0.0), leaves[..., 0]


def passes(gates: ChunkGates, vecF: jax.Array, begins: jax.Array | None) -> jax.Array:
    """Whether any weight of what is before t at t or later is not 0; else the sums for f_t hold rounding errors alone. (B, NH, NC, L)"""
    fbar, reset = log_sigmoid_gate(vecF)
    m_before = jnp.concatenate([gates.scaM_states[..., :-1, None], gates.vecM[..., :-1]], axis=-1)
    decays = fbar + m_before - gates.vecM > _LEAST_EXPONENT[fbar.dtype.name]  # not a number where nothing was stored
    return decays & ~(reset if begins is None else reset | begins)


def gate_gradients(
    gates: ChunkGates,
    vecI: jax.Array,
    vecF: jax.Array,
    sums: RowSums,
    through: jax.Array,
    dm: jax.Array | None,
    starts: jax.Array | None = None,
    input_gate: InputGate = InputGate.EXP,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the gate pre-activations and of m_initial, the latter without its share in the initial states.

    f_r takes part in everything that passes from before r to r or later. Per tile of T steps that is: pairs inside the tile, the state's
    part in the rows from r on, the keys before r that go on behind the tile, and what goes through the whole tile. No difference of
    long sums is taken.

    Args:
      gates, vecI, vecF, starts: of chunks, (B, NH, NC, L).
      sums: for tiles of T steps, a tile being a chunk or less.
      through: (B, NH, S / T) what goes through the tile.
      dm: dm_t (B, NH, S); None: m is a constant.

    Returns:
      vecDeltaI, vecDeltaF: (B, NH, S); scaDeltaM: (B, NH).
    """
    T = sums.vecPairs.shape[-1]
    before = jnp.einsum("...s,ts->...t", sums.vecK_inter, jnp.tri(T, k=-1, dtype=through.dtype), precision="highest")
    dfbar = (sums.vecPairs + suffix_sums(sums.vecQ_inter) + before + through[..., None]).reshape(vecF.shape)
    begins = None if starts is None else starts > 0
    dfbar = jnp.where(passes(gates, vecF, begins), dfbar, 0.0)
    di = (sums.vecK_inter + sums.vecK_intra).reshape(vecI.shape)
    dm_initial = jnp.zeros(vecI.shape[:2], di.dtype)
    if dm is not None:
        di_m, dfbar_m, dm_initial = stabiliser_gradients(gates, vecF, dm.reshape(vecF.shape), begins)
        di, dfbar = di + di_m, dfbar + dfbar_m
    if input_gate is InputGate.SIGMOID:
        di = jnp.where(vecI <= MASKED, 0.0, di * jax.nn.sigmoid(-vecI))
    B, NH, NC, L = vecF.shape
    return di.reshape(B, NH, NC * L), (dfbar * jax.nn.sigmoid(-vecF)).reshape(B, NH, NC * L), dm_initial
