"""The contracts of the stages, one file each: equations, operands, outputs, plain jnp form.

stage.py says what a stage and a launch are. It imports formulas/ and below.
"""

import importlib

from mlstm_pallas.stages.stage import Stage


def _stages(**files: str) -> dict[str, Stage]:
    """The stages by name; files: of their kernels, "" where it is the name of the stage."""
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in files}
    return {name: Stage(modules[name].Operands, file or name) for name, file in files.items()}


STAGES = _stages(
    chunk_gates="",
    recurrent_fw_C="recurrence",
    parallel_fw_H="",
    parallel_fw_P="",
    recurrent_fw_H="",
    parallel_bw_dP="",
    recurrent_bw_dC="recurrence",
    parallel_bw_dQKV="",
    recurrent_step="",
    ring_step="",
)
# Small stages between the others.
HELPERS = _stages(
    split_products="recurrence",
    step_gradients="",
    step_sums="",
    vector_states="",
)
