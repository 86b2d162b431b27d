"""Calls that no row of the table is: no heads, very many, what is beyond the largest number of
float16, and dtypes of other bytes."""

import functools

import compile_report
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine import Call
from oracle import (
    assert_close,
    call_shapes,
    cotangents_for,
    gradients_of_call,
    in_float64,
    needs_mosaic_gpu,
    random_inputs,
    refused,
    token_at,
    tolerance,
)
from relations import value

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_chunkwise_states,
    mlstm_recurrent_step,
    mlstm_ring_states,
)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0, 2, 20, 16, 24), (2, 0, 20, 16, 24)], ids=str)
@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_no_batch_and_no_heads(backend, shape):
    x = random_inputs(0, *shape)
    run = gradients_of_call(backend=backend, chunk_size=16)
    outputs, gradients = run(x, cotangents_for(x, "float32"))
    assert [y.shape for y in outputs] == [x["v"].shape, *(y.shape for y in [*x.values()][5:])]
    assert {name: y.shape for name, y in gradients.items()} == {
        name: y.shape for name, y in x.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_no_batch_of_documents(backend):
    x = random_inputs(0, 0, 2, 20, 16, 24, states=False)
    lengths = np.zeros((0, 3), "int32")
    options = dict(segment_lengths=lengths, return_last_states=True, chunk_size=16)
    run = functools.partial(mlstm_chunkwise, backend=backend, **options)
    h, states = run(**x)
    assert (h.shape, [y.shape[:3] for y in states]) == (x["v"].shape, [(0, 3, 2)] * 3)
    gradients = jax.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(run(**x)))))(x)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, x)


@pytest.mark.slow
def test_more_heads_than_an_int16_counts():
    call = Call("mlstm_chunkwise", (1, 32_800, 2, 1, 1), options=dict(return_last_states=True))
    value(call, "xla", ("model",))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "uint32"])
def test_any_integer_dtype_is_clipped(dtype):
    """S does not fit int8, and int32 does not have all of uint32."""
    x = random_inputs(2, 2, 1, 300, 16, 16, states=False).values()
    bounds = np.iinfo(dtype)
    result, expected = (
        mlstm_chunkwise(*x, sequence_lengths=lengths, backend="xla")
        for lengths in (
            jnp.array([bounds.min, bounds.max], dtype),
            jnp.array([0, min(bounds.max, 300)]),
        )
    )
    assert_close(result, expected, tolerance("float32", 300 + 16))


# ---------------- what is beyond the largest number of float16


