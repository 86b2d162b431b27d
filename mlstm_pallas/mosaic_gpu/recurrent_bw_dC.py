"""recurrent_bw_dC on Mosaic GPU: the recurrences of ``mosaic_gpu/recurrence.py``.

They weight queries and keys themselves. dh is weighted in place of q: in float16 r dh would fall
below the normal numbers, so there XLA weights q and k.
"""

import dataclasses
import functools

import jax.numpy as jnp

from mlstm_pallas.mosaic_gpu.limits import kernel, state_rows
from mlstm_pallas.mosaic_gpu.parallel_bw_dQKV import by_chunk
from mlstm_pallas.mosaic_gpu.recurrence import (
    fits,
    heuristic_rows,
    num_ctas,
    recurrences,
    splits_of,
)
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import StageCall, StageConfig, Weighted
from mlstm_pallas.stages import recurrent_bw_dC as stage
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs

# CTAs of both recurrences, of an H200's 132 SMs. With fewer Triton's kernel is faster: it has
# blocks of 64 x 64.
MIN_CTAS = 96


def _recurrences(name: str, *each: Recurrence, call: StageCall) -> list[RecurrenceOutputs]:
    if each[0].a.dtype == jnp.float16:
        each = tuple(dataclasses.replace(x, a=Weighted(x.a, x.r).product(), r=None) for x in each)
    return recurrences(name, *each, call=call)


recurrent_bw_dC = functools.partial(stage.recurrent_bw_dC, recurrences=_recurrences)


def _ctas(config: StageConfig, p: Problem) -> int:
    """Of both recurrences."""
    ctas = num_ctas(state_rows(p.DHQK, config.siz_b_DHQK), p)
    return 2 * ctas * splits_of(config, p, recurrences=2)


KERNEL = kernel(
    search=dict(siz_b_DHQK=(64, 128, 256), num_stages=(3, 4, 5, 6)),
    heuristic=lambda p: StageConfig(siz_b_DHQK=heuristic_rows(p, recurrences=2), num_stages=4),
    # With tiles of h where delta is computed here.
    takes=lambda config, p: fits(config, p, has_h=by_chunk(p)),
    pays=lambda config, p: _ctas(config, p) >= MIN_CTAS,
)
