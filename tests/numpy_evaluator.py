"""Runs functions of JAX in NumPy, one operation at a time.

XLA takes about a second to compile an oracle, and does so for each shape. NumPy takes
milliseconds for the small arrays of most tests, and does not depend on XLA's rewrites. Operations
without a form in NumPy here run in JAX. A function is compiled instead if NumPy is estimated to
take longer than the compiler.
"""

import functools
import math

import jax
import numpy as np
from jax import lax

# Estimated seconds: per operation, per element, per product in a matrix product, and to compile.
OPERATION, ELEMENT, PRODUCT, COMPILER = 4e-6, 3e-9, 2e-10, 1.0


def in_numpy(function):
    """Wraps a function of JAX: the same results as arrays of NumPy, compiled only if faster."""

    @functools.wraps(function)
    def evaluated(*x):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*x)
        if _seconds(closed) > COMPILER:
            return jax.tree.map(np.asarray, jax.jit(function)(*x))
        with np.errstate(all="ignore"):
            outputs = _evaluate(closed, map(np.asarray, jax.tree.leaves(x)))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return evaluated


def _evaluate(closed, args):
    jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
    values = dict(zip(jaxpr.constvars, map(np.asarray, consts), strict=True))
    values |= zip(jaxpr.invars, args, strict=True)

    def read(x):
        return np.asarray(x.val, x.aval.dtype) if hasattr(x, "val") else values[x]

    for eqn in jaxpr.eqns:
        operands, name = map(read, eqn.invars), eqn.primitive.name
        if name in OPERATIONS:
            results = OPERATIONS[name](*operands, **eqn.params)
        elif name in CALLS:
            results = CALLS[name](*operands, **eqn.params)
        else:
            results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        results = results if isinstance(results, list | tuple) else [results]
        for x, y in zip(eqn.outvars, results, strict=True):
            assert np.shape(y) == x.aval.shape, (eqn, np.shape(y))
            values[x] = np.asarray(y).astype(x.aval.dtype, copy=False)
    return [read(x) for x in jaxpr.outvars]


def _seconds(closed):
    """That NumPy takes, roughly: a while loop counts as one turn, a cond as all its branches."""
    return sum(map(_seconds_of, getattr(closed, "jaxpr", closed).eqns))


def jaxprs_in(eqn):
    """The programs that an operation runs, as loops and calls do."""
    params = jax.tree.leaves([*eqn.params.values()], is_leaf=lambda x: hasattr(x, "eqns"))
    return [x for x in params if hasattr(x, "eqns")]


def _seconds_of(eqn):
    if inner := jaxprs_in(eqn):
        return eqn.params.get("length", 1) * sum(map(_seconds, inner))
    sizes = [math.prod(x.aval.shape) for x in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name == "dot_general":
        (summed, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in summed)
        return OPERATION + PRODUCT * terms * sizes[-1]
    return OPERATION + ELEMENT * max(sizes)


def _call(*args, **params):
    [inner] = (params[name] for name in ("jaxpr", "call_jaxpr") if name in params)
    return _evaluate(inner, args)


def _scan(*args, jaxpr, length, reverse, ft_in=None, num_consts=None, num_carry=None, **_):
    if ft_in is not None:  # jax >= 0.11
        num_consts, num_carry, _ = (len([*x]) for x in ft_in.unpack())
    consts, carry = args[:num_consts], args[num_consts : num_consts + num_carry]
    xs, order = args[num_consts + num_carry :], range(length)
    rows = []
    for step in reversed(order) if reverse else order:
        results = _evaluate(jaxpr, (*consts, *carry, *(x[step] for x in xs)))
        carry, row = results[:num_carry], results[num_carry:]
        rows.append(row)
    if not length:
        return *carry, *(np.zeros((0, *x.shape), x.dtype) for x in jaxpr.out_avals[num_carry:])
    ys = map(np.stack, zip(*(reversed(rows) if reverse else rows), strict=True))
    return *carry, *ys


def _while(*args, cond_jaxpr, cond_nconsts, body_jaxpr, body_nconsts):
    ends = cond_nconsts, cond_nconsts + body_nconsts
    cond_consts, body_consts, carry = args[: ends[0]], args[ends[0] : ends[1]], args[ends[1] :]
    while _evaluate(cond_jaxpr, (*cond_consts, *carry))[0]:
        carry = _evaluate(body_jaxpr, (*body_consts, *carry))
    return carry


def _cond(index, *args, branches, **_):
    return _evaluate(branches[np.clip(int(index), 0, len(branches) - 1)], args)


CLOSED = {"closed_call", "eval_jaxpr"}  # in jax 0.10, and in later ones
CALLS = dict.fromkeys({"jit", "remat2", "custom_jvp_call", "custom_vjp_call"} | CLOSED, _call)
CALLS |= {"scan": _scan, "while": _while, "cond": _cond}


def _elementwise(function):
    return lambda *args, **_: function(*args)


def _reduction(function):
    return lambda x, *, axes, **_: function(x, axis=tuple(axes))


def _cumulative(function):
    def cumulative(x, *, axis, reverse):
        x = np.flip(x, axis) if reverse else x
        y = function(x, axis=axis, dtype=x.dtype)
        return np.flip(y, axis) if reverse else y

    return cumulative


def _select(which, *cases):
    if len(cases) == 2:
        return np.where(which, cases[1], cases[0])
    return np.choose(np.broadcast_to(which, cases[0].shape), cases)


def _broadcast(x, *, shape, broadcast_dimensions, **_):
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _iota(*, dtype, shape, dimension, **_):
    sizes = [-1 if axis == dimension else 1 for axis in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(sizes), shape)


def _slice(x, *, start_indices, limit_indices, strides):
    strides = strides or [1] * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, strides))]


