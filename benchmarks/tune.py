r"""Finds tiles and launch parameters for shapes and dtypes on the GPU at hand.

It writes them into mlstm_pallas/tuning/<device>.json.

    python benchmarks/tune.py --minutes=9                           # the seven head sizes, bfloat16
    python benchmarks/tune.py --shape=tfla-8k --dtype=float32 --minutes=5
    python benchmarks/tune.py --shape=7b-8k --stage=parallel_fw_H,recurrent_bw_dC --minutes=3
    python benchmarks/tune.py --backend=mosaic_gpu --minutes=3      # Mosaic GPU kernels, on Hopper

Search. Each stage at each chunk size is searched by itself: coordinate descent from the present row
and the heuristic over the fields that its kernel lets the tuner search. A round takes up to 16
candidates that differ from the best by one step of one field, then of two fields. The next round
goes to the stage and chunk size with most time to gain: long stages with few rounds so far, at
chunk sizes with a small sum over stages; a chunk size with a far larger sum is dropped. Tiles are
clamped to the problem, and equal tiles are tried once. The stages of the fused scan have chunk
sizes of their own.

Whole calls. They get the last third of a case's time, forward and backward: the best stages of each
chunk size with materialised states and with the fused scan, beside the heuristic and the present
row, in one run. Heads without a row start from that of the smallest larger heads, as a call of them
would. A row is written when its call is at least 3 % faster than the heuristic's; a present row
that is not is removed.

Checks. Candidates of a round are compiled in parallel, first by the compile report (in a process
per thread, as LLVM aborts on some). Those that take more shared memory than there is, or spill more
than --max_spill_bytes, never run. The others are timed one by one. A time counts only if the
outputs are those of the plain form in float32 and have the same bits in three runs: in a pipelined
loop Triton miscompiles some tilings, differently in every run. Whole calls are checked as in
kernel_benchmark.py.

Mosaic GPU. With --backend=mosaic_gpu the tiles of the stages' Mosaic GPU kernels are searched, in
the chunks that the present row has for them; its Triton tiles stay. Each stage has a process
(worker.py), which is killed when a candidate does not end. The log of ptxas decides whether a
candidate runs: it has the spills, and the products that wait for each other. A stage's tiles are
written when it is at least 3 % faster than with those of its heuristic; a present entry that is not
is removed.

Every result is a line of --log. A second run with the same code, jax and device takes stages from
there instead of timing them, and so continues an unfinished one. Exit code 1 when a case has no
result, 2 when the request makes no sense, 130 after Ctrl-C (what was timed is in the log).
"""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

import command
import jax
import jax.numpy as jnp
import kernel_benchmark
from absl import flags
from candidates import Bench, DeviceLost, IsolatedBench, Result, pruner_for, stage_workers
from command import RequestError, check_names
from kernel_benchmark import STAGES, parse_shapes
from roofline import Shape, schedules
from tqdm import tqdm

import mlstm_pallas
from mlstm_pallas import dispatch
from mlstm_pallas.backend import requested_backend
from mlstm_pallas.call_spec import CallSpec
from mlstm_pallas.config import (
    KernelConfig,
    config_from_row,
    config_from_rows,
    heuristic_config,
    tuning_name,
)
from mlstm_pallas.normaliser import DEFAULT_NORMALISER
from mlstm_pallas.problem import (
    Problem,
    clamp_chunk_size,
    make_problem,
    padded_head_dim,
)
from mlstm_pallas.stage import Kernel, Lowering, StageConfig
from mlstm_pallas.validation import KERNEL_DTYPES, check_chunk_size

MIN_GAIN = 0.03  # of a whole call, or of a stage on Mosaic GPU, over the heuristic
ROUND, MOSAIC_GPU_ROUND = 16, 4  # candidates
COMPILE_SECONDS = 60  # per candidate
HOPELESS = 1.4  # times the smallest sum over stages of a chunk size
SEARCH_SHARE = 0.7  # of a case's time; the rest is for whole calls

FUSED_SCAN = "recurrent_fw_H"  # its siz_b_LKV is the chunk size of the fused stages
FUSED_CHUNKS = (16, 32, 64, 128)
FUSED_MIN_CTAS = 192  # of the fused scan; with fewer too many SMs are idle, and it is slower
# The stages of a forward and backward pass by fused_min_heads, 0 or 1; chunk_gates is in both
# passes.
ALGORITHMS = {fused: tuple(itertools.chain(*schedules(fused))) for fused in (0, 1)}
# The stages that the other algorithm does not have.
OWN_STAGES = {fused: {*ALGORITHMS[fused]} - {*ALGORITHMS[1 - fused]} for fused in (0, 1)}


# ---------------------------------------------------------------- candidates


