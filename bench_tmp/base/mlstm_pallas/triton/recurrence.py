"""The recurrence over chunks in Triton, for recurrent_fw_C and recurrent_bw_dC.

Grid (DHHV / siz_b_DHHV, DHQK / siz_b_DHQK, B * NH), times the number of recurrences in the launch.
A CTA owns a siz_b_DHQK x siz_b_DHHV block of X, in float32 registers, and loops over the sequence
in tiles of siz_b_LKV steps. At each chunk boundary it stores the block in the kernel dtype. Within
a chunk no sum is read before the last tile. The CTAs of the first column block own x.

The block is kept transposed, so that a is the right operand: a scaled a goes from registers to
shared memory row by row. b is read transposed from where the copy put it.

If this makes too few CTAs for a GPU, the sequence is cut into num_splits parts, which count as
heads. The states before them follow from what each part adds (splits.py). The same kernel computes
that, with each split as one chunk.

FLOPs: 2 tokens K V. Bytes: a and b once for each column and row block (the repeats mostly from L2),
the states once: (tokens (K + V) + B NH NC K V) itemsize.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from mlstm_pallas.gates import vector_states
from mlstm_pallas.gpu import Gpu
from mlstm_pallas.problem import Problem
from mlstm_pallas.splits import (
    decays_in_splits,
    heads_of_splits,
    split_states,
    splits_as_heads,
    splits_of,
)
from mlstm_pallas.stage import Launch, clamped
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs
from mlstm_pallas.stages.split_products import Operands
from mlstm_pallas.stages.step_sums import Operands as StepSums
from mlstm_pallas.tiles import block_at, blocks, divide, dot, loop, remainder
from mlstm_pallas.triton import step_sums
from mlstm_pallas.triton.launch import (
    Operand,
    PipelinedTiles,
    depth_and_stages,
    floats,
    kernel_call,
)

CTAS_PER_SM = 2


def _recurrence_kernel(
    a,  # (S, siz_b_DHQK), S and NC of a split, which is one chunk in split_products
    b,  # (S, siz_b_DHHV)
    r,  # (S,), absent if a is scaled
    gamma,  # (NC,)
    X_initial,  # (siz_b_DHQK, siz_b_DHHV), may be absent
    x_initial,  # (siz_b_DHQK,), may be absent
    num_live,  # () the chunks that are computed, may be absent
    X,  # out (NC, siz_b_DHQK, siz_b_DHHV)
    X_last,  # out (siz_b_DHQK, siz_b_DHHV), may be absent
    x,  # out (NC, siz_b_DHQK), absent without x_initial
    x_last,  # out (siz_b_DHQK,), absent without x_initial
    *,
    call,
    backward,
):
    num_chunks, siz_b_L = gamma.shape[0], call.tiles.siz_b_LKV
    if num_live is not None:
        num_chunks = num_live[...]
    num_tiles = blocks(call.problem.L, siz_b_L)
    owns_x = pl.program_id(0) == 0

    def step(index, carry):
        XT, vector = carry
        chunk = num_chunks - 1 - index if backward else index
        X[chunk, :, :] = XT.astype(X.dtype).T
        if vector is not None:

            @pl.when(owns_x)
            def _():
                x[chunk, :] = vector

        def add(tile, carry):
            XT, vector = carry
            steps = block_at(chunk * num_tiles + tile, siz_b_L)
            rows = a[steps, :]
            if r is not None:
                scaled = rows.astype(jnp.float32) * r[steps][:, None]
                rows = scaled.astype(rows.dtype)
                vector = None if vector is None else vector + jnp.sum(scaled, axis=0)
            return XT + dot(b[steps, :], rows, call.precision, a_axis=0), vector

        decay = gamma[chunk]
        return loop(num_tiles, add, (XT * decay, None if vector is None else vector * decay))

    vector = None if x_initial is None else x_initial[...]
    zeros = jnp.zeros((b.shape[1], a.shape[1]), jnp.float32)
    initial = zeros if X_initial is None else X_initial[...].T
    XT, vector = loop(num_chunks, step, (initial, vector))
    if X_last is not None:
        X_last[...] = XT.T
    if vector is not None:

        @pl.when(owns_x)
        def _():
            x_last[...] = vector


def _recurrences_kernel(*, call, backward, heads, **refs):
    """refs: by field, one per recurrence; backward: one flag per recurrence."""
    current = divide(pl.program_id(2), heads)
    for index, flag in enumerate(backward):
        fields = {name: per_recurrence[index] for name, per_recurrence in refs.items()}
        run = functools.partial(_recurrence_kernel, **fields, call=call, backward=flag)
        if len(backward) == 1:
            run()
        else:
            pl.when(current == index)(run)


def _launch(
    name: str,
    each: Sequence[Recurrence],
    call: Launch,
    splits: range = range(1),
    num_splits: int = 1,
) -> list[RecurrenceOutputs]:
    """One launch of the kernel, for these splits of every ``num_splits`` heads."""
    p = call.problem
    heads = p.BNH // num_splits * len(splits)

    def output_head(iv, ik, n):
        return n if len(each) == 1 else remainder(n, heads)

    def head(*grid):
        n = output_head(*grid)
        if num_splits == 1:
            return n
        return divide(n, len(splits)) * num_splits + remainder(n, len(splits)) + splits.start

    shapes = [
        RecurrenceOutputs(
            X=jax.ShapeDtypeStruct((heads, p.NC, p.DHQK, p.DHHV), x.a.dtype),
            X_last=floats(heads, p.DHQK, p.DHHV) if x.return_last else None,
            x=None if x.x_initial is None else floats(heads, p.NC, p.DHQK),
            x_last=None if x.x_initial is None else floats(heads, p.DHQK),
        )
        for x in each
    ]

    def operands(source: Sequence[Any], **axes: str) -> dict[str, Operand]:
        return {name: ([getattr(x, name) for x in source], at) for name, at in axes.items()}

    y = kernel_call(
        _recurrences_kernel,
        operands(
            each,
            a="hsk",
            b="hsv",
            r="hs",
            gamma="h0",
            X_initial="hkv",
            x_initial="hk",
            num_live="h",
        ),
        operands(shapes, X="o0kv", X_last="okv", x="o0k", x_last="ok"),
        name=name,
        grid=(*call.tiles.grid(p)[:2], len(each) * heads),
        axes="vkn",
        sizes=dict(k=call.tiles.siz_b_DHQK, v=call.tiles.siz_b_DHHV),
        indices=dict(h=head, o=output_head),
        call=call,
        backward=[x.backward for x in each],
        heads=heads,
    )
    return [RecurrenceOutputs(*outputs) for outputs in zip(*y.values(), strict=True)]


def split_products(
    x: Operands,
    *,
    num_splits: int,
    backward: bool = False,
    all_splits: bool = False,
    call: Launch,
) -> Array:
    """Runs the stage: ``stages/split_products.py``."""
    a, b, r = (splits_as_heads(y, num_splits, call.problem.S) for y in x)
    p = call.problem.split(num_splits).in_splits(1)
    call = dataclasses.replace(call, problem=p)
    whole = Recurrence(a, b, jnp.ones((p.BNH, 1), jnp.float32), None, return_last=True, r=r)
    splits = range(num_splits) if all_splits else range(backward, num_splits - 1 + backward)
    (outputs,) = _launch("split_products", [whole], call, splits, num_splits)
    return heads_of_splits(outputs.X_last, len(splits))


def recurrences(name: str, *each: Recurrence, call: Launch) -> list[RecurrenceOutputs]:
    """``recurrences`` of stages/recurrence.py, without inner products.

    One launch has all of them. With splits, one launch per recurrence before it computes what the
    splits add, and n has kernels of its own. Without splits, a recurrence with x scales a in the
    kernel; any other gets a scaled.
    """
    num_splits, p = call.tiles.num_splits, call.problem
    if num_splits == 1:
        return _launch(name, [x.scaled() if x.x_initial is None else x for x in each], call)
    parts = [_in_splits(x, num_splits, call) for x in each]
    results = _launch(name, parts, dataclasses.replace(call, problem=p.split(num_splits)))
    for index, (x, y) in enumerate(zip(each, results, strict=True)):
        X, X_last = y.X.reshape(p.BNH, p.NC, p.DHQK, p.DHHV), y.X_last
        if X_last is not None:
            X_last = heads_of_splits(X_last, num_splits)[:, 0 if x.backward else -1]
        vectors: tuple[Any, Any] = (None, None)
        if x.r is not None and x.x_initial is not None:
            added = _sums(x.a, x.r, call)
            vectors = vector_states(added, x.gamma, x.x_initial, backward=x.backward)
        results[index] = RecurrenceOutputs(X, X_last, *vectors)
    return results


def _sums(a: Array, r: Array, call: Launch) -> Array:
    """sum_t r_t a_t of each chunk, (B * NH, NC, DHQK), in tiles of up to 64 x 64."""
    p, tiles = call.problem, step_sums.Tiles(clamped(64, call.problem.DHQK), num_warps=4)
    call = dataclasses.replace(call, problem=p.in_chunks_of(64), tiles=tiles)
    sums = step_sums.step_sums(StepSums(a, r), call=call)
    return jnp.sum(sums.reshape(p.BNH, p.NC, -1, p.DHQK), axis=2)


def _in_splits(x: Recurrence, num_splits: int, call: Launch) -> Recurrence:
    """The recurrence of C on splits, from the states before them."""
    x, S = x.scaled(), call.problem.S
    decays = decays_in_splits(x.gamma, num_splits, S, backward=x.backward)
    operands = Operands(x.a, x.b, decays)
    products = split_products(operands, num_splits=num_splits, backward=x.backward, call=call)
    states = split_states(products, x.gamma, x.X_initial, backward=x.backward)
    a, b, gamma = (splits_as_heads(y, num_splits, S) for y in (x.a, x.b, x.gamma))
    return dataclasses.replace(x, a=a, b=b, gamma=gamma, X_initial=states, num_live=None)


@dataclasses.dataclass(frozen=True)
class Tiles(PipelinedTiles):
    siz_b_LKV: int
    siz_b_DHQK: int
    siz_b_DHHV: int
    num_warps: int
    num_stages: int
    num_splits: int = 1

    def grid(self, p: Problem, *, recurrences: int = 1, **asked: Any) -> tuple[int, ...]:
        columns, rows = blocks(p.DHHV, self.siz_b_DHHV), blocks(p.DHQK, self.siz_b_DHQK)
        return columns, rows, recurrences * p.BNH

    def elements(self, p: Problem) -> tuple[int, int]:
        return self.siz_b_LKV * (self.siz_b_DHQK + self.siz_b_DHHV), 0

    def clamped(self, p: Problem) -> Self:
        """Allows only splits of whole chunks."""
        return dataclasses.replace(
            super().clamped(p), num_splits=min(self.num_splits, p.NC & -p.NC)
        )

    @classmethod
    def plan(
        cls, p: Problem, dtype: jnp.dtype, gpu: Gpu, *, recurrences: int = 1, **asked: Any
    ) -> Self:
        """Blocks of 128 x 128, the most that registers hold for two CTAs per SM.

        They are halved where CTAs are few. If that is not enough the sequence is split.
        """
        K, V = (clamped(64 if dtype.itemsize > 2 else 128, size) for size in (p.DHQK, p.DHHV))

        def ctas():
            return recurrences * p.BNH * (p.DHQK // K) * (p.DHHV // V)

        while max(K, V) > 64 and not gpu.filled_by(ctas(), CTAS_PER_SM):
            K, V = (K, V // 2) if V >= K else (K // 2, V)
        # The pipeline copies one operand; the other one passes through registers.
        steps, stages = depth_and_stages(gpu, max(K, V), clamped(64, p.L), dtype)
        splits = splits_of(p.NC, CTAS_PER_SM * gpu.sms // max(ctas(), 1))
        return cls(steps, K, V, num_warps=4, num_stages=stages, num_splits=splits)
