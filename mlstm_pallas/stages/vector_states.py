"""The recurrence of n and dn over the chunks: a kernel on Mosaic GPU, else plain jnp."""

import jax

from mlstm_pallas import gates
from mlstm_pallas.stage import StageCall


def vector_states(
    added: jax.Array, gamma: jax.Array, initial: jax.Array, call: StageCall, *, backward: bool = False
) -> tuple[jax.Array, jax.Array]:
    """``gates.vector_states``; call: of the stage that computed what is added."""
    if not call.lowering.mosaic_gpu:
        return gates.vector_states(added, gamma, initial, backward=backward)
    from mlstm_pallas.stages.mosaic_gpu.vector_states import vector_states as on_mosaic_gpu

    return on_mosaic_gpu(added, gamma, initial, call, backward=backward)
