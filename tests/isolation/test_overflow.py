"""What overflows, from finite q, k and v, stays where it is: in its segment, beyond its length, in
its batch entry, head, slot or draft. test_nan.py has NaN.

A neighbour's values are up to 60,000 in float16 and 1e38 elsewhere. What is kept has the same bits
and is finite, and so are all gradients of a loss that reads no more than that.
"""

import dataclasses
import functools
import operator
import os
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import mosaic_gpu_cases
import numpy as np
import pytest
from call_checks import MATERIALISED, STORED, UNNORMALISED, fused, splits, tiles
from jax.sharding import PartitionSpec as P
from oracle import (
    NAMES,
    OUTPUTS,
    PUBLIC,
    array,
    check_draws,
    cotangents_for,
    gradients_of_call,
    mesh_of,
    needs_mosaic_gpu,
    outputs_and_gradients,
    random_inputs,
    shared,
    slow,
    swapped,
)
from stage_calls import planning

from mlstm_pallas import (
    KernelConfig,
    distributed,
    mlstm_chunkwise,
    mlstm_chunkwise_states,
    mlstm_recurrent_sequence,
    mlstm_recurrent_step,
    mlstm_ring_flush,
    mlstm_ring_states,
    mlstm_ring_step,
    reference,
)

EXAMPLES = int(os.environ.get("MLSTM_PALLAS_EXAMPLES", "20"))  # of a row and dtype
LARGEST = dict(float16=6e4, bfloat16=1e38, float32=1e38)
B, NH, S = 2, 2, 70
STATES = NAMES[5:]


@pytest.fixture(autouse=True)
def short_summaries(monkeypatch):
    """Shards of a sequence are summarised in splits, as long ones are."""
    monkeypatch.setattr(planning, "SUMMARY_STEPS", 16)


class Kept(NamedTuple):
    """What is no neighbour: steps (B, NH, S), initial and last states (B, NH) or (B, N, NH)."""

    steps: np.ndarray
    initial: np.ndarray
    last: np.ndarray

    def of(self, name):
        """The mask of an output or an input."""
        if name in "hqkvif":
            return self.steps
        return self.initial if "initial" in name else self.last


def only(mask, x):
    """x, and 0 outside of the mask, which has its first axes."""
    return np.where(mask.reshape(mask.shape + (1,) * (np.ndim(x) - mask.ndim)), np.asarray(x), 0)


def overflowing(r, x, kept, dtype):
    """x, whose neighbours have values that overflow, or products and sums that do."""
    result = {name: np.array(y) for name, y in x.items()}
    size = LARGEST[dtype] ** r.choice([1.0, 1.0, 0.5])
    names = {*r.permutation([*"qkv"])[: r.integers(1, 4)], *STATES[:2]}
    for name in names & {*x}:
        y = size if name in "qkv" else r.choice([1.0, 3e38])
        sign = np.abs if r.random() < 0.5 else np.sign
        of_values = np.asarray(y * np.sign(sign(np.float64(x[name]))), x[name].dtype)
        result[name] = only(kept.of(name), x[name]) + only(~kept.of(name), of_values)
    return {name: array(y, x[name].dtype) for name, y in result.items()}


