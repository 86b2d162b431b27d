"""Weighted sums over the steps of each chunk on Mosaic GPU: sum_t w_t x_t, which the vector states n and dn take.

Grid (B * NH * parts of the sequence * column blocks). A CTA is one warpgroup; it sums up to 512 steps of up to 256 columns, of which it
holds up to 64 KiB in shared memory. It has no pipeline: an SM has three CTAs or more, and one's copies run while another one computes.

Bytes: x, R D itemsize. No matrix product: XLA may turn this sum into one and transpose x for it in memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.launch_mosaic_gpu import BY_ROWS, REGISTER_ROWS, Products, head_of, load, mosaic_call, plgpu, tile_transforms
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering, StageCall
from mlstm_pallas.tiles import blocks, divide, loop, remainder

ELEMENTS = 2**15  # at most, of x in a CTA
STEPS, COLUMNS = 512, (256, 192, 128, 64)  # at most, and of choice, of a CTA


def _kernel(
    x,  # (B * NH, S, D) or (B, S, NH, D)
    weights,  # (B * NH, S)
    sums,  # out (B * NH, parts of the sequence, D)
    tiles,  # shared (64-step tiles, 64, columns)
    full,
    *,
    p: Problem,
    products: Products,
):
    R = REGISTER_ROWS
    num_tiles, _, columns = tiles.shape
    _, parts, D = sums.shape
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
        at = pl.multiple_of(c * R, R)
        total = products.zeros(R, R)
        for j, w in enumerate(by_tile):
            total += load(tiles.at[j, :, pl.ds(at, R)]).astype(jnp.float32) * lax.broadcast_in_dim(w, (R, R), [0])
        sums.at[head, part, pl.ds(pl.multiple_of(start + at, R), R)][...] = jnp.sum(total, axis=0)
        return _

    loop(columns // R, add, ())


def step_sums(x: jax.Array, weights: jax.Array, call: StageCall) -> jax.Array:
    """sum_t weights_t x_t over the steps of each chunk, (B * NH, NC, D) float32; products and sums are float32.

    Args:
      x: (B * NH, S, D), or (B, S, NH, D), of a dtype of 16 bits; L and D are multiples of 64.
      weights: (B * NH, S), float32.
    """
    p, D, interpret = call.problem, x.shape[-1], call.lowering is Lowering.MOSAIC_GPU_INTERPRET
    steps = min(p.L, STEPS)
    columns = next(size for size in COLUMNS if D % size == 0 and size * steps <= ELEMENTS)
    parts, num_tiles = blocks(p.S, steps), blocks(steps, REGISTER_ROWS)
    found = mosaic_call(
        functools.partial(_kernel, p=p, products=Products(interpret)),
        name="step_sums",
        grid={"program": p.BNH * parts * blocks(D, columns)},
        warpgroups=1,
        outputs={"sums": jax.ShapeDtypeStruct((p.BNH, parts, D), jnp.float32)},
        scratch={
            "tiles": plgpu.SMEM((num_tiles, REGISTER_ROWS, columns), x.dtype, transforms=tile_transforms(columns, x.dtype.itemsize)),
            "full": plgpu.Barrier(num_arrivals=num_tiles),
        },
        interpret=interpret,
    )(x=x, weights=weights)["sums"]
    return jnp.sum(found.reshape(p.BNH, p.NC, parts // p.NC, D), axis=2) if parts > p.NC else found
