"""recurrent_step in Triton.

Grid (ceil(DHHV / siz_b_DHHV), B * NH). A CTA owns siz_b_DHHV columns of one head's C and loops over
them in blocks of siz_b_DHQK rows, each prefetched while the preceding block is processed. Every CTA
computes n' and z; the CTAs of the first columns store n' and m'. C is updated in place, but n and m
are not, because other CTAs may still read them. Sizes that the tiles do not divide are masked,
because padding would copy the states.

FLOPs: 4 B NH K V. Bytes: C twice, 2 B NH K V itemsize; the rest is smaller by a factor of V or K.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.normaliser import DEFAULT_NORMALISER, Normaliser
from mlstm_pallas.problem import MIN_TILE, Problem, next_power_of_two
from mlstm_pallas.stage import Launch
from mlstm_pallas.stage import Tiles as BaseTiles
from mlstm_pallas.stages.recurrent_step import Operands, Step, rounded, step_gates
from mlstm_pallas.tiles import block_at, loop
from mlstm_pallas.triton.launch import kernel_call, masked_load, masked_store


def _recurrent_step_kernel(
    C_gmem: Any,  # (DHQK, DHHV), the whole head's
    q_gmem: Any,  # (DHQK,)
    k_gmem: Any,  # (DHQK,)
    v_gmem: Any,  # (DHHV,)
    n_gmem: Any,  # (DHQK,)
    i_gmem: Any,  # ()
    f_gmem: Any,  # ()
    m_gmem: Any,  # (), or absent: the sigmoid input gate
    C_new_gmem: Any,  # out (DHQK, DHHV), in place of C
    h_gmem: Any,  # out (DHHV,)
    n_new_gmem: Any,  # out (DHQK,)
    m_new_gmem: Any,  # out (), or absent
    *,
    call: Launch,
    normaliser: Normaliser | None,
    siz_b_DHQK: int,
    siz_b_DHHV: int,
) -> None:
    (DHQK, DHHV), scale, compiled = C_gmem.shape, call.problem.qk_scale, not call.interpret
    owns_n = pl.program_id(0) == 0
    columns, in_columns = _block(pl.program_id(0), siz_b_DHHV, DHHV)
    num_blocks = -(-DHQK // siz_b_DHQK)

    def load(ik: jax.Array) -> tuple[Any, ...]:
        rows, in_rows = _block(ik, siz_b_DHQK, DHQK)
        C = masked_load(C_gmem.at[rows, columns], _outer(in_rows, in_columns))
        q, k, n = (
            masked_load(ref.at[rows], in_rows).astype(jnp.float32)
            for ref in (q_gmem, k_gmem, n_gmem)
        )
        # k[:, None] goes through shared memory, behind a barrier, so it is made before the gates.
        return C, q, k, n, k[:, None]

    def update(ik: jax.Array, loaded: Any, num: jax.Array, z: jax.Array) -> tuple[Any, Any]:
        rows, in_rows = _block(ik, siz_b_DHQK, DHQK)
        C, q, k, n, k_column = loaded
        C = decay * C.astype(jnp.float32) + (gain * k_column) * v[None, :]
        n = decay * n + gain * k
        masked_store(
            C_new_gmem.at[rows, columns], C.astype(C_new_gmem.dtype), _outer(in_rows, in_columns)
        )

        @pl.when(owns_n)
        def _() -> None:
            masked_store(n_new_gmem.at[rows], n.astype(n_new_gmem.dtype), in_rows)

        return num + jnp.sum(q[:, None] * C, axis=0), z + jnp.sum(q * n)

    def step(ik: jax.Array, carry: Any) -> tuple[Any, ...]:
        following = load(ik + 1)
        return following, *update(ik, *carry)

    # The first block is loaded before anything waits.
    i, f = (ref[...].astype(jnp.float32) for ref in (i_gmem, f_gmem))
    m = None if m_gmem is None else m_gmem[...].astype(jnp.float32)
    v = masked_load(v_gmem.at[columns], in_columns).astype(jnp.float32)
    loaded = load(jnp.zeros((), jnp.int32))
    num, z = jnp.zeros((siz_b_DHHV,), jnp.float32), jnp.zeros((), jnp.float32)
    carry: Any = loaded, num, z
    decay, gain, m_new = step_gates(i, f, m, lambda x: rounded(x, m_new_gmem.dtype, compiled))
    if num_blocks > 1:
        carry = loop(num_blocks - 1, step, carry)
    num, z = update(jnp.full((), num_blocks - 1, jnp.int32), *carry)
    h = num * scale if normaliser is None else normaliser.normalise(num * scale, z * scale, m_new)
    masked_store(h_gmem.at[columns], h.astype(h_gmem.dtype), in_columns)
    if m_new_gmem is not None:

        @pl.when(owns_n)
        def _() -> None:
            m_new_gmem[...] = m_new.astype(m_new_gmem.dtype)


def _block(index: jax.Array, size: int, total: int) -> tuple[Any, jax.Array | None]:
    """The slice of a block, and a mask of its elements inside the axis; None: all are."""
    inside = None if total % size == 0 else index * size + lax.iota(jnp.int32, size) < total
    return block_at(index, size), inside


def _outer(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array | None:
    if rows is None:
        return None if columns is None else columns[None, :]
    return rows[:, None] if columns is None else rows[:, None] & columns[None, :]


def recurrent_step(
    x: Operands, *, normaliser: Normaliser | None = DEFAULT_NORMALISER, call: Launch
) -> Step:
    """Runs the stage: ``stages/recurrent_step.py``."""
    vecQ, vecK, vecV, scaI, scaF, matC, vecN, scaM = x
    heads, DHQK, DHHV = matC.shape
    sizes = (call.tiles.siz_b_DHQK, DHQK), (call.tiles.siz_b_DHHV, DHHV)
    BK, BV = (min(tile, max(next_power_of_two(size), MIN_TILE)) for tile, size in sizes)
    state = pl.BlockSpec((None, DHQK, DHHV), lambda iv, b: (b, 0, 0))
    qk, hv = (pl.BlockSpec((None, size), lambda iv, b: (b, 0)) for size in (DHQK, DHHV))
    gate = pl.BlockSpec((None,), lambda iv, b: (b,))
    y = kernel_call(
        _recurrent_step_kernel,
        dict(
            C=(matC, state),
            q=(vecQ, qk),
            k=(vecK, qk),
            v=(vecV, hv),
            n=(vecN, qk),
            i=(scaI, gate),
            f=(scaF, gate),
            m=(scaM, gate),
        ),
        dict(
            C_new=(jax.ShapeDtypeStruct(matC.shape, matC.dtype), state),
            h=(jax.ShapeDtypeStruct(vecV.shape, vecQ.dtype), hv),
            n_new=(jax.ShapeDtypeStruct(vecN.shape, vecN.dtype), qk),
            m_new=(
                jax.ShapeDtypeStruct(scaM.shape, scaM.dtype) if scaM is not None else None,
                gate,
            ),
        ),
        grid=(-(-DHHV // BV), heads),
        aliases={0: 0},
        call=call,
        normaliser=normaliser,
        siz_b_DHQK=BK,
        siz_b_DHHV=BV,
    )
    return Step(y["h"], y["C_new"], y["n_new"], y["m_new"])


@dataclasses.dataclass(frozen=True)
class Tiles(BaseTiles):
    """Up to 32 KiB per CTA, all loaded at once: 128 CTAs for 8 heads of 256/512, and four CTAs
    per SM if there are more heads.
    """

    siz_b_DHQK: int = 256
    siz_b_DHHV: int = 32
    num_warps: int = 8

    def grid(self, p: Problem, **asked: Any) -> tuple[int, ...]:
        columns = min(self.siz_b_DHHV, max(next_power_of_two(p.DHHV), MIN_TILE))
        return -(-p.DHHV // columns), p.BNH

    def clamped(self, p: Problem) -> Self:
        """Changes nothing, because heads are not padded."""
        return self
