"""Every bad call says, in one whole sentence, which argument is wrong, what came and what was
expected. A plain import loads what it should."""

import ast
import inspect
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import PUBLIC, assert_same_bits, refused, run_python

import mlstm_pallas
from mlstm_pallas import (
    KernelConfig,
    dispatch,
    mlstm_chunkwise,
    mlstm_recurrent_sequence,
    mlstm_recurrent_step,
    reference,
    use_backend,
    validation,
)
from mlstm_pallas.gpu import UNKNOWN
from mlstm_pallas.problem import Problem
from mlstm_pallas.triton import parallel_fw_H
from mlstm_pallas.xlstm_jax import max_triton_fwbw_v3noslice as v3noslice
from mlstm_pallas.xlstm_jax import max_triton_fwbw_v5xlchunksize as v5xlchunksize
from mlstm_pallas.xlstm_jax import triton_stablef

B, NH, S, DHQK, DHV = 2, 3, 40, 16, 24
TRAILING = dict(q=(DHQK,), k=(DHQK,), v=(DHV,), i=(), f=())
Q = "as q has shape (2, 3, 40, 16)"
KERNEL_DTYPES, INPUT_DTYPES = "float32, bfloat16, float16", "float16, bfloat16, float32, float64"
BACKENDS = "expected None or one of triton, mosaic_gpu, interpret, mosaic_gpu_interpret, xla"


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def inputs(*lead):
    return {name: array(*lead, *shape) for name, shape in TRAILING.items()}


PLAIN, BTNH, TOKEN = inputs(B, NH, S), inputs(B, S, NH), inputs(B, NH)
STATES = dict(c=array(B, NH, DHQK, DHV), n=array(B, NH, DHQK), m=array(B, NH))
INITIAL = {f"{name}_initial": x for name, x in STATES.items()}
ARRAYS = PLAIN | INITIAL
SEGMENTS = dict(num_segments=2, segment_ids=array(B, S, dtype="int32"))


def zeros(arrays):
    return {name: np.zeros(x.shape, x.dtype) for name, x in arrays.items()}


def shapes_of(function, arguments):
    """Traces function: shapes are arrays, the rest is static."""
    traced = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    return jax.eval_shape(lambda **x: function(**arguments | x), **traced)


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


def of_stage(function):
    """Arrays for a documented stage; shapes, which do not fit, are checked last."""
    names = str(inspect.signature(function))
    return dict.fromkeys(re.findall(r"\b(?:mat|vec|sca)\w+", names), array(1))


def stage(**changed):
    """A call of a documented stage with changed arguments."""
    function = v5xlchunksize.mlstm_chunkwise__parallel_bw_dV
    return partial(shapes_of, function, of_stage(function) | changed)


def traced(**options):
    """A call of mlstm_chunkwise whose options are traced."""
    return partial(jax.eval_shape, partial(mlstm_chunkwise, **zeros(PLAIN)), **options)


STATIC = "mark it static in jit"
TILES = "expected a power of two from 16 to 65536"
WARPS = "expected a power of two from 1 to 16"
NORMAL = "expected 0 or a number from 1.1754944e-38 to 3.4028235e+38, the range of float32"
TILED = "config.triton_parallel_fw_H"
SWAPPED = (
    "i has shape (2, 3, 40), expected (B, S, NH) = (2, 40, 3), as q has shape (2, 40, 3, 16): "
    'axes 1 and 2 are swapped; layout="BNTH" has them so for all of q, k, v, i, f'
)
FLOAT64 = '; float64 needs backend="xla" and jax_enable_x64'

