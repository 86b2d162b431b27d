"""The compile report, and through it: every stage of the default configs compiles for H200 and A100 and fits them."""

import itertools
import json
import os
from importlib import resources

import compile_report
import jax.numpy as jnp
import pytest
from absl import flags
from oracle import HELPERS

from mlstm_pallas import KernelConfig, StageConfig, api
from mlstm_pallas.config import CHUNK_OF, PLANS, STAGES, WALKS, config_for, config_from_row, tuned_rows
from mlstm_pallas.problem import make_problem

HEADS = ((64, 64), (128, 256), (256, 512))
DTYPES = ("bfloat16", "float32")
DEVICES = ("H200", "A100")

# Every value of stage, head size, dtype and device, and for each pair of dtype and device the stage that takes most shared memory, in as
# few compilations as that takes.
COMPILED = (
    ("chunk_gates", (64, 64), "bfloat16", "H200"),
    ("border_maxima", (64, 64), "bfloat16", "H200"),
    ("recurrent_fw_C", (64, 64), "bfloat16", "H200"),
    ("recurrent_fw_C", (128, 256), "float32", "H200"),
    ("recurrent_fw_C", (256, 512), "float32", "A100"),
    ("parallel_fw_H", (64, 64), "bfloat16", "H200"),
    ("parallel_fw_H", (128, 256), "float32", "H200"),
    ("parallel_fw_H", (256, 512), "bfloat16", "A100"),
    # Devices with 99 KiB, of which the heuristic takes most here.
    ("parallel_fw_H", (256, 256), "bfloat16", "A10"),
    ("parallel_fw_H", (256, 256), "bfloat16", "RTX5090"),
    ("recurrent_fw_C", (1024, 1024), "float32", "L4"),
    ("parallel_bw_dP", (64, 64), "bfloat16", "L4"),
    ("parallel_bw_dP", (256, 512), "bfloat16", "H200"),
    ("parallel_bw_dP", (128, 256), "float32", "A100"),
    ("recurrent_bw_dC", (256, 512), "bfloat16", "H200"),
    ("parallel_bw_dQKV", (64, 64), "bfloat16", "L4"),
    ("parallel_bw_dQKV", (256, 512), "bfloat16", "H200"),
    ("parallel_bw_dQKV", (256, 512), "float32", "RTX4090"),
    ("parallel_fw_P", (256, 512), "float32", "H200"),
    ("recurrent_fw_H", (256, 512), "bfloat16", "H200"),
    ("recurrent_fw_H", (256, 512), "float32", "RTX4090"),
    ("recurrent_fw_H", (128, 256), "bfloat16", "RTX5090"),
    ("parallel_bw_P", (128, 256), "float32", "H200"),
    ("recurrent_bw_dQ", (64, 256), "bfloat16", "H200"),
    ("recurrent_bw_dK", (64, 256), "float32", "RTX4090"),
    ("recurrent_bw_dV", (256, 512), "bfloat16", "A100"),
)

MULTIPLIES = {"recurrent_fw_C", "parallel_fw_H", "parallel_bw_dP", "recurrent_bw_dC", "parallel_bw_dQKV", *WALKS}

# (name of the device here, DHQK, DHHV, dtype) of every tuned row.
NAMES = {device.kind: name for name, device in compile_report.DEVICES.items()}
TUNED = [
    (NAMES[table["device"]], row["DHQK"], row["DHHV"], row["dtype"])
    for table in (json.loads(file.read_text()) for file in (resources.files("mlstm_pallas") / "tuning").iterdir() if file.suffix == ".json")
    for row in table["rows"]
]

NO_SPILL = """\
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function 'parallel_fw_H' for 'sm_90a'
ptxas info    : Function properties for parallel_fw_H
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas info    : Compile time = 116.005 ms
"""
SPILL = """\
ptxas-blackwell info    : 11 bytes gmem
ptxas-blackwell info    : Compiling entry function 'parallel_fw_H' for 'sm_100a'
ptxas-blackwell info    : Function properties for parallel_fw_H
    744 bytes stack frame, 876 bytes spill stores, 732 bytes spill loads
ptxas-blackwell info    : Used 255 registers, used 1 barriers, 744 bytes cumulative stack size
ptxas-blackwell info    : Compile time = 471.360 ms
"""


def case_id(*case):
    stage, (DHQK, DHHV), dtype, device = case
    return f"{stage}-{DHQK}_{DHHV}-{dtype}-{device}"


def usage(shared_bytes):
    return compile_report.Usage(128, 0, 0, shared_bytes, 4, 0, 24, False, 0.1)


def run(*arguments):
    values = flags.FlagValues()
    compile_report.define_flags(values)
    values(["compile_report", *arguments])
    return compile_report.run(values)


