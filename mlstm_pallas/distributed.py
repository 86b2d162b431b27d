"""Sequence (context) parallelism: one sequence split over the devices of a mesh axis.

Every device holds a shard of consecutive steps and needs the state before them. The stabiliser m
before a shard follows from two numbers of each earlier one (``_boundaries``): m_j, its m from an
empty start (m = -inf, because 0 would enter the maximum), and g_j, its sum of log sigmoid(f):

    m' = max(m_j, g_j + m)

With m known the gates are those of the whole sequence, and the state after a shard is a linear
function of the state before it, with C_j the state from zeros (``_from_zeros``):

    C' = C_j + Gamma_j C        n' likewise        Gamma_j = prod_c gamma_c

So the state before a shard is a sum over the earlier ones, weighted by the products of Gamma
between them (``_weights``). Gamma_j and n_j are exchanged while the products of C_j run, and C_j
(``_sum_over``) while stages run that do not read C. The forward pass starts from that state. It
reuses the gates, the sums of keys, and what each split adds to C_j. With c(t) the chunk of step t
(splits.py),

    C_j = sum_t [abar_t prod_{c' > c(t)} gamma_c'] k_t v_t^T

The gradient of the state before a shard is a linear function of the gradient of the state after it:

    dC = A_j + Gamma_j dC'        dn likewise

So the backward pass has two halves. The first starts from the cotangents of the shard's own outputs
and yields A_j. The same sums give each shard dC', the contribution of all later shards. The second
half starts from the gradients after each chunk plus (prod_{c' > c} gamma_c') dC'. The gradient dm
follows the path of the stabilisers' maximum: it passes through a whole shard or not at all.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.api import mlstm_chunkwise
from mlstm_pallas.formulas.gate_gradients import inner
from mlstm_pallas.formulas.gates import M_GRAD_FLOWS, mark_segment_starts
from mlstm_pallas.formulas.splits import decays_in_splits, other_decays
from mlstm_pallas.formulas.tiles import blocks_over, weighted
from mlstm_pallas.fwbw import forward_once, named, residuals_of
from mlstm_pallas.planning.call_spec import CallSpec, Plan
from mlstm_pallas.planning.dispatch import stage
from mlstm_pallas.prepare import Arguments, padded, results, with_arguments_of
from mlstm_pallas.problem.arrays import Cotangents, Forward, Inputs, Residuals, States
from mlstm_pallas.problem.validation import check_axis_name
from mlstm_pallas.schedules.backward import BackwardCarry, first_half, prepared, second_half
from mlstm_pallas.schedules.forward import PrecomputedStates, run_gates
from mlstm_pallas.sharding.marks import reverse_mode_only
from mlstm_pallas.sharding.on_shards import on_shards
from mlstm_pallas.stages import split_products, step_sums
from mlstm_pallas.vectors import chunk_gates

__all__ = ["mlstm_chunkwise_sequence_parallel"]

# The most shards that send their C to every other one. More of them exchange slices of C, although
# XLA then replicates C over mesh axes that are left to the compiler.
MOST_AT_ONCE = 8


def _boundaries(plan: Plan, x: Inputs) -> tuple[jax.Array, jax.Array]:
    """m and the log decay after each chunk from an empty start, (B * NH, NC) each."""
    run = stage("chunk_gates", plan.summary)
    empty = jnp.full_like(x.initial.m, -jnp.inf)
    operands = chunk_gates.Operands(x.i, x.f, empty, x.steps.segment_starts)
    m, g = run(operands, input_gate=plan.spec.input_gate, only_boundaries=True)
    return m, jnp.cumsum(g, axis=1)


def _from_zeros(
    plan: Plan, x: Inputs, m_states: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, PrecomputedStates]:
    """What C and n of zeros give: Gamma, n and C after the shard, and the states."""
    p, launches, num_splits = plan.fused_problem, plan.summary, plan.summary_splits
    gates = run_gates(plan.spec, launches, x, m_states)
    abar, gamma = gates.per_step().vecAbar, gates.scaGamma
    n = stage("step_sums", launches)(step_sums.Operands(x.k, abar))
    matX = stage("split_products", launches)(
        split_products.Operands(a=x.k, b=x.v, r=abar * decays_in_splits(gamma, num_splits, p.S)),
        num_splits=num_splits,
        all_splits=True,
    )
    by_split = jnp.prod(gamma.reshape(p.BNH, num_splits, p.NC // num_splits), axis=-1)
    C = jnp.sum(_weighted(other_decays(by_split), matX), axis=1)
    last = jnp.sum(_weighted(other_decays(gamma), n), axis=1)
    return jnp.prod(by_split, axis=-1), last, C, PrecomputedStates(gates, n, matX)


def _first_half(
    plan: Plan, residuals: Residuals, cotangents: Cotangents
) -> tuple[BackwardCarry, list[jax.Array], jax.Array]:
    """The first half of a shard with the gradients of its last states, and what it passes on.

    These are Gamma, dm without m's part as the scale of C and n, whether the maximum before the
    shard wins in it (1, else 0), and dn; and dC.
    """
    last = cotangents.last
    arrays = prepared(plan, residuals, cotangents)
    carry = first_half(plan, *arrays)
    gates, _, states, normaliser, dn_added = carry
    gamma = gates.scaGamma
    decay = jnp.prod(gamma, axis=-1)
    dn, dm, passes = decay[:, None] * last.n, last.m, jnp.ones_like(decay)
    if dn_added is not None:
        decays = other_decays(gamma, backward=True)
        dn = dn + jnp.sum(decays[..., None] * dn_added, axis=1)
    if plan.spec.stabilised:
        flags = gates.per_step().vecFlags
        steps = lax.broadcasted_iota(jnp.int32, flags.shape, 1)
        S = flags.shape[1]
        unbroken = jnp.min(jnp.where((flags & M_GRAD_FLOWS) == 0, steps, S), axis=1)
        passes = (unbroken == S).astype(dm.dtype)
        dm = passes * dm
        if normaliser.vecDm is not None:
            dm = dm + jnp.sum(jnp.where(steps < unbroken[:, None], normaliser.vecDm, 0.0), axis=1)
    return carry, [decay, dm, passes, dn], states.matDeltaC_initial


def _with_later_shards(dC: jax.Array, decays: jax.Array, dC_after: jax.Array) -> jax.Array:
    """dC after each chunk, (B * NH, NC, ...), with decays, (B * NH, NC), times dC_after, in place.

    Usually the decays of all but a few of the last chunks are 0. Then no others are read, because
    the states of a shard are gigabytes.
    """
    NC = dC.shape[1]
    last = NC - blocks_over(NC, 16)

    def add(dC: jax.Array, start: int, stop: int) -> jax.Array:
        # XLA updates in place what it reads at the same index, unless it knows the index.
        index = lax.optimization_barrier(jnp.int32(start))
        x, weights = (
            lax.dynamic_slice_in_dim(y, index, stop - start, axis=1) for y in (dC, decays)
        )
        x = (x.astype(decays.dtype) + _weighted(weights, dC_after[:, None])).astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(dC, x, index, axis=1)

    # Of at most one step: a conditional would copy dC.
    _, dC = lax.while_loop(
        lambda state: state[0],
        lambda state: (state[0] & False, add(state[1], 0, last)),
        (jnp.any(lax.slice_in_dim(decays, 0, last, axis=1) != 0), add(dC, last, NC)),
    )
    return dC


def _second_half(
    plan: Plan,
    residuals: Residuals,
    cotangents: Cotangents,
    carry: BackwardCarry,
    dC_after: jax.Array,
) -> Inputs:
    """The gradients of the inputs; dC_after: what the later shards add to dC, (B * NH, ...)."""
    gamma, states = carry.gates.scaGamma, carry.states
    dC = _with_later_shards(states.matDeltaC_states, other_decays(gamma), dC_after)
    dC_initial = states.matDeltaC_initial + _weighted(jnp.prod(gamma, axis=-1), dC_after)
    carry = carry._replace(
        states=states._replace(matDeltaC_states=dC, matDeltaC_initial=dC_initial)
    )
    arrays = prepared(plan, residuals, cotangents)
    return second_half(plan, *arrays, carry)[0]


class Axis(NamedTuple):
    """The axis that a sequence is split over."""

    name: str
    size: int  # jax does not tell it to the backward pass of a vmap that is differentiated


def _axis(name: str) -> Axis:
    return Axis(name, lax.axis_size(name))


def _gathered(axis: Axis, *x: jax.Array) -> list[jax.Array]:
    """Arrays of all shards, (B, NH, P, ...), by one collective; x: (B, NH) but for the last."""
    rows, last = [y[..., None] for y in x[:-1]], x[-1]
    here = jnp.arange(axis.size) == lax.axis_index(axis.name)
    every = jnp.concatenate([*rows, last], 2)[:, :, None]
    every = lax.psum(jnp.where(here[None, None, :, None], every, 0.0), axis.name)
    return [*(every[..., j] for j in range(len(rows))), every[..., len(rows) :]]


def _between(join: Callable[..., jax.Array], x: jax.Array, nothing: float) -> jax.Array:
    """What join makes of x, (B, NH, P), of the shards between j and a later one i.

    Returns (B, NH, P, P), by i and j.
    """
    shape = 1, 1, *x.shape[2:] * 3
    i, j, between = (lax.broadcasted_iota(jnp.int32, shape, n) for n in (2, 3, 4))
    inside = (j < between) & (between < i)
    return join(jnp.where(inside, x[:, :, None, None], nothing), axis=4)


def _from_preceding(x: jax.Array, nothing: float) -> jax.Array:
    """x, (B, NH, P, P), where j is before i."""
    return jnp.where(jnp.tri(x.shape[2], k=-1, dtype=bool)[None, None], x, nothing)


def _weights(gamma: jax.Array) -> jax.Array:
    """The weight of shard j in a sum over those before i, (B, NH, P, P); gamma: (B, NH, P)."""
    return _from_preceding(_between(jnp.prod, gamma, 1.0), 0.0)


def _weighted(weights: jax.Array, x: jax.Array) -> jax.Array:
    """``weighted``; x may have more axes."""
    return weighted(lax.expand_dims(weights, range(weights.ndim, x.ndim)), x)


def _sum_over(axis: Axis, weights: jax.Array, x: jax.Array) -> jax.Array:
    """sum_j weights_ij x_j on device i != j, of x_j on device j; weights: (B, NH, P, P)."""
    index = lax.axis_index(axis.name)
    (B, NH, K, V), P = x.shape, axis.size
    if P <= MOST_AT_ONCE or K % P:
        total = jnp.zeros_like(x)
        for distance in range(1, P):
            shift = [(j, (j + distance) % P) for j in range(P)]
            weight = weights[:, :, index, (index - distance) % P]
            total += _weighted(weight, lax.ppermute(x, axis.name, shift))
        return total
    # Each device adds up one slice for all, and sends and receives x twice, whatever P is.
    exchanged = functools.partial(lax.all_to_all, axis_name=axis.name, split_axis=2, concat_axis=2)
    slices = exchanged(x.reshape(B, NH, P, K // P, V))
    sums = exchanged(jnp.sum(_weighted(weights, slices[:, :, None]), axis=3))
    return sums.reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sequence(axis: Axis, spec: CallSpec, inputs: Inputs) -> tuple[jax.Array, States]:
    return _sequence_fwd(axis, spec.forward_only, inputs)[0]


def _sequence_fwd(axis: Axis, spec: CallSpec, x: Inputs) -> tuple[Any, ...]:
    """h and the last states of the shard.

    The initial states are those of the whole sequence; only the first device's are read.
    """
    index, m_states = lax.axis_index(axis.name), None
    # Shards have the chunks and the splits of the call's fused scan.
    spec = dataclasses.replace(
        spec, chunk_and_splits=(spec.plan.fused_problem.L, spec.plan.num_splits)
    )
    C_first, n_first, m = x.initial
    C_first, n_first = (jnp.where(index == 0, y, 0.0) for y in (C_first, n_first))
    if spec.stabilised:
        m_after, g = on_shards(_boundaries, spec, x)
        m, last = jnp.where(index == 0, m, -jnp.inf), g[..., -1:]
        m_all, g_all = _gathered(axis, jnp.maximum(m_after[..., -1], m + last[..., 0]), last)
        m_all = m_all[:, :, None] + _between(jnp.sum, g_all[..., 0], 0.0)
        m_all = _from_preceding(m_all, -jnp.inf)
        m = jnp.maximum(m, jnp.max(m_all, axis=3)[:, :, index])
        before = m[..., None]
        m_states = jnp.concatenate([before, jnp.maximum(m_after, before + g)], axis=-1)
    x = x._replace(initial=x.initial._replace(m=m))
    gamma, n, C, precomputed = on_shards(_from_zeros, spec, x, m_states)
    C, n = C + gamma[..., None, None] * C_first, n + gamma[..., None] * n_first
    # The products of C hide the exchange of n, and parallel_fw_P that of C, which follows it.
    gamma_all, n_all = _gathered(axis, gamma, n)
    gamma_all, C = lax.optimization_barrier((gamma_all, C))
    weights = _weights(gamma_all)
    n = n_first + jnp.sum(_weighted(weights[:, :, index], n_all), axis=2)
    before = named(States(C_first + _sum_over(axis, weights, C), n, m))
    x = x._replace(initial=before)
    outputs = named(on_shards(forward_once, spec, x, precomputed, results=Forward))
    return (outputs.h, outputs.last), (residuals_of(spec, x, outputs), outputs.last, index)


def _sequence_bwd(
    axis: Axis,
    spec: CallSpec,
    residuals_and_last: tuple[Residuals, States, jax.Array],
    cotangents: tuple[jax.Array, States],
) -> tuple[Inputs]:
    """The gradients of the inputs."""
    (residuals, last, index), (dh, (dC, dn, dm)) = residuals_and_last, cotangents
    dm = dm - inner(dC, last.c, 2) - inner(dn, last.n)
    dy = Cotangents(dh, States(dC, dn, dm))
    carry, local, dC_before = on_shards(_first_half, spec, residuals, dy)
    gamma, dm_all, passes, dn_all = _gathered(axis, *local)
    weights, passes = (_weights(y).swapaxes(2, 3) for y in (gamma, passes))
    dC_after = _sum_over(axis, weights, dC_before)
    dC, dn = dC + dC_after, dn + jnp.sum(_weighted(weights[:, :, index], dn_all), axis=2)
    dm = dm + jnp.sum(_weighted(passes[:, :, index], dm_all), axis=2)
    dm = dm + inner(dC, last.c, 2) + inner(dn, last.n)
    arrays = residuals, Cotangents(dh, States(dC, dn, dm)), carry, dC_after
    gradients: Inputs = on_shards(_second_half, spec, *arrays, results=Inputs)
    initial = jax.tree.map(lambda y: jnp.where(index == 0, y, 0.0), gradients.initial)
    return (gradients._replace(initial=initial),)


_sequence.defvjp(_sequence_fwd, _sequence_bwd)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mlstm(axis: Axis, spec: CallSpec, x: Arguments) -> Any:
    """h of the shard and, if asked for, the last states of the whole sequence, on every device."""
    index = lax.axis_index(axis.name)
    inputs = padded(spec, x, functools.partial(_segment_starts, axis), index)
    n = inputs.initial.n
    if inputs.initial.c is None:  # every later shard has initial states
        zeros = jnp.broadcast_to(n[..., None], (*n.shape, spec.problem.DHV))
        inputs = inputs._replace(initial=inputs.initial._replace(c=zeros))
    inputs = reverse_mode_only(inputs)
    h, states = _sequence(axis, dataclasses.replace(spec, return_last_states=True), inputs)
    last = jax.tree.map(
        lambda y: lax.psum(jnp.where(index == axis.size - 1, y, 0.0), axis.name), states
    )
    return results(spec, x, h, last)


def _segment_starts(axis: Axis, segment_ids: jax.Array) -> jax.Array:
    """Where the id differs from the previous step's, which may be on another device."""
    index = lax.axis_index(axis.name)
    last = lax.all_gather(segment_ids[..., -1], axis.name)
    is_start = (segment_ids[..., 0] != last[index - 1]) & (index > 0)
    return mark_segment_starts(segment_ids).at[..., 0].set(is_start)


