"""numpy_evaluator.py: each operation agrees with XLA."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpy_evaluator
import pytest
from jax import lax
from numpy_evaluator import CALLS, CLOSED, OPERATIONS, in_numpy, jaxprs_in
from oracle import assert_same_bits


@jax.custom_jvp
def with_a_jvp(x):
    return 3.0 * x


@jax.custom_vjp
def with_a_vjp(x):
    return 5.0 * x


with_a_jvp.defjvp(lambda x, dx: (with_a_jvp(*x), 3.0 * dx[0]))
with_a_vjp.defvjp(lambda x: (with_a_vjp(x), None), lambda _, dy: (5.0 * dy,))


def elementwise(x, y, n, is_set):
    """Operations on floats, with NaN and infinities too, on integers and on booleans."""
    unary = jnp.abs, jnp.exp, lax.exp2, jnp.expm1, jnp.log, jnp.log1p, jnp.sqrt, lax.rsqrt, jnp.tanh
    unary += jnp.cos, jnp.sin, jnp.ceil, jnp.floor, jnp.sign, jnp.negative, lax.square, lax.logistic
    binary = jnp.add, jnp.subtract, jnp.multiply, lax.div, lax.pow, lax.max, lax.min
    compared = lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge
    return (
        [function(x) for function in unary],
        [function(x, y) for function in (*binary, *compared)],
        [function(n, jnp.flip(n)) for function in (lax.add, lax.div, lax.max)],
        [lax.bitwise_and(n, 3), n | 4, n ^ 5, ~n, is_set & (x > 0), is_set | (x > 0), ~is_set],
        [jnp.isfinite(x), jnp.where(is_set, x, y), lax.clamp(-0.5, x, 0.5), lax.integer_pow(x, 3)],
        [lax.select_n(jnp.abs(n) % 3, x, y, x + y), x.astype("float32"), n.astype("float64")],
        [lax.optimization_barrier((x, n)), jnp.array(x, copy=True)],
    )


def shaped(x, y, n, is_set):
    """Operations that move elements, reductions and products; x is (2, 3, 4)."""
    halves = x.astype("bfloat16"), y.astype("bfloat16")
    return (
        [x.T, x.reshape(4, 6), x[:, ::-1], x[None, :, 1:3], x[:, 0], x[1:, ::2]],
        [jnp.split(x, [1, 3], 2), lax.rev(x, (0, 2)), jnp.squeeze(x[:1], 0)],
        [jnp.concatenate([x, y], 1), jnp.broadcast_to(x[:, :1], x.shape), lax.iota("int32", 5)],
        [lax.broadcasted_iota("float32", (2, 3), 1), jnp.pad(x, ((0, 1), (2, 0), (0, 0)))],
        [lax.pad(x[0], 0.0, ((-1, 0, 0), (0, 0, 1)))],
        # A block that reaches beyond the end is moved back.
        [lax.dynamic_slice(x, (n[0, 0, 0] * 0 + 1, 2, -9), (1, 2, 3))],
        [lax.dynamic_update_slice(x, y[:1, :2], (9, n[0, 0, 0] * 0 + 1, 0))],
        [
            lax.cumsum(x, 1),
            lax.cumsum(n, 2, reverse=True),
            lax.cummax(x, 2),
            lax.cummax(x, 0, True),
        ],
        [jnp.sum(x, (0, 2)), jnp.max(x, 1), jnp.min(x), jnp.any(is_set, 0), jnp.all(is_set, 1)],
        [y[0].T @ y[1], jnp.einsum("bij,jkb->bik", x, y.T), jnp.einsum("bij,bik->jbk", x, y)],
        [jnp.einsum("bij,bkj->bik", *halves, preferred_element_type="float32")],
    )


def called(x, y, n, is_set):
    """Functions inside functions, and loops."""

    def step(carry, row):
        return carry * 0.5 + row, (carry[0], row - carry)

    @jax.checkpoint
    def recomputed(x):
        return lax.scan(lambda carry, row: (jnp.sin(carry) * row, None), x[0], x)[0]

    def counted(state):
        return state[0] + 1, state[1] * 1.5

    branches = (lambda x: x, lambda x: 2 * x, lambda x: 3 * x)
    return (
        lax.scan(step, x[0], y),
        lax.scan(step, x[0], y, reverse=True),
        lax.scan(step, x[0], y[:0]),
        lax.scan(lambda carry, _: (carry + 1, None), 0, length=3),
        lax.while_loop(lambda state: state[0] < 5, counted, (0, x)),
        lax.fori_loop(0, 4, lambda i, z: z + i * x, x),
        [lax.switch(jnp.int32(index), branches, x) for index in (-1, 1, 7)],
        lax.cond(n[0, 0, 0] > 0, lambda: x, lambda: y),
        [jax.jit(jnp.sin)(x), with_a_jvp(x), with_a_vjp(x), jax.checkpoint(jnp.cos)(x)],
        jax.grad(lambda x: jnp.sum(recomputed(x)))(x),
        jax.grad(lambda x: jnp.sum(with_a_vjp(with_a_jvp(x)) ** 2 + lax.cumsum(x, 2) ** 3))(x),
    )


def drawn(special):
    """Special: with NaN and infinities among the floats."""
    r = np.random.default_rng(0)
    x, y = r.normal(size=(2, 2, 3, 4))
    n = r.integers(-9, 9, (2, 3, 4)) * 2 + 1
    if special:
        x[0, 0], y[1, 0] = (np.nan, np.inf, -np.inf, 0.0), (np.nan, 0.0, np.inf, -np.inf)
    return x, y, n, x > y


def names_in(jaxpr):
    """Of the operations in a program and in those that it runs."""
    names = set()
    for eqn in jaxpr.eqns:
        names |= {eqn.primitive.name}.union(*map(names_in, jaxprs_in(eqn)))
    return names


def test_operations_are_those_of_xla():
    seen = set()
    for function, special in (elementwise, True), (shaped, False), (called, False):
        x = drawn(special)
        with jax.enable_x64(True):
            actual, expected = (run(function)(*x) for run in (in_numpy, jax.jit))
            seen |= names_in(jax.make_jaxpr(function)(*x).jaxpr)
        for y, z in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            assert y.dtype == z.dtype
            np.testing.assert_allclose(y, z, rtol=1e-14, atol=1e-14)
    # Each jax has one of CLOSED.
    assert {*OPERATIONS, *CALLS} - seen < CLOSED


def test_what_takes_longer_than_a_compiler_is_compiled():
    """The estimate follows from the shapes in a loop and from its length."""

    def run(x, steps):
        return lax.scan(lambda y, _: (y @ y, None), x, length=steps)[0]

    x = np.eye(64)
    with mock.patch.object(numpy_evaluator, "_evaluate", side_effect=AssertionError):
        assert_same_bits(in_numpy(functools.partial(run, steps=10**6))(x[:2, :2]), x[:2, :2])
        with pytest.raises(AssertionError):
            in_numpy(functools.partial(run, steps=10**3))(x)
        assert_same_bits(in_numpy(functools.partial(run, steps=10**5))(x), x)


def test_an_operation_that_numpy_lacks_runs_as_in_jax():
    run = functools.partial(jnp.take_along_axis, axis=0)
    x, at = np.arange(6.0).reshape(3, 2), np.array([[2, 0]])
    assert_same_bits(in_numpy(run)(x, at), x[[2, 0], [0, 1]][None])
