"""Packed sequences (segment_ids): each is computed as if it were alone. The states of each.

Their gradients: test_gradients.py, test_gradients_of_gates.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import array, beyond, compare, in_layout, oracle, random_inputs, swapped, tolerance

from mlstm_pallas import KernelConfig, mlstm_chunkwise, pack_lengths

S, L = 90, 32


def packed_ids(lengths):
    """Ids that repeat, but not in neighbours, for two rows of a batch: the second one has one
    sequence only."""
    ids = np.repeat(np.arange(len(lengths)) % 3 - 1, lengths)
    return np.stack([ids, np.full_like(ids, 7)])


@functools.partial(jax.jit, static_argnames="backend")
def run(inputs, segment_ids, backend):
    options = dict(return_last_states=True, chunk_size=L, backend=backend)
    return mlstm_chunkwise(**inputs, segment_ids=segment_ids, **options)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_nothing_leaks_from_one_sequence_into_the_next(backend):
    """The first sequence is 1e15 times as large, and its forget gates are open: far below a very
    negative forget gate's leak."""
    inputs = random_inputs(1, 2, 2, S, 16, 32, f_shift=20.0)
    first = np.arange(S) < 40
    large = inputs | {
        "v": inputs["v"] * np.where(first, np.float32(1e15), 1)[:, None],
        "i": inputs["i"] + np.float32(60.0) * first,
    }
    h, states = run(large, packed_ids([40, 50]), backend)
    expected = oracle({name: inputs[name][:1, :, 40:] for name in "qkvif"})
    result = h[:1, :, 40:], *(y[:1] for y in states)
    compare("hcnm", result, (expected[0], *expected[1]), tolerance("float32", S))


def check_prompts(prompts, DHQK, DHHV, *, dtype="float32", layout="BNTH", backend, **options):
    """A prefill of that many packed prompts: h and the states of each are those of the prompt alone
    in float64.

    The first goes on from initial states. One more segment is asked for than there is.
    """
    draw, NH, most = np.random.default_rng(0), 2, 11
    lengths = draw.integers(1, most, size=prompts)
    ids, (ends,) = pack_lengths(lengths)
    S = ids.shape[1]
    gate = {name: y for name, y in options.items() if name in ("input_gate", "normalize")}
    x = random_inputs(4, 1, NH, S, DHQK, DHHV, dtype=dtype, m_initial="input_gate" not in gate)
    given = dict(zip(x, in_layout(layout, x, x.values()), strict=True))
    call = functools.partial(
        mlstm_chunkwise, segment_ids=ids, return_last_states=True, layout=layout, backend=backend
    )
    run = jax.jit(functools.partial(call, num_segments=prompts + 1, **options))
    h, states = run(**given)
    assert all(not np.any(np.asarray(y[:, prompts:])) for y in states)

    alone = {}
    steps = np.minimum((ends - lengths)[:, None] + np.arange(most), S - 1)
    for name, y in x.items():  # each prompt, and steps that carry its states on
        y = np.asarray(y)[0]
        if name in "qkvif":
            rows = np.moveaxis(y[:, steps], 1, 0)
            rows = np.where(beyond(lengths, rows), {"i": -np.inf, "f": np.inf}.get(name, 0), rows)
        else:
            rows = np.zeros((prompts, *y.shape))
            rows[0] = y
        alone[name] = array(rows, x[name].dtype)
    bound = tolerance(dtype, S + DHQK)
    expected, of_prompts = oracle(alone, **gate)
    expected = np.concatenate([expected[s, :, :size] for s, size in enumerate(lengths)], axis=1)
    result = (swapped(h) if layout == "BTNH" else h)[0], *(y[0, :prompts] for y in states)
    compare("hcnm", result, (expected, *of_prompts), bound)


SCAN = dict(config=KernelConfig(fused=True))


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        (37, dict(backend="interpret", layout="BTNH", **SCAN)),
        (9, dict(backend="xla", layout="BTNH", input_gate="sigmoid")),
        pytest.param(9, dict(backend="interpret", dtype="bfloat16"), marks=pytest.mark.slow),
    ],
    ids=["fused", "plain", "materialised"],
)
def test_prompts_are_read_at_once(prompts, options):
    check_prompts(prompts, 16, 32, chunk_size=L, **options)


