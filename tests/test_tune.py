"""The tuner: candidates, checks, the log, the tuning file, requests; processes in which Mosaic GPU
candidates run."""

import functools
import importlib
import itertools
import json
import os
import re
import threading
import time
from collections import Counter

import candidates
import compile_report
import jax
import jax.numpy as jnp
import kernel_benchmark
import numpy as np
import pytest
import tune
import worker
from absl import flags
from roofline import Shape
from test_compile_report import NO_SPILL, SPILL, TWICE

from mlstm_pallas import KernelConfig, StageConfig, dispatch
from mlstm_pallas.backend import jax_has_mosaic_gpu
from mlstm_pallas.config import config_from_row, heuristic_config, tuned_rows
from mlstm_pallas.problem import make_problem

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = Shape(1, 1, 512, 64, 128)
BF16 = jnp.dtype("bfloat16")
STAGES = tuple(tune.STAGES)
FUSED = tuple(name for name, stage in tune.STAGES.items() if stage.fused)


def problem(L=64, shape=SHAPE):
    return make_problem(shape[:4], shape.DHHV, L, pad_heads=True)


def parse(*arguments):
    values = flags.FlagValues()
    tune.define_flags(values)
    values(["tune", *arguments])
    return values


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The command in tmp_path, without a GPU."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments, shape=SHAPE):
        return tune.run(
            parse(
                "--backend=interpret",
                "--output=rows.json",
                f"--shape={shape}",
                "--threads=2",
                "--repeats=1",
                *arguments,
            )
        )

    return command


def log_lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "tune.jsonl").read_text().splitlines()]


def rows_in(path):
    return json.loads(path.read_text())["rows"]


# ---------------- candidates


@pytest.mark.parametrize("stage", STAGES)
def test_neighbours_run_are_distinct_and_near_ones_come_first(stage):
    search = dispatch.configured(stage).search
    start = tune.canonical(stage, heuristic_config(64, BF16).stage(stage), problem())
    outcome = list(
        tune.neighbours(start, search, lambda tiles: tune.canonical(stage, tiles, problem()))
    )
    assert outcome
    assert len(set(outcome)) == len(outcome)
    assert start not in outcome
    assert all(tune.canonical(stage, tiles, problem()) == tiles for tiles in outcome)
    distances = [
        sum(getattr(tiles, name) != getattr(start, name) for name in search) for tiles in outcome
    ]
    assert distances == sorted(distances)
    assert set(distances) <= {1, 2}
    for name, values in search.items():
        assert {getattr(tiles, name) for tiles in outcome} <= {*values, getattr(start, name)}


def test_the_algorithms_are_those_of_the_schedules():
    assert {0: {"recurrent_fw_C", "parallel_fw_H"}, 1: set(FUSED)} == tune.OWN_STAGES
    assert all(stages.count("chunk_gates") == 2 for stages in tune.ALGORITHMS.values())
    assert set(itertools.chain(*tune.ALGORITHMS.values())) == set(STAGES)


def test_tiles_that_are_the_same_kernel_are_one_candidate():
    wide = StageConfig(siz_b_LQ=256, siz_b_LKV=256, siz_b_DHQK=256, siz_b_DHHV=32, num_warps=8)
    clamped = tune.canonical("parallel_bw_dQKV", wide, problem(32))
    assert clamped == StageConfig(
        siz_b_LQ=32, siz_b_DHQK=64, siz_b_DHHV=32, num_warps=8
    )  # dQKV has no siz_b_LKV
    assert tune.canonical("parallel_fw_H", wide, problem(64)).siz_b_LQ == 64


def distance(tiles, best, stage):
    """In steps."""
    search = dispatch.configured(stage).search
    at = [
        [values.index(getattr(x, name)) for name, values in search.items()] for x in (tiles, best)
    ]
    return float(np.abs(np.subtract(*at)).sum())


def test_what_is_wrong_or_pruned_is_never_the_best():
    search = tune.Search("chunk_gates", problem(), [StageConfig(siz_b_LQ=32)])
    [start] = search.next_round()
    search.results[start] = candidates.Result("wrong", note="error")
    assert search.best is None
    around = search.next_round()
    assert start not in around
    search.results |= dict.fromkeys(around, candidates.Result("pruned")) | {
        around[1]: candidates.Result("ok", 2.0)
    }
    assert search.best == (2.0, around[1])


# ---------------- judging


TINY, STAGE = Shape(1, 2, 32, 16, 16), "recurrent_fw_C"


def checked(bench, stage, L):
    """The check of a stage, and what it expects."""
    inputs = bench.case(stage).arrays(L)
    check = bench.compile_check(bench.case(stage), candidate_of(bench, stage, L), inputs)
    return check, bench.expected(stage, L, check)


def candidate_of(bench, stage, L, **tiles):
    start = heuristic_config(bench.shape.DHQK, BF16).stage(stage).replace(**tiles)
    search = tune.Search(stage, problem(L, bench.shape), [start])
    return search.candidate(search.starts[0])


