"""Which lowering runs: on the platform of a computation, and for each stage.

A stage has one name and one signature in every folder: ``stages/`` (plain jnp), ``triton/`` and
``mosaic_gpu/``, whose file of the stage's name has its kernel, if there is one. A folder is
imported when ``planning.py``, which decides what runs where, first asks for one of its kernels.
"""

import functools
import importlib.util
import os
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from mlstm_pallas.stage import Launch, Lowering, Tiles
from mlstm_pallas.stages import HELPERS, STAGES

# jax will remove the Triton backend of Pallas; importing it here would import Triton's folder.
HAS_TRITON = importlib.util.find_spec("jax.experimental.pallas.triton") is not None

_STAGES = STAGES | HELPERS
_HERE = os.path.dirname(__file__)


@functools.cache
def kernels() -> tuple[str, ...]:
    """The kernels as KernelConfig names them: folder and stage."""
    return tuple(
        f"{folder}_{module.name}"
        for folder in ("triton", "mosaic_gpu")
        for module in pkgutil.iter_modules([os.path.join(_HERE, folder)])
        if module.name in _STAGES
    )


def _module(folder: str, name: str) -> Any:
    return importlib.import_module(f"mlstm_pallas.{folder}.{name}")


@functools.cache
def tiles_class(name: str, folder: str) -> type[Tiles] | None:
    """The tiles of a stage's kernel; None: the folder has none."""
    if f"{folder}_{name}" not in kernels():
        return None
    result: type[Tiles] = _module(folder, name).Tiles
    return result


def lowerings(first: Lowering) -> tuple[Lowering, ...]:
    """The lowering, then those that a kernel falls to."""
    if first.folder != Lowering.MOSAIC_GPU.folder:
        return (first,)
    triton = Lowering.INTERPRET if first.interpret else Lowering.TRITON
    return (first, triton, Lowering.XLA) if HAS_TRITON else (first, Lowering.XLA)


def run(name: str, *, call: Launch, **inputs: Any) -> Any:
    """Runs a stage as its launch says; inputs: its operands and its options."""
    operands = _STAGES[name].operands
    arrays = {x: inputs.pop(x) for x in operands._fields if x in inputs}
    return getattr(_module(call.lowering.folder, name), name)(
        operands(**arrays), call=call, **inputs
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
