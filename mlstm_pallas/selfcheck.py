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
# x has q, k, v, i, f, c, n and m, or fewer states; arrays are (B, NH, ...). The results are states
# after N numbers of steps, (B, NH, N, ...).

POOL, OTHER = 5, 7  # rows of pools of states; what rows without an entry hold


def call(function, x, layout=None, **options):
    """What a function of arrays in this layout returns; h has the heads first."""
    axis = 1 + (layout == "BTNH")
    options |= dict(layout=layout) if layout else {}
    result = function(*(y.swapaxes(1, axis) for y in x[:5]), *x[5:], **options)
    h, *states = result if isinstance(result, tuple) else (result,)
    return h.swapaxes(1, axis), *states


def with_axis(states, several=False):
    """The states with the axis N; several: they have it, in front of the heads."""
    return [y.swapaxes(1, 2) if several else y[:, :, None] for y in states]


def chunkwise(x, data, **options):
    h, *states = call(mlstm_pallas.mlstm_chunkwise, x, **data["keywords"], **options)
    return h, *with_axis(sum(states, ()), "num_segments" in options)


def chunkwise_states(x, data, **options):
    function = mlstm_pallas.mlstm_chunkwise_states
    h, last, every = call(function, x, **data["keywords"], **options)
    pairs = zip(with_axis(every, several=True), with_axis(last), strict=True)
    return h, *(jnp.concatenate(pair, 2) for pair in pairs)


def sequence_parallel(x, data, shards, **options):
    """On a mesh of devices, or by vmap where they are fewer than the shards."""
    function = mlstm_pallas.distributed.mlstm_chunkwise_sequence_parallel
    flat, tree = jax.tree.flatten((x, data["keywords"]))
    # The axis of the steps. Keywords are in the order of their names.
    axes = [2] * 5 + [None] * len(x[5:])
    axes += [1 if name == "segment_ids" else None for name in sorted(data["keywords"])]

    def shard(*flat):
        x, keywords = tree.unflatten(flat)
        return call(function, x, axis_name="s", **keywords, **options)

    devices = jax.devices()[:shards]
    if len(devices) == shards:
        specs = [PartitionSpec(*[None] * axis, "s") if axis else PartitionSpec() for axis in axes]
        results = dict(out_specs=(specs[0], PartitionSpec()), check_vma=False)
        run = jax.shard_map(shard, mesh=Mesh(devices, "s"), in_specs=(*specs,), **results)
        h, states = run(*flat)
        return h, *with_axis(states)
    split = [
        y.reshape(*y.shape[:axis], shards, -1, *y.shape[axis + 1 :]) if axis else y
        for axis, y in zip(axes, flat, strict=True)
    ]
    h, states = jax.vmap(shard, axes, (2, 0), axis_name="s")(*split)
    return h.reshape(x[2].shape), *with_axis(y[0] for y in states)


def in_pools(run):
    """With slots the states that a function of tokens takes and returns are rows of pools."""

    @functools.wraps(run)
    def pooled(x, data, **options):
        slots = data["keywords"].get("slots")
        if slots is None:
            return run(x, data, **options)
        rows = jnp.where(slots < 0, POOL, slots)
        pools = (
            jnp.full((POOL, *y.shape[1:]), OTHER, y.dtype).at[rows].set(y, mode="drop")
            for y in x[5:]
        )
        h, *after = run([*x[:5], *pools], data, **options)
        others = jnp.ones(POOL, bool).at[rows].set(False, mode="drop")
        changed = sum(jnp.sum((y != OTHER).T & others) for y in after[:2])
        states = (
            jnp.where((slots < 0).reshape(-1, *[1] * y.ndim), y[:, :, None], pool[slots])
            for y, pool in zip(x[5:], after, strict=True)
        )
        return jnp.where(changed > 0, jnp.nan, h), *states

    return pooled


