"""parallel_fw_P on Mosaic GPU: the scores, r, z and n of ``stages/parallel_fw_P.py``, without scaled keys.

n follows from the sums of step_sums.py, by the recurrence of vector_states.py.

Grid (B * NH, NC). A CTA is one warpgroup and owns one chunk of 64 steps. It has no pipeline: up to DHQK = 256 an SM has three CTAs, and
one's copies run while another one computes.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.mosaic_gpu.launch import (
    BY_COLUMNS,
    BY_ROWS,
    REGISTER_ROWS,
    head_of,
    load,
    mosaic_call,
    plgpu,
    tile_transforms,
)
from mlstm_pallas.mosaic_gpu.limits import HEADS, SHARED_BYTES, kernel
from mlstm_pallas.mosaic_gpu.products import Products
from mlstm_pallas.mosaic_gpu.step_sums import step_sums
from mlstm_pallas.mosaic_gpu.vector_states import vector_states
from mlstm_pallas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering, StageCall, StageConfig, Weighted
from mlstm_pallas.stages.parallel_fw_P import Scores
from mlstm_pallas.tiles import divide, loop, remainder

LOG2_E = float(np.log2(np.e))
COLUMNS = 256  # at most, of a copy


def _kernel(
    q,  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    k,
    n,  # (B * NH, NC, DHQK), absent without a normaliser
    e_hi,  # (B * NH, S), as all that follow
    e_lo,
    u_hi,
    u_lo,
    w,
    m,  # absent where the floor does not need it
    P,  # out (B * NH, S, L)
    r,  # out (B * NH, S)
    z,  # out (B * NH, S), absent without a normaliser
    q_tiles,  # shared (copies, L, columns)
    k_tiles,
    P_tile,  # shared (L, L)
    full,
    *,
    p: Problem,
    columns: int,
    scale: float,
    normaliser: Normaliser | None,
    products: Products,
):
    head, chunk, L = lax.axis_index("head"), lax.axis_index("chunk"), REGISTER_ROWS
    steps = pl.ds(pl.multiple_of(chunk * L, L), L)
    copies = p.DHQK // columns
    for x, tiles in ((q, q_tiles), (k, k_tiles)):
        for j in range(copies):
            plgpu.copy_gmem_to_smem(head_of(x, head, p).at[steps, j * columns : (j + 1) * columns], tiles.at[j], full)

    def vector(x, layout):
        return load(x.at[head, steps], layout, optimized=False)

    def across(x):
        return lax.broadcast_in_dim(x, (L, L), [0])

    def down(x):
        return lax.broadcast_in_dim(x, (L, L), [1])

    hi = down(vector(e_hi, BY_COLUMNS)) - across(vector(u_hi, BY_ROWS))
    lo = down(vector(e_lo, BY_COLUMNS)) - across(vector(u_lo, BY_ROWS))
    row_scale = query_scale(vector(w, BY_ROWS), scale)
    m_rows = None if m is None else vector(m, BY_ROWS)
    D = jnp.exp2(hi * LOG2_E + lo * LOG2_E)
    plgpu.barrier_wait(full)

    def scores(accumulator):
        for j in range(copies):
            products.add(accumulator, q_tiles.at[j], k_tiles.at[j].T)

    S = products.from_zeros(scores, L, L)
    t, s = (plgpu.broadcasted_iota(jnp.int32, (L, L), axis, layout=plgpu.Layout.WGMMA) for axis in range(2))
    # Masked after the product, not before: a NaN in k reaches no earlier step.
    tile = jnp.where(s <= t, S * (D * scale), 0.0)
    if normaliser is not None:

        def add(j, total):  # a loop, not unrolled: with all of n in registers an SM would have two CTAs
            at = pl.ds(pl.multiple_of(remainder(j, columns // L) * L, L), L)
            x = load(q_tiles.at[divide(j, columns // L), :, at]).astype(jnp.float32)
            norm = load(n.at[head, chunk, pl.ds(pl.multiple_of(j * L, L), L)], BY_COLUMNS, optimized=False)
            return total + x * down(norm)

        q_n = loop(p.DHQK // L, add, products.zeros(L, L))
        sums = jnp.sum(tile + q_n * across(row_scale), axis=1)
        inv_den = 1.0 / normaliser.denominator(sums, m_rows)
        tile, row_scale = tile * across(inv_den), row_scale * inv_den
        z.at[head, steps][...] = sums
    r.at[head, steps][...] = row_scale
    products.store(P_tile, tile.astype(q.dtype))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(P_tile, P.at[head, steps])
    plgpu.wait_smem_to_gmem(0)


def parallel_fw_P(
    matQ: jax.Array,
    matK: jax.Array,
    gates: ChunkGates,
    vecN_initial: jax.Array,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    call: StageCall,
) -> Scores:
    """Runs the stage: ``stages/parallel_fw_P.py``. The keys come with their weights."""
    p, dtype, L = call.problem, matQ.dtype, REGISTER_ROWS
    interpret = call.lowering is Lowering.MOSAIC_GPU_INTERPRET
    columns = next(size for size in (COLUMNS, 192, 128, 64) if p.DHQK % size == 0)
    copies, g = p.DHQK // columns, gates.per_step()
    n, n_last = vector_states(step_sums(matK, g.vecAbar, call=call), gates.scaGamma, vecN_initial, call=call)
    needs_m, vector = normaliser is not None and normaliser.floor_needs_m, jax.ShapeDtypeStruct((p.BNH, p.S), jnp.float32)
    operand = plgpu.SMEM((copies, L, columns), dtype, transforms=tile_transforms(columns, dtype.itemsize))
    found = mosaic_call(
        functools.partial(_kernel, p=p, columns=columns, scale=p.qk_scale, normaliser=normaliser, products=Products(interpret)),
        name="parallel_fw_P",
        grid={"head": p.BNH, "chunk": p.NC},
        warpgroups=1,
        outputs={"P": jax.ShapeDtypeStruct((p.BNH, p.S, L), dtype), "r": vector, "z": None if normaliser is None else vector},
        scratch={
            "q_tiles": operand,
            "k_tiles": operand,
            "P_tile": plgpu.SMEM((L, L), dtype, transforms=tile_transforms(L, dtype.itemsize)),
            "full": plgpu.Barrier(num_arrivals=2 * copies),
        },
        interpret=interpret,
    )(
        q=matQ,
        k=matK,
        n=None if normaliser is None else n,
        e_hi=g.vecE[0],
        e_lo=g.vecE[1],
        u_hi=g.vecU[0],
        u_lo=g.vecU[1],
        w=g.vecW,
        m=g.vecM if needs_m else None,
    )
    return Scores(found["P"], Weighted(matK, g.vecAbar), found["r"], found["z"], n, n_last)


def _takes(tiles: StageConfig, p: Problem) -> bool:
    """q and k of a chunk are in shared memory, whole."""
    shared = 2 * (2 * p.L * p.DHQK + p.L * p.L) + 1024
    return p.BNH <= HEADS and p.L == REGISTER_ROWS and p.DHQK % 64 == 0 and shared <= SHARED_BYTES


KERNEL = kernel(search={}, heuristic=lambda p: StageConfig(), takes=_takes)
