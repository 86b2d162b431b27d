"""parallel_fw_H on Mosaic GPU: the outputs of ``stages/parallel_fw_H.py``.

Grid (B * NH * NC * L / siz_b_LQ * DHV / siz_b_DHHV). A CTA owns siz_b_LQ queries of a chunk and
siz_b_DHHV columns of h, and each of its warpgroups owns 64 of the queries. A CTA first reads the
state of the chunk, up to 64 rows at a time, and then the keys and values up to its queries, 64
steps at a time. P stays in registers. Keys go through a ring of num_stages slots, rows of the state
and values through another one. h leaves through the shared memory of the queries.

FLOPs: 2 tokens K V + tokens (L + 1) (K DHV / siz_b_DHHV + V), because each column block repeats
q.k. Bytes: q, k, v, h and C, (tokens (2 K + 2 V) + B NH NC K V) itemsize, with repeats from the L2.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Self

from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER, Normaliser, query_scale
from mlstm_pallas.formulas.rows import sequence_shape
from mlstm_pallas.formulas.scores import causal_scores, decays, tile_steps
from mlstm_pallas.formulas.tile_sizes import largest_block
from mlstm_pallas.formulas.tiles import blocks, fori, loop, weighted
from mlstm_pallas.launches.kernel_tiles import KernelSpec
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.mosaic_gpu.common import products
from mlstm_pallas.mosaic_gpu.common.copies import (
    copy_in,
    copy_out,
    head_of,
    ring_barriers,
    write_out,
)
from mlstm_pallas.mosaic_gpu.common.fragments import (
    across_columns,
    load_by_rows,
    q_times_n,
    score_operands,
    tile_iota,
)
from mlstm_pallas.mosaic_gpu.common.launch import (
    BY_COLUMNS,
    BY_ROWS,
    WG_ROWS,
    atom_columns,
    block,
    chunk_and_item,
    float32,
    load,
    mosaic_call,
    plgpu,
    shared_tiles,
    unravel,
)
from mlstm_pallas.mosaic_gpu.common.limits import KERNEL_DTYPE, HopperTiles
from mlstm_pallas.mosaic_gpu.common.phases import Phase, Phases
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages.parallel_fw_H import Operands, Outputs

FEW_CTAS = 528  # four per SM of an H200


def _cta_tile(p: Problem, tiles: "ParallelFwHTiles"):
    """A CTA's column block of h, block of queries in the chunk, head and chunk."""
    index = lax.axis_index("program")
    column_blocks, query_blocks = blocks(p.DHV, tiles.siz_b_DHHV), blocks(p.L, tiles.siz_b_LQ)
    index, column = unravel(index, column_blocks)
    chunks = p.BNH * p.NC
    few = chunks * query_blocks * column_blocks <= FEW_CTAS
    chunk, i = chunk_and_item(index, chunks, query_blocks, few)
    # Blocks with the most keys come first.
    return column, query_blocks - 1 - i, *unravel(chunk, p.NC)


def _add_q_C(acc, q_smem, C_smem, wg, ring, steps):
    """acc += q C; steps(j): the step of the ring with the j-th rows of C."""
    _, parts, _, atom = q_smem.shape

    @fori(parts)
    def add(j):
        (step,), q = steps(j), q_smem.at[wg, j]
        ring.mma(step, lambda slot: products.add(acc, q, C_smem.at[slot, :atom]), follows=j > 0)

    products.wait(0)
    if ring.num_slots > 1:
        ring.advance(*steps(parts - 1))


def _add_q_k(acc, q, k):
    """acc += q k^T."""
    parts, _, atom = q.shape

    def add(x):
        products.add(acc, q.at[x], k.at[:, block(x, atom)].T)

    if parts * atom > 256:  # in a loop, because eight unrolled products spill
        return fori(parts)(add)
    for x in range(parts):
        add(x)


def _store_h(num, buffers, h, rows, column):
    """Stores 64 rows of h, the columns of a swizzle atom at a time, through the buffers in turn."""
    atom = buffers[0].shape[1]
    atoms = num.shape[1] // atom
    for x in range(atoms):
        h_smem = buffers[x % len(buffers)]
        write_out(h_smem, num[:, x * atom : (x + 1) * atom], len(buffers) - 1)
        copy_out(h_smem, h.at[rows, block(column * atoms + x, atom)])
    plgpu.wait_smem_to_gmem(0)


