"""Adapters: the documented systems of xlstm_jax, one module each, with the names, signatures, defaults and shapes of its API documents.

An adapter checks its arguments and calls the stages or schedules of mlstm_pallas; no kernel is defined here. New code calls
``mlstm_pallas.mlstm_chunkwise``.

* q, k and v are float32 or bfloat16 (float64 in plain jnp). The matrix products run in the dtype of the first of them, the others are
  cast to it; gates, states and sums are float32.
* Every logarithm and every m is natural. An infinite forget gate (a reset) needs a function that takes the pre-activation.
* qk_scale None is DHQK ** -0.5. It scales q alone, so the states C, N and M do not depend on it.
* The entries and ``_mlstm_chunkwise_fwbw_generator`` have exact gradients. For the backward functions (``*_bw*``) the denominator of H is a
  constant, as in the documents.
* The kernels run where a computation is lowered for an NVIDIA GPU, plain jnp elsewhere; ``mlstm_pallas.use_backend`` overrides that.

Signatures are laid out as in the documents, hence ``fmt: skip``.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlstm_pallas.xlstm_jax import (
        max_triton_fwbw_v3noslice,
        max_triton_fwbw_v5xlchunksize,
        triton_stablef,
    )

__all__ = ["max_triton_fwbw_v3noslice", "max_triton_fwbw_v5xlchunksize", "triton_stablef"]


if not TYPE_CHECKING:  # so that a wrong name is one to a type checker

    def __getattr__(name: str) -> ModuleType:
        if name in __all__:  # imported when they are first asked for
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
