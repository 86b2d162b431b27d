"""The contract of mlstm_chunkwise: backends, dtypes and defaults."""

import inspect
import re
import typing
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import pytest
from arguments import option
from oracle import (
    NAMES,
    PUBLIC,
    array,
    assert_same_bits,
    call_shapes,
    cotangents_for,
    for_device,
    gradients_of_call,
    param,
    random_inputs,
    refused,
    slow_param,
    token_at,
)

from mlstm_pallas import (
    mlstm_chunkwise,
    mlstm_recurrent_step,
    mlstm_ring_states,
    mlstm_ring_step,
    reference,
    use_backend,
)
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel
from mlstm_pallas.xlstm_jax.triton_stablef import mlstm_chunkwise_triton_stablef

VARIABLE = "MLSTM_PALLAS_BACKEND"
SMALL = random_inputs(1, 1, 1, 16, 16, 16, states=False).values()


@pytest.mark.slow
def test_default_backend_on_a_cpu_is_xla():
    """The compiled programs have the same operations, each as often."""

    def operations(backend):
        call = jax.jit(partial(mlstm_chunkwise, chunk_size=16, backend=backend))
        text = call.lower(*call_shapes(2, 2, 40, 16, 32, "float32")).compile().as_text()
        return Counter(re.findall(r" ([a-z][a-z-]*)\(", text))

    assert operations(None) == operations("xla")
    assert operations(None)["while"]  # the recurrence, so that they are found


def traced(call=mlstm_chunkwise, **options):
    """How a call runs on a GPU: with "compiled" or "interpreted" kernels, or in "xla"."""
    with for_device("NVIDIA H200"):
        text = str(jax.make_jaxpr(lambda: call(*SMALL, **options))())
    kernels = "interpreted" if "interpret=True" in text else "compiled"
    return kernels if "pallas_call" in text else "xla"


def both():
    """Of mlstm_chunkwise and the adapter."""
    (how,) = {traced(), traced(mlstm_chunkwise_triton_stablef)}
    return how


def fails():
    with use_backend("triton"):
        assert both() == "compiled"
        assert traced(backend="interpret") == "interpreted"
        raise KeyError


def test_the_backend_is_the_argument_then_that_of_use_backend_then_that_of_the_environment(
    monkeypatch,
):
    """The variable is read when a function is traced; use_backend holds in its thread, until it is
    left, even by an exception."""
    assert traced() == "compiled"
    for value, expected in {"xla": "xla", "": "compiled", "interpret": "interpreted"}.items():
        monkeypatch.setenv(VARIABLE, value)
        assert both() == expected
        assert traced(backend="xla") == "xla"
    with use_backend("xla"), ThreadPoolExecutor() as threads:
        assert both() == "xla"
        assert threads.submit(traced).result() == "interpreted"
        with use_backend(None):
            assert both() == "compiled"
        assert use_backend(None)(both)() == "compiled"  # as a decorator
        with pytest.raises(KeyError):
            fails()
        assert both() == "xla"
    assert both() == "interpreted"


def test_a_wrong_backend_of_the_environment_is_named(monkeypatch):
    monkeypatch.setenv(VARIABLE, "cuda")
    message = f"{VARIABLE} is 'cuda', expected {option('backend').expected[8:]}"
    refused(ValueError, message, mlstm_chunkwise, *SMALL)
    refused(ValueError, message, mlstm_recurrent_step, *(x[:, :, 0] for x in SMALL))
    monkeypatch.setenv(VARIABLE, "mosaic_gpu")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    with pytest.raises(ValueError, match=rf"^{VARIABLE} is 'mosaic_gpu' and jax is "):
        mlstm_chunkwise(*SMALL)


