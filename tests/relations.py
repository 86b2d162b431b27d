"""What has to hold of a call: relations(call, backend) that raise AssertionError. Which of them a
row has follows from its steps and its function."""

import functools
import itertools
from dataclasses import replace

import engine
import jax
import jax.numpy as jnp
import numpy as np
from engine import (
    KINDS,
    STATES,
    TOKENS,
    Documents,
    Drafts,
    Ids,
    Slots,
    arrays,
    exact,
    kept,
    over,
    run,
)
from numpy_evaluator import compiled_kernels
from oracle import quick_code


def below(errors):
    wrong = {x: f"{a:.1e} above {b:.1e}" for x, (a, b) in errors.items() if not a <= b}
    assert not wrong, wrong


def same(a, b, counts=lambda name, y: np.ones(y.shape, bool)):
    """Two results have the same bits where they count."""
    for name, y in a.items():
        mask = np.broadcast_to(counts(name, y), y.shape)
        assert np.array_equal(y[mask], b[name][mask], equal_nan=True), name


@functools.lru_cache(8)
def clean(call, backend, kind):
    """Arrays and results that relations share; nobody writes into them."""
    x = arrays(call, 1, kind)
    return x, run(call, x, backend)


def value(call, backend, kinds=KINDS):
    """The results are those of the recurrence in float64, for arrays of each kind: of two kinds
    where that takes long, in large calls and interpreted documents."""
    if call.large or (backend == "interpret" and call.get(Ids)):
        kinds = [x for x in kinds if x in ("model", "any size")]
    for kind in kinds:
        x, actual = clean(call, backend, kind)
        below(engine.errors(call, x, actual, exact(call, x), kind, backend))
        if (slots := call.get(Slots)) and not call.get(Drafts):  # rows of nobody
            rest = np.setdiff1d(np.arange(slots.P), slots.of)
            same({y: x[y][rest] for y in STATES}, {y: actual[y][rest] for y in STATES})


def repeated(call, backend):
    """A second call returns the same bits."""
    x, results = clean(call, backend, "model")
    same(results, run(call, x, backend))


def largest(y):
    return np.full(y.shape, float(jnp.finfo(y.dtype).max) / 2, y.dtype)


def poisoned(x, names, mask, value):
    """The arrays where the mask, (B, S), holds replaced by a value, or by a function of them."""
    result = dict(x)
    for name in names:
        y, at = x[name], over(mask[:, None], x[name])
        result[name] = np.where(at, value(y) if callable(value) else value, y).astype(y.dtype)
    return result


def of_steps(call):
    """Which steps the states keep, (B, S), in the order of the arrays."""
    masks, result = kept(call), np.zeros(call.shape[::2][:2], bool)
    np.put_along_axis(result, masks.order, masks.keep, 1)
    return result


def by_nan(call, backend):
    """A NaN stays in its head and batch entry, and one in rows of nobody there."""
    x, before = clean(call, backend, "model")
    slots, head = call.get(Slots), -1

    def axis(name, y):
        name = name[-1]
        return y.ndim - {"c": 3, "n": 2, "m": 1}.get(name, y.ndim - 1)

    def others(name, y):
        mask = np.ones(y.shape, bool)
        row = slots.of[0] if slots and name[-1] in STATES else 0
        np.moveaxis(mask, axis(name, y), 1)[row, head] = False
        return mask

    x2 = {name: y.copy() for name, y in x.items()}
    for name in [*"qkvc", "dh"]:
        if name in x2:
            row = slots.of[0] if slots and name in STATES else 0
            np.moveaxis(x2[name], axis(name, x2[name]), 1)[row, head] = np.nan
    results = run(call, x2, backend)
    assert np.isnan(np.float64(results["h"][0, head])).any() or not of_steps(call)[0].any()
    same(before, results, others)
    if slots:
        for name in STATES:
            x2[name] = x[name].copy()
            x2[name][np.setdiff1d(np.arange(slots.P), slots.of)] = np.nan
        results = run(call, x | {name: x2[name] for name in STATES}, backend)
        rows = [s for s in slots.of if 0 <= s < slots.P]
        same({"h": before["h"]}, results)
        same({y: before[y][rows] for y in STATES}, {y: results[y][rows] for y in STATES})


