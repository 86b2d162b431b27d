"""A client of the public functions passes mypy --strict, and docstrings have one entry per
argument."""

import doctest
import inspect
import re
from pathlib import Path

import jax
import pytest
from oracle import PUBLIC, run_python

import mlstm_pallas
from mlstm_pallas import reference

ROOT = Path(__file__).parents[2]
# A line that is ignored has an error of that kind: --strict refuses an ignore that is not needed.
CLIENT = """
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

import mlstm_pallas
from mlstm_pallas import KernelConfig, mlstm_chunkwise
from mlstm_pallas import mlstm_recurrent_step, use_backend
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel
from mlstm_pallas.xlstm_jax.max_triton_fwbw_v3noslice import mlstm_chunkwise_max_triton
from mlstm_pallas.xlstm_jax.triton_stablef import mlstm_chunkwise_triton_stablef

Array = jax.Array
States = tuple[Array, Array, Array]
x, gate = jnp.zeros((1, 2, 16, 16)), jnp.zeros((1, 2, 16))
flag = bool(x.any())

assert_type(mlstm_chunkwise(x, x, x, gate, gate, layout="BTNH"), Array)
assert_type(mlstm_chunkwise(x, x, x, gate, gate, None, None, None, True), tuple[Array, States])
assert_type(
    mlstm_chunkwise(
        x, x, x, gate, gate, segment_ids=np.zeros((1, 16), int), sequence_lengths=jnp.ones(1, int),
        return_last_states=True, state_dtype=jnp.bfloat16,
    ),
    tuple[Array, States],
)
mlstm_chunkwise(
    x, x, x, gate, gate, segment_lengths=np.array([[3, 5]]), return_last_states=True
)
assert_type(mlstm_chunkwise(x, x, x, gate, gate, return_last_states=False, eps=1e-5), Array)
assert_type(
    mlstm_chunkwise(x, x, x, gate, gate, return_last_states=flag), Array | tuple[Array, States]
)
h, (c, n, m) = mlstm_chunkwise(
    np.asarray(x), x, x, gate, gate, return_last_states=True, autocast_kernel_dtype="bfloat16",
    input_gate="sigmoid", normalize=False, backend="xla",
    config=KernelConfig(chunk_size=64, triton_recurrent_fw_H=dict(num_warps=8)),
)
assert_type((h, c, n, m), tuple[Array, Array, Array, Array])
qkvif: tuple[Array, ...] = (x, x, x, gate, gate)
assert_type(mlstm_chunkwise(*qkvif, layout="BTNH", eps=1e-5), Array)
reference = mlstm_pallas.reference.chunkwise
assert_type(reference(x, x, x, gate, gate, return_last_states=True), tuple[Array, States])
mlstm_chunkwise(x, x, x, gate, gate, layout="BSNH")  # type: ignore[call-overload]
mlstm_chunkwise(x, x, x, gate, gate, backend="cuda")  # type: ignore[call-overload]
mlstm_chunkwise(x, x, x, gate, gate, input_gate="relu")  # type: ignore[call-overload]
mlstm_chunkwise(x, x, x, gate, gate).shape
mlstm_chunkwise(x, x, x, gate, gate, return_last_states=True).shape  # type: ignore[attr-defined]

token = x[:, :, 0]
h, states = mlstm_recurrent_step(token, token, token, gate[..., 0], gate[..., 0], c, n, m)
assert_type(states, States)
for run in (mlstm_chunkwise_triton_stablef, mlstm_chunkwise_max_triton):
    assert_type(run(x, x, x, gate, gate), Array)
    assert_type(run(x, x, x, gate, gate, return_last_states=True), tuple[Array, States])
assert_type(mlstm_pallas.reference.chunkwise(x, x, x, gate, gate, layout="BTNH"), Array)
assert_type(mlstm_pallas.reference.recurrence(x, x, x, gate, gate), tuple[Array, States])
stages = mlstm_pallas.xlstm_jax.triton_stablef
assert_type(stages._mlstm_chunkwise__recurrent_fw_C(x, x, gate, gate), States)
mlstm_pallas.mlstm_chunkwize  # type: ignore[attr-defined]


def shard(x: Array, gate: Array) -> Array:
    arrays: tuple[Array, ...] = (x, x, x, gate, gate)
    h: Array = mlstm_chunkwise_sequence_parallel(*arrays, axis_name="sequence")
    return h


def loss(x: Array) -> Array:
    with use_backend("xla"):
        return jnp.sum(mlstm_chunkwise(x, x, x, gate, gate) ** 2)


gradient: Array = jax.grad(loss)(x)
planned = mlstm_pallas.plan(B=1, NH=2, S=16, DHQK=16, DHV=16, gpu="NVIDIA H200")
assert_type((planned.chunk_size, planned.launches[0].grid), tuple[int, tuple[int, ...]])
exported = mlstm_pallas.export.export(loss, x, platform="cpu")
"""


@pytest.mark.slow
def test_a_client_passes_strict_mypy(tmp_path):
    pytest.importorskip("mypy")
    client = tmp_path / "client.py"
    client.write_text(CLIENT)
    mypy = "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file="
    settings = dict(MYPYPATH=str(ROOT), MYPY_CACHE_DIR=str(tmp_path / "cache"))
    run_python(*mypy, client, **settings)


WITHOUT_EXAMPLE = (
    mlstm_pallas.mlstm_ring_states,
    mlstm_pallas.mlstm_ring_flush,
    mlstm_pallas.mlstm_chunkwise_states,
    reference.recurrence,
)
FUNCTIONS = *PUBLIC, mlstm_pallas.mlstm_ring_step, *WITHOUT_EXAMPLE[:3]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_docstring_has_an_entry_for_each_argument_in_80_columns(function):
    lines = inspect.getdoc(function).splitlines()
    assert max(map(len, lines)) <= 76  # and four of indentation
    arguments = "\n".join(lines).partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^  (\w[\w, \n]*):", arguments, re.M)
    named = [name for entry in entries for name in re.findall(r"\w+", entry)]
    assert sorted(named) == sorted(inspect.signature(function).parameters)


@pytest.mark.quick("chunkwise", "use_backend", "plan")
@pytest.mark.parametrize("function", [*FUNCTIONS, mlstm_pallas.use_backend, mlstm_pallas.plan])
def test_the_example_of_a_docstring_runs(function, monkeypatch):
    [example] = doctest.DocTestFinder(recurse=False).find(function, function.__name__, globs={})
    # Its derivative, operation by operation, is hundreds of compilations.
    monkeypatch.setattr(reference, "chunkwise", jax.jit(reference.chunkwise))
    result = doctest.DocTestRunner().run(example)
    assert (result.failed, result.attempted > 0) == (0, function not in WITHOUT_EXAMPLE)
