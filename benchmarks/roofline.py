"""The roofline: FLOPs and bytes of the chunkwise mLSTM and of attention, and the least time.

The least time is what a device needs for them at its full rates. ``COSTS`` and ``of_stage`` have
the cost of a stage. A FLOP is a multiplication or an addition of a matrix product; products of two
steps of one chunk count for s <= t alone. Bytes: each input read once, each output written once.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Launch, Stage

# Whole functions are counted at one chunk size, whatever chunk size runs: more work for the same
# result is not a better rate.
REFERENCE_CHUNK = 128

# (FLOP/s of bfloat16 products, bytes/s of a copy), measured; by a part of the device's name.
DEVICE_RATES = {"H200": (790e12, 4.27e12)}


class Cost(NamedTuple):
    """FLOPs of matrix products, and bytes that are read and written."""

    flops: int
    bytes: int


# The cost of a stage in its own chunks; itemsize: bytes of an element of q, k, v. R stands for
# B NH S, K for DHQK, V for DHHV. The first bytes are of the kernel dtype, those named are float32.


def _chunk_gates(p: Problem, itemsize: int) -> Cost:
    """i, f, and e and u in two floats each, w, m, abar; gamma, m at the boundaries and m_initial.

    In the backward pass Mosaic GPU writes the flags too, 4 R.
    """
    return Cost(0, 4 * (9 * p.BNH * p.S + 2 * p.BNH * p.NC + 2 * p.BNH))


def _parallel_fw_H(p: Problem, itemsize: int) -> Cost:
    """n, e, u, w, m, z."""
    R, K, V, states = p.BNH * p.S, p.DHQK, p.DHHV, p.BNH * p.NC
    flops = 2 * R * K * V + R * (p.L + 1) * (K + V)
    return Cost(flops, itemsize * (R * (2 * K + 2 * V) + states * K * V) + 4 * (states * K + 7 * R))


def _parallel_fw_P(p: Problem, itemsize: int) -> Cost:
    """e, u, w, abar, m, r, z, and n before each chunk."""
    R, K = p.BNH * p.S, p.DHQK
    floats = 9 * R + p.BNH * p.NC * K
    return Cost(R * (p.L + 1) * K, itemsize * R * (3 * K + p.L) + 4 * floats)


def _recurrent_fw_H(p: Problem, itemsize: int) -> Cost:
    """r, gamma, the first and the last C."""
    R, K, V = p.BNH * p.S, p.DHQK, p.DHHV
    floats = R + p.BNH * p.NC + 2 * p.BNH * K * V
    flops = 4 * R * K * V + R * (p.L + 1) * V
    return Cost(flops, itemsize * R * (2 * K + 2 * V + p.L) + 4 * floats)


def _recurrence(p: Problem, itemsize: int) -> Cost:
    """gamma, the first and the last X."""
    R, K, V, states = p.BNH * p.S, p.DHQK, p.DHHV, p.BNH * p.NC
    floats = states + 2 * p.BNH * K * V
    return Cost(2 * R * K * V, itemsize * (R * (K + V) + states * K * V) + 4 * floats)


def _recurrent_fw_C(p: Problem, itemsize: int) -> Cost:
    """Beside the recurrence abar, and n at all chunk boundaries."""
    flops, moved = _recurrence(p, itemsize)
    return Cost(flops, moved + 4 * p.BNH * (p.S + (p.NC + 2) * p.DHQK))


def _recurrent_bw_dC(p: Problem, itemsize: int) -> Cost:
    """Both recurrences. delta is not in it: h is R V more to read."""
    return Cost(*(2 * x for x in _recurrence(p, itemsize)))


def _parallel_bw_dP(p: Problem, itemsize: int) -> Cost:
    """e, u, w, abar, m, z, 1/den, dz, dz den, dm, three sums for the gates, and the terms of dn."""
    R, K, V = p.BNH * p.S, p.DHQK, p.DHHV
    floats = 15 * R + p.BNH * p.NC * K
    flops = R * (p.L + 1) * (K + V)
    return Cost(flops, itemsize * R * (4 * K + 3 * V + 2 * p.L) + 4 * floats)


def _parallel_bw_dQKV(p: Problem, itemsize: int) -> Cost:
    """n, dn, w, abar, 1/den, dz den, two sums a step and one a chunk for the gates' gradients."""
    R, K, V, states = p.BNH * p.S, p.DHQK, p.DHHV, p.BNH * p.NC
    flops = 6 * R * K * V + R * (p.L + 1) * (2 * K + V)
    floats = 2 * states * K + 6 * R + states
    moved = R * (4 * K + 3 * V + 2 * p.L) + 2 * states * K * V
    return Cost(flops, itemsize * moved + 4 * floats)


def _recurrent_step(p: Problem, itemsize: int) -> Cost:
    """q, k, v, h and n twice; itemsize is that of every array."""
    K, V = p.DHQK, p.DHHV
    return Cost(4 * p.BNH * K * V, itemsize * p.BNH * (2 * K * V + 4 * K + 2 * V + 4))


COSTS: dict[str, Callable[[Problem, int], Cost]] = {
    "chunk_gates": _chunk_gates,
    "parallel_fw_H": _parallel_fw_H,
    "parallel_fw_P": _parallel_fw_P,
    "recurrent_fw_H": _recurrent_fw_H,
    "recurrent_fw_C": _recurrent_fw_C,
    "recurrent_bw_dC": _recurrent_bw_dC,
    "parallel_bw_dP": _parallel_bw_dP,
    "parallel_bw_dQKV": _parallel_bw_dQKV,
    "recurrent_step": _recurrent_step,
}


