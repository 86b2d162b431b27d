"""The mLSTM in plain jnp: the recurrence, step by step, and its chunkwise form.

Both are differentiable as often as wanted, in reverse and forward mode, and run in float64 where jax_enable_x64 is set.
``recurrence`` is the oracle of the tests.

Notation (after the TFLA paper, Beck et al. 2025, arXiv:2503.14376): B batch, NH heads, S sequence length, DHQK head dimension of q and k,
DHHV of v and h, NC chunks of L steps.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.gates import log_forget_gate, log_input_gate, segment_starts
from mlstm_pallas.normaliser import Normaliser
from mlstm_pallas.problem import InputGate, Problem
from mlstm_pallas.stage import Lowering, StageCall, StageConfig
from mlstm_pallas.stages.chunk_gates import chunk_gates
from mlstm_pallas.stages.parallel_fw_H import parallel_fw_H
from mlstm_pallas.stages.recurrent_fw_C import recurrent_fw_C

_INF = float("inf")
States = tuple[jax.Array, jax.Array, jax.Array]


def recurrence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    i: jax.Array,
    f: jax.Array,
    c_initial: jax.Array | None = None,
    n_initial: jax.Array | None = None,
    m_initial: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    eps: float = 1e-6,
    stabilize_correctly: bool = True,
    norm_val: float = 1.0,
    input_gate: str = "exp",
    normalize: bool = True,
) -> tuple[jax.Array, States]:
    """The mLSTM as it is defined, one step at a time (xLSTM, Beck et al. 2024, arXiv:2405.04517, equations 19 to 27).

    Computes in the common dtype of the inputs, at least float32.

    Args:
      q, k: (B, NH, S, DHQK); v: (B, NH, S, DHHV); i, f: gate pre-activations (B, NH, S).
      c_initial, n_initial, m_initial: (B, NH, DHQK, DHHV), (B, NH, DHQK), (B, NH); zeros when None.
      segment_ids: (B, S); eps, stabilize_correctly, norm_val, input_gate, normalize: as for ``mlstm_pallas.mlstm_chunkwise``.

    Returns:
      h (B, NH, S, DHHV) and the last states (c, n, m), shaped as the initial ones.
    """
    dtype = jnp.promote_types(jnp.result_type(q, k, v, i, f), jnp.float32)
    B, NH, _, DHQK = q.shape
    C = jnp.zeros((B, NH, DHQK, v.shape[-1]), dtype) if c_initial is None else c_initial.astype(dtype)
    n = jnp.zeros((B, NH, DHQK), dtype) if n_initial is None else n_initial.astype(dtype)
    m = jnp.zeros((B, NH), dtype) if m_initial is None else m_initial.astype(dtype)
    scale = DHQK**-0.5
    fbar, reset = log_forget_gate(f.astype(dtype))
    gate, normaliser = InputGate(input_gate), Normaliser(eps, norm_val, stabilize_correctly)
    i = log_input_gate(i.astype(dtype), gate)
    starts = jnp.zeros(f.shape, bool) if segment_ids is None else jnp.broadcast_to(segment_starts(segment_ids)[:, None], f.shape)

    def step(states, x):
        q, k, v, i, fbar, reset, start = x
        C, n, m = (jnp.where(start.reshape(start.shape + (1,) * (y.ndim - 2)), 0.0, y) for y in states)
        carried = jnp.where(reset, -_INF, fbar + m)
        m_new = jnp.maximum(carried, i) if gate is InputGate.EXP else m
        m_safe = jnp.where(m_new == -_INF, 0.0, m_new)
        decay, gain = jnp.exp(carried - m_safe), jnp.exp(i - m_safe)
        C = decay[..., None, None] * C + gain[..., None, None] * k[..., :, None] * v[..., None, :]
        n = decay[..., None] * n + gain[..., None] * k
        num = scale * jnp.einsum("bhk,bhkv->bhv", q, C, precision="highest")
        z = scale * jnp.einsum("bhk,bhk->bh", q, n, precision="highest")
        return (C, n, m_new), normaliser.normalise(num, z, m_new) if normalize else num

    xs = [jnp.moveaxis(x.astype(dtype), 2, 0) for x in (q, k, v, i, fbar)] + [jnp.moveaxis(x, 2, 0) for x in (reset, starts)]
    states, h = lax.scan(step, (C, n, m), tuple(xs))
    return jnp.moveaxis(h, 0, 2), states


def chunkwise(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    vecI: jax.Array,
    vecF: jax.Array,
    matC_initial: jax.Array,
    vecN_initial: jax.Array,
    scaM_initial: jax.Array,
    *,
    chunk_size: int,
    segment_ids: jax.Array | None = None,
    eps: float = 1e-6,
    stabilize_correctly: bool = True,
    norm_val: float = 1.0,
    input_gate: str = "exp",
    normalize: bool = True,
) -> tuple[jax.Array, States]:
    """The chunkwise form (TFLA paper, section 3): equal to ``recurrence`` up to rounding.

    q, k, v enter the products in their own dtype; sums, gates and states are float32 (float64 for float64 gates).

    Args:
      matQ, matK: (B, NH, S, DHQK); matV: (B, NH, S, DHHV); vecI, vecF: (B, NH, S). S must be a multiple of chunk_size.
      matC_initial, vecN_initial, scaM_initial: (B, NH, DHQK, DHHV), (B, NH, DHQK), (B, NH), in the dtype of the gates.
      segment_ids: (B, S); the rest as for ``mlstm_pallas.mlstm_chunkwise``.

    Returns:
      h (B, NH, S, DHHV) in the accumulator's dtype, and the last states (c, n, m).
    """

    B, NH, S, DHQK = matQ.shape
    problem = Problem(B, NH, S, DHQK, matV.shape[-1], chunk_size, DHQK**-0.5)
    call = StageCall(problem, StageConfig(), lax.Precision.HIGHEST, Lowering.XLA)

    def heads(x):
        return x.reshape(B * NH, *x.shape[2:])

    starts = None if segment_ids is None else heads(jnp.broadcast_to(segment_starts(segment_ids)[:, None], vecI.shape))
    q, k, v, i, f, C, n, m = map(heads, (matQ, matK, matV, vecI, vecF, matC_initial, vecN_initial, scaM_initial))
    gates = chunk_gates(i, f, m, starts, InputGate(input_gate), call=call)
    states = recurrent_fw_C(k, v, gates.per_step().vecAbar, gates.scaGamma, C, n, call=call)
    normaliser = Normaliser(eps, norm_val, stabilize_correctly) if normalize else None
    acc = gates.vecW.dtype
    h, _ = parallel_fw_H(q, k, v, gates, states.matC_states, states.vecN_states, normaliser=normaliser, output_dtype=acc, call=call)
    C, n, m = (x.reshape(B, NH, *x.shape[1:]) for x in (states.matC_last, states.vecN_last, gates.scaM_states[:, -1]))
    return h.reshape(matV.shape), (C, n, m)
