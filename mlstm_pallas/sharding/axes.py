"""Which axes of arrays are sharded how: explicit shardings that agree, and manual axes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mlstm_pallas.planning.call_spec import CallSpec
from mlstm_pallas.problem.arrays import heads_axes, varying_axes


def map_with_axes(function: Callable[[Any, int], Any], tree: Any, axes: Iterable[int]) -> Any:
    """The tree of function(array, the axis of its NH)."""
    arrays, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [*map(function, arrays, axes)])


def sharded_alike(spec: CallSpec, tree: Any) -> Any:
    """The arrays, as for ``on_shards``, with types that agree on the mesh.

    They are sharded over the same explicit axes in B and NH and over none in other axes, and vary
    over the same manual axes.
    """
    mesh = jax.typeof(jax.tree.leaves(tree)[0]).sharding.mesh
    if mesh.explicit_axes:
        tree, _ = resharded(spec, tree, heads_axes(tree, spec.layout), mesh)
    return varying_as(tree, tree)


def varying_as(inputs: Any, tree: Any) -> Any:
    """The arrays of a tree, which vary over each manual axis over which one of the inputs does."""
    varying = varying_axes(inputs)

    def cast(x: Array) -> Array:
        axes = tuple(sorted(varying - varying_axes(x)))
        return jax.lax.pcast(x, axes, to="varying") if axes else x

    return jax.tree.map(cast, tree)


def common_spec(spec: CallSpec, specs: Iterable[P], axes: Iterable[int], mapped: int) -> P:
    """For each axis up to B, and for NH, the first mesh axes in the specs that are unused.

    axes: of NH, one for each spec.
    """
    used: set[str] = set()
    common: list[Any] = [None] * spec.pooled
    shardings = []
    for sharding, axis in zip(specs, axes, strict=True):
        up_to_heads = padded_spec(sharding, axis + 1)
        shardings.append([*up_to_heads[spec.pooled : mapped + 1], up_to_heads[axis]])
    for entries in zip(*shardings, strict=True):
        choices = ({x} if isinstance(x, str) else x or () for x in entries)
        names = next((x for x in choices if x and not used.intersection(x)), ())
        used.update(names)
        common.append(tuple(names) or None)
    return P(*common)


def resharded(
    spec: CallSpec, tree: Any, axes: Sequence[int], mesh: Any, mapped: int = 0
) -> tuple[Any, P]:
    """The arrays with one sharding of their axes up to B and of NH, and that sharding."""
    specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(tree)]
    common = common_spec(spec, specs, axes, mapped)

    def sharding(x: Array, axis: int) -> NamedSharding:
        return NamedSharding(mesh, padded_spec(placed(common, axis), x.ndim))

    return jax.sharding.reshard(tree, map_with_axes(sharding, tree, axes)), common


def placed(common: P, axis: int) -> P:
    """The common sharding, of an array whose NH is the axis."""
    *batch, heads = common
    return P(*batch, *(None,) * (axis - len(batch)), heads)


def padded_spec(spec: P, ndim: int) -> P:
    return P(*spec[:ndim], *(None,) * (ndim - len(spec)))
