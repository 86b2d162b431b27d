"""Sequence (context) parallelism: one sequence split over the devices of a mesh axis.

The state behind segment j of the sequence is a linear function of the state before it, known from the segment alone: with C_j, n_j, m_j
computed from an empty state (m = -inf, C = n = 0; a start at m = 0 would enter the maximum) and g_j the sum of log sigmoid(f),

    m' = max(m_j, g_j + m)        C' = exp(m_j - m') C_j + exp(g_j + m - m') C        n' alike

and such functions are composed by the same formula. So every device summarises its segment in matrix products (segments.py),

    C_j = sum_t [abar_t prod_{c' > c(t)} gamma_c'] k_t v_t^T        (c(t): the chunk of t; BUILD_NOTES.md has the notation)

a prefix over the devices gives each its initial state, and the forward pass is the usual one from there. The backward pass is its mirror
image: the gradient of the state before a segment is a linear function of that of the state behind it, dC' = A_j + Gamma_j dC, with

    A_j = sum_t [w_t prod_{c' < c(t)} gamma_c' scale / den_t] q_t dh_t^T        Gamma_j = prod_c gamma_c

a suffix over the devices gives each the gradient of its last state, and the usual backward pass the rest. The gradient that travels
along the path of the stabilisers' maximum (dm) passes a segment whole, or not at all.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas.api import run
from mlstm_pallas.backend import on_backend
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.fwbw import backward, forward, operation
from mlstm_pallas.gate_gradients import carried_steps
from mlstm_pallas.gates import ChunkGates, log_sigmoid_gate, split_for_exact_sums
from mlstm_pallas.gates import chunk_gates as chunk_gates_xla
from mlstm_pallas.passes import inner, row_gradients_of
from mlstm_pallas.plan import Inputs, Outputs, Plan, Residuals
from mlstm_pallas.reference import segment_starts
from mlstm_pallas.segments import SegmentProducts, decays_in_segments, decays_of_others, segment_products
from mlstm_pallas.stages.chunk_gates import chunk_gates


class Summary(NamedTuple):
    """What a segment does to the state before it; float32."""

    C: jax.Array  # (B, NH, DHQK, DHHV)
    n: jax.Array  # (B, NH, DHQK)
    m: jax.Array  # (B, NH)
    g: jax.Array  # (B, NH) total log decay; -inf with a reset


class GradientSummary(NamedTuple):
    """What a segment does to the gradient of the state behind it; float32."""

    dC: jax.Array  # (B, NH, DHQK, DHHV)
    dn: jax.Array  # (B, NH, DHQK)
    gamma: jax.Array  # (B, NH)
    dm: jax.Array  # (B, NH) without what m has in dC and dn
    passes: jax.Array  # (B, NH) 1 where the maximum behind the segment is the one before it, else 0


def joined(earlier: Summary, later: Summary) -> Summary:
    """The summary of two segments."""
    m = jnp.maximum(later.m, later.g + earlier.m)
    top = jnp.where(m == -jnp.inf, 0.0, m)
    old, new = jnp.exp(later.g + earlier.m - top), jnp.exp(later.m - top)
    C = old[..., None, None] * earlier.C + new[..., None, None] * later.C
    return Summary(C, old[..., None] * earlier.n + new[..., None] * later.n, m, earlier.g + later.g)


def joined_gradients(later: GradientSummary, earlier: GradientSummary) -> GradientSummary:
    return GradientSummary(
        earlier.dC + earlier.gamma[..., None, None] * later.dC,
        earlier.dn + earlier.gamma[..., None] * later.dn,
        earlier.gamma * later.gamma,
        earlier.dm + earlier.passes * later.dm,
        earlier.passes * later.passes,
    )


_STEPS_OF_A_PRODUCT = 4096  # enough work for each, and enough of them to fill a GPU where batch entries and heads are few


def _in_segments(plan: Plan, walking: Plan | None) -> Plan:
    """The plan with the segments of a device's part that products are made of: those of the pass to come where it has several.

    They are the same on all shards of batch and heads, which may come to other numbers for their pass; it makes its own products then.
    """
    NC, S = plan.problem.NC, plan.problem.S
    if walking and walking.segments > 1 and NC % walking.segments == 0:
        return dataclasses.replace(plan, segments=walking.segments)
    wanted = max(S // _STEPS_OF_A_PRODUCT, 1)
    return dataclasses.replace(plan, segments=math.gcd(NC, 1 << (wanted.bit_length() - 1)))


def _state_behind(gamma: jax.Array, products: jax.Array, *, backward: bool = False) -> jax.Array:
    """The state that the segments make of an empty one, (B, NH, DHQK, DHHV)."""
    by_segment = gamma.reshape(*products.shape[:3], gamma.shape[2] // products.shape[2])
    weights = decays_of_others(jnp.prod(by_segment, axis=-1), backward=backward)
    return jnp.sum(weights[..., None, None] * products, axis=2)


def _with_gates(plan: Plan, function: Callable[..., Any], i, f, m, starts, a, *args):
    """function(gates, precision of products with a, a, *args), where the call runs."""

    def triton(interpret, i, f, m, starts, a, *args):
        gates = chunk_gates(i, f, m, starts, plan.input_gate, **plan.launch(interpret))
        return function(gates, plan.config.dot_precision(a.dtype, interpret), a, *args)

    def xla(i, f, m, starts, a, *args):
        i, f, starts = jax.tree.map(plan.chunks, (i, f, starts))
        gates = chunk_gates_xla(i, f, m, starts, plan.input_gate)
        return function(gates, lax.Precision.HIGHEST, a, *args)

    return on_backend(plan.backend, triton, xla, i, f, m, starts, a, *args)


def _summary(plan: Plan, k, v, i, f, starts) -> tuple[Summary, SegmentProducts]:
    def made(gates: ChunkGates, precision, k, v, f, starts):
        abar, gamma, S, segments = gates.vecAbar.reshape(f.shape), gates.scaGamma, f.shape[-1], plan.segments
        products = segment_products(k, v, abar * decays_in_segments(gamma, segments, S), segments, precision)
        n = jnp.sum(k * (abar * decays_in_segments(gamma, 1, S))[..., None], axis=2)
        fbar, reset = log_sigmoid_gate(f)
        high, low = split_for_exact_sums(fbar, jnp.max(jnp.abs(fbar), axis=-1, keepdims=True), S)
        restarts = reset if starts is None else reset | (starts > 0)
        g = jnp.where(jnp.any(restarts, axis=-1), -jnp.inf, jnp.sum(high, axis=-1) + jnp.sum(low, axis=-1))
        every, m = gamma.shape[2] // segments, gates.scaM_states
        return Summary(_state_behind(gamma, products), n, m[..., -1], g), SegmentProducts(products, m[..., every::every])

    return _with_gates(plan, made, i, f, jnp.full_like(i[..., 0], -jnp.inf), starts, k, v, f, starts)


def _gradient_summary(plan: Plan, residuals: Residuals, dh) -> GradientSummary:
    def made(gates: ChunkGates, precision, q, f, starts, h, z, dh):
        rows = row_gradients_of(plan, dh, h, z, gates)
        gamma, S, segments = gates.scaGamma, f.shape[-1], plan.segments
        w = gates.vecW.reshape(f.shape) * plan.problem.qk_scale
        r = w * rows.vecInvDen if plan.normalize else w
        products = segment_products(q, dh, r * decays_in_segments(gamma, segments, S, backward=True), segments, precision)
        dC = _state_behind(gamma, products, backward=True)
        dn = jnp.zeros_like(dC[..., 0])
        if plan.normalize:
            dn = jnp.sum(q * (w * rows.vecDz * decays_in_segments(gamma, 1, S, backward=True))[..., None], axis=2)
        whole = jnp.prod(gamma, axis=-1)
        dm, passes = jnp.zeros_like(whole), jnp.ones_like(whole)
        if plan.stabilised:
            carried = carried_steps(gates, plan.chunks(f)).reshape(f.shape)
            goes_on = carried if starts is None else carried & (starts == 0)
            unbroken = jnp.cumsum(~goes_on, axis=-1) == 0
            dm = jnp.sum(jnp.where(unbroken, rows.vecDm, 0.0), axis=-1)
            passes = unbroken[..., -1].astype(dm.dtype)
        return GradientSummary(dC, dn, whole, dm, passes)

    x = residuals.inputs
    return _with_gates(plan, made, x.i, x.f, x.m_initial, x.starts, x.q, x.f, x.starts, residuals.h, residuals.z, dh)


Element = TypeVar("Element", Summary, GradientSummary)


def _exclusive_prefix(
    join: Callable[[Element, Element], Element], mine: Element, empty: Element, axis_name: str, index: jax.Array, *, reverse=False
) -> Element:
    """The elements of all devices before this one (behind it with reverse), joined: Hillis and Steele (1986), one element a device.

    1 + ceil(log2(P - 1)) rounds, in each of which a device sends one element and receives one.
    """
    size = lax.axis_size(axis_name)
    place = size - 1 - index if reverse else index

    def from_before(x: Element, distance: int) -> Element:
        step = -distance if reverse else distance
        pairs = [(j, (j + step) % size) for j in range(size)]  # around the end as well: vmap takes no other permutation
        received = lax.ppermute(x, axis_name, pairs)
        return jax.tree.map(lambda a, b: jnp.where(place >= distance, a, b), received, empty)

    if size == 1:
        return empty
    before, covered = from_before(mine, 1), 1
    while covered < size - 1:
        before = join(from_before(before, covered), before)
        covered *= 2
    return before


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sequence(axis_name: str, plan: Plan, inputs: Inputs) -> Outputs:
    return _sequence_fwd(axis_name, plan.alone, inputs)[0]


def _sequence_fwd(axis_name: str, plan: Plan, x: Inputs):
    """h and the last states of the segment; the initial states are those of the whole, of which the first device's count."""
    index = lax.axis_index(axis_name)
    first = index == 0
    zero = jnp.zeros_like(x.m_initial)
    initial = Summary(x.c_initial, x.n_initial, x.m_initial, zero)
    empty = Summary(jnp.zeros_like(x.c_initial), jnp.zeros_like(x.n_initial), jnp.full_like(zero, -jnp.inf), zero)
    mine, products = operation(_summary, _in_segments(plan, plan.stateless_forward), x.k, x.v, x.i, x.f, x.starts)
    mine = jax.tree.map(functools.partial(jnp.where, first), joined(initial, mine), mine)
    before = _exclusive_prefix(joined, mine, empty, axis_name, index)
    start = jax.tree.map(functools.partial(jnp.where, first), initial, before)
    x = x._replace(c_initial=start.C, n_initial=start.n, m_initial=start.m)
    outputs, z, states = forward(plan, x, products)
    return outputs, (Residuals(x, outputs[0] if plan.normalize else None, z, states), outputs[1], index)


