"""ring_step in Triton: two launches.

ring_scores has one CTA per head. It reads n and the ring's k and gates, which are small, stores the
new tokens in the ring, flushes n and m, and advances the counters, all in place. It leaves the
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
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser
from mlstm_pallas.formulas.tiles import blocks_over, divide, dot, each, loop
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.problem.gpu import Gpu
from mlstm_pallas.stages.recurrent_step import rounded
from mlstm_pallas.stages.ring_step import (
    Operands,
    Ring,
    ages,
    log_gates,
    pending_tokens,
    ring_weights,
)
from mlstm_pallas.stages.stage import Launch
from mlstm_pallas.stages.stage import Tiles as BaseTiles
from mlstm_pallas.triton.launch import floats, kernel_call, masked_load, masked_store, operands
from mlstm_pallas.triton.recurrent_step import at_least_a_tile, masked_block, outer_mask


def _with_row(slots, pools, run, without_row):
    """run(the row of the states); an entry whose slot has no row runs without_row."""
    if slots is None:
        return run(())
    slot = slots[...].astype(jnp.int32)
    has_row = (slot >= 0) & (slot < pools.shape[0])
    lax.cond(has_row, lambda: run((slot,)), without_row)
    return None


def _ring_scores_kernel(*, slots, **head):
    """slots: (), the entry's row of the pools, or absent."""

    def without_row():
        for name in ("vecWeights", "scaState", "vecFlush", "vecRing"):
            ref = head[name]
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    _with_row(slots, head["vecN"], lambda row: _scores(row, **head), without_row)


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
    vecWeights,  # out (T, 2 L), the weights of the ring's values in h
    scaState,  # out (T,), the weight of C^T q in h
    vecFlush,  # out (2 L,), the weights of k v^T in C
    scaDecay,  # out (), the weight of C in the flush
    vecRing,  # out (4,), the row of the oldest token, the tokens, whether the head flushes
    *,
    call,
    normaliser,
):
    (T, DHQK), size, scale = matQ.shape, ringI.shape[-1], call.problem.qk_scale
    L, mask = size // 2, jnp.int32(size - 1)
    at, rows = row or ..., lax.iota(jnp.int32, size)
    first, drafts = start[at], None if accepted is None else accepted[...]
    old = fill[at] + pending_tokens(pending[at], drafts)
    age = ages(rows, first, size)
    held = age < old
    whole, in_whole = masked_block(jnp.zeros((), jnp.int32), at_least_a_tile(DHQK), DHQK)

    def gates_of(ref):
        return masked_load(ref.at[(*row, pl.ds(0, size))], held)

    K = masked_load(ringK.at[(*row, pl.ds(0, size), whole)], outer_mask(held, in_whole))
    K = K.astype(jnp.float32)

    def vector(ref, t):
        return masked_load(ref.at[(t, whole)], in_whole).astype(jnp.float32)

    def add(t, carry):
        K, i, f = carry
        new = age == old + t
        K = jnp.where(new[:, None], vector(matK, t)[None, :], K)
        i, f = (jnp.where(new, ref[t].astype(jnp.float32), y) for ref, y in ((vecI, i), (vecF, f)))
        return K, i, f

    K, i, f = loop(T, add, (K, gates_of(ringI), gates_of(ringF)))
    log_i, log_f = log_gates(i, f, scaM is not None)
    m = None if scaM is None else scaM[at].astype(jnp.float32)
    n = masked_load(vecN.at[(*row, whole)], in_whole).astype(jnp.float32)

    @each(T)
    def _(t):
        q, end = vector(matQ, t), old + t + 1
        w0, w, m_t = ring_weights(log_i, log_f, age, m, end)
        w = jnp.where(age < end, w * scale * jnp.sum(K * q[None, :], axis=1), 0.0)
        w0 = w0 * scale
        if normaliser is not None:
            inverse = normaliser.reciprocal(w0 * jnp.sum(n * q) + jnp.sum(w), m_t)
            w, w0 = w * inverse, w0 * inverse
        vecWeights[t, :] = w
        scaState[t] = w0

    full = old >= L
    w0, w, m_new = ring_weights(
        log_i, log_f, age, m, L, lambda x: rounded(x, scaM_new.dtype, compiled=not call.interpret)
    )
    vecFlush[...] = jnp.where(full, w, 0.0)
    scaDecay[...] = w0
    for j, x in enumerate((first, old + T, full.astype(jnp.int32))):
        vecRing[j] = x

    @pl.when(full)
    def _():
        # Not a product with w, which is 0 at the other rows: their k may be NaN.
        added = jnp.where((age < L)[:, None], w[:, None] * K, 0.0)
        n_new = w0 * n + jnp.sum(added, axis=0)
        masked_store(vecN_new.at[(*row, whole)], n_new.astype(vecN_new.dtype), in_whole)
        if scaM_new is not None:
            scaM_new[at] = m_new.astype(scaM_new.dtype)
        start_new[at] = L - first

    fill_new[at] = jnp.where(full, old - L, old)
    pending_new[at] = jnp.int32(T)
    columns, in_columns = masked_block(
        jnp.zeros((), jnp.int32), at_least_a_tile(matV.shape[-1]), matV.shape[-1]
    )

    @each(T)
    def _(t):
        to = (first + old + t) & mask
        for ref, x, part, inside in (
            (ringK_new, matK, whole, in_whole), (ringV_new, matV, columns, in_columns)
        ):  # fmt: skip
            masked_store(ref.at[(*row, to, part)], masked_load(x.at[(t, part)], inside), inside)
        for ref, x in ((ringI_new, vecI), (ringF_new, vecF)):
            ref[(*row, to)] = x[t].astype(ref.dtype)


