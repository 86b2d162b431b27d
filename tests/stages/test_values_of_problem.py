"""Padded dimensions, chunks and splits: values that a hand can check."""

import dataclasses

import numpy as np
from oracle import refused

from mlstm_pallas.problem.dimensions import (
    InputGate,
    Layout,
    Problem,
    accumulator_dtype,
    is_power_of_two,
    make_problem,
    next_power_of_two,
    padded_head_dim,
)


def test_powers_of_two():
    assert [next_power_of_two(x) for x in (0, 1, 2, 3, 4, 5, 255, 256, 257)] == [
        1,
        1,
        2,
        4,
        4,
        8,
        256,
        256,
        512,
    ]
    assert [x for x in range(-2, 10) if is_power_of_two(x)] == [1, 2, 4, 8]


def test_padded_heads():
    """The heads of the kernels are multiples of 16."""
    assert {x: padded_head_dim(x) for x in (1, 16, 17, 33, 64, 65, 128, 129, 192, 193)} == {
        1: 16,
        16: 16,
        17: 32,
        33: 48,
        64: 64,
        65: 80,
        128: 128,
        129: 144,
        192: 192,
        193: 208,
    }


def test_dtypes_of_sums():
    """Sums are in float32 unless an array has float64."""
    assert repr(accumulator_dtype(np.dtype("float32"), np.dtype("float16"))) == "dtype('float32')"
    assert repr(accumulator_dtype(np.dtype("float32"), np.dtype("float64"))) == "dtype('float64')"


def test_the_length_of_a_chunk():
    """A chunk is no longer than the next power of two of the sequence, and at least 16. The
    scale is that of the heads as they are."""
    assert make_problem((2, 3, 100, 25), 65, 64, pad_heads=True) == Problem(
        B=2, NH=3, S=128, DHQK=32, DHV=80, L=64, qk_scale=0.2
    )
    assert make_problem((2, 3, 100, 25), 65, 64, pad_heads=False) == Problem(
        B=2, NH=3, S=128, DHQK=25, DHV=65, L=64, qk_scale=0.2
    )
    assert {
        S: make_problem((1, 1, S, 16), 16, 256, pad_heads=True).L for S in (1, 16, 17, 200, 900)
    } == {1: 16, 16: 16, 17: 32, 200: 256, 900: 256}
    p = Problem(2, 3, 1024, 16, 32, L=256, qk_scale=0.25)
    assert (p.NC, p.T, p.BNH) == (4, 128, 6)
    assert p.in_chunks_of(64) == Problem(B=2, NH=3, S=1024, DHQK=16, DHV=32, L=64, qk_scale=0.25)
    assert p.in_chunks_of(64).T == 64
    assert p.in_chunks_of(512) == p
    assert p.in_splits(2) == Problem(B=2, NH=3, S=1024, DHQK=16, DHV=32, L=512, qk_scale=0.25)
    assert p.split(2) == Problem(B=2, NH=6, S=512, DHQK=16, DHV=32, L=256, qk_scale=0.25)
    refused(
        ValueError,
        "S = 1000 is not a multiple of the chunk size L = 256",
        lambda: dataclasses.replace(p, S=1000),
    )
    assert [*map(str, InputGate), *map(str, Layout)] == ["exp", "sigmoid", "BNTH", "BTNH"]
