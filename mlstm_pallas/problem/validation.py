"""Checks of arguments; configs, backends and plans check theirs in planning/.

A wrong argument is a TypeError or ValueError with its name, what came and what was expected.
"""

import functools
import math
import numbers
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.export import is_symbolic_dim
from jax.sharding import PartitionSpec as P

from mlstm_pallas.problem.annotations import BackendName
from mlstm_pallas.problem.callers import warn_caller
from mlstm_pallas.problem.dimensions import MIN_CHUNK_SIZE, InputGate, Layout, is_power_of_two

KERNEL_DTYPES = ("float32", "bfloat16", "float16")
INPUT_DTYPES = (*KERNEL_DTYPES, "float64")
FLOAT64 = '; float64 needs backend="xla" and jax_enable_x64'
BACKENDS: tuple[str, ...] = get_args(BackendName)
# Of the environment: whether indices are checked that are on a device or traced.
CHECKS_VARIABLE = "MLSTM_PALLAS_CHECKS"

SYMBOLIC_HINTS = {
    "B": ', or backend "xla", which takes a symbolic B',
    "S": (
        ": the chunks follow from S. Export once per length, or once for the longest, with shorter "
        "inputs padded and sequence_lengths"
    ),
}

Shapes = Sequence[Sequence[str]]  # dimensions, any of which an array may have


def shapes_by_name(table: Mapping[str, str]) -> dict[str, Shapes]:
    """The shapes that arrays may have, by name, from names by shapes."""
    return {
        name: [dims.split(", ") for dims in shapes.split(" or ")]
        for shapes, names in table.items()
        for name in names.split()
    }


# The dimensions of the arrays, by the names of the arguments.
DIMS = shapes_by_name(
    {
        "B, NH, S, DHQK": "q k",
        "B, NH, S, DHV": "v",
        "B, NH, S": "i f",
        "B, NH, DHQK, DHV": "c_initial states.c c",
        "B, NH, DHQK": "n_initial states.n n",
        "B, NH": "m_initial states.m m states.start states.fill states.pending",
        "B, S": "segment_ids",
        "B, N": "segment_lengths",
        "B": "sequence_lengths slots accepted",
        "B, NH, 2 L, DHQK": "states.k",
        "B, NH, 2 L, DHV": "states.v",
        "B, NH, 2 L": "states.i states.f",
    }
)
COUNTERS = "states.start", "states.fill", "states.pending"
INDICES = "segment_ids", "sequence_lengths", "segment_lengths", "slots", "accepted"
# Which integers of 32 bits are expected, or which ones mean the same.
_OF_32_BITS = {
    "segment_ids": "np.unique(segment_ids, return_inverse=True)[1] has the same segments",
    "segment_lengths": "0 to S",
    "sequence_lengths": "0 to S",
    "slots": "-1 for none, or a row of the pools",
    "accepted": "0 to the number of tokens of the call before",
    "phase": "phase % length has the same phases",
}
MASK = ": a mask has the lengths np.sum(mask, axis=1)"
OPTIONAL = "c_initial", "n_initial", "m_initial", "states.m", "m", *INDICES

Choice = TypeVar("Choice", InputGate, Layout)


def shown(x: Any) -> str:
    """repr, shortened where it may be long."""
    if is_array(x) and x.ndim:
        return f"an array of shape {x.shape}"
    if isinstance(x, int) and x.bit_length() > 128:  # repr refuses integers of 4300 digits
        return f"an integer of {x.bit_length()} bits"
    return repr(x)


def wrong(name: str, x: Any, expected: str, kind: type[Exception] = ValueError) -> Exception:
    """The error of an argument that is no array."""
    if isinstance(x, jax.core.Tracer):
        return TypeError(f"{name} is traced, expected {expected}: mark it static in jit")
    return kind(f"{name} is {shown(x)}, expected {expected}")


