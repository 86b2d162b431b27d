r"""Times a server's day: examples/xlstm_server.py answers 1,000 requests of clients that wait.

    python benchmarks/server_benchmark.py                              # 1b on a GPU, else tiny
    python benchmarks/server_benchmark.py --states=ring --draft=0 --cache=0,64 --jsonl=server.jsonl
    python benchmarks/server_benchmark.py --states=ring --draft=0 --cache=0 --long_prompt=50000

There is a client per slot. Each sends its next request when its answer has ended. A request begins
with one of --systems system prompts of 1 to 4 blocks of 1,024 tokens (xlstm_server.BLOCK), goes on
with --tail / 16 to --tail tokens of its own, and has an answer of --new_tokens / 16 to --new_tokens
tokens. All are random, of a fixed seed, and so are the weights. Tokens are the likeliest ones.

A row is a combination of

    states   "step" (mlstm_recurrent_step) or "ring" (mlstm_ring_step)
    draft    tokens that a call checks beside the next one, looked up in the text so far; ring only
    cache    blocks of tokens whose states are kept; 0: every prompt is read from its first token
    text     "random" answers hardly repeat themselves, so that nearly no draft is right; "repeated"
             ones do after 64 tokens, because of weights with which a token decides on the next one

The time to the first token is from the end of the client's last answer until the host has the
token, without the first request of each client. Tokens per call are those that a call of the model
adds to an answer: with drafts, one and the accepted ones. "Same" is the share of answers that are
those of the first row of their text: other sums round otherwise. Memory is the most that the device
had in use, read 500 times per second.

With --long_prompt there are two rows instead, without and with a prompt of so many tokens that is
read while all other slots have answers. They have the time between two tokens of these answers,
which is the time between two loops divided by the tokens of one, and the ratio of the 95th
percentiles. The first token is that of the long prompt.

Exit code 1 when an answer lacks tokens or the server fails, 2 when the request makes no sense, 130
after Ctrl-C.
"""

import functools
import itertools
import statistics
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import command
import jax
import numpy as np
import profiles
import reporting
import runner
from shapes import Shape
from tqdm import tqdm

STATES, TEXTS = ("ring", "step"), ("random", "repeated")
CYCLE = 64  # tokens
SIZES = {"1b": dict(hidden_size=2048, num_blocks=24, num_heads=4)}
SIZES["tiny"] = dict(vocab_size=256, hidden_size=128, num_blocks=2, num_heads=4)


