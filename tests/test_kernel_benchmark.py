"""The kernel benchmark: FLOPs and bytes, checks of outputs, records, reports, requests."""

import json
import operator
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import kernel_benchmark
import numpy as np
import peers
import pytest
import roofline
from absl import flags
from roofline import Shape

from mlstm_pallas import KernelConfig, StageConfig, dispatch, reference
from mlstm_pallas.backend import jax_has_mosaic_gpu
from mlstm_pallas.config import heuristic_config
from mlstm_pallas.normaliser import NormaliserGradients
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering

SMALL, TINY, WIDE = Shape(2, 3, 64, 16, 32), Shape(1, 1, 16, 16, 16), Shape(1, 2, 128, 128, 128)
L = 32
EIGHT_K = {
    "7b": Shape(8, 8, 8192, 256, 512),
    "tfla": Shape(8, 16, 8192, 128, 256),
    "b1": Shape(1, 8, 8192, 256, 512),
}


def run(*arguments):
    values = flags.FlagValues()
    kernel_benchmark.define_flags(values)
    values(["kernel_benchmark", "--repeats=1", *arguments])
    return kernel_benchmark.run(values)


def records_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


pytestmark = pytest.mark.usefixtures("quick_compilation")


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.fixture
def few_calls(monkeypatch):
    monkeypatch.setattr(kernel_benchmark, "MAX_CALLS", 1)


# ---------------- FLOPs and bytes


def stage_case(stage, shape=SMALL, dtype="bfloat16"):
    """The stage, interpreted in chunks of L steps, and the shapes of its inputs."""
    config = KernelConfig(recurrent_fw_H=StageConfig(siz_b_LKV=L))
    impl = kernel_benchmark.MlstmPallasStage(stage, "interpret", shape, dtype, L, config)
    x = jax.eval_shape(lambda: peers.random_inputs(jax.random.key(0), shape, dtype))
    return impl, jax.eval_shape(lambda x: kernel_benchmark.stage_arrays(x, L, impl.stage.fused), x)


# What the kernel of a stage reads of a NamedTuple; recurrent_bw_dC reads gamma once for each
# recurrence.
GATES = operator.attrgetter("vecE", "vecU", "vecW")
READ = {
    "parallel_fw_H": {"chunk_gates": lambda x: (GATES(x), x.vecM)},
    "parallel_fw_P": {"chunk_gates": lambda x: (GATES(x), x.vecAbar, x.vecM, x.scaGamma)},
    "recurrent_fw_H": {"parallel_fw_P": lambda x: (x.matP, x.keys, x.vecR)},
    "parallel_bw_dP": {"chunk_gates": lambda x: (GATES(x), x.vecAbar, x.vecM)},
    "recurrent_bw_dC": {"scaGamma": lambda x: (x, x)},
    "parallel_bw_dQKV": {
        "chunk_gates": lambda x: (x.vecW, x.vecAbar),
        "normaliser_gradients": lambda x: (x.vecInvDen, x.vecDzDen),
        "parallel_bw_dP": lambda x: (x.matP, x.matDeltaP),
    },
}


@pytest.mark.parametrize("stage", kernel_benchmark.STAGES)
def test_bytes_of_a_stage_are_those_of_its_arrays(stage):
    impl, inputs = stage_case(stage)
    function, args = impl.computation(inputs, "fwd")
    outputs = jax.eval_shape(function, *args)._asdict()
    read = [
        READ.get(stage, {}).get(name, lambda x: x)(x)
        for name, x in zip(impl.stage.inputs, args, strict=True)
    ]
    assert roofline.COSTS[impl.stage.name](impl.call.problem, 2).bytes == nbytes(read) + nbytes(
        list(outputs.values())
    )


