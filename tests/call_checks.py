"""Calls of mlstm_chunkwise, the table of those that the tests compare with the recurrence in
float64, and the comparison."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    NAMES,
    array,
    assert_below,
    assert_nothing_beyond,
    assert_same_bits,
    beyond,
    check_isolated,
    config_in_splits,
    cotangents_for,
    emptied,
    errors_of,
    expected_of,
    gradients_of_call,
    random_inputs,
    tolerance,
)

from mlstm_pallas import KernelConfig, reference

# ---------------- bounds

# What the README promises of outputs and of gradients.
PROMISED = {"bfloat16": (5e-3, 2e-2), "float16": (1e-3, 4e-3), "float32": (1e-5, 1e-4)}


def backward_bound(dtype, terms):
    """Bound on the relative norm of the error of a gradient.

    Eight roundings lie on the way to it: the four of h, which dz is made of, and again four of its
    own products. As those of oracle.tolerance, each is u / sqrt(3) in the mean. A gradient of q, k
    or a gate is a difference of two terms of like size, through the numerator and through the
    denominator: the squares of their errors add. Each term is behind two float32 sums.
    """
    unit = float(jnp.finfo(dtype).eps) / 2
    return math.sqrt(2 * 8 / 3) * unit + 4 * math.sqrt(terms) * 2.0**-24


def spacing_of(*x):
    """The distance of float32 numbers at the largest finite one."""
    finite = (np.abs(y)[np.isfinite(y)] for y in map(np.asarray, x))
    return np.spacing(np.float32(max(np.max(y, initial=0) for y in finite)))


def bounds_of(inputs, outputs):
    """Bounds on outputs and on gradients: the roundings of products and sums, and of exponents.

    States are relative to a float32 m, and gradients to sums of the gates.
    """
    q, v, i, f = (inputs[name] for name in "qvif")
    terms, of_m = sum(q.shape[2:]), spacing_of(*outputs[3:])
    derived = (
        tolerance(q.dtype, terms) + of_m,
        backward_bound(q.dtype, terms + v.shape[-1]) + max(of_m, spacing_of(i, f)),
    )
    return map(min, derived, PROMISED[q.dtype.name])


def without_floor(gradients, desired, inputs):
    """Errors of gradients in float16, less what rounds to multiples of 2**-24.

    Small gradients and small dP are off by 2**-24 / sqrt(12); dq and dk have sums of dP times up
    to 128 keys and queries.
    """
    result = dict(gradients)
    for name, other in ("q", "k"), ("k", "q"):
        y, x = desired[name], inputs[other].astype("float32")
        floor = 2.0**-24 * math.sqrt((y.size + 128 * jnp.sum(x**2)) / 12) / np.linalg.norm(y)
        result[name] = max(0.0, result[name] - floor)
    return result


# ---------------- the comparison


def restabilised(states, m):
    """c and n of c, n and another m, with this m, in float64."""
    c, n, other = map(np.float64, states)
    finite = np.isfinite(m) & np.isfinite(other)
    factor = np.exp(np.subtract(other, m, where=finite, out=np.zeros(other.shape)))
    return c * factor[..., None, None], n * factor[..., None]


SEGMENT = 512


def recurrence(segment_ids=None, **x):
    """reference.recurrence, whose backward pass holds the states of 512 steps only if sequences are
    long and not packed; they end with steps that keep the state."""
    S = x["q"].shape[2]
    if S <= SEGMENT or segment_ids is not None:
        return reference.recurrence(**x, segment_ids=segment_ids)

    def segments_of(name):
        """With the segments as the first axis."""
        kept = dict(i=-jnp.inf, f=jnp.inf).get(name, 0.0)
        y, after = x[name], [(0, 0)] * x[name].ndim
        after[2] = 0, -S % SEGMENT
        y = jnp.pad(y, after, constant_values=kept)
        return jnp.moveaxis(y.reshape(*y.shape[:2], -1, SEGMENT, *y.shape[3:]), 2, 0)

    @jax.checkpoint
    def step(states, segment):
        inputs = dict(zip(NAMES, (*segment, *states), strict=True))
        h, states = reference.recurrence(**x | inputs)
        return states, h

    (B, NH, _, DHQK), DHV, dtype = x["q"].shape, x["v"].shape[-1], x["q"].dtype
    zeros = (jnp.zeros(shape, dtype) for shape in ((B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH)))
    states = tuple(x.get(name, y) for name, y in zip(NAMES[5:], zeros, strict=True))
    states, hs = jax.lax.scan(step, states, tuple(map(segments_of, "qkvif")))
    h = jnp.moveaxis(hs, 0, 2)
    return h.reshape(*h.shape[:2], -1, DHV)[:, :, :S], states


def recurrence_of_lengths(lengths):
    """The recurrence whose steps beyond the lengths keep the state and have h = 0."""

    def run(*, segment_ids=None, **x):
        gone = beyond(lengths, x["i"])
        if segment_ids is not None:  # no segment starts beyond a length
            segment_starts = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
            segment_ids = jnp.cumsum(segment_starts & ~gone[:, 0], axis=1)
        x |= dict(i=jnp.where(gone, -jnp.inf, x["i"]), f=jnp.where(gone, jnp.inf, x["f"]))
        h, states = recurrence(**x, segment_ids=segment_ids)
        return jnp.where(gone[..., None], 0.0, h), states

    return run


def reversed_in_time(run, lengths):
    """The function on sequences that run from their last step to their first; all of these are
    within the lengths."""

    def flipped(x, axis):
        S = x.shape[axis]
        ends = np.full(len(x), S) if lengths is None else np.clip(lengths, 0, S)
        steps, ends = np.arange(S), ends[:, None]
        places = np.where(steps < ends, ends - 1 - steps, steps)
        return jax.vmap(partial(jnp.take, axis=axis - 1))(x, places)

    def run_flipped(*, segment_ids=None, **x):
        x |= {name: flipped(x[name], 2) for name in "qkvif"}
        ids = None if segment_ids is None else flipped(segment_ids, 1)
        h, states = run(**x, segment_ids=ids)
        return flipped(h, 2), states

    return run_flipped


def with_garbage(lengths, inputs, cotangents):
    """Inputs and cotangents with values beyond the lengths that nothing may read."""

    def changed(x, value):
        return array(np.where(beyond(lengths, x), value, x), x.dtype)

    garbage = {name: changed(inputs[name], np.nan if name in "if" else 1e10) for name in "qkvif"}
    return inputs | garbage, [changed(cotangents[0], 1e6), *cotangents[1:]]


OF_RECURRENCE = {"input_gate", "normalize", "eps", "stabilize_correctly", "norm_val"}


def check_call(
    shape,
    dtype="float32",
    *,
    seed=1,
    recipe=(),
    change=lambda x: x,
    draw=cotangents_for,
    segment_ids=None,
    lengths=None,
    run=None,
    skip=(),
    bounds=None,
    several=({},),
    repeated=False,
    **options,
):
    """Compares h, the last states and the gradients of all inputs with those of the recurrence in
    float64; returns the relative errors of outputs and of gradients, by name.

    With lengths all arrays have garbage beyond these, and results have zeros.

    Args:
      shape: B, NH, S, DHQK, DHV.
      recipe: options of random_inputs.
      change: a function of the inputs.
      draw: a function like cotangents_for.
      run: what the call is compared with; None: the recurrence.
      skip: gradients that are rounding alone, and need only be finite.
      bounds: on the errors; None: those of bounds_of.
      several: further options of the calls that are compared.
      repeated: whether a second call has to return the same bits.
      options: those of mlstm_chunkwise.
    """
    inputs = change(random_inputs(seed, *shape, dtype=dtype, **dict(recipe)))
    options = dict(return_last_states=True) | options
    cotangents = draw(inputs, dtype, options["return_last_states"])
    arrays, is_recurrence = (inputs, cotangents), run is None
    if lengths is not None:
        arrays = with_garbage(lengths, *arrays)
    if is_recurrence:
        run = recurrence if lengths is None else recurrence_of_lengths(lengths)
    if options.get("reverse"):
        run = reversed_in_time(run, lengths)
    of_recurrence = {name: options[name] for name in OF_RECURRENCE & {*options}}
    expected = expected_of(inputs, cotangents, run, segment_ids, **of_recurrence)
    for more in several:
        call = partial(
            *(gradients_of_call(**options | more), *arrays),
            segment_ids=segment_ids,
            sequence_lengths=lengths,
        )
        outputs, gradients = result = call()
        if repeated:
            assert_same_bits(call(), result)
        assert len(outputs) == (4 if options["return_last_states"] else 1)
        assert outputs[0].dtype == dtype
        for name, x in inputs.items():
            assert gradients[name].dtype == x.dtype
            assert np.isfinite(gradients[name]).all(), name
        if lengths is not None:
            assert_nothing_beyond(lengths, *result)
            initial = [*inputs.values()][5:] if is_recurrence else ()
            for first, last in zip(initial, outputs[1:], strict=False):
                assert np.array_equal(last[lengths <= 0], first[lengths <= 0])
        of_outputs, of_gradients = errors = errors_of(inputs, result, expected)
        if dtype == "float16":
            of_gradients = without_floor(of_gradients, expected[1], inputs)
        of_gradients = {name: x for name, x in of_gradients.items() if name not in skip}
        each = bounds or bounds_of(inputs, expected[0])
        for x, bound in zip((of_outputs, of_gradients), each, strict=True):
            assert_below(x, bound)
    return errors


def check_middle_head(run, x):
    """The second of three heads, (1, 3, ...), has the same bits beside finite ones and beside NaN,
    and again; what an interpreted kernel does not write is NaN."""
    poisoned = jax.tree.map(lambda y: y.at[:, ::2].set(jnp.nan), x)
    first, _ = check_isolated(run, x, poisoned, partial(jax.tree.map, lambda y: y[:, 1]))
    assert_same_bits(run(x), first)
    assert all(np.isfinite(y).all() for y in jax.tree.leaves(first))


def check_neighbours(backend, shape, layout="BNTH", config=None, dtype="bfloat16", **options):
    """check_middle_head of outputs and gradients; returns the function and its arguments.

    In the layout "BTNH" the columns of the next head follow those of a head.
    """
    inputs = random_inputs(11, *shape, dtype=dtype)
    x = inputs, cotangents_for(inputs, dtype)
    config = config or KernelConfig(fused=True)
    run = gradients_of_call(config=config, backend=backend, layout=layout, **options)
    check_middle_head(lambda x: run(*x), x)
    return run, x


# ---------------- the calls


def tiles(scores, gradients):
    """A config with so many rows per tile of parallel_bw_dP and of parallel_bw_dQKV."""
    of_gradients = dict(siz_b_LQ=gradients, siz_b_DHQK=16, siz_b_DHHV=16, block_k=16)
    return KernelConfig(
        triton_parallel_bw_dP=dict(siz_b_LQ=scores, block_k=16),
        triton_parallel_bw_dQKV=of_gradients,
    )


def splits(num_splits, fused=True):
    """config_in_splits with small tiles."""
    tiles = dict(siz_b_L=16, siz_b_DHQK=16, siz_b_DHHV=16)
    return config_in_splits(num_splits, fused, dict(state_rows=32), **tiles)


def fused(**tiles):
    return KernelConfig(fused=True, triton_recurrent_fw_H=tiles)


MATERIALISED, BTNH = KernelConfig(fused=False), dict(layout="BTNH")
STORED = dict(recompute_states_in_bw=False)
UNNORMALISED = dict(input_gate="sigmoid", normalize=False)
ALGORITHMS = dict(
    default=dict(),
    xla=dict(backend="xla", **BTNH),
    xla_stored=dict(backend="xla", **STORED),
    materialised=dict(config=MATERIALISED, **BTNH),
    materialised_stored=dict(config=MATERIALISED, **STORED),
    tiles16x32=dict(config=tiles(16, 32)),
    tiles32x16=dict(config=tiles(32, 16), **BTNH),
    fused=dict(config=fused(siz_b_L=32)),
    fused_stored=dict(config=splits(1), **STORED),
    fused_two_launches=dict(config=fused(siz_b_DHQK=16, state_rows=16), **BTNH),
    splits=dict(config=splits(4), **BTNH),
    splits_materialised=dict(config=splits(2, fused=False), **BTNH),
    splits_stored=dict(config=splits(2), **STORED),
)


def calls(name, chunk_size, quick, slow=(), **call):
    """Parameters of a test: arguments of check_call with algorithms, of which some are slow."""
    options = dict(backend="interpret", chunk_size=chunk_size)
    return [
        pytest.param(
            options | ALGORITHMS[algorithm] | call,
            id=f"{name}-{algorithm}-{chunk_size}",
            marks=[pytest.mark.slow] * (algorithm in slow),
        )
        for algorithm in (*quick, *slow)
    ]


calls_of = itertools.chain.from_iterable  # of a table, a list of calls


def behind_a_norm(inputs, dtype, states):
    """Cotangents, of which that of h is orthogonal to h."""
    dh, *of_states = cotangents_for(inputs, dtype, states)
    h = expected_of(inputs, [dh, *of_states])[0][0].astype("float32")
    total = partial(np.sum, axis=-1, keepdims=True)
    return [dh - total(dh * h) / total(h * h) * h, *of_states]


def states_alone(*of):
    dh, *of_states = cotangents_for(*of)
    return [0 * dh, *of_states]


def masked(mask, x):
    """Steps count where the mask, (S,), is True, by the recipe of docs/serving.md."""
    qkv = {name: jnp.where(mask[:, None], x[name], 0) for name in "qkv"}
    return x | qkv | dict(i=jnp.where(mask, x["i"], -np.inf), f=jnp.where(mask, x["f"], np.inf))


def reset_at(step, x):
    return x | {"f": x["f"].at[:, 0, step].set(-jnp.inf)}


def reset_between(before, after, x):
    """Input gates of two sizes, with a reset of the first head between them."""
    steps = jnp.arange(x["i"].shape[2])
    return reset_at(17, x | {"i": x["i"] + jnp.where(steps < 17, before, after)})


def both_closed(x):
    """Both gates of a step are closed."""
    return x | dict.fromkeys("if", jnp.asarray([[[0.0, -61.0, 0.0]]]))


def nearly_closed(gate, x):
    """Next to nothing passes at some steps."""
    return x | dict(f=jnp.where(jnp.arange(x["f"].shape[2]) % 37 == 5, gate, x["f"]))


def segments(B):
    return np.repeat([[3, 0, 7, 1]] * B, [5, 30, 40, 16], axis=1)


PADDED = dict(shape=(2, 3, 96, 40, 24))
ALONE = dict(return_last_states=False, seed=13, shape=(1, 2, 64, 16, 16))
TILED = dict(seed=3, shape=(1, 1, 150, 16, 16))
STEPS = dict(seed=3, shape=(1, 2, 70, 16, 16))
# Sequences of one step, several in a chunk, one at a chunk boundary, one over two chunks; an eps
# through which m has a gradient at every step.
IDS = np.repeat([[3, 3, 0, 7, 8, 7]], [5, 4, 1, 22, 36, 2], axis=1)
PACKED = STEPS | dict(segment_ids=IDS, eps=0.1)
STATES = "c_initial", "n_initial"
FLOOR = dict(norm_val=50.0, skip=["n_initial"])  # of the denominator, at most steps
NO_M = dict(recipe=dict(m_initial=False))
HALF = dict(seed=11, shape=(1, 1, 256, 16, 16), dtype="bfloat16")
BACK = dict(seed=7, shape=(2, 2, 91, 24, 40), reverse=True)
# A segment begins at the length of 75, and lengths end in a chunk, before the first one and before
# the last step.
SHORT = dict(seed=8, shape=(4, 2, 91, 16, 24), lengths=np.array([75, 0, 90, 20]), reverse=True)
SMALL = dict(siz_b_LQ=16)
SMALL_TILES = KernelConfig(
    triton_parallel_bw_dP=SMALL,
    triton_parallel_bw_dQKV=SMALL,
    triton_recurrent_bw_dC=dict(num_splits=2),
)
LENGTHS = dict(seed=0, shape=(5, 2, 70, 16, 32), lengths=np.array([0, 1, 20, 40, 99]))
# One segment starts beyond 40.
WITH_IDS = dict(segment_ids=np.repeat([[0, 1, 0]] * 5, [20, 31, 19], axis=1)) | LENGTHS
FLOAT32 = tolerance("float32", 40 + 8), PROMISED["float32"][1]
# The calls of test_calls.py. Quick rows have each lowering, and lengths, packed sequences, both
# directions and a reset once. Slow ones are pairs that no quick row has, of an algorithm with a
# direction, packed sequences, a dtype, heads or a length; or values that once were wrong. Larger
# tiles and chunks are in test_stages.py and test_canaries.py.
CALLS = [
    # Whole blocks of the fused scan and no whole chunks; padded heads.
    calls("float32", 64, ["materialised"], slow=["fused"], **PADDED),
    # With C = n = 0 it equals a first step of i = -inf that resets; m = 0 would win.
    calls(
        "m_of_minus_infinity",
        64,
        [],
        slow=["materialised", "fused"],
        change=emptied,
        recipe=dict(i_shift=-20.0, i_scale=0.1, f_shift=5.0),
        **PADDED,
    ),
    calls(
        "behind_a_norm",
        64,
        [],
        slow=["materialised"],
        draw=behind_a_norm,
        skip=["n_initial"],
        **PADDED,
    ),
    calls("states_alone", 64, ["materialised"], draw=states_alone, skip="q", **PADDED),
    # There are no initial states, and the last ones are not returned: neither is read or written.
    calls(
        "h_alone-ordinary",
        16,
        [],
        slow=["splits"],
        recipe=dict(states=False),
        **ALONE,
        **UNNORMALISED,
    ),
    calls(
        "h_alone-resets",
        16,
        [],
        slow=["splits"],
        recipe=dict(states=False, resets=True),
        **ALONE,
        **UNNORMALISED,
    ),
    calls(
        "h_alone-closed_input_gates",
        16,
        [],
        slow=["splits"],
        recipe=dict(states=False, i_scale=30.0),
        **ALONE,
        **UNNORMALISED,
    ),
    # Without a floor of the denominator, h is old and new content by their ratio, however small
    # both are.
    calls(
        "both_gates_closed",
        16,
        [],
        slow=["xla"],
        input_gate="sigmoid",
        return_last_states=False,
        seed=5,
        recipe=dict(states=False, i_scale=30.0),
        shape=(1, 1, 3, 16, 4),
        change=both_closed,
        eps=0.0,
        norm_val=0.0,
    ),
    calls(
        "gradients_of_gates-ordinary",
        32,
        [],
        slow=["materialised", "fused"],
        recipe={},
        skip=STATES,
        **PACKED,
    ),
    calls(
        "gradients_of_gates-resets",
        32,
        [],
        slow=["materialised", "fused"],
        recipe=dict(resets=True),
        **PACKED,
    ),
    calls(
        "gradients_of_gates-closed_forget_gates",
        32,
        [],
        slow=["materialised", "fused"],
        recipe=dict(f_shift=-30.0),
        **PACKED,
    ),
    calls(
        "gradients_of_gates-open_forget_gates",
        32,
        [],
        slow=["materialised", "fused"],
        recipe=dict(f_shift=10.0),
        skip=STATES,
        **PACKED,
    ),
    calls(
        "gradients_of_gates-wild_gates",
        32,
        [],
        slow=["materialised", "fused"],
        recipe=dict(f_scale=1e3, i_scale=1e3),
        skip=("f", *STATES, "m_initial"),
        **PACKED,
    ),
    # test_properties.py draws the gates of these.
    calls("floor", 32, [], slow=["materialised"], **FLOOR, **STEPS),
    calls("sigmoid", 32, [], slow=["xla"], eps=0.1, input_gate="sigmoid", **NO_M, **STEPS),
    calls("unnormalised", 32, [], slow=["materialised"], **UNNORMALISED, **NO_M, **STEPS),
    # Next to nothing passes where most of the gradient is: what passes elsewhere must not leave its
    # rounding there.
    calls(
        "nearly_closed_at-20.0",
        64,
        [],
        slow=["xla"],
        recipe=dict(f_shift=6.0),
        **HALF,
        change=partial(nearly_closed, -20.0),
    ),
    calls(
        "nearly_closed_at-10.0",
        64,
        [],
        slow=["materialised"],
        recipe=dict(f_shift=12.0),
        **HALF,
        change=partial(nearly_closed, -10.0),
    ),
    calls(
        "nearly_closed_at-6.0",
        64,
        [],
        slow=["splits"],
        recipe=dict(f_shift=9.0),
        **HALF,
        change=partial(nearly_closed, -6.0),
    ),
    # Multiples of 16 are not padded, other heads are.
    calls("heads_of_80_and_112", 32, [], slow=["fused"], seed=37, shape=(1, 3, 37, 80, 112)),
    calls("heads_of_16_and_160", 32, [], slow=["materialised"], seed=40, shape=(1, 3, 40, 16, 160)),
    calls("heads_of_320_and_48", 16, [], slow=["fused"], seed=17, shape=(1, 3, 17, 320, 48)),
    # Interpreted, what a kernel reads beyond an array is NaN.
    calls("odd_lengths-1", 32, [], slow=["tiles16x32"], seed=1, shape=(2, 3, 1, 1, 17)),
    calls("odd_lengths-61", 16, [], slow=["splits"], seed=61, shape=(2, 3, 61, 32, 16)),
    calls(
        "odd_lengths-127", 32, [], slow=["fused_two_launches"], seed=127, shape=(2, 3, 127, 32, 16)
    ),
    calls("odd_lengths-129", 16, [], slow=["splits_stored"], seed=129, shape=(2, 3, 129, 32, 16)),
    calls(
        "no_batch",
        16,
        [],
        slow=["xla", "materialised"],
        shape=(0, 2, 20, 16, 24),
        recipe=dict(states=False),
    ),
    calls(
        "no_heads", 16, ["xla"], slow=["fused"], shape=(2, 0, 20, 16, 24), recipe=dict(states=False)
    ),
    # Nothing passes a reset; at step 0 it discards the initial states.
    calls(
        "reset_at-0",
        16,
        [],
        slow=["default", "xla"],
        seed=5,
        shape=(1, 2, 40, 16, 16),
        change=partial(reset_at, 0),
    ),
    calls(
        "reset_at-17",
        16,
        [],
        slow=["default", "xla"],
        seed=5,
        shape=(1, 2, 40, 16, 16),
        change=partial(reset_at, 17),
    ),
    calls(
        "reset_between_60_and_0",
        16,
        ["xla"],
        slow=["fused", "materialised"],
        seed=5,
        shape=(1, 2, 40, 16, 16),
        change=partial(reset_between, 60.0, 0.0),
    ),
    calls(
        "reset_between_0_and_60",
        16,
        [],
        slow=["fused", "xla", "materialised"],
        seed=5,
        shape=(1, 2, 40, 16, 16),
        change=partial(reset_between, 0.0, 60.0),
    ),
    # More than an int16 has, and than Mosaic GPU's recurrences have.
    calls("32_800_heads", 16, [], slow=["xla"], seed=6, shape=(1, 32_800, 2, 1, 1)),
    calls(
        "left_padding",
        16,
        [],
        slow=["xla"],
        seed=3,
        shape=(2, 2, 40, 16, 16),
        change=partial(masked, np.arange(40) >= 13),
    ),
    # exp(m) underflows, and nothing may be scaled by it.
    calls(
        "floor_of_zero",
        32,
        [],
        slow=["default"],
        recipe=dict(states=False, i_shift=-300.0),
        change=partial(reset_at, 0),
        shape=(1, 1, 40, 8, 8),
        norm_val=0.0,
        return_last_states=False,
        bounds=FLOAT32,
    ),
    calls(
        "reverse_states",
        16,
        [],
        slow=[
            "materialised",
            "fused_stored",
            "fused_two_launches",
            "splits_materialised",
            "xla_stored",
        ],
        **BACK,
    ),
    # The first step is the last one in memory; through the floor the gradient of m is not 0.
    calls(
        "reverse_first_step",
        16,
        [],
        slow=["xla"],
        seed=2,
        shape=(2, 3, 48, 16, 24),
        change=partial(reset_at, 47),
        stabilize_correctly=False,
        norm_val=4.0,
        layout="BTNH",
        reverse=True,
    ),
    # with a finite m at the end
    calls(
        "reverse_tiles",
        64,
        [],
        slow=["tiles32x16", "tiles16x32"],
        recipe=dict(resets=True),
        **TILED,
        reverse=True,
    ),
    calls(
        "reverse_h_alone",
        32,
        [],
        slow=["fused"],
        return_last_states=False,
        recipe=dict(states=False, resets=True),
        **BACK,
        **UNNORMALISED,
    ),
    calls(
        "reverse_packed",
        32,
        [],
        slow=["materialised"],
        **BACK,
        segment_ids=segments(2),
        eps=0.1,
    ),
    calls(
        "reverse_lengths",
        16,
        ["fused"],
        slow=["xla", "splits"],
        segment_ids=segments(4),
        **SHORT,
    ),
    calls("reverse_float16", 32, [], slow=["materialised"], dtype="float16", **BACK),
    calls("reverse_bfloat16", 32, [], slow=["fused"], dtype="bfloat16", **BACK),
    calls(
        "float16",
        32,
        [],
        slow=["fused", "splits"],
        dtype="float16",
        seed=3,
        shape=(2, 2, 100, 24, 60),
    ),
    # Every batch entry is computed as if it were cut to its length.
    calls(
        "lengths_materialised",
        32,
        [],
        slow=["default"],
        eps=0.0,
        stabilize_correctly=False,
        norm_val=0.0,
        **LENGTHS,
    ),
    calls(
        "lengths_fused_stored_BTNH",
        32,
        [],
        slow=["default"],
        config=fused(),
        **BTNH,
        **STORED,
        **WITH_IDS,
    ),
    calls("lengths_tiles_and_splits", 64, [], slow=["default"], config=SMALL_TILES, **LENGTHS),
    calls("lengths_plain", 32, ["default"], backend="xla", **NO_M, **UNNORMALISED, **WITH_IDS),
]

OF_20 = dict(shape=(1, 1, 20, 8, 8), segment_ids=np.arange(20)[None] // 7 - 1)
# Indices of kernels, from 64-bit ids and lengths.
UNDER_X64 = [
    calls("lengths", 16, ["fused"], shape=(1, 1, 20, 8, 8), lengths=np.array([17])),
    calls("reverse", 16, [], slow=["fused_stored"], reverse=True, **OF_20),
    calls("splits", 16, [], slow=["splits"], shape=(1, 1, 64, 8, 8), lengths=np.array([50])),
    calls(
        "materialised",
        16,
        [],
        slow=["materialised"],
        lengths=np.array([17]),
        state_dtype="float32",
        **OF_20,
    ),
]


# ---------------- on a GPU

TWO_LOWERINGS = dict(several=[dict(backend=backend) for backend in ("triton", "mosaic_gpu")])
# Multiples of 64, of 32, of 16, of 8 and of none, from 8 to 1,024, and the lowerings that run them,
# which are both for the smallest multiples of 16. The self-check draws any for either.
ANY_HEADS = {
    (8, 8): ["triton"],
    (16, 16): ["triton", "mosaic_gpu"],
    (20, 37): ["mosaic_gpu"],
    (24, 48): ["triton"],
    (32, 32): ["triton", "mosaic_gpu"],
    (40, 100): ["triton"],
    (48, 96): ["triton"],
    (64, 32): ["triton"],
    (64, 96): ["mosaic_gpu"],
    (64, 192): ["triton"],
    (80, 160): ["triton"],
    (96, 96): ["mosaic_gpu"],
    (96, 192): ["mosaic_gpu"],
    (100, 200): ["mosaic_gpu"],
    (112, 224): ["triton"],
    (128, 192): ["mosaic_gpu"],
    (160, 320): ["triton"],
    (192, 192): ["triton"],
    (192, 384): ["mosaic_gpu"],
    (256, 640): ["mosaic_gpu"],
    (320, 640): ["mosaic_gpu"],
    (384, 768): ["mosaic_gpu"],
    (448, 448): ["triton"],
    (1024, 1024): ["mosaic_gpu"],
}


def gpu_call(dtype, *shape, **call):
    """A call that is repeated, within the bounds that are promised."""
    bounds = dict(bounds=PROMISED[dtype], repeated=True)
    return dict(shape=shape, dtype=dtype, backend="triton") | bounds | call


def gpu_row(name, dtype, *shape, **options):
    """A parameter of a test, gpu_call."""
    # One of these is in the quick selection, in both dtypes.
    smoke = [pytest.mark.smoke] * (shape[2:] == (500, 128, 256))
    call = gpu_call(dtype, *shape, **options)
    id = "-".join(map(str, (name, dtype, *shape)))
    return pytest.param(call, id=id, marks=[pytest.mark.gpu, *smoke])


def calls_of_any_heads(backend):
    """Names and arguments of check_call: in bfloat16, of odd and of even lengths, in both layouts,
    with the fused scan and with materialised states."""
    lengths, layouts = (131, 256, 196, 391), ("BTNH", "BNTH", "BTNH")
    schedules = (True, False, True, False, True)
    others = map(itertools.cycle, (lengths, layouts, schedules))
    for (heads, backends), S, layout, is_fused in zip(ANY_HEADS.items(), *others, strict=False):
        call = dict(layout=layout, config=KernelConfig(fused=is_fused), bounds=None)
        if backend in backends:
            name = "-".join(map(str, heads))
            yield name, gpu_call("bfloat16", 1, 2, S, *heads, backend=backend, **call)


MATERIALISED64, MATERIALISED256 = (KernelConfig(chunk_size=x, fused=False) for x in (64, 256))
FOUR_SPLITS = config_in_splits(4, siz_b_L=32)
ODD = dict(config=fused()) | TWO_LOWERINGS
OF_1000 = dict(lengths=np.array([0, 1, 384, 700, 1000])) | TWO_LOWERINGS
OF_1001 = dict(lengths=np.array([0, 1, 384, 700, 1001])) | TWO_LOWERINGS


def stored_by_fused_scan(num_splits, num_stages):
    """The states that the fused scan stored."""
    tiles = dict(siz_b_L=32, state_rows=256, num_stages=num_stages)
    config = KernelConfig(fused=True, num_splits=num_splits, triton_recurrent_fw_H=tiles)
    return dict(config=config) | STORED


# Of the two dtypes those that the rows at real sizes do not have.
OF_HEADS = {
    "bfloat16": [(64, 128), (128, 256), (256, 256), (512, 512), (192, 320), (1024, 1024)],
    "float32": [(128, 128), (128, 256), (512, 512), (80, 96), (96, 192), (1024, 1024)],
}
# At real sizes, with the configs that users get: names, dtypes, shapes, options of gpu_call.
ON_A_GPU = [
    gpu_row("default", "bfloat16", 1, 2, 2048, 64, 64),
    gpu_row("default", "bfloat16", 1, 2, 2048, 256, 512),
    gpu_row("default", "float32", 1, 2, 2048, 64, 64),
    gpu_row("default", "float32", 1, 2, 2048, 256, 512),
    gpu_row("materialised64", "bfloat16", 1, 2, 2048, 256, 512, config=MATERIALISED64),
    gpu_row("materialised64", "float32", 1, 2, 2048, 128, 256, config=MATERIALISED64),
    gpu_row("materialised256", "bfloat16", 1, 2, 2048, 128, 256, config=MATERIALISED256),
    gpu_row("materialised256", "float32", 1, 2, 2048, 64, 64, config=MATERIALISED256),
    gpu_row("fused", "bfloat16", 1, 2, 2048, 256, 512, config=fused()),
    gpu_row("fused", "bfloat16", 1, 2, 2048, 64, 64, config=fused()),
    gpu_row("fused", "float32", 1, 2, 2048, 128, 256, config=fused()),
    gpu_row("splits", "bfloat16", 1, 2, 2048, 128, 256, config=FOUR_SPLITS),
    gpu_row("splits", "float32", 1, 2, 2048, 256, 512, config=FOUR_SPLITS),
    gpu_row("stored_in_1_splits", "bfloat16", 1, 2, 2048, 64, 64, **stored_by_fused_scan(1, 3)),
    gpu_row("stored_in_4_splits", "bfloat16", 1, 2, 2048, 256, 512, **stored_by_fused_scan(4, 3)),
    gpu_row("stored_in_1_splits", "float32", 1, 2, 2048, 128, 256, **stored_by_fused_scan(1, 2)),
    gpu_row("stored_in_4_splits", "float32", 1, 2, 2048, 128, 256, **stored_by_fused_scan(4, 2)),
    gpu_row("chunks_of_16", "bfloat16", 1, 2, 2048, 128, 256, chunk_size=16),
    gpu_row("chunks_of_1024", "float32", 1, 2, 2048, 128, 256, chunk_size=1024),
    gpu_row("chunks_of_2048", "bfloat16", 1, 2, 2048, 128, 256, chunk_size=2048),
    # A store beyond an array would be in the next head.
    gpu_row("odd_lengths-BNTH", "bfloat16", 4, 12, 1, 64, 128, **ODD),
    gpu_row("odd_lengths-BNTH", "bfloat16", 4, 12, 129, 64, 128, **ODD),
    gpu_row("odd_lengths-BNTH", "bfloat16", 1, 24, 1001, 256, 256, **ODD),
    gpu_row("odd_lengths-BTNH", "bfloat16", 1, 8, 4095, 64, 128, **BTNH, **ODD),
    # One long reversed cumulative sum would lose all digits of the gradient of f here.
    gpu_row("long", "bfloat16", 1, 1, 32768, 64, 64, recipe=dict(f_shift=4.0)),
    # The backward pass skips whole chunks.
    gpu_row("lengths", "bfloat16", 5, 2, 1001, 128, 256, **OF_1001),
    gpu_row("lengths", "bfloat16", 5, 2, 1000, 256, 512, **OF_1000),
]
BACK_ON_A_GPU = dict(reverse=True) | TWO_LOWERINGS
FUSED_BACK = dict(config=fused()) | STORED | BACK_ON_A_GPU
REVERSE_ON_A_GPU = [
    gpu_row("reverse_fused", "bfloat16", 1, 8, 2048, 128, 256, **FUSED_BACK),
    gpu_row("reverse", "bfloat16", 1, 8, 1001, 256, 512, **BTNH, **BACK_ON_A_GPU),
    gpu_row("reverse_fused", "bfloat16", 1, 8, 1500, 96, 192, **BTNH, **FUSED_BACK),
    gpu_row("reverse_splits", "bfloat16", 1, 2, 4096, 256, 512, config=fused(), **BACK_ON_A_GPU),
    gpu_row("reverse_lengths", "bfloat16", 5, 2, 1000, 128, 256, reverse=True, **OF_1000),
    gpu_row("reverse", "float32", 1, 2, 1000, 128, 256, reverse=True),
]
HALF_ON_A_GPU = dict(bounds=None, seed=3)
FLOAT16_ON_A_GPU = [
    gpu_row("BNTH", "float16", 1, 2, 250, 64, 64, **HALF_ON_A_GPU),
    gpu_row("BNTH", "float16", 1, 2, 250, 128, 256, **HALF_ON_A_GPU),
    gpu_row("BNTH", "float16", 1, 2, 250, 256, 512, **HALF_ON_A_GPU),
    gpu_row("BNTH", "float16", 1, 2, 250, 64, 64, config=fused(), **HALF_ON_A_GPU),
    gpu_row("BTNH", "float16", 1, 2, 250, 128, 256, **BTNH, config=MATERIALISED, **HALF_ON_A_GPU),
    gpu_row("BTNH", "float16", 1, 2, 250, 256, 512, **BTNH, config=fused(), **HALF_ON_A_GPU),
]


def gpu_calls():
    """Those of test_gpu.py."""
    for dtype, sizes in OF_HEADS.items():
        yield from (gpu_row("heads", dtype, 1, 2, 500, *heads) for heads in sizes)
    yield from ON_A_GPU + REVERSE_ON_A_GPU + FLOAT16_ON_A_GPU
    for heads, call in calls_of_any_heads("triton"):
        yield pytest.param(call, id=f"any_heads-{heads}", marks=pytest.mark.gpu)
