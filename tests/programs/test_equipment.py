"""What conftest.py, oracle.py and stage_calls.py promise: a test that hangs ends, a missing package
skips a file, a quick mark names rows, draws can be repeated, and a check refuses what is wrong.
test_products.py has the checks of the interpreter, test_engine.py those of the engine."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import conftest
import extras
import numpy as np
import oracle
import pytest
import stage_calls

ROOT = Path(__file__).parents[2]


def run_tests(folder, *arguments, **files):
    """Exit code and output of a pytest process with the conftest.py of the project."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    options = "-q", "-n", "0", "-rsfp", "-p", "no:cacheprovider", "-p", "conftest"
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    done = subprocess.run(
        [*command, "-c", ROOT / "pyproject.toml", f"--confcutdir={folder}", folder],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("jaxlib", "plugins", "gpus", "flags"),
    [
        ("0.10.2", False, 0, conftest.QUICK_CODE),
        ("0.10.2", True, 2, ""),
        ("0.11.2", True, 2, ""),
        ("0.12.0.1", True, 2, extras.NO_ONE_SHOT),
        ("0.12.0.1", True, 1, ""),
        ("0.12.0.1", False, 2, ""),
        ("0.13.0", True, 2, ""),
    ],
)
def test_xla_gets_flags_that_it_knows(jaxlib, plugins, gpus, flags):
    added = extras.flags_of_gpus(jaxlib, plugins, gpus)
    assert [*added, *conftest.quick_flags(jaxlib, plugins)] == flags.split()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"XLA_FLAGS": "--a=1 --b=2  "}),
        ({"XLA_FLAGS": "--c"}, {"XLA_FLAGS": "--a=1 --b=2 --c"}),
        ({"XLA_FLAGS": "--a=3"}, {"XLA_FLAGS": "--b=2 --a=3"}),
        ({"XLA_FLAGS": "--b --a"}, {"XLA_FLAGS": "--b --a"}),
        ({"XLA_FLAGS": ""}, {"XLA_FLAGS": ""}),
    ],
)
def test_flags_of_the_user_stay(before, after):
    extras.add_flags(before, ["--a=1", "--b=2"])
    assert before == after


HANGS = """
import signal, time
import conftest, pytest
conftest.UNANSWERED = 0.5
@pytest.mark.timeout(0.5)
def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(60)
"""
NEEDS = """
import {0}
def test_needs_it():
    pass
"""
ROWS_OF_A_TEST = """
import pytest
@pytest.mark.quick({0})
@pytest.mark.parametrize("x", ["xla-1", "interpret-1"])
def test_x(x):
    pass
"""
PROJECTS = {
    "hangs": (HANGS, 1, "in test_hangs"),
    "not installed": (
        "import sys\nsys.modules['sybil'] = None" + NEEDS.format("sybil.parsers"),
        5,
        "sybil is not installed",
    ),
    "not there": (NEEDS.format("oracles"), 2, "No module named 'oracles'"),
    "quick": (ROWS_OF_A_TEST.format("'xla'"), 0, "1 passed, 1 deselected"),
    "quick without a row": (ROWS_OF_A_TEST.format("'xla', 'gone'"), 4, "test_x: {'gone'}"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "code", "said"), PROJECTS.values(), ids=PROJECTS)
def test_a_project_with_this_conftest(text, code, said, tmp_path):
    found, output = run_tests(tmp_path, "-m", "not slow", test_a=text)
    assert (found, said in output) == (code, True), output


def seeds(name, count, failing=None):
    drawn = []

    def check(seed):
        drawn.append(seed)
        assert len(drawn) != failing

    oracle.check_draws(check, name, count)
    return drawn


def test_draws_are_repeated_by_the_seed_that_a_failure_names(monkeypatch):
    assert int(os.environ["MLSTM_PALLAS_SEED"]) == oracle.SEED  # so that other processes have it
    monkeypatch.setattr(oracle, "SEED", 7)
    assert seeds("padded", 4) == seeds("padded", 5)[:4]
    assert len({*seeds("padded", 3), *seeds("fused", 3)}) == 6
    with pytest.raises(AssertionError) as caught:
        seeds("padded", 5, failing=3)
    third = seeds("padded", 3)[-1]
    assert caught.value.__notes__ == [f"the seed is {third}; MLSTM_PALLAS_SEED=7 draws it again"]
    monkeypatch.setattr(oracle, "SEED", 8)
    assert third not in seeds("padded", 3)


# ---------------- what checks results

X, GONE = np.float32([[[1.0, 2.0, 3.0]]]), np.float32([[[1.0, 2.0, 0.0]]])
INFINITE, NAN = np.float32([[[1.0, 2.0, np.inf]]]), np.float32([[[1.0, 2.0, np.nan]]])
TWO, GATES = np.array([2]), dict.fromkeys("qkvif", GONE)  # beyond 2 steps GONE is 0
INPUTS = oracle.random_inputs(0, 1, 1, 3, 2, 2)
EXACT = oracle.oracle(INPUTS)
SIZES, INTERPRET = (1, 1, 32, 16, 16, 16), stage_calls.Lowering.INTERPRET


def raising(error):
    raise error


def times(factor):
    return lambda x: factor * x


def check_small_row(change):
    """That of stage_calls, of a kernel that returns something else after a change."""
    run = stage_calls.run_stage

    def run_stage(name, call, **x):
        result = run(name, call, **x)
        return change(result) if call.lowering is INTERPRET else result

    with mock.patch.object(stage_calls, "run_stage", run_stage):
        stage_calls.check_small_row("step_sums", SIZES, {}, INTERPRET)


