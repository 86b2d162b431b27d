"""Sequence (context) parallelism: one sequence split over the devices of a mesh axis.

Every device holds a shard of consecutive steps and needs the state before them. The state after
shard j is a function of the state before it and of four quantities of the shard alone
(``_from_empty``): m_j, C_j and n_j, the state after it from an empty start (m = -inf, because 0
would enter the maximum), and g_j, its sum of log sigmoid(f):

    m' = max(m_j, g_j + m)
    C' = exp(m_j - m') C_j + exp(g_j + m - m') C        n' likewise

Such functions compose (``joined``), so a prefix scan over the devices (``_exclusive_prefix``) gives
the state before each shard. m and n are exchanged first, and C while stages that do not read C run.
The forward pass then starts from that state. It reuses the shard's states of n and what its splits
add to C_j, both rescaled (``_from_start``). With c(t) the chunk of step t (splits.py),

    C_j = sum_t [abar_t prod_{c' > c(t)} gamma_c'] k_t v_t^T

The gradient of the state before a shard is a linear function of the gradient of the state after it:

    dC' = A_j + Gamma_j dC        dn' likewise        Gamma_j = prod_c gamma_c

So the backward pass has two halves. The first starts from the cotangents of the shard's own outputs
and yields A_j. A suffix scan over the devices gives each shard dC, the contribution of all later
shards. The second half starts from the gradients after each chunk plus (prod_{c' > c} gamma_c') dC.
The gradient dm follows the path of the stabilisers' maximum: it passes through a whole shard or not
at all.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from mlstm_pallas.formulas.gate_gradients import inner, step_flags
from mlstm_pallas.formulas.gates import (
    M_GRAD_FLOWS,
    TwoFloat,
    add_two_floats,
    log_gates,
    segment_starts,
    split_for_exact_sums,
    two_sum,
)
from mlstm_pallas.formulas.splits import decays_in_splits, decays_of_others
from mlstm_pallas.fwbw import forward_once, named, residuals_of
from mlstm_pallas.planning.call_spec import CallSpec
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.planning.options import Options
from mlstm_pallas.prepare import (
    Arguments,
    Keywords,
    SequenceKeywords,
    padded,
    prepare,
    results,
)
from mlstm_pallas.problem.annotations import Array, BackendName, InputGateName, LayoutName, States
from mlstm_pallas.problem.arrays import Cotangents, Inputs, LastStates, Residuals
from mlstm_pallas.problem.dimensions import InputGate
from mlstm_pallas.problem.validation import DEFAULT_LAYOUT, check_axis_name
from mlstm_pallas.schedules.backward import BackwardCarry, first_half, prepared, second_half
from mlstm_pallas.schedules.derivatives import in_reverse_mode
from mlstm_pallas.schedules.forward import KnownStates, key_states, run_gates
from mlstm_pallas.schedules.sharding import by_platform, known_lowering, on_shards
from mlstm_pallas.stages import add_decayed, split_products
from mlstm_pallas.stages.stage import Lowering


class Summary(NamedTuple):
    """The function from the state before a shard to the state after it; float32."""

    m: jax.Array  # (B, NH) the stabiliser, from -inf
    g: TwoFloat  # (B, NH) total log decay; -inf with a reset
    state: jax.Array  # from zeros: C (B, NH, DHQK, DHV) or n (B, NH, DHQK)


class GradientSummary(NamedTuple):
    """The function from the gradient of the state after a shard to the gradient of the one before.

    All fields are float32.
    """

    dC: jax.Array  # (B, NH, DHQK, DHV)
    dn: jax.Array  # (B, NH, DHQK)
    gamma: jax.Array  # (B, NH)
    dm: jax.Array  # (B, NH) without m's part as the scale of C and n
    passes: jax.Array  # (B, NH) 1 where the maximum before the shard wins in it, else 0


def _stabiliser_after(m: jax.Array, g: TwoFloat, later: jax.Array) -> jax.Array:
    """max(later, g + m)"""
    return jnp.maximum(later, (m + g[0]) + g[1])


def _decay(m: jax.Array, g: TwoFloat, after: jax.Array) -> jax.Array:
    """exp(m + g - after), which scales the part of a state that is from before the decay by g."""
    total, error = two_sum(m, g[0])
    return jnp.where(total == -jnp.inf, 0.0, jnp.exp((total - after) + (error + g[1])))


def _rescaling(m: jax.Array, after: jax.Array) -> jax.Array:
    """exp(m - after), which scales a state from the stabiliser m to a larger one."""
    return jnp.where(m == -jnp.inf, 0.0, jnp.exp(m - after))


def joined(earlier: Summary, later: Summary) -> Summary:
    """The summary of two shards."""
    m = _stabiliser_after(earlier.m, later.g, later.m)
    decay, scale = (
        x.reshape(*m.shape, *[1] * (later.state.ndim - m.ndim))
        for x in (_decay(earlier.m, later.g, m), _rescaling(later.m, m))
    )
    state = decay * earlier.state + scale * later.state
    return Summary(m, add_two_floats(earlier.g, later.g), state)


def joined_gradients(later: GradientSummary, earlier: GradientSummary) -> GradientSummary:
    return GradientSummary(
        earlier.dC + earlier.gamma[..., None, None] * later.dC,
        earlier.dn + earlier.gamma[..., None] * later.dn,
        earlier.gamma * later.gamma,
        earlier.dm + earlier.passes * later.dm,
        earlier.passes * later.passes,
    )


def _state_after(gamma: jax.Array, products: jax.Array) -> jax.Array:
    """The state after all splits, from an empty one: (B * NH, DHQK, DHV)."""
    by_split = gamma.reshape(*products.shape[:2], gamma.shape[1] // products.shape[1])
    weights = decays_of_others(jnp.prod(by_split, axis=-1))
    return jnp.sum(weights[..., None, None] * products, axis=1)


def _from_empty(
    spec: CallSpec, lowering: Lowering, x: Inputs, *, num_splits: int, L: int
) -> tuple[Summary, jax.Array, TwoFloat, KnownStates]:
    """What an empty start gives: the Summary of n, C after the shard, log decays, the states.

    The log decays, (B * NH, NC + 1), are from the shard's start to the boundaries of its chunks.
    num_splits, L: of the call, as shards may plan for fewer heads.
    """
    p = spec.problem.in_chunks_of(L)
    nothing = x._replace(m_initial=jnp.full_like(x.m_initial, -jnp.inf), lengths=None)
    gates = run_gates(spec, spec.launch("chunk_gates", lowering, p), nothing)
    abar, gamma, m = gates.per_step().vecAbar, gates.scaGamma, gates.scaM_states
    first = lowering if lowering is Lowering.XLA else spec.plan.scan_lowering
    call = spec.launch("parallel_fw_P", first, p)
    empty = jnp.broadcast_to(jnp.zeros_like(gamma[:, :1]), (p.BNH, p.DHQK))
    n = key_states(spec, call, x.k, gates, empty)
    X = spec.stage("split_products", lowering, p, num_splits)(
        split_products.Operands(a=x.k, b=x.v, r=abar * decays_in_splits(gamma, num_splits, p.S)),
        num_splits=num_splits,
        all_splits=True,
    )
    high, low = _log_decays(x, p.NC, spec.input_gate)
    summary = Summary(m[:, -1], (high[:, -1], low[:, -1]), n[1])
    return summary, _state_after(gamma, X), (high, low), KnownStates(m, n, X)


def _log_decays(x: Inputs, NC: int, input_gate: InputGate) -> TwoFloat:
    """Sums of log sigmoid(f) up to the boundaries of NC chunks, (B * NH, NC + 1); -inf behind a
    reset."""
    _, fbar, reset = log_gates(x.i, x.f, input_gate)
    BNH, S = fbar.shape
    restarts = reset if x.starts is None else reset | (x.starts > 0)
    high, low = split_for_exact_sums(fbar, jnp.max(jnp.abs(fbar), axis=-1, keepdims=True), S)
    steps = jnp.stack([jnp.where(restarts, -jnp.inf, high), low]).reshape(2, BNH, NC, S // NC)
    sums = jnp.cumsum(jnp.sum(steps, axis=-1), axis=-1)
    high, low = jnp.pad(sums, [(0, 0), (0, 0), (1, 0)])
    return high, low


def _from_start(local: KnownStates, g: TwoFloat, start: Summary) -> KnownStates:
    """The states of a shard after ``start``, m and n; local, g: of ``_from_empty``."""
    m_start = start.m[..., None]
    m = _stabiliser_after(m_start, g, local.m)
    scale, decay = _rescaling(local.m, m)[..., None], _decay(m_start, g, m)[..., None]
    (n, n_last), n_start = local.n, start.state[..., None, :]
    n = scale[..., :-1, :] * n + decay[..., :-1, :] * n_start
    n_last = (scale[..., -1:, :] * n_last[..., None, :] + decay[..., -1:, :] * n_start)[..., 0, :]
    chunks = n.shape[2] // local.X.shape[2]  # of a split
    return KnownStates(m, (n, n_last), scale[..., chunks::chunks, :, None] * local.X)


def _first_half(
    spec: CallSpec, lowering: Lowering, residuals: Residuals, cotangents: Cotangents
) -> Any:
    """(BackwardCarry, GradientSummary) of a shard and the gradients of its last states together."""
    last = cotangents.last
    arrays = prepared(spec, lowering, residuals, cotangents)
    first = first_half(spec, lowering, *arrays)
    gates, _, states, normaliser, dn_added = first
    gamma = gates.scaGamma
    whole = jnp.prod(gamma, axis=-1)
    dn, dm, passes = whole[:, None] * last.n, last.m, jnp.ones_like(whole)
    if dn_added is not None:
        decays = decays_of_others(gamma, backward=True)
        dn = dn + jnp.sum(decays[..., None] * dn_added, axis=1)
    if spec.stabilised:
        x = residuals.inputs
        flags = step_flags(gates, x.f, x.starts)
        steps = lax.broadcasted_iota(jnp.int32, flags.shape, 1)
        S = flags.shape[1]
        unbroken = jnp.min(jnp.where((flags & M_GRAD_FLOWS) == 0, steps, S), axis=1)
        passes = (unbroken == S).astype(dm.dtype)
        dm = passes * dm
        if normaliser.vecDm is not None:
            dm = dm + jnp.sum(jnp.where(steps < unbroken[:, None], normaliser.vecDm, 0.0), axis=1)
    return first, GradientSummary(states.matDeltaC_initial, dn, whole, dm, passes)


def _second_half(
    spec: CallSpec,
    lowering: Lowering,
    residuals: Residuals,
    cotangents: Cotangents,
    first: BackwardCarry,
    dC_after: jax.Array,
) -> Inputs:
    """The gradients of the inputs; dC_after: what the later shards add to dC, (B * NH, ...)."""
    gamma, states = first.gates.scaGamma, first.states
    dC = spec.stage("add_decayed", lowering)(
        add_decayed.Operands(
            X=states.matDeltaC_states, added=dC_after, decays=decays_of_others(gamma)
        )
    )
    whole = jnp.prod(gamma, axis=-1)[:, None, None]
    dC_initial = states.matDeltaC_initial + whole * dC_after
    first = first._replace(
        states=states._replace(matDeltaC_states=dC, matDeltaC_initial=dC_initial)
    )
    arrays = prepared(spec, lowering, residuals, cotangents)
    return second_half(spec, lowering, *arrays, first)[0]


Element = TypeVar("Element", Summary, GradientSummary)


class Axis(NamedTuple):
    """The axis that a sequence is split over."""

    name: str
    size: int  # jax does not tell it to the backward pass of a vmap that is differentiated
    mapped: bool  # the axis of a vmap, not of a mesh


def _axis(name: str) -> Axis:
    names = {name} if isinstance(name, str) else {*name}
    mapped = not names <= {*jax.sharding.get_abstract_mesh().manual_axes}
    return Axis(name, lax.axis_size(name), mapped)


def _shifted(x: Any, axis: Axis, distance: int) -> Any:
    """x of the device that many places before this one; undefined where there is none."""
    size = axis.size
    # A vmap accepts only whole permutations. On a mesh the first device would wait for the last.
    pairs = [
        (j, (j + distance) % size) for j in range(size) if axis.mapped or 0 <= j + distance < size
    ]
    # XLA joins exchanges that are ready at the same time.
    return lax.ppermute(lax.optimization_barrier(x), axis.name, pairs)


def _exclusive_prefix(
    join: Callable[[Element, Element], Element],
    local: Element,
    empty: Element,
    axis: Axis,
    index: jax.Array,
    *,
    reverse: bool = False,
) -> Element:
    """The joined elements of all devices before this one (after it with reverse).

    It is the scan of Hillis and Steele (1986) with one element per device. In each of its
    1 + ceil(log2(P - 1)) rounds a device sends one element and receives one.
    """
    size = axis.size
    position = size - 1 - index if reverse else index

    def from_before(x: Element, distance: int) -> Element:
        received = _shifted(x, axis, -distance if reverse else distance)
        valid = functools.partial(jnp.where, position >= distance)
        before: Element = jax.tree.map(valid, received, empty)
        return before

    if size == 1:
        return empty
    before, covered = from_before(local, 1), 1
    while covered < size - 1:
        before = join(from_before(before, covered), before)
        covered *= 2
    return before


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sequence(axis: Axis, spec: CallSpec, inputs: Inputs) -> tuple[jax.Array, LastStates]:
    outputs: tuple[jax.Array, LastStates] = _sequence_fwd(axis, spec.forward_only, inputs)[0]
    return outputs


def _sequence_fwd(axis: Axis, spec: CallSpec, x: Inputs) -> tuple[Any, ...]:
    """h and the last states of the shard.

    The initial states are those of the whole sequence; only the first device's are read.
    """
    index = lax.axis_index(axis.name)

    def start(local: Summary, initial: jax.Array) -> Summary:
        """The state before the shard; initial: C or n before the whole sequence."""
        zero = jnp.zeros_like(x.m_initial)
        whole = Summary(x.m_initial, (zero, zero), initial)
        empty = Summary(jnp.full_like(zero, -jnp.inf), whole.g, jnp.zeros_like(initial))
        choose = functools.partial(jax.tree.map, functools.partial(jnp.where, index == 0))
        local = choose(joined(whole, local), local)
        before: Summary = choose(whole, _exclusive_prefix(joined, local, empty, axis, index))
        return before

    unread: dict[str, Any] = dict.fromkeys(("q", "c_initial", "n_initial"))
    plan = spec.plan
    summary, C, log_decays, local = on_shards(
        _from_empty,
        spec,
        x._replace(**unread),
        num_splits=plan.summary_splits,
        L=plan.scan_problem.L,
    )
    n = start(summary, x.n_initial)
    # parallel_fw_P reads m and n, but not C. Because of the barrier it hides the exchange of C,
    # which XLA would otherwise merge with the exchange of n.
    n, C = lax.optimization_barrier((n, C))
    C = start(summary._replace(state=C), x.c_initial).state
    before = named(LastStates(C, n.state, n.m))
    x = x._replace(c_initial=before.c, n_initial=before.n, m_initial=before.m)
    known = _from_start(local, log_decays, n)
    outputs = named(on_shards(forward_once, spec, x, known))
    return (outputs.h, outputs.last), (residuals_of(spec, x, outputs), outputs.last, index)


def _sequence_bwd(
    axis: Axis,
    spec: CallSpec,
    residuals_and_last: Any,
    cotangents: tuple[jax.Array, LastStates],
) -> tuple[Any, ...]:
    # The arrays that the halves exchange depend on the lowering.
    run = functools.partial(_backward, axis, spec)
    args = *residuals_and_last, *cotangents
    if lowering := known_lowering(spec.backend):
        return (run(lowering, *args),)
    mapped = [(axis.name, axis.size)] if axis.mapped else []
    return (by_platform(spec.backend, run, *args, mapped=mapped),)


def _backward(
    axis: Axis,
    spec: CallSpec,
    lowering: Lowering,
    residuals: Residuals,
    last: LastStates,
    index: jax.Array,
    dh: jax.Array,
    dlast: LastStates,
) -> Inputs:
    """The gradients of the inputs; dh, dlast: those of h and of the shard's last states."""
    dC, dn, dm = dlast
    dm = dm - inner(dC, last.c, 2) - inner(dn, last.n)
    cotangents = Cotangents(dh, LastStates(dC, dn, dm))
    first, local = on_shards(_first_half, spec, residuals, cotangents, lowering=lowering)
    one, zero = jnp.ones_like(dm), jnp.zeros_like(dm)
    empty = GradientSummary(jnp.zeros_like(dC), jnp.zeros_like(dn), one, zero, one)
    after = _exclusive_prefix(joined_gradients, local, empty, axis, index, reverse=True)
    dC, dn = dC + after.dC, dn + after.dn
    dm = dm + after.dm + inner(dC, last.c, 2) + inner(dn, last.n)
    cotangents = Cotangents(dh, LastStates(dC, dn, dm))
    gradients: Inputs = on_shards(
        _second_half, spec, residuals, cotangents, first, after.dC, lowering=lowering
    )
    dinitial: dict[str, Any] = {
        name: jnp.where(index == 0, getattr(gradients, name), 0.0)
        for name in ("c_initial", "n_initial", "m_initial")
    }
    return gradients._replace(**dinitial)


