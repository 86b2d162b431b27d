"""Plain jnp as it is planned for a TPU, a few heads at a time, compiled for the CPU."""

import jax
import pytest
from call_checks import (
    ALONE,
    BACK,
    BTNH,
    NO_M,
    PADDED,
    STEPS,
    WITH_IDS,
    calls,
    calls_of,
    check_call,
)
from oracle import for_device, random_inputs

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.schedules import sharding

CALLS = [
    calls("states", 64, [], slow=["xla", "xla_stored"], **PADDED),
    calls("h_alone", 16, [], slow=["xla"], recipe=dict(states=False, resets=True), **ALONE),
    calls("reverse", 32, [], slow=["xla"], **BACK, **BTNH),
    calls("lengths", 32, [], slow=["xla"], **WITH_IDS, **BTNH),
    calls("sigmoid", 32, [], slow=["xla"], eps=0.1, input_gate="sigmoid", **NO_M, **STEPS),
]


@pytest.fixture
def tpu(monkeypatch):
    """Two or three heads at a time of most calls above."""
    monkeypatch.setattr(sharding, "VMEM_STATES", 2**15)
    with for_device("TPU v6 lite"):
        yield


@pytest.mark.parametrize("call", [*calls_of(CALLS)])
def test_against_float64(tpu, call):
    check_call(**call)


def test_a_few_heads_at_a_time(tpu):
    """14 heads, 32 KiB of states each: one at a time, under vmap too; on a CPU all at once."""
    x = random_inputs(1, 2, 7, 128, 32, 64, states=False).values()

    def call(*x):
        return mlstm_chunkwise(*x, chunk_size=32, backend="xla")

    mapped = jax.vmap(lambda *x: call(*(y[None] for y in x))[0])
    for function in (call, mapped):
        assert "length=14" in str(jax.make_jaxpr(function)(*x))
    with for_device("cpu"):
        assert "length=14" not in str(jax.make_jaxpr(call)(*x))
