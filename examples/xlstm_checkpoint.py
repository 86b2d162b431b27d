"""Weights of xlstm_model.py: from a Hugging Face checkpoint or random, on one or several devices.

The heads, the feed-forward columns and the vocabulary of lm_head are split over the mesh axis
"heads". config.json and the headers of the files show everything that may be wrong with a
checkpoint, so it is found before any weight is read.
"""

import functools
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from tqdm import tqdm
from xlstm_model import Config, Params

# What this model computes and config.json could deny.
REQUIRED = dict(
    model_type="xlstm", use_bias=False, add_out_norm=True, add_qk_norm=False, weight_mode="single"
)
ALIASES = dict(hidden_size="embedding_dim", num_blocks="num_hidden_layers")
DTYPES = ("float32", "bfloat16")

Tensors = dict[str, jax.ShapeDtypeStruct]
# The values of a tensor by its name, in any dtype.
Reader = Callable[[str, jax.ShapeDtypeStruct], ArrayLike]


class CheckpointError(Exception):
    """What is wrong, in one line for the user."""


def read_text(path: Path | str) -> str:
    """The text of a file; -: stdin."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def read_config(folder: Path) -> tuple[Config, dict[str, Any]]:
    """The model's configuration, and all values of config.json.

    Raises:
      CheckpointError: a value that is no value, or one that this model does not compute.
    """
    path = folder / "config.json"
    try:
        values = dict(json.loads(read_text(path)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    values = {name: values[x] for name, x in ALIASES.items() if x in values} | values
    defaults = vars(Config())
    values = REQUIRED | defaults | values

    def check(name: str, right: bool, expected: Any) -> None:
        if not right:
            raise CheckpointError(f"{path}: {name} is {values[name]!r} and must be {expected}")

    for name, value in REQUIRED.items():
        check(name, values[name] == value, repr(value))
    for name, default in defaults.items():
        value, kind = values[name], type(default)
        number = kind in (int, float)
        right = type(value) in (int if number else kind, kind)
        like = f"a positive number or of the type of {default!r}"
        check(name, right and (not number or 0 < value < math.inf), like)
    width = values["hidden_size"]
    check("embedding_dim", values.setdefault("embedding_dim", width) == width, width)
    config = Config(**{name: values[name] for name in defaults})
    check("inference_state_dtype", config.inference_state_dtype in DTYPES, " or ".join(DTYPES))
    for name in {"chunkwise_kernel", "sequence_kernel", "step_kernel"} & {*values}:
        check(name, "siging" not in str(values[name]), "a kernel with the exponential input gate")
    for width in (config.qk_dim, config.v_dim):
        divides = width > 0 and width % config.num_heads == 0
        check("num_heads", divides, f"a divisor of {width}, the width of all heads")
    return config, values


def read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no other type
        raise CheckpointError(f"no tokenizer {path}: {error}") from None


def stop_ids(tokens: Any) -> set[int]:
    """The ids of eos_token_id in config.json, or of a flag: one, a list or None."""
    tokens = tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]
    try:
        return set(map(int, tokens))
    except (TypeError, ValueError):
        raise CheckpointError(f"stop tokens are ids, not {tokens}") from None


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


def tensors_of(config: Config, dtype: str, devices: int) -> Tensors:
    """The tensors of a checkpoint by name: their shapes, and how they are placed on the devices.

    Matrices are cast to the dtype; norms and the biases of gates are float32.
    """
    D, F, V = config.hidden_size, config.ffn_dim, config.vocab_size
    NH, QK, H = config.num_heads, config.qk_dim, config.v_dim
    mesh, whole, rows, columns = mesh_of(config, devices), P(), P("heads"), P(None, "heads")
    block = {
        "norm_mlstm.weight": (whole, D),
        "mlstm_layer.q.weight": (rows, QK, D),
        "mlstm_layer.k.weight": (rows, QK, D),
        "mlstm_layer.v.weight": (rows, H, D),
        "mlstm_layer.ogate_preact.weight": (rows, H, D),
        "mlstm_layer.igate_preact.weight": (rows, NH, D),
        "mlstm_layer.fgate_preact.weight": (rows, NH, D),
        "mlstm_layer.igate_preact.bias": (rows, NH),
        "mlstm_layer.fgate_preact.bias": (rows, NH),
        "mlstm_layer.multihead_norm.weight": (rows, H),
        "mlstm_layer.out_proj.weight": (columns, D, H),
        "norm_ffn.weight": (whole, D),
        "ffn.proj_up_gate.weight": (rows, F, D),
        "ffn.proj_up.weight": (rows, F, D),
        "ffn.proj_down.weight": (columns, D, F),
    }
    tensors = {"backbone.embeddings.weight": (whole, V, D), "backbone.out_norm.weight": (whole, D)}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = rows, V, D
    for n in range(config.num_blocks):
        tensors |= {f"backbone.blocks.{n}.{name}": x for name, x in block.items()}

    def placed(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
        x = dtype if len(shape) == 2 else "float32"
        return jax.ShapeDtypeStruct(shape, x, sharding=NamedSharding(mesh, spec))

    return {name: placed(*x) for name, x in tensors.items()}


@functools.partial(jax.jit, static_argnums=0)
def join(config: Config, block: dict[str, jax.Array]) -> Params:
    """A block of xlstm_model.py: tensors with the same input are one array."""

    def joined(rows: int, *names: str) -> jax.Array:
        parts = [block[name].reshape(rows, -1, *block[name].shape[1:]) for name in names]
        return jnp.concatenate(parts, axis=1)

    heads = functools.partial(joined, config.num_heads)
    gates = "mlstm_layer.igate_preact", "mlstm_layer.fgate_preact"
    layers = "q", "k", "v", "ogate_preact"
    return dict(
        norm_mlstm=block["norm_mlstm.weight"],
        qkvo=heads(*(f"mlstm_layer.{name}.weight" for name in layers)),
        gates=heads(*(f"{name}.weight" for name in gates)),
        gate_bias=heads(*(f"{name}.bias" for name in gates)),
        multihead_norm=heads("mlstm_layer.multihead_norm.weight"),
        out_proj=block["mlstm_layer.out_proj.weight"],
        norm_ffn=block["norm_ffn.weight"],
        up=joined(config.ffn_dim, "ffn.proj_up_gate.weight", "ffn.proj_up.weight"),
        down=block["ffn.proj_down.weight"],
    )


def load(config: Config, tensors: Tensors, read: Reader) -> Params:
    """The weights of the model, with a progress bar."""

    def array(name: str) -> jax.Array:
        x = tensors[name]
        return jax.device_put(read(name, x), x.sharding).astype(x.dtype)

    names = dict(embeddings="backbone.embeddings", out_norm="backbone.out_norm", lm_head="lm_head")
    if config.tie_word_embeddings:
        del names["lm_head"]
    params: Params = {x: array(f"{name}.weight") for x, name in names.items()} | dict(blocks=[])
    for n in tqdm(range(config.num_blocks), "loading", unit="block"):
        prefix = f"backbone.blocks.{n}."
        block = {x.removeprefix(prefix): array(x) for x in tensors if x.startswith(prefix)}
        # The tensors of one block at a time are there twice.
        params["blocks"].append(jax.block_until_ready(join(config, block)))
    return params


def open_tensors(folder: Path, tensors: Tensors) -> Reader:
    """Reads tensors of the files in a folder.

    Raises:
      CheckpointError: a tensor is missing, not of this model, or of another shape or dtype.
    """
    slices: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        try:
            file = safe_open(path, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from None
        slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    if "lm_head.weight" not in tensors:
        slices.pop("lm_head.weight", None)  # tied, and saved all the same
    missing, foreign = tensors.keys() - slices.keys(), slices.keys() - tensors.keys()
    if names := missing or foreign:
        problem = "lacks" if missing else "has, unlike the model,"
        some = ", ".join(sorted(names)[:4])
        raise CheckpointError(f"{folder} {problem} {len(names)} tensors: {some}")
    for name, x in tensors.items():
        shape, dtype, expected = slices[name].get_shape(), slices[name].get_dtype(), [*x.shape]
        if shape != expected or dtype not in ("F32", "BF16", "F16"):
            raise CheckpointError(f"{name} is {dtype} {shape}, and config.json makes it {expected}")
    return lambda name, _: slices[name][:]


def random_tensors(seed: int) -> Reader:
    """Weights of the usual scale; norms and biases of gates are 1."""
    keys = map(jax.random.key, itertools.count(seed))

    def read(_: str, x: jax.ShapeDtypeStruct) -> jax.Array:
        if len(x.shape) == 1:
            return jnp.ones(x.shape)
        return x.shape[-1] ** -0.5 * jax.random.normal(next(keys), x.shape, x.dtype)

    return read


def bytes_per_device(tensors: Tensors) -> int:
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in tensors.values()
    )


def state_bytes(config: Config, devices: int) -> int:
    """The states of one prompt on one of the devices."""
    (DHQK, DHV), itemsize = config.head_dims, jnp.dtype(config.inference_state_dtype).itemsize
    return config.num_blocks * config.num_heads // devices * (DHQK * (DHV + 1) * itemsize + 4)


def free_bytes(mesh: Mesh) -> float:
    """What every device has left; infinite where devices do not tell."""
    stats = [device.memory_stats() for device in mesh.devices.flat]
    return min((x["bytes_limit"] - x["bytes_in_use"] for x in stats if x), default=math.inf)


def check_prompts(config: Config, tensors: Tensors, prompts: list[list[int]]) -> None:
    """Checks that the model can read prompts, and that their arrays fit beside its weights.

    Raises:
      CheckpointError: a prompt that is wrong, or too little memory; the message has the sum.
    """
    for n, prompt in enumerate(prompts):
        if not prompt or max(prompt) >= config.vocab_size:
            raise CheckpointError(f"prompt {n} has no token, or one beyond vocab_size")
    B, S = len(prompts), sum(map(len, prompts))
    embeddings = tensors["backbone.embeddings.weight"]
    mesh, itemsize = embeddings.sharding.mesh, embeddings.dtype.itemsize
    widest = max(3 * config.ffn_dim, 4 * (config.qk_dim + config.v_dim))  # what XLA holds at once
    parts = dict(
        weights=bytes_per_device(tensors),
        states=B * state_bytes(config, mesh.size),
        prefill=S * (2 * config.hidden_size + widest // mesh.size) * itemsize,
        sampling=12 * B * config.vocab_size,
    )
    if (needed := sum(parts.values())) > (free := free_bytes(mesh)):
        summands = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
        raise CheckpointError(
            f"needs {needed / 2**30:.2f} GiB per device ({summands}), {free / 2**30:.2f} are free: "
            "fewer or shorter prompts, --dtype=bfloat16 or more --devices"
        )
