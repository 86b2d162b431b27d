"""The table of arguments: what each refuses and accepts in every public function."""

import inspect
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlstm_pallas import KernelConfig

LIMITS = np.finfo("float32")
TRACED = jax.ShapeDtypeStruct((), "float32")


class Option(NamedTuple):
    """An argument that is no array."""

    expected: str  # by messages; a regular expression
    accepted: Sequence[object]  # two values at its bounds
    type_errors: Sequence[object] = ()  # values that raise them
    value_errors: Sequence[object] = ()


def options(names, *args, **kwargs):
    """The same of several arguments, by name."""
    return dict.fromkeys(names.split(), Option(*args, **kwargs))


OPTIONS = {
    **options(
        "eps norm_val",
        "a Python float|0 or a number from 1.17.* to 3.40.*, the range of",
        accepted=[LIMITS.tiny, LIMITS.max],
        type_errors=[TRACED, True, "1", jnp.ones(())],
        value_errors=[-1e-6, np.nan, 1e39, LIMITS.tiny / 2],
    ),
    **options(
        "qk_scale",
        "a Python float|0 or a number from 1.17.* to 3.40.*, the range of",
        accepted=[-1.0, None],
        type_errors=[TRACED, True, "1"],
        value_errors=[np.nan, 1e39, LIMITS.tiny / 2],
    ),
    **options(
        "return_last_states return_all_states store_initial_state stabilize_correctly normalize "
        "keep_q recompute_states_in_bw",
        "a Python bool",
        accepted=[np.bool_(True), True],
        type_errors=[TRACED, 1, "no"],
    ),
    **options(
        "reverse",
        "a Python bool",
        accepted=[np.bool_(False), False],
        type_errors=[TRACED, 1, "no"],
    ),
    **options(
        "chunk_size",
        "a power of two >= 16",
        accepted=[16, np.int64(16)],
        type_errors=[TRACED],
        value_errors=[8, 48, True, 64.0],
    ),
    **options(
        "num_segments",  # of a plan
        "an integer >= 1",
        accepted=[2, np.uint8(2)],
        type_errors=[TRACED],
        value_errors=[0, 2.0],
    ),
    **options(
        "num_chunks",
        "an integer >= 1",
        accepted=[4, np.uint8(4)],
        type_errors=[TRACED],
        value_errors=[0, 2.0],
    ),
    **options(
        "b nh s dhqk dhv",
        "an integer >= 1",
        accepted=[1, np.uint8(1)],
        type_errors=[TRACED],
        value_errors=[0, True, 1.5],
    ),
    **options(
        "siz_b_lq siz_b_lkv siz_b_dhqk siz_b_dhhv",
        "a power of two from 16 to 65536",
        accepted=[np.uint8(16), 2**16],
        value_errors=[8, 48, 2**17, [64]],
    ),
    **options(
        "num_warps", "a power of two from 1 to 16", accepted=[1, 16], value_errors=[0, 3, 32]
    ),
    **options("num_stages", "an integer from 1 to 8", accepted=[1, 8], value_errors=[0, 9]),
    **options("num_splits", "a power of two >= 1", accepted=[None, 2], value_errors=[0, 3]),
    **options(
        "precision",
        "None, a jax.lax.Precision or a jax.lax.DotAlgorithmPreset",
        accepted=[None, jax.lax.Precision.HIGH],
        type_errors=["highest"],
    ),
    **options("fused", "None, True or False", accepted=[False, None], type_errors=[1]),
    **options(
        "output_dtype",
        "one of float32, bfloat16, float16",
        accepted=["float16", jnp.bfloat16],
        type_errors=[TRACED, None, "int8", "float64"],
    ),
    **options(
        "autocast_kernel_dtype state_dtype",
        "one of float32, bfloat16, float16",
        accepted=["float16", None],
        type_errors=[TRACED, "fp8", "(1,", "int8", np.zeros(1)],
    ),
    **options(
        "dtype",
        "one of float32, bfloat16, float16",
        accepted=["float16", jnp.bfloat16],
        type_errors=[TRACED, "float64", None],
    ),
    **options(
        "layout",
        "one of BNTH, BTNH",
        accepted=["BNTH", None],
        type_errors=[TRACED, 1],
        value_errors=["BSNH"],
    ),
    **options(
        "input_gate",
        "one of exp, sigmoid",
        accepted=["exp", "exp"],
        type_errors=[TRACED, 1],
        value_errors=["relu"],
    ),
    **options(
        "backend",
        "None or one of triton, mosaic_gpu, interpret, xla, fastest",
        accepted=[None, "xla"],
        type_errors=[TRACED],
        value_errors=["cuda", np.zeros(2)],
    ),
    **options(
        "config",
        "a KernelConfig or None",
        accepted=[KernelConfig(), None],
        type_errors=[TRACED, {}],
    ),
    **options(
        "axis_name",
        "a mesh axis of the surrounding jax.shard_map",
        accepted=["s", ("s",)],
        type_errors=[TRACED, 0, ["s"], ()],
        value_errors=["t", ("s", "s")],
    ),
    **options(
        "gpu",
        "(the device_kind of a known GPU, such as|a name like) 'NVIDIA H200'",
        accepted=["NVIDIA H200", "NVIDIA L4"],
        value_errors=["NVIDIA FOO", 3, None],
    ),
    **options(
        "platform",
        "one of cpu, cuda; two are two exports",
        accepted=["cpu", "cpu"],
        value_errors=["gpu", 3, ("cpu", "cuda")],
    ),
    **options(
        "device_kind",
        "the name of a known NVIDIA GPU, such as",
        accepted=[None, "cpu"],
        value_errors=["NVIDIA FOO", 3],
    ),
}


