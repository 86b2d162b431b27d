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
from mlstm_pallas.stage import Launch, clamped, steps_like
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs, chunk_sums, with_inner
from mlstm_pallas.stages.split_products import Operands
from mlstm_pallas.tiles import block_at, blocks, divide, dot, loop, remainder
from mlstm_pallas.triton.launch import (
    Operand,
    PipelinedTiles,
    depth_and_stages,
    floats,
    kernel_call,
)

CTAS_PER_SM = 2


def _recurrence_kernel(
    a_gmem,  # (S, siz_b_DHQK)
    b_gmem,  # (S, siz_b_DHHV)
    r_gmem,  # (S,), absent if a is scaled
    gamma_gmem,  # (NC,)
    X_initial_gmem,  # (siz_b_DHQK, siz_b_DHHV), may be absent
    x_initial_gmem,  # (siz_b_DHQK,), may be absent
    X_gmem,  # out (NC, siz_b_DHQK, siz_b_DHHV)
    X_last_gmem,  # out (siz_b_DHQK, siz_b_DHHV), may be absent
    x_gmem,  # out (NC, siz_b_DHQK), absent without x_initial
    x_last_gmem,  # out (siz_b_DHQK,), absent without x_initial
    *,
    call,
    backward,
):
    num_chunks, siz_b_L = gamma_gmem.shape[0], call.tiles.siz_b_LKV
    num_tiles = blocks(call.problem.L, siz_b_L)
    owns_x = pl.program_id(0) == 0

    def step(index, carry):
        XT, x = carry
        chunk = num_chunks - 1 - index if backward else index
        X_gmem[chunk, :, :] = XT.astype(X_gmem.dtype).T
        if x_initial_gmem is not None:

            @pl.when(owns_x)
            def _():
                x_gmem[chunk, :] = x

        def add(tile, carry):
            XT, x = carry
            steps = block_at(chunk * num_tiles + tile, siz_b_L)
            a = a_gmem[steps, :]
            if r_gmem is not None:
                scaled = a.astype(jnp.float32) * r_gmem[steps][:, None]
                a, x = scaled.astype(a.dtype), None if x is None else x + jnp.sum(scaled, axis=0)
            return XT + dot(b_gmem[steps, :], a, call.precision, a_axis=0), x

        gamma = gamma_gmem[chunk]
        return loop(num_tiles, add, (XT * gamma, None if x is None else x * gamma))

    x = None if x_initial_gmem is None else x_initial_gmem[...]
    if X_initial_gmem is None:
        XT = jnp.zeros((b_gmem.shape[1], a_gmem.shape[1]), jnp.float32)
    else:
        XT = X_initial_gmem[...].T
    XT, x = loop(num_chunks, step, (XT, x))
    if X_last_gmem is not None:
        X_last_gmem[...] = XT.T
    if x_initial_gmem is not None:

        @pl.when(owns_x)
        def _():
            x_last_gmem[...] = x


def _recurrences_kernel(*, call, backward, heads, **refs):
    """refs: by field, one per recurrence; backward: one flag per recurrence."""
    current = divide(pl.program_id(2), heads)
    for index, of_one in enumerate(backward):
        refs_of_one = {name: of_each[index] for name, of_each in refs.items()}
        run = functools.partial(_recurrence_kernel, **refs_of_one, call=call, backward=of_one)
        if len(backward) == 1:
            run()
        else:
            pl.when(current == index)(run)