def or_none(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """The check of an argument that may be None."""
    return lambda name, x: None if x is None else check(name, x)


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def check_is_array(name: str, x: Any) -> None:
    if not is_array(x) or isinstance(x, np.ma.MaskedArray):  # which jax refuses
        advice = ""
        if name in INDICES:
            advice = f" {tuple(DIMS[name][0])} of integers, np.array([...])".replace("'", "")
        elif isinstance(x, tuple | list) and len(x) == 3:
            advice = ": pass the three states as *states"
        raise TypeError(f"{name} has type {type(x).__name__}, expected an array{advice}")
    if not x.dtype.isnative:
        raise TypeError(
            f"{name} has dtype {x.dtype}, expected the byte order of this machine: "
            f"{name}.astype({name}.dtype.newbyteorder('='))"
        )
    if isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host:
        argument = name.partition(".")[0]
        raise ValueError(
            f"{name} is in host memory, expected device memory: "
            f"jax.device_put({argument}, jax.memory.Space.Device) moves it there"
        )


def check_array(name: str, x: Any, dtypes: Sequence[str], backend: str | None = None) -> None:
    """Accepts arrays of the dtypes, and of float64 if the backend computes in it."""
    check_is_array(name, x)
    _check_dtype(f"{name} has dtype", x.dtype, dtypes, backend)


def check_integers(name: str, x: Any) -> None:
    check_is_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        advice = MASK * (name == "sequence_lengths" and x.dtype == bool and x.ndim == 2)
        raise TypeError(f"{name} has dtype {x.dtype}, expected an integer dtype{advice}")
    if isinstance(x, np.ndarray) and x.itemsize > 4 and np.any(x != x.astype("int32")):
        raise wrong(name, x, f"integers of 32 bits: {_OF_32_BITS[name]}")


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
) -> dict[str, int]:
    """Checks every array that is not None against its dimensions; returns their sizes.

    The first array that has a dimension sets its size, unless ``sizes`` does. All dimensions but B
    and NH are at least 1.
    """
    sizes, sources = dict(sizes), dict.fromkeys(sizes, "")

    def described(shape: Sequence[str]) -> str:
        known = tuple(sizes.get(dim, dim) for dim in shape)
        text = f"{tuple(shape)} = {known}" if sizes.keys() & shape else f"{tuple(shape)}"
        return text.replace("'", "")

    def differing(shape: Sequence[str], x: Any) -> Sequence[str]:
        """The dimensions whose size is another one; the first where their number is."""
        if len(shape) != x.ndim:
            return shape[:1]
        return [dim for dim, n in zip(shape, x.shape, strict=True) if sizes.get(dim, n) != n]

    for name, x in arrays.items():
        if x is None:
            continue
        found = f"{name} has shape {tuple(x.shape)}"
        shape = next((y for y in dims[name] if not differing(y, x)), None)
        if shape is None:
            expected = " or ".join(map(described, dims[name]))
            source = sources.get(differing(dims[name][0], x)[0])
            known = f", as {source} has shape {tuple(arrays[source].shape)}" if source else ""
            advice = _advice(name, x.shape, dims[name][0], sizes)
            raise ValueError(f"{found}, expected {expected}{known}{advice}")
        for dim, size in zip(shape, x.shape, strict=True):
            if size < 1 and dim not in ("B", "NH"):
                raise ValueError(f"{found}, expected {described(shape)} with {dim} >= 1")
            sources.setdefault(dim, name)
            sizes.setdefault(dim, size)
    return sizes


def _advice(name: str, found: Sequence[int], shape: Sequence[str], sizes: Mapping[str, int]) -> str:
    """What mends the likeliest mistakes, or nothing."""

    def fits(*sizes_found: int) -> bool:
        pairs = zip(shape, sizes_found, strict=False)
        return len(shape) == len(sizes_found) and all(sizes.get(dim, n) == n for dim, n in pairs)

    dropped = {n: (*found[:n], *found[n + 1 :]) for n, size in enumerate(found) if size == 1}
    dropped = {n: sizes_left for n, sizes_left in dropped.items() if fits(*sizes_left)}
    if dropped:
        axis = max(dropped)
        certain = f"axis {axis}, {name}.squeeze({axis})"
        return f": drop {certain if len({*dropped.values()}) == 1 else 'an axis of size 1'}"
    if name == "sequence_lengths" and len(found) == 2 and fits(found[0]):
        return MASK
    axis = shape.index("NH") if "NH" in shape else 0
    missing = []
    if fits(1, *found):
        missing.append(f"for the batch, {name}[None], or map the call with jax.vmap")
    if axis and fits(*found[:axis], 1, *found[axis:]):
        missing.append(f"for one head, jnp.expand_dims({name}, {axis})")
    if missing:
        return f": add an axis {'; '.join(missing)}"
    if not axis:
        return ""
    if "S" in shape and fits(*found[:1], *found[2:0:-1], *found[3:]):
        return ": axes 1 and 2 are swapped, as the other layout has them"
    if "S" not in shape and fits(*found[:-2], *found[:-3:-1]):
        return f": its last two axes are swapped, {name}.mT"
    if name in "qkvif" and "S" not in shape and len(found) == len(shape) + 1:
        return ": several steps are for mlstm_chunkwise or mlstm_ring_step"
    heads = sizes.get("NH", 0)
    if len(found) == len(shape) and fits(*found[:axis], heads, *found[axis + 1 :]):
        times, rest = divmod(heads, max(found[axis], 1))
        if times > 1 and not rest:
            return f": repeat its heads, jnp.repeat({name}, {times}, axis={axis})"
    return ""


