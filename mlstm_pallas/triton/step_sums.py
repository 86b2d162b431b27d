"""step_sums in Triton, for keys: sum_s kbar_s of each chunk, from which n_c follows.

Grid (NC, B * NH). XLA is not used for it, because it may turn this sum into a product and transpose
the keys in memory.

Bytes: tokens K itemsize.
"""

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from mlstm_pallas.stage import Launch
from mlstm_pallas.stages.step_sums import Operands
from mlstm_pallas.triton.launch import floats, kernel_call, rows_of_entry
from mlstm_pallas.triton.parallel_fw_P import Tiles

__all__ = ["Tiles", "step_sums"]


def _key_sums_kernel(
    entry_gmem,  # of ``ChunkList``: () each; absent without a list
    k_gmem,  # (L, DHQK), or (S, DHQK) with a list
    abar_gmem,  # (L,)
    sums_gmem,  # out (DHQK,)
    *,
    call,
):
    abar, siz_b = abar_gmem[...][:, None], call.tiles.siz_b_DHQK
    rows, k_gmem = rows_of_entry(entry_gmem, call, k_gmem)
    for start in range(0, call.problem.DHQK, siz_b):
        columns = pl.ds(start, siz_b)
        sums_gmem[columns] = jnp.sum(k_gmem[rows, columns].astype(jnp.float32) * abar, axis=0)


def step_sums(x: Operands, *, call: Launch) -> Array:
    """Runs the stage: ``stages/step_sums.py``, for keys."""
    p = call.problem
    return kernel_call(
        _key_sums_kernel,
        dict(
            entry=(None if x.chunks is None else x.chunks.entries, "bc"),
            k=(x.rows, "bt0" if x.chunks is None else "bs0"),
            abar=(x.weights, "bt"),
        ),
        dict(sums=(floats(p.BNH, p.NC, p.DHQK), "bc0")),
        call=call,
    )["sums"]
