"""parallel_bw_dP on Mosaic GPU: P, dP, the sums of W and delta of ``stages/parallel_bw_dP.py``, without scaled queries and keys.

One CTA an SM. Each takes every n-th item, a tile of 128 queries and 128 keys of a chunk. Operands are copied num_stages steps ahead, into
the next item too; a step is 64 columns of q and k, or of dh and v, and the last one has e_s. The two warpgroups have 64 queries each:
scores and dh . v in two accumulators, from which they compute what is written, 64 keys at a time.

With a normaliser dz_t den_t = slope_t delta_t; slope_t is -sign(z_t), or 0 where the floor is larger than |z_t|. While a product with a
tile of dh runs, its warpgroup multiplies its rows of that tile with those of h for delta. The tiles of h have stages of their own. All
items of a tile of queries compute the same delta to the bit; the one on the diagonal writes it.

An item reads 256 (DHQK + DHHV) elements, and 128 DHHV of h. Tiles of 64 x 64 would read twice as much through the L2.
"""
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.gate_gradients import TilePairs
from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.mosaic_gpu.copy_ring import CopyRing, ring_barriers
from mlstm_pallas.mosaic_gpu.launch import (
    BY_COLUMNS,
    BY_ROWS,
    REGISTER_ROWS,
    block,
    head_of,
    load,
    mosaic_call,
    multiprocessors,
    one_of,
    plgpu,
    tile_transforms,
)
from mlstm_pallas.mosaic_gpu.limits import SHARED_BYTES, kernel
from mlstm_pallas.mosaic_gpu.products import SUM_SCRATCH, Products
from mlstm_pallas.mosaic_gpu.step_sums import step_sums
from mlstm_pallas.normaliser import DEFAULT_NORMALISER, Normaliser, NormaliserGradients, query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering, StageCall, StageConfig, Weighted
from mlstm_pallas.stages.parallel_bw_dP import GradientTiles
from mlstm_pallas.tiles import blocks, divide, loop, remainder

TILE = 128  # queries, and keys, of an item
DEPTH = 64  # of the product of a step
H_STAGES = 3  # tiles of h in shared memory
SLICE = 32  # keys whose P and dP a warpgroup makes at a time: with more there are too few registers
LOG2_E = float(np.log2(np.e))


