"""Automatic mesh axes: a function that XLA partitions by its own shardings."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding

from mlstm_pallas.sharding.axes import common_spec, map_with_axes, padded_spec, placed
from mlstm_pallas.sharding.work import Work, on_shard


@functools.lru_cache(256)  # shapes are among the keys
def partitioned(work: Work, axes: tuple[int, ...]) -> Callable[..., Any]:
    """The work on its identity and arrays, which XLA can partition; axes: those of NH.

    custom_partitioning with static_argnums fails under jax_check_tracer_leaks (jax 0.12). So the
    static arguments are in closures, one set per kind of work.
    """
    run = functools.partial(on_shard, work)

    def of_shard(*args: Any) -> Any:
        # jax 0.12 traces it under the user's mesh, whose explicit axes have no meaning here.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return run(*args)

    def partition(mesh: Any, args: Any, results: Any) -> tuple[Any, ...]:
        in_shardings, out_shardings = _common_shardings(work, args, results)
        return mesh, of_shard, out_shardings, in_shardings

    partitioned = custom_partitioning(run)
    rule = functools.partial(_sharding_rule, work, axes)
    partitioned.def_partition(partition, sharding_rule=rule)
    return partitioned


def _sharding_rule(
    work: Work, axes: Sequence[int], mesh: Any, operands: Any, results: Any
) -> tuple[Any, ...]:
    """The axes up to B, and NH, of all arrays but the identity are free; others are replicated.

    Beside pools only NH is free.
    """
    replicated: list[str] = []
    batch = range(0 if work.spec.pooled else work.mapped + 1)

    def factors(x: Any, axis: int | None) -> str:
        names = []
        for n in range(x.rank):
            if axis is not None and (n == axis or n in batch):
                names.append("heads" if n == axis else f"batch{n}")
            else:
                names.append(f"replicated{len(replicated)}")
                replicated.append(names[-1])
        return " ".join(names)

    operands = [*map(factors, operands, [None, *axes])]
    results = [*map(factors, results, work.axis_of_each_result())]
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    return text, {"need_replication_factors": tuple(replicated)}


def _common_shardings(work: Work, args: Any, results: Any) -> tuple[Any, Any]:
    """One sharding of the free axes and none of other axes, for all operands and results."""
    identity, *arrays = args
    tree = results, arrays
    leaves, axes = jax.tree.leaves(tree), work.axes_of(tree)
    # Inside a shard_map over some of the axes shardings have no names. Those of the results follow
    # the rule.
    pairs = [*zip(leaves, axes, strict=True)]
    by_kind = {(len(x.shape), axis): x.sharding for x, axis in reversed(pairs)}
    if isinstance(leaves[0].sharding, NamedSharding):
        mesh = leaves[0].sharding.mesh
        common = common_spec(work.spec, [x.sharding.spec for x in leaves], axes, work.mapped)
        by_kind = {
            (rank, axis): NamedSharding(mesh, padded_spec(placed(common, axis), rank))
            for rank, axis in by_kind
        }
    elif work.spec.pooled:  # arrays of one rank differ
        by_kind = dict.fromkeys(by_kind, identity.sharding)
    results, arrays = map_with_axes(lambda x, axis: by_kind[len(x.shape), axis], tree, axes)
    return (identity.sharding, *arrays), results
