"""The recurrence of n and dn over the chunks on Mosaic GPU: ``vector_states`` of ``gates.py``.

Grid (B * NH * DHQK / 64). A CTA is one warpgroup and owns 64 columns; its four warps compute the same numbers. It loads the terms of the
next AHEAD chunks before it joins the present ones, and so waits once for AHEAD loads.

Bytes: what is added and the states, 2 B NH NC DHQK float32. No matrix product.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlstm_pallas.launch_mosaic_gpu import block, load, mosaic_call
from mlstm_pallas.stage import Lowering, StageCall
from mlstm_pallas.stages.mosaic_gpu.products import BY_LANES
from mlstm_pallas.tiles import blocks, divide, loop, remainder

COLUMNS = 64  # of a CTA
AHEAD = 16  # chunks


def _kernel(
    added,  # (B * NH, NC, D)
    gamma,  # (B * NH, NC)
    initial,  # (B * NH, D)
    states,  # out (B * NH, NC, D)
    last,  # out (B * NH, D)
    *,
    backward: bool,
):
    _, NC, D = added.shape
    index, of_head = lax.axis_index("program"), blocks(D, COLUMNS)
    head, columns = divide(index, of_head), block(remainder(index, of_head), COLUMNS)
    groups, rest = divmod(NC, AHEAD)

    def chunk_at(c):
        return NC - 1 - c if backward else c

    def terms(first, count):
        """gamma_c and what is added, of so many chunks."""
        chunks = [chunk_at(first + j) for j in range(count)]
        return [(gamma[head, c], load(added.at[head, c, columns], BY_LANES, optimized=False)) for c in chunks]

    def join(x, first, found):
        for j, (factor, term) in enumerate(found):
            states.at[head, chunk_at(first + j), columns][...] = x
            x = factor * x + term
        return x

    def group(j, carry):
        x, found = carry
        following = terms(lax.min((j + 1) * AHEAD, np.int32((groups - 1) * AHEAD)), AHEAD)
        return join(x, j * AHEAD, found), following

    x = load(initial.at[head, columns], BY_LANES, optimized=False)
    if groups:
        x, _ = loop(groups, group, (x, terms(0, AHEAD)))
    last.at[head, columns][...] = join(x, groups * AHEAD, terms(groups * AHEAD, rest))


def vector_states(
    added: jax.Array, gamma: jax.Array, initial: jax.Array, call: StageCall, *, backward: bool = False
) -> tuple[jax.Array, jax.Array]:
    """``gates.vector_states``; DHQK is a multiple of 64."""
    BNH, _, D = added.shape
    found = mosaic_call(
        functools.partial(_kernel, backward=backward),
        name="vector_states",
        grid={"program": BNH * blocks(D, COLUMNS)},
        warpgroups=1,
        outputs={
            "states": jax.ShapeDtypeStruct(added.shape, jnp.float32),
            "last": jax.ShapeDtypeStruct(initial.shape, jnp.float32),
        },
        scratch={},
        interpret=call.lowering is Lowering.MOSAIC_GPU_INTERPRET,
        infer_layouts=False,
    )(added=added, gamma=gamma, initial=initial)
    return found["states"], found["last"]
