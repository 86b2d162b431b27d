"""planning.py: what runs where, in which chunks, splits and tiles, for a problem and a GPU."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from oracle import call_shapes, for_device, needs_mosaic_gpu, results_of

from mlstm_pallas import KernelConfig, dispatch, mlstm_chunkwise, plan
from mlstm_pallas.gpu import UNKNOWN, known_gpu
from mlstm_pallas.normaliser import DEFAULT_NORMALISER
from mlstm_pallas.planning import CallSpec, make_spec
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering
from mlstm_pallas.stages import STAGES

SIZES = "B", "NH", "S", "DHQK", "DHV"
WIDE = 256, 512  # heads wide enough for sequences to be split
H200 = known_gpu("NVIDIA H200")
GPUS = (
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA A10",
    "NVIDIA L40S",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA GeForce RTX 5090",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA H20",
    "NVIDIA B200",
)
HEADS = (64, 64), (80, 96), (128, 128), (128, 256), (192, 384), (256, 512), (512, 1024)


def spec_of(
    NH=8, S=8192, heads=(16, 32), L=64, recompute=True, gpu=H200, dtype="float32", **config
):
    p = Problem(1, NH, S, *heads, L, heads[0] ** -0.5)
    return CallSpec(
        p,
        KernelConfig(**config),
        jnp.dtype(dtype),
        DEFAULT_NORMALISER,
        gpu,
        recompute_states_in_bw=recompute,
    )


def planned(*sizes, gpu="NVIDIA H200", **options):
    return plan(**dict(zip(SIZES, sizes, strict=True)), gpu=gpu, **options)


# By B, NH, S, DHQK, DHV, dtype, backend and GPU of a call, its launches: stage, lowering, CTAs. On
# an H200 128 CTAs fill the SMs.
LAUNCHES = {
    "8 8 8192 256 512 bfloat16 triton NVIDIA H200": (
        "chunk_gates triton 16384, parallel_fw_P triton 16384, recurrent_fw_H triton 512, "
        "chunk_gates triton 2048, parallel_bw_dP triton 28672, recurrent_bw_dC triton 1024, "
        "parallel_bw_dQKV triton 49152"
    ),
    "8 8 8192 256 512 bfloat16 mosaic_gpu NVIDIA H200": (
        "chunk_gates mosaic_gpu 1024, parallel_fw_P mosaic_gpu 8192, "
        "recurrent_fw_H mosaic_gpu 256, chunk_gates mosaic_gpu 1024, "
        "parallel_bw_dP mosaic_gpu 132, recurrent_bw_dC mosaic_gpu 512, "
        "parallel_bw_dQKV mosaic_gpu 132"
    ),
    # parallel_bw_dQKV recomputes P and dP.
    "8 16 8192 128 256 bfloat16 mosaic_gpu NVIDIA H100": (
        "chunk_gates mosaic_gpu 2048, parallel_fw_P mosaic_gpu 16384, "
        "recurrent_fw_H mosaic_gpu 256, chunk_gates mosaic_gpu 2048, "
        "recurrent_bw_dC mosaic_gpu 512, parallel_bw_dQKV mosaic_gpu 132"
    ),
    # Few heads are scanned in splits, fewer have their states in memory.
    "1 8 8192 256 512 bfloat16 triton NVIDIA H200": (
        "chunk_gates triton 2048, parallel_fw_P triton 2048, split_products triton 192, "
        "recurrent_fw_H triton 256, chunk_gates triton 256, parallel_bw_dP triton 3584, "
        "recurrent_bw_dC triton 256, parallel_bw_dQKV triton 6144"
    ),
    "1 2 2048 256 512 bfloat16 mosaic_gpu NVIDIA H200": (
        "chunk_gates mosaic_gpu 8, recurrent_fw_C mosaic_gpu 64, parallel_fw_H mosaic_gpu 64, "
        "chunk_gates mosaic_gpu 8, parallel_bw_dP mosaic_gpu 48, "
        "recurrent_bw_dC mosaic_gpu 128, parallel_bw_dQKV mosaic_gpu 132"
    ),
    "4 4 1000 64 64 float32 triton NVIDIA L40S": (
        "chunk_gates triton 256, recurrent_fw_C triton 256, parallel_fw_H triton 256, "
        "chunk_gates triton 256, parallel_bw_dP triton 512, recurrent_bw_dC triton 256, "
        "parallel_bw_dQKV triton 1024"
    ),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=[needs_mosaic_gpu] * ("mosaic_gpu" in x)) for x in LAUNCHES],
)
def test_the_launches_of_a_call(case):
    *sizes, dtype, backend, gpu = case.split(" ", 7)
    call = planned(*map(int, sizes), dtype=dtype, backend=backend, gpu=gpu)
    assert ", ".join(f"{x.stage} {x.lowering} {x.ctas}" for x in call.launches) == LAUNCHES[case]


# Literally, because tests that take their stages from the files miss one that is gone.
BOTH = """chunk_gates parallel_bw_dP parallel_bw_dQKV parallel_fw_H parallel_fw_P recurrent_bw_dC
recurrent_fw_C recurrent_fw_H split_products step_sums"""
KERNELS = {
    "triton": f"{BOTH} recurrent_step add_decayed",
    "mosaic_gpu": f"{BOTH} vector_states step_gradients",
}


def test_the_kernels_of_each_folder():
    expected = {f"{folder}_{x}" for folder, names in KERNELS.items() for x in names.split()}
    assert {*dispatch.kernels()} == expected


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("gpu", GPUS)
def test_the_tiles_fit_every_gpu(gpu, heads):
    """By the estimate for Triton; ``compile_report.py`` has what the compiler takes."""
    for dtype in ("bfloat16", "float32"):
        call = planned(8, 8, 8192, *heads, dtype=dtype, gpu=gpu)
        assert all(x.ctas > 0 and x.shared_bytes <= call.gpu.shared_bytes for x in call.launches)


def grids_in(jaxpr):
    """The stages that have kernels in a jaxpr, with the grids of these."""
    found = re.findall(r"grid=\(([\d, ]+)\)[\s\S]*?name=(\w+)", str(jaxpr))
    return {(name, tuple(map(int, grid.split(", ")))) for grid, name in found if name in STAGES}


@pytest.mark.parametrize("fused", [False, True], ids=["materialised", "fused"])
@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "stored"])
def test_the_grids_of_a_plan_are_those_that_run(recompute, fused):
    """Each launch of the plan is one of the traced ones, with its grid, and no stage is left."""
    shapes = call_shapes(1, 2, 64, 16, 32, "float32")
    run = partial(
        mlstm_chunkwise,
        config=KernelConfig(chunk_size=32, fused=fused),
        recompute_states_in_bw=recompute,
        backend="interpret",
    )
    p = spec_of(2, 64, L=32, recompute=recompute, fused=fused, gpu=UNKNOWN).plan
    assert p.fused == fused

    def expected(launches):
        asked = dict(recurrences=1 + recompute)
        return {
            (name, x.tiles.grid(x.problem, **asked if name == "recurrent_bw_dC" else {}))
            for name, x in launches.items()
        }

    forward, both = (grids_in(jax.make_jaxpr(x)(*shapes)) for x in (run, results_of(run)))
    assert forward == expected(p.forward)
    assert both == expected(p.forward) | expected(p.backward)


@pytest.mark.parametrize("backend", ["triton", pytest.param("mosaic_gpu", marks=needs_mosaic_gpu)])
def test_a_plan_shows_the_launches_of_a_call_with_num_segments(backend):
    """1001 steps are no whole chunks, and each of 13 segments has chunks of its own."""
    sizes, N = (2, 4, 1001, *WIDE), 13
    call = planned(*sizes, num_segments=N, backend=backend)
    assert (call.fused, call.num_segments, call.launches[-1].grid[1]) == (True, N, N + 2)
    assert {x.lowering for x in call.launches} == {backend}
    assert f"fused scan in {N} segments" in str(call)

    run = partial(
        mlstm_chunkwise,
        segment_ids=jnp.zeros((2, 1001), int),
        return_last_states=True,
        num_segments=N,
        backend=backend,
    )
    with for_device("NVIDIA H200"):
        traced = jax.make_jaxpr(run)(*call_shapes(*sizes))
    steps = call.launches[0].grid[0] * call.chunk_size
    assert f"[8,{steps},{call.chunk_size}]" in str(traced)  # P
    if backend == "triton":  # a Mosaic GPU kernel's grid is not in the trace
        assert {(x.stage, x.grid) for x in call.launches} <= grids_in(traced)


SPLITS = {  # of heads, steps, DHQK and DHHV; 0: the states are materialised
    "24 8192 256 512": 1,
    "8 8192 256 512": 4,
    "4 4096 256 512": 0,  # too short
    "4 8192 256 512": 8,
    "8 8256 256 512": 0,  # no whole chunks
    "8 8192 128 128": 0,  # narrow heads
}


def test_splits_of_a_sequence_count_as_heads():
    found = {}
    for case in SPLITS:
        NH, S, *heads = map(int, case.split())
        x = spec_of(NH, S, heads, dtype="bfloat16").plan
        assert x.num_splits >= 1
        found[case] = x.num_splits * x.fused
    assert found == SPLITS


def test_splits_are_of_chunks_of_the_fused_scan():
    """8320 steps are 65 chunks of 128, and 260 of 32."""
    x = spec_of(S=8320, L=128, heads=WIDE, fused=True, num_splits=4).plan
    assert (x.fused, x.num_splits, x.scan_problem.L) == (True, 4, 32)


@pytest.mark.parametrize(
    ("S", "L", "DHQK", "stores"),
    [
        (8192, 256, 128, True),
        (8320, 128, 128, False),
        (8192, 256, 512, False),
    ],
    ids=["whole_chunks", "a_split_ends_inside_a_chunk", "two_launches"],
)
def test_states_are_stored_by_one_launch_of_whole_chunks(S, L, DHQK, stores):
    spec = partial(spec_of, 8, S, (DHQK, 512), L, fused=True, num_splits=4)
    recomputes, stored = spec(), spec(recompute=False)
    assert (recomputes.plan.fused, recomputes.plan.num_splits) == (True, 4)
    assert stored.plan.fused == stores
    assert stored.forward_only == recomputes


def test_a_shard_is_decided_for_its_own_heads():
    """Two devices have eight heads each, in twice as many splits as 16; one head has too few."""
    whole = spec_of(16, heads=WIDE)
    plans = [x.plan for x in (whole, whole.with_heads(1, 8), whole.with_heads(1, 1))]
    assert [(x.fused, x.num_splits) for x in plans] == [(True, 2), (True, 4), (False, 1)]


@pytest.mark.parametrize("lowering", Lowering)
def test_tiles_are_clamped_to_the_problem(lowering):
    spec = spec_of(S=128, L=32, triton_parallel_fw_H=dict(siz_b_LQ=128, siz_b_DHHV=256))
    call = spec.launch("parallel_fw_H", lowering)
    # float32 has no Mosaic GPU kernel.
    expected = {Lowering.MOSAIC_GPU: "triton", Lowering.MOSAIC_GPU_INTERPRET: "interpret"}
    assert (call.problem, call.lowering) == (spec.problem, expected.get(lowering, lowering))
    if lowering is not Lowering.XLA:  # which has no tiles
        assert (call.tiles.siz_b_LQ, call.tiles.siz_b_DHHV) == (32, 32)


CHUNKS = {  # of backend, DHQK, DHHV and steps
    "triton 64 64 4096": 64,
    "triton 128 128 4096": 64,
    "triton 128 256 4096": 128,
    "triton 512 1024 4096": 256,
    "triton 256 512 300": 256,
    "mosaic_gpu 128 128 4096": 128,
    "mosaic_gpu 32 64 4096": 64,  # whose gradients run on Triton
    "xla 128 128 4096": 64,
    "xla 256 512 1024": 256,
    "xla 256 512 640": 128,  # a chunk of 256 pads to 768
    "xla 256 512 300": 64,
}


def chunk(S, heads=WIDE, backend="xla", **options):
    shape = 1, 1, S, *heads
    return make_spec(shape, jnp.dtype("bfloat16"), H200, backend, **options).problem.L


@pytest.mark.parametrize("case", CHUNKS)
def test_the_chunk_grows_with_the_heads(case):
    backend, *sizes = case.split()
    *heads, S = map(int, sizes)
    assert chunk(S, heads, backend) == CHUNKS[case]


def test_the_chunk_is_explicit_before_the_rule_and_clamped_to_the_sequence():
    config = KernelConfig(chunk_size=32)
    assert chunk(1024, config=config) == 32
    assert chunk(1024, chunk_size=64) == chunk(1024, chunk_size=64, config=config) == 64
    assert (chunk(100, chunk_size=1024), chunk(1)) == (128, 16)


def test_a_plan_says_what_memory_a_call_takes():
    """7b-8k took 3116 MiB on an H200, with its outputs; small vectors are left out of a plan."""
    call = planned(8, 8, 8192, *WIDE)
    assert math.isclose((call.output_bytes + call.temporary_bytes) / 2**20, 3116, rel_tol=0.005)
    assert len(str(call).splitlines()) == len(call.launches) + 3


def test_a_plan_for_another_gpu_than_hopper_has_no_mosaic_gpu_kernels():
    with pytest.raises(ValueError, match=r"^backend is 'mosaic_gpu' and "):
        planned(*[64] * 5, backend="mosaic_gpu", gpu="NVIDIA L4")
