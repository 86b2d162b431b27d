"""examples/xlstm_server.py and its flags of xlstm_7b.py: more prompts than slots."""

import functools
import json
import re
from pathlib import Path
from unittest import mock

import benchmark_runs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_xlstm_7b import CONFIG, FLOAT32, FOLDER, ROUNDING, error, exit_code, loaded, run, text

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


def served(params, *, slots=SLOTS, prompts=PROMPTS, **options):
    """The answers, and the rows of each loop."""
    setup, rows, decode = (CONFIG, params, model.Sampling(), jax.random.key(0)), [], model.decode

    def counted(*loop):
        rows.append(len(loop[5]))
        return decode(*loop)

    with mock.patch.object(server, "decode", counted):
        return [*server.serve(setup, prompts, LIMITS, STOP, slots, STEPS, **options)], rows


def test_each_of_200_answers_is_the_answer_alone(params, expected):
    (continuous, rows), (fixed, rows_of_fixed) = (
        served(params, continuous=x) for x in (True, False)
    )
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


def test_one_slot(params, expected):
    for n, tokens in served(params, slots=1, prompts=PROMPTS[:6])[0]:
        check_answer(tokens, expected[n], LIMITS[n], STOP)


def test_sizes_of_prefills():
    sizes = [*map(server.bucket, (1, 256, 257, 385, 513, 4000, 5000, 6145))]
    assert sizes == [256, 256, 384, 512, 768, 4096, 6144, 8192]


# ---------------- the command


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{text(prompt)}\n" for prompt in PROMPTS[:30]))
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
    assert sorted(row["prompt"] for row in rows) == [*range(30)]
    assert [row["prompt"] for row in rows] != [*range(30)]
    for row in rows:
        assert row["answer"] == text(row["tokens"])
        check_answer(row["tokens"], expected[row["prompt"]], 24, STOP)
    run(HERE, file, stop, *slots_of(SLOTS, "--batching=fixed"))
    output = capsys.readouterr().out
    for row in rows:
        assert f"[{row['prompt']}] {row['answer']}\n" in output


@pytest.mark.slow
def test_draws_do_not_depend_on_the_slots(file, capsys):
    outputs = []
    for slots in (3, SLOTS):
        run(HERE, file, *slots_of(slots, "--temperature=0.9", "--new_tokens=9"))
        outputs.append(sorted(re.split(r"^(?=\[\d+\] )", capsys.readouterr().out, flags=re.M)))
    assert outputs[0] == outputs[1]


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


@pytest.mark.slow
def test_both_batchings_are_measured_with_random_prompts(capsys, monkeypatch):
    monkeypatch.setitem(xlstm_7b.SIZES, "tiny", CONFIG)
    sizes = "--batch=40", "--prompt_length=50", "--spread=10"
    run("--random", "--benchmark", "--size=tiny", *sizes, *slots_of(SLOTS))
    fixed, continuous = map(json.loads, capsys.readouterr().out.splitlines())
    assert [row["batching"] for row in (fixed, continuous)] == ["fixed", "continuous"]
    for row in (fixed, continuous):
        benchmark_runs.assert_row(row, slots=SLOTS, batch=40, new_tokens=fixed["new_tokens"])
        assert 5 * 40 < row["prompt_tokens"] < 50 * 40
        assert 3 * 40 < row["new_tokens"] < 24 * 40
        assert row["tokens_per_s"] == row["new_tokens"] / row["seconds"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--slots=0", "--slots=0"),
        ("--slots=two", "slots"),
        ("--batching=some", "batching"),
        ("--prompts=/no/such/file", "--prompts: cannot read /no/such/file"),
        (f"--prompts={Path('/dev/null')}", "no prompt: give --prompt, or --prompts=FILE"),
        ("--prompt=a --prompt=", "prompt 1 has no token"),
        ("--prompt=a --output=/no/such/folder/file", "--output: "),
    ],
)
def test_wrong_flags_are_named(arguments, message):
    assert message in error(HERE, "--slots=2", *FLOAT32, *arguments.split())
