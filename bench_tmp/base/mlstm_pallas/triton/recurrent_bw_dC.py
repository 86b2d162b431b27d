"""recurrent_bw_dC in Triton: the recurrences of ``triton/recurrence.py``."""

import functools

from mlstm_pallas.stages import recurrent_bw_dC as stage
from mlstm_pallas.triton.recurrence import Tiles, recurrences

__all__ = ["Tiles", "recurrent_bw_dC"]

recurrent_bw_dC = functools.partial(stage.recurrent_bw_dC, recurrences=recurrences)
