"""Stage step_sums: weighted sums over the steps of each chunk, from which n and dn follow."""

from typing import NamedTuple

from jax import Array

from mlstm_pallas.chunk_list import ChunkList
from mlstm_pallas.stage import Launch, steps_like
from mlstm_pallas.stages.recurrence import chunk_sums


class Operands(NamedTuple):
    rows: Array  # (B * NH, S, D) or (B, S, NH, D)
    weights: Array  # (B * NH, S) float32
    chunks: ChunkList | None = None  # the rows' chunks; the weights are in the list's


def step_sums(x: Operands, *, call: Launch) -> Array:
    """sum_t weights_t rows_t over each chunk, (B * NH, NC, D), products and sums in float32."""
    rows, weights, chunks = x
    if chunks is not None:
        rows = chunks.gather(rows, call.problem.L).reshape(*weights.shape, -1)
    return chunk_sums(rows.astype(weights.dtype) * steps_like(weights, rows), call)
