r"""Generates text with an xLSTM checkpoint of transformers or xlstm, such as NX-AI/xLSTM-7b.

    hf download NX-AI/xLSTM-7b --local-dir=xLSTM-7b
    python examples/xlstm_7b.py --checkpoint=xLSTM-7b --prompt="The capital of France is"
    python examples/xlstm_7b.py --checkpoint=xLSTM-7b --prompts=prompts.txt --devices=2 \
        --temperature=0.8 --top_p=0.95                  # one prompt per line; - is stdin
    python examples/xlstm_7b.py --checkpoint=xLSTM-7b --prompts=prompts.txt --slots=64 \
        --output=answers.jsonl
    python examples/xlstm_7b.py --random --benchmark --batch=64 --prompt_length=1024
    python examples/xlstm_7b.py --random --benchmark --slots=64 --batch=512 \
        --prompt_length=1024 --new_tokens=512 --spread=32    # answers of 16 to 512 tokens

A prefill reads packed prompts. The tokens that follow come from one compiled loop per
--stream_every steps of the model. A single prompt is streamed: a loop runs while the tokens of the
loop before are printed. Of several prompts, --slots are answered at a time. The next one starts
when an answer has ended (--batching=fixed: when all have). Answers are written as they end, each
with the number of its prompt: as "[NUMBER] TEXT", or with --output as a line of JSON. Each --prompt
counts from 0, then each line of the file, which ends with \n or \r\n; an empty line counts and has
no answer.
Ctrl-C keeps the answers that are there.

--prefix_cache=64 keeps the states after 64 blocks of 1,024 tokens with which prompts began, so that
a prompt that begins with one of them is read from there on.

--state_dtype=bfloat16 halves the bytes of the states, which a step rounds at every token.

--draft=7 drafts up to seven tokens per step, those that followed the last two tokens where they
stood before, and checks them in one call of the model, so that text that repeats itself comes
faster. A call of several tokens rounds otherwise than a step of one, so that sometimes another
token is the likeliest; benchmarks/README.md, "Generation", has how many answers differ.

--stop=TEXT ends an answer before this text, which is not printed, as --stop_tokens does before
tokens, or the ids that the checkpoint has for the end of a text.

A prompt begins with what the post-processor of its tokenizer adds, or else, where config.json has
force_bos_token_insert, as that of NX-AI/xLSTM-7b, with bos_token_id.

The model is in xlstm_model.py, the reader of checkpoints in xlstm_checkpoint.py, the loop over
slots in xlstm_server.py.
JAX_COMPILATION_CACHE_DIR=FOLDER makes the next start fast, and MLSTM_PALLAS_BACKEND=mosaic_gpu the
prefill on Hopper GPUs (jax >= 0.11.2).

--benchmark prints one row of JSON. The memory limit of a token is the time in which one device
copies as many bytes as a step reads and writes there: its weights but not the embeddings of other
tokens, and its states twice, or with ring buffers once and a 16th of them again. With --slots there
is a row for each --batching. Where a flag or the checkpoint is wrong, the exit code is 2 and stderr
has one line; after Ctrl-C it is 130. It is 1 where logits are not finite, which leaves one prompt
without an answer and not the others, or where an answer cannot be written.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import re
import statistics
import sys
import time
import timeit
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import command
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from tokenizers import Tokenizer
from tqdm import tqdm
from xlstm_checkpoint import (
    DTYPES,
    CheckpointError,
    Tensors,
    bytes_per_device,
    check_ids,
    check_prompts,
    load,
    open_tensors,
    random_tensors,
    read_bos,
    read_config,
    read_stop_tokens,
    read_text,
    read_tokenizer,
    state_bytes,
    tensors_of,
)
from xlstm_model import (
    MOST_STEPS,
    NO_TOKEN,
    Config,
    Params,
    Sampling,
    decode,
    empty_states,
    rings_are_faster,
    speculate,
)
from xlstm_server import (
    BLOCK,
    LEAST_ENTRIES,
    MOST_ANSWERS,
    MOST_PROMPTS,
    MOST_TOKENS,
    Engine,
    PrefixCache,
    Setup,
    Text,
    first_draw,
    first_tokens,
    not_finite_error,
    read_pieces,
)

SIZES = {
    "7b": Config(),
    "tiny": Config(vocab_size=256, hidden_size=128, num_blocks=2, num_heads=4),
}
BATCHINGS = "fixed", "continuous"
DRAFT = "Tokens to draft from the text so far; 0: none. They change roundings: tokens may differ."
CACHE = f"Blocks of {BLOCK} tokens of prompts whose states are kept: 0, or {LEAST_ENTRIES} or more."
STOP_TOKENS = "Ids; none: eos_token_id of generation_config.json, else of config.json."
FLAGS = flags.FlagValues()
for kind, *definition in (
    ("string", "checkpoint", None, "Folder of a Hugging Face checkpoint."),
    ("boolean", "random", False, "Random weights and prompts; prints token ids."),
    ("enum", "size", "7b", list(SIZES), "Size of the model with random weights."),
    ("multi_string", "prompt", [], "A prompt; may be repeated."),
    ("string", "prompts", None, "File with a prompt per line; -: stdin."),
    ("string", "output", None, "File for answers, one line of JSON each."),
    ("integer", "slots", None, "Prompts that are answered at a time; none: all.", 1),
    ("enum", "batching", "continuous", BATCHINGS, "When a slot that is free is filled."),
    ("integer", "new_tokens", 128, "Most tokens to generate per prompt.", 1, MOST_TOKENS),
    ("float", "temperature", 0.0, "0 takes the likeliest token."),
    ("float", "top_p", 1.0, "Draw from the fewest tokens with this mass.", 0.0, 1.0),
    ("integer", "seed", 0, "Seed for sampling, random weights and prompts.", 0, 2**32 - 1),
    ("list", "stop_tokens", None, STOP_TOKENS),
    ("multi_string", "stop", [], "Text before which an answer ends; may be repeated."),
    ("enum", "dtype", "bfloat16", DTYPES, "Type of the weights."),
    ("enum", "state_dtype", None, DTYPES, "Type of the states; none: inference_state_dtype."),
    ("integer", "devices", 1, "The heads are split over them.", 1),
    # The host needs a thousandth of a second between two loops, and 16 tokens take 60 or more.
    ("integer", "stream_every", 16, "Steps of the model per loop.", 1, MOST_TOKENS),
    ("integer", "draft", 0, DRAFT, 0, 7),
    ("integer", "prefix_cache", 0, CACHE, 0, 2**20),
    ("boolean", "benchmark", False, "Measure, and print one row of JSON."),
    ("integer", "batch", 1, "Number of random prompts.", 1, MOST_ANSWERS),
    ("integer", "prompt_length", 128, "Tokens per random prompt.", 1, 2**20),
    ("integer", "spread", 1, "The longest random prompt and answer, by the shortest.", 1),
):
    getattr(flags, f"DEFINE_{kind}")(*definition, flag_values=FLAGS)
command.check_temperature(FLAGS)
flags.register_validator("stop", all, "it is empty", FLAGS)
flags.register_validator("prefix_cache", lambda x: x == 0 or x >= LEAST_ENTRIES, CACHE, FLAGS)
MOST_RANDOM = 2**28  # tokens of all random prompts
MULTIPLE = 64  # of the steps of a prefill, so that prompts of similar lengths compile once


@dataclasses.dataclass(frozen=True)
class Model:
    config: Config
    tensors: Tensors
    params: Params
    prompts: dict[int, list[int]]  # by number
    stop_tokens: set[int]
    tokenizer: Tokenizer | None
    limits: Sequence[int] = ()  # tokens of each answer, by number
    slots: int = 0  # 0: all prompts in one batch, which does not end before --new_tokens
    output: IO[str] | None = None

    @property
    def steps(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts.values()))

    def setup(self) -> Setup:
        sampling = Sampling(FLAGS.temperature, FLAGS.top_p)
        return self.config, self.params, sampling, jax.random.key(FLAGS.seed)

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens) if self.tokenizer else " ".join(map(str, tokens))


def build() -> Model:
    """The model and its prompts. What is wrong is found before weights are read.

    Raises:
      CheckpointError: what is wrong.
    """
    if FLAGS.random == bool(FLAGS.checkpoint):
        raise CheckpointError("give either --checkpoint=FOLDER or --random")
    folder, config = Path(FLAGS.checkpoint or ""), SIZES[FLAGS.size]
    texts = {} if FLAGS.random or FLAGS.benchmark else read_prompts()
    bos, stop_tokens = [], set()
    if not FLAGS.random:
        with command.naming("checkpoint"):
            config, values = read_config(folder)
            bos = read_bos(folder, config, values)
            if FLAGS.stop_tokens is None:
                stop_tokens = read_stop_tokens(folder, config, values)
    if FLAGS.state_dtype:
        config = dataclasses.replace(config, inference_state_dtype=FLAGS.state_dtype)
    if FLAGS.stop_tokens is not None:
        with command.naming("stop_tokens"):
            ids = [*map(int, FLAGS.stop_tokens)]
        stop_tokens = {*check_ids(config, "--stop_tokens", ids)}
    tensors = tensors_of(config, FLAGS.dtype, FLAGS.devices)
    read, tokenizer = random_tensors(FLAGS.seed), None
    if not FLAGS.random:
        with command.naming("checkpoint"):
            read = open_tensors(folder, tensors, config)
            tokenizer = None if FLAGS.benchmark else read_tokenizer(folder)
    if tokenizer:
        prompts = {
            n: ids if ids[:1] == bos else bos + ids
            for n, text in texts.items()
            for ids in [tokenizer.encode(text).ids]  # with what its post-processor adds: a BOS
        }
        limits = [FLAGS.new_tokens] * (1 + max(prompts))
    else:
        rng = np.random.default_rng(FLAGS.seed)
        lengths, limits = (
            rng.integers(-(-size // FLAGS.spread), size, FLAGS.batch, endpoint=True).tolist()
            for size in (FLAGS.prompt_length, FLAGS.new_tokens)
        )
        if sum(lengths) > MOST_RANDOM:
            total = f"--batch and --prompt_length make {sum(lengths)} tokens"
            raise CheckpointError(f"{total}, expected at most {MOST_RANDOM}")
        prompts = {
            n: rng.integers(config.vocab_size, size=length).tolist()
            for n, length in enumerate(lengths)
        }
    if FLAGS.temperature and max(prompts) >= MOST_ANSWERS:
        raise CheckpointError(f"--temperature: draws have numbers for {MOST_ANSWERS} prompts")
    several = not FLAGS.benchmark and (len(prompts) > 1 or bool(FLAGS.output))
    slots = min(FLAGS.slots or several * len(prompts), len(prompts))
    if FLAGS.draft and (FLAGS.temperature or (len(prompts) > 1 and not slots)):
        raise CheckpointError("--draft is for temperature 0, and with --benchmark for --slots")
    if FLAGS.prefix_cache and not slots:
        raise CheckpointError("--prefix_cache is for several prompts")
    if FLAGS.benchmark and FLAGS.stop:
        raise CheckpointError("--stop is for text, which --benchmark does not make")
    if FLAGS.benchmark and not slots and FLAGS.new_tokens == 1:
        raise CheckpointError("--benchmark times the tokens after the first, so --new_tokens >= 2")
    # Of a long prompt there are states before and after a part, beside the rows.
    long = 2 * (max(map(len, prompts.values())) > MOST_STEPS)
    # One block at a time has the states before and after the prompts of a prefill.
    rows = slots + -(-2 * MOST_PROMPTS // config.num_blocks) if slots else len(prompts)
    cached = FLAGS.prefix_cache and 1 + FLAGS.prefix_cache
    steps = sum(map(len, prompts.values()))
    steps = MOST_STEPS if slots else min(steps, MOST_STEPS) if len(prompts) == 1 else steps
    check_prompts(config, tensors, prompts, rows + cached + long, steps)
    with contextlib.ExitStack() as files:
        output = None
        if FLAGS.output:
            output = files.enter_context(command.open_alone("output", check_output()))
        with command.naming("checkpoint"):
            params = load(config, tensors, read)
        if output and Path(FLAGS.output).is_file():  # a pipe has nothing to remove
            output.truncate(0)
        files.pop_all()
    return Model(config, tensors, params, prompts, stop_tokens, tokenizer, limits, slots, output)


def check_output() -> str:
    """--output, which is no file that this command has read or would read the next time.

    Raises:
      CheckpointError: it is one.
    """
    named = FLAGS.output, FLAGS.prompts or "", FLAGS.checkpoint or ""
    path, prompts, checkpoint = (Path(os.path.realpath(x)) for x in named)
    of_the_checkpoint = FLAGS.checkpoint and path.parent == checkpoint
    if (FLAGS.prompts and path == prompts) or (
        of_the_checkpoint and path.suffix in (".json", ".yaml", ".safetensors")
    ):
        raise CheckpointError(f"--output: {path} is for --prompts or --checkpoint")
    return FLAGS.output


def read_prompts() -> dict[int, str]:
    """The prompts by their numbers."""
    texts = dict(enumerate(FLAGS.prompt))
    with command.naming("prompt"):
        for text in texts.values():
            text.encode()
    if FLAGS.prompts:
        with command.naming("prompts"):
            lines = re.split("\r?\n", read_text(FLAGS.prompts))
        texts |= {n: line for n, line in enumerate(lines, len(texts)) if line}
    if not texts:
        raise CheckpointError("no prompt: give --prompt, or --prompts=FILE with one per line")
    return texts


def generate(
    model: Model, new_tokens: int, per_call: list[float] | None = None
) -> Iterator[np.ndarray]:
    """The next tokens of all prompts, (steps, B), as they come: first one, then --stream_every.

    per_call: with drafts it gets, before each yield, the mean number of tokens per call so far.

    Raises:
      FloatingPointError: logits are not finite.
    """
    answers = []
    for tokens in unchecked(model, new_tokens, [] if per_call is None else per_call):
        wrong = tokens == NO_TOKEN
        count = np.argmax(wrong.any(axis=1)) if wrong.any() else len(tokens)
        answers.append(tokens[:count])
        yield answers[-1]
        if wrong.any():
            rows = zip(
                model.prompts.items(), np.vstack(answers).T.tolist(), wrong[count], strict=True
            )
            texts = {n: prompt + answer for (n, prompt), answer, first in rows if first}
            raise not_finite_error(model.config, model.params, texts)


def unchecked(model: Model, new_tokens: int, per_call: list[float]) -> Iterator[np.ndarray]:
    """As ``generate``, with NO_TOKEN where logits are not finite."""
    prompts, initial = model.prompts, None
    setup = config, params, sampling, key = model.setup()
    if (B := len(prompts)) == 1 and model.steps > MOST_STEPS:
        [(n, prompt)] = prompts.items()
        for end, states in read_pieces(config, params, prompt, MOST_STEPS):
            prompts, initial = {n: prompt[end:]}, (states, np.array([0]))
    S = -(-sum(map(len, prompts.values())) // MULTIPLE) * MULTIPLE
    rings = FLAGS.draft > 0 or rings_are_faster(config, B)
    states = empty_states(config, params, B, rings=rings)
    states, token = first_tokens(setup, prompts, S, (states, np.arange(B)), initial)
    yield np.asarray(token)[None]
    if FLAGS.draft:
        yield from generate_with_drafts(model, states, np.asarray(token), new_tokens - 1, per_call)
        return
    coming = []
    for number in range(1, new_tokens, FLAGS.stream_every):
        loop = config, sampling, FLAGS.stream_every, params, states, token, key
        states, token, tokens = decode(*loop, first_draw(np.array([*prompts])) + number)
        yield from map(np.asarray, coming)
        coming = [tokens[: new_tokens - number]]
    yield from map(np.asarray, coming)


def generate_with_drafts(
    model: Model, states: list[Any], token: np.ndarray, new_tokens: int, per_call: list[float]
) -> Iterator[np.ndarray]:
    """As ``generate`` of one prompt; a call of the model checks --draft tokens."""
    T, calls = 1 + FLAGS.draft, FLAGS.stream_every
    [prompt] = model.prompts.values()
    known, accepted = [*prompt, *token.tolist()], np.zeros(1, np.int32)
    text = jnp.array([known + [0] * (new_tokens + calls * T)], jnp.int32)
    length, count, end = np.array([len(known)], np.int32), 0, len(known) + new_tokens
    while length[0] < end:
        before, loop = int(length[0]), (model.config, calls, T, model.params)
        states, text, length, accepted = speculate(*loop, states, text, length, accepted)
        count += calls
        per_call.append((int(length[0]) - len(known)) / count)
        yield np.asarray(text)[:, before : min(int(length[0]), end)].T


def print_drafts(per_call: list[float]) -> None:
    if per_call:
        share = f"{per_call[-1]:.2f} tokens per call of at most {1 + FLAGS.draft}"
        print(share, file=sys.stderr)


def run(model: Model, new_tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and from there to the last one."""
    started, per_call = time.perf_counter(), list[float]()
    times = [time.perf_counter() for _ in generate(model, new_tokens, per_call)]
    seconds = times[0] - started, time.perf_counter() - times[0]
    print_drafts(per_call)
    return seconds


