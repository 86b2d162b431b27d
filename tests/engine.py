"""Calls as data: what is drawn for them, what they return, what is exact, and how far apart.

A call is a value whose repr makes it again. Arrays and results are dicts by name; q, k, v, i, f and
h have their heads first, (B, NH, S, ...), in every layout.
"""

import functools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy_evaluator
from exact import MASKED, Recurrence, dot, log_sigmoid, over
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from oracle import quick_code

import mlstm_pallas

TOKENS, STATES, OUTPUTS = "qkvif", "cnm", "hcnm"
INTEGERS = "sequence_lengths", "segment_ids", "segment_lengths", "slots", "accepted"

# ---------------- what is called


@dataclass(frozen=True)
class Lengths:
    """sequence_lengths, one of each entry."""

    of: tuple


@dataclass(frozen=True)
class Ids:
    """segment_ids of packed documents: their numbers of steps in each row; one is behind them."""

    of: tuple
    own = False

    @property
    def count(self):
        return max(map(len, self.of))

    def array(self, S):
        """(B, S)"""
        ids = np.full((len(self.of), S), self.count)
        for row, sizes in zip(ids, self.of, strict=True):
            row[: sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
        return ids


@dataclass(frozen=True)
class Documents(Ids):
    """segment_lengths: documents whose states return; own: and are passed."""

    own: bool = False

    @property
    def lengths(self):
        """(B, N)"""
        return np.array([sizes + (0,) * (self.count - len(sizes)) for sizes in self.of])


@dataclass(frozen=True)
class Drafts:
    """Calls of mlstm_ring_step with T drafts, of which so many count, (B, S / T); None: all."""

    T: int
    accepted: tuple | None = None
    length: int = 16
    phase: int | None = None


@dataclass(frozen=True)
class Slots:
    """The rows of pools of P rows that entries have; -1 or P: none."""

    of: tuple
    P: int


@dataclass(frozen=True)
class Call:
    """function: a public one by its name; shape: B, NH, S, DHQK, DHV; states: dtypes of c, n and m,
    or of c and n alone, None: there are none; steps: some of the kinds above; options: keywords of
    the function."""

    function: str
    shape: tuple
    dtype: str = "float32"
    states: tuple | None = ("float32",) * 3
    steps: tuple = ()
    options: dict = field(default_factory=dict)

    def __hash__(self):
        return hash(repr(self))

    def get(self, kind):
        return next((x for x in self.steps if isinstance(x, kind)), None)

    @property
    def one_by_one(self):
        """Whether states are rounded after each token."""
        return "ring" in self.function or "recurrent" in self.function

    @property
    def kernel_dtype(self):
        """That of products, or of results where these are coarser."""
        return max(self.dtype, self.options.get("autocast_kernel_dtype", self.dtype), key=unit)

    @property
    def outputs(self):
        return OUTPUTS if self.one_by_one or "every" in self.options or self.last else "h"

    @property
    def last(self):
        return self.options.get("return_last_states", False)

    @property
    def differentiable(self):
        """Whether there are gradients; those of functions of tokens are of plain jnp."""
        if self.one_by_one:
            rounded = {"float32"} != {self.dtype, *(self.states or ())}
            drafts = self.get(Drafts)
            return not (rounded or (drafts and drafts.accepted))
        return "every" not in self.options

    @property
    def large(self):
        """Whether the recurrence takes seconds: one draw of roundings has as many digits there as
        several of a small call."""
        return math.prod(self.shape) > 2**24

    @property
    def several(self):
        """Whether states of several steps or documents return."""
        return "every" in self.options or bool(self.get(Documents))

    @property
    def stabilised(self):
        return self.options.get("input_gate") != "sigmoid"

    @property
    def given(self):
        """The initial states that are passed."""
        return STATES[: len(self.states or ())]

    @property
    def sources(self):
        """The arrays that have gradients."""
        return TOKENS + self.given[: 2 + self.stabilised]


# ---------------- what is kept: which steps and states count


class Masks(NamedTuple):
    """order (B, S): the step that is t-th; all others are in this order. read (B, S): h counts, and
    is exactly 0 elsewhere; keep (B, S): the states keep the step; back (S,): the states are first
    what was kept, as if steps since then had not been; start (B, S): the document whose states
    enter, N: zeros, -1: none; ends (B, N): after how many steps states leave, -1: before any of
    its document; rows (B,): the row of the states of an entry, -1: none.
    """

    order: np.ndarray
    read: np.ndarray
    keep: np.ndarray
    back: np.ndarray
    start: np.ndarray
    ends: np.ndarray
    rows: np.ndarray


def kept(call):
    """The masks of a call."""
    B, _, S, *_ = call.shape
    at, rows = np.arange(S), np.arange(B)
    order, back = np.tile(at, (B, 1)), np.ones(S, bool)
    read, keep, start = (np.full((B, S), x) for x in (True, True, -1))
    ends = np.full((B, 1), S)
    if every := call.options.get("every"):
        ends = np.tile([*range(every, S + 1, every), S], (B, 1))
    if lengths := call.get(Lengths):
        keep &= at < np.array(lengths.of)[:, None]
        read &= keep
    if call.options.get("reverse"):
        length = keep.sum(1, keepdims=True)
        order = np.where(keep, length - 1 - at, at)
    if ids := call.get(Ids):
        given = np.take_along_axis(ids.array(S), order, 1)
        start = np.where(np.diff(given, axis=1, prepend=given[:, :1]), ids.count, -1)
    if documents := call.get(Documents):
        read = keep = given < documents.count
        enter = (given == 0) | documents.own
        first = np.diff(given, axis=1, prepend=-1) != 0
        start = np.where(first, np.where(enter, given, documents.count), -1)
        ends = np.where(documents.lengths, np.cumsum(documents.lengths, 1), -1)
    if drafts := call.get(Drafts):
        back = at % drafts.T == 0
        accepted = np.full((B, S // drafts.T), drafts.T)
        accepted = accepted if drafts.accepted is None else np.array(drafts.accepted)
        keep &= at % drafts.T < np.repeat(accepted, drafts.T, 1)  # h of others counts, too
    if slots := call.get(Slots):
        rows = np.array(slots.of)
        rows = np.where(rows < slots.P, rows, -1)
        read, keep = (x & (rows >= 0)[:, None] for x in (read, keep))
    return Masks(order, read, keep, back, start, ends, rows)


# ---------------- what is drawn

# Gates of a model; those that forget much and whose later inputs are as much smaller, so that all
# steps count; gates of any size; n . q and dh . h that cancel. For 16 bits: small cotangents.
KINDS = "model", "long", "any size", "cancels"
SMALL = "small"


def gate(r, shape, edges, largest):
    """Gates of two sizes, and of the edges of their range."""

    def any_size():
        sizes = [x for x in (0, 3, -3, 30, -30, 1e3, -1e3) if abs(x) <= largest]
        return r.choice(sizes) + min(r.choice([0, 1, 10]), largest) * r.standard_normal(shape)

    y = np.where(r.random(shape) < r.choice([0, 0.05, 0.5]), any_size(), any_size())
    y = np.where(r.random(shape) < 0.1, r.choice(edges, size=shape), y)
    return y * (1 + 0.01 * r.random(shape)) + 0.01 * r.random(shape)  # no tie of maxima


def sizes_of(call):
    """The shapes of arrays by name, with those of cotangents."""
    B, NH, S, K, V = call.shape
    ids, slots = call.get(Ids), call.get(Slots)
    lead, N = (slots.P if slots else B,), kept(call).ends.shape[1]
    several = (B, N) if call.several else lead
    inner = dict(
        zip("qkvif" + STATES, ((S, K), (S, K), (S, V), (S,), (S,), (K, V), (K,), ()), strict=True)
    )
    shapes = {name: (B, NH, *inner[name]) for name in TOKENS}
    shapes |= {x: (*(several if ids and ids.own else lead), NH, *inner[x]) for x in STATES}
    shapes |= {"dh": shapes["v"]}
    return shapes | {f"d{x}": (*several, NH, *inner[x]) for x in STATES}


def arrays(call, seed, kind="model"):
    """Arrays of a call by name: tokens, states, cotangents (dh ... dm) and integers."""
    r, wide = np.random.default_rng([seed, (*KINDS, SMALL).index(kind)]), "float32"
    x = {name: r.standard_normal(shape) for name, shape in sizes_of(call).items()}
    if kind != "cancels":  # n . q
        x |= {name: abs(x[name]) + 0.2 for name in "qkn"}
        x["q"] *= r.choice((-1, 1), (*x["i"].shape, 1))
    x["f"] += 10 if kind == "cancels" else 2
    if kind == "long" and call.stabilised:
        x["f"] -= 6
        way = slice(None, None, -1 if call.options.get("reverse") else 1)
        x["i"] += np.cumsum(log_sigmoid(x["f"])[..., way], 2)[..., way]
    if kind == "any size":
        large = (call.states or ())[2:] in ((), (wide,))
        i, f = [-np.inf, -1e9, -9e3, 9e3][: 2 + 2 * large], [-np.inf, -1e7, -900, 900, np.inf]
        x["i"] = gate(r, x["i"].shape, i, 1e3 if large else 3)
        x["f"] = gate(r, x["f"].shape, f, 1e3)
        both = r.random(x["i"].shape) < 0.1  # nothing is left of the states, nothing is stored
        x["i"], x["f"] = np.where(both, -1e9, x["i"]), np.where(both, -np.inf, x["f"])
        x["m"] *= r.choice([0, 1, 100 if large else 1])
        k, v = (max(1, np.max(abs(x[name]))) for name in "kv")  # else of df is left only dc . c
        x["dc"], x["dn"] = x["dc"] / (k * v), x["dn"] / k
    if kind == SMALL:
        x |= {name: y / 1024 for name, y in x.items() if name.startswith("d")}
    if not call.stabilised:
        x["m"], x["dm"] = 0 * x["m"], 0 * x["dm"]
    dtypes = dict.fromkeys([*"qkv", "dh"], call.dtype)
    dtypes |= dict(zip(STATES, call.states or (), strict=False))
    dtypes |= dict(dc=call.options.get("state_dtype", wide))
    x = {name: y.astype(jnp.dtype(dtypes.get(name, wide))) for name, y in x.items()}
    x = {name: y for name, y in x.items() if name not in STATES or name in call.given}
    integers = {}
    if call.differentiable and call.outputs != "h":  # where m is -inf, i and f tie
        x["dm"] = np.where(np.isfinite(stabilisers(call, x)), x["dm"], 0).astype(wide)
    if lengths := call.get(Lengths):
        integers["sequence_lengths"] = lengths.of
    if documents := call.get(Documents):
        integers["segment_lengths"] = documents.lengths
    elif ids := call.get(Ids):
        integers["segment_ids"] = ids.array(call.shape[2])
    if slots := call.get(Slots):
        integers["slots"] = slots.of
    if (drafts := call.get(Drafts)) and drafts.accepted:
        integers["accepted"] = drafts.accepted
    return x | {name: np.array(y, "int32") for name, y in integers.items()}


# ---------------- what is returned


def swapped(y):
    return None if y is None else jnp.swapaxes(y, 1, 2)


def in_layout(function, layout):
    """The function of tokens with the heads first, returning h so."""
    change = swapped if layout == "BTNH" else lambda y: y

    @functools.wraps(function)
    def called(*x, **options):
        result = function(*map(change, x[:5]), *x[5:], layout=layout, **options)
        h, *states = result if isinstance(result, tuple) else (result,)
        return change(h), *states

    return called


def as_passed(tokens, joined):
    """q, k, v, i and f as arguments of a step, joined or not."""
    if not joined:
        return tokens
    return jnp.concatenate(tokens[:3], -1), None, None, jnp.stack(tokens[3:], -1), None


def chunkwise(call, tokens, states, layout="BNTH", **options):
    function = in_layout(mlstm_pallas.mlstm_chunkwise, layout)
    h, *last = function(*tokens, *states, **options)
    return h, *sum(last, ())


def chunkwise_states(call, tokens, states, layout="BNTH", **options):
    function = in_layout(mlstm_pallas.mlstm_chunkwise_states, layout)
    h, last, every = function(*tokens, *states, **options)
    pairs = zip(every, last, strict=True)
    return h, *(jnp.concatenate([y, z[:, None].astype(y.dtype)], 1) for y, z in pairs)


def sequence_parallel(call, tokens, states, shards, layout="BNTH", **options):
    function = mlstm_pallas.distributed.mlstm_chunkwise_sequence_parallel
    function = in_layout(functools.partial(function, axis_name="s"), layout)
    whole, steps, ids = PartitionSpec(), PartitionSpec(None, None, "s"), PartitionSpec(None, "s")
    traced = {name: options.pop(name) for name in {*INTEGERS} & {*options}}
    specs = {name: ids if name == "segment_ids" else whole for name in traced}
    h, last = jax.shard_map(
        lambda tokens, states, traced: function(*tokens, *states, **traced, **options),
        mesh=Mesh(jax.devices()[:shards], "s"),
        in_specs=(steps, whole, specs),
        out_specs=(steps, whole),
        check_vma=False,
    )(tuple(tokens), tuple(states), traced)
    return h, *last


def steps(call, tokens, states, joined=False, **options):
    def one(states, token):
        step = mlstm_pallas.mlstm_recurrent_step
        return step(*as_passed(token, joined), *states, **options)[::-1]

    last, h = lax.scan(one, tuple(states), [jnp.moveaxis(y, 2, 0) for y in tokens])
    return jnp.moveaxis(h, 0, 2), *last


def ring(call, tokens, states, joined=False, accepted=None, layout="BNTH", **options):
    drafts, gate = call.get(Drafts), options.pop("input_gate", "exp")
    T, rows = drafts.T, len(states[0])
    rings = mlstm_pallas.mlstm_ring_states(
        *states, dtype=call.dtype, length=drafts.length, phase=drafts.phase, input_gate=gate
    )
    xs = [jnp.moveaxis(y.reshape(*y.shape[:2], -1, T, *y.shape[3:]), 2, 0) for y in tokens]
    xs = [y[:, :, :, 0] for y in xs] if T == 1 else xs  # a token has no axis T
    layout = layout if T > 1 else None

    def one(carry, x):
        rings, before = carry
        x, count = x
        passed = [swapped(y) if layout == "BTNH" else y for y in x]
        more = dict(layout=layout) if layout else {}
        passed = as_passed(passed, joined)
        step = mlstm_pallas.mlstm_ring_step
        h, rings = step(*passed, rings, accepted=before, **more, **options)
        return (rings, count), swapped(h) if layout == "BTNH" else h

    counts = None if accepted is None else accepted.T
    begin = None if accepted is None else 0 * accepted[:, 0]
    (rings, last), h = lax.scan(one, (rings, begin), (xs, counts))
    if accepted is not None and "slots" in options:  # of each row of the pools
        slots = options["slots"]
        at = jnp.where(slots < 0, rows, slots)
        last = jnp.zeros(rows, last.dtype).at[at].set(last, mode="drop")
    config = options.get("config")
    states = mlstm_pallas.mlstm_ring_flush(rings, accepted=last, config=config)
    return jnp.moveaxis(h, 0, 2).reshape(tokens[2].shape), *states


FUNCTIONS = dict(
    mlstm_chunkwise=chunkwise,
    mlstm_chunkwise_states=chunkwise_states,
    mlstm_chunkwise_sequence_parallel=sequence_parallel,
    mlstm_recurrent_step=steps,
    mlstm_ring_step=ring,
)


def has_gradients(call, backend):
    return call.differentiable and (backend == "xla" or not call.one_by_one)


def function_of(call, backend):
    """A function of arrays: results by name."""
    config = mlstm_pallas.KernelConfig(**call.options.get("config", {}))
    function = functools.partial(
        FUNCTIONS[call.function], call, backend=backend, **call.options | dict(config=config)
    )

    def results(x):
        integers = {name: x[name] for name in INTEGERS if name in x}

        def outputs(sources):
            tokens, states = ([sources[y] for y in ys if y in sources] for ys in (TOKENS, STATES))
            return function(tokens, states, **integers)

        given = {name: x[name] for name in TOKENS + call.given}
        if not has_gradients(call, backend):
            return dict(zip(call.outputs, outputs(given), strict=True))
        wrt = {name: given.pop(name) for name in call.sources}
        y, pull = jax.vjp(lambda wrt: outputs(given | wrt), wrt)
        dy = tuple(x[f"d{name}"].astype(z.dtype) for name, z in zip(call.outputs, y, strict=True))
        gradients = {f"d{name}": z for name, z in pull(dy)[0].items()}
        return dict(zip(call.outputs, y, strict=True)) | gradients

    return results


@functools.lru_cache(4)
def program(call, backend):
    """A function of arrays that is traced once. What runs on one CPU is evaluated in NumPy, in a
    fifth of the time in which XLA compiles it."""
    function = function_of(call, backend)
    if "shards" not in call.options and backend not in COMPILED:
        return numpy_evaluator.jit(function, always=True)
    return quick_code(backend not in COMPILED)(jax.jit(function))


def run(call, x, backend):
    """The results of a call by name: h, c, n, m as they are returned, and gradients dq ... dm."""
    return jax.tree.map(np.asarray, program(call, backend)(x))


# ---------------- what is exact


def initial_of(call, x, masks):
    """c, n and m of each entry and document, and zeros, (B, N + 1, NH, ...)."""
    B, NH, _, K, V = call.shape
    ids, result = call.get(Ids), []
    for name, inner in zip(STATES, ((K, V), (K,), ()), strict=True):
        zeros = np.zeros((B, (ids.count if ids else 1) + 1, NH, *inner))
        if name in x:
            first = np.float64(x[name])
            if call.get(Slots):  # of an entry without a row nothing is read
                first = np.where(over(masks.rows < 0, first[masks.rows]), 0, first[masks.rows])
            first = first if ids and ids.own else first[:, None]
            zeros[:, : first.shape[1]] = first
        result.append(zeros)
    return result


def stabilisers(call, x):
    """m as exact has it, which no other column of q, k, v, c and n changes than the first."""
    one = replace(call, shape=(*call.shape[:3], 1, 1))
    columns = {y: tuple(map(slice, shape)) for y, shape in sizes_of(one).items() if y in x}
    return exact(one, {y: x[y][at] for y, at in columns.items()})["m"]


@np.errstate(all="ignore")
def exact(call, x):
    """The results of a call by name, in float64; x may have "noise", (B, NH, S, DHV), of h in the
    products dh . h of the gradients."""
    masks = kept(call)
    run = Recurrence(x, masks, initial_of(call, x, masks), call.options)
    h, last = run.forward()
    used = masks.rows >= 0

    def in_rows(pools, y):
        pools = np.array(pools, "float64")
        pools[masks.rows[used]] = y[used]
        return pools

    def of_call(y, pools):
        """(B, N, NH, ...) as the call has it."""
        if call.get(Slots):
            return in_rows(pools, y[:, 0])
        return y if call.several else y[:, 0]

    pools = [x.get(name) for name in STATES]
    states = map(of_call, last, pools)
    results = dict(zip(call.outputs, (run.in_memory(h), *states), strict=False))
    if not call.differentiable:
        return results
    d_last = [np.zeros_like(y) for y in last]
    if call.outputs != "h":
        d_last = [np.float64(x[f"d{name}"]) for name in STATES]
        if call.get(Slots):
            d_last = [np.where(over(used, y[masks.rows]), y[masks.rows], 0) for y in d_last]
        d_last = d_last if call.several else [y[:, None] for y in d_last]
    noise = run.ordered(x["noise"]) if "noise" in x else 0
    tokens, initial = run.backward(h, x["dh"], d_last, noise)
    own = getattr(call.get(Ids), "own", False)
    initial = [y[:, :-1] if own else y[:, 0] for y in initial]
    if call.get(Slots):
        initial = [in_rows(x[f"d{name}"], y) for name, y in zip(STATES, initial, strict=True)]
    gradients = dict(zip(TOKENS, map(run.in_memory, tokens), strict=True))
    gradients |= zip(STATES, initial, strict=True)
    return results | {f"d{name}": gradients[name] for name in call.sources}


# ---------------- how far apart

PROMISED = {"bfloat16": (5e-3, 2e-2), "float16": (1e-3, 4e-3), "float32": (1e-5, 1e-4)}  # README
SMALLEST = {"bfloat16": 1e-24, "float16": 2.0**-14, "float32": 1e-24}  # less may be subnormal
COMPILED = "triton", "mosaic_gpu"  # a GPU rounds its own exponentials: what is promised
# Results may change so many times as much as by a rounding of arrays. Differences change more.
FACTOR, OF_DIFFERENCES = 8, 32


def unit(dtype):
    return float(jnp.finfo(dtype).eps) / 2


def spacing_of(*x):
    """The distance of float32 numbers at the largest finite one."""
    largest = (np.max(abs(np.float64(y)), initial=0, where=np.isfinite(y)) for y in x)
    return float(np.spacing(np.float32(max(largest))))


def bounds_of(call, x, desired):
    """Bounds on outputs and on gradients of calls of kind "model": as is derived, but at most what
    is promised.

    Four roundings of the dtype, each u / sqrt(3) in the mean, are on the way to h: an operand, a
    weight or the state, another operand, the result. Eight are on that to a gradient, which is a
    difference of two terms of like size. A float32 sum of n terms adds sqrt(n) roundings. States
    are relative to a float32 m and, token by token, rounded each time.
    """
    S, K, V = call.shape[2:]
    of_m = spacing_of(desired["m"]) if "m" in desired else 0
    of_gates = max(of_m, spacing_of(x["i"], x["f"]))
    u, once = unit(call.kernel_dtype), unit("float32")
    of_states = unit((call.states or ("float32",))[0]) * S**0.5 if call.one_by_one else once
    outputs = math.sqrt(4 / 3) * u + math.sqrt(S + K) * once + of_m + of_states
    gradients = math.sqrt(16 / 3) * u + 4 * math.sqrt(S + K + V) * once + of_gates + of_states
    promised = PROMISED[call.kernel_dtype]
    if call.one_by_one:  # m is rounded after each token
        return outputs + S**0.5 * of_m, gradients
    return min(outputs, promised[0]), min(gradients, promised[1])


def rounded(call, x, seed):
    """The arrays after one more rounding, which is drawn."""
    r, result = np.random.default_rng(seed), {}
    c, n, m = (*(call.states or ()), *("float32",) * 3)[:3]
    S = call.shape[2] ** 0.5 if call.one_by_one else 1
    u, once = unit(call.kernel_dtype), unit("float32")
    units = dict(q=u, k=u, v=max(u, unit(c) * S), c=unit(c) * S, n=unit(n) * S, i=once, f=once)
    units |= dict(m=unit(m) * S)
    exponents = (np.where(y > MASKED, y, 0) for y in (x["i"], log_sigmoid(np.float64(x["f"]))))
    spacing = spacing_of(*exponents, x.get("m", 0))
    for name, y in x.items():
        z = np.float64(y) if name not in INTEGERS else y
        if name in units:
            z = z * (1 + units[name] * r.standard_normal(z.shape))
        if name in "im":  # exponents are sums of such a size
            z = z + S * spacing * r.standard_normal(z.shape)
        result[name] = z
    result["noise"] = unit(call.kernel_dtype) * r.standard_normal(x["v"].shape)
    return result


def aligned(results, m):
    """c and n relative to this m."""
    if "m" not in results:
        return dict(results)
    other = np.float64(results["m"])
    both = np.isfinite(m) & np.isfinite(other)
    factor = np.exp(np.subtract(other, m, where=both, out=np.zeros(other.shape)))
    states = {name: np.float64(results[name]) for name in "cn"}
    return results | {name: y * over(factor, y) for name, y in states.items()}


def of_sums(call, x, desired, changed, name):
    """The change of the terms whose sums are di and df: q . dq, k . dk; of df also dc . c, of what
    is left behind f."""
    pairs = ((x[y], changed[f"d{y}"] - desired[f"d{y}"]) for y in "qk")
    terms = sum(np.linalg.norm(dot(np.float64(y), z)) for y, z in pairs)
    if name == "df":
        left = (np.linalg.norm(x[f"d{y}"] * desired[y]) for y in "cn" if y in desired)
        terms += unit(call.kernel_dtype) * sum(left)
        terms *= np.linalg.norm(np.exp(log_sigmoid(-np.float64(x["f"]))))
    return terms


@np.errstate(invalid="ignore", over="ignore")
def errors(call, x, actual, desired, kind="model", backend="xla"):
    """{name: (error, bound)} of results: norms relative to those of what is exact. Of kinds "any
    size" and "cancels" the bound is what roundings of the arrays change.

    An error is infinite where one of the two is not finite, and where h or a gradient has to be 0
    and is not.
    """
    masks, m = kept(call), desired.get("m")
    read = np.zeros(masks.read.shape, bool)
    np.put_along_axis(read, masks.order, masks.read, 1)
    if not has_gradients(call, backend):
        desired = {name: desired[name] for name in call.outputs if name in desired}
    shapes = ({name: y.shape for name, y in z.items()} for z in (actual, desired))
    assert next(shapes) == next(shapes)
    actual, result, changed = aligned(actual, m), {}, []
    if kind in ("any size", "cancels"):
        for seed in range(1 if call.large else 4):
            changed.append(aligned(exact(call, rounded(call, x, seed)), m))
    bounds = bounds_of(call, x, desired)
    if backend in COMPILED:
        bounds = [max(y) for y in zip(bounds, PROMISED[call.kernel_dtype], strict=True)]
    for name, b in desired.items():
        a = np.float64(actual[name])
        wrong = np.any((a != b) & ~(np.isfinite(a) & np.isfinite(b)))
        if name in {"h", *(f"d{y}" for y in TOKENS)}:
            wrong |= np.any(np.where(over(read[:, None], a), 0, a))
        each = a, b, *(z[name] for z in changed)
        a, b, *others = (np.where(np.isfinite(b), y, 0) for y in each)
        bound = bounds[len(name) - 1]
        if name == "c":
            bound += unit(call.options.get("state_dtype", "float32"))
        size = np.linalg.norm(np.maximum(abs(b), 1) if name == "m" else b)
        if name == "m" and call.one_by_one:  # it is rounded after each token
            bound += 2 * call.shape[2] ** 0.5 * unit(call.states[2] if call.states else "float32")
        if name == "dn":  # n is one more column of C
            size = math.hypot(size, np.linalg.norm(desired["dc"]))
        if name == "dm":  # a sum whose terms may cancel
            for y in "cn":
                terms = np.linalg.norm(desired[f"d{y}"]) * np.linalg.norm(np.float64(x[y]))
                size = max(size, terms)
        size = max(size, SMALLEST[call.kernel_dtype] * math.sqrt(b.size))
        if others:
            change = [np.linalg.norm(y - b) for y in others]
            if name in ("di", "df"):  # sums of q . dq and k . dk, whose roundings differ
                change = np.add(change, [of_sums(call, x, desired, y, name) for y in changed])
            change = math.sqrt(np.mean(np.square(change))) / size
            factor = OF_DIFFERENCES if name in ("dq", "dk", "di", "df", "dm") else FACTOR
            bound = max(2 * bound, factor * (change + unit(call.kernel_dtype)))
        if name == "df" and call.one_by_one and not call.stabilised:
            # JAX differentiates a sigmoid as s (1 - s), which rounds 1 - s.
            of_f = np.maximum(np.exp(log_sigmoid(-np.float64(x["f"]))), unit("float32"))
            bound += unit("float32") * np.linalg.norm(b / of_f) / size
        result[name] = (math.inf if wrong else np.linalg.norm(a - b) / size), bound
    return result
