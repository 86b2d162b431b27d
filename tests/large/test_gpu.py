"""The compiled kernels at real sizes, with the configs that users get: against the float64
recurrence, repeats bitwise equal."""

import functools
import math

import call_checks
import jax
import numpy as np
import pytest
from call_checks import PROMISED, check_call, gpu_call
from jax.lax import DotAlgorithmPreset
from mosaic_gpu_cases import skip_unless_hopper
from oracle import (
    call_shapes,
    check_outputs,
    random_inputs,
    token_at,
)
from table import CALLS, ON_A_GPU, STEPS_ON_A_GPU
from test_table import check, shown

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_recurrent_step,
)
from mlstm_pallas.planning import call_spec
from mlstm_pallas.problem.gpu import known_gpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "DHQK", "DHV"), [("bfloat16", 256, 512), ("float32", 128, 256)])
def test_forward_8192(dtype, DHQK, DHV):
    run = functools.partial(mlstm_chunkwise, backend="triton", return_last_states=True)
    inputs = random_inputs(0, 1, 4, 8192, DHQK, DHV, dtype=dtype)
    check_outputs(jax.jit(run)(**inputs), inputs, PROMISED[dtype][0])


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"])
def test_the_plan_of_another_gpu_is_right_on_this_one(gpu, monkeypatch):
    """Tiles for 163 and 99 KiB of shared memory."""
    monkeypatch.setattr(call_spec, "target_gpu", lambda: known_gpu(gpu))
    check_call(**gpu_call("bfloat16", 1, 40, 1000, 128, 256))  # the fused scan


@pytest.mark.parametrize("call", [*call_checks.gpu_calls()])
def test_against_float64(call):
    check_call(**call)


@pytest.mark.parametrize(("backend", "layout"), [("triton", "BNTH"), ("mosaic_gpu", "BTNH")])
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
BOUNDS = float32_bound(2), float32_bound(6)


SHAPE, LARGER = ("float32", 1, 2, 1000, 128, 256), ("float32", 1, 2, 1000, 256, 512)


@pytest.mark.parametrize(
    ("shape", "config"),
    [(SHAPE, None), (SHAPE, call_checks.fused()), (LARGER, call_checks.fused())],
    ids=str,
)
def test_float32_has_the_digits_of_six_products(shape, config):
    check_call(**gpu_call(*shape, config=config, bounds=BOUNDS))


def test_three_products_do_not_have_them():
    config = KernelConfig(precision=DotAlgorithmPreset.BF16_BF16_F32_X3)
    outputs, gradients = check_call(**gpu_call(*SHAPE, config=config, bounds=(math.inf, math.inf)))
    assert outputs["h"] > BOUNDS[0]
    assert min(gradients[name] for name in "qkv") > BOUNDS[1]


# ---------------- lengths


@pytest.mark.parametrize("fused", [False, True])
def test_lengths(fused):
    options = dict(dtype="bfloat16", backend="triton", config=KernelConfig(fused=fused))
    shape, lengths = (3, 2, 1000, 128, 256), np.array([0, 700, 1000])
    check_call(shape, seed=6, lengths=lengths, bounds=PROMISED["bfloat16"], **options)


# ---------------- the table


@pytest.mark.parametrize("call", CALLS + ON_A_GPU + STEPS_ON_A_GPU, ids=shown)
def test_call(call):
    check(call, "triton")


@pytest.mark.parametrize("call", ON_A_GPU, ids=shown)
def test_call_on_mosaic_gpu(call):
    skip_unless_hopper()
    check(call, "mosaic_gpu")


# ---------------- one token at a time


@pytest.mark.parametrize("backend", ["triton", None])
def test_a_recurrent_step_is_in_place(backend):
    x = token_at(random_inputs(4, 4, 8, 1, 256, 512), 0)
    c = x.pop("c_initial")
    run = jax.jit(
        lambda c, x: mlstm_recurrent_step(**x, c_initial=c, backend=backend), donate_argnums=0
    )
    before, size = c.unsafe_buffer_pointer(), c.nbytes
    assert run.lower(c, x).compile().memory_analysis().temp_size_in_bytes < size
    _, (c, _, _) = run(c, x)
    assert c.unsafe_buffer_pointer() == before
