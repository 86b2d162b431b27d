"""Before and after a call runs: checks, its CallSpec, casts, padding and what is cut off again."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mlstm_pallas.formulas.gates import CARRIES_ON, segment_starts, steps_within
from mlstm_pallas.planning.call_spec import CallSpec, call_spec
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.planning.options import Options
from mlstm_pallas.problem import validation
from mlstm_pallas.problem.annotations import Array, BackendName, InputGateName, LayoutName, States
from mlstm_pallas.problem.arrays import Inputs, LastStates, SegmentStates
from mlstm_pallas.problem.dimensions import Layout, accumulator_dtype
from mlstm_pallas.schedules.sharding import sharded_alike

_log = logging.getLogger("mlstm_pallas")


class SequenceKeywords(TypedDict, total=False):
    """The keyword-only arguments that overloads of the public functions of sequences share."""

    segment_ids: Array | None
    sequence_lengths: Array | None
    input_gate: InputGateName
    normalize: bool
    recompute_states_in_bw: bool
    state_dtype: DTypeLike | None
    layout: LayoutName
    backend: BackendName | None
    config: KernelConfig | None


class Keywords(SequenceKeywords, total=False):
    """Those, and the options that may be positional."""

    eps: float
    chunk_size: int | None
    autocast_kernel_dtype: DTypeLike | None
    stabilize_correctly: bool
    norm_val: float


class Arguments(NamedTuple):
    """The arrays of a call as the caller passes them."""

    q: Any
    k: Any
    v: Any
    i: Any
    f: Any
    c_initial: Any = None
    n_initial: Any = None
    m_initial: Any = None
    segment_ids: Any = None
    sequence_lengths: Any = None


def prepare(x: Arguments, options: Options, layout: Any, shards: int = 1) -> CallSpec:
    """The CallSpec of ``mlstm_chunkwise``, after all checks.

    layout: as it was passed; shards: of the sequence, of which x has one.
    """
    arrays = x._asdict()
    states = {name: arrays.pop(name) for name in ("c_initial", "n_initial", "m_initial")}
    arrays = {name: y for name, y in arrays.items() if name in "qkvif" or y is not None}
    N = options.num_segments
    if N is not None:
        validation.check_segments(N, x.segment_ids, options.return_last_states)
    sizes = validation.check_inputs(
        arrays, states, options.input_gate, options.layout, num_segments=N, shards=shards
    )
    if options.autocast_kernel_dtype is None:
        validation.check_one_dtype(arrays)
    spec = call_spec(options, sizes, x.q.dtype, has_initial_state=x.c_initial is not None)
    if N is not None:
        front = int(spec.has_initial_state and _may_be_negative(x.segment_ids))
        validation.check_segments_fit(N, spec.backend, front)
        spec = dataclasses.replace(spec, num_segments=N + front, front=front)
    validation.check_layout_is_meant(layout, sizes, x.c_initial, x.segment_ids)
    _log.debug("%s", spec)
    return spec


def padded(
    spec: CallSpec,
    arguments: Arguments,
    starts_of: Callable[[jax.Array], jax.Array] = segment_starts,
    shard: Any = 0,
) -> Inputs:
    """The arrays, cast and padded.

    Args:
      starts_of: segment_ids, (B, NH, S), to where segments begin.
      shard: the number of the shard of the sequence that has the S steps; sequence_lengths are
        those of all shards.
    """
    q, k, v, i, f, c_initial, n_initial, m_initial, segment_ids, sequence_lengths = arguments
    num_segments = spec.num_segments
    p, dtype, acc = spec.problem, spec.dtype, accumulator_dtype(spec.dtype)
    B, NH, S = p.B, p.NH, i.shape[2 if spec.layout is Layout.BNTH else 1]
    DHQK, DHV = q.shape[-1], v.shape[-1]
    segments = None
    if num_segments is not None and c_initial is not None:
        segments = _states_of_segments(spec, c_initial, n_initial, m_initial)
        c_initial = n_initial = m_initial = None
    if c_initial is None:
        c_initial, n_initial = jnp.zeros((B, NH, DHQK, DHV), acc), jnp.zeros((B, NH, DHQK), acc)
    if m_initial is None or not spec.stabilised:  # with the sigmoid gate m is 0
        m_initial = jnp.zeros((B, NH), acc)
    if spec.layout is Layout.BTNH:
        i, f = jnp.swapaxes(i, 1, 2), jnp.swapaxes(f, 1, 2)
    ids = lengths = None
    if segment_ids is not None:
        ids = jnp.broadcast_to(segment_ids[:, None], (B, NH, S))
    if sequence_lengths is not None:
        lengths = jnp.clip(as_int32(sequence_lengths) - shard * S, 0, S)
        lengths = jnp.broadcast_to(lengths[:, None], (B, NH))
    x = Inputs(q, k, v, i, f, c_initial, n_initial, m_initial, lengths=lengths, segments=segments)
    x, ids = sharded_alike(spec, (x, ids))
    (q, k, v, i, f, c_initial, n_initial, m_initial), lengths = x[:8], x.lengths
    if lengths is not None:  # as the padding does, these gates carry the states on
        within = steps_within(lengths, S)
        i = jnp.where(within, i.astype(acc), CARRIES_ON[0])
        f = jnp.where(within, f.astype(acc), CARRIES_ON[1])
    inputs = Inputs(
        pad(q, dtype, p.DHQK),
        pad(k, dtype, p.DHQK),
        pad(v, dtype, p.DHV),
        pad(i, acc, p.S, value=CARRIES_ON[0]),
        pad(f, acc, p.S, value=CARRIES_ON[1]),
        pad(c_initial, acc, p.DHQK, p.DHV),
        pad(n_initial, acc, p.DHQK),
        pad(m_initial, acc),
        lengths=lengths,
        segments=x.segments,
    )
    if ids is not None:
        starts = starts_of(ids).astype(jnp.int32)
        if num_segments is not None:
            # An id below 0 is -1, and one beyond N is N; not all dtypes have these.
            limits = jnp.iinfo(ids.dtype)
            least, most = max(limits.min, -1), min(limits.max, num_segments - spec.front)
            ids = ids.clip(least, most).astype(jnp.int32) + spec.front
            inputs = inputs._replace(segment_ids=ids)
        starts = starts if lengths is None else jnp.where(within, starts, 0)
        if p.reverse:  # a segment begins where the next one in memory ends
            starts = jnp.roll(starts, -1, 2)
        inputs = inputs._replace(starts=pad(starts, starts.dtype, p.S))
    return inputs


def results(
    spec: CallSpec, x: Arguments, h: jax.Array, last: LastStates | SegmentStates | None
) -> jax.Array | tuple[jax.Array, States]:
    """What the public function returns, without the padding of the heads."""
    DHQK, DHV = x.q.shape[-1], x.v.shape[-1]
    h = h[..., :DHV].astype(x.q.dtype)
    if last is None or not spec.return_last_states:
        return h
    c, n, m = last
    if spec.num_segments is not None:
        c, n, m = (jnp.swapaxes(y[:, :, spec.front :], 1, 2) for y in last)
    return h, (c[..., :DHQK, :DHV].astype(spec.state_dtype or c.dtype), n[..., :DHQK], m)


def _may_be_negative(ids: Any) -> bool:
    """Whether an id may be below 0; NumPy arrays are read, of others the dtype is known."""
    if isinstance(ids, np.ndarray):
        return bool(np.any(ids < 0))
    return jnp.issubdtype(ids.dtype, jnp.signedinteger)


def _states_of_segments(spec: CallSpec, c: Any, n: Any, m: Any) -> SegmentStates:
    """The initial states of all segments; those of a row, (B, NH, ...), are segment 0's."""
    p, dtype, N = spec.problem, accumulator_dtype(spec.dtype), cast(int, spec.num_segments)
    m = jnp.zeros(n.shape[:-1], dtype) if m is None else m
    if c.ndim == 4:
        c, n, m = (x[:, :, None] for x in (c, n, m))
    else:
        c, n, m = (jnp.swapaxes(x, 1, 2) for x in (c, n, m))
    c, n, m = pad(c, dtype, N, p.DHQK, p.DHV), pad(n, dtype, N, p.DHQK), pad(m, dtype, N)
    if spec.front:  # the last one, of zeros, is the first
        c, n, m = (jnp.roll(x, 1, axis=2) for x in (c, n, m))
    return SegmentStates(c, n, m)


@jax.jit
def as_int32(lengths: jax.Array) -> jax.Array:
    """The lengths in int32, which cuts those beyond it off."""
    largest = min(jnp.iinfo(lengths.dtype).max, 2**31 - 1)  # not all dtypes have S
    return lengths.clip(0, largest).astype("int32")


# Without jit jnp.zeros transfers its number, which jax_transfer_guard may refuse.
zeros_of = jax.jit(jnp.zeros, static_argnames=("shape", "dtype"))


def pad(x: jax.Array, dtype: Any, *sizes: int, value: float = 0) -> jax.Array:
    """x in the dtype, with its last axes padded up to the sizes."""
    x = x.astype(dtype)
    shape = *x.shape[: x.ndim - len(sizes)], *sizes
    widths = [(0, padded - size) for padded, size in zip(shape, x.shape, strict=True)]
    return jnp.pad(x, widths, constant_values=value) if shape != x.shape else x
