"""The models of the tutorial: nnx and linen are one function, token by token too.

docs/tutorial.md trains the former.
"""

import jax
import numpy as np
import pytest
import xlstm_linen
import xlstm_nnx
from flax import nnx
from oracle import tolerance

SIZES = dict(vocabulary=7, width=32, heads=2, layers=2)


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
