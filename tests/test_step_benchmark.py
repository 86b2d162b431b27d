"""The step benchmark: bytes, checks of outputs, records, requests."""

import json

import jax
import jax.numpy as jnp
import kernel_benchmark
import pytest
import step_benchmark
from absl import flags

pytestmark = pytest.mark.usefixtures("quick_compilation")

REQUEST = ("--shape=1x2x16x16", "--steps=3", "--repeats=1")


def run(*arguments):
    values = flags.FlagValues()
    step_benchmark.define_flags(values)
    values(["step_benchmark", *arguments])
    return step_benchmark.run(values)


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    monkeypatch.setattr(kernel_benchmark, "MAX_CALLS", 1)
    monkeypatch.setitem(step_benchmark.COPIED_BYTES, "cpu", 2**10)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_the_states(state_dtype):
    shape = step_benchmark.Shape(2, 3, 8, 16)
    _, (c, n, m) = jax.eval_shape(
        lambda: step_benchmark.random_inputs(shape, "bfloat16", state_dtype)
    )
    assert shape.state_bytes(c.dtype.itemsize) == (c.size + n.size + m.size) * c.dtype.itemsize


def test_measures_mlstm_pallas_and_skips_a_peer_that_is_not_there(tmp_path, monkeypatch, capsys):
    def absent(*_):
        raise ModuleNotFoundError("No module named\n'torch'")

    monkeypatch.setitem(step_benchmark.PEERS, "mlstm_kernels_triton_step", absent)
    path = tmp_path / "rows.jsonl"
    impls = "xla", "interpret", "mlstm_kernels_triton_step"
    assert run(*REQUEST, f"--impl={','.join(impls)}", f"--jsonl={path}") == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert tuple(record["impl"] for record in records) == impls
    for record in records[:2]:
        assert record["status"] == "ok"
        assert 0 < record["error"] < 1e-2
        assert record["gbps"] == pytest.approx(
            2 * 2 * (16 * 16 + 16 + 1) * 4 / (record["us"] * 1e3)
        )
        assert record["copy_pct"] == pytest.approx(100 * record["gbps"] / record["copy_gbps"])
    assert records[2]["status"] == "skipped"
    assert records[2]["note"] == "skipped: ModuleNotFoundError: No module named 'torch'"
    text = capsys.readouterr().out
    _, _, table = text.partition("\ncopy: ")
    assert all(impl in table for impl in impls)
    assert ("not the speeds of the kernels" in text) == (jax.default_backend() != "gpu")


@pytest.mark.parametrize("variant", ["sigmoid", "unnormalised"])
def test_variants_are_checked_and_the_peer_has_none(variant, tmp_path):
    path = tmp_path / "rows.jsonl"
    assert (
        run(
            *REQUEST,
            "--impl=xla,mlstm_kernels_triton_step",
            f"--variant={variant}",
            f"--jsonl={path}",
        )
        == 0
    )
    ours, peer = (json.loads(line) for line in path.read_text().splitlines())
    assert (ours["status"], ours["variant"]) == ("ok", variant)
    assert 0 < ours["error"] < 1e-2
    assert peer["note"] == f"skipped: ValueError: it has no variant {variant}"


@pytest.mark.parametrize("change", [1.03, jnp.nan])
def test_a_wrong_step_is_not_timed(change, monkeypatch, capsys):
    right = step_benchmark.mlstm_recurrent_step

    def wrong(*args, **options):
        h, (c, n, m) = right(*args, **options)
        return h, (c * change, n, m)

    monkeypatch.setattr(step_benchmark, "mlstm_recurrent_step", wrong)
    monkeypatch.setattr(step_benchmark, "time_calls", lambda *_: pytest.fail("it was timed"))
    monkeypatch.setattr(step_benchmark, "copy_rate", lambda repeats: 1e9)
    assert run(*REQUEST) == 1
    text = capsys.readouterr().out
    assert "wrong: error" in text
    assert "failed" not in text


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "--impl=nonsense",
            "unknown impl nonsense, known are triton, interpret, xla, mlstm_kernels_triton_step",
        ),
        ("--impl=triton", "impl triton needs a GPU"),
        ("--jsonl=/no/such/folder/rows", "No such file"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(argument, message, capsys):
    if argument == "--impl=triton" and jax.default_backend() == "gpu":
        pytest.skip("a GPU is here")
    assert run(argument) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1
