"""The step benchmark: bytes, checks of outputs, records."""

import functools

import benchmark_runs
import jax.numpy as jnp
import pytest
import step_benchmark

run = functools.partial(
    benchmark_runs.run, step_benchmark, "--shape=1x2x9x16x16", "--steps=3", "--repeats=1"
)
PEER = "mlstm_kernels_triton_step"


@pytest.fixture(autouse=True)
def small_copy(monkeypatch):
    monkeypatch.setitem(step_benchmark.COPIED_BYTES, "cpu", 2**10)


@pytest.mark.parametrize("variant", ["exp", "sigmoid", "unnormalised"])
def test_measures_each_variant_and_skips_the_peer(variant, tmp_path, monkeypatch):
    monkeypatch.setitem(step_benchmark.PEERS, PEER, benchmark_runs.missing)
    path = tmp_path / "rows.jsonl"
    assert run(f"--impl=xla,{PEER}", f"--variant={variant}", f"--jsonl={path}") == 0
    ours, peer = benchmark_runs.records(path)
    assert (ours["status"], ours["variant"]) == ("ok", variant)
    assert 0 < ours["error"] < 1e-2
    moved = 2 * 2 * (16 * 16 + 16 + 1) * 4
    assert ours["gbps"] == pytest.approx(moved / (ours["ms"] * 1e6))
    none = f"skipped: UnsupportedError: it has no variant {variant}"
    assert peer["note"] == (benchmark_runs.MISSING if variant == "exp" else none)


def test_tokens_per_second_and_their_limit_by_batch(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    rows, path, plotted = tmp_path / "rows.jsonl", tmp_path / "plot.png", []
    shapes = "--shape=1x2x1x16x16,2x2x1x16x16"
    assert (
        run(shapes, "--loop=scan,while", "--state_dtype=float32,bfloat16", f"--jsonl={rows}") == 0
    )
    measured = benchmark_runs.records(rows)
    assert len({(*row["shape"], row["loop"], row["state_dtype"]) for row in measured}) == 8
    drawn = step_benchmark.reporting.plot

    def plot(rows, path, line, *args, **options):
        plotted.extend((line(row), row["tokens/s"]) for row in rows)
        drawn(rows, path, line, *args, **options)

    monkeypatch.setattr(step_benchmark.reporting, "plot", plot)
    assert run(f"--from_jsonl={rows}", f"--plot={path}") == 0
    assert path.stat().st_size > 0
    limits = [y for label, y in plotted if label == "memory limit"]
    for row, y in zip(measured, limits, strict=True):
        B, _, _, K, V = row["shape"]
        moved = 2 * B * 2 * (K * V + K + 1) * (4 if row["state_dtype"] == "float32" else 2)
        assert row["tokens/s"] == pytest.approx(B / (row["ms"] * 1e-3))
        assert y == pytest.approx(row["copy_gbps"] * 1e9 / (moved / B))


@pytest.mark.parametrize("change", [1.03, jnp.nan])
def test_a_wrong_step_is_not_timed(change, monkeypatch, capsys):
    def wrong(*args, right=step_benchmark.mlstm_recurrent_step, **options):
        h, (c, n, m) = right(*args, **options)
        return h, (c * change, n, m)

    monkeypatch.setattr(step_benchmark, "mlstm_recurrent_step", wrong)
    benchmark_runs.not_to_be_timed(monkeypatch)
    monkeypatch.setattr(step_benchmark, "copy_rate", lambda repeats: 1e9)
    assert run() == 1
    assert "wrong: error" in capsys.readouterr().out
