"""Which device holds what when train_byte_lm.py trains on several.

The mesh has three axes. data splits the batch. tensor splits the heads, with the columns of the
matrices before them and the rows of those behind them, and likewise the hidden width of the MLP.
sequence splits the steps. Embedding and unembedding are on every device.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "tensor", "sequence")
RESIDUAL_STREAM = P("data", "sequence")  # (B, S, D)
HEADS = P("data", "sequence", "tensor")  # (B, S, NH, ...)
SPLIT_COLUMNS = (
    *("query", "key", "value", "head_norm", "up", "gate"),
    *("input_gate", "input_bias", "forget_gate", "forget_bias", "output_gate"),
)
SPLIT_ROWS = ("output", "down")  # of the layers: (layers, rows, columns)


class MeshError(ValueError):
    """These devices cannot make the mesh."""


def parse_mesh(text: str) -> dict[str, int]:
    """ "data:2,sequence:4" -> the size of every axis, 1 if the text does not name it.

    Raises:
      ValueError: not of that form.
    """
    parts = dict(part.split(":") for part in text.split(",")) if text else {}
    sizes = {name: int(size) for name, size in (dict.fromkeys(AXES, "1") | parts).items()}
    if len(sizes) > len(AXES) or min(sizes.values()) < 1:
        raise ValueError(f"{text} does not name axes ({', '.join(AXES)}) and their sizes")
    return sizes


def mesh_of(sizes: Sequence[int], devices: Sequence[jax.Device]) -> Mesh:
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def make_mesh(text: str) -> Mesh:
    """The mesh over the first devices; with several processes, over all devices.

    Raises:
      MeshError: too few devices, or a process without any.
    """
    sizes = tuple(parse_mesh(text).values())
    size, present, processes = math.prod(sizes), jax.device_count(), jax.process_count()
    if size > present or (processes > 1 and size != present):
        where = f" in {processes} processes, which take part with all" if processes > 1 else ""
        raise MeshError(f"--mesh={text} has {size} devices, there are {present}{where}")
    return mesh_of(sizes, jax.devices()[:size])


def spread(x: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """x, the same in every process, sharded over the devices of the mesh."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def specs(state: Any) -> Any:
    """How parameters, and the optimizer's moments, which have the same names, are sharded."""

    def spec(path, x):
        [*_, name] = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if name in SPLIT_COLUMNS:
            return P(*[None] * (x.ndim - 1), "tensor")
        return P(None, "tensor") if name in SPLIT_ROWS else P()

    return jax.tree.map_with_path(spec, state)


def shard(state: Any, mesh: Mesh) -> Any:
    """Arrays, the same in every process, on the devices of the mesh."""
    place = functools.partial(spread, mesh=mesh)
    return jax.tree.map(lambda x, y: place(np.asarray(x), spec=y), state, specs(state))


def constrained(x: Any, mesh: Mesh, spec: Any) -> Any:
    """x in a jitted function, sharded by one or more specs."""
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), spec)
    return jax.lax.with_sharding_constraint(x, shardings)


def gathered(state: Any) -> Any:
    """The same arrays whole, in the memory of every process."""
    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), state)
