"""KernelConfig, with which a caller overrides the plan."""

import dataclasses
import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from mlstm_pallas.formulas.tiles import Precision
from mlstm_pallas.launches.kernel_tiles import BLOCK, FIELDS
from mlstm_pallas.launches.lowering import Lowering
from mlstm_pallas.planning.dispatch import kernels
from mlstm_pallas.problem.validation import check_chunk_size, check_instance, or_none, wrong

Fields = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class KernelConfig:
    """Overrides of the plan. The rules of ``call_spec.py`` decide what is None.

    Example::

        KernelConfig(chunk_size=128, triton_parallel_fw_H=dict(siz_b_LQ=128, num_warps=8))

    Attributes:
      chunk_size: L, a power of two >= 16.
      precision: the precision of float32 products. None: full float32 accuracy, by six bfloat16
        products on the tensor cores.
      fused: whether the forward pass is the fused scan (parallel_fw_P and recurrent_fw_H), which
        keeps the states on the chip. With False it writes them to memory (recurrent_fw_C and
        parallel_fw_H).
      num_splits: parts of a sequence that the fused scan runs at the same time, a power of two.
      batch_invariant: True: plans follow from S and the heads alone, as for a batch of one, and
        plain jnp runs one head at a time, so that h and the states of an entry have the same bits
        in a batch of any size and at any place in it.
      tiles: fields of a kernel's tiles, by lowering and kernel; keywords of the constructor. A size
        of steps is clamped to one that divides a chunk; on Triton a size of columns is clamped to
        the least power of two that covers the head.
    """

    chunk_size: int | None
    precision: Precision
    fused: bool | None
    num_splits: int | None
    batch_invariant: bool | None
    tiles: tuple[tuple[str, Fields], ...]

    def __init__(
        self,
        chunk_size: int | None = None,
        precision: Precision = None,
        fused: bool | None = None,
        num_splits: int | None = None,
        batch_invariant: bool | None = None,
        **tiles: Mapping[str, Any] | None,
    ):
        if not isinstance(precision, Precision):
            expected = "None, a jax.lax.Precision or a jax.lax.DotAlgorithmPreset"
            raise wrong("config.precision", precision, expected, TypeError)
        for name, x in dict(fused=fused, batch_invariant=batch_invariant).items():
            if not isinstance(x, bool | None):
                raise wrong(f"config.{name}", x, "None, True or False", TypeError)
        kernel_names = kernels()
        for name, fields in tiles.items():
            _check_known(
                "config.", name, sorted({*type(self).__annotations__, *kernel_names} - {"tiles"})
            )
            for x in check_instance(f"config.{name}", fields, Mapping) or ():
                _check_known(f"config.{name}: ", x, FIELDS)
        checked = {
            name: tuple((x, _check(name, x)(f"config.{name}: {x}", y)) for x, y in fields.items())
            for name in kernel_names
            if (fields := tiles.get(name))
        }
        vars(self).update(
            chunk_size=or_none(check_chunk_size)("config.chunk_size", chunk_size),
            precision=precision,
            fused=fused,
            num_splits=or_none(FIELDS["num_splits"])("config.num_splits", num_splits),
            batch_invariant=batch_invariant,
            tiles=tuple(checked.items()),
        )

    def _keywords(self) -> dict[str, Any]:
        """The keywords of the constructor call that are not None."""
        fields = vars(self) | {name: dict(x) for name, x in self.tiles}
        return {name: x for name, x in fields.items() if x is not None and name != "tiles"}

    def __repr__(self) -> str:
        """The constructor call."""
        fields = self._keywords()
        if x := self.precision:
            fields["precision"] = f"jax.lax.{type(x).__name__}.{x.name}"
        return f"KernelConfig({', '.join(f'{name}={x}' for name, x in fields.items())})"

    def __or__(self, other: "KernelConfig") -> "KernelConfig":
        """The other config, with what it leaves None from this one."""
        return KernelConfig(**self._keywords() | other._keywords())

    def tiles_of(self, kernel: str) -> dict[str, Any]:
        """The fields of a kernel's tiles that the config has."""
        return dict(dict(self.tiles).get(kernel, ()))

    def dot_precision(self, dtype: jnp.dtype, interpret: bool) -> Precision:
        """The precision of products of tiles of dtype.

        Interpreted on a CPU, products are in full float32, of 16-bit tiles too: XLA has no split
        algorithms there, and jaxlib 0.10 lacks some products of bfloat16 (DotThunk).
        """
        chosen = isinstance(self.precision, lax.Precision) and dtype == jnp.float32
        if interpret and not chosen:
            return lax.Precision.HIGHEST
        if dtype != jnp.float32:
            return None
        return self.precision or lax.DotAlgorithmPreset.BF16_BF16_F32_X6


def _check_known(prefix: str, name: Any, names: Collection[str]) -> None:
    """Raises for a name that is not among the names, with those that are nearest to it."""
    if name not in names:
        nearest = difflib.get_close_matches(str(name), names)
        expected = ", ".join(nearest or names)
        raise TypeError(f"{prefix}{name} is no field, expected one like {expected}")


def _check(kernel: str, field: str) -> Callable[[str, Any], Any]:
    """The check of a field; on Mosaic GPU siz_b_DHHV need not be a power of two."""
    any_size = kernel.startswith(Lowering.MOSAIC_GPU) and field == "siz_b_DHHV"
    return BLOCK if any_size else FIELDS[field]
