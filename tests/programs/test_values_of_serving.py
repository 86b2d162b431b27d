"""xlstm_server.py and the loops of xlstm_7b.py, with a model in NumPy whose tokens a loop of a few
lines tells: which tokens an answer has, whatever its prompt shares slots, prefills, pieces, a cache
and drafts with."""

import functools
import itertools
import sys

import benchmark_runs
import numpy as np
import pytest
import server_benchmark
import xlstm_7b
import xlstm_checkpoint as checkpoint
import xlstm_server as server
from test_xlstm_7b import parse
from xlstm_model import NO_TOKEN, Config, Sampling

VOCABULARY, PRIME = 101, 32749
BAD, STOP = 100, {3, 50}  # what stands for logits that are not finite, and tokens to stop at
PREFILLS = set()  # their steps


class NotFiniteError(Exception):
    """Of the texts by the numbers of their prompts."""


def after(state, token):
    """The state of a prompt, a number that tells all of its tokens in their order."""
    return (37 * state + token + 1) % PRIME


def next_token(state, number=0):
    token = (state + number) % VOCABULARY
    return np.where(token == BAD, NO_TOKEN, token)


def expected(n, prompt, limit, stop=STOP, drafts=False):
    """The tokens of an answer, and whether logits that are not finite have ended it. With drafts no
    token is drawn but the first."""
    state, answer = functools.reduce(after, prompt, 0), []
    for t in range(limit):
        number = 0 if drafts and t else server.MOST_TOKENS * (n % 2**16) + t
        token = int(next_token(state, number))
        if token == NO_TOKEN or token in stop:
            return answer, token == NO_TOKEN
        answer.append(token)
        state = after(state, token)
    return answer, False


def prefill(config, params, tokens, lengths, initial=None, into=None):
    """As xlstm_model's, whose x has the states here. A row of the pool is written once."""
    (states,), rows = initial or ([np.zeros(len(lengths), int)], np.arange(len(lengths)))
    (pool,), where = into or ([np.zeros(len(lengths), int)], np.arange(len(lengths)))
    pool, where = pool.copy(), np.asarray(where)
    written = where[where < len(pool)]
    assert len({*written}) == len(written)
    (tokens,), begin, x = tokens, 0, np.zeros(tokens.size, int)
    assert sum(lengths) <= len(tokens)
    PREFILLS.add(len(tokens))
    for n, end in enumerate(np.cumsum(lengths)):
        state = states[rows[n]]
        for t in range(begin, end):
            x[t] = state = after(state, tokens[t])
        if where[n] < len(pool):
            pool[where[n]] = state
        begin = end
    return x[None], [pool]


def decode(config, sampling, steps, params, states, token, key, number):
    (state,), tokens = states, []
    for t in range(steps):
        state = after(state, token)
        token = next_token(state, number + t)
        tokens.append(token)
    return [state], token, np.array(tokens)


class Drafts:
    """As xlstm_model's speculate: of the drafts of a row a random number are right. What is written
    beyond the end of a text goes to its last places, as dynamic_update_slice does it."""

    def __init__(self, seed):
        self.draw, self.sizes = np.random.default_rng(seed), set[int]()

    def __call__(self, config, calls, T, params, states, text, length, accepted):
        (state,), text, length = (states[0].copy(),), np.array(text), np.array(length)
        accepted = np.zeros_like(length)
        self.sizes.add(T)
        for row in np.tile(np.arange(len(text)), calls):
            count = self.draw.integers(1, T, endpoint=True)
            token = text[row, min(length[row], text.shape[1]) - 1]
            likeliest = self.draw.integers(VOCABULARY, size=T)
            for t in range(count):
                state[row] = after(state[row], token)
                likeliest[t] = token = next_token(state[row])
            begin = min(length[row], text.shape[1] - T)
            text[row, begin : begin + T] = likeliest
            length[row], accepted[row] = length[row] + count, count
        return [state], text, length, accepted


def empty_states(config, params, B, dtype=None, rings=False):
    return [np.zeros(B, int)]


def put_rows(pool, rows, values):
    def put(x, y):
        x, inside = x.copy(), rows < len(x)
        x[rows[inside]] = np.asarray(y)[inside]
        return x

    return [*map(put, pool, values)]


@pytest.fixture(autouse=True)
def small_model(monkeypatch):
    stubs = dict(
        prefill=prefill,
        decode=decode,
        speculate=Drafts(0),
        put_rows=put_rows,
        take_rows=lambda pool, rows: (
            [x[rows] for x in pool] if isinstance(pool, list) else pool[rows]
        ),
        empty_states=empty_states,
        next_logits=lambda config, params, x: x,
        sample=lambda sampling, logits, key, number: next_token(logits, number),
        with_texts=with_texts,
        not_finite_error=lambda config, params, texts: NotFiniteError(texts),
        MOST_STEPS=64,
        MOST_PROMPTS=3,
        BLOCK=16,
        FEWEST_STEPS=32,
    )
    for module, (name, value) in itertools.product((server, xlstm_7b), stubs.items()):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)
    monkeypatch.setitem(server.PIECES, "cpu", 8)


