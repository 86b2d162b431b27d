"""examples/xlstm_server.py and its flags of xlstm_7b.py: more prompts than slots."""

import itertools
import json
from unittest import mock

import benchmark_runs
import jax
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
def test_cached_beginnings_and_drafts_change_no_token(monkeypatch):
    """The prompts of 64 and 130 tokens have one and four blocks of 32. With two prompts a prefill
    keeps the states of the first one while it reads the second one's; of three entries those used
    last stay, which are all that the same prompts need again."""
    config, params = read(devices=2)
    monkeypatch.setattr(server, "BLOCK", 32)
    monkeypatch.setattr(server, "MOST_PROMPTS", 2)
    cache = server.PrefixCache(config, params, 3)
    setup = config, params, model.Sampling(), jax.random.key(0)
    order, limits = (2, 3, 1, 0, 2, 3), [24, 9, 1, 14, 7, 20]
    prompts = {n: PROMPTS[m].tolist() for n, m in enumerate(order)}
    answers = server.serve(setup, prompts, limits, set(), 2, STEPS, draft=3, cache=cache)
    expected = {n: GREEDY[m][: limits[n]].tolist() for n, m in enumerate(order)}
    assert collected(answers) == expected
    assert cache.blocks_read == 4 + 1  # the blocks of 130 and 64 tokens, once
    assert len(cache.rows) == 3


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
        assert f"{COUNT}/{COUNT} " in capsys.readouterr().err
        rows = benchmark_runs.records(path)
        assert sorted(rows, key=lambda row: row["prompt"]) == expected != rows
    assert loops[0] < 0.8 * loops[1] == 0.8 * COUNT / SLOTS * 24 / STEPS
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

    class Engine:
        def __init__(self, *_, **options):
            self.requests = []

        def add(self, *request):
            self.requests.append(request)

        def run(self):
            prompts, limits, *_ = zip(*self.requests, strict=True)
            assert {*map(len, prompts)} == {*range(5, 51)}
            assert {*limits} == {*range(3, 25)}
            device.now += next(seconds)
            parts = (0, [1], "", ""), (1, [4], "", "stop"), (0, [2, 3], "", "length")
            return itertools.starmap(server.Part, parts)

    monkeypatch.setattr(xlstm_7b, "Engine", Engine)
    monkeypatch.setattr(xlstm_7b, "load", lambda *_: {})
    sizes = "--batch=999", "--prompt_length=50", "--spread=10", "--size=tiny", "--new_tokens=24"
    run("--random", "--benchmark", *sizes, f"--slots={SLOTS}")
    rows = [*map(json.loads, capsys.readouterr().out.splitlines())]
    assert [row["batching"] for row in rows] == ["fixed", "continuous"]
    for row in rows:
        benchmark_runs.assert_row(row, slots=SLOTS, new_tokens=4, seconds=2.0, tokens_per_s=2.0)
