"""The benchmarks: figures that a hand can check, and what makes an output wrong."""

import math
import re
from types import SimpleNamespace
from unittest import mock

import jax
import kernel_benchmark
import numpy as np
import profiles
import pytest
import roofline
import runner
import scaling_benchmark as scaling
import xlstm_lm_benchmark as lm
from oracle import refused
from shapes import Shape

from mlstm_pallas import KernelConfig

# ---------------- outputs


def test_relative_errors():
    x = np.array([3.0, 4.0])
    errors = [runner.relative_error(*y) for y in ((x, x * 1.25), (x * 1e-30, 0 * x))]
    assert errors == pytest.approx([0.2, 5], rel=1e-12)


@pytest.mark.parametrize(
    ("error", "ours", "status", "note"),
    [
        (runner.WrongOutputError("h"), False, "wrong", "wrong: h"),
        (runner.UnsupportedError("x\ny"), True, "skipped", "skipped: UnsupportedError: x y"),
        (TypeError("x"), True, "failed", "failed: TypeError: x"),
        (TypeError("x"), False, "skipped", "skipped: TypeError: x"),
    ],
)
def test_an_exception_becomes_the_status_of_a_row(error, ours, status, note):
    """A failure of mlstm_pallas is one; a peer that fails is skipped."""
    row = runner.attempt(dict(ms=2), ours, mock.Mock(side_effect=error))
    assert row == dict(ms=2, status=status, note=note)


def test_an_output_is_wrong_beyond_its_limit_or_if_it_is_not_a_number():
    """What has no limit is not compared. A NaN is the error of its row, wherever it stands."""
    row, limits = {}, dict(h=0.1, dq=0.2, dk=0.5)
    runner.check(row, errors := dict(h=0.1, dq=0.1, di=9.0), limits)
    assert row == dict(errors=errors, error=9.0)
    message = "error nan in h, at most 1e-01; error 2.5e-01 in dq, at most 2e-01"
    errors = dict(dk=0.5, h=math.nan, dq=0.25)
    refused(runner.WrongOutputError, message, lambda: runner.check(row, errors, limits))
    assert math.isnan(row["error"])


def test_which_heads_are_checked():
    """The first, a middle and the last one; beyond 32768 steps the last alone."""
    for S, heads in (2**15, [0, 3, 5]), (2**15 + 1, [5]):
        case = kernel_benchmark.Case(Shape(1, 2, S, 128, 128), "float32")
        assert case.checked_heads(6).tolist() == heads


@pytest.mark.parametrize(
    ("losses", "norm", "message"),
    [
        ([10.005, 9.05, 8, 6], 1.01, ""),
        ([10, 9, 7, 7], 1.0, "error 1.0e-01 in loss 2, at most 1e-02"),
        ([10, 9, 8, math.nan], 1.0, "error nan in loss 3, at most 1e-02"),
        ([10.02, 9, 8, 7], 1.0, "error 2.0e-03 in loss 0, at most 1e-03"),
        ([10, 9, 8, 7], 0.9, "error 1.0e-01 in gradient norm, at most 2e-02"),
    ],
)
def test_losses_and_gradient_norms_are_compared(losses, norm, message):
    """Later losses are finite."""
    first = dict(losses=[10.0, 9.0, 8.0, 7.0], gradient_norms=[1.0] * 2)
    row = dict(losses=losses, gradient_norms=[norm] * 2)
    if message:
        refused(runner.WrongOutputError, message, lm.compare, row, first)
    else:
        lm.compare(row, first)


# ---------------- FLOPs, bytes and floors


# FLOPs and bytes in bfloat16: once the arrays that a kernel reads and writes, and products of
# which those within a chunk count for s <= t alone. The fused scan has half the steps of a chunk.
COSTS = """
interpret 2x3x64x16x32 32
    chunk_gates 0 13968
    recurrent_fw_C 393216 76848
    parallel_fw_H 1001472 97536
    parallel_fw_P 202752 76032
    recurrent_fw_H 1191936 124464
    parallel_bw_dP 608256 191232
    recurrent_bw_dC 786432 147552
    parallel_bw_dQKV 1990656 207408
mosaic_gpu 1x64x256x256x512 128
    recurrent_fw_H 9135194112 119669760
    parallel_bw_dQKV 15049162752 160039424
mosaic_gpu 1x64x256x64x128 128
    chunk_gradients 1752170496 26083840
"""


@pytest.mark.parametrize("lines", re.split(r"\n(?! )", COSTS.strip()), ids=lambda x: x[:30])
def test_costs_of_stages(lines):
    request, *expected = lines.splitlines()
    backend, shape, L = request.split()
    shape = Shape(*map(int, shape.split("x")))
    config = KernelConfig(triton_recurrent_fw_H=dict(siz_b_L=32))
    for line in expected:
        stage, *cost = line.split()
        with mock.patch("mlstm_pallas.planning.backend.check_mosaic_gpu"):
            args = stage, backend, shape, "bfloat16", int(L), config
            impl = kernel_benchmark.MlstmPallasStage(*args)
        assert [*impl.phases(shape, 2, "fwd")] == [tuple(map(int, cost))], stage


