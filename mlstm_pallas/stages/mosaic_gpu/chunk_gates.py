"""chunk_gates on Mosaic GPU: the local gates and the stabiliser scan of ``stages/chunk_gates.py``.

Local gates: grid (B * NH * S / 512, rounded up). A CTA is one warpgroup and owns 512 consecutive steps, several chunks; beyond L = 512 it
owns a chunk, of up to 2048.
XLA takes the logarithms of the gates and their extremes, as ``gates.scan_inputs``.
Stabiliser scan: grid (B * NH). A CTA is one warpgroup and owns a head. It reads the summaries of up to 1024 chunks at a time.

A thread holds whole rows of 4 consecutive steps: 16 bytes, which it reads and writes at once. Running sums and maxima are taken inside
the rows first. The totals of the rows then meet in shared memory, in log4(rows of a chunk) rounds.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas import gates
from mlstm_pallas.gates import MASKED, LocalGates, ScanInputs, chunk_summaries, pair_max, split_at, stabiliser_sources, two_sum
from mlstm_pallas.launch_mosaic_gpu import load, mosaic_call, plgpu
from mlstm_pallas.problem import InputGate, Problem, next_power_of_two
from mlstm_pallas.stage import Lowering, StageCall
from mlstm_pallas.tiles import loop

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

    def earlier(slot, places):
        """What the slot has of the row so many places before each."""
        found = _columns(load(slot.at[pl.ds(chunk_rows - places, rows)], _layout(), optimized=False))
        return [jnp.where(row_of_chunk >= places, y, identity) for y, identity in zip(found, identities, strict=True)]

    before, reach, slot = columns[-1], 1, 0
    while reach < chunk_rows:
        buffer.at[slot, chunk_rows:][...] = jnp.concatenate(before, axis=1)
        plgpu.commit_smem()
        shift = 1 if reach == 1 else 0  # in the first round these are totals of the rows, later ones of ``reach`` rows before each
        places = [shift + k * reach for k in reversed(range(_RADIX))]
        before = functools.reduce(join, [earlier(buffer.at[slot], n) if n else before for n in places if n < chunk_rows])
        reach, slot = reach * _RADIX, 1 - slot
    return [jnp.concatenate(y, axis=1) for y in zip(*(join(before, column) for column in columns), strict=True)]


def _local_gates_kernel(
    i,  # (CTAs, rows, STEPS) logarithms of the gates
    fbar,
    f,  # (CTAs, rows, STEPS) the forget gate itself
    starts,  # (CTAs, rows, STEPS) int32, 1 where a packed segment begins; may be absent
    scalars,  # (CTAs, chunks, 2): scaGrid and scaOffset of ``gates.ScanInputs``
    b_hi,  # out (CTAs, rows, STEPS), as all that follow
    b_lo,
    e_hi,
    e_lo,
    emax_hi,
    emax_lo,
    offset,
    sums,  # shared, as maxima: see _buffer
    maxima,
    *,
    input_gate: InputGate,
):
    cta, (_, rows, _), chunks = lax.axis_index("cta"), i.shape, scalars.shape[1]
    chunk_rows = rows // chunks

    def full(value):
        return plgpu.layout_cast(jnp.full((rows, STEPS), value, jnp.float32), _layout())

    def of_chunks(column):
        x = full(scalars[cta, 0, column])
        for chunk in range(1, chunks):
            x = jnp.where(_rows(x.shape) >= chunk * chunk_rows, scalars[cta, chunk, column], x)
        return x

    def add(left, x):
        return [a + y for a, y in zip(left, x, strict=True)]

    def largest_since_reset(left, x):
        """What was before the last reset does not count."""
        same = left[2] == x[2]
        return *(jnp.where(same, y, own) for y, own in zip(pair_max(left[:2], x[:2]), x[:2], strict=True)), x[2]

    log_i, log_f, reset = _load(i.at[cta]), _load(fbar.at[cta]), _load(f.at[cta]) <= MASKED
    begins = None if starts is None else _load(starts.at[cta]) > 0
    restarts = reset if begins is None else reset | begins
    split = *split_at(log_f, of_chunks(0)), jnp.where(restarts, full(1.0), 0.0)
    hi, lo, count = _running(add, split, (0.0,) * 3, chunk_rows, sums)
    b, offsets = two_sum(hi, lo), count * of_chunks(1)
    e, largest = stabiliser_sources(log_i, log_f, b, offsets, reset, begins, input_gate)
    if input_gate is not InputGate.SIGMOID:
        max_hi, max_lo, _ = _running(largest_since_reset, (*largest, count), (-_INF, 0.0, -1.0), chunk_rows, maxima)
        largest = max_hi, max_lo
    outputs = zip((b_hi, b_lo, e_hi, e_lo, emax_hi, emax_lo, offset), (*b, *e, *largest, offsets), strict=True)
    for ref, x in outputs:
        _store(ref.at[cta], x)


def local_gates(vecI: jax.Array, vecF: jax.Array, starts: jax.Array | None, input_gate: InputGate, call: StageCall) -> LocalGates:
    """``gates.local_gates`` of (B * NH, S), of a chunk size that is a power of two from 64 on."""
    p = call.problem
    given = None if starts is None else call.chunks(starts)
    x: ScanInputs = gates.scan_inputs(call.chunks(vecI), call.chunks(vecF), given, input_gate)
    names = ("b_hi", "b_lo", "e_hi", "e_lo", "emax_hi", "emax_lo", "offset")
    rows = max(LANES, p.L // STEPS)
    chunks = rows * STEPS // p.L
    ctas = -(-p.BNH * p.NC // chunks)

    def of_ctas(y, *shape):
        if y is None:
            return None
        size = ctas * math.prod(shape)
        return jnp.pad(y.reshape(-1), (0, size - y.size)).reshape(ctas, *shape)

    found = mosaic_call(
        functools.partial(_local_gates_kernel, input_gate=input_gate),
        name="chunk_gates",
        grid={"cta": ctas},
        warpgroups=1,
        outputs={name: jax.ShapeDtypeStruct((ctas, rows, STEPS), jnp.float32) for name in names},
        scratch={name: _buffer(3, rows, rows // chunks) for name in ("sums", "maxima")},
        interpret=call.lowering is Lowering.MOSAIC_GPU_INTERPRET,
        infer_layouts=False,
    )(
        i=of_ctas(x.vecI, rows, STEPS),
        fbar=of_ctas(x.vecF, rows, STEPS),
        f=of_ctas(vecF, rows, STEPS),
        starts=of_ctas(starts, rows, STEPS),
        scalars=of_ctas(jnp.concatenate([x.scaGrid, x.scaOffset], axis=-1), chunks, 2),
    )
    b_hi, b_lo, e_hi, e_lo, emax_hi, emax_lo, offset = (found[name].reshape(-1)[: vecF.size].reshape(p.BNH, p.NC, p.L) for name in names)
    return LocalGates((b_hi, b_lo), (e_hi, e_lo), (emax_hi, emax_lo), offset)


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


def stabiliser_scan(local: LocalGates, scaM_initial: jax.Array, call: StageCall) -> jax.Array:
    """``gates.stabiliser_scan`` with the exponential input gate: (B * NH, NC + 1)."""
    p: Problem = call.problem
    rows = min(max(next_power_of_two(p.NC), LANES * STEPS), _SCAN_BLOCK) // STEPS
    padded = -(-p.NC // (rows * STEPS)) * rows
    g, a, reset = chunk_summaries(local)

    def by_rows(x):
        return jnp.pad(x.astype(jnp.float32), [(0, 0), (0, padded * STEPS - p.NC)]).reshape(p.BNH, padded, STEPS)

    found = mosaic_call(
        _stabiliser_scan_kernel,
        name="stabiliser_scan",
        grid={"head": p.BNH},
        warpgroups=1,
        outputs={"m": jax.ShapeDtypeStruct((p.BNH, padded, STEPS), jnp.float32)},
        scratch={"sums": _buffer(2, rows, rows), "last": plgpu.SMEM((rows, STEPS), jnp.float32)},
        interpret=call.lowering is Lowering.MOSAIC_GPU_INTERPRET,
        infer_layouts=False,
    )(g=by_rows(jnp.where(reset, np.float32(-_INF), g)), a=by_rows(a), m_initial=scaM_initial)["m"]
    return jnp.concatenate([scaM_initial[:, None], found.reshape(p.BNH, -1)[:, : p.NC]], axis=1)
