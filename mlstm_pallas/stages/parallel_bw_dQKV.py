"""Stage parallel_bw_dQKV: the gradients of q, k and v, from states and tiles that are made before, for chunks of any size.

    dq_t = r_t (C_c dh_t + dz_t den_t n_c) + sum_s scale dP_ts k_s          r_t = w_t scale / den_t
    dk_s = abar_s (dC_{c+1} v_s + dn_{c+1}) + sum_t scale dP_ts q_t
    dv_s = abar_s dC_{c+1}^T k_s + sum_t (P_ts / den_t) dh_t                (P / den and scale dP: parallel_bw_dP)

Grid (blocks of a chunk's gradients, NC, B * NH): those of one chunk run at the same time and find what they share in the L2. A program
owns siz_b_LQ rows and siz_b_DHQK columns of dq or dk, or siz_b_DHHV columns of dv: one product with the state, whose sum is then
weighted, and one with the tiles, both in steps of siz_b_loop. Nothing but products is in its loops. For the gates' gradients the inner
products of q and k with the state's part are taken in float32, and, by programs that own a siz_b_DHQK x siz_b_DHHV block of the
states, those of C_c and dC_{c+1}.

FLOPs: B NH S (6 DHQK DHHV + (L + siz_b_LQ) (2 DHQK + DHHV)).
Bytes: B NH (S (4 DHQK + 3 DHHV + 2 L) + 2 NC DHQK DHHV) itemsize; the operands again for each column and row block, mostly from L2.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gate_gradients import RowGradients
from mlstm_pallas.gates import ChunkGates
from mlstm_pallas.launch import kernel_call
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.parallel_bw_dP import GradientTiles
from mlstm_pallas.tiles import Precision, block_at, blocks, divide, dot, loop, remainder, sum_of


class Gradients(NamedTuple):
    """What is not asked for is None."""

    matDeltaQ: Any  # (B, NH, S, DHQK) in the kernel dtype
    matDeltaK: Any  # (B, NH, S, DHQK)
    matDeltaV: Any  # (B, NH, S, DHHV)
    from_state: Any  # (B, NH, S) float32: q_t with the part of dq_t that comes from the chunk's first state
    to_state: Any  # (B, NH, S) float32: k_s with the part of dk_s that goes to the chunk's last state
    states: Any  # (B, NH, NC) float32: <C_c, dC_{c+1}>


def _parallel_bw_dQKV_kernel(
    q_ref,  # (L, DHQK)
    k_ref,  # (L, DHQK)
    v_ref,  # (L, DHHV)
    dh_ref,  # (L, DHHV)
    C_ref,  # (DHQK, DHHV) before the chunk; this and n for dq
    n_ref,  # (DHQK,), absent without a normaliser
    dC_ref,  # (DHQK, DHHV) after the chunk; this for dk and dv
    dn_ref,  # (DHQK,), for dk
    P_ref,  # (L, L), for dv
    dP_ref,  # (L, L), for dq and dk
    w_ref,  # (L,), as all that follow
    abar_ref,
    inv_den_ref,  # absent without a normaliser
    dz_den_ref,  # likewise
    *out_refs,  # of what is wanted: dq (L, DHQK), from_state (column blocks, L); dk, to_state likewise; dv (L, DHHV); states (blocks,)
    wanted: str,
    scale: float,
    siz_b_LQ: int,
    siz_b_DHQK: int,
    siz_b_DHHV: int,
    siz_b_loop: int,
    precision: Precision,
):
    L, outs = q_ref.shape[0], iter(out_refs)
    refs = {x: [next(outs) for _ in range(2 if x in "QK" else 1)] for x in wanted}

    def times_state(rows, columns, a_ref, X_ref, size, *, turned):
        step = min(siz_b_loop, a_ref.shape[1])

        def product(x):
            X = X_ref[columns, block_at(x, step)] if turned else X_ref[block_at(x, step), columns]
            return dot(a_ref[rows, block_at(x, step)], X, precision, b_axis=1 if turned else 0)

        return sum_of(a_ref.shape[1] // step, product, (siz_b_LQ, size))

    def plus_tiles(acc, row, columns, tile_ref, values_ref, *, of_keys):
        """From the keys at and before the rows, or, as the rows are keys, from the queries at and behind them."""
        step, rows = min(siz_b_loop, siz_b_LQ), block_at(row, siz_b_LQ)
        first = row * (siz_b_LQ // step) if of_keys else 0

        def add(x, acc):
            others = block_at(first + x, step)
            tile = tile_ref[others, rows] if of_keys else tile_ref[rows, others]
            return acc + dot(tile, values_ref[others, columns], precision, a_axis=0 if of_keys else 1)

        return loop(L // step - first if of_keys else (row + 1) * (siz_b_LQ // step), add, acc)

    def dq(row, column, rows, columns):
        dq_ref, from_state_ref = refs["Q"]
        r = w_ref[rows] * scale
        if inv_den_ref is not None:
            r *= inv_den_ref[rows]
        acc = times_state(rows, columns, dh_ref, C_ref, siz_b_DHQK, turned=True) * r[:, None]
        if n_ref is not None:
            acc += (r * dz_den_ref[rows])[:, None] * n_ref[columns][None, :]
        from_state_ref[column, rows] = jnp.sum(acc * q_ref[rows, columns].astype(jnp.float32), axis=1)
        dq_ref[rows, columns] = plus_tiles(acc, row, columns, dP_ref, k_ref, of_keys=False).astype(dq_ref.dtype)

    def dk(row, column, rows, columns):
        dk_ref, to_state_ref = refs["K"]
        acc = times_state(rows, columns, v_ref, dC_ref, siz_b_DHQK, turned=True)
        acc = (acc + dn_ref[columns][None, :]) * abar_ref[rows][:, None]
        to_state_ref[column, rows] = jnp.sum(acc * k_ref[rows, columns].astype(jnp.float32), axis=1)
        dk_ref[rows, columns] = plus_tiles(acc, row, columns, dP_ref, q_ref, of_keys=True).astype(dk_ref.dtype)

    def dv(row, column, rows, columns):
        (dv_ref,) = refs["V"]
        acc = times_state(rows, columns, k_ref, dC_ref, siz_b_DHHV, turned=False) * abar_ref[rows][:, None]
        dv_ref[rows, columns] = plus_tiles(acc, row, columns, P_ref, dh_ref, of_keys=True).astype(dv_ref.dtype)

    def states(row, column, rows, columns):
        (states_ref,) = refs["C"]
        C, dC = C_ref[rows, columns].astype(jnp.float32), dC_ref[rows, columns].astype(jnp.float32)
        states_ref[row * blocks(C_ref.shape[1], siz_b_DHHV) + column] = jnp.sum(C * dC)

    start, index = 0, pl.program_id(0)
    of_L, of_DHQK, of_DHHV = (L, siz_b_LQ), (q_ref.shape[1], siz_b_DHQK), (v_ref.shape[1], siz_b_DHHV)
    roles = {"Q": (dq, of_L, of_DHQK), "K": (dk, of_L, of_DHQK), "V": (dv, of_L, of_DHHV), "C": (states, of_DHQK, of_DHHV)}
    for role, of_rows, of_columns in (roles[x] for x in wanted):
        columns = blocks(*of_columns)
        end = start + blocks(*of_rows) * columns

        @pl.when((start <= index) & (index < end))
        def _(role=role, start=start, columns=columns, height=of_rows[1], width=of_columns[1]):
            row, column = divide(index - start, columns), remainder(index - start, columns)
            role(row, column, block_at(row, height), block_at(column, width))

        start = end


def parallel_bw_dQKV(
    matQ: jax.Array,
    matK: jax.Array,
    matV: jax.Array,
    matDeltaH: jax.Array,
    gates: ChunkGates,
    rows: RowGradients,
    scores: GradientTiles,
    matC_states: jax.Array,
    vecN_states: jax.Array,
    matDeltaC_states: jax.Array,
    vecDeltaN_states: jax.Array,
    *,
    problem: Problem,
    config: KernelConfig,
    wanted: str = "QKV",
    interpret: bool = False,
) -> Gradients:
    """Launches the stage. Config: siz_b_LQ (at most MAX_TILE), siz_b_DHQK, siz_b_DHHV, siz_b_loop.

    Args:
      matQ, matK, matV, matDeltaH: in the kernel dtype.
      scores: of parallel_bw_dP.
      matC_states, vecN_states: before each chunk; matDeltaC_states, vecDeltaN_states: after each chunk. (B, NH, NC, DHQK, DHHV) in the
        kernel dtype and (B, NH, NC, DHQK) float32.
      wanted: of which inputs the gradients are wanted, Q, K, V, and C for the inner products of the states.
    """
    p, stage = problem, config.stage("parallel_bw_dQKV").fitted(problem, "parallel_bw_dQKV")
    LQ, BK, BV = stage.siz_b_LQ, stage.siz_b_DHQK, stage.siz_b_DHHV
    normalised = rows.vecInvDen is not None
    tile, keys, values = (pl.BlockSpec((None, p.L, width), lambda x, c, b: (b, c, 0)) for width in (p.L, p.DHQK, p.DHHV))
    state = pl.BlockSpec((None, None, p.DHQK, p.DHHV), lambda x, c, b: (b, c, 0, 0))
    norm = pl.BlockSpec((None, None, p.DHQK), lambda x, c, b: (b, c, 0))
    row = pl.BlockSpec((None, p.L), lambda x, c, b: (b, c))
    of_keys = blocks(p.DHQK, BK)
    sums = pl.BlockSpec((None, of_keys, p.L), lambda x, c, b: (b, 0, c))

    def made(width: int):
        return jax.ShapeDtypeStruct((p.BNH, p.S, width), matQ.dtype)

    sums_shape = jax.ShapeDtypeStruct((p.BNH, of_keys, p.S), jnp.float32)
    of_states = of_keys * blocks(p.DHHV, BV)
    outs = {
        "Q": ((keys, sums), (made(p.DHQK), sums_shape)),
        "K": ((keys, sums), (made(p.DHQK), sums_shape)),
        "V": ((values,), (made(p.DHHV),)),
        "C": (
            (pl.BlockSpec((None, None, of_states), lambda x, c, b: (b, c, 0)),),
            (jax.ShapeDtypeStruct((p.BNH, p.NC, of_states), jnp.float32),),
        ),
    }
    of_rows = p.L // LQ
    programs = {"Q": of_rows * of_keys, "K": of_rows * of_keys, "V": of_rows * blocks(p.DHHV, BV), "C": of_states}
    found = kernel_call(
        _parallel_bw_dQKV_kernel,
        name="parallel_bw_dQKV",
        grid=(sum(programs[x] for x in wanted), p.NC, p.BNH),
        in_specs=[
            *(keys, keys, values, values, state, norm if normalised else None, state, norm, tile, tile),
            *[row] * 2,
            *[row if normalised else None] * 2,
        ],
        out_specs=[spec for x in wanted for spec in outs[x][0]],
        out_shape=[shape for x in wanted for shape in outs[x][1]],
        stage=stage,
        interpret=interpret,
        wanted=wanted,
        scale=p.qk_scale,
        siz_b_LQ=LQ,
        siz_b_DHQK=BK,
        siz_b_DHHV=BV,
        siz_b_loop=stage.siz_b_loop,
        precision=config.dot_precision(matQ.dtype, interpret),
    )(
        *(x.reshape(p.BNH, p.S, -1) for x in (matQ, matK, matV, matDeltaH)),
        matC_states.reshape(p.BNH, -1, p.DHQK, p.DHHV),
        vecN_states.reshape(p.BNH, -1, p.DHQK) if normalised else None,
        matDeltaC_states.reshape(p.BNH, -1, p.DHQK, p.DHHV),
        vecDeltaN_states.reshape(p.BNH, -1, p.DHQK),
        *(x.reshape(p.BNH, p.S, p.L) for x in (scores.matP, scores.matDeltaP)),
        *(x.reshape(p.BNH, p.S) for x in (gates.vecW, gates.vecAbar)),
        *(None if x is None else x.reshape(p.BNH, p.S) for x in (rows.vecInvDen, rows.vecDzDen)),
    )
    found = iter(found)
    gradients, inner = dict.fromkeys("QKV"), dict.fromkeys("QKC")
    for x in wanted:
        if x in gradients:
            gradients[x] = next(found).reshape(p.B, p.NH, p.S, -1)
        if x in inner:
            inner[x] = next(found).sum(-1 if x == "C" else 1).reshape(p.B, p.NH, -1)
    return Gradients(*gradients.values(), *inner.values())
