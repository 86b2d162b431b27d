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
from mlstm_pallas.gate_gradients import NO_NORMALISER, chunk_sums, gate_gradients, row_gradients, tile_sums
from mlstm_pallas.gates import chunk_gates as chunk_gates_xla
from mlstm_pallas.gates import materialised
from mlstm_pallas.problem import InputGate, Problem, as_dtype
from mlstm_pallas.sharding import over_shards
from mlstm_pallas.stages.chunk_gates import chunk_gates
from mlstm_pallas.stages.parallel_bw_dK import parallel_bw_dK
from mlstm_pallas.stages.parallel_bw_dQ import parallel_bw_dQ
from mlstm_pallas.stages.parallel_bw_dQKV import parallel_bw_dQKV
from mlstm_pallas.stages.parallel_bw_dV import parallel_bw_dV
from mlstm_pallas.stages.parallel_bw_P import parallel_bw_P
from mlstm_pallas.stages.parallel_fw_H import parallel_fw_H
from mlstm_pallas.stages.parallel_fw_P import parallel_fw_P
from mlstm_pallas.stages.recurrent_bw_dC import recurrent_bw_dC
from mlstm_pallas.stages.recurrent_bw_dK import recurrent_bw_dK
from mlstm_pallas.stages.recurrent_bw_dQ import recurrent_bw_dQ
from mlstm_pallas.stages.recurrent_bw_dV import recurrent_bw_dV
from mlstm_pallas.stages.recurrent_fw_C import recurrent_fw_C
from mlstm_pallas.stages.recurrent_fw_H import recurrent_fw_H
from mlstm_pallas.stages.walk import vector_states


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
    input_gate: InputGate = InputGate.EXP
    normalize: bool = True

    @property
    def stabilised(self) -> bool:
        return self.input_gate is InputGate.EXP

    @property
    def normaliser(self) -> dict[str, Any]:
        # where m is 0, both floors are the same
        return dict(eps=self.eps, stabilize_correctly=self.stabilize_correctly and self.stabilised, norm_val=self.norm_val)

    def with_heads(self, B: int, NH: int) -> "Plan":
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, B=B, NH=NH))

    def launch(self, interpret: bool) -> dict[str, Any]:
        return dict(problem=self.problem, config=self.config, interpret=interpret)

    @property
    def stateless_forward(self) -> "Plan | None":
        """The plan of a forward pass that stores no states, whose chunks are shorter; None where states are stored."""
        return self._walking("recurrent_fw_H")

    @property
    def stateless_backward(self) -> "Plan | None":
        return self._walking("recurrent_bw_dQ")

    def _walking(self, stage: str) -> "Plan | None":
        """The plan in the chunks of the stage, where it runs."""
        if not any(stage in stages for stages in self.config.passes(self.problem, self.recompute_states_in_bw)):
            return None
        return dataclasses.replace(self, problem=self.config.problem_of(stage, self.problem))

    def chunks(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.problem.NC, self.problem.L, *x.shape[3:])


