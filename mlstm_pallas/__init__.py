"""mlstm_pallas: the chunkwise-parallel mLSTM of xLSTM as JAX Pallas kernels."""

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
