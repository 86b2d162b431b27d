"""Where a call runs: on the Triton or Mosaic GPU kernels, compiled or interpreted, or in jnp."""

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from typing import Any, NoReturn

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
    """Inside, ``backend`` is the backend of calls that name none themselves.

    None: "triton" where the computation is lowered for an NVIDIA GPU, "xla"
      elsewhere.
    "triton": Triton kernels, the fastest in float32 and on GPUs before and
      after Hopper.
    "mosaic_gpu": Mosaic GPU kernels, the fastest on Hopper in 16-bit dtypes.
      Stages without one run Triton's, or plain jnp where jax has no Triton
      backend. Another GPU or an unfit jax is a ValueError.
    "xla": plain jnp, on any device.
    "interpret", "mosaic_gpu_interpret": the kernels interpreted on a CPU;
      slow, for tests; the former in a shard_map with check_vma=False, the
      latter on one device.

    The argument ``backend`` of a call comes first, then the innermost
    use_backend, then the environment variable MLSTM_PALLAS_BACKEND. All are
    read when a function is called, that is at trace time under jit: functions
    that were traced before stay as they are.

    A use_backend holds in the thread, or the asyncio task, that entered it.
    Threads started inside do not see it. For those, and for a whole program,
    set MLSTM_PALLAS_BACKEND.

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
      mosaic_gpu_kernels: whether the call has such kernels; one without runs on any jax and GPU.

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
    # If jax has no Triton backend, None is "mosaic_gpu" on Hopper. Stages without such a kernel, as
    # in float32, run in plain jnp. This is decided when the call is traced, so a computation on the
    # CPU of such a machine has to pass "xla".
    without_triton = (
        backend is None and not HAS_TRITON and mosaic_gpu_kernels and jax_has_mosaic_gpu()
    )
    return "mosaic_gpu" if without_triton and target_gpu().hopper else backend


def jax_has_mosaic_gpu() -> bool:
    """Whether the installed jax compiles the Mosaic GPU kernels."""
    version: tuple[int, ...] = jax.__version_info__
    return MOSAIC_GPU_JAX[0] <= version < MOSAIC_GPU_JAX[1]


def check_mosaic_gpu(name: str, lowering: Lowering, gpu: Gpu) -> None:
    """Raises a ValueError if jax or the GPU cannot run the Mosaic GPU kernels."""
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


# The identity, which raises when it is lowered for a CPU, because Pallas' own message there says
# only that it supports nothing but interpret mode.
_for_gpus = Primitive("for_gpus")
_for_gpus.def_abstract_eval(lambda x, *, backend: x)
_for_gpus.def_impl(
    lambda x, *, backend: jax.jit(functools.partial(_for_gpus.bind, backend=backend))(x)
)
batching.defvectorized(_for_gpus)


def _refuse(*_: Any, backend: str) -> NoReturn:
    interpreted = "interpret" if backend == "triton" else "mosaic_gpu_interpret"
    raise ValueError(
        f"backend is {backend!r}, whose kernels are for GPUs, and the computation is lowered for a "
        f"CPU: expected backend None or 'xla' (plain jnp), or {interpreted!r} (the kernels, "
        "interpreted)"
    )


mlir.register_lowering(_for_gpus, lambda _, x, *, backend: [x])
mlir.register_lowering(_for_gpus, _refuse, platform="cpu")


# Like ``lax.platform_dependent``, but each function is lowered for its own platforms only. jax
# lowers every branch for all platforms of a computation, and Pallas refuses to lower Triton kernels
# for a CPU.
_by_platform = Primitive("by_platform")
_by_platform.multiple_results = True
_by_platform.def_abstract_eval(lambda *_, cuda, other: other.out_avals)
_by_platform.def_impl(
    lambda *args, **jaxprs: jax.jit(functools.partial(_by_platform.bind, **jaxprs))(*args)
)


def _lowering_of(platform: str) -> Callable[..., Any]:
    def rule(ctx: Any, *args: Any, **jaxprs: Any) -> Any:
        module = ctx.module_context
        # jax caches the lowered form of inner jits without their platforms, so the CPU would call a
        # function lowered for CUDA, and XLA for CPUs aborts at the cumsum of jax 0.12 for GPUs.
        lowered = module.cached_primitive_lowerings
        if ctx.platforms is not None:
            lowered = lowered.setdefault((_by_platform, *ctx.platforms), {})
        ctx = ctx.replace(module_context=module.replace(cached_primitive_lowerings=lowered))
        return mlir.lower_fun(jaxpr_as_fun(jaxprs[platform]))(ctx, *args)

    return rule


def _batched(axis: Any, args: Any, dims: Any, **jaxprs: Any) -> tuple[Any, Any]:
    def mapped(jaxpr: Any) -> Any:
        names = dict(axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name)
        return jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), tuple(dims), **names))(*args)

    results = _by_platform.bind(*args, **{name: mapped(x) for name, x in jaxprs.items()})
    return results, [0] * len(results)


batching.fancy_primitive_batchers[_by_platform] = _batched
mlir.register_lowering(_by_platform, _lowering_of("other"))
mlir.register_lowering(_by_platform, _lowering_of("cuda"), platform="cuda")


def on_backend(
    backend: str | None,
    run: Callable[..., Any],
    *args: Any,
    mapped: Sequence[tuple[str, int]] = (),
) -> Any:
    """Returns run(lowering, *args), with the lowering of the backend.

    mapped: (name, size) of the axes of a vmap that run names, where jax may have left the vmap.

    None is Triton where the computation is lowered for CUDA, else XLA. Where jax has no Triton it
    is XLA, unless ``requested_backend`` chose "mosaic_gpu".
    """
    if backend is None and not HAS_TRITON:
        return run(Lowering.XLA, *args)
    if backend is None:
        leaves, tree = jax.tree.flatten(args)

        def traced(lowering: Lowering) -> Any:
            function = functools.partial(run, lowering)
            return jax.make_jaxpr(
                lambda *x: function(*jax.tree.unflatten(tree, x)),
                axis_env=mapped,
                return_shape=True,
            )(*leaves)

        (cuda, _), (other, outputs) = traced(Lowering.TRITON), traced(Lowering.XLA)
        results = _by_platform.bind(*leaves, cuda=cuda, other=other)
        return jax.tree.unflatten(jax.tree.structure(outputs), results)
    if backend in ("triton", "mosaic_gpu"):
        (first, *others), tree = jax.tree.flatten(args)
        args = jax.tree.unflatten(tree, [_for_gpus.bind(first, backend=backend), *others])
    return run(Lowering(backend), *args)
