"""The arguments of functions whose signature is written for them, by name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def bind(
    function: Callable[..., Any],
    signature: inspect.Signature,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of a call by name, in order, defaults included; function: named in errors."""
    try:
        bound = signature.bind(*args, **keywords)
    except TypeError as error:
        raise TypeError(f"{function.__name__}() {error}") from None
    bound.apply_defaults()
    return bound.arguments
