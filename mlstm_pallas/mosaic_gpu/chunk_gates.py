"""chunk_gates on Mosaic GPU: the gates and the stabilisers of ``stages/chunk_gates.py``.

A CTA of ``chunk_summaries`` or ``chunk_gates`` is one warpgroup and owns 512 consecutive steps,
several chunks; beyond L = 512 it owns a chunk, of up to 2048. Grid (B * NH * S / 512, rounded up).

chunk_summaries: what each chunk does to m, from the gate pre-activations. It does not run where m
is known.
stabiliser_scan: m after each chunk. Grid (B * NH). A CTA is one warpgroup and owns a head. It reads
the summaries of up to 1024 chunks at a time. It does not run where sequences have up to 16 chunks.
chunk_gates: the gates of every step, from the pre-activations and m; in the backward pass their
flags too (``gates.join_flags``). It sums each chunk again, which is faster than to write and read
the sums. Where sequences have few chunks each CTA joins the summaries of its head itself: a launch
takes longer.

``chunk_scans.py`` has the scans over the steps of a chunk, and which steps a thread holds.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas import gates
from mlstm_pallas.gates import (
    ChunkGates,
    LocalGates,
    branchless_log1p,
    pair_max,
    split_at,
    stabiliser_sources,
    two_sum,
)
from mlstm_pallas.mosaic_gpu.chunk_scans import (
    LANES,
    STEPS,
    across,
    last_columns,
    last_of_chunks,
    load_rows,
    of_chunks,
    rows_layout,
    running,
    scan_buffer,
    shifted,
    store_rows,
)
from mlstm_pallas.mosaic_gpu.launch import float32, mosaic_call, plgpu, shared_bytes, write
from mlstm_pallas.mosaic_gpu.limits import HopperTiles
from mlstm_pallas.problem import InputGate, Problem, next_power_of_two
from mlstm_pallas.stage import Launch
from mlstm_pallas.tiles import divide, loop, remainder

_INF = float("inf")
_SCAN_BLOCK = 1024  # chunks that a CTA of the stabiliser scan holds
_FEW_CHUNKS = 16  # of a sequence, which chunk_gates joins itself


def _least_power_of_two(x: jax.Array) -> jax.Array:
    """The least that is no smaller than x, a positive normal number."""
    up = (lax.bitcast_convert_type(x, jnp.int32) + np.int32(0x7FFFFF)) & np.int32(0x7F800000)
    return lax.bitcast_convert_type(up, jnp.float32)


def _local_gates(
    log_i: jax.Array,
    log_f: jax.Array,
    reset: jax.Array,
    begins: jax.Array | None,
    buffers: Mapping[str, Any],
    chunk_rows: int,
    input_gate: InputGate,
) -> LocalGates:
    """``gates.local_gates`` of a CTA's chunks.

    From ``gates.log_gates`` and where packed segments begin: (rows, STEPS) each.
    """
    rows, steps = log_i.shape[0], chunk_rows * STEPS

    def join_bounds(left: Any, x: Any) -> Sequence[Any]:
        return (
            jnp.minimum(left[0], x[0]),
            jnp.maximum(left[1], x[1]),
            jnp.maximum(left[2], x[2]),
            left[3] + x[3],
        )

    def add(left: Any, x: Any) -> Sequence[Any]:
        return [a + y for a, y in zip(left, x, strict=True)]

    def largest_since_reset(left: Any, x: Any) -> Sequence[Any]:
        """What was before the last reset does not count."""
        same = left[2] == x[2]
        return *(
            jnp.where(same, y, z) for y, z in zip(pair_max(left[:2], x[:2]), x[:2], strict=True)
        ), x[2]

    restarts = reset if begins is None else reset | begins
    stored, decay = log_i > -_INF, -log_f
    of_steps = jnp.where(stored, log_i, _INF), jnp.where(stored, log_i, -_INF), decay, decay
    bounds = running(join_bounds, of_steps, (_INF, -_INF, 0.0, 0.0), chunk_rows, buffers["bounds"])
    i_min, i_max, largest_decay, total_decay = last_of_chunks(
        last_columns(*bounds), chunk_rows, buffers["last_bounds"]
    )
    if begins is not None or input_gate is InputGate.SIGMOID:
        i_min, i_max = jnp.minimum(i_min, 0.0), jnp.maximum(i_max, 0.0)  # m = 0 is a source as well
    grid = gates.exact_sum_grid(largest_decay, steps, _least_power_of_two)
    offset_unit = gates.reset_offset(i_min, i_max, total_decay, _least_power_of_two)

    ones = plgpu.layout_cast(jnp.ones((rows, STEPS), jnp.float32), rows_layout())
    split = *split_at(log_f, across(grid)), jnp.where(restarts, ones, 0.0)
    hi, lo, count = running(add, split, (0.0,) * 3, chunk_rows, buffers["sums"])
    b, offset = two_sum(hi, lo), count * across(offset_unit)
    e, largest = stabiliser_sources(log_i, log_f, b, offset, reset, begins, input_gate)
    if input_gate is not InputGate.SIGMOID:
        max_hi, max_lo, _ = running(
            largest_since_reset,
            (*largest, count),
            (-_INF, 0.0, -1.0),
            chunk_rows,
            buffers["maxima"],
        )
        largest = max_hi, max_lo
    return LocalGates(b, e, largest, offset)


def _chunks_of_cta(chunks: int, p: Problem) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """For each chunk of a CTA: whether it exists, its head and its index.

    A chunk beyond the last one has the head and the index of the last one.
    """
    first = lax.axis_index("cta") * chunks
    indices = [first + chunk for chunk in range(chunks)]
    last = p.BNH * p.NC - 1
    clamped = [lax.min(index, np.int32(last)) for index in indices]
    return [
        (index <= last, divide(at, p.NC), remainder(at, p.NC))
        for index, at in zip(indices, clamped, strict=True)
    ]


def _summaries_kernel(
    i: Any,  # (CTAs, rows, STEPS) pre-activations
    f: Any,
    starts: Any,  # (CTAs, rows, STEPS) int32, 1 where a packed segment begins; may be absent
    g: Any,  # out (B * NH, padded NC), see _stabiliser_scan_kernel; beyond NC not written
    a: Any,  # out (B * NH, padded NC)
    last: Any,  # shared (rows, 2)
    *,
    p: Problem,
    chunk_rows: int,
    input_gate: InputGate,
    **buffers: Any,  # shared: see _launch
) -> None:
    cta, rows = lax.axis_index("cta"), last.shape[0]
    begins = None if starts is None else load_rows(starts.at[cta]) > 0
    log_gates = gates.log_gates(
        load_rows(i.at[cta]), load_rows(f.at[cta]), input_gate, branchless_log1p
    )
    local = _local_gates(*log_gates, begins, buffers, chunk_rows, input_gate)
    b_hi, b_lo, max_hi, max_lo, offset = last_columns(*local.vecB, *local.vecEmax, local.vecOffset)
    added, largest, reset = gates.summary((b_hi, b_lo), (max_hi, max_lo), offset)
    write(last, jnp.concatenate([jnp.where(reset, -_INF, added), largest], axis=1))
    plgpu.commit_smem()
    for chunk, (exists, head, c) in enumerate(_chunks_of_cta(rows // chunk_rows, p)):

        @pl.when(exists)
        def store(end: int = (chunk + 1) * chunk_rows - 1, head: Any = head, c: Any = c) -> None:
            g[head, c], a[head, c] = last[end, 0], last[end, 1]


def _stabilisers(
    known: Any,
    summaries: Sequence[Any] | None,
    after: Any,
    initial: Any,
    chunks: Sequence[tuple[jax.Array, jax.Array, jax.Array]],
    NC: int,
) -> list[tuple[Any, Any]]:
    """m before and after each chunk of a CTA; the arrays are those of ``_gates_kernel``, and chunks
    are those of ``_chunks_of_cta``."""
    if known is not None:
        return [(known[head, c], known[head, c + 1]) for _, head, c in chunks]
    if summaries is None:
        return [
            (
                jnp.where(c > 0, after[head, lax.max(c - 1, np.int32(0))], initial[head]),
                after[head, c],
            )
            for _, head, c in chunks
        ]
    _, head, first = chunks[0]
    g, a = ([x[head, c] for c in range(NC)] for x in summaries)
    m = [initial[head]]
    for added, largest in zip(g, a, strict=True):
        m.append(jnp.maximum(m[-1] + added, largest))

    def at(j: int) -> Any:
        x = m[j]
        for c in range(len(chunks), NC, len(chunks)):
            x = jnp.where(first == c, m[c + j], x)
        return x

    bounds = [at(j) for j in range(len(chunks) + 1)]
    return list(itertools.pairwise(bounds))


def _gates_kernel(
    i: Any,  # (CTAs, rows, STEPS) pre-activations
    f: Any,
    starts: Any,  # (CTAs, rows, STEPS) int32, 1 where a packed segment begins; may be absent
    m_known: Any,  # (B * NH, NC + 1) m at the chunk boundaries; absent where it is computed
    summaries: Any,  # g, a of ``_summaries_kernel``, where the CTAs join them; else absent
    m_after: Any,  # (B * NH, padded NC) of ``_stabiliser_scan_kernel``, where it ran; else absent
    m_initial: Any,  # (B * NH,); absent where m_known is not
    e_hi: Any,  # out (CTAs, rows, STEPS), as those that follow
    e_lo: Any,
    u_hi: Any,
    u_lo: Any,
    w: Any,
    m: Any,
    abar: Any,
    flags: Any,  # likewise, int32; absent in the forward pass
    gamma: Any,  # out (B * NH, NC)
    m_states: Any,  # out (B * NH, NC + 1); absent where m_known is not
    last: Any,  # shared (rows, 3)
    *,
    p: Problem,
    chunk_rows: int,
    input_gate: InputGate,
    **buffers: Any,  # shared: see _launch
) -> None:
    cta, rows = lax.axis_index("cta"), last.shape[0]
    chunks = _chunks_of_cta(rows // chunk_rows, p)
    bounds = _stabilisers(m_known, summaries, m_after, m_initial, chunks, p.NC)
    m_start, m_end = of_chunks(list(zip(*bounds, strict=True)), rows)
    begins, f_tile = None if starts is None else load_rows(starts.at[cta]) > 0, load_rows(f.at[cta])
    log_i, log_f, reset = gates.log_gates(
        load_rows(i.at[cta]), f_tile, input_gate, branchless_log1p
    )
    local = _local_gates(log_i, log_f, reset, begins, buffers, chunk_rows, input_gate)
    b_hi, b_lo, offset = last_of_chunks(
        last_columns(*local.vecB, local.vecOffset), chunk_rows, last
    )
    pair, of_chunk = gates.join_ends(b_hi, b_lo, offset, m_start, m_end)
    of_u, of_w, of_m, of_abar = gates.join_steps(
        local, across(m_start), (across(pair[0]), across(pair[1])), input_gate
    )
    for ref, x in zip(
        (e_hi, e_lo, u_hi, u_lo, w, m, abar), (*local.vecE, *of_u, of_w, of_m, of_abar), strict=True
    ):
        store_rows(ref.at[cta], x)
    if flags is not None:
        # With the sigmoid gate m is a constant, which has no layout.
        of_m = plgpu.layout_cast(of_m, rows_layout())
        m_before = shifted(of_m, m_start, chunk_rows, buffers["sums"])
        restarts = reset if begins is None else reset | begins
        store_rows(
            flags.at[cta],
            gates.join_flags(local.vecE, of_u, of_m, m_before, f_tile, log_f, restarts, begins),
        )
    write(buffers["last_bounds"], jnp.concatenate([of_chunk] * 4, axis=1))
    plgpu.commit_smem()
    for chunk, (exists, head, c) in enumerate(chunks):

        @pl.when(exists)
        def store(end: int = (chunk + 1) * chunk_rows - 1, head: Any = head, c: Any = c) -> None:
            gamma[head, c] = buffers["last_bounds"][end, 0]

        if m_states is None:
            continue

        @pl.when(exists)
        def store_m(end: Any = bounds[chunk][1], head: Any = head, c: Any = c) -> None:
            m_states[head, c + 1] = end

        @pl.when(exists & (c == 0))
        def store_initial(head: Any = head) -> None:
            m_states[head, 0] = m_initial[head]


def _rows(p: Problem) -> int:
    """Rows of STEPS steps of a CTA."""
    return max(LANES, p.L // STEPS)


def _scratch(p: Problem, columns: int, input_gate: InputGate) -> dict[str, Any]:
    """Shared memory of a kernel; columns: of ``last``."""
    chunk_rows, rows = p.L // STEPS, _rows(p)
    return {
        "last": plgpu.SMEM((rows, columns), jnp.float32),
        "bounds": scan_buffer(4, rows, chunk_rows),
        "last_bounds": plgpu.SMEM((rows, 4), jnp.float32),
        "sums": scan_buffer(3, rows, chunk_rows),
        "maxima": None if input_gate is InputGate.SIGMOID else scan_buffer(3, rows, chunk_rows),
    }


def _launch(
    kernel: Callable[..., None],
    name: str,
    per_step: Mapping[str, Any],
    per_chunk: Mapping[str, tuple[int, int] | None],
    columns: int,
    vecs: Sequence[jax.Array | None],
    input_gate: InputGate,
    call: Launch,
    **inputs: Any,
) -> dict[str, Any]:
    """Runs a kernel.

    Args:
      per_step: dtypes of the outputs (B * NH, NC, L), None of absent ones.
      per_chunk: shapes of the outputs of chunks, float32, None of absent ones.
      columns: of ``last``.
      vecs: i, f and starts, (B * NH, S).
    """
    p = call.problem
    chunk_rows, rows = p.L // STEPS, _rows(p)
    (ctas,) = call.tiles.grid(p)

    def by_cta(x: Any) -> Any:
        return (
            None
            if x is None
            else jnp.pad(x.reshape(-1), (0, ctas * rows * STEPS - x.size)).reshape(
                ctas, rows, STEPS
            )
        )

    def by_chunk(x: Any) -> Any:
        return None if x is None else x.reshape(-1)[: p.BNH * p.S].reshape(p.BNH, p.NC, p.L)

    outputs = mosaic_call(
        functools.partial(kernel, p=p, chunk_rows=chunk_rows, input_gate=input_gate),
        name=name,
        grid={"cta": ctas},
        warpgroups=1,
        outputs={
            name: dtype and jax.ShapeDtypeStruct((ctas, rows, STEPS), dtype)
            for name, dtype in per_step.items()
        }
        | {name: shape and float32(*shape) for name, shape in per_chunk.items()},
        scratch=_scratch(p, columns, input_gate),
        interpret=call.interpret,
        infer_layouts=False,
        approx_math=False,
    )(**dict(zip(("i", "f", "starts"), map(by_cta, vecs), strict=True)), **inputs)
    return {name: x if name in per_chunk else by_chunk(x) for name, x in outputs.items()}


def chunk_gates(
    vecI: jax.Array,
    vecF: jax.Array,
    scaM_initial: jax.Array,
    starts: jax.Array | None = None,
    input_gate: InputGate = InputGate.EXP,
    scaM_states: jax.Array | None = None,
    lengths: jax.Array | None = None,
    *,
    with_flags: bool = False,
    call: Launch,
) -> ChunkGates:
    """Runs the stage: ``stages/chunk_gates.py``."""
    p, vecs = call.problem, (vecI, vecF, starts)
    if scaM_states is None and input_gate is InputGate.SIGMOID:
        scaM_states = jnp.zeros((p.BNH, p.NC + 1), scaM_initial.dtype)
    of_m: dict[str, Any] = dict(m_known=scaM_states)
    m_shape = None
    if scaM_states is None:
        summaries = {name: (p.BNH, _padded_chunks(p)) for name in "ga"}
        x = _launch(_summaries_kernel, "chunk_summaries", {}, summaries, 2, vecs, input_gate, call)
        of_m |= dict(m_initial=scaM_initial)
        of_head = p.S % (_rows(p) * STEPS) == 0  # the steps of a CTA
        if of_head and p.NC <= _FEW_CHUNKS:
            of_m |= dict(summaries=(x["g"], x["a"]))
        else:
            of_m |= dict(m_after=stabiliser_scan(x["g"], x["a"], scaM_initial, call))
        m_shape = p.BNH, p.NC + 1
    per_step = dict.fromkeys(("e_hi", "e_lo", "u_hi", "u_lo", "w", "m", "abar"), jnp.float32)
    per_step["flags"] = jnp.int32 if with_flags else None
    x = _launch(
        _gates_kernel,
        "chunk_gates",
        per_step,
        {"gamma": (p.BNH, p.NC), "m_states": m_shape},
        3,
        vecs,
        input_gate,
        call,
        **dict.fromkeys(("m_known", "summaries", "m_after", "m_initial")) | of_m,
    )
    e, u = (x["e_hi"], x["e_lo"]), (x["u_hi"], x["u_lo"])
    m_states = x["m_states"] if scaM_states is None else scaM_states
    of_steps = ChunkGates(e, u, x["w"], x["m"], x["abar"], x["gamma"], m_states, x["flags"])
    return gates.without_outputs(of_steps, lengths)


def _stabiliser_scan_kernel(
    g: Any,  # (B * NH, padded NC / STEPS, STEPS) what a chunk adds to m; -inf where it has a reset
    a: Any,  # (B * NH, padded NC / STEPS, STEPS) m of the chunk alone
    m_initial: Any,  # (B * NH,)
    m: Any,  # out (B * NH, padded NC / STEPS, STEPS) after each chunk
    sums: Any,  # shared: see scan_buffer
    last: Any,  # shared (rows, STEPS)
) -> None:
    head, rows = lax.axis_index("head"), last.shape[0]

    def join(left: Any, x: Any) -> Sequence[Any]:
        return left[0] + x[0], jnp.maximum(left[1] + x[0], x[1])

    def one(j: Any, before: Any) -> Any:
        block = pl.ds(pl.multiple_of(j * rows, rows), rows)
        added, largest = running(
            join, [load_rows(y.at[head, block]) for y in (g, a)], (0.0, -_INF), rows, sums
        )
        after = jnp.maximum(added + before, largest)
        store_rows(m.at[head, block], after)
        store_rows(last, after)
        plgpu.commit_smem()
        return last[rows - 1, STEPS - 1]

    loop(g.shape[1] // rows, one, m_initial[head])


def _scan_rows(p: Problem) -> int:
    return min(max(next_power_of_two(p.NC), LANES * STEPS), _SCAN_BLOCK) // STEPS


def _padded_chunks(p: Problem) -> int:
    """A multiple of the chunks that a CTA of the stabiliser scan reads at a time."""
    block = _scan_rows(p) * STEPS
    return -(-p.NC // block) * block


def stabiliser_scan(g: jax.Array, a: jax.Array, scaM_initial: jax.Array, call: Launch) -> jax.Array:
    """``gates.stabiliser_scan`` with the exponential input gate, without m_initial: as g and a.

    g, a: (B * NH, padded NC), as the kernel's. What is beyond NC is undefined.
    """
    p, rows = call.problem, _scan_rows(call.problem)
    by_rows = p.BNH, g.shape[1] // STEPS, STEPS
    after: jax.Array = mosaic_call(
        _stabiliser_scan_kernel,
        name="stabiliser_scan",
        grid={"head": p.BNH},
        warpgroups=1,
        outputs={"m": jax.ShapeDtypeStruct(by_rows, jnp.float32)},
        scratch={
            "sums": scan_buffer(2, rows, rows),
            "last": plgpu.SMEM((rows, STEPS), jnp.float32),
        },
        interpret=call.interpret,
        infer_layouts=False,
    )(g=g.reshape(by_rows), a=a.reshape(by_rows), m_initial=scaM_initial)["m"]
    return after.reshape(g.shape)


# A thread has up to 16 steps of a chunk.
@dataclasses.dataclass(frozen=True)
class Tiles(HopperTiles):
    def divides(self, p: Problem, **asked: Any) -> bool:
        return p.L % 64 == 0 and p.L <= 2048

    def grid(self, p: Problem, **asked: Any) -> tuple[int, ...]:
        return (-(-p.BNH * p.S // (_rows(p) * STEPS)),)

    def shared_bytes(self, p: Problem, dtype: Any, **asked: Any) -> int:
        return shared_bytes(_scratch(p, 3, InputGate.EXP))