def canonical(stage: str, tiles: StageConfig, problem: Problem) -> StageConfig:
    """The tiles that run in the problem's chunks: equal for all that run the same kernel."""
    kernel = dispatch.configured(stage)
    clamped = kernel.clamp(tiles, problem)
    return StageConfig(**{name: getattr(clamped, name) for name in kernel.search})


def as_run(config: KernelConfig, problem: Problem) -> KernelConfig:
    """The stages and the algorithm of a complete config that run."""
    # The dtype decides about neither.
    spec = CallSpec(problem, config, jnp.dtype("bfloat16"), DEFAULT_NORMALISER)
    tiles: dict[str, Any] = {}
    for name, stage in STAGES.items():
        p = spec.fused_problem if stage.fused else problem
        tiles[name] = canonical(name, config.stage(name), p)
    return KernelConfig(chunk_size=problem.L, fused_min_heads=int(spec.fused), **tiles)


def neighbours(
    tiles: StageConfig, search: Mapping[str, Sequence[Any]], canonical: Callable[..., StageConfig]
) -> Iterator[StageConfig]:
    """Distinct tiles that differ by one step of one field, then of two."""
    steps = []
    for name, values in search.items():
        at = min(range(len(values)), key=lambda n: abs(values[n] - getattr(tiles, name)))
        steps += [(name, values[n]) for n in (at + 1, at - 1) if 0 <= n < len(values)]
    pairs = (pair for pair in itertools.combinations(steps, 2) if pair[0][0] != pair[1][0])
    seen = {canonical(tiles)}
    for changes in itertools.chain(([step] for step in steps), pairs):
        candidate = canonical(tiles.replace(**dict(changes)))
        if candidate not in seen:
            seen.add(candidate)
            yield candidate


class Search:
    """Coordinate descent of one stage at one chunk size."""

    round_size = ROUND

    def __init__(self, stage: str, problem: Problem, starts: Sequence[StageConfig]):
        self.stage, self.problem, self.fused = stage, problem, STAGES[stage].fused
        self.starts = list(dict.fromkeys(map(self.canonical, starts)))
        self.results: dict[StageConfig, Result] = {}
        self.rounds, self.done = 0, False

    @property
    def L(self) -> int:
        return self.problem.L

    @property
    def values(self) -> Mapping[str, Sequence[Any]]:
        """What is searched, by field."""
        return dispatch.configured(self.stage).search

    def canonical(self, tiles: StageConfig) -> StageConfig:
        return canonical(self.stage, tiles, self.problem)

    def takes(self, tiles: StageConfig) -> bool:
        """Whether the kernel can have the tiles."""
        return True

    @property
    def share(self) -> float:
        """What a round may gain: a share of the stage's time in a whole call, less every round."""
        launches = max(stages.count(self.stage) for stages in ALGORITHMS.values())
        return launches * (self.best[0] if self.best else float("inf")) / (1 + self.rounds)

    @property
    def best(self) -> tuple[float, StageConfig] | None:
        tried = enumerate(self.results.items())
        timed = [(x.ms, n, tiles) for n, (tiles, x) in tried if x.status == "ok"]
        if not timed:
            return None
        ms, _, tiles = min(timed)
        return ms, tiles

    def candidate(self, tiles: StageConfig) -> KernelConfig:
        """A config with these tiles of the stage, at these chunks."""
        chunks: dict[str, Any] = {FUSED_SCAN: StageConfig(siz_b_LKV=self.L)} if self.fused else {}
        return KernelConfig(chunk_size=self.L, **chunks | {self.stage: tiles})

    def tiles(self, config: KernelConfig) -> StageConfig:
        """The tiles of a candidate."""
        return config.stage(self.stage)

    def next_round(self) -> list[StageConfig]:
        """Candidates to try next; none when no neighbour of the best is left."""
        if not self.results:
            return self.starts
        around = [self.best[1]] if self.best else self.starts
        near = (x for tiles in around for x in neighbours(tiles, self.values, self.canonical))
        untried = (x for x in near if x not in self.results and self.takes(x))
        return list(itertools.islice(dict.fromkeys(untried), self.round_size))


