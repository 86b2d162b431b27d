"""The contract of mlstm_chunkwise: transformations, platforms and dtypes.

Gradients: test_gradients.py; errors: test_errors.py.
"""

import inspect
import re
import typing
from collections import Counter
from functools import partial

import jax
import pytest
from oracle import PUBLIC, array, assert_close, call_shapes, random_inputs, tolerance

from mlstm_pallas import mlstm_chunkwise, use_backend
from mlstm_pallas.planning.backend import requested_backend


def test_default_backend_on_a_cpu_is_xla():
    """The lowered programs have the same operations, each as often."""

    def operations(backend):
        call = jax.jit(partial(mlstm_chunkwise, chunk_size=16, backend=backend))
        text = call.lower(*call_shapes(2, 2, 40, 16, 32, "float32")).as_text()
        return Counter(re.findall(r"stablehlo\.\w+", text))

    assert operations(None) == operations("xla") != operations("interpret")


@pytest.mark.parametrize(
    ("given", "autocast"),
    [("float32", "bfloat16"), ("float32", "float16"), ("float16", "float32"), ("float32", None)],
)
def test_dtypes(given, autocast):
    inputs = random_inputs(1, 1, 2, 16, 16, 16, dtype=given)
    if autocast:  # of any dtypes
        inputs["v"] = array(inputs["v"], autocast)
    run = partial(mlstm_chunkwise, autocast_kernel_dtype=autocast)
    h, states = jax.eval_shape(partial(run, return_last_states=True), *inputs.values())
    assert (h.dtype, {x.dtype.name for x in states}) == (given, {"float32"})
    if autocast:
        rounded = {name: array(x, autocast) if name in "qkv" else x for name, x in inputs.items()}
        bound = tolerance("bfloat16" if given == "float16" else given, 32)
        assert_close(run(**inputs), array(mlstm_chunkwise(**rounded), "float32"), bound)


def test_use_backend_is_left_by_an_exception():
    def fails():
        with use_backend("interpret"):
            assert requested_backend() == "interpret"
            assert requested_backend("triton") == "triton"
            raise KeyError

    with use_backend("xla"):
        with pytest.raises(KeyError):
            fails()
        assert requested_backend() == "xla"
        with use_backend(None):
            assert requested_backend() is None
    assert requested_backend() is None


NONE = (
    *("c_initial", "n_initial", "m_initial", "c", "n", "m", "segment_ids", "sequence_lengths"),
    *("num_segments", "chunk_size", "autocast_kernel_dtype", "backend", "config"),
)
DEFAULTS = dict.fromkeys(NONE) | dict(
    return_last_states=False,
    recompute_states_in_bw=True,
    layout="BNTH",
    eps=1e-6,
    norm_val=1.0,
    stabilize_correctly=True,
    input_gate="exp",
    normalize=True,
)


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__name__)
def test_the_defaults_of_every_function_are_those_of_mlstm_chunkwise(function):
    """The documented ones; test_xlstm_jax.py has those of the adapters."""
    for signature in (*typing.get_overloads(function), function):
        parameters = inspect.signature(signature).parameters.values()
        result = {p.name: p.default for p in parameters if p.default not in (p.empty, ...)}
        assert result == {name: DEFAULTS[name] for name in result}
    assert {"eps", "norm_val", "stabilize_correctly"} <= result.keys()
