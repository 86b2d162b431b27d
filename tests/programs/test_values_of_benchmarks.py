"""The benchmarks: values that a hand can check."""

import itertools
import math
from types import SimpleNamespace
from unittest import mock

import jax
import kernel_benchmark
import layer_benchmark
import numpy as np
import peers
import prefill_benchmark
import profiles
import pytest
import reporting
import roofline
import runner
import scaling_benchmark as scaling
import tables
import xlstm_lm_benchmark as lm
from benchmark_runs import dot_flops, measured
from oracle import in_float64, refused
from shapes import Shape

from mlstm_pallas import KernelConfig, reference

first = dict(losses=[10.0, 9.0, 8.0, 7.0], gradient_norms=[1.0] * 2)
run = [
    *[dict(impl="a", direction="fwd", ms=0.04449), dict(impl="a", pooled="", ms=1999.6, pct=32.46)],
    *[dict(impl="b", ms=4.0, x="fwd"), dict(impl="b", ms=5.0, x="fwd"), dict(impl="c", ms=1.0)],
    dict(impl="e", ms=None, status="wrong", x=True),
]


def attempt(error, ours):
    def measure(row, seconds):
        row["ms"] = seconds
        if error:
            raise error

    return [*runner.attempt(dict(status="ok", note=""), ours, measure, 2.0).values()]


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def costs(backend, shape, L, *stages):
    config = KernelConfig(triton_recurrent_fw_H=dict(siz_b_L=32))
    for stage in stages or [x for x in kernel_benchmark.STAGES if x != "chunk_gradients"]:
        with mock.patch("mlstm_pallas.planning.backend.check_mosaic_gpu"):
            impl = kernel_benchmark.MlstmPallasStage(stage, backend, shape, "bfloat16", L, config)
        [cost] = impl.phases(shape, 2, "fwd")
        print(stage, *cost)


LAYER = Shape(2, 3, 32, 16, 24)


def counted(impl, direction, shape=LAYER):
    inputs = jax.eval_shape(lambda: layer_benchmark.random_inputs(shape))

    def outputs(x):
        return layer_benchmark.outputs(impl, None, direction, x)

    flops = dot_flops(jax.make_jaxpr(outputs)(inputs).jaxpr)
    return flops == layer_benchmark.product_flops(shape, direction)


def compare(*losses, norm):
    """With the losses of the row to compare with where they are left out."""
    losses = *losses, *first["losses"][len(losses) :]
    lm.compare(dict(losses=losses, gradient_norms=[norm] * 2), first)


def cells(*selectors):
    return [tables.figure(run, x, bold=True) for x in selectors]


small = Shape(2, 3, 64, 16, 32)
of, big, modes = Shape(2, 2, 32, 16, 16), Shape(8, 8, 8192, 256, 512), scaling.MODES


def test_relative_errors():
    """Relative errors. An output is wrong beyond its limit or if it is not a number; what has no
    limit is not compared."""
    x = np.array([3.0, 4.0])
    assert (
        round(runner.relative_error(x, x * 1.25), 12),
        round(runner.relative_error(x * 1e-30, 0 * x), 12),
    ) == (0.2, 5.0)
    assert repr(runner.relative_error(x * math.nan, x)) == "nan"
    row, limits = {}, dict(h=0.1, dq=0.2, dk=0.5)
    runner.check(row, dict(h=0.1, dq=0.1, di=9.0), limits)
    assert row == {"errors": {"h": 0.1, "dq": 0.1, "di": 9.0}, "error": 9.0}
    refused(
        runner.WrongOutputError,
        "error nan in h, at most 1e-01; error 2.5e-01 in dq, at most 2e-01",
        lambda: runner.check(row, dict(h=math.nan, dq=0.25, dk=0.5), limits),
    )


def test_an_exception_becomes_a_status_of_the_row():
    """An exception becomes a status of the row: a failure of mlstm_pallas, and a peer that is
    skipped."""
    assert attempt(None, True) == ["ok", "", 2.0]
    assert attempt(runner.WrongOutputError("h"), False) == ["wrong", "wrong: h", 2.0]
    assert attempt(runner.UnsupportedError("x\ny"), True) == [
        "skipped",
        "skipped: UnsupportedError: x y",
        2.0,
    ]
    assert (attempt(TypeError("x"), True), attempt(TypeError("x"), False)) == (
        ["failed", "failed: TypeError: x", 2.0],
        ["skipped", "skipped: TypeError: x", 2.0],
    )


