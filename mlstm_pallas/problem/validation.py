"""Checks of arguments; configs, backends and plans check theirs in planning/.

A wrong argument is a TypeError or ValueError with its name, what came and what was expected.
"""

import functools
import inspect
import math
import numbers
import operator
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim

from mlstm_pallas.problem.annotations import BackendName, LayoutName
from mlstm_pallas.problem.dimensions import InputGate, Layout, is_power_of_two

# On Triton the grid of the fused scan has the parts of a row on its second axis, which CUDA limits
# to 65,535; two parts are behind the segments.
MAX_SEGMENTS = 2**16 - 3
KERNEL_DTYPES = ("float32", "bfloat16", "float16")
INPUT_DTYPES = ("float16", "bfloat16", "float32", "float64")
FLOAT64 = '; float64 needs backend="xla" and jax_enable_x64'
BACKENDS: tuple[str, ...] = get_args(BackendName)
# Of the environment: whether indices are checked that are on a device or traced.
CHECKS = "MLSTM_PALLAS_CHECKS"
# The first version that compiles the Mosaic GPU kernels, and the first that is not tested.
MOSAIC_GPU_JAX = (0, 11, 2), (0, 13)

SYMBOLIC_HINTS = {
    "B": ', or backend "xla", which takes a symbolic B',
    "S": (
        ": the chunks follow from S. Export once per length, or once for the longest, with shorter "
        "inputs padded and sequence_lengths"
    ),
}

Dims = Sequence[str]
Shapes = Sequence[Dims]  # any of which an array may have
# The dimensions of the arrays, by the names of the arguments.
DIMS: dict[str, Dims] = {
    "q": ("B", "NH", "S", "DHQK"),
    "k": ("B", "NH", "S", "DHQK"),
    "v": ("B", "NH", "S", "DHV"),
    "i": ("B", "NH", "S"),
    "f": ("B", "NH", "S"),
    "c_initial": ("B", "NH", "DHQK", "DHV"),
    "n_initial": ("B", "NH", "DHQK"),
    "m_initial": ("B", "NH"),
    "segment_ids": ("B", "S"),
    "sequence_lengths": ("B",),
    "slots": ("B",),
    "accepted": ("B",),
    "states.c": ("B", "NH", "DHQK", "DHV"),
    "states.n": ("B", "NH", "DHQK"),
    "states.m": ("B", "NH"),
    "states.k": ("B", "NH", "2 L", "DHQK"),
    "states.v": ("B", "NH", "2 L", "DHV"),
    **dict.fromkeys(("states.i", "states.f"), ("B", "NH", "2 L")),
    **dict.fromkeys(("states.start", "states.fill", "states.pending"), ("B", "NH")),
}
COUNTERS = "states.start", "states.fill", "states.pending"

Choice = TypeVar("Choice", InputGate, Layout)


def shown(x: Any) -> str:
    """repr, shortened where it may be long."""
    if is_array(x) and x.ndim:
        return f"an array of shape {x.shape}"
    if isinstance(x, int) and x.bit_length() > 128:  # repr refuses integers of 4300 digits
        return f"an integer of {x.bit_length()} bits"
    return repr(x)


def type_name(x: Any) -> str:
    return "jax.Array" if isinstance(x, jax.Array) else type(x).__name__


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def check_is_array(name: str, x: Any) -> None:
    masked = isinstance(x, np.ma.MaskedArray)  # which jax refuses
    if is_array(x) and not masked:
        return
    hint = ": pass its values, x.filled()" if masked else ""
    has_arrays = isinstance(x, tuple | list) and any(map(is_array, x))
    if has_arrays and name.startswith("c"):
        hint = ": pass the states one by one"
    elif inspect.getattr_static(x, "value", None) is not None:  # reading it may be deprecated
        hint = ": pass its array, x[...]" if hasattr(type(x), "__getitem__") else ": pass its value"
    raise TypeError(f"{name} is a {type(x).__name__}, expected an array{hint}")


def check_array(
    name: str,
    x: Any,
    dtypes: Sequence[str],
    backend: str | None = None,
    *,
    cast_from: Sequence[str] = (),
) -> None:
    """Accepts arrays of the dtypes, and of float64 if the backend computes in it.

    cast_from: dtypes that are accepted too, because the array is cast to one of the dtypes.
    """
    check_is_array(name, x)
    if str(x.dtype) in (*dtypes, *cast_from) or float64_runs(x.dtype, backend):
        return
    hint = FLOAT64 if x.dtype == jnp.float64 else ""
    expected = "one of " * (len(dtypes) > 1) + ", ".join(dtypes)
    raise TypeError(f"{name} has dtype {x.dtype}, expected {expected}{hint}")


