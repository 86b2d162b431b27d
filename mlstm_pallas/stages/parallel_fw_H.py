"""Stage parallel_fw_H: the outputs from the states at the chunk boundaries, all chunks in parallel.

    P_ts  = D_ts scale q_t . k_s        s <= t inside the chunk
    num_t = w_t scale C_c^T q_t + sum_s P_ts v_s
    z_t   = w_t scale n_c . q_t + sum_s P_ts
    h_t   = num_t / den_t

normaliser.py has den_t. Without a normaliser h_t is num_t, and z is not computed.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas.gates import ChunkGates
from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.formulas.scores import causal_scores, decays, tile_steps
from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.launches.launch import Launch


class Operands(NamedTuple):
    matQ: Array  # (B * NH, S, DHQK) in the kernel dtype, like all matrices
    matK: Array  # (B * NH, S, DHQK)
    matV: Array  # (B * NH, S, DHV)
    gates: ChunkGates
    matC_states: Array  # (B * NH, NC, DHQK, DHV) before each chunk
    vecN_states: Array  # (B * NH, NC, DHQK) before each chunk, float32


class Outputs(NamedTuple):
    matH: Array  # (B * NH, S, DHV) in the output dtype; the numerator without a normaliser
    vecZ: Array | None  # (B * NH, S) float32, the signed z_t; None without a normaliser


def parallel_fw_H(
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    output_dtype: Any = None,
    call: Launch,
) -> Outputs:
    """Runs the stage; h has output_dtype, by default the dtype of matQ."""
    output_dtype = x.matQ.dtype if output_dtype is None else output_dtype
    p, gates, (q, k, v) = call.problem, x.gates, map(call.chunks, (x.matQ, x.matK, x.matV))
    qk = call.product("nctk,ncsk->ncts", q, k)
    t, s = tile_steps(qk.shape, 0, p)
    mask = s <= t
    D = decays(gates.vecE, gates.vecU, mask, in_kernel=False)
    P = causal_scores(qk, D, mask, p)
    w = query_scale(gates.vecW, p.qk_scale)
    num = weighted(w[..., None], call.product("nctk,nckv->nctv", q, x.matC_states), p)
    num += call.product("ncts,ncsv->nctv", P.astype(q.dtype), v)
    z = None
    if normaliser is not None:
        z = weighted(w, jnp.sum(q.astype(w.dtype) * x.vecN_states[:, :, None], axis=-1), p)
        z += jnp.sum(P, axis=-1)
        num = normaliser.normalise(num, z, gates.vecM)
    return Outputs(
        call.unchunked(num.astype(output_dtype), x.matV),
        None if z is None else z.reshape(p.BNH, p.S),
    )
