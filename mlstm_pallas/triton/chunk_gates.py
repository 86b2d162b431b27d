"""chunk_gates in Triton: two kernels.

chunk_gates: running sums and running maxima inside each chunk, as ``gates.local_gates``. Grid
(NC, B * NH). A CTA owns one chunk and loops over it in tiles of siz_b_LQ steps, carrying sum,
maximum and number of resets. The running maximum is a masked maximum over a siz_b_LQ x siz_b_LQ
tile; the sigmoid gate needs none.
Bytes: 9 vectors of B NH S float32, one more with packed segments; no matrix product.

stabiliser_scan: m_c at the chunk boundaries, as ``gates.stabiliser_scan``. Grid (NC + 1, B * NH). A
CTA reads the summaries of the chunks before its boundary, within a block of up to 512 chunks. With
several blocks, a first launch with one CTA a head computes the stabiliser before each block.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas import gates
from mlstm_pallas.gates import (
    ChunkGates,
    LocalGates,
    add_two_floats,
    log_gates,
    max_two_floats,
    reset_offset,
    split_for_exact_sums,
    stabiliser_sources,
)
from mlstm_pallas.problem import InputGate, Problem, next_power_of_two
from mlstm_pallas.stage import Launch
from mlstm_pallas.stage import Tiles as BaseTiles
from mlstm_pallas.stages.chunk_gates import Operands
from mlstm_pallas.tiles import blocks, causal_mask, divide, loop
from mlstm_pallas.triton.launch import kernel_call

_INF = float("inf")
_SCAN_BLOCK = 512  # chunks that a CTA of stabiliser_scan reads


def _chunk_gates_kernel(
    i_ref: Any,  # (L,)
    f_ref: Any,  # (L,)
    starts_ref: Any,  # (L,) int32, 1 where a packed segment begins; may be absent
    b_hi_ref: Any,  # out (L,), as all that follow
    b_lo_ref: Any,
    e_hi_ref: Any,
    e_lo_ref: Any,
    emax_hi_ref: Any,
    emax_lo_ref: Any,
    offset_ref: Any,
    *,
    num_tiles: int,
    siz_b: int,
    input_gate: InputGate,
) -> None:
    sigmoid = input_gate is InputGate.SIGMOID

    def spread(tile: jax.Array, carry: Any) -> Any:
        i_min, i_max, decay = carry
        steps = pl.ds(tile * siz_b, siz_b)
        i, fbar, _ = log_gates(i_ref[steps], f_ref[steps], input_gate)
        least = jnp.min(jnp.where(i > -_INF, i, _INF))
        largest = jnp.max(jnp.where(i > -_INF, i, -_INF))
        return jnp.minimum(i_min, least), jnp.maximum(i_max, largest), decay + jnp.sum(-fbar)

    # m = 0 is a source too with the sigmoid gate, and where a packed segment begins.
    zero, bound = jnp.float32(0.0), 0.0 if sigmoid or starts_ref is not None else _INF
    i_min, i_max, decay = loop(num_tiles, spread, (jnp.float32(bound), jnp.float32(-bound), zero))
    offset_unit = reset_offset(i_min, i_max, decay)
    last = lax.iota(jnp.int32, siz_b) == siz_b - 1

    def last_of(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(last, x, 0.0))

    def step(tile: jax.Array, carry: Any) -> Any:
        sum_hi, sum_lo, max_hi, max_lo, resets = carry
        steps = pl.ds(tile * siz_b, siz_b)
        i, fbar, reset = log_gates(i_ref[steps], f_ref[steps], input_gate)
        hi, lo = split_for_exact_sums(fbar, jnp.max(jnp.abs(fbar)), siz_b)
        hi, lo = jnp.cumsum(hi), jnp.cumsum(lo)
        b = add_two_floats(
            (hi, lo), (jnp.broadcast_to(sum_hi, hi.shape), jnp.broadcast_to(sum_lo, hi.shape))
        )
        begins = None if starts_ref is None else starts_ref[steps] > 0
        restarts = reset if begins is None else reset | begins
        count = resets + jnp.cumsum(restarts.astype(jnp.float32))
        offset = count * offset_unit

        (e_hi, e_lo), (source_hi, source_lo) = stabiliser_sources(
            i, fbar, b, offset, reset, begins, input_gate
        )
        if sigmoid:
            emax_hi, emax_lo = source_hi, source_lo
        else:
            seen = causal_mask(siz_b, siz_b, 0) & (count[None, :] == count[:, None])
            tile_max_hi = jnp.max(jnp.where(seen, source_hi[None, :], -_INF), axis=1)
            largest = seen & (source_hi[None, :] == tile_max_hi[:, None])
            tile_max_lo = jnp.max(jnp.where(largest, source_lo[None, :], -_INF), axis=1)
            before = count == resets  # the maximum so far still counts
            reaching = jnp.where(before, max_hi, -_INF), jnp.where(before, max_lo, 0.0)
            emax_hi, emax_lo = max_two_floats((tile_max_hi, tile_max_lo), reaching)
            emax_lo = jnp.where(emax_hi == -_INF, 0.0, emax_lo)

        for ref, x in (
            (b_hi_ref, b[0]),
            (b_lo_ref, b[1]),
            (e_hi_ref, e_hi),
            (e_lo_ref, e_lo),
            (emax_hi_ref, emax_hi),
            (emax_lo_ref, emax_lo),
            (offset_ref, offset),
        ):
            ref[steps] = x
        last_max = jnp.max(jnp.where(last, emax_hi, -_INF))
        return last_of(b[0]), last_of(b[1]), last_max, last_of(emax_lo), last_of(count)

    loop(num_tiles, step, (zero, zero, jnp.float32(-_INF), zero, zero))


def _stabiliser_scan_kernel(
    g_ref: Any,  # (padded NC,) running sum of log sigmoid(f) over the chunk
    a_ref: Any,  # (padded NC,) m after the chunk from an empty state
    reset_ref: Any,  # (padded NC,) 1 where the chunk has a reset
    m_before_ref: Any,  # (1,), or (blocks,) before each block
    m_ref: Any,  # out (NC + 1,), or (blocks,) before each block
    *,
    block: int,
    every_boundary: bool,
) -> None:
    def step(j: jax.Array, m: jax.Array, boundary: jax.Array) -> jax.Array:
        chunks = pl.ds(j * block, block)
        index = j * block + lax.iota(jnp.int32, block)
        before = index < boundary
        g = jnp.where(before, g_ref[chunks], 0.0)
        resets = jnp.cumsum(jnp.where(before, reset_ref[chunks], 0.0))
        hi, lo = split_for_exact_sums(g, jnp.max(jnp.abs(g)), block)
        hi, lo, total_resets = jnp.cumsum(hi), jnp.cumsum(lo), jnp.max(resets)
        last = lax.iota(jnp.int32, block) == block - 1
        total_hi, total_lo = jnp.sum(jnp.where(last, hi, 0.0)), jnp.sum(jnp.where(last, lo, 0.0))
        reaches = before & (resets == total_resets)
        a = jnp.where(reaches, a_ref[chunks], -_INF) + ((total_hi - hi) + (total_lo - lo))
        return jnp.maximum(
            jnp.where(total_resets > 0, -_INF, m + (total_hi + total_lo)), jnp.max(a)
        )

    if every_boundary:
        boundary = pl.program_id(0)
        of = divide(lax.max(boundary - 1, np.int32(0)), block)
        m_ref[boundary] = step(of, m_before_ref[of], boundary)
        return

    def whole_block(j: jax.Array, m: jax.Array) -> jax.Array:
        m_ref[j] = m
        return step(j, m, (j + 1) * block)

    loop(m_ref.shape[0], whole_block, m_before_ref[0])


def chunk_gates(
    x: Operands,
    *,
    input_gate: InputGate = InputGate.EXP,
    with_flags: bool = False,
    call: Launch,
) -> ChunkGates:
    """Runs the stage: ``stages/chunk_gates.py``."""
    local, m_states = _local_gates(x, input_gate, call), x.scaM_states
    if m_states is None:
        if input_gate is InputGate.SIGMOID:  # zeros, without a kernel
            m_states = gates.stabiliser_scan(local, x.scaM_initial, input_gate)
        else:
            m_states = _stabiliser_scan(local, x.scaM_initial, call)
    return gates.join_chunks(local, m_states, input_gate, x.lengths)


def _local_gates(x: Operands, input_gate: InputGate, call: Launch) -> LocalGates:
    p, siz_b = call.problem, call.tiles.siz_b_LQ
    chunk = pl.BlockSpec((None, p.L), lambda c, b: (b, c))
    outputs = kernel_call(
        _chunk_gates_kernel,
        name="chunk_gates",
        grid=call.tiles.grid(p),
        in_specs=[chunk, chunk, None if x.starts is None else chunk],
        out_specs=[chunk] * 7,
        out_shape=[jax.ShapeDtypeStruct((p.BNH, p.S), jnp.float32)] * 7,
        call=call,
        num_tiles=blocks(p.L, siz_b),
        siz_b=siz_b,
        input_gate=input_gate,
    )(x.vecI, x.vecF, x.starts)
    b_hi, b_lo, e_hi, e_lo, emax_hi, emax_lo, offset = map(call.chunks, outputs)
    return LocalGates((b_hi, b_lo), (e_hi, e_lo), (emax_hi, emax_lo), offset)


def _stabiliser_scan(local: LocalGates, scaM_initial: jax.Array, call: Launch) -> jax.Array:
    p = call.problem
    block = min(next_power_of_two(p.NC), _SCAN_BLOCK)
    padded = -(-p.NC // block) * block
    summaries = [
        jnp.pad(x.astype(jnp.float32), [(0, 0), (0, padded - p.NC)])
        for x in gates.chunk_summaries(local)
    ]
    row = pl.BlockSpec((None, padded), lambda c, b: (b, 0))

    def scan(m_before: jax.Array, ctas: int, size: int) -> jax.Array:
        m: jax.Array = kernel_call(
            _stabiliser_scan_kernel,
            name="stabiliser_scan",
            grid=(ctas, p.BNH),
            in_specs=[row, row, row, pl.BlockSpec((None, m_before.shape[1]), lambda c, b: (b, 0))],
            out_specs=[pl.BlockSpec((None, size), lambda c, b: (b, 0))],
            out_shape=[jax.ShapeDtypeStruct((p.BNH, size), jnp.float32)],
            call=call,
            block=block,
            every_boundary=ctas > 1,
        )(*summaries, m_before)[0]
        return m

    m = scaM_initial[:, None]
    if padded > block:
        m = scan(m, 1, padded // block)
    return scan(m, p.NC + 1, p.NC + 1)


@dataclasses.dataclass(frozen=True)
class Tiles(BaseTiles):
    siz_b_LQ: int = 16
    num_warps: int = 1
    num_stages: int = 1

    @classmethod
    def plan(cls, p: Problem, *_: Any, **asked: Any) -> Self:
        return cls().clamped(p)

    def grid(self, p: Problem, **asked: Any) -> tuple[int, ...]:
        return p.NC, p.BNH

    def shared_bytes(self, p: Problem, dtype: Any, **asked: Any) -> int:
        return 4 * self.siz_b_LQ
