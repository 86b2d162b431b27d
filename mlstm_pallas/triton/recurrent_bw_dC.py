"""recurrent_bw_dC in Triton: the recurrences of ``triton/recurrence.py``, of weighted operands."""

import dataclasses
import functools

from mlstm_pallas.stage import Launch, ScaledRows
from mlstm_pallas.stages import recurrent_bw_dC as stage
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs
from mlstm_pallas.triton import recurrence
from mlstm_pallas.triton.recurrence import Tiles

__all__ = ["Tiles", "recurrent_bw_dC"]


def _of_weighted(name: str, *each: Recurrence, call: Launch) -> list[RecurrenceOutputs]:
    weighted = (dataclasses.replace(x, a=ScaledRows(x.a, x.r).product(), r=None) for x in each)
    return recurrence.recurrences(name, *weighted, call=call)


recurrent_bw_dC = functools.partial(stage.recurrent_bw_dC, recurrences=_of_weighted)
