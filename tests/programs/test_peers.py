"""What docs/migrating.md and docs/packing.md say of other packages, by running these on a CPU.

A test is skipped if its package is not installed; .ci/run installs them. A failure means that
another version does something else: then the page changes.
"""

import builtins
import dataclasses
import functools
import importlib
import importlib.util
import json
import re
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import benchmark_runs
import jax
import jax.numpy as jnp
import kernel_benchmark
import numpy as np
import peers
import pytest
import xlstm_checkpoint as checkpoint
import xlstm_nnx
from flax import nnx
from oracle import (
    MOSAIC_CALL,
    assert_close,
    changes_by_rounding,
    compare,
    error,
    oracle,
    random_inputs,
    shapes_and_dtypes,
    tolerance,
)
from shapes import Shape
from test_migrating import PAGE, arguments, rows
from test_xlstm_7b import ROUNDING, read
from xlstm_model import forward

from mlstm_pallas import mlstm_chunkwise

B, T, NH, DHQK, DHV = 2, 40, 2, 16, 32


def package(name, *others):
    """A module of another package; skips the test if one of the packages is not installed."""
    for x in (name, *others):
        x = x.partition(".")[0]
        if importlib.util.find_spec(x) is None:
            pytest.skip(f"{x} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of packages, when they are imported
        return importlib.import_module(name)


# ---------------- grain


def test_grain_packs_documents_from_1_and_pads_with_0():
    """The states of each document are those of the document alone, from NumPy and from JAX."""
    grain = package("grain")
    lengths, S = (3, 5, 4, 2, 6, 3), 8
    draw = np.random.default_rng(0)
    documents = [dict(x=draw.normal(size=(n, 3, 8)).astype("float32")) for n in lengths]
    dataset = grain.MapDataset.source(documents).to_iter_dataset()
    pack = grain.experimental.FirstFitPackIterDataset
    [batch] = pack(dataset, length_struct=dict(x=S), num_packing_bins=4).batch(4)
    x, ids = batch["x"], batch["x_segment_ids"]
    assert sorted(map(list, ids)) == [
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 2, 2, 0, 0],
        [1, 1, 1, 2, 2, 2, 2, 2],
    ]

    q, k, v = (x[:, :, None, j] for j in range(3))
    arrays = dict(q=q, k=k, v=v, i=q[..., 0], f=3 + k[..., 0])
    options = dict(num_segments=3, return_last_states=True, layout="BTNH")
    for kind in (np.asarray, jnp.asarray):
        _, (c, n, m) = mlstm_chunkwise(**arrays, segment_ids=kind(ids), **options)
        assert not np.any(c[:, 0])
        for b, number in {(b, number) for b, row in enumerate(ids) for number in row if number}:
            steps = ids[b] == number
            alone = {name: y[b : b + 1, steps].swapaxes(1, 2) for name, y in arrays.items()}
            result = [y[b : b + 1, number] for y in (c, n, m)]
            compare("cnm", result, oracle(alone)[1:], tolerance("float32", S))


def test_grain_pads_between_documents_where_they_are_aligned():
    grain = package("grain")
    documents = [dict(x=np.ones(n)) for n in (3, 5, 4)]
    dataset = grain.MapDataset.source(documents).to_iter_dataset()
    options = dict(length_struct=dict(x=16), num_packing_bins=1, pack_alignment_struct=dict(x=4))
    [row] = grain.experimental.FirstFitPackIterDataset(dataset, **options)
    ids = row["x_segment_ids"]
    assert ids.tolist() == [1] * 3 + [0] + [2] * 5 + [0] * 3 + [3] * 4
    q, gate = jnp.ones((1, 16, 1, 8)), jnp.zeros((1, 16, 1))
    run = functools.partial(mlstm_chunkwise, q, q, q, gate, gate, return_last_states=True)
    with pytest.raises(ValueError, match=r"segment_ids\[0, 4\] is 2, expected ids that ascend"):
        run(segment_ids=ids[None], num_segments=4, layout="BTNH")


def packed_batches(grain, documents):
    """As docs/training.md packs them: inputs and targets, shifted before, in rows of 16 steps."""
    shifted = [dict(inputs=x[:-1], targets=x[1:]) for x in documents]
    dataset = grain.MapDataset.source(shifted).shuffle(seed=0).repeat(2).to_iter_dataset()
    lengths = dict(inputs=16, targets=16)
    pack = grain.experimental.FirstFitPackIterDataset
    return pack(dataset, length_struct=lengths, num_packing_bins=3).batch(2)


