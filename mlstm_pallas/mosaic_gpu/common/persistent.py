"""Launch, loader, main loop and epilogue of the persistent kernels of the backward pass.

There is at most one CTA per SM, and each processes every num_ctas-th item. Two warpgroups are the
consumers. Either they share the copying, or a third warpgroup is the producer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas.formulas.tiles import blocks_over, divide, fori
from mlstm_pallas.launches.launch import Launch
from mlstm_pallas.mosaic_gpu.common import products
from mlstm_pallas.mosaic_gpu.common.copies import CopyRing, copy_out, head_of, write_out
from mlstm_pallas.mosaic_gpu.common.launch import (
    WG_ROWS,
    atom_columns,
    block,
    mosaic_call,
    plgpu,
    unravel,
)
from mlstm_pallas.mosaic_gpu.common.limits import RingTiles
from mlstm_pallas.problem.dimensions import Problem


class PersistentKernel:
    """A CTA of a kernel, as one of its warpgroups sees it.

    Attributes:
      has_producer: whether a third warpgroup copies; otherwise the consumers share the copying.
      References: the type of refs: the kernel's inputs, outputs, shared memory and barriers.
      program: the index of the CTA.
      num_items: the number of its items.
      active: references to ``ChunkList.active_first``: the CTAs share the items of these chunks;
        None: of all.
      ring: of the operands.
      atom: the columns of a swizzle atom of the tiles.
      rings: all rings whose number of steps is known from the start.
    """

    has_producer = False
    References: type[Any]
    ring: CopyRing
    rings: Sequence[CopyRing] = ()

    def __init__(self, refs, p: Problem, tiles: RingTiles) -> None:
        self.refs, self.p, self.tiles = refs, p, tiles
        self.wg, self.program = lax.axis_index("wg"), lax.axis_index("program")
        self.atom = atom_columns(p)
        self.active, items = refs.active, tiles.items(p)
        if self.active is not None:
            items = self.active.num_active[0] * (items // (p.BNH * p.NC))
        self.num_items = self.share_of(items)

    def share_of(self, items):
        """The CTA's number of items, which may be 0."""
        return divide(items + (self.tiles.num_ctas - 1 - self.program), self.tiles.num_ctas)

    def item_of(self, index):
        """The CTA's index-th item."""
        return self.program + index * self.tiles.num_ctas

    def head_and_chunk(self, index) -> tuple[Any, Any]:
        """The head and the chunk at a place in the list of all chunks.

        It starts with the active ones.
        """
        if self.active is not None:
            index = self.active.entries[index]
        return unravel(index, self.p.NC)

    def consume(self) -> None:
        """The work of a consumer: all items, with their outputs."""
        raise NotImplementedError

    def produce(self) -> None:
        """The work of the producer, if there is one."""
        raise NotImplementedError

    def clear(self, tile, *outputs) -> None:
        """Stores zeros in the CTA's share of the inactive chunks.

        tile: 64 steps in shared memory, of the warpgroup.
        """
        if self.active is None:
            return
        p, num_active = self.p, self.active.num_active[0]
        write_out(tile, products.zeros(*tile.shape), 0)

        @fori(self.share_of(p.BNH * p.NC - num_active))
        def clear_chunk(index):
            head, chunk = self.head_and_chunk(num_active + self.item_of(index))

            @fori(p.L // (2 * WG_ROWS))
            def clear_rows(pair):
                rows = block(chunk * (p.L // WG_ROWS) + 2 * pair + self.wg, WG_ROWS)
                for x in outputs:
                    steps = head_of(x, head, p)

                    @fori(blocks_over(x.shape[-1], tile.shape[1]))
                    def clear_tile(column, steps=steps):
                        copy_out(tile, steps.at[rows, block(column, tile.shape[1])])

    def run(self) -> None:
        """Runs the warpgroup."""

        def main_loop():
            self.consume()
            plgpu.wait_smem_to_gmem(0)

        for ring in self.rings:
            ring.prologue()
        if self.has_producer:
            pl.when(self.wg < 2)(main_loop)
            pl.when(self.wg == 2)(self.produce)
        else:
            main_loop()
        for ring in self.rings:
            ring.epilogue()


def persistent_call(
    kernel: type[PersistentKernel],
    name: str,
    x,
    call: Launch,
    outputs: Mapping[str, Any],
    scratch: Mapping[str, Any],
    **inputs,
) -> dict[str, Any]:
    """Runs a kernel, with ``mosaic_call``; x: the operands of a backward stage."""

    def entry(**refs):
        kernel(kernel.References(**refs), call.problem, call.tiles).run()

    return mosaic_call(
        entry,
        name=name,
        grid={"program": call.tiles.num_ctas},
        warpgroups=3 if kernel.has_producer else 2,
        outputs=outputs,
        scratch=scratch,
    )(
        matQ=x.matQ,
        matK=x.matK,
        matV=x.matV,
        matDeltaH=x.matDeltaH,
        active=x.active and x.active.active_first,
        **inputs,
    )
