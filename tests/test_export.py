"""Export, and what keeps compilations from being repeated."""

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracle import (
    NAMES,
    OUTPUTS,
    assert_close,
    compare,
    for_device,
    mesh_of,
    random_inputs,
    refused,
    results_of,
    sharded,
    tolerance,
)

from mlstm_pallas import KernelConfig, fwbw, mlstm_chunkwise
from mlstm_pallas.export import CUSTOM_CALL_TARGET, export
from mlstm_pallas.sharding import on_backend

INPUTS = random_inputs(0, 2, 2, 40, 16, 8)
A_GPU = (
    "the device_kind of an NVIDIA GPU from compute capability 8.0, such as 'NVIDIA H200' or "
    "'NVIDIA A100-SXM4-80GB'"
)
BOUND = 4 * tolerance("float32", 40 + 16)


def function(*x):
    return mlstm_chunkwise(*x, chunk_size=16, return_last_states=True)


def shapes(dtype="bfloat16"):
    x = random_inputs(0, 1, 2, 64, 16, 16, dtype=dtype, states=False).values()
    return [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in x]


def lowered_for_cuda():
    """The text of a gradient's module, traced anew: it names the lines from which the functions
    inside were traced first."""
    jax.clear_caches()

    def loss(*x):
        return jnp.sum(mlstm_chunkwise(*x).astype("float32"))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4)))
    with for_device("NVIDIA H200"):
        return gradient.trace(*shapes()).lower(lowering_platforms=("cuda",)).as_text()


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
def loss(*x):
    h, states = loaded.call(*x)
    return jnp.sum(h), (h, *states)
gradients, outputs = jax.jit(jax.grad(loss, tuple(range(8)), has_aux=True))(*x)
np.savez(folder / "outputs.npz", *outputs, *gradients)
assert "mlstm_pallas" not in sys.modules
sys.path[:0] = sys.argv[2:]
import test_export
jax.jit(test_export.function).lower(*x).compile()
print(hashlib.sha256(test_export.lowered_for_cuda().encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def children(tmp_path_factory):
    """Two processes, one after the other, load the export, run it and compile with one cache.

    Returns (folder, what they printed, cache entries)."""
    pytest.importorskip("flatbuffers")
    folder, tests = tmp_path_factory.mktemp("export"), Path(__file__).parent
    exported = export(function, *INPUTS.values(), platform="cpu")
    (folder / "exported").write_bytes(exported.serialize(vjp_order=1))
    np.savez(folder / "inputs.npz", **INPUTS)
    command = [sys.executable, "-c", CHILD, *map(str, (folder, tests, tests.parent))]
    settings = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    printed, entries = [], []
    for _ in range(2):
        run = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
        printed.append(run.stdout.splitlines()[-1])
        names = os.listdir(folder / "cache")
        entries.append({name for name in names if not name.endswith("atime")})
    return folder, printed, entries


@pytest.mark.slow
def test_an_export_for_the_cpu_runs_in_another_process_with_its_gradients(children):
    result = list(np.load(children[0] / "outputs.npz").values())
    x = INPUTS.values()
    h, states = function(*x)
    gradients = jax.jit(jax.grad(lambda *x: jnp.sum(function(*x)[0]), tuple(range(8))))(*x)
    compare((*OUTPUTS, *NAMES), result, (h, *states, *gradients), BOUND)


@pytest.mark.slow
def test_processes_lower_to_the_same_module_and_share_the_compilation_cache(children):
    _, printed, entries = children
    assert printed == [hashlib.sha256(lowered_for_cuda().encode()).hexdigest()] * 2
    assert any(name.startswith("jit_function") for name in entries[0])
    assert entries[1] == entries[0]


def test_lowering_again_gives_the_same_module():
    first = lowered_for_cuda()
    assert lowered_for_cuda() == first
    assert CUSTOM_CALL_TARGET in first


def test_an_export_for_cuda_is_made_and_read_without_a_gpu():
    pytest.importorskip("flatbuffers")
    exported = export(mlstm_chunkwise, *shapes(), platform="cuda", device_kind="NVIDIA H200")
    assert CUSTOM_CALL_TARGET in exported.mlir_module()
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    assert loaded.platforms == ("cuda",)
    assert [(x.shape, x.dtype) for x in loaded.out_avals] == [((1, 2, 64, 16), jnp.bfloat16)]
    assert len(loaded.vjp().out_avals) == 5


def test_shards_of_explicit_axes_are_exported():
    pytest.importorskip("flatbuffers")
    mesh = mesh_of((8,), AxisType.Explicit)
    x = sharded([*random_inputs(0, 8, 1, 32, 8, 8, states=False).values()], mesh, P("x"))
    run = functools.partial(mlstm_chunkwise, chunk_size=16)
    loaded = jax.export.deserialize(export(run, *x, platform="cpu").serialize())
    with jax.set_mesh(mesh):
        result = jax.jit(loaded.call)(*x)
    assert result.sharding.spec[0] == "x"
    assert_close(np.asarray(result), np.asarray(run(*(np.asarray(y) for y in x))), BOUND)


def test_an_export_for_cpu_and_cuda_has_the_kernels_and_runs_on_the_cpu():
    x = INPUTS.values()
    exported = export(function, *x, platform=("cpu", "cuda"), device_kind="NVIDIA H200")
    assert exported.platforms == ("cpu", "cuda")
    assert CUSTOM_CALL_TARGET in exported.mlir_module()
    compare(OUTPUTS, *map(jax.tree.leaves, (exported.call(*x), function(*x))), BOUND)


def test_each_platform_has_the_jitted_functions_lowered_for_it():
    """jax.jit caches lowered functions without their platforms."""
    added = {platform: lambda x, n=n: x + n for n, platform in enumerate(("cpu", "cuda"))}
    inner = jax.jit(lambda x: jax.lax.platform_dependent(x, **added))
    call = functools.partial(on_backend, None, lambda lowering, x: inner(x))
    x = np.zeros(3, np.float32)
    exported = export(call, x, platform=("cpu", "cuda"), device_kind="NVIDIA H200")
    np.testing.assert_array_equal(exported.call(x), x)


def test_the_batch_may_be_symbolic_in_plain_jnp():
    (B,) = jax.export.symbolic_shape("B")
    x = [np.asarray(y)[:, :, :20] for y in [*INPUTS.values()][:5]]
    run = functools.partial(mlstm_chunkwise, chunk_size=16)  # for a CPU alone this is "xla"
    gradients = jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(run(*x))), (0, 1, 2, 3, 4)))
    of_any_batch = (jax.ShapeDtypeStruct((B, *y.shape[1:]), y.dtype) for y in x)
    exported = export(gradients, *of_any_batch, platform="cpu")
    compare(NAMES[:5], exported.call(*x), gradients(*x), BOUND)


