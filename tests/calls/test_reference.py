"""The recurrence against its definition written out in numpy, and the plain chunkwise form against
the recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    OUTPUTS,
    assert_same_bits,
    check_outputs,
    compare,
    in_float64,
    oracle,
    random_inputs,
    tolerance,
)

from mlstm_pallas import mlstm_chunkwise, reference
from mlstm_pallas.formulas.normaliser import Normaliser


def by_definition(
    q,
    k,
    v,
    i,
    f,
    c,
    n,
    m=0.0,
    *,
    eps=1e-6,
    norm_val=1.0,
    stabilize_correctly=True,
    input_gate="exp",
    normalize=True,
):
    """One head, unstabilised: the true state exp(m) (C, n) and nothing cancelled by hand; float64,
    moderate gates only."""
    C, n, h, scale = np.exp(m) * c, np.exp(m) * n, [], q.shape[-1] ** -0.5
    for t in range(len(q)):
        forget = 1 / (1 + np.exp(-f[t]))
        if input_gate == "sigmoid":
            store = 1 / (1 + np.exp(-i[t]))
        else:
            store, m = np.exp(i[t]), max(np.log(forget) + m, i[t])
        C = forget * C + store * np.outer(k[t], v[t])
        n = forget * n + store * k[t]
        z = np.exp(-m) * (q[t] @ n) * scale
        floor = norm_val * np.exp(-m) if stabilize_correctly else norm_val
        den = max(abs(z), floor) + eps if normalize else 1.0
        h.append(np.exp(-m) * (C.T @ q[t]) * scale / den)
    return np.stack(h), C, n, m


@pytest.mark.parametrize(
    "options",
    [
        dict(eps=0.0, norm_val=2.0),
        dict(eps=0.3, norm_val=2.0, stabilize_correctly=False),
        dict(input_gate="sigmoid"),
        dict(input_gate="sigmoid", normalize=False),
        dict(normalize=False),
    ],
    ids=str,
)
def test_recurrence_is_the_unstabilised_definition(options):
    inputs = random_inputs(0, 1, 1, 40, 7, 5, m_initial="input_gate" not in options)
    h, c, n, m = (y[0, 0] for y in oracle(inputs, **options))
    arrays = [np.asarray(x, "float64")[0, 0] for x in inputs.values()]
    result = h, np.exp(m) * c, np.exp(m) * n, m
    # Exponents are sums of the gates of 40 steps, whose roundings are relative to their size.
    compare(OUTPUTS, result, by_definition(*arrays, **options), 40 * tolerance("float64", 40))


@pytest.mark.slow
def test_recurrence_in_the_layout_of_projections():
    inputs = random_inputs(0, 2, 3, 5, 7, 5)
    swapped = {x: np.swapaxes(y, 1, 2) if x in "qkvif" else y for x, y in inputs.items()}
    h, states = reference.recurrence(**swapped, layout="BTNH")
    assert_same_bits((jnp.swapaxes(h, 1, 2), states), reference.recurrence(**inputs))


def test_chunkwise_in_float64_is_exact_to_rounding():
    inputs = random_inputs(2, 1, 2, 128, 16, 8, resets=True)
    result = in_float64(
        lambda x: mlstm_chunkwise(**x, chunk_size=32, return_last_states=True, backend="xla"),
        inputs,
    )
    assert {x.dtype.name for x in jax.tree.leaves(result)} == {"float64"}
    compare(OUTPUTS, jax.tree.leaves(result), oracle(inputs), 128 * tolerance("float64", 128))


@pytest.mark.slow
def test_a_chunk_of_4096_steps_loses_no_digits_of_its_gates():
    """b_t reaches -2e4 there, where float32 has steps of 2e-3."""
    inputs = random_inputs(3, 1, 1, 4096, 8, 8, f_shift=-5.0)
    options = {"stabilize_correctly": False, "norm_val": 3.0}
    result = mlstm_chunkwise(
        **inputs, **options, chunk_size=4096, return_last_states=True, backend="xla"
    )
    check_outputs(result, inputs, tolerance("float32", 4096), **options)


@pytest.mark.slow
def test_normalise_has_no_nan_where_the_floor_overflows():
    m = jnp.asarray([-jnp.inf, -1e4, -100.0, 0.0, 100.0, 1e4])
    z = jnp.asarray([0.0, 1.0, -1.0, 0.5, 2.0, 0.0])
    num = jnp.ones((6, 2)).at[0].set(0.0)

    def total(num, z, m):
        return jnp.sum(Normaliser(eps=0.0).normalise(num, z, m)[1:5])

    h = Normaliser().normalise(num, z, m)
    assert jnp.isfinite(h).all()
    assert h[0, 0] == 0.0
    for gradient in jax.jit(jax.grad(total, (0, 1, 2)))(num, z, m):
        assert jnp.isfinite(gradient).all()
