"""What all benchmarks share: clocks, checks of outputs, rows, exit codes and reports."""

import importlib
import itertools
import json
import math
import os
import re
import sys
from types import SimpleNamespace
from unittest import mock

import benchmark_runs
import command
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import peers
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


def test_a_measured_call_has_its_median_its_spread_and_its_memory(device):
    seconds = iter([9.0, 9.0, 1.0, 2.0, 7.0, 3.0, 1e3])
    impl = SimpleNamespace(synchronise=device.wait, peak_memory_bytes=lambda _: 3 * 2**19)
    row = {}
    assert runner.measure(row, impl, lambda: device.call(next(seconds)), 3) == 3.0
    assert row == dict(ms=3000.0, spread=5 / 3, peak_mib=1.5)
    timed = next(seconds)
    assert timed == 1e3  # two calls before, one to count, three batches of one call


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


def test_the_first_call_of_transformers_is_not_timed(device, monkeypatch):
    monkeypatch.setattr(transformers_xlstm_7b, "time", device)
    torch, times = mock.Mock(**{"cuda.synchronize": device.wait}), iter((9.0, 1.0, 4.0, 2.0))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert transformers_xlstm_7b.seconds(lambda: device.call(next(times))) == 2.0


def test_rows_of_transformers(monkeypatch, capsys):
    """1 s to the first token, 9 s for 65 tokens, 4 s for 64 steps of a CUDA graph."""
    torch, times = mock.MagicMock(__version__="2"), iter((1.0, 9.0, 4.0))
    torch.cuda.get_device_name.return_value = "H200"
    torch.randint.return_value.numel.return_value = 6
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "transformers", mock.MagicMock(__version__="5"))
    monkeypatch.setattr(transformers_xlstm_7b, "seconds", lambda _: next(times))
    assert benchmark_runs.run(transformers_xlstm_7b, "--size=tiny", "--batch=2") == 0
    rows = map(json.loads, capsys.readouterr().out.splitlines())
    figures = "first_token_ms", "ms_per_token", "tokens_per_s", "prompt_tokens", "new_tokens"
    expected = [[1e3, 125.0, 16.0, 6, 65], [1e3, 62.5, 32.0, 6, 65]]
    assert [[row[x] for x in figures] for row in rows] == expected


def test_peak_memory_is_beyond_the_inputs():
    sizes = dict(temp=5, output=3, argument=100, alias=1000)
    memory = SimpleNamespace(**{f"{name}_size_in_bytes": x for name, x in sizes.items()})
    impl = peers.JaxImplementation()
    impl.compiled = SimpleNamespace(memory_analysis=lambda: memory)
    assert impl.peak_memory_bytes(None) == 8
    peer, used = object.__new__(peers.TorchPeer), [7]
    cuda = dict(
        synchronize=lambda: None,
        memory_allocated=lambda: used[-1],
        reset_peak_memory_stats=lambda: used.append(7),
        max_memory_allocated=lambda: max(used[1:]),
    )
    peer.torch = SimpleNamespace(cuda=SimpleNamespace(**cuda))
    assert peer.peak_memory_bytes(lambda: used.extend([12, 9])) == 5


# ---------------- checks of outputs


def test_relative_errors():
    x = np.array([3.0, 4.0])
    assert runner.relative_error(x, x * 1.25) == pytest.approx(0.2)
    assert runner.relative_error(x * 1e-30, 0 * x) == pytest.approx(5.0)
    assert math.isnan(runner.relative_error(x * math.nan, x))


