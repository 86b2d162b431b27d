"""The examples: values that a hand can check."""

import dataclasses
import io
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import benchmark_runs
import byte_corpus
import byte_lm
import byte_lm_mesh
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_byte_lm as lm
import xlstm_7b
import xlstm_checkpoint as checkpoint
import xlstm_model as model
import xlstm_server as server
from oracle import refused

FIXTURE = Path(__file__).with_name("xlstm_7b")


def batches_with_rings(platform, state_dtype):
    config = model.Config(inference_state_dtype=state_dtype)
    with mock.patch("jax.default_backend", return_value=platform):
        return [B for B in (1, 15, 16, 31, 32, 64) if model.rings_are_faster(config, B)]


def ffn_dim(name, text):
    with tempfile.TemporaryDirectory() as folder:
        _ = Path(folder, name).write_text(text)
        return checkpoint.read_config(Path(folder))[0].ffn_dim


def check(free, config, dtype, devices, *prompts):
    tensors = checkpoint.tensors_of(config, dtype, devices)
    with mock.patch.object(checkpoint, "free_bytes", return_value=free):
        checkpoint.check_prompts(config, tensors, dict(enumerate(prompts)))


def draws(temperature, top_p, *expected):
    logits = jnp.log(jnp.tile(jnp.array([0.05, 0.6, 0.05, 0.3]), (2500, 1)))
    sampling, each = model.Sampling(temperature, top_p), np.arange(2500)
    drawn = model.sample(sampling, logits, jax.random.key(0), each)
    expected = np.array(expected) / sum(expected)
    off = abs(np.bincount(drawn, minlength=4) / 2500 - expected)
    return bool(np.all(off <= np.where(expected % 1 > 0, 3 * 0.5 / 50, 1e-9)))


x, vector = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 256), (5,)))
readers = [checkpoint.random_tensors(seed) for seed in (3, 3, 4)]


def test_steps_of_prefills_for_so_many_tokens():
    """Steps of prefills, for so many tokens."""
    assert [*map(server.bucket, (1, 256, 257, 385, 513, 4000, 5000, 6145))] == [
        256,
        256,
        384,
        512,
        768,
        4096,
        6144,
        8192,
    ]


def test_tokens_of_a_config():
    """Tokens of a config: None, a number or a list."""
    check_ids = checkpoint.check_ids
    assert [
        check_ids(checkpoint.Config(vocab_size=5), "eos_token_id", x) for x in (None, 0, [], [3, 4])
    ] == [[], [0], [], [3, 4]]
    refused(
        checkpoint.CheckpointError,
        "eos_token_id: 5 is no token, an integer from 0 to 4",
        lambda: check_ids(checkpoint.Config(vocab_size=5), "eos_token_id", [3, 5]),
    )


def test_rings_are_for_many_prompts_on_a_gpu():
    """Rings are for as many bytes of states, whatever their dtype."""
    assert batches_with_rings("gpu", "float32") == [16, 31, 32, 64]
    assert batches_with_rings("gpu", "bfloat16") == [32, 64]
    assert batches_with_rings("gpu", "float16") == [32, 64]
    assert batches_with_rings("cpu", "float32") == batches_with_rings("tpu", "float32") == []


def test_the_fullest_device_decides_what_is_free():
    """The fullest device decides what is free; devices that do not say have room."""
    stats = dict(bytes_limit=10, bytes_in_use=3), None, dict(bytes_limit=9, bytes_in_use=5)
    devices = [mock.Mock(memory_stats=lambda x=x: x) for x in stats]
    assert (
        repr(
            [checkpoint.free_bytes(mock.Mock(devices=np.array(x))) for x in (devices, devices[1:2])]
        )
        == "[4, inf]"
    )


def test_devices_divide_the_model():
    """Devices divide the model."""
    config = checkpoint.Config(hidden_size=64, num_heads=4, vocab_size=128)
    refused(
        checkpoint.CheckpointError,
        "--devices=2 do not divide ffn_dim, 65",
        lambda: checkpoint.mesh_of(
            dataclasses.replace(config, ffn_proj_factor=65 / 64, ffn_round_up_to_multiple_of=1), 2
        ),
    )
    refused(
        checkpoint.CheckpointError,
        "--devices=2 do not divide vocab_size, 127",
        lambda: checkpoint.mesh_of(dataclasses.replace(config, vocab_size=127), 2),
    )