def neighbours(r, structure, reverse, shape):
    """Arrays that say where segments and entries end, and what is kept of a call."""
    B, NH, S = shape
    t, everything = np.arange(S), np.ones((B, NH), bool)
    # Anywhere, or where chunks may begin.
    ends = [np.sort(r.choice(np.arange(1, S), 2, replace=False)) for _ in range(B)]
    at_chunks = [np.sort(r.choice(np.arange(16, S, 16), 2, replace=False)) for _ in range(B)]
    first, second = np.array(ends if r.random() < 0.7 else at_chunks).T[..., None]
    ids = (t >= first).astype("int32") + (t >= second)
    lengths = np.full(B, S, "int32")
    if structure == "entries":
        head, b = r.integers(NH), r.integers(B)
        kept = everything.copy()
        kept[(slice(None), head) if r.random() < 0.5 else b] = False
        return {}, Kept(np.repeat(kept[..., None], S, axis=2), kept, kept)
    if structure == "lengths":
        lengths = first[:, 0].astype("int32")
        steps = np.repeat((t < first)[:, None], NH, axis=1)
        return dict(sequence_lengths=lengths), Kept(steps, everything, everything)
    which = int(r.integers(3))
    traced = dict(segment_ids=ids)
    if structure == "padded_segments":  # the last segment is beyond the length, and longer
        which = int(r.integers(2))
        traced["sequence_lengths"] = second[:, 0].astype("int32")
    steps = np.repeat((ids == which)[:, None], NH, axis=1)
    if structure == "prompts":
        of_states = np.zeros((B, 3, NH), bool)
        of_states[:, which] = True
        return traced, Kept(steps, of_states, of_states)
    front, behind = which == 0, which == (1 if "sequence_lengths" in traced else 2)
    front, behind = (behind, front) if reverse else (front, behind)
    return traced, Kept(steps, everything & front, everything & behind)


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """What is compiled once per dtype."""

    structure: str
    function: Callable
    options: dict
    shape: tuple = (B, NH, S, 16, 16)
    states: bool = True  # whether there are initial states
    last: bool = True  # whether there are last states

    @property
    def backend(self):
        return self.options.get("backend")

    @property
    def run(self):
        options = dict(self.options)
        if self.structure == "prompts":
            options |= dict(num_segments=3)
        if self.last and self.function in (mlstm_chunkwise, reference.chunkwise, sharded_call):
            options |= dict(return_last_states=True)
        return shared(self.function, **options)


def drawn(row, dtype, seed):
    """A call with harmless neighbours, one with others, traced options, what is kept."""
    r, (B, NH, S, DHQK, DHV) = np.random.default_rng((seed, 4)), row.shape
    reverse = bool(row.options.get("reverse"))
    traced, kept = neighbours(r, row.structure, reverse, (B, NH, S))
    f_shift = r.choice([0.0, 4.0, 20.0])
    has_m = "input_gate" not in row.options
    recipe = dict(states=row.states, m_initial=has_m, f_shift=f_shift, resets=r.random() < 0.3)
    x = random_inputs(seed, B, NH, S, DHQK, DHV, dtype=dtype, **recipe)
    if row.structure == "prompts" and row.states:
        more = random_inputs(seed, 3 * B, NH, 1, DHQK, DHV)
        x |= {name: more[name].reshape(B, 3, *x[name].shape[1:]) for name in {*STATES} & {*x}}
    if r.random() < 0.5:  # neighbours that forget nothing, which changes how chunks are rounded
        x["f"] = jnp.where(kept.steps, x["f"], 40.0)
    return x, overflowing(r, x, kept, dtype), traced, kept


def check(row, dtype, seed):
    """The call and all its gradients."""
    x, beside, traced, kept = drawn(row, dtype, seed)
    cotangents = cotangents_for(x, dtype, seed=seed)
    if row.structure == "prompts":
        cotangents[1:] = [np.repeat(y[:, None], 3, axis=1) for y in cotangents[1:]]
    cotangents = [
        array(only(kept.of(name), y), "float32")
        for name, y in zip(OUTPUTS, cotangents, strict=True)
    ][: 4 if row.last else 1]
    if row.function is reference.chunkwise:  # its derivatives are products with what overflows
        call = outputs_of(row.run)
    else:
        call = outputs_and_gradients(row.run, row.options.get("layout", "BNTH"))
    clean = call(x, cotangents, **traced)
    if row.structure == "lengths":  # dh beyond them reaches nothing either
        large = np.sign(np.float64(x["v"])) * LARGEST[dtype]
        cotangents[0] += array(only(~kept.steps, large), "float32")
    overflows = call(beside, cotangents, **traced)

    def unaffected(result):
        outputs, gradients = result
        named = [*zip(OUTPUTS, outputs, strict=False), *gradients.items()]
        return {f"d{name}" if name in NAMES else name: np.asarray(y)[kept.of(name)]
                for name, y in named}  # fmt: skip

    assert_unaffected(unaffected(clean), unaffected(overflows))
    drops_unread = (row.backend, dtype) != ("mosaic_gpu", "bfloat16") or row.structure == "lengths"
    if row.structure != "entries" and row.function is not reference.recurrence and drops_unread:
        for name, y in overflows[1].items():
            assert np.isfinite(np.float64(y)).all(), f"d{name} is not finite"
            assert not np.any(np.asarray(y)[~kept.of(name)]), f"d{name} of a neighbour is not 0"


