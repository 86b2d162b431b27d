"""The backward schedule: the order of the stages, and the arrays between them.

Arrays belong to a shard, as in the forward schedule.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.arrays import Cotangents, Inputs, LastStates, Residuals
from mlstm_pallas.chunk_list import LiveChunks, live_chunks
from mlstm_pallas.dispatch import run
from mlstm_pallas.forward import gates_of
from mlstm_pallas.gate_gradients import inner, only, step_flags
from mlstm_pallas.gates import M_GRAD_FLOWS, MASKED, ChunkGates
from mlstm_pallas.normaliser import NormaliserGradients, normaliser_gradients, query_scale
from mlstm_pallas.planning import CallSpec
from mlstm_pallas.stage import Lowering, ScaledRows
from mlstm_pallas.stages.parallel_bw_dP import ScoreGradients
from mlstm_pallas.stages.parallel_bw_dQKV import Gradients
from mlstm_pallas.stages.recurrent_bw_dC import StateGradients


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
    gates = gates_of(spec, spec.launch("chunk_gates", lowering), x, stored.m, with_flags=True)
    g = gates.per_step()
    gradients_for = functools.partial(normaliser_gradients, spec.normaliser, z=z, m=g.vecM)
    r = query_scale(g.vecW, spec.problem.qk_scale, gradients_for(delta=None).vecInvDen)
    if spec.recomputes_scores(lowering):
        scores = ScoreGradients(queries=ScaledRows(x.q, r), keys=ScaledRows(x.k, g.vecAbar))
    else:
        scores = run(
            "parallel_bw_dP",
            matQ=x.q,
            matK=x.k,
            matV=x.v,
            matDeltaH=dh,
            gates=gates,
            matH=h,
            vecZ=z,
            normaliser=spec.normaliser,
            live=live,
            return_keys=recompute,
            call=spec.launch("parallel_bw_dP", lowering),
        )
    states: StateGradients = run(
        "recurrent_bw_dC",
        queries=scores.queries,
        matDeltaH=dh,
        scaGamma=gates.scaGamma,
        matDeltaC_last=last.c,
        keys=scores.keys if recompute else None,
        matV=x.v,
        matC_initial=x.c_initial,
        matH=h if scores.vecDelta is None else None,
        live=live,
        return_initial=spec.has_initial_state,
        return_last=spec.return_last_states,
        call=spec.launch("recurrent_bw_dC", lowering),
    )
    delta = states.vecDelta if scores.vecDelta is None else scores.vecDelta
    # Undefined values of delta would reach live chunks, through dm and dn. All other undefined
    # values stay in their chunks.
    delta = _of_live(live, delta)
    normaliser, dn_added = gradients_for(delta=delta), scores.vecDeltaN_added
    if normaliser.vecDzDen is not None and dn_added is None:
        dn_added = run(
            "step_sums",
            rows=x.q,
            weights=r * normaliser.vecDzDen,
            call=spec.launch("step_sums", _scores_lowering(spec, lowering)),
        )
    scores = ScoreGradients(scores.matP, scores.matDeltaP, pairs=scores.pairs)
    return BackwardCarry(gates, scores, states._replace(vecDelta=None), normaliser, dn_added)


def _live(spec: CallSpec, lowering: Lowering, x: Inputs) -> LiveChunks | None:
    """The chunks that kernels compute; None: all. Plain jnp computes all."""
    if x.lengths is None or lowering is Lowering.XLA:
        return None
    return live_chunks(x.lengths, spec.problem)


def _of_live(live: LiveChunks | None, x: Any) -> Any:
    """x, (B * NH, S), with 0 in chunks that are not live, where it may be undefined."""
    if live is None or x is None:
        return x
    mask = live.mask
    return only(x.reshape(*mask.shape, -1), mask, 0, 1).reshape(x.shape)


def _scores_lowering(spec: CallSpec, lowering: Lowering) -> Lowering:
    """The lowering of the kernel that computes P and dP."""
    name = "parallel_bw_dQKV" if spec.recomputes_scores(lowering) else "parallel_bw_dP"
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
    dn, dn_initial = run(
        "vector_states",
        added=jnp.zeros_like(n) if dn_added is None else dn_added,
        scaGamma=gamma,
        initial=last.n,
        backward=True,
        call=spec.launch("vector_states", scores_lowering),
    )
    gradients: Gradients = run(
        "parallel_bw_dQKV",
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
        call=spec.launch("parallel_bw_dQKV", lowering),
    )

    dm = normaliser.vecDm if spec.stabilised else None
    if dm is not None and spec.return_last_states:
        # The true state is exp(m) (C, n), so the part of dm that rescales C and n is removed.
        dm = dm.at[..., -1].add(last.m - inner(last.c, C_last, 2) - inner(last.n, stored.n_last))
    flags = step_flags(gates, x.f, x.starts)
    di, df, dm_first = run(
        "step_gradients",
        vecF=x.f,
        pairs=scores.pairs or gradients.pairs,
        q_dot_dq_inter=gradients.q_dot_dq_inter,
        k_dot_dk_inter=gradients.k_dot_dk_inter,
        through=gradients.inner_C_dC,
        flags=flags,
        dm=dm,
        call=spec.launch("step_gradients", scores_lowering),
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
