"""The prefill benchmark: what each variant asks for, its tokens, FLOPs and bytes."""

import functools

import benchmark_runs
import numpy as np
import prefill_benchmark
import pytest
from kernel_benchmark import TOLERANCES

VARIANTS = "plain", "states", "initial", "lengths"
flags = "--shape=2x2x64x16x32", "--segments=4", "--repeats=3"
measured = functools.partial(benchmark_runs.measured, prefill_benchmark, *flags)


def test_figures_of_each_variant(monkeypatch):
    asked = []

    def stand_in(**options):
        asked.append({name: getattr(x, "shape", x) for name, x in options.items()})
        return benchmark_runs.quick_mlstm(**options)

    monkeypatch.setattr(prefill_benchmark, "mlstm_chunkwise", stand_in)
    benchmark_runs.timed(monkeypatch)
    code, rows = measured("--backend=xla")
    assert (code, [row["variant"] for row in rows]) == (0, [*VARIANTS])
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
    B, NH, N, S, K, V = 2, 2, 4, 64, 16, 32
    initial = dict(c_initial=(B, N, NH, K, V), n_initial=(B, N, NH, K), m_initial=(B, N, NH))
    packed = dict(segment_ids=(B, S), return_last_states=False)
    with_states = packed | dict(num_segments=N, return_last_states=True)
    lengths = dict(sequence_lengths=(B * N,), return_last_states=True)
    for options, of_measured in zip(
        (packed, with_states, with_states | initial, lengths), asked[1::2], strict=True
    ):
        inputs = {name: of_measured.pop(name) for name in "qkvif"}
        assert of_measured == options | dict(backend="xla")
        rows = (B * N, NH, S // N) if options is lengths else (B, NH, S)
        shapes = ((*rows, K), (*rows, K), (*rows, V), rows, rows)
        assert [*inputs.values()] == [*shapes]


@pytest.mark.slow
@pytest.mark.parametrize("odd", [True, False])
def test_measures_each_variant(odd):
    code, rows = measured("--backend=xla", f"--odd={odd}")
    assert (code, [row["status"] for row in rows]) == (0, ["ok"] * 4)
    assert all(0 < row["error"] <= TOLERANCES["bfloat16"][0] for row in rows)


@pytest.mark.parametrize("odd", [True, False])
def test_segments_of_a_row(odd, monkeypatch):
    """Equal ones, or as many of random lengths."""
    ids = []

    def build(impl, arrays, options):
        ids.append(arrays["segment_ids"])
        raise KeyboardInterrupt

    monkeypatch.setattr(prefill_benchmark.Prefill, "build", build)
    assert measured("--variant=plain", f"--odd={odd}")[0] == 130
    [(first, second)] = ids
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(np.unique(first), range(4))
    assert (np.diff(first) >= 0).all()
    assert odd != (np.bincount(first) == 16).all()
