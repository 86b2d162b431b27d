"""mlstm_ring_states, mlstm_ring_step, mlstm_ring_flush: generation that seldom writes C."""

import functools
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mlstm_pallas.planning.call_spec import CallSpec
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.planning.options import Options
from mlstm_pallas.prepare import constants, in_parts, per_head, prepare_steps
from mlstm_pallas.problem import validation
from mlstm_pallas.problem.annotations import (
    Array,
    BackendName,
    InputGateName,
    LayoutName,
    StatesTuple,
)
from mlstm_pallas.problem.arrays import Token
from mlstm_pallas.problem.dimensions import InputGate, Layout, accumulator_dtype
from mlstm_pallas.sharding.axes import sharded_alike
from mlstm_pallas.sharding.on_shards import run_step
from mlstm_pallas.stages.ring_step import Operands, RingStates, flushed

DEFAULT_LENGTH, MIN_LENGTH, MAX_LENGTH = 16, 8, 64


@functools.partial(jax.jit, static_argnums=0)
def _step(spec: CallSpec, x: Operands) -> tuple[jax.Array, RingStates]:
    """h (B, NH, T, DHV) and the new states."""
    return run_step(spec, x)


def _fields(states: Any, *others: Any) -> dict[str, Any]:
    """The fields of the states, by the names of ``validation.DIMS``; others: refused."""
    if others and isinstance(states, RingStates):
        raise TypeError("states is the last positional argument, expected accepted=... behind it")
    if not isinstance(states, RingStates):
        raise TypeError(
            f"states has type {type(states).__name__}, expected RingStates alone: "
            "mlstm_ring_states(c, n, m, dtype=q.dtype) makes them, and keeps the input gate"
        )
    return {f"states.{name}": x for name, x in states._asdict().items()}


def _gate(states: RingStates) -> InputGate:
    return InputGate.SIGMOID if states.m is None else InputGate.EXP


def _length(states: RingStates) -> int:
    """L of states whose shapes agree."""
    rows = states.i.shape[2]
    validation.check_integer(
        "states.i.shape[2]", rows, 2 * MIN_LENGTH, 2 * MAX_LENGTH, power_of_two=True
    )
    return rows // 2


def mlstm_ring_states(
    c: Array, n: Array | None = None, m: Array | None = None, *, dtype: DTypeLike,
    length: int | None = None, phase: Array | int | None = None,
    input_gate: InputGateName = "exp",
) -> RingStates:  # fmt: skip
    """States with an empty ring buffer, from those of a prefill or from zeros.

    A head flushes its ring, that is, it reads and writes C, at every L-th
    token. So that about 1 / L of the heads do it in any step, the rings begin
    at different phases: the first flush comes up to L - 1 tokens early. The
    phase of head h of entry b is (h L // NH + phase[b]) modulo L.

    Args:
      c: state C, (B, NH, DHQK, DHV), float32, bfloat16 or float16.
      n: state n, (B, NH, DHQK).
      m: stabiliser m, (B, NH). None: zeros, as they are with the sigmoid gate.
      dtype: of the k and v that the steps will have.
      length: L, a power of two from 8 to 64. None: the planned one, 16. The
        ring has 2 L rows, and a call has at most L / 2 tokens.
      phase: (B,) integers, or one for all entries. None: 0, 1, 2, ... With a
        fixed number, such as 0, the results of an entry do not depend on its
        place in the batch.
      input_gate: "exp" or "sigmoid", of all steps. The states keep it.

    Returns:
      RingStates with copies of c, n and m, where these are sharded. With the
      sigmoid gate its m is None.
    """
    gate = validation.check_choice("input_gate", input_gate, InputGate)
    arrays = dict(c=c, n=n, m=m)
    B = validation.check_inputs(arrays, gate, Layout.BNTH)["B"]
    L = validation.check_integer(
        "length", DEFAULT_LENGTH if length is None else length, MIN_LENGTH, MAX_LENGTH,
        power_of_two=True,
    )  # fmt: skip
    kind = validation.check_dtype("dtype", dtype, validation.INPUT_DTYPES)
    if phase is not None:
        if not isinstance(phase, jax.Array | np.ndarray):
            phase = np.asarray(
                validation.check_integer("phase", phase, 0, 2**31 - 1, unit=" or an array (B,)")
            )
        validation.check_integers("phase", phase)
        dims = ("B",) * bool(phase.ndim)
        validation.check_shapes(dict(phase=phase), dict(phase=(dims,)), dict(B=B))
    return _rings(gate, kind, L, *constants((c, n, m if gate.stabilised else None, phase)))


