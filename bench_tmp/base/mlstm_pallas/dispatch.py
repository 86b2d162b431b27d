"""Where a stage runs: in plain jnp, or as a kernel of a lowering.

A stage has one name and one signature in every folder: ``stages/`` (plain jnp), ``triton/`` and
``mosaic_gpu/``, whose file of the stage's name has its kernel, if there is one. A folder is
imported when ``planning.py``, which decides what runs where, first asks for one of its kernels.
"""

import functools
import importlib.util
import os
import pkgutil
from typing import Any

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
