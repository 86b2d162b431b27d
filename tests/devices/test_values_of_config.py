"""KernelConfig: values that a hand can check."""

import jax
import jax.numpy as jnp
from oracle import refused

from mlstm_pallas import KernelConfig


def precisions(config):
    dtypes = map(jnp.dtype, ("float32", "bfloat16"))
    return [
        [
            config.dot_precision(dtype, x) and config.dot_precision(dtype, x).name
            for x in (False, True)
        ]
        for dtype in dtypes
    ]


HIGH, X3 = jax.lax.Precision.HIGH, jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3
one = KernelConfig(64, HIGH, False, 2, triton_parallel_fw_P=dict(num_warps=2))


def test_equal_configs():
    assert KernelConfig() == KernelConfig()
    assert (one.tiles_of("triton_parallel_fw_P"), one.tiles_of("triton_parallel_fw_H")) == (
        {"num_warps": 2},
        {},
    )


def test_what_one_leaves_none_is_from_the_other():
    """What one leaves None is from the other."""
    assert KernelConfig(128, triton_chunk_gates=dict(num_warps=1)) | KernelConfig(
        32, fused=True
    ) == KernelConfig(chunk_size=32, fused=True, triton_chunk_gates={"num_warps": 1})
    assert one | KernelConfig(triton_parallel_fw_P=dict(siz_b_DHQK=16)) == KernelConfig(
        chunk_size=64,
        precision=jax.lax.Precision.HIGH,
        fused=False,
        num_splits=2,
        triton_parallel_fw_P={"siz_b_DHQK": 16},
    )


def test_configs_are_equal_and_hashable_by_value_and_repr():
    """Configs are equal and hashable by value, and repr is the call that makes one."""
    P, H, G = dict(num_warps=2), dict(siz_b_LQ=32), dict(num_warps=1)
    same = KernelConfig(64, triton_chunk_gates=G, triton_parallel_fw_H=H)
    other = KernelConfig(
        64, triton_parallel_fw_H=H, triton_chunk_gates=G, triton_parallel_fw_P=None
    )
    assert {same, other} == {same} != {KernelConfig(64, triton_chunk_gates=G)}
    assert KernelConfig(
        precision=X3,
        num_splits=2,
        triton_recurrent_fw_C=P,
        mosaic_gpu_recurrent_fw_H=dict(state_rows=64),
    ) == KernelConfig(
        precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
        num_splits=2,
        triton_recurrent_fw_C={"num_warps": 2},
        mosaic_gpu_recurrent_fw_H={"state_rows": 64},
    )
    assert all(eval(repr(x)) == x for x in (one, same, KernelConfig(precision=X3, fused=False)))


def test_the_precision_of_products():
    """The precision of products: in float32 by six bfloat16 products unless another one is
    chosen; interpreted in full float32, where the algorithms of tensor cores are not."""
    assert precisions(KernelConfig()) == [["BF16_BF16_F32_X6", "HIGHEST"], [None, "HIGHEST"]]
    assert precisions(KernelConfig(precision=HIGH)) == [["HIGH", "HIGH"], [None, "HIGHEST"]]
    assert precisions(KernelConfig(precision=X3)) == [
        ["BF16_BF16_F32_X3", "HIGHEST"],
        [None, "HIGHEST"],
    ]


def test_refusals_name_the_field():
    """What is refused, by name."""
    refused(
        TypeError,
        (
            "config.precision is 'high', expected None, a jax.lax.Precision or a "
            "jax.lax.DotAlgorithmPreset"
        ),
        lambda: KernelConfig(precision="high"),
    )
    refused(
        TypeError, "config.fused is 1, expected None, True or False", lambda: KernelConfig(fused=1)
    )
    refused(
        ValueError,
        "config.chunk_size is 8, expected a power of two >= 16",
        lambda: KernelConfig(chunk_size=8),
    )
    refused(
        ValueError,
        "config.num_splits is 3, expected a power of two >= 1",
        lambda: KernelConfig(num_splits=3),
    )
    refused(
        TypeError,
        (
            "config.triton_parallel_fw is no field, expected one like triton_parallel_fw_P, "
            "triton_parallel_fw_H, triton_parallel_bw_dP"
        ),
        lambda: KernelConfig(triton_parallel_fw={}),
    )
    refused(
        TypeError,
        "config.triton_parallel_fw_H is 3, expected a Mapping or None",
        lambda: KernelConfig(triton_parallel_fw_H=3),
    )
    refused(
        TypeError,
        (
            "config.triton_parallel_fw_H: foo is no field, expected one like siz_b_LQ, "
            "siz_b_LKV, siz_b_L, siz_b_DHQK, siz_b_DHHV, block_k, state_rows, state_columns, "
            "num_warps, score_warps, num_stages, num_splits, num_ctas, keep_q"
        ),
        lambda: KernelConfig(triton_parallel_fw_H=dict(foo=1)),
    )
    refused(
        ValueError,
        ("config.triton_parallel_fw_H: num_warps is 3, expected a power of two from 1 to 16"),
        lambda: KernelConfig(triton_parallel_fw_H=dict(num_warps=3)),
    )
