"""python -m mlstm_pallas.selfcheck: what it calls, draws, finds, prints and survives.

Wrong functions are planted into a right package; each has to be found.
"""

import contextlib
import functools
import math
import re
import sys
import types
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import run_python, slow

import mlstm_pallas
from mlstm_pallas import distributed, selfcheck

PACKAGE = Path(mlstm_pallas.__file__).parent
SEED = 4 * 12
ANY_SIZE, CANCELS = (SEED + selfcheck.KINDS_OF_DATA.index(x) for x in ("any size", "cancels"))
SMALL = dict(backend="xla", B=2, NH=1, DHQK=8, DHV=8, dtype="float32", initial=True)
TOKENS = SMALL | dict(states=["float32"] * 3, slots=False)
LAST = dict(return_last_states=True, recompute_states_in_bw=True)
INVARIANT = dict(config=dict(batch_invariant=True))
DRAFTS = dict(T=3, length=8, phase=0, rollback=True, joined=False)
PROGRAMS = dict(
    mlstm_chunkwise=SMALL | dict(S=20, lengths=True, options=LAST),
    mlstm_chunkwise_states=SMALL | dict(S=40, segments=True, options=dict(every=16)),
    mlstm_chunkwise_sequence_parallel=SMALL | dict(S=32, options=LAST | dict(shards=2)),
    mlstm_recurrent_step=TOKENS | dict(S=3, slots=True, options=dict(joined=False)),
    mlstm_recurrent_sequence=TOKENS | dict(S=3, lengths=True, options=dict(layout="BTNH")),
    mlstm_ring_step=TOKENS | dict(S=24, slots=True, options=DRAFTS),
)


@pytest.fixture(autouse=True)
def recurrences(monkeypatch):
    """The recurrence of a program, for which nothing is planted, is compiled once; otherwise each
    program frees what was compiled before it."""
    compiled = selfcheck.compiled

    def sharing(program):
        p, actual, exact = compiled(program)
        return p, actual, EXACT.setdefault(program, exact)

    sharing.cache_clear = compiled.cache_clear
    monkeypatch.setattr(selfcheck, "compiled", sharing)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)


EXACT = {}  # recurrences by program


def program(name, **changes):
    call = PROGRAMS[name] | dict(function=name)
    return call | changes | dict(options=call["options"] | changes.get("options", {}))


MORE = [
    ("mlstm_chunkwise", dict(options=dict(reverse=True), segments=True)),
    ("mlstm_recurrent_sequence", dict(options=dict(return_all_states=True))),
    ("mlstm_ring_step", dict(options=dict(layout="BTNH", joined=True) | INVARIANT)),
]


@pytest.mark.quick("mlstm_ring_step", "mlstm_recurrent")
@pytest.mark.parametrize(
    ("name", "changes"), [*((x, {}) for x in PROGRAMS), *(slow(*x) for x in MORE)]
)
def test_right_calls_are_within_the_bounds(name, changes, monkeypatch):
    """Where n . q and dh . h cancel, where values have any size, and where not; on the backend that
    the program has."""
    backends = set()

    def recording(function, *x, **options):
        backends.add(options.get("backend"))
        return function(*x, **options)

    planted(monkeypatch, name, recording)
    for seed in (CANCELS, ANY_SIZE, SEED):
        errors = selfcheck.check(seed, **program(name, **changes))
        assert all(error <= bound for error, bound in errors.values()), errors
        assert {*"hcnm"} <= {*errors}
    assert backends == {"xla"}


def test_every_public_function_is_checked():
    assert {*PROGRAMS} == {*selfcheck.FUNCTIONS}
    public = {x for x in mlstm_pallas.__all__ if x.startswith("mlstm_")}
    assert public <= {*PROGRAMS, "mlstm_ring_states", "mlstm_ring_flush"}


def planted(monkeypatch, name, plant):
    """Plants plant(function, *arguments, **options) for a function."""
    module = distributed if "parallel" in name else mlstm_pallas
    monkeypatch.setattr(module, name, functools.partial(plant, getattr(module, name)))
    selfcheck.compiled.cache_clear()


def changed(name, change):
    """A plant that changes h or one of the states."""

    def plant(function, *x, **options):
        h, *rest = function(*x, **options)
        if name == "h":
            return change(h), *rest
        states = dict(zip("cnm", *rest, strict=True))
        return h, (*(states | {name: change(states[name])}).values(),)

    return plant


def times(factor):
    return lambda y: y * jnp.asarray(factor, y.dtype)