@pytest.fixture(scope="module")
def judge():
    """judge(change) is the result of a stage in plain jnp with its outputs changed."""
    bench = candidates.Bench("xla", TINY, "bfloat16", None, 1)
    impl, call = bench.prepare(
        STAGE, candidate_of(bench, STAGE, 16), bench.case(STAGE).arrays(16), False
    )
    check, expected = checked(bench, STAGE, 16)
    return lambda change: bench.judge(STAGE, impl, lambda: change(call()), check, expected, None)


def test_a_right_candidate_is_timed(judge):
    result = judge(lambda outputs: outputs)
    assert (result.status, result.note) == ("ok", "")
    assert result.ms > 0


def test_a_wrong_candidate_is_not_timed(judge, monkeypatch):
    monkeypatch.setattr(
        candidates, "time_calls", lambda *_: pytest.fail("a wrong output was timed")
    )
    result = judge(lambda outputs: outputs._replace(matC_states=outputs.matC_states * 1.02))
    assert result.status == "wrong"
    assert re.fullmatch(r"error [12]\.\de-02 in matC_states, at most 5e-03", result.note)
    assert judge(
        lambda outputs: outputs._replace(matC_last=outputs.matC_last * jnp.nan)
    ).note.startswith("error nan in matC_last")


def test_a_candidate_that_does_not_repeat_its_bits_is_wrong(judge, monkeypatch):
    """A race: right within the tolerance, and another result in the third run."""
    monkeypatch.setattr(
        candidates, "time_calls", lambda *_: pytest.fail("a wrong output was timed")
    )
    runs = iter(range(candidates.RUNS))

    def racy(outputs):
        factor = 1.0 + 2.0**-6 * (next(runs) == candidates.RUNS - 1)
        return outputs._replace(matC_states=outputs.matC_states.at[0, 1, 3, 5].multiply(factor))

    assert judge(racy) == candidates.Result("wrong", note="other bits in another run")


@pytest.mark.parametrize("stage", FUSED)
def test_a_fused_stage_is_checked_at_its_own_chunks(stage):
    bench = candidates.Bench("interpret", TINY, "bfloat16", None, 1)
    prepared = bench.prepare(
        stage, candidate_of(bench, stage, 16), bench.case(stage).arrays(16), False
    )
    assert prepared[0].call.problem.L == 16
    assert bench.judge(stage, *prepared, *checked(bench, stage, 16), None).status == "ok"


@pytest.mark.parametrize("siz_b_LQ", [16, 32])
def test_candidates_whose_outputs_have_other_shapes_share_a_check(siz_b_LQ):
    """parallel_bw_dP has sums for each tile of siz_b_LQ steps."""
    bench, stage = candidates.Bench("interpret", TINY, "bfloat16", None, 1), "parallel_bw_dP"
    check, expected = checked(bench, stage, 32)  # compiled for the heuristic's tiles
    prepared = bench.prepare(
        stage,
        candidate_of(bench, stage, 32, siz_b_LQ=siz_b_LQ),
        bench.case(stage).arrays(32),
        False,
    )
    assert prepared[0].call.tiles.siz_b_LQ == siz_b_LQ
    result = bench.judge(stage, *prepared, check, expected, None)
    assert (result.status, result.note) == ("ok", "")


def test_recurrent_bw_dC_is_timed_with_both_recurrences_in_one_launch():
    """As it runs in a backward pass that recomputes the states."""
    bench = candidates.Bench("interpret", TINY, "bfloat16", None, 1)
    impl = bench.implementation("recurrent_bw_dC", candidate_of(bench, "recurrent_bw_dC", 16))
    inputs = jax.eval_shape(lambda: bench.case("recurrent_bw_dC").arrays(16))
    function, args = impl.computation(inputs, "fwd")
    states = (2, 2, 16, 16)
    outputs = jax.eval_shape(function, *args)
    assert outputs.matC_states.shape == outputs.matDeltaC_states.shape == states
    [launch] = [
        eqn for eqn in jax.make_jaxpr(function)(*args).eqns if eqn.primitive.name == "pallas_call"
    ]
    assert launch.params["name"] == "recurrent_bw_dC"
    assert [x.aval.shape for x in launch.outvars].count(states) == 2


def test_a_failure_is_its_candidates_only_as_long_as_the_device_answers(judge, monkeypatch):
    def fail(outputs):
        raise RuntimeError("out of memory\nhere")

    assert judge(fail) == candidates.Result("failed", note="RuntimeError: out of memory here")
    monkeypatch.setattr(candidates.jnp, "zeros", fail)
    with pytest.raises(candidates.DeviceLost, match=r"recurrent_fw_C .*out of memory"):
        judge(fail)


def test_the_whole_is_checked_with_its_gradients():
    bench = candidates.Bench("xla", Shape(1, 1, 16, 16, 16), "float32", None, 1)
    heuristic = heuristic_config(16, jnp.dtype("float32"))
    whole = tune.as_run(heuristic, problem(16, bench.shape))
    impl, call = bench.prepare("", whole, bench.case("").inputs, False)
    check = bench.compile_check(bench.case(""), whole, None)
    assert bench.judge("", impl, call, check, None, None).status == "ok"
    wrong = bench.judge(
        "", impl, lambda: (*call()[:4], call()[4] * 1.001, call()[5]), check, None, None
    )
    assert (wrong.status, wrong.note) == ("wrong", "error 1.0e-03 in di, at most 1e-04")


