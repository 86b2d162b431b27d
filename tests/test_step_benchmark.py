"""The step benchmark: bytes, checks of outputs, records."""

import functools

import benchmark_runs
import jax.numpy as jnp
import pytest
import step_benchmark

request = "--shape=1x2x9x16x16", "--steps=3", "--repeats=1"
measured = functools.partial(benchmark_runs.measured, step_benchmark, *request)
PEER = "mlstm_kernels_triton_step"


@pytest.fixture(autouse=True)
def small_copy(monkeypatch):
    monkeypatch.setitem(step_benchmark.COPIED_BYTES, "cpu", 2**10)


@pytest.mark.parametrize("variant", ["exp", "sigmoid", "unnormalised"])
def test_measures_each_variant_and_skips_the_peer(variant, monkeypatch):
    monkeypatch.setitem(step_benchmark.PEERS, PEER, benchmark_runs.missing)
    code, (ours, peer) = measured(f"--impl=xla,{PEER}", f"--variant={variant}")
    assert code == 0
    assert (ours["status"], ours["variant"]) == ("ok", variant)
    assert 0 < ours["error"] < 1e-2
    moved = 2 * 2 * (16 * 16 + 16 + 1) * 4
    assert ours["gbps"] == pytest.approx(moved / (ours["ms"] * 1e6))
    none = f"skipped: UnsupportedError: it has no variant {variant}"
    assert peer["note"] == (benchmark_runs.MISSING if variant == "exp" else none)


def test_tokens_per_second_and_their_limit_by_batch(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path, limits, drawn = tmp_path / "plot.png", [], step_benchmark.reporting.plot

    def plot(rows, path, line, *args, **options):
        limits.extend(row["tokens/s"] for row in rows if line(row) == "memory limit")
        drawn(rows, path, line, *args, **options)

    monkeypatch.setattr(step_benchmark.reporting, "plot", plot)
    cases = "--shape=1x2x1x16x16,2x2x1x16x16", "--loop=scan,while"
    code, rows = measured(*cases, "--state_dtype=float32,bfloat16", f"--plot={path}")
    assert code == 0
    assert len({(*row["shape"], row["loop"], row["state_dtype"]) for row in rows}) == 8
    assert path.stat().st_size > 0
    for row, y in zip(rows, limits, strict=True):
        B, _, _, K, V = row["shape"]
        per_token = 2 * 2 * (K * V + K + 1) * (4 if row["state_dtype"] == "float32" else 2)
        assert row["tokens/s"] == pytest.approx(B / (row["ms"] * 1e-3))
        assert y == pytest.approx(row["copy_gbps"] * 1e9 / per_token)


@pytest.mark.parametrize("change", [1.03, jnp.nan])
def test_a_wrong_step_is_not_timed(change, monkeypatch):
    def wrong(*args, right=step_benchmark.mlstm_recurrent_step, **options):
        h, (c, n, m) = right(*args, **options)
        return h, (c * change, n, m)

    monkeypatch.setattr(step_benchmark, "mlstm_recurrent_step", wrong)
    benchmark_runs.not_to_be_timed(monkeypatch)
    monkeypatch.setattr(step_benchmark, "copy_rate", lambda repeats: 1e9)
    code, rows = measured()
    assert code == 1
    assert all(row["note"].startswith("wrong: error ") for row in rows)
