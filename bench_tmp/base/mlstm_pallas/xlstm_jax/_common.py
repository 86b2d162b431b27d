"""The parts that the documented systems share: argument checks, gates, stages, both passes.

Notation: B batch, NH heads, S sequence length, DHQK head dimension of q and k, DHHV head dimension
of v and h, NC chunks of L steps.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas import gates
from mlstm_pallas.annotations import States
from mlstm_pallas.arrays import Cotangents, Inputs, LastStates, Residuals, StoredStates
from mlstm_pallas.backend import requested_backend
from mlstm_pallas.backward import backward as backward_schedule
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.dispatch import lowerings, run, tiles_class
from mlstm_pallas.entry import CHECKS, options_of, pad, spec_for, zeros_of
from mlstm_pallas.fwbw import operation
from mlstm_pallas.gates import ChunkGates, LocalGates
from mlstm_pallas.normaliser import Normaliser, at_least, normaliser_gradients, query_scale
from mlstm_pallas.planning import CallSpec
from mlstm_pallas.problem import MIN_CHUNK_SIZE, InputGate, accumulator_dtype
from mlstm_pallas.sharding import aligned
from mlstm_pallas.stage import FIELDS, Lowering, ScaledRows
from mlstm_pallas.stages.parallel_bw_dP import ScoreGradients
from mlstm_pallas.validation import (
    INPUT_DTYPES,
    KERNEL_DTYPES,
    Function,
    check_array,
    check_dtype,
    check_flag,
    check_integer,
    check_scalar,
    check_shapes,
    check_states_complete,
)

# The dimensions of each array. States at chunk boundaries may include the last one.

Shapes = tuple[tuple[str, ...], ...]
STEPS: Shapes = (("B", "NH", "S"),)
CHUNKS: Shapes = (("B", "NH", "NC", "L"),)
QUERIES: Shapes = (("B", "NH", "S", "DHQK"),)
VALUES: Shapes = (("B", "NH", "S", "DHHV"),)
C_STATES: Shapes = (("B", "NH", "NC * DHQK", "DHHV"), ("B", "NH", "(NC + 1) * DHQK", "DHHV"))
N_STATES: Shapes = (("B", "NH", "NC * DHQK"), ("B", "NH", "(NC + 1) * DHQK"))
M_STATES: Shapes = (("B", "NH", "NC"), ("B", "NH", "(NC + 1)"))
SEQUENCES = {"matQ": QUERIES, "matK": QUERIES, "matV": VALUES, "matDeltaH": VALUES}
# Of arguments and results.
CONTRACTS: dict[str, Shapes] = {
    **SEQUENCES,
    **dict.fromkeys(("matDeltaQ", "matDeltaK"), QUERIES),
    **dict.fromkeys(("matH", "matDeltaV"), VALUES),
    **dict.fromkeys(("vecI", "vecF", "vecA", "vecB"), CHUNKS),
    **dict.fromkeys(("vecN_out", "vecM_out", "vecM", "vecM_combine"), STEPS),
    **dict.fromkeys(
        ("matC_initial", "matC_last", "matDeltaC_initial", "matDeltaC_last"),
        (("B", "NH", "DHQK", "DHHV"),),
    ),
    **dict.fromkeys(("vecN_initial", "vecN_last", "vecDeltaN_initial"), (("B", "NH", "DHQK"),)),
    **dict.fromkeys(("scaM_initial", "scaMinter_initial"), (("B", "NH"),)),
    **dict.fromkeys(("matC_states", "matC_all", "matDeltaC_states"), C_STATES),
    **dict.fromkeys(("vecN_states", "vecN_all"), N_STATES),
    **dict.fromkeys(("scaM_states", "scaMinter_states", "scaM_inter", "scaM_all"), M_STATES),
}
# What replaces those of the gates where they are pre-activations.
PREACTIVATIONS = {"vecI": STEPS, "vecF": STEPS}
# These, and initial states, may be None in every function that has them.
OPTIONAL = ("scaM_states", "vecM_out", "matDeltaC_last")

Arguments = Mapping[str, Any]  # of a documented function, by name
Arrays = dict[str, Any]


def renamed(function: Function, name: str, module: str) -> Function:
    """A copy under another name, which error messages about its arguments then show."""
    original = cast(FunctionType, function)
    code = original.__code__.replace(co_name=name, co_qualname=name)
    copy = FunctionType(
        code, original.__globals__, name, original.__defaults__, original.__closure__
    )
    copy.__doc__, copy.__annotations__ = original.__doc__, original.__annotations__
    copy.__module__ = module
    return cast(Function, copy)


def check_output_dtype(name: str, x: Any) -> jnp.dtype:
    dtype = check_dtype(name, x, INPUT_DTYPES)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(
            f"{name} is {dtype.name}, which needs jax_enable_x64, expected one of "
            f"{', '.join(INPUT_DTYPES[:-1])}"
        )
    return dtype


# Each checks an argument that is no array, under the name that it has in a function.
STATICS: dict[str, Callable[[str, Any], Any]] = {
    **CHECKS,
    **FIELDS,
    **dict.fromkeys(("return_all_states", "store_initial_state"), check_flag),
    "qk_scale": functools.partial(check_scalar, signed=True),
    "output_dtype": check_output_dtype,
    "chunk_size": functools.partial(check_integer, least=MIN_CHUNK_SIZE, power_of_two=True),
    "num_chunks": functools.partial(check_integer, least=1),
}


def check_statics(arguments: Arguments) -> dict[str, Any]:
    """Checks the arguments that are no arrays; returns them by lower-case name, a None left out."""
    checked = {}
    for name, x in arguments.items():
        key = name.lower() if name.isupper() else name
        if key in STATICS and not (x is None and key in ("qk_scale", *FIELDS)):
            checked[key] = STATICS[key](name, x)
    return checked


def check_arguments(
    arguments: Arguments,
    chunk_size: int,
    num_chunks: int | None,
    contracts: Mapping[str, Shapes],
    optional: tuple[str, ...],
) -> dict[str, int]:
    """Checks the arrays; returns the sizes of the dimensions."""
    arrays = {name: x for name, x in arguments.items() if name in contracts}
    initial = {name: x for name, x in arrays.items() if name.endswith("_initial")}
    check_states_complete(initial)
    for name, x in list(arrays.items()):
        if x is not None:
            listed = KERNEL_DTYPES if name in SEQUENCES else INPUT_DTYPES
            check_array(name, x, listed, cast_from=INPUT_DTYPES)
        elif name in (*OPTIONAL, *optional, *initial):
            del arrays[name]
        else:
            raise ValueError(
                f"{name} is None, expected an array of shape ({', '.join(contracts[name][0])})"
            )
    sizes = check_shapes({name: x for name, x in arrays.items() if name in SEQUENCES}, SEQUENCES)
    S, DHQK, NC = sizes["S"], sizes["DHQK"], sizes["S"] // chunk_size
    if S % chunk_size or num_chunks not in (None, NC):
        name, count = next(iter(arrays)), "" if num_chunks is None else f"{num_chunks} "
        raise ValueError(
            f"{name} has shape {tuple(arrays[name].shape)}, expected S = {S} to be {count}chunks "
            f"of {chunk_size} steps"
        )
    sizes |= {"NC": NC, "(NC + 1)": NC + 1, "L": chunk_size}
    sizes |= {f"{n} * DHQK": sizes[n] * DHQK for n in ("NC", "(NC + 1)")}
    return check_shapes(arrays, contracts, sizes)


def call_spec(
    arguments: Arguments,
    *,
    optional: tuple[str, ...] = (),
    tiles_of: str | None = None,
    tile_arguments: Mapping[str, str] = MappingProxyType({}),
    shapes: Mapping[str, Shapes] = MappingProxyType({}),
) -> CallSpec:
    """Checks the arguments and makes the CallSpec.

    Args:
      optional: arrays that may be None, beside OPTIONAL.
      tiles_of: the stage whose Triton kernel has the arguments as tiles, unless they are None.
        What the kernel does not read is ignored.
      tile_arguments: the arguments whose tiles have another name in the kernel, by that name.
      shapes: shapes of arguments that replace those in CONTRACTS.
    """
    statics = check_statics(arguments)
    sizes = check_arguments(
        arguments,
        statics["chunk_size"],
        statics.get("num_chunks"),
        {**CONTRACTS, **shapes},
        optional,
    )
    sizes["DHV"] = sizes["DHHV"]
    backend = requested_backend()
    first = next(name for name in arguments if name in SEQUENCES)
    check_array(first, arguments[first], KERNEL_DTYPES, backend)
    overrides: dict[str, Any] = {}
    if backend != "xla" and tiles_of and (kernel := tiles_class(tiles_of, "triton")):
        fields = kernel.__dataclass_fields__
        names = {field: tile_arguments.get(field, field) for field in fields}
        overrides[f"triton_{tiles_of}"] = {
            field: statics[name] for field, name in names.items() if name in statics
        }
    options = {"eps": 0.0, **statics, "config": KernelConfig(fused=False, **overrides)}
    options |= dict(return_last_states=True, recompute_states_in_bw=False)
    if "vecN_out" in arguments:  # the denominator, to which eps is added, is a constant
        options["norm_val"] = 0.0
    dtype = arguments[first].dtype
    spec = spec_for(options_of(options), dtype, sizes, has_initial_state=True)
    if "qk_scale" in statics:
        problem = dataclasses.replace(spec.problem, qk_scale=statics["qk_scale"])
        spec = dataclasses.replace(spec, problem=problem)
    return spec


# The stages. They read the arrays of a shard, (B * NH, ...), from a dict. In all systems the states
# are called matC_states, vecN_states and scaM_states there, and the initial m scaM_initial.

_STATES = {"_all": "_states", "_inter": "_states", "scaMinter": "scaM"}
_INITIAL = "matC_initial", "vecN_initial", "scaM_initial"
_NO_DERIVATIVE = (
    "the documented stages and passes have no derivatives; use those of "
    "mlstm_pallas.mlstm_chunkwise or of _mlstm_chunkwise_fwbw_generator"
)


def _head_dims(name: str) -> list[str]:
    """The head dimensions among the axes of an array, which are the last ones."""
    (dims, *_) = CONTRACTS.get(name, ((),))
    return [dim[-4:] for dim in dims if dim[-4:] in ("DHQK", "DHHV")]


def _on_shard(
    spec: CallSpec, lowering: Lowering, x: Arrays, *, stage: Callable[..., Arrays], **statics: Any
) -> Arrays:
    """stage(spec, lowering, x, **statics) with arrays as the documents have them.

    In the stage heads are padded, and chunks and rows of states are two axes. q, k, v, dh and
    stored C and dC have the kernel dtype, all other arrays the dtype of the accumulator.
    """
    p, acc = spec.problem, accumulator_dtype(spec.dtype)
    DHQK = next(x[name] for name in ("matQ", "matK") if name in x).shape[-1]
    DHHV = next(x[name] for name in ("matV", "matDeltaH") if name in x).shape[-1]
    heads = dict(DHQK=DHQK, DHHV=DHHV)

    def has_rows(name: str) -> bool:
        return name.endswith("_states") and name != "scaM_states"

    def padded(name: str, y: jax.Array) -> jax.Array:
        in_kernel_dtype = name in SEQUENCES or CONTRACTS[name] is C_STATES
        if has_rows(name):
            y = y.reshape(p.BNH, -1, DHQK, *y.shape[2:])
        sizes = (getattr(p, dim) for dim in _head_dims(name))
        return pad(y, spec.dtype if in_kernel_dtype else acc, *sizes)

    def documented(name: str, y: jax.Array) -> jax.Array:
        y = y[(..., *(slice(heads[dim]) for dim in _head_dims(name)))]
        return y.reshape(y.shape[0], -1, *y.shape[3:]) if has_rows(name) else y

    results = stage(spec, lowering, {name: padded(name, y) for name, y in x.items()}, **statics)
    return {name: documented(name, y) for name, y in results.items()}


def run_stage(
    stage: Callable[..., Arrays],
    arguments: Arguments,
    spec: CallSpec | None = None,
    **statics: Any,
) -> Arrays:
    """The results of a stage by name. Initial states that are None are zeros.

    Args:
      spec: None: ``call_spec(arguments)``.
      statics: keywords of the stage.
    """
    spec = spec or call_spec(arguments)
    x = {name: y for name, y in arguments.items() if name in CONTRACTS}
    for old, new in _STATES.items():
        x = {name.replace(old, new): y for name, y in x.items()}
    if _INITIAL[0] in x and x[_INITIAL[0]] is None:
        (*heads, _, DHQK), DHHV = x["matK"].shape, x["matV"].shape[-1]
        acc = accumulator_dtype(spec.dtype)
        shapes = (DHQK, DHHV), (DHQK,), ()
        x |= {n: zeros_of((*heads, *s), acc) for n, s in zip(_INITIAL, shapes, strict=True)}
    x = {name: jnp.asarray(y) for name, y in x.items() if y is not None}
    results: Arrays = _run_stage(spec, x, stage=stage, **statics)
    return results


@functools.partial(jax.jit, static_argnums=0, static_argnames=("stage", "output_dtype"))
def _run_stage(spec: CallSpec, x: Arrays, **statics: Any) -> Any:
    return operation(_on_shard, spec, aligned(spec, x), message=_NO_DERIVATIVE, **statics)


def gates_of(spec: CallSpec, x: Arrays) -> ChunkGates:
    """The gates, if a pass has them already, otherwise from vecI, vecF or vecB, and m.

    vecI may be the m_t of every step. m_t - b_t equals its running maximum, so with m_t all but e
    and abar are right. vecF is pre-activations (B * NH, S) or log sigmoid(f) (B * NH, NC, L). vecB
    is its running sums within each chunk, which are finite. m is the first one (B * NH,), or those
    of the chunk boundaries, (B * NH, NC) or (B * NH, NC + 1).
    """
    if "gates" in x:
        return cast(ChunkGates, x["gates"])
    chunks = spec.problem.BNH, spec.problem.NC, spec.problem.L
    i = x["vecI" if "vecI" in x else "vecM"].reshape(chunks)
    m = x["scaM_states" if "scaM_states" in x else "scaM_initial"]
    if "vecB" in x:
        zeros = jnp.zeros_like(i)
        b = x["vecB"], zeros
        e = gates.add_two_floats((i, zeros), (-b[0], -b[1]))
        local = LocalGates(b, e, lax.associative_scan(gates.max_two_floats, e, axis=-1), zeros)
    elif x["vecF"].ndim == 2:
        logs = gates.log_gates(i, x["vecF"].reshape(chunks), InputGate.EXP)
        local = gates.local_gates(*logs)
    else:
        reset = x["vecF"] <= gates.MASKED
        local = gates.local_gates(i, jnp.where(reset, 0.0, x["vecF"]), reset)
    if m.ndim == 1:
        m = gates.stabiliser_scan(local, m)
    elif m.shape[-1] == chunks[1]:
        last_chunk = jax.tree.map(lambda y: y[:, -1:], local)
        m = jnp.concatenate([m[:, :-1], gates.stabiliser_scan(last_chunk, m[:, -1])], axis=-1)
    return gates.join_chunks(local, m)


def states(spec: CallSpec, lowering: Lowering, x: Arrays) -> Arrays:
    """The states at the chunk boundaries, C in the kernel dtype; the last C and n in float32."""
    g = gates_of(spec, x)
    C, C_last, n, n_last = run(
        "recurrent_fw_C",
        matK=x["matK"],
        matV=x["matV"],
        vecAbar=g.per_step().vecAbar,
        scaGamma=g.scaGamma,
        matC_initial=x["matC_initial"],
        vecN_initial=x["vecN_initial"],
        call=spec.launch("recurrent_fw_C", lowering),
    )
    return dict(
        matC_states=jnp.concatenate([C, C_last[:, None].astype(C.dtype)], axis=1),
        vecN_states=jnp.concatenate([n, n_last[:, None]], axis=1),
        scaM_states=g.scaM_states,
        matC_last=C_last,
        vecN_last=n_last,
        scaM_last=g.scaM_states[:, -1],
    )


def boundary_states(arguments: Arguments, spec: CallSpec | None = None) -> States:
    """C, n and m at the chunk boundaries."""
    x = run_stage(states, arguments, spec)
    return x["matC_states"], x["vecN_states"], x["scaM_states"]


def outputs(spec: CallSpec, lowering: Lowering, x: Arrays, output_dtype: Any = None) -> Arrays:
    """H in the output dtype, None: the kernel's; its denominator without eps; m of every step."""
    g, NC = gates_of(spec, x), spec.problem.NC
    normaliser = cast(Normaliser, spec.normaliser)  # the documented stages always have one
    options = {}
    if output_dtype is not None and jnp.dtype(output_dtype) != spec.dtype:
        options = {"output_dtype": output_dtype}
        if lowering.folder == "mosaic_gpu":  # whose kernel writes H in its own dtype alone
            lowering = lowerings(lowering)[1]
    H, z = run(
        "parallel_fw_H",
        matQ=x["matQ"],
        matK=x["matK"],
        matV=x["matV"],
        gates=g,
        matC_states=x["matC_states"][:, :NC],
        vecN_states=x["vecN_states"][:, :NC],
        normaliser=normaliser,
        **options,
        call=spec.launch("parallel_fw_H", lowering),
    )
    m = g.per_step().vecM
    return dict(matH=H, vecN_out=at_least(jnp.abs(z), normaliser.floor(m)), vecM_out=m)


