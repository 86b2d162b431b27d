"""Forward and backward passes without states in memory: stages/walk.py has the walks that they are made of.

A sequence may be cut into segments, which the walks take for heads of their own: where heads are few, they would not fill a GPU. The state
before each segment is made beforehand (segments.py).
"""

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.gate_gradients import chunk_sums
from mlstm_pallas.passes import gate_and_state_gradients, inner, row_gradients_of
from mlstm_pallas.plan import Inputs, Outputs, Plan, Residuals
from mlstm_pallas.segments import SegmentProducts, segment_states
from mlstm_pallas.stages.chunk_gates import chunk_gates
from mlstm_pallas.stages.parallel_bw_P import parallel_bw_P
from mlstm_pallas.stages.parallel_fw_P import parallel_fw_P
from mlstm_pallas.stages.recurrent_bw_dK import recurrent_bw_dK
from mlstm_pallas.stages.recurrent_bw_dQ import recurrent_bw_dQ
from mlstm_pallas.stages.recurrent_bw_dV import recurrent_bw_dV
from mlstm_pallas.stages.recurrent_fw_H import recurrent_fw_H
from mlstm_pallas.stages.walk import vector_states


def _cut(plan: Plan, x):
    """Arrays (B, NH, steps or chunks, ...) in segments, as heads of their own."""
    n = plan.segments
    return jax.tree.map(lambda y: y.reshape(y.shape[0], y.shape[1] * n, y.shape[2] // n, *y.shape[3:]), x)


def _by_segment(plan: Plan, x: jax.Array) -> jax.Array:
    """(B, NH segments, ...) to (B, NH, segments, ...)."""
    return x.reshape(x.shape[0], -1, plan.segments, *x.shape[2:])


def _as_heads(x: jax.Array) -> jax.Array:
    """(B, NH, segments, ...) to (B, NH segments, ...)."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def forward(plan: Plan, interpret: bool, x: Inputs, products: SegmentProducts | None = None):
    """Outputs, z, and no states. products: of the segments, where they are known."""
    launch, precision = plan.launch(interpret), plan.config.dot_precision(x.q.dtype, interpret)
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, plan.input_gate, **launch)
    scores, z, n_last = parallel_fw_P(x.q, x.k, gates, x.n_initial, normalize=plan.normalize, **plan.normaliser, **launch)
    added = None if products is None else products.of(plan.segments, gates.scaM_states)
    C = segment_states(scores.matK_scaled, x.v, gates.scaGamma, x.c_initial, plan.segments, precision, added=added)
    q, v, scores, gamma = _cut(plan, (x.q, x.v, scores, gates.scaGamma))
    h, C = recurrent_fw_H(q, v, scores, gamma, _as_heads(C), output_dtype=x.q.dtype, **plan.of_segments.launch(interpret))
    return (h.reshape(x.v.shape), (_by_segment(plan, C)[:, :, -1], n_last, gates.scaM_states[..., -1])), z, None


def backward(plan: Plan, interpret: bool, residuals: Residuals, cotangents: Outputs, products: SegmentProducts | None = None) -> Inputs:
    """Gradients of the inputs. cotangents: of h and of the last states. products: what segments add to dC, where it is known."""
    launch, precision = plan.launch(interpret), plan.config.dot_precision(residuals.inputs.q.dtype, interpret)
    walks = plan.of_segments.launch(interpret)
    x, h, z, _ = residuals
    x = lax.optimization_barrier(x)  # nothing that the forward pass made is kept for this one
    dh, (dC_last, dn_last, dm_last) = cotangents
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, plan.input_gate, **launch)
    rows = row_gradients_of(plan, dh, h, z, gates)
    # Of kbar as rounded, as C: what n and dn give and take is to be the same.
    bits = jnp.finfo(x.k.dtype)
    kbar = lax.reduce_precision(plan.chunks(x.k).astype(jnp.float32) * gates.vecAbar[..., None], bits.nexp, bits.nmant)
    n, n_last = vector_states(jnp.sum(kbar, axis=-2), gates.scaGamma, x.n_initial)
    scores, norms, pairs = parallel_bw_P(x.q, x.k, x.v, dh, gates, rows, n if plan.normalize else None, **launch)
    added_dn = jnp.zeros_like(n) if norms.added_dn is None else norms.added_dn
    dn_behind, dn = vector_states(added_dn, gates.scaGamma, dn_last, backward=True)
    r = gates.vecW.reshape(x.i.shape) * plan.problem.qk_scale
    r = r if rows.vecInvDen is None else r * rows.vecInvDen
    abar = gates.vecAbar.reshape(x.i.shape)

    C = _as_heads(segment_states(scores.matK_scaled, x.v, gates.scaGamma, x.c_initial, plan.segments, precision))
    added = None if products is None else products.of(plan.segments, gates.scaM_states)
    dC = _as_heads(segment_states(scores.matQ_scaled, dh, gates.scaGamma, dC_last, plan.segments, precision, added=added, backward=True))
    of_heads = x.k, x.v, dh, scores, r, abar, gates.scaGamma, n, dn_behind
    k, v, dh, scores, r, abar, gamma, n, dn_behind = _cut(plan, of_heads)
    dq, from_state, C_behind = recurrent_bw_dQ(v, dh, scores, r, gamma, C, **walks)
    dk, to_state, dC_before = recurrent_bw_dK(v, dh, scores, abar, gamma, dC, dn_behind, **walks)
    dv = recurrent_bw_dV(k, dh, scores, abar, gamma, dC, **walks)

    dn_before = jnp.concatenate([dn[:, :, None], _by_segment(plan, dn_behind[:, :, -1])[:, :, :-1]], axis=2)
    enters = _by_segment(plan, inner(dC_before, C, 2)) + inner(dn_before, _by_segment(plan, n[:, :, 0]))
    from_state, to_state = from_state.reshape(x.i.shape), to_state.reshape(x.i.shape)
    from_state = from_state if norms.from_norm is None else from_state + norms.from_norm
    resolution = 2.0**-16 if x.q.dtype == jnp.bfloat16 else 2.0**-22
    sums, through = chunk_sums(gates, *pairs, from_state, to_state, enters, resolution)
    dC_initial = _by_segment(plan, dC_before)[:, :, 0]
    last = dC_last, dn_last, dm_last, _by_segment(plan, C_behind)[:, :, -1], n_last
    gradients = (dy.reshape(y.shape) for dy, y in zip((dq, dk, dv), x[:3], strict=True))
    return Inputs(*gradients, *gate_and_state_gradients(plan, x, gates, rows, sums, through, last, dC_initial, dn))
