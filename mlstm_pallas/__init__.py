"""mlstm_pallas: the chunkwise-parallel mLSTM of xLSTM as JAX Pallas kernels."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from mlstm_pallas.api import mlstm_chunkwise, pack_lengths
from mlstm_pallas.backend import use_backend
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.preview import plan
from mlstm_pallas.recurrent import mlstm_recurrent_sequence, mlstm_recurrent_step
from mlstm_pallas.version import __version__

if TYPE_CHECKING:
    from mlstm_pallas import distributed, export, reference, xlstm_jax

__all__ = [
    "KernelConfig",
    "__version__",
    "distributed",
    "export",
    "mlstm_chunkwise",
    "mlstm_recurrent_sequence",
    "mlstm_recurrent_step",
    "pack_lengths",
    "plan",
    "reference",
    "use_backend",
    "xlstm_jax",
]

_MODULES = "distributed", "export", "reference", "xlstm_jax"  # imported at first use


if not TYPE_CHECKING:  # so that type checkers report unknown names

    def __getattr__(name: str) -> ModuleType:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
