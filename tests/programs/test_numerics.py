"""The benchmark of errors: what an error is, which errors have a bound, and its random inputs."""

import functools

import benchmark_runs
import jax
import jax.numpy as jnp
import numerics
import numpy as np
import peers
import pytest
import runner
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
    """But for their rounding to the dtype, after which the gradients are of them: h is linear in v,
    so that <v, dv> = <h, dh>."""
    x = numerics.random_inputs(SHAPE, "bfloat16", numerics.Gates(1.0, 4.0), "random", 0)
    with jax.enable_x64(True):
        through = numerics.through_norm(x)
        (h, _, _, dv, *_), _ = numerics.exact(numerics.in_float64(through))
        h, dv = map(np.asarray, (h, dv))
    dh = np.asarray(through.dh, "float64")
    sizes = np.linalg.norm(dh, axis=-1) * np.linalg.norm(h, axis=-1)
    cosines = np.sum(dh * h, -1) / sizes
    # Eight roundings of up to 2**-9 are below it; cosines of random vectors are some 0.3.
    assert 1e-9 < np.abs(cosines).max() < 2.0**-8
    assert through.dh.dtype == "bfloat16"
    assert not np.array_equal(dh, np.asarray(x.dh, "float64"))
    actual, expected = (np.sum(y, (2, 3)) for y in (np.asarray(x.v, "float64") * dv, h * dh))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * sizes.sum())


# ---------------- figures of a row


def measured_row(monkeypatch, errors, kappa=(1.0,), **keys):
    """The row of three heads whose outputs have these relative errors, of h and of others."""
    heads = np.ones((1, 3, 4, 2))
    of_heads = dict.fromkeys(numerics.OUTPUTS, (0.0, 0.0, 0.0)) | errors
    outputs = [heads * (1 + np.array(x)[:, None, None]) for x in of_heads.values()]
    expected = tuple(map(jnp.asarray, [heads] * 6))
    monkeypatch.setattr(numerics, "exact", lambda *_: (expected, jnp.asarray(kappa)))
    monkeypatch.setattr(numerics, "results", lambda *_: tuple(map(jnp.asarray, outputs)))
    row = dict(
        shape=Shape(1, 3, 4, 2, 2), dtype="float32", cotangents="random", operands="positive"
    )
    row |= dict(seed=0, impl="xla", status="ok", note="") | keys
    return runner.attempt(row, True, numerics.measure, numerics.Gates(1.0, 4.0))


def test_figures_of_the_heads(monkeypatch):
    """The largest and the median of three, whose mean is another, of the worst gradient."""
    errors = dict(h=(0.5, 0.25, 0.0), dk=(0.0, 8.0, 1.0), df=(2.0, 2.0, 4.0), di=(3.0, 0.0, 0.0))
    row = measured_row(monkeypatch, errors, kappa=[1.0, 3.0, 2.0], operands="random")
    figures = dict(h_error=0.5, h_median=0.25, d_error=8.0, d_median=2.0, kappa=3.0)
    assert row["status"] == "ok"
    assert {name: row[name] for name in figures} == pytest.approx(figures, rel=1e-6)
    assert row["medians"]["dk"] == pytest.approx(1.0)


def test_a_nan_is_neither_kappa_nor_an_error_of_less(monkeypatch):
    """XLA's maximum of 4,096 elements on a CPU would lose it."""
    kappa = np.ones(4096)
    kappa[-1] = np.nan
    row = measured_row(monkeypatch, dict(dv=(0.0, np.nan, 0.0)), kappa, operands="random")
    assert np.isnan(row["kappa"])
    assert (row["d_error"], row["d_median"], row["error"]) == (np.inf, 0.0, np.inf)


# What README promises of h and of gradients.
PROMISED = dict(bfloat16=(5e-3, 2e-2), float16=(1e-3, 4e-3), float32=(1e-5, 1e-4))


@pytest.mark.parametrize("dtype", PROMISED)
@pytest.mark.parametrize("output", numerics.OUTPUTS)
def test_each_output_has_its_own_bound(output, dtype, monkeypatch):
    """A row is wrong above it, by the head with the largest error, and right below."""
    bound = PROMISED[dtype][output != "h"]
    for factor, status in ((0.9, "ok"), (1.1, "wrong")):
        with jax.enable_x64(True):
            errors = {output: (0.0, factor * bound, 0.0)}
            row = measured_row(monkeypatch, errors, dtype=dtype)
        assert row["status"] == status, row["note"]
        assert status == "ok" or f" in {output}, at most {bound:.0e}" in row["note"]


# Gates, operands and steps at which a bound ends, and beside it.
BOUNDED = """
1:0 positive 1024: True
1:40 positive 1024: True
1:40.5 positive 1024: False
1:-0.5 positive 1024: False
1.5:4 positive 1024: False
1:4 random 1024: False
1:4 positive 1025: False
15:4:15 positive 1024: True
40:-9:2 positive 1024: True
15:4:15.5 positive 1024: False
15:4:15 random 1024: False
15:4:15 positive 1025: False
0:4:-1 positive 8: True
2:4:-1 positive 8: False
"""


@pytest.mark.parametrize("line", BOUNDED.strip().splitlines())
def test_which_errors_have_a_bound(line):
    case, _, bounded = line.rpartition(": ")
    gates, operands, steps = case.split()
    shape = SHAPE._replace(S=int(steps))
    bounds = numerics.bounds(shape, "float16", numerics.parse_gates(gates)[1], operands)
    expected = dict(h=1e-3, dq=4e-3, dk=4e-3, dv=4e-3, di=4e-3, df=4e-3)
    assert bounds == (expected if bounded == "True" else {})


@pytest.mark.parametrize("text", ["", "1", "1:x", "1:2:3:4"])
def test_gates_that_are_none(text):
    with pytest.raises(ValueError, match=f"unknown gates '{text}', expected I:F or I:F:C"):
        numerics.parse_gates(text)
