"""The prefill benchmark: what each variant asks for, its tokens, FLOPs and bytes."""

import functools

import benchmark_runs
import prefill_benchmark
import pytest
from kernel_benchmark import TOLERANCES

flags = "--shape=2x2x64x16x32", "--segments=4", "--repeats=3"
measured = functools.partial(benchmark_runs.measured, prefill_benchmark, *flags)


def test_figures_of_each_variant(monkeypatch):
    asked = []

    def stand_in(**options):
        asked.append(
            {name for name, x in options.items() if x is not False} - {*"qkvif", "backend"}
        )
        return benchmark_runs.quick_mlstm(**options)

    monkeypatch.setattr(prefill_benchmark, "mlstm_chunkwise", stand_in)
    benchmark_runs.timed(monkeypatch)
    code, rows = measured("--backend=xla")
    assert (code, [row["variant"] for row in rows]) == (
        0,
        ["plain", "states", "initial", "lengths"],
    )
    moves, tokens = (0, 1, 2, 1), (128, 128, 128, 57)  # 8 lengths from 1 to 0.9 * 16
    for row, moved, count in zip(rows, moves, tokens, strict=True):
        states = moved * 16 * 4 * (16 * 32 + 16 + 1)  # of 4 prompts in each of 4 rows of heads
        per_step = 2 * 2 * (16 + 32) + 8
        # Chunks of 128 steps or of the whole prompt: C + k v^T, C^T q, and the triangle.
        flops = 2 * count * (4 * 16 * 32 + (min(count, 128) + 1) * (16 + 32))
        benchmark_runs.assert_row(row, **benchmark_runs.TIMED, tokens=count, segments=4)
        benchmark_runs.assert_row(
            row,
            **{"state_mib": states / 2**20, "tokens/s": count / 3.0},
            tflops=flops / 3e12,
            tbps=(2 * count * per_step + states) / 3e12,
        )
        assert "".join(row["errors"]) == ("hcnm" if moved else "h")
    states = {"num_segments", "return_last_states"}
    initial = {"c_initial", "n_initial", "m_initial"}
    assert asked[1::2] == [
        {"segment_ids"},
        {"segment_ids", *states},
        {"segment_ids", *states, *initial},
        {"sequence_lengths", "return_last_states"},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("odd", [True, False])
def test_measures_each_variant(odd):
    code, rows = measured("--backend=xla", f"--odd={odd}")
    assert (code, [row["status"] for row in rows]) == (0, ["ok"] * 4)
    assert all(0 < row["error"] <= TOLERANCES["bfloat16"][0] for row in rows)
