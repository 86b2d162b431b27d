"""examples/xlstm_checkpoint.py: checkpoints as transformers and NX-AI's xlstm write them.

Files that have one model in different forms give the same weights. Each model that they may have
gives the logits in variants.npz, which were computed once in float64, step by step, at each fourth
token of PROMPT.
"""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
import xlstm_checkpoint as checkpoint
import xlstm_model as model
from oracle import (
    assert_close,
    param,
)
from safetensors import safe_open
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


def write(folder, file=TENSORS, **changed):
    (folder / "config.json").write_text(json.dumps(VALUES | changed))
    save_file(file, folder / "model.safetensors")


def contents(folder):
    """The bytes of the texts, and of each file of weights its tensors and metadata."""
    files = {}
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            files[path.name] = path.read_bytes()
            continue
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            arrays = {name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors.items()}
            files[path.name] = arrays, file.metadata()
    return files


# The model's tensors as the file has them, and what config.json has unlike the fixture's.
SAME = {
    "fused": (fused(TENSORS), dict(weight_mode="fused")),
    "older": (renamed(TENSORS, *OLDER), dict(num_blocks=None, embedding_dim=None, v_dim_factor=2)),
    "first": (TENSORS, dict(num_hidden_layers=None, hidden_size=None, add_out_norm=False)),
    "kernels": (
        TENSORS,
        dict(
            chunkwise_kernel="parallel--native_stablef_custbw",
            sequence_kernel="native_sequence__triton",
            step_kernel="triton",
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("tensors", "changed"), SAME.values(), ids=SAME)
def test_files_that_have_the_same_model(tensors, changed, tmp_path):
    """What was read is written as it was."""
    (source := tmp_path / "source").mkdir()
    write(source, tensors, **changed)
    (config, params), (expected_config, expected) = read(source), read(FOLDER)
    assert config == dataclasses.replace(expected_config, add_out_norm=config.add_out_norm)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    checkpoint.write(source, tmp_path / "written", params)
    assert contents(tmp_path / "written") == contents(source)


def check(folder, name):
    """Of a prefill of all tokens but the last one, which a step reads.

    A step reads c and n of both blocks; in float16 they are rounded by at most 2^-11, of which
    twice the root sum of squares leaves room for what norms and gates amplify.
    """
    config, params = read(folder)
    dtype, [*before, last] = config.inference_state_dtype, LOGITS[name]
    x, states = model.prefill(config, params, PROMPT[None], np.array([len(PROMPT) - 1]))
    assert_close(model.next_logits(config, params, x[0, :-1][EVERY]), np.array(before), ROUNDING)
    logits, after = jax.jit(model.step, static_argnums=0)(config, params, states, PROMPT[-1:])
    for state in (*states, *after):
        assert [x.dtype for x in state] == [dtype, dtype, "float32"]
    rounding = 2 * (2 * 2) ** 0.5 * 2.0**-11 if dtype == "float16" else 0.0
    assert_close(logits[0], last, ROUNDING + rounding)


OF_TRANSFORMERS = [
    param("capless", TENSORS, id="capless", gate_soft_cap=None, output_logit_soft_cap=None),
    param(
        "biased_sigmoid",
        fused(biased(False)),
        id="biased_sigmoid",
        use_bias=True,
        input_gate="sigmoid",
    ),
    param(
        "sigmoid_float16",
        without_out_norm(TENSORS),
        id="sigmoid_float16",
        chunkwise_kernel=SIGING,
        add_out_norm=False,
        inference_state_dtype="float16",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensors", "changed"), OF_TRANSFORMERS)
def test_checkpoints_of_transformers(name, tensors, changed, tmp_path):
    write(tmp_path, tensors, **changed)
    check(tmp_path, name)


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
OF_XLSTM = [
    param(
        "sigmoid",
        fused(TENSORS),
        id="sigmoid",
        use_bias="false",
        add_out_norm="true",
        cap="15",
        kernel=SIGING,
    ),
    param(
        "biased",
        biased(True),
        id="biased",
        use_bias="true",
        add_out_norm="true",
        cap="null",
        kernel="chunkwise--native_custbw",
    ),
    param(
        "biased_sigmoid_no_out_norm",
        fused(without_out_norm(biased(True))),
        id="biased_sigmoid_no_out_norm",
        use_bias="true",
        add_out_norm="false",
        cap="",
        kernel=SIGING,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensors", "values"), OF_XLSTM)
def test_checkpoints_of_xlstm(name, tensors, values, tmp_path):
    (tmp_path / "config.yaml").write_text(YAML.format(**values))
    file = renamed(tensors, TO_XLSTM)
    names = [*file]  # in parts, as it writes large ones
    for n in range(2):
        save_file({name: file[name] for name in names[n::2]}, tmp_path / f"model_{n}.safetensors")
    check(tmp_path, name)


DOWN, LAST = "backbone.blocks.1.ffn.proj_down.weight", "lm_head.weight"
EMBEDDINGS = "backbone.embeddings.weight"
PART = "backbone.blocks.1.mlstm_layer.qkv_opreact.weight"
# The tensors of a file, and what is said of them.
WRONG = [
    (
        fused(TENSORS) | {PART: fused(TENSORS)[PART][1:]},
        r"mlstm_layer.qkv_opreact.weight is F32 \[383, 64\], and config.json makes it \[384, 64\]",
    ),
    (renamed(fused(TENSORS), (PART, "other")), r"lacks 4 .*k\.weight,"),
    (
        TENSORS | {DOWN: TENSORS[DOWN].T.copy()},
        r"proj_down.weight is F32 \[96, 64\], .* \[64, 96\]",
    ),
    (TENSORS | {DOWN: TENSORS[DOWN].astype("int8")}, r"down.weight is I8, expected one of F32, BF"),
    (TENSORS | {LAST: TENSORS[LAST].astype("float64")}, r"lm_head\.weight is F64, expected one of"),
    (TENSORS | dict(foreign=TENSORS[DOWN]), r"has, unlike the model, 1 tensors: foreign"),
    (fused(TENSORS) | TENSORS, r" is in (\S+model.safetensors) and in \1"),
    (biased(True), r"unlike the model, .*\.bias"),
    (without_out_norm(TENSORS), r"lacks 1 tensors: .*out_norm\.weight"),
    (
        TENSORS | {EMBEDDINGS: np.where(np.arange(64) == 63, -np.inf, TENSORS[EMBEDDINGS])},
        f"^{EMBEDDINGS} has values that are not finite in float32$",
    ),
]


@pytest.mark.parametrize(("tensors", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_files_are_named(tensors, message, tmp_path):
    write(tmp_path, tensors, tie_word_embeddings="lm_head" in message)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        read(tmp_path)


# ---------------- back to a checkpoint


FORMS = {
    "biased": (fused(biased(False)), dict(use_bias=True, weight_mode="fused")),
    "no_out_norm": (without_out_norm(TENSORS), dict(add_out_norm=False)),
    "tied": (TENSORS | {LAST: TENSORS[EMBEDDINGS]}, dict(tie_word_embeddings=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fixture", *FORMS])
def test_what_was_read_is_written_with_the_same_bits(form, tmp_path):
    source = FOLDER
    if form != "fixture":
        (source := tmp_path / "source").mkdir()
        tensors, changed = FORMS[form]
        write(source, tensors, **changed)
    checkpoint.write(source, tmp_path / "written", read(source)[1])
    expected = {x: y for x, y in contents(source).items() if not x.endswith((".npz", ".py"))}
    assert contents(tmp_path / "written") == expected
    assert {x.name for x in tmp_path.iterdir()} <= {"source", "written"}


def test_only_a_checkpoint_that_is_complete_appears(tmp_path):
    _, params = read(FOLDER)
    folder = tmp_path / "written"
    broken = dict(params, lm_head=params["lm_head"].at[3, 4].set(3.4e38))
    message = r"^lm_head.weight has values .* bfloat16"  # which the largest float32 overflows
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.write(FOLDER, folder, broken)
    assert not [*tmp_path.iterdir()]
    folder.mkdir()
    with pytest.raises(checkpoint.CheckpointError, match="written is there already"):
        checkpoint.write(FOLDER, folder, params)


# ---------------- fields and forms of the configuration


BASE = "embedding_dim: 9600\nnum_heads: 4\nnum_blocks: 2\nvocab_size: 97\n"


@pytest.mark.parametrize(
    ("lines", "name", "value"),
    [
        ("gate_soft_cap: +.5e1", "gate_soft_cap", 5.0),
        ("gate_soft_cap:", "gate_soft_cap", None),
        ("eps: 1E-6", "eps", 1e-6),
        ("add_out_norm: no", "add_out_norm", False),
        # xlstm's factor is 2.6667 and transformers' 2.667.
        ("mode: train\nffn_round_up_to_multiple_of: 1", "ffn_dim", 25600),
        ("weight_mode: single\npad_token_id: 1\nbos_token_id: 0\neos_token_id: 2", "num_heads", 4),
    ],
)
def test_config_yaml_in_any_form(lines, name, value, tmp_path):
    (tmp_path / "config.yaml").write_text(BASE + lines)
    assert getattr(checkpoint.read_config(tmp_path)[0], name) == value


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("gate_softcap: 5.0", "there is no field gate_softcap; is it gate_soft_cap?"),
        ("gate_soft_cap : 5.0\nother: 1", "there is no field other"),
        ("gate_soft_cap: .inf", "gate_soft_cap is inf and must be a number"),
        ("vocab_size: 98", "vocab_size is there twice"),
        *((x, "cannot read") for x in ("a: [", "a: !!python/name:os.system")),
    ],
)
def test_config_yaml_that_is_wrong(lines, message, tmp_path):
    (tmp_path / "config.yaml").write_text(BASE + lines)
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(message)) as caught:
        checkpoint.read_config(tmp_path)
    assert str(tmp_path / "config.yaml") in str(caught.value)


# Beyond 1e-30 and 1e30 float32 has no reciprocal, and no array has so many elements.
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("model_type", "llama"),
            ("use_bias", 1),
            ("add_qk_norm", True),
            ("input_gate", "softplus"),
        ),
        *(("chunkwise_kernel", "chunkwise--triton_xl_chunk_relug"), ("force_bos_token_insert", 1)),
        *(("num_heads", 3), ("num_blocks", 10001), ("vocab_size", 2**31), ("hidden_size", True)),
        *(("embedding_dim", 128), ("norm_eps", None), ("eps", 1e-310), ("gate_soft_cap", np.nan)),
        *(("output_logit_soft_cap", 1e40), ("v_dim_factor", 1e-9), ("ffn_proj_factor", 1e9)),
    ],
)
def test_wrong_values_of_the_config_are_named(name, value, tmp_path):
    # num_hidden_layers would stand in for num_blocks, and embedding_dim for hidden_size.
    others = {} if name == "embedding_dim" else dict(embedding_dim=None, num_hidden_layers=None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(VALUES | others | {name: value}))
    message = re.escape(f"{path}: {name} is {value!r} and must be ")
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.read_config(tmp_path)


# What transformers and users write into config.json, and fields that only NX-AI/xLSTM-7b has.
BOOKKEEPING = """
_name_or_path architectures attn_implementation auto_map bad_words_ids chunk_size_feed_forward
cross_attention_hidden_size decoder_start_token_id do_sample dtype forced_bos_token_id
forced_eos_token_id id2label initializer_range is_decoder label2id layer_types max_length
no_repeat_ngram_size num_beams num_labels output_hidden_states problem_type quantization_config
return_dict sep_token_id task_specific_params temperature tokenizer_class top_p torch_dtype
transformers_version typical_p unsloth_version use_bfloat16
add_embedding_dropout add_forward_backend_padding add_post_blocks_norm add_post_norm cell_norm_eps
head_dim igate_bias_init_range mlstm_round_up_to_multiple_of name_or_path
"""


def test_config_json_may_have_fields_that_are_not_the_models(tmp_path):
    """Whatever these have: only a kernel names the sigmoid input gate."""
    values = dict.fromkeys(BOOKKEEPING.split(), "siging")
    (tmp_path / "config.json").write_text(json.dumps(VALUES | values))
    assert checkpoint.read_config(tmp_path)[0] == checkpoint.read_config(FOLDER)[0]


def test_a_misspelt_field_of_config_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(VALUES | dict(Hidden_Size=5)))
    message = "config.json: there is no field Hidden_Size; is it hidden_size?"
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(message)):
        checkpoint.read_config(tmp_path)
