"""Gates of -inf: resets, and steps that store nothing or leave the states as they are.

At -1e6 and below a gate counts as -inf. Above, it is an ordinary gate.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    emptied,
    random_inputs,
    token_at,
)

from mlstm_pallas import mlstm_chunkwise, mlstm_recurrent_step

AT, ABOVE = np.float32(-1e6), np.nextafter(np.float32(-1e6), np.float32(0))
STEP = 20  # of 32, in the second of two chunks

BOTH_GATES = pytest.mark.parametrize("gate", ["i", "f"])
BOTH_VALUES = pytest.mark.parametrize("value", [AT, ABOVE], ids=["at_-1e6", "above_-1e6"])


def masked(mask, x):
    """Steps count where the mask, (S,), is True, by the recipe of docs/serving.md."""
    qkv = {name: jnp.where(mask[:, None], x[name], 0) for name in "qkv"}
    return x | qkv | dict(i=jnp.where(mask, x["i"], -np.inf), f=jnp.where(mask, x["f"], np.inf))


@functools.cache
def call_with_gates(gate, value):
    """Arguments of mlstm_chunkwise, where the gate of a step is the value and nothing is stored
    from there on, or up to there.

    The state before the step is empty for an input gate.
    """
    i, f = np.zeros((2, 32), "float32")
    if gate == "f":
        f[STEP], i[STEP:] = value, -np.inf
    else:
        i[:], i[STEP] = -np.inf, value
    gates = {name: jnp.asarray(y[None, None]) for name, y in (("i", i), ("f", f))}
    inputs = random_inputs(17, 1, 1, 32, 16, 16) | gates
    return emptied(inputs) if gate == "i" else inputs


# With norm_val 0 the size of a state does not enter h: a state that has decayed by exp(-1e6) is
# read, one that was reset is not.
CALL = dict(chunk_size=16, norm_val=0.0)


@functools.partial(jax.jit, static_argnums=1)
def gradients_and_m(inputs, backend):
    """Gradients of the outputs from the step on, and the last m."""

    def loss(x):
        h, (_, _, m) = mlstm_chunkwise(**x, **CALL, return_last_states=True, backend=backend)
        return jnp.sum(jnp.sin(h[:, :, STEP:])), m

    return jax.grad(loss, has_aux=True)(inputs)


@pytest.mark.slow
@BOTH_VALUES
@BOTH_GATES
@pytest.mark.parametrize("backend", ["interpret", "xla"])
def test_a_gate_counts_as_minus_infinity_from_minus_1e6_on(backend, gate, value):
    """What the step stores, or what was stored before it, has gradients above -1e6 alone. A forget
    gate resets, an input gate stores nothing: m is -inf then, and above it is what the gate is."""
    both = [gradients_and_m(call_with_gates(gate, x), backend) for x in (value, -np.inf)]
    (result, m), (infinite, _) = both
    assert all(np.array_equal(result[name], infinite[name]) for name in result) == (value == AT)
    assert np.any(result["v"][:, :, : STEP + 1] != 0) == (value == ABOVE)
    # 32 steps decay by log 2 each.
    np.testing.assert_allclose(m, -np.inf if value == AT else value, rtol=1e-4)


@BOTH_VALUES
@BOTH_GATES
@pytest.mark.parametrize("backend", ["interpret", "xla"])
def test_a_recurrent_step_with_a_gate_at_minus_1e6(backend, gate, value):
    x = token_at(call_with_gates(gate, value), STEP)
    if gate == "f":
        x["m_initial"] *= 0
    h, (_, _, m) = mlstm_recurrent_step(**x, norm_val=0.0, backend=backend)
    assert m.item() == (value if value == ABOVE else -math.inf)
    assert np.any(h != 0) == (value == ABOVE)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["interpret", "xla"])
def test_masked_steps_keep_states_to_the_bit(backend):
    """Those of a call, and that of mlstm_recurrent_step."""
    x = masked(np.zeros(40, bool), random_inputs(4, 1, 2, 40, 16, 16))
    states = [x[name] for name in ("c_initial", "n_initial", "m_initial")]
    for call, arguments in (
        (functools.partial(mlstm_chunkwise, return_last_states=True), x),
        (mlstm_recurrent_step, token_at(x, 0)),
    ):
        h, last = call(**arguments, backend=backend)
        assert not np.any(h)
        assert all(map(np.array_equal, last, states))
