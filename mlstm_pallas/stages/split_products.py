"""Stage split_products: what each split of a sequence adds to the state (``splits.py``)."""

import dataclasses
from typing import NamedTuple

from jax import Array

from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.operands.scaled_rows import ScaledRows


class Operands(NamedTuple):
    a: Array  # (B * NH, S, DHQK) or (B, S, NH, DHQK) in the kernel dtype
    b: Array  # (B * NH, S, DHV) or (B, S, NH, DHV)
    r: Array  # (B * NH, S) float32


def split_products(
    x: Operands,
    *,
    num_splits: int,
    backward: bool = False,
    all_splits: bool = False,
    call: Launch,
) -> Array:
    """sum_t r_t a_t b_t^T over each split, (B * NH, num_splits - 1, DHQK, DHV) in the dtype of r.

    No split reads the last split's product (with backward the first one's), so it is left out
    unless all_splits. The call's tiles are not read.
    """
    split_call = dataclasses.replace(call, problem=call.problem.in_splits(num_splits))
    scaled = split_call.chunks(ScaledRows(x.a, x.r).product())
    matX = call.product("npsk,npsv->npkv", scaled, split_call.chunks(x.b))
    return matX if all_splits else matX[:, 1:] if backward else matX[:, :-1]
