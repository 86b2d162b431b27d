"""step_sums in Triton: sums of weighted rows over each chunk, such as kbar, from which n follows.

Grid (NC, B * NH). XLA is not used for it, because it may turn this sum into a product and transpose
the rows in memory.

Bytes: tokens K itemsize.
"""

import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas.tiles import pieces
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.stages.step_sums import Operands
from mlstm_pallas.triton.launch import entry_rows, floats, kernel_call, operands
from mlstm_pallas.triton.parallel_fw_P import ParallelFwPTiles as StepSumsTiles

__all__ = ["StepSumsTiles", "step_sums"]


def _step_sums_kernel(
    entries,  # of ``ChunkList``: () each; absent without a list
    rows,  # (L, DHQK), or (S, DHQK) with a list
    weights,  # (L,)
    sums,  # out (DHQK,)
    *,
    call,
):
    abar, siz_b = weights[...][:, None], call.tiles.siz_b_DHQK
    steps, rows = entry_rows(entries, call, rows)
    for columns in pieces(call.problem.DHQK, siz_b):
        sums[columns] = jnp.sum(rows[steps, columns].astype(jnp.float32) * abar, axis=0)


def step_sums(x: Operands, *, call: Launch) -> Array:
    """Runs the stage: ``stages/step_sums.py``."""
    p = call.problem
    return kernel_call(
        _step_sums_kernel,
        operands(x.chunks, entries="bc")
        | operands(x, rows="bt0" if x.chunks is None else "bs0", weights="bt"),
        dict(sums=(floats(p.BNH, p.NC, p.DHQK), "bc0")),
        call=call,
    )["sums"]
