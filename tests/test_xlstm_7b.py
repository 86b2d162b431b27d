"""examples/xlstm_7b.py, xlstm_model.py, xlstm_checkpoint.py: what transformers' xLSTM computes from
the checkpoint in xlstm_7b/, prompts alone, packed and in parts, the command, its errors."""

import contextlib
import dataclasses
import functools
import io
import json
import re
import shutil
from pathlib import Path
from unittest import mock

import benchmark_runs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, head_norms, tolerance

from mlstm_pallas import pack_lengths

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
pytest.importorskip("tqdm")
import xlstm_7b
import xlstm_checkpoint as checkpoint
import xlstm_model as model
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

FOLDER = Path(__file__).parent / "xlstm_7b"
EXPECTED = np.load(FOLDER / "expected.npz")
PROMPTS, GREEDY, POSITIONS, LOGITS = (
    [EXPECTED[f"{name}_{n}"] for n in range(4)]
    for name in ("prompt", "greedy", "positions", "logits")
)
CONFIG, _ = checkpoint.read_config(FOLDER)
# Tests share these, and so what is compiled: steps of a prefill, tokens of a loop.
S, LOOP = 256, 23


@pytest.fixture(scope="module", autouse=True)
def one_length():
    with mock.patch.object(xlstm_7b, "MULTIPLE", S):
        yield


def all_tensors():
    return {x: y for path in FOLDER.glob("*.safetensors") for x, y in load_file(path).items()}


def loaded(dtype="float32", devices=1):
    tensors = checkpoint.tensors_of(CONFIG, dtype, devices)
    return checkpoint.load(CONFIG, tensors, checkpoint.open_tensors(FOLDER, tensors, CONFIG))


@pytest.fixture(scope="module")
def params():
    return loaded()


@pytest.fixture
def copied(tmp_path):
    return Path(shutil.copytree(FOLDER, tmp_path / "copy"))


step = functools.partial(jax.jit(model.step, static_argnums=0), CONFIG)


def prefill(params, *prompts):
    """Logits (S, V) of a row of prompts, their states, the ends of the prompts."""
    segment_ids, (ends,) = pack_lengths([*map(len, prompts)], S=S)
    row = np.resize(np.concatenate(prompts), (1, S)).astype("int32")
    x, states = model.prefill(CONFIG, params, row, segment_ids, ends)
    return np.asarray(model.next_logits(CONFIG, params, x[0])), states, ends


# The roundings of float32 on the way to the logits, counted as in test_logits_in_bfloat16, each of
# sums of 128 terms.
ROUNDING = 2 * 30**0.5 * tolerance("float32", 128)


def assert_states(states, expected):
    """(c, n, m) per head: m is of the size of the gates, which are up to their cap, and its
    roundings are relative ones of c and n."""
    bound = CONFIG.gate_soft_cap * ROUNDING
    for x, y in zip(*map(jax.tree.leaves, (states, expected)), strict=True):
        size = head_norms(y) if y.ndim > 2 else 1.0
        assert np.all(head_norms(np.subtract(x, y)) <= bound * size)


# ---------------- the function


def check_logits(params, bound, of_largest):
    """Logits are those of transformers, in their norm and, by the largest, one by one."""
    for prompt, positions, expected in zip(PROMPTS, POSITIONS, LOGITS, strict=True):
        logits = prefill(params, prompt)[0][positions]
        assert_close(logits, expected, bound)
        assert np.abs(logits - expected).max() < of_largest * np.abs(expected).max()


def test_logits_are_those_of_transformers(params):
    check_logits(params, ROUNDING, ROUNDING)


def test_logits_in_bfloat16():
    """The weights of the fixture are bfloat16, so only activations are rounded: 14 times in each of
    the two blocks (norms 2, q, k, v, o, the three products inside the mLSTM, h, gated h, up, their
    product, and both sums), 2 times before the logits.

    Each rounding is at most 2^-9 of a value. Independent ones add up as their root: 5.5 * 2^-9.
    Twice that leaves room for what the norms and gates amplify.
    """
    bound = 2 * (2 * 14 + 2) ** 0.5 * 2.0**-9
    params = loaded("bfloat16")
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"bfloat16", "float32"}
    assert params["lm_head"].dtype == "bfloat16"  # norms and biases stay float32
    assert params["out_norm"].dtype == params["blocks"][0]["gate_bias"].dtype == "float32"
    check_logits(params, bound, 2 * bound)


