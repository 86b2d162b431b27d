"""The compile report, and through it: every stage of the default configs compiles for H200 and A100
and fits them."""

import json
import os
from importlib import resources

import compile_report
import jax.numpy as jnp
import pytest
import roofline
from absl import flags
from oracle import HELPERS

from mlstm_pallas import KernelConfig, dispatch
from mlstm_pallas.call_spec import CallSpec
from mlstm_pallas.config import config_for, tuned_rows
from mlstm_pallas.normaliser import DEFAULT_NORMALISER
from mlstm_pallas.problem import make_problem
from mlstm_pallas.stages import STAGES

DTYPES = ("bfloat16", "float32")

# Every stage, head size, dtype and device, and the stage that takes most shared memory of each pair
# of dtype and device, in few compilations.
COMPILED = (
    ("chunk_gates", (64, 64), "bfloat16", "H200"),
    ("stabiliser_scan", (64, 64), "bfloat16", "H200"),
    ("recurrent_fw_C", (256, 512), "float32", "A100"),
    ("parallel_fw_H", (256, 512), "bfloat16", "A100"),
    # Devices with 99 KiB, of which the heuristic takes most here.
    ("parallel_fw_H", (256, 256), "bfloat16", "A10"),
    ("parallel_fw_H", (256, 256), "bfloat16", "RTX5090"),
    ("recurrent_fw_C", (1024, 1024), "float32", "L4"),
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
    ("recurrent_step", (256, 512), "bfloat16", "H200"),
)

