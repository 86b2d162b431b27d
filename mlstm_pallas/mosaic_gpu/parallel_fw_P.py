"""parallel_fw_P on Mosaic GPU: the scores, r and z of ``stages/parallel_fw_P.py``.

The kernel does not scale the keys.

Grid (B * NH * NC). A CTA is one warpgroup and owns one chunk of 64 steps. It has no pipeline,
because up to DHQK = 256 an SM holds three CTAs, and the copies of one run while another one
computes.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.formulas.scores import causal_scores, decays, tile_steps
from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.mosaic_gpu.common import products
from mlstm_pallas.mosaic_gpu.common.copies import copy_in, copy_out, head_of
from mlstm_pallas.mosaic_gpu.common.fragments import (
    across_columns,
    load_by_rows,
    q_times_n,
    score_operands,
    tile_iota,
)
from mlstm_pallas.mosaic_gpu.common.launch import (
    BY_COLUMNS,
    BY_ROWS,
    WG_ROWS,
    atom_columns,
    block,
    float32,
    load,
    mosaic_call,
    plgpu,
    shared_tiles,
    unravel,
)
from mlstm_pallas.mosaic_gpu.common.limits import HopperTiles
from mlstm_pallas.operands.scaled_rows import ScaledRows
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages.parallel_fw_P import Operands, ScoresAndKeys


def _kernel(entries, vecR, vecZ, *, p: Problem, **refs) -> None:
    """The chunk of a CTA, or zeros of r and z for an entry without steps."""
    head, chunk = unravel(lax.axis_index("program"), p.NC)
    run = functools.partial(_chunk, head, chunk, entries, vecR, vecZ, p=p, **refs)
    if entries is None:
        return run()
    size = entries.sizes[head, chunk]
    pl.when(size > 0)(run)

    @pl.when(size == 0)
    def _() -> None:
        for x in (vecR, vecZ):
            if x is not None:
                zeros = products.zeros(WG_ROWS, layout=BY_ROWS)
                x.at[head, block(chunk, WG_ROWS)][...] = zeros


def _chunk(
    head,
    chunk,
    entries,  # of ``ChunkList``: (B * NH, NC) each, None without a list
    vecR,  # output (B * NH, S)
    vecZ,  # output (B * NH, S), None without a normaliser
    matQ,  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    matK,
    vecN_states,  # (B * NH, NC, DHQK), None without a normaliser
    vecE,  # hi and lo, (B * NH, S) each, like u, w and m
    vecU,  # hi and lo
    vecW,
    vecM,  # None if the floor does not need it
    matP,  # output (B * NH, S, L)
    q_smem,  # (L, DHQK)
    k_smem,
    P_smem,  # (L, L)
    full,
    *,
    p: Problem,
    normaliser: Normaliser | None,
) -> None:
    steps = in_row = block(chunk, WG_ROWS)
    if entries is not None:
        in_row = pl.ds(entries.steps[head, chunk], WG_ROWS)
    for x, tile in ((matQ, q_smem), (matK, k_smem)):
        in_head = head_of(x, head, p, any_step=entries is not None)
        copy_in(in_head.at[in_row], tile, full)
    e = (load(x.at[head, steps], BY_COLUMNS, optimized=False) for x in vecE)
    D = decays(e, (load_by_rows(x, head, steps) for x in vecU))
    row_scale = query_scale(load_by_rows(vecW, head, steps), p.qk_scale)
    m = load_by_rows(vecM, head, steps)
    plgpu.barrier_wait(full)

    S = products.from_zeros(lambda acc: products.add(acc, q_smem, k_smem.T), WG_ROWS, WG_ROWS)
    t, s = tile_steps(S.shape, 0, p, tile_iota)
    P = causal_scores(S, D, s <= t, p)
    if normaliser is not None:
        atom = atom_columns(p)
        # A loop, because unrolled, with all of n in registers, an SM would hold only two CTAs.
        q_n = q_times_n(lambda x: q_smem.at[:, block(x, atom)], atom, vecN_states, head, chunk)
        z = products.sum_over_columns(P) + weighted(row_scale, products.sum_over_columns(q_n), p)
        inv_den = 1.0 / normaliser.denominator(z, m)
        P, row_scale = P * across_columns(inv_den), row_scale * inv_den
        vecZ.at[head, steps][...] = z
    vecR.at[head, steps][...] = row_scale
    products.store(P_smem, P.astype(matQ.dtype))
    plgpu.commit_smem()
    copy_out(P_smem, matP.at[head, steps])
    plgpu.wait_smem_to_gmem(0)


def parallel_fw_P(
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    call: Launch,
) -> ScoresAndKeys:
    """Runs the stage: ``stages/parallel_fw_P.py``. It returns unscaled keys with their weights."""
    p, dtype = call.problem, x.matQ.dtype
    per_step = float32(p.BNH, p.S)
    y = mosaic_call(
        functools.partial(_kernel, p=p, normaliser=normaliser),
        name="parallel_fw_P",
        grid={"program": p.BNH * p.NC},
        outputs={
            "matP": jax.ShapeDtypeStruct((p.BNH, p.S, WG_ROWS), dtype),
            "vecR": per_step,
            "vecZ": None if normaliser is None else per_step,
        },
        scratch=call.tiles.scratch(p, dtype),
    )(
        entries=None if x.chunks is None else x.chunks.entries,
        **score_operands(x, normaliser),
    )
    return ScoresAndKeys(
        y["matP"], ScaledRows(x.matK, x.gates.per_step().vecAbar), y["vecR"], y["vecZ"]
    )


class ParallelFwPTiles(HopperTiles):
    def grid(self, p: Problem) -> tuple[int, ...]:
        return p.BNH, p.NC

    def scratch(self, p: Problem, dtype) -> dict[str, Any]:
        operand = shared_tiles(WG_ROWS, p.DHQK, dtype=dtype, atom=atom_columns(p))
        return {
            "q_smem": operand,
            "k_smem": operand,
            "P_smem": shared_tiles(WG_ROWS, WG_ROWS, dtype=dtype),
            "full": plgpu.Barrier(num_arrivals=2),
        }

    def divides(self, p: Problem) -> bool:
        """Shared memory holds all of q and k of a chunk."""
        return p.L == WG_ROWS
