"""Stage ring_step: T tokens from states whose C is that of some tokens ago.

The states of a head are C, n and m at the last flush and a ring buffer with k, v and the gate
pre-activations of the c tokens since then, s = 1 .. c. For the tokens t = c + 1 .. c + T:

    l_s = log i_s + sum_{s < r <= t} log sigmoid(f_r)        l_0 = m + sum_{r <= t} log sigmoid(f_r)
    m_t = max(l_0, max_{s <= t} l_s)                         w_s = exp(l_s - m_t)
    num = w_0 scale C^T q_t + sum_{s <= t} w_s scale (q_t . k_s) v_s
    z   = w_0 scale n . q_t + sum_{s <= t} w_s scale (q_t . k_s)
    h_t = num / (max(|z|, floor) + eps)

The sums run back from the newest token, so nothing is subtracted. With the sigmoid input gate m is
0, and so are all m_t. What has a weight of exactly 0 is left out, even if it is NaN or inf: the
tokens and the state before a reset, and later drafts.

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
from jax.export import register_namedtuple_serialization

from mlstm_pallas.formulas.gates import MASKED, log_input_gate, log_sigmoid
from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser
from mlstm_pallas.formulas.tiles import weighted
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.problem.arrays import Token
from mlstm_pallas.problem.dimensions import InputGate, accumulator_dtype
from mlstm_pallas.stages.plain_forms import on_rows, one_at_a_time
from mlstm_pallas.stages.recurrent_step import rounded, split_token

_INF = float("inf")


class RingStates(NamedTuple):
    """The states of ``mlstm_ring_step``: C of some tokens ago and the tokens since.

    In pools with slots, (P, NH, ...), a row is a request. A head has
    DHQK DHV itemsize bytes of C and 2 L (DHQK + DHV) itemsize bytes in the
    ring: 512 and 48 KiB for heads of 256/512 with a float32 C, a bfloat16 ring
    and L = 16.

    Attributes:
      c: C at the last flush, (B, NH, DHQK, DHV), float32, bfloat16 or float16.
      n: n at the last flush, (B, NH, DHQK).
      m: m at the last flush, (B, NH). None: the sigmoid input gate, whose m is 0.
      k: keys of the ring's tokens, (B, NH, 2 L, DHQK), in the dtype of k.
      v: values, (B, NH, 2 L, DHV), in the dtype of v.
      i: input gate pre-activations, (B, NH, 2 L), float32.
      f: forget gate pre-activations, (B, NH, 2 L), float32.
      start: the row of the oldest token, 0 or L, (B, NH) int32. Tokens follow
        one another from there on, modulo 2 L.
      fill: how many tokens the ring holds, (B, NH) int32.
      pending: how many drafts, the tokens of the last call, are behind them,
        (B, NH) int32. The next call counts those of them that are accepted.
    """

    c: Any
    n: Any
    m: Any
    k: Any
    v: Any
    i: Any
    f: Any
    start: Any
    fill: Any
    pending: Any


# Every import of this module has the class of the first in this process: callers may have states
# of that, and jax.export registers a name once.
RingStates, *_later = (  # type: ignore[misc, assignment]
    x for x in tuple.__subclasses__() if str(x) == str(RingStates)
)
if not _later:
    register_namedtuple_serialization(RingStates, serialized_name="mlstm_pallas.RingStates")


class Operands(NamedTuple):
    """With slots, B and NH are two axes; the states are pools, (P, NH, ...)."""

    tokens: Token  # of (B * NH, T, ...), any float dtypes of at most 32 bits; may be joined
    states: Any  # RingStates of (B * NH, ...), whose m is None with the sigmoid input gate
    accepted: Array | None = None  # (B * NH,) int32, how many drafts fill; None: all
    slots: Any = None  # (B,), of any integer dtype


def ages(start: Array, size: int) -> Array:
    """The position of each row's token in a ring of so many rows; 0: the oldest."""
    ahead = lax.iota("int32", size) - start
    return jnp.where(ahead < 0, ahead + size, ahead)


def log_gates(i: Array, f: Array, stabilised: bool) -> tuple[Array, Array]:
    """The logarithms of the gates, -inf where nothing is stored and at resets."""
    gate = InputGate.EXP if stabilised else InputGate.SIGMOID
    log_f = jnp.where(f <= MASKED, -_INF, log_sigmoid(f))
    return log_input_gate(i, gate), log_f


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
    # Nothing from before the last reset enters a sum, so a NaN there stays behind.
    reset = jnp.max(jnp.where(inside & (log_f == -_INF), age, -1))
    inside &= age >= reset
    log_f = jnp.where(inside & (age > reset), log_f, 0.0)
    younger = age[None, :] > age[:, None]
    since = jnp.sum(jnp.where(younger, jnp.broadcast_to(log_f[None, :], younger.shape), 0.0), 1)
    exponents = jnp.where(inside, log_i + since, -_INF)
    carried = jnp.where(reset < 0, jnp.sum(log_f) + (0.0 if m is None else m), -_INF)
    if m is None:
        return jnp.exp(carried), jnp.exp(exponents), jnp.zeros_like(carried)
    m_new = round_m(jnp.maximum(carried, jnp.max(exponents)))
    m_safe = jnp.where(m_new == -_INF, 0.0, m_new)
    return jnp.exp(carried - m_safe), jnp.exp(exponents - m_safe), m_new


