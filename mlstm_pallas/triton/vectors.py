"""Launches of the bodies of vectors/ in Triton. A CTA has one chunk, as a vector (L,).

chunk_summaries, chunk_gates: grid (NC, B * NH).
stabiliser_scan: grid (1, B * NH); a CTA scans up to 512 chunks of its head at a time.

Triton scans nothing but sums, so the other scans exchange their vectors through global memory, in
log4(L) rounds.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.tiles import block_at, blocks_over, loop, rounded_up
from mlstm_pallas.problem.dimensions import Problem, next_power_of_two
from mlstm_pallas.stages.stage import KernelOptions, Launch, Tiles
from mlstm_pallas.triton.launch import barrier, floats, kernel_call, masked_load
from mlstm_pallas.vectors import chunk_gates as stage
from mlstm_pallas.vectors.scan import Join, Scan

_INF = float("inf")
_SCAN_BLOCK = 512  # chunks that a CTA of stabiliser_scan scans at a time
_RADIX = 4  # vectors that are joined per round
_MOST_STEPS = 8192  # of a chunk, whose vectors a CTA holds in registers
_STEPS_PER_WARP = 256


@dataclasses.dataclass(frozen=True)
class _Scan(Scan):
    """Scans of vectors (L,), whose results per chunk are scalars.

    Attributes:
      workspace: references to vectors (L,) in global memory, which only this CTA reads.
    """

    workspace: Sequence[Any]
    call: Launch

    @property
    def step(self) -> Array:
        return lax.iota(jnp.int32, self.L)

    def _neighbours(self, x: Sequence[Array], edges: Sequence[Any]) -> Callable[[int], list[Array]]:
        """A function of a distance, which returns x that many steps before each, or the edges."""
        barrier(self.call)  # the vectors of the last round have been read
        for ref, y in zip(self.workspace, x, strict=False):
            ref[...] = y
        barrier(self.call)

        def at(distance: int) -> list[Array]:
            source = lax.max(self.step - distance, np.int32(0))
            pairs = zip(self.workspace, edges, strict=False)
            return [jnp.where(self.step >= distance, ref[source], e) for ref, e in pairs]

        return at

    def running(self, join: Join, x: Sequence[Array], identities: Sequence[float]) -> Any:
        reach = 1
        while reach < self.L:
            at = self._neighbours(x, identities)
            distances = [k * reach for k in reversed(range(1, _RADIX)) if k * reach < self.L]
            x = functools.reduce(join, [*map(at, distances), x])
            reach *= _RADIX
        return x

    def last(self, *x: Array) -> Any:
        return [jnp.sum(jnp.where(self.step == self.L - 1, y, 0.0)) for y in x]

    def shifted(self, x: Array, edge: Array) -> Array:
        return self._neighbours([x], [edge])(1)[0]


def _kernel(
    steps,  # (L,) each; may be absent
    m,  # (NC + 1,) m at the chunk boundaries; absent if the body has none
    per_step,  # out (L,) each
    per_chunk,  # out (NC,) each; without m padded, and in processing order
    workspace,  # out (L,) each
    *,
    call,
    body,
):
    p, c = call.problem, pl.program_id(0)
    scan = _Scan(p.L, workspace, call)
    at = p.memory_index(scan.step, p.L) if p.reverse else slice(None)
    vectors = [None if ref is None else ref[at] for ref in steps]
    if m is None:
        c, results = p.memory_index(c, p.NC), body(scan, *vectors)
    else:
        ends = m[c], m[c + 1]
        results = body(scan, *vectors, m=ends[::-1] if p.reverse else ends)
    outputs = zip((per_step, per_chunk), (at, c), (results[0], scan.last(*results[1])), strict=True)
    for refs, index, values in outputs:
        for ref, x in zip(refs, values, strict=True):
            ref[index] = x


def _scan_block(p: Problem) -> int:
    return min(next_power_of_two(p.NC), _SCAN_BLOCK)


def vector_call(
    body: Callable[..., Any],
    steps: Sequence[Any],
    outputs: Sequence[str],
    *,
    name: str,
    call: Launch,
    m: Any = None,
) -> tuple[Any, ...]:
    """``vectors.scan.vector_call``."""
    p, vec = call.problem, floats(call.problem.BNH, call.problem.S)
    summaries = floats(p.BNH, rounded_up(p.NC, _scan_block(p)))
    y = kernel_call(
        _kernel,
        dict(steps=(tuple(steps), "bt"), m=(m, "b0")),
        dict(
            per_step=(tuple(jax.ShapeDtypeStruct(vec.shape, x) for x in outputs), "bt"),
            per_chunk=((summaries,) * 2 if m is None else (floats(p.BNH, p.NC),), "b0"),
            workspace=((vec,) * 3, "bt"),
        ),
        call=call,
        name=name,
        body=body,
    )
    return jax.tree.map(call.chunks, y["per_step"]), y["per_chunk"], m


def _stabiliser_scan_kernel(
    scaG,  # (padded NC,) what a chunk adds to m, -inf where it has a reset
    scaA,  # (padded NC,) m after the chunk from an empty state
    scaM_initial,  # ()
    scaM,  # out (NC + 1,)
    workspace,  # out two (block,)
    *,
    call,
    body,
    block,
):
    p, scan = call.problem, _Scan(block, workspace, call)

    def step(j, before):
        chunks = block_at(j, block)
        boundary = chunks.start + scan.step + np.int32(1)
        inside = boundary <= p.NC
        g, a = (masked_load(x.at[chunks], inside) for x in (scaG, scaA))
        a = jnp.where(inside, a, -_INF)
        after = body(scan, g, a, before)
        # Beyond the last boundary m stays as it is, so all that is stored there is the same.
        scaM[p.memory_index(lax.min(boundary, np.int32(p.NC)), p.NC + 1)] = after
        return scan.last(after)[0]

    initial = scaM_initial[...]
    scaM[p.memory_index(0, p.NC + 1)] = initial
    loop(blocks_over(p.NC, block), step, initial)


def scan_chunks(
    body: Callable[..., Array],
    summaries: Sequence[Array],
    m_initial: Array,
    *,
    call: Launch,
    after: bool,
) -> Array:
    """``vectors.scan.scan_chunks``."""
    p, block, (g, a) = call.problem, _scan_block(call.problem), summaries
    m: Array = kernel_call(
        _stabiliser_scan_kernel,
        dict(scaG=(g, "b0"), scaA=(a, "b0"), scaM_initial=(m_initial, "b")),
        dict(
            scaM=(floats(p.BNH, p.NC + 1), "b0"),
            workspace=((floats(p.BNH, block),) * 2, "b0"),
        ),
        grid=(1, p.BNH),
        call=call,
        body=body,
        block=block,
    )["scaM"]
    return call.processing_order(m)[:, 1:] if after else m


chunk_gates = functools.partial(stage.chunk_gates, vector_call=vector_call, scan_chunks=scan_chunks)


@dataclasses.dataclass(frozen=True)
class VectorsTiles(Tiles):
    num_warps: int = 1

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, options: KernelOptions) -> Self | None:
        return None if p.L > _MOST_STEPS else cls(min(max(p.L // _STEPS_PER_WARP, 1), 16))
