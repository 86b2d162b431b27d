r"""Finds a config that is faster than the plan's rules, for heads and a dtype on the GPU at hand.

It writes rows of mlstm_pallas/tuning/<device>.json, which calls on that GPU read.

    python tools/tune.py --shape=8x8x8192x256x512 --minutes=9
    python tools/tune.py --shape=tfla-8k --backend=mosaic_gpu          # on Hopper
    python tools/tune.py --shape=7b-8k --stage=parallel_fw_H,recurrent_bw_dC --minutes=3

Search. Coordinate descent from the plan: first of whole calls, forward and backward, over chunk
sizes, the fused scan or materialised states, splits and the chunks of the scan; then of every stage
of the best call over the fields of its tiles. A round tries candidates that differ from the best by
one step of one field, then of two. The plan says which are possible.
At last the call with the best of all is timed beside the rules' call. If it takes 3 % less time, a
row is written with only the fields that differ from the rules; otherwise a row of an earlier run is
removed.

Checks. Every candidate is compiled, checked and timed in another process, which is killed if it
takes too long. Candidates of a round are compiled in parallel, in --threads processes, and timed
one by one. One that spills much, or that the compile report refuses, is not run. A time counts
only if the outputs agree with the plain form and have the same bits in three runs.

Every result is a line of --log. A second run with the same code, jax and device takes them from
there instead of timing them, and so continues an unfinished one. Exit code 1 when a case has no
result, 2 when the request makes no sense, 130 after Ctrl-C (what was timed is in the log).
"""

import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import command
import shapes
from absl import flags
from calls import padded
from candidates import Result, start_workers
from command import RequestError, naming
from kernel_benchmark import STAGES, MlstmPallas
from shapes import Shape
from tqdm import tqdm
from worker import NoAnswer, ProcessEnded, Worker

import mlstm_pallas
from mlstm_pallas.planning.backend import requested_backend
from mlstm_pallas.planning.config import KernelConfig, tuning_name
from mlstm_pallas.problem.gpu import target_gpu
from mlstm_pallas.stages.stage import Lowering

MIN_GAIN = 0.03  # of a whole call over the rules' call
MIN_STAGE_GAIN = 0.01  # of a stage: less is noise
ROUND = 8  # candidates
# Per candidate, after which it is killed; the first one of a process with what it is checked
# against.
SECONDS = dict(prepare=120, judge=60)
SCHEDULE_SHARE, SEARCH_SHARE = 0.35, 0.9  # of a case's time, from its start
SCAN = "recurrent_fw_H"  # its siz_b_L is the chunk size of the fused stages
LARGEST = 512  # value of a field that is tried
MOST_WARPS = 8
SCHEDULE = ("chunk_size", "fused", "num_splits")

# What differs from the rules, by "chunk_size" or "triton_parallel_fw_H.num_warps".
Overrides = dict[str, Any]


def keywords(overrides: Overrides) -> dict[str, Any]:
    """The keywords of a config."""
    row: dict[str, Any] = {}
    for name, x in overrides.items():
        *kernels, field = name.split(".")
        (row.setdefault(*kernels, {}) if kernels else row)[field] = x
    return row


@dataclasses.dataclass
class Calls:
    """The calls of a case, as the rules and overrides plan them, whatever rows there are."""

    backend: str
    shape: Shape
    dtype: str

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"

    def implementation(self, overrides: Overrides) -> MlstmPallas:
        gpu = dataclasses.replace(target_gpu(), name="")  # which has no rows
        config = KernelConfig(**keywords(overrides))
        return MlstmPallas(self.backend, self.shape, self.dtype, config=config, gpu=gpu)

    def row(self, overrides: Overrides) -> dict[str, Any]:
        """All keywords of the config of a call; none: it is not possible."""
        with contextlib.suppress(ValueError):
            impl = self.implementation(overrides)
            if impl.spec.problem.S == self.shape.S:
                return impl.config
        return {}

    def fields(self, stage: str, row: dict[str, Any]) -> dict[str, Any]:
        """The fields of a row that are searched for a stage, "" for whole calls, by name."""
        name = stage or SCAN
        kernel = f"{Lowering(self.backend).folder}_{name}"
        schedule = {} if stage else {x: row[x] for x in SCHEDULE if x in row}
        return schedule | {
            f"{kernel}.{field}": x
            for field, x in row.get(kernel, {}).items()
            if name != SCAN or (field == "siz_b_L") == (not stage)
        }

    def needed(self, overrides: Overrides) -> Overrides:
        """The overrides without those that change nothing."""
        for name in list(overrides):
            fewer = {x: y for x, y in overrides.items() if x != name}
            if self.row(fewer) == self.row(overrides):
                overrides = fewer
        return overrides


