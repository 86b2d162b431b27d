"""Splits of a sequence that run at the same time: the states before them, what they add to those,
and the recurrences in splits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import array, assert_close, tolerance

from mlstm_pallas import StageConfig, dispatch
from mlstm_pallas.problem import Problem
from mlstm_pallas.splits import decays_of_others
from mlstm_pallas.stage import Lowering, StageCall, Weighted
from mlstm_pallas.triton.recurrence import MAX_SPLITS, splits_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

HEADS, S, L, DHQK, DHHV = 2, 128, 16, 32, 64
NC = S // L
PROBLEM = Problem(1, HEADS, S, DHQK, DHHV, L, 1.0)
split_products = functools.partial(dispatch.run, "split_products")
recurrent_fw_C = functools.partial(dispatch.run, "recurrent_fw_C")


def recurrent_bw_dC(a, b, gamma, X, a_forward=None, *inputs, **options):
    """The stage, of operands that come weighted."""
    keys = () if a_forward is None else (Weighted(a_forward, None),)
    operands = Weighted(a, None), b, gamma, X, *keys, *inputs
    return dispatch.run("recurrent_bw_dC", *operands, **options)


INTERPRETED, PLAIN = Lowering.INTERPRET, Lowering.XLA


def call_of(lowering, num_splits=None, problem=PROBLEM):
    tiles = StageConfig(siz_b_LKV=16, siz_b_DHQK=16, siz_b_DHHV=32, num_splits=num_splits)
    return StageCall(problem, tiles, lax.Precision.HIGHEST, lowering)


@functools.cache
def arrays(dtype, resets=False):
    """a (HEADS, S, DHQK), b (HEADS, S, DHHV), r (HEADS, S), gamma (HEADS, NC), X and x before the
    sequence."""
    draw = np.random.default_rng(0)
    gamma = draw.random((HEADS, NC)) * (draw.random((HEADS, NC)) > 0.3 if resets else 1)
    shapes = dict(a=(S, DHQK), b=(S, DHHV), X=(DHQK, DHHV), x=(DHQK,))
    result = {name: draw.normal(size=(HEADS, *shape)) for name, shape in shapes.items()} | dict(
        r=draw.random((HEADS, S)), gamma=gamma
    )
    return {name: array(y, dtype if name in "ab" else "float32") for name, y in result.items()}


def wide(tree):
    return jax.tree.map(lambda y: array(y, "float64"), tree)


def forward(lowering, x, num_splits=None, return_last=True):
    run = functools.partial(
        recurrent_fw_C, return_last=return_last, call=call_of(lowering, num_splits)
    )
    return jax.jit(run)(x["a"], x["b"], x["r"], x["gamma"], x["X"], x["x"])


def backward(lowering, x, num_splits=None, desired=True):
    """Of the state's gradient, and of the state with the operands in each other's place; and
    delta."""
    run = functools.partial(
        recurrent_bw_dC,
        return_initial=desired,
        return_last=desired,
        call=call_of(lowering, num_splits),
    )
    return jax.jit(run)(
        x["a"],
        x["b"],
        x["gamma"],
        x["X"],
        x["a"][:, ::-1],
        x["b"][:, ::-1],
        x["X"],
        matH=x["b"][..., ::-1],
    )


STAGES = {"recurrent_fw_C": forward, "recurrent_bw_dC": backward}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("dtype", "num_splits", "resets"), [("float32", 8, True), ("bfloat16", 2, False)]
)
def test_recurrences_in_splits(stage, dtype, num_splits, resets):
    x, run = arrays(dtype, resets), STAGES[stage]
    assert splits_of(call_of(INTERPRETED, num_splits).tiles, PROBLEM) == num_splits
    result = run(INTERPRETED, x, num_splits)
    with jax.enable_x64(True):
        expected = run(PLAIN, wide(x))
    for key, actual, desired in zip(result._fields, result, expected, strict=True):
        assert_close(
            actual, desired, tolerance("float32" if key.startswith("vec") else dtype, S), key
        )


@pytest.mark.parametrize("backward", [False, True])
def test_split_products(backward):
    """The kernel and the plain form: the products of every split but the last, backward but the
    first."""
    dtype, num_splits = "bfloat16", 4
    x = arrays(dtype)
    a, b, r = (np.asarray(x[name].astype("float32"), "float64") for name in "abr")
    split = [y.reshape(HEADS, num_splits, S // num_splits, -1) for y in (a * r[..., None], b)]
    expected = np.einsum("npsk,npsv->npkv", *split)
    for lowering in (INTERPRETED, PLAIN):
        options = dict(num_splits=num_splits, backward=backward, call=call_of(lowering))
        result = jax.jit(functools.partial(split_products, **options))(x["a"], x["b"], x["r"])
        assert result.dtype == jnp.float32
        assert_close(
            result, expected[:, 1:] if backward else expected[:, :-1], tolerance(dtype, S), lowering
        )
    every = split_products(x["a"], x["b"], x["r"], num_splits, all_splits=True, call=call_of(PLAIN))
    assert_close(every, expected, tolerance(dtype, S))


@pytest.mark.parametrize("lowering", [INTERPRETED, Lowering.MOSAIC_GPU_INTERPRET, PLAIN])
def test_states_of_a_later_shard_are_added_where_they_have_not_decayed(lowering):
    X = jnp.asarray(np.random.default_rng(1).normal(size=(HEADS, NC, DHQK, 2 * DHHV)), "bfloat16")
    added = np.random.default_rng(2).normal(size=(HEADS, DHQK, 2 * DHHV)).astype("float32")
    decays = np.asarray(arrays("float32", resets=True)["gamma"])
    run = functools.partial(dispatch.run, "add_decayed", call=call_of(lowering))
    assert ("pallas_call" in str(jax.make_jaxpr(run)(X, added, decays))) == (lowering is not PLAIN)
    result = np.asarray(jax.jit(run)(X, added, decays).astype("float32"))
    start = np.asarray(X.astype("float32"))
    expected = start + decays[..., None, None] * added[:, None].astype("float64")
    assert np.abs(result - expected).max() <= 2.0**-8 * np.abs(expected).max()
    assert np.array_equal(result[decays == 0], start[decays == 0])


def test_decays_of_others():
    gamma = jnp.asarray([[0.5, 0.25, 0.0, 2.0]])
    assert decays_of_others(gamma).tolist() == [[0.0, 0.0, 2.0, 1.0]]
    assert decays_of_others(gamma, backward=True).tolist() == [[1.0, 0.5, 0.125, 0.0]]


def test_a_number_of_splits_is_cut_to_what_divides_the_chunks():
    for chunks, num_splits, expected in ((2, 4, 2), (63, 4, 1), (12, 8, 4), (64, 64, MAX_SPLITS)):
        problem = Problem(1, 8, 128 * chunks, 256, 512, 128, 1.0)
        assert splits_of(StageConfig(num_splits=num_splits), problem) == expected, chunks


def test_fewer_ctas_have_no_fewer_splits():
    splits = [
        splits_of(StageConfig(siz_b_DHHV=128), Problem(1, heads, 8192, 256, 512, 128, 1.0))
        for heads in (512, 64, 16, 8, 4, 1)
    ]
    assert splits == sorted(splits)
    assert splits[0] == 1 < splits[-1]
