"""chunk_gates on Mosaic GPU: the local gates and the stabiliser scan of ``stages/chunk_gates.py``.

Local gates: grid (B * NH * NC). A CTA is one warpgroup and owns a chunk. XLA takes the logarithms of the gates and their extremes, as
``gates.scan_inputs``.
Stabiliser scan: grid (B * NH). A CTA is one warpgroup and owns a head. It reads the summaries of up to 1024 chunks at a time.

Running sums and maxima take log2(n) rounds: in round j each element meets the one 2^j places before it, through shared memory.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mlstm_pallas import gates
from mlstm_pallas.gates import MASKED, LocalGates, ScanInputs, chunk_summaries, pair_max, split_at, stabiliser_sources, two_sum
from mlstm_pallas.launch_mosaic_gpu import BY_ROWS, load, mosaic_call, plgpu
from mlstm_pallas.problem import InputGate, Problem, next_power_of_two
from mlstm_pallas.stage import Lowering, StageCall
from mlstm_pallas.tiles import loop

_INF = float("inf")
LANES = 128  # of a warpgroup
_SCAN_BLOCK = 1024  # chunks that a CTA of the stabiliser scan holds


def _layout(n: int) -> Any:
    """Of a vector of n floats in the registers of a warpgroup."""
    return plgpu.Layout.WG_STRIDED((n,), vec_size=1) if n % LANES == 0 else BY_ROWS


def _full(n: int, value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((n,), value, jnp.float32), _layout(n))


def _running(
    join: Callable[..., Sequence[jax.Array]],
    x: Sequence[jax.Array],
    identities: Sequence[float],
    buffers: Any,  # shared (2, arrays, 2 n)
) -> Sequence[jax.Array]:
    """Inclusive scan of x, vectors of n floats, with join(places, of earlier elements, of later ones)."""
    n = x[0].shape[0]
    for slot in range(2):
        for j, identity in enumerate(identities):
            buffers.at[slot, j, :n][...] = _full(n, identity)
    for index in range((n - 1).bit_length()):
        places, slot = 2**index, buffers.at[index % 2]
        for j, y in enumerate(x):
            slot.at[j, n:][...] = y
        plgpu.commit_smem()
        x = join(places, [load(slot.at[j, n - places : 2 * n - places], _layout(n), optimized=False) for j in range(len(x))], x)
    return x


def _local_gates_kernel(
    i,  # (B * NH * NC, L) logarithms of the gates
    fbar,
    f,  # (B * NH * NC, L) the forget gate itself
    starts,  # (B * NH * NC, L) int32, 1 where a packed segment begins; may be absent
    scalars,  # (B * NH * NC, 2): scaGrid and scaOffset of ``gates.ScanInputs``
    b_hi,  # out (B * NH * NC, L), as all that follow
    b_lo,
    e_hi,
    e_lo,
    emax_hi,
    emax_lo,
    offset,
    sums,  # shared (2, 3, 2 L)
    maxima,  # shared (2, 2, 2 L)
    counts,  # shared (2 L,)
    *,
    input_gate: InputGate,
):
    chunk, L = lax.axis_index("chunk"), i.shape[1]

    def vector(x):
        return load(x.at[chunk], _layout(L), optimized=False)

    log_i, log_f, reset = vector(i), vector(fbar), vector(f) <= MASKED
    begins = None if starts is None else vector(starts) > 0
    restarts = reset if begins is None else reset | begins
    split = *split_at(log_f, scalars[chunk, 0]), jnp.where(restarts, _full(L, 1.0), 0.0)
    hi, lo, count = _running(lambda _, left, x: [a + y for a, y in zip(left, x, strict=True)], split, (0.0,) * 3, sums)
    b, offsets = two_sum(hi, lo), count * scalars[chunk, 1]
    e, largest = stabiliser_sources(log_i, log_f, b, offsets, reset, begins, input_gate)
    if input_gate is not InputGate.SIGMOID:
        counts.at[:L][...] = _full(L, 0.0)
        counts.at[L:][...] = count

        def join(places, left, x):
            """What was before the last reset does not count."""
            same = load(counts.at[L - places : 2 * L - places], _layout(L), optimized=False) == count
            return [jnp.where(same, y, own) for y, own in zip(pair_max(left, x), x, strict=True)]

        max_hi, max_lo = _running(join, largest, (-_INF, 0.0), maxima)
        largest = max_hi, max_lo
    outputs = zip((b_hi, b_lo, e_hi, e_lo, emax_hi, emax_lo, offset), (*b, *e, *largest, offsets), strict=True)
    for ref, x in outputs:
        ref.at[chunk][...] = x


def local_gates(vecI: jax.Array, vecF: jax.Array, starts: jax.Array | None, input_gate: InputGate, call: StageCall) -> LocalGates:
    """``gates.local_gates`` of (B * NH, S), of a chunk size that is a multiple of 64."""
    p = call.problem
    given = None if starts is None else call.chunks(starts)
    x: ScanInputs = gates.scan_inputs(call.chunks(vecI), call.chunks(vecF), given, input_gate)
    names = ("b_hi", "b_lo", "e_hi", "e_lo", "emax_hi", "emax_lo", "offset")

    def rows(y):
        return None if y is None else y.reshape(p.BNH * p.NC, p.L)

    found = mosaic_call(
        functools.partial(_local_gates_kernel, input_gate=input_gate),
        name="chunk_gates",
        grid={"chunk": p.BNH * p.NC},
        warpgroups=1,
        outputs={name: jax.ShapeDtypeStruct((p.BNH * p.NC, p.L), jnp.float32) for name in names},
        scratch={
            "sums": plgpu.SMEM((2, 3, 2 * p.L), jnp.float32),
            "maxima": plgpu.SMEM((2, 2, 2 * p.L), jnp.float32),
            "counts": plgpu.SMEM((2 * p.L,), jnp.float32),
        },
        interpret=call.lowering is Lowering.MOSAIC_GPU_INTERPRET,
    )(
        i=rows(x.vecI),
        fbar=rows(x.vecF),
        f=rows(vecF),
        starts=rows(starts),
        scalars=jnp.concatenate([x.scaGrid, x.scaOffset], axis=-1).reshape(p.BNH * p.NC, 2),
    )
    b_hi, b_lo, e_hi, e_lo, emax_hi, emax_lo, offset = (found[name].reshape(p.BNH, p.NC, p.L) for name in names)
    return LocalGates((b_hi, b_lo), (e_hi, e_lo), (emax_hi, emax_lo), offset)


def _stabiliser_scan_kernel(
    g,  # (B * NH, padded NC) what a chunk adds to m; -inf where it has a reset
    a,  # (B * NH, padded NC) m of a chunk on its own
    m_initial,  # (B * NH,)
    m,  # out (B * NH, padded NC) after each chunk
    sums,  # shared (2, 2, 2 block)
    last,  # shared (block,)
    *,
    block: int,
):
    head = lax.axis_index("head")

    def join(_, left, x):
        return left[0] + x[0], jnp.maximum(left[1] + x[0], x[1])

    def one(j, before):
        chunks = pl.ds(pl.multiple_of(j * block, block), block)
        x = [load(y.at[head, chunks], _layout(block), optimized=False) for y in (g, a)]
        added, own = _running(join, x, (0.0, -_INF), sums)
        after = jnp.maximum(added + before, own)
        m.at[head, chunks][...] = after
        last[...] = after
        plgpu.commit_smem()
        return last[block - 1]

    loop(g.shape[1] // block, one, m_initial[head])


def stabiliser_scan(local: LocalGates, scaM_initial: jax.Array, call: StageCall) -> jax.Array:
    """``gates.stabiliser_scan`` with the exponential input gate: (B * NH, NC + 1)."""
    p: Problem = call.problem
    block = min(max(next_power_of_two(p.NC), LANES), _SCAN_BLOCK)
    padded = -(-p.NC // block) * block
    g, a, reset = chunk_summaries(local)
    g, a = (jnp.pad(x.astype(jnp.float32), [(0, 0), (0, padded - p.NC)]) for x in (jnp.where(reset, np.float32(-_INF), g), a))
    found = mosaic_call(
        functools.partial(_stabiliser_scan_kernel, block=block),
        name="stabiliser_scan",
        grid={"head": p.BNH},
        warpgroups=1,
        outputs={"m": jax.ShapeDtypeStruct((p.BNH, padded), jnp.float32)},
        scratch={"sums": plgpu.SMEM((2, 2, 2 * block), jnp.float32), "last": plgpu.SMEM((block,), jnp.float32)},
        interpret=call.lowering is Lowering.MOSAIC_GPU_INTERPRET,
    )(g=g, a=a, m_initial=scaM_initial)["m"]
    return jnp.concatenate([scaM_initial[:, None], found[:, : p.NC]], axis=1)
