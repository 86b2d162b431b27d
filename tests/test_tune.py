"""The tuner: candidates, checks, the log, the tuning file; processes in which candidates run."""

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
import jax.numpy as jnp
import pytest
import tune
import worker
from candidates import Result
from oracle import needs_mosaic_gpu
from shapes import Shape
from test_compile_report import NO_SPILL, SPILL, TWICE, usage

SHAPE, TINY, STAGE = Shape(1, 1, 512, 64, 128), Shape(1, 2, 32, 16, 16), "recurrent_fw_C"
ROW = {"chunk_size": 16}
NOWHERE = "/no/such/folder"


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
    bench = candidates.Bench("xla", 3, NOWHERE)
    assert bench("prepare", TINY, "bfloat16", STAGE, ROW, False) is None
    [(key, (impl, call))] = bench.prepared.items()

    def result(change):
        bench.prepared[key] = impl, lambda: change(call())
        return bench("judge", TINY, "bfloat16", STAGE, ROW)

    return result


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
    benchmark_runs.timed(monkeypatch)
    assert judge(lambda outputs: outputs) == Result("ok", 3e3)
    benchmark_runs.not_to_be_timed(monkeypatch)
    result = judge(lambda outputs: outputs._replace(**{name: change(getattr(outputs, name))}))
    assert result.status == "wrong"
    assert re.fullmatch(note, result.note)


def test_candidates_are_judged_for_their_own_shape_and_dtype():
    bench = candidates.Bench("xla", 1, NOWHERE)
    bench.case_of = lambda case, stage, _: (case.shape, case.dtype, stage)
    for case in (TINY, "bfloat16"), (TINY, "float32"), (SHAPE, "float32"):
        for stage in "", STAGE:
            assert bench("case_of", *case, stage, ROW) == (*case, stage)


def test_a_failure_is_its_candidates_only_as_long_as_the_device_answers(judge, monkeypatch):
    def fail(outputs):
        raise RuntimeError("out of memory\nhere")

    assert judge(fail) == Result("failed", note="RuntimeError: out of memory here")
    monkeypatch.setattr(candidates.jnp, "zeros", fail)
    with pytest.raises(RuntimeError, match="out of memory"):  # the worker ends the process
        judge(fail)


def test_a_whole_call_is_checked_with_its_gradients(monkeypatch):
    bench = candidates.Bench("xla", 1, NOWHERE)
    errors = mock.Mock(return_value={"di": 0.03})
    monkeypatch.setattr(candidates.Case, "errors", lambda case, *x: errors(case.gradients, x[2]))
    monkeypatch.setattr(candidates.Case, "expected", lambda *_: None)
    monkeypatch.setattr(candidates.MlstmPallas, "build", lambda *_: lambda: ())
    request = TINY, "bfloat16", "", ROW
    assert bench("prepare", *request, False) is None
    assert bench("judge", *request) == Result("wrong", note="error 3.0e-02 in di, at most 2e-02")
    assert bench("judge", *request) is None  # it is to be prepared again
    errors.assert_called_once_with(True, "fwbw")


@pytest.mark.parametrize(
    ("shared_bytes", "spills", "reason"),
    [
        (99 * 1024, 512, ""),
        (99 * 1024 + 1, 0, "takes 101377 bytes of shared memory, the device has 101376"),
        (0, 513, "spills 513 bytes, at most 512"),
    ],
)
def test_what_the_compile_report_refuses_is_not_compiled(shared_bytes, spills, reason, monkeypatch):
    pytest.importorskip("triton")
    lowered = compile_report.Lowered("kernel", (1,), 4, 2, ir="ir")
    monkeypatch.setattr(compile_report, "lowered_kernels", lambda _: [lowered])
    monkeypatch.setattr(compile_report, "_compile", lambda *_: usage(shared_bytes, spills))
    monkeypatch.setattr(candidates.MlstmPallas, "build", lambda *_: "compiled")
    bench = candidates.Bench("triton", 1, NOWHERE)
    result = bench("prepare", TINY, "bfloat16", STAGE, ROW, True)
    assert (result.note if result else "") == reason
    assert len(bench.prepared) == (not reason)


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
    assert candidates.Bench("mosaic_gpu", 1, str(tmp_path)).refused_mosaic_gpu() == reason


# ---------------- whole runs, with times by a formula


