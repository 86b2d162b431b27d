"""What docs/migrating.md says of our function beside that of other packages, by running both on a
CPU. A test is skipped if its package is not installed; .ci/run installs them."""

import functools
import importlib
import importlib.util
import re
import sys
import types
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xlstm_checkpoint as checkpoint
from oracle import (
    NAMES,
    assert_close,
    changes_by_rounding,
    compare,
    error,
    random_inputs,
)
from test_migrating import PAGE, arguments, by_rows_of_fla, rows
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


# ---------------- jax-linear-attention


def jla_inputs(**shifts):
    x = random_inputs(2, B, NH, T, DHQK, DHV, **shifts)
    return {name: y.swapaxes(1, 2) if name in "qkvif" else y for name, y in x.items()}


def of_jla(x, **options):
    """h and the states of jla's mLSTM; g is log sigmoid of f."""
    attention = package("jla.ops").linear_attention
    q, k, v, i, f, *state = (x[name] for name in NAMES if name in x)
    gates = dict(g=jax.nn.log_sigmoid(f), i=i, initial_state=tuple(state) or None)
    return attention("mlstm", q, k, v, **gates, output_final_state=True, **options)


def with_gradients(run, x):
    """h, the true last states and the gradients of all arrays."""
    dh = random_inputs(3, B, NH, T, DHQK, DHV)["v"].swapaxes(1, 2)

    def loss(x):
        h, (c, n, m) = run(x)
        true = jnp.exp(m)[..., None, None] * c, jnp.exp(m)[..., None] * n
        return sum(jnp.sum(jnp.sin(y)) for y in true) + jnp.vdot(h, dh), (h, *true)

    (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    return [*outputs, *(gradients[name] for name in x)]


JLA = {
    "states": dict(scale=0.3),
    "packed": dict(packed=True),
    "gates_near_the_floor": dict(states=False, i_shift=-20.0, f_shift=12.0),
}


@pytest.mark.parametrize("case", JLA)
def test_jla_computes_the_same_through_its_rows(case):
    package("jla")
    options = dict(JLA[case])
    scale = options.pop("scale", DHQK**-0.5)
    draw = np.random.default_rng(0).random((B, T))
    ids = np.cumsum(draw < 0.1, axis=1).astype("int32") if options.pop("packed", False) else None
    x = jla_inputs(**options)

    def ours(x):
        q, k, v, i, f, *state = (x[name] for name in NAMES if name in x)
        # Without states jla's m is -1e30: equal m make an equal eps.
        state = state or (
            jnp.zeros((B, NH, DHQK, DHV)),
            jnp.zeros((B, NH, DHQK)),
            jnp.full((B, NH), -1e30),
        )
        theirs = dict(q=q, scale=scale, DHQK=DHQK, initial_state=state, output_final_state=True)
        changed = dict(q=q, k=k, v=v, i=i, f=f)
        for _, code in rows("jax-linear-attention"):
            changed |= arguments(code, theirs)
        return mlstm_chunkwise(**changed, segment_ids=ids)

    other = functools.partial(of_jla, segment_ids=ids, scale=scale)
    compare(["h", "C", "N", *x], with_gradients(ours, x), with_gradients(other, x), 1e-5)


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
    impls = (functools.partial(of_jla, impl=y, **options) for y in ("auto", "reference"))
    compare(["h", "C", "N", *x], *(with_gradients(run, x) for run in impls), 1e-5)
    assert jla_with_the_page.chunkwise.call_count == 1


# ---------------- PyTorch


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
    result, pullback = jax.vjp(by_rows_of_fla, q, k, v, g)
    expected = [h.detach().numpy(), *(y.grad.numpy() for y in x)]
    compare(["h", *"qkvg"], [result, *pullback(dh)], expected, 1e-5)


def test_transformers_loads_a_checkpoint_that_was_trained_and_written(tmp_path, monkeypatch):
    """The gradients here are those of PyTorch, to a few times what they change by where all
    parameters are rounded once; and after a step with them so are the logits."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch, transformers = package("torch"), package("transformers", "torch")
    options = dict(vocab_size=50, hidden_size=128, embedding_dim=128, num_blocks=1, num_heads=2)
    options |= dict(chunkwise_kernel="chunkwise--native_autograd", step_kernel="native")
    options |= dict(sequence_kernel="native_sequence__native", chunk_size=16)
    torch.manual_seed(0)
    config = transformers.xLSTMConfig(autocast_kernel_dtype="float32", **options)
    model, source = transformers.xLSTMForCausalLM(config), tmp_path / "source"
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim == 2:
                x.normal_(std=0.3)
    model.save_pretrained(source)
    config, params = read(source)
    tensors = checkpoint.tensors_of(config, "float32", 1)
    tokens = np.random.default_rng(0).integers(3, 50, size=(2, 21))

    @jax.jit
    def loss(params):
        logits = jax.nn.log_softmax(forward(config, params, tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))

    gradients = jax.grad(loss)(params)
    given = torch.tensor(tokens)
    model.train()(given, labels=given, use_cache=False).loss.backward()
    bound = 4 * max(changes_by_rounding(jax.grad(loss), params))
    assert bound < 2e-4
    for name, x in model.named_parameters():
        result = checkpoint.tensor_of(config, gradients, tensors, name)
        assert_close(result, x.grad.numpy(), bound, name)
    trained = jax.tree.map(lambda x, g: x - 0.1 * g, params, gradients)
    checkpoint.write(source, written := tmp_path / "written", trained)
    loaded = transformers.xLSTMForCausalLM.from_pretrained(written, dtype=torch.float32)
    with torch.no_grad():
        before, after = (x.eval()(given, use_cache=False).logits.numpy() for x in (model, loaded))
    logits = forward(config, trained, tokens)
    assert_close(logits, after, ROUNDING)
    assert error(logits, before) > 10 * ROUNDING
