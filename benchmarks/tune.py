r"""Finds tiles and launch parameters for shapes and dtypes on the GPU at hand and writes them into mlstm_pallas/tuning/<device>.json.

    python benchmarks/tune.py --minutes=9                                                   # the seven head sizes, bfloat16
    python benchmarks/tune.py --shape=tfla-8k --dtype=float32 --minutes=5
    python benchmarks/tune.py --shape=7b-8k --stage=parallel_fw_H,recurrent_bw_dC --minutes=3

Strategy. Each stage at each chunk size is searched by itself: coordinate descent from the present row and the heuristic, over tiles in
powers of two, warps, pipeline stages and keep_q. A round takes up to 16 candidates one step away from the best so far, then those that
are one step away in two parameters. The next round is that of the stage and chunk size where most time is to gain: stages that take
long, with few rounds so far, of the chunk sizes whose stages add up to least; one with far more is dropped. Tiles that do not fit are
shortened, and the same tiles are tried once. Stages that keep their states on the chip have chunk sizes of their own, which are not those
of the call. In the last third of its time a case joins the best stages of each chunk size, for every plan of the forward and of the
backward pass, and times the whole, forward and backward, beside the heuristic and the present row, in one run. Heads that have none start
from that of the smallest larger heads, as a call of them would. A row is written when its whole is at least 3 % faster than the
heuristic's; a present row that is not is taken out.

Candidates of a round are compiled in parallel, first by the compile report (each thread has a process of its own for it: LLVM ends some):
what takes more shared memory than there is, or spills more than --max_spill_bytes, never runs. Then they are timed one by one. One counts
only if its outputs are those of the plain jnp stage in float32 and the same bits in three runs: in a pipelined loop Triton miscompiles
some tilings, differently in every run. The whole is checked as in kernel_benchmark.py.

Every result is a line of --log; a second run with the same code, jax and device takes stages from there instead of timing them, and
so goes on where the first one's time was up.
Exit code 1 when a case has no result, 2 when the request makes no sense, 130 after Ctrl-C (nothing that was timed is lost).
"""

import contextlib
import copy
import dataclasses
import datetime
import functools
import hashlib
import importlib.util
import itertools
import json
import operator
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import command
import compile_report
import jax
import jax.numpy as jnp
import kernel_benchmark
from absl import flags
from kernel_benchmark import Case, Ours, RequestError, check_names, parse_shapes, time_calls, wrong_outputs
from roofline import Shape
from tqdm import tqdm

import mlstm_pallas
from mlstm_pallas.config import CHUNK_OF, PLANS, STAGES, KernelConfig, StageConfig, config_from_rows, heuristic_config, tuning_name
from mlstm_pallas.problem import KERNEL_DTYPES, MAX_TILE, Problem, check_chunk_size, clamp_chunk_size, make_problem, padded_head_dim
from mlstm_pallas.shared_memory import available_shared_bytes

MIN_GAIN = 0.03  # of the whole, over the heuristic
RUNS = 3  # that have to give the same bits
ROUND = 16  # candidates
COMPILE_SECONDS = 60  # of a candidate
SLOW = 1.2  # times the best so far: not worth timing exactly
HOPELESS = 1.4  # times the best chunk size's sum of stages
SEARCH_SHARE = 0.7  # of a case's time; the rest is for the whole