# (device, DHQK, DHHV, dtype) of every tuned row.
NAMES = {device.kind: name for name, device in compile_report.DEVICES.items()}
TUNED = [
    (NAMES[table["device"]], row["DHQK"], row["DHHV"], row["dtype"])
    for table in (
        json.loads(file.read_text())
        for file in (resources.files("mlstm_pallas") / "tuning").iterdir()
        if file.suffix == ".json"
    )
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


TWICE = """\
ptxas info    : (C7519) warpgroup.arrive is injected in around line 3057 by compiler to allow use of registers in GMMA
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources
ptxas warning : Registers are spilled to local memory in function 'dQKV', 116 bytes spill stores, 164 bytes spill loads
ptxas info    : Function properties for dQKV
    160 bytes stack frame, 116 bytes spill stores, 164 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""  # noqa: E501, as ptxas writes them
RESOURCES = (
    "Resources(smem_scratch_bytes=231424, tmem_scratch_cols=0, "
    "barrier_counts=Counter({ClusterBarrier(collective_dims=(<Dimension.x: 0>,), "
    "arrival_count=2, num_barriers=4, leader_tracked=False): 1, Barrier(arrival_count=2, "
    "num_barriers=2, orders_tensor_core=False): 6}))"
)


def case_id(*case):
    stage, (DHQK, DHHV), dtype, device = case
    return f"{stage}-{DHQK}_{DHHV}-{dtype}-{device}"


def spec_of(device, DHQK, DHHV, dtype, config=None):
    """Of the calls in the report."""
    config = config_for(
        DHQK,
        DHHV,
        8192,
        jnp.dtype(dtype),
        device_kind=compile_report.DEVICES[device].kind,
        explicit=config,
    )
    problem = make_problem(
        (compile_report.BATCH, compile_report.NUM_HEADS, 8192, DHQK), DHHV, config.L, pad_heads=True
    )
    return CallSpec(problem, config, jnp.dtype(dtype), DEFAULT_NORMALISER)


@pytest.fixture
def lowers_only(monkeypatch):
    monkeypatch.setattr(compile_report, "compile_kernel", lambda *_: usage(shared_bytes=0))


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


@pytest.mark.parametrize(
    ("log", "expected"),
    [(NO_SPILL, (168, 0, 0)), (SPILL, (255, 876, 732)), (TWICE, (168, 116, 164))],
)
def test_the_log_of_ptxas_is_parsed(log, expected):
    assert compile_report.parse_ptxas(log) == expected


def test_messages_of_ptxas_about_products():
    assert compile_report._messages(TWICE) == dict(
        wgmma_serialized=True, messages=("C7512", "C7519")
    )
    assert compile_report._messages(SPILL) == dict(wgmma_serialized=False, messages=())


def test_the_resources_of_a_mosaic_gpu_kernel_are_parsed():
    assert compile_report.parse_resources(RESOURCES) == 231424 + 8 * (4 + 2 * 6)
    with pytest.raises(ValueError, match="no shared memory"):
        compile_report.parse_resources("Resources()")


def test_a_log_of_ptxas_without_numbers_is_refused():
    with pytest.raises(ValueError, match="no registers or spills"):
        compile_report.parse_ptxas("ptxas info    : 11 bytes gmem\n")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--device=K80", "unknown device 'K80', known are A100, "),
        ("--chunk_size=48", "chunk_size is 48, expected None or a power of two"),
        ("--stage=nonsense", "no stage nonsense in fwd, there are chunk_gates, "),
        (
            '--config={"nonsense": 1}',
            "--config: unknown nonsense, known are chunk_size, fused_min_heads, chunk_gates, ",
        ),
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


@pytest.mark.usefixtures("lowers_only")
@pytest.mark.parametrize(
    ("DHQK", "DHHV", "device"),
    [(64, 64, "H200"), (256, 512, "H200"), pytest.param(256, 512, "A100", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_stage_lowers(DHQK, DHHV, device, dtype):
    """With tuned tiles, and without any."""
    rows = list(compile_report.report(device, [(DHQK, DHHV)], [dtype], direction="fwbw"))
    assert [row.cause for row in rows if row.cause] == []
    spec = spec_of(device, DHQK, DHHV, dtype)
    assert {row.stage for row in rows} - HELPERS == {*spec.stages}
    assert all(row.num_warps > 0 and row.grid for row in rows)
    launches = {name: (x.tiles, x.L) for name, x in spec.kernels}
    for row in rows:
        assert bool(row.config) == (row.stage in STAGES)
        if row.stage in STAGES:
            (tiles, L), kernel = launches[row.stage], dispatch.configured(row.stage)
            assert row.chunk_size == L
            problem = spec.problem.in_chunks_of(L)
            tiles = kernel.clamp(tiles, problem)
            assert row.config == {field: getattr(tiles, field) for field in kernel.search}


@pytest.mark.usefixtures("lowers_only")
@pytest.mark.parametrize("fused_min_heads", [0, 1], ids=["materialised", "fused"])
def test_heads_that_are_no_powers_of_two_lower(fused_min_heads):
    config = KernelConfig(fused_min_heads=fused_min_heads)
    rows = list(
        compile_report.report("H200", [(192, 320)], ["bfloat16"], direction="fwbw", config=config)
    )
    assert [row.cause for row in rows if row.cause] == []
    assert {row.stage for row in rows} - HELPERS == {
        *spec_of("H200", 192, 320, "bfloat16", config).stages
    }


@pytest.mark.usefixtures("lowers_only")
@pytest.mark.parametrize("variant", ["packed", "sigmoid", "unnormalised", "BTNH"])
def test_every_variant_lowers(variant):
    rows = list(
        compile_report.report(
            "H200", [(64, 64)], ["bfloat16"], seqlen=1024, direction="fwbw", variant=variant
        )
    )
    assert [row.cause for row in rows if row.cause] == []
    assert ("stabiliser_scan" in {row.stage for row in rows}) == (
        variant in ("exp", "packed", "BTNH")
    )


@pytest.mark.usefixtures("lowers_only")
def test_a_config_of_the_command_line_reaches_the_kernels(capsys):
    config = {"fused_min_heads": 1, "recurrent_fw_H": {"siz_b_LKV": 16, "siz_b_loop": 256}}
    assert (
        run("--heads=256/64", "--dtype=bfloat16", "--jsonl", f"--config={json.dumps(config)}") == 0
    )
    rows = {row["stage"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {rows[name]["chunk_size"] for name, stage in STAGES.items() if stage.fused} == {16}
    assert rows["recurrent_fw_H"]["config"]["siz_b_loop"] == 256


def test_one_kernel_too_large_and_one_that_fails_leave_the_others(monkeypatch, capsys):
    def compile_kernel(ir, *_):
        if "recurrent_fw_C" in ir:
            raise compile_report.CompileError("register allocation failed")
        return usage(shared_bytes=164 * 1024 if "parallel_fw_H" in ir else 163 * 1024)

    monkeypatch.setattr(compile_report, "compile_kernel", compile_kernel)
    request = "--heads=64/64", "--dtype=bfloat16", "--jsonl"
    assert run("--device=A100", *request) == 1
    causes = {
        row["stage"]: row["cause"] for row in map(json.loads, capsys.readouterr().out.splitlines())
    }
    assert causes["chunk_gates"] == ""
    assert causes["recurrent_fw_C"] == "register allocation failed"
    assert (
        causes["parallel_fw_H"]
        == f"takes {164 * 1024} bytes of shared memory, the device has {163 * 1024}"
    )
    assert run("--device=H200", "--stage=parallel_fw_H", *request) == 0


def test_a_call_that_does_not_trace_leaves_the_other_cases(monkeypatch):
    def lowered_kernels(fn, q, *_, device):
        if q.shape[-1] == 64:
            raise NotImplementedError("two\nlines")
        return [
            compile_report.Lowered("parallel_fw_H", (1, 2, 3), 4, 2, cause="LoweringError: flip")
        ]

    monkeypatch.setattr(compile_report, "lowered_kernels", lowered_kernels)
    rows = list(compile_report.report("H200", [(64, 64), (128, 256)], ["bfloat16"]))
    assert [(row.DHQK, row.cause) for row in rows] == [
        (64, "NotImplementedError: two lines"),
        (128, "LoweringError: flip"),
    ]
    assert rows[1].grid == (1, 2, 3)
    for row in rows:
        assert row.cause in compile_report.table_row(row)


@pytest.mark.slow
def test_a_crash_of_the_compiler_is_a_cause(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(compile_report, "_compile", crash)
    with pytest.raises(
        compile_report.CompileError, match="the compiler crashed; Assertion `false' failed"
    ):
        compile_report.compile_kernel("crashes", 4, 2, 90)
    monkeypatch.undo()
    with pytest.raises(compile_report.CompileError, match="error: custom op 'nonsense' is unknown"):
        compile_report.compile_kernel("nonsense", 4, 2, 90)


def test_every_kernel_is_compiled():
    assert {stage for stage, *_ in COMPILED} >= {*STAGES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "heads", "dtype", "device"), COMPILED, ids=[case_id(*case) for case in COMPILED]
)
def test_compiles_and_fits(stage, heads, dtype, device):
    pytest.importorskip("triton")
    facts = STAGES.get(stage)
    config = KernelConfig(fused_min_heads=int(facts is not None and facts.fused))
    direction = "step" if facts and facts.decode else "fwbw" if facts and facts.backward else "fwd"
    rows = list(
        compile_report.report(
            device, [heads], [dtype], stages=[stage], direction=direction, config=config
        )
    )
    assert rows
    for row in rows:
        assert row.cause == ""
        assert row.usage.shared_bytes <= compile_report.DEVICES[device].shared_bytes
        assert 16 <= row.usage.registers <= 255
        multiplies = (
            facts
            and not facts.decode
            and roofline.COSTS[row.stage](spec_of(device, *heads, dtype).problem, 2).flops > 0
        )
        if dtype == "bfloat16" and multiplies:
            assert (row.usage.wgmma if device == "H200" else row.usage.mma) > 0, "no tensor cores"


@pytest.mark.slow
@pytest.mark.parametrize(("device", "DHQK", "DHHV", "dtype"), TUNED)
def test_every_tuned_row_compiles_and_fits(device, DHQK, DHHV, dtype):
    """All kernels of forward and backward; ``cause`` says what does not fit."""
    pytest.importorskip("triton")
    [row] = [
        x
        for x in tuned_rows(compile_report.DEVICES[device].kind)
        if (x["DHQK"], x["DHHV"], x["dtype"]) == (DHQK, DHHV, dtype)
    ]
    result = list(compile_report.report(device, [(DHQK, DHHV)], [dtype], direction="fwbw"))
    assert [(x.stage, x.cause) for x in result if x.cause] == []
    assert {x.stage for x in result} - HELPERS == {*spec_of(device, DHQK, DHHV, dtype).stages}
    for x in result:
        if x.stage in STAGES:
            tiles = {
                field: value
                for field, value in row.get(x.stage, {}).items()
                if field != "mosaic_gpu"
            }
            assert tiles.items() <= x.config.items(), x.stage