def by_beyond(call, backend):
    """What steps hold that the states do not keep reaches nothing: NaN in gates, the largest
    numbers in q, k, v and dh, NaN there, too, in functions of tokens; any ids."""
    (x, before), keep = clean(call, backend, "model"), of_steps(call)
    wild = np.nan if call.one_by_one else largest
    x2 = poisoned(x, "if", ~keep, np.nan)
    x2 = poisoned(x2, [*"qkv"] + ["dh"] * (not call.one_by_one), ~keep, wild)
    if "segment_ids" in x:
        garbage = np.random.default_rng(4).integers(-9, 9, keep.shape)
        x2["segment_ids"] = np.where(keep, x["segment_ids"], garbage).astype("int32")

    def counts(name, y):
        """h of a draft that does not count is one of NaN; so may be gradients of entries that have
        no row."""
        if name == "h" and call.get(Drafts):
            return over(keep[:, None], y)
        return np.full(y.shape, not (name.startswith("d") and call.get(Slots)))

    results = run(call, x2, backend)
    same(before, results, counts)
    if not (call.get(Drafts) or call.get(Slots)):
        below(engine.errors(call, x, results, exact(call, x), backend=backend))


# Arrays of other documents, the power of the largest number that they hold, and whether their gates
# forget nothing, which changes how a chunk is rounded.
OVERFLOWS = ("qkv", 1, False), ("kv", 0.5, True), ("k", 1, True), ("v", 1, False)


