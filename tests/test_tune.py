"""The tuner: candidates, checks, the log, the tuning file; processes in which Mosaic GPU candidates
run."""

import functools
import json
import multiprocessing
import os
import re
import threading
import time
from unittest import mock

import benchmark_runs
import candidates
import compile_report
import jax
import jax.numpy as jnp
import kernel_benchmark
import pytest
import tune
import worker
from candidates import Result
from mosaic_gpu_cases import needs_mosaic_gpu
from roofline import Shape
from test_compile_report import NO_SPILL, SPILL, TWICE, usage

from mlstm_pallas import KernelConfig, StageConfig, dispatch
from mlstm_pallas.config import config_from_row, heuristic_config, tuned_rows
from mlstm_pallas.problem import make_problem

SHAPE, TINY, STAGE = Shape(1, 1, 512, 64, 128), Shape(1, 2, 32, 16, 16), "recurrent_fw_C"
BF16 = jnp.dtype("bfloat16")
HEURISTIC = heuristic_config(64, BF16)
FUSED = {name for name, stage in tune.STAGES.items() if stage.fused}


def problem(L=64, shape=SHAPE):
    return make_problem(shape[:4], shape.DHHV, L, pad_heads=True)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The command in tmp_path, without a GPU."""
    monkeypatch.chdir(tmp_path)
    flags = "backend=interpret", "output=rows.json", "threads=2", "repeats=1", "minutes=5"
    common = [f"--{flag}" for flag in flags]

    def command(*arguments, shape=SHAPE):
        return benchmark_runs.run(tune, *common, f"--shape={shape}", *arguments)

    command.log = lambda: benchmark_runs.records(tmp_path / "tune.jsonl")
    command.rows = lambda: json.loads((tmp_path / "rows.json").read_text())["rows"]
    return command


# ---------------- judging


@pytest.fixture(scope="module")
def judge():
    """judge(change) is the result of a stage in plain jnp with its outputs changed."""
    bench, config = candidates.Bench("xla", TINY, "bfloat16", None, 1), KernelConfig(chunk_size=16)
    case = bench.case(STAGE)
    check = bench.compile_check(case, config, case.arrays(16))
    impl, call = bench.prepare(STAGE, config, case.arrays(16), False)
    rest = check, bench.expected(STAGE, 16, check), None
    return lambda change: bench.judge(STAGE, impl, lambda: change(call()), *rest)


def racy():
    """Right within the tolerance, and another result in the third run."""
    factors = iter([1.0] * (candidates.RUNS - 1) + [1.0 + 2.0**-6])
    return lambda x: x.at[0, 1, 3, 5].multiply(next(factors))


@pytest.mark.parametrize(
    ("name", "change", "note"),
    [
        ("matC_states", lambda x: x * 1.02, r"error [12]\.\de-02 in matC_states, at most 5e-03"),
        ("matC_last", lambda x: x * jnp.nan, "error nan in matC_last.*"),
        ("matC_states", racy(), "other bits in another run"),
    ],
    ids=["error", "nan", "race"],
)
def test_a_wrong_candidate_is_not_timed(name, change, note, judge, monkeypatch):
    result = judge(lambda outputs: outputs)
    assert (result.status, result.note, result.ms > 0) == ("ok", "", True)
    monkeypatch.setattr(candidates, "time_calls", lambda *_: pytest.fail("it was timed"))
    result = judge(lambda outputs: outputs._replace(**{name: change(getattr(outputs, name))}))
    assert result.status == "wrong"
    assert re.fullmatch(note, result.note)


def test_a_failure_is_its_candidates_only_as_long_as_the_device_answers(judge, monkeypatch):
    def fail(outputs):
        raise RuntimeError("out of memory\nhere")

    assert judge(fail) == Result("failed", note="RuntimeError: out of memory here")
    monkeypatch.setattr(candidates.jnp, "zeros", fail)
    with pytest.raises(candidates.DeviceLost, match=r"recurrent_fw_C .*out of memory"):
        judge(fail)


def test_a_whole_call_is_checked_with_its_gradients(monkeypatch):
    bench = candidates.Bench("xla", TINY, "bfloat16", None, 1)
    errors = {"fwd": {}, "fwbw": {"di": 0.03}}
    monkeypatch.setattr(candidates.Case, "errors", lambda *args: errors[args[-1]])
    impl = bench.implementation("", KernelConfig())
    result = bench.judge("", impl, lambda: (), None, None, None)
    assert result == Result("wrong", note="error 3.0e-02 in di, at most 2e-02")


@pytest.mark.parametrize(
    ("compiled", "reason"),
    [
        (usage(99 * 1024, 512), ""),
        (usage(99 * 1024 + 1), "takes 101377 bytes of shared memory, the device has 101376"),
        (usage(0, 513), "spills 513 bytes, at most 512"),
        (compile_report.CompileError("it crashed"), "it crashed"),
    ],
)
def test_what_the_compile_report_refuses_is_not_compiled(compiled, reason, monkeypatch):
    lowered = compile_report.Lowered("kernel", (1,), 4, 2, ir="ir")
    monkeypatch.setattr(compile_report, "lowered_kernels", lambda *_, device: [lowered])
    monkeypatch.setattr(compile_report, "compile_kernel", mock.Mock(side_effect=[compiled]))
    monkeypatch.setattr(candidates.MlstmPallas, "build", lambda *_: "compiled")
    pruner = candidates.Pruner(compile_report.DEVICES["L4"], 512)
    bench = candidates.Bench("xla", TINY, "bfloat16", pruner, 1)
    task = STAGE, KernelConfig(chunk_size=16), bench.case(STAGE).arrays(16)
    result = bench.prepare(*task, True)
    assert result == Result("pruned", note=reason) if reason else result[1] == "compiled"
    assert bench.prepare(*task, False)[1] == "compiled"  # as the starts are


@pytest.mark.parametrize(
    ("logs", "reason"),
    [
        ([NO_SPILL], ""),
        ([NO_SPILL, SPILL], "spills 876 bytes, at most 512"),
        ([TWICE], "every product waits for the one before: C7512, C7519"),
    ],
)
def test_what_ptxas_says_decides_whether_a_candidate_runs(logs, reason, tmp_path):
    for number, log in enumerate(logs):
        (tmp_path / f"{number}.ptxas").write_text(log)
    (tmp_path / "0.ptx").write_text("not a log")
    assert candidates.refused_by_ptxas(str(tmp_path), 512) == reason


# ---------------- whole runs, with times by a formula


class FakeBench:
    """Of either kind. A stage takes 1 ms and 0.1 more for each step from its best tiles; the whole
    is the sum, with 5 ms beside it."""

    inputs = None
    base_ms = lambda self, stage, L: 1.0  # noqa: E731
    hook = lambda self, stage, config: None  # noqa: E731, a result, or it raises

    def __init__(self, backend, shape, dtype, *_, **__):
        self.shape, self.dtype = shape, dtype

    case = compile_check = expected = arrays = lambda self, *_: self

    def prepare(self, stage, config, inputs, prune):
        return config, None

    def ms(self, stage, config):
        if not stage:
            return 5 + sum(self.ms(x, config) for x in tune.ALGORITHMS[config.fused_min_heads])
        L = min(config.stage("recurrent_fw_H").siz_b_LKV, config.L) if stage in FUSED else config.L
        best = tune.canonical(stage, StageConfig(num_warps=4, num_stages=3), problem(L, self.shape))
        tiles, steps = config.stage(stage), 0
        for name, values in dispatch.configured(stage).search.items():
            steps += abs(values.index(getattr(tiles, name)) - values.index(getattr(best, name)))
        return self.base_ms(stage, L) + 0.1 * steps

    def judge(self, stage, config, *_):
        self.judged.append((stage, config))
        return self.hook(stage, config) or Result("ok", self.ms(stage, config))


@pytest.fixture
def fake(monkeypatch):
    bench = type("Fake", (FakeBench,), dict(judged=[]))
    monkeypatch.setattr(tune, "Bench", bench)
    monkeypatch.setattr(tune, "IsolatedBench", bench)
    return bench


def timed(run, *, whole=False):
    return [line for line in run.log() if whole == (line["stage"] == "")]


def test_a_better_row_is_written_and_read_back(run, fake):
    """The scan alone takes least at the longest chunks, with the scores that it needs at 32."""
    times = {
        "parallel_fw_P": {16: 0.1, 32: 0.2, 64: 0.9, 128: 3.0},
        "recurrent_fw_H": {16: 2.0, 32: 0.5, 64: 0.2, 128: 0.1},
    }
    fake.base_ms = lambda self, stage, L: times.get(stage, {}).get(L, 1.0)
    run_heads = functools.partial(run, shape=SHAPE._replace(NH=192))
    assert run_heads() == 0
    [row] = run.rows()
    config, measured = config_from_row(row), row["measured"]
    assert set(config.stages) == {*tune.STAGES}
    scan = config.stage("recurrent_fw_H")
    assert (scan.siz_b_LKV, config.fused_min_heads * 128) == (32, 192 * scan.siz_b_DHHV)
    whole = timed(run, whole=True)
    assert {x["config"]["chunk_size"] for x in whole} == {64, 128, 256}
    assert measured["fwbw_ms"] == pytest.approx(min(x["ms"] for x in whole), abs=1e-4)
    # The present row is a start, its chunk size that of a search of one stage, and it stays.
    fake.judged.clear()
    assert run_heads("--stage=chunk_gates", "--log=other.jsonl") == 0
    (_, first), *_ = fake.judged
    tiles = tune.canonical("chunk_gates", config.stage("chunk_gates"), problem(config.L))
    assert (first.L, first.stage("chunk_gates")) == (config.L, tiles)
    assert run.rows()[0]["measured"]["fwbw_ms"] == measured["fwbw_ms"]


@pytest.mark.parametrize(("gain", "kept"), [(0.029, False), (0.031, True)])
def test_a_row_needs_three_per_cent(gain, kept, run, fake):
    heuristic = tune.as_run(HEURISTIC, problem())
    fake.hook = lambda _, stage, x: None if stage else Result("ok", 1 - gain * (x != heuristic))
    shapes = SHAPE, Shape(1, 1, 512, 16, 16)
    rows = [tune.row_of(shape, "bfloat16", heuristic, 1.0, 1.0) for shape in shapes]
    rows[0] |= {"mosaic_gpu": {"chunk_size": 128}}
    tune.write_tuning("rows.json", "cpu", rows)
    assert run("--stage=chunk_gates,parallel_fw_H") == 0
    *tuned, other = sorted(run.rows(), key=lambda row: -row["DHQK"])
    assert other == rows[1]
    # A row that gains nothing is removed; a new one has what is for Mosaic GPU.
    assert [row["mosaic_gpu"] for row in tuned] == [rows[0]["mosaic_gpu"]] * kept


def test_an_interrupted_sweep_goes_on_where_it_was(run, fake, monkeypatch, capsys):
    run = functools.partial(run, "--stage=parallel_fw_H,chunk_gates")

    def hook(self, *_):
        if len(self.judged) == 41:
            raise KeyboardInterrupt

    fake.hook = hook
    assert run() == 130
    assert "interrupted; what was timed is in tune.jsonl" in capsys.readouterr().err
    assert not os.path.exists("rows.json")
    *before, _ = fake.judged
    log = run.func.log()
    assert [(x["stage"], x["config"]) for x in log] == [(x, y.as_row()) for x, y in before]
    with open("tune.jsonl", "a") as file:
        file.write('{"context": {"dev')  # killed in the middle of a write

    fake.hook = FakeBench.hook
    del fake.judged[:]
    assert run() == 0
    assert not {*fake.judged} & {*before}
    resumed = [*before, *fake.judged]
    os.unlink("rows.json")
    monkeypatch.setattr(tune, "source_hash", lambda: "other")  # nothing counts for other code
    del fake.judged[:]
    assert run() == 0
    resumed, again = ([case for case in cases if case[0]] for cases in (resumed, fake.judged))
    assert resumed == again


def test_without_time_there_is_no_row(run, fake, capsys):
    assert run("--minutes=0") == 1
    assert "no time of the heuristic to compare with" in capsys.readouterr().err
    assert not os.path.exists("rows.json")


def test_a_compiler_that_hangs_costs_its_candidate(run, fake, monkeypatch):
    released = threading.Event()

    def prepare(self, stage, config, *_):
        if stage and config.stage("chunk_gates").num_warps == 2:
            released.wait(20)
        return config, None

    monkeypatch.setattr(tune, "COMPILE_SECONDS", 0.3)
    fake.prepare = prepare
    assert run("--stage=chunk_gates", "--chunk_size=16", "--threads=8") == 0
    released.set()
    by_warps = {(x["config"]["chunk_gates"]["num_warps"], x["note"][:12]) for x in timed(run)}
    assert {(1, ""), (2, "not compiled")} <= by_warps
    assert (2, "") not in by_warps


def test_a_lost_device_ends_the_run_and_its_candidate(run, fake, capsys):
    def hook(self, *_):
        if len(self.judged) == 7:
            raise candidates.DeviceLost("an illegal address")

    fake.hook = hook
    assert run("--stage=chunk_gates") == 1
    assert "the device is lost after an illegal address" in capsys.readouterr().err
    lost = fake.judged[-1]
    assert run.log()[-1]["status"] == "failed"
    assert run("--stage=chunk_gates") == 0
    assert fake.judged.count(lost) == 1


def test_rows_of_another_device_are_left_alone(run, capsys):
    tune.write_tuning("rows.json", "NVIDIA H200", [])
    assert run() == 2
    assert "rows.json is of NVIDIA H200, this is cpu" in capsys.readouterr().err


# ---------------- Mosaic GPU

WIDE = Shape(1, 64, 512, 256, 512)  # whose forward pass is the fused scan


def tuned_row(*heads):
    [row] = [x for x in tuned_rows("NVIDIA H200") if tune.row_key(x) == ("bfloat16", *heads)]
    return row


WIDE_ROW = tuned_row(256, 512)


def mosaic_gpu_search(stage, row=WIDE_ROW):
    spec = functools.partial(kernel_benchmark.call_spec, "mosaic_gpu", WIDE, "bfloat16")
    config = config_from_row(row).or_else(heuristic_config(256, BF16))
    return tune.MosaicGpuSearch(stage, config, spec)


@functools.cache
def tiles_of(stage):
    """The heuristic's tiles, and others that run where there are some."""
    search = mosaic_gpu_search(stage)
    near = tune.neighbours(search.starts[0], search.values, search.canonical)
    return search.starts[0], next(filter(search.takes, near), None)


