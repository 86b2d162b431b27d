"""The compiled kernels at real sizes, with the configs that users get: against the float64
recurrence, repeats bitwise equal."""

import functools
import math

import engine
import jax
import numpy as np
import pytest
import table_gpu
from engine import PROMISED, arrays, errors, exact
from jax.lax import DotAlgorithmPreset
from mosaic_gpu_cases import skip_unless_hopper
from oracle import (
    call_shapes,
    check_outputs,
    random_inputs,
    token_at,
)
from relations import below, clean, repeated
from table import CALLS
from test_table import check, shown

from mlstm_pallas import mlstm_chunkwise, mlstm_recurrent_step, prepare
from mlstm_pallas.problem.gpu import known_gpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "DHQK", "DHV"), [("bfloat16", 256, 512), ("float32", 128, 256)])
def test_forward_8192(dtype, DHQK, DHV):
    run = functools.partial(mlstm_chunkwise, backend="triton", return_last_states=True)
    inputs = random_inputs(0, 1, 4, 8192, DHQK, DHV, dtype=dtype)
    check_outputs(jax.jit(run)(**inputs), inputs, PROMISED[dtype][0])


@functools.lru_cache(1)
def desired(call):
    return exact(call, arrays(call, 1))


def values(call, backend, bounds=None):
    """The errors of a call, below its bounds or these; a second call has the same bits."""
    x, results = clean(call, backend, "model")
    found = errors(call, x, results, desired(call), backend=backend)
    if bounds:
        found = {name: (y, bounds[len(name) - 1]) for name, (y, _) in found.items()}
    below(found)
    repeated(call, backend)
    return {name: y for name, (y, _) in found.items()}


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"])
def test_the_plan_of_another_gpu_is_right_on_this_one(gpu, monkeypatch):
    """Tiles for 163 and 99 KiB of shared memory."""
    monkeypatch.setattr(prepare, "target_gpu", lambda _: known_gpu(gpu))
    call = table_gpu.model(300, "f", NH=40)  # the fused scan
    x = arrays(call, 1)
    results = jax.jit(engine.function_of(call, "triton"))(x)
    below(errors(call, x, jax.tree.map(np.asarray, results), exact(call, x), backend="triton"))


ROWS = [(call, ("triton",)) for call in (*table_gpu.ON_TRITON, *table_gpu.of_any_heads("triton"))]
ROWS += [(call, ("triton", "mosaic_gpu")) for call in table_gpu.ON_BOTH]


@pytest.mark.parametrize(
    ("call", "backends"),
    [
        pytest.param(*x, marks=[pytest.mark.smoke] * (x[0] in table_gpu.SMOKE), id=repr(x[0]))
        for x in ROWS
    ],
)
def test_values(call, backends):
    for backend in backends:
        if backend == "mosaic_gpu":
            skip_unless_hopper()
        values(call, backend)


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


@pytest.mark.parametrize("heads", ["f", "g"])
@pytest.mark.parametrize("schedule", [{}, table_gpu.FUSED], ids=["planned", "fused"])
def test_float32_has_the_digits_of_six_products(heads, schedule):
    values(table_gpu.model(1000, heads, table_gpu.F32, **schedule), "triton", bounds=BOUNDS)


def test_three_products_do_not_have_them():
    precision = table_gpu.config(precision=DotAlgorithmPreset.BF16_BF16_F32_X3)
    call = table_gpu.model(1000, "f", table_gpu.F32, **precision)
    found = values(call, "triton", bounds=(math.inf, math.inf))
    assert found["h"] > BOUNDS[0]
    assert min(found[f"d{name}"] for name in "qkv") > BOUNDS[1]


# ---------------- the table


@pytest.mark.parametrize("call", CALLS + table_gpu.CHUNKED + table_gpu.BY_TOKEN, ids=shown)
def test_call(call):
    check(call, "triton")


@pytest.mark.parametrize("call", table_gpu.CHUNKED, ids=shown)
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
