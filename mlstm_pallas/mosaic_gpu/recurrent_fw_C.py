"""recurrent_fw_C on Mosaic GPU: the recurrence of ``mosaic_gpu/recurrence.py``, which weights v.

n follows from the sums of step_sums.py, by the recurrence of vector_states.py.
"""

import dataclasses
import functools

from mlstm_pallas.mosaic_gpu.limits import kernel
from mlstm_pallas.mosaic_gpu.recurrence import fits, heuristic_rows, recurrences
from mlstm_pallas.mosaic_gpu.step_sums import step_sums
from mlstm_pallas.mosaic_gpu.vector_states import vector_states
from mlstm_pallas.stage import StageCall, StageConfig
from mlstm_pallas.stages import recurrent_fw_C as stage
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs


def _recurrences(name: str, of_C: Recurrence, *, call: StageCall) -> list[RecurrenceOutputs]:
    added = step_sums(of_C.a, of_C.r, call=call)
    n, n_last = vector_states(added, of_C.gamma, of_C.x_initial, call=call)
    (C,) = recurrences(name, dataclasses.replace(of_C, x_initial=None), call=call)
    return [C._replace(x=n, x_last=n_last)]


recurrent_fw_C = functools.partial(stage.recurrent_fw_C, recurrences=_recurrences)

KERNEL = kernel(
    search=dict(siz_b_DHQK=(64, 128, 256), num_stages=(3, 4, 5, 6)),
    heuristic=lambda p: StageConfig(siz_b_DHQK=heuristic_rows(p, recurrences=1), num_stages=4),
    takes=fits,
)