def test_packed_prompts_are_as_each_alone_and_as_transformers(params):
    logits, states, ends = prefill(params, *PROMPTS)
    for n, prompt in enumerate(PROMPTS):
        alone, of_one, _ = prefill(params, prompt)
        begin = ends[n] - len(prompt)
        assert_close(logits[begin : ends[n]], alone[: len(prompt)], ROUNDING)
        assert_states(jax.tree.map(lambda x, n=n: x[n : n + 1], states), of_one)
    first = jnp.argmax(logits[ends - 1], -1)
    loop = CONFIG, model.Sampling(), LOOP, params, states, first, jax.random.key(0)
    _, last, tokens = model.decode(*loop, np.int32(1))
    np.testing.assert_array_equal(np.vstack([first, tokens]).T, GREEDY)
    np.testing.assert_array_equal(last, tokens[-1])


def test_prefix_then_steps_is_the_prefill_of_all(params):
    prompt, steps = PROMPTS[3], 70
    expected, states_of_all, (end,) = prefill(params, prompt)
    _, states, _ = prefill(params, prompt[:-steps])
    for t in range(end - steps, end):
        logits, states = step(params, states, prompt[t : t + 1])
        assert_close(logits[0], expected[t], ROUNDING)
    assert_states(states, states_of_all)


def test_heads_on_several_devices(params):
    """The function is the same, and no device has all of a weight that is split."""
    tensors, sharded = checkpoint.tensors_of(CONFIG, "float32", 2), loaded(devices=2)
    block = sharded["blocks"][1]
    on_one = jax.tree.map(lambda x: x.addressable_shards[0].data.nbytes, sharded)
    assert sum(jax.tree.leaves(on_one)) == checkpoint.bytes_per_device(tensors)
    for name in {*block} - {"norm_mlstm", "norm_ffn"}:
        assert on_one["blocks"][1][name] == block[name].nbytes // 2
    assert block["qkvo"].sharding.spec[0] == block["down"].sharding.spec[1] == "heads"
    logits, states, (end,) = prefill(sharded, PROMPTS[1])
    expected, of_one, _ = prefill(params, PROMPTS[1])
    assert_close(logits[:end], expected[:end], ROUNDING)
    token = PROMPTS[1][:1]
    logits, of_step = step(sharded, states, token)
    assert_close(logits, step(params, of_one, token)[0], ROUNDING)
    for (c, *_), *_ in (states, of_step):
        assert c.addressable_shards[0].data.shape[1] == CONFIG.num_heads // 2


@pytest.mark.parametrize("T", [2, 8])
def test_drafts_do_not_change_the_likeliest_tokens(params, T):
    """Steps with rings, from a batch of prompts, in which drafts are found or not."""
    _, states, _ = prefill(params, *PROMPTS)
    rings, size = model.with_rings("float32", states), S + 2 * LOOP * T
    text = np.zeros((4, size), np.int32)
    for row, prompt, answer in zip(text, PROMPTS, GREEDY, strict=True):
        row[: len(prompt) + 1] = [*prompt, answer[0]]
    length = np.array([len(prompt) + 1 for prompt in PROMPTS], np.int32)
    loop = CONFIG, LOOP, T, params, rings, text, length, np.zeros(4, np.int32)
    _, text, after, _ = model.speculate(*loop)
    assert np.all(after >= length + LOOP)
    for row, prompt, answer in zip(np.asarray(text), PROMPTS, GREEDY, strict=True):
        np.testing.assert_array_equal(row[len(prompt) :][: len(answer)], answer)


