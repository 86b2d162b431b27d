"""What all tests share: XLA's flags, the device that a test runs on, and what keeps compiling
cheap."""

import contextlib
import functools
import gc
import os
import re
import tempfile
import threading
from collections import Counter
from importlib import metadata
from pathlib import Path
from unittest import mock

# Before NumPy is imported. Tests run in a process per core; threads of OpenBLAS, which spin while
# they wait for a core, would take a fifth of the CPU time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import extras
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import pytest_timeout
from numpy_evaluator import kernels_in_numpy
from oracle import SEED, needs_compiler, needs_mosaic_gpu, quick_code

from mlstm_pallas.selfcheck import package_hash

# The older of XLA's code generators for CPUs compiles in half the time. One LLVM module per program
# instead of up to 32, without inlining before the split, saves a quarter of the rest.
QUICK_CODE = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_llvm_force_inline_before_split=false"
)


def quick_flags(jaxlib, plugins):
    """XLA's flags for tests: for a version, with plugins, which have their own XLA, or not."""
    return QUICK_CODE.split() if jaxlib.startswith("0.10.") and not plugins else []


# With XLA_FLAGS= tests run what users get. `extras` adds the flags of several GPUs.
extras.add_flags(os.environ, quick_flags(metadata.version("jaxlib"), extras.has_plugins()))
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

# Tests raise thousands of errors. Cutting jax's frames from their tracebacks takes as long again.
jax.config.update("jax_traceback_filtering", "off")

NO_GPU = "no GPU", "fewer than two GPUs"


class Completeness:
    """pytest --complete: what of the selected tests ran, at the end, and which package it was.

    The exit code is 1 if one did not run: because time was up, at an interruption or a crash, or
    for lack of a GPU. All processes share the programs that they compile.
    """

    def __init__(self):
        self.selected, self.outcomes = {}, {}
        self.programs = tempfile.TemporaryDirectory()
        for name, value in (
            ("JAX_COMPILATION_CACHE_DIR", self.programs.name),
            ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0"),
            ("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1"),
        ):
            os.environ.setdefault(name, value)

    def pytest_collection_finish(self, session):
        self.selected |= dict.fromkeys(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.selected |= dict.fromkeys(ids)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            said = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else ""
            self.outcomes[report.nodeid] = report.outcome, said

    def pytest_sessionfinish(self, session):
        outcomes = [self.outcomes.get(name) for name in self.selected]
        self.lines = [
            f"{name}: {outcome[1] if outcome else 'did not end'}"
            for name, outcome in zip(self.selected, outcomes, strict=True)
            if not outcome or outcome[0] == "skipped"
        ]
        left_out = sum(not x or x[1] in NO_GPU for x in outcomes)
        counts = Counter(outcome for outcome, _ in filter(None, outcomes))
        self.lines += [
            f"{len(outcomes)} selected, of which {left_out} did not run: {dict(counts)}; "
            f"jax {jax.__version__}, files {package_hash()}"
        ]
        if left_out or not outcomes:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("what ran")
        for line in self.lines:
            terminalreporter.line(line)

    def pytest_unconfigure(self):
        self.programs.cleanup()


def pytest_addoption(parser):
    said = "print which selected tests did not run, and fail if there are any"
    parser.addoption("--complete", action="store_true", help=said)


def pytest_configure(config):
    if not config.getoption("complete"):
        return
    # A program that another process is just writing is compiled once more.
    unread = "ignore:Error (reading|writing) persistent compilation cache entry:UserWarning"
    config.addinivalue_line("filterwarnings", unread)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Completeness())


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


# About how many seconds GPU tests take while 15 processes compile on 16 cores, by their ids; what
# is not here takes 10 or less. The pattern that comes first counts.
GPU_SECONDS = {
    r"kernels_are_clean\[|test_lengths_segments_and_slots_are_clean": 200,
    r"(cases|calls)_on_a_gpu|recurrences_on_a_gpu|kernels_run_on_a_gpu": 150,
    r"test_memory_of_odd|test_call_on_mosaic_gpu|test_values.*(2048|4095|4096|32768)": 60,
    r"test_mosaic_gpu_on_a_gpu.py|shards_on_one_gpu": 50,
    r"test_call|test_values|plan_of_another_gpu": 30,
    r"test_gpu(_huge)?.py|test_canaries.py": 15,
}


