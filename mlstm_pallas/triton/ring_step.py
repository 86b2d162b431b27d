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
import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser
from mlstm_pallas.formulas.tiles import block_at, blocks_over, dot, each, loop, sum_of
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.problem.gpu import Gpu
from mlstm_pallas.stages.recurrent_step import rounded
from mlstm_pallas.stages.ring_step import (
    Operands,
    ages,
    log_gates,
    pending_tokens,
    ring_weights,
)
from mlstm_pallas.stages.stage import Launch
from mlstm_pallas.triton.launch import (
    barrier,
    floats,
    kernel_call,
    masked_load,
    masked_store,
    operands,
)
from mlstm_pallas.triton.recurrent_step import (
    RecurrentStepTiles,
    at_least_a_tile,
    for_row,
    masked_block,
    outer_mask,
    whole,
)


class Weights(NamedTuple):
    """What ring_scores leaves to ring_read, per head; T is padded to 16 or more."""

    vecRing: Any  # (T, 2 L), of the ring's values in h, with the new tokens'
    scaState: Any  # (T,), of C^T q in h
    vecFlush: Any  # (2 L,), of k v^T in C
    scaDecay: Any  # (), of C in the flush
    counters: Any  # (4,), the row of the oldest token, the tokens, whether the head flushes


def _ring_scores_kernel(*, slots, **head):
    """slots: (), the entry's row of the pools, or absent. ring_read needs nothing without a row."""
    for_row(slots, head["vecN"], lambda row: _scores(row, **head), lambda: None)


def _scores(
    row,  # (the row of the states,) in pools, otherwise ()
    vecN,  # (DHQK,); states in pools have an axis P in front
    scaM,  # (), or absent: the sigmoid input gate
    ringK,  # (2 L, DHQK)
    ringV,  # (2 L, DHV)
    ringI,  # (2 L,)
    ringF,  # (2 L,)
    start,  # ()
    fill,  # ()
    pending,  # ()
    accepted,  # (), or absent
    matQ,  # (T, DHQK)
    matK,  # (T, DHQK)
    matV,  # (T, DHV)
    vecI,  # (T,)
    vecF,  # (T,)
    vecN_new,  # out, in place, like all of the states that follow
    scaM_new,
    ringK_new,
    ringV_new,
    ringI_new,
    ringF_new,
    start_new,
    fill_new,
    pending_new,
    *,
    call,
    normaliser,
    **weights,  # out
):
    out, compiled = Weights(**weights), not call.interpret
    (T, DHQK), size, scale = matQ.shape, ringI.shape[-1], call.problem.qk_scale
    L, at, stabilised, ring = size // 2, row or ..., scaM is not None, pl.ds(0, size)
    first, drafts = start[at], None if accepted is None else accepted[...]
    old = fill[at] + pending_tokens(pending[at], drafts)
    rings = (ringK_new, matK), (ringV_new, matV), (ringI_new, vecI), (ringF_new, vecF)
    _store_tokens(row, first + old, T, rings)
    barrier(call)  # for what follows reads them
    age = ages(lax.iota(jnp.int32, size), first, size)
    i, f = (masked_load(ref.at[(*row, ring)], age < old + T) for ref in (ringI_new, ringF_new))
    log_i, log_f = log_gates(i, f, stabilised)
    m = scaM[at].astype(jnp.float32) if stabilised else None
    block = min(at_least_a_tile(DHQK), 64)
    num_blocks = blocks_over(DHQK, block)

    def load(ref, columns, rows, mask):
        return masked_load(ref.at[(*rows, columns)], mask).astype(jnp.float32)

    def load_K(columns, inside, end):
        """Columns of the ring's tokens before one."""
        return masked_load(ringK_new.at[(*row, ring, columns)], outer_mask(age < end, inside))

    def scores_of(ik):
        columns, inside = masked_block(ik, block, DHQK)
        K = load_K(columns, inside, old + T)
        if T > 1:
            q = masked_load(matQ.at[(tokens, columns)], outer_mask(in_tokens, inside))
            return _product(q, K, call, b_axis=1)
        q = load(matQ, columns, (jnp.int32(0),), inside)
        return jnp.sum(q[None, :] * K.astype(jnp.float32), axis=1)[None, :]

    tokens: Any
    tokens, in_tokens = (pl.ds(0, 1), None) if T == 1 else whole(T)
    scores = sum_of(num_blocks, scores_of, (tokens.size, size))
    masked_store(out.vecRing.at[(tokens, ring)], scores, outer_mask(in_tokens, None))
    barrier(call)

    @each(T)
    def _(t):
        end, (columns, inside) = old + t + 1, whole(DHQK)
        n_dot_q = jnp.sum(load(matQ, columns, (t,), inside) * load(vecN, columns, row, inside))
        w0, w, m_t = ring_weights(log_i, log_f, age, m, end)
        # The k of later tokens may be NaN.
        scores = jnp.where(age < end, scale * w * out.vecRing[t, ring], 0.0)
        w0 = scale * w0
        if normaliser is not None:
            inverse = normaliser.reciprocal(w0 * n_dot_q + jnp.sum(scores), m_t)
            scores, w0 = scores * inverse, w0 * inverse
        out.vecRing[t, ring], out.scaState[t] = scores, w0

    full = old >= L
    for j, x in enumerate((first, old + T, full.astype(jnp.int32))):
        out.counters[j] = x

    @pl.when(full)
    def flush():
        w0, w, m_new = ring_weights(
            log_i, log_f, age, m, L, lambda x: rounded(x, scaM_new.dtype, compiled=compiled)
        )
        out.vecFlush[...], out.scaDecay[...] = w, w0

        @each(num_blocks)
        def _(ik):
            columns, inside = masked_block(ik, block, DHQK)
            added = jnp.sum(w[:, None] * load_K(columns, inside, L).astype(jnp.float32), axis=0)
            n = w0 * load(vecN, columns, row, inside) + added
            masked_store(vecN_new.at[(*row, columns)], n.astype(vecN_new.dtype), inside)

        if scaM_new is not None:
            scaM_new[at] = m_new.astype(scaM_new.dtype)
        start_new[at] = L - first

    fill_new[at] = jnp.where(full, old - L, old)
    pending_new[at] = jnp.int32(T)


