"""step_gradients on Mosaic GPU: the gates' gradients of every step.

``step_gradients`` of ``gate_gradients.py``, for tiles of 64 steps.

Grid (B * NH * blocks of up to 512 steps). A CTA is one warpgroup and owns a block. Sums over the
steps that follow go through shared memory, in rounds: in round j each step adds those of the three
places at distances of 4^j. What arrives at the first step of a block is passed on to the block
before. Where a sequence has few blocks a CTA computes for itself what the later ones pass on.
Otherwise XLA sums the first run of steps of each block, and joins these sums over the blocks.

What goes through a whole tile is what goes through its chunk and a sum over the chunk's other tiles
(``gate_gradients.through_tiles``). The kernel takes that sum place by place and adds it to the
tile's queries and to its keys. The queries from t on and the keys before t hold each place once, so
every step gets all of it. In chunks of more than 512 steps XLA computes the sum.

Bytes: L / 32 + 8 vectors of B NH S float32. No matrix product.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.gate_gradients import TilePairs, run_sums, through_tiles
from mlstm_pallas.gates import CARRIED, GOES_ON, PASSES
from mlstm_pallas.mosaic_gpu.chunk_scans import (
    LANES,
    STEPS,
    last_columns,
    load_rows,
    rows_layout,
    running,
    scan_buffer,
)
from mlstm_pallas.mosaic_gpu.launch import REGISTER_ROWS, float32, load, mosaic_call, plgpu, write
from mlstm_pallas.mosaic_gpu.limits import NoTiles, kernel
from mlstm_pallas.stage import Launch
from mlstm_pallas.tiles import blocks, divide, remainder

T = REGISTER_ROWS
_STEPS = 512  # of a CTA at most, LANES rows
_RADIX = 4  # places that a round joins
_FEW_BLOCKS = 4  # of a sequence: XLA's four kernels take longer than a CTA with the later ones


def _strided(*shape: int) -> Any:
    """The layout of an array in the registers of a warpgroup, in the order of its elements."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=1)


def _rounds(n: int) -> list[range]:
    """The places after a step whose sums it adds, round by round.

    The sums are of n steps in the end, a power of two.
    """
    distances = [_RADIX**j for j in range(n.bit_length()) if _RADIX**j < n]
    return [range(distance, min(distance * _RADIX, n), distance) for distance in distances]


def _sums_in_tiles(queries: jax.Array, keys: jax.Array, buffers: Any) -> jax.Array:
    """The queries' sum from each step of its tile on, and the keys' before it: with the keys behind
    the queries, of T places.

    queries, keys: (tiles, T); buffers: shared (2, tiles, 2 T + T / 4). The last T / 4 places are
    read, never written: no query's sum reaches them.
    """
    for index, places in enumerate(_rounds(T)):
        buffer = buffers.at[index % 2]
        buffer.at[:, :T][...] = queries
        buffer.at[:, T : 2 * T][...] = keys
        plgpu.commit_smem()
        for place in places:
            queries += load(
                buffer.at[:, place : place + T], _strided(*queries.shape), optimized=False
            )
            if place < T // _RADIX:  # the last round is for the queries alone
                keys += load(
                    buffer.at[:, T + place : 2 * T + place], _strided(*keys.shape), optimized=False
                )
    return queries


def _through_tiles(
    read: Sequence[jax.Array], written: jax.Array, tile: jax.Array, buffers: Any
) -> jax.Array:
    """(tiles, T), whose sum over T is what goes through each tile from other tiles of its chunk.

    Args:
      read: [d - 1]: what the tile takes from before the tile d places earlier, (tiles, T); d < n.
      written: what the tile writes for what is beyond the chunk.
      tile: its index in the chunk.
      buffers: shared (n, tiles + n - 1, T). Rows that are never written are read, not used.
    """
    n, num_tiles = len(read) + 1, written.shape[0]
    for d, x in enumerate(read, 1):
        buffers.at[d - 1, :num_tiles][...] = x
    buffers.at[n - 1, n - 1 :][...] = written
    plgpu.commit_smem()

    def rows(slot: int, first: int) -> Any:
        place = buffers.at[slot, first : first + num_tiles]
        return load(place, _strided(*written.shape), optimized=False)

    later = [jnp.where(tile + d < n, rows(d - 1, d), 0.0) for d in range(1, n)]
    earlier = [jnp.where(tile >= d, rows(n - 1, n - 1 - d), 0.0) for d in range(1, n)]
    return functools.reduce(jnp.add, later + earlier)


