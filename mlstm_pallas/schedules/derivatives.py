"""The derivatives that a call refuses, by a mark that compiled programs do not contain."""

from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

NO_SUCH_DERIVATIVE = (
    "mlstm_chunkwise has first derivatives in reverse mode only; for second derivatives and "
    "forward mode use mlstm_pallas.reference.chunkwise or mlstm_pallas.reference.recurrence"
)


def _refuse(*_: Any, message: str) -> NoReturn:
    raise TypeError(message)


# The identity of several arrays. It is no custom_jvp, because jax drops the rule of a custom_jvp in
# the first of two reverse passes through a lax.scan. One primitive binds all arrays, because with
# one per array some would be copied.
_not_differentiated = Primitive("not_differentiated")
_not_differentiated.multiple_results = True
_not_differentiated.def_abstract_eval(lambda *xs, message: xs)
_not_differentiated.def_impl(lambda *xs, message: xs)
batching.primitive_batchers[_not_differentiated] = lambda xs, axes, message: (
    _not_differentiated.bind(*xs, message=message),
    axes,
)
mlir.register_lowering(_not_differentiated, lambda _, *xs, message: xs)
ad.primitive_jvps[_not_differentiated] = _refuse


def not_differentiated(tree: Any, message: str) -> Any:
    """The arrays; their derivative raises a TypeError with the message."""
    arrays, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _not_differentiated.bind(*arrays, message=message))
