"""The benchmark of a language model: parameters, FLOPs, comparison, records."""

import contextlib
import math
from unittest import mock

import benchmark_runs
import jax
import jax.numpy as jnp
import pytest
import runner
import xlstm_lm_benchmark as benchmark
from benchmark_runs import quick_mlstm
from shapes import Shape
from xlstm_lm_benchmark import MODELS

# All parameters, those of matrix products, and the FLOPs of a step of two sequences of 256 tokens:
# three times those of the forward products and of the mLSTM in chunks of 128.
PARAMETERS = {
    "1.3b": (1_345_865_920, 1_280_180_224, 4_024_631_820_288),
    "tiny": (123_848, 115_200, 404_520_960),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_flops_of_a_model(name):
    model = MODELS[name]
    assert (*model.parameters(), model.flops(2, 256)) == PARAMETERS[name]
    params = jax.eval_shape(lambda: benchmark.initial_state(model)).params
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_measures_a_model_refuses_a_peer_that_differs_and_skips_one_that_is_not_there(monkeypatch):
    def other(q, *others):
        return quick_mlstm(-q, *others, layout="BTNH")

    monkeypatch.setattr(benchmark, "mlstm_chunkwise", quick_mlstm)
    monkeypatch.setattr(benchmark.peers, "jax_triton_versions", dict)
    monkeypatch.setitem(benchmark.PEERS, "mlstm_kernels_limit_chunk", other)
    monkeypatch.setitem(benchmark.PEERS, "absent", benchmark_runs.missing)
    request = "--batch=1", "--sequence=16", "--warmup=1", "--steps=2"
    impls = "--impl=xla,mlstm_kernels_limit_chunk,absent"
    code, (ours, wrong, skipped) = benchmark_runs.measured(benchmark, *request, impls)
    assert code == 1
    assert (ours["status"], ours["error"]) == ("ok", 0.0)
    assert ours["tokens_per_s"] == pytest.approx(16 / ours["ms"] * 1e3)
    first, *_, last = ours["losses"]
    assert last < first == pytest.approx(math.log(128), rel=0.2)
    assert ours["peak_mib"] * 2**20 > 3 * 4 * ours["parameters"]  # with the two moments
    assert wrong["note"].startswith("wrong: error ")
    assert skipped["note"] == benchmark_runs.MISSING


def test_figures_of_a_training_step(monkeypatch):
    """5 s to compile and four steps of 9, 2, 3 and 7 s, the first of which is not timed."""
    device = benchmark_runs.Device(monkeypatch, benchmark)
    sizes = dict(argument=7, output=6, temp=3, alias=5)
    memory = {f"{name}_size_in_bytes": x * 2**20 for name, x in sizes.items()}
    steps = iter([(9.0, 4.0), (2.0, 3.5), (3.0, 3.0), (7.0, 2.5)])

    def step(*_):
        seconds, loss = next(steps)
        return device.call(seconds, ("state", benchmark.Metrics(loss, 0.5)))

    def compiled(*_):
        device.now += 5.0
        return mock.Mock(side_effect=step, memory_analysis=lambda: mock.Mock(**memory))

    monkeypatch.setattr(benchmark, "initial_state", lambda _: "state")
    lowered = mock.Mock(compile=compiled)
    monkeypatch.setattr(jax, "jit", lambda *_, **__: mock.Mock(lower=lambda *_: lowered))
    row = dict(impl="xla", device="NVIDIA H200", shape=Shape(2, 4, 16, 8, 8), flops=6e12)
    options = mock.Mock(warmup=1, steps=3)
    benchmark.measure(row, None, MODELS["tiny"], {}, options)
    figures = dict(first_call_s=14.0, ms=3e3, spread=5 / 3, tokens_per_s=32 / 3, peak_mib=11)
    benchmark_runs.assert_row(row, **figures, mfu_pct=200 / 989, measured_pct=200 / 790)
    assert (row["losses"], row["gradient_norms"]) == ([4.0, 3.5, 3.0, 2.5], [0.5] * 4)


# Two losses and a gradient norm, compared with 10, 9 and 1.
DIFFERENCES = """
10.005 9.05 1.01:
10.02 9 1: error 2.0e-03 in loss 0, at most 1e-03
10 nan 0.9: error nan in loss 1, at most 1e-02; error 1.0e-01 in gradient norm, at most 2e-02
"""


@pytest.mark.parametrize("line", DIFFERENCES.strip().splitlines())
def test_what_counts_as_a_difference(line):
    numbers, note = line.split(":")
    *losses, norm = map(float, numbers.split())
    first = dict(losses=[10.0, 9.0], gradient_norms=[1.0] * 2)
    compared = dict(losses=losses, gradient_norms=[norm] * 2)
    note = note.strip()
    with pytest.raises(runner.WrongOutputError, match=note) if note else contextlib.nullcontext():
        benchmark.compare(compared, first)
