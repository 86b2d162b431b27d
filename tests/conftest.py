"""What all tests share: XLA's flags, the device that a test runs on, and what keeps compiling
cheap."""

import contextlib
import functools
import gc
import importlib.util
import os
import re
from importlib import metadata
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import needs_compiler, needs_mosaic_gpu

# The older of XLA's code generators for CPUs compiles in half the time. One LLVM module per program
# instead of up to 32, without inlining before the split, saves a quarter of the rest.
QUICK_CODE = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_llvm_force_inline_before_split=false"
)


# What JAX finds of plugins, in the two places where it looks for them.
PLUGINS = importlib.util.find_spec("jax_plugins") or metadata.entry_points(group="jax_plugins")
# XLA ends the process at a flag that it does not know. jaxlib 0.10 knows these, 0.11 does not, and
# a GPU plugin has its own XLA. With XLA_FLAGS= tests run what users get.
flags = os.environ.get("XLA_FLAGS", " ")
if metadata.version("jaxlib").startswith("0.10.") and not PLUGINS and flags:
    os.environ["XLA_FLAGS"] = f"{QUICK_CODE} {flags}"
# Freed memory goes back to the GPU, which xdist's workers share with the processes that tests
# start.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
os.environ.pop("MLSTM_PALLAS_BACKEND", None)  # tests name their backends
# Threads of XLA read the environment while tests run. Adding a variable, as mock.patch.dict does,
# moves it in memory and crashes them; another value of one that is there does not.
PLATFORMS = os.environ.setdefault("JAX_PLATFORMS", "")
jax.config.update(
    "jax_num_cpu_devices", 8
)  # for the tests of sharding; what runs on one device is the same and as fast


all_devices = jax.devices
LOCKED = "conftest.py", "oracle.py"  # any two files


def gpu_count() -> int:
    return sum(device.platform == "gpu" for device in all_devices())


def beside_others(locks, alone):
    """GPU tests of all processes run beside each other, but for one that runs alone: it waits for
    those that run, and others wait for it, in the first lock."""
    import fcntl  # of Unix

    entry, run = (locks.enter_context(Path(__file__).with_name(x).open()) for x in LOCKED)
    fcntl.flock(entry, fcntl.LOCK_EX)
    fcntl.flock(run, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    if not alone:
        fcntl.flock(entry, fcntl.LOCK_UN)


# Before pytest-timeout starts its clock.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """A test that is not marked runs on the CPU and sees no GPU even if there is one, and so do
    the fixtures that it is the first to use.

    The processes that it starts see none either.
    """
    marked = any(map(item.get_closest_marker, ("gpu", "gpu_multi")))
    if marked or not gpu_count():
        os.environ["JAX_PLATFORMS"] = PLATFORMS
        jax.config.update("jax_default_device", None)
        with contextlib.ExitStack() as locks:
            if marked and gpu_count():
                beside_others(locks, alone=item.get_closest_marker("alone"))
            return (yield)
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_default_device", all_devices("cpu")[0])

    def devices(backend=None):
        return all_devices(backend or "cpu")

    with mock.patch.multiple(jax, devices=devices, default_backend=lambda: "cpu"):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The quick selection has only those GPU tests that are marked smoke. Quick tests of
    interpreted Mosaic GPU kernels have a time limit of two minutes. Tests that the oldest Python
    skips are marked."""
    gpus = gpu_count()
    newer = [needs_compiler.mark, needs_mosaic_gpu.mark]
    for item in items:
        if any(mark in newer for mark in item.iter_markers("skipif")):
            item.add_marker("newer_python")
        marks = {mark.name for mark in item.iter_markers()}
        interpreted = item.module.__name__.startswith(("test_mosaic_gpu", "test_products"))
        if interpreted and not marks & {"slow", "gpu"}:
            item.add_marker(pytest.mark.timeout(120))  # their warpgroups wait for each other
        needed = 2 if "gpu_multi" in marks else int("gpu" in marks)
        if needed:
            if "smoke" not in marks:
                item.add_marker(pytest.mark.slow)
            if gpus < needed:
                reason = "no GPU" if needed == 1 else "fewer than two GPUs"
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_make_parametrize_id(val):
    """A test has its whole line in its id; pytest >= 9.2 would number lines of over 100
    characters."""
    return val.encode("unicode_escape").decode() if isinstance(val, str) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """The garbage collector skips what is imported and runs after 100,000 new objects instead of
    700, because it took a twelfth of the time and so many objects take little memory."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@functools.cache
def compiles_float16():
    try:
        jax.jit(jnp.square)(np.float16(2))
    except jax.errors.JaxRuntimeError:
        return False
    return True


@pytest.fixture(autouse=True)
def float16(request):
    """Tests with float16 in their file or their id need a CPU that has its conversions."""
    if re.search("(?<!b)float16", request.node.nodeid) and not compiles_float16():
        pytest.skip("XLA compiles no float16 for this CPU")


@pytest.fixture(params=[2, 4])
def gpus(request):
    """A number of GPUs that there are."""
    if gpu_count() < request.param:
        pytest.skip(f"fewer than {request.param} GPUs")
    return request.param


@pytest.fixture
def interpreted():
    """The CPU runs all kernels, interpreted; backend "mosaic_gpu" has its own."""
    from mosaic_gpu_interpreter import interpreted_mosaic_gpu

    with interpreted_mosaic_gpu():
        yield


# Modules that compile as users do. In the other modules compiling takes most of the time.
AS_USERS_DO = {
    "test_gates",
    "test_reference",
    "test_precision",
    "test_batch_invariant",
    "test_layout_hlo",
    "test_gpu",
    "test_gpu_huge",
    "test_gpu_sanitizer",
    "test_products",
    "test_pipelines",
    "test_compile_report",
}


@pytest.fixture(autouse=True)
def mapped_memory():
    """Much compiled code is freed. Linux lets a process map 65,530 pieces of memory; the code of
    all tests is more, and XLA crashes where the system refuses it."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def quick_compilation(request):
    """What a module has compiled is freed at its end."""
    before = jax.config.read("jax_disable_most_optimizations")
    quick = request.module.__name__ not in AS_USERS_DO
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()
