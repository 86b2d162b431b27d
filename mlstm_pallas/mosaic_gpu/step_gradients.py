"""step_gradients on Mosaic GPU: the gradients of the gates of every step.

The kernel computes what ``stages/step_gradients.py`` does, with tiles of 64 steps.

Grid (B * NH * blocks of up to 512 steps). A CTA is one warpgroup and owns a block, in 128 rows of
up to 4 steps. ``chunk_scans.py`` has the three scans over its steps: the sum over queries from each
step to the end of its tile, the sum over keys before each step, and the gradient of m, which flows
from step to step backward in time. The carry of the last scan into a block comes from the blocks
behind it. If a sequence has few blocks, a CTA computes its carry from these blocks itself.
Otherwise XLA sums the first run of steps of each block and scans these sums over the blocks.

What flows through a whole tile is what flows through its chunk, plus a sum over the other tiles of
the chunk (``gate_gradients.pass_through_tiles``). The kernel computes the terms of that sum lane by
lane and adds them to the tile's queries and to its keys: the queries from t on and the keys before
t cover each lane once, so every step gets the whole sum.

Bytes: L / 32 + 8 vectors of B NH S float32. There is no matrix product.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.gate_gradients import segmented_suffix_sum
from mlstm_pallas.formulas.gates import DECAY_NONZERO, M_FROM_PREVIOUS, M_GRAD_FLOWS
from mlstm_pallas.formulas.tiles import blocks, divide
from mlstm_pallas.mosaic_gpu.common.chunk_scans import (
    LANES,
    STEPS,
    Scan,
    Slots,
    across,
    chunk_columns,
    load_rows,
    row_index,
    scan_buffers,
    store_rows,
)
from mlstm_pallas.mosaic_gpu.common.launch import (
    WG_ROWS,
    aligned,
    float32,
    mosaic_call,
    plgpu,
    unravel,
)
from mlstm_pallas.mosaic_gpu.common.limits import HopperTiles
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages.stage import KernelOptions, Launch
from mlstm_pallas.stages.step_gradients import Operands

T = WG_ROWS
_FEW_BLOCKS = (
    4  # per sequence; XLA's four kernels take longer than a CTA that reads the later blocks
)


def _between_tiles(p, read: Sequence[Array], written: Array, tile: Array, buffers) -> Array:
    """An array (LANES, steps) whose sums over tiles are what flows through each from and to others.

    Args:
      read: [d - 1]: what queries read from before the tile d places earlier, d < n.
      written: what keys write to beyond the chunk.
      tile: the index of the tile in its chunk, in processing order.
      buffers: shared (n, LANES + rows of n - 1 tiles, steps). Unwritten rows are read, not used.
    """
    n, rows = len(read) + 1, written.shape[0]
    tile_rows = (buffers.shape[1] - rows) // (n - 1)

    def at(slot, tiles):
        return buffers.at[slot, pl.ds(p.memory_index(tiles, n) * tile_rows, rows)]

    for d, x in enumerate(read, 1):
        store_rows(at(d - 1, 0), x)
    store_rows(at(n - 1, n - 1), written)
    plgpu.commit_smem()
    later = [jnp.where(tile + d < n, load_rows(at(d - 1, d)), 0.0) for d in range(1, n)]
    earlier = [jnp.where(tile >= d, load_rows(at(n - 1, n - 1 - d)), 0.0) for d in range(1, n)]
    return functools.reduce(jnp.add, later + earlier)


def _to_previous_step(scan: Scan, dm, flags) -> Sequence[Any]:
    """What each step passes on to the m of the step before it, without the carry into its block,
    and 1 where all steps from it to the end of the block pass theirs on, so that the carry counts.

    dm, flags: (rows, steps), of blocks of LANES rows; scan: of these, against time.
    """

    def join(later, x):
        return x[0] + jnp.where(x[1] > 0, later[0], 0.0), x[1] * later[1]

    flows = jnp.where((flags & M_GRAD_FLOWS) > 0, np.float32(1), np.float32(0))
    dm = jnp.where(flows > 0, dm, 0.0)
    return scan.running(join, (dm, flows), (0.0, 1.0))


def _carry(p, dm, flags, block: Array, buffer):
    """The gradient that flows into the m of a block's last step from the blocks behind it.

    dm, flags: (blocks * LANES, steps) of a head; buffer: of the scan.
    """
    scan = Scan(LANES, Slots([buffer]), not p.reverse)
    firsts = scan.ends(*_to_previous_step(scan, load_rows(dm), load_rows(flags)))
    carry, num_blocks = jnp.float32(0), dm.shape[0] // LANES
    block = p.memory_index(block, num_blocks)
    for later in reversed(range(1, num_blocks)):
        first, flows = (x[p.memory_index(later, num_blocks)] for x in firsts)
        carry = jnp.where(block < later, first + jnp.where(flows > 0, carry, 0.0), carry)
    return carry


def _kernel(
    per_query,  # (B * NH, n, rows of a sequence, steps), n tiles per chunk
    per_key,  # likewise
    diagonal,  # (B * NH, rows of a sequence, steps), like all without a shape
    q_inter,
    k_inter,
    pass_through,  # (B * NH, NC)
    f,
    flags,  # int32
    dm,  # absent if m is a constant
    carries,  # (B * NH, blocks) into each block; absent if a CTA computes its carry
    di,  # out
    df,  # out
    dm_first,  # out (B * NH, blocks) of the first step of each block; absent without dm
    other_tiles,  # shared, see _between_tiles
    scans,  # shared, of the scans of the block
    carry_scan,  # shared, see _carry; absent with carries
    *,
    p,
    tile_rows: int,
) -> None:
    _, n, head_rows, steps = per_query.shape
    head_blocks, num_tiles = head_rows // LANES, LANES // tile_rows
    head, block = unravel(lax.axis_index("block"), head_blocks)
    rows = aligned(block * LANES, LANES)

    def vector(ref):
        return load_rows(ref.at[rows])

    # Of tiles, with and against time, and of the whole block against it.
    slots = Slots([scans])
    ahead, back = Scan(tile_rows, slots, p.reverse), Scan(tile_rows, slots, not p.reverse)
    block_back = Scan(LANES, slots, not p.reverse)
    row = row_index((LANES, steps))
    first_tile = block * num_tiles
    tile = p.memory_index((divide(row, tile_rows) + first_tile) & np.int32(n - 1), n)
    queries, keys, keys_intra = (vector(x.at[head]) for x in (q_inter, k_inter, diagonal))
    read, written = [queries] * (n - 1), keys
    for other in range(n):
        at = head, p.memory_index(other, n)
        W_queries, W_keys = vector(per_query.at[at]), vector(per_key.at[at])
        intra = jnp.where(tile == other, W_keys, 0.0)
        queries += jnp.where(tile >= other, W_queries, 0.0) - intra
        keys += jnp.where(tile < other, W_keys, 0.0)
        keys_intra += intra
        read = [x + jnp.where(tile > other + d, W_queries, 0.0) for d, x in enumerate(read, 1)]
    flag = vector(flags.at[head])
    log_i_gradient = keys + keys_intra
    between = _between_tiles(p, read, written, tile, other_tiles)
    queries, keys = queries + between, keys + between
    (from_step,) = back.sums(queries)
    (before_step,) = ahead.sums(ahead.shifted(keys, 0.0))
    chunks = [pass_through[head, divide(first_tile + j, n)] for j in range(0, num_tiles, n)]
    whole = chunk_columns([chunks], LANES)
    log_f_gradient = from_step + before_step + across(whole[0], steps)
    log_f_gradient = jnp.where((flag & DECAY_NONZERO) > 0, log_f_gradient, 0.0)
    if dm is not None:
        if carries is None:
            carry = _carry(p, dm.at[head], flags.at[head], block, carry_scan)
        else:
            carry = carries[head, block]
        dm_block = vector(dm.at[head])
        later, flows = _to_previous_step(block_back, dm_block, flag)
        later += jnp.where(flows > 0, carry, 0.0)
        dm_total = dm_block + block_back.shifted(later, carry)
        [[dm_first[head, block]]] = block_back.ends(dm_total)
        from_previous = (flag & M_FROM_PREVIOUS) > 0
        log_i_gradient += jnp.where(from_previous, 0.0, dm_total)
        log_f_gradient += jnp.where(from_previous, dm_total, 0.0)
    store_rows(di.at[head, rows], log_i_gradient)
    sigmoid_denominator = 1.0 + jnp.exp(vector(f.at[head]))
    store_rows(df.at[head, rows], log_f_gradient / sigmoid_denominator)


def _carries(dm: Array, flags: Array, size: int) -> Array:
    """The carry into each block of ``size`` steps: (B * NH, blocks), all in processing order."""
    dm, flags = (x.reshape(x.shape[0], -1, size) for x in (dm, flags))
    step = jnp.broadcast_to(jnp.arange(size, dtype=np.int32), dm.shape)
    flows = (flags & M_GRAD_FLOWS) > 0
    # The end of the first run of each block.
    end = jnp.where(flows | (step == 0), np.int32(size), step).min(axis=-1, keepdims=True)
    # XLA computes this in one kernel with the minimum; flows[:, :, 0] would be another.
    first_flows = jnp.any(flows & (step == 0), axis=-1)
    to_end = (end[..., 0] == size) & jnp.pad(first_flows[:, 1:], [(0, 0), (0, 1)])
    totals = segmented_suffix_sum(jnp.sum(jnp.where(step < end, dm, 0.0), axis=-1), to_end)
    return jnp.pad(jnp.where(first_flows, totals, 0.0)[:, 1:], [(0, 0), (0, 1)])


def step_gradients(x: Operands, *, call: Launch) -> tuple[Array, Array, Array]:
    """Runs the stage: ``stages/step_gradients.py``, on the outputs of a stage on Mosaic GPU."""
    vecF, tile_sums, q_dot_dq_inter, k_dot_dk_inter, pass_through, flags, dm = x
    p = call.problem
    size, n = min(p.S & -p.S, LANES * STEPS), blocks(p.L, T)
    steps, num_blocks = size // LANES, blocks(p.S, size)
    # Materialised, because otherwise each sum over a block would read all that flags depend on, and
    # its few threads would compute all that dm depends on.
    flags, dm = lax.optimization_barrier((flags, dm))
    few = dm is not None and num_blocks <= _FEW_BLOCKS
    tile_rows, head_rows = T // steps, p.S // steps
    carries = None
    if dm is not None and not few:
        dm_ordered, flags_ordered = call.processing_order((dm, flags))
        carries = call.processing_order(_carries(dm_ordered, flags_ordered, size))

    def by_rows(x, *tiles):
        return None if x is None else x.reshape(p.BNH, *tiles, head_rows, steps)

    def shared(*shape):
        return plgpu.SMEM(shape, jnp.float32)

    y = mosaic_call(
        functools.partial(_kernel, p=p, tile_rows=tile_rows),
        name="step_gradients",
        grid={"block": p.BNH * num_blocks},
        outputs={
            **dict.fromkeys(("di", "df"), float32(p.BNH, head_rows, steps)),
            "dm_first": None if dm is None else float32(p.BNH, num_blocks),
        },
        scratch={
            "other_tiles": shared(n, LANES + (n - 1) * tile_rows, steps),
            "scans": scan_buffers(2, rows=LANES, chunk_rows=LANES)[0],
            "carry_scan": scan_buffers(2, rows=head_rows, chunk_rows=LANES)[0] if few else None,
        },
        infer_layouts=False,
    )(
        per_query=by_rows(tile_sums.per_query, n),
        per_key=by_rows(tile_sums.per_key, n),
        diagonal=by_rows(tile_sums.diagonal),
        q_inter=by_rows(q_dot_dq_inter),
        k_inter=by_rows(k_dot_dk_inter),
        pass_through=pass_through,
        f=by_rows(vecF),
        flags=by_rows(flags),
        dm=by_rows(dm),
        carries=carries,
    )
    di, df = (y[name].reshape(p.BNH, p.S) for name in ("di", "df"))
    first = (
        jnp.zeros_like(di[:, 0]) if dm is None else y["dm_first"][:, p.memory_index(0, num_blocks)]
    )
    return di, df, first


class StepGradientsTiles(HopperTiles):
    def divides(self, p: Problem, options: KernelOptions) -> bool:
        return p.L % LANES == 0 and p.L <= LANES * STEPS
