"""Checks whether this machine computes right: python -m mlstm_pallas.selfcheck.

It compares random calls, forward and all gradients, with the recurrence in float64, on each
lowering that the machine has. If a result is off by more than the README promises, the exit code is
1, and a line of Python repeats the call.
"""

import argparse
import functools
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import mlstm_pallas
from mlstm_pallas.planning.backend import jax_has_mosaic_gpu
from mlstm_pallas.planning.dispatch import HAS_TRITON
from mlstm_pallas.problem.gpu import target_gpu

# What the README promises of outputs and of gradients.
PROMISED = {"bfloat16": (5e-3, 2e-2), "float16": (1e-3, 4e-3), "float32": (1e-5, 1e-4)}
SMALLEST = 1e-24  # float32 products in a smaller result are subnormal, and a device may drop them
SECONDS = 120  # per call, with the start of its process
LINE = "from mlstm_pallas.selfcheck import check; check({})"
GRADIENTS = ["dq", "dk", "dv", "di", "df", "dc_initial", "dn_initial", "dm_initial"]

HEADS = 64, 8, 24, 37, 48, 96, 128, 160, 192, 250, 256, 320, 512
LAST = dict(return_last_states=True)
# A call has one of the values of each row by chance; an edge case has the first ones.
TABLE = dict(
    tokens=[False] * 9 + [True],
    B=[1, 1, 2],
    NH=[2, 1, 3],
    S=[256, 40, 47, 128, 200, 333, 640, 777, 1024],
    DHQK=HEADS,
    DHV=HEADS,
    dtype=["bfloat16", "bfloat16", "float16", "float32"],
    layout=["BNTH", "BTNH"],
    forget=[4, 0, 10, 40],
    masked=[False, False, True],
    initial=[True, True, False],
    lengths=[False, False, True],
    segments=[False, True],
    gate=[
        *({}, {}, dict(eps=0.1), dict(stabilize_correctly=False), dict(input_gate="sigmoid")),
        dict(input_gate="sigmoid", normalize=False),
    ],
    kind=[LAST, {}, LAST | dict(reverse=True), LAST | dict(num_segments=3)],
    config=[{}, {}, dict(fused=True), dict(fused=False), dict(num_splits=2)],
    chunk_size=[None, None, 64, 128, 256, 512, 1024],
    recompute_states_in_bw=[True, False],
)
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