def test_heads_that_are_checked():
    """The first, a middle and the last head are checked; beyond 32768 steps the last alone."""
    assert [
        kernel_benchmark.Case(Shape(1, 2, S, 128, 128), "float32").checked_heads(6).tolist()
        for S in (2**15, 2**15 + 1)
    ] == [[0, 3, 5], [5]]


def test_a_peer_is_not_run_beyond_its_offsets():
    """A peer is not run beyond its offsets: it would write to other addresses, and take the rest
    of the run with it."""
    shape = Shape(16, 8, 8192, 256, 512)
    inputs = jax.eval_shape(lambda: peers.random_inputs(jax.random.key(0), shape, "bfloat16"))
    refused(
        ValueError,
        "its states would have 2164260864 elements, beyond its offsets of 32 bits",
        lambda: object.__new__(peers.LimitChunk).build(inputs, "fwd"),
    )


def test_the_last_states_within_the_offsets_of_a_peer():
    """2**14 states of 2**17 elements; another one is beyond."""
    shape = Shape(1, 1, 64 * (2**14 - 1), 256, 512)
    peers.check_state_size(shape, 64)
    with pytest.raises(ValueError, match=f"would have {2**31 + 2**17} elements"):
        peers.check_state_size(shape._replace(S=shape.S + 64), 64)


def test_attention_of_the_same_width():
    """12 heads of 32 columns are 3 of 128, whose pairs of 5 steps count: 15 per head and batch."""
    shape = Shape(2, 12, 5, 16, 32)
    assert peers.attention_heads(shape) == 3
    impl = object.__new__(peers.TorchAttentionCudnn)
    assert impl.phases(shape, 2, "fwbw")[1].flops == 10 * (2 * 3 * 15) * 128
    with pytest.raises(ValueError, match=r"the width NH \* DHV = 352 has no heads of 128"):
        peers.attention_heads(shape._replace(NH=11))


def test_peak_memory_is_beyond_the_inputs():
    """Peak memory is beyond the inputs."""
    sizes = dict(temp=5, output=3, argument=100, alias=1000)
    memory = SimpleNamespace(**{f"{name}_size_in_bytes": x for name, x in sizes.items()})
    impl = peers.JaxImplementation()
    impl.compiled = SimpleNamespace(memory_analysis=lambda: memory)
    assert impl.peak_memory_bytes(None) == 8
    peer, used = object.__new__(peers.TorchPeer), [7]
    cuda = SimpleNamespace(
        synchronize=lambda: None,
        memory_allocated=lambda: used[-1],
        reset_peak_memory_stats=lambda: used.append(7),
        max_memory_allocated=lambda: max(used[1:]),
    )
    peer.torch = SimpleNamespace(cuda=cuda)
    assert peer.peak_memory_bytes(lambda: used.extend([12, 9])) == 5


def test_the_roofline_of_the_recurrence():
    """The oracle is the recurrence."""
    x = peers.random_inputs(jax.random.key(1), Shape(1, 2, 40, 8, 4), "float32")
    functions = peers.exact, lambda *x: reference.recurrence(*x)[0]
    both = (in_float64(jax.jit(peers.directed(f, x, "fwbw")[0]), *x) for f in functions)
    assert [np.allclose(*y, rtol=1e-9, atol=1e-12) for y in zip(*both, strict=True)] == [
        True,
        True,
        True,
        True,
        True,
        True,
    ]


def test_bytes_of_a_direction():
    """A direction has the bytes of its arrays: h is as large as its cotangent, and the backward
    pass reads z and m in float32."""
    inputs = jax.eval_shape(lambda: peers.random_inputs(jax.random.key(0), small, "bfloat16"))
    forward, backward = roofline.mlstm(small, 2, "fwbw")
    assert (forward,) == roofline.mlstm(small, 2, "fwd")
    assert (
        forward.bytes == nbytes(inputs),
        backward.bytes == 2 * nbytes(inputs) + 2 * 4 * small.steps,
    ) == (True, True)


