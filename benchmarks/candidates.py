"""Candidates of the tuner: compiled, checked and timed.

This happens in this process or, for Mosaic GPU kernels, in one for each stage.
"""

import atexit
import copy
import dataclasses
import functools
import importlib.util
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import compile_report
import jax
import jax.numpy as jnp
import kernel_benchmark
from command import one_line
from kernel_benchmark import STAGES, Case, MlstmPallas, implementation, time_calls, wrong_outputs
from roofline import Shape
from worker import NoAnswer, ProcessEnded, Worker

from mlstm_pallas.config import KernelConfig, config_from_row
from mlstm_pallas.devices import available_shared_bytes

RUNS = 3  # that must have the same bits
SLOW = 1.2  # times the best so far: not worth timing exactly


class DeviceLost(RuntimeError):
    """The device does not answer after a candidate."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Of a candidate; note has the reason of the status.

    The status is "ok"; "pruned" by the compile report; "failed" to compile or to run; "wrong"
    output; "hangs".
    """

    status: str
    ms: float | None = None
    note: str = ""


class Pruner:
    """Prunes candidates by the compile report, for the device at hand."""

    def __init__(self, device: compile_report.Device, max_spill_bytes: int):
        self.device, self.max_spill_bytes = device, max_spill_bytes

    def __call__(self, function: Callable[..., Any], args: Sequence[Any]) -> str:
        """The reason not to run the kernels of the function; "" where there is none."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        for kernel in compile_report.lowered_kernels(function, *shapes, device=self.device):
            if kernel.cause:
                return kernel.cause
            try:
                launch = kernel.num_warps, kernel.num_stages
                capability = self.device.capability
                usage = compile_report.compile_kernel(kernel.ir, *launch, capability)
            except compile_report.CompileError as error:
                return str(error)
            if excess := compile_report.too_much_shared_memory(usage, self.device):
                return excess
            if usage.spill_store_bytes > self.max_spill_bytes:
                return f"spills {usage.spill_store_bytes} bytes, at most {self.max_spill_bytes}"
        return ""


def pruner_for(device: Any, max_spill_bytes: int) -> Pruner | None:
    """None, with the reason printed, where the compile report cannot compile for the device."""
    if device.platform != "gpu":
        reason = "there is no GPU"
    elif importlib.util.find_spec("triton") is None:
        reason = "it needs the triton package: pip install 'mlstm_pallas[test]'"
    elif available_shared_bytes(device.device_kind) is None:
        reason = f"it does not know the shared memory of {device.device_kind}"
    else:
        capability = round(10 * float(device.compute_capability))
        return Pruner(compile_report.Device(device.device_kind, capability), max_spill_bytes)
    print(f"nothing is pruned by the compile report: {reason}")
    return None


def _compare(
    impl: MlstmPallas, outputs: Any, again: Any, expected: Any
) -> tuple[dict[str, Any], jax.Array]:
    """Norms of error and expectation by output, and whether two runs have the same bits."""

    def norm(x):
        return jnp.linalg.norm(x.ravel())

    named, norms = impl.named(outputs), {}
    for name, y in impl.named(expected).items():
        norms[name] = norm(named[name].astype(jnp.float32) - y), norm(y)
    runs = zip(jax.tree.leaves(outputs), jax.tree.leaves(again), strict=True)
    return norms, jnp.stack([jnp.all(x == y) for x, y in runs]).all()


class Check(NamedTuple):
    """Programs for one stage and chunk size.

    Attributes:
      plain: the plain form, of float32 inputs.
      compare: ``_compare``, of outputs as ``kernel_benchmark.written`` has them.
    """

    plain: Callable[..., Any]
    compare: Callable[..., Any]


class Bench:
    """Compiles, checks and times candidates of one shape and dtype.

    A candidate is a stage ("": whole calls) and a config.
    """

    def __init__(self, backend: str, shape: Shape, dtype: str, pruner: Pruner | None, repeats: int):
        self.backend, self.shape, self.dtype = backend, shape, dtype
        self.pruner, self.repeats = pruner, repeats
        self._case: Case | None = None

    def case(self, stage: str) -> Case:
        """All stages share inputs and arrays; whole calls leave none of these on the device."""
        if self._case is None or bool(self._case.stage) != bool(stage):
            self._case = Case(self.shape, self.dtype, stage, gradients=not stage)
            jax.block_until_ready(self._case.inputs)
        case = copy.copy(self._case)
        case.stage = stage
        return case

    def implementation(self, stage: str, config: KernelConfig) -> MlstmPallas:
        return implementation(stage, self.backend, self.shape, self.dtype, None, config)

    def compile_check(self, case: Case, config: KernelConfig, inputs: Any) -> Check | None:
        """Runs in any thread. For whole calls the case computes and keeps what is expected."""
        impl = self.implementation(case.stage, config)
        if not case.stage:
            case.expected(impl)
            return None
        function, args = impl.computation(inputs, "fwd")

        def wide(x):
            return jax.ShapeDtypeStruct(x.shape, jnp.float32)

        wide_args = jax.tree.map(wide, impl.oracle_arguments(inputs)[0])
        outputs = jax.eval_shape(lambda *xs: kernel_benchmark.written(function(*xs)), *args)
        plain = jax.jit(impl.reference).lower(*wide_args).compile()
        expected = jax.eval_shape(impl.reference, *wide_args)
        compare = jax.jit(functools.partial(_compare, impl)).lower(outputs, outputs, expected)
        return Check(plain, compare.compile())

    def expected(self, stage: str, L: int, check: Check | None) -> Any:
        """The outputs of the stage's plain form in float32, on the device."""
        if check is None:
            return None
        arrays = self.case(stage).arrays(L)
        inputs = [arrays[name] for name in STAGES[stage].inputs]
        return check.plain(*jax.tree.map(lambda x: x.astype(jnp.float32), inputs))

    def prepare(
        self, stage: str, config: KernelConfig, inputs: Any, prune: bool
    ) -> tuple[MlstmPallas, Callable[[], Any]] | Result:
        """Compiles, in any thread; a result where there is nothing to judge."""
        try:
            impl = self.implementation(stage, config)
            direction = "fwd" if stage else "fwbw"
            pruner = self.pruner if prune else None
            if pruner and (reason := pruner(*impl.computation(inputs, direction))):
                return Result("pruned", note=reason)
            return impl, impl.build(inputs, direction)
        except Exception as error:
            return Result("failed", note=one_line(error))

    def judge(
        self,
        stage: str,
        impl: MlstmPallas,
        call: Callable[[], Any],
        check: Check | None,
        expected: Any,
        best: float | None,
    ) -> Result:
        """Checks, then times. Raises DeviceLost."""
        case = self.case(stage)
        try:
            outputs = jax.block_until_ready(kernel_benchmark.written(call()))
            for _ in range(RUNS - 1):
                again = kernel_benchmark.written(call())
                if check:
                    norms, same = jax.device_get(check.compare(outputs, again, expected))
                    errors = {name: float(x / max(y, 1e-30)) for name, (x, y) in norms.items()}
                else:
                    errors = case.errors(impl, outputs, "fwbw")
                    same = jax.tree.all(jax.tree.map(jnp.array_equal, outputs, again))
                if wrong := wrong_outputs(case, errors):
                    return Result("wrong", note=wrong)
                if not same:
                    return Result("wrong", note="other bits in another run")
            del outputs, again
            [seconds] = time_calls(call, impl.synchronise, 1)
            if best is None or 1e3 * seconds < SLOW * best:
                seconds = statistics.median(time_calls(call, impl.synchronise, self.repeats))
            return Result("ok", 1e3 * seconds)
        except Exception as error:
            try:
                jax.block_until_ready(jnp.zeros(8) + 1)
            except Exception:
                raise DeviceLost(f"{stage} {impl.config}: {one_line(error)}") from None
            return Result("failed", note=one_line(error))


