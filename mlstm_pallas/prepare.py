"""Before and after a call runs: checks, its CallSpec, casts, padding and what is cut off again.

``with_arguments_of`` is ``prepare`` as a decorator.
"""

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from mlstm_pallas.formulas.gates import CARRIES_ON, mark_segment_starts
from mlstm_pallas.launches.lowering import Lowering
from mlstm_pallas.planning.backend import requested_lowering
from mlstm_pallas.planning.call_spec import CallSpec, call_spec
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.planning.options import Options
from mlstm_pallas.problem import validation
from mlstm_pallas.problem.annotations import (
    Array,
    BackendName,
    InputGateName,
    LayoutName,
    StatesTuple,
)
from mlstm_pallas.problem.arrays import Inputs, States, Token
from mlstm_pallas.problem.dimensions import Layout, Problem, accumulator_dtype
from mlstm_pallas.problem.gpu import target_gpu
from mlstm_pallas.problem.signatures import bind
from mlstm_pallas.problem.steps import Steps
from mlstm_pallas.sharding.axes import sharded_alike
from mlstm_pallas.stages.recurrent_step import split_token

_log = logging.getLogger("mlstm_pallas")


class SequenceKeywords(TypedDict, total=False):
    """The keyword-only arguments that overloads of ``mlstm_chunkwise`` share."""

    segment_ids: Array | None
    sequence_lengths: Array | None
    segment_lengths: Array | None
    reverse: bool
    input_gate: InputGateName
    normalize: bool
    recompute_states_in_bw: bool
    state_dtype: DTypeLike | None
    layout: LayoutName | None
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
    segment_lengths: Any = None
    slots: Any = None

    @property
    def steps(self) -> Token:
        return Token(self.q, self.k, self.v, self.i, self.f)

    @property
    def initial(self) -> States:
        return States(self.c_initial, self.n_initial, self.m_initial)


def prepare(
    x: Arguments, options: Options, layout: Any, shards: int = 1
) -> tuple[CallSpec, Arguments]:
    """The CallSpec of ``mlstm_chunkwise``, after all checks, and the ``constants`` of x.

    layout: as it was passed, None: left out; shards: of the sequence, of which x has one.
    """
    arrays = x._asdict()
    documents = x.segment_lengths is not None
    for name, value in dict(segment_lengths=documents, state_dtype=options.state_dtype).items():
        if value and not options.return_last_states:
            value = "passed" if value is True else value
            raise ValueError(
                f"{name} is {value} with return_last_states=False, expected return_last_states=True"
            )
    excluded = dict(
        segment_ids=x.segment_ids is not None,
        sequence_lengths=x.sequence_lengths is not None,
        reverse=options.reverse,
    )
    for name in excluded if documents else ():
        if excluded[name]:
            raise ValueError(f"{name} is passed with segment_lengths, expected one of them")
    sizes = validation.check_inputs(arrays, options.input_gate, options.layout, shards=shards)
    if options.autocast_kernel_dtype is None:
        validation.check_one_dtype(arrays)
    spec = call_spec(options, sizes, x.q.dtype, target_gpu(x.q))
    packed = documents or x.segment_ids is not None
    if packed or x.sequence_lengths is not None:
        p = dataclasses.replace(spec.problem, isolates=True, packed=packed)
        spec = dataclasses.replace(spec, problem=p)
    validation.check_layout_is_meant(layout, sizes, x.c_initial, x.segment_ids)
    _log.debug("%s", spec)
    return spec, constants(x)


_Public = TypeVar("_Public", bound=Callable[..., Any])


