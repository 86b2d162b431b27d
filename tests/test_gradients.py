"""Outputs and every gradient against the recurrence and its derivatives in float64: algorithms,
layouts, tiles, lengths, gates, normalisers, cotangents."""

import functools

import call_checks
import jax
import jax.numpy as jnp
import pytest
from oracle import random_inputs

from mlstm_pallas import mlstm_chunkwise

BOUND = {dtype: of_gradients for dtype, (_, of_gradients) in call_checks.PROMISED.items()}


@pytest.mark.parametrize("call", [*call_checks.calls_of(call_checks.GRADIENTS)])
def test_gradients(call):
    call_checks.check_call(**call)


def test_interpreted_kernels_of_odd_lengths_lower_with_64_bit_indices():
    x = random_inputs(0, 1, 2, 61, 16, 16, states=False)
    options = dict(chunk_size=32) | call_checks.ALGORITHMS["materialised_stored"]
    run = functools.partial(mlstm_chunkwise, **options)
    with jax.enable_x64(True):
        jax.jit(jax.grad(lambda x: jnp.sum(run(**x)))).lower(x)