def other_gradients(function, q, k, v, i, f, *x, **options):
    """Gradients beyond the lengths are not 0."""
    h, states = function(q, k, v, i, f, *x, **options)
    return h + 1e-9 * (v - jax.lax.stop_gradient(v)), states


def larger_gradients(function, *x, **options):
    """By two bounds."""
    results = function(*x, **options)
    return jax.tree.map(lambda y: y + 2e-4 * (y - jax.lax.stop_gradient(y)), results)


def no_gradient_of_f(function, q, k, v, i, f, *x, **options):
    return function(q, k, v, i, jax.lax.stop_gradient(f), *x, **options)


def clipped_gates(function, q, k, v, i, f, *x, **options):
    """Right for the gates of a model."""
    return function(q, k, v, jnp.clip(i, -20, 20), f, *x, **options)


def states_without_gradients(function, *x, **options):
    h, states = function(*x, **options)
    return h, jax.lax.stop_gradient(states)


def other_slots(function, *x, slots, **options):
    return function(*x, slots=slots[::-1], **options)


def another_bit_of_a_batch(function, *x, **options):
    """Of m, which is the last one to be compared."""
    h, (c, n, m) = function(*x, **options)
    return h, (c, n, m * (1 + 2e-7 * (len(m) > 1)))


def one_draft_more(function, *x, accepted, **options):
    return function(*x, accepted=accepted + 1, **options)


def nan_of_later_drafts(function, q, k, v, i, f, states, **options):
    h, states = function(q, k, v, i, f, states, **options)
    return h + 0 * jnp.sum(v, axis=2, keepdims=True), states


def reads_every_gate(function, q, k, v, i, f, *x, **options):
    """A NaN of a gate beyond a length is in the results."""
    h, states = function(q, k, v, i, f, *x, **options)
    return h + 0 * jnp.sum(i + f), states


def flushed_wrong(function, *x, **options):
    c, n, m = function(*x, **options)
    return c * 1.01, n, m


def one_chunk_late(function, *x, **options):
    h, last, every = function(*x, **options)
    return h, last, [jnp.roll(y, 1, axis=1) for y in every]


# The program, what is planted for the function that it calls or for another one, and the result
# that shows it.
PLANTS = [
    ("mlstm_chunkwise", other_gradients, "dv"),
    ("mlstm_chunkwise", larger_gradients, "dv"),
    ("mlstm_chunkwise", changed("h", times(1 + 2e-5)), "h"),
    ("mlstm_chunkwise", no_gradient_of_f, "df"),
    ("mlstm_chunkwise", states_without_gradients, "dv"),
    ("mlstm_chunkwise", clipped_gates, "h"),
    ("mlstm_chunkwise", changed("m", lambda y: y + 1e-2), "m"),
    ("mlstm_chunkwise_states", one_chunk_late, "c"),
    ("mlstm_chunkwise_sequence_parallel", changed("h", times(1.001)), "h"),
    ("mlstm_recurrent_step", other_slots, "h"),
    ("mlstm_recurrent_step", another_bit_of_a_batch, "bits in a batch"),
    ("mlstm_recurrent_sequence", changed("n", times(1.001)), "n"),
    ("mlstm_recurrent_sequence", reads_every_gate, "h"),
    ("mlstm_ring_step", one_draft_more, "h"),
    ("mlstm_ring_step", nan_of_later_drafts, "h"),
    ("mlstm_ring_step", flushed_wrong, "c"),
]


@pytest.mark.quick("mlstm_chunkwise_states", "mlstm_recurrent_sequence", "mlstm_ring_step-one")
@pytest.mark.parametrize(
    ("name", "plant", "result"), PLANTS, ids=lambda x: getattr(x, "__name__", x)
)
def test_a_wrong_function_is_found(name, plant, result, monkeypatch):
    planted(monkeypatch, "mlstm_ring_flush" if plant is flushed_wrong else name, plant)
    seeds = range(SEED, SEED + (7 if plant in (clipped_gates, nan_of_later_drafts) else 3))
    changes = dict(options=INVARIANT) if plant is another_bit_of_a_batch else {}
    errors = [selfcheck.check(seed, **program(name, **changes))[result] for seed in seeds]
    # What is not 0 beyond a length is wrong whatever its size.
    assert max(x / y for x, y in errors) > (1e300 if plant is other_gradients else 1)


@pytest.mark.slow
def test_a_wrong_forward_pass_without_derivatives_is_found(monkeypatch):
    call = SMALL | dict(function="mlstm_chunkwise", S=20, options=dict(return_last_states=True))
    planted(monkeypatch, "mlstm_chunkwise", changed("h", times(1.001)))
    errors = selfcheck.check(SEED, **call)
    assert [*errors] == [*"hcnm", selfcheck.LOST]
    assert errors["h"][0] > errors["h"][1]


