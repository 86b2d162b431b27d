"""Every bad call says, in one whole sentence, which argument is wrong, what came and what was
expected. A plain import loads what it should."""

import inspect
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arguments import OPTIONS, check_arguments, shapes_of
from oracle import PUBLIC, assert_same_bits, refused, run_python

import mlstm_pallas
from mlstm_pallas import (
    KernelConfig,
    export,
    mlstm_chunkwise,
    mlstm_recurrent_sequence,
    mlstm_recurrent_step,
    pack_lengths,
    plan,
    reference,
    use_backend,
)
from mlstm_pallas.planning import dispatch
from mlstm_pallas.problem import validation
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.problem.gpu import UNKNOWN
from mlstm_pallas.triton import parallel_fw_H
from mlstm_pallas.xlstm_jax import triton_stablef

B, NH, S, DHQK, DHV = 2, 3, 40, 16, 24
TRAILING = dict(q=(DHQK,), k=(DHQK,), v=(DHV,), i=(), f=())
Q = "as q has shape (2, 3, 40, 16)"
KERNEL_DTYPES = "float32, bfloat16, float16"
BACKENDS = "expected None or one of triton, mosaic_gpu, interpret, mosaic_gpu_interpret, xla"


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def inputs(*lead):
    return {name: array(*lead, *shape) for name, shape in TRAILING.items()}


PLAIN, BTNH, TOKEN = inputs(B, NH, S), inputs(B, S, NH), inputs(B, NH)
STATES = dict(c=array(B, NH, DHQK, DHV), n=array(B, NH, DHQK), m=array(B, NH))
INITIAL = {f"{name}_initial": x for name, x in STATES.items()}
ARRAYS = PLAIN | INITIAL
SEGMENTS = dict(num_segments=2, segment_ids=array(B, S, dtype="int32"), return_last_states=True)


def zeros(arrays):
    return {name: np.zeros(x.shape, x.dtype) for name, x in arrays.items()}


PLANNED = parallel_fw_H.Tiles.plan(
    Problem(2, 3, 64, 192, 32, 64, 1.0), np.dtype("float32"), UNKNOWN
)


config = partial(partial, KernelConfig)  # a call of it


def tiles(**fields):
    """A call of KernelConfig with tiles of a kernel."""
    return config(fused=False, triton_parallel_fw_H=fields)


class Param:
    """What a parameter of a module looks like: an array behind an attribute."""

    value = np.zeros((B, NH, S, DHQK))


class Variable:
    """What a variable of flax.nnx looks like: its value is deprecated."""

    def __getitem__(self, index):
        return Param.value[index]

    @property
    def value(self):
        warnings.warn("'.value' access is now deprecated", DeprecationWarning, stacklevel=2)
        return Param.value


class Foreign:
    """An array of another library."""

    shape, dtype = (B, NH, S, DHQK), "float32"


def of_step(**changed):
    """A call of mlstm_recurrent_step with changed arguments."""
    return partial(mlstm_recurrent_step, **zeros(TOKEN | STATES) | changed)


def traced(**options):
    """A call of mlstm_chunkwise whose options are traced."""
    return partial(jax.eval_shape, partial(mlstm_chunkwise, **zeros(PLAIN)), **options)


STATIC = "mark it static in jit"
NORMAL = "expected 0 or a number from 1.1754944e-38 to 3.4028235e+38, the range of float32"
TILED = "config.triton_parallel_fw_H"
SWAPPED = (
    "i has shape (2, 3, 40), expected (B, S, NH) = (2, 40, 3), as q has shape (2, 40, 3, 16): "
    'axes 1 and 2 are swapped; layout="BNTH" has them so for all of q, k, v, i, f'
)
FLOAT64 = '; float64 needs backend="xla" and jax_enable_x64'
OPTIONAL = SEGMENTS | dict(sequence_lengths=array(B, dtype="int32"))


def arguments_of(function, arrays=(), without=()):
    """All arguments of a function, in shapes and at their bounds."""
    names = [x for x in inspect.signature(function).parameters if x not in without]
    return {x: arrays[x] if x in arrays else OPTIONS[x.lower()][1][0] for x in names}


def on_an_axis(function):
    """A call inside a vmap whose axis is s."""
    return lambda **x: jax.vmap(lambda _: function(**x), axis_name="s")(jnp.zeros(1))