TILES = tuple(2**n for n in range(4, 9))
PARAMETERS = {f"siz_b_{name}": TILES for name in ("LQ", "LKV", "DHQK", "DHHV", "loop")}
PARAMETERS |= {"num_warps": (4, 8), "num_stages": (1, 2, 3, 4), "keep_q": (False, True)}
LAUNCH = ("num_warps", "num_stages")
SWEPT = {  # what each stage reads of its StageConfig
    "chunk_gates": ("siz_b_LQ", *LAUNCH),
    "recurrent_fw_C": ("siz_b_LKV", "siz_b_DHQK", "siz_b_DHHV", *LAUNCH),
    "parallel_fw_H": ("siz_b_LQ", "siz_b_LKV", "siz_b_DHQK", "siz_b_DHHV", *LAUNCH, "keep_q"),
    "parallel_fw_P": ("siz_b_DHQK", "num_warps"),
    "recurrent_fw_H": ("siz_b_LKV", "siz_b_DHQK", "siz_b_DHHV", "siz_b_loop", *LAUNCH),
    "parallel_bw_dP": ("siz_b_LQ", "siz_b_loop", *LAUNCH),
    "recurrent_bw_dC": ("siz_b_LKV", "siz_b_DHQK", "siz_b_DHHV", *LAUNCH),
    "parallel_bw_dQKV": ("siz_b_LQ", "siz_b_DHQK", "siz_b_DHHV", "siz_b_loop", *LAUNCH),
    "parallel_bw_P": ("siz_b_DHQK", "siz_b_loop", *LAUNCH),
    "recurrent_bw_dQ": ("siz_b_LKV", "siz_b_DHQK", "siz_b_DHHV", "siz_b_loop", *LAUNCH),
    "recurrent_bw_dK": ("siz_b_DHQK", "siz_b_DHHV", "siz_b_loop", *LAUNCH),
    "recurrent_bw_dV": ("siz_b_DHQK", "siz_b_DHHV", "siz_b_loop", *LAUNCH),
}
ROWS, COLUMNS = (64, 128, 256), (64, 128)  # of a tile of the state of a walk
WALK = {"siz_b_loop": (64, 128, 256, 512), "num_stages": (2, 3, 4)}
NARROWED: dict[str, dict[str, Sequence[int]]] = {  # PARAMETERS, for one stage
    "chunk_gates": {"num_warps": (1, 2, 4)},
    "parallel_fw_P": {"siz_b_DHQK": (32, 64, 128, 256), "num_warps": (1, 2, 4, 8)},
    **{stage: {"siz_b_LQ": tuple(x for x in TILES if x <= MAX_TILE)} for stage in ("parallel_bw_dP", "parallel_bw_dQKV")},
    "parallel_bw_P": {"num_warps": (1, 2, 4, 8)},
    **dict.fromkeys(("recurrent_fw_H", "recurrent_bw_dV"), WALK | {"siz_b_DHQK": ROWS, "siz_b_DHHV": COLUMNS}),
    **dict.fromkeys(("recurrent_bw_dQ", "recurrent_bw_dK"), WALK | {"siz_b_DHQK": COLUMNS, "siz_b_DHHV": ROWS}),
}
SHORT_CHUNKS = (16, 32, 64, 128)  # of stages in CHUNK_OF
# What may be chosen for the forward and for the backward pass.
FORWARD = ({"stateless_forward": False}, {"stateless_forward": True})
BACKWARD = ({"stateless_backward": False}, {"stateless_backward": True})
# Programs of these stages below which too much of a device is idle and the plan without states in memory the slower one;
# the columns of one.
FILLING = {"stateless_forward": ("recurrent_fw_H", "DHHV", 192), "stateless_backward": ("recurrent_bw_dQ", "DHQK", 192)}


class DeviceLost(RuntimeError):
    """The device answers nothing any more after a candidate."""


# ---------------------------------------------------------------- candidates


def allowed(stage: str, name: str) -> Sequence[int]:
    return NARROWED.get(stage, {}).get(name, PARAMETERS[name])


def canonical(stage: str, config: StageConfig, problem: Problem) -> StageConfig:
    """What the stage makes of the config in the problem's chunks: the same for all that run the same kernel."""
    fitted = config.fitted(problem, stage)
    return StageConfig(**{name: getattr(fitted, name) for name in SWEPT[stage]})


def neighbours(stage: str, config: StageConfig, problem: Problem) -> Iterator[StageConfig]:
    """Configs one step away in one parameter, then in two; distinct, without the config itself."""
    steps = []
    for name in SWEPT[stage]:
        values = allowed(stage, name)
        at = min(range(len(values)), key=lambda n: abs(values[n] - getattr(config, name)))
        steps += [(name, values[n]) for n in (at + 1, at - 1) if 0 <= n < len(values)]
    pairs = (pair for pair in itertools.combinations(steps, 2) if pair[0][0] != pair[1][0])
    seen = {canonical(stage, config, problem)}
    for changes in itertools.chain(([step] for step in steps), pairs):
        found = canonical(stage, dataclasses.replace(config, **dict(changes)), problem)
        if found not in seen:
            seen.add(found)
            yield found


def described(config: KernelConfig) -> dict[str, Any]:
    """The config as in a row of the tuning files."""
    row: dict[str, Any] = {"chunk_size": config.L}
    row |= {name: plan for name in PLANS if (plan := getattr(config, name)) is not None}
    for stage in STAGES:
        if (tiles := getattr(config, stage)) is not None:
            row[stage] = {name: getattr(tiles, name) for name in SWEPT[stage]}
    return row


class Plan(NamedTuple):
    """A way to make a pass: the flags that ask for it, its stages, and those of them that not every way has."""

    flags: dict[str, bool]
    stages: tuple[str, ...]
    own: set[str]


def plans_of(problem: Problem) -> list[list[Plan]]:
    """The plans of the forward and of the backward pass that are not the same at the problem's chunk size."""
    passes = []
    for index, choices in enumerate((FORWARD, BACKWARD)):
        flags = {KernelConfig(**choice).passes(problem)[index]: choice for choice in choices}
        shared = set.intersection(*map(set, flags))
        passes.append([Plan(choice, stages, set(stages) - shared) for stages, choice in flags.items()])
    return passes


