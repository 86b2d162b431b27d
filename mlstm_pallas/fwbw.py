"""The list of stages, forward and backward, joined by one custom_vjp. No maths and no block specs here."""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax

from mlstm_pallas import reference
from mlstm_pallas.config import KernelConfig
from mlstm_pallas.problem import Problem
from mlstm_pallas.stages.chunk_gates import chunk_gates
from mlstm_pallas.stages.parallel_fw_H import parallel_fw_H
from mlstm_pallas.stages.recurrent_fw_C import recurrent_fw_C


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a call."""

    problem: Problem
    config: KernelConfig
    eps: float
    stabilize_correctly: bool
    norm_val: float
    backend: str | None

    @property
    def normaliser(self) -> dict[str, Any]:
        return dict(eps=self.eps, stabilize_correctly=self.stabilize_correctly, norm_val=self.norm_val)

    def launch(self, interpret: bool) -> dict[str, Any]:
        return dict(problem=self.problem, config=self.config, interpret=interpret)


def _forward_pallas(plan: Plan, interpret: bool, q, k, v, i, f, c_initial, n_initial, m_initial):
    common = plan.launch(interpret)
    gates = chunk_gates(i, f, m_initial, **common)
    C_states, n_states, C_last, n_last = recurrent_fw_C(k, v, gates, c_initial, n_initial, **common)
    h, _ = parallel_fw_H(q, k, v, gates, C_states, n_states, output_dtype=q.dtype, **plan.normaliser, **common)
    return h, (C_last, n_last, gates.scaM_states[..., -1])


def _forward_xla(plan: Plan, q, k, v, i, f, c_initial, n_initial, m_initial):
    h, states = reference.chunkwise(q, k, v, i, f, c_initial, n_initial, m_initial, chunk_size=plan.problem.L, **plan.normaliser)
    return h.astype(q.dtype), states


def _forward(plan: Plan, *args):
    xla = functools.partial(_forward_xla, plan)
    if plan.backend == "xla":
        return xla(*args)
    if plan.backend is None:
        return lax.platform_dependent(*args, cuda=functools.partial(_forward_pallas, plan, False), default=xla)
    return _forward_pallas(plan, plan.backend == "interpret", *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_vjp(plan: Plan, *args):
    return _forward(plan, *args)


def _with_vjp_fwd(plan: Plan, *args):
    return _forward(plan, *args), args


def _with_vjp_bwd(plan: Plan, args, cotangents):
    return jax.vjp(functools.partial(_forward_xla, plan), *args)[1](cotangents)


_with_vjp.defvjp(_with_vjp_fwd, _with_vjp_bwd)


@functools.partial(jax.jit, static_argnums=0)
def mlstm_forward(plan: Plan, *args: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """(q, k, v, i, f, c_initial, n_initial, m_initial), padded and cast -> h, (c, n, m) of the padded problem."""
    if plan.backend == "xla":
        return _forward_xla(plan, *args)
    return _with_vjp(plan, *args)