def test_the_states_of_a_segment_see_no_nan_of_the_next():
    inputs, ids = random_inputs(5, 1, 2, S, 16, 16, states=False), np.repeat([0, 1], [40, 50])
    run = jax.jit(functools.partial(mlstm_chunkwise, return_last_states=True, num_segments=1))
    poisoned = {name: inputs[name].at[:, :, 40:].set(jnp.nan) for name in "qkvif"}
    for x, y in zip(*(run(**z, segment_ids=ids[None])[1] for z in (inputs, poisoned)), strict=True):
        assert np.isfinite(x).all()
        assert np.array_equal(x, y)


def test_states_of_segments_have_no_derivatives():
    inputs = random_inputs(3, 1, 1, 40, 16, 16, states=False)
    run = functools.partial(
        mlstm_chunkwise, segment_ids=np.zeros((1, 40), int), return_last_states=True, num_segments=1
    )
    message = r"^mlstm_chunkwise with num_segments has no derivatives; leave num_segments out"
    with pytest.raises(TypeError, match=message):
        jax.jit(jax.grad(lambda x: jnp.sum(run(**x)[0])))(inputs)


def test_prompts_packed_into_rows():
    """Outputs of the last tokens and the states are those of a padded batch of the prompts."""
    rows, S, NH = [[5, 11, 1], [20]], 24, 2
    x = {n: np.asarray(y) for n, y in random_inputs(5, 2, NH, S, 16, 16, states=False).items()}
    ids, ends = pack_lengths(rows, S)

    @functools.partial(jax.jit, static_argnames="num_segments")
    def run(x, **options):
        return mlstm_chunkwise(**x, chunk_size=16, return_last_states=True, **options)

    h, states = jax.device_get(
        run(x, segment_ids=ids, sequence_lengths=ends[:, -1], num_segments=3)
    )
    assert not np.any(h[1, :, 20:])
    assert not any(np.any(y[1, 1:]) for y in states)
    which, lengths = ([0, 0, 0, 1], [0, 1, 2, 0]), np.concatenate(rows)
    starts = ends[which] - lengths
    steps = np.minimum(starts[:, None] + np.arange(20), S - 1)
    alone = {name: np.moveaxis(y[which[0], :, steps.T], 0, 2) for name, y in x.items()}
    expected, of_prompts = jax.device_get(run(alone, sequence_lengths=lengths))
    result = h[which[0], :, ends[which] - 1], *(y[which] for y in states)
    expected = expected[np.arange(4), :, lengths - 1], *of_prompts
    compare("hcnm", result, expected, tolerance("float32", S))


def test_lengths_of_prompts_as_arrays():
    for lengths in (np.array([[2, 1], [4, 0]], np.uint8), jnp.array([[2, 1], [4, 0]])):
        ids, ends = pack_lengths(lengths)
        assert ids.tolist() == [[0, 0, 1, 2], [0, 0, 0, 0]]
        assert ends.tolist() == [[2, 3], [4, 4]]
    assert pack_lengths([[], [1, 2]], np.int64(4))[0].tolist() == [[2, 2, 2, 2], [0, 1, 1, 2]]


@pytest.mark.parametrize(
    ("lengths", "S", "message"),
    [
        (3, None, "lengths is 3, expected the steps of each prompt, integers >= 1, of one row"),
        ([3, 0, 2], None, r"lengths is \[3, 0, 2\], .*; zeros may stand behind the last one"),
        ([], None, r"lengths is \[\], expected"),
        ([1.5], None, r"lengths is \[1.5\], expected"),
        ([[1], 2], None, r"lengths is \[\[1\], 2\], expected"),
        ([[3, 5], [6]], 7, "S is 7, expected an integer >= 8"),
    ],
)
def test_lengths_that_cannot_be_packed(lengths, S, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        pack_lengths(lengths, S)
    if S is None and lengths:
        with pytest.raises(TypeError, match="lengths is traced, expected integers: pack prompts"):
            jax.jit(pack_lengths)(jnp.ones(3, int))