def _sequence_bwd(axis_name: str, plan: Plan, kept, cotangents: Outputs):
    residuals, (C_last, n_last, _), index = kept
    dh, (dC, dn, dm) = cotangents  # of the segment's own last states
    dm = dm - inner(dC, C_last, 2) - inner(dn, n_last)
    mine = operation(_gradient_summary, _in_segments(plan, None), residuals, dh)
    one, zero = jnp.ones_like(dm), jnp.zeros_like(dm)
    mine = joined_gradients(GradientSummary(dC, dn, one, dm, one), mine)
    empty = GradientSummary(jnp.zeros_like(dC), jnp.zeros_like(dn), one, zero, one)
    behind = _exclusive_prefix(joined_gradients, mine, empty, axis_name, index, reverse=True)
    dC, dn = dC + behind.dC, dn + behind.dn
    dm = dm + behind.dm + inner(dC, C_last, 2) + inner(dn, n_last)
    gradients = backward(plan, residuals, (dh, (dC, dn, dm)))
    of_initial = {name: jnp.where(index == 0, getattr(gradients, name), 0.0) for name in ("c_initial", "n_initial", "m_initial")}
    return (gradients._replace(**of_initial),)


_sequence.defvjp(_sequence_fwd, _sequence_bwd)


def _whole(axis_name: str, plan: Plan, inputs: Inputs) -> Outputs:
    """h of the segment and the last states of the whole sequence, on every device."""
    h, states = _sequence(axis_name, dataclasses.replace(plan, starts_empty=False, last_states=True), inputs)
    last = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1
    return h, jax.tree.map(lambda x: lax.psum(jnp.where(last, x, 0.0), axis_name), states)


