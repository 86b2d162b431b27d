"""The gates' gradients of every step, from the sums of parallel_bw_dP and parallel_bw_dQKV: a kernel on Mosaic GPU, else plain jnp."""

import jax

from mlstm_pallas import gate_gradients
from mlstm_pallas.gate_gradients import GateSteps, TilePairs
from mlstm_pallas.stage import StageCall


def step_gradients(
    vecF: jax.Array,
    pairs: TilePairs,
    vecQ_inter: jax.Array,
    vecK_inter: jax.Array,
    through: jax.Array,
    steps: GateSteps,
    dm: jax.Array | None,
    *,
    call: StageCall,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``gate_gradients.step_gradients``; call: of parallel_bw_dP, which made the pairs."""
    arguments = vecF, pairs, vecQ_inter, vecK_inter, through, steps, dm
    if not call.lowering.mosaic_gpu:
        return gate_gradients.step_gradients(*arguments)
    from mlstm_pallas.stages.mosaic_gpu.step_gradients import step_gradients as on_mosaic_gpu

    return on_mosaic_gpu(*arguments, call)
