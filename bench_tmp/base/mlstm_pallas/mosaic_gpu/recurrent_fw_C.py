"""recurrent_fw_C on Mosaic GPU: the recurrence of ``mosaic_gpu/recurrence.py``, which weights v."""

import functools

from mlstm_pallas.mosaic_gpu.recurrence import Tiles, recurrences
from mlstm_pallas.stages import recurrent_fw_C as stage

__all__ = ["Tiles", "recurrent_fw_C"]

recurrent_fw_C = functools.partial(stage.recurrent_fw_C, recurrences=recurrences)
