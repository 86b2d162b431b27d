"""examples/xlstm_server.py and its flags of xlstm_7b.py: more prompts than slots."""

import functools
import json
import re
from unittest import mock

import benchmark_runs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_xlstm_7b import (
    CONFIG,
    FLOAT32,
    FOLDER,
    ROUNDING,
    exit_code,
    loaded,
    parse,
    run,
    text,
)

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
pytest.importorskip("tqdm")
import xlstm_7b
import xlstm_model as model
import xlstm_server as server

SLOTS, STEPS = 12, 4
HERE = f"--checkpoint={FOLDER}"
rng = np.random.default_rng(5)
PROMPTS = [rng.integers(32, 127, size).tolist() for size in rng.integers(1, 40, 200)]
LIMITS = rng.integers(1, 24, 200).tolist()
STOP = {*map(ord, "aeiou")}


@pytest.fixture(scope="module", autouse=True)
def one_length():
    with mock.patch.object(server, "MOST_STEPS", server.FEWEST_STEPS):
        yield


@pytest.fixture(scope="module")
def params():
    return loaded()


@functools.partial(jax.jit, static_argnums=0)
def steps_alone(T, params, padded, lengths):
    """Tokens (T, B) that follow after each step, and how much likelier each is than the next one.

    Steps alone, from no states: what a row gets depends on that row only.
    """
    (DHQK, DHV), NH, B = CONFIG.head_dims, CONFIG.num_heads, len(padded)
    shapes = (B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH)
    states = [tuple(map(jnp.zeros, shapes)) for _ in range(CONFIG.num_blocks)]

    def one(carry, t):
        states, token = carry
        token = jnp.where(t < lengths, padded[:, t], token)
        logits, states = model.step(CONFIG, params, states, token)
        (first, second), (token, _) = map(jnp.transpose, jax.lax.top_k(logits, 2))
        return (states, token), (token, first - second)

    return jax.lax.scan(one, (states, padded[:, 0]), jnp.arange(T))[1]


@pytest.fixture(scope="module")
def expected(params):
    """By prompt, its next tokens without an end and their margins."""
    T = max(map(len, PROMPTS)) + max(LIMITS)
    padded = np.stack([np.resize(prompt, T) for prompt in PROMPTS])
    tokens, margins = steps_alone(T, params, padded, np.array([*map(len, PROMPTS)]))
    starts = [len(prompt) - 1 for prompt in PROMPTS]
    return [np.stack([tokens[begin:, n], margins[begin:, n]]) for n, begin in enumerate(starts)]


def check_answer(tokens, expected, limit, stop):
    """Up to the limit or a stop token, the expected ones until two were as likely as each other."""
    next_tokens, margins = expected
    answer = next_tokens[:limit].astype(int).tolist()
    ends = [n for n, token in enumerate(answer) if token in stop]
    answer = answer[: ends[0]] if ends else answer
    if tokens == answer:
        return
    at = next(
        (n for n, pair in enumerate(zip(tokens, answer, strict=False)) if len({*pair}) > 1), None
    )
    at = min(len(tokens), len(answer)) if at is None else at
    assert margins[at] < 2 * CONFIG.output_logit_soft_cap * ROUNDING


def served(params, continuous):
    """The answers, and the rows of each loop."""
    setup = CONFIG, params, model.Sampling(), jax.random.key(0)
    queue = dict(enumerate(PROMPTS)), LIMITS, STOP, SLOTS, STEPS, continuous
    with mock.patch.object(server, "decode", wraps=model.decode) as decode:
        answers = [*server.serve(setup, *queue)]
    return answers, [len(loop.args[5]) for loop in decode.call_args_list]


