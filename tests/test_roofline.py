"""The roofline of stages on Mosaic GPU; test_kernel_benchmark.py has that of Triton's stages and of
whole calls."""

import jax
import kernel_benchmark
import peers
import pytest
import roofline
from roofline import Shape
from test_kernel_benchmark import READ, nbytes

from mlstm_pallas import dispatch

SHAPE = Shape(1, 64, 256, 256, 512)  # at which all Mosaic GPU kernels run
CASES = [name for name in kernel_benchmark.STAGES if dispatch.kernel(name, "mosaic_gpu")]
WITH_ABAR = {"recurrent_fw_H": {"parallel_fw_P": lambda x: (x.matP, x.keys, x.vecR)}}


def stage_on(backend, stage, shape=SHAPE):
    impl = kernel_benchmark.MlstmPallasStage(stage, backend, shape, "bfloat16", 128)
    x = jax.eval_shape(lambda: peers.random_inputs(jax.random.key(0), shape, "bfloat16"))
    L = impl.call.problem.L
    return impl, jax.eval_shape(lambda x: kernel_benchmark.stage_arrays(x, L, impl.stage.fused), x)


@pytest.mark.parametrize("stage", CASES)
def test_bytes_of_a_stage_on_mosaic_gpu_are_those_of_its_arrays(stage):
    impl, inputs = stage_on("mosaic_gpu", stage)
    assert impl.call.lowering.room == "mosaic_gpu"
    args = jax.eval_shape(lambda x: impl.computation(x, "fwd")[1], inputs)
    outputs = jax.eval_shape(impl.reference, *impl.oracle_arguments(inputs)[0])
    # What is not weighted is not written.
    written = {x: y for x, y in outputs._asdict().items() if x not in ("queries", "keys")}
    read = (READ | WITH_ABAR).get(stage, {})
    arrays = zip(impl.stage.inputs, args, strict=True)
    result = [read.get(name, lambda x: x)(x) for name, x in arrays]
    assert impl.weighted
    cost = roofline.of_stage(impl.stage, impl.call, 2, weighted=impl.weighted)
    assert cost.bytes == nbytes(result) + nbytes(list(written.values()))
    assert cost.flops == roofline.COSTS[impl.stage.name](impl.call.problem, 2).flops


@pytest.mark.parametrize("heads", [(64, 128), (128, 256)])
def test_a_kernel_that_computes_its_tiles_reads_none(heads):
    shape, name = Shape(1, 64, 256, *heads), "parallel_bw_dQKV"
    impl, inputs = stage_on("mosaic_gpu", name, shape)
    args = jax.eval_shape(lambda x: impl.computation(x, "fwd")[1], inputs)
    outputs = jax.eval_shape(impl.reference, *args)
    read = READ[name] | {
        "chunk_gates": lambda x: (x.vecE, x.vecU, x.vecW, x.vecAbar),
        "parallel_bw_dP": lambda x: (),
    }
    result = [
        read.get(name, lambda x: x)(x) for name, x in zip(impl.stage.inputs, args, strict=True)
    ]
    cost = roofline.of_stage(impl.stage, impl.call, 2, weighted=impl.weighted)
    assert (
        cost.bytes
        == nbytes(result) + nbytes(list(outputs._asdict().values())) + 3 * 4 * shape.steps
    )  # the sums of W
    both = [roofline.COSTS[stage](impl.call.problem, 2).flops for stage in (name, "parallel_bw_dP")]
    assert cost.flops == sum(both)


def test_the_fused_scan_on_mosaic_gpu_is_counted_in_its_own_chunks():
    """The FLOPs inside chunks and the bytes of P grow with L."""
    calls = {
        backend: stage_on(backend, "recurrent_fw_H")[0].call
        for backend in ("mosaic_gpu", "interpret")
    }
    assert {backend: call.problem.L for backend, call in calls.items()} == {
        "mosaic_gpu": 64,
        "interpret": 32,
    }
    R, K, V = SHAPE.steps, SHAPE.DHQK, SHAPE.DHHV
    floats = 2 * R + R // 64 + 2 * SHAPE.B * SHAPE.NH * K * V
    expected = 4 * R * K * V + R * 65 * V, 2 * R * (2 * K + 2 * V + 64) + 4 * floats
    assert (
        roofline.of_stage(kernel_benchmark.STAGES["recurrent_fw_H"], calls["mosaic_gpu"], 2)
        == expected
    )
