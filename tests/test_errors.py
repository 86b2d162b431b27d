"""Every bad call says, in one whole sentence, which argument it is, what came and what was expected."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from mlstm_pallas import KernelConfig, StageConfig, mlstm_chunkwise, use_backend
from mlstm_pallas.stages import STAGES
from mlstm_pallas.xlstm_jax import max_triton_fwbw_v3noslice as v3noslice
from mlstm_pallas.xlstm_jax import max_triton_fwbw_v5xlchunksize as v5xlchunksize
from mlstm_pallas.xlstm_jax import triton_stablef

SHAPES = dict(
    q=(2, 3, 40, 16),
    k=(2, 3, 40, 16),
    v=(2, 3, 40, 24),
    i=(2, 3, 40),
    f=(2, 3, 40),
    c_initial=(2, 3, 16, 24),
    n_initial=(2, 3, 16),
    m_initial=(2, 3),
)
Q = "as q has shape (2, 3, 40, 16)"
INPUT_DTYPES = "float16, bfloat16, float32, float64"


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


ARRAYS = {name: array(*shape) for name, shape in SHAPES.items()}
PLAIN = {name: ARRAYS[name] for name in "qkvif"}


def shapes_of(function, arguments):
    """Traces function: shapes are arrays, the rest is static."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    others = {name: x for name, x in arguments.items() if name not in arrays}
    return jax.eval_shape(lambda x: function(**x, **others), arrays)


def on_device(kind, function, *args, **kwargs):
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, "gpu"))):
        return function(*args, **kwargs)


def traced(name, value):
    """The argument as it comes when it is not static in a jit."""
    return jax.eval_shape(lambda x: mlstm_chunkwise(**{n: jnp.zeros(s) for n, s in SHAPES.items()}, **{name: x}), value)


def enters(backend):
    with use_backend(backend):
        pass


