"""The step benchmark: bytes, checks of outputs, records."""

import functools
from unittest import mock

import benchmark_runs
import pytest
import step_benchmark

request = "--shape=2x3x9x16x32", "--steps=3", "--repeats=3"
measured = functools.partial(benchmark_runs.measured, step_benchmark, *request)
PEER = "mlstm_kernels_triton_step"


@pytest.fixture(autouse=True)
def timed(monkeypatch):
    """A copy moves 8 times 1 KiB there and back in 3 s."""
    monkeypatch.setitem(step_benchmark.COPIED_BYTES, "cpu", 2**10)
    benchmark_runs.timed(monkeypatch)


COPIED = 8 * 2 * 2**10 / 3.0


def check_figures(row):
    """A loop of three steps takes 3 s."""
    B, NH, S, K, V = row["shape"]
    nbytes = B * NH * (K * V + K + 1) * {"float32": 4, "bfloat16": 2}[row["state_dtype"]]
    rates = {"gbps": 2 * nbytes / 1e9, "copy_gbps": COPIED / 1e9, "tokens/s": B}
    figures = dict(ms=1e3, spread=5 / 3, state_mib=nbytes / 2**20, copy_pct=200 * nbytes / COPIED)
    benchmark_runs.assert_row(row, **figures, **rates)
    assert S == 1


@pytest.mark.parametrize("variant", ["exp", "sigmoid", "unnormalised"])
def test_measures_each_variant_and_skips_the_peer(variant, monkeypatch):
    monkeypatch.setitem(step_benchmark.PEERS, PEER, benchmark_runs.missing)
    code, (ours, peer) = measured(f"--impl=xla,{PEER}", f"--variant={variant}")
    assert (code, ours["status"], ours["variant"]) == (0, "ok", variant)
    assert 0 < ours["error"] < 1e-2
    check_figures(ours)
    none = f"skipped: UnsupportedError: it has no variant {variant}"
    assert peer["note"] == (benchmark_runs.MISSING if variant == "exp" else none)


def observed(monkeypatch, name):
    """The calls of a function of the benchmark, or of those of a module."""
    calls = mock.Mock(wraps=getattr(step_benchmark, name))
    monkeypatch.setattr(step_benchmark, name, calls)
    return calls


def test_pools_have_rows_beside_the_step_without_them(monkeypatch):
    """At random; the first, a middle and the last head are checked."""
    step, expected_h = (observed(monkeypatch, x) for x in ("mlstm_recurrent_step", "expected_h"))
    code, rows = measured("--impl=xla", "--slots=192")
    assert (code, [row["pooled"] for row in rows]) == (0, ["", "slots", "gathered"])
    assert len({row["error"] for row in rows}) == 1
    assert expected_h.call_args.args[2].tolist() == [0, 3, 5]
    drawn = (call.kwargs.get("slots") for call in step.call_args_list)
    slots = {(*x,) for x in drawn if x is not None}
    assert [abs(x[0] - x[1]) > 1 for x in slots] == [True]
    for row in rows:
        check_figures(row)
    assert measured("--impl=xla", "--slots=1")[0] == 2


def test_tokens_per_second_and_their_limit_by_batch(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path, limits, drawn = tmp_path / "plot.png", [], step_benchmark.reporting.plot

    def plot(rows, path, line, *args, **options):
        limits.extend(row["tokens/s"] for row in rows if line(row) == "memory limit")
        drawn(rows, path, line, *args, **options)

    monkeypatch.setattr(step_benchmark.reporting, "plot", plot)
    loops = observed(monkeypatch, "lax").fori_loop.call_args_list
    cases = "--shape=1x2x1x16x16,2x2x1x16x16", "--loop=scan,while"
    code, rows = measured(*cases, "--state_dtype=bfloat16", f"--plot={path}")
    assert code == 0
    assert len({(*row["shape"], row["loop"], row["state_dtype"]) for row in rows}) == 4
    assert path.stat().st_size > 0
    counts = [call.args[1] for call in loops]  # COPIES, CHECKED_STEPS and --steps, or traced
    assert ([x for x in counts if isinstance(x, int)], len(counts)) == ([8, 4, 3, 4, 3], 9)
    for row, limit in zip(rows, limits, strict=True):
        check_figures(row)
        per_token = 2 * row["state_mib"] * 2**20 / row["shape"][0]
        assert limit == pytest.approx(COPIED / per_token)
