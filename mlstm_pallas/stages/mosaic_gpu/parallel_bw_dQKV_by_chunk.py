"""parallel_bw_dQKV on Mosaic GPU where a CTA makes all gradients of a chunk: L = DHQK = 128.

One CTA an SM; each takes every n-th chunk. Two warpgroups multiply, each for 64 rows of the chunk, and one copies. Their rows of dq and
dk, 64 x 128 each, stay in registers while the columns of v and dh pass, 64 at a time: a step has tiles of dh, v, C and dC in shared
memory, adds to dq, dk and <C_c, dC_{c+1}>, and makes 64 columns of dv. k and P stay in shared memory for the whole chunk; q and dP
follow the last step. Each operand is read once, so memory is the limit of this stage, not the L2.
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
    one_of,
    plgpu,
    tile_transforms,
)
from mlstm_pallas.normaliser import query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering, StageCall, sequence_shape
from mlstm_pallas.tiles import blocks, divide, loop, remainder

CHUNK = 128  # steps of a chunk, and DHQK
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
    states,  # out (B * NH, NC, DHQK), sums over the columns
    slots,  # shared: two tiles of 128 x 64 a slot, or one of 128 x 128
    kept,  # shared (2, 128, 128): k and P, which take turns
    vectors,  # shared (4, 128), see ``_Vector``
    out_tiles,  # shared (2 warpgroups, 2, 64, 64)
    full,  # barriers, one a slot
    empty,
    k_full,
    k_empty,
    P_full,  # of P and the vectors
    P_empty,
    *,
    p: Problem,
    scale: float,
    programs: int,
    num_stages: int,
    products: Products,
):
    wg, program = lax.axis_index("wg"), lax.axis_index("program")
    pairs, wholes = slots
    R, steps = REGISTER_ROWS, 2 * blocks(p.DHHV, 2 * DEPTH)
    slots_of_chunk = 2 * steps + 2
    chunks = divide(p.BNH * p.NC - 1 - program, programs) + 1

    def place(index):
        """Head and chunk."""
        index = program + index * programs
        return divide(index, p.NC), remainder(index, p.NC)

    def slot_of(index, x):
        return remainder(index * slots_of_chunk + x, num_stages)

    def copy(step, carry):
        index, j = divide(step, steps), remainder(step, steps)
        (head, chunk), turn, columns = place(index), remainder(index, 2), block(j, DEPTH)
        rows = block(chunk, CHUNK)

        def in_chunk(x):
            return head_of(x, head, p).at[rows]

        def feed(x, copies):
            """Two copies into slot x of the chunk."""
            slot = slot_of(index, x)
            pl.when(index * slots_of_chunk + x >= num_stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
            for source, tile in copies(slot):
                plgpu.copy_gmem_to_smem(source, tile, full.at[slot])

        def keep(copies, full, empty):
            pl.when(index > 0)(lambda: plgpu.barrier_wait(empty))
            for source, tile in copies:
                plgpu.copy_gmem_to_smem(source, tile, full)

        def tiles(x, X):
            return lambda slot: [(in_chunk(x).at[:, columns], pairs.at[slot, 0]), (X.at[head, chunk, :, columns], pairs.at[slot, 1])]

        def halves(x):
            """A slot's barrier counts two copies."""
            return lambda slot: [(x.at[y * R : (y + 1) * R], wholes.at[slot, y * R : (y + 1) * R]) for y in range(2)]

        feed(2 * j, tiles(v, dC))
        # P is free before k: the next chunk's k, needed first, takes its place.
        pl.when(j == 0)(lambda: keep([(in_chunk(k), kept.at[turn])], k_full, P_empty))
        feed(2 * j + 1, tiles(dh, C))
        of_chunk = {_Vector.DN: dn.at[head, chunk]}
        if n is not None:
            of_chunk |= {_Vector.N: n.at[head, chunk], _Vector.INV_DEN: inv_den.at[head, rows], _Vector.DZ_DEN: dz_den.at[head, rows]}
        with_P = [(P.at[head, rows], kept.at[1 - turn]), *((x, vectors.at[int(y)]) for y, x in of_chunk.items())]
        pl.when(j == 0)(lambda: keep(with_P, P_full, k_empty))

        @pl.when(j == steps - 1)
        def rest():
            feed(2 * steps, halves(in_chunk(q)))
            feed(2 * steps + 1, halves(dP.at[head, rows]))

        return carry

    def multiply(index, carry):
        (head, chunk), turn = place(index), remainder(index, 2)
        own, rows = block(wg, R), block(chunk * 2 + wg, R)  # its rows: in a tile, in the sequence

        def vector(x, layout):
            return load(vectors.at[int(x)] if layout is BY_COLUMNS else vectors.at[int(x), own], layout)

        def across(x, columns):
            return lax.broadcast_in_dim(x, (R, columns), [0])

        def down(x):
            return lax.broadcast_in_dim(x, (R, CHUNK), [1])

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
                products.add(sum_k, pairs.at[first, 0, own], pairs.at[first, 1].T)
                pl.when(j == 0)(lambda: plgpu.barrier_wait(k_full))
                products.add(sum_v, kept.at[turn, own], pairs.at[first, 1])
                plgpu.barrier_wait(full.at[second])
                products.add(sum_q, pairs.at[second, 0, own], pairs.at[second, 1].T)

            *sums, new = products.onto(with_states, *sums, products.zeros(R, DEPTH))
            x, y = (load(pairs.at[slot, 1, own]).astype(jnp.float32) for slot in (first, second))
            total += products.sum_over_columns(x * y)
            products.release(empty.at[first])
            new *= across(key_weights, DEPTH)
            pl.when(j == 0)(lambda: plgpu.barrier_wait(P_full))
            (new,) = products.onto(lambda sum_v: products.add(sum_v, kept.at[1 - turn, :, own].T, pairs.at[second, 0]), new)
            products.release(empty.at[second])
            store(new, remainder(j, 2), dv, j)
            return total, *sums

        zeros = products.zeros(R, CHUNK)
        total, new_q, new_k = loop(steps, step, (plgpu.layout_cast(jnp.zeros((R,), jnp.float32), BY_ROWS), zeros, zeros))
        products.release(P_empty)
        states.at[head, chunk, own][...] = total

        at_q, at_dP = slot_of(index, 2 * steps), slot_of(index, 2 * steps + 1)
        weights = query_scale(weights, scale, None if n is None else vector(_Vector.INV_DEN, BY_ROWS))
        new_q *= across(weights, CHUNK)
        if n is not None:
            new_q += across(weights * vector(_Vector.DZ_DEN, BY_ROWS), CHUNK) * down(vector(_Vector.N, BY_COLUMNS))
        new_k = (new_k + down(vector(_Vector.DN, BY_COLUMNS))) * across(key_weights, CHUNK)
        k_inter.at[head, rows][...] = products.sum_over_columns(new_k * load(kept.at[turn, own]).astype(jnp.float32))
        plgpu.barrier_wait(full.at[at_q])
        q_inter.at[head, rows][...] = products.sum_over_columns(new_q * load(wholes.at[at_q, own]).astype(jnp.float32))
        plgpu.barrier_wait(full.at[at_dP])

        def with_tiles(sum_q, sum_k):
            products.add(sum_q, wholes.at[at_dP, own], kept.at[turn])
            products.add(sum_k, wholes.at[at_dP, :, own].T, wholes.at[at_q])

        new_q, new_k = products.onto(with_tiles, new_q, new_k)
        products.release(k_empty, empty.at[at_q], empty.at[at_dP])
        for out, x in ((dq, new_q), (dk, new_k)):
            for column in range(CHUNK // R):
                store(x[:, column * R : (column + 1) * R], column, out, column)
        return carry

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        loop(chunks * steps, copy, ())
        drain(empty, chunks * slots_of_chunk, num_stages)
        plgpu.barrier_wait(k_empty)
        plgpu.barrier_wait(P_empty)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        loop(chunks, multiply, ())
        plgpu.wait_smem_to_gmem(0)


def parallel_bw_dQKV_by_chunk(inputs: Mapping[str, Any], call: StageCall) -> tuple[jax.Array, ...]:
    """Runs the stage; inputs as the kernel's, outputs in the order of ``Gradients``."""
    p, num_stages, dtype = call.problem, call.tiles.num_stages, inputs["q"].dtype
    interpret = call.lowering is Lowering.MOSAIC_GPU_INTERPRET
    programs = min(multiprocessors(interpret), p.BNH * p.NC)

    def tile(*shape):
        return plgpu.SMEM(shape, dtype, transforms=tile_transforms(shape[-1], dtype.itemsize))

    def float32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    of_slots = plgpu.Barrier(num_arrivals=2, num_barriers=num_stages)
    by_both = plgpu.Barrier(num_arrivals=2)
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
            "states": float32(p.BNH, p.NC, p.DHQK),
        },
        scratch={
            "slots": one_of(tile(num_stages, 2, CHUNK, DEPTH), tile(num_stages, CHUNK, CHUNK), interpret=interpret),
            "kept": tile(2, CHUNK, CHUNK),
            "vectors": plgpu.SMEM((len(_Vector), CHUNK), jnp.float32),
            "out_tiles": tile(2, 2, REGISTER_ROWS, REGISTER_ROWS),
            "full": of_slots,
            "empty": of_slots,
            "k_full": plgpu.Barrier(num_arrivals=1),
            "k_empty": by_both,
            "P_full": plgpu.Barrier(num_arrivals=2 if inputs["n"] is None else 1 + len(_Vector)),
            "P_empty": by_both,
        },
        interpret=interpret,
    )(**inputs)
    return found["dq"], found["dk"], found["dv"], found["q_inter"], found["k_inter"], found["states"].sum(-1)