def state_gradients(spec: CallSpec, lowering: Lowering, x: Arrays) -> Arrays:
    """The gradients of C after each chunk, in the kernel dtype, and of the first C, float32."""
    g = gates_of(spec, x)
    rows = g.per_step()
    gradients = normaliser_gradients(spec.normaliser, None, x["vecN_out"], rows.vecM)
    r = query_scale(rows.vecW, spec.problem.qk_scale, gradients.vecInvDen)
    dC, dC_initial, *_ = run(
        "recurrent_bw_dC",
        queries=ScaledRows(x["matQ"], r),
        matDeltaH=x["matDeltaH"],
        scaGamma=g.scaGamma,
        matDeltaC_last=x.get("matDeltaC_last"),
        keys=None,
        matV=None,
        matC_initial=None,
        call=spec.launch("recurrent_bw_dC", lowering),
    )
    return dict(matDeltaC_states=dC, matDeltaC_initial=dC_initial)


def boundary_gradients(arguments: Arguments, spec: CallSpec | None = None) -> jax.Array:
    """The gradients of C at the chunk boundaries, in the kernel dtype."""
    x = run_stage(state_gradients, arguments, spec)
    dC: jax.Array = x["matDeltaC_states"]
    return jnp.concatenate([x["matDeltaC_initial"].astype(dC.dtype), dC], axis=2)


