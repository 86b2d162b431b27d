"""KernelConfig(batch_invariant=True): plans and bits do not depend on the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_same_bits, random_inputs
from stage_calls import spec_of

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_recurrent_step,
    mlstm_ring_states,
    mlstm_ring_step,
)
from mlstm_pallas.problem.gpu import known_gpu

CONFIG = KernelConfig(batch_invariant=True)


def tiles_of(B, backend, S, config):
    spec = spec_of(
        (B, 8, S, 256, 512), "bfloat16", known_gpu("NVIDIA H200"), backend, config=config
    )
    calls = spec.plan.forward | spec.plan.backward
    calls |= {name: spec.plan.launch(name) for name in ("recurrent_step", "ring_step")}
    # CTAs of persistent kernels share the items; their number is in no sum.
    tiles = {name: vars(x.tiles) | dict(num_ctas=0) for name, x in calls.items() if x.tiles}
    return spec.plan.num_splits, tiles


@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize("S", [256, 8192])
def test_plans_are_those_of_a_batch_of_one(backend, S):
    plans = [tiles_of(B, backend, S, CONFIG) for B in (1, 3, 64)]
    assert plans[0] == plans[1] == plans[2]
    assert tiles_of(64, backend, S, None) != plans[2]
    assert tiles_of(1, backend, S, None) == plans[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_of_an_entry_do_not_depend_on_the_batch(dtype):
    """A prefill, a step of either kind, in batches of 1, 3 and 64, at the last place."""
    x = random_inputs(1, 64, 8, 640, 64, 128, dtype=dtype)
    options = dict(backend="triton", config=CONFIG)

    @jax.jit
    def run(x):
        arrays = [x[name] for name in ("q", "k", "v", "i", "f")]
        h, states = mlstm_chunkwise(*arrays, layout="BNTH", return_last_states=True, **options)
        token = [y[:, :, 0] for y in arrays]
        rings = mlstm_ring_states(*states, dtype=dtype, phase=0)
        return h, mlstm_recurrent_step(*token, *states, **options), [
            mlstm_ring_step(*token, rings, **options),
        ]  # fmt: skip

    def last_of(B):
        batch = jax.tree.map(lambda y: jnp.concatenate([y[: B - 1], y[-1:]]), x)
        return jax.tree.map(lambda y: np.asarray(y[-1]), run(batch))

    alone = last_of(1)
    for B in (3, 64):
        assert_same_bits(last_of(B), alone)
