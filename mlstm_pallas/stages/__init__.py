"""The contracts of the stages, one file each: equations, operands, outputs, plain jnp form.

stage.py says what a stage and a launch are. It imports formulas/ and below.
"""

import importlib
from typing import Any

from mlstm_pallas.stages.stage import Stage


def _stages(**facts: dict[str, Any]) -> dict[str, Stage]:
    """The stages by name, with further fields of ``Stage``."""
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in facts}
    return {
        name: Stage(name, modules[name].Operands, **dict(file=name) | facts[name]) for name in facts
    }


STAGES = _stages(
    chunk_gates=dict(outputs="gates"),
    recurrent_fw_C=dict(file="recurrence"),
    parallel_fw_H={},
    parallel_fw_P=dict(outputs="scan", fused=True),
    recurrent_fw_H=dict(fused=True),
    parallel_bw_dP=dict(outputs="scores"),
    recurrent_bw_dC=dict(file="recurrence"),
    parallel_bw_dQKV={},
    recurrent_step=dict(decode=True),
    ring_step=dict(decode=True),
)
# Small stages between the others.
HELPERS = _stages(
    add_decayed={},
    split_products=dict(file="recurrence"),
    step_gradients={},
    step_sums={},
    vector_states={},
)
