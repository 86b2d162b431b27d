"""Stage chunk_gates: the gates and stabilisers of all chunks (the equations are in gates.py).

chunk_gates: running sums and running maxima inside each chunk, as ``gates.local_gates`` makes them in plain jnp. Grid (NC, B * NH).
A program owns one chunk and walks over it in tiles of siz_b_LQ steps, carrying sum, maximum and number of resets. The running maximum
is a masked maximum over a siz_b_LQ x siz_b_LQ tile; with the sigmoid gate there is none to take.
Bytes: 9 vectors of B NH S float32, one more with packed sequences; no matrix product.

border_maxima: the stabilisers m_c at the chunk borders, as ``gates.border_maxima``. Grid (NC + 1, B * NH). A program reads the
summaries of the chunks before its border, in its block of up to 512; what is before each block is made by a launch of its own, of
one program a head, where there are several.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gates import (
    ChunkGates,
    LocalGates,
    chunk_summaries,
    join_chunks,
    log_input_gate,
    log_sigmoid_gate,
    nan_to_input_gate,
    pair_add,
    pair_max,
    reset_offset,
    split_for_exact_sums,
    stabilisers_at_borders,
    two_sum,
)
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.problem import InputGate, Problem, next_power_of_two
from mlstm_pallas.tiles import blocks, causal_mask, divide, loop

_INF = float("inf")
_BORDER_BLOCK = 512  # chunks that a program of border_maxima reads


def _chunk_gates_kernel(
    i_ref,  # (L,)
    f_ref,  # (L,)
    starts_ref,  # (L,) int32, 1 where a packed sequence begins; may be absent
    b_hi_ref,  # out (L,), as all that follow
    b_lo_ref,
    e_hi_ref,
    e_lo_ref,
    emax_hi_ref,
    emax_lo_ref,
    offset_ref,
    *,
    tiles: int,
    siz_b: int,
    input_gate: InputGate,
):
    sigmoid = input_gate is InputGate.SIGMOID

    def spread(tile, carry):
        i_min, i_max, decay = carry
        rows = pl.ds(tile * siz_b, siz_b)
        i, f = nan_to_input_gate(i_ref[rows], f_ref[rows])
        i = log_input_gate(i, input_gate)
        fbar, _ = log_sigmoid_gate(f)
        stored_min, stored_max = jnp.min(jnp.where(i > -_INF, i, _INF)), jnp.max(jnp.where(i > -_INF, i, -_INF))
        return jnp.minimum(i_min, stored_min), jnp.maximum(i_max, stored_max), decay + jnp.sum(-fbar)

    # m = 0 is a source as well: with the sigmoid gate, and where a packed sequence begins
    bound = 0.0 if sigmoid or starts_ref is not None else _INF
    i_min, i_max, decay = loop(tiles, spread, (jnp.float32(bound), jnp.float32(-bound), jnp.float32(0.0)))
    offset_unit = reset_offset(i_min, i_max, decay)
    last = lax.iota(jnp.int32, siz_b) == siz_b - 1

    def last_of(x):
        return jnp.sum(jnp.where(last, x, 0.0))

    def step(tile, carry):
        sum_hi, sum_lo, max_hi, max_lo, resets = carry
        rows = pl.ds(tile * siz_b, siz_b)
        i, f = nan_to_input_gate(i_ref[rows], f_ref[rows])
        i = log_input_gate(i, input_gate)
        fbar, reset = log_sigmoid_gate(f)
        hi, lo = split_for_exact_sums(fbar, jnp.max(jnp.abs(fbar)), siz_b)
        hi, lo = jnp.cumsum(hi), jnp.cumsum(lo)
        b = pair_add((hi, lo), (jnp.broadcast_to(sum_hi, hi.shape), jnp.broadcast_to(sum_lo, hi.shape)))
        begins = None if starts_ref is None else starts_ref[rows] > 0
        restarts = reset if begins is None else reset | begins
        count = resets + jnp.cumsum(restarts.astype(jnp.float32))
        offset = count * offset_unit

        def source(log_gate):
            return pair_add(two_sum(offset, log_gate), (-b[0], -b[1]))

        def only(where, pair):
            return jnp.where(where, pair[0], -_INF), jnp.where(where, pair[1], 0.0)

        stored = i != -_INF
        e_hi, e_lo = only(stored, source(jnp.where(stored, i, 0.0)))
        if sigmoid:
            emax_hi, emax_lo = source(jnp.zeros_like(i))
        else:
            source_hi, source_lo = (e_hi, e_lo) if begins is None else pair_max((e_hi, e_lo), only(begins & ~reset, source(fbar)))
            seen = causal_mask(siz_b, siz_b, 0) & (count[None, :] == count[:, None])
            tile_max_hi = jnp.max(jnp.where(seen, source_hi[None, :], -_INF), axis=1)
            largest = seen & (source_hi[None, :] == tile_max_hi[:, None])
            tile_max_lo = jnp.max(jnp.where(largest, source_lo[None, :], -_INF), axis=1)
            before = count == resets  # the maximum so far still counts
            emax_hi, emax_lo = pair_max((tile_max_hi, tile_max_lo), only(before, (max_hi, max_lo)))
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
            ref[rows] = x
        last_max = jnp.max(jnp.where(last, emax_hi, -_INF))
        return last_of(b[0]), last_of(b[1]), last_max, last_of(emax_lo), last_of(count)

    start = jnp.float32(0.0), jnp.float32(0.0), jnp.float32(-_INF), jnp.float32(0.0), jnp.float32(0.0)
    loop(tiles, step, start)


def _border_maxima_kernel(
    g_ref,  # (padded NC,) running sum of log sigmoid(f) over the chunk
    a_ref,  # (padded NC,) m of the chunk on its own
    reset_ref,  # (padded NC,) 1 where the chunk has a reset
    m_before_ref,  # (1,), or (blocks,) before each block
    m_ref,  # out (NC + 1,), or (blocks,) before each block
    *,
    block: int,
    every_border: bool,
):
    def step(j, m, border):
        chunks = pl.ds(j * block, block)
        index = j * block + lax.iota(jnp.int32, block)
        before = index < border
        g = jnp.where(before, g_ref[chunks], 0.0)
        resets = jnp.cumsum(jnp.where(before, reset_ref[chunks], 0.0))
        hi, lo = split_for_exact_sums(g, jnp.max(jnp.abs(g)), block)
        hi, lo, total_resets = jnp.cumsum(hi), jnp.cumsum(lo), jnp.max(resets)
        last = lax.iota(jnp.int32, block) == block - 1
        total_hi, total_lo = jnp.sum(jnp.where(last, hi, 0.0)), jnp.sum(jnp.where(last, lo, 0.0))
        reaches = before & (resets == total_resets)
        a = jnp.where(reaches, a_ref[chunks], -_INF) + ((total_hi - hi) + (total_lo - lo))
        return jnp.maximum(jnp.where(total_resets > 0, -_INF, m + (total_hi + total_lo)), jnp.max(a))

    if every_border:
        border = pl.program_id(0)
        of = divide(lax.max(border - 1, np.int32(0)), block)
        m_ref[border] = step(of, m_before_ref[of], border)
        return

    def whole_block(j, m):
        m_ref[j] = m
        return step(j, m, (j + 1) * block)

    loop(m_ref.shape[0], whole_block, m_before_ref[0])


def chunk_gates(
    vecI: jax.Array,
    vecF: jax.Array,
    scaM_initial: jax.Array,
    starts: jax.Array | None = None,
    input_gate: InputGate = InputGate.EXP,
    scaM_states: jax.Array | None = None,
    *,
    problem: Problem,
    config: KernelConfig,
    interpret: bool = False,
) -> ChunkGates:
    """Launches the stage. Config: siz_b_LQ.

    Args:
      vecI, vecF: pre-activations (B, NH, S), float32.
      scaM_initial: (B, NH), float32; zeros with the sigmoid gate.
      starts: (B, NH, S) int32, 1 where a packed sequence begins; None: nowhere.
      scaM_states: the stabilisers of the borders, (B, NH, NC + 1) float32, where they are known.
    """
    p, stage = problem, config.stage("chunk_gates").fitted(problem)
    chunk = pl.BlockSpec((None, p.L), lambda c, b: (b, c))
    b_hi, b_lo, e_hi, e_lo, emax_hi, emax_lo, offset = (
        x.reshape(p.B, p.NH, p.NC, p.L)
        for x in kernel_call(
            _chunk_gates_kernel,
            name="chunk_gates",
            grid=(p.NC, p.BNH),
            in_specs=[chunk, chunk, None if starts is None else chunk],
            out_specs=[chunk] * 7,
            out_shape=[jax.ShapeDtypeStruct((p.BNH, p.S), jnp.float32)] * 7,
            stage=stage,
            interpret=interpret,
            tiles=blocks(p.L, stage.siz_b_LQ),
            siz_b=stage.siz_b_LQ,
            input_gate=input_gate,
        )(vecI.reshape(p.BNH, p.S), vecF.reshape(p.BNH, p.S), None if starts is None else starts.reshape(p.BNH, p.S))
    )
    local = LocalGates((b_hi, b_lo), (e_hi, e_lo), (emax_hi, emax_lo), offset)
    if scaM_states is None and input_gate is InputGate.SIGMOID:
        scaM_states = stabilisers_at_borders(local, scaM_initial, input_gate)
    if scaM_states is not None:
        return join_chunks(local, scaM_states, input_gate)

    block = min(next_power_of_two(p.NC), _BORDER_BLOCK)
    padded = -(-p.NC // block) * block
    summaries = [jnp.pad(x.astype(jnp.float32).reshape(p.BNH, p.NC), [(0, 0), (0, padded - p.NC)]) for x in chunk_summaries(local)]
    row = pl.BlockSpec((None, padded), lambda c, b: (b, 0))

    def maxima(m_before, programs, size):
        return kernel_call(
            _border_maxima_kernel,
            name="border_maxima",
            grid=(programs, p.BNH),
            in_specs=[row, row, row, pl.BlockSpec((None, m_before.shape[1]), lambda c, b: (b, 0))],
            out_specs=[pl.BlockSpec((None, size), lambda c, b: (b, 0))],
            out_shape=[jax.ShapeDtypeStruct((p.BNH, size), jnp.float32)],
            stage=stage,
            interpret=interpret,
            block=block,
            every_border=programs > 1,
        )(*summaries, m_before)[0]

    m = scaM_initial.reshape(p.BNH, 1)
    if padded > block:
        m = maxima(m, 1, padded // block)
    m = maxima(m, p.NC + 1, p.NC + 1)
    return join_chunks(local, m.reshape(p.B, p.NH, p.NC + 1))