class Shape(NamedTuple):
    """Dimensions of one call."""

    B: int
    NH: int
    S: int
    DHQK: int
    DHHV: int

    @property
    def steps(self) -> int:
        """Steps of all heads together."""
        return self.B * self.NH * self.S

    def __str__(self) -> str:
        return "x".join(map(str, self))


# The stages of the forward pass, by whether it is the fused scan.
FORWARD = {
    False: ("chunk_gates", "recurrent_fw_C", "parallel_fw_H"),
    True: ("chunk_gates", "parallel_fw_P", "recurrent_fw_H"),
}


def backward_stages(recomputes_scores: bool = False) -> tuple[str, ...]:
    """The stages of the backward pass; recomputes_scores: whether parallel_bw_dQKV makes P, dP."""
    scores = () if recomputes_scores else ("parallel_bw_dP",)
    return "chunk_gates", *scores, "recurrent_bw_dC", "parallel_bw_dQKV"


def of_stage(stage: Stage, call: Launch, itemsize: int, *, weighted: bool = False) -> Cost:
    """The cost of a stage as it runs.

    On Mosaic GPU recurrent_fw_H weights the keys: it reads abar, which parallel_fw_P does not, and
    that writes no keys. parallel_bw_dP likewise writes no queries and keys. With weighted,
    recurrent_bw_dC reads r and abar. Where parallel_bw_dQKV makes P and dP it has their FLOPs too.
    It then reads e and u, of two floats each, in place of the tiles, and writes three sums.
    """
    p = call.problem
    flops, moved = COSTS[stage.name](p, itemsize)
    more = {"recurrent_bw_dC": 8} if weighted else {}
    if call.lowering.folder == "mosaic_gpu":
        more |= {"parallel_fw_P": -itemsize * p.DHQK - 4, "recurrent_fw_H": 4}
        more |= {"parallel_bw_dP": -2 * itemsize * p.DHQK}
    if getattr(call.tiles, "recomputes_scores", False):
        flops += COSTS["parallel_bw_dP"](p, itemsize).flops
        more[stage.name] = 4 * (4 + 3) - 2 * itemsize * p.L
    moved += more.get(stage.name, 0) * p.BNH * p.S
    return Cost(flops, moved)


def _flops(shape: Shape, stages: Sequence[str]) -> int:
    L = min(REFERENCE_CHUNK, shape.S)
    chunk = Problem(1, 1, L, shape.DHQK, shape.DHHV, L, 1.0)
    per_chunk = sum(COSTS[name](chunk, 2).flops for name in stages)
    return per_chunk // L * shape.steps  # the FLOPs are proportional to the steps


def forward(shape: Shape, itemsize: int) -> Cost:
    """FLOPs with materialised states.

    Bytes: q, k, v, h and, in float32, i, f. The states stay on the chip.
    """
    moved = itemsize * (2 * shape.DHQK + 2 * shape.DHHV) + 8
    return Cost(_flops(shape, FORWARD[False]), shape.steps * moved)


def backward(shape: Shape, itemsize: int) -> Cost:
    """FLOPs with the states recomputed.

    Bytes: q, k, v, h, dh, dq, dk, dv and, in float32, i, f, z, m, di, df. States and tiles stay on
    the chip.
    """
    moved = itemsize * (4 * shape.DHQK + 4 * shape.DHHV) + 24
    return Cost(_flops(shape, backward_stages()), shape.steps * moved)


def mlstm(shape: Shape, itemsize: int, direction: str) -> tuple[Cost, ...]:
    """The phases of a direction, one after the other: "fwd", or "fwbw"."""
    passes = (forward, backward) if direction == "fwbw" else (forward,)
    return tuple(cost(shape, itemsize) for cost in passes)


def attention(
    B: int, heads: int, S: int, D: int, itemsize: int, direction: str
) -> tuple[Cost, ...]:
    """The phases of causal softmax attention, with P = B heads S (S + 1) / 2 pairs.

    FLOPs: forward q.k and P v, 4 P D; backward five products, 10 P D. Bytes: q, k, v, o; backward
    q, k, v, o, do, dq, dk, dv.
    """
    pairs, array = B * heads * S * (S + 1) // 2, itemsize * B * heads * S * D
    phases = Cost(4 * pairs * D, 4 * array), Cost(10 * pairs * D, 8 * array)
    return phases if direction == "fwbw" else phases[:1]


def device_rates(device_kind: str, dtype: str) -> tuple[float | None, float | None]:
    """(FLOP/s, bytes/s) of a device; None where they were not measured.

    float16 products are as fast as bfloat16's. A float32 product counts as six of these, which is
    the fastest way to float32 quality on a known device.
    """
    known = (rates for part, rates in DEVICE_RATES.items() if part in device_kind)
    flops, bandwidth = next(known, (None, None))
    products = {"bfloat16": 1, "float16": 1, "float32": 6}[dtype]
    return flops and flops / products, bandwidth


def floor_seconds(phases: Sequence[Cost], flops_rate: float, bytes_rate: float) -> float:
    """In each phase the slower of its products and its traffic, each at the device's full rate."""
    return sum(max(phase.flops / flops_rate, phase.bytes / bytes_rate) for phase in phases)