@pytest.mark.parametrize(
    ("given", "autocast"), [("float32", "bfloat16"), ("float32", None), ("float16", "float32")]
)
def test_dtypes(given, autocast):
    x = random_inputs(1, 1, 2, 16, 16, 16, dtype=given)
    if autocast:  # of any dtypes
        x["v"] = array(x["v"], autocast)
    run = partial(mlstm_chunkwise, autocast_kernel_dtype=autocast, return_last_states=True)
    h, states = jax.eval_shape(run, *x.values())
    assert (h.dtype, {y.dtype.name for y in states}) == (given, {"float32"})


OF_16_BITS = dict.fromkeys(("i", "f", "c_initial", "n_initial", "m_initial"), "bfloat16")


@pytest.mark.slow
def test_gates_and_states_of_16_bits_are_those_of_the_same_values_in_float32():
    """Gates of any function, and the initial states of mlstm_chunkwise; steps return states in the
    dtypes of theirs. Gradients have the dtypes of the arrays."""
    x = random_inputs(1, 1, 2, 20, 16, 8)
    x |= {name: array(x[name], dtype) for name, dtype in OF_16_BITS.items()}
    wide = {name: array(y, "float32") for name, y in x.items()}
    run, cotangents = gradients_of_call(backend="xla"), cotangents_for(wide, "float32")
    (outputs, gradients), (expected, desired) = (run(y, cotangents) for y in (x, wide))
    assert {y.dtype.name for y in outputs} == {"float32"}
    assert_same_bits(outputs, expected)
    for name, y in x.items():
        assert gradients[name].dtype == y.dtype
        assert_same_bits(gradients[name], array(desired[name], y.dtype))

    @jax.jit
    def steps(x):
        x = token_at(x, 0)
        q, k, v, i, f, *states = (x[name] for name in NAMES)
        rings = mlstm_ring_states(*states, dtype="float32")
        return mlstm_recurrent_step(**x), mlstm_ring_step(q, k, v, i, f, rings)

    gates = {name: x[name] for name in "if"}
    assert_same_bits(steps(wide | gates), steps(wide))


# A function, the dtype of C, options.
ROUNDED = [
    param(mlstm_chunkwise, "bfloat16", id="alone-bfloat16"),
    slow_param(mlstm_chunkwise_sequence_parallel, "bfloat16", id="shards-bfloat16", axis_name="s"),
    param(reference.chunkwise, "float16", id="reference-float16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "dtype", "options"), ROUNDED)
def test_c_has_the_dtype_that_the_caller_asks_for(function, dtype, options):
    """It is rounded, and its cotangent has that dtype; n, m and h are as ever."""
    run = partial(function, return_last_states=True, **options)
    x = [y[None] for y in random_inputs(1, 1, 1, 16, 16, 16, states=False).values()]

    def call(*x, **keywords):
        return jax.vmap(partial(run, **keywords), axis_name="s")(*x)

    h, (c, n, m) = call(*x)
    result = call(*x, state_dtype=dtype)
    assert_same_bits(result, (h, (array(c, dtype), n, m)))
    dtypes = [y.dtype.name for y in jax.tree.leaves(result)]
    assert dtypes == ["float32", dtype, "float32", "float32"]
    wide = jax.vjp(call, *x)[1]((h, (*map(partial(array, dtype="float32"), result[1]),)))
    assert_same_bits(jax.vjp(partial(call, state_dtype=dtype), *x)[1](result), wide)


DEFAULTS = dict(
    return_last_states=False,
    recompute_states_in_bw=True,
    eps=1e-6,
    norm_val=1.0,
    stabilize_correctly=True,
    input_gate="exp",
    normalize=True,
    reverse=False,
)


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__name__)
def test_the_defaults_of_every_function_are_those_of_mlstm_chunkwise(function):
    """The documented ones, None but for these; test_xlstm_jax.py has those of the adapters."""
    for signature in (*typing.get_overloads(function), function):
        parameters = inspect.signature(signature).parameters.values()
        result = {p.name: p.default for p in parameters if p.default not in (p.empty, ...)}
        assert result == {name: DEFAULTS.get(name) for name in result}
    assert {"eps", "norm_val", "stabilize_correctly"} <= result.keys()
