"""compute-sanitizer finds nothing in any kernel."""

import functools
import glob
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest
from mosaic_gpu_cases import skip_unless_hopper
from oracle import needs_mosaic_gpu, run_python
from sanitize import FEATURES, KERNELS

DRIVER = pathlib.Path(__file__).parents[1] / "sanitize.py"
SECONDS = 900
MOSAIC_GPU_SECONDS = 240
MEMCHECK = "memcheck --padding 65536"  # an access beyond an array is in no other allocation

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
    """Runs the driver, which is compiled once, under a tool: its output and its exit code.

    The code is None if it does not end in time.

    Every buffer of a program's inputs and outputs is an allocation of its
    own, so that an access beyond it is found.
    """
    path = sanitizer()
    paths = filter(None, [str(DRIVER.parent.parent), os.environ.get("PYTHONPATH")])
    environment = {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",  # "platform" takes 2 MiB for each array
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # most of the memory, which other tests need
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join(paths),
    }

    @functools.cache
    def compile_driver(*arguments):
        run_python(DRIVER, *arguments, timeout=SECONDS, **environment)

    def run(tool, *arguments, seconds=SECONDS):
        if "--fault" not in arguments:
            compile_driver(*arguments)
        process = subprocess.Popen(
            [
                *(path, "--tool", *tool.split(), "--report-api-errors", "no"),
                sys.executable,
                DRIVER,
                *arguments,
            ],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            return process.communicate(timeout=seconds)[0], process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the driver, which holds the pipe
            return process.communicate()[0], None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    return run


def findings(output, names):
    """The sanitizer's lines that name a kernel."""
    return [
        line
        for line in output.splitlines()
        if line.startswith("=========") and re.search(rf"\b({'|'.join(names)})\b", line)
    ]


def assert_clean(output, code):
    assert code == 0, output[-4000:]
    assert "all ran" in output
    assert "SUMMARY" in output, output[-4000:]
    assert findings(output, KERNELS) == [], output[-4000:]


@pytest.mark.xdist_group("sanitizer")  # one process compiles the driver
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_the_kernels_are_clean(tool, run):
    assert_clean(*run(tool))


def test_lengths_segments_and_slots_are_clean(run):
    assert_clean(*run(MEMCHECK, "--eager", "--run", *FEATURES))


@needs_mosaic_gpu
@pytest.mark.parametrize("feature", ["documents", "reverse"])
def test_mosaic_gpu_kernels_are_clean(feature, run):
    """One process per feature, because the tool may hang on these kernels. The first has lengths
    and prompts in one call."""
    skip_unless_hopper()
    flags = "--eager", "--backend=mosaic_gpu", "--run", feature
    output, code = run(MEMCHECK, *flags, seconds=MOSAIC_GPU_SECONDS)
    assert findings(output, KERNELS) == [], output[-4000:]
    if code is None:
        pytest.skip("compute-sanitizer hangs on this Mosaic GPU kernel")
    assert_clean(output, code)


def test_a_fault_is_found(run):
    output, _ = run("memcheck", "--fault")
    assert findings(output, ["reads_beyond"]), output[-4000:]
