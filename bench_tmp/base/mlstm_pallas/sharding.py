"""Where an operation runs: on every device for its batch entries and heads, on its platform.

A Triton kernel is a custom call, which XLA cannot partition: by default it gathers all shards on
every device. But batch entries and heads are independent, so an ``Operation``, which is a pass of
fwbw.py or a step of recurrent.py, runs unchanged on shards of these two axes. How it learns its
shards (``Operation.on_mesh``) depends on the axes of the mesh:

* Auto axes: XLA propagates shardings long after tracing. JAX (0.10.2 to 0.12) has
  ``custom_partitioning`` for this. It takes a Shardy rule (the batch and head axes are free, all
  others need replication) and a function, which is traced again for the shapes of one shard. On one
  device it lowers to the function itself. It has no batching rule, so ``custom_vmap`` around it
  turns a mapped axis into one more free axis. Its callback cannot be exported and needs devices
  when it is lowered.
* Explicit axes: shardings are in the types of the arrays and are read when the call is traced.
  ``jax.shard_map`` over those axes lowers without devices (AbstractMesh), and exports.
* Manual axes, inside the user's shard_map: the arrays are the shard.

On auto axes (also those of a call without a mesh) and on explicit axes, arrays cross the boundary
of the sharded region as (B, NH, ...) in either layout. They are transposed there and back, and XLA
cancels the transposes. Shardings of other axes (sequence, head dimensions) are undone first: by XLA
on auto axes, by ``jax.sharding.reshard`` on explicit ones.

On its shard an operation takes the lowering of the platform that it is lowered for: ``on_backend``.
"""

import dataclasses
import functools
import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mlstm_pallas.dispatch import HAS_TRITON
from mlstm_pallas.problem import Layout
from mlstm_pallas.stage import Lowering
from mlstm_pallas.version import __version__


def _map(spec: Any, function: Callable[[Array, int], Any], tree: Any) -> Any:
    """Applies function(array, number of leading axes of B and NH) to all arrays."""

    def apply(path: Any, x: Array) -> Any:
        name = str(path[-1])
        strided = spec.layout is Layout.BTNH and name in (".q", ".k", ".v", ".h")
        return function(x, 1 if strided or name.endswith("_segments") else 2)

    return jax.tree.map_with_path(apply, tree)


def _heads_first(spec: Any, tree: Any, mapped: int = 0) -> Any:
    """Transposes the arrays to (B, NH, ...), or back, behind the mapped axes."""

    def transpose(x: Array, axes: int) -> Array:
        return x if axes == 2 else jnp.swapaxes(x, mapped + 1, mapped + 2)

    return _map(spec, transpose, tree)


def aligned(spec: Any, tree: Any) -> Any:
    """The arrays, as for an ``Operation``, with types that agree on the mesh.

    They are sharded over the same explicit axes in B and NH and over none in other axes, and vary
    over the same manual axes.
    """
    types = [jax.typeof(x) for x in jax.tree.leaves(tree)]
    mesh = types[0].sharding.mesh
    if mesh.explicit_axes:
        return _heads_first(spec, _sharded_alike(_heads_first(spec, tree), mesh, 2)[0])
    varying = frozenset().union(*(x.manual_axis_type.varying for x in types))

    def cast(x: Array) -> Array:
        axes = tuple(sorted(varying - jax.typeof(x).manual_axis_type.varying))
        return jax.lax.pcast(x, axes, to="varying") if axes else x

    return jax.tree.map(cast, tree)


def _common_spec(specs: Iterable[P], count: int) -> P:
    """For each of the first ``count`` axes, the first mesh axes in the specs that are unused."""
    used: set[str] = set()
    common = []
    for entries in zip(*(_padded(spec, count) for spec in specs), strict=True):
        choices = ({x} if isinstance(x, str) else x or () for x in entries)
        names = next((x for x in choices if x and not used.intersection(x)), ())
        used.update(names)
        common.append(tuple(names) or None)
    return P(*common)


def _sharded_alike(tree: Any, mesh: Any, count: int) -> tuple[Any, P]:
    """The arrays with one sharding of their first ``count`` axes, and that sharding."""
    common = _common_spec([jax.typeof(x).sharding.spec for x in jax.tree.leaves(tree)], count)

    def resharded(x: Array) -> Array:
        y: Array = jax.sharding.reshard(x, NamedSharding(mesh, _padded(common, x.ndim)))
        return y

    return jax.tree.map(resharded, tree), common


