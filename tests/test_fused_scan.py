"""The forward pass by the fused scan, interpreted, against the recurrence; in splits:
test_splits.py; gradients: test_gradients.py."""

import functools

import jax
import numpy as np
import pytest
from oracle import assert_close, compare, oracle, random_inputs, tolerance

from mlstm_pallas import KernelConfig, StageConfig, mlstm_chunkwise

pytestmark = pytest.mark.usefixtures("quick_compilation")

TILES = {
    "LKV16-K16-V16": StageConfig(siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=16),
    "LKV32-K64-V16": StageConfig(siz_b_LKV=32, siz_b_DHQK=64, siz_b_DHHV=16),
    "default": None,
}
VARIANTS = {
    "exp": {},
    "floor": {"stabilize_correctly": False, "norm_val": 3.0, "eps": 0.0},
    "unnormalised": {"input_gate": "sigmoid", "normalize": False},
}


def fused(tiles, chunk_size=None):
    return KernelConfig(chunk_size=chunk_size, fused_min_heads=1, recurrent_fw_H=tiles)


@pytest.mark.parametrize(
    ("dtype", "tiles", "variant"),
    [
        *[("float32", tiles, "exp") for tiles in TILES if tiles != "default"],
        *[("float32", "LKV16-K16-V16", variant) for variant in VARIANTS if variant != "exp"],
        ("bfloat16", "default", "exp"),
    ],
)
def test_outputs_and_last_states(dtype, tiles, variant):
    """S is no multiple of a chunk, heads are padded, a chunk of the backward pass is several chunks
    of the scan."""
    options = dict(VARIANTS[variant])
    inputs = random_inputs(
        5, 2, 2, 100, 48, 80, dtype=dtype, resets=True, m_initial="input_gate" not in options
    )
    ids = (
        np.cumsum(np.random.default_rng(0).random((2, 100)) < 0.1, axis=1).astype("int32")
        if variant == "exp"
        else None
    )
    options |= dict(segment_ids=ids)
    expected_h, expected = oracle(inputs, **options)
    options |= dict(return_last_states=True, backend="interpret", config=fused(TILES[tiles], 64))
    h, states = mlstm_chunkwise(**inputs, **options)
    bound = tolerance(dtype, 100 + 48)
    compare("hcnm", (h, *states), (expected_h, *expected), bound)


@pytest.mark.slow
def test_many_launches_round_as_one_does():
    inputs = random_inputs(14, 1, 2, 64, 128, 32, dtype="bfloat16")
    tiles = StageConfig(siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=32, siz_b_loop=16)
    h = mlstm_chunkwise(**inputs, config=fused(tiles), backend="interpret")
    assert_close(h, oracle(inputs)[0], tolerance("bfloat16", 64 + 128))


@pytest.mark.parametrize("recompute_states_in_bw", [True, False])
def test_states_are_stored_where_the_backward_pass_wants_them(recompute_states_in_bw):
    """And nowhere else: there may be no backward pass."""
    inputs = random_inputs(6, 1, 1, 64, 16, 16)
    config = fused(TILES["LKV16-K16-V16"], 32)
    run = functools.partial(
        mlstm_chunkwise,
        config=config,
        recompute_states_in_bw=recompute_states_in_bw,
        backend="interpret",
    )
    states = "f32[1,2,16,16]"  # before each of two chunks, as the kernel stores them
    for function, stored in (
        (run, False),
        (lambda *x: jax.vjp(run, *x)[0], not recompute_states_in_bw),
    ):
        jaxpr = str(jax.make_jaxpr(function)(*inputs.values()))
        assert "name=recurrent_fw_H" in jaxpr
        assert "name=recurrent_fw_C" not in jaxpr
        assert (states in jaxpr) == stored
