"""Stage add_decayed: states plus what decays on its way to them, as from a later shard."""

from typing import NamedTuple

from jax import Array

from mlstm_pallas.stage import Launch


class Operands(NamedTuple):
    X: Array  # (B * NH, NC, DHQK, DHHV) in the kernel dtype
    added: Array  # (B * NH, DHQK, DHHV) float32
    decays: Array  # (B * NH, NC) float32


def add_decayed(x: Operands, *, call: Launch) -> Array:
    """X_c + decays_c added, in the dtype of X."""
    X, added, decays = x
    return (X.astype(added.dtype) + decays[..., None, None] * added[:, None]).astype(X.dtype)
