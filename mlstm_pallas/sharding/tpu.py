"""Automatic mesh axes of TPUs, where batch entries and heads are mapped in groups of a device."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mlstm_pallas.sharding.axes import map_with_axes
from mlstm_pallas.sharding.work import Work, on_shard


def in_groups(work: Work, devices: int, *args: Any) -> Any:
    """The work, mapped over the heads and over a group of batch entries per device.

    libtpu has no custom_partitioning. XLA partitions mapped axes by itself, where it would gather
    the axis that ``on_shard`` makes of B and NH.
    """
    batch = range(work.mapped + 1)
    first, heads = jax.tree.leaves(args)[0], work.axes_of(args)[0]
    sizes = [math.gcd(first.shape[n], devices) for n in batch] + [first.shape[heads]]

    def in_groups(x: Array, axis: int) -> Array:
        shape = [*x.shape]
        for at, size in zip((axis, *batch[::-1]), sizes[::-1], strict=True):
            shape[at : at + 1] = size, shape[at] // max(size, 1)
        places = [at + n for n, at in enumerate((*batch, axis))]
        return jnp.moveaxis(x.reshape(shape), places, range(len(sizes)))

    def joined(x: Array, axis: int) -> Array:
        shape = [*x.shape[len(sizes) :]]
        for at, size in zip((*batch, axis), sizes, strict=True):
            shape[at] *= size
        places = [at + n for n, at in enumerate((*batch, axis))]
        return jnp.moveaxis(x, range(len(sizes)), places).reshape(shape)

    alone = dataclasses.replace(work, at_once=max(math.prod(sizes) // devices, 1))
    run: Any = functools.partial(on_shard, alone, None)
    for _ in sizes:
        run = jax.vmap(run)
    outputs = run(*map_with_axes(in_groups, args, work.axes_of(args)))
    return map_with_axes(joined, outputs, work.axis_of_each_result())
