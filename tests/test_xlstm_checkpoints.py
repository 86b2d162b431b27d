"""examples/xlstm_checkpoint.py: checkpoints as transformers and NX-AI's xlstm write them.

Files that have one model in different forms give the same weights. Each model that they may have
gives the logits in variants.npz, which were computed once in float64, step by step, at each fourth
token of PROMPT.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
import xlstm_checkpoint as checkpoint
import xlstm_model as model
from oracle import assert_close, row_of, rows_of
from safetensors.numpy import save_file
from test_xlstm_7b import FOLDER, ROUNDING, all_tensors, read

VALUES = json.loads((FOLDER / "config.json").read_text())
TENSORS = {name: x.astype(np.float32) for name, x in all_tensors().items()}
LOGITS, EVERY = np.load(FOLDER / "variants.npz"), slice(3, None, 4)
PROMPT = np.random.default_rng(3).integers(1, VALUES["vocab_size"], 40)
FUSED = {
    "mlstm_layer.qkv_opreact": ["mlstm_layer." + x for x in ("q", "k", "v", "ogate_preact")],
    "mlstm_layer.ifgate_preact": ["mlstm_layer.igate_preact", "mlstm_layer.fgate_preact"],
    "ffn.proj_up_gate_z": ["ffn.proj_up_gate", "ffn.proj_up"],
}


# ---------------- checkpoints


def biased(of_out_norm):
    """TENSORS with a bias wherever use_bias has one."""
    rng, tensors = np.random.default_rng(4), dict(TENSORS)
    for name, x in TENSORS.items():
        of_a_block = ".blocks." in name or (of_out_norm and "out_norm" in name)
        if of_a_block and name.endswith(".weight"):
            bias = rng.normal(0.0, 0.3, len(x)).astype(np.float32)
            tensors.setdefault(name.replace(".weight", ".bias"), bias)
    return tensors


def fused(tensors):
    tensors = dict(tensors)
    for n in range(2):
        for name, parts in FUSED.items():
            for kind in ("weight", "bias"):
                names = [f"backbone.blocks.{n}.{part}.{kind}" for part in parts]
                if names[0] in tensors:
                    rows = np.concatenate([tensors.pop(part) for part in names])
                    tensors[f"backbone.blocks.{n}.{name}.{kind}"] = rows
    return tensors


def without_out_norm(tensors):
    return {name: x for name, x in tensors.items() if "out_norm" not in name}


def renamed(tensors, *pairs):
    for old, new in pairs:
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    return tensors


TO_XLSTM = "backbone.embeddings", "embedding"
OLDER = (".q.", ".query."), (".k.", ".key."), (".v.", ".value.")
SIGING = "chunkwise--triton_xl_chunk_siging"
# What config.json has unlike the fixture's, and the model's tensors as the file has them.
SAME = """
fused fused(TENSORS) weight_mode="fused"
older renamed(TENSORS,*OLDER) num_blocks=None, embedding_dim=None, v_dim_factor=2
first TENSORS num_hidden_layers=None, hidden_size=None
out_norm_all_the_same TENSORS add_out_norm=False
kernels TENSORS chunkwise_kernel="parallel--native_stablef_custbw", \
sequence_kernel="native_sequence__triton", step_kernel="triton"
"""


def write(folder, file=TENSORS, **changed):
    (folder / "config.json").write_text(json.dumps(VALUES | changed))
    save_file(file, folder / "model.safetensors")


def write_row(folder, line):
    """Writes the files of a line; returns its name."""
    name, tensors, changed = row_of(line, 2, globals())
    write(folder, eval(tensors), **changed)
    return name


@pytest.mark.parametrize("line", rows_of(SAME))
def test_files_that_have_the_same_model(line, tmp_path):
    write_row(tmp_path, line)
    (config, params), (expected_config, expected) = read(tmp_path), read(FOLDER)
    assert config == dataclasses.replace(expected_config, add_out_norm=config.add_out_norm)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def check(folder, name):
    """Of a prefill of all tokens but the last one, which a step reads.

    A step reads c and n of both blocks; in float16 they are rounded by at most 2^-11, of which
    twice the root sum of squares leaves room for what norms and gates amplify.
    """
    config, params = read(folder)
    dtype, [*before, last] = config.inference_state_dtype, LOGITS[name]
    x, states = model.prefill(config, params, PROMPT[None], None, np.array([len(PROMPT) - 1]))
    assert_close(model.next_logits(config, params, x[0, :-1][EVERY]), np.array(before), ROUNDING)
    logits, after = jax.jit(model.step, static_argnums=0)(config, params, states, PROMPT[-1:])
    for state in (*states, *after):
        assert [x.dtype for x in state] == [dtype, dtype, "float32"]
    rounding = 2 * (2 * 2) ** 0.5 * 2.0**-11 if dtype == "float16" else 0.0
    assert_close(logits[0], last, ROUNDING + rounding)


OF_TRANSFORMERS = """
capless TENSORS gate_soft_cap=None, output_logit_soft_cap=None
biased_sigmoid fused(biased(False)) use_bias=True, input_gate="sigmoid"
sigmoid_float16 without_out_norm(TENSORS) chunkwise_kernel=SIGING, add_out_norm=False, \
inference_state_dtype="float16"
"""


@pytest.mark.parametrize("line", rows_of(OF_TRANSFORMERS))
def test_checkpoints_of_transformers(line, tmp_path):
    check(tmp_path, write_row(tmp_path, line))


YAML = """
# Written by hand
embedding_dim: 64
num_heads: 4
num_blocks: 2
vocab_size: 128
use_bias: {use_bias}   # in all layers
norm_eps: 1.0e-06
add_out_norm: {add_out_norm}
qk_dim_factor: 1.0
v_dim_factor: 2.0
ffn_proj_factor: 1.25
ffn_round_up_to_multiple_of: 32
chunkwise_kernel: {kernel}
mode: 'train'
gate_soft_cap: {cap}
output_logit_soft_cap: {cap}
inference_state_dtype: "float32"
"""


# The tensors, and what YAML has of use_bias, add_out_norm, both caps and the kernel.
OF_XLSTM = """
sigmoid fused(TENSORS) use_bias="false", add_out_norm="true", cap="15", kernel=SIGING
biased biased(True) use_bias="true", add_out_norm="true", cap="null", \
kernel="chunkwise--native_custbw"
biased_sigmoid_no_out_norm fused(without_out_norm(biased(True))) use_bias="true", \
add_out_norm="false", cap="", kernel=SIGING
"""


@pytest.mark.parametrize("line", rows_of(OF_XLSTM))
def test_checkpoints_of_xlstm(line, tmp_path):
    name, tensors, values = row_of(line, 2, globals())
    (tmp_path / "config.yaml").write_text(YAML.format(**values))
    file = renamed(eval(tensors), TO_XLSTM)
    names = [*file]  # in parts, as it writes large ones
    for n in range(2):
        save_file({name: file[name] for name in names[n::2]}, tmp_path / f"model_{n}.safetensors")
    check(tmp_path, name)


DOWN = "backbone.blocks.1.ffn.proj_down.weight"
PART = "backbone.blocks.1.mlstm_layer.qkv_opreact.weight"
# The tensors of a file, and what is said of them.
WRONG = r"""
fused(TENSORS) | {PART: fused(TENSORS)[PART][1:]} <- mlstm_layer.qkv_opreact.weight is F32 \
\[383, 64\], and config.json makes it \[384, 64\]
renamed(fused(TENSORS), (PART, "other")) <- lacks 4 .*k\.weight,
TENSORS | {DOWN: TENSORS[DOWN].T.copy()} <- proj_down.weight is F32 \[96, 64\], .* \[64, 96\]
TENSORS | {DOWN: TENSORS[DOWN].astype("int8")} <- proj_down.weight is I8
TENSORS | dict(foreign=TENSORS[DOWN]) <- has, unlike the model, 1 tensors: foreign
fused(TENSORS) | TENSORS <-  is in (\S+model.safetensors) and in \1
biased(True) <- unlike the model, .*\.bias
without_out_norm(TENSORS) <- lacks 1 tensors: .*out_norm\.weight
"""


@pytest.mark.parametrize("line", rows_of(WRONG.replace("\\\n", "")))
def test_wrong_files_are_named(line, tmp_path):
    tensors, message = line.split(" <- ")
    write(tmp_path, eval(tensors))
    with pytest.raises(checkpoint.CheckpointError, match=message):
        read(tmp_path)