def with_arguments_of(
    public: _Public, shards: Callable[..., int] = lambda: 1, **fixed: Any
) -> Callable[[Callable[..., Any]], _Public]:
    """Gives a function the arguments of a public one but segment_lengths and reverse, prepared.

    It decorates (spec, Arguments, **keyword-only arguments, which are added) -> results.

    Args:
      public: ``mlstm_chunkwise``; Any for type checkers where arguments are added.
      shards: the number of shards of the sequence, from the arguments that are added.
      fixed: options that do not depend on the caller's.
    """

    def decorate(run: Callable[..., Any]) -> Any:
        others = [x for x in inspect.signature(run).parameters.values() if x.kind is x.KEYWORD_ONLY]
        parameters = dict(inspect.signature(public).parameters)
        for name in "segment_lengths", "reverse", "num_segments":
            del parameters[name]
        signature = inspect.Signature([*parameters.values(), *others])

        @functools.wraps(run)
        def call(*args: Any, **keywords: Any) -> Any:
            values = bind(run, signature, args, keywords)
            x = Arguments(*(values.pop(name, None) for name in Arguments._fields))
            added = {other.name: values.pop(other.name) for other in others}
            options = dataclasses.replace(Options(**values), **fixed)
            return run(*prepare(x, options, values["layout"], shards(**added)), **added)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def prepare_steps(
    stage: str, arrays: Mapping[str, Any], options: Options, *, steps: bool, layout: Any = None
) -> CallSpec:
    """The CallSpec of steps from states to states, after all checks.

    Args:
      stage: that every token runs.
      arrays: by the names of ``validation.DIMS``.
      steps: whether q has an axis of steps.
      layout: as it was passed, of steps.
    """
    gpu = target_gpu(arrays["q"])
    lowering = requested_lowering(options.backend, gpu)
    sizes = validation.check_inputs(
        arrays, options.input_gate, options.layout, backend=lowering, cast=False, steps=steps
    )
    validation.check_constant(sizes, lowering)
    validation.check_one_dtype(arrays)
    c = _states_of(arrays)
    if steps:
        validation.check_layout_is_meant(layout, sizes, c)
    B, NH, DHQK, DHV = (sizes[name] for name in ("B", "NH", "DHQK", "DHV"))
    S = sizes.get("S", 1)
    if B * NH == 0:
        lowering = Lowering.XLA  # a kernel has no empty grid
    return CallSpec(
        **vars(options) | dict(layout=Layout.BNTH),  # of every token
        lowering=lowering,
        problem=Problem(B, NH, S, DHQK, DHV, S, DHQK**-0.5),
        dtype=accumulator_dtype(arrays["q"].dtype) if c is None else c.dtype,
        gpu=gpu,
        steps=S,
        stage=stage,
        pooled=arrays["slots"] is not None,
    )


_split_token = jax.jit(split_token, static_argnums=(1, 2))  # transfers nothing


def _states_of(arrays: Mapping[str, Any]) -> Any:
    return arrays.get("states.c", arrays.get("c_initial"))


