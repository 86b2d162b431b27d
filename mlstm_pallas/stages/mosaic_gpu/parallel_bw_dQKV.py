"""parallel_bw_dQKV on Mosaic GPU: the products of ``stages/parallel_bw_dQKV.py``.

Where L is 128 and DHQK 64 or 128, a CTA makes all gradients of a chunk: ``parallel_bw_dQKV_by_chunk``. Here, DHQK and DHHV are
multiples of 256.

One CTA an SM. Each takes every n-th item; an item is 128 x 256 elements of dq, dk or dv, or 128 rows of the states for
<C_c, dC_{c+1}>. It is a sequence of steps, each with a tile of the left and a tile of the right operand. One warpgroup copies them
num_stages steps ahead, into the next item too. Two warpgroups multiply, each for 64 rows: the product with the state, which is then
weighted, and the one with the tiles, in the same accumulator.

128 x 256 is the largest item that two warpgroups have registers for. Its operands are three quarters of what two items of 128 x 128
read; the L2's rate is the limit of this stage.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.launch_mosaic_gpu import (
    BY_COLUMNS,
    BY_ROWS,
    REGISTER_ROWS,
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
from mlstm_pallas.normaliser import NormaliserGradients, query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering, StageCall, sequence_shape
from mlstm_pallas.stages.mosaic_gpu.parallel_bw_dQKV_by_chunk import parallel_bw_dQKV_by_chunk
from mlstm_pallas.stages.mosaic_gpu.products import Products
from mlstm_pallas.stages.parallel_bw_dP import GradientTiles
from mlstm_pallas.stages.parallel_bw_dQKV import mosaic_gpu_by_chunk
from mlstm_pallas.tiles import blocks, divide, loop, remainder

ROWS, COLUMNS = 128, 256  # of an item
DEPTH = 64  # of the product of a step


class _Role(enum.IntEnum):
    """What an item is a part of."""

    DQ = 0
    DK = 1
    DV = 2
    STATES = 3


class _Items(NamedTuple):
    """Of one role: items of a chunk (rows x columns), and the steps of an item, in order. Those with tiles come last and differ by row."""

    rows: int
    columns: int
    with_state: int
    weighted: int  # the queries or keys of each warpgroup, for the gates' gradients
    norm: int  # n or dn


def _items(p: Problem, normalise: bool) -> list[_Items]:
    of_L, of_DHQK, of_DHHV = blocks(p.L, ROWS), blocks(p.DHQK, COLUMNS), blocks(p.DHHV, COLUMNS)
    return [
        _Items(of_L, of_DHQK, p.DHHV // DEPTH, 2, int(normalise)),
        _Items(of_L, of_DHQK, p.DHHV // DEPTH, 2, 1),
        _Items(of_L, of_DHHV, p.DHQK // DEPTH, 0, 0),
        _Items(p.DHQK // ROWS, 1, p.DHHV // DEPTH, 0, 0),
    ]


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
    q_inter,  # out (B * NH, column blocks, S)
    dk,
    k_inter,
    dv,  # out, like v
    states,  # out (B * NH, NC, DHQK), sums over the columns
    operands,  # shared: tiles of a step, each in the shapes that ``parallel_bw_dQKV`` lists
    out_tiles,  # shared (2 warpgroups, 2, 64, 64)
    full,  # barriers, one a stage
    empty,
    *,
    p: Problem,
    scale: float,
    programs: int,
    num_stages: int,
    products: Products,
):
    wg, program = lax.axis_index("wg"), lax.axis_index("program")
    (left, left_transposed), (right, right_transposed, right_vector) = operands
    R, roles = REGISTER_ROWS, _items(p, n is not None)
    items_of_chunk = sum(items.rows * items.columns for items in roles)
    steps_of_rows = ROWS // DEPTH
    products.guard(empty, left, left_transposed, right, right_transposed, right_vector)

    def tile_steps(role, row):
        """Steps with tiles, and the first of them: queries see the keys up to their own, keys the queries from their own on."""
        if role == _Role.STATES:
            return np.int32(0), np.int32(0)
        if role == _Role.DQ:
            return (row + 1) * steps_of_rows, np.int32(0)
        return p.L // DEPTH - row * steps_of_rows, row * steps_of_rows

    def for_each_item(run: Callable[..., None]) -> jax.Array:
        """run(role, items, step, head, chunk, row, column) for each item of this CTA; returns the steps of all, of which step is one."""

        def item(j, step):
            index = program + j * programs
            x, chunk = remainder(index, items_of_chunk), divide(index, items_of_chunk)
            head, chunk = divide(chunk, p.NC), remainder(chunk, p.NC)
            start, taken = 0, jnp.int32(0)
            for role, items in zip(_Role, roles, strict=True):
                end = start + items.rows * items.columns
                row, column = divide(x - start, items.columns), remainder(x - start, items.columns)
                here = (x >= start) & (x < end)
                pl.when(here)(functools.partial(run, role, items, step, head, chunk, row, column))
                taken += jnp.where(here, items.with_state + items.weighted + items.norm + tile_steps(role, row)[0], 0)
                start = end
            return step + taken

        count = divide(p.BNH * p.NC * items_of_chunk - 1 - program, programs) + 1
        return lax.fori_loop(np.int32(0), count, item, np.int32(0))

    def in_chunk(x, head, chunk):
        return head_of(x, head, p).at[block(chunk, p.L)]

    def copy(role, items, step, head, chunk, row, column):
        """The copying warpgroup's part of an item. A step is two copies."""
        rows, columns, (tiles_count, first) = block(row, ROWS), block(column, COLUMNS), tile_steps(role, row)

        def feed(start, count, copies):
            def one(j, _):
                at = step + start + j
                slot = remainder(at, num_stages)
                pl.when(at >= num_stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                for source, tile in copies(j, slot):
                    plgpu.copy_gmem_to_smem(source, tile, full.at[slot])
                return _

            loop(count, one, ())

        def halves(x, start, size, tile):
            half = size // 2
            return [(x(pl.ds(start + y * half, half)), tile.at[y * half : (y + 1) * half]) for y in range(2)]

        def both_states(j, slot):
            columns = block(j, DEPTH)
            return [
                (C.at[head, chunk, rows, columns], left.at[slot]),
                (dC.at[head, chunk, rows, columns], right_transposed.at[slot, :ROWS]),
            ]

        if role == _Role.STATES:
            feed(0, items.with_state, both_states)
            return
        # dh C^T, v dC^T, k dC; then the tiles with k, q, dh.
        a, X, tiles, b = ((dh, C, dP, k), (v, dC, dP, q), (k, dC, P, dh))[role]
        a, tiles, b = in_chunk(a, head, chunk), in_chunk(tiles, head, chunk), in_chunk(b, head, chunk)

        def with_state(j, slot):
            depth = block(j, DEPTH)
            if role == _Role.DV:
                return [(a.at[rows, depth], left.at[slot]), (X.at[head, chunk, depth, columns], right.at[slot])]
            return [(a.at[rows, depth], left.at[slot]), (X.at[head, chunk, columns, depth], right_transposed.at[slot])]

        def weighted(j, slot):
            x = in_chunk((q, k)[role], head, chunk)
            return halves(lambda steps: x.at[steps, columns], pl.multiple_of(row * ROWS, ROWS) + j * R, R, right.at[slot])

        def norm(j, slot):
            x = (n, dn)[role].at[head, chunk]
            return halves(lambda rows: x.at[rows], pl.multiple_of(column * COLUMNS, COLUMNS), COLUMNS, right_vector.at[slot])

        def with_tiles(j, slot):
            others = block(first + j, DEPTH)
            if role == _Role.DQ:
                return [(tiles.at[rows, others], left.at[slot]), (b.at[others, columns], right.at[slot])]
            return [(tiles.at[others, rows], left_transposed.at[slot]), (b.at[others, columns], right.at[slot])]

        feed(0, items.with_state, with_state)
        if items.weighted:
            feed(items.with_state, items.weighted, weighted)
        if items.norm:
            feed(items.with_state + items.weighted, items.norm, norm)
        feed(items.with_state + items.weighted + items.norm, tiles_count, with_tiles)

    def multiply(role, items, step, head, chunk, row, column):
        """A multiplying warpgroup's part of an item."""
        own, mine = block(wg, R), pl.ds(pl.multiple_of(row * ROWS + wg * R, R), R)  # its rows: in the left tile, in the chunk
        steps = pl.ds(pl.multiple_of(chunk * p.L + row * ROWS + wg * R, R), R)
        tiles_count, _ = tile_steps(role, row)

        def slot_of(x):
            return remainder(step + x, num_stages)

        def product(accumulator, start, count, operands_of):
            def one(j, _):
                slot = slot_of(start + j)
                plgpu.barrier_wait(full.at[slot])
                products.add(accumulator, *operands_of(slot))
                products.wait(1)
                pl.when(j > 0)(lambda: products.release(empty.at[slot_of(start + j - 1)]))
                return _

            products.loop(accumulator, count, one)
            products.wait(0)
            products.release(empty.at[slot_of(start + count - 1)])

        def with_state(accumulator):
            def operands_of(slot):
                return left.at[slot, own], right.at[slot] if role == _Role.DV else right_transposed.at[slot].T

            product(accumulator, 0, items.with_state, operands_of)

        def with_tiles(accumulator):
            def operands_of(slot):
                return left.at[slot, own] if role == _Role.DQ else left_transposed.at[slot, :, own].T, right.at[slot]

            product(accumulator, items.with_state + items.weighted + items.norm, tiles_count, operands_of)

        def of_rows(x):
            return load(x.at[head, steps], BY_ROWS, optimized=False)

        def across(x):
            return lax.broadcast_in_dim(x, (R, COLUMNS), [0])

        def inner(j, total):
            slot = slot_of(j)
            plgpu.barrier_wait(full.at[slot])
            x, y = (load(z.at[slot, own]).astype(jnp.float32) for z in (left, right_transposed))
            products.release(empty.at[slot])
            return total + x * y

        if role == _Role.STATES:
            found = lax.fori_loop(np.int32(0), np.int32(items.with_state), inner, products.zeros(R, DEPTH))
            states.at[head, chunk, mine][...] = jnp.sum(found, axis=1)
            return
        # Loaded before the product and used after it: their latency is hidden.
        weights = of_rows(w if role == _Role.DQ else abar)
        inv, bias = (None if role != _Role.DQ or x is None else of_rows(x) for x in (inv_den, dz_den))
        acc = products.from_zeros(with_state, R, COLUMNS)
        slots = [slot_of(items.with_state + x) for x in range(items.weighted + items.norm)]
        for slot in slots:
            plgpu.barrier_wait(full.at[slot])
        if role == _Role.DQ:
            weights = query_scale(weights, scale, inv)
        acc *= across(weights)
        if items.norm:
            norm = load(right_vector.at[slots[-1], :COLUMNS], BY_COLUMNS)
            acc += across(weights if bias is None else weights * bias) * lax.broadcast_in_dim(norm, (R, COLUMNS), [1])
        if items.weighted:
            x = load(right.at[slot_of(items.with_state + wg)])
            products.release(*(empty.at[slot] for slot in slots))
            (q_inter, k_inter)[role].at[head, column, steps][...] = jnp.sum(acc * x.astype(jnp.float32), axis=1)
        (acc,) = products.onto(with_tiles, acc)
        out = in_chunk((dq, dk, dv)[role], head, chunk)
        for j in range(COLUMNS // R):
            tile = out_tiles.at[wg, j % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            products.store(tile, acc[:, j * R : (j + 1) * R].astype(q.dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, out.at[mine, pl.ds(pl.multiple_of(column * COLUMNS + j * R, R), R)])

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        drain(empty, for_each_item(copy), num_stages)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        for_each_item(multiply)
        plgpu.wait_smem_to_gmem(0)


def parallel_bw_dQKV(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    gradients: NormaliserGradients,
    tiles: GradientTiles,
    matC_states: jax.Array,
    vecN_states: jax.Array,
    matDeltaC_states: jax.Array,
    vecDeltaN_states: jax.Array,
    call: StageCall,
) -> tuple[Any, ...]:
    """Runs the stage; the outputs in the order of ``Gradients``."""
    p, dtype, num_stages = call.problem, matQ.dtype, call.tiles.num_stages
    interpret = call.lowering is Lowering.MOSAIC_GPU_INTERPRET
    normalise, g = gradients.vecInvDen is not None, gates.per_step()
    inputs = dict(
        q=matQ,
        k=matK,
        v=matV,
        dh=matDeltaH,
        C=matC_states,
        n=vecN_states if normalise else None,
        dC=matDeltaC_states,
        dn=vecDeltaN_states,
        w=g.vecW,
        abar=g.vecAbar,
        inv_den=gradients.vecInvDen,
        dz_den=gradients.vecDzDen,
    )
    if mosaic_gpu_by_chunk(p):
        (e_hi, e_lo), (u_hi, u_lo) = g.vecE, g.vecU
        return parallel_bw_dQKV_by_chunk(inputs | dict(e_hi=e_hi, e_lo=e_lo, u_hi=u_hi, u_lo=u_lo), call)
    items = p.BNH * p.NC * sum(x.rows * x.columns for x in _items(p, normalise))
    programs = min(multiprocessors(interpret), items)

    def tile(rows, columns):
        return plgpu.SMEM((num_stages, rows, columns), dtype, transforms=tile_transforms(columns, dtype.itemsize))

    def float32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    # All shapes of a tile have the same bytes, so that a slot has the same place in all of them.
    left = tile(ROWS, DEPTH), tile(DEPTH, ROWS)
    vector = plgpu.SMEM((num_stages, DEPTH * COLUMNS * dtype.itemsize // 4), jnp.float32)
    right = tile(DEPTH, COLUMNS), tile(COLUMNS, DEPTH), vector
    sums = float32(p.BNH, p.DHQK // COLUMNS, p.S)
    found = mosaic_call(
        functools.partial(_kernel, p=p, scale=p.qk_scale, programs=programs, num_stages=num_stages, products=Products(interpret)),
        name="parallel_bw_dQKV",
        grid={"program": programs},
        warpgroups=3,
        outputs={
            "dq": sequence_shape(matQ, p.DHQK, dtype),
            "q_inter": sums,
            "dk": sequence_shape(matK, p.DHQK, dtype),
            "k_inter": sums,
            "dv": sequence_shape(matV, p.DHHV, dtype),
            "states": float32(p.BNH, p.NC, p.DHQK),
        },
        scratch={
            "operands": [one_of(*left, interpret=interpret), one_of(*right, interpret=interpret)],
            "out_tiles": plgpu.SMEM((2, 2, REGISTER_ROWS, REGISTER_ROWS), dtype, transforms=tile_transforms(REGISTER_ROWS, dtype.itemsize)),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
            "empty": plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
        },
        interpret=interpret,
    )(**inputs, P=tiles.matP, dP=tiles.matDeltaP)
    q_inter, k_inter = (found[name].sum(1) for name in ("q_inter", "k_inter"))
    return found["dq"], found["dk"], found["dv"], q_inter, k_inter, found["states"].sum(-1)
