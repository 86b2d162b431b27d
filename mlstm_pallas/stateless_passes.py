"""Forward and backward passes that read no states from memory: stages/walk.py has the walks that they are made of. The forward one stores
those that a backward pass of passes.py is to be given.

For the forward pass a sequence may be cut into segments, which the walk takes for heads of their own: where heads are few, they would not
fill a GPU. The state before each segment is made beforehand (segments.py).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.gate_gradients import chunk_sums
from mlstm_pallas.gates import vector_states
from mlstm_pallas.passes import gate_and_state_gradients, inner, row_gradients_of
from mlstm_pallas.plan import Inputs, KeptStates, Outputs, Plan, Residuals
from mlstm_pallas.segments import SegmentProducts, decays_in_segments, segment_states
from mlstm_pallas.stages.chunk_gates import chunk_gates
from mlstm_pallas.stages.parallel_bw_P import parallel_bw_P
from mlstm_pallas.stages.parallel_fw_P import key_sums, parallel_fw_P
from mlstm_pallas.stages.recurrence import segment_products
from mlstm_pallas.stages.recurrent_bw_dK import recurrent_bw_dK
from mlstm_pallas.stages.recurrent_bw_dQ import recurrent_bw_dQ
from mlstm_pallas.stages.recurrent_bw_dV import recurrent_bw_dV
from mlstm_pallas.stages.recurrent_fw_H import recurrent_fw_H


def forward(plan: Plan, interpret: bool, x: Inputs, products: SegmentProducts | None = None, kept: int = 0):
    """Outputs, z and the states of chunks of so many steps, where they are to be kept. products: of the segments, where they are known."""
    launch, precision = plan.launch(interpret), plan.config.dot_precision(x.q.dtype, interpret)
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, plan.input_gate, **launch)
    scores, z, norms = parallel_fw_P(x.q, x.k, gates, x.n_initial, normalize=plan.normalize, **plan.normaliser, **launch)
    C, gamma, n, every = x.c_initial, gates.scaGamma, plan.segments, kept // plan.problem.L
    if n > 1:
        added = None if products is None else products.of(n, gates.scaM_states)
        if added is None:
            decays = decays_in_segments(gamma, n, plan.problem.S)
            stage = plan.config.stage("recurrent_fw_C")
            of: dict[str, Any] = dict(problem=plan.problem, stage=stage, precision=precision, interpret=interpret)
            added = segment_products(scores.matK_scaled, x.v, decays, n, **of)
        C = segment_states(added, gamma, C)

    def cut(y):  # (B, NH, steps or chunks, ...) in segments, as heads of their own
        return y.reshape(y.shape[0], y.shape[1] * n, y.shape[2] // n, *y.shape[3:])

    q, v, scores, gamma = jax.tree.map(cut, (x.q, x.v, scores, gamma))
    C = None if C is None else C.reshape(*q.shape[:2], *C.shape[-2:])
    walks = dict(output_dtype=x.q.dtype, last=plan.last_states, store_every=every, **plan.of_segments.launch(interpret))
    h, C, *C_states = recurrent_fw_H(q, v, scores, gamma, C, **walks)
    last, states = None, None
    if C is not None:
        C = C.reshape(C.shape[0], -1, n, *C.shape[2:])[:, :, -1]
        last = C, norms[1], gates.scaM_states[..., -1]
    if kept:
        C_states = C_states[0].reshape(*x.q.shape[:2], gamma.shape[2] * n // every, *C_states[0].shape[-2:])
        states = KeptStates(C_states, norms[0][:, :, ::every], gates.scaM_states[..., ::every], C, norms[1])
    return (h.reshape(x.v.shape), last), z, states


def backward(plan: Plan, interpret: bool, residuals: Residuals, cotangents: Outputs) -> Inputs:
    """Gradients of the inputs. cotangents: of h and of the last states."""
    launch = plan.launch(interpret)
    x, h, z, _ = residuals
    x = lax.optimization_barrier(x)  # nothing that the forward pass made is kept for this one
    dh, (dC_last, dn_last, dm_last) = cotangents
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, plan.input_gate, **launch)
    rows = row_gradients_of(plan, dh, h, z, gates)
    # Of kbar as rounded, as C: what n and dn give and take is to be the same.
    n, n_last = vector_states(key_sums(x.k, gates, rounded=True, **launch), gates.scaGamma, x.n_initial)
    scores, norms, pairs = parallel_bw_P(x.q, x.k, x.v, dh, gates, rows, n if plan.normalize else None, **launch)
    added_dn = jnp.zeros_like(n) if norms.added_dn is None else norms.added_dn
    dn_behind, dn = vector_states(added_dn, gates.scaGamma, dn_last, backward=True)
    r = gates.vecW.reshape(x.i.shape) * plan.problem.qk_scale
    r = r if rows.vecInvDen is None else r * rows.vecInvDen
    abar = gates.vecAbar.reshape(x.i.shape)

    gamma = gates.scaGamma
    dq, from_state, C_last = recurrent_bw_dQ(x.v, dh, scores, r, gamma, x.c_initial, last=plan.last_states, **launch)
    dk, to_state, dC = recurrent_bw_dK(x.v, dh, scores, abar, gamma, dC_last, dn_behind, last=not plan.starts_empty, **launch)
    dv = recurrent_bw_dV(x.k, dh, scores, abar, gamma, dC_last, **launch)

    enters = jnp.zeros_like(x.m_initial) if plan.starts_empty else inner(dC, x.c_initial, 2) + inner(dn, x.n_initial)
    from_state = from_state if norms.from_norm is None else from_state + norms.from_norm
    resolution = 2.0**-16 if x.q.dtype == jnp.bfloat16 else 2.0**-22
    sums, through = chunk_sums(gates, *pairs, from_state, to_state, enters, resolution)
    last = dC_last, dn_last, dm_last, C_last, n_last
    return Inputs(dq, dk, dv, *gate_and_state_gradients(plan, x, gates, rows, sums, through, last, dC, dn))
