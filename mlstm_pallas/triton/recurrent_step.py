"""recurrent_step in Triton.

Grid (ceil(DHV / siz_b_DHHV), B * NH), with slots (ceil(DHV / siz_b_DHHV), NH, B). A CTA owns
siz_b_DHHV columns of one head's C and loops over them in blocks of siz_b_DHQK rows, each loaded
while the preceding block is processed. Every CTA computes n' and z; the CTAs of the first columns
store n' and m'. All states are updated in place, so the CTAs of a head that has several read n and
m from a copy. With slots the copy has the rows of the entries, while C stays in the pool. Sizes
that the tiles do not divide are masked, because padding would copy the states.

FLOPs: 4 B NH K V. Bytes: C twice, 2 B NH K V itemsize; the rest is smaller by a factor of V or K.
"""

import dataclasses
import functools
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser
from mlstm_pallas.formulas.tiles import block_at, blocks_over, loop, weighted
from mlstm_pallas.launches.kernel_tiles import KernelSpec, Tiles
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.problem.dimensions import MIN_TILE, Problem, next_power_of_two
from mlstm_pallas.stages.recurrent_step import Operands, rounded, split_token, step_gates
from mlstm_pallas.triton.launch import Columns, kernel_call, masked_load, masked_store


def _recurrent_step_kernel(*, slots, **head):
    """slots: (), the entry's row of the pools, or absent."""
    run = functools.partial(_advance, **head)
    for_columns(slots, head["states"].c, head["vecH"], head["call"], run)


def for_columns(slots, pool, h, call, run):
    """run(row, part, columns, which of them exist) of a CTA; h without a row is 0."""
    part = pl.program_id(0)
    columns, inside = masked_block(part, call.tiles.siz_b_DHHV, h.shape[-1])

    def without_row():
        for at in np.ndindex(h.shape[:-1]):
            token = h.at[(*map(np.int32, at), columns)]
            masked_store(token, jnp.zeros(columns.size, h.dtype), inside)

    for_row(slots, pool, lambda row: run(row, part, columns, inside), without_row)


def for_row(slots, pool, run, without_row):
    """run((the row of the states,)), run(()) without slots; a slot beyond the pool has no row."""
    if slots is None:
        return run(())
    slot = slots[...].astype(jnp.int32)
    has_row = (slot >= 0) & (slot < pool.shape[0])
    return lax.cond(has_row, lambda: run((slot,)), without_row)


def _advance(
    row,  # (the row of the states,) in pools, otherwise ()
    part,  # the index of the CTA's columns
    columns,
    in_columns,  # a mask, or None
    token,  # q (DHQK,), k (DHQK,), v (DHV,), i (), f ()
    states,  # c (DHQK, DHV), the whole head's; n (DHQK,), m (); in pools with an axis P in front
    before,  # (DHQK + 1,), a copy of n and m; absent: the head has one CTA, and no slots
    states_new,  # out, in place
    vecH,  # out (DHV,)
    *,
    call,
    normaliser,
):
    DHQK, scale, compiled = states.c.shape[-2], call.problem.qk_scale, not call.interpret
    siz_b_DHQK = call.tiles.siz_b_DHQK
    num_blocks = blocks_over(DHQK, siz_b_DHQK)

    def load_vector(ref, block, inside):
        return masked_load(ref.at[block], inside).astype(jnp.float32)

    def load(ik):
        rows, in_rows = masked_block(ik, siz_b_DHQK, DHQK)
        C = masked_load(states.c.at[(*row, rows, columns)], outer_mask(in_rows, in_columns))
        q, k = (load_vector(ref, rows, in_rows)[:, None] for ref in (token.q, token.k))
        return C, q, k

    def update(ik, loaded, num):
        rows, in_rows = masked_block(ik, siz_b_DHQK, DHQK)
        C, q, k = loaded
        C = weighted(decay, C.astype(jnp.float32)) + (gain * k) * v[None, :]
        block = states_new.c.at[(*row, rows, columns)]
        masked_store(block, C.astype(states.c.dtype), outer_mask(in_rows, in_columns))
        return num + jnp.sum(q * C, axis=0)

    # The first block is loaded before anything waits.
    loaded = load(jnp.zeros((), jnp.int32))
    i, f = (gate[...].astype(jnp.float32) for gate in (token.i, token.f))
    v = load_vector(token.v, columns, in_columns)
    all_rows, in_all = covering(DHQK)
    ns = states.n if before is None else before
    q, k, n = (load_vector(ref, all_rows, in_all) for ref in (token.q, token.k, ns))
    m = None
    if states.m is not None:
        m = (states.m[...] if before is None else before[DHQK]).astype(jnp.float32)
    decay, gain, m_new = step_gates(i, f, m, lambda x: rounded(x, states.m.dtype, compiled))
    n = weighted(decay, n) + gain * k

    @pl.when(part == 0)
    def _():
        masked_store(states_new.n.at[(*row, all_rows)], n.astype(states.n.dtype), in_all)
        if states.m is not None:
            states_new.m[row or ...] = m_new.astype(states.m.dtype)

    carry = loaded, jnp.zeros((columns.size,), jnp.float32)
    if num_blocks > 1:
        carry = loop(num_blocks - 1, lambda ik, x: (load(ik + 1), update(ik, *x)), carry)
    h = scale * update(jnp.full((), num_blocks - 1, jnp.int32), *carry)
    if normaliser is not None:
        h = normaliser.normalise(h, scale * jnp.sum(q * n), m_new)
    masked_store(vecH.at[columns], h.astype(vecH.dtype), in_columns)