def test_costs_of_stages(capsys):
    """A stage, in bfloat16 and chunks of 32 or, on Mosaic GPU, 128 steps, which the fused scan
    has halved: once the sizes of the arrays that its kernel reads and writes, and products of
    which those within a chunk count for s <= t alone."""
    costs("interpret", small, 32)
    assert capsys.readouterr().out == (
        "chunk_gates 0 13968\n"
        "recurrent_fw_C 393216 76848\n"
        "parallel_fw_H 1001472 97536\n"
        "parallel_fw_P 202752 76032\n"
        "recurrent_fw_H 1191936 124464\n"
        "parallel_bw_dP 608256 191232\n"
        "recurrent_bw_dC 786432 147552\n"
        "parallel_bw_dQKV 1990656 207408\n"
    )
    costs("mosaic_gpu", Shape(1, 64, 256, 256, 512), 128)
    assert capsys.readouterr().out == (
        "chunk_gates 0 591360\n"
        "recurrent_fw_C 4294967296 126157312\n"
        "parallel_fw_H 5918162944 84475904\n"
        "parallel_fw_P 272629760 19660800\n"
        "recurrent_fw_H 9135194112 119669760\n"
        "parallel_bw_dP 1623195648 76414976\n"
        "recurrent_bw_dC 8589934592 251790336\n"
        "parallel_bw_dQKV 15049162752 160039424\n"
    )
    costs("mosaic_gpu", Shape(1, 64, 256, 64, 128), 128, "chunk_gradients")
    assert capsys.readouterr().out == "chunk_gradients 1752170496 26083840\n"


def test_attention_counts_pairs_of_steps_once():
    """Attention counts pairs of steps once: 15 for 5 steps, in each of 6 heads."""
    phases = roofline.attention(2, 3, 5, 16, 2, "fwbw")
    assert phases == ((90 * 2 * 2 * 16, 4 * 960), (90 * 5 * 2 * 16, 8 * 960))
    assert roofline.attention(2, 3, 5, 16, 2, "fwd") == phases[:1]


def test_floors_of_7b_8k():
    """7b-8k, in chunks of 128 steps, by step and head, whichever kernels run."""
    steps, inter, triangle = 8 * 8 * 8192, 2 * 256 * 512, 129
    forward, backward = roofline.mlstm(Shape(8, 8, 8192, 256, 512), 2, "fwbw")
    assert forward.flops == steps * (2 * inter + triangle * (256 + 512))
    assert backward.flops == steps * (5 * inter + triangle * (3 * 256 + 2 * 512))


def test_the_floor_is_the_slower_of_products_and_traffic():
    """The floor is the slower of products and traffic in each phase. Rates were measured on one
    device."""
    assert roofline.floor_seconds([roofline.Cost(6, 1), roofline.Cost(1, 8)], 2.0, 4.0) == 5.0
    assert [roofline.device_rates("NVIDIA H200", x) for x in ("bfloat16", "float16")] == [
        (790000000000000.0, 4270000000000.0),
        (790000000000000.0, 4270000000000.0),
    ]
    assert roofline.device_rates("NVIDIA H200", "float32") == (790e12 / 6, 4.27e12)
    assert roofline.device_rates("cpu", "float32") == (None, None)


def test_products_of_layers(capsys):
    """Without the mLSTM the products that are counted are left."""
    assert [
        counted(impl, x) for impl in ("products", "without_mlstm") for x in ("fwd", "fwbw")
    ] == [True, True, True, True]
    row = dict(name="a", direction="fwd", product_flops=2e9, elementwise_bytes=3e6)
    row |= dict(product_floor_ms=0.5, elementwise_floor_ms=0.25, impl="without_mlstm", ms=4.0)
    other = row | dict(name="b", product_floor_ms=None)
    layer_benchmark.remainders([row, row | dict(impl="products", ms=1.5), other])
    assert capsys.readouterr().out == (
        "\n"
        "a, forward: products 2.000e+09 FLOP, floor 0.500 ms; the rest 3.000e+06 bytes, "
        "floor 0.250 ms; without_mlstm less products 2.500 ms, less the floor of products "
        "3.500 ms\n"
        "\n"
        "b, forward: products 2.000e+09 FLOP, floor -; the rest 3.000e+06 bytes, floor 0.250 "
        "ms; without_mlstm less products -, less the floor of products -\n"
    )


