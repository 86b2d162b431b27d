"""Checks whether this machine computes right: python -m mlstm_pallas.selfcheck.

On each lowering that the machine has, it compares random calls of all functions, forward and all
gradients, with the recurrence in float64. A line of Python repeats a call whose results are off by
more than is promised. The exit code is 1 if a call failed, else 2 if a lowering was not checked: if
it had fewer calls than the table says, or none of a function.
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import mlstm_pallas
from mlstm_pallas.planning.backend import jax_has_mosaic_gpu
from mlstm_pallas.planning.dispatch import HAS_TRITON
from mlstm_pallas.problem.gpu import target_gpu

# ---------------- what is called: (x, data, **options) -> h, c, n, m
# x: q, k, v, i, f, c, n and m, or fewer states; arrays are (B, NH, ...). The states that are
# returned are those after N numbers of steps, (B, NH, N, ...).


def call(function, x, layout="BNTH", **options):
    """What a function of arrays in this layout returns, h with the heads first."""
    axis = 1 + (layout == "BTNH")
    tokens = (None if y is None else y.swapaxes(1, axis) for y in x[:5])
    result = function(*tokens, *x[5:], layout=layout, **options)
    h, *states = result if isinstance(result, tuple) else (result,)
    return h.swapaxes(1, axis), *states


def with_axis(states, several=False):
    """The states with the axis N; several: it is there, in front of the heads."""
    return [y.swapaxes(1, 2) if several else y[:, :, None] for y in states]


def chunkwise(x, data, **options):
    h, *states = call(mlstm_pallas.mlstm_chunkwise, x, **data["keywords"], **options)
    return h, *with_axis(sum(states, ()), "num_segments" in options)


def chunkwise_states(x, data, **options):
    function = mlstm_pallas.mlstm_chunkwise_states
    h, last, every = call(function, x, **data["keywords"], **options)
    pairs = zip(with_axis(every, True), with_axis(last), strict=True)
    return h, *(jnp.concatenate(pair, 2) for pair in pairs)


def sequence_parallel(x, data, shards, **options):
    function = mlstm_pallas.distributed.mlstm_chunkwise_sequence_parallel
    devices, keywords = jax.devices(), data["keywords"]
    mesh = Mesh(devices[: shards if len(devices) >= shards else 1], "s")
    steps, ids, rest = PartitionSpec(None, None, "s"), PartitionSpec(None, "s"), PartitionSpec()
    specs = {name: ids if name == "segment_ids" else rest for name in keywords}
    specs = [*[steps] * 5, *[rest] * len(x[5:])], specs

    def shard(x, keywords):
        return call(function, x, axis_name="s", **keywords, **options)

    results = dict(out_specs=(steps, rest), check_vma=False)
    h, states = jax.shard_map(shard, mesh=mesh, in_specs=specs, **results)(x, keywords)
    return h, *with_axis(states)


def in_pools(run):
    """With rows, the states that a function of tokens takes and returns are rows of pools."""

    @functools.wraps(run)
    def pooled(x, data, **options):
        if "rows" not in data:
            return run(x, data, **options)
        order = jnp.argsort(data["rows"])
        slots = jnp.argsort(order)
        keywords = data["keywords"] | dict(slots=jnp.where(data["used"], slots, -1))
        pools = (y[order] for y in x[5:])
        h, *pools = run([*x[:5], *pools], data | dict(keywords=keywords), **options)
        return h, *(y[slots] for y in pools)

    return pooled


def as_passed(token, joined):
    """q, k, v, i and f as arguments of a step, joined or not."""
    if not joined:
        return token
    return jnp.concatenate(token[:3], -1), None, None, jnp.stack(token[3:], -1), None


@in_pools
def steps(x, data, joined, **options):
    def one(states, token):
        function = mlstm_pallas.mlstm_recurrent_step
        return function(*as_passed(token, joined), *states, **data["keywords"], **options)[::-1]

    states, h = lax.scan(one, tuple(x[5:]), [jnp.moveaxis(y, 2, 0) for y in x[:5]])
    return jnp.moveaxis(h, 0, 2), *with_axis(states)


@in_pools
def ring(x, data, T, length, phase, rollback, joined, input_gate="exp", layout="BNTH", **options):
    """Calls of T drafts, of which data["accepted"], (B, calls), count."""
    function, options = mlstm_pallas.mlstm_ring_states, options | data["keywords"]
    kept = dict(length=length, phase=phase, input_gate=input_gate)
    rings = function(*x[5:], dtype=x[1].dtype, **kept)
    drafts = [jnp.moveaxis(y.reshape(*y.shape[:2], -1, T, *y.shape[3:]), 2, 0) for y in x[:5]]

    def one(carry, drafts_and_count):
        (rings, accepted), (drafts, count) = carry, drafts_and_count
        step = functools.partial(mlstm_pallas.mlstm_ring_step, accepted=accepted, **options)
        if T > 1:
            h, rings = call(step, [*as_passed(drafts, joined), rings], layout)
        else:  # a token has no axis T
            h, rings = step(*as_passed([y[:, :, 0] for y in drafts], joined), rings)
        return (rings, count), h.reshape(drafts[2].shape)

    counts = data["accepted"].T
    carry, drafts = (rings, 0 * counts[0]), (drafts, counts)
    if not rollback:
        carry, drafts = (rings, None), (drafts[0], None)
    (rings, accepted), h = lax.scan(one, carry, drafts)
    if "slots" in options and rollback:  # the rows of pools, in their order
        accepted = accepted[jnp.argsort(data["rows"])]
    config = options.get("config")
    last = mlstm_pallas.mlstm_ring_flush(rings, accepted=accepted, config=config)
    h = jnp.moveaxis(h, 0, 2).reshape(x[2].shape)
    return jnp.where(data["within"][:, None, :, None], h, 0), *with_axis(last)


# ---------------- what is drawn: programs, which are compiled once, and data for each

HEADS = 64, 8, 24, 37, 48, 96, 128, 160, 192, 250, 256, 320, 512
SHAPES = dict(
    B=[1, 1, 2], NH=[2, 1, 3], DHQK=HEADS, DHV=HEADS, initial=[True, True, False],
    dtype=["bfloat16", "bfloat16", "float16", "float32"],
)  # fmt: skip
LONG = dict(
    S=[256, 40, 47, 128, 200, 333, 640, 777, 1024], lengths=[False, False, True],
    segments=[False, True],
)  # fmt: skip
STATES = [["float32"] * 3, ["bfloat16", "float32", "float32"], ["bfloat16"] * 3, ["float16"] * 3]
TOKENS = dict(S=[5, 1, 2, 4, 7, 8], slots=[False, True], states=STATES)  # dtypes of c, n and m


def rows_of(**options):
    """Rows of keywords, by the values of each keyword."""
    return [[{name: x} for x in values] for name, values in options.items()]


GATES = [
    {},
    {},
    dict(eps=0.1, norm_val=0.5),
    dict(stabilize_correctly=False),
    dict(input_gate="sigmoid"),
    dict(input_gate="sigmoid", normalize=False),
]
LAYOUT, LAST = rows_of(layout=["BNTH", "BTNH"]), dict(return_last_states=True)
KINDS = [LAST, {}, LAST | dict(reverse=True), LAST | dict(num_segments=3)]
CONFIGS = {}, {}, dict(fused=True), dict(fused=False)
SPLITS = rows_of(
    config=[*CONFIGS, dict(num_splits=2)], chunk_size=[None, None, 64, 128, 256, 512, 1024]
)
# Without the option a call has no derivatives, so that its forward pass is the one of a prefill.
RECOMPUTE = [[dict(recompute_states_in_bw=True), dict(recompute_states_in_bw=False), {}]]
ROUNDED = [{}, {}, dict(state_dtype="bfloat16")]
DRAFTS = [dict(T=x, length=y) for x, y in ((1, 16), (3, 8), (8, 16), (1, 8))]
JOINED = rows_of(joined=[False, True])
RINGS = [DRAFTS, *JOINED, *rows_of(rollback=[True, True, False], phase=[None, 0])]
# What is called, and the values of its shapes and keywords: a program has one of each row by
# chance, an edge case the first one.
FUNCTIONS = {
    "mlstm_chunkwise": (chunkwise, LONG, [KINDS, ROUNDED, *LAYOUT, *SPLITS, *RECOMPUTE]),
    "mlstm_ring_step": (ring, TOKENS | dict(S=[24, 48]), [*LAYOUT, *RINGS]),
    "mlstm_chunkwise_states": (
        chunkwise_states,
        LONG,
        [ROUNDED, *LAYOUT, *rows_of(every=[64, 16, 32], config=CONFIGS)],
    ),
    "mlstm_chunkwise_sequence_parallel": (
        sequence_parallel,
        LONG,
        [[LAST], *LAYOUT, *RECOMPUTE, *rows_of(shards=[4, 1, 2])],
    ),
    "mlstm_recurrent_step": (steps, TOKENS, JOINED),
}
ROTATION = [*FUNCTIONS, "mlstm_chunkwise", "mlstm_chunkwise"]
# The first calls on Mosaic GPU: tiles have columns beyond those of the narrower head.
EDGES = [
    *(dict(DHQK=x) for x in (256, 192, 512)),
    *(dict(DHQK=x, DHV=y) for x, y in ((256, 32), (256, 16), (160, 16))),
    *(dict(DHQK=x, DHV=y, chunk_size=256) for x, y in ((64, 64), (64, 128), (128, 64), (32, 64))),
    dict(DHQK=16, DHV=80, chunk_size=512, S=520),
    *(
        dict(config={"fused": False, f"mosaic_gpu_{stage}": dict(state_columns=x, num_stages=2)})
        for stage in ("recurrent_fw_C", "recurrent_bw_dC")
        for x in (128, 192)
    ),
]
# Of a program's draws of data, beside those of a model: gates, q, k and v of any size; n . q and
# dh . h that cancel.
KINDS_OF_DATA = [None, "any size", None, "cancels"]
DRAWS = len(KINDS_OF_DATA)


def draw(seed, number, backends):
    """A program of a run, the same one on every machine: arguments of ``check``."""
    r, (turn, place) = random.Random(f"{seed} {number}"), divmod(number, len(backends))
    backend = backends[place]
    turn = turn * backends.count(backend) + backends[:place].count(backend)
    names = [ROTATION[j % len(ROTATION)] for j in range(turn + 1)]
    name, choose, edge = names[-1], r.choice, {}
    if (backend, name) == ("mosaic_gpu", "mlstm_chunkwise") and names.count(name) <= len(EDGES):
        choose, edge = (lambda row: row[0]), EDGES[names.count(name) - 1]
    _, table, rows = FUNCTIONS[name]
    call = {key: choose(row) for key, row in (SHAPES | table).items()}
    options = dict(item for row in [GATES, *rows] for item in choose(row).items())
    for key, x in edge.items():
        (call if key in call else options)[key] = x
    if name == "mlstm_chunkwise" and "return_last_states" not in options:
        options.pop("state_dtype", None)
    if r.random() < 0.25 and "shards" not in options:
        call["B"] += 1
        options["config"] = options.get("config", {}) | dict(batch_invariant=True)
        options |= dict(phase=0) if "phase" in options else {}
    return fitted(call, options, backend) | dict(
        function=name, backend=backend, options=options, seed=r.getrandbits(24) * DRAWS
    )


def fitted(call, options, backend):
    """A call of a size for the lowering, without what excludes each other."""
    if backend == "interpret":
        call |= {name: min(call[name], 48) for name in ("S", "DHQK", "DHV")}
    if call.get("slots"):  # of several rows, so that a wrong one shows
        options.pop("return_all_states", None)
        call["B"] = max(call["B"], 2)
    call |= dict(segments=True) if "num_segments" in options else {}
    call["initial"] |= call.get("slots", False) or "T" in options or "joined" in options
    if "slots" not in call:  # the gradients of the recurrence in float64 keep all states
        size = math.prod(call[name] for name in ("B", "NH", "DHQK", "DHV"))
        call["S"] = min(call["S"], (10**7 if backend == "xla" else 5 * 10**7) // size + 1)
    unit = options.get("T") or options.get("shards") or 1
    call["S"] = max(call["S"] // unit, 1) * unit
    return call


def drawn_steps(r, p):
    """What a call has beside arrays, and which steps its results count.

    These are the ids of segments, (B, S), the steps before each state, (B, N, S), and which of the
    states are not zeros, (B, N).
    """
    B, S, keywords, steps = p.B, p.S, {}, np.arange(p.S)
    data, within, ids = dict(keywords=keywords), np.ones((B, S), bool), np.zeros((B, S), "int32")
    if p.lengths:
        keywords["sequence_lengths"] = r.choice([0, S // 3, S - 1, S], B).astype("int32")
        within &= steps < keywords["sequence_lengths"][:, None]
    if p.slots:
        data |= dict(rows=r.permutation(B), used=(np.arange(B) == 0) | (r.random(B) < 0.7))
        within &= data["used"][:, None]
    if "T" in p.options:
        T = p.options["T"]
        least = 0 if p.options["rollback"] else T
        accepted = r.integers(least, T + 1, (B, S // T)).astype("int32")
        within &= (np.arange(T) < accepted[..., None]).reshape(B, S)
        data |= dict(accepted=accepted * within.any(1, keepdims=True), within=within)
    if p.segments:
        ids = keywords["segment_ids"] = np.sort(r.integers(0, 3, (B, S)) * (steps > 0))
    ends = [S]
    if every := p.options.get("every"):
        ends = [*range(every, S + 1, every), S]
    if "return_all_states" in p.options:
        ends = range(1, S + 1)
    counted = np.stack([within & (steps < end) for end in ends], 1)
    kept = np.ones(counted.shape[:2], bool)
    if "num_segments" in p.options:
        counted = np.stack([within & (ids <= n) for n in range(3)], 1)
        kept = np.diff(counted.sum(2), axis=1, prepend=-1) > 0
    return data, (ids, counted, kept)


def drawn_gate(r, shape, edges, largest):
    """A gate of two sizes, each in a part of the steps, and at the edges of its range in others."""

    def any_size():
        tables = [0, 3, -3, 30, -30, 1e3, -1e3], [0, 1, 10, 1e3]
        centre, width = (r.choice([x for x in table if abs(x) <= largest]) for table in tables)
        return centre + width * r.standard_normal(shape)

    y = np.where(r.random(shape) < r.choice([0, 0.05, 0.5]), any_size(), any_size())
    y = np.where(r.random(shape) < r.choice([0, 0.1]), r.choice(edges, size=shape), y)
    # At a tie of maxima any subgradient will do.
    return y * (1 + 0.01 * r.random(shape)) + 0.01 * r.random(shape)


def drawn_arrays(r, p, kind):
    """q, k, v, i, f, c, n and m, or fewer states: those of a model, or of one of KINDS_OF_DATA."""
    sizes = [p.S, p.DHQK], [p.S, p.DHQK], [p.S, p.DHV], [p.S], [p.S], [p.DHQK, p.DHV], [p.DHQK], []
    shapes = [(p.B, p.NH, *size) for size in sizes]
    q, k, v, i, f, c, n, m = map(r.standard_normal, shapes)
    f += 10 if kind == "cancels" else r.choice([4, 0, 10, 40])
    if kind != "cancels":  # n . q
        q, k, n = (abs(y) + 0.2 for y in (q, k, n))
        q *= r.choice((-1, 1), (p.B, p.NH, p.S, 1))
    if kind == "any size":
        wide = p.states[2] == "float32"  # what is left of a large m in 16 bits is not its exp
        i = drawn_gate(r, shapes[3], [-np.inf, -9e3, 9e3][: 1 + 2 * wide], 1e3 if wide else 3)
        f = drawn_gate(r, shapes[4], [-np.inf, -900, 900, np.inf], 1e3)
        m, c = m * r.choice([0, 1, 100 if wide else 1]), c * r.choice([0, 1])
        if "float16" not in (p.dtype, *p.states):
            q, k, v = (y * r.choice([1, 1, 1, 1e-30, 1e-3, 1e4]) for y in (q, k, v))
    sigmoid, dtypes = "input_gate" in p.options, [p.dtype] * 3 + ["float32"] * 2 + p.states
    count = (3 if p.tokens or not sigmoid else 2) * p.initial
    x = [q, k, v, i, f, *(c, n, m * (not sigmoid))[:count]]
    return [y.astype(jnp.dtype(dtype)) for y, dtype in zip(x, dtypes, strict=False)]


# ---------------- how it is compared

# What the README promises of outputs and of gradients.
PROMISED = {"bfloat16": (5e-3, 2e-2), "float16": (1e-3, 4e-3), "float32": (1e-5, 1e-4)}
# Products in smaller results are subnormal, and a device may drop them.
SMALLEST = {"bfloat16": 1e-24, "float16": 2.0**-14, "float32": 1e-24}
GRADIENTS = ["dq", "dk", "dv", "di", "df", "dc_initial", "dn_initial", "dm_initial"]
# Where n . q or dh . h cancels, docs/numerics.md promises so many times the change that one more
# rounding of q, k, v and h makes; of others 3 times, or 8 where every token rounds the states.
FACTORS = dict(dq=8, dk=8, di=32, df=32, dm_initial=32)
ROUNDINGS = 8  # of which the change is the root mean square
LOST = "heads in which nothing is left"


def unit(dtype):
    return float(jnp.finfo(dtype).eps) / 2


def with_rounded_sums(x, noise):
    """q, k, c and n with one more column, through which n . q is off by its terms times noise."""
    q, k, v, i, f, *states = x
    sizes = [lax.stop_gradient(jnp.linalg.norm(y, axis=-1, keepdims=True)) for y in (q, k)]
    q = jnp.concatenate([q, noise[..., None] * sizes[0]], -1)
    q *= (q.shape[-1] / k.shape[-1]) ** 0.5  # its scale is that of k
    k = jnp.concatenate([k, sizes[1]], -1)
    if states:
        c, n, *m = states
        size = lax.stop_gradient(jnp.linalg.norm(n, axis=-1, keepdims=True))
        c = jnp.pad(c, [(0, 0)] * 2 + [(0, 1), (0, 0)])
        states = c, jnp.concatenate([n, size], -1), *m
    return q, k, v, i, f, *states


def recurrence(p, x, noise, noise_of_h, ids, counted, kept, **more):
    """h and the states of the recurrence; a step that does not count leaves the states."""
    x = with_rounded_sums(x, noise)
    names = "input_gate", "normalize", "eps", "norm_val", "stabilize_correctly"
    gate = {name: p.options[name] for name in names if name in p.options} | more
    order = slice(None, None, -1 if "reverse" in p.options else 1)

    def until(steps, kept):
        q, k, v, i, f, *states = x
        i, f = jnp.where(steps[:, None], i, -jnp.inf), jnp.where(steps[:, None], f, jnp.inf)
        # No segment starts beyond a length.
        segment_ids = lax.cummax(jnp.where(steps, ids, 0), axis=1)[:, order]
        tokens = (y[:, :, order] for y in (q, k, v, i, f))
        function = mlstm_pallas.reference.recurrence
        h, states = function(*tokens, *states, segment_ids=segment_ids, layout="BNTH", **gate)
        h = jnp.where(steps[:, None, :, None], h[:, :, order], 0)
        return h, *((y.T * kept).T for y in states)

    h, *states = jax.vmap(until, 1)(counted, kept)
    c, n, m = (jnp.moveaxis(y, 0, 2) for y in states)
    return h[-1] * (1 + noise_of_h[..., None]), c[..., : p.DHQK, :], n[..., : p.DHQK], m


@functools.lru_cache(1)
def compiled(program):
    """The settings of a program, and two functions of data: the call and the recurrence."""
    fields = json.loads(program)
    defaults = dict(lengths=False, segments=False, slots=False, states=["float32"] * 3)
    p = SimpleNamespace(**defaults | fields, tokens="S" in fields and "states" in fields)
    options = dict(p.options, backend=p.backend)
    options["config"] = mlstm_pallas.KernelConfig(**options.get("config", {}))
    p.derivatives = "recompute_states_in_bw" in options
    every_state = p.tokens or "every" in options or "return_last_states" in options
    p.outputs = 4 if every_state else 1
    p.dtypes = [p.dtype, options.get("state_dtype", p.states[0]), *p.states[1:]]
    run = functools.partial(FUNCTIONS[p.function][0], **options)
    jax.clear_caches()

    def results(function, x, cotangents):
        if not p.derivatives:
            return function(x), None
        y, pull = jax.vjp(function, x)
        dy = tuple(cotangents(*y))
        return (*y, *pull(dy)[0]), dy

    @jax.jit
    def actual(x, data, dy):
        def cotangents(*y):
            return (a.astype(b.dtype) for a, b in zip(dy, y, strict=False))

        return results(lambda x: run(x, data), x, cotangents)[0]

    @functools.partial(jax.jit, static_argnums=0)
    def exact(rounds, x, steps, dy, cancels, noise, noises):
        def run(x, **more):
            return recurrence(p, x, *noises, *steps, **more)[: p.outputs]

        def cotangents(h, *states):
            along = jnp.sum(dy[0] * h, -1, keepdims=True) / (
                jnp.sum(h * h, -1, keepdims=True) + 1e-99
            )
            # The promise is of the gradients of h. An m of -inf is a tie of i and f.
            pairs = zip(dy[1 : p.outputs], states, strict=True)
            others = (y * (1 - cancels) * jnp.isfinite(z) for y, z in pairs)
            dys = zip((dy[0] - cancels * along * h, *others), p.dtypes, strict=False)
            return (y.astype(dtype).astype(y.dtype) for y, dtype in dys)

        y, dy = results(run, x, cotangents)
        if rounds and p.derivatives:  # h is rounded in dh . h alone, as is what it cancels
            (sums, *last), pull = jax.vjp(functools.partial(run, normalize=False), x)
            size = jnp.sum(sums * sums, -1, keepdims=True) + 1e-99
            inverse = jnp.sum(y[0] * sums, -1, keepdims=True) / size
            added = pull((dy[0] * inverse * noise, *map(jnp.zeros_like, last)))[0]
            gradients = map(jnp.add, y[p.outputs :], added)
            y = *y[: p.outputs], *gradients
        return y, dy

    return p, actual, exact


def largest_of(p, *arrays):
    """The largest finite size in each head, (B, NH)."""
    each = (abs(np.float64(y)).reshape(p.B, p.NH, -1) for y in arrays)
    return np.max([np.max(y, 2, initial=0, where=np.isfinite(y)) for y in each], 0)


def check(seed, **program):
    """The error and the bound of each result of a call, by name."""
    p, actual, exact = compiled(json.dumps(program))
    r, kind = np.random.default_rng(seed), KINDS_OF_DATA[seed % DRAWS]
    cancels = kind == "cancels" and p.states[1] == "float32"
    kind = kind if cancels or kind != "cancels" else None
    data, steps = drawn_steps(r, p)
    x = drawn_arrays(r, p, kind)
    N = steps[1].shape[1]
    sizes = [p.S, p.DHV], [N, p.DHQK, p.DHV], [N, p.DHQK], [N]
    dy = [r.standard_normal((p.B, p.NH, *size)) for size in sizes]
    if kind == "any size":  # else nothing is left of df beside dc . c
        k, v = (max(1, np.max(abs(np.float64(y)))) for y in x[1:3])
        dy[1:3] = dy[1] / (k * v), dy[2] / k
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):

        def exactly(dy, cancels, times):
            noises = (times * r.standard_normal(y.shape) for y in (*x, x[2], *[x[3]] * 2))
            *noises, of_h, of_sums, of_eps = noises
            # c is rounded after every token, as if v were.
            of_c = unit(p.states[0]) * (p.S**0.5 if p.tokens else 1)
            units = [unit(p.dtype)] * 2 + [max(unit(p.dtype), of_c)]
            units += [unit("float32")] * 2 + [of_c, unit(p.states[1]) * p.S**0.5, 0]
            factors = (1 + u * z for u, z in zip(units, noises, strict=False))
            wide = [np.float64(y) * z for y, z in zip(x, factors, strict=True)]
            for j in {3, 7} & {*range(len(x))}:  # exponents are relative to m, which is rounded,
                noise = times * r.standard_normal(x[j].T.shape)
                wide[j] = wide[j] + (unit("float32") * largest.T * noise).T
            of_eps *= largest[..., None]  # as is eps
            of_sums = unit("float32") * of_sums, unit("float32") * of_eps
            results, dy = exact(times > 0, wide, steps, dy, cancels, unit(p.dtype) * of_h, of_sums)
            return [*map(np.asarray, results)], dy

        largest = largest_of(p, *x[3:8:4])
        desired, dy = exactly(dy, cancels, 0)
        largest = largest_of(p, *x[3:8:4], *desired[3 : p.outputs])
        rounded = [exactly(dy, False, 1)[0] for _ in range(ROUNDINGS * (kind is not None))]
        dy = jax.tree.map(np.float32, dy)
    within = steps[1][:, -1][:, None, :]
    names = range(5) if "T" in p.options else (3, 4) if p.lengths else ()
    garbage = r.choice([1, np.nan]) if "T" in p.options else np.nan
    given = [*x]
    for j in names:
        mask = within if x[j].ndim == 3 else within[..., None]
        given[j] = np.where(mask, x[j], (garbage * x[j]).astype(x[j].dtype))
    arguments = given, data, dy
    results = actual(*arguments)
    wide = [np.float64(y) for y in results]
    errors = compared(p, x, within, dy, wide, desired, rounded)
    if p.options.get("config", {}).get("batch_invariant"):
        b = r.integers(p.B)
        alone = actual(*jax.tree.map(lambda y: y[b : b + 1], arguments))
        pairs = zip(results[: p.outputs], alone, strict=False)
        same = all(np.array_equal(y[b : b + 1], z, equal_nan=True) for y, z in pairs)
        errors["bits in a batch"] = (0 if same else math.inf), 1
    return errors


def apart(a, b):
    """a - b, and 0 where one of them is not finite."""
    return np.where(np.isfinite(a) & np.isfinite(b), a - b, 0)


@np.errstate(invalid="ignore", over="ignore")  # NaN and -inf have their places
def compared(p, x, within, dy, actual, desired, rounded):
    """Errors and bounds by name; rounded: results after roundings, beyond the promise.

    Where a rounding changes a third of h, nothing is left to compare in h and the gradients of that
    head but the places of NaN and infinities. So many heads of all are LOST.
    """
    names = [*"hcnm"[: p.outputs], *GRADIENTS][: len(actual)]
    exact = dict(zip(names, desired, strict=True))
    promised = np.max([PROMISED[dtype] for dtype in p.dtypes], 0)
    lost, errors = np.zeros(p.B * p.NH if rounded else 1, bool), {}

    def norm(y):
        """Per head where something may cancel."""
        return np.linalg.norm(y.reshape(lost.size, -1), axis=1)

    def change_of(name, results):
        """What a rounding changes. Sums of q . dq and k . dk, which round apart, are di and df."""
        changes = {y: apart(z, exact[y]) for y, z in zip(names, results, strict=True)}
        terms = 0
        if name in ("di", "df"):
            both = zip(x, ("dq", "dk"), strict=False)
            terms = sum(norm((np.float64(y) * changes[z]).sum(-1)) for y, z in both)
        if name == "df":  # what is left of later sums and of dc . c, times sigmoid(-f)
            pairs = zip(dy[1 : p.outputs], desired[1:3], strict=False)
            terms += unit(p.dtype) * sum(norm(y * z) for y, z in pairs)
            terms *= norm(1 / (1 + np.exp(np.float64(x[4]))))
        return norm(changes[name]) + terms

    shift = np.zeros(lost.shape)
    for y in (*rounded, actual) if p.outputs > 1 else ():  # c and n are relative to m
        factors = np.exp(apart(y[3], exact["m"]))
        y[1:3] = y[1] * factors[..., None, None], y[2] * factors[..., None]
        # So is what the cotangents of the actual ones give.
        shift = abs(factors - 1).reshape(lost.size, -1).max(1)
    for name, a, b in zip(names, actual, desired, strict=True):
        mask = within if a.ndim == 3 else within[..., None]
        wrong = np.any((a != b) & ~(np.isfinite(a) & np.isfinite(b)))
        wrong |= name in "h dq dk dv di df" and np.any(a * ~mask)
        size = apart(b, 0)
        size = norm(np.maximum(abs(size), 1) if name == "m" else size)
        if name == "dn_initial":  # n is one more column of C, and dh . h may cancel
            size = np.hypot(size, norm(exact["dc_initial"]))
        if name == "dm_initial":  # a sum whose terms may cancel
            of_n = norm(exact["dn_initial"]) * norm(np.float64(x[6]))
            size = np.maximum(size, norm(exact["dc_initial"] * np.float64(x[5])) + of_n)
        size = np.maximum(size, SMALLEST[p.dtype] * math.sqrt(a.size))
        bound = np.full(size.shape, promised[int(name in GRADIENTS)])
        if name == "m" and p.tokens:  # it is rounded after every token
            bound += p.S * unit(p.states[2])
        if rounded:
            change = np.sqrt(np.mean([change_of(name, y) ** 2 for y in rounded], 0))
            change = change / size + unit("float32" if name == "m" else p.dtype)
            factor = FACTORS.get(name, 8 if p.tokens else 3)
            bound = np.maximum(bound, factor * change) + shift * (name in GRADIENTS)
            lost |= (name == "h") & (bound > factor / 3)
        error = np.where(lost & (name not in "cnm"), 0, norm(apart(a, b)) / size)
        error += math.inf if wrong else 0
        worst = np.argmax(error / bound)
        errors[name] = float(error[worst]), float(bound[worst])
    errors[LOST] = int(lost.sum()), p.B * p.NH
    return errors


# ---------------- how it is run and reported

SECONDS = 180  # for a call, with the start of its process and what it compiles
LEAST = 12  # calls of a lowering, one or more of each function: else it is not checked
MOST_LOST = 0.1  # of the heads of a lowering's calls
LINE = "from mlstm_pallas.selfcheck import check; print(check({}))"
WORKER = "from mlstm_pallas.selfcheck import work; work()"


def answer(call):
    """The errors of a call, or one that is inf; none if a config does not fit this GPU."""
    # Compiling interpreted kernels takes nearly all of their time.
    jax.config.update("jax_disable_most_optimizations", call["backend"] == "interpret")
    try:
        return check(**call)
    except Exception as error:
        message = traceback.format_exception_only(error)[0].strip()
        return {} if message.startswith("ValueError: config.") else {message: (math.inf, 1)}


def work():
    """Answers calls, a line each; runs in a process of its own."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def start():
    """A process that works, and the file of what it prints."""
    # It is read after the process has ended.
    log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    return subprocess.Popen([sys.executable, "-c", WORKER], start_new_session=True, **pipes), log


