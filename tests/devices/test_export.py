"""Export, and what keeps compilations from being repeated."""

import hashlib
import os
import sys
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mosaic_gpu_cases import fused
from oracle import (
    MOSAIC_CALL,
    NAMES,
    OUTPUTS,
    RESULTS,
    assert_close,
    call_shapes,
    compare,
    lowered_for_cuda,
    mesh_of,
    needs_mosaic_gpu,
    random_inputs,
    results_of,
    run_python,
    shapes_and_dtypes,
    sharded,
    slow,
    tolerance,
)
from relations_devices import exported

from mlstm_pallas import (
    mlstm_chunkwise,
    mlstm_recurrent_step,
    use_backend,
)
from mlstm_pallas.export import CUSTOM_CALL_TARGET, export
from mlstm_pallas.problem.gpu import UNKNOWN, target_gpu

INPUTS = random_inputs(0, 2, 2, 40, 16, 8)
BOUND = 4 * tolerance("float32", 40 + 16)


def function(*x):
    return mlstm_chunkwise(*x, chunk_size=16, return_last_states=True)


SHAPES = call_shapes(1, 2, 64, 16, 16)


def reloaded(run, x, vjp_order=0, **options):
    """An export, serialized and read again."""
    return jax.export.deserialize(export(run, *x, **options).serialize(vjp_order=vjp_order))


def module_for_cuda():
    """The text of a gradient's module, traced anew: it names the lines from which the functions
    inside were traced first."""
    jax.clear_caches()
    return lowered_for_cuda(results_of(mlstm_chunkwise), *SHAPES)


CHILD = """
import hashlib, sys
from pathlib import Path
import jax, jax.export, jax.numpy as jnp, numpy as np
folder = Path(sys.argv[1])
jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
x = [jnp.asarray(y) for y in np.load(folder / "inputs.npz").values()]
loaded = jax.export.deserialize((folder / "exported").read_bytes())
(h, states), vjp = jax.vjp(jax.jit(loaded.call), *x)
cotangents = jnp.cos(h) - h * jnp.sin(h), jax.tree.map(jnp.cos, states)  # of oracle.loss_of
np.savez(folder / "outputs.npz", h, *states, *vjp(cotangents))
assert "mlstm_pallas" not in sys.modules
sys.path[:0] = sys.argv[2:]
import test_export
jax.jit(test_export.function).lower(*x).compile()
print(hashlib.sha256(test_export.module_for_cuda().encode()).hexdigest())
"""


@pytest.mark.slow
def test_processes_run_an_export_lower_alike_and_share_the_compilation_cache(tmp_path):
    """Two processes, one after the other, load the export, run it with its gradients and compile
    with one cache."""
    x = INPUTS.values()
    exported = export(function, *x, platform="cpu").serialize(vjp_order=1)
    (tmp_path / "exported").write_bytes(exported)
    np.savez(tmp_path / "inputs.npz", **INPUTS)
    settings = dict(JAX_PLATFORMS="cpu", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    entries = []
    for _ in range(2):
        printed = run_python("-c", CHILD, tmp_path, *sys.path, **settings).splitlines()
        assert printed[-1] == hashlib.sha256(module_for_cuda().encode()).hexdigest()
        names = os.listdir(tmp_path / "cache")
        entries.append({name for name in names if not name.endswith("atime")})
    assert any(name.startswith("jit_function") for name in entries[0])
    assert entries[1] == entries[0]
    result = np.load(tmp_path / "outputs.npz").values()
    compare(RESULTS, result, results_of(function)(*x), BOUND)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "config"),
    [("triton", None), pytest.param("mosaic_gpu", fused(), marks=needs_mosaic_gpu)],
    ids=["triton", "mosaic_gpu"],
)
def test_an_export_for_cuda_is_made_and_read_without_a_gpu(backend, config):
    run = partial(mlstm_chunkwise, backend=backend, config=config)
    x = call_shapes(1, 1, 128, 256, 256)
    loaded = reloaded(run, x, 1, platform="cuda", device_kind="NVIDIA H200")
    text, is_triton = loaded.mlir_module(), backend == "triton"
    assert (CUSTOM_CALL_TARGET in text, MOSAIC_CALL in text) == (is_triton, not is_triton)
    assert loaded.platforms == ("cuda",)
    assert shapes_and_dtypes(loaded.out_avals) == shapes_and_dtypes([x[2]])
    assert shapes_and_dtypes(loaded.vjp().out_avals) == shapes_and_dtypes(x)


@pytest.mark.slow
def test_shards_of_explicit_axes_are_exported():
    mesh = mesh_of((8,), AxisType.Explicit)
    x = [*random_inputs(0, 8, 1, 32, 8, 8, states=False).values()]
    shards = sharded(x, mesh, P("x"))
    run = partial(mlstm_chunkwise, chunk_size=16)
    loaded = reloaded(run, shards, platform="cpu")
    with jax.set_mesh(mesh):
        result = jax.jit(loaded.call)(*shards)
    assert result.sharding.spec[0] == "x"
    assert_close(result, run(*x), BOUND)