def runs(stage: str, problem: Problem) -> int:
    """In how many passes a plan has the stage."""
    return sum(any(stage in plan.stages for plan in plans) for plans in plans_of(problem))


class Search:
    """Coordinate descent of one stage at one chunk size."""

    def __init__(self, stage: str, problem: Problem, starts: Sequence[StageConfig]):
        self.stage, self.problem, self.owner = stage, problem, CHUNK_OF.get(stage, "")
        self.starts = list(dict.fromkeys(canonical(stage, start, problem) for start in starts))
        self.results: dict[StageConfig, Result] = {}
        self.rounds, self.done = 0, False

    @property
    def L(self) -> int:
        return self.problem.L

    @property
    def said(self) -> str:
        return self.stage + (f" {self.best[0]:.3f} ms" if self.best else "")

    @property
    def share(self) -> float:
        """What a round may gain: of the time that the stage takes in the whole, less with each round."""
        return runs(self.stage, self.problem) * (self.best[0] if self.best else float("inf")) / (1 + self.rounds)

    @property
    def best(self) -> tuple[float, StageConfig] | None:
        times = [(result.ms, n, config) for n, (config, result) in enumerate(self.results.items()) if result.status == "ok"]
        if not times:
            return None
        ms, _, config = min(times)
        return ms, config

    def candidate(self, tiles: StageConfig) -> KernelConfig:
        """A config that has the stage at these chunks, with these tiles."""
        chunks = {self.owner: StageConfig(siz_b_LKV=self.L)} if self.owner else {}
        return KernelConfig(chunk_size=self.L, **chunks | {self.stage: tiles})

    def next_round(self) -> list[StageConfig]:
        """Candidates to try next; none when no neighbour of the best is left."""
        if not self.results:
            return self.starts
        around = [self.best[1]] if self.best else self.starts
        untried = (x for start in around for x in neighbours(self.stage, start, self.problem) if x not in self.results)
        return list(itertools.islice(dict.fromkeys(untried), ROUND))


# ---------------------------------------------------------------- judging candidates


@dataclasses.dataclass(frozen=True)
class Result:
    """Status: "ok"; "pruned" by the compile report; "failed" to compile or to run; "wrong" output. note says why."""

    status: str
    ms: float | None = None
    note: str = ""