def test_the_default_width_of_the_feed_forward():
    """The width of the feed-forward by default: xlstm's factor is 2.6667 and transformers'
    2.667."""
    assert ffn_dim("config.yaml", "embedding_dim: 9600\nffn_round_up_to_multiple_of: 1\n") == 25600
    assert (
        ffn_dim("config.json", json.dumps(dict(hidden_size=9600, ffn_round_up_to_multiple_of=1)))
        == 25603
    )


def test_prompts_fit_to_the_byte(capsys):
    """Prompts fit to the byte: norms and the biases of gates are float32, and m is."""
    tiny, _ = checkpoint.read_config(FIXTURE)
    big = checkpoint.Config()
    smaller = dataclasses.replace(big, inference_state_dtype="bfloat16")
    for needed, *call in (
        (283_968, tiny, "float32", 2),
        (14_002_060_672, big, "bfloat16", 1),
        (13_867_580_800, smaller, "bfloat16", 1),
    ):
        largest = call[0].vocab_size - 1
        check(needed, *call, [1], [largest, 0])
        for free, prompt in (needed - 1, [largest, 0]), (needed, [0, largest + 1]):
            try:
                check(free, *call, [1], prompt)
            except checkpoint.CheckpointError as error:
                print(str(error).partition(" (")[0])
    assert capsys.readouterr().out == (
        "needs 0.00 GiB per device\n"
        "--prompt: prompt 1 has no token, or one beyond vocab_size\n"
        "needs 13.04 GiB per device\n"
        "--prompt: prompt 1 has no token, or one beyond vocab_size\n"
        "needs 12.92 GiB per device\n"
        "--prompt: prompt 1 has no token, or one beyond vocab_size\n"
    )


def test_random_weights_differ_and_have_the_usual_scale():
    """Random weights differ and have the usual scale: the mean square of n values has a standard
    deviation of (2 / n)^0.5."""
    first, again, other = (read("", x) for read in readers)
    assert [bool(jnp.array_equal(first, y)) for y in (again, other, readers[0]("", x))] == [
        True,
        False,
        False,
    ]
    assert bool(abs(jnp.mean(first * first) * 256 - 1) < 5 * (2 / x.size) ** 0.5)
    assert readers[0]("", vector).tolist() == [1.0, 1.0, 1.0, 1.0, 1.0]


def test_weights_of_the_first_and_last_seeds_differ():
    """So do those of the last seed and the first ones."""
    seeds = 0, 1, 2**32 - 1
    some = [y for read in map(checkpoint.random_tensors, seeds) for y in (read("", x), read("", x))]
    assert len({float(y[0, 0]) for y in some}) == 6


def test_tokens_are_drawn_from_the_likeliest():
    """Tokens are drawn from the fewest likeliest ones that have the mass top_p; of equal ones,
    from the first. Sums that reach top_p exactly do so in float32 as well. Within three
    standard deviations of the share of a token in 2500 draws:"""
    assert (
        draws(1.0, 1.0, 1, 12, 1, 6),
        draws(0.5, 1.0, 1, 144, 1, 36),
        draws(1.0, 0.95, 1, 12, 0, 6),
    ) == (True, True, True)
    assert (
        draws(1.0, 0.9, 0, 2, 0, 1),
        draws(1.0, 0.0, 0, 1, 0, 0),
        draws(0.0, 1.0, 0, 1, 0, 0),
    ) == (True, True, True)
    assert (draws(1e-30, 1.0, 0, 1, 0, 0), draws(1e30, 1.0, 1, 1, 1, 1)) == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [1.0, 0.5, 0.0])
