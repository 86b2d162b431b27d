"""Stage recurrent_fw_H: the outputs by a fused scan, which keeps the state on the chip.

    h_t     = r_t C_c^T q_t + sum_s (P_ts / den_t) v_s
    C_{c+1} = gamma_c C_c + sum_s kbar_s v_s^T

parallel_fw_P computes P_ts / den_t, r and kbar.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.operands.chunk_list import ChunkList, chunks_by_length
from mlstm_pallas.stages.parallel_fw_P import ScoresAndKeys


class Operands(NamedTuple):
    matQ: Array  # (B * NH, S, DHQK) in the kernel dtype
    matV: Array  # (B * NH, S, DHV)
    scores_and_keys: ScoresAndKeys
    scaGamma: Array  # (B * NH, NC) float32
    # (B * NH, DHQK, DHV) float32, with a list of chunks (B, N, NH, DHQK, DHV), of one segment
    # either; None: zeros
    matC_initial: Array | None
    # None: chunk c of q, v and h begins at step c L. Everything else is in the chunks of the list.
    chunks: ChunkList | None = None


class Outputs(NamedTuple):
    matH: Array  # (B * NH, S, DHV) in the dtype of q
    # float32, without a list (B * NH, DHQK, DHV), else (B, N, NH, DHQK, DHV); None without
    # return_last
    matC_last: Array | None
    # (B * NH, NC / store_every, DHQK, DHV) in the kernel dtype; None without store_every
    matC_states: Array | None


def recurrent_fw_H(
    x: Operands,
    *,
    return_last: bool = True,
    store_every: int = 0,
    call: Launch,
) -> Outputs:
    """Runs the stage.

    Args:
      return_last: whether to return the last C.
      store_every: n, a divisor of NC: return C before chunks 0, n, 2n, ...; 0: before none. A
        kernel whose state needs several launches refuses it.
    """
    p, chunks, heads = call.problem, x.chunks, jnp.arange(call.problem.BNH)
    if chunks is None:
        S = x.matQ.shape[1]
        chunks = chunks_by_length(jnp.full(p.BNH, S, jnp.int32), S, p)
    shape = p.BNH, chunks.N, p.DHQK, p.DHV
    if x.matC_initial is None:
        C = jnp.broadcast_to(jnp.zeros_like(x.scaGamma[:, :1, None, None]), shape)
    else:
        C = x.matC_initial.reshape(p.B, chunks.N, p.NH, *shape[2:])
        C = jnp.swapaxes(C, 1, 2).reshape(shape)
    q, v = (chunks.gather(y, p.L) for y in (x.matQ, x.matV))
    parts, sizes = chunks.entry_parts, chunks.entries.sizes
    C = jnp.pad(C, [(0, 0), (0, 1), (0, 0), (0, 0)])  # the padding

    def step(states: Array, chunk: Any) -> tuple[Array, Any]:
        """From the states of all parts; the chunk belongs to one of them."""
        part, size, q, kbar, v, P, r, gamma = chunk
        C = states[heads, part]
        h = weighted(r[..., None], call.product("ntk,nkv->ntv", q, C.astype(q.dtype)), p)
        h += call.product("nts,nsv->ntv", P, v)
        after = weighted(gamma[:, None, None], C, p) + call.product("nsk,nsv->nkv", kbar, v)
        after = jnp.where((size > 0)[:, None, None], after, C)
        return states.at[heads, part].set(after), (h, C.astype(q.dtype) if store_every else None)

    P, keys, r, _ = x.scores_and_keys
    kbar, P, r = map(call.chunks, (keys.product(), P, r))
    operands = parts, sizes, q, kbar, v, P, r, x.scaGamma
    C, (h, states) = lax.scan(
        step, C, tuple(jnp.moveaxis(y, 1, 0) for y in operands), reverse=p.reverse
    )
    H, last = chunks.scatter(jnp.moveaxis(h, 0, 1).astype(x.matQ.dtype), x.matV, p.L), None
    if return_last:
        last = jnp.swapaxes(C[:, :-1].reshape(p.B, p.NH, *shape[1:]), 1, 2)
        last = last.reshape(p.BNH, *shape[2:]) if x.chunks is None else last
    stored = None
    if store_every:
        stored = jnp.moveaxis(states, 0, 1)[:, p.memory_index(0, store_every) :: store_every]
    return Outputs(H, last, stored)
