"""Stage recurrent_fw_H: the outputs, without a state in memory (the walk is in walk.py).

h_t = r_t C_c^T q_t + sum_s P_ts v_s        C_{c+1} = gamma_c C_c + sum_s kbar_s v_s^T        (P, r, kbar: parallel_fw_P)
"""

from typing import Any

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
    store_every: int = 0,
    output_dtype: jnp.dtype,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """Launches the stage. Config: siz_b_DHHV (columns of C), siz_b_DHQK (rows of a tile), siz_b_loop (rows a launch);
    siz_b_LKV is the chunk that its caller gives the problem.

    Args:
      matQ: (B, NH, S, DHQK), matV: (B, NH, S, DHHV), in the kernel dtype.
      scores, scaGamma: of chunks of L steps; (B, NH, NC).
      matC_initial: (B, NH, DHQK, DHHV), float32; None: zeros.
      last: whether the last C is wanted.
      store_every: C before chunks 0, n, 2n, ... is wanted, n a divisor of NC; 0: nowhere. For siz_b_loop >= DHQK.

    Returns:
      matH (B, NH, S, DHHV) in output_dtype, the last C (B, NH, DHQK, DHHV), float32, or None, and with store_every matC_states
      (B, NH, NC / store_every, DHQK, DHHV) in the kernel dtype.
    """
    return walk(
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
            store_every=store_every,
        ),
        problem=problem,
        config=config,
        output_dtype=output_dtype,
        interpret=interpret,
    )
