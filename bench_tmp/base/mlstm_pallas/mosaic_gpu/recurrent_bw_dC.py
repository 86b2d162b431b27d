"""recurrent_bw_dC on Mosaic GPU: the recurrences of ``mosaic_gpu/recurrence.py``.

They scale v and dh in registers instead of k and q. In float16 r dh would fall below the normal
numbers, so XLA scales q and k instead.
"""

import functools

import jax.numpy as jnp

from mlstm_pallas.mosaic_gpu.recurrence import Tiles, recurrences
from mlstm_pallas.stage import Launch
from mlstm_pallas.stages import recurrent_bw_dC as stage
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs

__all__ = ["Tiles", "recurrent_bw_dC"]


def _recurrences(name: str, *each: Recurrence, call: Launch) -> list[RecurrenceOutputs]:
    if each[0].a.dtype == jnp.float16:
        each = tuple(x.scaled() for x in each)
    return recurrences(name, *each, call=call)


recurrent_bw_dC = functools.partial(stage.recurrent_bw_dC, recurrences=_recurrences)
