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
FILES = sorted(x.name for x in TUNING.iterdir() if x.name.endswith(".json"))
ROWS = {
    f"{name.removesuffix('.json')}-{row['DHQK']}_{row['DHHV']}-{row['dtype']}": row
    for name in FILES
    for row in json.loads((TUNING / name).read_text())["rows"]
}


def test_explicit_beats_tuned_beats_heuristic():
    tuned, heuristic = tuned_config("NVIDIA H200", 256, 512, BF16), heuristic_config(256, BF16)
    assert tuned is not None
    assert tuned.stage("parallel_fw_H") != heuristic.stage("parallel_fw_H")
    assert config_for(256, 512, 8192, BF16, device_kind="NVIDIA H200").stage(
        "parallel_fw_H"
    ) == tuned.stage("parallel_fw_H")
    assert config_for(256, 512, 8192, BF16).stage("parallel_fw_H") == heuristic.stage(
        "parallel_fw_H"
    )
    explicit = KernelConfig(parallel_fw_H=StageConfig(siz_b_LQ=32))
    filled = config_for(
        256, 512, 8192, BF16, device_kind="NVIDIA H200", explicit=explicit, chunk_size=64
    )
    assert filled.stage("parallel_fw_H") == explicit.stage("parallel_fw_H")
    assert filled.stage("recurrent_fw_C") == tuned.stage("recurrent_fw_C")
    assert filled.L == 64


def test_float16_has_the_rows_of_bfloat16():
    rows = {
        dtype: config_for(128, 256, 8192, jnp.dtype(dtype), device_kind="NVIDIA H200").as_row()
        for dtype in ("float16", "bfloat16", "float32")
    }
    assert rows["float16"] == rows["bfloat16"] != rows["float32"]
    assert rows["float16"]["chunk_size"] != heuristic_config(128, jnp.dtype("float16")).chunk_size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_step_has_the_tiles_of_its_row(dtype, monkeypatch):
    """That of the device, for the dtype of the states: here four CTAs a head."""
    row = dict(DHQK=64, DHHV=64, dtype="float32" if dtype == "float32" else "bfloat16")
    row |= dict(chunk_size=64, recurrent_step=dict(siz_b_DHHV=16))
    rows = {"NVIDIA H200": (row,)}
    monkeypatch.setattr(config, "tuned_rows", lambda kind: rows.get(kind, ()))
    array = jax.ShapeDtypeStruct
    x = [array((1, 3, 64), "bfloat16")] * 3 + [array((1, 3), "float32")] * 2
    x += [array((1, 3, 64, 64), dtype), array((1, 3, 64), dtype), array((1, 3), "float32")]

    def ctas(explicit=None):
        step = functools.partial(mlstm_recurrent_step, backend="triton", config=explicit)
        with for_device("NVIDIA H200"):
            text = str(jax.make_jaxpr(step)(*x))
        return re.findall(r"grid=\(([\d, ]+)\)", text)

    assert ctas() == ["4, 3"]
    assert ctas(KernelConfig(recurrent_step=StageConfig(siz_b_DHHV=64))) == ["1, 3"]


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
    assert config_for(256, 512, 1024, BF16, chunk_size=64).L == 64
    assert config_for(256, 512, 1024, BF16, explicit=KernelConfig(chunk_size=32)).L == 32
    assert config_for(256, 512, 1024, BF16, device_kind="a GPU without a tuning file").L == 64


def test_a_config_that_is_not_filled_has_no_chunk_size_and_no_tiles():
    with pytest.raises(ValueError, match=r"config\.chunk_size is None"):
        _ = KernelConfig().L
    with pytest.raises(ValueError, match=r"config\.parallel_fw_H is None"):
        KernelConfig().stage("parallel_fw_H")


