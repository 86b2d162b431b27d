"""The compile report, and through it: every stage of the default configs compiles for H200 and A100
and fits them."""

import benchmark_runs
import compile_report
import costs
import pytest
from calls import config_row
from oracle import HELPERS, param
from plans import plan
from stage_calls import STAGES
from worker import ProcessEnded

from mlstm_pallas import KernelConfig

# All kernels of a gradient for an H200, and for a GPU whose products are mma; for every dtype and
# device, the stage that takes most shared memory.
COMPILED = """
recurrent_fw_C 256/512 float32 A100
parallel_fw_H 256/512 bfloat16 A100
parallel_fw_H 256/256 bfloat16 A10
parallel_fw_H 256/256 bfloat16 RTX5090
recurrent_fw_C 1024/1024 float32 L4
parallel_bw_dP 128/256 float32 A100
parallel_bw_dQKV 64/64 bfloat16 L4
parallel_bw_dQKV 256/512 float32 RTX4090
parallel_fw_P 256/512 float32 H200
recurrent_fw_H 256/512 float32 RTX4090
recurrent_fw_H 128/256 bfloat16 RTX5090
gradient 64/64 bfloat16 H200
gradient 64/128 bfloat16 H200
gradient 128/128 bfloat16 H200
gradient 128/256 bfloat16 H200
gradient 256/256 bfloat16 H200
gradient 256/512 bfloat16 H200
gradient 512/512 bfloat16 H200
gradient 64/128 bfloat16 RTX4090
"""


def usage(shared_bytes=0, spills=0):
    return compile_report.Usage(128, spills, 0, shared_bytes, 4, 0, 24, 0.1)


def checked_rows(device, heads, dtype, stages=(), **options):
    """The rows of a gradient, or of some stages of a call: they have the tiles of the call."""
    heads, options = compile_report.parse_heads(heads), dict(direction="fwbw") | options
    rows = list(compile_report.report(device, [heads], [dtype], stages=stages, **options))
    assert not [(row["stage"], row["note"]) for row in rows if row["note"]]
    spec = compile_report.Call(compile_report.DEVICES[device], *heads, dtype, **options).spec()
    config = config_row(spec)
    for row in rows:
        assert row["num_warps"] > 0
        assert row["grid"]
        if row["stage"] in STAGES:
            assert row["config"] == config[f"triton_{row['stage']}"]
            assert row["num_warps"] == row["config"]["num_warps"]
    of_call = {*spec.plan.forward, *spec.plan.backward} & {*STAGES}
    assert {row["stage"] for row in rows} - HELPERS == {*(stages or of_call)}
    return rows, spec


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "heads", "dtype", "variant", "fields"),
    [
        param("H200", "256/512", "bfloat16", "exp"),
        param("H200", "192/320", "float32", "packed", fused=True),
        param("H200", "64/64", "bfloat16", "unnormalised", fused=False),
        param("A100", "256/512", "float32", "BTNH"),
        param("H200", "192/320", "bfloat16", "sigmoid"),
    ],
)
def test_every_stage_lowers(device, heads, dtype, variant, fields, monkeypatch):
    """Every variant, with heads that are no powers of two."""
    config = KernelConfig(**fields) if fields else None
    monkeypatch.setattr(compile_report, "compile_kernel", lambda *_: usage())
    x = device, heads, dtype
    rows, _ = checked_rows(*x, seqlen=1024, config=config, variant=variant)
    scans = any(row["stage"] == "stabiliser_scan" for row in rows)
    assert scans == (variant in ("exp", "packed", "BTNH"))


@pytest.mark.slow
def test_one_kernel_too_large_and_one_that_fails_leave_the_others(monkeypatch):
    def compile_kernel(ir, *_):
        if "recurrent_fw_C" in ir:
            raise ProcessEnded("register allocation failed")
        return usage(shared_bytes=164 * 1024 if "parallel_fw_H" in ir else 163 * 1024)

    monkeypatch.setattr(compile_report, "compile_kernel", compile_kernel)
    request = compile_report, "--dtype=bfloat16", "--heads=64/64"
    code, rows = benchmark_runs.measured(*request, "--device=A100")
    causes = {row["stage"]: row["note"] for row in rows if row["status"] == "failed"}
    excess = "takes 167936 bytes of shared memory, the device has 166912"
    expected = {"recurrent_fw_C": "register allocation failed", "parallel_fw_H": excess}
    assert (code, causes) == (1, expected)
    assert benchmark_runs.run(*request, "--device=H200", "--stage=parallel_fw_H") == 0


