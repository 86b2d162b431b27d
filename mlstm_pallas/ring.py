"""mlstm_ring_states, mlstm_ring_step, mlstm_ring_flush: generation with a ring buffer of tokens."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mlstm_pallas.planning.backend import requested_backend
from mlstm_pallas.planning.call_spec import CallSpec
from mlstm_pallas.planning.config import KernelConfig
from mlstm_pallas.planning.options import Options
from mlstm_pallas.prepare import as_int32
from mlstm_pallas.problem import validation
from mlstm_pallas.problem.annotations import Array, BackendName, InputGateName, LayoutName, States
from mlstm_pallas.problem.dimensions import Layout, Problem, accumulator_dtype
from mlstm_pallas.problem.gpu import target_gpu
from mlstm_pallas.schedules.sharding import on_shards, sharded_alike
from mlstm_pallas.stages.ring_step import Operands
from mlstm_pallas.stages.stage import Lowering


class RingStates(NamedTuple):
    c: Any  # (B, NH, DHQK, DHV)
    n: Any  # (B, NH, DHQK)
    m: Any  # (B, NH)
    k: Any  # (B, NH, 2 L, DHQK)
    v: Any  # (B, NH, 2 L, DHV)
    i: Any  # (B, NH, 2 L)
    f: Any  # (B, NH, 2 L)
    start: Any  # (B, NH)
    count: Any  # (B, NH)
    pending: Any  # (B, NH)


def mlstm_ring_states(c, n, m, *, dtype, length=16, phase=None):
    B, NH, DHQK, DHV = c.shape
    heads, rows = (B, NH), 2 * length
    if phase is None:
        phase = jnp.arange(B * NH, dtype="int32").reshape(heads)
    count = jnp.broadcast_to(phase, heads) % length
    acc = accumulator_dtype(dtype)
    zeros = functools.partial(jnp.zeros, dtype=dtype)
    return RingStates(
        c, n, m, zeros((*heads, rows, DHQK)), zeros((*heads, rows, DHV)),
        jnp.full((*heads, rows), -jnp.inf, acc), jnp.full((*heads, rows), jnp.inf, acc),
        jnp.zeros(heads, "int32"), count.astype("int32"), jnp.zeros(heads, "int32"),
    )  # fmt: skip


class Token(NamedTuple):
    q: Any
    k: Any
    v: Any
    i: Any
    f: Any


def _step(spec: CallSpec, lowering: Lowering, x: Token, states: Any, accepted: Any, slots: Any):
    run = spec.stage("ring_step", lowering)
    h, *after = run(Operands(*x, *states, accepted, slots), normaliser=spec.normaliser)
    return h, RingStates(*after)


@functools.partial(jax.jit, static_argnums=0)
def step(spec: CallSpec, x: Token, states: RingStates, accepted: Any, slots: Any):
    if spec.backend == "xla":
        return _step(spec, Lowering.XLA, x, states, accepted, slots)
    return on_shards(_step, spec, x, states, accepted, slots)


def mlstm_ring_step(
    q, k, v, i, f, states, *, accepted=None, eps=1e-6, norm_val=1.0, stabilize_correctly=True,
    input_gate="exp", normalize=True, slots=None, layout="BNTH", backend=None, config=None,
):
    options = Options(
        eps=eps, stabilize_correctly=stabilize_correctly, norm_val=norm_val,
        input_gate=input_gate, normalize=normalize, layout=layout, backend=backend, config=config,
    )
    backend = requested_backend(options.backend)
    x, token = Token(q, k, v, i, f), q.ndim == 3
    if token:
        x = jax.tree.map(lambda y: y[:, :, None], x)
    elif options.layout is Layout.BTNH:
        x = jax.tree.map(lambda y: jnp.swapaxes(y, 1, 2), x)
    B, NH, T, DHQK = x.q.shape
    DHV = x.v.shape[-1]
    spec = CallSpec(
        **vars(options) | dict(backend=backend, layout=Layout.BNTH),  # of x, by now
        problem=Problem(B, NH, 1, DHQK, DHV, 1, DHQK**-0.5),
        dtype=states.c.dtype, gpu=target_gpu(), pooled=slots is not None,
    )
    if accepted is not None:
        accepted = jnp.broadcast_to(as_int32(accepted)[:, None], (B, NH))
    x, states, accepted, slots = sharded_alike(spec, (x, states, accepted, slots))
    m = states.m
    if not options.stabilised:
        states = states._replace(m=None)
    h, after = step(spec, x, states, accepted, slots)
    if after.m is None:
        after = after._replace(m=m)
    h = h[:, :, 0] if token else jnp.swapaxes(h, 1, 2) if options.layout is Layout.BTNH else h
    return h, after