def with_texts(texts, lengths, token):
    texts = texts.copy()
    texts[np.arange(len(texts)), lengths] = token
    return texts, lengths + 1, np.zeros_like(lengths)


def served(prompts, limits, slots, steps, continuous=True, stop=STOP, entries=0, draft=0, **more):
    """The answers, and those that logits which are not finite have ended, of a number of loops."""
    setup = Config(vocab_size=VOCABULARY), dict(embeddings=np.zeros(1)), Sampling(), None
    cache = server.PrefixCache(*setup[:2], entries) if entries else None
    options = dict(draft=draft, cache=cache, rings=draft > 0) | more
    PREFILLS.clear()
    answers, ended, failed = {n: [] for n in prompts}, [], {}
    parts = server.serve(setup, prompts, limits, stop, slots, steps, continuous, **options)
    try:
        for n, tokens, last in itertools.islice(parts, 10_000):
            assert n not in ended
            answers[n] += tokens
            ended += [n] * last
    except NotFiniteError as error:
        for n, text in error.args[0].items():
            assert text == prompts[n] + answers[n]
            failed[n] = answers.pop(n)
    assert sorted(ended) == sorted(answers)
    # Few sizes are compiled: those of pieces and blocks, and buckets.
    assert PREFILLS.issubset((8, 16, 32, 48, 64, 96, 128))
    if cache:
        assert sorted([*cache.rows.values(), *cache.free]) == [*range(1, 1 + entries)]
    return answers, failed


def check(prompts, limits, *args, stop=STOP, draft=0, **options):
    answers, failed = served(prompts, limits, *args, stop=stop, draft=draft, **options)
    for n, prompt in prompts.items():
        answer, is_bad = expected(n, prompt, limits[n], stop, draft > 0)
        assert (failed if is_bad else answers)[n] == answer, n
    assert len(answers) + len(failed) == len(prompts)
    assert server.speculate.sizes == ({1 + draft} if draft else set())


def random_prompts(seed, count=12, longest=220):
    """Some begin as others do, some are longer than two prefills, and numbers are left out."""
    draw = np.random.default_rng(seed)
    stem = draw.integers(VOCABULARY, size=longest).tolist()
    prompts = {}
    for n in range(0, 2 * count, 2):
        size = int(draw.choice([draw.integers(1, 40), draw.integers(40, longest), 64, 65, 17, 16]))
        same = int(draw.integers(size)) * int(draw.integers(2))
        prompts[n] = stem[:same] + draw.integers(VOCABULARY, size=size - same).tolist()
    limits = draw.integers(1, 30, 2 * count).tolist()
    return prompts, limits


@pytest.mark.parametrize("draft", [0, 1, 3])
@pytest.mark.parametrize("entries", [0, 4, 40])
@pytest.mark.parametrize("continuous", [True, False], ids=["continuous", "fixed"])
def test_answers_do_not_depend_on_what_runs_beside_them(continuous, entries, draft):
    for seed, (slots, steps) in enumerate(((1, 1), (2, 3), (5, 4), (12, 5))):
        prompts, limits = random_prompts(10 * draft + seed)
        check(prompts, limits, slots, steps, continuous, entries=entries, draft=draft)


# ---------------- requests that come and go


# The bytes of tokens: letters of strings to stop at, and parts of characters.
BYTES = b"a", b"b", b"aab", b"", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"ab", b"c"
STRINGS = "aab", "ab", "abab", "aaab", "é", "cé", "€a", "bc", "c", "abcabc", "\ufffda", "ba"


def to_text(tokens):
    return b"".join(BYTES[x % len(BYTES)] for x in tokens).decode(errors="replace")


def cut(answer, stop):
    """Tokens and text up to the string that is complete first, and whether there is one."""
    text = to_text(answer)
    for end in range(len(text) + 1):
        if lengths := [len(x) for x in stop if text[:end].endswith(x)]:
            known = (len(to_text(answer[:n]).rstrip("\ufffd")) for n in range(len(answer)))
            count = next((n for n, size in enumerate(known) if size >= end), len(answer))
            return answer[:count], text[: end - max(lengths)], True
    return answer, text, False


