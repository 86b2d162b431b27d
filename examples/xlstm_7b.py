r"""Generates text with a Hugging Face xLSTM checkpoint, such as NX-AI/xLSTM-7b, in JAX.

    hf download NX-AI/xLSTM-7b --local-dir=xLSTM-7b
    python examples/xlstm_7b.py --checkpoint=xLSTM-7b --prompt="The capital of France is"
    python examples/xlstm_7b.py --checkpoint=xLSTM-7b --prompts_file=prompts.txt --devices=2 \
        --temperature=0.8 --top_p=0.95                  # one prompt per line; - is stdin
    python examples/xlstm_7b.py --random --benchmark --batch=64 --prompt_length=1024

All prompts are packed into one prefill. The tokens that follow come from one compiled loop per
--stream_every tokens, which runs while the tokens of the loop before are printed. A single prompt
is streamed; several are printed as they finish.

The model is in xlstm_model.py, the reader of checkpoints in xlstm_checkpoint.py.
JAX_COMPILATION_CACHE_DIR=FOLDER makes the next start fast, and MLSTM_PALLAS_BACKEND=mosaic_gpu the
prefill on Hopper GPUs (jax >= 0.11.2). XLA_FLAGS=--xla_gpu_enable_command_buffer=+WHILE makes a
CUDA graph of the loop: 253 instead of 250 tokens/s for a prompt on an H200.

--benchmark prints one row of JSON. The memory limit of a token is the time in which one device
copies as many bytes as a step reads and writes there: its weights but not the embeddings of other
tokens, and its states twice. Where something is wrong, the exit code is 1 and stderr has one line.
"""

import dataclasses
import itertools
import json
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tokenizers import Tokenizer
from xlstm_checkpoint import (
    DTYPES,
    CheckpointError,
    Tensors,
    bytes_per_device,
    check_prompts,
    load,
    open_tensors,
    random_tensors,
    read_config,
    read_text,
    read_tokenizer,
    state_bytes,
    stop_ids,
    tensors_of,
)
from xlstm_model import Config, Params, Sampling, decode, next_logits, prefill, sample

from mlstm_pallas import pack_lengths

SIZES = {
    "7b": Config(),
    "tiny": Config(vocab_size=256, hidden_size=128, num_blocks=2, num_heads=4),
}
# Flags of their own where a test imports several programs with equal names.
FLAGS = flags.FLAGS if __name__ == "__main__" else flags.FlagValues()


for kind, *definition in (
    ("string", "checkpoint", None, "Folder of a Hugging Face checkpoint."),
    ("boolean", "random", False, "Random weights and prompts; prints token ids."),
    ("enum", "size", "7b", list(SIZES), "Size of the model with random weights."),
    ("multi_string", "prompt", [], "A prompt; may be repeated."),
    ("string", "prompts_file", None, "A prompt per line; -: stdin."),
    ("integer", "new_tokens", 128, "Most tokens to generate per prompt.", 1),
    ("float", "temperature", 0.0, "0 takes the likeliest token.", 0.0),
    ("float", "top_p", 1.0, "Draw from the likeliest tokens of this mass.", 0.0, 1.0),
    ("integer", "seed", 0, "Seed for sampling, random weights and prompts.", 0),
    ("list", "stop_tokens", None, "Ids; none: eos_token_id of config.json."),
    ("enum", "dtype", "bfloat16", DTYPES, "Type of the weights."),
    ("integer", "devices", 1, "The heads are split over them.", 1),
    ("integer", "stream_every", 16, "Tokens per loop.", 1),
    ("boolean", "benchmark", False, "Measure, and print one row of JSON."),
    ("integer", "batch", 1, "Number of random prompts.", 1),
    ("integer", "prompt_length", 128, "Tokens per random prompt.", 1),
):
    getattr(flags, f"DEFINE_{kind}")(*definition, flag_values=FLAGS)
MULTIPLE = 64  # of the steps of a prefill, so that prompts of similar lengths compile once


@dataclasses.dataclass(frozen=True)
class Model:
    config: Config
    tensors: Tensors
    params: Params
    prompts: list[list[int]]
    stop_tokens: set[int]
    tokenizer: Tokenizer | None

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens) if self.tokenizer else " ".join(map(str, tokens))


def build() -> Model:
    """The model and its prompts. What is wrong is found before weights are read.

    Raises:
      CheckpointError: what is wrong.
    """
    if FLAGS.random == bool(FLAGS.checkpoint):
        raise CheckpointError("give either --checkpoint=FOLDER or --random")
    folder, values, config = Path(FLAGS.checkpoint or ""), {}, SIZES[FLAGS.size]
    if not FLAGS.random:
        config, values = read_config(folder)
    tensors = tensors_of(config, FLAGS.dtype, FLAGS.devices)
    read = random_tensors(FLAGS.seed) if FLAGS.random else open_tensors(folder, tensors)
    tokenizer = None if FLAGS.random or FLAGS.benchmark else read_tokenizer(folder)
    if tokenizer:
        bos = [values.get("bos_token_id", 0)] if values.get("force_bos_token_insert") else []
        encoded = (tokenizer.encode(text).ids for text in read_prompts())
        prompts = [ids if ids[:1] == bos else bos + ids for ids in encoded]
    else:
        draw = np.random.default_rng(FLAGS.seed).integers
        prompts = draw(config.vocab_size, size=(FLAGS.batch, FLAGS.prompt_length)).tolist()
    check_prompts(config, tensors, prompts)
    stop = FLAGS.stop_tokens
    stop_tokens = stop_ids(values.get("eos_token_id") if stop is None else stop)
    params = load(config, tensors, read)
    return Model(config, tensors, params, prompts, stop_tokens, tokenizer)


