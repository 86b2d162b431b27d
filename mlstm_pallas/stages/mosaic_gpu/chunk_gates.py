"""chunk_gates on Mosaic GPU: the gates and the stabilisers of ``stages/chunk_gates.py``.

A CTA of ``chunk_summaries`` or ``chunk_gates`` is one warpgroup and owns 512 consecutive steps, several chunks; beyond L = 512 it owns a
chunk, of up to 2048. Grid (B * NH * S / 512, rounded up).

chunk_summaries: what each chunk does to m, from the gate pre-activations. It does not run where m is known.
stabiliser_scan: m at all chunk boundaries. Grid (B * NH). A CTA is one warpgroup and owns a head. It reads the summaries of up to 1024
chunks at a time.
chunk_gates: the gates of every step, from the pre-activations and m; in the backward pass their flags too (``gates.join_flags``). It sums
each chunk again, which is faster than to write and read the sums.

A thread holds whole rows of 4 consecutive steps: 16 bytes, which it reads and writes at once. Running sums and maxima are taken inside
the rows first. The totals of the rows then meet in shared memory, in log4(rows of a chunk) rounds.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas import gates
from mlstm_pallas.gates import ChunkGates, LocalGates, branchless_log1p, pair_max, split_at, stabiliser_sources, two_sum
from mlstm_pallas.launch_mosaic_gpu import load, mosaic_call, plgpu
from mlstm_pallas.problem import InputGate, Problem, next_power_of_two
from mlstm_pallas.stage import Lowering, StageCall
from mlstm_pallas.tiles import divide, loop, remainder

_INF = float("inf")
LANES = 128  # of a warpgroup
STEPS = 4  # of a row
_RADIX = 4  # rows, or groups of rows, that are joined in a round
_SCAN_BLOCK = 1024  # chunks that a CTA of the stabiliser scan holds


def _layout(vector: int = 1) -> Any:
    """Of a tile (rows, columns) of which a thread holds whole rows, in registers of so many columns.

    Blackwell's tensor memory, which gave the layout its name, is not involved.
    """
    return plgpu.Layout.TCGEN05_TMEM_NATIVE(vector)


def _load(tile: Any) -> jax.Array:
    return plgpu.layout_cast(load(tile, _layout(STEPS), optimized=False), _layout())


def _store(tile: Any, x: jax.Array) -> None:
    tile[...] = plgpu.layout_cast(x, _layout(STEPS))


def _rows(shape: tuple[int, int]) -> jax.Array:
    """The index of the row of each element."""
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), _layout())


def _columns(x: jax.Array) -> list[jax.Array]:
    return [lax.slice(x, (0, k), (x.shape[0], k + 1)) for k in range(x.shape[1])]


def _buffer(arrays: int, rows: int, chunk_rows: int) -> Any:
    """Shared memory of ``_running``, in two slots. It begins with a chunk of rows whose values are read but not used.

    A row's numbers, of all arrays, are contiguous. A contiguous column would be read by ldmatrix, at multiples of 16 bytes only.
    """
    return plgpu.SMEM((2, chunk_rows + rows, arrays), jnp.float32)


def _running(
    join: Callable[..., Sequence[jax.Array]],
    x: Sequence[jax.Array],
    identities: Sequence[float],
    chunk_rows: int,
    buffer: Any,
) -> Sequence[jax.Array]:
    """Inclusive scans over the steps of each chunk, with join(of earlier steps, of later ones).

    Args:
      x: tiles (rows, STEPS), float32.
      identities: what join takes for no steps, of each tile.
      chunk_rows: rows of a chunk, a power of two.
      buffer: of ``_buffer``; at least two arrays.
    """
    rows = x[0].shape[0]
    row_of_chunk = _rows((rows, 1)) & (chunk_rows - 1)
    columns: list[Sequence[jax.Array]] = list(zip(*map(_columns, x), strict=True))
    for k in range(1, STEPS):
        columns[k] = join(columns[k - 1], columns[k])

    def earlier(slot, distance):
        """What the slot has of the row so many rows before each."""
        found = _columns(load(slot.at[pl.ds(chunk_rows - distance, rows)], _layout(), optimized=False))
        return [jnp.where(row_of_chunk >= distance, y, identity) for y, identity in zip(found, identities, strict=True)]

    before, reach, slot = columns[-1], 1, 0
    while reach < chunk_rows:
        buffer.at[slot, chunk_rows:][...] = jnp.concatenate(before, axis=1)
        plgpu.commit_smem()
        shift = 1 if reach == 1 else 0  # in the first round these are totals of the rows, later ones of ``reach`` rows before each
        distances = [shift + k * reach for k in reversed(range(_RADIX))]
        before = functools.reduce(join, [earlier(buffer.at[slot], n) if n else before for n in distances if n < chunk_rows])
        reach, slot = reach * _RADIX, 1 - slot
    return [jnp.concatenate(y, axis=1) for y in zip(*(join(before, column) for column in columns), strict=True)]


def _last_of_chunks(columns: Sequence[jax.Array], chunk_rows: int, buffer: Any) -> list[jax.Array]:
    """For every row what the last row of its chunk has. columns: (rows, 1); buffer: shared (rows, number of columns)."""
    rows = columns[0].shape[0]
    buffer[...] = jnp.concatenate(columns, axis=1)
    plgpu.commit_smem()
    ends = range(chunk_rows - 1, rows, chunk_rows)
    return [_of_chunks([buffer[end, k] for end in ends], rows) for k in range(len(columns))]


def _of_chunks(values: Sequence[jax.Array], rows: int) -> jax.Array:
    """(rows, 1) from a scalar a chunk."""
    x = plgpu.layout_cast(jnp.full((rows, 1), values[0], jnp.float32), _layout())
    for chunk, value in enumerate(values[1:], 1):
        x = jnp.where(_rows((rows, 1)) >= chunk * (rows // len(values)), value, x)
    return x


def _across(column: jax.Array) -> jax.Array:
    return jnp.concatenate([column] * STEPS, axis=1)


def _last(*x: jax.Array) -> list[jax.Array]:
    return [_columns(y)[-1] for y in x]


def _least_power_of_two(x: jax.Array) -> jax.Array:
    """The least that is no smaller than x, a positive normal number."""
    up = (lax.bitcast_convert_type(x, jnp.int32) + np.int32(0x7FFFFF)) & np.int32(0x7F800000)
    return lax.bitcast_convert_type(up, jnp.float32)


def _row_before(column: jax.Array, first: jax.Array, chunk_rows: int, buffer: Any) -> jax.Array:
    """What the row before has of a column, and in the first row of a chunk ``first``: (rows, 1) each; buffer: of ``_buffer``."""
    rows = column.shape[0]
    buffer.at[0, chunk_rows:][...] = jnp.concatenate([column] * buffer.shape[-1], axis=1)
    plgpu.commit_smem()
    found = _columns(load(buffer.at[0, pl.ds(chunk_rows - 1, rows)], _layout(), optimized=False))[0]
    return jnp.where((_rows((rows, 1)) & (chunk_rows - 1)) > 0, found, first)


def _local_gates(
    log_i: jax.Array,
    log_f: jax.Array,
    reset: jax.Array,
    begins: jax.Array | None,
    buffers: Mapping[str, Any],
    chunk_rows: int,
    input_gate: InputGate,
) -> LocalGates:
    """``gates.local_gates`` of a CTA's chunks, from ``gates.log_gates`` and where packed segments begin: (rows, STEPS) each."""
    rows, steps = log_i.shape[0], chunk_rows * STEPS

    def join_bounds(left, x):
        return jnp.minimum(left[0], x[0]), jnp.maximum(left[1], x[1]), jnp.maximum(left[2], x[2]), left[3] + x[3]

    def add(left, x):
        return [a + y for a, y in zip(left, x, strict=True)]

    def largest_since_reset(left, x):
        """What was before the last reset does not count."""
        same = left[2] == x[2]
        return *(jnp.where(same, y, own) for y, own in zip(pair_max(left[:2], x[:2]), x[:2], strict=True)), x[2]

    restarts = reset if begins is None else reset | begins
    stored, decay = log_i > -_INF, -log_f
    of_steps = jnp.where(stored, log_i, _INF), jnp.where(stored, log_i, -_INF), decay, decay
    bounds = _running(join_bounds, of_steps, (_INF, -_INF, 0.0, 0.0), chunk_rows, buffers["bounds"])
    i_min, i_max, largest_decay, total_decay = _last_of_chunks(_last(*bounds), chunk_rows, buffers["last_bounds"])
    if begins is not None or input_gate is InputGate.SIGMOID:
        i_min, i_max = jnp.minimum(i_min, 0.0), jnp.maximum(i_max, 0.0)  # m = 0 is a source as well
    grid = gates.exact_sum_grid(largest_decay, steps, _least_power_of_two)
    offset_unit = gates.reset_offset(i_min, i_max, total_decay, _least_power_of_two)

    ones = plgpu.layout_cast(jnp.ones((rows, STEPS), jnp.float32), _layout())
    split = *split_at(log_f, _across(grid)), jnp.where(restarts, ones, 0.0)
    hi, lo, count = _running(add, split, (0.0,) * 3, chunk_rows, buffers["sums"])
    b, offset = two_sum(hi, lo), count * _across(offset_unit)
    e, largest = stabiliser_sources(log_i, log_f, b, offset, reset, begins, input_gate)
    if input_gate is not InputGate.SIGMOID:
        max_hi, max_lo, _ = _running(largest_since_reset, (*largest, count), (-_INF, 0.0, -1.0), chunk_rows, buffers["maxima"])
        largest = max_hi, max_lo
    return LocalGates(b, e, largest, offset)


