"""recurrent_fw_C in Triton: the recurrence of ``triton/recurrence.py``."""

import functools

from mlstm_pallas.stages import recurrent_fw_C as stage
from mlstm_pallas.triton.recurrence import Tiles, recurrences

__all__ = ["Tiles", "recurrent_fw_C"]

recurrent_fw_C = functools.partial(stage.recurrent_fw_C, recurrences=recurrences)
