"""The benchmarks as programs: wrong requests, exit codes."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import benchmark_runs
import jax
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PROGRAM = """
import command
define_flags = lambda define: define.shared(repeats=3)
command.main(define_flags, lambda options: options.repeats)
"""


LINES = """
--no_such_flag: Unknown command line flag 'no_such_flag'
--repeats=0: flag --repeats=0: 0 is not a positive integer
repeats=4: unexpected argument repeats=4
--repeats=7:
"""


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_a_wrong_command_line_is_one_line_and_exit_code_2(tmp_path, line):
    program = tmp_path / "stand_in.py"
    program.write_text(PROGRAM)
    argument, _, message = line.partition(":")
    process = subprocess.run(
        [sys.executable, program, argument],
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS)},
        capture_output=True,
        text=True,
    )
    expected = (2, f"stand_in:{message}\n") if message else (7, "")
    assert (process.returncode, process.stderr, process.stdout) == (*expected, "")


# program, arguments: what the message has.
REQUESTS = f"""
compile_report --device=K80: flag --device=K80: unknown K80, known are A100,
compile_report --chunk_size=48: chunk_size is 48, expected None or a power of two
compile_report --heads=64: flag --heads=64: cannot read the head sizes '64', expected DHQK/DHV
compile_report --stage=nonsense: no stage nonsense in fwd, there are chunk_gates,
compile_report --direction=step --variant=packed: a step has no variant packed
kernel_benchmark --shape=8k: flag --shape=8k: unknown shape '8k', known are 7b-8k
kernel_benchmark --impl=cuda: flag --impl=cuda: unknown cuda, known are triton
kernel_benchmark --config={{: flag --config={{: Expecting property name
kernel_benchmark --config={{"no":1}}: config.no is no kernel, expected one of triton_
kernel_benchmark --from_jsonl={__file__}: line 1 is no row
kernel_benchmark --impl=mosaic_gpu: mosaic_gpu needs a GPU
kernel_benchmark --stage=chunk_gates --direction=fwbw: a stage has one direction
kernel_benchmark --plot=/no/such/p.png: no folder for /no/such/p.png
kernel_benchmark --jsonl=/no/such/rows: No such file or directory: '/no/such/rows'
layer_benchmark --impl=triton: triton needs a GPU
scaling_benchmark --backend=xla --devices=1,4096: devices, not 1, 4096
scaling_benchmark --devices=2 --mode=strong-sequence --shape=1x1x33x16x16: a multiple of 2 devices
step_benchmark --impl=mosaic_gpu: unknown mosaic_gpu, known are triton, interpret, xla,
tune --backend=triton: there is no GPU here to tune for
tune --backend=interpret: times of interpreted kernels do not belong in mlstm_pallas/tuning
tune --backend=interpret --output=x --log=/no/such/x: No such file or directory: '/no/such/x'
tune --backend=interpret --output=x --shape=1x1x500x65x64: tune S, DHQK, DHV = 512, 80, 64
tune --backend=interpret --output=x --log={__file__}: line 1 is no result of this program
tune --backend=interpret --output={__file__}: is no tuning file
xlstm_lm_benchmark --impl=triton: triton needs a GPU
"""


@pytest.mark.parametrize("request_line", REQUESTS.strip().splitlines())
def test_a_wrong_request_is_one_line_and_exit_code_2(request_line, capsys, monkeypatch, tmp_path):
    if "--devices=2" in request_line and jax.local_device_count() < 2:
        pytest.skip("needs two devices")
    monkeypatch.chdir(tmp_path)
    request, message = request_line.split(": ", 1)
    name, *arguments = request.split()
    program = pytest.importorskip(name) if "_lm_" in name else importlib.import_module(name)
    assert benchmark_runs.run(program, *arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{name}: ")
    assert message in line


def test_after_ctrl_c_what_was_measured_is_there(monkeypatch, tmp_path, capsys):
    program = importlib.import_module("kernel_benchmark")

    def measure(row, *_):
        if row["name"] != "tiny":
            raise KeyboardInterrupt
        row["ms"] = 1.5

    monkeypatch.setattr(program, "measure", measure)
    rows = tmp_path / "rows"
    assert benchmark_runs.run(program, "--shape=tiny,7b-8k", f"--jsonl={rows}") == 130
    assert [record["ms"] for record in benchmark_runs.records(rows)] == [1.5]
    printed = capsys.readouterr()
    *_, line = printed.out.rstrip().splitlines()
    assert " ".join(line.split()).startswith("tiny xla fwd bfloat16 1.500 ")
    assert printed.err == "interrupted\n"