class Pruner:
    """The compile report's opinion of a kernel, for the device at hand."""

    def __init__(self, device: compile_report.Device, max_spill_bytes: int):
        self.device, self.max_spill_bytes = device, max_spill_bytes

    def __call__(self, function: Callable[..., Any], args: Sequence[Any]) -> str:
        """Why the kernels of the function are not worth running; "" where they are."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        for kernel in compile_report.lowered_kernels(function, *shapes, device=self.device):
            if kernel.cause:
                return kernel.cause
            try:
                usage = compile_report.compile_kernel(kernel.ir, kernel.num_warps, kernel.num_stages, self.device.capability)
            except compile_report.CompileError as error:
                return str(error)
            if usage.shared_bytes > self.device.shared_bytes:
                return f"takes {usage.shared_bytes} bytes of shared memory, the device has {self.device.shared_bytes}"
            if usage.spill_store_bytes > self.max_spill_bytes:
                return f"spills {usage.spill_store_bytes} bytes, at most {self.max_spill_bytes}"
        return ""


def pruner_for(device: Any, max_spill_bytes: int) -> Pruner | None:
    """None, with the reason printed, where the compile report says nothing about the device."""
    if device.platform != "gpu":
        reason = "there is no GPU"
    elif importlib.util.find_spec("triton") is None:
        reason = "it needs the triton package: pip install 'mlstm_pallas[test]'"
    elif available_shared_bytes(device.device_kind) is None:
        reason = f"it does not know the shared memory of {device.device_kind}"
    else:
        capability = round(10 * float(device.compute_capability))
        return Pruner(compile_report.Device(device.device_kind, capability), max_spill_bytes)
    print(f"nothing is pruned by the compile report: {reason}")
    return None


def _compare(case: Case, outputs: Any, again: Any, expected: dict[str, jax.Array]) -> tuple[dict[str, Any], jax.Array]:
    """Of each output, the norms of its error and of what is expected; and whether another run gave the same."""
    outputs, again = (kernel_benchmark.STAGES[case.stage].seen(x) for x in (outputs, again))
    found = case.named(outputs)
    pairs = {name: (found[name].astype(jnp.float32), x.reshape(found[name].shape)) for name, x in expected.items()}
    norms = {name: (jnp.linalg.norm((x - y).ravel()), jnp.linalg.norm(y.ravel())) for name, (x, y) in pairs.items()}
    same = [jnp.all(x == y) for x, y in zip(jax.tree.leaves(outputs), jax.tree.leaves(again), strict=True)]
    return norms, jnp.stack(same).all()


class Check(NamedTuple):
    """Compiled: what a stage should make, of its arrays in float32; and _compare."""

    plain: Callable[..., Any]
    compare: Callable[..., Any]


class Bench:
    """Compiles, checks and times candidates of one shape and dtype. A candidate is a stage ("": the whole) and a config."""

    def __init__(self, backend: str, shape: Shape, dtype: str, pruner: Pruner | None, repeats: int):
        self.backend, self.shape, self.dtype, self.pruner, self.repeats = backend, shape, dtype, pruner, repeats
        self._case: Case | None = None

    def case(self, stage: str) -> Case:
        """All stages have the same inputs and arrays; the whole leaves none of these on the device."""
        if self._case is None or bool(self._case.stage) != bool(stage):
            self._case = Case(self.shape, self.dtype, stage, gradients=not stage)
            jax.block_until_ready(self._case.inputs)
        found = copy.copy(self._case)
        found.stage = stage
        return found

    def compile_check(self, case: Case, config: KernelConfig, given: Any) -> Check | None:
        """In any thread. Of the whole the case keeps what is expected itself: made here, once."""
        stage = case.stage
        ours = Ours(self.backend, self.shape, self.dtype, None, stage, config)
        if not stage:
            case.expected(ours)
            return None
        function, args = ours.computation(given, "fwd")
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), args)
        plain = jax.jit(lambda *xs: case.named(kernel_benchmark.STAGES[stage].expected(ours.problem.L, *xs)))
        outputs, expected = jax.eval_shape(function, *args), jax.eval_shape(plain, *wide)
        compare = jax.jit(functools.partial(_compare, case))
        return Check(plain.lower(*wide).compile(), compare.lower(outputs, outputs, expected).compile())

    def expected(self, stage: str, L: int, check: Check | None) -> Any:
        """What the stage's plain form makes in float32, on the device."""
        if check is None:
            return None
        arrays = self.case(stage).arrays(L)
        return check.plain(*jax.tree.map(lambda x: x.astype(jnp.float32), [arrays[name] for name in kernel_benchmark.STAGES[stage].inputs]))

    def prepare(self, stage: str, config: KernelConfig, given: Any, prune: bool) -> tuple[Ours, Callable[[], Any]] | Result:
        """Compiles; in any thread."""
        try:
            impl = Ours(self.backend, self.shape, self.dtype, None, stage, config)
            direction = "fwd" if stage else "fwbw"
            if prune and self.pruner and (reason := self.pruner(*impl.computation(given, direction))):
                return Result("pruned", note=reason)
            return impl, impl.build(given, direction)
        except Exception as error:
            return Result("failed", note=kernel_benchmark.one_line(error))

    def judge(self, stage: str, impl: Ours, call: Callable[[], Any], check: Check | None, expected: Any, best: float | None) -> Result:
        """Checks, then times. Raises DeviceLost."""
        case = self.case(stage)
        try:
            outputs = jax.block_until_ready(call())
            for _ in range(RUNS - 1):
                again = call()
                if check:
                    norms, same = jax.device_get(check.compare(outputs, again, expected))
                    errors = {name: float(x / max(y, 1e-30)) for name, (x, y) in norms.items()}
                else:
                    errors, same = case.errors(impl, outputs, "fwbw"), jax.tree.all(jax.tree.map(jnp.array_equal, outputs, again))
                if wrong := wrong_outputs(case, errors):
                    return Result("wrong", note=wrong)
                if not same:
                    return Result("wrong", note="other bits in another run")
            del outputs, again
            [seconds] = time_calls(call, impl.synchronise, 1)
            if best is None or 1e3 * seconds < SLOW * best:
                seconds = statistics.median(time_calls(call, impl.synchronise, self.repeats))
            return Result("ok", 1e3 * seconds)
        except Exception as error:
            try:
                jax.block_until_ready(jnp.zeros(8) + 1)
            except Exception:
                raise DeviceLost(f"{stage} {described(impl.filled)}: {kernel_benchmark.one_line(error)}") from None
            return Result("failed", note=kernel_benchmark.one_line(error))


# ---------------------------------------------------------------- what is known already


