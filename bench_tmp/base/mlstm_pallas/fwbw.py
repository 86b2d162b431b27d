"""The custom_vjp that joins the schedules."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mlstm_pallas import forward as forward_schedule
from mlstm_pallas.arrays import Cotangents, Forward, Inputs, LastStates, Residuals
from mlstm_pallas.backward import backward
from mlstm_pallas.forward import KnownStates
from mlstm_pallas.planning import CallSpec
from mlstm_pallas.sharding import Operation
from mlstm_pallas.stage import Lowering

NO_SUCH_DERIVATIVE = (
    "mlstm_chunkwise has first derivatives in reverse mode only; for second derivatives and "
    "forward mode use mlstm_pallas.reference.chunkwise or mlstm_pallas.reference.recurrence"
)

NO_DERIVATIVE_OF_SEGMENTS = (
    "mlstm_chunkwise with num_segments has no derivatives; leave num_segments out for them"
)


# The custom_vjp traces both its function and its forward rule; with jit the kernels only once.
_forward = jax.jit(forward_schedule.forward, static_argnums=(0, 1), inline=True)


def _refuse(*_: Any, message: str = NO_SUCH_DERIVATIVE, **__: Any) -> NoReturn:
    raise TypeError(message)


# Marks a tangent until reverse mode transposes the mark away. Forward mode evaluates or batches
# it before it reaches the custom_vjp, whose error in jax names no function.
_tangent = Primitive("reverse_mode_tangent")
_tangent.def_abstract_eval(lambda x: x)
_tangent.def_impl(_refuse)
mlir.register_lowering(_tangent, _refuse)
batching.primitive_batchers[_tangent] = ad.primitive_jvps[_tangent] = _refuse
ad.primitive_transposes[_tangent] = lambda cotangent, _: [cotangent]


def _identity(name: str, jvp: Callable[..., Any]) -> Callable[..., Any]:
    """The identity of a pytree, with its jvp rule; compiled programs do not contain it.

    Its keywords are those of the rule.
    """
    # No custom_jvp: jax drops its rule in the first of two reverse passes through a scan.
    identity = Primitive(name)
    # One primitive binds all arrays, because with one per array some would be copied.
    identity.multiple_results = True
    identity.def_abstract_eval(lambda *xs, **_: xs)
    identity.def_impl(lambda *xs, **_: xs)
    batching.primitive_batchers[identity] = lambda xs, axes, **of_rule: (
        identity.bind(*xs, **of_rule),
        axes,
    )
    mlir.register_lowering(identity, lambda _, *xs, **__: xs)
    ad.primitive_jvps[identity] = jvp
    return lambda tree, **of_rule: jax.tree.unflatten(
        jax.tree.structure(tree), identity.bind(*jax.tree.leaves(tree), **of_rule)
    )


in_reverse_mode = _identity(
    "in_reverse_mode",
    lambda primals, tangents: (
        primals,
        [x if type(x) is ad.Zero else _tangent.bind(x) for x in tangents],
    ),
)

# Raises ``message`` when it is differentiated.
not_differentiated = _identity("not_differentiated", _refuse)


def operation(
    function: Callable[..., Any],
    spec: Any,
    *args: Any,
    lowering: Lowering | None = None,
    message: str = NO_SUCH_DERIVATIVE,
    **options: Any,
) -> Any:
    """Runs an ``Operation`` without derivatives; message: of the TypeError that one raises."""
    run = Operation(function, spec, lowering, tuple(options.items()))
    return run(*not_differentiated(args, message=message))


def forward(spec: CallSpec, inputs: Inputs, known: KnownStates | None = None) -> Forward:
    """The forward pass on shards."""
    outputs: Forward = operation(_forward, spec, inputs, known)
    return outputs


def residuals_of(spec: CallSpec, inputs: Inputs, outputs: Forward) -> Residuals:
    return Residuals(
        inputs, None if spec.normaliser is None else outputs.h, outputs.z, outputs.states
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlstm(spec: CallSpec, inputs: Inputs) -> tuple[Array, LastStates | None]:
    outputs = forward(spec.forward_only, inputs)
    return outputs.h, outputs.last


def _mlstm_fwd(spec: CallSpec, inputs: Inputs) -> tuple[Any, ...]:
    outputs = forward(spec, inputs)
    return (outputs.h, outputs.last), residuals_of(spec, inputs, outputs)


def _mlstm_bwd(
    spec: CallSpec, residuals: Residuals, cotangents: tuple[Array, LastStates | None]
) -> tuple[Any, ...]:
    return (operation(backward, spec, residuals, Cotangents(*cotangents)),)


_mlstm.defvjp(_mlstm_fwd, _mlstm_bwd)


def mlstm_forward(spec: CallSpec, inputs: Inputs) -> tuple[Array, LastStates | None]:
    """h and the last states of the padded problem."""
    return _mlstm(spec, in_reverse_mode(inputs))


def mlstm_with_segments(
    spec: CallSpec, inputs: Inputs, num_segments: int
) -> tuple[Array, LastStates]:
    """h and the states at the ends of the packed segments, (B, N, NH, ...), without derivatives."""
    outputs = operation(
        forward_schedule.packed,
        spec,
        inputs,
        message=NO_DERIVATIVE_OF_SEGMENTS,
        num_segments=num_segments,
    )
    return outputs.h, LastStates(*outputs.states)
