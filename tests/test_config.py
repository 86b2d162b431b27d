"""config_for: explicit > tuned row > heuristic; and every tuned row is a valid config."""

import functools
import json
import re
from importlib import resources

import jax
import jax.numpy as jnp
import pytest
from oracle import for_device

from mlstm_pallas import KernelConfig, StageConfig, config, dispatch, mlstm_recurrent_step
from mlstm_pallas.config import (
    config_for,
    config_from_row,
    config_from_rows,
    heuristic_config,
    tuned_config,
)
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages import STAGES

BF16 = jnp.dtype("bfloat16")
TUNING = resources.files("mlstm_pallas") / "tuning"
CONTENTS = {x.name: json.loads(x.read_text()) for x in TUNING.iterdir() if ".json" in x.name}
ROWS = {
    f"{name.removesuffix('.json')}-{row['DHQK']}_{row['DHHV']}-{row['dtype']}": row
    for name, content in sorted(CONTENTS.items())
    for row in content["rows"]
}
H200 = dict(device_kind="NVIDIA H200")
config_of_7b = functools.partial(config_for, 256, 512, 8192, BF16)


def test_explicit_beats_tuned_beats_heuristic():
    tuned, heuristic = tuned_config("NVIDIA H200", 256, 512, BF16), heuristic_config(256, BF16)
    explicit = KernelConfig(parallel_fw_H=StageConfig(siz_b_LQ=32))
    filled = config_of_7b(**H200, explicit=explicit, chunk_size=64)
    configs = filled, config_of_7b(**H200), config_of_7b()
    tiles = [config.stage("parallel_fw_H") for config in configs]
    assert tiles == [config.stage("parallel_fw_H") for config in (explicit, tuned, heuristic)]
    assert len({*tiles}) == 3
    assert filled.stage("recurrent_fw_C") == tuned.stage("recurrent_fw_C")
    assert filled.L == 64


def test_float16_has_the_rows_of_bfloat16():
    rows = {
        dtype: config_for(128, 256, 8192, jnp.dtype(dtype), **H200).as_row()
        for dtype in ("float16", "bfloat16", "float32")
    }
    assert rows["float16"] == rows["bfloat16"] != rows["float32"]
    assert rows["float16"]["chunk_size"] != heuristic_config(128, jnp.dtype("float16")).chunk_size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_step_has_the_tiles_of_its_row(dtype, monkeypatch):
    """That of the device, for the dtype of the states: here four CTAs a head."""
    row = dict(DHQK=64, DHHV=64, dtype="float32" if dtype == "float32" else "bfloat16")
    row |= dict(chunk_size=64, recurrent_step=dict(siz_b_DHHV=16))
    monkeypatch.setattr(config, "tuned_rows", lambda kind: [row] * (kind == "NVIDIA H200"))
    shapes = [(1, 3, 64)] * 3 + [(1, 3)] * 2 + [(1, 3, 64, 64), (1, 3, 64), (1, 3)]
    dtypes = ["bfloat16"] * 3 + ["float32"] * 2 + [dtype] * 2 + ["float32"]
    x = map(jax.ShapeDtypeStruct, shapes, dtypes)
    step = functools.partial(mlstm_recurrent_step, backend="triton")
    explicit = functools.partial(step, config=KernelConfig(recurrent_step=StageConfig()))
    with for_device("NVIDIA H200"):
        text = str(jax.make_jaxpr(lambda *x: (step(*x), explicit(*x)))(*x))
    assert re.findall(r"grid=\(([\d, ]+)\)", text) == ["4, 3", "1, 3"]


def test_the_chunk_is_clamped_to_the_sequence():
    assert config_for(64, 64, 100, BF16, chunk_size=1024).L == 128
    assert config_for(64, 64, 1, BF16).L == 16


@pytest.mark.parametrize(
    ("DHQK", "DHHV", "S", "L"),
    [
        (128, 128, 4096, 64),
        (128, 256, 1024, 128),
        (256, 512, 1024, 256),
        (256, 512, 640, 128),  # a chunk of 256 pads to 768
        (256, 512, 300, 64),
        (256, 512, 1, 16),
    ],
)
def test_the_chunk_of_the_plain_form_grows_with_the_heads_and_adds_no_padding(DHQK, DHHV, S, L):
    assert config_for(DHQK, DHHV, S, BF16).L == L


def test_the_chunk_of_the_plain_form_yields_to_what_is_explicit_and_is_not_for_gpus():
    config = functools.partial(config_for, 256, 512, 1024, BF16)
    assert config(chunk_size=64).L == 64
    assert config(explicit=KernelConfig(chunk_size=32)).L == 32
    assert config(device_kind="a GPU without a tuning file").L == 64


def test_a_config_that_is_not_filled_has_no_chunk_size_and_no_tiles():
    with pytest.raises(ValueError, match=r"config\.chunk_size is None"):
        _ = KernelConfig().L
    with pytest.raises(ValueError, match=r"config\.parallel_fw_H is None"):
        KernelConfig().stage("parallel_fw_H")


def test_configs_are_equal_and_hashable_by_value():
    tiles = dict(parallel_fw_H=StageConfig(siz_b_LQ=32), chunk_gates=StageConfig(num_warps=1))
    one = KernelConfig(64, **tiles)
    other = KernelConfig(64, **dict(reversed(tiles.items())), recurrent_fw_C=None)
    assert {one, other} == {one} != {one.replace(parallel_fw_H=StageConfig())}