def test_temperatures_at_the_ends_of_their_range(top_p):
    """The least ones, which float32 flushes or cannot divide by, take the likeliest token, also of
    logits whose difference is infinite. Logits that are NaN or inf, or all -inf, have none, in
    their row alone; one of -inf has the mass 0."""
    largest, inf = float(jnp.finfo("float32").max), jnp.inf
    rows = [1, 5, 30, -3], [0, 1 - 2**-24, 1, 0.5], [-largest, 1, largest, 2], [-inf, 0, 1, -inf]
    logits = jnp.array([*rows, [1, jnp.nan, 2, 3], [inf, 1, 2, 3], [-inf] * 4])
    for temperature in (0.0, 5e-324, 1e-40, 1e-38, 1.2e-38, 1e-30):
        sampling = model.Sampling(temperature, top_p)
        tokens = model.sample(sampling, logits, jax.random.key(0), np.arange(7))
        assert tokens.tolist() == [2, 2, 2, 2, *[model.NO_TOKEN] * 3], temperature
    for temperature in (1e38, 1e39, np.inf):
        sampling = model.Sampling(temperature)
        tokens = model.sample(sampling, jnp.tile(logits[:1], (400, 1)), jax.random.key(0), 0)
        many = model.sample(
            sampling, jnp.tile(logits[:1], (400, 1)), jax.random.key(0), np.arange(400)
        )
        assert {*np.asarray(tokens).tolist()} <= {*np.asarray(many).tolist()} == {0, 1, 2, 3}


@pytest.mark.slow
def test_the_first_that_is_not_finite_is_named():
    """A weight, else the block whose output or states are, else the logits."""
    config = model.Config(vocab_size=8, hidden_size=16, num_blocks=2, num_heads=1)
    tensors = checkpoint.tensors_of(config, "float32", 1)
    params = checkpoint.load(config, tensors, checkpoint.random_tensors(0))
    first, second = params["blocks"]
    huge = second | dict(down=second["down"].at[3].set(3e38))
    bad = first | dict(up=first["up"].at[0, 0, 0].set(-jnp.inf))

    def named(tokens=(1, 2, 3), **changed):
        return model.first_not_finite(config, params | changed, [*tokens])

    assert named() == "the logits"
    assert named(blocks=[first, huge]) == "block 1 of 2"
    assert named(blocks=[bad, huge]) == "blocks.0.up"
    with mock.patch.object(model, "MOST_STEPS", 2):
        assert named() == "the logits"
        assert named(blocks=[first, huge]) == "block 1 of 2"
    block = "backbone.blocks.1.ffn.proj_down.weight"

    def read(name, x):
        return np.full(x.shape, np.finfo("float32").max if name == block else 0, "float32")

    message = f"{block} has values that are not finite in bfloat16"
    tensors = checkpoint.tensors_of(config, "bfloat16", 1)
    refused(checkpoint.CheckpointError, message, lambda: checkpoint.load(config, tensors, read))


# ---------------- what a command needs and shows


# Flags of xlstm_7b.py: most rows of states at a time, and most steps of a prefill. One block of two
# (tiny) or of 32 (7b) has the states of 16 prompts before and after a prefill: 16 rows, or one.
NEEDED = """
--size=tiny --prompt_length=50: 1 50
--size=tiny --prompt_length=5000: 3 4096
--size=tiny --prompt_length=50 --benchmark: 1 50
--size=tiny --prompt_length=50 --batch=4 --benchmark: 4 200
--size=tiny --prompt_length=5000 --batch=2 --benchmark: 4 10000
--size=tiny --prompt_length=50 --batch=4: 20 4096
--size=tiny --prompt_length=50 --batch=4 --slots=3: 19 4096
--size=tiny --prompt_length=50 --batch=4 --slots=9: 20 4096
--size=tiny --prompt_length=5000 --batch=4 --slots=3: 21 4096
--size=tiny --prompt_length=50 --batch=4 --slots=3 --benchmark: 19 4096
--size=tiny --prompt_length=50 --batch=4 --slots=3 --prefix_cache=17: 37 4096
--size=tiny --prompt_length=4097 --batch=4 --slots=3 --prefix_cache=40: 62 4096
--size=tiny --prompt_length=50 --batch=2: 18 4096
--size=tiny --prompt_length=50 --draft=3: 1 50
--size=tiny --prompt_length=50 --batch=2 --benchmark --slots=2 --draft=3: 18 4096
--size=tiny --prompt_length=5000 --batch=40 --slots=1 --spread=5000: 19 4096
--size=7b --prompt_length=50 --batch=4 --slots=3: 4 4096
--size=7b --prompt_length=4096 --batch=4 --slots=3 --prefix_cache=17: 22 4096
"""


