"""The models of the tutorial: nnx and linen are one function, token by token too.

docs/tutorial.md trains the former; its mixed precision is that of docs/training.md.
"""

import math
import re
from pathlib import Path

import byte_lm
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import xlstm_linen
import xlstm_nnx
from byte_lm_mesh import make_mesh
from flax import nnx
from numpy_evaluator import jaxprs_in
from oracle import tolerance
from xlstm_model import Config

from mlstm_pallas import mlstm_chunkwise

SIZES = dict(vocabulary=7, width=32, heads=2, layers=2)
PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


@pytest.mark.slow
def test_both_models_and_their_steps_compute_the_same():
    tokens = jax.random.randint(jax.random.key(0), (2, 20), 0, SIZES["vocabulary"])
    linen = xlstm_linen.LanguageModel(**SIZES)
    params = jax.jit(linen.init)(jax.random.key(1), tokens)
    expected, last = jax.jit(linen.apply)(params, tokens)

    model = xlstm_nnx.LanguageModel(**SIZES, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, params["params"])
    nnx.update(model, state)
    bound = 20 * tolerance("float32", SIZES["width"])  # of some twenty products in a row
    run = nnx.jit(lambda model, tokens, states: model(tokens, states))
    np.testing.assert_allclose(run(model, tokens, None)[0], expected, atol=bound)

    _, states = run(model, tokens[:, :-2], None)  # a prefill, then a step of each
    logits, states = run(model, tokens[:, -2], states)
    np.testing.assert_allclose(logits, expected[:, -2], atol=bound)
    logits, states = jax.jit(linen.apply)(params, tokens[:, -1], states)
    np.testing.assert_allclose(logits, expected[:, -1], atol=bound)
    for x, y in zip(states, last, strict=True):
        np.testing.assert_allclose(x, y, atol=bound)


def of_page():
    """The names of the first two blocks of the page."""
    space = {}
    for code in re.findall("```python\n(.*?)```", PAGE, re.S)[:2]:
        exec(compile(code, "docs/training.md", "exec"), space)
    return space


def products(jaxpr):
    """The products of a model, beside the mLSTM: the elements per token and the dtype of each."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            aval = eqn.outvars[0].aval  # (B, S, ...)
            yield math.prod(aval.shape[2:]), aval.dtype.name
        for inner in () if eqn.params.get("name") == "mlstm" else jaxprs_in(eqn):
            yield from products(getattr(inner, "jaxpr", inner))


@pytest.fixture
def seen(monkeypatch):
    """The dtypes of the mLSTM's arrays in a model, by name."""
    dtypes = {}

    def mlstm(*x, **options):
        y = mlstm_chunkwise(*x, **options)
        outputs = dict(zip("hcnm", jax.tree.leaves(y), strict=False))
        arrays = dict(zip("qkvif", x, strict=False)) | outputs
        dtypes.update({name: y.dtype.name for name, y in arrays.items()})
        return y

    monkeypatch.setattr(xlstm_linen, "mlstm_chunkwise", mlstm)
    monkeypatch.setattr(byte_lm, "mlstm_chunkwise", mlstm)
    dtypes["function"] = mlstm
    return dtypes


@pytest.mark.quick("nnx", "linen")
@pytest.mark.parametrize("model", ["nnx", "linen", "byte_lm"])
def test_mixed_precision_has_the_dtypes_of_its_table(model, seen):
    """Those of docs/training.md; byte_lm.py has the same ones with --dtype=bfloat16."""
    cast, tokens = of_page()["cast"], jnp.zeros((1, 16), jnp.int32)
    mlstm = seen.pop("function")
    if model == "nnx":
        graph, params = nnx.split(xlstm_nnx.LanguageModel(**SIZES, mlstm=mlstm, rngs=nnx.Rngs(0)))

        def logits_of(params):
            return nnx.merge(graph, jax.tree.map_with_path(cast, params))(tokens)[0]
    elif model == "linen":
        linen = xlstm_linen.LanguageModel(**SIZES)
        params = jax.eval_shape(linen.init, jax.random.key(0), tokens)

        def logits_of(params):
            return linen.apply(jax.tree.map_with_path(cast, params), tokens)[0]
    else:
        config = Config(7, 32, num_blocks=2, num_heads=2)
        options = byte_lm.Model(config, make_mesh(""), "bfloat16")
        params = jax.eval_shape(lambda: byte_lm.initial_params(config, jax.random.key(0)))

        def logits_of(params):
            return byte_lm.logits_of(options, params, tokens)

    traced, logits = jax.make_jaxpr(logits_of, return_shape=True)(params)
    assert logits.dtype == "float32"
    expected = dict.fromkeys("qkvh", "bfloat16") | dict.fromkeys("ifcnm", "float32")
    assert {*"qkvhif"} <= seen.keys()
    assert seen.items() <= expected.items()  # byte_lm.py has no states
    NH = SIZES["heads"]
    float32 = {SIZES["vocabulary"], NH, 2 * NH}  # the logits and the gates; byte_lm.py joins both
    found = {*products(traced.jaxpr)}
    assert {dtype for n, dtype in found if n in float32} == {"float32"}
    assert {dtype for n, dtype in found if n not in float32} == {"bfloat16"}


@pytest.mark.slow
def test_mixed_precision_keeps_gradients_and_moments_in_float32():
    page = of_page()
    arguments = (page[name] for name in ("params", "inputs", "targets"))
    step = jax.value_and_grad(page["loss_of"], argnums=1)
    loss, gradients = jax.eval_shape(lambda *x: step(page["graph"], *x), *arguments)
    moments = jax.eval_shape(optax.adamw(1e-3).init, page["params"])
    leaves = jax.tree.leaves((loss, page["params"], gradients, moments))
    assert {x.dtype.name for x in leaves if x.dtype != "int32"} == {"float32"}