def check_integers(name: str, x: Any) -> None:
    check_is_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        hint = "; a reset is f = -inf" * (name == "segment_ids" and x.dtype == bool)
        raise TypeError(f"{name} has dtype {x.dtype}, expected an integer dtype{hint}")


def float64_runs(dtype: Any, backend: str | None) -> bool:
    return (
        dtype == jnp.float64 and backend == "xla" and jax.dtypes.canonicalize_dtype(dtype) == dtype
    )


def check_zeros(name: str, x: Any) -> None:
    """Accepts None, zeros, and arrays whose values this process cannot read."""
    if x is None or isinstance(x, jax.core.Tracer):
        return
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return
    if np.any(np.asarray(x) != 0):
        raise ValueError(
            f"{name} has values other than 0 with input_gate 'sigmoid', expected None or zeros"
        )


def check_shapes(
    arrays: Mapping[str, Any],
    dims: Mapping[str, Shapes],
    sizes: Mapping[str, int] = MappingProxyType({}),
    hints: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, int]:
    """Checks every array that is not None against its dimensions; returns their sizes.

    The first array that has a dimension sets its size, unless ``sizes`` does. All dimensions but B
    and NH are at least 1. hints: the ends of messages, by array.
    """
    sizes, sources = dict(sizes), dict[str, str]()

    def described(shape: Dims) -> str:
        known = tuple(sizes.get(dim, dim) for dim in shape)
        text = f"{tuple(shape)} = {known}" if sizes.keys() & shape else f"{tuple(shape)}"
        return text.replace("'", "")

    for name, x in arrays.items():
        if x is None:
            continue
        wrong = [
            [dim for dim, size in zip(shape, x.shape, strict=False) if sizes.get(dim, size) != size]
            or shape[: len(shape) != len(x.shape)]
            for shape in dims[name]
        ]
        if all(wrong):
            expected = " or ".join(map(described, dims[name]))
            hint, dim, shape = hints.get(name, ""), wrong[0][0], dims[name][0]
            if not hint and dim == "NH":
                heads, axis = sizes[dim], shape.index(dim)
                if 0 < x.shape[axis] < heads and heads % x.shape[axis] == 0:
                    times = heads // x.shape[axis]
                    hint = f": repeat its heads, jnp.repeat({name}, {times}, axis={axis})"
            source = sources.get(dim)
            known = f", as {source} has shape {tuple(arrays[source].shape)}" if source else ""
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {expected}{known}{hint}")
        shape = dims[name][wrong.index(next(y for y in wrong if not y))]
        for dim, size in zip(shape, x.shape, strict=True):
            if size < 1 and dim not in ("B", "NH"):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}, expected {described(shape)} with "
                    f"{dim} >= 1"
                )
            sources.setdefault(dim, "" if dim in sizes else name)
            sizes.setdefault(dim, size)
    return sizes


def check_constant(sizes: Mapping[str, Any], backend: str | None) -> None:
    """Raises for symbolic dimensions of jax.export, except for B in plain jnp."""
    for dim, size in sizes.items():
        if is_symbolic_dim(size) and (dim != "B" or backend != "xla"):
            hint = SYMBOLIC_HINTS.get(dim, "")
            raise ValueError(f"q has a symbolic {dim} = {size}, expected a constant{hint}")


def check_states_complete(states: Mapping[str, Any]) -> dict[str, Any]:
    """The states, or none if all are None; raises if only some are there."""
    present = {name: x for name, x in states.items() if x is not None}
    for name, x in present.items():
        check_is_array(name, x)
    if present and len(present) < len(states):
        missing = [name for name in states if name not in present]
        count = "all three" if len(states) == 3 else "both"
        raise ValueError(
            f"initial states come {count} or not at all: got {', '.join(present)} without "
            f"{', '.join(missing)}"
        )
    return present


def check_one_dtype(arrays: Mapping[str, Any]) -> None:
    """Checks that q, k and v have one dtype; the message names the one that differs."""
    q, k, v = (arrays[name].dtype for name in "qkv")
    if q != k == v:
        raise TypeError(f"q has dtype {q}, expected {k}, the dtype of k and v")
    for name, dtype in (("k", k), ("v", v)):
        if dtype != q:
            raise TypeError(f"{name} has dtype {dtype}, expected {q}, the dtype of q")


class _DefaultLayout(str):
    """A layout that the caller did not choose."""


DEFAULT_LAYOUT = cast(LayoutName, _DefaultLayout(Layout.BNTH))