# The recurrence does not check its arguments.
ENTRY = triton_stablef.mlstm_chunkwise_triton_stablef


@pytest.mark.parametrize("function", [*PUBLIC[:-1], ENTRY])
def test_every_argument_is_refused_by_name_and_accepted_at_its_bounds(function):
    arrays = {mlstm_recurrent_step: TOKEN | STATES, mlstm_recurrent_sequence: PLAIN | STATES}
    ignored = "recompute_states_in_bw", "backend"
    good = arguments_of(
        function,
        arrays.get(function, ARRAYS | OPTIONAL),
        ignored if function is reference.chunkwise else (),
    )
    check_arguments(lambda **x: shapes_of(on_an_axis(function), x), good)


def test_arguments_without_arrays_are_refused_by_name_and_accepted_at_their_bounds():
    """Of plans, configs, exports, packed prompts and the generator of xlstm_jax."""
    generate = triton_stablef._mlstm_chunkwise_fwbw_generator
    check_arguments(generate, arguments_of(generate, without=["autocast_kernel_dtype"]))
    check_arguments(plan, arguments_of(plan))
    check_arguments(pack_lengths, arguments_of(pack_lengths, without=["S"]))
    check_arguments(partial(pack_lengths, [1]), arguments_of(pack_lengths, without=["lengths"]))
    check_arguments(KernelConfig, dict(chunk_size=16))
    options = dict.fromkeys(("precision", "fused", "num_splits"))
    check_arguments(KernelConfig, options, "config.")
    fields = arguments_of(parallel_fw_H.Tiles)
    check_arguments(lambda **x: tiles(**x)(), fields, f"{TILED}: ")
    options = dict(platform="cpu", device_kind=None)
    check_arguments(partial(export.export, jnp.sin, 1.0), options)


