"""Stage chunk_gates: the gates and stabilisers of all chunks; ``gates.py`` has the equations."""

from typing import NamedTuple

from jax import Array

from mlstm_pallas.formulas import gates
from mlstm_pallas.formulas.gates import ChunkGates
from mlstm_pallas.problem.dimensions import InputGate
from mlstm_pallas.stages.stage import Launch


class Operands(NamedTuple):
    vecI: Array  # (B * NH, S) pre-activations, float32 like all floats here
    vecF: Array  # (B * NH, S)
    scaM_initial: Array  # (B * NH,); zeros with the sigmoid gate
    segment_starts: Array | None = None  # (B * NH, S) int32, 1 where a packed segment begins
    # (B * NH, NC + 1) the stabilisers at the chunk boundaries; None: they are computed
    scaM_states: Array | None = None


def chunk_gates(
    x: Operands,
    *,
    input_gate: InputGate = InputGate.EXP,
    with_flags: bool = False,
    only_boundaries: bool = False,
    call: Launch,
) -> ChunkGates | tuple[Array, Array]:
    """Runs the stage.

    with_flags: whether a kernel may return the flags that the gradients of the gates read. Where it
      does not, ``gate_gradients`` computes them.
    only_boundaries: whether to return m after each chunk and what each chunk adds to it, -inf if it
      holds a reset: (B * NH, NC) each. Not with the sigmoid gate.
    """
    x = call.processing_order(x)
    is_start = None if x.segment_starts is None else call.chunks(x.segment_starts)
    logs = gates.log_gates(call.chunks(x.vecI), call.chunks(x.vecF), input_gate)
    local = gates.local_gates(*logs, is_start, input_gate)
    m_states = x.scaM_states
    if m_states is None:
        m_states = gates.stabiliser_scan(local, x.scaM_initial, input_gate)
    if only_boundaries:
        return m_states[:, 1:], gates.chunk_summaries(local)[0]
    joined = gates.join_chunks(local, m_states, input_gate)
    barred: ChunkGates = call.processing_order(gates.fusion_barrier(joined, joined.scaGamma))
    return barred
