"""The prefill benchmark: what each variant asks for, its tokens, FLOPs and bytes."""

import functools

import benchmark_runs
import prefill_benchmark

flags = "--shape=2x2x64x16x32", "--segments=4", "--repeats=3"
measured = functools.partial(benchmark_runs.measured, prefill_benchmark, *flags)


# How often states are moved, tokens (8 lengths are from 1 to 0.9 * 16), what is asked for.
VARIANTS = """
plain 0 128 segment_ids
states 1 128 segment_ids num_segments return_last_states
initial 2 128 segment_ids num_segments return_last_states c_initial n_initial m_initial
lengths 1 57 sequence_lengths return_last_states
"""


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
    assert code == 0
    for row, names, line in zip(rows, asked[1::2], VARIANTS.split("\n")[1:-1], strict=True):
        variant, *numbers = line.split()[:3]
        moved, count = map(int, numbers)
        assert (row["variant"], names) == (variant, {*line.split()[3:]})
        states = moved * 16 * 4 * (16 * 32 + 16 + 1)  # of 4 prompts in each of 4 rows of heads
        per_step = 2 * 2 * (16 + 32) + 8
        # Chunks of 128 steps or of the whole prompt: C + k v^T, C^T q, and the triangle.
        flops = 2 * count * (4 * 16 * 32 + (min(count, 128) + 1) * (16 + 32))
        benchmark_runs.assert_row(
            row,
            **benchmark_runs.TIMED,
            **{"state_mib": states / 2**20, "tokens/s": count / 3.0},
            tokens=count,
            segments=4,
            tflops=flops / 3e12,
            tbps=(2 * count * per_step + states) / 3e12,
        )
        assert "".join(row["errors"]) == ("hcnm" if moved else "h")