@pytest.mark.parametrize("line", NEEDED.strip().splitlines())
def test_memory_that_is_counted(line):
    given, _, needed = line.partition(": ")
    benchmark_runs.parse(xlstm_7b, "--random", *given.split())
    with mock.patch.multiple(xlstm_7b, load=mock.DEFAULT, check_prompts=mock.DEFAULT) as stubs:
        xlstm_7b.build()
    *_, rows, steps = stubs["check_prompts"].call_args.args
    assert f"{rows} {steps}" == needed


def test_lengths_of_random_prompts_and_answers():
    """From a third of the longest, rounded up, to it; and the flags of how tokens are drawn."""
    sizes = "--prompt_length=10", "--new_tokens=20", "--spread=3", "--batch=400"
    drawn = "--seed=7", "--temperature=0.5", "--top_p=0.75"
    benchmark_runs.parse(xlstm_7b, "--random", "--size=tiny", *sizes, *drawn)
    with mock.patch.object(xlstm_7b, "load"):
        built = xlstm_7b.build()
    assert {*map(len, built.prompts.values())} == {*range(4, 11)}
    assert {*built.limits} == {*range(7, 21)}
    assert built.setup()[2:] == (model.Sampling(0.5, 0.75), jax.random.key(7))
    assert {token for x in built.prompts.values() for token in x} == {*range(256)}


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
    config, _ = checkpoint.read_config(FIXTURE)
    config = dataclasses.replace(config, **values.get(case, {}))
    benchmark_runs.parse(xlstm_7b, "--new_tokens=24", *([case] if "--" in case else []))
    runs = iter([(2.0, 4.6), (1.0, 9.2), (9.0, 2.3)])
    stubs = dict(copy_rate=lambda: 1e6, rings_are_faster=lambda _, B: case == "rings" and B == 4)
    tensors = checkpoint.tensors_of(config, "float32", 1)
    model = xlstm_7b.Model(config, tensors, {}, {n: [1] * 5 for n in range(4)}, set(), None)
    with mock.patch.multiple(xlstm_7b, **stubs, run=lambda *_: next(runs)):
        row = xlstm_7b.benchmark(model)
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


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


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

    benchmark_runs.parse(xlstm_7b)
    monkeypatch.setattr(xlstm_7b, "generate", generate)
    xlstm_7b.stream(xlstm_7b.Model(None, {}, {}, {0: [1]}, {0}, Bytes()))
    output, errors = capsys.readouterr()
    assert ",".join([*seen, output]).replace("\ufffd", "?") == f"{printed}\n"
    assert errors == f"first token after 2.000 s, then {speed}\n"


PRINTED = {
    "ascii": r"\u20ac\u65e5\udcff",
    "cp1252": "\u20ac" r"\u65e5\udcff",
    "utf-8": "\u20ac\u65e5" r"\udcff",
}


@pytest.mark.parametrize("encoding", PRINTED)
def test_what_stdout_cannot_encode_is_printed_as_escapes(encoding, monkeypatch):
    """A sample, an answer as it comes, and answers as they end; command.run is not around them."""
    text = "\u20ac\u65e5\udcff"
    benchmark_runs.parse(xlstm_7b)
    monkeypatch.setattr(xlstm_7b, "generate", lambda *_: iter([np.array([[1]])]))
    monkeypatch.setattr(xlstm_7b, "answers", lambda *_: iter([(7, [1])]))
    monkeypatch.setattr(xlstm_7b.Model, "text", lambda *_: text)
    of_one_prompt = xlstm_7b.Model(None, {}, {}, {0: [1]}, set(), None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding, newline="\n"))
    lm.say(text)
    xlstm_7b.stream(of_one_prompt)
    xlstm_7b.write_answers(of_one_prompt)
    sys.stdout.flush()
    lines = sys.stdout.buffer.getvalue().decode(encoding).splitlines()
    assert lines == [x + PRINTED[encoding] for x in ("", "", "[7] ")]


# force_bos_token_insert and bos_token_id of a config; -: there is none.
BOS = """
true 5: [5]
true 0: [0]
true -: [0]
false 5: []
false -: []
null 5: []
- 5: []
- -: []
"""


