"""CallSpec: which stages a call runs, in which chunks and splits, decided once."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from oracle import random_inputs

from mlstm_pallas import KernelConfig, StageConfig, mlstm_chunkwise
from mlstm_pallas.call_spec import MIN_SPLIT_STATE, MIN_SPLIT_STEPS, CallSpec
from mlstm_pallas.config import heuristic_config
from mlstm_pallas.normaliser import DEFAULT_NORMALISER
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering
from mlstm_pallas.stages import STAGES

FLOAT32 = jnp.dtype("float32")
WIDE = dict(DHQK=256, DHHV=512)  # heads wide enough for sequences to be split


def spec_of(B=1, NH=8, S=8192, DHQK=16, DHHV=32, L=64, recompute=True, **config):
    config = KernelConfig(chunk_size=L, **config).or_else(heuristic_config(DHQK, FLOAT32))
    return CallSpec(
        Problem(B, NH, S, DHQK, DHHV, L, DHQK**-0.5), config, FLOAT32, DEFAULT_NORMALISER, recompute
    )


def kernels(function, *shapes):
    """The stages among the kernels that a function launches."""
    return {*re.findall(r"name=(\w+)", str(jax.make_jaxpr(function)(*shapes)))} & {*STAGES}


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "stored"])
@pytest.mark.parametrize("fused_min_heads", [0, 1], ids=["materialised", "fused"])
def test_the_stages_of_a_spec_are_those_that_run(fused_min_heads, recompute):
    config = KernelConfig(chunk_size=32, fused_min_heads=fused_min_heads)
    shapes = random_inputs(0, 1, 2, 64, 16, 32, states=False).values()
    run = functools.partial(
        mlstm_chunkwise, config=config, recompute_states_in_bw=recompute, backend="interpret"
    )
    spec = spec_of(1, 2, 64, L=32, recompute=recompute, fused_min_heads=fused_min_heads)
    assert spec.fused == bool(fused_min_heads)
    assert kernels(run, *shapes) == {*spec.forward_stages}
    gradient = jax.grad(lambda *x: jnp.sum(run(*x)))
    stages = {*spec.forward_stages, *spec.backward_stages}
    assert kernels(gradient, *shapes) == {*spec.stages} == stages


@pytest.mark.parametrize("fused_min_heads", [1, 5, 6, 7, 0, None])
def test_the_fused_scan_starts_at_a_number_of_heads(fused_min_heads):
    spec = spec_of(2, 3, 64, fused_min_heads=fused_min_heads)
    assert spec.fused == ("recurrent_fw_H" in spec.forward_stages) == (fused_min_heads in (1, 5, 6))
    assert spec.num_splits == 1


SPLIT = {  # heads that the fused scan needs, heads, steps, their sizes, splits
    "enough_heads": (24, 24, 8192, WIDE, 1),
    "8_of_24_heads": (24, 8, 8192, WIDE, 4),
    "least_length": (8, 2, 4 * MIN_SPLIT_STEPS, WIDE, 4),
    "shorter": (8, 2, 2 * MIN_SPLIT_STEPS, WIDE, 0),
    "no_whole_chunks": (8, 2, 4 * MIN_SPLIT_STEPS + 64, WIDE, 0),
    "narrow_heads": (8, 2, 8192, dict(DHQK=MIN_SPLIT_STATE // 1024, DHHV=512), 0),
}


@pytest.mark.parametrize("case", SPLIT)
def test_splits_of_a_sequence_count_as_heads(case):
    """0 splits: the forward pass is materialised."""
    heads, NH, S, sizes, splits = SPLIT[case]
    spec = spec_of(NH=NH, S=S, **sizes, fused_min_heads=heads)
    assert (spec.fused, spec.num_splits) == (splits > 0, max(splits, 1))


def test_splits_are_of_chunks_of_the_fused_scan():
    """8320 steps are 65 chunks of 128, and 260 of 32."""
    spec = spec_of(
        S=8320, L=128, **WIDE, fused_min_heads=24, recurrent_fw_H=StageConfig(siz_b_LKV=32)
    )
    assert (spec.fused, spec.num_splits, spec.fused_problem.L) == (True, 4, 32)


@pytest.mark.parametrize(
    ("S", "L", "DHQK", "stores"),
    [
        pytest.param(8192, 256, 256, True, id="whole_chunks"),
        pytest.param(8320, 128, 256, False, id="a_split_ends_inside_a_chunk"),
        pytest.param(8192, 256, 512, False, id="two_launches"),
    ],
)
def test_states_are_stored_by_one_launch_of_whole_chunks(S, L, DHQK, stores):
    tiles = StageConfig(siz_b_LKV=32, siz_b_loop=256)
    spec = functools.partial(spec_of, S=S, L=L, DHQK=DHQK, DHHV=512, recurrent_fw_H=tiles)
    recomputes, stored = (spec(recompute=x, fused_min_heads=24) for x in (True, False))
    assert (recomputes.fused, recomputes.num_splits) == (True, 4)
    assert stored.fused == stores
    assert stored.forward_only == recomputes


def test_a_shard_is_decided_for_its_own_heads():
    """Eight heads on two devices: each has four, in twice as many splits; of one batch on eight
    there are too few."""
    whole = spec_of(NH=8, **WIDE, fused_min_heads=8)
    specs = whole, whole.with_heads(1, 4), whole.with_heads(1, 1)
    assert [x.fused for x in specs] == [True, True, False]
    assert [x.num_splits for x in specs] == [1, 2, 1]
    assert [x.problem.BNH for x in specs] == [8, 4, 1]


@pytest.mark.parametrize("lowering", Lowering)
def test_tiles_of_a_call_are_clamped_to_the_problem(lowering):
    spec = spec_of(S=128, L=32, parallel_fw_H=StageConfig(siz_b_LQ=128, siz_b_DHHV=256))
    spec = dataclasses.replace(spec, backend=lowering.value)
    call = spec.call("parallel_fw_H", lowering)
    # It has no Mosaic GPU kernel.
    expected = {Lowering.MOSAIC_GPU: "triton", Lowering.MOSAIC_GPU_INTERPRET: "interpret"}
    assert (call.problem, call.lowering) == (spec.problem, expected.get(lowering, lowering))
    if lowering is not Lowering.XLA:  # which has no tiles
        assert (call.tiles.siz_b_LQ, call.tiles.siz_b_DHHV) == (32, 32)
