"""Runs of the benchmarks, tools and examples in this process, and what their tests compare with."""

import contextlib
import io
import json
import tempfile
from unittest import mock

import command
import jax
import jax.numpy as jnp
import peers
import pytest
import runner
from absl import flags


def parse(example, *arguments):
    """Gives the flags of an example these values, and their defaults to all others."""
    example.FLAGS.unparse_flags()
    for flag in example.FLAGS:
        example.FLAGS[flag].unparse()
    example.FLAGS([example.__name__, *arguments])


def run(program, *arguments):
    """The exit code of a program (its module) with these flags, where a batch is one call."""
    if hasattr(program, "FLAGS"):
        parse(program)
        return program.main([program.__name__, *arguments])
    values = flags.FlagValues()
    program.define_flags(command.Define(values))
    with mock.patch.object(runner, "MAX_CALLS", 1):
        return command.run(
            [program.__name__, *arguments], values, program.run, about=program.__doc__
        )


def error_of(call, *arguments, code=2, **options):
    """The one line on stderr with which a program ends; call: returns its exit code."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        assert call(*arguments, **options) == code
    *before, line = stderr.getvalue().splitlines()
    assert code == 1 or not before
    return line


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(program, *arguments):
    """The exit code and the rows of a run."""
    with tempfile.NamedTemporaryFile("r") as file:
        code = run(program, *arguments, f"--jsonl={file.name}")
        return code, list(map(json.loads, file))


class Device:
    """A device with the only clock, which runs while a program waits for calls that it has made.

    It shows 4,096 s at first, so that a time is not a duration.

    modules: programs that read this clock.
    """

    def __init__(self, monkeypatch, *modules):
        self.now, self.pending = 4096.0, 0.0
        for module in modules:
            monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(jax, "block_until_ready", self.wait)

    def perf_counter(self):
        return self.now

    def call(self, seconds, outputs=None):
        self.pending += seconds
        return outputs

    def wait(self, outputs=None):
        self.now, self.pending = self.now + self.pending, 0.0
        return outputs


# In seconds: of the first three the median is 3 and the spread 5 / 3.
BATCHES = 2.0, 3.0, 7.0, 1e3, 1e3


def timed(monkeypatch):
    """Calls have the times BATCHES, the second of several twice these, if they are waited for.

    Returns a list of the shapes of their first outputs."""
    waited, wait, shapes = [], jax.block_until_ready, []

    def block_until_ready(outputs):
        waited.append(outputs)
        return wait(outputs)

    def time_in_turns(calls, synchronise, repeats):
        for call in calls:
            outputs = call()
            waited.clear()
            synchronise(outputs)
            assert any(x is outputs for x in waited)
            shapes.append(jax.tree.leaves(outputs)[0].shape)
        return [[x * n for x in BATCHES[:repeats]] for n, _ in enumerate(calls, 1)]

    monkeypatch.setattr(jax, "block_until_ready", block_until_ready)
    monkeypatch.setattr(runner, "time_in_turns", time_in_turns)
    monkeypatch.setattr(peers.JaxImplementation, "peak_memory_bytes", lambda *_: 3 * 2**19)
    return shapes


def assert_row(row, **expected):
    """Floats of a row are compared within their own rounding."""
    assert {name: row.get(name) for name in expected} == pytest.approx(expected, rel=1e-12)


def not_to_be_timed(monkeypatch):
    monkeypatch.setattr(runner, "time_in_turns", lambda *_: pytest.fail("it was timed"))


def missing(*_, **__):
    """A peer whose package is not installed."""
    raise ModuleNotFoundError("No module named\n'torch'")


MISSING = "skipped: ModuleNotFoundError: No module named 'torch'"


def quick_mlstm(q, k, v, i, f, *, layout="BNTH", return_last_states=False, **_):
    """A recurrence without decay, which compiles quickly."""
    weights = jnp.exp(i) * jax.nn.sigmoid(f) * jnp.sum(q.astype(jnp.float32) * k, -1)
    h = jnp.cumsum(weights[..., None] * v, axis=layout.index("T")).astype(q.dtype)
    return (h, (h, i, f)) if return_last_states else h