def _of_next(x: jax.Array, buffer: Any) -> Any:
    """x of the next step; after the last one what the buffer, shared (2 n,), has after n places."""
    n = x.shape[0]
    buffer.at[:n][...] = x
    plgpu.commit_smem()
    return load(buffer.at[1 : n + 1], _strided(n), optimized=False)


def _sums_of_runs(x: jax.Array, goes_on: jax.Array, after: jax.Array, buffers: Any) -> Any:
    """R_t = x_t + R_{t+1} if goes_on_{t+1} is 1, x_t if it is 0; ``after`` is added to the last R.

    x, goes_on: (n,), a power of two; buffers: shared (2, 2, 2 n).
    """
    n = x.shape[0]
    for slot in range(2):
        for j, neutral in enumerate((0.0, 1.0)):
            x_after = jnp.full((n,), neutral, jnp.float32)
            buffers.at[slot, j, n:][...] = plgpu.layout_cast(x_after, _strided(n))
    goes_on = _of_next(goes_on, buffers.at[1, 1])
    for index, places in enumerate(_rounds(n)):
        buffer = buffers.at[index % 2]
        buffer.at[0, :n][...] = x
        buffer.at[1, :n][...] = goes_on
        plgpu.commit_smem()
        for place in places:
            x_there, goes_on_there = (
                load(buffer.at[j, place : place + n], _strided(n), optimized=False)
                for j in range(2)
            )
            x += jnp.where(goes_on > 0, x_there, 0.0)
            goes_on *= goes_on_there
    return x + jnp.where(goes_on > 0, after, 0.0)


