"""Checks of all arguments.

A wrong argument is a TypeError or ValueError with its name, what came and what was expected.
"""

import functools
import inspect
import math
import numbers
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from mlstm_pallas.annotations import BackendName
from mlstm_pallas.problem import InputGate, Layout, as_integer, is_power_of_two

KERNEL_DTYPES = ("float32", "bfloat16", "float16")
INPUT_DTYPES = ("float16", "bfloat16", "float32", "float64")
FLOAT64 = '; float64 needs backend="xla" and jax_enable_x64'
BACKENDS: tuple[str, ...] = get_args(BackendName)
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
# The dimensions of sequences and states, by the names of the arguments.
SEQUENCE_DIMS: dict[str, Dims] = {
    "q": ("B", "NH", "S", "DHQK"),
    "k": ("B", "NH", "S", "DHQK"),
    "v": ("B", "NH", "S", "DHV"),
    "i": ("B", "NH", "S"),
    "f": ("B", "NH", "S"),
}
STATE_DIMS: dict[str, Dims] = {
    "c": ("B", "NH", "DHQK", "DHV"),
    "n": ("B", "NH", "DHQK"),
    "m": ("B", "NH"),
}
INTEGER_DIMS: dict[str, Dims] = {"segment_ids": ("B", "S"), "sequence_lengths": ("B",)}


def check_is_array(name: str, x: Any) -> None:
    if isinstance(x, jax.Array | np.ndarray):
        return
    hint = ""
    if isinstance(x, tuple | list) and any(isinstance(y, jax.Array | np.ndarray) for y in x):
        hint = ": pass the states one by one" if name.startswith("c") else ""
    elif inspect.getattr_static(x, "value", None) is not None:  # reading it may be deprecated
        hint = ": pass its array, x[...]" if hasattr(type(x), "__getitem__") else ": pass its value"
    raise TypeError(f"{name} is a {type(x).__name__}, expected an array{hint}")


def check_array(name: str, x: Any, dtypes: Sequence[str], *, listed: Sequence[str] = ()) -> None:
    """listed: the dtypes that the message lists, in place of all."""
    check_is_array(name, x)
    if str(x.dtype) not in dtypes:
        raise TypeError(
            f"{name} has dtype {x.dtype}, expected one of {', '.join(listed or dtypes)}"
        )