def test_what_the_compile_report_refuses_is_not_compiled(monkeypatch):
    bench = candidates.Bench(
        "xla", TINY, "bfloat16", lambda function, args: "spills 9999 bytes, at most 512", 1
    )
    inputs = bench.case(STAGE).arrays(16)
    monkeypatch.setattr(candidates.MlstmPallas, "build", lambda *_: pytest.fail("compiled"))
    config = KernelConfig(chunk_size=16)
    assert bench.prepare(STAGE, config, inputs, True) == candidates.Result(
        "pruned", note="spills 9999 bytes, at most 512"
    )
    with pytest.raises(pytest.fail.Exception, match="compiled"):  # as the starts are
        bench.prepare(STAGE, config, inputs, False)


def fake_usage(shared=0, spills=0):
    return compile_report.Usage(128, spills, spills, shared, 4, 0, 24, False, 0.1)


@pytest.mark.parametrize(
    ("usage", "reason"),
    [
        (fake_usage(99 * 1024, 512), ""),
        (fake_usage(99 * 1024 + 1), "takes 101377 bytes of shared memory, the device has 101376"),
        (fake_usage(0, 513), "spills 513 bytes, at most 512"),
        (compile_report.CompileError("the compiler crashed"), "the compiler crashed"),
    ],
)
def test_the_compile_report_decides_by_shared_memory_and_spills(usage, reason, monkeypatch):
    def compile_kernel(*_):
        if isinstance(usage, Exception):
            raise usage
        return usage

    lowered = compile_report.Lowered("kernel", (1,), 4, 2, ir="ir")
    monkeypatch.setattr(compile_report, "lowered_kernels", lambda *_, device: [lowered])
    monkeypatch.setattr(compile_report, "compile_kernel", compile_kernel)
    assert candidates.Pruner(compile_report.DEVICES["L4"], 512)(None, [jnp.zeros(3)]) == reason


# ---------------- whole runs, with times by a formula


class FakeBench:
    """Times by a formula: a stage takes 1 ms and 0.1 more for each step from its best tiles; the
    whole is the sum, with 5 ms beside it."""

    judged: list
    stage_ms = staticmethod(lambda stage, L: 1.0)
    clock = staticmethod(lambda: None)
    arrays = staticmethod(lambda L: None)
    inputs = None

    def __init__(self, backend, shape, dtype, pruner, repeats):
        self.shape, self.dtype = shape, dtype

    def case(self, stage):
        return self

    def compile_check(self, case, config, inputs):
        return None

    def expected(self, stage, L, check):
        return None

    def prepare(self, stage, config, inputs, prune):
        return config, None

    def time_of(self, stage, config):
        L = min(config.stage("recurrent_fw_H").siz_b_LKV, config.L) if stage in FUSED else config.L
        best = tune.canonical(stage, StageConfig(num_warps=4, num_stages=3), problem(L, self.shape))
        return self.stage_ms(stage, L) + 0.1 * distance(config.stage(stage), best, stage)

    def judge(self, stage, config, call, check, expected, best):
        self.clock()
        self.judged.append((stage, json.dumps(config.as_row())))
        if stage:
            return candidates.Result("ok", self.time_of(stage, config))
        return candidates.Result(
            "ok",
            5
            + sum(self.time_of(stage, config) for stage in tune.ALGORITHMS[config.fused_min_heads]),
        )


@pytest.fixture
def fake(monkeypatch):
    class Fake(FakeBench):
        judged = []  # noqa: RUF012, a fresh one for each test

    monkeypatch.setattr(tune, "Bench", Fake)
    return Fake


def test_a_better_row_is_written_and_read_back(run, fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        fake, "stage_ms", staticmethod(lambda stage, L: 2.0 if stage == "recurrent_fw_H" else 1.0)
    )
    assert run("--minutes=5") == 0
    [row] = rows_in(tmp_path / "rows.json")
    assert (row["DHQK"], row["DHHV"], row["dtype"]) == (64, 128, "bfloat16")
    config = config_from_row(row)
    assert set(config.stages) == set(STAGES)
    assert config.fused_min_heads == 0
    assert row["measured"]["fwbw_ms"] <= 0.97 * row["measured"]["heuristic_fwbw_ms"]
    whole = [line for line in log_lines(tmp_path) if line["stage"] == ""]
    assert row["measured"]["fwbw_ms"] == pytest.approx(min(line["ms"] for line in whole), abs=1e-4)
    algorithms = {
        (line["config"]["chunk_size"], line["config"]["fused_min_heads"]) for line in whole
    }
    assert algorithms == set(itertools.product((64, 128, 256), (0, 1)))
    assert "kept" in capsys.readouterr().out


@pytest.mark.parametrize(("gain", "kept"), [(0.029, False), (0.031, True)])
def test_a_row_needs_three_per_cent(gain, kept, run, fake, tmp_path, monkeypatch):
    heuristic = tune.as_run(heuristic_config(64, BF16), problem())
    real = fake.judge

    def judge(self, stage, config, *rest):
        result = real(self, stage, config, *rest)
        return (
            result if stage else candidates.Result("ok", 1.0 if config == heuristic else 1 - gain)
        )

    monkeypatch.setattr(fake, "judge", judge)
    present = tune.row_of(SHAPE, "bfloat16", heuristic, 1.0, 1.0)
    other = tune.row_of(Shape(1, 1, 512, 16, 16), "bfloat16", heuristic, 1.0, 1.0)
    tune.write_tuning(str(tmp_path / "rows.json"), "cpu", [present, other])
    assert run("--minutes=5", "--stage=chunk_gates,parallel_fw_H") == 0
    rows = rows_in(tmp_path / "rows.json")
    assert other in rows
    assert len(rows) == 1 + kept  # a row that gains nothing is removed


