"""The seam to Triton: the only importer of jax.experimental.pallas.triton.

Every Triton kernel is launched through ``kernel_call``: compiled on a GPU, or interpreted.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental import pallas as pl

from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import StageCall
from mlstm_pallas.tiles import divide, remainder

plgpu: Any
try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # jax will remove this backend; the plain forms need no kernels
    plgpu = None

# jax >= 0.11 warns at each lowering that Pallas' Triton backend is deprecated. Users of the package
# can do nothing about it.
warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
)

HAS_TRITON = plgpu is not None
# jax 0.10 has no constant for it.
CUSTOM_CALL_TARGET = getattr(plgpu, "CUSTOM_CALL_TARGET_NAME", "__gpu$xla.gpu.triton")


def kernel_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec | None],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    call: StageCall,
    input_output_aliases: Mapping[int, int] = MappingProxyType({}),
    **statics: Any,
) -> Callable[..., Any]:
    """pl.pallas_call of ``kernel(*refs, **statics)``; on the GPU grid axis 0 varies fastest.

    input_output_aliases: {input: output} that share memory, by position without absent inputs.
    """
    if plgpu is None:
        raise RuntimeError(
            f"{name} is a Triton kernel, and jax {jax.__version__} has no Triton backend of "
            "Pallas: expected a jax that has one, such as 0.11.2 and 0.12.0.1, or backend None, "
            "'mosaic_gpu' or 'xla'"
        )

    def launch(*args: jax.Array | None) -> Any:
        # A shard_map with check_vma needs the axes over which outputs vary.
        varying = frozenset().union(
            *(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(args))
        )
        kind = jax.sharding.ManualAxisType(varying=varying)
        return pl.pallas_call(
            functools.partial(kernel, **statics),
            grid=grid,
            in_specs=list(in_specs),
            out_specs=tuple(out_specs),
            out_shape=tuple(
                jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind) for x in out_shape
            ),
            compiler_params=plgpu.CompilerParams(
                num_warps=call.tiles.num_warps, num_stages=call.tiles.num_stages
            ),
            interpret=call.interpret,
            input_output_aliases=dict(input_output_aliases),
            name=name,
        )(*args)

    return launch


def masked_load(ref: Any, mask: jax.Array | None) -> jax.Array:
    """ref[...] where mask holds, else 0; mask None: ref[...]."""
    x: jax.Array = plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)
    return x


def masked_store(ref: Any, x: jax.Array, mask: jax.Array | None) -> None:
    plgpu.store(ref, x, mask=mask)


def sequence_spec(
    x: Any, p: Problem, rows: int, columns: int, index_map: Callable[..., tuple[Any, Any, Any]]
) -> pl.BlockSpec:
    """Blocks of q, k, v or another array of steps, in either layout.

    index_map: the grid indices to (head, row block, column block). Splits count as heads.
    """
    if x.ndim == 3:
        return pl.BlockSpec((None, rows, columns), index_map)
    B, _, NH, _ = x.shape
    num_splits, row_blocks = p.BNH // (B * NH), p.S // rows

    def strided(*grid: Any) -> tuple[Any, ...]:
        n, row, column = index_map(*grid)
        head = n if num_splits == 1 else divide(n, num_splits)
        row = row if num_splits == 1 else remainder(n, num_splits) * row_blocks + row
        return divide(head, NH), row, remainder(head, NH), column

    return pl.BlockSpec((None, rows, None, columns), strided)
