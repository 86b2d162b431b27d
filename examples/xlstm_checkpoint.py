"""Weights of xlstm_model.py: from a checkpoint or random, on one or several devices; and back.

A checkpoint is a folder that transformers (xLSTMForCausalLM) or NX-AI's package xlstm (xLSTMLarge)
can read: config.json, or xlstm's config.yaml, generation_config.json, if it is there, for stop
tokens, and *.safetensors. Their names differ:

    transformers                 older versions              xlstm
    backbone.embeddings                                      embedding
    mlstm_layer.q, k, v          mlstm_layer.query, ...      as transformers
    backbone.out_norm, always                                with add_out_norm, and with a bias

Both write fused matrices as well as single ones. Each file shows which it has. As transformers
does, the reader takes model.safetensors; where there is none, the files that
model.safetensors.index.json names; without either, all files, none of which may repeat a tensor.

The heads, the feed-forward columns and the vocabulary of lm_head are split over the mesh axis
"heads". config.json and the headers of the files show everything that may be wrong with a
checkpoint, so it is found before any weight is read, except for tied embeddings: lm_head.weight, if
it is saved all the same, is compared with them. Where it differs, transformers 5 uses it and older
versions do not, so that the checkpoint is refused.

``write`` puts weights that were trained further into a new folder, which has the files of the
checkpoint that they come from.
"""

import difflib
import functools
import itertools
import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tqdm import tqdm
from xlstm_model import Config, Params, not_finite