def test_what_is_beyond_its_limit_is_named():
    row, limits = {}, dict(h=0.1, dq=0.2, dk=0.5)
    runner.check(row, dict(h=0.1, dq=0.1, di=9.0), limits)  # di is not compared
    assert row == dict(errors=dict(h=0.1, dq=0.1, di=9.0), error=9.0)
    with pytest.raises(runner.WrongOutputError) as caught:
        runner.check(row, dict(h=math.nan, dq=0.25, dk=0.5), limits)
    expected = "error nan in h, at most 1e-01; error 2.5e-01 in dq, at most 2e-01"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("error", "ours", "status", "note"),
    [
        (None, True, "ok", ""),
        (runner.WrongOutputError("h"), False, "wrong", "wrong: h"),
        (runner.UnsupportedError("x\ny"), True, "skipped", "skipped: UnsupportedError: x y"),
        (TypeError("x"), True, "failed", "failed: TypeError: x"),
        (TypeError("x"), False, "skipped", "skipped: TypeError: x"),
    ],
)
def test_an_exception_becomes_a_status(error, ours, status, note):
    def measure(row, seconds):
        row["ms"] = seconds
        if error:
            raise error

    row = runner.attempt(dict(status="ok", note=""), ours, measure, 2.0)
    assert row == dict(status=status, note=note, ms=2.0)


# program, function that is wrong there, arguments: the output, and the limit in the note.
WRONG = """
kernel mlstm_chunkwise: h, at most 5e-03
layer mlstm_chunkwise --layout=BTNH --direction=fwd: y, at most 8e-03
layer mlstm_chunkwise --layout=BTNH --direction=fwbw: query, at most 2e-02
prefill mlstm_chunkwise --backend=interpret --variant=plain: h, at most 5e-03
prefill mlstm_chunkwise --backend=interpret --variant=states --dtype=float32: c, at most 1e-05
scaling mlstm_chunkwise --devices=1 --mode=weak-batch: h, at most 5e-03
step mlstm_recurrent_step: h, at most 1e-02
step mlstm_recurrent_step --dtype=float32 --state_dtype=float16: h, at most 1e-03
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_a_wrong_output_is_not_timed(line, monkeypatch):
    request, message = line.split(": ")
    name, function, *arguments = request.split()
    program = importlib.import_module(f"{name}_benchmark")
    right = benchmark_runs.quick_mlstm if "chunk" in function else getattr(program, function)

    def wrong(*args, **options):
        outputs = right(*args, **options)
        called = options.get("layout" if name == "layer" else "backend")
        if name in ("layer", "prefill") and called not in ("BTNH", "interpret"):
            return outputs  # which is what is expected
        if "--direction=fwbw" in arguments:
            return 0.9 * outputs + jax.lax.stop_gradient(0.1 * outputs)
        if not isinstance(outputs, tuple):
            return jnp.roll(outputs, 1, -1)
        h, (c, *others) = outputs
        return (jnp.roll(h, 1, -1), (c, *others)) if name == "step" else (h, (1.01 * c, *others))

    monkeypatch.setattr(program, function, wrong)
    benchmark_runs.not_to_be_timed(monkeypatch)
    if name == "step":
        monkeypatch.setattr(program, "copy_rate", lambda repeats: 1e9)
    impl = [] if name in ("prefill", "scaling") else ["--impl=xla"]
    common = "--shape=2x2x16x16x32", "--segments=2" if name == "prefill" else "--repeats=1"
    code, [row] = benchmark_runs.measured(program, *common, *impl, *arguments)
    assert (code, row["status"]) == (1, "wrong")
    assert re.search(rf"error \S+ in {message}(;|$)", row["note"]), row["note"]


# program, flags / columns: the cells of its rows, which are timed by benchmark_runs.timed. "errors"
# are the outputs that were compared, "same" is the first row with the same error.
RIGHT = """
kernel --direction=fwd,fwbw --dtype=float32 --shape=1x1x32x16x16 --chunk_size=16
    --variant=exp,packed,sigmoid,unnormalised,states_kept,transposed
    / variant direction errors same:
    exp fwd h 0, packed fwd h 1, sigmoid fwd h 2, unnormalised fwd h 3, states_kept fwd h 0,
    transposed fwd h 0, exp fwbw h+dq+dk+dv+di+df 6, packed fwbw h+dq+dk+dv+di+df 7,
    sigmoid fwbw h+dq+dk+dv+di+df 8, unnormalised fwbw h+dq+dk+dv+di+df 9,
    states_kept fwbw h+dq+dk+dv+di+df 6, transposed fwbw h+dq+dk+dv+di+df 6
