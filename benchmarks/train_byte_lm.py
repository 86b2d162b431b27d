"""Trains a byte-level xLSTM language model on text: mlstm_chunkwise at work in a whole training job.

    python benchmarks/train_byte_lm.py      # learns the Python standard library: two minutes on two CPU cores; Triton kernels on a GPU
    python benchmarks/train_byte_lm.py --corpus=FOLDER_OR_FILE --embedding_dim=512 --layers=8 --seq_len=2048 --dtype=bfloat16

The model follows xLSTM (arXiv:2405.04517) in the form of xLSTM-7B (arXiv:2503.13427). The output folder gets log.jsonl (the configuration,
then one line for every logged step and every evaluation), loss.png and sample.txt.

Ctrl-C ends the training early: evaluation, sample and plot are made with what there is, and the exit code is 130. A second Ctrl-C kills.
"""

import contextlib
import dataclasses
import functools
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from byte_corpus import VOCABULARY, CorpusError, read_corpus, unigram_bits, windows
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

from mlstm_pallas import mlstm_chunkwise

CORPUS = flags.DEFINE_string("corpus", None, "Folder or file to learn; the Python standard library's sources when not given.")
OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/byte_lm", "Folder for log.jsonl, loss.png and sample.txt; overwrites those there.")
LAYERS = flags.DEFINE_integer("layers", 2, "Blocks of an mLSTM layer and an MLP.", lower_bound=1)
EMBEDDING_DIM = flags.DEFINE_integer("embedding_dim", 128, "Width of the residual stream.", lower_bound=1)
HEADS = flags.DEFINE_integer("heads", 4, "mLSTM heads; divides embedding_dim.", lower_bound=1)
QK_DIM_FACTOR = flags.DEFINE_float("qk_dim_factor", 0.5, "Width of the queries (and keys) of all heads over embedding_dim.")
MLP_FACTOR = flags.DEFINE_float("mlp_factor", 2.0, "Width of the gated MLP over embedding_dim.")
SEQ_LEN = flags.DEFINE_integer("seq_len", 256, "Bytes in a sequence.", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Sequences in a step.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 1000, "Training steps.", lower_bound=1)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 4e-3, "Peak learning rate.", lower_bound=0.0)
WARMUP_STEPS = flags.DEFINE_integer("warmup_steps", 50, "Steps of linear warm-up, cut to half of all.", lower_bound=0)
SEED = flags.DEFINE_integer("seed", 0, "Of the weights, the batches and the sample.", lower_bound=0)
CHUNK_SIZE = flags.DEFINE_integer("chunk_size", None, "Of the chunkwise form, a power of two >= 16; the tuned one when not given.")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of q, k and v in the mLSTM.")
BACKEND = flags.DEFINE_enum("backend", "auto", ["auto", "triton", "interpret", "xla"], "Of the mLSTM; auto: triton on a GPU, else xla.")
LOG_EVERY = flags.DEFINE_integer("log_every", 10, "Steps between log lines.", lower_bound=1)
EVAL_EVERY = flags.DEFINE_integer("eval_every", 100, "Steps between evaluations.", lower_bound=1)
EVAL_BATCHES = flags.DEFINE_integer("eval_batches", 32, "Batches of held-out text in an evaluation.", lower_bound=1)
PROMPT = flags.DEFINE_string("prompt", "def ", "Start of the sample.")
SAMPLE_LENGTH = flags.DEFINE_integer("sample_length", 400, "Bytes to generate.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "Of the sampling; 0 takes the likeliest byte.", lower_bound=0.0)

flags.register_validator("chunk_size", lambda x: x is None or (x >= 16 and x & (x - 1) == 0), "must be a power of two >= 16")
flags.register_validator("prompt", bool, "must not be empty")
flags.register_multi_flags_validator(
    ["embedding_dim", "heads"], lambda x: x["embedding_dim"] % x["heads"] == 0, "embedding_dim must be a multiple of heads"
)
flags.register_multi_flags_validator(
    ["embedding_dim", "heads", "qk_dim_factor"],
    lambda x: x["qk_dim_factor"] > 0 and x["qk_dim_factor"] * x["embedding_dim"] % x["heads"] == 0,
    "qk_dim_factor * embedding_dim must be a positive multiple of heads",
)
flags.register_multi_flags_validator(
    ["embedding_dim", "mlp_factor"],
    lambda x: 1 <= x["mlp_factor"] * x["embedding_dim"] < math.inf,
    "mlp_factor * embedding_dim must be >= 1",
)

State = tuple[jax.Array, jax.Array, jax.Array]  # c (B, NH, DHQK, DHV), n (B, NH, DHQK), m (B, NH)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model, and how its mLSTM is computed."""

    layers: int
    embedding_dim: int
    heads: int
    qk_dim: int  # of all heads
    mlp_dim: int
    chunk_size: int | None = None
    dtype: str = "float32"
    backend: str | None = None


def residual_init(config: ModelConfig) -> nnx.Initializer:
    """For the 2 * layers matrices that add to the residual stream: their sum has the variance of one with the usual scale."""
    return nnx.initializers.variance_scaling(0.5 / config.layers, "fan_in", "truncated_normal")


class MLSTMLayer(nnx.Module):
    """Projections and gates, the mLSTM, a norm of each head, an output gate."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, NH = config.embedding_dim, config.heads
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.config = config
        self.query, self.key, self.value = linear(D, config.qk_dim), linear(D, config.qk_dim), linear(D, D)
        gate = functools.partial(nnx.Linear, D, NH, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)
        # A quiet start, as in xLSTM-7B: input gates almost closed, forget gates from short to long memory.
        self.input_gate = gate(bias_init=nnx.initializers.constant(-10.0))
        self.forget_gate = gate(bias_init=lambda key, shape, dtype: jnp.linspace(3.0, 6.0, *shape, dtype=dtype))
        self.head_norm = nnx.RMSNorm(D // NH, use_scale=False, rngs=rngs)
        self.head_scale = nnx.Param(jnp.ones(D))
        self.output_gate = linear(D, D)
        self.output = linear(D, D, kernel_init=residual_init(config))

    def __call__(self, x: jax.Array, state: State | None) -> tuple[jax.Array, State | None]:
        """x (B, S, D), and the state before it (None: zeros) -> (B, S, D), and the state after it (None if none was given)."""
        config = self.config

        def heads(y):  # (B, S, NH * DH) -> (B, NH, S, DH)
            return y.reshape(*y.shape[:2], config.heads, -1).swapaxes(1, 2).astype(config.dtype)

        def gate(y):  # (B, S, NH) -> (B, NH, S), soft-capped
            return 15.0 * jnp.tanh(y.swapaxes(1, 2) / 15.0)

        mlstm = functools.partial(mlstm_chunkwise, chunk_size=config.chunk_size, backend=config.backend)
        inputs = (*(heads(f(x)) for f in (self.query, self.key, self.value)), gate(self.input_gate(x)), gate(self.forget_gate(x)))
        if state is None:
            h = mlstm(*inputs)
        else:
            h, state = mlstm(*inputs, *state, return_last_states=True)
        h = self.head_norm(h.astype(x.dtype)).swapaxes(1, 2).reshape(x.shape) * self.head_scale
        return self.output(jax.nn.sigmoid(self.output_gate(x)) * h), state


class GatedMLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, linear = config.embedding_dim, functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate, self.up = linear(D, config.mlp_dim), linear(D, config.mlp_dim)
        self.down = linear(config.mlp_dim, D, kernel_init=residual_init(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (B, S, D) -> (B, S, D)."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """An mLSTM layer and an MLP, each behind a norm and beside a residual connection."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.mlstm_norm, self.mlp_norm = (nnx.RMSNorm(config.embedding_dim, rngs=rngs) for _ in range(2))
        self.mlstm, self.mlp = MLSTMLayer(config, rngs), GatedMLP(config, rngs)

    def __call__(self, x: jax.Array, state: State | None) -> tuple[jax.Array, State | None]:
        """Shapes and state as for MLSTMLayer."""
        h, state = self.mlstm(self.mlstm_norm(x), state)
        x = x + h
        return x + self.mlp(self.mlp_norm(x)), state


class ByteLM(nnx.Module):
    """Bytes to logits of the byte that follows each."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(VOCABULARY, config.embedding_dim, embedding_init=nnx.initializers.normal(0.1), rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.embedding_dim, rngs=rngs)
        self.unembedding = nnx.Linear(config.embedding_dim, VOCABULARY, use_bias=False, rngs=rngs)

    def initial_states(self, batch: int) -> list[State]:
        """The states before the first byte, one for each layer."""
        NH, DHQK, DHV = self.config.heads, self.config.qk_dim // self.config.heads, self.config.embedding_dim // self.config.heads
        return [(jnp.zeros((batch, NH, DHQK, DHV)), jnp.zeros((batch, NH, DHQK)), jnp.zeros((batch, NH)))] * self.config.layers

    def __call__(self, tokens: jax.Array, states: list[State] | None = None) -> tuple[jax.Array, list[State | None]]:
        """tokens (B, S), and the states before them -> logits (B, S, 256), and the states after them (of None if none were given)."""
        x = self.embedding(tokens)
        after = []
        for block, state in zip(self.blocks, states or [None] * self.config.layers, strict=True):
            x, state = block(x, state)
            after.append(state)
        return self.unembedding(self.norm(x)), after


def cross_entropy(model: ByteLM, sequences: jax.Array) -> jax.Array:
    """Mean nats per byte of sequences (B, S + 1): of every byte but the first, given those before it."""
    tokens = sequences.astype(jnp.int32)
    logits, _ = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


evaluation_step = nnx.jit(cross_entropy)


@nnx.jit
def train_step(model: ByteLM, optimizer: nnx.Optimizer, sequences: jax.Array) -> jax.Array:
    """One update from sequences (B, S + 1); returns the loss before it, in nats per byte."""
    loss, gradients = nnx.value_and_grad(cross_entropy)(model, sequences)
    optimizer.update(model, gradients)
    return loss


@functools.partial(nnx.jit, static_argnames=("length", "temperature"))
def generate(model: ByteLM, prompt: jax.Array, key: jax.Array, *, length: int, temperature: float) -> jax.Array:
    """prompt (B, S) -> the next bytes (B, length), one at a time: the states are of one size however long the text gets."""

    def pick(logits, key):
        return jnp.argmax(logits, -1) if temperature == 0 else jax.random.categorical(key, logits / temperature)

    def step(carry, key):
        token, states = carry
        logits, states = model(token[:, None], states)
        return (pick(logits[:, -1], key), states), token

    keys = jax.random.split(key, length + 1)
    logits, states = model(prompt, model.initial_states(prompt.shape[0]))
    _, tokens = jax.lax.scan(step, (pick(logits[:, -1], keys[0]), states), keys[1:])
    return tokens.swapaxes(0, 1)


def make_optimizer(model: ByteLM) -> nnx.Optimizer:
    """AdamW, weight decay on the matrices alone, behind gradient clipping; a linear warm-up, then a cosine down to a tenth of the peak."""
    peak, steps = LEARNING_RATE.value, STEPS.value
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, min(WARMUP_STEPS.value, steps // 2), steps, 0.1 * peak)
    matrices = functools.partial(jax.tree.map, lambda parameter: parameter.ndim > 1)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices)
    return nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adamw), wrt=nnx.Param)


class Log:
    """log.jsonl: a line is on disk as soon as it is written. All lines stay in ``lines`` as well."""

    def __init__(self, path: Path):
        self.lines: list[dict] = []
        self._path = path
        path.write_text("")
        self._started = time.perf_counter()

    def write(self, **line) -> None:
        self.lines.append(line | {"seconds": round(time.perf_counter() - self._started, 3)})
        with self._path.open("a") as file:
            file.write(json.dumps(self.lines[-1]) + "\n")

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """The steps that have a value of this name, and the values."""
        lines = [line for line in self.lines if name in line]
        return [line["step"] for line in lines], [line[name] for line in lines]


def train(model: ByteLM, train_text: np.ndarray, held_out: np.ndarray, log: Log, stop: threading.Event) -> int:
    """Trains for all steps, or to the end of the one in which ``stop`` is set, and evaluates; returns the number of steps done.

    Raises:
      FloatingPointError: the loss is not finite.
    """
    optimizer = make_optimizer(model)
    rng = np.random.default_rng(SEED.value)
    losses: list[jax.Array] = []
    with tqdm(total=STEPS.value, unit="step") as bar:
        since = time.perf_counter()
        for step in range(1, STEPS.value + 1):
            starts = rng.integers(0, len(train_text) - SEQ_LEN.value, BATCH_SIZE.value)
            losses.append(train_step(model, optimizer, windows(train_text, starts, SEQ_LEN.value)))
            bar.update()
            last = step == STEPS.value or stop.is_set()
            if step % LOG_EVERY.value == 0 or last:
                log_step(step, losses, since, log, bar)
                losses, since = [], time.perf_counter()
            if step % EVAL_EVERY.value == 0 or last:
                bits = held_out_bits(model, held_out)
                log.write(step=step, held_out_bits_per_byte=bits)
                bar.write(f"step {step}: {bits:.3f} held-out bits per byte")
                since = time.perf_counter()
            if last:
                return step


def log_step(step: int, losses: list[jax.Array], since: float, log: Log, bar: tqdm) -> None:
    """Writes the mean loss and the speed of the steps since the last log line; that of the first line counts the compilation."""
    loss = float(jnp.mean(jnp.stack(losses)))  # waits for the steps: before the clock is read
    if not math.isfinite(loss):
        log.write(step=step, error=f"the loss is {loss}")
        raise FloatingPointError(f"the loss is {loss} by step {step}")
    speed = len(losses) * BATCH_SIZE.value * SEQ_LEN.value / (time.perf_counter() - since)
    log.write(step=step, loss=loss, train_bits_per_byte=loss / math.log(2), tokens_per_second=round(speed, 1))
    bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{speed:.0f}")


def held_out_bits(model: ByteLM, held_out: np.ndarray) -> float:
    """Bits per byte over sequences spread evenly over the held-out text (bytes,), the same ones at every call."""
    starts = np.linspace(0, len(held_out) - SEQ_LEN.value - 1, EVAL_BATCHES.value * BATCH_SIZE.value).astype(int)
    batches = np.split(windows(held_out, starts, SEQ_LEN.value), EVAL_BATCHES.value)
    return float(np.mean([evaluation_step(model, batch) for batch in batches])) / math.log(2)


def sample(model: ByteLM) -> str:
    """The prompt and what the model makes of it."""
    prompt = PROMPT.value.encode()
    tokens = jnp.asarray([list(prompt)], jnp.int32)
    text = generate(model, tokens, jax.random.key(SEED.value), length=SAMPLE_LENGTH.value, temperature=TEMPERATURE.value)
    return (prompt + bytes(np.asarray(text[0], np.uint8))).decode(errors="backslashreplace")


def plot(log: Log, unigram: float, path: Path) -> None:
    """The loss of training and held-out text over the steps, in bits per byte."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*log.curve("train_bits_per_byte"), label="training", linewidth=1)
    axes.plot(*log.curve("held_out_bits_per_byte"), "o-", label="held-out")
    axes.axhline(unigram, linestyle=":", color="gray", label="unigram, held-out")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C sets; the second one kills the process."""
    stop = threading.Event()

    def first(*_) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    previous = signal.signal(signal.SIGINT, first)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


def model_config() -> ModelConfig:
    """The model that the flags ask for."""
    D = EMBEDDING_DIM.value
    qk_dim, mlp_dim = round(QK_DIM_FACTOR.value * D), round(MLP_FACTOR.value * D)
    backend = None if BACKEND.value == "auto" else BACKEND.value
    return ModelConfig(LAYERS.value, D, HEADS.value, qk_dim, mlp_dim, CHUNK_SIZE.value, DTYPE.value, backend)


def run(stop: threading.Event) -> None:
    """The whole job, from the corpus to the plot."""
    train_text, held_out = read_corpus(Path(CORPUS.value) if CORPUS.value else None, SEQ_LEN.value)
    unigram = unigram_bits(train_text, held_out)
    model = ByteLM(model_config(), nnx.Rngs(SEED.value))
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    device = jax.devices()[0].device_kind
    print(f"{parameters:,} parameters, {len(train_text):,} bytes to learn, {len(held_out):,} held out, on {jax.device_count()} x {device}")

    output = Path(OUTPUT_DIR.value)
    output.mkdir(parents=True, exist_ok=True)
    log = Log(output / "log.jsonl")
    settings = {flag.name: flag.value for flag in flags.FLAGS.get_key_flags_for_module(flags.FLAGS.find_module_defining_flag("corpus"))}
    texts = dict(train_bytes=len(train_text), held_out_bytes=len(held_out), unigram_bits_per_byte=unigram)
    log.write(flags=settings, device=device, jax=jax.__version__, parameters=parameters, **texts)

    steps = train(model, train_text, held_out, log, stop)
    if stop.is_set():
        print(f"interrupted after step {steps}: ending with what there is")
    plot(log, unigram, output / "loss.png")
    text = sample(model)
    (output / "sample.txt").write_text(text, encoding="utf-8")
    print(f"--- sample\n{text}\n---")
    bits = log.curve("held_out_bits_per_byte")[1][-1]
    print(f"held-out bits per byte: {bits:.3f} (unigram: {unigram:.3f}); log, plot and sample are in {output}")


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, or 130 after a Ctrl-C. Errors of the user's making end with one line and exit code 1."""
    logging.set_verbosity(logging.WARNING)  # at INFO, jax names every backend that it does not find
    if len(argv) > 1:
        sys.exit(f"error: unexpected argument {argv[1]}")
    if BACKEND.value == "triton" and jax.default_backend() != "gpu":
        sys.exit("error: --backend=triton needs a GPU")
    with stop_on_interrupt() as stop:
        try:
            run(stop)
        except (CorpusError, FloatingPointError, OSError) as error:
            sys.exit(f"error: {error}")
    return 130 if stop.is_set() else 0


def parse_flags(argv: list[str]) -> list[str]:
    """What is left of the command line; a wrong flag ends the program with one line."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit("error: " + " ".join(str(error).split()))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
