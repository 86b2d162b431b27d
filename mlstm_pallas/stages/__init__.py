"""The contracts of the stages, one file each: equations, operands, outputs, plain jnp form.

stage.py says what a stage is, lowering.py, launch.py and kernel_tiles.py how it runs,
plain_forms.py how heads and rows run in plain jnp. It imports formulas/ and below.
"""

import importlib

from mlstm_pallas.stages.stage import Stage


def _stages(**files: str) -> dict[str, Stage]:
    """The stages by name; files: of their kernels, "" where it is the name of the stage."""
    stages = {}
    for name, file in files.items():
        folder = "vectors" if file == "vectors" else "stages"
        module = importlib.import_module(f"mlstm_pallas.{folder}.{name}")
        stages[name] = Stage(module.Operands, file or name)
    return stages


STAGES = _stages(
    chunk_gates="vectors",
    recurrent_fw_C="recurrence",
    parallel_fw_H="",
    parallel_fw_P="",
    recurrent_fw_H="",
    parallel_bw_dP="",
    recurrent_bw_dC="recurrence",
    parallel_bw_dQKV="",
    chunk_gradients="",
    recurrent_step="",
    ring_step="",
)
# Small stages between the others.
HELPERS = _stages(
    split_products="recurrence",
    step_gradients="vectors",
    step_sums="",
    vector_states="",
)
