"""Stage recurrent_bw_dV: the gradient of v, without a state in memory (the walk is in walk.py).

dv_s = abar_s dC_{c+1}^T k_s + sum_t P_ts dh_t        dC_c = gamma_c dC_{c+1} + sum_t qbar_t dh_t^T        (P, qbar: parallel_bw_P)
"""

import jax

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.parallel_bw_P import GradientScores
from mlstm_pallas.stages.walk import Walk, walk


def recurrent_bw_dV(
    matK: jax.Array,
    matDeltaH: jax.Array,
    scores: GradientScores,
    vecAbar: jax.Array,
    scaGamma: jax.Array,
    matDeltaC_last: jax.Array | None,
    *,
    problem: Problem,
    config: KernelConfig,
    interpret: bool = False,
) -> jax.Array:
    """Launches the stage. Config: siz_b_DHHV (columns of dC), siz_b_DHQK (rows of a tile), siz_b_loop (rows a launch).

    Args:
      matK: (B, NH, S, DHQK), matDeltaH: (B, NH, S, DHHV), in the kernel dtype.
      scores, scaGamma: of chunks of L steps; (B, NH, NC).
      vecAbar: (B, NH, S) float32.
      matDeltaC_last: (B, NH, DHQK, DHHV), float32; None: zeros.

    Returns:
      matDeltaV (B, NH, S, DHHV) in the kernel dtype.
    """
    dv, _ = walk(
        "recurrent_bw_dV",
        Walk(
            read=matK,
            write=scores.matQ_scaled,
            values=matDeltaH,
            tile=scores.matP,
            r=vecAbar,
            gamma=scaGamma,
            initial=matDeltaC_last,
            last=False,
            backward=True,
        ),
        problem=problem,
        config=config,
        output_dtype=matK.dtype,
        interpret=interpret,
    )
    return dv