@pytest.mark.parametrize("line", BOS.strip().splitlines())
def test_the_bos_of_a_config(line):
    """transformers' default of bos_token_id is 0."""
    (force, bos), expected = line.split(": ")[0].split(), json.loads(line.split(": ")[1])
    named = dict(force_bos_token_insert=force, bos_token_id=bos)
    values = {name: json.loads(x) for name, x in named.items() if x != "-"}
    assert checkpoint.read_bos(Path("folder"), checkpoint.Config(), values) == expected


# A text, and the draft: what followed its last two tokens where they last stood before.
DRAFTS = """
1 2 3 4 1 2: 3 4 1
1 2 3 1 2 4 1 2: 4 1 2
5 5 5 5: 5 0 0
1 2 3 4 5 6: 1 2 3
2 1 2 9 2: 2 1 2
7 1 2 8 1 2: 8 1 2
"""


@pytest.mark.parametrize("line", DRAFTS.strip().splitlines())
def test_a_draft_is_what_followed_the_last_two_tokens(line):
    """What is behind the text does not count; without such a place it is the first tokens."""
    text, draft = ([*map(int, x.split())] for x in line.split(": "))
    padded = np.array([*text, *[0] * 4, *text[-2:], 99, 0, 0, 0])
    found = model.look_up(jnp.asarray(padded), len(text), 3)
    assert found.tolist() == draft


# ---------------- the byte-level language model


def test_bits_of_a_model_of_frequencies():
    """Of three bytes twice 0 and once 1, with one added to each of 256 counts."""
    train, held_out = (np.array(x, np.uint8) for x in ([0, 1, 0], [0, 1, 255, 255]))
    bits = -np.mean(np.log2(np.array([3, 2, 1, 1]) / 259))
    assert byte_corpus.unigram_bits(train, held_out) == pytest.approx(bits, rel=1e-12)


@pytest.mark.parametrize(
    ("size", "sizes"), [(39, (38, 1)), (40, (38, 2)), (41, (39, 2)), (19, None), (20, (19, 1))]
)
def test_the_last_twentieth_of_a_file_is_held_out(size, sizes, tmp_path):
    (tmp_path / "x").write_bytes(bytes(size))
    if sizes:
        assert tuple(map(len, byte_corpus.read_corpus(tmp_path / "x", 0))) == sizes
    for seq_len in sizes or (0, 19):
        with pytest.raises(byte_corpus.UserError, match=r"has \d+ bytes of .* fewer than the"):
            byte_corpus.read_corpus(tmp_path / "x", seq_len)


def test_sources_of_the_standard_library_that_are_everywhere(tmp_path, monkeypatch):
    """Those in Python; of a corpus all files."""
    names = "a.py", "a.txt", "test/a.py", "b/tests/a.py", "site-packages/a.py", "b/tester/a.py"
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(byte_corpus.sysconfig, "get_path", lambda _: str(tmp_path))
    found = [str(x.relative_to(tmp_path)) for x in byte_corpus.corpus_files(None)]
    assert found == ["a.py", "b/tester/a.py"]
    assert len(byte_corpus.corpus_files(tmp_path)) == len(names)
    assert byte_corpus.corpus_files(tmp_path / "a.txt") == [tmp_path / "a.txt"]


def test_a_file_with_several_names_is_in_the_text_once(tmp_path):
    """Links to files and folders, inside of the corpus and out of it, and links that lead nowhere
    leave the text as it is."""
    corpus, outside = tmp_path / "corpus", tmp_path / "outside"
    (corpus / "sub").mkdir(parents=True)
    outside.write_text("outside")
    for n in range(3):
        (corpus / "sub" / f"{n}").write_text(f"text {n}")
    (corpus / "sub" / "a.py").write_text("source")
    before = byte_corpus.corpus_files(corpus)
    (corpus / "0").symlink_to("sub/1")  # sorted, it is the first
    (corpus / "sub" / "a link to a link").symlink_to("../0")
    (corpus / "sub" / "z").hardlink_to(corpus / "sub" / "0")
    (corpus / "a folder").symlink_to("sub")
    (corpus / "sub" / "up").symlink_to("..")
    (corpus / "nowhere").symlink_to("no such file")
    (corpus / "itself").symlink_to("itself")
    assert byte_corpus.corpus_files(corpus) == before
    for name in "xy":
        (corpus / name).symlink_to(outside)
    assert byte_corpus.corpus_files(corpus) == [*before, corpus / "x"]
    (tmp_path / "link").symlink_to(corpus)
    train, held_out = byte_corpus.read_corpus(tmp_path / "link", 1, [corpus / "itself"])
    text = b"\n".join([bytes(held_out), bytes(train)])
    assert text == b"\n".join(x.read_bytes() for x in (*before, outside))
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        byte_corpus.read_corpus(corpus / "itself", 1)


