"""Stage recurrent_bw_dQ: the gradient of q, without a state in memory (the walk is in walk.py).

dq_t = r_t C_c dh_t + g_t n_c + sum_s scale dP_ts k_s        C_{c+1} = gamma_c C_c + sum_s kbar_s v_s^T        (dP, kbar: parallel_bw_P)
"""

import jax

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.parallel_bw_P import GradientScores
from mlstm_pallas.stages.walk import Walk, walk


def recurrent_bw_dQ(
    matK: jax.Array,
    matV: jax.Array,
    matDeltaH: jax.Array,
    scores: GradientScores,
    vecR: jax.Array,
    vecG: jax.Array | None,
    scaGamma: jax.Array,
    matC_initial: jax.Array,
    vecN_states: jax.Array | None,
    *,
    problem: Problem,
    config: KernelConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches the stage. Config: siz_b_DHQK (columns of C^T), siz_b_DHHV (rows of a tile), siz_b_loop (rows a launch);
    siz_b_LKV is the chunk that its caller gives the problem.

    Args:
      matK, matV, matDeltaH: in the kernel dtype.
      scores, scaGamma: of chunks of L steps; (B, NH, NC).
      vecR, vecG: w scale / den and w scale dz, (B, NH, S) float32.
      matC_initial, vecN_states: (B, NH, DHQK, DHHV), (B, NH, NC, DHQK), float32; vecG and vecN_states None without a normaliser.

    Returns:
      matDeltaQ (B, NH, S, DHQK) in the kernel dtype; qbar_t . C_c dh_t (B, NH, S) and the last C, float32.
    """
    dq, C_last, weighed = walk(
        "recurrent_bw_dQ",
        Walk(
            read=matDeltaH,
            write=matV,
            values=scores.matK_scaled,
            added=matK,
            tile=scores.matDeltaP,
            r=vecR,
            gamma=scaGamma,
            initial=matC_initial,
            x=vecN_states,
            g=vecG,
            weigh=scores.matQ_scaled,
            turned=True,
        ),
        problem=problem,
        config=config,
        output_dtype=matK.dtype,
        interpret=interpret,
    )
    return dq, weighed, C_last