def end(process):
    """Ends a process and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    return process.wait()


def ask(process, log, call):
    """What a process answers, or why it does not."""
    timer, begin = threading.Timer(SECONDS, end, [process]), time.monotonic()
    timer.start()
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(call), file=process.stdin, flush=True)
    line = process.stdout.readline()
    timer.cancel()
    if line:
        return json.loads(line)
    code = end(process)
    log.seek(0)
    said = ["", *log.read().strip().splitlines()][-1]
    late = time.monotonic() - begin >= SECONDS
    return {f"no result in {SECONDS} s" if late else f"exit code {code} {said}": (math.inf, 1)}


def worst_of(errors):
    """The largest error in units of its bound, and its name."""
    pairs = ((x / y, name) for name, (x, y) in errors.items() if name != LOST)
    return max(((math.inf if math.isnan(x) else x, name) for x, name in pairs), default=(0, "-"))


class Run:
    """A run: calls, (backend, function, errors), until its time is over."""

    def __init__(self, options, backends):
        self.options, self.backends, self.numbers = options, backends, itertools.count()
        self.start, self.calls, self.processes = time.monotonic(), [], []
        self.interrupted = False  # processes are ended, which is no failure of their calls

    def passed(self):
        """The part of the time that has passed."""
        return (time.monotonic() - self.start) / (60 * self.options.minutes)

    def work(self):
        """Checks one call after the other in a process, and after a failure in a new one."""
        worker = None
        while self.passed() < 1:
            program = draw(self.options.seed, next(self.numbers), self.backends)
            for seed in range(program["seed"], program["seed"] + DRAWS):
                if self.passed() < 1:
                    worker = self.check(worker, program | dict(seed=seed))

    def check(self, worker, call):
        """Checks a call; returns the process for the next one."""
        try:
            if not worker:
                worker = start()
                self.processes.append(worker[0])
            errors = ask(*worker, call)
        except Exception as error:
            errors = {repr(error): (math.inf, 1)}
        if self.interrupted:
            return worker
        self.calls.append((call["backend"], call["function"], errors))
        bar = "#" * min(int(20 * self.passed()), 20)
        print(f"[{bar:20}] {len(self.calls)} calls", end="\r", file=sys.stderr)
        worst, name = worst_of(errors)
        if worst > 1:
            line = LINE.format(", ".join(f"{key}={x!r}" for key, x in call.items()))
            error, bound = errors[name]
            print(f"\n{line}\n# {name}: error {error:.1e}, bound {bound:.1e}", flush=True)
        if worst == math.inf and worker:
            end(worker[0])
            worker = None
        return worker

    def threads(self):
        """Runs until the time is over or Ctrl-C is pressed."""
        workers = [
            threading.Thread(target=self.work, daemon=True) for _ in range(self.options.processes)
        ]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        except KeyboardInterrupt:
            self.interrupted = True
            print("interrupted")
        for process in self.processes:
            end(process)

    def table(self):
        """Prints the table; returns the exit code."""
        titles = (
            "lowering, calls, failed, not supported, heads lost, worst error / bound, of, result"
        )
        print("|", *(f"{title} |" for title in titles.split(", ")))
        print("|" + "---|" * 8)
        codes = []
        for backend in dict.fromkeys(self.backends):
            calls = [x[1:] for x in self.calls if x[0] == backend]
            checked = [(name, worst_of(errors)) for name, errors in calls if errors]
            worst, of = max((x for _, x in checked), default=(0, "-"))
            failed = sum(x > 1 for _, (x, _) in checked)
            pairs = [errors[LOST] for _, errors in calls if LOST in errors]
            lost, heads = (sum(x) for x in zip(*pairs, strict=True)) if pairs else (0, 0)
            reasons = [f"under {LEAST} calls"] * (len(checked) < LEAST)
            reasons += [f"no {name}" for name in FUNCTIONS if name not in {x for x, _ in checked}]
            reasons += ["too many heads lost"] * (lost > MOST_LOST * heads)
            result = f"not checked: {', '.join(reasons)}" if reasons else "right"
            result = "wrong" if failed else result
            unsupported = len(calls) - len(checked)
            row = len(checked), failed, unsupported, lost, f"{worst:.2f}", of, result
            print(f"| {backend} |", *(f"{x} |" for x in row))
            codes.append({"right": 0, "wrong": 1}.get(result, 2))
        return 1 if 1 in codes else max(codes)


def package_hash():
    """The first digits of a hash of the package's files."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=Path.as_posix):
        name = path.relative_to(root).as_posix().encode()
        digest.update(b"%s\0%s\0" % (name, path.read_bytes()))
    return digest.hexdigest()[:12]


