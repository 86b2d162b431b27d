"""The gates' gradients of every step on Mosaic GPU: ``step_gradients`` of ``gate_gradients.py``, for tiles of 64 steps.

Grid (B * NH * blocks of up to 512 steps). A CTA is one warpgroup and owns a block. Sums over the steps that follow go through shared
memory, in rounds: in round j each step adds those of the three places at distances of 4^j. What arrives at the first step of a block is
passed on to the block before. For that, XLA sums the first run of steps of each block, and joins these sums over the blocks.

Bytes: L / 32 + 8 vectors of B NH S float32. No matrix product.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.gate_gradients import GateSteps, TilePairs, run_sums, to_step_before
from mlstm_pallas.launch_mosaic_gpu import REGISTER_ROWS, load, mosaic_call, plgpu
from mlstm_pallas.stage import Lowering, StageCall
from mlstm_pallas.tiles import blocks, divide, remainder

T = REGISTER_ROWS
_STEPS = 512  # of a CTA at most
_RADIX = 4  # places that a round joins
_CARRIED, _GOES_ON, _PASSES = 1, 2, 4  # of ``GateSteps``; _GOES_ON: of the step after


def _strided(*shape: int) -> Any:
    """The layout of an array in the registers of a warpgroup, in the order of its elements."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=1)


def _rounds(n: int) -> list[range]:
    """The places after its own whose sums a step adds, round by round: the sums are of n steps in the end, a power of two."""
    distances = [_RADIX**j for j in range(n.bit_length()) if _RADIX**j < n]
    return [range(distance, min(distance * _RADIX, n), distance) for distance in distances]


def _sums_in_tiles(queries: jax.Array, keys: jax.Array, buffers: Any) -> jax.Array:
    """The queries' sum from each step of its tile on, and the keys' before it: with the keys behind the queries, of T places.

    queries, keys: (tiles, T); buffers: shared (2, tiles, 2 T + T / 4). The last T / 4 places are read, never written: no query's sum
    reaches them.
    """
    for index, places in enumerate(_rounds(T)):
        buffer = buffers.at[index % 2]
        buffer.at[:, :T][...] = queries
        buffer.at[:, T : 2 * T][...] = keys
        plgpu.commit_smem()
        for place in places:
            queries += load(buffer.at[:, place : place + T], _strided(*queries.shape), optimized=False)
            if place < T // _RADIX:  # the last round is for the queries alone
                keys += load(buffer.at[:, T + place : 2 * T + place], _strided(*keys.shape), optimized=False)
    return queries


def _sums_of_runs(x: jax.Array, goes_on: jax.Array, after: jax.Array, buffers: Any) -> jax.Array:
    """R_t = x_t + R_{t+1} where goes_on_t is 1, x_t where it is 0; R after the last step is ``after``. x, goes_on: (n,), a power of two.

    buffers: shared (2, 2, 2 n).
    """
    n = x.shape[0]
    for slot in range(2):
        for j, neutral in enumerate((0.0, 1.0)):
            buffers.at[slot, j, n:][...] = plgpu.layout_cast(jnp.full((n,), neutral, jnp.float32), _strided(n))
    for index, places in enumerate(_rounds(n)):
        buffer = buffers.at[index % 2]
        buffer.at[0, :n][...] = x
        buffer.at[1, :n][...] = goes_on
        plgpu.commit_smem()
        for place in places:
            x_there, goes_on_there = (load(buffer.at[j, place : place + n], _strided(n), optimized=False) for j in range(2))
            x += jnp.where(goes_on > 0, x_there, 0.0)
            goes_on *= goes_on_there
    return x + jnp.where(goes_on > 0, after, 0.0)


