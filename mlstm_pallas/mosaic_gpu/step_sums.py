"""Weighted sums over the steps of each chunk on Mosaic GPU: sum_t w_t x_t.

The vector states n and dn are made of these sums.

Grid (B * NH * blocks of steps * column blocks). A CTA is one warpgroup. It owns a chunk, or several
short chunks of together 256 steps, or 128 if 256 do not divide the sequence, and as many columns as
fit into 64 KiB of shared memory. An SM holds at least three CTAs, so that the copies of one run
while another computes.

Each warp has a quarter of a chunk's steps, whose sums it keeps in registers: see ``_by_warps``. The
sums of the four warps meet in shared memory once per chunk. In the layout of an accumulator the
lanes would also have to exchange sums by shuffles.

Bytes: x, tokens * D * itemsize. XLA may turn this sum into a matrix product and transpose x for it
in memory; the kernel does neither.
"""

import functools

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.tile_sizes import largest_block
from mlstm_pallas.formulas.tiles import blocks, fori, loop
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.mosaic_gpu.common import products
from mlstm_pallas.mosaic_gpu.common.copies import copy_in, head_of
from mlstm_pallas.mosaic_gpu.common.fragments import across_columns
from mlstm_pallas.mosaic_gpu.common.launch import (
    atom_columns,
    block,
    float32,
    load,
    load_float32,
    mosaic_call,
    plgpu,
    shared_tiles,
    unravel,
    write,
)
from mlstm_pallas.mosaic_gpu.common.limits import HopperTiles
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages.step_sums import Operands

ELEMENTS = 2**15  # of x per CTA, at most
STEPS, COLUMNS = 512, 256  # at most per chunk, and per CTA
ENOUGH_STEPS = 256  # per CTA: with fewer its start takes longer than its copies
TILE, GROUP = 64, 16  # steps per copy, and steps that a CTA adds at a time, 4 per warp


def _by_warps(atom: int):
    """The layout of (GROUP, columns): a warp has 4 rows, a lane one or two columns of an atom.

    An atom of 16 columns is too narrow for 32 lanes, so 8 lanes share a row.
    """
    lane_columns, lane_dims = (2, (-3, -2)) if atom == 16 else (atom // 32, (-2,))
    tiling = plgpu.Tiling(((GROUP, atom), (4, atom), (lane_columns,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=lane_dims, vector_dim=-1)


def _kernel(
    x,  # (B * NH, S, D) or (B, S, NH, D)
    weights,  # (B * NH, S)
    entries,  # of ``ChunkList``: (B * NH, NC) each, None without a list
    sums,  # out (B * NH, NC, D)
    x_tiles,  # shared (tiles, TILE, columns)
    tile_weights,  # shared (tiles, TILE), float32
    full,  # one barrier per tile
    *,
    p: Problem,
) -> None:
    num_tiles, _, columns = x_tiles.shape
    tiles_per_sum = p.L // TILE
    sums_per_cta = num_tiles // tiles_per_sum
    blocks_per_head, column_blocks = p.S // (num_tiles * TILE), sums.shape[-1] // columns
    index, column = unravel(lax.axis_index("program"), column_blocks)
    head, steps_block = unravel(index, blocks_per_head)
    cta_columns, by_warps = block(column, columns), _by_warps(atom_columns(p))

    def unless_empty(j, action, carry):
        """action(j, carry), or carry if tile j is an entry without steps."""
        if entries is None:
            return action(j, carry)
        size = entries.sizes[head, steps_block * num_tiles + j]
        return lax.cond(size > 0, functools.partial(action, j), lambda carry: carry, carry)

    def start_copies(j, carry):
        tile = steps_block * num_tiles + j
        steps = from_steps = block(tile, TILE)
        if entries is not None:
            from_steps = pl.ds(entries.steps[head, tile], TILE)
        source = head_of(x, head, p, any_step=entries is not None).at[from_steps, cta_columns]
        copy_in(source, x_tiles.at[j], full.at[j])
        copy_in(weights.at[head, steps], tile_weights.at[j], full.at[j])

    loop(num_tiles, lambda j, carry: unless_empty(j, start_copies, carry), None)

    def tile_sum(j, total):
        plgpu.barrier_wait(full.at[j])
        for start in range(0, TILE, GROUP):
            group = pl.ds(start, GROUP)
            w = load(tile_weights.at[j, group], by_warps.reduce(1))
            w = plgpu.layout_cast(across_columns(w, columns), by_warps)
            total += load_float32(x_tiles.at[j, group], by_warps) * w
        return total

    @fori(sums_per_cta)
    def part_sum(i):
        zeros = products.zeros(GROUP, columns, layout=by_warps)
        total = loop(
            tiles_per_sum,
            lambda j, total: unless_empty(i * tiles_per_sum + j, tile_sum, total),
            zeros,
        )
        write(sums.at[head, steps_block * sums_per_cta + i, cta_columns], jnp.sum(total, axis=0))


def step_sums(x: Operands, *, call: Launch) -> Array:
    """Runs the stage: ``stages/step_sums.py``, for 16-bit rows."""
    rows, weights, chunks = x
    p, D = call.problem, rows.shape[-1]
    steps = p.L
    while steps < ENOUGH_STEPS and p.S % (2 * steps) == 0:
        steps *= 2
    atom = atom_columns(p)
    columns = largest_block(D, min(COLUMNS, ELEMENTS // steps), atom)
    num_tiles = blocks(steps, TILE)
    y = mosaic_call(
        functools.partial(_kernel, p=p),
        name="step_sums",
        grid={"program": p.BNH * blocks(p.S, steps) * blocks(D, columns)},
        outputs={"sums": float32(p.BNH, p.NC, D)},
        scratch={
            "x_tiles": shared_tiles(num_tiles, TILE, columns, dtype=rows.dtype, atom=atom),
            "tile_weights": plgpu.SMEM((num_tiles, TILE), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=num_tiles),
        },
    )(x=rows, weights=weights, entries=None if chunks is None else chunks.entries)
    return y["sums"]


class StepSumsTiles(HopperTiles):
    def divides(self, p: Problem) -> bool:
        return p.L % TILE == 0 and p.L <= STEPS