@functools.cache
def outputs_of(run):
    call = jax.jit(run)
    return lambda x, _, **traced: (jax.tree.leaves(call(**x, **traced)), {})


def assert_unaffected(clean, beside):
    """Results by name have the same bits, and are finite; m of a state that holds nothing is
    -inf."""
    for name, y in clean.items():
        y = np.asarray(y)
        finite = np.isfinite(np.float64(y)) | (name.startswith("m") & np.isneginf(np.float64(y)))
        assert finite.all(), f"{name} is not finite"
        np.testing.assert_array_equal(np.asarray(beside[name]), y, err_msg=name)


def check_states(row, dtype, seed):
    """The states after every 16th step, which has no derivatives."""
    x, beside, traced, kept = drawn(row, dtype, seed)
    steps = kept.steps.copy()
    if row.structure == "lengths":  # beyond them the states stay
        steps[:] = True
    kept_boundaries = swapped(steps[:, :, 15 : S // 16 * 16 : 16])
    call = jax.jit(functools.partial(row.function, every=16, **row.options))
    results = []
    for y in x, beside:
        h, last, at = call(*y.values(), **traced)
        outputs = zip(OUTPUTS, (h, *last), strict=True)
        boundaries = zip("cnm", at, strict=True)
        results.append(
            {name: np.asarray(z)[kept.of(name)] for name, z in outputs}
            | {f"{name}_at": np.asarray(z)[kept_boundaries] for name, z in boundaries}
        )
    assert_unaffected(*results)


def sharded_call(q, k, v, i, f, c_initial=None, n_initial=None, m_initial=None, *,
                 segment_ids=None, **options):  # fmt: skip
    """One sequence over two devices, of arrays of all of it."""
    sequence, states = P(None, None, "s"), P()
    ids = P() if segment_ids is None else P(None, "s")

    @functools.partial(
        jax.shard_map,
        mesh=mesh_of((2,), names="s"),
        in_specs=((sequence,) * 5, states, ids),
        out_specs=(sequence, states),
        check_vma=options["backend"] == "xla",
    )
    def over_shards(x, initial, ids):
        call = distributed.mlstm_chunkwise_sequence_parallel
        return call(*x, *initial, segment_ids=ids, axis_name="s", **options)

    initial = tuple(y for y in (c_initial, n_initial, m_initial) if y is not None)
    return over_shards((q, k, v, i, f), initial, segment_ids)


XLA, INTERPRET = (dict(backend=backend, chunk_size=16) for backend in ("xla", "interpret"))
BTNH = dict(layout="BTNH")
FUSED, TILED = dict(config=fused()), dict(config=tiles(16, 16), chunk_size=32)
REVERSE, UNFUSED = dict(reverse=True), dict(config=MATERIALISED)
SMALL = dict(shape=(1, 1, 40, 16, 16))
EVEN = dict(shape=(B, NH, 64, 16, 32))
CHUNKWISE = {
    "plain": Row("segments", mlstm_chunkwise, XLA),
    "plain_reverse_unnormalised": Row("segments", mlstm_chunkwise, XLA | REVERSE | UNNORMALISED),
    "plain_stored": Row("segments", mlstm_chunkwise, XLA | STORED | BTNH, states=False),
    "plain_lengths": Row("lengths", mlstm_chunkwise, XLA),
    "plain_lengths_reverse_stored": Row("lengths", mlstm_chunkwise, XLA | STORED | REVERSE),
    "plain_padded": Row("padded_segments", mlstm_chunkwise, XLA | STORED),
    "plain_padded_reverse": Row("padded_segments", mlstm_chunkwise, XLA | REVERSE),
    "plain_prompts": Row("prompts", mlstm_chunkwise, XLA),
    "plain_prompts_stored": Row("prompts", mlstm_chunkwise, XLA | STORED | UNNORMALISED),
    "plain_entries": Row("entries", mlstm_chunkwise, XLA),
    "fused": Row("segments", mlstm_chunkwise, INTERPRET | FUSED),
    "fused_stored_unnormalised": Row(
        "segments", mlstm_chunkwise, INTERPRET | FUSED | STORED | UNNORMALISED
    ),
    "fused_reverse_h": Row(
        "segments", mlstm_chunkwise, INTERPRET | FUSED | REVERSE, states=False, last=False
    ),
    "fused_splits": Row("segments", mlstm_chunkwise, INTERPRET | dict(config=splits(4)), **EVEN),
    "materialised": Row("segments", mlstm_chunkwise, INTERPRET | UNFUSED | STORED | BTNH),
    "materialised_reverse": Row("segments", mlstm_chunkwise, INTERPRET | UNFUSED | REVERSE),
    "materialised_splits": Row(
        "segments", mlstm_chunkwise, INTERPRET | dict(config=splits(4, fused=False)), **EVEN
    ),
    "tiled": Row("segments", mlstm_chunkwise, INTERPRET | TILED),
    "fused_lengths_reverse": Row("lengths", mlstm_chunkwise, INTERPRET | FUSED | REVERSE),
    "materialised_lengths": Row("lengths", mlstm_chunkwise, INTERPRET | UNFUSED),
    "fused_padded": Row("padded_segments", mlstm_chunkwise, INTERPRET | FUSED),
    "materialised_padded_reverse": Row(
        "padded_segments", mlstm_chunkwise, INTERPRET | UNFUSED | REVERSE | UNNORMALISED
    ),
    "fused_prompts": Row("prompts", mlstm_chunkwise, INTERPRET | FUSED, **SMALL),
    "materialised_prompts": Row("prompts", mlstm_chunkwise, INTERPRET | UNFUSED | STORED, **SMALL),
    "fused_entries": Row("entries", mlstm_chunkwise, INTERPRET | FUSED),
    "reference": Row("segments", reference.chunkwise, dict(chunk_size=16)),
    "recurrence": Row("segments", reference.recurrence, {}),
    "shards": Row("segments", sharded_call, XLA, shape=(B, NH, 128, 16, 16)),
    "shards_stored": Row(
        "segments", sharded_call, XLA | STORED | UNNORMALISED, shape=(B, NH, 128, 16, 16)
    ),
    "shards_entries": Row("entries", sharded_call, XLA, shape=(B, NH, 128, 16, 16)),
}


STATES_OF_CALLS = {
    "plain": Row("segments", mlstm_chunkwise_states, dict(backend="xla")),
    "plain_lengths": Row("lengths", mlstm_chunkwise_states, dict(backend="xla")),
    "interpreted": Row("segments", mlstm_chunkwise_states, dict(backend="interpret")),
    "interpreted_lengths": Row("lengths", mlstm_chunkwise_states, dict(backend="interpret")),
    "interpreted_entries": Row("entries", mlstm_chunkwise_states, dict(backend="interpret")),
}


# ---------------- steps


class Steps(NamedTuple):
    """Calls of steps; what is no neighbour: steps (B, NH, T), states before and after (B, NH)."""

    function: Callable
    backend: str
    gate: str = "exp"
    pooled: bool = False
    rows: int = 5  # of the batch


T = 4


def drawn_steps(r, row, dtype, seed):
    """Arguments without and with neighbours, and what is kept: all but a head, an entry, what is
    before a reset and what is beyond a length."""
    length = 1 if row.function is mlstm_recurrent_step else T
    x = random_inputs(seed, row.rows, NH, length, 8, 8, dtype=dtype, m_initial=row.gate == "exp")
    steps = np.ones((row.rows, NH, length), bool)
    initial = np.ones((row.rows, NH), bool)
    steps[0], initial[0] = False, False  # an entry
    steps[1, r.integers(NH)] = False  # a head
    initial[1] = steps[1, :, 0]
    after = initial.copy()
    reset = int(r.integers(length))  # another request begins
    x["f"] = x["f"].at[2, :, reset].set(-jnp.inf)
    steps[2, :, :reset], initial[2] = False, False
    ends = r.integers(1, length + 1, size=row.rows)
    ends[2] = length
    steps &= np.arange(length) < ends[:, None, None]
    kept = Kept(steps, initial, after)
    traced = dict(sequence_lengths=ends.astype("int32")) if length > 1 else {}
    return x, overflowing(r, x, kept, dtype), traced, kept


def in_a_pool(x, slots, value):
    """The arguments with pools of states for states; rows that are not in slots hold the value."""
    pools = {}
    for name in {*STATES} & {*x}:
        pool = np.full((slots.max() + 3, *x[name].shape[1:]), value, "float32")
        pool[slots] = x[name]
        pools[name] = pool
    return x | pools


@functools.cache
def steps_of(row):
    return jax.jit(
        functools.partial(
            row.function,
            backend=row.backend,
            input_gate=row.gate,
            **dict(layout="BNTH") if row.function is mlstm_recurrent_sequence else {},
        )
    )


def check_steps(row, dtype, seed):
    r = np.random.default_rng((seed, 5))
    x, beside, traced, kept = drawn_steps(r, row, dtype, seed)
    one = row.function is mlstm_recurrent_step
    slots = r.permutation(row.rows) if row.pooled else None
    if row.pooled:
        traced["slots"] = slots.astype("int32")
        x, beside = in_a_pool(x, slots, 1.0), in_a_pool(beside, slots, 3e38)

    def run(x):
        x = {name: y[:, :, 0] if one and name in "qkvif" else y for name, y in x.items()}
        h, states = steps_of(row)(**x, **traced)
        h = h[:, :, None] if one else h
        states = states if slots is None else [np.asarray(y)[slots] for y in states]
        named = zip(OUTPUTS, (h, *states), strict=True)
        return {name: np.asarray(y)[kept.of(name)] for name, y in named}

    assert_unaffected(run(x), run(beside))
    if row.backend == "xla" and not row.pooled:  # it has derivatives
        cotangent = only(kept.steps, np.random.default_rng(seed).normal(size=x["v"].shape))
        cotangent = cotangent[:, :, 0] if one else cotangent
        results = []
        for y in x, beside:
            y = {name: z[:, :, 0] if one and name in "qkvif" else z for name, z in y.items()}
            gradients = gradients_of_steps(row)(y, cotangent, **traced)
            gradients = {
                name: z[:, :, None] if one and name in "qkvif" else z
                for name, z in gradients.items()
            }
            results.append(
                {f"d{name}": np.asarray(z)[kept.of(name)] for name, z in gradients.items()}
            )
        assert_unaffected(*results)


@functools.cache
def gradients_of_steps(row):
    def loss(x, cotangent, **traced):
        return jnp.sum(steps_of(row)(**x, **traced)[0].astype("float32") * cotangent)

    return jax.jit(jax.grad(loss))


STEPS = {
    f"{function.__name__}_{backend}{'_pooled' if pooled else ''}_{gate}": Steps(
        function, backend, gate, pooled
    )
    for function in (mlstm_recurrent_step, mlstm_recurrent_sequence)
    for backend in ("xla", "interpret")
    for gate, pooled in (("exp", False), ("exp", True), ("sigmoid", False))
}


@functools.cache
def ring_step(backend):
    return jax.jit(functools.partial(mlstm_ring_step, backend=backend))


ring_flush = jax.jit(mlstm_ring_flush)


def check_ring(row, dtype, seed):
    """Calls of four drafts, of which random numbers are accepted, until all rings have flushed: in
    entry 0 the tokens and states overflow, in a head of entry 1, in rejected drafts and, of a pool,
    in rows that nobody reads. The request in row 2 begins where the former one overflowed."""
    results = []
    for neighbours in False, True:
        r = np.random.default_rng((seed, 6))
        x = random_inputs(seed, row.rows, NH, 1, 8, 8)
        kept = np.ones((row.rows, NH), bool)
        kept[0], kept[1, r.integers(NH)] = False, False
        before = kept.copy()
        before[2] = False
        of_states = Kept(before[..., None], before, before)
        x = overflowing(r, x, of_states, "float32") if neighbours else (r.random(), x)[1]
        draw = np.random.default_rng((seed, 7))
        slots = draw.permutation(row.rows).astype("int32") if row.pooled else None
        if row.pooled:
            x = in_a_pool(x, slots, 3e38 if neighbours else 1.0)
        has_m = row.gate == "exp"
        arrays = (x["c_initial"], x["n_initial"], x["m_initial"] if has_m else None)
        states = mlstm_ring_states(*arrays, dtype=dtype, length=8, input_gate=row.gate)
        step = functools.partial(ring_step(row.backend), slots=slots)
        accepted, seen = np.zeros(row.rows, "int32"), []
        for n in range(4):
            tokens = random_inputs(seed + n, row.rows, NH, T, 8, 8, dtype=dtype, states=False)
            if n == 0:
                tokens["f"] = tokens["f"].at[2, :, 0].set(-jnp.inf)
            count = draw.integers(T + 1, size=row.rows).astype("int32")
            count[2] = max(count[2], int(n == 0))
            steps = kept[..., None] & (np.arange(T) < count[:, None, None])
            of_tokens = Kept(steps, kept[:0], kept[:0])
            if neighbours:
                others = np.random.default_rng((seed, 8, n))
                tokens = overflowing(others, tokens, of_tokens, dtype)
            h, states = step(*tokens.values(), states, accepted=accepted)
            accepted = count
            rows = jax.tree.map(operator.itemgetter(slots), states) if row.pooled else states
            flushed = ring_flush(rows, accepted=accepted)
            named = {"h": np.asarray(h)[steps]}
            states_after = zip("cnm", flushed, strict=True)
            named |= {f"{name}_{n}": np.asarray(y)[kept] for name, y in states_after}
            seen.append(named)
        results.append(seen)
    for both in zip(*results, strict=True):
        assert_unaffected(*both)


RINGS = {
    f"{backend}{'_pooled' if pooled else ''}_{gate}": Steps(mlstm_ring_step, backend, gate, pooled)
    for backend in ("xla", "interpret")
    for gate, pooled in (("exp", False), ("exp", True), ("sigmoid", False))
}


# ---------------- draws

TABLE = {
    f"{kind}-{name}": (run, row)
    for kind, run, rows in (
        ("call", check, CHUNKWISE),
        ("states", check_states, STATES_OF_CALLS),
        ("steps", check_steps, STEPS),
        ("ring", check_ring, RINGS),
    )
    for name, row in rows.items()
}
INTERPRETED = [name for name, (_, row) in TABLE.items() if row.backend == "interpret"]
# To compile interpreted kernels takes minutes: each row has bfloat16, each third another dtype too.
ROWS = [(name, dtype) for name in TABLE if name not in INTERPRETED for dtype in LARGEST]
for place, name in enumerate(INTERPRETED):
    ROWS += [(name, "bfloat16"), *[(name, ("float16", "float32")[place % 2])] * (place % 3 == 0)]
QUICK = {
    ("call-plain_lengths_reverse_stored", "float32"),
    ("ring-xla_exp", "float16"),
}
DRAWN = (
    *PUBLIC,
    mlstm_chunkwise_states,
    mlstm_ring_step,
    mlstm_ring_flush,
)


def examples(row):
    if row.function is sharded_call:  # most draws have no neighbour at the end of a shard
        return EXAMPLES // 2
    return EXAMPLES // 4


def functions_of(row):
    if row.function is sharded_call:
        return [distributed.mlstm_chunkwise_sequence_parallel]
    return [row.function, *[mlstm_ring_flush] * (row.function is mlstm_ring_step)]


def test_each_function_is_drawn_in_each_dtype():
    """`pytest -s` prints how often."""
    draws = Counter()
    for name, dtype in ROWS:
        _, row = TABLE[name]
        for function in functions_of(row):
            draws[function.__name__, dtype] += examples(row)
    assert {*draws} == {(function.__name__, dtype) for function in DRAWN for dtype in LARGEST}
    print(*(f"{name:34} {dtype:9} {count}" for (name, dtype), count in draws.items()), sep="\n")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [x if x in QUICK else slow(*x) for x in ROWS],
)
def test_what_overflows_reaches_no_neighbour(name, dtype):
    run, row = TABLE[name]
    check_draws(functools.partial(run, row, dtype), f"{name} {dtype}", examples(row))


@pytest.mark.parametrize("dtype", LARGEST)
def test_the_values_of_neighbours_overflow(dtype):
    """In the states of a segment and in what the next one would read of them."""
    x = random_inputs(0, 1, 1, 48, 16, 16, dtype=dtype, states=False, f_shift=20.0)
    size = array(LARGEST[dtype], dtype)
    x |= {name: jnp.full_like(x[name], size) for name in "kv"}
    call = functools.partial(mlstm_chunkwise, return_last_states=True, **XLA)
    h, (c, _, _) = jax.jit(call)(**x)
    if dtype == "float16":  # c is float32, and float16 where the chunks read it
        assert np.abs(c).min() > LARGEST[dtype]
        assert not np.isfinite(np.float64(h)).all()
    else:
        assert not np.isfinite(c).any()


# ---------------- GPUs and Mosaic GPU


def real(structure, DHQK, DHV, S, *options, **fields):
    """A call of the sizes of models; a backend is added."""
    options = functools.reduce(lambda x, y: x | y, options, dict(layout="BTNH"))
    return Row(structure, mlstm_chunkwise, options, shape=(2, 2, S, DHQK, DHV), **fields)


ON_A_GPU = {
    "segments": real("segments", 64, 128, 300),
    "segments_wide_stored": real("segments", 256, 512, 600, STORED),
    "lengths_reverse": real("lengths", 64, 128, 300, REVERSE, UNNORMALISED),
    "prompts_wide": real("prompts", 256, 512, 600),
}


def on(backend, row):
    return dataclasses.replace(row, options=row.options | dict(backend=backend))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ON_A_GPU)
