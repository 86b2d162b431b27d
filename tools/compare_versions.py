r"""Times two versions of mlstm_pallas in turns on one GPU: that of another folder, and this one.

    git worktree add ../before HEAD~1
    python tools/compare_versions.py --before=../before
    python tools/compare_versions.py --before=../before --shape=7b-8k,few-2k --direction=fwbw \
        --backend=mosaic_gpu --variant=plain,BTNH,lengths --at_most=1.01

Each version runs in a process of its own. Both compile all calls first, side by side. Then for each
call a batch of one version follows a batch of the other, first the one and then the other in front.
A line has the median times of both, the median of the ratios of neighbouring batches (now / before)
with its quartiles, and the largest relative norm by which an output or gradient differs in the
first and the last head of the first sequence; 0 where no number does.

A call of less than some 0.1 ms takes what the host needs for its launches, so its ratio differs
from run to run.

Exit code 1 if a call fails in this version or takes more than --at_most times as long.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import command
import shapes
from worker import ProcessEnded, Worker

ROOT = Path(__file__).resolve().parents[1]
BATCH_SECONDS, MAX_CALLS = 0.05, 200
COMPILE_SECONDS, CALL_SECONDS = 1800, 300
DOCUMENT = 1000  # steps of a packed document
SEGMENTS = 8
VARIANTS = "plain", "BTNH", "lengths", "packed", "segments"
BACKENDS = "triton", "mosaic_gpu", "xla", "interpret"
VARIABLES = dict(XLA_PYTHON_CLIENT_PREALLOCATE="false")  # two processes share the GPU


class Case(NamedTuple):
    """One call."""

    name: str
    shape: shapes.Shape
    backend: str
    direction: str
    variant: str
    dtype: str

    def __str__(self):
        return " ".join((self.name, self.backend, self.direction, self.variant, self.dtype))


# ---------------------------------------------------------------- in the process of a version


def package_of(folder):
    """mlstm_pallas of a folder, or ImportError if this process has another one."""
    if folder not in sys.path[:1]:
        sys.path.insert(0, folder)
    import mlstm_pallas

    if Path(mlstm_pallas.__file__).parents[1] != Path(folder):
        raise ImportError(f"{mlstm_pallas.__file__} is not of {folder}")
    return mlstm_pallas


def function_and_inputs(folder, case):
    """The function of arrays that a call is, and one that makes the arrays."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    package = package_of(folder)
    B, NH, S, DHQK, DHV = case.shape
    options, batch, steps = dict(backend=case.backend), (B, NH, S), np.arange(S)
    if case.variant == "BTNH":
        options |= dict(layout="BTNH")
        batch = B, S, NH
    elif case.variant == "lengths":
        drawn = np.random.default_rng(0).integers(0, S + 1, B)
        options |= dict(sequence_lengths=drawn.astype("int32"))
    elif case.variant == "packed":
        ids = (steps // DOCUMENT).astype("int32")
        options |= dict(segment_ids=np.broadcast_to(ids, (B, S)))
    elif case.variant == "segments":
        lengths = np.full((B, SEGMENTS), S // SEGMENTS, "int32")
        options |= dict(segment_lengths=lengths, return_last_states=True)

    forward = functools.partial(package.mlstm_chunkwise, **options)

    def both(*x):
        outputs, backward = jax.vjp(forward, *x)
        return outputs, backward(jax.tree.map(jnp.cos, outputs))

    def inputs():
        keys = jax.random.split(jax.random.key(0), 5)
        widths = (DHQK,), (DHQK,), (DHV,), (), ()
        dtypes = *[case.dtype] * 3, "float32", "float32"
        made = [
            jax.random.normal(key, (*batch, *width), dtype)
            for key, width, dtype in zip(keys, widths, dtypes, strict=True)
        ]
        return [*made[:4], made[4] + 4.0]  # forget gates near 4

    return both if case.direction == "fwbw" else forward, inputs


class Version:
    """The calls of one version, in its process."""

    def __init__(self, folder):
        self.folder, self.programs, self.inputs, self.counts = folder, {}, None, {}

    def compile(self, cases, threads):
        """Compiles all calls, while the next ones are traced; returns the failures by case."""
        import jax

        compiled, failures = {}, {}
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for case in cases:
                try:
                    function, inputs = function_and_inputs(self.folder, case)
                    lowered = jax.jit(function).lower(*jax.eval_shape(inputs))
                except Exception as error:
                    failures[case] = command.one_line(error)
                else:
                    compiled[case] = pool.submit(lowered.compile)
            for case, program in compiled.items():
                try:
                    self.programs[case] = program.result()
                except Exception as error:
                    failures[case] = command.one_line(error)
        return failures

    def prepare(self, case):
        """Runs a call; returns the outputs of the two heads that are compared, in float32.

        It is compiled anew if the process was ended by a call before.
        """
        import jax
        import numpy as np

        self.inputs = None  # before the next ones need memory
        if case not in self.programs and (failed := self.compile([case], 1)):
            raise RuntimeError(failed[case])
        _, inputs = function_and_inputs(self.folder, case)
        self.inputs = jax.block_until_ready(inputs())
        outputs = jax.tree.leaves(self.programs[case](*self.inputs))
        two, axis = np.array([0, -1]), 2 if case.variant == "BTNH" else 1
        parts = [np.asarray(x[0].take(two, axis - 1), "float32") for x in outputs]
        seconds = min(self.batch(case, 1) for _ in range(2))
        self.counts[case] = min(max(round(BATCH_SECONDS / seconds), 1), MAX_CALLS)
        return parts

    def batch(self, case, count=None):
        """Seconds per call in a batch."""
        import jax

        count = count or self.counts[case]
        start = time.perf_counter()
        for _ in range(count):
            outputs = self.programs[case](*self.inputs)
        jax.block_until_ready(outputs)
        return (time.perf_counter() - start) / count


_versions = {}  # that of this process


def ask(folder, method, *arguments):
    if folder not in _versions:
        _versions[folder] = Version(folder)
    return getattr(_versions[folder], method)(*arguments)


# ---------------------------------------------------------------- in the process of the tool


def difference(before, now):
    """The largest relative norm of a difference; inf where shapes, NaN or infinities differ."""
    import numpy as np

    if [x.shape for x in before] != [x.shape for x in now]:
        return math.inf
    largest = 0.0
    for x, y in zip(before, now, strict=True):
        finite = np.isfinite(x)
        if not np.array_equal(*(np.where(np.isfinite(z), 0, z) for z in (x, y)), equal_nan=True):
            return math.inf
        x, y = x[finite], y[finite]
        largest = max(largest, float(np.linalg.norm(y - x) / max(np.linalg.norm(x), 1e-30)))
    return largest


def compile_all(versions, cases, threads):
    """Compiles all calls in both versions, side by side; returns the failures of each by case."""
    print(f"compiling {len(cases)} calls in both versions", file=sys.stderr, flush=True)
    with concurrent.futures.ThreadPoolExecutor(len(versions)) as pool:
        begun = [
            pool.submit(x, "compile", cases, threads, seconds=COMPILE_SECONDS) for x in versions
        ]
        try:
            return [x.result() for x in begun]
        except ProcessEnded as error:
            raise command.RequestError(str(error)) from None


def row_of(case, versions, failures, repeats):
    """What the two versions take for one call, and what their results differ by."""
    failed_before, fails = failures
    if case in fails:
        return dict(note=f"fails now: {fails[case]}")
    if case in failed_before:
        return dict(note=f"failed before: {failed_before[case]}")
    try:
        parts = [x("prepare", case, seconds=CALL_SECONDS) for x in versions]
        times = [], []
        for turn in range(repeats):
            order = list(zip(versions, times, strict=True))
            for version, seconds in order if turn % 2 == 0 else order[::-1]:
                seconds.append(version("batch", case, seconds=CALL_SECONDS))
    except ProcessEnded as error:
        return dict(note=f"fails: {error}")
    ratios = [now / before for before, now in zip(*times, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    before, now = (1e3 * statistics.median(x) for x in times)
    found = difference(*parts)
    return dict(before_ms=before, ms=now, ratio=middle, low=low, high=high, difference=found)


def line(case, row):
    if "note" in row:
        return f"{case!s:44} {row['note']}"
    times = f"{row['before_ms']:9.4f} {row['ms']:9.4f} ms  {row['ratio']:.3f}"
    return f"{case!s:44} {times} ({row['low']:.3f} to {row['high']:.3f})  {row['difference']:.1e}"


def folder_of_a_version(text):
    folder = Path(text).resolve()
    if not (folder / "mlstm_pallas" / "__init__.py").is_file():
        raise ValueError(f"there is no {folder / 'mlstm_pallas'}")
    return str(folder)


def define_flags(define):
    define.parsed("before", folder_of_a_version, "The folder that has the other mlstm_pallas.")
    names = ["7b-8k", "tfla-8k", "small-8k", "b1-8k", "few-2k", "x125m-2k", "vil-t"]
    define.shared("dtype", "jsonl", shape=names, direction=["fwd", "fwbw"], repeats=20)
    define.names("backend", ["triton", "mosaic_gpu"], BACKENDS, "the lowerings.")
    define.names("variant", ["plain"], VARIANTS, "other layouts and masks.")
    define.float("at_most", None, "The largest ratio that is no failure.", lower_bound=0.0)
    define.integer("threads", 8, "Compilations at a time in each version.", lower_bound=1)


def run(args):
    if args.before is None:
        raise command.RequestError("--before is missing, expected a folder with mlstm_pallas")
    if args.repeats < 2:
        raise command.RequestError(f"--repeats={args.repeats}, expected 2 or more")
    named = shapes.named(args.shape).items()
    chosen = itertools.product(named, args.backend, args.direction, args.variant, args.dtype)
    cases = [Case(*shape, *rest) for shape, *rest in chosen]
    with contextlib.ExitStack() as ends:
        out = ends.enter_context(command.open_alone("jsonl", args.jsonl)) if args.jsonl else None
        versions = []
        for folder in (args.before, str(ROOT)):
            versions.append(Worker(functools.partial(ask, folder), VARIABLES))
            ends.callback(versions[-1].close)
        failures = compile_all(versions, cases, args.threads)
        code = 0
        for case in cases:
            row = row_of(case, versions, failures, args.repeats)
            print(line(case, row), flush=True)
            if out:
                fields = case._asdict() | dict(commit=command.git_commit()) | row
                print(json.dumps(fields), file=out, flush=True)
            slower = args.at_most is not None and row.get("ratio", 0.0) > args.at_most
            code |= slower or row.get("note", "").startswith("fails")
        return int(code)


if __name__ == "__main__":
    command.main(define_flags, run)