@pytest.mark.parametrize(
    ("stop", "parts", "shown", "held"),
    [
        (["aab"], "aa a b c", ["", "a", ""], ""),
        (["aab"], "a a c a", ["", "", "aac", ""], "a"),
        (["ab", "abc"], "xa bc", ["x", ""], ""),
        (["abcd", "bc"], "a b c", ["", "", "a"], ""),
        (["bc", "abc"], "xab c", ["x", ""], ""),
        (["b"], "aab", ["aa"], ""),
        ([], "aa é", ["aa", "é"], ""),
    ],
)
def test_strings_to_stop_at_are_held_back(stop, parts, shown, held):
    """The parts are tokens of one byte each."""
    text = server.Text(lambda tokens: bytes(tokens).decode(errors="replace"), stop)
    parts = [[*x.encode()] for x in parts.split()]
    seen = [text.add(part)[1] for part in parts if not text.stopped]
    assert (seen, text.end()) == (shown, held)


def test_the_text_of_a_token_depends_on_those_before_it():
    text = server.Text(lambda tokens: " ".join(map(str, tokens)), ["3 4"])
    assert [text.add([x]) for x in (12, 5, 3)] == [([12], "12"), ([5], " 5"), ([3], " ")]
    assert text.add([41, 7]) == ([41], "")


@pytest.mark.parametrize("draft", [0, 3])
@pytest.mark.parametrize("entries", [0, 4])
@pytest.mark.parametrize("continuous", [True, False], ids=["continuous", "fixed"])
def test_requests_that_come_and_go(continuous, entries, draft):
    """Each has the tokens and the text that it has alone, up to where it is cancelled. With ids
    beyond 2^16 draws are those of smaller ones."""
    setup = (
        Config(vocab_size=VOCABULARY),
        dict(embeddings=np.zeros(1), blocks=[0]),
        Sampling(),
        None,
    )
    ends = set()
    for seed, (slots, steps) in enumerate(2 * ((1, 1), (2, 3), (5, 4), (12, 5))):
        draw, cancelled = np.random.default_rng(100 * draft + seed), set()
        cache = server.PrefixCache(*setup[:2], entries) if entries else None
        options = dict(capacity=250, to_text=to_text, draft=draft, cache=cache)
        engine = server.Engine(setup, slots, steps, continuous, **options)
        requests, parts = {}, {}
        if seed % 2:
            engine.warm_up()

        def step(engine=engine, parts=parts):
            for part in engine.step():
                assert not parts[part.id] or not parts[part.id][-1].ended
                parts[part.id].append(part)

        for prompt in random_prompts(seed, count=40)[0].values():
            id = int(draw.integers(2**17)) if draw.integers(4) == 0 else None
            stop = draw.choice(STRINGS, draw.integers(4), replace=False).tolist()
            request = prompt, int(draw.integers(1, 30)), [*STOP][: draw.integers(3)], stop
            requests[id := engine.add(*request, id)] = request
            parts[id] = []
            for _ in range(draw.integers(4)):
                step()
            if draw.integers(3) == 0:
                id = int(draw.choice([*requests]))
                running = not (parts[id] and parts[id][-1].ended) and id not in cancelled
                assert engine.cancel(id) == running
                cancelled |= {id} if running else set()
                assert id not in {*engine.requests, *engine.waiting, *engine.busy.values()}
        while engine.pending:
            step()
        assert not any([engine.requests, engine.waiting, engine.busy, engine.long])
        for id, (prompt, limit, stop_tokens, stop) in requests.items():
            tokens = [x for part in parts[id] for x in part.tokens]
            text = "".join(part.text for part in parts[id])
            whole, is_bad = expected(id, prompt, limit, stop_tokens, draft > 0)
            answer, shown, stopped = cut(whole, stop)
            ended = "not finite" if is_bad else "length" if len(whole) == limit else "stop"
            ends.add(last := parts[id][-1].ended)
            if id in cancelled:
                assert last == "cancelled"
                answer, shown, _ = cut(answer[: len(tokens)], stop)
            else:
                assert last == ("stop" if stopped else ended)
            assert (tokens, text) == (answer, shown)
    assert ends >= {"stop", "length", "cancelled"}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (dict(prompt=[]), "prompt is empty"),
        (dict(prompt=[1, VOCABULARY]), "a token that is not in 0 to 100"),
        (dict(prompt=[-1]), "a token that is not in 0 to 100"),
        (dict(limit=0), "limit=0, expected 1 to 65536"),
        (dict(limit=19), r"prompt and limit have 2 \+ 19 tokens, more than capacity=20"),
        (dict(stop=["a", ""]), "expected strings that are not empty"),
        (dict(id=-1), "id=-1 is negative"),
        (dict(id=7), "id=7 is negative, or that of a request that has not ended"),
    ],
)
def test_a_request_that_makes_no_sense_is_an_error(request_, message):
    setup = Config(vocab_size=VOCABULARY), dict(embeddings=np.zeros(1)), Sampling(), None
    engine = server.Engine(setup, 2, 3, capacity=20, to_text=to_text)
    engine.add([1], 2, id=7)
    with pytest.raises(ValueError, match=message):
        engine.add(**dict(prompt=[1, 2], limit=3) | request_)
    assert [*engine.requests] == [7]
    assert engine.add([1], 2) == 8
    assert not engine.cancel(6)
    assert engine.cancel(7)
    assert not engine.cancel(7)
    assert engine.step()[0] == (7, [], "", "cancelled")


