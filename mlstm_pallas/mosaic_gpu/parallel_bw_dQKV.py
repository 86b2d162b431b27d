"""parallel_bw_dQKV on Mosaic GPU: the products of ``stages/parallel_bw_dQKV.py``.

Where L is 128 and DHQK 64 or 128, a CTA makes all gradients of a chunk: ``parallel_bw_dQKV_by_chunk``. Here, DHQK and DHHV are
multiples of 256.

One CTA an SM. Each takes every n-th item; an item is 128 x 256 elements of dq, dk or dv, or 128 rows of the states for
<C_c, dC_{c+1}>. It is a sequence of steps, each with a tile of the left and a tile of the right operand. One warpgroup copies them
num_stages steps ahead, into the next item too. Two warpgroups multiply, each for 64 rows: the product with the state, which is then
weighted, and the one with the tiles, in the same accumulator. What is done to the accumulator between the two takes 64 columns at a
time, so that 168 registers a thread are enough.

128 x 256 is the largest item that two warpgroups have registers for. Its operands are three quarters of what two items of 128 x 128
read; the L2's rate is the limit of this stage.
"""
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

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
from mlstm_pallas.mosaic_gpu.limits import MOVES_REGISTERS, SHARED_BYTES, kernel
from mlstm_pallas.mosaic_gpu.parallel_bw_dQKV_by_chunk import parallel_bw_dQKV_by_chunk
from mlstm_pallas.mosaic_gpu.products import Products
from mlstm_pallas.normaliser import NormaliserGradients, query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering, StageCall, StageConfig, sequence_shape
from mlstm_pallas.stages.parallel_bw_dP import GradientTiles
from mlstm_pallas.stages.parallel_bw_dQKV import Gradients
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


