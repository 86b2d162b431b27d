"""mlstm_chunkwise_states: the states after every N-th step are those of shorter calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    BACKENDS,
    NAMES,
    OUTPUTS,
    beyond,
    compare,
    in_layout,
    oracle,
    random_inputs,
    refused,
    swapped,
    tolerance,
)

from mlstm_pallas import KernelConfig, mlstm_chunkwise_states


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("N", "fused", "lengths"), [(32, True, None), (16, False, [70, 33]), (128, None, None)]
)
def test_states_after_every_nth_step(backend, N, fused, lengths):
    """Heads are padded, and so is the last chunk."""
    S, x = 83, random_inputs(1, 2, 2, 83, 20, 37, resets=True)
    run = functools.partial(
        mlstm_chunkwise_states,
        every=N,
        layout="BTNH",
        backend=backend,
        config=KernelConfig(fused=fused),
        sequence_lengths=lengths and np.array(lengths),
    )
    h, last, states = jax.jit(run)(*in_layout("BTNH", NAMES, [x[name] for name in NAMES]))
    h, ends = swapped(h), np.array(lengths or [S, S])

    def after(ends):
        """The recurrence, whose later steps store and forget nothing."""
        later = beyond(ends, x["i"])
        i, f = (np.where(later, y, x[name]) for name, y in (("i", -np.inf), ("f", np.inf)))
        return oracle(x | dict(i=i, f=f))

    expected_h, *expected = after(ends)
    expected_h = np.where(beyond(ends, expected_h), 0, expected_h)
    compare(OUTPUTS, (h, *last), (expected_h, *expected), 3e-6)
    for j in range(S // N):
        expected = after(np.minimum((j + 1) * N, ends))[1:]
        compare("cnm", [y[:, j] for y in states], expected, 3e-6)
    shapes = [(2, S // N, 2, 20, 37), (2, S // N, 2, 20), (2, S // N, 2)]
    assert [y.shape for y in states] == shapes


def test_c_is_rounded_once_to_the_dtype_of_q():
    x = random_inputs(2, 1, 2, 64, 16, 16, dtype="bfloat16")
    *_, (c, n, m) = mlstm_chunkwise_states(*x.values(), every=32, layout="BNTH", backend="xla")
    assert {y.dtype.name for y in (c, n, m)} == {"float32"}
    first = {name: y if "initial" in name else y[:, :, :32] for name, y in x.items()}
    bound = tolerance("bfloat16", 16)
    compare("cnm", (c[:, 0], n[:, 0], m[:, 0]), oracle(first)[1:], bound)
    assert jnp.array_equal(c, c.astype("bfloat16").astype("float32"))


def test_derivatives_and_other_steps_are_refused():
    x = random_inputs(3, 1, 2, 32, 16, 16)
    run = functools.partial(mlstm_chunkwise_states, layout="BNTH", backend="xla")
    message = "every is 24, expected a power of two >= 16"
    refused(ValueError, message, run, *x.values(), every=24)
    message = "mlstm_chunkwise_states has no derivatives; mlstm_chunkwise has them"
    q, *others = x.values()
    refused(TypeError, message, jax.grad(lambda q: run(q, *others, every=16)[0].sum()), q)
