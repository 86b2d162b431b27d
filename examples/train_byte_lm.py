r"""Trains a byte-level xLSTM language model on text: mlstm_chunkwise in a whole training job.

    python examples/train_byte_lm.py      # the Python standard library: two minutes on two cores
    python examples/train_byte_lm.py --corpus=FOLDER_OR_FILE --embedding_dim=512 --layers=8 \
        --seq_len=2048 --dtype=bfloat16

On a GPU it runs the Triton kernels. The model is in byte_lm.py. The output folder gets log.jsonl
(the configuration, then a line for each logged step and each evaluation), loss.png, sample.txt and
checkpoints/, which has the last two.

Ctrl-C ends the training early: evaluation, sample and plot follow, and the exit code is 130. A
second Ctrl-C kills. --max_minutes ends it alike, with exit code 75. However a run has ended, the
same command continues it from its last checkpoint, along the same curve; --noresume starts over.

On several devices the batch, the heads and the steps of a sequence may be split, each over an axis
of a mesh:

    python examples/train_byte_lm.py --mesh=data:2,tensor:2,sequence:2
    python examples/train_byte_lm.py --mesh=data:4 --coordinator_address=HOST:PORT \
        --num_processes=2 --process_id=0  # and 1

Several processes (jax.distributed) share the output folder; the first one writes log, plot and
sample. A Ctrl-C to one of them ends all. If one dies, the others end too, within two minutes and
with exit code 1, as after any error.
"""

import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from byte_corpus import CorpusError, read_corpus, unigram_bits, windows
from byte_lm import ByteLM, ModelConfig, evaluation_step, generate, train_step
from byte_lm_checkpoints import CheckpointError, Checkpoints
from byte_lm_mesh import MeshError, gathered, make_mesh, parse_mesh, settled, shard, spread
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from tqdm import tqdm

CORPUS = flags.DEFINE_string(
    "corpus", None, "Folder or file to learn; none: the Python standard library's sources."
)
OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/byte_lm", "Folder for log.jsonl, loss.png, sample.txt and checkpoints/."
)
LAYERS = flags.DEFINE_integer("layers", 2, "Blocks of an mLSTM layer and an MLP.", lower_bound=1)
EMBEDDING_DIM = flags.DEFINE_integer(
    "embedding_dim", 128, "Width of the residual stream.", lower_bound=1
)
HEADS = flags.DEFINE_integer("heads", 4, "mLSTM heads; divides embedding_dim.", lower_bound=1)
QK_DIM_FACTOR = flags.DEFINE_float(
    "qk_dim_factor", 0.5, "Width of the queries (and keys) of all heads over embedding_dim."
)
MLP_FACTOR = flags.DEFINE_float("mlp_factor", 2.0, "Width of the gated MLP over embedding_dim.")
SEQ_LEN = flags.DEFINE_integer("seq_len", 256, "Bytes in a sequence.", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Sequences in a step.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 1000, "Training steps.", lower_bound=1)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 4e-3, "Peak learning rate.", lower_bound=0.0)
WARMUP_STEPS = flags.DEFINE_integer(
    "warmup_steps", 50, "Steps of linear warm-up, cut to half of all.", lower_bound=0
)
SEED = flags.DEFINE_integer("seed", 0, "Of the weights, the batches and the sample.", lower_bound=0)
CHUNK_SIZE = flags.DEFINE_integer(
    "chunk_size", None, "Of the chunkwise form, a power of two >= 16; none: the tuned one."
)
DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of q, k and v in the mLSTM."
)
BACKENDS = ["auto", "triton", "interpret", "xla"]
BACKEND = flags.DEFINE_enum(
    "backend", "auto", BACKENDS, "Of the mLSTM; auto: triton on a GPU, else xla."
)
LOG_EVERY = flags.DEFINE_integer("log_every", 10, "Steps between log lines.", lower_bound=1)
EVAL_EVERY = flags.DEFINE_integer("eval_every", 100, "Steps between evaluations.", lower_bound=1)
EVAL_BATCHES = flags.DEFINE_integer(
    "eval_batches", 32, "Batches of held-out text in an evaluation.", lower_bound=1
)
CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", 100, "Steps between checkpoints; 0: only one, at the end.", lower_bound=0
)
RESUME = flags.DEFINE_boolean(
    "resume", True, "Continue from the last checkpoint in output_dir; else remove all there."
)
MAX_MINUTES = flags.DEFINE_float(
    "max_minutes", None, "End after so many minutes, with a checkpoint.", lower_bound=0.0
)
MESH = flags.DEFINE_string(
    "mesh", "", "Devices along axes, such as data:2,tensor:1,sequence:4; an axis left out has 1."
)
COORDINATOR_ADDRESS = flags.DEFINE_string(
    "coordinator_address",
    None,
    "HOST:PORT of the first of several processes; auto: JAX detects this and the two below "
    "(Slurm, MPI, clouds).",
)
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.", lower_bound=1)
PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "Number of this process, from 0.", lower_bound=0
)
PROMPT = flags.DEFINE_string("prompt", "def ", "Start of the sample.")
SAMPLE_LENGTH = flags.DEFINE_integer("sample_length", 400, "Bytes to generate.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.8, "Of the sampling; 0 takes the likeliest byte.", lower_bound=0.0
)


