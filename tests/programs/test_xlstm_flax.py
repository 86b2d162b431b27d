"""The models of the tutorial: nnx and linen are one function, token by token too.

docs/tutorial.md trains the former; its mixed precision is that of docs/training.md.
"""

import functools
import math
import re
from pathlib import Path

import byte_lm
import jax
import jax.numpy as jnp
import numpy as np
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


BOUND = 20 * tolerance("float32", SIZES["width"])  # of some twenty products in a row


def model_of(kind):
    """(params, tokens, states=None, **options) -> logits, states; parameters, which both kinds
    share; and states of B sequences before the first token."""
    linen = xlstm_linen.LanguageModel(**SIZES)
    params = jax.jit(linen.init)(jax.random.key(1), np.zeros((1, 4), int))
    if kind == "linen":
        return linen.apply, params, functools.partial(xlstm_linen.empty_states, linen, params)
    model = xlstm_nnx.LanguageModel(**SIZES, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, params["params"])
    nnx.update(model, state)
    graph, params = nnx.split(model)
    empty = functools.partial(xlstm_nnx.empty_states, model)
    return lambda params, *x, **options: nnx.merge(graph, params)(*x, **options), params, empty


def assert_equal(actual, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=BOUND), actual, expected)


@pytest.mark.slow
def test_both_models_compute_the_same():
    tokens = jax.random.randint(jax.random.key(0), (2, 20), 0, SIZES["vocabulary"])
    nnx_results, results = (
        jax.tree.leaves(jax.jit(run)(params, tokens))
        for run, params, _ in map(model_of, ("nnx", "linen"))
    )
    assert_equal(nnx_results, results)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_steps_of_a_token(kind):
    """From no states or empty ones, after a prefill, and after a reset of the first sequence."""
    tokens = np.array([[1, 2, 3, 4], [5, 6, 0, 1]])
    run, params, empty = model_of(kind)
    run, reset = jax.jit(run), dict(resets=np.array([True, False]))
    expected, last = run(params, tokens)
    for states in (), (empty(2),):
        logits, after = run(params, tokens[:, 0], *states, **reset)
        assert_equal(logits, expected[:, 0])
        assert_equal(run(params, tokens[:, 1], after)[0], expected[:, 1])
    _, before = run(params, tokens[:, :3])
    assert_equal(run(params, tokens[:, 3], before), (expected[:, 3], last))
    first, _ = run(params, tokens[:, 3:])
    logits, _ = run(params, tokens[:, 3], before, **reset)
    assert_equal([*logits], [first[0, 0], expected[1, 3]])


# Rows as grain packs them: documents from 1, padding 0 at the end.
IDS = np.array([np.repeat([1, 2, 0], [5, 9, 2]), np.repeat([1, 2, 3], [8, 1, 7])])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "by"), [("nnx", "segment_ids"), ("linen", "resets")])
def test_documents_of_a_packed_row_compute_what_they_compute_alone(kind, by):
    """Alone, each document has a row and padding behind."""
    tokens = np.random.default_rng(0).integers(0, SIZES["vocabulary"], IDS.shape)
    places = [(b, IDS[b] == n) for b, row in enumerate(IDS) for n in np.unique(row) if n]
    alone = np.zeros((len(places), IDS.shape[1]), int)
    for row, place in zip(alone, places, strict=True):
        row[: sum(place[1])] = tokens[place]
    run, params, _ = model_of(kind)
    packed = {by: IDS if by == "segment_ids" else np.diff(IDS, axis=1, prepend=-1) != 0}
    logits, _ = jax.jit(run)(params, tokens, **packed)
    expected, _ = jax.jit(run)(params, alone)
    for row, place in zip(expected, places, strict=True):
        assert_equal(logits[place], row[: sum(place[1])])


def cast_of_page():
    [code] = re.findall("```python\n(def cast.*?)```", PAGE, re.S)
    exec(compile(code, "docs/training.md", "exec"), space := dict(jnp=jnp))
    return space["cast"]


def results_of(primitive, jaxpr):
    """In a model, beside the mLSTM: the elements per token and the dtype of each result."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == primitive:
            aval = eqn.outvars[0].aval  # (B, S, ...)
            yield math.prod(aval.shape[2:]), aval.dtype.name
        for inner in () if eqn.params.get("name") == "mlstm" else jaxprs_in(eqn):
            yield from results_of(primitive, getattr(inner, "jaxpr", inner))


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


@pytest.mark.slow
@pytest.mark.parametrize("model", ["nnx", "linen", "byte_lm"])
def test_mixed_precision_has_the_dtypes_of_its_table(model, seen):
    """Those of docs/training.md; byte_lm.py has the same ones with --dtype=bfloat16."""
    cast, tokens = cast_of_page(), jnp.zeros((1, 16), jnp.int32)
    mlstm = seen.pop("function")
    if model == "nnx":
        make = functools.partial(xlstm_nnx.LanguageModel, **SIZES, mlstm=mlstm)
        graph, params = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))

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
    found = {*results_of("dot_general", traced.jaxpr)}
    assert {dtype for n, dtype in found if n in float32} == {"float32"}
    assert {dtype for n, dtype in found if n not in float32} == {"bfloat16"}
    # The gradients of the embedding's rows are summed in the dtype of the rows.
    assert (SIZES["width"], "float32") in {*results_of("gather", traced.jaxpr)}