class MosaicGpuSearch(Search):
    """The search of the tiles of a stage's Mosaic GPU kernel.

    It has no starts where the kernel cannot run with the tiles of its heuristic.

    Args:
      stage: its name.
      config: complete, of the call in which the stage runs.
      spec: the call of a config.
    """

    round_size = MOSAIC_GPU_ROUND

    def __init__(self, stage: str, config: KernelConfig, spec: Callable[[KernelConfig], CallSpec]):
        self.stage, self.config, self.spec, self.problem = stage, config, spec, spec(config).problem
        tiles = None, config.stage(stage).mosaic_gpu
        heuristic, present = (self.running(self.in_call(x)) for x in tiles)
        starts = [x for x in (heuristic, present) if heuristic and x]
        super().__init__(stage, self.problem, starts)

    @property
    def values(self) -> Mapping[str, Sequence[Any]]:
        return mosaic_gpu_kernel(self.stage).search

    def canonical(self, tiles: StageConfig) -> StageConfig:
        """A tile beyond its axis is that of the axis."""
        fields = {name: getattr(tiles, name) for name in self.values}
        for name, size in (("siz_b_DHQK", self.problem.DHQK), ("siz_b_DHHV", self.problem.DHHV)):
            if name in fields:
                fields[name] = min([fields[name], *(x for x in self.values[name] if x >= size)])
        return StageConfig(**fields)

    def in_call(self, tiles: StageConfig | None) -> KernelConfig:
        """The config of the call with these tiles; None: those of the heuristic."""
        config = self.config.stage(self.stage).replace(mosaic_gpu=tiles)
        return self.config.replace(**{self.stage: config})

    def running(self, config: KernelConfig, stage: str | None = None) -> StageConfig | None:
        """The tiles with which a stage runs on Mosaic GPU; None where it does not.

        stage None: the stage that is searched.
        """
        return self.spec(config).stages_in("mosaic_gpu").get(stage or self.stage)

    def takes(self, tiles: StageConfig) -> bool:
        return self.running(self.in_call(tiles)) is not None

    def candidate(self, tiles: StageConfig) -> KernelConfig:
        """A config with these tiles of the stage.

        A stage of the fused scan comes with the tiles of the scan that decide the chunks.
        """
        stages: dict[str, Any] = {}
        if self.fused:
            stages[FUSED_SCAN] = StageConfig(mosaic_gpu=self.running(self.config, FUSED_SCAN))
        stages[self.stage] = StageConfig(mosaic_gpu=tiles)
        return KernelConfig(chunk_size=self.L, **stages)

    def tiles(self, config: KernelConfig) -> StageConfig:
        return config.stage(self.stage).mosaic_gpu


# ---------------------------------------------------------------- results of earlier runs


