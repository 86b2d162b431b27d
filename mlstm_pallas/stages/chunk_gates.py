"""Stage chunk_gates: the gates and stabilisers of all chunks; ``gates.py`` has the equations."""

import jax

from mlstm_pallas import gates
from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.problem import InputGate
from mlstm_pallas.stage import Launch, Stage


def chunk_gates(
    vecI: jax.Array,
    vecF: jax.Array,
    scaM_initial: jax.Array,
    starts: jax.Array | None = None,
    input_gate: InputGate = InputGate.EXP,
    scaM_states: jax.Array | None = None,
    lengths: jax.Array | None = None,
    *,
    with_flags: bool = False,
    call: Launch,
) -> ChunkGates:
    """Runs the stage.

    Args:
      vecI, vecF: pre-activations (B * NH, S), float32.
      scaM_initial: (B * NH,), float32; zeros with the sigmoid gate.
      starts: (B * NH, S) int32, 1 where a packed segment begins; None: nowhere.
      scaM_states: the stabilisers at the chunk boundaries, (B * NH, NC + 1) float32; None: they are
        computed.
      lengths: (B * NH,) int32: h_t is 0 from this step on; None: nowhere.
      with_flags: whether a kernel may return the flags that the gradients of the gates read. Where
        it does not, ``gate_gradients`` computes them.
    """
    begins = None if starts is None else call.chunks(starts)
    local = gates.local_gates(call.chunks(vecI), call.chunks(vecF), begins, input_gate)
    if scaM_states is None:
        scaM_states = gates.stabiliser_scan(local, scaM_initial, input_gate)
    joined = gates.join_chunks(local, scaM_states, input_gate, lengths)
    barred: ChunkGates = gates.fusion_barrier(joined, joined.scaGamma)
    return barred


STAGE = Stage(name="chunk_gates", inputs=("vecI", "vecF", "scaM_initial"))
