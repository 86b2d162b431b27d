"""What conftest.py, oracle.py and stage_calls.py promise: a test that hangs ends, a quick mark
names rows, and a check refuses what is wrong. test_products.py has the checks of the interpreter,
test_engine.py those of the engine."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest
import stage_calls

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


HANGS = """
import signal, time
import conftest, pytest
conftest.UNANSWERED = 0.5
@pytest.mark.timeout(0.5)
def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(60)
"""
QUICK = """
import pytest
@pytest.mark.quick("xla", "gone")
@pytest.mark.parametrize("x", ["xla-1", "interpret-1"])
def test_x(x):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "code", "said"),
    [(HANGS, 1, "in test_hangs"), (QUICK, 4, "test_x: {'gone'}")],
    ids=["hangs", "quick"],
)
def test_a_project_with_this_conftest(text, code, said, tmp_path):
    (tmp_path / "test_a.py").write_text(text)
    options = "-n", "0", "-p", "no:cacheprovider", "-p", "conftest", f"--confcutdir={tmp_path}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", PROJECT, tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stdout


# ---------------- what checks results

X, GONE = np.float32([[[1.0, 2.0, 3.0]]]), np.float32([[[1.0, 2.0, 0.0]]])
INFINITE, NAN = np.float32([[[1.0, 2.0, np.inf]]]), np.float32([[[1.0, 2.0, np.nan]]])
TWO, GATES = np.array([2]), dict.fromkeys("qkvif", GONE)  # beyond 2 steps GONE is 0


def raising(error):
    raise error


close, same, isolated = oracle.assert_close, oracle.assert_same_bits, oracle.check_isolated
nothing, below = oracle.assert_nothing_beyond, oracle.assert_below
outputs = stage_calls.compare_outputs
# A function, arguments that it accepts, unless a former row has them, and what it refuses.
ROWS = [
    (close, [1.01 * X, X, 0.0101], [1.01 * X, X, 0.0099]),
    (close, [INFINITE, INFINITE, 0], [-INFINITE, INFINITE, 9]),
    *((close, None, [x, y, 9]) for x, y in itertools.permutations((X, INFINITE, NAN), 2)),
    (oracle.compare, ["hc", (X, X), (X, X), 0], ["hc", (X, X), (X, 2 * X), 0.4]),
    (oracle.compare, None, ["h", (X,), (), 0]),
    (same, [[X, INFINITE], (X, INFINITE)], [[X, INFINITE], [np.nextafter(X, 9), INFINITE]]),
    (same, None, [[X, INFINITE], [X]]),
    (isolated, [np.copy, X, NAN, lambda x: x[0, 0, :2]], [np.copy, X, NAN, np.copy]),
    (isolated, [np.copy, X, X, np.copy], [np.copy, INFINITE, INFINITE, np.copy]),
    *((oracle.refused, None, [ValueError, "x", *y]) for y in ([id, 0], [raising, TypeError("x")])),
    (
        oracle.refused,
        [ValueError, "x", raising, ValueError("x\ny")],
        [ValueError, "y", raising, ValueError("x")],
    ),
    (nothing, [TWO, [GONE, X], GATES], [TWO, [X], GATES]),
    (nothing, None, [TWO, [GONE], GATES | dict(q=NAN)]),
    (below, [dict(h=0.1, c=0.2), 0.21], [dict(h=0.1, c=np.nan), 0.21]),
    (outputs, ["", (X, X), (X, X), lambda *_: 0], ["", (X, X), (X, 2 * X), lambda *_: 0.4]),
    (outputs, None, ["", (X, X), (X,), lambda *_: 0]),
]
REFUSALS = AssertionError, TypeError, ValueError, pytest.fail.Exception


@pytest.mark.parametrize(("function", "right", "wrong"), ROWS)
def test_a_check_accepts_what_is_right_and_refuses_what_is_wrong(function, right, wrong):
    if right is not None:
        function(*right)
    with pytest.raises(REFUSALS):
        function(*wrong)


def test_bounds_by_hand():
    root, single = math.sqrt(4 / 3), 2.0**-24
    assert oracle.tolerance("bfloat16", 64) == pytest.approx(root * 2.0**-8 + 8 * single)
    assert oracle.tolerance("float16", 4) == pytest.approx(root * 2.0**-11 + 2 * single)
    assert oracle.tolerance("float32", 64) == pytest.approx((root + 8) * single)
