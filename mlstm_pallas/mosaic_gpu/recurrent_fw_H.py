"""recurrent_fw_H on Mosaic GPU: the fused scan of ``stages/recurrent_fw_H.py``.

Grid (B * NH, DHHV / siz_b_DHHV). A CTA has two warpgroups. Each owns siz_b_DHHV / 2 columns of C
and of h, in blocks of 64. A block of C is kept transposed in registers, 64 x state_rows floats, and
is the left operand of C^T q. Copies run up to num_stages chunks ahead. While the state's product
runs, the outputs of the chunk are stored.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.gpu import Gpu
from mlstm_pallas.mosaic_gpu import products
from mlstm_pallas.mosaic_gpu.copy_ring import CopyRing, ring_barriers
from mlstm_pallas.mosaic_gpu.fragments import across_rows
from mlstm_pallas.mosaic_gpu.launch import (
    BY_COLUMNS,
    REGISTER_ROWS,
    block,
    float32,
    load,
    mosaic_call,
    plgpu,
    shared_bytes,
    shared_tiles,
)
from mlstm_pallas.mosaic_gpu.limits import (
    HEADS,
    HopperTiles,
)
from mlstm_pallas.mosaic_gpu.tile_copies import copy_out, head_of
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Launch, largest_rows, sequence_shape
from mlstm_pallas.stages.recurrent_fw_H import FusedScan, Operands
from mlstm_pallas.tiles import blocks, divide, loop, remainder

R, WARPGROUPS = REGISTER_ROWS, 2


class _Refs(NamedTuple):
    q: Any  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    k: Any  # (B * NH, S, DHQK), or likewise
    v: Any  # (B * NH, S, DHHV), or likewise
    P: Any  # (B * NH, S, L), in the first launch
    r: Any  # (B * NH, S)
    abar: Any  # (B * NH, S)
    gamma: Any  # (B * NH, NC)
    C_initial: Any  # (B * NH, DHHV, DHQK), transposed, may be absent
    partial: Any  # like v, h of the launches before, absent in the first
    h: Any  # out, like v
    C_last: Any  # out (B * NH, DHHV, state_rows), transposed, may be absent
    C_states: Any  # out (B * NH, stored, DHQK, DHHV), may be absent
    slots: Any  # shared, by name: the tiles of the chunks in flight, (num_stages, ...) each
    barriers: Any  # of the ring of slots
    out_tiles: Any  # shared (blocks of 64 columns, L, 64)
    state_tiles: Any  # shared (warpgroups, 2, 64, 64), for C_states


@dataclasses.dataclass(frozen=True)
class _Scan:
    """The columns of a warpgroup, in blocks of 64."""

    refs: _Refs
    p: Problem
    launch: int
    siz_b_DHHV: int
    rows: int
    blocks: int
    store_every: int
    head: jax.Array
    column_block: jax.Array  # of the CTA
    wg: jax.Array

    def columns(self, b: int) -> tuple[Any, Any]:
        """Those of block b: in the tile, in the array."""
        start = pl.multiple_of((self.wg * self.blocks + b) * R, R)
        return pl.ds(start, R), pl.ds(self.column_block * self.siz_b_DHHV + start, R)

    def initial(self, b: int) -> Any:
        rows = pl.ds(self.launch * self.rows, self.rows)
        C = self.refs.C_initial.at[self.head, self.columns(b)[1], rows]
        return load(C, optimized=False)

    def store(
        self, value: jax.Array, tile: Any, destination: Any, pending: int, where: Any = None
    ) -> None:
        """Writes the transposed value into the tile and copies it out.

        pending: how many of the latest copies may run on meanwhile.
        """
        plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
        products.store(tile.T, value)
        plgpu.commit_smem()
        copy_out(tile, destination, where)


def _ring(c: _Scan, num_stages: int) -> CopyRing:
    refs = c.refs
    sequences: list[tuple[str, Any, int]] = [(x, c.launch * c.rows, c.rows) for x in "qk"]
    for x in ("v", "partial"):
        if getattr(refs, x) is not None:
            sequences.append((x, c.column_block * c.siz_b_DHHV, c.siz_b_DHHV))

    def copies(chunk: Any, copy: Any) -> None:
        steps = block(chunk, c.p.L)
        for name, start, size in sequences:
            columns = pl.ds(start if isinstance(start, int) else pl.multiple_of(start, size), size)
            x = head_of(getattr(refs, name), c.head, c.p)
            copy(x.at[steps, columns], refs.slots[name])
        for name in ("P", "r", "abar"):
            if name in refs.slots:
                copy(getattr(refs, name).at[c.head, steps], refs.slots[name])

    return CopyRing(refs.barriers, num_stages, c.p.NC, copies)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    scan: _Scan
    h: Any  # of the head
    index: jax.Array
    tiles: Mapping[str, Any]
    row_scale: jax.Array  # r and abar, in the rows of a transposed tile
    weights: jax.Array
    decay: jax.Array

    def block(self, b: int, CT: jax.Array) -> Any:
        """Stores 64 columns of h and of the state before the chunk; returns the one after it."""
        c, x, L, dtype = self.scan, self.tiles, self.scan.p.L, self.scan.refs.v.dtype
        refs = c.refs
        in_tile, destination = c.columns(b)

        def inter(accumulator: Any) -> None:
            for j, start in enumerate(range(0, c.rows, R)):
                rows, tile = pl.ds(start, R), CT[:, start : start + R].astype(dtype)
                products.add(accumulator, tile, x["q"].at[:, rows].T)
                products.wait(1)  # of two rounded tiles at a time
                if refs.C_states is not None:  # a branch around the stores would take registers
                    stored = divide(self.index, c.store_every)
                    states = refs.C_states.at[c.head, stored, rows, destination]
                    here = remainder(self.index, c.store_every) == 0
                    c.store(tile, refs.state_tiles.at[c.wg, j % 2], states, 1, here)

        hT = products.from_zeros(inter, R, L) * self.row_scale
        if refs.partial is not None:
            hT += load(x["partial"].at[:, in_tile].T).astype(jnp.float32)
        vT = load(x["v"].at[:, in_tile].T)
        scaled = (vT.astype(jnp.float32) * self.weights).astype(dtype)

        def intra(h_accumulator: Any, C_accumulator: Any) -> None:
            if refs.P is not None:
                products.add(h_accumulator, vT, x["P"].T)
            products.add(C_accumulator, scaled, x["k"])
            hT = products.read(h_accumulator, 1).astype(dtype)
            tile = refs.out_tiles.at[c.wg * c.blocks + b]
            h = self.h.at[pl.ds(self.index * L, L), destination]
            c.store(hT, tile, h, c.blocks - 1)

        return products.onto(intra, hT, CT * self.decay)[1]


def _kernel(
    *,
    p: Problem,
    launch: int,
    config: "Tiles",
    rows: int,
    store_every: int,
    **refs_by_name: Any,
) -> None:
    refs, warpgroups = _Refs(**refs_by_name), WARPGROUPS
    places = (lax.axis_index(x) for x in ("head", "columns", "wg"))
    num_blocks = config.siz_b_DHHV // (warpgroups * R)
    sizes = launch, config.siz_b_DHHV, rows, num_blocks, store_every
    scan = _Scan(refs, p, *sizes, *places)
    n, h, gamma = scan.head, head_of(refs.h, scan.head, p), refs.gamma
    ring = _ring(scan, config.num_stages)

    def chunk(index: Any, carry: Any) -> Any:
        CT, decay = carry
        pl.when(index > 0)(lambda: ring.refill(index - 1))
        slot = ring.wait(index)
        x = {name: tile.at[slot] for name, tile in refs.slots.items()}
        following = gamma[n, lax.min(index + 1, np.int32(p.NC - 1))]
        row_scale, weights = (across_rows(load(x[y], BY_COLUMNS)) for y in ("r", "abar"))
        this = _Chunk(scan, h, index, x, row_scale, weights, decay)
        new = [this.block(b, C) for b, C in enumerate(CT)]
        ring.release(index)
        return new, following

    ring.start()
    of_blocks = range(num_blocks)
    if refs.C_initial is None:
        CT = [products.zeros(R, rows) for _ in of_blocks]
    else:
        CT = [scan.initial(b) for b in of_blocks]
    CT, _ = loop(p.NC, chunk, (CT, gamma[n, 0]))
    if refs.C_last is not None:
        for b in of_blocks:
            refs.C_last[n, scan.columns(b)[1]] = CT[b]
    plgpu.wait_smem_to_gmem(0)
    ring.drain()


def scratch(
    p: Problem,
    config: "Tiles",
    rows: int,
    dtype: Any,
    *,
    first_launch: bool,
    stores_states: bool,
) -> dict[str, Any]:
    """Shared memory of a launch that holds so many rows of the state."""
    tiles, vectors = functools.partial(shared_tiles, dtype=dtype), (config.num_stages, p.L)
    V, warpgroups = config.siz_b_DHHV, WARPGROUPS
    slots = {"q": tiles(*vectors, rows), "k": tiles(*vectors, rows), "v": tiles(*vectors, V)}
    slots |= {"P": tiles(*vectors, p.L)} if first_launch else {"partial": tiles(*vectors, V)}
    slots |= {name: plgpu.SMEM(vectors, jnp.float32) for name in ("r", "abar")}
    return {
        "slots": slots,
        "barriers": ring_barriers(config.num_stages, copies=len(slots), readers=warpgroups),
        "out_tiles": tiles(V // R, p.L, R),
        "state_tiles": tiles(warpgroups, 2, R, R) if stores_states else None,
    }


def recurrent_fw_H(
    x: Operands,
    *,
    return_last: bool = True,
    store_every: int = 0,
    call: Launch,
) -> FusedScan:
    """Runs the stage: ``stages/recurrent_fw_H.py``."""
    matQ, matV, scores, scaGamma, matC_initial = x
    p, config, dtype = call.problem, call.tiles, matQ.dtype
    rows = config.state_rows
    keys = scores.keys
    abar = jnp.ones_like(scores.vecR) if keys.weights is None else keys.weights
    C_last = float32(p.BNH, p.DHHV, rows) if return_last else None
    states = None
    if store_every:
        states = jax.ShapeDtypeStruct((p.BNH, p.NC // store_every, p.DHQK, p.DHHV), dtype)
    y: dict[str, Any] = {"h": None}
    lasts = []
    for launch in range(blocks(p.DHQK, rows)):
        first = launch == 0
        y = mosaic_call(
            functools.partial(
                _kernel,
                p=p,
                launch=launch,
                config=config,
                rows=rows,
                store_every=store_every,
            ),
            name="recurrent_fw_H",
            grid=dict(zip(("head", "columns"), config.grid(p), strict=True)),
            warpgroups=WARPGROUPS,
            outputs={
                "h": sequence_shape(matV, p.DHHV, dtype),
                "C_last": C_last,
                "C_states": states,
            },
            scratch=scratch(
                p, config, rows, dtype, first_launch=first, stores_states=store_every > 0
            ),
            interpret=call.interpret,
        )(
            q=matQ,
            k=keys.array,
            v=matV,
            P=scores.matP if first else None,
            r=scores.vecR,
            abar=abar,
            gamma=scaGamma,
            C_initial=None if matC_initial is None else matC_initial.mT,
            partial=y["h"],
        )
        lasts.append(y["C_last"])
    last = jnp.concatenate([C.mT for C in lasts], axis=1) if return_last else None
    return FusedScan(y["h"], last, y["C_states"])


@dataclasses.dataclass(frozen=True)
class Tiles(HopperTiles):
    """siz_b_LKV: steps of a chunk; state_rows: rows of C in a launch."""

    siz_b_LKV: int
    siz_b_DHHV: int
    state_rows: int
    num_stages: int
    ctas_per_sm: ClassVar[int] = 1
    least_share: ClassVar[float] = 0.48

    def grid(self, p: Problem, **asked: Any) -> tuple[int, ...]:
        return p.BNH, blocks(p.DHHV, self.siz_b_DHHV)

    def shared_bytes(self, p: Problem, dtype: Any, **asked: Any) -> int:
        """The first launch reads P, the second one h of the first. One alone stores states."""
        p, one = p.in_chunks_of(self.siz_b_LKV), self.state_rows == p.DHQK
        options = [dict(first_launch=x, stores_states=one) for x in {True, one}]
        return max(shared_bytes(scratch(p, self, self.state_rows, dtype, **x)) for x in options)

    @classmethod
    def candidates(cls, p: Problem, gpu: Gpu, **asked: Any) -> Iterable[Self]:
        rows = largest_rows(p.DHQK)
        if rows:
            yield cls(R, 128, rows, 2 if p.DHQK > 128 else 3)

    def divides(self, p: Problem, **asked: Any) -> bool:
        """A warpgroup has at most 64 x 256 floats of C. There are at most two launches.

        parallel_fw_P takes chunks of 64 steps alone.
        """
        L, columns, rows = min(p.L, self.siz_b_LKV), self.siz_b_DHHV, self.state_rows
        parts, rest = divmod(columns, R * WARPGROUPS)
        if p.DHQK % rows or 2 * rows < p.DHQK or rows % R or p.BNH > HEADS:
            return False
        return L == R and p.DHHV % columns == rest == 0 and parts * rows <= 256
