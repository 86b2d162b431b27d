"""Stage recurrent_fw_H: the outputs by a fused scan, which keeps the state on the chip.

    h_t     = r_t C_c^T q_t + sum_s P_ts v_s
    C_{c+1} = gamma_c C_c + sum_s kbar_s v_s^T

P, r and kbar are those of parallel_fw_P.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.gate_gradients import zero_states
from mlstm_pallas.stage import (
    Launch,
    Stage,
)
from mlstm_pallas.stages.parallel_fw_P import Scores


class FusedScan(NamedTuple):
    matH: jax.Array  # (B * NH, S, DHHV) in the dtype of q
    matC_last: jax.Array | None  # (B * NH, DHQK, DHHV) float32; None without return_last
    # (B * NH, NC / store_every, DHQK, DHHV) in the kernel dtype; None without store_every
    matC_states: jax.Array | None


def recurrent_fw_H(
    matQ: jax.Array,
    matV: jax.Array,
    scores: Scores,
    scaGamma: jax.Array,
    matC_initial: jax.Array | None,
    *,
    return_last: bool = True,
    store_every: int = 0,
    call: Launch,
) -> FusedScan:
    """Runs the stage.

    Args:
      matQ: (B * NH, S, DHQK), matV: (B * NH, S, DHHV), in the kernel dtype.
      scores, scaGamma: of parallel_fw_P, and (B * NH, NC).
      matC_initial: (B * NH, DHQK, DHHV), float32; None: zeros.
      return_last: whether to return the last C.
      store_every: n, a divisor of NC: return C before chunks 0, n, 2n, ...; 0: before none. A
        kernel whose state needs several launches refuses it.
    """
    p, acc = call.problem, scaGamma.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=acc, precision=call.precision)

    def step(C: jax.Array, chunk: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        q, kbar, v, P, r, gamma = chunk
        h = product("ntk,nkv->ntv", q, C.astype(q.dtype)) * r[..., None]
        h += product("nts,nsv->ntv", P, v)
        return gamma[:, None, None] * C + product("nsk,nsv->nkv", kbar, v), (h, C.astype(q.dtype))

    C = zero_states(scaGamma[:, 0], p.DHQK, p.DHHV) if matC_initial is None else matC_initial
    chunks = [
        *map(call.chunks, (matQ, scores.keys.product(), matV, scores.matP, scores.vecR)),
        scaGamma,
    ]
    C, (h, states) = lax.scan(step, C, tuple(jnp.moveaxis(x, 1, 0) for x in chunks))
    H = call.steps(jnp.moveaxis(h, 0, 1).astype(matQ.dtype), matV)
    return FusedScan(
        H,
        C if return_last else None,
        jnp.moveaxis(states, 0, 1)[:, ::store_every] if store_every else None,
    )


STAGE = Stage(
    name="recurrent_fw_H",
    inputs=("matQ", "matV", "parallel_fw_P", "scaGamma", "matC_initial"),
    fused=True,
)
