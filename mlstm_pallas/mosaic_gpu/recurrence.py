"""The recurrences of ``stages/recurrence.py`` on Mosaic GPU, without x.

Grid (B * NH times the number of recurrences, DHQK / rows, DHHV / 128). A CTA owns up to 256 rows and 128 columns of X. It has two
warpgroups, each with 64 columns, kept transposed in registers. They share the copying, num_stages tiles of 64 steps ahead.

With r the left operand of the transposed product is r b, weighted in registers: (r b)^T a = b^T (r a), and a tile of b has 64 columns a
warpgroup. The operand of a step is made while the product of the step before runs.

A recurrence with an h also has the inner products b_t . h_t, a warpgroup's 64 columns at a time: while the product of a step runs, the
warpgroup multiplies its tile of b with that of h. The CTAs of the first row block do it. The tiles of h have stages of their own.
"""
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.mosaic_gpu.copy_ring import CopyRing, ring_barriers
from mlstm_pallas.mosaic_gpu.launch import (
    BY_COLUMNS,
    REGISTER_ROWS,
    block,
    head_of,
    load,
    mosaic_call,
    plgpu,
    tile_transforms,
)
from mlstm_pallas.mosaic_gpu.limits import state_rows
from mlstm_pallas.mosaic_gpu.products import Products
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering, StageCall, StageConfig
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs
from mlstm_pallas.tiles import blocks, divide, loop, remainder

STEPS, COLUMNS = 64, 128  # of a tile, and of the block of X of a CTA
H_STAGES = 3  # tiles of h in shared memory
ENOUGH_CTAS = 128  # of a launch: an H200 has 132 SMs, and an SM holds one such CTA