def check_constant(sizes: Mapping[str, Any], backend: str | None) -> None:
    """Raises for symbolic dimensions of jax.export, except for B in plain jnp."""
    for dim, size in sizes.items():
        if is_symbolic_dim(size) and (dim != "B" or backend != "xla"):
            hint = SYMBOLIC_HINTS.get(dim, "")
            raise ValueError(f"q has a symbolic {dim} = {size}, expected a constant{hint}")


def check_removed(num_segments: Any) -> None:
    """Raises for the argument that segment_lengths replace."""
    if num_segments is not None:
        raise ValueError(
            f"num_segments is {num_segments}, expected segment_lengths in its place, which are "
            f"(segment_ids[:, :, None] == jnp.arange({num_segments})).sum(1) of ids that ascend"
        )


def check_states_complete(states: Mapping[str, Any]) -> None:
    missing = [name for name, x in states.items() if x is None]
    if 0 < len(missing) < len(states):
        verb = "is" if len(missing) == 1 else "are"
        raise ValueError(
            f"{', '.join(missing)} {verb} None, expected all initial states ({', '.join(states)}) "
            "or none"
        )


def check_one_dtype(arrays: Mapping[str, Any]) -> None:
    """Checks that q, k and v have one dtype."""
    dtype = arrays["q"].dtype
    for name in "kv":
        if arrays[name].dtype != dtype:
            raise TypeError(
                f"{name} has dtype {arrays[name].dtype}, expected {dtype}, the dtype of q"
            )


def check_layout_is_meant(layout: Any, sizes: Mapping[str, int], *states: Any) -> None:
    """Warns if the layout is None and the default, BNTH, may not be meant.

    states: arrays or None; with other sizes than S = NH, existing ones would have failed the shape
    check in the other layout.
    """
    if layout is not None:
        return
    S, NH = sizes["S"], sizes["NH"]
    if (S != NH or NH == 1) if any(x is not None for x in states) else S >= NH:
        return
    found = "S = NH, as many steps as heads" if S == NH else "S < NH, fewer steps than heads"
    warn_caller(
        f'layout="BNTH", the default, reads q as (B, NH, S, DHQK) and finds {found}: pass '
        'layout="BTNH" if it is (B, S, NH, DHQK), else layout="BNTH"'
    )


