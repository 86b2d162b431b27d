"""FLOPs and bytes of stages, of whole calls and of attention; the least time."""

import pytest
from kernel_benchmark import MlstmPallasStage
from shapes import parse

from mlstm_pallas import KernelConfig

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


@pytest.mark.parametrize("line", COSTS.strip().splitlines())
def test_flops_and_bytes_of_a_stage(line, monkeypatch):
    monkeypatch.setattr("mlstm_pallas.planning.backend.check_mosaic_gpu", lambda *_: None)
    call, costs = line.split(": ")
    backend, stage, shape = call.split()
    config = KernelConfig(triton_recurrent_fw_H=dict(siz_b_L=32))
    chunks = 128 if backend == "mosaic_gpu" else 32
    impl = MlstmPallasStage(stage, backend, parse(shape)[shape], "bfloat16", chunks, config)
    assert impl.phases(parse(shape)[shape], 2, "fwd") == ((*map(int, costs.split()),),)
