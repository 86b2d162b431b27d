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

An ``Engine`` takes requests at any time, and cancels them; ``serve`` answers prompts that are known
beforehand. Two options make them faster where the requests allow it. With a ``PrefixCache`` a
prompt starts from the states after the blocks of tokens that it has in common with a prompt before
it. With drafts a call of the model checks several tokens for each row.
"""

import dataclasses
import functools
import math
import operator
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, takewhile
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm
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
# Tokens of an answer, and answers with draws of their own: the number of a draw has 32 bits.
MOST_TOKENS = MOST_ANSWERS = 2**16
Setup = tuple[Config, Params, Sampling, jax.Array]  # and the key of the draws


def bucket(steps: int) -> int:
    """The least of 1, 1.5, 2, 3, 4, 6, ... times FEWEST_STEPS that is not below."""
    size = FEWEST_STEPS
    while size < steps:
        size = size * 4 // 3 if size % 3 == 0 else size * 3 // 2
    return size


def first_draw(id: Any) -> Any:
    """The number of the first draw of a request, or of several."""
    return MOST_TOKENS * (id % MOST_ANSWERS)


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
    return states, sample(sampling, logits, key, first_draw(np.resize([*prompts], N)))


@jax.jit
def with_texts(texts: jax.Array, lengths: jax.Array, token: jax.Array) -> tuple[jax.Array, ...]:
    """The last arguments of ``speculate`` after prompts of these lengths and a token (N,) each."""
    texts = texts.at[jnp.arange(len(texts)), lengths].set(token.astype(texts.dtype))
    return texts, lengths + 1, jnp.zeros_like(lengths)


class Part(NamedTuple):
    """What is new of a request. Each has one last part, which says why its answer has ended.

    ended: "stop" is at a token or a string to stop at, "length" at the limit.
    """

    id: int
    tokens: list[int]
    text: str
    ended: Literal["", "stop", "length", "cancelled", "not finite"]


class Text:
    """The text of an answer as its tokens come, up to a string to stop at.

    The string that is complete first counts; of those that are at the same character, the longest.
    What may be the beginning of one is held back, and so is a character that lacks tokens.
    """

    def __init__(self, to_text: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self.to_text, self.stop, self.stopped, self.held = to_text, stop, False, ""
        # The text of a token depends on those before it: the latest tokens, those among them that
        # have no text yet, and how many characters of their text have come.
        self.latest, self.new, self.seen = list[int](), 0, 0

    def add(self, tokens: list[int]) -> tuple[list[int], str]:
        """Those up to the one that completes a string to stop at, and the text to show."""
        count, shown = 0, ""
        for some in ([x] for x in tokens) if self.stop else [tokens]:
            if self.stopped:
                break
            count, self.new = count + len(some), self.new + len(some)
            self.latest += some
            text = self.to_text(self.latest)
            complete = text.rstrip("\ufffd")  # which stands for a part of a character
            if characters := complete[self.seen :]:
                shown, self.seen = shown + self.until_stop(characters), len(complete)
                if complete == text:
                    self.latest, self.new = self.latest[-self.new :], 0
                    self.seen = len(self.to_text(self.latest))
        return tokens[:count], shown

    def end(self) -> str:
        """What is held back and shown all the same if no token follows."""
        if self.stopped:
            return ""
        return self.until_stop(self.to_text(self.latest)[self.seen :]) + self.held

    def until_stop(self, characters: str) -> str:
        text, longest = self.held + characters, max(map(len, self.stop), default=1)
        ends = [(begin + len(x), begin) for x in self.stop if (begin := text.find(x)) >= 0]
        begins = range(max(0, len(text) - longest + 1), len(text))
        held = (n for n in begins if any(x.startswith(text[n:]) for x in self.stop))
        self.stopped = bool(ends)
        begin = min(ends)[1] if ends else next(held, len(text))
        self.held = "" if ends else text[begin:]
        return text[:begin]


@dataclasses.dataclass
class Request:
    prompt: list[int]
    limit: int
    stop: set[int]  # tokens; NO_TOKEN is one
    text: Text
    answer: list[int] = dataclasses.field(default_factory=list)
    is_long: bool | None = None  # None: not asked yet


class Engine:
    """Answers requests, which may come and be cancelled between any two steps, in slots.

    An id is a number, and that of its draws: a request has the tokens that it has alone. With a
    temperature id + MOST_ANSWERS has the draws of id. The engine forgets a request with its last
    part. All calls are from one thread at a time.

    Args:
      slots: requests that are answered at a time.
      steps: calls of the model per loop.
      continuous: whether a request starts as soon as a slot is free, or when all are.
      capacity: most tokens of a prompt and its answer, which drafts need. None: any number.
      to_text: of tokens, such as ``decode`` of a tokenizer. None: parts have no text.
      draft: most tokens that a call checks beside the next one; needs temperature 0.
      cache: of earlier prompts, to which those of requests are added.
      rings: whether states have ring buffers, which drafts need. None: where it is faster.

    Raises:
      ValueError: of the arguments, here and in ``add``.
    """

    def __init__(
        self,
        setup: Setup,
        slots: int,
        steps: int,
        continuous: bool = True,
        *,
        capacity: int | None = None,
        to_text: Callable[[list[int]], str] | None = None,
        draft: int = 0,
        cache: PrefixCache | None = None,
        rings: bool | None = None,
    ) -> None:
        config, params, sampling, _ = setup
        if min(slots, steps) < 1 or draft < 0:
            raise ValueError(f"{slots=} and {steps=}, expected 1 or more; {draft=}, 0 or more")
        if draft and (capacity is None or sampling.temperature or rings is False):
            raise ValueError(f"{draft=} needs a capacity, temperature 0 and rings")
        if capacity is not None and capacity < 2:
            raise ValueError(f"{capacity=}, expected 2 or more")
        self.setup, self.slots, self.steps, self.continuous = setup, slots, steps, continuous
        self.capacity, self.to_text, self.draft, self.cache = capacity, to_text, draft, cache
        rings = rings_are_faster(config, slots) or draft > 0 if rings is None else rings
        self.rings, self.states = rings, empty_states(config, params, slots, rings=rings)
        self.others: list[jax.Array] = []  # what a loop has beside states, (slots, ...) each
        self.size = bucket(capacity + steps * (1 + draft)) if capacity and draft else 0
        self.known = np.zeros(slots, np.int32)  # tokens in the texts of the rows
        self.requests: dict[int, Request] = {}  # by id, those that wait or run
        self.waiting: dict[int, None] = {}
        self.busy: dict[int, int] = {}  # ids by row
        self.long: tuple[int, int] | None = None  # the id and the row of the one that is read
        self.piece = min(PIECES.get(jax.default_backend(), 64), MOST_STEPS, BLOCK)
        self.most_pieces, self.next_id = 1, 0
        self.parts: list[Part] = []  # of requests that were cancelled
        self.loop: list[jax.Array] | None = None  # results of the one that runs

    @property
    def pending(self) -> bool:
        """Whether there are requests, or parts of them, so that a step has something to do."""
        return bool(self.requests or self.parts)

    def add(
        self,
        prompt: Sequence[int],
        limit: int,
        stop_tokens: Collection[int] = (),
        stop: str | Sequence[str] = (),
        id: int | None = None,
    ) -> int:
        """A request; the result is its id.

        Args:
          limit: most tokens of its answer.
          stop_tokens: the answer ends before one of these.
          stop: the text of the answer ends before one of these strings, or this one, and its tokens
            with the one that completes the string.
          id: one that no request has that waits or runs. None: the next one.
        """
        prompt, limit = [*map(operator.index, prompt)], operator.index(limit)
        id, most = self.next_id if id is None else id, self.setup[0].vocab_size - 1
        stop = (stop,) if isinstance(stop, str) else (*stop,)
        if not prompt:
            raise ValueError("prompt is empty")
        if min(prompt) < 0 or max(prompt) > most:
            raise ValueError(f"prompt has a token that is not in 0 to {most}")
        if not 1 <= limit <= MOST_TOKENS:
            raise ValueError(f"{limit=}, expected 1 to {MOST_TOKENS}")
        if self.capacity and len(prompt) + limit > self.capacity:
            tokens = f"prompt and limit have {len(prompt)} + {limit} tokens"
            raise ValueError(f"{tokens}, more than capacity={self.capacity}")
        if stop and not (self.to_text and all(isinstance(x, str) and x for x in stop)):
            raise ValueError(f"{stop=}, expected strings that are not empty, and to_text")
        if id < 0 or id in self.requests:
            raise ValueError(f"{id=} is negative, or that of a request that has not ended")
        text = Text(self.to_text or (lambda tokens: ""), stop)
        self.requests[id] = Request(prompt, limit, {*stop_tokens, NO_TOKEN}, text)
        self.waiting[id], self.next_id = None, max(self.next_id, id + 1)
        return id

    def cancel(self, id: int) -> bool:
        """Frees the slot of a request, whose last part comes with the next step.

        Returns whether there was one: not if it has ended, or never was.
        """
        if id not in self.requests:
            return False
        self.waiting.pop(id, None)
        self.busy = {row: n for row, n in self.busy.items() if n != id}
        if self.long and self.long[0] == id:
            self.long = self.pieces = self.before = None
        self.parts.append(Part(id, [], self.requests.pop(id).text.end(), "cancelled"))
        return True

    def step(self) -> list[Part]:
        """Starts requests and a loop, or waits for this loop: the first tokens come before it ends.

        A long prompt beside which nothing runs is read by a piece per step.
        """
        parts, self.parts = self.parts, []
        if self.loop is None:
            self.began, self.count = time.perf_counter(), 0
            self.started: list[tuple[list[int], jax.Array]] = []
            self.start_requests()
            if not self.busy:
                return parts
            self.start_loop()
            for rows, token in self.started:
                parts += map(self.take, rows, np.asarray(token)[: len(rows), None].tolist())
            if self.started:
                return parts
            if self.count:
                jax.block_until_ready(self.before)
            self.read_at = time.perf_counter()
        if self.draft:
            text, earlier, self.known = np.asarray(self.loop[0]), self.known, np.array(self.loop[1])
            columns = [text[row, earlier[row] : self.known[row]] for row in range(self.slots)]
        else:
            columns = np.asarray(self.loop[0]).T
        self.loop = None
        if self.count and not self.started:
            loop_per_piece = self.count * (time.perf_counter() - self.read_at)
            loop_per_piece /= self.read_at - self.began
            self.most_pieces = max(1, int(LONGEST_WAIT * loop_per_piece))
        return parts + [self.take(row, columns[row].tolist()) for row in [*self.busy]]

    def run(self) -> Iterator[Part]:
        """Steps until no request is left; those with logits that are not finite are an error then.

        Raises:
          FloatingPointError: there were some.
        """
        failed = dict[int, list[int]]()  # the tokens before logits that are not finite
        while self.pending:
            requests = self.requests.copy()
            for part in self.step():
                if part.ended == "not finite":
                    failed[part.id] = requests[part.id].prompt + requests[part.id].answer
                yield part
        if failed:
            raise not_finite_error(*self.setup[:2], failed)

    def take(self, row: int, column: list[int]) -> Part:
        """The part of a request whose row has new tokens, of which the last may be too many."""
        request = self.requests[id := self.busy[row]]
        answer, column = request.answer, column[: request.limit - len(request.answer)]
        until = [*takewhile(lambda token: token not in request.stop, column)]
        tokens, text = request.text.add(until)
        answer += tokens
        ended: Any = "length" if len(answer) == request.limit else ""
        if len(until) < len(column):
            ended = "not finite" if column[len(until)] == NO_TOKEN else "stop"
        if ended:
            text += request.text.end()
        if request.text.stopped:
            ended = "stop"
        if ended:
            del self.busy[row], self.requests[id]
        return Part(id, tokens, text, ended)

    def is_long(self, id: int) -> bool:
        request, most = self.requests[id], 2 * MOST_STEPS
        if request.is_long is None:
            size = len(request.prompt)
            request.is_long = size > most and (
                not self.cache or size - self.cache.find(request.prompt)[0] > most
            )
        return request.is_long

    def next_prompts(self, most: int) -> dict[int, int]:
        """Those of a prefill and where it begins; or a longer one, if none is being read."""
        begins, total = dict[int, int](), 0
        for n in islice((n for n in self.waiting if not (self.long and self.is_long(n))), most):
            prompt = self.requests[n].prompt
            begin = self.cache.length(prompt) if self.cache and not self.is_long(n) else 0
            total += len(prompt) - begin
            if begins and total > MOST_STEPS:
                break
            begins[n] = begin
        return begins

    def start_requests(self) -> None:
        """Reads prompts into the rows that are free, and pieces of a long one."""
        config, params, *_ = self.setup
        N, free = min(MOST_PROMPTS, self.slots), list[int]()
        if self.continuous or not self.busy:
            free = [*({*range(self.slots)} - {*self.busy, self.long and self.long[1]})]
        while free and (begins := self.next_prompts(min(N, len(free)))):
            rows, free = free[: len(begins)], free[len(begins) :]
            prompts = [self.requests[n].prompt for n in begins]
            for n in begins:
                del self.waiting[n]
            [first, *_] = begins
            if self.is_long(first):
                self.pieces = read_pieces(config, params, prompts[0], self.piece, self.cache)
                self.long, (self.end, self.before) = (first, rows[0]), next(self.pieces)
                if not self.continuous:
                    self.read_long(None)
            elif self.cache:
                self.start(begins, rows, N, self.cache.states(prompts, N))
            elif len(prompts[0]) > MOST_STEPS:
                for begin, part in read_pieces(config, params, prompts[0], MOST_STEPS):
                    begins, initial = {first: begin}, (part, np.array([0]))
                self.start(begins, rows, 1, initial)
            else:
                self.start(begins, rows, N, None)
        if self.long:
            earlier = self.before
            self.read_long(self.most_pieces if self.busy else 1)
            if not self.busy:  # the device has a piece to read meanwhile
                jax.block_until_ready(earlier)

    def start(self, begins: dict[int, int], rows: list[int], N: int, initial: Rows | None) -> None:
        """Reads prompts from there on as the first of N segments, into rows."""
        into = self.states, np.array((rows + [self.slots] * N)[:N])
        rest = {n: self.requests[n].prompt[begin:] for n, begin in begins.items()}
        S = bucket(sum(map(len, rest.values())))
        self.states, token = first_tokens(self.setup, rest, S, into, initial)
        values = [token]
        if self.draft:
            texts, lengths = np.zeros((N, self.size), np.int32), np.zeros(N, np.int32)
            for j, n in enumerate(begins):
                lengths[j] = len(prompt := self.requests[n].prompt)
                texts[j, : lengths[j]] = prompt
            values = [*with_texts(texts, lengths, token)]
            self.known[rows] = 1 + lengths[: len(rows)]
        others = self.others or take_rows(values, np.zeros(self.slots, int))
        self.others = put_rows(others, into[1], values)
        self.busy |= zip(rows, begins, strict=True)
        self.started.append((rows, token))

    def read_long(self, most: int | None) -> None:
        """Reads so many pieces of the long prompt, or all; after the last one it starts."""
        id, row = self.long
        for read in islice(self.pieces, most):
            self.count, (self.end, self.before) = self.count + 1, read
        if self.end + self.piece >= len(self.requests[id].prompt):
            self.start({id: self.end}, [row], 1, (self.before, np.array([0])))
            self.long = self.pieces = self.before = None

    def start_loop(self) -> None:
        config, params, sampling, key = self.setup
        if self.draft:
            loop = config, self.steps, 1 + self.draft, params, self.states, *self.others
            self.states, *self.others = speculate(*loop)
            self.loop = self.others[:2]
            return
        numbers = np.zeros(self.slots, int)
        for row, n in self.busy.items():
            numbers[row] = first_draw(n) + (len(self.requests[n].answer) or 1)
        loop = config, sampling, self.steps, params, self.states, *self.others, key, numbers
        self.states, *self.others, tokens = decode(*loop)
        self.loop = [tokens]

    def warm_up(self) -> None:
        """Compiles what requests run, for all lengths of prompts, and shows how far it is.

        Prefills run one block of the model, which is compiled for all; then a short and a long
        prompt are answered.

        Raises:
          ValueError: there are requests already.
        """
        if self.pending:
            raise ValueError("warm_up is for an engine without requests")
        config, params, *others = self.setup
        short, N = params | dict(blocks=params["blocks"][:1]), min(MOST_PROMPTS, self.slots)
        exact = dataclasses.replace(config, inference_state_dtype="float32")
        cached = self.cache and (self.cache.pool[:1], np.zeros(N, int))
        piece = empty_states(exact, short, 1), np.array([0])
        longest = min(2 * MOST_STEPS + 1, (self.capacity or math.inf) - 1)  # of a kind
        long = longest > 2 * MOST_STEPS

        def read(initial: Rows | None, N: int, S: int) -> Any:
            into = empty_states(config, short, self.slots, rings=self.rings), np.full(N, self.slots)
            return first_tokens((config, short, *others), {0: [0]}, S, into, initial)

        def read_piece(steps: int) -> Any:
            return [*read_pieces(config, short, [0] * (steps + 1), steps)]

        jobs = list[Callable[[], Any]]()
        for most, initial, segments in (
            (N * (min(longest, BLOCK) if self.cache else longest), cached, N),
            (long * self.piece if self.cache else longest - MOST_STEPS, piece, 1),
        ):
            sizes = sorted({bucket(x) for x in range(1, min(most, MOST_STEPS) + 1)})
            jobs += (functools.partial(read, initial, segments, S) for S in sizes)
        once = BLOCK if self.cache else MOST_STEPS
        for steps, needed in {self.piece: long, once: longest > once}.items():
            jobs += [functools.partial(read_piece, steps)] * needed
        with ThreadPoolExecutor(4) as pool:
            done = pool.map(lambda job: jax.block_until_ready(job()), jobs)
            for _ in tqdm(done, total=len(jobs), desc="compiling", unit="program"):
                pass
        for size in 1, longest, 1:
            self.add([0] * size, 1)
            while self.pending:
                self.step()
        self.next_id = 0


def serve(
    setup: Setup,
    prompts: dict[int, list[int]],
    limits: Sequence[int],
    stop: Collection[int],
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
    not finite does not end; the others go on. ``Engine`` has the other arguments.

    Args:
      prompts: by their numbers.
      limits: most tokens of each answer, by the number of its prompt.

    Raises:
      FloatingPointError: at the end, if there are logits that are not finite.
    """
    capacity = max([2, *(len(x) + limits[n] for n, x in prompts.items())])
    options: dict[str, Any] = dict(capacity=capacity, draft=draft, cache=cache, rings=rings)
    engine = Engine(setup, slots, steps, continuous, **options)
    for n, prompt in prompts.items():
        engine.add(prompt, limits[n], stop, id=n)
    for part in engine.run():
        yield part.id, part.tokens, part.ended in ("stop", "length")


def not_finite_error(
    config: Config, params: Params, texts: dict[int, list[int]]
) -> FloatingPointError:
    """Of prompts, by number: the tokens, with those of an answer, before logits that are not."""
    n, text = next(iter(texts.items()))
    what, names = first_not_finite(config, params, text), ", ".join(map(str, sorted(texts)))
    return FloatingPointError(
        f"prompts without an answer: {names}; of prompt {n}, not finite: {what}"
    )