# ---------------------------------------------------------------- Mosaic GPU, in other processes


def refused_by_ptxas(folder: str, max_spill_bytes: int) -> str:
    """The reason not to run what was compiled last, "" where there is none.

    The logs that Mosaic GPU left in the folder have it.
    """
    for path in sorted(Path(folder).glob("*.ptxas")):
        log = path.read_text(errors="replace")
        _, spilled, _ = compile_report.parse_ptxas(log)
        if spilled > max_spill_bytes:
            return f"spills {spilled} bytes, at most {max_spill_bytes}"
        messages = compile_report._messages(log)
        if messages["wgmma_serialized"]:
            codes = ", ".join(messages["messages"])
            return f"every product waits for the one before: {codes}"
    return ""


class StageProcess:
    """What runs in the process of a stage: prepares and judges its candidates.

    Candidates come as rows. A Result goes as a tuple.

    Args:
      folder: where Mosaic GPU leaves the logs of ptxas.
    """

    def __init__(self, backend: str, repeats: int, max_spill_bytes: int, folder: str):
        self.backend, self.repeats = backend, repeats
        self.max_spill_bytes, self.folder = max_spill_bytes, folder
        self.bench: Bench | None = None

    def __call__(
        self,
        what: str,
        shape: Sequence[int],
        dtype: str,
        stage: str,
        row: dict[str, Any],
        argument: Any,
    ) -> Any:
        case = Shape(*shape), dtype
        if self.bench is None or (self.bench.shape, self.bench.dtype) != case:
            self.bench = Bench(self.backend, *case, None, self.repeats)
            self.prepared: dict[KernelConfig, tuple[Any, ...]] = {}
            self.check: Check | None = None
            self.expected: Any = None
        result = getattr(self, what)(self.bench, stage, config_from_row(row), argument)
        return None if result is None else dataclasses.astuple(result)

    def prepare(self, bench: Bench, stage: str, config: KernelConfig, prune: bool) -> Result | None:
        """Compiles; a result where there is nothing to judge."""
        case, L = bench.case(stage), bench.implementation(stage, config).call.problem.L
        inputs = case.arrays(L)
        for path in Path(self.folder).glob("*.*"):  # not "stderr"
            path.unlink()
        prepared = bench.prepare(stage, config, inputs, False)
        if isinstance(prepared, Result):
            return prepared
        if prune and (reason := refused_by_ptxas(self.folder, self.max_spill_bytes)):
            return Result("pruned", note=reason)
        if self.check is None:
            self.check = bench.compile_check(case, config, inputs)
            self.expected = jax.block_until_ready(bench.expected(stage, L, self.check))
        self.prepared[config] = prepared
        return None

    def judge(
        self, bench: Bench, stage: str, config: KernelConfig, best: float | None
    ) -> Result | None:
        """Checks, then times; None for what this process has not prepared."""
        prepared = self.prepared.pop(config, None)
        return prepared and bench.judge(stage, *prepared, self.check, self.expected, best)


