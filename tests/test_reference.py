"""The recurrence against its definition written out in numpy, and the plain chunkwise form against
the recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import array, assert_close, oracle, random_inputs, tolerance

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.normaliser import Normaliser


def by_definition(q, k, v, i, f, c, n, m, eps, norm_val, stabilize_correctly):
    """One head, unstabilised: the true state exp(m) (C, n) and nothing cancelled by hand; float64,
    moderate gates only."""
    K = q.shape[-1]
    C, n, h = np.exp(m) * c, np.exp(m) * n, []
    for t in range(len(q)):
        forget = 1 / (1 + np.exp(-f[t]))
        m = max(np.log(forget) + m, i[t])
        C = forget * C + np.exp(i[t]) * np.outer(k[t], v[t])
        n = forget * n + np.exp(i[t]) * k[t]
        z = np.exp(-m) * (q[t] @ n) * K**-0.5
        floor = norm_val * np.exp(-m) if stabilize_correctly else norm_val
        h.append(np.exp(-m) * (C.T @ q[t]) * K**-0.5 / (max(abs(z), floor) + eps))
    return np.stack(h), C, n, m


@pytest.mark.parametrize("stabilize_correctly", [True, False])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3])
def test_recurrence_is_the_unstabilised_definition(eps, stabilize_correctly):
    inputs = random_inputs(0, 1, 1, 40, 7, 5)
    options = {"eps": eps, "stabilize_correctly": stabilize_correctly, "norm_val": 2.0}
    h, (c, n, m) = oracle(inputs, **options)
    arrays = [np.asarray(x, "float64")[0, 0] for x in inputs.values()]
    h_true, c_true, n_true, m_true = by_definition(*arrays, **options)
    # float64; exp(m) and sums of 40 steps in another order.
    np.testing.assert_allclose(h[0, 0], h_true, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(np.exp(m[0, 0]) * c[0, 0], c_true, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(np.exp(m[0, 0]) * n[0, 0], n_true, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(m[0, 0], m_true, rtol=1e-12)


CASES = {
    "plain": {},
    "no_states": {"states": False},
    "resets": {"resets": True},
    "gates_at_-30": {"f_shift": -30.0},
    "gates_at_+30": {"f_shift": 30.0, "i_scale": 10.0},
    "gates_at_1e3": {"f_scale": 1e3, "i_scale": 1e3, "resets": True},
}


# Chunks of 16 steps compile what chunks of 64 do; without states it is another function, of which
# test_gradients.py has quick tests.
@pytest.mark.parametrize(
    ("dtype", "chunk_size", "case"),
    [
        pytest.param(
            dtype,
            chunk_size,
            case,
            marks=[pytest.mark.slow]
            * (chunk_size == 16 or dtype == "bfloat16" or case == "no_states"),
        )
        for dtype, chunk_size in (
            ("float32", 16),
            ("float32", 64),
            ("float32", 256),
            ("bfloat16", 64),
        )
        for case in CASES
    ],
)
def test_chunkwise_equals_recurrence(dtype, chunk_size, case):
    inputs = random_inputs(1, 2, 2, 200, 24, 40, dtype=dtype, **CASES[case])
    expected_h, expected_states = oracle(inputs)
    h, states = mlstm_chunkwise(
        **inputs, chunk_size=chunk_size, return_last_states=True, backend="xla"
    )
    bound = tolerance(dtype, 200 + 24)
    assert h.dtype == jnp.dtype(dtype)
    assert_close(h, expected_h, bound, "h")
    # m is rounded to float32 and the states are kept relative to it.
    state_bound = bound + np.spacing(
        np.float32(
            np.max(np.abs(expected_states[2]), where=np.isfinite(expected_states[2]), initial=0)
        )
    )
    for name, actual, expected in zip("cnm", states, expected_states, strict=True):
        assert actual.dtype == jnp.float32
        assert_close(actual, expected, state_bound, name)


@pytest.mark.parametrize("chunk_size", [32, pytest.param(128, marks=pytest.mark.slow)])
def test_chunkwise_in_float64_is_exact_to_rounding(chunk_size):
    inputs = random_inputs(2, 1, 2, 128, 16, 8, resets=True)
    expected_h, expected_states = oracle(inputs)
    with jax.enable_x64(True):
        wide = {name: array(x, "float64") for name, x in inputs.items()}
        h, states = mlstm_chunkwise(
            **wide, chunk_size=chunk_size, return_last_states=True, backend="xla"
        )
        assert h.dtype == jnp.float64
        for actual, expected in zip((h, *states), (expected_h, *expected_states), strict=True):
            # float64; sums of up to 128 steps in another order, and their exponents
            np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("stabilize_correctly", [True, False])
def test_a_chunk_of_4096_steps_loses_no_digits_of_its_gates(stabilize_correctly):
    """b_t reaches -2e4 there, where float32 has steps of 2e-3."""
    inputs = random_inputs(3, 1, 1, 4096, 8, 8, f_shift=-5.0)
    options = {"stabilize_correctly": stabilize_correctly, "norm_val": 3.0}
    expected_h, expected_states = oracle(inputs, **options)
    h, states = mlstm_chunkwise(
        **inputs, chunk_size=4096, return_last_states=True, backend="xla", **options
    )
    bound = tolerance("float32", 4096)
    for actual, expected in zip((h, *states), (expected_h, *expected_states), strict=True):
        assert_close(actual, expected, bound)


def test_normalise_has_no_nan_where_the_floor_overflows():
    m = jnp.asarray([-jnp.inf, -1e4, -100.0, 0.0, 100.0, 1e4])
    z = jnp.asarray([0.0, 1.0, -1.0, 0.5, 2.0, 0.0])
    num = jnp.ones((6, 2)).at[0].set(0.0)

    def total(num, z, m):
        return jnp.sum(Normaliser(eps=0.0).normalise(num, z, m)[1:5])

    h = Normaliser().normalise(num, z, m)
    assert bool(jnp.isfinite(h).all())
    assert float(h[0, 0]) == 0.0
    for gradient in jax.grad(total, (0, 1, 2))(num, z, m):
        assert bool(jnp.isfinite(gradient).all())
