"""The chunkwise mLSTM as one jitted call, and the custom_vjp that joins the schedules."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mlstm_pallas.planning.call_spec import CallSpec
from mlstm_pallas.prepare import Arguments, padded, results, returned_states
from mlstm_pallas.problem.arrays import Cotangents, Forward, Inputs, Residuals, States
from mlstm_pallas.problem.dimensions import Layout
from mlstm_pallas.schedules.backward import backward, packed_backward
from mlstm_pallas.schedules.forward import forward, packed
from mlstm_pallas.sharding.marks import reverse_mode_only
from mlstm_pallas.sharding.on_shards import on_shards

# The custom_vjp traces both its function and its forward rule. With jit, jax >= 0.11 traces the
# kernels once where both have the same spec: with recompute_states_in_bw.
forward_once = jax.jit(forward, static_argnums=0, inline=True)


def _passes(spec: CallSpec) -> tuple[Any, Any]:
    """The forward and the backward schedule."""
    return (forward_once, backward) if spec.num_segments is None else (packed, packed_backward)


# One program also where the caller does not jit: no array is transferred for it, and what is inf in
# it stays inside.
@functools.partial(jax.jit, static_argnums=0)
def mlstm(spec: CallSpec, x: Arguments) -> Any:
    """h, and the last states or those of the segments if the caller asks for them."""
    return results(spec, x, *_mlstm(spec, reverse_mode_only(padded(spec, x))))


@functools.partial(jax.jit, static_argnums=(0, 1))
def mlstm_with_states(spec: CallSpec, every: int, x: Arguments) -> Any:
    """h, the last states and those after every so many steps, which are whole chunks of the call.

    The schedules store them in place of recomputing them in a backward pass, of which there is
    none.
    """
    message = "mlstm_chunkwise_states has no derivatives; mlstm_chunkwise has them"
    outputs: Forward = on_shards(
        forward_once, spec, padded(spec, x), results=Forward, message=message
    )
    stored, stride = outputs.states, every // spec.problem.L
    S = x.i.shape[1 + (spec.layout is Layout.BNTH)]
    C, n = (
        jnp.concatenate([before, last[:, :, None].astype(before.dtype)], axis=2)
        for before, last in ((stored.C, stored.C_last), (stored.n, stored.n_last))
    )
    states = States(
        *(jnp.moveaxis(y[:, :, stride::stride][:, :, : S // every], 2, 1) for y in (C, n, stored.m))
    )
    h, last = results(spec, x, outputs.h, outputs.last)
    return h, last, returned_states(spec, x, states)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlstm(spec: CallSpec, inputs: Inputs) -> tuple[jax.Array, Any]:
    outputs: Forward = on_shards(_passes(spec)[0], spec.forward_only, inputs, results=Forward)
    return outputs.h, outputs.last


def _mlstm_fwd(spec: CallSpec, inputs: Inputs) -> tuple[Any, ...]:
    outputs = named(on_shards(_passes(spec)[0], spec, inputs, results=Forward))
    return (outputs.h, outputs.last), residuals_of(spec, inputs, outputs)


def _mlstm_bwd(
    spec: CallSpec, residuals: Residuals, cotangents: tuple[jax.Array, Any]
) -> tuple[Any, ...]:
    dy = Cotangents(*cotangents)
    return (on_shards(_passes(spec)[1], spec, residuals, dy, results=Inputs),)


_mlstm.defvjp(_mlstm_fwd, _mlstm_bwd)


def named(outputs: Any) -> Any:
    """The arrays, each with the name of its field for policies of jax.checkpoint.

    The names are mlstm_h, mlstm_c, mlstm_n, mlstm_m and mlstm_z; C and C_last are mlstm_c.
    """

    def with_name(path: Any, x: jax.Array) -> Any:
        return checkpoint_name(x, f"mlstm_{path[-1].name[0].lower()}")

    return jax.tree_util.tree_map_with_path(with_name, outputs)


def residuals_of(spec: CallSpec, inputs: Inputs, outputs: Forward) -> Residuals:
    h = None if spec.normaliser is None else outputs.h
    states = outputs.last if outputs.states is None else outputs.states
    return Residuals(inputs, h, outputs.z, states)