# Changed arguments of mlstm_chunkwise: (error, whole message).
CHUNKWISE = {
    # shapes
    "q_rank": ({"q": array(2, 40, 16)}, ValueError, "q has shape (2, 40, 16), expected (B, NH, S, DHQK)"),
    "q_no_steps": ({"q": array(2, 3, 0, 16)}, ValueError, "q has shape (2, 3, 0, 16), expected (B, NH, S, DHQK) with S >= 1"),
    "q_no_columns": ({"q": array(2, 3, 40, 0)}, ValueError, "q has shape (2, 3, 40, 0), expected (B, NH, S, DHQK) with DHQK >= 1"),
    "k_length": ({"k": array(2, 3, 41, 16)}, ValueError, f"k has shape (2, 3, 41, 16), expected (B, NH, S, DHQK) = (2, 3, 40, 16), {Q}"),
    "k_heads": ({"k": array(2, 1, 40, 16)}, ValueError, f"k has shape (2, 1, 40, 16), expected (B, NH, S, DHQK) = (2, 3, 40, 16), {Q}"),
    "k_columns": ({"k": array(2, 3, 40, 24)}, ValueError, f"k has shape (2, 3, 40, 24), expected (B, NH, S, DHQK) = (2, 3, 40, 16), {Q}"),
    "v_rank": ({"v": array(2, 3, 40)}, ValueError, "v has shape (2, 3, 40), expected (B, NH, S, DHV) = (2, 3, 40, DHV)"),
    "v_length": ({"v": array(2, 3, 39, 24)}, ValueError, f"v has shape (2, 3, 39, 24), expected (B, NH, S, DHV) = (2, 3, 40, 24), {Q}"),
    "v_no_columns": ({"v": array(2, 3, 40, 0)}, ValueError, "v has shape (2, 3, 40, 0), expected (B, NH, S, DHV) with DHV >= 1"),
    "i_axis_left_over": ({"i": array(2, 3, 40, 1)}, ValueError, f"i has shape (2, 3, 40, 1), expected (B, NH, S) = (2, 3, 40), {Q}"),
    "f_heads_missing": ({"f": array(2, 40)}, ValueError, f"f has shape (2, 40), expected (B, NH, S) = (2, 3, 40), {Q}"),
    "f_scalar": ({"f": array()}, ValueError, f"f has shape (), expected (B, NH, S) = (2, 3, 40), {Q}"),
    "heads_behind_steps": (
        {"q": array(2, 40, 3, 16), "k": array(2, 40, 3, 16), "v": array(2, 40, 3, 24)},
        ValueError,
        "i has shape (2, 3, 40), expected (B, NH, S) = (2, 40, 3), as q has shape (2, 40, 3, 16): axes 1 and 2 are swapped; "
        'layout="BTNH" has them so for all of q, k, v, i, f',
    ),
    "c_swapped": (
        {"c_initial": array(2, 3, 24, 16)},
        ValueError,
        f"c_initial has shape (2, 3, 24, 16), expected (B, NH, DHQK, DHV) = (2, 3, 16, 24), {Q}",
    ),
    "n_of_values": (
        {"n_initial": array(2, 3, 24)},
        ValueError,
        f"n_initial has shape (2, 3, 24), expected (B, NH, DHQK) = (2, 3, 16), {Q}",
    ),
    "m_axis_left_over": ({"m_initial": array(2, 3, 1)}, ValueError, f"m_initial has shape (2, 3, 1), expected (B, NH) = (2, 3), {Q}"),
    "no_n": ({"n_initial": None}, ValueError, "initial states come all three or not at all: got c_initial, m_initial without n_initial"),
    "c_alone": (
        {"n_initial": None, "m_initial": None},
        ValueError,
        "initial states come all three or not at all: got c_initial without n_initial, m_initial",
    ),
    # gates and packed sequences
    "input_gate": ({"input_gate": "relu"}, ValueError, "input_gate is 'relu', expected one of exp, sigmoid"),
    "normalize_exp": ({"normalize": False}, ValueError, "normalize is False with input_gate 'exp', expected input_gate=\"sigmoid\""),
    "n_alone_sigmoid": (
        {"input_gate": "sigmoid", "m_initial": None, "c_initial": None},
        ValueError,
        "initial states come both or not at all: got n_initial without c_initial",
    ),
    "segment_ids_list": ({"segment_ids": [[0] * 40] * 2}, TypeError, "segment_ids is a list, expected an array"),
    "segment_ids_float": ({"segment_ids": array(2, 40)}, TypeError, "segment_ids has dtype float32, expected an integer dtype"),
    "segment_ids_heads": (
        {"segment_ids": array(2, 3, 40, dtype="int32")},
        ValueError,
        f"segment_ids has shape (2, 3, 40), expected (B, S) = (2, 40), {Q}",
    ),
    # dtypes
    "q_integer": ({"q": array(2, 3, 40, 16, dtype="int32")}, TypeError, f"q has dtype int32, expected one of {INPUT_DTYPES}"),
    "k_dtype": ({"k": array(2, 3, 40, 16, dtype="bfloat16")}, TypeError, "k has dtype bfloat16, expected float32, the dtype of q"),
    "v_dtype": ({"v": array(2, 3, 40, 24, dtype="float16")}, TypeError, "v has dtype float16, expected float32, the dtype of q"),
    "i_integer": ({"i": array(2, 3, 40, dtype="int8")}, TypeError, f"i has dtype int8, expected one of {INPUT_DTYPES}"),
    "f_bool": ({"f": array(2, 3, 40, dtype="bool")}, TypeError, f"f has dtype bool, expected one of {INPUT_DTYPES}"),
    "f_complex": ({"f": array(2, 3, 40, dtype="complex64")}, TypeError, f"f has dtype complex64, expected one of {INPUT_DTYPES}"),
    "q_list": ({"q": [[1.0]]}, TypeError, "q is a list, expected an array"),
    "f_none": ({"f": None}, TypeError, "f is a NoneType, expected an array"),
    "m_number": ({"m_initial": 0.0}, TypeError, "m_initial is a float, expected an array"),
    "autocast_unknown": (
        {"autocast_kernel_dtype": "fp8"},
        TypeError,
        "autocast_kernel_dtype is 'fp8', expected None or one of float32, bfloat16, float16",
    ),
    "autocast_number": (
        {"autocast_kernel_dtype": 16},
        TypeError,
        "autocast_kernel_dtype is 16, expected None or one of float32, bfloat16, float16",
    ),
    "autocast_float64": (
        {"autocast_kernel_dtype": "float64", "backend": "triton"},
        TypeError,
        'autocast_kernel_dtype is float64, expected one of float32, bfloat16, float16; float64 runs on backend="xla" only: '
        "cast q, k and v to float32, or set autocast_kernel_dtype",
    ),
    "float64_without_x64": (
        {"autocast_kernel_dtype": "float64", "backend": "xla"},
        TypeError,
        "autocast_kernel_dtype is float64, expected one of float32, bfloat16, float16: jax_enable_x64, which float64 needs, is not set",
    ),
    # scalars and flags
    "chunk_size_odd": ({"chunk_size": 48}, ValueError, "chunk_size is 48, expected None or a power of two >= 16"),
    "chunk_size_small": ({"chunk_size": np.int64(8)}, ValueError, f"chunk_size is {np.int64(8)!r}, expected None or a power of two >= 16"),
    "chunk_size_negative": ({"chunk_size": -64}, ValueError, "chunk_size is -64, expected None or a power of two >= 16"),
    "chunk_size_float": ({"chunk_size": 64.0}, ValueError, "chunk_size is 64.0, expected None or a power of two >= 16"),
    "chunk_size_bool": ({"chunk_size": True}, ValueError, "chunk_size is True, expected None or a power of two >= 16"),
    "chunk_size_string": ({"chunk_size": "64"}, ValueError, "chunk_size is '64', expected None or a power of two >= 16"),
    "eps_negative": ({"eps": -1e-6}, ValueError, "eps is -1e-06, expected a finite number >= 0"),
    "eps_nan": ({"eps": float("nan")}, ValueError, "eps is nan, expected a finite number >= 0"),
    "eps_string": ({"eps": "1e-6"}, TypeError, "eps is a str, expected a float"),
    "eps_none": ({"eps": None}, TypeError, "eps is a NoneType, expected a float"),
    "norm_val_inf": ({"norm_val": float("inf")}, ValueError, "norm_val is inf, expected a finite number >= 0"),
    "norm_val_bool": ({"norm_val": True}, TypeError, "norm_val is a bool, expected a float"),
    "return_last_states": ({"return_last_states": 1}, TypeError, "return_last_states is a int, expected a Python bool"),
    "stabilize_correctly": ({"stabilize_correctly": None}, TypeError, "stabilize_correctly is a NoneType, expected a Python bool"),
    "recompute": ({"recompute_states_in_bw": "no"}, TypeError, "recompute_states_in_bw is a str, expected a Python bool"),
    "backend": ({"backend": "cuda"}, ValueError, "backend is 'cuda', expected None or one of triton, interpret, xla"),
    "backend_type": ({"backend": ["xla"]}, ValueError, "backend is ['xla'], expected None or one of triton, interpret, xla"),
    "config_dict": ({"config": {"chunk_size": 64}}, TypeError, "config is a dict, expected a KernelConfig or None"),
    "config_class": ({"config": KernelConfig}, TypeError, "config is a type, expected a KernelConfig or None"),
    "config_of_a_stage": ({"config": StageConfig()}, TypeError, "config is a StageConfig, expected a KernelConfig or None"),
}