def _store_tokens(row, first, T, operands):
    """Stores T tokens in the ring from a row on; operands: pairs of the ring's and the tokens'."""
    stores, (size, _) = [], operands[0][0].shape[-2:]
    for t in range(T):
        to, at = (first + t) & jnp.int32(size - 1), jnp.int32(t)
        for ref, x in operands:
            part, inside = whole(x.shape[1]) if len(x.shape) > 1 else (None, None)
            columns = () if part is None else (part,)
            token = masked_load(x.at[(at, *columns)], inside)
            stores.append((ref.at[(*row, to, *columns)], token.astype(ref.dtype), inside))
    for store in stores:  # after all loads, which thus wait once
        masked_store(*store)


def _ring_read_kernel(*, slots, **head):
    """slots: (), the entry's row of the pools, or absent."""
    part = pl.program_id(0)
    for_row(
        slots,
        head["matC"],
        lambda row: _read(row, part, **head),
        lambda: _no_output(part, head["matH"], head["call"]),
    )


def _no_output(part, matH, call):
    columns, inside = masked_block(part, call.tiles.siz_b_DHHV, matH.shape[-1])

    @each(matH.shape[0])
    def _(t):
        masked_store(matH.at[(t, columns)], jnp.zeros(columns.size, matH.dtype), inside)


