"""recurrent_fw_H on Mosaic GPU: the fused scan of ``stages/recurrent_fw_H.py``.

Grid (B * NH, DHHV / siz_b_DHHV). A CTA has two warpgroups. Each owns siz_b_DHHV / 2 columns of C
and of h, in blocks of 64. A block of C is kept transposed in registers, 64 x siz_b_loop floats, and
is the left operand of C^T q. Copies run up to num_stages chunks ahead. While the state's product
runs, the outputs of the chunk are stored.
"""
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.mosaic_gpu.copy_ring import CopyRing, ring_barriers
from mlstm_pallas.mosaic_gpu.launch import (
    BY_COLUMNS,
    REGISTER_ROWS,
    block,
    copy_where,
    head_of,
    load,
    mosaic_call,
    plgpu,
    tile_transforms,
)
from mlstm_pallas.mosaic_gpu.limits import HEADS, SHARED_BYTES, kernel, state_rows
from mlstm_pallas.mosaic_gpu.products import Products
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering, StageCall, StageConfig, sequence_shape
from mlstm_pallas.stages.parallel_fw_P import Scores
from mlstm_pallas.stages.recurrent_fw_H import FusedScan
from mlstm_pallas.tiles import blocks, divide, loop, remainder


def _kernel(
    q,  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    k,  # (B * NH, S, DHQK), or likewise
    v,  # (B * NH, S, DHHV), or likewise
    P,  # (B * NH, S, L), in the first launch
    r,  # (B * NH, S)
    abar,  # (B * NH, S)
    gamma,  # (B * NH, NC)
    C_initial,  # (B * NH, DHHV, DHQK), transposed, may be absent
    partial,  # like v, h of the launches before, absent in the first
    h,  # out, like v
    C_last,  # out (B * NH, DHHV, siz_b_loop), transposed, may be absent
    C_states,  # out (B * NH, stored, DHQK, DHHV), may be absent
    slots,  # shared, by name: the tiles of the chunks in flight, (num_stages, ...) each
    barriers,  # of the ring of slots
    out_tiles,  # shared (blocks of 64 columns, L, 64)
    state_tiles,  # shared (warpgroups, 2, 64, 64), for C_states
    *,
    p: Problem,
    launch: int,
    siz_b_DHHV: int,
    rows: int,
    warpgroups: int,
    num_stages: int,
    store_every: int,
    products: Products,
):
    n, column_block, wg = lax.axis_index("head"), lax.axis_index("columns"), lax.axis_index("wg")
    L, R, dtype = p.L, REGISTER_ROWS, v.dtype
    owned = siz_b_DHHV // (warpgroups * R)  # blocks of a warpgroup
    outputs = head_of(h, n, p)
    sequences: dict[str, tuple[Any, Any, int]] = {"q": (q, launch * rows, rows), "k": (k, launch * rows, rows)}
    sequences |= {name: (x, column_block * siz_b_DHHV, siz_b_DHHV) for name, x in (("v", v), ("partial", partial)) if x is not None}

    def copy(chunk, slot, barrier):
        steps = block(chunk, L)
        for name, (x, start, size) in sequences.items():
            columns = pl.ds(start if isinstance(start, int) else pl.multiple_of(start, size), size)
            plgpu.copy_gmem_to_smem(head_of(x, n, p).at[steps, columns], slots[name].at[slot], barrier)
        for name, x in (("P", P), ("r", r), ("abar", abar)):
            if x is not None:
                plgpu.copy_gmem_to_smem(x.at[n, steps], slots[name].at[slot], barrier)

    ring = CopyRing(barriers, num_stages, p.NC, copy, products, tuple(slots.values()))

    def columns(b):
        """Those of block b of the warpgroup: in the tile, in the array."""
        start = pl.multiple_of((wg * owned + b) * R, R)
        return pl.ds(start, R), pl.ds(column_block * siz_b_DHHV + start, R)

    def store(value, tile, destination, pending, where=None):
        """Writes the transposed value into the tile and copies it out. pending: how many of the latest copies may run on meanwhile."""
        plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
        products.store(tile.T, value)
        plgpu.commit_smem()
        copy_where(where, tile, destination, interpret=products.interpret)

    def initial(b):
        own = C_initial.at[n, columns(b)[1], pl.ds(launch * rows, rows)]
        return load(own, optimized=False)

    def chunk(index, carry):
        CT, decay = carry
        pl.when(index > 0)(lambda: ring.refill(index - 1))
        slot = ring.wait(index)
        x = {name: tile.at[slot] for name, tile in slots.items()}
        following = gamma[n, lax.min(index + 1, np.int32(p.NC - 1))]
        row_scale = lax.broadcast_in_dim(load(x["r"], BY_COLUMNS), (R, L), [1])
        weights = lax.broadcast_in_dim(load(x["abar"], BY_COLUMNS), (R, L), [1])
        new = []
        for b in range(owned):
            own, destination = columns(b)

            def inter(accumulator, CT=CT[b], destination=destination):
                for j, start in enumerate(range(0, rows, R)):
                    tile = CT[:, start : start + R].astype(dtype)
                    products.add(accumulator, tile, x["q"].at[:, pl.ds(start, R)].T)
                    products.wait(1)  # of two rounded tiles at a time
                    if C_states is not None:  # a branch around the stores would take registers that there are not
                        states = C_states.at[n, divide(index, store_every), pl.ds(start, R), destination]
                        store(tile, state_tiles.at[wg, j % 2], states, 1, remainder(index, store_every) == 0)

            hT = products.from_zeros(inter, R, L) * row_scale
            if partial is not None:
                hT += load(x["partial"].at[:, own].T).astype(jnp.float32)
            vT = load(x["v"].at[:, own].T)
            scaled = (vT.astype(jnp.float32) * weights).astype(dtype)

            def rest(h_accumulator, C_accumulator, b=b, vT=vT, scaled=scaled, destination=destination):
                if P is not None:
                    products.add(h_accumulator, vT, x["P"].T)
                products.add(C_accumulator, scaled, x["k"])
                hT = products.read(h_accumulator, 1)
                store(hT.astype(dtype), out_tiles.at[wg * owned + b], outputs.at[pl.ds(index * L, L), destination], owned - 1)

            new.append(products.onto(rest, hT, CT[b] * decay)[1])
        ring.release(index)
        return new, following

    ring.start()
    CT = [products.zeros(R, rows) if C_initial is None else initial(b) for b in range(owned)]
    CT, _ = loop(p.NC, chunk, (CT, gamma[n, 0]))
    if C_last is not None:
        for b in range(owned):
            C_last[n, columns(b)[1]] = CT[b]
    plgpu.wait_smem_to_gmem(0)
    ring.drain()


