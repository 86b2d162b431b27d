"""What a stage of mlstm_chunkwise multiplies and moves, in its own chunks.

A FLOP is a multiplication or an addition of a matrix product; products of two steps of one chunk
count for s <= t only. Bytes: each input is read once, each output is written once.
"""

from typing import NamedTuple


class Cost(NamedTuple):
    """FLOPs of matrix products, and bytes that are read and written."""

    flops: int
    bytes: int


def cost(name, p, itemsize):
    """The cost of a stage in the chunks of p; itemsize: of the kernel dtype."""
    steps, chunks, K, V = p.BNH * p.S, p.BNH * p.NC, p.DHQK, p.DHV
    pairs = steps * (p.L + 1)  # of steps s <= t, twice
    inter, states, initial = 2 * steps * K * V, chunks * K * V, p.BNH * K * V
    # FLOPs, numbers of the kernel dtype, and those of float32, of which the comments name most.
    costs = {
        # i, f, and e and u in two floats each, w, m, abar; gamma, m at the boundaries and
        # m_initial. In the backward pass Mosaic GPU writes the flags too, 4 bytes per step.
        "chunk_gates": (0, 0, 9 * steps + 2 * chunks + 2 * p.BNH),
        # n, e, u, w, m, z
        "parallel_fw_H": (
            inter + pairs * (K + V),
            steps * (2 * K + 2 * V) + states,
            chunks * K + 7 * steps,
        ),
        # e, u, w, abar, m, r, z, and n before each chunk
        "parallel_fw_P": (pairs * K, steps * (3 * K + p.L), 9 * steps + chunks * K),
        # the weights of the steps
        "split_products": (inter, steps * (K + V), steps),
        # r, gamma, the first and the last C
        "recurrent_fw_H": (
            2 * inter + pairs * V,
            steps * (2 * K + 2 * V + p.L),
            steps + chunks + 2 * initial,
        ),
        # gamma, the first and the last C; abar, and n at all chunk boundaries
        "recurrent_fw_C": (
            inter,
            steps * (K + V) + states,
            chunks + 2 * initial + steps + (chunks + 2 * p.BNH) * K,
        ),
        # both recurrences, each with gamma, the first and the last state, which a call without
        # initial and last states leaves out. delta is not in it: h is steps V more to read.
        "recurrent_bw_dC": (
            2 * inter,
            2 * (steps * (K + V) + states),
            2 * (chunks + 2 * initial),
        ),
        # e, u, w, abar, m, z, delta, three sums for the gates, the terms of dn
        "parallel_bw_dP": (
            pairs * (K + V),
            steps * (4 * K + 3 * V + 2 * p.L),
            12 * steps + chunks * K,
        ),
        # n, dn, w, abar, 1/den, dz den; two sums per step and one per chunk for the gates
        "parallel_bw_dQKV": (
            3 * inter + pairs * (2 * K + V),
            steps * (4 * K + 3 * V + 2 * p.L) + 2 * states,
            2 * chunks * K + 6 * steps + chunks,
        ),
        # n, dn, e, u, w, abar, 1/den, dz den; five sums per step and one per chunk for the gates
        "chunk_gradients": (
            3 * inter + pairs * (3 * K + 2 * V),
            steps * (4 * K + 3 * V) + 2 * states,
            2 * chunks * K + 13 * steps + chunks,
        ),
    }
    flops, numbers, floats = costs[name]
    return Cost(flops, itemsize * numbers + 4 * floats)


def launch_cost(name, call, itemsize):
    """The cost of a stage as it runs.

    On Mosaic GPU recurrent_fw_H scales v: it reads abar, which parallel_fw_P does not, and
    parallel_fw_P writes no keys. Likewise parallel_bw_dP writes no queries and keys.
    """
    p = call.problem
    flops, moved = cost(name, p, itemsize)
    more = {}  # bytes per step
    if call.lowering.folder == "mosaic_gpu":
        more = {"parallel_fw_P": -itemsize * p.DHQK - 4, "recurrent_fw_H": 4}
        more["parallel_bw_dP"] = -2 * itemsize * p.DHQK
    return Cost(flops, moved + more.get(name, 0) * p.BNH * p.S)
