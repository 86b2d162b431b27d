"""recurrent_bw_dC in Triton: the recurrences of ``triton/recurrence.py``, of scaled operands."""

import functools

from mlstm_pallas.stage import Launch
from mlstm_pallas.stages import recurrent_bw_dC as stage
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs
from mlstm_pallas.triton import recurrence
from mlstm_pallas.triton.recurrence import Tiles

__all__ = ["Tiles", "recurrent_bw_dC"]


def _of_scaled(name: str, *each: Recurrence, call: Launch) -> list[RecurrenceOutputs]:
    return recurrence.recurrences(name, *(x.scaled() for x in each), call=call)


recurrent_bw_dC = functools.partial(stage.recurrent_bw_dC, recurrences=_of_scaled)
