"""The roofline: FLOPs and bytes of the chunkwise mLSTM and of attention, and the least time that a device needs for them.

A stage has a cost of its own (``Stage.cost``, ``of_stage``). A FLOP is a multiplication or an addition of a matrix product; products of
two steps of one chunk count for s <= t alone. Bytes: each input read once, each output written once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from mlstm_pallas.call_spec import CallSpec
from mlstm_pallas.config import heuristic_config
from mlstm_pallas.normaliser import DEFAULT_NORMALISER
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Cost, Stage, StageCall
from mlstm_pallas.stages import STAGES
from mlstm_pallas.stages.parallel_bw_dQKV import mosaic_gpu_by_chunk

# Whole functions are counted at one chunk size, whatever chunk size runs: more work for the same result is not a better rate.
REFERENCE_CHUNK = 128

# (FLOP/s of bfloat16 products, bytes/s of a copy), measured; by a part of the device's name.
DEVICE_RATES = {"H200": (790e12, 4.27e12)}


class Shape(NamedTuple):
    """Dimensions of one call."""

    B: int
    NH: int
    S: int
    DHQK: int
    DHHV: int

    @property
    def steps(self) -> int:
        """Of all heads together."""
        return self.B * self.NH * self.S

    def __str__(self) -> str:
        return "x".join(map(str, self))


def schedules(fused_min_heads: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the stages of the forward and of the backward pass, materialised (0) or with the fused scan (1), on any backend."""
    config = heuristic_config(64, jnp.dtype("bfloat16")).replace(fused_min_heads=fused_min_heads)
    spec = CallSpec(Problem(1, 1, 64, 64, 64, 64, 1.0), config, jnp.dtype("bfloat16"), DEFAULT_NORMALISER)
    return spec.forward_stages, spec.backward_stages


def of_stage(stage: Stage, call: StageCall, itemsize: int, weights_operands: bool = False) -> Cost:
    """Of a stage as it runs. On Mosaic GPU recurrent_fw_H weights the keys: parallel_fw_P writes none, and the scan reads abar.

    With weights_operands recurrent_bw_dC likewise reads r and abar, and parallel_bw_dP writes no queries and keys. Where parallel_bw_dQKV
    computes P and dP it has their FLOPs too. It then reads e and u, of two floats each, in place of the tiles, and writes three sums.
    """
    p, (flops, moved) = call.problem, stage.cost(call.problem, itemsize)
    more = {"parallel_fw_P": -itemsize * p.DHQK, "recurrent_fw_H": 4} if call.lowering.mosaic_gpu else {}
    more |= {"parallel_bw_dP": -2 * itemsize * p.DHQK, "recurrent_bw_dC": 8} if weights_operands else {}
    if stage.name == "parallel_bw_dQKV" and call.lowering.mosaic_gpu and mosaic_gpu_by_chunk(p):
        flops += STAGES["parallel_bw_dP"].cost(p, itemsize).flops
        more[stage.name] = 4 * (4 + 3) - 2 * itemsize * p.L
    moved += more.get(stage.name, 0) * p.BNH * p.S
    return Cost(flops, moved)


def _flops(shape: Shape, stages: Sequence[str]) -> int:
    L = min(REFERENCE_CHUNK, shape.S)
    chunk = Problem(1, 1, L, shape.DHQK, shape.DHHV, L, 1.0)
    return sum(STAGES[name].cost(chunk, 2).flops for name in stages) // L * shape.steps  # they are proportional to the steps


def forward(shape: Shape, itemsize: int) -> Cost:
    """FLOPs with materialised states. Bytes: q, k, v, h and, in float32, i, f; states stay on the chip."""
    return Cost(_flops(shape, schedules(0)[0]), shape.steps * (itemsize * (2 * shape.DHQK + 2 * shape.DHHV) + 8))


def backward(shape: Shape, itemsize: int) -> Cost:
    """FLOPs with the states recomputed. Bytes: q, k, v, h, dh, dq, dk, dv and, in float32, i, f, z, m, di, df; states and tiles stay on
    the chip.
    """
    return Cost(_flops(shape, schedules(0)[1]), shape.steps * (itemsize * (4 * shape.DHQK + 4 * shape.DHHV) + 24))


def mlstm(shape: Shape, itemsize: int, direction: str) -> tuple[Cost, ...]:
    """The phases of a direction, one after the other: "fwd", or "fwbw"."""
    return (forward(shape, itemsize),) + ((backward(shape, itemsize),) if direction == "fwbw" else ())


def attention(B: int, heads: int, S: int, D: int, itemsize: int, direction: str) -> tuple[Cost, ...]:
    """The phases of causal softmax attention, with P = B heads S (S + 1) / 2 pairs.

    FLOPs: forward q.k and P v, 4 P D; backward five products, 10 P D. Bytes: q, k, v, o; backward q, k, v, o, do, dq, dk, dv.
    """
    pairs, array = B * heads * S * (S + 1) // 2, itemsize * B * heads * S * D
    return (Cost(4 * pairs * D, 4 * array),) + ((Cost(10 * pairs * D, 8 * array),) if direction == "fwbw" else ())


def device_rates(device_kind: str, dtype: str) -> tuple[float | None, float | None]:
    """(FLOP/s, bytes/s) of a device; None where they were not measured.

    float16 products are as fast as bfloat16's. A float32 product counts as six of these: the fastest way to float32 quality on a known
    device.
    """
    flops, bandwidth = next((rates for part, rates in DEVICE_RATES.items() if part in device_kind), (None, None))
    return flops and flops / {"bfloat16": 1, "float16": 1, "float32": 6}[dtype], bandwidth


def floor_seconds(phases: Sequence[Cost], flops_rate: float, bytes_rate: float) -> float:
    """In each phase the slower of its products and its traffic, each at the device's full rate."""
    return sum(max(phase.flops / flops_rate, phase.bytes / bytes_rate) for phase in phases)
