"""A training step as a few programs: compiled once each, side by side, and kept in a file.

``jax.jit`` of a step compiles every block of a model, though all are alike. Here a block has two
programs, forward and backward, that the host calls for one block after the other; see ``halves``.
``compiled`` compiles all programs of a step at the same time and stores them, so that the next
process neither traces nor compiles. docs/training.md shows both.
"""

import functools
import hashlib
import importlib.metadata
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

PACKAGES = "jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "mlstm_pallas"
VARIABLES = "JAX_", "XLA_", "MLSTM_PALLAS_"


def halves(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward pass of a function of arrays, to be compiled apart.

    What the backward pass needs is what it needs in one program: with ``jax.checkpoint`` around the
    function, what the policy saves.

    Returns:
      forward: (*inputs) -> y and the list of arrays that the backward pass needs beside the inputs.
      backward: (inputs, saved, gradient of y) -> the gradients of the inputs.
    """

    def traced(inputs: Sequence[Any]) -> tuple[Any, list[Any], Any, list[bool]]:
        y, pullback = jax.vjp(function, *inputs)
        arrays, tree = jax.tree.flatten(pullback)
        known = {id(x) for x in jax.tree.leaves(inputs)}
        return y, arrays, tree, [id(x) in known for x in arrays]

    def forward(*inputs: Any) -> tuple[Any, list[Any]]:
        y, arrays, _, is_input = traced(inputs)
        return y, [x for x, known in zip(arrays, is_input, strict=True) if not known]

    def backward(inputs: Sequence[Any], saved: Sequence[Any], gradient: Any) -> Any:
        # Of this trace the inputs count; what else it computes is dead, and not lowered.
        _, arrays, tree, is_input = traced(inputs)
        rest = iter(saved)
        arrays = [x if known else next(rest) for x, known in zip(arrays, is_input, strict=True)]
        return jax.tree.unflatten(tree, arrays)(gradient)

    return forward, backward


def facts(sources: Iterable[Path]) -> dict[str, str]:
    """What programs depend on beside their arguments, by name.

    sources: files, and folders whose Python files count.
    """
    digest = hashlib.sha256()
    for source in sources:
        for path in [source] if source.is_file() else sorted(source.rglob("*.py")):
            digest.update(path.read_bytes())
    device = jax.devices()[0]
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    variables = {x: y for x, y in os.environ.items() if x.startswith(VARIABLES)}
    return versions | dict(
        device=f"{jax.device_count()} {device.device_kind}",
        driver=device.client.platform_version,
        variables=str(sorted(variables.items())),
        code=digest.hexdigest(),
    )


def compiled(
    calls: Callable[[], dict[str, tuple[Any, Sequence[Any]]]],
    path: Path | None = None,
    key: dict[str, str] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> dict[str, Callable[..., Any]]:
    """Programs by name: of a file with this key, or compiled side by side and written there.

    Load files of your own only: they are pickles, which can run any code.

    Args:
      calls: () -> for each name a jitted function and its arguments or their shapes.
      path: None: nothing is read or written.
      key: ``facts`` and what decides on the shapes and the functions. With a file of another key
        a line on stderr says what differs.
      devices: those of the arguments, in the order of a mesh. None: the first one.
    """
    key, devices = key or {}, devices or jax.devices()[:1]
    if path and path.exists():
        with open(path, "rb") as file:
            stored = pickle.load(file)
            other = [x for x in key | stored if key.get(x) != stored.get(x)]
            if not other:
                # Stored Mosaic GPU kernels need a library that this loads.
                from jax.experimental.pallas import mosaic_gpu  # noqa: F401

                read = functools.partial(
                    serialize_executable.deserialize_and_load, execution_devices=devices
                )
                return {name: read(*program) for name, program in pickle.load(file).items()}
        print(f"{path} has programs of another {', '.join(other)}", file=sys.stderr)
    with ThreadPoolExecutor() as pool:
        # Lowering is Python; compilation is not, and begins at once.
        started = {
            name: pool.submit(function.lower(*arguments).compile)
            for name, (function, arguments) in calls().items()
        }
        programs = {name: program.result() for name, program in started.items()}
    if path:
        whole = {name: serialize_executable.serialize(x) for name, x in programs.items()}
        part = path.with_name(f"{path.name}.{os.getpid()}")
        with open(part, "wb") as file:
            pickle.dump(key, file)
            pickle.dump(whole, file)
        part.replace(path)
    return programs