class Foreign:
    """An array of another library."""

    shape, dtype = (2, 3), "float32"


NO_ARRAYS = [0.0], Foreign(), np.ma.zeros(3)
# Arrays whose sizes others have to have: messages may name those.
FIRST = {"q", "v", "matQ", "matK", "matV", "matDeltaH", "states.c", "states.k"}


def option(name):
    """That of an argument, in any case; None: an array."""
    return OPTIONS.get(name.lower())


def accepted(names, arrays=(), bound=0):
    """Accepted arguments; arrays by name."""
    return {x: arrays[x] if x in arrays else option(x).accepted[bound] for x in names}


def bad_options(name):
    """Kinds of errors, values, and what messages say of them."""
    row = option(name)
    for kind, values in (TypeError, row.type_errors), (ValueError, row.value_errors):
        for x in values:
            came = [re.escape(y) for y in (repr(x), str(x), f"a {type(x).__name__}")]
            if hasattr(x, "shape"):
                came += "traced", r"a jax\.Array", r"an array of shape \(\d*,?\)", r"\w+Tracer\("
            yield kind, x, f"is ({'|'.join(came)}).*, expected ({row.expected})"


HOST = "is in host memory, expected device memory: jax.device_put({}, "


def on_host(x):
    """Zeros of a shape in the host's memory."""
    return jax.device_put(np.zeros(x.shape, x.dtype), jax.memory.Space.Host)


def is_on_host(x):
    return isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host


def bad_arrays(x):
    """No arrays, the host's memory, another byte order, other dtypes, an axis more, and each axis
    longer by one."""
    for y in NO_ARRAYS:
        yield TypeError, y, f"has type {type(y).__name__}, expected an array( \\(B.*|$)"
    swapped = np.zeros(x.shape, np.dtype(x.dtype).newbyteorder())
    if not swapped.dtype.isnative:
        yield TypeError, swapped, f"has dtype {swapped.dtype}, expected the byte order of"
    yield ValueError, on_host(x), re.escape(HOST).replace(r"\{\}", r"\w+")
    integer = jnp.issubdtype(x.dtype, jnp.integer)
    for dtype in ("float32", "bool") if integer else ("int32",):
        expected = "(an integer dtype|int32)" if integer else "(one of )?float"
        yield TypeError, x.update(dtype=dtype), f"has dtype {dtype}, expected {expected}"
    longer = (tuple(np.add(x.shape, y).tolist()) for y in np.eye(x.ndim, dtype=int))
    for shape in ((*x.shape, 1), *longer):
        said = rf"has shape {re.escape(str(shape))}, expected \([BP]"
        yield ValueError, x.update(shape=shape), said


def trace(function, arguments):
    """Traces a call inside a vmap whose axis is s; shapes and what is in the host's memory are
    arrays, the rest is static."""
    arrays = {
        name: x
        for name, x in arguments.items()
        if isinstance(x, jax.ShapeDtypeStruct) or is_on_host(x)
    }

    def call(arrays):
        function(**arguments | arrays)  # may return anything

    jax.eval_shape(lambda x: jax.vmap(lambda _: call(x), axis_name="s")(jnp.zeros(1)), arrays)


def check_arguments(function, good, prefix=""):
    """A wrong argument raises an error of its kind that says its name, what came and what was
    expected; all arguments are accepted at both bounds.

    good: all arguments; shapes are arrays. prefix: of the names in messages.
    """
    for name, x in good.items():
        for kind, y, message in bad_options(name) if option(name) else bad_arrays(x):
            with pytest.raises((TypeError, ValueError)) as error:
                trace(function, good | {name: y})
            message = f"{re.escape(prefix + name)} {message}"
            if name in FIRST and kind is ValueError:
                message += r"|\S+ has shape .*, expected \([BP]"
            assert error.type is kind, name
            assert re.match(message, str(error.value))
    for bound in 0, 1:
        trace(function, good | accepted(filter(option, good), bound=bound))


# The arrays of the documented stages, behind B and NH.
STAGE_DIMS = """
matQ matK: S DHQK
matV matDeltaH: S DHV
matC_initial matDeltaC_last: DHQK DHV
vecN_initial: DHQK
scaM_initial scaMinter_initial:
vecI vecF vecA vecB: NC L
vecN_out vecM vecM_out vecM_combine: S
matC_states matC_all matDeltaC_states: ROWS DHV
vecN_states vecN_all: ROWS
scaM_states scaM_all scaM_inter scaMinter_states: BOUNDARIES
"""


def stage_arrays(function, NC=4, L=16, DHQK=24, DHV=40):
    """The arrays of a documented function by name, as shapes."""
    sizes = dict(NC=NC, L=L, S=NC * L, DHQK=DHQK, DHV=DHV, ROWS=(NC + 1) * DHQK)
    sizes["BOUNDARIES"] = NC + 1
    lines = (line.split(":") for line in STAGE_DIMS.strip().splitlines())
    dims = {name: dims for names, dims in lines for name in names.split()}
    whole, v5 = "__" not in function.__name__, function.__module__.endswith("v5xlchunksize")
    # A whole pass has pre-activations.
    dims |= dict.fromkeys(["vecI"] * whole + ["vecF"] * (whole or v5), "S")
    return {
        name: jax.ShapeDtypeStruct((1, 2, *(sizes[x] for x in dims[name].split())), "float32")
        for name in inspect.signature(function).parameters
        if name in dims
    }
