"""Stage parallel_fw_P: the operands of recurrent_fw_H, all chunks in parallel.

    P_ts   = D_ts scale q_t . k_s        s <= t inside the chunk
    r_t    = w_t scale / den_t
    kbar_s = abar_s k_s
    z_t    = w_t scale n_c . q_t + sum_s P_ts

The tiles that it returns have P_ts / den_t. normaliser.py has den_t. Without a normaliser it is 1,
and z is not computed.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas.gates import ChunkGates
from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.formulas.scores import causal_scores, decays, tile_steps
from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.operands.chunk_list import ChunkList
from mlstm_pallas.operands.scaled_rows import ScaledRows


class Operands(NamedTuple):
    matQ: Array  # (B * NH, S, DHQK) in the kernel dtype
    matK: Array  # (B * NH, S, DHQK)
    gates: ChunkGates
    vecN_states: Array  # (B * NH, NC, DHQK) before each chunk, float32
    # None: chunk c of q and k begins at step c L. Everything else is in the chunks of the list.
    chunks: ChunkList | None = None


class ScoresAndKeys(NamedTuple):
    """What recurrent_fw_H reads besides q, v, gamma and the initial states; and z."""

    # (B * NH, S, L) P_ts / den_t in the kernel dtype, column s - the chunk's first step
    matP: Array
    keys: ScaledRows  # (B * NH, S, DHQK) in the kernel dtype, scaled: kbar
    vecR: Array  # (B * NH, S) float32, like what follows
    vecZ: Array | None  # (B * NH, S) the signed z_t; None without a normaliser


def parallel_fw_P(
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    call: Launch,
) -> ScoresAndKeys:
    """Runs the stage, in the chunks of recurrent_fw_H."""
    p, gates, chunks = call.problem, x.gates, x.chunks
    q, k = (call.chunks(y) if chunks is None else chunks.gather(y, p.L) for y in (x.matQ, x.matK))
    kbar = k.astype(gates.vecW.dtype) * gates.vecAbar[..., None]
    n = x.vecN_states
    qk = call.product("nctk,ncsk->ncts", q, k)
    t, s = tile_steps(qk.shape, 0, p)
    mask = s <= t
    D = decays(gates.vecE, gates.vecU, mask, in_kernel=False)
    P = causal_scores(qk, D, mask, p)
    r, z = query_scale(gates.vecW, p.qk_scale), None
    if normaliser is not None:
        z = weighted(r, jnp.sum(q.astype(n.dtype) * n[:, :, None], axis=-1), p) + jnp.sum(
            P, axis=-1
        )
        normalised = normaliser.normalise(
            jnp.concatenate([P, r[..., None]], axis=-1), z, gates.vecM
        )
        P, r = normalised[..., :-1], normalised[..., -1]
    P, kbar, r = (
        y.reshape(p.BNH, p.S, *y.shape[3:]) for y in (P.astype(q.dtype), kbar.astype(q.dtype), r)
    )
    z = None if z is None else z.reshape(p.BNH, p.S)
    return ScoresAndKeys(P, ScaledRows(kbar, None), r, z)
