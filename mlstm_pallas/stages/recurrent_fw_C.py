"""Stage recurrent_fw_C: the states at the chunk boundaries.

    C_{c+1} = gamma_c C_c + sum_t abar_t k_t v_t^T        n_{c+1} = gamma_c n_c + sum_t abar_t k_t

It is a recurrence over the chunks, forward in time: ``recurrence.py``.
"""

from typing import Any, NamedTuple

from jax import Array

from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs, run


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


def recurrence(x: Operands, return_last: bool, call: Launch) -> Recurrence:
    """The recurrence that a lowering computes."""
    return Recurrence(
        x.matK,
        x.matV,
        x.scaGamma,
        x.matC_initial,
        return_last,
        backward=call.problem.reverse,
        r=x.vecAbar,
        vecX_initial=x.vecN_initial,
    )


def chunk_states(outputs: RecurrenceOutputs) -> ChunkStates:
    """The results of the stage, from those of ``recurrence``."""
    return ChunkStates(*outputs[:4])


def recurrent_fw_C(x: Operands, *, return_last: bool = True, call: Launch) -> ChunkStates:
    """Runs the stage.

    Args:
      return_last: whether to return the last C.
    """
    return chunk_states(run(recurrence(x, return_last, call), call))