def input_gradients(spec: CallSpec, lowering: Lowering, x: Arrays) -> Arrays:
    """dQ, dK and dV in the kernel dtype, from C before and the gradients of C after each chunk."""
    p, g = spec.problem, gates_of(spec, x)
    operands = {name: x[name] for name in ("matQ", "matK", "matV", "matDeltaH")} | dict(gates=g)
    if spec.recomputes_scores(lowering):
        tiles = ScoreGradients()
    else:
        tiles = run(
            "parallel_bw_dP",
            **operands,
            matH=None,
            vecZ=x["vecN_out"],
            normaliser=spec.normaliser,
            return_keys=False,
            call=spec.launch("parallel_bw_dP", lowering),
        )
    # dz is 0, so n does not matter, and its gradient is 0.
    n = jnp.zeros((p.BNH, p.NC, p.DHQK), g.vecW.dtype)
    C, dC = x["matC_states"][:, : p.NC], x["matDeltaC_states"][:, -p.NC :]
    dq, dk, dv, *_ = run(
        "parallel_bw_dQKV",
        **operands,
        normaliser_gradients=normaliser_gradients(
            spec.normaliser, None, x["vecN_out"], g.per_step().vecM
        ),
        scores=tiles,
        matC_states=C,
        vecN_states=n,
        matDeltaC_states=dC,
        vecDeltaN_states=n,
        call=spec.launch("parallel_bw_dQKV", lowering),
    )
    return dict(matDeltaQ=dq, matDeltaK=dk, matDeltaV=dv)


