"""Where a call runs: on the Triton kernels, on the same kernels interpreted, or in plain jnp."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax
from jax import lax

from mlstm_pallas.config import UNKNOWN_DEVICE
from mlstm_pallas.problem import check_backend

_default: ContextVar[str | None] = ContextVar("backend", default=None)


@contextlib.contextmanager
def use_backend(backend: str | None) -> Iterator[None]:
    """Inside, ``backend`` ("triton", "interpret", "xla"; None: by lowering platform) is what calls take that name none themselves.

    It is read when a function is called, that is at trace time under jit: what was traced before stays as it is.
    """
    check_backend(backend)
    token = _default.set(backend)
    try:
        yield
    finally:
        _default.reset(token)


def requested_backend(backend: str | None = None) -> str | None:
    return _default.get() if backend is None else backend


def on_backend(backend: str | None, triton: Callable, xla: Callable, *args):
    """triton(interpret, *args) or xla(*args); for None the choice is made where the computation is lowered."""
    if backend == "xla":
        return xla(*args)
    if backend is None:
        return lax.platform_dependent(*args, cuda=functools.partial(triton, False), default=xla)
    return triton(backend == "interpret", *args)


def target_device_kind() -> str:
    """The kind of GPU that the caller's computation is for: of the abstract mesh in use, else of this process's first GPU."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        return abstract.device_kind
    device = jax.devices()[0]
    return device.device_kind if device.platform == "gpu" else UNKNOWN_DEVICE