@in_pools
def steps(x, data, joined, **options):
    def one(states, token):
        if joined:
            token = jnp.concatenate(token[:3], -1), None, None, jnp.stack(token[3:], -1), None
        function = mlstm_pallas.mlstm_recurrent_step
        h, states = function(*token, *states, **data["keywords"], **options)
        return states, h

    states, h = lax.scan(one, tuple(x[5:]), [jnp.moveaxis(y, 2, 0) for y in x[:5]])
    return jnp.moveaxis(h, 0, 2), *with_axis(states)


@in_pools
def sequence(x, data, **options):
    h, states = call(mlstm_pallas.mlstm_recurrent_sequence, x, **data["keywords"], **options)
    return h, *with_axis(states, "return_all_states" in options)


@in_pools
def ring(x, data, T, length, phase, rollback, input_gate="exp", layout=None, **options):
    """Calls of T drafts, of which data["accepted"], (B, calls), count; all without a rollback."""
    rings = mlstm_pallas.mlstm_ring_states(
        *x[5:], dtype=x[1].dtype, length=length, phase=phase, input_gate=input_gate
    )
    drafts = [jnp.moveaxis(y.reshape(*y.shape[:2], -1, T, *y.shape[3:]), 2, 0) for y in x[:5]]
    if T == 1:  # a token has no axis T
        drafts, layout = [y.squeeze(3) for y in drafts], None
    options |= data["keywords"]

    def one(carry, call_of):
        (rings, accepted), (drafts, count) = carry, call_of

        def step(*drafts, **options):
            return mlstm_pallas.mlstm_ring_step(*drafts, rings, accepted=accepted, **options)

        h, rings = call(step, drafts, layout, **options)
        return (rings, count), h

    counts, none = None, None
    if rollback:
        counts = data["accepted"].T
        none = 0 * counts[0]
    (rings, count), h = lax.scan(one, (rings, none), (drafts, counts))
    h = jnp.moveaxis(h if T > 1 else h[:, :, :, None], 0, 2)
    h = h.reshape(*h.shape[:2], -1, h.shape[-1])
    if rollback:
        places = data["places"][:, None, :, None]
        h = jnp.take_along_axis(h, places, 2, mode="fill", fill_value=0)
        if "slots" in options:
            count = jnp.zeros(POOL, "int32").at[options["slots"]].add(count)
    return h, *with_axis(mlstm_pallas.mlstm_ring_flush(rings, accepted=count))


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
    *({}, {}, dict(eps=0.1), dict(stabilize_correctly=False), dict(input_gate="sigmoid")),
    dict(input_gate="sigmoid", normalize=False),
]
LAYOUT, LAST = rows_of(layout=["BNTH", "BTNH"]), dict(return_last_states=True)
KINDS = [LAST, {}, LAST | dict(reverse=True), LAST | dict(num_segments=3)]
CONFIGS = {}, {}, dict(fused=True), dict(fused=False)
SPLITS = rows_of(
    config=[*CONFIGS, dict(num_splits=2)], chunk_size=[None, None, 64, 128, 256, 512, 1024]
)
RECOMPUTE = rows_of(recompute_states_in_bw=[True, False])
ROUNDED = [{}, {}, dict(state_dtype="bfloat16")]
DRAFTS = [dict(T=x, length=y) for x, y in ((1, 16), (3, 8), (8, 16), (1, 8))]
RINGS = [DRAFTS, *rows_of(rollback=[True, True, False], phase=[None, 0])]
# What is called, and the values of its shapes and keywords: a program has one of each row by
# chance, an edge case the first one.
FUNCTIONS = {
    "mlstm_chunkwise": (chunkwise, LONG, [KINDS, ROUNDED, *LAYOUT, *SPLITS, *RECOMPUTE]),
    "mlstm_ring_step": (ring, TOKENS | dict(S=[24, 48]), [*LAYOUT, *RINGS]),
    "mlstm_chunkwise_states": (
        *(chunkwise_states, LONG),
        [ROUNDED, *LAYOUT, *rows_of(every=[64, 16, 32], config=CONFIGS)],
    ),
    "mlstm_recurrent_sequence": (
        *(sequence, TOKENS | dict(lengths=[False, True])),
        [[{}, dict(return_all_states=True)], *LAYOUT],
    ),
    "mlstm_chunkwise_sequence_parallel": (
        *(sequence_parallel, LONG),
        [[LAST], *LAYOUT, *RECOMPUTE, *rows_of(shards=[4, 1, 2])],
    ),
    "mlstm_recurrent_step": (steps, TOKENS, rows_of(joined=[False, True])),
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
DRAWS = 4  # of data for a program; one of them cancels


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
    if r.random() < 0.25 and "shards" not in options:
        call["B"] += 1
        options["config"] = options.get("config", {}) | dict(batch_invariant=True)
        options |= dict(phase=0) if "phase" in options else {}
    return fitted(call, options, backend) | dict(
        function=name, backend=backend, options=options, seed=r.getrandbits(24) * DRAWS
    )


def fitted(call, options, backend):
    """A call of a size for the lowering, without what excludes each other."""
    if "interpret" in backend:
        call |= {name: min(call[name], 48) for name in ("S", "DHQK", "DHV")}
        options |= dict(shards=1) if "mosaic" in backend and "shards" in options else {}
    if call.get("slots"):
        options.pop("return_all_states", None)
    call["initial"] |= call.get("slots", False) or "T" in options or "joined" in options
    if "slots" not in call:  # the gradients of the recurrence in float64 keep all states
        size = math.prod(call[name] for name in ("B", "NH", "DHQK", "DHV"))
        call["S"] = min(call["S"], (10**7 if backend == "xla" else 5 * 10**7) // size + 1)
    unit = options.get("T") or options.get("shards") or 1
    call["S"] = max(call["S"] // unit, 1) * unit
    return call


def drawn_lengths(r, p, cancels):
    """What a call has beside arrays, and what the results mean.

    These are ids of segments, (B, S), after how many steps the states are, (B, N), and where they
    are not zeros.
    """
    B, S, keywords, data = p.B, p.S, {}, {}
    ends, ids = np.full(B, S), np.zeros((B, S), "int32")
    if p.lengths:
        ends = keywords["sequence_lengths"] = r.choice([S] if cancels else [0, S // 3, S - 1, S], B)
    if p.options.get("rollback"):
        T = p.options["T"]
        data["accepted"] = r.integers(0, T + 1, (B, S // T)).astype("int32")
    if p.slots:
        slots = keywords["slots"] = r.permutation(POOL)[:B].astype("int32")
        if B > 1 and r.random() < 0.5:
            slots[-1] = -1
        ends = ends * (slots >= 0)
        data = {name: x * (slots >= 0)[:, None] for name, x in data.items()}
    if data:
        ends = data["accepted"].sum(1)
    if p.segments:
        ids = np.sort(r.integers(0, 1 if cancels else 3, (B, S)) * (np.arange(S) > 0))
        keywords["segment_ids"] = ids
    stops, keep = ends[:, None], np.ones((B, 1), bool)
    if "num_segments" in p.options:
        stops = np.stack([((ids <= n) & (np.arange(S) < stops)).sum(1) for n in range(3)], 1)
        keep = np.diff(stops, axis=1, prepend=-1) > 0
    elif every := p.options.get("every", "return_all_states" in p.options):
        stops = np.minimum([*range(every, S + 1, every), *[S] * ("every" in p.options)], stops)
    return keywords, data, (ids, stops, np.broadcast_to(keep, stops.shape))


def drawn_arrays(r, p, cancels):
    """q, k, v, i, f, c, n and m, or fewer states."""
    S, K, V = p.S, p.DHQK, p.DHV
    sizes = [S, K], [S, K], [S, V], [S], [S], [K, V], [K], []
    q, k, v, i, f, c, n, m = (r.standard_normal((p.B, p.NH, *size)) for size in sizes)
    if cancels:
        i, f = i * (5 if p.dtype != "float16" else 1), f + 10
    else:
        q, k, n = (abs(y) + 0.2 for y in (q, k, n))  # n . q does not cancel
        q *= r.choice((-1, 1), (p.B, p.NH, S, 1))
        forget = r.choice([4, 0, 10, 40])
        f += forget
        if r.random() < 1 / 3:
            for y, value in (f, -np.inf), (f, np.inf if forget > 4 else -30), (i, -30), (i, -np.inf):
                y[r.random(y.shape) < 0.1] = value
    if "input_gate" in p.options:
        m = 0 * m
    count = (2 if "input_gate" in p.options and not p.tokens else 3) if p.initial else 0
    dtypes = [*[p.dtype] * 3, "float32", "float32", *p.states]
    x = zip((q, k, v, i, f, c, n, m)[: 5 + count], dtypes, strict=False)
    return [y.astype(jnp.dtype(dtype)) for y, dtype in x]


def with_garbage(r, p, x, keywords, data):
    """The arrays of a call: gates beyond lengths are NaN, and drafts that do not count are noise."""
    x = [*x]
    if p.lengths:
        beyond = np.arange(p.S) >= keywords["sequence_lengths"][:, None, None]
        x[3:5] = (np.where(beyond, np.float32(np.nan), y) for y in x[3:5])
    if data:
        T, accepted = p.options["T"], data["accepted"]
        before = accepted.cumsum(1) - accepted
        counts = (np.arange(T) < accepted[..., None]).reshape(p.B, -1)
        index = (before[..., None] + np.arange(T)).reshape(p.B, -1).clip(0, p.S - 1)
        noise = r.choice([1, np.nan])
        for j, y in enumerate(x[:5]):
            shape = p.B, 1, p.S, *[1] * (y.ndim - 3)
            y = np.take_along_axis(y, index.reshape(shape), 2)
            other = (noise * r.standard_normal(y.shape)).astype(y.dtype)
            x[j] = np.where(counts.reshape(shape), y, other)
        places = np.full(counts.shape, p.S)
        for row, count in zip(places, counts, strict=True):
            row[: count.sum()] = np.flatnonzero(count)
        data["places"] = places
    return x


# ---------------- how it is compared

# What the README promises of outputs and of gradients.
PROMISED = {"bfloat16": (5e-3, 2e-2), "float16": (1e-3, 4e-3), "float32": (1e-5, 1e-4)}
SMALLEST = 1e-24  # float32 products in a smaller result are subnormal, and a device may drop them
# Where n . q and dh . h cancel, a result is off by so many times what one more rounding changes.
FACTORS = dict(dq=8, dk=8, di=32, df=32, dm_initial=32)
GRADIENTS = ["dq", "dk", "dv", "di", "df", "dc_initial", "dn_initial", "dm_initial"]


def recurrence(p, x, ids, stops, keep):
    """h and the states after so many steps."""
    order = slice(None, None, -1 if "reverse" in p.options else 1)
    names = "input_gate", "normalize", "eps", "stabilize_correctly"
    gate = {name: p.options[name] for name in names if name in p.options}

    def until(end, keep):
        q, k, v, i, f, *states = x
        within = jnp.arange(p.S) < end[:, None]
        i, f = (jnp.where(within[:, None], y, z) for y, z in ((i, -jnp.inf), (f, jnp.inf)))
        # No segment starts beyond a length.
        segment_ids = lax.cummax(jnp.where(within, ids, 0), axis=1)[:, order]
        ordered = (y[:, :, order] for y in (q, k, v, i, f))
        function = mlstm_pallas.reference.recurrence
        h, states = function(*ordered, *states, segment_ids=segment_ids, layout="BNTH", **gate)
        h = jnp.where(within[:, None, :, None], h[:, :, order], 0)
        return h, *((y.T * keep).T for y in states)

    h, *states = jax.vmap(until, 1)(stops, keep)
    return h[-1], *(jnp.moveaxis(y, 0, 2) for y in states)


def rounded(p, key, times, x):
    """The recurrence as sums, in whose products q, k, v and h are rounded once more, to their dtype.

    The terms of n . q and C^T q are rounded to float32. times: 0 or 1 such roundings.
    """
    keys, unit = iter(jax.random.split(key, 9)), float(jnp.finfo(p.dtype).eps) / 2
    unit_c = math.sqrt(p.S) * float(jnp.finfo(p.states[0]).eps) / 2  # it is rounded at every step

    def noise(y, unit=unit, size=None):
        return y + times * unit * jax.random.normal(next(keys), y.shape) * (y if size is None else size)

    q, k, v, i, f = (y[:, :, :: -1 if "reverse" in p.options else 1] for y in x[:5])
    lead, exp = (p.B, p.NH), "input_gate" not in p.options
    zeros = jnp.zeros((*lead, p.DHQK, p.DHV)), jnp.zeros((*lead, p.DHQK)), jnp.zeros(lead)
    c, n, m = (*x[5:], *zeros[len(x) - 5 :])
    b, i = jnp.cumsum(jax.nn.log_sigmoid(f), 2), i if exp else jax.nn.log_sigmoid(i)
    m = m[..., None]
    u = jnp.maximum(m, lax.cummax(i - b, axis=2)) if exp else -b
    W = jnp.where(jnp.tri(p.S, dtype=bool), jnp.exp((i - b)[:, :, None] - u[..., None]), 0)
    w = jnp.exp(m - u)[..., None]

    def sums(q, k, v, c):
        return p.DHQK**-0.5 * ((W * (q @ k.swapaxes(2, 3))) @ v + w * (q @ c))

    rounded_k, rounded_v = noise(k), noise(v)
    size = [abs(y) for y in (q, k, v, c, n)]
    h = sums(noise(q), rounded_k, rounded_v, noise(c, unit_c))
    h = noise(h, 2.0**-24, sums(*size[:4]))
    if p.options.get("normalize", True):
        one = jnp.ones((*lead, p.S, 1))
        z = sums(q, k, one, n[..., None])
        z = abs(noise(z, 2.0**-24, sums(*size[:2], one, size[4][..., None])))
        correct = exp and "stabilize_correctly" not in p.options
        h = h / (jnp.maximum(z, jnp.exp(-b - u)[..., None] if correct else 1) + p.options.get("eps", 1e-6))
    weights, last = W[:, :, -1, :, None], w[:, :, -1]
    c = (weights * rounded_k).swapaxes(2, 3) @ rounded_v + last[..., None] * c
    n = jnp.sum(weights * k, 2) + last * n
    h = noise(h)[:, :, :: -1 if "reverse" in p.options else 1]
    return h, *(y[:, :, None] for y in (c, n, b[:, :, -1] + u[:, :, -1]))


@functools.lru_cache(1)
def compiled(text):
    """The settings of a program, and its functions of data: the call, the recurrence, roundings."""
    program = json.loads(text)
    defaults = dict(lengths=False, segments=False, slots=False, states=["float32"] * 3)
    p = SimpleNamespace(**defaults | program, tokens="slots" in program)
    jax.clear_caches()
    # Compiling interpreted kernels takes nearly all of their time.
    jax.config.update("jax_disable_most_optimizations", "interpret" in p.backend)
    config = mlstm_pallas.KernelConfig(**p.options.get("config", {}))
    options = p.options | dict(backend=p.backend, config=config)
    function = functools.partial(FUNCTIONS[p.function][0], **options)
    p.derivatives = "recompute_states_in_bw" in options
    count = 4 if p.tokens or "every" in options or "return_last_states" in options else 1

    def pulled(function, x, change_dy):
        if not p.derivatives:
            return function(x), None, []
        y, pull = jax.vjp(function, x)
        dy = change_dy(y)
        return y, dy, pull(dy)[0]

    @jax.jit
    def actual(x, data, dy):
        as_y = lambda y: tuple(z.astype(a.dtype) for a, z in zip(y, dy, strict=False))
        y, _, gradients = pulled(lambda x: function(x, data), x, as_y)
        return *y, *gradients

    @jax.jit
    def exact(x, points, dy, cancels):
        def rounded_dy(y):
            h, (dh, *others) = y[0], dy
            along = jnp.sum(dh * h, -1, keepdims=True) / (jnp.sum(h * h, -1, keepdims=True) + 1e-300)
            kinds = p.dtype, options.get("state_dtype", "float32"), "float32", "float32"
            dy_ = dh - cancels * along * h, *others
            return tuple(z.astype(kind).astype(z.dtype) for z, kind in zip(dy_, kinds))[:count]

        y, dy_, gradients = pulled(lambda x: recurrence(p, x, *points)[:count], x, rounded_dy)
        return (*y, *gradients), dy_

    @jax.jit
    def changes(x, dy):
        def one(arguments):
            run = lambda x: rounded(p, *arguments, x)[:count]
            as_y = lambda y: (dy[0], *(z[:, :, :1] for z in dy[1:]))
            y, _, gradients = pulled(run, x, as_y)
            return [y[0], *gradients]

        y = lax.map(one, (jax.random.split(jax.random.key(0), 9), jnp.arange(9) > 0))
        return [jnp.sqrt(jnp.mean((z[1:] - z[0]) ** 2, 0)) for z in y]

    return p, actual, exact, changes


def check(seed, **program):
    """The error and the bound of each result of a call, by name."""
    p, actual, exact, changes = compiled(json.dumps(program))
    r, cancels = np.random.default_rng(seed), seed % DRAWS == 0 and p.states[1] == "float32"
    keywords, data, points = drawn_lengths(r, p, cancels)
    x = drawn_arrays(r, p, cancels)
    sizes = [p.S, p.DHV], *([points[1].shape[1], *y] for y in ([p.DHQK, p.DHV], [p.DHQK], []))
    dy = [r.standard_normal((p.B, p.NH, *size)) for size in sizes]
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [np.float64(y) for y in x]
        desired, dy = exact(wide, points, dy, cancels)
        change = [np.asarray(y) for y in changes(wide, dy)] if cancels else None
        desired = [np.asarray(y) for y in desired]
        dy = None if dy is None else [np.float32(y) for y in dy]
    x = with_garbage(r, p, x, keywords, data)
    arguments = x, data | dict(keywords=keywords), dy
    results = actual(*arguments)
    errors = compared(p, x, points, [np.float64(y) for y in results], desired, change)
    if p.options.get("config", {}).get("batch_invariant"):
        b = r.integers(p.B)
        alone = actual(*jax.tree.map(lambda y: y[b : b + 1], arguments))
        outputs = len(results) - p.derivatives * len(x)
        pairs = zip(results[:outputs], alone, strict=False)
        same = (np.array_equal(y[b : b + 1], z, equal_nan=True) for y, z in pairs)
        errors["the bits of an entry alone"] = (0 if all(same) else math.inf), 1
    return errors


def compared(p, x, points, actual, desired, changes):
    """Errors and bounds; changes: by one more rounding, of h and gradients that cancel."""
    count = len(actual) - p.derivatives * len(x)
    names = [*"hcnm"[:count], *GRADIENTS[: len(actual) - count]]
    if count > 1:  # c and n are relative to m
        with np.errstate(invalid="ignore"):
            apart = np.nan_to_num(np.exp(actual[3] - desired[3]), nan=1, posinf=np.inf)
        actual[1:3] = actual[1] * apart[..., None, None], actual[2] * apart[..., None]
    dtypes = {p.dtype, *p.states, p.options.get("state_dtype", "float32")}
    promised = [max(y) for y in zip(*(PROMISED[name] for name in dtypes))]
    within = np.arange(p.S) < points[1].max(1)[:, None, None]
    exact, errors = dict(zip(names, desired)), {}
    changed = dict(zip(["h", *GRADIENTS], changes or ()))

    def norm(y):
        return np.linalg.norm(y.reshape(p.B * p.NH if name in changed else 1, -1), axis=1)

    for name, a, b in zip(names, actual, desired, strict=True):
        equal = np.isinf(b) & (a == b)
        a, b = np.where(equal, 0, a), np.where(equal, 0, b)
        size = norm(np.maximum(abs(b), 1) if name == "m" else b)
        if name == "dn_initial" and name not in changed:  # n is one more column of C, and dh . h may cancel
            size = np.hypot(size, norm(exact["dc_initial"]))
        if name == "dm_initial":  # a sum whose terms may cancel
            dc, dn = (exact[y] for y in ("dc_initial", "dn_initial"))
            size = np.maximum(size, norm(dc * np.float64(x[5])) + norm(dn) * norm(np.float64(x[6])))
        size = np.maximum(size, SMALLEST)
        error, bound = norm(a - b) / size, np.full(size.shape, promised[name in GRADIENTS])
        if name in changed:
            unit = float(jnp.finfo(p.dtype).eps) / 2
            bound = FACTORS.get(name, 3) * (norm(changed[name]) / size + unit)
        steps = within if a.ndim == 3 else within[..., None]
        beyond = name in ("h", "dq", "dk", "dv", "di", "df") and np.any(a * ~steps)
        if np.isnan(error).any() or beyond:
            error = np.full(size.shape, np.inf)
        worst = np.argmax(error / bound)
        errors[name] = float(error[worst]), float(bound[worst])
    return errors


# ---------------- how it is run and reported

SECONDS = 180  # for a call, with what it compiles
LEAST = 12  # calls, without which a lowering is not checked
LINE = "from mlstm_pallas.selfcheck import check; print(check({}))"
WORKER = "from mlstm_pallas.selfcheck import work; work()"


def work():
    """Reads calls, one per line, and writes their errors; runs in a process of its own."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print
    for line in sys.stdin:
        try:
            errors = check(**json.loads(line))
        except Exception as error:
            message = traceback.format_exception_only(error)[0].strip()
            # Tiles that a config asks for may not fit this GPU.
            errors = {} if message.startswith("ValueError: config.") else {message: (math.inf, 1)}
        print(json.dumps(errors), file=results, flush=True)


def start():
    """A process that works, with a file of what it prints."""
    log = tempfile.TemporaryFile("w+")
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    return subprocess.Popen([sys.executable, "-c", WORKER], start_new_session=True, **pipes), log


def end(process):
    """Ends a process and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def ask(process, log, call):
    """The errors that a process finds in a call, or why it has none."""
    timer = threading.Timer(SECONDS, end, [process])
    timer.start()
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(call), file=process.stdin, flush=True)
    line = process.stdout.readline()
    late = not timer.is_alive()
    timer.cancel()
    if line:
        return json.loads(line)
    code = process.wait()
    log.seek(0)
    said = [f"exit code {code}", *log.read().strip().splitlines()][-1]
    return {f"no result in {SECONDS} s" if late else f"exit code {code}: {said}": (math.inf, 1)}


def check_until(options, backends, checked, processes):
    """Checks calls in processes, each in one after the other, until the time is over."""
    numbers, start_time = itertools.count(), time.monotonic()

    def left():
        return start_time + 60 * options.minutes - time.monotonic()

    def work():
        worker = None
        while left() > 0:
            program = draw(options.seed, next(numbers), backends)
            for j in range(DRAWS):
                if left() <= 0:
                    break
                if not worker:
                    worker = start()
                    processes.append(worker[0])
                call = program | dict(seed=program["seed"] + j)
                errors = ask(*worker, call)
                checked.append((call, errors))
                done = int(20 * (1 - left() / options.minutes / 60))
                print(f"[{'#' * done:20}] {len(checked)} calls", end="\r", file=sys.stderr)
                report_failure(call, errors)
                if any(error == math.inf for error, _ in errors.values()):
                    end(worker[0])
                    worker = None

    workers = [threading.Thread(target=work, daemon=True) for _ in range(options.processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def worst_of(errors):
    """The largest error in units of its bound, and its name."""
    return max(((error / bound, name) for name, (error, bound) in errors.items()), default=(0, "-"))


def report_failure(call, errors):
    worst, name = worst_of(errors)
    if worst > 1:
        line = LINE.format(", ".join(f"{name}={x!r}" for name, x in call.items()))
        error, bound = errors[name]
        print(f"\n{line}\n# {name}: error {error:.1e}, bound {bound:.1e}", flush=True)


def table(checked, backends):
    """The rows of the table, and the exit code."""
    code = 0
    print("| lowering | calls | failed | not supported | worst error / bound | of | result |")
    print("|" + "---|" * 7)
    for backend in dict.fromkeys(backends):
        calls = [(call, errors) for call, errors in checked if call["backend"] == backend]
        supported = [(call, errors) for call, errors in calls if errors]
        worst, name = max((worst_of(errors) for _, errors in supported), default=(0, "-"))
        failed = sum(worst_of(errors)[0] > 1 for _, errors in supported)
        missing = {*FUNCTIONS} - {call["function"] for call, _ in supported}
        result = "wrong" if failed else "right"
        if not failed and (missing or len(supported) < LEAST):
            result = f"not checked, at least {LEAST} calls: no " + ", ".join(sorted(missing))
        numbers = len(supported), failed, len(calls) - len(supported), f"{worst:.2f}", name, result
        print(f"| {backend} |", *(f"{x} |" for x in numbers))
        code = 1 if failed or code == 1 else 2 if result != "right" or code == 2 else 0
    return code


def package_hash():
    """The first digits of a hash of the package's files."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=Path.as_posix):
        name = path.relative_to(root).as_posix().encode()
        digest.update(b"%s\0%s\0" % (name, path.read_bytes()))
    return digest.hexdigest()[:12]


def positive(kind):
    def parse(text):
        x = kind(text)
        if not 0 < x < math.inf:
            raise argparse.ArgumentTypeError(f"{text} checks nothing, expected a number above 0")
        return x

    return parse


def main():
    """The program; returns its exit code."""
    device, gpu, driver = jax.devices()[0].device_kind, jax.default_backend() == "gpu", "none"
    mosaic_gpu = jax_has_mosaic_gpu() and (target_gpu().hopper or not gpu)
    backends = ["xla"] + ["interpret"] * HAS_TRITON + ["mosaic_gpu_interpret"] * mosaic_gpu
    if gpu:
        driver = subprocess.getoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader")
        backends = 2 * (["mosaic_gpu"] * mosaic_gpu + ["triton"] * HAS_TRITON) + ["xla"]
    parser = argparse.ArgumentParser("mlstm_pallas.selfcheck", description=__doc__)
    parser.add_argument("--minutes", type=positive(float), default=5)
    parser.add_argument("--seed", type=int, default=0)
    processes = min(os.cpu_count() or 1, 16)
    parser.add_argument("--processes", type=positive(int), default=processes)
    parser.add_argument("--backend", choices=sorted({*backends}))
    options = parser.parse_args()
    if options.backend:
        backends = [options.backend]
    checked, started = [], []
    try:
        check_until(options, backends, checked, started)
    except KeyboardInterrupt:
        print("interrupted")
    for process in started:
        end(process)
    versions = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, driver {driver}"
    files = f"mlstm_pallas {mlstm_pallas.__version__}, files {package_hash()}"
    print(f"\n{device}, {versions}, {files}, seed {options.seed}\n")
    return table(checked, backends)


if __name__ == "__main__":
    # Processes share the GPU; the warpgroups of interpreted kernels are threads.
    os.environ |= dict(XLA_PYTHON_CLIENT_ALLOCATOR="platform", JAX_NUM_CPU_DEVICES="8")
    if platforms := os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"  # for float64
    sys.exit(main())
