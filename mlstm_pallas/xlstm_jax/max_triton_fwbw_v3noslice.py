"""The system max_triton_fwbw_v3noslice of xlstm_jax.

The xlstm_jax public API document of max_triton_fwbw_v3noslice._triton_fw has
``_mlstm_chunkwise__recurrent_fw_C``, ``_mlstm_chunkwise__parallel_fw_H`` and
``_mlstm_chunkwise_fw``. The other stage functions are their counterparts in the same style.

The arguments of a stage:

* matQ, matK (B, NH, S, DHQK) and matV, matDeltaH (B, NH, S, DHHV), S = NUM_CHUNKS * CHUNK_SIZE.
* vecI, the input gate, and vecB, the running sums of log sigmoid(f) within each chunk, which are
  finite: (B, NH, NC, L).
* States at the chunk boundaries: (B, NH, (NC + 1) * DHQK, DHHV), (B, NH, (NC + 1) * DHQK) and
  (B, NH, NC + 1). Arrays of states before each chunk have NC in place of NC + 1; where a stage
  reads those, it also accepts the states at all boundaries.
* vecN_out, the N vector of the document: ``max(|q . n|, exp(-m))``, (B, NH, S) float32, the
  denominator of H without EPS.
"""

from typing import Any

import jax

from mlstm_pallas.problem.annotations import Array, StatesTuple
from mlstm_pallas.xlstm_jax._common import STATES, documented, with_name
from mlstm_pallas.xlstm_jax.triton_stablef import (
    _get_chunkwise_fwbw_kernel,
    _mlstm_chunkwise_fwbw_generator,
    mlstm_chunkwise_triton_stablef,
)

__all__ = [
    "_get_chunkwise_fwbw_kernel",
    "_mlstm_chunkwise__parallel_bw_dQKV",
    "_mlstm_chunkwise__parallel_fw_H",
    "_mlstm_chunkwise__recurrent_bw_dC",
    "_mlstm_chunkwise__recurrent_fw_C",
    "_mlstm_chunkwise_bw",
    "_mlstm_chunkwise_fw",
    "_mlstm_chunkwise_fwbw_generator",
    "mlstm_chunkwise_max_triton",
]

mlstm_chunkwise_max_triton = with_name(
    mlstm_chunkwise_triton_stablef, "mlstm_chunkwise_max_triton", __name__
)


@documented("recurrent_fw_C", *STATES)
def _mlstm_chunkwise__recurrent_fw_C(
    matK: Array, matV: Array, vecB: Array, vecI: Array, matC_states: Array | None = None,
    vecN_states: Array | None = None, scaMinter_states: Array | None = None,
    matC_initial: Array | None = None, vecN_initial: Array | None = None,
    scaMinter_initial: Array | None = None, qk_scale: float | None = None, CHUNK_SIZE: int = 64,
    NUM_CHUNKS: int = 1,
) -> StatesTuple:  # fmt: skip
    """C, N and M at the chunk boundaries: C in the dtype of matK, N and M float32.

    Args:
      matC_states, vecN_states, scaMinter_states: buffers, shaped as the results. Each sets the
        dtype of its result and is not written to. C is rounded to the dtype of matK in any case.
      matC_initial, vecN_initial, scaMinter_initial: (B, NH, DHQK, DHHV), (B, NH, DHQK), (B, NH);
        all or none (zeros).
    """


@documented("parallel_fw_H", "matH", "vecN_out")
def _mlstm_chunkwise__parallel_fw_H(
    matQ: Array, matK: Array, matV: Array, matC_states: Array, vecN_states: Array,
    scaMinter_states: Array, vecI: Array, vecB: Array, qk_scale: float | None = None,
    CHUNK_SIZE: int = 64, NUM_CHUNKS: int = 1, EPS: float = 1e-6,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """H (B, NH, S, DHHV) in the dtype of matQ, and vecN_out, from the states before each chunk."""


@documented("forward", "matH", "vecN_out", "scaM_last")
def _mlstm_chunkwise_fw(
    matQ: Array, matK: Array, matV: Array, vecI: Array, vecF: Array,
    matC_initial: Array | None = None, vecN_initial: Array | None = None,
    scaM_initial: Array | None = None, qk_scale: float | None = None,
    return_last_states: bool = False, return_all_states: bool = False, CHUNK_SIZE: int = 64,
    EPS: float = 1e-6,
) -> tuple[Any, ...]:  # fmt: skip
    """H and vecN_out as from ``_mlstm_chunkwise__parallel_fw_H``, and the last m (B, NH).

    vecI, vecF: pre-activations (B, NH, S). return_last_states adds the last states (C, N, M) in
    float32, and return_all_states adds the states at all chunk boundaries.
    """


@documented("recurrent_bw_dC", "matDeltaC_all")
def _mlstm_chunkwise__recurrent_bw_dC(
    matQ: Array, vecI: Array, vecB: Array, scaMinter_states: Array, vecN_out: Array,
    matDeltaH: Array, matDeltaC_last: Array | None = None, qk_scale: float | None = None,
    CHUNK_SIZE: int = 64, NUM_CHUNKS: int = 1, EPS: float = 1e-6,
) -> jax.Array:  # fmt: skip
    """The gradients of C at the chunk boundaries, in the dtype of matQ.

    matDeltaC_last: the gradient of the last C, (B, NH, DHQK, DHHV).
    """


@documented("parallel_bw_dQKV", "matDeltaQ", "matDeltaK", "matDeltaV")
def _mlstm_chunkwise__parallel_bw_dQKV(
    matQ: Array, matK: Array, matV: Array, vecI: Array, vecB: Array, scaMinter_states: Array,
    matC_states: Array, vecN_out: Array, matDeltaH: Array, matDeltaC_states: Array,
    qk_scale: float | None = None, CHUNK_SIZE: int = 64, NUM_CHUNKS: int = 1, EPS: float = 1e-6,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """dQ, dK and dV in the dtype of matQ.

    matC_states are before each chunk and matDeltaC_states after each chunk, or both are at all
    boundaries.
    """


@documented("backward")
def _mlstm_chunkwise_bw(
    matQ: Array, matK: Array, matV: Array, vecI: Array, vecF: Array,
    matC_initial: Array | None = None, vecN_initial: Array | None = None,
    scaM_initial: Array | None = None, qk_scale: float | None = None,
    matC_states: Array | None = None, vecN_out: Array | None = None,
    matDeltaH: Array | None = None, matDeltaC_last: Array | None = None, CHUNK_SIZE: int = 64,
    EPS: float = 1e-6,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """dQ, dK, dV, dI, dF and, with initial states, their dC, dN, dM.

    See ``triton_stablef._mlstm_chunkwise_bw``. vecN_out is required; it is the one that
    ``_mlstm_chunkwise_fw`` returns, and EPS is added to it.
    """
