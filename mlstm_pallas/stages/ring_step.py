"""Stage ring_step: T tokens from states whose C is that of some tokens ago.

The states of a head are C, n and m at the last flush and a ring buffer with k, v and the gate
pre-activations of the c tokens since then, s = 1 .. c. For the tokens t = c + 1 .. c + T:

    l_s = log i_s + sum_{s < r <= t} log sigmoid(f_r)        l_0 = m + sum_{r <= t} log sigmoid(f_r)
    m_t = max(l_0, max_{s <= t} l_s)                         w_s = exp(l_s - m_t)
    num = w_0 scale C^T q_t + sum_{s <= t} w_s scale (q_t . k_s) v_s
    z   = w_0 scale n . q_t + sum_{s <= t} w_s scale (q_t . k_s)
    h_t = num / (max(|z|, floor) + eps)

The sums run back from the newest token, so nothing is subtracted. With the sigmoid input gate m is
0, and so are all m_t.

The ring has 2 L rows. At the start of a call with c >= L a head flushes its oldest L tokens, whose
rows are one half of the ring:

    C <- w_0 C + sum_{s <= L} w_s k_s v_s^T     n <- w_0 n + sum_{s <= L} w_s k_s     m <- m_L

with the weights at t = L. The flush reads the tokens of earlier calls only, so any number of the T
tokens can be taken back. Flushes are of the same L tokens however these were passed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.formulas.gates import MASKED, branchless_log1p, log_input_gate, log_sigmoid
from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser
from mlstm_pallas.problem.dimensions import InputGate, accumulator_dtype
from mlstm_pallas.stages.recurrent_step import rounded
from mlstm_pallas.stages.stage import Launch

_INF = float("inf")


class Operands(NamedTuple):
    """With slots, B and NH are two axes; the states are pools, (P, NH, ...)."""

    matQ: Array  # (B * NH, T, DHQK), any float dtype of at most 32 bits
    matK: Array  # (B * NH, T, DHQK)
    matV: Array  # (B * NH, T, DHV)
    vecI: Array  # (B * NH, T) pre-activations
    vecF: Array  # (B * NH, T)
    matC: Array  # (B * NH, DHQK, DHV) at the last flush, as n and m
    vecN: Array  # (B * NH, DHQK)
    scaM: Array | None  # (B * NH,); None: the sigmoid input gate
    ringK: Array  # (B * NH, 2 L, DHQK) in the dtype of matK
    ringV: Array  # (B * NH, 2 L, DHV)
    ringI: Array  # (B * NH, 2 L) float32 pre-activations
    ringF: Array  # (B * NH, 2 L)
    start: Array  # (B * NH,) int32, the row of the oldest token: 0 or L
    count: Array  # (B * NH,) int32, the tokens in the ring
    pending: Array  # (B * NH,) int32, drafts behind them
    accepted: Array | None = None  # (B * NH,) int32, how many drafts count; None: all
    slots: Array | None = None  # (B,), of any integer dtype


class Ring(NamedTuple):
    """The states after the call, where count leaves out the T new tokens, which are pending."""

    matH: Array  # (B * NH, T, DHV) in the dtype of matQ
    matC: Array
    vecN: Array
    scaM: Array | None
    ringK: Array
    ringV: Array
    ringI: Array
    ringF: Array
    start: Array
    count: Array
    pending: Array


def ages(rows: Array, start: Array, size: int) -> Array:
    """The position of each row's token in a ring of so many rows; 0: the oldest."""
    ahead = rows - start
    return jnp.where(ahead < 0, ahead + size, ahead)


def log_gates(i: Array, f: Array, stabilised: bool) -> tuple[Array, Array]:
    """The logarithms of the gates, -inf where nothing is stored and at resets."""
    gate = InputGate.EXP if stabilised else InputGate.SIGMOID
    log_f = jnp.where(f <= MASKED, -_INF, log_sigmoid(f, branchless_log1p))
    return log_input_gate(i, gate, branchless_log1p), log_f


def ring_weights(
    log_i: Array,
    log_f: Array,
    age: Array,
    m: Array | None,
    end: Array | int,
    round_m: Callable[[Array], Array] = lambda m: m,
) -> tuple[Array, Array, Array]:
    """(w_0, w_s, m_t) of one head at the token of age end - 1, from arrays of the ring's rows.

    m: of C; None: the sigmoid input gate. round_m: rounds m_t to its dtype in memory.
    """
    inside = age < end
    log_f = jnp.where(inside, log_f, 0.0)
    younger = age[None, :] > age[:, None]
    since = jnp.sum(jnp.where(younger, jnp.broadcast_to(log_f[None, :], younger.shape), 0.0), 1)
    exponents = jnp.where(inside, log_i + since, -_INF)
    carried = jnp.sum(log_f)
    if m is None:
        return jnp.exp(carried), jnp.exp(exponents), jnp.zeros_like(carried)
    carried = carried + m
    m_new = round_m(jnp.maximum(carried, jnp.max(exponents)))
    m_safe = jnp.where(m_new == -_INF, 0.0, m_new)
    return jnp.exp(carried - m_safe), jnp.exp(exponents - m_safe), m_new


