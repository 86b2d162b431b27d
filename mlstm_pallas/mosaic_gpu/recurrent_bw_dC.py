"""recurrent_bw_dC on Mosaic GPU: the recurrences of ``mosaic_gpu/recurrence.py``.

They weight queries and keys themselves. dh is weighted in place of q: in float16 r dh would fall
below the normal numbers, so there XLA weights q and k.
"""

import dataclasses
import functools

import jax.numpy as jnp

from mlstm_pallas.mosaic_gpu.launch import shared_bytes
from mlstm_pallas.mosaic_gpu.limits import HEADS, KERNEL_DTYPE, SHARED_BYTES, kernel, state_rows
from mlstm_pallas.mosaic_gpu.parallel_bw_dQKV import by_chunk
from mlstm_pallas.mosaic_gpu.recurrence import (
    COLUMNS,
    heuristic_rows,
    num_ctas,
    recurrences,
    scratch,
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


def _takes(config: StageConfig, p: Problem) -> bool:
    """Whether blocks fit, with tiles of h where delta is computed here. No sequence is split."""
    rows = state_rows(p.DHQK, config.siz_b_DHQK)
    fits = 0 < rows <= 256 and p.DHHV % COLUMNS == 0 and p.L % 64 == 0 and 2 * p.BNH <= HEADS
    # A slot is free when the next step's product runs.
    if not fits or config.num_stages < 2 or (config.num_splits or 1) > 1:
        return False
    shapes = scratch(rows, config.num_stages, KERNEL_DTYPE, weighted=True, has_h=by_chunk(p))
    return shared_bytes(shapes) <= SHARED_BYTES


KERNEL = kernel(
    search=dict(siz_b_DHQK=(64, 128, 256), num_stages=(3, 4, 5, 6)),
    heuristic=lambda p: StageConfig(siz_b_DHQK=heuristic_rows(p, recurrences=2), num_stages=4),
    takes=_takes,
    pays=lambda config, p: 2 * num_ctas(state_rows(p.DHQK, config.siz_b_DHQK), p) >= MIN_CTAS,
)
