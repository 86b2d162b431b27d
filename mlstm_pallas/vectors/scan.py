"""How a body of vectors/ sees the steps of a chunk, and how it runs in plain jnp."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.formulas.gates import fusion_barrier

if TYPE_CHECKING:
    from mlstm_pallas.stages.stage import Launch

Join = Callable[..., Any]  # (arrays of the steps so far, of further ones) -> joined arrays
_REDUCTIONS: dict[Any, Any] = {jnp.minimum: jnp.min, jnp.maximum: jnp.max, jnp.add: jnp.sum}


def by_chunk(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one chunk as one of arrays (B * NH, NC, ...)."""
    return jax.vmap(jax.vmap(function))


@dataclasses.dataclass(frozen=True)
class Scan:
    """Scans over the L steps of a chunk, in processing order; an array has one element per step.

    A lowering has a class with the same methods, for chunks in its form. What a method returns per
    chunk broadcasts against arrays.
    """

    L: int

    def sums(self, *x: Array) -> Any:
        """Inclusive sums."""
        return [jnp.cumsum(y) for y in x]

    def running(self, join: Join, x: Sequence[Array], identities: Sequence[float]) -> Any:
        """Inclusive scans; identities: the neutral element of join, per array."""

        def double(n: Array, x: Any) -> Any:
            """The scans of 2 ** n steps to those of twice as many."""
            pairs = zip(identities, x, strict=True)
            left = [jnp.concatenate([jnp.full_like(y, e), y]) for e, y in pairs]
            return join([lax.dynamic_slice(y, [self.L - 2**n], [self.L]) for y in left], x)

        # As lax.associative_scan, which takes XLA for TPUs a third of a compilation.
        return lax.fori_loop(0, (self.L - 1).bit_length(), double, tuple(x))

    def totals(self, *kinds: tuple[Any, float, Array]) -> Any:
        """Per chunk and (function that joins two elements, its neutral element, array)."""
        return [_REDUCTIONS[join](x) for join, _, x in kinds]

    def last(self, *x: Array) -> Any:
        """Per chunk and array, the element at the last step."""
        return [jnp.broadcast_to(y, self.L)[-1] for y in x]

    def shifted(self, x: Array, edge: Array) -> Array:
        """x of the preceding step; ``edge``, one number per chunk, at the first step."""
        return jnp.append(edge, x[:-1])


def vector_call(
    body: Callable[..., Any],
    steps: Sequence[Any],
    outputs: Sequence[str],
    *,
    name: str,
    call: "Launch",
    m: Array | None = None,
) -> tuple[Any, Any, Array | None]:
    """Runs ``body(scan, *steps)``, or ``body(scan, *steps, m=(before, after))``, for every chunk.

    It returns outputs per step and per chunk. Of the latter the last step counts.

    Args:
      steps: (B * NH, S) each, or None.
      outputs: the dtypes of outputs per step; the results are (B * NH, NC, L).
      m: of ``scan_chunks``; without it outputs per chunk are in the form that this function reads.

    Returns:
      The outputs per step, those per chunk, and m at the chunk boundaries, (B * NH, NC + 1).
    """
    del outputs, name
    scan = Scan(call.problem.L)

    def run(steps: Any, m: Any) -> Any:
        per_step, per_chunk = body(scan, *steps, **({} if m is None else dict(m=m)))
        return per_step, scan.last(*per_chunk)

    vectors = jax.tree.map(call.chunks, call.processing_order(steps))
    if m is None:
        return *by_chunk(lambda *x: run(x, None))(*vectors), None
    in_order = call.processing_order(m)
    results = by_chunk(run)(vectors, (in_order[:, :-1], in_order[:, 1:]))
    return *call.processing_order(fusion_barrier(results, results[1][0])), m


def scan_chunks(
    body: Callable[..., Array],
    summaries: Sequence[Array],
    m_initial: Array,
    *,
    call: "Launch",
    after: bool,
) -> Array:
    """m at the chunk boundaries, (B * NH, NC + 1), from ``body(scan, *summaries, m_initial)``.

    after: whether to return only m after each chunk, (B * NH, NC), in processing order.
    """
    m = jax.vmap(lambda *x: body(Scan(call.problem.NC), *x))(*summaries, m_initial)
    if after:
        return m
    boundaries: Array = call.processing_order(jnp.append(m_initial[:, None], m, axis=1))
    return boundaries
