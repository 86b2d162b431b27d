"""examples/xlstm_server.py and its flags of xlstm_7b.py: more prompts than slots."""

import itertools
import json
from unittest import mock

import benchmark_runs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xlstm_7b
import xlstm_model as model
import xlstm_server as server
from test_xlstm_7b import FLOAT32, GREEDY, HERE, PROMPTS, exit_code, read, run, text

SLOTS, STEPS, COUNT = 12, 4, 60
STOP = 18, 88


@pytest.fixture(scope="module", autouse=True)
def one_length():
    with mock.patch.object(server, "MOST_STEPS", server.FEWEST_STEPS):
        yield


def collected(parts):
    """The answers by their numbers; each ends once, with its last tokens."""
    answers, ended = {}, []
    for n, tokens, last in parts:
        assert n not in ended
        answers.setdefault(n, []).extend(tokens)
        ended += [n] * last
    assert sorted(ended) == sorted(answers)
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True], ids=["two_devices", "long_prompts"])
def test_cached_beginnings_and_drafts_change_no_token(long, monkeypatch):
    """The prompts of 64 and 130 tokens have one and four blocks of 32. With two prompts a prefill
    keeps the states of the first one while it reads the second one's; of three entries those used
    last stay, which are all that the same prompts need again.

    long: the one of 130 tokens is read in pieces of 32, which are its blocks in the cache, and the
    next time behind these."""
    config, params = read(devices=1 if long else 2)
    values = dict(BLOCK=32, MOST_PROMPTS=2) | (dict(MOST_STEPS=64) if long else {})
    for name, value in values.items():
        monkeypatch.setattr(server, name, value)
    cache = server.PrefixCache(config, params, 5 if long else 3)
    setup = config, params, model.Sampling(), jax.random.key(0)
    order, limits = (2, 3, 1, 0, 2, 3), [24, 9, 1, 14, 7, 20]
    if long:
        order, limits = (3, 2, 1, 3, 0), [20, 9, 24, 14, 7]
    prompts = {n: PROMPTS[m].tolist() for n, m in enumerate(order)}
    expected = {n: GREEDY[m][: limits[n]].tolist() for n, m in enumerate(order)}
    for continuous in (True, False) if long else (True,):
        options = dict(draft=3, cache=cache)
        answers = server.serve(setup, prompts, limits, set(), 2, STEPS, continuous, **options)
        assert collected(answers) == expected
    assert cache.blocks_read == 4 + 1  # the blocks of 130 and 64 tokens, once
    assert len(cache.rows) == (5 if long else 3)


def test_pieces_of_a_long_prompt_take_a_share_of_the_time(monkeypatch):
    """A piece takes one second and a loop ten: once this is known, four come between two loops. Of
    15 pieces the last one starts the answer. A prompt is read at once if no answer goes on."""
    device, events = benchmark_runs.Device(monkeypatch, server), []

    def prefill(config, params, tokens, segment_ids, ends, initial=None, into=None):
        device.call(1.0 if into is None else 0.0)
        events.append(tokens.shape[1] if into is None else "start")
        return np.zeros((1, tokens.size, 1)), initial[0] if into is None else into[0]

    def decode(config, sampling, steps, params, states, token, key, numbers):
        device.wait()  # a loop begins behind the prefills
        events.append("loop")
        return states, token, Loop((steps, len(token)))

    class Loop:
        def __init__(self, shape):
            self.tokens = np.zeros(shape, int)

        def __array__(self, dtype=None, copy=None):
            device.now += 10.0
            return self.tokens

    stubs = dict(prefill=prefill, decode=decode, next_logits=lambda config, params, x: x)
    stubs |= dict(empty_states=lambda *_, **__: np.zeros(4))
    stubs |= dict(sample=lambda sampling, logits, key, number: jnp.zeros(len(logits), int))
    setup = model.Config(), None, None, None
    with mock.patch.multiple(server, **stubs):
        prompts, limits = {0: [1], 1: [1] * 64 * 15, 2: [1], 3: [1] * 640}, [24, 1, 1, 1]
        answers = collected(server.serve(setup, prompts, limits, set(), 2, STEPS))
    assert [len(answers[n]) for n in range(4)] == limits
    each = "".join(map(str, events)).replace("64", "-").split("loop")
    assert each == ["start-", "-", "----", "----", "----start", "start", 9 * "-" + "start", ""]


