"""segment_ids and segment_lengths of any integers. The table has values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_evaluator import in_numpy
from oracle import assert_same_bits, random_inputs

from mlstm_pallas import mlstm_chunkwise


def test_ids_are_compared_in_64_bits_under_x64():
    """Those of JAX; test_errors.py has NumPy's, which are refused beyond 32 bits."""
    x = random_inputs(3, 1, 1, 8, 8, 8, states=False)

    @in_numpy
    def run(x, ids):
        return mlstm_chunkwise(**x, segment_ids=ids, backend="xla")

    ids = np.repeat([[7, 7 + 2**32]], 4, axis=1)
    with jax.enable_x64(True):
        assert_same_bits(run(x, jnp.asarray(ids)), run(x, jnp.asarray(ids // 2**32)))


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64"])
def test_segment_lengths_that_nobody_has_checked_are_cut_at_the_row(dtype):
    """Their sums overflow no integer."""
    x, most = random_inputs(3, 1, 1, 8, 8, 8, states=False), np.iinfo(dtype).max
    options = dict(return_last_states=True, chunk_size=16, backend="xla")

    @in_numpy
    def run(x, lengths):
        return mlstm_chunkwise(**x, segment_lengths=lengths, **options)

    with jax.enable_x64(dtype == "int64"):
        for lengths, meant in ([3, most, most, 1], [3, 5, 0, 0]), ([most, 0, 9, 9], [8, 0, 0, 0]):
            rows = jnp.array([lengths], dtype), jnp.array([meant], dtype)
            assert_same_bits(run(x, rows[0]), run(x, rows[1]))
