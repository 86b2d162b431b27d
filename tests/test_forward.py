"""The forward pass of mlstm_chunkwise against the recurrence in float64; the fused scan:
test_fused_scan.py."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, error, oracle, random_inputs, tolerance

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.config import config_for

pytestmark = pytest.mark.usefixtures("quick_compilation")

BACKENDS = ("interpret", "xla")
BACKENDS_SLOW_XLA = ("interpret", pytest.param("xla", marks=pytest.mark.slow))


def check(result, expected, bound):
    (h, states), (expected_h, expected_states) = result, expected
    for name, actual, desired in zip(
        "hcnm", (h, *states), (expected_h, *expected_states), strict=True
    ):
        assert_close(actual, desired, bound, name)


HEADS = [("float32", 1, 1), ("bfloat16", 3, 17), ("bfloat16", 80, 96)]
HEADS += [
    pytest.param(*heads, marks=pytest.mark.slow)
    for heads in (("float32", 24, 40), ("bfloat16", 40, 24), ("float32", 64, 16))
]


@pytest.mark.parametrize(("dtype", "DHQK", "DHHV"), HEADS)
def test_odd_heads(dtype, DHQK, DHHV):
    inputs = random_inputs(
        DHQK, 2, 16 if DHHV < 8 else 2, 50, DHQK, DHHV, dtype=dtype
    )  # roundings average out over many numbers only
    result = mlstm_chunkwise(**inputs, chunk_size=32, return_last_states=True, backend="interpret")
    check(result, oracle(inputs), tolerance(dtype, 50 + DHQK))


GATES = {
    "plain": {},
    "no_states": {"states": False},
    "resets": {"resets": True},
    "gates_at_-30": {"f_shift": -30.0},
    "gates_at_30": {"f_shift": 30.0, "i_scale": 30.0},
    "gates_at_1e3": {"f_scale": 1e3, "i_scale": 1e3, "resets": True},
}


@pytest.mark.parametrize(
    ("case", "S"), [*((case, 100) for case in GATES), ("plain", 1), ("resets", 1), ("plain", 130)]
)
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
    "eps0": {"eps": 0.0},
    "eps_large": {"eps": 0.3},
    "norm_val_large": {"norm_val": 50.0},
    "norm_val0": {"norm_val": 0.0},
    "unstabilised": {"stabilize_correctly": False, "norm_val": 3.0},
    "unstabilised_norm0_eps0": {"stabilize_correctly": False, "norm_val": 0.0, "eps": 0.0},
}
# Parts of what the others have.
SLOW_NORMALISERS = ("eps0", "norm_val0", "unstabilised")


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param(
            backend, name, marks=[pytest.mark.slow] * (backend == "xla" or name in SLOW_NORMALISERS)
        )
        for backend in BACKENDS
        for name in NORMALISERS
    ],
)
def test_normalisers(backend, options):
    inputs = random_inputs(7, 1, 2, 64, 16, 16, resets=True)
    h = mlstm_chunkwise(**inputs, chunk_size=32, backend=backend, **NORMALISERS[options])
    assert_close(h, oracle(inputs, **NORMALISERS[options])[0], tolerance("float32", 64 + 16))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [-1e6, float(np.finfo(np.float32).min)])
def test_finite_masks_are_those_at_minus_infinity(mask, backend):
    inputs = random_inputs(17, 1, 2, 64, 16, 16)
    inputs["i"] = inputs["i"].at[0, 0, 10].set(mask)
    inputs["f"] = inputs["f"].at[0, 1, 40].set(mask)
    infinite = {
        name: jnp.where(x <= mask, -jnp.inf, x) if name in "if" else x for name, x in inputs.items()
    }
    result = mlstm_chunkwise(**inputs, chunk_size=32, return_last_states=True, backend=backend)
    check(result, oracle(infinite), tolerance("float32", 64 + 16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_floor_of_zero_leaves_states_of_very_negative_m(backend):
    """exp(m) underflows there, and nothing may be scaled by it."""
    inputs = random_inputs(0, 1, 1, 40, 8, 8, states=False)
    inputs["i"] -= 300.0
    inputs["f"] = inputs["f"].at[:, :, 0].set(-jnp.inf)
    expected, _ = oracle(inputs, norm_val=0.0)
    assert float(np.linalg.norm(expected)) > 1
    result = mlstm_chunkwise(**inputs, chunk_size=32, backend=backend, norm_val=0.0)
    assert_close(result, expected, tolerance("float32", 40 + 8))


@pytest.mark.parametrize("backend", BACKENDS_SLOW_XLA)
@pytest.mark.parametrize("at", [32, 50])
def test_two_halves_are_the_whole(at, backend):
    inputs = random_inputs(at, 1, 2, 96, 16, 16)
    run = functools.partial(
        mlstm_chunkwise, chunk_size=32, return_last_states=True, backend=backend
    )
    whole_h, whole_states = run(**inputs)
    first, second = (
        {name: x[:, :, part] for name, x in inputs.items() if name in "qkvif"}
        for part in (np.s_[:at], np.s_[at:])
    )
    initial = {name: inputs[name] for name in ("c_initial", "n_initial", "m_initial")}
    first_h, states = run(**first, **initial)
    second_h, last = run(**second, **dict(zip(initial, states, strict=True)))
    check(
        (jnp.concatenate([first_h, second_h], axis=2), last),
        (whole_h, whole_states),
        2 * tolerance("float32", 96 + 16),
    )


def test_an_initial_m_of_minus_infinity_stores_nothing():
    """With C = n = 0 it equals a first step of i = -inf that resets."""
    inputs = random_inputs(3, 1, 2, 40, 16, 16, states=False, i_scale=0.1, f_shift=5.0)
    inputs["i"] -= 20.0  # m = 0 would win the maximum
    empty = {
        "c_initial": jnp.zeros((1, 2, 16, 16)),
        "n_initial": jnp.zeros((1, 2, 16)),
        "m_initial": jnp.full((1, 2), -jnp.inf),
    }
    expected = oracle({**inputs, **empty})
    assert float(expected[1][2].max()) < -10
    result = mlstm_chunkwise(
        **inputs, **empty, chunk_size=16, return_last_states=True, backend="interpret"
    )
    check(
        result, expected, tolerance("float32", 40 + 16) + np.spacing(np.float32(20))
    )  # exp(-m) at a float32 m of -20


def test_wide_heads_with_default_tiles():
    """One interpreted case at DHQK = 512."""
    inputs = random_inputs(11, 1, 1, 64, 512, 128, dtype="bfloat16")
    config = config_for(512, 128, 64, jnp.dtype("bfloat16"))
    assert config.stage("parallel_fw_H").keep_q is False
    h = mlstm_chunkwise(**inputs, backend="interpret", config=config)
    assert_close(h, oracle(inputs)[0], tolerance("bfloat16", 64 + 512))


def test_nan_stays_in_its_own_head():
    inputs = random_inputs(13, 1, 2, 48, 16, 16)
    inputs["v"] = inputs["v"].at[0, 1, 20, 3].set(jnp.nan)
    h = np.asarray(mlstm_chunkwise(**inputs, chunk_size=16, backend="interpret"))
    assert np.isfinite(h[0, 0]).all()
    assert np.isfinite(h[0, 1, :16]).all()
    assert np.isnan(h[0, 1, 20:, 3]).all()


def test_the_error_norm_sees_a_wrong_token():
    h = np.ones((4, 4))
    wrong = h.copy()
    wrong[1] = 0
    assert error(wrong, h) == pytest.approx(0.5)
    wrong[1] = np.nan
    assert error(wrong, h) == np.inf
