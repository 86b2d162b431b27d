"""Continuous batching: xlstm_model.py answers more prompts than fit on the device at a time.

The states of the prompts that are being answered are the rows ("slots") of a pool. A loop on the
device generates some tokens for every row. Then the host looks for answers that have ended, and a
packed prefill writes the states of the next prompts over theirs. A row without a prompt is stepped
all the same: no row sees another.

Few shapes are compiled: a prefill has ``bucket`` steps and the same number of segments, of which
some may be empty, and a loop has a row for every slot. No prefill has more than MOST_STEPS steps.
A prompt with more than twice as many tokens is read in pieces of 512 steps, one prompt at a time.
Between two loops there are as many pieces as take LONGEST_WAIT of the time of a loop, by those
before, so that running answers go on; shorter prompts behind a long one start before it.

Two options make a server faster where its requests allow it. With a ``PrefixCache`` a prompt starts
from the states after the blocks of tokens that it has in common with a prompt before it. With
drafts a call of the model checks several tokens for each row.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

import jax
import jax.numpy as jnp
import numpy as np
from xlstm_model import (
    MOST_STEPS,
    NO_TOKEN,
    Config,
    Params,
    Rows,
    Sampling,
    State,
    decode,
    empty_states,
    first_not_finite,
    next_logits,
    prefill,
    put_rows,
    rings_are_faster,
    sample,
    speculate,
    take_rows,
)

FEWEST_STEPS = 256  # of a prefill; one of fewer waits for the weights as long
# Steps of a piece: a GPU takes hardly less time for fewer, a CPU as much less.
PIECES, LONGEST_WAIT = dict(gpu=512), 0.4
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

    A prompt needs the last of its blocks that is there, and none before it. The one that was
    neither read nor needed for the longest time makes room for another one.

    entries: LEAST_ENTRIES or more.
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

    def find(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The end and the row of the last block of a prompt that is there, or 0 and row 0."""
        for end in range(self.length(prompt), 0, -BLOCK):
            if row := self.rows.pop(begin := tuple(prompt[:end]), 0):
                self.rows[begin] = row
                return end, row
        return 0, 0

    def states(self, prompts: Sequence[list[int]], N: int) -> Rows:
        """N rows with the states after the blocks of prompts, of which it reads those it lacks."""
        used = list[int]()
        for prompt in prompts:
            if self.find(prompt)[0] < self.length(prompt):
                for _ in read_pieces(self.config, self.params, prompt, BLOCK, self, used):
                    pass
            used.append(self.find(prompt)[1])
        return self.pool, np.array((used + [0] * N)[:N])

    def add(self, begin: Sequence[int], states: list[State], used: Sequence[int] = ()) -> None:
        """Keeps the states after a block that was read; the rows used stay."""
        self.blocks_read += 1
        if self.find([*begin, 0])[0] == len(begin):  # another prompt with this block was faster
            return
        if not self.free:
            oldest = next(x for x, row in self.rows.items() if row not in used)
            self.free.append(self.rows.pop(oldest))
        self.rows[tuple(begin)] = row = self.free.pop()
        self.pool = put_rows(self.pool, np.array([row]), states)


def read_pieces(
    config: Config,
    params: Params,
    prompt: list[int],
    steps: int,
    cache: PrefixCache | None = None,
    used: Sequence[int] = (),
) -> Iterator[tuple[int, list[State]]]:
    """Reads a prompt but for its last tokens, 1 to ``steps``.

    Yields the number of tokens that are read and a row of states after them: of those in the
    cache, then after each piece of so many steps, which divide BLOCK. It adds blocks to the cache.
    """
    config = dataclasses.replace(config, inference_state_dtype="float32")
    end, states = 0, empty_states(config, params, 1)
    if cache:
        end, row = cache.find(prompt)
        states = put_rows(states, np.array([0]), take_rows(cache.pool, np.array([row])))
    yield end, states
    while end + steps < len(prompt):
        piece = np.array([prompt[end : end + steps]])
        rows = states, np.array([0])
        _, states = prefill(config, params, piece, np.array([steps]), rows)
        end += steps
        if cache and end % BLOCK == 0:
            cache.add(prompt[:end], states, used)
        yield end, states


