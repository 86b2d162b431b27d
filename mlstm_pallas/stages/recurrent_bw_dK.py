"""Stage recurrent_bw_dK: the gradient of k, without a state in memory (the walk is in walk.py).

dk_s = abar_s (dC_{c+1} v_s + dn_{c+1}) + own_s        dC_c = gamma_c dC_{c+1} + sum_t qbar_t dh_t^T
(own, qbar: parallel_bw_P)
"""

from typing import Any

import jax

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.parallel_bw_P import GradientScores
from mlstm_pallas.stages.walk import Walk, walk


def recurrent_bw_dK(
    matV: jax.Array,
    matDeltaH: jax.Array,
    scores: GradientScores,
    vecAbar: jax.Array,
    scaGamma: jax.Array,
    matDeltaC_last: jax.Array | None,
    vecDeltaN_states: jax.Array,
    *,
    problem: Problem,
    config: KernelConfig,
    last: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, Any]:
    """Launches the stage. Config: siz_b_DHQK (columns of dC^T), siz_b_DHHV (rows of a tile), siz_b_loop (rows a launch).

    Args:
      matV, matDeltaH: in the kernel dtype.
      scores, scaGamma: of chunks of L steps; (B, NH, NC).
      vecAbar: (B, NH, S) float32.
      matDeltaC_last: (B, NH, DHQK, DHHV), None: zeros; vecDeltaN_states: behind each chunk (B, NH, NC, DHQK), float32.
      last: whether the gradient of the initial C is wanted.

    Returns:
      matDeltaK (B, NH, S, DHQK) in the kernel dtype; kbar_s . (dC_{c+1} v_s + dn_{c+1}) (B, NH, S) and the gradient of the initial C or
      None, float32.
    """
    dk, dC, weighed = walk(
        "recurrent_bw_dK",
        Walk(
            read=matV,
            write=matDeltaH,
            values=scores.matQ_scaled,
            own=scores.matDeltaK_own,
            r=vecAbar,
            gamma=scaGamma,
            initial=matDeltaC_last,
            last=last,
            x=vecDeltaN_states,
            weigh=scores.matK_scaled,
            turned=True,
            backward=True,
        ),
        problem=problem,
        config=config,
        output_dtype=matV.dtype,
        interpret=interpret,
    )
    return dk, weighed, dC
