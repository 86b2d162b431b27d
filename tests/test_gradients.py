"""Outputs and every gradient against the recurrence and its derivatives in float64: algorithms,
layouts, tiles, lengths, gates, normalisers, cotangents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    OUTPUTS,
    assert_close,
    beside_float64,
    check_call,
    compare,
    config_in_splits,
    cotangents_for,
    emptied,
    expected_of,
    random_inputs,
    slow,
    tolerance,
)

from mlstm_pallas import KernelConfig, mlstm_chunkwise

BOUND = {"float32": 1e-4, "bfloat16": 2e-2}  # what the README promises


def check(inputs, algorithm, chunk_size, skip=(), cotangents=None, states=True, **options):
    """algorithm: of ALGORITHMS; skip: gradients that are rounding alone; states: whether the last
    ones are returned."""
    options |= dict(chunk_size=chunk_size, return_last_states=states) | ALGORITHMS[algorithm]
    dtype = inputs["q"].dtype.name
    cotangents = cotangents or cotangents_for(inputs, dtype, states)
    (outputs, gradients), (expected, desired) = beside_float64(inputs, cotangents, **options)
    # States are relative to a float32 m.
    largest = np.max(np.abs(expected[3]), where=np.isfinite(expected[3]), initial=0)
    bound = tolerance(dtype, sum(inputs["q"].shape[2:])) + np.spacing(np.float32(largest))
    compare(OUTPUTS[: len(outputs)], outputs, expected[: len(outputs)], bound)
    for name, actual in gradients.items():
        assert jnp.isfinite(actual).all(), name
        if name not in skip:
            assert_close(actual, desired[name], BOUND[dtype], f"d{name}")


def tiles(scores, gradients):
    """A config with so many rows per tile of parallel_bw_dP and of parallel_bw_dQKV."""
    of_gradients = dict(siz_b_LQ=gradients, siz_b_DHQK=16, siz_b_DHHV=16, block_k=16)
    return KernelConfig(
        triton_parallel_bw_dP=dict(siz_b_LQ=scores, block_k=16),
        triton_parallel_bw_dQKV=of_gradients,
    )


def splits(num_splits, fused=True):
    """config_in_splits with small tiles."""
    tiles = dict(siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=16)
    return config_in_splits(num_splits, fused, dict(state_rows=32), **tiles)


def interpreted(config, **options):
    return {"backend": "interpret", "config": config, **options}


def fused(**scan):
    return KernelConfig(fused=True, triton_recurrent_fw_H=scan)


MATERIALISED, BTNH = KernelConfig(fused=False), dict(layout="BTNH")
STORED = dict(recompute_states_in_bw=False)
ALGORITHMS = {
    "xla": {"backend": "xla", **BTNH},
    "xla_stored": {"backend": "xla", **STORED},
    "materialised": interpreted(MATERIALISED, **BTNH),
    "materialised_stored": interpreted(MATERIALISED, **STORED),
    "tiles16x32": interpreted(tiles(16, 32)),
    "tiles32x16": interpreted(tiles(32, 16), **BTNH),
    "tiles128": interpreted(tiles(128, 128)),
    "fused": interpreted(fused(siz_b_LKV=32)),
    "fused_stored": interpreted(splits(1), **STORED),
    "fused_two_launches": interpreted(fused(siz_b_DHQK=16, state_rows=16), **BTNH),
    "splits": interpreted(splits(4), **BTNH),
    "splits_materialised": interpreted(splits(2, fused=False), **BTNH),
    "splits_stored": interpreted(splits(2), **STORED),
}


# Whole blocks of the fused scan and no whole chunks; padded heads.
SHAPE = (1, 2, 3, 96, 40, 24)


@pytest.mark.parametrize(
    ("dtype", "algorithm", "chunk_size"),
    [
        ("float32", "materialised", 64),
        ("float32", "fused", 64),
        slow("float32", "materialised", 16),
        *(slow("float32", name, 64) for name in ("xla", "xla_stored", "materialised_stored")),
        *(
            slow("float32", name, 16)
            for name in (
                *("fused_stored", "fused_two_launches"),
                *("splits", "splits_materialised", "splits_stored"),
            )
        ),
        # test_float16.py has quick ones of kernels.
        *(slow("bfloat16", name, 64) for name in ("xla", "materialised", "fused")),
    ],
)
def test_gradients(dtype, algorithm, chunk_size):
    check(random_inputs(*SHAPE, dtype=dtype), algorithm, chunk_size)


@pytest.mark.parametrize("algorithm", ["materialised", "fused"])
def test_an_initial_m_of_minus_infinity_stores_nothing(algorithm):
    """With C = n = 0 it equals a first step of i = -inf that resets."""
    inputs = random_inputs(*SHAPE, i_shift=-20.0, i_scale=0.1, f_shift=5.0)  # m = 0 would win
    check(emptied(inputs), algorithm, 64)


def test_a_closed_forget_gate_counts_where_the_input_gate_is_closed_as_well():
    """Without a floor of the denominator, h is old and new content by their ratio, however small
    both are."""
    inputs = random_inputs(5, 1, 1, 3, 16, 4, states=False)
    inputs |= dict.fromkeys("if", jnp.asarray([[[0.0, -61.0, 0.0]]]))
    check(inputs, "xla", 16, states=False, input_gate="sigmoid", eps=0.0, norm_val=0.0)


@pytest.mark.parametrize("case", ["behind_a_norm", "states_alone"])
def test_gradients_of_cotangents(case):
    inputs = random_inputs(*SHAPE)
    dh, *of_states = cotangents_for(inputs, "float32")
    h = expected_of(inputs, [dh, *of_states])[0][0].astype("float32")
    along = np.sum(dh * h, axis=-1, keepdims=True) / np.sum(h * h, axis=-1, keepdims=True) * h
    dh, skip = (0 * dh, "q") if case == "states_alone" else (dh - along, ["n_initial"])
    check(inputs, "materialised", 64, skip, [dh, *of_states])


UNNORMALISED = {"input_gate": "sigmoid", "normalize": False}


@pytest.mark.parametrize(
    ("algorithm", "options"), [("splits", UNNORMALISED), slow("materialised", {})]
)
@pytest.mark.parametrize(
    "recipe",
    [{}, {"resets": True}, {"i_scale": 30.0}],
    ids=["ordinary", "resets", "closed_input_gates"],
)
def test_gradients_of_h_alone_from_no_initial_states(algorithm, options, recipe):
    """There are no initial states, and the last ones are not returned: neither is read or
    written."""
    inputs = random_inputs(13, 1, 2, 64, 16, 16, states=False, **recipe)
    check(inputs, algorithm, 16, states=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["tiles32x16", "tiles16x32", "tiles128"])
def test_gradients_in_a_chunk_of_several_tiles(algorithm):
    inputs = random_inputs(3, 1, 1, 512, 16, 16, resets=True)  # with a finite m at the end
    check(inputs, algorithm, 256)


# Ids of 70 steps, chunks of 32: sequences of one step, several in a chunk, one at a chunk boundary,
# one over two chunks.
PACKED = np.repeat([3, 3, 0, 7, 8, 7], [5, 4, 1, 22, 36, 2])[None]
STATES = ("c_initial", "n_initial")
GATES = {
    "ordinary": ({}, STATES),
    "resets": ({"resets": True}, ()),
    "closed_forget_gates": ({"f_shift": -30.0}, ()),
    "open_forget_gates": ({"f_shift": 10.0}, STATES),
    "wild_gates": ({"f_scale": 1e3, "i_scale": 1e3}, ("f", *STATES, "m_initial")),
}


@pytest.mark.parametrize("algorithm", ["materialised", slow("fused")])
@pytest.mark.parametrize("case", GATES)
def test_gradients_of_gates(case, algorithm):
    """In packed sequences, with an eps through which m has a gradient at every step."""
    recipe, skip = GATES[case]
    inputs = random_inputs(3, 1, 2, 70, 16, 16, **recipe)
    check(inputs, algorithm, 32, skip, segment_ids=PACKED, eps=0.1)


# test_properties.py draws the gates of these.
NORMALISERS = {
    "eps0": {"eps": 0.0},
    "floor_at_most_steps": {"norm_val": 50.0},
    "unstabilised_floor_at_most_steps": {"stabilize_correctly": False, "norm_val": 50.0},
    "sigmoid": {"input_gate": "sigmoid", "eps": 0.1},
    "sigmoid_without_normaliser": UNNORMALISED,
}


@pytest.mark.parametrize(
    ("case", "algorithm"),
    [
        ("unstabilised_floor_at_most_steps", "fused"),
        *(slow(case, "xla") for case in ("eps0", "sigmoid")),
        *(slow(case, "materialised") for case in NORMALISERS if case not in ("eps0", "sigmoid")),
    ],
)
def test_gradients_of_normalisers(case, algorithm):
    options, skip = NORMALISERS[case], ["n_initial"] if "floor" in case else []
    inputs = random_inputs(3, 1, 2, 70, 16, 16, m_initial="input_gate" not in options)
    check(inputs, algorithm, 32, skip, **options)


@pytest.mark.parametrize(
    ("open_gates", "nearly_closed", "algorithm"),
    [(6.0, -20.0, "xla"), slow(12.0, -10.0, "materialised"), slow(9.0, -6.0, "splits")],
)
def test_gradients_of_forget_gates_that_nearly_close_among_open_ones(
    algorithm, open_gates, nearly_closed
):
    """Next to nothing passes where most of the gradient is: what passes elsewhere must not leave
    its rounding there."""
    inputs = random_inputs(11, 1, 1, 256, 16, 16, dtype="bfloat16", f_shift=open_gates)
    inputs["f"] = jnp.where(jnp.arange(256) % 37 == 5, nearly_closed, inputs["f"])
    check(inputs, algorithm, 64)


@pytest.mark.parametrize(
    ("S", "algorithm", "chunk_size"),
    [
        (1, "tiles16x32", 32),
        (61, "splits", 16),
        slow(17, "materialised", 32),
        slow(48, "fused", 32),  # whole blocks of the scan, no whole chunk
        slow(127, "fused_two_launches", 32),
        slow(129, "splits_stored", 16),
        slow(2, "splits_stored", 16),
    ],
)
def test_odd_lengths(S, algorithm, chunk_size):
    """Interpreted, what a kernel reads beyond an array is NaN."""
    heads, bound = (1, 17) if S == 1 else (32, 16), 4 * tolerance("float32", S + 32)
    inputs = random_inputs(S, 2, 3, S, *heads)
    check_call(inputs, bound, bound, chunk_size=chunk_size, **ALGORITHMS[algorithm])


def test_interpreted_kernels_of_odd_lengths_lower_with_64_bit_indices():
    x = random_inputs(0, 1, 2, 61, 16, 16, states=False)
    run = functools.partial(mlstm_chunkwise, chunk_size=32, **ALGORITHMS["materialised_stored"])
    with jax.enable_x64(True):
        jax.jit(jax.grad(lambda x: jnp.sum(run(**x)))).lower(x)