def is_mesh(text: str) -> bool:
    try:
        return bool(parse_mesh(text))
    except ValueError:
        return False


def axis_size(text: str, axis: str) -> int:
    """The size of an axis of the mesh, 1 where the text is no mesh, which another check refuses."""
    return parse_mesh(text)[axis] if is_mesh(text) else 1


def splits_mlp(x: dict) -> bool:
    if not math.isfinite(x["mlp_factor"]):
        return True
    return round(x["mlp_factor"] * x["embedding_dim"]) % axis_size(x["mesh"], "tensor") == 0


def belong_together(x: dict) -> bool:
    return x["coordinator_address"] == "auto" or len({value is None for value in x.values()}) == 1


def is_chunk_size(x: int | None) -> bool:
    return x is None or (x >= 16 and x & (x - 1) == 0)


A_MESH = "must be a list of axis:size, each axis (data, tensor, sequence) at most once"
flags.register_validator("chunk_size", is_chunk_size, "must be a power of two >= 16")
flags.register_validator("prompt", bool, "must not be empty")
flags.register_validator("mesh", is_mesh, A_MESH)
flags.register_multi_flags_validator(
    ["embedding_dim", "heads"],
    lambda x: x["embedding_dim"] % x["heads"] == 0,
    "embedding_dim must be a multiple of heads",
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
for name, axis in (("batch_size", "data"), ("heads", "tensor"), ("seq_len", "sequence")):
    flags.register_multi_flags_validator(
        [name, "mesh"],
        lambda x, name=name, axis=axis: x[name] % axis_size(x["mesh"], axis) == 0,
        f"{name} must be a multiple of {axis} in mesh",
    )
flags.register_multi_flags_validator(
    ["embedding_dim", "mlp_factor", "mesh"],
    splits_mlp,
    "mlp_factor * embedding_dim must be a multiple of tensor in mesh",
)
flags.register_multi_flags_validator(
    ["coordinator_address", "num_processes", "process_id"],
    belong_together,
    "coordinator_address, num_processes and process_id belong together",
)
# A run continues from a checkpoint with the same values of these; devices, backend, logging and
# sampling may change.
DECIDE_ON_THE_CURVE = (
    *(LAYERS, EMBEDDING_DIM, HEADS, QK_DIM_FACTOR, MLP_FACTOR, DTYPE, SEED),
    *(SEQ_LEN, BATCH_SIZE, STEPS, LEARNING_RATE, WARMUP_STEPS),
)


def make_optimizer(model: ByteLM) -> nnx.Optimizer:
    """AdamW with weight decay on the matrices alone, behind gradient clipping.

    The learning rate warms up linearly, then follows a cosine down to a tenth of the peak.
    """
    peak, steps = LEARNING_RATE.value, STEPS.value
    warmup = min(WARMUP_STEPS.value, steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, 0.1 * peak)
    matrices = functools.partial(jax.tree.map, lambda parameter: parameter.ndim > 1)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices)
    return nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adamw), wrt=nnx.Param)


class Log:
    """log.jsonl: a line is on disk as soon as it is written.

    All lines stay in ``lines`` as well. Only the first process writes.
    """

    def __init__(self, path: Path, step: int = 0):
        """Starts anew, or after ``step`` steps continues what was logged up to them."""
        self.lines: list[dict] = []
        self._path = path if jax.process_index() == 0 else None
        if step and path.exists():
            complete = path.read_text().split("\n")[:-1]  # a kill may have cut the last line
            lines = [json.loads(line) for line in complete]
            lines = [line for line in lines if line.get("step", 0) <= step]
            self.lines = [line for line in lines if not line.get("interrupted")]
        if self._path:
            rewritten = path.with_suffix(".new")
            rewritten.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
            rewritten.replace(path)
        self._started = time.perf_counter() - (self.lines[-1]["seconds"] if self.lines else 0.0)

    def write(self, **line) -> None:
        self.lines.append(line | {"seconds": round(time.perf_counter() - self._started, 3)})
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(self.lines[-1]) + "\n")

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """The steps that have a value of this name, and the values."""
        lines = [line for line in self.lines if name in line]
        return [line["step"] for line in lines], [line[name] for line in lines]


