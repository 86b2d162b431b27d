"""Functions that call mlstm_chunkwise, exported with jax.export."""

import contextlib
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
from jax.export import DisabledSafetyCheck, Exported
from jax.export import export as jax_export
from jax.sharding import AbstractDevice, AbstractMesh

from mlstm_pallas.devices import compute_capability
from mlstm_pallas.triton.launch import CUSTOM_CALL_TARGET
from mlstm_pallas.validation import shown

PLATFORMS = ("cpu", "cuda")


def export(
    function: Callable[..., Any],
    *args: Any,
    platform: str | Sequence[str],
    device_kind: str | None = None,
    **kwargs: Any,
) -> Exported:
    """``jax.export`` of ``function`` without the safety check of Triton kernels.

    jax.export accepts the custom calls of Mosaic GPU, and those of Triton only where that check is
    disabled. An export for CUDA holds the Triton IR of the kernels (with backend "mosaic_gpu" the
    Mosaic GPU IR of some), which is compiled where it is loaded. Load it with the version of jax
    that made it; mlstm_pallas is not needed there.

        exported = export(function, *arguments, platform="cuda", device_kind="NVIDIA H200")
        # Needs the package flatbuffers. vjp_order=1 includes gradients.
        file.write_bytes(exported.serialize(vjp_order=1))
        # In another process.
        jax.jit(jax.export.deserialize(file.read_bytes()).call)(*arguments)

    The batch dimension may be symbolic (jax.export.symbolic_shape) with backend "xla". Kernels need
    constant shapes, and every call a constant S.

    Functions of arrays sharded over several devices export with explicit mesh axes and shard_map,
    but not with automatic axes: their partitioning calls back into this process, and jax.export
    raises NotImplementedError.

    Args:
      function: to be exported; jitted here unless it is already.
      args, kwargs: its arguments, or jax.ShapeDtypeStructs of them.
      platform: "cpu", "cuda", or both, ("cpu", "cuda"); no GPU is needed to export for "cuda".
      device_kind: the GPU for which tiles are chosen and kernels lowered ("NVIDIA H200"). None:
        this process's first device.

    Raises:
      ValueError: for another platform, and for a device_kind that is neither a GPU of
        mlstm_pallas.devices nor a device of this process.
    """
    if not callable(function):
        raise TypeError(f"function is {shown(function)}, expected a callable")
    platforms: tuple[str, ...] = ()
    if isinstance(platform, Sequence | Set):
        platforms = (platform,) if isinstance(platform, str) else tuple(platform)
    if not platforms or not all(isinstance(x, str) and x in PLATFORMS for x in platforms):
        raise ValueError(
            f"platform is {shown(platform)}, expected one of {', '.join(PLATFORMS)}, or a sequence "
            "of them"
        )
    _check_device_kind(device_kind)
    jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if device_kind is not None:
        device = AbstractDevice(device_kind, None, "gpu" if "cuda" in platforms else "cpu")
        context = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    with context:
        return jax_export(
            jitted,
            platforms=platforms,
            disabled_checks=[DisabledSafetyCheck.custom_call(CUSTOM_CALL_TARGET)],
        )(*args, **kwargs)


def _check_device_kind(x: Any) -> None:
    kinds = [device.device_kind for device in jax.devices()]
    known = isinstance(x, str) and (compute_capability(x) is not None or x in kinds)
    if x is not None and not known:
        raise ValueError(
            f"device_kind is {shown(x)}, expected None or the device_kind of an NVIDIA GPU from "
            "compute capability 8.0, such as 'NVIDIA H200' or 'NVIDIA A100-SXM4-80GB'"
        )
