"""Plain jnp that runs for a few heads of a shard at a time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from mlstm_pallas.formulas.tile_sizes import largest_block
from mlstm_pallas.planning.call_spec import Plan
from mlstm_pallas.problem.arrays import heads_as_rows
from mlstm_pallas.problem.gpu import TPU
from mlstm_pallas.sharding.axes import map_with_axes
from mlstm_pallas.stages.plain_forms import one_at_a_time

if TYPE_CHECKING:
    from mlstm_pallas.sharding.work import Work

VMEM_STATES = 2**24  # bytes of float32 states of all chunks; VMEM also holds tiles and operands


def few_heads_at_a_time(run: Callable[..., Any], work: "Work", plan: Plan, *args: Any) -> Any:
    """run(plan, *args) on arrays (B * NH, ...) or (B, S, NH, D).

    On a TPU the intermediate arrays of a few heads fit in VMEM.
    """
    p, alone = plan.spec.problem, plan.one_head_at_a_time
    most = p.BNH
    if alone:
        most = 1
    elif plan.spec.gpu is TPU:
        most = VMEM_STATES // (4 * p.NC * p.DHQK * p.DHV * work.at_once)
    few = largest_block(p.BNH, min(most, p.BNH), 1) or 1
    if not alone and few == p.BNH:
        return run(plan, *args)
    plan = plan.spec.with_heads(1, few).plan

    def by_few(x: Array, axis: int) -> Array:
        x = heads_as_rows(x) if axis > work.mapped + 1 else x
        return x.reshape(-1, few, *x.shape[1:])

    def joined(x: Array, axis: int) -> Array:
        x = x.reshape(-1, *x.shape[2:])
        if axis > work.mapped + 1:
            x = jnp.swapaxes(x.reshape(p.B, p.NH, *x.shape[1:]), 1, 2)
        return x

    args = map_with_axes(by_few, args, work.axes_of(args))
    outputs = one_at_a_time(lambda args: run(plan, *args))(args)
    return map_with_axes(joined, outputs, work.axis_of_each_result())
