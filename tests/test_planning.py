"""planning.py: what runs where, in which chunks, splits and tiles, for a problem and a GPU."""

import math
import re
from functools import partial

import compile_report
import jax
import jax.numpy as jnp
import plans
import pytest
from oracle import call_shapes, for_device, needs_mosaic_gpu, results_of

from mlstm_pallas import KernelConfig, mlstm_chunkwise, plan
from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER
from mlstm_pallas.planning import dispatch
from mlstm_pallas.planning.call_spec import CallSpec, make_spec
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.problem.gpu import UNKNOWN, known_gpu
from mlstm_pallas.stages import STAGES

SIZES = "B", "NH", "S", "DHQK", "DHV"
WIDE = 256, 512  # heads wide enough for sequences to be split
H200 = known_gpu("NVIDIA H200")


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


@pytest.fixture
def any_jax(monkeypatch):
    """Plans of Mosaic GPU kernels, by a jax that need not have them."""
    monkeypatch.setattr("mlstm_pallas.planning.preview.check_mosaic_gpu", lambda *_: None)


def test_the_table_of_plans(any_jax):
    """``plans.py`` says how to write the table anew."""
    for call, lines in plans.calls().items():
        assert (call, *plans.planned(call)) == (call, *lines)


@pytest.mark.parametrize(("moves", "stages"), [(True, 7), (False, 6)])
def test_the_stages_of_gradients_of_narrow_heads(moves, stages, any_jax, monkeypatch):
    monkeypatch.setattr("mlstm_pallas.mosaic_gpu.parallel_bw_dQKV.MOVES_REGISTERS", moves)
    call = planned(8, 16, 4096, 64, 128, backend="mosaic_gpu")
    assert call.launches[-1].tiles["num_stages"] == stages


COMPILED = {
    "H200": ("NVIDIA H200", (256, 512)),
    "A100": ("NVIDIA A100-SXM4-80GB", (256, 512)),
    "RTX4090": ("NVIDIA GeForce RTX 4090", (64, 128)),
}


@pytest.mark.slow
@pytest.mark.parametrize("device", COMPILED)
def test_the_compiler_takes_the_shared_memory_of_the_plan(device):
    """At most the 2 KiB beside the stages more, and no less than half: mma has its operands of one
    of two or more stages in registers. On Hopper a pipelined loop takes what its stages have."""
    pytest.importorskip("triton")
    gpu, heads = COMPILED[device]
    shared = {x.stage: x.shared_bytes for x in planned(1, 8, 8192, *heads, gpu=gpu).launches}
    del shared["chunk_gates"]  # whose 64 bytes are left out
    rows = [*compile_report.report(device, [heads], ["bfloat16"], direction="fwbw")]
    assert shared.keys() <= {row["stage"] for row in rows}
    for row in rows:
        if planned_bytes := shared.get(row["stage"]):
            exact = device == "H200" and row["stage"] != "parallel_fw_P"
            least = planned_bytes if exact else planned_bytes // 2
            assert least <= row["shared_bytes"] <= planned_bytes + 2048, row["stage"]


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


def test_a_shard_is_decided_for_its_own_heads():
    """Two devices have eight heads each, in twice as many splits as 16; one head has too few."""
    whole = spec_of(16, heads=WIDE)
    plans = [x.plan for x in (whole, whole.with_heads(1, 8), whole.with_heads(1, 1))]
    assert [(x.fused, x.num_splits) for x in plans] == [(True, 2), (True, 4), (False, 1)]


def chunk(S, heads=WIDE, backend="xla", **options):
    shape = 1, 1, S, *heads
    return make_spec(shape, jnp.dtype("bfloat16"), H200, backend, **options).problem.L


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
