"""Stage chunk_gates: the gates and stabilisers of all chunks; ``gates.py`` has the equations.

It runs three bodies:

summaries: what each chunk does to m, from the gate pre-activations.
stabilisers: m at the chunk boundaries, a prefix scan over the chunks of a head.
step_gates: the gates of every step, from the pre-activations and m, and in the backward pass their
flags (``gates.join_flags``). It repeats the prefix scans of ``summaries``, which is faster than to
write and read them. If m is known, it is the only body.

Bytes of the kernels: 11 vectors of B NH S float32, one more with flags; no matrix product.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas import gates
from mlstm_pallas.formulas.gates import ChunkGates, LocalGates
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.problem.dimensions import InputGate
from mlstm_pallas.vectors.scan import PrefixScan, scan_chunks, vector_call

_INF = float("inf")


class Operands(NamedTuple):
    vecI: Array  # (B * NH, S) pre-activations, float32 like all floats here
    vecF: Array  # (B * NH, S)
    scaM_initial: Array  # (B * NH,); zeros with the sigmoid gate
    segment_starts: Array | None = None  # (B * NH, S) int32, 1 where a packed segment begins
    # (B * NH, NC + 1) the stabilisers at the chunk boundaries; None: they are computed
    scaM_states: Array | None = None


def local_gates(
    scan: PrefixScan,
    log_i: Array,
    log_f: Array,
    reset: Array,
    is_start: Array | None,
    input_gate: InputGate,
) -> LocalGates:
    """The gates of every chunk by itself.

    log_i, log_f, reset: of ``gates.log_gates``; is_start: where packed segments begin.
    """
    stored, decay = log_i > -_INF, -log_f
    i_min, i_max, largest, total = scan.totals(
        (jnp.minimum, _INF, jnp.where(stored, log_i, _INF)),
        (jnp.maximum, -_INF, jnp.where(stored, log_i, -_INF)),
        (jnp.maximum, 0.0, decay),
        (jnp.add, 0.0, decay),
    )
    if is_start is not None or not input_gate.stabilised:  # m = 0 is a source as well
        i_min, i_max = jnp.minimum(i_min, 0.0), jnp.maximum(i_max, 0.0)
    boundary = reset if is_start is None else reset | is_start
    split = gates.split_at(log_f, gates.exact_sum_grid(largest, scan.L))
    hi, lo, count = scan.sums(*split, boundary.astype(log_f.dtype))
    b, offset = gates.two_sum(hi, lo), count * gates.reset_offset(i_min, i_max, total)
    e, emax = gates.stabiliser_sources(log_i, log_f, b, offset, reset, is_start, input_gate)
    if input_gate.stabilised:
        sources, identities = (*emax, count), (-_INF, 0.0, -1.0)
        *emax, _ = scan.running(gates.largest_since_reset, sources, identities)
    return LocalGates(b, e, emax, offset)


def summaries(scan: PrefixScan, i: Array, f: Array, starts: Any, *, input_gate: InputGate) -> Any:
    """No output per step, and ``gates.summary`` of each chunk."""
    is_start = None if starts is None else starts > 0
    local = local_gates(scan, *gates.log_gates(i, f, input_gate), is_start, input_gate)
    return (), gates.summary(local)


def stabilisers(scan: PrefixScan, g: Array, a: Array, m_initial: Array) -> Array:
    """m after each chunk, from the chunks' summaries; the steps of ``scan`` are the chunks."""
    added, largest = scan.running(gates.join_summaries, (g, a), (0.0, -_INF))
    return jnp.maximum(added + m_initial, largest)


def joined_gates(scan: PrefixScan, local: LocalGates, m: Any, input_gate: InputGate) -> Any:
    """Outputs per step in the order of ``ChunkGates``, and gamma; m: before and after the chunk."""
    p, gamma = gates.join_ends(*scan.last(*local.vecB, local.vecOffset), *m)
    u, w, m_steps, abar = gates.join_steps(local, m[0], p, input_gate)
    return [*local.vecE, *u, w, m_steps, abar], gamma


def step_gates(
    scan: PrefixScan,
    i: Array,
    f: Array,
    starts: Any,
    *,
    m: Any,
    input_gate: InputGate,
    with_flags: bool,
) -> Any:
    """``joined_gates``, and with the flags behind the other outputs per step."""
    is_start = None if starts is None else starts > 0
    log_i, log_f, reset = gates.log_gates(i, f, input_gate)
    local = local_gates(scan, log_i, log_f, reset, is_start, input_gate)
    per_step, gamma = joined_gates(scan, local, m, input_gate)
    if with_flags:
        e_hi, e_lo, u_hi, u_lo, _, m_steps, _ = per_step
        boundary = reset if is_start is None else reset | is_start
        of_step = m_steps, scan.shifted(m_steps, m[0]), f, log_f, boundary, is_start
        per_step.append(gates.join_flags((e_hi, e_lo), (u_hi, u_lo), *of_step))
    return per_step, [gamma]


def chunk_gates(
    x: Operands,
    *,
    input_gate: InputGate = InputGate.EXP,
    with_flags: bool = False,
    only_boundaries: bool = False,
    call: Launch,
    vector_call: Any = vector_call,
    scan_chunks: Any = scan_chunks,
) -> ChunkGates | tuple[Array, Array]:
    """Runs the stage.

    Args:
      with_flags: whether to return the flags that the gradients of the gates read.
      only_boundaries: whether to return m after each chunk and what each chunk adds to it, -inf if
        it holds a reset: (B * NH, NC) each, in processing order. Not with the sigmoid gate.
      vector_call, scan_chunks: of the lowering; see ``vectors/scan.py``.
    """
    p, m, steps = call.problem, x.scaM_states, (x.vecI, x.vecF, x.segment_starts)
    if m is None and not input_gate.stabilised:
        m = jnp.zeros((p.BNH, p.NC + 1), x.scaM_initial.dtype)
    if m is None:
        body = functools.partial(summaries, input_gate=input_gate)
        _, (g, a), _ = vector_call(body, steps, (), 2, name="chunk_summaries", call=call)
        scan = functools.partial(scan_chunks, stabilisers, name="stabiliser_scan", call=call)
        m = scan((g, a), x.scaM_initial, after=only_boundaries)
        if only_boundaries:
            return m, g[:, : p.NC]
    outputs = ("float32",) * 7 + ("int32",) * with_flags
    body = functools.partial(step_gates, input_gate=input_gate, with_flags=with_flags)
    per_step, (gamma,), m = vector_call(body, steps, outputs, 1, name="chunk_gates", call=call, m=m)
    return gates.as_chunk_gates(per_step, gamma, m)
