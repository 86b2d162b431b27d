"""Stage vector_states: the recurrence of n over the chunks, and with backward that of dn."""

from typing import NamedTuple

import jax

from mlstm_pallas import gates
from mlstm_pallas.stage import Launch, Stage


class Operands(NamedTuple):
    added: jax.Array  # (B * NH, NC, DHQK) float32, what each chunk adds
    scaGamma: jax.Array  # (B * NH, NC) float32
    initial: jax.Array  # (B * NH, DHQK) float32


def vector_states(
    x: Operands, *, backward: bool = False, call: Launch
) -> tuple[jax.Array, jax.Array]:
    """Runs the stage: ``gates.vector_states``."""
    return gates.vector_states(*x, backward=backward)


STAGE = Stage("vector_states", Operands, helper=True)
