"""examples/xlstm_7b.py, xlstm_model.py, xlstm_checkpoint.py: the logits and tokens of transformers'
xLSTM for the checkpoint in xlstm_7b/, the command and its errors."""

import contextlib
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
import draft_tokens
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xlstm_7b
import xlstm_checkpoint as checkpoint
import xlstm_model as model
import xlstm_server
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


@pytest.mark.quick("bfloat16")
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
        x, _ = model.prefill(CONFIG, params, row, None, np.array([len(prompt)]))
        logits = model.next_logits(CONFIG, params, x[0, positions])
        assert_close(logits, expected, bound)
        assert np.abs(logits - expected).max() < of_largest * np.abs(expected).max()


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_gradient_of_the_forward_pass_is_the_slope_of_its_loss():
    """Along itself, by central differences of 6e-4.

    The rounding errors of the loss, 6e-8, are 1e-4 of that, and the third derivative adds less.
    """
    _, params = read()
    tokens = PROMPTS[3][None, :16].astype("int32")

    @jax.jit
    def loss(params):
        return jnp.mean(jnp.sin(model.forward(CONFIG, params, tokens)))

    gradient = jax.grad(loss)(params)
    norm = np.linalg.norm([np.linalg.norm(x) for x in jax.tree.leaves(gradient)])
    step = 3e-4 / norm

    @jax.jit
    def loss_beside(params, gradient, step):
        return loss(jax.tree.map(lambda x, g: x + step * g, params, gradient))

    low, high = (float(loss_beside(params, gradient, x)) for x in (-step, step))
    np.testing.assert_allclose((high - low) / (2 * step), norm**2, rtol=1e-3)


def test_no_device_has_all_of_a_weight_that_is_split():
    block = read(devices=2)[1]["blocks"][1]
    for name in {*block} - {"norm_mlstm", "norm_ffn"}:
        assert block[name].addressable_shards[0].data.nbytes == block[name].nbytes // 2
    assert block["qkvo"].sharding.spec[0] == block["down"].sharding.spec[1] == "heads"


# ---------------- the command


parse = functools.partial(benchmark_runs.parse, xlstm_7b)
exit_code = functools.partial(benchmark_runs.run, xlstm_7b)


def run(*arguments):
    assert exit_code(*arguments) == 0


error = functools.partial(benchmark_runs.error_of, exit_code)


def error_of_checkpoint(folder):
    return error(f"--checkpoint={folder}", "--prompt=a")


def text(tokens):
    return "".join(map(chr, tokens))


FLOAT32 = "--dtype=float32", f"--new_tokens={1 + LOOP}", "--stream_every=5"
HERE = f"--checkpoint={FOLDER}"
ANSWER = text(GREEDY[2])
STOP = GREEDY[2][12]


@pytest.mark.quick("-24", "--new", "--stop")
@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("", 24),
        ("--new_tokens=8", 8),
        (f"--stop_tokens=5,{STOP}", ANSWER.index(chr(STOP))),
        ("--devices=2", 24),
        ("--draft=7", 24),
    ],
)
def test_command_streams_what_transformers_generates(flags, tokens, capsys):
    run(HERE, f"--prompt={text(PROMPTS[2])}", *FLOAT32, *flags.split())
    assert capsys.readouterr().out == ANSWER[:tokens] + "\n"


REPEATED = HERE, "--prompt=" + 16 * "dnxy", *FLOAT32


@pytest.mark.slow
def test_accepted_drafts_do_not_change_the_likeliest_tokens(capsys):
    run(*REPEATED)
    expected = capsys.readouterr().out
    run(*REPEATED, "--draft=7")
    output, errors = capsys.readouterr()
    assert output == expected
    assert float(re.findall(r"(\S+) tokens per call", errors)[-1]) > 1.5