def flushed(
    C: Array, n: Array, m: Array | None, K: Array, V: Array, log_i: Array, log_f: Array, age: Array,
    end: Any, m_dtype: Any,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """C, n and m of one head with the tokens of ages below end, in the dtype of the operands."""
    w0, w, m = ring_weights(
        log_i, log_f, age, m, end, lambda y: rounded(y, m_dtype, compiled=False)
    )
    inside = (age < end)[:, None]
    K, V = (jnp.where(inside, y, 0.0) for y in (K, V))
    K = w[:, None] * K
    C = w0 * C + jnp.einsum("sk,sv->kv", K, V, precision="highest")
    return C, w0 * n + jnp.sum(K, axis=0), m


def _head(
    x: Operands, normaliser: Normaliser | None, qk_scale: float, dtypes: Any
) -> tuple[Array, ...]:
    """h and C, n, m of one head, and the rest of ``Ring``; all floats in one dtype."""
    (T, _), size = x.matQ.shape, len(x.ringI)
    L, rows = size // 2, lax.iota("int32", size)
    pending = x.pending if x.accepted is None else jnp.clip(x.accepted, 0, x.pending)
    count = x.count + pending
    age = ages(rows, x.start, size)
    K, V, i, f = x.ringK, x.ringV, x.ringI, x.ringF
    for t in range(T):
        new = age == count + t
        K, V = (jnp.where(new[:, None], y[t], ring) for y, ring in ((x.matK, K), (x.matV, V)))
        i, f = (jnp.where(new, y[t], ring) for y, ring in ((x.vecI, i), (x.vecF, f)))
    log_i, log_f = log_gates(i, f, x.scaM is not None)

    def one(q: Array, end: Array) -> Array:
        w0, w, m = ring_weights(log_i, log_f, age, x.scaM, end)
        inside = age < end
        scores = jnp.where(inside, w * jnp.sum(K * q, axis=1), 0.0)
        dot = jnp.einsum("k,kv->v", q, x.matC, precision="highest")
        h = w0 * dot + jnp.einsum("s,sv->v", scores, jnp.where(inside[:, None], V, 0.0),
                                  precision="highest")  # fmt: skip
        if normaliser is None:
            return h * qk_scale
        z = w0 * jnp.sum(x.vecN * q) + jnp.sum(scores)
        return normaliser.normalise(h * qk_scale, z * qk_scale, m)

    h = jax.vmap(one)(x.matQ, count + 1 + lax.iota("int32", T))
    old: Any = x.matC, x.vecN, x.scaM
    full = count >= L
    m_dtype = x.matC.dtype if x.scaM is None else dtypes
    new_states = flushed(*old, K, V, log_i, log_f, age, L, m_dtype)
    C, n, m = (None if y is None else jnp.where(full, z, y) for y, z in zip(old, new_states))
    start, count = jnp.where(full, L - x.start, x.start), jnp.where(full, count - L, count)
    return h, C, n, m, K, V, i, f, start, count, jnp.full_like(count, T)


def ring_step(
    x: Operands, *, normaliser: Normaliser | None = DEFAULT_NORMALISER, call: Launch
) -> Ring:
    """Runs the stage."""
    if x.slots is not None:
        rows, pools = x.slots.astype("uint32"), x[5:15]  # -1 is outside, not the last row
        states = jax.tree.map(lambda y: y.at[rows].get(mode="fill", fill_value=0), pools)
        x = Operands(*x[:5], *states, x.accepted)
        h, *after = ring_step(x, normaliser=normaliser, call=call)
        h = jnp.where(rows[:, None, None, None] < len(pools[0]), h, 0)
        return Ring(h, *jax.tree.map(
            lambda pool, y: pool.at[rows].set(y, mode="drop", unique_indices=True),
            pools, tuple(after),
        ))  # fmt: skip
    floats, counters = x[:12], x[12:16]
    acc = accumulator_dtype(*(y.dtype for y in floats if y is not None))
    wide = Operands(*(None if y is None else y.astype(acc) for y in floats), *counters)
    m_dtype = acc if x.scaM is None else x.scaM.dtype

    def head(x: Operands) -> tuple[Array, ...]:
        return _head(x, normaliser, call.problem.qk_scale, m_dtype)

    for _ in x.count.shape:
        head = jax.vmap(head)
    h, *after = head(wide)
    old = x[5:15]
    return Ring(h.astype(x.matQ.dtype), *(
        y if y is None else y.astype(like.dtype) for y, like in zip(after, old, strict=True)
    ))  # fmt: skip
