"""Launch, loader, main loop and epilogue of the persistent kernels of the backward pass.

There is one CTA per SM, and each processes every num_ctas-th item. Two warpgroups multiply. Either
they also share the copying, or a third warpgroup copies.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import Array, lax
from jax.experimental import pallas as pl

from mlstm_pallas.mosaic_gpu.copy_ring import CopyRing
from mlstm_pallas.mosaic_gpu.launch import PersistentScheduler, mosaic_call, plgpu
from mlstm_pallas.stage import Launch


def persistent_call(
    kernel: Callable[..., None],
    name: str,
    call: Launch,
    outputs: Mapping[str, Any],
    scratch: Mapping[str, Any],
    *,
    copies: bool,
) -> Callable[..., dict[str, Any]]:
    """``mosaic_call`` of kernel(refs, problem, tiles, scheduler, warpgroup).

    copies: whether a third warpgroup copies.
    """

    def entry(**refs):
        wg = lax.axis_index("wg")
        scheduler = PersistentScheduler(lax.axis_index("program"), call.tiles.num_ctas)
        kernel(types.SimpleNamespace(**refs), call.problem, call.tiles, scheduler, wg)

    return mosaic_call(
        entry,
        name=name,
        grid={"program": call.tiles.num_ctas},
        warpgroups=2 + copies,
        outputs=outputs,
        scratch=scratch,
        interpret=call.interpret,
    )


def run(
    rings: Sequence[CopyRing],
    multiply: Callable[[], Any],
    wg: Array,
    copy: Callable[[], Any] | None = None,
) -> None:
    """Runs warpgroup ``wg`` of a CTA.

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
        pl.when(wg < 2)(main_loop)
        pl.when(wg == 2)(copy)
    for ring in rings:
        ring.epilogue()
