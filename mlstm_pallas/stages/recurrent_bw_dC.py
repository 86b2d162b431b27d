"""Stage recurrent_bw_dC: the gradients of the states at the chunk borders.

    dC_c = gamma_c dC_{c+1} + sum_t qbar_t dh_t^T        qbar_t = (w_t scale / den_t) q_t

Grid, ownership, FLOPs and bytes are those of the kernel in recurrence.py, run backward in time.
"""

import jax

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.recurrence import recurrence


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
    dC, dC_initial = recurrence(
        "recurrent_bw_dC",
        matQ_scaled,
        matDeltaH,
        scaGamma,
        matDeltaC_last,
        last=last,
        backward=True,
        problem=problem,
        stage=config.stage("recurrent_bw_dC"),
        precision=config.dot_precision(matDeltaH.dtype, interpret),
        interpret=interpret,
    )
    return dC, dC_initial
