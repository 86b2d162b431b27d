"""python -m mlstm_pallas.selfcheck: what it calls, finds, prints and survives.

Wrong functions are planted into a right package; each has to be found by one call of the table.
"""

import functools
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy_evaluator
import pytest
from oracle import run_python

import mlstm_pallas
from mlstm_pallas import distributed, selfcheck

PACKAGE = Path(mlstm_pallas.__file__).parent


@pytest.fixture
def in_numpy(monkeypatch):
    """Nothing is compiled."""
    monkeypatch.setattr(selfcheck, "jit", functools.partial(numpy_evaluator.jit, always=True))


def errors(row, backend="xla", dtype="float32"):
    return selfcheck.check(f"{backend}/{row}/8x8/{dtype}")


def planted(monkeypatch, name, plant):
    """Plants plant(function, *arguments, **options) for a function."""
    module = distributed if "parallel" in name else mlstm_pallas
    monkeypatch.setattr(module, name, functools.partial(plant, getattr(module, name)))


def scaled(name, factor=1.1):
    """A plant that scales h or one of the states."""

    def plant(function, *x, **options):
        h, states, *rest = function(*x, **options)
        results = dict(zip("hcnm", (h, *states), strict=True))
        results[name] *= factor
        h, *states = results.values()
        return h, (*states,), *rest

    return plant


def with_gradients(function, *x, change, **options):
    results = function(*x, **options)
    return jax.tree.map(lambda y: y + change * (y - jax.lax.stop_gradient(y)), results)


def larger_gradients(function, *x, **options):
    return with_gradients(function, *x, change=2e-4, **options)


def gradients_beyond_lengths(function, q, k, v, i, f, *x, **options):
    h, *states = function(q, k, v, i, f, *x, **options)
    return h + 1e-9 * (v - jax.lax.stop_gradient(v)), *states


def no_gradient_of(place):
    def plant(function, *x, **options):
        x = [jax.lax.stop_gradient(y) if j == place else y for j, y in enumerate(x)]
        return function(*x, **options)

    return plant


def clipped_gates(function, q, k, v, i, f, *x, **options):
    """Right for the gates of a model."""
    return function(q, k, v, jnp.clip(i, -20, 20), f, *x, **options)


def states_without_gradients(function, *x, **options):
    h, states = function(*x, **options)
    return h, jax.lax.stop_gradient(states)


def other_slots(function, *x, slots, **options):
    return function(*x, slots=jnp.asarray(slots)[jnp.array([1, 0, 2])], **options)


def one_draft_more(function, *x, accepted, **options):
    return function(*x, accepted=accepted + 1, **options)


def nan_of_later_drafts(function, q, k, v, i, f, states, **options):
    h, states = function(q, k, v, i, f, states, **options)
    return h + 0 * jnp.sum(v, axis=2, keepdims=True), states


def reads_every_gate(function, q, k, v, i, f, *x, **options):
    h, *states = function(q, k, v, i, f, *x, **options)
    return h + 0 * jnp.sum(i + f), *states


def flushed_wrong(function, *x, **options):
    c, n, m = function(*x, **options)
    return c * 1.01, n, m


def one_chunk_late(function, *x, **options):
    h, last, every = function(*x, **options)
    return h, last, [jnp.roll(y, 1, axis=1) for y in every]


def wrong_where(option):
    """Larger gradients of calls with an option."""

    def plant(function, *x, **options):
        change = 1e-3 * bool(options.get(option) is not None)
        return with_gradients(function, *x, change=change, **options)

    return plant


def empty_rows_forget(function, *x, sequence_lengths, **options):
    h, (c, n, m) = function(*x, sequence_lengths=sequence_lengths, **options)
    return h, (c * (np.asarray(sequence_lengths) > 0)[:, None, None, None], n, m)


CHUNKWISE, STEP, RING = "mlstm_chunkwise", "mlstm_recurrent_step", "mlstm_ring_step"
PARALLEL = "mlstm_chunkwise_sequence_parallel"
# The row, the function for which what is planted, and the result that shows it.
PLANTS = [
    ("steps", STEP, scaled("h"), "h"),
    ("steps", STEP, no_gradient_of(4), "df"),
    ("steps", STEP, larger_gradients, "dv"),
    ("pools", STEP, other_slots, "c"),
    ("loop", "mlstm_recurrent_sequence", scaled("n"), "n"),
    ("drafts", RING, one_draft_more, "c"),
    ("drafts", RING, nan_of_later_drafts, "h"),
    ("drafts", "mlstm_ring_flush", flushed_wrong, "c"),
    ("rings", RING, other_slots, "c"),
    ("lengths", CHUNKWISE, scaled("c"), "c"),
    ("lengths", CHUNKWISE, scaled("m"), "m"),
    ("lengths", CHUNKWISE, gradients_beyond_lengths, "dv"),
    ("lengths", CHUNKWISE, reads_every_gate, "h"),
    ("lengths", CHUNKWISE, no_gradient_of(7), "dm"),
    ("lengths", CHUNKWISE, states_without_gradients, "dc"),
    ("lengths", CHUNKWISE, empty_rows_forget, "c"),
    ("gates", CHUNKWISE, clipped_gates, "h"),
    ("reverse", CHUNKWISE, wrong_where("reverse"), "dq"),
    ("packed", CHUNKWISE, wrong_where("segment_ids"), "dq"),
    ("documents", CHUNKWISE, wrong_where("num_segments"), "dq"),
    ("blocks", "mlstm_chunkwise_states", one_chunk_late, "c"),
    ("shards", PARALLEL, scaled("h"), "h"),
]


@pytest.mark.parametrize("row", selfcheck.TABLE)
def test_right_calls_are_within_the_bounds(row, in_numpy):
    assert max(errors(row).values()) < 1


@pytest.mark.parametrize(
    ("row", "name", "plant", "result"), PLANTS, ids=lambda x: getattr(x, "__name__", x)
)
def test_a_wrong_function_is_found(row, name, plant, result, monkeypatch, in_numpy):
    planted(monkeypatch, name, plant)
    assert errors(row)[result] > 1