def test_the_roofline():
    """Of 7b-8k by step and head, in chunks of 128 steps, whichever kernels run; of attention, whose
    6 heads have 15 pairs of 5 steps; and the slower of products and traffic in each phase."""
    steps, inter, triangle, arrays = 8 * 8 * 8192, 2 * 256 * 512, 129, 2 * 2 * (256 + 512)
    phases = (
        (steps * (2 * inter + triangle * (256 + 512)), steps * (arrays + 2 * 4)),
        (steps * (5 * inter + triangle * (3 * 256 + 2 * 512)), steps * (2 * arrays + 6 * 4)),
    )
    shape = Shape(8, 8, 8192, 256, 512)
    assert [roofline.mlstm(shape, 2, x) for x in ("fwbw", "fwd")] == [phases, phases[:1]]
    phases = (90 * 2 * 2 * 16, 4 * 960), (90 * 5 * 2 * 16, 8 * 960)
    assert roofline.attention(2, 3, 5, 16, 2, "fwbw") == phases
    assert roofline.attention(2, 3, 5, 16, 2, "fwd") == phases[:1]
    assert roofline.floor_seconds([roofline.Cost(6, 1), roofline.Cost(1, 8)], 2.0, 4.0) == 5
    rates = [roofline.device_rates("NVIDIA H200", x)[0] for x in ("bfloat16", "float32")]
    assert (rates, roofline.device_rates("cpu", "float32")) == ([790e12, 790e12 / 6], (None, None))


@pytest.mark.slow
def test_parameters_and_flops_of_a_language_model():
    """All parameters, those of matrix products, and the FLOPs of a step of two sequences of 256
    tokens: three times those of the forward products and of the mLSTM in chunks of 128."""
    figures = [(*x.parameters(), x.flops(2, 256)) for x in map(lm.MODELS.get, ("1.3b", "tiny"))]
    assert figures == [(1345865920, 1280180224, 4024631820288), (123848, 115200, 404520960)]


# ---------------- times and memory


def test_efficiencies_are_of_rounds():
    """One device, and two that take 2, 4 and 8 s for the work of one, then 2, 4 and 5 s."""
    of, tokens = Shape(2, 2, 32, 16, 16), {"weak-heads": 16}
    for name, mode in scaling.MODES.items():
        rows = [dict(shape=mode.whole(of, n), devices=n) for n in (1, 2)]
        times = [(1 + mode.grows) * x / 2 for x in (2.0, 4.0, 10.0)]
        scaling.store_times(rows, [[2.0, 4.0, 8.0], times])
        assert [x["ms"] for x in rows] == [4e3, 4e3 if mode.grows else 2e3]
        assert [x["tokens_per_second"] for x in rows] == [16, tokens.get(name, 32)]
        assert [x["efficiency_pct"] for x in rows] == [100, 100]
        assert [x["efficiency_range"] for x in rows] == [[100, 100], [80, 100]]


def test_a_profile_has_the_milliseconds_of_one_call_per_gpu(monkeypatch):
    """On all streams; while an all-gather runs from 2 to 7, other kernels run from 0 to 3.5 and
    from 6 to 6.25, nothing from 7 to 8."""

    def line(name, *events):
        keys = "name", "start_ns", "duration_ns"
        times = ((x, 1e6 * start, 1e6 * ms) for x, start, ms in events)
        events = [SimpleNamespace(**dict(zip(keys, x, strict=True))) for x in times]
        return SimpleNamespace(name=name, events=events)

    compute = line("Stream #13(Compute)", ("nvjet_a", 0, 3.0), ("memcpy128", 3, 0.5))
    lines = [
        compute,
        line("Stream #14(Memset)", ("Memset", 6, 0.25), ("recurrent_fw_H", 8, 2.0)),
        line("Stream #15", ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 2, 5.0)),
        line("XLA Modules", ("jit_step", 0, 100.0)),
    ]
    planes = {"/device:GPU:0": lines, "/device:GPU:1": [compute], "/host:CPU": lines}
    planes = [SimpleNamespace(name=name, lines=x) for name, x in planes.items()]
    profile = mock.Mock(from_file=lambda path: SimpleNamespace(planes=planes))
    monkeypatch.setattr(jax.profiler, "ProfileData", profile)
    kinds = dict(collectives=2.5, products=3.0, copies=0.625, elementwise=0.0, mlstm=1.0)
    found = profiles.milliseconds(lambda: None)
    assert found == kinds | dict(exposed=(2.5 + 0.75) / 2, idle=0.5)
    assert profiles.kind("input_add_reduce_fusion_3") == "elementwise"