def _launch(
    name: str,
    each: Sequence[Recurrence],
    call: Launch,
    selected: tuple[range, int] | None = None,
) -> list[RecurrenceOutputs]:
    """One launch of the kernel. selected: (a range, n) runs only these heads of every n."""
    p = call.problem
    these, of_each = selected or (range(1), 1)
    heads = p.BNH // of_each * len(these)

    def output_head(iv, ik, n):
        return n if len(each) == 1 else remainder(n, heads)

    def head(*grid):
        n = output_head(*grid)
        if selected is None:
            return n
        return divide(n, len(these)) * of_each + remainder(n, len(these)) + these.start

    shapes = [
        RecurrenceOutputs(
            X=jax.ShapeDtypeStruct((heads, p.NC, p.DHQK, p.DHHV), x.a.dtype),
            X_last=floats(heads, p.DHQK, p.DHHV) if x.return_last else None,
            x=None if x.x_initial is None else floats(heads, p.NC, p.DHQK),
            x_last=None if x.x_initial is None else floats(heads, p.DHQK),
        )
        for x in each
    ]

    def operands(of: Sequence[Any], **axes: str) -> dict[str, Operand]:
        return {f"{y}_gmem": ([getattr(x, y) for x in of], at) for y, at in axes.items()}

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
        ),
        operands(shapes, X="o0kv", X_last="okv", x="o0k", x_last="ok"),
        name=name,
        grid=(*call.tiles.grid(p)[:2], len(each) * heads),
        axes="vkn",
        sizes=dict(k=call.tiles.siz_b_DHQK, v=call.tiles.siz_b_DHHV),
        indices=dict(h=head, o=output_head),
        call=call,
        backward=tuple(x.backward for x in each),
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
    first, end = (0, num_splits) if all_splits else (backward, num_splits - 1 + backward)
    (outputs,) = _launch("split_products", [whole], call, (range(first, end), num_splits))
    return heads_of_splits(outputs.X_last, end - first)


def recurrences(name: str, *each: Recurrence, call: Launch) -> list[RecurrenceOutputs]:
    """As ``recurrences`` of stages/recurrence.py, in one launch; inner products by XLA."""
    launch = _launch if call.tiles.num_splits == 1 else _launch_in_splits
    outputs = launch(name, each, call)
    return [with_inner(x, y, call) for x, y in zip(each, outputs, strict=True)]


def _launch_in_splits(
    name: str, each: Sequence[Recurrence], call: Launch
) -> list[RecurrenceOutputs]:
    num_splits = call.tiles.num_splits
    parts, vectors = zip(*(_in_splits(x, num_splits, call) for x in each), strict=True)
    split_call = dataclasses.replace(call, problem=call.problem.split(num_splits))
    results = []
    for x, y, of_x in zip(each, _launch(name, parts, split_call), vectors, strict=True):
        X, X_last = heads_of_splits(y.X, num_splits), y.X_last
        if X_last is not None:
            X_last = heads_of_splits(X_last, num_splits)[:, 0 if x.backward else -1]
        results.append(RecurrenceOutputs(X.reshape(X.shape[0], -1, *X.shape[3:]), X_last, *of_x))
    return results


def _in_splits(x: Recurrence, num_splits: int, call: Launch) -> tuple[Recurrence, tuple[Any, Any]]:
    """The recurrence on splits, from the states before them; then x and x_last, if it has x."""
    vectors: tuple[Any, Any] = (None, None)
    if x.r is not None:
        scaled = x.a.astype(jnp.float32) * steps_like(x.r, x.a)
        if x.x_initial is not None:
            vectors = vector_states(
                chunk_sums(scaled, call), x.gamma, x.x_initial, backward=x.backward
            )
        x = dataclasses.replace(x, a=scaled.astype(x.a.dtype), r=None, x_initial=None)
    S = call.problem.S
    decays = decays_in_splits(x.gamma, num_splits, S, backward=x.backward)
    operands = Operands(x.a, x.b, decays)
    products = split_products(operands, num_splits=num_splits, backward=x.backward, call=call)
    states = split_states(products, x.gamma, x.X_initial, backward=x.backward)
    a, b, gamma = (splits_as_heads(y, num_splits, S) for y in (x.a, x.b, x.gamma))
    return dataclasses.replace(x, a=a, b=b, gamma=gamma, X_initial=states), vectors


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