def dims_of(name: str, layout: Layout, *, steps: bool = True) -> Dims:
    """The dimensions of an argument; steps: whether there is an axis of steps."""
    dims = DIMS[name]
    if layout is Layout.BTNH and dims[1:3] == ("NH", "S"):
        dims = "B", "S", "NH", *dims[3:]
    return [dim for dim in dims if steps or dim != "S"]


def check_layout_is_meant(layout: Any, sizes: Mapping[str, int], *states: Any) -> None:
    """Warns, at the caller of the public function, if the default layout finds S < NH.

    states: arrays or None; existing ones would have failed the shape check in the other layout.
    """
    few_steps = isinstance(layout, _DefaultLayout) and sizes["S"] < sizes["NH"]
    if few_steps and all(x is None for x in states):
        warnings.warn(
            'layout="BNTH", the default, reads q as (B, NH, S, DHQK) and finds S < NH, fewer steps '
            'than heads: pass layout="BTNH" if it is (B, S, NH, DHQK), else layout="BNTH"',
            stacklevel=4,  # called by prepare or _run, which public functions call
        )


def check_inputs(
    arrays: Mapping[str, Any],
    states: Mapping[str, Any],
    gate: InputGate,
    layout: Layout,
    *,
    backend: str | None = None,
    cast: bool = True,
    steps: bool = True,
    num_segments: int | None = None,
    shards: int = 1,
) -> dict[str, int]:
    """Checks the arrays of a public function; returns the sizes of their dimensions.

    Args:
      arrays: q, k, v, i and f, and what there is of segment_ids, sequence_lengths and slots.
      states: c_initial, n_initial and m_initial; with slots they are (P, NH, ...).
      backend: that computes in the dtype of q.
      cast: whether the call casts all arrays; otherwise gates alone.
      steps: whether there is an axis of steps.
      num_segments: N; the initial states may then be (B, N, NH, ...).
      shards: of a sequence; sequence_lengths are those of all shards.
    """
    needed, sigmoid = dict(states), gate is InputGate.SIGMOID
    if sigmoid and states["m_initial"] is None:
        del needed["m_initial"]
    complete = check_states_complete(needed)
    arrays = {**arrays, **complete}
    for name, x in arrays.items():
        if name in ("segment_ids", "sequence_lengths", "slots", "accepted"):
            check_integers(name, x)
        elif name in COUNTERS:
            check_array(name, x, ("int32",))
        else:
            any_float = name in "if" or (cast and name in states)
            dtypes = INPUT_DTYPES if any_float else KERNEL_DTYPES
            check_array(name, x, dtypes, backend, cast_from=INPUT_DTYPES if cast else ())
    dims: dict[str, Shapes] = {name: (dims_of(name, layout, steps=steps),) for name in arrays}
    if "slots" in arrays:
        pools = [name for name in arrays if name in complete or name.startswith("states.")]
        if not pools:
            raise ValueError("c_initial is None with slots, expected a pool (P, NH, DHQK, DHV)")
        dims |= {name: (("P", *dims[name][0][1:]),) for name in pools}
    for name in complete if num_segments is not None else ():
        per_segment = "B", "N", *dims_of(name, layout)[1:]
        if complete["c_initial"].ndim == 5:
            dims[name] = (per_segment,)
        elif name == "c_initial":
            dims[name] = *dims[name], per_segment
    q, other = arrays["q"], next(x for x in Layout if x is not layout)
    swapped = {  # the likeliest mistake with a layout
        name: f': axes 1 and 2 are swapped; layout="{other}" has them so for all of q, k, v, i, f'
        for name in "if"
        if steps and tuple(arrays[name].shape) == (*q.shape[:1], *q.shape[2:0:-1])
    }
    sizes = check_shapes(arrays, dims, {"N": num_segments} if num_segments else {}, swapped)
    lengths = [x for name, x in arrays.items() if name == "sequence_lengths"]
    if lengths:
        check_indices("sequence_lengths", sizes["S"] * shards, *lengths)
    if num_segments:
        check_indices("segment_ids", sizes["S"], arrays["segment_ids"], *lengths)
    if "slots" in arrays:
        check_indices("slots", sizes["P"], arrays["slots"])
    if sigmoid:
        check_zeros("m_initial", states["m_initial"])
    return sizes


# Which values are wrong, and what was expected.
_WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "sequence_lengths": (lambda S, x: (x < 0) | (x > S), "0 to S = {}"),
    "segment_ids": (
        lambda S, x, lengths=np.inf: (
            (x < np.maximum.accumulate(x, axis=1)) & (np.arange(S) < np.reshape(lengths, (-1, 1)))
        ),
        "no id below an earlier one, as num_segments is set",
    ),
    "slots": (
        lambda P, x: (
            (x >= P) | (x >= 0) & ~np.isin(np.arange(len(x)), np.unique(x, return_index=True)[1])
        ),
        "-1 for none, or a row of the pools, each once, below P = {}",
    ),
}


