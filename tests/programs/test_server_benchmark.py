"""The benchmark of a server's day: times of tokens, requests, answers that lack tokens."""

import types

import benchmark_runs
import jax.numpy as jnp
import numpy as np
import pytest
import runner
import server_benchmark as benchmark

# Seconds until a part of an answer comes, the request, its new tokens, whether it ends.
PARTS = (
    (1.0, 0, [5], False),
    (1.0, 1, [6], True),
    (2.0, 0, [7, 8, 9, 1, 2, 3], False),
    (0.5, 2, [4], False),
    (1.5, 0, [1], True),
    (4.0, 2, [4, 4], True),
    (2.0, 3, [9], True),
)
LIMITS = [8, 1, 3, 1]


def measured(monkeypatch, first, limits=LIMITS):
    """A row of two clients and loops of 4 calls."""
    device, row = benchmark_runs.Device(monkeypatch, benchmark), {}

    def answer():
        for seconds, *part in PARTS:
            device.now += seconds
            yield part

    benchmark.measure(row, answer, limits, 2, 4, first)
    return row


def test_times_to_first_tokens_are_from_the_answer_before(monkeypatch):
    """Requests 2 and 3 are sent when answers 1 and 0 have ended, after 2 and 6 s, and have a token
    after 4.5 and 12 s. Of the tokens of loops only those of answers that go on count per call."""
    first = {0: [5, 7, 8, 9, 1, 2, 3, 1], 1: [6], 2: [4, 4, 5], 3: [9]}
    row = measured(monkeypatch, first)
    figures = dict(ms=12e3, new_tokens=13, tokens_per_s=13 / 12, requests=4, same_pct=75)
    benchmark_runs.assert_row(row, **figures, tokens_per_call=6 / 4)
    assert row["first_token_ms"] == pytest.approx((2500 + 6000) / 2)
    assert row["first_token_95_ms"] == pytest.approx(2500 + 0.95 * 3500)
    assert measured(monkeypatch, {})["same_pct"] == 100
    with pytest.raises(runner.WrongOutputError, match="answer 3 has not 2 tokens"):
        measured(monkeypatch, {}, [8, 1, 3, 2])


def test_time_between_tokens_beside_a_long_prompt(monkeypatch):
    """The second run counts, between loops of 2 tokens for each of two answers. They are 1 s apart
    without the long prompt, which is number 2, and up to its first token 1, 3 and 2 s."""
    device, rows = benchmark_runs.Device(monkeypatch, benchmark), [{}, {}]
    runs = iter((50.0, 1.0, 50.0, 1.0))

    def answer(times, long):
        scale = next(runs)
        yield from ((n, [1], False) for n in (0, 1))
        for seconds in times:
            device.now += scale * seconds
            yield from ((n, [1, 1], False) for n in (0, 1))
        yield from ((n, [1], True) for n in ([2] if long else ()))
        device.now += 100.0
        yield 0, [1, 1], False

    ones, some = [1.0] * 66, [9.0, 1.0, 3.0, 2.0]
    benchmark.measure_gaps(rows[0], lambda: answer(ones, False), None, None)
    benchmark.measure_gaps(rows[1], lambda: answer(some, True), 2, rows[0])
    benchmark_runs.assert_row(rows[0], token_ms=500.0, token_95_ms=500.0, ms=65e3)
    figures = dict(token_ms=1e3, token_95_ms=1500.0, token_95_ratio=3.0)
    benchmark_runs.assert_row(rows[1], **figures, ms=15e3, first_token_ms=15e3)


def test_requests_begin_with_system_prompts():
    """Of 16, 32 and 48 tokens here; 1 to 12 of their own follow, and answers have 3 to 48."""
    options = types.SimpleNamespace(systems=3, requests=500, tail=12, new_tokens=48)
    prompts, limits = benchmark.random_requests(options, 100, 16)
    sizes = {}
    for prompt in prompts.values():
        sizes.setdefault((*prompt[:16],), set()).add(len(prompt))
    ranges = sorted((min(x), max(x)) for x in sizes.values())
    assert ranges == [(16 * n + 1, 16 * n + 12) for n in (1, 2, 3)]
    assert (len(prompts), min(limits), max(limits)) == (500, 3, 48)


def test_a_token_decides_on_the_next_one(monkeypatch):
    """Cycles of four tokens, the last one of two, with weights whose tokens are their own."""
    monkeypatch.setattr(benchmark, "CYCLE", 4)
    weights = benchmark.repeating(dict(embeddings=jnp.eye(6), other=1))
    logits = weights["embeddings"] @ weights["lm_head"].T
    assert np.argmax(logits, axis=1).tolist() == [1, 2, 3, 0, 5, 4]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--cache=0,16"], "--cache"),
        (["--draft=8"], "--draft"),
        (["--states=step", "--draft=3"], "--draft"),
        (["--text=repeated", "--draft=0"], "--text"),
    ],
)
def test_requests_that_make_no_sense(flags, named):
    assert named in benchmark_runs.error_of(benchmark_runs.run, benchmark, *flags)
