"""Which device holds what when train_byte_lm.py trains on several.

The mesh has three axes. data splits the batch; tensor splits the heads, with the columns of the matrices before and the rows of those
behind them, and the hidden width of the MLP alike; sequence splits the steps. Embedding and unembedding are on every device.
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
SPLIT_COLUMNS = {
    "query",
    "key",
    "value",
    "input_gate",
    "forget_gate",
    "head_scale",
    "output_gate",
    "gate",
    "up",
}
SPLIT_ROWS = {"output", "down"}


class MeshError(ValueError):
    """These devices cannot make the mesh."""


def parse_mesh(text: str) -> dict[str, int]:
    """ "data:2,sequence:4" -> the size of every axis, 1 where none is given.

    Raises:
      ValueError: not of that form.
    """
    sizes = dict.fromkeys(AXES, 1)
    given = [part.partition(":")[::2] for part in text.split(",") if part]
    for name, size in given:
        if name not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"{name}:{size} is not an axis ({', '.join(AXES)}) and its size")
        sizes[name] = int(size)
    if len(dict(given)) < len(given):
        raise ValueError(f"{text} names an axis twice")
    return sizes


def mesh_size(text: str) -> int:
    """The number of devices."""
    return math.prod(parse_mesh(text).values())


def make_mesh(text: str) -> Mesh | None:
    """The mesh over the first devices, over all of them if there are several processes; None for a single device.

    Raises:
      MeshError: too few devices, or a process without any.
    """
    wanted, present = mesh_size(text), jax.device_count()
    if wanted > present or (jax.process_count() > 1 and wanted != present):
        of = (
            f" in {jax.process_count()} processes, which take part with all"
            if jax.process_count() > 1
            else ""
        )
        raise MeshError(f"--mesh={text} has {wanted} devices, there are {present}{of}")
    if wanted == 1:
        return None
    return jax.make_mesh(
        tuple(parse_mesh(text).values()),
        AXES,
        axis_types=(AxisType.Auto,) * 3,
        devices=jax.devices()[:wanted],
    )


def spread(x: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """x, the same in every process, sharded over the devices of the mesh."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def settled(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """x, which CPU devices have computed: the collectives of two programs under way would wait for each other's threads there."""
    return (
        x.block_until_ready() if mesh is not None and mesh.devices.flat[0].platform == "cpu" else x
    )


def state_shardings(state: nnx.State, mesh: Mesh) -> nnx.State:
    """For the state of a model, or of its optimizer, whose moments are sharded as their parameters are."""

    def sharding(path, x):
        names = set(
            jax.tree_util.keystr(path[:-1], simple=True, separator="/").split("/")
        )  # the last is "value", of a Variable
        if names & SPLIT_COLUMNS:
            return NamedSharding(mesh, P(*[None] * (x.ndim - 1), "tensor"))
        return NamedSharding(mesh, P("tensor") if names & SPLIT_ROWS else P())

    return jax.tree.map_with_path(sharding, state)


def shard(modules: tuple[nnx.Module, ...], mesh: Mesh) -> None:
    """Shards the arrays of modules, the same in every process, over the devices of the mesh."""
    state = nnx.state(modules)
    nnx.update(
        modules,
        jax.tree.map(
            lambda x, to: spread(np.asarray(x), mesh, to.spec), state, state_shardings(state, mesh)
        ),
    )


def gathered(state: nnx.State) -> nnx.State:
    """The same arrays whole, in the memory of every process."""
    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), state)
