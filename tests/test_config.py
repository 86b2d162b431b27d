"""KernelConfig: explicit before the row of the device before the rule; a value that is its repr."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from oracle import for_device, random_inputs, step_names

from mlstm_pallas import KernelConfig, mlstm_recurrent_step
from mlstm_pallas.planning import call_spec as planning
from mlstm_pallas.planning import config
from mlstm_pallas.problem.gpu import known_gpu

H200 = "NVIDIA H200"


@pytest.fixture
def row(tmp_path, monkeypatch):
    """Writes the row of a device for heads of 64/64, or of DHQK/DHHV."""

    def write(dtype, DHQK=64, DHHV=64, **fields):
        row = dict(DHQK=DHQK, DHHV=DHHV, dtype=dtype, lowering="triton", config=fields, measured={})
        (tmp_path / "tuning" / "nvidia_h200.json").write_text(json.dumps({"rows": [row]}))
        config.tuned_rows.cache_clear()

    (tmp_path / "tuning").mkdir()
    monkeypatch.setattr(config.resources, "files", lambda package: tmp_path)
    yield write
    config.tuned_rows.cache_clear()


def planned(device, *args, heads=(64, 64), dtype="bfloat16"):
    """L, whether the forward pass is fused, and the warps of parallel_fw_H."""
    shape = 8, 64, 8192, *heads
    spec = planning.make_spec(shape, jnp.dtype(dtype), known_gpu(device), "triton", None, *args)
    tiles = spec.launch("parallel_fw_H", spec.lowering).tiles
    return spec.problem.L, spec.plan.fused, tiles.num_warps


def test_explicit_beats_the_row_beats_the_rule(row):
    row("bfloat16", chunk_size=128, fused=False, triton_parallel_fw_H=dict(num_warps=2))
    explicit = KernelConfig(fused=True, triton_parallel_fw_H=dict(num_warps=8))

    assert planned(H200) == planned(H200, dtype="float16") == (128, False, 2)
    assert planned(H200, None, explicit) == (128, True, 8)
    assert planned(H200, 32) == (32, False, 2)
    assert planned("NVIDIA H20") == planned(H200, dtype="float32") == (64, False, 4)
    assert planned(H200, heads=(64, 128)) == (64, True, 4)


def test_a_row_that_does_not_fit_a_problem_is_left_out(row):
    """keep_q needs heads of a power of two."""
    row("bfloat16", 192, triton_parallel_fw_H=dict(keep_q=True, num_warps=8))
    assert planned(H200, heads=(192, 64))[-1] == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_step_has_the_tiles_of_its_row(dtype, row):
    """For the dtype of the states; columns that no tile divides take one more CTA per head."""
    of_dtype = "float32" if dtype == "float32" else "bfloat16"
    row(of_dtype, DHHV=72, triton_recurrent_step=dict(siz_b_DHHV=16))
    x = step_names(random_inputs(0, 1, 3, 1, 64, 72, dtype="bfloat16"), 0)
    x |= {name: x[name].astype(dtype) for name in "cn"}
    explicit = KernelConfig(triton_recurrent_step=dict(siz_b_DHHV=64))

    def steps(x):
        return [mlstm_recurrent_step(**x, backend="triton", config=y) for y in (None, explicit)]

    with for_device(H200):
        text = str(jax.make_jaxpr(steps)(x))
    assert re.findall(r"grid=\(([\d, ]+)\)", text) == ["5, 3", "2, 3"]


def test_configs_are_equal_and_hashable_by_value():
    tiles = dict(triton_parallel_fw_H=dict(siz_b_LQ=32), triton_chunk_gates=dict(num_warps=1))
    one = KernelConfig(64, **tiles)
    other = KernelConfig(64, **dict(reversed(tiles.items())), triton_recurrent_fw_C=None)
    assert (
        {one, other} == {one} != {KernelConfig(64, triton_chunk_gates=tiles["triton_chunk_gates"])}
    )


CONFIGS = {
    "fields": "chunk_size=64, precision=jax.lax.Precision.HIGHEST, fused=False",
    "tiles": "precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3, num_splits=2, "
    "triton_recurrent_fw_H={'num_warps': 8}, mosaic_gpu_recurrent_fw_H={'state_rows': 64}",
}


@pytest.mark.parametrize("case", CONFIGS)
def test_repr_is_the_call_that_makes_it(case):
    call = f"KernelConfig({CONFIGS[case]})"
    assert repr(eval(call)) == call
