"""Stage recurrent_bw_dC: the gradients of the states at the chunk borders.

    dC_c = gamma_c dC_{c+1} + sum_t qbar_t dh_t^T        qbar_t = (w_t scale / den_t) q_t

Grid, ownership, FLOPs and bytes are those of the kernel in recurrence.py, run backward in time. Where the backward pass makes the states
anew, it does so in the same launch: neither recurrence needs the other, and of few heads one alone does not fill a GPU.
"""

from typing import Any

import jax

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.recurrence import Recurrence, recurrences


def _launch(*given: Recurrence, problem: Problem, config: KernelConfig, interpret: bool) -> list[tuple[Any, ...]]:
    options: dict[str, Any] = dict(precision=config.dot_precision(given[0].a.dtype, interpret), interpret=interpret)
    return recurrences("recurrent_bw_dC", *given, problem=problem, stage=config.stage("recurrent_bw_dC"), **options)


def recurrent_bw_dC(
    matQ_scaled: jax.Array,
    matDeltaH: jax.Array,
    scaGamma: jax.Array,
    matDeltaC_last: jax.Array | None,
    *,
    problem: Problem,
    config: KernelConfig,
    last: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Launches the stage. Config: siz_b_LKV (rows of q and dh), siz_b_DHQK, siz_b_DHHV, num_segments.

    Args:
      matQ_scaled, matDeltaH: (B, NH, S, DHQK), (B, NH, S, DHHV) in the kernel dtype.
      scaGamma: (B, NH, NC), matDeltaC_last: gradient of the last C, (B, NH, DHQK, DHHV), None: zeros; float32.
      last: whether the gradient of the initial C is wanted.

    Returns:
      matDeltaC_states (B, NH, NC, DHQK, DHHV) in the kernel dtype, of the state after each chunk, and the gradient of the initial C
      or None, float32.
    """
    of_dC = Recurrence(matQ_scaled, matDeltaH, scaGamma, matDeltaC_last, last=last, backward=True)
    (made,) = _launch(of_dC, problem=problem, config=config, interpret=interpret)
    return made


def recurrent_bw_C_dC(of_C: Recurrence, of_dC: Recurrence, *, problem: Problem, config: KernelConfig, interpret: bool = False):
    """recurrent_fw_C and recurrent_bw_dC in one launch, of the latter's config: what both return, of scaled keys and queries."""
    (C, C_last), (dC, dC_initial) = _launch(of_C, of_dC, problem=problem, config=config, interpret=interpret)
    return C, C_last, dC, dC_initial
