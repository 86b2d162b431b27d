"""Messages of layouts, arrays that are none, dtypes and scalars beyond float32; the doors that a plain import opens."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlstm_pallas
from mlstm_pallas import mlstm_chunkwise, mlstm_recurrent_step, reference, use_backend
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel

B, NH, S, DHQK, DHV = 2, 3, 40, 16, 24
TRAILING = dict(q=(DHQK,), k=(DHQK,), v=(DHV,), i=(), f=())
STATES = dict(c_initial=(B, NH, DHQK, DHV), n_initial=(B, NH, DHQK), m_initial=(B, NH))


def arrays(layout="BNTH", dtype="float32", states=False, **changed):
    lead = (B, NH, S) if layout == "BNTH" else (B, S, NH)
    made = {name: jnp.zeros((*lead, *shape), dtype if name in "qkv" else "float32") for name, shape in TRAILING.items()}
    return made | ({name: jnp.zeros(shape) for name, shape in STATES.items()} if states else {}) | changed


class Param:
    """What a parameter of a module looks like: an array behind an attribute."""

    def __init__(self, value):
        self.value = value


class Foreign:
    """An array of another library."""

    shape, dtype = (B, NH, S, DHQK), "float32"


SWAPPED = (
    "{name} has shape {came}, expected ({axes}) = {expected}, as q has shape {q}: axes 1 and 2 are swapped; "
    'layout="{other}" has them so for all of q, k, v, i, f'
)
OF_BTNH = dict(came=(B, NH, S), axes="B, S, NH", expected=(B, S, NH), q=(B, S, NH, DHQK), other="BNTH")
OF_BNTH = dict(came=(B, S, NH), axes="B, NH, S", expected=(B, NH, S), q=(B, NH, S, DHQK), other="BTNH")
ONE_BY_ONE = "c_initial is a {}, expected an array: pass the states one by one"
WITHOUT_X64 = "; float64 runs on backend=\"xla\" only: cast q, k and v to float32, or set autocast_kernel_dtype"

# case: (arguments, error, whole message)
CASES = {
    "layout_unknown": (arrays() | {"layout": "BSNH"}, ValueError, "layout is 'BSNH', expected one of BNTH, BTNH"),
    "layout_lower_case": (arrays() | {"layout": "btnh"}, ValueError, "layout is 'btnh', expected one of BNTH, BTNH"),
    "layout_none": (arrays() | {"layout": None}, ValueError, "layout is None, expected one of BNTH, BTNH"),
    "layout_list": (arrays() | {"layout": ["BNTH"]}, ValueError, "layout is ['BNTH'], expected one of BNTH, BTNH"),
    "i_of_BNTH": (
        arrays("BTNH", i=jnp.zeros((B, NH, S))) | {"layout": "BTNH"},
        ValueError,
        SWAPPED.format(name="i", **OF_BTNH),
    ),
    "f_of_BNTH": (
        arrays("BTNH", f=jnp.zeros((B, NH, S))) | {"layout": "BTNH"},
        ValueError,
        SWAPPED.format(name="f", **OF_BTNH),
    ),
    "i_of_BTNH": (arrays(i=jnp.zeros((B, S, NH))), ValueError, SWAPPED.format(name="i", **OF_BNTH)),
    "both_gates_of_BTNH": (
        arrays(i=jnp.zeros((B, S, NH)), f=jnp.zeros((B, S, NH))),
        ValueError,
        SWAPPED.format(name="i", **OF_BNTH),
    ),
    "k_of_BNTH": (
        arrays("BTNH", k=jnp.zeros((B, NH, S, DHQK))) | {"layout": "BTNH"},
        ValueError,
        "k has shape (2, 3, 40, 16), expected (B, S, NH, DHQK) = (2, 40, 3, 16), as q has shape (2, 40, 3, 16)",
    ),
    "states_of_another_number_of_heads": (
        arrays("BTNH", states=True, m_initial=jnp.zeros((B, S))) | {"layout": "BTNH"},
        ValueError,
        "m_initial has shape (2, 40), expected (B, NH) = (2, 3), as q has shape (2, 40, 3, 16)",
    ),
    "segment_ids_of_the_heads": (
        arrays("BTNH", segment_ids=jnp.zeros((B, NH), "int32")) | {"layout": "BTNH"},
        ValueError,
        "segment_ids has shape (2, 3), expected (B, S) = (2, 40), as q has shape (2, 40, 3, 16)",
    ),
    "states_in_a_tuple": (arrays(c_initial=tuple(jnp.zeros(x) for x in STATES.values())), ValueError, ""),
    "parameter": (arrays(k=Param(jnp.zeros((B, NH, S, DHQK)))), TypeError, "k is a Param, expected an array: pass its value"),
    "foreign_array": (arrays(q=Foreign()), TypeError, "q is a Foreign, expected an array"),
    "shape": (
        arrays(v=jax.ShapeDtypeStruct((B, NH, S, DHV), "float32")),
        TypeError,
        "v is a ShapeDtypeStruct, expected an array",
    ),
    "list": (arrays(v=[[1.0]]), TypeError, "v is a list, expected an array"),
    "float64_without_x64": (
        {name: np.zeros(x.shape) for name, x in arrays().items()},
        TypeError,
        "q has dtype float64, expected one of float32, bfloat16, float16" + WITHOUT_X64,
    ),
    "input_gate_an_array": (
        arrays(input_gate=jnp.zeros((B, NH, S))),
        TypeError,
        "input_gate is a ArrayImpl, expected one of exp, sigmoid",
    ),
    "eps_beyond_float32": (arrays(eps=1e39), ValueError, "eps is 1e+39, expected a number in the range of float32"),
    "norm_val_beyond_float32": (arrays(norm_val=1e39), ValueError, "norm_val is 1e+39, expected a number in the range of float32"),
    "dtypes_that_differ": (
        arrays(v=jnp.zeros((B, NH, S, DHV), "bfloat16")),
        TypeError,
        "v has dtype bfloat16, expected float32, the dtype of q",
    ),
}
