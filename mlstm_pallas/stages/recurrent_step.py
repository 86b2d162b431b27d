"""Stage recurrent_step: one token, from the states before it to those after it.

    C' = decay C + gain k v^T
    n' = decay n + gain k
    z  = scale q . n'
    h  = scale C'^T q / (max(|z|, floor) + eps)

``step_gates`` computes decay, gain and m'; normaliser.py has the floor. A decay of exactly 0 drops
the former state, even if it is NaN or inf.

With slots the states are pools of P rows, and entry b reads and writes row slots[b]. B and NH are
then two axes: the token and h are (B, NH, ...), the states (P, NH, ...). An entry whose slot is not
in 0..P-1 writes no row, and its h is 0.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.formulas.gates import MASKED, log_sigmoid
from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser
from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.problem.arrays import States, Token
from mlstm_pallas.problem.dimensions import accumulator_dtype
from mlstm_pallas.stages.plain_forms import on_rows

_INF = float("inf")


class Operands(NamedTuple):
    """Floats of any dtype of at most 32 bits.

    A token may be joined, as ``split_token`` takes it: XLA would copy slices for a kernel.
    """

    token: Token  # of (B * NH, ...)
    states: States  # of (B * NH, ...), whose m is None with the sigmoid input gate
    slots: Any = None  # (B,), of any integer dtype


def rounded(x: Array, dtype: jnp.dtype, compiled: bool) -> Array:
    """x rounded to dtype. XLA may drop a cast there and back; Triton has no reduce_precision."""
    if compiled:
        return x.astype(dtype).astype(x.dtype)
    limits = jnp.finfo(dtype)
    return lax.reduce_precision(x, limits.nexp, limits.nmant)


def step_gates(
    i: Array, f: Array, m: Array | None, round_m: Callable[[Array], Array]
) -> tuple[Array, ...]:
    """(decay, gain, m') of a step, in the dtype of i and f; m None: the sigmoid input gate.

    round_m: rounds m' to the precision in which it is stored. The states are scaled by the rounded
    m', so the rounding costs them no accuracy.
    """
    if m is None:
        return jax.nn.sigmoid(f), jax.nn.sigmoid(i), jnp.zeros_like(i)
    carried = jnp.where(f <= MASKED, -_INF, log_sigmoid(f) + m)
    i = jnp.where(i <= MASKED, -_INF, i)
    m_new = round_m(jnp.maximum(carried, i))
    m_safe = jnp.where(m_new == -_INF, 0.0, m_new)
    return jnp.exp(carried - m_safe), jnp.exp(i - m_safe), m_new


def _part(x: Array, start: int, size: int | None) -> Array:
    return x[..., start] if size is None else x[..., start : start + size]


def split_token(
    token: Token, DHQK: int, DHV: int, part: Callable[[Any, int, int | None], Any] = _part
) -> Token:
    """The token in parts.

    A joined one has q, k, v and what follows them on the last axis of q, and i and f on that of i;
    its k, v and f are None.

    part: (array, start, size) -> so many places of the last axis; size None: one, without the axis.
    """
    if token.k is not None:
        return token
    q, k, v = (part(token.q, *x) for x in ((0, DHQK), (DHQK, DHQK), (2 * DHQK, DHV)))
    return Token(q, k, v, part(token.i, 0, None), part(token.i, 1, None))


def recurrent_step(
    x: Operands, *, normaliser: Normaliser | None = DEFAULT_NORMALISER, call: Launch
) -> tuple[Array, States]:
    """Runs the stage: h (B * NH, DHV) in the dtype of q, and the new states.

    Each state has the dtype of the old one, and C its memory if that is free.
    """
    if x.slots is not None:
        step = functools.partial(recurrent_step, normaliser=normaliser, call=call)
        return on_rows(step, x)
    token, states = split_token(x.token, *x.states.c.shape[-2:]), x.states
    acc = accumulator_dtype(*(y.dtype for y in (*token, states.c, states.n)))
    (q, k, v, i, f), (c, n, m) = jax.tree.map(lambda y: y.astype(acc), (token, states))
    m_dtype = acc if states.m is None else states.m.dtype
    decay, gain, m_new = step_gates(i, f, m, lambda y: rounded(y, m_dtype, compiled=False))
    stored = gain[..., None] * k
    c = weighted(decay[..., None, None], c) + stored[..., :, None] * v[..., None, :]
    n = weighted(decay[..., None], n) + stored
    h = jnp.einsum("...k,...kv->...v", q, c, precision="highest") * call.problem.qk_scale
    if normaliser is not None:
        h = normaliser.normalise(h, jnp.sum(q * n, axis=-1) * call.problem.qk_scale, m_new)
    new = States(c, n, None if m is None else m_new)
    return h.astype(token.q.dtype), jax.tree.map(lambda y, x: y.astype(x.dtype), new, states)