def gpu_order(item):
    """GPU tests come first, the longest before the others, so that all processes end at about the
    same time; those that run alone are the last ones, because they wait until all others end."""
    if not any(map(item.get_closest_marker, ("gpu", "gpu_multi"))):
        return 2, 0
    seconds = (n for pattern, n in GPU_SECONDS.items() if re.search(pattern, item.nodeid))
    return bool(item.get_closest_marker("alone")), -next(seconds, 10)


def pytest_report_header():
    return f"MLSTM_PALLAS_SEED={SEED}"


# Seconds. A quick test of an interpreted kernel takes up to 15 on an idle core, and waits for ever
# where one of its warpgroups waits for another.
INTERPRETED = 480
UNANSWERED = 120  # more than a compilation or a program takes, which a signal does not interrupt


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item, settings):
    """At its limit a test fails, by a signal. If it waits in XLA for ever, it does not answer: then
    its process ends, with the stacks of all threads."""
    seconds = settings.timeout + UNANSWERED
    item.end = threading.Timer(seconds, pytest_timeout.timeout_timer, (item, settings))
    item.end.daemon = True
    item.end.start()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer(item):
    if hasattr(item, "end"):
        item.end.cancel()
    return (yield)


# The imports of packages that only some tests need. CI has them all.
OPTIONAL = {
    *("absl", "flax", "matplotlib", "mypy", "optax", "orbax", "safetensors", "sybil", "tokenizers"),
    *("starlette", "tqdm", "triton", "uvicorn", "yaml"),
}


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A file that imports a package which is not installed is skipped."""
    report = yield
    if report.failed and isinstance(collector, pytest.Module):
        error = report.call.excinfo.value.__cause__
        package = error.name if isinstance(error, ModuleNotFoundError) else None
        if package and package.partition(".")[0] in OPTIONAL:
            reason = f"{package.partition('.')[0]} is not installed"
            report.outcome, report.longrepr = "skipped", (str(collector.path), 0, reason)
            del report.call
    return report


# Slow tests that CI runs on the newest Python alone: of tracing, partitioning and exporting.
OF_JAX = r"test_(api|export|modes|sharding|tpu)\.py|test_mesh.*y inside one over x-forward"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """The quick selection has only those rows that a mark names, and those GPU tests that are
    marked smoke. Tests that the oldest Python skips, and those of OF_JAX, are marked. Those that
    need JAX's compiler for CUDA are slow, because the environment of README's command lacks it."""
    gpus = gpu_count()
    newer, unused = [needs_compiler.mark, needs_mosaic_gpu.mark], {}
    items.sort(key=gpu_order)
    for item in items:
        needed = [mark for mark in item.iter_markers("skipif") if mark in newer]
        if needed or re.search(OF_JAX, item.nodeid):
            item.add_marker("newer_python")
        if needs_compiler.mark in needed:
            item.add_marker("slow")
        for mark in item.iter_markers("quick"):
            begun = {x for x in mark.args if item.callspec.id.startswith(x)}
            unused.setdefault(item.function, {*mark.args}).difference_update(begun)
            if not begun:
                item.add_marker(pytest.mark.slow)
        marks = {mark.name for mark in item.iter_markers()}
        interpreted = item.module.__name__.startswith(("test_mosaic_gpu", "test_products"))
        if interpreted and not marks & {"slow", "gpu"}:
            item.add_marker(pytest.mark.timeout(INTERPRETED))
        needed = 2 if "gpu_multi" in marks else int("gpu" in marks)
        if needed:
            if "smoke" not in marks:
                item.add_marker(pytest.mark.slow)
            if gpus < needed:
                reason = "no GPU" if needed == 1 else "fewer than two GPUs"
                item.add_marker(pytest.mark.skip(reason=reason))
    stale = [f"{test.__name__}: {names}" for test, names in unused.items() if names]
    partial = config.getoption("lf", False) or any("::" in x for x in config.args)
    if stale and not partial:
        raise pytest.UsageError(f"no row begins with what pytest.mark.quick names: {stale}")


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
    """Interpreted kernels run in NumPy in most modules. What a module has compiled is freed at its
    end."""
    name, folder = request.module.__name__, request.path.parent.name
    with contextlib.ExitStack() as stack:
        stack.enter_context(quick_code(name not in AS_USERS_DO))
        if folder != "devices":
            stack.enter_context(kernels_in_numpy())
        yield
    jax.clear_caches()
