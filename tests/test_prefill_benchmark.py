"""The prefill benchmark: tokens and bytes of each variant, checks of outputs."""

import functools

import benchmark_runs
import prefill_benchmark
import pytest

flags = "--shape=2x2x64x16x32", "--segments=4", "--repeats=1", "--odd"
run = functools.partial(benchmark_runs.run, prefill_benchmark, *flags)


def test_measures_each_variant(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert run("--backend=xla", f"--jsonl={path}") == 0
    cases = zip(benchmark_runs.records(path), (0, 1, 2, 1), (128, 128, 128, 57), strict=True)
    for row, moved, tokens in cases:
        assert row["state_mib"] * 2**20 == moved * 64 * 529  # 16 heads of 16 * 32 + 16 + 1 float32
        assert "".join(row["errors"]) == ("hcnm" if moved else "h")
        assert 0 < row["errors"]["h"] < 5e-3
        assert row["tokens"] == tokens
        assert row["tokens/s"] == pytest.approx(tokens / (row["ms"] * 1e-3))


def test_wrong_states_are_not_timed(monkeypatch, capsys):
    def wrong(right=prefill_benchmark.mlstm_chunkwise, **options):
        h, (c, n, m) = right(**options | dict(backend="xla"))
        return h, (c * (1.03 if options["backend"] == "interpret" else 1), n, m)

    monkeypatch.setattr(prefill_benchmark, "mlstm_chunkwise", wrong)
    benchmark_runs.not_to_be_timed(monkeypatch)
    assert run("--backend=interpret", "--variant=states") == 1
    assert "wrong: error 3.0e-02 in c" in capsys.readouterr().out
