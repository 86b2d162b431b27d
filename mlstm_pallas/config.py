"""Tile sizes and launch parameters: explicit > tuned row > heuristic.

All functions are pure: none queries a device.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jax.numpy as jnp
from jax import lax

from mlstm_pallas import dispatch
from mlstm_pallas.problem import (
    Problem,
    clamp_chunk_size,
    next_power_of_two,
    padded_head_dim,
)
from mlstm_pallas.stage import Lowering, StageConfig
from mlstm_pallas.stages import STAGES
from mlstm_pallas.tiles import Precision
from mlstm_pallas.validation import check_chunk_size, check_instance, check_integer, shown

UNKNOWN_DEVICE = "unknown"


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class KernelConfig:
    """The tunable parameters. Those left None come from the tuned row or the heuristic.

        KernelConfig(chunk_size=128, parallel_fw_H=StageConfig(siz_b_LQ=128, num_warps=8))

    Attributes:
      chunk_size: L, a power of two >= 16.
      precision: of float32 products. None: true float32 quality, as six bfloat16 products on the
        tensor cores.
      fused_min_heads: from this many heads (B * NH) on the forward pass is the fused scan
        (parallel_fw_P and recurrent_fw_H), which keeps the states on the chip. Below, and with 0,
        the states are materialised (recurrent_fw_C and parallel_fw_H). Where heads are wide and
        sequences long, splits of a sequence count as heads.
      stages: tiles of the stages, by name; keywords of the constructor.
    """

    chunk_size: int | None
    precision: Precision
    fused_min_heads: int | None
    stages: dict[str, StageConfig]

    def __init__(
        self,
        chunk_size: int | None = None,
        precision: Precision = None,
        fused_min_heads: int | None = None,
        **stages: StageConfig | None,
    ):
        if not isinstance(precision, Precision):
            raise TypeError(
                f"config.precision is {shown(precision)}, expected None, a jax.lax.Precision or a "
                "jax.lax.DotAlgorithmPreset"
            )
        if fused_min_heads is not None:
            fused_min_heads = check_integer(
                "config.fused_min_heads", fused_min_heads, 0, optional=True
            )
        for name, tiles in stages.items():
            if name not in STAGES:
                raise TypeError(f"config.{name} is no stage, expected one of {', '.join(STAGES)}")
            check_instance(f"config.{name}", tiles, StageConfig)
        fields = dict(
            chunk_size=check_chunk_size(chunk_size),
            precision=precision,
            fused_min_heads=fused_min_heads,
            stages=_Stages((name, x) for name in STAGES if (x := stages.get(name)) is not None),
        )
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """The constructor call."""
        fields: dict[str, Any] = {
            name: x for name, x in (self._fields() | self.stages).items() if x is not None
        }
        if isinstance(self.precision, lax.Precision | lax.DotAlgorithmPreset):
            fields["precision"] = f"jax.lax.{type(self.precision).__name__}.{self.precision.name}"
        return f"KernelConfig({', '.join(f'{name}={x}' for name, x in fields.items())})"

    def replace(self, **changes: Any) -> "KernelConfig":
        return KernelConfig(**self._fields() | self.stages | changes)

    def or_else(self, other: "KernelConfig") -> "KernelConfig":
        """This config, its None fields filled from the other."""
        return other.replace(
            **{name: x for name, x in self._fields().items() if x is not None} | self.stages
        )

    def _fields(self) -> dict[str, Any]:
        return dict(
            chunk_size=self.chunk_size,
            precision=self.precision,
            fused_min_heads=self.fused_min_heads,
        )

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
        return lax.DotAlgorithmPreset.BF16_BF16_F32_X6 if self.precision is None else self.precision

    @property
    def L(self) -> int:
        if self.chunk_size is None:
            raise ValueError("config.chunk_size is None: this config was not filled by config_for")
        return self.chunk_size

    def stage(self, name: str) -> StageConfig:
        if name not in self.stages:
            raise ValueError(f"config.{name} is None: this config was not filled by config_for")
        return self.stages[name]

    def as_row(self) -> dict[str, Any]:
        """The config as a row of tuning/: the fields that each stage reads, without precision."""
        row: dict[str, Any] = {
            "chunk_size": self.chunk_size,
            "fused_min_heads": self.fused_min_heads,
        }
        row = {name: value for name, value in row.items() if value is not None}
        for name, tiles in self.stages.items():
            row[name] = {field: getattr(tiles, field) for field in dispatch.configured(name).search}
            if tiles.num_splits is not None:
                row[name]["num_splits"] = tiles.num_splits
            if tiles.mosaic_gpu and (facts := dispatch.kernel(name, "mosaic_gpu")):
                row[name]["mosaic_gpu"] = {
                    field: getattr(tiles.mosaic_gpu, field) for field in facts.search
                }
        return row


class _Stages(dict[str, StageConfig]):
    """Tiles by stage, hashable; never changed."""

    def __hash__(self) -> int:  # type: ignore[override]  # dict sets it to None
        return hash(tuple(self.items()))


# Devices with the SM of a tuned one.
_SAME_CHIP = (("H100", "nvidia_h200"), ("H200", "nvidia_h200"), ("H800", "nvidia_h200"))


def tuning_name(device_kind: str) -> str:
    """The name of a device's file in tuning/, without .json."""
    return device_kind.lower().replace(" ", "_")