def _by_role(role: jax.Array, values: Sequence[Any]) -> jax.Array:
    found: Any = np.int32(0)
    for kind, value in zip(_Role, values, strict=True):
        found = jnp.where(role == kind, value, found)
    return found


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
    barriers,  # of the ring of operands
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

    items = divide(p.BNH * p.NC * items_of_chunk - 1 - program, programs) + 1
    buffers = left, left_transposed, right, right_transposed, right_vector
    ring = CopyRing(barriers, num_stages, None, None, products, buffers, readers=0)

    def in_chunk(x, head, chunk):
        return head_of(x, head, p).at[block(chunk, p.L)]

    def item(index):
        """Head, chunk, role, row and column of an item of this CTA."""
        index = program + index * programs
        x, chunk = remainder(index, items_of_chunk), divide(index, items_of_chunk)
        role: Any = np.int32(0)
        start, row, column = 0, x, role
        for kind, of_kind in zip(_Role, roles, strict=True):
            here = x >= start
            role = jnp.where(here, np.int32(kind), role)
            row = jnp.where(here, divide(x - start, of_kind.columns), row)
            column = jnp.where(here, remainder(x - start, of_kind.columns), column)
            start += of_kind.rows * of_kind.columns
        return divide(chunk, p.NC), remainder(chunk, p.NC), role, row, column

    def tile_steps(role, row):
        """Steps with tiles, and the first of them: queries see the keys up to their own, keys the queries from their own on."""
        if role == _Role.STATES:
            return np.int32(0), np.int32(0)
        if role == _Role.DQ:
            return (row + 1) * steps_of_rows, np.int32(0)
        return p.L // DEPTH - row * steps_of_rows, row * steps_of_rows

    def for_each_item(run: Callable[..., None]) -> jax.Array:
        """run(step, *item) for each item of this CTA; returns the steps of all. step: of all, the item's first."""

        def one(index, step):
            head, chunk, role, row, column = item(index)
            run(step, head, chunk, role, row, column)
            counts = [x.with_state + x.weighted + x.norm + tile_steps(kind, row)[0] for kind, x in zip(_Role, roles, strict=True)]
            return step + _by_role(role, counts)

        steps: Any = np.int32(0)
        return loop(items, one, steps)

    def copy(kind, step, head, chunk, row, column):
        """Starts the copies of an item. A step is two copies."""
        of_kind, (tiles_count, first) = roles[kind], tile_steps(kind, row)
        rows, columns = block(row, ROWS), block(column, COLUMNS)

        def feed(start, count, copies):
            def one(j, carry):
                def start_copies(_, slot, barrier):
                    for source, tile in copies(j, slot):
                        plgpu.copy_gmem_to_smem(source, tile, barrier)

                ring.fetch(step + start + j, start_copies)
                return carry

            loop(count, one, None)

        def halves(x, start, size, tile):
            half = size // 2
            return [(x(pl.ds(start + y * half, half)), tile.at[y * half : (y + 1) * half]) for y in range(2)]

        def both_states(j, slot):
            columns = block(j, DEPTH)
            return [
                (C.at[head, chunk, rows, columns], left.at[slot]),
                (dC.at[head, chunk, rows, columns], right_transposed.at[slot, :ROWS]),
            ]

        if kind == _Role.STATES:
            feed(0, of_kind.with_state, both_states)
            return
        # dh C^T, v dC^T, k dC; then the tiles with k, q, dh.
        a, X, tiles, b = ((dh, C, dP, k), (v, dC, dP, q), (k, dC, P, dh))[kind]
        a, tiles, b = in_chunk(a, head, chunk), in_chunk(tiles, head, chunk), in_chunk(b, head, chunk)

        def with_state(j, slot):
            depth = block(j, DEPTH)
            if kind == _Role.DV:
                return [(a.at[rows, depth], left.at[slot]), (X.at[head, chunk, depth, columns], right.at[slot])]
            return [(a.at[rows, depth], left.at[slot]), (X.at[head, chunk, columns, depth], right_transposed.at[slot])]

        def weighted(j, slot):
            x = in_chunk((q, k)[kind], head, chunk)
            return halves(lambda steps: x.at[steps, columns], pl.multiple_of(row * ROWS, ROWS) + j * R, R, right.at[slot])

        def norm(j, slot):
            x = (n, dn)[kind].at[head, chunk]
            return halves(lambda rows: x.at[rows], pl.multiple_of(column * COLUMNS, COLUMNS), COLUMNS, right_vector.at[slot])

        def with_tiles(j, slot):
            others = block(first + j, DEPTH)
            if kind == _Role.DQ:
                return [(tiles.at[rows, others], left.at[slot]), (b.at[others, columns], right.at[slot])]
            return [(tiles.at[others, rows], left_transposed.at[slot]), (b.at[others, columns], right.at[slot])]

        feed(0, of_kind.with_state, with_state)
        if of_kind.weighted:
            feed(of_kind.with_state, of_kind.weighted, weighted)
        if of_kind.norm:
            feed(of_kind.with_state + of_kind.weighted, of_kind.norm, norm)
        feed(of_kind.with_state + of_kind.weighted + of_kind.norm, tiles_count, with_tiles)

    def copy_item(step, head, chunk, role, row, column):
        for kind in _Role:
            pl.when(role == kind)(functools.partial(copy, kind, step, head, chunk, row, column))

    own = block(wg, R)  # rows of this warpgroup in a tile

    def inner_states(step, head, chunk, row):
        def add(j, total):
            slot = ring.wait(step + j)
            x, y = (load(z.at[slot, own]).astype(jnp.float32) for z in (left, right_transposed))
            ring.release(step + j)
            return total + x * y

        found = loop(roles[_Role.STATES].with_state, add, products.zeros(R, DEPTH))
        states.at[head, chunk, pl.ds(pl.multiple_of(row * ROWS + wg * R, R), R)][...] = jnp.sum(found, axis=1)

    def gradient(step, head, chunk, role, row, column):
        """One item of dq, dk or dv. One body for all of them, as it takes the compiler seconds: roles differ in operands."""
        is_dq, is_dv = role == _Role.DQ, role == _Role.DV
        mine = pl.ds(pl.multiple_of(row * ROWS + wg * R, R), R)
        steps = pl.ds(pl.multiple_of(chunk * p.L + row * ROWS + wg * R, R), R)
        after_state = step + _by_role(role, [x.with_state for x in roles])
        before_tiles = after_state + _by_role(role, [x.weighted + x.norm for x in roles])
        tiles_count = _by_role(role, [tile_steps(kind, row)[0] for kind in _Role])

        def product(accumulator, start, count, operands_of):
            def one(j, carry):
                slot = ring.wait(start + j)
                products.add(accumulator, *operands_of(slot))
                products.wait(1)
                pl.when(j > 0)(lambda: ring.release(start + j - 1))
                return carry

            products.loop(accumulator, count, one)
            products.wait(0)
            ring.release(start + count - 1)

        def with_state(accumulator):
            def of_dv(accumulator):
                product(accumulator, step, roles[_Role.DV].with_state, lambda slot: (left.at[slot, own], right.at[slot]))

            def of_others(accumulator):
                product(accumulator, step, roles[_Role.DQ].with_state, lambda slot: (left.at[slot, own], right_transposed.at[slot].T))

            products.either(is_dv, of_dv, of_others, accumulator)

        def with_tiles(accumulator):
            def of_dq(accumulator):
                product(accumulator, before_tiles, tiles_count, lambda slot: (left.at[slot, own], right.at[slot]))

            def of_others(accumulator):
                product(accumulator, before_tiles, tiles_count, lambda slot: (left_transposed.at[slot, :, own].T, right.at[slot]))

            products.either(is_dq, of_dq, of_others, accumulator)

        def of_rows(x):
            return load(x.at[head, steps], BY_ROWS, optimized=False)

        def across(x):
            return lax.broadcast_in_dim(x, (R, R), [0])

        # Loaded before the product and used after it: their latency is hidden.
        query_weights, key_weights = of_rows(w), of_rows(abar)
        inv, bias = (None if x is None else of_rows(x) for x in (inv_den, dz_den))
        acc = products.from_zeros(with_state, R, COLUMNS)
        weights = lax.cond(is_dq, lambda: query_scale(query_weights, scale, inv), lambda: key_weights)
        # By 64 columns: what is read beside the accumulator takes few registers at a time.
        of_parts = [slice(j * R, (j + 1) * R) for j in range(COLUMNS // R)]

        def scaled(acc):
            return jnp.concatenate([acc[:, at] * across(weights) for at in of_parts], axis=1)

        def scaled_with_sums(acc):
            parts = [acc[:, at] * across(weights) for at in of_parts]
            count = roles[_Role.DK].weighted + roles[_Role.DK].norm
            for x in range(count - 1):
                ring.wait(after_state + x)
            of_norm = weights if bias is None else lax.cond(is_dq, lambda: weights * bias, lambda: weights)

            def add_norm(*parts):
                slot = ring.wait(after_state + count - 1)
                rows = [lax.broadcast_in_dim(load(right_vector.at[slot, at], BY_COLUMNS), (R, R), [1]) for at in of_parts]
                return [x + across(of_norm) * y for x, y in zip(parts, rows, strict=True)]

            parts = add_norm(*parts) if n is not None else lax.cond(is_dq, lambda *parts: list(parts), add_norm, *parts)
            slot = ring.slot(after_state + wg)
            tiles = (load(right.at[slot, :, at]).astype(jnp.float32) for at in of_parts)
            sums = functools.reduce(jnp.add, [products.sum_over_columns(x * y) for x, y in zip(parts, tiles, strict=True)])
            ring.release(*(after_state + x for x in range(count - 1)))
            release_norm = functools.partial(ring.release, after_state + count - 1)
            release_norm() if n is not None else pl.when(~is_dq)(release_norm)
            for kind, x in ((_Role.DQ, q_inter), (_Role.DK, k_inter)):

                @pl.when(role == kind)
                def store(x=x):
                    x.at[head, column, steps][...] = sums

            return jnp.concatenate(parts, axis=1)

        acc = lax.cond(is_dv, scaled, scaled_with_sums, acc)
        (acc,) = products.onto(with_tiles, acc)
        for j, at in enumerate(of_parts):
            tile = out_tiles.at[wg, j % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            products.store(tile, acc[:, at].astype(q.dtype))
            plgpu.commit_smem()
            columns = pl.ds(pl.multiple_of(column * COLUMNS + j * R, R), R)
            for kind, x in ((_Role.DQ, dq), (_Role.DK, dk), (_Role.DV, dv)):
                pl.when(role == kind)(functools.partial(plgpu.copy_smem_to_gmem, tile, in_chunk(x, head, chunk).at[mine, columns]))

    def multiply(step, head, chunk, role, row, column):
        is_states = role == _Role.STATES
        pl.when(is_states)(functools.partial(inner_states, step, head, chunk, row))
        pl.when(~is_states)(functools.partial(gradient, step, head, chunk, role, row, column))

    @pl.when(wg == 2)
    def copies():
        ring.drain(for_each_item(copy_item))

    @pl.when(wg < 2)
    def multiplications():
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
    *,
    call: StageCall,
) -> Gradients:
    """Runs the stage: ``stages/parallel_bw_dQKV.py``."""
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
    if by_chunk(p):
        (e_hi, e_lo), (u_hi, u_lo) = g.vecE, g.vecU
        return Gradients(*parallel_bw_dQKV_by_chunk(inputs | dict(e_hi=e_hi, e_lo=e_lo, u_hi=u_hi, u_lo=u_lo), call))
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
            "barriers": ring_barriers(num_stages, copies=2),
        },
        interpret=interpret,
    )(**inputs, P=tiles.matP, dP=tiles.matDeltaP)
    q_inter, k_inter = (found[name].sum(1) for name in ("q_inter", "k_inter"))
    return Gradients(found["dq"], found["dk"], found["dv"], q_inter, k_inter, found["states"].sum(-1))