def _kernel(
    q,  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    k,
    v,  # (B * NH, S, DHHV) or (B, S, NH, DHHV)
    dh,
    h,  # likewise; absent where delta is 0 and without a normaliser
    e_hi,  # (B * NH, S), as all that follow
    e_lo,
    u_hi,
    u_lo,
    inv_den,  # absent without a normaliser
    slope,  # absent where h is
    P,  # out (B * NH, S, L)
    dP,  # out (B * NH, S, L)
    per_query,  # out (B * NH, L / 64, S) sum of W_ts over s < t in each tile of keys
    per_key,  # out (B * NH, L / 64, S) sum of W_ts over t > s in each tile of queries
    diagonal,  # out (B * NH, S) W_tt
    delta,  # out (B * NH, S); absent where h is
    operands,  # shared: the tiles of a step, and the vectors that take their place
    h_tiles,  # shared (H_STAGES, 128, 64)
    out_tiles,  # shared (2 warpgroups, 2, 64, 64)
    scratch,  # shared (2 warpgroups, 256), for sums over queries
    barriers,  # of the ring of operands
    h_barriers,  # of the ring of tiles of h; absent where h is
    *,
    p: Problem,
    scale: float,
    programs: int,
    num_stages: int,
    products: Products,
):
    wg, program = lax.axis_index("wg"), lax.axis_index("program")
    (left, left_vector), (right, right_vector) = operands
    R, tiles = REGISTER_ROWS, blocks(p.L, TILE)
    items_of_chunk = tiles * (tiles + 1) // 2
    steps_k, steps_v = blocks(p.DHQK, DEPTH), blocks(p.DHHV, DEPTH)
    steps_of_item = steps_k + steps_v + 1
    items = divide(p.BNH * p.NC * items_of_chunk - 1 - program, programs) + 1

    def item(index):
        """Head, chunk, and the tiles of queries and of keys: in order of queries, tile i of them has i + 1 tiles of keys."""
        index = program + index * programs
        x, chunk = remainder(index, items_of_chunk), divide(index, items_of_chunk)
        i: Any = sum((lax.convert_element_type(x >= m * (m + 1) // 2, jnp.int32) for m in range(1, tiles)), np.int32(0))
        j = x - divide(i * (i + 1), 2)
        return divide(chunk, p.NC), remainder(chunk, p.NC), i, j

    def copy(step, slot, barrier):
        copy_of_item(divide(step, steps_of_item), remainder(step, steps_of_item), slot, barrier)

    def copy_of_item(index, x, slot, barrier):
        """The copies of step x of an item: q and k, dh and v, or the vectors of the keys."""
        head, chunk, i, j = item(index)
        queries, keys = block(chunk * tiles + i, TILE), block(chunk * tiles + j, TILE)

        def operands(a, b, x):
            for y, steps, tile in ((a, queries, left), (b, keys, right)):
                plgpu.copy_gmem_to_smem(head_of(y, head, p).at[steps, block(x, DEPTH)], tile.at[slot], barrier)

        def vectors():
            for y, tile in ((e_hi, left_vector), (e_lo, right_vector)):
                plgpu.copy_gmem_to_smem(y.at[head, keys], tile.at[slot, :TILE], barrier)

        pl.when(x < steps_k)(lambda: operands(q, k, x))
        pl.when((x >= steps_k) & (x < steps_k + steps_v))(lambda: operands(dh, v, x - steps_k))
        pl.when(x == steps_k + steps_v)(vectors)

    def copy_h(step, slot, barrier):
        head, chunk, i, _ = item(divide(step, steps_v))
        tile = head_of(h, head, p).at[block(chunk * tiles + i, TILE), block(remainder(step, steps_v), DEPTH)]
        plgpu.copy_gmem_to_smem(tile, h_tiles.at[slot], barrier)

    ring = CopyRing(barriers, num_stages, items * steps_of_item, copy, products, (left, left_vector, right, right_vector))
    h_ring: Any = None
    if h is not None:
        h_ring = CopyRing(h_barriers, H_STAGES, items * steps_v, copy_h, products, (h_tiles,))

    def multiply(index, carry):
        head, chunk, i, j = item(index)
        own = block(wg, R)
        steps = block((chunk * tiles + i) * 2 + wg, R)

        first = index * steps_of_item

        def copy_after(step, slot, barrier):
            """Of this item or of the next: cheaper to find than of any."""
            x = step - lax.optimization_barrier(index) * steps_of_item
            here = x < steps_of_item
            copy_of_item(jnp.where(here, index, index + 1), jnp.where(here, x, x - steps_of_item), slot, barrier)

        refill = functools.partial(ring.refill, copies=copy_after)

        def of_rows(x):
            return load(x.at[head, steps], BY_ROWS, optimized=False)

        def across(x):
            return lax.broadcast_in_dim(x, (R, SLICE), [0])

        def down(x):
            return lax.broadcast_in_dim(x, (R, SLICE), [1])

        def scaled(x):
            """Times scale / den_t."""
            return x * (scale if inv is None else across(inv * scale))

        # Loaded before the products and used after them: their latency is hidden.
        u = of_rows(u_hi), of_rows(u_lo)
        inv, slopes = (None if x is None else of_rows(x) for x in (inv_den, slope))

        def times_h(x, slot):
            """dh_t . h_t over the columns of a step."""
            h_slot = h_ring.wait(index * steps_v + x)
            a, b = (load(tile).astype(jnp.float32) for tile in (left.at[slot, own], h_tiles.at[h_slot, own]))
            h_ring.release(index * steps_v + x)
            return products.sum_over_columns(a * b)

        def both(scores, dA):
            def add(accumulator, start, count, row_sums=None):
                def one(x, row_sums):
                    step = first + start + x
                    slot = ring.wait(step)
                    products.add(accumulator, left.at[slot, own], right.at[slot].T)
                    products.wait(1)
                    pl.when(start + x > 0)(lambda: ring.release(step - 1))
                    if row_sums is not None:
                        row_sums += times_h(x, slot)
                        h_ring.refill(index * steps_v + x)
                    pl.when(step > 0)(lambda: refill(step - 1))
                    return row_sums

                return products.loop(accumulator, count, one, row_sums)

            add(scores, 0, steps_k)
            row_sums = add(dA, steps_k, steps_v, None if h is None else plgpu.layout_cast(jnp.zeros((R,), jnp.float32), BY_ROWS))
            products.wait(0)
            ring.release(first + steps_k + steps_v - 1)
            refill(first + steps_k + steps_v - 1)
            return row_sums

        delta_of_rows, scores, dA = products.all_from_zeros(both, (R, TILE), (R, TILE))
        # Where the floor is larger nothing passes back, also where h is inf.
        bias = None if h is None else jnp.where(slopes == 0.0, 0.0, slopes * delta_of_rows)
        slot = ring.wait(first + steps_of_item - 1)
        t, s = (plgpu.broadcasted_iota(jnp.int32, (R, SLICE), axis, layout=plgpu.Layout.WGMMA) for axis in range(2))
        on_diagonal = 0.0

        def make_tiles(start):
            """Writes P and dP of SLICE keys, from ``start`` on, into the tiles to store; returns their W by place."""
            columns, in_tile = slice(start, start + SLICE), slice(start % R, start % R + SLICE)
            hi, lo = (down(load(x.at[slot, columns], BY_COLUMNS)) - across(y) for x, y in zip((left_vector, right_vector), u, strict=True))
            last_seen = t + ((i - j) * TILE + wg * R - start)  # the key of a query's own step
            D = jnp.where(s <= last_seen, jnp.exp2(hi * LOG2_E + lo * LOG2_E), 0.0)
            x = D * scores[:, columns]
            products.store(out_tiles.at[wg, 0, :, in_tile], scaled(x).astype(q.dtype))
            dx = dA[:, columns]
            dx = scaled(dx if bias is None else dx + across(bias))
            products.store(out_tiles.at[wg, 1, :, in_tile], (D * dx).astype(q.dtype))
            W = x * dx
            earlier = jnp.where(s < last_seen, W, 0.0)
            keys = pl.ds(pl.multiple_of((chunk * tiles + j) * TILE + start, SLICE), SLICE)
            per_key.at[head, i * (TILE // R) + wg, keys][...] = products.sum_over_rows(earlier, scratch.at[wg])
            at_own_step = products.sum_over_columns(jnp.where(s == last_seen, W, 0.0))
            return at_own_step, products.sum_over_columns(earlier)

        for b in range(TILE // R):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            sums = [make_tiles(start) for start in range(b * R, (b + 1) * R, SLICE)]
            of_diagonal, of_earlier = (functools.reduce(jnp.add, x) for x in zip(*sums, strict=True))
            on_diagonal += of_diagonal
            per_query.at[head, j * (TILE // R) + b, steps][...] = of_earlier
            plgpu.commit_smem()
            for x, destination in enumerate((P, dP)):
                columns = block(j * (TILE // R) + b, R)
                plgpu.copy_smem_to_gmem(out_tiles.at[wg, x], destination.at[head, steps, columns])
        ring.release(first + steps_of_item - 1)

        @pl.when(i == j)
        def write():
            diagonal.at[head, steps][...] = on_diagonal
            if h is not None:
                delta.at[head, steps][...] = delta_of_rows

        return carry

    rings = [ring] if h is None else [ring, h_ring]

    for x in rings:
        x.start()
    loop(items, multiply, ())
    plgpu.wait_smem_to_gmem(0)
    for x in rings:
        x.drain()


def _launch(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    matH: jax.Array | None,
    vecInvDen: jax.Array | None,
    vecSlope: jax.Array | None,
    call: StageCall,
) -> tuple[jax.Array, jax.Array, TilePairs, jax.Array | None]:
    """P, dP, the sums of W in tiles of 64 steps, and delta.

    Args:
      matH: as matDeltaH; None: delta is 0.
      vecInvDen, vecSlope: 1 / den_t and slope_t, (B * NH, S) float32; None without a normaliser.
    """
    p, dtype, num_stages, g = call.problem, matQ.dtype, call.tiles.num_stages, gates.per_step()
    interpret, reads_h = call.lowering is Lowering.MOSAIC_GPU_INTERPRET, matH is not None
    tiles, T = blocks(p.L, TILE), REGISTER_ROWS
    n = p.L // T
    programs = min(multiprocessors(interpret), p.BNH * p.NC * tiles * (tiles + 1) // 2)

    # The tile and the vector have the same bytes, so that a slot has the same place in both.
    transforms = tile_transforms(DEPTH, dtype.itemsize)
    tile = plgpu.SMEM((num_stages, TILE, DEPTH), dtype, transforms=transforms)
    vector = plgpu.SMEM((num_stages, TILE * DEPTH * dtype.itemsize // 4), jnp.float32)
    per_step = jax.ShapeDtypeStruct((p.BNH, p.S), jnp.float32)
    matrix, sums = jax.ShapeDtypeStruct((p.BNH, p.S, p.L), dtype), jax.ShapeDtypeStruct((p.BNH, n, p.S), jnp.float32)
    found = mosaic_call(
        functools.partial(_kernel, p=p, scale=p.qk_scale, programs=programs, num_stages=num_stages, products=Products(interpret)),
        name="parallel_bw_dP",
        grid={"program": programs},
        warpgroups=2,
        outputs={
            "P": matrix,
            "dP": matrix,
            "per_query": sums,
            "per_key": sums,
            "diagonal": per_step,
            "delta": per_step if reads_h else None,
        },
        scratch={
            "operands": [one_of(tile, vector, interpret=interpret), one_of(tile, vector, interpret=interpret)],
            "h_tiles": plgpu.SMEM((H_STAGES, TILE, DEPTH), dtype, transforms=transforms) if reads_h else None,
            "out_tiles": plgpu.SMEM((2, 2, T, T), dtype, transforms=tile_transforms(SLICE, dtype.itemsize)),
            "scratch": plgpu.SMEM((2, SUM_SCRATCH), jnp.float32),
            "barriers": ring_barriers(num_stages, copies=2),
            "h_barriers": ring_barriers(H_STAGES, copies=1) if reads_h else None,
        },
        interpret=interpret,
    )(
        q=matQ,
        k=matK,
        v=matV,
        dh=matDeltaH,
        h=matH,
        e_hi=g.vecE[0],
        e_lo=g.vecE[1],
        u_hi=g.vecU[0],
        u_lo=g.vecU[1],
        inv_den=vecInvDen,
        slope=vecSlope if reads_h else None,
    )
    of_tiles = (p.BNH, n, p.NC, n, T)
    pairs = TilePairs(
        found["per_query"].reshape(of_tiles), found["per_key"].reshape(of_tiles), found["diagonal"].reshape(p.BNH, p.NC, n, T)
    )
    return found["P"], found["dP"], pairs, found["delta"]


def parallel_bw_dP(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    matH: jax.Array | None,
    vecZ: jax.Array | None,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    return_keys: bool = True,
    call: StageCall,
) -> GradientTiles:
    """Runs the stage: ``stages/parallel_bw_dP.py``. Queries and keys come with their weights."""
    arrays, g = (matQ, matK, matV, matDeltaH, gates), gates.per_step()
    gradients, dn_added = NormaliserGradients(), None
    if normaliser is None or vecZ is None:
        P, dP, pairs, _ = _launch(*arrays, None, None, None, call)
    else:
        per_delta = normaliser.gradients(jnp.ones_like(vecZ), vecZ, g.vecM)  # which are linear in delta
        P, dP, pairs, delta = _launch(*arrays, matH, per_delta.vecInvDen, per_delta.vecDzDen, call)
        gradients = normaliser.gradients(jnp.zeros_like(vecZ) if delta is None else delta, vecZ, g.vecM)
    r = query_scale(g.vecW, call.problem.qk_scale, gradients.vecInvDen)
    if gradients.vecDzDen is not None:
        dn_added = step_sums(matQ, r * gradients.vecDzDen, call=call)
    keys = Weighted(matK, g.vecAbar) if return_keys else None
    return GradientTiles(P, dP, Weighted(matQ, r), keys, pairs, gradients, dn_added)


def _takes(tiles: StageConfig, p: Problem) -> bool:
    """Stages of two tiles of 128 x 64, three such tiles of h, read or not, four of 64 x 64 for outputs, what sums take, and barriers."""
    shared = 2 * ((tiles.num_stages * 2 + 3) * 128 * 64 + 4 * 64 * 64) + 4 * 2 * 256 + 2048 + 1024
    fits = tiles.num_stages >= 2 and shared <= SHARED_BYTES
    return fits and p.DHQK % 64 == 0 and p.DHHV % 64 == 0 and p.L % 128 == 0


KERNEL = kernel(
    search=dict(num_stages=(2, 3, 4)),
    heuristic=lambda p: StageConfig(num_stages=4),
    takes=_takes,
)
