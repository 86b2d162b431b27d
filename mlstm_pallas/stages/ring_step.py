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

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mlstm_pallas.formulas.gates import MASKED, branchless_log1p, log_input_gate, log_sigmoid
from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser
from mlstm_pallas.problem.dimensions import InputGate, accumulator_dtype
from mlstm_pallas.stages.recurrent_step import on_rows, rounded
from mlstm_pallas.stages.stage import Launch

_INF = float("inf")


class Operands(NamedTuple):
    """With slots, B and NH are two axes; the states are pools, (P, NH, ...).

    After a call fill leaves out the T new tokens, which are pending.
    """

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
    fill: Array  # (B * NH,) int32, the tokens in the ring
    pending: Array  # (B * NH,) int32, drafts behind them
    accepted: Array | None = None  # (B * NH,) int32, how many drafts fill; None: all
    slots: Array | None = None  # (B,), of any integer dtype


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


def pending_tokens(pending: Array, accepted: Array | None) -> Array:
    """How many of the pending tokens count."""
    return pending if accepted is None else jnp.minimum(jnp.maximum(accepted, 0), pending)


def in_ring(x: Operands) -> Operands:
    """A head's operands with the drafts that fill among the tokens and new tokens behind them."""
    T, size, fill = len(x.vecI), len(x.ringI), x.fill + pending_tokens(x.pending, x.accepted)
    behind = ages(lax.iota("int32", size), x.start, size) - fill
    at, new = jnp.clip(behind, 0, T - 1), (behind >= 0) & (behind < T)
    rings = (
        jnp.where(new.reshape(-1, *[1] * (y.ndim - 1)), y[at], ring)
        for ring, y in zip(x[8:12], x[1:5], strict=True)
    )
    fields: Any = *x[:8], *rings, x.start, fill, jnp.full_like(fill, T)
    return Operands(*fields)


def flushed(x: Operands, end: Any, dtypes: Any) -> Operands:
    """A head after a flush of its ``end`` oldest tokens, rounded, if the ring has so many."""
    size = len(x.ringI)
    age = ages(lax.iota("int32", size), x.start, size)
    to_C, to_n, to_m = (functools.partial(rounded, dtype=y, compiled=False) for y in dtypes)
    gates = log_gates(x.ringI, x.ringF, x.scaM is not None)
    w0, w, m = ring_weights(*gates, age, x.scaM, end, to_m)
    K, V = (jnp.where((age < end)[:, None], y, 0.0) for y in (x.ringK, x.ringV))
    K = w[:, None] * K
    after = x._replace(
        matC=to_C(w0 * x.matC + jnp.einsum("sk,sv->kv", K, V, precision="highest")),
        vecN=to_n(w0 * x.vecN + jnp.sum(K, axis=0)),
        scaM=None if x.scaM is None else m,
        start=size // 2 - x.start,
        fill=x.fill - end,
    )
    head: Operands = jax.tree.map(lambda y, z: jnp.where(x.fill >= end, z, y), x, after)
    return head


def _head(
    x: Operands, normaliser: Normaliser | None, qk_scale: float, dtypes: Any
) -> tuple[Any, ...]:
    """h and the states of one head; all floats in one dtype."""
    x = in_ring(x)
    size, T = len(x.ringI), len(x.vecI)
    age = ages(lax.iota("int32", size), x.start, size)
    gates = log_gates(x.ringI, x.ringF, x.scaM is not None)
    dot = functools.partial(jnp.einsum, precision="highest")

    def one(q: Array, end: Array) -> Array:
        w0, w, m = ring_weights(*gates, age, x.scaM, end)
        inside = age < end
        scores = jnp.where(inside, w * dot("sk,k->s", x.ringK, q), 0.0)
        V = jnp.where(inside[:, None], x.ringV, 0.0)
        h = w0 * dot("k,kv->v", q, x.matC) + dot("s,sv->v", scores, V)
        if normaliser is None:
            return h * qk_scale
        z = w0 * jnp.sum(x.vecN * q) + jnp.sum(scores)
        return normaliser.normalise(h * qk_scale, z * qk_scale, m)

    h = jax.vmap(one)(x.matQ, x.fill + 1 + lax.iota("int32", T))
    return h, *flushed(x, size // 2, dtypes)[5:15]


def _map_heads(run: Callable[..., Any], x: Operands, old: tuple[Any, ...]) -> tuple[Any, ...]:
    """run(operands of a head in the dtype of sums, dtypes of C, n, m), in the old ones' dtypes."""
    acc = accumulator_dtype(*(y.dtype for y in jax.tree.leaves(x)))
    run = functools.partial(run, dtypes=[getattr(y, "dtype", None) for y in x[5:8]])
    for _ in x.fill.shape:
        run = jax.vmap(run)
    y = run(jax.tree.map(lambda y: y if y.dtype == "int32" else y.astype(acc), x))
    results: tuple[Any, ...] = jax.tree.map(lambda y, like: y.astype(like.dtype), y, old)
    return results


@jax.jit
def flush_all(x: Operands) -> tuple[Any, ...]:
    """C, n and m after all tokens, those of a full half first. The operands of new tokens: None."""

    def run(x: Operands, dtypes: Any) -> tuple[Any, ...]:
        x = x._replace(fill=x.fill + pending_tokens(x.pending, x.accepted))
        x = flushed(x, len(x.ringI) // 2, dtypes)
        return flushed(x, x.fill, dtypes)[5:8]

    return _map_heads(run, x, x[5:8])


def ring_step(
    x: Operands, *, normaliser: Normaliser | None = DEFAULT_NORMALISER, call: Launch
) -> tuple[Any, ...]:
    """Runs the stage: h (B * NH, T, DHV) in the dtype of matQ, and the new states."""
    options: Any = dict(normaliser=normaliser, qk_scale=call.problem.qk_scale)

    def run(x: Operands) -> tuple[Any, ...]:
        return _map_heads(functools.partial(_head, **options), x, (x.matQ, *x[5:15]))

    return run(x) if x.slots is None else on_rows(run, x)