class Training:
    """A model, the text (bytes,) that it learns, and all that a step changes."""

    def __init__(self, config: ModelConfig, text: np.ndarray):
        self.model = ByteLM(config, nnx.Rngs(SEED.value))
        self.optimizer = make_optimizer(self.model)
        if config.mesh is not None:
            shard((self.model, self.optimizer), config.mesh)
        self.text = text
        self.step = 0
        self.rng = np.random.default_rng(SEED.value)  # draws the batches
        self.losses: list[jax.Array | float] = []  # since the last step that log_every divides

    def advance(self) -> None:
        """One step."""
        starts = self.rng.integers(0, len(self.text) - SEQ_LEN.value, BATCH_SIZE.value)
        mesh = self.model.config.mesh
        sequences = batch(self.text, starts, mesh)
        self.losses.append(settled(train_step(self.model, self.optimizer, sequences), mesh))
        self.step += 1

    def save(self, checkpoints: Checkpoints) -> None:
        """Begins a checkpoint."""
        settings = {flag.name: flag.value for flag in DECIDE_ON_THE_CURVE}
        text, rng = zlib.crc32(self.text), self.rng.bit_generator.state
        losses = finite(self.losses, self.step)
        progress = dict(settings=settings, text=text, rng=rng, losses=losses)
        checkpoints.save(self.step, nnx.state((self.model, self.optimizer)), progress)

    def restore(self, checkpoints: Checkpoints, step: int) -> None:
        """Continues the training that the checkpoint was saved by.

        Raises:
          CheckpointError: it is damaged, or of another training.
        """
        progress = checkpoints.progress(step)
        otherwise = f"give another --output_dir, or --noresume to lose {checkpoints.path(step)}"
        for flag in DECIDE_ON_THE_CURVE:
            before = progress["settings"][flag.name]
            if before != flag.value:
                change = f"--{flag.name}={before} cannot go on with --{flag.name}={flag.value}"
                raise CheckpointError(f"a run with {change}: {otherwise}")
        if progress["text"] != zlib.crc32(self.text):
            raise CheckpointError(f"a run cannot go on with other text in --corpus: {otherwise}")
        modules = (self.model, self.optimizer)
        nnx.update(modules, checkpoints.state(step, nnx.state(modules)))
        self.step, self.losses = step, progress["losses"]
        self.rng.bit_generator.state = progress["rng"]


def batch(text: np.ndarray, starts: np.ndarray, mesh: Mesh | None) -> np.ndarray | jax.Array:
    """Sequences (B, S + 1) from these places of the text."""
    sequences = windows(text, starts, SEQ_LEN.value)
    return sequences if mesh is None else spread(sequences, mesh, P("data"))


def finite(losses: list[jax.Array | float], step: int) -> list[float]:
    """The losses as numbers, which are waited for.

    Raises:
      FloatingPointError: one is not finite.
    """
    numbers = [float(loss) for loss in jax.device_get(losses)]
    for loss in numbers:
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} by step {step}")
    return numbers


def train(
    training: Training,
    held_out: np.ndarray,
    log: Log,
    checkpoints: Checkpoints,
    asked_to_end: Callable[[int], bool],
) -> float | None:
    """Trains to the last step, or to one at which ``asked_to_end`` says yes.

    Returns:
      Bits per held-out byte at the end; None if the end is not a step at which they are due.

    Raises:
      FloatingPointError: the loss is not finite.
    """
    bits = None
    quiet, bytes_per_step = jax.process_index() > 0, BATCH_SIZE.value * SEQ_LEN.value
    with tqdm(total=STEPS.value, initial=training.step, unit="step", disable=quiet) as bar:
        since, done = time.perf_counter(), training.step
        while training.step < STEPS.value:
            training.advance()
            step, bits = training.step, None
            bar.update()
            finished = step == STEPS.value
            early = not finished and asked_to_end(step)
            if finished or early or step % LOG_EVERY.value == 0:
                log_step(training, (step - done) * bytes_per_step, since, log, bar)
                since, done = time.perf_counter(), step
            if finished or step % EVAL_EVERY.value == 0:
                bits = held_out_bits(training.model, held_out)
                log.write(step=step, held_out_bits_per_byte=bits)
                say(f"step {step}: {bits:.3f} held-out bits per byte")
                since = time.perf_counter()
            if finished or early or (CHECKPOINT_EVERY.value and step % CHECKPOINT_EVERY.value == 0):
                training.save(checkpoints)
                since = time.perf_counter()
            if early:
                break
    return bits