def test_shapes_of_devices(capsys):
    """Shapes of two devices, and reduced ones, which keep the head dimensions."""
    for name, mode in modes.items():
        print(name, mode.whole(of, 2))
    assert capsys.readouterr().out == (
        "weak-batch 4x2x32x16x16\n"
        "weak-heads 2x4x32x16x16\n"
        "weak-sequence 2x2x64x16x16\n"
        "strong-sequence 2x2x32x16x16\n"
    )
    print(
        modes["weak-heads"].reduced(big, 4),
        modes["strong-sequence"].reduced(big, 4),
        modes["strong-sequence"].reduced(big._replace(S=64), 4),
    )
    assert capsys.readouterr().out == "1x4x256x256x512 1x1x1024x256x512 1x1x64x256x512\n"


def test_efficiencies_are_of_rounds(capsys):
    """Efficiencies are of rounds: one device, and two that take 2, 4 and 8 s for the work of
    one, then 2, 4 and 5 s."""
    for name, mode in modes.items():
        rows = [dict(shape=mode.whole(of, n), devices=n) for n in (1, 2)]
        seconds = [(1 + mode.grows) * x / 2 for x in (2.0, 4.0, 10.0)]
        scaling.store_times(rows, [[2.0, 4.0, 8.0], seconds])
        for row in rows:
            print(
                name,
                *(
                    row[x]
                    for x in (
                        "ms",
                        "spread",
                        "tokens_per_second",
                        "efficiency_pct",
                        "efficiency_range",
                    )
                ),
            )
    assert capsys.readouterr().out == (
        "weak-batch 4000.0 1.5 16.0 100.0 [100.0, 100.0]\n"
        "weak-batch 4000.0 2.0 32.0 100.0 [80.0, 100.0]\n"
        "weak-heads 4000.0 1.5 16.0 100.0 [100.0, 100.0]\n"
        "weak-heads 4000.0 2.0 16.0 100.0 [80.0, 100.0]\n"
        "weak-sequence 4000.0 1.5 16.0 100.0 [100.0, 100.0]\n"
        "weak-sequence 4000.0 2.0 32.0 100.0 [80.0, 100.0]\n"
        "strong-sequence 4000.0 1.5 16.0 100.0 [100.0, 100.0]\n"
        "strong-sequence 2000.0 2.0 32.0 100.0 [80.0, 100.0]\n"
    )


def test_parameters_and_flops_of_a_language_model(capsys):
    """All parameters, those of matrix products, and the FLOPs
    of a step of two sequences of 256 tokens: three times those of the forward products and of
    the mLSTM in chunks of 128. Parameters are float32."""
    for name, model in lm.MODELS.items():
        print(name, *model.parameters(), model.flops(2, 256))
    assert capsys.readouterr().out == (
        "1.3b 1345865920 1280180224 4024631820288\ntiny 123848 115200 404520960\n"
    )
    params = jax.eval_shape(lambda: lm.initial_state(model)).params
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"float32"}


def test_losses_and_gradient_norms_are_compared():
    """Losses and a gradient norm, compared with 10, 9, 8, 7 and 1. Later losses are finite."""
    compare(10.005, 9.05, norm=1.01)
    compare(10, 9, 8, 6, norm=1)
    refused(
        runner.WrongOutputError,
        "error 1.0e-01 in loss 2, at most 1e-02",
        lambda: compare(10, 9, 7, norm=1),
    )
    refused(
        runner.WrongOutputError,
        "error nan in loss 3, at most 1e-02",
        lambda: compare(10, 9, 8, math.nan, norm=1),
    )
    refused(
        runner.WrongOutputError,
        "error 2.0e-03 in loss 0, at most 1e-03",
        lambda: compare(10.02, 9, norm=1),
    )
    refused(
        runner.WrongOutputError,
        ("error nan in loss 1, at most 1e-02; error 1.0e-01 in gradient norm, at most 2e-02"),
        lambda: compare(10, math.nan, norm=0.9),
    )


def test_cells_of_a_table():
    """Three digits; a key that the row lacks; the first of two rows of one setting."""
    assert cells("a+fwd", "a+direction=", "a+direction=:pct", "b", "x=True", "d") == [
        "**0.0445**",
        "**2,000**",
        "**32.5 %**",
        "**4.00**",
        "wrong",
        "",
    ]
    refused(ValueError, "rows of several settings have a", lambda: cells("a"))