# Whole messages, and the changed arguments of mlstm_chunkwise, or another call.
VALUES = {
    SWAPPED: BTNH | {"layout": "BTNH", "i": PLAIN["i"]},
    f"k has shape (2, 3, 41, 16), expected (B, NH, S, DHQK) = (2, 3, 40, 16), {Q}": {
        "k": array(2, 3, 41, 16)
    },
    "q has shape (2, 3, 0, 16), expected (B, NH, S, DHQK) with S >= 1": {"q": array(2, 3, 0, 16)},
    "v has shape (2, 3, 40, 0), expected (B, NH, S, DHV) with DHV >= 1": {"v": array(2, 3, 40, 0)},
    "initial states come all three or not at all: got c_initial, m_initial without n_initial": {
        "n_initial": None
    },
    "initial states come both or not at all: got n_initial without c_initial": {
        "input_gate": "sigmoid",
        "m_initial": None,
        "c_initial": None,
    },
    "states come both or not at all: got n without c": of_step(
        c=None, m=None, input_gate="sigmoid"
    ),
    "c_initial has shape (2, 4, 3, 16, 24), expected (B, N, NH, DHQK, DHV) = "
    "(2, 2, 3, 16, 24)": SEGMENTS | {"c_initial": array(2, 4, 3, 16, 24)},
    "num_segments is 65534, expected at most 65533, the limit of a kernel's grid, or backend "
    "'xla'": SEGMENTS | {"num_segments": 65534},
    "num_segments is 2 without segment_ids, expected both": SEGMENTS | {"segment_ids": None},
    "num_segments is 2 with return_last_states=False, expected return_last_states=True": SEGMENTS
    | {"return_last_states": False},
    "normalize is False with input_gate 'exp', expected input_gate=\"sigmoid\"": {
        "normalize": False
    },
    f"eps is an integer of 16610 bits, {NORMAL}": {"eps": 10**5000},
    # other calls
    f"backend is 'gpu', {BACKENDS}": partial(use_backend, "gpu"),
    "backend is 'triton', whose kernels are for GPUs, and the computation is lowered for a CPU: "
    "expected backend None or 'xla' (plain jnp), or 'interpret' (the kernels, "
    "interpreted)": partial(mlstm_chunkwise, **zeros(PLAIN), backend="triton"),
    f"{TILED} is {{'keep_q': True}}, expected tiles that the kernel has for heads of 192/32 in "
    f"chunks of 64 steps, such as {PLANNED}": dict.fromkeys(INITIAL)
    | dict.fromkeys("qk", array(2, 3, 40, 192))
    | {"backend": "interpret", "config": tiles(keep_q=True)()},
    "lengths is [3, -1], expected the steps of each prompt, integers >= 0, of one row or of each "
    "of several": partial(pack_lengths, [3, -1]),
    "device_kind is None and this process has no GPU, expected the device_kind of the GPU to "
    "export for, such as 'NVIDIA H200'": partial(export.export, jnp.sin, 1.0, platform="cuda"),
}
TYPES = {
    "return_last_state is no argument of mlstm_chunkwise, expected return_last_states": {
        "return_last_state": True
    },
    "segment_ids has dtype bool, expected an integer dtype": {
        "segment_ids": array(2, 40, dtype="bool")
    },
    "k has dtype bfloat16, expected float32, the dtype of q": {
        "k": array(2, 3, 40, 16, dtype="bfloat16")
    },
    "q has dtype bfloat16, expected float32, the dtype of k and v": {
        "q": array(2, 3, 40, 16, dtype="bfloat16")
    },
    "eps is a jax.Array, expected a float: pass float(eps)": {"eps": jnp.float32(1e-6)},
    f"autocast_kernel_dtype is float64, expected one of {KERNEL_DTYPES}{FLOAT64}": {
        "autocast_kernel_dtype": "float64",
        "backend": "xla",
    },
    # what is no array
    "q is a MaskedArray, expected an array: pass its values, x.filled()": {"q": np.ma.zeros(3)},
    "c_initial is a tuple, expected an array: pass the states one by one": {
        "c_initial": (1, np.zeros(1))
    },
    "k is a Param, expected an array: pass its value": {"k": Param()},
    "k is a Variable, expected an array: pass its array, x[...]": {"k": Variable()},
    "q is a Foreign, expected an array": {"q": Foreign()},
    # other calls
    f"eps is traced, expected a Python float: {STATIC}": traced(eps=0.5),
    "v is a ShapeDtypeStruct, expected an array": partial(
        mlstm_chunkwise, **zeros(ARRAYS) | {"v": ARRAYS["v"]}
    ),
    f"q has dtype float64, expected one of {KERNEL_DTYPES}: cast q, k and v, or set "
    f"autocast_kernel_dtype{FLOAT64}": partial(
        mlstm_chunkwise, **jax.tree.map(np.float64, zeros(PLAIN))
    ),
    f"{TILED}: siz_b_loop is no field of tiles, expected one of siz_b_LQ, siz_b_LKV, siz_b_DHQK, "
    "siz_b_DHHV, block_k, state_rows, state_columns, num_warps, num_stages, "
    "num_splits, num_ctas, keep_q, recomputes_scores": tiles(siz_b_loop=16),
    f"{TILED} has block_k, expected some of its fields siz_b_LQ, siz_b_LKV, siz_b_DHQK, "
    "siz_b_DHHV, num_warps, num_stages, keep_q": {
        "backend": "interpret",
        "config": tiles(block_k=16)(),
    },
    f"config.parallel_fw_H is no kernel, expected one of {', '.join(dispatch.kernels())}": config(
        parallel_fw_H={}
    ),
}


@pytest.mark.parametrize("message", [*VALUES, *TYPES])
def test_bad_calls(message):
    bad = (VALUES | TYPES)[message]
    call = bad if callable(bad) else partial(shapes_of, mlstm_chunkwise, ARRAYS | bad)
    refused(ValueError if message in VALUES else TypeError, message, call)


@pytest.mark.parametrize("function", PUBLIC)
def test_names_of_other_packages_are_answered_with_ours(function):
    """The message for any other name lists all parameters."""
    ours = [*inspect.signature(function).parameters]
    theirs = "matQ", "key", "matV", "igate_preact", "fgate", "matC_initial", "nstate", "mstate"
    answers = dict(zip(theirs, ours, strict=False)) | {"zzz": f"one of {', '.join(ours)}"}
    for name, expected in answers.items():
        message = f"{name} is no argument of {function.__name__}, expected {expected}"
        refused(TypeError, message, function, **{name: None})


def test_a_refused_flag_leaves_the_generator_as_it_was():
    """1 and True are the same key of a cache."""
    generate = triton_stablef._mlstm_chunkwise_fwbw_generator
    with pytest.raises(TypeError, match="return_last_states is a int"):
        generate("float32", chunk_size=128, return_last_states=1)
    run = generate("float32", chunk_size=128, return_last_states=True)
    h, *_ = jax.eval_shape(run, *PLAIN.values())
    assert h.shape == PLAIN["v"].shape
    assert generate("float32", chunk_size=np.int64(128)) is generate("float32", chunk_size=128)


