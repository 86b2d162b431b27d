import os

import jax
import pytest

# Fusions by the older of XLA's code generators for CPUs: tests compile in two thirds of the time. XLA_FLAGS= gives them what users get.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
jax.config.update("jax_num_cpu_devices", 8)  # for the tests of sharding; what runs on one device is the same and as fast


def gpu_count():
    return sum(device.platform == "gpu" for device in jax.devices())


@pytest.fixture(autouse=True, scope="module")
def compiled_code_is_freed():
    """Linux lets a process map 65,530 pieces of memory. The code of all tests together is more, and XLA crashes on the next."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def quick_compilation():
    """For modules in which compiling is most of the time. test_gates and test_reference stay with what users get."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def pytest_collection_modifyitems(items):
    gpus = gpu_count()
    for item in items:
        if item.get_closest_marker("gpu") and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="no GPU"))
        if item.get_closest_marker("gpu_multi") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason="fewer than two GPUs"))
