"""Stage recurrent_fw_H: the outputs by a fused scan, which keeps the state on the chip.

    h_t     = r_t C_c^T q_t + sum_s P_ts v_s
    C_{c+1} = gamma_c C_c + sum_s kbar_s v_s^T

parallel_fw_P computes P, r and kbar.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.gate_gradients import zero_states
from mlstm_pallas.stage import Launch, Stage
from mlstm_pallas.stages.parallel_fw_P import ScanOperands


class Operands(NamedTuple):
    matQ: Array  # (B * NH, S, DHQK) in the kernel dtype
    matV: Array  # (B * NH, S, DHHV)
    scan: ScanOperands
    scaGamma: Array  # (B * NH, NC) float32
    matC_initial: Array | None  # (B * NH, DHQK, DHHV) float32; None: zeros


class FusedScan(NamedTuple):
    matH: Array  # (B * NH, S, DHHV) in the dtype of q
    matC_last: Array | None  # (B * NH, DHQK, DHHV) float32; None without return_last
    # (B * NH, NC / store_every, DHQK, DHHV) in the kernel dtype; None without store_every
    matC_states: Array | None


def recurrent_fw_H(
    x: Operands,
    *,
    return_last: bool = True,
    store_every: int = 0,
    call: Launch,
) -> FusedScan:
    """Runs the stage.

    Args:
      return_last: whether to return the last C.
      store_every: n, a divisor of NC: return C before chunks 0, n, 2n, ...; 0: before none. A
        kernel whose state needs several launches refuses it.
    """
    p, acc = call.problem, x.scaGamma.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=acc, precision=call.precision)

    def step(C: Array, chunk: Any) -> tuple[Array, tuple[Array, Array]]:
        q, kbar, v, P, r, gamma = chunk
        h = product("ntk,nkv->ntv", q, C.astype(q.dtype)) * r[..., None]
        h += product("nts,nsv->ntv", P, v)
        return gamma[:, None, None] * C + product("nsk,nsv->nkv", kbar, v), (h, C.astype(q.dtype))

    zeros = zero_states(x.scaGamma[:, 0], p.DHQK, p.DHHV)
    C = zeros if x.matC_initial is None else x.matC_initial
    steps = x.matQ, x.scan.keys.product(), x.matV, x.scan.matP, x.scan.vecR
    chunks = *map(call.chunks, steps), x.scaGamma
    C, (h, states) = lax.scan(step, C, tuple(jnp.moveaxis(y, 1, 0) for y in chunks))
    H = call.steps(jnp.moveaxis(h, 0, 1).astype(x.matQ.dtype), x.matV)
    return FusedScan(
        H,
        C if return_last else None,
        jnp.moveaxis(states, 0, 1)[:, ::store_every] if store_every else None,
    )


STAGE = Stage("recurrent_fw_H", Operands, fused=True)
