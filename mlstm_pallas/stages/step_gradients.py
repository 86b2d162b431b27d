"""Stage step_gradients: the gradients of log i and f from the sums of the other stages."""

from typing import NamedTuple

import jax

from mlstm_pallas import gate_gradients
from mlstm_pallas.gate_gradients import TileSums
from mlstm_pallas.stage import Launch, Stage


class Operands(NamedTuple):
    vecF: jax.Array  # (B * NH, S) float32, as all floats here
    pairs: TileSums
    q_dot_dq_inter: jax.Array  # (B * NH, S), of parallel_bw_dQKV
    k_dot_dk_inter: jax.Array  # (B * NH, S)
    through: jax.Array  # (B * NH, NC), what passes through each chunk
    flags: jax.Array  # (B * NH, S) int32, of ``gate_gradients.step_flags``
    dm: jax.Array | None  # (B * NH, S); None: m is a constant


def step_gradients(x: Operands, *, call: Launch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the stage: ``gate_gradients.step_gradients``."""
    return gate_gradients.step_gradients(*x)


STAGE = Stage("step_gradients", Operands, helper=True)