# The passes: vecI, vecF are pre-activations (B, NH, S), infinite ones included.

_INPUTS = ("matQ", "matK", "matV", "vecI", "vecF", *_INITIAL)
_GRADIENTS = tuple(f"{name[:3]}Delta{name[3:]}" for name in _INPUTS)


def forward(arguments: Arguments) -> tuple[Any, ...]:
    """H, its denominator without eps, every m, the last m; then states as the arguments ask.

    These are the last (C, n, m), with return_last_states, and those at all chunk boundaries, with
    return_all_states.
    """
    spec = call_spec(arguments, shapes=PREACTIVATIONS)
    x = run_stage(_forward, arguments, spec, output_dtype=arguments.get("output_dtype"))
    asked = (
        tuple(x[f"{name}_{suffix}"] for name in ("matC", "vecN", "scaM"))
        for flag, suffix in (("return_last_states", "last"), ("return_all_states", "states"))
        if arguments[flag]
    )
    return x["matH"], x["vecN_out"], x["vecM_out"], x["scaM_last"], *asked


def _forward(spec: CallSpec, lowering: Lowering, x: Arrays, output_dtype: Any = None) -> Arrays:
    gates = run(
        "chunk_gates",
        **{name: x[name] for name in ("vecI", "vecF", "scaM_initial")},
        call=spec.launch("chunk_gates", lowering),
    )
    x = x | dict(gates=gates)
    results = states(spec, lowering, x)
    return results | outputs(spec, lowering, x | results, output_dtype)