def test_a_stabiliser_other_than_zeros_is_refused_with_the_sigmoid_gate():
    """Every function refuses it; the values of a traced one are unknown."""
    message = "has values other than 0 with input_gate 'sigmoid', expected None or zeros"
    m = np.ones((B, NH), "float32")
    of_states = {mlstm_recurrent_step: TOKEN | STATES, mlstm_recurrent_sequence: PLAIN | STATES}
    of_parts = mlstm_chunkwise, reference.chunkwise, reference.recurrence
    for function, shapes in (dict.fromkeys(of_parts, ARRAYS) | of_states).items():
        name, run = [*shapes][-1], partial(function, **zeros(shapes), input_gate="sigmoid")
        refused(ValueError, f"{name} {message}", run, **{name: m})
        jax.eval_shape(run, **{name: m})


def test_last_states_of_the_sigmoid_gate_are_taken_as_initial_ones():
    """m is among them, which is 0 whatever the caller passes."""
    x = zeros(ARRAYS) | {"v": np.ones(PLAIN["v"].shape, "float32")}
    run = partial(mlstm_chunkwise, input_gate="sigmoid", return_last_states=True)
    both = jax.jit(lambda m: [run(**x | {"m_initial": y}) for y in (m, None)])
    given, without = both(np.full((B, NH), 3.0, "float32"))
    assert not np.any(without[1][2])
    assert_same_bits(given, without)
    jax.eval_shape(lambda: run(**x))  # an array of zeros


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "function", [mlstm_chunkwise, mlstm_recurrent_sequence, reference.chunkwise]
)
def test_more_heads_than_steps_get_a_warning_once_in_the_layout_that_nobody_chose(function):
    """There is no warning if states or segments tell the layout."""
    message = (
        'layout="BNTH", the default, reads q as (B, NH, S, DHQK) and finds S < NH, fewer steps '
        'than heads: pass layout="BTNH" if it is (B, S, NH, DHQK), else layout="BNTH"'
    )
    validation.warn_of_layout.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            jax.eval_shape(lambda: function(**zeros(BTNH)))
    assert [(str(x.message), x.filename) for x in caught] == [(message, __file__)]
    validation.warn_of_layout.cache_clear()
    few, run = inputs(B, NH, 1), partial(shapes_of, function)
    run(few | {"layout": "BNTH"})
    run(inputs(B, 1, NH) | {"layout": "BTNH"})
    run(few | (STATES if function is mlstm_recurrent_sequence else INITIAL))
    if function is mlstm_chunkwise:
        run(few | {"segment_ids": array(B, 1, dtype="int32")})
        shapes_of(triton_stablef.mlstm_chunkwise_triton_stablef, BTNH)
    default = inspect.signature(function).parameters["layout"]
    assert str(default) == "layout: Literal['BNTH', 'BTNH'] = 'BNTH'"


DERIVATIVE = (
    "mlstm_chunkwise has first derivatives in reverse mode only; for second derivatives and "
    "forward mode use "
    "mlstm_pallas.reference.chunkwise or mlstm_pallas.reference.recurrence"
)
SQUARE = zeros(inputs(1, 1, 16))
SQUARE["v"] = SQUARE["q"]  # the output of a layer is the input of the next


def of_q(q):
    return mlstm_chunkwise(**SQUARE | {"q": q}, backend="xla")


def layers(q):
    return jax.lax.scan(lambda x, _: (of_q(x), None), q, None, length=2)[0]


def tangent(function):
    """Of a function of one argument, with its value."""
    return lambda x: jax.jvp(function, (x,), (x,))


DERIVATIVES = {
    "jvp_of_scan": tangent(layers),
    "jvp_of_vmap": tangent(lambda q: jax.vmap(of_q)(q[None])),
    "linearize": lambda q: jax.linearize(of_q, q)[1](q),
    "grad_of_grad_of_scan": jax.grad(
        lambda q: jnp.sum(jax.grad(lambda q: jnp.sum(layers(q)))(q) ** 2)
    ),
}


@pytest.mark.parametrize("transformation", DERIVATIVES)
def test_a_derivative_that_does_not_exist_is_refused_by_name(transformation):
    refused(TypeError, DERIVATIVE, DERIVATIVES[transformation], SQUARE["q"])


