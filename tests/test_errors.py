"""Every bad call says, in one whole sentence, which argument it is, what came and what was
expected. What a plain import opens."""

import functools
import inspect
import re
import subprocess
import sys
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import mlstm_pallas
from mlstm_pallas import (
    KernelConfig,
    StageConfig,
    mlstm_chunkwise,
    mlstm_recurrent_sequence,
    mlstm_recurrent_step,
    reference,
    use_backend,
    validation,
)
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel
from mlstm_pallas.stages import STAGES
from mlstm_pallas.xlstm_jax import max_triton_fwbw_v3noslice as v3noslice
from mlstm_pallas.xlstm_jax import max_triton_fwbw_v5xlchunksize as v5xlchunksize
from mlstm_pallas.xlstm_jax import triton_stablef

B, NH, S, DHQK, DHV = 2, 3, 40, 16, 24
TRAILING = dict(q=(DHQK,), k=(DHQK,), v=(DHV,), i=(), f=())
STATES = dict(c_initial=(B, NH, DHQK, DHV), n_initial=(B, NH, DHQK), m_initial=(B, NH))
SHAPES = {name: (B, NH, S, *shape) for name, shape in TRAILING.items()} | STATES
Q = "as q has shape (2, 3, 40, 16)"
KERNEL_DTYPES, INPUT_DTYPES = "float32, bfloat16, float16", "float16, bfloat16, float32, float64"
BACKENDS = "expected None or one of triton, mosaic_gpu, interpret, mosaic_gpu_interpret, xla"


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


ARRAYS = {name: array(*shape) for name, shape in SHAPES.items()}
PLAIN = {name: ARRAYS[name] for name in "qkvif"}
BTNH = {name: array(B, S, NH, *shape) for name, shape in TRAILING.items()} | {"layout": "BTNH"}


