"""Before and after a call runs: checks, its CallSpec, casts, padding and what is cut off again."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mlstm_pallas import validation
from mlstm_pallas.annotations import Array, BackendName, InputGateName, LayoutName, States
from mlstm_pallas.arrays import Inputs, LastStates, SegmentStates
from mlstm_pallas.backend import requested_backend
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gates import CARRIES_ON, segment_starts, steps_within
from mlstm_pallas.gpu import target_gpu
from mlstm_pallas.normaliser import Normaliser
from mlstm_pallas.planning import CallSpec, make_spec
from mlstm_pallas.problem import MIN_CHUNK_SIZE, InputGate, Layout, Problem, accumulator_dtype
from mlstm_pallas.sharding import aligned

_log = logging.getLogger("mlstm_pallas")


class SequenceKeywords(TypedDict, total=False):
    """The keyword-only arguments that overloads of the public functions of sequences share."""

    segment_ids: Array | None
    sequence_lengths: Array | None
    input_gate: InputGateName
    normalize: bool
    recompute_states_in_bw: bool
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


@dataclasses.dataclass(frozen=True)
class Options:
    """The static arguments of ``mlstm_chunkwise``, which documents them."""

    return_last_states: bool = False
    eps: float = 1e-6
    chunk_size: int | None = None
    autocast_kernel_dtype: Any = None
    stabilize_correctly: bool = True
    norm_val: float = 1.0
    input_gate: InputGate = InputGate.EXP
    normalize: bool = True
    recompute_states_in_bw: bool = True
    layout: Layout = Layout.BNTH
    backend: str | None = None
    config: KernelConfig | None = None
    num_segments: int | None = None

    @property
    def normaliser(self) -> Normaliser | None:
        # With the sigmoid gate m is 0, so the floor does not depend on it.
        correctly = self.stabilize_correctly and self.input_gate is InputGate.EXP
        return Normaliser(self.eps, self.norm_val, correctly) if self.normalize else None


# Each checks an option by its name, and returns it as a Python object.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(
        ("return_last_states", "stabilize_correctly", "normalize", "recompute_states_in_bw"),
        validation.check_flag,
    ),
    **dict.fromkeys(("eps", "norm_val"), validation.check_scalar),
    "chunk_size": functools.partial(validation.check_power_of_two, least=MIN_CHUNK_SIZE),
    "input_gate": functools.partial(validation.check_choice, kind=InputGate),
    "layout": functools.partial(validation.check_choice, kind=Layout),
    "backend": validation.check_backend,
    "config": functools.partial(validation.check_instance, kind=KernelConfig),
}


def options_of(arguments: Mapping[str, Any]) -> Options:
    """The options among the arguments of a public function, checked and as Python objects.

    The dtype is checked with the arrays, and num_segments with segment_ids.
    """
    fields = dataclasses.fields(Options)
    x: dict[str, Any] = {y.name: arguments.get(y.name, y.default) for y in fields}
    x |= {name: check(name, x[name]) for name, check in CHECKS.items()}
    if not x["normalize"] and x["input_gate"] is InputGate.EXP:
        raise ValueError(
            "normalize is False with input_gate 'exp', expected input_gate=\"sigmoid\""
        )
    return Options(**x)


def spec_for(
    options: Options, q_dtype: Any, sizes: Mapping[str, int], *, has_initial_state: bool
) -> CallSpec:
    """The CallSpec; raises for a dtype and for symbolic sizes that the backend does not support."""
    backend = requested_backend(options.backend)
    validation.check_constant(sizes, backend)
    shape = [sizes[dim] for dim in ("B", "NH", "S", "DHQK", "DHV")]
    return make_spec(
        shape,
        validation.kernel_dtype(options.autocast_kernel_dtype, q_dtype, backend),
        target_gpu(),
        "xla" if 0 in shape else backend,  # a kernel has no empty grid
        options.normaliser,
        options.chunk_size,
        options.config,
        recompute_states_in_bw=options.recompute_states_in_bw,
        input_gate=options.input_gate,
        has_initial_state=has_initial_state,
        return_last_states=options.return_last_states,
        layout=options.layout,
    )


# (spec, inputs) and, where it is not None, num_segments
OfPadded = Callable[..., tuple[jax.Array, LastStates | None]]
_INITIAL = "c_initial", "n_initial", "m_initial"
_INTEGERS = "segment_ids", "sequence_lengths"


class Call(NamedTuple):
    """A call of a function of sequences, whose arguments are checked."""

    spec: CallSpec
    arrays: dict[str, Any]  # the arguments by name
    num_segments: int | None

    def run(self, function: OfPadded, **options: Any) -> jax.Array | tuple[jax.Array, States]:
        """The public function's results, from those that function has of the padded problem.

        options: others of ``inputs_of``. They and function are equal at equal calls, which are
        compiled once.
        """
        results: jax.Array | tuple[jax.Array, States] = mlstm_call(
            self.spec, self.arrays, function, num_segments=self.num_segments, **options
        )
        return results


# One program also where the caller does not jit: no array is transferred for it, and what is inf in
# it stays inside.
@functools.partial(
    jax.jit, static_argnums=(0, 2), static_argnames=("num_segments", "starts_of", "shard")
)
def mlstm_call(
    spec: CallSpec,
    arrays: dict[str, Any],
    function: OfPadded,
    *,
    num_segments: int | None,
    **options: Any,
) -> Any:
    q, DHQK, DHV = arrays["q"], arrays["q"].shape[-1], arrays["v"].shape[-1]
    inputs = inputs_of(spec, arrays, num_segments, **options)
    segments = {} if num_segments is None else dict(num_segments=num_segments)
    h, last = function(spec, inputs, **segments)
    h = h[..., :DHV].astype(q.dtype)
    if last is None or not spec.return_last_states:
        return h
    return h, (last.c[..., :DHQK, :DHV], last.n[..., :DHQK], last.m)


def prepare(arguments: Mapping[str, Any]) -> Call:
    """Checks the arguments of ``mlstm_chunkwise``, by name."""
    options = options_of(arguments)
    layout, num_segments = options.layout, options.num_segments
    sequences = {name: arguments[name] for name in "qkvif"}
    states = {name: arguments[name] for name in _INITIAL}
    integers = {name: x for name in _INTEGERS if (x := arguments.get(name)) is not None}
    segment_ids, sequence_lengths = map(integers.get, _INTEGERS)
    if num_segments is not None:
        num_segments = validation.check_num_segments(
            num_segments, segment_ids, options.return_last_states
        )
    sizes = validation.check_inputs(
        sequences | integers,
        states,
        options.input_gate,
        layout,
        num_segments=num_segments,
    )
    if options.autocast_kernel_dtype is None:
        validation.check_one_dtype(sequences)
    c_initial = states["c_initial"]
    spec = spec_for(options, sequences["q"].dtype, sizes, has_initial_state=c_initial is not None)
    if num_segments is not None:
        validation.check_segments_fit(num_segments, spec.backend)
    validation.check_layout_is_meant(arguments.get("layout"), sizes, c_initial, segment_ids)
    _log.debug("%s", spec)
    if isinstance(sequence_lengths, np.ndarray):  # jit would wrap 64 bits around
        integers["sequence_lengths"] = _as_int32(sequence_lengths)
    return Call(spec, sequences | states | integers, num_segments)


def inputs_of(
    spec: CallSpec,
    arrays: Mapping[str, Any],
    num_segments: int | None,
    starts_of: Callable[[jax.Array], jax.Array] = segment_starts,
    shard: Callable[[], Any] = int,
) -> Inputs:
    """The arrays of a ``Call``, cast and padded.

    Args:
      starts_of: segment_ids, (B, NH, S), to where segments begin.
      shard: the number of the shard of the sequence that has the S steps; sequence_lengths are
        those of all shards.
    """
    q, k, v, i, f = (arrays[name] for name in "qkvif")
    c_initial, n_initial, m_initial = (arrays[name] for name in _INITIAL)
    segment_ids, sequence_lengths = map(arrays.get, _INTEGERS)
    p, dtype, acc = spec.problem, spec.dtype, accumulator_dtype(spec.dtype)
    B, NH, S = p.B, p.NH, i.shape[2 if spec.layout is Layout.BNTH else 1]
    DHQK, DHV = q.shape[-1], v.shape[-1]
    segments = None
    if num_segments is not None and c_initial is not None:
        segments = _states_of_segments(c_initial, n_initial, m_initial, num_segments, p, acc)
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
        lengths = _lengths_of_shard(sequence_lengths, shard(), S)
        lengths = jnp.broadcast_to(lengths[:, None], (B, NH))
    x = Inputs(q, k, v, i, f, c_initial, n_initial, m_initial, lengths=lengths, segments=segments)
    x, ids = aligned(spec, (x, ids))
    (q, k, v, i, f, c_initial, n_initial, m_initial), lengths = x[:8], x.lengths
    if lengths is not None:  # as the padding does, these gates carry the states on
        within = steps_within(lengths, S)
        i = jnp.where(within, i.astype(acc), CARRIES_ON[0])
        f = jnp.where(within, f.astype(acc), CARRIES_ON[1])
    inputs = Inputs(
        pad(q, dtype, p.DHQK),
        pad(k, dtype, p.DHQK),
        pad(v, dtype, p.DHHV),
        pad(i, acc, p.S, value=CARRIES_ON[0]),
        pad(f, acc, p.S, value=CARRIES_ON[1]),
        pad(c_initial, acc, p.DHQK, p.DHHV),
        pad(n_initial, acc, p.DHQK),
        pad(m_initial, acc),
        lengths=lengths,
        segments=x.segments,
    )
    if ids is not None:
        starts = starts_of(ids).astype(jnp.int32)
        if num_segments is not None:
            # Not all dtypes have N: an id beyond it is N.
            most = min(num_segments, jnp.iinfo(ids.dtype).max)
            inputs = inputs._replace(segment_ids=jnp.minimum(ids, most).astype(jnp.int32))
        starts = starts if lengths is None else jnp.where(within, starts, 0)
        inputs = inputs._replace(starts=pad(starts, starts.dtype, p.S))
    return inputs


def _states_of_segments(c: Any, n: Any, m: Any, N: int, p: Problem, dtype: Any) -> SegmentStates:
    """The initial states of N segments; those of a row, (B, NH, ...), are the first segment's."""
    if m is None:
        m = jnp.zeros(n.shape[:-1], dtype)
    if c.ndim == 4:
        c, n, m = (
            jnp.pad(x[:, None], [(0, 0), (0, N - 1), *[(0, 0)] * (x.ndim - 1)]) for x in (c, n, m)
        )
    return SegmentStates(pad(c, dtype, p.DHQK, p.DHHV), pad(n, dtype, p.DHQK), pad(m, dtype))


def _lengths_of_shard(sequence_lengths: Any, shard: Any, S: int) -> jax.Array:
    """The steps of each batch entry in a shard of S steps, (B,) int32."""
    return jnp.clip(_as_int32(sequence_lengths) - shard * S, 0, S)


def _as_int32(lengths: Any) -> Any:
    """The lengths in int32; which cuts those beyond it off."""
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
