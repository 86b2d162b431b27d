"""The list of stages, forward and backward, joined by one custom_vjp. No maths and no block specs here."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlstm_pallas import reference
from mlstm_pallas.backend import on_backend
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.gates import chunk_gates as chunk_gates_xla
from mlstm_pallas.gates import gate_gradients, materialised, row_gradients, tile_sums
from mlstm_pallas.problem import Problem
from mlstm_pallas.sharding import over_shards
from mlstm_pallas.stages.chunk_gates import chunk_gates
from mlstm_pallas.stages.parallel_bw_dK import parallel_bw_dK
from mlstm_pallas.stages.parallel_bw_dQ import parallel_bw_dQ
from mlstm_pallas.stages.parallel_bw_dQKV import parallel_bw_dQKV
from mlstm_pallas.stages.parallel_bw_dV import parallel_bw_dV
from mlstm_pallas.stages.parallel_fw_H import parallel_fw_H
from mlstm_pallas.stages.recurrent_bw_dC import recurrent_bw_dC
from mlstm_pallas.stages.recurrent_fw_C import recurrent_fw_C


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a call."""

    problem: Problem
    config: KernelConfig
    eps: float
    stabilize_correctly: bool
    norm_val: float
    recompute_states_in_bw: bool
    backend: str | None

    @property
    def normaliser(self) -> dict[str, Any]:
        return dict(eps=self.eps, stabilize_correctly=self.stabilize_correctly, norm_val=self.norm_val)

    def launch(self, interpret: bool) -> dict[str, Any]:
        return dict(problem=self.problem, config=self.config, interpret=interpret)

    def chunks(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.problem.NC, self.problem.L, *x.shape[3:])


