"""Functions that call mlstm_chunkwise, exported with jax.export."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.export import DisabledSafetyCheck, Exported
from jax.export import export as jax_export
from jax.sharding import AbstractDevice, AbstractMesh

from mlstm_pallas.triton.launch import CUSTOM_CALL_TARGET

PLATFORMS = ("cpu", "cuda")


def export(
    function: Callable[..., Any],
    *args: Any,
    platform: str,
    device_kind: str | None = None,
    **kwargs: Any,
) -> Exported:
    """``jax.export`` of ``function`` for one platform, with the one safety check disabled that the kernels need disabled.

    jax.export vouches for the custom calls that it knows: for that of Mosaic GPU, not for Triton's. An export for CUDA carries the
    Triton IR of the kernels (with backend "mosaic_gpu" the Mosaic GPU IR of some), which the XLA that loads it compiles: load it with the
    version of jax that made it. Loading needs no mlstm_pallas.

        exported = export(function, *arguments, platform="cuda", device_kind="NVIDIA H200")
        file.write_bytes(exported.serialize(vjp_order=1))                      # needs the package flatbuffers; vjp_order: gradients too
        jax.jit(jax.export.deserialize(file.read_bytes()).call)(*arguments)    # in another process

    Shards over several devices export from explicit mesh axes and from shard_map; not from automatic axes, whose partitioning calls back
    into this process (NotImplementedError of jax.export).

    Args:
      function: to be exported; jitted here unless it is already.
      args, kwargs: its arguments, or jax.ShapeDtypeStructs of them.
      platform: "cpu" or "cuda"; no GPU is needed to export for one.
      device_kind: the GPU for which tiles are chosen and kernels lowered ("NVIDIA H200"). None: this process's first device.

    Raises:
      ValueError: for another platform.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform is {platform!r}, expected one of {', '.join(PLATFORMS)}")
    jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
    context: contextlib.AbstractContextManager = contextlib.nullcontext()
    if device_kind is not None:
        device = AbstractDevice(device_kind, None, "gpu" if platform == "cuda" else platform)
        context = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    with context:
        return jax_export(
            jitted,
            platforms=[platform],
            disabled_checks=[DisabledSafetyCheck.custom_call(CUSTOM_CALL_TARGET)],
        )(*args, **kwargs)