def test_answers_that_drafts_change_are_counted(monkeypatch, capsys):
    def answer(program, options, dtype, draft, seed):
        tokens = np.arange(9)
        tokens[[seed, 8]] += draft * (seed in (1, 3, 6))
        return tokens

    monkeypatch.setattr(draft_tokens, "answer", answer)
    assert benchmark_runs.run(draft_tokens, "--seeds=7", "--dtype=float32") == 0
    row = json.loads(capsys.readouterr().out)
    assert row == row | dict(dtype="float32", answers=7, differ=3, equal_before=3)
    assert row == row | dict(draft=7, new_tokens=200)


def test_flags_of_answers_with_and_without_drafts(monkeypatch):
    built = []

    def build():
        names = "random", "size", "dtype", "draft", "seed", "prompt_length"
        built.append([xlstm_7b.FLAGS[name].value for name in names])

    monkeypatch.setattr(xlstm_7b, "build", build)
    tokens = [np.array([[1]]), np.array([[2], [3]])]
    monkeypatch.setattr(xlstm_7b, "generate", lambda _, new_tokens: tokens[:new_tokens])
    options = mock.Mock(prompt_length=40, new_tokens=2)
    for draft in (0, 7):
        answer = draft_tokens.answer(xlstm_7b, options, "float32", draft, 5)
        assert answer.tolist() == [1, 2, 3]
    assert built == [[True, "tiny", "float32", draft, 5, 40] for draft in (0, 7)]


@contextlib.contextmanager
def terminal():
    """stdout and stderr in the order in which they are written."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        yield written


@pytest.mark.slow
def test_the_line_of_an_answer_ends_before_its_statistics(capsys):
    run(*REPEATED)
    answer = re.escape(capsys.readouterr().out)
    with terminal() as written:
        run(*REPEATED, "--draft=7")
    drafts, speed = r"\S+ tokens per call of at most 8\n", r"first token after .*\n"
    assert re.search(rf"compiled in \S+ s\n{answer}{drafts}{speed}$", written.getvalue())


def test_the_line_of_an_answer_ends_before_control_c_is_reported():
    calls = [mock.DEFAULT] * 4  # the first one compiles
    stop = mock.patch.object(
        xlstm_7b, "decode", wraps=model.decode, side_effect=[*calls, KeyboardInterrupt]
    )
    with terminal() as written, stop:
        assert exit_code(HERE, f"--prompt={text(PROMPTS[2])}", *FLOAT32) == 130
    assert re.search(r" s\n[^\n]+\ninterrupted\n$", written.getvalue())


@pytest.mark.quick("flags0")
@pytest.mark.parametrize("flags", [[], ["--draft=7"], [f"--prompt={text(PROMPTS[0])}"]])
def test_logits_that_are_not_finite_are_an_error(flags, copied, monkeypatch, capsys):
    """What was right before is printed; of two prompts the other's answer is complete."""
    answer, others = GREEDY[2].tolist(), {*PROMPTS[0], *GREEDY[0], *PROMPTS[2]}
    end = next(n for n in range(7, 23) if answer[n] not in others | {*answer[:n]})
    tensors = all_tensors()
    tensors["backbone.embeddings.weight"][answer[end]] = np.nan
    save_file(tensors, copied / "model.safetensors")
    arguments = [f"--checkpoint={copied}", f"--prompt={text(PROMPTS[2])}", *FLOAT32, *flags]
    named = "backbone.embeddings.weight has values that are not finite in float32"
    assert error(*arguments) == f"xlstm_7b: --checkpoint: {named}"
    monkeypatch.setattr(checkpoint, "check_finite", lambda _: None)
    capsys.readouterr()
    assert exit_code(*arguments) == 1
    output, errors = capsys.readouterr()
    message = "prompts without an answer: 0; of prompt 0, not finite: embeddings"
    assert errors.splitlines()[-1] == f"xlstm_7b: {message}"
    several = "--prompt" in "".join(flags)
    assert output == (f"[1] {text(GREEDY[0])}" if several else text(answer[: end + 1])) + "\n"


