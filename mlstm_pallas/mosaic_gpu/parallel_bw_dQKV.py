"""parallel_bw_dQKV on Mosaic GPU: the products of ``stages/parallel_bw_dQKV.py``.

Where it gets no P and dP, a CTA computes these and all gradients of a chunk:
``parallel_bw_dQKV_by_chunk``. Here, DHQK and DHHV are multiples of 256.

One CTA an SM. Each takes every n-th item: 128 x 256 elements of dq, dk or dv, or 128 rows of the
states for <C_c, dC_{c+1}>. An item is a sequence of steps, each with a tile of the left and a tile
of the right operand. One warpgroup copies them num_stages steps ahead, into the next item too. Two
warpgroups multiply, each for 64 rows: the product with the state, which is then weighted, and the
one with the tiles of P or dP, in the same accumulator. Between the two the accumulator is read 64
columns at a time, so that 168 registers a thread are enough.

128 x 256 is the largest item that two warpgroups have registers for. It reads three quarters of the
operands of two items of 128 x 128; the L2's rate is the limit of this stage.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from mlstm_pallas.gpu import Gpu
from mlstm_pallas.mosaic_gpu import products
from mlstm_pallas.mosaic_gpu.copy_ring import CopyRing, ring_barriers
from mlstm_pallas.mosaic_gpu.fragments import across_columns, across_rows, load_by_rows
from mlstm_pallas.mosaic_gpu.launch import (
    BY_COLUMNS,
    REGISTER_ROWS,
    PersistentScheduler,
    block,
    float32,
    load,
    mosaic_call,
    one_of,
    plgpu,
    shared_bytes,
    shared_tiles,
)
from mlstm_pallas.mosaic_gpu.limits import (
    MOVES_REGISTERS,
    RingTiles,
)
from mlstm_pallas.mosaic_gpu.parallel_bw_dQKV_by_chunk import parallel_bw_dQKV_by_chunk
from mlstm_pallas.mosaic_gpu.parallel_bw_dQKV_by_chunk import scratch as by_chunk_scratch
from mlstm_pallas.mosaic_gpu.tile_copies import copy_out, head_of
from mlstm_pallas.normaliser import query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Launch, sequence_shape
from mlstm_pallas.stages.parallel_bw_dQKV import Gradients, Operands
from mlstm_pallas.tiles import blocks, divide, loop, remainder

R = REGISTER_ROWS
ROWS, COLUMNS = 128, 256  # of an item
DEPTH = 64  # of the product of a step
FEW_ITEMS = 3  # of a CTA
_PARTS = [slice(j, j + R) for j in range(0, COLUMNS, R)]


class _Refs(NamedTuple):
    q: Any  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    k: Any
    v: Any  # (B * NH, S, DHHV) or (B, S, NH, DHHV)
    dh: Any
    C: Any  # (B * NH, NC, DHQK, DHHV)
    n: Any  # (B * NH, NC, DHQK), absent without a normaliser
    dC: Any
    dn: Any
    P: Any  # (B * NH, S, L)
    dP: Any
    w: Any  # (B * NH, S), as all that follow
    abar: Any
    inv_den: Any  # absent without a normaliser
    dz_den: Any  # likewise
    dq: Any  # out, like q
    q_inter: Any  # out (B * NH, column blocks, S)
    dk: Any
    k_inter: Any
    dv: Any  # out, like v
    states: Any  # out (B * NH, NC, DHQK), sums over the columns
    operands: Any  # shared, see scratch
    out_tiles: Any  # shared (2 warpgroups, 2, 64, 64)
    barriers: Any  # of the ring of operands


class _Role(enum.IntEnum):
    """What an item is a part of."""

    DQ = 0
    DK = 1
    DV = 2
    STATES = 3


class _Items(NamedTuple):
    """Items of a role in a chunk (rows x columns), and the steps of an item, in order.

    Steps with tiles of P and dP come last; see ``_tile_steps``.
    """

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


def _items_of_chunk(roles: Sequence[_Items]) -> int:
    return sum(x.rows * x.columns for x in roles)


def _by_role(role: Array, values: Sequence[Any]):
    x: Any = np.int32(0)
    for kind, value in enumerate(values):
        x = jnp.where(role == kind, value, x)
    return x


def _tile_steps(role: _Role, row, p: Problem) -> tuple[Any, Any]:
    """Steps with tiles of P and dP, and the first of them: queries see the keys up to their own,
    keys the queries from their own on."""
    steps_of_rows = ROWS // DEPTH
    if role == _Role.STATES:
        return np.int32(0), np.int32(0)
    if role == _Role.DQ:
        return (row + 1) * steps_of_rows, np.int32(0)
    return p.L // DEPTH - row * steps_of_rows, row * steps_of_rows


class _Item(NamedTuple):
    step: Array  # the item's first, of all steps of the CTA
    head: Array
    chunk: Array
    role: Array
    row: Array
    column: Array


@dataclasses.dataclass(frozen=True)
class _CTA:
    refs: _Refs
    p: Problem
    roles: Sequence[_Items]
    scheduler: PersistentScheduler
    items: Array
    ring: CopyRing
    tile_rows: Any  # of the warpgroup
    wg: Array

    def in_chunk(self, x, item: _Item):
        return head_of(x, item.head, self.p).at[block(item.chunk, self.p.L)]

    def item(self, index: Array, step: Array) -> _Item:
        index, items_of_chunk = self.scheduler.item(index), _items_of_chunk(self.roles)
        chunks = self.p.BNH * self.p.NC
        few = items_of_chunk * chunks <= FEW_ITEMS * self.scheduler.num_ctas
        if few:
            # Of all chunks those of a role and row: no CTA has several of those with many steps.
            x, chunk = divide(index, chunks), remainder(index, chunks)
        else:  # those of a chunk together, for the L2
            x, chunk = remainder(index, items_of_chunk), divide(index, items_of_chunk)
        role: Any = np.int32(0)
        start, row, column = 0, x, role
        for kind, items in enumerate(self.roles):
            here, row_here = x >= start, divide(x - start, items.columns)
            if few and kind in (_Role.DK, _Role.DV):  # a CTA's third item follows short ones
                row_here = items.rows - 1 - row_here
            role = jnp.where(here, np.int32(kind), role)
            row = jnp.where(here, row_here, row)
            column = jnp.where(here, remainder(x - start, items.columns), column)
            start += items.rows * items.columns
        head = divide(chunk, self.p.NC)
        return _Item(step, head, remainder(chunk, self.p.NC), role, row, column)

    def for_each_item(self, run: Callable[[_Item], None]):
        """Returns the steps of all items."""

        def one(index, step):
            item = self.item(index, step)
            run(item)
            counts = [
                x.with_state + x.weighted + x.norm + _tile_steps(role, item.row, self.p)[0]
                for role, x in zip(_Role, self.roles, strict=True)
            ]
            return step + _by_role(item.role, counts)

        return loop(self.items, one, np.int32(0))


def _feed(
    cta: _CTA, item: _Item, start: int, count, copies: Callable[[Any], Sequence[Any]]
) -> None:
    """Copies some steps of an item; copies(j): two, each the arguments of a ring's copy."""

    def one(j, carry):
        def start_copies(_, copy):
            for x in copies(j):
                copy(*x)

        cta.ring.fetch(item.step + start + j, start_copies)

    loop(count, one, None)


