"""What conftest.py and oracle.py promise: a test that is too slow fails alone, a missing package
skips a file, draws can be repeated, and what checks results refuses wrong ones. test_products.py
has the checks of the interpreter."""

import ast
import contextlib
import functools
import inspect
import itertools
import math
import os
import subprocess
import sys
import traceback
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import arguments
import benchmark_runs
import call_checks
import conftest
import extras
import jax
import jax.numpy as jnp
import mesh_calls
import mosaic_gpu_cases
import numpy as np
import oracle
import pytest
import stage_calls
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mlstm_pallas import mlstm_recurrent_step

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


TOO_SLOW = """
import time
import pytest
@pytest.mark.timeout(0.5)
def test_too_slow():
    time.sleep(60)
def test_behind_it():
    pass
"""


@pytest.mark.slow
def test_a_test_that_is_too_slow_fails_alone(tmp_path):
    code, output = run_tests(tmp_path, test_limits=TOO_SLOW)
    assert code == 1
    assert "1 failed, 1 passed" in output
    assert "test_too_slow - Failed: Timeout" in output, output


HANGS = """
import signal, time
import conftest, pytest
conftest.UNANSWERED = 0.5
def test_in_front_of_it():
    pass
@pytest.mark.timeout(0.5)
def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_test_that_answers_no_signal_ends_its_process(tmp_path):
    code, output = run_tests(tmp_path, "-v", test_limits=HANGS)
    assert code == 1
    assert "Timeout" in output, output
    assert "in test_hangs" in output, output


NEEDS = """
import {package}
def test_needs_it():
    pass
