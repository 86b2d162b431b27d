"""Continuous batching: xlstm_model.py answers more prompts than fit on the device at a time.

The states of the prompts that are being answered are the rows ("slots") of a pool. A loop on the
device generates some tokens for every row. Then the host looks for answers that have ended, and a
packed prefill writes the states of the next prompts over theirs. A row without a prompt is stepped
all the same: no row sees another.

Few shapes are compiled: a prefill has ``bucket`` steps and the same number of segments, of which
some may be empty, and a loop has a row for every slot.

Two options make a server faster where its requests allow it. With a ``PrefixCache`` a prompt starts
from the states after the blocks of tokens that it has in common with a prompt before it. With
drafts a call of the model checks several tokens for each row.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile

import jax
import jax.numpy as jnp
import numpy as np
from xlstm_model import (
    Config,
    Params,
    Rows,
    Sampling,
    State,
    decode,
    empty_states,
    next_logits,
    prefill,
    put_rows,
    rings_are_faster,
    sample,
    speculate,
    take_rows,
)

from mlstm_pallas import pack_lengths

# A prefill of fewer steps waits for the weights as long as one of 256. With 4096 it uses all of a
# GPU, and the other slots do not wait for more.
FEWEST_STEPS, MOST_STEPS = 256, 4096
MOST_PROMPTS = 16  # of a prefill; with fewer prompts its blocks copy as many states all the same
BLOCK = 1024  # tokens between two states of a prefix cache
LEAST_ENTRIES = MOST_PROMPTS + 1  # of a prefix cache: those of a prefill, and one that it reads
# Tokens of an answer, and answers, because the number of a draw has 32 bits.
MOST_TOKENS = MOST_ANSWERS = 2**16
Setup = tuple[Config, Params, Sampling, jax.Array]  # and the key of the draws


def bucket(steps: int) -> int:
    """The least of 1, 1.5, 2, 3, 4, 6, ... times FEWEST_STEPS that is not below."""
    size = FEWEST_STEPS
    while size < steps:
        size = size * 4 // 3 if size % 3 == 0 else size * 3 // 2
    return size


class PrefixCache:
    """The states after the blocks of BLOCK tokens with which prompts began.

    They are the rows of a pool; row 0 has the states before a prompt, which are zeros. c is in the
    dtype of the activations, to which a prefill rounds it in any case.

    entries: LEAST_ENTRIES or more; the blocks that were used last are kept.
    """

    def __init__(self, config: Config, params: Params, entries: int) -> None:
        self.pool = empty_states(config, params, 1 + entries, params["embeddings"].dtype)
        self.free = [*range(1, 1 + entries)]
        self.rows: dict[tuple[int, ...], int] = {}  # by all tokens; the one used last is the last
        self.config, self.params, self.blocks_read = config, params, 0

    @staticmethod
    def length(prompt: Sequence[int]) -> int:
        """How many tokens of a prompt are in its blocks; at least one is not."""
        return (len(prompt) - 1) // BLOCK * BLOCK

    def states(self, prompts: Sequence[list[int]], N: int) -> Rows:
        """N rows with the states after the blocks of prompts, of which it reads those it lacks."""
        used = list[int]()
        for prompt in prompts:
            used.append(0)
            for end in range(BLOCK, self.length(prompt) + 1, BLOCK):
                row = self.rows.pop(begin := tuple(prompt[:end]), None)
                if row is None:
                    row = self.read(np.array([prompt[end - BLOCK : end]]), used)
                self.rows[begin] = used[-1] = row
        return self.pool, np.array((used + [0] * N)[:N])

    def read(self, tokens: np.ndarray, used: list[int]) -> int:
        """A row with the states after a block (1, BLOCK) behind the last one of the rows used."""
        if not self.free:
            oldest = next(x for x, row in self.rows.items() if row not in used)
            self.free.append(self.rows.pop(oldest))
        row, self.blocks_read = self.free.pop(), self.blocks_read + 1
        initial = take_rows(self.pool, np.array(used[-1:])), np.array([0])
        options = np.array([BLOCK]), initial, (self.pool, np.array([row]))
        _, self.pool = prefill(self.config, self.params, tokens, None, *options)
        return row


def first_tokens(
    setup: Setup, prompts: dict[int, list[int]], S: int, into: Rows, initial: Rows | None = None
) -> tuple[list[State], jax.Array]:
    """Reads prompts, by their numbers, as the first segments of a row of S steps.

    into, initial: as for ``prefill``, with a row for each of N segments.

    Returns the pool with the states after the prompts, and the token after each of N segments.
    """
    (config, params, sampling, key), lists, N = setup, [*prompts.values()], len(into[1])
    segment_ids, (ends,) = pack_lengths([*map(len, lists), *[0] * (N - len(lists))], S=S)
    tokens = np.resize(np.concatenate(lists), segment_ids.shape)
    x, states = prefill(config, params, tokens, segment_ids, ends, initial, into)
    logits = next_logits(config, params, take_rows(x, (0, ends - 1)))
    return states, sample(sampling, logits, key, MOST_TOKENS * np.resize([*prompts], N))


@jax.jit
def with_texts(texts: jax.Array, lengths: jax.Array, token: jax.Array) -> tuple[jax.Array, ...]:
    """The last arguments of ``speculate`` after prompts of these lengths and a token (N,) each."""
    texts = texts.at[jnp.arange(len(texts)), lengths].set(token.astype(texts.dtype))
    return texts, lengths + 1, jnp.zeros_like(lengths)


def serve(
    setup: Setup,
    prompts: dict[int, list[int]],
    limits: Sequence[int],
    stop: set[int],
    slots: int,
    steps: int,
    continuous: bool = True,
    *,
    draft: int = 0,
    cache: PrefixCache | None = None,
    rings: bool | None = None,
) -> Iterator[tuple[int, list[int], bool]]:
    """As tokens come: the number of a prompt, tokens of its answer, and whether this one has ended.

    An answer goes up to a token to stop at, which is not one of its tokens.

    Args:
      prompts: by their numbers.
      limits: most tokens of each answer, by the number of its prompt.
      steps: calls of the model per loop.
      continuous: whether a prompt starts as soon as a slot is free, or when all are.
      draft: most tokens that a call checks beside the next one; needs temperature 0.
      cache: of earlier prompts, to which those of these prompts are added.
      rings: whether states have ring buffers, which drafts need. None: where it is faster.
    """
    config, params, sampling, key = setup
    waiting, others, N = [*prompts], None, min(MOST_PROMPTS, slots)
    busy: dict[int, tuple[int, int]] = {}  # by row, a prompt's number and the tokens of its answer
    rings = rings_are_faster(slots) or draft > 0 if rings is None else rings
    states = empty_states(config, params, slots, rings=rings)
    size = bucket(max(len(prompts[n]) + limits[n] for n in prompts) + steps * (1 + draft))
    known = np.zeros(slots, np.int32)  # tokens in the texts of the rows

    def add(row: int, column: list[int]) -> tuple[int, list[int], bool]:
        n, count = busy[row]
        tokens = [*takewhile(lambda token: token not in stop, column[: limits[n] - count])]
        busy[row] = n, count + len(tokens)
        ended = len(tokens) < len(column) or count + len(tokens) == limits[n]
        if ended:
            del busy[row]
        return n, tokens, ended

    while waiting or busy:
        free = [*({*range(slots)} - {*busy})] if continuous or not busy else []
        started = []
        while waiting and free:
            lists = {n: prompts[n] for n in waiting[: min(N, len(free))]}
            cut = {n: cache.length(x) if cache else 0 for n, x in lists.items()}
            ends = [*accumulate(len(x) - cut[n] for n, x in lists.items())]
            count = max(1, sum(end <= MOST_STEPS for end in ends))
            some, waiting = waiting[:count], waiting[count:]
            initial = cache.states([lists[n] for n in some], N) if cache else None
            rest = {n: lists[n][cut[n] :] for n in some}
            rows, free = free[:count], free[count:]
            into = states, np.array((rows + [slots] * N)[:N])
            states, token = first_tokens(setup, rest, bucket(ends[count - 1]), into, initial)
            values = [token]
            if draft:
                texts, lengths = np.zeros((N, size), np.int32), np.zeros(N, np.int32)
                for j, n in enumerate(some):
                    lengths[j] = len(lists[n])
                    texts[j, : lengths[j]] = lists[n]
                values = [*with_texts(texts, lengths, token)]
                known[rows] = 1 + lengths[:count]
            others = others or take_rows(values, np.zeros(slots, int))
            others = put_rows(others, into[1], values)
            busy |= {row: (n, 0) for row, n in zip(rows, some, strict=True)}
            started.append((rows, token))
        if draft:
            states, *others = speculate(config, steps, 1 + draft, params, states, *others)
        else:
            numbers = np.zeros(slots, int)
            numbers[[*busy]] = [MOST_TOKENS * n + (count or 1) for n, count in busy.values()]
            loop = config, sampling, steps, params, states, *others, key, numbers
            states, *others, tokens = decode(*loop)
        for rows, token in started:  # which are there before the tokens of the loop
            yield from map(add, rows, np.asarray(token)[: len(rows), None].tolist())
        if draft:
            before, known, text = known, np.array(others[1]), np.asarray(others[0])
            columns = [text[row, before[row] : known[row]] for row in range(slots)]
        else:
            columns = np.asarray(tokens).T
        for row in [*busy]:
            yield add(row, columns[row].tolist())
