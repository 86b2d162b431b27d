"""examples/xlstm_7b.py, xlstm_model.py, xlstm_checkpoint.py: the logits and tokens of transformers'
xLSTM for the checkpoint in xlstm_7b/, how tokens are drawn, the command, its figures and errors."""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from unittest import mock

import benchmark_runs
import command
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xlstm_7b
import xlstm_checkpoint as checkpoint
import xlstm_model as model
from oracle import assert_close, tolerance
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


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def one_length():
    with mock.patch.object(xlstm_7b, "MULTIPLE", S):
        yield


def all_tensors():
    return {x: y for path in FOLDER.glob("*.safetensors") for x, y in load_file(path).items()}


def read(folder=FOLDER, dtype="float32", devices=1):
    """The config and the parameters of a checkpoint."""
    config, _ = checkpoint.read_config(folder)
    tensors = checkpoint.tensors_of(config, dtype, devices)
    reader = checkpoint.open_tensors(folder, tensors, config)
    return config, checkpoint.load(config, tensors, reader)


@pytest.fixture
def copied(tmp_path):
    return Path(shutil.copytree(FOLDER, tmp_path / "copy"))


# The roundings of float32 on the way to the logits, counted as in BFLOAT16, each of sums of 128
# terms.
ROUNDING = 2 * 30**0.5 * tolerance("float32", 128)
# The weights of the fixture are bfloat16, so only activations are rounded: 14 times in each of the
# two blocks (norms 2, q, k, v, o, the three products inside the mLSTM, h, gated h, up, their
# product, and both sums), 2 times before the logits. Each rounding is at most 2^-9 of a value.
# Independent ones add up as their root: 5.5 * 2^-9. Twice that leaves room for what the norms and
# gates amplify.
BFLOAT16 = 2 * (2 * 14 + 2) ** 0.5 * 2.0**-9


# ---------------- the function


@pytest.mark.parametrize(
    ("dtype", "bound", "of_largest"),
    [("float32", ROUNDING, ROUNDING), ("bfloat16", BFLOAT16, 2 * BFLOAT16)],
    ids=["float32", "bfloat16"],
)
def test_logits_are_those_of_transformers(dtype, bound, of_largest):
    """In their norm and, by the largest, one by one. Norms and biases are float32."""
    _, params = read(dtype=dtype)
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {dtype, "float32"}
    assert params["lm_head"].dtype == dtype
    assert params["out_norm"].dtype == params["blocks"][0]["gate_bias"].dtype == "float32"
    for prompt, positions, expected in zip(PROMPTS, POSITIONS, LOGITS, strict=True):
        row = np.resize(prompt, (1, S)).astype("int32")
        x, _ = model.prefill(CONFIG, params, row, np.array([len(prompt)]))
        logits = model.next_logits(CONFIG, params, x[0, positions])
        assert_close(logits, expected, bound)
        assert np.abs(logits - expected).max() < of_largest * np.abs(expected).max()


def test_the_logits_of_a_packed_row_are_those_of_transformers():
    """Of the forward pass with derivatives, whose prompts share a row with padding behind them."""
    _, params = read()
    row, ids = np.zeros((2, 1, S), "int32")
    ends = np.cumsum([0, *map(len, PROMPTS)])
    for n, (begin, end) in enumerate(itertools.pairwise(ends)):
        row[0, begin:end], ids[0, begin:end] = PROMPTS[n], n + 1
    logits = model.forward(CONFIG, params, row, ids)
    for begin, positions, expected in zip(ends, POSITIONS, LOGITS, strict=False):
        assert_close(logits[0, begin + positions], expected, ROUNDING)


# Tokens have the shares 1, 12, 1, 6.
DRAWN = {
    (1.0, 1.0): (1, 12, 1, 6),
    (0.5, 1.0): (1, 144, 1, 36),
    (1.0, 0.95): (1, 12, 0, 6),
    (1.0, 0.9): (0, 2, 0, 1),
    (1.0, 0.0): (0, 1, 0, 0),
    (1e30, 1.0): (1, 1, 1, 1),
}


@pytest.mark.parametrize("sampling", DRAWN)
def test_tokens_are_drawn_from_the_likeliest(sampling):
    """From the fewest that have the mass top_p; of equal ones, from the first. Sums that reach
    top_p exactly do so in float32 as well. The shares are right to three standard deviations."""
    logits = jnp.log(jnp.tile(jnp.array([0.05, 0.6, 0.05, 0.3]), (2500, 1)))
    drawn = model.sample(model.Sampling(*sampling), logits, jax.random.key(0), np.arange(2500))
    expected = np.array(DRAWN[sampling]) / sum(DRAWN[sampling])
    off = abs(np.bincount(drawn, minlength=4) / 2500 - expected)
    assert np.all(off <= np.where(expected % 1 > 0, 3 * 0.5 / 50, 1e-9))


