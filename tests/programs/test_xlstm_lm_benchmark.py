"""The benchmark of a language model: comparison, figures, losses on meshes."""

import functools
import math
from unittest import mock

import benchmark_runs
import jax
import lm_mesh
import numpy as np
import pytest
import xlstm_lm_benchmark as benchmark
from benchmark_runs import quick_mlstm
from oracle import collectives
from runner import relative_error
from shapes import Shape
from xlstm_lm_benchmark import MODELS


@pytest.mark.slow
def test_measures_a_model_refuses_a_peer_that_differs_and_skips_one_that_is_not_there(monkeypatch):
    def other(q, *others):
        return quick_mlstm(-q, *others, layout="BTNH")

    monkeypatch.setattr(benchmark.lm_mesh, "mlstm_chunkwise", quick_mlstm)
    monkeypatch.setattr(benchmark.peers, "jax_versions", lambda _: {})
    monkeypatch.setitem(benchmark.PEERS, "mlstm_kernels_limit_chunk", other)
    monkeypatch.setitem(benchmark.PEERS, "absent", benchmark_runs.missing)
    request = "--batch=1", "--sequence=16", "--warmup=1", "--steps=2"
    impls = "--impl=xla,mlstm_kernels_limit_chunk,absent", "--recipe=products_unrolled"
    code, (ours, wrong, skipped) = benchmark_runs.measured(benchmark, *request, *impls)
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
    memory = mock.Mock(**{f"{name}_size_in_bytes": x * 2**20 for name, x in sizes.items()})
    losses, seconds = [4.0, 3.5, 3.0, 2.5], iter((9.0, 2.0, 3.0, 7.0))
    metrics = iter(benchmark.Metrics(loss, 0.5) for loss in losses)

    def compiled(*_):
        device.now += 5.0
        step = mock.Mock(side_effect=lambda *_: device.call(next(seconds), ("", next(metrics))))
        step.memory_analysis.return_value = memory
        return step

    monkeypatch.setattr(benchmark, "first_state", lambda *_: ("state", "tokens"))
    monkeypatch.setattr(jax, "jit", mock.Mock())
    jax.jit.return_value.lower.return_value.compile = compiled
    row = dict(
        name="tiny", impl="xla", device="NVIDIA H200", shape=Shape(2, 4, 16, 8, 8), flops=6e12
    )
    row |= dict(recipe="inputs", mesh="data", devices=2)
    # Of the rows before it one has as many tokens per device, the other the same shape.
    half = dict(mesh="one", devices=1, shape=Shape(1, 4, 16, 8, 8), tokens_per_s_per_device=20 / 3)
    same = row | dict(losses=[4.004, *losses[1:]], gradient_norms=[0.5])
    network = benchmark.Network(MODELS["tiny"], None, benchmark.Recipe())
    benchmark.measure(row, network, [row | half, same], mock.Mock(warmup=1, steps=3))
    figures = dict(first_call_s=14.0, ms=3e3, spread=5 / 3, tokens_per_s=32 / 3, peak_mib=11)
    figures |= dict(tokens_per_s_per_device=16 / 3, efficiency_pct=80, error=0.004 / 4.004)
    benchmark_runs.assert_row(row, **figures, mfu_pct=100 / 989, measured_pct=100 / 790)
    assert (row["losses"], row["gradient_norms"]) == (losses, [0.5] * 4)


def in_float32(monkeypatch):
    monkeypatch.setattr(benchmark, "DTYPE", "float32")
    for layer in (benchmark.dense, benchmark.norm):
        monkeypatch.setitem(layer.keywords, "dtype", "float32")
    benchmark.initial_params.clear_cache()


# In the program of a step, in which a block is there once: of its 8 matrices and of the two outside
# of it, forward and backward; of gradients in a block, and of all others with the loss. Of the
# mLSTM: two sums and P - 1 = 3 permutations forward, and with the block once more, one sum and 3
# permutations backward; XLA then has another sum for the gradients of a block.
GATHERS = {"all-gather": 18, "reduce-scatter": 2}
OF_MLSTM = {"all-reduce": 8, "collective-permute": 9}
COLLECTIVES = {
    "data": {"all-reduce": 2},
    "fsdp": GATHERS | {"all-reduce": 2},
    "sequence": OF_MLSTM,
    "fsdp_sequence": GATHERS | OF_MLSTM,
}