def _ring_read_kernel(*, slots, **head):
    """slots: (), the entry's row of the pools, or absent."""
    part, matH = pl.program_id(0), head["matH"]

    def without_row():
        columns, inside = masked_block(part, head["call"].tiles.siz_b_DHHV, matH.shape[-1])

        @each(matH.shape[0])
        def _(t):
            masked_store(matH.at[(t, columns)], jnp.zeros(columns.size, matH.dtype), inside)

    _with_row(slots, head["matC"], lambda row: _read(row, part, **head), without_row)


def _read(
    row,  # (the row of the states,) in pools, otherwise ()
    part,  # the index of the CTA's columns
    matC,  # (DHQK, DHV), the whole head's; states in pools have an axis P in front
    ringK,  # (2 L, DHQK)
    ringV,  # (2 L, DHV)
    matQ,  # (T, DHQK)
    vecWeights,  # (T, 2 L), and so on: outputs of _scores
    scaState,
    vecFlush,
    scaDecay,
    vecRing,
    matH,  # out (T, DHV)
    matC_new,  # out (DHQK, DHV), in place of C
    *,
    call,
):
    (DHQK, DHV), (T, _), size = matC.shape[-2:], matQ.shape, vecFlush.shape[0]
    siz_b_DHQK, siz_b_DHHV = call.tiles.siz_b_DHQK, call.tiles.siz_b_DHHV
    columns, in_columns = masked_block(part, siz_b_DHHV, DHV)
    num_blocks = blocks_over(DHQK, siz_b_DHQK)
    steps = [jnp.full((), t, jnp.int32) for t in range(T)]

    def load(ik):
        rows, in_rows = masked_block(ik, siz_b_DHQK, DHQK)
        C = matC.at[(*row, rows, columns)]
        q = [masked_load(matQ.at[(t, rows)], in_rows) for t in steps]
        return masked_load(C, outer_mask(in_rows, in_columns)), q

    def add(loaded, sums):
        C, q = loaded
        C = C.astype(jnp.float32)
        q = (x.astype(jnp.float32)[:, None] for x in q)
        return [y + jnp.sum(x * C, axis=0) for x, y in zip(q, sums, strict=True)]

    # The first block is loaded before anything waits.
    carry = load(jnp.zeros((), jnp.int32)), [jnp.zeros((siz_b_DHHV,), jnp.float32)] * T
    if num_blocks > 1:
        carry = loop(num_blocks - 1, lambda ik, x: (load(ik + 1), add(*x)), carry)
    h = [scaState[t] * x for t, x in zip(steps, add(*carry), strict=True)]

    # Blocks of the ring from the oldest token on; both halves of a short ring are one block.
    block = min(size, 16)
    first, end = (vecRing[0], vecRing[1]) if size > block else (0, block)

    def values(weights, rows):
        """The ring's values whose weights are not 0."""
        used = outer_mask(weights != 0, in_columns)
        return masked_load(ringV.at[(*row, rows, columns)], used).astype(jnp.float32)

    def rows_at(index):
        return pl.ds((first + index * block) & (size - 1), block)

    def add_values(index, sums):
        rows = rows_at(index)
        w = [vecWeights[t, rows] for t in steps]
        V = values(functools.reduce(jnp.maximum, map(jnp.abs, w)), rows)
        return [x + jnp.sum(y[:, None] * V, axis=0) for x, y in zip(sums, w, strict=True)]

    h = loop(divide(end + block - 1, block), add_values, h)
    for t, x in zip(steps, h, strict=True):
        masked_store(matH.at[(t, columns)], x.astype(matH.dtype), in_columns)

    @pl.when(vecRing[2] != 0)
    def flush():
        decay = scaDecay[...]

        @each(num_blocks)
        def _(ik):
            K_rows, in_rows = masked_block(ik, siz_b_DHQK, DHQK)
            inside = outer_mask(in_rows, in_columns)
            C = masked_load(matC.at[(*row, K_rows, columns)], inside).astype(jnp.float32)

            def add_outer(index, C):
                rows = rows_at(index)
                w = vecFlush[rows]
                K = masked_load(ringK.at[(*row, rows, K_rows)], outer_mask(w != 0, in_rows))
                return C + _product(K, values(w, rows) * w[:, None], call)

            C = loop(max(size // 2 // block, 1), add_outer, decay * C)
            masked_store(matC_new.at[(*row, K_rows, columns)], C.astype(matC_new.dtype), inside)


def _product(K: jax.Array, V: jax.Array, call: Launch) -> jax.Array:
    """K^T V in full float32 accuracy; bfloat16 needs no more than three products."""
    if call.interpret or K.dtype != jnp.bfloat16:
        six = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
        precision = lax.Precision.HIGHEST if call.interpret else six
        return dot(K.astype(jnp.float32), V, precision, a_axis=0)
    high = V.astype(K.dtype)
    V = V - high.astype(jnp.float32)
    middle = V.astype(K.dtype)
    low = (V - middle.astype(jnp.float32)).astype(K.dtype)
    low, middle, high = (dot(K, x, None, a_axis=0) for x in (low, middle, high))
    return low + middle + high


def ring_step(
    x: Operands, *, normaliser: Normaliser | None = DEFAULT_NORMALISER, call: Launch
) -> Ring:
    """Runs the stage: ``stages/ring_step.py``."""
    *heads, T, _ = x.matQ.shape
    DHV, size = x.matV.shape[-1], x.ringI.shape[-1]
    token, states, grid = "b", "b", call.tiles.grid(call.problem)
    if x.slots is not None:  # b is an entry, c a head
        token, states, grid = "bc", "0c", (grid[0], call.problem.NH, call.problem.B)
    vectors = dict.fromkeys(("vecN", "ringI", "ringF"), states + "0")
    matrices = dict.fromkeys(("ringK", "ringV"), states + "00")
    counters = dict.fromkeys(("start", "fill", "pending"), states)
    at = dict(vecN=states + "0", scaM=states) | matrices | vectors | counters
    weights = dict(
        vecWeights=(floats(*heads, T, size), token + "00"),
        scaState=(floats(*heads, T), token + "0"),
        vecFlush=(floats(*heads, size), token + "0"),
        scaDecay=(floats(*heads), token),
        vecRing=(jax.ShapeDtypeStruct((*heads, 4), jnp.int32), token + "0"),
    )
    tokens = dict.fromkeys(("matQ", "matK", "matV"), token + "00")
    present = [name for name in at if getattr(x, name) is not None]
    y = kernel_call(
        _ring_scores_kernel,
        operands(x, **at)
        | operands(x, accepted=token, **tokens, vecI=token + "0", vecF=token + "0")
        | dict(slots=(x.slots, "b")),
        {f"{name}_new": (getattr(x, name), axes) for name, axes in at.items()} | weights,
        grid=grid[1:],
        aliases={j: j for j in range(len(present))},
        call=dataclasses.replace(call, tiles=call.tiles.of_scores),
        normaliser=normaliser,
    )
    after = {name: y[f"{name}_new"] for name in at}
    z = kernel_call(
        _ring_read_kernel,
        dict(matC=(x.matC, states + "00"))
        | {name: (after[name], states + "00") for name in matrices}
        | dict(matQ=(x.matQ, token + "00"))
        | {name: (y[name], axes) for name, (_, axes) in weights.items()}
        | dict(slots=(x.slots, "b")),
        dict(
            matH=(jax.ShapeDtypeStruct((*heads, T, DHV), x.matQ.dtype), token + "00"),
            matC_new=(x.matC, states + "00"),
        ),
        grid=grid,
        aliases={0: 1},
        call=call,
    )
    return Ring(matH=z["matH"], matC=z["matC_new"], **after)


@dataclasses.dataclass(frozen=True)
class Tiles(BaseTiles):
    """A CTA of ring_read has one block of C in use and the next in flight."""

    siz_b_DHQK: int = 16
    siz_b_DHHV: int = 128
    num_warps: int = 1
    score_warps: int = 4  # of ring_scores

    @classmethod
    def plan(cls, p: Problem, dtype: Any, gpu: Gpu, **asked: Any) -> Self:
        return cls()

    def grid(self, p: Problem, **asked: Any) -> tuple[int, ...]:
        return blocks_over(p.DHV, self.siz_b_DHHV), p.BNH

    @property
    def of_scores(self) -> Self:
        return dataclasses.replace(self, num_warps=self.score_warps)

    def clamped(self, p: Problem) -> Self:
        """Tiles no larger than a head; they need not divide it, because heads are not padded."""
        rows = min(self.siz_b_DHQK, at_least_a_tile(p.DHQK))
        columns = min(self.siz_b_DHHV, at_least_a_tile(p.DHV))
        return dataclasses.replace(self, siz_b_DHQK=rows, siz_b_DHHV=columns)
