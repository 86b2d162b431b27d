"""The recurrences of ``stages/recurrence.py`` on Mosaic GPU, without x.

Grid (B * NH times the number of recurrences, DHQK / rows, DHHV / 128). A CTA owns up to 256 rows
and 128 columns of X. It has two warpgroups, each with 64 columns, kept transposed in registers.
They share the copying, num_stages tiles of 64 steps ahead.

With r the left operand of the transposed product is r b, weighted in registers: (r b)^T a = b^T (r
a), and a tile of b has 64 columns a warpgroup. The operand of a step is computed while the product
of the step before runs.

A recurrence with an h also has the inner products b_t . h_t, a warpgroup's 64 columns at a time:
while the product of a step runs, the warpgroup multiplies its tile of b with that of h. The CTAs of
the first row block do it. The tiles of h have stages of their own.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.mosaic_gpu.copy_ring import CopyRing, ring_barriers
from mlstm_pallas.mosaic_gpu.fragments import across_rows
from mlstm_pallas.mosaic_gpu.launch import (
    BY_COLUMNS,
    REGISTER_ROWS,
    block,
    float32,
    head_of,
    load,
    mosaic_call,
    plgpu,
    shared_tiles,
)
from mlstm_pallas.mosaic_gpu.limits import state_rows
from mlstm_pallas.mosaic_gpu.products import Products
from mlstm_pallas.problem import Problem
from mlstm_pallas.splits import heads_of_splits, splits_as_heads
from mlstm_pallas.stage import StageCall, StageConfig
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs
from mlstm_pallas.tiles import blocks, divide, loop, remainder

R = REGISTER_ROWS
STEPS, COLUMNS = 64, 128  # of a tile, and of the block of X of a CTA
H_STAGES = 3  # tiles of h in shared memory
ENOUGH_CTAS = 128  # of a launch: an H200 has 132 SMs, and an SM holds one such CTA


class _Operands(NamedTuple):
    """Inputs of a recurrence."""

    a: Any  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    b: Any  # (B * NH, S, DHHV) or (B, S, NH, DHHV)
    r: Any  # (B * NH, S), may be absent
    h: Any  # as b, may be absent
    gamma: Any  # (B * NH, NC)
    X_initial: Any  # (B * NH, DHHV, DHQK) transposed, may be absent


class _Shared(NamedTuple):
    a_tiles: Any  # (stages, 64, rows)
    b_tiles: Any  # (stages, 64, 128)
    weights: Any  # (stages, 64) float32, absent without r
    h_tiles: Any  # (H_STAGES, 64, 128), absent where no recurrence has an h
    out_tiles: Any  # (2 warpgroups, 2, 64, 64)
    barriers: Any  # of the ring of operands
    h_barriers: Any  # of the ring of tiles of h, absent likewise


class _Place(NamedTuple):
    """The block of X of a warpgroup."""

    wg: jax.Array
    head: jax.Array
    rows: Any
    columns: Any  # of the CTA
    part: jax.Array  # which 64 columns
    X_columns: Any  # these
    tile_columns: Any  # likewise, in a tile of b or h


@dataclasses.dataclass(frozen=True)
class _Recurrence:
    x: _Operands  # of which a, b and h are the head's alone
    out: Any  # RecurrenceOutputs
    shared: _Shared
    place: _Place
    p: Problem
    rows: int
    backward: bool
    products: Products

    @property
    def tiles_of_chunk(self) -> int:
        return self.p.L // STEPS

    def chunk(self, index: Any) -> Any:
        return self.p.NC - 1 - index if self.backward else index

    def steps(self, step: Any) -> Any:
        n = self.tiles_of_chunk
        return block(self.chunk(divide(step, n)) * n + remainder(step, n), STEPS)

    def copy(self, step: Any, copy: Any) -> None:
        steps, place, shared = self.steps(step), self.place, self.shared
        copy(self.x.a.at[steps, place.rows], shared.a_tiles)
        copy(self.x.b.at[steps, place.columns], shared.b_tiles)
        if self.x.r is not None:
            copy(self.x.r.at[place.head, steps], shared.weights)

    def copy_h(self, step: Any, copy: Any) -> None:
        copy(self.x.h.at[self.steps(step), self.place.columns], self.shared.h_tiles)

    def left(self, slot: Any) -> Any:
        """b of a tile, transposed and weighted, (64 columns, 64 steps)."""
        bT = self.shared.b_tiles.at[slot, :, self.place.tile_columns].T
        if self.shared.weights is None:
            return bT
        weights = across_rows(load(self.shared.weights.at[slot], BY_COLUMNS))
        return (load(bT).astype(jnp.float32) * weights).astype(bT.dtype)

    def store_inner(self, ring: CopyRing, h_ring: CopyRing, step: Any, tile: Any) -> None:
        """The sums of b h over the columns of the warpgroup, for the steps of a tile."""
        place, slot, h_slot = self.place, ring.slot(step), h_ring.wait(step)
        tiles = self.shared.b_tiles.at[slot], self.shared.h_tiles.at[h_slot]
        b, h = (load(x.at[:, place.tile_columns]).astype(jnp.float32) for x in tiles)
        h_ring.release(step)
        sums = self.products.sum_over_columns(b * h)
        self.out.inner.at[place.head, place.part, block(tile, STEPS)][...] = sums

    def store_state(self, index: Any, at: Any, XT: jax.Array) -> None:
        """X before chunk ``at``, the index-th in order."""
        place, n = self.place, self.rows // R
        for x in range(n):
            tile = self.shared.out_tiles.at[place.wg, remainder(index * n + x, 2)]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            self.products.store(tile.T, XT[:, x * R : (x + 1) * R].astype(tile.dtype))
            plgpu.commit_smem()
            rows = block(lax.axis_index("rows") * n + x, R)
            plgpu.copy_smem_to_gmem(tile, self.out.X.at[place.head, at, rows, place.X_columns])

    def join(self, ring: CopyRing, h_ring: Any, index: Any, carry: Any) -> Any:
        """Stores X before a chunk, and adds the chunk; carry: X^T and the chunk's gamma."""
        products, n = self.products, self.tiles_of_chunk
        unrolled = 2 - n % 2  # steps whose left operands have registers of their own
        XT, decay = carry
        at, last = self.chunk(index), np.int32(self.p.NC - 1)
        following = self.x.gamma[self.place.head, self.chunk(lax.min(index + 1, last))]
        self.store_state(index, at, XT)

        def add(accumulator: Any) -> None:
            def some(i: Any, carry: None) -> None:
                for x in range(unrolled):
                    step = index * n + i * unrolled + x
                    slot = ring.wait(step)
                    products.add(accumulator, self.left(slot), self.shared.a_tiles.at[slot])
                    products.wait(1)
                    release = functools.partial(ring.release, step - 1)
                    if x == 0:
                        pl.when(i > 0)(release)
                    else:
                        release()
                    if h_ring is not None:
                        self.store_inner(ring, h_ring, step, at * n + i * unrolled + x)
                        h_ring.refill(step)
                    pl.when(step > 0)(functools.partial(ring.refill, step - 1))

            products.loop(accumulator, n // unrolled, some)
            products.wait(0)
            ring.release((index + 1) * n - 1)

        (XT,) = products.onto(add, XT * decay)
        return XT, following

    def run(self, num_stages: int, reads_h: bool) -> None:
        x, shared, place, products = self.x, self.shared, self.place, self.products
        total, h_ring = self.p.NC * self.tiles_of_chunk, None
        buffers = shared.a_tiles, shared.b_tiles, shared.weights
        ring = CopyRing(shared.barriers, num_stages, total, self.copy, products, buffers)
        rings = [ring]
        if reads_h:
            h_ring = CopyRing(
                shared.h_barriers, H_STAGES, total, self.copy_h, products, (shared.h_tiles,)
            )
            rings.append(h_ring)
        for y in rings:
            y.start()
        state = place.head, place.X_columns, place.rows
        if x.X_initial is None:
            XT = products.zeros(R, self.rows)
        else:
            XT = load(x.X_initial.at[state], optimized=False)
        gamma = x.gamma[place.head, self.chunk(np.int32(0))]
        XT, _ = loop(self.p.NC, functools.partial(self.join, ring, h_ring), (XT, gamma))
        if self.out.X_last is not None:
            self.out.X_last[state] = XT
        plgpu.wait_smem_to_gmem(0)
        for y in rings:
            y.drain()


def _kernel(
    operands: Sequence[_Operands],
    outputs: Sequence[RecurrenceOutputs],
    *,
    p: Problem,
    rows: int,
    backward: Sequence[bool],
    num_stages: int,
    interpret: bool,
    **shared: Any,
) -> None:
    wg, index = lax.axis_index("wg"), lax.axis_index("head")
    blocks_of_X = block(lax.axis_index("rows"), rows), block(lax.axis_index("columns"), COLUMNS)
    part = lax.axis_index("columns") * (COLUMNS // R) + wg
    X_columns, tile_columns = block(part, R), block(wg, R)
    head = remainder(index, p.BNH)
    place = _Place(wg, head, *blocks_of_X, part, X_columns, tile_columns)

    def run(j: int, reads_h: bool) -> None:
        x = operands[j]
        a, b = head_of(x.a, head, p), head_of(x.b, head, p)
        x = x._replace(a=a, b=b, h=head_of(x.h, head, p) if reads_h else None)
        statics = p, rows, backward[j], Products(interpret)
        _Recurrence(x, outputs[j], _Shared(**shared), place, *statics).run(num_stages, reads_h)

    for j, x in enumerate(operands):
        here, has_h = divide(index, p.BNH) == j, x.h is not None
        if not has_h or rows == p.DHQK:
            pl.when(here)(functools.partial(run, j, has_h))
            continue
        for reads_h in (True, False):  # no branch in the loop over steps
            first_rows = (lax.axis_index("rows") == 0) == reads_h
            pl.when(here & first_rows)(functools.partial(run, j, reads_h))


def scratch(
    rows: int,
    num_stages: int,
    dtype: Any,
    *,
    weighted: bool,
    has_h: bool,
) -> dict[str, Any]:
    """Shared memory of the kernel, for blocks of X of so many rows."""
    tiles = functools.partial(shared_tiles, dtype=dtype)
    return {
        "a_tiles": tiles(num_stages, STEPS, rows),
        "b_tiles": tiles(num_stages, STEPS, COLUMNS),
        "weights": plgpu.SMEM((num_stages, STEPS), jnp.float32) if weighted else None,
        "h_tiles": tiles(H_STAGES, STEPS, COLUMNS) if has_h else None,
        "out_tiles": tiles(2, 2, R, R),
        "barriers": ring_barriers(num_stages, copies=3 if weighted else 2),
        "h_barriers": ring_barriers(H_STAGES, copies=1) if has_h else None,
    }


def recurrences(name: str, *each: Recurrence, call: StageCall) -> list[RecurrenceOutputs]:
    """``stages/recurrence.py``, in one launch."""
    p, dtype, num_stages = call.problem, each[0].a.dtype, call.tiles.num_stages
    rows = block_rows(call.tiles, p, len(each))
    interpret = call.interpret
    weighted = each[0].r is not None
    if any((x.r is not None) != weighted or x.x_initial is not None for x in each):
        raise NotImplementedError(
            f"{name} has r in some of its recurrences, or x, expected r in all or in none, and no x"
        )
    has_h = any(x.h is not None for x in each)
    operands = [
        _Operands(x.a, x.b, x.r, x.h, x.gamma, None if x.X_initial is None else x.X_initial.mT)
        for x in each
    ]
    X: Any = jax.ShapeDtypeStruct((p.BNH, p.NC, p.DHQK, p.DHHV), dtype)
    last, inner = float32(p.BNH, p.DHHV, p.DHQK), float32(p.BNH, blocks(p.DHHV, R), p.S)
    outputs = [
        RecurrenceOutputs(
            X, last if x.return_last else None, None, None, None if x.h is None else inner
        )
        for x in each
    ]
    results = mosaic_call(
        functools.partial(
            _kernel,
            p=p,
            rows=rows,
            backward=tuple(x.backward for x in each),
            num_stages=num_stages,
            interpret=interpret,
        ),
        name=name,
        grid={
            "head": len(each) * p.BNH,
            "rows": blocks(p.DHQK, rows),
            "columns": blocks(p.DHHV, COLUMNS),
        },
        warpgroups=2,
        outputs={"outputs": outputs},
        scratch=scratch(rows, num_stages, dtype, weighted=weighted, has_h=has_h),
        interpret=interpret,
    )(operands=operands)["outputs"]
    return [
        x._replace(
            inner=None if x.inner is None else jnp.sum(x.inner, axis=1),
            X_last=None if x.X_last is None else x.X_last.mT,
        )
        for x in results
    ]


def split_products(
    a: jax.Array,
    b: jax.Array,
    r: jax.Array,
    num_splits: int,
    *,
    backward: bool = False,
    all_splits: bool = False,
    call: StageCall,
) -> jax.Array:
    """As ``split_products`` of stages/recurrence.py. It computes all splits: they run at once."""
    p = call.problem.split(num_splits)
    p = dataclasses.replace(p, L=p.S)
    a, b, r = (splits_as_heads(x, num_splits) for x in (a, b, r))
    whole = Recurrence(a, b, jnp.ones((p.BNH, 1), jnp.float32), None, return_last=True, r=r)
    tiles = call.tiles.replace(siz_b_DHQK=heuristic_rows(p, 1))
    call = dataclasses.replace(call, problem=p, tiles=tiles)
    (outputs,) = recurrences("split_products", whole, call=call)
    X = heads_of_splits(outputs.X_last, num_splits)
    return X if all_splits else X[:, 1:] if backward else X[:, :-1]


def num_ctas(rows: int, p: Problem) -> int:
    """CTAs of one recurrence; 0 where no such blocks fit."""
    return p.BNH * (p.DHQK // rows) * (p.DHHV // COLUMNS) if rows else 0


def heuristic_rows(p: Problem, recurrences: int) -> int:
    """siz_b_DHQK: the most rows of a block with which so many recurrences have enough CTAs."""
    sizes = 256, 128, 64
    enough = (x for x in sizes if recurrences * num_ctas(state_rows(p.DHQK, x), p) >= ENOUGH_CTAS)
    return next(enough, sizes[-1])


def block_rows(config: StageConfig, p: Problem, recurrences: int) -> int:
    """Rows of a block: those of the config, which are for two recurrences.

    One alone has fewer where it would have few CTAs.
    """
    rows = config.siz_b_DHQK
    if recurrences == 1:
        rows = min(rows, heuristic_rows(p, recurrences))
    return state_rows(p.DHQK, rows)
