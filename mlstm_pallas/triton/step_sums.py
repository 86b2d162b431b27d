"""step_sums in Triton, of keys: sum_s kbar_s of each chunk, from which n_c follows.

Grid (NC, B * NH). XLA is not used for it, since it may turn this sum into a product and transpose
the keys in memory.

Bytes: R K itemsize.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.stage import Launch
from mlstm_pallas.stages.step_sums import Operands
from mlstm_pallas.triton.launch import kernel_call, sequence_spec
from mlstm_pallas.triton.parallel_fw_P import Tiles

__all__ = ["Tiles", "step_sums"]


def _key_sums_kernel(
    k_ref: Any,  # (L, DHQK)
    abar_ref: Any,  # (L,)
    sums_ref: Any,  # out (DHQK,)
    *,
    siz_b_DHQK: int,
) -> None:
    abar = abar_ref[...][:, None]
    for start in range(0, k_ref.shape[1], siz_b_DHQK):
        columns = pl.ds(start, siz_b_DHQK)
        sums_ref[columns] = jnp.sum(k_ref[:, columns].astype(jnp.float32) * abar, axis=0)


def step_sums(x: Operands, *, call: Launch) -> jax.Array:
    """Runs the stage: ``stages/step_sums.py``, for keys."""
    p = call.problem
    sums: jax.Array = kernel_call(
        _key_sums_kernel,
        name="key_sums",
        grid=call.tiles.grid(p),
        in_specs=[
            sequence_spec(x.rows, p, p.L, p.DHQK, lambda c, b: (b, c, 0)),
            pl.BlockSpec((None, p.L), lambda c, b: (b, c)),
        ],
        out_specs=[pl.BlockSpec((None, None, p.DHQK), lambda c, b: (b, c, 0))],
        out_shape=[jax.ShapeDtypeStruct((p.BNH, p.NC, p.DHQK), jnp.float32)],
        call=call,
        siz_b_DHQK=call.tiles.siz_b_DHQK,
    )(*x)[0]
    return sums
