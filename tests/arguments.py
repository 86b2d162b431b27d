"""The table of arguments: what each refuses and accepts in every public function."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlstm_pallas import KernelConfig  # noqa: F401, the table has it

LIMITS = np.finfo("float32")
TRACED = jax.ShapeDtypeStruct((), "float32")
# Of arguments that are no arrays: the values that raise a TypeError or a ValueError, two accepted
# values at the bounds, and what messages expect, as a regular expression.
TABLE = """
eps norm_val
  TypeError TRACED, True, "1", jnp.ones(())
  ValueError -1e-6, np.nan, 1e39, LIMITS.tiny / 2
  accepted LIMITS.tiny, LIMITS.max
  expected a Python float|0 or a number from 1.17.* to 3.40.*, the range of

qk_scale
  TypeError TRACED, True, "1"
  ValueError np.nan, 1e39, LIMITS.tiny / 2
  accepted -1.0, None
  expected a Python float|0 or a number from 1.17.* to 3.40.*, the range of

return_last_states return_all_states store_initial_state stabilize_correctly normalize keep_q \
recompute_states_in_bw
  TypeError TRACED, 1, "no"
  accepted np.bool_(True), True
  expected a Python bool

reverse
  TypeError TRACED, 1, "no"
  accepted np.bool_(False), False
  expected a Python bool

chunk_size
  TypeError TRACED
  ValueError 8, 48, True, 64.0
  accepted 16, np.int64(16)
  expected a power of two >= 16

num_segments
  TypeError TRACED
  ValueError 0, 2.0, 2**16 - 2
  accepted 2, np.uint8(2)
  expected an integer (from 1|>= 1)|at most 65533, the limit of a kernel's grid, or backend 'xla'

num_chunks
  TypeError TRACED
  ValueError 0, 2.0
  accepted 4, np.uint8(4)
  expected an integer >= 1

b nh s dhqk dhv
  TypeError TRACED
  ValueError 0, True, 1.5
  accepted 1, np.uint8(1)
  expected an integer >= 1

siz_b_lq siz_b_lkv siz_b_dhqk siz_b_dhhv
  ValueError 8, 48, 2**17, [64]
  accepted np.uint8(16), 2**16
  expected a power of two from 16 to 65536

num_warps
  ValueError 0, 3, 32
  accepted 1, 16
  expected a power of two from 1 to 16

num_stages
  ValueError 0, 9
  accepted 1, 8
  expected an integer from 1 to 8

num_splits
  ValueError 0, 3
  accepted None, 2
  expected a power of two >= 1

precision
  TypeError "highest"
  accepted None, jax.lax.Precision.HIGH
  expected None, a jax.lax.Precision or a jax.lax.DotAlgorithmPreset

fused
  TypeError 1
  accepted False, None
  expected None, True or False

output_dtype
  TypeError TRACED, None, "int8", "float64"
  accepted "float16", jnp.bfloat16
  expected one of float32, bfloat16, float16

autocast_kernel_dtype state_dtype
  TypeError TRACED, "fp8", "(1,", "int8", np.zeros(1)
  accepted "float16", None
  expected one of float32, bfloat16, float16

dtype
  TypeError TRACED, "float64", None
  accepted "float16", jnp.bfloat16
  expected one of float32, bfloat16, float16

layout
  TypeError TRACED, 1
  ValueError "BSNH"
  accepted "BNTH", "BNTH"
  expected one of BNTH, BTNH

input_gate
  TypeError TRACED, 1
  ValueError "relu"
  accepted "exp", "exp"
  expected one of exp, sigmoid

backend
  TypeError TRACED
  ValueError "cuda", np.zeros(2)
  accepted None, "xla"
  expected None or one of triton, mosaic_gpu, interpret, xla, fastest

config
  TypeError TRACED, {}
  accepted KernelConfig(), None
  expected a KernelConfig or None

axis_name
  TypeError TRACED, 0, ["s"], ()
  ValueError "t", ("s", "s")
  accepted "s", ("s",)
  expected a mesh axis of the surrounding jax.shard_map

gpu
  ValueError "NVIDIA FOO", 3, None
  accepted "NVIDIA H200", "NVIDIA L4"
  expected (the device_kind of a known GPU, such as|a name like) 'NVIDIA H200'

platform
  ValueError "gpu", [3], ()
  accepted "cpu", ["cpu"]
  expected one of cpu, cuda, or a sequence of them

device_kind
  ValueError "NVIDIA FOO", 3
  accepted None, "cpu"
  expected None or the device_kind of an NVIDIA GPU from compute capability 8.0, such as

lengths
  TypeError TRACED, 3, [1.5], [[1], 2]
  ValueError [], [[], []], [3, -1]
  accepted [0], [[1], [1, 0]]
  expected the steps of each prompt, integers >= 0, of one row or of each of several
"""
OPTIONS = {}
for names, *lines in (block.strip().splitlines() for block in TABLE.split("\n\n")):
    row = dict(line.split(maxsplit=1) for line in lines)
    OPTIONS |= dict.fromkeys(names.split(), row)


class Foreign:
    """An array of another library."""

    shape, dtype = (2, 3), "float32"


NO_ARRAYS = [0.0], Foreign(), np.ma.zeros(3)
# Arrays whose sizes others have to have: messages may name those.
FIRST = {"q", "v", "matQ", "matK", "matV", "matDeltaH"}


def option(name):
    """The row of an argument, in any case; None: an array."""
    return OPTIONS.get(name.lower())


def values_of(name, column):
    return eval(f"[{option(name).get(column, '')}]")


def accepted(names, arrays=(), bound=0):
    """Accepted arguments; arrays by name."""
    return {x: arrays[x] if x in arrays else values_of(x, "accepted")[bound] for x in names}


def bad_options(name):
    """Kinds of errors, values, and what messages say of them."""
    for kind in TypeError, ValueError:
        for x in values_of(name, kind.__name__):
            came = [re.escape(y) for y in (repr(x), str(x), f"a {type(x).__name__}")]
            if hasattr(x, "shape"):
                came += "traced", r"a jax\.Array", r"an array of shape \(\d*,?\)", r"\w+Tracer\("
            yield kind, x, f"is ({'|'.join(came)}).*, expected ({option(name)['expected']})"


def bad_arrays(x):
    """No arrays, other dtypes, an axis more, and each axis longer by one."""
    for y in NO_ARRAYS:
        yield TypeError, y, f"is a {type(y).__name__}, expected an array$"
    integer = jnp.issubdtype(x.dtype, jnp.integer)
    for dtype in ("float32", "bool") if integer else ("int32",):
        expected = "an integer dtype" if integer else "one of float"
        yield TypeError, x.update(dtype=dtype), f"has dtype {dtype}, expected {expected}"
    longer = (tuple(np.add(x.shape, y).tolist()) for y in np.eye(x.ndim, dtype=int))
    for shape in ((*x.shape, 1), *longer):
        said = rf"has shape {re.escape(str(shape))}, expected \(B"
        yield ValueError, x.update(shape=shape), said


def trace(function, arguments):
    """Traces a call inside a vmap whose axis is s; shapes are arrays, the rest is static."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}

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
                message += r"|\w+ has shape .*, expected \(B"
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
