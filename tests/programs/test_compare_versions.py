"""tools/compare_versions.py: the times of two versions of the package in turns, and what their
results differ by."""

import shutil
import textwrap

import benchmark_runs
import compare_versions
import numpy as np
import pytest

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


@pytest.mark.slow
def test_a_version_that_differs(tmp_path, capsys):
    """In its numbers, in what it can run, and by more than is allowed in its time."""
    arguments = version(tmp_path, CHANGED), *CALL, "--variant=plain,BTNH", "--at_most=0.0"
    code, [plain, layout] = benchmark_runs.measured(compare_versions, *arguments)
    assert code == 1
    assert plain["difference"] == pytest.approx(1 - 1 / 1.25, rel=2**-7)  # bfloat16
    assert layout["note"] == "failed before: TypeError: unknown layout"
    assert "ratio" not in layout


def test_a_call_that_fails_in_both_versions_fails_now():
    for now in ({}, {"x": "old"}):
        expected = dict(note="fails now: old" if now else "failed before: old")
        assert compare_versions.row_of("x", [], ({"x": "old"}, now), 2) == expected


X, NAN = np.ones(4, "float32"), np.full(4, np.nan, "float32")


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [([X, NAN], [1.5 * X, NAN], 0.5), ([X], [NAN], np.inf), ([X], [X[:3]], np.inf)],
)
def test_nan_is_equal_to_itself_alone(before, now, expected):
    assert compare_versions.difference(before, now) == pytest.approx(expected)
