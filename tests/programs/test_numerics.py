"""The benchmark of errors: what an error is, and which errors have a bound."""

import benchmark_runs
import jax.numpy as jnp
import numerics
import numpy as np
import peers
import pytest
from shapes import Shape

SHAPE, NAMES = Shape(1, 2, 24, 4, 8), ["h", "dq", "dk", "dv", "di", "df"]


@pytest.mark.slow
@pytest.mark.parametrize(("operands", "status"), [("positive", "wrong"), ("random", "ok")])
def test_a_result_that_is_off_by_a_share(operands, status, monkeypatch):
    """One head of two is; where the promise has a bound the row is wrong."""

    def mlstm_chunkwise(*inputs, backend):
        share = jnp.array([1.0, 1.03])[:, None, None]
        return share.astype(inputs[2].dtype) * peers.exact(*inputs)

    monkeypatch.setattr(numerics, "mlstm_chunkwise", mlstm_chunkwise)
    numerics.results.clear_cache()
    request = f"--shape={SHAPE}", "--impl=xla", "--dtype=float32", "--gates=1:4"
    code, [row] = benchmark_runs.measured(numerics, *request, f"--operands={operands}")
    numerics.results.clear_cache()
    assert (code, row["status"]) == (int(status == "wrong"), status)
    assert row["errors"] == pytest.approx(dict.fromkeys(NAMES, 0.03), rel=2e-2)
    assert row["medians"] == pytest.approx(dict.fromkeys(NAMES, 0.015), rel=2e-2)
    assert row["d_error"] == max(row["errors"][x] for x in NAMES[1:])
    assert row["kappa"] > 0.99


@pytest.mark.slow
def test_rows_of_plain_jnp():
    request = f"--shape={SHAPE}", "--dtype=float32", "--gates=1:4,1:10:15", "--operands=positive"
    code, rows = benchmark_runs.measured(numerics, *request, "--cotangents=random,normalised")
    assert (code, [row["gates"] for row in rows]) == (0, ["1:4", "1:10:15"] * 2)
    assert all(0 < row["h_median"] <= row["h_error"] < 1e-6 for row in rows)
    assert all(0 < row["d_median"] <= row["d_error"] < 1e-5 for row in rows)


def test_what_is_not_finite_is_an_infinite_error():
    x = np.ones((1, 2, 3, 4))
    off = x.copy()
    off[0, :, 0, 0] = np.inf, np.nan
    assert np.isinf(numerics.errors_by_head([off], [x])[0]).all()


# What README promises of h and of gradients.
PROMISED = dict(bfloat16=(5e-3, 2e-2), float16=(1e-3, 4e-3), float32=(1e-5, 1e-4))


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
    shape, gates = SHAPE._replace(S=int(steps)), numerics.parse_gates(gates)[1]
    for dtype, (of_h, of_gradients) in PROMISED.items():
        expected = dict(h=of_h) | dict.fromkeys(numerics.OUTPUTS[1:], of_gradients)
        bounds = numerics.bounds(shape, dtype, gates, operands)
        assert bounds == (expected if bounded == "True" else {})