WIDE_STAGES = kernel_benchmark.call_spec(
    "mosaic_gpu", WIDE, "bfloat16", config_from_row(WIDE_ROW)
).stages
MOSAIC_GPU = [stage for stage in tune.mosaic_gpu_stages() if stage in WIDE_STAGES]
TUNABLE = [stage for stage in MOSAIC_GPU if tiles_of(stage)[1]]


def row_with_other_tiles(stages):
    """WIDE_ROW with other tiles for Mosaic GPU than the heuristic's."""
    row = dict(WIDE_ROW)
    for stage in stages:
        names, tiles = tune.mosaic_gpu_kernel(stage).search, tiles_of(stage)[1]
        row[stage] = row[stage] | {"mosaic_gpu": {name: getattr(tiles, name) for name in names}}
    return row


@pytest.mark.parametrize("stage", tune.mosaic_gpu_stages())
def test_candidates_for_mosaic_gpu_are_tiles_that_the_kernel_takes(stage):
    search = mosaic_gpu_search(stage)
    values, seen = tune.mosaic_gpu_kernel(stage).search, []
    while tried := search.next_round():
        assert len(tried) <= tune.MOSAIC_GPU_ROUND
        assert not {*tried} & {*seen}
        seen += tried
        search.results |= {tiles: Result("ok", 1.0 + len(seen)) for tiles in tried}
    for tiles in seen:
        assert all(getattr(tiles, name) in values[name] for name in values)
        config = search.candidate(tiles)
        row = config_from_row(config.as_row())
        impl = candidates.implementation(stage, "mosaic_gpu", WIDE, "bfloat16", None, row)
        assert impl.call.lowering.folder == "mosaic_gpu"
        assert search.canonical(impl.call.tiles) == search.tiles(config) == tiles
    if stage in TUNABLE:  # the heuristic is tried first and the present tiles with it
        assert mosaic_gpu_search(stage, row_with_other_tiles([stage])).starts == [*tiles_of(stage)]