def _halves(x, start, size: int, tile, *index) -> list[Any]:
    half = size // 2
    return [(x.at[(pl.ds(start + y, half), *index)], tile, slice(y, y + half)) for y in (0, half)]


def _copy_item(cta: _CTA, role: _Role, item: _Item) -> None:
    refs, steps = cta.refs, cta.roles[role]
    (left, left_transposed), (right, right_transposed, right_vector) = refs.operands
    tile_count, first = _tile_steps(role, item.row, cta.p)
    rows, columns = block(item.row, ROWS), block(item.column, COLUMNS)
    state, feed = (item.head, item.chunk), functools.partial(_feed, cta, item)

    def both_states(j):
        columns = block(j, DEPTH)
        C, dC = (x.at[(*state, rows, columns)] for x in (refs.C, refs.dC))
        return (C, left), (dC, right_transposed, slice(ROWS))

    if role == _Role.STATES:
        feed(0, steps.with_state, both_states)
        return
    # a X, weighted by rows, plus weighted norms; x . of this; plus tiles b.
    operands: Any = (
        (refs.dh, refs.C, refs.dP, refs.k, refs.q, refs.n),
        (refs.v, refs.dC, refs.dP, refs.q, refs.k, refs.dn),
        (refs.k, refs.dC, refs.P, refs.dh, None, None),
    )
    a, X, tiles, b, x, norm = operands[role]
    a, tiles, b = (cta.in_chunk(y, item) for y in (a, tiles, b))

    def with_state(j):
        depth = block(j, DEPTH)
        if role == _Role.DV:
            return (a.at[rows, depth], left), (X.at[(*state, depth, columns)], right)
        return (a.at[rows, depth], left), (X.at[(*state, columns, depth)], right_transposed)

    def weighted(j):
        y = cta.in_chunk(x, item)
        return _halves(y, pl.multiple_of(item.row * ROWS, ROWS) + j * R, R, right, columns)

    def norms(j):
        start = pl.multiple_of(item.column * COLUMNS, COLUMNS)
        return _halves(norm.at[state], start, COLUMNS, right_vector)

    def with_tiles(j):
        others = block(first + j, DEPTH)
        if role == _Role.DQ:
            return (tiles.at[rows, others], left), (b.at[others, columns], right)
        return (tiles.at[others, rows], left_transposed), (b.at[others, columns], right)

    feed(0, steps.with_state, with_state)
    start = steps.with_state
    for count, copies in ((steps.weighted, weighted), (steps.norm, norms)):
        if count:
            feed(start, count, copies)
        start += count
    feed(start, tile_count, with_tiles)


