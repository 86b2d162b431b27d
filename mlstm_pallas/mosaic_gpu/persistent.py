"""Launch, loader, main loop and epilogue of the persistent kernels of the backward pass.

There is one CTA per SM, and each processes every num_ctas-th item. Two warpgroups multiply. Either
they also share the copying, or a third warpgroup copies.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import Array, lax
from jax.experimental import pallas as pl

from mlstm_pallas.mosaic_gpu.copy_ring import CopyRing
from mlstm_pallas.mosaic_gpu.launch import mosaic_call, plgpu
from mlstm_pallas.mosaic_gpu.limits import RingTiles
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Launch
from mlstm_pallas.tiles import divide, remainder


@dataclasses.dataclass(frozen=True)
class CTA:
    """A CTA, as one of its warpgroups sees it.

    Attributes:
      refs: the references of the kernel, by name.
      program: the index of the CTA.
      num_items: the number of its items.
    """

    refs: Any
    p: Problem
    tiles: RingTiles
    wg: Array
    program: Array
    num_items: Array

    def item_of(self, index):
        """The CTA's index-th item."""
        return self.program + index * self.tiles.num_ctas

    def head_and_chunk(self, index) -> tuple[Any, Any]:
        """The place of the index-th chunk of all heads."""
        return divide(index, self.p.NC), remainder(index, self.p.NC)

    def run(
        self,
        rings: Sequence[CopyRing],
        multiply: Callable[[], Any],
        copy: Callable[[], Any] | None = None,
    ) -> None:
        """Runs the warpgroup.

        copy: the work of the third warpgroup; None: the warpgroups that multiply refill the rings.
        """

        def main_loop():
            multiply()
            plgpu.wait_smem_to_gmem(0)

        if copy is None:
            for ring in rings:
                ring.prologue()
            main_loop()
        else:
            pl.when(self.wg < 2)(main_loop)
            pl.when(self.wg == 2)(copy)
        for ring in rings:
            ring.epilogue()


def persistent_call(
    kernel: Callable[[CTA], None],
    name: str,
    call: Launch,
    outputs: Mapping[str, Any],
    scratch: Mapping[str, Any],
    *,
    copies: bool,
) -> Callable[..., dict[str, Any]]:
    """``mosaic_call`` of a kernel. copies: whether a third warpgroup copies."""
    p, tiles = call.problem, call.tiles

    def entry(**refs):
        wg, program = lax.axis_index("wg"), lax.axis_index("program")
        num_items = divide(tiles.items(p) - 1 - program, tiles.num_ctas) + 1
        kernel(CTA(types.SimpleNamespace(**refs), p, tiles, wg, program, num_items))

    return mosaic_call(
        entry,
        name=name,
        grid={"program": tiles.num_ctas},
        warpgroups=2 + copies,
        outputs=outputs,
        scratch=scratch,
        interpret=call.interpret,
    )
