"""Messages of layouts, arrays that are none, dtypes and scalars beyond float32; the doors that a plain import opens."""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

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
WITHOUT_X64 = '; float64 runs on backend="xla" only: cast q, k and v to float32, or set autocast_kernel_dtype'

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
    "states_in_a_tuple": (
        arrays(states=True, c_initial=tuple(map(jnp.zeros, STATES.values()))),
        TypeError,
        ONE_BY_ONE.format("tuple"),
    ),
    "states_in_a_tuple_alone": (arrays(c_initial=tuple(map(jnp.zeros, STATES.values()))), TypeError, ONE_BY_ONE.format("tuple")),
    "states_in_a_list": (
        arrays(states=True, c_initial=list(map(jnp.zeros, STATES.values()))),
        TypeError,
        ONE_BY_ONE.format("list"),
    ),
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


@pytest.mark.parametrize("case", CASES)
def test_messages(case):
    arguments, kind, message = CASES[case]
    with pytest.raises(kind) as caught:
        mlstm_chunkwise(**arguments)
    assert str(caught.value) == message


def test_the_plain_function_checks_the_layout_alike():
    arguments, kind, message = CASES["f_of_BNTH"]
    with pytest.raises(kind) as caught:
        reference.chunkwise(**arguments)
    assert str(caught.value) == message


def test_sequence_parallelism_checks_the_layout_alike():
    """The shapes in the message are those of a shard."""
    mesh = jax.make_mesh((2,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    run = functools.partial(mlstm_chunkwise_sequence_parallel, axis_name="s", layout="BTNH")
    split = jax.shard_map(run, mesh=mesh, in_specs=(P(None, "s"),) * 3 + (P(None, None, "s"),) * 2, out_specs=P(None, "s"))
    x = arrays("BTNH") | {name: jnp.zeros((B, NH, S)) for name in "if"}
    of_a_shard = OF_BTNH | dict(came=(B, NH, S // 2), expected=(B, S // 2, NH), q=(B, S // 2, NH, DHQK))
    message = re.escape(SWAPPED.format(name="i", **of_a_shard))
    with pytest.raises(ValueError, match=f"^{message}(\\n|$)"):
        jax.eval_shape(split, *x.values())


def test_square_gates_fit_both_layouts():
    """Where S = NH nothing tells the layouts apart."""
    x = {name: jnp.zeros((1, 2, 2, *shape)) for name, shape in TRAILING.items()}
    shapes = {layout: jax.eval_shape(functools.partial(mlstm_chunkwise, layout=layout), **x).shape for layout in ("BNTH", "BTNH")}
    assert set(shapes.values()) == {(1, 2, 2, DHV)}


def test_eps_may_be_the_largest_float32():
    largest = float(np.finfo("float32").max)
    assert jax.eval_shape(functools.partial(mlstm_chunkwise, eps=largest, norm_val=largest), **arrays()).shape == (B, NH, S, DHV)


def test_arrays_of_different_dtypes_are_taken_where_the_kernel_dtype_is_given():
    mixed = arrays(k=jnp.ones((B, NH, S, DHQK), "bfloat16"), v=jnp.ones((B, NH, S, DHV), "float16"))
    h = jax.eval_shape(functools.partial(mlstm_chunkwise, autocast_kernel_dtype="bfloat16"), **mixed)
    assert h.dtype == jnp.float32  # that of q


@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "unnormalised"])
def test_last_states_of_the_sigmoid_gate_are_taken_as_initial_ones(normalize):
    x = arrays()
    x["v"] = x["v"] + 1.0
    run = jax.jit(functools.partial(mlstm_chunkwise, input_gate="sigmoid", normalize=normalize, return_last_states=True))
    _, (c, n, m) = run(**x)
    assert not m.any()
    with_m, without = run(**x, c_initial=c, n_initial=n, m_initial=m), run(**x, c_initial=c, n_initial=n)
    ignored = run(**x, c_initial=c, n_initial=n, m_initial=m + 3.0)  # m is 0 whatever is given
    for a, b, d in zip(*map(jax.tree.leaves, (with_m, without, ignored)), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
        assert np.array_equal(np.asarray(a), np.asarray(d))


FORWARD_MODE = (
    "mlstm_chunkwise has first derivatives in reverse mode only; for second derivatives and forward mode use "
    "mlstm_pallas.reference.chunkwise or mlstm_pallas.reference.recurrence"
)


def test_forward_mode_is_refused_by_name():
    x = arrays()
    with pytest.raises(TypeError) as caught:
        jax.jvp(lambda q: mlstm_chunkwise(**x | {"q": q}), (x["q"],), (x["q"],))
    assert str(caught.value) == FORWARD_MODE


@pytest.mark.parametrize("layout", ["BNTH", "BTNH"])
def test_the_plain_function_takes_the_call_as_it_is(layout):
    """Forward mode, and S no multiple of the chunk."""
    x = arrays(layout, states=True)
    options = dict(chunk_size=16, return_last_states=True, layout=layout, backend="interpret", segment_ids=jnp.zeros((B, S), "int32"))
    expected = jax.eval_shape(functools.partial(mlstm_chunkwise, **options), **x)
    h, tangent = jax.eval_shape(lambda x: jax.jvp(lambda x: reference.chunkwise(**x, **options), (x,), (x,)), x)
    assert h == tangent == expected


@pytest.mark.parametrize("module", ["distributed", "export", "reference", "xlstm_jax"])
def test_modules_are_attributes_that_are_imported_when_asked_for(module):
    program = f"import sys, mlstm_pallas\nbefore = 'mlstm_pallas.{module}' in sys.modules\nprint(before, mlstm_pallas.{module}.__name__)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert out == ["False", f"mlstm_pallas.{module}"]


def test_an_attribute_that_is_none():
    with pytest.raises(AttributeError) as caught:
        mlstm_pallas.no_such_module  # noqa: B018
    assert str(caught.value) == "module 'mlstm_pallas' has no attribute 'no_such_module'"


def test_use_backend_that_is_never_entered_warns():
    message = r"^use_backend\('interpret'\) did nothing: it is for a with statement$"
    with pytest.warns(RuntimeWarning, match=message):
        use_backend("interpret")
    with use_backend("xla"):  # and one that is entered does not
        pass


def test_messages_of_a_step():
    token = {name: jnp.zeros((B, NH, *shape)) for name, shape in TRAILING.items()}
    with pytest.raises(TypeError) as caught:
        mlstm_recurrent_step(**token | {"k": Param(token["k"])})
    assert str(caught.value) == "k is a Param, expected an array: pass its value"
    with pytest.raises(TypeError) as caught:
        mlstm_recurrent_step(**token, c=(1, jnp.zeros(1)), n=token["q"], m=token["i"])
    assert str(caught.value) == "c is a tuple, expected an array: pass the states one by one"
    with pytest.raises(ValueError, match=r"^eps is 1e\+39, expected a number in the range of float32$"):
        mlstm_recurrent_step(**token, eps=1e39)
    with pytest.raises(TypeError, match=r"^input_gate is a ArrayImpl, expected one of exp, sigmoid$"):
        mlstm_recurrent_step(**token, input_gate=jnp.zeros(3))
