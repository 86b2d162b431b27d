"""config_for: explicit > tuned row > heuristic; and every tuned row is a valid config."""

import dataclasses
import functools
import itertools
import json
import re
from importlib import resources

import jax
import jax.numpy as jnp
import pytest

from mlstm_pallas import KernelConfig, StageConfig, config, mlstm_chunkwise
from mlstm_pallas.config import (
    ALL_STAGES,
    CHUNK_OF,
    PLANS,
    STAGES,
    config_for,
    config_from_row,
    config_from_rows,
    heuristic_config,
    tuned_config,
)
from mlstm_pallas.problem import Problem

BF16 = jnp.dtype("bfloat16")
FILES = sorted(x.name for x in (resources.files("mlstm_pallas") / "tuning").iterdir() if x.name.endswith(".json"))


def test_explicit_beats_tuned_beats_heuristic():
    tuned = tuned_config("NVIDIA H200", 256, 512, BF16)
    heuristic = heuristic_config(256, BF16)
    assert tuned is not None
    assert tuned.parallel_fw_H != heuristic.parallel_fw_H
    assert config_for(256, 512, 8192, BF16, device_kind="NVIDIA H200").parallel_fw_H == tuned.parallel_fw_H
    assert config_for(256, 512, 8192, BF16).parallel_fw_H == heuristic.parallel_fw_H
    mine = StageConfig(siz_b_LQ=32)
    filled = config_for(256, 512, 8192, BF16, device_kind="NVIDIA H200", explicit=KernelConfig(parallel_fw_H=mine), chunk_size=64)
    assert filled.parallel_fw_H == mine
    assert filled.recurrent_fw_C == tuned.recurrent_fw_C
    assert filled.L == 64


def test_the_chunk_is_clamped_to_the_sequence():
    assert config_for(64, 64, 100, BF16, chunk_size=1024).L == 128
    assert config_for(64, 64, 1, BF16).L == 16


def test_odd_heads_use_the_row_of_their_padded_size():
    assert config_for(250, 500, 8192, BF16, device_kind="NVIDIA H200") == config_for(256, 512, 8192, BF16, device_kind="NVIDIA H200")


@pytest.mark.parametrize(
    ("heads", "row"),
    [
        ((16, 16), (64, 64)),
        ((128, 64), (128, 128)),
        ((192, 384), (256, 512)),
        ((64, 256), (128, 256)),
        ((512, 256), (512, 512)),
        ((512, 1024), (512, 512)),  # none is larger
        ((1024, 16), (512, 512)),
    ],
)
def test_heads_without_a_row_have_that_of_the_smallest_larger_ones(heads, row):
    assert tuned_config("NVIDIA H200", *heads, BF16) == tuned_config("NVIDIA H200", *row, BF16) is not None
    assert tuned_config("NVIDIA H200", *heads, jnp.dtype("float16")) is None


def test_a_row_of_backward_walks_is_not_taken_over_where_they_would_be_cut():
    """192 columns in blocks of 64, three launches."""
    whole, cut = (tuned_config("NVIDIA H200", 128, DHHV, BF16) for DHHV in (256, 192))
    assert whole.stateless_backward
    assert cut == dataclasses.replace(whole, stateless_backward=False)


@pytest.mark.parametrize(("DHHV", "taken"), [(64, True), (128, True), (192, False), (256, True), (320, False), (512, False)])
def test_fewer_rows_in_one_launch_are_no_cut(DHHV, taken):
    row = {
        "DHQK": 128,
        "DHHV": 256,
        "dtype": "bfloat16",
        "chunk_size": 64,
        "stateless_backward": 96,
        "recurrent_bw_dQ": {"siz_b_loop": 256},
    }
    assert config_from_rows([row], 64, DHHV, "bfloat16").stateless_backward == (96 if taken else False)


def test_the_same_chip_shares_its_rows():
    assert config.tuned_rows("NVIDIA H100 80GB HBM3") == config.tuned_rows("NVIDIA H200") != ()
    assert config.tuned_rows("some other device") == ()


def test_a_device_has_its_own_rows_before_those_of_its_chip(tmp_path, monkeypatch):
    (tmp_path / "tuning").mkdir()
    for name in ("nvidia_h200", "nvidia_h100_80gb_hbm3"):
        (tmp_path / "tuning" / f"{name}.json").write_text(json.dumps({"device": name, "rows": [{"of": name}]}))
    monkeypatch.setattr(config.resources, "files", lambda package: tmp_path)
    monkeypatch.setattr(config, "tuned_rows", config.tuned_rows.__wrapped__)
    assert config.tuned_rows("NVIDIA H100 80GB HBM3") == ({"of": "nvidia_h100_80gb_hbm3"},)
    assert config.tuned_rows("NVIDIA H100 NVL") == config.tuned_rows("NVIDIA H200") == ({"of": "nvidia_h200"},)
    assert config.tuned_rows("NVIDIA L4") == ()


def test_tiles_are_shortened_to_what_divides_the_problem():
    stage = StageConfig(siz_b_LQ=128, siz_b_LKV=128, siz_b_DHQK=128, siz_b_DHHV=256).fitted(Problem(1, 1, 64, 192, 320, 32, 1.0))
    assert (stage.siz_b_LQ, stage.siz_b_LKV, stage.siz_b_DHQK, stage.siz_b_DHHV) == (32, 32, 64, 64)
    assert not stage.keep_q  # 192 is no power of two


