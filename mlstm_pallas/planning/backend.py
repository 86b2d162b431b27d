"""The backend that a call asks for, and its lowering on the device of the call."""

import contextlib
import inspect
import os
from contextvars import ContextVar
from typing import Any

import jax

from mlstm_pallas.launches.lowering import Lowering
from mlstm_pallas.planning.dispatch import HAS_TRITON
from mlstm_pallas.problem.annotations import BackendName
from mlstm_pallas.problem.gpu import UNKNOWN, Gpu
from mlstm_pallas.problem.validation import check_backend

VARIABLE = "MLSTM_PALLAS_BACKEND"
# The first jax that compiles the Mosaic GPU kernels, and the first that is not tested.
MOSAIC_GPU_JAX = (0, 11, 2), (0, 13)
# The DHQK and DHV up to which Triton's forward pass is faster than Mosaic GPU's.
FASTEST_ON_TRITON = 16
# The backends of the with statements that a thread or task is in, the innermost last. None of them
# is kept on a use_backend, which several threads may have entered.
_entered: ContextVar[tuple[str | None, ...]] = ContextVar("entered", default=())


class use_backend(contextlib.ContextDecorator):
    """Sets the backend of calls that pass none, in a with statement or a decorated function.

    * None: "triton" on an NVIDIA GPU from compute capability 8.0, "xla"
      elsewhere. The device is that of the arrays, if they are not traced, else
      of the mesh that is set, else jax's default device.
    * "fastest": the same, but "mosaic_gpu" where it runs: on Hopper with
      jax >= 0.11.2, in bfloat16 and float16. Heads of 16 and fewer dimensions
      stay on Triton. One setting for all machines.
    * "triton": Triton kernels, on NVIDIA GPUs from compute capability 8.0.
      Another GPU raises a ValueError.
    * "mosaic_gpu": Mosaic GPU kernels, on Hopper in 16-bit dtypes. They are
      faster than Triton's with few exceptions ("Where it loses" in README.md).
      Stages without such a kernel run the Triton kernel, or plain jnp if jax has
      no Triton backend. Another GPU or an unsupported jax raises a ValueError.
    * "xla": plain jnp, on any device.
    * "interpret": the Triton kernels interpreted on a CPU; slow, for tests.
      Inside a shard_map it needs check_vma=False.

    The argument ``backend`` of a call comes first, then the innermost
    use_backend, then the environment variable MLSTM_PALLAS_BACKEND. All are
    read when a function is called, that is, at trace time under jit, so they do
    not change functions that were traced before.

    use_backend applies to the thread or asyncio task that entered it. Threads
    started inside do not see it; for them, and for a whole program, set
    MLSTM_PALLAS_BACKEND.

    Example::

      >>> from mlstm_pallas import use_backend
      >>> with use_backend("xla"):
      ...     pass  # calls, or the first call of a jitted function

    Raises:
      ValueError: for the name of another backend.
    """

    def __init__(self, backend: BackendName | None):
        self._backend = check_backend("backend", backend)

    def __call__(self, function: Any) -> Any:
        kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
        if any(is_kind(function) for is_kind in kinds):
            raise TypeError(
                f"{function.__name__} runs after its call has returned, expected a with statement "
                "inside of it"
            )
        return super().__call__(function)

    def __enter__(self) -> None:
        _entered.set((*_entered.get(), self._backend))

    def __exit__(self, *_: object) -> None:
        _entered.set(_entered.get()[:-1])


def named_backend(backend: str | None = None) -> tuple[str, str | None]:
    """The backend of a call, and what sets it: its argument, ``use_backend`` or the environment."""
    if backend is not None:
        return "backend", backend
    if entered := _entered.get():
        return "backend of use_backend", entered[-1]
    return VARIABLE, check_backend(VARIABLE, os.environ.get(VARIABLE) or None)


def requested_lowering(
    backend: str | None, gpu: Gpu, heads: tuple[int, int] | None = None
) -> Lowering:
    """The lowering of a call by ``named_backend``, which the device of the call decides.

    Args:
      gpu: that the call is traced for; UNKNOWN: none.
      heads: DHQK and DHV; None: of a step, which has no Mosaic GPU kernel.

    Raises:
      ValueError: where the kernels cannot run, and for a wrong MLSTM_PALLAS_BACKEND.
    """
    name, backend = named_backend(backend)
    if backend in (Lowering.TRITON, Lowering.MOSAIC_GPU) and not gpu.runs_kernels:
        raise ValueError(
            f"{name} is '{backend}' and the device is {gpu.name}, expected an NVIDIA GPU "
            "from compute capability 8.0, or backend None or 'xla' (plain jnp)"
        )
    if backend == Lowering.MOSAIC_GPU and heads:
        check_mosaic_gpu(name, gpu)
    if backend not in (None, "fastest"):
        return Lowering(backend)
    if gpu is UNKNOWN or not gpu.runs_kernels:
        return Lowering.XLA
    fastest = backend == "fastest" and heads is not None and max(heads) > FASTEST_ON_TRITON
    if (fastest or (heads and not HAS_TRITON)) and gpu.hopper and jax_has_mosaic_gpu():
        return Lowering.MOSAIC_GPU
    return Lowering.TRITON if HAS_TRITON else Lowering.XLA


def jax_has_mosaic_gpu() -> bool:
    """Whether the installed jax compiles the Mosaic GPU kernels."""
    return MOSAIC_GPU_JAX[0] <= jax.__version_info__ < MOSAIC_GPU_JAX[1]


def check_mosaic_gpu(name: str, gpu: Gpu) -> None:
    """Refuses the Mosaic GPU kernels for another jax, or for another GPU than Hopper."""
    if not jax_has_mosaic_gpu():
        first, end = (".".join(map(str, version)) for version in MOSAIC_GPU_JAX)
        raise ValueError(
            f"{name} is 'mosaic_gpu' and jax is {jax.__version__}, expected jax >= {first} and < "
            f"{end}, which needs Python >= 3.12, or backend None"
        )
    if gpu is not UNKNOWN and not gpu.hopper:
        raise ValueError(
            f"{name} is 'mosaic_gpu' and the GPU is {gpu.name}, expected a Hopper GPU "
            "(H100, H200, H800, H20, GH200) or backend None"
        )
