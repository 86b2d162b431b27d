"""Weighted sums over the steps of each chunk on Mosaic GPU: sum_t w_t x_t, which the vector states n and dn take.

Grid (B * NH * blocks of steps * column blocks). A CTA is one warpgroup; it takes 256 or 512 steps, where there are so many, and the
columns that shared memory has room for, 64 KiB. An SM has three CTAs or more, and one's copies run while another one computes.

Each warp has a quarter of a chunk's steps, and a lane sums two neighbouring columns of each 64 over them, in registers. The sums of the
four warps meet in shared memory once a chunk. In the layout of an accumulator, lanes would have to exchange sums by shuffles too.

Bytes: x, R D itemsize. No matrix product: XLA may turn this sum into one and transpose x for it in memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.mosaic_gpu.launch import head_of, load, mosaic_call, plgpu, tile_transforms
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering, StageCall
from mlstm_pallas.tiles import blocks, divide, loop, remainder

ELEMENTS = 2**15  # at most, of x in a CTA
STEPS, COLUMNS = 512, (256, 192, 128, 64)  # of a sum at most, and of choice of a CTA
ENOUGH_STEPS = 256  # of a CTA: with fewer its own start takes longer than its copies
TILE, GROUP = 64, 16  # steps of a copy, and that a CTA adds at a time, 4 a warp

# The layout of (GROUP, columns) in registers: a warp has 4 rows, and a lane two neighbouring columns of each 64.
BY_WARPS = plgpu.Layout.TILED(plgpu.Tiling(((GROUP, 64), (4, 64), (2,))), warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1)


def _kernel(
    x,  # (B * NH, S, D) or (B, S, NH, D)
    weights,  # (B * NH, S)
    sums,  # out (B * NH, parts of the sequence, D), a part being a chunk, or several to a chunk
    tiles,  # shared (tiles, TILE, columns)
    tile_weights,  # shared (tiles, TILE), float32
    full,  # a barrier a tile
    *,
    p: Problem,
):
    num_tiles, _, columns = tiles.shape
    _, rows, D = sums.shape
    tiles_of_sum = blocks(p.S, TILE) // rows
    sums_of_block = num_tiles // tiles_of_sum
    of_head, of_columns = p.S // (num_tiles * TILE), D // columns
    index = lax.axis_index("program")
    head, block = divide(index, of_head * of_columns), remainder(divide(index, of_columns), of_head)
    of_block = pl.ds(pl.multiple_of(remainder(index, of_columns) * columns, columns), columns)

    def start_copies(j, _):
        steps = pl.ds(pl.multiple_of((block * num_tiles + j) * TILE, TILE), TILE)
        plgpu.copy_gmem_to_smem(head_of(x, head, p).at[steps, of_block], tiles.at[j], full.at[j])
        plgpu.copy_gmem_to_smem(weights.at[head, steps], tile_weights.at[j], full.at[j])
        return _

    loop(num_tiles, start_copies, ())

    def tile_sum(j, total):
        plgpu.barrier_wait(full.at[j])
        for start in range(0, TILE, GROUP):
            group = pl.ds(start, GROUP)
            w = load(tile_weights.at[j, group], BY_WARPS.reduce(1))
            w = plgpu.layout_cast(lax.broadcast_in_dim(w, (GROUP, columns), [0]), BY_WARPS)
            total += load(tiles.at[j, group], BY_WARPS).astype(jnp.float32) * w
        return total

    def part_sum(i, _):
        zeros = plgpu.layout_cast(jnp.zeros((GROUP, columns), jnp.float32), BY_WARPS)
        total = loop(tiles_of_sum, lambda j, total: tile_sum(i * tiles_of_sum + j, total), zeros)
        sums.at[head, block * sums_of_block + i, of_block][...] = jnp.sum(total, axis=0)
        return _

    loop(sums_of_block, part_sum, ())


def step_sums(x: jax.Array, weights: jax.Array, *, call: StageCall) -> jax.Array:
    """sum_t weights_t x_t over the steps of each chunk, (B * NH, NC, D) float32; products and sums are float32.

    Args:
      x: (B * NH, S, D), or (B, S, NH, D), of a dtype of 16 bits; L and D are multiples of 64.
      weights: (B * NH, S), float32.
    """
    p, D, interpret = call.problem, x.shape[-1], call.lowering is Lowering.MOSAIC_GPU_INTERPRET
    of_sum = min(p.L, STEPS)
    steps = of_sum
    while steps < ENOUGH_STEPS and p.S % (2 * steps) == 0:
        steps *= 2
    columns = next(size for size in COLUMNS if D % size == 0 and size * steps <= ELEMENTS)
    parts, num_tiles = blocks(p.S, of_sum), blocks(steps, TILE)
    found = mosaic_call(
        functools.partial(_kernel, p=p),
        name="step_sums",
        grid={"program": p.BNH * blocks(p.S, steps) * blocks(D, columns)},
        warpgroups=1,
        outputs={"sums": jax.ShapeDtypeStruct((p.BNH, parts, D), jnp.float32)},
        scratch={
            "tiles": plgpu.SMEM((num_tiles, TILE, columns), x.dtype, transforms=tile_transforms(columns, x.dtype.itemsize)),
            "tile_weights": plgpu.SMEM((num_tiles, TILE), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=num_tiles),
        },
        interpret=interpret,
    )(x=x, weights=weights)["sums"]
    return jnp.sum(found.reshape(p.BNH, p.NC, parts // p.NC, D), axis=2) if parts > p.NC else found