def _kernel(
    matQ,  # (B * NH, S, DHQK) or (B, S, NH, DHQK)
    matK,
    matV,  # (B * NH, S, DHV) or (B, S, NH, DHV)
    matC_states,  # (B * NH, NC, DHQK, DHV)
    vecN_states,  # (B * NH, NC, DHQK), None without a normaliser
    vecE,  # hi and lo, (B * NH, S) each, like u, w and m
    vecU,  # hi and lo
    vecW,
    vecM,  # None if the floor does not need it
    matH,  # output, like v
    vecZ,  # output (B * NH, S), None without a normaliser
    q_smem,  # (warpgroups, DHQK / atom, 64, atom): the columns of a swizzle atom
    k_smem,  # (num_stages, 64, DHQK)
    v_smem,  # (num_stages, 64, siz_b_DHHV): rows of C, then v
    q_full,  # one barrier per warpgroup
    k_barriers,
    v_barriers,
    *,
    p: Problem,
    tiles: "ParallelFwHTiles",
    normaliser: Normaliser | None,
) -> None:
    wg, siz_b_DHHV = lax.axis_index("wg"), tiles.siz_b_DHHV
    warpgroups = tiles.siz_b_LQ // WG_ROWS
    column, i, head, chunk = _cta_tile(p, tiles)
    _, parts, _, atom = q_smem.shape
    num_tiles = (i + 1) * warpgroups
    q, k, v = (head_of(x, head, p) for x in (matQ, matK, matV))

    def rows_of(tile):  # in processing order
        return block(chunk * (p.L // WG_ROWS) + p.memory_index(tile, p.L // WG_ROWS), WG_ROWS)

    def copy_k(j, copy):
        copy(k.at[rows_of(j)], k_smem)

    def copy_C(x, copy):
        C_rows = matC_states.at[head, chunk, block(x, atom), block(column, siz_b_DHHV)]
        copy(C_rows, v_smem, slice(atom))

    def copy_v(j, copy):
        copy(v.at[rows_of(j), block(column, siz_b_DHHV)], v_smem)

    k_phases = Phases(keys=Phase(num_tiles, (copy_k,)))
    v_phases = Phases(state=Phase(parts, (copy_C,)), values=Phase(num_tiles, (copy_v,)))
    k_ring, v_ring = (
        phases.ring(barriers, readers=warpgroups)
        for phases, barriers in ((k_phases, k_barriers), (v_phases, v_barriers))
    )
    k_steps, v_steps = k_phases.of_item(), v_phases.of_item()
    tile = i * warpgroups + wg  # the warpgroup's 64 queries in the chunk, in processing order
    for x in range(parts):
        source = q.at[rows_of(tile), block(x, atom)]
        copy_in(source, q_smem.at[wg, x], q_full.at[wg])
    v_ring.prologue()
    k_ring.prologue()
    rows = rows_of(tile)
    # Loaded before the products and used after them, so that their latency is hidden.
    u = [load_by_rows(x, head, rows) for x in vecU]
    w, m = (load_by_rows(x, head, rows) for x in (vecW, vecM))
    row_scale = query_scale(w, p.qk_scale)

    def join_keys(j, carry):
        """Adds a tile of keys and values to the numerators and to the sums of P."""
        num, z = carry
        keys, (step,) = rows_of(j), k_steps("keys", j)
        e = [load(x.at[head, keys], BY_COLUMNS, optimized=False) for x in vecE]
        slot = k_ring.wait(step)
        S = products.from_zeros(
            lambda acc: _add_q_k(acc, q_smem.at[wg], k_smem.at[slot]), WG_ROWS, WG_ROWS
        )
        k_ring.advance(step)
        t, s = tile_steps(S.shape, rows.start - keys.start, p, tile_iota)
        P = causal_scores(S, decays(e, u), s <= t, p)
        if normaliser is not None:
            z += products.sum_over_columns(P)
        (step_v,) = v_steps("values", j)
        slot_v = v_ring.wait(step_v)

        def add(acc):
            products.add(acc, P.astype(matQ.dtype), v_smem.at[slot_v])
            products.wait(0)

        (num,) = products.onto(add, num)
        v_ring.advance(step_v)
        return num, z

    def skip_keys(x):
        """Skips a tile of keys that only the other warpgroup reads."""
        j = tile + 1 + x
        for ring, (step,) in ((k_ring, k_steps("keys", j)), (v_ring, v_steps("values", j))):
            ring.wait(step)
            ring.advance(step)

    plgpu.barrier_wait(q_full.at[wg])
    z = products.zeros(WG_ROWS, layout=BY_ROWS)
    if normaliser is not None:
        q_n = q_times_n(lambda x: q_smem.at[wg, x], atom, vecN_states, head, chunk)
        z += weighted(row_scale, products.sum_over_columns(q_n), p)
    state = functools.partial(v_steps, "state")
    num = products.from_zeros(
        lambda acc: _add_q_C(acc, q_smem, v_smem, wg, v_ring, state), WG_ROWS, siz_b_DHHV
    )
    num = weighted(across_columns(row_scale, siz_b_DHHV), num, p)
    num, z = loop(tile + 1, join_keys, (num, z))
    fori(num_tiles - tile - 1)(skip_keys)
    if normaliser is not None:
        num *= across_columns(1.0 / normaliser.denominator(z, m), siz_b_DHHV)

        @pl.when(column == 0)
        def _():
            vecZ.at[head, rows][...] = z

    free = [q_smem.at[wg, x] for x in range(parts)]  # no product reads the queries any more
    _store_h(num, free, head_of(matH, head, p), rows, column)
    k_ring.epilogue()
    v_ring.epilogue()


def parallel_fw_H(
    x: Operands,
    *,
    normaliser: Normaliser | None = DEFAULT_NORMALISER,
    call: Launch,
) -> Outputs:
    """Runs the stage: ``stages/parallel_fw_H.py``."""
    p, tiles, dtype = call.problem, call.tiles, x.matQ.dtype
    y = mosaic_call(
        functools.partial(_kernel, p=p, tiles=tiles, normaliser=normaliser),
        name="parallel_fw_H",
        grid={"program": tiles.grid(p)[0]},
        warpgroups=tiles.siz_b_LQ // WG_ROWS,
        outputs={
            "matH": sequence_shape(x.matV, p.DHV, dtype),
            "vecZ": None if normaliser is None else float32(p.BNH, p.S),
        },
        scratch=tiles.scratch(p, dtype),
    )(**score_operands(x, normaliser), matV=x.matV, matC_states=x.matC_states)
    return Outputs(y["matH"], y["vecZ"])


@dataclasses.dataclass(frozen=True)
class ParallelFwHTiles(HopperTiles):
    siz_b_LQ: int
    siz_b_DHHV: int
    num_stages: int

    def grid(self, p: Problem) -> tuple[int, ...]:
        return (p.BNH * p.NC * blocks(p.L, self.siz_b_LQ) * blocks(p.DHV, self.siz_b_DHHV),)

    def scratch(self, p: Problem, dtype) -> dict[str, Any]:
        warpgroups, n, atom = self.siz_b_LQ // WG_ROWS, self.num_stages, atom_columns(p)
        tiles = functools.partial(shared_tiles, dtype=dtype, atom=atom)
        parts = p.DHQK // atom
        return {
            "q_smem": tiles(warpgroups, parts, WG_ROWS, atom),
            "k_smem": tiles(n, WG_ROWS, p.DHQK),
            "v_smem": tiles(n, WG_ROWS, self.siz_b_DHHV),
            "q_full": plgpu.Barrier(num_arrivals=parts, num_barriers=warpgroups),
            "k_barriers": ring_barriers(n, copies=1, readers=warpgroups),
            "v_barriers": ring_barriers(n, copies=1, readers=warpgroups),
        }

    @classmethod
    def candidates(cls, p: Problem, kernel: KernelSpec) -> Iterable[Self]:
        """Tiles with which an SM has room for two CTAs of 64 queries, or else for one of 128.

        With 64 queries, DHQK 256 and 256 columns ptxas spills at least 132 bytes.
        """
        atom = atom_columns(p)
        columns = next((x for x in (256, 128) if p.DHV % x == 0), largest_block(p.DHV, unit=atom))
        few = min(columns, 128)
        two = cls(WG_ROWS, columns, 2)
        if 2 * (two.shared_bytes(p, KERNEL_DTYPE, kernel) + 1024) <= kernel.gpu.sm_shared_bytes:
            yield two
        for sizes in (
            (128, columns, 2),
            (128, columns, 1),
            (WG_ROWS, few, 1),
            (WG_ROWS, atom, 1),
        ):
            yield cls(*sizes)

    def divides(self, p: Problem) -> bool:
        LQ, columns = self.siz_b_LQ, self.siz_b_DHHV
        supported = columns <= 256 and LQ in (WG_ROWS, 2 * WG_ROWS)
        return supported and p.DHV % columns == columns % atom_columns(p) == p.L % LQ == 0