@pytest.mark.slow
def test_a_long_prompt_is_read_in_pieces(monkeypatch, capsys):
    """Here two of 64 tokens and one of 2."""
    monkeypatch.setattr(xlstm_7b, "MOST_STEPS", 64)
    with mock.patch.object(xlstm_server, "prefill", wraps=model.prefill) as prefill:
        run(HERE, f"--prompt={text(PROMPTS[3])}", *FLOAT32)
    assert capsys.readouterr().out == text(GREEDY[3]) + "\n"
    assert [x.args[4].tolist() for x in prefill.call_args_list] == [[64], [64], [2]] * 2


@pytest.mark.slow
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
    for mark in ("", "\ufeff"):
        path.write_bytes(data := f"{mark}{line}\r\n\nlast\n".encode())
        for source in (path, "-"):
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
            parse("--prompt=def", "--prompt=of", f"--prompts={source}")
            assert xlstm_7b.read_prompts() == {0: "def", 1: "of", 2: line, 4: "last"}
    monkeypatch.setattr("sys.stdin", None)
    message = "xlstm_7b: --prompts: cannot read -: stdin is closed"
    assert error(HERE, "--prompts=-") == message


def test_figures_of_the_benchmark(monkeypatch, capsys):
    """The clock is read when tokens and copies are there. Of the runs after the first, the medians
    are 2 s to the first token and 4.6 s after it, which are two loops."""
    device = benchmark_runs.Device(monkeypatch, xlstm_7b)
    firsts = iter((9.0, 2.0, 1.0, 3.0, 2.0))
    loops = iter((9.0, 11.5, 11.5, 2.3, 2.3, 1.15, 1.15, 4.0, 4.0))
    array = mock.Mock(block_until_ready=device.wait)

    def after(seconds, *outputs):
        device.now += next(seconds)
        return outputs

    def repeat(copies, number):
        before = device.now
        copies()
        return [99.0, device.now - before]

    monkeypatch.setattr(jax, "jit", lambda f: lambda x: device.call(0.5, array))
    monkeypatch.setattr(xlstm_7b, "timeit", mock.Mock(repeat=repeat))
    monkeypatch.setitem(xlstm_7b.SIZES, "tiny", CONFIG)
    monkeypatch.setattr(xlstm_7b, "load", lambda *_: {})
    stubs = dict(
        empty_states=lambda *_, rings: None,
        first_tokens=lambda *_: after(firsts, None, np.zeros(2)),
        decode=lambda *_: after(loops, None, np.zeros(2), np.zeros((16, 2))),
    )
    sizes = "--size=tiny", "--batch=4", "--prompt_length=20", "--dtype=float32", "--new_tokens=24"
    with mock.patch.multiple(xlstm_7b, **stubs):
        run("--random", "--benchmark", *sizes)
        benchmark_runs.assert_row(
            json.loads(capsys.readouterr().out),
            **dict(batch=4, prompt_tokens=80, new_tokens=24, first_token_ms=2e3),
            **dict(prefill_tflops=8.962048e-06, ms_per_token=200.0, tokens_per_s=20.0),
            **dict(gb_per_token=584256 / 1e9, copy_gbps=2**26 / 1e9),
            memory_limit_pct=100 * 584256 / 2**26 / 0.2,
        )
        parse("--stream_every=16", "--new_tokens=20")
        xlstm_7b.stream(xlstm_7b.Model(CONFIG, {}, {}, {0: [1, 2], 1: [3]}, set(), None))
    assert capsys.readouterr().err == "first token after 2.000 s, then 2.4 tokens/s\n"


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