def compiled_flops(equation, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return (
        jax.jit(lambda *xs: jnp.einsum(equation, *xs))
        .lower(*arrays)
        .compile()
        .cost_analysis()["flops"]
    )


# The products of each stage: inter-chunk, and intra-chunk (over all pairs of steps of a chunk).
INTER = {
    "chunk_gates": [],
    "recurrent_fw_C": ["btk,btv->bkv"],
    "parallel_fw_H": ["btk,bkv->btv"],
    "parallel_fw_P": [],
    "recurrent_fw_H": ["btk,bkv->btv", "btk,btv->bkv"],
    "parallel_bw_dP": [],
    "recurrent_bw_dC": ["btk,btv->bkv"] * 2,
    "parallel_bw_dQKV": ["bkv,btv->btk", "bkv,btv->btk", "bkv,btk->btv"],
}
INTRA = {
    "parallel_fw_H": ["btk,bsk->bts", "bts,bsv->btv"],
    "parallel_fw_P": ["btk,bsk->bts"],
    "recurrent_fw_H": ["bts,bsv->btv"],
    "parallel_bw_dP": ["btk,bsk->bts", "btv,bsv->bts"],
    "parallel_bw_dQKV": ["bts,bsk->btk", "bts,btk->bsk", "bts,btv->bsv"],
}


@pytest.mark.parametrize("stage", kernel_benchmark.STAGES)
def test_flops_of_a_stage_are_those_of_its_products(stage):
    problem = Problem(*SMALL, L, 1.0)
    sizes = dict(b=problem.BNH * problem.NC, t=L, s=L, k=SMALL.DHQK, v=SMALL.DHHV)

    def total(equations):
        return sum(
            compiled_flops(
                eq, *([sizes[axis] for axis in part] for part in eq.partition("->")[0].split(","))
            )
            for eq in equations
        )

    causal = sum(t + 1 for t in range(L)) / L**2
    expected = total(INTER[stage]) + causal * total(INTRA.get(stage, []))
    assert roofline.COSTS[stage](problem, 2).flops == pytest.approx(expected)


def test_a_direction_has_the_flops_of_its_stages_and_the_bytes_of_its_arrays():
    inputs = jax.eval_shape(lambda: peers.random_inputs(jax.random.key(0), SMALL, "bfloat16"))
    forward, backward = roofline.mlstm(SMALL, 2, "fwbw")
    assert (forward,) == roofline.mlstm(SMALL, 2, "fwd")
    assert forward.bytes == nbytes(inputs)  # h is as large as its cotangent
    assert backward.bytes == 2 * nbytes(inputs[:5]) + 2 * nbytes(inputs.dh) + 2 * 4 * SMALL.steps
    problem = Problem(*SMALL, SMALL.S, 1.0)
    flops = [
        sum(roofline.COSTS[stage](problem, 2).flops for stage in x) for x in roofline.schedules(0)
    ]
    assert [forward.flops, backward.flops] == flops


def test_the_flops_of_a_direction_do_not_depend_on_what_divides_the_sequence():
    K, V, L = 16, 32, roofline.REFERENCE_CHUNK
    per_step = 4 * K * V + (L + 1) * (K + V), 10 * K * V + (L + 1) * (3 * K + 2 * V)
    for S in (128, 200, 8192):
        assert [x.flops for x in roofline.mlstm(Shape(2, 3, S, K, V), 2, "fwbw")] == [
            6 * S * x for x in per_step
        ]


def test_attention_counts_pairs_once():
    forward, backward = roofline.attention(2, 3, 5, 16, 2, "fwbw")
    pairs = 2 * 3 * (1 + 2 + 3 + 4 + 5)
    assert forward == (pairs * 2 * 2 * 16, 4 * 2 * 2 * 3 * 5 * 16)
    assert backward == (pairs * 5 * 2 * 16, 8 * 2 * 2 * 3 * 5 * 16)


# Milliseconds worked out by hand: for 7b-8k 3.27e11 + 8.08e11 FLOP at 790 TFLOP/s, for tfla-8k
# 1.62e9 + 3.25e9 bytes at 4.27 TB/s.
@pytest.mark.parametrize(
    ("name", "fwd", "fwbw"), [("7b", 0.41, 1.44), ("tfla", 0.38, 1.14), ("b1", 0.052, 0.18)]
)
def test_floor_of_the_8k_shapes(name, fwd, fwbw):
    rates = roofline.device_rates("NVIDIA H200", "bfloat16")
    for direction, expected in (("fwd", fwd), ("fwbw", fwbw)):
        assert 1e3 * roofline.floor_seconds(
            roofline.mlstm(EIGHT_K[name], 2, direction), *rates
        ) == pytest.approx(expected, rel=0.02)


def test_rates_nobody_measured_are_none():
    assert roofline.device_rates("cpu", "bfloat16") == (None, None)
    assert roofline.device_rates("cpu", "float32") == (None, None)


def test_a_float32_product_counts_as_six_of_bfloat16():
    flops, bandwidth = roofline.device_rates("NVIDIA H200", "bfloat16")
    assert roofline.device_rates("NVIDIA H200", "float32") == (flops / 6, bandwidth)


# ---------------- what outputs are checked against


def with_gradients(S, *functions):
    """(h, dq, dk, dv, di, df) of each function at the same inputs, float64, and the inputs."""
    inputs = peers.random_inputs(jax.random.key(1), Shape(1, 2, S, 8, 4), "float32")
    with jax.enable_x64(True):
        *args, dh = inputs = [np.asarray(x, np.float64) for x in inputs]

        @jax.jit
        def compute(args, dh):
            pairs = [jax.vjp(function, *args) for function in functions]
            return [(h, *vjp(dh)) for h, vjp in pairs]

        return [*jax.tree.map(np.asarray, compute(args, dh)), inputs]


def test_the_parallel_form_of_the_oracle_is_the_recurrence():
    parallel, recurrent, _ = with_gradients(
        256, peers.exact, lambda *args: reference.recurrence(*args)[0]
    )
    for result, expected in zip(parallel, recurrent, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-12)


def test_a_constant_normaliser_changes_only_the_gradient():
    (h, dq, dk, dv, di, _), exact, (q, k, v, _, _, dh) = with_gradients(
        40, peers.constant_normaliser, peers.exact
    )
    np.testing.assert_allclose(
        h, exact[0], rtol=1e-13
    )  # float64: the same values, of two compiled functions
    assert np.linalg.norm(dq - exact[1]) > 0.1 * np.linalg.norm(dq)
    # The numerator alone is linear in q and in v, and the input gate scales k.
    np.testing.assert_allclose(np.sum(dq * q, -1), np.sum(dh * h, -1), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.vdot(dv, v), np.vdot(dh, h), rtol=1e-9)
    np.testing.assert_allclose(di, np.sum(dk * k, -1), rtol=1e-9, atol=1e-12)


# ---------------- runs


@pytest.mark.usefixtures("few_calls")
def test_without_a_gpu_the_default_says_so_and_leaves_records_and_a_plot(tmp_path, capsys):
    jsonl, png = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    assert run(f"--jsonl={jsonl}", f"--plot={png}", "--commit=v7") == 0
    out = capsys.readouterr().out
    assert "no GPU here: measuring xla on the CPU" in out
    [record] = records_in(jsonl)
    assert (
        record["name"],
        record["impl"],
        record["direction"],
        record["dtype"],
        record["status"],
    ) == (
        "tiny",
        "xla",
        "fwd",
        "bfloat16",
        "ok",
    )
    assert record["shape"] == list(kernel_benchmark.SHAPES["tiny"][0])
    assert set(record["versions"]) == {"jax", "jaxlib"}
    assert record["commit"] == "v7"
    assert 0 < record["first_call_s"] < 60
    assert record["config"]["chunk_size"] >= 16
    assert min(record[name] for name in ("ms", "tflops", "tbps", "peak_mib")) > 0
    assert record["roofline_pct"] is None
    assert 1e-4 < record["error"] < 5e-3
    assert png.read_bytes().startswith(b"\x89PNG")
    header, line = out.rstrip().splitlines()[-2:]
    assert header.split()[:3] == ["shape", "impl", "what"]
    assert line.split()[:3] == ["tiny", "xla", "fwd"]


@pytest.mark.usefixtures("few_calls")
def test_both_directions_and_both_ways_with_the_states_in_one_run(tmp_path):
    jsonl, request = (
        tmp_path / "rows.jsonl",
        ["--direction=fwd,fwbw", "--dtype=float32", "--recompute_states_in_bw=true,false"],
    )
    rates = ("--peak_tflops=0.1", "--peak_tbps=0.01")
    assert (
        run(
            *request,
            "--shape=1x2x48x16x8",
            '--config={"chunk_size": 16}',
            *rates,
            f"--jsonl={jsonl}",
        )
        == 0
    )
    records = records_in(jsonl)
    assert [(record["direction"], record["recompute_states_in_bw"]) for record in records] == [
        ("fwd", None),
        ("fwbw", True),
        ("fwbw", False),
    ]
    for record in records:
        assert record["name"] == "1x2x48x16x8"
        assert record["config"]["chunk_size"] == 16
        assert (
            set(record["errors"]) == {"h"}
            if record["direction"] == "fwd"
            else {"h", "dq", "dk", "dv", "di", "df"}
        )
        assert record["error"] == max(record["errors"].values()) < 1e-4
        assert record["roofline_pct"] > 0
    recomputed, kept = records[1:3]
    rounding = 48 * float(jnp.finfo(jnp.float32).eps) / 2  # of a sum over the steps
    assert recomputed["errors"] == {
        name: pytest.approx(x, abs=rounding) for name, x in kept["errors"].items()
    }


def test_a_config_reaches_the_stages(tmp_path):
    """Given as JSON, or as a file."""
    row = {
        "chunk_size": 64,
        "fused_min_heads": 3,
        "parallel_fw_H": {"siz_b_LQ": 16, "num_warps": 8},
    }
    (tmp_path / "row.json").write_text(json.dumps(row))
    for text in (json.dumps(row), str(tmp_path / "row.json")):
        config = kernel_benchmark.parse_config(text)
        filled = kernel_benchmark.MlstmPallas("interpret", SMALL, "bfloat16", None, config).filled
        assert (filled.L, filled.fused_min_heads, filled.stage("parallel_fw_H")) == (
            64,
            3,
            StageConfig(siz_b_LQ=16, num_warps=8),
        )
        assert filled.stage("recurrent_fw_C") == heuristic_config(16, jnp.dtype("bfloat16")).stage(
            "recurrent_fw_C"
        )


def test_a_record_has_the_tiles_that_run():
    """Of recurrent_fw_H those of one of its two kernels."""
    mosaic_gpu = StageConfig(
        siz_b_LKV=64, siz_b_DHHV=128, siz_b_loop=128, num_warps=8, num_stages=2
    )
    config = KernelConfig(
        fused_min_heads=1,
        recurrent_fw_H=StageConfig(siz_b_LKV=16, num_splits=2, mosaic_gpu=mosaic_gpu),
    )
    configs = {
        impl: kernel_benchmark.MlstmPallas(impl, WIDE, "bfloat16", 64, config).config
        for impl in ("interpret", "mosaic_gpu_interpret")
    }
    fields = dict(siz_b_LKV=64, siz_b_DHHV=128, siz_b_loop=128, num_warps=8, num_stages=2)
    assert configs["mosaic_gpu_interpret"]["recurrent_fw_H"] == {
        "num_splits": 2,
        "mosaic_gpu": fields,
    }
    assert configs["interpret"]["recurrent_fw_H"]["siz_b_LKV"] == 16
    assert "mosaic_gpu" not in configs["interpret"]["recurrent_fw_H"]
    assert configs["interpret"]["parallel_fw_H"] == configs["mosaic_gpu_interpret"]["parallel_fw_H"]


@pytest.mark.skipif(
    not jax_has_mosaic_gpu(), reason="the Mosaic GPU kernels need jax >= 0.11.2 and < 0.13"
)
@pytest.mark.usefixtures("few_calls")
def test_a_stage_on_mosaic_gpu_by_itself(tmp_path):
    """What it has no kernel for is skipped."""
    jsonl, stages = tmp_path / "rows.jsonl", ["parallel_fw_P", "recurrent_fw_H", "parallel_bw_dP"]
    shape, request = (
        "x".join(map(str, WIDE)),
        ("--impl=mosaic_gpu_interpret", "--chunk_size=64", f"--jsonl={jsonl}"),
    )
    assert run(f"--stage={','.join(stages)}", f"--shape={shape}", *request) == 0
    records = records_in(jsonl)
    assert [record["status"] for record in records] == ["ok", "ok", "skipped"]
    assert records[0]["config"]["recurrent_fw_H"].keys() == {"mosaic_gpu"}
    assert {*records[0]["errors"]} == {"matP", "keys", "vecR", "vecZ", "vecN_states", "vecN_last"}
    assert {*records[1]["errors"]} == {"matH", "matC_last"}
    assert (
        records[2]["note"]
        == "skipped: NoSuchKernel: parallel_bw_dP has no Mosaic GPU kernel for this shape and dtype"
    )


@pytest.mark.usefixtures("few_calls")
@pytest.mark.slow
@pytest.mark.parametrize("impl", ["interpret", "xla"])
def test_stages_by_themselves(impl, tmp_path):
    """One stage of each kind: without products, of the fused scan, backward."""
    jsonl, stages = tmp_path / "rows.jsonl", ["chunk_gates", "recurrent_fw_H", "recurrent_bw_dC"]
    assert (
        run(f"--stage={','.join(stages)}", f"--impl={impl}", "--chunk_size=32", f"--jsonl={jsonl}")
        == 0
    )
    records = records_in(jsonl)
    assert [(record["stage"], record["direction"]) for record in records] == list(
        zip(stages, ("fwd", "fwd", "bwd"), strict=True)
    )
    assert all(record["status"] == "ok" and record["note"] == "" for record in records)


@pytest.mark.slow
@pytest.mark.usefixtures("few_calls")
@pytest.mark.parametrize("impl", ["interpret", "xla"])
def test_all_stages_by_themselves(impl, tmp_path):
    jsonl = tmp_path / "rows.jsonl"
    request = (
        f"--stage={','.join(kernel_benchmark.STAGES)}",
        f"--impl={impl}",
        "--dtype=bfloat16,float32",
        "--chunk_size=32",
    )
    assert run(*request, f"--jsonl={jsonl}") == 0
    records = records_in(jsonl)
    assert [record["stage"] for record in records] == list(kernel_benchmark.STAGES) * 2
    assert all(record["status"] == "ok" and record["errors"] for record in records)


@pytest.mark.usefixtures("few_calls")
@pytest.mark.slow
@pytest.mark.parametrize("impl", ["interpret", "xla"])
def test_what_a_chunk_of_many_tiles_leaves_unwritten_is_not_compared(impl, tmp_path):
    jsonl, config = tmp_path / "rows.jsonl", json.dumps({"parallel_bw_dP": {"siz_b_LQ": 64}})
    request = "--chunk_size=256", "--shape=1x2x256x16x16", f"--config={config}"
    assert run("--stage=parallel_bw_dP", f"--impl={impl}", *request, f"--jsonl={jsonl}") == 0
    [record] = records_in(jsonl)
    tiles = "matP", "matDeltaP", "queries", "keys"
    sums = "vecDeltaN_added", "per_query", "per_key", "diagonal"
    assert record["errors"].keys() == {*tiles, *NormaliserGradients._fields, *sums}


def test_a_wrong_output_is_refused(monkeypatch, tmp_path, capsys):
    right = kernel_benchmark.mlstm_chunkwise
    monkeypatch.setattr(
        kernel_benchmark,
        "mlstm_chunkwise",
        lambda q, *rest, **options: right(q, *rest, **options) * 1.02,
    )
    monkeypatch.setattr(
        kernel_benchmark, "time_calls", lambda *_: pytest.fail("a wrong output was timed")
    )
    jsonl = tmp_path / "rows.jsonl"
    assert run(f"--jsonl={jsonl}", f"--plot={tmp_path / 'p.png'}") == 1
    [record] = records_in(jsonl)
    assert (record["status"], record["ms"]) == ("wrong", None)
    assert record["note"].startswith("wrong: error 2.")
    assert " in h, at most 5e-03" in record["note"]
    out = capsys.readouterr().out
    assert "wrong: error" in out
    assert "nothing was measured" in out


def test_a_wrong_gradient_is_refused(monkeypatch, capsys):
    right = kernel_benchmark.mlstm_chunkwise

    def wrong(q, k, *rest, **options):
        return right(q, jax.lax.stop_gradient(k), *rest, **options)

    monkeypatch.setattr(kernel_benchmark, "mlstm_chunkwise", wrong)
    assert run("--direction=fwbw", "--shape=1x2x16x16x16") == 1
    assert "wrong: error 1.0e+00 in dk, at most 2e-02\n" in capsys.readouterr().out


def test_an_output_that_is_not_finite_is_refused(monkeypatch, capsys):
    right = kernel_benchmark.mlstm_chunkwise
    # In a head that is not compared with the recurrence.
    monkeypatch.setattr(
        kernel_benchmark,
        "mlstm_chunkwise",
        lambda *args, **options: right(*args, **options).at[0, 1, 0, 0].set(jnp.nan),
    )
    assert run("--shape=1x5x16x16x16") == 1
    assert "wrong: not finite" in capsys.readouterr().out


def test_a_stage_that_is_wrong_is_refused(monkeypatch, capsys):
    right = dispatch.run

    def wrong(name, *args, call, **options):
        outputs = right(name, *args, call=call, **options)
        if name != "parallel_fw_H" or call.lowering is Lowering.XLA:
            return outputs
        return outputs._replace(vecZ=-outputs.vecZ)

    monkeypatch.setattr(dispatch, "run", wrong)
    assert run("--stage=parallel_fw_H", "--impl=interpret") == 1
    assert "wrong: error 2.0e+00 in vecZ" in capsys.readouterr().out


@pytest.mark.slow
def test_variants_are_held_to_their_own_oracles(capsys, tmp_path):
    jsonl = tmp_path / "rows.jsonl"
    variants = "exp,packed,sigmoid,unnormalised"
    assert (
        run(
            "--impl=xla",
            f"--variant={variants}",
            "--dtype=float32",
            "--repeats=1",
            f"--jsonl={jsonl}",
        )
        == 0
    )
    records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    assert [record["variant"] for record in records] == variants.split(",")
    assert all(record["error"] < 1e-5 for record in records)
    assert len({round(record["error"], 12) for record in records}) == 4  # of different numbers
    assert "fwd sigmoid" in capsys.readouterr().out


def test_a_failure_is_one_line(monkeypatch, capsys):
    def fail(*args, **options):
        raise NotImplementedError("one line\nand another")

    monkeypatch.setattr(kernel_benchmark, "mlstm_chunkwise", fail)
    assert run() == 1
    assert "failed: NotImplementedError: one line and another" in capsys.readouterr().out


@pytest.mark.usefixtures("few_calls")
def test_a_missing_peer_is_skipped_with_its_reason(monkeypatch, tmp_path, capsys):
    import_module = peers.importlib.import_module

    def missing(
        name, package=None
    ):  # of this module alone: others may be imported for the first time in this test
        if name == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return import_module(name, package)

    monkeypatch.setattr(peers.importlib, "import_module", missing)
    jsonl = tmp_path / "rows.jsonl"
    assert run("--impl=fla_simple_gla,xla", f"--jsonl={jsonl}", f"--plot={tmp_path / 'p.png'}") == 0
    skipped, ours = records_in(jsonl)
    assert (skipped["status"], ours["status"]) == ("skipped", "ok")
    assert skipped["note"] == "skipped: ModuleNotFoundError: No module named 'torch'"
    assert skipped["note"] in capsys.readouterr().out


class Doubling(peers.JaxImplementation):
    """A stand-in for a peer that computes another function."""

    name, oracle = "doubling", "twice"

    def oracle_arguments(self, inputs):
        return inputs[:1], inputs.q

    def computation(self, inputs, direction):
        return lambda q: (2 * q,), inputs[:1]


@pytest.mark.usefixtures("few_calls")
@pytest.mark.parametrize(
    ("factor", "note"), [(2, "other function"), (2.1, "wrong: error 4.8e-02 in h, at most 5e-03")]
)
def test_another_function_is_held_to_what_it_defines_and_named_so(
    factor, note, monkeypatch, tmp_path
):
    monkeypatch.setitem(peers.PEERS, "doubling", Doubling)
    monkeypatch.setitem(peers.ORACLES, "twice", lambda q: factor * q)
    jsonl = tmp_path / "rows.jsonl"
    assert run("--impl=doubling", f"--jsonl={jsonl}") == (factor != 2)
    [record] = records_in(jsonl)
    assert record["note"] == note
    assert (record["ms"] is None) == (factor != 2)


def in_float64(function, *shapes):
    with jax.enable_x64(True):
        return np.asarray(jax.jit(function)(*shapes))


def test_oracles_of_other_functions():
    x = peers.random_inputs(jax.random.key(2), Shape(1, 2, 24, 4, 6), "float32")
    q, k, v, i, f, _ = (np.asarray(y, np.float64) for y in x)
    for oracle, gate in (
        (peers.no_input_gate, np.ones_like(i)),
        (peers.sigmoid_input_gate, 1 / (1 + np.exp(-i))),
    ):
        result = in_float64(oracle, q, k, v, i, f)
        C = np.zeros((1, 2, 4, 6))
        for t in range(24):
            C = (
                C / (1 + np.exp(-f[:, :, t, None, None]))
                + gate[:, :, t, None, None] * k[:, :, t, :, None] * v[:, :, t, None, :]
            )
            np.testing.assert_allclose(
                result[:, :, t], np.einsum("bhk,bhkv->bhv", q[:, :, t], C) / 2, rtol=1e-9
            )


def test_oracle_of_attention_in_blocks_of_rows():
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 2, 384, 4))
    scores = np.einsum("bhtd,bhsd->bhts", q, k) / 2
    weights = np.exp(scores) * np.tril(np.ones((384, 384)))
    expected = np.einsum("bhts,bhsd->bhtd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(
        in_float64(peers.causal_attention, q, k, v), expected, rtol=1e-9, atol=1e-12
    )


