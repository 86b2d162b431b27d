"""planning.py: what runs where, in which chunks, splits and tiles, for a problem and a GPU."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from oracle import random_inputs

from mlstm_pallas import KernelConfig, dispatch, mlstm_chunkwise, plan, planning
from mlstm_pallas.call_spec import CallSpec
from mlstm_pallas.gpu import HOPPER, UNKNOWN, known_gpu
from mlstm_pallas.normaliser import DEFAULT_NORMALISER
from mlstm_pallas.planning import MIN_SPLIT_STATE, MIN_SPLIT_STEPS
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering
from mlstm_pallas.stages import STAGES

FLOAT32 = jnp.dtype("float32")
WIDE = dict(DHQK=256, DHHV=512)  # heads wide enough for sequences to be split
H200 = known_gpu("NVIDIA H200")
GPUS = {
    "A100": "NVIDIA A100-SXM4-80GB",
    "A10": "NVIDIA A10",
    "L40S": "NVIDIA L40S",
    "RTX_4090": "NVIDIA GeForce RTX 4090",
    "RTX_5090": "NVIDIA GeForce RTX 5090",
    "H100": "NVIDIA H100 80GB HBM3",
    "H20": "NVIDIA H20",
    "GH200": "NVIDIA GH200 480GB",
    "B200": "NVIDIA B200",
}
HEADS = [(64, 64), (80, 96), (128, 128), (128, 256), (192, 384), (256, 512), (512, 1024)]


def spec_of(B=1, NH=8, S=8192, DHQK=16, DHHV=32, L=64, recompute=True, gpu=H200, **config):
    p = Problem(B, NH, S, DHQK, DHHV, L, DHQK**-0.5)
    return CallSpec(p, KernelConfig(**config), FLOAT32, DEFAULT_NORMALISER, gpu, recompute)


# The launches of six calls: stage, lowering, CTAs. On an H200 128 CTAs fill the SMs.
LAUNCHES = {
    "7b-8k": (
        dict(B=8, NH=8, S=8192, DHQK=256, DHV=512, gpu="NVIDIA H200"),
        "chunk_gates triton 16384, parallel_fw_P triton 16384, recurrent_fw_H triton 512, "
        "chunk_gates triton 2048, parallel_bw_dP triton 28672, recurrent_bw_dC triton 1024, "
        "parallel_bw_dQKV triton 49152",
    ),
    "7b-8k, Mosaic GPU": (
        dict(B=8, NH=8, S=8192, DHQK=256, DHV=512, gpu="NVIDIA H200", backend="mosaic_gpu"),
        "chunk_gates mosaic_gpu 1024, parallel_fw_P mosaic_gpu 8192, "
        "recurrent_fw_H mosaic_gpu 256, chunk_gates mosaic_gpu 1024, "
        "parallel_bw_dP mosaic_gpu 132, recurrent_bw_dC mosaic_gpu 512, "
        "parallel_bw_dQKV mosaic_gpu 132",
    ),
    "scores recomputed, no parallel_bw_dP": (
        dict(B=8, NH=16, S=8192, DHQK=128, DHV=256, gpu="NVIDIA H100", backend="mosaic_gpu"),
        "chunk_gates mosaic_gpu 2048, parallel_fw_P mosaic_gpu 16384, "
        "recurrent_fw_H mosaic_gpu 256, chunk_gates mosaic_gpu 2048, "
        "recurrent_bw_dC mosaic_gpu 512, parallel_bw_dQKV mosaic_gpu 132",
    ),
    "one batch entry, in splits": (
        dict(B=1, NH=8, S=8192, DHQK=256, DHV=512, gpu="NVIDIA H200"),
        "chunk_gates triton 2048, parallel_fw_P triton 2048, split_products triton 192, "
        "recurrent_fw_H triton 256, chunk_gates triton 256, parallel_bw_dP triton 3584, "
        "recurrent_bw_dC triton 256, parallel_bw_dQKV triton 6144",
    ),
    "few heads, states in memory": (
        dict(B=1, NH=2, S=2048, DHQK=256, DHV=512, gpu="NVIDIA H200", backend="mosaic_gpu"),
        "chunk_gates mosaic_gpu 8, recurrent_fw_C mosaic_gpu 64, parallel_fw_H mosaic_gpu 64, "
        "chunk_gates mosaic_gpu 8, parallel_bw_dP mosaic_gpu 48, "
        "recurrent_bw_dC mosaic_gpu 128, parallel_bw_dQKV mosaic_gpu 132",
    ),
    "narrow heads, float32": (
        dict(B=4, NH=4, S=1000, DHQK=64, DHV=64, dtype="float32", gpu="NVIDIA L40S"),
        "chunk_gates triton 256, recurrent_fw_C triton 256, parallel_fw_H triton 256, "
        "chunk_gates triton 256, parallel_bw_dP triton 512, recurrent_bw_dC triton 256, "
        "parallel_bw_dQKV triton 1024",
    ),
}
needs_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU needs jax >= 0.11.2"
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=[needs_jax] * ("backend" in y)) for x, (y, _) in LAUNCHES.items()],
)
def test_the_launches_of_a_call(case):
    call, expected = LAUNCHES[case]
    launches = [f"{x.stage} {x.lowering} {x.ctas}" for x in plan(**call).launches]
    assert launches == expected.split(", ")


def test_the_kernels_of_each_folder():
    """Literally, as tests that take their stages from the table miss a row that is gone."""
    forward = "chunk_gates", "recurrent_fw_C", "parallel_fw_H", "parallel_fw_P", "recurrent_fw_H"
    both = {*forward, "parallel_bw_dP", "recurrent_bw_dC", "parallel_bw_dQKV", "step_sums"}
    both.add("split_products")
    names = {
        "triton": both | {"recurrent_step", "add_decayed"},
        "mosaic_gpu": both | {"vector_states", "step_gradients"},
    }
    expected = {f"{folder}_{name}" for folder, each in names.items() for name in each}
    assert {*dispatch.kernels()} == expected


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("gpu", GPUS)
def test_the_tiles_fit_every_gpu(gpu, heads):
    """By the estimate for Triton; ``compile_report.py`` has what the compiler takes."""
    for dtype in ("bfloat16", "float32"):
        call = plan(B=8, NH=8, S=8192, DHQK=heads[0], DHV=heads[1], dtype=dtype, gpu=GPUS[gpu])
        assert all(x.ctas > 0 and x.shared_bytes <= call.gpu.shared_bytes for x in call.launches)


@pytest.mark.parametrize("fused", [False, True], ids=["materialised", "fused"])
@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "stored"])
def test_the_grids_of_a_plan_are_those_that_run(recompute, fused):
    """Each launch of the plan is one of the traced ones, with its grid, and no stage is left."""
    config = KernelConfig(chunk_size=32, fused=fused)
    shapes = random_inputs(0, 1, 2, 64, 16, 32, states=False).values()
    run = functools.partial(
        mlstm_chunkwise, config=config, recompute_states_in_bw=recompute, backend="interpret"
    )
    p = spec_of(1, 2, 64, L=32, recompute=recompute, fused=fused, gpu=UNKNOWN).plan
    assert p.fused == fused

    def traced(function):
        found = re.findall(
            r"grid=\(([\d, ]+)\)[\s\S]*?name=(\w+)", str(jax.make_jaxpr(function)(*shapes))
        )
        return {(name, tuple(map(int, grid.split(", ")))) for grid, name in found if name in STAGES}

    def planned(launches):
        asked = dict(recurrences=1 + recompute)
        return {
            (name, x.tiles.grid(x.problem, **asked if name == "recurrent_bw_dC" else {}))
            for name, x in launches.items()
        }

    assert traced(run) == planned(p.forward)
    gradient = jax.grad(lambda *x: jnp.sum(run(*x)))
    assert traced(gradient) == planned(p.forward) | planned(p.backward)


SPLIT = {  # heads, steps, their sizes, splits of the fused scan; 0: materialised
    "enough_heads": (24, 8192, WIDE, 1),
    "8_of_24_heads": (8, 8192, WIDE, 4),
    "shorter": (4, 4 * MIN_SPLIT_STEPS, WIDE, 0),
    "least_length": (4, 8 * MIN_SPLIT_STEPS, WIDE, 8),
    "no_whole_chunks": (8, 8192 + 64, WIDE, 0),
    "narrow_heads": (8, 8192, dict(DHQK=128, DHHV=MIN_SPLIT_STATE // 256), 0),
}


@pytest.mark.parametrize("case", SPLIT)
def test_splits_of_a_sequence_count_as_heads(case):
    NH, S, sizes, splits = SPLIT[case]
    p = Problem(1, NH, S, **sizes, L=64, qk_scale=1.0)
    options = planning.Options(jnp.dtype("bfloat16"), Lowering.TRITON, KernelConfig())
    found = planning.plan(p, options, H200)
    assert (found.fused, found.num_splits) == (splits > 0, max(splits, 1))


def test_splits_are_of_chunks_of_the_fused_scan():
    """8320 steps are 65 chunks of 128, and 260 of 32."""
    x = spec_of(S=8320, L=128, **WIDE, fused=True, num_splits=4).plan
    assert (x.fused, x.num_splits, x.scan_problem.L) == (True, 4, 32)


@pytest.mark.parametrize(
    ("S", "L", "DHQK", "stores"),
    [
        pytest.param(8192, 256, 128, True, id="whole_chunks"),
        pytest.param(8320, 128, 128, False, id="a_split_ends_inside_a_chunk"),
        pytest.param(8192, 256, 512, False, id="two_launches"),
    ],
)
def test_states_are_stored_by_one_launch_of_whole_chunks(S, L, DHQK, stores):
    spec = functools.partial(spec_of, S=S, L=L, DHQK=DHQK, DHHV=512, fused=True, num_splits=4)
    recomputes, stored = (spec(recompute=x) for x in (True, False))
    assert (recomputes.plan.fused, recomputes.plan.num_splits) == (True, 4)
    assert stored.plan.fused == stores
    assert stored.forward_only == recomputes


def test_a_shard_is_decided_for_its_own_heads():
    """Sixteen heads on two devices: each has eight, in twice as many splits; one alone has too
    few."""
    whole = spec_of(NH=16, **WIDE)
    plans = [x.plan for x in (whole, whole.with_heads(1, 8), whole.with_heads(1, 1))]
    assert [x.fused for x in plans] == [True, True, False]
    assert [x.num_splits for x in plans] == [2, 4, 1]


@pytest.mark.parametrize("lowering", Lowering)
def test_tiles_are_clamped_to_the_problem(lowering):
    spec = spec_of(S=128, L=32, triton_parallel_fw_H=dict(siz_b_LQ=128, siz_b_DHHV=256))
    call = spec.launch("parallel_fw_H", lowering)
    # float32 has no Mosaic GPU kernel.
    expected = {Lowering.MOSAIC_GPU: "triton", Lowering.MOSAIC_GPU_INTERPRET: "interpret"}
    assert (call.problem, call.lowering) == (spec.problem, expected.get(lowering, lowering))
    if lowering is not Lowering.XLA:  # which has no tiles
        assert (call.tiles.siz_b_LQ, call.tiles.siz_b_DHHV) == (32, 32)


@pytest.mark.parametrize(
    ("lowering", "gpu", "DHQK", "DHHV", "S", "L"),
    [
        ("triton", H200, 64, 64, 4096, 64),
        ("triton", H200, 128, 128, 4096, 64),
        ("triton", H200, 128, 256, 4096, 128),
        ("triton", H200, 512, 1024, 4096, 256),
        ("triton", H200, 256, 512, 300, 256),
        ("mosaic_gpu", HOPPER, 128, 128, 4096, 128),
        ("mosaic_gpu", HOPPER, 32, 64, 4096, 64),  # whose gradients run on Triton
        ("xla", UNKNOWN, 128, 128, 4096, 64),
        ("xla", UNKNOWN, 256, 512, 1024, 256),
        ("xla", UNKNOWN, 256, 512, 640, 128),  # a chunk of 256 pads to 768
        ("xla", UNKNOWN, 256, 512, 300, 64),
    ],
)
def test_the_chunk_grows_with_the_heads(lowering, gpu, DHQK, DHHV, S, L):
    sizes = DHQK, DHHV, S, jnp.dtype("bfloat16")
    assert planning.chunk_size(*sizes, Lowering(lowering), gpu) == L


def test_the_chunk_is_explicit_before_the_rule_and_clamped_to_the_sequence():
    def chunk(S, L=None, config=None):
        shape = 1, 1, S, 256
        return planning.problem_for(shape, 512, FLOAT32, Lowering.XLA, UNKNOWN, L, config)[0].L

    config = KernelConfig(chunk_size=32)
    assert (chunk(1024, 64), chunk(1024, None, config), chunk(1024, 64, config)) == (64, 32, 64)
    assert (chunk(100, 1024), chunk(1)) == (128, 16)


def test_a_plan_says_what_memory_a_call_takes():
    """7b-8k took 3116 MiB on an H200, with its outputs; small vectors are left out of a plan."""
    call = plan(B=8, NH=8, S=8192, DHQK=256, DHV=512, gpu="NVIDIA H200")
    assert math.isclose((call.output_bytes + call.temporary_bytes) / 2**20, 3116, rel_tol=0.005)
    assert len(str(call).splitlines()) == len(call.launches) + 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(gpu="NVIDIA FOO"), "gpu is 'NVIDIA FOO', expected the device_kind of a known GPU"),
        (dict(gpu=None), "gpu is None and there is no GPU"),
        (dict(S=0), "S is 0, expected an integer >= 1"),
        (dict(dtype="float64"), "dtype is float64, expected one of float32, bfloat16, float16"),
        (dict(recompute_states_in_bw=1), "recompute_states_in_bw is a int, expected a Python bool"),
        (dict(backend="cuda"), "backend is 'cuda', expected None or one of"),
        (dict(backend="mosaic_gpu", gpu="NVIDIA L4"), "backend is 'mosaic_gpu' and "),
    ],
    ids=["gpu", "no_gpu", "S", "dtype", "flag", "backend", "not_hopper"],
)
def test_a_plan_names_a_wrong_argument(wrong, message):
    if "gpu" in wrong and wrong["gpu"] is None and jax.devices()[0].platform == "gpu":
        pytest.skip("there is a GPU")
    call = dict(B=1, NH=1, S=64, DHQK=64, DHV=64, gpu="NVIDIA H200") | wrong
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        plan(**call)
