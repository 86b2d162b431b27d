"""The benchmark of errors: what an error is, which errors have a bound, and its random inputs."""

import functools

import benchmark_runs
import jax
import jax.numpy as jnp
import numerics
import numpy as np
import peers
import pytest
from shapes import Shape

SHAPE = Shape(1, 2, 24, 4, 8)


@pytest.mark.parametrize(
    ("gates", "operands", "status"),
    [
        ("1:4", "positive", "wrong"),
        ("15:4:15", "positive", "wrong"),
        ("1:4", "random", "ok"),
        ("5:4", "positive", "ok"),
    ],
)
def test_a_result_that_is_off_by_a_share(gates, operands, status, monkeypatch):
    """One head of two is; where the promise has a bound the row is wrong."""

    def mlstm_chunkwise(*inputs, backend):
        share = jnp.array([1.0, 1.03])[:, None, None]
        return share.astype(inputs[2].dtype) * peers.exact(*inputs)

    monkeypatch.setattr(numerics, "mlstm_chunkwise", mlstm_chunkwise)
    numerics.results.clear_cache()
    request = f"--shape={SHAPE}", "--impl=xla", "--dtype=float32", f"--gates={gates}"
    code, [row] = benchmark_runs.measured(numerics, *request, f"--operands={operands}")
    numerics.results.clear_cache()
    assert (code, row["status"]) == (int(status == "wrong"), status)
    assert [*row["errors"]] == ["h", "dq", "dk", "dv", "di", "df"]
    assert [*row["errors"].values()] == pytest.approx([0.03] * 6, rel=2e-2)
    assert [*row["medians"].values()] == pytest.approx([0.015] * 6, rel=2e-2)
    assert row["d_error"] == max(row["errors"][x] for x in ("dq", "dk", "dv", "di", "df"))
    assert (
        row["kappa"] == pytest.approx(1, abs=1e-2) if operands == "positive" else row["kappa"] > 1
    )


def test_rows_of_plain_jnp():
    request = f"--shape={SHAPE}", "--dtype=float32", "--gates=1:4,1:10:15", "--operands=positive"
    code, rows = benchmark_runs.measured(numerics, *request, "--cotangents=random,normalised")
    assert (code, [row["gates"] for row in rows]) == (0, ["1:4", "1:10:15"] * 2)
    assert all(0 < row["h_median"] <= row["h_error"] < 1e-6 for row in rows)
    assert all(0 < row["d_median"] <= row["d_error"] < 1e-5 for row in rows)


def test_an_infinite_gradient_is_an_infinite_error():
    x = np.ones((1, 2, 3, 4))
    off = x.copy()
    off[0, 0, 0, 0], off[0, 1, 2, 3] = np.inf, np.nan
    assert np.isinf(numerics.errors_by_head([off], [x])[0]).all()


def test_inputs_follow_from_the_seed():
    draw = functools.partial(numerics.random_inputs, SHAPE, "float32")
    gates, other = numerics.Gates(2.0, 10.0, 15.0), numerics.Gates(4.0, 10.0)
    x, y, z = draw(gates, "random", 1), draw(other, "positive", 1), draw(gates, "random", 2)
    np.testing.assert_allclose(x.i, 15 * np.tanh(y.i / 30), rtol=1e-5)
    np.testing.assert_allclose(x.f, 15 * np.tanh(y.f / 15), rtol=1e-5)
    np.testing.assert_allclose(y.q, np.abs(x.q) + 0.2, rtol=1e-6)
    assert abs(np.mean(y.f) - 10) < 1
    assert not np.any(x.v == z.v)


def test_cotangents_through_a_norm_are_at_right_angles_to_h():
    x = numerics.random_inputs(SHAPE, "float32", numerics.Gates(1.0, 4.0), "random", 0)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda y: jnp.asarray(y, "float64"), x)
        dh, (h, *_), _ = numerics.exact(wide, "normalised", jnp.dtype("float32"))
        dh, h = np.asarray(dh), np.asarray(h)
    cosines = np.sum(dh * h, -1) / (np.linalg.norm(dh, axis=-1) * np.linalg.norm(h, axis=-1))
    assert np.abs(cosines).max() < 1e-2  # of random ones, some 0.3