@functools.cache
def tuned_rows(device_kind: str) -> tuple[dict[str, Any], ...]:
    """The rows of tuning/<device kind>.json, else those of the same chip, else none."""
    names = [tuning_name(device_kind), *(name for chip, name in _SAME_CHIP if chip in device_kind)]
    files = [resources.files("mlstm_pallas") / "tuning" / f"{name}.json" for name in names]
    return next(
        (tuple(json.loads(file.read_text())["rows"]) for file in files if file.is_file()), ()
    )


def _tiles_from_row(row: Mapping[str, Any]) -> StageConfig:
    inner = row.get("mosaic_gpu")
    return StageConfig(**{**row, "mosaic_gpu": None if inner is None else StageConfig(**inner)})


def config_from_row(row: Mapping[str, Any], backend: str | None = None) -> KernelConfig:
    """The config of a row. A row may have another chunk_size and fused_min_heads for a backend."""
    if backend is not None:
        row = {**row, **row.get(Lowering(backend).room, {})}
    stages: dict[str, Any] = {name: _tiles_from_row(row[name]) for name in STAGES if name in row}
    return KernelConfig(
        chunk_size=row["chunk_size"], fused_min_heads=row.get("fused_min_heads"), **stages
    )


def config_from_rows(
    rows: Sequence[dict[str, Any]], DHQK: int, DHHV: int, dtype: str, backend: str | None = None
) -> KernelConfig | None:
    """The config of the row for these head dimensions; None without a row of this dtype.

    The row is that of the smallest dimensions that cover them, else that of the largest.
    """
    rows = sorted(
        (row for row in rows if row["dtype"] == dtype), key=lambda row: row["DHQK"] * row["DHHV"]
    )
    covering = (row for row in rows if row["DHQK"] >= DHQK and row["DHHV"] >= DHHV)
    row = next(covering, rows[-1] if rows else None)
    return None if row is None else config_from_row(row, backend)


def tuned_config(
    device_kind: str, DHQK: int, DHHV: int, dtype: jnp.dtype, backend: str | None = None
) -> KernelConfig | None:
    # float16 has the size and the speed of bfloat16.
    name = "bfloat16" if dtype.name == "float16" else dtype.name
    return config_from_rows(tuned_rows(device_kind), DHQK, DHHV, name, backend)


def heuristic_config(DHQK: int, dtype: jnp.dtype) -> KernelConfig:
    """Tiles that fit 99 KiB of shared memory, the least of supported devices, at any head size."""
    problem = Problem(1, 1, 64, DHQK, DHQK, 64, 1.0)
    stages: dict[str, Any] = {
        name: dispatch.configured(name).heuristic(problem, dtype) for name in STAGES
    }
    return KernelConfig(chunk_size=64, fused_min_heads=0, **stages)


def plain_chunk_size(DHQK: int, DHHV: int, S: int) -> int:
    """The chunk size in plain jnp: 64 to 256, without more padding of S than 64 needs.

    The products inside chunks then take about half the FLOPs of the products with the states, and
    the states take about as much memory as q, k and v.
    """
    size = min(max(next_power_of_two(DHQK * DHHV // (DHQK + DHHV)), 64), 256)
    while -S % size > -S % 64:
        size //= 2
    return size


def config_for(
    DHQK: int,
    DHHV: int,
    S: int,
    dtype: jnp.dtype,
    *,
    device_kind: str = UNKNOWN_DEVICE,
    chunk_size: int | None = None,
    explicit: KernelConfig | None = None,
    backend: str | None = None,
) -> KernelConfig:
    """The complete config of a call: explicit, else the device's tuned row, else the heuristic.

    The chunk size is clamped to S; a tile beyond its axis is clamped when a stage is launched.
    """
    DHQK, DHHV = padded_head_dim(DHQK), padded_head_dim(DHHV)
    heuristic = heuristic_config(DHQK, dtype)
    if device_kind == UNKNOWN_DEVICE:
        heuristic = heuristic.replace(chunk_size=plain_chunk_size(DHQK, DHHV, S))
    filled = tuned_config(device_kind, DHQK, DHHV, dtype, backend)
    filled = heuristic if filled is None else filled.or_else(heuristic)
    if explicit is not None:
        filled = explicit.or_else(filled)
    if chunk_size is not None:
        filled = filled.replace(chunk_size=chunk_size)
    return filled.replace(chunk_size=clamp_chunk_size(filled.L, S))