def test_the_least_temperatures_take_the_likeliest_token():
    """Which float32 flushes or cannot divide by, also of logits whose difference is infinite.
    Logits that are NaN or inf, or all -inf, have none, in their row alone; one of -inf has the mass
    0."""
    largest, inf = float(jnp.finfo("float32").max), jnp.inf
    rows = [1, 5, 30, -3], [0, 1 - 2**-24, 1, 0.5], [-largest, 1, largest, 2], [-inf, 0, 1, -inf]
    logits = jnp.array([*rows, [1, jnp.nan, 2, 3], [inf, 1, 2, 3], [-inf] * 4])
    for sampling in (0.0, 1.0), (1e-40, 0.5), (1e-30, 1.0), (1e-30, 0.0):
        tokens = model.sample(model.Sampling(*sampling), logits, jax.random.key(0), np.arange(7))
        assert tokens.tolist() == [2, 2, 2, 2, *[model.NO_TOKEN] * 3], sampling


# ---------------- the command


parse = functools.partial(benchmark_runs.parse, xlstm_7b)
exit_code = functools.partial(benchmark_runs.run, xlstm_7b)
error = functools.partial(benchmark_runs.error_of, exit_code)


def run(*arguments):
    assert exit_code(*arguments) == 0


def error_of_checkpoint(folder):
    return error(f"--checkpoint={folder}", "--prompt=a")


def text(tokens):
    return "".join(map(chr, tokens))


FLOAT32 = "--dtype=float32", f"--new_tokens={1 + LOOP}", "--stream_every=5"
HERE = f"--checkpoint={FOLDER}"
ANSWER = text(GREEDY[2])
STOP = GREEDY[2][12]


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("", 24),
        ("--new_tokens=8", 8),
        (f"--stop_tokens=5,{STOP}", ANSWER.index(chr(STOP))),
        ("--stop=zz --stop=QBn", ANSWER.index("QBn")),
        ("--devices=2", 24),
        ("--draft=7", 24),
    ],
)
def test_command_streams_what_transformers_generates(flags, tokens, capsys):
    run(HERE, f"--prompt={text(PROMPTS[2])}", *FLOAT32, *flags.split())
    assert capsys.readouterr().out == ANSWER[:tokens] + "\n"


def test_accepted_drafts_do_not_change_the_likeliest_tokens(capsys):
    request = HERE, "--prompt=" + 16 * "dnxy", *FLOAT32
    run(*request)
    answer = capsys.readouterr().out
    written = io.StringIO()  # the line ends before its statistics
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        run(*request, "--draft=7")
    lines = rf"compiled in \S+ s\n{re.escape(answer)}(\S+) tokens per call of at most 8\n"
    [per_call] = re.findall(lines, written.getvalue())
    assert float(per_call) > 1.5


def test_control_c_ends_the_line_of_an_answer(capsys):
    calls = [*[mock.DEFAULT] * 4, KeyboardInterrupt]  # the first one compiles
    with mock.patch.object(xlstm_7b, "decode", wraps=model.decode, side_effect=calls):
        assert exit_code(HERE, f"--prompt={text(PROMPTS[2])}", *FLOAT32) == 130
    output, errors = capsys.readouterr()
    assert output.endswith("\n")
    assert errors.endswith("\ninterrupted\n")


@pytest.mark.parametrize("flags", [[], ["--draft=7"], [f"--prompt={text(PROMPTS[0])}"]])
def test_logits_that_are_not_finite_are_an_error(flags, copied, monkeypatch, capsys):
    """What was right before is printed; of two prompts the other's answer is complete."""
    answer, others = GREEDY[2].tolist(), {*PROMPTS[0], *GREEDY[0], *PROMPTS[2]}
    end = next(n for n in range(7, 23) if answer[n] not in others | {*answer[:n]})
    tensors = all_tensors()
    tensors["backbone.embeddings.weight"][answer[end]] = np.nan
    save_file(tensors, copied / "model.safetensors")
    arguments = [f"--checkpoint={copied}", f"--prompt={text(PROMPTS[2])}", *FLOAT32, *flags]
    assert "embeddings.weight has values that are not finite in float32" in error(*arguments)
    monkeypatch.setattr(checkpoint, "check_finite", lambda _: None)
    capsys.readouterr()
    assert exit_code(*arguments) == 1
    output, errors = capsys.readouterr()
    message = "prompts without an answer: 0; of prompt 0, not finite: embeddings"
    assert errors.splitlines()[-1] == f"xlstm_7b: {message}"
    several = "--prompt" in "".join(flags)
    assert output == (f"[1] {text(GREEDY[0])}" if several else text(answer[: end + 1])) + "\n"