@pytest.mark.parametrize(
    ("dim", "backend", "message"),
    [
        ("S", "xla", "q has a symbolic S = S, expected a constant: .* Export once per length, or"),
        ("B", None, 'q has a symbolic B = B, expected a constant, or backend "xla", which takes'),
    ],
)
def test_a_symbolic_dimension_is_refused_by_name(dim, backend, message):
    sizes = dict(B=1, S=64) | {dim: jax.export.symbolic_shape(dim)[0]}
    B, S = sizes.values()
    x = [jax.ShapeDtypeStruct((B, 2, S, *y.shape[3:]), y.dtype) for y in shapes()]
    run = functools.partial(mlstm_chunkwise, backend=backend)
    with pytest.raises(ValueError, match=message):
        export(run, *x, platform=("cpu", "cuda"), device_kind="NVIDIA H200")


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        *(("platform", x, "one of cpu, cuda, or a sequence of them") for x in ("gpu", None, [3])),
        *(("device_kind", x, f"None or {A_GPU}") for x in (3, "NVIDIA FOO")),
    ],
)
def test_another_platform_or_device_is_refused(argument, value, expected):
    options = dict(platform="cuda") | {argument: value}
    message = f"{argument} is {value!r}, expected {expected}"
    refused(ValueError, message, export, mlstm_chunkwise, *shapes(), **options)


def test_an_export_for_cuda_needs_a_device_kind():
    message = "device_kind is None and this process has no GPU, expected the device_kind of"
    with pytest.raises(ValueError, match=message):
        export(mlstm_chunkwise, *shapes(), platform="cuda")


def test_a_device_of_this_process_is_taken():
    kind = jax.devices()[0].device_kind
    assert export(jnp.sin, 1.0, platform="cpu", device_kind=kind).platforms == ("cpu",)


def test_equal_static_arguments_are_traced_once():
    x = [np.asarray(y)[:, :, :16] for y in [*INPUTS.values()][:5]]
    fwbw.mlstm_forward.clear_cache()
    for eps, expected in ((1e-3, 1), (1e-3, 1), (1e-4, 2)):
        config = KernelConfig(fused=False)
        mlstm_chunkwise(*x, eps=eps, autocast_kernel_dtype="float32", config=config)
        assert fwbw.mlstm_forward._cache_size() == expected


@pytest.mark.gpu
def test_an_export_for_cuda_runs_with_its_gradients():
    pytest.importorskip("flatbuffers")
    x = list(random_inputs(0, 2, 4, 1000, 128, 256, dtype="bfloat16").values())
    run = functools.partial(mlstm_chunkwise, backend="triton", return_last_states=True)
    loaded = jax.export.deserialize(export(run, *x, platform="cuda").serialize(vjp_order=1))
    result, expected = (results_of(y)(*x) for y in (loaded.call, run))
    assert all(map(np.array_equal, result[:4], expected[:4]))
    compare(NAMES, result[4:], expected[4:], 2e-2)
