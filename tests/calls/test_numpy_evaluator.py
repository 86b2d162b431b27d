"""numpy_evaluator.py: each operation agrees with XLA, and so does an interpreted kernel."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpy_evaluator
import pytest
from jax import lax
from jax._src.pallas import hlo_interpreter
from jax._src.state.primitives import broadcast_to
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import triton as plgpu
from numpy_evaluator import (
    CALLS,
    CLOSED,
    LOOPS,
    in_numpy,
    interpret_kernel,
    jaxprs_in,
    jit,
    kernels_in_numpy,
)
from numpy_operations import OPERATIONS
from oracle import assert_same_bits

from mlstm_pallas.schedules.derivatives import not_differentiated


@jax.custom_jvp
def with_a_jvp(x):
    return 3.0 * x


@jax.custom_vjp
def with_a_vjp(x):
    return 5.0 * x


@jax.custom_batching.custom_vmap
def with_a_vmap(x):
    return 7.0 * x


@custom_partitioning
def on_devices(x):
    return 9.0 * x


def negated(x, n):
    """On the host, which gets a number for a scalar."""
    assert not np.shape(n)
    return -np.asarray(x) * int(n)


with_a_vmap.def_vmap(lambda size, is_mapped, x: (7.0 * x, True))
on_devices.def_partition(partition=None, sharding_rule="... -> ...")
with_a_jvp.defjvp(lambda x, dx: (with_a_jvp(*x), 3.0 * dx[0]))
with_a_vjp.defvjp(lambda x: (with_a_vjp(x), None), lambda _, dy: (5.0 * dy,))


INTEGERS = "int8", "uint16", "int32"
PADDED = ((-1, 0, 0), (0, 0, 1)), ((1, -2, 2), (-1, -1, 0)), ((0, 1, 0), (2, 0, 3))
MODES = ("clip", {}), ("fill", {}), ("fill", dict(fill_value=5.0)), ("promise_in_bounds", {})
once = functools.partial(not_differentiated, message="")


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
        [lax.rem(x, y), lax.rem(n, jnp.flip(n)), lax.div(n, jnp.flip(n) // 2 * 2 + 1)],
        [lax.shift_left(n, n % 5), lax.shift_right_logical(n, jnp.abs(n) % 5)],
        [lax.shift_right_logical(n.astype(kind), jnp.abs(n).astype(kind)) for kind in INTEGERS],
        [lax.bitcast_convert_type(x, "int64"), lax.bitcast_convert_type(n[0, 0, 0], "float64")],
        [lax.bitcast_convert_type(x, "uint32"), checkpoint_name(x, "x"), *once((x, n))],
        [pl.multiple_of(n, 1), plgpu.max_contiguous(n, 1)],
    )


def shaped(x, y, n, is_set):
    """Operations that move elements, reductions and products; x is (2, 3, 4)."""
    halves = x.astype("bfloat16"), y.astype("bfloat16")
    return (
        [x.T, x.reshape(4, 6), x[:, ::-1], x[None, :, 1:3], x[:, 0], x[1:, ::2]],
        [jnp.split(x, [1, 3], 2), lax.rev(x, (0, 2)), jnp.squeeze(x[:1], 0)],
        [jnp.concatenate([x, y], 1), jnp.broadcast_to(x[:, :1], x.shape), lax.iota("int32", 5)],
        [broadcast_to(x[0], x.shape)],
        [lax.broadcasted_iota("float32", (2, 3), 1), jnp.pad(x, ((0, 1), (2, 0), (0, 0)))],
        [lax.pad(x[0], 0.0, sides) for sides in PADDED],
        [jnp.stack([x, y], 1), lax.stack([n, n], 3), lax.cumprod(x, 1), jnp.prod(x, (0, 2))],
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


def indexed(x, y, n, is_set):
    """Blocks at indices that lie inside, reach beyond or begin before the array."""
    rows, columns = jnp.abs(n) % 3, n % 7 - 2
    batched = functools.partial(jnp.take_along_axis, mode="fill")
    modes = lax.GatherScatterMode
    blocks = lax.GatherDimensionNumbers((1, 2), (0,), (0, 2))
    at = n[0, :, :2] // 4
    gathered = (
        lax.gather(x, at, blocks, (1, 3, 2), mode=mode) for mode in (modes.CLIP, modes.FILL_OR_DROP)
    )
    return (
        [x[1, rows[0]], x[:, rows[0], 1:3], x[:, 1, rows[0, 0]], x[n[0] % 2, rows[0], :2]],
        [x.at[:, :, columns].get(mode=mode, **more) for mode, more in MODES],
        [n.at[columns].get(mode="fill"), rows.astype("uint8").at[columns].get(mode="fill")],
        [batched(x, columns, axis) for axis in range(3)],
        [*gathered],
        [x.at[:, rows[0, 0], 1].set(y[:, 0]), x.at[n[0] % 2, rows[0]].set(7.0)],
        [x.at[..., columns[0, 0]].add(2.0, mode=mode) for mode in ("clip", "drop")],
        [x.at[1, columns[0, 0]].add(y[0, 0], mode="drop"), n.at[0, :, rows[0]].add(1)],
        [jax.vmap(lambda x, i, y: x.at[i].set(y, mode="drop"))(x, columns[:, 0, 0], y[:, 0])],
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
        [with_a_vmap(x), on_devices(x), io_callback(negated, x, x, n[0, 0, 0], ordered=True)],
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
    cases = (elementwise, True), (shaped, False), (indexed, False), (called, False)
    for function, special in cases:
        x = drawn(special)
        with jax.enable_x64(True):
            actual, expected = (run(function)(*x) for run in (in_numpy, jax.jit))
            seen |= names_in(jax.make_jaxpr(function)(*x).jaxpr)
        for y, z in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            assert y.dtype == z.dtype
            np.testing.assert_allclose(y, z, rtol=1e-14, atol=1e-14)
    # Each jax has one of CLOSED.
    assert {*OPERATIONS, *CALLS, *LOOPS} - seen < CLOSED


def test_what_takes_longer_than_a_compiler_is_compiled():
    """The estimate follows from the shapes in a loop and from its length."""

    def run(x, steps):
        return lax.scan(lambda y, _: (y @ y, None), x, length=steps)[0]

    x = np.eye(64)
    with mock.patch.object(numpy_evaluator, "Program", side_effect=AssertionError):
        assert_same_bits(in_numpy(functools.partial(run, steps=10**6))(x[:2, :2]), x[:2, :2])
        with pytest.raises(AssertionError):
            in_numpy(functools.partial(run, steps=10**3))(x)
        assert_same_bits(in_numpy(functools.partial(run, steps=10**5))(x), x)


def test_an_operation_that_numpy_lacks_runs_as_in_jax():
    x = np.array([[3.0, 1.0], [2.0, 4.0]])
    assert_same_bits(in_numpy(jnp.sort)(x), np.sort(x))


def kernel(x_ref, y_ref):
    """Of blocks of 4 rows, the last of which reaches beyond x: row sums in turn, with a mask."""
    i, rows = pl.program_id(0), lax.iota("int32", 4)

    def step(j, total):
        column = plgpu.load(x_ref.at[:, j], mask=4 * i + rows < 6, other=0.0)
        return total + column

    total = lax.fori_loop(0, x_ref.shape[1] - i, step, jnp.zeros(4, x_ref.dtype))
    y_ref[:, 0] = total
    y_ref[:, 1] = jnp.full(4, i, x_ref.dtype)


def of_blocks(x):
    blocks = dict(in_specs=[pl.BlockSpec((4, x.shape[1]), lambda i: (i, 0))])
    blocks |= dict(out_specs=pl.BlockSpec((4, 2), lambda i: (i, 0)), grid=pl.cdiv(len(x), 4))
    shape = jax.ShapeDtypeStruct((len(x), 2), x.dtype)
    return 2 * pl.pallas_call(kernel, out_shape=shape, interpret=True, **blocks)(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_interpreted_kernel_runs_in_numpy(dtype):
    """As a part of what is compiled, and as a part of what runs in NumPy."""
    x = np.arange(18).reshape(6, 3)
    sums = [*x[:4].sum(1), *x[4:, :2].sum(1)]
    expected = 2 * np.stack([sums, [0] * 4 + [1] * 2], 1).astype(dtype)
    compiled = mock.patch.object(hlo_interpreter, "pallas_call_hlo_interpret", interpret_kernel)
    ways = (jax.jit, compiled, 0), (jax.jit, kernels_in_numpy(), 1), (jit, compiled, 1)
    for run, context, count in ways:
        used = mock.patch.object(numpy_evaluator, "evaluate", wraps=numpy_evaluator.evaluate)
        with context, used as calls:
            assert_same_bits(run(of_blocks)(x.astype(dtype)), expected)
            assert calls.call_count == count
        jax.clear_caches()
