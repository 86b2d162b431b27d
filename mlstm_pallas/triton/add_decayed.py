"""add_decayed in Triton. Grid (row blocks, NC, B * NH)."""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.tiles import block_at, blocks, each
from mlstm_pallas.stages.add_decayed import Operands
from mlstm_pallas.stages.stage import Launch, clamped
from mlstm_pallas.stages.stage import Tiles as BaseTiles
from mlstm_pallas.triton.launch import kernel_call, operands


def _add_decayed_kernel(
    X,  # (siz_b, DHV)
    added,  # (siz_b, DHV)
    decays,  # (NC,)
    out,  # the memory of X
    *,
    call,
):
    decay, siz_b = decays[pl.program_id(1)], clamped(64, X.shape[1])

    def add(index):
        at = slice(None), block_at(index, siz_b)
        out[at] = (X[at].astype(jnp.float32) + decay * added[at]).astype(out.dtype)

    pl.when(decay != 0)(lambda: each(blocks(X.shape[1], siz_b))(add))


def add_decayed(x: Operands, *, call: Launch) -> Array:
    """Runs the stage: ``stages/add_decayed.py``, in the memory of X.

    A chunk whose decay is 0 is neither read nor written.
    """
    BNH, NC, DHQK, _ = x.X.shape
    siz_b = clamped(64, DHQK)
    return kernel_call(
        _add_decayed_kernel,
        operands(x, X="bci0", added="bi0", decays="b0"),
        dict(out=(x.X, "bci0")),
        grid=(blocks(DHQK, siz_b), NC, BNH),
        sizes=dict(i=siz_b),
        call=call,
        aliases={0: 0},
    )["out"]


@dataclasses.dataclass(frozen=True)
class Tiles(BaseTiles):
    num_warps: int = 4
    num_stages: int = 3