def _kernel(
    per_query,  # (B * NH, n, S / T, T), n tiles to a chunk
    per_key,  # (B * NH, n, S / T, T)
    diagonal,  # (B * NH, S / T, T)
    q_inter,  # (B * NH, S / T, T)
    k_inter,  # (B * NH, S / T, T)
    through,  # (B * NH, S / T)
    f,  # (B * NH, S / T, T)
    flags,  # (B * NH, S / T, T) int32
    dm,  # (B * NH, S / T, T); absent where m is a constant
    after,  # (B * NH, blocks) what arrives at the step after each block; likewise
    di,  # out (B * NH, S / T, T)
    df,  # out (B * NH, S / T, T)
    tile_buffers,  # shared: see _sums_in_tiles
    run_buffers,  # shared: see _sums_of_runs; absent without dm
    *,
    tiles: int,
):
    _, n, num_tiles, _ = per_query.shape
    program, in_head = lax.axis_index("block"), num_tiles // tiles
    head, block = divide(program, in_head), remainder(program, in_head)
    first = block * tiles
    rows, layout = pl.ds(pl.multiple_of(first, tiles), tiles), _strided(tiles, T)

    def vector(ref):
        return load(ref.at[rows], layout, optimized=False)

    row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (tiles, T), 0), layout)
    tile = (row + first) & np.int32(n - 1)  # in its chunk
    queries, keys, keys_intra = vector(q_inter.at[head]), vector(k_inter.at[head]), vector(diagonal.at[head])
    for other in range(n):
        W_queries, W_keys = vector(per_query.at[head, other]), vector(per_key.at[head, other])
        own = jnp.where(tile == other, W_keys, 0.0)
        queries += jnp.where(tile >= other, W_queries, 0.0) - own
        keys += jnp.where(tile < other, W_keys, 0.0)
        keys_intra += own
    flag = vector(flags.at[head])
    of_log_i, of_log_f = keys + keys_intra, _sums_in_tiles(queries, keys, tile_buffers)
    for j in range(tiles):
        of_log_f += jnp.where(row == j, through[head, first + j], 0.0)
    of_log_f = jnp.where((flag & _PASSES) > 0, of_log_f, 0.0)
    if dm is not None:
        size = tiles * T
        goes_on, carried = jnp.where((flag & _GOES_ON) > 0, np.float32(1), np.float32(0)), (flag & _CARRIED) > 0
        arrives = _sums_of_runs(vector(dm.at[head]).reshape(size), goes_on.reshape(size), after[head, block], run_buffers)
        arrives = arrives.reshape(tiles, T)
        of_log_i, of_log_f = of_log_i + jnp.where(carried, 0.0, arrives), of_log_f + jnp.where(carried, arrives, 0.0)
    di.at[head, rows][...] = of_log_i
    df.at[head, rows][...] = of_log_f / (1.0 + jnp.exp(vector(f.at[head])))  # times sigmoid(-f)


def _arriving_at_blocks(dm: jax.Array, flags: jax.Array, size: int) -> jax.Array:
    """What arrives at the first step of each block of so many, (B * NH, blocks)."""
    dm, flags = (x.reshape(x.shape[0], -1, size) for x in (dm, flags))
    step = jnp.broadcast_to(jnp.arange(size, dtype=np.int32), dm.shape)
    last = jnp.min(jnp.where((flags & _GOES_ON) > 0, np.int32(size), step), axis=-1, keepdims=True)  # of the first run
    return run_sums(jnp.sum(jnp.where(step <= last, dm, 0.0), axis=-1), last[..., 0] == size)


def step_gradients(
    vecF: jax.Array,
    pairs: TilePairs,
    vecQ_inter: jax.Array,
    vecK_inter: jax.Array,
    through: jax.Array,
    steps: GateSteps,
    dm: jax.Array | None,
    *,
    call: StageCall,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``gate_gradients.step_gradients`` of pairs that a stage made on Mosaic GPU; call: of that stage."""
    p = call.problem
    size, n = min(p.S & -p.S, _STEPS), blocks(p.L, T)
    by_flag = (_CARRIED, steps.carried), (_GOES_ON, to_step_before(steps.goes_on)), (_PASSES, steps.passes)
    # In memory, or each sum over a block would read all that the flags depend on.
    flags = lax.optimization_barrier(sum(jnp.where(where, np.int32(flag), np.int32(0)) for flag, where in by_flag))
    arrives, after = jnp.zeros((p.BNH, 1), jnp.float32), None
    if dm is not None:
        arrives = _arriving_at_blocks(dm, flags, size)
        after = jnp.pad(arrives[:, 1:], [(0, 0), (0, 1)])

    def in_tiles(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x.reshape(*x.shape[:-1], blocks(x.shape[-1], T), T)

    tiles = blocks(size, T)
    found = mosaic_call(
        functools.partial(_kernel, tiles=tiles),
        name="step_gradients",
        grid={"block": p.BNH * blocks(p.S, size)},
        warpgroups=1,
        outputs={name: jax.ShapeDtypeStruct((p.BNH, p.S // T, T), jnp.float32) for name in ("di", "df")},
        scratch={
            "tile_buffers": plgpu.SMEM((2, tiles, 2 * T + T // _RADIX), jnp.float32),
            "run_buffers": None if dm is None else plgpu.SMEM((2, 2, 2 * size), jnp.float32),
        },
        interpret=call.lowering is Lowering.MOSAIC_GPU_INTERPRET,
        infer_layouts=False,
    )(
        per_query=pairs.per_query.reshape(p.BNH, n, p.S // T, T),
        per_key=pairs.per_key.reshape(p.BNH, n, p.S // T, T),
        diagonal=pairs.diagonal.reshape(p.BNH, p.S // T, T),
        q_inter=in_tiles(vecQ_inter),
        k_inter=in_tiles(vecK_inter),
        through=through,
        f=in_tiles(vecF),
        flags=in_tiles(flags),
        dm=in_tiles(dm),
        after=after,
    )
    return found["di"].reshape(p.BNH, p.S), found["df"].reshape(p.BNH, p.S), arrives[:, 0]
