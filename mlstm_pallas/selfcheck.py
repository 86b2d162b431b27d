"""Checks whether this machine computes right: python -m mlstm_pallas.selfcheck.

Each call of a table runs on each lowering that the machine has, in a process of its own. Results
and all gradients are compared with the recurrence in float64, within the bounds of README.md. The
exit code is 1 if a result is wrong or a call fails, and 2 if the program is stopped before its end.
"""

import argparse
import hashlib
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
from jax.sharding import PartitionSpec

import mlstm_pallas
from mlstm_pallas import KernelConfig
from mlstm_pallas.planning.backend import jax_has_mosaic_gpu
from mlstm_pallas.planning.dispatch import HAS_TRITON
from mlstm_pallas.problem.gpu import target_gpu

# What the README promises of outputs and of gradients.
PROMISED = {"bfloat16": (5e-3, 2e-2), "float16": (1e-3, 4e-3), "float32": (1e-5, 1e-4)}
SECONDS = 180  # for a call, with the start of its process and what it compiles
B, NH, S, TOKENS, DRAFTS = 3, 2, 200, 24, 4

# What is called: x is q, k, v, i, f, (B, NH, S, ...), and up to three states. Returns h and states.


def sequence(x: Any, name: str = "mlstm_chunkwise", layout: str = "BNTH", **options: Any) -> Any:
    tokens = [jnp.swapaxes(y, 1, 2) for y in x[:5]] if layout == "BTNH" else x[:5]
    results = getattr(mlstm_pallas, name)(*tokens, *x[5:], layout=layout, **options)
    h, *states = jax.tree.leaves(results)
    if "every" in options:  # those in between come last
        states = [jnp.append(states[j + 3], states[j][:, None], axis=1) for j in range(3)]
    return (jnp.swapaxes(h, 1, 2) if layout == "BTNH" else h), *states


def shards(x: Any, **options: Any) -> Any:
    """Shards on two or four devices, or two shards of a vmap on one device."""
    function = mlstm_pallas.distributed.mlstm_chunkwise_sequence_parallel
    run = partial(function, axis_name="s", layout="BNTH", **options)
    if jax.device_count() == 1:
        split = [jnp.stack(jnp.split(y, 2, axis=2)) for y in x[:5]]
        h, states = jax.vmap(lambda *tokens: run(*tokens, *x[5:]), axis_name="s")(*split)
        return jnp.concatenate([*h], 2), *(y[0] for y in states)
    mesh = jax.sharding.Mesh(jax.devices()[: 4 if jax.device_count() >= 4 else 2], "s")
    specs = PartitionSpec(None, None, "s"), PartitionSpec()
    shard_map: Any = partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=specs)
    h, states = shard_map(lambda x, states: run(*x, *states), check_vma=False)(x[:5], x[5:])
    return h, *states


def steps(x: Any, **options: Any) -> Any:
    def step(states: Any, token: Any) -> Any:
        return mlstm_pallas.mlstm_recurrent_step(*token, *states, **options)[::-1]

    states, h = jax.lax.scan(step, (*x[5:],), [jnp.moveaxis(y, 2, 0) for y in x[:5]])
    return jnp.moveaxis(h, 0, 2), *states


def ring(x: Any, accepted: Any, length: int = 8, **options: Any) -> Any:
    """Calls with drafts, of which accepted, (B, calls), count."""
    options["layout"] = "BNTH"

    def step(carry: Any, call: Any) -> Any:
        (rings, before), (drafts, count) = carry, call
        h, rings = mlstm_pallas.mlstm_ring_step(*drafts, rings, accepted=before, **options)
        return (rings, count), h

    rings = mlstm_pallas.mlstm_ring_states(*x[5:], dtype=x[1].dtype, length=length)
    drafts = [jnp.moveaxis(y.reshape(B, NH, -1, DRAFTS, *y.shape[3:]), 2, 0) for y in x[:5]]
    counts = jnp.asarray(accepted.T)
    (rings, last), h = jax.lax.scan(step, (rings, 0 * counts[0]), (drafts, counts))
    last = last[POOL] if "slots" in options else last
    states = mlstm_pallas.mlstm_ring_flush(rings, accepted=last)
    return jnp.moveaxis(h, 0, 2).reshape(x[2].shape), *states