@pytest.mark.usefixtures("few_calls")
def test_attention_of_the_same_width_is_checked(monkeypatch, tmp_path):
    """As on a GPU, but for the implementation of jax.nn.dot_product_attention."""
    attention = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *args, implementation, **options: attention(*args, **options),
    )
    jsonl = tmp_path / "rows.jsonl"
    assert (
        run(
            "--impl=jax_cudnn_attention",
            "--shape=1x2x32x16x64",
            "--direction=fwd,fwbw",
            "--dtype=float32",
            f"--jsonl={jsonl}",
        )
        == 0
    )
    forward, both = records_in(jsonl)
    assert (set(forward["errors"]), set(both["errors"])) == ({"o"}, {"o", "dq", "dk", "dv"})
    assert max(forward["error"], both["error"]) < 1e-5
    assert forward["note"] == both["note"] == "other function"


class Peer(peers.JaxImplementation):
    """A stand-in for mlstm_kernels: the mLSTM, with wrong gradients of the gates."""

    name, oracle, checked = "peer", "constant normaliser", ("h", "dq", "dk", "dv")

    def computation(self, inputs, direction):
        def forward_backward(*args):
            *args, dh = (x.astype(jnp.float32) for x in args)
            h, vjp = jax.vjp(peers.constant_normaliser, *args)
            dq, dk, dv, di, df = vjp(dh)
            return h, dq, dk, dv, 2 * di, df

        return forward_backward, inputs


