"""Launches of the bodies of vectors/ in Triton. A CTA has one chunk, as a vector (L,).

chunk_summaries, chunk_gates, m_summaries, step_gradients: grid (NC, B * NH).
stabiliser_scan, m_carry_scan: grid (1, B * NH); a CTA scans up to 512 chunks of its head at a time.

Of prefix scans Triton has only sums, so the others exchange their vectors through global memory, in
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
from mlstm_pallas.launches.kernel_tiles import KernelSpec, Tiles
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.problem.dimensions import Problem, next_power_of_two
from mlstm_pallas.triton.launch import barrier, floats, kernel_call, masked_load
from mlstm_pallas.vectors import chunk_gates as gates_stage
from mlstm_pallas.vectors import step_gradients as gradients_stage
from mlstm_pallas.vectors.scan import Join, PrefixScan

_SCAN_BLOCK = 512  # chunks that a CTA scans at a time
_RADIX = 4  # vectors that are joined per round
_MOST_STEPS = 8192  # of a chunk, whose vectors a CTA holds in registers
_STEPS_PER_WARP = 256


@dataclasses.dataclass(frozen=True)
class _BlockPrefixScan(PrefixScan):
    """Prefix scans of vectors (L,), whose results per chunk are scalars.

    Attributes:
      workspace: references to vectors (L,) in global memory, which only this CTA reads.
    """

    workspace: Sequence[Any]
    call: Launch

    def _exchange(self, *x: Array) -> None:
        barrier(self.call)  # the vectors of the last round have been read
        for ref, y in zip(self.workspace, x, strict=False):
            ref[...] = y
        barrier(self.call)

    def _neighbours(self, x: Sequence[Array], edges: Sequence[Any]) -> Callable[[int], list[Array]]:
        """A function of a distance, which returns x that many steps before each, or the edges."""
        self._exchange(*x)

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

    def against(self, function: Callable[..., Array], *x: Array) -> Array:
        def flipped(*x: Array) -> list[Array]:
            self._exchange(*x)
            return [ref[self.L - 1 - self.step] for ref, _ in zip(self.workspace, x, strict=False)]

        return flipped(function(self, *flipped(*x)))[0]

    def last(self, *x: Array) -> Any:
        return [jnp.sum(jnp.where(self.step == self.L - 1, y, 0.0)) for y in x]

    def shifted(self, x: Array, edge: Any) -> Array:
        return self._neighbours([x], [edge])(1)[0]


def _kernel(
    chunks,  # () each
    m,  # (NC + 1,) m at the chunk boundaries; absent if the body has none
    per_step,  # out (L,) each
    per_chunk,  # out (NC,) each; without per_step padded, and in processing order
    workspace,  # out (L,) each
    *,
    call,
    body,
    **steps,  # (L,) or (n, L) each; may be absent
):
    p, c = call.problem, pl.program_id(0)
    scan = _BlockPrefixScan(p.L, workspace, call)
    at = p.memory_index(scan.step, p.L) if p.reverse else slice(None)

    def load(ref):
        if ref is None or len(ref.shape) == 1:
            return ref if ref is None else ref[at]

        def vector(index, mask):
            place = jnp.asarray(p.memory_index(index, ref.shape[0]), jnp.int32)
            return masked_load(ref.at[place, at], mask)

        return vector

    if m is not None:
        ends = m[c], m[c + 1]
        body = functools.partial(body, m=ends[::-1] if p.reverse else ends)
    results = body(scan, *map(load, steps.values()), *(ref[...] for ref in chunks))
    if not per_step:
        c = p.memory_index(c, p.NC)
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
    per_chunk: int = 0,
    *,
    name: str,
    call: Launch,
    chunks: Sequence[Array] = (),
    m: Any = None,
) -> tuple[Any, ...]:
    """``vectors.scan.vector_call``."""
    p, vec = call.problem, floats(call.problem.BNH, call.problem.S)
    chunk_values = floats(p.BNH, p.NC if outputs else rounded_up(p.NC, _scan_block(p)))
    vectors = {
        f"steps{n}": (x, "bt" if x is None or x.ndim == 2 else "b0t") for n, x in enumerate(steps)
    }
    y = kernel_call(
        _kernel,
        vectors | dict(chunks=(tuple(chunks), "bc"), m=(m, "b0")),
        dict(
            per_step=(tuple(jax.ShapeDtypeStruct(vec.shape, x) for x in outputs), "bt"),
            per_chunk=((chunk_values,) * per_chunk, "b0"),
            workspace=((vec,) * 3, "bt"),
        ),
        call=call,
        name=name,
        body=body,
    )
    return jax.tree.map(call.chunks, y["per_step"]), y["per_chunk"], m


def _chunk_scan_kernel(
    summaries,  # (padded NC,) each
    scaM_initial,  # ()
    scaM,  # out (NC + 1,)
    workspace,  # out two (block,)
    *,
    call,
    body,
    block,
):
    p, scan = call.problem, _BlockPrefixScan(block, workspace, call)

    def step(j, before):
        chunks = block_at(j, block)
        boundary = chunks.start + scan.step + np.int32(1)
        inside = boundary <= p.NC
        after = body(scan, *(masked_load(x.at[chunks], inside) for x in summaries), before)
        last = lax.min(chunks.start + np.int32(block), np.int32(p.NC))
        m_last = jnp.sum(jnp.where(boundary == last, after, 0.0))
        # Beyond the last boundary the same is stored there again.
        at = p.memory_index(lax.min(boundary, np.int32(p.NC)), p.NC + 1)
        scaM[at] = jnp.where(inside, after, m_last)
        return m_last

    initial = scaM_initial[...]
    scaM[p.memory_index(0, p.NC + 1)] = initial
    loop(blocks_over(p.NC, block), step, initial)


def scan_chunks(
    body: Callable[..., Array],
    summaries: Sequence[Array],
    m_initial: Array,
    *,
    name: str,
    call: Launch,
    after: bool = False,
) -> Array:
    """``vectors.scan.scan_chunks``."""
    p, block = call.problem, _scan_block(call.problem)
    m: Array = kernel_call(
        _chunk_scan_kernel,
        dict(summaries=(tuple(summaries), "b0"), scaM_initial=(m_initial, "b")),
        dict(
            scaM=(floats(p.BNH, p.NC + 1), "b0"),
            workspace=((floats(p.BNH, block),) * 2, "b0"),
        ),
        grid=(1, p.BNH),
        call=call,
        name=name,
        body=body,
        block=block,
    )["scaM"]
    return call.processing_order(m)[:, 1:] if after else m


chunk_gates, step_gradients = (
    functools.partial(stage, vector_call=vector_call, scan_chunks=scan_chunks)
    for stage in (gates_stage.chunk_gates, gradients_stage.step_gradients)
)


@dataclasses.dataclass(frozen=True)
class VectorsTiles(Tiles):
    num_warps: int = 1

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, kernel: KernelSpec) -> Self | None:
        return None if p.L > _MOST_STEPS else cls(min(max(p.L // _STEPS_PER_WARP, 1), 16))