def test_what_refuses_derivatives_is_not_in_programs():
    for function in (of_q, lambda q: jax.vjp(of_q, q)[1](q)):
        text = jax.jit(function).lower(SQUARE["q"]).as_text()
        assert not re.search("reverse_mode|not_differentiated", text)


def test_the_plain_function_takes_the_call_as_it_is():
    """Forward mode, and S no multiple of the chunk; it checks the layout alike."""
    x, ids = BTNH | INITIAL, jnp.zeros((B, S), "int32")
    options = dict(chunk_size=16, return_last_states=True, layout="BTNH", segment_ids=ids)
    options["sequence_lengths"] = ids[:, 0]
    expected = shapes_of(mlstm_chunkwise, x | options)
    run = partial(reference.chunkwise, **options, backend="interpret")
    h, derivative = jax.eval_shape(tangent(lambda x: run(**x)), x)
    assert h == derivative == expected
    refused(ValueError, SWAPPED, shapes_of, run, x | {"i": PLAIN["i"]})


ATTRIBUTES = """
import mlstm_pallas
for name in ("distributed", "export", "reference", "xlstm_jax"):
    assert getattr(mlstm_pallas, name).__name__ == f"mlstm_pallas.{name}"
mlstm_pallas.xlstm_jax.triton_stablef.mlstm_chunkwise_triton_stablef
for module in (mlstm_pallas, mlstm_pallas.xlstm_jax):
    assert {*module.__all__} <= {*dir(module)}
    for name in module.__all__:
        getattr(module, name)
"""


def test_modules_are_attributes_without_an_import_of_their_own():
    """Modules list all that they have."""
    run_python("-W", "error", "-c", ATTRIBUTES)
    for module in (mlstm_pallas, mlstm_pallas.xlstm_jax):
        message = f"module '{module.__name__}' has no attribute 'no_such_module'"
        refused(AttributeError, message, getattr, module, "no_such_module")


def lowering_of(call):
    """The kernels in the jaxpr of a call, "both" where the platform decides, or "xla"."""
    text = str(jax.make_jaxpr(lambda: call(**SQUARE))())  # a function that was not traced before
    return "both" if "by_platform" in text else "kernels" if "pallas_call" in text else "xla"


def test_the_backend_of_the_environment_comes_last(monkeypatch):
    """The variable is read when a function is traced."""
    entry = triton_stablef.mlstm_chunkwise_triton_stablef
    for value, expected in {"xla": "xla", "": "both", "interpret": "kernels"}.items():
        monkeypatch.setenv("MLSTM_PALLAS_BACKEND", value)
        assert lowering_of(mlstm_chunkwise) == lowering_of(entry) == expected
    assert lowering_of(partial(mlstm_chunkwise, backend="xla")) == "xla"
    for backend, expected in {"xla": "xla", None: "both"}.items():
        with use_backend(backend):
            assert lowering_of(mlstm_chunkwise) == lowering_of(entry) == expected
    monkeypatch.delenv("MLSTM_PALLAS_BACKEND")
    assert lowering_of(mlstm_chunkwise) == "both"


def test_a_wrong_backend_of_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("MLSTM_PALLAS_BACKEND", "cuda")
    message = "MLSTM_PALLAS_BACKEND is 'cuda', " + BACKENDS.replace("None or ", "")
    for function, shapes in ((mlstm_chunkwise, PLAIN), (mlstm_recurrent_step, TOKEN)):
        refused(ValueError, message, function, **zeros(shapes))
    monkeypatch.setenv("MLSTM_PALLAS_BACKEND", "mosaic_gpu")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    with pytest.raises(ValueError, match=r"^MLSTM_PALLAS_BACKEND is 'mosaic_gpu' and jax is "):
        mlstm_chunkwise(**zeros(PLAIN))


def test_use_backend_stays_in_its_thread():
    with use_backend("xla"), ThreadPoolExecutor() as threads:
        assert lowering_of(mlstm_chunkwise) == "xla"
        assert threads.submit(lowering_of, mlstm_chunkwise).result() == "both"


def test_use_backend_that_is_never_entered_warns():
    message = r"^use_backend\('interpret'\) did nothing: it is for a with statement$"
    with pytest.warns(RuntimeWarning, match=message):
        use_backend("interpret")
    with use_backend("xla"):  # and one that is entered does not
        pass