DOCUMENTS = [np.arange(n) % 7 for n in (4, 9, 13, 6, 3, 11, 17, 8)]


def test_the_tutorials_model_trains_on_packed_batches_of_grain():
    """Each document has the logits that it has alone."""
    batch = next(iter(packed_batches(package("grain"), DOCUMENTS)))
    ids = batch["inputs_segment_ids"]
    np.testing.assert_array_equal(ids, batch["targets_segment_ids"])
    sizes = dict(vocabulary=7, width=32, heads=2, layers=1)
    model = xlstm_nnx.LanguageModel(**sizes, rngs=nnx.Rngs(0))
    run = nnx.jit(lambda model, tokens, ids: model(tokens, segment_ids=ids)[0])
    logits = run(model, batch["inputs"], ids)
    alone, places = np.zeros_like(batch["inputs"], shape=(8, 16)), []
    for row, n in {(row, n) for row, x in enumerate(ids) for n in x if n}:
        steps = ids[row] == n
        tokens = batch["inputs"][row, steps]
        np.testing.assert_array_equal(tokens[1:], batch["targets"][row, steps][:-1])
        alone[len(places), : len(tokens)] = tokens
        places.append((row, steps, len(tokens)))
    assert len(places) >= 3
    graph, params = nnx.split(model)

    def logits_alone(params):
        logits = run(nnx.merge(graph, params), alone, np.zeros_like(alone))
        return [logits[n, :length] for n, (_, _, length) in enumerate(places)]

    bound = 4 * max(changes_by_rounding(logits_alone, params))
    assert bound < 1e-4
    result = [logits[row, steps] for row, steps, _ in places]
    compare(range(len(places)), result, logits_alone(params), bound)


def test_the_state_of_a_grain_iterator_is_json():
    dataset = packed_batches(package("grain"), DOCUMENTS)
    iterator, resumed = iter(dataset), iter(dataset)
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    resumed.set_state(state)
    expected, batch = next(iterator), next(resumed)
    assert expected.keys() == batch.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(x, batch[name])
    assert not np.array_equal(next(iter(dataset))["inputs"], batch["inputs"])


# ---------------- jax-linear-attention


def jla_inputs(**shifts):
    x = random_inputs(2, B, NH, T, DHQK, DHV, **shifts)
    return {name: y.swapaxes(1, 2) if name in "qkvif" else y for name, y in x.items()}


def of_jla(x, q=None, segment_ids=None, **options):
    """h and the states of jla's mLSTM; g is log sigmoid of f."""
    attention = package("jla.ops").linear_attention
    state = tuple(x[name] for name in ("c_initial", "n_initial", "m_initial") if name in x)
    return attention(
        "mlstm",
        x["q"] if q is None else q,
        x["k"],
        x["v"],
        g=jax.nn.log_sigmoid(x["f"]),
        i=x["i"],
        initial_state=state or None,
        output_final_state=True,
        segment_ids=segment_ids,
        **options,
    )


def true_states(states):
    c, n, m = states
    return jnp.exp(m)[..., None, None] * c, jnp.exp(m)[..., None] * n


