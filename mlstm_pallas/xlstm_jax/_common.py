"""The parts that the documented systems share: argument checks, gates, stages, both passes.

Notation: B batch, NH heads, S sequence length, DHQK head dimension of q and k, DHHV head dimension
of v and h, NC chunks of L steps.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas import dispatch
from mlstm_pallas import gates as gate_forms
from mlstm_pallas.annotations import Array
from mlstm_pallas.backend import on_backend, requested_backend
from mlstm_pallas.backward import backward as backward_schedule
from mlstm_pallas.backward import before_tiles, with_delta
from mlstm_pallas.call_spec import CallSpec, Cotangents, Inputs, LastStates, Residuals, StoredStates
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.dispatch import run
from mlstm_pallas.fwbw import not_differentiated
from mlstm_pallas.gates import ChunkGates, LocalGates
from mlstm_pallas.gpu import target_gpu
from mlstm_pallas.normaliser import Normaliser, at_least, query_scale
from mlstm_pallas.problem import MIN_CHUNK_SIZE, make_problem
from mlstm_pallas.sharding import aligned, over_shards
from mlstm_pallas.stage import Lowering, Weighted, check_field
from mlstm_pallas.stages.parallel_bw_dP import normaliser_gradients
from mlstm_pallas.validation import (
    INPUT_DTYPES,
    KERNEL_DTYPES,
    check_array,
    check_dtype_runs,
    check_flag,
    check_integer,
    check_output_dtype,
    check_scalar,
    check_shapes,
    check_states_complete,
)

# The dimensions of each array argument. States at chunk boundaries may include the last one.

Shapes = tuple[tuple[str, ...], ...]
STEPS: Shapes = (("B", "NH", "S"),)
CHUNKS: Shapes = (("B", "NH", "NC", "L"),)
QUERIES: Shapes = (("B", "NH", "S", "DHQK"),)
VALUES: Shapes = (("B", "NH", "S", "DHHV"),)
C_STATES: Shapes = (("B", "NH", "NC * DHQK", "DHHV"), ("B", "NH", "(NC + 1) * DHQK", "DHHV"))
N_STATES: Shapes = (("B", "NH", "NC * DHQK"), ("B", "NH", "(NC + 1) * DHQK"))
M_STATES: Shapes = (("B", "NH", "NC"), ("B", "NH", "(NC + 1)"))
SEQUENCES: dict[str, Shapes] = {
    "matQ": QUERIES,
    "matK": QUERIES,
    "matV": VALUES,
    "matDeltaH": VALUES,
}
CONTRACTS: dict[str, Shapes] = {
    **SEQUENCES,
    **dict.fromkeys(("vecI", "vecF", "vecA", "vecB"), CHUNKS),
    **dict.fromkeys(("vecN_out", "vecM_out", "vecM", "vecM_combine"), STEPS),
    **dict.fromkeys(("matC_initial", "matDeltaC_last"), (("B", "NH", "DHQK", "DHHV"),)),
    "vecN_initial": (("B", "NH", "DHQK"),),
    **dict.fromkeys(("scaM_initial", "scaMinter_initial"), (("B", "NH"),)),
    **dict.fromkeys(("matC_states", "matC_all", "matDeltaC_states"), C_STATES),
    **dict.fromkeys(("vecN_states", "vecN_all"), N_STATES),
    **dict.fromkeys(("scaM_states", "scaMinter_states", "scaM_inter", "scaM_all"), M_STATES),
}
# These, and initial states, may be None in every function that has them.
OPTIONAL = ("scaM_states", "vecM_out", "matDeltaC_last")
TILES = ("siz_b_LQ", "siz_b_LKV", "siz_b_DHQK", "siz_b_DHHV", "num_warps", "num_stages")
FLAGS = ("stabilize_correctly", "return_last_states", "return_all_states", "store_initial_state")

Arguments = Mapping[str, Any]  # of a documented function, by name


Function = TypeVar("Function", bound=Callable[..., Any])


def renamed(function: Function, name: str, module: str) -> Function:
    """A copy under another name, which error messages about its arguments then show."""
    original = cast(types.FunctionType, function)
    code = original.__code__.replace(co_name=name, co_qualname=name)
    copy = types.FunctionType(code, original.__globals__, name, original.__defaults__)
    copy.__doc__, copy.__annotations__, copy.__module__ = (
        original.__doc__,
        original.__annotations__,
        module,
    )
    return cast(Function, copy)


def check_statics(arguments: Arguments) -> dict[str, Any]:
    """Checks the arguments that are no arrays; returns them by lower-case name, a None left out."""
    for name in TILES:
        if arguments.get(name) is not None:
            check_field("", name, arguments[name])
    statics: dict[str, Any] = {}
    for name, x in arguments.items():
        key = name.lower()
        if key in ("eps", "norm_val") or (key == "qk_scale" and x is not None):
            statics[key] = check_scalar(name, x, signed=key == "qk_scale")
        elif key in FLAGS:
            statics[key] = check_flag(name, x)
        elif key == "output_dtype":
            statics[key] = check_output_dtype(name, x)
        elif key == "chunk_size":
            statics[key] = check_integer(name, x, MIN_CHUNK_SIZE, power_of_two=True)
        elif key == "num_chunks":
            statics[key] = check_integer(name, x, 1)
    return statics


def check_arguments(
    arguments: Arguments,
    chunk_size: int,
    num_chunks: int | None,
    contracts: Mapping[str, Shapes],
    optional: tuple[str, ...],
) -> dict[str, int]:
    """Checks the arrays; returns the sizes of the dimensions."""
    arrays = {name: x for name, x in arguments.items() if name in contracts}
    check_states_complete(
        {name: x for name, x in arrays.items() if name.endswith("_initial")}, "initial states"
    )
    for name, x in list(arrays.items()):
        if x is not None:
            check_array(
                name, x, INPUT_DTYPES, listed=KERNEL_DTYPES if name in SEQUENCES else INPUT_DTYPES
            )
        elif name in (*OPTIONAL, *optional) or name.endswith("_initial"):
            del arrays[name]
        else:
            raise ValueError(
                f"{name} is None, expected an array of shape ({', '.join(contracts[name][0])})"
            )
    sequences = {name: dims for name, (dims,) in SEQUENCES.items() if name in arrays}
    sizes = check_shapes({name: x for name, x in arrays.items() if name in sequences}, sequences)
    S, DHQK, NC = sizes["S"], sizes["DHQK"], sizes["S"] // chunk_size
    if S % chunk_size or num_chunks not in (None, NC):
        name, chunks = (
            next(iter(arrays)),
            "chunks" if num_chunks is None else f"{num_chunks} chunks",
        )
        raise ValueError(
            f"{name} has shape {tuple(arrays[name].shape)}, expected S = {S} to be {chunks} of "
            f"{chunk_size} steps"
        )
    sizes |= {
        "NC": NC,
        "(NC + 1)": NC + 1,
        "L": chunk_size,
        "NC * DHQK": NC * DHQK,
        "(NC + 1) * DHQK": (NC + 1) * DHQK,
    }
    for name, x in arrays.items():
        expected = {dims: tuple(sizes[dim] for dim in dims) for dims in contracts[name]}
        if tuple(x.shape) not in expected.values():
            text = " or ".join(f"({', '.join(dims)}) = {size}" for dims, size in expected.items())
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {text}")
    return sizes


def call_spec(
    arguments: Arguments,
    *,
    optional: tuple[str, ...] = (),
    constant_denominator: bool = False,
    stage: str | None = None,
    renamed: Mapping[str, str] | None = None,
    **shapes: Shapes,
) -> CallSpec:
    """Checks the arguments and makes the CallSpec.

    Args:
      optional: arrays that may be None, beside OPTIONAL.
      constant_denominator: the denominator is an argument, to which eps is added.
      stage: the stage whose tiles the arguments replace, unless they are None. What its kernel
        does not read is ignored.
      renamed: the arguments of tiles that have another name in the stage.
      shapes: of arguments, in place of those of CONTRACTS.
    """
    statics = check_statics(arguments)
    chunk_size = statics["chunk_size"]
    sizes = check_arguments(
        arguments, chunk_size, statics.get("num_chunks"), CONTRACTS | shapes, optional
    )
    backend, gpu = requested_backend(), target_gpu()
    B, NH, S, DHQK, DHHV = (sizes[dim] for dim in ("B", "NH", "S", "DHQK", "DHHV"))
    first = next(name for name in arguments if name in SEQUENCES)
    dtype = jnp.dtype(arguments[first].dtype)
    check_dtype_runs(first, dtype, KERNEL_DTYPES, backend)
    if B * NH == 0:
        backend = "xla"  # a kernel has no empty grid
    config = KernelConfig(fused=False)
    if (
        backend != "xla"
        and stage is not None
        and (tiles_class := dispatch.tiles_class(stage, "triton"))
    ):
        fields = (name for name in TILES if name in tiles_class.__dataclass_fields__)
        tiles = {name: arguments.get((renamed or {}).get(name, name)) for name in fields}
        tiles = {name: x for name, x in tiles.items() if x is not None}
        config = config.replace(**{f"triton_{stage}": tiles})
    problem = make_problem((B, NH, S, DHQK), DHHV, chunk_size, pad_heads=True)
    if "qk_scale" in statics:
        problem = dataclasses.replace(problem, qk_scale=statics["qk_scale"])
    floor = 0.0 if constant_denominator else statics.get("norm_val", 1.0)
    normaliser = Normaliser(
        statics.get("eps", 0.0), floor, statics.get("stabilize_correctly", True)
    )
    return CallSpec(
        problem,
        config,
        dtype,
        normaliser,
        gpu,
        recompute_states_in_bw=False,
        backend=backend,
        output_dtype=statics.get("output_dtype"),
    )


def accumulator(spec: CallSpec) -> jnp.dtype:
    return jnp.promote_types(spec.dtype, jnp.float32)


def initial_states(spec: CallSpec, k: Array, v: Array, *states: Array | None) -> list[jax.Array]:
    """C, n, m, zeros where None, in the accumulator's dtype."""
    (B, NH, _, DHQK), acc = k.shape, accumulator(spec)
    shapes = (B, NH, DHQK, v.shape[-1]), (B, NH, DHQK), (B, NH)
    return [
        jnp.zeros(shape, acc) if x is None else jnp.asarray(x, acc)
        for x, shape in zip(states, shapes, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=0)
def gates_of(
    spec: CallSpec,
    vecI: jax.Array,
    scaM: jax.Array,
    *,
    vecF: Any = None,
    log_f: Any = None,
    vecB: Any = None,
) -> ChunkGates:
    """The gates, with B and NH as two axes. vecI, vecF, log_f, vecB: (B, NH, S) or (B, NH, NC, L).

    Args:
      vecI: the input gate, or the m_t of every step. m_t - b_t equals its running maximum, so with
        m_t all but e and abar are right.
      scaM: the first stabiliser (B, NH), or those of the chunk boundaries, (B, NH, NC) or
        (B, NH, NC + 1).
      vecF, log_f, vecB: one of pre-activations, log sigmoid(f), and its running sums within each
        chunk, which are finite.
    """
    acc, NC, L = accumulator(spec), spec.problem.NC, spec.problem.L

    def chunks(x: jax.Array) -> jax.Array:
        return x.astype(acc).reshape(*x.shape[:2], NC, L)

    i, m = chunks(vecI), scaM.astype(acc)
    if vecF is not None:
        local = gate_forms.local_gates(i, chunks(vecF))
    elif log_f is not None:
        f = chunks(log_f)
        reset = f <= gate_forms.MASKED
        local = gate_forms.local_gates_of_logs(i, jnp.where(reset, 0.0, f), reset)
    else:
        zeros = jnp.zeros_like(i)
        b = chunks(vecB), zeros
        e = gate_forms.pair_add((i, zeros), (-b[0], -b[1]))
        local = LocalGates(b, e, lax.associative_scan(gate_forms.pair_max, e, axis=-1), zeros)
    if m.ndim == 2:
        m = gate_forms.stabiliser_scan(local, m)
    elif m.shape[-1] == NC:
        last_chunk = jax.tree.map(lambda x: x[:, :, -1:], local)
        m = jnp.concatenate(
            [m[..., :-1], gate_forms.stabiliser_scan(last_chunk, m[..., -1])], axis=-1
        )
    return gate_forms.join_chunks(local, m)


# The stages, on the arrays of a shard, (B * NH, ...). Inputs and outputs have unpadded head
# dimensions, and states have chunks and rows on one axis.


_not_differentiated = not_differentiated(
    "stages_not_differentiated",
    "the documented stages and passes have no derivatives; use those of "
    "mlstm_pallas.mlstm_chunkwise or of _mlstm_chunkwise_fwbw_generator",
)


@functools.cache
def on_shards(stage: Callable[..., Any], **statics: Any) -> Callable[..., Any]:
    """stage(spec, lowering, *arrays, **statics) jitted, as a function of spec and arrays.

    The arrays of the stage are (B * NH, ...), those of the function (B, NH, ...).
    """

    @functools.wraps(stage)
    def on_shard(spec: CallSpec, *args: Any) -> Any:
        return on_backend(spec.backend, functools.partial(stage, spec, **statics), *args)

    @functools.partial(jax.jit, static_argnums=0)
    def of_arrays(spec: CallSpec, *args: Any) -> Any:
        return over_shards(on_shard, spec, *_not_differentiated(aligned(spec, args)))

    return of_arrays


def _padded(x: Any, dtype: Any, *sizes: int) -> Any:
    """x in dtype, its last axes zero-padded to the sizes; None stays."""
    if x is None:
        return None
    widths = [(0, 0)] * (x.ndim - len(sizes)) + [
        (0, size - old) for size, old in zip(sizes, x.shape[-len(sizes) :], strict=True)
    ]
    return jnp.pad(x.astype(dtype), widths)


def _blocks(x: jax.Array, rows: int) -> jax.Array:
    """(B * NH, n * rows, ...) to (B * NH, n, rows, ...)."""
    return x.reshape(x.shape[0], x.shape[1] // rows, rows, *x.shape[2:])


def _joined(x: jax.Array) -> jax.Array:
    """(B * NH, n, rows, ...) to (B * NH, n * rows, ...)."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def states(
    spec: CallSpec,
    lowering: Lowering,
    k: jax.Array,
    v: jax.Array,
    gates: ChunkGates,
    C: jax.Array,
    n: jax.Array,
) -> tuple[Any, ...]:
    """C in the kernel dtype, n and m at the chunk boundaries; then the last C and n, float32."""
    p, DHQK, DHHV = spec.problem, k.shape[-1], v.shape[-1]
    k, v = _padded(k, spec.dtype, p.DHQK), _padded(v, spec.dtype, p.DHHV)
    C, n = _padded(C, C.dtype, p.DHQK, p.DHHV), _padded(n, n.dtype, p.DHQK)
    abar, call = gates.per_step().vecAbar, spec.launch("recurrent_fw_C", lowering)
    C, C_last, n, n_last = run("recurrent_fw_C", k, v, abar, gates.scaGamma, C, n, call=call)
    C, C_last = (x[..., :DHQK, :DHHV] for x in (C, C_last))
    n, n_last = (x[..., :DHQK] for x in (n, n_last))
    C = jnp.concatenate([C, C_last[:, None].astype(C.dtype)], axis=1)
    n = jnp.concatenate([n, n_last[:, None]], axis=1)
    return _joined(C), _joined(n), gates.scaM_states, C_last, n_last


def outputs(
    spec: CallSpec,
    lowering: Lowering,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: ChunkGates,
    C: jax.Array,
    n: jax.Array,
) -> tuple[Any, ...]:
    """H in the output dtype and its denominator without eps.

    C and n are those before each chunk.
    """
    p, m, DHQK, DHHV = spec.problem, gates.per_step().vecM, q.shape[-1], v.shape[-1]
    q, k = (_padded(x, spec.dtype, p.DHQK) for x in (q, k))
    v = _padded(v, spec.dtype, p.DHHV)
    C = _padded(_blocks(C, DHQK)[:, : p.NC], spec.dtype, p.DHQK, p.DHHV)
    n = _padded(_blocks(n, DHQK)[:, : p.NC], m.dtype, p.DHQK)
    normaliser: Any = spec.normaliser
    H, z = run(
        "parallel_fw_H",
        *(q, k, v, gates, C, n),
        normaliser=normaliser,
        output_dtype=spec.output_dtype,
        call=spec.launch("parallel_fw_H", lowering),
    )
    return H[..., :DHHV], at_least(jnp.abs(z), normaliser.floor(m))


def state_gradients(
    spec: CallSpec,
    lowering: Lowering,
    q: jax.Array,
    dh: jax.Array,
    gates: ChunkGates,
    vecN_out: jax.Array,
    dC_last: jax.Array,
) -> tuple[Any, ...]:
    """The gradients of C after each chunk, in the kernel dtype, and of the first C, float32."""
    p, DHQK, DHHV = spec.problem, q.shape[-1], dh.shape[-1]
    z = vecN_out.astype(accumulator(spec))
    of_normaliser = normaliser_gradients(spec.normaliser, dh, None, z, gates)
    r = query_scale(gates.per_step().vecW, p.qk_scale, of_normaliser.vecInvDen)
    q, dh = _padded(q * r[..., None], spec.dtype, p.DHQK), _padded(dh, spec.dtype, p.DHHV)
    dC_last = _padded(dC_last, r.dtype, p.DHQK, p.DHHV)
    dC, dC_first, *_ = run(
        "recurrent_bw_dC",
        *(Weighted(q, None), dh, gates.scaGamma, dC_last),
        call=spec.launch("recurrent_bw_dC", lowering),
    )
    return _joined(dC[..., :DHQK, :DHHV]), dC_first[..., :DHQK, :DHHV]


def input_gradients(
    spec: CallSpec,
    lowering: Lowering,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dh: jax.Array,
    gates: ChunkGates,
    vecN_out: jax.Array,
    C: jax.Array,
    dC: jax.Array,
) -> tuple[Any, ...]:
    """dQ, dK and dV in the kernel dtype, from C before and the gradients of C after each chunk."""
    p, DHQK, DHHV = spec.problem, q.shape[-1], v.shape[-1]
    q, k = _padded(q, spec.dtype, p.DHQK), _padded(k, spec.dtype, p.DHQK)
    v, dh = _padded(v, spec.dtype, p.DHHV), _padded(dh, spec.dtype, p.DHHV)
    C, dC = (_padded(_blocks(x, DHQK), spec.dtype, p.DHQK, p.DHHV) for x in (C, dC))
    # dz is 0, so n does not matter, and its gradient is 0.
    n = jnp.zeros((p.BNH, p.NC, p.DHQK), gates.vecW.dtype)
    operands, z = (q, k, v, dh, gates), vecN_out.astype(accumulator(spec))
    call = spec.launch("parallel_bw_dQKV", lowering)
    if spec.recomputes_scores(lowering):
        tiles = before_tiles(spec, q, k, gates, z)
        of_sums = spec.launch("step_sums", call.lowering)
        tiles = with_delta(spec, tiles, q, gates, z, None, of_sums)
    else:
        tiles = run(
            "parallel_bw_dP",
            *(*operands, None, z),
            normaliser=spec.normaliser,
            return_keys=False,
            call=spec.launch("parallel_bw_dP", lowering),
        )
    dq, dk, dv, *_ = run(
        "parallel_bw_dQKV",
        *(*operands, tiles.normaliser_gradients, tiles, C[:, : p.NC], n, dC[:, -p.NC :], n),
        call=call,
    )
    return dq[..., :DHQK], dk[..., :DHQK], dv[..., :DHHV]


# The passes: vecI, vecF are pre-activations (B, NH, S), infinite ones included.

_INPUTS = ("matQ", "matK", "matV", "vecI", "vecF")
_INITIAL = ("matC_initial", "vecN_initial", "scaM_initial")


def forward(arguments: Arguments) -> tuple[Any, ...]:
    """H, its denominator without eps, every m, the last m; then states as the arguments ask.

    These are the last (C, n, m), with return_last_states, and those at all chunk boundaries, with
    return_all_states.
    """
    spec = call_spec(arguments, vecI=STEPS, vecF=STEPS)
    inputs = [arguments[name] for name in _INPUTS]
    initial = initial_states(spec, *inputs[1:3], *(arguments[name] for name in _INITIAL))
    on_shard = on_shards(_forward_on_shard)
    H, vecN, vecM, (C, n, m, C_last, n_last) = on_shard(spec, *inputs, *initial)
    last = C_last, n_last, m[..., -1]
    by_flag = dict(return_last_states=last, return_all_states=(C, n, m))
    return H, vecN, vecM, last[2], *(x for flag, x in by_flag.items() if arguments[flag])


def _forward_on_shard(
    spec: CallSpec,
    lowering: Lowering,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    i: jax.Array,
    f: jax.Array,
    C: jax.Array,
    n: jax.Array,
    m: jax.Array,
) -> tuple[Any, ...]:
    i, f = i.astype(m.dtype), f.astype(m.dtype)
    gates = run("chunk_gates", i, f, m, call=spec.launch("chunk_gates", lowering))
    all_states = states(spec, lowering, k, v, gates, C, n)
    H, N = outputs(spec, lowering, q, k, v, gates, *all_states[:2])
    return H, N, gates.per_step().vecM, all_states


def backward(arguments: Arguments, C: Array | None) -> tuple[jax.Array, ...]:
    """The gradients of q, k, v, i, f and, if there are any, of the initial states.

    C: the states before each chunk; None: recomputed.
    """
    spec = call_spec(
        arguments,
        optional=("matC_states", "matC_all"),
        constant_denominator=True,
        vecI=STEPS,
        vecF=STEPS,
    )
    inputs = [arguments[name] for name in (*_INPUTS, *_INITIAL)]
    spec = dataclasses.replace(
        spec,
        has_initial_state=inputs[5] is not None,
        return_last_states=False,
        recompute_states_in_bw=C is None,
    )
    initial = initial_states(spec, *inputs[1:3], *inputs[5:])
    others = C, *(arguments[name] for name in ("vecN_out", "matDeltaH", "matDeltaC_last"))
    gradients = on_shards(_backward_on_shard)(spec, *inputs[:5], *initial, *others)
    return tuple(
        dx.astype(x.dtype) for dx, x in zip(gradients, inputs, strict=True) if x is not None
    )


def _backward_on_shard(
    spec: CallSpec,
    lowering: Lowering,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    i: jax.Array,
    f: jax.Array,
    C_initial: jax.Array,
    n_initial: jax.Array,
    m_initial: jax.Array,
    C: jax.Array,
    vecN_out: jax.Array,
    dh: jax.Array,
    dC_last: jax.Array,
) -> tuple[Any, ...]:
    """The exact backward pass with a constant denominator, vecN_out + eps."""
    p, acc, DHQK, DHHV = spec.problem, accumulator(spec), q.shape[-1], v.shape[-1]
    q, k = (_padded(x, spec.dtype, p.DHQK) for x in (q, k))
    v = _padded(v, spec.dtype, p.DHHV)
    C_initial, n_initial = _padded(C_initial, acc, p.DHQK, p.DHHV), _padded(n_initial, acc, p.DHQK)
    x = Inputs(q, k, v, i.astype(acc), f.astype(acc), C_initial, n_initial, m_initial)
    no_n = jnp.zeros_like(n_initial)
    if C is not None:
        C = _padded(_blocks(C, DHQK)[:, : p.NC], spec.dtype, p.DHQK, p.DHHV)
    # dz is 0, so n does not matter.
    stored = StoredStates(C, jnp.zeros((*no_n.shape[:-1], p.NC, p.DHQK), acc), None, None, no_n)
    last = LastStates(_padded(dC_last, acc, p.DHQK, p.DHHV), no_n, None)
    residuals = Residuals(x, None, vecN_out.astype(acc), stored)
    dx = backward_schedule(
        spec, lowering, residuals, Cotangents(_padded(dh, spec.dtype, p.DHHV), last)
    )
    dC, dn = dx.c_initial[..., :DHQK, :DHHV], dx.n_initial[..., :DHQK]
    return dx.q[..., :DHQK], dx.k[..., :DHQK], dx.v[..., :DHHV], dx.i, dx.f, dC, dn, dx.m_initial
