"""Continuous batching: xlstm_model.py answers more prompts than fit on the device at a time.

The states of the prompts that are being answered are the rows ("slots") of a pool. A loop on the
device generates some tokens for every row. Then the host looks for answers that have ended, and a
packed prefill writes the states of the next prompts over theirs. A row without a prompt is stepped
all the same: no row sees another.

Few shapes are compiled: a prefill has ``bucket`` steps and the same number of segments, of which
some may be empty, and a loop has ``rows_to_step`` rows.
"""

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import xlstm_model as model

from mlstm_pallas import pack_lengths

# A prefill of fewer steps waits for the weights as long as one of 256. With 4096 it uses all of a
# GPU, and the other slots do not wait for more.
FEWEST_STEPS, MOST_STEPS = 256, 4096
MOST_PROMPTS = 16  # of a prefill, because as many states are there twice
Prompts = list[list[int]]
Busy = dict[int, tuple[int, list[int]]]  # by row, the number of a prompt and its answer so far


def bucket(steps: int) -> int:
    """The least of 1, 1.5, 2, 3, 4, 6, ... times FEWEST_STEPS that is not below."""
    size = FEWEST_STEPS
    while size < steps:
        size = size * 4 // 3 if size % 3 == 0 else size * 3 // 2
    return size


def longest_prefill(prompts: Prompts) -> int:
    lengths = [*map(len, prompts)]
    return bucket(max(*lengths, min(sum(lengths), MOST_STEPS)))


def rows_to_step(busy: int, rows: int) -> int:
    """How many of the pool's rows go on when no prompt waits: a quarter, while that suffices.

    A loop of fewer rows takes longer to compile than it saves in one run, so all rows go on if
    compiled programs are not kept.
    """
    while jax.config.jax_compilation_cache_dir and 4 * busy <= rows:
        rows //= 4
    return rows


@functools.partial(jax.jit, donate_argnums=0)
def put_rows(pool: Any, rows: jax.Array, values: Any) -> Any:
    """Values go to rows (N,) of the pool; those of rows beyond it, nowhere."""
    return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), pool, values)


@jax.jit
def take_rows(pool: Any, rows: jax.Array) -> Any:
    return jax.tree.map(lambda x: x[rows], pool)


@dataclasses.dataclass
class Server:
    """slots: rows of the pool. steps: of a loop. row_steps: the rows of all loops' steps so far."""

    config: model.Config
    params: model.Params
    sampling: model.Sampling
    key: jax.Array
    slots: int
    steps: int
    pool: Any = None  # states and the last token of each row
    row_steps: int = 0

    def admit(self, rows: list[int], prompts: dict[int, list[int]]) -> None:
        """Reads at most MOST_PROMPTS prompts, by their number, into rows of the pool."""
        N, lengths = min(MOST_PROMPTS, self.slots), [*map(len, prompts.values())]
        segment_ids, (ends,) = pack_lengths((lengths + [0] * N)[:N], S=bucket(sum(lengths)))
        tokens = np.resize(np.concatenate([*prompts.values()]), segment_ids.shape)
        x, states = model.prefill(self.config, self.params, tokens, segment_ids, ends)
        logits = model.next_logits(self.config, self.params, x[0, ends - 1])
        numbers = model.MOST_TOKENS * np.resize([*prompts], N)
        values = states, model.sample(self.sampling, logits, self.key, numbers)
        if self.pool is None:
            self.pool = take_rows(values, np.zeros(self.slots, int))
        self.pool = put_rows(self.pool, np.array((rows + [self.slots] * N)[:N]), values)

    def generate(self, busy: Busy) -> np.ndarray:
        """(1 + steps, slots): the token before this loop, and those of the loop, in each row."""
        numbers, (states, before) = np.zeros(self.slots, int), self.pool
        for row, (n, tokens) in busy.items():
            numbers[row] = model.MOST_TOKENS * n + (len(tokens) or 1)
        loop = self.config, self.sampling, self.steps, self.params, states, before, self.key
        *pool, tokens = model.decode(*loop, numbers)
        self.pool, self.row_steps = tuple(pool), self.row_steps + self.steps * self.slots
        return np.vstack([before, tokens])

    def serve(
        self, prompts: Prompts, limits: list[int], stop: set[int], continuous: bool = True
    ) -> Iterator[tuple[int, list[int]]]:
        """The number of a prompt and its answer, up to a token to stop at, as answers end.

        Args:
          limits: most tokens of each answer.
          continuous: whether a prompt starts as soon as a slot is free, or when all are.
        """
        waiting, busy = deque(range(len(prompts))), Busy()
        while waiting or busy:
            free = [*({*range(self.slots)} - {*busy})] if continuous or not busy else []
            while waiting and free:
                ends = itertools.accumulate(len(prompts[n]) for n in waiting)
                count = max(1, sum(1 for _ in itertools.takewhile(MOST_STEPS.__ge__, ends)))
                rows = [
                    free.pop() for _ in range(min(count, MOST_PROMPTS, len(free), len(waiting)))
                ]
                numbers = [waiting.popleft() for _ in rows]
                self.admit(rows, {n: prompts[n] for n in numbers})
                busy |= {row: (n, []) for row, n in zip(rows, numbers, strict=True)}
            slots = self.slots if waiting else rows_to_step(len(busy), self.slots)
            if continuous and slots < self.slots:
                self.pool, self.slots = take_rows(self.pool, np.resize([*busy], slots)), slots
                busy = dict(enumerate(busy.values()))
            new = self.generate(busy)
            for row, (n, tokens) in [*busy.items()]:
                column = new[bool(tokens) :, row].tolist()[: limits[n] - len(tokens)]
                tokens += itertools.takewhile(lambda token: token not in stop, column)
                if not stop.isdisjoint(column) or len(tokens) == limits[n]:
                    del busy[row]
                    yield n, tokens
