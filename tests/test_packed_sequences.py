"""Packed sequences (segment_ids): each is computed as if it were alone.

Their gradients: test_gradients.py, test_gradients_of_gates.
"""

import functools

import jax
import numpy as np
import pytest
from oracle import assert_close, compare, oracle, random_inputs, tolerance

from mlstm_pallas import mlstm_chunkwise

pytestmark = pytest.mark.usefixtures("quick_compilation")

S, L = 90, 32
LENGTHS = {
    "none": [90],
    "in_chunks": [5, 4, 1, 13, 40, 27],
    "every_step": [1] * 90,
    "last_step": [89, 1],
}


def packed_ids(lengths):
    """Ids that repeat, but not in neighbours, for two rows of a batch: the second one has one
    sequence only."""
    ids = np.repeat(np.arange(len(lengths)) % 3 - 1, lengths)
    return np.stack([ids, np.full_like(ids, 7)])


def parts(inputs, lengths):
    """The first row of the batch, cut into its sequences; initial states go with the first one."""
    ends = np.cumsum(lengths)
    for index, (start, end) in enumerate(zip(ends - lengths, ends, strict=True)):
        states = (
            {name: x[:1] for name, x in inputs.items() if name.endswith("_initial")}
            if index == 0
            else {}
        )
        yield {name: x[:1, :, start:end] for name, x in inputs.items() if name in "qkvif"} | states


@pytest.fixture(scope="module")
def run():
    @functools.partial(jax.jit, static_argnames=("options",))
    def run(inputs, segment_ids, options):
        return mlstm_chunkwise(
            **inputs,
            segment_ids=segment_ids,
            return_last_states=True,
            chunk_size=L,
            **dict(options),
        )

    return run


@pytest.mark.parametrize("input_gate", ["exp", "sigmoid"])
def test_the_recurrence_packs_sequences_as_if_alone(input_gate):
    lengths = LENGTHS["in_chunks"]
    inputs = random_inputs(0, 2, 2, S, 4, 8, m_initial=input_gate == "exp")
    h, states = oracle(inputs, packed_ids(lengths), input_gate=input_gate)
    alone = [oracle(part, input_gate=input_gate) for part in parts(inputs, lengths)]
    # The same steps in float64, in other shapes.
    np.testing.assert_allclose(
        h[:1], np.concatenate([h for h, _ in alone], axis=2), rtol=1e-13, atol=1e-13
    )
    for actual, desired in zip(states, alone[-1][1], strict=True):
        np.testing.assert_allclose(actual[:1], desired, rtol=1e-13, atol=1e-13)
    second = {name: x[1:] for name, x in inputs.items()}
    np.testing.assert_allclose(
        h[1:], oracle(second, input_gate=input_gate)[0], rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize(
    ("backend", "lengths", "input_gate"),
    [
        *[("interpret", lengths, "exp") for lengths in LENGTHS],
        ("xla", "every_step", "sigmoid"),
    ],
)
def test_forward(run, backend, lengths, input_gate):
    inputs = random_inputs(0, 2, 2, S, 16, 32, m_initial=input_gate == "exp")
    ids = packed_ids(LENGTHS[lengths])
    h, states = run(inputs, ids, options=(("backend", backend), ("input_gate", input_gate)))
    expected, expected_states = oracle(inputs, ids, input_gate=input_gate)
    compare("hcnm", (h, *states), (expected, *expected_states), tolerance("float32", S))


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_nothing_leaks_from_one_sequence_into_the_next(run, backend):
    """The first sequence is 1e15 times as large, and its forget gates are open: far below a very
    negative forget gate's leak."""
    lengths = [40, 50]
    inputs = random_inputs(1, 2, 2, S, 16, 32, states=False, f_shift=20.0)
    large = inputs | {
        "v": inputs["v"].at[:, :, :40].multiply(1e15),
        "i": inputs["i"].at[:, :, :40].add(60.0),
    }
    h, states = run(large, packed_ids(lengths), options=(("backend", backend),))
    expected, expected_states = oracle({name: x[:1, :, 40:] for name, x in inputs.items()})
    assert_close(h[:1, :, 40:], expected, tolerance("float32", S), "h")
    compare("cnm", (y[:1] for y in states), expected_states, tolerance("float32", S))
