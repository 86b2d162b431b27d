"""Candidates of the tuner: compiled, checked and timed, each in the process of a worker."""

import atexit
import dataclasses
import importlib.util
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import compile_report
import jax
import jax.numpy as jnp
import runner
from command import one_line
from kernel_benchmark import Case, MlstmPallas, implementation, written
from shapes import Shape
from worker import Worker

from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.problem.gpu import target_gpu
from mlstm_pallas.stages.stage import Lowering

RUNS = 3  # that must have the same bits
SPILLS = 512  # bytes per thread; candidates with more are not run


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a candidate; note has the reason for the status.

    The status is "ok"; "pruned" by what the compiler says; "failed" to compile or to run; "wrong"
    output; "hangs".
    """

    status: str
    ms: float | None = None
    note: str = ""


def too_many_spills(spilled: int) -> str:
    return f"spills {spilled} bytes, at most {SPILLS}" if spilled > SPILLS else ""


class Bench:
    """What runs in the process of a worker: it prepares candidates, then judges them.

    A candidate is a stage ("": whole calls) and the keywords of a config.

    Args:
      folder: where Mosaic GPU leaves the logs of ptxas.
    """

    def __init__(self, backend: str, repeats: int, folder: str):
        self.backend, self.repeats, self.folder = backend, repeats, folder
        self.case: Case | None = None

    def __call__(
        self,
        what: str,
        shape: Shape,
        dtype: str,
        stage: str,
        row: dict[str, Any],
        *args: Any,
    ) -> Result | None:
        if self.case is None or (self.case.shape, self.case.dtype) != (shape, dtype):
            self.case = Case(shape, dtype, gradients=True)
            self.prepared: dict[Any, tuple[MlstmPallas, Callable[[], Any]]] = {}
        return getattr(self, what)(self.case, stage, KernelConfig(**row), *args)

    def prepare(self, case: Case, stage: str, config: KernelConfig, prune: bool) -> Result | None:
        """Compiles; returns a result if there is nothing to judge."""
        try:
            impl = implementation(stage, self.backend, case.shape, case.dtype, None, config)
            inputs, direction = case.inputs_of(impl), "fwd" if stage else "fwbw"
            for path in self.logs():
                path.unlink()
            pruned = prune and self.refused_triton(*impl.computation(inputs, direction))
            call = None if pruned else impl.build(inputs, direction)
            if pruned := pruned or (prune and self.refused_mosaic_gpu()):
                return Result("pruned", note=pruned)
            case.expected(impl)
            self.prepared[stage, config] = impl, call
        except Exception as error:
            return Result("failed", note=one_line(error))
        return None

    def refused_triton(self, function: Callable[..., Any], args: Sequence[Any]) -> str:
        """Why not to run a Triton kernel of the function, by the compile report; "": none."""
        gpu = target_gpu()
        if self.backend != Lowering.TRITON or importlib.util.find_spec("triton") is None:
            return ""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        jaxpr = compile_report.trace(function, *shapes, device=gpu)
        for kernel in compile_report.lowered_kernels(jaxpr):
            if kernel.cause:
                return kernel.cause
            options = kernel.num_warps, kernel.num_stages, gpu.capability
            usage = compile_report._compile(kernel.ir, *options)
            excess = compile_report.too_much_shared_memory(usage, gpu)
            if excess := excess or too_many_spills(usage.spill_store_bytes):
                return excess
        return ""

    def logs(self) -> list[Path]:
        return sorted(Path(self.folder).glob("*.ptxas"))

    def refused_mosaic_gpu(self) -> str:
        """Why not to run what was compiled last, by the logs that Mosaic GPU left; "": none."""
        for path in self.logs():
            log = path.read_text(errors="replace")
            if excess := too_many_spills(compile_report.parse_ptxas(log)[1]):
                return excess
            first, *codes = compile_report.messages_of(log) or [""]
            if first == compile_report.SERIALIZED:
                return f"every product waits for the one before: {', '.join(codes)}"
        return ""

    def judge(self, case: Case, *candidate: Any) -> Result | None:
        """Checks, then times; None for what this process has not prepared."""
        if candidate not in self.prepared:
            return None
        impl, call = self.prepared.pop(candidate)
        try:
            outputs = jax.block_until_ready(call())
            errors = case.errors(impl, outputs, "fwbw")
            if wrong := runner.beyond(errors, case.limits(impl, errors)):
                return Result("wrong", note=wrong)
            outputs = written(outputs)
            for _ in range(RUNS - 1):
                again = written(call())
                if not jax.tree.all(jax.tree.map(jnp.array_equal, outputs, again)):
                    return Result("wrong", note="other bits in another run")
            del outputs, again
            times = runner.time_calls(call, impl.synchronise, self.repeats)
            return Result("ok", 1e3 * statistics.median(times))
        except Exception as error:
            jax.block_until_ready(jnp.zeros(8) + 1)  # if this raises, the process is given up
            return Result("failed", note=one_line(error))


def start_workers(count: int, *settings: Any) -> list[Worker]:
    """Workers, each with a Bench of these settings."""
    workers = []
    for _ in range(count):
        folder = tempfile.mkdtemp(prefix="tune-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        # Threads of GPU interpret mode wait for each other. With one CPU device XLA has too few
        # threads for them on a small machine.
        variables = compile_report.dumping_to(folder) | dict(JAX_NUM_CPU_DEVICES="32")
        workers.append(Worker(Bench(*settings, folder), variables))
    return workers
