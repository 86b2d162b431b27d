"""jax_numpy_rank_promotion="raise" and jax_numpy_dtype_promotion="strict": the functions whose
gradients are not compared by ``oracle.outputs_and_gradients`` or ``results_of`` trace in both."""

import functools

import jax
import jax.numpy as jnp
import pytest

from mlstm_pallas import (
    mlstm_recurrent_sequence,
    mlstm_recurrent_step,
    reference,
)

B, NH, S, DHQK, DHHV = 1, 2, 40, 32, 16
GATES = {
    "exp": {},
    "sigmoid": dict(input_gate="sigmoid"),
    "unnormalised": dict(input_gate="sigmoid", normalize=False),
    "unstabilised": dict(stabilize_correctly=False, norm_val=2.0),
}
STATES = [(B, NH, DHQK, DHHV), (B, NH, DHQK), (B, NH)]


@pytest.fixture(autouse=True)
def strict_modes():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def arguments(dtype, lead, gates="float32", states="float32", gate="exp"):
    """Shapes of a function's arguments, without m_initial where the gate has none."""
    shapes = [(*lead, size) for size in (DHQK, DHQK, DHHV)] + [lead] * 2 + STATES
    x = list(map(jax.ShapeDtypeStruct, shapes, [dtype] * 3 + [gates] * 2 + [states] * 3))
    return x[: 8 - ("input_gate" in GATES[gate])]


def both(run, *x):
    """Traces the forward and the backward pass."""

    def outputs_and_gradients(*x):
        outputs, vjp = jax.vjp(run, *x)
        return outputs, vjp(outputs)

    result, gradients = jax.eval_shape(outputs_and_gradients, *x)
    assert [(y.shape, y.dtype) for y in gradients] == [(y.shape, y.dtype) for y in x]
    return result


@pytest.mark.parametrize("gate", ["exp", "unnormalised", "unstabilised"])
def test_the_plain_function_the_recurrence_and_several_steps(gate):
    x = arguments("bfloat16", (B, NH, S), gate=gate)
    ids = jnp.zeros((B, S), "int32")
    assert both(functools.partial(reference.chunkwise, **GATES[gate]), *x).shape == x[2].shape
    recurrence = functools.partial(reference.recurrence, segment_ids=ids)
    for run in (recurrence, functools.partial(mlstm_recurrent_sequence, backend="xla")):
        assert both(functools.partial(run, **GATES[gate]), *x)[0].shape == x[2].shape


@pytest.mark.parametrize(
    ("dtype", "states_dtype", "gate"),
    [
        ("float32", "float32", "unstabilised"),
        ("bfloat16", "bfloat16", "exp"),
        ("bfloat16", "float32", "sigmoid"),
        ("bfloat16", None, "unnormalised"),
    ],
)
@pytest.mark.parametrize("backend", ["interpret", "xla"])
def test_step(backend, dtype, states_dtype, gate):
    x = arguments(dtype, (B, NH), dtype, states_dtype or dtype)[: 8 if states_dtype else 5]
    step = functools.partial(mlstm_recurrent_step, backend=backend, **GATES[gate])
    h, states = jax.eval_shape(step, *x)
    assert (h.shape, h.dtype) == (x[2].shape, jnp.dtype(dtype))
    assert all(y.dtype == jnp.dtype(states_dtype or "float32") for y in states)