def stream(model: Model) -> None:
    """Prints the answer to a single prompt as it comes, up to a stop token or text."""
    text, stop = Text(model.text, FLAGS.stop), model.stop_tokens
    count, times, per_call = 0, [time.perf_counter()], list[float]()
    try:
        for tokens in generate(model, FLAGS.new_tokens, per_call):
            times.append(time.perf_counter())
            column = tokens[:, 0].tolist()
            answer = [*itertools.takewhile(lambda token: token not in stop, column)]
            used, shown = text.add(answer)
            print(command.printable(shown), end="", flush=True)
            count += len(used)
            if text.stopped or len(answer) < len(column):
                break
    finally:  # also after Ctrl-C the line ends before anything is written to stderr
        print(command.printable(text.end()), flush=True)
    rest = time.perf_counter() - times[1]
    rate = f"{(count - 1) / rest:.1f} tokens/s" if count > 1 else "no more"
    print_drafts(per_call)
    print(f"first token after {times[1] - times[0]:.3f} s, then {rate}", file=sys.stderr)


def answers(model: Model, batching: str) -> Iterator[tuple[int, list[int], str]]:
    """The numbers of prompts, their answers and the text of these, as they end."""
    cache = (
        PrefixCache(model.config, model.params, FLAGS.prefix_cache) if FLAGS.prefix_cache else None
    )
    limits, to_text = model.limits, None if FLAGS.benchmark else model.text
    capacity = max(len(x) + limits[n] for n, x in model.prompts.items())
    options = dict(capacity=capacity, to_text=to_text, draft=FLAGS.draft, cache=cache)
    queue = model.slots, FLAGS.stream_every, batching == "continuous"
    engine = Engine(model.setup(), *queue, **options)
    for n, prompt in model.prompts.items():
        engine.add(prompt, limits[n], model.stop_tokens, FLAGS.stop, n)
    so_far = collections.defaultdict(list)
    for part in engine.run():
        so_far[part.id].append(part)
        if part.ended in ("stop", "length"):
            parts = so_far.pop(part.id)
            tokens = [token for x in parts for token in x.tokens]
            yield part.id, tokens, "".join(x.text for x in parts)