@pytest.mark.parametrize("name", "hcnm")
def test_a_head_of_which_nothing_is_left(name):
    """A rounding changes h of the first of two heads by itself, and no state. In its h all is right
    but a NaN or an infinity; the states and the other head are compared."""
    desired = [np.full((1, 2, 1, *size), 2.0) for size in ((2,), (2, 2), (2,), ())]
    call = dict(B=1, NH=2, outputs=4, tokens=False, dtype="float32", dtypes=["float32"])
    p, within = types.SimpleNamespace(**call), np.ones((1, 1, 1), bool)
    rows = [(0, 1.0, 0), (0, 2.0, name != "h"), (1, 1.001, 1)]
    for head, factor, wrong in [*rows, *((0, x, 1) for x in (np.nan, np.inf, -np.inf))]:
        actual, rounded = ([y.copy() for y in desired] for _ in range(2))
        actual["hcnm".index(name)][0, head] *= factor
        rounded[0][0, 0] = 4.0
        errors = selfcheck.compared(p, [], within, [], actual, desired, [rounded])
        assert errors[selfcheck.LOST] == (1, 2)
        assert (errors[name][0] > errors[name][1]) == wrong, (head, factor, errors)


@pytest.mark.parametrize("dtype", selfcheck.PROMISED)
def test_bounds_are_those_of_the_readme(dtype):
    text = (PACKAGE.parent / "README.md").read_text()
    promised = re.search(rf"^ *\| {dtype}[^|]* \| (\S+) \| (\S+) \|$", text, re.M).groups()
    assert (*map(float, promised),) == selfcheck.PROMISED[dtype]


def test_an_error_without_a_bound_is_the_worst():
    errors = {"h": (0.0, math.nan), "c": (2.0, 1.0), selfcheck.LOST: (9, 9)}
    assert selfcheck.worst_of(errors) == (math.inf, "h")


def test_a_run_draws_every_gate_and_kind_of_steps_of_every_function():
    """The same ones in each run; among the first calls of a lowering is one of each function."""
    calls = [selfcheck.draw(5, number, ["triton"]) for number in range(300)]
    assert selfcheck.draw(5, 7, ["triton"]) == calls[7]
    assert {call["function"] for call in calls[: selfcheck.LEAST]} == {*PROGRAMS}
    for name, (_, table, _) in selfcheck.FUNCTIONS.items():
        rows = [call for call in calls if call["function"] == name]
        for key in {"lengths", "segments", "slots"} & {*table}:
            assert {call[key] for call in rows} == {False, True}, (name, key)
        for gate in selfcheck.GATES:
            assert any(gate.items() <= call["options"].items() for call in rows), (name, gate)


def test_a_line_repeats_a_call(capsys):
    call = program("mlstm_recurrent_step") | dict(seed=SEED)
    exec(selfcheck.LINE.format(", ".join(f"{name}={x!r}" for name, x in call.items())))
    assert capsys.readouterr().out == f"{selfcheck.check(**call)}\n"


@pytest.mark.parametrize(
    ("error", "known"), [(ValueError("config.x"), True), (ValueError("q"), False), (OSError, False)]
)
def test_only_a_config_that_does_not_fit_is_not_supported(error, known, monkeypatch):
    monkeypatch.setattr(selfcheck, "check", mock.Mock(side_effect=error))
    assert [*selfcheck.answer(dict(backend="xla")).values()] == ([] if known else [(math.inf, 1)])


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("import time; time.sleep(60)", "no result in 1 s"),
        ("import os; os.abort()", "exit code -6 "),
        ("raise RuntimeError('no GPU')", "exit code 1 RuntimeError: no GPU"),
        ("print(input()); print(0)", None),
    ],
)
def test_a_process_that_ends_or_hangs(worker, message, monkeypatch):
    monkeypatch.setattr(selfcheck, "WORKER", worker)
    monkeypatch.setattr(selfcheck, "SECONDS", 1)
    process, log = selfcheck.start()
    with contextlib.suppress(BrokenPipeError), process, log:
        found = selfcheck.ask(process, log, {"h": [1, 2]})
    assert found == ({message: (math.inf, 1)} if message else {"h": [1, 2]})


RIGHT, WRONG = {"h": (0.25, 1.0), "dv": (0.01, 0.02)}, {"h": (0.25, 1.0), "dv": (1.0, 0.02)}


def lost(heads):
    return RIGHT | {selfcheck.LOST: (heads, heads)}


ENOUGH = [RIGHT | {selfcheck.LOST: (0, 5)}] * 98 + [lost(5)] * 2


