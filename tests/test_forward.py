"""The forward pass of mlstm_chunkwise against the recurrence in float64; the fused scan:
test_fused_scan.py."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, compare, error, oracle, random_inputs, tolerance

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.config import config_for

pytestmark = pytest.mark.usefixtures("quick_compilation")

BACKENDS = ("interpret", "xla")


def check(result, expected, bound):
    (h, states), (expected_h, expected_states) = result, expected
    compare("hcnm", (h, *states), (expected_h, *expected_states), bound)


@pytest.mark.parametrize(("dtype", "DHQK", "DHHV"), [("float32", 1, 1), ("bfloat16", 3, 17)])
def test_odd_heads(dtype, DHQK, DHHV):
    inputs = random_inputs(DHQK, 2, 16, 50, DHQK, DHHV, dtype=dtype)  # roundings average out
    result = mlstm_chunkwise(**inputs, chunk_size=32, return_last_states=True, backend="interpret")
    check(result, oracle(inputs), tolerance(dtype, 50 + DHQK))


GATES = {
    "plain": {},
    "resets": {"resets": True},
    "gates_at_-30": {"f_shift": -30.0},
    "gates_at_30": {"f_shift": 30.0, "i_scale": 30.0},
    "gates_at_1e3": {"f_scale": 1e3, "i_scale": 1e3, "resets": True},
}


@pytest.mark.parametrize(("case", "S"), [*((case, 100) for case in GATES), ("plain", 1)])
def test_gates_and_lengths(case, S):
    inputs = random_inputs(S, 1, 2, S, 16, 32, **GATES[case])
    expected = oracle(inputs)
    m = expected[1][2]
    bound = tolerance("float32", S + 16)
    bound += np.spacing(
        np.float32(np.max(np.abs(m), where=np.isfinite(m), initial=0))
    )  # states are relative to a float32 m
    check(
        mlstm_chunkwise(**inputs, chunk_size=32, return_last_states=True, backend="interpret"),
        expected,
        bound,
    )


NORMALISERS = {
    "norm_val_large": {"norm_val": 50.0},
    "unstabilised_norm0_eps0": {"stabilize_correctly": False, "norm_val": 0.0, "eps": 0.0},
}


@pytest.mark.parametrize("backend", ["interpret", pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", NORMALISERS.values(), ids=NORMALISERS)
def test_normalisers(backend, options):
    inputs = random_inputs(7, 1, 2, 64, 16, 16, resets=True)
    h = mlstm_chunkwise(**inputs, chunk_size=32, backend=backend, **options)
    assert_close(h, oracle(inputs, **options)[0], tolerance("float32", 64 + 16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_finite_masks_are_those_at_minus_infinity(backend):
    mask = float(np.finfo(np.float32).min)
    inputs = random_inputs(17, 1, 2, 64, 16, 16)
    inputs["i"] = inputs["i"].at[0, 0, 10].set(mask)
    inputs["f"] = inputs["f"].at[0, 1, 40].set(mask)
    infinite = {
        name: jnp.where(x <= mask, -jnp.inf, x) if name in "if" else x for name, x in inputs.items()
    }
    result = mlstm_chunkwise(**inputs, chunk_size=32, return_last_states=True, backend=backend)
    check(result, oracle(infinite), tolerance("float32", 64 + 16))


def test_a_floor_of_zero_leaves_states_of_very_negative_m():
    """exp(m) underflows there, and nothing may be scaled by it."""
    inputs = random_inputs(0, 1, 1, 40, 8, 8, states=False)
    inputs["i"] -= 300.0
    inputs["f"] = inputs["f"].at[:, :, 0].set(-jnp.inf)
    expected, _ = oracle(inputs, norm_val=0.0)
    assert float(np.linalg.norm(expected)) > 1
    result = mlstm_chunkwise(**inputs, chunk_size=32, backend="interpret", norm_val=0.0)
    assert_close(result, expected, tolerance("float32", 40 + 8))


def test_two_halves_are_the_whole():
    inputs = random_inputs(50, 1, 2, 64, 16, 16)
    options = dict(chunk_size=32, return_last_states=True, backend="interpret")
    run = functools.partial(mlstm_chunkwise, **options)
    sequences, initial = list(inputs.values())[:5], list(inputs.values())[5:]
    first_h, states = run(*(x[:, :, :32] for x in sequences), *initial)
    second_h, last = run(*(x[:, :, 32:] for x in sequences), *states)
    halves = jnp.concatenate([first_h, second_h], axis=2), last
    check(halves, run(**inputs), 2 * tolerance("float32", 64 + 16))


def test_an_initial_m_of_minus_infinity_stores_nothing():
    """With C = n = 0 it equals a first step of i = -inf that resets."""
    inputs = random_inputs(3, 1, 2, 64, 16, 16, states=False, i_scale=0.1, f_shift=5.0)
    inputs["i"] -= 20.0  # m = 0 would win the maximum
    empty = {
        "c_initial": jnp.zeros((1, 2, 16, 16)),
        "n_initial": jnp.zeros((1, 2, 16)),
        "m_initial": jnp.full((1, 2), -jnp.inf),
    }
    expected = oracle({**inputs, **empty})
    assert float(expected[1][2].max()) < -10
    result = mlstm_chunkwise(
        **inputs, **empty, chunk_size=32, return_last_states=True, backend="interpret"
    )
    check(
        result, expected, tolerance("float32", 64 + 16) + np.spacing(np.float32(20))
    )  # exp(-m) at a float32 m of -20


def test_wide_heads_with_default_tiles():
    """One interpreted case at DHQK = 512."""
    inputs = random_inputs(11, 1, 1, 64, 512, 128, dtype="bfloat16")
    config = config_for(512, 128, 64, jnp.dtype("bfloat16"))
    assert config.stage("parallel_fw_H").keep_q is False
    h = mlstm_chunkwise(**inputs, backend="interpret", config=config)
    assert_close(h, oracle(inputs)[0], tolerance("bfloat16", 64 + 512))


def test_the_error_norm_sees_a_wrong_token():
    h = np.ones((4, 4))
    wrong = h.copy()
    wrong[1] = 0
    assert error(wrong, h) == pytest.approx(0.5)
    wrong[1] = np.nan
    assert error(wrong, h) == np.inf
