"""What all benchmarks share: clocks, checks of outputs, rows, exit codes and reports."""

import itertools
import json
from types import SimpleNamespace
from unittest import mock

import benchmark_runs
import pytest
import reporting
import runner
from shapes import Shape


@pytest.fixture
def device(monkeypatch):
    return benchmark_runs.Device(monkeypatch, runner)


# ---------------- clocks


def test_times_are_per_call_of_batches_that_end_when_the_device_is_done(device):
    """The first two calls of each function are slow, and every round is slower than the last."""
    counts, order = {"a": 4, "b": 100, "c": 1}, []
    seconds = {"a": 0.0125, "b": 1e-5, "c": 0.2}

    def call(name):
        number = order.count(name)
        order.append(name)
        rounds = max(number - 3, 0) // counts[name] + 1
        return device.call(9.0 if number < 2 else rounds * seconds[name], name)

    calls = [lambda name=name: call(name) for name in counts]
    waited = []
    times = runner.time_in_turns(calls, lambda x: device.wait(waited.append(x)), 3)
    assert {*waited} == {*seconds}
    assert times == [pytest.approx([x, 2 * x, 3 * x]) for x in seconds.values()]
    batches = [(name, len([*calls])) for name, calls in itertools.groupby(order)]
    first = [(name, 3) for name in counts]
    assert batches == [*first, *counts.items()] + 2 * [*counts.items()]


# ---------------- rows and exit codes


ROW = dict(name="a", shape=Shape(1, 2, 3, 4, 5), direction="fwd", dtype="float32", device="cpu")
ROW |= dict(status="ok", note="", ms=1.0)


def run(rows, jsonl=None, from_jsonl=()):
    options = SimpleNamespace(jsonl=jsonl and str(jsonl), from_jsonl=[*from_jsonl], plot=None)
    columns = reporting.columns("name  name\nms  ms  .2f")
    return runner.run(lambda _: iter(rows), columns, options)


def test_after_ctrl_c_what_was_measured_is_there(tmp_path, capsys):
    def interrupted():
        yield ROW
        yield runner.attempt({}, True, mock.Mock(side_effect=KeyboardInterrupt))

    rows = tmp_path / "rows"
    assert run(interrupted(), rows) == 130
    assert len(benchmark_runs.records(rows)) == 1
    assert capsys.readouterr().out.endswith("\na     1.00\n")


def test_rows_are_stored_at_once_and_read_again(tmp_path, capsys):
    rows = tmp_path / "rows"

    def measured():
        yield ROW
        assert len(benchmark_runs.records(rows)) == 1
        yield ROW

    assert run(measured(), rows) == 0
    capsys.readouterr()
    assert run(None, from_jsonl=[str(rows)] * 2) == 0  # measures nothing
    assert capsys.readouterr().out.count("\na     1.00") == 4


@pytest.mark.parametrize(
    ("status", "code"), [("failed", 1), ("wrong", 1), ("skipped", 0), ("ok", 0)]
)
def test_the_exit_code_is_that_of_the_worst_row(status, code):
    assert run([ROW | dict(status=status), ROW]) == code


def test_a_row_does_not_go_on_with_a_part_of_another_one(tmp_path):
    """As a full disk leaves it."""
    rows, right = tmp_path / "rows", json.dumps(ROW)
    for before in (f"{right}\n{right[:9]}", right):
        rows.write_text(before)
        assert run([ROW], rows) == 0
        assert rows.read_text() == f"{before}\n{right}\n"
