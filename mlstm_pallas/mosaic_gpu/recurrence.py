"""The recurrences of ``stages/recurrence.py`` on Mosaic GPU.

Grid (B * NH times the number of recurrences and of splits, DHQK / rows, DHV / columns). A CTA owns
up to 256 rows and 64, 128 or 192 columns of X. It has one warpgroup per 64 columns, which keeps
them transposed in registers. The last block of an axis may reach beyond X. The warpgroups share the
copying, num_stages tiles of 64 steps ahead.

If that makes too few CTAs, the sequence is cut into splits. A preceding launch of the same kernel
computes each split's contribution to X and stores no per-chunk states (splits.py).

With r the left operand of the transposed product is r b, scaled in registers, because (r b)^T a =
b^T (r a) and a tile of b has only 64 columns per warpgroup. The operand of a step is computed while
the product of the preceding step runs.

A recurrence with an h also computes the inner products b_t . h_t, 64 columns per warpgroup: while
the product of a step runs, the warpgroup multiplies its tile of b with the tile of h. The CTAs of
the first row block do this. The tiles of h have a ring of their own.

A recurrence with an x also sums r_t a_t while products run. The CTAs of the first column block do
this, each warpgroup for up to 64 columns of a.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.splits import group_splits, split_states, splits_of
from mlstm_pallas.formulas.tile_sizes import largest_block
from mlstm_pallas.formulas.tiles import blocks_over, loop, remainder, rounded_up, weighted
from mlstm_pallas.launches.kernel_tiles import KernelSpec
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.mosaic_gpu.chunk_gradients import ChunkGradientsTiles
from mlstm_pallas.mosaic_gpu.common import products
from mlstm_pallas.mosaic_gpu.common.copies import (
    copy_out,
    head_of,
    ring_barriers,
    starts_within,
    write_out,
)
from mlstm_pallas.mosaic_gpu.common.fragments import across_columns, across_rows, load_or_zeros
from mlstm_pallas.mosaic_gpu.common.launch import (
    BY_COLUMNS,
    BY_ROWS,
    WG_ROWS,
    atom_columns,
    block,
    by_lanes,
    float32,
    load,
    load_float32,
    mosaic_call,
    plgpu,
    shared_tiles,
    unravel,
    write,
)
from mlstm_pallas.mosaic_gpu.common.limits import HEADS, HopperTiles, bytes_of
from mlstm_pallas.mosaic_gpu.common.phases import Phase, Phases
from mlstm_pallas.mosaic_gpu.common.products import SUM_SCRATCH
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.stages import recurrent_bw_dC as dC
from mlstm_pallas.stages import recurrent_fw_C as fw_C
from mlstm_pallas.stages.recurrence import Recurrence, RecurrenceOutputs
from mlstm_pallas.stages.split_products import Operands

STEPS = 64  # per tile
ROWS = {64: 256, 128: 256, 192: 128}  # of X, at most per CTA, by the CTA's columns
H_STAGES = 3  # tiles of h in shared memory
MIN_SPLIT_STEPS = 1024  # shorter splits gain less than the second launch and their sums cost


def _store_state(index, XT, matX, matX_columns, columns, tiles_smem):
    """Stores X^T, (64, rows), before the index-th chunk in the order of the recurrence.

    matX: (DHQK, DHV); columns: of a CTA; tiles_smem: (2, atom, 64).
    """
    atom = tiles_smem.shape[1]  # the columns of a swizzle atom
    n = XT.shape[1] // atom
    for j in range(n):
        tile = tiles_smem.at[remainder(index * n + j, 2)]
        at = block(lax.axis_index("rows") * n + j, atom), matX_columns
        where, pending = starts_within(*zip(at, (XT.shape[1], columns), matX.shape, strict=True))
        write_out(tile.T, XT[:, j * atom : (j + 1) * atom], pending)
        copy_out(tile, matX.at[at], where)


def _left(b, weights):
    """The left operand b^T, its columns times weights unless these are None."""
    if weights is None:
        return b.T
    r = across_rows(load(weights, BY_COLUMNS))
    return (load_float32(b.T) * r).astype(b.dtype)


def _recurrence(
    x,  # a Recurrence; matX_initial is transposed, one per split
    out,  # RecurrenceOutputs
    with_sums,  # whether the CTA computes b . h or x, if any
    head,  # splits count as heads
    at,  # where the last state is stored
    stores_last,  # whether it is
    *,
    p,
    a_smem,  # (stages, 64, rows)
    b_smem,  # (stages, 64, columns), 64 per warpgroup
    weights_smem,  # (stages, 64) float32, None without r
    h_smem,  # (H_STAGES, 64, columns), None if no recurrence has an h
    out_smem,  # (warpgroups, 2, atom, 64), None if X is not stored
    sum_smem,  # (warpgroups, SUM_SCRATCH) float32, None if no recurrence has an x
    barriers,  # of the ring of operands
    h_barriers,  # of the ring of tiles of h, None if no recurrence has an h
):
    """A recurrence, as the warpgroup of 64 columns of X runs it, in steps of 64 of the sequence."""
    wg, row_block, column_block = map(lax.axis_index, ("wg", "rows", "columns"))
    rows, columns = a_smem.shape[-1], b_smem.shape[-1]
    readers = columns // WG_ROWS
    n, num_chunks = p.L // STEPS, p.NC if x.num_active is None else x.num_active[head]
    block_rows, block_columns = block(row_block, rows), block(column_block, columns)
    part = column_block * readers + wg
    matX_columns, tile_columns = block(part, WG_ROWS), block(wg, WG_ROWS)  # of the warpgroup
    # The warpgroup's rows of x. In a block of up to 64 rows all warpgroups have the same ones.
    x_size, x_part = min(rows, WG_ROWS), wg if rows > WG_ROWS else 0
    vector_rows = block(row_block * (rows // x_size) + x_part, x_size)
    stores_inner, sums_vector = (with_sums and y is not None for y in (x.h, out.vecX_last))

    def chunk_at(index):
        return num_chunks - 1 - index if x.backward else index

    def in_sequence(chunk, tile):
        return block(chunk * n + tile, STEPS)

    def copy_operands(chunk, tile, copy):
        copy(head_of(x.a, head, p).at[in_sequence(chunk, tile), block_rows], a_smem)
        copy(head_of(x.b, head, p).at[in_sequence(chunk, tile), block_columns], b_smem)
        if x.r is not None:
            copy(x.r.at[head, in_sequence(chunk, tile)], weights_smem)

    def copy_h(chunk, tile, copy):
        copy(head_of(x.h, head, p).at[in_sequence(chunk, tile), block_columns], h_smem)

    phases, h_phases = (Phases(tiles=Phase(n, (y,))) for y in (copy_operands, copy_h))
    items = num_chunks, lambda index: (chunk_at(index),), readers
    ring, h_ring = phases.ring(barriers, *items), h_phases.ring(h_barriers, *items)
    rings = [ring, h_ring] if stores_inner else [ring]

    def add(index, accumulator):
        """Adds b^T a of the index-th chunk, and with an x returns the sum of r a."""
        unrolled, steps, h_steps = 2 - n % 2, phases.of_item(index), h_phases.of_item(index)

        def issue(slot):
            weights = None if x.r is None else weights_smem.at[slot]
            left = _left(b_smem.at[slot, :, tile_columns], weights)
            products.add(accumulator, left, a_smem.at[slot])

        def beside(tile, total, slot):
            if stores_inner:
                (h,), b = h_steps("tiles", tile), b_smem.at[slot, :, tile_columns]
                inner = h_ring.row_products(h, b, h_smem, slice(None), tile_columns)
                out.inner.at[head, part, in_sequence(chunk_at(index), tile)][...] = inner
            if sums_vector:
                a = load_float32(a_smem.at[slot, :, block(x_part, x_size)])
                total += a * across_columns(load(weights_smem.at[slot], BY_ROWS), x_size)
            return total

        def tiles(i, total):
            for j in range(unrolled):  # so that each left operand has registers of its own
                tile = i * unrolled + j
                (step,), beside_it = steps("tiles", tile), functools.partial(beside, tile, total)
                total = ring.mma(step, issue, beside_it, follows=(j > 0) | (i > 0))
            return total

        total = loop(n // unrolled, tiles, products.zeros(WG_ROWS, x_size) if sums_vector else None)
        products.wait(0)
        ring.release(*steps("tiles", n - 1))
        return total

    stores_vector = pl.when(rows > WG_ROWS or wg == 0)

    def join(index, carry):
        """Stores X before a chunk, and adds the chunk; carry: X^T, x and the chunk's gamma."""
        (XT, vector, decay), chunk = carry, chunk_at(index)
        last = lax.convert_element_type(num_chunks - 1, np.int32)
        following = x.gamma[head, chunk_at(lax.min(index + 1, last))]
        if out.matX is not None:
            matX = out.matX.at[head, chunk]
            _store_state(index, XT, matX, matX_columns, columns, out_smem.at[wg])
        if sums_vector:
            if out.vecX is not None:
                stores_vector(lambda: write(out.vecX.at[head, chunk, vector_rows], vector))
            total, added = products.all_from_zeros(lambda acc: add(index, acc), (WG_ROWS, rows))
            XT = weighted(decay, XT, p) + added
            vector = weighted(decay, vector, p) + products.sum_over_rows(total, sum_smem.at[wg])
        else:
            (XT,) = products.onto(lambda acc: add(index, acc), weighted(decay, XT, p))
        return XT, vector, following

    for y in rings:
        y.prologue()
    gamma = x.gamma[head, chunk_at(np.int32(0))]
    XT = load_or_zeros(x.matX_initial, (head, matX_columns, block_rows))
    initial = x.vecX_initial, (head, vector_rows)
    vector: Any = load_or_zeros(*initial, by_lanes(x_size)) if sums_vector else None
    XT, vector, _ = loop(num_chunks, join, (XT, vector, gamma))

    @pl.when(stores_last)
    def store_last():
        if out.matX_last is not None:
            write(out.matX_last.at[at, matX_columns, block_rows], XT)
        if sums_vector:
            stores_vector(lambda: write(out.vecX_last.at[at, vector_rows], vector))

    plgpu.wait_smem_to_gmem(0)
    for y in rings:
        y.epilogue()


