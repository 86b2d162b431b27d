"""Stage recurrent_fw_C: the states at the chunk boundaries.

    C_{c+1} = gamma_c C_c + sum_t abar_t k_t v_t^T        n_{c+1} = gamma_c n_c + sum_t abar_t k_t

It is a recurrence over the chunks, forward in time: ``recurrence.py``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from mlstm_pallas.stages.launch import Launch
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs, recurrences


class Operands(NamedTuple):
    matK: Array  # (B * NH, S, DHQK) in the kernel dtype
    matV: Array  # (B * NH, S, DHV)
    vecAbar: Array  # (B * NH, S) float32, like what follows
    scaGamma: Array  # (B * NH, NC)
    matC_initial: Array | None  # (B * NH, DHQK, DHV); None: zeros
    vecN_initial: Array  # (B * NH, DHQK)


class ChunkStates(NamedTuple):
    matC_states: Array  # (B * NH, NC, DHQK, DHV) before each chunk, in the kernel dtype
    matC_last: Any  # (B * NH, DHQK, DHV) float32, like what follows; None without return_last
    vecN_states: Array  # (B * NH, NC, DHQK)
    vecN_last: Array  # (B * NH, DHQK)


def recurrent_fw_C(
    x: Operands,
    *,
    return_last: bool = True,
    recurrences: Callable[..., list[RecurrenceOutputs]] = recurrences,
    call: Launch,
) -> ChunkStates:
    """Runs the stage.

    Args:
      return_last: whether to return the last C.
      recurrences: ``recurrence.recurrences`` of a lowering.
    """
    C_recurrence = Recurrence(
        x.matK,
        x.matV,
        x.scaGamma,
        x.matC_initial,
        return_last,
        backward=call.problem.reverse,
        r=x.vecAbar,
        vecX_initial=x.vecN_initial,
    )
    (outputs,) = recurrences("recurrent_fw_C", C_recurrence, call=call)
    return ChunkStates(*outputs[:4])