def backward(arguments: Arguments) -> tuple[jax.Array, ...]:
    """The gradients of q, k, v, i, f and, if there are any, of the initial states.

    The states before each chunk are recomputed where they are None.
    """
    spec = call_spec(
        arguments,
        optional=("matC_states", "matC_all"),
        shapes=PREACTIVATIONS,
    )
    C = arguments.get("matC_states", arguments.get("matC_all"))
    spec = dataclasses.replace(
        spec,
        has_initial_state=arguments["matC_initial"] is not None,
        return_last_states=False,
        recompute_states_in_bw=C is None,
    )
    gradients, inputs = run_stage(_backward, arguments, spec), map(arguments.get, _INPUTS)
    return tuple(
        gradients[name].astype(x.dtype)
        for name, x in zip(_GRADIENTS, inputs, strict=True)
        if x is not None
    )


def _backward(spec: CallSpec, lowering: Lowering, x: Arrays) -> Arrays:
    """The exact backward pass with a constant denominator, vecN_out + eps."""
    p, n = spec.problem, x["vecN_initial"]
    C = x["matC_states"][:, : p.NC] if "matC_states" in x else None
    # dz is 0, so n does not matter.
    no_n = jnp.zeros_like(n)
    stored = StoredStates(C, jnp.zeros((p.BNH, p.NC, p.DHQK), n.dtype), None, None, no_n)
    residuals = Residuals(Inputs(*(x[name] for name in _INPUTS)), None, x["vecN_out"], stored)
    last = LastStates(x.get("matDeltaC_last"), no_n, None)
    dx = backward_schedule(spec, lowering, residuals, Cotangents(x["matDeltaH"], last))
    named = zip(_GRADIENTS, dx, strict=False)
    return {name: y for name, y in named if y is not None}
