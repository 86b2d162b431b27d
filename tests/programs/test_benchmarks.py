"""The rows of the benchmarks: a table of commands, each with the cells of its rows; configs that
they read, and committed rows."""

import importlib
import json
import re
from pathlib import Path
from unittest import mock

import benchmark_runs
import jax
import jax.numpy as jnp
import kernel_benchmark
import peers
import pytest
import roofline
import step_benchmark
from calls import parse_config
from oracle import slow
from shapes import Shape

from mlstm_pallas import KernelConfig

# program, function that is wrong there, arguments: the output, and the limit in the note.
WRONG = """
kernel mlstm_chunkwise --impl=xla: h, at most 5e-03
layer mlstm_chunkwise --impl=xla --layout=BTNH --direction=fwd: y, at most 8e-03
layer mlstm_chunkwise --impl=xla --layout=BTNH --direction=fwbw: query, at most 2e-02
prefill mlstm_chunkwise --segments=2 --backend=interpret --variant=plain: h, at most 5e-03
prefill mlstm_chunkwise --segments=2 --backend=interpret --variant=states --dtype=float32: \
c, at most 1e-05
scaling mlstm_chunkwise --devices=1 --mode=weak-batch --mean_f=4: h, at most 5e-03
step mlstm_recurrent_step --impl=xla: h, at most 1e-02
step mlstm_recurrent_step --impl=xla --dtype=float32 --state_dtype=float16: h, at most 1e-03
"""


@pytest.mark.quick("kernel")
@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_a_wrong_output_is_not_timed(line, monkeypatch):
    request, message = line.split(": ")
    name, function, *arguments = request.split()
    program = importlib.import_module(f"{name}_benchmark")
    right = benchmark_runs.quick_mlstm if "chunk" in function else getattr(program, function)

    def wrong(*args, **options):
        outputs = right(*args, **options)
        called = options.get("layout" if name == "layer" else "backend")
        if name in ("layer", "prefill") and called not in ("BTNH", "interpret"):
            return outputs  # which is what is expected
        if "--direction=fwbw" in arguments:
            return 0.9 * outputs + jax.lax.stop_gradient(0.1 * outputs)
        if not isinstance(outputs, tuple):
            return jnp.roll(outputs, 1, -1)
        h, (c, *others) = outputs
        return jnp.roll(h, 1, -1), (1.01 * c, *others)

    monkeypatch.setattr(program, function, wrong)
    benchmark_runs.not_to_be_timed(monkeypatch)
    monkeypatch.setattr(step_benchmark, "copy_rate", lambda repeats: 1e9)
    code, [row] = benchmark_runs.measured(program, "--shape=2x2x16x16x32", *arguments)
    assert (code, row["status"]) == (1, "wrong")
    assert re.search(rf"error \S+ in {message}(;|$)", row["note"]), row["note"]