AT, FIRST = np.arange(S), np.arange(S) < [[90], [1], [64]]  # FIRST: steps of the first document
ACCEPTED = np.add.outer(range(B), range(TOKENS // DRAFTS)).astype("int32") % (DRAFTS + 1)
POOL = np.array([1, 2, 0])  # whose states each row of a pool has, with these slots
LAST, SLOTS = dict(return_last_states=True), dict(slots=np.array([2, 0, -1], "int32"))
LENGTHS = dict(sequence_lengths=np.array([0, 77, S], "int32"))
DOCUMENTS = dict(segment_lengths=np.array([[90, 70], [1, 199], [64, 0]], "int32"))
# What is called, with which heads, and its options.
TABLE: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "train": (sequence, "64x128 256x512 128x128 96x192 16x16 37x50", dict(layout="BTNH")),
    "materialised": (sequence, "256x512 96x192", LAST | dict(config=KernelConfig(fused=False))),
    "fused": (sequence, "256x512 128x128", LAST | dict(config=KernelConfig(fused=True))),
    "splits": (sequence, "256x512", LAST | dict(config=KernelConfig(num_splits=2), chunk_size=64)),
    "stored": (sequence, "128x128", LAST | dict(recompute_states_in_bw=False)),
    "lengths": (sequence, "64x128 37x50", LAST | LENGTHS),
    "reverse": (sequence, "64x128", LAST | LENGTHS | dict(reverse=True)),
    "packed": (sequence, "64x128", LAST | dict(segment_ids=np.int32(~FIRST), layout="BTNH")),
    "documents": (sequence, "128x128", LAST | DOCUMENTS),
    "sigmoid": (sequence, "64x128", LAST | dict(input_gate="sigmoid", normalize=False)),
    "gates": (sequence, "64x128", LAST),
    "shards": (shards, "256x512", LAST),
    "prefill": (sequence, "64x128 256x512", LAST | dict(state_dtype="bfloat16")),
    "blocks": (sequence, "64x128 256x512", LENGTHS | dict(name="mlstm_chunkwise_states", every=64)),
    "steps": (steps, "64x128 256x512 37x50", {}),
    "pools": (steps, "64x128", SLOTS),
    "drafts": (ring, "64x128 256x512 37x50", dict(accepted=ACCEPTED)),
    "rings": (ring, "64x128", SLOTS | dict(accepted=ACCEPTED, length=16)),
}  # fmt: skip
PASSED = dict(train=5, sigmoid=7)  # how many arrays of x; others: 8
OF_TOKENS = "steps", "pools", "drafts", "rings"
FORWARD_ONLY = "prefill", "blocks", "pools", "drafts", "rings"
# The steps of each document that count, (documents, B, steps), by the options that say so.
KEPT: dict[str, Any] = dict(
    sequence_lengths=AT < [[0], [77], [S]],
    segment_ids=np.stack([FIRST, ~FIRST]),
    segment_lengths=np.stack([FIRST, ~FIRST & (AT < [[160], [200], [64]])]),
    every=AT < [[[64]], [[128]], [[192]], [[S]]],  # the states there
    accepted=AT[:TOKENS] % DRAFTS < ACCEPTED.repeat(DRAFTS, 1),
    slots=np.array([[True], [True], [False]]),
)
# The dtypes of each lowering, and rows that it has no program of its own for or takes long for.
LOWERINGS = {
    "mosaic_gpu": ("bfloat16 float16", OF_TOKENS),
    "triton": ("bfloat16 float32 float16", ()),
    "xla": ("float32 bfloat16 float16", ("materialised", "fused", "splits")),
    "interpret": ("float32 bfloat16", {*TABLE} - {"lengths", "shards", "blocks", *OF_TOKENS[:3]}),
}


def calls(backend: str, on_gpu: bool) -> list[str]:
    """The names of the calls of a lowering: lowering/row/heads/dtype."""
    names, (dtypes, skipped) = [], LOWERINGS[backend]
    for row in (x for x in TABLE if x not in skipped):
        first, *others = TABLE[row][1].split() if on_gpu else ["24x40"]
        few = 2 if row in ("train", "steps") and not on_gpu else 1
        number = 3 if others else few  # of dtypes
        names += [f"{backend}/{row}/{first}/{x}" for x in dtypes.split()[:number]]
        if backend != "xla":
            names += [f"{backend}/{row}/{x}/{dtypes.split()[0]}" for x in others]
    return sorted(names, key=lambda name: "256x512" not in name)  # these take the longest


def inputs(row: str, heads: str, dtype: str) -> tuple[list[Any], list[Any]]:
    """x and cotangents of a call; q, k and n are such that nothing cancels in n . q."""
    r, (K, V) = np.random.default_rng(0), map(int, heads.split("x"))
    tokens = B, NH, TOKENS if row in OF_TOKENS else S
    states = (B, 2, NH) if row == "documents" else (B, NH)
    shapes = [(*tokens, K), (*tokens, K), (*tokens, V), tokens, tokens]
    q, k, v, i, f = map(r.standard_normal, shapes)
    c, n, m = map(r.standard_normal, ((*states, K, V), (*states, K), states))
    q, k, n, f = abs(q) + 0.2, abs(k) + 0.2, abs(n) + 0.2, f + 4
    q *= r.choice((-1, 1), (*tokens, 1))
    if row == "gates":  # large, and at the edges of their range
        i = np.where(AT % 11 == 5, -np.inf, 25 + 5 * i)
        f = np.where(AT == 100, -np.inf, np.where(AT % 7 == 3, np.inf, f))
    c_dtype = "bfloat16" if "slots" in TABLE[row][2] else "float32"
    dtypes = [dtype] * 3 + ["float32"] * 2 + [c_dtype] + ["float32"] * 2
    x = [y.astype(jnp.dtype(z)) for y, z in zip((q, k, v, i, f, c, n, m), dtypes, strict=True)]
    dy = [r.standard_normal(x[j].shape).astype(x[j].dtype) for j in (2, 5, 6, 7)]
    passed = PASSED.get(row, 8)
    return x[:passed] + [0 * y for y in x[passed:]], dy[: 1 if row == "train" else 4]


def exact(x: Any, o: dict[str, Any], keep: np.ndarray) -> Any:
    """h and states in the quadratic form, in which step t reads step s with the weight D of
    exp(F_t - F_s + log i_s - m_t). keep: the steps of each document, (documents, B, steps)."""
    (q, k, v, i, f, c, n, m), keep = x, keep[:, :, None]
    sigmoid, reverse, documents = "input_gate" in o, "reverse" in o, "segment_lengths" in o
    v, c = jnp.append(v, jnp.ones_like(v[..., :1]), -1), jnp.append(c, n[..., None], -1)
    if documents:
        c, m = jnp.swapaxes(c, 0, 1), jnp.swapaxes(m, 0, 1)
    elif "segment_ids" in o:  # the second document begins with zeros
        c, m = jnp.stack([c, 0 * c]), jnp.stack([m, 0 * m])
    log_f = jnp.where(keep, jax.nn.log_sigmoid(jnp.maximum(f, -1e4)), 0)
    log_i = jnp.where(keep, jax.nn.log_sigmoid(i) if sigmoid else i, -jnp.inf)
    F, before = jax.lax.cumsum(log_f, axis=3, reverse=reverse), np.tri(f.shape[2], dtype=bool)
    before, last = (before.T, 0) if reverse else (before, -1)
    D = jnp.where(before, F[..., None] - F[..., None, :] + log_i[..., None, :], -jnp.inf)
    first = F + m[..., None]  # of the initial states
    m = 0 * F if sigmoid else jnp.maximum(D.max(-1), first)
    D, first = jnp.exp(D - m[..., None]), jnp.exp(first - m)[..., None]
    sums = q.shape[3] ** -0.5 * ((D * (q @ k.mT)) @ v + first * (q @ c))
    h, size = sums[..., :-1], jnp.maximum(abs(sums[..., -1:]), jnp.exp(-m)[..., None]) + 1e-6
    h = jnp.where(keep[..., None], h / size if o.get("normalize", True) else h, 0)
    c = first[..., last, :, None] * c + (k * D[..., last, :, None]).mT @ v
    states = [c[..., :-1], c[..., -1], m[..., last]]
    if documents or "every" in o:
        return h[-1] if "every" in o else h.sum(0), *(jnp.swapaxes(y, 0, 1) for y in states)
    return h.sum(0), *(y[-1] for y in states)


def check(name: str) -> dict[str, float]:
    """The errors of a call in units of their bounds, by result."""
    backend, row, heads, dtype = name.split("/")
    (call, _, o), (x, dy), norm = TABLE[row], inputs(row, heads, dtype), np.linalg.norm
    pools, of_tokens, passed, T = "slots" in o, row in OF_TOKENS, PASSED.get(row, 8), x[3].shape[2]
    derivatives = row not in FORWARD_ONLY and (backend != "interpret" or row == "lengths")
    if row == "steps":  # their kernels have no derivatives
        derivatives = (backend, dtype) == ("xla", "float32")
    keep: Any = np.ones((1, B, T), bool)
    for option in o.keys() & KEPT.keys():
        keep = keep & KEPT[option]

    def counts(y: Any) -> Any:
        """Which steps of y, (B, NH, steps, ...), count, in any document."""
        return keep.any(0)[:, None, :, None] if y.ndim == 4 else keep.any(0)[:, None]

    def actual(x: Any) -> Any:
        states = [y[POOL] if pools else y for y in x[5:passed]]
        h, *states = call([*x[:5], *states], backend=backend, **o)
        h = jnp.where(counts(h), h, 0) if "accepted" in o else h  # others are of no use
        return h, *(y[np.argsort(POOL)] if pools else y for y in states)

    def results(function: Any, x: Any, dy: Any) -> Any:
        if not derivatives:
            return function(x)
        y, pull = jax.vjp(lambda x: function(x)[: len(dy)], x)
        return *y, *pull(tuple(a.astype(b.dtype) for a, b in zip(dy, y, strict=True)))[0]

    given = [*x]
    for j, y in enumerate(x[:5]):  # nothing reads what is beyond: NaN, or finite q, k and v
        beyond = y.dtype.type(np.nan if of_tokens or y.ndim == 3 else 100)
        given[j] = np.where(counts(y), y, y * beyond)
    program = jit(partial(results, actual))
    found, again = ([np.asarray(y) for y in program(given, dy)] for _ in range(2))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(np.float64, (x, dy))
        desired = jit(partial(results, partial(exact, o=o, keep=keep)))(*wide)
    names = [*"hcnm"[: len(dy)], *(f"d{y}" for y in "qkvifcnm"[:passed])]
    right, errors = dict(zip(names, map(np.asarray, desired), strict=False)), {}
    for label, a, b in zip(names, found, again, strict=False):
        size, bound = norm(right[label]), PROMISED[dtype][label[0] == "d"]
        if label == "m":
            size = norm(np.maximum(abs(right["m"]), 1))
        if label == "dn":  # n is one more column of C
            size = np.hypot(size, norm(right["dc"]))
        if label == "dm":  # a sum whose terms may cancel
            size = max(size, norm(right["dc"]) * norm(wide[0][5]), norm(right["dn"]) * norm(x[6]))
        if label in "hc" and (pools or "state_dtype" in o):  # c is rounded, in pools at every step
            bound += (T if pools else 1) ** 0.5 * 2**-9
        error = float(norm(np.float64(a) - right[label]) / size / bound)
        right_bits = np.array_equal(a, b) and not np.isnan(error)
        if label[-1] in "hqkvif":  # zeros beyond
            right_bits &= not np.any(np.where(counts(a), 0, a))
        errors[label] = error if right_bits else np.inf
    return errors


WORKER = """import sys
from mlstm_pallas.selfcheck import check
print(*max((error, result) for result, error in check(sys.argv[1]).items()))"""
RUNNING: list[subprocess.Popen[str]] = []


def run(name: str) -> tuple[float, str, float]:
    """The worst error of a call in units of its bound, what has it, and seconds. The error is inf
    if there is no result, and NaN if the config does not fit this GPU."""
    start, command = time.monotonic(), [sys.executable, "-c", WORKER, name]
    options: Any = dict(stdout=-1, stderr=-1, text=True, start_new_session=True)
    with subprocess.Popen(command, **options) as process:
        RUNNING.append(process)
        try:
            out, said = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return np.inf, f"no result in {SECONDS} s", SECONDS
    seconds, lines = time.monotonic() - start, ["", *said.strip().splitlines()]
    if process.returncode == 0:
        error, result = out.split()[-2:]
        return float(error.replace("nan", "inf")), result, seconds
    if config := [x for x in lines if x.startswith("ValueError: config.")]:
        return np.nan, config[0], seconds
    return np.inf, f"exit code {process.returncode} {lines[-1]}", seconds


def package_hash() -> str:
    """The first digits of a hash of the package's files."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=Path.as_posix):
        name = path.relative_to(root).as_posix().encode()
        digest.update(b"%s\0%s\0" % (name, path.read_bytes()))
    return digest.hexdigest()[:12]


def main() -> int:
    """The program; returns its exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    gpu, platform, devices = target_gpu(), jax.default_backend(), jax.devices()
    has_gpu = platform == "gpu" and gpu.runs_kernels
    needs = {  # what each lowering needs, and whether this machine has it
        "mosaic_gpu": ("a Hopper GPU and a jax for it", gpu.hopper and jax_has_mosaic_gpu()),
        "triton": ("an NVIDIA GPU from 8.0, Pallas' Triton", has_gpu and HAS_TRITON),
        "xla": ("nothing", True),
        "interpret": ("a CPU, Pallas' Triton", platform == "cpu" and HAS_TRITON),
    }
    unchecked = [f"{x} needs {what}" for x, (what, has) in needs.items() if not has]
    unchecked += ["shards on several devices need them"] * (len(devices) == 1)
    here = [x for x, (_, has) in needs.items() if has]
    parser = argparse.ArgumentParser("mlstm_pallas.selfcheck", description=__doc__)
    parser.add_argument("--backend", choices=here, action="append", help="one lowering alone")
    parser.add_argument("--only", default="", help="the calls with this in their names alone")
    options = parser.parse_args()
    names = [y for x in options.backend or here for y in calls(x, platform == "gpu")]
    names = [name for name in names if options.only in name]
    if not names:
        parser.error(f"argument --only: no call has {options.only} in its name")
    ended, wrong, worst = 0, 0, (0.0, "none")
    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 16))
    futures = {pool.submit(run, name): name for name in names}
    try:
        for future in as_completed(futures):
            name, (error, what, seconds), ended = futures[future], future.result(), ended + 1
            worst = max(worst, (error, f"{what} of {name}"))
            text = f"{error:.2f} of its bound, {what}" if error < np.inf else what
            verdict = "right" if error <= 1 else "not checked" if np.isnan(error) else "WRONG"
            print(f"[{ended}/{len(names)}] {verdict} {name}: {text}, {seconds:.0f} s", flush=True)
            if verdict == "WRONG":
                wrong += 1
                print(f"    python -m mlstm_pallas.selfcheck --only={name}", flush=True)
            elif verdict == "not checked":
                unchecked.append(f"{name} ({what})")
    except KeyboardInterrupt:
        print("stopped")
        unchecked.append(f"{len(names) - ended} calls that had not ended")
        pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in futures):  # those that start meanwhile, too
            for process in RUNNING:
                process.kill()
            time.sleep(0.1)
    error, where = worst
    print(f"{ended} of {len(names)} calls, {wrong} wrong, worst {error:.2f} of its bound: {where}")
    print("not checked:", "; ".join(unchecked) or "nothing that this program has")
    package = f"mlstm_pallas {mlstm_pallas.__version__}, files {package_hash()}"
    print(f"{package}, jax {jax.__version__}, {len(devices)} {devices[0].device_kind}")
    return 1 if wrong else 2 if ended < len(names) else 0


if __name__ == "__main__":
    # Processes share the GPU and the cores; on a CPU compiling takes nearly all of the time.
    os.environ |= dict(XLA_PYTHON_CLIENT_PREALLOCATE="false", OPENBLAS_NUM_THREADS="1")
    os.environ["JAX_TRACEBACK_FILTERING"] = "off"
    if platforms := os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"  # for float64, in the processes
    if jax.default_backend() == "cpu":
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
    sys.exit(main())
