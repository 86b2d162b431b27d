"""Matrix FLOPs and bytes of the chunkwise mLSTM, stage by stage and whole, and the time that a device cannot go below.

Pure functions. Notation: B batch, NH heads, S steps, K = DHQK, V = DHHV, L steps of a chunk, NC = ceil(S / L) chunks, R = B NH S rows,
w bytes of an element of q, k, v; gates, stabilisers and norms have 4. A FLOP is a multiplication or an addition of a matrix product;
products of two rows of one chunk count for s <= t alone, R (L + 1) / 2 pairs. Bytes: each input once, each output once.
"""

from collections.abc import Sequence
from typing import NamedTuple

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
    def rows(self) -> int:
        return self.B * self.NH * self.S

    def chunks(self, L: int) -> int:
        """Of all heads together: B NH NC."""
        return self.B * self.NH * -(-self.S // L)

    def __str__(self) -> str:
        return "x".join(map(str, self))


class Cost(NamedTuple):
    """What has to be computed and moved at the least."""

    flops: int
    bytes: int


def chunk_gates(shape: Shape, L: int, itemsize: int) -> Cost:
    """No product. Bytes: i, f, and e and u in two floats each, w, m, abar, 4 * 9 R; gamma, m at the borders and m_initial."""
    heads = shape.B * shape.NH
    return Cost(0, 4 * (9 * shape.rows + 2 * shape.chunks(L) + 2 * heads))


def recurrent_fw_C(shape: Shape, L: int, itemsize: int) -> Cost:
    """FLOPs: sum kbar v^T, 2 R K V. Bytes: kbar, v and the states, w (R (K + V) + B NH NC K V). Floats: gamma, the first and the last C."""
    _, _, _, K, V = shape
    R, NC, heads = shape.rows, shape.chunks(L), shape.B * shape.NH
    return Cost(2 * R * K * V, itemsize * (R * (K + V) + NC * K * V) + 4 * (NC + 2 * heads * K * V))


def parallel_fw_H(shape: Shape, L: int, itemsize: int) -> Cost:
    """FLOPs: C^T q, 2 R K V; q.k and P v, R (L + 1) (K + V). Bytes: q, k, v, h and C, w (R (2 K + 2 V) + B NH NC K V); n, e, u, w, m, z."""
    _, _, _, K, V = shape
    R, NC = shape.rows, shape.chunks(L)
    return Cost(2 * R * K * V + R * (L + 1) * (K + V), itemsize * (R * (2 * K + 2 * V) + NC * K * V) + 4 * (NC * K + 7 * R))


def parallel_fw_P(shape: Shape, L: int, itemsize: int) -> Cost:
    """FLOPs: q.k, R (L + 1) K. Bytes: q, k, kbar and P, w R (3 K + L). Floats: e, u, w, abar, m, r, z; gamma, the first and the last n."""
    _, _, _, K, _ = shape
    R, NC, heads = shape.rows, shape.chunks(L), shape.B * shape.NH
    return Cost(R * (L + 1) * K, itemsize * R * (3 * K + L) + 4 * (9 * R + NC + 2 * heads * K))


def recurrent_fw_H(shape: Shape, L: int, itemsize: int) -> Cost:
    """FLOPs: C^T q and sum kbar v^T, 4 R K V; P v, R (L + 1) V. Bytes: q, kbar, v, h and P, w R (2 K + 2 V + L).

    Floats: r, gamma, the first and the last C.
    """
    _, _, _, K, V = shape
    R, NC, heads = shape.rows, shape.chunks(L), shape.B * shape.NH
    return Cost(4 * R * K * V + R * (L + 1) * V, itemsize * R * (2 * K + 2 * V + L) + 4 * (R + NC + 2 * heads * K * V))


def parallel_bw_dP(shape: Shape, L: int, itemsize: int) -> Cost:
    """FLOPs: q.k and dh.v, R (L + 1) (K + V). Bytes: q, k, v, dh, qbar, kbar, P and dP, w R (4 K + 2 V + 2 L).

    Floats: e, u, w, abar, 1/den, dz den, three row sums of the gates' gradients, what a chunk adds to n and to dn.
    """
    _, _, _, K, V = shape
    R, NC = shape.rows, shape.chunks(L)
    return Cost(R * (L + 1) * (K + V), itemsize * R * (4 * K + 2 * V + 2 * L) + 4 * (11 * R + 2 * NC * K))


def recurrent_bw_dC(shape: Shape, L: int, itemsize: int) -> Cost:
    """FLOPs: sum qbar dh^T, 2 R K V. Bytes: as recurrent_fw_C, with qbar for kbar and dh for v."""
    return recurrent_fw_C(shape, L, itemsize)


def parallel_bw_dQKV(shape: Shape, L: int, itemsize: int) -> Cost:
    """FLOPs: C dh, dC v, dC^T k, 6 R K V; dP k, dP^T q and P^T dh, R (L + 1) (2 K + V).

    Bytes: q, k, v, dh, dq, dk, dv, P, dP and both states, w (R (4 K + 3 V + 2 L) + 2 B NH NC K V). Floats: n, dn, w, abar, 1/den, dz den,
    two row sums and one of each chunk for the gates' gradients.
    """
    _, _, _, K, V = shape
    R, NC = shape.rows, shape.chunks(L)
    flops = 6 * R * K * V + R * (L + 1) * (2 * K + V)
    return Cost(flops, itemsize * (R * (4 * K + 3 * V + 2 * L) + 2 * NC * K * V) + 4 * (2 * NC * K + 6 * R + NC))


def parallel_bw_P(shape: Shape, L: int, itemsize: int) -> Cost:
    """FLOPs: q.k, dh.v, dP k and dP^T q, R (L + 1) (3 K + V). Bytes: q, k, v, dh, qbar, kbar, the chunk's own dq and dk, and P,
    w R (6 K + 2 V + L).

    Floats: e, u, w, abar, 1/den, dz den, four row sums of the gates' gradients, n and what a chunk adds to dn.
    """
    _, _, _, K, V = shape
    R, NC = shape.rows, shape.chunks(L)
    return Cost(R * (L + 1) * (3 * K + V), itemsize * R * (6 * K + 2 * V + L) + 4 * (12 * R + 2 * NC * K))


def recurrent_bw_dQ(shape: Shape, L: int, itemsize: int) -> Cost:
    """FLOPs: C dh and sum kbar v^T, 4 R K V. Bytes: kbar, qbar, the chunk's own dq, dq, v and dh, w R (4 K + 2 V).

    Floats: a row scaling and a row sum, gamma, the first and the last C.
    """
    _, _, _, K, V = shape
    R, NC, heads = shape.rows, shape.chunks(L), shape.B * shape.NH
    floats = 2 * R + NC + 2 * heads * K * V
    return Cost(4 * R * K * V, itemsize * R * (4 * K + 2 * V) + 4 * floats)


def recurrent_bw_dK(shape: Shape, L: int, itemsize: int) -> Cost:
    """FLOPs: dC v and sum qbar dh^T, 4 R K V. Bytes: as recurrent_bw_dQ, with dC for C, and dn."""
    found = recurrent_bw_dQ(shape, L, itemsize)
    return Cost(found.flops, found.bytes + 4 * shape.chunks(L) * shape.DHQK)


def recurrent_bw_dV(shape: Shape, L: int, itemsize: int) -> Cost:
    """FLOPs: dC^T k and sum qbar dh^T, 4 R K V; P^T dh, R (L + 1) V. Bytes: k, qbar, dh, dv and P, w R (2 K + 2 V + L).

    Floats: abar, gamma, the last dC.
    """
    _, _, _, K, V = shape
    R, NC, heads = shape.rows, shape.chunks(L), shape.B * shape.NH
    return Cost(4 * R * K * V + R * (L + 1) * V, itemsize * R * (2 * K + 2 * V + L) + 4 * (R + NC + heads * K * V))


STAGES = {
    stage.__name__: stage
    for stage in (
        chunk_gates,
        recurrent_fw_C,
        parallel_fw_H,
        parallel_fw_P,
        recurrent_fw_H,
        parallel_bw_dP,
        recurrent_bw_dC,
        parallel_bw_dQKV,
        parallel_bw_P,
        recurrent_bw_dQ,
        recurrent_bw_dK,
        recurrent_bw_dV,
    )
}


def forward(shape: Shape, itemsize: int, L: int = REFERENCE_CHUNK) -> Cost:
    """FLOPs of recurrent_fw_C and parallel_fw_H. Bytes: q, k, v, h, w R (2 K + 2 V); i, f, 8 R. States stay on the chip."""
    L = min(L, shape.S)
    flops = sum(stage(shape, L, itemsize).flops for stage in (recurrent_fw_C, parallel_fw_H))
    return Cost(flops, shape.rows * (itemsize * (2 * shape.DHQK + 2 * shape.DHHV) + 8))


def backward(shape: Shape, itemsize: int, L: int = REFERENCE_CHUNK) -> Cost:
    """FLOPs of recurrent_fw_C again (states are not kept), parallel_bw_dP, recurrent_bw_dC and parallel_bw_dQKV.

    Bytes: q, k, v, h, dh, dq, dk, dv, w R (4 K + 4 V); i, f, z, m, di, df, 24 R. States and tiles stay on the chip.
    """
    L = min(L, shape.S)
    flops = sum(stage(shape, L, itemsize).flops for stage in (recurrent_fw_C, parallel_bw_dP, recurrent_bw_dC, parallel_bw_dQKV))
    return Cost(flops, shape.rows * (itemsize * (4 * shape.DHQK + 4 * shape.DHHV) + 24))


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
    """(FLOP/s, bytes/s) of a known device; None where nobody measured.

    A float32 product is six bfloat16 ones: the fastest way to its digits there is on a known device.
    """
    flops, bandwidth = next((rates for part, rates in DEVICE_RATES.items() if part in device_kind), (None, None))
    return flops and flops / {"bfloat16": 1, "float32": 6}[dtype], bandwidth


def floor_seconds(phases: Sequence[Cost], flops_rate: float, bytes_rate: float) -> float:
    """The roofline: in each phase the slower of its products and its traffic, each at the device's full rate."""
    return sum(max(phase.flops / flops_rate, phase.bytes / bytes_rate) for phase in phases)