def launch_of(dtype, lowering=stage_calls.Lowering.MOSAIC_GPU):
    p = stage_calls.Problem(1, 1, 256, 64, 64, 64, 1.0)
    return stage_calls.launch_of("recurrent_fw_C", p, dtype, lowering)


close, same, isolated = oracle.assert_close, oracle.assert_same_bits, oracle.check_isolated
below, nothing = oracle.assert_below, oracle.assert_nothing_beyond
dtypes, outputs = stage_calls.assert_dtypes, stage_calls.compare_outputs
# A function, arguments that it accepts, unless a former row has them, and what it refuses.
ROWS = [
    (oracle.error, [X, X], [X, X[0]]),
    (close, [1.01 * X, X, 0.0101], [1.01 * X, X, 0.0099]),
    (close, [X, 0 * X, 3.75], [X, 0 * X, 3.74]),  # a norm where nothing is expected
    # Only one of both is finite, or both are not, in two ways.
    (close, [INFINITE, INFINITE, 0], [-INFINITE, INFINITE, 9]),
    *((close, None, [x, y, 9]) for x, y in itertools.permutations((X, INFINITE, NAN), 2)),
    (oracle.compare, ["hc", (X, X), (X, X), 0], ["hc", (X, X), (X, 2 * X), 0.4]),
    (oracle.compare, None, ["h", (X, X), (X, X), 0]),
    (oracle.compare, None, ["h", (X,), (), 0]),
    (oracle.check_outputs, [EXACT, INPUTS, 0], [[1.01 * EXACT[0], *EXACT[1:]], INPUTS, 0.009]),
    (same, [[X, INFINITE], (X, INFINITE)], [[X, INFINITE], (X, X)]),
    *(
        (same, None, [[X, INFINITE], y])
        for y in ([X, NAN], [X], [X[:, :, :2], INFINITE], [np.nextafter(X, 9), INFINITE])
    ),
    (isolated, [np.copy, X, NAN, lambda x: x[0, 0, :2]], [np.copy, X, NAN, np.copy]),
    (isolated, [np.copy, X, X, np.copy], [np.copy, INFINITE, INFINITE, np.copy]),
    *(
        (oracle.refused, [ValueError, "x", raising, ValueError("x\ny")], [ValueError, "x", *y])
        for y in ([id, 0], [raising, TypeError("x")], [raising, ValueError("xy")])
    ),
    (nothing, [TWO, [GONE, X], GATES], [TWO, [X, X], GATES]),
    *((nothing, None, [TWO, [GONE], GATES | {name: y}]) for name in "qkvif" for y in (X, NAN)),
    (below, [dict(h=0.1, c=0.2), 0.21], [dict(h=0.1, c=0.2), 0.19]),
    (below, [dict(h=0.2, c=0.1), 0.21], [dict(h=0.2, c=0.1), 0.19]),
    (below, [dict(h=0.2, c=0.1), 0.21], [dict(h=0.2, c=np.nan), 0.21]),
    (launch_of, ["bfloat16"], ["float32"]),
    (dtypes, [(X, X), [X, X]], [(X, X), [X, np.float64(X)]]),
    (dtypes, None, [(X, X), [X]]),
    (outputs, ["", (X, X), (X, X), lambda *_: 0], ["", (X, X), (X, 2 * X), lambda *_: 0.4]),
    (outputs, None, ["", (X, X), (X,), lambda *_: 0]),
    (check_small_row, [times(1)], [times(1.001)]),
    (check_small_row, None, [lambda x: x.astype("bfloat16")]),
]
REFUSALS = AssertionError, TypeError, ValueError, pytest.fail.Exception


@pytest.mark.filterwarnings("ignore:backend is 'mosaic_gpu' and products are in float32")
@pytest.mark.parametrize("name", dict.fromkeys(x.__name__ for x, *_ in ROWS))
def test_a_check_accepts_what_is_right_and_refuses_what_is_wrong(name):
    for function, right, wrong in (x for x in ROWS if x[0].__name__ == name):
        if right is not None:
            function(*right)
        with pytest.raises(REFUSALS):
            function(*wrong)


def test_bounds_by_hand():
    bounds = {
        oracle.tolerance("bfloat16", 64): math.sqrt(4 / 3) * 2.0**-8 + 8 * 2.0**-24,
        oracle.tolerance("float16", 4): math.sqrt(4 / 3) * 2.0**-11 + 2 * 2.0**-24,
        oracle.tolerance("float32", 64): (math.sqrt(4 / 3) + 8) * 2.0**-24,
        oracle.tolerance("float64", 64): (math.sqrt(4 / 3) + 8) * 2.0**-53,
    }
    assert [*bounds] == pytest.approx([*bounds.values()], rel=1e-12)


def test_the_error_of_dm_is_relative_to_its_terms():
    states = dict(c_initial=np.ones((1, 1, 1, 1)), n_initial=np.ones((1, 1, 1)))
    wanted = {name: size * x for (name, x), size in zip(states.items(), (3, -4), strict=True)}
    for dm, expected in (0.07, 0.01), (14.0, 1.0):
        desired = wanted | dict(m_initial=np.full((1, 1), dm))
        result = [X], desired | dict(m_initial=np.full((1, 1), 2 * dm))
        _, errors = oracle.errors_of(states, result, ([X], desired))
        assert errors == pytest.approx(dict(c_initial=0, n_initial=0, m_initial=expected))
