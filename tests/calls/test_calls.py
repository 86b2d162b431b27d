"""Whole calls: outputs and every gradient against the recurrence and its derivatives in float64:
algorithms, layouts, tiles, lengths, gates, normalisers, cotangents, directions; what is beyond the
range of float16; states after every N-th step.

On Mosaic GPU: mosaic_gpu_cases.py; packed prompts: test_packed_sequences.py; sharded:
test_sharding.py; of split sequences: test_distributed.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_checks import (
    CALLS,
    calls_of,
    check_call,
    recurrence_of_lengths,
)
from numpy_evaluator import in_numpy
from oracle import (
    BACKENDS,
    NAMES,
    OUTPUTS,
    assert_close,
    compare,
    in_float64,
    in_layout,
    oracle,
    random_inputs,
    refused,
    swapped,
    token_at,
    tolerance,
)

from mlstm_pallas import (
    KernelConfig,
    mlstm_chunkwise,
    mlstm_chunkwise_states,
    mlstm_recurrent_step,
    mlstm_ring_states,
)


@pytest.mark.parametrize("call", [*calls_of(CALLS)])
def test_against_float64(call):
    check_call(**call)


# ---------------- lengths


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


# ---------------- states after every N-th step


@pytest.mark.quick("64-32-None-lengths3-xla", "83-16-False-lengths1-interpret")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("S", "N", "fused", "lengths"),
    [
        (83, 32, True, None),
        (83, 16, False, [70, 33]),
        (83, 128, None, None),
        (64, 32, None, [64, 33]),
    ],
)
def test_states_after_every_nth_step(backend, S, N, fused, lengths):
    """Heads are padded, and so is the last chunk, or these states end with those that return."""
    x = random_inputs(1, 2, 2, S, 20, 37, resets=True)
    run = functools.partial(
        mlstm_chunkwise_states,
        every=N,
        layout="BTNH",
        backend=backend,
        config=KernelConfig(fused=fused),
        sequence_lengths=lengths and np.array(lengths),
    )
    h, last, states = jax.jit(run)(*in_layout("BTNH", NAMES, [x[name] for name in NAMES]))
    ends = np.array(lengths or [S, S])

    def after(ends):
        exact = in_numpy(lambda x: recurrence_of_lengths(ends)(**x))
        return jax.tree.leaves(in_float64(exact, x))

    compare(OUTPUTS, (swapped(h), *last), after(ends), 3e-6)
    for j in range(S // N):
        expected = after(np.minimum((j + 1) * N, ends))[1:]
        compare("cnm", [y[:, j] for y in states], expected, 3e-6)
    assert {y.shape[1] for y in states} == {S // N}


@pytest.mark.slow
def test_c_is_rounded_once_to_the_dtype_of_q():
    x = random_inputs(2, 1, 2, 64, 16, 16, dtype="bfloat16")
    run = functools.partial(mlstm_chunkwise_states, every=32, layout="BNTH", backend="xla")
    *_, (c, n, m) = run(*x.values())
    assert {y.dtype.name for y in (c, n, m)} == {"float32"}
    *_, wide = in_float64(lambda x: run(**x), x)
    assert {y.dtype.name for y in wide} == {"float64"}
    first = {name: y if "initial" in name else y[:, :, :32] for name, y in x.items()}
    bound = tolerance("bfloat16", 16)
    compare("cnm", (c[:, 0], n[:, 0], m[:, 0]), oracle(first)[1:], bound)
    assert jnp.array_equal(c, c.astype("bfloat16").astype("float32"))


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
