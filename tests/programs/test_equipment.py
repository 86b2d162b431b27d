"""What conftest.py, oracle.py and stage_calls.py promise: a test that hangs ends, a quick mark
names rows, and a check refuses what is wrong. test_products.py has the checks of the interpreter,
test_engine.py those of the engine."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import extras
import numpy as np
import oracle
import pytest
import stage_calls

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize(
    ("jaxlib", "plugins", "gpus", "added"),
    [("0.11.2", True, 2, False), ("0.12.0.1", True, 2, True), ("0.12.0.1", True, 1, False)],
)
def test_xla_gets_flags_that_it_knows(jaxlib, plugins, gpus, added):
    assert bool(extras.flags_of_gpus(jaxlib, plugins, gpus)) == added


@pytest.mark.parametrize(
    ("before", "after"), [("--c", "--a=1 --b=2 --c"), ("--a=3", "--b=2 --a=3"), ("", "")]
)
def test_flags_of_the_user_stay(before, after):
    extras.add_flags(flags := dict(XLA_FLAGS=before), ["--a=1", "--b=2"])
    assert flags == dict(XLA_FLAGS=after)


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
    ("text", "code", "said"), [(HANGS, 1, "in test_hangs"), (QUICK, 4, "test_x: {'gone'}")]
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
SIZES, INTERPRET = (1, 1, 32, 16, 16, 16), stage_calls.Lowering.INTERPRET


def raising(error):
    raise error


def check_small_row(change):
    """That of stage_calls, of a kernel that returns something else after a change."""
    run = stage_calls.run_stage

    def run_stage(name, call, **x):
        result = run(name, call, **x)
        return change(result) if call.lowering is INTERPRET else result

    with mock.patch.object(stage_calls, "run_stage", run_stage):
        stage_calls.check_small_row("step_sums", SIZES, {}, INTERPRET)


close, same, isolated = oracle.assert_close, oracle.assert_same_bits, oracle.check_isolated
outputs, refused = stage_calls.compare_outputs, oracle.refused
# A function, arguments that it accepts, unless a former row has them, and what it refuses.
ROWS = [
    (oracle.error, [X, X], [X, X[0]]),
    (close, [1.01 * X, X, 0.0101], [1.01 * X, X, 0.0099]),
    (close, [X, 0 * X, 3.75], [X, 0 * X, 3.74]),  # a norm where nothing is expected
    (close, [INFINITE, INFINITE, 0], [-INFINITE, INFINITE, 9]),
    *((close, None, [x, y, 9]) for x, y in itertools.permutations((X, INFINITE, NAN), 2)),
    (oracle.compare, ["hc", (X, X), (X, X), 0], ["hc", (X, X), (X, 2 * X), 0.4]),
    (oracle.compare, None, ["h", (X,), (), 0]),
    (same, [[X, INFINITE], (X, INFINITE)], [[X, INFINITE], [np.nextafter(X, 9), INFINITE]]),
    *((same, None, [[X, INFINITE], y]) for y in ([X, NAN], [X])),
    (isolated, [np.copy, X, NAN, lambda x: x[0, 0, :2]], [np.copy, X, NAN, np.copy]),
    (isolated, [np.copy, X, X, np.copy], [np.copy, INFINITE, INFINITE, np.copy]),
    *((refused, None, [ValueError, "x", raising, y]) for y in (TypeError("x"), ValueError("xy"))),
    (refused, [ValueError, "x", raising, ValueError("x\ny")], [ValueError, "x", id, 0]),
    *(
        (oracle.assert_nothing_beyond, [TWO, [GONE, X], GATES], [TWO, [h], GATES | gates])
        for h, gates in ((X, {}), (GONE, dict(f=X)), (GONE, dict(q=NAN)))
    ),
    *(
        (oracle.assert_below, [dict(h=0.1, c=0.2), 0.21], [dict(h=0.1, c=x), 0.19])
        for x in (0.2, np.nan)
    ),
    (outputs, ["", (X, X), (X, X), lambda *_: 0], ["", (X, X), (X, 2 * X), lambda *_: 0.4]),
    (outputs, None, ["", (X, X), (X,), lambda *_: 0]),
    (stage_calls.assert_dtypes, [(X, X), [X, X]], [(X, X), [X, np.float64(X)]]),
    (check_small_row, [lambda x: x], [lambda x: 1.001 * x]),
    (check_small_row, None, [lambda x: x.astype("bfloat16")]),
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
