"""The one table of the kernels: which functions a lowering has one for, and where it is.

A function has one name and one signature in every folder: ``stages/`` (plain jnp), ``triton/`` and
``mosaic_gpu/``. A folder is imported when a call runs there; ``planning.py`` decides where that is.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from mlstm_pallas import gate_gradients, gates
from mlstm_pallas.stage import Launch, Lowering, Tiles
from mlstm_pallas.stages import STAGES, recurrence

# By folder and function, the module of the kernel and the class of its tiles.
_KERNELS: dict[str, dict[str, tuple[str, str]]] = {
    "triton": {
        **{name: (name, "Tiles") for name in STAGES},
        "split_products": ("recurrence", "Tiles"),
        "add_decayed": ("recurrence", "AddDecayedTiles"),
        "step_sums": ("parallel_fw_P", "Tiles"),
    },
    "mosaic_gpu": {
        **{name: (name, "Tiles") for name, stage in STAGES.items() if not stage.decode},
        "split_products": ("recurrence", "Tiles"),
        "step_sums": ("step_sums", "Tiles"),
        "vector_states": ("vector_states", "Tiles"),
        "step_gradients": ("step_gradients", "Tiles"),
    },
}


def _without_call(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs, call, **options: function(*inputs, **options)


# The plain forms of what is no stage.
_PLAIN: dict[str, Callable[..., Any]] = {
    "split_products": recurrence.split_products,
    "add_decayed": recurrence.add_decayed,
    "step_sums": recurrence.step_sums,
    "vector_states": _without_call(gates.vector_states),
    "step_gradients": _without_call(gate_gradients.step_gradients),
}


def kernels() -> tuple[str, ...]:
    """The kernels as KernelConfig names them: folder and function."""
    return tuple(f"{folder}_{name}" for folder, names in _KERNELS.items() for name in names)


def _module(folder: str, name: str) -> Any:
    return importlib.import_module(f"mlstm_pallas.{folder}.{name}")


@functools.cache
def tiles_class(name: str, folder: str) -> type[Tiles] | None:
    """The tiles of a function's kernel; None: the folder has none."""
    if name not in _KERNELS.get(folder, ()):
        return None
    module, attribute = _KERNELS[folder][name]
    result: type[Tiles] = getattr(_module(folder, module), attribute)
    return result


def run(name: str, *inputs: Any, call: Launch, **options: Any) -> Any:
    """Runs a function as its launch says."""
    if call.lowering is not Lowering.XLA:
        module = _KERNELS[call.lowering.folder][name][0]
        function = getattr(_module(call.lowering.folder, module), name)
    else:
        function = _PLAIN.get(name) or getattr(_module("stages", name), name)
    return function(*inputs, call=call, **options)
