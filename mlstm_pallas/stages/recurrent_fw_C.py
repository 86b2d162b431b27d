"""Stage recurrent_fw_C: the states at the chunk borders.

    C_{c+1} = gamma_c C_c + sum_t abar_t k_t v_t^T        n_{c+1} = gamma_c n_c + sum_t abar_t k_t

Grid, ownership, FLOPs and bytes are those of the kernel in recurrence.py, run forward in time.
"""

import jax

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.recurrence import recurrence


def recurrent_fw_C(
    matK: jax.Array,
    matV: jax.Array,
    gates: ChunkGates,
    matC_initial: jax.Array,
    vecN_initial: jax.Array,
    *,
    problem: Problem,
    config: KernelConfig,
    save_every: int = 1,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Launches the stage. Config: siz_b_LKV, siz_b_DHQK, siz_b_DHHV.

    Args:
      matK, matV: (B, NH, S, DHQK), (B, NH, S, DHHV) in the kernel dtype.
      gates: of chunks of L steps.
      matC_initial, vecN_initial: (B, NH, DHQK, DHHV), (B, NH, DHQK), float32.
      save_every: only the states before chunks 0, n, 2n, ... are stored.

    Returns:
      matC_states (B, NH, ceil(NC / save_every), DHQK, DHHV) in the kernel dtype, vecN_states (B, NH, ceil(NC / save_every), DHQK) float32,
      and the last C and n, float32, shaped as the initial ones.
    """
    C, n, C_last, n_last = recurrence(
        "recurrent_fw_C",
        matK,
        matV,
        gates.vecAbar,
        None,
        gates.scaGamma,
        matC_initial,
        vecN_initial,
        backward=False,
        problem=problem,
        stage=config.stage("recurrent_fw_C"),
        precision=config.dot_precision(matK.dtype, interpret),
        save_every=save_every,
        interpret=interpret,
    )
    return C, n, C_last, n_last