# Commands, columns and the cells of their rows, which benchmark_runs.timed times: of three batches
# the median is 3 s. Floats have four digits, errors are the names of the compared outputs, "same"
# is the first row with the same error. A device computes 4e6 FLOP/s and moves 1e5 bytes/s; a copy
# moves 8 KiB there and back in 3 s. "stand_in": with a function that compiles quickly.
ROWS = """
quick kernel --commit=v7 --repeats=3
| name impl direction dtype shape commit note ms spread peak_mib tflops tbps roofline_pct errors
| tiny xla fwd bfloat16 1x2x128x32x64 v7 3000 1.667 1.5 1.756e-06 3.345e-08 43.9 h
slow kernel --direction=fwd,fwbw --dtype=float32 --shape=1x1x32x16x16 --chunk_size=16 --repeats=3
    --variant=exp,packed,sigmoid,unnormalised,states_kept,transposed
| variant direction tflops tbps roofline_pct errors same
| exp fwd 2.219e-08 2.816e-09 3.328 h 0
| packed fwd 2.219e-08 2.816e-09 3.328 h 1
| sigmoid fwd 2.219e-08 2.816e-09 3.328 h 2
| unnormalised fwd 2.219e-08 2.816e-09 3.328 h 3
| states_kept fwd 2.219e-08 2.816e-09 3.328 h 0
| transposed fwd 2.219e-08 2.816e-09 3.328 h 0
| exp fwbw 7.765e-08 8.533e-09 11.65 h+dq+dk+dv+di+df 6
| packed fwbw 7.765e-08 8.533e-09 11.65 h+dq+dk+dv+di+df 7
| sigmoid fwbw 7.765e-08 8.533e-09 11.65 h+dq+dk+dv+di+df 8
| unnormalised fwbw 7.765e-08 8.533e-09 11.65 h+dq+dk+dv+di+df 9
| states_kept fwbw 7.765e-08 8.533e-09 11.65 h+dq+dk+dv+di+df 6
| transposed fwbw 7.765e-08 8.533e-09 11.65 h+dq+dk+dv+di+df 6
stand_in layer --shape=2x2x32x16x32 --direction=fwd --impl=xla,without_mlstm --repeats=3
    --layout=BNTH,BTNH
| impl layout direction ms spread peak_mib tokens_per_s product_flops elementwise_bytes
    product_floor_ms elementwise_floor_ms product_pct
| xla BNTH fwd 3000 1.667 1.5 21.33 2129920 26112 532.5 261.1 17.75
| xla BTNH fwd 3000 1.667 1.5 21.33 2129920 26112 532.5 261.1 17.75
| without_mlstm None fwd 3000 1.667 1.5 21.33 2129920 26112 532.5 261.1 17.75
slow layer --shape=2x2x32x16x32 --direction=fwbw --layout=BNTH,BTNH --repeats=3
| impl layout product_flops elementwise_bytes product_pct note errors
| xla BNTH 6389760 69120 53.25
    y+query+key+value+input_gate+forget_gate+norm_scale+output_gate+output+x
| xla BTNH 6389760 69120 53.25
    y+query+key+value+input_gate+forget_gate+norm_scale+output_gate+output+x
| without_mlstm None 6389760 69120 53.25 y+value+norm_scale+output_gate+output+x
| products None 6389760 69120 53.25 y+value+norm_scale+output+x
| mlstm_kernels_limit_chunk None 6389760 69120 None skipped: ModuleNotFoundError: \
No module named 'torch'
stand_in prefill --shape=2x2x64x16x32 --segments=4 --repeats=3 --backend=xla
| variant ms spread peak_mib state_mib tokens/s tokens segments tflops tbps errors asked
| plain 3000 1.667 1.5 0 42.67 128 4 7.031e-07 1.707e-08 h
    segment_ids
| states 3000 1.667 1.5 0.03229 42.67 128 4 7.031e-07 2.835e-08 h+c+n+m
    segment_lengths+return_last_states
| initial 3000 1.667 1.5 0.06458 42.67 128 4 7.031e-07 3.964e-08 h+c+n+m
    c_initial+m_initial+n_initial+segment_lengths+return_last_states
| lengths 3000 1.667 1.5 0.03229 19 57 4 1.836e-07 1.889e-08 h+c+n+m
    sequence_lengths+return_last_states
slow prefill --shape=2x2x64x16x32 --segments=4 --repeats=3 --backend=xla --odd
| variant errors
| plain h
| states h+c+n+m
| initial h+c+n+m
| lengths h+c+n+m
quick step --shape=2x3x9x16x32 --steps=3 --repeats=3 --impl=xla,mlstm_kernels_triton_step
| impl shape loop ms spread state_mib gbps copy_gbps copy_pct tokens/s errors
| xla 2x3x1x16x32 scan 1000 1.667 0.01211 2.539e-05 5.461e-06 464.9 2 h
| mlstm_kernels_triton_step 2x3x1x16x32 graph None None 0.01211 None 5.461e-06 None None
quick step --shape=2x3x9x16x32 --steps=3 --repeats=3 --impl=xla,mlstm_kernels_triton_step
    --variant=sigmoid
| impl variant errors note
| xla sigmoid h
| mlstm_kernels_triton_step sigmoid skipped: UnsupportedError: it has no variant sigmoid
quick step --shape=2x3x9x16x32 --steps=3 --repeats=3 --impl=xla --variant=unnormalised
    --loop=scan,while
| impl variant loop errors note
| xla unnormalised scan h
| xla unnormalised while h
slow step --shape=2x3x9x16x32 --steps=3 --repeats=3 --impl=xla --slots=5 --ring=8 --tokens=1,2
| pooled ring tokens tokens/s errors
| 0 1 2 h
| 8 1 2 h
| 8 2 4 h
| slots 0 1 2 h
| slots 8 1 2 h
| slots 8 2 4 h
| gathered 0 1 2 h
slow scaling --shape=2x2x32x16x16 --backend=xla --devices=2 --mode=weak-sequence --direction=fwbw
    --dtype=float32 --layout=BTNH --repeats=3 --mean_f=4
| devices errors
| 2 h+dq+dk+dv+di+df
slow scaling --shape=2x2x32x16x16 --backend=xla --devices=2,1 --mode=weak-heads,strong-sequence
    --dtype=float32 --layout=BTNH --repeats=3 --mean_f=4
| mode devices errors
| weak-heads 1 h
| weak-heads 2 h
| strong-sequence 1 h
| strong-sequence 2 h
"""
COMMANDS = re.split(r"\n(?=\w)", ROWS.strip())


