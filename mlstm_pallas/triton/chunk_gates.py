"""chunk_gates in Triton: two kernels.

chunk_gates: running sums and running maxima inside each chunk, as ``gates.local_gates``. Grid
(NC, B * NH). A CTA owns one chunk and loops over it in tiles of siz_b_LQ steps, carrying sum,
maximum and number of resets. The running maximum is a masked maximum over a siz_b_LQ x siz_b_LQ
tile; the sigmoid gate needs none.
Bytes: 9 vectors of B NH S float32, one more with packed segments; no matrix product.

stabiliser_scan: m_c at the chunk boundaries, as ``gates.stabiliser_scan``. Grid (NC + 1, B * NH). A
CTA reads the summaries of the chunks before its boundary, within a block of up to 512 chunks. With
several blocks, a first launch with one CTA per head computes the stabilisers before the blocks.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas import gates
from mlstm_pallas.formulas.gates import (
    ChunkGates,
    LocalGates,
    add_two_floats,
    log_gates,
    max_two_floats,
    reset_offset,
    split_for_exact_sums,
    stabiliser_sources,
    where_two_float,
)
from mlstm_pallas.formulas.tiles import (
    block_at,
    blocks,
    blocks_over,
    causal_mask,
    divide,
    loop,
)
from mlstm_pallas.problem.dimensions import InputGate, next_power_of_two
from mlstm_pallas.stages.chunk_gates import Operands
from mlstm_pallas.stages.stage import Launch, Tiles
from mlstm_pallas.triton.launch import floats, kernel_call, operands

_INF = float("inf")
_SCAN_BLOCK = 512  # chunks that a CTA of stabiliser_scan reads


def _chunk_gates_kernel(
    vecI,  # (L,)
    vecF,  # (L,)
    segment_starts,  # (L,) int32, 1 where a packed segment begins; may be absent
    vecB,  # out two (L,); all outputs have this shape
    vecE,  # out two
    vecEmax,  # out two
    vecOffset,  # out
    *,
    call,
    input_gate,
):
    siz_b = call.tiles.siz_b_LQ
    num_tiles = blocks(call.problem.L, siz_b)
    sigmoid = input_gate is InputGate.SIGMOID

    def load(tile):
        steps = block_at(tile, siz_b)
        return steps, *log_gates(vecI[steps], vecF[steps], input_gate)

    def spread(tile, carry):
        i_min, i_max, decay = carry
        _, i, fbar, _ = load(tile)
        least = jnp.min(jnp.where(i > -_INF, i, _INF))
        largest = jnp.max(jnp.where(i > -_INF, i, -_INF))
        return jnp.minimum(i_min, least), jnp.maximum(i_max, largest), decay + jnp.sum(-fbar)

    # m = 0 is a source too with the sigmoid gate, and where a packed segment begins.
    zero, bound = jnp.float32(0.0), 0.0 if sigmoid or segment_starts is not None else _INF
    i_min, i_max, decay = loop(num_tiles, spread, (jnp.float32(bound), jnp.float32(-bound), zero))
    offset_unit = reset_offset(i_min, i_max, decay)
    last = lax.iota(jnp.int32, siz_b) == siz_b - 1

    def last_of(x):
        return jnp.sum(jnp.where(last, x, 0.0))

    def step(tile, carry):
        total, largest, resets = carry
        steps, i, fbar, reset = load(tile)
        hi, lo = split_for_exact_sums(fbar, jnp.max(jnp.abs(fbar)), siz_b)
        hi, lo = jnp.cumsum(hi), jnp.cumsum(lo)
        total = jax.tree.map(lambda x: jnp.broadcast_to(x, hi.shape), total)
        b = add_two_floats((hi, lo), total)
        is_start = None if segment_starts is None else segment_starts[steps] > 0
        is_boundary = reset if is_start is None else reset | is_start
        count = resets + jnp.cumsum(is_boundary.astype(jnp.float32))
        offset = count * offset_unit

        e, emax = stabiliser_sources(i, fbar, b, offset, reset, is_start, input_gate)
        if not sigmoid:
            source_hi, source_lo = emax
            seen = causal_mask((siz_b, siz_b), 0) & (count[None, :] == count[:, None])
            tile_max_hi = jnp.max(jnp.where(seen, source_hi[None, :], -_INF), axis=1)
            equal = seen & (source_hi[None, :] == tile_max_hi[:, None])
            tile_max_lo = jnp.max(jnp.where(equal, source_lo[None, :], -_INF), axis=1)
            reaching = where_two_float(count == resets, largest)  # which still counts there
            emax_hi, emax_lo = max_two_floats((tile_max_hi, tile_max_lo), reaching)
            emax = emax_hi, jnp.where(emax_hi == -_INF, 0.0, emax_lo)

        for ref, x in zip(
            (*vecB, *vecE, *vecEmax, vecOffset), (*b, *e, *emax, offset), strict=True
        ):
            ref[steps] = x
        return *(tuple(map(last_of, x)) for x in (b, emax)), last_of(count)

    loop(num_tiles, step, ((zero, zero), (jnp.float32(-_INF), zero), zero))


def _stabiliser_scan_kernel(
    scaG,  # (padded NC,) sum of log sigmoid(f) over the chunk, -inf where it has a reset
    scaA,  # (padded NC,) m after the chunk from an empty state
    scaM_before,  # (1,), or (blocks,) before each block
    scaM,  # out (NC + 1,), or (blocks,) before each block
    *,
    call,
    block,
    every_boundary,
):
    def step(j, m, boundary):
        chunks = block_at(j, block)
        before = chunks.start + lax.iota(jnp.int32, block) < boundary
        g = jnp.where(before, scaG[chunks], 0.0)
        reset = g == -_INF
        g, resets = jnp.where(reset, 0.0, g), jnp.cumsum(reset.astype(jnp.float32))
        hi, lo = split_for_exact_sums(g, jnp.max(jnp.abs(g)), block)
        hi, lo, total_resets = jnp.cumsum(hi), jnp.cumsum(lo), jnp.max(resets)
        last = lax.iota(jnp.int32, block) == block - 1
        total_hi, total_lo = (jnp.sum(jnp.where(last, x, 0.0)) for x in (hi, lo))
        reaches = before & (resets == total_resets)
        a = jnp.where(reaches, scaA[chunks], -_INF) + ((total_hi - hi) + (total_lo - lo))
        return jnp.maximum(
            jnp.where(total_resets > 0, -_INF, m + (total_hi + total_lo)), jnp.max(a)
        )

    if every_boundary:
        boundary = pl.program_id(0)
        of = divide(lax.max(boundary - 1, np.int32(0)), block)
        scaM[boundary] = step(of, scaM_before[of], boundary)
        return

    def whole_block(j, m):
        scaM[j] = m
        return step(j, m, (j + 1) * block)

    loop(scaM.shape[0], whole_block, scaM_before[0])


def chunk_gates(
    x: Operands,
    *,
    input_gate: InputGate = InputGate.EXP,
    with_flags: bool = False,
    only_boundaries: bool = False,
    call: Launch,
) -> ChunkGates | tuple[jax.Array, jax.Array]:
    """Runs the stage: ``stages/chunk_gates.py``."""
    x = call.processing_order(x)
    p, m = call.problem, x.scaM_states
    vec = floats(p.BNH, p.S)
    y = kernel_call(
        _chunk_gates_kernel,
        operands(x, vecI="bt", vecF="bt", segment_starts="bt"),
        dict.fromkeys(("vecB", "vecE", "vecEmax"), ((vec, vec), "bt"))
        | dict(vecOffset=(vec, "bt")),
        call=call,
        input_gate=input_gate,
    )
    local = LocalGates(*jax.tree.map(call.chunks, tuple(y.values())))
    if m is None and input_gate is InputGate.SIGMOID:  # zeros, without a kernel
        m = gates.stabiliser_scan(local, x.scaM_initial, input_gate)
    elif m is None:
        block, m = min(next_power_of_two(p.NC), _SCAN_BLOCK), x.scaM_initial[:, None]
        padding = [(0, 0), (0, -p.NC % block)]
        g, a = ((jnp.pad(y, padding), "b0") for y in gates.chunk_summaries(local))
        num_blocks = blocks_over(p.NC, block)
        # First m before each block, which with one block is the initial one; then every m.
        launches = [(1, num_blocks)] * (num_blocks > 1) + [(p.NC + 1, p.NC + 1)]
        for ctas, size in launches:
            m = kernel_call(
                _stabiliser_scan_kernel,
                dict(scaG=g, scaA=a, scaM_before=(m, "b0")),
                dict(scaM=(floats(p.BNH, size), "b0")),
                grid=(ctas, p.BNH),
                call=call,
                block=block,
                every_boundary=ctas > 1,
            )["scaM"]
    if only_boundaries:
        return m[:, 1:], gates.chunk_summaries(local)[0]
    joined: ChunkGates = call.processing_order(gates.join_chunks(local, m, input_gate))
    return joined


@dataclasses.dataclass(frozen=True)
class ChunkGatesTiles(Tiles):
    siz_b_LQ: int = 16
    num_warps: int = 1
    num_stages: int = 1