# Whole messages of mlstm_chunkwise that begin with the wrong argument and what came.
SAID = (
    "q has shape (2, 40, 16), expected (B, NH, S, DHQK)",
    "q has shape (2, 3, 0, 16), expected (B, NH, S, DHQK) with S >= 1",
    f"k has shape (2, 3, 41, 16), expected (B, NH, S, DHQK) = (2, 3, 40, 16), {Q}",
    f"v has shape (2, 3, 40), expected (B, NH, S, DHV) = (2, 3, 40, DHV), {Q}",
    "v has shape (2, 3, 40, 0), expected (B, NH, S, DHV) with DHV >= 1",
    f"c_initial has shape (2, 3, 24, 16), expected (B, NH, DHQK, DHV) = (2, 3, 16, 24), {Q}",
    f"segment_ids has shape (2, 3, 40), expected (B, S) = (2, 40), {Q}",
    f"sequence_lengths has shape (2, 40), expected (B) = (2,), {Q}",
    "layout is 'BSNH', expected one of BNTH, BTNH",
    "input_gate is 'relu', expected one of exp, sigmoid",
    "num_segments is 0, expected an integer from 1 to 2147483647",
    "num_segments is 2 without segment_ids, expected both",
    "normalize is False with input_gate 'exp', expected input_gate=\"sigmoid\"",
    # scalars; every parameter of xlstm_jax has more below
    "chunk_size is 48, expected None or a power of two >= 16",
    "eps is -1e-06, expected a finite number >= 0",
    f"norm_val is 1e+39, {NORMAL}",
    f"norm_val is 1e-40, {NORMAL}",  # below the normal numbers
    f"backend is 'cuda', {BACKENDS}",
)
SAID_OF_TYPES = (
    "sequence_lengths has dtype bool, expected an integer dtype",
    "segment_ids has dtype float32, expected an integer dtype",
    f"q has dtype int32, expected one of {KERNEL_DTYPES}",
    "k has dtype bfloat16, expected float32, the dtype of q",
    "v has dtype bfloat16, expected float32, the dtype of q",
    "v has dtype float16, expected float32, the dtype of q",
    "q has dtype bfloat16, expected float32, the dtype of k and v",
    f"i has dtype int8, expected one of {INPUT_DTYPES}",
    f"autocast_kernel_dtype is '(1,', expected None or one of {KERNEL_DTYPES}",
    "autocast_kernel_dtype is 'fp8', expected None or one of float32, bfloat16, float16",
)


GOOD = ARRAYS | SEGMENTS | dict(sequence_lengths=array(B, dtype="int32"))


def what_came(message):
    """{argument: shape, dtype or value} of a message in SAID."""
    pattern = r"(\w+) (?:has )?(shape|dtype|is) (.*?)(?: with.*)?, expected"
    name, what, came = re.match(pattern, message).groups()
    came = came if what == "dtype" else ast.literal_eval(came)
    return {name: came if what == "is" else GOOD[name].update(**{what: came})}