LOGS = {
    "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    "ptxas info    : Used 168 registers, used 1 barriers": ((168, 0, 0), ()),
    "ptxas info    : (C7519) warpgroup.arrive is injected in around line 3057 by compiler to allow "
    "use of registers in GMMA\n"
    "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources\n"
    "ptxas warning : Registers are spilled to local memory in function 'dQKV', 116 bytes "
    "spill stores, 164 bytes spill loads\n"
    "ptxas-blackwell info    : Function properties for dQKV\n"
    "    160 bytes stack frame, 116 bytes spill stores, 164 bytes spill loads\n"
    "ptxas-blackwell info    : Used 168 registers, used 16 barriers, 1 bytes smem": (
        (168, 116, 164),
        ("wgmma serialized", "C7512", "C7519"),
    ),
}
RESOURCES = (
    "Resources(smem_scratch_bytes=231424, tmem_scratch_cols=0, "
    "barrier_counts=Counter({ClusterBarrier(collective_dims=(<Dimension.x: 0>,), "
    "arrival_count=2, num_barriers=4, leader_tracked=False): 1, Barrier(arrival_count=2, "
    "num_barriers=2, orders_tensor_core=False): 6}))"
)


def test_registers_spills_messages_and_shared_memory_are_read():
    """A warning has the spills a second time. A barrier has 8 bytes."""
    for log, expected in LOGS.items():
        assert (compile_report.parse_ptxas(log), compile_report.messages_of(log)) == expected
    assert compile_report.parse_resources(RESOURCES) == 231424 + 8 * (4 + 2 * 6)
    for read in (compile_report.parse_ptxas, compile_report.parse_resources):
        with pytest.raises(ValueError, match=r"^no .*: '11 bytes gmem'"):
            read("11 bytes gmem")


@pytest.mark.slow
@pytest.mark.parametrize("line", COMPILED.strip().splitlines())
def test_compiles_and_fits(line):
    """Kernels for wide heads, and with mma for all, take the shared memory of the plan: at most the
    2 KiB beside the stages more, and no less than half, because mma has its operands of one of two
    or more stages in registers. On Hopper a pipelined loop takes what its stages have."""
    pytest.importorskip("triton")
    stage, heads, dtype, device = line.split()
    options = {}
    if facts := STAGES.get(stage):
        options = dict(
            direction="fwbw" if "_bw_" in stage else "fwd",
            stages=[stage],
            config=KernelConfig(fused=facts.fused),
        )
    rows, spec = checked_rows(device, heads, dtype, **options)
    gpu, sizes = compile_report.DEVICES[device], (1, 8, 8192, *compile_report.parse_heads(heads))
    launches = plan(sizes, gpu.name, dtype, config=options.get("config")).launches
    planned_bytes = {x.stage: x.shared_bytes for x in launches}
    del planned_bytes["chunk_gates"]  # whose 64 bytes are left out
    for row in rows:
        assert row["shared_bytes"] <= gpu.shared_bytes
        assert 16 <= row["registers"] <= 255
        most = planned_bytes.pop(row["stage"], 0)
        if most and (heads == "256/512" or device != "H200"):
            exact = gpu.hopper and row["stage"] != "parallel_fw_P"
            least = most if exact else most // 2
            assert least <= row["shared_bytes"] <= most + 2048, row["stage"]
        products = row["stage"] in STAGES and costs.cost(row["stage"], spec.problem, 2).flops > 0
        if dtype == "bfloat16" and products:
            # wgmma multiplies 64 rows: fewer steps of a chunk may be the rows of none.
            other = 0 if device == "H200" and row["chunk_size"] >= 64 else row["mma"]
            assert row["wgmma"] + other > 0, "no tensor cores"
    assert options or not planned_bytes  # all launches of a gradient