def shapes_of(function, arguments):
    """Traces function: shapes are arrays, the rest is static."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    others = {name: x for name, x in arguments.items() if name not in arrays}
    return jax.eval_shape(lambda x: function(**x, **others), arrays)


def on_device(kind, function, *args, **kwargs):
    with jax.sharding.use_abstract_mesh(
        AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, "gpu"))
    ):
        return function(*args, **kwargs)


def traced(name, value):
    """The argument as it comes when it is not static in a jit."""
    return jax.eval_shape(
        lambda x: mlstm_chunkwise(**{n: jnp.zeros(s) for n, s in SHAPES.items()}, **{name: x}),
        value,
    )


def enters(backend):
    with use_backend(backend):
        pass


def arrays(layout="BNTH", dtype="float32", states=False, **changed):
    lead = (B, NH, S) if layout == "BNTH" else (B, S, NH)
    built = {
        name: jnp.zeros((*lead, *shape), dtype if name in "qkv" else "float32")
        for name, shape in TRAILING.items()
    }
    return (
        built
        | ({name: jnp.zeros(shape) for name, shape in STATES.items()} if states else {})
        | changed
    )


class Param:
    """What a parameter of a module looks like: an array behind an attribute."""

    def __init__(self, value):
        self.value = value


class Variable:
    """What a variable of flax.nnx looks like: its value is deprecated."""

    def __init__(self, value):
        self._array = value

    def __getitem__(self, index):
        return self._array[index]

    @property
    def value(self):
        warnings.warn("'.value' access is now deprecated", DeprecationWarning, stacklevel=2)
        return self._array


class Foreign:
    """An array of another library."""

    shape, dtype = (B, NH, S, DHQK), "float32"


SWAPPED = (
    "{name} has shape {came}, expected ({axes}) = {expected}, as q has shape {q}: axes 1 and 2 "
    "are swapped; "
    'layout="{other}" has them so for all of q, k, v, i, f'
)
OF_BTNH = dict(
    came=(B, NH, S), axes="B, S, NH", expected=(B, S, NH), q=(B, S, NH, DHQK), other="BNTH"
)
OF_BNTH = dict(
    came=(B, S, NH), axes="B, NH, S", expected=(B, NH, S), q=(B, NH, S, DHQK), other="BTNH"
)
ONE_BY_ONE = "c_initial is a {}, expected an array: pass the states one by one"
FLOAT64 = '; float64 needs backend="xla" and jax_enable_x64'


# Changed arguments of mlstm_chunkwise: (error, whole message).
CHUNKWISE = {
    # shapes
    "q_rank": (
        {"q": array(2, 40, 16)},
        ValueError,
        "q has shape (2, 40, 16), expected (B, NH, S, DHQK)",
    ),
    "q_no_steps": (
        {"q": array(2, 3, 0, 16)},
        ValueError,
        "q has shape (2, 3, 0, 16), expected (B, NH, S, DHQK) with S >= 1",
    ),
    "q_no_columns": (
        {"q": array(2, 3, 40, 0)},
        ValueError,
        "q has shape (2, 3, 40, 0), expected (B, NH, S, DHQK) with DHQK >= 1",
    ),
    "k_length": (
        {"k": array(2, 3, 41, 16)},
        ValueError,
        f"k has shape (2, 3, 41, 16), expected (B, NH, S, DHQK) = (2, 3, 40, 16), {Q}",
    ),
    "v_rank": (
        {"v": array(2, 3, 40)},
        ValueError,
        "v has shape (2, 3, 40), expected (B, NH, S, DHV) = (2, 3, 40, DHV)",
    ),
    "v_no_columns": (
        {"v": array(2, 3, 40, 0)},
        ValueError,
        "v has shape (2, 3, 40, 0), expected (B, NH, S, DHV) with DHV >= 1",
    ),
    "i_axis_left_over": (
        {"i": array(2, 3, 40, 1)},
        ValueError,
        f"i has shape (2, 3, 40, 1), expected (B, NH, S) = (2, 3, 40), {Q}",
    ),
    "heads_behind_steps": (
        {"q": array(2, 40, 3, 16), "k": array(2, 40, 3, 16), "v": array(2, 40, 3, 24)},
        ValueError,
        "i has shape (2, 3, 40), expected (B, NH, S) = (2, 40, 3), as q has shape (2, 40, 3, 16): "
        "axes 1 and 2 are swapped; "
        'layout="BTNH" has them so for all of q, k, v, i, f',
    ),
    "c_swapped": (
        {"c_initial": array(2, 3, 24, 16)},
        ValueError,
        f"c_initial has shape (2, 3, 24, 16), expected (B, NH, DHQK, DHV) = (2, 3, 16, 24), {Q}",
    ),
    "m_axis_left_over": (
        {"m_initial": array(2, 3, 1)},
        ValueError,
        f"m_initial has shape (2, 3, 1), expected (B, NH) = (2, 3), {Q}",
    ),
    "no_n": (
        {"n_initial": None},
        ValueError,
        "initial states come all three or not at all: got c_initial, m_initial without n_initial",
    ),
    # gates and packed sequences
    "input_gate": (
        {"input_gate": "relu"},
        ValueError,
        "input_gate is 'relu', expected one of exp, sigmoid",
    ),
    "normalize_exp": (
        {"normalize": False},
        ValueError,
        "normalize is False with input_gate 'exp', expected input_gate=\"sigmoid\"",
    ),
    "n_alone_sigmoid": (
        {"input_gate": "sigmoid", "m_initial": None, "c_initial": None},
        ValueError,
        "initial states come both or not at all: got n_initial without c_initial",
    ),
    "segment_ids_list": (
        {"segment_ids": [[0] * 40] * 2},
        TypeError,
        "segment_ids is a list, expected an array",
    ),
    "segment_ids_float": (
        {"segment_ids": array(2, 40)},
        TypeError,
        "segment_ids has dtype float32, expected an integer dtype",
    ),
    "segment_ids_heads": (
        {"segment_ids": array(2, 3, 40, dtype="int32")},
        ValueError,
        f"segment_ids has shape (2, 3, 40), expected (B, S) = (2, 40), {Q}",
    ),
    **{
        f"sequence_lengths_{name}": (
            {"sequence_lengths": x},
            TypeError,
            f"sequence_lengths {came}, expected an {expected}",
        )
        for name, x, came, expected in (
            ("list", [3, 4], "is a list", "array"),
            ("float", array(2), "has dtype float32", "integer dtype"),
            ("bool", array(2, dtype="bool"), "has dtype bool", "integer dtype"),
        )
    },
    "sequence_lengths_steps": (
        {"sequence_lengths": array(2, 40, dtype="int32")},
        ValueError,
        f"sequence_lengths has shape (2, 40), expected (B) = (2,), {Q}",
    ),
    "num_segments_zero": (
        {"num_segments": 0},
        ValueError,
        "num_segments is 0, expected an integer >= 1",
    ),
    "num_segments_alone": (
        {"num_segments": 2},
        ValueError,
        "num_segments is 2 without segment_ids, expected both",
    ),
    "num_segments_without_states": (
        {"num_segments": 2, "segment_ids": array(2, 40, dtype="int32")},
        ValueError,
        "num_segments is 2 with return_last_states=False, expected return_last_states=True",
    ),
    "m_of_the_sigmoid_gate": (
        {"input_gate": "sigmoid", "m_initial": np.full((B, NH), 2.0, "float32")},
        ValueError,
        "m_initial has values other than 0 with input_gate 'sigmoid', expected None or zeros",
    ),
    # dtypes
    "q_integer": (
        {"q": array(2, 3, 40, 16, dtype="int32")},
        TypeError,
        f"q has dtype int32, expected one of {KERNEL_DTYPES}",
    ),
    "k_dtype": (
        {"k": array(2, 3, 40, 16, dtype="bfloat16")},
        TypeError,
        "k has dtype bfloat16, expected float32, the dtype of q",
    ),
    "i_integer": (
        {"i": array(2, 3, 40, dtype="int8")},
        TypeError,
        f"i has dtype int8, expected one of {INPUT_DTYPES}",
    ),
    "autocast_unknown": (
        {"autocast_kernel_dtype": "fp8"},
        TypeError,
        "autocast_kernel_dtype is 'fp8', expected None or one of float32, bfloat16, float16",
    ),
    "float64_without_x64": (
        {"autocast_kernel_dtype": "float64", "backend": "xla"},
        TypeError,
        f"autocast_kernel_dtype is float64, expected one of {KERNEL_DTYPES}{FLOAT64}",
    ),
    # scalars and flags
    "chunk_size_odd": (
        {"chunk_size": 48},
        ValueError,
        "chunk_size is 48, expected None or a power of two >= 16",
    ),
    "chunk_size_small": (
        {"chunk_size": np.int64(8)},
        ValueError,
        f"chunk_size is {np.int64(8)!r}, expected None or a power of two >= 16",
    ),
    "chunk_size_bool": (
        {"chunk_size": True},
        ValueError,
        "chunk_size is True, expected None or a power of two >= 16",
    ),
    "eps_negative": ({"eps": -1e-6}, ValueError, "eps is -1e-06, expected a finite number >= 0"),
    "eps_nan": ({"eps": float("nan")}, ValueError, "eps is nan, expected a finite number >= 0"),
    "norm_val_inf": (
        {"norm_val": float("inf")},
        ValueError,
        "norm_val is inf, expected a finite number >= 0",
    ),
    "return_last_states": (
        {"return_last_states": 1},
        TypeError,
        "return_last_states is a int, expected a Python bool",
    ),
    "backend": ({"backend": "cuda"}, ValueError, f"backend is 'cuda', {BACKENDS}"),
    "config_dict": (
        {"config": {"chunk_size": 64}},
        TypeError,
        "config is a dict, expected a KernelConfig or None",
    ),
    # layouts
    "layout_unknown": (
        {"layout": "BSNH"},
        ValueError,
        "layout is 'BSNH', expected one of BNTH, BTNH",
    ),
    "i_of_BNTH": (BTNH | {"i": array(B, NH, S)}, ValueError, SWAPPED.format(name="i", **OF_BTNH)),
    "i_of_BTNH": ({"i": array(B, S, NH)}, ValueError, SWAPPED.format(name="i", **OF_BNTH)),
    "k_of_BNTH": (
        BTNH | {"k": array(B, NH, S, DHQK)},
        ValueError,
        "k has shape (2, 3, 40, 16), expected (B, S, NH, DHQK) = (2, 40, 3, 16), as q has shape "
        "(2, 40, 3, 16)",
    ),
    "states_of_another_number_of_heads": (
        BTNH | {"m_initial": array(B, S)},
        ValueError,
        "m_initial has shape (2, 40), expected (B, NH) = (2, 3), as q has shape (2, 40, 3, 16)",
    ),
    # what is no array, and scalars beyond float32
    "states_in_a_tuple": (
        {"c_initial": tuple(map(np.zeros, STATES.values()))},
        TypeError,
        ONE_BY_ONE.format("tuple"),
    ),
    "parameter": (
        {"k": Param(np.zeros(SHAPES["k"]))},
        TypeError,
        "k is a Param, expected an array: pass its value",
    ),
    "variable": (
        {"k": Variable(np.zeros(SHAPES["k"]))},
        TypeError,
        "k is a Variable, expected an array: pass its array, x[...]",
    ),
    "foreign_array": ({"q": Foreign()}, TypeError, "q is a Foreign, expected an array"),
    "input_gate_an_array": (
        {"input_gate": jnp.zeros(SHAPES["i"])},
        TypeError,
        "input_gate is a ArrayImpl, expected one of exp, sigmoid",
    ),
    "autocast_an_array": (
        {"autocast_kernel_dtype": np.zeros(1)},
        TypeError,
        "autocast_kernel_dtype is array([0.]), expected None or one of float32, bfloat16, float16",
    ),
    "norm_val_beyond_float32": (
        {"norm_val": 1e39},
        ValueError,
        "norm_val is 1e+39, expected a number in the range of float32",
    ),
}

LARGE = StageConfig(
    siz_b_LQ=128, siz_b_LKV=128, siz_b_DHQK=64, siz_b_DHHV=256, num_warps=8, num_stages=3
)
HEADS = dict(
    q=array(1, 8, 512, 256, dtype="bfloat16"), k=array(1, 8, 512, 256, dtype="bfloat16")
) | dict(v=array(1, 8, 512, 512, dtype="bfloat16"), i=array(1, 8, 512), f=array(1, 8, 512))
TILES = "expected a power of two >= 16"
GPU_ONLY = (
    "backend is 'triton', whose kernels are for GPUs, and the computation is lowered for a CPU: "
    "expected backend None or 'xla' "
    "(plain jnp), or 'interpret' (the kernels, interpreted)"
)

# Other calls: (call, error, whole message).
OTHERS = {
    "flag_traced": (
        lambda: traced("stabilize_correctly", True),
        TypeError,
        "stabilize_correctly is traced, expected a Python bool: mark it static in jit",
    ),
    "shape": (
        lambda: mlstm_chunkwise(**arrays(v=array(B, NH, S, DHV))),
        TypeError,
        "v is a ShapeDtypeStruct, expected an array",
    ),
    "arrays_of_float64_without_x64": (
        lambda: mlstm_chunkwise(**{name: np.zeros(SHAPES[name]) for name in PLAIN}),
        TypeError,
        f"q has dtype float64, expected one of {KERNEL_DTYPES}: cast q, k and v, or set "
        f"autocast_kernel_dtype{FLOAT64}",
    ),
    "keys_of_random_numbers": (
        lambda: shapes_of(
            mlstm_chunkwise,
            PLAIN | {"q": array(2, 3, 40, 16, dtype=jax.eval_shape(jax.random.key, 0).dtype)},
        ),
        TypeError,
        f"q has dtype key<fry>, expected one of {KERNEL_DTYPES}",
    ),
    "use_backend": (lambda: enters("gpu"), ValueError, f"backend is 'gpu', {BACKENDS}"),
    "triton_on_a_cpu": (
        lambda: (
            jax.jit(functools.partial(mlstm_chunkwise, backend="triton"))
            .trace(**PLAIN)
            .lower(lowering_platforms=("cpu",))
        ),
        ValueError,
        GPU_ONLY,
    ),
    # configs
    "tile_odd": (lambda: StageConfig(siz_b_LQ=48), ValueError, f"siz_b_LQ is 48, {TILES}"),
    "tile_float": (lambda: StageConfig(siz_b_LKV=64.0), ValueError, f"siz_b_LKV is 64.0, {TILES}"),
    "warps": (
        lambda: StageConfig(num_warps=3),
        ValueError,
        "num_warps is 3, expected 1, 2, 4, 8 or 16",
    ),
    "stages": (
        lambda: StageConfig(num_stages=0),
        ValueError,
        "num_stages is 0, expected an integer from 1 to 8",
    ),
    "splits": (
        lambda: StageConfig(num_splits=3),
        ValueError,
        "num_splits is 3, expected None or a power of two",
    ),
    "keep_q": (lambda: StageConfig(keep_q=1), TypeError, "keep_q is 1, expected a bool"),
    "config_chunk_size": (
        lambda: KernelConfig(chunk_size=100),
        ValueError,
        "chunk_size is 100, expected None or a power of two >= 16",
    ),
    "precision": (
        lambda: KernelConfig(precision="highest"),
        TypeError,
        "config.precision is 'highest', expected None, a jax.lax.Precision or a "
        "jax.lax.DotAlgorithmPreset",
    ),
    **{
        f"fused_min_heads_{heads}": (
            functools.partial(KernelConfig, fused_min_heads=heads),
            TypeError,
            f"config.fused_min_heads is {heads!r}, expected None or a number of heads",
        )
        for heads in ("many", -1, 1.0, True)
    },
    "config_no_stage": (
        lambda: KernelConfig(parallel_fw=StageConfig()),
        TypeError,
        f"config.parallel_fw is no stage, expected one of {', '.join(STAGES)}",
    ),
    "config_stage_dict": (
        lambda: KernelConfig(parallel_fw_H=dict(siz_b_LQ=64)),
        TypeError,
        "config.parallel_fw_H is a dict, expected a StageConfig or None",
    ),
    # the documented entries of xlstm_jax
    "v3noslice_states": (
        lambda: shapes_of(v3noslice.mlstm_chunkwise_max_triton, ARRAYS | {"m_initial": None}),
        ValueError,
        "initial states come all three or not at all: got c_initial, n_initial without m_initial",
    ),
    "v5xlchunksize_autocast": (
        lambda: shapes_of(
            v5xlchunksize.mlstm_chunkwise__xl_chunk, PLAIN | {"autocast_kernel_dtype": "int8"}
        ),
        TypeError,
        "autocast_kernel_dtype is int8, expected one of float32, bfloat16, float16",
    ),
}


@pytest.mark.parametrize("case", CHUNKWISE)
def test_bad_arguments_of_mlstm_chunkwise(case):
    changed, kind, message = CHUNKWISE[case]
    with pytest.raises(kind) as caught:
        shapes_of(mlstm_chunkwise, ARRAYS | changed)
    assert str(caught.value) == message


@pytest.mark.parametrize("case", OTHERS)
def test_other_bad_calls(case):
    call, kind, message = OTHERS[case]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


# Every parameter of the functions of xlstm_jax: cases of (value, error, message about the parameter
# {}).
TRACED = object()
NUMBER = {
    "negative": (-1.0, ValueError, "{} is -1.0, expected a finite number >= 0"),
    "nan": (float("nan"), ValueError, "{} is nan, expected a finite number >= 0"),
    "beyond_float32": (1e39, ValueError, "{} is 1e+39, expected a number in the range of float32"),
    "list": ([1.0], TypeError, "{} is a list, expected a float"),
    "traced": (TRACED, TypeError, "{} is traced, expected a Python float: mark it static in jit"),
}
FLAG = {
    "integer": (1, TypeError, "{} is a int, expected a Python bool"),
    "none": (None, TypeError, "{} is a NoneType, expected a Python bool"),
    "traced": (TRACED, TypeError, "{} is traced, expected a Python bool: mark it static in jit"),
}


def integers(expected):
    return {
        "list": ([64], ValueError, f"{{}} is [64], {expected}"),
        "float": (64.0, ValueError, f"{{}} is 64.0, {expected}"),
        "zero": (0, ValueError, f"{{}} is 0, {expected}"),
        "bool": (True, ValueError, f"{{}} is True, {expected}"),
        "traced": (TRACED, TypeError, f"{{}} is traced, {expected}: mark it static in jit"),
    }


CHUNK_SIZE_OF_STAGES = integers("expected a power of two >= 16")
CHUNK_SIZE_OF_ENTRIES = integers("expected None or a power of two >= 16")
LAUNCH = ("list", "float", "zero")
SIZE = {name: integers(TILES)[name] for name in LAUNCH}
AUTOCAST = "expected None or one of float32, bfloat16, float16"
BAD = {
    "eps": NUMBER,
    "norm_val": NUMBER,
    "qk_scale": {
        "nan": (float("nan"), ValueError, "{} is nan, expected a finite number"),
        "inf": (-float("inf"), ValueError, "{} is -inf, expected a finite number"),
        "string": ("0.1", TypeError, "{} is a str, expected a float"),
        **{name: NUMBER[name] for name in ("beyond_float32", "list", "traced")},
    },
    **dict.fromkeys(
        (
            "stabilize_correctly",
            "return_last_states",
            "return_all_states",
            "store_initial_state",
            "recompute_states_in_bw",
        ),
        FLAG,
    ),
    "num_chunks": integers("expected an integer >= 1")
    | {"float": (2.0, ValueError, "{} is 2.0, expected an integer >= 1")},
    "output_dtype": {
        "unknown": ("foo", TypeError, f"{{}} is 'foo', expected one of {INPUT_DTYPES}"),
        "none": (None, TypeError, f"{{}} is None, expected one of {INPUT_DTYPES}"),
        "integer": ("int8", TypeError, f"{{}} is int8, expected one of {INPUT_DTYPES}"),
        "without_x64": (
            "float64",
            TypeError,
            "{} is float64, which needs jax_enable_x64, expected one of float16, bfloat16, float32",
        ),
    },
    "autocast_kernel_dtype": {
        "unknown": ("foo", TypeError, f"{{}} is 'foo', {AUTOCAST}"),
        "list": ([16], TypeError, f"{{}} is [16], {AUTOCAST}"),
    },
    **dict.fromkeys(("siz_b_LQ", "siz_b_LKV", "siz_b_DHQK", "siz_b_DHHV"), SIZE),
    "num_warps": {name: integers("expected 1, 2, 4, 8 or 16")[name] for name in LAUNCH},
    "num_stages": {name: integers("expected an integer from 1 to 8")[name] for name in LAUNCH},
}
ARRAY, SEQUENCE = (
    {
        "list": ([1.0], TypeError, "{} is a list, expected an array"),
        "integer": (
            array(1, dtype="int32"),
            TypeError,
            f"{{}} has dtype int32, expected one of {dtypes}",
        ),
    }
    for dtypes in (INPUT_DTYPES, KERNEL_DTYPES)
)
SEQUENCES = ("q", "k", "v", "matQ", "matK", "matV", "matDeltaH")
GENERATORS = ("_mlstm_chunkwise_fwbw_generator", "_get_chunkwise_fwbw_kernel")
ENTRY = "mlstm_chunkwise_triton_stablef"
COPIES = ("mlstm_chunkwise_max_triton", "mlstm_chunkwise__xl_chunk")  # of it
# Each function once: the systems share the generators and the entry.
SYSTEMS = (v3noslice, v5xlchunksize, triton_stablef)
FUNCTIONS = {
    getattr(system, name): (system, name)
    for system in SYSTEMS
    for name in system.__all__
    if name not in COPIES
}


def parameters_of(system, name):
    """{parameter: (its array, cases)}.

    Arrays of a stage have no shape that fits: shapes are checked last.
    """
    function = getattr(system, GENERATORS[0] if name in GENERATORS else name)
    outcome = {}
    for parameter in inspect.signature(function).parameters:
        key = parameter if parameter.startswith("siz_b") else parameter.lower()
        if key == "chunk_size":
            outcome[parameter] = (
                None,
                CHUNK_SIZE_OF_ENTRIES if name in (*GENERATORS, ENTRY) else CHUNK_SIZE_OF_STAGES,
            )
        elif key in BAD:
            outcome[parameter] = None, BAD[key]
        else:
            outcome[parameter] = (
                ARRAYS.get(parameter, array(1)),
                SEQUENCE if parameter in SEQUENCES else ARRAY,
            )
    return outcome


@functools.cache
def first_function_with_each_parameter():
    return {
        parameter: name
        for system, name in reversed(FUNCTIONS.values())
        for parameter in parameters_of(system, name)
    }


@pytest.mark.parametrize(
    ("system", "name"),
    [
        pytest.param(*function, id=f"{function[0].__name__.split('.')[-1]}-{function[1]}")
        for function in FUNCTIONS.values()
    ],
)
def test_bad_arguments_of_the_functions_of_xlstm_jax(system, name):
    """Every parameter is checked by every function: by one bad value, and by all of them in the
    first function that has it."""
    parameters, first = parameters_of(system, name), first_function_with_each_parameter()
    good = {other: x for other, (x, _) in parameters.items() if x is not None}
    if name == "_get_chunkwise_fwbw_kernel":  # which has no default
        good["autocast_kernel_dtype"] = "float32"
    for parameter, (_, cases) in parameters.items():
        whole = first[parameter] == name
        for value, kind, message in [*cases.values()][: None if whole else 1]:
            bad = good | {parameter: array() if value is TRACED else value}
            with pytest.raises(kind) as caught:
                shapes_of(getattr(system, name), bad)
            assert str(caught.value) == message.format(parameter)


def test_a_refused_flag_leaves_the_generator_as_it_was():
    """1 and True are the same key of a cache."""
    generate = triton_stablef._mlstm_chunkwise_fwbw_generator
    with pytest.raises(TypeError, match="return_last_states is a int"):
        generate("float32", chunk_size=128, return_last_states=1)
    h, *_ = jax.eval_shape(
        generate("float32", chunk_size=128, return_last_states=True), *PLAIN.values()
    )
    assert h.shape == SHAPES["v"]
    assert generate("float32", chunk_size=np.int64(128)) is generate("float32", chunk_size=128)


def test_a_stabiliser_other_than_zeros_is_refused_with_the_sigmoid_gate():
    """By every function; where it is traced nothing is known of it."""
    message = "has values other than 0 with input_gate 'sigmoid', expected None or zeros$"
    x, m = arrays(states=True), jnp.full((B, NH), 1.0)
    token = {name: x[name][:, :, 0] for name in "qkvif"} | dict(c=x["c_initial"], n=x["n_initial"])
    for function in (mlstm_chunkwise, reference.chunkwise, reference.recurrence):
        with pytest.raises(ValueError, match=f"^m_initial {message}"):
            function(**x | {"m_initial": m}, input_gate="sigmoid")
    for function, arguments in (
        (mlstm_recurrent_step, token),
        (
            mlstm_recurrent_sequence,
            {name: x[name] for name in "qkvif"} | {name: token[name] for name in "cn"},
        ),
    ):
        run = functools.partial(function, **arguments, input_gate="sigmoid")
        with pytest.raises(ValueError, match=f"^m {message}"):
            run(m=m)
        h, (_, _, last) = jax.eval_shape(lambda m, run=run: run(m=m), m)
        assert (h.shape[-1], last.shape) == (DHV, (B, NH))


def test_integers_and_bools_of_numpy_are_taken():
    expected = jax.eval_shape(
        functools.partial(mlstm_chunkwise, chunk_size=16, return_last_states=True), **PLAIN
    )
    numpys = functools.partial(
        mlstm_chunkwise,
        chunk_size=np.int64(16),
        return_last_states=np.bool_(True),
        eps=np.float32(1e-6),
    )
    assert jax.eval_shape(numpys, **PLAIN) == expected
    assert KernelConfig(chunk_size=np.uint8(64)) == KernelConfig(chunk_size=64)
    assert StageConfig(siz_b_LQ=np.int32(64), num_warps=np.int64(8)) == StageConfig(
        siz_b_LQ=64, num_warps=8
    )


def test_triton_can_be_traced_where_there_is_no_gpu():
    assert (
        jax.eval_shape(functools.partial(mlstm_chunkwise, backend="triton"), **PLAIN).shape
        == SHAPES["v"]
    )


def test_the_plain_function_checks_the_layout_alike():
    changed, kind, message = CHUNKWISE["i_of_BNTH"]
    with pytest.raises(kind) as caught:
        shapes_of(reference.chunkwise, changed)
    assert str(caught.value) == message


def test_sequence_parallelism_checks_the_layout_alike():
    """The shapes in the message are those of a shard."""
    mesh = jax.make_mesh((2,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    run = functools.partial(mlstm_chunkwise_sequence_parallel, axis_name="s", layout="BTNH")
    split = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(P(None, "s"),) * 3 + (P(None, None, "s"),) * 2,
        out_specs=P(None, "s"),
    )
    x = arrays("BTNH") | {name: jnp.zeros((B, NH, S)) for name in "if"}
    of_a_shard = OF_BTNH | dict(
        came=(B, NH, S // 2), expected=(B, S // 2, NH), q=(B, S // 2, NH, DHQK)
    )
    message = re.escape(SWAPPED.format(name="i", **of_a_shard))
    with pytest.raises(ValueError, match=f"^{message}(\\n|$)"):
        jax.eval_shape(split, *x.values())


SWAPPED_LAYOUT = (
    'layout="{}" reads q as ({}) and finds S < NH, fewer steps than heads: if it is ({}), pass '
    'layout="{}"'
)


@pytest.mark.parametrize("layout", ["BNTH", "BTNH"])
def test_arrays_of_the_other_layout_get_a_warning_once(layout):
    axes = {"BNTH": "B, NH, S, DHQK", "BTNH": "B, S, NH, DHQK"}
    other = {"BNTH": "BTNH", "BTNH": "BNTH"}[layout]
    message = SWAPPED_LAYOUT.format(layout, axes[layout], axes[other], other)
    x = arrays(other)
    validation.warn_of_layout.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            mlstm_chunkwise(**x, layout=layout)
    validation.warn_of_layout.cache_clear()
    assert [(str(warning.message), warning.filename) for warning in caught] == [(message, __file__)]


@pytest.mark.filterwarnings("error")
def test_states_and_segments_tell_the_layout():
    """A single token after an earlier part is no mistake."""
    x = {name: jnp.zeros((B, 1, NH, *shape)) for name, shape in TRAILING.items()}
    states = {name: jnp.zeros(shape) for name, shape in STATES.items()}
    validation.warn_of_layout.cache_clear()
    for others in (states, dict(segment_ids=jnp.zeros((B, 1), "int32"))):
        assert jax.eval_shape(
            functools.partial(mlstm_chunkwise, layout="BTNH"), **x, **others
        ).shape == (B, 1, NH, DHV)


@pytest.mark.filterwarnings("error")
def test_the_entry_of_xlstm_jax_has_one_layout():
    """Which no warning can tell the caller to change."""
    x = {name: jnp.zeros((1, 4, 2, *shape)) for name, shape in TRAILING.items()}
    validation.warn_of_layout.cache_clear()
    assert jax.eval_shape(triton_stablef.mlstm_chunkwise_triton_stablef, **x).shape == (
        1,
        4,
        2,
        DHV,
    )


def test_square_gates_fit_both_layouts():
    """Where S = NH nothing tells the layouts apart."""
    x = {name: jnp.zeros((1, 2, 2, *shape)) for name, shape in TRAILING.items()}
    shapes = {
        layout: jax.eval_shape(functools.partial(mlstm_chunkwise, layout=layout), **x).shape
        for layout in ("BNTH", "BTNH")
    }
    assert set(shapes.values()) == {(1, 2, 2, DHV)}


def test_eps_may_be_the_largest_float32():
    largest = float(np.finfo("float32").max)
    assert jax.eval_shape(
        functools.partial(mlstm_chunkwise, eps=largest, norm_val=largest), **arrays()
    ).shape == (B, NH, S, DHV)


def test_arrays_of_different_dtypes_are_taken_where_the_kernel_dtype_is_given():
    mixed = arrays(k=jnp.ones((B, NH, S, DHQK), "bfloat16"), v=jnp.ones((B, NH, S, DHV), "float16"))
    h = jax.eval_shape(
        functools.partial(mlstm_chunkwise, autocast_kernel_dtype="bfloat16"), **mixed
    )
    assert h.dtype == jnp.float32  # that of q


@pytest.mark.parametrize(
    "normalize",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["normalised", "unnormalised"],
)
def test_last_states_of_the_sigmoid_gate_are_taken_as_initial_ones(normalize):
    x = arrays()
    x["v"] = x["v"] + 1.0
    run = jax.jit(
        functools.partial(
            mlstm_chunkwise, input_gate="sigmoid", normalize=normalize, return_last_states=True
        )
    )
    _, (c, n, m) = run(**x)
    assert not m.any()
    with_m, without = (
        run(**x, c_initial=c, n_initial=n, m_initial=m),
        run(**x, c_initial=c, n_initial=n),
    )
    ignored = run(**x, c_initial=c, n_initial=n, m_initial=m + 3.0)  # m is 0 whatever is given
    for a, b, d in zip(*map(jax.tree.leaves, (with_m, without, ignored)), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
        assert np.array_equal(np.asarray(a), np.asarray(d))


DERIVATIVE = (
    "mlstm_chunkwise has first derivatives in reverse mode only; for second derivatives and "
    "forward mode use "
    "mlstm_pallas.reference.chunkwise or mlstm_pallas.reference.recurrence"
)
ONE_STEP = {name: (1, 1, 16, *(16 for _ in shape)) for name, shape in TRAILING.items()}


def of_q(q):
    return mlstm_chunkwise(
        q,
        **{name: jnp.ones(shape) for name, shape in ONE_STEP.items() if name != "q"},
        backend="xla",
    )


def loss(q):
    return jnp.sum(of_q(q) ** 2)


def layers(q):
    return jax.lax.scan(lambda x, _: (of_q(x), None), q, None, length=2)[0]


def tangent(function):
    return lambda q: jax.jvp(function, (q,), (q,))[1]


def slope(function):
    return lambda q: jnp.sum(jax.grad(lambda q: jnp.sum(function(q)))(q) ** 2)


DERIVATIVES = {
    "jvp": tangent(of_q),
    "jvp_of_jit": tangent(jax.jit(of_q)),
    "jvp_of_checkpoint": tangent(jax.checkpoint(of_q)),
    "jvp_of_scan": tangent(layers),
    "jvp_of_cond": tangent(lambda q: jax.lax.cond(q[0, 0, 0, 0] > 0, of_q, jnp.negative, q)),
    "jvp_of_vmap": tangent(lambda q: jax.vmap(of_q)(q[None])),
    "linearize": lambda q: jax.linearize(of_q, q)[1](q),
    "jacfwd": jax.jacfwd(of_q),
    "hessian": jax.hessian(loss),
    "jacrev_of_jacfwd": jax.jacrev(jax.jacfwd(loss)),
    "grad_of_grad": jax.grad(slope(of_q)),
    "grad_of_grad_of_scan": jax.grad(slope(layers)),
}


@pytest.mark.parametrize("transformation", DERIVATIVES)
def test_a_derivative_that_does_not_exist_is_refused_by_name(transformation):
    with pytest.raises(TypeError) as caught:
        DERIVATIVES[transformation](jnp.ones(ONE_STEP["q"]))
    assert str(caught.value).split("\n")[0] == DERIVATIVE


def test_what_refuses_derivatives_is_not_in_programs():
    """Nor in the jaxpr of a gradient, but for the marks of the two passes."""
    q = array(*ONE_STEP["q"])
    for function, expected in (
        (of_q, {"in_reverse_mode": 1, "not_differentiated": 1}),
        (jax.grad(loss), {"not_differentiated": 2}),
    ):
        traced = jax.jit(function).trace(q)
        marks = re.findall(
            r"= (in_reverse_mode|not_differentiated|reverse_mode_tangent)\b", str(traced.jaxpr)
        )
        assert Counter(marks) == expected
        assert not re.search("reverse_mode|not_differentiated", traced.lower().as_text())


@pytest.mark.parametrize("layout", ["BNTH", "BTNH"])
def test_the_plain_function_takes_the_call_as_it_is(layout):
    """Forward mode, and S no multiple of the chunk."""
    x = arrays(layout, states=True)
    options = dict(
        chunk_size=16,
        return_last_states=True,
        layout=layout,
        backend="interpret",
        segment_ids=jnp.zeros((B, S), "int32"),
        sequence_lengths=jnp.zeros((B,), "int32"),
    )
    expected = jax.eval_shape(functools.partial(mlstm_chunkwise, **options), **x)
    h, tangent = jax.eval_shape(
        lambda x: jax.jvp(lambda x: reference.chunkwise(**x, **options), (x,), (x,)), x
    )
    assert h == tangent == expected


ATTRIBUTES = """
import sys, mlstm_pallas
modules = ["distributed", "export", "reference", "xlstm_jax"]
assert not {f"mlstm_pallas.{name}" for name in modules} & sys.modules.keys()
for name in modules:
    assert getattr(mlstm_pallas, name).__name__ == f"mlstm_pallas.{name}"