def pending_tokens(pending: Array, accepted: Array | None) -> Array:
    """How many of the pending tokens count."""
    return pending if accepted is None else jnp.minimum(jnp.maximum(accepted, 0), pending)


def in_ring(x: Any) -> tuple[Any, ...]:
    """The fields of tokens or of states that a ring holds."""
    return x.k, x.v, x.i, x.f


def with_tokens(x: Operands) -> RingStates:
    """A head's states with the drafts that fill among the tokens and new tokens behind them."""
    states, T = x.states, len(x.tokens.i)
    fill = states.fill + pending_tokens(states.pending, x.accepted)
    behind = ages(states.start, len(states.i)) - fill
    at, new = jnp.clip(behind, 0, T - 1), (behind >= 0) & (behind < T)
    k, v, i, f = (
        jnp.where(new.reshape(-1, *[1] * (y.ndim - 1)), y[at], ring)
        for ring, y in zip(in_ring(states), in_ring(x.tokens), strict=True)
    )
    return states._replace(k=k, v=v, i=i, f=f, fill=fill, pending=jnp.full_like(fill, T))


def _weights(states: RingStates, end: Any, **options: Any) -> tuple[Array, ...]:
    """``ring_weights`` at a token, and the keys and values that count."""
    age = ages(states.start, len(states.i))
    gates = log_gates(states.i, states.f, states.m is not None)
    w0, w, m = ring_weights(*gates, age, states.m, end, **options)
    rows = (jnp.where(w[:, None] != 0, y, 0.0) for y in (states.k, states.v))
    return w0, w, m, *rows


def _flushed(states: RingStates, end: Any, m_dtype: Any) -> RingStates:
    """A head after a flush of its ``end`` oldest tokens, if the ring has so many."""
    round_m = functools.partial(rounded, dtype=m_dtype, compiled=False)
    w0, w, m, K, V = _weights(states, end, round_m=round_m)
    K = w[:, None] * K
    after = states._replace(
        c=weighted(w0, states.c) + jnp.einsum("sk,sv->kv", K, V, precision="highest"),
        n=weighted(w0, states.n) + jnp.sum(K, axis=0),
        m=None if states.m is None else m,
        start=len(states.i) // 2 - states.start,
        fill=states.fill - end,
    )
    return jax.tree.map(lambda y, z: jnp.where(states.fill >= end, z, y), states, after)


def _head(x: Operands, m_dtype: Any, normaliser: Normaliser | None, qk_scale: float) -> Any:
    """h and the states of one head; all floats in one dtype."""
    states, dot = with_tokens(x), functools.partial(jnp.einsum, precision="highest")

    def one(q: Array, end: Array) -> Array:
        w0, w, m, K, V = _weights(states, end)
        scores = w * dot("sk,k->s", K, q)
        h = (weighted(w0, dot("k,kv->v", q, states.c)) + dot("s,sv->v", scores, V)) * qk_scale
        if normaliser is None:
            return h
        z = weighted(w0, jnp.sum(states.n * q)) + jnp.sum(scores)
        return normaliser.normalise(h, z * qk_scale, m)

    q = x.tokens.q
    h = jax.vmap(one)(q, states.fill + 1 + lax.iota("int32", len(q)))
    return h, _flushed(states, len(states.i) // 2, m_dtype)


def _map_heads(
    run: Callable[..., Any], x: Any, states: RingStates, like: Any, in_loops: bool = False
) -> Any:
    """run(x) of each head in the dtype of sums, in the dtypes of ``like``; states: those in x."""
    acc, m = accumulator_dtype(*(y.dtype for y in jax.tree.leaves(x))), states.m
    m_dtype = acc if m is None else m.dtype

    # Each loop casts: between two loops XLA may drop a cast to 16 bits and back, which it does for
    # two heads and not for one.
    def one(x: Any) -> Any:
        x = jax.tree.map(lambda y: y if y.dtype == "int32" else y.astype(acc), x)
        return jax.tree.map(lambda y, like: y.astype(like.dtype), run(x, m_dtype=m_dtype), like)

    if in_loops:
        return one_at_a_time(one, states.fill.ndim)(x)
    for _ in states.fill.shape:
        one = jax.vmap(one)
    return one(x)


@functools.partial(jax.jit, static_argnums=2)
def flushed(states: RingStates, accepted: Array | None, in_loops: bool) -> RingStates:
    """The states without tokens, those of a full half first."""
    fill = states.fill + pending_tokens(states.pending, accepted)
    states, half = states._replace(fill=fill), states.i.shape[-1] // 2
    for run in (
        functools.partial(_flushed, end=half),
        lambda states, m_dtype: _flushed(states, states.fill, m_dtype),
    ):
        states = _map_heads(run, states, states, states, in_loops)
    return states


def ring_step(
    x: Operands, *, normaliser: Normaliser | None = DEFAULT_NORMALISER, call: Launch
) -> tuple[Array, RingStates]:
    """Runs the stage: h (B * NH, T, DHV) in the dtype of q, and the new states."""
    x = x._replace(tokens=split_token(x.tokens, *x.states.c.shape[-2:]))
    run = functools.partial(_head, normaliser=normaliser, qk_scale=call.problem.qk_scale)

    def on_heads(x: Operands) -> Any:
        return _map_heads(run, x, x.states, (x.tokens.q, x.states))

    return on_heads(x) if x.slots is None else on_rows(on_heads, x)