IN_BTNH = BTNH | {"layout": "BTNH"}
# Other whole messages, and the changed arguments of mlstm_chunkwise, or another call.
VALUES = {
    "initial states come all three or not at all: got c_initial, m_initial without n_initial": {
        "n_initial": None
    },
    SWAPPED: IN_BTNH | {"i": PLAIN["i"]},
    SWAPPED.replace("i has", "f has"): IN_BTNH | {"f": PLAIN["f"]},
    "m_initial has shape (2, 40), expected (B, NH) = (2, 3), as q has shape (2, 40, 3, 16)": IN_BTNH
    | {"m_initial": array(B, S)},
    "initial states come both or not at all: got n_initial without c_initial": {
        "input_gate": "sigmoid",
        "m_initial": None,
        "c_initial": None,
    },
    "c_initial has shape (2, 4, 3, 16, 24), expected (B, N, NH, DHQK, DHV) = "
    "(2, 2, 3, 16, 24)": SEGMENTS
    | {"return_last_states": True, "c_initial": array(2, 4, 3, 16, 24)},
    "num_segments is 65534, expected at most 65533, the limit of a kernel's grid, or backend "
    "'xla'": SEGMENTS | {"num_segments": 65534, "return_last_states": True},
    "num_segments is 2 with return_last_states=False, expected return_last_states=True": SEGMENTS,
    f"chunk_size is {np.int64(8)!r}, expected None or a power of two >= 16": {
        "chunk_size": np.int64(8)
    },
    f"eps is an integer of 16610 bits, {NORMAL}": {"eps": 10**5000},
    "eps is nan, expected a finite number >= 0": {"eps": float("nan")},
    f"backend is an array of shape (2,), {BACKENDS}": {"backend": np.zeros(2)},
    # other calls
    "q has shape (2, 3, 1, 16), expected (B, NH, DHQK)": of_step(
        q=np.zeros((2, 3, 1, 16), "float32")
    ),
    "states come all three or not at all: got c, n without m": of_step(m=None),
    "states come both or not at all: got n without c": of_step(
        c=None, m=None, input_gate="sigmoid"
    ),
    f"backend is 'gpu', {BACKENDS}": partial(use_backend, "gpu"),
    "backend is 'triton', whose kernels are for GPUs, and the computation is lowered for a CPU: "
    "expected backend None or 'xla' (plain jnp), or 'interpret' (the kernels, "
    "interpreted)": partial(mlstm_chunkwise, **zeros(PLAIN), backend="triton"),
    f"{TILED}: siz_b_LQ is 48, {TILES}": tiles(siz_b_LQ=48),
    f"{TILED}: siz_b_LQ is {2**40}, {TILES}": tiles(siz_b_LQ=2**40),
    f"{TILED}: num_warps is 3, {WARPS}": tiles(num_warps=3),
    f"{TILED}: num_stages is 0, expected an integer from 1 to 8": tiles(num_stages=0),
    "config.num_splits is 3, expected None or a power of two >= 1": config(num_splits=3),
    f"{TILED} is {{'keep_q': True}}, expected tiles that the kernel has for heads of 192/32 in "
    f"chunks of 64 steps, such as {PLANNED}": dict.fromkeys(INITIAL)
    | dict.fromkeys("qk", array(2, 3, 40, 192))
    | {"backend": "interpret", "config": tiles(keep_q=True)()},
    "chunk_size is 100, expected None or a power of two >= 16": config(chunk_size=100),
    # the documented functions of xlstm_jax
    "initial states come all three or not at all: got c_initial, n_initial without "
    "m_initial": partial(
        shapes_of, v3noslice.mlstm_chunkwise_max_triton, ARRAYS | {"m_initial": None}
    ),
    "chunk_size is None, expected a power of two >= 16": stage(chunk_size=None),
    "chunk_size is True, expected a power of two >= 16": stage(chunk_size=True),
    "qk_scale is nan, expected a finite number": stage(qk_scale=float("nan")),
    f"siz_b_LQ is 0, {TILES}": stage(siz_b_LQ=0),
    "num_stages is [64], expected an integer from 1 to 8": stage(num_stages=[64]),
}
TYPES = {
    "segment_ids is a list, expected an array": {"segment_ids": [[0] * 40] * 2},
    "sequence_lengths is a list, expected an array": {"sequence_lengths": [3, 4]},
    "return_last_state is no argument of mlstm_chunkwise, expected return_last_states": {
        "return_last_state": True
    },
    "eps is a jax.Array, expected a float: pass float(eps)": {"eps": jnp.float32(1e-6)},
    f"autocast_kernel_dtype is float64, expected one of {KERNEL_DTYPES}{FLOAT64}": {
        "autocast_kernel_dtype": "float64",
        "backend": "xla",
    },
    f"autocast_kernel_dtype is an array of shape (1,), expected None or one of {KERNEL_DTYPES}": {
        "autocast_kernel_dtype": np.zeros(1)
    },
    "input_gate is a jax.Array, expected one of exp, sigmoid": {"input_gate": jnp.zeros(3)},
    "return_last_states is a int, expected a Python bool": {"return_last_states": 1},
    "config is a dict, expected a KernelConfig or None": {"config": {"chunk_size": 64}},
    # what is no array
    "q is a MaskedArray, expected an array: pass its values, x.filled()": {"q": np.ma.zeros(3)},
    "c_initial is a tuple, expected an array: pass the states one by one": {
        "c_initial": (1, np.zeros(1))
    },
    "k is a Param, expected an array: pass its value": {"k": Param()},
    "k is a Variable, expected an array: pass its array, x[...]": {"k": Variable()},
    "q is a Foreign, expected an array": {"q": Foreign()},
    # other calls
    f"q has dtype float64, expected one of {KERNEL_DTYPES}{FLOAT64}": of_step(
        q=np.zeros((2, 3, 16))
    ),
    f"c has dtype int32, expected one of {KERNEL_DTYPES}": of_step(
        c=np.zeros((2, 3, 16, 24), "int32")
    ),
    "c is a tuple, expected an array: pass the states one by one": of_step(c=(1, np.zeros(1))),
    **{
        f"axis_name is {axis!r}, expected a mesh axis of the surrounding jax.shard_map, by its "
        "name": partial(
            mlstm_pallas.distributed.mlstm_chunkwise_sequence_parallel,
            *PLAIN.values(),
            axis_name=axis,
        )
        for axis in (0, ["s"])
    },
    f"stabilize_correctly is traced, expected a Python bool: {STATIC}": traced(
        stabilize_correctly=True
    ),
    f"eps is traced, expected a Python float: {STATIC}": traced(eps=0.5),
    f"chunk_size is traced, expected None or a power of two >= 16: {STATIC}": traced(chunk_size=64),
    "v is a ShapeDtypeStruct, expected an array": partial(
        mlstm_chunkwise, **zeros(ARRAYS) | {"v": ARRAYS["v"]}
    ),
    f"q has dtype float64, expected one of {KERNEL_DTYPES}: cast q, k and v, or set "
    f"autocast_kernel_dtype{FLOAT64}": partial(
        mlstm_chunkwise, **jax.tree.map(np.float64, zeros(PLAIN))
    ),
    f"q has dtype key<fry>, expected one of {KERNEL_DTYPES}": dict.fromkeys(INITIAL)
    | {"q": array(2, 3, 40, 16, dtype=jax.eval_shape(jax.random.key, 0).dtype)},
    f"{TILED}: keep_q is a int, expected a Python bool": tiles(keep_q=1),
    f"{TILED}: siz_b_loop is no field of tiles, expected one of siz_b_LQ, siz_b_LKV, siz_b_DHQK, "
    "siz_b_DHHV, block_k, state_rows, state_columns, num_warps, num_stages, "
    "num_splits, num_ctas, keep_q, recomputes_scores": tiles(siz_b_loop=16),
    f"{TILED} has block_k, expected some of its fields siz_b_LQ, siz_b_LKV, siz_b_DHQK, "
    "siz_b_DHHV, num_warps, num_stages, keep_q": {
        "backend": "interpret",
        "config": tiles(block_k=16)(),
    },
    "config.precision is 'highest', expected None, a jax.lax.Precision or a "
    "jax.lax.DotAlgorithmPreset": config(precision="highest"),
    "config.fused is 1, expected None, True or False": config(fused=1),
    f"config.parallel_fw_H is no kernel, expected one of {', '.join(dispatch.kernels())}": config(
        parallel_fw_H={}
    ),
    f"{TILED} is a int, expected a Mapping or None": config(triton_parallel_fw_H=64),
    # the documented functions of xlstm_jax
    "eps is a list, expected a float": stage(eps=[1.0]),
    f"matQ has dtype int32, expected one of {KERNEL_DTYPES}": stage(matQ=array(1, dtype="int32")),
    f"vecB has dtype int32, expected one of {INPUT_DTYPES}": stage(vecB=array(1, dtype="int32")),
    f"output_dtype is None, expected one of {INPUT_DTYPES}": stage(output_dtype=None),
    f"output_dtype is int8, expected one of {INPUT_DTYPES}": stage(output_dtype="int8"),
    "output_dtype is float64, which needs jax_enable_x64, expected one of "
    "float16, bfloat16, float32": stage(output_dtype="float64"),
    "autocast_kernel_dtype is int8, expected one of float32, bfloat16, float16": lambda: shapes_of(
        v5xlchunksize.mlstm_chunkwise__xl_chunk, PLAIN | {"autocast_kernel_dtype": "int8"}
    ),
}


