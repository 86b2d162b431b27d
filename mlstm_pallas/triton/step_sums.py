"""step_sums in Triton, for keys: sum_s kbar_s of each chunk, from which n_c follows.

Grid (NC, B * NH). XLA is not used for it, because it may turn this sum into a product and transpose
the keys in memory.

Bytes: R K itemsize.
"""

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from mlstm_pallas.stage import Launch
from mlstm_pallas.stages.step_sums import Operands
from mlstm_pallas.triton.launch import floats, kernel_call, sequence_spec, spec
from mlstm_pallas.triton.parallel_fw_P import Tiles

__all__ = ["Tiles", "step_sums"]


def _key_sums_kernel(
    k_gmem,  # (L, DHQK)
    abar_gmem,  # (L,)
    sums_gmem,  # out (DHQK,)
    *,
    call,
):
    abar, siz_b = abar_gmem[...][:, None], call.tiles.siz_b_DHQK
    for start in range(0, k_gmem.shape[1], siz_b):
        columns = pl.ds(start, siz_b)
        sums_gmem[columns] = jnp.sum(k_gmem[:, columns].astype(jnp.float32) * abar, axis=0)


def step_sums(x: Operands, *, call: Launch) -> Array:
    """Runs the stage: ``stages/step_sums.py``, for keys."""
    p = call.problem
    k = sequence_spec(p.L, p.DHQK, at="bc0")
    sums = spec(None, p.DHQK, at="bc0")
    y: Array = kernel_call(
        _key_sums_kernel,
        dict(k=(x.rows, k), abar=(x.weights, spec(p.L, at="bc"))),
        dict(sums=(floats(p.BNH, p.NC, p.DHQK), sums)),
        call=call,
    )["sums"]
    return y
