"""The backward schedule: the order of the stages, and the arrays between them.

Arrays belong to a shard, as in the forward schedule.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.formulas.chunk_list import ChunkList, of_lengths
from mlstm_pallas.formulas.gate_gradients import inner, only, step_flags
from mlstm_pallas.formulas.gates import M_GRAD_FLOWS, MASKED, ChunkGates
from mlstm_pallas.formulas.normaliser import NormaliserGradients, normaliser_gradients, query_scale
from mlstm_pallas.planning.call_spec import CallSpec
from mlstm_pallas.problem.arrays import Cotangents, Inputs, LastStates, Residuals
from mlstm_pallas.schedules.forward import in_time, run_gates
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


def backward(
    spec: CallSpec, lowering: Lowering, residuals: Residuals, cotangents: Cotangents
) -> Inputs:
    """The gradients of the inputs."""
    arrays = prepared(spec, lowering, residuals, cotangents)
    return second_half(spec, lowering, *arrays, first_half(spec, lowering, *arrays))


def prepared(
    spec: CallSpec, lowering: Lowering, residuals: Residuals, cotangents: Cotangents
) -> tuple[Residuals, Cotangents]:
    """The arrays of both halves."""
    x = residuals.inputs
    if not spec.has_initial_state:
        x = x._replace(c_initial=None)
    if residuals.states.C is None:
        # Without the barrier XLA finds the same states in the forward pass and keeps those. On CPUs
        # a barrier copies its operands, so k and v go around it: states and scores still differ by
        # the other operands.
        k, v = x.k, x.v
        x = lax.optimization_barrier(x)
        if lowering is Lowering.XLA:
            x = x._replace(k=k, v=v)
    last = cotangents.last or LastStates(None, jnp.zeros_like(x.n_initial), None)
    return residuals._replace(inputs=x), cotangents._replace(last=last)


def first_half(
    spec: CallSpec, lowering: Lowering, residuals: Residuals, cotangents: Cotangents
) -> BackwardCarry:
    """The gates, P and dP, the states, and their gradients at the chunk boundaries.

    Of these only dC depends on the gradients of the last states; it is linear in that of C. The
    arrays are ``prepared``. The first stage that reads dh gets h as well, and returns delta.
    """
    (x, h, z, stored), (dh, last) = residuals, cotangents
    recompute, live = stored.C is None, _live(spec, lowering, x)
    gates = run_gates(spec, spec.launch("chunk_gates", lowering), x, stored.m, with_flags=True)
    g = gates.per_step()
    gradients_for = functools.partial(normaliser_gradients, spec.normaliser, z=z, m=g.vecM)
    r = query_scale(g.vecW, spec.problem.qk_scale, gradients_for(delta=None).vecInvDen)
    if spec.computes_scores(lowering):
        scores = ScoreGradients(queries=ScaledRows(x.q, r), keys=ScaledRows(x.k, g.vecAbar))
    else:
        scores = spec.stage("parallel_bw_dP", lowering)(
            parallel_bw_dP.Operands(
                matQ=x.q, matK=x.k, matV=x.v, matDeltaH=dh, gates=gates, matH=h, vecZ=z, live=live
            ),
            normaliser=spec.normaliser,
            return_keys=recompute,
        )
    states: StateGradients = spec.stage("recurrent_bw_dC", lowering)(
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
        dn_added = spec.stage("step_sums", _scores_lowering(spec, lowering))(
            step_sums.Operands(rows=x.q, weights=r * normaliser.vecDzDen)
        )
    scores = ScoreGradients(scores.matP, scores.matDeltaP, pairs=scores.pairs)
    return BackwardCarry(gates, scores, states._replace(vecDelta=None), normaliser, dn_added)


def _live(spec: CallSpec, lowering: Lowering, x: Inputs) -> ChunkList | None:
    """The chunks that kernels compute, those with steps; None: all. Plain jnp computes all.

    The first chunk of a row is always one, so that every recurrence has one. All others have no
    gradients.
    """
    if x.lengths is None or lowering is Lowering.XLA:
        return None
    return of_lengths(jnp.maximum(x.lengths, 1), x.f.shape[1], spec.problem)


def _of_live(chunks: ChunkList | None, x: Any) -> Any:
    """x, (B * NH, S), with 0 in chunks that are not live, where it may be undefined."""
    if chunks is None or x is None:
        return x
    live = chunks.live
    return only(x.reshape(*live.shape, -1), live, 0, 1).reshape(x.shape)


def _scores_lowering(spec: CallSpec, lowering: Lowering) -> Lowering:
    """The lowering of the kernel that computes P and dP."""
    name = "parallel_bw_dQKV" if spec.computes_scores(lowering) else "parallel_bw_dP"
    return spec.launch(name, lowering).lowering


def second_half(
    spec: CallSpec,
    lowering: Lowering,
    residuals: Residuals,
    cotangents: Cotangents,
    first: BackwardCarry,
) -> Inputs:
    """The gradients of the inputs; None: zeros. The arrays are ``prepared``."""
    (x, _, _, stored), (dh, last) = residuals, cotangents
    gates, scores, (dC, dC_initial, C, C_last, _), normaliser, dn_added = first
    if stored.C is not None:
        C, C_last = stored.C, stored.C_last
    gamma, n, scores_lowering = gates.scaGamma, stored.n, _scores_lowering(spec, lowering)
    live = _live(spec, lowering, x)
    dn, dn_initial = spec.stage("vector_states", scores_lowering)(
        vector_states.Operands(
            added=jnp.zeros_like(n) if dn_added is None else dn_added,
            scaGamma=gamma,
            initial=last.n,
        ),
        backward=not spec.reverse,
    )
    gradients: Gradients = spec.stage("parallel_bw_dQKV", lowering)(
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
    of_steps = x.f, scores.pairs or gradients.pairs, *gradients[3:6]  # up to ``through``
    gates, starts, of_steps, dm = in_time(spec, (gates, x.starts, of_steps, dm))
    if dm is not None and spec.return_last_states:
        # The true state is exp(m) (C, n), so the part of dm that rescales C and n is removed.
        dm = dm.at[..., -1].add(last.m - inner(last.c, C_last, 2) - inner(last.n, stored.n_last))
    flags = step_flags(gates, of_steps[0], starts)
    di, df, dm_first = in_time(
        spec,
        spec.stage("step_gradients", scores_lowering)(
            step_gradients.Operands._make((*of_steps, flags, dm))
        ),
    )
    di, df = (_of_live(live, y) for y in (di, df))
    if not spec.stabilised:  # log sigmoid(i) is the input gate's logarithm
        di = jnp.where(x.i <= MASKED, 0.0, di * jax.nn.sigmoid(-x.i))
    dm_initial = jnp.where((flags[:, 0] & M_GRAD_FLOWS) > 0, dm_first, 0.0)
    if spec.has_initial_state and spec.stabilised:
        # The initial m is also the scale of the initial states.
        dm_initial += inner(dC_initial, x.c_initial, 2) + inner(dn_initial, x.n_initial)
    dq, dk, dv = gradients.matDeltaQ, gradients.matDeltaK, gradients.matDeltaV
    return Inputs(dq, dk, dv, di, df, dC_initial, dn_initial, dm_initial)
