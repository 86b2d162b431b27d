"""Stage recurrent_bw_dC: the gradients of the states at the chunk boundaries.

    dC_c = gamma_c dC_{c+1} + sum_t qbar_t dh_t^T        C_{c+1} = gamma_c C_c + sum_t kbar_t v_t^T

The operands are qbar = r q and kbar = abar k, or q and k with these weights. C is recomputed if the
forward pass did not keep it. Both are recurrences over the chunks, dC backward in time
(``recurrence.py``). They share a launch, because with few heads one alone does not fill a GPU.

delta_t = dh_t . h_t is computed here before chunk_gradients, because no earlier stage needs it.
"""

from typing import Any, NamedTuple

from jax import Array

from mlstm_pallas.formulas.gate_gradients import inner
from mlstm_pallas.formulas.rows import by_head
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.operands.chunk_list import ChunkList
from mlstm_pallas.operands.scaled_rows import ScaledRows
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs, run


class Operands(NamedTuple):
    queries: ScaledRows  # (B * NH, S, DHQK) in the kernel dtype
    matDeltaH: Array  # (B * NH, S, DHV)
    scaGamma: Array  # (B * NH, NC) float32
    matDeltaC_last: Array | None  # (B * NH, DHQK, DHV) float32; None: zeros
    keys: ScaledRows | None  # (B * NH, S, DHQK); None: C is not computed
    matV: Array | None  # (B * NH, S, DHV)
    matC_initial: Array | None  # (B * NH, DHQK, DHV) float32; None: zeros
    matH: Array | None = None  # (B * NH, S, DHV); None: delta is not computed
    active: ChunkList | None = None  # the chunks with steps are active; None: all


class StateGradients(NamedTuple):
    """Gradients and states at the chunk boundaries; None: not computed.

    dC, C and delta of inactive chunks may be undefined.
    """

    matDeltaC_states: Array  # (B * NH, NC, DHQK, DHV) after each chunk, in the kernel dtype
    matDeltaC_initial: Any  # (B * NH, DHQK, DHV) float32
    matC_states: Any  # (B * NH, NC, DHQK, DHV) before each chunk, in the kernel dtype
    matC_last: Any  # (B * NH, DHQK, DHV) float32
    vecDelta: Any  # (B * NH, S) float32


def recurrences(
    x: Operands, return_initial: bool, return_last: bool, call: Launch
) -> list[Recurrence]:
    """The recurrences that a lowering computes, in one launch: C, if it is recomputed, and dC."""
    (q, r), keys, gamma, reverse = x.queries, x.keys, x.scaGamma, call.problem.reverse
    num_active = None if x.active is None else x.active.num_active
    operands = q, x.matDeltaH, gamma, x.matDeltaC_last, return_initial
    each = [Recurrence(*operands, backward=not reverse, r=r, h=x.matH, num_active=num_active)]
    if keys is not None and x.matV is not None:
        operands = keys.array, x.matV, gamma, x.matC_initial, return_last
        each.insert(
            0, Recurrence(*operands, backward=reverse, r=keys.weights, num_active=num_active)
        )
    return each


def state_gradients(x: Operands, outputs: list[RecurrenceOutputs], call: Launch) -> StateGradients:
    """The results of the stage, from those of ``recurrences``."""
    *C, dC = outputs
    delta = dC.inner
    if x.matH is not None and delta is None:
        delta = by_head(inner(x.matDeltaH, x.matH), call.problem.S)
    C_states, C_last = C[0][:2] if C else (None, None)
    return StateGradients(dC.matX, dC.matX_last, C_states, C_last, delta)


def recurrent_bw_dC(
    x: Operands, *, return_initial: bool = True, return_last: bool = True, call: Launch
) -> StateGradients:
    """Runs the stage.

    Args:
      return_initial: whether to return the gradient of the initial C.
      return_last: whether to return the last C.
    """
    each = recurrences(x, return_initial, return_last, call)
    return state_gradients(x, [run(y, call) for y in each], call)
