"""parallel_fw_P on Mosaic GPU: the scores, r, z and n of ``stages/parallel_fw_P.py``.

Keys are not scaled here.

Grid (B * NH, NC). A CTA is one warpgroup and owns one chunk of 64 steps. It has no pipeline: up to
DHQK = 256 an SM has three CTAs, and one's copies run while another one computes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.mosaic_gpu import products
from mlstm_pallas.mosaic_gpu.fragments import (
    across_columns,
    across_rows,
    decay_tile,
    load_by_rows,
    rows_and_columns,
)
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
from mlstm_pallas.mosaic_gpu.limits import HEADS, HopperTiles
from mlstm_pallas.mosaic_gpu.tile_copies import copy_in, head_of
from mlstm_pallas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Launch, ScaledRows
from mlstm_pallas.stages.parallel_fw_P import Operands, ScanOperands
from mlstm_pallas.tiles import divide, loop, remainder

L = REGISTER_ROWS
COLUMNS = 256, 192, 128, 64  # of choice of a copy


def _kernel(
    q: Any,  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    k: Any,
    n: Any,  # (B * NH, NC, DHQK), absent without a normaliser
    e_hi: Any,  # (B * NH, S), as all that follow
    e_lo: Any,
    u_hi: Any,
    u_lo: Any,
    w: Any,
    m: Any,  # absent where the floor does not need it
    P: Any,  # out (B * NH, S, L)
    r: Any,  # out (B * NH, S)
    z: Any,  # out (B * NH, S), absent without a normaliser
    q_tiles: Any,  # shared (copies, L, columns)
    k_tiles: Any,
    P_tile: Any,  # shared (L, L)
    full: Any,
    *,
    p: Problem,
    normaliser: Normaliser | None,
) -> None:
    head, chunk = lax.axis_index("head"), lax.axis_index("chunk")
    steps = block(chunk, L)
    copies, _, columns = q_tiles.shape
    for x, tiles in ((q, q_tiles), (k, k_tiles)):
        for j in range(copies):
            source = head_of(x, head, p).at[steps, j * columns : (j + 1) * columns]
            copy_in(source, tiles.at[j], full)
    e = (load(x.at[head, steps], BY_COLUMNS, optimized=False) for x in (e_hi, e_lo))
    D = decay_tile(e, (load_by_rows(x, head, steps) for x in (u_hi, u_lo)))
    row_scale = query_scale(load_by_rows(w, head, steps), p.qk_scale)
    m_rows = load_by_rows(m, head, steps)
    plgpu.barrier_wait(full)

    def scores(accumulator):
        for j in range(copies):
            products.add(accumulator, q_tiles.at[j], k_tiles.at[j].T)

    S = products.from_zeros(scores, L, L)
    t, s = rows_and_columns(L, L)
    # Masked after the product, not before: a NaN in k reaches no earlier step.
    tile = jnp.where(s <= t, S * (D * p.qk_scale), 0.0)
    if normaliser is not None:

        def add(j, total):
            # A loop, not unrolled: with all of n in registers an SM would have two CTAs.
            in_tile = block(remainder(j, columns // L), L)
            x = load(q_tiles.at[divide(j, columns // L), :, in_tile]).astype(jnp.float32)
            norm = load(n.at[head, chunk, block(j, L)], BY_COLUMNS, optimized=False)
            return total + x * across_rows(norm)

        q_n = loop(p.DHQK // L, add, products.zeros(L, L))
        sums = jnp.sum(tile + q_n * across_columns(row_scale), axis=1)
        inv_den = 1.0 / normaliser.denominator(sums, m_rows)
        tile, row_scale = tile * across_columns(inv_den), row_scale * inv_den
        z.at[head, steps][...] = sums
    r.at[head, steps][...] = row_scale
    products.store(P_tile, tile.astype(q.dtype))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(P_tile, P.at[head, steps])
    plgpu.wait_smem_to_gmem(0)


def scratch(p: Problem, dtype: Any) -> dict[str, Any]:
    """Shared memory of the kernel."""
    columns = next(size for size in COLUMNS if p.DHQK % size == 0)
    copies = p.DHQK // columns
    operand = shared_tiles(copies, L, columns, dtype=dtype)
    return {
        "q_tiles": operand,
        "k_tiles": operand,
        "P_tile": shared_tiles(L, L, dtype=dtype),
        "full": plgpu.Barrier(num_arrivals=2 * copies),
    }


def parallel_fw_P(
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    call: Launch,
) -> ScanOperands:
    """Runs the stage: ``stages/parallel_fw_P.py``. The keys come with their weights."""
    matQ, matK, gates, vecN_states = x
    p, dtype, g = call.problem, matQ.dtype, gates.per_step()
    per_step = float32(p.BNH, p.S)
    y = mosaic_call(
        functools.partial(_kernel, p=p, normaliser=normaliser),
        name="parallel_fw_P",
        grid=dict(zip(("head", "chunk"), call.tiles.grid(p), strict=True)),
        warpgroups=1,
        outputs={
            "P": jax.ShapeDtypeStruct((p.BNH, p.S, L), dtype),
            "r": per_step,
            "z": None if normaliser is None else per_step,
        },
        scratch=scratch(p, dtype),
        interpret=call.interpret,
    )(
        q=matQ,
        k=matK,
        n=None if normaliser is None else vecN_states,
        e_hi=g.vecE[0],
        e_lo=g.vecE[1],
        u_hi=g.vecU[0],
        u_lo=g.vecU[1],
        w=g.vecW,
        m=g.vecM if normaliser is not None and normaliser.floor_needs_m else None,
    )
    return ScanOperands(y["P"], ScaledRows(matK, g.vecAbar), y["r"], y["z"])


@dataclasses.dataclass(frozen=True)
class Tiles(HopperTiles):
    def grid(self, p: Problem, **asked: Any) -> tuple[int, ...]:
        return p.BNH, p.NC

    def shared_bytes(self, p: Problem, dtype: Any, **asked: Any) -> int:
        return shared_bytes(scratch(p, dtype), has_sum=True)

    def divides(self, p: Problem, **asked: Any) -> bool:
        """q and k of a chunk are in shared memory, whole."""
        return p.BNH <= HEADS and p.L == L and p.DHQK % 64 == 0