@pytest.mark.parametrize("backend", ["triton", pytest.param("mosaic_gpu", marks=needs_mosaic_gpu)])
def test_what_overflows_reaches_no_neighbour_on_a_gpu(backend, name, dtype):
    if backend == "mosaic_gpu":
        mosaic_gpu_cases.skip_unless_hopper()
    row = on(backend, ON_A_GPU[name])
    check_draws(functools.partial(check, row, dtype), f"{name} {dtype}", EXAMPLES // 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["xla", "interpret", pytest.param("mosaic_gpu", marks=needs_mosaic_gpu)]
)
def test_a_document_that_overflows_has_no_gradients_if_nothing_reads_it(backend, request):
    """In float16 its state is inf after a chunk, and the gradient of the state is 0."""
    if backend == "mosaic_gpu":
        request.getfixturevalue("interpreted")
    S, first = 384, np.arange(384) < 256
    x = random_inputs(3, 1, 1, S, 64, 64, dtype="float16", states=False, f_shift=20.0)
    large = {name: jnp.where(first[:, None], np.float16(256), x[name]) for name in "kv"}
    dh, *_ = cotangents_for(x, "float16")
    run = gradients_of_call(backend=backend, return_last_states=False, config=KernelConfig(128))
    ids = 1 - first[None].astype("int32")
    _, gradients = run(x | large, [jnp.where(first[:, None], 0, dh)], segment_ids=ids)
    for name, y in gradients.items():
        assert np.isfinite(np.float64(y)).all(), f"d{name} is not finite"
        assert not np.any(np.asarray(y)[:, :, first]), f"d{name} of the document is not 0"


OF_MOSAIC_GPU = [
    ("fused", "segments", "float16"),
    slow("fused", "padded_segments", "bfloat16"),
    slow("materialised", "padded_segments", "bfloat16"),
    slow("fused", "lengths", "bfloat16"),
]


@needs_mosaic_gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("schedule", "structure", "dtype"), OF_MOSAIC_GPU)
def test_what_overflows_reaches_no_neighbour_on_mosaic_gpu(schedule, structure, dtype):
    config = getattr(mosaic_gpu_cases, schedule)()
    stored = STORED if schedule == "materialised" else {}
    options = dict(config=config, backend="mosaic_gpu", **stored)
    row = Row(structure, mlstm_chunkwise, options, shape=(1, 1, 256, 64, 128))
    check_draws(functools.partial(check, row, dtype), f"{schedule} {dtype}", EXAMPLES // 10)