def test_the_first_that_is_not_finite_is_named():
    """A weight, else the block whose output or states are, else the logits."""
    config = model.Config(vocab_size=8, hidden_size=16, num_blocks=2, num_heads=1)
    tensors = checkpoint.tensors_of(config, "float32", 1)
    params = checkpoint.load(config, tensors, checkpoint.random_tensors(0))
    first, second = params["blocks"]
    huge = second | dict(down=second["down"].at[3].set(3e38))
    bad = first | dict(up=first["up"].at[0, 0, 0].set(-jnp.inf))
    for name, blocks in (
        ("the logits", [first, second]),
        ("block 1 of 2", [first, huge]),
        ("blocks.0.up", [bad, huge]),
    ):
        with mock.patch.object(model, "MOST_STEPS", 2):
            assert model.first_not_finite(config, params | dict(blocks=blocks), [1, 2, 3]) == name


def test_answers_that_are_there_stay_until_there_is_a_model(copied, tmp_path):
    """And while another run writes to their file, which is read as it was written."""
    path, line = tmp_path / "answers.jsonl", '{"prompt": 0, "answer": "a", "tokens": [1]}\n'
    path.write_text(line)
    request = [f"--checkpoint={copied}", "--prompt=ab", "--new_tokens=2", f"--output={path}"]
    with command.open_alone("output", path):
        assert error(*request) == f"xlstm_7b: --output: another run is writing {path}"
    tensors = all_tensors()
    tensors["lm_head.weight"][5] = np.inf
    save_file(tensors, copied / "model.safetensors")
    assert "lm_head.weight has values that are not finite" in error(*request)
    assert path.read_text() == line
    run(HERE, *request[1:])
    [row] = benchmark_runs.records(path)
    assert (row["prompt"], row["answer"]) == (0, text(row["tokens"]))
    run(HERE, *request[1:-1], f"--output={os.devnull}")  # which cannot be truncated


