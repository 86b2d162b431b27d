"""What a call refuses later: derivatives, and kernels on another platform than CUDA.

The marks on its arrays are the identity, which compiled programs do not contain.
"""

import functools
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


def _identity(name: str) -> Primitive:
    """The identity of several arrays, which are bound together, because some would be copied."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *xs, **_: xs)
    primitive.def_impl(lambda *xs, **_: xs)
    mlir.register_lowering(primitive, lambda _, *xs, **__: xs)

    def batched(xs: Any, axes: Any, **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*xs, **params), axes

    batching.primitive_batchers[primitive] = batched
    return primitive


# It is no custom_jvp, because jax drops the rule of a custom_jvp in the first of two reverse passes
# through a jax.lax.scan.
_not_differentiated = _identity("not_differentiated")
ad.primitive_jvps[_not_differentiated] = lambda *_, message, **__: _refuse(message=message)


def _lowered_elsewhere(_: Any, *xs: Any, message: str, kernels: str | None) -> Any:
    """The lowering for all platforms but CUDA."""
    if kernels:
        raise ValueError(
            f"backend: a call was traced for the {kernels} kernels, which are for NVIDIA GPUs, and "
            "is lowered for another device: expected backend 'xla' (plain jnp), or backend None "
            "and jax.default_device or jax.set_mesh of that device around the call"
        )
    return xs


mlir.register_lowering(_not_differentiated, _lowered_elsewhere)
mlir.register_lowering(_not_differentiated, lambda _, *xs, **__: xs, platform="cuda")
# The tangents of reverse_mode_only: reverse mode transposes them, forward mode evaluates them.
_reverse_mode_only, _tangents = _identity("reverse_mode_only"), _identity("tangents")
_forward_mode = functools.partial(_refuse, message=NO_SUCH_DERIVATIVE)
_tangents.def_impl(_forward_mode)
mlir.register_lowering(_tangents, _forward_mode)
batching.primitive_batchers[_tangents] = ad.primitive_jvps[_tangents] = _forward_mode
ad.primitive_transposes[_tangents] = lambda cotangents, *_: cotangents


def _jvp(xs: Any, tangents: Any) -> tuple[Any, list[Any]]:
    return xs, [x if isinstance(x, ad.Zero) else _tangents.bind(x)[0] for x in tangents]


ad.primitive_jvps[_reverse_mode_only] = _jvp


def reverse_mode_only(tree: Any) -> Any:
    """The arrays, which go into a custom_vjp; forward mode raises a TypeError of this package."""
    arrays, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _reverse_mode_only.bind(*arrays))


def not_differentiated(tree: Any, message: str, kernels: str | None) -> Any:
    """The arrays; their derivative raises a TypeError with the message.

    kernels: the kernels that they go to, for which lowering for another platform than CUDA raises a
      ValueError; None: plain jnp, or interpreted ones.
    """
    arrays, structure = jax.tree.flatten(tree)
    marked = _not_differentiated.bind(*arrays, message=message, kernels=kernels)
    return jax.tree.unflatten(structure, marked)
