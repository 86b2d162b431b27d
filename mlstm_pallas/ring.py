"""mlstm_ring_states, mlstm_ring_step, mlstm_ring_flush: generation that seldom writes C."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mlstm_pallas.planning.call_spec import CallSpec, Plan
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.planning.dispatch import stage
from mlstm_pallas.planning.options import Options
from mlstm_pallas.prepare import as_int32, step_spec
from mlstm_pallas.problem import validation
from mlstm_pallas.problem.annotations import Array, BackendName, InputGateName, LayoutName, States
from mlstm_pallas.problem.dimensions import InputGate, Layout, accumulator_dtype
from mlstm_pallas.schedules.sharding import on_shards, sharded_alike
from mlstm_pallas.stages.ring_step import Operands, flush_all
from mlstm_pallas.stages.stage import Lowering

NO_DERIVATIVE = 'the kernels of mlstm_ring_step have no derivatives; backend="xla" has them'
DEFAULT_LENGTH, MAX_LENGTH = 16, 64


class RingStates(NamedTuple):
    """The states of ``mlstm_ring_step``: C of some tokens ago and the tokens since.

    In pools with slots, (P, NH, ...), a row is a request. A head has
    DHQK DHV itemsize bytes of C and 2 L (DHQK + DHV) itemsize bytes in the
    ring: 512 and 48 KiB for heads of 256/512 with a float32 C, a bfloat16 ring
    and L = 16.

    Attributes:
      c: C at the last flush, (B, NH, DHQK, DHV), float32, bfloat16 or float16.
      n: n at the last flush, (B, NH, DHQK).
      m: m at the last flush, (B, NH).
      k: keys of the ring's tokens, (B, NH, 2 L, DHQK), in the dtype of k.
      v: values, (B, NH, 2 L, DHV), in the dtype of v.
      i: input gate pre-activations, (B, NH, 2 L), float32.
      f: forget gate pre-activations, (B, NH, 2 L), float32.
      start: the row of the oldest token, 0 or L, (B, NH) int32. Tokens follow
        one another from there on, modulo 2 L.
      fill: how many tokens the ring holds, (B, NH) int32.
      pending: how many drafts, the tokens of the last call, are behind them,
        (B, NH) int32. The next call counts those of them that are accepted.
    """

    c: Any
    n: Any
    m: Any
    k: Any
    v: Any
    i: Any
    f: Any
    start: Any
    fill: Any
    pending: Any


def _step(plan: Plan, x: Operands) -> tuple[Any, ...]:
    run = stage("ring_step", plan.launches("ring_step"))
    results: tuple[Any, ...] = run(x, normaliser=plan.spec.normaliser)
    return results


@functools.partial(jax.jit, static_argnums=0)
def step(spec: CallSpec, x: Operands) -> tuple[Any, ...]:
    """h (B, NH, T, DHV) and the fields of the new states."""
    # Only plain jnp is differentiable.
    if spec.backend == "xla":
        return _step(Plan(spec, Lowering.XLA), x)
    results: tuple[Any, ...] = on_shards(_step, spec, x, message=NO_DERIVATIVE)
    return results


def _fields(states: Any) -> dict[str, Any]:
    """The fields of the states, by the names of ``validation.DIMS``."""
    if not isinstance(states, RingStates):
        raise TypeError(
            f"states is a {type(states).__name__}, expected RingStates, as "
            "mlstm_ring_states returns them"
        )
    return {f"states.{name}": x for name, x in states._asdict().items()}


def _per_head(counts: Any, B: int, NH: int) -> Any:
    return None if counts is None else jnp.broadcast_to(as_int32(counts)[:, None], (B, NH))


def mlstm_ring_states(
    c: Array, n: Array, m: Array | None, *, dtype: DTypeLike, length: int | None = None,
    phase: Array | int | None = None,
) -> RingStates:  # fmt: skip
    """States with an empty ring buffer, from those of a prefill or from zeros.

    A head flushes its ring, that is, it reads and writes C, at every L-th
    token. So that about 1 / L of the heads do it in any step, the rings begin
    at different phases: the first flush comes up to L - 1 tokens early. The
    phase of head h of entry b is (h L // NH + phase[b]) modulo L.

    Args:
      c: state C, (B, NH, DHQK, DHV), float32, bfloat16 or float16.
      n: state n, (B, NH, DHQK).
      m: stabiliser m, (B, NH). None: zeros.
      dtype: of the k and v that the steps will have.
      length: L, a power of two from 8 to 64. None: the planned one, 16. The
        ring has 2 L rows, and a call has at most L / 2 tokens.
      phase: (B,) integers, or one for all entries. None: 0, 1, 2, ... With a
        fixed number, such as 0, the results of an entry do not depend on its
        place in the batch.

    Returns:
      RingStates, whose c, n and m are these arrays.
    """
    if m is None:
        m = jnp.zeros(n.shape[:-1], accumulator_dtype(n.dtype))
    states = dict(c_initial=c, n_initial=n, m_initial=m)
    for name, x in states.items():
        validation.check_array(name, x, validation.INPUT_DTYPES)
    (B, NH, DHQK, DHV) = validation.check_shapes(states, validation.DIMS).values()
    L = validation.check_integer(
        "length", DEFAULT_LENGTH if length is None else length, 8, MAX_LENGTH, power_of_two=True
    )
    kind = validation.check_dtype("dtype", dtype, validation.INPUT_DTYPES)
    phases = jnp.arange(B, dtype="int32") if phase is None else jnp.asarray(phase)
    if phases.ndim:
        validation.check_integers("phase", phases)
        validation.check_shapes(dict(phase=phases), dict(phase=(("B",),)), dict(B=B))
    head_phases = jnp.arange(NH, dtype="int32") * L // max(NH, 1)
    fill = jnp.broadcast_to((head_phases + phases.reshape(-1, 1).astype("int32")) % L, (B, NH))
    heads, acc = (B, NH, 2 * L), accumulator_dtype(kind)
    # Tokens that store nothing and decay nothing are before the first.
    return RingStates(
        c, n, m, jnp.zeros((*heads, DHQK), kind), jnp.zeros((*heads, DHV), kind),
        jnp.full(heads, -jnp.inf, acc), jnp.full(heads, jnp.inf, acc),
        jnp.zeros_like(fill), fill, jnp.zeros_like(fill),
    )  # fmt: skip


def mlstm_ring_step(
    q: Array, k: Array, v: Array, i: Array, f: Array, states: RingStates, *,
    accepted: Array | None = None, eps: float = 1e-6, norm_val: float = 1.0,
    stabilize_correctly: bool = True, input_gate: InputGateName = "exp", normalize: bool = True,
    slots: Array | None = None, layout: LayoutName = "BNTH", backend: BackendName | None = None,
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

    A token with i = -inf and f = +inf leaves C, n and m as they are. As
    f = -inf resets the states, a request may begin in a used row of a pool.

    The states are updated in place if the caller does not use them afterwards,
    as those of ``mlstm_recurrent_step``; slots, pools, meshes and derivatives
    are as there.

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
      k: key, shaped as q, in its dtype, which is that of the ring.
      v: value, (B, NH, DHV) or (B, NH, T, DHV).
      i: input gate pre-activation, (B, NH) or (B, NH, T), any float dtype.
      f: forget gate pre-activation, shaped as i.
      states: of ``mlstm_ring_states`` or of this function.
      accepted: (B,) integers, how many tokens of the call before count, from 0
        to their number. None: all.
      slots: (B,) integers: entry b reads and writes row slots[b] of states
        (P, NH, ...), as in ``mlstm_recurrent_step``.
      layout: "BNTH", or "BTNH": q, k, v and h of T tokens are (B, T, NH, D), i
        and f (B, T, NH).
      eps, norm_val, stabilize_correctly, input_gate, normalize, backend: as
        for ``mlstm_recurrent_step``.
      config: overrides of the tiles of ring_step.

    Returns:
      h, shaped as v, in the dtype of q, and the states.

    Raises:
      TypeError, ValueError: as ``mlstm_recurrent_step``.
    """
    options = Options(
        eps=eps, stabilize_correctly=stabilize_correctly, norm_val=norm_val,
        input_gate=input_gate, normalize=normalize, layout=layout, backend=backend, config=config,
    )  # fmt: skip
    arrays = dict(q=q, k=k, v=v, i=i, f=f) | _fields(states) | dict(accepted=accepted, slots=slots)
    drafts = getattr(q, "ndim", 0) == 4
    spec, sizes = step_spec(arrays, options, states.c, steps=drafts)
    B, NH, T, L = sizes["B"], sizes["NH"], spec.problem.S, sizes["2 L"] // 2
    if k.dtype != states.k.dtype:
        raise TypeError(f"k has dtype {k.dtype}, expected {states.k.dtype}, that of the ring")
    if 2 * T > L:
        raise ValueError(f"q has {T} tokens, expected at most {L // 2}, half the ring's length {L}")
    x: Any = q, k, v, i, f
    behind = drafts and options.layout is Layout.BTNH
    if behind:
        x = jax.tree.map(lambda y: jnp.swapaxes(y, 1, 2), x)
    elif not drafts:
        x = jax.tree.map(lambda y: y[:, :, None], x)
    if not options.stabilised:
        validation.check_zeros("states.m", states.m)
    fields: Any = *x, *states, _per_head(accepted, B, NH), slots
    operands = sharded_alike(spec, Operands(*fields))
    m = operands.scaM
    h, *after = step(spec, operands if options.stabilised else operands._replace(scaM=None))
    if behind:
        h = jnp.swapaxes(h, 1, 2)
    elif not drafts:
        h = h[:, :, 0]
    rings = RingStates(*after)
    return h, rings if options.stabilised else rings._replace(m=m)


def mlstm_ring_flush(
    states: RingStates, *, accepted: Array | None = None, input_gate: InputGateName = "exp"
) -> States:
    """The plain states (c, n, m) after the tokens in the ring.

    They are in the dtypes of the states' c, n and m. Of pools, pass the rows:
    ``jax.tree.map(lambda x: x[slots], states)``. It is plain jnp, with
    derivatives.

    Args:
      states: of ``mlstm_ring_step``.
      accepted: (B,) integers, how many tokens of the last call count. None:
        all.
      input_gate: that of the steps.
    """
    gate = validation.check_choice("input_gate", input_gate, InputGate)
    arrays = _fields(states)
    for name, x in arrays.items():
        counts = name in validation.COUNTERS
        validation.check_array(name, x, ("int32",) if counts else validation.KERNEL_DTYPES, "xla")
    if accepted is not None:
        validation.check_integers("accepted", accepted)
        arrays["accepted"] = accepted
    sizes = validation.check_shapes(arrays, validation.DIMS)
    fields: Any = *(None,) * 5, *states, _per_head(accepted, sizes["B"], sizes["NH"])
    heads = Operands(*fields)
    c, n, m = flush_all(heads if gate is InputGate.EXP else heads._replace(scaM=None))
    return c, n, states.m if m is None else m