def random_requests(options, vocabulary, block):
    """Prompts by their numbers, and the tokens of their answers."""
    rng = np.random.default_rng(0)
    systems = [rng.integers(vocabulary, size=block * (1 + n % 4)) for n in range(options.systems)]
    prompts = {}
    for n in range(options.requests):
        tail = rng.integers(-(-options.tail // 16), options.tail, endpoint=True)
        parts = systems[rng.integers(len(systems))], rng.integers(vocabulary, size=tail)
        prompts[n] = np.concatenate(parts).tolist()
    longest = options.new_tokens
    limits = rng.integers(-(-longest // 16), longest, len(prompts), endpoint=True).tolist()
    return prompts, limits


def repeating(params):
    """Weights with which the tokens of a cycle follow one another, whatever the blocks add."""
    x = params["embeddings"]
    tokens = np.arange(len(x))
    first = tokens - tokens % CYCLE
    before = first + (tokens - first - 1) % np.minimum(CYCLE, len(x) - first)
    return params | dict(embeddings=10 * x.shape[1] ** 0.5 * x, lm_head=x[before])


def measure(row, answer, limits, slots, steps, first):
    """Fills the row.

    answer: () -> what ``serve`` yields.
    first: the answers of the first row, to which this function adds those that it lacks.
    """
    sent, ends = [], []  # times of requests, by number
    answers, firsts, per_call = {}, {}, []
    with profiles.peak_memory() as peak, tqdm(total=len(limits), unit="answer") as bar:
        started = time.perf_counter()
        for n, tokens, ended in answer():
            now = time.perf_counter()
            if n not in firsts:
                sent.append(ends[n - slots] if n >= slots else started)
                firsts[n] = now - sent[n]
            elif not ended:
                per_call.append(len(tokens) / steps)
            answers.setdefault(n, []).extend(tokens)
            if ended:
                ends.append(now)
                bar.update()
        seconds = time.perf_counter() - started
    if wrong := [n for n, limit in enumerate(limits) if len(answers.get(n, [])) != limit]:
        raise runner.WrongOutputError(f"answer {wrong[0]} has not {limits[wrong[0]]} tokens")
    first |= answers | first
    waits = sorted(firsts[n] for n in firsts if n >= slots) or [*firsts.values()]
    row |= dict(
        ms=1e3 * seconds,
        requests=len(limits),
        new_tokens=sum(limits),
        tokens_per_s=sum(limits) / seconds,
        first_token_ms=1e3 * statistics.median(waits),
        first_token_95_ms=1e3 * float(np.percentile(waits, 95)),
        tokens_per_call=statistics.mean(per_call) if per_call else None,
        same_pct=100 * statistics.mean(answers[n] == first[n] for n in answers),
        peak_mib=peak[0] / 2**20 if peak else None,
    )


def measure_gaps(row, answer, long, before):
    """Fills the row with the time between tokens; ``answer`` as for ``measure``.

    long: the number of the long prompt, up to whose first token it measures; None: for 64 loops.
    before: the row without it.
    """
    for _ in range(2):  # the first one compiles
        times, started = {}, time.perf_counter()
        for n, tokens, _ in answer():
            times.setdefault(n, []).append((time.perf_counter(), len(tokens)))
            if n == long or (long is None and len(times[n]) > 65):
                break
    parts = [x for m, x in times.items() if m != long]
    # A first token comes with the tokens of the loop after it.
    gaps = [(y - x) / n for some in parts for (x, _), (y, n) in itertools.pairwise(some[1:]) if n]
    row |= dict(
        ms=1e3 * (times[n][-1][0] - started),
        token_ms=1e3 * statistics.median(gaps),
        token_95_ms=1e3 * float(np.percentile(gaps, 95)),
    )
    if long is not None:
        row |= dict(
            first_token_ms=row["ms"], token_95_ratio=row["token_95_ms"] / before["token_95_ms"]
        )


def cases_of(options):
    """A text, the entries of the cache, the kind of states and the drafts of each row."""
    cases = [
        (text, entries, states, draft)
        for text, entries, states, draft in itertools.product(
            options.text, options.cache, options.states, options.draft
        )
        if (states == "ring" or not draft) and (text == "random" or draft)
    ]
    if not cases:
        raise command.RequestError("--draft needs --states=ring, and --text=repeated drafts")
    return cases


def measured_rows(options):
    """A row for each kind of states, drafts and cache."""
    import xlstm_checkpoint
    import xlstm_server as server
    from xlstm_model import Config, Sampling

    cases = cases_of(options)
    gpu = runner.on_gpu()
    name = options.size or ("1b" if gpu else "tiny")
    config, slots, steps = Config(**SIZES[name]), options.slots, options.steps
    runner.check_gpu(["triton"] if gpu else ["xla"])
    prompts, limits = random_requests(options, config.vocab_size, server.BLOCK)
    tensors = xlstm_checkpoint.tensors_of(config, options.dtype, 1)
    params = xlstm_checkpoint.load(config, tensors, xlstm_checkpoint.random_tensors(0))
    setups = {
        text: (config, weights, Sampling(), jax.random.key(0))
        for text, weights in zip(TEXTS, (params, repeating(params)), strict=True)
    }

    def options_of(case):
        text, entries, states, draft = case
        cache = server.PrefixCache(*setups[text][:2], entries) if entries else None
        return dict(draft=draft, cache=cache, rings=states == "ring")

    def serve(some, case, limits=limits):
        setup = setups[case[0]]
        return server.serve(setup, some, limits, set(), slots, steps, **options_of(case))

    if options.long_prompt:
        yield from rows_with_a_long_prompt(options, config, name, cases, serve)
        return
    capacity = max(len(prompts[n]) + limits[n] for n in prompts)
    for case in cases:
        more = dict(capacity=capacity, **options_of(case))
        server.Engine(setups[case[0]], slots, steps, **more).warm_up()
    for _ in serve({n: prompts[n] for n in range(min(slots, len(prompts)))}, cases[0]):
        pass  # the first answers of a process take longer
    DHQK, DHV = config.head_dims
    shape = Shape(slots, config.num_heads, max(map(len, prompts.values())), DHQK, DHV)
    first = {text: {} for text in TEXTS}
    for case in cases:
        keys = dict(zip(("text", "cache", "states", "draft"), case, strict=True))
        keys |= dict(slots=slots, steps=steps, direction="fwd", dtype=options.dtype)
        row = runner.new_row(options, name, shape, "xlstm_server", **keys)
        answer = functools.partial(serve, prompts, case)
        yield runner.attempt(row, True, measure, answer, limits, slots, steps, first[case[0]])


def rows_with_a_long_prompt(options, config, name, cases, serve):
    """Two rows for each case, without and with it, while the other slots have endless answers."""
    from xlstm_server import MOST_TOKENS

    rng, slots = np.random.default_rng(0), options.slots
    sizes = [*rng.integers(1, options.tail, slots - 1, endpoint=True), options.long_prompt]
    prompts = {n: rng.integers(config.vocab_size, size=x).tolist() for n, x in enumerate(sizes)}
    shape = Shape(slots, config.num_heads, options.long_prompt, *config.head_dims)
    for case in cases:
        keys = dict(zip(("text", "cache", "states", "draft"), case, strict=True))
        keys |= dict(slots=slots, steps=options.steps, direction="fwd", dtype=options.dtype)
        before = None
        for count, long in ((slots - 1, None), (slots, slots - 1)):
            more = dict(long_prompt=options.long_prompt if long else 0)
            row = runner.new_row(options, name, shape, "xlstm_server", **keys, **more)
            some = {n: prompts[n] for n in range(count)}
            answer = functools.partial(serve, some, case, [MOST_TOKENS] * slots)
            row = runner.attempt(row, True, measure_gaps, answer, long, before)
            before = row
            yield row


COLUMNS = reporting.columns(
    """
size             name
states           states
text             text
draft            draft             d
cache            cache             d
tokens/s         tokens_per_s      .0f
first token ms   first_token_ms    .1f
95th percentile  first_token_95_ms  .1f
tokens per call  tokens_per_call   .3f
long prompt      long_prompt       d
ms per token     token_ms          .2f
its 95th         token_95_ms       .2f
ratio            token_95_ratio    .2f
same %           same_pct          .1f
peak MiB         peak_mib          .0f
note             note
"""
)


def known(numbers):
    """The parser of a number that is one of these."""

    def parse(text):
        if (number := int(text)) not in numbers:
            raise ValueError(f"{number} is out of range")
        return number

    return parse


def define_flags(define):
    define.enum("size", None, list(SIZES), "None: 1b, without a GPU tiny.")
    define.names("states", STATES, STATES, "see above.")
    define.items("draft", ["0", "3"], known(range(8)), "Drafts per call, 0 to 7.")
    define.names("text", TEXTS, TEXTS, "see above; repeated with drafts only.")
    entries = known({0, *range(17, 2**16)})
    define.items("cache", ["64", "0"], entries, "Blocks that are kept: 0, or 17 and more.")
    define.integer("slots", 64, "Requests that are answered at a time.", 1)
    define.integer("steps", 16, "Calls of the model per loop.", 1)
    define.integer("requests", 1000, "Requests of the day.", 1)
    define.integer("systems", 8, "System prompts.", 1)
    define.integer("tail", 512, "Most tokens of a request beside its system prompt.", 1)
    define.integer("new_tokens", 240, "Most tokens of an answer.", 1)
    define.integer("long_prompt", 0, "Tokens of a prompt beside running answers.", 0, 2**20)
    define.enum("dtype", "bfloat16", ("bfloat16", "float32"), "Type of the weights.")
    define.shared("commit", "from_jsonl", "jsonl")


run = functools.partial(runner.run, measured_rows, COLUMNS)


if __name__ == "__main__":
    command.main(define_flags, run)