def first_tokens(
    setup: Setup, prompts: dict[int, list[int]], S: int, into: Rows, initial: Rows | None = None
) -> tuple[list[State], jax.Array]:
    """Reads prompts, by their numbers, as the first segments of a row of S steps.

    into, initial: as for ``prefill``, with a row for each of N segments.

    Returns the pool with the states after the prompts, and the token after each of N segments.
    """
    (config, params, sampling, key), lists, N = setup, [*prompts.values()], len(into[1])
    lengths = np.array([*map(len, lists), *[0] * (N - len(lists))])
    tokens = np.resize(np.concatenate(lists), (1, S))
    x, states = prefill(config, params, tokens, lengths, initial, into)
    logits = next_logits(config, params, take_rows(x, (0, np.cumsum(lengths) - 1)))
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

    An answer goes up to a token to stop at, which is not one of its tokens. One whose logits are
    not finite does not end; the others go on.

    Args:
      prompts: by their numbers.
      limits: most tokens of each answer, by the number of its prompt.
      steps: calls of the model per loop.
      continuous: whether a prompt starts as soon as a slot is free, or when all are.
      draft: most tokens that a call checks beside the next one; needs temperature 0.
      cache: of earlier prompts, to which those of these prompts are added.
      rings: whether states have ring buffers, which drafts need. None: where it is faster.

    Raises:
      FloatingPointError: at the end, if there are logits that are not finite.
    """
    config, params, sampling, key = setup
    waiting, others, N = dict.fromkeys(prompts), None, min(MOST_PROMPTS, slots)
    busy: dict[int, tuple[int, list[int]]] = {}  # by row, a prompt's number and its answer so far
    failed: dict[int, list[int]] = {}  # by number, the tokens before logits that are not finite
    long, most_pieces = None, 1
    piece = min(PIECES.get(jax.default_backend(), 64), MOST_STEPS, BLOCK)
    rings = rings_are_faster(config, slots) or draft > 0 if rings is None else rings
    states = empty_states(config, params, slots, rings=rings)
    size = bucket(max(len(prompts[n]) + limits[n] for n in prompts) + steps * (1 + draft))
    known = np.zeros(slots, np.int32)  # tokens in the texts of the rows

    def next_prompts(most: int) -> dict[int, int]:
        """Those of a prefill and where it begins; or a longer one, if none is being read."""
        begins, total = dict[int, int](), 0
        for n in islice((n for n in waiting if not (long and is_long(n))), most):
            begin = cache.length(prompts[n]) if cache and not is_long(n) else 0
            total += len(prompts[n]) - begin
            if begins and total > MOST_STEPS:
                break
            begins[n] = begin
        return begins

    @functools.cache
    def is_long(n: int) -> bool:
        if len(prompts[n]) <= 2 * MOST_STEPS:
            return False
        return not cache or len(prompts[n]) - cache.find(prompts[n])[0] > 2 * MOST_STEPS

    def start(begins: dict[int, int], rows: list[int], N: int, initial: Rows | None) -> None:
        """Reads prompts from there on as the first of N segments, into rows."""
        nonlocal states, others
        into = states, np.array((rows + [slots] * N)[:N])
        rest = {n: prompts[n][begin:] for n, begin in begins.items()}
        S = bucket(sum(map(len, rest.values())))
        states, token = first_tokens(setup, rest, S, into, initial)
        values = [token]
        if draft:
            texts, lengths = np.zeros((N, size), np.int32), np.zeros(N, np.int32)
            for j, n in enumerate(begins):
                lengths[j] = len(prompts[n])
                texts[j, : lengths[j]] = prompts[n]
            values = [*with_texts(texts, lengths, token)]
            known[rows] = 1 + lengths[: len(rows)]
        others = others or take_rows(values, np.zeros(slots, int))
        others = put_rows(others, into[1], values)
        busy.update({row: (n, []) for row, n in zip(rows, begins, strict=True)})
        started.append((rows, token))

    def go_on(most: int | None) -> None:
        """Reads so many pieces of the long prompt, or all; after the last one it starts."""
        nonlocal long, end, before, count
        for read in islice(pieces, most):
            count, (end, before) = count + 1, read
        if end + piece >= len(prompts[long[0]]):
            start({long[0]: end}, [long[1]], 1, (before, np.array([0])))
            long = None

    def add(row: int, column: list[int]) -> tuple[int, list[int], bool]:
        n, answer = busy[row]
        column = column[: limits[n] - len(answer)]
        tokens = [*takewhile(lambda token: token not in {*stop, NO_TOKEN}, column)]
        answer += tokens
        ended = len(tokens) < len(column) or len(answer) == limits[n]
        if ended:
            del busy[row]
        if column[len(tokens) :][:1] == [NO_TOKEN]:
            failed[n], ended = prompts[n] + answer, False
        return n, tokens, ended

    while waiting or busy or long:
        began, started, count = time.perf_counter(), [], 0
        free = [*({*range(slots)} - {*busy, long and long[1]})] if continuous or not busy else []
        while free and (begins := next_prompts(min(N, len(free)))):
            some, rows, free = [*begins], free[: len(begins)], free[len(begins) :]
            for n in some:
                del waiting[n]
            if is_long(some[0]):
                pieces = read_pieces(config, params, prompts[some[0]], piece, cache)
                long, (end, before) = (some[0], rows[0]), next(pieces)
                if not continuous:
                    go_on(None)
            elif cache:
                start(begins, rows, N, cache.states([prompts[n] for n in some], N))
            elif len(prompts[some[0]]) > MOST_STEPS:
                for begin, part in read_pieces(config, params, prompts[some[0]], MOST_STEPS):
                    begins, initial = {some[0]: begin}, (part, np.array([0]))
                start(begins, rows, 1, initial)
            else:
                start(begins, rows, N, None)
        if long:
            go_on(most_pieces if busy else None)
        if draft:
            states, *others = speculate(config, steps, 1 + draft, params, states, *others)
        else:
            numbers = np.zeros(slots, int)
            numbers[[*busy]] = [MOST_TOKENS * n + (len(x) or 1) for n, x in busy.values()]
            loop = config, sampling, steps, params, states, *others, key, numbers
            states, *others, tokens = decode(*loop)
        if count:
            jax.block_until_ready(before)
        read = time.perf_counter()
        for rows, token in started:  # which are there before the tokens of the loop
            yield from map(add, rows, np.asarray(token)[: len(rows), None].tolist())
        if draft:
            earlier, known, text = known, np.array(others[1]), np.asarray(others[0])
            columns = [text[row, earlier[row] : known[row]] for row in range(slots)]
        else:
            columns = np.asarray(tokens).T
        if count and not started:
            loop_per_piece = count * (time.perf_counter() - read) / (read - began)
            most_pieces = max(1, int(LONGEST_WAIT * loop_per_piece))
        for row in [*busy]:
            yield add(row, columns[row].tolist())
    if failed:
        raise not_finite_error(config, params, failed)


def not_finite_error(
    config: Config, params: Params, texts: dict[int, list[int]]
) -> FloatingPointError:
    """Of prompts, by number: the tokens, with those of an answer, before logits that are not."""
    n, text = next(iter(texts.items()))
    what, names = first_not_finite(config, params, text), ", ".join(map(str, sorted(texts)))
    return FloatingPointError(
        f"prompts without an answer: {names}; of prompt {n}, not finite: {what}"
    )
