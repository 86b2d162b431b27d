"""The system max_triton_fwbw_v5xlchunksize of xlstm_jax: chunks of any size.

The xlstm_jax public API documents of max_triton_fwbw_v5xlchunksize._parallel_fw and
._parallel_bw_dV have ``mlstm_chunkwise__parallel_fw_Hintra`` and
``mlstm_chunkwise__parallel_bw_dV``. The other stage functions are their counterparts in the same
style.

The arguments of a stage:

* matQ, matK (B, NH, S, DHQK) and matV, matDeltaH (B, NH, S, DHHV).
* vecI (B, NH, NC, L), and vecF, the pre-activation (B, NH, S), which may be infinite.
* matC_all, vecN_all, scaM_all, the states at the chunk boundaries: (B, NH, (NC + 1) * DHQK, DHHV),
  (B, NH, (NC + 1) * DHQK) and (B, NH, NC + 1).
* vecN_out, the N vector of the documents: ``max(|q . n|, exp(-m))``, (B, NH, S) float32, the
  denominator of H without eps.
* siz_b_*, num_warps, num_stages: the tiles and the launch of the stage's Triton kernel, where it
  runs; None: those of the plan. A tile is clamped to its axis.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mlstm_pallas.problem.annotations import Array, StatesTuple
from mlstm_pallas.xlstm_jax._common import STATES, documented, with_name
from mlstm_pallas.xlstm_jax.triton_stablef import (
    _get_chunkwise_fwbw_kernel,
    _mlstm_chunkwise_fwbw_generator,
    mlstm_chunkwise_triton_stablef,
)

__all__ = [
    "_get_chunkwise_fwbw_kernel",
    "_mlstm_chunkwise_fwbw_generator",
    "mlstm_chunkwise__parallel_bw_dK",
    "mlstm_chunkwise__parallel_bw_dQ",
    "mlstm_chunkwise__parallel_bw_dV",
    "mlstm_chunkwise__parallel_fw_Hintra",
    "mlstm_chunkwise__recurrent_bw_dC",
    "mlstm_chunkwise__recurrent_fw_C",
    "mlstm_chunkwise__xl_chunk",
    "mlstm_chunkwise_bw",
    "mlstm_chunkwise_fw",
    "mlstm_chunkwise_max_triton",
]


mlstm_chunkwise_max_triton = with_name(
    mlstm_chunkwise_triton_stablef, "mlstm_chunkwise_max_triton", __name__
)
mlstm_chunkwise__xl_chunk = with_name(
    mlstm_chunkwise_triton_stablef, "mlstm_chunkwise__xl_chunk", __name__
)


@documented("recurrent_fw_C", *STATES, siz_b_L="siz_b_LKV", siz_b_LKV="")
def mlstm_chunkwise__recurrent_fw_C(
    matK: Array, matV: Array, vecF: Array, vecI: Array, matC_initial: Array | None = None,
    vecN_initial: Array | None = None, scaM_initial: Array | None = None,
    qk_scale: float | None = None, chunk_size: int = 64, siz_b_LKV: int | None = None,
    siz_b_DHQK: int | None = None, siz_b_DHHV: int | None = None, num_warps: int | None = None,
    num_stages: int | None = None,
) -> StatesTuple:  # fmt: skip
    """C, N and M at the chunk boundaries: C in the dtype of matK, N and M float32."""


@documented("parallel_fw_H", "matH", "vecN_out")
def mlstm_chunkwise__parallel_fw_Hintra(
    matQ: Array, matK: Array, matV: Array, vecI: Array, vecF: Array, matC_all: Array,
    vecN_all: Array, scaM_all: Array, qk_scale: float | None = None, chunk_size: int = 64,
    siz_b_LQ: int = 32, siz_b_LKV: int = 32, siz_b_DHQK: int | None = None,
    siz_b_DHHV: int | None = None, num_warps: int | None = None, num_stages: int | None = None,
    eps: float = 1e-6, output_dtype: DTypeLike = jnp.float32,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """H (B, NH, S, DHHV) in output_dtype, and vecN_out.

    H is the whole output, with the inter-chunk part, despite the name.
    """


@documented("forward", "matH", "vecN_out", "vecM_out")
def mlstm_chunkwise_fw(
    matQ: Array, matK: Array, matV: Array, vecI: Array, vecF: Array,
    matC_initial: Array | None = None, vecN_initial: Array | None = None,
    scaM_initial: Array | None = None, qk_scale: float | None = None,
    return_last_states: bool = False, return_all_states: bool = False, chunk_size: int = 64,
    eps: float = 1e-6, output_dtype: DTypeLike = jnp.float32,
) -> tuple[Any, ...]:  # fmt: skip
    """H (B, NH, S, DHHV) in output_dtype, vecN_out and the m of every step, (B, NH, S).

    vecI, vecF: pre-activations (B, NH, S). return_last_states adds the last states (C, N, M) in
    float32, and return_all_states adds the states at all chunk boundaries.
    """


@documented("recurrent_bw_dC", "matDeltaC_all", siz_b_L="siz_b_LQ", siz_b_LQ="")
def mlstm_chunkwise__recurrent_bw_dC(
    matQ: Array, vecI: Array, vecF: Array, scaM_all: Array, vecN_out: Array, matDeltaH: Array,
    matDeltaC_last: Array | None = None, qk_scale: float | None = None, chunk_size: int = 64,
    siz_b_LQ: int | None = None, siz_b_DHQK: int | None = None, siz_b_DHHV: int | None = None,
    num_warps: int | None = None, num_stages: int | None = None, eps: float = 0.0,
) -> jax.Array:  # fmt: skip
    """The gradients of C at the chunk boundaries, shaped as matC_all, in the dtype of matQ."""


def _gradient(name: str) -> Callable[..., jax.Array]:
    """The function for the gradient of V, or its counterpart for Q or K."""
    # parallel_bw_dQKV calls the rows of its output tiles siz_b_LQ, for keys too.
    rows = "siz_b_LQ" if name == "Q" else "siz_b_LKV"

    @documented("parallel_bw_dQKV", f"matDelta{name}", siz_b_LQ=rows, siz_b_LKV="")
    def gradient(
        matQ: Array, matK: Array, matV: Array, vecI: Array, vecA: Array, vecB: Array,
        matC_all: Array, vecN_all: Array, scaM_all: Array, vecN_out: Array, vecM_out: Array,
        matDeltaH: Array, matDeltaC_states: Array, qk_scale: float | None = None,
        chunk_size: int = 64, siz_b_LQ: int = 32, siz_b_LKV: int = 32,
        siz_b_DHQK: int | None = None, siz_b_DHHV: int | None = None,
        num_warps: int | None = None, num_stages: int | None = None, eps: float = 0.0,
        output_dtype: DTypeLike = jnp.float32,
    ) -> jax.Array:  # fmt: skip
        """The gradient of v, (B, NH, S, DHHV), of q or of k, (B, NH, S, DHQK), in output_dtype.

        The stages compute the gradients of q, k and v together. The document of bw_dV is wrong
        where it calls the result "deltaK" with DHQK columns, and where it has an eps of 1e-6.

        Args:
          vecB: the running sums of log sigmoid(f) within each chunk, (B, NH, NC, L), finite.
          matDeltaC_states: the gradients of C at the chunk boundaries, shaped as matC_all.
          vecA (B, NH, NC, L), vecN_all, vecM_out (B, NH, S): not read. They follow from the other
            arguments, or their gradient is zero.
          siz_b_LKV, for Q siz_b_LQ: the rows of the gradient in a tile. The other one is not read.
          eps: the eps of the forward pass, which is added to vecN_out.
        """

    return with_name(gradient, f"mlstm_chunkwise__parallel_bw_d{name}", __name__)


mlstm_chunkwise__parallel_bw_dV = _gradient("V")
mlstm_chunkwise__parallel_bw_dQ = _gradient("Q")
mlstm_chunkwise__parallel_bw_dK = _gradient("K")


@documented("backward")
def mlstm_chunkwise_bw(
    matQ: Array, matK: Array, matV: Array, vecI: Array, vecF: Array,
    matC_initial: Array | None = None, vecN_initial: Array | None = None,
    scaM_initial: Array | None = None, qk_scale: float | None = None,
    matC_all: Array | None = None, vecN_out: Array | None = None, matDeltaH: Array | None = None,
    matDeltaC_last: Array | None = None, chunk_size: int = 64, eps: float = 0.0,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """dQ, dK, dV, dI, dF and, with initial states, their dC, dN, dM.

    See ``triton_stablef._mlstm_chunkwise_bw``. vecN_out is required; it is the one that
    ``mlstm_chunkwise_fw`` returns, and the eps of the forward pass is added to it.
    """
