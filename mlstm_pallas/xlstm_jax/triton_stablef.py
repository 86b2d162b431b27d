"""The system triton_stablef of xlstm_jax.

The xlstm_jax public API documents of triton_stablef._triton_bw and .triton_fwbw have
``_mlstm_chunkwise__recurrent_bw_dC``, ``_mlstm_chunkwise__parallel_bw_dQKV``,
``_mlstm_chunkwise_bw``, ``_mlstm_chunkwise_fwbw_generator``, ``_get_chunkwise_fwbw_kernel`` and
``mlstm_chunkwise_triton_stablef``. The forward stages are their counterparts in the same style.

The dimensions are those of the documents: H heads, T steps, K and V head dimensions (DHQK, DHHV),
NT = num_chunks chunks of BT = chunk_size steps.

* m is a natural logarithm; the original works in base 2.
* vecI of a stage is (B, H, NT, BT). vecF of a stage is log sigmoid(f), (B, H, NT, BT), not summed;
  -inf is a reset.
* vecN_out (B, H, T) is the denominator of H with eps, since no backward function of this system has
  an eps. The document of ``_mlstm_chunkwise__recurrent_bw_dC`` calls it (B, H, NT * DHQK).
* States at the chunk boundaries are (B, H, (NT + 1) * DHQK, DHHV), (B, H, (NT + 1) * DHQK) and
  (B, H, NT + 1). Arrays of states before each chunk have NT in place of NT + 1; where a stage reads
  those, it also accepts the states at all boundaries.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mlstm_pallas.api import mlstm_chunkwise
from mlstm_pallas.fwbw import mlstm
from mlstm_pallas.planning.options import Options
from mlstm_pallas.prepare import Arguments, prepare
from mlstm_pallas.problem.annotations import Array, StatesTuple
from mlstm_pallas.xlstm_jax._common import STATES, documented

__all__ = [
    "_get_chunkwise_fwbw_kernel",
    "_mlstm_chunkwise__parallel_bw_dQKV",
    "_mlstm_chunkwise__parallel_fw_H",
    "_mlstm_chunkwise__recurrent_bw_dC",
    "_mlstm_chunkwise__recurrent_fw_C",
    "_mlstm_chunkwise_bw",
    "_mlstm_chunkwise_fw",
    "_mlstm_chunkwise_fwbw_generator",
    "mlstm_chunkwise_triton_stablef",
]


@documented("recurrent_fw_C", *STATES)
def _mlstm_chunkwise__recurrent_fw_C(
    matK: Array, matV: Array, vecF: Array, vecI: Array, matC_initial: Array | None = None,
    vecN_initial: Array | None = None, scaMinter_initial: Array | None = None,
    qk_scale: float | None = None, chunk_size: int = 64, num_chunks: int = 1,
) -> StatesTuple:  # fmt: skip
    """C, N and M at the chunk boundaries: C in the dtype of matK, N and M float32."""


@documented("parallel_fw_H", "matH", "vecN_with_eps", "vecM_out")
def _mlstm_chunkwise__parallel_fw_H(
    matQ: Array, matK: Array, matV: Array, vecI: Array, vecF: Array, matC_states: Array,
    vecN_states: Array, scaM_inter: Array, qk_scale: float | None = None, chunk_size: int = 64,
    num_chunks: int = 1, eps: float = 1e-6, stabilize_correctly: bool = True,
    norm_val: float = 1.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """H (B, H, T, V) in the dtype of matQ, vecN_out and the m of every step, (B, H, T).

    The states are those before each chunk.
    """


@documented("forward", "matH", "vecN_with_eps", "vecM_out")
def _mlstm_chunkwise_fw(
    matQ: Array, matK: Array, matV: Array, vecI: Array, vecF: Array,
    matC_initial: Array | None = None, vecN_initial: Array | None = None,
    scaM_initial: Array | None = None, qk_scale: float | None = None,
    return_last_states: bool = False, return_all_states: bool = False, chunk_size: int = 64,
    eps: float = 1e-6, stabilize_correctly: bool = True, norm_val: float = 1.0,
) -> tuple[Any, ...]:  # fmt: skip
    """H, vecN_out and m as from ``_mlstm_chunkwise__parallel_fw_H``.

    vecI, vecF: pre-activations (B, H, T). return_last_states adds the last states (C, N, M) in
    float32, and return_all_states adds the states at all chunk boundaries.
    """


@documented("recurrent_bw_dC", "matDeltaC_states", "matDeltaC_initial")
def _mlstm_chunkwise__recurrent_bw_dC(
    matQ: Array, vecF: Array, scaM_inter: Array, vecM: Array, vecN_out: Array, matDeltaH: Array,
    matDeltaC_last: Array | None = None, qk_scale: float | None = None, chunk_size: int = 64,
    num_chunks: int = 1, store_initial_state: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The gradients of C after each chunk, and of the first C.

    They are (B, H, NT * DHQK, DHHV) in the dtype of matQ and (B, H, DHQK, DHHV) float32.

    Args:
      matQ, matDeltaH: (B, H, T, K), (B, H, T, V).
      scaM_inter: m at the chunk boundaries; vecM: m of every step (B, H, T).
      matDeltaC_last: the gradient of the last C (B, H, DHQK, DHHV).
      store_initial_state: not read; the gradient of the first C is always returned.
    """


