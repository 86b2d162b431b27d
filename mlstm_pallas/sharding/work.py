"""The work of a shard: what runs there, and the arrays (B * NH, ...) on which it runs.

Plain jnp may run for a few heads at a time.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.export import is_symbolic_dim

from mlstm_pallas.formulas.tile_sizes import largest_block
from mlstm_pallas.planning.call_spec import CallSpec, Plan
from mlstm_pallas.problem.arrays import Inputs, Residuals, heads_as_rows, heads_axes
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.problem.gpu import TPU
from mlstm_pallas.problem.version import __version__
from mlstm_pallas.sharding.axes import map_with_axes
from mlstm_pallas.stages.plain_forms import one_at_a_time

VMEM_STATES = 2**24  # bytes of float32 states of all chunks; VMEM also holds tiles and operands


@dataclasses.dataclass(frozen=True)
class Work:
    """What runs on shards: the arguments of ``on_shards`` without the arrays.

    Attributes:
      results: the record that the function returns, where fields of it have the layout of the call.
      options: the keywords of the function, as items.
      mapped: axes of vmap before B.
      at_once: heads of a device that run with each head of the function, on several TPUs.
    """

    function: Callable[..., Any]
    spec: CallSpec
    results: Any = None
    options: tuple[tuple[str, Any], ...] = ()
    mapped: int = 0
    at_once: int = 1

    def axes_of(self, args: Any) -> list[int]:
        """The axis of NH in each array of the arguments."""
        return [self.mapped + axis for axis in heads_axes(args, self.spec.layout)]

    def axes_of_results(self) -> Any:
        """The axis of NH in each field of the results, or in all results."""
        if self.results is None:
            return self.mapped + 1
        return self.results(*self.axes_of(self.results._make(self.results._fields)))

    def axis_of_each_result(self) -> Iterator[int]:
        """The axes of NH in the results, one after the other, and then without an end.

        Fields in the layout of the call are arrays and lead, so it is no matter how many arrays the
        others have.
        """
        fields = jax.tree.leaves(self.axes_of_results())
        return itertools.chain(fields, itertools.repeat(self.mapped + 1))

    def identity(self) -> Any:
        """An operand that distinguishes what runs in the compiled module.

        Otherwise only the address of a callback differs there, which
        jax_remove_custom_partitioning_ptr_from_cache_key removes from the key of the persistent
        compilation cache, and calls that differ in eps alone would share an entry.
        """
        functions = ("", self.function), *self.options
        names = [(name, getattr(x, "__name__", x)) for name, x in functions]
        identity = repr((__version__, names, self.spec, self.mapped))
        return np.frombuffer(hashlib.sha256(identity.encode()).digest(), np.uint32)


def on_shard(work: Work, identity: Any, *args: Any) -> Any:
    """The work on the arrays of a shard, whose mapped axes, B and NH become one axis.

    identity: of the work; it is not read.
    """
    mapped, spec, axes = work.mapped, work.spec, work.axes_of(args)
    heads, *others = dict.fromkeys(
        (*x.shape[: mapped + 1], *x.shape[axis : axis + 1])
        for x, axis in zip(jax.tree.leaves(args), axes, strict=True)
    )
    if others and not spec.pooled:
        raise ValueError(
            f"arguments have shards of {' and '.join(map(str, sorted([heads, *others])))} batch "
            "entries and heads, expected one: inside a shard_map that leaves mesh axes to the "
            "compiler constrain them with jax.lax.with_sharding_constraint"
        )
    if spec.config.batch_invariant and math.prod(heads) == 1 and not spec.pooled:
        # Pallas replaces the indices of one CTA by constants, so Triton may lay out tiles otherwise
        # than beside other entries.
        twice = jax.tree.map(lambda x: jnp.concatenate([x, x], axis=mapped), args)
        outputs = on_shard(work, identity, *twice)
        return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, 0, 1, axis=mapped), outputs)
    *batch, NH = heads
    spec = spec.with_heads(math.prod(batch), NH)
    run = functools.partial(work.function, **dict(work.options))
    # Some lowering may run a sequence for a few heads at a time.
    if (spec.gpu is TPU or spec.config.batch_invariant) and (
        isinstance(args[0], Inputs | Residuals) and not is_symbolic_dim(spec.problem.B)
    ):
        run = functools.partial(_few_heads_at_a_time, run, work)
    if not spec.pooled:
        args = map_with_axes(functools.partial(_merged, work, spec.problem), args, axes)
    outputs = run(spec.plan, *args)
    if spec.pooled:
        return outputs
    return map_with_axes(
        functools.partial(_split, work, heads), outputs, work.axis_of_each_result()
    )


def _merged(work: Work, p: Problem, x: Array, axis: int) -> Array:
    """An array of a shard as (B * NH, ...) or, if axis, that of NH, is behind S, (B, S, NH, D)."""
    steps_first = axis > work.mapped + 1
    return x.reshape(p.B if steps_first else p.BNH, *x.shape[work.mapped + 2 - steps_first :])


def _split(work: Work, heads: Sequence[int], x: Array, axis: int) -> Array:
    """The inverse of ``_merged``; heads: the sizes of the mapped axes, B and NH."""
    steps_first = axis > work.mapped + 1
    return x.reshape(*(heads[:-1] if steps_first else heads), *x.shape[1:])


def _few_heads_at_a_time(run: Callable[..., Any], work: Work, plan: Plan, *args: Any) -> Any:
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
