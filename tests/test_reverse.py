"""reverse: a call computes what the flipped call does, from the last step to the first."""

import functools

import jax
import jax.numpy as jnp
import pytest
from call_checks import (
    PROMISED,
    REVERSE,
    REVERSE_ON_A_GPU,
    calls_of,
    check_call,
    gpu_calls_of,
)
from oracle import (
    RESULTS,
    compare,
    in_layout,
    random_inputs,
    results_of,
)

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel


@pytest.mark.parametrize("call", [*calls_of(REVERSE), *gpu_calls_of(REVERSE_ON_A_GPU)])
def test_against_float64(call):
    check_call(**call)


BOUND = PROMISED["float32"][1]
OPTIONS = dict(return_last_states=True, chunk_size=16, backend="xla", layout="BTNH")


def flipped(*x):
    return [jnp.flip(y, axis=1) for y in x]


def test_it_is_the_flipped_call():
    """Outputs and gradients, under vmap and remat too."""
    inputs = random_inputs(2, 2, 3, 48, 16, 24)
    # The initial states reach no step of one head, whose first step is the last in memory. The
    # gradient of m is 0 unless the floor of the denominator depends on it.
    options = OPTIONS | dict(stabilize_correctly=False, norm_val=4.0)
    inputs["f"] = inputs["f"].at[:, 0, -1].set(-jnp.inf)
    x = in_layout("BTNH", inputs, inputs.values())

    @jax.checkpoint
    def reverse(*x):
        mapped = jax.vmap(functools.partial(mlstm_chunkwise, reverse=True, **options))
        return jax.tree.map(lambda y: y[0], mapped(*(y[None] for y in x)))

    def forward(*x):
        h, states = mlstm_chunkwise(*flipped(*x[:5]), *x[5:], **options)
        return flipped(h)[0], states

    of_both = (results_of(run)(*x) for run in (reverse, forward))
    compare(RESULTS, *of_both, BOUND)


def test_sequence_parallelism_has_no_reverse():
    with pytest.raises(TypeError, match="reverse"):
        mlstm_chunkwise_sequence_parallel(*[None] * 5, axis_name="s", reverse=True)
