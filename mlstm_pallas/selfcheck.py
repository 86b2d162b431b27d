"""Checks whether this machine computes right: python -m mlstm_pallas.selfcheck.

Each call of a table runs on each lowering that the machine has, in a process of its own. Results
and all gradients are compared with the recurrence in float64, within the bounds of README.md. The
exit code is 1 if a result is wrong or a call fails, and 2 if the program is stopped before its end.
"""

import argparse
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit
from jax.sharding import Mesh, PartitionSpec

import mlstm_pallas
from mlstm_pallas import KernelConfig
from mlstm_pallas.planning.backend import jax_has_mosaic_gpu
from mlstm_pallas.planning.dispatch import HAS_TRITON
from mlstm_pallas.problem.gpu import target_gpu

# What the README promises of outputs and of gradients.
PROMISED = {"bfloat16": (5e-3, 2e-2), "float16": (1e-3, 4e-3), "float32": (1e-5, 1e-4)}
SECONDS = 180  # for a call, with the start of its process and what it compiles

# ---------------- what is called: (x, **keywords) -> h and states
# x: q, k, v, i and f, (B, NH, S, ...), and up to three states.


def sequence(x: Any, name: str = "mlstm_chunkwise", layout: str = "BNTH", **keywords: Any) -> Any:
    in_layout = partial(jnp.swapaxes, axis1=1, axis2=2) if layout == "BTNH" else jnp.asarray
    function = partial(getattr(mlstm_pallas, name), layout=layout, **keywords)
    result = function(*map(in_layout, x[:5]), *x[5:])
    h, last, *every = result if isinstance(result, tuple) else (result, ())
    pairs = zip(*every, last, strict=True) if every else ()
    return in_layout(h), *([jnp.append(y, z[:, None], 1) for y, z in pairs] or last)