def test_the_present_row_is_a_start_and_stays_unless_beaten(run, fake, tmp_path):
    assert run("--minutes=5") == 0
    first = rows_in(tmp_path / "rows.json")
    (tmp_path / "tune.jsonl").unlink()
    fake.judged.clear()
    assert run("--minutes=5", "--stage=chunk_gates") == 0
    assert json.loads(fake.judged[0][1])["chunk_gates"] == first[0]["chunk_gates"]
    assert {json.loads(config)["chunk_size"] for stage, config in fake.judged if stage} == {
        first[0]["chunk_size"]
    }
    assert (
        rows_in(tmp_path / "rows.json")[0]["measured"]["fwbw_ms"] == first[0]["measured"]["fwbw_ms"]
    )


def test_an_interrupted_sweep_goes_on_where_it_was(run, fake, tmp_path, monkeypatch, capsys):
    real = fake.judge

    def judge(self, *args):
        if len(self.judged) == 40:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(fake, "judge", judge)
    assert run("--minutes=5", "--stage=parallel_fw_H,chunk_gates") == 130
    assert "interrupted; what was timed is in tune.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "rows.json").exists()
    before = list(fake.judged)
    assert [(line["stage"], json.dumps(line["config"])) for line in log_lines(tmp_path)] == before
    with open(tmp_path / "tune.jsonl", "a") as file:
        file.write('{"context": {"dev')  # killed in the middle of a write

    monkeypatch.setattr(fake, "judge", real)
    fake.judged.clear()
    assert run("--minutes=5", "--stage=parallel_fw_H,chunk_gates") == 0
    assert not set(fake.judged) & set(before)
    resumed = [*before, *fake.judged]
    fake.judged.clear()
    (tmp_path / "rows.json").unlink()
    assert run("--minutes=5", "--stage=parallel_fw_H,chunk_gates", "--log=other.jsonl") == 0
    assert [case for case in resumed if case[0]] == [case for case in fake.judged if case[0]]


def test_results_of_other_code_do_not_count(run, fake, monkeypatch):
    assert run("--minutes=5", "--stage=chunk_gates") == 0
    fake.judged.clear()
    assert run("--minutes=5", "--stage=chunk_gates") == 0
    assert (
        Counter(stage for stage, _ in fake.judged)["chunk_gates"] == 0
    )  # the whole is what a row is decided by: timed again
    fake.judged.clear()
    monkeypatch.setattr(tune, "source_hash", lambda: "other")
    assert run("--minutes=5", "--stage=chunk_gates") == 0
    assert Counter(stage for stage, _ in fake.judged)["chunk_gates"] > 3


def test_time_is_bounded_and_shared_by_the_cases(run, fake, monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])

    def tick():
        now[0] += 0.5

    monkeypatch.setattr(fake, "clock", staticmethod(tick))
    assert run("--minutes=2", "--dtype=bfloat16,float32") == 0
    assert 60 < now[0] <= 121
    cases = Counter((line["case"], bool(line["stage"])) for line in log_lines(tmp_path))
    for dtype in ("bfloat16", "float32"):
        assert cases[f"{SHAPE} {dtype}", True] > 50
        assert cases[f"{SHAPE} {dtype}", False] > 3  # the time for the whole is kept back
    assert len(rows_in(tmp_path / "rows.json")) == 2


def test_without_time_there_is_no_row(run, fake, tmp_path, capsys):
    assert run("--minutes=0") == 1
    assert "no time of the heuristic to compare with" in capsys.readouterr().err
    assert not (tmp_path / "rows.json").exists()


def at_their_best_chunks(stage, L):
    """The scan alone takes least at the longest chunks, with the scores that it needs at 32."""
    times = {
        "parallel_fw_P": {16: 0.1, 32: 0.2, 64: 0.9, 128: 3.0},
        "recurrent_fw_H": {16: 2.0, 32: 0.5, 64: 0.2, 128: 0.1},
    }
    return times[stage][L] if stage in times else 1.0