def draw(seed, number, backends):
    """The arguments of ``check`` for one call of a run, the same ones on every machine."""
    r = random.Random(f"{seed} {number}")
    call = {name: r.choice(x) for name, x in TABLE.items()}
    if "interpret" in backends[-1]:
        call |= {name: min(call[name], 100) for name in ("S", "DHQK", "DHV")}
    if number < len(EDGES) and "mosaic_gpu" in backends[0]:
        call = {name: x[0] for name, x in TABLE.items()} | EDGES[number]
        backends = backends[:1]
    # The recurrence in float64 keeps all states.
    call["S"] = min(call["S"], 3 * 10**7 // (call["DHQK"] * call["DHV"]))
    return call | dict(backend=r.choice(backends), seed=r.getrandbits(32))


def check(
    seed, backend, tokens, B, NH, S, DHQK, DHV, dtype, layout, forget, masked, initial, lengths,
    segments, gate, kind, config, **chunkwise,
):  # fmt: skip
    """Prints the error and the bound of each result of a call, by name."""
    r, rows = np.random.default_rng(seed), np.arange(B)
    options = gate | dict(layout=layout, backend=backend)
    if tokens:
        function, S, kind = mlstm_pallas.mlstm_recurrent_sequence, 1 + S % 8, {}
        if initial and segments:  # the states are pools
            options["slots"] = rows = r.permutation(B)
        segments = False
    else:
        function = mlstm_pallas.mlstm_chunkwise
        options |= kind | chunkwise | dict(config=mlstm_pallas.KernelConfig(**config))
    sizes = [S, DHQK], [S, DHQK], [S, DHV], [S], [S], [DHQK, DHV], [DHQK], []
    q, k, v, i, f, c, n, m = (r.standard_normal((B, NH, *size)) for size in sizes)
    q, k, n = (abs(y) + 0.2 for y in (q, k, n))  # n . q does not cancel
    q *= r.choice((-1, 1), (B, NH, S, 1))
    f += forget
    if masked:
        for y, value in (f, -np.inf), (f, np.inf if forget > 4 else -30), (i, -30), (i, -np.inf):
            y[r.random(y.shape) < 0.1] = value
    states = (c, n, m)[: 3 - ("input_gate" in gate)] if initial else ()
    x = [*(y.astype(jnp.dtype(dtype)) for y in (q, k, v)), *map(np.float32, (i, f, *states))]
    ends = r.choice([0, S // 3, S - 1, S], B) if lengths else np.full(B, S)
    within = np.arange(S) < ends[:, None, None]
    ids = np.sort(r.integers(0, 3, (B, S)) * (np.arange(S) > 0))  # the first segment has states
    if lengths:
        options["sequence_lengths"] = ends
    after = rows
    if "num_segments" in kind:
        segments, after = True, (rows, ids[rows, np.maximum(ends - 1, 0)])
    if segments:
        options["segment_ids"] = ids
    step, axis = -1 if "reverse" in kind else 1, 1 + (layout == "BTNH")

    def call(*x):
        arrays = (y.swapaxes(1, axis) for y in x[:5])
        h, *states = jax.tree.leaves(function(*arrays, *x[5:], **options))
        return h.swapaxes(1, axis), *(y[after] for y in states)

    def exact(q, k, v, i, f, *states):
        ordered = q, k, v, jnp.where(within, i, -jnp.inf), jnp.where(within, f, jnp.inf)
        # No segment starts beyond a length.
        steps = np.maximum.accumulate(np.where(within[:, 0], ids * segments, 0), 1)
        h, states = mlstm_pallas.reference.recurrence(
            *(y[:, :, ::step] for y in ordered), *states,
            segment_ids=steps[:, ::step], layout="BNTH", **gate,
        )  # fmt: skip
        return (jnp.where(within[..., None], h[:, :, ::step], 0), *states)[: len(dy)]

    @functools.partial(jax.jit, static_argnums=0)
    def results(function, x, dy):
        y, pull = jax.vjp(function, *x)
        return *y, *pull(dy)

    dy = tuple(r.standard_normal(y.shape).astype(y.dtype) for y in jax.eval_shape(call, *x))
    # A call of tokens has no derivatives.
    actual = jax.jit(call)(*x) if tokens else results(call, x, dy)
    entries = *x[:5], *(y[rows] for y in x[5:])
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        desired = [np.float64(y) for y in results(exact, *jax.tree.map(np.float64, (entries, dy)))]
    errors, norm = {}, np.linalg.norm
    names = [*"hcnm"[: len(dy)], *GRADIENTS]
    for name, a, b in zip(names, map(np.float64, actual), desired, strict=False):
        size = norm(np.maximum(abs(b), 1) if name == "m" else b)
        if name == "dn_initial":  # n is one more column of C, and dh . h may cancel
            size = norm((size, norm(desired[names.index(name) - 1])))
        if name == "dm_initial":  # a sum whose terms may cancel
            size = max(size, norm(desired[-3] * c) + norm(desired[-2]) * norm(n))
        error = norm(a - b) / max(size, SMALLEST)
        beyond = name in "h dq dk dv di df" and ~(within if a.ndim == 3 else within[..., None])
        if np.isnan(error) or np.any(a * beyond):
            error = np.inf
        errors[name] = error, PROMISED[dtype][name in GRADIENTS]
    print(json.dumps(errors))


def run(call):
    """The line that repeats a call, and the errors that it prints in a process of its own."""
    line = LINE.format(", ".join(f"{name}={x!r}" for name, x in call.items()))
    command = [sys.executable, "-c", line]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return line, {f"no result in {SECONDS} s": (np.inf, 1)}
    if done.returncode == 0:
        return line, json.loads(done.stdout.splitlines()[-1])
    text = [f"exit code {done.returncode}", *done.stderr.strip().splitlines()][-1]
    # Tiles that a config asks for may not fit this GPU.
    return line, {} if text.startswith("ValueError: config.") else {text: (np.inf, 1)}


def package_hash():
    """The first digits of a hash of the package's files."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=Path.as_posix):
        name = path.relative_to(root).as_posix().encode()
        digest.update(b"%s\0%s\0" % (name, path.read_bytes()))
    return digest.hexdigest()[:12]


def main():
    """The program; returns its exit code."""
    device, gpu, driver = jax.devices()[0].device_kind, jax.default_backend() == "gpu", "none"
    mosaic_gpu = jax_has_mosaic_gpu() and (target_gpu().hopper or not gpu)
    backends = ["xla"] + ["interpret"] * HAS_TRITON + ["mosaic_gpu_interpret"] * mosaic_gpu
    if gpu:
        driver = subprocess.getoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader")
        backends = 6 * (["mosaic_gpu"] * mosaic_gpu + ["triton"] * HAS_TRITON) + ["xla"]
    parser = argparse.ArgumentParser("mlstm_pallas.selfcheck", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5 if gpu else 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 16))
    parser.add_argument("--backend", choices=sorted({*backends}))
    options = parser.parse_args()
    if options.backend:
        backends = [options.backend]
    numbers, start, checked = itertools.count(), time.monotonic(), []

    def work():
        while time.monotonic() < start + 60 * options.minutes:
            call = draw(options.seed, next(numbers), backends)
            line, errors = run(call)
            worst, name = max(((x / y, name) for name, (x, y) in errors.items()), default=(0, "-"))
            checked.append((call["backend"], worst, name))
            seconds = time.monotonic() - start
            bar = "#" * min(int(seconds / options.minutes / 3), 20)
            print(f"[{bar:20}] {seconds:.0f} s, {len(checked)} calls", end="\r", file=sys.stderr)
            if worst > 1:
                error, bound = errors[name]
                print(f"\n{line}\n# {name}: error {error:.1e}, bound {bound}", flush=True)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(options.processes)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except KeyboardInterrupt:
        print("interrupted")
    versions = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, driver {driver}"
    files = f"mlstm_pallas {mlstm_pallas.__version__}, files {package_hash()}"
    print(f"\n{device}, {versions}, {files}, seed {options.seed}\n")
    print("| lowering | calls | failed | worst error / bound | of |\n|---|---|---|---|---|")
    for backend in dict.fromkeys(backends):
        results = [result for lowering, *result in checked if lowering == backend]
        worst, name = max(results, default=(0, "-"))
        failed = sum(x > 1 for x, _ in results)
        print(f"| {backend} | {len(results)} | {failed} | {worst:.2f} | {name} |")
    return int(any(worst > 1 for _, worst, _ in checked))


if __name__ == "__main__":
    # Processes share the GPU; the warpgroups of interpreted kernels are threads.
    os.environ |= dict(XLA_PYTHON_CLIENT_ALLOCATOR="platform", JAX_NUM_CPU_DEVICES="8")
    if platforms := os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"  # for float64
    sys.exit(main())