BEST = dict(bfloat16=(5, 128), float32=(9, 64))


class FakeWorker:
    """A stage takes least with 8 warps, and the whole, with 5 ms beside its stages, in chunks of
    128; in float32 with 9 ms beside them, in chunks of 64."""

    close = lambda self: None  # noqa: E731
    hook = lambda *_: None  # noqa: E731, of stage and row: a result, or it raises

    def __init__(self):
        self.prepared, self.ready, self.judged = [], set(), []

    def __call__(self, what, shape, dtype, stage, row, *_, seconds):
        key = f"{shape} {dtype}", stage, json.dumps(row)
        if what == "prepare":
            self.prepared.append(key)
            self.ready.add(key)
        elif key in self.ready:
            self.judged.append(key)
            return self.hook(stage, row) or Result("ok", self.ms(dtype, stage, row))

    def ms(self, dtype, stage, row):
        tiles = [x for name, x in row.items() if isinstance(x, dict) and name.endswith(stage)]
        ms = sum(2 - x["num_warps"] / 8 for x in tiles)
        least, chunk_size = BEST[dtype]
        return ms if stage else least + ms + row["fused"] + abs(row["chunk_size"] - chunk_size) / 64


@pytest.fixture
def fake(monkeypatch):
    fake = FakeWorker()
    monkeypatch.setattr(tune, "start_workers", lambda *_: [fake])
    return fake


def test_a_better_row_of_each_dtype_has_what_differs_from_its_rules(run, fake):
    assert run("--dtype=bfloat16,float32") == 0
    rows = run.rows()
    assert [row["dtype"] for row in rows] == [*BEST]
    for row, (dtype, (_, chunk_size)) in zip(rows, BEST.items(), strict=True):
        expected, rules = {"chunk_size": chunk_size}, tune.Calls("interpret", SHAPE, dtype)
        for name, tiles in rules.row(expected).items():
            if name.startswith("triton_"):
                most = tune.MOST_WARPS
                expected |= {name: {"num_warps": most}} if most != tiles["num_warps"] else {}
        assert row["config"] == rules.needed(expected)
        best, of_rules = (fake.ms(dtype, "", rules.row(x)) for x in (expected, {}))
        whole = [x[4]["ms"] for x in run.log() if x[1:3] == [str(rules), ""]]
        assert best == min(whole)
        measured = row["measured"]["fwbw_ms"], row["measured"]["rules_fwbw_ms"]
        assert measured == pytest.approx((best, of_rules), abs=1e-4)


@pytest.mark.parametrize("stage", ["parallel_fw_H", "recurrent_bw_dC"])
@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
def test_candidates_are_distinct_and_possible(backend, stage, monkeypatch):
    monkeypatch.setattr("mlstm_pallas.planning.backend.check_mosaic_gpu", lambda *_: None)
    calls = tune.Calls(backend, Shape(1, 64, 512, 256, 512), "bfloat16")
    search = tune.Search(calls, stage, {"fused": False})
    seen = []
    while tried := search.next_round():
        assert len(tried) <= tune.ROUND
        seen += [x.row for x in tried]
        for x in tried:
            search.results[json.dumps(x.row)] = Result("ok", 1.0 + len(search.results)), x.overrides
            assert calls.row(x.row | x.overrides) == x.row  # its own config
    assert len({json.dumps(row) for row in seen}) == len(seen) > 3
    differ = {name for row in seen for name in row if row[name] != seen[0][name]}
    assert differ == {f"{backend}_{stage}"}


GAINS = """
0.009 0.5 best 1.000 (0.0 % less): no row
0.011 0.029 best 0.971 (2.9 % less): no row
0.011 0.031 best 0.969 (3.1 % less): row {
"""