def log_step(training: Training, tokens: int, since: float, log: Log, bar: tqdm) -> None:
    """Writes the mean loss, and the speed since the last log line.

    The speed of the first line counts the compilation.
    """
    step = training.step
    try:
        # Waits for the steps, before the clock is read.
        training.losses = finite(training.losses, step)
    except FloatingPointError as error:
        log.write(step=step, error=str(error))
        raise
    speed = tokens / (time.perf_counter() - since)
    loss = sum(training.losses) / len(training.losses)
    due = step % LOG_EVERY.value == 0 or step == STEPS.value
    mark = {} if due else dict(interrupted=True)
    values = dict(loss=loss, train_bits_per_byte=loss / math.log(2))
    log.write(step=step, **values, tokens_per_second=round(speed, 1), **mark)
    bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{speed:.0f}")
    if due:
        training.losses = []


def held_out_bits(model: ByteLM, held_out: np.ndarray) -> float:
    """Bits per byte over sequences spread evenly over the held-out text (bytes,).

    They are the same ones at every call.
    """
    count, last = EVAL_BATCHES.value * BATCH_SIZE.value, len(held_out) - SEQ_LEN.value - 1
    starts, mesh = np.linspace(0, last, count).astype(int), model.config.mesh
    batches = (batch(held_out, part, mesh) for part in np.split(starts, EVAL_BATCHES.value))
    nats = [settled(evaluation_step(model, sequences), mesh) for sequences in batches]
    return float(np.mean(jax.device_get(nats))) / math.log(2)


def sample(model: ByteLM) -> tuple[str, float]:
    """The prompt and what the model makes of it, and the bytes generated per second.

    The time counts reading the prompt, and not compiling.
    """
    prompt = PROMPT.value.encode()
    tokens = jnp.asarray([list(prompt)], jnp.int32)
    options = dict(length=SAMPLE_LENGTH.value, temperature=TEMPERATURE.value)
    for _ in range(2):
        start = time.perf_counter()
        text = generate(model, tokens, jax.random.key(SEED.value), **options)
        text.block_until_ready()
    speed = SAMPLE_LENGTH.value / (time.perf_counter() - start)
    return (prompt + bytes(np.asarray(text[0], np.uint8))).decode(errors="backslashreplace"), speed


def on_one_device(model: ByteLM) -> ByteLM:
    """The model, on a device of every process alone; all processes have to call."""
    if model.config.mesh is None:
        return model
    copy = ByteLM(dataclasses.replace(model.config, mesh=None), nnx.Rngs(0))
    nnx.update(copy, gathered(nnx.state(model)))
    return copy


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


def asked_to_end(stop: threading.Event, deadline: float, step: int) -> bool:
    """Whether to end after this step, because of a Ctrl-C or --max_minutes.

    Several processes agree on it where they log: a Ctrl-C to one sets ``stop`` in all.
    """
    asked = np.asarray([stop.is_set(), time.monotonic() > deadline])
    if jax.process_count() > 1:
        if step % LOG_EVERY.value:
            return False
        asked = multihost_utils.process_allgather(asked).any(axis=0)
    if asked[0]:
        stop.set()
    return bool(asked.any())


GO_ON = "when all processes have ended, the same commands go on from the last checkpoint"


def end_alone(message: str) -> NoReturn:
    """Ends one of several processes.

    At a normal exit jax.distributed would wait for the others, and abort after a minute.
    """
    os.write(2, f"\nerror: {message}\n".encode())
    os._exit(1)


