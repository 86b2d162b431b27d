"""chunk_gates on Mosaic GPU: the gates and the stabilisers of ``stages/chunk_gates.py``.

Three kernels of one warpgroup per CTA:

chunk_summaries: what each chunk does to m, from the gate pre-activations.
stabiliser_scan: m after each chunk. Grid (B * NH); a CTA reads the summaries of up to 512 chunks of
its head at a time. It does not run for sequences of up to 16 chunks whose steps fill whole CTAs,
because a launch takes longer than joining their summaries in each CTA of chunk_gates.
chunk_gates: the gates of every step, from the pre-activations and m, and in the backward pass their
flags (``gates.join_flags``). It scans each chunk again, which is faster than to write and read the
scans of chunk_summaries. If m is known, it is the only kernel.

The grid of chunk_summaries and chunk_gates is (B * NH * S / 512, rounded up): a CTA owns 512
consecutive steps, which are one or several chunks. ``chunk_scans.py`` has the scans over the steps
of a chunk, and which steps a thread holds.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas import gates
from mlstm_pallas.formulas.gates import (
    ChunkGates,
    LocalGates,
    branchless_log1p,
    split_at,
    stabiliser_sources,
    two_sum,
)
from mlstm_pallas.formulas.tiles import blocks_over, loop, rounded_up
from mlstm_pallas.mosaic_gpu.common.chunk_scans import (
    LANES,
    STEPS,
    Scan,
    across,
    chunk_columns,
    load_rows,
    rows_layout,
    scan_buffer,
    store_rows,
)
from mlstm_pallas.mosaic_gpu.common.launch import block, float32, mosaic_call, plgpu, unravel
from mlstm_pallas.mosaic_gpu.common.limits import HopperTiles
from mlstm_pallas.problem.dimensions import InputGate, Problem
from mlstm_pallas.stages.chunk_gates import Operands
from mlstm_pallas.stages.stage import KernelOptions, Launch

_INF = float("inf")
_BLOCK = LANES * STEPS  # steps of a CTA, or chunks that the stabiliser scan joins at a time
_FEW_CHUNKS = 16  # per sequence; chunk_gates joins so few itself


def _least_power_of_two(x: Array) -> Array:
    """The least power of two that is at least x, a positive normal number."""
    up = (lax.bitcast_convert_type(x, jnp.int32) + np.int32(0x7FFFFF)) & np.int32(0x7F800000)
    return lax.bitcast_convert_type(up, jnp.float32)


def _local_gates(vecs_gmem, scans_smem, p, input_gate):
    """``gates.local_gates`` of a CTA's chunks, and the steps' arguments of ``gates.join_flags``.

    vecs_gmem: pre-activations i and f, and segment_starts, which may be absent, (CTAs, rows, STEPS)
      each.
    """
    cta, scan, is_start = lax.axis_index("cta"), _scan(p), None
    i_gmem, f_gmem, segment_starts_gmem = vecs_gmem
    if segment_starts_gmem is not None:
        is_start = load_rows(segment_starts_gmem.at[cta]) > 0
    f = load_rows(f_gmem.at[cta])
    log_i, log_f, reset = gates.log_gates(
        load_rows(i_gmem.at[cta]), f, input_gate, branchless_log1p
    )
    is_boundary = reset if is_start is None else reset | is_start

    def join_bounds(left, x):
        join = jnp.minimum, jnp.maximum, jnp.maximum, jnp.add
        return [function(*pair) for function, *pair in zip(join, left, x, strict=True)]

    def add(left, x):
        return [a + y for a, y in zip(left, x, strict=True)]

    stored, decay = log_i > -_INF, -log_f
    each = jnp.where(stored, log_i, _INF), jnp.where(stored, log_i, -_INF), decay, decay
    bounds = scan.running(join_bounds, each, (_INF, -_INF, 0.0, 0.0), scans_smem["bounds"])
    ends = scan.chunk_ends(scan.last_columns(*bounds), scans_smem["ends"].at[0])
    i_min, i_max, largest_decay, total_decay = chunk_columns(ends, LANES)
    if is_start is not None or input_gate is InputGate.SIGMOID:
        i_min, i_max = jnp.minimum(i_min, 0.0), jnp.maximum(i_max, 0.0)  # m = 0 is a source as well
    grid = gates.exact_sum_grid(largest_decay, p.L, _least_power_of_two)
    offset_unit = gates.reset_offset(i_min, i_max, total_decay, _least_power_of_two)

    ones = plgpu.layout_cast(jnp.ones(log_i.shape, jnp.float32), rows_layout())
    split = *split_at(log_f, across(grid)), jnp.where(is_boundary, ones, 0.0)
    hi, lo, count = scan.running(add, split, (0.0,) * 3, scans_smem["sums"])
    b, offset = two_sum(hi, lo), count * across(offset_unit)
    e, largest = stabiliser_sources(log_i, log_f, b, offset, reset, is_start, input_gate)
    if input_gate is not InputGate.SIGMOID:
        sources, identities = (*largest, count), (-_INF, 0.0, -1.0)
        max_hi, max_lo, _ = scan.running(
            gates.largest_since_reset, sources, identities, scans_smem["maxima"]
        )
        largest = max_hi, max_lo
    return LocalGates(b, e, largest, offset), (f, log_f, is_boundary, is_start)


def _scan(p):
    return Scan(p.L // STEPS, p.reverse)


def _cta_chunks(p):
    """Whether each chunk of a CTA exists, its head, and its index in memory.

    One beyond the last chunk has the head and the index of the last one.
    """
    chunks, last = _BLOCK // p.L, p.BNH * p.NC - 1
    first = lax.axis_index("cta") * chunks
    indices = [first + chunk for chunk in range(chunks)]
    return [(x <= last, *unravel(lax.min(x, np.int32(last)), p.NC)) for x in indices]


def _store_per_chunk(chunks, store):
    for j, (exists, *position) in enumerate(chunks):
        pl.when(exists)(functools.partial(store, j, *position))


def _summaries_kernel(
    vecs_gmem,  # see _local_gates
    g_gmem,  # out (B * NH, padded NC), in processing order, as ``stabiliser_scan`` reads it
    a_gmem,  # out (B * NH, padded NC), likewise
    *,
    p,
    input_gate,
    **scans_smem,  # see ChunkGatesTiles.scratch
):
    scan, (local, _) = _scan(p), _local_gates(vecs_gmem, scans_smem, p, input_gate)
    b_hi, b_lo, max_hi, max_lo, offset = scan.last_columns(
        *local.vecB, *local.vecEmax, local.vecOffset
    )
    summaries = gates.summary((b_hi, b_lo), (max_hi, max_lo), offset)
    ends = scan.chunk_ends(summaries, scans_smem["ends"].at[1])

    def store(j, head, c):
        for ref, x in zip((g_gmem, a_gmem), ends, strict=True):
            ref[head, p.memory_index(c, p.NC)] = x[j]

    _store_per_chunk(_cta_chunks(p), store)


def _stabilisers(m_precomputed_gmem, summaries_gmem, m_after_gmem, m_initial_gmem, chunks, p):
    """m before and after each chunk of a CTA; the arrays are those of ``_gates_kernel``."""
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
        for added, largest in zip(*summaries, strict=True):
            m.append(jnp.maximum(m[-1] + added, largest))
        if p.reverse:
            m.reverse()

        def at(j):
            x = m[j]
            for c in range(len(chunks), p.NC, len(chunks)):
                x = jnp.where(first == c, m[c + j], x)
            return x

        ends = list(itertools.pairwise(map(at, range(len(chunks) + 1))))
    return [x[::-1] for x in ends] if p.reverse else ends


def _gates_kernel(
    vecs_gmem,  # see _local_gates
    m_precomputed_gmem,  # (B * NH, NC + 1) m at the chunk boundaries; absent if it is computed
    summaries_gmem,  # g, a of ``_summaries_kernel``; absent unless the CTAs join them
    m_after_gmem,  # (B * NH, padded NC), from ``stabiliser_scan``; absent unless it ran
    m_initial_gmem,  # (B * NH,); absent if m is precomputed
    per_step_gmem,  # out, seven (CTAs, rows, STEPS): e, u (hi and lo), w, m, abar
    flags_gmem,  # out (CTAs, rows, STEPS) int32; absent in the forward pass
    gamma_gmem,  # out (B * NH, NC)
    m_states_gmem,  # out (B * NH, NC + 1); absent if m is precomputed
    *,
    p,
    input_gate,
    **scans_smem,  # see ChunkGatesTiles.scratch
):
    cta, scan, chunks = lax.axis_index("cta"), _scan(p), _cta_chunks(p)
    bounds = _stabilisers(
        m_precomputed_gmem, summaries_gmem, m_after_gmem, m_initial_gmem, chunks, p
    )
    m_start, m_end = chunk_columns(list(zip(*bounds, strict=True)), LANES)
    local, log_gates = _local_gates(vecs_gmem, scans_smem, p, input_gate)
    columns = scan.last_columns(*local.vecB, local.vecOffset)
    ends = scan.chunk_ends(columns, scans_smem["ends"].at[1])
    b_hi, b_lo, offset = chunk_columns(ends, LANES)
    pair, decay = gates.join_ends(b_hi, b_lo, offset, m_start, m_end)
    u, w, m, abar = gates.join_steps(
        local, across(m_start), (across(pair[0]), across(pair[1])), input_gate
    )
    for ref, x in zip(per_step_gmem, (*local.vecE, *u, w, m, abar), strict=True):
        store_rows(ref.at[cta], x)
    if flags_gmem is not None:
        # With the sigmoid gate m is a constant without a layout.
        m = plgpu.layout_cast(m, rows_layout())
        m_before = scan.shifted(m, m_start, scans_smem["sums"])
        store_rows(flags_gmem.at[cta], gates.join_flags(local.vecE, u, m, m_before, *log_gates))
    (decays,) = scan.chunk_ends([decay], scans_smem["ends"].at[0])

    def store(j, head, c):
        gamma_gmem[head, c] = decays[j]
        if m_states_gmem is not None:
            m_states_gmem[head, c if p.reverse else c + 1] = bounds[j][1]

            @pl.when(p.memory_index(c, p.NC) == 0)
            def store_initial():
                m_states_gmem[head, p.memory_index(0, p.NC + 1)] = m_initial_gmem[head]

    _store_per_chunk(chunks, store)


def _by_cta(p: Problem) -> tuple[int, int, int]:
    """The shape of a vector of all steps: CTAs, rows and steps; the last CTA may have fewer."""
    return blocks_over(p.BNH * p.S, _BLOCK), LANES, STEPS


def _launch(
    kernel: Callable[..., None],
    name: str,
    outputs: Mapping[str, Any],
    x: Operands,
    input_gate: InputGate,
    call: Launch,
    **inputs,
) -> dict[str, Any]:
    """Runs a kernel."""
    p, shape = call.problem, _by_cta(call.problem)

    def by_cta(vec):
        return jnp.pad(vec.reshape(-1), (0, math.prod(shape) - vec.size)).reshape(shape)

    return mosaic_call(
        functools.partial(kernel, p=p, input_gate=input_gate),
        name=name,
        grid={"cta": shape[0]},
        outputs=outputs,
        scratch=call.tiles.scratch(p, x.vecI.dtype, KernelOptions(input_gate=input_gate)),
        interpret=call.interpret,
        infer_layouts=False,
        approx_math=False,
    )(vecs_gmem=jax.tree.map(by_cta, (x.vecI, x.vecF, x.segment_starts)), **inputs)


def chunk_gates(
    x: Operands,
    *,
    input_gate: InputGate = InputGate.EXP,
    with_flags: bool = False,
    only_boundaries: bool = False,
    call: Launch,
) -> ChunkGates | tuple[Array, Array]:
    """Runs the stage: ``stages/chunk_gates.py``."""
    p, scaM_states = call.problem, x.scaM_states
    if scaM_states is None and input_gate is InputGate.SIGMOID:
        scaM_states = jnp.zeros((p.BNH, p.NC + 1), x.scaM_initial.dtype)
    m: dict[str, Any] = dict.fromkeys(("m_initial_gmem", "summaries_gmem", "m_after_gmem"))
    if scaM_states is None:
        m["m_initial_gmem"] = x.scaM_initial
        summaries = dict.fromkeys(("g_gmem", "a_gmem"), float32(p.BNH, rounded_up(p.NC, _BLOCK)))
        y = _launch(_summaries_kernel, "chunk_summaries", summaries, x, input_gate, call)
        g, a = y.values()
        whole_head = p.S % _BLOCK == 0  # no CTA has steps of two heads
        if only_boundaries:
            after = stabiliser_scan(g, a, x.scaM_initial, call)
            return after[:, : p.NC], g[:, : p.NC]
        if whole_head and p.NC <= _FEW_CHUNKS:
            m["summaries_gmem"] = g, a
        else:
            m["m_after_gmem"] = stabiliser_scan(g, a, x.scaM_initial, call)
    outputs = {
        "per_step_gmem": [float32(*_by_cta(p))] * 7,
        "flags_gmem": jax.ShapeDtypeStruct(_by_cta(p), jnp.int32) if with_flags else None,
        "gamma_gmem": float32(p.BNH, p.NC),
        "m_states_gmem": float32(p.BNH, p.NC + 1) if scaM_states is None else None,
    }
    y = _launch(
        _gates_kernel,
        "chunk_gates",
        outputs,
        x,
        input_gate,
        call,
        m_precomputed_gmem=scaM_states,
        **m,
    )

    def by_chunk(vec):
        return vec.reshape(-1)[: p.BNH * p.S].reshape(p.BNH, p.NC, p.L)

    per_step, flags, gamma, m_states = y.values()
    (*e, u_hi, u_lo, w, m_steps, abar), flags = jax.tree.map(by_chunk, (per_step, flags))
    m_states = m_states if scaM_states is None else scaM_states
    return ChunkGates((e[0], e[1]), (u_hi, u_lo), w, m_steps, abar, gamma, m_states, flags)


def _stabiliser_scan_kernel(
    g_gmem,  # (B * NH, padded NC / STEPS, STEPS) what a chunk adds to m; -inf where it has a reset
    a_gmem,  # (B * NH, padded NC / STEPS, STEPS) m of the chunk alone
    m_initial_gmem,  # (B * NH,)
    m_gmem,  # out (B * NH, padded NC / STEPS, STEPS) after each chunk
    sums_smem,  # see scan_buffer
    ends_smem,  # see chunk_ends
):
    head, scan = lax.axis_index("head"), Scan(LANES)

    def one(j, before):
        at = head, block(j, LANES)
        summaries = [load_rows(y.at[at]) for y in (g_gmem, a_gmem)]
        added, largest = scan.running(gates.join_summaries, summaries, (0.0, -_INF), sums_smem)
        after = jnp.maximum(added + before, largest)
        store_rows(m_gmem.at[at], after)
        [[last]] = scan.chunk_ends(scan.last_columns(after), ends_smem)
        return last

    loop(g_gmem.shape[1] // LANES, one, m_initial_gmem[head])


def stabiliser_scan(g: Array, a: Array, scaM_initial: Array, call: Launch) -> Array:
    """``gates.stabiliser_scan`` for the exponential input gate, without m_initial, shaped like g.

    g, a: (B * NH, padded NC), as the kernel takes them. What is beyond NC is undefined.
    """
    heads, chunks = g.shape
    by_rows = heads, chunks // STEPS, STEPS
    after: Array = mosaic_call(
        _stabiliser_scan_kernel,
        name="stabiliser_scan",
        grid={"head": heads},
        outputs={"m_gmem": float32(*by_rows)},
        scratch={
            "sums_smem": scan_buffer(2, LANES, LANES),
            "ends_smem": plgpu.SMEM((LANES, 2), jnp.float32),
        },
        interpret=call.interpret,
        infer_layouts=False,
    )(g_gmem=g.reshape(by_rows), a_gmem=a.reshape(by_rows), m_initial_gmem=scaM_initial)["m_gmem"]
    return after.reshape(g.shape)


class ChunkGatesTiles(HopperTiles):
    def divides(self, p: Problem, options: KernelOptions) -> bool:
        return p.L % 64 == 0 and p.L <= _BLOCK

    def grid(self, p: Problem) -> tuple[int, ...]:
        return _by_cta(p)[:1]

    def scratch(self, p: Problem, dtype, options: KernelOptions) -> dict[str, Any]:
        """Shared memory of chunk_summaries and of chunk_gates."""
        buffer = functools.partial(scan_buffer, rows=LANES, chunk_rows=p.L // STEPS)
        return {
            "bounds": buffer(4),
            "sums": buffer(3),
            "maxima": None if options.input_gate is InputGate.SIGMOID else buffer(3),
            "ends": plgpu.SMEM((2, LANES, 4), jnp.float32),  # see chunk_ends
        }