def _inner_states(cta: _CTA, item: _Item) -> None:
    refs, ring = cta.refs, cta.ring
    (left, _), (_, right_transposed, _) = refs.operands

    def add(j, total):
        slot = ring.wait(item.step + j)
        C, dC = (
            load(x.at[slot, cta.tile_rows]).astype(jnp.float32) for x in (left, right_transposed)
        )
        ring.release(item.step + j)
        return total + C * dC

    total = loop(cta.roles[_Role.STATES].with_state, add, products.zeros(R, DEPTH))
    sums = jnp.sum(total, axis=1)
    rows = pl.ds(pl.multiple_of(item.row * ROWS + cta.wg * R, R), R)
    refs.states.at[item.head, item.chunk, rows][...] = sums


def _multiply(
    cta: _CTA, start, count, operands: Callable[[Any], Sequence[Any]], accumulator
) -> None:
    """Adds the products of some steps, of operands(slot)."""
    ring = cta.ring

    def one(j, carry):
        slot = ring.wait(start + j)
        products.add(accumulator, *operands(slot))
        products.wait(1)
        pl.when(j > 0)(lambda: ring.release(start + j - 1))

    loop(count, one, None)
    products.wait(0)
    ring.release(start + count - 1)


def _scaled(acc: Array, weights: Array) -> list[Array]:
    """By 64 columns: what is read beside the accumulator takes few registers at a time."""
    return [acc[:, part] * across_columns(weights) for part in _PARTS]