LARGE, INTEGERS = str(10**30), ("vocab_size", "hidden_size", "num_heads", "num_blocks")
FACTORS = "qk_dim_factor", "v_dim_factor", "ffn_proj_factor"
BEYOND_FLOAT32 = "1e999", "NaN", "1e-400", "1e-310", "1e40", "-1.0", "0", "true", '"1"', "[]"
# Fields, and what none of them may be, in JSON.
WRONG_VALUES = [
    (["model_type"], ['"llama"']),
    (["use_bias", "tie_word_embeddings"], ["1", "null", '"true"']),
    (["add_out_norm"], ["null"]),
    (["add_qk_norm"], ["true"]),
    (["weight_mode"], ['"shared"']),
    (["inference_state_dtype"], ['"int8"']),
    (["input_gate"], ['"softplus"']),
    (["chunkwise_kernel"], ['"chunkwise--triton_xl_chunk_relug"']),
    (["step_kernel"], ["1"]),
    (["force_bos_token_insert"], ['"false"', "1"]),
    (["num_heads"], ["3", str(2**31 - 1)]),
    (["num_blocks"], ["10001"]),
    (INTEGERS, ["0", "-1", "4.0", "true", '"64"', "null", "Infinity", str(2**31), LARGE]),
    (["ffn_round_up_to_multiple_of"], ["0", "64.0", LARGE]),
    (["embedding_dim"], ["128", "64.0", "0", '"64"']),
    (["norm_eps", "eps", "gate_soft_cap", "output_logit_soft_cap", *FACTORS], BEYOND_FLOAT32),
    (["norm_eps", "eps", *FACTORS], ["null"]),
    (FACTORS, ["1e-9", "1e9", "1e30"]),
]


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return path


@pytest.mark.parametrize(
    ("name", "value"), [(x, y) for names, values in WRONG_VALUES for x in names for y in values]
)
def test_wrong_values_of_the_config_are_named(name, value, copied):
    # num_hidden_layers would stand in for num_blocks, and embedding_dim for hidden_size.
    others = {} if name == "embedding_dim" else dict(embedding_dim=None, num_hidden_layers=None)
    path = change_config(copied, **{name: "the value"}, **others)
    path.write_text(path.read_text().replace('"the value"', value))
    shown = re.escape(repr(json.loads(value)))
    message = error_of_checkpoint(copied)
    assert re.search(rf"{path}: {name} is {shown} and must be \S", message)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (dict(gate_soft_cap=10**30, eps=1, norm_eps=1e-30), (1e30, 1.0, 1e-30)),
        (dict(gate_soft_cap=None, eps=1e30, norm_eps=1e-5), (None, 1e30, 1e-5)),
    ],
)
def test_numbers_at_the_ends_of_their_ranges(values, expected, copied):
    change_config(copied, **values)
    config, _ = checkpoint.read_config(copied)
    assert (config.gate_soft_cap, config.eps, config.norm_eps) == expected
    assert {type(config.eps), type(config.norm_eps)} == {float}


TINY = "--random", "--size=tiny"
WRONG_FLAGS = [
    ("seed", [-1, 2**32, 2**63, 10**20]),
    ("new_tokens", [0, 2**16 + 1, 2**31, 10**20]),
    ("batch", [0, 2**16 + 1, 2**31, 10**20]),
    ("prompt_length", [0, 2**31, 10**20]),
    ("stream_every", [0, 2**31, 10**20]),
    ("devices", [0, 2**31, 10**20]),
    ("slots", [0, -1]),
    ("spread", [0, -1]),
    ("draft", [-1, 8, 10**20]),
    ("temperature", [-1.0, 1e-40, 1e-320, 1e31, "inf", "nan"]),
    ("top_p", [-0.1, 1.1, "inf", "nan"]),
    ("stop_tokens", [-1, 256, 10**20, 1.0, "1,x"]),
]


@pytest.mark.parametrize(("name", "value"), [(x, y) for x, values in WRONG_FLAGS for y in values])
def test_wrong_values_of_flags_are_named(name, value):
    assert re.search(rf"^xlstm_7b: (flag )?--{name}\b", error(*TINY, f"--{name}={value}"))