@pytest.fixture
def run_mosaic_gpu(run, fake, monkeypatch):
    """The command with fake processes, ``run.workers``, on a file with WIDE_ROW.

    The heuristic's tiles take 1 ms, others what ``ms`` says.
    """
    # It refuses an older jax.
    monkeypatch.setattr(tune, "requested_backend", lambda backend: backend)
    tune.write_tuning("rows.json", "cpu", [WIDE_ROW])

    def command(*arguments, ms=lambda stage: 2.0):
        def stage_ms(self, stage, config):
            return 1.0 if config.stage(stage).mosaic_gpu == tiles_of(stage)[0] else ms(stage)

        fake.ms = stage_ms
        run.workers = {stage: mock.Mock() for stage in MOSAIC_GPU}
        monkeypatch.setattr(tune, "stage_workers", lambda *_: run.workers)
        code = run("--backend=mosaic_gpu_interpret", *arguments, shape=WIDE)
        assert all(worker.close.called for worker in run.workers.values())
        return code

    return command


def test_tiles_for_mosaic_gpu_are_written_and_removed_beside_those_of_triton(
    run, run_mosaic_gpu, fake
):
    first, second, *_ = TUNABLE

    def row_and_times():
        [row] = run.rows()
        return row, row["measured"].pop("mosaic_gpu", {})

    assert run_mosaic_gpu(ms=lambda stage: 0.5 if stage in (first, second) else 0.98) == 0
    row, measured = row_and_times()
    assert (row, {*measured}) == (row_with_other_tiles([first, second]), {first, second})
    times = dict(ms=0.5, heuristic_ms=1, jax=jax.__version__)
    assert times.items() <= measured[first].items()
    assert {stage for stage, _ in fake.judged} == {*MOSAIC_GPU}
    # Those that gain nothing any more are removed.
    assert run_mosaic_gpu(f"--stage={first}", "--log=other.jsonl", ms=lambda stage: 0.98) == 0
    row, measured = row_and_times()
    assert (row, {*measured}) == (row_with_other_tiles([second]), {second})
    assert run_mosaic_gpu("--log=another.jsonl") == 0
    assert run.rows() == [WIDE_ROW]


