"""Stage step_gradients: the gradients of log i and f from the sums of the other stages.

f_r decays everything that passes from before r to r or later. In a tile of T steps these are the
pairs s < r <= t, what queries from r on read from before the tile, what keys before r add beyond
it, and what passes through the whole tile. No difference of long sums is taken.

m_t is i_t or log sigmoid(f_t) + m_{t-1}. In the first case the gradient that reaches m_t goes to
i_t. In the second it goes to f_t and, unless a packed segment begins at t, on to m_{t-1}.

It runs three bodies, all against time: the first step and the first tile are the last in time.

m_summaries: what each chunk passes on to the m before it.
m_carries: what reaches m at the chunk boundaries, a prefix scan over the chunks of a head.
gradients: the gradients of every step. If m is a constant, it is the only body.

Bytes of the kernels: 2 L / T + 10 vectors of B NH S float32; no matrix product.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas.gate_gradients import TileSums
from mlstm_pallas.formulas.gates import DECAY_NONZERO, M_FROM_PREVIOUS, M_GRAD_FLOWS
from mlstm_pallas.formulas.tiles import divide, remainder
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.vectors.scan import PrefixScan, VectorOf, scan_chunks, vector_call


class Operands(NamedTuple):
    vecF: Array  # (B * NH, S) float32, like all floats here
    tile_sums: TileSums
    q_dot_dq_inter: Array  # (B * NH, S), of parallel_bw_dQKV, with the inter-chunk parts
    k_dot_dk_inter: Array  # (B * NH, S)
    pass_through: Array  # (B * NH, NC), what passes through each chunk
    flags: Array  # (B * NH, S) int32, of ``gates.join_flags``
    dm: Array | None  # (B * NH, S); None: m is a constant


def _join(later: Any, x: Any) -> Any:
    """Joins runs of steps: what each passes on to the m before it, and 1 if all its steps do."""
    return x[0] + jnp.where(x[1] > 0, later[0], 0.0), x[1] * later[1]


def m_summaries(scan: PrefixScan, dm: Array, flags: Array) -> Any:
    """No output per step, and the two of ``_join`` for each chunk."""
    flows = jnp.where((flags & M_GRAD_FLOWS) > 0, 1.0, 0.0)
    return (), scan.running(_join, (jnp.where(flows > 0, dm, 0.0), flows), (0.0, 1.0))


def m_carries(scan: PrefixScan, passed: Array, flows: Array, carry: Array) -> Array:
    """What each chunk passes on to the m before it; the steps of ``scan`` are the chunks."""
    passed, flows = scan.running(_join, (passed, flows), (0.0, 1.0))
    return passed + jnp.where(flows > 0, carry, 0.0)


def gradients(
    scan: PrefixScan,
    per_query: VectorOf,
    per_key: VectorOf,
    diagonal: Array,
    q_inter: Array,
    k_inter: Array,
    f: Array,
    flags: Array,
    dm: Array | None,
    pass_through: Array,
    *,
    T: int,
    isolates: bool,
    m: Any = None,
) -> Any:
    """The gradients of log i and f per step, and none per chunk; m: what reaches m around it."""
    n = scan.L // T
    tile = divide(scan.step, T)

    def add_tile(other: Any, sums: Any) -> Any:
        """Adds what a tile's queries read and its keys write, and returns what passes through it.

        Sums are by step: of q_t with the part of dq_t from before the tile of t, and W_ts - W_st
        over the steps s of this tile; of k_s with the part of dk_s from beyond the tile of s; of
        k_s with the rest of dk_s; of q_t with the part of dq_t from before tile ``other``.
        """
        queries, keys, keys_intra, read = sums
        # Neither is written elsewhere.
        W_queries, W_keys = per_query(other, tile <= other), per_key(other, tile >= other)
        intra = jnp.where(tile == other, W_keys, 0.0)
        # What later queries read from before this tile, and what earlier keys add beyond the chunk.
        through = jnp.where(tile < other, read, jnp.where(tile > other, k_inter, 0.0))
        sums = (
            queries + W_queries - intra,
            keys + jnp.where(tile > other, W_keys, 0.0),
            keys_intra + intra,
            read + jnp.where(tile < other, W_queries, 0.0),
        )
        return sums, through

    sums, through = scan.over_tiles(n, add_tile, (q_inter, k_inter, diagonal, q_inter))
    queries, keys, keys_intra, _ = sums

    def sums_before(scan: PrefixScan, x: Array) -> Any:
        return scan.sums(scan.shifted(x, 0.0), T=T)[0]

    # What is later reaches nothing before a step that reads nothing from before it, even as inf.
    nonzero = jnp.where((flags & DECAY_NONZERO) > 0, 1.0, 0.0)
    if isolates:
        continues = jnp.where(remainder(scan.step, T) > 0, scan.shifted(nonzero, 0.0), 0.0)
        from_step, _ = scan.running(_join, (queries, continues), (0.0, 1.0))
    else:
        (from_step,) = scan.sums(queries, T=T)
    # The last key of a tile is before none of its steps.
    before_step = scan.against(sums_before, jnp.where(remainder(scan.step, T) > 0, keys, 0.0))
    df, di = from_step + before_step + through + pass_through, keys + keys_intra
    df = jnp.where(nonzero > 0, df, 0.0)
    if dm is not None:
        _, (passed, flows) = m_summaries(scan, dm, flags)
        dm += scan.shifted(passed + jnp.where(flows > 0, m[0], 0.0), m[0])
        from_previous = (flags & M_FROM_PREVIOUS) > 0
        di += jnp.where(from_previous, 0.0, dm)
        df += jnp.where(from_previous, dm, 0.0)
    return [di, df * jax.nn.sigmoid(-f)], ()


def step_gradients(
    x: Operands, *, call: Launch, vector_call: Any = vector_call, scan_chunks: Any = scan_chunks
) -> tuple[Array, Array, Array]:
    """The gradients of log i_t and f_t, (B * NH, S), and the one of the initial m, (B * NH,)."""
    p, m, dm_initial = call.problem, None, jnp.zeros_like(x.vecF[:, 0])
    call = dataclasses.replace(call, problem=dataclasses.replace(p, reverse=not p.reverse))
    if x.dm is not None:
        steps = x.dm, x.flags
        _, summaries, _ = vector_call(m_summaries, steps, (), 2, name="m_summaries", call=call)
        m = scan_chunks(m_carries, summaries, dm_initial, name="m_carry_scan", call=call)
    (di, df), _, m = vector_call(
        functools.partial(gradients, T=p.L // x.tile_sums.per_query.shape[1], isolates=p.isolates),
        (*x.tile_sums, x.q_dot_dq_inter, x.k_dot_dk_inter, x.vecF, x.flags, x.dm),
        ("float32",) * 2,
        chunks=(x.pass_through,),
        name="step_gradients",
        call=call,
        m=m,
    )
    if m is not None:
        dm_initial = m[:, p.memory_index(0, p.NC + 1)]
    return di.reshape(p.BNH, p.S), df.reshape(p.BNH, p.S), dm_initial
