"""The backward schedule: which stages run, and what goes from one to the next. Arrays are those of a shard, (B * NH, ...)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.call_spec import CallSpec, Cotangents, Inputs, Residuals, States
from mlstm_pallas.gate_gradients import (
    gate_gradients,
    initial_stabiliser_gradient,
    inner,
    last_stabiliser_cotangent,
    zero_states,
)
from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.normaliser import NormaliserGradients, query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering, StageCall
from mlstm_pallas.stages.chunk_gates import chunk_gates
from mlstm_pallas.stages.parallel_bw_dP import GradientTiles, parallel_bw_dP, with_delta, without_tiles
from mlstm_pallas.stages.parallel_bw_dQKV import parallel_bw_dQKV
from mlstm_pallas.stages.recurrent_bw_dC import recurrent_bw_dC
from mlstm_pallas.stages.step_gradients import step_gradients
from mlstm_pallas.stages.vector_states import vector_states


def backward(spec: CallSpec, lowering: Lowering, residuals: Residuals, cotangents: Cotangents) -> Inputs:
    """The gradients of the inputs."""
    if lowering is Lowering.XLA:
        return _backward(spec, lowering, residuals, cotangents)
    x, h = residuals.inputs, residuals.h
    x = x._replace(q=spec.strided(x.q), k=spec.strided(x.k), v=spec.strided(x.v))
    residuals = residuals._replace(inputs=x, h=None if h is None else spec.strided(h))
    gradients = _backward(spec, lowering, residuals, cotangents._replace(h=spec.strided(cotangents.h)))
    return gradients._replace(q=spec.flat(gradients.q), k=spec.flat(gradients.k), v=spec.flat(gradients.v))


def _backward(spec: CallSpec, lowering: Lowering, residuals: Residuals, cotangents: Cotangents) -> Inputs:
    x, h, z, stored = residuals
    if not spec.has_initial_state:
        x = x._replace(c_initial=None)
    recompute = stored.C is None
    if recompute:
        # Else XLA sees that the forward pass computed the same states, and keeps those. On CPUs a barrier copies what passes it: k and v do
        # not, as states and scores differ by the others.
        k, v = x.k, x.v
        x = lax.optimization_barrier(x)
        if lowering is Lowering.XLA:
            x = x._replace(k=k, v=v)
    dh, last = cotangents.h, cotangents.last or States(None, jnp.zeros_like(x.n_initial), None)
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, spec.input_gate, stored.m, call=spec.call("chunk_gates", lowering))
    gamma = gates.scaGamma
    operands, tiles_call = (x.q, x.k, x.v, dh, gates), call_of_tiles(spec, lowering)
    tiles = gradient_tiles(spec, lowering, *operands, h, z, scale_keys=recompute, scaled=not spec.weights_operands)
    queries, keys, weights = tiles.matQ_scaled, tiles.matK_scaled, {}
    if spec.weights_operands:
        queries, keys, weights = x.q, x.k, state_weights(spec.problem, gates, tiles.normaliser_gradients)
    recomputed = (keys, x.v, x.c_initial) if recompute else ()
    dC, dC_initial, C, C_last, delta = recurrent_bw_dC(
        *(queries, dh, gamma, last.c, *recomputed),
        **weights,
        matH=h if spec.fused_tiles else None,
        return_initial=spec.has_initial_state,
        return_last=spec.return_last_states,
        call=spec.call("recurrent_bw_dC", lowering),
    )
    if not recompute:
        C, C_last = stored.C, stored.C_last
    if spec.normaliser is not None and delta is not None:
        tiles = with_delta(tiles, x.q, gates, z, delta, normaliser=spec.normaliser, call=tiles_call)
    of_normaliser, n = tiles.normaliser_gradients, stored.n
    dn_added = jnp.zeros_like(n) if tiles.vecDeltaN_added is None else tiles.vecDeltaN_added
    dn, dn_initial = vector_states(dn_added, gamma, last.n, tiles_call, backward=True)
    gradients = parallel_bw_dQKV(*operands, of_normaliser, tiles, C, n, dC, dn, call=spec.call("parallel_bw_dQKV", lowering))

    through_chunk = gamma * (gradients.scaStates + inner(n, dn))
    dm = of_normaliser.vecDm if spec.stabilised else None
    if dm is not None and spec.return_last_states:
        dm = last_stabiliser_cotangent(dm, last, C_last, stored.n_last)
    starts = None if x.starts is None else spec.chunks(x.starts)
    di, df, dm_initial = gate_gradients(
        *(gates, spec.chunks(x.i), spec.chunks(x.f), gradients.pairs if tiles.pairs is None else tiles.pairs),
        gradients.vecQ_inter,
        gradients.vecK_inter,
        through_chunk,
        dm,
        starts,
        spec.input_gate,
        step_gradients=functools.partial(step_gradients, call=tiles_call),
    )
    if not spec.has_initial_state:  # nobody asks for these
        dC_initial = zero_states(dm_initial, spec.problem.DHQK, spec.problem.DHHV)
    elif spec.stabilised:
        dm_initial += initial_stabiliser_gradient(dC_initial, dn_initial, x.c_initial, x.n_initial)
    return Inputs(gradients.matDeltaQ, gradients.matDeltaK, gradients.matDeltaV, di, df, dC_initial, dn_initial, dm_initial)


def call_of_tiles(spec: CallSpec, lowering: Lowering) -> StageCall:
    """Of the stage that computes P and dP."""
    return spec.call("parallel_bw_dQKV" if spec.fused_tiles else "parallel_bw_dP", lowering)


def gradient_tiles(
    spec: CallSpec, lowering: Lowering, q, k, v, dh, gates: ChunkGates, h, z, *, scale_keys: bool, scaled: bool
) -> GradientTiles:
    """parallel_bw_dP, or ``without_tiles`` where parallel_bw_dQKV computes P and dP; the arguments are those of the stage.

    With an h recurrent_bw_dC then computes delta, and ``with_delta`` adds what takes it.
    """
    options: dict[str, Any] = dict(normaliser=spec.normaliser, scale_keys=scale_keys, scaled=scaled, call=call_of_tiles(spec, lowering))
    if spec.fused_tiles:
        return without_tiles(q, k, gates, z, needs_delta=h is not None, **options)
    return parallel_bw_dP(q, k, v, dh, gates, h, z, **options)


def state_weights(p: Problem, gates: ChunkGates, of_normaliser: NormaliserGradients) -> dict[str, jax.Array]:
    """Of the queries and the keys of each step in dC and in C, for recurrent_bw_dC."""
    g = gates.per_step()
    return dict(vecR=query_scale(g.vecW, p.qk_scale, of_normaliser.vecInvDen), vecAbar=g.vecAbar)
