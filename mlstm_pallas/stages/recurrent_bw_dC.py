"""Stage recurrent_bw_dC: the gradients of the states at the chunk borders.

    dC_c = gamma_c dC_{c+1} + sum_t (w_t scale / den_t) q_t dh_t^T        dn_c = gamma_c dn_{c+1} + sum_t w_t scale dz_t q_t

Grid, ownership, FLOPs and bytes are those of the kernel in recurrence.py, run backward in time. With the states at hand it also makes
gamma_c (<C_c, dC_{c+1}> + n_c . dn_{c+1}), the part of the forget gates' gradient that passes through a whole chunk, from the tiles
that it stores.
"""

import jax
import jax.numpy as jnp

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gate_gradients import RowGradients
from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.recurrence import recurrence


def recurrent_bw_dC(
    matQ: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    rows: RowGradients,
    matDeltaC_last: jax.Array,
    vecDeltaN_last: jax.Array,
    matC_states: jax.Array | None,
    vecN_states: jax.Array | None,
    *,
    problem: Problem,
    config: KernelConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Launches the stage. Config: siz_b_LKV (rows of q and dh), siz_b_DHQK, siz_b_DHHV.

    Args:
      matQ, matDeltaH: (B, NH, S, DHQK), (B, NH, S, DHHV) in the kernel dtype.
      matDeltaC_last, vecDeltaN_last: gradients of the last states, float32.
      matC_states, vecN_states: as recurrent_fw_C stores them, every chunk. None: the product is not wanted, and no more than
        gamma_c is returned in its place.

    Returns:
      matDeltaC_states (B, NH, NC, DHQK, DHHV) in the kernel dtype and vecDeltaN_states (B, NH, NC, DHQK) float32: of the state after each
      chunk; the gradients of the initial C and n, float32; and scaThrough (B, NH, NC), the product above.
    """
    shape = gates.vecW.shape
    r = gates.vecW * problem.qk_scale
    if rows.vecInvDen is not None:
        r *= rows.vecInvDen.reshape(shape)
    dC, dn, dC_initial, dn_initial, *products = recurrence(
        "recurrent_bw_dC",
        matQ,
        matDeltaH,
        r,
        rows.vecDzDen if rows.vecInvDen is not None else jnp.zeros_like(r),
        gates.scaGamma,
        matDeltaC_last,
        vecDeltaN_last,
        other=matC_states,
        backward=True,
        problem=problem,
        stage=config.stage("recurrent_bw_dC"),
        precision=config.dot_precision(matQ.dtype, interpret),
        interpret=interpret,
    )
    through = gates.scaGamma
    if vecN_states is not None:
        through = through * (products[0] + jnp.sum(vecN_states * dn, axis=-1))
    return dC, dn, dC_initial, dn_initial, through