@documented("parallel_bw_dQKV", "matDeltaQ", "matDeltaK", "matDeltaV")
def _mlstm_chunkwise__parallel_bw_dQKV(
    matQ: Array, matK: Array, matV: Array, vecI: Array, vecF: Array, vecM_combine: Array,
    scaM_inter: Array, matC_states: Array, matDeltaH: Array, vecN_out: Array,
    matDeltaC_states: Array, qk_scale: float | None = None, chunk_size: int = 64,
    num_chunks: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """dQ, dK (B, H, T, K) and dV (B, H, T, V) in the dtype of matQ.

    Args:
      vecF: not summed, although the document calls it summed.
      vecM_combine: (B, H, T), not read; m follows from the gates and scaM_inter, with more digits.
      scaM_inter, matC_states: before each chunk, or at all boundaries.
      matDeltaC_states: the gradients of C after each chunk, as from
        ``_mlstm_chunkwise__recurrent_bw_dC``, or at all boundaries.
    """


@documented("backward")
def _mlstm_chunkwise_bw(
    matQ: Array, matK: Array, matV: Array, vecI: Array, vecF: Array,
    matC_initial: Array | None = None, vecN_initial: Array | None = None,
    scaM_initial: Array | None = None, qk_scale: float | None = None,
    matC_states: Array | None = None, scaM_states: Array | None = None,
    vecN_out: Array | None = None, vecM_out: Array | None = None, matDeltaH: Array | None = None,
    matDeltaC_last: Array | None = None, chunk_size: int = 64,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """dQ, dK, dV, dI, dF and, with initial states, their dC, dN, dM, shaped as the arguments.

    They have the dtypes of the arguments. dN is zero, because only the denominator reads n. dM is
    <dC_0, C_0>, because exp(m) scales the state.

    Args:
      vecI, vecF: pre-activations (B, H, T).
      matC_initial, vecN_initial, scaM_initial: (B, H, DHQK, DHHV), (B, H, DHQK), (B, H); all or
        none.
      matC_states: C before each chunk, NT blocks, or at all boundaries; None: recomputed.
      scaM_states, vecM_out: not read; they follow from the gates and scaM_initial.
      vecN_out, matDeltaH: (B, H, T), (B, H, T, V); needed, despite their defaults.
      matDeltaC_last: the gradient of the last C (B, H, DHQK, DHHV).
    """


def _mlstm_chunkwise_fwbw_generator(
    autocast_kernel_dtype: Any = jnp.bfloat16,
    return_last_states: bool = False,
    recompute_states_in_bw: bool = True,
    chunk_size: int = 64,
    eps: float = 1e-6,
    stabilize_correctly: bool = True,
    norm_val: float = 1.0,
) -> Callable[..., tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]]:
    """A function with exact gradients of all its arguments.

    Equal arguments give the same function, so that jit does not compile it again.

    Args:
      autocast_kernel_dtype: dtype of q, k, v in the matrix products; None: the dtype of matQ. Gates
        and states stay float32.
      return_last_states: whether C, N and M of the last step are returned; otherwise None takes
        their places.
      recompute_states_in_bw, chunk_size, eps, stabilize_correctly, norm_val: as for
        ``mlstm_pallas.mlstm_chunkwise``.

    Returns:
      forward(matQ, matK, matV, vecI, vecF, matC_initial=None, vecN_initial=None,
      scaM_initial=None) -> (H, C, N, M), where matQ and matK are (B, NH, S, DHQK), matV and H
      (B, NH, S, DHV), vecI and vecF (B, NH, S), and the states (B, NH, DHQK, DHV), (B, NH, DHQK)
      and (B, NH). H has the dtype of matQ, the returned states are float32.
    """
    return _forward_function(  # of checked options: to the cache 1 equals True
        Options(
            return_last_states, eps, chunk_size, autocast_kernel_dtype, stabilize_correctly,
            norm_val, recompute_states_in_bw=recompute_states_in_bw,
        )
    )  # fmt: skip


@functools.lru_cache(256)
def _forward_function(options: Options) -> Callable[..., tuple[Any, ...]]:
    def forward(
        matQ: Array, matK: Array, matV: Array, vecI: Array, vecF: Array,
        matC_initial: Array | None = None, vecN_initial: Array | None = None,
        scaM_initial: Array | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        x = Arguments(matQ, matK, matV, vecI, vecF, matC_initial, vecN_initial, scaM_initial)
        spec, x = prepare(x, options, options.layout)
        outputs = mlstm(spec, x)
        h, states = outputs if options.return_last_states else (outputs, (None, None, None))
        return h, *states

    return forward


def _get_chunkwise_fwbw_kernel(autocast_kernel_dtype: Any, **kwargs: Any) -> Callable[..., Any]:
    """The function of ``_mlstm_chunkwise_fwbw_generator``, documented with it."""
    return _mlstm_chunkwise_fwbw_generator(autocast_kernel_dtype, **kwargs)


_Public = TypeVar("_Public")


def _typed_as(public: _Public) -> Callable[[Callable[..., Any]], _Public]:
    """Gives a function the type of a public one, whose overloads tell what it returns."""
    return lambda function: cast(_Public, function)


@_typed_as(mlstm_chunkwise)
def mlstm_chunkwise_triton_stablef(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None,
    n_initial: Array | None = None, m_initial: Array | None = None,
    return_last_states: bool = False, eps: float = 1e-6, chunk_size: int | None = 64,
    autocast_kernel_dtype: DTypeLike | None = jnp.float32, stabilize_correctly: bool = True,
    norm_val: float = 1.0,
) -> jax.Array | tuple[jax.Array, StatesTuple]:  # fmt: skip
    """h (B, NH, S, DHV) in the dtype of q, or (h, (c, n, m)).

    The gradients of all eight arrays are exact. The other systems have this function under other
    names.

    Args:
      q, k: (B, NH, S, DHQK); v: (B, NH, S, DHV); i, f: gate pre-activations (B, NH, S).
      c_initial, n_initial, m_initial: (B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH); all or none.
      return_last_states: whether to return the states after the last step too, in float32.
      autocast_kernel_dtype: the dtype of q, k, v in the matrix products; gates and states stay
        float32.
      eps, chunk_size, stabilize_correctly, norm_val: as for ``mlstm_pallas.mlstm_chunkwise``.
    """
    options = Options(
        return_last_states, eps, chunk_size, autocast_kernel_dtype, stabilize_correctly, norm_val
    )
    x = Arguments(q, k, v, i, f, c_initial, n_initial, m_initial)
    return mlstm(*prepare(x, options, options.layout))