# ---------------- the command


def request(*others):
    """Each of transformers' prompts, again and again."""
    prompts = (f"--prompt={text(PROMPTS[n % 4])}" for n in range(COUNT))
    return HERE, *prompts, *FLOAT32, f"--slots={SLOTS}", f"--stream_every={STEPS}", *others


@pytest.mark.slow
def test_answers_are_those_of_transformers(tmp_path, capsys):
    """Up to a stop token, after 5, 9, 17 and 24 tokens, with the number of the prompt."""
    path, loops = tmp_path / "answers.jsonl", []
    stop, expected = "--stop_tokens={},{}".format(*STOP), []
    for n in range(COUNT):
        tokens = [*itertools.takewhile(lambda x: x not in STOP, GREEDY[n % 4].tolist())]
        expected.append(dict(prompt=n, answer=text(tokens), tokens=tokens))
    for batching in ("continuous", "fixed"):
        with mock.patch.object(server, "decode", wraps=model.decode) as decode:
            run(*request(stop, f"--batching={batching}", f"--output={path}"))
        assert {len(call.args[5]) for call in decode.call_args_list} == {SLOTS}
        loops.append(decode.call_count)
        output, errors = capsys.readouterr()
        assert output == ""
        assert f"{COUNT}/{COUNT} " in errors
        rows = benchmark_runs.records(path)
        assert sorted(rows, key=lambda row: row["prompt"]) == expected != rows
    batches = [row["prompt"] // SLOTS for row in rows]  # of fixed ones
    assert batches == sorted(batches)
    assert loops[1] == COUNT / SLOTS * 24 / STEPS
    assert loops[0] < 0.8 * loops[1]
    run(*request(stop))
    printed = capsys.readouterr().out
    assert all(f"[{row['prompt']}] {row['answer']}\n" in printed for row in expected)


@pytest.mark.slow
def test_control_c_keeps_the_answers_that_are_there(tmp_path, capsys):
    path, calls = tmp_path / "answers.jsonl", [*[mock.DEFAULT] * 8, KeyboardInterrupt]
    with mock.patch.object(server, "decode", wraps=model.decode, side_effect=calls):
        assert exit_code(*request(f"--output={path}")) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert len(benchmark_runs.records(path)) == SLOTS


def test_both_batchings_are_measured_with_random_prompts(capsys, monkeypatch):
    """The second run of each, which takes 2 s."""
    device, seconds = benchmark_runs.Device(monkeypatch, xlstm_7b), iter((9.0, 2.0) * 2)
    asked = []

    def serve(setup, prompts, limits, *options, draft, cache):
        assert {*map(len, prompts.values())} == {*range(5, 51)}
        assert {*limits} == {*range(3, 25)}
        asked.append(options)
        device.now += next(seconds)
        return [(0, [1], False), (1, [4], True), (0, [2, 3], True)]

    monkeypatch.setattr(xlstm_7b, "serve", serve)
    monkeypatch.setattr(xlstm_7b, "load", lambda *_: {})
    sizes = "--batch=999", "--prompt_length=50", "--spread=10", "--size=tiny", "--new_tokens=24"
    run("--random", "--benchmark", *sizes, f"--slots={SLOTS}", f"--stream_every={STEPS}")
    rows = [*map(json.loads, capsys.readouterr().out.splitlines())]
    for row, batching in zip(rows, ("fixed", "continuous"), strict=True):
        figures = dict(batch=999, new_tokens=4, seconds=2.0, tokens_per_s=2.0)
        assert row == row | dict(batching=batching, slots=SLOTS, **figures)
    assert asked == [(set(), SLOTS, STEPS, x) for x in (False, False, True, True)]
