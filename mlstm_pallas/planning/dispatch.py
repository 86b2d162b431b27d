"""Where a stage runs: in plain jnp, or as a kernel of a lowering.

A stage has one name, one record of operands and the same keywords in ``stages/`` (plain jnp),
``triton/`` and ``mosaic_gpu/``, except that parallel_fw_H of Mosaic GPU has no output_dtype. A
lowering's folder is imported when ``call_spec.py``, which decides what runs where, first asks for
one of its kernels.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from mlstm_pallas.launches.kernel_tiles import Tiles
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.launches.lowering import Lowering
from mlstm_pallas.stages import HELPERS, STAGES

# jax will remove the Triton backend of Pallas. find_spec looks for it without importing it.
HAS_TRITON = importlib.util.find_spec("jax.experimental.pallas.triton") is not None

Launches = dict[str, Launch]  # by stage

# The kernels: by folder and stage the file and the class of its tiles.
KERNELS = {
    "triton": {
        "chunk_gates": ("vectors", "VectorsTiles"),
        "recurrent_fw_C": ("recurrence", "RecurrenceTiles"),
        "parallel_fw_H": ("parallel_fw_H", "ParallelFwHTiles"),
        "parallel_fw_P": ("parallel_fw_P", "ParallelFwPTiles"),
        "recurrent_fw_H": ("recurrent_fw_H", "RecurrentFwHTiles"),
        "parallel_bw_dP": ("parallel_bw_dP", "ParallelBwDPTiles"),
        "recurrent_bw_dC": ("recurrence", "RecurrenceTiles"),
        "parallel_bw_dQKV": ("parallel_bw_dQKV", "ParallelBwDQKVTiles"),
        "recurrent_step": ("recurrent_step", "RecurrentStepTiles"),
        "ring_step": ("ring_step", "RingStepTiles"),
        "split_products": ("recurrence", "RecurrenceTiles"),
        "step_gradients": ("vectors", "VectorsTiles"),
        "step_sums": ("step_sums", "StepSumsTiles"),
    },
    "mosaic_gpu": {
        "chunk_gates": ("vectors", "VectorsTiles"),
        "recurrent_fw_C": ("recurrence", "RecurrenceTiles"),
        "parallel_fw_H": ("parallel_fw_H", "ParallelFwHTiles"),
        "parallel_fw_P": ("parallel_fw_P", "ParallelFwPTiles"),
        "recurrent_fw_H": ("recurrent_fw_H", "RecurrentFwHTiles"),
        "parallel_bw_dP": ("parallel_bw_dP", "ParallelBwDPTiles"),
        "recurrent_bw_dC": ("recurrence", "RecurrenceTiles"),
        "parallel_bw_dQKV": ("parallel_bw_dQKV", "ParallelBwDQKVTiles"),
        "chunk_gradients": ("chunk_gradients", "ChunkGradientsTiles"),
        "split_products": ("recurrence", "RecurrenceTiles"),
        "step_gradients": ("vectors", "VectorsTiles"),
        "step_sums": ("step_sums", "StepSumsTiles"),
        "vector_states": ("vector_states", "VectorStatesTiles"),
    },
}


def kernels() -> tuple[str, ...]:
    """The kernels as KernelConfig names them: folder and stage."""
    return tuple(f"{folder}_{name}" for folder in KERNELS for name in sorted(KERNELS[folder]))


def _module(folder: str, name: str) -> Any:
    if folder == "stages":  # the plain form, which is where the contract is
        return (STAGES | HELPERS)[name]
    return importlib.import_module(f"mlstm_pallas.{folder}.{KERNELS[folder][name][0]}")


def tiles_class(name: str, folder: str) -> type[Tiles] | None:
    """The tiles of a stage's kernel; None: the folder has none."""
    kernel = KERNELS.get(folder, {}).get(name)
    return getattr(_module(folder, name), kernel[1]) if kernel else None


def lowerings(preferred: Lowering) -> tuple[Lowering, ...]:
    """The lowering, then those that a kernel falls to."""
    if preferred is not Lowering.MOSAIC_GPU:
        return (preferred,)
    return (preferred, Lowering.TRITON, Lowering.XLA) if HAS_TRITON else (preferred, Lowering.XLA)


def stage(name: str, launches: Launches) -> Callable[..., Any]:
    """The function that runs a stage as its launch says: (operands, **options) -> its results."""
    call = launches[name]
    return functools.partial(getattr(_module(call.lowering.folder, name), name), call=call)