def test_a_prompt_is_a_line_and_has_its_number(tmp_path, monkeypatch):
    """A byte order mark before the first line is no part of it."""
    path, line = tmp_path / "prompts.txt", "a\u2028b\x0cc\x85d\re"
    path.write_bytes(data := f"\ufeff{line}\r\n\nlast\n".encode())
    for source in (path, "-"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        parse("--prompt=def", "--prompt=of", f"--prompts={source}")
        assert xlstm_7b.read_prompts() == {0: "def", 1: "of", 2: line, 4: "last"}
    monkeypatch.setattr("sys.stdin", None)
    assert error(HERE, "--prompts=-") == "xlstm_7b: --prompts: cannot read -: stdin is closed"


def unloaded(prompts, stop=(), tokenizer=None, config=CONFIG):
    tensors = checkpoint.tensors_of(config, "float32", 1)
    return xlstm_7b.Model(config, tensors, {}, prompts, {*stop}, tokenizer)


# Parts of an answer as bytes, where 0 is a token to stop at; what each of them prints, up to the
# one that stops, and what the end does; the speed. The first part takes 2 s, the others 4 s.
STREAMED = """
61 6263 64|a,bc,d,|0.4 tokens/s
c3 a961 e2 82ac62|,éa,,€b,|0.5 tokens/s
61 6200 63|a,b|0.2 tokens/s
61 c300 63|a,?|0.2 tokens/s
61 e2|a,,?|0.2 tokens/s
61 00|a,|no more
00 61||no more
"""


@pytest.mark.parametrize("line", STREAMED.strip().splitlines())
def test_an_answer_is_printed_as_its_characters_come(line, monkeypatch, capsys):
    parts, printed, speed = line.split("|")
    device, seen = benchmark_runs.Device(monkeypatch, xlstm_7b), []

    def generate(*_):
        for n, part in enumerate(map(bytes.fromhex, parts.split())):
            device.now += 4.0 if n else 2.0
            yield np.array([[x] for x in part])
            assert 0 not in part
            seen.append(capsys.readouterr().out)

    parse()
    monkeypatch.setattr(xlstm_7b, "generate", generate)
    tokenizer = mock.Mock(decode=lambda tokens: bytes(tokens).decode(errors="replace"))
    xlstm_7b.stream(unloaded({0: [1]}, {0}, tokenizer))
    output, errors = capsys.readouterr()
    assert ",".join([*seen, output]).replace("\ufffd", "?") == f"{printed}\n"
    assert errors == f"first token after 2.000 s, then {speed}\n"


# ---------------- figures


# What a step reads and writes: 448,832 bytes of weights, and of each of four prompts 8 heads of
# 16/32 with 2,116 bytes of states, or 1,060 of 16 bits: twice, with rings once and a 16th.
MOVED = """
step: 584256
rings: 520776
--draft=3: 520776
tied: 584256
half: 516672
"""


@pytest.mark.parametrize("line", MOVED.strip().splitlines())
def test_bytes_and_medians_of_a_token(line):
    """Of three runs whose means are others; four prompts of 5 tokens have answers of 24."""
    case, moved = line.split(": ")
    values = dict(tied=dict(tie_word_embeddings=True), half=dict(inference_state_dtype="float16"))
    config = dataclasses.replace(CONFIG, **values.get(case, {}))
    parse("--new_tokens=24", *([case] if "--" in case else []))
    runs = iter([(2.0, 4.6), (1.0, 9.2), (9.0, 2.3)])
    stubs = dict(copy_rate=lambda: 1e6, rings_are_faster=lambda _, B: case == "rings" and B == 4)
    built = unloaded({n: [1] * 5 for n in range(4)}, config=config)
    with mock.patch.multiple(xlstm_7b, **stubs, run=lambda *_: next(runs)):
        row = xlstm_7b.benchmark(built)
    moved = int(moved)
    # Per block q, k, v, the output gate, two gates, the projection and three of the feed-forward.
    block = 64 * (64 + 64 + 128 + 128 + 4 + 4 + 128 + 3 * 96) + 2 * 64 * 32
    flops = 2 * (20 * 2 * block + 4 * 128 * 64)
    benchmark_runs.assert_row(
        row,
        **dict(first_token_ms=2e3, ms_per_token=200.0, tokens_per_s=20.0, new_tokens=24),
        **dict(gb_per_token=moved / 1e9, copy_gbps=1e-3, prefill_tflops=flops / 2 / 1e12),
        memory_limit_pct=100 * moved / 1e6 / 0.2,
    )


def test_memory_is_counted_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(checkpoint, "free_bytes", lambda mesh: 2**30)
    monkeypatch.setattr(xlstm_7b, "load", lambda *_: pytest.fail("it was made"))
    memory = "13.63 GiB per device (weights 6.59, states 4.01, prefill 3.00, sampling 0.04)"
    request = "--random", "--devices=2", "--batch=64", "--prompt_length=1024", "--benchmark"
    assert f"needs {memory}, 1.00 are free: " in error(*request)


def test_flags_of_how_tokens_are_drawn_and_what_stops():
    drawn = "--seed=7", "--temperature=0.5", "--top_p=0.75", "--stop_tokens=255,0"
    parse("--random", "--size=tiny", *drawn)
    with mock.patch.object(xlstm_7b, "load"):
        built = xlstm_7b.build()
    assert built.setup()[2:] == (model.Sampling(0.5, 0.75), jax.random.key(7))
    assert built.stop_tokens == {255, 0}
    assert built.config.inference_state_dtype == "float32"
    parse("--random", "--size=tiny", "--state_dtype=bfloat16")
    with mock.patch.object(xlstm_7b, "load"):
        assert xlstm_7b.build().config.inference_state_dtype == "bfloat16"
    assert "--stop" in error("--random", "--stop=")
    assert "--stop is for text" in error("--random", "--size=tiny", "--stop=a", "--benchmark")


# ---------------- what a checkpoint and flags may have


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return path


@pytest.mark.parametrize("bos", ["", "inserted", "added", "inserted and added"])
def test_prompts_begin_with_the_bos_of_tokenizer_or_config(bos, copied, monkeypatch):
    """They are whole and not padded, whatever the tokenizer did in a training."""
    change_config(copied, force_bos_token_insert="inserted" in bos, bos_token_id=ord("~"))
    path = str(copied / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    if "added" in bos:
        tokenizer.post_processor = TemplateProcessing(single="~ $A", special_tokens=[("~", 126)])
    tokenizer.save(path)
    monkeypatch.setattr(xlstm_7b, "load", lambda *_: {})
    parse(f"--checkpoint={copied}", "--prompt=abc", "--prompt=d")
    prompts = ["~abc", "~d"] if bos else ["abc", "d"]
    assert [*map(text, xlstm_7b.build().prompts.values())] == prompts


def test_tied_embeddings_are_the_last_layer_too(copied):
    """So that a file has no other one."""
    change_config(copied, tie_word_embeddings=True)
    message = "lm_head.weight differs from the embeddings: tie_word_embeddings must be false"
    assert error_of_checkpoint(copied) == f"xlstm_7b: --checkpoint: {message}"
    file = all_tensors()
    file["lm_head.weight"] = file["backbone.embeddings.weight"]
    save_file(file, copied / "model.safetensors")
    _, params = read(copied)
    assert {*params} == {"embeddings", "out_norm", "blocks"}


def test_files_that_count(copied):
    """model.safetensors, else those of the index, else all, in none of which a tensor is again."""
    name, right = "backbone.embeddings.weight", all_tensors()
    first, second = checkpoint.files_of(copied)
    names = "a.safetensors", "model.safetensors", "model.safetensors.index.json"
    other, single, index = (copied / x for x in names)
    save_file({"embedding.weight": -right[name]}, other)
    np.testing.assert_array_equal(read(copied)[1]["embeddings"], right[name].astype("float32"))
    save_file({x: np.full_like(y, 2, "float32") for x, y in right.items()}, single)
    assert np.all(read(copied)[1]["embeddings"] == 2)
    single.write_bytes(single.read_bytes()[:100])
    assert f"cannot read {single}" in error_of_checkpoint(copied)
    single.unlink()
    second.unlink()
    assert f"lacks files that {index.name} names: {second.name}" in error_of_checkpoint(copied)
    index.write_text('{"weight_map": {"a": 1}}')
    assert f"{index} has no weight_map" in error_of_checkpoint(copied)
    index.unlink()
    assert f"{name} is in {other} and in {first}" in error_of_checkpoint(copied)
    other.unlink()
    assert re.search(r" lacks \d+ tensors: (\S+, ){3}\S+$", error_of_checkpoint(copied))
    save_file(right, single)
    (copied / "tokenizer.json").unlink()
    assert f"no tokenizer {copied}" in error_of_checkpoint(copied)


# eos_token_id of generation_config.json, if there is one, and of config.json.
@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [("-", 3, {3}), ([5, 6], None, {5, 6}), ([], 3, set()), (None, 3, {3})],
)
def test_stop_tokens_of_the_generation_config_come_first(generation, config, expected, copied):
    if generation != "-":
        text = json.dumps(dict(eos_token_id=generation))
        (copied / "generation_config.json").write_text(f"\ufeff{text}", encoding="utf-8")
    values = dict(eos_token_id=config)
    assert checkpoint.read_stop_tokens(copied, CONFIG, values) == expected


@pytest.mark.parametrize("token", [-1, 128, 2.0, True, "3", [3, None], {}])
def test_tokens_that_are_none_are_named(token):
    with pytest.raises(checkpoint.CheckpointError, match=r"^config\.json: .* is no token"):
        checkpoint.check_ids(CONFIG, "config.json", token)


def test_no_device_has_all_of_a_weight_that_is_split():
    block = read(devices=2)[1]["blocks"][1]
    for name in {*block} - {"norm_mlstm", "norm_ffn"}:
        assert block[name].addressable_shards[0].data.nbytes == block[name].nbytes // 2


def test_prompts_fit_to_the_byte():
    """Norms, the biases of gates and m are float32."""
    big, small = checkpoint.Config(), dict(inference_state_dtype="bfloat16")
    for needed, config, *placed in (
        (283_968, CONFIG, "float32", 2),
        (14_002_060_672, big, "bfloat16", 1),
        (13_867_580_800, dataclasses.replace(big, **small), "bfloat16", 1),
    ):
        tensors, largest = checkpoint.tensors_of(config, *placed), config.vocab_size - 1
        for token, free, message in (
            (largest, needed, None),
            (largest, needed - 1, "GiB per device"),
            (largest + 1, needed, "prompt 1 has no token, or one beyond"),
        ):
            with (
                mock.patch.object(checkpoint, "free_bytes", return_value=free),
                pytest.raises(checkpoint.CheckpointError, match=message)
                if message
                else contextlib.nullcontext(),
            ):
                checkpoint.check_prompts(config, tensors, {0: [1], 1: [token, 0]})


def test_the_fullest_device_decides_what_is_free():
    """A device that does not say has room."""
    stats = dict(bytes_limit=10, bytes_in_use=3), None, dict(bytes_limit=9, bytes_in_use=5)
    devices = np.array([mock.Mock(memory_stats=lambda x=x: x) for x in stats])
    assert checkpoint.free_bytes(mock.Mock(devices=devices)) == 4
    assert checkpoint.free_bytes(mock.Mock(devices=devices[1:2])) == float("inf")