@pytest.mark.slow
def test_each_of_200_answers_is_the_answer_alone(params, expected):
    (continuous, rows), (fixed, rows_of_fixed) = (served(params, x) for x in (True, False))
    for answers in (continuous, fixed):
        assert sorted(n for n, _ in answers) == [*range(200)]
        for n, tokens in answers:
            check_answer(tokens, expected[n], LIMITS[n], STOP)
        assert len({len(tokens) for _, tokens in answers}) > 12
    batches = [n // SLOTS for n, _ in fixed]
    assert batches == sorted(batches)
    # A fixed batch takes as many loops as its longest answer.
    lengths = np.resize([len(x) for _, x in sorted(fixed)] + [0] * SLOTS, (17, SLOTS)).max(1)
    assert rows_of_fixed == [SLOTS] * len(rows_of_fixed)
    assert len(rows_of_fixed) == pytest.approx(sum(lengths) / STEPS, abs=17)
    assert {*rows} == {SLOTS}
    assert sum(rows) < 0.75 * sum(rows_of_fixed)


def test_numbers_of_draws_and_prompts_of_a_prefill(monkeypatch):
    """Each token has a draw of its own, here its value. The lengths of prompts add up to exactly
    MOST_STEPS, to one more, and are more than that alone."""
    prefills, setup = [], (None,) * 4

    def prefill(config, params, tokens, segment_ids, ends):
        prefills.append([x for x in np.diff(ends, prepend=0).tolist() if x])
        return np.zeros((1, tokens.size, 1)), [np.zeros(len(ends))]

    def sample(sampling, logits, key, number):
        return jnp.broadcast_to(number, len(logits))

    monkeypatch.setattr(model, "step", lambda config, params, states, token: (token, states))
    monkeypatch.setattr(model, "sample", sample)
    prompts = {n: [1] * size for n, size in enumerate((200, 56, 100, 157, 300, 1, 255), 3)}
    limits = [*range(12, 2, -1)]
    stubs = dict(sample=sample, prefill=prefill, next_logits=lambda config, params, x: x)
    with mock.patch.multiple(server, **stubs):
        for slots in (1, 8):
            answers = server.serve(setup, prompts, limits, set(), slots, STEPS)
            assert dict(answers) == {n: [2**16 * n + t for t in range(limits[n])] for n in prompts}
        parse("--seed=7", "--stream_every=3")
        batch = xlstm_7b.Model(None, {}, {}, {0: [1], 2: [3, 4]}, set(), None)
        tokens = np.vstack([*xlstm_7b.generate(batch, 8)])
    assert prefills[7:-1] == [[200, 56], [100], [157], [300], [1, 255]]
    np.testing.assert_array_equal(tokens, np.add.outer(np.arange(8), [0, 2**17]))
    assert batch.setup()[-1] == jax.random.key(7)


def test_sizes_of_prefills():
    sizes = [*map(server.bucket, (1, 256, 257, 385, 513, 4000, 5000, 6145))]
    assert sizes == [256, 256, 384, 512, 768, 4096, 6144, 8192]


# ---------------- the command


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{text(prompt)}\n\n" for prompt in PROMPTS[:30]))
    return f"--prompts={path}"


def slots_of(number, *others):
    return f"--slots={number}", f"--stream_every={STEPS}", *FLOAT32, *others


def test_answers_are_lines_with_the_number_of_their_prompt(file, tmp_path, capsys, expected):
    path, stop = tmp_path / "answers.jsonl", "--stop_tokens=" + ",".join(map(str, STOP))
    run(HERE, file, stop, *slots_of(SLOTS, f"--output={path}"))
    output, errors = capsys.readouterr()
    rows = benchmark_runs.records(path)
    assert output == ""
    assert re.search("30/30 .*answer/s", errors)
    numbers = [row["prompt"] for row in rows]
    assert sorted(numbers) == [*range(0, 60, 2)] != numbers  # lines between them are empty
    for row in rows:
        assert row["answer"] == text(row["tokens"])
        check_answer(row["tokens"], expected[row["prompt"] // 2], 24, STOP)
    run(HERE, file, stop, *slots_of(SLOTS, "--batching=fixed"))
    output = capsys.readouterr().out
    for row in rows:
        assert f"[{row['prompt']}] {row['answer']}\n" in output


def test_control_c_keeps_the_answers_that_are_there(file, tmp_path, capsys, monkeypatch):
    calls, decode, path = [], server.decode, tmp_path / "answers.jsonl"

    def interrupted(*loop):
        calls.append(loop)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return decode(*loop)

    monkeypatch.setattr(server, "decode", interrupted)
    assert exit_code(HERE, file, *slots_of(SLOTS, f"--output={path}")) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert len(benchmark_runs.records(path)) == SLOTS


def test_both_batchings_are_measured_with_random_prompts(capsys, monkeypatch):
    """The second run of each, which takes 2 s."""
    device, seconds = benchmark_runs.Device(monkeypatch, xlstm_7b), iter((9.0, 2.0) * 2)
    asked = []

    def serve(setup, prompts, limits, *options):
        assert {*map(len, prompts.values())} == {*range(5, 51)}
        assert {*limits} == {*range(3, 25)}
        asked.append(options)
        device.now += next(seconds)
        return [(0, [1, 2, 3]), (1, [4])]

    monkeypatch.setattr(xlstm_7b, "serve", serve)
    monkeypatch.setattr(xlstm_7b, "load", lambda *_: {})
    sizes = "--batch=999", "--prompt_length=50", "--spread=10"
    run("--random", "--benchmark", "--size=tiny", *sizes, *slots_of(SLOTS))
    rows = [*map(json.loads, capsys.readouterr().out.splitlines())]
    for row, batching in zip(rows, ("fixed", "continuous"), strict=True):
        figures = dict(batch=999, new_tokens=4, seconds=2.0, tokens_per_s=2.0)
        assert row == row | dict(batching=batching, slots=SLOTS, **figures)
    assert asked == [(set(), SLOTS, STEPS, x) for x in (False, False, True, True)]
