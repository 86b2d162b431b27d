"""mLSTMsig: the sigmoid input gate, with and without a normaliser.

Its gradients: test_gradients.py, cases sigmoid.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, oracle, random_inputs

from mlstm_pallas import mlstm_chunkwise, reference

pytestmark = pytest.mark.usefixtures("quick_compilation")

NORMALISED = pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "unnormalised"])


def written_out(q, k, v, i, f, c, n, *, normalize, norm_val=1.0, eps=1e-6):
    """C_t = sigmoid(f_t) C_{t-1} + sigmoid(i_t) k_t v_t^T in float64 numpy, one step after the
    other."""
    q, k, v, i, f, c, n = (np.asarray(x, "float64") for x in (q, k, v, i, f, c, n))
    outputs = []
    for t in range(q.shape[2]):
        forget, store = (1 / (1 + np.exp(-x[:, :, t])) for x in (f, i))
        c = (
            forget[..., None, None] * c
            + store[..., None, None] * k[:, :, t, :, None] * v[:, :, t, None, :]
        )
        n = forget[..., None] * n + store[..., None] * k[:, :, t]
        scaled = q[:, :, t] * q.shape[-1] ** -0.5
        h = np.einsum("bhk,bhkv->bhv", scaled, c)
        if normalize:
            h /= (np.maximum(np.abs(np.sum(scaled * n, -1)), norm_val) + eps)[..., None]
        outputs.append(h)
    return np.stack(outputs, 2), (c, n, np.zeros(c.shape[:2]))


@NORMALISED
def test_the_recurrence_is_the_definition(normalize):
    inputs = random_inputs(0, 1, 2, 30, 8, 8, m_initial=False)
    h, states = oracle(inputs, input_gate="sigmoid", normalize=normalize)
    expected, expected_states = written_out(*inputs.values(), normalize=normalize)
    for actual, desired in zip((h, *states), (expected, *expected_states), strict=True):
        np.testing.assert_allclose(
            actual, desired, rtol=1e-12, atol=1e-12
        )  # float64, sums of 30 steps in another order


def test_a_closed_forget_gate_counts_where_the_input_gate_is_closed_as_well():
    """Without a floor of the denominator, h is old and new content by their ratio, however small
    both are."""
    q, k, v, _, _ = random_inputs(5, 1, 1, 3, 4, 4, states=False).values()
    closed = jnp.asarray([[[0.0, -61.0, 0.0]]])
    options = dict(input_gate="sigmoid", eps=0.0, norm_val=0.0)

    def gradient(run, q, k, v, gates):
        gradient = jax.grad(lambda f: run(q, k, v, gates, f, **options)[0, 0, 1].sum())
        return jax.jit(gradient)(gates)

    result = gradient(functools.partial(mlstm_chunkwise, backend="xla"), q, k, v, closed)
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(x), "float64") for x in (q, k, v, closed))
        expected = np.asarray(
            gradient(lambda *x, **options: reference.recurrence(*x, **options)[0], *wide)
        )
    assert np.abs(expected).max() > 0.01
    assert_close(result, expected, 1e-4)
