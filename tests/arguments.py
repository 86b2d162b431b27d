"""What the arguments of the public functions refuse and accept, by their names."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlstm_pallas import KernelConfig

TRACED = jax.ShapeDtypeStruct((), "float32")
TINY, MOST = np.finfo("float32").tiny, np.finfo("float32").max
FLOAT = (TRACED, -1e-6, float("nan"), 1e39, TINY / 2, True, "1", jnp.ones(())), (TINY, MOST)
FLAG = (TRACED, 1, "no"), (np.bool_(True), True)
SIZE = (TRACED, 0, True, 1.5), (1, np.uint8(1))
TILE = (8, 48, 2**17, [64]), (np.uint8(16), 2**16)
# By argument, in lower case: values that are refused, and accepted ones, at the bounds.
OPTIONS = {
    **dict.fromkeys(("eps", "norm_val"), FLOAT),
    "qk_scale": ((TRACED, float("nan"), 1e39, "1"), (-1.0, None)),
    **dict.fromkeys(("return_last_states", "return_all_states", "store_initial_state"), FLAG),
    **dict.fromkeys(("stabilize_correctly", "recompute_states_in_bw", "normalize"), FLAG),
    "chunk_size": ((TRACED, 8, 48, True, 64.0), (16, np.int64(16))),
    "num_chunks": ((TRACED, 0, 2.0), (4, np.uint8(4))),
    "num_segments": ((TRACED, 0, 2**16 - 2, 2.0), (2, np.uint8(2))),
    **dict.fromkeys(("siz_b_lq", "siz_b_lkv", "siz_b_dhqk", "siz_b_dhhv"), TILE),
    "num_warps": ((0, 3, 32), (1, 16)),
    "num_stages": ((0, 9), (1, 8)),
    "num_splits": ((0, 3), (None, 2)),
    "keep_q": FLAG,
    "precision": (("highest",), (None, jax.lax.Precision.HIGH)),
    "fused": ((1,), (False, None)),
    "output_dtype": ((TRACED, None, "int8", "float64"), ("float16", jnp.bfloat16)),
    "autocast_kernel_dtype": ((TRACED, "fp8", "(1,", "int8", np.zeros(1)), ("float16", None)),
    "layout": ((TRACED, "BSNH", 1), ("BNTH", "BNTH")),
    "input_gate": ((TRACED, "relu", 1), ("exp", "exp")),
    "backend": ((TRACED, "cuda", np.zeros(2)), (None, "xla")),
    "config": (({},), (KernelConfig(), None)),
    "axis_name": ((0, ["s"], (), "t", ("s", "s")), ("s", ("s",))),
    **dict.fromkeys(("b", "nh", "s", "dhqk", "dhv"), SIZE),
    "dtype": (("float64", None), ("float16", jnp.bfloat16)),
    "gpu": (("NVIDIA FOO", 3, None), ("NVIDIA H200", "NVIDIA L4")),
    "platform": (("gpu", [3], ()), ("cpu", ["cpu"])),
    "device_kind": (("NVIDIA FOO", 3), (None, "cpu")),
    "lengths": ((3, [], [[], []], [1.5], [[1], 2], [3, -1], TRACED), ([0], [[3], [2, 0]])),
}
# Arrays whose sizes others have to have: their messages name those.
FIRST = {"q", "v", "matQ", "matK", "matV", "matDeltaH"}


def shapes_of(function, arguments):
    """Traces function: shapes are arrays, the rest is static."""
    traced = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    return jax.eval_shape(lambda **x: function(**arguments | x), **traced)


def wrong_arrays(x):
    """Arrays of another dtype, or with an axis more, or longer."""
    integer = jnp.issubdtype(x.dtype, jnp.integer)
    yield jax.ShapeDtypeStruct(x.shape, "float32" if integer else "int32")
    yield [0.0]
    yield jax.ShapeDtypeStruct((*x.shape, 1), x.dtype)
    for longer in np.eye(x.ndim, dtype=int):
        yield jax.ShapeDtypeStruct((*np.add(x.shape, longer).tolist(),), x.dtype)


def check_arguments(function, good, prefix=""):
    """A wrong argument is refused by its name; all are accepted at their bounds.

    good: all arguments; shapes are arrays. prefix: of the names in messages.
    """
    for name, x in good.items():
        is_array = name.lower() not in OPTIONS
        for y in wrong_arrays(x) if is_array else OPTIONS[name.lower()][0]:
            with pytest.raises((TypeError, ValueError)) as error:
                function(**good | {name: y})
            named = r"\w+" if name in FIRST and hasattr(y, "shape") else re.escape(prefix + name)
            assert re.match(rf"{named} (is|has) .*, expected ", str(error.value))
    for bound in (0, 1):
        options = (name for name in good if name.lower() in OPTIONS)
        function(**good | {name: OPTIONS[name.lower()][1][bound] for name in options})
