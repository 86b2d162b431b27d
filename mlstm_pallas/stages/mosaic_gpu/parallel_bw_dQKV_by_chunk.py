"""parallel_bw_dQKV on Mosaic GPU where a CTA makes all gradients of a chunk: L = 128, DHQK 64 or 128.

One CTA an SM; each takes every n-th chunk. Two warpgroups multiply, each for 64 rows of the chunk, and one copies. Their rows of dq and
dk, 64 x DHQK each, stay in registers while the columns of v and dh pass, 64 at a time: a step has tiles of dh, v, C and dC in shared
memory, adds to dq, dk and <C_c, dC_{c+1}>, and makes 64 columns of dv. k and P stay in shared memory for the whole chunk; q and dP
follow the last step. Each operand is read once, so memory is the limit of this stage, not the L2. The quarter of P and of dP in which
all keys are later than all queries is not read.
"""

import enum
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.launch_mosaic_gpu import (
    BY_COLUMNS,
    BY_ROWS,
    REGISTER_ROWS,
    Products,
    block,
    drain,
    head_of,
    load,
    mosaic_call,
    multiprocessors,
    plgpu,
    tile_transforms,
)
from mlstm_pallas.normaliser import query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering, StageCall, sequence_shape
from mlstm_pallas.stages.parallel_bw_dQKV import mosaic_gpu_kept_tiles
from mlstm_pallas.tiles import blocks, divide, loop, remainder

CHUNK = 128  # steps of a chunk
DEPTH = 64  # columns of v, dh, C and dC of a step


class _Vector(enum.IntEnum):
    """Rows of the vectors in shared memory; the last three with a normaliser."""

    DN = 0
    N = 1
    INV_DEN = 2
    DZ_DEN = 3


