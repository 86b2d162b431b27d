"""The chunks that run, and the denominator of h, against their definitions, in NumPy."""

import numpy as np
import pytest
from numpy_evaluator import in_numpy

from mlstm_pallas.formulas import normaliser
from mlstm_pallas.formulas.normaliser import Normaliser
from mlstm_pallas.operands import chunk_list
from mlstm_pallas.problem.dimensions import Problem

equal, close = np.testing.assert_array_equal, np.testing.assert_allclose


L = 4


def test_lists_of_chunks_by_length():
    """Those with steps are the first of all rows in an order of the active ones."""
    p = Problem(2, 3, 12, 16, 16, L, 1.0)
    lengths = np.int32([0, 1, 4, 6, 12])

    def run(lengths):
        x = chunk_list.chunks_by_length(lengths, 12, p)
        return x.num_active, x.with_active_first().active_first

    num_active, ([count], order) = in_numpy(run)(lengths)
    sizes = np.clip(lengths[:, None] - [0, 4, 8], 0, 4)
    active = sizes.ravel() > 0
    equal(num_active, (sizes > 0).sum(1))
    assert count == active.sum()
    equal(order, [*np.flatnonzero(active), *np.flatnonzero(~active)])


# ---------------- the denominator

NORMALISERS = Normaliser(0.5, 2.0), Normaliser(0.5, 2.0, False), Normaliser(0.0, 0.0)


@pytest.mark.parametrize("x", NORMALISERS, ids=str)
def test_the_denominator_and_its_gradients(x):
    """On the floor z has no gradient, and m has one through eps, or through a floor that it does
    not move. 0 / 0 is 0, as its gradients are."""
    z, m = np.meshgrid(np.float32([-9, -1, 0, 0.25, 9]), np.log(np.float32([4, 1, 0.25])))
    floor = x.norm_val * (np.exp(-m) if x.stabilize_correctly else np.ones_like(m))
    den, above, delta = np.maximum(np.abs(z), floor) + x.eps, np.abs(z) >= floor, 3 + z
    inverse = np.divide(1, den, out=np.zeros_like(den), where=den > 0)
    dz, share = -delta * np.sign(z) * above, x.eps * inverse
    if not x.stabilize_correctly:
        share = np.where(above, share, 1)
    expected = np.where(den > 0, den, 1), (delta * inverse)[..., None]
    expected += inverse, dz * inverse, dz, -delta * share

    @in_numpy
    def run(delta, z, m):
        return x.denominator(z, m), x.normalise(delta[..., None], z, m), *x.gradients(delta, z, m)

    for actual, desired in zip(run(delta, z, m), expected, strict=True):
        close(actual, desired, rtol=1e-6)


def test_nan_stays():
    x, nan = Normaliser(), np.full((1, 1), np.nan)

    @in_numpy
    def run(z, m):
        return x.denominator(z, m), x.normalise(z, z[0], m[0]), x.gradients(z, z, m).vecDz

    assert np.isnan(run(nan, np.float32([[0]]))).all()
    equal(normaliser.at_least(np.float32([1, 3, np.nan]), 2.0), [2, 3, np.nan])


def test_a_query_of_weight_0_has_scale_0_whatever_its_denominator():
    w, inverse = np.float32([0, 0, 0, 2]), np.float32([np.inf, np.nan, -np.inf, 4])
    equal(normaliser.query_scale(w, 0.5, inverse), [0, 0, 0, 4])
    equal(normaliser.query_scale(w, 0.5), [0, 0, 0, 1])
