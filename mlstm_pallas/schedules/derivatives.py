"""The derivatives that a call refuses, by marks that compiled programs do not contain."""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

NO_SUCH_DERIVATIVE = (
    "mlstm_chunkwise has first derivatives in reverse mode only; for second derivatives and "
    "forward mode use mlstm_pallas.reference.chunkwise or mlstm_pallas.reference.recurrence"
)


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
