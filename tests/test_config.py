"""Rows of a device: explicit before the row before the rule; by_hand/config.txt has values."""

import functools
import json
import re

import jax
import pytest
import test_planning
from oracle import for_device, random_inputs
from stage_calls import tiles_class

from mlstm_pallas import KernelConfig, mlstm_recurrent_step
from mlstm_pallas.planning import config

H200 = "NVIDIA H200"


@pytest.fixture
def row(tmp_path, monkeypatch):
    """Writes the row of a device for heads of 64/64, or of DHQK/DHV."""

    def write(dtype, DHQK=64, DHV=64, **fields):
        row = dict(DHQK=DHQK, DHV=DHV, dtype=dtype, lowering="triton", config=fields, measured={})
        (tmp_path / "tuning" / "nvidia_h200.json").write_text(json.dumps({"rows": [row]}))
        config.tuned_rows.cache_clear()

    (tmp_path / "tuning").mkdir()
    monkeypatch.setattr(config.resources, "files", lambda package: tmp_path)
    config.tuned_rows.cache_clear()
    yield write
    config.tuned_rows.cache_clear()


def planned(stage="parallel_bw_dQKV", heads=(64, 64), **options):
    """L, whether the forward pass is fused, and the warps of a stage."""
    call = test_planning.planned(8, 64, 8192, *heads, **options)
    [warps] = (x.tiles["num_warps"] for x in call.launches if x.stage == stage)
    return call.chunk_size, call.fused, warps


OTHERS = dict(gpu="NVIDIA H20"), dict(dtype="float32"), dict(heads=(64, 128))


def test_explicit_beats_the_row_beats_the_rule(row):
    rules = [planned(**x) for x in OTHERS]
    row("bfloat16", chunk_size=128, fused=False, triton_parallel_bw_dQKV=dict(num_warps=2))
    assert planned() == planned(dtype="float16") == (128, False, 2)
    explicit = KernelConfig(fused=True, triton_parallel_bw_dQKV=dict(num_warps=8))
    assert planned(config=explicit) == (128, True, 8)
    assert planned(config=KernelConfig(chunk_size=32)) == (32, False, 2)
    assert [planned(**x) for x in OTHERS] == rules
    assert (128, False, 2) not in rules


def test_a_row_that_does_not_fit_a_problem_is_left_out(row, monkeypatch):
    """Some kernels of Mosaic GPU refuse tiles; those of Triton have all."""
    refuses = tiles_class("parallel_fw_H", "triton")
    row("bfloat16", 192, fused=False, triton_parallel_fw_H=dict(num_warps=8))
    planned_warps = functools.partial(
        planned, "parallel_fw_H", (192, 64), config=KernelConfig(fused=False)
    )
    assert planned_warps()[-1] == 8
    monkeypatch.setattr(refuses, "supports", lambda self, *_, **asked: self.num_warps < 8)
    assert planned_warps()[-1] == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_step_has_the_tiles_of_its_row(dtype, row):
    """For the dtype of the states; columns that no tile divides take one more CTA per head."""
    of_dtype = "float32" if dtype == "float32" else "bfloat16"
    row(of_dtype, DHV=72, triton_recurrent_step=dict(siz_b_DHHV=16))
    *x, m = random_inputs(0, 1, 3, 1, 64, 72, dtype="bfloat16").values()
    x = [*(y[:, :, 0] for y in x[:5]), *(y.astype(dtype) for y in x[5:]), m]
    explicit = KernelConfig(triton_recurrent_step=dict(siz_b_DHHV=64))

    def steps(x):
        return [mlstm_recurrent_step(*x, backend="triton", config=y) for y in (None, explicit)]

    with for_device(H200):
        text = str(jax.make_jaxpr(steps)(x))
    assert re.findall(r"grid=\(([\d, ]+)\)", text) == ["5, 3", "2, 3"]
