"""Weighted sums over the steps of each chunk on Mosaic GPU: sum_t w_t x_t, which the vector states n and dn take.

Grid (B * NH * blocks of steps * column blocks). A CTA is one warpgroup; it takes 256 or 512 steps, where there are so many, and the
columns that shared memory has room for, 64 KiB. It has no pipeline: an SM has three CTAs, and one's copies run while another one
computes.

Bytes: x, R D itemsize. No matrix product: XLA may turn this sum into one and transpose x for it in memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.launch_mosaic_gpu import BY_ROWS, REGISTER_ROWS, SUM_SCRATCH, Products, head_of, load, mosaic_call, plgpu, tile_transforms
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering, StageCall
from mlstm_pallas.tiles import blocks, divide, loop, remainder

ELEMENTS = 2**15  # at most, of x in a CTA
STEPS, COLUMNS = 512, (256, 192, 128, 64)  # of a sum at most, and of choice of a CTA
ENOUGH_STEPS = 256  # of a CTA: with fewer its own start takes longer than its copies


def _kernel(
    x,  # (B * NH, S, D) or (B, S, NH, D)
    weights,  # (B * NH, S)
    sums,  # out (B * NH, parts of the sequence, D), a part being a chunk, or several to a chunk
    tiles,  # shared (64-step tiles, 64, columns)
    scratch,
    full,
    *,
    p: Problem,
    products: Products,
):
    R = REGISTER_ROWS
    num_tiles, _, columns = tiles.shape
    _, rows, D = sums.shape
    parts = p.S // (num_tiles * R)
    tiles_of_sum = blocks(p.S, R) // rows
    index, of_columns = lax.axis_index("program"), D // columns
    block, start = divide(index, of_columns), remainder(index, of_columns) * columns
    head, part = divide(block, parts), remainder(block, parts)

    def steps(j):
        return pl.ds(pl.multiple_of((part * num_tiles + j) * R, R), R)

    for j in range(num_tiles):
        of_block = pl.ds(pl.multiple_of(start, columns), columns)
        plgpu.copy_gmem_to_smem(head_of(x, head, p).at[steps(j), of_block], tiles.at[j], full)
    by_tile = [load(weights.at[head, steps(j)], BY_ROWS, optimized=False) for j in range(num_tiles)]
    plgpu.barrier_wait(full)

    def add(c, _):
        at, total = pl.multiple_of(c * R, R), None
        for j, w in enumerate(by_tile):
            x = load(tiles.at[j, :, pl.ds(at, R)]).astype(jnp.float32) * lax.broadcast_in_dim(w, (R, R), [0])
            total = x if total is None else total + x
            if (j + 1) % tiles_of_sum == 0:
                row = divide(part * num_tiles + j, tiles_of_sum)
                sums.at[head, row, pl.ds(pl.multiple_of(start + at, R), R)][...] = products.sum_over_rows(total, scratch)
                total = None
        return _

    loop(columns // R, add, ())


def step_sums(x: jax.Array, weights: jax.Array, call: StageCall) -> jax.Array:
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
    parts, num_tiles = blocks(p.S, of_sum), blocks(steps, REGISTER_ROWS)
    found = mosaic_call(
        functools.partial(_kernel, p=p, products=Products(interpret)),
        name="step_sums",
        grid={"program": p.BNH * blocks(p.S, steps) * blocks(D, columns)},
        warpgroups=1,
        outputs={"sums": jax.ShapeDtypeStruct((p.BNH, parts, D), jnp.float32)},
        scratch={
            "tiles": plgpu.SMEM((num_tiles, REGISTER_ROWS, columns), x.dtype, transforms=tile_transforms(columns, x.dtype.itemsize)),
            "scratch": plgpu.SMEM((SUM_SCRATCH,), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=num_tiles),
        },
        interpret=interpret,
    )(x=x, weights=weights)["sums"]
    return jnp.sum(found.reshape(p.BNH, p.NC, parts // p.NC, D), axis=2) if parts > p.NC else found
