"""Continuous batching: xlstm_model.py answers more prompts than fit on the device at a time.

The states of the prompts that are being answered are the rows ("slots") of a pool. A loop on the
device generates some tokens for every row. Then the host looks for answers that have ended, and a
packed prefill writes the states of the next prompts over theirs. A row without a prompt is stepped
all the same: no row sees another.

Few shapes are compiled: a prefill has ``bucket`` steps and the same number of segments, of which
some may be empty, and a loop has a row for every slot.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from typing import Any

import jax
import numpy as np
from xlstm_model import (
    Config,
    Params,
    Sampling,
    decode,
    next_logits,
    prefill,
    rings_are_faster,
    sample,
    with_rings,
)

from mlstm_pallas import pack_lengths

# A prefill of fewer steps waits for the weights as long as one of 256. With 4096 it uses all of a
# GPU, and the other slots do not wait for more.
FEWEST_STEPS, MOST_STEPS = 256, 4096
MOST_PROMPTS = 16  # of a prefill, because as many states are there twice
# Tokens of an answer, and answers, because the number of a draw has 32 bits.
MOST_TOKENS = MOST_ANSWERS = 2**16
Setup = tuple[Config, Params, Sampling, jax.Array]  # and the key of the draws


def bucket(steps: int) -> int:
    """The least of 1, 1.5, 2, 3, 4, 6, ... times FEWEST_STEPS that is not below."""
    size = FEWEST_STEPS
    while size < steps:
        size = size * 4 // 3 if size % 3 == 0 else size * 3 // 2
    return size


@functools.partial(jax.jit, donate_argnums=0)
def put_rows(pool: Any, rows: jax.Array, values: Any) -> Any:
    """Values go to rows (N,) of the pool; those of rows beyond it, nowhere."""
    return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), pool, values)


def first_tokens(
    setup: Setup, prompts: dict[int, list[int]], N: int, S: int, rings: bool = False
) -> list[Any]:
    """Reads prompts, by their numbers, as the first of N segments of a row of S steps.

    rings: whether the states get a ring buffer each.

    Returns the states and the token after each of them, (N, ...). Others are as after the last one.
    """
    (config, params, sampling, key), lists = setup, [*prompts.values()]
    segment_ids, (ends,) = pack_lengths([*map(len, lists), *[0] * (N - len(lists))], S=S)
    tokens = np.resize(np.concatenate(lists), segment_ids.shape)
    x, states = prefill(config, params, tokens, segment_ids, ends)
    if rings:
        states = with_rings(config, x.dtype.name, states)
    logits = next_logits(config, params, x[0, ends - 1])
    return [states, sample(sampling, logits, key, MOST_TOKENS * np.resize([*prompts], N))]


def serve(
    setup: Setup,
    prompts: dict[int, list[int]],
    limits: Sequence[int],
    stop: set[int],
    slots: int,
    steps: int,
    continuous: bool = True,
) -> Iterator[tuple[int, list[int]]]:
    """The number of a prompt and its answer, up to a token to stop at, as answers end.

    Args:
      prompts: by their numbers.
      limits: most tokens of each answer, by the number of its prompt.
      steps: tokens per loop.
      continuous: whether a prompt starts as soon as a slot is free, or when all are.
    """
    config, params, sampling, key = setup
    waiting, pool, N = [*prompts], None, min(MOST_PROMPTS, slots)
    busy: dict[int, tuple[int, list[int]]] = {}  # by row, a prompt's number and its answer so far
    while waiting or busy:
        free = [*({*range(slots)} - {*busy})] if continuous or not busy else []
        while waiting and free:
            ends = [*accumulate(len(prompts[n]) for n in waiting[: min(N, len(free))])]
            count = max(1, sum(end <= MOST_STEPS for end in ends))
            some, waiting = {n: prompts[n] for n in waiting[:count]}, waiting[count:]
            steps_read = bucket(ends[count - 1])
            values = first_tokens(setup, some, N, steps_read, rings_are_faster(slots))
            rows, free = free[:count], free[count:]
            pool = pool or jax.tree.map(lambda x: x[np.zeros(slots, int)], values)
            pool = put_rows(pool, np.array((rows + [slots] * N)[:N]), values)
            busy |= {row: (n, []) for row, n in zip(rows, some, strict=True)}
        numbers, (states, before) = np.zeros(slots, int), pool
        numbers[[*busy]] = [MOST_TOKENS * n + (len(answer) or 1) for n, answer in busy.values()]
        *pool, tokens = decode(config, sampling, steps, params, states, before, key, numbers)
        tokens = np.vstack([before, tokens])  # the first ones are new after a prefill only
        for row, (n, answer) in [*busy.items()]:
            column = tokens[bool(answer) :, row].tolist()[: limits[n] - len(answer)]
            answer += takewhile(lambda token: token not in stop, column)
            if not stop.isdisjoint(column) or len(answer) == limits[n]:
                del busy[row]
                yield n, answer
