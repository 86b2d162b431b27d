"""jax_numpy_rank_promotion="raise" and jax_numpy_dtype_promotion="strict": every function traces in
both modes."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from oracle import mesh_of

from mlstm_pallas import (
    KernelConfig,
    StageConfig,
    mlstm_chunkwise,
    mlstm_recurrent_sequence,
    mlstm_recurrent_step,
    reference,
)
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel

B, NH, S, DHQK, DHHV = 1, 2, 40, 32, 16
GATES = {
    "exp": {},
    "sigmoid": dict(input_gate="sigmoid"),
    "unnormalised": dict(input_gate="sigmoid", normalize=False),
    "unstabilised": dict(stabilize_correctly=False, norm_val=2.0),
}
SPLITS = StageConfig(siz_b_LKV=16, siz_b_loop=32, num_splits=2)
ALGORITHMS = {
    "materialised": dict(config=KernelConfig(fused_min_heads=0)),
    "fused": dict(config=KernelConfig(fused_min_heads=1)),
    "stored": dict(config=KernelConfig(fused_min_heads=1), recompute_states_in_bw=False),
    "splits": dict(
        config=KernelConfig(
            fused_min_heads=1, recurrent_fw_H=SPLITS, recurrent_fw_C=SPLITS, recurrent_bw_dC=SPLITS
        )
    ),
}


@pytest.fixture(autouse=True)
def strict_modes():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def arguments(dtype, layout="BNTH", *, gates_dtype="float32", states=True, m_initial=True, S=S):
    array = jax.ShapeDtypeStruct
    lead = (B, NH, S) if layout == "BNTH" else (B, S, NH)
    x = [array((*lead, size), dtype) for size in (DHQK, DHQK, DHHV)] + [
        array(lead, gates_dtype)
    ] * 2
    if states:
        x += [array((B, NH, DHQK, DHHV), "float32"), array((B, NH, DHQK), "float32")]
    return [*x, array((B, NH), "float32")] if states and m_initial else x


def both(run, *x):
    """Traces the forward and the backward pass."""

    def outputs_and_gradients(*x):
        outputs, vjp = jax.vjp(run, *x)
        return outputs, vjp(outputs)

    result, gradients = jax.eval_shape(outputs_and_gradients, *x)
    assert [(y.shape, y.dtype) for y in gradients] == [(y.shape, y.dtype) for y in x]
    return result


# Each value of each parameter with those that its code depends on; float16 takes the paths of
# bfloat16.
CALLS = [
    ("interpret", "bfloat16", "materialised", "BTNH", "exp"),
    ("interpret", "bfloat16", "stored", "BTNH", "exp"),
    ("interpret", "bfloat16", "splits", "BTNH", "exp"),
    ("interpret", "bfloat16", "fused", "BNTH", "unnormalised"),
    ("interpret", "float32", "materialised", "BNTH", "unstabilised"),
    ("xla", "bfloat16", "materialised", "BNTH", "exp"),
    ("xla", "float32", "materialised", "BTNH", "unnormalised"),
    ("xla", "float32", "materialised", "BTNH", "unstabilised"),
]


@pytest.mark.parametrize(("backend", "dtype", "algorithm", "layout", "gate"), CALLS)
def test_forward_and_backward(backend, dtype, algorithm, layout, gate):
    """Packed sequences, S no multiple of the chunk, initial and last states."""
    ids = jnp.zeros((B, S), "int32")
    x = arguments(dtype, layout, m_initial="sigmoid" not in GATES[gate].values())
    options = dict(
        segment_ids=ids,
        sequence_lengths=ids[:, 0],
        backend=backend,
        layout=layout,
        chunk_size=32,
        **ALGORITHMS[algorithm],
        **GATES[gate],
    )
    h, states = both(functools.partial(mlstm_chunkwise, return_last_states=True, **options), *x)
    assert (h.shape, h.dtype) == (x[2].shape, jnp.dtype(dtype))
    assert [y.shape for y in states] == [(B, NH, DHQK, DHHV), (B, NH, DHQK), (B, NH)]


@pytest.mark.parametrize("gate", ["exp", "unnormalised", "unstabilised"])
def test_the_plain_function_and_the_recurrence(gate):
    x = arguments("bfloat16", m_initial="sigmoid" not in GATES[gate].values())
    assert both(functools.partial(reference.chunkwise, **GATES[gate]), *x).shape == x[2].shape
    run = functools.partial(reference.recurrence, segment_ids=jnp.zeros((B, S), "int32"))
    assert both(functools.partial(run, **GATES[gate]), *x)[0].shape == x[2].shape


@pytest.mark.parametrize(
    ("dtype", "states_dtype", "gate"),
    [
        ("float32", "float32", "unstabilised"),
        ("bfloat16", "bfloat16", "exp"),
        ("bfloat16", "float32", "sigmoid"),
        ("bfloat16", None, "unnormalised"),
    ],
)
@pytest.mark.parametrize("backend", ["interpret", "xla"])
def test_step(backend, dtype, states_dtype, gate):
    array = jax.ShapeDtypeStruct
    shapes = [(B, NH, DHQK)] * 2 + [(B, NH, DHHV)] + [(B, NH)] * 2
    x = [array(shape, dtype) for shape in shapes]
    if states_dtype:
        x += [array(shape, states_dtype) for shape in ((B, NH, DHQK, DHHV), (B, NH, DHQK), (B, NH))]
    h, states = jax.eval_shape(
        functools.partial(mlstm_recurrent_step, backend=backend, **GATES[gate]), *x
    )
    assert (h.shape, h.dtype) == ((B, NH, DHHV), jnp.dtype(dtype))
    assert all(y.dtype == jnp.dtype(states_dtype or "float32") for y in states)


@pytest.mark.parametrize("backend", ["interpret", "xla"])
def test_several_steps(backend):
    x = arguments("bfloat16", S=3)
    run = functools.partial(mlstm_recurrent_sequence, backend=backend)
    h, _ = jax.eval_shape(run, *x) if backend == "interpret" else both(run, *x)
    assert h.shape == x[2].shape


@pytest.mark.parametrize(
    ("backend", "algorithm", "dtype", "layout"),
    [
        ("interpret", "splits", "bfloat16", "BTNH"),
        ("xla", "materialised", "float32", "BNTH"),
    ],
)
def test_sequence_parallel(backend, algorithm, dtype, layout):
    options = (
        dict(axis_name="s", return_last_states=True, layout=layout, backend=backend, chunk_size=16)
        | ALGORITHMS[algorithm]
    )
    sequence = P(None, None, "s") if layout == "BNTH" else P(None, "s")
    run = jax.shard_map(
        functools.partial(mlstm_chunkwise_sequence_parallel, **options),
        mesh=mesh_of((4,), names="s"),
        in_specs=(sequence,) * 5 + (P(),) * 3,
        out_specs=(sequence, P()),
        check_vma=backend != "interpret",
    )
    x = arguments(dtype, layout, S=128)
    assert both(run, *x)[0].shape == x[2].shape