# ---------------- plots


# Places and sizes of names: where they go.
APART = """
0 1, 1 1: 0 1
0 0.5, 1 1: -0.25 0.75
0 0, 1 3: -1 1
2 2, 4 0: 1 3
0 0 5, 1 1 1: -0.5 0.5 5
0 0 0, 2 2 2: -2 0 2
3, 1: 3
"""


@pytest.mark.parametrize("line", APART.strip().splitlines())
def test_names_are_moved_apart(line):
    places, sizes, expected = ([*map(float, x.split())] for x in line.replace(":", ",").split(","))
    assert reporting.apart(places, sizes) == pytest.approx(expected, abs=1e-9)


def test_words_of_plots():
    """What all lines have in common stands in the title."""
    sizes = 7, 1023, 1024, 1536, 2**20, "7b-8k"
    assert [*map(reporting._thousands, sizes)] == ["7", "1023", "1k", "1.5k", "1024k", "7b-8k"]
    assert reporting.in_words("triton, scan of x") == "mlstm_pallas, Triton, loop by scan of x"
    own = {"triton fwd": "mlstm_pallas, Triton", "xla fwd": "xla"}
    assert reporting.names(["triton fwd", "xla fwd"]) == (own, "fwd")
    assert reporting.names(["triton fwd"]) == ({"triton fwd": "mlstm_pallas, Triton fwd"}, "")
    lines = ["a b c", "c a", "d a c"]
    assert reporting.names(lines) == (dict(zip(lines, ("b", "", "d"), strict=True)), "a c")


def drawn(rows, plot=reporting.plot, **options):
    """By the title of a panel, its lines, as (x, y), and its labels and ticks."""
    figures, figure = [], pytest.importorskip("matplotlib.figure").Figure
    with mock.patch.object(figure, "savefig", lambda figure, *_, **__: figures.append(figure)):
        plot(rows, "", **options)
    return {
        (axes.get_title(), axes.get_ylabel()): (
            [[*zip(*x.get_data(), strict=True)] for x in axes.lines],
            [x.get_text() for x in axes.texts],
            [x.get_text() for x in axes.get_xticklabels()],
            (axes.get_xscale(), axes.get_yscale(), axes.get_xlabel()),
        )
        for axes in figures[0].axes
    }


def test_a_plot_has_the_last_row_of_each_point_in_the_order_of_x():
    """A panel per direction, a curve per implementation, over numbers; names stand at its end."""
    keys = dict(dtype="bfloat16", device="H200")
    cases = (("xla", "fwd", 2048, 4.0), ("xla", "fwd", 512, 1.5), ("triton", "fwd", 512, 1.0))
    cases += (("xla", "fwd", 512, 2.0), ("xla", "fwbw", 512, 9.0), ("xla", "fwbw", 64, None))
    rows = [keys | dict(impl=x, direction=y, S=S, ms=ms) for x, y, S, ms in cases]
    panels = drawn(rows, line=lambda row: row["impl"], x=lambda row: row["S"], xlabel="S")
    scales = "log", "log", "S"
    assert panels == {
        ("forward", "ms"): (
            [[(512, 2.0), (2048, 4.0)], [(512, 1.0)]],
            ["mlstm_pallas,\nTriton", "xla"],
            ["512", "2k"],
            scales,
        ),
        ("forward + backward", "ms"): ([[(512, 9.0)], []], ["xla"], ["512", "2k"], scales),
    }


def test_a_plot_over_lengths_has_tokens_per_second_and_one_of_shapes_times():
    """2048 tokens in 2 and in 5 ms. A row that was not measured has no point."""
    keys = dict(impl="xla", stage=None, variant="exp", dtype="bfloat16", device="H200")
    keys |= dict(direction="fwd")
    cases = ((Shape(4, 2, 512, 8, 8), 2.0), (Shape(2, 2, 1024, 8, 8), 5.0))
    rows = [keys | dict(shape=x, ms=ms, name=str(x)) for x, ms in cases]
    rows.append(keys | dict(shape=Shape(1, 2, 2048, 8, 8), ms=None, name=""))
    scales = "log", "linear", "sequence length S"
    expected = [[(512, 1.024e6), (1024, 4.096e5)]], ["xla"], ["512", "1k"], scales
    assert drawn(rows, kernel_benchmark.plot) == {("forward", "tokens/s"): expected}
    [(title, _)] = drawn(rows[:1], kernel_benchmark.plot).items()
    assert title == ("forward", "ms")