def overflowing(S, q, k, v):
    """Constant rows with open gates: h is v at every step, whatever lies between."""
    x, rows = random_inputs(0, 1, 2, S, 16, 16, dtype="float16", states=False), (q, k, v, 0, 20)
    return {name: jnp.full_like(x[name], y) for name, y in zip("qkvif", rows, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_what_is_beyond_float16_is_inf_or_right(fused):
    """C = 8 * 2048 t after t steps, beyond 65504 after a chunk of 16; the steps of the first chunk
    do not read it.

    q k may be 2^18 after the scale, of a C of at most 2^14: a kernel that rounds its scores has
    inf, one that keeps them in float32 has h.
    """
    config = KernelConfig(chunk_size=16, fused=fused)
    run = jax.jit(functools.partial(mlstm_chunkwise, backend="interpret", config=config))
    of_states, of_scores = (
        np.asarray(run(**overflowing(64, *x))) for x in ((1, 8, 2048), (256, 256, 1))
    )
    bound = tolerance("float16", 32)
    assert_close(of_states[:, :, :16], np.full((1, 2, 16, 16), 2048.0), bound)
    assert np.isposinf(of_states[:, :, 16:]).all()
    finite = np.isfinite(of_scores)
    assert np.isposinf(of_scores[~finite]).all()
    assert_close(of_scores[finite], np.ones(finite.sum()), bound)


def test_states_of_a_step_beyond_float16_are_inf():
    x = token_at(overflowing(1, q=1, k=64, v=2048), 0)
    for name, shape in dict(c_initial=(16, 16), n_initial=(16,), m_initial=()).items():
        x[name] = jnp.zeros((1, 2, *shape), "float16")
    h, (c, n, _) = mlstm_recurrent_step(**x, backend="interpret")
    assert jnp.isposinf(c).all()  # 64 * 2048
    assert (n == 64).all()
    assert_close(h, np.full(h.shape, 2048.0), 2.0**-11, "h")  # of float32 states


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["xla", "interpret", pytest.param("mosaic_gpu", marks=needs_mosaic_gpu)]
)
def test_a_document_that_overflows_float16_has_no_gradients_if_nothing_reads_it(backend, request):
    """In float16 its state is inf after a chunk, and the gradient of the state is 0."""
    if backend == "mosaic_gpu":
        request.getfixturevalue("interpreted")
    S, first = 384, np.arange(384) < 256
    x = random_inputs(3, 1, 1, S, 64, 64, dtype="float16", states=False, f_shift=20.0)
    large = {name: jnp.where(first[:, None], np.float16(256), x[name]) for name in "kv"}
    dh, *_ = cotangents_for(x, "float16")
    run = gradients_of_call(backend=backend, return_last_states=False, config=KernelConfig(128))
    ids = 1 - first[None].astype("int32")
    _, gradients = run(x | large, [jnp.where(first[:, None], 0, dh)], segment_ids=ids)
    for name, y in gradients.items():
        assert np.isfinite(np.float64(y)).all(), f"d{name} is not finite"
        assert not np.any(np.asarray(y)[:, :, first]), f"d{name} of the document is not 0"


@pytest.mark.slow
def test_c_is_rounded_once_to_the_dtype_of_q():
    x = random_inputs(2, 1, 2, 64, 16, 16, dtype="bfloat16")
    run = functools.partial(mlstm_chunkwise_states, every=32, layout="BNTH", backend="xla")
    *_, (c, n, m) = run(*x.values())
    assert {y.dtype.name for y in (c, n, m)} == {"float32"}
    *_, wide = in_float64(lambda x: run(**x), x)
    assert {y.dtype.name for y in wide} == {"float64"}
    assert jnp.array_equal(c, c.astype("bfloat16").astype("float32"))


@pytest.mark.slow
def test_backend_and_config_are_those_of_the_call():
    """They change what runs, not the results."""

    def jaxpr(**options):
        x = dict(layout="BNTH", backend="xla") | options
        run = functools.partial(mlstm_chunkwise_states, every=16, **x)
        return str(jax.make_jaxpr(run)(*call_shapes(2, 2, 52, 16, 8)))

    assert "pallas_call" not in jaxpr()
    assert "pallas_call" in jaxpr(backend="interpret")
    assert jaxpr(config=KernelConfig(batch_invariant=True)) != jaxpr()


def test_the_fused_scan_stores_no_other_states():
    """Its chunks and those of the config are shorter."""
    config = KernelConfig(chunk_size=16, fused=True, triton_recurrent_fw_H=dict(siz_b_L=16))
    options = dict(every=64, layout="BNTH", backend="interpret", config=config)
    run = functools.partial(mlstm_chunkwise_states, **options)
    traced = jax.make_jaxpr(run)(*call_shapes(1, 2, 256, 16, 32))
    kernels = compile_report.equations(traced.jaxpr, "pallas_call")
    [scan] = (x for x in kernels if x.params["name"] == "recurrent_fw_H")
    assert scan.outvars[-1].aval.shape == (2, 256 // 64, 16, 32)


def test_other_steps_are_refused():
    x = random_inputs(3, 1, 2, 32, 16, 16).values()
    message = "every is 24, expected a power of two >= 16"
    refused(ValueError, message, mlstm_chunkwise_states, *x, layout="BNTH", every=24)


def test_dtypes_may_be_of_the_other_byte_order():
    """As those of arrays from files are."""
    x = random_inputs(0, 1, 2, 16, 16, 16, states=False)
    options = dict(autocast_kernel_dtype=">f2", state_dtype=">f2", return_last_states=True)

    def states_of_a_ring(x):
        h, (c, n, m) = mlstm_chunkwise(**x, **options)
        return h, c, mlstm_ring_states(c, n, m, dtype=np.dtype(">f4")).k

    dtypes = [y.dtype for y in jax.eval_shape(states_of_a_ring, x)]
    assert dtypes == ["float32", "float16", "float32"]
