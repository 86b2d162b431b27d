"""Which device holds what when train_byte_lm.py trains on several.

The mesh has three axes. data splits the batch. tensor splits the heads, with the columns of the
matrices before them and the rows of those behind them, and likewise the hidden width of the MLP.
sequence splits the steps. Embedding and unembedding are on every device.
"""

import math

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "tensor", "sequence")
RESIDUAL_STREAM = P("data", "sequence")  # (B, S, D)
HEADS = P("data", "sequence", "tensor")  # (B, S, NH, ...)
GATES = {"input_gate", "forget_gate", "output_gate", "gate"}
SPLIT_COLUMNS = {"query", "key", "value", "head_scale", "up"} | GATES
SPLIT_ROWS = {"output", "down"}


class MeshError(ValueError):
    """These devices cannot make the mesh."""


def parse_mesh(text: str) -> dict[str, int]:
    """ "data:2,sequence:4" -> the size of every axis, 1 where the text has none.

    Raises:
      ValueError: not of that form.
    """
    sizes = dict.fromkeys(AXES, 1)
    parts = [part.partition(":")[::2] for part in text.split(",") if part]
    for name, size in parts:
        if name not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"{name}:{size} is not an axis ({', '.join(AXES)}) and its size")
        sizes[name] = int(size)
    if len(dict(parts)) < len(parts):
        raise ValueError(f"{text} names an axis twice")
    return sizes


def mesh_size(text: str) -> int:
    """The number of devices."""
    return math.prod(parse_mesh(text).values())


def make_mesh(text: str) -> Mesh | None:
    """The mesh over the first devices, None for a single one.

    With several processes it is over all devices.

    Raises:
      MeshError: too few devices, or a process without any.
    """
    size, present, processes = mesh_size(text), jax.device_count(), jax.process_count()
    if size > present or (processes > 1 and size != present):
        where = f" in {processes} processes, which take part with all" if processes > 1 else ""
        raise MeshError(f"--mesh={text} has {size} devices, there are {present}{where}")
    if size == 1:
        return None
    options = dict(axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:size])
    return jax.make_mesh(tuple(parse_mesh(text).values()), AXES, **options)


def spread(x: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """x, the same in every process, sharded over the devices of the mesh."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def settled(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """x; on CPU devices it is waited for.

    The collectives of two programs under way would wait for each other's threads there.
    """
    if mesh is not None and mesh.devices.flat[0].platform == "cpu":
        return x.block_until_ready()
    return x


def state_shardings(state: nnx.State, mesh: Mesh) -> nnx.State:
    """Shardings of the state of a model and of its optimizer, whose moments are like parameters."""

    def sharding(path, x):
        # The last part of a path is "value", of a Variable.
        names = set(jax.tree_util.keystr(path[:-1], simple=True, separator="/").split("/"))
        if names & SPLIT_COLUMNS:
            return NamedSharding(mesh, P(*[None] * (x.ndim - 1), "tensor"))
        return NamedSharding(mesh, P("tensor") if names & SPLIT_ROWS else P())

    return jax.tree.map_with_path(sharding, state)


def shard(modules: tuple[nnx.Module, ...], mesh: Mesh) -> None:
    """Shards the arrays of modules, the same in every process, over the devices of the mesh."""
    state = nnx.state(modules)

    def spread_like(x, sharding):
        return spread(np.asarray(x), mesh, sharding.spec)

    nnx.update(modules, jax.tree.map(spread_like, state, state_shardings(state, mesh)))


def gathered(state: nnx.State) -> nnx.State:
    """The same arrays whole, in the memory of every process."""
    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), state)