DTYPES = ("float32", "bfloat16")
# What config.json may have beside numbers. All that one of these matches is the same function here,
# up to rounding errors, but for input_gate and a kernel with siging: the sigmoid input gate.
KERNEL = (
    "((chunkwise|parallel|native|sequence|triton|autograd|custbw|stablef|limit|chunk|xl|headdim"
    "|siging)(-|_|$)+)*"
)
ALLOWED = dict(
    model_type="xlstm",
    add_qk_norm="False",
    weight_mode="single|fused",
    inference_state_dtype="float32|bfloat16|float16",
    input_gate="exp|sigmoid",
    chunkwise_kernel=KERNEL,
    sequence_kernel=KERNEL,
    step_kernel=KERNEL,
    force_bos_token_insert="True|False|None",
)
ALIASES = dict(hidden_size="embedding_dim", num_blocks="num_hidden_layers")
MODEL_FIELDS = {*vars(Config()), *ALLOWED, *ALIASES.values()} - {"force_bos_token_insert"}
# Fields of xLSTMLargeConfig and xLSTMConfig that do not change the function, and, in the last three
# lines, those that NX-AI/xLSTM-7b has beside them.
OTHER_FIELDS = {
    *("mode", "chunk_size", "max_inference_chunksize", "return_last_states", "use_cache"),
    *("autocast_kernel_dtype", "norm_reduction_force_float32"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("add_embedding_dropout", "add_forward_backend_padding", "add_post_blocks_norm", "head_dim"),
    *("add_post_norm", "cell_norm_eps", "igate_bias_init_range", "mlstm_round_up_to_multiple_of"),
    "force_bos_token_insert",
}
# What numbers may be: beyond these limits float32 has no reciprocal, or an array no index.
LEAST, MOST, MOST_BLOCKS, LARGEST = 1e-30, 1e30, 10_000, 2**31 - 1
# Layers of a checkpoint by the name of the array in which they are joined.
JOINED = dict(
    norm_mlstm="norm_mlstm",
    qkvo="mlstm_layer.q mlstm_layer.k mlstm_layer.v mlstm_layer.ogate_preact",
    gates="mlstm_layer.igate_preact mlstm_layer.fgate_preact",
    multihead_norm="mlstm_layer.multihead_norm",
    out_proj="mlstm_layer.out_proj",
    norm_ffn="norm_ffn",
    up="ffn.proj_up_gate ffn.proj_up",
    down="ffn.proj_down",
)
# Layers of files that have the rows of several, from the first to the last.
FUSED = {
    "mlstm_layer.qkv_opreact": JOINED["qkvo"],
    "mlstm_layer.ifgate_preact": JOINED["gates"],
    "ffn.proj_up_gate_z": JOINED["up"],
}
OUT_NORM = "backbone.out_norm"
# Weights that are not a block's, by the name of their array.
OUTSIDE = dict(
    embeddings="backbone.embeddings.weight",
    lm_head="lm_head.weight",
    out_norm=f"{OUT_NORM}.weight",
    out_norm_bias=f"{OUT_NORM}.bias",
)
# Of a checkpoint, beside its weights.
TEXTS = ".json", ".yaml", ".model", ".txt", ".jinja"
DTYPE_OF = dict(F32=jnp.float32, BF16=jnp.bfloat16, F16=jnp.float16)

Tensors = dict[str, jax.ShapeDtypeStruct]
# The values of a tensor by its name, in any dtype.
Reader = Callable[[str, jax.ShapeDtypeStruct], ArrayLike]


class CheckpointError(ValueError):
    """What is wrong, in one line for the user."""


def read_text(path: Path | str) -> str:
    """The text of a file, or with - of stdin, with the ends of its lines as they are.

    A byte order mark, which editors on Windows write, is no part of it.
    """
    try:
        if path == "-" and sys.stdin is None:
            raise OSError("stdin is closed")
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


class YamlLoader(yaml.SafeLoader):
    """It reads 1e-6 as a number and refuses a name that is there twice.

    xlstm 2.0.6 reads 1e-6 as a string, which its norms refuse, and the last of two equal names.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value]
        if twice := [name for n, name in enumerate(names) if name in names[:n]]:
            raise yaml.YAMLError(f"{twice[0]} is there twice")
        return super().construct_mapping(node, deep)


EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
YamlLoader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, [*"-+.0123456789"])


def read_values(path: Path) -> dict[str, Any]:
    """The mapping in a file of JSON, or in xlstm's config.yaml."""
    text = read_text(path)
    try:
        values = json.loads(text) if path.suffix == ".json" else yaml.load(text, YamlLoader)
    except (RecursionError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"cannot read {path}: it has no names with values")
    return values


def config_file(folder: Path) -> Path:
    path, of_xlstm = folder / "config.json", folder / "config.yaml"
    return of_xlstm if of_xlstm.exists() and not path.exists() else path


def check_names(path: Path, names: Iterable[Any]) -> None:
    """Refuses fields that xlstm and transformers do not have.

    In config.json, to which transformers adds fields of its own and of users, only those that are
    nearly a field of the model.
    """
    for name in sorted(map(str, {*names} - MODEL_FIELDS - OTHER_FIELDS)):
        similar = difflib.get_close_matches(name.lower(), MODEL_FIELDS, 1, 0.8)
        if similar or path.suffix != ".json":
            question = f"; is it {similar[0]}?" if similar else ""
            raise CheckpointError(f"{path}: there is no field {name}{question}")


def read_config(folder: Path) -> tuple[Config, dict[str, Any]]:
    """The model's configuration, and all values of config.json or config.yaml.

    Raises:
      CheckpointError: an unknown field, a value out of range, or one that this model does not
        compute.
    """
    path, defaults = config_file(folder), vars(Config())
    if path.suffix != ".json":
        defaults = defaults | dict(ffn_proj_factor=2.6667)  # transformers' default is 2.667
    values, names = read_values(path), {}  # names: in the file
    check_names(path, values)
    for name, other in ALIASES.items():
        if values.get(name) is None and values.get(other) is not None:
            values[name], names[name] = values[other], other
    if any("siging" in str(values.get(x)) for x, pattern in ALLOWED.items() if pattern == KERNEL):
        values["input_gate"] = "sigmoid"
    values = defaults | values

    def check(name: str, right: bool, expected: Any) -> None:
        if not right:
            value = f"{names.get(name, name)} is {values[name]!r}"
            raise CheckpointError(f"{path}: {value} and must be {expected}")

    for name in ALLOWED.keys() & values:
        pattern = ALLOWED[name]
        check(name, re.fullmatch(pattern, str(values[name])) is not None, pattern)
    for name, default in defaults.items():
        value = values[name]
        if type(default) is int:
            most = MOST_BLOCKS if name == "num_blocks" else LARGEST
            right = type(value) is int and 1 <= value <= most
            check(name, right, f"an integer from 1 to {most}")
        elif type(default) is float:
            right = type(value) in (int, float) and LEAST <= value <= MOST
            right = right or (value is None and "soft_cap" in name)
            check(name, right, f"a number from {LEAST} to {MOST}")
            values[name] = value if value is None else float(value)
        else:
            check(name, type(value) is type(default), f"of the type of {default!r}")
    width, other = values["hidden_size"], values.get("embedding_dim")
    same = other is None or (type(other) is int and other == width)
    check("embedding_dim", same, f"hidden_size, {width}")
    for name in ("qk_dim_factor", "v_dim_factor", "ffn_proj_factor"):
        right = 1 <= width * values[name] <= LARGEST
        check(name, right, f"such that {width} times it is from 1 to {LARGEST}")
    config = Config(**{name: values[name] for name in defaults})
    for width in (config.qk_dim, config.v_dim):
        divides = width % config.num_heads == 0
        check("num_heads", divides, f"a divisor of {width}, the width of all heads")
    return config, values


def check_ids(config: Config, name: str, tokens: Any) -> list[int]:
    """The ids of a field or a flag: one, a list or None.

    Raises:
      CheckpointError: what is no token of the vocabulary; it names the field.
    """
    tokens = tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]
    for token in tokens:
        if type(token) is not int or not 0 <= token < config.vocab_size:
            most = config.vocab_size - 1
            raise CheckpointError(f"{name}: {token!r} is no token, an integer from 0 to {most}")
    return tokens


