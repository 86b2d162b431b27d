"""The forward pass by the fused scan: many launches, and the states that it stores; its outputs:
test_gradients.py."""

import functools

import jax
import pytest
from oracle import assert_close, oracle, random_inputs, tolerance

from mlstm_pallas import KernelConfig, StageConfig, mlstm_chunkwise


def fused(tiles, chunk_size=None):
    return KernelConfig(chunk_size=chunk_size, fused_min_heads=1, recurrent_fw_H=tiles)


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
    config = fused(StageConfig(siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=16), 32)
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