def run_program(monkeypatch, capsys, answers, *flags):
    """The exit code and the output of a run of one process with these answers.

    An answer that is an exception is raised; at KeyboardInterrupt Ctrl-C is pressed.
    """
    left = [*answers]

    def ask(*_):
        result = left.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result

    def thread(target, daemon):
        return mock.Mock(start=target)

    patched = dict(ask=ask, start=lambda: (None, None), end=lambda process: 0)
    patched |= dict(HAS_TRITON=True, jax_has_mosaic_gpu=lambda: False)
    monkeypatch.setattr(selfcheck.threading, "Thread", thread)
    monkeypatch.setattr(selfcheck.Run, "passed", lambda self: 0 if left else 1)
    monkeypatch.setattr(sys, "argv", ["", "--processes=1", *flags])
    with mock.patch.multiple(selfcheck, **patched):
        return selfcheck.main(), capsys.readouterr().out


NO_CALLS = "not checked: under 12 calls, no " + ", no ".join(selfcheck.FUNCTIONS)
# The answers, the exit code and how rows of the table end; with --seed=1 two lowerings are checked.
ENDS = [
    ([*ENOUGH, {}], 0, "| xla | 100 | 0 | 1 | 10 | 0.50 | dv | right |"),
    ([*ENOUGH, WRONG], 1, "| 101 | 1 | 0 | 10 | 50.00 | dv | wrong |"),
    ([*ENOUGH, RuntimeError("pipe")], 1, "| inf | RuntimeError('pipe') | wrong |"),
    ([WRONG, RIGHT, KeyboardInterrupt()], 1, "| xla | 2 | 1 | 0 | 0 | 50.00 | dv | wrong |"),
    ([], 2, f"| {NO_CALLS} |"),
    ([RIGHT] * 20, 2, "| 20 | 0 | 0 | 0 | 0.50 | dv | not checked: no mlstm_recurrent_step |"),
    ([RIGHT, {}, {}, {}] * 6, 2, "| 6 | 0 | 18 | 0 | 0.50 | dv | not checked: under 12 calls |"),
    ([*ENOUGH, lost(45)], 2, "| 55 | 0.50 | dv | not checked: too many heads lost |"),
    ([*ENOUGH, lost(44)], 0, "| 54 | 0.50 | dv | right |"),
    ([WRONG] * 4, 1, "| dv | wrong |", f"| interpret | 0 | 0 | 0 | 0 | 0.00 | - | {NO_CALLS} |"),
    ([RIGHT] * 4, 2, f"| interpret | 0 | 0 | 0 | 0 | 0.00 | - | {NO_CALLS} |"),
]


@pytest.mark.parametrize(("answers", "code", "rows"), [(x, y, z) for x, y, *z in ENDS])
def test_exit_codes(answers, code, rows, monkeypatch, capsys):
    flag = "--seed=1" if any("interpret" in row for row in rows) else "--backend=xla"
    found, out = run_program(monkeypatch, capsys, answers, flag)
    assert all(f"{row}\n" in out for row in rows)
    assert found == code
    if WRONG in answers:
        assert "print(check(B=" in out
        assert "\n# dv: error 1.0e+00, bound 2.0e-02\n" in out


@pytest.mark.parametrize(
    "flag",
    ["--minutes=0", "--minutes=nan", "--minutes=inf", "--processes=0", "--backend=tpu"],
)
def test_settings_that_check_nothing(flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", flag])
    with pytest.raises(SystemExit, match="2"):
        selfcheck.main()
    assert f"error: argument {flag.partition('=')[0]}: " in capsys.readouterr().err


# The program with a clock that each call moves on by five seconds: in two minutes two processes
# make four draws of each function's call, however busy the machine is.
PROGRAM = """
import io, runpy, sys, time

class Clock(io.TextIOBase):
    seconds = 0

    def write(self, text):
        self.seconds += 5 * text.endswith(" calls")

    def reconfigure(self, errors):
        pass

sys.stderr = clock = Clock()
time.monotonic = lambda: clock.seconds
runpy.run_module("mlstm_pallas.selfcheck", run_name="__main__")
"""


@pytest.mark.slow  # processes
def test_the_program():
    flags = "--minutes=2", "--backend=xla", "--processes=2"
    out = run_python("-c", PROGRAM, *flags, PYTHONPATH=str(PACKAGE.parent))
    calls = re.search(r"\| xla \| (\d+) \| 0 \| 0 \| 0 \| 0\.\d+ \| \w+ \| right \|\n", out)
    assert calls
    assert int(calls[1]) >= 4 * len(PROGRAMS)
