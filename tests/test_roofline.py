"""FLOPs and bytes of stages, of whole calls and of attention; the least time."""

import jax
import peers
import pytest
import roofline
from costs import Cost
from kernel_benchmark import MlstmPallasStage
from shapes import Shape, parse

from mlstm_pallas import KernelConfig

SMALL = Shape(2, 3, 64, 16, 32)
# A stage's FLOPs and bytes, in bfloat16 and chunks of 32 or, on Mosaic GPU, 128 steps, which the
# fused scan has halved: once the sizes of the arrays that its kernel reads and writes, and products
# of which those within a chunk count for s <= t alone. With heads of 64/128 parallel_bw_dQKV
# computes P and dP.
COSTS = """
interpret chunk_gates 2x3x64x16x32: 0 13968
interpret recurrent_fw_C 2x3x64x16x32: 393216 76848
interpret parallel_fw_H 2x3x64x16x32: 1001472 97536
interpret parallel_fw_P 2x3x64x16x32: 202752 76032
interpret recurrent_fw_H 2x3x64x16x32: 1191936 124464
interpret parallel_bw_dP 2x3x64x16x32: 608256 191232
interpret recurrent_bw_dC 2x3x64x16x32: 786432 147552
interpret parallel_bw_dQKV 2x3x64x16x32: 1990656 207408
mosaic_gpu chunk_gates 1x64x256x256x512: 0 591360
mosaic_gpu recurrent_fw_C 1x64x256x256x512: 4294967296 126157312
mosaic_gpu parallel_fw_H 1x64x256x256x512: 5918162944 84475904
mosaic_gpu parallel_fw_P 1x64x256x256x512: 272629760 19660800
mosaic_gpu recurrent_fw_H 1x64x256x256x512: 9135194112 119669760
mosaic_gpu parallel_bw_dP 1x64x256x256x512: 1623195648 76414976
mosaic_gpu recurrent_bw_dC 1x64x256x256x512: 8589934592 251790336
mosaic_gpu parallel_bw_dQKV 1x64x256x256x512: 15049162752 160039424
mosaic_gpu parallel_bw_dQKV 1x64x256x64x128: 1752170496 26083840
"""


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("line", COSTS.strip().splitlines())
def test_flops_and_bytes_of_a_stage(line, monkeypatch):
    monkeypatch.setattr("mlstm_pallas.planning.backend.check_mosaic_gpu", lambda *_: None)
    call, costs = line.split(": ")
    backend, stage, shape = call.split()
    config = KernelConfig(triton_recurrent_fw_H=dict(siz_b_L=32))
    chunks = 128 if backend == "mosaic_gpu" else 32
    impl = MlstmPallasStage(stage, backend, parse(shape)[shape], "bfloat16", chunks, config)
    assert impl.phases(parse(shape)[shape], 2, "fwd") == ((*map(int, costs.split()),),)


def test_a_direction_has_the_bytes_of_its_arrays():
    inputs = jax.eval_shape(lambda: peers.random_inputs(jax.random.key(0), SMALL, "bfloat16"))
    forward, backward = roofline.mlstm(SMALL, 2, "fwbw")
    assert (forward,) == roofline.mlstm(SMALL, 2, "fwd")
    assert forward.bytes == nbytes(inputs)  # h is as large as its cotangent
    assert backward.bytes == 2 * nbytes(inputs) + 2 * 4 * SMALL.steps


def test_attention_counts_pairs_once():
    pairs, array = 2 * 3 * (1 + 2 + 3 + 4 + 5), 2 * 2 * 3 * 5 * 16
    phases = (pairs * 2 * 2 * 16, 4 * array), (pairs * 5 * 2 * 16, 8 * array)
    assert roofline.attention(2, 3, 5, 16, 2, "fwbw") == phases
    assert roofline.attention(2, 3, 5, 16, 2, "fwd") == phases[:1]


def test_flops_of_7b_8k():
    """In chunks of 128 steps, by step and head, whichever kernels run."""
    steps, inter, triangle = 8 * 8 * 8192, 2 * 256 * 512, 129
    forward, backward = roofline.mlstm(Shape(8, 8, 8192, 256, 512), 2, "fwbw")
    assert forward.flops == steps * (2 * inter + triangle * (256 + 512))
    assert backward.flops == steps * (5 * inter + triangle * (3 * 256 + 2 * 512))
    assert roofline.backward_stages(True) == ("chunk_gates", "recurrent_bw_dC", "parallel_bw_dQKV")


def test_the_floor_is_the_slower_of_products_and_traffic_in_each_phase():
    assert roofline.floor_seconds([Cost(6, 1), Cost(1, 8)], 2.0, 4.0) == 3.0 + 2.0
    rates = [roofline.device_rates("NVIDIA H200", x) for x in ("bfloat16", "float16", "float32")]
    assert rates == [(790e12, 4.27e12)] * 2 + [(790e12 / 6, 4.27e12)]
    assert roofline.device_rates("cpu", "float32") == (None, None)  # nobody measured them
