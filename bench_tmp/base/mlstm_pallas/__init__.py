"""mlstm_pallas: the chunkwise-parallel mLSTM of xLSTM as JAX Pallas kernels."""

from mlstm_pallas import distributed, export, reference, xlstm_jax
from mlstm_pallas.api import mlstm_chunkwise, pack_lengths
from mlstm_pallas.backend import use_backend
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.preview import plan
from mlstm_pallas.recurrent import mlstm_recurrent_sequence, mlstm_recurrent_step
from mlstm_pallas.version import __version__

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