def check_indices(name: str, size: int, *x: Any) -> None:
    """Checks the values of NumPy arrays; with CHECKS also of others, which waits for them.

    x: the array; behind segment_ids the lengths, beyond which ids do not count.
    """
    if all(isinstance(y, np.ndarray) for y in x):
        _check_indices(name, size, *x)
    elif os.environ.get(CHECKS):
        jax.debug.callback(functools.partial(_check_indices, name, size), *x)


def _check_indices(name: str, size: int, *arrays: Any) -> None:
    x, (wrong, expected) = [np.asarray(y) for y in arrays], _WRONG[name]
    for index in np.argwhere(wrong(size, *x)).tolist():
        raise ValueError(f"{name}{index} is {x[0][*index]}, expected {expected.format(size)}")


def check_choice(name: str, x: Any, kind: type[Choice]) -> Choice:
    """x as a member of an enum of strings."""
    expected = f"expected one of {', '.join(kind)}"
    if not isinstance(x, str):
        raise TypeError(f"{name} is a {type_name(x)}, {expected}")
    if x not in list(kind):
        raise ValueError(f"{name} is {x!r}, {expected}")
    return kind(x)


def check_scalar(name: str, x: Any, *, signed: bool = False) -> float:
    """x as a float that is 0 or a normal number in float32; Python's or NumPy's number."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name} is traced, expected a Python float: mark it static in jit")
    is_float = isinstance(x, np.generic) and jnp.issubdtype(x.dtype, jnp.floating)  # bfloat16 too
    if isinstance(x, bool) or not (isinstance(x, numbers.Real) or is_float):
        scalar = isinstance(x, jax.Array | np.ndarray) and not x.ndim
        hint = f": pass float({name})" if scalar else ""
        raise TypeError(f"{name} is a {type_name(x)}, expected a float{hint}")
    limits = np.finfo(np.float32)
    try:
        number = float(x)
    except OverflowError:  # of Python's integers
        number = 2 * float(limits.max) * (1 if x > 0 else -1)
    if not math.isfinite(number) or (number < 0 and not signed):
        raise ValueError(
            f"{name} is {shown(x)}, expected a finite number{'' if signed else ' >= 0'}"
        )
    if x != 0 and not float(limits.tiny) <= abs(number) <= float(limits.max):
        raise ValueError(
            f"{name} is {shown(x)}, expected 0 or a number from {limits.tiny!s} to {limits.max!s}, "
            "the range of float32"
        )
    return number


def check_integer(
    name: str,
    x: Any,
    least: int,
    most: int | None = None,
    *,
    power_of_two: bool = False,
    optional: bool = False,
) -> int:
    """x, Python's or NumPy's integer or a concrete JAX scalar, as an int.

    optional: whether None, which the caller handles, is in the message.
    """
    kind = "None or " * optional + ("a power of two" if power_of_two else "an integer")
    limits = f">= {least}" if most is None else f"from {least} to {most}"
    expected = f"expected {kind} {limits}"
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name} is traced, {expected}: mark it static in jit")
    try:
        number = operator.index(x)
    except TypeError:
        number = None
    if (
        number is None
        or isinstance(x, bool | np.bool_)
        or number < least
        or (most is not None and number > most)
        or (power_of_two and not is_power_of_two(number))
    ):
        raise ValueError(f"{name} is {shown(x)}, {expected}")
    return number


def check_power_of_two(name: str, x: Any, least: int) -> int | None:
    """x as an int or None."""
    if x is None:
        return None
    return check_integer(name, x, least, power_of_two=True, optional=True)


def check_num_segments(name: str, x: Any) -> int | None:
    return None if x is None else check_integer(name, x, 1, 2**31 - 1)  # indices are int32


def check_segments(num_segments: int, segment_ids: Any, return_last_states: bool) -> None:
    """Checks what num_segments needs."""
    if segment_ids is None:
        raise ValueError(f"num_segments is {num_segments} without segment_ids, expected both")
    if not return_last_states:
        raise ValueError(
            f"num_segments is {num_segments} with return_last_states=False, expected "
            "return_last_states=True"
        )


def check_segments_fit(num_segments: int, backend: str | None, front: int = 0) -> None:
    """Raises for more segments than the grid of a kernel has places for; front: of ``CallSpec``."""
    if backend != "xla" and num_segments + front > MAX_SEGMENTS:
        less = "; one less with initial states and segment_ids that may be negative" * front
        raise ValueError(
            f"num_segments is {num_segments}, expected at most {MAX_SEGMENTS}, the limit of a "
            f"kernel's grid, or backend 'xla'{less}"
        )


def check_lengths(lengths: Any) -> list[np.ndarray]:
    """The lengths of packed prompts as one array per row."""
    if isinstance(lengths, jax.core.Tracer):
        raise TypeError("lengths is traced, expected integers: pack prompts outside of jit")
    expected = "expected the steps of each prompt, integers >= 0, of one row or of each of several"
    if isinstance(lengths, jax.Array):
        lengths = np.asarray(lengths)
    try:
        rows = [np.asarray(row) for row in lengths]
    except TypeError:
        raise TypeError(f"lengths is {lengths!r}, {expected}") from None
    if all(row.ndim == 0 for row in rows):
        rows = [np.asarray(rows)]
    for row in rows:
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise TypeError(f"lengths is {lengths!r}, {expected}")
    if not any(row.size for row in rows) or any(np.any(row < 0) for row in rows):
        raise ValueError(f"lengths is {lengths!r}, {expected}")
    return rows


def check_flag(name: str, x: Any) -> bool:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name} is traced, expected a Python bool: mark it static in jit")
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} is a {type_name(x)}, expected a Python bool")
    return bool(x)


def check_backend(name: str, x: Any) -> str | None:
    """x as a backend's name or None. name: of an argument, or the environment variable's."""
    if x is None or (isinstance(x, str) and x in BACKENDS):
        return x
    none = "None or " * (name == "backend")
    raise ValueError(f"{name} is {shown(x)}, expected {none}one of {', '.join(BACKENDS)}")


def check_axis_name(x: Any) -> None:
    """Accepts an axis of the surrounding shard_map or vmap, and a tuple of several."""
    expected = "expected a mesh axis of the surrounding jax.shard_map"
    names = x if isinstance(x, tuple) else (x,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name is {shown(x)}, {expected}, by its name")
    if len({*names}) < len(names):
        raise ValueError(f"axis_name is {x!r}, {expected}, each once")
    try:
        lax.axis_size(x)
    except NameError:
        raise ValueError(f"axis_name is {x!r}, {expected}") from None


def check_instance(name: str, x: Any, kind: type) -> Any:
    if x is not None and not isinstance(x, kind):
        raise TypeError(f"{name} is a {type_name(x)}, expected a {kind.__name__} or None")
    return x


def as_dtype(
    name: str, x: Any, expected: str = f"None or one of {', '.join(KERNEL_DTYPES)}"
) -> jnp.dtype:
    try:
        # NumPy reads None as float64 and an array as its dtype.
        if x is None or is_array(x):
            raise TypeError
        dtype: jnp.dtype = jnp.dtype(x)
    except (TypeError, ValueError, SyntaxError):  # NumPy parses strings with commas
        raise TypeError(f"{name} is {shown(x)}, expected {expected}") from None
    return dtype


def check_dtype(name: str, x: Any, dtypes: Sequence[str] = KERNEL_DTYPES) -> jnp.dtype:
    expected = f"one of {', '.join(dtypes)}"
    dtype = as_dtype(name, x, expected)
    if dtype.name not in dtypes:
        raise TypeError(f"{name} is {dtype.name}, expected {expected}")
    return dtype


def check_optional_dtype(name: str, x: Any) -> jnp.dtype | None:
    return None if x is None else as_dtype(name, x)


def check_state_dtype(name: str, x: Any) -> jnp.dtype | None:
    return None if x is None else check_dtype(name, x)


def kernel_dtype(
    autocast_kernel_dtype: jnp.dtype | None, q_dtype: Any, backend: str | None
) -> jnp.dtype:
    """The dtype of q, k, v in the matrix products."""
    dtype: jnp.dtype = jnp.dtype(q_dtype)
    message = f"q has dtype {dtype.name}"
    hint = "; pass autocast_kernel_dtype to compute in another dtype"
    if dtype.name == "float64":
        hint = ": cast q, k and v, or set autocast_kernel_dtype"
    if autocast_kernel_dtype is not None:
        dtype = autocast_kernel_dtype
        message, hint = f"autocast_kernel_dtype is {dtype.name}", ""
    if dtype.name in KERNEL_DTYPES or float64_runs(dtype, backend):
        return dtype
    hint += FLOAT64 if dtype.name == "float64" else ""
    raise TypeError(f"{message}, expected one of {', '.join(KERNEL_DTYPES)}{hint}")