def _block(x, sizes, starts):
    """The slices of a block of x, whose start is moved so that it lies within, as in JAX."""
    starts = (
        min(max(int(i), 0), n - size) for i, n, size in zip(starts, x.shape, sizes, strict=True)
    )
    return tuple(slice(i, i + size) for i, size in zip(starts, sizes, strict=True))


def _dynamic_slice(x, *starts, slice_sizes):
    return x[_block(x, slice_sizes, starts)]


def _dynamic_update_slice(x, update, *starts):
    x = x.copy()
    x[_block(x, update.shape, starts)] = update
    return x


def _pad(x, value, *, padding_config):
    if any(low < 0 or high < 0 or inner for low, high, inner in padding_config):
        return lax.pad(x, value, padding_config)
    return np.pad(x, [y[:2] for y in padding_config], constant_values=value)


def _dot_general(a, b, *, dimension_numbers, preferred_element_type, **_):
    """Sums are in float32 at least, also those of operands with 16 bits."""
    (sum_a, sum_b), (batch_a, batch_b) = dimension_numbers
    wide = np.promote_types(preferred_element_type or a.dtype, "float32")
    a, b = a.astype(wide), b.astype(wide)

    def matrices(x, batch, rows, columns):
        x = x.transpose(*batch, *rows, *columns)
        n, m = len(batch), len(batch) + len(rows)
        return x.reshape(*x.shape[:n], math.prod(x.shape[n:m]), math.prod(x.shape[m:]))

    def others(x, *used):
        return [axis for axis in range(x.ndim) if axis not in sum(map(tuple, used), ())]

    rows, columns = others(a, sum_a, batch_a), others(b, sum_b, batch_b)
    product = matrices(a, batch_a, rows, sum_a) @ matrices(b, batch_b, sum_b, columns)
    sizes = *(a.shape[x] for x in (*batch_a, *rows)), *(b.shape[x] for x in columns)
    return product.reshape(sizes)


def _split(x, *, sizes, axis):
    return np.split(x, np.cumsum(sizes)[:-1], axis)


OPERATIONS = {
    name: _elementwise(function)
    for name, function in dict(
        abs=np.abs, add=np.add, add_any=np.add, ceil=np.ceil, copy=np.array, cos=np.cos,
        eq=np.equal, exp=np.exp, exp2=np.exp2, expm1=np.expm1, floor=np.floor, ge=np.greater_equal,
        gt=np.greater, is_finite=np.isfinite, le=np.less_equal, log=np.log, log1p=np.log1p,
        lt=np.less, max=np.maximum, min=np.minimum, mul=np.multiply, ne=np.not_equal,
        neg=np.negative, pow=np.power, sign=np.sign, sin=np.sin, sqrt=np.sqrt, square=np.square,
        sub=np.subtract, tanh=np.tanh, select_n=_select, optimization_barrier=lambda *x: x,
        convert_element_type=lambda x: x, rsqrt=lambda x: 1 / np.sqrt(x),
        logistic=lambda x: 1 / (1 + np.exp(-x)), clamp=lambda low, x, high: np.clip(x, low, high),
    ).items()
}  # fmt: skip
OPERATIONS |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}
OPERATIONS |= dict(
    broadcast_in_dim=_broadcast,
    concatenate=lambda *x, dimension: np.concatenate(x, dimension),
    cummax=_cumulative(np.maximum.accumulate),
    cumsum=_cumulative(np.cumsum),
    div=lambda x, y: lax.div(x, y) if x.dtype.kind in "iu" else np.divide(x, y),
    dot_general=_dot_general,
    dynamic_slice=_dynamic_slice,
    dynamic_update_slice=_dynamic_update_slice,
    integer_pow=lambda x, *, y: x**y,
    iota=_iota,
    pad=_pad,
    reduce_and=_reduction(np.all),
    reduce_max=_reduction(np.max),
    reduce_min=_reduction(np.min),
    reduce_or=_reduction(np.any),
    reduce_sum=_reduction(np.sum),
    reshape=lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    rev=lambda x, *, dimensions: np.flip(x, dimensions),
    slice=_slice,
    split=_split,
    squeeze=lambda x, *, dimensions: np.squeeze(x, tuple(dimensions)),
    transpose=lambda x, *, permutation: x.transpose(permutation),
)