def crash(*_):
    os.write(2, b"python: SLPVectorizer.cpp:1: Assertion `false' failed.\n")
    os._exit(1)


@pytest.mark.parametrize(("log", "expected"), [(NO_SPILL, (168, 0, 0)), (SPILL, (255, 876, 732))], ids=["no_spill", "spill"])
def test_parses_what_ptxas_says(log, expected):
    assert compile_report.parse_ptxas(log) == expected


def test_an_output_of_ptxas_without_numbers_is_refused():
    with pytest.raises(ValueError, match="no registers or spills"):
        compile_report.parse_ptxas("ptxas info    : 11 bytes gmem\n")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--device=K80", "unknown device 'K80', known are A100, "),
        ("--heads=64x64", "cannot read the head sizes '64x64'"),
        ("--dtype=float16", "unknown dtype 'float16', known are "),
        ("--chunk_size=48", "chunk_size is 48, expected None or a power of two"),
        ("--stage=nonsense", "no stage nonsense in fwd, there are chunk_gates, "),
        ('--config={"stateless": true}', "--config: unknown stateless, known are chunk_size, stateless_forward, "),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(argument, message, capsys):
    assert run(argument) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_without_triton_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(compile_report.importlib.util, "find_spec", lambda name: None)
    compile_report.compile_kernel.cache_clear()
    assert run("--heads=64/64") == 2
    assert "mlstm_pallas[test]" in capsys.readouterr().err


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids="{0[0]}_{0[1]}".format)
def test_every_stage_lowers(heads, dtype, device, monkeypatch):
    monkeypatch.setattr(compile_report, "compile_kernel", lambda *_: usage(shared_bytes=0))
    rows = list(compile_report.report(device, [heads], [dtype], direction="fwbw"))
    assert [row.cause for row in rows if row.cause] == []
    config = config_for(*heads, 8192, jnp.dtype(dtype), device_kind=compile_report.DEVICES[device].kind)
    passes = config.passes(make_problem((1, 8, 8192, heads[0]), heads[1], config.L, pad_heads=True))
    assert {row.stage for row in rows} - HELPERS == {*itertools.chain(*passes)}
    assert all(row.num_warps > 0 and row.grid for row in rows)
    assert all(row.config for row in rows if row.stage in STAGES)


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_lowers(plan, monkeypatch):
    """Heads that are no powers of two."""
    monkeypatch.setattr(compile_report, "compile_kernel", lambda *_: usage(shared_bytes=0))
    config = config_for(192, 320, 8192, jnp.dtype("bfloat16"), device_kind="NVIDIA H200", explicit=KernelConfig(**{plan: True}))
    rows = list(compile_report.report("H200", [(192, 320)], ["bfloat16"], direction="fwbw", config=config))
    assert [row.cause for row in rows if row.cause] == []
    problem = make_problem((1, 8, 8192, 192), 320, config.L, pad_heads=True)
    assert {row.stage for row in rows} - HELPERS == {*itertools.chain(*config.passes(problem))}