@pytest.mark.parametrize(("chunk_size", "kept"), [(256, True), (128, False)])
def test_a_row_for_triton_keeps_the_tiles_for_mosaic_gpu_of_its_chunk_size(chunk_size, kept):
    times = {"mosaic_gpu": {TUNABLE[0]: {"ms": 0.5}}}
    present = row_with_other_tiles(TUNABLE) | {"measured": {"fwbw_ms": 1.0, **times}}
    new = WIDE_ROW | {"chunk_size": chunk_size, "measured": {"fwbw_ms": 2.0}}
    expected = present | {"measured": {"fwbw_ms": 2.0, **times}} if kept else new
    assert tune.with_mosaic_gpu(new, present) == expected
    assert tune.with_mosaic_gpu(new, WIDE_ROW) == new


def test_a_candidate_that_hangs_has_a_result_and_another_is_prepared_again():
    """As its process was killed."""
    ask = mock.Mock(side_effect=[worker.NoAnswer("slow"), worker.ProcessEnded("gone")])
    limits = dict(compile_seconds=1.0, run_seconds=1.0)
    bench = candidates.IsolatedBench({STAGE: ask}, WIDE, "bfloat16", float("inf"), **limits)
    judge = functools.partial(bench.judge, STAGE, HEURISTIC, *[None] * 4)
    assert [judge(), judge()] == [Result("hangs", note="slow"), Result("failed", note="gone")]
    ask.side_effect = [None, None, ("ok", 1.0, "")]
    assert judge() == Result("ok", 1.0)
    asked = [call.args[0] for call in ask.call_args_list]
    assert asked == ["judge", "judge", "judge", "prepare", "judge"]


