"""recurrent_bw_dC on Mosaic GPU: the recurrences of ``mosaic_gpu/recurrence.py``.

They weight queries and keys themselves. dh is weighted in place of q: in float16 r dh would fall
below the normal numbers, so there XLA weights q and k.
"""

import dataclasses
import functools

import jax.numpy as jnp

from mlstm_pallas.mosaic_gpu.limits import HEADS, SHARED_BYTES, kernel, state_rows
from mlstm_pallas.mosaic_gpu.parallel_bw_dQKV import by_chunk
from mlstm_pallas.mosaic_gpu.recurrence import (
    COLUMNS,
    H_STAGES,
    heuristic_rows,
    num_ctas,
    recurrences,
)
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import StageCall, StageConfig, Weighted
from mlstm_pallas.stages import recurrent_bw_dC as stage
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs

# CTAs of both recurrences, of an H200's 132 SMs. With fewer Triton's kernel is faster: it has
# blocks of 64 x 64 and splits sequences.
MIN_CTAS = 96


def _recurrences(name: str, *each: Recurrence, call: StageCall) -> list[RecurrenceOutputs]:
    if each[0].a.dtype == jnp.float16:
        each = tuple(dataclasses.replace(x, a=Weighted(x.a, x.r).product(), r=None) for x in each)
    return recurrences(name, *each, call=call)


recurrent_bw_dC = functools.partial(stage.recurrent_bw_dC, recurrences=_recurrences)


def _takes(tiles: StageConfig, p: Problem) -> bool:
    """Whether blocks fit. A stage is free when the next one's product runs. No sequence is split."""
    rows = state_rows(p.DHQK, tiles.siz_b_DHQK)
    if not 0 < rows <= 256 or p.DHHV % COLUMNS or p.L % 64 or tiles.num_stages < 2 or 2 * p.BNH > HEADS or (tiles.num_splits or 1) > 1:
        return False
    # Tiles of a, b, X and, where delta is computed here, of h; weights, and barriers. Arrays begin at multiples of 1024 bytes.
    h_stages = H_STAGES if by_chunk(p) else 0
    elements = 64 * (tiles.num_stages * (rows + COLUMNS) + h_stages * COLUMNS + 4 * 64)
    shared = 2 * elements + -(-tiles.num_stages * 64 * 4 // 1024) * 1024 + 1024
    return shared <= SHARED_BYTES


KERNEL = kernel(
    search=dict(siz_b_DHQK=(64, 128, 256), num_stages=(3, 4, 5, 6)),
    heuristic=lambda p: StageConfig(siz_b_DHQK=heuristic_rows(p, recurrences=2), num_stages=4),
    takes=_takes,
    pays=lambda tiles, p: 2 * num_ctas(state_rows(p.DHQK, tiles.siz_b_DHQK), p) >= MIN_CTAS,
)
