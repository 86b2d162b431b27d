"""FLOPs and bytes of stages, of whole calls and of attention; the least time."""

import re

import jax
import peers
import pytest
import roofline
from costs import Cost
from kernel_benchmark import STAGES, MlstmPallasStage, stage_arrays
from shapes import Shape

from mlstm_pallas import KernelConfig
from mlstm_pallas.planning import dispatch

SMALL, WIDE = Shape(2, 3, 64, 16, 32), Shape(1, 64, 256, 256, 512)
L = 32
# What the kernel of a stage reads of a NamedTuple; computes_scores: parallel_bw_dQKV on Mosaic
# GPU, where it makes P and dP.
READ = """
parallel_fw_H gates vecE vecU vecW vecM
parallel_fw_P gates vecE vecU vecW vecAbar vecM
recurrent_fw_H scan matP keys vecR
parallel_bw_dP gates vecE vecU vecW vecAbar vecM
parallel_bw_dQKV normaliser_gradients vecInvDen vecDzDen
parallel_bw_dQKV gates vecW vecAbar
parallel_bw_dQKV scores matP matDeltaP
computes_scores normaliser_gradients vecInvDen vecDzDen
computes_scores gates vecE vecU vecW vecAbar
computes_scores scores
"""
# The products of a stage: inter-chunk ones, and the contracted or outer axis of the intra-chunk
# ones, which count for s <= t alone.
PRODUCTS = """
chunk_gates 0
recurrent_fw_C 1
parallel_fw_H 1 kv
parallel_fw_P 0 k
recurrent_fw_H 2 v
parallel_bw_dP 0 kv
recurrent_bw_dC 2
parallel_bw_dQKV 3 kkv
computes_scores 3 kkvkv
"""
MOSAIC_GPU = [name for name in STAGES if dispatch.tiles_class(name, "mosaic_gpu")]


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("backend", "stage", "shape"),
    [
        *(("interpret", name, SMALL) for name in STAGES),
        *(("mosaic_gpu", name, WIDE) for name in MOSAIC_GPU),
        ("mosaic_gpu", "computes_scores", Shape(1, 64, 256, 64, 128)),
    ],
)
def test_bytes_and_flops_of_a_stage_are_those_of_its_arrays_and_products(
    backend, stage, shape, monkeypatch
):
    monkeypatch.setattr("mlstm_pallas.planning.backend.check_mosaic_gpu", lambda *_: None)
    config = KernelConfig(triton_recurrent_fw_H=dict(siz_b_L=L))
    name = "parallel_bw_dQKV" if stage == "computes_scores" else stage
    on_mosaic_gpu = backend == "mosaic_gpu"
    chunks = 128 if on_mosaic_gpu else L
    impl = MlstmPallasStage(name, backend, shape, "bfloat16", chunks, config)
    assert impl.call.lowering.folder in ("triton", backend)
    p = impl.call.problem
    # The fused scan has chunks of its own.
    assert (64 if on_mosaic_gpu and impl.stage.fused else chunks) == p.L

    @jax.eval_shape
    def arrays():
        x = peers.random_inputs(jax.random.key(0), shape, "bfloat16")
        inputs = stage_arrays(x, p.L, impl.stage.fused)
        function, args = impl.computation(inputs, "fwd")
        if on_mosaic_gpu:
            return args, impl.reference(*impl.oracle_arguments(inputs)[0])._asdict()
        return args, function(*args)._asdict()

    args, outputs = arrays
    if stage == "computes_scores":
        outputs |= dict(sums=[jax.ShapeDtypeStruct((3, shape.steps), "float32")])
    elif on_mosaic_gpu:  # what is not weighted is not written
        outputs = {x: y for x, y in outputs.items() if x not in ("queries", "keys")}
    # parallel_fw_P on Mosaic GPU writes no keys.
    writes_no_keys = on_mosaic_gpu and stage == "parallel_fw_P"
    inputs = dict(zip(impl.stage.inputs, args, strict=True))
    reads = "parallel_fw_H" if writes_no_keys else stage
    for x, fields in re.findall(rf"^{reads} (\w+)(.*)", READ, re.MULTILINE):
        inputs[x] = [getattr(inputs[x], field) for field in fields.split()]
    if stage == "recurrent_bw_dC":  # reads gamma once for each recurrence
        inputs["scaGamma"] = [inputs["scaGamma"]] * 2
    [cost] = impl.phases(shape, 2, "fwd")
    assert cost.bytes == nbytes((inputs, outputs))
    inter, intra = re.search(rf"{stage} (\d) ?(.*)", PRODUCTS).groups()
    pairs = intra.count("k") * p.DHQK + intra.count("v") * p.DHV
    assert cost.flops == shape.steps * (2 * int(inter) * p.DHQK * p.DHV + (p.L + 1) * pairs)


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
