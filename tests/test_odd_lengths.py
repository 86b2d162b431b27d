"""Sequences that do not fill their last chunk: q, k, v, h and their gradients keep their length.

On a GPU: test_gpu.py.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from oracle import check_call, random_inputs, slow, tolerance
from test_gradients import ALGORITHMS

from mlstm_pallas import mlstm_chunkwise


@pytest.mark.parametrize(
    ("S", "algorithm", "chunk_size", "heads"),
    [
        (1, "tiles16x32", 32, (1, 17)),
        (61, "splits", 16, (32, 16)),
        *(
            slow(*x, (32, 16))
            for x in [
                (17, "materialised", 32),
                (48, "fused", 32),  # whole blocks of the scan, no whole chunk
                (127, "fused_two_launches", 32),
                (129, "splits_stored", 16),
                (2, "splits_stored", 16),
            ]
        ),
    ],
)
def test_outputs_and_gradients(S, algorithm, chunk_size, heads):
    """Interpreted, what a kernel reads beyond an array is NaN."""
    inputs, bound = random_inputs(S, 2, 3, S, *heads), 4 * tolerance("float32", S + 32)
    check_call(inputs, bound, bound, chunk_size=chunk_size, **ALGORITHMS[algorithm])


def test_interpreted_kernels_lower_with_64_bit_indices():
    x = random_inputs(0, 1, 2, 61, 16, 16, states=False)
    run = functools.partial(mlstm_chunkwise, chunk_size=32, **ALGORITHMS["materialised_stored"])
    with jax.enable_x64(True):
        jax.jit(jax.grad(lambda x: jnp.sum(run(**x)))).lower(x)
