"""The step benchmark: random slots, how often steps run, the plot. test_benchmarks has its rows."""

import functools
from unittest import mock

import benchmark_runs
import pytest
import step_benchmark

request = "--steps=3", "--repeats=3", "--impl=xla"
measured = functools.partial(benchmark_runs.measured, step_benchmark, *request)


@pytest.fixture(autouse=True)
def timed(monkeypatch):
    """A copy moves 8 times 1 KiB there and back in 3 s."""
    monkeypatch.setitem(step_benchmark.COPIED_BYTES, "cpu", 2**10)
    benchmark_runs.timed(monkeypatch)


def observed(monkeypatch, name):
    """Calls of a function of the benchmark, or of those of a module."""
    calls = mock.Mock(wraps=getattr(step_benchmark, name))
    monkeypatch.setattr(step_benchmark, name, calls)
    return calls


@pytest.mark.slow
def test_pools_have_rows_beside_the_step_without_them(monkeypatch):
    """At random; the first, a middle and the last head are checked."""
    step, expected_h = (observed(monkeypatch, x) for x in ("mlstm_recurrent_step", "expected_h"))
    code, rows = measured("--shape=2x3x9x16x32", "--slots=192")
    assert (code, [row["pooled"] for row in rows]) == (0, ["", "slots", "gathered"])
    assert len({row["error"] for row in rows}) == 1
    assert expected_h.call_args.args[2].tolist() == [0, 3, 5]
    drawn = (call.kwargs.get("slots") for call in step.call_args_list)
    slots = {(*x,) for x in drawn if x is not None}
    assert [abs(x[0] - x[1]) > 1 for x in slots] == [True]


@pytest.mark.slow
def test_tokens_per_second_and_their_limit_by_batch(tmp_path, monkeypatch):
    """A sequence has 2 heads of 273 numbers of 2 bytes, read and written."""
    plot = observed(monkeypatch, "reporting").plot
    loops = observed(monkeypatch, "lax").fori_loop.call_args_list
    cases = "--shape=1x2x1x16x16,2x2x1x16x16", "--loop=scan,while"
    code, rows = measured(*cases, "--state_dtype=bfloat16", f"--plot={tmp_path}/plot.png")
    assert (code, [row["tokens/s"] for row in rows]) == (0, [1, 1, 2, 2])
    counts = [call.args[1] for call in loops]  # COPIES, CHECKED_STEPS and --steps, or traced
    assert ([x for x in counts if isinstance(x, int)], len(counts)) == ([8, 4, 3, 4, 3], 9)
    (drawn, _, line, *_), _ = plot.call_args
    limits = [row["tokens/s"] for row in drawn if line(row) == "memory limit"]
    assert limits == pytest.approx([8 * 2 * 2**10 / 3.0 / (2 * 2 * 273 * 2)] * 4)


@pytest.mark.slow
def test_layers_take_turns_and_share_the_time(monkeypatch):
    """A call of 3 steps takes 3 s, whether they are of one layer or of four."""
    step = observed(monkeypatch, "mlstm_recurrent_step")
    code, one_and_four = measured("--shape=2x2x1x16x16", "--layers=1,4", "--ring=8")
    times = [(row["layers"], row["ring"], row["ms"]) for row in one_and_four]
    assert code == 0
    assert times == [(1, 0, 1e3), (1, 8, 1e3), (4, 0, 250.0), (4, 8, 250.0)]
    states = [call.args[5] for call in step.call_args_list]
    assert (len(states), len({*map(id, states)})) == (2 * (1 + 4), 2 * (1 + 4))