def read_stop_tokens(folder: Path, config: Config, values: dict[str, Any]) -> set[int]:
    """eos_token_id of generation_config.json, else of the config, whose values these are."""
    path = folder / "generation_config.json"
    tokens = read_values(path).get("eos_token_id") if path.exists() else None
    if tokens is None:
        path, tokens = config_file(folder), values.get("eos_token_id")
    return {*check_ids(config, f"{path}: eos_token_id", tokens)}


def read_bos(folder: Path, config: Config, values: dict[str, Any]) -> list[int]:
    """The token before each prompt where the config has force_bos_token_insert, else none."""
    if str(values.get("force_bos_token_insert")) != "True":
        return []
    bos = [values.get("bos_token_id", 0)]
    return check_ids(config, f"{config_file(folder)}: bos_token_id", bos)


def read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no other type
        raise CheckpointError(f"no tokenizer {path}: {error}") from None
    tokenizer.no_truncation()  # which the file may have from a training, as well as padding
    tokenizer.no_padding()
    return tokenizer


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

    Matrices are cast to the dtype; norms and biases are float32.
    """
    D, F, V = config.hidden_size, config.ffn_dim, config.vocab_size
    NH, QK, H = config.num_heads, config.qk_dim, config.v_dim
    mesh, whole, rows, columns = mesh_of(config, devices), P(), P("heads"), P(None, "heads")
    block = {
        "norm_mlstm": (whole, D),
        "mlstm_layer.q": (rows, QK, D),
        "mlstm_layer.k": (rows, QK, D),
        "mlstm_layer.v": (rows, H, D),
        "mlstm_layer.ogate_preact": (rows, H, D),
        "mlstm_layer.igate_preact": (rows, NH, D),
        "mlstm_layer.fgate_preact": (rows, NH, D),
        "mlstm_layer.multihead_norm": (rows, H),
        "mlstm_layer.out_proj": (columns, D, H),
        "norm_ffn": (whole, D),
        "ffn.proj_up_gate": (rows, F, D),
        "ffn.proj_up": (rows, F, D),
        "ffn.proj_down": (columns, D, F),
    }
    layers = {"backbone.embeddings": (whole, V, D), OUT_NORM: (whole, D), "lm_head": (rows, V, D)}
    if config.tie_word_embeddings:
        del layers["lm_head"]
    for n in range(config.num_blocks):
        layers |= {f"backbone.blocks.{n}.{name}": x for name, x in block.items()}

    def placed(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
        x = dtype if len(shape) == 2 else "float32"
        return jax.ShapeDtypeStruct(shape, x, sharding=NamedSharding(mesh, spec))

    tensors = {f"{name}.weight": placed(*x) for name, x in layers.items()}
    for name, (spec, size, *_) in layers.items():
        gates = name.endswith(("igate_preact", "fgate_preact"))
        if gates or (config.use_bias and name not in ("backbone.embeddings", "lm_head")):
            tensors[f"{name}.bias"] = placed(whole if spec == columns else spec, size)
    return tensors


def joined_rows(config: Config) -> dict[str, int]:
    """Arrays that have a part of each of their tensors per row, and how many rows."""
    rows = dict.fromkeys(("qkvo", "gates", "multihead_norm"), config.num_heads)
    return rows | dict(up=config.ffn_dim)


def joined_name(name: str, kind: str) -> str:
    return name if kind == "weight" else "gate_bias" if name == "gates" else f"{name}_bias"


@functools.partial(jax.jit, static_argnums=0)
def join(config: Config, block: dict[str, jax.Array]) -> Params:
    """A block of xlstm_model.py: tensors with the same input are one array."""
    rows, params = joined_rows(config), {}
    for name, layers in JOINED.items():
        for kind in ("weight", "bias"):
            parts = [block[y] for x in layers.split() if (y := f"{x}.{kind}") in block]
            if name in rows and parts:
                parts = [x.reshape(rows[name], -1, *x.shape[1:]) for x in parts]
                parts = [jnp.concatenate(parts, axis=1)]
            if parts:
                params[joined_name(name, kind)] = parts[0]
    return params


def load(config: Config, tensors: Tensors, read: Reader) -> Params:
    """The weights of the model, with a progress bar.

    Raises:
      CheckpointError: a tensor is not finite in its dtype here.
    """

    def array(name: str) -> jax.Array:
        x = tensors[name]
        return jax.device_put(read(name, x), x.sharding).astype(x.dtype)

    params: Params = {x: array(name) for x, name in OUTSIDE.items() if name in tensors}
    check_finite({name: params[x] for x, name in OUTSIDE.items() if x in params})
    params["blocks"] = []
    for n in tqdm(range(config.num_blocks), "loading", unit="block"):
        prefix = f"backbone.blocks.{n}."
        block = {x: array(x) for x in tensors if x.startswith(prefix)}
        check_finite(block)
        block = {x.removeprefix(prefix): y for x, y in block.items()}
        # The tensors of one block at a time are there twice.
        params["blocks"].append(jax.block_until_ready(join(config, block)))
    return params


def not_finite_in(name: str, dtype: Any) -> CheckpointError:
    return CheckpointError(f"{name} has values that are not finite in {dtype}")


def check_finite(arrays: dict[str, jax.Array]) -> None:
    if names := not_finite(arrays):
        raise not_finite_in(names[0], arrays[names[0]].dtype)


def parts_of(name: str) -> list[str]:
    """The tensors of ``tensors_of`` whose rows a tensor of a file has."""
    name = re.sub(r"\b([qkv])(uery|ey|alue)\b", r"\1", name)
    name = re.sub(r"^embedding\b", "backbone.embeddings", name)
    for fused, parts in FUSED.items():
        if fused in name:
            return [name.replace(fused, part) for part in parts.split()]
    return [name]


def files_of(folder: Path) -> list[Path]:
    """The files that count.

    Raises:
      CheckpointError: the index is wrong, or names files that are missing.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        paths = {folder / name for name in read_values(index)["weight_map"].values()}
    except (AttributeError, KeyError, TypeError):
        raise CheckpointError(f"{index} has no weight_map with the names of files") from None
    if missing := ", ".join(sorted(path.name for path in paths if not path.exists())):
        raise CheckpointError(f"{folder} lacks files that {index.name} names: {missing}")
    return sorted(paths)