def by_overflow(call, backend):
    """A document of a row has the same bits beside others that overflow. A loss that reads it alone
    has no gradients in others, and finite ones everywhere."""
    ids, keep = call.get(Ids), of_steps(call)
    row = ids.array(call.shape[2])[0]
    documents = row[keep[0]] if keep[0].any() else row[:1]
    first, last = documents[:: -1 if call.options.get("reverse") else 1][[0, -1]]
    several = np.unique(documents)
    several = [several[len(several) // 2], first, last]
    cases = [*itertools.product(several, OVERFLOWS)]
    for document, overflow in cases if backend == "xla" else zip(several, OVERFLOWS, strict=False):
        reads_states = document == (0 if call.get(Documents) else first)
        beside_others(call, backend, document, reads_states, document == last, *overflow)


def beside_others(call, backend, document, is_first, is_last, names, power, forget_nothing):
    (x, before), ids = clean(call, backend, "model"), call.get(Ids)
    others = np.zeros((call.shape[0], call.shape[2]), bool)
    others[0] = ids.array(call.shape[2])[0] != document
    if forget_nothing:
        x = poisoned(x, "f", others, 40)
        before = run(call, x, backend)

    def counts(name, y):
        if name in {"h", *(f"d{g}" for g in TOKENS)}:
            return over(~others[:, None], y)
        mask = np.ones(y.shape, bool)
        mask[0] = is_first if name.startswith("d") else is_last and "every" not in call.options
        if y.ndim == {"c": 5, "n": 4, "m": 3}[name[-1]] and "every" not in call.options:
            mask[0] = False
            mask[0, document : document + 1] = True
        return mask

    x2 = poisoned(x, ["dh"], others, 0)
    for name in ("dc", "dn", "dm") if call.outputs != "h" else ():
        x2[name] = np.where(counts(name[1], x[name]), x[name], 0).astype(x[name].dtype)
    x2 = poisoned(x2, names, others, lambda y: largest(y) ** power)
    if ids.own:  # and their states
        x2["c"] = np.where(counts("dc", x["c"]), x["c"], x["c"].dtype.type(3e38))
        x2["c"][1:] = x["c"][1:]
    results = run(call, x2, backend)
    same(before, results, counts)
    if (backend, call.dtype) == ("mosaic_gpu", "bfloat16"):  # its products have no zeros for these
        return
    for name, y in results.items():
        if name.startswith("d"):
            assert np.isfinite(np.float64(y)).all(), f"{name} is not finite"
            if name[1] in TOKENS:
                assert not y[over(others[:, None], y) & np.ones(y.shape, bool)].any(), name


def by_reset(call, backend):
    """Nothing from before a reset passes it: in functions of tokens not even NaN, elsewhere not
    what is 1e30 times too large."""
    x, at, slots = dict(clean(call, backend, "model")[0]), call.shape[2] // 2, call.get(Slots)
    x["f"] = x["f"].copy()
    x["f"][:, :, at] = -np.inf
    keep, behind = of_steps(call), np.arange(call.shape[2]) >= at
    before = keep & (behind if call.options.get("reverse") else ~behind)
    before[:, at] = False
    if call.one_by_one:
        x2 = poisoned(x, TOKENS, before, np.nan)
        used = kept(call).rows[keep[:, at]]
        for name in call.sources[len(TOKENS) :]:
            x2[name] = x[name].copy()
            x2[name][used] = np.nan
    else:
        huge = np.float32(100 if call.dtype == "float16" else 1e30)
        x2 = poisoned(x, "v", before, lambda y: y * huge)
        if call.states and not getattr(call.get(Documents), "own", False):
            x2["c"] = x["c"] * huge

    def counts(name, y):
        if name == "h":
            return over((keep & ~before & keep[:, at : at + 1])[:, None], y)
        mask = np.zeros(len(y), bool)
        if name in STATES and not call.several:
            mask[kept(call).rows[keep[:, at]] if slots else keep[:, at]] = True
        return over(mask, y)

    same(run(call, x, backend), run(call, x2, backend), counts)


def entry_of(values, b):
    return None if values is None else values[b : b + 1]


def batch_invariant(call, backend):
    """An entry alone has the bits that it has in a batch, and the values, compiled as users do: in
    NumPy bits depend on strides. Of gradients only plain jnp promises it."""
    x, slots = arrays(call, 1), call.get(Slots)
    pools = {*STATES, "dc", "dn", "dm"} if slots else ()

    def results(call, x):
        def promised(x):
            results = engine.function_of(call, backend)(x).items()
            others = "d" if backend != "xla" else "no name"
            return {y: z for y, z in results if not (y in pools or y.startswith(others))}

        with compiled_kernels(), quick_code(backend != "xla"):
            return jax.tree.map(np.asarray, jax.jit(promised)(x))

    together, desired = results(call, x), exact(call, x)
    desired = {name: desired[name] for name in together}
    below(engine.errors(call, x, together, desired, backend=backend))
    for b in (0, call.shape[0] - 1):
        alone = {name: y if name in pools else y[b : b + 1] for name, y in x.items()}
        fields = ((y, "accepted" if isinstance(y, Drafts) else "of") for y in call.steps)
        steps = tuple(replace(y, **{f: entry_of(getattr(y, f), b)}) for y, f in fields)
        one = replace(call, shape=(1, *call.shape[1:]), steps=steps)
        if (ids := call.get(Ids)) and ids.count != one.get(Ids).count:
            continue  # N is that of the batch
        same({name: y[b : b + 1] for name, y in together.items()}, results(one, alone))


RELATIONS = value, repeated, by_nan, by_beyond, by_overflow, by_reset, batch_invariant


def has(call, relation, backend):
    """Whether a row has a relation."""
    if relation is repeated:
        return backend != "interpret"  # NumPy repeats itself
    if relation is by_beyond:
        return not of_steps(call).all()
    if relation is by_overflow:
        return call.get(Ids) is not None
    if relation is by_reset:
        return call.shape[2] > 1
    if relation is batch_invariant and backend == "interpret" and call.get(Ids):
        return False  # it takes minutes to compile
    if relation is batch_invariant:
        return bool(call.options.get("config", {}).get("batch_invariant"))
    return True
