"""Stage add_decayed: states plus what decays on its way to them, as from a later shard."""

from typing import NamedTuple

import jax

from mlstm_pallas.stage import Launch, Stage


class Operands(NamedTuple):
    X: jax.Array  # (B * NH, NC, DHQK, DHHV) in the kernel dtype
    added: jax.Array  # (B * NH, DHQK, DHHV) float32
    decays: jax.Array  # (B * NH, NC) float32


def add_decayed(x: Operands, *, call: Launch) -> jax.Array:
    """X_c + decays_c added, in the dtype of X."""
    X, added, decays = x
    return (X.astype(added.dtype) + decays[..., None, None] * added[:, None]).astype(X.dtype)


STAGE = Stage("add_decayed", Operands, helper=True)
