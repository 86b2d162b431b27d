"""parallel_bw_dQKV on Mosaic GPU where a CTA makes all gradients of a chunk, P and dP too: L = 128, DHQK 64 or 128.

One CTA an SM; each takes every n-th chunk. Two warpgroups multiply, each for 64 rows of the chunk.
Tiles of 64 columns are copied num_stages ahead, into the next chunk too. k stays in shared memory
for the whole chunk. At DHQK 64 there is room for the k of the next chunk; at 128 its copy waits for
the end of the chunk.

At DHQK 128 the two warpgroups share the copying and have 255 registers a thread. At 64 a third one
copies. Where the compiler does not move registers between warpgroups, each then has 168, and the
block of P and dP on the diagonal is made in two halves.

First come P and dP, and the sums of W, as in parallel_bw_dP: dh . v over DHHV, then q . k over DHQK. P and dP are in shared memory alone.
Each warpgroup makes the block of 64 x 64 on the diagonal that has its queries, and half the keys of the block below the diagonal.

Then the rows of dq and dk of a warpgroup, 64 x DHQK each, stay in registers while the columns of v and dh pass once more: a step has tiles
of v, dC, C and dh in shared memory, adds to dq, dk and <C_c, dC_{c+1}>, and makes 64 columns of dv. The second time v and dh pass in
reverse order, so that a part of them is still in the L2.
"""

import enum
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.gate_gradients import TilePairs
from mlstm_pallas.mosaic_gpu.copy_ring import CopyRing, ring_barriers
from mlstm_pallas.mosaic_gpu.launch import (
    BY_COLUMNS,
    BY_ROWS,
    REGISTER_ROWS,
    block,
    head_of,
    load,
    mosaic_call,
    move_registers,
    multiprocessors,
    one_of,
    plgpu,
    tile_transforms,
)
from mlstm_pallas.mosaic_gpu.limits import MOVES_REGISTERS
from mlstm_pallas.mosaic_gpu.products import SUM_SCRATCH, Products
from mlstm_pallas.normaliser import query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering, StageCall, sequence_shape
from mlstm_pallas.tiles import blocks, divide, loop, remainder

CHUNK = 128  # steps of a chunk
DEPTH = 64  # columns of a tile
HALF = 32  # keys of the block below the diagonal that a warpgroup makes
LOG2_E = float(np.log2(np.e))


class _Vector(enum.IntEnum):
    """Rows of the vectors in shared memory; N only with a normaliser."""

    E_HI = 0
    E_LO = 1
    DN = 2
    N = 3


class _Tile(enum.IntEnum):
    """What a tile has, in the order of a step of the gradients."""

    V = 0
    DC = 1
    C = 2
    DH = 3
    Q = 4


def _k_stages(p: Problem) -> int:
    """Chunks whose k is in shared memory."""
    return 128 // p.DHQK


def _readers(p: Problem) -> int:
    """Warpgroups that share the copying; 0: a third one copies."""
    return 0 if p.DHQK == 64 else 2


def _keys_at_a_time(p: Problem) -> int:
    """Of the block on the diagonal, whose P and dP a warpgroup makes at a time: half of them take fewer registers."""
    return REGISTER_ROWS if _readers(p) == 0 and MOVES_REGISTERS else HALF


