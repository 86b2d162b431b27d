"""What a stage multiplies and moves, in its own chunks.

A FLOP is a multiplication or an addition of a matrix product; products of two steps of one chunk
count for s <= t alone. Bytes: each input read once, each output written once. R stands for B NH S,
K for DHQK, V for DHHV. In each function the first bytes are of the kernel dtype, those that its
docstring names are float32.
"""

from collections.abc import Callable
from typing import NamedTuple

from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import Launch


class Cost(NamedTuple):
    """FLOPs of matrix products, and bytes that are read and written."""

    flops: int
    bytes: int


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


def _split_products(p: Problem, itemsize: int) -> Cost:
    """The weights of the steps."""
    R, K, V = p.BNH * p.S, p.DHQK, p.DHHV
    return Cost(2 * R * K * V, itemsize * R * (K + V) + 4 * R)


COSTS: dict[str, Callable[[Problem, int], Cost]] = {
    "chunk_gates": _chunk_gates,
    "parallel_fw_H": _parallel_fw_H,
    "parallel_fw_P": _parallel_fw_P,
    "split_products": _split_products,
    "recurrent_fw_H": _recurrent_fw_H,
    "recurrent_fw_C": _recurrent_fw_C,
    "recurrent_bw_dC": _recurrent_bw_dC,
    "parallel_bw_dP": _parallel_bw_dP,
    "parallel_bw_dQKV": _parallel_bw_dQKV,
    "recurrent_step": _recurrent_step,
}


def of_stage(name: str, call: Launch, itemsize: int, *, weighted: bool = False) -> Cost:
    """The cost of a stage as it runs.

    On Mosaic GPU recurrent_fw_H weights the keys: it reads abar, which parallel_fw_P does not, and
    that writes no keys. parallel_bw_dP likewise writes no queries and keys. With weighted,
    recurrent_bw_dC reads r and abar. Where parallel_bw_dQKV makes P and dP it has their FLOPs too.
    It then reads e and u, of two floats each, in place of the tiles, and writes three sums.
    """
    p = call.problem
    flops, moved = COSTS[name](p, itemsize)
    more: dict[str, int] = {"recurrent_bw_dC": 8} if weighted else {}
    if call.lowering.folder == "mosaic_gpu":
        more |= {"parallel_fw_P": -itemsize * p.DHQK - 4, "recurrent_fw_H": 4}
        more |= {"parallel_bw_dP": -2 * itemsize * p.DHQK}
    if getattr(call.tiles, "recomputes_scores", False):
        flops += COSTS["parallel_bw_dP"](p, itemsize).flops
        more[name] = 4 * (4 + 3) - 2 * itemsize * p.L
    moved += more.get(name, 0) * p.BNH * p.S
    return Cost(flops, moved)