def _chunks_of_cta(chunks: int, p: Problem) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """Of a CTA's chunks: whether there is such a chunk, its head, its index. Those beyond the last have the last one's."""
    first = lax.axis_index("cta") * chunks
    indices = [first + chunk for chunk in range(chunks)]
    last = p.BNH * p.NC - 1
    clamped = [lax.min(index, np.int32(last)) for index in indices]
    return [(index <= last, divide(at, p.NC), remainder(at, p.NC)) for index, at in zip(indices, clamped, strict=True)]


def _summaries_kernel(
    i,  # (CTAs, rows, STEPS) pre-activations
    f,
    starts,  # (CTAs, rows, STEPS) int32, 1 where a packed segment begins; may be absent
    g,  # out (B * NH, padded NC): see ``_stabiliser_scan_kernel``. What is beyond NC is not written
    a,  # out (B * NH, padded NC)
    last,  # shared (rows, 2)
    *,
    p: Problem,
    chunk_rows: int,
    input_gate: InputGate,
    **buffers,  # shared: see _launch
):
    cta, rows = lax.axis_index("cta"), last.shape[0]
    begins = None if starts is None else _load(starts.at[cta]) > 0
    log_gates = gates.log_gates(_load(i.at[cta]), _load(f.at[cta]), input_gate, branchless_log1p)
    local = _local_gates(*log_gates, begins, buffers, chunk_rows, input_gate)
    b_hi, b_lo, max_hi, max_lo, offset = _last(*local.vecB, *local.vecEmax, local.vecOffset)
    added, own, reset = gates.summary((b_hi, b_lo), (max_hi, max_lo), offset)
    last[...] = jnp.concatenate([jnp.where(reset, -_INF, added), own], axis=1)
    plgpu.commit_smem()
    for chunk, (exists, head, c) in enumerate(_chunks_of_cta(rows // chunk_rows, p)):

        @pl.when(exists)
        def store(end=(chunk + 1) * chunk_rows - 1, head=head, c=c):
            g[head, c], a[head, c] = last[end, 0], last[end, 1]


def _gates_kernel(
    i,  # (CTAs, rows, STEPS) pre-activations
    f,
    starts,  # (CTAs, rows, STEPS) int32, 1 where a packed segment begins; may be absent
    m_states,  # (B * NH, NC + 1)
    e_hi,  # out (CTAs, rows, STEPS), as those that follow
    e_lo,
    u_hi,
    u_lo,
    w,
    m,
    abar,
    gamma,  # out (B * NH, NC)
    last,  # shared (rows, 3)
    flags=None,  # out (CTAs, rows, STEPS) int32, in the backward pass
    *,
    p: Problem,
    chunk_rows: int,
    input_gate: InputGate,
    **buffers,  # shared: see _launch
):
    cta, rows = lax.axis_index("cta"), last.shape[0]
    own_chunks = _chunks_of_cta(rows // chunk_rows, p)
    m_start, m_end = (_of_chunks([m_states[head, c + after] for _, head, c in own_chunks], rows) for after in range(2))
    begins, own_f = None if starts is None else _load(starts.at[cta]) > 0, _load(f.at[cta])
    log_i, log_f, reset = gates.log_gates(_load(i.at[cta]), own_f, input_gate, branchless_log1p)
    local = _local_gates(log_i, log_f, reset, begins, buffers, chunk_rows, input_gate)
    b_hi, b_lo, offset = _last_of_chunks(_last(*local.vecB, local.vecOffset), chunk_rows, last)
    pair, of_chunk = gates.join_ends(b_hi, b_lo, offset, m_start, m_end)
    of_u, of_w, of_m, of_abar = gates.join_steps(local, _across(m_start), (_across(pair[0]), _across(pair[1])), input_gate)
    for ref, x in zip((e_hi, e_lo, u_hi, u_lo, w, m, abar), (*local.vecE, *of_u, of_w, of_m, of_abar), strict=True):
        _store(ref.at[cta], x)
    if flags is not None:
        *earlier, column = _columns(plgpu.layout_cast(of_m, _layout()))  # with the sigmoid gate m is a constant, of no layout
        m_before = jnp.concatenate([_row_before(column, m_start, chunk_rows, buffers["sums"]), *earlier], axis=1)
        restarts = reset if begins is None else reset | begins
        _store(flags.at[cta], gates.join_flags(local.vecE, of_u, of_m, m_before, own_f, log_f, restarts, begins))
    buffers["last_bounds"][...] = jnp.concatenate([of_chunk] * 4, axis=1)
    plgpu.commit_smem()
    for chunk, (exists, head, c) in enumerate(own_chunks):

        @pl.when(exists)
        def store(end=(chunk + 1) * chunk_rows - 1, head=head, c=c):
            gamma[head, c] = buffers["last_bounds"][end, 0]


def _launch(
    kernel: Callable[..., None],
    name: str,
    per_step: Mapping[str, Any],
    per_chunk: Mapping[str, tuple[int, int]],
    columns: int,
    vecs: Sequence[jax.Array | None],
    input_gate: InputGate,
    call: StageCall,
    **inputs: jax.Array,
) -> dict[str, Any]:
    """Runs a kernel.

    Args:
      per_step, per_chunk: dtypes of its outputs (B * NH, NC, L), and shapes of those of chunks, float32.
      columns: of ``last``.
      vecs: i, f and starts, (B * NH, S).
    """
    p = call.problem
    chunk_rows = p.L // STEPS
    rows = max(LANES, chunk_rows)
    ctas = -(-p.BNH * p.S // (rows * STEPS))

    def of_ctas(x):
        return None if x is None else jnp.pad(x.reshape(-1), (0, ctas * rows * STEPS - x.size)).reshape(ctas, rows, STEPS)

    found = mosaic_call(
        functools.partial(kernel, p=p, chunk_rows=chunk_rows, input_gate=input_gate),
        name=name,
        grid={"cta": ctas},
        warpgroups=1,
        outputs={name: jax.ShapeDtypeStruct((ctas, rows, STEPS), dtype) for name, dtype in per_step.items()}
        | {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in per_chunk.items()},
        scratch={
            "last": plgpu.SMEM((rows, columns), jnp.float32),
            "bounds": _buffer(4, rows, chunk_rows),
            "last_bounds": plgpu.SMEM((rows, 4), jnp.float32),
            "sums": _buffer(3, rows, chunk_rows),
            "maxima": None if input_gate is InputGate.SIGMOID else _buffer(3, rows, chunk_rows),
        },
        interpret=call.lowering is Lowering.MOSAIC_GPU_INTERPRET,
        infer_layouts=False,
        approx_math=False,
    )(**dict(zip(("i", "f", "starts"), map(of_ctas, vecs), strict=True)), **inputs)
    return {name: x if name in per_chunk else x.reshape(-1)[: p.BNH * p.S].reshape(p.BNH, p.NC, p.L) for name, x in found.items()}


def chunk_gates(
    vecI: jax.Array,
    vecF: jax.Array,
    scaM_initial: jax.Array,
    starts: jax.Array | None,
    input_gate: InputGate,
    scaM_states: jax.Array | None,
    call: StageCall,
) -> ChunkGates:
    """Runs the stage, of a chunk size that is a power of two from 64 on."""
    p, vecs, backward = call.problem, (vecI, vecF, starts), scaM_states is not None
    if scaM_states is None and input_gate is InputGate.SIGMOID:
        scaM_states = jnp.zeros((p.BNH, p.NC + 1), scaM_initial.dtype)
    elif scaM_states is None:
        summaries = {name: (p.BNH, _padded_chunks(p)) for name in "ga"}
        found = _launch(_summaries_kernel, "chunk_summaries", {}, summaries, 2, vecs, input_gate, call)
        scaM_states = stabiliser_scan(found["g"], found["a"], scaM_initial, call)
    per_step = dict.fromkeys(("e_hi", "e_lo", "u_hi", "u_lo", "w", "m", "abar"), jnp.float32)
    if backward:
        per_step |= {"flags": jnp.int32}
    x = _launch(_gates_kernel, "chunk_gates", per_step, {"gamma": (p.BNH, p.NC)}, 3, vecs, input_gate, call, m_states=scaM_states)
    e, u = (x["e_hi"], x["e_lo"]), (x["u_hi"], x["u_lo"])
    return ChunkGates(e, u, x["w"], x["m"], x["abar"], x["gamma"], scaM_states, x.get("flags"))


def _stabiliser_scan_kernel(
    g,  # (B * NH, padded NC / STEPS, STEPS) what a chunk adds to m; -inf where it has a reset
    a,  # (B * NH, padded NC / STEPS, STEPS) m of a chunk on its own
    m_initial,  # (B * NH,)
    m,  # out (B * NH, padded NC / STEPS, STEPS) after each chunk
    sums,  # shared: see _buffer
    last,  # shared (rows, STEPS)
):
    head, rows = lax.axis_index("head"), last.shape[0]

    def join(left, x):
        return left[0] + x[0], jnp.maximum(left[1] + x[0], x[1])

    def one(j, before):
        block = pl.ds(pl.multiple_of(j * rows, rows), rows)
        added, own = _running(join, [_load(y.at[head, block]) for y in (g, a)], (0.0, -_INF), rows, sums)
        after = jnp.maximum(added + before, own)
        _store(m.at[head, block], after)
        _store(last, after)
        plgpu.commit_smem()
        return last[rows - 1, STEPS - 1]

    loop(g.shape[1] // rows, one, m_initial[head])


def _scan_rows(p: Problem) -> int:
    return min(max(next_power_of_two(p.NC), LANES * STEPS), _SCAN_BLOCK) // STEPS


def _padded_chunks(p: Problem) -> int:
    """A multiple of the chunks that a CTA of the stabiliser scan reads at a time."""
    block = _scan_rows(p) * STEPS
    return -(-p.NC // block) * block


def stabiliser_scan(g: jax.Array, a: jax.Array, scaM_initial: jax.Array, call: StageCall) -> jax.Array:
    """``gates.stabiliser_scan`` with the exponential input gate: (B * NH, NC + 1).

    g, a: (B * NH, padded NC), as the kernel's. What is beyond NC is not used.
    """
    p, rows = call.problem, _scan_rows(call.problem)
    by_rows = p.BNH, g.shape[1] // STEPS, STEPS
    found = mosaic_call(
        _stabiliser_scan_kernel,
        name="stabiliser_scan",
        grid={"head": p.BNH},
        warpgroups=1,
        outputs={"m": jax.ShapeDtypeStruct(by_rows, jnp.float32)},
        scratch={"sums": _buffer(2, rows, rows), "last": plgpu.SMEM((rows, STEPS), jnp.float32)},
        interpret=call.lowering is Lowering.MOSAIC_GPU_INTERPRET,
        infer_layouts=False,
    )(g=g.reshape(by_rows), a=a.reshape(by_rows), m_initial=scaM_initial)["m"]
    return jnp.concatenate([scaM_initial[:, None], found.reshape(p.BNH, -1)[:, : p.NC]], axis=1)