def test_the_learning_rate_rises_for_a_twentieth_and_falls_to_a_tenth():
    """AdamW makes an update of the rate from gradients that do not change; larger ones are clipped
    to the same norm. Matrices also decay by a tenth of it."""
    benchmark_runs.parse(lm, "--steps=40", "--learning_rate=3.0")
    optimizer, steps = lm.make_optimizer(), np.arange(41)
    params = dict(qkvo=jnp.full(1, 2.0), norm=jnp.full(1, 2.0))
    state, rates = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for step in steps:
        gradients = {name: x * 1e3 ** (step % 2) for name, x in params.items()}
        updates, state = update(gradients, state, params)
        rates.append([-float(updates[name][0]) for name in ("norm", "qkvo")])
    expected = np.where(
        steps < 2, 3.0 * steps / 2, 0.3 + 2.7 * (1 + np.cos(np.pi * (steps - 2) / 38)) / 2
    )
    rates = np.array(rates)
    np.testing.assert_allclose(rates[:, 0], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(rates[:, 1], 1.2 * expected, rtol=1e-4, atol=1e-6)


def test_where_the_parameters_of_the_byte_model_are():
    """Heads and hidden columns over tensor: rows of the matrices before them, columns behind."""
    config = model.Config(256, 32, num_blocks=1, num_heads=2)
    params = jax.eval_shape(lambda: byte_lm.initial_params(config, jax.random.key(0)))
    mesh = jax.sharding.AbstractMesh((2, 2, 2), byte_lm_mesh.AXES)
    specs = jax.tree.map(lambda x: tuple(x.spec), byte_lm_mesh.shardings(params, mesh))
    rows, columns = ("tensor",), (None, "tensor")
    assert specs.pop("blocks") == [
        dict(
            **dict(norm_mlstm=(), qkvo=rows, gates=rows, gate_bias=rows, multihead_norm=rows),
            **dict(out_proj=columns, norm_ffn=(), up=rows, down=columns),
        )
    ]
    assert {*specs.values()} == {()}
    kinds = byte_lm.matrices(params)
    norms = {name for name, is_matrix in kinds["blocks"][0].items() if not is_matrix}
    assert norms == {"norm_mlstm", "gate_bias", "multihead_norm", "norm_ffn"}
    assert {name for name in specs if not kinds[name]} == {"out_norm"}
    sizes = dict(data=2, tensor=1, sequence=4)
    assert byte_lm_mesh.parse_mesh("sequence:4,data:2") == sizes


def test_several_processes_end_at_a_step_that_logs(monkeypatch):
    """Where any of them was asked to, by its signal or because of the time."""
    benchmark_runs.parse(lm, "--log_every=5")
    inf = float("inf")
    for others, deadline, expected in (((15, 0), inf, 15), ((0, 1), inf, 0), ((0, 0), -inf, 0)):
        stop = lm.Stop()
        monkeypatch.setattr(
            lm.multihost_utils, "process_allgather", lambda x, y=others: np.array([x, y])
        )
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        assert not lm.asked_to_end(stop, deadline, 9)
        assert lm.asked_to_end(stop, deadline, 10)
        assert stop.signal == expected
        monkeypatch.setattr(jax, "process_count", lambda: 1)
        assert lm.asked_to_end(lm.Stop(), deadline, 9) == (deadline < 0)
    assert lm.asked_to_end(lm.Stop(unprinted=OSError()), inf, 9)
    assert lm.asked_to_end(lm.Stop(2), inf, 9)
