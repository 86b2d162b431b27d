"""What all benchmarks share: clocks, checks of outputs, rows, exit codes and reports."""

import itertools
import json
import os
import sys
from types import SimpleNamespace
from unittest import mock

import benchmark_runs
import command
import jax
import jaxlib
import pytest
import reporting
import runner
import transformers_xlstm_7b
from command import RequestError
from shapes import Shape

SHAPE = Shape(1, 2, 3, 4, 5)
OPTIONS = dict(from_jsonl=[], jsonl=None, plot=None)


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


def test_the_first_call_is_built_run_and_waited_for(device):
    def build(*arguments):
        device.now += 1.0
        return lambda: device.call(4.0, arguments)

    versions = dict(torch="2")
    impl = SimpleNamespace(build=build, synchronise=device.wait, versions=lambda: versions)
    row = dict(versions=dict(jax="1"))
    call, outputs = runner.first_call(row, impl, "x", "fwd")
    assert outputs == call() == ("x", "fwd")
    assert row == dict(first_call_s=5.0, versions=dict(jax="1", torch="2"))


def test_rows_of_transformers(device, monkeypatch, capsys):
    """1 s to the first token, 9 s for 65 tokens, 4 s for 64 steps of a CUDA graph, in the median of
    the calls after the first; the clock is read when the device is done."""
    monkeypatch.setattr(transformers_xlstm_7b, "time", device)
    times = iter((9.0, 1.0, 4.0, 0.5, 1e3, 9.0, 8.0, 10.0, *[9.0] * 64, *[1 / 16] * 192))
    torch = mock.MagicMock(__version__="2", **{"cuda.synchronize": device.wait})
    torch.cuda.get_device_name.return_value = "H200"
    torch.randint.return_value.numel.return_value = 6
    torch.cuda.CUDAGraph().replay = lambda: device.call(next(times))
    transformers = mock.MagicMock(__version__="5")
    model = transformers.xLSTMForCausalLM().eval()
    model.generate = lambda *_, **__: device.call(next(times))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    assert benchmark_runs.run(transformers_xlstm_7b, "--size=tiny", "--batch=2") == 0
    rows = map(json.loads, capsys.readouterr().out.splitlines())
    figures = "first_token_ms", "ms_per_token", "tokens_per_s", "prompt_tokens", "new_tokens"
    expected = [[1e3, 125.0, 16.0, 6, 65], [1e3, 62.5, 32.0, 6, 65]]
    assert [[row[x] for x in figures] for row in rows] == expected


# ---------------- rows and reports


def test_a_row_says_what_was_measured_where(monkeypatch):
    monkeypatch.setattr(command, "git_commit", lambda: "abc")
    where = dict(jax=jax.__version__)
    row = runner.new_row(SimpleNamespace(commit=None), "name", SHAPE, "xla", stage="s")
    kind = jax.devices()[0].device_kind
    expected = dict(name="name", shape=SHAPE, impl="xla", stage="s", device=kind, commit="abc")
    expected |= dict(versions=where | dict(jaxlib=jaxlib.__version__), status="ok", note="")
    assert row == expected | dict(xla_flags=os.environ.get("XLA_FLAGS", ""))


COLUMNS = reporting.columns(
    """
name      name
S         steps   d
spread %  spread  .1%
ms        ms      .2f
note      note
""",
    steps=lambda row: row["shape"].S,
)
ROW = dict(name="a", shape=SHAPE, direction="fwd", dtype="float32", device="cpu", note="")
ROWS = [
    ROW | dict(status="ok", ms=1.0, spread=0.125),
    ROW | dict(status="skipped", name="long", note="skipped: x"),
]
LINES = """
name  S  spread %    ms  note
a     3      12.5  1.00
long  3         -     -  skipped: x
"""


def run(rows, **options):
    reports = dict(
        report=lambda rows: print(len(rows), "rows"), plot=lambda *x: print("plot", x[1])
    )
    options = SimpleNamespace(**OPTIONS | options)
    return runner.run(lambda _: iter(rows), COLUMNS, options, **reports)


def test_after_ctrl_c_what_was_measured_is_there(tmp_path, capsys):
    def interrupted():
        yield ROWS[0]
        yield runner.attempt({}, True, mock.Mock(side_effect=KeyboardInterrupt))

    rows = tmp_path / "rows"
    assert run(interrupted(), jsonl=str(rows)) == 130
    assert len(benchmark_runs.records(rows)) == 1
    printed = capsys.readouterr()
    assert printed.out.endswith("\na     3      12.5  1.00\n1 rows\n")
    assert printed.err == "interrupted\n"


def test_rows_are_printed_stored_and_reported(tmp_path, capsys):
    rows, plot = tmp_path / "rows", str(tmp_path / "plot.png")
    rows.write_text("")
    assert run(ROWS, jsonl=str(rows)) == 0
    lines = "a: S 3, spread % 12.5, ms 1.00\nlong: S 3, skipped: x\n"
    table = f"{LINES}2 rows\n"
    assert capsys.readouterr().out == lines + table
    assert run(None, from_jsonl=[str(rows)] * 2) == 0  # measures nothing
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "4 rows"
    assert runner.Shape(*benchmark_runs.records(rows)[0]["shape"]) == SHAPE
    for status, code in (("failed", 1), ("wrong", 1), ("skipped", 0), ("ok", 0)):
        assert run([ROWS[0] | dict(status=status), ROWS[1]]) == code
    capsys.readouterr()
    assert run(ROWS, plot=plot) == 0
    assert capsys.readouterr().out.endswith(f"plot {plot}\n")
    assert run(ROWS[1:], plot=plot) == 0
    assert capsys.readouterr().out.endswith(f"nothing was measured: {plot} is not written\n")
    assert run([], plot=plot) == 0
    assert capsys.readouterr().out == ""


def test_a_row_does_not_go_on_with_a_part_of_another_one(tmp_path):
    """As a full disk leaves it."""
    rows, right = tmp_path / "rows", json.dumps(ROWS[0])
    for before in (f"{right}\n{right[:9]}", right):
        rows.write_text(before)
        assert run(ROWS[:1], jsonl=str(rows)) == 0
        assert rows.read_text() == f"{before}\n{right}\n"


def test_a_line_that_is_no_row_is_named(tmp_path):
    rows, right = tmp_path / "rows", json.dumps(ROWS[0])
    lacking = json.dumps({x: y for x, y in ROW.items() if x != "dtype"})
    reasons = {
        lacking: "it has no dtype, status",
        json.dumps(dict(name="a")): "'shape'",
        json.dumps(ROW | dict(shape=[1, 2])): "Shape.__new__() missing 3",
        "[": "Expecting value",
    }
    for line, reason in reasons.items():
        rows.write_text(f"{right}\n{line}\n")
        with pytest.raises(RequestError) as caught:
            run(None, from_jsonl=[str(rows)])
        assert f"--from_jsonl: {rows}, line 2 is no row: {reason}" in str(caught.value)