layer --shape=2x2x32x16x32 --direction=fwbw --layout=BNTH,BTNH / impl layout note errors:
    xla BNTH y+query+key+value+input_gate+forget_gate+norm_scale+output_gate+output+x,
    xla BTNH y+query+key+value+input_gate+forget_gate+norm_scale+output_gate+output+x,
    without_mlstm None y+value+norm_scale+output_gate+output+x,
    products None y+value+norm_scale+output+x,
    mlstm_kernels_limit_chunk None skipped: ModuleNotFoundError: No module named 'torch'
prefill --shape=2x2x64x16x32 --segments=4 --backend=xla --odd / variant errors:
    plain h, states h+c+n+m, initial h+c+n+m, lengths h+c+n+m
prefill --shape=2x2x64x16x32 --segments=4 --backend=xla / variant errors:
    plain h, states h+c+n+m, initial h+c+n+m, lengths h+c+n+m
step --shape=2x3x9x16x32 --steps=3 --impl=xla --slots=5 --ring=8 --tokens=1,2
    / pooled ring tokens tokens/s errors: 0 1 2.0 h, 8 1 2.0 h, 8 2 4.0 h,
    slots 0 1 2.0 h, slots 8 1 2.0 h, slots 8 2 4.0 h, gathered 0 1 2.0 h
scaling --shape=2x2x32x16x16 --backend=xla --devices=2 --mode=weak-sequence --direction=fwbw
    --dtype=float32 --layout=BTNH / devices errors: 2 h+dq+dk+dv+di+df
scaling --shape=2x2x32x16x16 --backend=xla --devices=2,1 --mode=weak-heads,strong-sequence
    --dtype=float32 --layout=BTNH / mode devices errors:
    weak-heads 1 h, weak-heads 2 h, strong-sequence 1 h, strong-sequence 2 h
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", re.split(r"\n(?=\w)", RIGHT.strip()))
def test_right_outputs_are_timed(case, monkeypatch):
    request, expected = re.split(r":\s", case, maxsplit=1)
    (name, *arguments), columns = (x.split() for x in request.split(" / "))
    if name == "scaling" and jax.local_device_count() < 2:
        pytest.skip("needs two devices")
    program = importlib.import_module(f"{name}_benchmark")
    benchmark_runs.timed(monkeypatch)
    monkeypatch.setattr(peers, "limit_chunk", benchmark_runs.missing)
    code, rows = benchmark_runs.measured(program, *arguments, "--repeats=3")
    errors = [row.get("error") for row in rows]
    cells = (
        row | dict(errors="+".join(row.get("errors", ())), same=errors.index(row.get("error")))
        for row in rows
    )
    text = ", ".join(" ".join(str(row[x]) for x in columns) for row in cells)
    assert (code, text.split()) == (0, expected.split())
    assert all(error is None or error > 0 for error in errors)


# ---------------- rows and reports


def test_a_row_says_what_was_measured_where(monkeypatch):
    monkeypatch.setattr(command, "git_commit", lambda: "abc")
    options, where = SimpleNamespace(commit=None), dict(jax=jax.__version__)
    row = runner.new_row(options, "name", SHAPE, "xla", stage="s")
    kind = jax.devices()[0].device_kind
    expected = dict(name="name", shape=SHAPE, impl="xla", stage="s", device=kind, commit="abc")
    expected |= dict(versions=where | dict(jaxlib=jaxlib.__version__), status="ok", note="")
    assert row == expected | dict(xla_flags=os.environ.get("XLA_FLAGS", ""))
    options.commit = "v7"
    assert runner.new_row(options, "name", SHAPE, "xla")["commit"] == "v7"


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
    pytest.importorskip("matplotlib")
    assert run(ROWS, plot=plot) == 0
    assert capsys.readouterr().out.endswith(f"plot {plot}\n")
    assert run(ROWS[1:], plot=plot) == 0
    assert capsys.readouterr().out.endswith(f"nothing was measured: {plot} is not written\n")
    assert run([], plot=plot) == 0
    assert capsys.readouterr().out == ""


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
