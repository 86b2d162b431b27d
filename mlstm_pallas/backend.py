"""Where a call runs: on the Triton or Mosaic GPU kernels, compiled or interpreted, or in jnp."""

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from mlstm_pallas.annotations import BackendName
from mlstm_pallas.gpu import UNKNOWN, Gpu, target_gpu
from mlstm_pallas.planning import HAS_TRITON, lowerings
from mlstm_pallas.stage import Lowering
from mlstm_pallas.validation import MOSAIC_GPU_JAX, check_backend

VARIABLE = "MLSTM_PALLAS_BACKEND"
_UNSET = ""
_default: ContextVar[str | None] = ContextVar("backend", default=_UNSET)


class use_backend:
    """Sets the backend of calls inside a with statement that pass none.

    None: "triton" where the computation is lowered for an NVIDIA GPU, "xla"
      elsewhere.
    "triton": Triton kernels, the fastest in float32 and on GPUs before and
      after Hopper.
    "mosaic_gpu": Mosaic GPU kernels, the fastest on Hopper in 16-bit dtypes.
      Stages without such a kernel run Triton's, or plain jnp if jax has no
      Triton backend. Another GPU or an unsupported jax raises a ValueError.
    "xla": plain jnp, on any device.
    "interpret", "mosaic_gpu_interpret": the kernels interpreted on a CPU;
      slow, for tests. Inside a shard_map the former needs check_vma=False;
      the latter runs on one device only.

    The argument ``backend`` of a call comes first, then the innermost
    use_backend, then the environment variable MLSTM_PALLAS_BACKEND. All are
    read when a function is called, that is at trace time under jit, so they
    do not change functions that were traced before.

    use_backend applies to the thread or asyncio task that entered it. Threads
    started inside do not see it; for them, and for a whole program, set
    MLSTM_PALLAS_BACKEND.

    Example::

      >>> from mlstm_pallas import use_backend
      >>> with use_backend("xla"):
      ...     pass  # calls, or the first call of a jitted function

    Raises:
      ValueError: for another backend.
    """

    def __init__(self, backend: BackendName | None):
        self._entered = True  # no warning where check_backend raises
        check_backend(backend)
        self._backend, self._entered = backend, False
        self._tokens: list[Token[str | None]] = []

    def __enter__(self) -> None:
        self._entered = True
        self._tokens.append(_default.set(self._backend))

    def __exit__(self, *_: object) -> None:
        _default.reset(self._tokens.pop())

    def __del__(self) -> None:
        if not self._entered:
            warnings.warn(
                f"use_backend({self._backend!r}) did nothing: it is for a with statement",
                RuntimeWarning,
                stacklevel=2,
            )


def requested_backend(backend: str | None = None, *, mosaic_gpu_kernels: bool = True) -> str | None:
    """The backend of a call, from its argument, ``use_backend`` or the environment.

    Args:
      mosaic_gpu_kernels: whether the call has any; others run on backend "mosaic_gpu" too.

    Raises:
      ValueError: where the Mosaic GPU kernels cannot run, and for a wrong MLSTM_PALLAS_BACKEND.
    """
    name = "backend"
    if backend is None:
        backend = _default.get()
    if backend == _UNSET:
        name, backend = VARIABLE, os.environ.get(VARIABLE) or None
        check_backend(backend, variable=VARIABLE)
    if backend is not None and Lowering(backend).folder == "mosaic_gpu" and mosaic_gpu_kernels:
        check_mosaic_gpu(name, Lowering(backend), target_gpu())
    # If jax has no Triton, None means "mosaic_gpu" on Hopper. Stages without such a kernel (all
    # stages in float32, for one) run in plain jnp. This is decided when the call is traced, so pass
    # "xla" for a computation on the CPU of such a machine.
    without_triton = (
        backend is None and not HAS_TRITON and mosaic_gpu_kernels and jax_has_mosaic_gpu()
    )
    return "mosaic_gpu" if without_triton and target_gpu().hopper else backend


def jax_has_mosaic_gpu() -> bool:
    """Whether the installed jax compiles the Mosaic GPU kernels."""
    version: tuple[int, ...] = jax.__version_info__
    return MOSAIC_GPU_JAX[0] <= version < MOSAIC_GPU_JAX[1]