def shards(x: Any, **keywords: Any) -> Any:
    """Shards on two or four devices, or two shards of a vmap on one device."""
    function = mlstm_pallas.distributed.mlstm_chunkwise_sequence_parallel
    run = partial(function, axis_name="s", layout="BNTH", **keywords)
    if jax.device_count() == 1:
        split = [jnp.stack(jnp.split(y, 2, axis=2)) for y in x[:5]]
        h, states = jax.vmap(lambda *tokens: run(*tokens, *x[5:]), axis_name="s")(*split)
        return jnp.concatenate([*h], 2), *(y[0] for y in states)
    mesh = Mesh(jax.devices()[: 4 if jax.device_count() >= 4 else 2], "s")
    specs = PartitionSpec(None, None, "s"), PartitionSpec()
    options: Any = dict(mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    h, states = jax.shard_map(lambda x, initial: run(*x, *initial), **options)(x[:5], x[5:])
    return h, *states


def steps(x: Any, **keywords: Any) -> Any:
    def step(states: Any, token: Any) -> Any:
        return mlstm_pallas.mlstm_recurrent_step(*token, *states, **keywords)[::-1]

    states, h = jax.lax.scan(step, (*x[5:],), [jnp.moveaxis(y, 2, 0) for y in x[:5]])
    return jnp.moveaxis(h, 0, 2), *states


def ring(x: Any, accepted: Any, length: int = 8, **keywords: Any) -> Any:
    """Calls with drafts, of which accepted, (B, calls), count."""

    def step(carry: Any, call: Any) -> Any:
        (rings, before), (drafts, count) = carry, call
        options = dict(accepted=before, layout="BNTH") | keywords
        h, rings = mlstm_pallas.mlstm_ring_step(*drafts, rings, **options)
        return (rings, count), h

    rings = mlstm_pallas.mlstm_ring_states(*x[5:], dtype=x[1].dtype, length=length)
    drafts = [jnp.moveaxis(y.reshape(B, NH, -1, DRAFTS, *y.shape[3:]), 2, 0) for y in x[:5]]
    counts = jnp.asarray(accepted.T)
    (rings, last), h = jax.lax.scan(step, (rings, 0 * counts[0]), (drafts, counts))
    last = last[POOL] if "slots" in keywords else last
    states = mlstm_pallas.mlstm_ring_flush(rings, accepted=last)
    return jnp.moveaxis(h, 0, 2).reshape(x[2].shape), *states


HEADS = (64, 128), (256, 512), (128, 128), (96, 192), (16, 16), (37, 50)
B, NH, S, TOKENS, DRAFTS = 3, 2, 200, 24, 4
LAST = dict(return_last_states=True)
LENGTHS = dict(sequence_lengths=np.array([0, 77, S], "int32"))
PACKED = dict(segment_ids=(np.arange(S) >= [[90], [1], [64]]).astype("int32"), layout="BTNH")
DOCUMENTS = dict(segment_lengths=np.array([[90, 70], [1, 199], [64, 0]], "int32"))
ACCEPTED = np.add.outer(range(B), range(TOKENS // DRAFTS)).astype("int32") % (DRAFTS + 1)
SLOTS, POOL = np.array([2, 0, -1], "int32"), np.array([1, 2, 0])  # POOL: the entry of each row
# What is called, at which heads, and with what; with several heads the first have all dtypes.
TABLE: dict[str, tuple[Any, tuple[tuple[int, int], ...], dict[str, Any]]] = {
    "train": (sequence, HEADS, dict(layout="BTNH")),
    "materialised": (sequence, HEADS[1:4:2], LAST | dict(config=KernelConfig(fused=False))),
    "fused": (sequence, HEADS[1:3], LAST | dict(config=KernelConfig(fused=True))),
    "splits": (sequence, HEADS[1:2], LAST | dict(config=KernelConfig(num_splits=2), chunk_size=64)),
    "stored": (sequence, HEADS[2:3], LAST | dict(recompute_states_in_bw=False)),
    "lengths": (sequence, HEADS[::5], LAST | LENGTHS),
    "reverse": (sequence, HEADS[:1], LAST | LENGTHS | dict(reverse=True)),
    "packed": (sequence, HEADS[:1], LAST | PACKED),
    "documents": (sequence, HEADS[2:3], LAST | DOCUMENTS),
    "sigmoid": (sequence, HEADS[:1], LAST | dict(input_gate="sigmoid", normalize=False)),
    "gates": (sequence, HEADS[:1], LAST),
    "shards": (shards, HEADS[1:2], LAST),
    "prefill": (sequence, HEADS[:2], LAST | dict(state_dtype="bfloat16")),
    "blocks": (sequence, HEADS[:2], LENGTHS | dict(name="mlstm_chunkwise_states", every=64)),
    "steps": (steps, HEADS[:2] + HEADS[5:], {}),
    "pools": (steps, HEADS[:1], dict(slots=SLOTS)),
    "drafts": (ring, HEADS[:2] + HEADS[5:], dict(accepted=ACCEPTED)),
    "rings": (ring, HEADS[:1], dict(accepted=ACCEPTED, slots=SLOTS, length=16)),
}  # fmt: skip
TOKEN_NAMES = "h", "dq", "dk", "dv", "di", "df"
FORWARD_ONLY, OF_TOKENS = ("prefill", "blocks"), ("steps", "pools", "drafts", "rings")
DTYPES = dict(
    mosaic_gpu=("bfloat16", "float16"), triton=("bfloat16", "float32", "float16"),
    xla=("float32", "bfloat16", "float16"), interpret=("float32", "bfloat16"),
)  # fmt: skip
INTERPRETED = "lengths", "shards", "blocks", *OF_TOKENS[:3]
SKIPPED = dict(  # what a lowering has no program of its own for; an interpreted one takes long
    mosaic_gpu=OF_TOKENS, triton=(), xla=("materialised", "fused", "splits"),
    interpret={*TABLE} - {*INTERPRETED},
)  # fmt: skip


def calls(backend: str, on_gpu: bool) -> list[str]:
    """The names of the calls of a lowering: lowering/row/heads/dtype."""
    names = []
    for row in (x for x in TABLE if x not in SKIPPED[backend]):
        heads = TABLE[row][1] if on_gpu else ((24, 40),)
        few = 1 if on_gpu or row not in ("train", "steps") else 2  # dtypes of other heads
        all_dtypes = DTYPES[backend][: None if on_gpu and len(heads) > 1 else few]
        for number, (K, V) in enumerate(heads[: 1 if backend == "xla" else None]):
            dtypes = DTYPES[backend][:1] if number else all_dtypes
            names += [f"{backend}/{row}/{K}x{V}/{dtype}" for dtype in dtypes]
    return sorted(names, key=lambda name: "256x512" not in name)  # these take the longest


def inputs(row: str, heads: str, dtype: str) -> tuple[list[Any], list[Any]]:
    """x and cotangents of a call; q, k and n are such that nothing cancels in n . q."""
    r, o, (K, V) = np.random.default_rng(0), TABLE[row][2], map(int, heads.split("x"))
    T, own = TOKENS if row in OF_TOKENS else S, (2,) if "segment_lengths" in o else ()
    tokens = [(B, NH, T, *size) for size in ((K,), (K,), (V,), (), ())]
    shapes = tokens + [(B, *own, NH, *size) for size in ((K, V), (K,), ())]
    q, k, v, i, f, c, n, m = map(r.standard_normal, shapes)
    q, k, n, f = abs(q) + 0.2, abs(k) + 0.2, abs(n) + 0.2, f + 4
    q *= r.choice((-1, 1), (*i.shape, 1))
    if row == "gates":  # large, and at the edges of their range
        i = np.where(np.arange(T) % 11 == 5, -np.inf, 25 + 5 * i)
        f = np.where(np.arange(T) == 100, -np.inf, np.where(np.arange(T) % 7 == 3, np.inf, f))
    dtypes = (
        [dtype] * 3
        + ["float32"] * 2
        + ["bfloat16" if "slots" in o else "float32"]
        + 2 * ["float32"]
    )
    pairs = zip((q, k, v, i, f, c, n, m), dtypes, strict=True)
    x = [y.astype(jnp.dtype(kind)) for y, kind in pairs]
    dy = [r.standard_normal(x[j].shape).astype(x[j].dtype) for j in (2, 5, 6, 7)]
    return x[: {"train": 5, "sigmoid": 7}.get(row, 8)], dy


# ---------------- what is exact, and how far from it results are


def exact(x: Any, o: dict[str, Any], keep: np.ndarray) -> Any:
    """h and states of a call in its quadratic form: step t reads step s with a weight D of
    exp(F_t - F_s + log i_s - m_t), and the initial states with one of ``first``; n is one more
    column of c. keep: the steps of each document that count, (N, B, T)."""
    order, own = np.s_[:, :, :: -1 if "reverse" in o else 1], "segment_lengths" in o
    (q, k, v, i, f), (N, _, T), every = (y[order] for y in x[:5]), keep.shape, o.get("every")
    v, scale, sigmoid = (
        jnp.append(v, jnp.ones_like(i)[..., None], -1),
        q.shape[3] ** -0.5,
        "input_gate" in o,
    )
    rows = np.array([*range(every, T + 1, every), T] if every else [T]) - 1

    def recurrence(keep: Any, c: Any, m: Any) -> Any:
        F = jnp.cumsum(jax.nn.log_sigmoid(jnp.where(keep, jnp.maximum(f, -1e4), jnp.inf)), -1)
        log_i = jnp.where(keep, jax.nn.log_sigmoid(i) if sigmoid else i, -jnp.inf)
        W = jnp.where(np.tri(T, dtype=bool), F[..., None] + (log_i - F)[..., None, :], -jnp.inf)
        first = F + m[..., None]
        m = 0 * F if sigmoid else jnp.maximum(W.max(-1), first)
        D, first = jnp.exp(W - m[..., None]), jnp.exp(first - m)
        sums = D * (q @ jnp.swapaxes(k, 2, 3)) @ v + first[..., None] * (q @ c)
        num, z = scale * sums[..., :-1], scale * sums[..., -1:]
        size = jnp.maximum(abs(z), 1 if sigmoid else jnp.exp(-m)[..., None]) + 1e-6
        h = jnp.where(keep[..., None], num / size if o.get("normalize", True) else num, 0)
        c = jnp.einsum("bhe,bhkv->behkv", first[..., rows], c)
        c += jnp.einsum("bhes,bhsk,bhsv->behkv", D[:, :, rows], k, v)
        return h, c[..., :-1], c[..., -1], jnp.swapaxes(m[..., rows], 1, 2)

    zeros = [
        jnp.zeros((B, N, *y))
        for y in ((NH, *k.shape[3:], v.shape[3] - 1), (NH, *k.shape[3:]), (NH,))
    ]
    states = x[5:] + [y[:, 0] for y in zeros[len(x) - 5 :]]
    c, n, m = states if own else [y.at[:, 0].set(z) for y, z in zip(zeros, states, strict=True)]
    c = jnp.append(c, n[..., None], -1)
    h, *after = jax.vmap(recurrence, (0, 1, 1), (0, 1, 1, 1))(keep[order][:, :, None], c, m)
    after = [y[:, :, 0] if own else y[:, -1] if every else y[:, -1, 0] for y in after]
    return h.sum(0)[order], *after[: 0 if len(x) == 5 else 3]


def check(name: str) -> dict[str, float]:
    """The errors of a call in units of their bounds, by result."""
    backend, row, heads, dtype = name.split("/")
    (run, _, o), (x, dy) = TABLE[row], inputs(row, heads, dtype)
    T, pools, forward_only = x[3].shape[2], "slots" in o, row in FORWARD_ONLY
    if row in OF_TOKENS:  # their kernels have no derivatives
        forward_only = (backend, row, dtype) != ("xla", "steps", "float32")
    forward_only |= backend == "interpret" and row != "lengths"
    keep: Any = np.ones((1, B, T), bool)
    at = np.arange(T)
    if "sequence_lengths" in o:
        keep = keep & (at < o["sequence_lengths"][:, None])
    if "segment_ids" in o:
        keep = keep & (o["segment_ids"] == np.arange(2)[:, None, None])
    if "segment_lengths" in o:
        ends = np.cumsum(o["segment_lengths"], 1)[None].T
        keep = keep & (at < ends) & (at >= ends - o["segment_lengths"][None].T)
    if "accepted" in o:
        keep = keep & (at % DRAFTS < o["accepted"].repeat(DRAFTS, 1))
    if pools:
        keep = keep & (o["slots"] >= 0)[:, None]
    read, given = [keep.any(0)[:, None, :, None], keep.any(0)[:, None]], [*x]
    for j in range(5):  # nothing reads what is beyond
        beyond = x[j].dtype.type(np.nan if j > 2 or row in OF_TOKENS else 100)
        given[j] = np.where(read[j > 2], x[j], x[j] * beyond)

    def results(function: Any, x: Any, dy: Any) -> Any:
        if forward_only:
            return function(x)
        y, pull = jax.vjp(function, x)
        return *y, *pull(tuple(a.astype(b.dtype) for a, b in zip(dy, y, strict=False)))[0]

    def actual(x: Any) -> Any:
        h, *states = run([*x[:5], *(y[POOL] if pools else y for y in x[5:])], backend=backend, **o)
        h = jnp.where(read[0], h, 0) if "accepted" in o else h  # that of other drafts is of no use
        return h, *(y[np.argsort(POOL)] if pools else y for y in states)

    program = jit(partial(results, actual))
    found, again = ([np.asarray(y) for y in program(given, dy)] for _ in range(2))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide, oracle = jax.tree.map(np.float64, (x, dy)), partial(exact, o=o, keep=keep)
        desired = [np.asarray(y) for y in jit(partial(results, oracle))(*wide)]
    names = [*"hcnm"[: 1 if row == "train" else 4], *(f"d{y}" for y in "qkvifcnm"[: len(x)])]
    norm, errors = np.linalg.norm, {}
    right = dict(zip(names, desired, strict=False))
    for label, a, b, c in zip(names, map(np.float64, found), desired, again, strict=False):
        size = float(norm(np.maximum(abs(b), 1) if label == "m" else b))
        bound = PROMISED[dtype][label[0] == "d"]
        if label == "dn":  # n is one more column of C
            size = math.hypot(size, norm(right["dc"]))
        if label == "dm":  # a sum whose terms may cancel
            terms = (
                norm(right[f"d{y}"]) * norm(np.float64(z))
                for y, z in zip("cn", x[5:], strict=False)
            )
            size = max(size, *map(float, terms))
        if label in "hc" and (pools or "state_dtype" in o):  # c is rounded, in pools at every step
            bound += (T if pools else 1) ** 0.5 * 2**-9
        beyond = np.where(read[int(a.ndim < 4)], 0, a) if label in TOKEN_NAMES else 0
        wrong = not np.isfinite(a).all() or not np.array_equal(a, c) or np.any(beyond)
        errors[label] = math.inf if wrong else float(norm(a - b) / size / bound)
    return errors


# ---------------- how it is run


WORKER = """import json, sys
from mlstm_pallas.selfcheck import check
print(json.dumps(check(sys.argv[1])))"""
RUNNING: list[subprocess.Popen[str]] = []


def run(name: str) -> tuple[float, str, float]:
    """The worst error of a call in units of its bound (NaN: a config does not fit this GPU), what
    has it, and seconds."""
    start, command = time.monotonic(), [sys.executable, "-c", WORKER, name]
    with subprocess.Popen(
        command, stdout=-1, stderr=-1, text=True, start_new_session=True
    ) as process:
        RUNNING.append(process)
        try:
            out, said = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return math.inf, f"no result in {SECONDS} s", SECONDS
    seconds = time.monotonic() - start
    if process.returncode:
        lines = ["", *said.strip().splitlines()]
        config = [x for x in lines if x.startswith("ValueError: config.")]
        if config:
            return math.nan, config[0], seconds
        return math.inf, f"exit code {process.returncode} {lines[-1]}", seconds
    errors = json.loads(out.splitlines()[-1])
    error, worst = max((math.inf if math.isnan(x) else x, label) for label, x in errors.items())
    return error, worst, seconds


def package_hash() -> str:
    """The first digits of a hash of the package's files."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=Path.as_posix):
        name = path.relative_to(root).as_posix().encode()
        digest.update(b"%s\0%s\0" % (name, path.read_bytes()))
    return digest.hexdigest()[:12]


def lacks() -> dict[str, list[str]]:
    """What this machine lacks for each lowering."""
    gpu, platform = target_gpu(), jax.default_backend()
    pallas = {"a jax with Pallas' Triton": HAS_TRITON}
    of_triton = {"an NVIDIA GPU from 8.0": platform == "gpu" and gpu.runs_kernels} | pallas
    of_mosaic_gpu = {"a Hopper GPU": gpu.hopper, "jax >= 0.11.2, < 0.13": jax_has_mosaic_gpu()}
    of_interpret = {"a CPU": platform == "cpu"} | pallas
    needs = dict(mosaic_gpu=of_mosaic_gpu, triton=of_triton, xla={}, interpret=of_interpret)
    return {x: [need for need, has in y.items() if not has] for x, y in needs.items()}


def main() -> int:
    """The program; returns its exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    missing, devices = lacks(), jax.devices()
    here = [x for x, lacking in missing.items() if not lacking]
    parser = argparse.ArgumentParser("mlstm_pallas.selfcheck", description=__doc__)
    parser.add_argument("--backend", choices=here, action="append", help="one lowering alone")
    parser.add_argument("--only", default="", help="the calls with this in their names alone")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    names = [y for x in options.backend or here for y in calls(x, on_gpu) if options.only in y]
    if not names:
        parser.error(f"argument --only: no call has {options.only} in its name")
    unchecked = [f"{x} needs {' and '.join(y)}" for x, y in missing.items() if y]
    unchecked += ["shards on several devices need them"] * (len(devices) == 1)
    worst, where, wrong, done = 0.0, "none", 0, 0
    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 16))
    futures = {pool.submit(run, name): name for name in names}
    try:
        for future in as_completed(futures):
            name, (error, of, seconds), done = futures[future], future.result(), done + 1
            worst, where = max((worst, where), (error, f"{of} of {name}"))
            text = f"{error:.2f} of its bound, {of}" if error < math.inf else of
            verdict = "right" if error <= 1 else "not checked" if math.isnan(error) else "WRONG"
            print(f"[{done}/{len(names)}] {verdict} {name}: {text}, {seconds:.0f} s", flush=True)
            if verdict == "WRONG":
                wrong += 1
                print(f"    python -m mlstm_pallas.selfcheck --only={name}", flush=True)
            unchecked += [f"{name} ({of})"] * math.isnan(error)
    except KeyboardInterrupt:
        print("stopped")
        unchecked.append(f"{len(names) - done} calls that had not ended")
        pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in futures):  # those that start meanwhile, too
            for process in RUNNING:
                process.kill()
            time.sleep(0.1)
    print(f"{done} of {len(names)} calls, {wrong} wrong, worst {worst:.2f} of its bound: {where}")
    print("not checked:", "; ".join(unchecked) or "nothing that this program has")
    print(
        f"mlstm_pallas {mlstm_pallas.__version__}, files {package_hash()}, jax {jax.__version__}, "
        f"{len(devices)} {devices[0].device_kind}"
    )
    return 1 if wrong else 2 if done < len(names) else 0


if __name__ == "__main__":
    # Processes share the GPU and the cores, and float64 runs on the CPU, where compiling what it
    # runs takes nearly all of the time.
    os.environ |= dict(XLA_PYTHON_CLIENT_PREALLOCATE="false", OPENBLAS_NUM_THREADS="1")
    os.environ["JAX_TRACEBACK_FILTERING"] = "off"
    if platforms := os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"  # read by processes that it starts
    if jax.default_backend() == "cpu":
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
    sys.exit(main())