def test_a_config_of_the_command_line_reaches_the_kernels(monkeypatch, capsys):
    monkeypatch.setattr(compile_report, "compile_kernel", lambda *_: usage(shared_bytes=0))
    config = {"stateless_forward": True, "recurrent_fw_H": {"siz_b_LKV": 16, "siz_b_loop": 256}}
    assert run("--heads=256/64", "--dtype=bfloat16", "--jsonl", f"--config={json.dumps(config)}") == 0
    rows = {row["stage"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {name: row["chunk_size"] for name, row in rows.items() if name in CHUNK_OF} == {"parallel_fw_P": 16, "recurrent_fw_H": 16}
    assert rows["recurrent_fw_H"]["config"]["siz_b_loop"] == 256


def test_one_kernel_too_large_and_one_that_fails_leave_the_others(monkeypatch, capsys):
    def compile_kernel(ir, *_):
        if "recurrent_fw_C" in ir:
            raise compile_report.CompileError("register allocation failed")
        return usage(shared_bytes=164 * 1024 if "parallel_fw_H" in ir else 163 * 1024)

    monkeypatch.setattr(compile_report, "compile_kernel", compile_kernel)
    request = "--heads=64/64", "--dtype=bfloat16", "--jsonl"
    assert run("--device=A100", *request) == 1
    causes = {row["stage"]: row["cause"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert causes["chunk_gates"] == ""
    assert causes["recurrent_fw_C"] == "register allocation failed"
    assert causes["parallel_fw_H"] == f"takes {164 * 1024} bytes of shared memory, the device has {163 * 1024}"
    assert run("--device=H200", "--stage=parallel_fw_H", *request) == 0


def test_a_call_that_does_not_trace_leaves_the_other_cases(monkeypatch):
    def lowered_kernels(fn, q, *_, device):
        if q.shape[-1] == 64:
            raise NotImplementedError("two\nlines")
        return [compile_report.Lowered("parallel_fw_H", (1, 2, 3), 4, 2, cause="LoweringError: flip")]

    monkeypatch.setattr(compile_report, "lowered_kernels", lowered_kernels)
    rows = list(compile_report.report("H200", [(64, 64), (128, 256)], ["bfloat16"]))
    assert [(row.DHQK, row.cause) for row in rows] == [(64, "NotImplementedError: two lines"), (128, "LoweringError: flip")]
    assert rows[1].grid == (1, 2, 3)
    for row in rows:
        assert row.cause in compile_report.table_row(row)


def test_the_table_has_a_line_for_a_kernel(monkeypatch, capsys):
    monkeypatch.setattr(compile_report, "compile_kernel", lambda *_: usage(shared_bytes=112 * 1024))
    assert run("--heads=256/512", "--dtype=bfloat16", "--stage=parallel_fw_H", "--seqlen=1024", "--chunk_size=64") == 0
    titles, line = capsys.readouterr().out.splitlines()
    assert titles.split()[:4] == ["heads", "dtype", "stage", "L"]
    assert line.split()[:4] == ["256/512", "bfloat16", "parallel_fw_H", "64"]
    assert "112.0/227" in line


@pytest.mark.slow
def test_a_crash_of_the_compiler_is_a_cause(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(compile_report, "_compile", crash)
    with pytest.raises(compile_report.CompileError, match="the compiler crashed; Assertion `false' failed"):
        compile_report.compile_kernel("crashes", 4, 2, 90)
    monkeypatch.undo()
    with pytest.raises(compile_report.CompileError, match="error: custom op 'nonsense' is unknown"):
        compile_report.compile_kernel("nonsense", 4, 2, 90)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "heads", "dtype", "device"), COMPILED, ids=[case_id(*case) for case in COMPILED])
def test_compiles_and_fits(stage, heads, dtype, device):
    pytest.importorskip("triton")
    plan = KernelConfig(stateless_forward=stage in CHUNK_OF, stateless_backward=stage in CHUNK_OF)
    how = dict(direction="fwbw" if "_bw_" in stage else "fwd", config=plan)
    rows = list(compile_report.report(device, [heads], [dtype], stages=[stage], **how))
    assert rows
    for row in rows:
        assert row.cause == ""
        assert row.usage.shared_bytes <= compile_report.DEVICES[device].shared_bytes
        assert 16 <= row.usage.registers <= 255
        if dtype == "bfloat16" and stage in MULTIPLIES:
            assert (row.usage.wgmma if device == "H200" else row.usage.mma) > 0, "no tensor cores"


@pytest.mark.slow
@pytest.mark.parametrize(("device", "DHQK", "DHHV", "dtype"), TUNED)
def test_every_tuned_row_compiles_and_fits(device, DHQK, DHHV, dtype):
    """All kernels of forward and backward; ``cause`` says what does not fit."""
    pytest.importorskip("triton")
    [row] = [x for x in tuned_rows(compile_report.DEVICES[device].kind) if (x["DHQK"], x["DHHV"], x["dtype"]) == (DHQK, DHHV, dtype)]
    found = list(compile_report.report(device, [(DHQK, DHHV)], [dtype], direction="fwbw"))
    assert [(x.stage, x.cause) for x in found if x.cause] == []
    config, problem = config_from_row(row), make_problem((1, 8, 8192, DHQK), DHHV, row["chunk_size"], pad_heads=True)
    assert {x.stage for x in found} - HELPERS == {*itertools.chain(*config.passes(problem))}
    for x in found:
        if x.stage in STAGES:
            assert x.chunk_size == config.problem_of(x.stage, problem).L
            assert row.get(x.stage, {}).items() <= x.config.items(), x.stage


@pytest.mark.slow
def test_tiles_beyond_the_shared_memory_are_reported(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(api, "check_fits", lambda *_: None)
    tiles = StageConfig(siz_b_LQ=128, siz_b_LKV=128, siz_b_DHQK=64, siz_b_DHHV=256, num_warps=8, num_stages=3)
    config = KernelConfig(chunk_size=256, parallel_fw_H=tiles)
    [row] = compile_report.report("A10", [(256, 512)], ["bfloat16"], stages=["parallel_fw_H"], config=config)
    assert row.usage.shared_bytes > compile_report.DEVICES["A10"].shared_bytes
    assert row.cause == f"takes {row.usage.shared_bytes} bytes of shared memory, the device has {99 * 1024}"