@pytest.mark.parametrize("draft", [0, 1, 7])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_prompt_and_answer_fill_a_bucket(beyond, draft):
    """Or nearly so: drafts beyond the answer have no place in it, but in the text."""
    for size, steps in itertools.product((32, 64, 96), (1, 3, 16)):
        prompts, limits = {0: [7] * (size - 9), 1: [5]}, [9 + beyond, 2]
        check(prompts, limits, 2, steps, stop=set(), draft=draft)


class Late:
    """Tokens of a loop, for which the host waits 10 s."""

    def __init__(self, device, tokens):
        self.device, self.tokens = device, tokens

    def __array__(self, dtype=None, copy=None):
        self.device.now += 10.0
        return self.tokens


def test_pieces_of_a_long_prompt_take_a_share_of_the_time(monkeypatch):
    """A piece takes one second and a loop ten: once this is known, four come between two loops. A
    prompt is read at once if no answer goes on."""
    device, events = benchmark_runs.Device(monkeypatch, server), []

    def reading(*x):
        events.append("start" if x[5:] else "-")
        device.now += 1.0
        return prefill(*x)

    def looping(*x):
        events.append("loop")
        *others, tokens = decode(*x)
        return *others, Late(device, tokens)

    monkeypatch.setattr(server, "prefill", reading)
    monkeypatch.setattr(server, "decode", looping)
    prompts, limits = {0: [1], 1: [1] * 8 * 17, 2: [1], 3: [1] * 8 * 20}, [24, 1, 1, 1]
    check(prompts, limits, 2, 4, stop=set())
    each = "".join(events).split("loop")
    pieces = "-", "----", "----", "----", "--start", "start----", 15 * "-" + "start"
    assert each == ["start-", *pieces, ""]


# ---------------- the day of the server's benchmark


def test_a_day_has_a_row_for_each_case(monkeypatch):
    """The answers, which end at their limits, are the same; without drafts a call adds a token,
    with three one to four."""
    monkeypatch.setattr(sys.modules[__name__], "next_token", lambda state, _=0: state % VOCABULARY)
    weights = dict(embeddings=np.ones((256, 4)), lm_head=np.ones((256, 4)), blocks=[])
    monkeypatch.setattr(checkpoint, "load", lambda *_: weights)
    sizes = "--size=tiny", "--slots=3", "--steps=2", "--tail=20", "--new_tokens=20", "--systems=2"
    request = *sizes, "--requests=9", "--cache=20,0"
    code, rows = benchmark_runs.measured(server_benchmark, *request)
    assert (code, len({(x["text"], x["cache"], x["states"], x["draft"]) for x in rows})) == (0, 8)
    for row in rows:
        assert (row["status"], row["requests"], row["same_pct"]) == ("ok", 9, 100)
        calls = row["tokens_per_call"]
        assert 1 < calls < 4 if row["draft"] else calls == 1


# ---------------- xlstm_7b.py without slots


@pytest.mark.parametrize("draft", [0, 1, 7])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 129, 200])
def test_tokens_of_a_prompt_alone(size, draft):
    """As many as asked for, in the first of all parts one. Longer prompts are read in pieces."""
    prompt = np.random.default_rng(size).integers(VOCABULARY, size=size).tolist()
    for new_tokens in (1, 2, 16, 17, 18, 40):
        parse("--stream_every=4", f"--draft={draft}", f"--new_tokens={new_tokens}")
        answer, is_bad = expected(5, prompt, new_tokens, set(), draft > 0)
        per_call = []
        parts, error = generated({5: prompt}, new_tokens, per_call)
        assert error == ({5: prompt + answer} if is_bad else {})
        assert np.concatenate(parts)[:, 0].tolist() == answer
        assert is_bad or len(answer) == new_tokens
        assert len(parts[0]) == min(1, len(answer))
        if draft and new_tokens > 1 and not is_bad:
            assert 1 <= per_call[-1] <= 1 + draft


def generated(prompts, new_tokens, per_call=None):
    """The parts of tokens, and the prompts that are named where logits are not finite."""
    model = Config(vocab_size=VOCABULARY), {}, dict(embeddings=np.zeros(1)), prompts, set(), None
    parts = []
    try:
        parts.extend(xlstm_7b.generate(xlstm_7b.Model(*model), new_tokens, per_call))
    except NotFiniteError as error:
        return parts, error.args[0]
    return parts, {}
