"""problem.py: padded dimensions, chunks and splits."""

import numpy as np
import pytest

from mlstm_pallas.problem import (
    Problem,
    accumulator_dtype,
    is_power_of_two,
    make_problem,
    next_power_of_two,
    padded_head_dim,
)

POWERS = {0: 1, 1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 255: 256, 256: 256, 257: 512}
HEADS = {1: 16, 16: 16, 17: 32, 33: 64, 64: 64, 65: 128, 128: 128, 129: 192, 192: 192}


def test_sizes():
    assert {x: next_power_of_two(x) for x in POWERS} == POWERS
    assert [x for x in range(-2, 10) if is_power_of_two(x)] == [1, 2, 4, 8]
    assert {x: padded_head_dim(x) for x in HEADS} == HEADS


def test_sums_are_in_float32_unless_something_has_float64():
    for dtypes, expected in (("float32 float16", "float32"), ("float32 float64", "float64")):
        assert accumulator_dtype(*map(np.dtype, dtypes.split())) == expected


def test_a_problem_is_padded():
    """A chunk is no longer than the next power of two of the sequence, and at least 16."""
    shape = 2, 3, 100, 25
    assert make_problem(shape, 65, 64, pad_heads=True) == Problem(2, 3, 128, 32, 128, 64, 0.2)
    assert make_problem(shape, 65, 64, pad_heads=False) == Problem(2, 3, 128, 25, 65, 64, 0.2)
    found = {
        S: make_problem((1, 1, S, 16), 16, 256, pad_heads=True).L for S in (1, 16, 17, 200, 900)
    }
    assert found == {1: 16, 16: 16, 17: 32, 200: 256, 900: 256}


def test_the_views_of_a_problem():
    p = Problem(2, 3, 1024, 16, 32, 256, 0.25)
    assert (p.NC, p.T, p.BNH) == (4, 128, 6)
    assert p.in_chunks_of(64) == Problem(2, 3, 1024, 16, 32, 64, 0.25)
    assert p.in_chunks_of(64).T == 64
    assert p.in_chunks_of(512) == p
    assert p.in_splits(2) == Problem(2, 3, 1024, 16, 32, 512, 0.25)
    assert p.split(2) == Problem(2, 6, 512, 16, 32, 256, 0.25)
    with pytest.raises(ValueError, match="S = 1000 is not a multiple of the chunk size L = 256"):
        Problem(2, 3, 1000, 16, 32, 256, 0.25)