class Inputs(NamedTuple):
    """Padded and cast: q, k, v in the kernel dtype, starts (1 where a packed sequence begins) int32, the rest float32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    i: jax.Array
    f: jax.Array
    c_initial: jax.Array
    n_initial: jax.Array
    m_initial: jax.Array
    starts: jax.Array | None = None


Outputs = tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]  # h, (c, n, m)


class Residuals(NamedTuple):
    """What the backward pass keeps: h and z for the normaliser, the states where they are not to be recomputed."""

    inputs: Inputs
    h: jax.Array | None
    z: jax.Array | None
    states: tuple[jax.Array, ...] | None


def _forward_triton(plan: Plan, interpret: bool, x: Inputs):
    if plan.stateless_forward:
        return _stateless_forward(plan.stateless_forward, interpret, x)
    launch = plan.launch(interpret)
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, plan.input_gate, **launch)
    C_states, n_states, C_last, n_last = recurrent_fw_C(x.k, x.v, gates, x.c_initial, x.n_initial, **launch)
    normaliser = dict(plan.normaliser, normalize=plan.normalize)
    h, z = parallel_fw_H(x.q, x.k, x.v, gates, C_states, n_states, output_dtype=x.q.dtype, **normaliser, **launch)
    states = (C_states, n_states, C_last, n_last)
    return (h, (*states[2:], gates.scaM_states[..., -1])), z, None if plan.recompute_states_in_bw else states


def _stateless_forward(plan: Plan, interpret: bool, x: Inputs):
    launch = plan.launch(interpret)
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, plan.input_gate, **launch)
    scores, z, n_last = parallel_fw_P(x.q, x.k, gates, x.n_initial, normalize=plan.normalize, **plan.normaliser, **launch)
    h, C_last = recurrent_fw_H(x.q, x.v, scores, gates.scaGamma, x.c_initial, output_dtype=x.q.dtype, **launch)
    return (h, (C_last, n_last, gates.scaM_states[..., -1])), z, None


def _backward_triton(plan: Plan, interpret: bool, residuals: Residuals, cotangents: Outputs) -> Inputs:
    if plan.stateless_backward:
        return _stateless_backward(plan.stateless_backward, interpret, residuals, cotangents)
    launch = plan.launch(interpret)
    x, h, z, states = residuals
    if states is None:
        # Else the compiler sees that the forward pass made the same states, and keeps those.
        x = lax.optimization_barrier(x)
    dh, (dC_last, dn_last, dm_last) = cotangents
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, plan.input_gate, **launch)
    if states is None:
        states = recurrent_fw_C(x.k, x.v, gates, x.c_initial, x.n_initial, **launch)
    C_states, n_states, C_last, n_last = states
    rows = row_gradients_of(plan, dh, h, z, gates)
    dC_states, dn_states, dC, dn, through = recurrent_bw_dC(x.q, dh, gates, rows, dC_last, dn_last, C_states, n_states, **launch)
    if plan.config.splits_backward(plan.problem):
        dq, from_q = parallel_bw_dQ(x.q, x.k, x.v, dh, gates, rows, C_states, n_states, **launch)
        dk, to_k = parallel_bw_dK(x.q, x.k, x.v, dh, gates, rows, dC_states, dn_states, **launch)
        dv = parallel_bw_dV(x.q, x.k, dh, gates, rows, dC_states, **launch)
        sums, through = tile_sums(*from_q, *to_k, through, plan.problem.T)
    else:
        dq, dk, dv, sums = parallel_bw_dQKV(x.q, x.k, x.v, dh, gates, rows, C_states, n_states, dC_states, dn_states, **launch)
    last = dC_last, dn_last, dm_last, C_last, n_last
    return Inputs(dq, dk, dv, *_gate_and_state_gradients(plan, x, gates, rows, sums, through, last, dC, dn))


def _stateless_backward(plan: Plan, interpret: bool, residuals: Residuals, cotangents: Outputs) -> Inputs:
    launch, p = plan.launch(interpret), plan.problem
    x, h, z, _ = residuals
    x = lax.optimization_barrier(x)  # as above: nothing that the forward pass made is kept for this one
    dh, (dC_last, dn_last, dm_last) = cotangents
    gates = chunk_gates(x.i, x.f, x.m_initial, x.starts, plan.input_gate, **launch)
    rows = row_gradients_of(plan, dh, h, z, gates)
    # Of kbar as rounded, as C: what n and dn give and take is to be the same.
    bits = jnp.finfo(x.k.dtype)
    kbar = lax.reduce_precision(plan.chunks(x.k).astype(jnp.float32) * gates.vecAbar[..., None], bits.nexp, bits.nmant)
    n, n_last = vector_states(jnp.sum(kbar, axis=-2), gates.scaGamma, x.n_initial)
    scores, norms, pairs = parallel_bw_P(x.q, x.k, x.v, dh, gates, rows, n if plan.normalize else None, **launch)
    added_dn = jnp.zeros_like(n) if norms.added_dn is None else norms.added_dn
    dn_states, dn = vector_states(added_dn, gates.scaGamma, dn_last, backward=True)
    r = gates.vecW.reshape(x.i.shape) * p.qk_scale
    r = r if rows.vecInvDen is None else r * rows.vecInvDen
    dq, from_state, C_last = recurrent_bw_dQ(x.v, dh, scores, r, gates.scaGamma, x.c_initial, **launch)
    from_state = from_state if norms.from_norm is None else from_state + norms.from_norm
    dk, to_state, dC = recurrent_bw_dK(x.v, dh, scores, gates, dC_last, dn_states, **launch)
    dv = recurrent_bw_dV(x.k, dh, scores, gates, dC_last, **launch)
    enters = inner(dC, x.c_initial, 2) + inner(dn, x.n_initial)
    resolution = 2.0**-16 if x.q.dtype == jnp.bfloat16 else 2.0**-22
    sums, through = chunk_sums(gates, *pairs, from_state, to_state, enters, resolution)
    last = dC_last, dn_last, dm_last, C_last, n_last
    return Inputs(dq, dk, dv, *_gate_and_state_gradients(plan, x, gates, rows, sums, through, last, dC, dn))


def _forward_xla(plan: Plan, x: Inputs):
    q, k, v = map(plan.chunks, x[:3])
    gates = _gates_xla(plan, x)
    states = reference.chunk_states(k, v, gates, x.c_initial, x.n_initial)
    num, z = reference.chunk_outputs(q, k, v, gates, *states[:2], plan.problem.qk_scale)
    h = reference.normalise(num, z, gates.vecM, **plan.normaliser) if plan.normalize else num
    outputs = h.astype(x.q.dtype).reshape(x.v.shape), (*states[2:], gates.scaM_states[..., -1])
    return outputs, z.reshape(x.i.shape) if plan.normalize else None, None if plan.recompute_states_in_bw else states


def _gates_xla(plan: Plan, x: Inputs):
    starts = None if x.starts is None else plan.chunks(x.starts)
    return chunk_gates_xla(plan.chunks(x.i), plan.chunks(x.f), x.m_initial, starts, plan.input_gate)


def _backward_xla(plan: Plan, residuals: Residuals, cotangents: Outputs) -> Inputs:
    x, h, z, states = residuals
    if states is None:
        x = lax.optimization_barrier(x)
    dh, (dC_last, dn_last, dm_last) = cotangents
    q, k, v, dh_chunks = map(plan.chunks, (*x[:3], dh))
    gates = _gates_xla(plan, x)
    if states is None:
        states = reference.chunk_states(k, v, gates, x.c_initial, x.n_initial)
    C_states, n_states, C_last, n_last = states
    rows = row_gradients_of(plan, dh, h, z, gates)
    if rows.vecInvDen is not None:
        rows = materialised(rows, rows.vecInvDen)
    in_chunks = jax.tree.map(plan.chunks, rows)
    dC_states, dn_states, dC, dn, through = reference.chunk_state_gradients(
        q, dh_chunks, gates, in_chunks, dC_last, dn_last, C_states, n_states, plan.problem.qk_scale
    )
    states = C_states, n_states, dC_states, dn_states
    gradients, sums = reference.chunk_gradients(q, k, v, dh_chunks, gates, in_chunks, *states, plan.problem.qk_scale)
    dq, dk, dv = (dx.reshape(y.shape).astype(y.dtype) for dx, y in zip(gradients, x[:3], strict=True))
    last = dC_last, dn_last, dm_last, C_last, n_last
    return Inputs(dq, dk, dv, *_gate_and_state_gradients(plan, x, gates, rows, sums, through, last, dC, dn))


def row_gradients_of(plan: Plan, dh, h, z, gates):
    return row_gradients(inner(dh, h), z, gates.vecM.reshape(z.shape), **plan.normaliser) if plan.normalize else NO_NORMALISER


def _gate_and_state_gradients(plan: Plan, x: Inputs, gates, rows, sums, through, last, dC, dn):
    """(di, df, dC, dn, dm) of the gates and the initial states; last: gradients of the last states, and C and n."""
    dC_last, dn_last, dm_last, C_last, n_last = last
    dm = None
    if plan.stabilised:
        dm = rows.vecDm.at[..., -1].add(dm_last - inner(dC_last, C_last, 2) - inner(dn_last, n_last))
    starts = None if x.starts is None else plan.chunks(x.starts)
    di, df, dm_initial = gate_gradients(gates, plan.chunks(x.i), plan.chunks(x.f), sums, through, dm, starts, plan.input_gate)
    if plan.stabilised:
        dm_initial += inner(dC, x.c_initial, 2) + inner(dn, x.n_initial)
    return di, df, dC, dn, dm_initial


def inner(a: jax.Array, b: jax.Array, axes: int = 1) -> jax.Array:
    """Inner product over the last axes, in at least float32."""
    acc = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.sum(a.astype(acc) * b.astype(acc), axis=tuple(range(-axes, 0)))


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
