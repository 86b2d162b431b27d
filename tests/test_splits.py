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

from mlstm_pallas import KernelConfig, dispatch, planning, splits
from mlstm_pallas.gpu import HOPPER, UNKNOWN
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Lowering

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


GAMMA = np.float32([[0.5, 0.25, 2, 4], [1, 0, 3, 5]])
OTHERS = {  # by whether time runs backward: prod of gamma over the other chunks, and in two splits
    False: ([[2, 8, 4, 1], [0, 15, 5, 1]], [[0.25, 1, 4, 1], [0, 1, 5, 1]]),
    True: ([[1, 0.5, 0.125, 0.25], [1, 1, 0, 0]], [[1, 0.5, 1, 2], [1, 1, 1, 3]]),
}


@pytest.mark.parametrize("backward", [False, True])
def test_decays_and_states_of_splits(backward):
    """Of two heads with four chunks in two splits, on numbers written by hand."""
    whole, in_splits = OTHERS[backward]
    assert splits.decays_of_others(GAMMA, backward=backward).tolist() == whole
    found = splits.decays_in_splits(GAMMA, 2, 8, backward=backward)
    assert found.tolist() == np.repeat(in_splits, 2, axis=1).tolist()
    added, initial = np.float32([[[[10]]], [[[20]]]]), np.float32([[[3]], [[7]]])
    expected = {False: [3, 0.125 * 3 + 10, 7, 20], True: [8 * 3 + 10, 3, 15 * 7 + 20, 7]}[backward]
    found = splits.split_states(added, GAMMA, initial, backward=backward)
    assert (found.shape, found.ravel().tolist()) == ((4, 1, 1), expected)
    found = splits.split_states(added, GAMMA, None, backward=backward)
    assert found.ravel().tolist() == ([10, 0, 20, 0] if backward else [0, 10, 0, 20])


def test_three_splits_follow_one_another():
    gamma, added = np.float32([[2, 3, 5]]), np.float32([[[[10]], [[20]]]])
    states = [
        splits.split_states(added, gamma, np.float32([[[1]]]), backward=x) for x in (False, True)
    ]
    assert [x.ravel().tolist() for x in states] == [[1, 12, 56], [85, 25, 1]]


def test_splits_as_heads_and_back():
    x = np.arange(24).reshape(2, 12)
    cut = splits.splits_as_heads(x, 3, 12)
    assert (cut.shape, cut[1].tolist()) == ((6, 4), [4, 5, 6, 7])
    assert splits.heads_of_splits(cut, 3).tolist() == x.reshape(2, 3, 4).tolist()
    assert splits.splits_as_heads(x[..., None], 3, 12).shape == (6, 4, 1)
    for kept in (x[..., None], x[:, None, None]):  # of other steps, or with an axis of heads
        assert splits.splits_as_heads(kept, 3, 13) is kept


def test_the_number_of_splits():
    """Powers of two that divide the chunks, from 4 to 16."""
    most = {(64, 3): 1, (64, 4): 4, (64, 7): 4, (64, 99): 16, (12, 99): 4, (6, 99): 1, (8, 0): 1}
    assert {x: splits.splits_of(*x) for x in most} == most


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
    draw = np.random.default_rng(1)
    X = array(draw.normal(size=(HEADS, NC, DHQK, 2 * DHHV)), "bfloat16")
    added = np.float32(draw.normal(size=(HEADS, DHQK, 2 * DHHV)))
    decays = np.float32(np.maximum(draw.normal(size=(HEADS, NC)), 0))
    run = functools.partial(dispatch.run, "add_decayed", call=call_of("add_decayed", lowering))
    x = dict(X=X, added=added, decays=decays)
    assert ("pallas_call" in str(jax.make_jaxpr(run)(**x))) == (lowering is not PLAIN)
    result, start = (np.asarray(y).astype("float64") for y in (jax.jit(run)(**x), X))
    expected = start + decays[..., None, None] * np.float64(added[:, None])
    assert np.abs(result - expected).max() <= 2.0**-8 * np.abs(expected).max()
    assert np.array_equal(result[decays == 0], start[decays == 0])


def test_a_number_of_splits_is_cut_to_what_divides_the_chunks():
    tiles = dispatch.tiles_class("recurrent_fw_C", "triton")(64, 64, 64, 4, 3, num_splits=8)
    for chunks, expected in ((2, 2), (63, 1), (12, 4), (64, 8)):
        problem = Problem(1, 8, 128 * chunks, 256, 512, 128, 1.0)
        assert tiles.clamped(problem).num_splits == expected, chunks


def test_fewer_ctas_have_no_fewer_splits():
    plan = functools.partial(dispatch.tiles_class("recurrent_fw_C", "triton").plan, gpu=HOPPER)
    found = [
        plan(Problem(1, heads, 8192, 256, 512, 128, 1.0), BF16).num_splits
        for heads in (512, 64, 16, 8, 4, 1)
    ]
    assert found == sorted(found)
    assert found[0] == 1 < found[-1]