def test_flags_that_may_be_any_number(monkeypatch):
    monkeypatch.setattr(xlstm_7b, "load", lambda *_: {})
    parse(*TINY, f"--slots={10**20}", f"--spread={10**20}", "--batch=3", "--stop_tokens=255,0")
    built = xlstm_7b.build()
    assert (built.slots, built.stop_tokens) == (3, {0, 255})
    parse(*TINY, f"--seed={2**32 - 1}", "--top_p=0", "--temperature=1e30", "--stop_tokens=")
    assert xlstm_7b.build().stop_tokens == set()


def test_prompts_without_a_number_for_their_draws_are_refused(copied, monkeypatch):
    monkeypatch.setattr(xlstm_7b, "load", lambda *_: {})
    (copied / "prompts").write_text("\n" * 2**16 + "a")
    request = f"--checkpoint={copied}", f"--prompts={copied / 'prompts'}"
    assert "--temperature: draws have numbers for 65536 prompts" in error(
        *request, "--temperature=1"
    )
    parse(*request)
    assert {*xlstm_7b.build().prompts} == {2**16}


# eos_token_id of generation_config.json and config.json; -: there is none.
@pytest.mark.parametrize(
    ("generation", "config", "flags", "expected"),
    [
        ("-", 3, [], {3}),
        ("-", [3, 4], [], {3, 4}),
        ("-", None, [], set()),
        (5, 3, [], {5}),
        ([5, 6], None, [], {5, 6}),
        (0, 3, [], {0}),
        ([], 3, [], set()),
        (None, 3, [], {3}),
        ([5], 3, ["--stop_tokens=7"], {7}),
        (-1, "x", ["--stop_tokens="], set()),
    ],
)
def test_stop_tokens_of_the_generation_config_come_first(
    generation, config, flags, expected, copied, monkeypatch
):
    monkeypatch.setattr(xlstm_7b, "load", lambda *_: {})
    change_config(copied, eos_token_id=config)
    if generation != "-":
        values = json.dumps(dict(eos_token_id=generation))
        (copied / "generation_config.json").write_text(f"\ufeff{values}", encoding="utf-8")
    parse(f"--checkpoint={copied}", "--prompt=a", *flags)
    assert xlstm_7b.build().stop_tokens == expected


@pytest.mark.parametrize("token", [-1, 128, 10**30, 2.0, True, "3", [3, None], {}])
def test_tokens_that_are_none_are_named(token, copied):
    path = change_config(copied, force_bos_token_insert=True, bos_token_id=token)
    assert f"{path}: bos_token_id: " in error_of_checkpoint(copied)
    path = change_config(copied, force_bos_token_insert=False, eos_token_id=token)
    assert f"{path}: eos_token_id: " in error_of_checkpoint(copied)
    path = copied / "generation_config.json"
    path.write_text(json.dumps(dict(eos_token_id=token)))
    assert f"{path}: eos_token_id: " in error_of_checkpoint(copied)
    path.write_text("[]")
    assert f"cannot read {path}: it has no names with values" in error_of_checkpoint(copied)


def test_memory_is_counted_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(checkpoint, "free_bytes", lambda mesh: 2**30)
    monkeypatch.setattr(xlstm_7b, "load", lambda *_: pytest.fail("it was made"))
    sizes = "--random", "--devices=2", "--batch=64", "--prompt_length=1024"
    for flags, needed, summands in (
        (["--benchmark"], 13.63, "states 4.01, prefill 3.00, sampling 0.04"),
        # One block of 32 has the states of 16 prompts twice. A prefill has 4096 steps at most.
        ([], 10.88, "states 4.07, prefill 0.19, sampling 0.04"),
        (["--slots=8"], 7.34, "states 0.56, prefill 0.19, sampling 0.01"),
    ):
        memory = f"{needed} GiB per device (weights 6.59, {summands})"
        assert f"needs {memory}, 1.00 are free: " in error(*sizes, *flags)


def test_a_folder_without_a_tokenizer(copied):
    (copied / "tokenizer.json").unlink()
    assert f"no tokenizer {copied}" in error_of_checkpoint(copied)
