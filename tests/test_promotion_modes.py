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
SPLITS = dict(siz_b_LKV=16, num_splits=2)
FUSED = KernelConfig(fused=True)
ALGORITHMS = {
    "materialised": dict(config=KernelConfig(fused=False)),
    "fused": dict(config=FUSED),
    "stored": dict(config=FUSED, recompute_states_in_bw=False),
    "splits": dict(
        config=FUSED.replace(
            num_splits=2,
            triton_recurrent_fw_H=dict(siz_b_LKV=16, state_rows=32),
            triton_recurrent_fw_C=SPLITS,
            triton_recurrent_bw_dC=SPLITS,
        )
    ),
}
LEADING = {"BNTH": (B, NH, S), "BTNH": (B, S, NH)}  # axes
STATES = [(B, NH, DHQK, DHHV), (B, NH, DHQK), (B, NH)]


@pytest.fixture(autouse=True)
def strict_modes():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def arguments(dtype, lead, gates="float32", states="float32", gate="exp"):
    """Shapes of a function's arguments, without m_initial where the gate has none."""
    shapes = [(*lead, size) for size in (DHQK, DHQK, DHHV)] + [lead] * 2 + STATES
    x = list(map(jax.ShapeDtypeStruct, shapes, [dtype] * 3 + [gates] * 2 + [states] * 3))
    return x[: 8 - ("input_gate" in GATES[gate])]


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
    ids, x = jnp.zeros((B, S), "int32"), arguments(dtype, LEADING[layout], gate=gate)
    options = dict(segment_ids=ids, sequence_lengths=ids[:, 0], chunk_size=32)
    options |= dict(backend=backend, layout=layout) | ALGORITHMS[algorithm] | GATES[gate]
    h, states = both(functools.partial(mlstm_chunkwise, return_last_states=True, **options), *x)
    assert (h.shape, h.dtype) == (x[2].shape, jnp.dtype(dtype))
    assert [y.shape for y in states] == STATES


@pytest.mark.parametrize("gate", ["exp", "unnormalised", "unstabilised"])
def test_the_plain_function_the_recurrence_and_several_steps(gate):
    x = arguments("bfloat16", (B, NH, S), gate=gate)
    ids = jnp.zeros((B, S), "int32")
    assert both(functools.partial(reference.chunkwise, **GATES[gate]), *x).shape == x[2].shape
    recurrence = functools.partial(reference.recurrence, segment_ids=ids)
    for run in (recurrence, functools.partial(mlstm_recurrent_sequence, backend="xla")):
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
    x = arguments(dtype, (B, NH), dtype, states_dtype or dtype)[: 8 if states_dtype else 5]
    step = functools.partial(mlstm_recurrent_step, backend=backend, **GATES[gate])
    h, states = jax.eval_shape(step, *x)
    assert (h.shape, h.dtype) == (x[2].shape, jnp.dtype(dtype))
    assert all(y.dtype == jnp.dtype(states_dtype or "float32") for y in states)


@pytest.mark.parametrize(
    ("backend", "algorithm", "dtype", "layout"),
    [
        ("interpret", "splits", "bfloat16", "BTNH"),
        ("xla", "materialised", "float32", "BNTH"),
    ],
)
def test_sequence_parallel(backend, algorithm, dtype, layout):
    options = dict(axis_name="s", return_last_states=True, chunk_size=16)
    options |= dict(layout=layout, backend=backend) | ALGORITHMS[algorithm]
    sequence = P(None, None, "s") if layout == "BNTH" else P(None, "s")
    run = jax.shard_map(
        functools.partial(mlstm_chunkwise_sequence_parallel, **options),
        mesh=mesh_of((4,), names="s"),
        in_specs=(sequence,) * 5 + (P(),) * 3,
        out_specs=(sequence, P()),
        check_vma=backend != "interpret",
    )
    x = arguments(dtype, (B, NH, 128) if layout == "BNTH" else (B, 128, NH))
    assert both(run, *x)[0].shape == x[2].shape
