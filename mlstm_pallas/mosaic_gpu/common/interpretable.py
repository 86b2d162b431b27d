"""Operations that interpreted kernels replace: ``interpreter.py``, imported when one is traced."""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])
current: ContextVar[Any] = ContextVar("interpreter", default=None)


def interpretable(function: Function) -> Function:
    """Makes interpreted kernels run the method of ``Interpreter`` with the same name instead."""

    @functools.wraps(function)
    def run(*args, **options):
        interpreter = current.get()
        form = function if interpreter is None else getattr(interpreter, function.__name__)
        return form(*args, **options)

    return cast(Function, run)