def recurrent_fw_H(
    matQ: jax.Array,
    matV: jax.Array,
    scores: Scores,
    scaGamma: jax.Array,
    matC_initial: jax.Array | None,
    *,
    return_last: bool = True,
    store_every: int = 0,
    output_dtype: Any = None,
    call: StageCall,
) -> FusedScan:
    """Runs the stage: ``stages/recurrent_fw_H.py``."""
    p, tiles, dtype, R = call.problem, call.tiles, matQ.dtype, REGISTER_ROWS
    rows, warpgroups = state_rows(p.DHQK, tiles.siz_b_loop), tiles.num_warps // 4
    interpret = call.lowering is Lowering.MOSAIC_GPU_INTERPRET

    def tile(*shape):
        return plgpu.SMEM(shape, dtype, transforms=tile_transforms(shape[-1], dtype.itemsize))

    def slots(first_launch):
        depth, V = tiles.num_stages, tiles.siz_b_DHHV
        found = {"q": tile(depth, p.L, rows), "k": tile(depth, p.L, rows), "v": tile(depth, p.L, V)}
        found |= {"P": tile(depth, p.L, p.L)} if first_launch else {"partial": tile(depth, p.L, V)}
        return found | {name: plgpu.SMEM((depth, p.L), jnp.float32) for name in ("r", "abar")}

    C_last = jax.ShapeDtypeStruct((p.BNH, p.DHHV, rows), jnp.float32) if return_last else None
    states = jax.ShapeDtypeStruct((p.BNH, p.NC // store_every, p.DHQK, p.DHHV), dtype) if store_every else None
    found: dict[str, Any] = {"h": None}
    lasts = []
    for launch in range(blocks(p.DHQK, rows)):
        ring = slots(launch == 0)
        found = mosaic_call(
            functools.partial(
                _kernel,
                p=p,
                launch=launch,
                siz_b_DHHV=tiles.siz_b_DHHV,
                rows=rows,
                warpgroups=warpgroups,
                num_stages=tiles.num_stages,
                store_every=store_every,
                products=Products(interpret),
            ),
            name="recurrent_fw_H",
            grid={"head": p.BNH, "columns": blocks(p.DHHV, tiles.siz_b_DHHV)},
            warpgroups=warpgroups,
            outputs={"h": sequence_shape(matV, p.DHHV, dtype), "C_last": C_last, "C_states": states},
            scratch={
                "slots": ring,
                "barriers": ring_barriers(tiles.num_stages, copies=len(ring), readers=warpgroups),
                "out_tiles": tile(tiles.siz_b_DHHV // R, p.L, R),
                "state_tiles": tile(warpgroups, 2, R, R) if store_every else None,
            },
            interpret=interpret,
        )(
            q=matQ,
            k=scores.keys.array,
            v=matV,
            P=scores.matP if launch == 0 else None,
            r=scores.vecR,
            abar=jnp.ones_like(scores.vecR) if scores.keys.weights is None else scores.keys.weights,
            gamma=scaGamma,
            C_initial=None if matC_initial is None else matC_initial.mT,
            partial=found["h"],
        )
        lasts.append(found["C_last"])
    H = found["h"].astype(dtype if output_dtype is None else output_dtype)
    C_last = jnp.concatenate([x.mT for x in lasts], axis=1) if return_last else None
    return FusedScan(H, C_last, found["C_states"])


def _takes(tiles: StageConfig, p: Problem) -> bool:
    """A warpgroup has at most 64 x 256 floats of C. There are two of them.

    parallel_fw_P takes chunks of 64 steps alone.
    """
    warpgroups, rows, Vb, L = tiles.num_warps // 4, state_rows(p.DHQK, tiles.siz_b_loop), tiles.siz_b_DHHV, tiles.siz_b_LKV
    launches = p.DHQK // max(rows, 1)
    if warpgroups != 2 or p.BNH * (tiles.num_splits or 1) > HEADS or rows == 0 or launches > 2 or L % 64 or p.DHHV % Vb or Vb % (64 * warpgroups):
        return False
    # The first launch reads P, the second one h of the first. One launch alone stores states.
    a_stage = 2 * L * (2 * rows + Vb + (max(L, Vb) if launches > 1 else L)) + 8 * L
    states = 2 * warpgroups * 2 * 64 * 64 if launches == 1 else 0
    shared = tiles.num_stages * a_stage + 2 * L * Vb + states + 1024
    return Vb // (64 * warpgroups) * rows <= 256 and shared <= SHARED_BYTES


def _heuristic(p: Problem) -> StageConfig:
    return StageConfig(siz_b_LKV=64, siz_b_DHHV=128, siz_b_loop=256, num_warps=8, num_stages=2 if p.DHQK > 128 else 3)


KERNEL = kernel(
    search=dict(siz_b_LKV=(64,), siz_b_DHHV=(128, 256), siz_b_loop=(256,), num_warps=(8,), num_stages=(2, 3, 4)),
    heuristic=_heuristic,
    takes=_takes,
    stores_states=lambda tiles, p: state_rows(p.DHQK, tiles.siz_b_loop) == p.DHQK,
)