def check_inputs(
    arrays: Mapping[str, Any],
    gate: InputGate,
    layout: Layout,
    *,
    backend: str | None = None,
    cast: bool = True,
    steps: bool = True,
    shards: int = 1,
) -> dict[str, int]:
    """Checks the arrays of a public function; returns the sizes of their dimensions.

    Args:
      arrays: by the names of ``DIMS``; those in ``OPTIONAL`` may be None. With slots the states are
        (P, NH, ...).
      backend: that computes in the dtype of q.
      cast: whether the call casts all arrays; otherwise gates alone.
      steps: whether there is an axis of steps.
      shards: of a sequence; sequence_lengths are those of all shards.
    """
    states = {name: x for name, x in arrays.items() if name.endswith("_initial")}
    if not gate.stabilised and states.get("m_initial") is None:
        states.pop("m_initial", None)
    arrays = {name: x for name, x in arrays.items() if x is not None or name not in OPTIONAL}
    for name, x in arrays.items():
        if name in INDICES:
            check_integers(name, x)
        elif name in COUNTERS:
            check_array(name, x, ("int32",))
        else:
            check_array(name, x, INPUT_DTYPES if cast or name in "if" else KERNEL_DTYPES, backend)
    check_states_complete(states)
    pooled = "slots" in arrays
    if pooled and states and arrays.get("c_initial") is None:
        raise ValueError("c_initial is None with slots, expected a pool (P, NH, DHQK, DHV)")
    has_segments = "segment_lengths" in arrays and getattr(arrays.get("c_initial"), "ndim", 0) == 5

    def dims_of(name: str) -> Sequence[str]:
        (dims,) = DIMS[name]
        if layout is Layout.BTNH and dims[1:3] == ["NH", "S"]:
            dims = ["B", "S", "NH", *dims[3:]]
        if name in states or name.startswith("states."):
            lead = ["P"] if pooled else ["B", "N"] if has_segments else ["B"]
            dims = [*lead, *dims[1:]]
        return [dim for dim in dims if steps or dim != "S"]

    dims = {name: [dims_of(name)] for name in arrays}
    sizes = check_shapes(arrays, dims)
    S = sizes.get("S", 1)
    most = dict(sequence_lengths=S * shards, segment_lengths=S, slots=sizes.get("P", 0))
    for name in arrays.keys() & most.keys():
        check_indices(name, most[name], arrays[name])
    for name in () if gate.stabilised else ("m_initial", "m"):
        check_zeros(name, arrays.get(name))
    return sizes


# Which values are wrong, and what was expected.
_WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "sequence_lengths": (lambda S, x: (x < 0) | (x > S), "0 to S = {}"),
    "segment_lengths": (
        lambda S, x: (x < 0) | (np.cumsum(x.astype(float), axis=1) > S),
        "0 to S = {}, as all lengths of a row together",
    ),
    "slots": (
        lambda P, x: (
            (x >= P) | (x >= 0) & ~np.isin(np.arange(len(x)), np.unique(x, return_index=True)[1])
        ),
        "-1 for none, or a row below P = {} that no entry before it has",
    ),
}