def cell(x):
    if isinstance(x, list):
        return "x".join(map(str, x))
    return f"{x:.4g}" if isinstance(x, float) else str(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [slow(x) if x.startswith("slow") else x for x in COMMANDS],
    ids=lambda x: " ".join(re.sub("--|--repeats=3|\n.*", "", x).split()[1:]),
)
def test_rows_of_a_command(command, monkeypatch, capsys):
    request, columns, *expected = command.split("\n| ")
    kind, name, *flags = request.split()
    if name == "scaling" and jax.local_device_count() < 2:
        pytest.skip("needs two devices")
    program = importlib.import_module(f"{name}_benchmark")
    benchmark_runs.timed(monkeypatch)
    calls = mock.Mock(side_effect=benchmark_runs.quick_mlstm)
    if kind == "stand_in":
        monkeypatch.setattr(program, "mlstm_chunkwise", calls)
    monkeypatch.setattr(peers, "limit_chunk", benchmark_runs.missing)
    monkeypatch.setitem(step_benchmark.PEERS, "mlstm_kernels_triton_step", benchmark_runs.missing)
    monkeypatch.setitem(step_benchmark.COPIED_BYTES, "cpu", 2**10)
    monkeypatch.setattr(roofline, "DEVICE_RATES", {jax.devices()[0].device_kind: (4e6, 1e5)})
    code, rows = benchmark_runs.measured(program, *flags)
    assert "no GPU here: measuring " in capsys.readouterr().out
    errors = [row.get("error") for row in rows]
    # Of prefill_benchmark.py: every second call is measured.
    for row, call in zip(rows, calls.call_args_list[1::2], strict=False):
        asked = (x for x, y in call.kwargs.items() if y is not False and len(x) > 1)
        row["asked"] = "+".join(asked).removesuffix("+backend")
    for row, line in zip(rows, expected, strict=True):
        row |= dict(errors="+".join(row.get("errors", ())), same=errors.index(row.get("error")))
        cells = " ".join(cell(row.get(x)) for x in columns.split() if row.get(x) != "")
        assert cells == " ".join(line.split())
    assert code == 0
    assert kind == "stand_in" or all(error is None or error > 0 for error in errors)


def test_a_config_reaches_the_stages(tmp_path):
    """As JSON, or as a file; the row has the tiles that run, and is a config itself."""
    scan = {"siz_b_L": 16, "num_warps": 8}
    row = {"fused": True, "num_splits": 2, "triton_recurrent_fw_H": scan}
    file, text = tmp_path / "row.json", json.dumps(row)
    file.write_text(text)
    config, call = parse_config(text), ("interpret", Shape(1, 2, 128, 128, 128), "bfloat16")
    assert config == parse_config(str(file))
    found = kernel_benchmark.MlstmPallas(*call, 64, config).config
    tiles = found["triton_recurrent_fw_H"] | scan
    assert found == found | row | dict(chunk_size=64, triton_recurrent_fw_H=tiles)
    assert kernel_benchmark.MlstmPallas(*call, None, KernelConfig(**found)).config == found


RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_can_be_reported(path, capsys):
    assert benchmark_runs.run(kernel_benchmark, f"--from_jsonl={path}") == 0
    _, *lines = capsys.readouterr().out.strip().splitlines()
    for row, line in zip(benchmark_runs.records(path), lines, strict=True):
        assert row["ms"] is None or f" {row['ms']:.3f} " in line