def write_answers(model: Model) -> None:
    """Writes answers as they end; stderr shows how many there are."""
    coming = answers(model, FLAGS.batching)
    with model.output or contextlib.nullcontext() as output:
        for n, tokens, text in tqdm(coming, total=len(model.prompts), unit="answer"):
            if output:
                row = dict(prompt=n, answer=text, tokens=tokens)
                print(json.dumps(row), file=output, flush=True)
            else:
                tqdm.write(command.printable(f"[{n}] {text}"))
                sys.stdout.flush()


def benchmark_slots(model: Model, batching: str) -> dict[str, Any]:
    """A row of measurements of the second run; the first one compiles."""
    for _ in range(2):
        started = time.perf_counter()
        count = sum(len(tokens) for _, tokens, _ in answers(model, batching))
        seconds = time.perf_counter() - started
    row = dict(batching=batching, slots=model.slots, new_tokens=count, seconds=seconds)
    return row | dict(tokens_per_s=count / seconds)


def copy_rate() -> float:
    """Bytes per second that a copy on the device reads and writes."""
    x = jnp.zeros(2**28 if jax.devices()[0].platform == "gpu" else 2**22, jnp.float32)
    copy, calls = jax.jit(lambda x: x + 1.0), 10

    def copies() -> None:
        y = x
        for _ in range(calls):
            y = copy(y)
        y.block_until_ready()

    return 2 * x.nbytes * calls / min(timeit.repeat(copies, number=1))


