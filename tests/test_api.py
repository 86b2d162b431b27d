"""The contract of mlstm_chunkwise: transformations, platforms, dtypes, and errors for every bad argument."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from oracle import assert_close, oracle, random_inputs, tolerance

from mlstm_pallas import KernelConfig, StageConfig, mlstm_chunkwise, use_backend
from mlstm_pallas.backend import target_device_kind
from mlstm_pallas.config import UNKNOWN_DEVICE

pytestmark = pytest.mark.usefixtures("quick_compilation")

INPUTS = random_inputs(0, 2, 2, 40, 16, 24)
PLAIN = {name: INPUTS[name] for name in "qkvif"}


def shapes(dtype="bfloat16", S=256):
    x = random_inputs(0, 1, 2, S, 64, 64, dtype=dtype, states=False)
    return [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in x.values()]


def test_default_backend_on_a_cpu_is_xla():
    found = mlstm_chunkwise(**INPUTS, chunk_size=16)
    expected = mlstm_chunkwise(**INPUTS, chunk_size=16, backend="xla")
    assert np.array_equal(np.asarray(found), np.asarray(expected))
    assert "pallas_call" not in jax.jit(functools.partial(mlstm_chunkwise, backend="xla")).trace(*PLAIN.values()).jaxpr.pretty_print()


def an_h200():
    """Lowering for CUDA on a machine without a GPU needs to be told which one is meant."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", None, "gpu")))


def test_one_trace_lowers_for_the_cpu_and_for_cuda():
    with an_h200():
        traced = jax.jit(mlstm_chunkwise).trace(*shapes())
        target = "__gpu$xla.gpu.triton"
        assert target not in traced.lower(lowering_platforms=("cpu",)).as_text()
        assert target in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_lowers_for_cuda(dtype):
    def loss(*x):
        return mlstm_chunkwise(*x).astype("float32").sum()

    with an_h200():
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4))).trace(*shapes(dtype))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for stage in ("chunk_gates", "recurrent_fw_C", "parallel_fw_H", "recurrent_bw_dC", "parallel_bw_dQKV"):
        assert stage in text


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_jit_vmap_scan_and_remat_give_the_same_numbers(backend):
    run = functools.partial(mlstm_chunkwise, chunk_size=16, backend=backend)
    expected = run(**INPUTS)
    bound = 2 * tolerance("float32", 40 + 16)
    assert_close(jax.jit(run)(**INPUTS), expected, bound, "jit")
    assert_close(jax.checkpoint(run)(*INPUTS.values()), expected, bound, "remat")
    split = [x[:, None] for x in INPUTS.values()]
    assert_close(jax.vmap(run)(*split)[:, 0], expected, bound, "vmap")
    _, scanned = jax.lax.scan(lambda carry, x: (carry, run(*x)), 0, split)
    assert_close(scanned[:, 0], expected, bound, "scan")


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_gradient_is_that_of_the_recurrence(backend):
    from mlstm_pallas import reference

    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 2, 40, 24)), "float32")

    def loss(run, *x):
        h, states = run(*x)
        return jnp.sum(h * weights) + sum(jnp.sum(jnp.sin(y)) for y in states)

    ours = functools.partial(mlstm_chunkwise, chunk_size=16, backend=backend, return_last_states=True)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), "float64") for x in INPUTS.values()]
        expected = jax.jit(jax.grad(functools.partial(loss, reference.recurrence), tuple(range(8))))(*wide)
        expected = [np.asarray(x) for x in expected]
    found = jax.jit(jax.grad(functools.partial(loss, ours), tuple(range(8))))(*INPUTS.values())
    for name, actual, wanted in zip(INPUTS, found, expected, strict=True):
        assert_close(actual, wanted, 1e-5, name)


@pytest.mark.parametrize(
    ("given", "autocast", "computed"),
    [("float32", None, "float32"), ("bfloat16", None, "bfloat16"), ("float32", "bfloat16", "bfloat16"), ("float16", "float32", "float32")],
)
def test_dtypes(given, autocast, computed):
    inputs = random_inputs(1, 1, 2, 20, 16, 16, dtype=given)
    h, states = mlstm_chunkwise(**inputs, autocast_kernel_dtype=autocast, chunk_size=16, return_last_states=True)
    assert h.dtype == jnp.dtype(given)
    assert [x.dtype for x in states] == [jnp.float32] * 3
    rounded = {name: x.astype(computed) if name in "qkv" else x for name, x in inputs.items()}
    expected = mlstm_chunkwise(**rounded, chunk_size=16)
    assert_close(h, expected.astype("float32"), tolerance("bfloat16" if given == "float16" else given, 40), "h")