def check_dtype_runs(name: str, dtype: Any, expected: Sequence[str], backend: str | None) -> None:
    """Accepts the expected dtypes, and float64 where the backend computes in it."""
    if jnp.dtype(dtype).name in expected or float64_runs(dtype, backend):
        return
    hint = FLOAT64 if dtype == jnp.float64 else ""
    raise TypeError(f"{name} has dtype {dtype}, expected one of {', '.join(expected)}{hint}")


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
    arrays: Mapping[str, Any], dims: Mapping[str, Dims], sizes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Checks every array that is not None against its named dimensions; returns their sizes.

    The first array that has a dimension sets its size, unless ``sizes`` does. All dimensions but B
    and NH are at least 1.
    """
    sizes, sources = dict(sizes or {}), dict[str, str]()
    for name, x in arrays.items():
        if x is None:
            continue
        shape, names = tuple(x.shape), dims[name]
        text = f"({', '.join(names)})"
        known = (
            f" = ({', '.join(str(sizes.get(dim, dim)) for dim in names)}{',' * (len(names) == 1)})"
        )
        if len(shape) != len(names):
            bound = [dim for dim in names if dim in sizes]
            expected = (
                text
                + known * bool(bound)
                + _as_shape(arrays, sources, bound[:1]) * (len(bound) == len(names))
            )
            raise ValueError(f"{name} has shape {shape}, expected {expected}")
        for dim, size in zip(names, shape, strict=True):
            if size < 1 and dim not in ("B", "NH"):
                raise ValueError(f"{name} has shape {shape}, expected {text} with {dim} >= 1")
        wrong = [
            dim for dim, size in zip(names, shape, strict=True) if sizes.get(dim, size) != size
        ]
        for dim, size in zip(names, shape, strict=True):
            sources.setdefault(dim, "" if dim in sizes else name)
            sizes.setdefault(dim, size)
        if wrong:
            known = f" = ({', '.join(str(sizes[dim]) for dim in names)}{',' * (len(names) == 1)})"
            raise ValueError(
                f"{name} has shape {shape}, expected {text}{known}"
                f"{_as_shape(arrays, sources, wrong)}"
            )
    return sizes


def check_constant(sizes: Mapping[str, Any], backend: str | None) -> None:
    """Refuses the symbolic dimensions of jax.export, but for B in plain jnp."""
    for dim, size in sizes.items():
        if is_symbolic_dim(size) and (dim != "B" or backend != "xla"):
            hint = SYMBOLIC_HINTS.get(dim, "")
            raise ValueError(f"q has a symbolic {dim} = {size}, expected a constant{hint}")


def _as_shape(arrays: Mapping[str, Any], sources: Mapping[str, str], dims: Dims) -> str:
    """Names the array that set the size of the first of the dimensions."""
    source = sources.get(dims[0]) if dims else None
    return f", as {source} has shape {tuple(arrays[source].shape)}" if source else ""


def check_states_complete(states: Mapping[str, Any], kind: str = "states") -> bool:
    """Whether there are states; refuses some without the others."""
    present = [name for name, x in states.items() if x is not None]
    for name in present:
        check_is_array(name, states[name])
    if present and len(present) < len(states):
        missing = ", ".join(name for name in states if name not in present)
        count = "all three" if len(states) == 3 else "both"
        raise ValueError(
            f"{kind} come {count} or not at all: got {', '.join(present)} without {missing}"
        )
    return bool(present)


def check_one_dtype(arrays: Mapping[str, Any]) -> None:
    """k and v have the dtype of q."""
    for name in ("k", "v"):
        if arrays[name].dtype != arrays["q"].dtype:
            raise TypeError(
                f"{name} has dtype {arrays[name].dtype}, expected {arrays['q'].dtype}, "
                "the dtype of q"
            )


def check_layout(layout: Any) -> Layout:
    if not isinstance(layout, str) or layout not in list(Layout):
        raise ValueError(f"layout is {layout!r}, expected one of {', '.join(Layout)}")
    return Layout(layout)


def sequence_dims(layout: Layout) -> dict[str, Dims]:
    """SEQUENCE_DIMS in this layout."""
    if layout is Layout.BNTH:
        return SEQUENCE_DIMS
    return {name: ("B", "S", "NH", *dims[3:]) for name, dims in SEQUENCE_DIMS.items()}


def check_axes_of_gates(arrays: Mapping[str, Any], layout: Layout) -> None:
    """Refuses gates whose axes 1 and 2 are swapped, the likeliest mistake in a change of layout."""
    q = arrays["q"]
    if len(q.shape) != 4:
        return
    B, first, second = q.shape[:3]
    for name in "if":
        x = arrays[name]
        if tuple(x.shape) == (B, second, first) != (B, first, second):
            axes, shape = ", ".join(sequence_dims(layout)[name]), (B, first, second)
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, expected ({axes}) = {shape}, as q has shape "
                f'{tuple(q.shape)}: axes 1 and 2 are swapped; layout="{_other(layout)}" has them '
                "so for all of q, k, v, i, f"
            )


def _other(layout: Layout) -> Layout:
    return next(y for y in Layout if y is not layout)


@functools.cache
def warn_of_layout(layout: Layout) -> None:
    """Warns once for each layout, three callers up, that there are fewer steps than heads."""
    other = _other(layout)
    axes, others = (", ".join(sequence_dims(x)["q"]) for x in (layout, other))
    warnings.warn(
        f'layout="{layout}" reads q as ({axes}) and finds S < NH, fewer steps than heads: '
        f'if it is ({others}), pass layout="{other}"',
        stacklevel=4,
    )


def check_chunkwise_arrays(
    q: Any,
    k: Any,
    v: Any,
    i: Any,
    f: Any,
    c_initial: Any,
    n_initial: Any,
    m_initial: Any,
    segment_ids: Any,
    sequence_lengths: Any,
    input_gate: InputGate,
    layout: Layout = Layout.BNTH,
) -> dict[str, int]:
    """The arrays of mlstm_chunkwise; returns the sizes of their dimensions."""
    arrays = dict(q=q, k=k, v=v, i=i, f=f)
    states = dict(c_initial=c_initial, n_initial=n_initial, m_initial=m_initial)
    if input_gate is InputGate.SIGMOID and m_initial is None:
        states.pop("m_initial")
    if check_states_complete(states, "initial states"):
        arrays |= states
    for name, x in arrays.items():
        check_array(name, x, INPUT_DTYPES, listed=KERNEL_DTYPES if name in "qkv" else INPUT_DTYPES)
    check_axes_of_gates(arrays, layout)
    dims = sequence_dims(layout)
    sizes = check_shapes(
        arrays, dims | {f"{name}_initial": dims for name, dims in STATE_DIMS.items()}
    )
    integers = dict(segment_ids=segment_ids, sequence_lengths=sequence_lengths)
    for name, x in integers.items():
        if x is None:
            continue
        check_is_array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} has dtype {x.dtype}, expected an integer dtype")
        check_shapes({"q": q, name: x}, {"q": dims["q"], name: INTEGER_DIMS[name]})
    if input_gate is InputGate.SIGMOID:
        check_zeros("m_initial", m_initial)
    return sizes


def check_input_gate(input_gate: Any, normalize: Any) -> tuple[InputGate, bool]:
    if not isinstance(input_gate, str):
        raise TypeError(
            f"input_gate is a {type(input_gate).__name__}, expected one of {', '.join(InputGate)}"
        )
    if input_gate not in list(InputGate):
        raise ValueError(f"input_gate is {input_gate!r}, expected one of {', '.join(InputGate)}")
    normalize = check_flag("normalize", normalize)
    if not normalize and input_gate != InputGate.SIGMOID:
        raise ValueError(
            f'normalize is False with input_gate {input_gate!r}, expected input_gate="sigmoid"'
        )
    return InputGate(input_gate), normalize


def check_scalar(name: str, x: Any, *, signed: bool = False) -> float:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name} is traced, expected a Python float: mark it static in jit")
    if not isinstance(x, numbers.Real) or isinstance(x, bool):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a float")
    if not math.isfinite(x) or (float(x) < 0 and not signed):
        raise ValueError(f"{name} is {x}, expected a finite number{'' if signed else ' >= 0'}")
    if abs(float(x)) > float(np.finfo(np.float32).max):
        raise ValueError(f"{name} is {x}, expected a number in the range of float32")
    return float(x)


def check_integer(name: str, x: Any, least: int, *, power_of_two: bool = False) -> int:
    size = as_integer(x)
    expected = f"expected {'a power of two' if power_of_two else 'an integer'} >= {least}"
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name} is traced, {expected}: mark it static in jit")
    is_integer = isinstance(size, int) and not isinstance(size, bool)
    if not is_integer or size < least or (power_of_two and not is_power_of_two(size)):
        raise ValueError(f"{name} is {x!r}, {expected}")
    return int(size)


def check_num_segments(x: Any, segment_ids: Any, return_last_states: bool) -> int:
    """num_segments as an int, with the arguments that it needs."""
    num_segments = check_integer("num_segments", x, 1)
    if segment_ids is None:
        raise ValueError(f"num_segments is {x} without segment_ids, expected both")
    if not return_last_states:
        raise ValueError(
            f"num_segments is {x} with return_last_states=False, expected return_last_states=True"
        )
    return num_segments


def check_lengths(lengths: Any) -> list[np.ndarray]:
    """The lengths of packed prompts as one array per row, without the zeros at its end."""
    if isinstance(lengths, jax.core.Tracer):
        raise TypeError("lengths is traced, expected integers: pack prompts outside of jit")
    expected = "expected the steps of each prompt, integers >= 1, of one row or of each of several"
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
    rows = [np.trim_zeros(row, "b") for row in rows]
    if not any(row.size for row in rows) or any(np.any(row < 1) for row in rows):
        raise ValueError(f"lengths is {lengths!r}, {expected}; zeros may stand behind the last one")
    return rows


def check_flag(name: str, x: Any) -> bool:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name} is traced, expected a Python bool: mark it static in jit")
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a Python bool")
    return bool(x)


def check_backend(backend: Any, *, variable: str | None = None) -> None:
    """variable: the environment variable that has the value, if one has."""
    if backend is not None and backend not in BACKENDS:
        expected = f"{'None or ' if variable is None else ''}one of {', '.join(BACKENDS)}"
        raise ValueError(f"{variable or 'backend'} is {backend!r}, expected {expected}")


def check_instance(name: str, x: Any, kind: type) -> None:
    if x is not None and not isinstance(x, kind):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a {kind.__name__} or None")


def as_dtype(
    name: str, x: Any, expected: str = f"None or one of {', '.join(KERNEL_DTYPES)}"
) -> jnp.dtype:
    try:
        # NumPy reads None as float64 and an array as its dtype.
        if x is None or isinstance(x, jax.Array | np.ndarray):
            raise TypeError
        dtype: jnp.dtype = jnp.dtype(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {x!r}, expected {expected}") from None
    return dtype


def check_output_dtype(name: str, x: Any) -> jnp.dtype:
    dtype = as_dtype(name, x, f"one of {', '.join(INPUT_DTYPES)}")
    if dtype.name not in INPUT_DTYPES:
        raise TypeError(f"{name} is {dtype.name}, expected one of {', '.join(INPUT_DTYPES)}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(
            f"{name} is {dtype.name}, which needs jax_enable_x64, expected one of "
            f"{', '.join(INPUT_DTYPES[:-1])}"
        )
    return dtype


def kernel_dtype(autocast_kernel_dtype: Any, q_dtype: Any, backend: str | None) -> jnp.dtype:
    """The dtype of q, k, v in the matrix products."""
    if autocast_kernel_dtype is None:
        dtype: jnp.dtype = jnp.dtype(q_dtype)
        is_float64 = dtype.name == "float64"
        message = f"q has dtype {dtype.name}"
        hint = ": cast q, k and v, or set autocast_kernel_dtype"
        hint = hint if is_float64 else "; pass autocast_kernel_dtype to compute in another dtype"
    else:
        dtype = as_dtype("autocast_kernel_dtype", autocast_kernel_dtype)
        is_float64 = dtype.name == "float64"
        message, hint = f"autocast_kernel_dtype is {dtype.name}", ""
    if dtype.name in KERNEL_DTYPES or float64_runs(dtype, backend):
        return dtype
    hint += FLOAT64 if is_float64 else ""
    raise TypeError(f"{message}, expected one of {', '.join(KERNEL_DTYPES)}{hint}")
