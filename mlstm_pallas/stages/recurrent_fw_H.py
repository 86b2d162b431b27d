"""Stage recurrent_fw_H: the outputs by a fused scan, which keeps the state on the chip.

    h_t     = r_t C_c^T q_t + sum_s P_ts v_s
    C_{c+1} = gamma_c C_c + sum_s kbar_s v_s^T

parallel_fw_P computes P, r and kbar.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.chunk_list import ChunkList
from mlstm_pallas.gate_gradients import zero_states
from mlstm_pallas.stage import Launch, Stage
from mlstm_pallas.stages.parallel_fw_P import ScanOperands


class Operands(NamedTuple):
    matQ: Array  # (B * NH, S, DHQK) in the kernel dtype
    matV: Array  # (B * NH, S, DHHV)
    scan: ScanOperands
    scaGamma: Array  # (B * NH, NC) float32
    # (B * NH, DHQK, DHHV) float32, with a list of chunks (B, N, NH, DHQK, DHHV); None: zeros
    matC_initial: Array | None
    # None: chunk c of q, v and h begins at step c L. Everything else is in the chunks of the list.
    chunks: ChunkList | None = None


class FusedScan(NamedTuple):
    matH: Array  # (B * NH, S, DHHV) in the dtype of q
    matC_last: Array | None  # shaped as the initial one, float32; None without return_last
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

    if x.chunks is not None:
        return _in_list(x, x.chunks, step, return_last, call)
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


def _in_list(
    x: Operands, chunks: ChunkList, step: Any, return_last: bool, call: Launch
) -> FusedScan:
    """The scan over a list of chunks, which carries the states of all parts."""
    p = call.problem
    shape = p.BNH, chunks.N, p.DHQK, p.DHHV
    C = jnp.broadcast_to(zero_states(x.scaGamma[:, 0], *shape[2:])[:, None], shape)
    if x.matC_initial is not None:
        C = jnp.swapaxes(x.matC_initial, 1, 2).reshape(shape)
    C = jnp.pad(C, [(0, 0), (0, 1), (0, 0), (0, 0)])  # the rest
    heads = jnp.arange(p.BNH)

    def entry(C: Array, operands: Any) -> tuple[Array, Array]:
        part, size, *chunk = operands
        before = C[heads, part]
        after, (h, _) = step(before, chunk)
        return C.at[heads, part].set(jnp.where((size > 0)[:, None, None], after, before)), h

    q, v = (chunks.gather(y, p.L) for y in (x.matQ, x.matV))
    kbar, P, r = map(call.chunks, (x.scan.keys.product(), x.scan.matP, x.scan.vecR))
    operands = chunks.part_of_entries(), chunks.entries.sizes, q, kbar, v, P, r, x.scaGamma
    C, h = lax.scan(entry, C, tuple(jnp.moveaxis(y, 1, 0) for y in operands))
    H = chunks.scatter(jnp.moveaxis(h, 0, 1).astype(x.matQ.dtype), x.matV, p.L)
    last = jnp.swapaxes(C[:, :-1].reshape(p.B, p.NH, *shape[1:]), 1, 2)
    return FusedScan(H, last if return_last else None, None)


STAGE = Stage("recurrent_fw_H", Operands, fused=True)