def _kernel(
    q,  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    k,
    v,  # (B * NH, S, DHHV) or (B, S, NH, DHHV)
    dh,
    C,  # (B * NH, NC, DHQK, DHHV)
    n,  # (B * NH, NC, DHQK), absent without a normaliser
    dC,
    dn,
    P,  # (B * NH, S, L)
    dP,
    w,  # (B * NH, S), as all that follow
    abar,
    inv_den,  # absent without a normaliser
    dz_den,  # likewise
    dq,  # out, like q
    q_inter,  # out (B * NH, S)
    dk,
    k_inter,
    dv,  # out, like v
    states,  # out (B * NH, NC, 128), parts of the sum
    slots,  # shared (num_stages, 128 + DHQK, 64): v above dC, dh above C, q, or dP
    kept,  # shared ((2 or 3) * (128 + DHQK), 64): k and P
    out_tiles,  # shared (2 warpgroups, 2, 64, 64)
    vectors,  # shared (4, 128), see ``_Vector``
    full,  # barriers, one a slot: of v and dC, or of dh and C
    empty,
    k_full,
    k_empty,
    P_full,
    P_empty,
    rest_full,  # of q, dP and the vectors
    *,
    p: Problem,
    scale: float,
    programs: int,
    num_stages: int,
    products: Products,
):
    wg, program = lax.axis_index("wg"), lax.axis_index("program")
    R, steps, parts = REGISTER_ROWS, 2 * blocks(p.DHHV, 2 * DEPTH), blocks(p.DHQK, DEPTH)
    tile_rows, slots_of_chunk = CHUNK + p.DHQK, 2 * steps + 2
    chunks = divide(p.BNH * p.NC - 1 - program, programs) + 1
    # In two tiles k and P take turns: each takes the place of the other of the chunk before. In three P stays in the last one.
    k_turns = kept.shape[0] // tile_rows - 1
    P_stays = k_turns == 2

    def place(index):
        """Head and chunk."""
        index = program + index * programs
        return divide(index, p.NC), remainder(index, p.NC)

    def kept_tiles(index):
        """The tiles of k and of P."""
        turn = remainder(index, 2)
        return kept.at[block(turn, tile_rows)], kept.at[block(2 if P_stays else 1 - turn, tile_rows)]

    def slot_of(index, x):
        return remainder(index * slots_of_chunk + x, num_stages)

    def copy(step, carry):
        index, j = divide(step, steps), remainder(step, steps)
        (head, chunk), (k_tile, P_tile), k_turn, columns = place(index), kept_tiles(index), remainder(index, k_turns), block(j, DEPTH)
        rows = block(chunk, CHUNK)

        def in_chunk(x):
            return head_of(x, head, p).at[rows]

        def free_slot(x):
            """Slot x of the chunk, when it has been released."""
            slot = slot_of(index, x)
            pl.when(index * slots_of_chunk + x >= num_stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
            return slot

        def copy_columns(x, X, at):
            """64 columns of v or dh, and of a state, into a slot of the chunk."""
            slot = free_slot(at)
            plgpu.copy_gmem_to_smem(in_chunk(x).at[:, columns], slots.at[slot, :CHUNK], full.at[slot])
            plgpu.copy_gmem_to_smem(X.at[head, chunk, :, columns], slots.at[slot, CHUNK:], full.at[slot])

        def copy_parts(x, tile, full):
            """q or k, 64 columns below the other 64."""
            for y in range(parts):
                plgpu.copy_gmem_to_smem(in_chunk(x).at[:, y * DEPTH : (y + 1) * DEPTH], tile.at[y * CHUNK : (y + 1) * CHUNK], full)

        def copy_triangle(x, tile, full):
            """P or dP: what blocks t of 64 queries and s of 64 keys have is block t + s of the tile. None is copied where s > t."""
            x = x.at[head, rows]
            plgpu.copy_gmem_to_smem(x.at[:, :R], tile.at[:CHUNK], full)
            plgpu.copy_gmem_to_smem(x.at[R:, R:], tile.at[CHUNK : CHUNK + R], full)

        before_k, before_P = (k_empty.at[k_turn], P_empty) if P_stays else (P_empty, k_empty.at[k_turn])
        copy_columns(v, dC, 2 * j)

        @pl.when(j == 0)
        def keep_k():
            pl.when(index >= k_turns)(lambda: plgpu.barrier_wait(before_k))
            copy_parts(k, k_tile, k_full.at[k_turn])

        copy_columns(dh, C, 2 * j + 1)

        @pl.when(j == 0)
        def keep_P():
            pl.when(index > 0)(lambda: plgpu.barrier_wait(before_P))
            copy_triangle(P, P_tile, P_full)

        @pl.when(j == steps - 1)
        def rest():
            copy_parts(q, slots.at[free_slot(2 * steps)], rest_full)
            copy_triangle(dP, slots.at[free_slot(2 * steps + 1)], rest_full)
            # A chunk uses at least num_stages slots, so those of the chunk before have been released, after its vectors were read.
            of_states, of_steps = {_Vector.DN: dn}, {}
            if n is not None:
                of_states, of_steps = of_states | {_Vector.N: n}, {_Vector.INV_DEN: inv_den, _Vector.DZ_DEN: dz_den}
            for y, x in of_states.items():
                plgpu.copy_gmem_to_smem(x.at[head, chunk], vectors.at[int(y), : p.DHQK], rest_full)
            for y, x in of_steps.items():
                plgpu.copy_gmem_to_smem(x.at[head, rows], vectors.at[int(y)], rest_full)

        return carry

    def multiply(index, carry):
        (head, chunk), (k_tile, P_tile), k_turn = place(index), kept_tiles(index), remainder(index, k_turns)
        own, rows = block(wg, R), block(chunk * 2 + wg, R)  # its rows: in a tile, in the sequence

        def part(y, x):
            """Block x of 64 rows of block y of 64 columns, in a tile of q or k."""
            return block(y * (CHUNK // R) + x, R)

        def across(x):
            return lax.broadcast_in_dim(x, (R, DEPTH), [0])

        def down(x, y):
            return lax.broadcast_in_dim(load(vectors.at[int(x), y * DEPTH : (y + 1) * DEPTH], BY_COLUMNS), (R, DEPTH), [1])

        def of_rows(x):
            return load(vectors.at[int(x), own], BY_ROWS)

        def add_earlier(accumulator, tile, x, y):
            """Adds the tile's product for the warpgroup's queries: with columns y of x, of the keys up to them."""

            def add(j, carry):
                products.add(accumulator, tile.at[block(wg + j, R)], x.at[part(y, j)])
                return carry

            products.loop(accumulator, wg + 1, add)

        def add_later(accumulator, tile, x, y):
            """Adds the transposed tile's product for the warpgroup's keys: with columns y of x, of the queries from them on."""

            def add(j, carry):
                products.add(accumulator, tile.at[block(2 * wg + j, R)].T, x.at[part(y, wg + j)])
                return carry

            products.loop(accumulator, 2 - wg, add)

        def store(x, turn, out, column):
            """Writes 64 x 64 elements of a gradient. Two tiles take turns: there is an even number of stores in a chunk."""
            tile = out_tiles.at[wg, turn]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            tile[...] = x.astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, head_of(out, head, p).at[rows, block(column, R)])

        weights, key_weights = (load(x.at[head, rows], BY_ROWS, optimized=False) for x in (w, abar))

        def step(j, carry):
            total, *sums = carry
            first, second = slot_of(index, 2 * j), slot_of(index, 2 * j + 1)

            def with_states(sum_q, sum_k, sum_v):
                plgpu.barrier_wait(full.at[first])
                products.add(sum_k, slots.at[first, own], slots.at[first, CHUNK:].T)
                pl.when(j == 0)(lambda: plgpu.barrier_wait(k_full.at[k_turn]))
                for y in range(parts):
                    products.add(sum_v, k_tile.at[part(y, wg)], slots.at[first, CHUNK + y * DEPTH : CHUNK + (y + 1) * DEPTH])
                plgpu.barrier_wait(full.at[second])
                products.add(sum_q, slots.at[second, own], slots.at[second, CHUNK:].T)

            *sums, new = products.onto(with_states, *sums, products.zeros(R, DEPTH))

            def inner(total):
                of_state = block(CHUNK // R + (wg if parts == 2 else 0), R)
                x, y = (load(slots.at[slot, of_state]).astype(jnp.float32) for slot in (first, second))
                return total + products.sum_over_columns(x * y)

            # Of the 128 rows of a state a warpgroup takes 64; 64 rows it takes in every other step.
            total = inner(total) if parts == 2 else lax.cond(remainder(j, 2) == wg, inner, lambda total: total, total)
            products.release(empty.at[first])
            new *= across(key_weights)
            pl.when(j == 0)(lambda: plgpu.barrier_wait(P_full))
            (new,) = products.onto(lambda sum_v: add_later(sum_v, P_tile, slots.at[second], 0), new)
            products.release(empty.at[second])
            store(new, remainder(j, 2), dv, j)
            return total, *sums

        zeros = products.zeros(R, p.DHQK)
        total, new_q, new_k = loop(steps, step, (plgpu.layout_cast(jnp.zeros((R,), jnp.float32), BY_ROWS), zeros, zeros))
        products.release(P_empty)
        states.at[head, chunk, own][...] = total

        at_q, at_dP = slot_of(index, 2 * steps), slot_of(index, 2 * steps + 1)
        q_tile, dP_tile = slots.at[at_q], slots.at[at_dP]
        plgpu.barrier_wait(rest_full)
        weights = query_scale(weights, scale, None if n is None else of_rows(_Vector.INV_DEN))
        inter, of_q, of_k = [], [], []
        for y in range(parts):
            x, z = (a[:, y * DEPTH : (y + 1) * DEPTH] for a in (new_q, new_k))
            x *= across(weights)
            if n is not None:
                x += across(weights * of_rows(_Vector.DZ_DEN)) * down(_Vector.N, y)
            z = (z + down(_Vector.DN, y)) * across(key_weights)
            of_q.append(products.sum_over_columns(x * load(q_tile.at[part(y, wg)]).astype(jnp.float32)))
            of_k.append(products.sum_over_columns(z * load(k_tile.at[part(y, wg)]).astype(jnp.float32)))
            inter += [x, z]
        q_inter.at[head, rows][...] = functools.reduce(jnp.add, of_q)
        k_inter.at[head, rows][...] = functools.reduce(jnp.add, of_k)

        def with_tiles(*sums):
            for y in range(parts):
                add_earlier(sums[2 * y], dP_tile, k_tile, y)
                add_later(sums[2 * y + 1], dP_tile, q_tile, y)

        gradients = products.onto(with_tiles, *inter)
        products.release(k_empty.at[k_turn], empty.at[at_q], empty.at[at_dP])
        for y in range(parts):
            store(gradients[2 * y], 0, dq, y)
            store(gradients[2 * y + 1], 1, dk, y)
        return carry

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        loop(chunks * steps, copy, ())
        drain(empty, chunks * slots_of_chunk, num_stages)
        drain(k_empty, chunks, k_turns)
        plgpu.barrier_wait(P_empty)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(240, action="increase")
        loop(chunks, multiply, ())
        plgpu.wait_smem_to_gmem(0)


def parallel_bw_dQKV_by_chunk(inputs: Mapping[str, Any], call: StageCall) -> tuple[jax.Array, ...]:
    """Runs the stage; inputs as the kernel's, outputs in the order of ``Gradients``."""
    p, num_stages, dtype = call.problem, call.tiles.num_stages, inputs["q"].dtype
    interpret = call.lowering is Lowering.MOSAIC_GPU_INTERPRET
    programs, kept_tiles = min(multiprocessors(interpret), p.BNH * p.NC), mosaic_gpu_kept_tiles(p)

    def tiles(*shape):
        return plgpu.SMEM((*shape, DEPTH), dtype, transforms=tile_transforms(DEPTH, dtype.itemsize))

    def float32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def barrier(num_arrivals, num_barriers=1):
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers)

    parts, vectors = p.DHQK // DEPTH, 1 if inputs["n"] is None else len(_Vector)
    found = mosaic_call(
        functools.partial(_kernel, p=p, scale=p.qk_scale, programs=programs, num_stages=num_stages, products=Products(interpret)),
        name="parallel_bw_dQKV",
        grid={"program": programs},
        warpgroups=3,
        outputs={
            "dq": sequence_shape(inputs["q"], p.DHQK, dtype),
            "q_inter": float32(p.BNH, p.S),
            "dk": sequence_shape(inputs["k"], p.DHQK, dtype),
            "k_inter": float32(p.BNH, p.S),
            "dv": sequence_shape(inputs["v"], p.DHHV, dtype),
            "states": float32(p.BNH, p.NC, 2 * REGISTER_ROWS),
        },
        scratch={
            "slots": tiles(num_stages, CHUNK + p.DHQK),
            "kept": tiles(kept_tiles * (CHUNK + p.DHQK)),
            "out_tiles": tiles(2, 2, REGISTER_ROWS),
            "vectors": plgpu.SMEM((len(_Vector), CHUNK), jnp.float32),
            "full": barrier(2, num_stages),
            "empty": barrier(2, num_stages),
            "k_full": barrier(parts, kept_tiles - 1),
            "k_empty": barrier(2, kept_tiles - 1),
            "P_full": barrier(2),
            "P_empty": barrier(2),
            "rest_full": barrier(parts + 2 + vectors),
        },
        interpret=interpret,
    )(**inputs)
    return found["dq"], found["dk"], found["dv"], found["q_inter"], found["k_inter"], found["states"].sum(-1)
