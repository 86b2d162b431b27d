"""The forward schedule: the order of the stages, and the arrays between them.

Arrays belong to a shard, (B * NH, ...); q, k, v and h are (B, S, NH, D) with layout="BTNH".
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.formulas.gates import ChunkGates, only_outputs
from mlstm_pallas.formulas.splits import decays_in_splits, split_states, splits_as_heads
from mlstm_pallas.operands.chunk_list import ChunkList, chunks_by_segment, chunks_that_count
from mlstm_pallas.planning.call_spec import CallSpec, Plan
from mlstm_pallas.planning.dispatch import Launches, stage
from mlstm_pallas.problem.arrays import Forward, Inputs, States, StoredStates
from mlstm_pallas.problem.steps import Steps
from mlstm_pallas.stages import (
    parallel_fw_H,
    parallel_fw_P,
    recurrent_fw_C,
    recurrent_fw_H,
    split_products,
    step_sums,
    vector_states,
)
from mlstm_pallas.vectors import chunk_gates


class PrecomputedStates(NamedTuple):
    """What the devices of a sequence have computed for their exchange; float32."""

    gates: ChunkGates  # in the chunks of the fused scan
    n: Array  # (B * NH, NC, DHQK), what each chunk adds to n
    matX: Array  # (B * NH, num_splits, DHQK, DHV), what each split adds to C


def forward(plan: Plan, x: Inputs, precomputed: PrecomputedStates | None = None) -> Forward:
    """The forward pass."""
    return fused_scan(plan, x, precomputed) if plan.uses_fused_scan else materialised(plan, x)


def run_gates(
    spec: CallSpec, launches: Launches, x: Inputs, m_states: Array | None = None, **options: Any
) -> ChunkGates:
    """Runs chunk_gates; m_states: the stabilisers at the chunk boundaries, if already known."""
    operands = chunk_gates.Operands(x.i, x.f, x.initial.m, x.steps.segment_starts, m_states)
    gates = stage("chunk_gates", launches)(operands, input_gate=spec.input_gate, **options)
    return only_outputs(gates, x.steps.that_count(x.f.shape[1]))


def key_sums(
    launches: Launches, k: Array, gates: ChunkGates, chunks: ChunkList | None = None
) -> Array:
    """What each chunk adds to n, (B * NH, NC, DHQK)."""
    operands = step_sums.Operands(k, gates.per_step().vecAbar, chunks)
    return stage("step_sums", launches)(operands)


def key_states(
    launches: Launches, added: Array, gates: ChunkGates, n_initial: Array
) -> tuple[Array, Array]:
    """n before each chunk, (B * NH, NC, DHQK), and the last one; added: ``key_sums``."""
    launch = launches["vector_states"]
    return stage("vector_states", launches)(
        vector_states.Operands(added, gates.scaGamma, n_initial), backward=launch.problem.reverse
    )


def segments_of(spec: CallSpec, x: Inputs, L: int) -> tuple[ChunkList, States]:
    """The chunks of L steps of rows of packed segments, and the segments' initial states."""
    chunks = chunks_by_segment(x.steps.segment_ends, x.v.shape[1], L)
    if x.segments is not None:
        return chunks, x.segments
    zeros = jax.tree.map(jnp.zeros_like, x.initial._replace(c=None))
    return chunks, jax.tree.map(lambda y: jnp.repeat(y[:, None], chunks.N, axis=1), zeros)


def packed(plan: Plan, x: Inputs) -> Forward:
    """The forward pass of rows of packed segments, with the states before and after each.

    It is the fused scan over a list of chunks, whose segments run side by side.
    """
    spec, launches, L = plan.spec, plan.forward, plan.fused_problem.L
    chunks, (C, n, m) = segments_of(spec, x, L)
    i, f = chunks.gates(x.i, x.f, m, L)
    in_list = x._replace(i=i, f=f, steps=Steps())
    gates = run_gates(spec, launches, in_list)
    added = chunks.with_initial(key_sums(launches, x.k, gates, chunks), n)
    n_states, _ = key_states(launches, added, gates, x.initial.n)
    scores_and_keys = stage("parallel_fw_P", launches)(
        parallel_fw_P.Operands(x.q, x.k, gates, n_states, chunks), normaliser=spec.normaliser
    )
    H, C_last, _ = stage("recurrent_fw_H", launches)(
        recurrent_fw_H.Operands(
            matQ=x.q,
            matV=x.v,
            scores_and_keys=scores_and_keys._replace(vecZ=None),
            scaGamma=gates.scaGamma,
            matC_initial=None if C is None else chunks.states(C, spec.problem),
            chunks=chunks,
        )
    )
    C_last = jnp.swapaxes(C_last, 1, 2).reshape(*n.shape, spec.problem.DHV)
    n, m = (y[chunks.behind_segments()] for y in (n_states, gates.scaM_states))
    z = scores_and_keys.vecZ
    z = None if z is None else chunks.scatter_steps(z, x.i, L)
    return Forward(H, States(C_last, n, m), z, None)


