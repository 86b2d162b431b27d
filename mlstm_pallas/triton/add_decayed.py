"""add_decayed in Triton. Grid (row blocks, NC, B * NH)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.stage import Launch
from mlstm_pallas.stage import Tiles as BaseTiles
from mlstm_pallas.stages.add_decayed import Operands
from mlstm_pallas.tiles import blocks, loop
from mlstm_pallas.triton.launch import kernel_call


def _add_decayed_kernel(
    X_ref: Any,  # (siz_b, DHHV)
    added_ref: Any,  # (siz_b, DHHV)
    decays_ref: Any,  # (NC,)
    out_ref: Any,  # the memory of X
    *,
    columns: int,
) -> None:
    decay = decays_ref[pl.program_id(1)]

    def add(block: jax.Array, carry: None) -> None:
        at = slice(None), pl.ds(block * columns, columns)
        out_ref[at] = (X_ref[at].astype(jnp.float32) + decay * added_ref[at]).astype(out_ref.dtype)

    @pl.when(decay != 0)
    def _() -> None:
        loop(blocks(X_ref.shape[1], columns), add, None)


def add_decayed(x: Operands, *, call: Launch) -> jax.Array:
    """Runs the stage: ``stages/add_decayed.py``, in the memory of X.

    A chunk whose decay is 0 is neither read nor written.
    """
    BNH, NC, DHQK, DHHV = x.X.shape
    siz_b = min(DHQK, 64)
    of_chunk = pl.BlockSpec((None, None, siz_b, DHHV), lambda row, c, n: (n, c, row, 0))
    sum_: jax.Array = kernel_call(
        _add_decayed_kernel,
        name="add_decayed",
        grid=(blocks(DHQK, siz_b), NC, BNH),
        in_specs=[
            of_chunk,
            pl.BlockSpec((None, siz_b, DHHV), lambda row, c, n: (n, row, 0)),
            pl.BlockSpec((None, NC), lambda row, c, n: (n, 0)),
        ],
        out_specs=[of_chunk],
        out_shape=[jax.ShapeDtypeStruct(x.X.shape, x.X.dtype)],
        call=call,
        input_output_aliases={0: 0},
        columns=min(DHHV, 64),
    )(*x)[0]
    return sum_


@dataclasses.dataclass(frozen=True)
class Tiles(BaseTiles):
    num_warps: int = 4
    num_stages: int = 3
