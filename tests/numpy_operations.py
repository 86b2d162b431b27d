"""Operations of JAX in NumPy, by the names of their primitives: functions of arrays, and of the
operation's parameters by name."""

import math

import numpy as np
from jax import lax


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


def _div(x, y):
    """Integers are rounded towards zero."""
    return (x - np.fmod(x, y)) // y if x.dtype.kind in "iu" else np.divide(x, y)


def _shift_right_logical(x, y):
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return np.right_shift(x.view(unsigned), y.view(unsigned)).view(x.dtype)


def _bitcast(x, *, new_dtype):
    if x.dtype.itemsize == np.dtype(new_dtype).itemsize:
        return x.view(new_dtype)
    return np.asarray(lax.bitcast_convert_type(x, new_dtype))


def _select(which, *cases):
    if len(cases) == 2:
        return np.where(which, cases[1], cases[0])
    return np.choose(np.broadcast_to(which, cases[0].shape), cases)


def _broadcast(x, *, shape, broadcast_dimensions, **_):
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    y = np.empty(shape, x.dtype)
    y[...] = x.reshape(sizes)
    return y


def _iota(*, dtype, shape, dimension, **_):
    sizes = [-1 if axis == dimension else 1 for axis in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(sizes), shape)


def _slice(x, *, start_indices, limit_indices, strides):
    strides = strides or [1] * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, strides))]


def _block(x, sizes, starts):
    """The slices of a block of x, whose start is moved so that it lies within, as in JAX."""
    slices = []
    for start, n, size in zip(starts, x.shape, sizes, strict=True):
        start = min(max(int(start), 0), n - size)
        slices.append(slice(start, start + size))
    return tuple(slices)


def _dynamic_slice(x, *starts, slice_sizes):
    return x if x.shape == slice_sizes else x[_block(x, slice_sizes, starts)]


def _dynamic_update_slice(x, update, *starts):
    if x.shape == update.shape:
        return update
    x = x.copy()
    x[_block(x, update.shape, starts)] = update
    return x


def _pad(x, value, *, padding_config):
    if any(between for *_, between in padding_config):
        sizes = [max(n + (n - 1) * y[2], 0) for n, y in zip(x.shape, padding_config, strict=True)]
        apart = np.full(sizes, value, x.dtype)
        apart[tuple(slice(None, None, between + 1) for *_, between in padding_config)] = x
        x = apart
    sides = [*zip(x.shape, padding_config, strict=True)]
    y = np.full([n + max(low, 0) + max(high, 0) for n, (low, high, _) in sides], value, x.dtype)
    y[tuple(slice(max(low, 0), max(low, 0) + n) for n, (low, *_) in sides)] = x
    ends = zip(y.shape, padding_config, strict=True)
    return y[tuple(slice(max(-low, 0), n + min(high, 0)) for n, (low, high, _) in ends)]


def _windows(shape, sizes, indices, mode, axes, batches, dropped):
    """The indices of blocks of these sizes in an array.

    Args:
      indices: vectors of the blocks' starts along these axes.
      batches: axes of the array, and those of ``indices`` that they correspond to.
      dropped: other axes along which blocks have a single element, and which they lack.

    Returns:
      an array of indices for each axis, and which blocks lie inside.
    """
    batch = indices.shape[:-1]
    starts, inside = [np.int64(0)] * len(shape), np.ones(batch, bool)
    for i, axis in enumerate(axes):
        starts[axis] = indices[..., i].clip(0, shape[axis] - sizes[axis])
        if mode == lax.GatherScatterMode.FILL_OR_DROP:
            inside &= starts[axis] == indices[..., i]
    for axis, of_indices in zip(*batches, strict=True):
        starts[axis] = np.indices(batch, sparse=True)[of_indices]
    kept = [axis for axis in range(len(shape)) if axis not in (*dropped, *batches[0])]
    blocks = *batch, *(sizes[axis] for axis in kept)
    offsets = dict(zip(kept, np.indices(blocks[len(batch) :], sparse=True), strict=True))
    where = (x.reshape(*x.shape, *(1 for _ in kept)) for x in starts)
    where = (x + offsets.get(axis, 0) for axis, x in enumerate(where))
    return [np.broadcast_to(x, blocks) for x in where], inside