def _kernel(each, outputs, *, p, num_splits, computed, **shared):
    """num_splits: in p they count as heads; computed: the splits per sequence that run."""
    rows, columns = (shared[x].shape[-1] for x in ("a_smem", "b_smem"))
    which, index = unravel(lax.axis_index("head"), p.BNH // num_splits * computed)
    sequence, split = unravel(index, computed)
    for j, (x, out) in enumerate(zip(each, outputs, strict=True)):
        # With backward no split follows the first one, otherwise the last one.
        head = sequence * num_splits + split + (num_splits - computed if x.backward else 0)
        last_split = 0 if x.backward else num_splits - 1
        last = index, True
        if out.matX is not None:
            last = sequence, remainder(head, num_splits) == last_split
        # The CTAs of the first row block compute b . h, and those of the first column block x.
        axis = ""
        if x.h is not None and rows < p.DHQK:
            axis = "rows"
        elif out.vecX_last is not None and columns < p.DHV:
            axis = "columns"
        # Two bodies, so that the loop over steps has no branch.
        for with_sums in (True, False) if axis else (True,):
            here = which == j
            if axis:
                here &= (lax.axis_index(axis) == 0) == with_sums
            run = functools.partial(_recurrence, x, out, with_sums, head, *last, p=p, **shared)
            pl.when(here)(run)


def _launch(
    name: str, each: Sequence[Recurrence], call: Launch, num_splits: int, sums: int = 0
) -> list[RecurrenceOutputs]:
    """One launch of recurrences of which all have r or none has.

    matX_initial and matX_last are transposed and have whole blocks; each split has an matX_initial.

    sums: of so many splits per sequence the launch computes what they add to X and x, as the last
      states of (B * NH * sums); 0: it computes the states.
    """
    p, dtype, tiles = call.problem.split(num_splits), each[0].a.dtype, call.tiles
    as_heads = functools.partial(jax.tree.map, lambda x: x.reshape(p.BNH, -1))
    inputs = [dataclasses.replace(x, gamma=as_heads(x.gamma), r=as_heads(x.r)) for x in each]
    if sums:  # from zeros
        inputs = [dataclasses.replace(x, matX_initial=None, vecX_initial=None) for x in inputs]
    lasts, (columns, rows) = call.problem.BNH * (sums or 1), tiles.covered(p)
    matX = jax.ShapeDtypeStruct((p.BNH, p.NC, p.DHQK, p.DHV), dtype)
    outputs = [
        RecurrenceOutputs(
            matX=None if sums else matX,
            matX_last=float32(lasts, columns, rows) if x.return_last else None,
            vecX=None if sums or x.vecX_initial is None else float32(p.BNH, p.NC, p.DHQK),
            vecX_last=None if x.vecX_initial is None else float32(lasts, p.DHQK),
            inner=None if x.h is None else float32(p.BNH, columns // WG_ROWS, p.S),
        )
        for x in each
    ]
    computed = sums or num_splits
    heads, row_blocks, column_blocks = tiles.grid(call.problem)
    return mosaic_call(
        functools.partial(_kernel, p=p, num_splits=num_splits, computed=computed),
        name=name,
        grid={"head": len(each) * heads * computed, "rows": row_blocks, "columns": column_blocks},
        warpgroups=tiles.state_columns // WG_ROWS,
        outputs={"outputs": outputs},
        scratch=tiles.scratch(
            p,
            dtype,
            weighted=each[0].r is not None,
            has_h=any(x.h is not None for x in each),
            has_vector=any(x.vecX_initial is not None for x in each),
            stores_states=not sums,
        ),
    )(each=inputs)["outputs"]


def _with_states(x: Recurrence, added: RecurrenceOutputs, others: int) -> Recurrence:
    """The recurrence with the states before every split, from what all other splits add."""

    def states(added, initial):
        added = group_splits(added, others)
        return split_states(added, x.gamma, initial, backward=x.backward)

    return dataclasses.replace(
        x,
        matX_initial=states(added.matX_last, x.matX_initial),
        vecX_initial=None if x.vecX_initial is None else states(added.vecX_last, x.vecX_initial),
    )


def _transposed(XT: jax.Array, p: Problem) -> jax.Array:
    """X from X^T, without what the blocks have beyond it."""
    return XT[..., : p.DHV, : p.DHQK].mT


def recurrences(name: str, *each: Recurrence, call: Launch) -> list[RecurrenceOutputs]:
    """Runs recurrences of stages/recurrence.py, in one launch, or in two with splits.

    They scale v and dh in registers instead of k and q. In float16 r dh would fall below the normal
    numbers, so there XLA scales q and k.
    """
    num_splits, p = call.tiles.num_splits, call.problem
    if each[-1].vecX_initial is None and each[0].a.dtype == jnp.float16:
        each = tuple(x.scaled() for x in each)
    beyond = [(0, y - x) for x, y in zip((p.DHV, p.DHQK), call.tiles.covered(p), strict=True)]
    padded = functools.partial(jax.tree.map, lambda matX: jnp.pad(matX.mT, [(0, 0), *beyond]))
    inputs = [dataclasses.replace(x, matX_initial=padded(x.matX_initial)) for x in each]
    if num_splits > 1:  # splits run all their chunks
        inputs = [dataclasses.replace(x, num_active=None) for x in inputs]
        for_sums = [dataclasses.replace(x, h=None, return_last=True) for x in inputs]
        sums = _launch("split_products", for_sums, call, num_splits, num_splits - 1)
        with_states = functools.partial(_with_states, others=num_splits - 1)
        inputs = [*map(with_states, inputs, sums)]
    of_sequences = functools.partial(jax.tree.map, lambda x: x.reshape(p.BNH, -1, *x.shape[2:]))
    return [
        x._replace(
            matX=of_sequences(x.matX),
            vecX=of_sequences(x.vecX),
            inner=None if x.inner is None else jnp.sum(x.inner, axis=1).reshape(p.BNH, p.S),
            matX_last=None if x.matX_last is None else _transposed(x.matX_last, p),
        )
        for x in _launch(name, inputs, call, num_splits)
    ]


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


def split_products(
    x: Operands,
    *,
    num_splits: int,
    backward: bool = False,
    all_splits: bool = False,
    call: Launch,
) -> jax.Array:
    """Runs the stage: ``stages/split_products.py``."""
    p = call.problem.in_splits(num_splits)
    call = dataclasses.replace(call, problem=p)
    gamma = jnp.ones((p.BNH, num_splits), jnp.float32)
    undecayed = Recurrence(x.a, x.b, gamma, None, return_last=True, backward=backward, r=x.r)
    computed = num_splits - (not all_splits)
    [sums] = _launch("split_products", [undecayed], call, num_splits, computed)
    return _transposed(group_splits(sums.matX_last, computed), p)


def _columns(p: Problem) -> int:
    """The columns of X per CTA if heads are many."""
    if p.DHV <= WG_ROWS:
        return WG_ROWS
    if p.DHV % 128 and p.DHV > 128 and ROWS[192] >= p.DHQK:
        return 192
    return WG_ROWS if p.DHV % 128 == WG_ROWS else 128


def _has_vector(kernel: KernelSpec) -> bool:
    """Whether the stage computes an x."""
    return kernel.stage == "recurrent_fw_C"


def _rows(p: Problem, columns: int, most: int, has_vector: bool) -> int:
    """The rows of X per CTA: blocks of equal size, up to most.

    With an x they divide DHQK, and more than 64 are as many as the columns.
    """
    atom = atom_columns(p)
    if has_vector and atom < WG_ROWS:
        return atom
    if has_vector:
        return largest_block(p.DHQK, min(most, columns) if columns == 128 else WG_ROWS, WG_ROWS)
    return rounded_up(blocks_over(p.DHQK, blocks_over(p.DHQK, most)), atom)


@dataclasses.dataclass(frozen=True)
class RecurrenceTiles(HopperTiles):
    """The block of X per CTA, which has one warpgroup per 64 columns."""

    state_rows: int
    state_columns: int
    num_stages: int
    num_splits: int = 1

    def grid(self, p: Problem) -> tuple[int, ...]:
        columns, rows = self.covered(p)
        return p.BNH, rows // self.state_rows, columns // self.state_columns

    def covered(self, p: Problem) -> tuple[int, int]:
        """The columns and the rows of X that the blocks cover."""
        return rounded_up(p.DHV, self.state_columns), rounded_up(p.DHQK, self.state_rows)

    def shared_bytes(self, p: Problem, dtype, kernel: KernelSpec) -> int:
        """Where chunk_gradients follows, recurrent_bw_dC reads h."""
        is_dC = kernel.stage == "recurrent_bw_dC"
        scratch = self.scratch(
            p,
            dtype,
            has_h=is_dC and ChunkGradientsTiles.plan(p, dtype, kernel) is not None,
            has_vector=_has_vector(kernel),
            stores_states=kernel.stage != "split_products",
        )
        return bytes_of(scratch)

    def scratch(
        self, p: Problem, dtype, *, weighted=True, has_h=False, has_vector=False, stores_states=True
    ) -> dict[str, Any]:
        atom, n = atom_columns(p), self.num_stages
        tiles = functools.partial(shared_tiles, dtype=dtype, atom=atom)
        columns, readers = self.state_columns, self.state_columns // WG_ROWS
        return {
            "a_smem": tiles(n, STEPS, self.state_rows),
            "b_smem": tiles(n, STEPS, columns),
            "weights_smem": plgpu.SMEM((n, STEPS), jnp.float32) if weighted else None,
            "h_smem": tiles(H_STAGES, STEPS, columns) if has_h else None,
            "out_smem": tiles(readers, 2, atom, WG_ROWS) if stores_states else None,
            "sum_smem": plgpu.SMEM((readers, SUM_SCRATCH), jnp.float32) if has_vector else None,
            "barriers": ring_barriers(n, copies=3 if weighted else 2, readers=readers),
            "h_barriers": ring_barriers(H_STAGES, copies=1, readers=readers) if has_h else None,
        }

    @classmethod
    def candidates(cls, p: Problem, kernel: KernelSpec) -> Iterable[Self]:
        """The most rows per block with which the launch fills the GPU; else splits."""
        columns, gpu, has_vector = _columns(p), kernel.gpu, _has_vector(kernel)
        sizes = [
            _rows(p, columns, min(size, ROWS[columns]), has_vector) for size in (256, 128, WG_ROWS)
        ]
        each = kernel.recurrences * p.BNH * blocks_over(p.DHV, columns)  # CTAs per block of rows
        rows = next((x for x in sizes if gpu.filled_by(each * blocks_over(p.DHQK, x))), sizes[-1])
        ctas = each * blocks_over(p.DHQK, rows)
        splits = splits_of(p.NC, min(gpu.sms // max(ctas, 1), p.S // MIN_SPLIT_STEPS))
        if rows <= WG_ROWS and 2 * ctas * splits <= gpu.sms:
            columns = WG_ROWS  # twice the CTAs, whose warpgroups do not wait for each other
        for stages in (6 if has_vector and rows <= WG_ROWS else 4, 3, 2):
            yield cls(rows, columns, stages, splits)

    def supports(self, p: Problem, kernel: KernelSpec) -> bool:
        rows, columns = self.state_rows, self.state_columns
        return (
            columns in ROWS
            and rows <= ROWS[columns]
            and rows % atom_columns(p) == p.L % STEPS == 0
            and not (_has_vector(kernel) and (p.DHQK % rows or rows not in (32, WG_ROWS, columns)))
            and self.num_stages >= 2  # a slot becomes free while the next step's product runs
            and p.NC % self.num_splits == 0
            and 2 * p.BNH * self.num_splits <= HEADS
            and super().supports(p, kernel)
        )