# One program also where the caller does not jit: all results are on the devices of the states.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _rings(gate: InputGate, kind: Any, L: int, c: Any, n: Any, m: Any, phase: Any) -> RingStates:
    """Copies of the states, with empty rings."""
    B, NH, DHQK, DHV = c.shape
    heads, acc = (B, NH, 2 * L), accumulator_dtype(kind)
    if m is None and gate.stabilised:
        m = jnp.zeros(n.shape[:-1], accumulator_dtype(n.dtype))
    phase = (jnp.arange(B) if phase is None else phase).reshape(-1, 1) % L
    fill = (jnp.arange(NH, dtype="int32")[None] * L // max(NH, 1) + phase.astype("int32")) % L
    fill, none = jnp.broadcast_to(fill, (B, NH)), jnp.zeros((B, NH), "int32")
    # Tokens that store nothing and decay nothing are before the first.
    states = RingStates(
        c, n, m, jnp.zeros((*heads, DHQK), kind), jnp.zeros((*heads, DHV), kind),
        jnp.full(heads, -jnp.inf, acc), jnp.full(heads, jnp.inf, acc), none, fill, none,
    )  # fmt: skip
    return jax.tree.map(jnp.copy, states)


def mlstm_ring_step(
    q: Array, k: Array | None, v: Array | None, i: Array, f: Array | None, states: RingStates,
    *others: Never, accepted: Array | None = None, eps: float = 1e-6, norm_val: float = 1.0,
    stabilize_correctly: bool = True, normalize: bool = True, slots: Array | None = None,
    layout: LayoutName | None = None, backend: BackendName | None = None,
    config: KernelConfig | None = None,
) -> tuple[jax.Array, RingStates]:  # fmt: skip
    """Advances the mLSTM by one token or by T drafts, and reads C once.

    It is exact: ``mlstm_recurrent_step`` for every token, with at most its
    rounding errors. That function writes C at every token; this one keeps the
    tokens since the last flush in a ring buffer, and C as it was. With states
    of 16 bits C is rounded L times less often.

    The tokens of a call are pending until the next call, whose ``accepted``
    says how many of them count. The others are taken back exactly: the states
    have the bits of the accepted tokens alone. Tokens are flushed only after
    they have been accepted.

    A token with i = -inf and f = +inf leaves what the states mean as it is, up
    to rounding. f = -inf resets the states and lets nothing pass, not even NaN.
    It is pending like any token, so accepted=0 takes it back: a new request
    enters a used row of a pool with fresh states of ``mlstm_ring_states``,
    scattered into the row, not with a reset.

    A NaN in q of a draft reaches h of that draft alone; in k, v, i or f, also h
    of the drafts behind it. Drafts that are taken back leave no NaN.

    The states are updated in place if the caller does not use them afterwards,
    as those of ``mlstm_recurrent_step``; slots, pools, meshes, vmap and
    derivatives are as there.

    Example::

      >>> import jax.numpy as jnp
      >>> from mlstm_pallas import mlstm_ring_flush, mlstm_ring_states
      >>> from mlstm_pallas import mlstm_ring_step
      >>> B, NH, T, DHQK, DHV = 2, 4, 3, 16, 32
      >>> q, k, v = (jnp.ones((B, NH, T, D)) for D in (DHQK, DHQK, DHV))
      >>> i, f = jnp.zeros((B, NH, T)), jnp.full((B, NH, T), 4.0)
      >>> c, n = jnp.zeros((B, NH, DHQK, DHV)), jnp.zeros((B, NH, DHQK))
      >>> states = mlstm_ring_states(c, n, None, dtype=q.dtype)
      >>> h, states = mlstm_ring_step(q, k, v, i, f, states)  # three drafts
      >>> token = q[:, :, 0], k[:, :, 0], v[:, :, 0], i[..., 0], f[..., 0]
      >>> accepted = jnp.array([3, 1])
      >>> h, states = mlstm_ring_step(*token, states, accepted=accepted)
      >>> c, n, m = mlstm_ring_flush(states)
      >>> h.shape, c.shape
      ((2, 4, 32), (2, 4, 16, 32))

    Args:
      q: query, (B, NH, DHQK), or those of T tokens, (B, NH, T, DHQK), up to
        T = L / 2. bfloat16, float16 or float32; float64 with backend "xla" and
        jax_enable_x64.
      k: key, shaped as q, in its dtype, which is that of the ring. None: q and
        i are joined, as for ``mlstm_recurrent_step``.
      v: value, (B, NH, DHV) or (B, NH, T, DHV).
      i: input gate pre-activation, (B, NH) or (B, NH, T), any float dtype.
      f: forget gate pre-activation, shaped as i.
      states: of ``mlstm_ring_states`` or of this function, as one argument.
      others: none.
      accepted: (B,) integers, how many tokens of the call before count, from 0
        to their number; a larger number is taken for theirs. None: all. Before
        the first call there are none.
      slots: (B,) integers: entry b reads and writes row slots[b] of states
        (P, NH, ...), as in ``mlstm_recurrent_step``.
      layout: "BNTH", or "BTNH": q, k, v and h of T tokens are (B, T, NH, D), i
        and f (B, T, NH). None: BNTH.
      eps, norm_val, stabilize_correctly, normalize, backend: as for
        ``mlstm_recurrent_step``. The input gate is that of the states.
      config: overrides of the tiles of ring_step.

    Returns:
      h, shaped as v, in the dtype of q, and the states.

    Raises:
      TypeError, ValueError: as ``mlstm_recurrent_step``.

    Warns:
      UserWarning: if layout is left out and T = NH > 1.
    """
    drafts = getattr(q, "ndim", 0) == 4
    arrays = dict(q=q, k=k, v=v, i=i, f=f) | _fields(states, *others)
    options = Options(
        eps=eps, stabilize_correctly=stabilize_correctly, norm_val=norm_val,
        input_gate=_gate(states), normalize=normalize, layout=layout, backend=backend,
        config=config,
    )  # fmt: skip
    arrays |= dict(accepted=accepted, slots=slots)
    spec = prepare_steps("ring_step", in_parts(arrays), options, steps=drafts, layout=layout)
    p, L = spec.problem, _length(states)
    for name, ring in ("k", states.k), ("v", states.v):
        if q.dtype != ring.dtype:  # that of k and v
            raise TypeError(f"{name} has dtype {q.dtype}, expected {ring.dtype}, that of the ring")
    if 2 * p.S > L:
        raise ValueError(
            f"q has {p.S} tokens, expected at most {L // 2}, half the ring's length {L}"
        )
    axis = 1 if options.layout is Layout.BTNH else 2  # of the tokens

    def heads_first(y: Any) -> jax.Array:
        return jnp.moveaxis(y if drafts else jnp.expand_dims(y, axis), axis, 2)

    accepted, slots = constants((accepted, slots))
    counts = per_head(accepted, (p.B, p.NH))
    tokens = jax.tree.map(heads_first, Token(q, k, v, i, f))
    h, states = _step(spec, sharded_alike(spec, Operands(tokens, states, counts, slots)))
    h = jnp.moveaxis(h, 2, axis)
    return h if drafts else h.squeeze(axis), states


def mlstm_ring_flush(
    states: RingStates, *, accepted: Array | None = None, config: KernelConfig | None = None
) -> StatesTuple:
    """The plain states (c, n, m) after the tokens in the ring.

    They are in the dtypes of the states' c, n and m; with the sigmoid gate m is
    zeros. Of pools, pass the rows:
    ``jax.tree.map(lambda x: x[slots], states)``. It is plain jnp, with
    derivatives.

    Args:
      states: of ``mlstm_ring_step``.
      accepted: (B,) integers, how many tokens of the last call count. None:
        all.
      config: its batch_invariant counts.
    """
    arrays, config = _fields(states) | dict(accepted=accepted), Options(config=config).config
    validation.check_inputs(arrays, _gate(states), Layout.BNTH, backend="xla", cast=False)
    _length(states)
    counts = per_head(constants(accepted), states.fill.shape)
    c, n, m, *_ = flushed(states, counts, bool(config.batch_invariant))
    return c, n, jnp.zeros_like(states.fill, accumulator_dtype(n.dtype)) if m is None else m
