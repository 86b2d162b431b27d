"""Adapters: the documented systems of xlstm_jax, one module each.

They have the names, signatures, defaults and shapes of its API documents. An adapter checks its
arguments and calls the stages or schedules of mlstm_pallas; it defines no kernel. New code should
call ``mlstm_pallas.mlstm_chunkwise``.

* q, k and v are float32 or bfloat16 (float64 in plain jnp). The matrix products run in the dtype of
  the first of them, to which the others are cast. Gates, states and sums are float32.
* Every logarithm and every m is natural. An infinite forget gate (a reset) needs a function that
  takes the pre-activation or its logarithm, not the running sums.
* qk_scale None is DHQK ** -0.5. It scales q alone, so the states C, N and M do not depend on it.
* The functions of whole sequences and ``_mlstm_chunkwise_fwbw_generator`` have exact gradients. The
  backward functions (``*_bw*``) treat the denominator of H as a constant, as documented.
* The kernels run on an NVIDIA GPU, plain jnp elsewhere; ``mlstm_pallas.use_backend`` says how the
  device is found, and overrides it.

Signatures are laid out as in the documents, hence ``fmt: skip``.
"""

from mlstm_pallas.xlstm_jax import (
    max_triton_fwbw_v3noslice,
    max_triton_fwbw_v5xlchunksize,
    triton_stablef,
)

__all__ = ["max_triton_fwbw_v3noslice", "max_triton_fwbw_v5xlchunksize", "triton_stablef"]
