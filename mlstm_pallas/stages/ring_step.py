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
    fill: Array  # (B * NH,) int32, the tokens in the ring
    pending: Array  # (B * NH,) int32, drafts behind them
    accepted: Array | None = None  # (B * NH,) int32, how many drafts fill; None: all
    slots: Array | None = None  # (B,), of any integer dtype


class Ring(NamedTuple):
    """The states after the call, where fill leaves out the T new tokens, which are pending."""

    matH: Array  # (B * NH, T, DHV) in the dtype of matQ
    matC: Array
    vecN: Array
    scaM: Array | None
    ringK: Array
    ringV: Array
    ringI: Array
    ringF: Array
    start: Array
    fill: Array
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


def pending_tokens(pending: Array, accepted: Array | None) -> Array:
    """How many of the pending tokens count."""
    return pending if accepted is None else jnp.minimum(jnp.maximum(accepted, 0), pending)


class Half(NamedTuple):
    """Half of a head's ring, L rows in the order of age."""

    K: Array  # (L, DHQK)
    V: Array  # (L, DHV)
    log_i: Array  # (L,)
    log_f: Array  # (L,)


def halves(ring: tuple[Array, ...], start: Array) -> tuple[Half, Half]:
    """The half with the oldest tokens, and the other one."""
    parts = [jnp.split(x, 2) for x in ring]
    return (
        Half(*(jnp.where(start == 0, x, y) for x, y in parts)),
        Half(*(jnp.where(start == 0, y, x) for x, y in parts)),
    )


def flushed(states: tuple[Any, ...], half: Half, end: Any, dtypes: Any) -> tuple[Any, ...]:
    """C, n and m of a head after the first ``end`` tokens of the half, rounded to the dtypes."""
    (C, n, m), age = states, lax.iota("int32", len(half.K))

    def rounds(index: int) -> Callable[[Array], Array]:
        return lambda y: rounded(y, dtypes[index], compiled=False)

    w0, w, m_new = ring_weights(half.log_i, half.log_f, age, m, end, rounds(2))
    inside = (age < end)[:, None]
    K = jnp.where(inside, w[:, None] * half.K, 0.0)
    C = w0 * C + jnp.einsum("sk,sv->kv", K, jnp.where(inside, half.V, 0.0), precision="highest")
    n = w0 * n + jnp.sum(K, axis=0)
    return rounds(0)(C), rounds(1)(n), None if m is None else m_new


def flush_all(x: Operands, dtypes: Any) -> tuple[Any, ...]:
    """C, n and m of a head after all of its tokens, those of a full half first."""
    states, L = (x.matC, x.vecN, x.scaM), len(x.ringI) // 2
    log_gates_ = log_gates(x.ringI, x.ringF, x.scaM is not None)
    old, young = halves((x.ringK, x.ringV, *log_gates_), x.start)
    full = flushed(states, old, jnp.minimum(x.fill, L), dtypes)
    last = flushed(full, young, x.fill - L, dtypes)
    states = jax.tree.map(lambda y, z: jnp.where(x.fill > L, z, y), full, last)
    return tuple(states)


def in_ring(x: Operands) -> Operands:
    """A head's operands with the drafts that fill among the tokens and new tokens behind them."""
    T, size = len(x.vecI), len(x.ringI)
    fill = x.fill + pending_tokens(x.pending, x.accepted)
    age, rings = ages(lax.iota("int32", size), x.start, size), [*x[8:12]]
    for t in range(T):
        new = age == fill + t
        for j, y in enumerate(x[1:5]):
            rings[j] = jnp.where(new.reshape(-1, *[1] * (y.ndim - 1)), y[t], rings[j])
    ringK, ringV, ringI, ringF = rings
    return x._replace(
        ringK=ringK, ringV=ringV, ringI=ringI, ringF=ringF,
        fill=fill, pending=jnp.full_like(fill, T), accepted=None,
    )  # fmt: skip


def _head(
    x: Operands, normaliser: Normaliser | None, qk_scale: float, dtypes: Any
) -> tuple[Array, ...]:
    """The fields of ``Ring`` for one head; all floats in one dtype."""
    x = in_ring(x)
    size, T = len(x.ringI), len(x.vecI)
    L, age = size // 2, ages(lax.iota("int32", size), x.start, size)
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
    full, states = x.fill >= L, (x.matC, x.vecN, x.scaM)
    old, _ = halves((x.ringK, x.ringV, *gates), x.start)
    after = flushed(states, old, L, dtypes)
    states = jax.tree.map(lambda y, z: jnp.where(full, z, y), states, after)
    start, fill = jnp.where(full, L - x.start, x.start), x.fill - jnp.where(full, L, 0)
    return h, *states, *x[8:12], start, fill, x.pending


def heads_of(x: Operands, run: Callable[[Operands], Any]) -> Any:
    """run for every head, with all floats in the dtype of sums."""
    arrays = [y for y in x if y is not None]
    acc = accumulator_dtype(*(y.dtype for y in arrays))
    wide = jax.tree.map(lambda y: y if y.dtype == "int32" else y.astype(acc), x)
    for _ in x.fill.shape:
        run = jax.vmap(run)
    return run(wide)


def ring_step(
    x: Operands, *, normaliser: Normaliser | None = DEFAULT_NORMALISER, call: Launch
) -> Ring:
    """Runs the stage."""
    pools = x[5:15]
    if x.slots is not None:
        rows = x.slots.astype("uint32")  # -1 is outside, not the last row
        states = jax.tree.map(lambda y: y.at[rows].get(mode="fill", fill_value=0), pools)
        names = Operands._fields[5:15]
        of_entries = x._replace(**dict(zip(names, states, strict=True)), slots=None)
        h, *after = ring_step(of_entries, normaliser=normaliser, call=call)
        h = jnp.where(rows[:, None, None, None] < len(pools[0]), h, 0)

        def updated(pool: Array, y: Array) -> Array:
            return pool.at[rows].set(y, mode="drop", unique_indices=True)

        return Ring(h, *jax.tree.map(updated, pools, tuple(after)))
    dtypes = [None if y is None else y.dtype for y in pools[:3]]
    run = functools.partial(
        _head, normaliser=normaliser, qk_scale=call.problem.qk_scale, dtypes=dtypes
    )
    old = x.matQ, *pools
    return Ring(*jax.tree.map(lambda y, like: y.astype(like.dtype), heads_of(x, run), old))