def with_gradients(run, x, dh):
    """h, the true last states and the gradients of all arrays."""

    def loss(x):
        h, states = run(x)
        outputs = (h, *true_states(states))
        return sum(jnp.sum(jnp.sin(y)) for y in outputs[1:]) + jnp.vdot(h, dh), outputs

    (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    return [*outputs, *(gradients[name] for name in x)]


JLA = {
    "states": dict(scale=0.3),
    "packed": dict(packed=True),
    "from_nothing": dict(states=False),
    "gates_near_the_floor": dict(states=False, i_shift=-20.0, f_shift=12.0),
}


@pytest.mark.parametrize("case", JLA)
def test_jla_computes_the_same_through_its_rows(case):
    package("jla")
    options = dict(JLA[case])
    packed, scale = options.pop("packed", False), options.pop("scale", None)
    x = jla_inputs(**options)
    draw = np.random.default_rng(0)
    ids = np.cumsum(draw.random((B, T)) < 0.1, axis=1).astype("int32") if packed else None
    table = dict(rows("jax-linear-attention"))
    assert [*table] == [
        "arrays (B, T, H, D)",
        "`scale`",
        "`initial_state`, an MLSTMState (c, n, m)",
        "`output_final_state`",
    ]

    def ours(x):
        state = [x[name] for name in ("c_initial", "n_initial", "m_initial") if name in x]
        theirs = dict(q=x["q"], scale=DHQK**-0.5 if scale is None else scale, DHQK=DHQK)
        theirs |= dict(initial_state=state, output_final_state=True)
        changed = dict(x)
        for cell, code in table.items():
            if state or "initial_state" not in cell:
                changed |= arguments(code, theirs)
        if not state:  # equal m, and so an equal eps
            names = ("c_initial", "n_initial", "m_initial")
            empty = (
                jnp.zeros((B, NH, DHQK, DHV)),
                jnp.zeros((B, NH, DHQK)),
                jnp.full((B, NH), -1e30),
            )
            changed |= dict(zip(names, empty, strict=True))
        return mlstm_chunkwise(**changed, segment_ids=ids)

    other = functools.partial(of_jla, segment_ids=ids)
    if scale is not None:
        other = functools.partial(other, scale=scale)
    dh = random_inputs(3, B, NH, T, DHQK, DHV)["v"].swapaxes(1, 2)
    names = ["h", "C", "N", *x]
    compare(names, with_gradients(ours, x, dh), with_gradients(other, x, dh), 1e-5)


def test_jla_starts_from_a_stabiliser_of_its_own():
    """From m = -1e30, also after a border; h is the same up to eps."""
    empty = package("jla.ops").reference.mlstm_empty_state(1, 1, 1, 1)
    assert [float(y.item()) for y in empty] == [0, 0, np.float32(-1e30)]
    x = jla_inputs(states=False, i_shift=-10.0)
    ids = np.repeat([[0, 1]] * B, T // 2, axis=1)
    h, states = of_jla(x, segment_ids=ids)
    run = functools.partial(mlstm_chunkwise, **x, segment_ids=ids, layout="BTNH")
    ours, last = run(return_last_states=True)
    assert_close(ours, h, 1e-5)
    compare("CN", true_states(last), true_states(states), 1e-5)
    assert np.max(np.abs(last[2] - states[2])) > 0.1


def test_jla_stops_the_floor_at_exp_80():
    """With m = -85 h is 1 / (exp(85) + eps) here, and exp(5) times that there."""
    one = jnp.ones((1, 1, 1, 1))
    x = dict(q=one, k=one, v=one, i=one[..., 0] * -85.0, f=one[..., 0])
    h, _ = of_jla(x)
    ours = mlstm_chunkwise(**x, layout="BTNH")
    np.testing.assert_allclose(float(ours.item()), np.exp(-85.0), rtol=1e-4)
    np.testing.assert_allclose(float(h.item()), np.exp(-80.0), rtol=1e-4)


def test_jla_runs_its_kernels_only_if_they_are_asked_for():
    """Its Hopper kernels are registered for some head sizes, and not for "auto"."""
    ops = package("jla.ops")
    assert ops.available("mlstm") == ("mosaic_gpu", "chunked", "reference")
    kernels = importlib.import_module("jla.ops.mosaic_gpu.mlstm")
    assert (kernels.KEY_DIMS, kernels.VALUE_DIMS) == ((64, 128, 256), (64, 128, 256, 512))
    assert {x.name for x in kernels.SUPPORTED_DTYPES} == {"bfloat16", "float16"}
    x = jla_inputs(states=False)
    auto, chunked = (of_jla(x, impl=impl)[0] for impl in ("auto", "chunked"))
    assert np.array_equal(auto, chunked)
    with pytest.raises(ValueError, match="Hopper"):
        of_jla(x, impl="mosaic_gpu")


@pytest.fixture
def jla_with_the_page(monkeypatch):
    """The names of the page's block, which a process runs before jla looks for a kernel."""
    ops = package("jla.ops")
    ops.available("mlstm")
    registry = {name: dict(kinds) for name, kinds in ops._REGISTRY.items()}
    del registry["mosaic_gpu"]["mlstm"]
    monkeypatch.setattr(ops, "_REGISTRY", registry)
    monkeypatch.setattr(ops, "_kernels_loaded", False)
    for name in [x for x in sys.modules if x.startswith("jla.ops.mosaic_gpu")]:
        monkeypatch.delitem(sys.modules, name)
    # Its fence is not "python", so that test_documents.py leaves it where jla may be missing.
    [block] = re.findall(r"^```py\n(.*?)^```$", PAGE, re.M | re.S)
    names = {}
    exec(compile(block, "migrating.md", "exec"), names)
    chunkwise = mock.Mock(side_effect=names["mlstm_chunkwise"])
    names["mlstm_chunkwise"] = chunkwise
    return types.SimpleNamespace(**names, chunkwise=chunkwise)


@pytest.mark.parametrize("packed", [False, True], ids=["scaled", "packed"])
def test_jla_runs_the_function_of_the_page_as_its_own(packed, jla_with_the_page):
    """h, the true states and all eight gradients. The same eps is the same for equal m only."""
    x = jla_inputs()
    ids = np.arange(T) // 7 * np.ones((B, 1), "int32")
    options = dict(segment_ids=ids) if packed else dict(scale=0.3, eps=0.1)
    run = functools.partial(of_jla, **options)
    dh = random_inputs(3, B, NH, T, DHQK, DHV)["v"].swapaxes(1, 2)
    results = [
        with_gradients(functools.partial(run, impl=impl), x, dh) for impl in ("auto", "reference")
    ]
    compare(["h", "C", "N", *x], *results, 1e-5)
    assert jla_with_the_page.chunkwise.call_count == 1


@pytest.mark.parametrize("states", [False, True], ids=["h_alone", "states"])
def test_jla_gets_what_its_reference_returns(states, jla_with_the_page):
    """From its empty state, in bfloat16: a prefill of its layers, whose next steps it runs."""
    x = jla_inputs(states=False)
    q, k, v = (x[name].astype("bfloat16") for name in "qkv")
    ops = jla_with_the_page.ops
    gates = dict(g=jax.nn.log_sigmoid(x["f"]), i=x["i"])
    options = dict(chunk_size=16, output_final_state=states)
    if states:
        options["initial_state"] = ops.reference.mlstm_empty_state(B, NH, DHQK, DHV)
    result, expected = (
        ops.linear_attention("mlstm", q, k, v, impl=impl, **gates, **options)
        for impl in ("mosaic_gpu", "reference")
    )
    assert jla_with_the_page.chunkwise.call_count == 1
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    leaves, others = jax.tree.leaves(result), jax.tree.leaves(expected)
    assert shapes_and_dtypes(leaves) == shapes_and_dtypes(others)
    compare("hcnm"[: len(others)], leaves, others, tolerance("bfloat16", T))


JLA_REFUSES = """
cu_seqlens ValueError not cu_seqlens
segment_ids ValueError segment_ids must be
initial_state ValueError initial_state must be MLSTMState
precision TypeError unexpected keyword argument 'precision'
use_qk_l2norm TypeError unexpected keyword argument 'use_qk_l2norm'
"""


@pytest.mark.parametrize("line", JLA_REFUSES.strip().splitlines())
def test_jla_gets_an_error_that_names_what_is_not_there(line, jla_with_the_page):
    name, kind, message = line.split(" ", 2)
    x = jla_inputs(states=False)
    value = 3 * (x["i"],) if name == "initial_state" else np.zeros(2, "int32")
    with pytest.raises(getattr(builtins, kind), match=message):
        jla_with_the_page.mlstm(*(x[y] for y in "qkvfi"), **{name: value})


@pytest.mark.slow
def test_jla_has_the_gradients_of_its_model(jla_with_the_page):
    """Rematerialised blocks in a scan, of packed documents."""
    equinox, models = package("equinox", "jla"), package("jla.models", "equinox")
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 512, size=(2, T))
    ids = np.cumsum(draw.random((2, T)) < 0.1, axis=1).astype("int32")
    dy = draw.normal(size=(2, T, 64))

    def gradients(implementation):
        config = models.get_preset("tiny-mlstm")
        mixer = dataclasses.replace(config.linear_attention, implementation=implementation)
        config = config.replace(compute_dtype="float32", linear_attention=mixer)
        model = models.build_model(config, key=jax.random.key(0))

        def loss(model):
            return jnp.vdot(model(tokens, segment_ids=ids).hidden, dy)

        return jax.tree.leaves(equinox.filter_jit(equinox.filter_grad(loss))(model))

    result, expected = gradients("auto"), gradients("reference")
    assert jla_with_the_page.chunkwise.called
    compare(range(len(expected)), result, expected, 1e-5)


@pytest.mark.slow
def test_jla_trains_on_the_function_of_the_page(jla_with_the_page, tmp_path):
    """Its trainer, on four devices; its reference on one has the same losses."""
    trainer, config = package("jla.training.trainer", "equinox"), package("jla.config")

    def losses(implementation, dp, tp):
        train = dict(max_steps=3, seq_len=T, micro_batch_per_replica=4 // dp, log_every=1)
        train |= dict(save_final=False, final_eval=False, compile_preflight=False)
        train |= dict(ce_compute_dtype="float32", output_dir=str(tmp_path / implementation))
        model = dict(preset="tiny-mlstm", n_layers=1, layer_types=["mlstm"])
        model |= dict(compute_dtype="float32", linear_attention=dict(implementation=implementation))
        data = dict(eos_id=0, document_masking=True, synthetic_doc_length=13, num_workers=0)
        sections = dict(train=train, model=model, data=data, mesh=dict(dp=dp, tp=tp))
        experiment = config.config_from_mapping(sections | dict(optim=dict(lr=0.01)))
        result = trainer.Trainer(experiment, devices=jax.devices()[: dp * tp]).run()
        return [row["loss"] for row in result.history]

    result = losses("auto", 2, 2)
    assert jla_with_the_page.chunkwise.called
    first, *_, last = expected = losses("reference", 1, 1)
    assert last < first - 0.1
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_jla_is_a_peer_of_the_kernel_benchmark(monkeypatch):
    """Checked against float64 in both directions; here its chunked implementation runs."""
    package("jla")
    benchmark_runs.timed(monkeypatch)
    monkeypatch.setattr(peers.Jla, "config", dict(impl="chunked"))
    request = ["--impl=jla", "--direction=fwd,fwbw", "--dtype=float32", "--shape=1x2x80x16x32"]
    code, found = benchmark_runs.measured(kernel_benchmark, *request)
    assert (code, [row["note"] for row in found]) == (0, ["", ""])
    assert [[*row["errors"]] for row in found] == [["h"], ["h", "dq", "dk", "dv", "di", "df"]]
    assert {row["versions"]["jax-linear-attention"] for row in found} == {"0.1.0"}


def test_jla_s_kernels_lower_for_hopper_as_the_benchmark_calls_them(monkeypatch):
    """With the heads of xLSTM-7B; elsewhere, and for other heads, its row says what is missing."""
    package("jla.ops").available("mlstm")
    request = "--impl=jla", "--shape=1x1x64x64x64"
    _, [row] = benchmark_runs.measured(kernel_benchmark, *request)
    assert row["status"] == "skipped"
    assert "need an sm_90 (Hopper) GPU" in row["note"]
    for name, module in [*sys.modules.items()]:
        if name.startswith("jla.") and hasattr(module, "is_hopper"):
            monkeypatch.setattr(module, "is_hopper", lambda: True)

    def lowered(shape):
        inputs = jax.eval_shape(lambda: peers.random_inputs(jax.random.key(0), shape, "bfloat16"))

        def run(*x):
            function, arguments = peers.Jla().computation(peers.Inputs(*x), "fwbw")
            return function(*arguments)

        return jax.jit(run).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()

    assert MOSAIC_CALL in lowered(Shape(1, 2, 128, 256, 512))
    with pytest.raises(ValueError, match="head dims K=96, V=192 must be in"):
        lowered(Shape(1, 2, 128, 96, 192))


# ---------------- FLA


def test_fla_has_the_gradients_of_our_rows():
    """Its step-by-step form, where some steps have no decay."""
    fla, torch = package("fla.ops.simple_gla.naive", "torch"), package("torch")
    draw = np.random.default_rng(0)
    q, k, v, dh = (draw.normal(size=(1, 12, 2, 8)).astype("float32") for _ in range(4))
    g = -draw.uniform(size=(1, 12, 2)).astype("float32")
    g[:, ::3] = 0
    x = [torch.tensor(y, requires_grad=True) for y in (q, k, v, g)]
    h, _ = fla.naive_recurrent_simple_gla(*x)
    h.backward(torch.tensor(dh))
    table = dict(rows("FLA"))
    codes = [table[cell] for cell in ("no input gate, no normaliser", "`g`, logarithms")]

    def ours(q, k, v, g):
        theirs = dict(q=q, g=g)
        options = arguments(codes[0], theirs) | arguments(codes[1], theirs)
        return mlstm_chunkwise(q, k, v, **options, layout="BTNH")

    result, pullback = jax.vjp(ours, q, k, v, g)
    expected = [h.detach().numpy(), *(y.grad.numpy() for y in x)]
    compare(["h", *"qkvg"], [result, *pullback(dh)], expected, 1e-5)


def test_fla_has_no_argument_head_first():
    torch, chunk = package("torch"), package("fla.ops.simple_gla", "torch").chunk_simple_gla
    q = torch.ones(1, 16, 1, 16)
    with pytest.raises(DeprecationWarning, match="head_first has been removed"):
        chunk(q, q, q, torch.zeros(1, 16, 1), head_first=True)


# ---------------- mlstm_kernels


NATIVE = dict(
    chunkwise_kernel="chunkwise--native_autograd",
    sequence_kernel="native_sequence__native",
    step_kernel="native",
)


def gradients_of(torch, kernel, output):
    """Of one output of a kernel of mlstm_kernels, by argument."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(16,), (16,), (32,)]
    x = [torch.randn(1, 2, 32, *y, generator=generator) for y in (*shapes, (), ())]
    x += [torch.randn(1, 2, *y, generator=generator) for y in ((16, 32), (16,), (1,))]
    x = [y.requires_grad_() for y in x]
    options = dict(return_last_states=True, chunk_size=16, autocast_kernel_dtype=torch.float32)
    h, states = kernel(*x, **options)
    y = dict(zip("hcnm", (h, *states), strict=True))[output]
    loss = torch.sum(torch.sin(y))
    if not loss.requires_grad:
        return None
    found = torch.autograd.grad(loss, x, allow_unused=True)
    return [np.zeros(1) if y is None else y.numpy() for y in found]


def test_the_custom_backward_pass_of_mlstm_kernels_is_not_the_derivative():
    """It has no gradients of the last n and m, nor of the initial ones."""
    torch, kernels = package("torch"), package("mlstm_kernels.torch", "torch")
    autograd, custom = (
        functools.partial(gradients_of, torch, kernels.get_mlstm_kernel(f"chunkwise--native_{x}"))
        for x in ("autograd", "custbw")
    )
    for output in "nm":
        assert all(not np.any(y) for y in custom(output) or [])
        assert any(np.any(y) for y in autograd(output))
    expected, found = autograd("h"), custom("h")
    assert [not np.any(y) for y in found] == [False] * 6 + [True] * 2
    assert all(np.any(y) for y in expected)
    errors = dict(zip("qkvifcnm", map(error, found, expected), strict=True))
    assert {name for name, y in errors.items() if y > 0.1} == {*"qkifnm"}


@pytest.mark.parametrize("steps", [1, 2, 64])
def test_mlstm_kernels_in_bfloat16_reads_one_step_only(steps):
    torch, module = package("torch"), package("mlstm_kernels.torch.backend_module", "torch")
    backend = module.mLSTMBackend(module.mLSTMBackendConfig(mode="inference", **NATIVE))
    rows = [torch.ones(1, 2, steps, *y).bfloat16() for y in ((16,), (16,), (32,), (), ())]
    if steps == 1:
        assert backend(*rows)[0].dtype == torch.bfloat16
        return
    with pytest.raises(RuntimeError, match="same dtype"):
        backend(*rows)


# ---------------- xlstm


SMALL = dict(embedding_dim=128, num_heads=2, num_blocks=1, vocab_size=50)


def xlstm_model(**options):
    module = package("xlstm.xlstm_large.model", "torch")
    return module.xLSTMLarge(module.xLSTMLargeConfig(**SMALL, **NATIVE, **options))


def test_xlstm_does_not_train_by_default():
    torch = package("torch")
    tokens = torch.zeros((1, 64), dtype=torch.int64)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        xlstm_model()(tokens)
    logits, _ = xlstm_model(return_last_states=True)(tokens)
    assert logits.shape == (1, 64, 50)


def test_xlstm_overwrites_the_states_that_generate_gets():
    torch = package("torch")
    model = xlstm_model(mode="inference", return_last_states=True)
    with torch.no_grad():
        _, states = model(torch.arange(9)[None])
        before = [y.clone() for y in states[0]]
        _, after = model.generate(torch.arange(5)[None], max_length=3, state=states)
    assert after is states
    assert not torch.equal(before[0], states[0][0])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("norm_eps: 1e-6", "'Tensor' and 'str'"),
        ("norm_eps: 1.0e-6", None),
        ("norm_eps: 0.1\nnorm_eps: 0.5", None),
    ],
    ids=["exponent", "point", "twice"],
)
def test_xlstm_reads_config_yaml_as_pyyaml_does(lines, message, tmp_path):
    torch, load = package("torch"), package("xlstm.xlstm_large.from_pretrained", "torch")
    import yaml
    from safetensors.torch import save_file

    save_file(xlstm_model().state_dict(), tmp_path / "model.safetensors")
    text = f"{yaml.safe_dump(SMALL | NATIVE)}{lines}\n"
    (tmp_path / "config.yaml").write_text(text)
    model = load.load_from_pretrained(tmp_path, return_last_states=True)
    tokens = torch.zeros((1, 3), dtype=torch.int64)
    if message:
        with pytest.raises(TypeError, match=message):
            model(tokens)
        return
    model(tokens)
    assert model.config.norm_eps == float(lines.split()[-1])


# ---------------- transformers


@pytest.fixture(params=["alone", "with_xlstm"])
def transformers(request, monkeypatch):
    """transformers' modules of xLSTM, which use xlstm if that is installed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    package("transformers", "torch")
    if request.param == "with_xlstm":
        package("xlstm")
    utils = importlib.import_module("transformers.utils")
    monkeypatch.setattr(utils, "is_xlstm_available", lambda: request.param == "with_xlstm")
    for name in [x for x in sys.modules if x.startswith("transformers.models.xlstm")]:
        monkeypatch.delitem(sys.modules, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = [
            importlib.import_module(f"transformers.models.xlstm.{x}_xlstm")
            for x in ("configuration", "modeling")
        ]
    assert modules[1].external_xlstm is (request.param == "with_xlstm")
    return modules


def transformers_model(modules, **options):
    torch, (configuration, modeling) = package("torch"), modules
    options = SMALL | NATIVE | dict(autocast_kernel_dtype="float32", chunk_size=16) | options
    options["hidden_size"] = options["embedding_dim"]
    torch.manual_seed(0)
    model = modeling.xLSTMForCausalLM(configuration.xLSTMConfig(**options)).eval()
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim == 2:
                x.normal_(std=0.3)
    return model


TOKENS = np.random.default_rng(0).integers(3, 50, size=(2, 21))


def logits_of(model, tokens=TOKENS, **options):
    torch = package("torch")
    with torch.no_grad():
        return model(torch.tensor(tokens), **options).logits.float().numpy()


def test_transformers_numbers_the_positions_of_each_document():
    """Of packed documents, from 0; docs/packing.md counts them."""
    pack = package("transformers", "torch").DataCollatorWithFlattening(return_tensors="np")
    batch = pack([dict(input_ids=[7] * n) for n in (3, 1, 2)])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    ids = np.cumsum(batch["position_ids"] == 0, axis=1)
    assert ids.tolist() == [[1, 1, 1, 2, 3, 3]]


def test_transformers_ignores_the_attention_mask(transformers):
    torch, model = package("torch"), transformers_model(transformers)
    mask = torch.ones(TOKENS.shape)
    mask[0, :7] = 0
    masked = logits_of(model, attention_mask=mask)
    assert np.array_equal(masked, logits_of(model))
    assert error(masked[:1, 7:], logits_of(model, TOKENS[:1, 7:])) > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_caches_states_in_the_dtype_of_the_model(transformers, dtype):
    torch = package("torch")
    other = dict(bfloat16="float32", float32="bfloat16")[dtype]
    model = transformers_model(transformers, inference_state_dtype=other)
    with torch.no_grad():
        cache = model.to(getattr(torch, dtype))(torch.tensor(TOKENS), use_cache=True).cache
    assert {str(x.dtype) for x in cache.rnn_state[0]} == {f"torch.{dtype}"}


@pytest.mark.parametrize("width", [64, 96, 128, 160, 192])
def test_transformers_caches_only_multiples_of_64(transformers, width):
    model = transformers_model(transformers, embedding_dim=width)
    logits_of(model, use_cache=False)
    if width == 128:
        logits_of(model, use_cache=True)
        return
    with pytest.raises(RuntimeError, match="must match the existing size"):
        logits_of(model, use_cache=True)


def test_transformers_rounds_states_between_parts_of_a_prompt(transformers):
    model = transformers_model(transformers)
    expected = logits_of(model, use_cache=False)
    model.config.max_inference_chunksize = 8
    assert 1e-4 < error(logits_of(model, use_cache=False), expected) < 1e-2
    assert error(logits_of(model, use_cache=True), expected) < 1e-5


@pytest.mark.parametrize("steps", [1, 15, 16])
def test_transformers_in_bfloat16_needs_a_cache(transformers, steps):
    torch = package("torch")
    model = transformers_model(transformers).to(torch.bfloat16)
    tokens = TOKENS[:, :steps]
    logits_of(model, tokens, use_cache=True)
    if steps < (2 if transformers[1].external_xlstm else 16):
        logits_of(model, tokens, use_cache=False)
        return
    with pytest.raises(RuntimeError, match="same dtype"):
        logits_of(model, tokens, use_cache=False)


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_transformers_trains_without_a_cache_only(transformers, mode):
    torch = package("torch")
    tokens = torch.tensor(TOKENS[:, :16])
    model = transformers_model(transformers, mode=mode).train()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(tokens, labels=tokens).loss.backward()


def test_transformers_leaves_three_fields_aside(transformers):
    with pytest.raises(RuntimeError, match="must match the size"):
        transformers_model(transformers, weight_mode="fused")
    model = transformers_model(transformers, tie_word_embeddings=True, add_out_norm=False)
    assert model.lm_head.weight.data_ptr() != model.backbone.embeddings.weight.data_ptr()
    assert "Norm" in type(model.backbone.out_norm).__name__


def test_transformers_loads_a_checkpoint_that_was_trained_and_written(transformers, tmp_path):
    """The gradients here are those of PyTorch, to a few times what they change by where all
    parameters are rounded once; and after a step with them so are the logits."""
    torch, kind = package("torch"), transformers[1].xLSTMForCausalLM
    model, source = transformers_model(transformers), tmp_path / "source"
    model.save_pretrained(source)
    config, params = read(source)
    tensors = checkpoint.tensors_of(config, "float32", 1)

    @jax.jit
    def loss(params):
        logits = jax.nn.log_softmax(forward(config, params, TOKENS[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(logits, TOKENS[:, 1:, None], axis=-1))

    gradients = jax.grad(loss)(params)
    tokens = torch.tensor(TOKENS)
    model.train()(tokens, labels=tokens, use_cache=False).loss.backward()
    bound = 4 * max(changes_by_rounding(jax.grad(loss), params))
    assert bound < 2e-4
    for name, x in model.named_parameters():
        result = checkpoint.tensor_of(config, gradients, tensors, name)
        assert_close(result, x.grad.numpy(), bound, name)
    trained = jax.tree.map(lambda x, g: x - 0.1 * g, params, gradients)
    checkpoint.write(source, tmp_path / "written", trained)
    written = kind.from_pretrained(tmp_path / "written", dtype=torch.float32).eval()
    logits = forward(config, trained, TOKENS)
    assert_close(logits, logits_of(written, use_cache=False), ROUNDING)
    assert error(logits, logits_of(model.eval(), use_cache=False)) > 10 * ROUNDING


# ---------------- the pages


def test_the_pages_have_the_versions_that_ran():
    """Those that .ci/run installs."""
    root = Path(__file__).parents[2]
    script, page = ((root / x).read_text() for x in (".ci/run", "docs/migrating.md"))
    versions = dict(re.findall(r"([a-z_\-]+)==(\d[\d.]*)", script))
    names = {x: x for x in ("xlstm", "mlstm_kernels", "transformers", "torch")}
    names |= dict(jla="jax-linear-attention", FLA="fla-core")
    for name, installed in names.items():
        found = {*re.findall(rf"\b{name} (\d[\d.]*\d)", page)}
        assert found, name
        assert all(versions[installed].startswith(x) for x in found), (name, found)