def test_configs_are_equal_and_hashable_by_value():
    tiles = dict(parallel_fw_H=StageConfig(siz_b_LQ=32), chunk_gates=StageConfig(num_warps=1))
    one, other = (
        KernelConfig(64, **tiles),
        KernelConfig(64, **dict(reversed(tiles.items())), recurrent_fw_C=None),
    )
    assert one == other
    assert hash(one) == hash(other)
    assert one != one.replace(parallel_fw_H=StageConfig())


@pytest.mark.parametrize(
    ("heads", "row"),
    [
        ((64, 64), (64, 64)),
        ((128, 64), (128, 256)),
        ((192, 384), (256, 512)),
        ((64, 256), (128, 256)),
        ((512, 1024), (512, 512)),  # none is larger
    ],
    ids="{0[0]}_{0[1]}".format,
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
        (tmp_path / "tuning" / f"{name}.json").write_text(
            json.dumps({"device": name, "rows": [{"of": name}]})
        )
    monkeypatch.setattr(config.resources, "files", lambda package: tmp_path)
    monkeypatch.setattr(config, "tuned_rows", config.tuned_rows.__wrapped__)
    assert config.tuned_rows("NVIDIA H100 80GB HBM3") == ({"of": "nvidia_h100_80gb_hbm3"},)
    assert (
        config.tuned_rows("NVIDIA H100 NVL")
        == config.tuned_rows("NVIDIA H200")
        == ({"of": "nvidia_h200"},)
    )
    assert config.tuned_rows("NVIDIA L4") == ()


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
    assert row.keys() <= {
        "DHQK",
        "DHHV",
        "dtype",
        "chunk_size",
        "fused_min_heads",
        "mosaic_gpu",
        "measured",
        *STAGES,
    }
    assert row.get("mosaic_gpu", {}).keys() <= {"chunk_size", "fused_min_heads"}
    tuned = config_from_row(row).or_else(heuristic_config(row["DHQK"], jnp.dtype(row["dtype"])))
    assert tuned.stages.keys() == STAGES.keys()
    for stage in row.keys() & STAGES.keys():
        tiles, facts = (
            {name: x for name, x in row[stage].items() if name != "mosaic_gpu"},
            dispatch.kernel(stage, "mosaic_gpu"),
        )
        assert tiles.items() <= vars(tuned.stage(stage)).items(), stage
        assert tiles.keys() <= dispatch.configured(stage).search.keys() | {"num_splits"}, stage
        if "mosaic_gpu" in row[stage]:
            assert facts is not None
            assert row[stage]["mosaic_gpu"].keys() == facts.search.keys(), stage


@pytest.mark.parametrize(
    ("backend", "L"),
    [(None, 64), ("triton", 64), ("mosaic_gpu", 128), ("mosaic_gpu_interpret", 128)],
)
def test_a_row_may_have_another_chunk_size_for_mosaic_gpu(backend, L):
    chosen = dict(device_kind="NVIDIA H200", backend=backend)
    assert config_for(128, 128, 8192, BF16, **chosen).L == L
    assert config_for(128, 128, 8192, BF16, chunk_size=32, **chosen).L == 32
    assert (
        config_for(128, 128, 8192, BF16, explicit=KernelConfig(chunk_size=256), **chosen).L == 256
    )
    assert config_for(256, 512, 8192, BF16, **chosen).L == 256


def test_no_row_is_tuned_twice():
    assert len(ROWS) == sum(len(json.loads((TUNING / name).read_text())["rows"]) for name in FILES)


@pytest.mark.parametrize(
    "config",
    [
        KernelConfig(),
        KernelConfig(chunk_size=64, precision=jax.lax.Precision.HIGHEST, fused_min_heads=0),
        KernelConfig(
            precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
            recurrent_fw_H=StageConfig(num_warps=8, mosaic_gpu=StageConfig()),
        ),
    ],
    ids=["empty", "fields", "stages"],
)
def test_repr_is_the_call_that_makes_it(config):
    assert eval(repr(config)) == config
