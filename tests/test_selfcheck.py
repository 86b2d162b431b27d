"""python -m mlstm_pallas.selfcheck: what it draws, finds, prints and survives."""

import hashlib
import json
import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from oracle import run_python, slow

import mlstm_pallas
from mlstm_pallas import selfcheck

PACKAGE = Path(mlstm_pallas.__file__).parent
SMALL = dict(backend="xla", B=3, S=24, DHQK=8, DHV=16, lengths=True, kind={})
CALL = selfcheck.draw(0, 0, ["mosaic_gpu"]) | SMALL


def errors_in_bounds(capsys, call):
    """The errors of a call by name, in units of their bounds."""
    selfcheck.check(**call)
    errors = json.loads(capsys.readouterr().out)
    return {name: error / bound for name, (error, bound) in errors.items()}


STATES = dict(return_last_states=True)
PROMPTS = CALL | dict(kind=dict(num_segments=3) | STATES, layout="BTNH")
REVERSE = CALL | dict(kind=dict(reverse=True) | STATES, segments=True, masked=True)
TOKENS = CALL | dict(tokens=True, segments=True)


@pytest.mark.parametrize("call", [PROMPTS, *map(slow, [REVERSE, TOKENS])])
def test_a_right_call_is_within_the_bounds(call, capsys):
    errors = errors_in_bounds(capsys, call)
    assert len(errors) in (4, 12)
    assert 0.01 < max(errors.values()) <= 1  # of bfloat16


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("dv", lambda h, v: jax.lax.stop_gradient(h)),
        ("h", lambda h, v: h + 1e-9),
        ("h", lambda h, v: h * math.nan),
    ],
    ids=["no_gradient", "beyond_lengths", "nan"],
)
def test_a_wrong_result_is_beyond_its_bound(name, wrong, capsys, monkeypatch):
    right = mlstm_pallas.mlstm_chunkwise
    plant = lambda q, k, v, *x, **options: wrong(right(q, k, v, *x, **options), v)  # noqa: E731
    monkeypatch.setattr(mlstm_pallas, "mlstm_chunkwise", plant)
    assert errors_in_bounds(capsys, CALL | dict(dtype="float32"))[name] > 1


def test_a_line_repeats_a_call_that_does_not_depend_on_the_run(monkeypatch):
    monkeypatch.setattr(selfcheck, "LINE", "import json; print(json.dumps(dict({})))")
    for number in (3, 40, 41, 42):
        call = selfcheck.draw(5, number, ["mosaic_gpu", "triton"])
        assert selfcheck.run(call)[1] == call


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import time; time.sleep(60)", "no result in 1 s"),
        ("import os; os.abort()", "exit code -6"),
        ("raise RuntimeError('a kernel failed')", "RuntimeError: a kernel failed"),
        ("raise ValueError('config.x does not fit')", None),
    ],
)
def test_what_ends_without_a_result(program, message, monkeypatch):
    monkeypatch.setattr(selfcheck, "LINE", program + " # {}")
    monkeypatch.setattr(selfcheck, "SECONDS", 1)
    assert [*selfcheck.run(CALL)[1]] == [message] * (message is not None)


def run_program(monkeypatch, capsys, *results):
    """The exit code and the output of a run of one process whose calls have these results.

    At the last one, None, Ctrl-C is pressed.
    """
    left = [*results]

    class Worker(threading.Thread):
        def join(self):
            super().join()
            if results[-1] is None:
                raise KeyboardInterrupt

    clock = SimpleNamespace(monotonic=lambda: 0.0 if left and left[0] is not None else 1e9)
    patched = dict(run=lambda call: ("check(...)", left.pop(0)), time=clock)
    for name, value in patched.items():
        monkeypatch.setattr(selfcheck, name, value)
    monkeypatch.setattr(threading, "Thread", Worker)
    monkeypatch.setattr(sys, "argv", ["", "--processes=1", "--backend=xla"])
    return selfcheck.main(), capsys.readouterr().out


RIGHT, WRONG = {"h": (0.25, 1.0), "dv": (0.01, 0.02)}, {"h": (0.25, 1.0), "dv": (1.0, 0.02)}


def test_the_program_ends_with_a_table(monkeypatch, capsys):
    code, out = run_program(monkeypatch, capsys, RIGHT, {}, RIGHT)
    assert code == 0
    assert out.endswith("| xla | 3 | 0 | 0.50 | dv |\n")
    digest = hashlib.sha256()
    for name in sorted(str(x.relative_to(PACKAGE)) for x in PACKAGE.rglob("*.py")):
        digest.update(name.encode() + b"\0" + (PACKAGE / name).read_bytes() + b"\0")
    assert f"files {digest.hexdigest()[:12]}, seed 0" in out


def test_failures_are_printed_after_ctrl_c_too(monkeypatch, capsys):
    code, out = run_program(monkeypatch, capsys, WRONG, RIGHT, None)
    assert code == 1
    assert "check(...)\n# dv: error 1.0e+00, bound 0.02\n" in out
    assert out.endswith("| xla | 2 | 1 | 50.00 | dv |\n")


def test_the_program():
    flags = "--minutes=0.001", "--seed=186", "--backend=xla", "--processes=1"
    out = run_python("-m", "mlstm_pallas.selfcheck", *flags, PYTHONPATH=str(PACKAGE.parent))
    assert "\n| xla | 1 | 0 | 0." in out
