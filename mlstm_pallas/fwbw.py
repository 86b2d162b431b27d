"""The custom_vjp that joins the passes, and the documented generators of functions with it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mlstm_pallas import passes, stateless_passes
from mlstm_pallas.backend import on_backend
from mlstm_pallas.plan import Inputs, Outputs, Plan, Residuals
from mlstm_pallas.problem import as_dtype
from mlstm_pallas.segments import SegmentProducts
from mlstm_pallas.sharding import over_shards

NO_SUCH_DERIVATIVE = (
    "mlstm_chunkwise has first derivatives in reverse mode only; for second derivatives and forward mode use "
    "mlstm_pallas.reference.chunkwise or mlstm_pallas.reference.recurrence"
)


def _forward_triton(plan: Plan, interpret: bool, inputs: Inputs, products: SegmentProducts | None = None):
    if plan.starts_empty:
        inputs = inputs._replace(c_initial=None)
    if plan.stateless_forward:
        kept = 0 if plan.recompute_states_in_bw else plan.problem.L
        return stateless_passes.forward(plan.stateless_forward, interpret, inputs, products, kept)
    return passes.forward_triton(plan, interpret, inputs)


def _backward_triton(plan: Plan, interpret: bool, residuals: Residuals, cotangents: Outputs) -> Inputs:
    dh, of_last = cotangents
    inputs = residuals.inputs
    cotangents = dh, of_last or (None, jnp.zeros_like(inputs.n_initial), None)
    if plan.starts_empty:
        residuals = residuals._replace(inputs=inputs._replace(c_initial=None))
    if plan.stateless_backward:
        return stateless_passes.backward(plan.stateless_backward, interpret, residuals, cotangents)
    return passes.backward_triton(plan, interpret, residuals, cotangents)


def _forward_on_backend(plan: Plan, inputs: Inputs, products: SegmentProducts | None):
    def xla(inputs, products):
        return passes.forward_xla(plan, inputs)

    return on_backend(plan.backend, functools.partial(_forward_triton, plan), xla, inputs, products)


def _backward_on_backend(plan: Plan, residuals: Residuals, cotangents: Outputs) -> Inputs:
    def xla(residuals, cotangents):
        return passes.backward_xla(plan, residuals, cotangents)

    return on_backend(plan.backend, functools.partial(_backward_triton, plan), xla, residuals, cotangents)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def operation(function: Callable[..., Any], plan: Plan, *args: Any) -> Any:
    """function(plan, *args) on shards of batch and heads; it has no derivatives of its own."""
    return over_shards(function, plan, *args)


@operation.defjvp
def _no_jvp(function, plan, primals, tangents):
    raise TypeError(NO_SUCH_DERIVATIVE)


def forward(plan: Plan, inputs: Inputs, products: SegmentProducts | None = None):
    """Outputs, z and, where they are to be kept, the states. products: of segments of the sequence, where they are known."""
    return operation(_forward_on_backend, plan, inputs, products)


def backward(plan: Plan, residuals: Residuals, cotangents: Outputs) -> Inputs:
    """Gradients of the inputs. cotangents: of h and of the last states."""
    return operation(_backward_on_backend, plan, residuals, cotangents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlstm(plan: Plan, inputs: Inputs) -> Outputs:
    return forward(plan.alone, inputs)[0]


def _mlstm_fwd(plan: Plan, inputs: Inputs):
    outputs, z, states = forward(plan, inputs)
    return outputs, Residuals(inputs, outputs[0] if plan.normalize else None, z, states)


def _mlstm_bwd(plan: Plan, residuals: Residuals, cotangents: Outputs):
    return (backward(plan, residuals, cotangents),)


_mlstm.defvjp(_mlstm_fwd, _mlstm_bwd)


@functools.partial(jax.jit, static_argnums=0)
def mlstm_forward(plan: Plan, inputs: Inputs) -> Outputs:
    """h and the last states (c, n, m) of the padded problem."""
    return _mlstm(plan, inputs)


def _mlstm_chunkwise_fwbw_generator(
    autocast_kernel_dtype: Any = jnp.bfloat16,
    return_last_states: bool = False,
    recompute_states_in_bw: bool = True,
    chunk_size: int = 64,
    eps: float = 1e-6,
    stabilize_correctly: bool = True,
    norm_val: float = 1.0,
) -> Callable[..., tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]]:
    """A function with exact gradients of all its arguments (xlstm_jax public API document of triton_stablef.triton_fwbw).

    The same arguments give the same function, so that jit does not compile anew.

    Args:
      autocast_kernel_dtype: of q, k, v in the matrix products; None: that of matQ. Gates and states stay float32.
      return_last_states: whether C, N and M of the last step are returned; else None in their places.
      recompute_states_in_bw, chunk_size, eps, stabilize_correctly, norm_val: as for ``mlstm_pallas.mlstm_chunkwise``.

    Returns:
      forward(matQ (B, NH, S, DHQK), matK, matV (B, NH, S, DHV), vecI (B, NH, S), vecF, matC_initial=None (B, NH, DHQK, DHV),
      vecN_initial=None (B, NH, DHQK), scaM_initial=None (B, NH)) -> (H, C, N, M). H has the dtype of matQ, the states are float32.
    """
    dtype = None if autocast_kernel_dtype is None else as_dtype(autocast_kernel_dtype)
    return _forward_function(dtype, return_last_states, recompute_states_in_bw, chunk_size, eps, stabilize_correctly, norm_val)


@functools.cache
def _forward_function(dtype, return_last_states, recompute_states_in_bw, chunk_size, eps, stabilize_correctly, norm_val):
    def forward(matQ, matK, matV, vecI, vecF, matC_initial=None, vecN_initial=None, scaM_initial=None):
        from mlstm_pallas.api import mlstm_chunkwise  # which is made of this module

        made = mlstm_chunkwise(
            matQ,
            matK,
            matV,
            vecI,
            vecF,
            matC_initial,
            vecN_initial,
            scaM_initial,
            return_last_states,
            eps=eps,
            chunk_size=chunk_size,
            autocast_kernel_dtype=dtype,
            stabilize_correctly=stabilize_correctly,
            norm_val=norm_val,
            recompute_states_in_bw=recompute_states_in_bw,
        )
        return (made[0], *made[1]) if return_last_states else (made, None, None, None)

    return forward


def _get_chunkwise_fwbw_kernel(autocast_kernel_dtype: Any, **kwargs: Any) -> Callable[..., Any]:
    """The function of ``_mlstm_chunkwise_fwbw_generator`` (xlstm_jax public API document of triton_stablef.triton_fwbw)."""
    return _mlstm_chunkwise_fwbw_generator(autocast_kernel_dtype, **kwargs)