@pytest.mark.usefixtures("few_calls")
def test_a_peer_is_held_to_its_own_definition(monkeypatch, tmp_path):
    monkeypatch.setitem(peers.PEERS, "peer", Peer)
    jsonl = tmp_path / "rows.jsonl"
    assert run("--impl=peer", "--direction=fwbw", "--shape=1x2x32x16x16", f"--jsonl={jsonl}") == 0
    [record] = records_in(jsonl)
    assert record["status"] == "ok"
    assert record["errors"]["di"] == pytest.approx(1, rel=1e-3)
    assert max(record["errors"][name] for name in Peer.checked) < 1e-5


def test_after_ctrl_c_what_was_measured_is_there(monkeypatch, tmp_path, capsys):
    def measure(record, *_):
        if record.name != "tiny":
            raise KeyboardInterrupt
        record.ms = 1.5

    monkeypatch.setattr(kernel_benchmark, "measure", measure)
    jsonl = tmp_path / "rows.jsonl"
    assert run("--shape=tiny,7b-8k", f"--jsonl={jsonl}", f"--plot={tmp_path / 'p.png'}") == 130
    assert [record["ms"] for record in records_in(jsonl)] == [1.5]
    assert capsys.readouterr().out.rstrip().splitlines()[-1].split()[:5] == [
        "tiny",
        "xla",
        "fwd",
        "bfloat16",
        "1.500",
    ]