@pytest.mark.parametrize(
    ("heads", "row"),
    {
        (64, 64): (64, 64),
        (128, 64): (128, 256),
        (192, 384): (256, 512),
        (64, 256): (128, 256),
        (512, 1024): (512, 512),  # none is larger
    }.items(),
    ids=str,
)
def test_heads_without_a_row_have_that_of_the_smallest_larger_ones(heads, row):
    sizes = [(512, 512), (64, 64), (256, 512), (128, 256)]
    rows = [
        dict(DHQK=K, DHHV=V, dtype="bfloat16", chunk_size=16, fused_min_heads=K + V)
        for K, V in sizes
    ]
    assert config_from_rows(rows, *heads, "bfloat16").fused_min_heads == sum(row)
    assert config_from_rows(rows, *heads, "float32") is None


def test_the_same_chip_shares_its_rows():
    assert config.tuned_rows("NVIDIA H100 80GB HBM3") == config.tuned_rows("NVIDIA H200") != ()
    assert config.tuned_rows("some other device") == ()


def test_a_device_has_its_own_rows_before_those_of_its_chip(tmp_path, monkeypatch):
    (tmp_path / "tuning").mkdir()
    for name in ("nvidia_h200", "nvidia_h100_80gb_hbm3"):
        text = json.dumps({"device": name, "rows": [name]})
        (tmp_path / "tuning" / f"{name}.json").write_text(text)
    monkeypatch.setattr(config.resources, "files", lambda package: tmp_path)
    devices = "H100 80GB HBM3", "H100 NVL", "H200", "L4"
    rows = [config.tuned_rows.__wrapped__(f"NVIDIA {device}") for device in devices]
    assert rows == [("nvidia_h100_80gb_hbm3",), *[("nvidia_h200",)] * 2, ()]


def test_tiles_are_clamped_to_what_divides_the_problem():
    tiles = StageConfig(siz_b_LQ=128, siz_b_LKV=128, siz_b_DHQK=128, siz_b_DHHV=256).clamped(
        Problem(1, 1, 64, 192, 320, 32, 1.0)
    )
    assert (tiles.siz_b_LQ, tiles.siz_b_LKV, tiles.siz_b_DHQK, tiles.siz_b_DHHV) == (32, 32, 64, 64)
    assert not tiles.keep_q  # 192 is no power of two


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_reads_fields_of_its_config(stage):
    """And the tuner's values of each make a config."""
    for name, values in dispatch.configured(stage).search.items():
        for value in values:
            assert getattr(StageConfig(**{name: value}), name) == value


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_of_a_config_is_that_config(dtype):
    heuristic = heuristic_config(64, jnp.dtype(dtype))
    row = heuristic.as_row()
    assert config_from_row(json.loads(json.dumps(row))).as_row() == row
    assert row.keys() == {"chunk_size", "fused_min_heads", *STAGES}


@pytest.mark.parametrize("name", ROWS)
def test_every_tuned_row_is_a_config(name):
    row = ROWS[name]
    fields = {"DHQK", "DHHV", "dtype", "chunk_size", "fused_min_heads", "mosaic_gpu", "measured"}
    assert row.keys() <= fields | {*STAGES}
    assert row.get("mosaic_gpu", {}).keys() <= {"chunk_size", "fused_min_heads"}
    tuned = config_from_row(row).or_else(heuristic_config(row["DHQK"], jnp.dtype(row["dtype"])))
    assert tuned.stages.keys() == STAGES.keys()
    for stage in row.keys() & STAGES.keys():
        tiles = dict(row[stage])
        if mosaic_gpu := tiles.pop("mosaic_gpu", None):
            assert mosaic_gpu.keys() == dispatch.kernel(stage, "mosaic_gpu").search.keys(), stage
        assert tiles.items() <= vars(tuned.stage(stage)).items(), stage
        assert tiles.keys() <= dispatch.configured(stage).search.keys() | {"num_splits"}, stage


@pytest.mark.parametrize(
    ("backend", "L"),
    [(None, 64), ("triton", 64), ("mosaic_gpu", 128), ("mosaic_gpu_interpret", 128)],
)
def test_a_row_may_have_another_chunk_size_for_mosaic_gpu(backend, L):
    config = functools.partial(config_for, 128, 128, 8192, BF16, **H200, backend=backend)
    assert config().L == L
    assert config(chunk_size=32).L == 32
    assert config(explicit=KernelConfig(chunk_size=256)).L == 256
    assert config_of_7b(**H200, backend=backend).L == 256


def test_no_row_is_tuned_twice():
    assert len(ROWS) == sum(len(content["rows"]) for content in CONTENTS.values())


@pytest.mark.parametrize(
    "config",
    [
        KernelConfig(chunk_size=64, precision=jax.lax.Precision.HIGHEST, fused_min_heads=0),
        KernelConfig(
            precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
            recurrent_fw_H=StageConfig(num_warps=8, mosaic_gpu=StageConfig()),
        ),
    ],
    ids=["fields", "stages"],
)
def test_repr_is_the_call_that_makes_it(config):
    assert eval(repr(config)) == config
