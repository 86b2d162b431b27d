"""recurrent_fw_H on Mosaic GPU: the fused scan of ``stages/recurrent_fw_H.py``.

Grid (B * NH * DHV / siz_b_DHHV); with a list of chunks (B * NH * num_parts * DHV / siz_b_DHHV),
because its parts run side by side. A CTA has two or three warpgroups. Each owns 64 columns of C and
of h. Its columns of C stay transposed in registers, 64 x state_rows floats, as the left operand of
C^T q. The last CTA's columns may reach beyond a head. Copies run up to num_stages chunks ahead. The
outputs of a chunk are stored while the product of the state runs.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.rows import sequence_shape
from mlstm_pallas.formulas.tile_sizes import largest_block
from mlstm_pallas.formulas.tiles import (
    blocks,
    blocks_over,
    divide,
    fori,
    loop,
    remainder,
    rounded_up,
    weighted,
)
from mlstm_pallas.launches.kernel_tiles import KernelSpec
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.mosaic_gpu.common import products
from mlstm_pallas.mosaic_gpu.common.copies import (
    copy_out,
    head_of,
    load_transposed,
    ring_barriers,
    starts_within,
    store_transposed,
    write_out,
)
from mlstm_pallas.mosaic_gpu.common.fragments import across_rows, load_or_zeros
from mlstm_pallas.mosaic_gpu.common.launch import (
    BY_COLUMNS,
    WG_ROWS,
    atom_columns,
    block,
    float32,
    load,
    load_float32,
    mosaic_call,
    plgpu,
    shared_tiles,
    unravel,
)
from mlstm_pallas.mosaic_gpu.common.limits import HopperTiles, bytes_of
from mlstm_pallas.mosaic_gpu.common.phases import Phase, Phases
from mlstm_pallas.operands.chunk_list import Part, num_parts, state_of
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages.recurrent_fw_H import Operands, Outputs

MOST_ROWS = {128: 320, 192: 128}  # of C, by the columns of a CTA
PIECE = 256  # the most rows of C to which one product adds


class _Operands(NamedTuple):
    """What is copied of every chunk, each to the tile of its name in shared memory."""

    matQ: Any  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    matK: Any
    matV: Any  # (B * NH, S, DHV) or (B, S, NH, DHV)
    partial: Any  # like v: h of the preceding launch, None in the first launch
    matP: Any  # (B * NH, S, L), None after the first launch
    vecR: Any  # (B * NH, S)
    vecAbar: Any  # (B * NH, S)


def _initial(states, state, has_state, rows, columns):
    """The transposed block of the initial state, which is at the place ``state``."""
    if states is None or has_state is True:
        return load_or_zeros(states, (state, columns, rows))
    CT = load_transposed(states.at[state, rows, columns])
    return jnp.where(jnp.broadcast_to(has_state, CT.shape), CT, 0.0)


def _kernel(
    parts,  # of ``ChunkList``, None without a list
    operands,  # _Operands
    scaGamma,  # (B * NH, NC)
    matC_initial,  # (B * NH, DHV, DHQK), with a list (B * N * NH, DHQK, DHV), may be None
    matH,  # output, like v
    matC_last,  # output (B * NH, state_rows, DHV), with a list (B * N * NH, ...), may be None
    matC_states,  # output (B * NH, stored, DHQK, DHV), may be None
    slots,  # by name: the tiles of the chunks in flight in shared memory, (num_stages, ...) each
    barriers,  # of the ring of slots
    h_smem,  # (warpgroups, L, 64)
    C_smem,  # (warpgroups, 2, atom, 64), for C_states
    *,
    p: Problem,
    launch: int,
    tiles: "RecurrentFwHTiles",
    store_every: int,
) -> None:
    index, wg = lax.axis_index("program"), lax.axis_index("wg")
    column_blocks, atom = blocks_over(p.DHV, tiles.siz_b_DHHV), atom_columns(p)
    head, column_block = unravel(index, column_blocks)
    L, rows, siz_b_DHHV, dtype = p.L, tiles.state_rows, tiles.siz_b_DHHV, h_smem.dtype
    in_list = parts is not None
    state_rows, v_columns = pl.ds(launch * rows, rows), block(column_block, siz_b_DHHV)
    # The columns of the warpgroup, in a tile and in the arrays.
    in_tile = block(wg, WG_ROWS)
    columns = pl.ds(v_columns.start + in_tile.start, WG_ROWS)
    within, pending = starts_within((columns, siz_b_DHHV, p.DHV))
    pieces = [(start, min(rows - start, PIECE)) for start in range(0, rows, PIECE)]
    part, state = Part(np.int32(p.NC)), head
    if in_list:
        p, N = parts.problem_of_part(p), parts.N
        head, part_index = unravel(head, num_parts(N))
        part, state = parts.part(part_index, head, p=p), state_of(p, N, head, part_index)
    in_head = functools.partial(head_of, n=head, p=p, any_step=in_list)
    h, h_tile = in_head(matH), h_smem.at[wg]

    def in_sequence(chunk):  # in q, k, v and h
        return pl.ds(part.start_step(chunk, L), L) if in_list else block(chunk, L)

    def h_of(chunk):
        return h.at[in_sequence(chunk), columns]

    columns_of = dict(matQ=state_rows, matK=state_rows, matV=v_columns, partial=v_columns)

    def copy_chunk(chunk, copy):
        for name, x in operands._asdict().items():
            if name in columns_of and x is not None:
                copy(in_head(x).at[in_sequence(chunk), columns_of[name]], slots[name])
            elif x is not None:
                copy(x.at[head, block(part.first_entry + chunk, L)], slots[name])

    phases = Phases(chunks=Phase(part.num_chunks, (copy_chunk,), descending=p.reverse))
    chunk_at, steps = phases["chunks"].nth, phases.of_item()

    def join(index, carry):
        """Stores h of a chunk and C before it, and adds the chunk to C."""
        (CT, gamma), chunk = carry, chunk_at(index)
        pl.when(index > 0)(lambda: ring.refill(*steps("chunks", index - 1)))
        (step,) = steps("chunks", index)
        slot = ring.wait(step)
        smem = {name: x.at[slot] for name, x in slots.items()}
        following = chunk_at(lax.min(index + 1, part.num_chunks - 1))
        next_gamma = scaGamma[head, part.first_entry + following]
        size = part.size(chunk, L) if in_list else None
        r, abar = (across_rows(load(smem[x], BY_COLUMNS)) for x in ("vecR", "vecAbar"))

        def inter(hT_acc):
            for j, start in enumerate(range(0, rows, atom)):
                atom_rows = pl.ds(start, atom)
                in_piece = slice(start % PIECE, start % PIECE + atom)
                CT_tile = CT[start // PIECE][:, in_piece].astype(dtype)
                products.add(hT_acc, CT_tile, smem["matQ"].at[:, atom_rows].T)
                products.wait(1)  # at most two rounded tiles are live
                if matC_states is not None:  # predicated, because a branch costs registers
                    stored = divide(chunk, store_every)
                    states = matC_states.at[head, stored, atom_rows, columns]
                    here, tile = remainder(index, store_every) == 0, C_smem.at[wg, j % 2]
                    write_out(tile.T, CT_tile, pending)
                    copy_out(tile, states, here if within is None else here & within)

        hT = weighted(r, products.from_zeros(inter, WG_ROWS, L), p)
        if operands.partial is not None:
            hT += load_float32(smem["partial"].at[:, in_tile].T)
        vT = load(smem["matV"].at[:, in_tile].T)
        scaled = (vT.astype(jnp.float32) * abar).astype(dtype)

        def intra(hT_acc, *CT_accs):
            if operands.matP is not None:
                products.add(hT_acc, vT, smem["matP"].T)
            for CT_acc, piece in zip(CT_accs, pieces, strict=True):
                products.add(CT_acc, scaled, smem["matK"].at[:, pl.ds(*piece)])
            write_out(h_tile.T, products.read(hT_acc, len(pieces)), 0)
            copy_out(h_tile, h_of(chunk), within, size)

        CT = [*products.onto(intra, hT, *(weighted(gamma, x, p) for x in CT))[1:]]
        ring.release(step)
        return CT, next_gamma

    def store_last():
        for piece, x in zip(pieces, CT, strict=True):
            store_transposed(matC_last.at[state, pl.ds(*piece), columns], x)

    def clear():
        """Stores zeros in chunks of h."""
        write_out(h_tile, products.zeros(*h_tile.shape), 0)
        fori(part.num_zeros)(lambda chunk: copy_out(h_tile, h_of(chunk), within))

    (ring := phases.ring(barriers)).prologue()
    rows_of = (pl.ds(launch * rows + start, size) for start, size in pieces)
    CT = [_initial(matC_initial, state, part.has_state, x, columns) for x in rows_of]
    first = part.first_entry + lax.max(chunk_at(np.int32(0)), np.int32(0))  # there may be no chunks
    CT, _ = loop(part.num_chunks, join, (CT, scaGamma[head, first]))
    if matC_last is not None:
        pl.when(part.has_state)(store_last)
    if in_list:
        pl.when(part.num_zeros > 0)(clear)
    plgpu.wait_smem_to_gmem(0)
    ring.epilogue()


def recurrent_fw_H(
    x: Operands, *, return_last: bool = True, store_every: int = 0, call: Launch
) -> Outputs:
    """Runs the stage: ``stages/recurrent_fw_H.py``."""
    matQ, matV, scores, scaGamma, matC_initial, chunks = x
    p, tiles, dtype, keys = call.problem, call.tiles, matQ.dtype, scores.keys
    N, parts = (1, 1) if chunks is None else (chunks.N, chunks.num_parts)
    C_initial, columns = None, rounded_up(p.DHV, tiles.siz_b_DHHV)
    if matC_initial is not None:
        C_initial = matC_initial.reshape(N * p.BNH, p.DHQK, p.DHV)
        C_initial = jnp.pad(C_initial, [(0, 0), (0, 0), (0, columns - p.DHV)])
        # XLA transposes a few states faster than the kernel reads them, and many more slowly.
        C_initial = C_initial.mT if chunks is None else C_initial
    abar = jnp.ones_like(scores.vecR) if keys.weights is None else keys.weights
    operands = _Operands(matQ, keys.array, matV, None, scores.matP, scores.vecR, abar)
    states = None
    if store_every:
        states = jax.ShapeDtypeStruct((p.BNH, p.NC // store_every, p.DHQK, p.DHV), dtype)
    outputs = {
        "matH": sequence_shape(matV, p.DHV, dtype),
        "matC_last": float32(N * p.BNH, tiles.state_rows, columns) if return_last else None,
        "matC_states": states,
    }
    lasts = []
    for launch in range(blocks(p.DHQK, tiles.state_rows)):
        y = mosaic_call(
            functools.partial(_kernel, p=p, launch=launch, tiles=tiles, store_every=store_every),
            name="recurrent_fw_H",
            grid={"program": parts * math.prod(tiles.grid(p))},
            warpgroups=tiles.warpgroups,
            outputs=outputs,
            scratch=tiles.scratch(
                p,
                dtype,
                adds_to_h=launch > 0,
                stores_states=store_every > 0,
                in_list=chunks is not None,
            ),
        )(
            parts=None if chunks is None else chunks.parts,
            operands=operands,
            scaGamma=scaGamma,
            matC_initial=C_initial,
        )
        operands = operands._replace(partial=y["matH"], matP=None)
        lasts.append(y["matC_last"])
    last = jnp.concatenate(lasts, axis=1)[..., : p.DHV] if return_last else None
    if last is not None and chunks is not None:
        last = last.reshape(p.B, N, p.NH, p.DHQK, p.DHV)
    return Outputs(y["matH"], last, y["matC_states"])


@dataclasses.dataclass(frozen=True)
class RecurrentFwHTiles(HopperTiles):
    """siz_b_L: steps of its chunks; state_rows: rows of C per launch."""

    siz_b_DHHV: int
    state_rows: int
    num_stages: int
    siz_b_L: ClassVar[int] = WG_ROWS  # as in parallel_fw_P
    ctas_per_sm: ClassVar[int] = 1
    least_share: ClassVar[float] = 0.48

    @property
    def warpgroups(self) -> int:
        return self.siz_b_DHHV // WG_ROWS

    def grid(self, p: Problem) -> tuple[int, ...]:
        return p.BNH, blocks_over(p.DHV, self.siz_b_DHHV)

    def shared_bytes(self, p: Problem, dtype, kernel: KernelSpec) -> int:
        """The first launch reads P, and the second one reads h of the first.

        Only a single launch stores states.
        """
        p, one = p.in_chunks_of(self.siz_b_L), self.state_rows == p.DHQK
        of = functools.partial(self.scratch, stores_states=one and kernel.stores_states)
        return max(bytes_of(of(p, dtype, adds_to_h=x)) for x in {False, not one})

    def scratch(
        self, p: Problem, dtype, *, adds_to_h=False, stores_states=True, in_list=False
    ) -> dict[str, Any]:
        """adds_to_h: whether a preceding launch has computed a part of h."""
        vectors, columns, atom = (self.num_stages, p.L), self.siz_b_DHHV, atom_columns(p)
        tiles, readers = functools.partial(shared_tiles, dtype=dtype, atom=atom), self.warpgroups
        widths = dict(matQ=self.state_rows, matK=self.state_rows, matV=columns)
        slots = {x: tiles(*vectors, width) for x, width in widths.items()}
        if adds_to_h:
            slots["partial"] = tiles(*vectors, columns)
        else:
            slots["matP"] = shared_tiles(*vectors, p.L, dtype=dtype)
        slots |= {x: plgpu.SMEM(vectors, jnp.float32) for x in ("vecR", "vecAbar")}
        states = tiles(readers, 2, atom, WG_ROWS)
        return {
            "slots": slots,
            "barriers": ring_barriers(self.num_stages, copies=len(slots), readers=readers),
            # Copies of single rows need tiles that are one swizzle atom wide.
            "h_smem": tiles(readers, p.L, WG_ROWS, atom=WG_ROWS if in_list else atom),
            "C_smem": states if stores_states else None,
        }

    @classmethod
    def candidates(cls, p: Problem, kernel: KernelSpec) -> Iterable[Self]:
        """Three warpgroups instead of two if their blocks reach less far beyond a head."""
        rows = largest_block(p.DHQK, MOST_ROWS[128], atom_columns(p))
        three = rows <= MOST_ROWS[192] and rounded_up(p.DHV, 192) < rounded_up(p.DHV, 128)
        for stages in (3, 2) if p.DHQK <= 128 else (2,):
            yield cls(192 if three else 128, rows, stages)

    def divides(self, p: Problem) -> bool:
        """At most two launches."""
        rows = self.state_rows
        return (
            0 < rows <= MOST_ROWS.get(self.siz_b_DHHV, 0)
            and p.DHQK % rows == rows % atom_columns(p) == 0
            and p.DHV > WG_ROWS
            and p.L >= WG_ROWS
            and 2 * rows >= p.DHQK
        )
