"""Stage recurrent_fw_H: the outputs, without a state in memory (the walk is in walk.py).

h_t = r_t C_c^T q_t + sum_s P_ts v_s        C_{c+1} = gamma_c C_c + sum_s kbar_s v_s^T        (P, r, kbar: parallel_fw_P)
"""

import jax
import jax.numpy as jnp

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.parallel_fw_P import Scores
from mlstm_pallas.stages.walk import Walk, walk


def recurrent_fw_H(
    matQ: jax.Array,
    matV: jax.Array,
    scores: Scores,
    scaGamma: jax.Array,
    matC_initial: jax.Array | None,
    *,
    problem: Problem,
    config: KernelConfig,
    last: bool = True,
    output_dtype: jnp.dtype,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Launches the stage. Config: siz_b_DHHV (columns of C), siz_b_DHQK (rows of a tile), siz_b_loop (rows a launch);
    siz_b_LKV is the chunk that its caller gives the problem.

    Args:
      matQ: (B, NH, S, DHQK), matV: (B, NH, S, DHHV), in the kernel dtype.
      scores, scaGamma: of chunks of L steps; (B, NH, NC).
      matC_initial: (B, NH, DHQK, DHHV), float32; None: zeros.
      last: whether the last C is wanted.

    Returns:
      matH (B, NH, S, DHHV) in output_dtype and the last C (B, NH, DHQK, DHHV), float32, or None.
    """
    h, C_last = walk(
        "recurrent_fw_H",
        Walk(
            read=matQ,
            write=scores.matK_scaled,
            values=matV,
            tile=scores.matP,
            r=scores.vecR,
            gamma=scaGamma,
            initial=matC_initial,
            last=last,
        ),
        problem=problem,
        config=config,
        output_dtype=output_dtype,
        interpret=interpret,
    )
    return h, C_last
