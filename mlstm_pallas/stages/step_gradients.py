"""The gates' gradients of every step, from the sums of parallel_bw_dP and parallel_bw_dQKV: a kernel on Mosaic GPU, else plain jnp."""

from typing import Any

import jax

from mlstm_pallas import gate_gradients
from mlstm_pallas.stage import StageCall


def step_gradients(*arguments: Any, call: StageCall) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``gate_gradients.step_gradients``; call: of the stage that made the pairs."""
    if not call.lowering.mosaic_gpu:
        return gate_gradients.step_gradients(*arguments)
    from mlstm_pallas.stages.mosaic_gpu.step_gradients import step_gradients as on_mosaic_gpu

    return on_mosaic_gpu(*arguments, call=call)