mlstm_pallas.xlstm_jax.triton_stablef.mlstm_chunkwise_triton_stablef
for module in (mlstm_pallas, mlstm_pallas.xlstm_jax):
    assert {*module.__all__} <= {*dir(module)}
    for name in module.__all__:
        getattr(module, name)
print("all there")
"""


def test_modules_are_attributes_that_are_imported_when_asked_for():
    """And modules list all that they have."""
    command = [sys.executable, "-c", ATTRIBUTES]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (out.stdout, out.stderr) == ("all there\n", "")


def test_an_attribute_that_is_none():
    with pytest.raises(AttributeError) as caught:
        mlstm_pallas.no_such_module  # noqa: B018
    assert str(caught.value) == "module 'mlstm_pallas' has no attribute 'no_such_module'"
    with pytest.raises(
        AttributeError, match=r"^module 'mlstm_pallas.xlstm_jax' has no attribute 'no_such_module'$"
    ):
        mlstm_pallas.xlstm_jax.no_such_module  # noqa: B018


def lowering_of(call):
    """The kernels in the jaxpr of a call, "both" where the platform decides, or "xla"."""
    x = {name: jnp.zeros(shape) for name, shape in ONE_STEP.items()}
    text = str(jax.make_jaxpr(lambda: call(**x))())  # a function that was not traced before
    return "both" if "platform_index" in text else "kernels" if "pallas_call" in text else "xla"


def test_the_backend_of_the_environment_comes_last(monkeypatch):
    """And is read when a function is traced."""
    monkeypatch.setenv("MLSTM_PALLAS_BACKEND", "interpret")
    entry = triton_stablef.mlstm_chunkwise_triton_stablef
    for call in (mlstm_chunkwise, entry):
        assert lowering_of(call) == "kernels"
    assert lowering_of(functools.partial(mlstm_chunkwise, backend="xla")) == "xla"
    for backend, expected in (("xla", "xla"), (None, "both")):
        with use_backend(backend):
            assert lowering_of(mlstm_chunkwise) == lowering_of(entry) == expected
    monkeypatch.setenv("MLSTM_PALLAS_BACKEND", "xla")
    assert lowering_of(mlstm_chunkwise) == lowering_of(entry) == "xla"
    for nothing in (
        lambda: monkeypatch.setenv("MLSTM_PALLAS_BACKEND", ""),
        lambda: monkeypatch.delenv("MLSTM_PALLAS_BACKEND"),
    ):
        nothing()
        assert lowering_of(mlstm_chunkwise) == lowering_of(entry) == "both"


def test_a_wrong_backend_of_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("MLSTM_PALLAS_BACKEND", "cuda")
    token = {name: jnp.zeros((B, NH, *shape)) for name, shape in TRAILING.items()}
    for call in (
        functools.partial(mlstm_chunkwise, **arrays()),
        functools.partial(mlstm_recurrent_step, **token),
    ):
        with pytest.raises(
            ValueError,
            match=r"^MLSTM_PALLAS_BACKEND is 'cuda', expected one of triton, mosaic_gpu, "
            r"interpret, ",
        ):
            call()
    monkeypatch.setenv("MLSTM_PALLAS_BACKEND", "mosaic_gpu")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    with pytest.raises(ValueError, match=r"^MLSTM_PALLAS_BACKEND is 'mosaic_gpu' and jax is "):
        mlstm_chunkwise(**arrays())


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


def test_messages_of_a_step():
    token = {name: jnp.zeros((B, NH, *shape)) for name, shape in TRAILING.items()}
    with pytest.raises(TypeError) as caught:
        mlstm_recurrent_step(**token | {"k": Param(token["k"])})
    assert str(caught.value) == "k is a Param, expected an array: pass its value"
    with pytest.raises(TypeError) as caught:
        mlstm_recurrent_step(**token, c=(1, jnp.zeros(1)), n=token["q"], m=token["i"])
    assert str(caught.value) == "c is a tuple, expected an array: pass the states one by one"
    with pytest.raises(
        ValueError, match=r"^eps is 1e\+39, expected a number in the range of float32$"
    ):
        mlstm_recurrent_step(**token, eps=1e39)
    with pytest.raises(
        TypeError, match=r"^input_gate is a ArrayImpl, expected one of exp, sigmoid$"
    ):
        mlstm_recurrent_step(**token, input_gate=jnp.zeros(3))
    for backend in (None, "xla"):
        with pytest.raises(TypeError) as caught:
            mlstm_recurrent_step(
                **{name: np.zeros(x.shape) for name, x in token.items()}, backend=backend
            )
        assert str(caught.value) == f"q has dtype float64, expected one of {KERNEL_DTYPES}{FLOAT64}"
