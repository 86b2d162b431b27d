"""Functions that call mlstm_chunkwise, exported with jax.export."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.export import DisabledSafetyCheck, Exported
from jax.export import export as jax_export
from jax.sharding import AbstractDevice, AbstractMesh

from mlstm_pallas.problem.gpu import UNKNOWN, export_gpu, gpu_of, known_gpu, target_gpu
from mlstm_pallas.problem.validation import CHECKS_VARIABLE, checks_indices, wrong

__all__ = ["export"]

PLATFORMS = ("cpu", "cuda")
# The call target of Triton kernels; importing jax's constant for it would import that backend.
CUSTOM_CALL_TARGET = "__gpu$xla.gpu.triton"


def export(
    function: Callable[..., Any],
    *args: Any,
    platform: str,
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
      platform: "cpu" or "cuda"; no GPU is needed to export for "cuda". Two platforms are two
        exports.
      device_kind: the GPU that tiles are chosen for and kernels are lowered for ("NVIDIA H200").
        None: this process's first GPU. On a GPU below compute capability 8.0 all is plain jnp.

    Raises:
      ValueError: for another platform, for a device_kind that is neither a known GPU nor a device
        of this process, without device_kind for "cuda" where there is no NVIDIA GPU, and for
        functions with checks that MLSTM_PALLAS_CHECKS=1 asks for.
    """
    if not callable(function):
        raise wrong("function", function, "a callable", TypeError)
    if not isinstance(platform, str) or platform not in PLATFORMS:
        raise wrong("platform", platform, f"one of {', '.join(PLATFORMS)}; two are two exports")
    here = target_gpu()
    of_process = (gpu_of(x) for x in jax.devices() if x.device_kind == device_kind)
    gpu = here if device_kind is None else next(of_process, known_gpu(device_kind))
    if gpu is None or (platform == "cuda" and (gpu is UNKNOWN or not gpu.capability)):
        raise wrong(
            "device_kind",
            device_kind,
            "the name of a known NVIDIA GPU, such as 'NVIDIA H200' or 'NVIDIA A100-SXM4-80GB', or "
            "of this process's; for an unknown one, that of a known GPU of its compute capability",
        )
    gpu = gpu if platform == "cuda" else UNKNOWN
    jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
    exported = jax_export(
        jitted,
        platforms=(platform,),
        disabled_checks=[DisabledSafetyCheck.custom_call(CUSTOM_CALL_TARGET)],
    )
    with contextlib.ExitStack() as contexts:
        if gpu != here:  # jit keeps traces for other devices apart by the device of the mesh
            device = AbstractDevice(gpu.name, None, "gpu" if platform == "cuda" else "cpu")
            mesh = AbstractMesh((), (), abstract_device=device)
            contexts.callback(export_gpu.reset, export_gpu.set(gpu))
            contexts.enter_context(jax.sharding.use_abstract_mesh(mesh))
        try:
            return exported(*args, **kwargs)
        except NotImplementedError as error:  # of jax, about callbacks to the host
            if not checks_indices():
                raise
            raise ValueError(
                f"{CHECKS_VARIABLE} is 1, expected 0: its checks cannot be exported"
            ) from error
