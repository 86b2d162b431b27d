"""compute-sanitizer finds nothing in any kernel: pytest -m gpu tests/test_gpu_sanitizer.py."""

import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from sanitize import KERNELS

DRIVER = pathlib.Path(__file__).with_name("sanitize.py")
SECONDS = 900

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(2 * SECONDS + 60),
]  # a test runs the driver up to twice


def sanitizer():
    name = "compute-sanitizer"
    installed = [
        shutil.which(name),
        *glob.glob(f"/usr/local/cuda*/bin/{name}"),
        *glob.glob(f"{sys.prefix}/**/{name}", recursive=True),
    ]
    result = [path for path in installed if path and os.access(path, os.X_OK)]
    if not result:
        pytest.skip(
            "compute-sanitizer is not installed (CUDA toolkit, or pip install "
            "nvidia-cuda-sanitizer-api)"
        )
    return result[0]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Compiled once for all tools.

    Every buffer is an allocation of its own, so that an access beyond it is found.
    """
    paths = filter(None, [str(DRIVER.parent.parent), os.environ.get("PYTHONPATH")])
    return os.environ | {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def run(command, env):
    done = subprocess.run(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout


def findings(output, names):
    """The sanitizer's lines that name a kernel."""
    return [
        line
        for line in output.splitlines()
        if line.startswith("=========") and re.search(rf"\b({'|'.join(names)})\b", line)
    ]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_the_kernels_are_clean(tool, environment):
    path = sanitizer()
    if not os.listdir(environment["JAX_COMPILATION_CACHE_DIR"]):
        assert run([sys.executable, str(DRIVER)], environment)[0] == 0
    code, output = run(
        [path, "--tool", tool, "--report-api-errors", "no", sys.executable, str(DRIVER)],
        environment,
    )
    assert code == 0, output[-4000:]
    assert "all ran" in output
    assert "SUMMARY" in output, output[-4000:]
    assert findings(output, KERNELS) == [], output[-4000:]


def test_a_fault_is_found(environment):
    _, output = run(
        [sanitizer(), "--tool", "memcheck", sys.executable, str(DRIVER), "--fault"], environment
    )
    assert findings(output, ["reads_beyond"]), output[-4000:]