_sequence.defvjp(_sequence_fwd, _sequence_bwd)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mlstm(axis: Axis, spec: CallSpec, x: Arguments) -> Any:
    """h of the shard and, if asked for, the last states of the whole sequence, on every device."""
    index = lax.axis_index(axis.name)
    inputs = padded(spec, x, functools.partial(_starts, axis), index)
    whole = dataclasses.replace(spec, has_initial_state=True, return_last_states=True)
    h, states = _sequence(axis, whole, in_reverse_mode(inputs))
    last = LastStates(
        *(lax.psum(jnp.where(index == axis.size - 1, y, 0.0), axis.name) for y in states)
    )
    return results(spec, x, h, last)


def _starts(axis: Axis, segment_ids: jax.Array) -> jax.Array:
    """Where the id differs from the previous step's, which may be on another device."""
    before = _shifted(segment_ids[..., -1], axis, 1)
    begins = (segment_ids[..., 0] != before) & (lax.axis_index(axis.name) > 0)
    return segment_starts(segment_ids).at[..., 0].set(begins)


@overload
def mlstm_chunkwise_sequence_parallel(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None, *,
    return_last_states: Literal[False] = False, axis_name: str, **keywords: Unpack[Keywords],
) -> jax.Array: ...  # fmt: skip
@overload
def mlstm_chunkwise_sequence_parallel(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None, *,
    return_last_states: Literal[True], axis_name: str, **keywords: Unpack[Keywords],
) -> tuple[jax.Array, States]: ...  # fmt: skip
@overload
def mlstm_chunkwise_sequence_parallel(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None,
    return_last_states: bool = ..., eps: float = 1e-6, chunk_size: int | None = None,
    autocast_kernel_dtype: DTypeLike | None = None, stabilize_correctly: bool = True,
    norm_val: float = 1.0, *, axis_name: str, **keywords: Unpack[SequenceKeywords],
) -> jax.Array | tuple[jax.Array, States]: ...  # fmt: skip
def mlstm_chunkwise_sequence_parallel(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None,
    return_last_states: bool = False, eps: float = 1e-6, chunk_size: int | None = None,
    autocast_kernel_dtype: DTypeLike | None = None, stabilize_correctly: bool = True,
    norm_val: float = 1.0, *, axis_name: str, segment_ids: Array | None = None,
    sequence_lengths: Array | None = None, input_gate: InputGateName = "exp",
    normalize: bool = True, recompute_states_in_bw: bool = True,
    state_dtype: DTypeLike | None = None, layout: LayoutName = DEFAULT_LAYOUT,
    backend: BackendName | None = None, config: KernelConfig | None = None,
) -> jax.Array | tuple[jax.Array, States]:  # fmt: skip
    """Applies the mLSTM to a sequence that is split over a mesh axis.

    It is ``mlstm_chunkwise``, but for num_segments and reverse, for use inside
    ``jax.shard_map``: device j of P holds steps j S / P to (j + 1) S / P of the
    whole sequence of S steps. Gradients are exact, including those of the
    initial states. The dimensions are::

      B     batch
      S     steps of the whole sequence
      P     devices along the mesh axis; S is a multiple of it
      NH    heads
      DHQK  head dimension of q and k
      DHV   head dimension of v and h

    Each device sends 1 + ceil(log2(P - 1)) summaries of a shard in the forward
    pass and as many in the backward pass (none for P = 1). A summary has up to
    DHQK DHV + DHQK + 6 floats of 4 bytes per batch entry and head. Here DHQK
    and DHV are padded to multiples of 16, unless the backend is "xla".
    return_last_states adds one all-reduce of the states. The memory per device
    does not depend on P.

    As with ``mlstm_chunkwise``, only first derivatives in reverse mode exist.

    Example, on all devices of the process::

      >>> import functools, jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec
      >>> from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel
      >>> mesh = jax.make_mesh(
      ...     (jax.device_count(),), ("sequence",), axis_types=(AxisType.Auto,)
      ... )
      >>> steps = PartitionSpec(None, "sequence")  # axis 1 of BTNH
      >>> run = jax.shard_map(
      ...     functools.partial(
      ...         mlstm_chunkwise_sequence_parallel,
      ...         axis_name="sequence",
      ...         layout="BTNH",
      ...     ),
      ...     mesh=mesh,
      ...     in_specs=(steps,) * 5,
      ...     out_specs=steps,
      ... )
      >>> q = k = v = jnp.ones((1, 64 * jax.device_count(), 2, 16))
      >>> i = f = jnp.ones(q.shape[:3])
      >>> jax.jit(run)(q, k, v, i, f).shape == v.shape
      True

    Args:
      q: queries of this device's shard, (B, NH, S / P, DHQK), or
        (B, S / P, NH, DHQK) with layout "BTNH".
      k: keys, shaped as q.
      v: values, (B, NH, S / P, DHV), or (B, S / P, NH, DHV) with "BTNH".
      i: input gate pre-activations, (B, NH, S / P), or (B, S / P, NH) with
        "BTNH".
      f: forget gate pre-activations, shaped as i.
      c_initial: state C before the whole sequence, (B, NH, DHQK, DHV), the
        same on all devices of the axis. None: zeros. Pass all three initial
        states or none.
      n_initial: state n before the whole sequence, (B, NH, DHQK).
      m_initial: stabiliser m before the whole sequence, (B, NH).
      return_last_states: whether the states after the last step of the whole
        sequence are returned as well, on every device.
      axis_name: the mesh axis that the sequence is split over, or on one
        device the axis_name of a vmap. Gradients may be taken inside or
        outside of the shard_map or vmap.
      segment_ids: (B, S / P) integers of this device's shard.
      sequence_lengths: (B,) integers, of the whole sequence, the same on all
        devices of the axis.
      chunk_size: as for ``mlstm_chunkwise``; a chunk ends where a shard ends.
      backend: as for ``mlstm_chunkwise``; "mosaic_gpu_interpret" runs on an
        axis of one device only.
      eps, autocast_kernel_dtype, stabilize_correctly, norm_val, input_gate: as
        for ``mlstm_chunkwise``.
      normalize, recompute_states_in_bw, state_dtype, layout, config: as for
        ``mlstm_chunkwise``.

    Returns:
      h of this device's shard, shaped as v, in the dtype of q. With
      return_last_states (h, (c, n, m)), as ``mlstm_chunkwise``.

    Raises:
      TypeError, ValueError: as ``mlstm_chunkwise``. ValueError for an axis_name
        that is not an axis of the surrounding shard_map.
    """
    check_axis_name(axis_name)
    options = Options(
        return_last_states, eps, chunk_size, autocast_kernel_dtype, stabilize_correctly, norm_val,
        input_gate, normalize, recompute_states_in_bw, layout, backend, config, state_dtype,
    )  # fmt: skip
    x = Arguments(q, k, v, i, f, c_initial, n_initial, m_initial, segment_ids, sequence_lengths)
    spec, x = prepare(x, options, layout)
    outputs: jax.Array | tuple[jax.Array, States] = _mlstm(_axis(axis_name), spec, x)
    return outputs