class Inputs(NamedTuple):
    """Padded and cast: q, k, v in the kernel dtype, the rest float32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    i: jax.Array
    f: jax.Array
    c_initial: jax.Array
    n_initial: jax.Array
    m_initial: jax.Array


Outputs = tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]  # h, (c, n, m)


class Residuals(NamedTuple):
    """What the backward pass keeps; the states only where they are not to be recomputed."""

    inputs: Inputs
    h: jax.Array
    z: jax.Array
    states: tuple[jax.Array, ...] | None


def _forward_triton(plan: Plan, interpret: bool, x: Inputs):
    launch = plan.launch(interpret)
    gates = chunk_gates(x.i, x.f, x.m_initial, **launch)
    C_states, n_states, C_last, n_last = recurrent_fw_C(x.k, x.v, gates, x.c_initial, x.n_initial, **launch)
    h, z = parallel_fw_H(x.q, x.k, x.v, gates, C_states, n_states, output_dtype=x.q.dtype, **plan.normaliser, **launch)
    states = (C_states, n_states, C_last, n_last)
    return (h, (*states[2:], gates.scaM_states[..., -1])), z, None if plan.recompute_states_in_bw else states


def _backward_triton(plan: Plan, interpret: bool, residuals: Residuals, cotangents: Outputs) -> Inputs:
    launch = plan.launch(interpret)
    x, h, z, states = residuals
    if states is None:
        # Else the compiler sees that the forward pass made the same states, and keeps those.
        x = lax.optimization_barrier(x)
    dh, (dC_last, dn_last, dm_last) = cotangents
    gates = chunk_gates(x.i, x.f, x.m_initial, **launch)
    if states is None:
        states = recurrent_fw_C(x.k, x.v, gates, x.c_initial, x.n_initial, **launch)
    C_states, n_states, C_last, n_last = states
    rows = row_gradients(inner(dh, h), z, gates.vecM.reshape(z.shape), **plan.normaliser)
    dC_states, dn_states, dC, dn, through = recurrent_bw_dC(x.q, dh, gates, rows, dC_last, dn_last, C_states, n_states, **launch)
    if plan.config.splits_backward(plan.problem):
        dq, from_q = parallel_bw_dQ(x.q, x.k, x.v, dh, gates, rows, C_states, n_states, **launch)
        dk, to_k = parallel_bw_dK(x.q, x.k, x.v, dh, gates, rows, dC_states, dn_states, **launch)
        dv = parallel_bw_dV(x.q, x.k, dh, gates, rows, dC_states, **launch)
        sums, through = tile_sums(*from_q, *to_k, through, plan.problem.T)
    else:
        dq, dk, dv, sums = parallel_bw_dQKV(x.q, x.k, x.v, dh, gates, rows, C_states, n_states, dC_states, dn_states, **launch)
    dm = _add_last(rows.vecDm, dm_last - inner(dC_last, C_last, 2) - inner(dn_last, n_last))
    di, df, dm_initial = gate_gradients(gates, plan.chunks(x.f), sums, through, dm)
    dm_initial += inner(dC, x.c_initial, 2) + inner(dn, x.n_initial)
    return Inputs(dq, dk, dv, di, df, dC, dn, dm_initial)


def _forward_xla(plan: Plan, x: Inputs):
    q, k, v = map(plan.chunks, x[:3])
    gates = chunk_gates_xla(plan.chunks(x.i), plan.chunks(x.f), x.m_initial)
    states = reference.chunk_states(k, v, gates, x.c_initial, x.n_initial)
    num, z = reference.chunk_outputs(q, k, v, gates, *states[:2], plan.problem.qk_scale)
    h = reference.normalise(num, z, gates.vecM, **plan.normaliser).astype(x.q.dtype).reshape(x.v.shape)
    outputs = h, (*states[2:], gates.scaM_states[..., -1])
    return outputs, z.reshape(x.i.shape), None if plan.recompute_states_in_bw else states


def _backward_xla(plan: Plan, residuals: Residuals, cotangents: Outputs) -> Inputs:
    x, h, z, states = residuals
    if states is None:
        x = lax.optimization_barrier(x)
    dh, (dC_last, dn_last, dm_last) = cotangents
    q, k, v, dh_chunks = map(plan.chunks, (*x[:3], dh))
    gates = chunk_gates_xla(plan.chunks(x.i), plan.chunks(x.f), x.m_initial)
    if states is None:
        states = reference.chunk_states(k, v, gates, x.c_initial, x.n_initial)
    C_states, n_states, C_last, n_last = states
    rows = row_gradients(inner(dh, h), z, gates.vecM.reshape(z.shape), **plan.normaliser)
    rows = materialised(rows, rows.vecInvDen)
    in_chunks = type(rows)(*map(plan.chunks, rows))
    dC_states, dn_states, dC, dn, through = reference.chunk_state_gradients(
        q, dh_chunks, gates, in_chunks, dC_last, dn_last, C_states, n_states, plan.problem.qk_scale
    )
    states = C_states, n_states, dC_states, dn_states
    gradients, sums = reference.chunk_gradients(q, k, v, dh_chunks, gates, in_chunks, *states, plan.problem.qk_scale)
    dm = _add_last(rows.vecDm, dm_last - inner(dC_last, C_last, 2) - inner(dn_last, n_last))
    di, df, dm_initial = gate_gradients(gates, plan.chunks(x.f), sums, through, dm)
    dm_initial += inner(dC, x.c_initial, 2) + inner(dn, x.n_initial)
    dq, dk, dv = (dx.reshape(y.shape).astype(y.dtype) for dx, y in zip(gradients, x[:3], strict=True))
    return Inputs(dq, dk, dv, di, df, dC, dn, dm_initial)


def inner(a: jax.Array, b: jax.Array, axes: int = 1) -> jax.Array:
    """Inner product over the last axes, in at least float32."""
    acc = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.sum(a.astype(acc) * b.astype(acc), axis=tuple(range(-axes, 0)))


def _add_last(dm: jax.Array, dm_last: jax.Array) -> jax.Array:
    return dm.at[..., -1].add(dm_last)


NO_SUCH_DERIVATIVE = (
    "mlstm_chunkwise has first derivatives in reverse mode only; for second derivatives and forward mode use "
    "mlstm_pallas.reference.chunkwise or mlstm_pallas.reference.recurrence"
)


def _forward_on_backend(plan: Plan, inputs: Inputs):
    return on_backend(plan.backend, functools.partial(_forward_triton, plan), functools.partial(_forward_xla, plan), inputs)


def _backward_on_backend(plan: Plan, residuals: Residuals, cotangents: Outputs) -> Inputs:
    triton, xla = functools.partial(_backward_triton, plan), functools.partial(_backward_xla, plan)
    return on_backend(plan.backend, triton, xla, residuals, cotangents)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def operation(function: Callable[..., Any], plan: Plan, *args: Any) -> Any:
    """function(plan, *args) on shards of batch and heads; it has no derivatives of its own."""
    return over_shards(function, plan, *args)


@operation.defjvp
def _no_jvp(function, plan, primals, tangents):
    raise TypeError(NO_SUCH_DERIVATIVE)


def forward(plan: Plan, inputs: Inputs):
    """Outputs, z and, where they are to be kept, the states."""
    return operation(_forward_on_backend, plan, inputs)


def backward(plan: Plan, residuals: Residuals, cotangents: Outputs) -> Inputs:
    """Gradients of the inputs. cotangents: of h and of the last states."""
    return operation(_backward_on_backend, plan, residuals, cotangents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlstm(plan: Plan, inputs: Inputs) -> Outputs:
    return forward(plan, inputs)[0]


def _mlstm_fwd(plan: Plan, inputs: Inputs):
    outputs, z, states = forward(plan, inputs)
    return outputs, Residuals(inputs, outputs[0], z, states)


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
    dtype = None if autocast_kernel_dtype is None else jnp.dtype(autocast_kernel_dtype)
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
