"""The mLSTM in plain jnp: the recurrence, step by step, and its chunkwise form.

Both are differentiable as often as wanted, in reverse and forward mode, and run in float64 where jax_enable_x64 is set.
``recurrence`` is the oracle of the tests.

Notation (after the TFLA paper, Beck et al. 2025, arXiv:2503.14376): B batch, NH heads, S sequence length, DHQK head dimension of q and k,
DHHV of v and h, NC chunks of L steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.call_spec import CallSpec, Inputs
from mlstm_pallas.entry import Options, run
from mlstm_pallas.forward import forward
from mlstm_pallas.fwbw import swap_heads
from mlstm_pallas.gates import log_forget_gate, log_input_gate, segment_starts
from mlstm_pallas.normaliser import Normaliser
from mlstm_pallas.problem import InputGate, accumulator_dtype
from mlstm_pallas.stage import Lowering

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
    dtype = accumulator_dtype(q.dtype, k.dtype, v.dtype, i.dtype, f.dtype)
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
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    i: jax.Array,
    f: jax.Array,
    c_initial: jax.Array | None = None,
    n_initial: jax.Array | None = None,
    m_initial: jax.Array | None = None,
    return_last_states: bool = False,
    eps: float = 1e-6,
    chunk_size: int | None = None,
    autocast_kernel_dtype: Any = None,
    stabilize_correctly: bool = True,
    norm_val: float = 1.0,
    *,
    segment_ids: jax.Array | None = None,
    **options: Any,
) -> Any:
    """``mlstm_pallas.mlstm_chunkwise``, with its arguments and results, in plain jnp without a derivative rule of its own.

    The chunkwise form (TFLA paper, section 3): equal to ``recurrence`` up to rounding. backend is not read.
    """
    positional = return_last_states, eps, chunk_size, autocast_kernel_dtype, stabilize_correctly, norm_val
    arrays = q, k, v, i, f, c_initial, n_initial, m_initial
    return run(_plain_forward, segment_starts, Options(*positional, **options | {"backend": "xla"}), arrays, segment_ids)


def _plain_forward(spec: CallSpec, inputs: Inputs) -> tuple[jax.Array, Any]:
    """On (B * NH, ...), without the seam of shards, which has no derivatives."""
    B, NH = spec.problem.B, spec.problem.NH
    x = swap_heads(spec, inputs)
    x = jax.tree.map(lambda y: y.reshape(B * NH, *y.shape[2:]), x)
    outputs = forward(spec, Lowering.XLA, x)
    h, last = jax.tree.map(lambda y: y.reshape(B, NH, *y.shape[1:]), (outputs.h, outputs.last))
    return spec.swap_heads(h), last
