"""Which device holds what when train_byte_lm.py trains on several.

The mesh has three axes. data splits the batch. tensor splits the heads, with the outputs of the
matrices before them and the inputs of those behind them, and likewise the hidden width of the MLP.
sequence splits the steps. Embedding and unembedding are on every device.
"""

import math
from typing import Any

import jax
from byte_corpus import UserError
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "tensor", "sequence")
RESIDUAL_STREAM = P("data", "sequence")  # (B, S, D)
HEADS = P("data", "sequence", "tensor")  # (B, S, NH, ...)
SPLIT_ROWS = "qkvo", "gates", "gate_bias", "multihead_norm", "up"  # axis 0
SPLIT_COLUMNS = "out_proj", "down"  # axis 1


def parse_mesh(text: str) -> dict[str, int]:
    """ "data:2,sequence:4" -> the size of every axis, 1 if the text does not name it.

    Raises:
      ValueError: not of that form.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in filter(None, text.split(",")):
        name, _, size = part.partition(":")
        if name not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"{part} is no axis ({', '.join(AXES)}) with its size, as data:2")
        sizes[name] = int(size)
    return sizes


def make_mesh(text: str) -> Mesh:
    """The mesh over the first devices; with several processes, over all devices.

    Raises:
      UserError: too few devices, or a process without any.
    """
    sizes = tuple(parse_mesh(text).values())
    size, present, processes = math.prod(sizes), jax.device_count(), jax.process_count()
    if size > present or (processes > 1 and size != present):
        where = f" in {processes} processes, which take part with all" if processes > 1 else ""
        raise UserError(f"--mesh={text} has {size} devices, there are {present}{where}")
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(sizes, AXES, axis_types=kinds, devices=jax.devices()[:size])


def shardings(state: Any, mesh: Mesh) -> Any:
    """How parameters, and the optimizer's moments, which have the same names, are sharded."""

    def sharding(path, _):
        name = getattr(path[-1], "key", None)
        spec = P("tensor") if name in SPLIT_ROWS else P()
        return NamedSharding(mesh, P(None, "tensor") if name in SPLIT_COLUMNS else spec)

    return jax.tree.map_with_path(sharding, state)


def shard(state: Any, mesh: Mesh) -> Any:
    """Arrays, the same in every process, on the devices of the mesh."""
    return jax.device_put(jax.device_get(state), shardings(state, mesh))