def test_points_over_names_are_in_the_order_of_the_rows():
    keys = dict(dtype="bfloat16", device="H200", direction="fwd")
    rows = [keys | dict(impl="xla", name=x, ms=1.0, rate=y) for x, y in (("b", 3.0), ("a", 5.0))]
    options = dict(line=lambda row: row["impl"], x=lambda row: row["name"], keys=("ms", "rate"))
    panels = drawn(rows, **options)
    assert [*panels] == [("forward", "ms"), ("forward", "rate")]
    scales = "linear", "linear", ""
    expected = [[(0, 3.0), (1, 5.0)]], ["xla"], ["b", "a"], scales
    assert panels["forward", "rate"] == expected


# ---------------- which rows there are


def asked(program, *flags):
    """The rows of a program with these flags, none of which is measured."""
    with mock.patch.multiple(program, measure=mock.DEFAULT, Case=mock.DEFAULT, create=True):
        code, rows = measured(program, "--commit=a", *flags)
    assert code == 0
    return rows


@pytest.mark.parametrize(
    ("S", "flags", "N"), [(4096, "", 4), (5120, "", 5), (64, "--segments=3", 3)]
)
def test_prompts_of_a_prefill(S, flags, N):
    rows = asked(prefill_benchmark, f"--shape=1x1x{S}x16x16", "--variant=states", *flags.split())
    assert [(row["segments"], row["odd"]) for row in rows] == [(N, False)]


def test_rows_of_implementations_and_layouts(capsys):
    """A layout and a variant are of mlstm_pallas alone."""
    rows = asked(layer_benchmark, "--shape=2x2x32x16x32", "--direction=fwd", "--layout=BNTH,BTNH")
    seen = [(row["impl"], row["layout"]) for row in rows]
    others = [(x, None) for x in ("without_mlstm", "products", "mlstm_kernels_limit_chunk")]
    assert seen == [("xla", "BNTH"), ("xla", "BTNH"), *others]
    rows = asked(kernel_benchmark, "--shape=1x1x16x16x16", "--variant=exp,BTNH", "--impl=xla,peers")
    seen = [(row["impl"], row["variant"]) for row in rows]
    assert seen == [("xla", "exp"), ("xla", "BTNH"), *((x, None) for x in peers.PEERS)]
    stages = "--stage=chunk_gates,parallel_bw_dP"
    rows = asked(kernel_benchmark, "--shape=1x1x16x16x16", stages, "--variant=exp,BTNH")
    assert [(x["stage"], x["direction"], x["variant"]) for x in rows] == [
        ("chunk_gates", "fwd", None),
        ("parallel_bw_dP", "bwd", None),
    ]