def test_automatic_axes_are_refused_by_jax():
    """With its error, which is not that of MLSTM_PALLAS_CHECKS."""
    mesh = mesh_of((2,), AxisType.Auto)
    x = call_shapes(2, 2, 32, 16, 16, sharding=NamedSharding(mesh, P("x")))
    with pytest.raises(NotImplementedError):
        export(partial(mlstm_chunkwise, chunk_size=16, backend="xla"), *x, platform="cpu")


X64 = "`segment_lengths`", "ring step", "slots"
EXPORTED = [slow(x, True) for x in X64] + [slow(x, False) for x in ("states of steps", "bfloat16")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "x64"), [("step", False), ("step", True), *EXPORTED, slow("reverse", False)]
)
def test_an_export_for_cpus_and_cuda_has_the_kernels_and_the_values(name, x64):
    exported(name, x64)


TOKEN = [jax.ShapeDtypeStruct((4, 2, *x), "float32") for x in ((8,), (8,), (8,), (), ())]
GRADIENTS = results_of(mlstm_chunkwise), call_shapes(4, 2, 32, 16, 16)


@pytest.mark.parametrize(
    ("run", "x", "inside", "kind"),
    [
        (mlstm_recurrent_step, TOKEN, True, AxisType.Auto),
        (mlstm_recurrent_step, TOKEN, False, AxisType.Explicit),
        slow(*GRADIENTS, True, AxisType.Explicit),
    ],
    ids=["step in a shard_map", "step", "chunkwise"],
)
def test_shards_are_exported_for_the_gpu_that_the_caller_names(run, x, inside, kind):
    """The mesh has devices of this process, which has no GPU."""
    gpus, mesh = [], mesh_of((2,), kind)
    shards = [
        jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=NamedSharding(mesh, P("x"))) for y in x
    ]

    def function(*x):
        gpus.append(target_gpu().name)
        return run(*x)

    on_shards = jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    call = on_shards if inside else function
    made = export(call, *shards, platform="cuda", device_kind="NVIDIA H200")
    assert CUSTOM_CALL_TARGET in made.mlir_module()
    assert {*gpus} == {"NVIDIA H200"}
    assert target_gpu() is UNKNOWN


@pytest.mark.slow
def test_the_batch_may_be_symbolic_in_plain_jnp():
    (B,) = jax.export.symbolic_shape("B")
    x = random_inputs(0, 2, 2, 20, 16, 8, states=False).values()
    run = partial(mlstm_chunkwise, chunk_size=16)
    results = results_of(run)
    of_any_batch = [jax.ShapeDtypeStruct((B, *y.shape[1:]), y.dtype) for y in x]
    exported = export(results, *of_any_batch, platform="cpu")
    compare(("h", *NAMES[:5]), exported.call(*x), results(*x), BOUND)
    by_name = dict(zip("qkvif", of_any_batch, strict=True))
    assert export(run, platform="cpu", **by_name).out_avals[0].shape == (B, 2, 20, 8)
    lengths = np.array([[20, 0, 0], [3, 4, 5]], np.int32)
    packed = partial(run, segment_lengths=lengths, return_last_states=True)
    by_name |= dict(segment_lengths=jax.ShapeDtypeStruct((B, 3), np.int32))
    exported = export(partial(run, return_last_states=True), platform="cpu", **by_name)
    found = exported.call(**dict(zip("qkvif", x, strict=False)), segment_lengths=lengths)
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(packed)(*[*x][:5]))


OR_XLA = 'expected a constant, or backend "xla", which takes'


@pytest.mark.parametrize(
    ("dim", "backend", "platform", "message"),
    [
        ("S", "xla", "cuda", "q has a symbolic S = S, expected a constant: .* Export once per l"),
        ("B", None, "cuda", f"q has a symbolic B = B, {OR_XLA}"),
        ("B", "triton", "cpu", f"q has a symbolic B = B, {OR_XLA}"),
    ],
)
def test_a_symbolic_dimension_is_refused_by_name(dim, backend, platform, message):
    sizes = dict(B=1, NH=2, S=64, DHQK=16, DHV=16) | {dim: jax.export.symbolic_shape(dim)[0]}
    with use_backend(backend), pytest.raises(ValueError, match=message):
        export(mlstm_chunkwise, *call_shapes(**sizes), platform=platform, device_kind="NVIDIA H200")


@pytest.mark.gpu
def test_an_export_for_cuda_runs_with_its_gradients():
    x = random_inputs(0, 2, 4, 1000, 128, 256, dtype="bfloat16").values()
    run = partial(mlstm_chunkwise, backend="triton", return_last_states=True)
    loaded = reloaded(run, x, 1, platform="cuda")
    result, expected = (results_of(y)(*x) for y in (loaded.call, run))
    compare(OUTPUTS, result[:4], expected[:4], tolerance("bfloat16", 1128))
    compare(NAMES, result[4:], expected[4:], 2e-2)
