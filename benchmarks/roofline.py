"""The roofline: FLOPs and bytes of the chunkwise mLSTM and of attention, and the least time.

The least time is what a device needs for them at its full rates.
``costs.py`` has the cost of a stage.
"""

from costs import Cost, cost

from mlstm_pallas.problem.dimensions import Problem

# Whole functions are counted at one chunk size, whatever chunk size runs: more work for the same
# result is not a better rate.
REFERENCE_CHUNK = 128

# (FLOP/s of bfloat16 products, bytes/s of a copy), measured; by a part of the device's name.
DEVICE_RATES = {"H200": (790e12, 4.27e12)}


# The stages whose products are counted: those of materialised and of recomputed states.
FORWARD = "recurrent_fw_C", "parallel_fw_H"
BACKWARD = "parallel_bw_dP", "recurrent_bw_dC", "parallel_bw_dQKV"


def _flops(shape, stages):
    L = min(REFERENCE_CHUNK, shape.S)
    chunk = Problem(1, 1, L, shape.DHQK, shape.DHV, L, 1.0)
    per_chunk = sum(cost(name, chunk, 2).flops for name in stages)
    return per_chunk // L * shape.steps  # the FLOPs are proportional to the steps


def forward(shape, itemsize):
    """FLOPs with materialised states.

    Bytes: q, k, v, h and, in float32, i, f. The states stay on the chip.
    """
    moved = itemsize * (2 * shape.DHQK + 2 * shape.DHV) + 8
    return Cost(_flops(shape, FORWARD), shape.steps * moved)


def backward(shape, itemsize):
    """FLOPs with the states recomputed.

    Bytes: q, k, v, h, dh, dq, dk, dv and, in float32, i, f, z, m, di, df. States and tiles stay on
    the chip.
    """
    moved = itemsize * (4 * shape.DHQK + 4 * shape.DHV) + 24
    return Cost(_flops(shape, BACKWARD), shape.steps * moved)


def mlstm(shape, itemsize, direction):
    """The phases of a direction, one after the other: "fwd", or "fwbw"."""
    passes = (forward, backward) if direction == "fwbw" else (forward,)
    return tuple(count(shape, itemsize) for count in passes)


def attention(B, heads, S, D, itemsize, direction):
    """The phases of causal softmax attention, with P = B heads S (S + 1) / 2 pairs.

    FLOPs: forward q.k and P v, 4 P D; backward five products, 10 P D. Bytes: q, k, v, o; backward
    q, k, v, o, do, dq, dk, dv.
    """
    pairs, array = B * heads * S * (S + 1) // 2, itemsize * B * heads * S * D
    phases = Cost(4 * pairs * D, 4 * array), Cost(10 * pairs * D, 8 * array)
    return phases if direction == "fwbw" else phases[:1]


def of_device(table, device_kind):
    """The value for a device, by a part of its name; None if it is not known."""
    return next((x for part, x in table.items() if part in device_kind), None)


def device_rates(device_kind, dtype):
    """(FLOP/s, bytes/s) of a device; None if they were not measured.

    float16 products are as fast as bfloat16's. A float32 product counts as six of these, which is
    the fastest way to float32 quality on a known device.
    """
    flops, bandwidth = of_device(DEVICE_RATES, device_kind) or (None, None)
    products = {"bfloat16": 1, "float16": 1, "float32": 6}[dtype]
    return flops and flops / products, bandwidth


def floor_seconds(phases, flops_rate, bytes_rate):
    """In each phase the slower of its products and its traffic, each at the device's full rate."""
    return sum(max(phase.flops / flops_rate, phase.bytes / bytes_rate) for phase in phases)