def launches(function, *shapes):
    """The kernels of function, stages of mlstm_chunkwise."""
    found = set(re.findall(r"name=(\w+)", str(jax.make_jaxpr(function)(*shapes))))
    return found & set(STAGES)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("plan", list(itertools.product([False, True], repeat=len(PLANS))))
def test_the_stages_of_a_pass_are_those_that_it_launches(plan, recompute):
    rows, config = (1, 2, 64), KernelConfig(chunk_size=32, **dict(zip(PLANS, plan, strict=True)))
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((*rows, 16), (*rows, 16), (*rows, 32), rows, rows)]
    run = functools.partial(mlstm_chunkwise, config=config, recompute_states_in_bw=recompute, backend="interpret")
    forward, backward = config.passes(Problem(1, 2, 64, 16, 32, 32, 1.0), recompute)
    assert launches(run, *shapes) == set(forward)
    assert launches(jax.grad(lambda *x: jnp.sum(run(*x))), *shapes) == {*forward, *backward}


@pytest.mark.parametrize("heads", [True, 1, 5, 6, 7, 0, False, None])
def test_passes_without_states_start_at_a_number_of_heads(heads):
    forward, backward = KernelConfig(stateless_forward=heads, stateless_backward=heads).passes(Problem(2, 3, 64, 16, 32, 32, 1.0))
    stateless = heads is True or heads in (1, 5, 6)
    assert ("recurrent_fw_H" in forward) == ("recurrent_bw_dQ" in backward) == stateless


@pytest.mark.parametrize(
    ("heads", "B", "S", "segments"),
    [(24, 3, 8192, 1), (24, 2, 8192, 2), (24, 1, 8192, 4), (48, 1, 8192, 0), (48, 1, 16384, 8), (24, 1, 4096, 0), (24, 1, 8192 + 64, 0)],
)
def test_sequences_of_few_heads_are_cut_into_segments(heads, B, S, segments):
    """Of at least 2048 steps and whole chunks; for the forward pass alone."""
    problem, config = Problem(B, 8, S, 256, 512, 64, 1.0), KernelConfig(stateless_forward=heads, stateless_backward=heads)
    assert config.walk_segments(problem) == segments
    forward, backward = config.passes(problem)
    assert ("recurrent_fw_H" in forward) == (segments > 0)
    assert ("recurrent_bw_dQ" in backward) == (heads <= 8 * B)


@pytest.mark.parametrize(("asked", "S", "segments"), [(1, 256, 1), (4, 256, 4), (8, 256, 4), (4, 192, 1)])
def test_a_number_of_segments_may_be_asked_for(asked, S, segments):
    config = KernelConfig(stateless_forward=True, recurrent_fw_H=StageConfig(num_segments=asked))
    assert config.walk_segments(Problem(1, 1, S, 16, 16, 64, 1.0)) == segments


def test_segments_are_of_chunks_of_the_walk():
    """8320 steps are 65 chunks of 128, and 260 of 32."""
    config = KernelConfig(stateless_forward=24, recurrent_fw_H=StageConfig(siz_b_LKV=32))
    assert config.walk_segments(Problem(1, 8, 8320, 256, 512, 128, 1.0)) == 4


@pytest.mark.parametrize(("S", "L", "DHQK", "walks"), [(8192, 256, 256, True), (8320, 128, 256, False), (8192, 256, 512, False)])
def test_the_walk_stores_states_of_whole_chunks_in_one_launch(S, L, DHQK, walks):
    """Not where a segment ends inside a chunk, nor where a launch has half of the rows."""
    config = KernelConfig(stateless_forward=24, recurrent_fw_H=StageConfig(siz_b_LKV=32, siz_b_loop=256))
    problem = Problem(1, 8, S, DHQK, 512, L, 1.0)
    assert config.walk_segments(problem) == 4
    assert "recurrent_fw_H" in config.passes(problem)[0]
    assert ("recurrent_fw_H" in config.passes(problem, recompute_states_in_bw=False)[0]) == walks


def test_stages_without_states_have_chunks_of_their_own():
    problem = Problem(1, 1, 128, 32, 32, 64, 1.0)
    config = KernelConfig(recurrent_fw_H=StageConfig(siz_b_LKV=32))
    assert [config.problem_of(stage, problem).L for stage in ("parallel_fw_P", "recurrent_fw_H", "parallel_fw_H")] == [32, 32, 64]
    assert config.problem_of("parallel_fw_P", dataclasses.replace(problem, L=16)).L == 16
    assert set(CHUNK_OF) <= set(STAGES)


@pytest.mark.parametrize("name", FILES)
def test_every_tuned_row_is_a_config(name):
    rows = json.loads((resources.files("mlstm_pallas") / "tuning" / name).read_text())["rows"]
    assert rows
    keys = [(row["DHQK"], row["DHHV"], row["dtype"]) for row in rows]
    assert len(set(keys)) == len(keys)
    for row in rows:
        made = config_from_row(row).or_else(heuristic_config(row["DHQK"], jnp.dtype(row["dtype"])))
        assert set(row) <= {"DHQK", "DHHV", "dtype", "chunk_size", "measured", *PLANS, *ALL_STAGES}
        problem = Problem(1, 1, made.L, row["DHQK"], row["DHHV"], made.L, 1.0)
        for stage in {*itertools.chain(*made.passes(problem))}:
            assert isinstance(made.stage(stage), StageConfig)


def test_the_package_carries_its_data():
    files = {x.name for x in resources.files("mlstm_pallas").iterdir()}
    assert "py.typed" in files
    assert "nvidia_h200.json" in FILES