LARGE = StageConfig(siz_b_LQ=128, siz_b_LKV=128, siz_b_DHQK=64, siz_b_DHHV=256, num_warps=8, num_stages=3)
HEADS = dict(q=array(1, 8, 512, 256, dtype="bfloat16"), k=array(1, 8, 512, 256, dtype="bfloat16")) | dict(
    v=array(1, 8, 512, 512, dtype="bfloat16"), i=array(1, 8, 512), f=array(1, 8, 512)
)
TILES = "expected a power of two >= 16"
GPU_ONLY = (
    "backend is 'triton', whose kernels are for GPUs, and the computation is lowered for a CPU: expected backend None or 'xla' "
    "(plain jnp), or 'interpret' (the kernels, interpreted)"
)

# Other calls: (call, error, whole message).
OTHERS = {
    "eps_traced": (lambda: traced("eps", 1e-6), TypeError, "eps is traced, expected a Python float: mark it static in jit"),
    "chunk_size_traced": (
        lambda: traced("chunk_size", 64),
        TypeError,
        "chunk_size is traced, expected None or a power of two >= 16: mark it static in jit",
    ),
    "flag_traced": (
        lambda: traced("stabilize_correctly", True),
        TypeError,
        "stabilize_correctly is traced, expected a Python bool: mark it static in jit",
    ),
    "keys_of_random_numbers": (
        lambda: shapes_of(mlstm_chunkwise, PLAIN | {"q": array(2, 3, 40, 16, dtype=jax.eval_shape(jax.random.key, 0).dtype)}),
        TypeError,
        f"q has dtype key<fry>, expected one of {INPUT_DTYPES}",
    ),
    "use_backend": (lambda: enters("gpu"), ValueError, "backend is 'gpu', expected None or one of triton, interpret, xla"),
    "use_backend_type": (lambda: enters(jnp), ValueError, f"backend is {jnp!r}, expected None or one of triton, interpret, xla"),
    "triton_on_a_cpu": (
        lambda: jax.jit(functools.partial(mlstm_chunkwise, backend="triton")).trace(**PLAIN).lower(lowering_platforms=("cpu",)),
        ValueError,
        GPU_ONLY,
    ),
    # configs
    "tile_odd": (lambda: StageConfig(siz_b_LQ=48), ValueError, f"siz_b_LQ is 48, {TILES}"),
    "tile_small": (lambda: StageConfig(siz_b_DHHV=8), ValueError, f"siz_b_DHHV is 8, {TILES}"),
    "tile_float": (lambda: StageConfig(siz_b_LKV=64.0), ValueError, f"siz_b_LKV is 64.0, {TILES}"),
    "tile_none": (lambda: StageConfig(siz_b_loop=None), ValueError, f"siz_b_loop is None, {TILES}"),
    "warps": (lambda: StageConfig(num_warps=3), ValueError, "num_warps is 3, expected 1, 2, 4, 8 or 16"),
    "warps_bool": (lambda: StageConfig(num_warps=True), ValueError, "num_warps is True, expected 1, 2, 4, 8 or 16"),
    "stages": (lambda: StageConfig(num_stages=0), ValueError, "num_stages is 0, expected an integer from 1 to 8"),
    "splits": (lambda: StageConfig(num_splits=3), ValueError, "num_splits is 3, expected None or a power of two"),
    "keep_q": (lambda: StageConfig(keep_q=1), TypeError, "keep_q is 1, expected a bool"),
    "config_chunk_size": (lambda: KernelConfig(chunk_size=100), ValueError, "chunk_size is 100, expected None or a power of two >= 16"),
    "precision": (
        lambda: KernelConfig(precision="highest"),
        TypeError,
        "config.precision is 'highest', expected None, a jax.lax.Precision or a jax.lax.DotAlgorithmPreset",
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
    "too_large_for_an_a10": (
        lambda: on_device("NVIDIA A10", shapes_of, mlstm_chunkwise, HEADS | {"config": KernelConfig(chunk_size=256, parallel_fw_H=LARGE)}),
        ValueError,
        "config.parallel_fw_H needs at least 262144 bytes of shared memory for bfloat16 heads of 256/512 in chunks of 256, "
        "expected at most 101376, what a block may have on NVIDIA A10: smaller tiles or fewer num_stages need less",
    ),
    # the documented entries of xlstm_jax
    "stablef_k": (
        lambda: shapes_of(triton_stablef.mlstm_chunkwise_triton_stablef, PLAIN | {"k": array(2, 3, 40, 24)}),
        ValueError,
        f"k has shape (2, 3, 40, 24), expected (B, NH, S, DHQK) = (2, 3, 40, 16), {Q}",
    ),
    "v3noslice_states": (
        lambda: shapes_of(v3noslice.mlstm_chunkwise_max_triton, ARRAYS | {"m_initial": None}),
        ValueError,
        "initial states come all three or not at all: got c_initial, n_initial without m_initial",
    ),
    "v5xlchunksize_chunk_size": (
        lambda: shapes_of(v5xlchunksize.mlstm_chunkwise__xl_chunk, PLAIN | {"chunk_size": 96}),
        ValueError,
        "chunk_size is 96, expected None or a power of two >= 16",
    ),
    "v5xlchunksize_autocast": (
        lambda: shapes_of(v5xlchunksize.mlstm_chunkwise__xl_chunk, PLAIN | {"autocast_kernel_dtype": "int8"}),
        TypeError,
        "autocast_kernel_dtype is int8, expected one of float32, bfloat16, float16",
    ),
    "stablef_autocast_unknown": (
        lambda: shapes_of(triton_stablef.mlstm_chunkwise_triton_stablef, PLAIN | {"autocast_kernel_dtype": "fp32"}),
        TypeError,
        "autocast_kernel_dtype is 'fp32', expected None or one of float32, bfloat16, float16",
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


def test_integers_and_bools_of_numpy_are_taken():
    expected = jax.eval_shape(functools.partial(mlstm_chunkwise, chunk_size=16, return_last_states=True), **PLAIN)
    numpys = functools.partial(mlstm_chunkwise, chunk_size=np.int64(16), return_last_states=np.bool_(True), eps=np.float32(1e-6))
    assert jax.eval_shape(numpys, **PLAIN) == expected
    assert KernelConfig(chunk_size=np.uint8(64)) == KernelConfig(chunk_size=64)
    assert StageConfig(siz_b_LQ=np.int32(64), num_warps=np.int64(8)) == StageConfig(siz_b_LQ=64, num_warps=8)


def test_triton_can_be_traced_where_there_is_no_gpu():
    assert jax.eval_shape(functools.partial(mlstm_chunkwise, backend="triton"), **PLAIN).shape == SHAPES["v"]
