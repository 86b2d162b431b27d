"""The prefill benchmark: tokens and bytes of each variant, checks of outputs."""

import functools

import benchmark_runs
import prefill_benchmark
import pytest

flags = "--shape=2x2x64x16x32", "--segments=4", "--repeats=1", "--odd"
measured = functools.partial(benchmark_runs.measured, prefill_benchmark, *flags)


def test_measures_each_variant():
    code, rows = measured("--backend=xla")
    assert code == 0
    for row, moved, tokens in zip(rows, (0, 1, 2, 1), (128, 128, 128, 57), strict=True):
        assert row["state_mib"] * 2**20 == moved * 64 * 529  # 16 heads of 16 * 32 + 16 + 1 float32
        assert "".join(row["errors"]) == ("hcnm" if moved else "h")
        assert 0 < row["errors"]["h"] < 5e-3
        assert row["tokens"] == tokens
        assert row["tokens/s"] == pytest.approx(tokens / (row["ms"] * 1e-3))


def test_wrong_states_are_not_timed(monkeypatch):
    def wrong(right=prefill_benchmark.mlstm_chunkwise, **options):
        h, (c, n, m) = right(**options | dict(backend="xla"))
        return h, (c * (1.03 if options["backend"] == "interpret" else 1), n, m)

    monkeypatch.setattr(prefill_benchmark, "mlstm_chunkwise", wrong)
    benchmark_runs.not_to_be_timed(monkeypatch)
    code, [row] = measured("--backend=interpret", "--variant=states")
    assert code == 1
    assert row["note"].startswith("wrong: error 3.0e-02 in c, ")
