"""Tile sizes and launch parameters: explicit > tuned row > heuristic. Pure functions, no device is asked anything."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jax.numpy as jnp
from jax import lax

from mlstm_pallas.problem import (
    MIN_TILE,
    Problem,
    as_integer,
    check_chunk_size,
    clamp_chunk_size,
    is_power_of_two,
    next_power_of_two,
    padded_head_dim,
)
from mlstm_pallas.tiles import Precision, blocks

UNKNOWN_DEVICE = "unknown"

MAX_SEGMENTS = 16
# Programs that leave no multiprocessor of a large GPU without two. Splitting pays for its second launch only from four parts on.
ENOUGH_PROGRAMS, LEAST_SEGMENTS = 256, 4
# Of a pass without states. Shorter segments cost more than idle multiprocessors, and smaller states (DHQK * DHHV) are as well in memory.
LEAST_SEGMENT_STEPS, LEAST_SEGMENTED_STATE = 2048, 2**17


def fit(tile: int, size: int) -> int:
    """The most of a tile, a power of two, that divides the size."""
    return min(tile, size & -size)


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """Tiles of one stage. A stage uses the sizes that its docstring names and ignores the others.

    Attributes:
      siz_b_LQ, siz_b_LKV: rows of queries and of keys in a tile.
      siz_b_DHQK, siz_b_DHHV: head dimension columns of q, k and of v, h in a tile.
      siz_b_loop: columns that a backward stage sums over in a step, of either head dimension; rows of the state that a launch of a walk
        holds.
      num_warps, num_stages: Triton's warps per program and depth of the software pipeline.
      keep_q: parallel_fw_H only: keep the queries of a tile whole in shared memory during the loop over keys, instead of reading them
        block by block for every key tile. Needs siz_b_LQ * DHQK elements of it, and a padded DHQK that is a power of two.
      num_segments: recurrent_fw_C, recurrent_bw_dC and recurrent_fw_H only: parts of the sequence that are worked on at the same time, a
        power of two. None: more than one where there are few programs, or heads.
    """

    siz_b_LQ: int = 64
    siz_b_LKV: int = 64
    siz_b_DHQK: int = 64
    siz_b_DHHV: int = 64
    siz_b_loop: int = 64
    num_warps: int = 4
    num_stages: int = 2
    keep_q: bool = True
    num_segments: int | None = None

    def __post_init__(self):
        sizes = ("siz_b_LQ", "siz_b_LKV", "siz_b_DHQK", "siz_b_DHHV", "siz_b_loop")
        for name in (*sizes, "num_warps", "num_stages", "num_segments"):
            object.__setattr__(self, name, as_integer(getattr(self, name)))
        for name in sizes:
            size = getattr(self, name)
            if not is_power_of_two(size) or size < MIN_TILE:
                raise ValueError(f"{name} is {size!r}, expected a power of two >= {MIN_TILE}")
        if not is_power_of_two(self.num_warps) or self.num_warps > 16:
            raise ValueError(f"num_warps is {self.num_warps!r}, expected 1, 2, 4, 8 or 16")
        if type(self.num_stages) is not int or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages is {self.num_stages!r}, expected an integer from 1 to 8")
        if self.num_segments is not None and not is_power_of_two(self.num_segments):
            raise ValueError(f"num_segments is {self.num_segments!r}, expected None or a power of two")
        if not isinstance(self.keep_q, bool):
            raise TypeError(f"keep_q is {self.keep_q!r}, expected a bool")

    def fitted(self, problem: Problem, stage: str = "") -> "StageConfig":
        """The same config with every tile shortened to what divides the problem's (padded) dimensions, and to what the stage can take."""
        fitted = dataclasses.replace(
            self,
            siz_b_LQ=fit(self.siz_b_LQ, problem.L),
            siz_b_LKV=fit(self.siz_b_LKV, problem.L),
            siz_b_DHQK=fit(self.siz_b_DHQK, problem.DHQK),
            siz_b_DHHV=fit(self.siz_b_DHHV, problem.DHHV),
            siz_b_loop=min(fit(self.siz_b_loop, problem.DHQK), fit(self.siz_b_loop, problem.DHHV)),
            keep_q=self.keep_q and is_power_of_two(problem.DHQK),
        )
        if stage in ("parallel_bw_dP", "parallel_bw_dQKV"):
            return dataclasses.replace(fitted, siz_b_LQ=min(fitted.siz_b_LQ, problem.T))
        if stage not in WALKS:
            return fitted
        rows, part = fit(self.siz_b_loop, getattr(problem, WALKS[stage])), f"siz_b_{WALKS[stage]}"
        changed: dict[str, Any] = {"siz_b_LKV": problem.L, "siz_b_loop": rows, part: min(getattr(fitted, part), rows)}
        return dataclasses.replace(fitted, **changed)

    def _programs(self, problem: Problem) -> int:
        """Of a recurrence over one part of the sequence."""
        return problem.BNH * blocks(problem.DHHV, self.siz_b_DHHV) * blocks(problem.DHQK, self.siz_b_DHQK)

    def narrowed(self, problem: Problem, recurrences: int = 1) -> "StageConfig":
        """The (fitted) config of so many recurrences with smaller blocks, down to 64 columns a side, where there are few programs."""
        stage = self
        for name in ("siz_b_DHHV", "siz_b_DHQK") * 2:
            size = getattr(stage, name)
            if size > 64 and recurrences * stage._programs(problem) < ENOUGH_PROGRAMS:
                changed: dict[str, Any] = {name: size // 2}
                stage = dataclasses.replace(stage, **changed)
        return stage

    def segments(self, problem: Problem, recurrences: int = 1) -> int:
        """Parts of the sequence that so many recurrences work on at the same time: num_segments, cut to what divides the chunks."""
        filling = max(ENOUGH_PROGRAMS // max(recurrences * self._programs(problem), 1), 1)
        wanted = filling if self.num_segments is None else self.num_segments
        segments = min(1 << (wanted.bit_length() - 1), MAX_SEGMENTS, problem.NC & -problem.NC)
        return segments if self.num_segments is not None or segments >= LEAST_SEGMENTS else 1


STAGES = (  # of mlstm_chunkwise
    "chunk_gates",
    "recurrent_fw_C",
    "parallel_fw_H",
    "parallel_fw_P",
    "recurrent_fw_H",
    "parallel_bw_dP",
    "recurrent_bw_dC",
    "parallel_bw_dQKV",
    "parallel_bw_P",
    "recurrent_bw_dQ",
    "recurrent_bw_dK",
    "recurrent_bw_dV",
)
ALL_STAGES = (*STAGES, "recurrent_step")
PLANS = ("stateless_forward", "stateless_backward")  # what decides which of them run
# Stages without states in memory have chunks of their own: of siz_b_LKV steps of the stage named here, where those are fewer than L.
CHUNK_OF = {
    **dict.fromkeys(("parallel_fw_P", "recurrent_fw_H"), "recurrent_fw_H"),
    **dict.fromkeys(("parallel_bw_P", "recurrent_bw_dQ", "recurrent_bw_dK", "recurrent_bw_dV"), "recurrent_bw_dQ"),
}
# Stages of stages/walk.py, and the head dimension of the rows of their state.
WALKS = {"recurrent_fw_H": "DHQK", "recurrent_bw_dQ": "DHHV", "recurrent_bw_dK": "DHHV", "recurrent_bw_dV": "DHQK"}


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Everything that may be tuned. What is left None are filled from the tuned row or the heuristic.

    Attributes:
      chunk_size: L, a power of two >= 16.
      precision: of float32 products. None: true float32 quality, as six bfloat16 products on the tensor cores.
      stateless_forward: h by parallel_fw_P and recurrent_fw_H, which keep the states on the chip, and store those alone that the backward
        pass is to be given; else by recurrent_fw_C and parallel_fw_H. A number: from so many heads, B * NH, on, as fewer do not fill a
        device; segments of their sequences count where heads are wide and segments long (``walk_segments``).
      stateless_backward: likewise dq, dk and dv by parallel_bw_P, recurrent_bw_dQ, recurrent_bw_dK and recurrent_bw_dV, without segments;
        else by parallel_bw_dP, recurrent_bw_dC and parallel_bw_dQKV.
      chunk_gates, ..., recurrent_step: tiles of the stages.
    """

    chunk_size: int | None = None
    precision: Precision = None
    stateless_forward: int | None = None
    stateless_backward: int | None = None
    chunk_gates: StageConfig | None = None
    recurrent_fw_C: StageConfig | None = None
    parallel_fw_H: StageConfig | None = None
    parallel_fw_P: StageConfig | None = None
    recurrent_fw_H: StageConfig | None = None
    parallel_bw_dP: StageConfig | None = None
    recurrent_bw_dC: StageConfig | None = None
    parallel_bw_dQKV: StageConfig | None = None
    parallel_bw_P: StageConfig | None = None
    recurrent_bw_dQ: StageConfig | None = None
    recurrent_bw_dK: StageConfig | None = None
    recurrent_bw_dV: StageConfig | None = None
    recurrent_step: StageConfig | None = None

    def __post_init__(self):
        object.__setattr__(self, "chunk_size", check_chunk_size(self.chunk_size))
        if not isinstance(self.precision, Precision):
            raise TypeError(f"config.precision is {self.precision!r}, expected None, a jax.lax.Precision or a jax.lax.DotAlgorithmPreset")
        for name in PLANS:
            heads = getattr(self, name)
            if not isinstance(heads, int | None) or (heads or 0) < 0:
                raise TypeError(f"config.{name} is {heads!r}, expected None, a bool or a number of heads")
        for stage in ALL_STAGES:
            if not isinstance(getattr(self, stage), StageConfig | None):
                raise TypeError(f"config.{stage} is a {type(getattr(self, stage)).__name__}, expected a StageConfig or None")

    def passes(self, problem: Problem, recompute_states_in_bw: bool = True) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The stages of the forward and of the backward pass."""
        forward: tuple[str, ...] = ("recurrent_fw_C", "parallel_fw_H")
        backward: tuple[str, ...] = ("parallel_bw_dP", "recurrent_bw_dC", "parallel_bw_dQKV")
        segments = self.walk_segments(problem)
        if segments and (recompute_states_in_bw or (problem.NC % segments == 0 and self._walks_once(problem))):
            forward = ("parallel_fw_P", "recurrent_fw_H")
        if recompute_states_in_bw and 0 < (self.stateless_backward or 0) <= problem.BNH:
            backward = ("parallel_bw_P", "recurrent_bw_dQ", "recurrent_bw_dK", "recurrent_bw_dV")
        return ("chunk_gates", *forward), ("chunk_gates", *backward)

    def _walks_once(self, problem: Problem) -> bool:
        """Whether recurrent_fw_H takes one launch: further ones would have other rows of the states that it stores."""
        stage = self.recurrent_fw_H
        return stage is None or stage.fitted(self.problem_of("recurrent_fw_H", problem), "recurrent_fw_H").siz_b_loop == problem.DHQK

    def walk_segments(self, problem: Problem) -> int:
        """Equal parts of a sequence, of whole chunks of recurrent_fw_H, that a forward pass without states takes for heads.

        The least power of two that makes as many heads as it is to have; 0 where there is none, and where it is not wanted. Whether the
        backward pass recomputes the states is asked by ``passes``.
        """
        heads, stage = self.stateless_forward or 0, self.recurrent_fw_H
        chunks = problem.NC if stage is None else self.problem_of("recurrent_fw_H", problem).NC
        whole_chunks = chunks & -chunks
        if stage is not None and stage.num_segments is not None:
            segments = min(stage.num_segments, whole_chunks)
        else:
            segments = next_power_of_two(-(-heads // max(problem.BNH, 1)))
            small = problem.DHQK * problem.DHHV < LEAST_SEGMENTED_STATE or problem.S // segments < LEAST_SEGMENT_STEPS
            if small or segments > whole_chunks:
                segments = 1
        return segments if 0 < heads <= problem.BNH * segments else 0

    def problem_of(self, stage: str, problem: Problem) -> Problem:
        """The problem in chunks as the stage takes them."""
        if stage not in CHUNK_OF:
            return problem
        return dataclasses.replace(problem, L=min(self.stage(CHUNK_OF[stage]).siz_b_LKV, problem.L))

    def or_else(self, other: "KernelConfig") -> "KernelConfig":
        """This config, with what it leaves None taken from the other."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return dataclasses.replace(other, **{name: x for name, x in given.items() if x is not None})

    def dot_precision(self, dtype: jnp.dtype, interpret: bool) -> Precision:
        """The precision of products of tiles of dtype; a CPU, which interprets, has no split algorithms but multiplies exactly."""
        if dtype != jnp.float32:
            return None
        if interpret and not isinstance(self.precision, lax.Precision):
            return lax.Precision.HIGHEST
        return lax.DotAlgorithmPreset.BF16_BF16_F32_X6 if self.precision is None else self.precision

    @property
    def L(self) -> int:
        if self.chunk_size is None:
            raise ValueError("config.chunk_size is None: this config was not filled by config_for")
        return self.chunk_size

    def stage(self, name: str) -> StageConfig:
        stage = getattr(self, name)
        if stage is None:
            raise ValueError(f"config.{name} is None: this config was not filled by config_for")
        return stage


# Devices with the multiprocessor of a tuned one.
_SAME_CHIP = (("H100", "nvidia_h200"), ("H200", "nvidia_h200"), ("H800", "nvidia_h200"))


def tuning_name(device_kind: str) -> str:
    """The name in tuning/ of a device's own rows, without .json."""
    return device_kind.lower().replace(" ", "_")


@functools.cache
def tuned_rows(device_kind: str) -> tuple[dict[str, Any], ...]:
    """The rows of tuning/<device kind>.json, else those of the same chip; none for a device that was never tuned."""
    names = [tuning_name(device_kind), *(name for chip, name in _SAME_CHIP if chip in device_kind)]
    files = [resources.files("mlstm_pallas") / "tuning" / f"{name}.json" for name in names]
    return next((tuple(json.loads(file.read_text())["rows"]) for file in files if file.is_file()), ())


def config_from_row(row: dict) -> KernelConfig:
    stages: dict[str, Any] = {name: StageConfig(**row[name]) for name in ALL_STAGES if name in row}
    plans = {name: row.get(name) for name in PLANS}
    return KernelConfig(chunk_size=row["chunk_size"], **plans, **stages)


def config_from_rows(rows: Sequence[dict[str, Any]], DHQK: int, DHHV: int, dtype: str) -> KernelConfig | None:
    """The row of these head dimensions, else of the smallest that are no smaller, else of the largest; None without one of this dtype.

    A stage shortens the tiles of a row to its head. Where that would cut the backward walks into more launches, states are stored instead.
    """
    rows = sorted((row for row in rows if row["dtype"] == dtype), key=lambda row: row["DHQK"] * row["DHHV"])
    covering = (row for row in rows if row["DHQK"] >= DHQK and row["DHHV"] >= DHHV)
    row = next(covering, rows[-1] if rows else None)
    if row is None:
        return None
    config = config_from_row(row)
    walk = config.recurrent_bw_dQ
    now, tuned = (1 if walk is None else size // fit(walk.siz_b_loop, size) for size in (DHHV, row["DHHV"]))
    return dataclasses.replace(config, stateless_backward=False) if now > tuned else config


def tuned_config(device_kind: str, DHQK: int, DHHV: int, dtype: jnp.dtype) -> KernelConfig | None:
    return config_from_rows(tuned_rows(device_kind), DHQK, DHHV, dtype.name)


def heuristic_config(DHQK: int, dtype: jnp.dtype) -> KernelConfig:
    """Tiles that fit 99 KiB of shared memory, the least of the supported devices, at any head size."""
    wide = dtype.itemsize > 2
    recurrence = StageConfig(siz_b_LKV=64, siz_b_DHQK=64, siz_b_DHHV=64, num_warps=4, num_stages=2)
    stages, step, columns = (2, 32, 64) if wide else (3, 64, 128)
    tiles_alone = StageConfig(num_warps=4, num_stages=1)
    # Two programs on a multiprocessor of Hopper.
    walk = StageConfig(siz_b_LKV=32, siz_b_DHQK=64, siz_b_DHHV=64, siz_b_loop=256, num_warps=4, num_stages=2)
    walk_over_keys = walk if wide else dataclasses.replace(walk, siz_b_DHQK=128)
    return KernelConfig(
        chunk_size=64,
        chunk_gates=StageConfig(siz_b_LQ=16, num_warps=1, num_stages=1),
        recurrent_fw_C=recurrence,
        parallel_fw_H=StageConfig(
            siz_b_LQ=64,
            siz_b_LKV=32,
            siz_b_DHQK=32 if wide else 64,
            siz_b_DHHV=128,
            num_warps=4,
            num_stages=2,
            keep_q=not wide and DHQK <= 256,
        ),
        parallel_fw_P=tiles_alone,
        recurrent_fw_H=walk_over_keys,
        parallel_bw_dP=StageConfig(siz_b_LQ=64, siz_b_loop=step, num_warps=4, num_stages=stages),
        recurrent_bw_dC=recurrence,
        parallel_bw_dQKV=StageConfig(siz_b_LQ=64, siz_b_DHQK=columns, siz_b_DHHV=columns, siz_b_loop=step, num_warps=4, num_stages=stages),
        parallel_bw_P=dataclasses.replace(tiles_alone, num_stages=3),
        recurrent_bw_dQ=walk,
        recurrent_bw_dK=walk,
        recurrent_bw_dV=walk_over_keys,
        # Up to 32 KiB a program, all asked for at once: 128 programs for 8 heads of 256/512, four on a multiprocessor where there are more.
        recurrent_step=StageConfig(siz_b_DHQK=256, siz_b_DHHV=32, num_warps=8, num_stages=1),
    )


def config_for(
    DHQK: int,
    DHHV: int,
    S: int,
    dtype: jnp.dtype,
    *,
    device_kind: str = UNKNOWN_DEVICE,
    chunk_size: int | None = None,
    explicit: KernelConfig | None = None,
) -> KernelConfig:
    """The complete config of a call: what is explicit, else the tuned row of the device, else the heuristic.

    The chunk size is clamped to S; a tile beyond its axis is shortened when a stage is launched.
    """
    DHQK, DHHV = padded_head_dim(DHQK), padded_head_dim(DHHV)
    heuristic = heuristic_config(DHQK, dtype)
    filled = tuned_config(device_kind, DHQK, DHHV, dtype)
    filled = heuristic if filled is None else filled.or_else(heuristic)
    if explicit is not None:
        filled = explicit.or_else(filled)
    if chunk_size is not None:
        filled = dataclasses.replace(filled, chunk_size=chunk_size)
    return dataclasses.replace(filled, chunk_size=clamp_chunk_size(filled.L, S))