def _kernel(
    a_tiles,  # shared (stages, 64, rows)
    b_tiles,  # shared (stages, 64, 128)
    weights,  # shared (stages, 64) float32, absent without r
    h_tiles,  # shared (H_STAGES, 64, 128), absent where no recurrence has an h
    out_tiles,  # shared (2 warpgroups, 2, 64, 64)
    barriers,  # of the ring of operands
    h_barriers,  # of the ring of tiles of h, absent likewise
    *,
    p: Problem,
    rows: int,
    backward: Sequence[bool],
    num_stages: int,
    products: Products,
    **refs,  # of recurrence j a_j (B * NH, S, DHQK) and b_j (B * NH, S, DHHV) or (B, S, NH, D), r_j (B * NH, S), may be absent,
    # h_j as b_j, may be absent, gamma_j (B * NH, NC), X_initial_j (B * NH, DHHV, DHQK) transposed, may be absent; out X_j (B * NH, NC,
    # DHQK, DHHV), X_last_j (B * NH, DHHV, DHQK), may be absent, inner_j (B * NH, DHHV / 64, S) sums of b_j h_j over 64 columns each,
    # absent where h_j is
):
    wg, index = lax.axis_index("wg"), lax.axis_index("head")
    R, tiles_of_chunk = REGISTER_ROWS, p.L // STEPS
    unrolled = min(tiles_of_chunk, 2)  # steps whose left operands have registers of their own; L is a power of two
    own_rows, columns = block(lax.axis_index("rows"), rows), block(lax.axis_index("columns"), COLUMNS)
    own_part = lax.axis_index("columns") * (COLUMNS // R) + wg
    own, own_of_tile = block(own_part, R), block(wg, R)  # columns of the warpgroup, in the array and in a tile
    head = remainder(index, p.BNH)

    def chunk_at(c, j):
        return p.NC - 1 - c if backward[j] else c

    def rings(j, reads_h):
        """Of the operands, and of the tiles of h."""
        a, b = (head_of(refs[f"{name}_{j}"], head, p) for name in "ab")
        r: Any = refs[f"r_{j}"]
        h: Any = head_of(refs[f"h_{j}"], head, p) if reads_h else None

        def steps_of(step):
            tile = chunk_at(divide(step, tiles_of_chunk), j) * tiles_of_chunk + remainder(step, tiles_of_chunk)
            return block(tile, STEPS)

        def copy(step, slot, barrier):
            steps = steps_of(step)
            plgpu.copy_gmem_to_smem(a.at[steps, own_rows], a_tiles.at[slot], barrier)
            plgpu.copy_gmem_to_smem(b.at[steps, columns], b_tiles.at[slot], barrier)
            if r is not None:
                plgpu.copy_gmem_to_smem(r.at[head, steps], weights.at[slot], barrier)

        def copy_h(step, slot, barrier):
            plgpu.copy_gmem_to_smem(h.at[steps_of(step), columns], h_tiles.at[slot], barrier)

        total = p.NC * tiles_of_chunk
        operands = CopyRing(barriers, num_stages, total, copy, products, (a_tiles, b_tiles, weights))
        return operands, CopyRing(h_barriers, H_STAGES, total, copy_h, products, (h_tiles,)) if reads_h else None

    def multiply(j, reads_h):
        ring, h_ring = rings(j, reads_h)
        for x in (ring, h_ring) if reads_h else (ring,):
            x.start()
        gamma, X, X_initial, X_last = (refs[f"{name}_{j}"] for name in ("gamma", "X", "X_initial", "X_last"))

        def left(slot):
            """b of a tile, transposed and weighted, (64 columns, 64 steps)."""
            bT = b_tiles.at[slot, :, own_of_tile].T
            if weights is None:
                return bT
            of_steps = lax.broadcast_in_dim(load(weights.at[slot], BY_COLUMNS), (R, STEPS), [1])
            return (load(bT).astype(jnp.float32) * of_steps).astype(X.dtype)

        def inner(step, tile):
            """The sums of b h over the columns of the warpgroup, for the steps of a tile."""
            slot, h_slot = ring.slot(step), h_ring.wait(step)
            x, y = (load(z.at[:, own_of_tile]).astype(jnp.float32) for z in (b_tiles.at[slot], h_tiles.at[h_slot]))
            h_ring.release(step)
            refs[f"inner_{j}"].at[head, own_part, block(tile, STEPS)][...] = products.sum_over_columns(x * y)

        def chunk(c, carry):
            XT, decay = carry
            at = chunk_at(c, j)
            following = gamma[head, chunk_at(lax.min(c + 1, np.int32(p.NC - 1)), j)]
            for x in range(rows // R):
                tile = out_tiles.at[wg, remainder(c * (rows // R) + x, 2)]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                products.store(tile.T, XT[:, x * R : (x + 1) * R].astype(X.dtype))
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(tile, X.at[head, at, block(lax.axis_index("rows") * (rows // R) + x, R), own])

            def add(accumulator):
                def some(i, _):
                    for x in range(unrolled):
                        step = c * tiles_of_chunk + i * unrolled + x
                        slot = ring.wait(step)
                        products.add(accumulator, left(slot), a_tiles.at[slot])
                        products.wait(1)
                        release = functools.partial(ring.release, step - 1)
                        pl.when(i > 0)(release) if x == 0 else release()
                        if reads_h:
                            inner(step, at * tiles_of_chunk + i * unrolled + x)
                            h_ring.refill(step)
                        pl.when(step > 0)(functools.partial(ring.refill, step - 1))
                    return _

                products.loop(accumulator, tiles_of_chunk // unrolled, some)
                products.wait(0)
                ring.release((c + 1) * tiles_of_chunk - 1)

            (XT,) = products.onto(add, XT * decay)
            return XT, following

        XT = products.zeros(R, rows) if X_initial is None else load(X_initial.at[head, own, own_rows], optimized=False)
        XT, _ = loop(p.NC, chunk, (XT, gamma[head, chunk_at(np.int32(0), j)]))
        if X_last is not None:
            X_last[head, own, own_rows] = XT
        plgpu.wait_smem_to_gmem(0)
        ring.drain()
        if reads_h:
            h_ring.drain()

    for j in range(len(backward)):
        own_recurrence, has_h = divide(index, p.BNH) == j, refs[f"h_{j}"] is not None
        if not has_h or rows == p.DHQK:
            pl.when(own_recurrence)(functools.partial(multiply, j, has_h))
            continue
        for reads_h in (True, False):  # no branch in the loop over steps
            first_rows = (lax.axis_index("rows") == 0) == reads_h
            pl.when(own_recurrence & first_rows)(functools.partial(multiply, j, reads_h))


def recurrences(name: str, *given: Recurrence, call: StageCall) -> list[RecurrenceOutputs]:
    """``stages/recurrence.py``, in one launch."""
    p, dtype, num_stages = call.problem, given[0].a.dtype, call.tiles.num_stages
    rows, interpret, R = block_rows(call.tiles, p, len(given)), call.lowering is Lowering.MOSAIC_GPU_INTERPRET, REGISTER_ROWS
    weighted = given[0].r is not None
    if any((x.r is not None) != weighted or x.x_initial is not None for x in given):
        raise NotImplementedError(f"{name} has r in some of its recurrences, or x, expected r in all or in none, and no x")
    has_h = any(x.h is not None for x in given)
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    for j, x in enumerate(given):
        inputs |= {f"a_{j}": x.a, f"b_{j}": x.b, f"r_{j}": x.r, f"h_{j}": x.h, f"gamma_{j}": x.gamma}
        inputs[f"X_initial_{j}"] = None if x.X_initial is None else x.X_initial.mT
        last = jax.ShapeDtypeStruct((p.BNH, p.DHHV, p.DHQK), jnp.float32) if x.return_last else None
        inner = None if x.h is None else jax.ShapeDtypeStruct((p.BNH, blocks(p.DHHV, R), p.S), jnp.float32)
        outputs |= {f"X_{j}": jax.ShapeDtypeStruct((p.BNH, p.NC, p.DHQK, p.DHHV), dtype), f"X_last_{j}": last, f"inner_{j}": inner}

    def tile(shape):
        return plgpu.SMEM(shape, dtype, transforms=tile_transforms(shape[-1], dtype.itemsize))

    found = mosaic_call(
        functools.partial(
            _kernel, p=p, rows=rows, backward=tuple(x.backward for x in given), num_stages=num_stages, products=Products(interpret)
        ),
        name=name,
        grid={"head": len(given) * p.BNH, "rows": blocks(p.DHQK, rows), "columns": blocks(p.DHHV, COLUMNS)},
        warpgroups=2,
        outputs=outputs,
        scratch={
            "a_tiles": tile((num_stages, STEPS, rows)),
            "b_tiles": tile((num_stages, STEPS, COLUMNS)),
            "weights": plgpu.SMEM((num_stages, STEPS), jnp.float32) if weighted else None,
            "h_tiles": tile((H_STAGES, STEPS, COLUMNS)) if has_h else None,
            "out_tiles": tile((2, 2, R, R)),
            "barriers": ring_barriers(num_stages, copies=3 if weighted else 2),
            "h_barriers": ring_barriers(H_STAGES, copies=1) if has_h else None,
        },
        interpret=interpret,
    )(**inputs)

    def outputs_of(j):
        last, inner = found[f"X_last_{j}"], found[f"inner_{j}"]
        inner = None if inner is None else jnp.sum(inner, axis=1)
        return RecurrenceOutputs(found[f"X_{j}"], None if last is None else last.mT, None, None, inner)

    return [outputs_of(j) for j in range(len(given))]


def num_ctas(rows: int, p: Problem) -> int:
    """CTAs of one recurrence; 0 where no such blocks fit."""
    return p.BNH * (p.DHQK // rows) * (p.DHHV // COLUMNS) if rows else 0


def heuristic_rows(p: Problem, recurrences: int) -> int:
    """siz_b_DHQK: the most rows of a block with which so many recurrences have enough CTAs."""
    sizes = 256, 128, 64
    enough = (x for x in sizes if recurrences * num_ctas(state_rows(p.DHQK, x), p) >= ENOUGH_CTAS)
    return next(enough, sizes[-1])


def block_rows(tiles: StageConfig, p: Problem, recurrences: int) -> int:
    """Rows of a block: those of the tiles, which are for two recurrences.

    One alone has fewer where it would have few CTAs.
    """
    tile = tiles.siz_b_DHQK
    return state_rows(p.DHQK, tile if recurrences > 1 else min(tile, heuristic_rows(p, recurrences)))
