"""Stage step_gradients: the gradients of log i and f from the sums of the other stages."""

from typing import NamedTuple

from jax import Array

from mlstm_pallas import gate_gradients
from mlstm_pallas.gate_gradients import TileSums
from mlstm_pallas.stage import Launch


class Operands(NamedTuple):
    vecF: Array  # (B * NH, S) float32, like all floats here
    pairs: TileSums
    q_dot_dq_inter: Array  # (B * NH, S), of parallel_bw_dQKV
    k_dot_dk_inter: Array  # (B * NH, S)
    through: Array  # (B * NH, NC), what passes through each chunk
    flags: Array  # (B * NH, S) int32, of ``gate_gradients.step_flags``
    dm: Array | None  # (B * NH, S); None: m is a constant


def step_gradients(x: Operands, *, call: Launch) -> tuple[Array, Array, Array]:
    """Runs the stage: ``gate_gradients.step_gradients``."""
    return gate_gradients.step_gradients(*x)
