"""The benchmark of a language model: parameters, FLOPs, comparison, records, requests."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import pytest
from absl import flags

pytest.importorskip("flax")
pytest.importorskip("optax")

import xlstm_lm_benchmark as benchmark
from test_layer_benchmark import dot_flops
from xlstm_lm_benchmark import MODELS

pytestmark = pytest.mark.usefixtures("quick_compilation")

PEER = "mlstm_kernels_limit_chunk"
TINY = ("--layers=1", "--batch=1", "--sequence=16", "--warmup=1", "--steps=2")


def run(*arguments):
    values = flags.FlagValues()
    benchmark.define_flags(values)
    values(["xlstm_lm_benchmark", *arguments])
    return benchmark.run(values)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def quick_mlstm(q, k, v, i, f, **options):
    """A recurrence without decay, which compiles in no time."""
    weights = jnp.exp(i) * jax.nn.sigmoid(f) * jnp.sum(q.astype(jnp.float32) * k, -1)
    return jnp.cumsum(weights[..., None] * v, axis=1).astype(q.dtype)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(name):
    model = MODELS[name]
    state = jax.eval_shape(lambda: benchmark.initial_state(model))
    parameters = jax.tree.leaves(state.params)
    assert sum(x.size for x in parameters) == model.parameters
    assert {x.dtype for x in parameters} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_the_products_of_the_model_and_those_of_the_mlstm(name):
    model, B, S = MODELS[name], 2, 256
    network = benchmark.LanguageModel(model, lambda q, k, v, i, f: v)
    params = jax.eval_shape(lambda: benchmark.initial_state(model)).params
    tokens = jax.ShapeDtypeStruct((B, S + 1), jnp.int32)
    forward = jax.make_jaxpr(functools.partial(benchmark.loss_of, network))(params, tokens)
    K, V, L = model.qk_width // model.heads, model.width // model.heads, 128
    # In a chunk q k^T and its product with v for s <= t, q C, and k v^T, which is added to C.
    chunk = L * (L + 1) * (K + V) + 4 * L * K * V
    mlstm = model.layers * B * model.heads * (S // L) * chunk
    assert model.flops(B, S) == 3 * (dot_flops(forward.jaxpr) + mlstm)


def test_measures_a_tiny_model(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    assert run(*TINY, "--impl=xla", f"--jsonl={path}") == 0
    [record] = records(path)
    assert (record["status"], record["error"]) == ("ok", 0.0)
    assert record["tokens_per_s"] == pytest.approx(16 / record["ms"] * 1e3)
    assert len(record["losses"]) == 3
    assert record["losses"][0] == pytest.approx(math.log(128), rel=0.2)
    assert record["losses"][-1] < record["losses"][0]
    assert record["peak_mib"] * 2**20 > 3 * 4 * record["parameters"]  # with the two moments
    _, table = capsys.readouterr().out.split("\n\n")
    assert "tiny, 1 layers  1 x 16" in table


def test_a_peer_that_differs_is_wrong_and_one_that_is_not_there_is_skipped(tmp_path, monkeypatch):
    def absent(shape):
        raise ModuleNotFoundError("No module named\n'jax_triton'")

    def other(shape):
        return lambda q, *others: quick_mlstm(-q, *others)

    monkeypatch.setattr(benchmark, "mlstm_chunkwise", quick_mlstm)
    monkeypatch.setattr(benchmark, "PEER_PACKAGES", ())
    monkeypatch.setitem(benchmark.PEERS, PEER, other)
    monkeypatch.setitem(benchmark.PEERS, "absent", absent)
    path = tmp_path / "rows.jsonl"
    assert run(*TINY, f"--impl=xla,{PEER},absent", f"--jsonl={path}") == 1
    _, wrong, skipped = records(path)
    assert wrong["status"] == "wrong"
    assert wrong["note"].startswith("wrong: loss 0 ")
    assert wrong["ms"] > 0
    assert skipped["note"] == "skipped: ModuleNotFoundError: No module named 'jax_triton'"


@pytest.mark.parametrize(
    ("losses", "gradient_norm", "note"),
    [
        ([10.005, 9.05], 1.01, ""),
        ([10.02, 9.0], 1.0, "wrong: loss 0 2.0e-03 > 1.0e-03"),
        ([10.0, 9.2], 1.0, "wrong: loss 1 2.0e-02 > 1.0e-02"),
        ([10.0, math.nan], 0.9, "wrong: loss 1 nan > 1.0e-02, gradient norm 1.0e-01 > 2.0e-02"),
    ],
)
def test_what_counts_as_a_difference(losses, gradient_norm, note):
    def record(losses, gradient_norm):
        shape = MODELS["tiny"], 1, 16
        built = benchmark.Record("tiny", *shape, "xla", None, "cpu", {}, None, 1, 1, 1)
        built.losses, built.gradient_norms = losses, [gradient_norm] * 2
        return built

    compared = record(losses, gradient_norm)
    benchmark.compare(compared, record([10.0, 9.0], 1.0))
    assert (compared.status, compared.note) == ("wrong" if note else "ok", note)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--impl=nonsense", "unknown impl nonsense, known are triton, "),
        ("--impl=triton", "impl triton needs a GPU"),
        ("--recompute_states_in_bw=no", "unknown recompute_states_in_bw no, known are true, false"),
        ("--jsonl=/no/such/folder/rows", "No such file"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(argument, message, capsys):
    assert run(argument) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1
