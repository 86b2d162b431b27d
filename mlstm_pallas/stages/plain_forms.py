"""How plain forms run over heads and rows: in loops over heads, and on rows of pools."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def on_rows(step: Callable[[Any], Any], x: Any) -> Any:
    """h and the pools after a step of entries with slots; x: operands with states and slots."""
    rows = x.slots.astype("uint32")  # -1 is outside, not the last row
    states = jax.tree.map(lambda y: y.at[rows].get(mode="fill", fill_value=0), x.states)
    h, after = step(x._replace(states=states, slots=None))

    def updated(pool: Array, y: Array) -> Array:
        return pool.at[rows].set(y, mode="drop", unique_indices=True)

    has_row = (rows < len(x.states.c)).reshape(-1, *[1] * (h.ndim - 1))
    return jnp.where(has_row, h, 0), jax.tree.map(updated, x.states, after)


def one_at_a_time(run: Callable[[Any], Any], axes: int = 1) -> Callable[[Any], Any]:
    """run over the first axes in loops, so that XLA compiles it the same whatever their sizes."""
    if axes > 1:
        return functools.partial(lax.map, one_at_a_time(run, axes - 1))

    def looped(x: Any) -> Any:
        if len(jax.tree.leaves(x)[0]) != 1:
            return lax.map(run, x)
        # XLA would fuse a loop of one step with what is before and after it.
        twice = jax.tree.map(lambda y: jnp.concatenate([y, y]), x)
        return jax.tree.map(lambda y: y[:1], lax.map(run, twice))

    return looped
