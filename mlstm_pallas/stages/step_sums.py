"""Stage step_sums: weighted sums over the steps of each chunk, from which n and dn follow."""

from typing import NamedTuple

from jax import Array

from mlstm_pallas.stage import Launch, Stage, steps_like
from mlstm_pallas.stages.recurrence import chunk_sums


class Operands(NamedTuple):
    rows: Array  # (B * NH, S, D) or (B, S, NH, D)
    weights: Array  # (B * NH, S) float32


def step_sums(x: Operands, *, call: Launch) -> Array:
    """sum_t weights_t rows_t over each chunk, (B * NH, NC, D), products and sums in float32."""
    rows, weights = x
    return chunk_sums(rows.astype(weights.dtype) * steps_like(weights, rows), call)


STAGE = Stage("step_sums", Operands, helper=True)