def in_parts(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arrays of a token by name, joined ones in parts, for the checks."""
    if arrays["k"] is not None:
        return arrays
    token, c = Token(*(arrays[name] for name in Token._fields)), _states_of(arrays)
    for name in "qi":
        validation.check_is_array(name, arrays[name])
    q, i, states = (tuple(getattr(x, "shape", ())) for x in (token.q, token.i, c))
    joined = token.v is None and token.f is None and len(states) == 4 and q and i[-1:] == (2,)
    if not joined or q[-1] < 2 * states[2] + states[3]:
        raise ValueError(
            "k is None, expected v and f None too, q with q, k and v on its last axis, (..., "
            "2 * DHQK + DHV or more), i (..., 2) and the states; the shapes of q, i and c are "
            f"{q}, {i} and {states}"
        )
    return {**arrays, **_split_token(constants(token), *states[2:])._asdict()}


def constants(tree: Any) -> Any:
    """The tree with NumPy's arrays as copies in jax's dtypes.

    A traced function has them as constants. While its program lives, jax keeps a constant in the 32
    bits in which it was compiled, also for later programs under jax_enable_x64, which then fail.
    """
    return jax.tree.map(
        lambda x: np.array(x, jnp.result_type(x)) if isinstance(x, np.ndarray) else x, tree
    )


def padded(
    spec: CallSpec,
    arguments: Arguments,
    starts_of: Callable[[jax.Array], jax.Array] = mark_segment_starts,
    shard: Any = 0,
) -> Inputs:
    """The arrays, cast and padded.

    Args:
      starts_of: segment_ids, (B, NH, S), to where segments begin.
      shard: the number of the shard of the sequence that has the S steps; sequence_lengths are
        those of all shards.
    """
    (q, k, v, i, f), (c, n, m) = arguments.steps, arguments.initial
    ids, lengths = arguments.segment_ids, arguments.sequence_lengths
    p, dtype, acc, N = spec.problem, spec.dtype, accumulator_dtype(spec.dtype), spec.num_segments
    if spec.layout is Layout.BTNH:
        i, f = jnp.swapaxes(i, 1, 2), jnp.swapaxes(f, 1, 2)
    B, NH, S = i.shape
    segments = None
    if N is not None and c is not None:
        segments = _segment_states(spec, N, c, n, m)
        c = m = None
    if c is None:
        n = jnp.zeros((B, NH, p.DHQK), acc)
    if m is None or not spec.stabilised:  # with the sigmoid gate m is 0
        m = jnp.zeros((B, NH), acc)
    if ids is not None:
        ids = jnp.broadcast_to(ids[:, None], (B, NH, S))
    if lengths is not None:
        lengths = jnp.clip(as_int32(lengths) - shard * S, 0, S)
        lengths = jnp.broadcast_to(lengths[:, None], (B, NH))
    ends = arguments.segment_lengths
    if ends is not None:  # lengths beyond S, which nobody has checked, do not overflow
        capped = functools.partial(lax.associative_scan, lambda x, y: jnp.minimum(x + y, S), axis=1)
        ends = capped(as_int32(ends, 0, S))
        ends = jnp.broadcast_to(ends[:, None], (B, NH, N))
        lengths = ends[..., -1]
    steps = Steps(lengths, segment_ids=ids, segment_ends=ends)
    x = sharded_alike(spec, Inputs(q, k, v, i, f, States(c, n, m), steps, segments))
    i, f, steps = x.i, x.f, x.steps
    within, ids = steps.that_count(S), steps.segment_ids
    if within is not None:  # as the padding does, these gates carry the states on
        i = jnp.where(within, i.astype(acc), CARRIES_ON[0])
        f = jnp.where(within, f.astype(acc), CARRIES_ON[1])
    if ids is not None:
        segment_starts = starts_of(ids).astype(jnp.int32)
        segment_starts = segment_starts if within is None else jnp.where(within, segment_starts, 0)
        if p.reverse:  # a segment begins where the next one in memory ends
            segment_starts = jnp.roll(segment_starts, -1, 2)
        segment_starts = pad(segment_starts, segment_starts.dtype, p.S)
        steps = steps._replace(segment_starts=segment_starts, segment_ids=None)
    return Inputs(
        pad(x.q, dtype, p.DHQK),
        pad(x.k, dtype, p.DHQK),
        pad(x.v, dtype, p.DHV),
        pad(i, acc, p.S, value=CARRIES_ON[0]),
        pad(f, acc, p.S, value=CARRIES_ON[1]),
        States(
            None if c is None else pad(x.initial.c, acc, p.DHQK, p.DHV),
            pad(x.initial.n, acc, p.DHQK),
            pad(x.initial.m, acc),
        ),
        steps,
        x.segments,
    )


def results(
    spec: CallSpec, x: Arguments, h: jax.Array, last: States | None
) -> jax.Array | tuple[jax.Array, StatesTuple]:
    """What the public function returns, without the padding of the heads."""
    h = h[..., : x.v.shape[-1]].astype(x.q.dtype)
    if last is None or not spec.return_last_states:
        return h
    if spec.num_segments is not None:
        last = jax.tree.map(lambda y: jnp.swapaxes(y, 1, 2), last)
    return h, returned_states(spec, x, last)


def returned_states(spec: CallSpec, x: Arguments, states: States) -> StatesTuple:
    """States without the padding of the heads, c in ``state_dtype``.

    Where they are the initial states of the next call, XLA may drop the cast of c to 16 bits and
    back. It does so for two heads and not for one, so batch_invariant keeps it.
    """
    (c, n, m), DHQK = states, x.q.shape[-1]
    c = c[..., :DHQK, : x.v.shape[-1]].astype(spec.state_dtype or n.dtype)
    if spec.state_dtype and spec.config.batch_invariant:
        c = jax.lax.optimization_barrier(c)
    return c, n[..., :DHQK], m


def _segment_states(spec: CallSpec, N: int, c: Any, n: Any, m: Any) -> States:
    """The initial states of all segments; those of a row, (B, NH, ...), are segment 0's."""
    p, dtype = spec.problem, accumulator_dtype(spec.dtype)
    m = jnp.zeros(n.shape[:-1], dtype) if m is None else m
    one_row = c.ndim == 4
    c, n, m = (x[:, :, None] if one_row else jnp.swapaxes(x, 1, 2) for x in (c, n, m))
    c, n, m = pad(c, dtype, N, p.DHQK, p.DHV), pad(n, dtype, N, p.DHQK), pad(m, dtype, N)
    return States(c, n, m)


def per_head(counts: Any, shape: tuple[int, ...]) -> Any:
    """Integers (B,) in int32 for every head, (B, NH); None stays."""
    return None if counts is None else jnp.broadcast_to(as_int32(counts)[:, None], shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def as_int32(x: jax.Array, least: int = 0, most: int = 2**31 - 1) -> jax.Array:
    """Integers in int32, cut off at the limits, which not all dtypes have."""
    limits = jnp.iinfo(x.dtype)
    return x.clip(max(limits.min, least), min(limits.max, most)).astype("int32")


def pad(x: jax.Array, dtype: Any, *sizes: int, value: float = 0) -> jax.Array:
    """x in the dtype, with its last axes padded up to the sizes."""
    x = x.astype(dtype)
    shape = *x.shape[: x.ndim - len(sizes)], *sizes
    widths = [(0, padded - size) for padded, size in zip(shape, x.shape, strict=True)]
    return jnp.pad(x, widths, constant_values=value) if shape != x.shape else x