def _passed_on(dm: Any, flags: Any, block: jax.Array, scan: Any, ends: Any) -> Any:
    """What the step after a block passes on to it.

    A block passes on sums + goes_on (what the block after it passes on); a step t does so with dm_t
    where it goes on, else with zeros.

    Args:
      dm, flags: (blocks * LANES, STEPS) of a head.
      scan, ends: shared, a ``scan_buffer`` and (blocks * LANES, 2).
    """

    def join(left: Any, x: Any) -> tuple[Any, Any]:
        return left[0] + jnp.where(left[1] > 0, x[0], 0.0), left[1] * x[1]

    ones = plgpu.layout_cast(jnp.ones(dm.shape, jnp.float32), rows_layout())
    goes_on = jnp.where((load_rows(flags) & GOES_ON) > 0, ones, 0.0)
    sums = jnp.where(goes_on > 0, load_rows(dm), 0.0)
    write(
        ends,
        jnp.concatenate(
            last_columns(*running(join, (sums, goes_on), (0.0, 1.0), LANES, scan)), axis=1
        ),
    )
    plgpu.commit_smem()
    after: Any = jnp.float32(0)
    for later in reversed(range(1, dm.shape[0] // LANES)):
        end = (later + 1) * LANES - 1
        passed_on = ends[end, 0] + jnp.where(ends[end, 1] > 0, after, 0.0)
        after = jnp.where(block < later, passed_on, after)
    return after


def _kernel(
    per_query: Any,  # (B * NH, n, S / T, T), n tiles to a chunk
    per_key: Any,  # (B * NH, n, S / T, T)
    diagonal: Any,  # (B * NH, S / T, T)
    q_inter: Any,  # (B * NH, S / T, T)
    k_inter: Any,  # (B * NH, S / T, T)
    through: Any,  # (B * NH, NC), or (B * NH, S / T)
    f: Any,  # (B * NH, S / T, T)
    flags: Any,  # (B * NH, S / T, T) int32
    dm: Any,  # (B * NH, S / T, T); absent where m is a constant
    after: Any,  # (B * NH, blocks) what the step after each block passes on to it; may be absent
    by_rows: Any,  # dm and flags, (B * NH, blocks * LANES, STEPS), from which a CTA computes it
    di: Any,  # out (B * NH, S / T, T)
    df: Any,  # out (B * NH, S / T, T)
    arriving: Any,  # out (B * NH, blocks) at the first step of each; absent without dm
    other_tiles: Any,  # shared: see _through_tiles; absent where through is that of tiles
    tile_buffers: Any,  # shared: see _sums_in_tiles
    run_buffers: Any,  # shared: see _sums_of_runs; absent without dm
    scan: Any,  # shared: see _passed_on; absent without by_rows
    ends: Any,  # shared, likewise
    *,
    num_tiles: int,
) -> None:
    _, n, tiles_of_head, _ = per_query.shape
    program, in_head = lax.axis_index("block"), tiles_of_head // num_tiles
    head, block = divide(program, in_head), remainder(program, in_head)
    first = block * num_tiles
    rows, layout = pl.ds(pl.multiple_of(first, num_tiles), num_tiles), _strided(num_tiles, T)

    def vector(ref: Any) -> Any:
        return load(ref.at[rows], layout, optimized=False)

    row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (num_tiles, T), 0), layout)
    tile = (row + first) & np.int32(n - 1)  # in its chunk
    queries, keys, keys_intra = (
        vector(q_inter.at[head]),
        vector(k_inter.at[head]),
        vector(diagonal.at[head]),
    )
    of_through = tiles_of_head // through.shape[1]  # tiles
    read, written = [queries] * (of_through - 1), keys
    for other in range(n):
        W_queries, W_keys = vector(per_query.at[head, other]), vector(per_key.at[head, other])
        intra = jnp.where(tile == other, W_keys, 0.0)
        queries += jnp.where(tile >= other, W_queries, 0.0) - intra
        keys += jnp.where(tile < other, W_keys, 0.0)
        keys_intra += intra
        read = [x + jnp.where(tile > other + d, W_queries, 0.0) for d, x in enumerate(read, 1)]
    flag = vector(flags.at[head])
    of_log_i = keys + keys_intra
    if other_tiles is not None:
        passing = _through_tiles(read, written, tile, other_tiles)
        queries, keys = queries + passing, keys + passing
    of_log_f = _sums_in_tiles(queries, keys, tile_buffers)
    for j in range(0, num_tiles, of_through):
        of_log_f += jnp.where(
            (row & np.int32(-of_through)) == j, through[head, divide(first + j, of_through)], 0.0
        )
    of_log_f = jnp.where((flag & PASSES) > 0, of_log_f, 0.0)
    if dm is not None:
        size = num_tiles * T
        goes_on, carried = (
            jnp.where((flag & GOES_ON) > 0, np.float32(1), np.float32(0)),
            (flag & CARRIED) > 0,
        )
        if by_rows is None:
            of_later = after[head, block]
        else:
            of_later = _passed_on(by_rows[0].at[head], by_rows[1].at[head], block, scan, ends)
        dm_of_block = vector(dm.at[head]).reshape(size)
        arrives = _sums_of_runs(dm_of_block, goes_on.reshape(size), of_later, run_buffers)
        run_buffers.at[0, 0, :size][...] = arrives
        plgpu.commit_smem()
        arriving[head, block] = run_buffers[0, 0, 0]
        arrives = arrives.reshape(num_tiles, T)
        of_log_i, of_log_f = (
            of_log_i + jnp.where(carried, 0.0, arrives),
            of_log_f + jnp.where(carried, arrives, 0.0),
        )
    di.at[head, rows][...] = of_log_i
    df.at[head, rows][...] = of_log_f / (1.0 + jnp.exp(vector(f.at[head])))  # times sigmoid(-f)


