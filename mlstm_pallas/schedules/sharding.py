"""Where a pass or a step runs: on every device for its batch entries and heads, on its platform.

A Triton kernel is a custom call, which XLA cannot partition: by default it gathers all shards on
every device. But batch entries and heads are independent, so a function of them runs unchanged on
shards of these two axes (``on_shards``). How it learns its shards depends on the axes of the mesh:

* Auto axes: XLA propagates shardings long after tracing. JAX (0.10.2 to 0.12) has
  ``custom_partitioning`` for this. It takes a Shardy rule (the batch and head axes are free, all
  others need replication) and a function, which is traced again for the shapes of one shard. On one
  device it lowers to the function itself. It has no batching rule, so ``custom_vmap`` around it
  turns a mapped axis into one more free axis. Its callback cannot be exported and needs devices
  when it is lowered.
* Explicit axes: shardings are in the types of the arrays and are read when the call is traced.
  ``jax.shard_map`` over those axes lowers without devices (AbstractMesh), and exports.
* Manual axes, inside the user's shard_map: the arrays are the shard.

Arrays cross the boundary of the sharded region in their layout: ``arrays.heads_axes`` says which
axis is NH. Shardings of other axes (sequence, head dimensions) are undone first: by XLA on auto
axes, by ``jax.sharding.reshard`` on explicit ones.

Plain jnp may run for a few heads at a time: ``_few_heads_at_a_time``.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.export import is_symbolic_dim
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mlstm_pallas.formulas.tile_sizes import largest_block
from mlstm_pallas.planning.call_spec import CallSpec, Plan
from mlstm_pallas.planning.dispatch import stage
from mlstm_pallas.problem.arrays import Inputs, Residuals, heads_as_rows, heads_axes, varying_axes
from mlstm_pallas.problem.dimensions import Problem
from mlstm_pallas.problem.gpu import TPU
from mlstm_pallas.problem.version import __version__
from mlstm_pallas.schedules.derivatives import NO_SUCH_DERIVATIVE, not_differentiated
from mlstm_pallas.stages.lowering import Lowering
from mlstm_pallas.stages.plain_forms import on_rows, one_at_a_time

VMEM_STATES = 2**24  # bytes of float32 states of all chunks; VMEM also holds tiles and operands


def _map(function: Callable[[Any, int], Any], tree: Any, axes: Iterable[int]) -> Any:
    """The tree of function(array, the axis of its NH)."""
    arrays, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [*map(function, arrays, axes)])


def sharded_alike(spec: CallSpec, tree: Any) -> Any:
    """The arrays, as for ``on_shards``, with types that agree on the mesh.

    They are sharded over the same explicit axes in B and NH and over none in other axes, and vary
    over the same manual axes.
    """
    mesh = jax.typeof(jax.tree.leaves(tree)[0]).sharding.mesh
    if mesh.explicit_axes:
        tree, _ = _resharded(spec, tree, heads_axes(tree, spec.layout), mesh)
    return _varying_as(tree, tree)


def _varying_as(inputs: Any, tree: Any) -> Any:
    """The arrays of a tree, which vary over each manual axis over which one of the inputs does."""
    varying = varying_axes(inputs)

    def cast(x: Array) -> Array:
        axes = tuple(sorted(varying - varying_axes(x)))
        return jax.lax.pcast(x, axes, to="varying") if axes else x

    return jax.tree.map(cast, tree)


def _common_spec(spec: CallSpec, specs: Iterable[P], axes: Iterable[int], mapped: int) -> P:
    """For each axis up to B, and for NH, the first mesh axes in the specs that are unused.

    axes: of NH, one for each spec.
    """
    used: set[str] = set()
    common: list[Any] = [None] * spec.pooled
    shardings = []
    for sharding, axis in zip(specs, axes, strict=True):
        up_to_heads = _padded(sharding, axis + 1)
        shardings.append([*up_to_heads[spec.pooled : mapped + 1], up_to_heads[axis]])
    for entries in zip(*shardings, strict=True):
        choices = ({x} if isinstance(x, str) else x or () for x in entries)
        names = next((x for x in choices if x and not used.intersection(x)), ())
        used.update(names)
        common.append(tuple(names) or None)
    return P(*common)


def _resharded(
    spec: CallSpec, tree: Any, axes: Sequence[int], mesh: Any, mapped: int = 0
) -> tuple[Any, P]:
    """The arrays with one sharding of their axes up to B and of NH, and that sharding."""
    specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(tree)]
    common = _common_spec(spec, specs, axes, mapped)

    def sharding(x: Array, axis: int) -> NamedSharding:
        return NamedSharding(mesh, _padded(_placed(common, axis), x.ndim))

    return jax.sharding.reshard(tree, _map(sharding, tree, axes)), common


def _placed(common: P, axis: int) -> P:
    """The common sharding, of an array whose NH is the axis."""
    *batch, heads = common
    return P(*batch, *(None,) * (axis - len(batch)), heads)


def _padded(spec: P, ndim: int) -> P:
    return P(*spec[:ndim], *(None,) * (ndim - len(spec)))


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
        args, common = _resharded(work.spec, args, axes, mesh, work.mapped)
        # An empty set is all axes but those that vmap holds, which only shard_map knows.
        some = len(mesh.explicit_axes) < len(mesh.axis_names)
        outputs = jax.shard_map(
            functools.partial(on_shard, work, None),
            mesh=None if mesh == context else mesh,
            in_specs=_map(lambda x, axis: _padded(_placed(common, axis), x.ndim), args, axes),
            out_specs=jax.tree.map(lambda axis: _placed(common, axis), work.axes_of_results()),
            axis_names=set(mesh.explicit_axes) if some else set(),
            check_vma=False,
        )(*args)
        outputs = _varying_as(args, outputs)  # check_vma=False forgets the manual axes outside
    elif devices == 1 or (work.spec.gpu is TPU and work.spec.pooled):
        outputs = on_shard(work, None, *args)
    elif work.spec.gpu is TPU:
        outputs = _in_groups(work, devices, *args)
    else:
        outputs = _partitioned(work, tuple(work.axes_of(args)))(work.identity(), *args)
    return outputs


def _in_groups(work: Work, devices: int, *args: Any) -> Any:
    """The work, mapped over the heads and over a group of batch entries per device.

    libtpu has no custom_partitioning. XLA partitions mapped axes by itself, where it would gather
    the axis that ``on_shard`` makes of B and NH.
    """
    batch = range(work.mapped + 1)
    first, heads = jax.tree.leaves(args)[0], work.axes_of(args)[0]
    sizes = [math.gcd(first.shape[n], devices) for n in batch] + [first.shape[heads]]

    def in_groups(x: Array, axis: int) -> Array:
        shape = [*x.shape]
        for at, size in zip((axis, *batch[::-1]), sizes[::-1], strict=True):
            shape[at : at + 1] = size, shape[at] // max(size, 1)
        places = [at + n for n, at in enumerate((*batch, axis))]
        return jnp.moveaxis(x.reshape(shape), places, range(len(sizes)))

    def joined(x: Array, axis: int) -> Array:
        shape = [*x.shape[len(sizes) :]]
        for at, size in zip((*batch, axis), sizes, strict=True):
            shape[at] *= size
        places = [at + n for n, at in enumerate((*batch, axis))]
        return jnp.moveaxis(x, range(len(sizes)), places).reshape(shape)

    alone = dataclasses.replace(work, at_once=max(math.prod(sizes) // devices, 1))
    run: Any = functools.partial(on_shard, alone, None)
    for _ in sizes:
        run = jax.vmap(run)
    outputs = run(*_map(in_groups, args, work.axes_of(args)))
    return _map(joined, outputs, work.axis_of_each_result())


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
        args = _map(functools.partial(_merged, work, spec.problem), args, axes)
    outputs = run(spec.plan, *args)
    if spec.pooled:
        return outputs
    return _map(functools.partial(_split, work, heads), outputs, work.axis_of_each_result())


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

    args = _map(by_few, args, work.axes_of(args))
    outputs = one_at_a_time(lambda args: run(plan, *args))(args)
    return _map(joined, outputs, work.axis_of_each_result())


@functools.lru_cache(256)  # shapes are among the keys
def _partitioned(work: Work, axes: tuple[int, ...]) -> Callable[..., Any]:
    """The work on its identity and arrays, which XLA can partition; axes: those of NH.

    custom_partitioning with static_argnums fails under jax_check_tracer_leaks (jax 0.12). So the
    static arguments are in closures, one set per kind of work.
    """
    run = functools.partial(on_shard, work)

    def of_shard(*args: Any) -> Any:
        # jax 0.12 traces it under the user's mesh, whose explicit axes have no meaning here.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return run(*args)

    def partition(mesh: Any, args: Any, results: Any) -> tuple[Any, ...]:
        in_shardings, out_shardings = _common_shardings(work, args, results)
        return mesh, of_shard, out_shardings, in_shardings

    partitioned = custom_partitioning(run)
    rule = functools.partial(_sharding_rule, work, axes)
    partitioned.def_partition(partition, sharding_rule=rule)
    return partitioned


def _sharding_rule(
    work: Work, axes: Sequence[int], mesh: Any, operands: Any, results: Any
) -> tuple[Any, ...]:
    """The axes up to B, and NH, of all arrays but the identity are free; others are replicated.

    Beside pools only NH is free.
    """
    replicated: list[str] = []
    batch = range(0 if work.spec.pooled else work.mapped + 1)

    def factors(x: Any, axis: int | None) -> str:
        names = []
        for n in range(x.rank):
            if axis is not None and (n == axis or n in batch):
                names.append("heads" if n == axis else f"batch{n}")
            else:
                names.append(f"replicated{len(replicated)}")
                replicated.append(names[-1])
        return " ".join(names)

    operands = [*map(factors, operands, [None, *axes])]
    results = [*map(factors, results, work.axis_of_each_result())]
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    return text, {"need_replication_factors": tuple(replicated)}


def _common_shardings(work: Work, args: Any, results: Any) -> tuple[Any, Any]:
    """One sharding of the free axes and none of other axes, for all operands and results."""
    identity, *arrays = args
    tree = results, arrays
    leaves, axes = jax.tree.leaves(tree), work.axes_of(tree)
    # Inside a shard_map over some of the axes shardings have no names. Those of the results follow
    # the rule.
    pairs = [*zip(leaves, axes, strict=True)]
    by_kind = {(len(x.shape), axis): x.sharding for x, axis in reversed(pairs)}
    if isinstance(leaves[0].sharding, NamedSharding):
        mesh = leaves[0].sharding.mesh
        common = _common_spec(work.spec, [x.sharding.spec for x in leaves], axes, work.mapped)
        by_kind = {
            (rank, axis): NamedSharding(mesh, _padded(_placed(common, axis), rank))
            for rank, axis in by_kind
        }
    elif work.spec.pooled:  # arrays of one rank differ
        by_kind = dict.fromkeys(by_kind, identity.sharding)
    results, arrays = _map(lambda x, axis: by_kind[len(x.shape), axis], tree, axes)
    return (identity.sharding, *arrays), results