def positive(kind):
    """A type of numbers for argparse."""

    def number(text):
        if not 0 < kind(text) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} checks nothing, expected a number above 0")
        return kind(text)

    return number


def main():
    """The program; returns its exit code."""
    device, gpu, driver = jax.devices()[0].device_kind, jax.default_backend() == "gpu", "none"
    mosaic_gpu = jax_has_mosaic_gpu() and target_gpu().hopper
    backends = ["xla"] + ["interpret"] * HAS_TRITON
    if gpu:
        driver = subprocess.getoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader")
        backends = 2 * (
            ["mosaic_gpu"] * mosaic_gpu + ["triton"] * (HAS_TRITON and target_gpu().runs_kernels)
        ) + ["xla"]
    parser = argparse.ArgumentParser("mlstm_pallas.selfcheck", description=__doc__)
    parser.add_argument("--minutes", type=positive(float), default=5)
    parser.add_argument("--seed", type=int, default=0)
    count = min(os.cpu_count() or 1, 16)
    parser.add_argument("--processes", type=positive(int), default=count)
    parser.add_argument("--backend", choices=sorted({*backends}))
    options = parser.parse_args()
    run = Run(options, [options.backend] if options.backend else backends)
    run.threads()
    versions = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, driver {driver}"
    files = f"mlstm_pallas {mlstm_pallas.__version__}, files {package_hash()}"
    print(f"\n{device}, {versions}, {files}, seed {options.seed}\n")
    return run.table()


if __name__ == "__main__":
    # Processes share the GPU; on CPUs a sequence has several shards.
    os.environ |= dict(XLA_PYTHON_CLIENT_ALLOCATOR="platform", JAX_NUM_CPU_DEVICES="8")
    if platforms := os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"  # for float64
    for stream in filter(
        None, (sys.stdout, sys.stderr)
    ):  # the locale may lack characters of a message
        stream.reconfigure(errors="backslashreplace")
    sys.exit(main())
