"""mlstm_pallas: the chunkwise-parallel mLSTM of xLSTM as JAX Pallas kernels."""

from mlstm_pallas import distributed, export, reference, xlstm_jax
from mlstm_pallas.api import mlstm_chunkwise, mlstm_chunkwise_states
from mlstm_pallas.planning.backend import use_backend
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.planning.preview import plan
from mlstm_pallas.problem.gpu import Gpu
from mlstm_pallas.problem.version import __version__
from mlstm_pallas.recurrent import mlstm_recurrent_step
from mlstm_pallas.ring import mlstm_ring_flush, mlstm_ring_states, mlstm_ring_step
from mlstm_pallas.stages.ring_step import RingStates

__all__ = [
    "Gpu",
    "KernelConfig",
    "RingStates",
    "__version__",
    "distributed",
    "export",
    "mlstm_chunkwise",
    "mlstm_chunkwise_states",
    "mlstm_recurrent_step",
    "mlstm_ring_flush",
    "mlstm_ring_states",
    "mlstm_ring_step",
    "plan",
    "reference",
    "use_backend",
    "xlstm_jax",
]


def __dir__() -> list[str]:
    """The public names, without the modules that their import loads."""
    return __all__
