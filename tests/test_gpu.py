"""The compiled kernels at real sizes, with the configs that users get: against the float64
recurrence, repeats bitwise equal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import DotAlgorithmPreset
from oracle import (
    HEADS,
    assert_below,
    assert_same_bits,
    call_shapes,
    check_call,
    check_outputs,
    config_in_splits,
    cotangents_for,
    errors_of,
    expected_of,
    gradients_of_call,
    random_inputs,
    step_names,
)
from test_packed_sequences import ODD_ON_A_GPU, check_prompts

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_recurrent_sequence,
    mlstm_recurrent_step,
    reference,
)
from mlstm_pallas import prepare as entry
from mlstm_pallas.problem.gpu import known_gpu

pytestmark = pytest.mark.gpu

FORWARD = {"bfloat16": 5e-3, "float32": 1e-5}
BACKWARD = {"bfloat16": 2e-2, "float32": 1e-4}
MORE_HEADS = [(80, 96), (96, 192), (192, 320), (1024, 1024)]
# Heads of the quick selection, in both dtypes.
SMOKE = [
    pytest.param(*x, marks=[pytest.mark.smoke] * (x == (128, 256))) for x in HEADS + MORE_HEADS
]


def check_repeated(run, inputs, bound):
    """Checks the outputs of mlstm_chunkwise, or of a function like it, twice."""
    run = jax.jit(run)
    result = run(**inputs)
    check_outputs(result, inputs, bound)
    assert_same_bits(run(**inputs), result)


@pytest.mark.parametrize(("dtype", "DHQK", "DHHV"), [("bfloat16", 256, 512), ("float32", 128, 256)])
def test_forward_8192(dtype, DHQK, DHHV):
    run = functools.partial(mlstm_chunkwise, backend="triton", return_last_states=True)
    check_repeated(run, random_inputs(0, 1, 4, 8192, DHQK, DHHV, dtype=dtype), FORWARD[dtype])


def recurrence_in_parts(q, k, v, i, f, c_initial, n_initial, m_initial, segment_ids=None):
    """reference.recurrence with a checkpoint at every part, so that its backward pass holds the
    states of one part only."""
    states, hs, size = (c_initial, n_initial, m_initial), [], 512
    for start in range(0, q.shape[2], size):
        part = [x[:, :, start : start + size] for x in (q, k, v, i, f)]
        h, states = jax.checkpoint(reference.recurrence)(*part, *states, segment_ids=segment_ids)
        hs.append(h)
    return jnp.concatenate(hs, axis=2), states


@functools.lru_cache(maxsize=1)
def expected(dtype, B, NH, S, DHQK, DHHV, f_shift):
    """Inputs, cotangents, outputs and gradients in float64."""
    inputs = random_inputs(1, B, NH, S, DHQK, DHHV, dtype=dtype, f_shift=f_shift)
    cotangents = cotangents_for(inputs, dtype)
    return inputs, cotangents, expected_of(inputs, cotangents, recurrence_in_parts)


def errors_of_call(dtype, *shape, f_shift=2.0, **options):
    """Relative errors of outputs and of gradients, by name; they are the same bits when computed
    again."""
    inputs, cotangents, desired = expected(dtype, *shape, f_shift)
    run = gradients_of_call(**dict(backend="triton") | options)
    result = run(inputs, cotangents)
    assert_same_bits(run(inputs, cotangents), result)
    return errors_of(inputs, result, desired)


def check_gradients(dtype, *shape, **options):
    outputs, gradients = errors_of_call(dtype, *shape, **options)
    assert_below(outputs, FORWARD[dtype])
    assert_below(gradients, BACKWARD[dtype])


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"])
def test_the_plan_of_another_gpu_is_right_on_this_one(gpu, monkeypatch):
    """Tiles for 163 and 99 KiB of shared memory."""
    monkeypatch.setattr(entry, "target_gpu", lambda: known_gpu(gpu))
    check_gradients("bfloat16", 1, 40, 1000, 128, 256, backend="triton")  # the fused scan


ALGORITHMS = {
    "default": None,
    "materialised64": KernelConfig(chunk_size=64, fused=False),
    "materialised256": KernelConfig(chunk_size=256, fused=False),
    "fused": KernelConfig(fused=True),
    "splits": config_in_splits(4, siz_b_LKV=32),
}


@pytest.mark.parametrize(("DHQK", "DHHV"), SMOKE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_heads(dtype, DHQK, DHHV):
    check_gradients(dtype, 1, 2, 500, DHQK, DHHV)


@pytest.mark.parametrize(
    ("algorithm", "dtype", "DHQK", "DHHV"),
    [
        *(("default", dtype, *heads) for dtype in FORWARD for heads in ((64, 64), (256, 512))),
        ("materialised64", "bfloat16", 256, 512),
        ("materialised64", "float32", 128, 256),
        ("materialised256", "bfloat16", 128, 256),
        ("materialised256", "float32", 64, 64),
        ("fused", "bfloat16", 256, 512),
        ("fused", "bfloat16", 64, 64),
        ("fused", "float32", 128, 256),
        ("splits", "bfloat16", 128, 256),
        ("splits", "float32", 256, 512),
    ],
)
def test_gradients_algorithms(dtype, DHQK, DHHV, algorithm):
    check_gradients(dtype, 1, 2, 2048, DHQK, DHHV, config=ALGORITHMS[algorithm])


@pytest.mark.parametrize(
    ("dtype", "DHQK", "DHHV", "num_splits"),
    [
        ("bfloat16", 64, 64, 1),
        ("bfloat16", 256, 512, 4),
        ("float32", 128, 256, 1),
        ("float32", 128, 256, 4),
    ],
)
def test_gradients_with_states_that_the_fused_scan_stored(dtype, DHQK, DHHV, num_splits):
    scan = dict(siz_b_LKV=32, state_rows=256, num_stages=3 if dtype == "bfloat16" else 2)
    config = KernelConfig(fused=True, num_splits=num_splits, triton_recurrent_fw_H=scan)
    check_gradients(dtype, 1, 2, 2048, DHQK, DHHV, config=config, recompute_states_in_bw=False)


@pytest.mark.parametrize(
    ("dtype", "chunk_size"), [("bfloat16", 16), ("float32", 1024), ("bfloat16", 2048)]
)
def test_gradients_chunk_sizes(dtype, chunk_size):
    check_gradients(dtype, 1, 2, 2048, 128, 256, chunk_size=chunk_size)


@pytest.mark.parametrize(
    ("B", "NH", "S", "DHQK", "DHHV", "layout"),
    [
        *((4, 12, S, 64, 128, "BNTH") for S in (1, 17, 129)),
        *((4, 12, S, 64, 128, "BTNH") for S in (2, 127)),
        (1, 24, 992, 256, 256, "BTNH"),
        (1, 24, 1001, 256, 256, "BNTH"),
        *((1, 8, 4095, 64, 128, layout) for layout in ("BNTH", "BTNH")),
    ],
)
def test_gradients_odd_lengths(B, NH, S, DHQK, DHHV, layout):
    """A store beyond an array would be in the next head."""
    for backend in ("triton", "mosaic_gpu"):
        options = dict(layout=layout, backend=backend, config=ALGORITHMS["fused"])
        check_gradients("bfloat16", B, NH, S, DHQK, DHHV, **options)


@pytest.mark.parametrize(
    ("backend", "layout"), [("triton", "BTNH"), ("mosaic_gpu", "BNTH"), ("mosaic_gpu", "BTNH")]
)
def test_memory_of_odd_lengths(backend, layout):
    """No array is padded: a copy of v alone would be a tenth."""
    run = functools.partial(mlstm_chunkwise, backend=backend, layout=layout)

    def both(dh, *x):
        return jax.vjp(run, *x)[1](dh)

    def size(S):
        x = call_shapes(8, 8, S, 256, 512, layout=layout)
        memory = jax.jit(both).lower(x[2], *x).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    assert size(8191) <= 1.03 * size(8192)


def test_forget_gate_gradient_after_32768_steps():
    """One long reversed cumulative sum would have lost all digits here."""
    check_gradients("bfloat16", 1, 1, 32768, 64, 64, f_shift=4.0)


# ---------------- the digits of float32


def float32_bound(products):
    """Bound on the relative norm of the error of a float32 result behind so many matrix products in
    a row.

    With u = 2^-24. A float32 operand is the sum of three bfloat16 parts of 8 bits, each at most
    2^-9 of the one before. Of the nine products of parts six are summed; the other three, of second
    and third parts, are at most 2^-27 + 2^-27 + 2^-36, that is u / 4 together. A tensor core adds
    16 terms at a time and truncates, in the mean by u of the sum so far: in a tile of 64 terms by
    (1/4 + 2/4 + 3/4 + 1) u. Everything else that rounds in float32 (sums over tiles, decays, the
    denominator, the result) counts as four roundings of u.

    With three products those of first and third parts and of second parts are left out, up to 2^-18
    = 64 u each.
    """
    return (products * (2.5 + 0.25) + 4) * 2.0**-24


# h: scores or states, then their product with values or queries. Gradients: delta = dh . h and dz
# behind that, dq, q . dq, its sums.
FLOAT32_OUTPUTS, FLOAT32_GRADIENTS = float32_bound(2), float32_bound(6)
FLOAT32_SHAPES = [(1, 2, 1000, 128, 256), (1, 2, 1000, 256, 512)]


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [("default", FLOAT32_SHAPES[0]), *(("fused", shape) for shape in FLOAT32_SHAPES)],
)
def test_float32_has_the_digits_of_six_products(shape, algorithm):
    outputs, gradients = errors_of_call("float32", *shape, config=ALGORITHMS[algorithm])
    assert_below(outputs, FLOAT32_OUTPUTS)
    assert_below(gradients, FLOAT32_GRADIENTS)


def test_three_products_do_not_have_them():
    config = KernelConfig(precision=DotAlgorithmPreset.BF16_BF16_F32_X3)
    outputs, gradients = errors_of_call("float32", *FLOAT32_SHAPES[0], config=config)
    assert outputs["h"] > FLOAT32_OUTPUTS
    assert min(gradients[name] for name in "qkv") > FLOAT32_GRADIENTS


# ---------------- lengths and packed prompts


@pytest.mark.parametrize("fused", [False, True])
def test_lengths_and_states_of_packed_prompts(fused):
    options = dict(backend="triton", config=KernelConfig(fused=fused))
    inputs = random_inputs(6, 3, 2, 1000, 128, 256, dtype="bfloat16")
    bounds = FORWARD["bfloat16"], BACKWARD["bfloat16"]
    check_call(inputs, *bounds, lengths=np.array([0, 700, 1000]), **options)
    check_prompts(37, 128, 256, dtype="bfloat16", layout="BTNH", go_on=fused, **options)
    check_prompts(0, 128, 256, dtype="bfloat16", rows=ODD_ON_A_GPU, go_on=fused, **options)


@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize(
    ("S", "DHQK", "DHHV"), [(1000, 64, 128), (1001, 128, 256), (1000, 256, 512)]
)
def test_gradients_of_lengths(S, DHQK, DHHV, backend):
    """The backward pass skips whole chunks."""
    inputs = random_inputs(7, 5, 2, S, DHQK, DHHV, dtype="bfloat16")
    lengths = np.array([0, 1, 384, 700, S])
    bounds = FORWARD["bfloat16"], BACKWARD["bfloat16"]
    check_call(inputs, *bounds, lengths=lengths, backend=backend)


# ---------------- one token at a time


@pytest.mark.parametrize(
    ("dtype", "DHQK", "DHHV"),
    [
        pytest.param("bfloat16", 128, 256, marks=pytest.mark.smoke),
        ("float32", 64, 64),
        ("float32", 256, 512),
        ("bfloat16", 96, 192),
        ("float32", 1024, 1024),
        ("bfloat16", 1, 1),
        ("float32", 20, 37),
        ("bfloat16", 333, 500),
        ("float32", 500, 333),
    ],
)
def test_recurrent_steps(dtype, DHQK, DHHV):
    inputs = random_inputs(3, 2, 4, 3, DHQK, DHHV, dtype=dtype)
    inputs |= {name: inputs[name].astype(dtype) for name in ("c_initial", "n_initial")}

    def run(**x):
        return mlstm_recurrent_sequence(**step_names(x), backend="triton")

    check_repeated(run, inputs, FORWARD[dtype])


@pytest.mark.parametrize("backend", ["triton", None])
def test_a_recurrent_step_is_in_place(backend):
    x = step_names(random_inputs(4, 4, 8, 1, 256, 512), 0)
    c = x.pop("c")
    run = jax.jit(lambda c, x: mlstm_recurrent_step(**x, c=c, backend=backend), donate_argnums=0)
    before, size = c.unsafe_buffer_pointer(), c.nbytes
    assert run.lower(c, x).compile().memory_analysis().temp_size_in_bytes < size
    _, (c, _, _) = run(c, x)
    assert c.unsafe_buffer_pointer() == before
