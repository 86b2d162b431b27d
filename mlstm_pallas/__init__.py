"""mlstm_pallas: the chunkwise-parallel mLSTM of xLSTM as JAX Pallas kernels."""

import importlib
from typing import Any

from mlstm_pallas.api import mlstm_chunkwise
from mlstm_pallas.backend import use_backend
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.recurrent import mlstm_recurrent_sequence, mlstm_recurrent_step
from mlstm_pallas.stage import StageConfig
from mlstm_pallas.version import __version__

__all__ = [
    "KernelConfig",
    "StageConfig",
    "__version__",
    "mlstm_chunkwise",
    "mlstm_recurrent_sequence",
    "mlstm_recurrent_step",
    "use_backend",
]

_MODULES = ("distributed", "export", "reference", "xlstm_jax")  # imported when they are first asked for


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