def masked_block(index, size: int, total: int):
    """The slice of a block, and a mask of its elements inside the axis; None: all are."""
    inside = None if total % size == 0 else index * size + lax.iota(jnp.int32, size) < total
    return block_at(index, size), inside


def covering(size: int):
    """``masked_block`` of a block that covers an axis."""
    return masked_block(jnp.zeros((), jnp.int32), at_least_a_tile(size), size)


def at_least_a_tile(size: int) -> int:
    return max(next_power_of_two(size), MIN_TILE)


def outer_mask(rows, columns):
    if rows is None:
        return None if columns is None else columns[None, :]
    return rows[:, None] if columns is None else rows[:, None] & columns[None, :]


def entries(call, slots):
    """The letters of tokens and of states, and the grid."""
    grid, p = call.tiles.grid(call.problem), call.problem
    if slots is None:
        return "b", "b", grid
    return "bc", "0c", (grid[0], p.NH, p.B)  # b is an entry, c a head


def recurrent_step(
    x: Operands, *, normaliser: Normaliser | None = DEFAULT_NORMALISER, call: Launch
) -> tuple[Any, Any]:
    """Runs the stage: ``stages/recurrent_step.py``."""
    (C, n, m), q, before = x.states, x.token.q, None
    DHQK, DHV = C.shape[-2:]
    token, states, grid = entries(call, x.slots)
    # Every CTA of a head reads n and m, and one updates them.
    if x.slots is not None or call.tiles.siz_b_DHHV < DHV:
        if x.slots is not None:
            rows = x.slots.astype("uint32")  # any row for an entry without one
            n, m = jax.tree.map(lambda y: y[rows], (n, m))
        m = jnp.zeros(n.shape[:-1], jnp.float32) if m is None else m
        pair = n.astype(jnp.float32), m[..., None].astype(jnp.float32)
        before = jnp.concatenate(pair, axis=-1)
    y = kernel_call(
        _recurrent_step_kernel,
        dict(
            token=(split_token(x.token, DHQK, DHV, Columns), token),
            before=(before, token),
            slots=(x.slots, token),
        ),
        dict(vecH=(jax.ShapeDtypeStruct((*q.shape[:-1], DHV), q.dtype), token)),
        updates=dict(states=(x.states, states)),
        grid=grid,
        call=call,
        normaliser=normaliser,
    )
    return y["vecH"], y["states_new"]


@dataclasses.dataclass(frozen=True)
class RecurrentStepTiles(Tiles):
    """A CTA has one block of C in use and the next in flight."""

    siz_b_DHQK: int = 64
    siz_b_DHHV: int = 64
    num_warps: int = 4

    @classmethod
    def plan(cls, p: Problem, dtype: Any, kernel: KernelSpec) -> Self:
        """The widest columns with which the CTAs fill the GPU; with few CTAs, many rows in flight.

        A head with one CTA needs no copy of n and m. With 16-bit states a CTA of 256 columns has
        one warp, which waits for no other, but spills registers with longer vectors or with masks.
        """

        def fills(tiles, per_sm):
            return kernel.gpu.filled_by(math.prod(tiles.grid(p)), per_sm)

        if dtype.itemsize > 2:
            return cls() if p.DHV <= 64 or fills(cls(), 8) else cls(128, 32)
        candidates = [cls(32, 128), cls(64, 64)]
        if p.DHV <= 128:
            return candidates[0]
        if p.DHQK <= 512 and p.DHV % 256 == 0:
            candidates.insert(0, cls(16, 256, 1))
        return next((x for x in candidates if fills(x, 4)), cls(256, 32))

    def grid(self, p: Problem) -> tuple[int, ...]:
        return blocks_over(p.DHV, self.siz_b_DHHV), p.BNH

    def clamped(self, p: Problem) -> Self:
        """Tiles no larger than a head; they need not divide it, because heads are not padded."""
        rows = min(self.siz_b_DHQK, at_least_a_tile(p.DHQK))
        columns = min(self.siz_b_DHHV, at_least_a_tile(p.DHV))
        return dataclasses.replace(self, siz_b_DHQK=rows, siz_b_DHHV=columns)
