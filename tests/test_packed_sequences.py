"""Packed sequences (segment_ids): each is computed as if it were alone. The states of each.

Their gradients: test_gradients.py, test_gradients_of_gates.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import array, assert_close, compare, oracle, random_inputs, swapped, tolerance

from mlstm_pallas import KernelConfig, mlstm_chunkwise, mlstm_recurrent_step

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
    [*[("interpret", lengths, "exp") for lengths in LENGTHS], ("xla", "every_step", "sigmoid")],
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


def check_prompts(prompts, DHQK, DHHV, *, dtype="float32", layout="BNTH", backend, **options):
    """A prefill of that many packed prompts, then a token of each in one batch, equal to each
    prompt alone in float64.

    The first goes on from initial states. One more segment is asked for than there is.
    """
    draw, NH, most = np.random.default_rng(0), 2, 11
    lengths = draw.integers(1, most, size=prompts)
    S, ends = lengths.sum(), np.cumsum(lengths)
    sigmoid = options.get("input_gate") == "sigmoid"
    x = random_inputs(4, 1, NH, S, DHQK, DHHV, dtype=dtype, m_initial=not sigmoid)
    tokens = random_inputs(5, prompts, NH, 1, DHQK, DHHV, dtype=dtype, states=False)
    given = {n: swapped(y) if layout == "BTNH" and n in "qkvif" else y for n, y in x.items()}
    ids = np.repeat(np.arange(prompts) % 2, lengths)[None]
    call = functools.partial(
        mlstm_chunkwise, segment_ids=ids, return_last_states=True, layout=layout, backend=backend
    )
    run = jax.jit(functools.partial(call, num_segments=prompts + 1, **options))
    h, (c, n, m) = run(**given)
    assert all(not np.any(np.asarray(y[:, prompts:])) for y in (c, n, m))
    states = [y[0, :prompts] for y in (c, n, m)]
    token = [tokens[name][:, :, 0] for name in "qkvif"]
    gate = {name: y for name, y in options.items() if name in ("input_gate", "normalize")}
    h_token, _ = mlstm_recurrent_step(*token, *states, backend="xla", **gate)

    alone = {}
    for name, y in tokens.items():  # each prompt, steps that carry its states on, its token
        fill = {"i": -np.inf, "f": np.inf}.get(name, 0.0)
        rows = np.full((prompts, NH, most, *y.shape[3:]), fill)
        for s, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            rows[s, :, :length] = x[name][0, :, end - length : end]
        alone[name] = array(np.concatenate([rows, y], axis=2), y.dtype)
    for name in x.keys() - tokens.keys():
        zeros = np.zeros((prompts - 1, *x[name].shape[1:]))
        alone[name] = array(np.concatenate([x[name], zeros]), "float32")
    bound = tolerance(dtype, S + DHQK)
    expected = oracle(alone, **gate)[0]
    assert_close(h_token[:, :, None], expected[:, :, -1:], bound, "h of the tokens")
    of_prompts = np.concatenate([expected[s, :, :size] for s, size in enumerate(lengths)], axis=1)
    assert_close((swapped(h) if layout == "BTNH" else h)[0], of_prompts, bound, "h")
    before = {name: y[:, :, :-1] if name in "qkvif" else y for name, y in alone.items()}
    for name, actual, desired in zip("cnm", states, oracle(before, **gate)[1], strict=True):
        assert_close(actual, desired, bound, name)


SCAN = dict(config=KernelConfig(fused_min_heads=1))


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        (37, dict(backend="interpret", layout="BTNH", **SCAN)),
        (9, dict(backend="interpret", dtype="bfloat16")),
        (9, dict(backend="xla", layout="BTNH", input_gate="sigmoid")),
    ],
    ids=["fused", "materialised", "plain"],
)
def test_prompts_are_read_at_once(prompts, options):
    check_prompts(prompts, 16, 32, chunk_size=L, **options)


def test_states_of_segments_have_no_derivatives():
    inputs = random_inputs(3, 1, 1, 40, 16, 16, states=False)
    run = functools.partial(
        mlstm_chunkwise, segment_ids=np.zeros((1, 40), int), return_last_states=True, num_segments=1
    )
    message = r"^mlstm_chunkwise with num_segments has no derivatives; leave num_segments out"
    with pytest.raises(TypeError, match=message):
        jax.jit(jax.grad(lambda x: jnp.sum(run(**x)[0])))(inputs)