def source_hash() -> str:
    """A hash of the package's code: a result counts for the code that it was measured with."""
    files = sorted(Path(mlstm_pallas.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


class Log:
    """Results by candidate, and the JSONL file to which they are appended.

    Lines of another context in the file do not count.
    """

    def __init__(self, path: str, context: dict[str, str]):
        self.path, self.context = path, context
        self.known: dict[str, Result] = {}
        with open(path, "a+") as file:
            file.seek(0)
            text = file.read()
            whole = text[: text.rfind("\n") + 1]
            file.truncate(len(whole.encode()))  # the last write was interrupted
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                key = self._key(entry["case"], entry["stage"], entry["config"])
                result = Result(entry["status"], entry["ms"], entry["note"])
            except (KeyError, TypeError, ValueError):
                raise RequestError(f"{path}, line {number} is no result of this program") from None
            if entry["context"] == context:
                self.known[key] = result

    @staticmethod
    def _key(case: str, stage: str, config: dict[str, Any]) -> str:
        return json.dumps([case, stage, config], sort_keys=True)

    def get(self, case: str, stage: str, config: KernelConfig) -> Result | None:
        return self.known.get(self._key(case, stage, config.as_row()))

    def put(self, case: str, stage: str, config: KernelConfig, result: Result) -> None:
        row = config.as_row()
        entry = dict(context=self.context, case=case, stage=stage, config=row)
        with open(self.path, "a") as file:
            print(json.dumps(entry | dataclasses.asdict(result)), file=file, flush=True)
        self.known[self._key(case, stage, row)] = result


# ---------------------------------------------------------------- a case


@dataclasses.dataclass
class Tuner:
    """One shape and dtype: the search of its stages, and the whole calls."""

    bench: Bench | IsolatedBench
    log: Log
    pool: ThreadPoolExecutor
    threads: int
    bar: tqdm
    counts: Counter
    checks: dict[tuple[str, int], Future] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.name = f"{self.bench.shape} {self.bench.dtype}"

    def evaluate(
        self,
        items: Sequence[tuple[str, KernelConfig]],
        deadline: float,
        *,
        best: Mapping[str, float] = MappingProxyType({}),
        prune: bool = True,
        resume: bool = True,
    ) -> dict[tuple[str, KernelConfig], Result]:
        """Results of stages with their configs, from the log or measured.

        All are of one chunk size, or of whole calls. Those after the deadline are missing. best:
        the ms so far, by stage.
        """
        logged = {item: self.log.get(self.name, *item) for item in items} if resume else {}
        results = {item: result for item, result in logged.items() if result is not None}
        self.counts["known"] += len(results)
        prepared, checks = {}, {}
        for stage, config in items:
            if (stage, config) not in results:
                case = self.bench.case(stage)
                inputs = case.arrays(config.L) if stage else case.inputs
                task = stage, config, inputs, prune
                prepared[stage, config] = self.pool.submit(self.bench.prepare, *task)
                key = stage, config.L if stage else 0
                if key not in self.checks:
                    compiling = self.pool.submit(self.bench.compile_check, case, config, inputs)
                    self.checks[key] = compiling
                checks[stage] = self.checks[key]
        # Nothing is timed while others compile. A compiler that hangs does not take all the time.
        limit = COMPILE_SECONDS * -(-len(prepared) // self.threads)
        timeout = max(min(deadline - time.monotonic(), limit), 0)
        wait([*prepared.values(), *checks.values()], timeout=timeout)
        bests, checked, check, expected = dict(best), None, None, None
        for (stage, config), future in prepared.items():
            if future.cancel() or time.monotonic() > deadline:
                continue
            late = Result("failed", note=f"not compiled within {limit:g} s")
            candidate = future.result() if future.done() else late
            if checked != stage:
                checked, check = stage, checks[stage].result()
                expected = self.bench.expected(stage, config.L, check)
            try:
                if isinstance(candidate, Result):
                    result = candidate
                else:
                    judged = *candidate, check, expected, bests.get(stage)
                    result = self.bench.judge(stage, *judged)
            except DeviceLost as error:
                self.log.put(self.name, stage, config, Result("failed", note=str(error)))
                raise
            self.log.put(self.name, stage, config, result)
            self.counts[result.status] += 1
            elapsed = min(int(self.bar.format_dict["elapsed"]), self.bar.total)
            self.bar.update(max(elapsed - self.bar.n, 0))
            results[stage, config] = result
            if result.ms is not None:
                bests[stage] = min(result.ms, bests.get(stage, result.ms))
        return results

    def round(self, searches: Sequence[Search], until: float, *, prune: bool) -> None:
        """The next round of searches of one chunk size; those with nothing left to try are done."""
        best = {search.stage: search.best[0] for search in searches if search.best}
        stages = "all stages"
        if prune:
            times = {stage: f" {ms:.3f} ms" for stage, ms in best.items()}
            stages = ", ".join(search.stage + times.get(search.stage, "") for search in searches)
        self.bar.set_postfix_str(f"{self.name} L={searches[0].L} {stages}", refresh=False)
        rounds = [(search, search.next_round()) for search in searches]
        items = [(search.stage, search.candidate(x)) for search, xs in rounds for x in xs]
        results = self.evaluate(items, until, best=best, prune=prune)
        for search, tried in rounds:
            for (stage, config), result in results.items():
                if stage == search.stage:
                    search.results[search.tiles(config)] = result
            search.rounds += 1
            search.done = not tried or (search.best is None and search.rounds >= 3)

    def search(self, searches: Sequence[Search], until: float) -> None:
        """The starts of all, then rounds where there is most to gain.

        It ends when no neighbour is left or the time is up.
        """
        groups = dict.fromkeys((search.fused, search.L) for search in searches)
        for group in groups:
            if time.monotonic() <= until:
                group_searches = [x for x in searches if (x.fused, x.L) == group]
                self.round(group_searches, until, prune=False)
        while time.monotonic() <= until:
            sums = {(fused, L): sum_of_stages(searches, L, fused) for fused, L in groups}
            least = dict.fromkeys((False, True), float("inf"))
            for (fused, _), ms in sums.items():
                least[fused] = min(least[fused], ms)
            alive, shares = [], []
            for search in searches:
                ms, best_ms = sums[search.fused, search.L], least[search.fused]
                if search.done or HOPELESS * best_ms < ms < float("inf"):
                    continue
                alive.append(search)
                shares.append(search.share * (best_ms / ms if ms < float("inf") else 1.0) ** 4)
            if not alive:
                return
            self.round([alive[shares.index(max(shares))]], until, prune=True)

    def whole(self, configs: Sequence[KernelConfig], deadline: float) -> dict[KernelConfig, Result]:
        self.bar.set_postfix_str(f"{self.name} forward and backward", refresh=False)
        items = [("", config) for config in dict.fromkeys(configs)]
        results = self.evaluate(items, deadline, prune=False, resume=False)
        return {config: result for (_, config), result in results.items()}


# By stage the ms and tiles of the best candidate; inf and None where there is none.
Best = dict[str, tuple[float, StageConfig | None]]


def best_at(searches: Sequence[Search], L: int, *, fused: bool) -> Best:
    """The best of the stages of the fused scan, or of all others, at chunks of L steps."""
    group = [x for x in searches if (x.fused, x.L) == (fused, L)]
    return {x.stage: x.best or (float("inf"), None) for x in group}


def best_within(searches: Sequence[Search], L: int) -> Best:
    """The best of all stages in a call at chunks of L steps.

    The fused scan is at the chunk size with the least sum over its stages.
    """
    lengths = sorted({x.L for x in searches if x.fused and x.L <= L})
    groups = [best_at(searches, length, fused=True) for length in lengths]
    fused: Best = min(groups, key=lambda group: sum(ms for ms, _ in group.values()), default={})
    return best_at(searches, L, fused=False) | fused


def sum_of_stages(searches: Sequence[Search], L: int, fused: bool) -> float:
    """ms of the stages of the fused scan, or of a call with the better algorithm.

    Stages that are not searched count as 0.
    """
    if fused:
        return sum(ms for ms, _ in best_at(searches, L, fused=True).values())
    best = best_within(searches, L)
    algorithms = [fused for fused in ALGORITHMS if OWN_STAGES[fused] & best.keys()] or ALGORITHMS
    sums = (sum(best[x][0] for x in ALGORITHMS[fused] if x in best) for fused in algorithms)
    return min(sums)


def joined(
    searches: Sequence[Search], base: KernelConfig, problem: Problem
) -> Iterator[tuple[float, KernelConfig]]:
    """For each algorithm with stages that were searched, its sum in ms and a config.

    The config has the best stages at the problem's chunks; other stages have the base's tiles.
    """
    every = best_within(searches, problem.L)
    best = {stage: (ms, tiles) for stage, (ms, tiles) in every.items() if tiles}
    distinct = {fused: stages & every.keys() for fused, stages in OWN_STAGES.items()}
    algorithms = [fused for fused, stages in distinct.items() if stages and stages <= best.keys()]
    stage_tiles: dict[str, Any] = {stage: tiles for stage, (_, tiles) in best.items()}
    for fused in algorithms or [base.fused_min_heads]:
        ms = sum(best[stage][0] for stage in ALGORITHMS[fused] if stage in best)
        config = base.replace(chunk_size=problem.L, fused_min_heads=fused, **stage_tiles)
        yield ms, as_run(config, problem)


def row_of(
    shape: Shape, dtype: str, config: KernelConfig, ms: float, heuristic_ms: float
) -> dict[str, Any]:
    times = dict(fwbw_ms=round(ms, 4), heuristic_fwbw_ms=round(heuristic_ms, 4))
    date = datetime.date.today().isoformat()
    measured = dict(shape=str(shape), **times, jax=jax.__version__, date=date)
    if config.fused_min_heads:
        ctas_per_head = shape.DHHV // config.stage(FUSED_SCAN).siz_b_DHHV
        config = config.replace(fused_min_heads=-(-FUSED_MIN_CTAS // ctas_per_head))
    case = dict(DHQK=shape.DHQK, DHHV=shape.DHHV, dtype=dtype)
    return case | config.as_row() | dict(measured=measured)


def row_key(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["dtype"], row["DHQK"], row["DHHV"]


def read_tuning(path: str, device_kind: str) -> list[dict[str, Any]]:
    """The rows of a tuning file; none where there is no file."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        try:
            content = json.load(file)
            device, rows = content["device"], content["rows"]
        except (KeyError, TypeError, ValueError):
            raise RequestError(f"{path} is no tuning file") from None
    if device != device_kind:
        raise RequestError(f"{path} is of {device}, this is {device_kind}")
    return rows


def write_tuning(path: str, device_kind: str, rows: Sequence[dict[str, Any]]) -> None:
    """One line per row; the file is replaced atomically."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in sorted(rows, key=row_key))
    with open(f"{path}.part", "w") as file:
        file.write(f'{{\n  "device": {json.dumps(device_kind)},\n  "rows": [\n{lines}\n  ]\n}}\n')
    os.replace(f"{path}.part", path)


def tune(
    tuner: Tuner, options: flags.FlagValues, rows: Sequence[dict[str, Any]], deadline: float
) -> dict[str, Any] | None:
    """The row of the tuner's case; None where the heuristic is as good.

    Raises:
      RuntimeError: there is no result.
    """
    shape, dtype = tuner.bench.shape, tuner.bench.dtype

    def problem_at(L: int) -> Problem:
        return make_problem(shape[:4], shape.DHHV, clamp_chunk_size(L, shape.S), pad_heads=True)

    heuristic = heuristic_config(shape.DHQK, jnp.dtype(dtype))
    heads = padded_head_dim(shape.DHQK), padded_head_dim(shape.DHHV)
    present = config_from_rows(rows, *heads, dtype)
    complete = [heuristic, *([present.or_else(heuristic)] if present else [])]
    known = [as_run(config, problem_at(config.L)) for config in complete]
    base = known[-1]
    default = [base.L] if options.stage else [64, 128, 256]
    problems = list(dict.fromkeys(problem_at(int(L)) for L in options.chunk_size or default))
    stages = options.stage or list(STAGES)

    def problems_of(stage: str) -> list[Problem]:
        if not STAGES[stage].fused:
            return problems
        lengths = FUSED_CHUNKS if FUSED_SCAN in stages else [base.stage(FUSED_SCAN).siz_b_LKV]
        return [problem_at(L) for L in lengths if max(problem.L for problem in problems) >= L]

    starts = list(reversed(known))
    searches = [
        Search(stage, problem, [x.stage(stage) for x in starts])
        for stage in stages
        for problem in problems_of(stage)
    ]
    now = time.monotonic()
    tuner.search(searches, now + SEARCH_SHARE * (deadline - now))
    for search in searches:
        if search.best:
            ms, tiles = search.best
            fields = ", ".join(f"{name} {getattr(tiles, name)}" for name in search.values)
            tried = f"{ms:.3f} ms ({len(search.results)} tried)"
            tqdm.write(f"{tuner.name} {search.stage} L={search.L}: {tried}, {fields}")

    candidates = [x for problem in problems for x in joined(searches, base, problem)]
    candidates.sort(key=lambda x: x[0])
    results = tuner.whole([*known, *(config for _, config in candidates)], deadline)
    reference = results.get(known[0])
    times = {config: result.ms for config, result in results.items() if result.ms is not None}
    if reference is None or reference.ms is None:
        reason = "the time was up before it was timed"
        if reference is not None:
            reason = f"{reference.status}: {reference.note}"
        raise RuntimeError(f"no time of the heuristic to compare with, {reason}")
    best = min(times, key=times.__getitem__)
    gain = 1 - times[best] / reference.ms
    of_present = f", present row {times[base]:.3f}" if base in times and base != known[0] else ""
    verdict = "kept" if gain >= MIN_GAIN else "no row: the heuristic is as good"
    best_ms = f"best {times[best]:.3f} ({100 * gain:.1f} % less)"
    tqdm.write(f"{tuner.name}: heuristic {reference.ms:.3f} ms{of_present}, {best_ms}: {verdict}")
    return row_of(shape, dtype, best, times[best], reference.ms) if gain >= MIN_GAIN else None


def tune_mosaic_gpu(
    tuner: Tuner, options: flags.FlagValues, rows: Sequence[dict[str, Any]], deadline: float
) -> dict[str, Any]:
    """The present row of the tuner's case with tiles of Mosaic GPU kernels.

    Raises:
      RuntimeError: there is no result.
    """
    shape, dtype = tuner.bench.shape, tuner.bench.dtype
    present = next((row for row in rows if row_key(row) == (dtype, *shape[3:])), None)
    if present is None:
        first = "tune these heads with --backend=triton first"
        raise RuntimeError(f"there is no row for the tiles: {first}")
    heuristic = heuristic_config(shape.DHQK, jnp.dtype(dtype))
    config = config_from_row(present, options.backend).or_else(heuristic)
    config = config.replace(chunk_size=clamp_chunk_size(config.L, shape.S))
    spec = functools.partial(kernel_benchmark.call_spec, options.backend, shape, dtype)
    possible = set(mosaic_gpu_stages()) & set(spec(config).stages)
    stages = [stage for stage in options.stage or STAGES if stage in possible]
    searches = [MosaicGpuSearch(stage, config, spec) for stage in stages]
    searches = [search for search in searches if search.starts]
    if not searches:
        tqdm.write(f"{tuner.name}: no Mosaic GPU kernel with tiles to search runs for these heads")
        return present
    tuner.round(searches, deadline, prune=False)
    while time.monotonic() <= deadline:
        alive = [search for search in searches if not search.done]
        if not alive:
            break
        tuner.round(alive, deadline, prune=True)
    timed = [search for search in searches if search.best]
    decided = [search for search in timed if search.results.keys() >= {*search.starts}]
    if not decided:
        which = "the tiles of its heuristic and of the present row"
        raise RuntimeError(f"no stage was timed with {which}")
    row, measured = dict(present), dict(present.get("measured", {}))
    of_stages, today = dict(measured.pop("mosaic_gpu", {})), datetime.date.today().isoformat()
    for search in decided:
        (ms, tiles), reference = search.best, search.results[search.starts[0]].ms
        kept = reference is None or 1 - ms / reference >= MIN_GAIN
        fields = {name: getattr(tiles, name) for name in search.values}
        triton = dict((config.as_row() | present)[search.stage])
        triton.pop("mosaic_gpu", None)
        row[search.stage] = triton | ({"mosaic_gpu": fields} if kept else {})
        of_stages.pop(search.stage, None)
        if kept:
            times = dict(ms=round(ms, 4), heuristic_ms=reference and round(reference, 4))
            of_stages[search.stage] = times | dict(jax=jax.__version__, date=today)
        heuristic = "does not run" if reference is None else f"{reference:.3f} ms"
        described = ", ".join(f"{name} {x}" for name, x in fields.items())
        verdict = "kept" if kept else "no entry: the heuristic is as good"
        best = f"best {ms:.3f} ({len(search.results)} tried), {described}"
        tqdm.write(f"{tuner.name} {search.stage}: heuristic {heuristic}, {best}: {verdict}")
    return row | {"measured": measured | ({"mosaic_gpu": of_stages} if of_stages else {})}


def mosaic_gpu_kernel(stage: str) -> Kernel | None:
    return dispatch.kernel(stage, "mosaic_gpu")


def mosaic_gpu_stages() -> list[str]:
    """The stages with a Mosaic GPU kernel that has tiles to search."""
    kernels = {name: mosaic_gpu_kernel(name) for name in STAGES}
    return [name for name, kernel in kernels.items() if kernel and kernel.search]


def with_mosaic_gpu(row: dict[str, Any], present: dict[str, Any]) -> dict[str, Any]:
    """A new row with what the present one has for Mosaic GPU. Tiles are of its chunk size."""
    if "mosaic_gpu" in present:
        row = row | {"mosaic_gpu": present["mosaic_gpu"]}
    tuned = [name for name in STAGES if "mosaic_gpu" in present.get(name, {})]
    if not tuned:
        return row
    L, present_L = (config_from_row(x, "mosaic_gpu").L for x in (row, present))
    if present_L != L:
        return row
    measured = {name: x for name, x in present.get("measured", {}).items() if name == "mosaic_gpu"}
    both = [name for name in tuned if name in row]
    tiles = {name: row[name] | {"mosaic_gpu": present[name]["mosaic_gpu"]} for name in both}
    return row | tiles | {"measured": row["measured"] | measured}


# ---------------------------------------------------------------- the command


def define_flags(values: flags.FlagValues) -> None:
    """Not at import: modules that import this one have flags of their own."""
    define = command.Define(values)
    shape = f"{', '.join(kernel_benchmark.SHAPES)}, or BxNHxSxDHQKxDHHV."
    dtype = f"Of q, k, v: {', '.join(KERNEL_DTYPES)}."
    chunks = "Chunk sizes to search; none: 64, 128, 256, with --stage that of the present row."
    log = "Results of all candidates; those in it are not timed again."
    output = "Tuning file; none: that of the device in mlstm_pallas/tuning."
    backends = ["triton", "mosaic_gpu", "interpret", "mosaic_gpu_interpret"]
    backend = "Whose kernels. Interpreted ones are a dry run without a GPU, with --output."
    seconds = "On Mosaic GPU, for a candidate to run; then it is killed."
    spills = "Per thread; candidates that spill more are not run."
    define.list("shape", ["heads"], shape)
    define.list("dtype", ["bfloat16"], dtype)
    define.list("stage", [], f"Stages to search: {', '.join(STAGES)}; none: all.")
    define.list("chunk_size", [], chunks)
    define.float("minutes", 9.0, "Time for all cases together.", lower_bound=0.0)
    define.string("log", "tune.jsonl", log)
    define.string("output", None, output)
    define.enum("backend", "triton", backends, backend)
    define.integer("threads", os.cpu_count() or 1, "Threads that compile.", lower_bound=1)
    define.integer("repeats", 5, "Batches of calls; the median counts.", lower_bound=1)
    define.float("run_seconds", 20.0, seconds, lower_bound=0.0)
    define.integer("max_spill_bytes", 512, spills, lower_bound=0)


def parse_request(options: flags.FlagValues) -> tuple[list[tuple[Shape, str]], str]:
    """The cases and the tuning file."""
    device, lowering = jax.devices()[0], Lowering(options.backend)
    folder = Path(mlstm_pallas.__file__).parent / "tuning"
    on_mosaic_gpu, interpreted = lowering.folder == "mosaic_gpu", lowering.interpret
    check_names("dtype", options.dtype, KERNEL_DTYPES)
    check_names("stage", options.stage, mosaic_gpu_stages() if on_mosaic_gpu else list(STAGES))
    if not interpreted and device.platform != "gpu":
        dry_run = "--backend=interpret --output=FILE is a dry run"
        raise RequestError(f"there is no GPU here to tune for; {dry_run}")
    if interpreted and (not options.output or folder in Path(options.output).resolve().parents):
        times = "times of interpreted kernels do not belong in mlstm_pallas/tuning"
        raise RequestError(f"{times}: give another --output")
    if on_mosaic_gpu and options.chunk_size:
        chunks = "which runs in the present row's chunks for it"
        raise RequestError(f"--chunk_size is not for {lowering}, {chunks}")
    try:
        requested_backend(options.backend)
        for text in options.chunk_size:
            check_chunk_size(int(text))
    except ValueError as error:
        raise RequestError(str(error)) from None
    shapes = parse_shapes(options.shape)
    for name, shape in shapes.items():
        padded = tuple(map(padded_head_dim, shape[3:]))
        if shape[3:] != padded:
            sizes = ", ".join(map(str, padded))
            raise RequestError(f"shape {name} is padded when it runs: tune DHQK, DHHV = {sizes}")
        for L in map(int, options.chunk_size or [64]):
            if shape.S % clamp_chunk_size(L, shape.S):
                multiple = f"no multiple of the chunk size {L}"
                raise RequestError(f"shape {name}: S = {shape.S} is {multiple}")
    output = options.output or str(folder / f"{tuning_name(device.device_kind)}.json")
    if not os.path.isdir(os.path.dirname(os.path.abspath(output))):
        raise RequestError(f"no folder for {output}")
    return list(itertools.product(shapes.values(), options.dtype)), output


def run(options: flags.FlagValues) -> int:
    """Tunes; returns the exit code."""
    device = jax.devices()[0]
    try:
        cases, output = parse_request(options)
        context = dict(device=device.device_kind, jax=jax.__version__, source=source_hash())
        context |= dict(backend=options.backend)
        log, rows = Log(options.log, context), read_tuning(output, device.device_kind)
    except (RequestError, OSError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    mosaic_gpu = Lowering(options.backend).folder == "mosaic_gpu"
    pruner = None if mosaic_gpu else pruner_for(device, options.max_spill_bytes)
    workers = {}
    if mosaic_gpu:
        stages = options.stage or mosaic_gpu_stages()
        settings = options.backend, options.repeats, options.max_spill_bytes
        workers = stage_workers(stages, *settings)
    start, code = time.monotonic(), 0
    end, counts = start + 60 * options.minutes, Counter()
    # A stage's process compiles one candidate after the other: the threads do nothing but wait for
    # their answers.
    threads = 1 if mosaic_gpu else options.threads
    pool = ThreadPoolExecutor(len(workers) * ROUND if mosaic_gpu else threads)
    seconds = round(60 * options.minutes)
    refresh = dict(mininterval=0.5 if sys.stderr.isatty() else 10)
    with contextlib.closing(tqdm(total=seconds, unit="s", leave=False, **refresh)) as bar:
        try:
            for n, (shape, dtype) in enumerate(cases):
                now = time.monotonic()
                deadline = now + (end - now) / (len(cases) - n)
                limits = dict(compile_seconds=COMPILE_SECONDS, run_seconds=options.run_seconds)
                if mosaic_gpu:
                    bench: Any = IsolatedBench(workers, shape, dtype, deadline, **limits)
                else:
                    bench = Bench(options.backend, shape, dtype, pruner, options.repeats)
                try:
                    tuner = Tuner(bench, log, pool, threads, bar, counts)
                    case = tuner, options, rows, deadline
                    row = tune_mosaic_gpu(*case) if mosaic_gpu else tune(*case)
                except DeviceLost as error:
                    again = "Run the same again: it continues after that candidate."
                    tqdm.write(f"tune: the device is lost after {error}. {again}", file=sys.stderr)
                    return 1
                except RuntimeError as error:
                    tqdm.write(f"tune: {shape} {dtype}: {error}", file=sys.stderr)
                    code = 1
                    continue
                key = dtype, *shape[3:]
                others = [x for x in rows if row_key(x) != key]
                if row and not mosaic_gpu:
                    present = next((x for x in rows if row_key(x) == key), None)
                    row = with_mosaic_gpu(row, present) if present else row
                tuned = [*others, *([row] if row else [])]
                if tuned != rows:
                    rows = tuned
                    write_tuning(output, device.device_kind, rows)
        except KeyboardInterrupt:
            print(f"interrupted; what was timed is in {options.log}", file=sys.stderr)
            code = 130
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers.values():
                worker.close()
    results = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()) if n)
    print(f"{output}: {len(rows)} rows; candidates: {results or 'none'}")
    return code


if __name__ == "__main__":
    # The plain forms are for checks alone: XLA need not look for their fastest products.
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    # The processes of the stages share the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    command.main(define_flags, run)