@pytest.mark.parametrize(("present", "counts"), [(1, [1]), (6, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_numbers_of_devices(present, counts):
    """Powers of two up to those that there are, for each mode, direction and mean."""
    flags = "--shape=2x2x32x16x16", "--direction=fwd,fwbw", "--layout=BNTH,BTNH", "--commit=a"
    with (
        mock.patch.object(scaling, "prepare"),
        mock.patch.object(jax, "local_devices", return_value=[None] * present),
    ):
        code, rows = measured(scaling, *flags, "--mode=weak-heads,strong-sequence")
    keys = "mode", "direction", "layout", "mean_f", "devices"
    cases = ("weak-heads", "strong-sequence"), ("fwd", "fwbw"), ("BNTH", "BTNH"), (4, 10), counts
    assert [tuple(row[x] for x in keys) for row in rows] == [*itertools.product(*cases)]
    assert code == 0
    expected = {n: [2, 2 * n, 32, 16, 16] for n in counts}
    assert all(row["shape"] == expected[row["devices"]] for row in rows[: len(counts)])


def test_numbers_of_devices_that_are_asked_for():
    with mock.patch.object(scaling, "prepare"):
        options = "--shape=2x2x33x16x16", "--mode=weak-batch", "--mean_f=7"
        _, rows = measured(scaling, *options, "--devices=3,1,3")
    assert [(row["devices"], row["shape"][0], row["mean_f"]) for row in rows] == [
        (1, 2, 7),
        (3, 6, 7),
    ]


# ---------------- which outputs are compared, and how closely


def test_limits_of_whole_calls_and_of_stages():
    """Of h and of gradients. A stage of the backward pass has those of gradients, and one without
    matrices those of float32."""
    limits = dict(bfloat16=(5e-3, 2e-2), float16=(6.25e-4, 2.5e-3), float32=(1e-5, 1e-4))
    for dtype, (of_h, of_gradients) in limits.items():
        case = kernel_benchmark.Case(small, dtype)
        call = SimpleNamespace(stage=None)
        assert case.limits(call, ["h", "dq", "di"]) == dict(
            h=of_h, dq=of_gradients, di=of_gradients
        )
        of_stages = {
            name: case.limits(SimpleNamespace(stage=stage), ["matX", "vecX"])
            for name, stage in kernel_benchmark.STAGES.items()
        }
        assert of_stages["chunk_gates"] == dict(matX=1e-5, vecX=1e-5)
        assert (
            of_stages["parallel_fw_H"] == of_stages["recurrent_fw_C"] == dict(matX=of_h, vecX=of_h)
        )
        assert of_stages["parallel_bw_dQKV"] == dict(matX=of_gradients, vecX=of_gradients)


def test_a_forward_call_has_one_output_to_compare():
    case = kernel_benchmark.Case(small, "float32")
    impl = peers.JaxImplementation()
    expected = dict(zip(impl.outputs, ([2.0], [4.0], [8.0]), strict=False))
    case.expected = lambda impl: ([0], [*map(np.array, expected.values())])
    outputs = [np.array([x]) for x in (3.0, 4.0, 10.0)]
    impl.heads = lambda outputs, index: outputs
    assert case.errors(impl, outputs, "fwbw") == dict(h=0.5, dq=0.0, dk=0.25)
    assert case.errors(impl, outputs, "fwd") == dict(h=0.5)
    impl.stage = "a stage"
    assert [*case.errors(impl, outputs)] == ["h", "dq", "dk"]


def test_outputs_of_a_layer_that_are_compared():
    """The first batch entry of y and of the gradient of x. A gate's matrix and bias are one array,
    without which the input gate's bias would have no digits."""
    params = layer_benchmark.Params(*(np.full((2, 3), n) for n in range(10)))
    x = np.arange(12).reshape(3, 4)
    arrays = layer_benchmark.named((x, params, -x))
    names = {*layer_benchmark.Params._fields} - {"input_bias", "forget_bias"}
    assert {*arrays} == {*names, "x", "y"}
    assert (arrays["y"].tolist(), arrays["x"].tolist()) == ([[0, 1, 2, 3]], [[0, -1, -2, -3]])
    assert arrays["input_gate"][:, 0].tolist() == [3, 3, 4, 4]
    assert arrays["forget_gate"][:, 0].tolist() == [5, 5, 6, 6]
    assert [*layer_benchmark.named((x, ()))] == ["y"]


def compared(impl, **off):
    """The row of a layer, some of whose arrays are off by these shares."""
    names = {*layer_benchmark.Params._fields} - {"input_bias", "forget_bias"} | {"x", "y"}
    expected = mock.Mock(return_value=dict.fromkeys(names, np.ones(1)))
    row = dict(impl=impl, layout=None, direction="fwbw", versions={}, product_floor_ms=50.0)
    row |= dict(shape=LAYER, ms=2e3, status="ok", note="")
    arrays = {name: np.array([1.0 + off.get(name, 0.0)]) for name in names}
    stubs = dict(first_call=lambda *_: (None, None), measure=lambda *_: 2.0)
    with (
        mock.patch.multiple(layer_benchmark, named=lambda _: arrays, Layer=mock.Mock()),
        mock.patch.multiple(runner, **stubs),
        mock.patch.object(peers, "jax_versions", return_value=dict(triton="3")),
    ):
        case, options = mock.Mock(expected=expected), mock.Mock()
        runner.attempt(row, True, layer_benchmark.measure, case, options)
    return row, names - row["errors"].keys(), expected.call_args.args


def test_what_is_compared_of_a_layer():
    """Not the gradients that are invented, nor a peer's of gates; y more closely than gradients."""
    gates = {"input_gate", "forget_gate"}
    invented = gates | {"query", "key"}
    for impl, without, like in (
        ("triton", set(), "xla"),
        ("without_mlstm", invented, "without_mlstm"),
        ("products", invented | {"output_gate"}, "products"),
        ("mlstm_kernels_limit_chunk", gates, "xla"),
    ):
        row, not_compared, args = compared(impl, y=0.007, value=0.019)
        assert (row["status"], not_compared, args) == ("ok", without, (like,))
        assert (row["tokens_per_s"], row["product_pct"]) == (LAYER.B * LAYER.S / 2.0, 2.5)
        assert row["versions"] == (dict(triton="3") if "kernels" in impl else {})
        for name in {"y", "x", "value"}:
            row, _, _ = compared(impl, **{name: 0.008 if name == "y" else 0.021})
            assert row["note"].startswith(f"wrong: error {'8' if name == 'y' else '2'}")
            assert row["status"] == "wrong"
    assert compared("products", query=1.0)[0]["status"] == "ok"


def test_errors_of_the_layer_grow_with_its_roundings():
    assert pytest.approx(7.54e-3, rel=1e-3) == layer_benchmark.OUTPUT_TOLERANCE
    assert layer_benchmark.GRADIENT_TOLERANCE == 2e-2


def test_a_nan_is_the_error_of_its_row():
    """Wherever it stands among the errors, and whether it is compared or not."""
    for order in (("h", "dq"), ("dq", "h")):
        row = {}
        runner.check(row, {name: dict(h=1.0, dq=math.nan)[name] for name in order}, {})
        assert math.isnan(row["error"])


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_128x160_64x5_2x1_v_bz_TNT", "products"),
        ("gemm_fusion_dot_49", "products"),
        ("cutlass_80_tensorop_bf16_s16816gemm", "products"),
        ("memcpy128", "copies"),
        ("MemcpyD2D", "copies"),
        ("Memset (Device)", "copies"),
        ("loop_dynamic_update_slice_fusion_1", "copies"),
        ("input_add_reduce_fusion_3", "elementwise"),
        ("wrapped_convert_9", "elementwise"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)", "collectives"),
        ("parallel_bw_dQKV_mosaic_gpu_kernel", "mlstm"),
        ("chunk_gates__1", "mlstm"),
        ("mlstm_chunkwise__parallel_fw_Hintra_kernel", "mlstm"),
    ],
)
def test_kinds_of_kernels_in_a_profile(kernel, kind):
    assert profiles.kind(kernel) == kind


def test_a_profile_has_the_milliseconds_of_one_call_per_gpu(monkeypatch):
    """On all streams; while an all-gather runs from 2 to 7, other kernels run from 0 to 3.5 and
    from 6 to 6.25, nothing from 7 to 8."""

    def line(name, *events):
        keys = "name", "start_ns", "duration_ns"
        times = ((x, 1e6 * start, 1e6 * ms) for x, start, ms in events)
        return SimpleNamespace(
            name=name, events=[SimpleNamespace(**dict(zip(keys, x, strict=True))) for x in times]
        )

    compute = line("Stream #13(Compute)", ("nvjet_a", 0, 3.0), ("memcpy128", 3, 0.5))
    lines = [
        compute,
        line("Stream #14(Memset)", ("Memset", 6, 0.25), ("recurrent_fw_H", 8, 2.0)),
        line("Stream #15", ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 2, 5.0)),
        line("XLA Modules", ("jit_step", 0, 100.0)),
    ]
    planes = [("/device:GPU:0", lines), ("/device:GPU:1", [compute]), ("/host:CPU", lines)]
    planes.append(("/device:GPU:2", lines[-1:]))
    planes = [SimpleNamespace(name=name, lines=lines) for name, lines in planes]
    profile = mock.Mock(from_file=lambda path: SimpleNamespace(planes=planes))
    monkeypatch.setattr(jax.profiler, "ProfileData", profile)
    calls = []
    found = profiles.milliseconds(lambda: calls.append(1))
    assert calls == [1]
    kinds = dict(collectives=2.5, products=3.0, copies=0.625, elementwise=0.0, mlstm=1.0)
    assert found == kinds | dict(exposed=(2.5 + 0.75) / 2, idle=0.5)
