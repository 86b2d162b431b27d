"""Stage vector_states: the recurrence of n over the chunks; with backward, of dn."""

from typing import NamedTuple

from jax import Array

from mlstm_pallas import gates
from mlstm_pallas.stage import Launch


class Operands(NamedTuple):
    added: Array  # (B * NH, NC, DHQK) float32, what each chunk adds
    scaGamma: Array  # (B * NH, NC) float32
    initial: Array  # (B * NH, DHQK) float32


def vector_states(x: Operands, *, backward: bool = False, call: Launch) -> tuple[Array, Array]:
    """Runs the stage: ``gates.vector_states``."""
    return gates.vector_states(*x, backward=backward)