def _read(
    row,  # (the row of the states,) in pools, otherwise ()
    part,  # the index of the CTA's columns
    matC,  # (DHQK, DHV), the whole head's; states in pools have an axis P in front
    ringK,  # (2 L, DHQK)
    ringV,  # (2 L, DHV)
    matQ,  # (T, DHQK)
    matH,  # out (T, DHV)
    matC_new,  # out (DHQK, DHV), in place of C
    *,
    call,
    **weights,
):
    x = Weights(**weights)
    (DHQK, DHV), (T, _), size = matC.shape[-2:], matQ.shape, x.vecFlush.shape[0]
    siz_b_DHQK, siz_b_DHHV = call.tiles.siz_b_DHQK, call.tiles.siz_b_DHHV
    columns, in_columns = masked_block(part, siz_b_DHHV, DHV)
    num_blocks, one = blocks_over(DHQK, siz_b_DHQK), T == 1
    # One token is a vector; a product has 16 or more.
    zero = jnp.zeros((), jnp.int32)
    tokens, in_tokens = (zero, None) if one else whole(T)

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

    # The first block of C is loaded before anything waits, the values while the last one arrives.
    carry = load(zero), jnp.zeros((siz_b_DHHV,) if one else (tokens.size, siz_b_DHHV), jnp.float32)
    start, filled, flushes = (x.counters[j] for j in range(3))
    if num_blocks > 1:
        carry = loop(num_blocks - 1, lambda ik, x: (load(ik + 1), add(*x)), carry)
    held = ages(lax.iota(jnp.int32, size), start, size) < filled
    ring = pl.ds(0, size)
    V = masked_load(ringV.at[(*row, ring, columns)], outer_mask(held, in_columns))
    w = masked_load(x.vecRing.at[(tokens, ring)], None if one else outer_mask(in_tokens, None))
    w_state = masked_load(x.scaState.at[tokens], in_tokens)
    h = product(w, V) + (w_state if one else w_state[:, None]) * add(*carry)
    inside = in_columns if one else outer_mask(in_tokens, in_columns)
    masked_store(matH.at[(tokens, columns)], h.astype(matH.dtype), inside)

    @pl.when(flushes != 0)
    def flush():
        decay, block = x.scaDecay[...], min(size, 32)

        @each(num_blocks)
        def _(ik):
            K_rows, in_rows = masked_block(ik, siz_b_DHQK, DHQK)
            inside = outer_mask(in_rows, in_columns)
            C = masked_load(matC.at[(*row, K_rows, columns)], inside).astype(jnp.float32)

            def add_outer(index, C):
                rows = block_at(index, block)
                w = x.vecFlush[rows]
                K = masked_load(ringK.at[(*row, rows, K_rows)], outer_mask(w != 0, in_rows))
                V = masked_load(ringV.at[(*row, rows, columns)], outer_mask(w != 0, in_columns))
                return C + _product(K, V.astype(jnp.float32) * w[:, None], call, a_axis=0)

            C = loop(size // block, add_outer, decay * C)
            masked_store(matC_new.at[(*row, K_rows, columns)], C.astype(matC_new.dtype), inside)


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
    *heads, T, _ = x.matQ.shape
    DHV, size = x.matV.shape[-1], x.ringI.shape[-1]
    token, states, grid = "b", "b", call.tiles.grid(call.problem)
    if x.slots is not None:  # b is an entry, c a head
        token, states, grid = "bc", "0c", (grid[0], call.problem.NH, call.problem.B)
    matrices = dict.fromkeys(("ringK", "ringV"), states + "00")
    at = dict(vecN=states + "0", scaM=states) | matrices
    at |= dict.fromkeys(("ringI", "ringF"), states + "0")
    at |= dict.fromkeys(("start", "fill", "pending"), states)
    weights = Weights(
        (floats(*heads, T, size), token + "00"),
        (floats(*heads, T), token + "0"),
        (floats(*heads, size), token + "0"),
        (floats(*heads), token),
        (jax.ShapeDtypeStruct((*heads, 4), jnp.int32), token + "0"),
    )._asdict()
    tokens = dict.fromkeys(("matQ", "matK", "matV"), token + "00")
    present = [name for name in at if getattr(x, name) is not None]
    inputs = (
        operands(x, **at)
        | operands(x, accepted=token, **tokens, vecI=token + "0", vecF=token + "0")
        | dict(slots=(x.slots, "b"))
    )
    outputs = {f"{name}_new": (getattr(x, name), axes) for name, axes in at.items()} | weights
    aliases = {j: j for j in range(len(present))}
    h = jax.ShapeDtypeStruct((*heads, T, DHV), x.matQ.dtype)
    read_outputs = dict(matC_new=(x.matC, states + "00"), matH=(h, token + "00"))
    scores = dataclasses.replace(call.tiles, num_warps=call.tiles.score_warps)
    y = kernel_call(
        _ring_scores_kernel,
        inputs,
        outputs,
        grid=grid[1:],
        aliases=aliases,
        call=dataclasses.replace(call, tiles=scores),
        normaliser=normaliser,
    )
    z = kernel_call(
        _ring_read_kernel,
        dict(matC=(x.matC, states + "00"))
        | {name: (y[f"{name}_new"], axes) for name, axes in matrices.items()}
        | operands(x, matQ=token + "00")
        | {name: (y[name], axes) for name, (_, axes) in weights.items()}
        | dict(slots=(x.slots, "b")),
        read_outputs,
        grid=grid,
        aliases={0: 0},
        call=call,
    )
    after = (y[f"{name}_new"] for name in Operands._fields[6:15])
    return z["matH"], z["matC_new"], *after


@dataclasses.dataclass(frozen=True)
class RingStepTiles(RecurrentStepTiles):
    """A CTA of ring_read has one block of C in use and the next in flight."""

    score_warps: int = 2  # of ring_scores

    @classmethod
    def plan(cls, p: Problem, dtype: Any, gpu: Gpu, **requested: Any) -> Self:
        """Few CTAs have narrow blocks, so that there are more of them, with all rows in flight."""
        if not gpu.filled_by(math.prod(cls().grid(p)), 12):
            return cls(256, 32)
        return cls(128, 32) if p.S == 1 and dtype.itemsize > 2 else cls()
