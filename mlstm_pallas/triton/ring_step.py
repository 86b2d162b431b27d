"""ring_step in Triton: two launches.

ring_scores has one CTA per head. It stores the new tokens in the ring, reads n and the ring's k and
gates, which are small, flushes n and m, and advances the counters, all in place. It leaves the
weights of the values, of C and of the flush to the second launch, which repeats no score.

ring_read, grid (ceil(DHV / siz_b_DHHV), B * NH), with slots (ceil(DHV / siz_b_DHHV), NH, B): a CTA
owns siz_b_DHHV columns of one head. It reads its part of C once, in blocks of siz_b_DHQK rows, each
loaded while the preceding block is processed, and adds the values. The CTAs of a head that flushes
then read C again, from the L2, and update it in place.

FLOPs: 2 T B NH K V. Bytes: C once, B NH K V itemsize, and once more for the heads that flush, one
in L; beside that the tokens in the ring, up to 2 B NH L (K + V) itemsize.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser
from mlstm_pallas.formulas.tiles import blocks_over, dot, fori, loop, sum_of, weighted
from mlstm_pallas.launches.kernel_tiles import KernelSpec
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.problem.dimensions import MIN_TILE, Problem
from mlstm_pallas.stages.recurrent_step import rounded, split_token
from mlstm_pallas.stages.ring_step import (
    Operands,
    ages,
    in_ring,
    log_gates,
    pending_tokens,
    ring_weights,
)
from mlstm_pallas.triton.launch import (
    Columns,
    barrier,
    floats,
    kernel_call,
    masked_load,
    masked_store,
)
from mlstm_pallas.triton.recurrent_step import (
    RecurrentStepTiles,
    at_least_a_tile,
    covering,
    entries,
    for_columns,
    for_row,
    masked_block,
    outer_mask,
)


class Weights(NamedTuple):
    """What ring_scores leaves to ring_read, per head; T is padded to 16 or more."""

    vecRing: Any  # (T, 2 L), of the ring's values in h, with the new tokens'
    scaState: Any  # (T,), of C^T q in h
    vecFlush: Any  # (2 L,), of k v^T in C
    scaDecay: Any  # (), of C in the flush
    counters: Any  # (4,), the row of the oldest token, the tokens, whether the head flushes


def _ring_scores_kernel(x, states, states_new, weights, *, call, normaliser):
    """x: Operands without the states. ring_read needs nothing without a row."""
    run = functools.partial(_scores, x, states, states_new, weights, call, normaliser)
    for_row(x.slots, states.n, run, lambda: None)


def _scores(x, states, new, weights, call, normaliser, row):
    """row: (the row of the states,) in pools, otherwise ()."""
    (T, DHQK), size, scale = x.tokens.q.shape, states.i.shape[-1], call.problem.qk_scale
    L, at, ring, m, q = size // 2, row or ..., pl.ds(0, size), states.m, x.tokens.q
    first, drafts = states.start[at], None if x.accepted is None else x.accepted[...]
    old = states.fill[at] + pending_tokens(states.pending[at], drafts)
    _store_tokens(row, first + old, in_ring(new), in_ring(x.tokens))
    barrier(call)  # for what follows reads them
    age = ages(first, size)
    i, f = (masked_load(ref.at[(*row, ring)], age < old + T) for ref in (new.i, new.f))
    log_i, log_f = log_gates(i, f, m is not None)
    m_before = None if m is None else m[at].astype(jnp.float32)
    # A block of k has 8 KiB, in registers.
    block = min(at_least_a_tile(DHQK), 8192 // (size * new.k.dtype.itemsize))
    num_blocks = blocks_over(DHQK, block)

    def load(ref, columns, rows, mask):
        return masked_load(ref.at[(*rows, columns)], mask).astype(jnp.float32)

    def load_K(columns, inside, rows):
        return masked_load(new.k.at[(*row, ring, columns)], outer_mask(rows, inside))

    def scores_of(ik):
        columns, inside = masked_block(ik, block, DHQK)
        K = load_K(columns, inside, age < old + T)
        if T > 1:
            q_rows = masked_load(q.at[(tokens, columns)], outer_mask(in_tokens, inside))
            return _product(q_rows, K, call, b_axis=1)
        q_row = load(q, columns, (jnp.int32(0),), inside)
        return jnp.sum(q_row[None, :] * K.astype(jnp.float32), axis=1)[None, :]

    tokens: Any
    tokens, in_tokens = (pl.ds(0, 1), None) if T == 1 else covering(T)
    scores = sum_of(num_blocks, scores_of, (tokens.size, size))
    masked_store(weights.vecRing.at[(tokens, ring)], scores, outer_mask(in_tokens, None))
    barrier(call)

    @fori(T)
    def _(t):
        end, (columns, inside) = old + t + 1, covering(DHQK)
        n_dot_q = jnp.sum(load(q, columns, (t,), inside) * load(states.n, columns, row, inside))
        w0, w, m_t = ring_weights(log_i, log_f, age, m_before, end)
        # The k of later tokens and of those before a reset may be NaN.
        scores = jnp.where(w != 0, scale * w * weights.vecRing[t, ring], 0.0)
        w0 = scale * w0
        if normaliser is not None:
            inverse = normaliser.reciprocal(weighted(w0, n_dot_q) + jnp.sum(scores), m_t)
            scores, w0 = scores * inverse, w0 * inverse
        weights.vecRing[t, ring], weights.scaState[t] = scores, w0

    full = old >= L
    for j, count in enumerate((first, old + T, full.astype(jnp.int32))):
        weights.counters[j] = count

    @pl.when(full)
    def flush():
        w0, w, m_new = ring_weights(
            log_i, log_f, age, m_before, L, lambda y: rounded(y, m.dtype, not call.interpret)
        )
        weights.vecFlush[...], weights.scaDecay[...] = w, w0

        @fori(num_blocks)
        def _(ik):
            columns, inside = masked_block(ik, block, DHQK)
            K = load_K(columns, inside, age < L).astype(jnp.float32)
            added = jnp.sum(jnp.where(w[:, None] != 0, w[:, None] * K, 0.0), axis=0)
            n = weighted(w0, load(states.n, columns, row, inside)) + added
            masked_store(new.n.at[(*row, columns)], n.astype(states.n.dtype), inside)

        if m is not None:
            new.m[at] = m_new.astype(m.dtype)
        new.start[at] = L - first

    new.fill[at] = jnp.where(full, old - L, old)
    new.pending[at] = jnp.int32(T)


def _store_tokens(row, first, rings, tokens):
    """Stores the tokens in the ring from a row on."""
    stores, size, T = [], rings[0].shape[-2], tokens[0].shape[0]
    for t in range(T):
        to, at = (first + t) & jnp.int32(size - 1), jnp.int32(t)
        for ring, x in zip(rings, tokens, strict=True):
            *columns, inside = covering(x.shape[1]) if len(x.shape) > 1 else (None,)
            token = masked_load(x.at[(at, *columns)], inside)
            stores.append((ring.at[(*row, to, *columns)], token.astype(ring.dtype), inside))
    for store in stores:  # after all loads, which thus wait once
        masked_store(*store)


def _ring_read_kernel(slots, matQ, states, weights, matC, matC_new, matH, *, call):
    """states: after ring_scores; matC: in place; matH: out (T, DHV)."""
    run = functools.partial(_read, matQ, states, weights, matC, matC_new, matH, call)
    for_columns(slots, matC, matH, call, run)


def _read(matQ, states, weights, matC, matC_new, matH, call, row, part, columns, in_columns):
    """row, columns: as of ``for_columns``."""
    (T, DHQK), size = matQ.shape, weights.vecFlush.shape[0]
    siz_b_DHQK = call.tiles.siz_b_DHQK
    num_blocks, one = blocks_over(DHQK, siz_b_DHQK), T == 1
    # One token is a vector; a product has 16 or more.
    zero = jnp.zeros((), jnp.int32)
    tokens, in_tokens = (zero, None) if one else covering(T)

    def load(ik):
        rows, in_rows = masked_block(ik, siz_b_DHQK, DHQK)
        C = masked_load(matC.at[(*row, rows, columns)], outer_mask(in_rows, in_columns))
        mask = in_rows if one else outer_mask(in_tokens, in_rows)
        return C, masked_load(matQ.at[(tokens, rows)], mask)

    def product(a, B):
        """a (T, ...) or (...,) times B."""
        if not one:
            return _product(a, B, call)
        return jnp.sum(a.astype(jnp.float32)[:, None] * B.astype(jnp.float32), axis=0)

    def add(loaded, total):
        C, q = loaded
        return total + product(q, C)

    def add_values(w, V, h):
        """h and the weighted sum of the values; those of weight 0 may be NaN."""
        counts = w != 0
        if one:
            return product(w, jnp.where(counts[:, None], V, 0)) + h
        finite = jnp.abs(V.astype(jnp.float32)) < float("inf")
        not_finite = dot(counts.astype(jnp.bfloat16), (~finite).astype(jnp.bfloat16), None)
        h = product(w, jnp.where(finite, V, 0)) + h
        return jnp.where(not_finite > 0, float("nan"), h)

    # The first block of C is loaded before anything waits, the values while the last one arrives.
    carry = (
        load(zero),
        jnp.zeros((columns.size,) if one else (tokens.size, columns.size), jnp.float32),
    )
    start, filled, flushes = (weights.counters[j] for j in range(3))
    ring = pl.ds(0, size)
    if num_blocks > 1:
        carry = loop(num_blocks - 1, lambda ik, x: (load(ik + 1), add(*x)), carry)
    held = ages(start, size) < filled
    V = masked_load(states.v.at[(*row, ring, columns)], outer_mask(held, in_columns))
    w = masked_load(  # behind V, which does not wait for it
        weights.vecRing.at[(tokens, ring)], None if one else outer_mask(in_tokens, None)
    )
    w_state = masked_load(weights.scaState.at[tokens], in_tokens)
    h = add_values(w, V, weighted(w_state if one else w_state[:, None], add(*carry)))
    inside = in_columns if one else outer_mask(in_tokens, in_columns)
    masked_store(matH.at[(tokens, columns)], h.astype(matH.dtype), inside)

    @pl.when(flushes != 0)
    def flush():
        # The flushed tokens are one half of the ring; a product has 16 rows or more.
        L, decay = size // 2, weights.scaDecay[...]
        ring = pl.ds(start if L >= MIN_TILE else 0, max(L, MIN_TILE))
        w = weights.vecFlush[ring]
        V = masked_load(states.v.at[(*row, ring, columns)], outer_mask(w != 0, in_columns))
        V = V.astype(jnp.float32) * w[:, None]

        @fori(num_blocks)
        def _(ik):
            rows, in_rows = masked_block(ik, siz_b_DHQK, DHQK)
            at, inside = (*row, rows, columns), outer_mask(in_rows, in_columns)
            # A select of loaded tiles takes longer than this mask.
            kept = jnp.broadcast_to(decay != 0, (rows.size, columns.size))
            kept = kept if inside is None else kept & inside
            C = decay * masked_load(matC.at[at], kept).astype(jnp.float32)
            K = masked_load(states.k.at[(*row, ring, rows)], outer_mask(w != 0, in_rows))
            C += _product(K, V, call, a_axis=0)
            masked_store(matC_new.at[at], C.astype(matC.dtype), inside)


def _product(a: jax.Array, b: jax.Array, call: Launch, **axes: int) -> jax.Array:
    """The product of two tiles in full float32 accuracy.

    A float32 tile is three bfloat16 tiles where the other is bfloat16.
    """
    if call.interpret:
        return dot(a.astype(jnp.float32), b.astype(jnp.float32), lax.Precision.HIGHEST, **axes)
    if a.dtype == b.dtype != jnp.float32:
        return dot(a, b, None, **axes)
    if jnp.bfloat16 in (a.dtype, b.dtype):
        exact = a.dtype == jnp.bfloat16
        low, middle, high = (
            dot(a, x, None, **axes) if exact else dot(x, b, None, **axes)
            for x in _thirds(b if exact else a)
        )
        return low + middle + high
    six = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
    return dot(a.astype(jnp.float32), b.astype(jnp.float32), six, **axes)


def _thirds(x: jax.Array) -> tuple[jax.Array, ...]:
    """Three bfloat16 tiles whose sum is x, the smallest first."""
    high = x.astype(jnp.bfloat16)
    x = x - high.astype(x.dtype)
    middle = x.astype(jnp.bfloat16)
    return (x - middle.astype(x.dtype)).astype(jnp.bfloat16), middle, high


def ring_step(
    x: Operands, *, normaliser: Normaliser | None = DEFAULT_NORMALISER, call: Launch
) -> tuple[Any, ...]:
    """Runs the stage: ``stages/ring_step.py``."""
    (*heads, T, _), C, size = x.tokens.q.shape, x.states.c, x.states.i.shape[-1]
    DHQK, DHV = C.shape[-2:]
    x = x._replace(tokens=split_token(x.tokens, DHQK, DHV, Columns))
    token, states, grid = entries(call, x.slots)
    weights = Weights(
        floats(*heads, T, size),
        floats(*heads, T),
        floats(*heads, size),
        floats(*heads),
        jax.ShapeDtypeStruct((*heads, 4), jnp.int32),
    )
    scores = dataclasses.replace(call.tiles, num_warps=call.tiles.score_warps)
    y = kernel_call(
        _ring_scores_kernel,
        dict(x=(x._replace(states=None), token)),
        dict(weights=(weights, token)),
        updates=dict(states=(x.states._replace(c=None), states)),
        grid=grid[1:],
        call=dataclasses.replace(call, tiles=scores),
        normaliser=normaliser,
    )
    after = y["states_new"]
    z = kernel_call(
        _ring_read_kernel,
        dict(
            slots=(x.slots, token),
            matQ=(x.tokens.q, token),
            states=(after, states),
            weights=(y["weights"], token),
        ),
        dict(matH=(jax.ShapeDtypeStruct((*heads, T, DHV), x.tokens.q.dtype), token)),
        updates=dict(matC=(C, states)),
        grid=grid,
        call=call,
    )
    return z["matH"], after._replace(c=z["matC_new"])


@dataclasses.dataclass(frozen=True)
class RingStepTiles(RecurrentStepTiles):
    """A CTA of ring_read has one block of C in use and the next in flight."""

    score_warps: int = 2  # of ring_scores

    @classmethod
    def plan(cls, p: Problem, dtype: Any, kernel: KernelSpec) -> Self:
        """Where blocks of 64 x 64 make few CTAs, 256 x 32 make more, each with all rows in flight.

        With one token, fewer than 12 per SM are few. With several tokens, fewer than one per SM
        are, because products with 256 rows need so many registers that a CTA should have an SM of
        its own.
        """
        if not kernel.gpu.filled_by(math.prod(cls().grid(p)), 12 if p.S == 1 else 1):
            return cls(256, 32)
        # A product splits float32 states into three parts, in registers.
        return cls(64, 32) if p.S > 1 and dtype.itemsize > 2 else cls()