@contextlib.contextmanager
def ends_with_the_others() -> Iterator[None]:
    """Ends this process where a collective fails, which it does when another process has died."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        reason = " ".join(str(error).split())[:300]
        end_alone(f"the processes have lost each other ({reason}): {GO_ON}")


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def on_abort(_: int) -> None:
    end_alone(f"this process was aborted, as above or because another one has died: {GO_ON}")


def say(text: str) -> None:
    """Prints above the progress bar, in the first process."""
    if jax.process_index() == 0:
        tqdm.write(text)


def model_config(mesh: Mesh | None = None) -> ModelConfig:
    """The model that the flags ask for."""
    D = EMBEDDING_DIM.value
    qk_dim, mlp_dim = round(QK_DIM_FACTOR.value * D), round(MLP_FACTOR.value * D)
    backend = None if BACKEND.value == "auto" else BACKEND.value
    sizes = LAYERS.value, D, HEADS.value, qk_dim, mlp_dim
    return ModelConfig(*sizes, CHUNK_SIZE.value, DTYPE.value, backend, mesh)


def run(stop: threading.Event) -> int:
    """The whole job, from the corpus to the plot; returns the exit code."""
    minutes = math.inf if MAX_MINUTES.value is None else MAX_MINUTES.value
    deadline = time.monotonic() + 60 * minutes
    mesh = make_mesh(MESH.value)
    train_text, held_out = read_corpus(Path(CORPUS.value) if CORPUS.value else None, SEQ_LEN.value)
    unigram = unigram_bits(train_text, held_out)
    training = Training(model_config(mesh), train_text)
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(training.model, nnx.Param)))
    devices, device = 1 if mesh is None else mesh.size, jax.devices()[0].device_kind
    sizes = f"{len(train_text):,} bytes to learn, {len(held_out):,} held out"
    say(f"{parameters:,} parameters, {sizes}, on {devices} x {device}")

    output = Path(OUTPUT_DIR.value)
    output.mkdir(parents=True, exist_ok=True)
    saved = contextlib.closing(Checkpoints(output / "checkpoints"))
    with saved as checkpoints, ends_with_the_others():
        if not RESUME.value:
            checkpoints.clear()
        if before := checkpoints.latest():
            training.restore(checkpoints, before)
            say(f"going on after step {before} of {STEPS.value} with {checkpoints.path(before)}")
        log = Log(output / "log.jsonl", training.step)
        if not log.lines:
            corpus_module = flags.FLAGS.find_module_defining_flag("corpus")
            program_flags = flags.FLAGS.get_key_flags_for_module(corpus_module)
            texts = dict(train_bytes=len(train_text), held_out_bytes=len(held_out))
            log.write(
                flags={flag.name: flag.value for flag in program_flags},
                device=device,
                devices=devices,
                jax=jax.__version__,
                parameters=parameters,
                **texts,
                unigram_bits_per_byte=unigram,
            )
        ends = functools.partial(asked_to_end, stop, deadline)
        bits = train(training, held_out, log, checkpoints, ends)

    code, mark = 0, {}
    if training.step < STEPS.value:
        code, mark = 130 if stop.is_set() else 75, dict(interrupted=True)
        what = "ending with what there is; the same command goes on from here"
        tqdm.write(f"interrupted after step {training.step}: {what}")
    if bits is None:
        bits = held_out_bits(training.model, held_out)
        if code:
            log.write(step=training.step, held_out_bits_per_byte=bits, **mark)
    model = on_one_device(training.model)
    if jax.process_index() == 0:
        plot(log, unigram, output / "loss.png")
        text, speed = sample(model)
        if training.step != before:
            log.write(step=training.step, generated_tokens_per_second=round(speed, 1), **mark)
        (output / "sample.txt").write_text(text, encoding="utf-8")
        say(f"--- sample\n{text}\n--- generated at {speed:.0f} tokens per second")
        result = f"held-out bits per byte: {bits:.3f} (unigram: {unigram:.3f})"
        say(f"{result}; log, plot and sample are in {output}")
    return code


def start_processes() -> None:
    """Joins the processes of the run that the flags or JAX's detection of the cluster name."""
    this = dict(num_processes=NUM_PROCESSES.value, process_id=PROCESS_ID.value)
    address = None if COORDINATOR_ADDRESS.value == "auto" else COORDINATOR_ADDRESS.value
    try:
        jax.distributed.initialize(address, **this)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        sys.exit(f"error: --coordinator_address={COORDINATOR_ADDRESS.value}: {reason}")
    # The threads of jax.distributed abort a process that waits for one that is gone.
    ctypes.CDLL(None).signal(signal.SIGABRT, on_abort)


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, 75 if --max_minutes ended the training, 130 if a Ctrl-C did.

    Errors of the user's making, and processes that die, are one line, with exit code 1.
    """
    logging.set_verbosity(logging.WARNING)  # at INFO, jax names every backend that is missing
    if len(argv) > 1:
        sys.exit(f"error: unexpected argument {argv[1]}")
    if COORDINATOR_ADDRESS.value is not None:
        start_processes()
    if BACKEND.value == "triton" and jax.default_backend() != "gpu":
        sys.exit("error: --backend=triton needs a GPU")
    with stop_on_interrupt() as stop, ends_with_the_others():
        try:
            return run(stop)
        except (CorpusError, MeshError, CheckpointError, FloatingPointError, OSError) as error:
            if jax.process_count() > 1:
                end_alone(str(error))
            sys.exit(f"error: {error}")


def parse_flags(argv: list[str]) -> list[str]:
    """What is left of the command line; a wrong flag ends the program with one line."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit("error: " + " ".join(str(error).split()))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