@pytest.mark.parametrize("line", GAINS.strip().splitlines())
def test_a_row_needs_gains_of_a_stage_and_of_the_call(line, run, fake, capsys):
    """1 % and 3 %."""
    *gains, message = line.split(" ", 2)
    of_stage, of_call = map(float, gains)
    rules = tune.Calls("interpret", SHAPE, "bfloat16").row({})
    fake.hook = lambda stage, row: Result(
        "ok", 1 - (of_stage if stage else of_call) * (row != rules)
    )
    case = dict(DHQK=64, DHV=128, dtype="bfloat16", lowering="triton", config={}, measured={})
    others = dict(lowering="mosaic_gpu"), dict(dtype="float32"), dict(DHV=64), dict(DHQK=32)
    others = [case | x for x in others]
    tune.write_tuning("rows.json", "cpu", [case, *others])
    assert run("--stage=chunk_gates") == 0
    assert f"{SHAPE} bfloat16: rules 1.000 ms, {message}" in capsys.readouterr().out
    rows = [x | dict(measured={}) for x in run.rows()]
    new = [x | dict(config=[*x["config"]]) for x in rows if x not in others]
    assert len(rows) == len(others + new)  # the present ones of other cases stay
    assert new == [case | dict(config=["triton_chunk_gates"])] * ("no row" not in message)
    [context] = {json.dumps(line[0]) for line in run.log()}
    assert {*json.loads(context)} == {"device", "jax", "source", "backend"}


def test_an_interrupted_sweep_goes_on_where_it_was(run, fake, monkeypatch, capsys):
    def hook(*_):
        if len(fake.judged) == 41:
            raise KeyboardInterrupt

    fake.hook = hook
    assert run() == 130
    assert "interrupted; what was timed is in tune.jsonl" in capsys.readouterr().err
    assert not os.path.exists("rows.json")
    *before, _ = fake.judged
    assert [(case, stage, json.dumps(row)) for _, case, stage, row, _ in run.log()] == before
    with open("tune.jsonl", "a") as file:
        file.write('[{"dev')  # killed in the middle of a write

    del fake.hook, fake.judged[:]
    assert run() == 0
    assert not {*fake.judged[:-3]} & {*before}  # whole calls at the end are timed side by side
    resumed, rows = [*before, *fake.judged], run.rows()
    os.unlink("rows.json")
    monkeypatch.setattr(tune, "source_hash", lambda: "other")  # nothing counts for other code
    del fake.judged[:]
    assert run() == 0
    assert (fake.judged, run.rows()) == (resumed, rows)


def test_a_candidate_that_hangs_has_a_result_and_another_is_prepared_again(run, fake):
    """As its process was killed."""

    def hook(stage, row):
        if row["triton_chunk_gates"]["num_warps"] == 2:
            fake.ready.clear()
            raise worker.NoAnswer("slow")

    fake.hook = hook
    assert run("--stage=chunk_gates") == 0
    results = {(x[3]["triton_chunk_gates"]["num_warps"], x[4]["status"]) for x in run.log()}
    assert results == {(1, "ok"), (2, "hangs")}
    assert len(fake.prepared) > len({*fake.prepared})


def test_without_a_time_of_the_rules_there_is_no_row(run, fake, capsys):
    fake.hook = lambda *_: Result("wrong", note="all")
    assert run("--minutes=0") == 1
    assert "the call of the rules has no time" in capsys.readouterr().err
    tune.write_tuning("rows.json", "NVIDIA H200", [])
    assert run() == 2
    assert "rows.json is of NVIDIA H200, this is cpu" in capsys.readouterr().err


# ---------------- processes


def test_a_worker_answers_and_starts_again_after_a_call_that_does_not_end(monkeypatch):
    monkeypatch.setenv("INHERITED", "here")
    before = {*multiprocessing.active_children()}  # of other tests
    sleeping, reading = (worker.Worker(x, {"OTHER": "there"}) for x in (time.sleep, os.getenv))
    with pytest.raises(worker.NoAnswer, match=r"no answer within 0\.1 s"):
        sleeping(600, seconds=0.1)
    assert {*multiprocessing.active_children()} <= before
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
        ("interpret", "parallel_bw_dP", Shape(1, 1, 32, 16, 16)),
        pytest.param(
            "mosaic_gpu_interpret",
            "recurrent_fw_C",
            Shape(1, 1, 128, 64, 128),
            marks=needs_mosaic_gpu,
        ),
    ],
)
def test_a_dry_run_of_real_kernels(backend, stage, shape, run, monkeypatch):
    monkeypatch.setitem(tune.SECONDS, "judge", 300)
    assert run(f"--backend={backend}", f"--stage={stage}", "--minutes=1.5", shape=shape) == 0
    assert len(run.log()) > 2  # the rules' tiles, others, and whole calls
    assert {(x[4]["status"], x[4]["note"]) for x in run.log()} == {("ok", "")}
