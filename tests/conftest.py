import jax
import pytest


def gpu_count():
    return sum(device.platform == "gpu" for device in jax.devices())


def pytest_collection_modifyitems(items):
    gpus = gpu_count()
    for item in items:
        if item.get_closest_marker("gpu") and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="no GPU"))
        if item.get_closest_marker("gpu_multi") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason="fewer than two GPUs"))
