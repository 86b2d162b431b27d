"""A call on a mesh: what its devices exchange, and how its results are sharded."""

import jax
from jax.sharding import NamedSharding
from oracle import collectives, sharded


def compiled_for(run, x, exchanged=()):
    """A jitted function compiled for these arrays; exchanged: how many collectives of each kind its
    devices run, exactly."""
    compiled = run.lower(*x).compile()
    assert collectives(compiled) == dict(exchanged)
    return compiled


def on_mesh(run, x, specs, mesh, results=(), exchanged=()):
    """What a jitted function returns of arrays that are sharded by the one spec, or by one each.

    Args:
      results: the specs of the first results.
      exchanged: as for compiled_for.
    """
    x = sharded(x, mesh, *specs)
    result = compiled_for(run, x, exchanged)(*x)
    for y, spec in zip(jax.tree.leaves(result), results, strict=False):
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), y.ndim)
    return result
