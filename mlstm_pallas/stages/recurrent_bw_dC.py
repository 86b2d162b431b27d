"""Stage recurrent_bw_dC: the gradients of the states at the chunk boundaries.

    dC_c = gamma_c dC_{c+1} + sum_t qbar_t dh_t^T        C_{c+1} = gamma_c C_c + sum_t kbar_t v_t^T

qbar = r q and kbar = abar k come weighted, or with their weights. C is computed where the forward
pass did not keep it. Both are recurrences over the chunks, dC backward in time (``recurrence.py``).
They are independent and share a launch, since with few heads one alone does not fill a GPU.

delta_t = dh_t . h_t is computed here where parallel_bw_dQKV computes P and dP, as no stage before
this one then needs it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mlstm_pallas.stage import Launch, Stage, Weighted
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs, recurrences


class StateGradients(NamedTuple):
    """Gradients and states at the chunk boundaries; None: not computed."""

    matDeltaC_states: jax.Array  # (B * NH, NC, DHQK, DHHV) after each chunk, in the kernel dtype
    matDeltaC_initial: Any  # (B * NH, DHQK, DHHV) float32
    matC_states: Any  # (B * NH, NC, DHQK, DHHV) before each chunk, in the kernel dtype
    matC_last: Any  # (B * NH, DHQK, DHHV) float32
    vecDelta: Any  # (B * NH, S) float32


def recurrent_bw_dC(
    queries: Weighted,
    matDeltaH: jax.Array,
    scaGamma: jax.Array,
    matDeltaC_last: jax.Array | None,
    keys: Weighted | None = None,
    matV: jax.Array | None = None,
    matC_initial: jax.Array | None = None,
    *,
    matH: jax.Array | None = None,
    return_initial: bool = True,
    return_last: bool = True,
    recurrences: Callable[..., list[RecurrenceOutputs]] = recurrences,
    call: Launch,
) -> StateGradients:
    """Runs the stage.

    Args:
      queries, matDeltaH: (B * NH, S, DHQK), (B * NH, S, DHHV) in the kernel dtype.
      scaGamma: (B * NH, NC) float32.
      matDeltaC_last: gradient of the last C, (B * NH, DHQK, DHHV) float32; None: zeros.
      keys, matV: shaped as queries and matDeltaH; None: C is not computed.
      matC_initial: (B * NH, DHQK, DHHV) float32; None: zeros.
      matH: shaped as matDeltaH; None: delta is not computed.
      return_initial: whether to return the gradient of the initial C.
      return_last: whether to return the last C.
      recurrences: ``recurrence.recurrences`` of a lowering.
    """
    q, r = queries
    of_dC = Recurrence(
        q, matDeltaH, scaGamma, matDeltaC_last, return_initial, backward=True, r=r, h=matH
    )
    if keys is None or matV is None:
        (dC,) = recurrences("recurrent_bw_dC", of_dC, call=call)
        return StateGradients(dC.X, dC.X_last, None, None, dC.inner)
    of_C = Recurrence(keys.array, matV, scaGamma, matC_initial, return_last, r=keys.weights)
    C, dC = recurrences("recurrent_bw_dC", of_C, of_dC, call=call)
    return StateGradients(dC.X, dC.X_last, C.X, C.X_last, dC.inner)


STAGE = Stage(
    name="recurrent_bw_dC",
    inputs=("queries", "matDeltaH", "scaGamma", "matDeltaC_last", "keys", "matV", "matC_initial"),
)