# ---------------- requests


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape=8k"], "unknown shape '8k', known are 7b-8k"),
        (["--impl=cuda"], "unknown impl cuda, known are triton"),
        (["--config={"], "--config: Expecting property name"),
        (
            ['--config={"num_warps": 4}'],
            "--config: unknown num_warps, known are chunk_size, fused_min_heads, ",
        ),
        ([f"--from_jsonl={__file__}"], "line 1 is no record of this benchmark"),
        (["--impl=mosaic_gpu"], "impl mosaic_gpu needs a GPU"),
        (["--stage=chunk_gates", "--direction=fwbw"], "a stage has one direction"),
        (["--chunk_size=100"], "chunk_size is 100"),
        (["--plot=/no/such/folder/p.png"], "no folder for /no/such/folder/p.png"),
        (
            ["--jsonl=/no/such/folder/rows.jsonl"],
            "No such file or directory: '/no/such/folder/rows.jsonl'",
        ),
    ],
)
def test_what_does_not_exist_is_one_line(arguments, message, capsys):
    assert run(*arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("kernel_benchmark: ")
    assert message in line


def measurement(name, shape, impl, direction="fwd", ms=1.0, **fields):
    """With a peak memory of 1000 MiB per ms."""
    common = dict(
        stage="",
        dtype="bfloat16",
        device="NVIDIA H200",
        versions={},
        commit=None,
        peak_mib=ms and 1000 * ms,
    )
    return kernel_benchmark.Record(
        name=name, shape=shape, impl=impl, direction=direction, ms=ms, **common | fields
    )


def write_records(path, records):
    path.write_text(
        "".join(
            json.dumps(kernel_benchmark.dataclasses.asdict(record)) + "\n" for record in records
        )
    )


def test_a_table_and_a_plot_of_stored_records(tmp_path, capsys):
    shape = EIGHT_K["7b"]
    write_records(
        tmp_path / "a.jsonl",
        [measurement("7b", shape, "triton", ms=9.0), measurement("7b", shape, "triton", ms=2.046)],
    )
    skipped = measurement(
        "7b", shape, "fla", "fwbw", None, status="skipped", note="skipped: no GPU"
    )
    kept = measurement("7b", shape, "triton", "fwbw", 7.874, recompute_states_in_bw=False)
    write_records(
        tmp_path / "b.jsonl",
        [
            measurement("7b", shape, "triton", "fwbw", 108.6),
            kept,
            measurement("7b", shape, "fla", ms=2.3, note="other function"),
            skipped,
        ],
    )
    stored = f"--from_jsonl={tmp_path / 'a.jsonl'},{tmp_path / 'b.jsonl'}"
    assert run(stored, "--markdown", f"--plot={tmp_path / 'p.png'}") == 0
    assert (tmp_path / "p.png").stat().st_size > 1000
    out = capsys.readouterr().out
    assert "no GPU here" not in out
    assert out.rstrip().splitlines()[-9:] == [
        "| ms | 7b forward | 7b forward + backward | 7b MiB |",
        "| --- | --- | --- | --- |",
        "| triton | 2.05 | 109 | 108600 |",
        "| triton states stored |  | 7.87 | 7874 |",
        "| fla | 2.30 | skipped | skipped |",
        "",
        "Other functions (fla)",
        "",
        "fla: skipped: no GPU (7b fwbw)",
    ]


@pytest.mark.slow
def test_float16_is_checked_against_an_eighth_of_the_tolerance_of_bfloat16(tmp_path):
    jsonl = tmp_path / "rows.jsonl"
    assert (
        run(
            "--impl=xla",
            "--shape=1x2x32x16x32",
            "--direction=fwbw",
            "--dtype=float16",
            "--repeats=1",
            f"--jsonl={jsonl}",
        )
        == 0
    )
    [record] = [json.loads(line) for line in jsonl.read_text().splitlines()]
    assert record["status"] == "ok"
    assert (
        0
        < record["error"]
        <= kernel_benchmark.TOLERANCES["float16"][1]
        == kernel_benchmark.TOLERANCES["bfloat16"][1] / 8
    )


RESULTS = sorted((Path(__file__).parents[1] / "benchmarks" / "results").glob("*.jsonl"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_can_be_reported(path, capsys):
    assert run(f"--from_jsonl={path}", "--markdown") == 0
    _, markdown = capsys.readouterr().out.split("\n| ms |", 1)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    times = {float(f"{record['ms']:.3g}") for record in records if record["ms"] is not None}
    assert times <= {float(cell) for cell in re.findall(r"(?<=\| )[0-9.]+(?= \|)", markdown)}


def test_a_peer_is_not_run_beyond_its_offsets():
    """It would write to other addresses, and take the rest of the run with it."""
    inputs = jax.eval_shape(
        lambda: peers.random_inputs(jax.random.key(0), Shape(16, 8, 8192, 256, 512), "bfloat16")
    )
    with pytest.raises(ValueError, match="2164260864 elements, beyond its offsets of 32 bits"):
        object.__new__(peers.LimitChunk).build(inputs, "fwd")
