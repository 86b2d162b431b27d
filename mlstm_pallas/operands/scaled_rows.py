"""Operands whose rows are scaled."""

from typing import NamedTuple

from jax import Array

from mlstm_pallas.formulas.rows import as_factors


class ScaledRows(NamedTuple):
    """An operand whose rows (steps) are scaled, in the kernel or before it."""

    array: Array  # (B * NH, S, D) or (B, S, NH, D)
    weights: Array | None  # (B * NH, S) float32; None: the array is already scaled

    def product(self) -> Array:
        """The scaled array, in its dtype."""
        if self.weights is None:
            return self.array
        weights = as_factors(self.weights, self.array)
        return (self.array.astype(weights.dtype) * weights).astype(self.array.dtype)

    def times(self, factors: Array) -> Array:
        """The weights of ``array`` for the scaled array times the factors (B * NH, S)."""
        return factors if self.weights is None else factors * self.weights