def _scaled_with_sums(
    cta: _CTA,
    item: _Item,
    is_dq: Array,
    first: Array,
    steps,
    weights: Array,
    dz_den: Array | None,
    acc: Array,
):
    """The inter-chunk part of dq or dk; stores its inner products with the queries or keys.

    Args:
      first: the first step after those with states.
      steps: of the warpgroup, in the sequence.
    """
    refs, ring = cta.refs, cta.ring
    right, _, right_vector = refs.operands[1]
    parts = _scaled(acc, weights)
    count = cta.roles[_Role.DK].weighted + cta.roles[_Role.DK].norm
    for x in range(count - 1):
        ring.wait(first + x)
    norm_weights = weights
    if dz_den is not None:
        norm_weights = lax.cond(is_dq, lambda: weights * dz_den, lambda: weights)

    def add_norm(*parts):
        slot = ring.wait(first + count - 1)
        rows = [across_rows(load(right_vector.at[slot, part], BY_COLUMNS)) for part in _PARTS]
        return [x + across_columns(norm_weights) * y for x, y in zip(parts, rows, strict=True)]

    if refs.n is None:
        parts = lax.cond(is_dq, lambda *parts: list(parts), add_norm, *parts)
    else:
        parts = add_norm(*parts)
    slot = ring.slot(first + cta.wg)
    tiles = (load(right.at[slot, :, part]).astype(jnp.float32) for part in _PARTS)
    sums = [products.sum_over_columns(x * y) for x, y in zip(parts, tiles, strict=True)]
    inter = functools.reduce(jnp.add, sums)
    ring.release(*(first + x for x in range(count - 1)))
    release_norm = functools.partial(ring.release, first + count - 1)
    if refs.n is None:
        pl.when(~is_dq)(release_norm)
    else:
        release_norm()
    for role, output in ((_Role.DQ, refs.q_inter), (_Role.DK, refs.k_inter)):

        @pl.when(item.role == role)
        def store(output=output):
            output.at[item.head, item.column, steps][...] = inter

    return jnp.concatenate(parts, axis=1)