@pytest.mark.parametrize("backend", [None, "xla", "interpret"])
def test_padded_heads_keep_their_scale(backend):
    """With q this small eps decides on h, and so does the factor on q."""
    inputs = random_inputs(2, 1, 2, 20, 24, 40)
    inputs["q"] *= 1e-2
    expected, _ = oracle(inputs, eps=0.5)
    assert_close(mlstm_chunkwise(**inputs, chunk_size=16, backend=backend, eps=0.5), expected, tolerance("float32", 20 + 24))


def test_use_backend_is_the_default_of_calls_inside():
    with use_backend("interpret"):
        assert "pallas_call" in str(jax.make_jaxpr(lambda *x: mlstm_chunkwise(*x, chunk_size=16))(*PLAIN.values()))
        assert "pallas_call" not in str(jax.make_jaxpr(lambda *x: mlstm_chunkwise(*x, chunk_size=16, backend="xla"))(*PLAIN.values()))
    with pytest.raises(ValueError, match="backend is 'cuda'"), use_backend("cuda"):
        pass


def test_a_chunk_beyond_the_sequence_is_shortened():
    expected = mlstm_chunkwise(**INPUTS, chunk_size=64)
    assert np.array_equal(np.asarray(mlstm_chunkwise(**INPUTS, chunk_size=4096)), np.asarray(expected))


@pytest.mark.parametrize(("B", "NH"), [(0, 2), (2, 0)])
def test_an_empty_batch_gives_empty_outputs(B, NH):
    inputs = random_inputs(0, B, NH, 20, 16, 24)
    h, (c, n, m) = mlstm_chunkwise(**inputs, return_last_states=True, backend="interpret")
    assert (h.shape, c.shape, n.shape, m.shape) == ((B, NH, 20, 24), (B, NH, 16, 24), (B, NH, 16), (B, NH))


def test_the_device_decides_on_the_config():
    assert target_device_kind() == UNKNOWN_DEVICE or jax.devices()[0].platform == "gpu"
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA A100-SXM4-80GB", None, "gpu"))):
        assert target_device_kind() == "NVIDIA A100-SXM4-80GB"


def test_equal_calls_are_traced_once():
    traces = []

    @jax.jit
    def step(*x):
        traces.append(1)
        return mlstm_chunkwise(*x, chunk_size=16, config=KernelConfig(chunk_size=16))

    step(*PLAIN.values())
    step(*PLAIN.values())
    assert len(traces) == 1


