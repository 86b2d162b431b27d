"""Runs a pass or a step on its shards, whatever the axes of the mesh are."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from mlstm_pallas.launches.lowering import Lowering
from mlstm_pallas.planning.call_spec import CallSpec, Plan
from mlstm_pallas.planning.dispatch import stage
from mlstm_pallas.problem.gpu import TPU
from mlstm_pallas.sharding.axes import map_with_axes, padded_spec, placed, resharded, varying_as
from mlstm_pallas.sharding.marks import NO_SUCH_DERIVATIVE, not_differentiated
from mlstm_pallas.sharding.partitioned import partitioned
from mlstm_pallas.sharding.tpu import in_groups
from mlstm_pallas.sharding.work import Work, on_shard
from mlstm_pallas.stages.plain_forms import on_rows, one_at_a_time


def on_shards(
    function: Callable[..., Any],
    spec: CallSpec,
    *args: Any,
    results: type[Any] | None = None,
    message: str = NO_SUCH_DERIVATIVE,
    **options: Any,
) -> Any:
    """Runs a function on shards of B and NH, without derivatives.

    The function gets B and NH, the first axes of arrays, as one axis. Fields in
    ``arrays.IN_LAYOUT`` are (B, S, NH, D) with layout "BTNH", here and in the function. A shard's
    spec is spec.with_heads(B, NH).

    If spec.pooled, they stay two axes, of which NH alone is sharded. The first array then has them;
    others are pools, (P, NH, ...), or have no NH.

    Args:
      function: (plan, *pytrees of arrays of a shard, **options) -> pytree of such arrays.
      results: the type that the function returns, if it has fields in ``arrays.IN_LAYOUT``.
      message: of the TypeError that a derivative raises.
      options: static keywords of the function.
    """
    work = Work(function, spec, results, tuple(options.items()))
    runs_anywhere = spec.lowering.interpret or spec.lowering is Lowering.XLA
    kernels = None if runs_anywhere else spec.lowering
    return _mappable(work)(*not_differentiated(args, message, kernels))


def run_step(spec: CallSpec, x: Any) -> Any:
    """h and the new states of a stage of tokens, from its operands.

    B and NH are the first axes, but of pools and slots. m is None with the sigmoid input gate. Only
    plain jnp is differentiable.
    """
    if spec.lowering is Lowering.XLA:
        return _run_step(spec.plan, x, axes=2)
    message = f'the kernels of mlstm_{spec.stage} have no derivatives; backend="xla" has them'
    return on_shards(_run_step, spec, x, message=message, axes=1 + spec.pooled)


def _run_step(plan: Plan, x: Any, *, axes: int) -> Any:
    """axes: of heads, the first ones."""
    (name,) = plan.forward
    run: Any = functools.partial(stage(name, plan.forward), normaliser=plan.spec.normaliser)
    if not plan.one_head_at_a_time:
        return run(x)
    run = one_at_a_time(run, axes)
    return run(x) if x.slots is None else on_rows(run, x)


def _mappable(work: Work) -> Callable[..., Any]:
    """The work on arrays; a mapped axis becomes one more axis before B."""
    call = custom_vmap(functools.partial(_on_mesh, work))

    @call.def_vmap
    def rule(axis_size: int, is_mapped: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        # A grid cannot be empty, so an axis of size 0 runs with size 1, whose results are cut.
        size = max(axis_size, 1)

        def with_axis(x: Array, at: bool) -> Array:
            if not at:
                return jnp.broadcast_to(x, (size, *x.shape))
            return x if axis_size else jnp.zeros((size, *x.shape[1:]), x.dtype)

        args = jax.tree.map(with_axis, args, tuple(is_mapped))
        if work.spec.pooled:  # every mapped element has pools of its own
            outputs = jax.lax.map(lambda x: call(*x), args)
        else:
            outputs = _mappable(dataclasses.replace(work, mapped=work.mapped + 1))(*args)
        outputs = outputs if axis_size else jax.tree.map(lambda x: x[:0], outputs)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return call


def _on_mesh(work: Work, *args: Any) -> Any:
    """Finds the shards as the axes of the mesh ask; the module's docstring has the cases."""
    mesh = jax.typeof(jax.tree.leaves(args)[0]).sharding.mesh
    context = jax.sharding.get_abstract_mesh()
    devices = math.prod(context.shape[axis] for axis in context.auto_axes)
    if context.empty and context.abstract_device is None:  # the devices are not known
        devices = jax.device_count() if work.spec.gpu is TPU else 0
    if mesh.explicit_axes:
        axes = work.axes_of(args)
        args, common = resharded(work.spec, args, axes, mesh, work.mapped)
        # An empty set is all axes but those that vmap holds, which only shard_map knows.
        some = len(mesh.explicit_axes) < len(mesh.axis_names)
        outputs = jax.shard_map(
            functools.partial(on_shard, work, None),
            mesh=None if mesh == context else mesh,
            in_specs=map_with_axes(
                lambda x, axis: padded_spec(placed(common, axis), x.ndim), args, axes
            ),
            out_specs=jax.tree.map(lambda axis: placed(common, axis), work.axes_of_results()),
            axis_names=set(mesh.explicit_axes) if some else set(),
            check_vma=False,
        )(*args)
        outputs = varying_as(args, outputs)  # check_vma=False forgets the manual axes outside
    elif devices == 1 or (work.spec.gpu is TPU and work.spec.pooled):
        outputs = on_shard(work, None, *args)
    elif work.spec.gpu is TPU:
        outputs = in_groups(work, devices, *args)
    else:
        outputs = partitioned(work, tuple(work.axes_of(args)))(work.identity(), *args)
    return outputs
