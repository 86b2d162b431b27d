"""Weights of xlstm_model.py: from a Hugging Face checkpoint or random, on one or several devices.

The heads, the feed-forward columns and the vocabulary of lm_head are split over the mesh axis
"heads"; each device reads its own part of the files. config.json and the headers of the files show
everything that may be wrong with a checkpoint, so it is found before any weight is read.
"""

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError, safe_open
from tqdm import tqdm
from xlstm_model import Config, Params

# What this model computes and config.json could deny.
REQUIRED = dict(
    model_type="xlstm", use_bias=False, add_out_norm=True, add_qk_norm=False, weight_mode="single"
)
OTHER_NAMES = dict(hidden_size="embedding_dim", num_blocks="num_hidden_layers")
DTYPES = ("float32", "bfloat16")


class CheckpointError(Exception):
    """What is wrong, in one line for the user."""


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def read_config(folder: Path) -> tuple[Config, dict[str, Any]]:
    """The model's configuration, and all values of config.json.

    Raises:
      CheckpointError: a value that is no value, or one that this model does not compute.
    """
    path = folder / "config.json"
    values = read_json(path)
    values = {name: values[x] for name, x in OTHER_NAMES.items() if x in values} | values

    def check(name: str, value: Any, expected: Any, right: bool) -> None:
        if not right:
            raise CheckpointError(f"{path}: {name} is {value!r} and must be {expected}")

    for name, expected in REQUIRED.items():
        value = values.setdefault(name, expected)
        check(name, value, repr(expected), value == expected)
    for name, default in vars(Config()).items():
        value, number = values.setdefault(name, default), type(default) in (int, float)
        right = type(value) in (int if number else type(default), type(default))
        like = f"a positive number or of the type of {default!r}"
        check(name, value, like, right and (not number or 0 < value < math.inf))
    config = Config(**{name: values[name] for name in vars(Config())})
    dtype, width = config.inference_state_dtype, config.hidden_size
    check("inference_state_dtype", dtype, " or ".join(DTYPES), dtype in DTYPES)
    embedding = values.get("embedding_dim", width)
    check("embedding_dim", embedding, f"hidden_size, {width}", embedding == width)
    for name in ("qk_dim", "v_dim"):
        total, multiple = getattr(config, name), f"a multiple of num_heads, {config.num_heads}"
        right = total > 0 and total % config.num_heads == 0
        check(f"hidden_size * {name}_factor", total, multiple, right)
    return config, values


class Weight(NamedTuple):
    """How xlstm_model.py has one or several tensors of a checkpoint, joined on axis 1.

    The tensors are (rows * per_row, *columns) and the weight is (rows, sum of per_row, *columns),
    without axis 1 if it is 1. Weights without columns (norms and biases) are float32.
    """

    names: list[str]
    rows: int
    columns: tuple[int, ...] = ()
    per_row: tuple[int, ...] = (1,)
    split: int | None = None  # the axis that is split over devices

    @property
    def shape(self) -> tuple[int, ...]:
        joined = sum(self.per_row)
        return (self.rows, joined, *self.columns) if joined > 1 else (self.rows, *self.columns)

    def sharding(self, mesh: Mesh) -> NamedSharding:
        return NamedSharding(mesh, P() if self.split is None else P(*[None] * self.split, "heads"))

    def dtype(self, dtype: str) -> str:
        return dtype if self.columns else "float32"

    def bytes_on(self, devices: int, dtype: str) -> int:
        size = math.prod(self.shape) * jnp.dtype(self.dtype(dtype)).itemsize
        return size if self.split is None else size // devices


def weights_of(config: Config) -> Params:
    """The tree of xlstm_model.py, with a Weight in place of each array."""
    D, NH, F, V = config.hidden_size, config.num_heads, config.ffn_dim, config.vocab_size
    DHQK, DHV = config.head_dims

    def block(prefix: str) -> dict[str, Weight]:
        def names(folder: str, *tensors: str) -> list[str]:
            return [f"{prefix}.{folder}{tensor}" for tensor in tensors]

        layer, ffn = "mlstm_layer.", "ffn.proj_"
        qkvo = names(layer, "q.weight", "k.weight", "v.weight", "ogate_preact.weight")
        gates = names(layer, "igate_preact.weight", "fgate_preact.weight")
        biases = names(layer, "igate_preact.bias", "fgate_preact.bias")
        return {
            "norm_mlstm": Weight(names("", "norm_mlstm.weight"), D),
            "qkvo": Weight(qkvo, NH, (D,), (DHQK, DHQK, DHV, DHV), 0),
            "gates": Weight(gates, NH, (D,), (1, 1), 0),
            "gate_bias": Weight(biases, NH, (), (1, 1), 0),
            "multihead_norm": Weight(names(layer, "multihead_norm.weight"), NH, (), (DHV,), 0),
            "out_proj": Weight(names(layer, "out_proj.weight"), D, (config.v_dim,), split=1),
            "norm_ffn": Weight(names("", "norm_ffn.weight"), D),
            "up": Weight(names(ffn, "up_gate.weight", "up.weight"), F, (D,), (1, 1), 0),
            "down": Weight(names(ffn, "down.weight"), D, (F,), split=1),
        }

    tree = {
        "embeddings": Weight(["backbone.embeddings.weight"], V, (D,)),
        "blocks": [block(f"backbone.blocks.{n}") for n in range(config.num_blocks)],
        "out_norm": Weight(["backbone.out_norm.weight"], D),
        "lm_head": Weight(["lm_head.weight"], V, (D,), split=0),
    }
    if config.tie_word_embeddings:
        del tree["lm_head"]
    return tree


def is_weight(x: Any) -> bool:
    return isinstance(x, Weight)