def _padded(spec: P, ndim: int) -> P:
    return P(*spec[:ndim], *(None,) * (ndim - len(spec)))


@dataclasses.dataclass(frozen=True)
class Operation:
    """A function of arrays with the axes B and NH, any part of which it can compute by itself.

    Called, it runs the function on shards of B and NH, the first axes of all arrays. The function
    gets B and NH as one axis. The fields q, k, v and h have the layout of the spec: with "BTNH"
    they are (B, S, NH, D) here and in the function. Fields whose names end in "_segments" are
    (B, N, NH, ...). A shard's spec is spec.with_heads(B, NH).

    Attributes:
      function: (spec, lowering, *pytrees of arrays of a shard, **options) -> pytree of such arrays.
      lowering: None: that of spec.backend on the platform of the computation.
      options: the keywords of the function, as items.
      mapped: axes of vmap before B and NH.
    """

    function: Callable[..., Any]
    spec: Any
    lowering: Lowering | None = None
    options: tuple[tuple[str, Any], ...] = ()
    mapped: int = 0

    def __call__(self, *args: Any) -> Any:
        call = custom_vmap(self.on_mesh)

        @call.def_vmap
        def rule(axis_size: int, is_mapped: Sequence[Any], *args: Any) -> tuple[Any, Any]:
            # A grid cannot be empty, so an axis of size 0 runs with size 1, whose results are cut.
            size = max(axis_size, 1)

            def with_axis(x: Array, at: bool) -> Array:
                if not at:
                    return jnp.broadcast_to(x, (size, *x.shape))
                return x if axis_size else jnp.zeros((size, *x.shape[1:]), x.dtype)

            args = jax.tree.map(with_axis, args, tuple(is_mapped))
            outputs = dataclasses.replace(self, mapped=self.mapped + 1)(*args)
            outputs = outputs if axis_size else jax.tree.map(lambda x: x[:0], outputs)
            return outputs, jax.tree.map(lambda _: True, outputs)

        return call(*args)

    def on_mesh(self, *args: Any) -> Any:
        """Finds the shards as the axes of the mesh ask; the module's docstring has the cases."""
        mesh = jax.typeof(jax.tree.leaves(args)[0]).sharding.mesh
        if mesh.explicit_axes:
            return self.transposed(functools.partial(self.in_shard_map, mesh), *args)
        context = jax.sharding.get_abstract_mesh()
        one_device = (
            context.abstract_device is not None
            if context.empty
            else math.prod(context.shape[axis] for axis in context.auto_axes) == 1
        )
        # Interpreted Mosaic GPU kernels run on one device: they use ordered callbacks, which
        # custom_partitioning does not allow.
        if one_device or self.spec.backend == "mosaic_gpu_interpret":
            return self.on_shard(*args)
        return self.transposed(functools.partial(_partitioned(self), self.identity()), *args)

    def transposed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function of arrays (B, NH, ...) on those of the layout, or the reverse."""
        args = _heads_first(self.spec, args, self.mapped)
        return _heads_first(self.spec, function(*args), self.mapped)

    def in_shard_map(self, mesh: Any, *args: Any) -> Any:
        """The operation on arrays (B, NH, ...) that are sharded over explicit axes."""
        args, common = _sharded_alike(args, mesh, self.mapped + 2)
        # An empty set is all axes but those that vmap holds, which only shard_map knows.
        some = len(mesh.explicit_axes) < len(mesh.axis_names)
        return jax.shard_map(
            self.on_transposed_shard,
            mesh=None if mesh == jax.sharding.get_abstract_mesh() else mesh,
            in_specs=common,
            out_specs=common,
            axis_names=set(mesh.explicit_axes) if some else set(),
            check_vma=False,
        )(*args)

    def on_transposed_shard(self, *args: Any) -> Any:
        return self.transposed(self.on_shard, *args)

    def on_shard(self, *args: Any) -> Any:
        """The operation on the arrays of a shard, whose mapped axes, B and NH become one."""
        heads_first = jax.eval_shape(
            functools.partial(_heads_first, self.spec, mapped=self.mapped), args
        )
        shapes = {x.shape[: self.mapped + 2] for x in jax.tree.leaves(heads_first)}
        if len(shapes) > 1:
            raise ValueError(
                f"arguments have shards of {' and '.join(map(str, sorted(shapes)))} batch entries "
                "and heads, expected one: inside a shard_map that leaves mesh axes to the compiler "
                "constrain them with jax.lax.with_sharding_constraint"
            )
        (heads,) = shapes
        *batch, NH = heads

        def flat(x: Array, axes: int) -> Array:
            axes += self.mapped
            return x.reshape(math.prod(heads[:axes]), *x.shape[axes:])

        def split(x: Array, axes: int) -> Array:
            return x.reshape(*heads[: self.mapped + axes], *x.shape[1:])

        spec = self.spec.with_heads(math.prod(batch), NH)
        run = functools.partial(self.function, spec, **dict(self.options))
        args = _map(spec, flat, args)
        if self.lowering is None:
            outputs = on_backend(spec.backend, run, *args)
        else:
            outputs = run(self.lowering, *args)
        return _map(spec, split, outputs)

    def identity(self) -> Any:
        """An operand that distinguishes operations in the compiled module.

        Otherwise only the address of a callback differs there, which
        jax_remove_custom_partitioning_ptr_from_cache_key removes from the key of the persistent
        compilation cache, and calls that differ in eps alone would share an entry.
        """
        functions = ("", self.function), *self.options
        names = [(name, getattr(x, "__name__", x)) for name, x in functions]
        identity = repr((__version__, names, self.spec, self.lowering, self.mapped))
        return np.frombuffer(hashlib.sha256(identity.encode()).digest(), np.uint32)


@functools.lru_cache(256)  # shapes are among the keys
def _partitioned(operation: Operation) -> Callable[..., Any]:
    """The operation on its identity and arrays, which XLA can partition.

    custom_partitioning with static_argnums fails under jax_check_tracer_leaks (jax 0.12). So the
    static arguments are in closures, one set per operation.
    """

    def run(identity: Array, *args: Any) -> Any:
        return operation.on_transposed_shard(*args)

    def partition(mesh: Any, args: Any, results: Any) -> tuple[Any, ...]:
        in_shardings, out_shardings = _common_shardings(operation.mapped, args, results)
        return mesh, run, out_shardings, in_shardings

    partitioned = custom_partitioning(run)
    rule = functools.partial(_sharding_rule, operation.mapped)
    partitioned.def_partition(partition, sharding_rule=rule)
    return partitioned


def _sharding_rule(mapped: int, mesh: Any, operands: Any, results: Any) -> tuple[Any, ...]:
    """The first axes of all arrays but the identity are free; all others are replicated."""
    free, whole = [f"free{axis}" for axis in range(mapped + 2)], list[str]()

    def axes(x: Any, free: Sequence[str]) -> str:
        others = [f"whole{len(whole) + n}" for n in range(x.rank - len(free))]
        whole.extend(others)
        return " ".join([*free, *others])

    identity, *inputs = operands
    text = ", ".join([axes(identity, ()), *(axes(x, free) for x in inputs)])
    text += " -> " + ", ".join([axes(x, free) for x in results])
    return text, {"need_replication_factors": tuple(whole)}


def _common_shardings(mapped: int, args: Any, results: Any) -> tuple[Any, Any]:
    """One sharding of the free axes and none of other axes, for all operands and results."""
    identity, *arrays = args
    leaves = jax.tree.leaves((results, arrays))
    # Inside a shard_map over some of the axes shardings have no names. Those of the results follow
    # the rule.
    by_rank = {len(x.shape): x.sharding for x in reversed(leaves)}
    if isinstance(leaves[0].sharding, NamedSharding):
        mesh = leaves[0].sharding.mesh
        common = _common_spec([x.sharding.spec for x in leaves], mapped + 2)
        by_rank = {rank: NamedSharding(mesh, _padded(common, rank)) for rank in by_rank}
    arrays, results = jax.tree.map(lambda x: by_rank[len(x.shape)], (arrays, results))
    return (identity.sharding, *arrays), results


# What ``lax.platform_dependent`` does, but each function is lowered for its own platforms alone.
# Where a computation is lowered for several, jax lowers every branch for all of them, and Pallas
# refuses to lower kernels for a CPU, with a message that does not name ``backend``.
_by_platform = Primitive("by_platform")
_by_platform.multiple_results = True
_by_platform.def_abstract_eval(lambda *_, backend, cuda, other: (other or cuda).out_avals)


def _evaluated(*args: Any, **params: Any) -> Any:
    with jax.disable_jit(False):  # jax_disable_jit would lead here again
        return jax.jit(functools.partial(_by_platform.bind, **params))(*args)


_by_platform.def_impl(_evaluated)


# Whether this thread lowers a call of the package.
_lowers: ContextVar[bool] = ContextVar("lowers", default=False)


class _OfOurLowering:
    """A pattern for JAX's warning (>= 0.11) that Pallas' Triton backend is deprecated.

    It matches only where this thread lowers a call of the package, because users can do nothing
    about that one. Kernels of their own still warn. catch_warnings would act on all threads.
    """

    @staticmethod
    def match(message: str) -> bool:
        return _lowers.get() and message.startswith("The Pallas Triton backend is deprecated")


_FILTER = "ignore", _OfOurLowering(), DeprecationWarning, None, 0


def _lowered(
    platform: str | None, ctx: Any, *args: Any, backend: str | None, cuda: Any, other: Any
) -> Any:
    if platform == "cpu" and other is None:
        interpreted = "interpret" if backend == "triton" else "mosaic_gpu_interpret"
        raise ValueError(
            f"backend is {backend!r}, whose kernels are for GPUs, and the computation is "
            "lowered for a CPU: expected backend None or 'xla' (plain jnp), or "
            f"{interpreted!r} (the kernels, interpreted)"
        )
    module = ctx.module_context
    # jax keeps the lowered form of inner jits without their platforms: the CPU would call a
    # function lowered for CUDA, and XLA for CPUs aborts at the cumsum of jax 0.12 for GPUs.
    lowered = module.cached_primitive_lowerings
    if ctx.platforms is not None:
        lowered = lowered.setdefault((_by_platform, *ctx.platforms), {})
    ctx = ctx.replace(module_context=module.replace(cached_primitive_lowerings=lowered))
    jaxpr = cuda if platform == "cuda" or other is None else other
    filters: Any = warnings.filters
    if filters[:1] != [_FILTER]:  # filters of users come and go
        filters[:] = [_FILTER, *(x for x in filters if x != _FILTER)]
    token = _lowers.set(True)
    try:
        return mlir.lower_fun(jaxpr_as_fun(jaxpr))(ctx, *args)
    finally:
        _lowers.reset(token)


def _batched(axis: Any, args: Any, dims: Any, backend: Any, **jaxprs: Any) -> tuple[Any, Any]:
    def mapped(jaxpr: Any) -> Any:
        names = dict(axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name)
        return jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), tuple(dims), **names))(*args)

    jaxprs = {name: x and mapped(x) for name, x in jaxprs.items()}
    results = _by_platform.bind(*args, backend=backend, **jaxprs)
    return results, [0] * len(results)


batching.fancy_primitive_batchers[_by_platform] = _batched
for _platform in (None, "cpu", "cuda"):  # None: all others
    _rule = functools.partial(_lowered, _platform)
    mlir.register_lowering(_by_platform, _rule, platform=_platform)


def on_backend(
    backend: str | None,
    run: Callable[..., Any],
    *args: Any,
    mapped: Sequence[tuple[str, int]] = (),
) -> Any:
    """run(lowering, *args).

    mapped: (name, size) of the axes of a vmap that run names, where jax may have left the vmap.

    None is Triton where the computation is lowered for CUDA, else XLA. Where jax has no Triton it
    is XLA, unless ``requested_backend`` chose "mosaic_gpu".
    """
    lowering = Lowering(backend or (Lowering.TRITON if HAS_TRITON else Lowering.XLA))
    if lowering.interpret or lowering is Lowering.XLA:
        return run(lowering, *args)
    leaves, tree = jax.tree.flatten(args)

    def traced(lowering: Lowering) -> Any:
        return jax.make_jaxpr(
            lambda *x: run(lowering, *jax.tree.unflatten(tree, x)),
            axis_env=mapped,
            return_shape=True,
        )(*leaves)

    (cuda, outputs), other = traced(lowering), None  # None: the kernels, on any GPU
    if backend is None:
        other, outputs = traced(Lowering.XLA)
    results = _by_platform.bind(*leaves, backend=backend, cuda=cuda, other=other)
    return jax.tree.unflatten(jax.tree.structure(outputs), results)
