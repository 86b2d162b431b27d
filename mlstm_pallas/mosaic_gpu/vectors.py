"""Launches of the bodies of vectors/ on Mosaic GPU; one warpgroup per CTA.

chunk_summaries, chunk_gates, m_summaries, step_gradients: grid (B * NH * S / 512, rounded up). A
CTA owns 512 consecutive steps, which are one or several chunks; ``prefix_scans.py`` has the
prefix scans over the steps of a chunk, and which steps a thread holds.
stabiliser_scan, m_carry_scan: grid (B * NH). A CTA reads the summaries of up to 512 chunks of its
head at a time. It does not run for sequences of up to 16 chunks whose steps fill whole CTAs,
because a launch takes longer than joining their summaries in each CTA of the next kernel.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.tiles import blocks_over, loop, rounded_up
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.mosaic_gpu.common.launch import WG_ROWS, block, float32, mosaic_call, unravel
from mlstm_pallas.mosaic_gpu.common.limits import HopperTiles
from mlstm_pallas.mosaic_gpu.common.prefix_scans import (
    LANES,
    STEPS,
    Slots,
    TilePrefixScan,
    across,
    chunk_columns,
    load_rows,
    scan_buffers,
    store_rows,
)
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.vectors import chunk_gates as gates_stage
from mlstm_pallas.vectors import step_gradients as gradients_stage
from mlstm_pallas.vectors.scan import vector_of

_BLOCK = LANES * STEPS  # steps of a CTA, or chunks that the stabiliser scan joins at a time
_FEW_CHUNKS = 16  # per sequence; a CTA joins so few itself


class _Stabilisers(NamedTuple):
    """Where a CTA finds m at the boundaries of its chunks."""

    m_precomputed: Any = None  # (B * NH, NC + 1) m at the chunk boundaries; None: from the others
    summaries: Any = None  # two (B * NH, padded NC); None unless the CTAs join them
    m_after: Any = None  # (B * NH, padded NC), of the prefix scan over chunks; None unless it ran
    m_initial: Any = None  # (B * NH,); None if m is precomputed
    join: Any = None  # the body of that prefix scan; no array, and absent in the kernel


def _cta_chunks(p):
    """Whether each chunk of a CTA exists, its head, and its index in memory.

    One beyond the last chunk has the head and the index of the last one.
    """
    chunks, last = _BLOCK // p.L, p.BNH * p.NC - 1
    first = lax.axis_index("cta") * chunks
    indices = [first + chunk for chunk in range(chunks)]
    return [(x <= last, *unravel(lax.min(x, np.int32(last)), p.NC)) for x in indices]


class _OneChunk:
    """The ``PrefixScan`` of a body that appends one chunk."""

    @staticmethod
    def running(join, x, identities):
        return x


def _bounds(stabilisers_gmem: _Stabilisers, chunks, join, p):
    """m before and after each chunk of a CTA."""
    m_precomputed_gmem, summaries_gmem, m_after_gmem, m_initial_gmem, _ = stabilisers_gmem
    if m_after_gmem is not None:

        def before(head, t):
            inside, previous = t > 0, lax.max(t - 1, np.int32(0))
            return jnp.where(inside, m_after_gmem[head, previous], m_initial_gmem[head])

        in_order = [(head, p.memory_index(c, p.NC)) for _, head, c in chunks]
        return [(before(head, t), m_after_gmem[head, t]) for head, t in in_order]
    if m_precomputed_gmem is not None:
        ends = [
            (m_precomputed_gmem[head, c], m_precomputed_gmem[head, c + 1]) for _, head, c in chunks
        ]
    else:
        _, head, first = chunks[0]
        m = [m_initial_gmem[head]]
        summaries = ([x[head, t] for t in range(p.NC)] for x in summaries_gmem)
        for summary in zip(*summaries, strict=True):
            m.append(join(_OneChunk, *summary, m[-1]))
        if p.reverse:
            m.reverse()

        def at(j):
            x = m[j]
            for c in range(len(chunks), p.NC, len(chunks)):
                x = jnp.where(first == c, m[c + j], x)
            return x

        ends = list(itertools.pairwise(map(at, range(len(chunks) + 1))))
    return [x[::-1] for x in ends] if p.reverse else ends


def _kernel(
    steps_gmem,  # (CTAs, rows, STEPS) or (groups, n, CTAs, rows, STEPS) each; may be absent
    chunks_gmem,  # (B * NH, NC) each
    stabilisers_gmem,  # _Stabilisers; absent if the body has no m
    per_step_gmem,  # out (CTAs, rows, STEPS) each
    per_chunk_gmem,  # out (B * NH, NC) each; without per_step padded, and in processing order
    m_states_gmem,  # out (B * NH, NC + 1); absent without m, and if it is precomputed
    *,
    body,
    join,
    p,
    **scans_smem,
):
    cta, chunks = lax.axis_index("cta"), _cta_chunks(p)
    scan = TilePrefixScan(p.L // STEPS, Slots([*scans_smem.values()]), p.reverse)

    def vector(ref):
        if ref is None or len(ref.shape) == 3:
            return ref if ref is None else load_rows(ref.at[cta])
        _, n, ctas, *_ = ref.shape
        group, index = unravel(cta, ctas)
        places = (p.memory_index(j, n) for j in range(n))
        return vector_of([load_rows(ref.at[group, x, index]) for x in places])

    def by_chunk(values):
        """Tiles with the values of each chunk at its steps."""
        return map(across, chunk_columns(values, LANES)) if values else ()

    if stabilisers_gmem is not None:
        bounds = _bounds(stabilisers_gmem, chunks, join, p)
        body = functools.partial(body, m=tuple(by_chunk(list(zip(*bounds, strict=True)))))
    values = [[ref[head, c] for _, head, c in chunks] for ref in chunks_gmem]
    per_step, per_chunk = body(scan, *map(vector, steps_gmem), *by_chunk(values))
    for ref, x in zip(per_step_gmem, per_step, strict=True):
        store_rows(ref.at[cta], x)
    ends = scan.ends(*per_chunk) if per_chunk else []

    def store(j, head, c):
        place = c if per_step_gmem else p.memory_index(c, p.NC)
        for ref, x in zip(per_chunk_gmem, ends, strict=True):
            ref[head, place] = x[j]
        if m_states_gmem is not None:
            m_states_gmem[head, c if p.reverse else c + 1] = bounds[j][1]

            @pl.when(p.memory_index(c, p.NC) == 0)
            def store_initial():
                initial = stabilisers_gmem.m_initial[head]
                m_states_gmem[head, p.memory_index(0, p.NC + 1)] = initial

    for j, (exists, *position) in enumerate(chunks):
        pl.when(exists)(functools.partial(store, j, *position))


def _whole_heads(p: Problem) -> bool:
    """Whether no CTA has steps of two heads."""
    return p.S % _BLOCK == 0


def _by_cta(p: Problem) -> tuple[int, int, int]:
    """The shape of a vector of all steps: CTAs, rows and steps; the last CTA may have fewer."""
    return blocks_over(p.BNH * p.S, _BLOCK), LANES, STEPS


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
    p, shape = call.problem, _by_cta(call.problem)
    if isinstance(m, Array):
        m = _Stabilisers(m)

    def by_cta(vec):
        if vec.ndim == 2:
            return jnp.pad(vec.reshape(-1), (0, math.prod(shape) - vec.size)).reshape(shape)
        if _whole_heads(p):
            return vec.reshape(*vec.shape[:2], -1, *shape[1:])
        return jax.vmap(by_cta, 1)(vec)[None]

    def by_chunk(vec):
        return vec.reshape(-1)[: p.BNH * p.S].reshape(p.BNH, p.NC, p.L)

    computed = m is not None and m.m_precomputed is None
    chunk_values = float32(p.BNH, p.NC if outputs else rounded_up(p.NC, _BLOCK))
    y = mosaic_call(
        functools.partial(_kernel, body=body, join=m and m.join, p=p),
        name=name,
        grid={"cta": shape[0]},
        outputs={
            "per_step_gmem": [jax.ShapeDtypeStruct(shape, x) for x in outputs],
            "per_chunk_gmem": [chunk_values] * per_chunk,
            "m_states_gmem": float32(p.BNH, p.NC + 1) if computed else None,
        },
        scratch=call.tiles.scratch(p, None),
        infer_layouts=False,
        approx_math=False,
    )(
        steps_gmem=jax.tree.map(by_cta, tuple(steps)),
        chunks_gmem=tuple(chunks),
        stabilisers_gmem=m and m._replace(join=None),
    )
    per_step, per_chunk, m_states = y.values()
    return map(by_chunk, per_step), per_chunk, m_states if computed else m and m.m_precomputed


def _chunk_scan_kernel(
    summaries_gmem,  # (B * NH, padded NC / STEPS, STEPS) each
    m_initial_gmem,  # (B * NH,)
    m_gmem,  # out (B * NH, padded NC / STEPS, STEPS) after each chunk; undefined beyond NC
    scan_smem,  # see scan_buffers
    *,
    body,
):
    head, scan = lax.axis_index("head"), TilePrefixScan(LANES, Slots([scan_smem]))

    def one(j, before):
        at = head, block(j, LANES)
        after = body(scan, *(load_rows(y.at[at]) for y in summaries_gmem), before)
        store_rows(m_gmem.at[at], after)
        [[last]] = scan.ends(after)
        return last

    loop(m_gmem.shape[1] // LANES, one, m_initial_gmem[head])


def scan_chunks(
    body: Callable[..., Array],
    summaries: Sequence[Array],
    m_initial: Array,
    *,
    name: str,
    call: Launch,
    after: bool = False,
) -> Any:
    """``vectors.scan.scan_chunks``; unless ``after``, what ``_bounds`` reads."""
    p = call.problem
    if _whole_heads(p) and p.NC <= _FEW_CHUNKS and not after:
        return _Stabilisers(summaries=summaries, m_initial=m_initial, join=body)
    by_rows = p.BNH, summaries[0].shape[1] // STEPS, STEPS
    m = mosaic_call(
        functools.partial(_chunk_scan_kernel, body=body),
        name=name,
        grid={"head": p.BNH},
        outputs={"m_gmem": float32(*by_rows)},
        scratch={"scan_smem": scan_buffers(2, rows=LANES, chunk_rows=LANES)[0]},
        infer_layouts=False,
    )(summaries_gmem=[y.reshape(by_rows) for y in summaries], m_initial_gmem=m_initial)["m_gmem"]
    m = m.reshape(summaries[0].shape)
    return m[:, : p.NC] if after else _Stabilisers(m_after=m, m_initial=m_initial)


chunk_gates, step_gradients = (
    functools.partial(stage, vector_call=vector_call, scan_chunks=scan_chunks)
    for stage in (gates_stage.chunk_gates, gradients_stage.step_gradients)
)


class VectorsTiles(HopperTiles):
    def divides(self, p: Problem) -> bool:
        return p.L % 64 == 0 and p.L <= _BLOCK

    def grid(self, p: Problem) -> tuple[int, ...]:
        return _by_cta(p)[:1]

    def scratch(self, p: Problem, dtype) -> dict[str, Any]:
        """Shared memory of the scans of all bodies."""
        n = p.L // WG_ROWS  # tiles of a chunk, whose sums ``step_gradients`` adds at once
        arrays = 2, 3, 4, *[n] * (n > 4)
        buffers = scan_buffers(*arrays, rows=LANES, chunk_rows=p.L // STEPS)
        return {f"scan{n}": buffer for n, buffer in enumerate(buffers)}