class IsolatedBench:
    """A Bench whose candidates are compiled, checked and timed in the process of their stage.

    A process that does not end is killed.

    Args:
      workers: by stage, each with a StageProcess.
      deadline: of the case; a candidate that still waits for its process then is not compiled.
    """

    inputs = None

    def __init__(
        self,
        workers: Mapping[str, Worker],
        shape: Shape,
        dtype: str,
        deadline: float,
        *,
        compile_seconds: float,
        run_seconds: float,
    ):
        self.workers, self.shape, self.dtype, self.deadline = workers, shape, dtype, deadline
        self.compile_seconds, self.run_seconds = compile_seconds, run_seconds
        self._turns = {stage: threading.Lock() for stage in workers}

    # The arrays and what is expected are in the processes.

    def case(self, stage: str) -> "IsolatedBench":
        return self

    def arrays(self, L: int) -> None: ...

    def compile_check(self, case: Any, config: KernelConfig, inputs: None) -> None: ...

    def expected(self, stage: str, L: int, check: None) -> None: ...

    def _ask(
        self, seconds: float, what: str, stage: str, config: KernelConfig, argument: Any
    ) -> Result | None:
        case = tuple(self.shape), self.dtype
        request = what, *case, stage, config.as_row(), argument
        answer = self.workers[stage](*request, seconds=seconds)
        return None if answer is None else Result(*answer)

    def prepare(
        self, stage: str, config: KernelConfig, inputs: None, prune: bool
    ) -> Sequence[Any] | Result:
        """Runs in any thread."""
        with self._turns[stage]:
            if time.monotonic() > self.deadline:
                # The tuner does not ask for the result any more.
                return Result("failed", note="the time was up")
            return self._prepare(stage, config, prune)

    def _prepare(self, stage: str, config: KernelConfig, prune: bool) -> Sequence[Any] | Result:
        try:
            result = self._ask(self.compile_seconds, "prepare", stage, config, prune)
            return result or (config, None)
        except (NoAnswer, ProcessEnded) as error:
            return Result("failed", note=f"not compiled: {error}")

    def judge(
        self,
        stage: str,
        config: KernelConfig,
        call: None,
        check: None,
        expected: None,
        best: float | None,
    ) -> Result:
        """A candidate whose process was killed with another one is prepared again."""
        try:
            while (result := self._ask(self.run_seconds, "judge", stage, config, best)) is None:
                prepared = self._prepare(stage, config, False)
                if isinstance(prepared, Result):
                    return prepared
            return result
        except NoAnswer as error:
            return Result("hangs", note=str(error))
        except ProcessEnded as error:
            return Result("failed", note=str(error))


def stage_workers(stages: Sequence[str], *args: Any) -> dict[str, Worker]:
    """A worker for each stage, of a StageProcess of these arguments."""
    workers = {}
    for stage in stages:
        folder = tempfile.mkdtemp(prefix=f"{stage}-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        # Mosaic GPU reads the first ones when jax is imported. A compiled program from the user's
        # cache would leave no log.
        variables = compile_report.DUMP | dict(MOSAIC_GPU_DUMP_TO=folder)
        variables |= dict(JAX_ENABLE_COMPILATION_CACHE="false")
        # Threads of GPU interpret mode wait for each other. With one CPU device XLA has too few
        # threads for them on a small machine.
        variables["JAX_NUM_CPU_DEVICES"] = "8"
        # Where there is no nvdisasm Mosaic GPU writes so for each kernel.
        stderr = os.path.join(folder, "stderr")
        workers[stage] = Worker(StageProcess(*args, folder), variables, stderr=stderr)
    return workers
