"""numpy_evaluator.py, where it could hide a defect: what is beyond an array, or NaN, is as XLA has
it, and an interpreted kernel runs. Values of kernels see the rest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy_evaluator import in_numpy

MODES = ("clip", {}), ("fill", {}), ("fill", dict(fill_value=5.0)), ("promise_in_bounds", {})


def indexed(x, y, n):
    """Blocks at indices that lie inside, reach beyond or begin before the array."""
    rows, columns = jnp.abs(n) % 3, n % 7 - 2
    batched = functools.partial(jnp.take_along_axis, mode="fill")
    modes = lax.GatherScatterMode
    blocks = lax.GatherDimensionNumbers((1, 2), (0,), (0, 2))
    at = n[0, :, :2] // 4
    gathered = (
        lax.gather(x, at, blocks, (1, 3, 2), mode=mode) for mode in (modes.CLIP, modes.FILL_OR_DROP)
    )
    return (
        # A block that reaches beyond the end is moved back.
        [lax.dynamic_slice(x, (n[0, 0, 0] * 0 + 1, 2, -9), (1, 2, 3))],
        [lax.dynamic_update_slice(x, y[:1, :2], (9, n[0, 0, 0] * 0 + 1, 0))],
        [x[1, rows[0]], x[:, rows[0], 1:3], x[:, 1, rows[0, 0]], x[n[0] % 2, rows[0], :2]],
        [x.at[:, :, columns].get(mode=mode, **more) for mode, more in MODES],
        [n.at[columns].get(mode="fill"), rows.astype("uint8").at[columns].get(mode="fill")],
        [batched(x, columns, axis) for axis in range(3)],
        [*gathered],
        [x.at[:, rows[0, 0], 1].set(y[:, 0]), x.at[n[0] % 2, rows[0]].set(7.0)],
        [x.at[..., columns[0, 0]].add(2.0, mode=mode) for mode in ("clip", "drop")],
        [x.at[1, columns[0, 0]].add(y[0, 0], mode="drop"), n.at[0, :, rows[0]].add(1)],
        [jax.vmap(lambda x, i, y: x.at[i].set(y, mode="drop"))(x, columns[:, 0, 0], y[:, 0])],
    )


def special(x, y, n):
    """Of NaN and infinities."""
    wild = jnp.array([jnp.nan, jnp.inf, -jnp.inf])
    x, y = x.at[0, :, 0].set(wild), y.at[0, :, :2].set(jnp.stack([wild[::-1], wild], 1))
    unary = jnp.exp, jnp.log, jnp.sqrt, jnp.sign, lax.logistic, jnp.isfinite
    binary = lax.max, lax.min, lax.eq, lax.ne, lax.lt, lax.ge, lax.mul, lax.div
    return [f(x) for f in unary], [f(x, y) for f in binary], [lax.cummax(x, 1), jnp.max(x, 1)]


@pytest.mark.parametrize("function", [indexed, special])
def test_operations_are_those_of_xla(function):
    r = np.random.default_rng(0)
    (x, y), n = r.normal(size=(2, 2, 3, 4)), r.integers(-9, 9, (2, 3, 4)) * 2 + 1
    with jax.enable_x64(True):
        x = [*map(jnp.asarray, (x, y, n))]
        actual, expected = (run(function)(*x) for run in (in_numpy, jax.jit))
    for y, z in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert y.dtype == z.dtype
        np.testing.assert_allclose(y, z, rtol=1e-14, atol=1e-14)
