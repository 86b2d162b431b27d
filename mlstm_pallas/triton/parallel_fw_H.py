"""parallel_fw_H in Triton.

Grid (DHHV / siz_b_DHHV, S / siz_b_LQ, B * NH). A CTA owns siz_b_LQ queries and siz_b_DHHV columns
of h, in float32 registers. It loops over DHQK in steps of siz_b_DHQK for the inter-chunk part, then
over the chunk's tiles of siz_b_LKV keys up to its queries. The stabilisers are known, so nothing is
rescaled on the way. The column blocks of the same queries run next to each other: q, k and the
gates come from memory once, then from L2.

FLOPs: 2 R K V + R (L + 1) (K + V), q.k again for each column block. Bytes: q, k, v, h and C,
(R (2 K + 2 V) + B NH NC K V) itemsize.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mlstm_pallas.gpu import Gpu
from mlstm_pallas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.problem import Problem, is_power_of_two
from mlstm_pallas.stage import Launch, clamped, sequence_shape
from mlstm_pallas.stages.parallel_fw_H import Operands, Outputs
from mlstm_pallas.tiles import (
    Precision,
    blocks,
    causal_mask,
    decay_tile,
    divide,
    dot,
    loop,
    remainder,
)
from mlstm_pallas.triton.launch import (
    PipelinedTiles,
    kernel_call,
    sequence_spec,
    stages_that_fit,
)


def _parallel_fw_H_kernel(
    q_ref: Any,  # (siz_b_LQ, DHQK)
    k_ref: Any,  # (L, DHQK)
    v_ref: Any,  # (L, siz_b_DHHV)
    C_ref: Any,  # (DHQK, siz_b_DHHV)
    n_ref: Any,  # (DHQK,), absent without a normaliser
    e_hi_ref: Any,  # (L,)
    e_lo_ref: Any,  # (L,)
    u_hi_ref: Any,  # (siz_b_LQ,)
    u_lo_ref: Any,  # (siz_b_LQ,)
    w_ref: Any,  # (siz_b_LQ,)
    m_ref: Any,  # (siz_b_LQ,), absent where the floor does not need it
    h_ref: Any,  # out (siz_b_LQ, siz_b_DHHV)
    z_ref: Any = None,  # out (siz_b_LQ,), absent without a normaliser
    *,
    scale: float,
    normaliser: Normaliser | None,
    L: int,
    siz_b_LKV: int,
    siz_b_DHQK: int,
    keep_q: bool,
    precision: Precision,
) -> None:
    LQ, DHQK = q_ref.shape
    first = remainder(pl.program_id(1), L // LQ) * LQ  # of the first query, inside its chunk
    num_k = DHQK // siz_b_DHQK

    # q . n is a separate loop: where a pipelined tile feeds both a product and other arithmetic,
    # Triton gives it one buffer too few, and the copy of a later tile overwrites it under the
    # running product.
    def add_norm(ik: jax.Array, z: jax.Array) -> jax.Array:
        columns = pl.ds(ik * siz_b_DHQK, siz_b_DHQK)
        return z + jnp.sum(q_ref[:, columns].astype(jnp.float32) * n_ref[columns][None, :], axis=1)

    def add_state(ik: jax.Array, num: jax.Array) -> jax.Array:
        columns = pl.ds(ik * siz_b_DHQK, siz_b_DHQK)
        return num + dot(q_ref[:, columns], C_ref[columns, :], precision)

    num = loop(num_k, add_state, jnp.zeros((LQ, h_ref.shape[1]), jnp.float32))
    if keep_q:
        q_whole = q_ref[...]
    if normaliser is None:
        z: Any = None
    elif keep_q:
        z = jnp.sum(q_whole.astype(jnp.float32) * n_ref[...][None, :], axis=1)
    else:
        z = loop(num_k, add_norm, jnp.zeros((LQ,), jnp.float32))
    w = query_scale(w_ref[...], scale)
    num, z = num * w[:, None], None if z is None else z * w
    u_hi, u_lo = u_hi_ref[...], u_lo_ref[...]

    def add_keys(j: jax.Array, carry: Any) -> tuple[jax.Array, Any]:
        num, z = carry
        keys = pl.ds(j * siz_b_LKV, siz_b_LKV)
        if keep_q:
            scores = dot(q_whole, k_ref[keys, :], precision, b_axis=1)
        else:

            def add_columns(ik: jax.Array, scores: jax.Array) -> jax.Array:
                columns = pl.ds(ik * siz_b_DHQK, siz_b_DHQK)
                return scores + dot(q_ref[:, columns], k_ref[keys, columns], precision, b_axis=1)

            scores = loop(num_k, add_columns, jnp.zeros((LQ, siz_b_LKV), jnp.float32))
        # Masked after the product, not before: a NaN in k reaches no earlier step.
        D = decay_tile(e_hi_ref[keys], e_lo_ref[keys], u_hi, u_lo, None)
        P = jnp.where(causal_mask(LQ, siz_b_LKV, first - j * siz_b_LKV), scores * (D * scale), 0.0)
        num += dot(P.astype(v_ref.dtype), v_ref[keys, :], precision)
        return num, None if z is None else z + jnp.sum(P, axis=1)

    num_keys = divide(first + LQ + siz_b_LKV - 1, siz_b_LKV)
    num, z = loop(num_keys, add_keys, (num, z))
    if normaliser is None:
        h_ref[...] = num.astype(h_ref.dtype)
        return

    den = normaliser.denominator(z, None if m_ref is None else m_ref[...])
    h_ref[...] = (num / den[:, None]).astype(h_ref.dtype)

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        z_ref[...] = z


def parallel_fw_H(
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    output_dtype: Any = None,
    call: Launch,
) -> Outputs:
    """Runs the stage: ``stages/parallel_fw_H.py``."""
    output_dtype = x.matQ.dtype if output_dtype is None else output_dtype
    p, tiles = call.problem, call.tiles
    LQ, BV = tiles.siz_b_LQ, tiles.siz_b_DHHV
    tiles_of_chunk = blocks(p.L, LQ)
    queries = pl.BlockSpec((None, LQ), lambda iv, iq, b: (b, iq))
    chunk = pl.BlockSpec((None, p.L), lambda iv, iq, b: (b, iq // tiles_of_chunk))
    normalise, needs_m = normaliser is not None, normaliser is not None and normaliser.floor_needs_m
    g = x.gates.per_step()
    H, *z = kernel_call(
        _parallel_fw_H_kernel,
        name="parallel_fw_H",
        grid=tiles.grid(p),
        in_specs=[
            sequence_spec(x.matQ, p, LQ, p.DHQK, lambda iv, iq, b: (b, iq, 0)),
            sequence_spec(x.matK, p, p.L, p.DHQK, lambda iv, iq, b: (b, iq // tiles_of_chunk, 0)),
            sequence_spec(x.matV, p, p.L, BV, lambda iv, iq, b: (b, iq // tiles_of_chunk, iv)),
            pl.BlockSpec(
                (None, None, p.DHQK, BV), lambda iv, iq, b: (b, iq // tiles_of_chunk, 0, iv)
            ),
            pl.BlockSpec((None, None, p.DHQK), lambda iv, iq, b: (b, iq // tiles_of_chunk, 0))
            if normalise
            else None,
            chunk,
            chunk,
            queries,
            queries,
            queries,
            queries if needs_m else None,
        ],
        out_specs=[
            sequence_spec(x.matV, p, LQ, BV, lambda iv, iq, b: (b, iq, iv)),
            *[queries] * normalise,
        ],
        out_shape=[
            sequence_shape(x.matV, p.DHHV, output_dtype),
            *[jax.ShapeDtypeStruct((p.BNH, p.S), jnp.float32)] * normalise,
        ],
        call=call,
        scale=p.qk_scale,
        normaliser=normaliser,
        L=p.L,
        siz_b_LKV=tiles.siz_b_LKV,
        siz_b_DHQK=tiles.siz_b_DHQK,
        keep_q=tiles.keep_q,
        precision=call.precision,
    )(
        *(x.matQ, x.matK, x.matV, x.matC_states, x.vecN_states if normalise else None),
        *(*g.vecE, *g.vecU, g.vecW, g.vecM if needs_m else None),
    )
    return Outputs(H, z[0] if normalise else None)


@dataclasses.dataclass(frozen=True)
class Tiles(PipelinedTiles):
    """keep_q: whether a tile's queries stay in shared memory, whole, during the loop over keys."""

    siz_b_LQ: int
    siz_b_LKV: int
    siz_b_DHQK: int
    siz_b_DHHV: int
    num_warps: int
    num_stages: int
    keep_q: bool

    def grid(self, p: Problem, **asked: Any) -> tuple[int, ...]:
        return blocks(p.DHHV, self.siz_b_DHHV), p.NC * blocks(p.L, self.siz_b_LQ), p.BNH

    def elements(self, p: Problem) -> tuple[int, int]:
        """Of the loop over keys."""
        LQ, LKV, depth = self.siz_b_LQ, self.siz_b_LKV, self.siz_b_DHQK
        keys = LKV * p.DHQK if self.keep_q else depth * (LKV + LQ)
        return keys + LKV * self.siz_b_DHHV, LQ * p.DHQK * self.keep_q

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, gpu: Gpu, **asked: Any) -> Self:
        """As many columns as possible, up to 256, as each block of them repeats the scores.

        An SM has two CTAs of 64 queries, or one of 128 where the queries take half of it.
        """
        wide, itemsize = dtype.itemsize > 2, dtype.itemsize
        depth = clamped(32 if wide else 64, p.DHQK)
        keep_q = not wide and p.DHQK <= 256 and is_power_of_two(p.DHQK)
        columns = clamped(128 if wide else 256, p.DHHV)
        low = 64, 32, min(columns, 128), 4
        sizes = [(*low, 3), (*low, 2), (64, 32, 64, 4, 2)]
        if wide or p.DHQK + p.DHHV <= 128:
            sizes = sizes[1:]
        elif columns == 256 and p.DHQK > 128 and p.L >= 128:
            sizes = [(128, 32, columns, 8, 3), (128, 32, columns, 8, 2), *sizes]
        elif columns == 256 and p.DHQK <= 128:
            sizes = [(64, 64, 256, 4, 2), *sizes]

        def fits(x: Self) -> bool:
            loops = (depth * (x.siz_b_LQ + x.siz_b_DHHV), 0), x.elements(p)
            return all(
                stages_that_fit(gpu, size * itemsize, kept * itemsize, x.num_stages, ctas_per_sm=1)
                == x.num_stages
                for size, kept in loops
            )

        candidates = [cls(*x[:2], depth, *x[2:], keep_q).clamped(p) for x in sizes]
        return next(filter(fits, candidates), candidates[-1])

    def supports(self, p: Problem, **asked: Any) -> bool:
        return not self.keep_q or is_power_of_two(p.DHQK)
