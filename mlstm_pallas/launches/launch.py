"""How a stage runs in a call."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas.rows import with_steps
from mlstm_pallas.formulas.tiles import Precision
from mlstm_pallas.launches.lowering import Lowering
from mlstm_pallas.problem.arrays import heads_as_rows, rows_as_heads
from mlstm_pallas.problem.dimensions import Problem, accumulator_dtype


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a stage runs in a call.

    Attributes:
      problem: in the chunks of the stage.
      tiles: of its kernel, a subclass of ``Tiles``; None in plain jnp.
      precision: of float32 products in the kernels; plain jnp multiplies in full float32.
      lowering: the kernel or plain jnp.
    """

    problem: Problem
    tiles: Any
    precision: Precision
    lowering: Lowering

    @property
    def interpret(self) -> bool:
        return self.lowering.interpret

    def processing_order(self, arrays: Any) -> Any:
        """Arrays (B * NH, ...) of steps, tiles or chunks in the order of time, or back."""
        if self.problem.reverse:
            arrays = jax.tree.map(jax.vmap(jnp.flip), arrays)
        return arrays

    def chunks(self, x: Array) -> Array:
        """(B * NH, S, ...), or (B, S, NH, D), to (B * NH, NC, L, ...); zeros in steps beyond x."""
        p = self.problem
        x = heads_as_rows(with_steps(x, p.S))
        return x.reshape(p.BNH, p.NC, p.L, *x.shape[2:])

    def product(self, subscripts: str, *operands: Array) -> Array:
        """jnp.einsum in the launch's precision, summed in at least float32."""
        acc = accumulator_dtype(operands[0].dtype)
        return jnp.einsum(
            subscripts, *operands, precision=self.precision, preferred_element_type=acc
        )

    def unchunked(self, x: Array, like: Array) -> Array:
        """The inverse of ``chunks``: (B * NH, NC, L, D) to the layout and the steps of ``like``."""
        x = rows_as_heads(x.reshape(x.shape[0], self.problem.S, x.shape[-1]), like)
        return with_steps(x, like.shape[1])