@functools.cache
def drawn_state(recipe):
    """Of the tiny model, on the host, in float32 for activations of any dtype."""
    return jax.tree.map(np.asarray, benchmark.initial_state(MODELS["tiny"], recipe))


def losses_of_ten_steps(spread, recipe=benchmark.RECIPES["inputs_in_parts"]):
    """And the compiled step."""
    mlstm = benchmark.ours("xla", recipe, spread)
    network = benchmark.Network(MODELS["tiny"], mlstm, recipe, spread)
    drawn, losses = drawn_state(recipe), []
    with spread.context():
        with mock.patch.object(benchmark, "initial_state", return_value=drawn):
            state, tokens = benchmark.first_state(network, 8, 64)
        compiled = benchmark.compiled_step(network, state, tokens)
        for _ in range(10):
            state, metrics = jax.block_until_ready(compiled(state, tokens))
            losses.append(float(metrics.loss))
    return np.array(losses), compiled


@functools.cache
def losses_of_one_device(dtype):
    """dtype: of the activations, which the caller has set."""
    return losses_of_ten_steps(lm_mesh.OneDevice())[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "name", "axes"),
    [
        *(("float32", name, "explicit") for name in lm_mesh.KINDS),
        ("float32", "fsdp_sequence", "auto"),
        ("bfloat16", "fsdp_sequence", "explicit"),
    ],
)
def test_ten_steps_on_a_mesh_have_the_losses_of_one_device(monkeypatch, dtype, name, axes):
    """And no collectives but those of docs/devices.md."""
    if dtype == "float32":
        in_float32(monkeypatch)
    spread = lm_mesh.spread(name, axes, jax.devices()[:8], 4)
    losses, compiled = losses_of_ten_steps(spread)
    assert collectives(compiled) == COLLECTIVES[name]
    expected = losses_of_one_device(dtype)
    bounds = np.full(10, 1e-5)
    if dtype == "bfloat16":
        bounds = np.where(np.arange(10), benchmark.LATER_TOLERANCE, benchmark.FIRST_TOLERANCE)
    assert (abs(losses - expected) <= bounds * expected[0]).all()


def first_moments(parts):
    """After one step by block: a tenth of the gradients, clipped, by the names of parameters."""
    recipe = benchmark.RECIPES["products_by_block"]._replace(by_block=parts)
    mlstm = benchmark.ours("xla", recipe, lm_mesh.OneDevice())
    network = benchmark.Network(MODELS["tiny"], mlstm, recipe)
    state, tokens = benchmark.first_state(network, 8, 64)
    state, metrics = benchmark.compiled_step(network, state, tokens)(state, tokens)
    return metrics, jax.tree.leaves_with_path([x[0].mu for x in state.optimizer])


@pytest.mark.slow
def test_gradients_of_parts_of_a_batch_are_those_of_the_batch(monkeypatch):
    in_float32(monkeypatch)
    (one, whole), (two, parts) = map(first_moments, (1, 2))
    np.testing.assert_allclose(two, one, rtol=1e-6)
    for (name, x), (_, y) in zip(whole, parts, strict=True):
        assert relative_error(y, x) < 2e-6, jax.tree_util.keystr(name)  # 32 roundings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"), [("one", None), ("data", "auto"), ("fsdp", "auto"), ("fsdp", "explicit")]
)
def test_ten_steps_by_block_have_the_losses_of_one_program(monkeypatch, name, axes):
    in_float32(monkeypatch)
    spread = lm_mesh.spread(name, axes, jax.devices()[:4], 4)
    losses, _ = losses_of_ten_steps(spread, benchmark.RECIPES["products_by_block"])
    expected = losses_of_one_device("float32")
    assert (abs(losses - expected) <= 1e-5 * expected[0]).all()