def _shards(axis_name: str) -> int:
    check_axis_name(axis_name)
    return _axis(axis_name).size


@with_arguments_of(cast(Any, mlstm_chunkwise), _shards)
def mlstm_chunkwise_sequence_parallel(spec: CallSpec, x: Arguments, *, axis_name: str) -> Any:
    """Applies the mLSTM to a sequence that is split over a mesh axis.

    It is ``mlstm_chunkwise`` without segment_lengths and reverse, for use
    inside ``jax.shard_map``: device j of P holds steps j S / P to (j + 1) S / P
    of the whole sequence of S steps. Gradients are exact, including those of
    the initial states. The dimensions are::

      B     batch
      S     steps of the whole sequence
      P     devices along the mesh axis; S is a multiple of it
      NH    heads
      DHQK  head dimension of q and k
      DHV   head dimension of v and h

    The devices exchange the states C of all shards, DHQK DHV floats of 4 bytes
    per batch entry and head, once in the forward and once in the backward pass:
    up to 8 by P - 1 permutations of one state, more by two all-to-alls of one
    state, if P divides DHQK. All-reduces have DHQK + 3 floats per shard. Here
    DHQK and DHV are padded to multiples of 16, unless the backend is "xla".
    return_last_states adds one all-reduce of the states, and segment_ids an
    all-gather of one id per batch entry. Beside the buffers of
    the exchange the memory per device does not depend on P.

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
      backend, eps, autocast_kernel_dtype, stabilize_correctly, norm_val: as
        for ``mlstm_chunkwise``.
      input_gate, normalize, recompute_states_in_bw, state_dtype: as for
        ``mlstm_chunkwise``.
      layout, config: as for ``mlstm_chunkwise``.

    Returns:
      h of this device's shard, shaped as v, in the dtype of q. With
      return_last_states (h, (c, n, m)), as ``mlstm_chunkwise``.

    Raises:
      TypeError, ValueError: as ``mlstm_chunkwise``. ValueError for an axis_name
        that is not an axis of the surrounding shard_map.
    """
    return _mlstm(_axis(axis_name), spec, x)
