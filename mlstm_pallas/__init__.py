"""mlstm_pallas: the chunkwise-parallel mLSTM of xLSTM as JAX Pallas kernels."""

from mlstm_pallas.api import mlstm_chunkwise
from mlstm_pallas.backend import use_backend
from mlstm_pallas.config import KernelConfig, StageConfig
from mlstm_pallas.recurrent import mlstm_recurrent_sequence, mlstm_recurrent_step

__all__ = [
    "KernelConfig",
    "StageConfig",
    "mlstm_chunkwise",
    "mlstm_recurrent_sequence",
    "mlstm_recurrent_step",
    "use_backend",
]
__version__ = "0.1.0"