def open_tensors(folder: Path, tensors: Tensors, config: Config) -> Reader:
    """Reads tensors of the files in a folder. Removes an out_norm that they lack from tensors.

    Raises:
      CheckpointError: a tensor is missing, twice there, not of this model, or of another shape or
        dtype; or lm_head.weight is not the embeddings, though they are tied.
    """
    slices, files = dict[str, Any](), dict[str, Path]()
    for path in files_of(folder):
        try:
            file = safe_open(path, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from None
        for name in file.keys():  # noqa: SIM118
            slices[name] = file.get_slice(name)
            if (dtype := slices[name].get_dtype()) not in DTYPE_OF:
                known = ", ".join(DTYPE_OF)
                raise CheckpointError(f"{path}: {name} is {dtype}, expected one of {known}")
            for part in parts_of(name):
                if part in files:
                    raise CheckpointError(f"{part} is in {files[part]} and in {path}")
                files[part] = path
    head = None if "lm_head.weight" in tensors else slices.pop("lm_head.weight", None)
    parts = {name: parts_of(name) for name in slices}
    present = {*itertools.chain(*parts.values())}
    # transformers computes out_norm whatever add_out_norm says, and never with a bias.
    for kind in ("bias", "weight")[: 2 - config.add_out_norm]:
        if (name := f"{OUT_NORM}.{kind}") not in present:
            tensors.pop(name, None)
    missing, foreign = tensors.keys() - present, present - tensors.keys()
    if names := missing or foreign:
        problem = "lacks" if missing else "has, unlike the model,"
        some = ", ".join(sorted(names)[:4])
        raise CheckpointError(f"{folder} {problem} {len(names)} tensors: {some}")
    rows: dict[str, Callable[[], ArrayLike]] = {}
    for name, x in slices.items():
        (_, *columns), end = tensors[parts[name][0]].shape, 0
        for part in parts[name]:
            begin, end = end, end + tensors[part].shape[0]
            rows[part] = functools.partial(x.__getitem__, slice(begin, end))
        shape, dtype, expected = x.get_shape(), x.get_dtype(), [end, *columns]
        if shape != expected:
            raise CheckpointError(f"{name} is {dtype} {shape}, and config.json makes it {expected}")
    if head is not None and not np.array_equal(head[:], rows["backbone.embeddings.weight"]()):
        raise CheckpointError(
            "lm_head.weight differs from the embeddings: tie_word_embeddings must be false"
        )
    return lambda name, _: rows[name]()


def tensor_of(config: Config, params: Params, tensors: Tensors, name: str) -> np.ndarray:
    """The tensor of this name, of those that ``load`` has made one array."""
    for array, outside in OUTSIDE.items():
        if name == outside:
            return np.asarray(params[array])
    prefix, number, layer, kind = re.fullmatch(
        r"(backbone\.blocks\.(\d+)\.)(.*)\.(weight|bias)", name
    ).groups()
    [(joined, layers)] = [(x, y.split()) for x, y in JOINED.items() if layer in y.split()]
    array = np.asarray(params["blocks"][int(number)][joined_name(joined, kind)])
    rows = joined_rows(config).get(joined, 1)
    sizes = [tensors[f"{prefix}{x}.{kind}"].shape[0] // rows for x in layers]
    begin = sum(sizes[: layers.index(layer)])
    shape = tensors[name].shape
    array = array.reshape(rows, sum(sizes), *shape[1:])
    return array[:, begin : begin + sizes[layers.index(layer)]].reshape(shape)


def write(source: Path, folder: Path, params: Params) -> None:
    """Writes weights as a checkpoint like the one that they come from, into a new folder.

    Its files have the names, the tensors and the dtypes of the source's, and its configuration and
    tokenizer are copies. The folder appears when all of it is written.

    Args:
      source: the checkpoint that ``load`` has read.
      folder: must not be there yet.
      params: in the structure of xlstm_model.py, in any dtype.

    Raises:
      CheckpointError: the folder is there, or weights are not finite in the dtype of their file.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} is there already")
    config, _ = read_config(source)
    tensors = tensors_of(config, "float32", 1)
    open_tensors(source, tensors, config)  # checks the source
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as temporary:
        coming = Path(temporary, folder.name)
        coming.mkdir()
        for path in source.iterdir():
            if path.suffix in TEXTS:
                shutil.copyfile(path, coming / path.name)
        for path in files_of(source):
            file, arrays = safe_open(path, framework="numpy"), dict[str, np.ndarray]()
            for name in file.keys():  # noqa: SIM118
                parts = parts_of(name)
                if name == "lm_head.weight" and name not in tensors:
                    parts = ["backbone.embeddings.weight"]  # tied, and saved all the same
                rows = [tensor_of(config, params, tensors, part) for part in parts]
                with np.errstate(over="ignore"):
                    x = np.concatenate(rows).astype(DTYPE_OF[file.get_slice(name).get_dtype()])
                if not np.isfinite(x).all():
                    raise not_finite_in(name, x.dtype)
                arrays[name] = np.ascontiguousarray(x)  # safetensors writes a view's memory
            save_file(arrays, coming / path.name, file.metadata())
        coming.rename(folder)


def random_tensors(seed: int) -> Reader:
    """Weights of the usual scale; norms and biases of gates are 1."""
    key, numbers = jax.random.key(seed), itertools.count()

    def read(_: str, x: jax.ShapeDtypeStruct) -> jax.Array:
        if len(x.shape) == 1:
            return jnp.ones(x.shape)
        draws = jax.random.fold_in(key, next(numbers))
        return x.shape[-1] ** -0.5 * jax.random.normal(draws, x.shape, x.dtype)

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


def check_prompts(
    config: Config, tensors: Tensors, prompts: dict[int, list[int]], rows: int = 0, steps: int = 0
) -> None:
    """Checks that the model can read prompts, and that their arrays fit beside its weights.

    Args:
      prompts: by their numbers.
      rows: how many prompts have states at a time; 0: all of them.
      steps: most of a prefill; 0: those of all prompts.

    Raises:
      CheckpointError: a prompt that is wrong, or too little memory; the message has the sum.
    """
    for n, prompt in prompts.items():
        if not prompt or max(prompt) >= config.vocab_size:
            raise CheckpointError(f"--prompt: prompt {n} has no token, or one beyond vocab_size")
    B, S = rows or len(prompts), steps or sum(map(len, prompts.values()))
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