def checks_indices() -> bool:
    """Whether the host checks indices that are on a device or traced."""
    value = os.environ.get(CHECKS_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise wrong(CHECKS_VARIABLE, value, "0 or 1")
    return value == "1"


def check_indices(name: str, size: int, x: Any) -> None:
    """Checks the values of a NumPy array; with the variable also of others, and waits for them."""
    if isinstance(x, np.ndarray):
        _check_indices(name, size, x)
    elif checks_indices():
        check = functools.partial(_check_indices, name, size)
        if not isinstance(x, jax.core.Tracer):
            return check(_whole(x))
        # A callback runs on process 0 alone, unless every device has the arrays.
        mesh = jax.sharding.get_abstract_mesh()
        everywhere = jax.process_count() > 1 and not (mesh.empty or mesh.manual_axes)
        if everywhere:
            x = lax.with_sharding_constraint(jax.sharding.reshard(x, P()), P())
        jax.debug.callback(check, x, partitioned=everywhere)


def _whole(x: Any) -> Any:
    """An array of several processes, on each of them."""
    if isinstance(x, np.ndarray) or x.is_fully_addressable:
        return x
    return multihost_utils.process_allgather(x, tiled=True)


def _check_indices(name: str, size: int, x: Any) -> None:
    x, (wrong, expected) = np.asarray(x), _WRONG[name]
    for index in np.argwhere(wrong(size, x)).tolist():
        raise ValueError(f"{name}{index} is {x[*index]}, expected {expected.format(size)}")


def check_choice(name: str, x: Any, kind: type[Choice]) -> Choice:
    """x as a member of an enum of strings."""
    if isinstance(x, str) and x in list(kind):
        return kind(x)
    error = ValueError if isinstance(x, str) else TypeError
    raise wrong(name, x, f"one of {', '.join(kind)}", error)


def check_scalar(name: str, x: Any, *, signed: bool = False) -> float:
    """x as a float that is 0 or a normal number in float32; Python's or NumPy's number."""
    is_float = isinstance(x, np.generic) and jnp.issubdtype(x.dtype, jnp.floating)  # bfloat16 too
    if isinstance(x, bool) or not (isinstance(x, numbers.Real) or is_float):
        raise wrong(name, x, "a Python float", TypeError)
    limits = np.finfo(np.float32)
    number: Any = float(x) if is_float else x  # Python's integers may be beyond floats
    size = abs(number) if signed else number
    if number != 0 and not float(limits.tiny) <= size <= float(limits.max):
        limited = f"{limits.tiny!s} to {limits.max!s}, the range of float32"
        raise wrong(name, x, f"0 or a number from {limited}{', or less than 0' * signed}")
    return float(number)


def check_integer(
    name: str,
    x: Any,
    least: int,
    most: float = math.inf,
    *,
    power_of_two: bool = False,
    unit: str = "",
) -> int:
    """x, Python's or NumPy's integer or a concrete JAX scalar, as an int."""
    limits = f">= {least}" if most == math.inf else f"from {least} to {most}"
    expected = f"{'a power of two' if power_of_two else 'an integer'} {limits}{unit}"
    try:
        number = operator.index(x)
    except TypeError:
        raise wrong(name, x, expected) from None
    outside = not least <= number <= most or (power_of_two and not is_power_of_two(number))
    if outside or isinstance(x, bool | np.bool_):
        raise wrong(name, x, expected)
    return number


check_chunk_size = functools.partial(check_integer, least=MIN_CHUNK_SIZE, power_of_two=True)


def check_flag(name: str, x: Any) -> bool:
    if not isinstance(x, bool | np.bool_):
        raise wrong(name, x, "a Python bool", TypeError)
    return bool(x)


def check_backend(name: str, x: Any) -> str | None:
    """x as a backend's name or None. name: of an argument, or the environment variable's."""
    if x is None or (isinstance(x, str) and x in BACKENDS):
        return x
    raise wrong(name, x, "None or " * (name == "backend") + f"one of {', '.join(BACKENDS)}")


def check_axis_name(x: Any) -> None:
    """Accepts an axis of the surrounding shard_map or vmap, and a tuple of several."""
    expected = "a mesh axis of the surrounding jax.shard_map, by its name, or several, each once"
    names = x if isinstance(x, tuple) else (x,)
    if not names or not all(isinstance(name, str) for name in names):
        raise wrong("axis_name", x, expected, TypeError)
    try:
        is_axis = len({*names}) == len(names) and lax.axis_size(x) > 0
    except NameError:
        is_axis = False
    if not is_axis:
        raise wrong("axis_name", x, expected)


def check_instance(name: str, x: Any, kind: type) -> Any:
    if x is not None and not isinstance(x, kind):
        expected = f"a {kind.__name__} or None"
        if (type(x).__module__, type(x).__qualname__) == (kind.__module__, kind.__qualname__):
            expected += " of the same import of mlstm_pallas, which has been imported again"
        raise wrong(name, x, expected, TypeError)
    return x


def check_dtype(
    name: str, x: Any, dtypes: Sequence[str] = KERNEL_DTYPES, backend: str | None = None
) -> jnp.dtype:
    """x as one of the dtypes, or as float64 if the backend computes in it."""
    try:
        # NumPy reads None as float64 and an array as its dtype.
        if x is None or is_array(x):
            raise TypeError
        dtype: jnp.dtype = jnp.dtype(x).newbyteorder("=")
    except (TypeError, ValueError, SyntaxError):  # NumPy parses strings with commas
        raise wrong(name, x, f"one of {', '.join(dtypes)}", TypeError) from None
    return _check_dtype(f"{name} is", dtype, dtypes, backend)


def _check_dtype(
    found: str, dtype: jnp.dtype, dtypes: Sequence[str], backend: str | None
) -> jnp.dtype:
    float64 = dtype == jnp.float64
    computes = backend == "xla" and jax.dtypes.canonicalize_dtype(dtype) == dtype
    if dtype.name not in dtypes and not (float64 and computes):
        expected = "one of " * (len(dtypes) > 1) + ", ".join(dtypes)
        raise TypeError(f"{found} {dtype}, expected {expected}{FLOAT64 * float64}")
    return dtype


def kernel_dtype(
    autocast_kernel_dtype: jnp.dtype | None, q_dtype: Any, backend: str | None
) -> jnp.dtype:
    """The dtype of q, k, v in the matrix products."""
    found, dtype = "autocast_kernel_dtype is", autocast_kernel_dtype
    if dtype is None:
        found, dtype = "q has dtype", jnp.dtype(q_dtype)
    return _check_dtype(found, dtype, KERNEL_DTYPES, backend)
