"""The layer benchmark: FLOPs, bytes, checks of outputs, records, requests."""

import json
import math

import jax
import jax.numpy as jnp
import kernel_benchmark
import layer_benchmark
import peers
import pytest
import roofline
from absl import flags
from roofline import Shape

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = "2x2x32x16x32"
PEER = "mlstm_kernels_xl_chunk"


def run(*arguments):
    values = flags.FlagValues()
    layer_benchmark.define_flags(values)
    values(["layer_benchmark", f"--shape={SHAPE}", "--repeats=1", *arguments])
    return layer_benchmark.run(values)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    monkeypatch.setattr(kernel_benchmark, "MAX_CALLS", 1)


@pytest.fixture
def no_peer(monkeypatch):
    def absent():
        raise ModuleNotFoundError("No module named\n'torch'")

    monkeypatch.setitem(peers.PEERS, PEER, absent)


def dot_flops(jaxpr):
    """Of the matrix products of a jaxpr and of those inside of it."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            ((contracted, _), _), (x, _) = eqn.params["dimension_numbers"], eqn.invars
            contracted_size = math.prod(x.aval.shape[axis] for axis in contracted)
            total += 2 * eqn.outvars[0].aval.size * contracted_size
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                total += eqn.params.get("length", 1) * dot_flops(inner)
    return total


@pytest.mark.parametrize("direction", ["fwd", "fwbw"])
@pytest.mark.parametrize("impl", ["products", "without_mlstm"])
def test_what_is_left_without_the_mlstm_are_the_counted_products(impl, direction):
    shape = Shape(2, 3, 32, 16, 24)
    inputs = jax.eval_shape(lambda: layer_benchmark.random_inputs(shape))
    jaxpr = jax.make_jaxpr(layer_benchmark.outputs_of(impl, "rms", "xla", direction))(inputs)
    assert dot_flops(jaxpr.jaxpr) == layer_benchmark.product_flops(shape, direction)


def test_elementwise_bytes_are_those_of_the_arrays():
    B, NH, S, _, V = shape = Shape(2, 3, 32, 16, 24)
    h = o = gated = dgated = dh = do = 2 * B * S * NH * V
    projection = dprojection = 2 * B * S * NH
    gate = dgate = 4 * B * S * NH
    forward = h + o + gated + 2 * (projection + gate)
    backward = h + o + dgated + dh + do + 2 * (dgate + projection + dprojection)
    assert layer_benchmark.elementwise_bytes(shape, "fwd") == forward
    assert layer_benchmark.elementwise_bytes(shape, "fwbw") == forward + backward


@pytest.mark.slow
def test_measures_both_layouts_and_skips_a_peer_that_is_not_there(
    no_peer, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(roofline, "DEVICE_RATES", {jax.devices()[0].device_kind: (1e9, 1e8)})
    path, impls = tmp_path / "rows.jsonl", (*layer_benchmark.JAX_IMPLS, PEER)
    assert run(f"--impl={','.join(impls)}", "--direction=fwbw", f"--jsonl={path}") == 0
    *ours, peer = records(path)
    assert [record["impl"] for record in (*ours, peer)] == list(impls)
    needs = 3 * 2 * (2 * 32) * 64 * (2 * 32 + 3 * 64 + 2 * 2), (2 * 32) * (8 * 64 * 2 + 14 * 2 * 2)
    for record in ours:
        assert (record["status"], record["direction"], record["norm"]) == ("ok", "fwbw", "rms")
        assert 0 < record["error"] <= layer_benchmark.GRADIENT_TOLERANCE
        assert 0 < record["errors"]["y"] <= layer_benchmark.OUTPUT_TOLERANCE
        assert (record["product_flops"], record["elementwise_bytes"]) == needs
        assert record["product_floor_ms"] == pytest.approx(needs[0] / 1e6)
        assert record["product_pct"] == pytest.approx(
            100 * record["product_floor_ms"] / record["ms"]
        )
        assert record["tokens_per_s"] == pytest.approx(2 * 32 / record["ms"] * 1e3)
        assert record["peak_mib"] > 0
    names = {"y", "x", *layer_benchmark.Params._fields} - {"input_bias", "forget_bias"}
    assert set(ours[0]["errors"]) == names
    assert set(ours[1]["errors"]) == names | {f"{name}, layouts" for name in names}
    assert peer["status"] == "skipped"
    assert peer["note"] == "skipped: ModuleNotFoundError: No module named 'torch'"
    ms = {record["impl"]: record["ms"] for record in ours}
    text = capsys.readouterr().out
    assert all(impl in text for impl in impls)
    measured = (
        f"without_mlstm less products {ms['without_mlstm'] - ms['products']:.3f} ms, less the "
        f"floor of products "
    )
    assert (
        f"floor {needs[1] / 1e5:.3f} ms; {measured}{ms['without_mlstm'] - needs[0] / 1e6:.3f} ms"
        in text
    )


def quick_mlstm(q, k, v, i, f, *, layout="BNTH", backend):
    """A recurrence without decay in either layout, which compiles in no time."""
    weights = jnp.exp(i) * jax.nn.sigmoid(f) * jnp.sum(q.astype(jnp.float32) * k, -1)
    return jnp.cumsum(weights[..., None] * v, axis=layout.index("T")).astype(q.dtype)


def scaled(x, by):
    """x, with a gradient that is scaled."""
    return by * x + jax.lax.stop_gradient((1 - by) * x)


WRONG = {
    "output": (lambda q: q, lambda h: h.at[..., 0].multiply(1.5), "y "),
    "gradient": (lambda q: scaled(q, 0.9), lambda h: h, "query "),
    "nan": (lambda q: q, lambda h: h.at[0, 0, 0].set(jnp.nan), "y nan "),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_layout_is_not_timed(kind, monkeypatch, capsys, tmp_path):
    before, after, noted = WRONG[kind]

    def wrong(q, *args, layout="BNTH", **options):
        h = quick_mlstm(before(q) if layout == "BTNH" else q, *args, layout=layout, **options)
        return after(h) if layout == "BTNH" else h

    monkeypatch.setattr(layer_benchmark, "mlstm_chunkwise", wrong)
    path = tmp_path / "rows.jsonl"
    assert (
        run(f"--impl={','.join(layer_benchmark.LAYOUTS)}", "--direction=fwbw", f"--jsonl={path}")
        == 1
    )
    first, second = records(path)
    assert first["status"] == "ok"
    assert (second["status"], second["ms"]) == ("wrong", None)
    assert second["note"].startswith(f"wrong: {noted}")
    assert f"{noted.split()[0]}, layouts " in second["note"]
    assert "failed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "--impl=nonsense",
            "unknown impl nonsense, known are mlstm_pallas_BNTH, mlstm_pallas_BTNH, "
            "without_mlstm, products, ",
        ),
        ("--backend=triton", "backend triton needs a GPU"),
        ("--jsonl=/no/such/folder/rows", "No such file"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(argument, message, capsys):
    if "needs a GPU" in message and jax.default_backend() == "gpu":
        pytest.skip("a GPU is here")
    assert run(argument) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1


@pytest.mark.gpu
def test_every_implementation_agrees_where_it_runs(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert run("--shape=2x2x256x64x128", f"--jsonl={path}") == 0
    assert {
        record["status"] for record in records(path) if record["impl"] in layer_benchmark.OURS
    } == {"ok"}