def test_a_worker_answers_and_starts_again_after_a_call_that_does_not_end(monkeypatch):
    monkeypatch.setenv("INHERITED", "here")
    sleeping, reading = worker.Worker(time.sleep), worker.Worker(os.getenv, {"OTHER": "there"})
    with pytest.raises(worker.NoAnswer, match=r"no answer within 0\.1 s"):
        sleeping(600, seconds=0.1)
    assert not multiprocessing.active_children()
    with pytest.raises(worker.ProcessEnded, match="TypeError"):
        sleeping("a while", seconds=30)
    with pytest.raises(worker.ProcessEnded, match="the process ended with exit code 3"):
        worker.Worker(os._exit)(3, seconds=30)
    assert sleeping(0.0, seconds=30) is None
    assert [reading(name, seconds=30) for name in ("OTHER", "INHERITED")] == ["there", "here"]
    assert "OTHER" not in os.environ
    reading.close()
    # A call in another thread ends when the worker is closed.
    threading.Timer(0.1, sleeping.close).start()
    for _ in range(2):
        with pytest.raises(worker.ProcessEnded):
            sleeping(600, seconds=600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "stage", "shape"),
    [
        # The shapes of its outputs depend on the tiles.
        ("interpret", "parallel_bw_dP", Shape(1, 1, 16, 16, 16)),
        pytest.param(
            *("mosaic_gpu_interpret", "recurrent_fw_H", Shape(1, 2, 128, 128, 128)),
            marks=needs_mosaic_gpu,
        ),
    ],
)
def test_a_dry_run_of_real_kernels(backend, stage, shape, run):
    """Those of Mosaic GPU in their processes."""
    # So few heads have the fused scan.
    tune.write_tuning("rows.json", "cpu", [tuned_row(128, 128) | {"fused_min_heads": 1}])
    request = f"--backend={backend}", f"--stage={stage}", "--run_seconds=300"
    assert run(*request, shape=shape) == 0
    assert len(timed(run)) > 1  # the heuristic and another
    assert {(line["status"], line["note"]) for line in run.log()} == {("ok", "")}