def read_prompts() -> list[str]:
    texts = list(FLAGS.prompt)
    if FLAGS.prompts_file:
        texts += filter(None, read_text(FLAGS.prompts_file).splitlines())
    if not texts:
        raise CheckpointError("no prompt: give --prompt or --prompts_file")
    return texts


def generate(model: Model, new_tokens: int) -> Iterator[np.ndarray]:
    """The next tokens of all prompts, (steps, B), as they come: first one, then --stream_every."""
    config, params, prompts = model.config, model.params, model.prompts
    sampling = Sampling(FLAGS.temperature, FLAGS.top_p)
    flat = np.concatenate(prompts)
    segment_ids, (ends,) = pack_lengths(
        [*map(len, prompts)], S=-(-len(flat) // MULTIPLE) * MULTIPLE
    )
    row = np.resize(flat, segment_ids.shape)  # (1, S); no prompt sees what is behind the last one
    x, states = prefill(config, params, row, segment_ids, ends)
    key = jax.random.key(FLAGS.seed)
    token = sample(sampling, next_logits(config, params, x[0, ends - 1]), key, 0)
    yield np.asarray(token)[None]
    coming = []
    for number in range(1, new_tokens, FLAGS.stream_every):
        loop = config, sampling, FLAGS.stream_every, params, states, token, key
        states, token, tokens = decode(*loop, np.int32(number))
        yield from map(np.asarray, coming)
        coming = [tokens[: new_tokens - number]]
    yield from map(np.asarray, coming)


def run(
    model: Model, new_tokens: int, write: Callable[[np.ndarray], bool] = lambda _: False
) -> tuple[float, float]:
    """Seconds to the first token, and from there to the end, which is where write returns True."""
    started, first = time.perf_counter(), 0.0
    for tokens in generate(model, new_tokens):
        first = first or time.perf_counter() - started
        if write(tokens):
            break
    return first, time.perf_counter() - started - first


class Printer:
    """Prints tokens up to the stop tokens; a single prompt's tokens are printed as they come."""

    def __init__(self, model: Model):
        self.model, self.printed = model, 0
        self.answers: list[list[int]] = [[] for _ in model.prompts]
        self.running = set(range(len(model.prompts)))

    def write(self, tokens: np.ndarray, last: bool = False) -> bool:
        """Takes (steps, B), the last ones or not. Returns whether all prompts have ended."""
        several, stop = len(self.answers) > 1, self.model.stop_tokens
        for n in sorted(self.running):
            column = tokens[:, n].tolist()
            self.answers[n] += itertools.takewhile(lambda token: token not in stop, column)
            text = self.model.text(self.answers[n])
            if last or not stop.isdisjoint(column):
                self.running.remove(n)
                print(f"[{n}] {text}" if several else text[self.printed :], flush=True)
            # After U+FFFD the rest of a character is still to come.
            elif not several and not text.endswith("\ufffd"):
                print(text[self.printed :], end="", flush=True)
                self.printed = len(text)
        return not self.running


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
    B, steps, weights = len(model.prompts), sum(map(len, model.prompts)), dict(model.tensors)
    if not config.tie_word_embeddings:
        del weights["backbone.embeddings.weight"]
    moved = bytes_per_device(weights) + 2 * B * state_bytes(config, devices)
    products = sum(
        x.size for name, x in weights.items() if ".blocks." in name and len(x.shape) == 2
    )
    # C + k v^T and C^T q. Only the last token of a prompt needs logits.
    products += 2 * config.num_blocks * config.qk_dim * config.head_dims[1]
    flops = 2 * (steps * products + B * config.vocab_size * config.hidden_size)
    rate, per_token = copy_rate(), rest / max(new_tokens - 1, 1)
    return dict(
        device=jax.devices()[0].device_kind,
        devices=devices,
        jax=jax.__version__,
        dtype=FLAGS.dtype,
        state_dtype=config.inference_state_dtype,
        batch=B,
        prompt_tokens=steps,
        new_tokens=new_tokens,
        first_token_ms=1e3 * first,
        prefill_tflops=flops / first / 1e12,
        ms_per_token=1e3 * per_token,
        tokens_per_s=B / per_token,
        gb_per_token=moved / 1e9,
        copy_gbps=rate / 1e9,
        memory_limit_pct=100 * moved / rate / per_token,
    )


def main(argv: Sequence[str]) -> None:
    try:
        if argv[1:]:
            raise CheckpointError(f"what is {argv[1]!r}? A prompt needs --prompt=")
        model = build()
    except CheckpointError as error:
        sys.exit(f"error: {error}")
    compiled = sum(run(model, min(FLAGS.new_tokens, 1 + FLAGS.stream_every)))
    print(f"compiled in {compiled:.1f} s", file=sys.stderr)
    if FLAGS.benchmark:
        print(json.dumps(benchmark(model)))
        return
    printer = Printer(model)
    first, rest = run(model, FLAGS.new_tokens, printer.write)
    printer.write(np.empty((0, len(model.prompts)), int), last=True)
    tokens = sum(map(len, printer.answers)) - len(model.prompts)
    rate = f"{tokens / rest:.1f} tokens/s" if tokens > 0 else "no more"
    print(f"first token after {first:.3f} s, then {rate}", file=sys.stderr)


if __name__ == "__main__":
    app.run(main)
