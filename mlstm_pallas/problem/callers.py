"""Warnings that point at the line that called the package, however deep they are raised."""

import inspect
import os
import warnings

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def warn_caller(message: str) -> None:
    """Warns at the innermost line outside the package, as skip_file_prefixes of Python 3.12 does.

    Python shows the warning once per such line.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
