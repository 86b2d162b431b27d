"""Stage step_sums: weighted sums over the steps of each chunk, from which n and dn follow."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas.rows import as_factors
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.operands.chunk_list import ChunkList


class Operands(NamedTuple):
    rows: Array  # (B * NH, S, D) or (B, S, NH, D)
    weights: Array  # (B * NH, S) float32
    chunks: ChunkList | None = None  # the rows' chunks; the weights are in the list's


def step_sums(x: Operands, *, call: Launch) -> Array:
    """sum_t weights_t rows_t over each chunk, (B * NH, NC, D), products and sums in float32."""
    (rows, weights, chunks), p = x, call.problem
    if chunks is not None:
        rows = chunks.gather(rows, p.L).reshape(*weights.shape, rows.shape[-1])
    rows = rows.astype(weights.dtype) * as_factors(weights, rows)
    return jnp.sum(call.chunks(rows), axis=-2)
