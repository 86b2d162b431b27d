"""The mLSTM in plain jnp: the recurrence, step by step, and its chunkwise form.

Both have derivatives of every order, in reverse and forward mode, and run in float64 where
jax_enable_x64 is set. ``recurrence`` is the oracle of the tests.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.api import mlstm_chunkwise
from mlstm_pallas.formulas.gates import log_forget_gate, log_input_gate, mark_segment_starts
from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.planning.call_spec import CallSpec
from mlstm_pallas.planning.options import Options
from mlstm_pallas.prepare import Arguments, padded, prepare, results, with_arguments_of
from mlstm_pallas.problem.annotations import Array, InputGateName, LayoutName, StatesTuple
from mlstm_pallas.problem.arrays import Forward
from mlstm_pallas.problem.dimensions import Layout, accumulator_dtype
from mlstm_pallas.problem.validation import check_flag
from mlstm_pallas.schedules.forward import forward
from mlstm_pallas.sharding.work import Work, on_shard

__all__ = ["chunkwise", "recurrence"]

_INF = float("inf")


def recurrence(
    q: Array,
    k: Array,
    v: Array,
    i: Array,
    f: Array,
    c_initial: Array | None = None,
    n_initial: Array | None = None,
    m_initial: Array | None = None,
    *,
    segment_ids: Array | None = None,
    eps: float = 1e-6,
    stabilize_correctly: bool = True,
    norm_val: float = 1.0,
    input_gate: InputGateName = "exp",
    normalize: bool = True,
    layout: LayoutName | None = None,
) -> tuple[jax.Array, StatesTuple]:
    """The mLSTM as it is defined, one step at a time, in plain jnp.

    It computes equations 19 to 27 of arXiv:2405.04517, as ``mlstm_chunkwise``
    does, in the common dtype of the inputs, at least float32, and has
    derivatives of every order in both modes.

    Args:
      q: queries, (B, NH, S, DHQK).
      k: keys, shaped as q.
      v: values, (B, NH, S, DHV).
      i: input gate pre-activations, (B, NH, S).
      f: forget gate pre-activations, (B, NH, S).
      c_initial: (B, NH, DHQK, DHV). None: zeros, as for n_initial and
        m_initial.
      n_initial: (B, NH, DHQK).
      m_initial: (B, NH); None or zeros with the sigmoid gate.
      segment_ids: (B, S) integers.
      normalize: False leaves out the denominator, with either gate.
      eps, stabilize_correctly, norm_val, input_gate, layout: as for
        ``mlstm_chunkwise``.

    Returns:
      h, shaped as v, and the last states (c, n, m), shaped as the initial ones.

    Raises:
      TypeError, ValueError: as ``mlstm_chunkwise``.
    """
    check_flag("normalize", normalize)
    options = Options(
        eps=eps, stabilize_correctly=stabilize_correctly, norm_val=norm_val,
        input_gate=input_gate, layout=layout, backend="xla",
    )  # fmt: skip
    x = Arguments(q, k, v, i, f, c_initial, n_initial, m_initial, segment_ids)
    _, x = prepare(x, options, layout)
    return _recurrence(options, normalize, x)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _recurrence(options: Options, normalize: bool, x: Arguments) -> tuple[jax.Array, StatesTuple]:
    swap = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
    heads_first = jnp.asarray if options.layout is Layout.BNTH else swap
    q, k, v, i, f = map(heads_first, x.steps)
    dtype = accumulator_dtype(q.dtype, k.dtype, v.dtype, i.dtype, f.dtype)
    B, NH, _, DHQK = q.shape
    shapes = (B, NH, DHQK, v.shape[-1]), (B, NH, DHQK), (B, NH)
    C, n, m = (
        jnp.zeros(shape, dtype) if y is None else jnp.asarray(y, dtype)
        for y, shape in zip(x.initial, shapes, strict=True)
    )
    scale = DHQK**-0.5
    fbar, reset = log_forget_gate(f.astype(dtype))
    gate, normaliser = options.input_gate, options.normaliser if normalize else None
    i = log_input_gate(i.astype(dtype), gate)
    segment_starts = jnp.zeros(f.shape, bool)
    if x.segment_ids is not None:
        segment_starts |= mark_segment_starts(x.segment_ids)[:, None]

    def step(states: Any, x: Any) -> tuple[StatesTuple, jax.Array]:
        q, k, v, i, fbar, reset, start = x
        C, n, m = (
            jnp.where(start.reshape(start.shape + (1,) * (y.ndim - 2)), 0.0, y) for y in states
        )
        carried = jnp.where(reset, -_INF, fbar + m)
        m_new = jnp.maximum(carried, i) if gate.stabilised else m
        m_safe = jnp.where(m_new == -_INF, 0.0, m_new)
        decay, gain = jnp.exp(carried - m_safe), jnp.exp(i - m_safe)
        stored = gain[..., None] * k
        C = weighted(decay[..., None, None], C) + stored[..., :, None] * v[..., None, :]
        n = weighted(decay[..., None], n) + stored
        num = scale * jnp.einsum("bhk,bhkv->bhv", q, C, precision="highest")
        z = scale * jnp.einsum("bhk,bhk->bh", q, n, precision="highest")
        return (C, n, m_new), normaliser.normalise(num, z, m_new) if normaliser else num

    xs = *(x.astype(dtype) for x in (q, k, v, i, fbar)), reset, segment_starts
    states, h = lax.scan(step, (C, n, m), tuple(jnp.moveaxis(x, 2, 0) for x in xs))
    return heads_first(jnp.moveaxis(h, 0, 2)), states


@with_arguments_of(mlstm_chunkwise, backend="xla")
@functools.partial(jax.jit, static_argnums=0)
def chunkwise(spec: CallSpec, x: Arguments) -> Any:
    """``mlstm_chunkwise`` in plain jnp, without a derivative rule of its own.

    Its arguments are those of ``mlstm_chunkwise`` but segment_lengths and
    reverse. It has derivatives of every order, in both modes. The chunkwise
    form is that of arXiv:2503.14376, section 3; it equals ``recurrence`` up to
    rounding.

    Example, a derivative in forward mode::

      >>> import jax, jax.numpy as jnp
      >>> from mlstm_pallas import reference
      >>> q = k = v = jnp.ones((1, 2, 16, 8))
      >>> i = f = jnp.ones((1, 2, 16))
      >>> h, dh = jax.jvp(
      ...     lambda q: reference.chunkwise(q, k, v, i, f), (q,), (q,)
      ... )
      >>> dh.shape
      (1, 2, 16, 8)

    Args:
      recompute_states_in_bw, backend: checked and ignored.
      q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states: as for
        ``mlstm_chunkwise``.
      eps, chunk_size, autocast_kernel_dtype, stabilize_correctly, norm_val: as
        for ``mlstm_chunkwise``.
      segment_ids, sequence_lengths, input_gate, normalize, state_dtype: as for
        ``mlstm_chunkwise``.
      layout, config: as for ``mlstm_chunkwise``.

    Returns:
      As ``mlstm_chunkwise``.

    Raises:
      TypeError, ValueError: as ``mlstm_chunkwise``.
    """
    # On one shard, because ``on_shards`` has no derivatives.
    work = Work(forward, spec, Forward)
    outputs: Forward = on_shard(work, None, padded(spec, x))
    return results(spec, x, outputs.h, outputs.last)
