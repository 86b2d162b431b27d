"""compute-sanitizer finds nothing in any kernel: pytest -m gpu tests/test_gpu_sanitizer.py."""

import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from oracle import run_python
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
    runs = (path for path in installed if path and os.access(path, os.X_OK))
    return next(runs, None) or pytest.skip(
        f"{name} is not installed (CUDA toolkit, or pip install nvidia-cuda-sanitizer-api)"
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs the driver, which is compiled once, under a tool: its exit code and its output.

    Every buffer is an allocation of its own, so that an access beyond it is found.
    """
    path = sanitizer()
    paths = filter(None, [str(DRIVER.parent.parent), os.environ.get("PYTHONPATH")])
    environment = {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    run_python(DRIVER, timeout=SECONDS, **environment)

    def run(tool, *arguments):
        done = subprocess.run(
            [
                *(path, "--tool", tool, "--report-api-errors", "no"),
                sys.executable,
                DRIVER,
                *arguments,
            ],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        return done.returncode, done.stdout

    return run


def findings(output, names):
    """The sanitizer's lines that name a kernel."""
    return [
        line
        for line in output.splitlines()
        if line.startswith("=========") and re.search(rf"\b({'|'.join(names)})\b", line)
    ]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_the_kernels_are_clean(tool, run):
    code, output = run(tool)
    assert code == 0, output[-4000:]
    assert "all ran" in output
    assert "SUMMARY" in output, output[-4000:]
    assert findings(output, KERNELS) == [], output[-4000:]


def test_a_fault_is_found(run):
    _, output = run("memcheck", "--fault")
    assert findings(output, ["reads_beyond"]), output[-4000:]
