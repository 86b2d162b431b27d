"""parallel_fw_P in Triton.

Grid (NC, B * NH). A CTA owns one chunk of L steps and reads siz_b_DHQK columns of q and k at a
time. So each tile of decays is computed once, not once per column block of v.

FLOPs: tokens (L + 1) K. Bytes: q, k, kbar and P, tokens (3 K + L) itemsize.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.formulas.scores import causal_scores, decays, tile_steps
from mlstm_pallas.formulas.tiles import dot, pieces, weighted
from mlstm_pallas.launches.kernel_tiles import KernelSpec, Tiles
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.operands.scaled_rows import ScaledRows
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages.parallel_fw_P import Operands, ScoresAndKeys
from mlstm_pallas.triton.launch import entry_rows, floats, kernel_call, operands


def _parallel_fw_P_kernel(
    entries,  # of ``ChunkList``: () each; absent without a list
    matQ,  # (L, DHQK), or (S, DHQK) with a list
    matK,
    vecN_states,  # (DHQK,), absent without a normaliser
    vecE,  # two (L,)
    vecU,  # two (L,)
    vecW,  # (L,)
    vecAbar,  # (L,)
    vecM,  # (L,), absent without a normaliser
    matP,  # out (L, L)
    vecR,  # out (L,)
    matKbar,  # out (L, DHQK)
    vecZ,  # out (L,), absent without a normaliser
    *,
    call,
    normaliser,
):
    L, scale, siz_b = call.problem.L, call.problem.qk_scale, call.tiles.siz_b_DHQK
    DHQK = matQ.shape[1]
    rows, matQ, matK = entry_rows(entries, call, matQ, matK)
    scores, q_n = jnp.zeros((L, L), jnp.float32), jnp.zeros((L,), jnp.float32)
    for columns in pieces(DHQK, siz_b):
        q, k = matQ[rows, columns], matK[rows, columns]
        scores += dot(q, k, call.precision, b_axis=1)
        if vecN_states is not None:
            q_n += jnp.sum(q.astype(jnp.float32) * vecN_states[columns][None, :], axis=1)
        kbar = k.astype(jnp.float32) * vecAbar[...][:, None]
        matKbar[:, columns] = kbar.astype(matKbar.dtype)
    e, u = ([ref[...] for ref in pair] for pair in (vecE, vecU))
    t, s = tile_steps((L, L), 0, call.problem)
    P = causal_scores(scores, decays(e, u), s <= t, call.problem)
    r = query_scale(vecW[...], scale)
    if normaliser is not None:
        z = weighted(r, q_n, call.problem) + jnp.sum(P, axis=1)
        inv_den = 1.0 / normaliser.denominator(z, vecM[...])
        P, r = P * inv_den[:, None], r * inv_den
        vecZ[...] = z
    matP[...] = P.astype(matP.dtype)
    vecR[...] = r


def parallel_fw_P(
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    call: Launch,
) -> ScoresAndKeys:
    """Runs the stage: ``stages/parallel_fw_P.py``."""
    p, g = call.problem, x.gates.per_step()
    kbar_steps = x.matK.shape[1] if x.chunks is None else p.S
    chunk, vector = "bt0" if x.chunks is None else "bs0", floats(p.BNH, p.S)
    y = kernel_call(
        _parallel_fw_P_kernel,
        operands(x.chunks, entries="bc")
        | operands(x, matQ=chunk, matK=chunk)
        | operands(normaliser and x, vecN_states="bc0")
        | operands(g, vecE="bt", vecU="bt", vecW="bt", vecAbar="bt")
        | operands(normaliser and g, vecM="bt"),
        dict(
            matP=(jax.ShapeDtypeStruct((p.BNH, p.S, p.L), x.matQ.dtype), "bt0"),
            vecR=(vector, "bt"),
            matKbar=(jax.ShapeDtypeStruct((p.BNH, kbar_steps, p.DHQK), x.matQ.dtype), "bt0"),
            vecZ=(vector if normaliser else None, "bt"),
        ),
        call=call,
        normaliser=normaliser,
    )
    return ScoresAndKeys(y["matP"], ScaledRows(y["matKbar"], None), y["vecR"], y["vecZ"])


@dataclasses.dataclass(frozen=True)
class ParallelFwPTiles(Tiles):
    siz_b_DHQK: int
    num_warps: int

    def shared_bytes(self, p: Problem, dtype: Any, kernel: KernelSpec) -> int:
        return 2 * p.L * self.siz_b_DHQK * dtype.itemsize

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, kernel: KernelSpec) -> Self:
        """Tiles of q and k of 4096 elements; one warp per 16 steps, more in float32."""
        if dtype.itemsize > 2:
            return cls(64, num_warps=4).clamped(p)
        return cls(4096 // min(p.L, 64), num_warps=min(max(p.L // 16, 1), 16)).clamped(p)
