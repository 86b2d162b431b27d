"""Stage recurrent_bw_dC: the gradients of the states at the chunk boundaries, and the states themselves where they are recomputed.

    dC_c = gamma_c dC_{c+1} + sum_t qbar_t dh_t^T        C_{c+1} = gamma_c C_c + sum_t kbar_t v_t^T

qbar = r q and kbar = abar k come from parallel_bw_dP or, on Mosaic GPU, from XLA; or they are weighted here.

Where parallel_bw_dQKV makes P and dP, nothing before this stage needs delta_t = dh_t . h_t, and it is computed here. The Mosaic GPU kernel
reads dh anyway; beside the Triton kernel XLA computes delta.

Kernel, grid, what a CTA owns, plain form, FLOPs and bytes are those of recurrence.py, dC backward in time. Both recurrences share a
launch: neither needs the other, and with few heads one alone does not fill a GPU.
"""

from typing import Any, NamedTuple

import jax

from mlstm_pallas.launch import HAS_TRITON
from mlstm_pallas.problem import Problem
from mlstm_pallas.stage import MOSAIC_GPU_HEADS, MOSAIC_GPU_SHARED_BYTES, Cost, MosaicGpu, Stage, StageCall, StageConfig, mosaic_gpu_rows
from mlstm_pallas.stages.parallel_bw_dQKV import mosaic_gpu_by_chunk
from mlstm_pallas.stages.recurrence import (
    FACTS,
    MOSAIC_GPU_COLUMNS,
    MOSAIC_GPU_H_STAGES,
    Recurrence,
    mosaic_gpu_ctas,
    mosaic_gpu_tile,
    recurrences,
)

# CTAs of both recurrences, of an H200's 132 SMs. With fewer Triton's kernel runs: it has blocks of 64 x 64 and splits sequences.
MOSAIC_GPU_MIN_CTAS = 96


class StateGradients(NamedTuple):
    """None: not wanted."""

    matDeltaC_states: jax.Array  # (B * NH, NC, DHQK, DHHV) of the state after each chunk, in the kernel dtype
    matDeltaC_initial: Any  # (B * NH, DHQK, DHHV) float32
    matC_states: Any  # (B * NH, NC, DHQK, DHHV) before each chunk, in the kernel dtype
    matC_last: Any  # (B * NH, DHQK, DHHV) float32
    vecDelta: Any  # (B * NH, S) float32


def recurrent_bw_dC(
    matQ_scaled: jax.Array,
    matDeltaH: jax.Array,
    scaGamma: jax.Array,
    matDeltaC_last: jax.Array | None,
    matK_scaled: jax.Array | None = None,
    matV: jax.Array | None = None,
    matC_initial: jax.Array | None = None,
    *,
    vecR: jax.Array | None = None,
    vecAbar: jax.Array | None = None,
    matH: jax.Array | None = None,
    return_initial: bool = True,
    return_last: bool = True,
    call: StageCall,
) -> StateGradients:
    """Runs the stage.

    Args:
      matQ_scaled, matDeltaH: (B * NH, S, DHQK), (B * NH, S, DHHV) in the kernel dtype. With vecR the queries as they are.
      scaGamma: (B * NH, NC), matDeltaC_last: gradient of the last C, (B * NH, DHQK, DHHV), None: zeros; float32.
      matK_scaled, matV: shaped as matQ_scaled and matDeltaH, where the states are recomputed; matC_initial: (B * NH, DHQK, DHHV)
        float32, None: zeros. With vecAbar the keys as they are.
      vecR, vecAbar: r and abar, the weights of the queries and of the keys, (B * NH, S) float32. None: these come scaled.
      matH: shaped as matDeltaH. None: delta is not wanted.
      return_initial: whether the gradient of the initial C is wanted.
      return_last: whether the last C is wanted.
    """
    of_dC = Recurrence(matQ_scaled, matDeltaH, scaGamma, matDeltaC_last, return_initial, backward=True, r=vecR, h=matH)
    if matK_scaled is None or matV is None:
        (dC,) = recurrences("recurrent_bw_dC", of_dC, call=call)
        return StateGradients(dC.X, dC.X_last, None, None, dC.inner)
    of_C = Recurrence(matK_scaled, matV, scaGamma, matC_initial, return_last, r=vecAbar)
    C, dC = recurrences("recurrent_bw_dC", of_C, of_dC, call=call)
    return StateGradients(dC.X, dC.X_last, C.X, C.X_last, dC.inner)


def _cost(p: Problem, itemsize: int) -> Cost:
    """Of both recurrences. delta is not in it: h is R V more to read."""
    return Cost(*(2 * x for x in FACTS["cost"](p, itemsize)))


def _mosaic_gpu_takes(tiles: StageConfig, p: Problem) -> bool:
    """Whether blocks fit, with enough CTAs for the SMs of an H200. A stage is free when the next one's product runs."""
    rows = mosaic_gpu_rows(p.DHQK, tiles.siz_b_DHQK)
    if not 0 < rows <= 256 or p.DHHV % MOSAIC_GPU_COLUMNS or p.L % 64 or tiles.num_stages < 2 or 2 * p.BNH > MOSAIC_GPU_HEADS:
        return False
    # Tiles of a, b, X and, where delta is computed here, of h; weights, and barriers. Arrays begin at multiples of 1024 bytes.
    h_stages = MOSAIC_GPU_H_STAGES if mosaic_gpu_by_chunk(p) else 0
    elements = 64 * (tiles.num_stages * (rows + MOSAIC_GPU_COLUMNS) + h_stages * MOSAIC_GPU_COLUMNS + 4 * 64)
    shared = 2 * elements + -(-tiles.num_stages * 64 * 4 // 1024) * 1024 + 1024
    return shared <= MOSAIC_GPU_SHARED_BYTES and (not HAS_TRITON or 2 * mosaic_gpu_ctas(rows, p) >= MOSAIC_GPU_MIN_CTAS)


STAGE = Stage(
    name="recurrent_bw_dC",
    run=recurrent_bw_dC,
    inputs=("matQ_scaled", "matDeltaH", "scaGamma", "matDeltaC_last", "matK_scaled", "matV", "matC_initial"),
    **FACTS | {"cost": _cost},
    mosaic_gpu=MosaicGpu(
        search=dict(siz_b_DHQK=(64, 128, 256), num_stages=(3, 4, 5, 6)),
        heuristic=lambda p: StageConfig(siz_b_DHQK=mosaic_gpu_tile(p, recurrences=2), num_stages=4),
        takes=_mosaic_gpu_takes,
    ),
)
