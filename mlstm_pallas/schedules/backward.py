"""The backward schedule: the order of the stages, and the arrays between them.

Arrays belong to a shard, as in the forward schedule.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.formulas.gate_gradients import inner, only
from mlstm_pallas.formulas.gates import ChunkGates, input_gate_gradient, only_outputs
from mlstm_pallas.formulas.normaliser import NormaliserGradients, normaliser_gradients, query_scale
from mlstm_pallas.formulas.rows import by_head
from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.operands.chunk_list import ChunkList, active_chunks
from mlstm_pallas.operands.scaled_rows import ScaledRows
from mlstm_pallas.planning.call_spec import Plan, plain
from mlstm_pallas.planning.dispatch import stage
from mlstm_pallas.problem.arrays import Cotangents, Inputs, Residuals, States, StoredStates
from mlstm_pallas.problem.steps import Steps
from mlstm_pallas.schedules.forward import key_states, key_sums, run_gates, segments_of
from mlstm_pallas.stages import (
    chunk_gradients,
    parallel_bw_dP,
    parallel_bw_dQKV,
    recurrent_bw_dC,
    step_sums,
    vector_states,
)
from mlstm_pallas.stages.parallel_bw_dP import ScoreTiles
from mlstm_pallas.stages.recurrent_bw_dC import StateGradients
from mlstm_pallas.vectors import step_gradients


class BackwardCarry(NamedTuple):
    """The results of the first half of the backward pass, which the second half reads."""

    gates: ChunkGates
    scores: ScoreTiles | None  # None: chunk_gradients computes them
    states: StateGradients  # without delta
    normaliser_gradients: NormaliserGradients
    vecDeltaN_added: Array | None  # (B * NH, NC, DHQK); None without a normaliser


def backward(plan: Plan, residuals: Residuals, cotangents: Cotangents) -> Inputs:
    """The gradients of the inputs."""
    arrays = prepared(plan, residuals, cotangents)
    return second_half(plan, *arrays, first_half(plan, *arrays))[0]


def prepared(
    plan: Plan, residuals: Residuals, cotangents: Cotangents
) -> tuple[Residuals, Cotangents, ChunkList | None]:
    """The arrays of both halves, and the active chunks; None: all, as in plain jnp."""
    x = residuals.inputs
    if residuals.states.C is None:
        # Without the barrier XLA finds the same states in the forward pass and keeps those. On CPUs
        # a barrier copies its operands, so k and v go around it: states and scores still differ by
        # the other operands.
        k, v = x.k, x.v
        x = lax.optimization_barrier(x)
        if plan.is_plain:
            x = x._replace(k=k, v=v)
    if cotangents.last is None:
        cotangents = cotangents._replace(last=States(n=jnp.zeros_like(x.initial.n)))
    active = None if plan.is_plain else active_chunks(x.steps, x.f.shape[1], plan.spec.problem)
    return residuals._replace(inputs=x), cotangents, active


def first_half(
    plan: Plan, residuals: Residuals, cotangents: Cotangents, active: ChunkList | None
) -> BackwardCarry:
    """The gates, P and dP, the states, and their gradients at the chunk boundaries.

    Of these only dC depends on the gradients of the last states; it is linear in that of C. The
    arrays are ``prepared``. The first stage that reads dh gets h as well, and returns delta.
    """
    (x, h, z, stored), (dh, last) = residuals, cotangents
    spec, launches = plan.spec, plan.backward
    recompute = stored.C is None
    gates, read = run_gates(spec, launches, x, stored.m, with_flags=True), None
    if spec.problem.packed and plan.drops_unread:
        read = by_head(jnp.any(dh != 0, axis=-1), x.f.shape[1])
        gates = only_outputs(gates, read)
    g = gates.per_step()
    gradients_for = functools.partial(normaliser_gradients, spec.normaliser, z=z, m=g.vecM)
    r = query_scale(g.vecW, spec.problem.qk_scale, gradients_for(delta=None).vecInvDen)
    queries, keys = ScaledRows(x.q, r), ScaledRows(x.k, g.vecAbar)
    scores = delta = dn_added = None
    if not plan.by_chunk:
        scores, queries, keys, delta, dn_added = stage("parallel_bw_dP", launches)(
            parallel_bw_dP.Operands(
                matQ=x.q,
                matK=x.k,
                matV=x.v,
                matDeltaH=dh,
                gates=gates,
                matH=h,
                vecZ=z,
                active=active,
            ),
            normaliser=spec.normaliser,
            return_keys=recompute,
        )
    states: StateGradients = stage("recurrent_bw_dC", launches)(
        recurrent_bw_dC.Operands(
            queries=queries,
            matDeltaH=dh,
            scaGamma=gates.scaGamma,
            matDeltaC_last=last.c,
            keys=keys if recompute else None,
            matV=x.v,
            matC_initial=x.initial.c,
            matH=h if plan.by_chunk else None,
            active=active,
        ),
        return_initial=x.initial.c is not None,
        return_last=spec.return_last_states,
    )
    if plan.by_chunk:
        delta = states.vecDelta
    # Undefined values of delta would reach active chunks, through dm and dn. All other undefined
    # values stay in their chunks.
    delta = _mask_inactive(active, delta)
    if read is not None and delta is not None:
        delta = jnp.where(read, delta, 0.0)
    normaliser = gradients_for(delta=delta)
    if normaliser.vecDzDen is not None and dn_added is None:
        dn_added = stage("step_sums", launches)(
            step_sums.Operands(rows=x.q, weights=weighted(r, normaliser.vecDzDen))
        )
    return BackwardCarry(gates, scores, states._replace(vecDelta=None), normaliser, dn_added)


def _mask_inactive(active: ChunkList | None, x: Any) -> Any:
    """x, (B * NH, S), with 0 in inactive chunks, where it may be undefined."""
    if active is None or x is None:
        return x
    rows, chunks = active.has_steps.shape
    in_chunks = x.reshape(rows, chunks, x.shape[-1] // chunks)
    return only(in_chunks, active.has_steps, 0, 1).reshape(x.shape)


def second_half(
    plan: Plan,
    residuals: Residuals,
    cotangents: Cotangents,
    active: ChunkList | None,
    carry: BackwardCarry,
) -> tuple[Inputs, Array]:
    """The gradients of the inputs, where None is zeros, and those of n at the chunk boundaries.

    The arrays are ``prepared``.
    """
    (x, _, _, stored), (dh, last) = residuals, cotangents
    gates, scores, (dC, dC_initial, C, C_last, _), normaliser, dn_added = carry
    if stored.C is not None:
        C, C_last = stored.C, stored.C_last
    spec, launches = plan.spec, plan.backward
    gamma, n = gates.scaGamma, stored.n
    dn, dn_initial = stage("vector_states", launches)(
        vector_states.Operands(
            added=jnp.zeros_like(n) if dn_added is None else dn_added,
            scaGamma=gamma,
            initial=last.n,
        ),
        backward=not spec.problem.reverse,
    )
    operands = chunk_gradients.Operands(
        matQ=x.q,
        matK=x.k,
        matV=x.v,
        matDeltaH=dh,
        gates=gates,
        normaliser_gradients=normaliser,
        matC_states=C,
        vecN_states=n,
        matDeltaC_states=dC,
        vecDeltaN_states=dn,
        active=active,
    )
    if scores is None:
        gradients, tile_sums = stage("chunk_gradients", launches)(operands)
    else:
        gradients = stage("parallel_bw_dQKV", launches)(
            parallel_bw_dQKV.Operands(**operands._asdict(), scores=scores)
        )
        tile_sums = scores.tile_sums

    dm = normaliser.vecDm if spec.stabilised else None
    if dm is not None and spec.return_last_states:
        # The true state is exp(m) (C, n), so the part of dm that rescales C and n is removed.
        dm_last = last.m - inner(last.c, C_last, 2) - inner(last.n, stored.n_last)
        dm = dm.at[:, 0 if spec.problem.reverse else -1].add(dm_last)
    di, df, dm_initial = stage("step_gradients", launches)(
        step_gradients.Operands(
            x.f,
            tile_sums,
            gradients.q_dot_dq_inter,
            gradients.k_dot_dk_inter,
            gradients.pass_through,
            gates.per_step().vecFlags,
            dm,
        )
    )
    di, df = (_mask_inactive(active, y) for y in (di, df))
    di = input_gate_gradient(di, x.i, spec.input_gate)
    if x.initial.c is not None and spec.stabilised:
        # The initial m is also the scale of the initial states.
        dm_initial += inner(dC_initial, x.initial.c, 2) + inner(dn_initial, x.initial.n)
    dq, dk, dv = gradients.matDeltaQ, gradients.matDeltaK, gradients.matDeltaV
    return Inputs(dq, dk, dv, di, df, States(dC_initial, dn_initial, dm_initial)), dn


def packed_backward(plan: Plan, residuals: Residuals, cotangents: Cotangents) -> Inputs:
    """The gradients of the inputs of ``packed``; residuals.states are the states that it returned.

    The steps of a row are copied to the order of its list of chunks. There the row is one sequence,
    which an entry without steps resets before each segment. Both halves run on this sequence. Its
    gates have each segment's initial m, and the initial n is added to n. ``_with_segments`` adds
    the initial C and the gradients of last states between the halves. At last the gradients are
    copied back to the row.
    """
    spec, x, L = plan.spec, residuals.inputs, plan.spec.problem.L
    (chunks, before), plan = segments_of(spec, x, L), plan.in_list
    p = plan.spec.problem
    z = None if residuals.z is None else residuals.z[..., None]
    q, k, v, h, dh, z = jax.tree.map(
        lambda y: chunks.gather(y, L).reshape(p.BNH, p.S, y.shape[-1]),
        (x.q, x.k, x.v, residuals.h, cotangents.h, z),
    )
    i, f = chunks.gates(x.i, x.f, before.m, L)
    inputs = Inputs(q, k, v, i, f, x.initial._replace(c=None), Steps())
    z = None if z is None else z[..., 0]
    dy = Cotangents(dh, States(n=jnp.zeros_like(x.initial.n)))
    carry = first_half(plan, Residuals(inputs, h, z, StoredStates()), dy, None)

    added = chunks.with_initial(key_sums(plan.backward, k, carry.gates), before.n)
    n, n_last = key_states(plan.backward, added, carry.gates, x.initial.n)
    list_residuals = Residuals(inputs, h, z, StoredStates(n=n, n_last=n_last))
    carry = _with_segments(plan, chunks, carry, x.segments, residuals.states, cotangents.last)
    dx, dn = second_half(plan, list_residuals, dy, None, carry)

    dq, dk, dv = (chunks.scatter(d, y, L) for d, y in ((dx.q, x.q), (dx.k, x.k), (dx.v, x.v)))
    di, df = (chunks.scatter_steps(d, x.i, L) for d in (dx.i, dx.f))
    segments = None
    if x.segments is not None:
        at = rows, entries = chunks.before_segments()
        dC = carry.states.matDeltaC_states[at].astype(dn.dtype)
        dn, dm = dn[at], dx.i[rows, entries * L]
        if spec.stabilised:  # the initial m is also the scale of the initial states
            dm += inner(dC, before.c, 2) + inner(dn, before.n)
        segments = States(dC, dn, dm)
    return Inputs(dq, dk, dv, di, df, segments=segments)


def _with_segments(
    plan: Plan,
    chunks: ChunkList,
    carry: BackwardCarry,
    initial: States | None,
    last: States,
    d_last: States,
) -> BackwardCarry:
    """The results of the first half, with the segments' initial states and last gradients.

    C and dC at the chunk boundaries are linear in these, and dn and dm are sums with them.
    """
    gates, _, states, normaliser, dn_added = carry
    gamma = gates.scaGamma
    begin, end = chunks.before_segments(), chunks.behind_segments()
    segment = jnp.minimum(chunks.entry_parts, chunks.N - 1)  # nothing arrives behind the last one

    def plus(C: Array, at: Any, by_segment: Array, **backward: bool) -> Array:
        """C, and the states that enter at these entries, decayed to each chunk boundary."""
        entering = jnp.zeros_like(gamma)[..., None].at[at].set(1.0)
        operands = vector_states.Operands(entering, gamma, jnp.zeros_like(gamma[:, :1]))
        call = plain(plan.spec.problem)
        decay, _ = vector_states.vector_states(operands, call=call, **backward)
        added = decay[..., None] * by_segment[at[0], segment]
        return (C.astype(decay.dtype) + added).astype(C.dtype)

    if initial is not None:
        states = states._replace(matC_states=plus(states.matC_states, begin, initial.c))
    dC = plus(states.matDeltaC_states, end, d_last.c, backward=True)
    if dn_added is None:
        dn_added = jnp.zeros((*gamma.shape, d_last.n.shape[-1]), gamma.dtype)
    if normaliser.vecDm is not None:  # see ``second_half``
        dm = d_last.m - inner(d_last.c, last.c, 2) - inner(d_last.n, last.n)
        rows, entries = end
        last_steps = rows, entries * plan.spec.problem.L - 1
        normaliser = normaliser._replace(vecDm=normaliser.vecDm.at[last_steps].add(dm))
    return carry._replace(
        states=states._replace(matDeltaC_states=dC),
        normaliser_gradients=normaliser,
        vecDeltaN_added=dn_added.at[end].set(d_last.n),
    )
