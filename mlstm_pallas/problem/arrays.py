"""The arrays of a call, and the residuals of its forward pass.

B and NH are the first axes of all arrays, but for ``IN_LAYOUT``. Inside a shard they are one axis.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mlstm_pallas.problem.dimensions import Layout
from mlstm_pallas.problem.steps import Steps


class Token(NamedTuple):
    """One step of every head, or with an axis of steps behind NH several."""

    q: Any  # (B, NH, DHQK)
    k: Any  # (B, NH, DHQK)
    v: Any  # (B, NH, DHV)
    i: Any  # (B, NH) pre-activations
    f: Any  # (B, NH)


class States(NamedTuple):
    """The states of every head, or with an axis N behind NH those of its packed segments.

    None: zeros, or no gradient.
    """

    c: Any = None  # (B, NH, DHQK, DHV)
    n: Any = None  # (B, NH, DHQK)
    m: Any = None  # (B, NH)


class Inputs(NamedTuple):
    """Padded and cast: q, k, v in the kernel dtype, gates and states float32.

    Gates have whole chunks of steps; q, k and v have the caller's steps and layout.
    """

    q: Array
    k: Array
    v: Array
    i: Array
    f: Array
    # n and m are arrays; c is None where the states start from zeros, without gradients.
    initial: States = States()
    steps: Steps = Steps()
    segments: States | None = None  # the initial states of segments, in place of initial.c


class StoredStates(NamedTuple):
    """The states at the boundaries of the call's chunks; the true ones are these times exp(m).

    C is in the kernel dtype, the rest float32.
    """

    C: Any = None  # (B, NH, NC, DHQK, DHV); None: recomputed
    n: Any = None  # (B, NH, NC, DHQK)
    m: Any = None  # (B, NH, NC + 1); None: recomputed
    C_last: Any = None  # (B, NH, DHQK, DHV); None without C, or if no last states are returned
    n_last: Any = None  # (B, NH, DHQK)


class Forward(NamedTuple):
    """The outputs of a forward pass."""

    h: Array  # (B, NH, S, DHV) or (B, S, NH, DHV)
    last: States | None  # the last ones, or those of segments; None where they are not returned
    z: Array | None  # (B, NH, S); None without a normaliser
    states: Any  # StoredStates; None with states of segments


class Cotangents(NamedTuple):
    h: Array
    last: Any  # States; None: zeros


class Residuals(NamedTuple):
    """The parts of the forward pass that the backward pass reads; h and z are the normaliser's."""

    inputs: Inputs
    h: Array | None  # None without a normaliser, or where the denominator is a constant
    z: Array | None
    states: Any  # StoredStates, or the States of segments that the forward pass returned


# The fields that have the layout of the call; with "BTNH" they are (B, S, NH, D). They lead in
# Inputs and Forward.
IN_LAYOUT = {"q", "k", "v", "h"}


def heads_axes(tree: Any, layout: Layout) -> list[int]:
    """The axis of NH in each array of a tree, where B is axis 0; the fields' names tell it."""

    def axis(path: Any) -> int:
        in_layout = layout is Layout.BTNH and getattr(path[-1], "name", "") in IN_LAYOUT
        return 1 + in_layout

    return [axis(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def varying_axes(tree: Any) -> frozenset[str]:
    """The manual mesh axes over which some array varies."""
    types = map(jax.typeof, jax.tree.leaves(tree))
    return frozenset().union(*(x.manual_axis_type.varying for x in types))


def heads_as_rows(x: Array) -> Array:
    """(B, S, NH, D) as (B * NH, S, D); an array (B * NH, S, ...) stays as it is."""
    if x.ndim < 4:
        return x
    B, S, NH, D = x.shape
    return jnp.swapaxes(x, 1, 2).reshape(B * NH, S, D)


def rows_as_heads(x: Array, like: Array) -> Array:
    """The inverse of ``heads_as_rows``: (B * NH, S, D) in the layout of ``like``."""
    if like.ndim < 4:
        return x
    B, _, NH, _ = like.shape
    return jnp.swapaxes(x.reshape(B, NH, *x.shape[1:]), 1, 2)