def _kernel(
    q,  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    k,
    v,  # (B * NH, S, DHHV) or (B, S, NH, DHHV)
    dh,
    C,  # (B * NH, NC, DHQK, DHHV)
    n,  # (B * NH, NC, DHQK), absent without a normaliser
    dC,
    dn,
    e_hi,  # (B * NH, S), as all that follow
    e_lo,
    u_hi,
    u_lo,
    w,
    abar,
    inv_den,  # absent without a normaliser
    dz_den,  # likewise
    dq,  # out, like q
    q_inter,  # out (B * NH, S)
    dk,
    k_inter,
    dv,  # out, like v
    states,  # out (B * NH, NC, 128), parts of the sum
    per_query,  # out (B * NH, 2, S) sum of W_ts over s < t in each tile of 64 keys; scratch where these keys are later than t
    per_key,  # out (B * NH, 2, S) sum of W_ts over t > s in each tile of 64 queries
    diagonal,  # out (B * NH, S) W_tt
    slots,  # shared (num_stages, 128, 64): columns of q, v or dh, or of a state, which has DHQK rows
    k_tiles,  # shared (k_stages, DHQK / 64 * 128, 64), 64 columns below the other 64
    P_tile,  # shared (3 * 64, 64), blocks of 64 x 64, transposed: block s + t has the keys of block s and the queries of block t
    dP_tile,
    staging,  # shared, of each warpgroup a tile (64, 64) for outputs; in the same memory SUM_SCRATCH float32 for sums over queries
    vectors,  # shared (k_stages, 4, 128), see ``_Vector``
    barriers,  # of the ring of tiles
    k_barriers,  # of the ring of k and the vectors
    tiles_full,  # of P and dP, and of per_query from warpgroup 0 to warpgroup 1
    tiles_empty,  # absent with one stage of k: both warpgroups wait for the next k before they write P and dP
    *,
    p: Problem,
    scale: float,
    programs: int,
    num_stages: int,
    products: Products,
):
    warpgroup, program = lax.axis_index("wg"), lax.axis_index("program")
    out_tiles, scratch = staging
    R, steps, parts = REGISTER_ROWS, 2 * blocks(p.DHHV, 2 * DEPTH), blocks(p.DHQK, DEPTH)
    # Tiles of a chunk: dh and v of each step, q; v, dC, C and dh of each step, q.
    first_q, second_step, second_q = 2 * steps, 2 * steps + parts, 6 * steps + parts
    tiles_of_chunk, k_stages, readers = second_q + parts, _k_stages(p), _readers(p)
    chunks = divide(p.BNH * p.NC - 1 - program, programs) + 1

    def head_and_chunk(index):
        index = program + index * programs
        return divide(index, p.NC), remainder(index, p.NC)

    def last_first(j):
        """The columns of v and dh that pass in step j the second time: those that passed last are the most likely to be in the L2."""
        return steps - 1 - j

    def copy_tile(kind, head, chunk, column, slot, barrier):
        x, is_state = (v, dC, C, dh, q)[kind], kind in (_Tile.DC, _Tile.C)
        tile = slots.at[slot, : p.DHQK if is_state else CHUNK]
        source = x.at[head, chunk] if is_state else head_of(x, head, p).at[block(chunk, CHUNK)]
        plgpu.copy_gmem_to_smem(source.at[:, block(column, DEPTH)], tile, barrier)

    def copy(step, slot, barrier):
        copy_of_chunk(divide(step, tiles_of_chunk), remainder(step, tiles_of_chunk), slot, barrier)

    def copy_of_chunk(index, x, slot, barrier):
        """The copy of tile x of a chunk."""
        head, chunk = head_and_chunk(index)
        y = x - second_step
        for_tiles, for_gradients = x < first_q, (y >= 0) & (x < second_q)
        # dh and v in turn; v, dC, C and dh in turn; q.
        kind = jnp.where(for_tiles, 3 - 3 * remainder(x, 2), jnp.where(for_gradients, remainder(y, 4), np.int32(_Tile.Q)))
        of_q = x - jnp.where(y < 0, np.int32(first_q), np.int32(second_q))
        column = jnp.where(for_tiles, divide(x, 2), jnp.where(for_gradients, last_first(divide(y, 4)), of_q))
        for own_kind in _Tile:
            pl.when(kind == own_kind)(functools.partial(copy_tile, own_kind, head, chunk, column, slot, barrier))

    def copy_k(index, k_slot, barrier):
        """k and the vectors of a chunk."""
        head, chunk = head_and_chunk(index)
        rows = block(chunk, CHUNK)
        for y in range(parts):
            tile = k_tiles.at[k_slot, y * CHUNK : (y + 1) * CHUNK]
            plgpu.copy_gmem_to_smem(head_of(k, head, p).at[rows, block(y, DEPTH)], tile, barrier)
        for y, z in {_Vector.E_HI: e_hi, _Vector.E_LO: e_lo}.items():
            plgpu.copy_gmem_to_smem(z.at[head, rows], vectors.at[k_slot, int(y)], barrier)
        for y, z in ({_Vector.DN: dn} if n is None else {_Vector.DN: dn, _Vector.N: n}).items():
            plgpu.copy_gmem_to_smem(z.at[head, chunk], vectors.at[k_slot, int(y), : p.DHQK], barrier)

    products.guard(tiles_empty, P_tile, dP_tile)
    ring = CopyRing(barriers, num_stages, chunks * tiles_of_chunk, copy, products, (slots,), readers)
    k_ring = CopyRing(k_barriers, k_stages, chunks, copy_k, products, (k_tiles, vectors), readers)

    def copy_chunk(index, carry):
        """The part of a warpgroup that copies only: with the kinds of the tiles known it delays no copy."""
        head, chunk = head_and_chunk(index)
        first = index * tiles_of_chunk

        def fetch(at, kind, column):
            def start(_, slot, barrier):
                copy_tile(kind, head, chunk, column, slot, barrier)

            ring.fetch(first + at, start)

        def for_tiles(x, carry):
            fetch(2 * x, _Tile.DH, x)
            fetch(2 * x + 1, _Tile.V, x)
            return carry

        def for_gradients(j, carry):
            for kind in (_Tile.V, _Tile.DC, _Tile.C, _Tile.DH):
                fetch(second_step + 4 * j + int(kind), kind, last_first(j))
            return carry

        loop(steps, for_tiles, None)
        for y in range(parts):
            fetch(first_q + y, _Tile.Q, y)
        k_ring.fetch(index)
        loop(steps, for_gradients, None)
        for y in range(parts):
            fetch(second_q + y, _Tile.Q, y)
        return carry

    def multiply(index, carry):
        wg = lax.optimization_barrier(warpgroup)  # what follows from it is not kept in registers from chunk to chunk
        head, chunk = head_and_chunk(index)
        own, rows = block(wg, R), block(chunk * 2 + wg, R)  # its rows: in a tile, in the sequence
        out_tile, k_slot = out_tiles.at[wg], k_ring.slot(index)
        k_tile, first = k_tiles.at[k_slot], index * tiles_of_chunk

        def copy_after(step, slot, barrier):
            """Of this chunk or of the next: cheaper to find than of any."""
            x = step - lax.optimization_barrier(index) * tiles_of_chunk
            here = x < tiles_of_chunk
            copy_of_chunk(jnp.where(here, index, index + 1), jnp.where(here, x, x - tiles_of_chunk), slot, barrier)

        refill = functools.partial(ring.refill, copies=copy_after)

        def part(y, x):
            """Block x of 64 rows of columns y of k."""
            return block(y * (CHUNK // R) + x, R)

        def across(x, columns=R):
            return lax.broadcast_in_dim(x, (R, columns), [0])

        def down(x, at, columns=R):
            """Elements of a vector."""
            return lax.broadcast_in_dim(load(vectors.at[k_slot, int(x), pl.ds(at, columns)], BY_COLUMNS), (R, columns), [1])

        def of_rows(x, rows=rows):
            return None if x is None else load(x.at[head, rows], BY_ROWS, optimized=False)

        def store(columns):
            """Writes 64 x 64 elements of each of a few gradients, by way of tiles that no copy reads any more."""
            for x, tile, _, _ in columns:
                products.store(tile, x.astype(q.dtype))
            plgpu.commit_smem()
            for _, tile, out, column in columns:
                plgpu.copy_smem_to_gmem(tile, head_of(out, head, p).at[rows, block(column, R)])

        # Queries and keys of the two blocks: the one on the diagonal, and half of the one below.
        later, half = block(chunk * 2 + 1, R), pl.multiple_of(wg * HALF, HALF)
        queries_of, keys_of, widths = (rows, later), (pl.multiple_of(wg * R, R), half), (R, HALF)
        # Loaded before the products and used after them: their latency is hidden.
        of_queries = [[of_rows(x, y) for x in (u_hi, u_lo, inv_den, dz_den)] for y in queries_of]
        weights, key_weights = query_scale(of_rows(w), scale, of_queries[0][2]), of_rows(abar)

        def scores_and_dA(*sums):
            scores, dA = sums[:2], sums[2:]

            def add_blocks(sums, left, right, first=0):
                """Of tiles of queries and keys."""
                for x, t, s, width in zip(sums, (own, block(1, R)), keys_of, widths, strict=True):
                    products.add(x, left.at[t], right.T.at[:, pl.ds(first + s, width)])

            def add(x, carry):
                at_dh, at_v = first + 2 * x, first + 2 * x + 1
                add_blocks(dA, slots.at[ring.wait(at_dh)], slots.at[ring.wait(at_v)])
                products.wait(2)

                @pl.when(x > 0)
                def next_tiles():
                    ring.release(at_dh - 2, at_v - 2)
                    refill(at_dh - 2, at_v - 2)

                if readers:

                    @pl.when((x == 0) & (index > 0))
                    def next_k():
                        k_ring.refill(index - 1)

                return carry

            products.loop(dA, steps, add)
            for y in range(parts):
                slot = ring.wait(first + first_q + y)
                if y == 0:
                    k_ring.wait(index)
                add_blocks(scores, slots.at[slot], k_tile, y * CHUNK)
                if y == 0:
                    products.wait(2)
                    ring.release(first + first_q - 2, first + first_q - 1)
            products.wait(0)
            ring.release(*(first + first_q + y for y in range(parts)))
            refill(*(first + first_q + y for y in range(-2, parts)))

        _, *found = products.all_from_zeros(scores_and_dA, *((R, width) for width in 2 * widths))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last gradients of the chunk before went out from these places
        if tiles_empty is not None:
            pl.when(index > 0)(lambda: plgpu.barrier_wait(tiles_empty))

        def make_tiles(index, first_key, width, at, mask=None):
            """Writes P and dP of so many keys, from ``first_key`` of the block on; returns their W."""
            (*u, inv, bias), columns = of_queries[index], slice(first_key, first_key + width)
            key = pl.multiple_of(keys_of[index] + first_key, HALF)
            x, dx = found[index][:, columns], found[2 + index][:, columns]

            def scaled(x):
                """Times scale / den_t."""
                return x * (scale if inv is None else across(inv * scale, width))

            hi, lo = (down(e, key, width) - across(y, width) for e, y in zip((_Vector.E_HI, _Vector.E_LO), u, strict=True))
            D = jnp.exp2(hi * LOG2_E + lo * LOG2_E)
            if mask is not None:
                D = jnp.where(mask, D, 0.0)
            x = D * x
            products.store(P_tile.at[at].T, scaled(x).astype(q.dtype))
            dx = scaled(dx if bias is None else dx + across(bias, width))
            products.store(dP_tile.at[at].T, (D * dx).astype(q.dtype))
            return x * dx

        def sum_over_queries(W):
            return products.sum_over_rows(W, scratch.at[wg, :SUM_SCRATCH])

        def keys_from(start, width):
            return pl.ds(pl.multiple_of(chunk * CHUNK + start, HALF), width)

        W = make_tiles(1, 0, HALF, block(2 + wg, HALF))
        of_half = products.sum_over_columns(W)

        @pl.when(wg == 0)
        def give():  # warpgroup 1 adds it to its own
            per_query.at[head, 1, rows][...] = of_half

        plgpu.commit_smem()
        plgpu.barrier_arrive(tiles_full)
        per_key.at[head, 1, keys_from(half, HALF)][...] = sum_over_queries(W)

        of_diagonal, of_earlier, width = [], [], _keys_at_a_time(p)
        for start in range(0, R, width):
            t, s = (plgpu.broadcasted_iota(jnp.int32, (R, width), axis, layout=plgpu.Layout.WGMMA) for axis in range(2))
            s += start
            W = make_tiles(0, start, width, pl.ds(pl.multiple_of(2 * wg * R + start, HALF), width), s <= t)
            of_diagonal.append(products.sum_over_columns(jnp.where(s == t, W, 0.0)))
            W = jnp.where(s < t, W, 0.0)
            of_earlier.append(products.sum_over_columns(W))
            per_key.at[head, wg, keys_from(wg * R + start, width)][...] = sum_over_queries(W)
        diagonal.at[head, rows][...] = functools.reduce(jnp.add, of_diagonal)
        per_query.at[head, wg, rows][...] = functools.reduce(jnp.add, of_earlier)
        corner = block(2 * wg, R)
        plgpu.commit_smem()
        plgpu.barrier_wait(tiles_full)

        def add_earlier(accumulator, tile, x, at):
            """Adds the transposed tile's product for the warpgroup's queries: with x from a block on, of the keys up to them."""

            def add(j, carry):
                products.add(accumulator, tile.at[block(wg + j, R)].T, x.at[block(at + j, R)])
                return carry

            products.loop(accumulator, wg + 1, add)

        def add_later(accumulator, tile, x):
            """Adds the tile's product for the warpgroup's keys: with x, of the queries from them on."""

            def add(j, carry):
                products.add(accumulator, tile.at[block(2 * wg + j, R)], x.at[block(wg + j, R)])
                return carry

            products.loop(accumulator, 2 - wg, add)

        of_n = None if n is None else weights * of_queries[0][3]

        def step(j, carry):
            total, *sums = carry
            at_v, at_dC, at_C, at_dh = (first + second_step + 4 * j + x for x in range(4))

            def tile(step):
                return slots.at[ring.slot(step)]

            def with_states(sum_q, sum_k, sum_v):
                ring.wait(at_v)
                ring.wait(at_dC)
                products.add(sum_k, tile(at_v).at[own], tile(at_dC).at[: p.DHQK].T)
                for y in range(parts):
                    products.add(sum_v, k_tile.at[part(y, wg)], tile(at_dC).at[y * R : (y + 1) * R])
                ring.wait(at_C)
                ring.wait(at_dh)
                products.add(sum_q, tile(at_dh).at[own], tile(at_C).at[: p.DHQK].T)

            *sums, new = products.onto(with_states, *sums, products.zeros(R, DEPTH))

            def inner(total):
                of_state = block(wg if parts == 2 else 0, R)
                x, y = (load(z.at[of_state]).astype(jnp.float32) for z in (tile(at_dC), tile(at_C)))
                return total + products.sum_over_columns(x * y)

            # Of the 128 rows of a state a warpgroup takes 64; 64 rows it takes in every other step.
            total = inner(total) if parts == 2 else lax.cond(remainder(j, 2) == wg, inner, lambda total: total, total)
            ring.release(at_v, at_dC, at_C)
            new *= across(key_weights)

            def with_tile(sum_v):
                add_later(sum_v, P_tile, tile(at_dh))
                refill(at_v, at_dC, at_C)  # while the product runs

            (new,) = products.onto(with_tile, new)
            ring.release(at_dh)
            refill(at_dh)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            store([(new, out_tile, dv, last_first(j))])
            return total, *sums

        zeros = products.zeros(R, p.DHQK)
        total, new_q, new_k = loop(steps, step, (plgpu.layout_cast(jnp.zeros((R,), jnp.float32), BY_ROWS), zeros, zeros))
        states.at[head, chunk, own][...] = total

        @pl.when(wg == 1)
        def add_halves():
            per_query.at[head, 0, rows][...] = of_half + of_rows(per_query.at[:, 1], block(chunk * 2, R))

        inter, of_q, of_k = [], [], []
        for y in range(parts):
            slot = ring.wait(first + second_q + y)
            x, z = (a[:, y * DEPTH : (y + 1) * DEPTH] for a in (new_q, new_k))
            x *= across(weights)
            if of_n is not None:
                x += across(of_n) * down(_Vector.N, y * R)
            z = (z + down(_Vector.DN, y * R)) * across(key_weights)
            of_q.append(products.sum_over_columns(x * load(slots.at[slot, own]).astype(jnp.float32)))
            of_k.append(products.sum_over_columns(z * load(k_tile.at[part(y, wg)]).astype(jnp.float32)))
            inter += [x, z]
        q_inter.at[head, rows][...] = functools.reduce(jnp.add, of_q)
        k_inter.at[head, rows][...] = functools.reduce(jnp.add, of_k)

        def with_tiles(*sums):
            for y in range(parts):
                add_earlier(sums[2 * y], dP_tile, k_tile, y * (CHUNK // R))
                add_later(sums[2 * y + 1], dP_tile, slots.at[ring.slot(first + second_q + y)])

        gradients = products.onto(with_tiles, *inter)
        k_ring.release(index)
        ring.release(*(first + second_q + y for y in range(parts)))
        refill(*(first + second_q + y for y in range(parts)))
        if tiles_empty is not None:
            products.release(tiles_empty)
        # The corner blocks of P and dP are read by the warpgroup that wrote them alone.
        columns = [(gradients[2 * y + z], out, y) for y in range(parts) for z, out in enumerate((dq, dk))]
        free_tiles = out_tile, P_tile.at[corner], dP_tile.at[corner]
        for first in range(0, len(columns), len(free_tiles)):
            plgpu.wait_smem_to_gmem(2 if first else 0, wait_read_only=True)  # for one tile more, or for all
            store([(x, tile, *where) for (x, *where), tile in zip(columns[first:], free_tiles, strict=False)])
        return carry

    def gradients():
        loop(chunks, multiply, ())
        if tiles_empty is not None:
            plgpu.barrier_wait(tiles_empty)
        plgpu.wait_smem_to_gmem(0)

    if readers:
        ring.start()
        k_ring.start()
        gradients()
    else:

        @pl.when(warpgroup < 2)
        def multiplications():
            move_registers(232)
            gradients()

        @pl.when(warpgroup == 2)
        def copies():
            move_registers(40)
            loop(chunks, copy_chunk, None)

    ring.drain()
    k_ring.drain()


def parallel_bw_dQKV_by_chunk(inputs: Mapping[str, Any], call: StageCall) -> tuple[Any, ...]:
    """Runs the stage; inputs as the kernel's, outputs in the order of ``Gradients``."""
    p, num_stages, dtype = call.problem, call.tiles.num_stages, inputs["q"].dtype
    interpret = call.lowering is Lowering.MOSAIC_GPU_INTERPRET
    programs, T = min(multiprocessors(interpret), p.BNH * p.NC), REGISTER_ROWS
    parts, n, k_stages = p.DHQK // DEPTH, CHUNK // T, _k_stages(p)

    def tiles(*shape):
        return plgpu.SMEM((*shape, DEPTH), dtype, transforms=tile_transforms(DEPTH, dtype.itemsize))

    def float32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def barrier(num_arrivals, num_barriers=1):
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers)

    found = mosaic_call(
        functools.partial(_kernel, p=p, scale=p.qk_scale, programs=programs, num_stages=num_stages, products=Products(interpret)),
        name="parallel_bw_dQKV",
        grid={"program": programs},
        warpgroups=_readers(p) or 3,
        outputs={
            "dq": sequence_shape(inputs["q"], p.DHQK, dtype),
            "q_inter": float32(p.BNH, p.S),
            "dk": sequence_shape(inputs["k"], p.DHQK, dtype),
            "k_inter": float32(p.BNH, p.S),
            "dv": sequence_shape(inputs["v"], p.DHHV, dtype),
            "states": float32(p.BNH, p.NC, CHUNK),
            "per_query": float32(p.BNH, n, p.S),
            "per_key": float32(p.BNH, n, p.S),
            "diagonal": float32(p.BNH, p.S),
        },
        scratch={
            "slots": tiles(num_stages, CHUNK),
            "k_tiles": tiles(k_stages, parts * CHUNK),
            "P_tile": tiles(3 * T),
            "dP_tile": tiles(3 * T),
            "staging": one_of(tiles(2, T), plgpu.SMEM((2, T * DEPTH * dtype.itemsize // 4), jnp.float32), interpret=interpret),
            "vectors": plgpu.SMEM((k_stages, len(_Vector), CHUNK), jnp.float32),
            "barriers": ring_barriers(num_stages, copies=1),
            "k_barriers": ring_barriers(k_stages, copies=parts + (3 if inputs["n"] is None else 4)),
            "tiles_full": barrier(2),
            "tiles_empty": barrier(2) if k_stages > 1 else None,
        },
        interpret=interpret,
    )(**inputs)
    of_tiles = (p.BNH, n, p.NC, n, T)
    pairs = TilePairs(
        found["per_query"].reshape(of_tiles), found["per_key"].reshape(of_tiles), found["diagonal"].reshape(p.BNH, p.NC, n, T)
    )
    return found["dq"], found["dk"], found["dv"], found["q_inter"], found["k_inter"], found["states"].sum(-1), pairs