def _store(cta: _CTA, item: _Item, rows, acc: Array) -> None:
    refs = cta.refs
    for j, part in enumerate(_PARTS):
        tile = refs.out_tiles.at[cta.wg, j % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        products.store(tile, acc[:, part].astype(tile.dtype))
        plgpu.commit_smem()
        columns = pl.ds(pl.multiple_of(item.column * COLUMNS + j * R, R), R)
        for role, x in enumerate((refs.dq, refs.dk, refs.dv)):
            here = item.role == role
            destination = cta.in_chunk(x, item).at[rows, columns]
            start = functools.partial(copy_out, tile, destination)
            pl.when(here)(start)


def _gradient(cta: _CTA, item: _Item) -> None:
    """An item of dq, dk or dv. One body for all, as it takes the compiler seconds."""
    refs, roles, tile_rows = cta.refs, cta.roles, cta.tile_rows
    (left, left_transposed), (right, right_transposed, _) = refs.operands
    multiply, role = functools.partial(_multiply, cta), item.role
    is_dq, is_dv = role == _Role.DQ, role == _Role.DV
    rows = pl.ds(pl.multiple_of(item.row * ROWS + cta.wg * R, R), R)
    steps = pl.ds(pl.multiple_of(item.chunk * cta.p.L + item.row * ROWS + cta.wg * R, R), R)
    after_state = item.step + _by_role(role, [x.with_state for x in roles])
    before_tiles = after_state + _by_role(role, [x.weighted + x.norm for x in roles])
    tile_count = _by_role(role, [_tile_steps(kind, item.row, cta.p)[0] for kind in _Role])

    def plain(slot):
        return left.at[slot, tile_rows], right.at[slot]

    def times_transposed(slot):
        return left.at[slot, tile_rows], right_transposed.at[slot].T

    def transposed_times(slot):
        return left_transposed.at[slot, :, tile_rows].T, right.at[slot]

    of_dv, of_others = (roles[x].with_state for x in (_Role.DV, _Role.DQ))
    with_state = functools.partial(
        products.cond,
        is_dv,
        functools.partial(multiply, item.step, of_dv, plain),
        functools.partial(multiply, item.step, of_others, times_transposed),
    )
    with_tiles = functools.partial(
        products.cond,
        is_dq,
        functools.partial(multiply, before_tiles, tile_count, plain),
        functools.partial(multiply, before_tiles, tile_count, transposed_times),
    )

    # Loaded before the product and used after it: their latency is hidden.
    query_weights, key_weights, inv_den, dz_den = (
        load_by_rows(x, item.head, steps) for x in (refs.w, refs.abar, refs.inv_den, refs.dz_den)
    )
    acc = products.from_zeros(with_state, R, COLUMNS)
    weights = lax.cond(
        is_dq, lambda: query_scale(query_weights, cta.p.qk_scale, inv_den), lambda: key_weights
    )
    acc = lax.cond(
        is_dv,
        lambda acc: jnp.concatenate(_scaled(acc, weights), axis=1),
        functools.partial(_scaled_with_sums, cta, item, is_dq, after_state, steps, weights, dz_den),
        acc,
    )
    (acc,) = products.onto(with_tiles, acc)
    _store(cta, item, rows, acc)


def _kernel(*, p: Problem, num_ctas: int, num_stages: int, **refs_by_name) -> None:
    refs, wg = _Refs(**refs_by_name), lax.axis_index("wg")
    scheduler = PersistentScheduler(lax.axis_index("program"), num_ctas)
    roles = _items(p, refs.n is not None)
    items = scheduler.num_items(p.BNH * p.NC * _items_of_chunk(roles))
    ring = CopyRing(refs.barriers, num_stages, None, None, readers=0)
    cta = _CTA(refs, p, roles, scheduler, items, ring, block(wg, R), wg)

    def copy(item):
        for role in _Role:
            pl.when(item.role == role)(functools.partial(_copy_item, cta, role, item))

    def multiply(item):
        is_states = item.role == _Role.STATES
        pl.when(is_states)(functools.partial(_inner_states, cta, item))
        pl.when(~is_states)(functools.partial(_gradient, cta, item))

    @pl.when(wg == 2)
    def copies():
        ring.drain(cta.for_each_item(copy))

    @pl.when(wg < 2)
    def multiplications():
        cta.for_each_item(multiply)
        plgpu.wait_smem_to_gmem(0)


def scratch(config: RingTiles, dtype) -> dict[str, Any]:
    """Shared memory of the kernel."""
    tiles = functools.partial(shared_tiles, config.num_stages, dtype=dtype)
    # All shapes of a tile have the same bytes, so that a slot has the same place in all of them.
    left = tiles(ROWS, DEPTH), tiles(DEPTH, ROWS)
    vector = plgpu.SMEM((config.num_stages, DEPTH * COLUMNS * dtype.itemsize // 4), jnp.float32)
    right = tiles(DEPTH, COLUMNS), tiles(COLUMNS, DEPTH), vector
    return {
        "operands": [one_of(*left), one_of(*right)],
        "out_tiles": shared_tiles(2, 2, R, R, dtype=dtype),
        "barriers": ring_barriers(config.num_stages, copies=2),
    }


def parallel_bw_dQKV(x: Operands, *, call: Launch) -> Gradients:
    """Runs the stage: ``stages/parallel_bw_dQKV.py``."""
    matQ, matK, matV, matDeltaH, gates, gradients, tiles, *states = x
    matC_states, vecN_states, matDeltaC_states, vecDeltaN_states = states
    p, config, dtype, g = call.problem, call.tiles, matQ.dtype, gates.per_step()
    normalise = gradients.vecInvDen is not None
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
    if tiles.matP is None:
        (e_hi, e_lo), (u_hi, u_lo) = g.vecE, g.vecU
        more = dict(e_hi=e_hi, e_lo=e_lo, u_hi=u_hi, u_lo=u_lo)
        of_chunks = Gradients(*parallel_bw_dQKV_by_chunk(inputs | more, call))
        # A sum of everything is one kernel of XLA.
        parts = jnp.concatenate([of_chunks.inner_C_dC, vecN_states * vecDeltaN_states], axis=-1)
        return of_chunks._replace(inner_C_dC=(gates.scaGamma[..., None] * parts).sum(-1))
    num_ctas = config.num_ctas
    sums = float32(p.BNH, p.DHQK // COLUMNS, p.S)
    y = mosaic_call(
        functools.partial(_kernel, p=p, num_ctas=num_ctas, num_stages=config.num_stages),
        name="parallel_bw_dQKV",
        grid={"program": num_ctas},
        warpgroups=3,
        outputs={
            "dq": sequence_shape(matQ, p.DHQK, dtype),
            "q_inter": sums,
            "dk": sequence_shape(matK, p.DHQK, dtype),
            "k_inter": sums,
            "dv": sequence_shape(matV, p.DHHV, dtype),
            "states": float32(p.BNH, p.NC, p.DHQK),
        },
        scratch=scratch(config, dtype),
        interpret=call.interpret,
    )(**inputs, P=tiles.matP, dP=tiles.matDeltaP)
    q_inter, k_inter = (y[name].sum(1) for name in ("q_inter", "k_inter"))
    # A sum of everything is one kernel of XLA.
    through = (gates.scaGamma[..., None] * (y["states"] + vecN_states * vecDeltaN_states)).sum(-1)
    return Gradients(y["dq"], y["dk"], y["dv"], q_inter, k_inter, through)


def by_chunk(p: Problem) -> bool:
    """Whether a CTA makes P, dP and all gradients of a chunk.

    A warpgroup has registers for 64 x 128 of dq and of dk.
    """
    return p.L == 128 and p.DHQK in (64, 128)


def _divides(p: Problem) -> bool:
    """Whether whole tiles make up the chunks and the heads."""
    if by_chunk(p):
        return p.DHHV % 128 == 0
    return p.L % 128 == 0 and p.DHQK % 256 == 0 and p.DHHV % 256 == 0


@dataclasses.dataclass(frozen=True)
class Tiles(RingTiles):
    """recomputes_scores: whether a CTA computes P and dP, and all gradients of a chunk."""

    recomputes_scores: bool

    def clamped(self, p: Problem) -> Self:
        """With no CTA without an item."""
        if not _divides(p):
            return self
        of_chunk = 1 if by_chunk(p) else _items_of_chunk(_items(p, normalise=True))
        return dataclasses.replace(self, num_ctas=min(self.num_ctas, p.BNH * p.NC * of_chunk))

    def shared_bytes(self, p: Problem, dtype, **asked) -> int:
        if self.recomputes_scores:
            return shared_bytes(by_chunk_scratch(p, self, dtype, normalise=True))
        return shared_bytes(scratch(self, dtype), has_sum=True)

    @classmethod
    def candidates(cls, p: Problem, gpu: Gpu, **asked) -> Iterable[Self]:
        """By chunk six stages where registers spill: with more, too little L1 is left for them."""
        if not _divides(p):
            return
        if by_chunk(p):
            stages = 7 if p.DHQK == 64 and MOVES_REGISTERS else 6
        else:
            stages = 3 if p.DHQK >= 512 else 4
        for num_stages in range(stages, 2, -1):
            yield cls(num_stages, gpu.sms, by_chunk(p)).clamped(p)

    def divides(self, p: Problem, **asked) -> bool:
        """With fewer stages than a step holds at once, the kernel would wait for ever."""
        least = 4 if by_chunk(p) else 3
        return _divides(p) and self.recomputes_scores == by_chunk(p) and self.num_stages >= least
