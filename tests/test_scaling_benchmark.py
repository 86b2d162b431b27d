"""The scaling benchmark: shapes of n devices, checks of outputs, efficiency, requests."""

import json

import jax
import numpy as np
import pytest
import scaling_benchmark as scaling
from absl import flags
from kernel_benchmark import TOLERANCES
from roofline import Shape

pytestmark = pytest.mark.usefixtures("quick_compilation")
OF = Shape(1, 1, 32, 16, 16)
DEVICE = jax.local_devices()[0]


def run(*arguments):
    """The exit code."""
    values = flags.FlagValues()
    scaling.define_flags(values)
    values(["scaling_benchmark.py", *arguments])
    return scaling.run(values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the records and the plot of all modes on one and two devices."""
    if jax.local_device_count() < 2:
        pytest.skip("needs two devices")
    folder = tmp_path_factory.mktemp("scaling")
    options = [f"--shape={OF}", "--devices=2,1", "--dtype=float32", "--backend=xla", "--repeats=2"]
    assert run(*options, f"--jsonl={folder / 'rows.jsonl'}", f"--plot={folder / 'plot.png'}") == 0
    return folder


@pytest.fixture(scope="module")
def records(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_shapes_of_two_devices(records):
    shapes = {(record["mode"], record["devices"]): Shape(*record["shape"]) for record in records}
    assert len(shapes) == len(records) == 8
    assert {shapes[mode, 1] for mode in scaling.MODES} == {OF}
    grown = {
        "weak-batch": dict(B=2),
        "weak-heads": dict(NH=2),
        "weak-sequence": dict(S=64),
        "strong-sequence": {},
    }
    assert {mode: shapes[mode, 2] for mode in scaling.MODES} == {
        mode: OF._replace(**sizes) for mode, sizes in grown.items()
    }


@pytest.mark.slow
def test_records_are_checked_and_timed(records):
    for record in records:
        assert record["status"] == "ok"
        assert set(record["errors"]) == {"h"}
        assert 0 < record["error"] <= TOLERANCES["float32"][0]
        assert record["ms"] > 0
        assert record["tokens_per_second"] == pytest.approx(
            record["shape"][0] * record["shape"][2] / record["ms"] * 1e3
        )


@pytest.mark.slow
def test_efficiency_is_tokens_per_device_and_second(records):
    one, two = (
        {record["mode"]: record for record in records if record["devices"] == n} for n in (1, 2)
    )
    for mode, (_, grows) in scaling.MODES.items():
        assert one[mode]["efficiency_pct"] == 100
        assert two[mode]["efficiency_pct"] == pytest.approx(
            100 * one[mode]["ms"] / two[mode]["ms"] / (1 if grows else 2)
        )


@pytest.mark.slow
def test_gradients_of_a_split_sequence_are_checked():
    if jax.local_device_count() < 2:
        pytest.skip("needs two devices")
    impl = scaling.Spread("xla", 2, jax.local_devices()[:2], None)
    case = scaling.ReducedCase(
        scaling.MODES["weak-sequence"].reduced(OF, 2), "float32", gradients=True
    )
    errors = case.errors(impl, impl.build(impl.inputs(case.shape, "float32"), "fwbw")())
    assert set(errors) == {"h", "dq", "dk", "dv", "di", "df"}
    assert all(x <= case.tolerance(name) for name, x in errors.items())


def test_inputs_do_not_depend_on_the_devices():
    if jax.local_device_count() < 2:
        pytest.skip("needs two devices")
    one, two = (
        scaling.Spread("xla", 2, jax.local_devices()[:n], None).inputs(OF, "float32")
        for n in (1, 2)
    )
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_reduced_shapes_keep_the_head_dimensions():
    big = Shape(8, 8, 8192, 256, 512)
    assert scaling.MODES["weak-heads"].reduced(big, 4) == Shape(1, 4, 256, 256, 512)
    assert scaling.MODES["strong-sequence"].reduced(big, 4) == Shape(1, 1, 1024, 256, 512)
    assert scaling.MODES["strong-sequence"].reduced(big._replace(S=64), 4) == Shape(
        1, 1, 64, 256, 512
    )


def test_wrong_output_is_not_timed(monkeypatch, capsys):
    right = scaling.mlstm_chunkwise
    monkeypatch.setattr(
        scaling, "mlstm_chunkwise", lambda *args, **options: 1.001 * right(*args, **options)
    )
    options = [
        f"--shape={OF}",
        "--devices=1",
        "--dtype=float32",
        "--backend=xla",
        "--mode=weak-batch",
    ]
    assert run(*options) == 1
    [line] = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.endswith("in h, at most 1e-05")
    ][:1]
    assert "wrong: error 1.0e-03" in line


@pytest.mark.parametrize(
    ("message", "status", "code"),
    [("RESOURCE_EXHAUSTED: 9 GiB", "skipped", 0), ("no such\nthing", "failed", 1)],
)
def test_errors_are_records(monkeypatch, capsys, tmp_path, message, status, code):
    def measure(record, *_):
        if record.devices == 1:
            raise RuntimeError(message)
        record.ms = 2.0

    monkeypatch.setattr(scaling, "measure", measure)
    monkeypatch.setattr(scaling, "Spread", lambda *_: None)
    monkeypatch.setattr(jax, "local_devices", lambda: [DEVICE] * 4)
    options = [
        f"--shape={OF}",
        "--mode=strong-sequence",
        "--backend=xla",
        f"--jsonl={tmp_path / 'rows'}",
    ]
    assert run(*options) == code
    first, *others = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert (first["status"], first["note"]) == (
        status,
        f"{status}: RuntimeError: {' '.join(message.split())}",
    )
    assert [record["efficiency_pct"] for record in others] == [100, 50]
    assert capsys.readouterr().out.count(first["note"]) == 2  # as it comes, and in the table


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--mode=strong-batch", "unknown mode strong-batch, known are weak-batch, "),
        ("--devices=1,4096", "devices, not 1, 4096"),
        ("--jsonl=/no/such/folder/rows", "/no/such/folder/rows"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(argument, message, capsys):
    assert run("--backend=xla", argument) == 2
    error = capsys.readouterr().err
    assert error.startswith("scaling_benchmark: ")
    assert message in error
    assert error.count("\n") == 1


def test_steps_that_the_devices_do_not_divide(monkeypatch, capsys):
    monkeypatch.setattr(jax, "local_devices", lambda: [DEVICE] * 2)
    assert run("--backend=xla", "--mode=strong-sequence", "--shape=1x1x33x16x16") == 2
    assert (
        "33 steps of shape 1x1x33x16x16 are not a multiple of 2 devices" in capsys.readouterr().err
    )