def array(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


# name: (changed arguments, error, what its message must say)
BAD = {
    "q_rank": ({"q": array((2, 40, 16))}, ValueError, ["q has shape (2, 40, 16)", "(B, NH, S, DHQK)"]),
    "k_length": ({"k": array((2, 2, 41, 16))}, ValueError, ["k has shape (2, 2, 41, 16)", "(2, 2, 40, 16)"]),
    "k_heads": ({"k": array((2, 3, 40, 16))}, ValueError, ["k has shape (2, 3, 40, 16)", "(2, 2, 40, 16)"]),
    "v_rank": ({"v": array((2, 2, 40))}, ValueError, ["v has shape (2, 2, 40)", "(B, NH, S, DHV)"]),
    "v_length": ({"v": array((2, 2, 39, 24))}, ValueError, ["v has shape (2, 2, 39, 24)", "(2, 2, 40, 24)"]),
    "i_shape": ({"i": array((2, 2, 40, 1))}, ValueError, ["i has shape (2, 2, 40, 1)", "(2, 2, 40)"]),
    "f_shape": ({"f": array((2, 40))}, ValueError, ["f has shape (2, 40)", "(2, 2, 40)"]),
    "no_steps": ({"q": array((2, 2, 0, 16))}, ValueError, ["q has shape (2, 2, 0, 16)", "S >= 1"]),
    "no_columns": ({"v": array((2, 2, 40, 0))}, ValueError, ["v has shape (2, 2, 40, 0)", "DHV >= 1"]),
    "c_shape": ({"c_initial": array((2, 2, 24, 16))}, ValueError, ["c_initial has shape (2, 2, 24, 16)", "(2, 2, 16, 24)"]),
    "n_shape": ({"n_initial": array((2, 2, 24))}, ValueError, ["n_initial has shape (2, 2, 24)", "(2, 2, 16)"]),
    "m_shape": ({"m_initial": array((2, 2, 1))}, ValueError, ["m_initial has shape (2, 2, 1)", "(2, 2)"]),
    "partial_states": ({"n_initial": None}, ValueError, ["c_initial, m_initial without n_initial"]),
    "q_integer": ({"q": array((2, 2, 40, 16), "int32")}, TypeError, ["q has dtype int32", "float32"]),
    "k_dtype": ({"k": array((2, 2, 40, 16), "bfloat16")}, TypeError, ["k has dtype bfloat16", "expected float32"]),
    "v_dtype": ({"v": array((2, 2, 40, 24), "bfloat16")}, TypeError, ["v has dtype bfloat16", "expected float32"]),
    "i_dtype": ({"i": array((2, 2, 40), "int8")}, TypeError, ["i has dtype int8"]),
    "q_list": ({"q": [[1.0]]}, TypeError, ["q is a list", "expected an array"]),
    "chunk_size_odd": ({"chunk_size": 48}, ValueError, ["chunk_size is 48", "power of two >= 16"]),
    "chunk_size_small": ({"chunk_size": 8}, ValueError, ["chunk_size is 8", "power of two >= 16"]),
    "chunk_size_float": ({"chunk_size": 64.0}, ValueError, ["chunk_size is 64.0"]),
    "chunk_size_bool": ({"chunk_size": True}, ValueError, ["chunk_size is True"]),
    "eps_negative": ({"eps": -1e-6}, ValueError, ["eps is -1e-06", ">= 0"]),
    "eps_nan": ({"eps": float("nan")}, ValueError, ["eps is nan"]),
    "eps_string": ({"eps": "1e-6"}, TypeError, ["eps is a str", "expected a float"]),
    "norm_val_inf": ({"norm_val": float("inf")}, ValueError, ["norm_val is inf"]),
    "backend": ({"backend": "cuda"}, ValueError, ["backend is 'cuda'", "triton, interpret, xla"]),
    "return_last_states": ({"return_last_states": 1}, TypeError, ["return_last_states is a int", "expected a Python bool"]),
    "stabilize_correctly": ({"stabilize_correctly": None}, TypeError, ["stabilize_correctly is a NoneType"]),
    "autocast_unknown": ({"autocast_kernel_dtype": "fp8"}, TypeError, ["autocast_kernel_dtype is 'fp8'", "bfloat16"]),
    "autocast_float16": ({"autocast_kernel_dtype": "float16"}, TypeError, ["autocast_kernel_dtype is float16", "float32, bfloat16"]),
    "autocast_float64": ({"autocast_kernel_dtype": "float64", "backend": "triton"}, TypeError, ["float64", 'backend="xla" only']),
    "config_type": ({"config": {"chunk_size": 64}}, TypeError, ["config is a dict", "KernelConfig"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_argument_is_named(case):
    changed, kind, said = BAD[case]
    arguments = {name: array(x.shape, x.dtype) for name, x in INPUTS.items()} | changed
    static = {name: x for name, x in arguments.items() if name not in INPUTS}
    arrays = {name: x for name, x in arguments.items() if name in INPUTS and hasattr(x, "shape")}
    others = {name: x for name, x in arguments.items() if name in INPUTS and not hasattr(x, "shape")}
    with pytest.raises(kind) as caught:
        jax.eval_shape(lambda x: mlstm_chunkwise(**x, **others, **static), arrays)
    for words in said:
        assert words in str(caught.value)


def test_a_traced_eps_is_named():
    with pytest.raises(TypeError, match="eps is traced"):
        jax.eval_shape(lambda eps: mlstm_chunkwise(**PLAIN, eps=eps), 1e-6)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: StageConfig(siz_b_LQ=48), ValueError, "siz_b_LQ is 48"),
        (lambda: StageConfig(siz_b_DHHV=8), ValueError, "siz_b_DHHV is 8"),
        (lambda: StageConfig(num_warps=3), ValueError, "num_warps is 3"),
        (lambda: StageConfig(num_stages=0), ValueError, "num_stages is 0"),
        (lambda: KernelConfig(chunk_size=100), ValueError, "chunk_size is 100"),
        (lambda: KernelConfig(precision="highest"), TypeError, "config.precision is 'highest'"),
        (lambda: KernelConfig(split_backward="yes"), TypeError, "config.split_backward is 'yes'"),
        (lambda: KernelConfig(parallel_fw_H=4), TypeError, "config.parallel_fw_H is a int"),
    ],
)
def test_an_impossible_config_is_refused_when_it_is_made(make, kind, words):
    with pytest.raises(kind, match=words):
        make()