def by_chunk(p: Problem) -> bool:
    """Whether a CTA makes P, dP and all gradients of a chunk.

    A warpgroup has registers for 64 x 128 of dq and of dk.
    """
    return p.L == 128 and p.DHQK in (64, 128)


def _heuristic(p: Problem) -> StageConfig:
    """By chunk six stages where registers spill: with more, shared memory leaves too little L1 for them."""
    if not by_chunk(p):
        return StageConfig(num_stages=4)
    return StageConfig(num_stages=7 if p.DHQK == 64 and MOVES_REGISTERS else 6)


def _takes(tiles: StageConfig, p: Problem) -> bool:
    """Whether there are enough stages, and shared memory for them. With fewer stages than a step holds at once it would wait for ever.

    A step holds two stages of 2 x 128 x 64 elements where a CTA makes a whole chunk. Beside the stages that kernel has 128 columns
    of k, of two chunks at DHQK 64, and for each of these chunks four vectors in float32; three blocks of 64 x 64 of P and of dP each, and
    two for outputs. In the other kernel a step holds three stages of (128 + 256) x 64; it has four blocks for outputs.
    """
    if by_chunk(p):
        shared = 2 * (128 * 64 * tiles.num_stages + 128 * 128 + (3 + 3 + 2) * 64 * 64) + 128 // p.DHQK * 2048 + 512
        return tiles.num_stages >= 4 and p.DHHV % 128 == 0 and shared <= SHARED_BYTES
    shared = 2 * (tiles.num_stages * 64 * (128 + 256) + 4 * 64 * 64) + 2048 + 1024
    return tiles.num_stages >= 3 and shared <= SHARED_BYTES and p.L % 128 == 0 and p.DHQK % 256 == 0 and p.DHHV % 256 == 0


KERNEL = kernel(
    search=dict(num_stages=(2, 3, 4, 5, 6, 7, 8)),
    heuristic=_heuristic,
    takes=_takes,
    makes_tiles=by_chunk,
)
