"""How a body of vectors/ sees the steps of a chunk, and how it runs in plain jnp."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.formulas.gates import fusion_barrier
from mlstm_pallas.formulas.tiles import divide, loop
from mlstm_pallas.launches.launch import Launch

Join = Callable[..., Any]  # (arrays of the steps so far, of further ones) -> joined arrays
_MOST_UNROLLED = 8  # tiles of a chunk
VectorOf = Callable[[Any, Array], Array]  # (index, mask) -> a vector, 0 where the mask is False
_REDUCTIONS: dict[Any, Any] = {jnp.minimum: jnp.min, jnp.maximum: jnp.max, jnp.add: jnp.sum}


def by_chunk(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one chunk as one of arrays (B * NH, NC, ...)."""
    return jax.vmap(jax.vmap(function))


def vector_of(vectors: Any) -> VectorOf:
    """Reads of vectors that the body has all."""
    return lambda index, mask: jnp.where(mask, vectors[index], 0.0)


@dataclasses.dataclass(frozen=True)
class PrefixScan:
    """Prefix scans over the L steps of a chunk, in processing order.

    An array has one element per step; what a method returns per chunk broadcasts against arrays. A
    lowering has a class with the same methods, for chunks in its form.
    """

    L: int

    @property
    def step(self) -> Array:
        """The index of each step in its chunk."""
        return lax.iota(jnp.int32, self.L)

    def sums(self, *x: Array, T: int | None = None) -> Any:
        """Inclusive sums, of each tile of T steps by itself; None: of the chunk."""
        tiles = -1, T or self.L
        return [jnp.cumsum(y.reshape(tiles), axis=1).reshape(self.L) for y in x]

    def against(self, function: Callable[..., Array], *x: Array) -> Array:
        """``function(scan, *x)`` with prefix scans from the last step to the first."""
        return jnp.flip(function(self, *map(jnp.flip, x)))

    def running(self, join: Join, x: Sequence[Array], identities: Sequence[float]) -> Any:
        """Inclusive prefix scans; identities: the neutral element of join, per array."""

        def double(n: Array, x: Any) -> Any:
            """The prefix scans of 2 ** n steps to those of twice as many."""
            pairs = zip(identities, x, strict=True)
            left = [jnp.concatenate([jnp.full_like(y, e), y]) for e, y in pairs]
            return join([lax.dynamic_slice(y, [self.L - 2**n], [self.L]) for y in left], x)

        # As lax.associative_scan, which takes XLA for TPUs a third of a compilation.
        return lax.fori_loop(0, (self.L - 1).bit_length(), double, tuple(x))

    def over_tiles(self, n: int, function: Callable[..., Any], carry: Any) -> tuple[Any, Array]:
        """Carries ``carry`` from the last tile of n to the first.

        Args:
          function: (tile, carry) -> (carry, x).

        Returns:
          The carry and, at the steps of each tile, the sum over the chunk of the x of the tile.
        """
        tile = divide(self.step, self.L // n)

        def step(j: Any, state: Any) -> Any:
            carry, x = function(n - 1 - j, state[0])
            (total,) = self.totals((jnp.add, 0.0, x))
            return carry, jnp.where(tile == n - 1 - j, total, state[1])

        state = carry, carry[0]  # every step is in a tile
        if n <= _MOST_UNROLLED:
            return functools.reduce(lambda state, j: step(j, state), range(n), state)
        return loop(n, step, state)

    def totals(self, *kinds: tuple[Any, float, Array]) -> Any:
        """Per chunk and (function that joins two elements, its neutral element, array)."""
        return [_REDUCTIONS[join](x) for join, _, x in kinds]

    def last(self, *x: Array) -> Any:
        """Per chunk and array, the element at the last step."""
        return [jnp.broadcast_to(y, self.L)[-1] for y in x]

    def shifted(self, x: Array, edge: Any) -> Array:
        """x of the preceding step; ``edge``, one number per chunk, at the first step."""
        return jnp.append(edge, x[:-1])


def vector_call(
    body: Callable[..., Any],
    steps: Sequence[Any],
    outputs: Sequence[str],
    per_chunk: int = 0,
    *,
    name: str,
    call: Launch,
    chunks: Sequence[Array] = (),
    m: Array | None = None,
) -> tuple[Any, Any, Array | None]:
    """Runs ``body(scan, *steps, *chunks)`` for every chunk, with ``m=(before, after)`` if given.

    It returns outputs per step and per chunk. Of the latter the last step counts.

    Args:
      steps: (B * NH, S) each, or None; or (B * NH, n, S), a VectorOf for the body, whose indices
        are in processing order.
      outputs: the dtypes of outputs per step; the results are (B * NH, NC, L).
      per_chunk: the number of outputs per chunk. Beside outputs per step they are at least 0;
        without them they are in the form that ``scan_chunks`` reads.
      chunks: (B * NH, NC) each.
      m: of ``scan_chunks``.

    Returns:
      The outputs per step, those per chunk, and m at the chunk boundaries, (B * NH, NC + 1).
    """
    del name
    scan = PrefixScan(call.problem.L)

    def run(steps: Any, chunks: Any, given: Any) -> Any:
        steps = [vector_of(x) if x is not None and x.ndim == 2 else x for x in steps]
        per_step, per_chunk = body(scan, *steps, *chunks, **given)
        return per_step, scan.last(*per_chunk)

    def by_chunk_and_tile(x: Array) -> Array:
        return call.chunks(x) if x.ndim == 2 else jax.vmap(call.chunks, 1, 2)(x)

    steps, chunks, m_in_order = call.processing_order(([*steps], [*chunks], m))
    vectors = jax.tree.map(by_chunk_and_tile, steps)
    bounds = {} if m is None else dict(m=(m_in_order[:, :-1], m_in_order[:, 1:]))
    results = by_chunk(run)(vectors, chunks, bounds)
    if not outputs:
        return *results, None
    if per_chunk:
        results = fusion_barrier(results, results[1][0])
    return *call.processing_order(results), m


def scan_chunks(
    body: Callable[..., Array],
    summaries: Sequence[Array],
    m_initial: Array,
    *,
    name: str,
    call: Launch,
    after: bool = False,
) -> Array:
    """m at the chunk boundaries, (B * NH, NC + 1), from ``body(scan, *summaries, m_initial)``.

    after: whether to return only m after each chunk, (B * NH, NC), in processing order.
    """
    del name
    m = jax.vmap(lambda *x: body(PrefixScan(call.problem.NC), *x))(*summaries, m_initial)
    if after:
        return m
    return call.processing_order(jnp.append(m_initial[:, None], m, axis=1))