def benchmark(model: Model) -> dict[str, Any]:
    """A row of measurements: medians of three runs."""
    config, new_tokens, devices = model.config, FLAGS.new_tokens, FLAGS.devices
    runs = [run(model, new_tokens) for _ in range(3)]
    first, rest = (statistics.median(column) for column in zip(*runs, strict=True))
    B, steps, weights = len(model.prompts), model.steps, dict(model.tensors)
    if not config.tie_word_embeddings:
        del weights["backbone.embeddings.weight"]
    # A step reads and writes the states; with ring buffers of 16 tokens it writes a 16th of them.
    moves = 1 + 1 / 16 if FLAGS.draft or rings_are_faster(config, B) else 2
    moved = bytes_per_device(weights) + moves * B * state_bytes(config, devices)
    products = sum(
        x.size for name, x in weights.items() if ".blocks." in name and len(x.shape) == 2
    )
    # C + k v^T and C^T q. Only the last token of a prompt needs logits.
    products += 2 * config.num_blocks * config.qk_dim * config.head_dims[1]
    flops = 2 * (steps * products + B * config.vocab_size * config.hidden_size)
    rate, per_token = copy_rate(), rest / (new_tokens - 1)
    return dict(
        new_tokens=new_tokens,
        first_token_ms=1e3 * first,
        prefill_tflops=flops / first / 1e12,
        ms_per_token=1e3 * per_token,
        tokens_per_s=B / per_token,
        gb_per_token=moved / 1e9,
        copy_gbps=rate / 1e9,
        memory_limit_pct=100 * moved / rate / per_token,
    )


def answer(model: Model) -> None:
    """Does what the flags ask for."""
    if not model.slots:
        compiled = sum(run(model, min(FLAGS.new_tokens, 1 + FLAGS.stream_every)))
        print(f"compiled in {compiled:.1f} s", file=sys.stderr)
    if not FLAGS.benchmark:
        return write_answers(model) if model.slots else stream(model)
    facts = dict(
        device=jax.devices()[0].device_kind,
        devices=FLAGS.devices,
        jax=jax.__version__,
        dtype=FLAGS.dtype,
        state_dtype=model.config.inference_state_dtype,
        batch=len(model.prompts),
        prompt_tokens=model.steps,
    )
    for batching in BATCHINGS if model.slots else [""]:
        row = benchmark_slots(model, batching) if batching else benchmark(model)
        print(json.dumps(facts | row), flush=True)
    return None


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    return command.run(argv, FLAGS, lambda _: answer(build()), CheckpointError, __doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
