"""The benchmark of a server's day: times of tokens, requests, answers that lack tokens."""

import contextlib

import benchmark_runs
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
    (2.0, 3, [9], False),
    (1.0, 3, [8, 8], False),
    (1.0, 3, [], False),
    (1.0, 4, [7], True),
    (1.0, 3, [1], True),
)
LIMITS = [8, 1, 3, 4, 1]


def measured(monkeypatch, first, limits=LIMITS, slots=2, peak=()):
    """A row of so many clients and loops of 4 calls."""
    device, row = benchmark_runs.Device(monkeypatch, benchmark), {}
    monkeypatch.setattr(benchmark.profiles, "peak_memory", lambda: contextlib.nullcontext(peak))

    def answer():
        for seconds, *part in PARTS:
            device.now += seconds
            yield part

    benchmark.measure(row, answer, limits, slots, 4, first)
    return row


def test_times_to_first_tokens_are_from_the_answer_before(monkeypatch):
    """Requests 2, 3 and 4 are sent when answers 1, 0 and 2 have ended, after 2, 6 and 10 s, and
    have a token after 4.5, 12 and 15 s. Of the tokens of loops only those of answers that go on
    count per call."""
    first = {0: [5, 7, 8, 9, 1, 2, 3, 1], 1: [6], 2: [4, 4, 5], 3: [9, 8, 8, 1], 4: [7]}
    row = measured(monkeypatch, first, peak=[3 * 2**20])
    figures = dict(ms=16e3, new_tokens=17, tokens_per_s=17 / 16, requests=5, same_pct=80)
    figures |= dict(first_token_ms=5e3, first_token_95_ms=5e3 + 0.9 * 1e3, peak_mib=3.0)
    benchmark_runs.assert_row(row, **figures, tokens_per_call=(6 / 4 + 2 / 4 + 0) / 3)
    assert first[2] == [4, 4, 5]


def test_figures_of_fewer_requests_than_clients(monkeypatch):
    """Then the first tokens are those of first requests. A device may not tell its memory."""
    first = {}
    row = measured(monkeypatch, first, slots=5)
    benchmark_runs.assert_row(row, first_token_ms=4.5e3, same_pct=100)
    assert row["peak_mib"] is None
    assert [*map(len, first.values())] == LIMITS


@pytest.mark.parametrize(("n", "tokens"), [(0, 7), (3, 5), (5, 1)])
def test_an_answer_with_other_tokens_is_wrong(n, tokens, monkeypatch):
    limits = [*LIMITS, 0]
    limits[n] = tokens
    with pytest.raises(runner.WrongOutputError, match=f"answer {n} has not {tokens} tokens"):
        measured(monkeypatch, {}, limits)


def test_time_between_tokens_beside_a_long_prompt(monkeypatch):
    """The second run counts, between loops of 2 tokens for each of two answers. They are 1 s apart
    without the long prompt, which is number 2, and up to its first token 1, 8 and 2 s in turns."""
    device, rows = benchmark_runs.Device(monkeypatch, benchmark), [{}, {}]
    runs = iter((50.0, 1.0, 50.0, 1.0))

    def answer(times, ended=()):
        scale = next(runs)
        yield from ((n, [1], False) for n in (0, 1))
        for seconds in times:
            device.now += scale * seconds
            yield from ((n, [1, 1], False) for n in (0, 1))
        yield from ((n, [1], True) for n in ended)
        device.now += 100.0
        yield 0, [], False  # a loop may have no token of an answer

    benchmark.measure_gaps(rows[0], lambda: answer([1.0] * 66), None, None)
    some = [9.0, *[1.0, 8.0, 2.0] * 25]
    benchmark.measure_gaps(rows[1], lambda: answer(some, [2]), 2, rows[0])
    benchmark_runs.assert_row(rows[0], token_ms=500.0, token_95_ms=500.0, ms=65e3)
    figures = dict(token_ms=1e3, token_95_ms=4000.0, token_95_ratio=8.0)
    benchmark_runs.assert_row(rows[1], **figures, ms=284e3, first_token_ms=284e3)
