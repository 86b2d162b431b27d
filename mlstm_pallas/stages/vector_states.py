"""Stage vector_states: the recurrence of n over the chunks; with backward, of dn."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.launches.launch import Launch


class Operands(NamedTuple):
    added: Array  # (B * NH, NC, DHQK) float32, what each chunk adds
    scaGamma: Array  # (B * NH, NC) float32
    initial: Array  # (B * NH, DHQK) float32


def vector_states(x: Operands, *, backward: bool = False, call: Launch) -> tuple[Array, Array]:
    """x_{next} = gamma_c x_c + added_c; the recurrence of C is in stages/recurrence.py.

    Returns:
      x before each chunk (after it with backward), (B * NH, NC, DHQK), and x after the last chunk
      (before the first); float32.
    """
    (added, gamma, initial), p = x, call.problem

    def join(left: Any, right: Any) -> tuple[Any, ...]:
        return left[0] * right[0], weighted(right[0], left[1], p) + right[1]

    def entering(first: Array, x: Array) -> Array:
        """x of the chunk before each (after it with backward); ``first`` at the first one."""
        return jnp.concatenate([x[:, 1:], first] if backward else [first, x[:, :-1]], axis=1)

    factors = entering(jnp.ones_like(gamma[:, :1]), gamma)[..., None]
    _, states = lax.associative_scan(
        join, (factors, entering(initial[:, None], added)), reverse=backward, axis=1
    )
    end = 0 if backward else -1
    return states, weighted(gamma[:, end, None], states[:, end], p) + added[:, end]
