"""tools/compare_versions.py: the times of two versions of the package in turns, and what their
results differ by."""

import math
import shutil
import textwrap

import benchmark_runs
import compare_versions
import numpy as np
import pytest
from compare_versions import difference

CALL = "--shape=1x2x64x16x16", "--backend=xla", "--direction=fwd", "--repeats=2", "--threads=1"
# A version of which h is a quarter larger, and which knows no layout.
CHANGED = """
    import jax
    of_this_version = mlstm_chunkwise


    def mlstm_chunkwise(*x, **options):
        if "layout" in options:
            raise TypeError("unknown layout")
        return jax.tree.map(lambda h: h + h / 4, of_this_version(*x, **options))
"""


def version(folder, code=""):
    shutil.copytree(compare_versions.ROOT / "mlstm_pallas", folder / "mlstm_pallas")
    with open(folder / "mlstm_pallas" / "__init__.py", "a") as file:
        file.write(textwrap.dedent(code))
    return f"--before={folder}"


@pytest.mark.slow
def test_the_same_version_has_the_same_bits(tmp_path, capsys):
    arguments = version(tmp_path), *CALL, f"--variant={','.join(compare_versions.VARIANTS)}"
    code, rows = benchmark_runs.measured(compare_versions, *arguments)
    assert code == 0
    assert [(x["variant"], x["difference"]) for x in rows] == [
        (x, 0.0) for x in compare_versions.VARIANTS
    ]
    for row in rows:
        assert row["low"] <= row["ratio"] <= row["high"]
        assert min(row["before_ms"], row["ms"], row["low"]) > 0
    assert capsys.readouterr().out.startswith("1x2x64x16x16 xla fwd plain bfloat16 ")


@pytest.mark.parametrize(
    ("before", "now", "note"),
    [
        ({"x": "old"}, {}, "failed before: old"),
        ({}, {"x": "new"}, "fails now: new"),
        ({"x": "old"}, {"x": "new"}, "fails now: new"),
    ],
)
def test_a_call_that_fails_in_both_versions_fails_now(before, now, note):
    assert compare_versions.row_of("x", [], (before, now), 2) == dict(note=note)


@pytest.mark.slow
def test_a_version_that_differs(tmp_path, capsys):
    """In its numbers, in what it can run, and by more than is allowed in its time."""
    arguments = version(tmp_path, CHANGED), *CALL, "--variant=plain,BTNH", "--at_most=0.0"
    code, [plain, layout] = benchmark_runs.measured(compare_versions, *arguments)
    assert code == 1
    assert plain["difference"] == pytest.approx(1 - 1 / 1.25, rel=2**-7)  # bfloat16
    assert layout["note"] == "failed before: TypeError: unknown layout"
    assert "ratio" not in layout


X, Y = np.ones((2, 3), "float32"), np.full((2, 3), 1.5, "float32")
NAN, LARGER = np.where(X.cumsum().reshape(X.shape) > 5, np.nan, X), np.ones((2, 4), "float32")


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ([X, Y], [X, Y], 0.0),
        ([NAN], [NAN], 0.0),
        ([X, X], [X, Y], 0.5),
        ([Y], [X], 1 / 3),
        ([X], [NAN], math.inf),
        ([X * np.inf], [X * -np.inf], math.inf),
        ([X], [LARGER], math.inf),
        ([X], [X, X], math.inf),
    ],
)
def test_differences(before, now, expected):
    assert difference(before, now) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (dict(note="fails now: ValueError: no"), "fails now: ValueError: no"),
        (
            dict(before_ms=1.5, ms=1.25, ratio=0.8333, low=0.82, high=0.85, difference=0.0),
            "   1.5000    1.2500 ms  0.833 (0.820 to 0.850)  0.0e+00",
        ),
    ],
)
def test_lines(row, text):
    case = compare_versions.Case("tiny", None, "xla", "fwd", "plain", "float32")
    assert compare_versions.line(case, row) == f"{'tiny xla fwd plain float32':44} {text}"