def test_the_fused_scan_has_the_chunks_where_its_stages_take_least_together(
    run, fake, tmp_path, monkeypatch
):
    monkeypatch.setattr(fake, "stage_ms", staticmethod(at_their_best_chunks))
    assert run("--minutes=5") == 0
    [row] = rows_in(tmp_path / "rows.json")
    scan = config_from_row(row).stage("recurrent_fw_H")
    assert row["fused_min_heads"] * (128 // scan.siz_b_DHHV) == tune.FUSED_MIN_CTAS
    assert scan.siz_b_LKV == 32
    tried = [
        (line["stage"], line["config"]) for line in log_lines(tmp_path) if line["stage"] in FUSED
    ]
    assert all(
        config["chunk_size"] == config["recurrent_fw_H"]["siz_b_LKV"] for stage, config in tried
    )
    assert {(stage, config["chunk_size"]) for stage, config in tried} == set(
        itertools.product(FUSED, (16, 32, 64, 128))
    )


@pytest.mark.parametrize(
    ("broken", "algorithms"),
    [("parallel_bw_dQKV", {0, 1}), ("parallel_fw_P", {0})],
)
def test_a_stage_that_never_runs_leaves_time_for_the_others(
    broken, algorithms, run, fake, tmp_path, monkeypatch
):
    """Its algorithm is not tried; a stage of both has the tiles of the heuristic."""
    real = fake.judge

    def judge(self, stage, *rest):
        return (
            candidates.Result("failed", note="no") if stage == broken else real(self, stage, *rest)
        )

    monkeypatch.setattr(fake, "judge", judge)
    assert run("--minutes=5") == 0
    tried = Counter(line["stage"] for line in log_lines(tmp_path))
    assert 0 < tried[broken] <= 4 * 3 * tune.ROUND
    assert tried["recurrent_fw_C"] > tune.ROUND
    _, *whole = [
        line["config"] for line in log_lines(tmp_path) if line["stage"] == ""
    ]  # the heuristic comes first
    assert {config["fused_min_heads"] for config in whole} == algorithms
    heuristic = heuristic_config(64, BF16).stage(broken)
    for config in whole:
        assert StageConfig(**config[broken]) == tune.canonical(
            broken, heuristic, problem(32 if broken in FUSED else config["chunk_size"])
        )


def test_a_compiler_that_hangs_costs_its_candidate(run, fake, tmp_path, monkeypatch):
    released, real = threading.Event(), fake.prepare

    def prepare(self, stage, config, *rest):
        if stage and config.stage("chunk_gates").num_warps == 2:
            released.wait(20)
        return real(self, stage, config, *rest)

    monkeypatch.setattr(tune, "COMPILE_SECONDS", 0.3)
    monkeypatch.setattr(fake, "prepare", prepare)
    assert run("--minutes=5", "--stage=chunk_gates", "--chunk_size=16", "--threads=8") == 0
    released.set()
    by_warps = {}
    for line in log_lines(tmp_path):
        if line["stage"]:
            by_warps.setdefault(line["config"]["chunk_gates"]["num_warps"], set()).add(
                (line["status"], line["note"])
            )
    assert by_warps[1] == {("ok", "")}
    assert {status for status, _ in by_warps[2]} == {"failed"}
    assert all(note.startswith("not compiled within 0.") for _, note in by_warps[2])


def test_a_lost_device_ends_the_run_and_its_candidate(run, fake, tmp_path, monkeypatch, capsys):
    real = fake.judge

    def judge(self, stage, config, *rest):
        result = real(self, stage, config, *rest)
        if len(self.judged) == 7:
            raise candidates.DeviceLost("an illegal address")
        return result

    monkeypatch.setattr(fake, "judge", judge)
    assert run("--minutes=5", "--stage=chunk_gates") == 1
    assert "the device is lost after an illegal address" in capsys.readouterr().err
    lost = fake.judged[-1]
    assert log_lines(tmp_path)[-1]["status"] == "failed"
    assert run("--minutes=5", "--stage=chunk_gates") == 0
    assert fake.judged.count(lost) == 1


def test_a_dry_run_of_real_kernels(run, tmp_path, monkeypatch, capsys, request):
    """Interpreted on the CPU; whole calls, which would take long to compile, have times by a
    formula."""
    few = {"siz_b_LQ": (16,), "num_warps": (1, 2), "num_stages": (1,)}
    kernel = compile_report.dataclasses.replace(dispatch.configured("chunk_gates"), search=few)
    monkeypatch.setattr("mlstm_pallas.triton.chunk_gates.KERNEL", kernel)
    dispatch._facts.cache_clear()
    request.addfinalizer(dispatch._facts.cache_clear)
    prepare, judge = candidates.Bench.prepare, candidates.Bench.judge

    def prepare_stage(self, stage, config, *rest):
        return prepare(self, stage, config, *rest) if stage else (config, None)

    def judge_stage(self, stage, impl, *rest):
        return (
            judge(self, stage, impl, *rest)
            if stage
            else candidates.Result("ok", 2.0 - (impl.stage("chunk_gates").num_warps == 2))
        )

    monkeypatch.setattr(candidates.Bench, "prepare", prepare_stage)
    monkeypatch.setattr(candidates.Bench, "judge", judge_stage)
    monkeypatch.setattr(candidates.Case, "expected", lambda *_: None)
    assert run("--minutes=5", "--stage=chunk_gates", "--chunk_size=16", shape=TINY) == 0
    lines = log_lines(tmp_path)
    assert [
        (line["config"]["chunk_gates"]["num_warps"], line["status"])
        for line in lines
        if line["stage"]
    ] == [(1, "ok"), (2, "ok")]
    assert "nothing is pruned by the compile report: there is no GPU" in capsys.readouterr().out


# ---------------- Mosaic GPU

MOSAIC_GPU = tune.mosaic_gpu_stages()
WIDE = Shape(1, 64, 512, 256, 512)  # at which all Mosaic GPU kernels run
[WIDE_ROW] = [
    row for row in tuned_rows("NVIDIA H200") if tune.row_key(row) == ("bfloat16", 256, 512)
]


def mosaic_gpu_search(stage, shape=WIDE):
    spec = functools.partial(kernel_benchmark.call_spec, "mosaic_gpu", shape, "bfloat16")
    return tune.MosaicGpuSearch(
        stage, config_from_row(WIDE_ROW).or_else(heuristic_config(256, BF16)), spec
    )


@pytest.mark.parametrize("stage", MOSAIC_GPU)
def test_candidates_for_mosaic_gpu_are_tiles_that_the_kernel_takes(stage):
    search = mosaic_gpu_search(stage)
    facts, seen = tune.mosaic_gpu_kernel(stage), []
    while tried := search.next_round():
        assert len(tried) <= tune.MOSAIC_GPU_ROUND
        assert not {*tried} & {*seen}
        seen += tried
        search.results |= {tiles: candidates.Result("ok", 1.0 + len(seen)) for tiles in tried}
    for tiles in seen:
        assert all(getattr(tiles, name) in values for name, values in facts.search.items())
        config = search.candidate(tiles)
        impl = candidates.implementation(
            stage, "mosaic_gpu", WIDE, "bfloat16", None, config_from_row(config.as_row())
        )
        assert impl.call.lowering.room == "mosaic_gpu"
        assert search.canonical(impl.call.tiles) == search.tiles(config) == tiles
    problem = (
        search.spec(search.config).fused_problem
        if search.fused
        else search.spec(search.config).problem
    )
    assert seen[0] == search.canonical(facts.heuristic(problem, BF16))


@functools.cache
def with_other_tiles():
    """{stage: tiles other than the heuristic's}, of the stages that have some."""
    outcome = {}
    for stage in MOSAIC_GPU:
        search = mosaic_gpu_search(stage)
        if others := [
            x
            for x in tune.neighbours(search.starts[0], search.values, search.canonical)
            if search.takes(x)
        ]:
            outcome[stage] = others[0]
    return outcome


def row_with(tiles):
    """WIDE_ROW with tiles for Mosaic GPU, by stage."""
    of_stages = {
        stage: {name: getattr(x, name) for name in tune.mosaic_gpu_kernel(stage).search}
        for stage, x in tiles.items()
    }
    return WIDE_ROW | {stage: WIDE_ROW[stage] | {"mosaic_gpu": x} for stage, x in of_stages.items()}


def test_the_heuristic_is_tried_first_and_the_present_tiles_with_it():
    assert len(with_other_tiles()) > 1
    for stage, tiles in with_other_tiles().items():
        search = mosaic_gpu_search(stage)
        config = config_from_row(row_with({stage: tiles})).or_else(search.config)
        assert tune.MosaicGpuSearch(stage, config, search.spec).starts == [search.starts[0], tiles]
        no_kernel = functools.partial(kernel_benchmark.call_spec, "mosaic_gpu", WIDE, "float32")
        assert tune.MosaicGpuSearch(stage, config, no_kernel).starts == []


class FakeProcess:
    """Of a stage, in this process: the heuristic's tiles take 1 ms, others what ``ms`` says."""

    def __init__(self, stage, judged, ms):
        self.search, self.judged, self.ms, self.ready, self.closed = (
            mosaic_gpu_search(stage),
            judged,
            ms,
            [],
            False,
        )

    def __call__(self, what, shape, dtype, stage, row, argument, *, seconds):
        assert (shape, dtype, stage) == (tuple(WIDE), "bfloat16", self.search.stage)
        tiles = self.search.tiles(config_from_row(row))
        if what == "prepare":
            self.ready.append(tiles)
            return None
        assert tiles in self.ready
        self.judged.append((stage, tiles))
        return "ok", 1.0 if tiles == self.search.starts[0] else self.ms(stage), ""

    def close(self):
        self.closed = True


@pytest.fixture
def run_mosaic_gpu(run, monkeypatch, tmp_path):
    """The command with fake processes and the row of WIDE; ``processes`` are those of the last
    run."""
    monkeypatch.setattr(
        tune, "requested_backend", lambda backend: backend
    )  # which refuses an older jax
    processes, judged = {}, []

    def command(*arguments, ms=lambda stage: 2.0, present=WIDE_ROW):
        def stage_workers(stages, *_):
            processes.clear()
            processes.update({stage: FakeProcess(stage, judged, ms) for stage in stages})
            return processes

        monkeypatch.setattr(tune, "stage_workers", stage_workers)
        if not (tmp_path / "rows.json").exists():
            tune.write_tuning(str(tmp_path / "rows.json"), "cpu", [present] if present else [])
        return run("--backend=mosaic_gpu_interpret", "--minutes=5", *arguments, shape=WIDE)

    command.processes, command.judged = processes, judged
    return command


def without_mosaic_gpu(row):
    return {
        name: {k: v for k, v in x.items() if k != "mosaic_gpu"} if isinstance(x, dict) else x
        for name, x in row.items()
    }


def stages_with_tiles(row):
    assert row["measured"].get("mosaic_gpu", {}).keys() == {
        name for name in STAGES if "mosaic_gpu" in row[name]
    }
    return {*row["measured"].get("mosaic_gpu", {})}


def test_tiles_for_mosaic_gpu_are_written_beside_those_of_triton(run_mosaic_gpu, tmp_path, capsys):
    best, *_ = with_other_tiles()
    assert run_mosaic_gpu(ms=lambda stage: 0.5 if stage == best else 0.98) == 0
    [row] = rows_in(tmp_path / "rows.json")
    assert without_mosaic_gpu(row) == WIDE_ROW
    assert stages_with_tiles(row) == {best}
    config = config_from_row(row).or_else(heuristic_config(256, BF16))
    outcome = config.stage(best).mosaic_gpu
    assert outcome == with_other_tiles()[best]
    assert (
        kernel_benchmark.call_spec("mosaic_gpu", WIDE, "bfloat16", config).stages_in("mosaic_gpu")[
            best
        ]
        == outcome
    )
    measured = row["measured"]["mosaic_gpu"][best]
    assert (measured["ms"], measured["heuristic_ms"], measured["jax"]) == (
        0.5,
        1.0,
        jax.__version__,
    )
    assert {stage for stage, _ in run_mosaic_gpu.judged} == {*MOSAIC_GPU}
    assert all(process.closed for process in run_mosaic_gpu.processes.values())
    assert re.search(rf"{best}: heuristic 1.000 ms, best 0.500 .*: kept", capsys.readouterr().out)


def test_tiles_for_mosaic_gpu_that_gain_nothing_any_more_are_removed(run_mosaic_gpu, tmp_path):
    first, second, *_ = with_other_tiles()
    stages = f"--stage={first},{second}"
    assert run_mosaic_gpu(stages, ms=lambda stage: 0.5) == 0
    [row] = rows_in(tmp_path / "rows.json")
    assert stages_with_tiles(row) == {first, second}
    assert run_mosaic_gpu(f"--stage={first}", "--log=other.jsonl", ms=lambda stage: 0.98) == 0
    [row] = rows_in(tmp_path / "rows.json")
    assert stages_with_tiles(row) == {second}
    assert run_mosaic_gpu(stages, "--log=another.jsonl") == 0
    assert rows_in(tmp_path / "rows.json") == [WIDE_ROW]


def test_without_a_row_there_is_no_chunk_size_to_tune_at(run_mosaic_gpu, tmp_path, capsys):
    assert run_mosaic_gpu(present=None) == 1
    assert (
        "there is no row for the tiles: tune these heads with --backend=triton first"
        in capsys.readouterr().err
    )
    assert rows_in(tmp_path / "rows.json") == []


@pytest.mark.parametrize(("chunk_size", "kept"), [(256, True), (128, False)])
def test_a_row_for_triton_keeps_the_tiles_for_mosaic_gpu_of_its_chunk_size(chunk_size, kept):
    stage, *_ = with_other_tiles()
    present = row_with(with_other_tiles()) | {
        "measured": {"fwbw_ms": 1.0, "mosaic_gpu": {stage: {"ms": 0.5}}}
    }
    new = WIDE_ROW | {"chunk_size": chunk_size, "measured": {"fwbw_ms": 2.0}}
    row = tune.with_mosaic_gpu(new, present)
    assert without_mosaic_gpu(row) == new
    assert ("mosaic_gpu" in row[stage], "mosaic_gpu" in row["measured"]) == (kept, kept)
    assert tune.with_mosaic_gpu(new, WIDE_ROW) == new


def test_an_interrupted_sweep_of_mosaic_gpu_goes_on_where_it_was(run_mosaic_gpu, tmp_path, capsys):
    def interrupted(stage):
        if len(run_mosaic_gpu.judged) == 2 + len(MOSAIC_GPU):
            raise KeyboardInterrupt
        return 2.0

    assert run_mosaic_gpu(ms=interrupted) == 130
    assert "interrupted; what was timed is in tune.jsonl" in capsys.readouterr().err
    assert all(process.closed for process in run_mosaic_gpu.processes.values())
    *before, at_ctrl_c = run_mosaic_gpu.judged
    assert [line["stage"] for line in log_lines(tmp_path)] == [stage for stage, _ in before]
    run_mosaic_gpu.judged.clear()
    assert run_mosaic_gpu() == 0
    assert not {*before} & {*run_mosaic_gpu.judged}
    assert at_ctrl_c in run_mosaic_gpu.judged


SLEEPER = """
import os, time

def answer(what, shape, dtype, stage, row, argument):
    if what == "judge":
        stages = row[stage]["mosaic_gpu"]["num_stages"]
        if stages == {sleeps}:
            time.sleep(600)
        if stages == {ends}:
            os._exit(3)
        return "ok", 1.0, str(os.getpid())
"""


def test_a_candidate_that_hangs_is_killed_and_logged(run_mosaic_gpu, run, tmp_path, monkeypatch):
    """In a process that sleeps, as one does whose kernel waits for ever; another candidate ends its
    process."""
    stage = "recurrent_bw_dC"
    present = mosaic_gpu_search(stage).starts[0].num_stages
    sleeps, ends = present + 1, present - 1
    monkeypatch.setattr(tune.MosaicGpuSearch, "takes", lambda *_: True)
    (tmp_path / "sleeper.py").write_text(SLEEPER.format(sleeps=sleeps, ends=ends))
    monkeypatch.syspath_prepend(tmp_path)
    sleeper = importlib.import_module("sleeper")
    workers = {stage: worker.Worker(sleeper.answer)}
    monkeypatch.setattr(tune, "stage_workers", lambda *_: workers)
    tune.write_tuning(str(tmp_path / "rows.json"), "cpu", [WIDE_ROW])
    arguments = (
        "--backend=mosaic_gpu_interpret",
        "--minutes=5",
        f"--stage={stage}",
        "--run_seconds=0.2",
    )
    start = time.monotonic()
    assert run(*arguments, shape=WIDE) == 0
    assert time.monotonic() - start < 60
    lines = {}
    for line in log_lines(tmp_path):
        lines.setdefault(line["config"][stage]["mosaic_gpu"]["num_stages"], set()).add(
            (line["status"], line["note"])
        )
    assert present in lines
    assert lines.pop(sleeps) == {("hangs", "no answer within 0.2 s")}
    assert lines.pop(ends) == {("failed", "the process ended with exit code 3")}
    assert {status for outcome in lines.values() for status, _ in outcome} == {"ok"}
    for pid in {int(note) for outcome in lines.values() for _, note in outcome}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert rows_in(tmp_path / "rows.json") == [WIDE_ROW]


def test_a_worker_answers_and_starts_again_after_a_call_that_does_not_end(monkeypatch):
    monkeypatch.setenv("INHERITED", "here")
    sleeping, reading, ending = (
        worker.Worker(time.sleep),
        worker.Worker(os.getenv, {"OF_THE_WORKER": "there"}),
        worker.Worker(os._exit),
    )
    assert sleeping(0.0, seconds=30) is None
    with pytest.raises(worker.NoAnswer, match=r"no answer within 0\.1 s"):
        sleeping(600, seconds=0.1)
    assert sleeping(0.0, seconds=30) is None
    with pytest.raises(worker.ProcessEnded, match="TypeError"):
        sleeping("a while", seconds=30)
    assert [reading(name, seconds=30) for name in ("OF_THE_WORKER", "INHERITED")] == [
        "there",
        "here",
    ]
    assert "OF_THE_WORKER" not in os.environ
    with pytest.raises(worker.ProcessEnded, match="exit code 7"):
        ending(7, seconds=30)
    for x in (sleeping, reading, ending):
        x.close()
        with pytest.raises(worker.ProcessEnded, match="closed"):
            x(0, seconds=30)


def test_a_call_ends_when_its_worker_is_closed():
    sleeping, raised = worker.Worker(time.sleep), []
    assert sleeping(0.0, seconds=30) is None

    def call():
        with pytest.raises(worker.ProcessEnded) as error:
            sleeping(600, seconds=600)
        raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    sleeping.close()
    thread.join(30)
    assert raised


@pytest.mark.parametrize(
    ("logs", "reason"),
    [
        ([], ""),
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


@pytest.mark.slow
@pytest.mark.skipif(
    not jax_has_mosaic_gpu(), reason="the Mosaic GPU kernels need jax >= 0.11.2 and < 0.13"
)
def test_a_dry_run_of_real_kernels_of_mosaic_gpu(run, tmp_path):
    """Interpreted, in their processes."""
    shape = Shape(1, 2, 128, 128, 128)
    [row] = [
        row for row in tuned_rows("NVIDIA H200") if tune.row_key(row) == ("bfloat16", 128, 128)
    ]
    tune.write_tuning(str(tmp_path / "rows.json"), "cpu", [row])
    assert (
        run(
            "--backend=mosaic_gpu_interpret",
            "--minutes=5",
            "--run_seconds=300",
            "--stage=recurrent_fw_H",
            shape=shape,
        )
        == 0
    )
    outcome = {
        line["config"]["recurrent_fw_H"]["mosaic_gpu"]["num_stages"]: line["status"]
        for line in log_lines(tmp_path)
    }
    assert len(outcome) > 1
    assert {*outcome.values()} == {"ok"}


# ---------------- requests


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend=triton"], "there is no GPU here to tune for"),
        (["--output="], "times of interpreted kernels do not belong in mlstm_pallas/tuning"),
        (
            ["--log=/no/such/folder/log.jsonl"],
            "No such file or directory: '/no/such/folder/log.jsonl'",
        ),
        (
            ["--shape=1x1x512x65x64"],
            "shape 1x1x512x65x64 is padded when it runs: tune DHQK, DHHV = 128, 64",
        ),
        (["--stage=bw"], "unknown stage bw, known are chunk_gates"),
        (
            ["--backend=mosaic_gpu_interpret", "--chunk_size=64"],
            "--chunk_size is not for mosaic_gpu_interpret",
        ),
        (["--chunk_size=100"], "chunk_size is 100"),
        ([f"--log={__file__}"], "line 1 is no result of this program"),
        ([f"--output={__file__}"], "is no tuning file"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(arguments, message, run, capsys):
    assert run(*arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("tune: ")
    assert message in line


def test_rows_of_another_device_are_left_alone(run, tmp_path, capsys):
    tune.write_tuning(str(tmp_path / "rows.json"), "NVIDIA H200", [])
    assert run() == 2
    assert "rows.json is of NVIDIA H200, this is cpu" in capsys.readouterr().err