def _gather(x, indices, *, dimension_numbers, slice_sizes, mode, fill_value, **_):
    d = dimension_numbers
    batches = d.operand_batching_dims, d.start_indices_batching_dims
    of = d.start_index_map, batches, d.collapsed_slice_dims
    where, inside = _windows(x.shape, slice_sizes, indices, mode, *of)
    y = x[tuple(where)]
    if not inside.all():
        y[~inside] = fill_value
    batch = indices.ndim - 1
    return np.moveaxis(y, range(batch, y.ndim), d.offset_dims)


def _scatter(assign):
    def scatter(x, indices, updates, *, dimension_numbers, mode, **_):
        d = dimension_numbers
        windows = iter(updates.shape[axis] for axis in d.update_window_dims)
        dropped = {*d.inserted_window_dims, *d.operand_batching_dims}
        sizes = [1 if axis in dropped else next(windows) for axis in range(x.ndim)]
        batches = d.operand_batching_dims, d.scatter_indices_batching_dims
        of = d.scatter_dims_to_operand_dims, batches, d.inserted_window_dims
        where, inside = _windows(x.shape, sizes, indices, mode, *of)
        batch = indices.ndim - 1
        updates = np.moveaxis(updates, d.update_window_dims, range(batch, updates.ndim))
        x = x.copy()
        assign(x, tuple(y[inside] for y in where), updates[inside])
        return x

    return scatter


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


def _same(x, **_):
    return x


UFUNCS = dict(
    abs=np.abs, add=np.add, add_any=np.add, ceil=np.ceil, cos=np.cos, eq=np.equal, exp=np.exp,
    exp2=np.exp2, expm1=np.expm1, floor=np.floor, ge=np.greater_equal, gt=np.greater,
    is_finite=np.isfinite, le=np.less_equal, log=np.log, log1p=np.log1p, lt=np.less,
    max=np.maximum, min=np.minimum, mul=np.multiply, ne=np.not_equal, neg=np.negative, pow=np.power,
    rem=np.fmod, shift_left=np.left_shift, sign=np.sign, sin=np.sin, sqrt=np.sqrt,
    square=np.square, sub=np.subtract, tanh=np.tanh,
)  # fmt: skip
UFUNCS |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}
OPERATIONS = UFUNCS | {
    name: _elementwise(function)
    for name, function in dict(
        clamp=lambda low, x, high: np.clip(x, low, high),
        copy=np.array,
        div=_div,
        logistic=lambda x: 1 / (1 + np.exp(-x)),
        name=lambda x: x,
        not_differentiated=lambda *x: x,
        optimization_barrier=lambda *x: x,
        rsqrt=lambda x: 1 / np.sqrt(x),
        select_n=_select,
        shift_right_logical=_shift_right_logical,
    ).items()
}
OPERATIONS |= {"scatter-add": _scatter(np.add.at)}
OPERATIONS |= dict(
    bitcast_convert_type=_bitcast,
    broadcast_in_dim=_broadcast,
    broadcast_to=lambda x, *, shape, **_: np.broadcast_to(x, shape),
    concatenate=lambda *x, dimension: np.concatenate(x, dimension),
    convert_element_type=lambda x, *, new_dtype, **_: x.astype(new_dtype),
    cummax=_cumulative(np.maximum.accumulate),
    cumprod=_cumulative(np.cumprod),
    cumsum=_cumulative(np.cumsum),
    dot_general=_dot_general,
    dynamic_slice=_dynamic_slice,
    dynamic_update_slice=_dynamic_update_slice,
    gather=_gather,
    integer_pow=lambda x, *, y: x**y,
    iota=_iota,
    max_contiguous=_same,
    multiple_of=_same,
    pad=_pad,
    reduce_and=_reduction(np.all),
    reduce_max=_reduction(np.max),
    reduce_min=_reduction(np.min),
    reduce_or=_reduction(np.any),
    reduce_prod=_reduction(np.prod),
    reduce_sum=_reduction(np.sum),
    reshape=lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    rev=lambda x, *, dimensions: np.flip(x, dimensions),
    scatter=_scatter(lambda x, where, y: x.__setitem__(where, y)),
    slice=_slice,
    split=_split,
    squeeze=lambda x, *, dimensions: np.squeeze(x, tuple(dimensions)),
    stack=lambda *x, axis: np.stack(x, axis),
    transpose=lambda x, *, permutation: x.transpose(permutation),
)