"""


@pytest.mark.slow
def test_a_file_whose_package_is_not_installed_is_skipped(tmp_path):
    block = "import sys\nsys.modules['sybil'] = None\n"
    needs, others = (NEEDS.format(package=x) for x in ("sybil.parsers", "os"))
    code, output = run_tests(tmp_path, test_a=block + needs, test_b=others)
    assert (code, "1 passed, 1 skipped" in output) == (0, True), output
    assert "sybil is not installed" in output
    code, output = run_tests(tmp_path, test_a=NEEDS.format(package="oracles"))
    assert (code, "No module named 'oracles'" in output) == (2, True), output


@pytest.mark.parametrize(
    ("names", "arguments", "refused"),
    [
        (["xla"], ["tests"], False),
        (["xla", "gone"], ["tests"], True),
        (["xl", "interpret-2"], ["tests"], True),
        (["xla", "gone"], ["tests/test_x.py::test_x"], False),
    ],
)
def test_a_quick_mark_names_rows(names, arguments, refused):
    """Of rows xla-1 and interpret-1; other rows become slow."""

    def item(row):
        marks = [pytest.mark.quick(*names).mark]
        return SimpleNamespace(
            nodeid=row,
            function=item,
            module=oracle,
            callspec=SimpleNamespace(id=row),
            marks=marks,
            iter_markers=lambda name=None: [x for x in marks if name in (None, x.name)],
            get_closest_marker=lambda name: next((x for x in marks if x.name == name), None),
            add_marker=lambda x: marks.append(getattr(pytest.mark, x) if x == str(x) else x),
        )

    items = [item("xla-1"), item("interpret-1")]
    config = SimpleNamespace(args=arguments, getoption=lambda name, default: default)
    with pytest.raises(pytest.UsageError) if refused else contextlib.nullcontext():
        conftest.pytest_collection_modifyitems(config, items)
    slow = {x.nodeid for x in items if any(y.name == "slow" for y in x.marks)}
    assert slow == {"interpret-1"}


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
    assert seeds("padded", 4) == seeds("padded", 4) == seeds("padded", 5)[:4]
    assert len({*seeds("padded", 3), *seeds("fused", 3)}) == 6
    with pytest.raises(AssertionError) as caught:
        seeds("padded", 5, failing=3)
    third = seeds("padded", 3)[-1]
    assert caught.value.__notes__ == [f"the seed is {third}; MLSTM_PALLAS_SEED=7 draws it again"]
    seven = seeds("padded", 4)
    monkeypatch.setattr(oracle, "SEED", 8)
    assert not {*seven} & {*seeds("padded", 4)}


# ---------------- what checks results

X, GONE = np.float32([[[1.0, 2.0, 3.0]]]), np.float32([[[1.0, 2.0, 0.0]]])
INFINITE, NAN = np.float32([[[1.0, 2.0, np.inf]]]), np.float32([[[1.0, 2.0, np.nan]]])
TWO, GATES = np.array([2]), dict.fromkeys("qkvif", GONE)  # beyond 2 steps GONE is 0
SHORT, COUNT = dict(lengths=np.array([0, 4])), itertools.count()
INPUTS = oracle.random_inputs(0, 1, 1, 3, 2, 2)
EXACT, EXPECTED = oracle.oracle(INPUTS), {}
TOKEN = [np.zeros((1, 1, *shape), "float32") for shape in ((16,), (16,), (16,), (), ())]
SIZES, INTERPRET = (1, 1, 32, 16, 16, 16), stage_calls.Lowering.INTERPRET


def raising(error):
    raise error


def times(factor):
    return lambda x: factor * x


def beside_others(x):
    return x + np.sum(x)


def changed(index, function):
    """A change of an output, by its number, or of a gradient, by its name."""

    def change(outputs, gradients, _):
        results = outputs if isinstance(index, int) else gradients
        results[index] = function(results[index])

    return change


def without_states(outputs, *_):
    del outputs[1:]


def another_each_time(outputs, _, count):
    outputs[0] *= 1 + count * 2.0**-22


def check_call(change=lambda *_: None, **options):
    """That of call_checks, of a call that returns what float64 says after a change."""
    key, calls = (options.get("dtype"), "lengths" in options), itertools.count()

    def expected_of(*args, **more):
        if key not in EXPECTED:
            EXPECTED[key] = oracle.expected_of(*args, **more)
        return EXPECTED[key]

    def call(inputs, *_, **__):
        outputs, gradients = EXPECTED[key]
        outputs = [y.astype("float32") for y in outputs]
        outputs[0] = outputs[0].astype(inputs["q"].dtype)
        gradients = {name: y.astype(inputs[name].dtype) for name, y in gradients.items()}
        change(outputs, gradients, next(calls))
        return outputs, gradients

    of_call = dict(expected_of=expected_of, gradients_of_call=lambda **_: call)
    with mock.patch.multiple(call_checks, **of_call):
        call_checks.check_call((2, 1, 5, 2, 3), **options)


def check_middle_head(run):
    call_checks.check_middle_head(lambda x: run(np.asarray(x)), jnp.ones((1, 3, 2)))


def check_neighbours(run):
    """That of call_checks, of a function of q."""
    of_call = mock.Mock(return_value=lambda x, _: run(np.asarray(x["q"])))
    with mock.patch.object(call_checks, "gradients_of_call", of_call):
        call_checks.check_neighbours("xla", (1, 3, 2, 4, 4), dtype="float32")


def check_small_row(change):
    """That of stage_calls, of a kernel that returns something else after a change."""
    run = stage_calls.run_stage

    def run_stage(name, call, **x):
        result = run(name, call, **x)
        return change(result) if call.lowering is INTERPRET else result

    with mock.patch.object(stage_calls, "run_stage", run_stage):
        stage_calls.check_small_row("step_sums", SIZES, {}, INTERPRET)


def check_case(result=None, on_mosaic_gpu=mosaic_gpu_cases.ALL, **plan):
    """That of mosaic_gpu_cases, of a call with this plan."""
    stages = mosaic_gpu_cases.ALL - {"parallel_bw_dP", "parallel_bw_dQKV"}
    of_call = dict(chunk_size=128, fused=True, num_splits=1, launches=[*map(Launch, stages)]) | plan
    of_case = dict(
        planned=mock.Mock(return_value=(SimpleNamespace(**of_call), on_mosaic_gpu)),
        check_call=mock.Mock(side_effect=result),
    )
    with mock.patch.multiple(mosaic_gpu_cases, **of_case):
        mosaic_gpu_cases.check_case("one_block_of_rows_stored_float16", "mosaic_gpu")


def launch_of(dtype, lowering=stage_calls.Lowering.MOSAIC_GPU):
    p = stage_calls.Problem(1, 1, 256, 64, 64, 64, 1.0)
    return stage_calls.launch_of("recurrent_fw_C", p, dtype, lowering)


def timed(synchronise):
    with pytest.MonkeyPatch.context() as patch:
        benchmark_runs.timed(patch)
        benchmark_runs.runner.time_in_turns([lambda: X], synchronise, 1)


def not_to_be_timed(run):
    with pytest.MonkeyPatch.context() as patch:
        benchmark_runs.not_to_be_timed(patch)
        run(benchmark_runs.runner)


def error_of(lines, returned=2):
    def call():
        print(*lines, sep="\n", file=sys.stderr)
        return returned

    benchmark_runs.error_of(call)


def assert_row(seconds):
    benchmark_runs.assert_row(dict(seconds=seconds, more=1), seconds=0.1)


def on_mesh(spec, exchanged=()):
    mesh = oracle.mesh_of((2,))
    run = jax.jit(times(2), out_shardings=NamedSharding(mesh, P("x")))
    mesh_calls.on_mesh(run, [X[0, 0, :2]], [P("x")], mesh, [spec], exchanged)


def check_arguments(function):
    arguments.check_arguments(function, dict(eps=1e-6))


def a_step(eps):
    mlstm_recurrent_step(*TOKEN, eps=eps, backend="xla")


Launch = namedtuple("Launch", "stage")


def row(function, right, wrong, **options):
    """A function, arguments that it accepts, arguments that it refuses, and options of both.

    right: None where a former row has them.
    """
    return functools.partial(function, **options), right, wrong


close, same, isolated = oracle.assert_close, oracle.assert_same_bits, oracle.check_isolated
below, nothing = oracle.assert_below, oracle.assert_nothing_beyond
dtypes, outputs = stage_calls.assert_dtypes, stage_calls.compare_outputs
ROWS = [
    row(oracle.run_python, ["-c", ""], ["-c", "raise SystemExit(3)"]),
    row(oracle.run_python, None, ["-c", "import time; time.sleep(60)"], timeout=0.05),
    row(oracle.error, [X, X], [X, X[0]]),
    row(close, [1.01 * X, X, 0.0101], [1.01 * X, X, 0.0099]),
    row(close, [X, 0 * X, 3.75], [X, 0 * X, 3.74]),  # a norm where nothing is expected
    # Only one of both is finite, or both are not, in two ways.
    row(close, [INFINITE, INFINITE, 0], [-INFINITE, INFINITE, 9]),
    *(row(close, None, [x, y, 9]) for x, y in itertools.permutations((X, INFINITE, NAN), 2)),
    row(oracle.compare, ["hc", (X, X), (X, X), 0], ["hc", (X, X), (X, 2 * X), 0.4]),
    row(oracle.compare, None, ["h", (X, X), (X, X), 0]),
    row(oracle.compare, None, ["h", (X,), (), 0]),
    row(oracle.check_outputs, [EXACT, INPUTS, 0], [[1.01 * EXACT[0], *EXACT[1:]], INPUTS, 0.009]),
    row(oracle.assert_values, [[1.2349], [1.23], 2], [[1.2351], [1.23], 2]),
    row(oracle.assert_values, [[X], [X]], [[1.00001 * X], [X]]),
    row(oracle.assert_values, None, [[X, X], [X]]),
    row(same, [[X, INFINITE], (X, INFINITE)], [[X, INFINITE], (X, X)]),
    *(
        row(same, None, [[X, INFINITE], y])
        for y in ([X, NAN], [X], [X[:, :, :2], INFINITE], [np.nextafter(X, 9), INFINITE])
    ),
    row(oracle.check_draws, [id, "x", 2], [lambda _: raising(AssertionError()), "x", 2]),
    row(isolated, [np.copy, X, NAN, lambda x: x[0, 0, :2]], [np.copy, X, NAN, np.copy]),
    row(isolated, [np.copy, X, X, np.copy], [np.copy, INFINITE, INFINITE, np.copy]),
    *(
        row(oracle.refused, [ValueError, "x", raising, ValueError("x\ny")], [ValueError, "x", *y])
        for y in ([id, 0], [raising, TypeError("x")], [raising, ValueError("xy")])
    ),
    row(nothing, [TWO, [GONE, X], GATES], [TWO, [X, X], GATES]),
    *(row(nothing, None, [TWO, [GONE], GATES | {name: y}]) for name in "qkvif" for y in (X, NAN)),
    row(below, [dict(h=0.1, c=0.2), 0.21], [dict(h=0.1, c=0.2), 0.19]),
    row(below, [dict(h=0.2, c=0.1), 0.21], [dict(h=0.2, c=0.1), 0.19]),
    row(below, [dict(h=0.2, c=0.1), 0.21], [dict(h=0.2, c=np.nan), 0.21]),
    row(check_call, [], [without_states]),
    row(check_call, [without_states], [], return_last_states=False),
    *(row(check_call, None, [changed(x, times(1.001))]) for x in (0, 1, 2, 3, *oracle.NAMES)),
    *(
        row(check_call, [], [changed(x, times(1.1))], dtype=dtype)
        for dtype in ("bfloat16", "float16")
        for x in (0, "q")
    ),
    # A gradient that is rounding alone is finite. What is beyond a length is 0, exactly, and an
    # entry without steps keeps the bits of its states.
    row(check_call, [changed("i", times(9))], [changed("i", times(np.nan))], skip="i"),
    row(check_call, [], [changed(0, lambda x: x + 1e-9)], **SHORT),
    row(check_call, None, [changed(1, times(1 + 2.0**-22))], **SHORT),
    row(check_call, [], [another_each_time], repeated=True),
    *(
        row(check_call, [], [changed(x, lambda x: x.astype("bfloat16"))], bounds=(1.0, 1.0))
        for x in (0, "i")
    ),
    row(check_middle_head, [times(2)], [beside_others]),
    *(row(check_middle_head, None, [lambda x, n=n: x + x[:, n : n + 1]]) for n in (0, 2)),
    row(check_middle_head, None, [lambda x: np.where([[[0], [1], [1]]], x, np.inf)]),
    row(check_middle_head, None, [lambda x: x + next(COUNT) // 2]),
    row(check_neighbours, [times(2)], [beside_others]),
    row(launch_of, ["bfloat16"], ["float32"]),
    row(dtypes, [(X, X), [X, X]], [(X, X), [X, np.float64(X)]]),
    row(dtypes, None, [(X, X), [X]]),
    row(outputs, ["", (X, X), (X, X), lambda *_: 0], ["", (X, X), (X, 2 * X), lambda *_: 0.4]),
    row(outputs, None, ["", (X, X), (X,), lambda *_: 0]),
    row(check_small_row, [times(1)], [times(1.001)]),
    row(check_small_row, None, [lambda x: x.astype("bfloat16")]),
    row(check_case, [], [AssertionError()]),
    row(check_case, None, [None, {"chunk_gates"}]),
    row(check_case, None, [], chunk_size=64),
    row(check_case, None, [], fused=False),
    row(check_case, None, [], num_splits=2),
    row(on_mesh, [P("x")], [P()]),
    row(on_mesh, None, [P("x"), {"all-reduce": 1}]),
    row(timed, [lambda x: jax.block_until_ready(x)], [id]),
    row(error_of, [["a"]], [["a"], 1]),  # another exit code
    row(error_of, None, [["a", "b"]]),
    row(assert_row, [0.1 + 1e-16], [0.1 + 1e-12]),
    row(not_to_be_timed, [id], [lambda runner: runner.time_in_turns([], id, 1)]),
    row(check_arguments, [a_step], [lambda eps: None]),
    row(check_arguments, None, [lambda eps: raising(ValueError("eps is wrong"))]),
    row(check_arguments, None, [lambda eps: raising(TypeError("eps is wrong"))]),
]


def groups():
    """Rows by function; those in float16 have it in their name."""
    result = {}
    for function, *both in ROWS:
        name = function.func.__name__
        of_half = function.keywords.get("dtype") == "float16"
        result.setdefault(f"{name} float16" if of_half else name, []).append((function, *both))
    return result


GROUPS = groups()
# Functions that those of rows call.
INSIDE = {"check_small_row": ["check_drawn", "check_stage"], "on_mesh": ["compiled_for"]}
REFUSALS = AssertionError, TypeError, ValueError, pytest.fail.Exception
MODULES = arguments, benchmark_runs, call_checks, mesh_calls, mosaic_gpu_cases, oracle, stage_calls


def is_check(node):
    """Whether a statement may fail a test: an assertion, or a call of what does."""
    called = getattr(node, "func", None)
    name = getattr(called, "attr", getattr(called, "id", None))
    named = str(name).startswith(("assert_", "check_", "compare", "refused"))
    return isinstance(node, ast.Assert) or named or name in ("fail", "raises")


@functools.cache
def checks():
    """{function of the equipment: the lines of each check in it}."""
    result = {}
    for module in MODULES:
        for function in ast.parse(inspect.getsource(module)).body:
            found = [x for x in ast.walk(function) if is_check(x)]
            if found and isinstance(function, ast.FunctionDef):
                lines = [range(x.lineno, x.end_lineno + 1) for x in found]
                result[function.name] = module.__file__, lines
    return result


@pytest.mark.filterwarnings("ignore:backend is 'mosaic_gpu' and products are in float32")
@pytest.mark.parametrize("name", GROUPS)
def test_a_check_accepts_what_is_right_and_refuses_what_is_wrong(name):
    """Each check of the function refuses one of its rows."""
    failed = set()
    for function, right, wrong in GROUPS[name]:
        if right is not None:
            function(*right)
        with pytest.raises(REFUSALS) as caught:
            function(*wrong)
        failed |= {(x.filename, x.lineno) for x in traceback.extract_tb(caught.tb)}
    for inside in (name, *INSIDE.get(name, ())):
        file, statements = checks().get(inside, (None, ()))
        for lines in statements:
            assert failed & {(file, line) for line in lines}, (inside, lines)


def test_each_function_that_checks_has_rows():
    assert checks().keys() <= {*GROUPS}.union(*INSIDE.values())


def test_bounds_by_hand():
    bounds = {
        oracle.tolerance("bfloat16", 64): math.sqrt(4 / 3) * 2.0**-8 + 8 * 2.0**-24,
        oracle.tolerance("float16", 4): math.sqrt(4 / 3) * 2.0**-11 + 2 * 2.0**-24,
        oracle.tolerance("float32", 64): (math.sqrt(4 / 3) + 8) * 2.0**-24,
        oracle.tolerance("float64", 64): (math.sqrt(4 / 3) + 8) * 2.0**-53,
        call_checks.backward_bound("float32", 16): (math.sqrt(16 / 3) + 4 * 4) * 2.0**-24,
        call_checks.backward_bound("bfloat16", 16): math.sqrt(16 / 3) * 2.0**-8 + 16 * 2.0**-24,
        call_checks.spacing_of(X, -5 * X, INFINITE, NAN): 2.0**-20,  # of numbers from 8 to 16
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


def test_what_is_beyond_a_length_is_garbage():
    """NaN in gates, and elsewhere what no result can hide."""
    x = dict.fromkeys((*"qkvif", "m_initial"), X)
    garbage, cotangents = call_checks.with_garbage(TWO, x, [X, X])
    garbage["dh"], garbage["dc"] = cotangents
    for name, y in garbage.items():
        assert np.array_equal(y[..., :2], X[..., :2])
        last = y[0, 0, 2]
        assert np.isnan(last) if name in "if" else (last > 1e5) == (name in "qkvdh"), name
