"""Functions that call mlstm_chunkwise, exported with jax.export."""

import contextlib
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
from jax.export import DisabledSafetyCheck, Exported, is_symbolic_dim
from jax.export import export as jax_export
from jax.sharding import AbstractDevice, AbstractMesh

from mlstm_pallas.planning.backend import requested_backend, use_backend
from mlstm_pallas.problem.gpu import UNKNOWN, Gpu, export_gpu, gpu_of, known_gpu, target_gpu
from mlstm_pallas.problem.validation import CHECKS, checks_indices, wrong

__all__ = ["export"]

PLATFORMS = ("cpu", "cuda")
# The call target of Triton kernels; importing jax's constant for it would import that backend.
CUSTOM_CALL_TARGET = "__gpu$xla.gpu.triton"


def export(
    function: Callable[..., Any],
    *args: Any,
    platform: str | Sequence[str],
    device_kind: str | None = None,
    **kwargs: Any,
) -> Exported:
    """Exports a function that calls mlstm_pallas, to run it in another process.

    It is ``jax.export`` without the safety check that refuses the custom calls of Triton kernels.
    An export for CUDA holds the Triton IR of the kernels (with backend "mosaic_gpu" the Mosaic GPU
    IR of some), which is compiled where it is loaded. Load it with the version of jax that made it;
    mlstm_pallas is not needed there::

        exported = export(function, *arguments, platform="cuda", device_kind="NVIDIA H200")
        # Needs the package flatbuffers. vjp_order=1 includes gradients.
        file.write_bytes(exported.serialize(vjp_order=1))
        # In another process.
        jax.jit(jax.export.deserialize(file.read_bytes()).call)(*arguments)

    The batch dimension may be symbolic (jax.export.symbolic_shape) for platform "cpu", and for
    "cuda" with backend "xla", because kernels need constant shapes. S must be constant, because the
    chunks and the scans over them depend on it: make one export per length, or one for the longest,
    and pad shorter inputs and pass their sequence_lengths.

    Functions of arrays that are sharded over several devices can be exported with explicit mesh
    axes and shard_map, but not with automatic axes: their partitioning calls back into this
    process, so jax.export raises NotImplementedError.

    Args:
      function: the function to export; it is jitted here unless it already is.
      args, kwargs: its arguments, or jax.ShapeDtypeStructs of them.
      platform: "cpu", "cuda", or both, ("cpu", "cuda"); no GPU is needed to export for "cuda".
      device_kind: the GPU that tiles are chosen for and kernels are lowered for ("NVIDIA H200").
        None: this process's first GPU. On a GPU below compute capability 8.0 all is plain jnp.

    Raises:
      ValueError: for another platform, for a device_kind that is neither a known GPU nor a device
        of this process, without device_kind for "cuda" where there is no NVIDIA GPU, and for
        functions with checks that MLSTM_PALLAS_CHECKS=1 asks for.
    """
    if not callable(function):
        raise wrong("function", function, "a callable", TypeError)
    platforms: tuple[str, ...] = ()
    if isinstance(platform, Sequence | Set):
        platforms = (platform,) if isinstance(platform, str) else tuple(platform)
    if not platforms or not all(isinstance(x, str) and x in PLATFORMS for x in platforms):
        expected = f"one of {', '.join(PLATFORMS)}, or a sequence of them"
        raise wrong("platform", platform, expected)
    gpu: Gpu | None = target_gpu()
    if device_kind is not None:
        here = (gpu_of(x) for x in jax.devices() if x.device_kind == device_kind)
        gpu = next(here, known_gpu(device_kind))
    if gpu is None or ("cuda" in platforms and (gpu is UNKNOWN or not gpu.capability)):
        raise wrong(
            "device_kind",
            device_kind,
            "the name of a known NVIDIA GPU, such as 'NVIDIA H200' or 'NVIDIA A100-SXM4-80GB', or "
            "of this process's; for an unknown one, that of a known GPU of its compute capability",
        )
    jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
    dims = [dim for x in jax.tree.leaves((args, kwargs)) for dim in getattr(x, "shape", ())]
    with contextlib.ExitStack() as contexts:
        if device_kind is not None:
            device = AbstractDevice(device_kind, None, "gpu" if "cuda" in platforms else "cpu")
            mesh = AbstractMesh((), (), abstract_device=device)
            contexts.callback(export_gpu.reset, export_gpu.set(gpu))
            contexts.enter_context(jax.sharding.use_abstract_mesh(mesh))
        # Backend None also traces the kernels. Calls of constant shapes must not be traced for
        # "xla" alone: jit would use that trace for the same call on a GPU.
        if (
            set(platforms) == {"cpu"}
            and any(map(is_symbolic_dim, dims))
            and requested_backend() is None
        ):
            contexts.enter_context(use_backend("xla"))
        exported = jax_export(
            jitted,
            platforms=platforms,
            disabled_checks=[DisabledSafetyCheck.custom_call(CUSTOM_CALL_TARGET)],
        )
        try:
            return exported(*args, **kwargs)
        except NotImplementedError as error:  # of jax, about callbacks to the host
            if not checks_indices():
                raise
            raise ValueError(f"{CHECKS} is 1, expected 0: its checks cannot be exported") from error
