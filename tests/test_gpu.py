"""The compiled kernels at real sizes, at the configs that users get: against the float64 recurrence, repeats bitwise equal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import error, initial_state_scale, oracle, random_inputs

from mlstm_pallas import KernelConfig, StageConfig, mlstm_chunkwise, mlstm_recurrent_sequence, mlstm_recurrent_step, reference

pytestmark = pytest.mark.gpu

FORWARD = {"bfloat16": 5e-3, "float32": 1e-5}
BACKWARD = {"bfloat16": 2e-2, "float32": 1e-4}
HEADS = [(64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512), (80, 96), (96, 192), (192, 320), (1024, 1024)]


def check_forward(dtype, B, NH, S, DHQK, DHHV, **options):
    inputs = random_inputs(0, B, NH, S, DHQK, DHHV, dtype=dtype)
    expected_h, expected_states = oracle(inputs)
    run = jax.jit(functools.partial(mlstm_chunkwise, return_last_states=True, backend="triton", **options))
    h, states = run(**inputs)
    for name, actual, expected in zip(("h", "c", "n", "m"), (h, *states), (expected_h, *expected_states), strict=True):
        found = error(actual, expected)
        assert found < FORWARD[dtype], f"{name}: {found:.2e}"
    again = run(**inputs)
    assert all(
        np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves((h, states)), strict=True)
    )


@pytest.mark.parametrize(("DHQK", "DHHV"), HEADS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_heads(dtype, DHQK, DHHV):
    check_forward(dtype, 1, 2, 1000, DHQK, DHHV)


@pytest.mark.parametrize(("DHQK", "DHHV"), [(64, 64), (128, 256), (256, 512)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_8192(dtype, DHQK, DHHV):
    check_forward(dtype, 1, 4, 8192, DHQK, DHHV)


@pytest.mark.parametrize("chunk_size", [16, 64, 256, 1024, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_chunk_sizes(dtype, chunk_size):
    check_forward(dtype, 1, 2, 4096, 128, 256, chunk_size=chunk_size)


def loss_of(run, dtype, shape, DHQK):
    r = np.random.default_rng(1)
    B, NH, S, DHHV = shape
    weights = [jnp.asarray(r.normal(size=s), dtype) for s in ((B, NH, S, DHHV), (B, NH, DHQK, DHHV), (B, NH, DHQK), (B, NH))]

    def loss(*x):
        h, states = run(*x)
        return sum(jnp.sum(y.astype(dtype) * w) for y, w in zip((h, *states), weights, strict=True))

    return loss


def segmented_recurrence(*x, segment=512):
    """reference.recurrence with a checkpoint at every segment: its backward pass keeps the states of one segment only."""
    sequence, states = x[:5], x[5:]
    hs = []
    for start in range(0, sequence[0].shape[2], segment):
        part = [y[:, :, start : start + segment] for y in sequence]
        h, states = jax.checkpoint(reference.recurrence)(*part, *states)
        hs.append(h)
    return jnp.concatenate(hs, axis=2), states


def check_gradients(dtype, B, NH, S, DHQK, DHHV, *, f_shift=2.0, **options):
    inputs = random_inputs(1, B, NH, S, DHQK, DHHV, dtype=dtype, f_shift=f_shift)
    x = list(inputs.values())
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(y.astype("float32")), "float64") for y in x]
        expected = jax.jit(jax.grad(loss_of(segmented_recurrence, "float64", wide[2].shape, DHQK), tuple(range(8))))(*wide)
        expected = [np.asarray(g) for g in expected]
    run = functools.partial(mlstm_chunkwise, return_last_states=True, backend="triton", **options)
    gradient = jax.jit(jax.grad(loss_of(run, "float32", x[2].shape, DHQK), tuple(range(8))))
    found = gradient(*x)
    errors = {name: error(actual, wanted) for name, actual, wanted in zip(inputs, found, expected, strict=True)}
    # dm is one number a head, and a small difference of large sums
    errors["m_initial"] *= min(1.0, np.linalg.norm(expected[7]) / np.linalg.norm(initial_state_scale(expected[5], expected[6], inputs)))
    assert max(errors.values()) < BACKWARD[dtype], {name: f"{e:.1e}" for name, e in errors.items()}
    for a, b in zip(gradient(*x), found, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


IN_SEGMENTS = dict.fromkeys(("recurrent_fw_H", "recurrent_fw_C", "recurrent_bw_dC"), StageConfig(siz_b_LKV=32, num_segments=4))
PLANS = {
    "default": None,
    "states64": KernelConfig(chunk_size=64, stateless_forward=False, stateless_backward=False),
    "states256": KernelConfig(chunk_size=256, stateless_forward=False, stateless_backward=False),
    "stateless": KernelConfig(stateless_forward=True, stateless_backward=True),
    "segments": KernelConfig(stateless_forward=True, stateless_backward=False, **IN_SEGMENTS),
}


@pytest.mark.parametrize(("DHQK", "DHHV"), HEADS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_heads(dtype, DHQK, DHHV):
    check_gradients(dtype, 1, 2, 500, DHQK, DHHV)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("DHQK", "DHHV"), [(64, 64), (128, 256), (256, 512)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_plans(dtype, DHQK, DHHV, plan):
    check_gradients(dtype, 1, 2, 2048, DHQK, DHHV, config=PLANS[plan])


@pytest.mark.parametrize("num_segments", [1, 4])
@pytest.mark.parametrize(("DHQK", "DHHV"), [(64, 64), (128, 256), (256, 512)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_with_states_that_the_walk_stored(dtype, DHQK, DHHV, num_segments):
    walk = StageConfig(siz_b_LKV=32, siz_b_loop=256, num_stages=3 if dtype == "bfloat16" else 2, num_segments=num_segments)
    config = KernelConfig(stateless_forward=True, recurrent_fw_H=walk)
    check_gradients(dtype, 1, 2, 2048, DHQK, DHHV, config=config, recompute_states_in_bw=False)


@pytest.mark.parametrize("chunk_size", [16, 256, 1024])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_chunk_sizes(dtype, chunk_size):
    check_gradients(dtype, 1, 2, 2048, 128, 256, chunk_size=chunk_size)


def test_forget_gate_gradient_after_32768_steps():
    """One long reversed cumulative sum would have lost all digits here."""
    check_gradients("bfloat16", 1, 1, 32768, 64, 64, f_shift=4.0)


@pytest.mark.parametrize(("DHQK", "DHHV"), [*HEADS, (1, 1), (20, 37), (333, 500), (500, 333)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_recurrent_steps(dtype, DHQK, DHHV):
    inputs = random_inputs(3, 2, 4, 3, DHQK, DHHV, dtype=dtype)
    inputs |= {name: inputs[name].astype(dtype) for name in ("c_initial", "n_initial")}
    expected_h, expected_states = oracle(inputs)
    run = jax.jit(functools.partial(mlstm_recurrent_sequence, backend="triton"))
    x = {name.removesuffix("_initial"): y for name, y in inputs.items()}
    h, states = run(**x)
    for name, actual, expected in zip(("h", "c", "n", "m"), (h, *states), (expected_h, *expected_states), strict=True):
        found = error(actual, expected)
        assert found < FORWARD[dtype], f"{name}: {found:.2e}"
    for again, first in zip(jax.tree.leaves(run(**x)), jax.tree.leaves((h, states)), strict=True):
        assert np.array_equal(np.asarray(again), np.asarray(first))


@pytest.mark.parametrize("backend", ["triton", None])
def test_a_recurrent_step_is_in_place(backend):
    inputs = random_inputs(4, 4, 8, 1, 256, 512)
    x = {name.removesuffix("_initial"): y if "initial" in name else y[:, :, 0] for name, y in inputs.items()}
    c = x.pop("c")
    run = jax.jit(lambda c, x: mlstm_recurrent_step(**x, c=c, backend=backend), donate_argnums=0)
    before, size = c.unsafe_buffer_pointer(), c.nbytes
    assert run.lower(c, x).compile().memory_analysis().temp_size_in_bytes < size
    _, (c, _, _) = run(c, x)
    assert c.unsafe_buffer_pointer() == before
