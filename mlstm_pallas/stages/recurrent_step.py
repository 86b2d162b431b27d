"""Stage recurrent_step: one token, from the states before it to those after it.

    C' = decay C + gain k v^T        n' = decay n + gain k        z = scale q . n'
    h  = scale C'^T q / (max(|z|, floor) + eps)                   decay, gain, m' and the floor by ``step_gates``

Grid (ceil(DHHV / siz_b_DHHV), B * NH). A program owns siz_b_DHHV columns of C of one head and walks down them in blocks of siz_b_DHQK rows;
it asks for a block before it works on the one before. Every program makes n' and z for itself, those of the first columns store n' and m'.
C is updated in place. n and m are not: other programs may still read them. Sizes that the tiles do not divide are masked, as padding
would move the states once more.

FLOPs: 4 B NH DHQK DHHV. Bytes: C twice, 2 B NH DHQK DHHV itemsize; the rest is less by the factor of DHHV or DHQK.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gates import MASKED
from mlstm_pallas.launch import kernel_call, masked_load, masked_store
from mlstm_pallas.problem import MIN_TILE, next_power_of_two
from mlstm_pallas.reference import normalise
from mlstm_pallas.tiles import block_at, loop

_INF = float("inf")


def rounded(x: jax.Array, dtype: jnp.dtype, compiled: bool) -> jax.Array:
    """x at the precision of dtype. XLA may leave out a cast there and back, Triton has no reduce_precision."""
    if compiled:
        return x.astype(dtype).astype(x.dtype)
    return lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)


def step_gates(i: jax.Array, f: jax.Array, m: jax.Array | None, round_m: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, ...]:
    """(decay, gain, m') of a step, in the dtype of i and f; m None: the sigmoid input gate, which needs no stabiliser.

    round_m: to what is kept of m'. The states are scaled by that and nothing else, so its precision costs them none.
    """
    if m is None:
        return jax.nn.sigmoid(f), jax.nn.sigmoid(i), jnp.zeros_like(i)
    # Not log1p, which branches: the state would be asked for behind it only. One step's decay has no digits more than this.
    fbar = jnp.minimum(f, 0.0) - jnp.log(1.0 + jnp.exp(-jnp.abs(f)))
    carried = jnp.where(f <= MASKED, -_INF, fbar + m)
    i = jnp.where(i <= MASKED, -_INF, i)
    m_new = round_m(jnp.maximum(carried, i))
    m_safe = jnp.where(m_new == -_INF, 0.0, m_new)
    return jnp.exp(carried - m_safe), jnp.exp(i - m_safe), m_new


def _recurrent_step_kernel(
    C_ref,  # (DHQK, DHHV), the whole head's
    q_ref,  # (DHQK,)
    k_ref,  # (DHQK,)
    v_ref,  # (DHHV,)
    n_ref,  # (DHQK,)
    i_ref,  # ()
    f_ref,  # ()
    m_ref,  # (), or absent: the sigmoid input gate
    C_new_ref,  # out (DHQK, DHHV), in place of C
    h_ref,  # out (DHHV,)
    n_new_ref,  # out (DHQK,)
    m_new_ref=None,  # out (), or absent
    *,
    scale: float,
    normalize: bool,
    normaliser: dict[str, Any],
    compiled: bool,
    siz_b_DHQK: int,
    siz_b_DHHV: int,
):
    DHQK, DHHV = C_ref.shape
    owns_n = pl.program_id(0) == 0
    columns, in_columns = _block(pl.program_id(0), siz_b_DHHV, DHHV)
    num_blocks = -(-DHQK // siz_b_DHQK)

    def load(ik):
        rows, in_rows = _block(ik, siz_b_DHQK, DHQK)
        C = masked_load(C_ref.at[rows, columns], _outer(in_rows, in_columns))
        q, k, n = (masked_load(ref.at[rows], in_rows).astype(jnp.float32) for ref in (q_ref, k_ref, n_ref))
        return C, q, k, n, k[:, None]  # which goes through shared memory: behind a barrier, before the gates

    def update(ik, loaded, num, z):
        rows, in_rows = _block(ik, siz_b_DHQK, DHQK)
        C, q, k, n, k_column = loaded
        C = decay * C.astype(jnp.float32) + (gain * k_column) * v[None, :]
        n = decay * n + gain * k
        masked_store(C_new_ref.at[rows, columns], C.astype(C_new_ref.dtype), _outer(in_rows, in_columns))

        @pl.when(owns_n)
        def _():
            masked_store(n_new_ref.at[rows], n.astype(n_new_ref.dtype), in_rows)

        return num + jnp.sum(q[:, None] * C, axis=0), z + jnp.sum(q * n)

    def step(ik, carry):
        following = load(ik + 1)
        return following, *update(ik, *carry)

    # What the first block needs is asked for before any of it is waited for.
    i, f = (ref[...].astype(jnp.float32) for ref in (i_ref, f_ref))
    m = None if m_ref is None else m_ref[...].astype(jnp.float32)
    v = masked_load(v_ref.at[columns], in_columns).astype(jnp.float32)
    carry = load(jnp.zeros((), jnp.int32)), jnp.zeros((siz_b_DHHV,), jnp.float32), jnp.zeros((), jnp.float32)
    decay, gain, m_new = step_gates(i, f, m, lambda x: rounded(x, m_new_ref.dtype, compiled))
    if num_blocks > 1:
        carry = loop(num_blocks - 1, step, carry)
    num, z = update(jnp.full((), num_blocks - 1, jnp.int32), *carry)
    h = normalise(num * scale, z * scale, m_new, **normaliser) if normalize else num * scale
    masked_store(h_ref.at[columns], h.astype(h_ref.dtype), in_columns)
    if m_new_ref is not None:

        @pl.when(owns_n)
        def _():
            m_new_ref[...] = m_new.astype(m_new_ref.dtype)


def _block(index: jax.Array, size: int, total: int):
    """Where the block is, and which of its elements are inside the axis; None: all."""
    inside = None if total % size == 0 else index * size + lax.iota(jnp.int32, size) < total
    return block_at(index, size), inside


def _outer(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array | None:
    if rows is None or columns is None:
        return rows[:, None] if rows is not None else None if columns is None else columns[None, :]
    return rows[:, None] & columns[None, :]


def recurrent_step(
    vecQ: jax.Array,
    vecK: jax.Array,
    vecV: jax.Array,
    scaI: jax.Array,
    scaF: jax.Array,
    matC: jax.Array,
    vecN: jax.Array,
    scaM: jax.Array | None,
    *,
    config: KernelConfig,
    qk_scale: float,
    normalize: bool,
    eps: float,
    stabilize_correctly: bool,
    norm_val: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Launches the stage. Config: siz_b_DHQK, siz_b_DHHV.

    Args:
      vecQ, vecK: (B, NH, DHQK); vecV: (B, NH, DHHV); scaI, scaF: pre-activations (B, NH). Any floating dtypes of at most 32 bits.
      matC, vecN, scaM: (B, NH, DHQK, DHHV), (B, NH, DHQK), (B, NH), likewise; scaM None: the sigmoid input gate.

    Returns:
      vecH (B, NH, DHHV) in the dtype of vecQ and the new states in the dtypes of the old, matC in the memory of the old one where that
      is not used any more.
    """
    B, NH, DHQK, DHHV = matC.shape
    heads, stage = B * NH, config.stage("recurrent_step")
    BK, BV = (min(tile, max(next_power_of_two(size), MIN_TILE)) for tile, size in ((stage.siz_b_DHQK, DHQK), (stage.siz_b_DHHV, DHHV)))

    state = pl.BlockSpec((None, DHQK, DHHV), lambda iv, b: (b, 0, 0))
    qk, hv = (pl.BlockSpec((None, size), lambda iv, b: (b, 0)) for size in (DHQK, DHHV))
    gate = pl.BlockSpec((None,), lambda iv, b: (b,))
    C, h, n, *m = kernel_call(
        _recurrent_step_kernel,
        name="recurrent_step",
        grid=(-(-DHHV // BV), heads),
        in_specs=[state, qk, qk, hv, qk, gate, gate, None if scaM is None else gate],
        out_specs=[state, hv, qk, *([] if scaM is None else [gate])],
        out_shape=[
            jax.ShapeDtypeStruct((heads, DHQK, DHHV), matC.dtype),
            jax.ShapeDtypeStruct((heads, DHHV), vecQ.dtype),
            jax.ShapeDtypeStruct((heads, DHQK), vecN.dtype),
            *([] if scaM is None else [jax.ShapeDtypeStruct((heads,), scaM.dtype)]),
        ],
        input_output_aliases={0: 0},
        stage=stage,
        interpret=interpret,
        scale=qk_scale,
        normalize=normalize,
        normaliser=dict(eps=eps, stabilize_correctly=stabilize_correctly, norm_val=norm_val),
        compiled=not interpret,
        siz_b_DHQK=BK,
        siz_b_DHHV=BV,
    )(*(None if x is None else x.reshape(heads, *x.shape[2:]) for x in (matC, vecQ, vecK, vecV, vecN, scaI, scaF, scaM)))
    return h.reshape(vecV.shape), C.reshape(matC.shape), n.reshape(vecN.shape), m[0].reshape(B, NH) if m else None