def test_a_draft_is_what_followed_the_last_two_tokens():
    text = jnp.array([5, 1, 2, 3, 4, 1, 2, 7, 8, 1, 2, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(model.look_up(text, 11, 3), [7, 8, 1])
    np.testing.assert_array_equal(model.look_up(text, 7, 2), [3, 4])


# ---------------- sampling


def test_top_p_draws_from_the_fewest_likeliest_tokens_of_that_mass():
    """Of equal ones, from the first. Sums that reach top_p exactly do so in float32 as well."""
    probabilities, draws = np.array([0.05, 0.6, 0.05, 0.3], np.float32), 2500
    logits, each = jnp.log(jnp.tile(probabilities, (draws, 1))), np.arange(draws)
    most = 3 * 0.5 / draws**0.5  # three standard deviations of the share of a token
    for temperature, top_p, expected in (
        (1.0, 1.0, probabilities),
        (0.5, 1.0, probabilities**2),
        (1.0, 0.95, [1, 12, 0, 6]),
        (1.0, 0.9, [0, 2, 0, 1]),
        (1.0, 0.7, [0, 2, 0, 1]),
        (1.0, 0.6, [0, 1, 0, 0]),
        (1.0, 0.0, [0, 1, 0, 0]),
        (1e-3, 1.0, [0, 1, 0, 0]),
        (0.0, 1.0, [0, 1, 0, 0]),
    ):
        drawn = model.sample(model.Sampling(temperature, top_p), logits, jax.random.key(0), each)
        shares, expected = np.bincount(drawn, minlength=4) / draws, expected / np.sum(expected)
        atol = np.where((expected > 0) & (expected < 1), most, 0.0)
        np.testing.assert_array_less(abs(shares - expected), atol + 1e-9)


# ---------------- the command


def parse(*arguments):
    xlstm_7b.FLAGS.unparse_flags()
    for flag in xlstm_7b.FLAGS:
        xlstm_7b.FLAGS[flag].unparse()
    xlstm_7b.FLAGS(["xlstm_7b.py", *arguments])


def exit_code(*arguments):
    parse()
    return xlstm_7b.main(["xlstm_7b.py", *arguments])


def run(*arguments):
    assert exit_code(*arguments) == 0


error = functools.partial(benchmark_runs.error_of, exit_code)


def error_of_checkpoint(folder):
    return error(f"--checkpoint={folder}", "--prompt=a")


def text(tokens):
    return "".join(map(chr, tokens))


FLOAT32 = "--dtype=float32", f"--new_tokens={1 + LOOP}"


def test_command_streams_what_transformers_generates(capsys):
    """Up to a stop token."""
    prompt, expected = (text(tokens[2]) for tokens in (PROMPTS, GREEDY))
    stop = expected[12]
    request = f"--checkpoint={FOLDER}", f"--prompt={prompt}", *FLOAT32, "--stream_every=5"
    run(*request, "--stop_tokens=5", "--new_tokens=8")
    assert capsys.readouterr().out == expected[:8] + "\n"
    run(*request, f"--stop_tokens=5,{ord(stop)}")
    assert capsys.readouterr().out == expected.split(stop)[0] + "\n"


def test_a_prompt_is_a_line_and_has_its_number(tmp_path, monkeypatch):
    path, line = tmp_path / "prompts.txt", "a\u2028b\x0cc\x85d\re"
    path.write_bytes(data := f"{line}\r\n\nlast\n".encode())
    for source in (path, "-"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        parse("--prompt=def", "--prompt=of", f"--prompts={source}")
        assert xlstm_7b.read_prompts() == {0: "def", 1: "of", 2: line, 4: "last"}


def test_figures_of_the_benchmark(capsys, monkeypatch):
    """Of the runs after the first, the medians are 2 s to the first token and 4.6 s after it."""
    runs = iter([(9.0, 9.0), (2.0, 23.0), (1.0, 4.6), (3.0, 2.3)])
    monkeypatch.setitem(xlstm_7b.SIZES, "tiny", CONFIG)
    monkeypatch.setattr(xlstm_7b, "load", lambda *_: {})
    monkeypatch.setattr(xlstm_7b, "run", lambda model, new_tokens: next(runs))
    monkeypatch.setattr(xlstm_7b, "copy_rate", lambda: 1e8)
    run("--random", "--benchmark", "--size=tiny", "--batch=4", "--prompt_length=20", *FLOAT32)
    D, K, V, F, NH = 64, 64, 128, 96, 4
    matrices = D * (2 * K + 3 * V + 2 * NH + 3 * F)
    states = 2 * NH * (K // NH * (V // NH + 1) + 1)
    moved = 4 * (2 * (matrices + 2 * D + 2 * NH + V) + D * 128 + D + 2 * 4 * states)
    benchmark_runs.assert_row(
        json.loads(capsys.readouterr().out),
        **dict(batch=4, prompt_tokens=80, new_tokens=1 + LOOP, first_token_ms=2e3),
        prefill_tflops=(160 * (2 * matrices + 4 * K * V // NH) + 8 * D * 128) / 2e12,
        **dict(ms_per_token=200.0, tokens_per_s=20.0, gb_per_token=moved / 1e9),
        **dict(copy_gbps=0.1, memory_limit_pct=100 * moved / 1e8 / 0.2),
    )


def test_clocks_are_read_when_tokens_and_copies_are_there(monkeypatch, capsys):
    device = benchmark_runs.Device(monkeypatch, xlstm_7b)

    class Tokens:
        def __init__(self, *shape):
            self.shape = shape

        def __getitem__(self, steps):
            return Tokens(len(range(self.shape[0])[steps]), *self.shape[1:])

        def __array__(self, *_, **__):
            return device.wait(np.empty(self.shape))

    started = dict(
        first_tokens=lambda *_: device.call(2.0, (None, Tokens(2))),
        decode=lambda *_: device.call(4.0, (None, Tokens(2), Tokens(16, 2))),
    )
    monkeypatch.setattr(jax, "jit", lambda f: lambda x: device.call(0.5, array))
    array = mock.Mock(block_until_ready=device.wait)

    def repeat(copies, number):
        before = device.now
        copies()
        return [99.0, device.now - before]

    monkeypatch.setattr(xlstm_7b, "timeit", mock.Mock(repeat=repeat))
    assert xlstm_7b.copy_rate() == 2 * 4 * 2**22 / 0.5
    parse("--stream_every=16", "--new_tokens=20")
    of_two = xlstm_7b.Model(CONFIG, {}, {}, {0: [1, 2], 1: [3]}, set(), None)
    with mock.patch.multiple(xlstm_7b, **started):
        assert xlstm_7b.run(of_two, 20) == (2.0, 8.0)
        shapes = [tokens.shape for tokens in xlstm_7b.generate(of_two, 20)]
        xlstm_7b.stream(of_two)
    assert shapes == [(1, 2), (16, 2), (3, 2)]
    assert capsys.readouterr().err == "first token after 2.000 s, then 2.4 tokens/s\n"


@pytest.mark.parametrize("bos", [None, "inserted", "added", "both"])
def test_prompts_begin_with_the_bos_of_tokenizer_or_config(bos, copied, monkeypatch):
    """They are whole and not padded, whatever the tokenizer did in a training."""
    if bos in ("inserted", "both"):
        change_config(copied, force_bos_token_insert=True, bos_token_id=ord("~"))
    path = str(copied / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    if bos in ("added", "both"):
        tokenizer.post_processor = TemplateProcessing(single="~ $A", special_tokens=[("~", 126)])
    tokenizer.save(path)
    monkeypatch.setattr(xlstm_7b, "load", lambda *_: {})
    parse(f"--checkpoint={copied}", "--prompt=abc", "--prompt=d")
    prompts = ["abc", "d"] if bos is None else ["~abc", "~d"]
    assert [*map(text, xlstm_7b.build().prompts.values())] == prompts


# ---------------- what a device holds


def test_bytes_of_weights_and_states():
    """Norms and the biases of gates are float32."""
    D, K, V, F, NH = 4096, 2048, 4096, 10944, 8
    block = 2 * D * (2 * K + 3 * V + 2 * NH + 3 * F) + 4 * (2 * D + 2 * NH + V)
    tensors = checkpoint.tensors_of(model.Config(), "bfloat16", 1)
    assert checkpoint.bytes_per_device(tensors) == 32 * block + 2 * 2 * 50304 * D + 4 * D
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        config = model.Config(inference_state_dtype=dtype)
        expected = 32 * 4 * ((256 * 512 + 256) * itemsize + 4)
        assert checkpoint.state_bytes(config, 2) == expected


def test_the_fullest_device_decides_what_is_free():
    stats = dict(bytes_limit=10, bytes_in_use=3), None, dict(bytes_limit=9, bytes_in_use=5)
    devices = [mock.Mock(memory_stats=lambda x=x: x) for x in stats]
    free = [checkpoint.free_bytes(mock.Mock(devices=np.array(x))) for x in (devices, devices[1:2])]
    assert free == [4, float("inf")]


@pytest.mark.parametrize(
    ("config", "dtype", "itemsize", "devices", "widest"),
    [
        (CONFIG, "float32", 4, 2, 4 * (64 + 128) // 2),
        (model.Config(), "bfloat16", 2, 1, 3 * 10944),
    ],
    ids=["tiny", "7b"],
)
def test_prompts_fit_to_the_byte(config, dtype, itemsize, devices, widest, monkeypatch):
    tensors, largest = checkpoint.tensors_of(config, dtype, devices), config.vocab_size - 1
    needed = checkpoint.bytes_per_device(tensors) + 2 * checkpoint.state_bytes(config, devices)
    needed += 3 * (2 * config.hidden_size + widest) * itemsize + 2 * 12 * config.vocab_size
    for free, prompt, message in (
        (needed, [largest, 0], None),
        (needed - 1, [largest, 0], "per device"),
        (needed, [0, largest + 1], "prompt 1 has no token, or one beyond vocab_size"),
    ):
        monkeypatch.setattr(checkpoint, "free_bytes", lambda mesh, free=free: free)
        raises = pytest.raises(checkpoint.CheckpointError, match=message)
        with raises if message else contextlib.nullcontext():
            checkpoint.check_prompts(config, tensors, {0: [1], 1: prompt})


def test_random_weights_differ_and_have_the_usual_scale():
    x, vector = jax.ShapeDtypeStruct((64, 256), "float32"), jax.ShapeDtypeStruct((5,), "float32")
    read, again, other = (checkpoint.random_tensors(seed) for seed in (3, 3, 4))
    first, second = read("", x), read("", x)
    np.testing.assert_array_equal(read("", vector), np.ones(5))
    np.testing.assert_array_equal(first, again("", x))
    assert not any(jnp.array_equal(first, y) for y in (second, other("", x).T))
    # The mean square of n values has a standard deviation of (2 / n)^0.5.
    assert jnp.mean(first * first) * 256 == pytest.approx(1, abs=5 * (2 / x.size) ** 0.5)


def test_tied_embeddings_are_the_last_layer_too(copied):
    """So that a file has no other one."""
    change_config(copied, tie_word_embeddings=True)
    message = "lm_head.weight differs from the embeddings: tie_word_embeddings must be false"
    assert error_of_checkpoint(copied) == f"xlstm_7b: --checkpoint: {message}"
    tied, _ = checkpoint.read_config(copied)
    tensors, file = checkpoint.tensors_of(tied, "float32", 1), all_tensors()
    file["lm_head.weight"] = file["backbone.embeddings.weight"]
    save_file(file, copied / "model.safetensors")
    params = checkpoint.load(tied, tensors, checkpoint.open_tensors(copied, tensors, tied))
    assert {*checkpoint.tensors_of(CONFIG, "float32", 1)} - {*tensors} == {"lm_head.weight"}
    assert {*params} == {"embeddings", "out_norm", "blocks"}


def test_devices_divide_the_model():
    sizes = dict(ffn_proj_factor=65 / 64, ffn_round_up_to_multiple_of=1), dict(vocab_size=127)
    for size, message in zip(sizes, ("ffn_dim, 65", "vocab_size, 127"), strict=True):
        with pytest.raises(checkpoint.CheckpointError, match=f"do not divide {message}"):
            checkpoint.mesh_of(dataclasses.replace(CONFIG, **size), 2)


def test_stop_tokens():
    ids = map(checkpoint.stop_ids, (None, 0, [], ["3", 4]))
    assert [*ids] == [set(), {0}, set(), {3, 4}]


# ---------------- errors


INDEX = "model.safetensors.index.json"


def test_files_that_count(copied):
    """model.safetensors, else those of the index, else all, in none of which a tensor is again."""
    name, right = "backbone.embeddings.weight", all_tensors()
    tensors = checkpoint.tensors_of(CONFIG, "float32", 1)
    first, second = checkpoint.files_of(copied)

    def assert_reads(expected):
        x = checkpoint.open_tensors(copied, tensors, CONFIG)(name, None)
        np.testing.assert_array_equal(x, expected)

    other, single, index = (copied / x for x in ("a.safetensors", "model.safetensors", INDEX))
    save_file({"embedding.weight": -right[name]}, other)
    assert_reads(right[name])
    save_file({x: np.full_like(y, 2, "float16") for x, y in right.items()}, single)
    assert_reads(2)
    single.write_bytes(single.read_bytes()[:100])
    assert f"cannot read {single}" in error_of_checkpoint(copied)
    single.unlink()
    first.rename(first.with_suffix(".1"))
    second.unlink()
    message = f"{copied} lacks files that {INDEX} names: {first.name}, {second.name}"
    assert error_of_checkpoint(copied) == f"xlstm_7b: --checkpoint: {message}"
    for wrong in ("{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'):
        index.write_text(wrong)
        assert f"{index} has no weight_map" in error_of_checkpoint(copied)
    index.unlink()
    assert re.search(r" lacks \d+ tensors: (\S+, ){3}\S+$", error_of_checkpoint(copied))
    first.with_suffix(".1").rename(first)
    assert f"{name} is in {other} and in {first}" in error_of_checkpoint(copied)


WRONG_VALUES = """
"model_type": "llama"
"use_bias": 1
"add_out_norm": null
"add_qk_norm": true
"weight_mode": "shared"
"num_heads": 3
"num_heads": 0
"num_heads": 4.0
"num_heads": true
"v_dim_factor": -1.0
"gate_soft_cap": Infinity
"hidden_size": "64"
"norm_eps": null
"inference_state_dtype": "int8"
"embedding_dim": 128
"tie_word_embeddings": 1
"input_gate": "softplus"
"chunkwise_kernel": "chunkwise--triton_xl_chunk_relug"
"step_kernel": 1
"""


def change_config(folder, without=(), **values):
    path = folder / "config.json"
    before = {name: x for name, x in json.loads(path.read_text()).items() if name not in without}
    path.write_text(json.dumps(before | values))
    return path


@pytest.mark.parametrize("line", WRONG_VALUES.strip().splitlines())
def test_wrong_values_of_the_config_are_named(copied, line):
    values = json.loads(f"{{{line}}}")
    path, [(name, value)] = change_config(copied, **values), values.items()
    assert f"{path}: {name} is {value!r} and must be " in error_of_checkpoint(copied)


def test_memory_is_counted_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(checkpoint, "free_bytes", lambda mesh: 2**30)
    monkeypatch.setattr(xlstm_7b, "load", lambda *_: pytest.fail("it was made"))
    sizes = "--random", "--devices=2", "--batch=64", "--prompt_length=1024"
    for flags, needed, summands in (
        (["--benchmark"], 13.63, "states 4.01, prefill 3.00, sampling 0.04"),
        # 16 prompts of a prefill have their states twice. A prefill has 4096 steps at most.
        ([], 11.83, "states 5.01, prefill 0.19, sampling 0.04"),
        (["--slots=8"], 8.29, "states 1.50, prefill 0.19, sampling 0.01"),
    ):
        memory = f"{needed} GiB per device (weights 6.59, {summands})"
        assert f"needs {memory}, 1.00 are free: " in error(*sizes, *flags)


HERE = f"--checkpoint={FOLDER}"
# arguments: what the message has.
REQUESTS = f"""
: either --checkpoint
--random {HERE}: either --checkpoint
{HERE}: no prompt
{HERE} --prompt=: prompt 0 has no token
{HERE} hello: unexpected argument hello
{HERE} --prompt=a --stop_tokens=end: --stop_tokens: stop tokens are ids
{HERE} --prompt=a --devices=3: --devices=3 do not divide num_heads
{HERE} --prompt=a --devices=8: --devices=8 do not divide num_heads
{HERE} --prompt=a --devices=99: --devices=99, and there are
{HERE} --prompts=/no/such/file: --prompts: cannot read
{HERE} --prompts={FOLDER}/expected.npz: cannot read
{HERE} --prompts=/dev/null: no prompt: give --prompt, or --prompts=FILE
{HERE} --prompt=a --prompt=: prompt 1 has no token
{HERE} --prompt=a --output=/no/such/folder/file: --output: [Errno 2]
{HERE} --prompt=a --slots=0: --slots=0
{HERE} --prompt=a --slots=two: slots
{HERE} --prompt=a --batching=some: batching
{HERE} --prompt=a --temperature=-1: --temperature=-1
{HERE} --prompt=a --size=3b: --size=3b
--checkpoint=/no/such/folder --prompt=a: --checkpoint: cannot read /no/such/folder/config.json
"""


@pytest.mark.parametrize("line", REQUESTS.strip("\n").splitlines())
def test_requests_that_make_no_sense(line):
    arguments, message = line.split(": ", 1)
    assert message in error(*arguments.split())


def test_a_folder_without_a_tokenizer(copied):
    (copied / "tokenizer.json").unlink()
    assert f"no tokenizer {copied}" in error_of_checkpoint(copied)
