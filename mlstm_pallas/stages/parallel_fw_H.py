"""Stage parallel_fw_H: the outputs from the states at the chunk boundaries, all chunks in parallel.

    P_ts  = D_ts scale q_t . k_s        s <= t inside the chunk
    num_t = w_t scale C_c^T q_t + sum_s P_ts v_s
    z_t   = w_t scale n_c . q_t + sum_s P_ts
    h_t   = num_t / den_t

normaliser.py has den_t. Without a normaliser h_t is num_t, and z is not computed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mlstm_pallas.gates import ChunkGates, causal, decay_matrix
from mlstm_pallas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.stage import Launch, Stage


class Outputs(NamedTuple):
    matH: jax.Array  # (B * NH, S, DHHV) in the output dtype; the numerator without a normaliser
    vecZ: jax.Array | None  # (B * NH, S) float32, the signed z_t; None without a normaliser


def parallel_fw_H(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    gates: ChunkGates,
    matC_states: jax.Array,
    vecN_states: jax.Array,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    output_dtype: Any = None,
    call: Launch,
) -> Outputs:
    """Runs the stage.

    Args:
      matQ, matK: (B * NH, S, DHQK), matV: (B * NH, S, DHHV), in the kernel dtype.
      gates: of chunk_gates.
      matC_states, vecN_states: before each chunk, (B * NH, NC, DHQK, DHHV) in the kernel dtype and
        (B * NH, NC, DHQK) float32.
      output_dtype: of h; None: that of matQ.
    """
    output_dtype = matQ.dtype if output_dtype is None else output_dtype
    p, (q, k, v) = call.problem, map(call.chunks, (matQ, matK, matV))
    product = functools.partial(
        jnp.einsum, preferred_element_type=gates.vecW.dtype, precision=call.precision
    )

    # Masked after the product: a NaN in k reaches no earlier step.
    P = causal(product("nctk,ncsk->ncts", q, k) * (decay_matrix(gates) * p.qk_scale))
    w = query_scale(gates.vecW, p.qk_scale)
    num = product("nctk,nckv->nctv", q, matC_states) * w[..., None]
    num += product("ncts,ncsv->nctv", P.astype(q.dtype), v)
    z = None
    if normaliser is not None:
        z = jnp.sum(q.astype(w.dtype) * vecN_states[:, :, None], axis=-1) * w + jnp.sum(P, axis=-1)
        num = normaliser.normalise(num, z, gates.vecM)
    return Outputs(
        call.steps(num.astype(output_dtype), matV), None if z is None else z.reshape(p.BNH, p.S)
    )


STAGE = Stage(
    name="parallel_fw_H",
    inputs=("matQ", "matK", "matV", "chunk_gates", "matC_states", "vecN_states"),
)
