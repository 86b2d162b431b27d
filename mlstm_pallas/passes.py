"""Forward and backward passes with a state of every chunk in memory: by the kernels, and in plain jnp. No maths and no block specs here."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas import reference
from mlstm_pallas.gate_gradients import NO_NORMALISER, gate_gradients, row_gradients, tile_sums
from mlstm_pallas.gates import chunk_gates as chunk_gates_xla
from mlstm_pallas.gates import materialised, vector_states
from mlstm_pallas.plan import Inputs, KeptStates, Outputs, Plan, Residuals
from mlstm_pallas.stages.chunk_gates import chunk_gates
from mlstm_pallas.stages.parallel_bw_dP import parallel_bw_dP
from mlstm_pallas.stages.parallel_bw_dQKV import parallel_bw_dQKV
from mlstm_pallas.stages.parallel_fw_H import parallel_fw_H
from mlstm_pallas.stages.recurrence import Recurrence
from mlstm_pallas.stages.recurrent_bw_dC import recurrent_bw_C_dC, recurrent_bw_dC
from mlstm_pallas.stages.recurrent_fw_C import recurrent_fw_C


def forward_triton(plan: Plan, interpret: bool, x: Inputs):
    """Outputs, z and, where they are to be kept, the states."""
    launch = plan.launch(interpret)
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, plan.input_gate, **launch)
    abar = gates.vecAbar.reshape(x.i.shape)
    made = recurrent_fw_C(x.k, x.v, gates.scaGamma, x.c_initial, abar, x.n_initial, last=plan.last_states, **launch)
    C_states, C_last, n_states, n_last = made
    normaliser = dict(plan.normaliser, normalize=plan.normalize)
    h, z = parallel_fw_H(x.q, x.k, x.v, gates, C_states, n_states, output_dtype=x.q.dtype, **normaliser, **launch)
    last = (C_last, n_last, gates.scaM_states[..., -1]) if plan.last_states else None
    return (h, last), z, None if plan.recompute_states_in_bw else KeptStates(C_states, n_states, gates.scaM_states, C_last, n_last)


def backward_triton(plan: Plan, interpret: bool, residuals: Residuals, cotangents: Outputs) -> Inputs:
    launch = plan.launch(interpret)
    x, h, z, states = residuals
    if states is None:
        # Else the compiler sees that the forward pass made the same states, and keeps those.
        x = lax.optimization_barrier(x)
    dh, (dC_last, dn_last, dm_last) = cotangents
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, plan.input_gate, None if states is None else states.m, **launch)
    gamma = gates.scaGamma
    rows = row_gradients_of(plan, dh, h, z, gates)
    scores, norms, pairs = parallel_bw_dP(x.q, x.k, x.v, dh, gates, rows, of_keys=states is None, **launch)
    of_dC, wants_dC = (scores.matQ_scaled, dh, gamma, dC_last), not plan.starts_empty
    if states is None:
        of_C = Recurrence(scores.matK_scaled, x.v, gamma, x.c_initial, last=plan.last_states)
        C_states, C_last, dC_states, dC = recurrent_bw_C_dC(of_C, Recurrence(*of_dC, last=wants_dC, backward=True), **launch)
        n_states, n_last = vector_states(norms.added_n, gamma, x.n_initial)
    else:
        C_states, n_states, _, C_last, n_last = states
        dC_states, dC = recurrent_bw_dC(*of_dC, last=wants_dC, **launch)
    added_dn = jnp.zeros_like(n_states) if norms.added_dn is None else norms.added_dn
    dn_states, dn = vector_states(added_dn, gamma, dn_last, backward=True)
    of_states = C_states, n_states, dC_states, dn_states
    made = parallel_bw_dQKV(x.q, x.k, x.v, dh, gates, rows, scores, *of_states, wanted="QKVC", **launch)
    through = gamma * (made.states + inner(n_states, dn_states))
    sums, through = tile_sums(pairs, made.from_state, made.to_state, through)
    last = dC_last, dn_last, dm_last, C_last, n_last
    gate_gradients = gate_and_state_gradients(plan, x, gates, rows, sums, through, last, dC, dn)
    return Inputs(made.matDeltaQ, made.matDeltaK, made.matDeltaV, *gate_gradients)


def forward_xla(plan: Plan, x: Inputs):
    q, k, v = map(plan.chunks, x[:3])
    gates = _gates_xla(plan, x)
    C_states, n_states, C_last, n_last = reference.chunk_states(k, v, gates, x.c_initial, x.n_initial)
    num, z = reference.chunk_outputs(q, k, v, gates, C_states, n_states, plan.problem.qk_scale)
    h = reference.normalise(num, z, gates.vecM, **plan.normaliser) if plan.normalize else num
    last = (C_last, n_last, gates.scaM_states[..., -1]) if plan.last_states else None
    outputs = h.astype(x.q.dtype).reshape(x.v.shape), last
    kept = C_states, n_states, gates.scaM_states, C_last if plan.last_states else None, n_last
    states = None if plan.recompute_states_in_bw else KeptStates(*kept)
    return outputs, z.reshape(x.i.shape) if plan.normalize else None, states


def _gates_xla(plan: Plan, x: Inputs):
    starts = None if x.starts is None else plan.chunks(x.starts)
    return chunk_gates_xla(plan.chunks(x.i), plan.chunks(x.f), x.m_initial, starts, plan.input_gate)


def backward_xla(plan: Plan, residuals: Residuals, cotangents: Outputs) -> Inputs:
    x, h, z, states = residuals
    if states is None:
        x = lax.optimization_barrier(x)
    dh, (dC_last, dn_last, dm_last) = cotangents[0], cotangents[1] or jax.tree.map(jnp.zeros_like, (x.c_initial, x.n_initial, x.m_initial))
    q, k, v, dh_chunks = map(plan.chunks, (*x[:3], dh))
    gates = _gates_xla(plan, x)
    if states is None:
        C_states, n_states, C_last, n_last = reference.chunk_states(k, v, gates, x.c_initial, x.n_initial)
    else:
        C_states, n_states, _, C_last, n_last = states
    rows = row_gradients_of(plan, dh, h, z, gates)
    if rows.vecInvDen is not None:
        rows = materialised(rows, rows.vecInvDen)
    in_chunks = jax.tree.map(plan.chunks, rows)
    dC_states, dn_states, dC, dn, through = reference.chunk_state_gradients(
        q, dh_chunks, gates, in_chunks, dC_last, dn_last, C_states, n_states, plan.problem.qk_scale
    )
    of_states = C_states, n_states, dC_states, dn_states
    gradients, sums = reference.chunk_gradients(q, k, v, dh_chunks, gates, in_chunks, *of_states, plan.problem.qk_scale)
    dq, dk, dv = (dx.reshape(y.shape).astype(y.dtype) for dx, y in zip(gradients, x[:3], strict=True))
    last = dC_last, dn_last, dm_last, C_last, n_last
    return Inputs(dq, dk, dv, *gate_and_state_gradients(plan, x, gates, rows, sums, through, last, dC, dn))


def row_gradients_of(plan: Plan, dh, h, z, gates):
    return row_gradients(inner(dh, h), z, gates.vecM.reshape(z.shape), **plan.normaliser) if plan.normalize else NO_NORMALISER


def gate_and_state_gradients(plan: Plan, x: Inputs, gates, rows, sums, through, last, dC, dn):
    """(di, df, dC, dn, dm) of the gates and the initial states; last: gradients of the last states, and C and n."""
    dC_last, dn_last, dm_last, C_last, n_last = last
    dm: Any = rows.vecDm if plan.stabilised else None
    if plan.stabilised and plan.last_states:
        dm = dm.at[..., -1].add(dm_last - inner(dC_last, C_last, 2) - inner(dn_last, n_last))
    starts = None if x.starts is None else plan.chunks(x.starts)
    di, df, dm_initial = gate_gradients(gates, plan.chunks(x.i), plan.chunks(x.f), sums, through, dm, starts, plan.input_gate)
    if plan.starts_empty:  # nobody asks for these
        B, NH = dm_initial.shape
        dC = jnp.zeros_like(jnp.broadcast_to(dm_initial[..., None, None], (B, NH, plan.problem.DHQK, plan.problem.DHHV)))
    elif plan.stabilised:
        dm_initial += inner(dC, x.c_initial, 2) + inner(dn, x.n_initial)
    return di, df, dC, dn, dm_initial


def inner(a: jax.Array, b: jax.Array, axes: int = 1) -> jax.Array:
    """Inner product over the last axes, in at least float32."""
    acc = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.sum(a.astype(acc) * b.astype(acc), axis=tuple(range(-axes, 0)))
