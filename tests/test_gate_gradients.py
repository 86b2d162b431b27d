"""Sums of the gates' gradients against their definition in float64; whole gradients:
test_gradients.py."""

import math

import jax
import numpy as np
import pytest

from mlstm_pallas.gate_gradients import inner, segmented_suffix_sum


@pytest.mark.parametrize("n", [1, 32, 33, 1000])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.97, 1.0])
def test_sums_over_runs_of_steps(n, share):
    """Runs within one group, over several, and over groups of groups."""
    r = np.random.default_rng(n)
    x, goes_on = r.normal(size=(6, n)), r.random((6, n)) < share
    expected, after = np.zeros_like(x), np.zeros(6)
    for t in reversed(range(n)):
        after = expected[:, t] = x[:, t] + np.where(goes_on[:, t], after, 0.0)
    result = jax.jit(segmented_suffix_sum)(x.astype("float32"), goes_on)
    # One rounding of each x, and sums of n terms.
    bound = (1 + math.sqrt(n)) * 2.0**-24 * np.linalg.norm(expected)
    assert np.linalg.norm(np.asarray(result) - expected) <= bound


def test_inner_products_of_float16_are_of_float32():
    x = np.full((2, 3), 300, "float16")
    assert np.array_equal(inner(x, x), np.full(2, 3 * 300.0**2))
