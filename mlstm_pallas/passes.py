"""Forward and backward passes with a state of every chunk in memory: by the kernels, and in plain jnp. No maths and no block specs here."""

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas import reference
from mlstm_pallas.gate_gradients import NO_NORMALISER, gate_gradients, row_gradients, tile_sums
from mlstm_pallas.gates import chunk_gates as chunk_gates_xla
from mlstm_pallas.gates import materialised
from mlstm_pallas.plan import Inputs, Outputs, Plan, Residuals
from mlstm_pallas.stages.chunk_gates import chunk_gates
from mlstm_pallas.stages.parallel_bw_dK import parallel_bw_dK
from mlstm_pallas.stages.parallel_bw_dQ import parallel_bw_dQ
from mlstm_pallas.stages.parallel_bw_dQKV import parallel_bw_dQKV
from mlstm_pallas.stages.parallel_bw_dV import parallel_bw_dV
from mlstm_pallas.stages.parallel_fw_H import parallel_fw_H
from mlstm_pallas.stages.recurrent_bw_dC import recurrent_bw_dC
from mlstm_pallas.stages.recurrent_fw_C import recurrent_fw_C


def forward_triton(plan: Plan, interpret: bool, x: Inputs):
    """Outputs, z and, where they are to be kept, the states."""
    launch = plan.launch(interpret)
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, plan.input_gate, **launch)
    C_states, n_states, C_last, n_last = recurrent_fw_C(x.k, x.v, gates, x.c_initial, x.n_initial, **launch)
    normaliser = dict(plan.normaliser, normalize=plan.normalize)
    h, z = parallel_fw_H(x.q, x.k, x.v, gates, C_states, n_states, output_dtype=x.q.dtype, **normaliser, **launch)
    states = (C_states, n_states, C_last, n_last)
    return (h, (*states[2:], gates.scaM_states[..., -1])), z, None if plan.recompute_states_in_bw else states


def backward_triton(plan: Plan, interpret: bool, residuals: Residuals, cotangents: Outputs) -> Inputs:
    launch = plan.launch(interpret)
    x, h, z, states = residuals
    if states is None:
        # Else the compiler sees that the forward pass made the same states, and keeps those.
        x = lax.optimization_barrier(x)
    dh, (dC_last, dn_last, dm_last) = cotangents
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, plan.input_gate, **launch)
    if states is None:
        states = recurrent_fw_C(x.k, x.v, gates, x.c_initial, x.n_initial, **launch)
    C_states, n_states, C_last, n_last = states
    rows = row_gradients_of(plan, dh, h, z, gates)
    dC_states, dn_states, dC, dn, through = recurrent_bw_dC(x.q, dh, gates, rows, dC_last, dn_last, C_states, n_states, **launch)
    if plan.config.splits_backward(plan.problem):
        dq, from_q = parallel_bw_dQ(x.q, x.k, x.v, dh, gates, rows, C_states, n_states, **launch)
        dk, to_k = parallel_bw_dK(x.q, x.k, x.v, dh, gates, rows, dC_states, dn_states, **launch)
        dv = parallel_bw_dV(x.q, x.k, dh, gates, rows, dC_states, **launch)
        sums, through = tile_sums(*from_q, *to_k, through, plan.problem.T)
    else:
        dq, dk, dv, sums = parallel_bw_dQKV(x.q, x.k, x.v, dh, gates, rows, C_states, n_states, dC_states, dn_states, **launch)
    last = dC_last, dn_last, dm_last, C_last, n_last
    return Inputs(dq, dk, dv, *gate_and_state_gradients(plan, x, gates, rows, sums, through, last, dC, dn))


def forward_xla(plan: Plan, x: Inputs):
    q, k, v = map(plan.chunks, x[:3])
    gates = _gates_xla(plan, x)
    states = reference.chunk_states(k, v, gates, x.c_initial, x.n_initial)
    num, z = reference.chunk_outputs(q, k, v, gates, *states[:2], plan.problem.qk_scale)
    h = reference.normalise(num, z, gates.vecM, **plan.normaliser) if plan.normalize else num
    outputs = h.astype(x.q.dtype).reshape(x.v.shape), (*states[2:], gates.scaM_states[..., -1])
    return outputs, z.reshape(x.i.shape) if plan.normalize else None, None if plan.recompute_states_in_bw else states


def _gates_xla(plan: Plan, x: Inputs):
    starts = None if x.starts is None else plan.chunks(x.starts)
    return chunk_gates_xla(plan.chunks(x.i), plan.chunks(x.f), x.m_initial, starts, plan.input_gate)


def backward_xla(plan: Plan, residuals: Residuals, cotangents: Outputs) -> Inputs:
    x, h, z, states = residuals
    if states is None:
        x = lax.optimization_barrier(x)
    dh, (dC_last, dn_last, dm_last) = cotangents
    q, k, v, dh_chunks = map(plan.chunks, (*x[:3], dh))
    gates = _gates_xla(plan, x)
    if states is None:
        states = reference.chunk_states(k, v, gates, x.c_initial, x.n_initial)
    C_states, n_states, C_last, n_last = states
    rows = row_gradients_of(plan, dh, h, z, gates)
    if rows.vecInvDen is not None:
        rows = materialised(rows, rows.vecInvDen)
    in_chunks = jax.tree.map(plan.chunks, rows)
    dC_states, dn_states, dC, dn, through = reference.chunk_state_gradients(
        q, dh_chunks, gates, in_chunks, dC_last, dn_last, C_states, n_states, plan.problem.qk_scale
    )
    states = C_states, n_states, dC_states, dn_states
    gradients, sums = reference.chunk_gradients(q, k, v, dh_chunks, gates, in_chunks, *states, plan.problem.qk_scale)
    dq, dk, dv = (dx.reshape(y.shape).astype(y.dtype) for dx, y in zip(gradients, x[:3], strict=True))
    last = dC_last, dn_last, dm_last, C_last, n_last
    return Inputs(dq, dk, dv, *gate_and_state_gradients(plan, x, gates, rows, sums, through, last, dC, dn))


def row_gradients_of(plan: Plan, dh, h, z, gates):
    return row_gradients(inner(dh, h), z, gates.vecM.reshape(z.shape), **plan.normaliser) if plan.normalize else NO_NORMALISER


def gate_and_state_gradients(plan: Plan, x: Inputs, gates, rows, sums, through, last, dC, dn):
    """(di, df, dC, dn, dm) of the gates and the initial states; last: gradients of the last states, and C and n."""
    dC_last, dn_last, dm_last, C_last, n_last = last
    dm = None
    if plan.stabilised:
        dm = rows.vecDm.at[..., -1].add(dm_last - inner(dC_last, C_last, 2) - inner(dn_last, n_last))
    starts = None if x.starts is None else plan.chunks(x.starts)
    di, df, dm_initial = gate_gradients(gates, plan.chunks(x.i), plan.chunks(x.f), sums, through, dm, starts, plan.input_gate)
    if plan.stabilised:
        dm_initial += inner(dC, x.c_initial, 2) + inner(dn, x.n_initial)
    return di, df, dC, dn, dm_initial


def inner(a: jax.Array, b: jax.Array, axes: int = 1) -> jax.Array:
    """Inner product over the last axes, in at least float32."""
    acc = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.sum(a.astype(acc) * b.astype(acc), axis=tuple(range(-axes, 0)))
