"""examples/xlstm_server.py and its flags of xlstm_7b.py: more prompts than slots."""

import concurrent.futures
import contextlib
import gc
import http.client
import itertools
import json
import re
import socket
import threading
import time
from pathlib import Path
from unittest import mock

import benchmark_runs
import jax
import numpy as np
import pytest
import uvicorn
import xlstm_7b
import xlstm_model as model
import xlstm_server as server
from test_xlstm_7b import FLOAT32, GREEDY, HERE, PROMPTS, exit_code, read, run, text

SLOTS, STEPS, COUNT = 12, 4, 60
STOP = 18, 88
COMPILED = []  # the events of compilations
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILED.append(event) if "backend_compile" in event else None
)


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


# ---------------- an engine


def small_engine(slots, **options):
    config, params = read()
    setup = config, params, model.Sampling(), jax.random.key(0)
    return server.Engine(setup, slots, STEPS, to_text=text, **options)


@contextlib.contextmanager
def listening(application):
    """The port of 127.0.0.1 where it answers."""
    config = uvicorn.Config(application, log_level="error", lifespan="off", ws="none")
    web, bound = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=web.run, args=([bound],))
    thread.start()
    try:
        yield bound.getsockname()[1]
    finally:
        web.should_exit = True
        thread.join(60)
        bound.close()


def post(port, most=None, **body):
    """The text and the end of an answer, or of so many lines: then the client leaves."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", "/", json.dumps(body))
        if most == 0:
            return None
        with connection.getresponse() as response:
            lines = [json.loads(line) for line in itertools.islice(response, most)]
        return "".join(line["text"] for line in lines), lines[-1]["ended"]


@pytest.mark.slow
def test_clients_of_a_network_come_and_go():
    """With the code of the page. Two of eight clients leave, one of them before it has read a line,
    and a ninth has a long prompt. The others have the answers that serve gives."""
    page = Path(server.__file__).parents[1] / "docs/examples/xlstm_server.md"
    names, cancelled = {}, []
    exec(re.search("```python\n(.*?)```", page.read_text(), re.S)[1], names)
    engine = small_engine(4)
    cancel = engine.cancel
    engine.cancel = lambda id: cancelled.extend([id] * cancel(id))
    engine.warm_up()
    prompts = {n: PROMPTS[n % 4].tolist() for n in range(6)} | {6: 100 * PROMPTS[1].tolist()}
    assert len(prompts[6]) > 2 * server.MOST_STEPS
    limits = [24] * 6 + [9]
    expected = collected(server.serve(engine.setup, prompts, limits, set(), 2, STEPS))
    requests = [dict(prompt=text(prompts[n]), limit=limits[n]) for n in prompts]
    ends = [(text(expected[n]), "length") for n in prompts]
    for n in range(3):
        stop = ends[n][0][9:11]
        requests[n]["stop"] = ["\0", stop]
        ends[n] = ends[n][0].partition(stop)[0], "stop"
    leaver = dict(prompt=text(PROMPTS[2]), limit=server.MOST_TOKENS)
    application = names["application"](engine, lambda text: [*map(ord, text)])
    with listening(application) as port, concurrent.futures.ThreadPoolExecutor(9) as pool:
        assert "limit=0, expected 1" in post(port, prompt="a", limit=0)[1]
        leavers = [pool.submit(post, port, most, **leaver) for most in (2, 0)]
        answers = [pool.submit(post, port, **request) for request in requests]
        assert [x.result() for x in answers] == ends
        assert [x.result() for x in leavers] == [mock.ANY, None]
        until = time.monotonic() + 60
        while engine.pending and time.monotonic() < until:
            time.sleep(0.01)
    assert len(cancelled) in (1, 2)  # a request that was not read yet is not there
    assert not any([engine.requests, engine.waiting, engine.busy, engine.long])


@pytest.mark.slow
@pytest.mark.parametrize(("entries", "draft"), [(0, 0), (4, 3)])
def test_nothing_is_compiled_after_a_warm_up(entries, draft, monkeypatch):
    for name, value in dict(MOST_STEPS=64, FEWEST_STEPS=32, BLOCK=32, MOST_PROMPTS=3).items():
        monkeypatch.setattr(server, name, value)
    monkeypatch.setitem(server.PIECES, "cpu", 16)
    cache = server.PrefixCache(*read(), entries) if entries else None
    engine = small_engine(4, capacity=300, draft=draft, cache=cache)
    engine.warm_up()
    compiled, draw = COMPILED.copy(), np.random.default_rng(draft)
    for size in (*range(1, 200, 5), 64, 65, 128, 129, 290):
        engine.add(draw.integers(128, size=size), 1 + size % 9)
        if draw.integers(2):
            engine.step()
    assert {part.ended for part in engine.run()} == {"", "length"}
    assert compiled == COMPILED


@pytest.mark.slow
def test_memory_does_not_grow_with_requests():
    """Neither on the host nor on the device."""
    engine, used = small_engine(SLOTS), []
    for count in (200, 1000, 1000):
        ended = 0
        for n in range(count):
            id = engine.add(PROMPTS[2][: 1 + n % 9], 1 + n % 6, stop="ab")
            if n % 9 == 0:
                engine.cancel(id - n % 20)
            while len(engine.requests) > 2 * SLOTS or (n == count - 1 and engine.pending):
                ended += sum(part.ended != "" for part in engine.step())
        assert ended == count
        gc.collect()
        used.append((len(jax.live_arrays()), len(gc.get_objects())))
    assert np.all(np.abs(np.subtract(used[2], used[1])) < (4, 100)), used


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
    run(*request("--stop='I", "--stop=zz", f"--output={path}"))  # which three of the four have
    for row in benchmark_runs.records(path):
        assert row["answer"] == text(GREEDY[row["prompt"] % 4]).partition("'I")[0]
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
