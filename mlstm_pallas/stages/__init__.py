"""The contracts of the stages, one file each: equations, operands, outputs, plain jnp form.

By its name a stage has its contract, its function in every lowering, the fields of KernelConfig for
its kernels, the flag of the benchmark, its test ids and its rows in a profile.

It imports vectors/ and below.
"""

from types import ModuleType

from mlstm_pallas.stages import (
    chunk_gradients,
    parallel_bw_dP,
    parallel_bw_dQKV,
    parallel_fw_H,
    parallel_fw_P,
    recurrent_bw_dC,
    recurrent_fw_C,
    recurrent_fw_H,
    recurrent_step,
    ring_step,
    split_products,
    step_sums,
    vector_states,
)
from mlstm_pallas.vectors import chunk_gates, step_gradients


def _by_name(*contracts: ModuleType) -> dict[str, ModuleType]:
    return {contract.__name__.rpartition(".")[2]: contract for contract in contracts}


# The contracts by the name of the stage: ``Operands`` and the function in plain jnp.
STAGES = _by_name(
    chunk_gates,
    recurrent_fw_C,
    parallel_fw_H,
    parallel_fw_P,
    recurrent_fw_H,
    parallel_bw_dP,
    recurrent_bw_dC,
    parallel_bw_dQKV,
    chunk_gradients,
    recurrent_step,
    ring_step,
)
# Small stages between the others.
HELPERS = _by_name(split_products, step_gradients, step_sums, vector_states)
