"""recurrent_fw_C on Mosaic GPU: the recurrence of ``mosaic_gpu/recurrence.py``, which weights v."""

import functools

from mlstm_pallas.mosaic_gpu.limits import kernel
from mlstm_pallas.mosaic_gpu.recurrence import fits, heuristic_rows, recurrences
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import StageConfig
from mlstm_pallas.stages import recurrent_fw_C as stage

recurrent_fw_C = functools.partial(stage.recurrent_fw_C, recurrences=recurrences)


def _heuristic(p: Problem) -> StageConfig:
    rows = min(heuristic_rows(p, recurrences=1), 128)
    return StageConfig(siz_b_DHQK=rows, num_stages=6 if rows == 64 else 4)


KERNEL = kernel(
    search=dict(siz_b_DHQK=(64, 128), num_stages=(3, 4, 5, 6)),
    heuristic=_heuristic,
    takes=lambda config, p: fits(config, p, has_x=True),
)
