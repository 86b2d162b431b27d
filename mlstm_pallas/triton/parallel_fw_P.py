"""parallel_fw_P in Triton.

Grid (NC, B * NH). A CTA owns one chunk of L steps and reads siz_b_DHQK columns of q and k at a
time. So each tile of decays is computed once, not once for each column block of v.

FLOPs: R (L + 1) K. Bytes: q, k, kbar and P, R (3 K + L) itemsize.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.gpu import Gpu
from mlstm_pallas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Launch, ScaledRows
from mlstm_pallas.stage import Tiles as BaseTiles
from mlstm_pallas.stages.parallel_fw_P import Operands, ScanOperands
from mlstm_pallas.tiles import Precision, causal_mask, decay_tile, dot
from mlstm_pallas.triton.launch import kernel_call, sequence_spec


def _parallel_fw_P_kernel(
    q_ref: Any,  # (L, DHQK)
    k_ref: Any,  # (L, DHQK)
    n_ref: Any,  # (DHQK,), absent without a normaliser
    e_hi_ref: Any,  # (L,)
    e_lo_ref: Any,  # (L,)
    u_hi_ref: Any,  # (L,)
    u_lo_ref: Any,  # (L,)
    w_ref: Any,  # (L,)
    abar_ref: Any,  # (L,)
    m_ref: Any,  # (L,), absent where the floor does not need it
    P_ref: Any,  # out (L, L)
    r_ref: Any,  # out (L,)
    kbar_ref: Any,  # out (L, DHQK)
    z_ref: Any = None,  # out (L,), absent without a normaliser
    *,
    siz_b_DHQK: int,
    scale: float,
    normaliser: Normaliser | None,
    precision: Precision,
) -> None:
    L, DHQK = q_ref.shape
    scores, q_n = jnp.zeros((L, L), jnp.float32), jnp.zeros((L,), jnp.float32)
    for start in range(0, DHQK, siz_b_DHQK):
        columns = pl.ds(start, siz_b_DHQK)
        q, k = q_ref[:, columns], k_ref[:, columns]
        scores += dot(q, k, precision, b_axis=1)
        if n_ref is not None:
            q_n += jnp.sum(q.astype(jnp.float32) * n_ref[columns][None, :], axis=1)
        kbar_ref[:, columns] = (k.astype(jnp.float32) * abar_ref[...][:, None]).astype(
            kbar_ref.dtype
        )
    # Masked after the product, not before: a NaN in k reaches no earlier step.
    D = decay_tile(e_hi_ref[...], e_lo_ref[...], u_hi_ref[...], u_lo_ref[...], None)
    P = jnp.where(causal_mask(L, L, 0), scores * (D * scale), 0.0)
    r = query_scale(w_ref[...], scale)
    if normaliser is not None:
        z = r * q_n + jnp.sum(P, axis=1)
        inv_den = 1.0 / normaliser.denominator(z, None if m_ref is None else m_ref[...])
        P, r = P * inv_den[:, None], r * inv_den
        z_ref[...] = z
    P_ref[...] = P.astype(P_ref.dtype)
    r_ref[...] = r


def parallel_fw_P(
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    call: Launch,
) -> ScanOperands:
    """Runs the stage: ``stages/parallel_fw_P.py``."""
    p = call.problem
    steps = pl.BlockSpec((None, p.L), lambda c, b: (b, c))
    q, k = (sequence_spec(y, p, p.L, p.DHQK, lambda c, b: (b, c, 0)) for y in (x.matQ, x.matK))
    kbar = pl.BlockSpec((None, p.L, p.DHQK), lambda c, b: (b, c, 0))
    normalise, needs_m = normaliser is not None, normaliser is not None and normaliser.floor_needs_m
    vector, g = jax.ShapeDtypeStruct((p.BNH, p.S), jnp.float32), x.gates.per_step()
    P, r, keys, *z = kernel_call(
        _parallel_fw_P_kernel,
        name="parallel_fw_P",
        grid=call.tiles.grid(p),
        in_specs=[
            q,
            k,
            pl.BlockSpec((None, None, p.DHQK), lambda c, b: (b, c, 0)) if normalise else None,
            *[steps] * 5,
            steps,
            steps if needs_m else None,
        ],
        out_specs=[
            pl.BlockSpec((None, p.L, p.L), lambda c, b: (b, c, 0)),
            steps,
            kbar,
            *[steps] * normalise,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((p.BNH, p.S, p.L), x.matQ.dtype),
            vector,
            jax.ShapeDtypeStruct((p.BNH, x.matK.shape[1], p.DHQK), x.matQ.dtype),
            *[vector] * normalise,
        ],
        call=call,
        siz_b_DHQK=call.tiles.siz_b_DHQK,
        scale=p.qk_scale,
        normaliser=normaliser,
        precision=call.precision,
    )(
        x.matQ,
        x.matK,
        x.vecN_states if normalise else None,
        *g.vecE,
        *g.vecU,
        g.vecW,
        g.vecAbar,
        g.vecM if needs_m else None,
    )
    return ScanOperands(P, ScaledRows(keys, None), r, z[0] if normalise else None)


@dataclasses.dataclass(frozen=True)
class Tiles(BaseTiles):
    siz_b_DHQK: int
    num_warps: int

    def grid(self, p: Problem, **asked: Any) -> tuple[int, ...]:
        return p.NC, p.BNH

    def shared_bytes(self, p: Problem, dtype: Any, **asked: Any) -> int:
        size: int = 2 * p.L * self.siz_b_DHQK * dtype.itemsize
        return size

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, gpu: Gpu, **asked: Any) -> Self:
        """Tiles of q and k of 4096 elements; a warp for 16 steps, more in float32."""
        if dtype.itemsize > 2:
            return cls(64, num_warps=4).clamped(p)
        return cls(4096 // min(p.L, 64), num_warps=min(max(p.L // 16, 1), 16)).clamped(p)
