"""Stage recurrent_bw_dQ: the gradient of q, without a state in memory (the walk is in walk.py).

dq_t = r_t C_c dh_t + own_t        C_{c+1} = gamma_c C_c + sum_s kbar_s v_s^T        (own, kbar: parallel_bw_P)
"""

from typing import Any

import jax

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.parallel_bw_P import GradientScores
from mlstm_pallas.stages.walk import Walk, walk


def recurrent_bw_dQ(
    matV: jax.Array,
    matDeltaH: jax.Array,
    scores: GradientScores,
    vecR: jax.Array,
    scaGamma: jax.Array,
    matC_initial: jax.Array | None,
    *,
    problem: Problem,
    config: KernelConfig,
    last: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, Any]:
    """Launches the stage. Config: siz_b_DHQK (columns of C^T), siz_b_DHHV (rows of a tile), siz_b_loop (rows a launch);
    siz_b_LKV is the chunk that its caller gives the problem.

    Args:
      matV, matDeltaH: in the kernel dtype.
      scores, scaGamma: of chunks of L steps; (B, NH, NC).
      vecR: w scale / den, (B, NH, S) float32.
      matC_initial: (B, NH, DHQK, DHHV), float32; None: zeros.
      last: whether the last C is wanted.

    Returns:
      matDeltaQ (B, NH, S, DHQK) in the kernel dtype; qbar_t . C_c dh_t (B, NH, S) and the last C or None, float32.
    """
    dq, C_last, weighed = walk(
        "recurrent_bw_dQ",
        Walk(
            read=matDeltaH,
            write=matV,
            values=scores.matK_scaled,
            own=scores.matDeltaQ_own,
            r=vecR,
            gamma=scaGamma,
            initial=matC_initial,
            last=last,
            weigh=scores.matQ_scaled,
            turned=True,
        ),
        problem=problem,
        config=config,
        output_dtype=matV.dtype,
        interpret=interpret,
    )
    return dq, weighed, C_last