def total_bytes(weights: Params, devices: int, dtype: str) -> int:
    leaves = jax.tree.leaves(weights, is_leaf=is_weight)
    return sum(weight.bytes_on(devices, dtype) for weight in leaves)


def state_bytes(config: Config, devices: int) -> int:
    """The states of one prompt on one of the devices."""
    (DHQK, DHV), itemsize = config.head_dims, jnp.dtype(config.inference_state_dtype).itemsize
    return config.num_blocks * config.num_heads // devices * (DHQK * (DHV + 1) * itemsize + 4)


def mesh_of(config: Config, devices: int) -> Mesh:
    """A mesh of so many devices.

    Raises:
      CheckpointError: there are fewer, or they do not divide the model.
    """
    if devices > (present := len(jax.devices())):
        raise CheckpointError(f"--devices={devices}, and there are {present}")
    for name in ("num_heads", "ffn_dim", "vocab_size"):
        if (size := getattr(config, name)) % devices:
            raise CheckpointError(f"--devices={devices} do not divide {name}, {size}")
    return jax.make_mesh((devices,), ("heads",), (AxisType.Auto,), devices=jax.devices()[:devices])


def check_memory(config: Config, dtype: str, B: int, S: int, mesh: Mesh) -> None:
    """Whether the weights, the states of B prompts and a block's arrays of S steps fit.

    Raises:
      CheckpointError: they do not; the message has the sum.
    """
    n, itemsize = mesh.size, jnp.dtype(dtype).itemsize
    widest = max(3 * config.ffn_dim, 4 * (config.qk_dim + config.v_dim))  # what XLA holds at once
    width = 2 * config.hidden_size + widest // n
    parts = dict(
        weights=total_bytes(weights_of(config), n, dtype),
        states=B * state_bytes(config, n),
        prefill=S * width * itemsize,
        sampling=12 * B * config.vocab_size,
    )
    stats = [device.memory_stats() for device in mesh.devices.flat]
    free = min((x["bytes_limit"] - x["bytes_in_use"] for x in stats if x), default=math.inf)
    if (needed := sum(parts.values())) > free:
        summands = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
        raise CheckpointError(
            f"needs {needed / 2**30:.2f} GiB per device ({summands}), {free / 2**30:.2f} are free: "
            "fewer or shorter prompts, --dtype=bfloat16 or more --devices"
        )


def open_tensors(folder: Path, weights: Params) -> dict[str, Any]:
    """Slices by name, of the tensors of all files, whose data is not read yet.

    Raises:
      CheckpointError: a tensor is missing, not of this model, or of another shape or dtype.
    """
    tensors: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        try:
            file = safe_open(path, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from None
        tensors |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    if "lm_head" not in weights:
        tensors.pop("lm_head.weight", None)  # tied, and saved all the same
    expected = {
        name: [weight.rows * per_row, *weight.columns]
        for weight in jax.tree.leaves(weights, is_leaf=is_weight)
        for name, per_row in zip(weight.names, weight.per_row, strict=True)
    }
    missing, foreign = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    for problem, names in {"lacks": missing, "has, unlike the model,": foreign}.items():
        if names:
            some = ", ".join(sorted(names)[:4])
            raise CheckpointError(f"{folder} {problem} {len(names)} tensors: {some}")
    for name, shape in expected.items():
        found, dtype = tensors[name].get_shape(), tensors[name].get_dtype()
        if found != shape or dtype not in ("F32", "BF16", "F16"):
            raise CheckpointError(f"{name} is {dtype} {found}, and config.json makes it {shape}")
    return tensors


def read(weight: Weight, tensors: dict[str, Any], index: tuple[slice, ...]) -> np.ndarray:
    """The part of a weight that belongs on one device."""
    start, end, _ = index[0].indices(weight.rows)
    parts = []
    for name, size in zip(weight.names, weight.per_row, strict=True):
        x = tensors[name][(slice(start * size, end * size), *index[-1:][: len(weight.columns)])]
        parts.append(x.reshape(end - start, size, *x.shape[1:]))
    joined = np.concatenate(parts, axis=1)
    return joined.reshape(end - start, *joined.shape[1 + (joined.shape[1] == 1) :])


def load(config: Config, tensors: dict[str, Any], dtype: str, mesh: Mesh) -> Params:
    """The weights, each part read for the device that has it, with a progress bar."""
    weights = weights_of(config)
    with tqdm(total=total_bytes(weights, 1, dtype), unit="B", unit_scale=True) as bar:

        def array(weight: Weight) -> jax.Array:
            callback = functools.partial(read, weight, tensors)
            x = jax.make_array_from_callback(weight.shape, weight.sharding(mesh), callback)
            x = x.astype(weight.dtype(dtype)).block_until_ready()  # one at a time in two dtypes
            bar.update(weight.bytes_on(1, dtype))
            return x

        return jax.tree.map(array, weights, is_leaf=is_weight)


def random_params(config: Config, dtype: str, mesh: Mesh, seed: int) -> Params:
    """Weights of the usual scale; norms and biases of gates are 1."""

    @functools.partial(jax.jit, static_argnums=(0, 1))  # weights of one shape are compiled once
    def normal(shape: tuple[int, ...], sharding: NamedSharding, key: jax.Array) -> jax.Array:
        x = shape[-1] ** -0.5 * jax.random.normal(key, shape, dtype)
        return lax.with_sharding_constraint(x, sharding)

    def array(weight: Weight) -> jax.Array:
        shape, sharding = weight.shape, weight.sharding(mesh)
        if weight.columns:
            return normal(shape, sharding, jax.random.key(next(seeds)))
        return jnp.ones(shape, device=sharding)

    seeds = itertools.count(seed)
    return jax.tree.map(array, weights_of(config), is_leaf=is_weight)