@pytest.mark.parametrize("message", [*SAID, *VALUES, *SAID_OF_TYPES, *TYPES])
def test_bad_calls(message):
    kind = ValueError if message in (*SAID, *VALUES) else TypeError
    bad = (VALUES | TYPES).get(message) or what_came(message)
    call = bad if callable(bad) else partial(shapes_of, mlstm_chunkwise, ARRAYS | bad)
    refused(kind, message, call)


SYSTEMS = v3noslice, v5xlchunksize, triton_stablef
FUNCTIONS = [getattr(system, name) for system in SYSTEMS for name in system.__all__]


@pytest.mark.parametrize("function", dict.fromkeys(FUNCTIONS), ids=lambda x: x.__name__)
def test_every_argument_of_the_functions_of_xlstm_jax_is_checked(function):
    """test_bad_calls has the messages."""
    documented = function
    if function is triton_stablef._get_chunkwise_fwbw_kernel:  # it hands its keywords on
        documented = triton_stablef._mlstm_chunkwise_fwbw_generator
    parameters = inspect.signature(documented).parameters
    good = ARRAYS | of_stage(function) | dict(autocast_kernel_dtype="float32")
    good = {name: x for name, x in good.items() if name in parameters}
    for name in parameters:
        with pytest.raises((TypeError, ValueError), match=rf"^{name} is (a str|'?foo)\b"):
            shapes_of(function, good | {name: "foo"})


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


def test_numbers_and_bools_of_numpy_are_taken():
    """The largest float32 is among them."""
    options = dict(
        chunk_size=np.int64(16),
        return_last_states=np.bool_(True),
        eps=np.finfo("float32").max,
        norm_val=jnp.bfloat16.dtype.type(1),
    )
    h, states = shapes_of(mlstm_chunkwise, PLAIN | options)
    assert (h.shape, len(states)) == (PLAIN["v"].shape, 3)
    configs = (
        KernelConfig(
            number(64),
            num_splits=number(2),
            triton_parallel_fw_H=dict(siz_b_LQ=number(64), keep_q=flag(True)),
        )
        for number, flag in ((int, bool), (np.uint8, np.bool_))
    )
    assert len({*configs}) == 1
    for function, shapes in ((mlstm_recurrent_step, TOKEN), (mlstm_recurrent_sequence, PLAIN)):
        shapes_of(function, shapes | {"eps": np.float16(0.5)})


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
