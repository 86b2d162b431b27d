"""The backward schedule: the order of the stages, and the arrays between them.

Arrays belong to a shard, as in the forward schedule.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mlstm_pallas.formulas.chunk_list import ChunkList, of_lengths
from mlstm_pallas.formulas.gate_gradients import inner, only, step_flags
from mlstm_pallas.formulas.gates import M_GRAD_FLOWS, MASKED, ChunkGates
from mlstm_pallas.formulas.normaliser import NormaliserGradients, normaliser_gradients, query_scale
from mlstm_pallas.planning.call_spec import Plan, plain
from mlstm_pallas.planning.dispatch import stage
from mlstm_pallas.problem.arrays import Cotangents, Inputs, LastStates, Residuals, StoredStates
from mlstm_pallas.problem.dimensions import Layout
from mlstm_pallas.schedules.forward import (
    heads_before_segments,
    key_states,
    run_gates,
    segments_before_heads,
    segments_of,
)
from mlstm_pallas.stages import (
    parallel_bw_dP,
    parallel_bw_dQKV,
    recurrent_bw_dC,
    step_gradients,
    step_sums,
    vector_states,
)
from mlstm_pallas.stages.parallel_bw_dP import ScoreGradients
from mlstm_pallas.stages.parallel_bw_dQKV import Gradients
from mlstm_pallas.stages.recurrent_bw_dC import StateGradients
from mlstm_pallas.stages.stage import Lowering, ScaledRows


class BackwardCarry(NamedTuple):
    """The results of the first half of the backward pass, which the second half reads."""

    gates: ChunkGates
    scores: ScoreGradients  # P, dP and pairs
    states: StateGradients  # without delta
    normaliser_gradients: NormaliserGradients
    vecDeltaN_added: Array | None  # (B * NH, NC, DHQK); None without a normaliser


def backward(plan: Plan, residuals: Residuals, cotangents: Cotangents) -> Inputs:
    """The gradients of the inputs."""
    arrays = prepared(plan, residuals, cotangents)
    return second_half(plan, *arrays, first_half(plan, *arrays))[0]


def prepared(
    plan: Plan, residuals: Residuals, cotangents: Cotangents
) -> tuple[Residuals, Cotangents]:
    """The arrays of both halves."""
    x = residuals.inputs
    if not plan.spec.has_initial_state:
        x = x._replace(c_initial=None)
    if residuals.states.C is None:
        # Without the barrier XLA finds the same states in the forward pass and keeps those. On CPUs
        # a barrier copies its operands, so k and v go around it: states and scores still differ by
        # the other operands.
        k, v = x.k, x.v
        x = lax.optimization_barrier(x)
        if plan.lowering is Lowering.XLA:
            x = x._replace(k=k, v=v)
    last = cotangents.last or LastStates(None, jnp.zeros_like(x.n_initial), None)
    return residuals._replace(inputs=x), cotangents._replace(last=last)


def first_half(
    plan: Plan,
    residuals: Residuals,
    cotangents: Cotangents,
    gates: ChunkGates | None = None,
) -> BackwardCarry:
    """The gates, unless they are passed, P and dP, the states, and their gradients at the chunk
    boundaries.

    Of these only dC depends on the gradients of the last states; it is linear in that of C. The
    arrays are ``prepared``. The first stage that reads dh gets h as well, and returns delta.
    """
    (x, h, z, stored), (dh, last) = residuals, cotangents
    spec, launches, recompute, live = plan.spec, plan.backward, stored.C is None, _live(plan, x)
    if gates is None:
        gates = run_gates(spec, launches, x, stored.m, with_flags=True)
    g = gates.per_step()
    gradients_for = functools.partial(normaliser_gradients, spec.normaliser, z=z, m=g.vecM)
    r = query_scale(g.vecW, spec.problem.qk_scale, gradients_for(delta=None).vecInvDen)
    if plan.computes_scores:
        scores = ScoreGradients(queries=ScaledRows(x.q, r), keys=ScaledRows(x.k, g.vecAbar))
    else:
        scores = stage("parallel_bw_dP", launches)(
            parallel_bw_dP.Operands(
                matQ=x.q, matK=x.k, matV=x.v, matDeltaH=dh, gates=gates, matH=h, vecZ=z, live=live
            ),
            normaliser=spec.normaliser,
            return_keys=recompute,
        )
    states: StateGradients = stage("recurrent_bw_dC", launches)(
        recurrent_bw_dC.Operands(
            queries=scores.queries,
            matDeltaH=dh,
            scaGamma=gates.scaGamma,
            matDeltaC_last=last.c,
            keys=scores.keys if recompute else None,
            matV=x.v,
            matC_initial=x.c_initial,
            matH=h if scores.vecDelta is None else None,
            live=live,
        ),
        return_initial=spec.has_initial_state,
        return_last=spec.return_last_states,
    )
    delta = states.vecDelta if scores.vecDelta is None else scores.vecDelta
    # Undefined values of delta would reach live chunks, through dm and dn. All other undefined
    # values stay in their chunks.
    delta = _of_live(live, delta)
    normaliser, dn_added = gradients_for(delta=delta), scores.vecDeltaN_added
    if normaliser.vecDzDen is not None and dn_added is None:
        dn_added = stage("step_sums", launches)(
            step_sums.Operands(rows=x.q, weights=r * normaliser.vecDzDen)
        )
    scores = ScoreGradients(scores.matP, scores.matDeltaP, pairs=scores.pairs)
    return BackwardCarry(gates, scores, states._replace(vecDelta=None), normaliser, dn_added)


def _live(plan: Plan, x: Inputs) -> ChunkList | None:
    """The chunks that kernels compute, those with steps; None: all. Plain jnp computes all.

    The first chunk of a row is always one, so that every recurrence has one. All others have no
    gradients.
    """
    if x.lengths is None or plan.lowering is Lowering.XLA:
        return None
    return of_lengths(jnp.maximum(x.lengths, 1), x.f.shape[1], plan.spec.problem)


def _of_live(chunks: ChunkList | None, x: Any) -> Any:
    """x, (B * NH, S), with 0 in chunks that are not live, where it may be undefined."""
    if chunks is None or x is None:
        return x
    live = chunks.live
    return only(x.reshape(*live.shape, -1), live, 0, 1).reshape(x.shape)


def second_half(
    plan: Plan, residuals: Residuals, cotangents: Cotangents, first: BackwardCarry
) -> tuple[Inputs, Array]:
    """The gradients of the inputs, where None is zeros, and those of n at the chunk boundaries.

    The arrays are ``prepared``.
    """
    (x, _, _, stored), (dh, last) = residuals, cotangents
    gates, scores, (dC, dC_initial, C, C_last, _), normaliser, dn_added = first
    if stored.C is not None:
        C, C_last = stored.C, stored.C_last
    spec, launches, live = plan.spec, plan.backward, _live(plan, x)
    gamma, n = gates.scaGamma, stored.n
    dn, dn_initial = stage("vector_states", launches)(
        vector_states.Operands(
            added=jnp.zeros_like(n) if dn_added is None else dn_added,
            scaGamma=gamma,
            initial=last.n,
        ),
        backward=not spec.problem.reverse,
    )
    gradients: Gradients = stage("parallel_bw_dQKV", launches)(
        parallel_bw_dQKV.Operands(
            matQ=x.q,
            matK=x.k,
            matV=x.v,
            matDeltaH=dh,
            gates=gates,
            normaliser_gradients=normaliser,
            scores=scores,
            matC_states=C,
            vecN_states=n,
            matDeltaC_states=dC,
            vecDeltaN_states=dn,
            live=live,
        )
    )

    dm = normaliser.vecDm if spec.stabilised else None
    first_step = spec.problem.place(0, x.f.shape[1])
    if dm is not None and spec.return_last_states:
        # The true state is exp(m) (C, n), so the part of dm that rescales C and n is removed.
        dm_last = last.m - inner(last.c, C_last, 2) - inner(last.n, stored.n_last)
        dm = dm.at[:, -1 - first_step].add(dm_last)
    flags = step_flags(gates, x.f, x.starts, spec.problem.reverse)
    di, df, dm_first = stage("step_gradients", launches)(
        step_gradients.Operands(x.f, scores.pairs or gradients.pairs, *gradients[3:6], flags, dm)
    )
    di, df = (_of_live(live, y) for y in (di, df))
    if not spec.stabilised:  # log sigmoid(i) is the input gate's logarithm
        di = jnp.where(x.i <= MASKED, 0.0, di * jax.nn.sigmoid(-x.i))
    dm_initial = jnp.where((flags[:, first_step] & M_GRAD_FLOWS) > 0, dm_first, 0.0)
    if spec.has_initial_state and spec.stabilised:
        # The initial m is also the scale of the initial states.
        dm_initial += inner(dC_initial, x.c_initial, 2) + inner(dn_initial, x.n_initial)
    dq, dk, dv = gradients.matDeltaQ, gradients.matDeltaK, gradients.matDeltaV
    return Inputs(dq, dk, dv, di, df, dC_initial, dn_initial, dm_initial), dn


def packed_backward(plan: Plan, residuals: Residuals, cotangents: Cotangents) -> Inputs:
    """The gradients of the inputs of ``packed``; residuals.states are the states that it returned.

    q, k, v, h and dh are copied to the order of a list of chunks, which both halves take for one
    sequence. The segments' states enter between the halves, because C and dC at the chunk
    boundaries are linear in them.
    """
    spec, x = plan.spec, residuals.inputs
    L = spec.problem.L
    chunks, before = segments_of(spec, x, L)
    after, d_after = map(heads_before_segments, (residuals.states, cotangents.last))
    p = dataclasses.replace(spec.problem, S=chunks.NC * L)
    spec = dataclasses.replace(
        spec.forward_only,
        problem=p,
        layout=Layout.BNTH,
        num_segments=None,
        return_last_states=False,
        has_initial_state=False,
    )
    plan = Plan(spec, plan.lowering)
    z = None if residuals.z is None else residuals.z[..., None]
    q, k, v, h, dh, z = jax.tree.map(
        lambda y: chunks.gather(y, L).reshape(p.BNH, p.S, -1),
        (x.q, x.k, x.v, residuals.h, cotangents.h, z),
    )
    i, f, starts = chunks.gates(x.i, x.f, x.starts, before.m, L)
    in_chunks = Inputs(q, k, v, i, f, None, x.n_initial, x.m_initial, starts)
    gates = run_gates(spec, plan.backward, in_chunks, with_flags=True)
    n, n_last = key_states(
        plan.backward,
        k,
        gates,
        x.n_initial,
        with_initial=lambda y: chunks.with_initial(y, before.n),
    )
    stored = StoredStates(None, n, gates.scaM_states, None, n_last)
    arrays = (
        Residuals(in_chunks, h, None if z is None else z[..., 0], stored),
        Cotangents(dh, LastStates(None, x.n_initial, None)),  # zeros
    )
    first = first_half(plan, *arrays, gates)

    rows, entries = chunks.before_parts()
    begins, ends = entries[:, :-1], entries[:, 1:]

    def with_states(C: Any, at: Array, states: Array, **backward: bool) -> Any:
        """C at the chunk boundaries, with the states of segments, which enter at these chunks."""
        entering = jnp.zeros_like(n[..., :1]).at[rows, at].set(1.0)
        operands = vector_states.Operands(entering, gates.scaGamma, x.n_initial[:, :1])
        decay, _ = vector_states.vector_states(operands, **backward, call=plain(p))
        part = lax.min(chunks.part_of_entries, np.int32(chunks.N - 1))
        return (C.astype(decay.dtype) + decay[..., None] * states[rows, part]).astype(C.dtype)

    C = first.states.matC_states
    if x.segments is not None:
        C = with_states(C, begins, before.c)
    dC = with_states(first.states.matDeltaC_states, ends, d_after.c, backward=True)
    normaliser, dn_added = first.normaliser_gradients, first.vecDeltaN_added
    dn_added = jnp.zeros_like(n) if dn_added is None else dn_added
    dn_added = dn_added.at[rows, ends].set(d_after.n)
    if normaliser.vecDm is not None:  # see ``second_half``
        dm = d_after.m - inner(d_after.c, after.c, 2) - inner(d_after.n, after.n)
        normaliser = normaliser._replace(vecDm=normaliser.vecDm.at[rows, ends * L - 1].add(dm))
    first = first._replace(
        states=first.states._replace(matC_states=C, matDeltaC_states=dC),
        normaliser_gradients=normaliser,
        vecDeltaN_added=dn_added,
    )
    dx, dn = second_half(plan, *arrays, first)
    segments = None
    if x.segments is not None:
        dc, dn, dm = dC[rows, begins].astype(dn.dtype), dn[rows, begins], dx.i[rows, begins * L]
        if spec.stabilised:  # the initial m is also the scale of the initial states
            dm += inner(dc, before.c, 2) + inner(dn, before.n)
        segments = segments_before_heads(p, dc, dn, dm)
    q, k, v = (chunks.scatter(dy, y, L) for dy, y in zip(dx[:3], x[:3], strict=True))
    i, f = (chunks.scatter_steps(dy, x.i, L) for dy in dx[3:5])
    none: Any = None  # the segments' states are in place of these
    return Inputs(q, k, v, i, f, none, none, none, segments=segments)
