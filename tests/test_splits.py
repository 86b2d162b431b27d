"""Splits of a sequence that run at the same time: the states before them, and what they add to
those.

The recurrences in splits: test_stages.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import array, assert_close, tolerance
from test_packed_sequences import check_prompts

from mlstm_pallas import KernelConfig
from mlstm_pallas.planning import call_spec as planning
from mlstm_pallas.planning import dispatch
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.problem.gpu import UNKNOWN
from mlstm_pallas.stages.stage import Lowering

HEADS, S, L, DHQK, DHHV = 2, 128, 16, 32, 64
NC = S // L
PROBLEM = Problem(1, HEADS, S, DHQK, DHHV, L, 1.0)
split_products = functools.partial(dispatch.run, "split_products")
INTERPRETED, PLAIN = Lowering.INTERPRET, Lowering.XLA
BF16 = jnp.dtype("bfloat16")
TILES = dict(siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=32)


def call_of(name, lowering, *num_splits):
    config = KernelConfig(triton_split_products=TILES)
    spec = planning.CallSpec(PROBLEM, config, BF16, None, UNKNOWN, backend=lowering)
    return spec.launch(name, lowering, None, *num_splits)


@pytest.mark.parametrize("backward", [False, True])
def test_split_products(backward):
    """The kernel and the plain form: the products of every split but the last, backward but the
    first."""
    num_splits, draw = 4, np.random.default_rng(0)
    a, b = (array(draw.normal(size=(HEADS, S, D)), BF16) for D in (DHQK, DHHV))
    r = np.float32(draw.random((HEADS, S)))
    x = dict(a=a, b=b, r=r)
    split = [
        np.asarray(y).astype("float64").reshape(HEADS, num_splits, S // num_splits, -1)
        for y in (a.astype("float32") * r[..., None], b)
    ]
    expected = np.einsum("npsk,npsv->npkv", *split)
    for lowering in (INTERPRETED, PLAIN):
        call = call_of("split_products", lowering, num_splits)
        options = dict(num_splits=num_splits, backward=backward, call=call)
        result = jax.jit(functools.partial(split_products, **options))(**x)
        assert result.dtype == jnp.float32
        desired = expected[:, 1:] if backward else expected[:, :-1]
        assert_close(result, desired, tolerance(BF16, S), lowering)
    options = dict(num_splits=num_splits, all_splits=True, call=planning.plain(PROBLEM))
    every = split_products(**x, **options)
    assert_close(every, expected, tolerance(BF16, S))


@pytest.mark.parametrize("lowering", [INTERPRETED, Lowering.MOSAIC_GPU_INTERPRET, PLAIN])
def test_states_of_a_later_shard_are_added_where_they_have_not_decayed(lowering):
    """In blocks of 64 x 64."""
    draw = np.random.default_rng(1)
    X = array(draw.normal(size=(HEADS, NC, 128, 128)), "bfloat16")
    added = np.float32(draw.normal(size=(HEADS, 128, 128)))
    decays = np.float32(np.maximum(draw.normal(size=(HEADS, NC)), 0))
    run = functools.partial(dispatch.run, "add_decayed", call=call_of("add_decayed", lowering))
    x = dict(X=X, added=added, decays=decays)
    assert ("pallas_call" in str(jax.make_jaxpr(run)(**x))) == (lowering is not PLAIN)
    result, start = (np.asarray(y).astype("float64") for y in (jax.jit(run)(**x), X))
    expected = start + decays[..., None, None] * np.float64(added[:, None])
    assert np.abs(result - expected).max() <= 2.0**-8 * np.abs(expected).max()
    assert np.array_equal(result[decays == 0], start[decays == 0])


def test_states_of_packed_prompts_in_several_blocks():
    """Two launches of the scan, each with two blocks of columns."""
    tiles = dict(siz_b_DHQK=16, siz_b_DHHV=16, state_rows=16)
    config = KernelConfig(chunk_size=16, triton_recurrent_fw_H=tiles)
    rows = [1, 2, 15, 16, 17], [33]
    check_prompts(0, 32, 32, rows=rows, go_on=True, backend="interpret", config=config)


def test_a_number_of_splits_is_cut_to_what_divides_the_chunks():
    tiles = dispatch.tiles_class("recurrent_fw_C", "triton")(64, 64, 64, 4, 3, num_splits=8)
    for chunks, expected in ((2, 2), (63, 1), (12, 4), (64, 8)):
        problem = Problem(1, 8, 128 * chunks, 256, 512, 128, 1.0)
        assert tiles.clamped(problem).num_splits == expected, chunks