def materialised(plan: Plan, x: Inputs) -> Forward:
    """The forward pass with the state of every chunk in memory."""
    spec, launches = plan.spec, plan.forward
    gates = run_gates(spec, launches, x)
    C, C_last, n, n_last = stage("recurrent_fw_C", launches)(
        recurrent_fw_C.Operands(
            matK=x.k,
            matV=x.v,
            vecAbar=gates.per_step().vecAbar,
            scaGamma=gates.scaGamma,
            matC_initial=x.initial.c,
            vecN_initial=x.initial.n,
        ),
        return_last=spec.return_last_states,
    )
    h, z = stage("parallel_fw_H", launches)(
        parallel_fw_H.Operands(
            matQ=x.q, matK=x.k, matV=x.v, gates=gates, matC_states=C, vecN_states=n
        ),
        normaliser=spec.normaliser,
    )
    m = gates.scaM_states
    last = None
    if C_last is not None:
        last = States(C_last, n_last, m[:, 0 if spec.problem.reverse else -1])
    if spec.recompute_states_in_bw:
        C = C_last = None
    return Forward(h, last, z, StoredStates(C, n, m, C_last, n_last))


def fused_scan(plan: Plan, x: Inputs, precomputed: PrecomputedStates | None) -> Forward:
    """The fused scan, with the state on the chip. It has chunks of its own; splits count as heads.

    Stored states are those at the boundaries of the call's chunks.
    """
    spec, launches, p, num_splits = plan.spec, plan.forward, plan.fused_problem, plan.num_splits
    chunks = chunks_that_count(x.steps, x.v.shape[1], p) if plan.skips_chunks else None
    if precomputed is None:
        gates = run_gates(spec, launches, x)
        added = key_sums(launches, x.k, gates, chunks)
    else:
        gates, added = precomputed.gates, precomputed.n
    q, v, gamma = x.q, x.v, gates.scaGamma
    n, n_last = key_states(launches, added, gates, x.initial.n)
    scores_and_keys = stage("parallel_fw_P", launches)(
        parallel_fw_P.Operands(x.q, x.k, gates, n, chunks), normaliser=spec.normaliser
    )
    z, C_initial = scores_and_keys.vecZ, x.initial.c
    scores_and_keys = scores_and_keys._replace(vecZ=None)
    if precomputed is not None:  # C while parallel_fw_P runs
        scores_and_keys, C_initial = lax.optimization_barrier((scores_and_keys, C_initial))
    if num_splits > 1:
        if precomputed is not None and plan.summary_splits == num_splits:
            added = precomputed.matX[:, :-1]
        else:
            keys = scores_and_keys.keys
            added = stage("split_products", launches)(
                split_products.Operands(
                    a=keys.array,
                    b=v,
                    r=keys.times(decays_in_splits(gamma, num_splits, p.S, backward=p.reverse)),
                ),
                num_splits=num_splits,
                backward=p.reverse,
            )
        C_initial = split_states(added, gamma, C_initial, backward=p.reverse)
        q, v, gamma, scores_and_keys = jax.tree.map(
            lambda y: splits_as_heads(y, num_splits, p.S), (q, v, gamma, scores_and_keys)
        )
    stride = spec.problem.L // p.L
    H, C_last, C = stage("recurrent_fw_H", launches)(
        recurrent_fw_H.Operands(
            matQ=q,
            matV=v,
            scores_and_keys=scores_and_keys,
            scaGamma=gamma,
            matC_initial=C_initial,
            chunks=chunks,
        ),
        return_last=spec.return_last_states,
        store_every=0 if spec.recompute_states_in_bw else stride,
    )
    last, m = None, gates.scaM_states[:, ::stride]
    if C_last is not None:
        end = 0 if p.reverse else -1
        C_last = C_last.reshape(p.BNH, num_splits, p.DHQK, p.DHV)[:, end]
        last = States(C_last, n_last, m[:, end])
    if C is None:
        C_last = None
    else:
        C = C.reshape(p.BNH, spec.problem.NC, *C.shape[2:])
    stored = StoredStates(C, n[:, p.memory_index(0, stride) :: stride], m, C_last, n_last)
    return Forward(H.reshape(x.v.shape), last, z, stored)
