"""Weighted sums over the steps of each chunk on Mosaic GPU: sum_t w_t x_t.

The vector states n and dn are made of these sums.

Grid (B * NH * blocks of steps * column blocks). A CTA is one warpgroup. It owns 256 or 512 steps,
if the sequence has that many, and as many columns as fit into 64 KiB of shared memory. An SM holds
at least three CTAs, so that the copies of one run while another computes.

Each warp has a quarter of a chunk's steps. A lane sums two of every 64 columns, which are
neighbours, over these steps in registers. The sums of the four warps meet in shared memory once per
chunk. In the layout of an accumulator the lanes would also have to exchange sums by shuffles.

Bytes: x, tokens * D * itemsize. XLA may turn this sum into a matrix product and transpose x for it
in memory; the kernel does neither.
"""

import functools

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from mlstm_pallas.mosaic_gpu import products
from mlstm_pallas.mosaic_gpu.fragments import across_columns
from mlstm_pallas.mosaic_gpu.launch import (
    block,
    float32,
    load,
    load_float32,
    mosaic_call,
    plgpu,
    shared_tiles,
)
from mlstm_pallas.mosaic_gpu.limits import HopperTiles
from mlstm_pallas.mosaic_gpu.tile_copies import copy_in, head_of
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Launch
from mlstm_pallas.stages.step_sums import Operands
from mlstm_pallas.tiles import blocks, divide, each, loop, remainder

ELEMENTS = 2**15  # of x per CTA, at most
STEPS, COLUMNS = 512, (256, 192, 128, 64)  # at most per sum; the choices per CTA
ENOUGH_STEPS = 256  # per CTA: with fewer its start takes longer than its copies
TILE, GROUP = 64, 16  # steps per copy, and steps that a CTA adds at a time, 4 per warp

# The layout of (GROUP, columns): a warp has 4 rows, a lane 2 neighbouring columns of every 64.
BY_WARPS = plgpu.Layout.TILED(
    plgpu.Tiling(((GROUP, 64), (4, 64), (2,))), warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1
)


def _kernel(
    x,  # (B * NH, S, D) or (B, S, NH, D)
    weights,  # (B * NH, S)
    entries,  # of ``ChunkList``: (B * NH, NC) each, None without a list
    sums,  # out (B * NH, parts of the sequence, D), one or several parts per chunk
    x_tiles,  # shared (tiles, TILE, columns)
    tile_weights,  # shared (tiles, TILE), float32
    full,  # one barrier per tile
    *,
    p: Problem,
) -> None:
    num_tiles, _, columns = x_tiles.shape
    _, rows, D = sums.shape
    tiles_of_sum = blocks(p.S, TILE) // rows
    sums_of_cta = num_tiles // tiles_of_sum
    of_head, of_columns = p.S // (num_tiles * TILE), D // columns
    index = lax.axis_index("program")
    head, part = divide(index, of_head * of_columns), remainder(divide(index, of_columns), of_head)
    of_cta = block(remainder(index, of_columns), columns)

    def unless_empty(j, action, carry):
        """action(j, carry), or carry if tile j is an entry without steps."""
        if entries is None:
            return action(j, carry)
        size = entries.sizes[head, part * num_tiles + j]
        return lax.cond(size > 0, functools.partial(action, j), lambda carry: carry, carry)

    def start_copies(j, carry):
        tile = part * num_tiles + j
        steps = from_steps = block(tile, TILE)
        if entries is not None:
            from_steps = pl.ds(entries.steps[head, tile], TILE)
        source = head_of(x, head, p, any_step=entries is not None).at[from_steps, of_cta]
        copy_in(source, x_tiles.at[j], full.at[j])
        plgpu.copy_gmem_to_smem(weights.at[head, steps], tile_weights.at[j], full.at[j])

    loop(num_tiles, lambda j, carry: unless_empty(j, start_copies, carry), None)

    def tile_sum(j, total):
        plgpu.barrier_wait(full.at[j])
        for start in range(0, TILE, GROUP):
            group = pl.ds(start, GROUP)
            w = load(tile_weights.at[j, group], BY_WARPS.reduce(1))
            w = plgpu.layout_cast(across_columns(w, columns), BY_WARPS)
            total += load_float32(x_tiles.at[j, group], BY_WARPS) * w
        return total

    @each(sums_of_cta)
    def part_sum(i):
        zeros = products.zeros(GROUP, columns, layout=BY_WARPS)
        total = loop(
            tiles_of_sum,
            lambda j, total: unless_empty(i * tiles_of_sum + j, tile_sum, total),
            zeros,
        )
        sums.at[head, part * sums_of_cta + i, of_cta][...] = jnp.sum(total, axis=0)


def step_sums(x: Operands, *, call: Launch) -> Array:
    """Runs the stage: ``stages/step_sums.py``, for 16-bit rows; L and D are multiples of 64."""
    rows, weights, chunks = x
    p, D = call.problem, rows.shape[-1]
    of_sum = min(p.L, STEPS)
    steps = of_sum
    while steps < ENOUGH_STEPS and p.S % (2 * steps) == 0:
        steps *= 2
    columns = next(size for size in COLUMNS if D % size == 0 and size * steps <= ELEMENTS)
    parts, num_tiles = blocks(p.S, of_sum), blocks(steps, TILE)
    sums = mosaic_call(
        functools.partial(_kernel, p=p),
        name="step_sums",
        grid={"program": p.BNH * blocks(p.S, steps) * blocks(D, columns)},
        outputs={"sums": float32(p.BNH, parts, D)},
        scratch={
            "x_tiles": shared_tiles(num_tiles, TILE, columns, dtype=rows.dtype),
            "tile_weights": plgpu.SMEM((num_tiles, TILE), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=num_tiles),
        },
        interpret=call.interpret,
    )(x=rows, weights=weights, entries=None if chunks is None else chunks.entries)["sums"]
    return jnp.sum(sums.reshape(p.BNH, p.NC, parts // p.NC, D), axis=2) if parts > p.NC else sums


class Tiles(HopperTiles):
    def divides(self, p: Problem, **asked) -> bool:
        return p.L % TILE == p.DHQK % 64 == 0