def _starts(axis_name: str, segment_ids: jax.Array) -> jax.Array:
    """Where the id differs from that of the step before, which may be another device's."""
    size = lax.axis_size(axis_name)
    before = lax.ppermute(segment_ids[..., -1], axis_name, [(j, (j + 1) % size) for j in range(size)])
    begins = (segment_ids[..., 0] != before) & (lax.axis_index(axis_name) > 0)
    return segment_starts(segment_ids).at[..., 0].set(begins)


def mlstm_chunkwise_sequence_parallel(
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
    axis_name: str,
    segment_ids: jax.Array | None = None,
    input_gate: str = "exp",
    normalize: bool = True,
    recompute_states_in_bw: bool = True,
    backend: str | None = None,
    config: KernelConfig | None = None,
) -> jax.Array | tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """``mlstm_chunkwise`` of a sequence that is split over a mesh axis, for use inside ``jax.shard_map``.

    Device j of P holds steps j S / P to (j + 1) S / P of the whole sequence of S. Gradients are exact, also those of the initial states.

    Each device sends 1 + ceil(log2(P - 1)) summaries of a segment forward, and as many backward (P > 1; none for P = 1): up to
    DHQK DHV + DHQK + 2 floats of 4 bytes a batch entry and head, backward one more. Head dimensions count as the kernels see them (padded
    to a power of two from 16 to 64, beyond that to a multiple of 64; not padded with backend "xla"). return_last_states adds one
    all-reduce of the states. What a device holds does not depend on P.

    Args:
      q, k: (B, NH, S / P, DHQK); v: (B, NH, S / P, DHV); i, f: (B, NH, S / P): this device's part.
      c_initial, n_initial, m_initial: initial states of the whole sequence, (B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH), the same on
        all devices of the axis; all three, or none for zeros.
      return_last_states: whether to return the states after the last step of the whole sequence as well, on every device.
      segment_ids: (B, S / P): this device's part.
      axis_name: the mesh axis that the sequence is split over; on one device it may be the axis_name of a vmap.
      Others: as for ``mlstm_pallas.mlstm_chunkwise``; a chunk ends at the end of a segment.

    Returns:
      h (B, NH, S / P, DHV) of this device's part; with return_last_states (h, (c, n, m)), as ``mlstm_chunkwise``.

    Raises:
      TypeError, ValueError: as ``mlstm_chunkwise``; ValueError for an axis_name that is no axis of the surrounding shard_map.
    """
    try:
        lax.axis_size(axis_name)
    except NameError:
        raise ValueError(f"axis_name is {axis_name!r}, expected a mesh axis of the surrounding jax.shard_map") from None
    return run(
        functools.partial(_whole, axis_name),
        functools.partial(_starts, axis_name),
        *(q, k, v, i, f, c_initial, n_initial, m_initial),
        return_last_states=return_last_states,
        eps=eps,
        chunk_size=chunk_size,
        autocast_kernel_dtype=autocast_kernel_dtype,
        stabilize_correctly=stabilize_correctly,
        norm_val=norm_val,
        segment_ids=segment_ids,
        input_gate=input_gate,
        normalize=normalize,
        recompute_states_in_bw=recompute_states_in_bw,
        backend=backend,
        config=config,
    )
