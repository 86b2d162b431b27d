"""Stage recurrent_fw_C: the states at the chunk borders.

    C_{c+1} = gamma_c C_c + sum_t abar_t k_t v_t^T        n_{c+1} = gamma_c n_c + sum_t abar_t k_t

Grid, ownership, FLOPs and bytes are those of the kernel in recurrence.py, run forward in time.
"""

from typing import Any

import jax

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.recurrence import Recurrence, recurrences


def recurrent_fw_C(
    matK: jax.Array,
    matV: jax.Array,
    scaGamma: jax.Array,
    matC_initial: jax.Array | None,
    vecAbar: jax.Array | None = None,
    vecN_initial: jax.Array | None = None,
    *,
    problem: Problem,
    config: KernelConfig,
    save_every: int = 1,
    last: bool = True,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """Launches the stage. Config: siz_b_LKV, siz_b_DHQK, siz_b_DHHV, num_segments.

    Args:
      matK, matV: (B, NH, S, DHQK), (B, NH, S, DHHV) in the kernel dtype.
      scaGamma: (B, NH, NC), matC_initial: (B, NH, DHQK, DHHV), None: zeros; float32.
      vecAbar, vecN_initial: (B, NH, S), (B, NH, DHQK), float32; none where matK comes scaled, as parallel_bw_dP makes it.
      save_every: only the states before chunks 0, n, 2n, ... are stored.
      last: whether the last C is wanted.

    Returns:
      matC_states (B, NH, ceil(NC / save_every), DHQK, DHHV) in the kernel dtype, and the last C, float32, shaped as the initial one, or
      None; with vecAbar also vecN_states (B, NH, ceil(NC / save_every), DHQK) and the last n, float32.
    """
    (made,) = recurrences(
        "recurrent_fw_C",
        Recurrence(matK, matV, scaGamma, matC_initial, last=last, r=vecAbar, x_initial=vecN_initial),
        problem=problem,
        stage=config.stage("recurrent_fw_C"),
        precision=config.dot_precision(matV.dtype, interpret),
        save_every=save_every,
        interpret=interpret,
    )
    return made