def check_mosaic_gpu(name: str, lowering: Lowering, gpu: Gpu) -> None:
    """Refuses the Mosaic GPU kernels for another jax, or for another GPU than Hopper."""
    if not jax_has_mosaic_gpu():
        first, end = (".".join(map(str, version)) for version in MOSAIC_GPU_JAX)
        # Not Triton, which needs a GPU.
        other = "None" if lowering is Lowering.MOSAIC_GPU else f"'{lowerings(lowering)[1]}'"
        python = ", which needs Python >= 3.12" if jax.__version_info__ < MOSAIC_GPU_JAX[0] else ""
        versions = f"jax >= {first} and < {end}{python}"
        raise ValueError(
            f"{name} is '{lowering}' and jax is {jax.__version__}, expected {versions}, "
            f"or backend {other}"
        )
    if lowering is Lowering.MOSAIC_GPU and gpu is not UNKNOWN and not gpu.hopper:
        raise ValueError(
            f"{name} is '{lowering}' and the GPU is a {gpu.name}, expected a Hopper GPU "
            f"(H100, H200, H800, H20, GH200) or backend '{lowerings(lowering)[1]}'"
        )


# What ``lax.platform_dependent`` does, but each function is lowered for its own platforms alone.
# Where a computation is lowered for several, jax lowers every branch for all of them, and Pallas
# refuses to lower kernels for a CPU, with a message that does not name ``backend``.
_by_platform = Primitive("by_platform")
_by_platform.multiple_results = True
_by_platform.def_abstract_eval(lambda *_, backend, cuda, other: (other or cuda).out_avals)
_by_platform.def_impl(
    lambda *args, **params: jax.jit(functools.partial(_by_platform.bind, **params))(*args)
)


def _lowering_of(platform: str) -> Callable[..., Any]:
    def rule(ctx: Any, *args: Any, backend: str | None, cuda: Any, other: Any) -> Any:
        if platform == "cpu" and other is None:
            interpreted = "interpret" if backend == "triton" else "mosaic_gpu_interpret"
            raise ValueError(
                f"backend is {backend!r}, whose kernels are for GPUs, and the computation is "
                "lowered for a CPU: expected backend None or 'xla' (plain jnp), or "
                f"{interpreted!r} (the kernels, interpreted)"
            )
        module = ctx.module_context
        # jax keeps the lowered form of inner jits without their platforms: the CPU would call a
        # function lowered for CUDA, and XLA for CPUs aborts at the cumsum of jax 0.12 for GPUs.
        lowered = module.cached_primitive_lowerings
        if ctx.platforms is not None:
            lowered = lowered.setdefault((_by_platform, *ctx.platforms), {})
        ctx = ctx.replace(module_context=module.replace(cached_primitive_lowerings=lowered))
        jaxpr = cuda if platform == "cuda" or other is None else other
        return mlir.lower_fun(jaxpr_as_fun(jaxpr))(ctx, *args)

    return rule


def _batched(axis: Any, args: Any, dims: Any, backend: Any, **jaxprs: Any) -> tuple[Any, Any]:
    def mapped(jaxpr: Any) -> Any:
        names = dict(axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name)
        return jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), tuple(dims), **names))(*args)

    jaxprs = {name: x and mapped(x) for name, x in jaxprs.items()}
    results = _by_platform.bind(*args, backend=backend, **jaxprs)
    return results, [0] * len(results)


batching.fancy_primitive_batchers[_by_platform] = _batched
mlir.register_lowering(_by_platform, _lowering_of("other"))
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(_by_platform, _lowering_of(_platform), platform=_platform)


def on_backend(
    backend: str | None,
    run: Callable[..., Any],
    *args: Any,
    mapped: Sequence[tuple[str, int]] = (),
) -> Any:
    """run(lowering, *args).

    mapped: (name, size) of the axes of a vmap that run names, where jax may have left the vmap.

    None is Triton where the computation is lowered for CUDA, else XLA. Where jax has no Triton it
    is XLA, unless ``requested_backend`` chose "mosaic_gpu".
    """
    lowering = Lowering(backend or (Lowering.TRITON if HAS_TRITON else Lowering.XLA))
    if lowering.interpret or lowering is Lowering.XLA:
        return run(lowering, *args)
    leaves, tree = jax.tree.flatten(args)

    def traced(lowering: Lowering) -> Any:
        return jax.make_jaxpr(
            lambda *x: run(lowering, *jax.tree.unflatten(tree, x)),
            axis_env=mapped,
            return_shape=True,
        )(*leaves)

    (cuda, outputs), other = traced(lowering), None  # None: the kernels, on any GPU
    if backend is None:
        other, outputs = traced(Lowering.XLA)
    results = _by_platform.bind(*leaves, backend=backend, cuda=cuda, other=other)
    return jax.tree.unflatten(jax.tree.structure(outputs), results)
