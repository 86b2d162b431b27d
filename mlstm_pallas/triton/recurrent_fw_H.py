"""recurrent_fw_H in Triton.

Grid (DHV / siz_b_DHHV, B * NH); with a list of chunks (DHV / siz_b_DHHV, num_parts, B * NH),
because its parts run side by side. A CTA owns siz_b_DHHV columns of C, in float32 registers, and of
h, and loops over the chunks. The state is kept transposed, as the left operand of C^T q: the next
product reads it from registers, rounded to the kernel dtype, and no state goes through shared
memory. The state is held as tiles of siz_b_DHQK rows, because only one rounded tile fits beside it.
If C has more than state_rows rows, each launch handles up to state_rows of them and adds to the
output of the preceding launch.

The backward pass may need C before every n-th chunk. The kernel then stores it, and the loop over
chunks becomes two nested loops.

No pipelined tile feeds both a product and other arithmetic (see parallel_fw_H).

FLOPs: 4 tokens K V + tokens (L + 1) V. Bytes: q, kbar, v, h and P, tokens (2 K + 2 V + L) itemsize.
Each column block reads q, kbar and P again, mostly from L2, and each further launch moves h twice
more.
"""

import dataclasses
import functools
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.rows import sequence_shape
from mlstm_pallas.formulas.tile_sizes import least_padding
from mlstm_pallas.formulas.tiles import (
    block_at,
    blocks,
    blocks_over,
    dot,
    fori,
    loop,
    pieces,
    weighted,
)
from mlstm_pallas.launches.kernel_tiles import KernelSpec
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.operands.chunk_list import Part, state_of
from mlstm_pallas.problem.dimensions import MIN_TILE, Problem, next_power_of_two
from mlstm_pallas.stages.recurrent_fw_H import Operands, Outputs
from mlstm_pallas.triton.launch import (
    PipelinedTiles,
    floats,
    kernel_call,
    operands,
    stages_that_fit,
    up_to,
)


