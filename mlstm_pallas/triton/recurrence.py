"""The recurrence over chunks in Triton, for recurrent_fw_C and recurrent_bw_dC.

Grid (DHV / siz_b_DHHV, DHQK / siz_b_DHQK, B * NH), times the number of recurrences in the launch.
A CTA owns a siz_b_DHQK x siz_b_DHHV block of X, in float32 registers, and loops over the sequence
in tiles of siz_b_L steps. At each chunk boundary it stores the block in the kernel dtype. Within
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
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.splits import (
    decays_in_splits,
    group_splits,
    split_states,
    splits_as_heads,
    splits_of,
)
from mlstm_pallas.formulas.tile_sizes import dividing, least_padding
from mlstm_pallas.formulas.tiles import (
    block_at,
    blocks,
    blocks_over,
    divide,
    dot,
    loop,
    remainder,
    weighted,
)
from mlstm_pallas.launches.kernel_tiles import KernelSpec
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages import recurrent_bw_dC as dC
from mlstm_pallas.stages import recurrent_fw_C as fw_C
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs
from mlstm_pallas.stages.split_products import Operands
from mlstm_pallas.stages.step_sums import Operands as StepSums
from mlstm_pallas.stages.vector_states import Operands as VectorStates
from mlstm_pallas.stages.vector_states import vector_states
from mlstm_pallas.triton import step_sums
from mlstm_pallas.triton.launch import PipelinedTiles, depth_and_stages, floats, kernel_call

CTAS_PER_SM = 2


def _recurrence_kernel(
    a,  # (S, siz_b_DHQK), S and NC of a split, which is one chunk in split_products
    b,  # (S, siz_b_DHHV)
    r,  # (S,), absent if a is scaled
    gamma,  # (NC,)
    matX_initial,  # (siz_b_DHQK, siz_b_DHHV), may be absent
    vecX_initial,  # (siz_b_DHQK,), may be absent
    num_active,  # () the chunks that are computed, may be absent
    matX,  # out (NC, siz_b_DHQK, siz_b_DHHV)
    matX_last,  # out (siz_b_DHQK, siz_b_DHHV), may be absent
    vecX,  # out (NC, siz_b_DHQK), absent without vecX_initial
    vecX_last,  # out (siz_b_DHQK,), absent without vecX_initial
    backward,
    *,
    call,
):
    num_chunks, siz_b_L = gamma.shape[0], call.tiles.siz_b_L
    if num_active is not None:
        num_chunks = num_active[...]
    num_tiles = blocks(call.problem.L, siz_b_L)
    owns_vector = pl.program_id(0) == 0

    def store(ref, at, vectors):
        if vectors:

            @pl.when(owns_vector)
            def _():
                (ref[at],) = vectors

    def step(index, carry):
        XT, vectors = carry
        chunk = num_chunks - 1 - index if backward else index
        matX[chunk, :, :] = XT.astype(matX.dtype).T
        store(vecX, chunk, vectors)

        def add(tile, carry):
            XT, vectors = carry
            steps = block_at(chunk * num_tiles + tile, siz_b_L)
            rows = a[steps, :]
            if r is not None:
                scaled = rows.astype(jnp.float32) * r[steps][:, None]
                rows = scaled.astype(rows.dtype)
                vectors = [vector + jnp.sum(scaled, axis=0) for vector in vectors]
            return XT + dot(b[steps, :], rows, call.precision, a_axis=0), vectors

        decay = gamma[chunk]
        decayed = functools.partial(weighted, decay, p=call.problem)
        return loop(num_tiles, add, (decayed(XT), [*map(decayed, vectors)]))

    vectors = [] if vecX_initial is None else [vecX_initial[...]]
    zeros = jnp.zeros((b.shape[1], a.shape[1]), jnp.float32)
    initial = zeros if matX_initial is None else matX_initial[...].T
    XT, vectors = loop(num_chunks, step, (initial, vectors))
    if matX_last is not None:
        matX_last[...] = XT.T
    store(vecX_last, ..., vectors)


def _recurrences_kernel(*, call, heads, **fields):
    """fields: the arguments of ``_recurrence_kernel``, one per recurrence each."""
    current, each = divide(pl.program_id(2), heads), [*zip(*fields.values(), strict=True)]
    for index, arguments in enumerate(each):
        run = functools.partial(_recurrence_kernel, *arguments, call=call)
        if len(each) == 1:
            run()
        else:
            pl.when(current == index)(run)


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
    tiles = dataclasses.replace(call.tiles, num_splits=num_splits)
    undecayed = Recurrence(a, b, jnp.ones((p.BNH, 1), jnp.float32), None, return_last=True, r=r)
    splits = range(num_splits) if all_splits else range(backward, num_splits - 1 + backward)
    call = dataclasses.replace(call, problem=p, tiles=tiles)
    (outputs,) = recurrences("split_products", undecayed, call=call, splits=splits)
    return group_splits(outputs.matX_last, len(splits))


def recurrences(
    name: str, *each: Recurrence, call: Launch, splits: range | None = None
) -> list[RecurrenceOutputs]:
    """Runs recurrences of stages/recurrence.py, without inner products.

    One launch has all of them. With splits, one launch per recurrence before it computes what the
    splits add, and n has kernels of its own. Without splits, a recurrence with x scales a in the
    kernel; any other gets a scaled.

    splits: the call's heads are splits, of which the launch computes these of every num_splits.
    """
    num_splits, of_sequences, count = call.tiles.num_splits, call, len(each)
    in_splits = splits is None and num_splits > 1
    if in_splits:
        parts = [_in_splits(x, of_sequences) for x in each]
        call = dataclasses.replace(of_sequences, problem=of_sequences.problem.split(num_splits))
    else:
        parts = [x.scaled() if x.vecX_initial is None and splits is None else x for x in each]
    p, splits = call.problem, splits or range(num_splits)
    n = len(splits)
    heads = p.BNH // num_splits * n

    def index(v, k, head):
        o = head if count == 1 else remainder(head, heads)
        first = divide(o, n) * num_splits + splits.start
        return dict(v=v, k=k, o=o, h=first + remainder(o, n))

    axes = dict(
        a="hsk", b="hsv", r="hs", gamma="h0", matX_initial="hkv", vecX_initial="hk", num_active="h"
    )
    matX = jax.ShapeDtypeStruct((heads, p.NC, p.DHQK, p.DHV), parts[0].a.dtype)
    has_vector = parts[0].vecX_initial is not None
    matX_last = [floats(heads, p.DHQK, p.DHV) if x.return_last else None for x in parts]
    y = kernel_call(
        _recurrences_kernel,
        {field: ([getattr(x, field) for x in parts], at) for field, at in axes.items()},
        dict(
            matX=([matX] * count, "o0kv"),
            matX_last=(matX_last, "okv"),
            vecX=([floats(heads, p.NC, p.DHQK) if has_vector else None] * count, "o0k"),
            vecX_last=([floats(heads, p.DHQK) if has_vector else None] * count, "ok"),
        ),
        name=name,
        grid=(*call.tiles.grid(p)[:2], count * heads),
        index=index,
        sizes=dict(k=call.tiles.siz_b_DHQK, v=call.tiles.siz_b_DHHV),
        call=call,
        backward=[x.backward for x in parts],
        heads=heads,
    )
    outputs = [RecurrenceOutputs(*x) for x in zip(*y.values(), strict=True)]
    if in_splits:
        return [_join_splits(x, y, of_sequences) for x, y in zip(each, outputs, strict=True)]
    return outputs


def recurrent_fw_C(x: fw_C.Operands, *, return_last: bool = True, call: Launch) -> fw_C.ChunkStates:
    """Runs the stage: ``stages/recurrent_fw_C.py``."""
    recurrence = fw_C.recurrence(x, return_last, call)
    (outputs,) = recurrences("recurrent_fw_C", recurrence, call=call)
    return fw_C.chunk_states(outputs)


def recurrent_bw_dC(
    x: dC.Operands, *, return_initial: bool = True, return_last: bool = True, call: Launch
) -> dC.StateGradients:
    """Runs the stage: ``stages/recurrent_bw_dC.py``."""
    each = dC.recurrences(x, return_initial, return_last, call)
    return dC.state_gradients(x, recurrences("recurrent_bw_dC", *each, call=call), call)


def _in_splits(x: Recurrence, call: Launch) -> Recurrence:
    """The recurrence of C on splits, from the states before them."""
    x, S, num_splits = x.scaled(), call.problem.S, call.tiles.num_splits
    decays = decays_in_splits(x.gamma, num_splits, S, backward=x.backward)
    operands = Operands(x.a, x.b, decays)
    products = split_products(operands, num_splits=num_splits, backward=x.backward, call=call)
    states = split_states(products, x.gamma, x.matX_initial, backward=x.backward)
    a, b, gamma = (splits_as_heads(y, num_splits, S) for y in (x.a, x.b, x.gamma))
    return dataclasses.replace(x, a=a, b=b, gamma=gamma, matX_initial=states, num_active=None)


def _join_splits(x: Recurrence, y: RecurrenceOutputs, call: Launch) -> RecurrenceOutputs:
    """The outputs of whole heads, from those of splits; x is computed here."""
    p = call.problem
    matX, matX_last = y.matX.reshape(p.BNH, p.NC, p.DHQK, p.DHV), y.matX_last
    if matX_last is not None:
        matX_last = group_splits(matX_last, call.tiles.num_splits)[:, 0 if x.backward else -1]
    vectors: tuple[Any, Any] = (None, None)
    if x.r is not None and x.vecX_initial is not None:
        tiles = step_sums.StepSumsTiles(64, num_warps=4)
        call = dataclasses.replace(call, problem=p.in_chunks_of(64), tiles=tiles)
        sums = step_sums.step_sums(StepSums(x.a, x.r), call=call)
        added = jnp.sum(sums.reshape(p.BNH, p.NC, -1, p.DHQK), axis=2)
        n = VectorStates(added, x.gamma, x.vecX_initial)
        vectors = vector_states(n, backward=x.backward, call=call)
    return RecurrenceOutputs(matX, matX_last, *vectors)


@dataclasses.dataclass(frozen=True)
class RecurrenceTiles(PipelinedTiles):
    siz_b_L: int
    siz_b_DHQK: int
    siz_b_DHHV: int
    num_warps: int
    num_stages: int
    num_splits: int = 1

    def grid(self, p: Problem) -> tuple[int, ...]:
        columns, rows = blocks_over(p.DHV, self.siz_b_DHHV), blocks_over(p.DHQK, self.siz_b_DHQK)
        return columns, rows, p.BNH

    def elements(self, p: Problem) -> tuple[int, int]:
        return self.siz_b_L * (self.siz_b_DHQK + self.siz_b_DHHV), 0

    def clamped(self, p: Problem) -> Self:
        """Allows only splits of whole chunks."""
        return dataclasses.replace(
            super().clamped(p), num_splits=min(self.num_splits, p.NC & -p.NC)
        )

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, kernel: KernelSpec) -> Self:
        """Blocks of 128 x 128, the most that registers hold for two CTAs per SM.

        They are halved where CTAs are few. If that is not enough the sequence is split.
        """
        K, V = (least_padding(64 if dtype.itemsize > 2 else 128, size) for size in (p.DHQK, p.DHV))

        def ctas():
            return kernel.recurrences * p.BNH * blocks_over(p.DHQK, K) * blocks_over(p.DHV, V)

        while max(K, V) > 64 and not kernel.gpu.filled_by(ctas(), CTAS_PER_SM):
            K, V = (K, V // 2) if V >= K else (K // 2, V)
        # The pipeline copies one operand; the other one passes through registers.
        steps, stages = depth_and_stages(kernel.gpu, max(K, V), dividing(64, p.L), dtype)
        splits = splits_of(p.NC, CTAS_PER_SM * kernel.gpu.sms // max(ctas(), 1))
        return cls(steps, K, V, num_warps=4, num_stages=stages, num_splits=splits)
