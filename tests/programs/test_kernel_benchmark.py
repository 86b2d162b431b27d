"""The kernel benchmark: what outputs are checked against, refusals, records, reports."""

import functools
import json
from pathlib import Path

import benchmark_runs
import kernel_benchmark
import peers
import pytest
import runner
from benchmark_runs import records
from calls import parse_config
from oracle import needs_mosaic_gpu
from shapes import Shape

from mlstm_pallas import KernelConfig

WIDE = Shape(1, 2, 128, 128, 128)
measured = functools.partial(benchmark_runs.measured, kernel_benchmark, "--repeats=1")


# ---------------- refusals


class Doubling(peers.JaxImplementation):
    """A stand-in for a peer: (times q, gradient * dh), whose oracle is (2 q, 2 dh)."""

    name, oracle = "doubling", staticmethod(lambda q: 2 * q)

    def oracle_arguments(self, inputs):
        return inputs[:1], inputs.dh

    def computation(self, inputs, direction):
        return lambda q, dh: (self.times * q, self.gradient * dh), (inputs.q, inputs.dh)


# Factors, the outputs that are checked, if not all: the note. The gradient of the first is known to
# be another.
PEERS = """
2 3 h: other function
2 3: wrong: error 5.0e-01 in dq, at most 2e-02
nan 2: wrong: not finite
"""


@pytest.mark.parametrize("line", PEERS.strip().splitlines())
def test_a_wrong_output_is_not_timed(line, monkeypatch, capsys):
    peer, note = line.split(": ", 1)
    times, gradient, *checked = peer.split()
    peer = dict(times=float(times), gradient=float(gradient), checked=checked)
    monkeypatch.setitem(peers.PEERS, "doubling", type("Peer", (Doubling,), peer))
    wrong = note.startswith("wrong")
    [benchmark_runs.timed, benchmark_runs.not_to_be_timed][wrong](monkeypatch)
    request = "--direction=fwbw", "--shape=1x1x16x16x16", "--repeats=3"
    code, [record] = measured("--impl=doubling", *request)
    assert (code, record["note"]) == (wrong, note)
    assert note in capsys.readouterr().out


# ---------------- records


def test_a_config_reaches_the_stages(tmp_path):
    """As JSON, or as a file; the row has the tiles that run, and is a config itself."""
    scan = {"siz_b_L": 16, "num_warps": 8}
    row = {"fused": True, "num_splits": 2, "triton_recurrent_fw_H": scan}
    file, text = tmp_path / "row.json", json.dumps(row)
    file.write_text(text)
    config = parse_config(text)
    assert config == parse_config(str(file))
    build = functools.partial(kernel_benchmark.MlstmPallas, "interpret", WIDE, "bfloat16")
    found = build(64, config).config
    tiles = found["triton_recurrent_fw_H"] | scan
    assert found == found | row | dict(chunk_size=64, triton_recurrent_fw_H=tiles)
    assert build(None, KernelConfig(**found)).config == found


@pytest.mark.slow
@needs_mosaic_gpu
@pytest.mark.usefixtures("interpreted")
def test_a_stage_on_mosaic_gpu_by_itself(monkeypatch):
    """What it has no kernel for is skipped."""
    monkeypatch.setattr(runner, "NEED_GPU", ())
    stages = "--stage=parallel_fw_P,recurrent_fw_H,parallel_bw_dP"
    request = stages, "--impl=mosaic_gpu", "--chunk_size=64", f"--shape={WIDE}"
    code, (scores, scan, none) = measured(*request)
    assert code == 0
    assert "mosaic_gpu_recurrent_fw_H" in scan["config"]
    assert {*scores["errors"]} == {"matP", "keys", "vecR", "vecZ"}
    assert {*scan["errors"]} == {"matH", "matC_last"}
    message = "skipped: UnsupportedError: parallel_bw_dP has no mosaic_gpu kernel"
    assert none["note"].startswith(message)


# ---------------- reports


RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_can_be_reported(path, capsys):
    assert benchmark_runs.run(kernel_benchmark, f"--from_jsonl={path}") == 0
    _, *lines = capsys.readouterr().out.strip().splitlines()
    for row, line in zip(records(path), lines, strict=True):
        assert row["ms"] is None or f" {row['ms']:.3f} " in line