def _recurrent_fw_H_kernel(
    parts,  # of ``ChunkList``, of the row; absent without a list
    matQ,  # (S, state_rows)
    matKbar,  # (S, state_rows)
    matV,  # (S, siz_b_DHHV)
    matP,  # (S, L), in the first launch
    vecR,  # (S,)
    scaGamma,  # (NC,)
    matC_initial,  # (state_rows, siz_b_DHHV), may be absent
    matH_before,  # (S, siz_b_DHHV) h of the preceding launches, absent in the first
    matH,  # out (S, siz_b_DHHV)
    matC_last,  # out (state_rows, siz_b_DHHV), may be absent
    matC_states,  # out (NC / store_every, state_rows, siz_b_DHHV), absent if store_every is 0
    *,
    call,
    store_every,
):
    p, L, precision = call.problem, call.problem.L, call.precision
    row_tiles = [*pieces(matQ.shape[1], call.tiles.siz_b_DHQK)]
    part = Part(p.NC)

    def steps_of(chunk):
        """The steps of a chunk in q, v and h."""
        return pl.ds(part.start_step(chunk, L), L)

    if parts is not None:
        p, part = parts.problem_of_part(p), parts.part(pl.program_id(1), p=p)
        matQ, matV, matH_before, matH = (
            x if x is None else up_to(part.end, x) for x in (matQ, matV, matH_before, matH)
        )

        @fori(part.num_zeros)
        def _(chunk):
            matH[steps_of(chunk), :] = jnp.zeros((L, matV.shape[1]), matH.dtype)

    first, chunks, has_state = part.first_entry, part.num_chunks, part.has_state

    def entry_of(chunk):
        """The chunk in all other arrays."""
        return block_at(first + chunk, L)

    # The pipeline copies only operands of products. The rest is prefetched one chunk ahead, so that
    # nothing waits for a load. P is prefetched too, because the pipeline would hold several of its
    # tiles, too much shared memory for two CTAs per SM.
    def prefetch(chunk):
        return (
            scaGamma[first + chunk],
            vecR[entry_of(chunk)],
            None if matH_before is None else matH_before[steps_of(chunk), :],
            None if matP is None else matP[entry_of(chunk), :],
        )

    def step(index, carry):
        CT, (gamma, r, partial, P) = carry
        chunk = p.memory_index(index, chunks)
        steps = steps_of(chunk)
        following = prefetch(
            p.memory_index(
                lax.min(index + 1, lax.convert_element_type(chunks - 1, np.int32)), chunks
            )
        )
        v = matV[steps, :]
        hT = jnp.zeros((v.shape[1], L), jnp.float32)
        for tile, block in zip(row_tiles, CT, strict=True):
            hT += dot(block.astype(v.dtype), matQ[steps, tile], precision, b_axis=1)
        hT = weighted(r[None, :], hT, p)
        if P is not None:
            hT += dot(v, P, precision, a_axis=0, b_axis=1)
        if partial is None:
            matH[steps, :] = hT.astype(matH.dtype).T
        else:
            matH[steps, :] = (hT.T + partial.astype(jnp.float32)).astype(matH.dtype)
        CT = tuple(
            weighted(gamma, block, p) + dot(v, matKbar[entry_of(chunk), tile], precision, a_axis=0)
            for tile, block in zip(row_tiles, CT, strict=True)
        )
        return CT, following

    def initial(tile):
        if matC_initial is None:
            return jnp.zeros((matV.shape[1], tile.size), jnp.float32)
        C = matC_initial[tile, :].T
        return C if has_state is True else jnp.where(has_state, C, 0.0)

    def store_and_step(index, carry):
        for tile, block in zip(row_tiles, carry[0], strict=True):
            matC_states[p.memory_index(index, matC_states.shape[0]), tile, :] = block.astype(
                matC_states.dtype
            ).T

        def step_from_store(chunk, carry):
            return step(index * store_every + chunk, carry)

        return loop(store_every, step_from_store, carry)

    beginning = lax.max(p.memory_index(np.int32(0), chunks), np.int32(0))  # there may be no chunks
    carry = tuple(map(initial, row_tiles)), prefetch(beginning)
    iteration = store_and_step if store_every else step
    CT, _ = loop(chunks // store_every if store_every else chunks, iteration, carry)

    if matC_last is not None:

        @pl.when(has_state)
        def _():
            for tile, block in zip(row_tiles, CT, strict=True):
                matC_last[tile, :] = block.T


def recurrent_fw_H(
    x: Operands,
    *,
    return_last: bool = True,
    store_every: int = 0,
    call: Launch,
) -> Outputs:
    """Runs the stage: ``stages/recurrent_fw_H.py``."""
    p, dtype, kbar = call.problem, x.matQ.dtype, x.scores_and_keys.keys.product()
    siz_b, rows = call.tiles.siz_b_DHHV, call.tiles.state_rows
    launches = blocks_over(p.DHQK, rows)
    if store_every and launches > 1:
        raise ValueError(f"recurrent_fw_H stores states of up to {rows} rows, expected {p.DHQK}")
    chunks, C_initial = x.chunks, x.matC_initial
    N, grid = 1, call.tiles.grid(p)
    if chunks is not None:
        N = chunks.N
        grid = grid[0], chunks.num_parts, grid[1]
    if C_initial is not None:
        C_initial = C_initial.reshape(-1, p.DHQK, p.DHV)
    stored = blocks(p.NC, store_every or p.NC)

    def block_indices(k, i, *part_and_head):
        *part, b = part_and_head
        return dict(i=i, k=k, b=b, n=state_of(p, N, b, *part) if part else b)

    y: dict[str, Any] = dict(matH=None)
    lasts = []
    for index in range(launches):
        # h is rounded at most twice, not once per launch, to keep its error bound.
        h_dtype = dtype if index == launches - 1 or launches == 2 else jnp.float32
        launch_rows = min(rows, p.DHQK - index * rows)
        C_last = floats(N * p.BNH, launch_rows, p.DHV) if return_last else None
        y = kernel_call(
            _recurrent_fw_H_kernel,
            operands(chunks, parts="b0")
            | dict(
                matQ=(x.matQ, "bsk"),
                matKbar=(kbar, "bsk"),
                matV=(x.matV, "bsi"),
                matP=(None if index else x.scores_and_keys.matP, "bs0"),
                vecR=(x.scores_and_keys.vecR, "bs"),
                scaGamma=(x.scaGamma, "b0"),
                matC_initial=(C_initial, "nki"),
                matH_before=(y["matH"], "bsi"),
            ),
            dict(
                matH=(sequence_shape(x.matV, p.DHV, h_dtype), "bsi"),
                matC_last=(C_last, "n0i"),
                matC_states=(
                    jax.ShapeDtypeStruct((p.BNH, stored, p.DHQK, p.DHV), dtype)
                    if store_every
                    else None,
                    "b00i",
                ),
            ),
            grid=grid,
            index=functools.partial(block_indices, index),
            sizes=dict(i=siz_b, k=rows),
            call=call,
            store_every=store_every,
        )
        lasts.append(y["matC_last"])
    last = jnp.concatenate(lasts, axis=-2) if return_last else None
    if last is not None and chunks is not None:
        last = last.reshape(p.B, N, p.NH, p.DHQK, p.DHV)
    return Outputs(y["matH"], last, y["matC_states"])


@dataclasses.dataclass(frozen=True)
class RecurrentFwHTiles(PipelinedTiles):
    """siz_b_L: steps of its chunks; state_rows: of C per launch, in tiles of up to siz_b_DHQK."""

    siz_b_L: int
    siz_b_DHQK: int
    siz_b_DHHV: int
    state_rows: int
    num_warps: int
    num_stages: int
    ctas_per_sm: ClassVar[int] = 2
    least_share: ClassVar[float] = 0.6

    def grid(self, p: Problem) -> tuple[int, ...]:
        return blocks_over(p.DHV, self.siz_b_DHHV), p.BNH

    def elements(self, p: Problem) -> tuple[int, int]:
        return self.siz_b_L * (2 * self.state_rows + self.siz_b_DHHV), 0

    def clamped(self, p: Problem) -> Self:
        rows = min(self.state_rows // MIN_TILE * MIN_TILE, p.DHQK)
        siz_b_DHQK = min(self.siz_b_DHQK, next_power_of_two(rows))
        return dataclasses.replace(super().clamped(p), state_rows=rows, siz_b_DHQK=siz_b_DHQK)

    @classmethod
    def plan(cls, p: Problem, dtype: jnp.dtype, kernel: KernelSpec) -> Self:
        """A state of 16384 floats takes half of the registers of a CTA, with two CTAs per SM.

        Hopper reads operands of products from shared memory and has room for 20480. If heads are
        narrow or CTAs would be few, 8192 floats leave room for chunks of 64 steps. float32 also
        has 8192.
        """
        wide, gpu = dtype.itemsize > 2, kernel.gpu
        launches = blocks_over(p.DHQK, 128 if wide else 320 if gpu.hopper else 256)
        rows = min(p.DHQK, blocks_over(p.DHQK, 64 * launches) * 64)
        V = least_padding(64 if wide or rows > 128 or p.DHV <= p.DHQK else 128, p.DHV)
        if rows > 64 and V == 128 and not gpu.filled_by(p.BNH * blocks_over(p.DHV, V), per_sm=2):
            V = 64
        steps = 64 if rows * V <= 8192 and not wide else 32
        if V > 64 and not gpu.multiplies_from_shared:
            steps = 32  # mma has no registers for 64 x 128 of h: 700 bytes spill
        iteration, most = steps * (2 * rows + V) * dtype.itemsize, 2 if wide else 3
        stages = stages_that_fit(gpu, iteration, most=most)
        if stages < 2:
            stages = max(stages_that_fit(gpu, iteration, most=most, ctas_per_sm=1), 1)
        return cls(steps, 64 if wide else 128, V, rows, 4, stages).clamped(p)