def source_hash() -> str:
    """Of the package's code: a result counts for the code that it was measured with."""
    files = sorted(Path(mlstm_pallas.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


class Log:
    """Results by candidate, and the JSONL file that they are appended to. What the file has of another context is left alone."""

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
                row = json.loads(line)
                key, result = self._key(row["case"], row["stage"], row["config"]), Result(row["status"], row["ms"], row["note"])
            except (KeyError, TypeError, ValueError):
                raise RequestError(f"{path}, line {number} is no line of this program") from None
            if row["context"] == context:
                self.known[key] = result

    @staticmethod
    def _key(case: str, stage: str, config: dict[str, Any]) -> str:
        return json.dumps([case, stage, config], sort_keys=True)

    def get(self, case: str, stage: str, config: KernelConfig) -> Result | None:
        return self.known.get(self._key(case, stage, described(config)))

    def put(self, case: str, stage: str, config: KernelConfig, result: Result) -> None:
        row = dict(context=self.context, case=case, stage=stage, config=described(config), **dataclasses.asdict(result))
        with open(self.path, "a") as file:
            print(json.dumps(row), file=file, flush=True)
        self.known[self._key(case, stage, described(config))] = result


# ---------------------------------------------------------------- a case


@dataclasses.dataclass
class Tuner:
    """One shape and dtype: the search of its stages, and the decision."""

    bench: Bench
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
        """Results of stages with their configs, of one chunk size (or of the whole), from the log or measured now.

        Those that the time did not suffice for are not among them. best: the ms so far, by stage.
        """
        found = {item: self.log.get(self.name, *item) for item in items} if resume else {}
        results = {item: result for item, result in found.items() if result is not None}
        self.counts["known"] += len(results)
        prepared, checks = {}, {}
        for stage, config in items:
            if (stage, config) not in results:
                case = self.bench.case(stage)
                given = case.arrays(config.L) if stage else case.inputs
                prepared[stage, config] = self.pool.submit(self.bench.prepare, stage, config, given, prune)
                key = stage, config.L if stage else 0
                if key not in self.checks:
                    self.checks[key] = self.pool.submit(self.bench.compile_check, case, config, given)
                checks[stage] = self.checks[key]
        # Nothing is timed while others compile; but a compiler that hangs does not take all the time.
        limit = COMPILE_SECONDS * -(-len(prepared) // self.threads)
        wait([*prepared.values(), *checks.values()], timeout=max(min(deadline - time.monotonic(), limit), 0))
        bests, at, check, expected = dict(best), None, None, None
        for (stage, config), future in prepared.items():
            if future.cancel() or time.monotonic() > deadline:
                continue
            made = future.result() if future.done() else Result("failed", note=f"not compiled within {limit:g} s")
            if at != stage:
                at, check = stage, checks[stage].result()
                expected = self.bench.expected(stage, config.L, check)
            try:
                result = made if isinstance(made, Result) else self.bench.judge(stage, *made, check, expected, bests.get(stage))
            except DeviceLost as error:
                self.log.put(self.name, stage, config, Result("failed", note=str(error)))
                raise
            self.log.put(self.name, stage, config, result)
            self.counts[result.status] += 1
            self.bar.update(max(min(int(self.bar.format_dict["elapsed"]), self.bar.total) - self.bar.n, 0))
            results[stage, config] = result
            if result.ms is not None:
                bests[stage] = min(result.ms, bests.get(stage, result.ms))
        return results

    def round(self, searches: Sequence[Search], until: float, *, prune: bool) -> None:
        """The next round of searches of one chunk size; with none left a search is done."""
        said = searches[0].said if prune else "all stages"
        self.bar.set_postfix_str(f"{self.name} L={searches[0].L} {said}", refresh=False)
        items = [(search.stage, search.candidate(x)) for search in searches for x in search.next_round()]
        best = {search.stage: search.best[0] for search in searches if search.best}
        results = self.evaluate(items, until, best=best, prune=prune)
        for search in searches:
            own = {config.stage(stage): result for (stage, config), result in results.items() if stage == search.stage}
            search.results |= own
            search.rounds += 1
            search.done = not any(stage == search.stage for stage, _ in items) or (search.best is None and search.rounds >= 3)

    def search(self, searches: Sequence[Search], until: float) -> None:
        """Where all start, then rounds where there is most to gain, until no neighbour is left or the time is up."""
        chunks = dict.fromkeys((search.problem, search.owner) for search in searches)
        for key in chunks:
            self.round([search for search in searches if (search.problem, search.owner) == key], until, prune=False)
        while time.monotonic() <= until:
            sums = {key: sum_of_stages(searches, *key) for key in chunks}
            alive, shares = [], []
            for search in searches:
                ms = sums[search.problem, search.owner]
                least = min(x for (_, owner), x in sums.items() if owner == search.owner)
                if not search.done and not HOPELESS * least < ms < float("inf"):
                    alive.append(search)
                    shares.append(search.share * (least / ms if ms < float("inf") else 1.0) ** 4)
            if not alive:
                return
            self.round([alive[shares.index(max(shares))]], until, prune=True)

    def whole(self, configs: Sequence[KernelConfig], deadline: float) -> dict[KernelConfig, Result]:
        self.bar.set_postfix_str(f"{self.name} forward and backward", refresh=False)
        results = self.evaluate([("", config) for config in dict.fromkeys(configs)], deadline, prune=False, resume=False)
        return {config: result for (_, config), result in results.items()}


Found = dict[str, tuple[float, StageConfig | None]]  # by stage: ms of the best, inf where there is none


def found_at(searches: Sequence[Search], L: int, owner: str) -> Found:
    """Of the stages that have the owner's chunks ("": the call's), at chunks of L steps."""
    return {x.stage: x.best or (float("inf"), None) for x in searches if (x.owner, x.L) == (owner, L)}


def found_within(searches: Sequence[Search], L: int) -> Found:
    """Of all stages in a call at chunks of L steps: those with other chunks at what lets them take least, together."""
    found: Found = {}
    for owner in dict.fromkeys(x.owner for x in searches):
        lengths = {x.L for x in searches if x.owner == owner and x.L <= L} if owner else {L}
        groups = [found_at(searches, length, owner) for length in sorted(lengths)]
        found |= min(groups, key=lambda group: sum(ms for ms, _ in group.values()), default={})
    return found


def sum_of_stages(searches: Sequence[Search], problem: Problem, owner: str = "") -> float:
    """ms of forward and backward by its stages, with the best plans; stages that are not searched count nothing. With an owner: of the
    stages that have its chunks.
    """
    if owner:
        return sum(ms for ms, _ in found_at(searches, problem.L, owner).values())
    found = found_within(searches, problem.L)
    passes = [[plan for plan in plans if plan.own & found.keys()] or plans for plans in plans_of(problem)]
    return sum(min(sum(found[stage][0] for stage in plan.stages if stage in found) for plan in plans) for plans in passes)


def joined(searches: Sequence[Search], base: KernelConfig, problem: Problem) -> Iterator[tuple[float, KernelConfig]]:
    """For all plans that were searched, the best stages at the problem's chunks, those that were not searched as in the base; and the sum
    of what was searched.
    """
    found = found_within(searches, problem.L)
    best = {stage: tiles for stage, (_, tiles) in found.items() if tiles}
    tiles = {stage: canonical(stage, base.stage(stage), base.problem_of(stage, problem)) for stage in STAGES}
    passes = []
    for plans, stages in zip(plans_of(problem), base.passes(problem), strict=True):
        searched = [plan for plan in plans if plan.own & found.keys() and plan.own & found.keys() <= best.keys()]
        passes.append(searched or [plan for plan in plans if plan.stages == stages])
    for there, back in itertools.product(*passes):
        ms = sum(found[stage][0] for stage in (*there.stages, *back.stages) if stage in found)
        yield ms, KernelConfig(chunk_size=problem.L, **tiles | best, **there.flags, **back.flags)


def row_of(shape: Shape, dtype: str, config: KernelConfig, ms: float, heuristic_ms: float) -> dict[str, Any]:
    measured = dict(shape=str(shape), fwbw_ms=round(ms, 4), heuristic_fwbw_ms=round(heuristic_ms, 4), jax=jax.__version__)
    measured["date"] = datetime.date.today().isoformat()
    row = {"DHQK": shape.DHQK, "DHHV": shape.DHHV, "dtype": dtype, **described(config), "measured": measured}
    for plan, (stage, axis, programs) in FILLING.items():
        if row[plan]:
            row[plan] = -(-programs // (row[axis] // row[stage][f"siz_b_{axis}"]))
    return row


def row_key(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["dtype"], row["DHQK"], row["DHHV"]


def read_tuning(path: str, device_kind: str) -> list[dict[str, Any]]:
    """The rows of a tuning file; none when there is none yet."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        try:
            found = json.load(file)
            device, rows = found["device"], found["rows"]
        except (KeyError, TypeError, ValueError):
            raise RequestError(f"{path} is no file of tuned rows") from None
    if device != device_kind:
        raise RequestError(f"{path} is of {device}, this is {device_kind}")
    return rows


def write_tuning(path: str, device_kind: str, rows: Sequence[dict[str, Any]]) -> None:
    """A line a row; the file is replaced at once, whole."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in sorted(rows, key=row_key))
    with open(f"{path}.part", "w") as file:
        file.write(f'{{\n  "device": {json.dumps(device_kind)},\n  "rows": [\n{lines}\n  ]\n}}\n')
    os.replace(f"{path}.part", path)


def complete(config: KernelConfig, heuristic: KernelConfig, shape: Shape) -> KernelConfig:
    """The config as it runs at the shape, whole."""
    filled = config.or_else(heuristic)
    problem = make_problem(shape[:4], shape.DHHV, clamp_chunk_size(filled.L, shape.S), pad_heads=True)
    tiles = {stage: canonical(stage, filled.stage(stage), filled.problem_of(stage, problem)) for stage in STAGES}
    passes = zip(plans_of(problem), filled.passes(problem), strict=True)
    flags = [plan.flags for plans, stages in passes for plan in plans if plan.stages == stages]
    return KernelConfig(chunk_size=problem.L, **tiles, **functools.reduce(operator.or_, flags))


def tune(tuner: Tuner, options: flags.FlagValues, rows: Sequence[dict[str, Any]], deadline: float) -> dict[str, Any] | None:
    """The row of the tuner's case, None where the heuristic is as good. Raises RuntimeError without a result."""
    shape, dtype = tuner.bench.shape, tuner.bench.dtype
    heuristic = heuristic_config(shape.DHQK, jnp.dtype(dtype))
    present = config_from_rows(rows, padded_head_dim(shape.DHQK), padded_head_dim(shape.DHHV), dtype)
    known = [complete(config, heuristic, shape) for config in (heuristic, present) if config]
    base = known[-1]
    default = [base.L] if options.stage else [64, 128, 256]
    sizes = dict.fromkeys(clamp_chunk_size(int(L), shape.S) for L in options.chunk_size or default)
    problems = {L: make_problem(shape[:4], shape.DHHV, L, pad_heads=True) for L in sizes}
    wanted = options.stage or STAGES

    def chunks(stage: str) -> list[Problem]:
        if stage not in CHUNK_OF:
            return [problem for problem in problems.values() if runs(stage, problem)]
        lengths = SHORT_CHUNKS if CHUNK_OF[stage] in wanted else [base.stage(CHUNK_OF[stage]).siz_b_LKV]
        return [make_problem(shape[:4], shape.DHHV, L, pad_heads=True) for L in lengths if max(sizes) >= L]

    starts = list(reversed(known))
    searches = [Search(stage, problem, [x.stage(stage) for x in starts]) for stage in wanted for problem in chunks(stage)]
    now = time.monotonic()
    tuner.search(searches, now + SEARCH_SHARE * (deadline - now))
    for search in searches:
        if search.best:
            tiles = ", ".join(f"{name} {getattr(search.best[1], name)}" for name in SWEPT[search.stage])
            tqdm.write(f"{tuner.name} {search.stage} L={search.L}: {search.best[0]:.3f} ms ({len(search.results)} tried), {tiles}")

    made = sorted((x for problem in problems.values() for x in joined(searches, base, problem)), key=lambda x: x[0])
    results = tuner.whole([*known, *(config for _, config in made)], deadline)
    reference = results.get(known[0])
    times = {config: result.ms for config, result in results.items() if result.ms is not None}
    if reference is None or reference.ms is None:
        said = "the time was up before it was timed" if reference is None else f"{reference.status}: {reference.note}"
        raise RuntimeError(f"no time of the heuristic to compare with, {said}")
    best = min(times, key=times.__getitem__)
    gain = 1 - times[best] / reference.ms
    now_ms = f", present row {times[base]:.3f}" if base in times and base != known[0] else ""
    kept = "kept" if gain >= MIN_GAIN else "no row: the heuristic is as good"
    tqdm.write(f"{tuner.name}: heuristic {reference.ms:.3f} ms{now_ms}, best {times[best]:.3f} ({100 * gain:.1f} % less): {kept}")
    return row_of(shape, dtype, best, times[best], reference.ms) if gain >= MIN_GAIN else None


# ---------------------------------------------------------------- the command


def define_flags(values: flags.FlagValues) -> None:
    """Not at import: whoever imports this module has flags of their own."""
    define = dict(flag_values=values)
    flags.DEFINE_list("shape", ["heads"], f"{', '.join(kernel_benchmark.SHAPES)}, or BxNHxSxDHQKxDHHV.", **define)
    flags.DEFINE_list("dtype", ["bfloat16"], f"Of q, k, v: {', '.join(KERNEL_DTYPES)}.", **define)
    flags.DEFINE_list("stage", [], f"Stages to search: {', '.join(STAGES)}; none: all.", **define)
    flags.DEFINE_list("chunk_size", [], "Chunk sizes to search; none: 64, 128, 256, with --stage that of the present row.", **define)
    flags.DEFINE_float("minutes", 9.0, "Time for all cases together.", lower_bound=0.0, **define)
    flags.DEFINE_string("log", "tune.jsonl", "Results of all candidates; those that it has already are not timed again.", **define)
    flags.DEFINE_string("output", None, "File of the rows; none: that of the device in mlstm_pallas/tuning.", **define)
    flags.DEFINE_enum("backend", "triton", ["triton", "interpret"], "interpret: a dry run without a GPU, with --output.", **define)
    flags.DEFINE_integer("threads", os.cpu_count() or 1, "That compile.", lower_bound=1, **define)
    flags.DEFINE_integer("repeats", 5, "Batches of calls; the median counts.", lower_bound=1, **define)
    flags.DEFINE_integer("max_spill_bytes", 512, "A thread: candidates that spill more are not run.", lower_bound=0, **define)


def parse_request(options: flags.FlagValues) -> tuple[list[tuple[Shape, str]], str]:
    """The cases and the file of the rows."""
    device, folder = jax.devices()[0], Path(mlstm_pallas.__file__).parent / "tuning"
    check_names("dtype", options.dtype, KERNEL_DTYPES)
    check_names("stage", options.stage, STAGES)
    if options.backend == "triton" and device.platform != "gpu":
        raise RequestError("there is no GPU here to tune for; --backend=interpret --output=FILE goes through the motions")
    if options.backend == "interpret" and (not options.output or folder in Path(options.output).resolve().parents):
        raise RequestError("times of interpreted kernels do not belong into mlstm_pallas/tuning: give another --output")
    for text in options.chunk_size:
        try:
            check_chunk_size(int(text))
        except ValueError as error:
            raise RequestError(str(error)) from None
    shapes = parse_shapes(options.shape)
    for name, shape in shapes.items():
        if shape[3:] != tuple(map(padded_head_dim, shape[3:])):
            raise RequestError(
                f"shape {name} is padded when it runs: tune DHQK, DHHV = {', '.join(map(str, map(padded_head_dim, shape[3:])))}"
            )
        if too_small := [L for L in map(int, options.chunk_size or [64]) if shape.S % clamp_chunk_size(L, shape.S)]:
            raise RequestError(f"shape {name}: S = {shape.S} is no multiple of the chunk size {too_small[0]}")
    output = options.output or str(folder / f"{tuning_name(device.device_kind)}.json")
    if not os.path.isdir(os.path.dirname(os.path.abspath(output))):
        raise RequestError(f"no folder for {output}")
    return list(itertools.product(shapes.values(), options.dtype)), output


def run(options: flags.FlagValues) -> int:
    """Tunes what the flags ask for; returns the exit code."""
    device = jax.devices()[0]
    try:
        cases, output = parse_request(options)
        context = dict(device=device.device_kind, jax=jax.__version__, source=source_hash(), backend=options.backend)
        log, rows = Log(options.log, context), read_tuning(output, device.device_kind)
    except (RequestError, OSError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    pruner = pruner_for(device, options.max_spill_bytes)
    start, code = time.monotonic(), 0
    end, counts = start + 60 * options.minutes, Counter()
    pool = ThreadPoolExecutor(options.threads)
    with contextlib.closing(
        tqdm(total=round(60 * options.minutes), unit="s", leave=False, mininterval=0.5 if sys.stderr.isatty() else 10)
    ) as bar:
        try:
            for n, (shape, dtype) in enumerate(cases):
                now = time.monotonic()
                bench = Bench(options.backend, shape, dtype, pruner, options.repeats)
                try:
                    row = tune(Tuner(bench, log, pool, options.threads, bar, counts), options, rows, now + (end - now) / (len(cases) - n))
                except DeviceLost as error:
                    tqdm.write(
                        f"tune: the device is lost after {error}. Run the same again: it goes on behind that candidate.", file=sys.stderr
                    )
                    return 1
                except RuntimeError as error:
                    tqdm.write(f"tune: {shape} {dtype}: {error}", file=sys.stderr)
                    code = 1
                    continue
                others = [x for x in rows if row_key(x) != (dtype, *shape[3:])]
                if [*others, *filter(None, [row])] != rows:
                    rows = [*others, *filter(None, [row])]
                    write_tuning(output, device.device_kind, rows)
        except KeyboardInterrupt:
            print(f"interrupted; what was timed is in {options.log}", file=sys.stderr)
            code = 130
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    print(f"{output}: {len(rows)} rows; candidates: {', '.join(f'{n} {status}' for status, n in sorted(counts.items()) if n) or 'none'}")
    return code


if __name__ == "__main__":
    # The plain forms are for checks alone: XLA need not look for their fastest products.
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    command.main(define_flags, run)
