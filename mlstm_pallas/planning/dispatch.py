"""Where a stage runs: in plain jnp, or as a kernel of a lowering.

A stage has one name and one signature in every folder: ``stages/`` (plain jnp), ``triton/`` and
``mosaic_gpu/``, whose file of the stage has its kernel, if there is one. A folder is imported when
``call_spec.py``, which decides what runs where, first asks for one of its kernels.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

from mlstm_pallas.stages import HELPERS, STAGES
from mlstm_pallas.stages.kernel_tiles import Tiles
from mlstm_pallas.stages.launch import Launch
from mlstm_pallas.stages.lowering import Lowering

# jax will remove the Triton backend of Pallas. find_spec looks for it without importing it.
HAS_TRITON = importlib.util.find_spec("jax.experimental.pallas.triton") is not None

Launches = dict[str, Launch]  # by stage

_STAGES = STAGES | HELPERS
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


@functools.cache
def kernels() -> tuple[str, ...]:
    """The kernels as KernelConfig names them: folder and stage."""
    return tuple(
        f"{folder}_{name}"
        for folder in ("triton", "mosaic_gpu")
        for name in sorted(_STAGES)
        # Not importlib.util.find_spec, which imports the folder.
        if PathFinder.find_spec(_STAGES[name].file, [os.path.join(_PACKAGE, folder)])
    )


def _module(folder: str, name: str) -> Any:
    if folder == "stages":  # the plain form, which is where the contract is
        return sys.modules[_STAGES[name].operands.__module__]
    return importlib.import_module(f"mlstm_pallas.{folder}.{_STAGES[name].file}")


@functools.cache
def tiles_class(name: str, folder: str) -> type[Tiles] | None:
    """The tiles of a stage's kernel; None: the folder has none."""
    if f"{folder}_{name}" not in kernels():
        return None
    words = _STAGES[name].file.split("_")
    class_name = "".join(word[0].upper() + word[1:] for word in words) + "Tiles"
    return getattr(_module(folder, name), class_name)


def lowerings(preferred: Lowering) -> tuple[Lowering, ...]:
    """The lowering, then those that a kernel falls to."""
    if preferred is not Lowering.MOSAIC_GPU:
        return (preferred,)
    return (preferred, Lowering.TRITON, Lowering.XLA) if HAS_TRITON else (preferred, Lowering.XLA)


def stage(name: str, launches: Launches) -> Callable[..., Any]:
    """The function that runs a stage as its launch says: (operands, **options) -> its results."""
    call = launches[name]
    return functools.partial(getattr(_module(call.lowering.folder, name), name), call=call)