def steps_of(name: str, x: Any) -> list[Any]:
    """The next values of a field: the other bool, one stage more or fewer, twice or half the size.

    The plan refuses those that are not possible.
    """
    if isinstance(x, bool) or x is None:
        return [not x] * (x is not None)
    steps = (x + 1, x - 1) if name.endswith("num_stages") else (2 * x, x // 2)
    most = MOST_WARPS if name.endswith("num_warps") else LARGEST
    return [y for y in steps if 1 <= y <= most]


class Candidate(NamedTuple):
    """A row to try for a search, in the process of this worker."""

    search: "Search"
    worker: int
    overrides: Overrides
    row: dict[str, Any]
    prune: bool = False


@dataclasses.dataclass
class Search:
    """Coordinate descent of a stage, or of whole calls.

    worker: a stage has its arrays in one process.
    """

    calls: Calls
    stage: str
    start: Overrides
    worker: int = 0

    def __post_init__(self):
        self.results: dict[str, tuple[Result, Overrides]] = {}  # by row

    @property
    def best(self) -> tuple[float | None, Overrides]:
        """The least ms, and the overrides that it is for; the start if nothing has a time."""
        timed = [(x.ms, y) for x, y in self.results.values() if x.ms is not None]
        return min(timed, key=lambda x: x[0], default=(None, self.start))

    def neighbours(self, overrides: Overrides) -> Iterator[Overrides]:
        """With one step of one field, then, of a stage, of two."""
        fields = self.calls.fields(self.stage, self.calls.row(overrides))
        steps = [(name, y) for name, x in fields.items() for y in steps_of(name, x)]
        for count in (1, 2) if self.stage else (1,):
            for changes in itertools.combinations(steps, count):
                if len(dict(changes)) == count:
                    yield overrides | dict(changes)

    def next_round(self) -> list[Candidate]:
        """What to try next; none where no neighbour of the best is left."""
        tries = self.neighbours(self.best[1]) if self.results else [self.start]
        rows: dict[str, tuple[Overrides, dict[str, Any]]] = {}
        for overrides in tries:
            row = self.calls.row(overrides)
            if row and json.dumps(row) not in self.results:
                rows.setdefault(json.dumps(row), (overrides, row))
            if len(rows) == ROUND:
                break
        prune = bool(self.stage and self.results)
        return [
            Candidate(self, self.worker if self.stage else n, *x, prune)
            for n, x in enumerate(rows.values())
        ]


# ---------------------------------------------------------------- results of earlier runs


def source_hash() -> str:
    """A hash of the package's code: a result counts for the code that it was measured with."""
    files = sorted(Path(mlstm_pallas.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


class Log:
    """Results by candidate, and the JSONL file to which they are appended.

    context: of the results that count.
    """

    def __init__(self, path: str, context: dict[str, str]):
        self.path, self.context = path, context
        self.known: dict[str, Result] = {}
        with open(path, "a+b") as file:
            file.seek(0)
            whole = b"".join(line for line in file if line.endswith(b"\n"))
            file.truncate(len(whole))  # the last write was interrupted
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                *candidate, result = json.loads(line)
                self.known[json.dumps(candidate)] = Result(**result)
            except (TypeError, ValueError):
                raise ValueError(f"{path}, line {number} is no result of this program") from None

    def get(self, *candidate: Any) -> Result | None:
        return self.known.get(json.dumps([self.context, *candidate]))

    def put(self, result: Result, *candidate: Any) -> None:
        line = [self.context, *candidate]
        with open(self.path, "a") as file:
            print(json.dumps([*line, dataclasses.asdict(result)]), file=file, flush=True)
        self.known[json.dumps(line)] = result


# ---------------------------------------------------------------- a case


@dataclasses.dataclass
class Tuner:
    """The searches of one case."""

    calls: Calls
    workers: Sequence[Worker]
    log: Log
    bar: tqdm

    def _ask(self, what: str, x: Candidate, *args: Any) -> Result | None:
        case = self.calls.shape, self.calls.dtype, x.search.stage, x.row
        worker = self.workers[x.worker % len(self.workers)]
        try:
            return worker(what, *case, *args, seconds=SECONDS[what])
        except ProcessEnded as error:
            status = "hangs" if isinstance(error, NoAnswer) else "failed"
            return Result(status, note=f"{what}: {error}")

    def _judge(self, x: Candidate) -> Result:
        while not (result := self._ask("judge", x)):
            # Its process was killed with another candidate.
            if result := self._ask("prepare", x, False):
                break
        return result

    def evaluate(
        self, tries: Sequence[Candidate], deadline: float = float("inf"), *, resume: bool = True
    ) -> list[Result | None]:
        """Results of candidates, from the log or measured; None: the time was up."""
        keys = [(str(self.calls), x.search.stage, x.row) for x in tries]
        results = [self.log.get(*key) if resume else None for key in keys]
        ready: dict[int, Result | None] = {}
        count = len(self.workers)

        def prepare(worker: int) -> None:
            for n, x in enumerate(tries):
                if x.worker % count == worker and not results[n] and time.monotonic() <= deadline:
                    ready[n] = self._ask("prepare", x, x.prune)

        # Nothing is timed while others compile. After Ctrl-C the threads end with their workers.
        list(ThreadPoolExecutor(count).map(prepare, range(count)))
        for n, refused in sorted(ready.items()):
            results[n] = result = refused or self._judge(tries[n])
            self.log.put(result, *keys[n])
            self.bar.update()
        return results

    def descend(self, searches: Sequence[Search], until: float) -> None:
        """Rounds of all searches, until no neighbour is left or the time is up."""
        while time.monotonic() <= until:
            if not (tries := [x for search in searches for x in search.next_round()]):
                return
            stages = dict.fromkeys(x.search.stage or "calls" for x in tries)
            self.bar.set_postfix_str(f"{self.calls} {', '.join(stages)}", refresh=False)
            for x, result in zip(tries, self.evaluate(tries, until), strict=True):
                if result is not None:
                    x.search.results[json.dumps(x.row)] = result, x.overrides

    def tune(self, stages: Sequence[str], seconds: float) -> tuple[Overrides, float, float]:
        """The best overrides, their ms, and the ms of the rules.

        Raises:
          RuntimeError: the call of the rules has no time.
        """
        start, schedule = time.monotonic(), Search(self.calls, "", {})
        if not stages:
            self.descend([schedule], start + SCHEDULE_SHARE * seconds)
        _, tuned = schedule.best
        calls = [{}, tuned]
        names = [x for x in stages or STAGES if self.calls.fields(x, self.calls.row(tuned))]
        searches = [Search(self.calls, x, tuned, n) for n, x in enumerate(names)]
        self.descend(searches, start + SEARCH_SHARE * seconds)
        for search in filter(lambda x: x.results, searches):
            before, (after, best) = next(iter(search.results.values()))[0].ms, search.best
            if after and (before is None or after < (1 - MIN_STAGE_GAIN) * before):
                tuned = tuned | best
            tried = f"{len(search.results)} tried, {before} ms, best {after}"
            tqdm.write(f"{self.calls} {search.stage}: {tried} with {keywords(best)}")
        calls = [x for n, x in enumerate([*calls, tuned]) if x not in [*calls, tuned][:n]]
        tries = [Candidate(schedule, n, x, self.calls.row(x)) for n, x in enumerate(calls)]
        results = self.evaluate(tries, resume=False)
        if results[0].ms is None:
            raise RuntimeError(f"the call of the rules has no time: {results[0]}")
        ms, fastest = min((x.ms, n) for n, x in enumerate(results) if x.ms is not None)
        return self.calls.needed(calls[fastest]), ms, results[0].ms


# ---------------------------------------------------------------- tuning files


def row_key(row: dict[str, Any]) -> tuple[str, str, int, int]:
    return row["lowering"], row["dtype"], row["DHQK"], row["DHV"]


def read_tuning(path: str, device_kind: str) -> list[dict[str, Any]]:
    """The rows of a tuning file; none if there is no file."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        try:
            content = json.load(file)
            device, rows = content["device"], content["rows"]
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path} is no tuning file") from None
    if device != device_kind:
        raise ValueError(f"{path} is of {device}, this is {device_kind}")
    return rows


def write_tuning(path: str, device_kind: str, rows: Sequence[dict[str, Any]]) -> None:
    """One line per row; the file is replaced atomically."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in sorted(rows, key=row_key))
    with open(f"{path}.part", "w") as file:
        file.write(f'{{\n  "device": {json.dumps(device_kind)},\n  "rows": [\n{lines}\n  ]\n}}\n')
    os.replace(f"{path}.part", path)


def tuned_rows(
    rows: Sequence[dict[str, Any]], calls: Calls, result: tuple[Overrides, float, float]
) -> list[dict[str, Any]]:
    """The rows with the case's own, if it gains enough, in place of an earlier one."""
    overrides, ms, rules_ms = result
    gain, config = 1 - ms / rules_ms, keywords(overrides)
    measured = dict(
        shape=str(calls.shape),
        fwbw_ms=round(ms, 4),
        rules_fwbw_ms=round(rules_ms, 4),
        jax=jax.__version__,
        date=datetime.date.today().isoformat(),
    )
    row = dict(
        DHQK=calls.shape.DHQK,
        DHV=calls.shape.DHV,
        dtype=calls.dtype,
        lowering=Lowering(calls.backend).folder,
        config=config,
        measured=measured,
    )
    verdict = f"row {config}" if gain >= MIN_GAIN else "no row: the rules are as good"
    best = f"best {ms:.3f} ({100 * gain:.1f} % less)"
    tqdm.write(f"{calls}: rules {rules_ms:.3f} ms, {best}: {verdict}")
    others = [x for x in rows if row_key(x) != row_key(row)]
    return [*others, row] if gain >= MIN_GAIN else others


# ---------------------------------------------------------------- the command


def define_flags(define: command.Define) -> None:
    output = "Tuning file; none: the device's in mlstm_pallas/tuning."
    backends = ["triton", "mosaic_gpu", "interpret", "mosaic_gpu_interpret"]
    backend = "The kernels to tune. Interpreted ones are a dry run without a GPU, with --output."
    threads = "Processes that compile, each with the memory of a call on the GPU."
    define.names("stage", [], STAGES, "search only these, in the rules' chunks; none: all.")
    define.float("minutes", 9.0, "Time for all cases together.", lower_bound=0.0)
    define.string("log", "tune.jsonl", "Results of all candidates; they are not timed again.")
    define.string("output", None, output)
    define.enum("backend", "triton", backends, backend)
    define.integer("threads", min(os.cpu_count() or 1, 8), threads, lower_bound=1)
    define.shared("dtype", shape="heads", repeats=5)


def parse_request(options: flags.FlagValues) -> tuple[list[Calls], str]:
    """The cases and the tuning file."""
    device, lowering = jax.devices()[0], Lowering(options.backend)
    folder = Path(mlstm_pallas.__file__).parent / "tuning"
    if not lowering.interpret and device.platform != "gpu":
        dry_run = "--backend=interpret --output=FILE is a dry run"
        raise RequestError(f"--backend={options.backend} needs a GPU; {dry_run}")
    if lowering.interpret and not options.output:
        times = "times of interpreted kernels do not belong in mlstm_pallas/tuning"
        raise RequestError(f"--backend={options.backend}: {times}: give another --output")
    with naming("backend"):
        requested_backend(options.backend)
    cases = []
    for name, shape in shapes.named(options.shape).items():
        cases += [Calls(options.backend, shape, dtype) for dtype in options.dtype]
        with naming("shape"):
            if sizes := padded(cases[-1].implementation({}).spec, shape):
                raise ValueError(f"{name} is padded when it runs: tune {sizes}")
    output = options.output or str(folder / f"{tuning_name(device.device_kind)}.json")
    with naming("output"):
        os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
    return cases, output


def run(options: flags.FlagValues) -> int:
    """Tunes; returns the exit code."""
    device = jax.devices()[0].device_kind
    cases, output = parse_request(options)
    context = dict(device=device, jax=jax.__version__, source=source_hash())
    with naming("log"):
        log = Log(options.log, context | dict(backend=options.backend))
    with naming("output"):
        rows = read_tuning(output, device)
    workers = start_workers(options.threads, options.backend, options.repeats)
    end, code = time.monotonic() + 60 * options.minutes, 0
    with contextlib.closing(tqdm(unit=" candidates", leave=False)) as bar:
        try:
            for n, calls in enumerate(cases):
                tuner = Tuner(calls, workers, log, bar)
                seconds = (end - time.monotonic()) / (len(cases) - n)
                try:
                    result = tuner.tune(options.stage, seconds)
                except RuntimeError as error:
                    tqdm.write(f"tune: {calls}: {error}", file=sys.stderr)
                    code = 1
                    continue
                rows = tuned_rows(rows, calls, result)
                if rows or os.path.exists(output):
                    write_tuning(output, device, rows)
        except KeyboardInterrupt:
            print(f"interrupted; what was timed is in {options.log}", file=sys.stderr)
            code = 130
        finally:
            for worker in workers:
                worker.close()
    print(f"{output}: {len(rows)} rows")
    return code


if __name__ == "__main__":
    # The plain forms are for checks alone: XLA need not look for their fastest products.
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    # The workers share the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    command.main(define_flags, run)