def _passed_on_to_blocks(dm: jax.Array, flags: jax.Array, size: int) -> jax.Array:
    """What the step after each block of so many passes on to it: (B * NH, blocks)."""
    dm, flags = (x.reshape(x.shape[0], -1, size) for x in (dm, flags))
    step = jnp.broadcast_to(jnp.arange(size, dtype=np.int32), dm.shape)
    goes_on = (flags & GOES_ON) > 0
    # The end of the first run.
    end = jnp.where(goes_on | (step == 0), np.int32(size), step).min(axis=-1, keepdims=True)
    # One kernel with the minimum; goes_on[:, :, 0] is another one.
    passes_on = jnp.any(goes_on & (step == 0), axis=-1)
    to_end = (end[..., 0] == size) & jnp.pad(passes_on[:, 1:], [(0, 0), (0, 1)])
    arrives = run_sums(jnp.sum(jnp.where(step < end, dm, 0.0), axis=-1), to_end)
    return jnp.pad(jnp.where(passes_on, arrives, 0.0)[:, 1:], [(0, 0), (0, 1)])


def step_gradients(
    vecF: jax.Array,
    pairs: TilePairs,
    vecQ_inter: jax.Array,
    vecK_inter: jax.Array,
    through: jax.Array,
    flags: jax.Array,
    dm: jax.Array | None,
    *,
    call: Launch,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``gate_gradients.step_gradients`` of the outputs of a stage on Mosaic GPU.

    call: of that stage.
    """
    p = call.problem
    size, n = min(p.S & -p.S, _STEPS), blocks(p.L, T)
    # In memory. Each sum over a block would read all that flags depend on, and compute all that dm
    # depends on in as many threads as it has.
    flags, dm = lax.optimization_barrier((flags, dm))
    after, by_rows, num_blocks, rows = None, None, blocks(p.S, size), blocks(p.S, STEPS)
    if dm is not None and size == _STEPS and num_blocks <= _FEW_BLOCKS:
        by_rows = [x.reshape(p.BNH, rows, STEPS) for x in (dm, flags)]
    elif dm is not None:
        after = _passed_on_to_blocks(dm, flags, size)

    def in_tiles(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x.reshape(*x.shape[:-1], blocks(x.shape[-1], T), T)

    num_tiles = blocks(size, T)
    in_block = 1 < n <= num_tiles
    if not in_block:
        through = through_tiles(pairs, vecQ_inter, vecK_inter, through)
    x = mosaic_call(
        functools.partial(_kernel, num_tiles=num_tiles),
        name="step_gradients",
        grid={"block": p.BNH * num_blocks},
        warpgroups=1,
        outputs={
            "di": float32(p.BNH, p.S // T, T),
            "df": float32(p.BNH, p.S // T, T),
            "arriving": None if dm is None else float32(p.BNH, num_blocks),
        },
        scratch={
            "other_tiles": plgpu.SMEM((n, num_tiles + n - 1, T), jnp.float32) if in_block else None,
            "tile_buffers": plgpu.SMEM((2, num_tiles, 2 * T + T // _RADIX), jnp.float32),
            "run_buffers": None if dm is None else plgpu.SMEM((2, 2, 2 * size), jnp.float32),
            "scan": None if by_rows is None else scan_buffer(2, rows, LANES),
            "ends": None if by_rows is None else plgpu.SMEM((rows, 2), jnp.float32),
        },
        interpret=call.interpret,
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
        by_rows=by_rows,
    )
    first = jnp.zeros_like(x["di"][:, 0, 0]) if dm is None else x["arriving"][:, 0]
    return x["di"].reshape(p.BNH, p.S), x["df"].reshape(p.BNH, p.S), first


KERNEL = kernel(NoTiles, lambda p, gpu: [NoTiles()], lambda tiles, p: p.L % 64 == 0, {})
