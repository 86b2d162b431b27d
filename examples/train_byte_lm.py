r"""Trains a byte-level xLSTM language model on text: mlstm_chunkwise in a whole training job.

    python examples/train_byte_lm.py      # the Python standard library: two minutes on two cores
    python examples/train_byte_lm.py --corpus=FOLDER_OR_FILE --embedding_dim=512 --layers=8 \
        --seq_len=2048 --dtype=bfloat16

On a GPU it runs the Triton kernels, unless MLSTM_PALLAS_BACKEND names another backend. The model
is in byte_lm.py. The output folder gets log.jsonl (the configuration, then a line for each logged
step and each evaluation), loss.png, sample.txt and checkpoints/, which has the last two.

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
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from byte_corpus import CorpusError, read_corpus, unigram_bits, windows
from byte_lm import ModelConfig, Params, cross_entropy, generate, initial_params, train_step
from byte_lm_checkpoints import CheckpointError, Checkpoints
from byte_lm_mesh import MeshError, gathered, make_mesh, mesh_of, parse_mesh, shard, spread
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from tqdm import tqdm

FLAGS = flags.FLAGS
for name, default, least, about in (
    ("layers", 2, 1, "Blocks of an mLSTM layer and an MLP."),
    ("embedding_dim", 128, 1, "Width of the residual stream."),
    ("heads", 4, 1, "mLSTM heads; embedding_dim is an even multiple."),
    ("seq_len", 256, 1, "Bytes in a sequence."),
    ("batch_size", 8, 1, "Sequences in a step."),
    ("steps", 1000, 1, "Training steps."),
    ("seed", 0, 0, "Of the weights, the batches and the sample."),
    ("log_every", 10, 1, "Steps between log lines."),
    ("eval_every", 100, 1, "Steps between evaluations."),
    ("eval_batches", 32, 1, "Batches of held-out text in an evaluation."),
    ("checkpoint_every", 100, 0, "Steps between checkpoints; 0: only one, at the end."),
    ("num_processes", None, 1, "Number of processes."),
    ("process_id", None, 0, "Number of this process, from 0."),
    ("sample_length", 400, 1, "Bytes to generate."),
):
    flags.DEFINE_integer(name, default, about, least)
for name, default, about in (
    ("learning_rate", 4e-3, "Peak learning rate."),
    ("max_minutes", None, "End after so many minutes, with a checkpoint."),
    ("temperature", 0.8, "Of the sampling; 0 takes the likeliest byte."),
):
    flags.DEFINE_float(name, default, about, 0.0)
for name, default, about in (
    ("corpus", None, "Folder or file to learn; none: the Python standard library's sources."),
    ("output_dir", "runs/byte_lm", "Folder for log.jsonl, loss.png, sample.txt, checkpoints/."),
    ("prompt", "def ", "Start of the sample."),
    ("mesh", "", "Devices along axes, such as data:2,tensor:1,sequence:4; one left out has 1."),
    ("coordinator_address", None, "HOST:PORT of the first of several processes; auto: JAX detects "
     "this, num_processes and process_id (Slurm, MPI, clouds)."),
):  # fmt: skip
    flags.DEFINE_string(name, default, about)
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of q, k and v in the mLSTM.")
flags.DEFINE_bool("resume", True, "Continue from the last checkpoint; else remove all there.")
# A run continues from a checkpoint with the same values of these; devices, backend, logging and
# sampling may change.
DECIDE_ON_THE_CURVE = (
    *("layers", "embedding_dim", "heads", "dtype", "seed"),
    *("seq_len", "batch_size", "steps", "learning_rate"),
)


def check_flags() -> None:
    """Raises flags.ValidationError at the first wrong value or combination."""
    try:
        data, tensor, sequence = parse_mesh(FLAGS.mesh).values()
    except ValueError as error:
        raise flags.ValidationError(f"mesh: {error}") from None
    processes = FLAGS.coordinator_address, FLAGS.num_processes, FLAGS.process_id
    together = processes[0] == "auto" or len({x is None for x in processes}) == 1
    for holds, message in (
        (FLAGS.prompt, "prompt must not be empty"),
        (
            FLAGS.embedding_dim % (2 * FLAGS.heads) == 0,
            "embedding_dim must be an even multiple of heads",
        ),
        (FLAGS.batch_size % data == 0, "batch_size must be a multiple of data in mesh"),
        (FLAGS.heads % tensor == 0, "heads must be a multiple of tensor in mesh"),
        (FLAGS.seq_len % sequence == 0, "seq_len must be a multiple of sequence in mesh"),
        (together, "coordinator_address, num_processes and process_id belong together"),
    ):
        if not holds:
            raise flags.ValidationError(message)


def make_optimizer() -> optax.GradientTransformation:
    """AdamW with weight decay on the matrices alone, behind gradient clipping.

    The learning rate warms up linearly for a twentieth of the steps, then follows a cosine down to
    a tenth of the peak.
    """

    def matrices(params: Params) -> Params:
        def is_matrix(path, _):
            return not path[-1].key.endswith(("norm", "bias"))

        return jax.tree.map_with_path(is_matrix, params)

    peak, steps = FLAGS.learning_rate, FLAGS.steps
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, steps // 20, steps, 0.1 * peak)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


class Log:
    """log.jsonl: a line is on disk as soon as it is written, by the first process.

    All lines are in ``lines`` as well, and in the checkpoints, so that a run goes on with those
    that it had.
    """

    def __init__(self, path: Path, lines: list[dict[str, Any]]):
        self.lines: list[dict[str, Any]] = []
        self._started = time.perf_counter() - (lines[-1]["seconds"] if lines else 0.0)
        self._path = path if jax.process_index() == 0 else None
        if self._path:
            path.write_text("")
        for line in lines:
            self.write(**line)

    def write(self, **line: Any) -> None:
        self.lines.append({"seconds": round(time.perf_counter() - self._started, 3)} | line)
        if self._path:
            with self._path.open("a") as file:
                print(json.dumps(self.lines[-1]), file=file)

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """The steps that have a value of this name, and the values."""
        lines = [line for line in self.lines if name in line]
        return [line["step"] for line in lines], [line[name] for line in lines]


class Training:
    """Parameters, text to learn and held-out text (bytes,), and all that a step changes."""

    def __init__(self, config: ModelConfig, text: np.ndarray, held_out: np.ndarray):
        self.config, self.text, self.held_out, self.mesh = config, text, held_out, config.mesh
        self.optimizer = make_optimizer()
        params = initial_params(config, jax.random.key(FLAGS.seed))
        self.state = params, self.optimizer.init(params)
        self.step = 0
        self.rng = np.random.default_rng(FLAGS.seed)  # draws the batches
        self.losses: list[jax.Array | float] = []  # since the last step that log_every divides

    def batch(self, text: np.ndarray, starts: np.ndarray) -> jax.Array:
        """Sequences (B, S + 1) from these places of a text."""
        return spread(windows(text, starts, FLAGS.seq_len), self.mesh, P("data"))

    def advance(self) -> None:
        """One step."""
        starts = self.rng.integers(0, len(self.text) - FLAGS.seq_len, FLAGS.batch_size)
        batch = self.batch(self.text, starts)
        self.state, loss = train_step(self.config, self.optimizer, self.state, batch)
        # On CPUs the collectives of two programs under way would wait for each other's threads.
        self.losses.append(loss if self.mesh.size == 1 else jax.block_until_ready(loss))
        self.step += 1

    def finite_losses(self) -> list[float]:
        """The losses as numbers, which are waited for; raises FloatingPointError."""
        self.losses = [float(loss) for loss in jax.device_get(self.losses)]
        for loss in self.losses:
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} by step {self.step}")
        return self.losses

    def evaluate(self, log: Log) -> None:
        """Logs the bits per byte of the same sequences, spread evenly over the held-out text."""
        count, last = FLAGS.eval_batches, len(self.held_out) - FLAGS.seq_len - 1
        parts = np.split(np.linspace(0, last, count * FLAGS.batch_size).astype(int), count)
        batches = (self.batch(self.held_out, part) for part in parts)
        nats = [float(cross_entropy(self.config, self.state[0], x)) for x in batches]
        bits = float(np.mean(nats)) / math.log(2)
        log.write(step=self.step, held_out_bits_per_byte=bits)
        say(f"step {self.step}: {bits:.3f} held-out bits per byte")

    def save(self, checkpoints: Checkpoints, log: Log) -> None:
        settings = {name: FLAGS[name].value for name in DECIDE_ON_THE_CURVE}
        text, rng = zlib.crc32(self.text), self.rng.bit_generator.state
        progress = dict(settings=settings, text=text, rng=rng, losses=self.finite_losses())
        progress["log"] = log.lines
        state = gathered(self.state)
        if jax.process_index() == 0:
            checkpoints.save(self.step, state, progress)

    def restore(self, checkpoints: Checkpoints, step: int) -> list[dict[str, Any]]:
        """Continues the training that the checkpoint was saved by; returns the lines of its log.

        Raises:
          CheckpointError: it is damaged, or of another training.
        """
        self.state, progress = checkpoints.read(step, self.state)
        otherwise = f"give another --output_dir, or --noresume to lose {checkpoints.path(step)}"
        for name, before in progress["settings"].items():
            if before != FLAGS[name].value:
                change = f"--{name}={before} cannot go on with --{name}={FLAGS[name].value}"
                raise CheckpointError(f"a run with {change}: {otherwise}")
        if progress["text"] != zlib.crc32(self.text):
            raise CheckpointError(f"a run cannot go on with other text in --corpus: {otherwise}")
        self.step, self.losses = step, progress["losses"]
        self.rng.bit_generator.state = progress["rng"]
        return progress["log"]


def train(
    training: Training, log: Log, checkpoints: Checkpoints, ends: Callable[[int], bool]
) -> None:
    """Trains to the last step, or to one at which ``ends`` says yes.

    Raises:
      FloatingPointError: the loss is not finite.
    """
    steps, quiet = FLAGS.steps, jax.process_index() > 0
    with tqdm(total=steps, initial=training.step, unit="step", disable=quiet) as bar:
        since, done = time.perf_counter(), training.step
        while training.step < steps:
            training.advance()
            step = training.step
            bar.update()
            finished = step == steps
            early = not finished and ends(step)
            if finished or step % FLAGS.log_every == 0:
                log_step(training, step - done, since, log, bar)
                since, done = time.perf_counter(), step
            if finished or step % FLAGS.eval_every == 0:
                training.evaluate(log)
                since = time.perf_counter()
            every = FLAGS.checkpoint_every
            if finished or early or (every and step % every == 0):
                training.save(checkpoints, log)
                since = time.perf_counter()
            if early:
                break


def log_step(training: Training, steps: int, since: float, log: Log, bar: tqdm) -> None:
    """Writes the mean loss, and the speed since the last log line.

    The speed of the first line counts the compilation.
    """
    step = training.step
    try:
        losses = training.finite_losses()  # waits for the steps, before the clock is read
    except FloatingPointError as error:
        log.write(step=step, error=str(error))
        raise
    speed = steps * FLAGS.batch_size * FLAGS.seq_len / (time.perf_counter() - since)
    loss = sum(losses) / len(losses)
    values = dict(loss=loss, train_bits_per_byte=loss / math.log(2))
    log.write(step=step, **values, tokens_per_second=round(speed, 1))
    bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{speed:.0f}")
    training.losses = []


def sample(config: ModelConfig, params: Params) -> tuple[str, float]:
    """The prompt and what the model makes of it, and the bytes generated per second.

    The time counts reading the prompt, and not compiling.
    """
    prompt = FLAGS.prompt.encode()
    tokens, key = jnp.asarray([list(prompt)], jnp.int32), jax.random.key(FLAGS.seed)
    options = dict(length=FLAGS.sample_length, temperature=FLAGS.temperature)
    for _ in range(2):
        start = time.perf_counter()
        text = jax.block_until_ready(generate(config, params, tokens, key, **options))
    speed = FLAGS.sample_length / (time.perf_counter() - start)
    return (prompt + bytes(np.asarray(text[0], np.uint8))).decode(errors="backslashreplace"), speed


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

    Several processes agree on it at the steps that log: a Ctrl-C to one sets ``stop`` in all.
    """
    asked = np.asarray([stop.is_set(), time.monotonic() > deadline])
    if jax.process_count() > 1:
        if step % FLAGS.log_every:
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


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def on_abort(_: int) -> None:
    end_alone(f"this process was aborted, as above or because another one has died: {GO_ON}")


def say(text: str) -> None:
    """Prints above the progress bar, in the first process."""
    if jax.process_index() == 0:
        tqdm.write(text)


def run(stop: threading.Event) -> int:
    """The whole job, from the corpus to the plot; returns the exit code."""
    minutes = math.inf if FLAGS.max_minutes is None else FLAGS.max_minutes
    deadline = time.monotonic() + 60 * minutes
    mesh = make_mesh(FLAGS.mesh)
    train_text, held_out = read_corpus(Path(FLAGS.corpus) if FLAGS.corpus else None, FLAGS.seq_len)
    unigram = unigram_bits(train_text, held_out)
    config = ModelConfig(FLAGS.layers, FLAGS.embedding_dim, FLAGS.heads, mesh, FLAGS.dtype)
    training = Training(config, train_text, held_out)
    parameters = sum(x.size for x in jax.tree.leaves(training.state[0]))
    devices, device = mesh.size, jax.devices()[0].device_kind
    sizes = f"{len(train_text):,} bytes to learn, {len(held_out):,} held out"
    say(f"{parameters:,} parameters, {sizes}, on {devices} x {device}")

    output = Path(FLAGS.output_dir)
    checkpoints = Checkpoints(output / "checkpoints")
    if not FLAGS.resume:
        checkpoints.clear()
    lines = []
    if before := max(checkpoints.steps(), default=None):
        lines = training.restore(checkpoints, before)
        say(f"going on after step {before} of {FLAGS.steps} with {checkpoints.path(before)}")
    training.state = shard(training.state, mesh)
    log = Log(output / "log.jsonl", lines)
    if not lines:
        module = FLAGS.find_module_defining_flag("corpus")
        log.write(
            flags={flag.name: flag.value for flag in FLAGS.get_key_flags_for_module(module)},
            device=device,
            devices=devices,
            jax=jax.__version__,
            parameters=parameters,
            train_bytes=len(train_text),
            held_out_bytes=len(held_out),
            unigram_bits_per_byte=unigram,
        )
    ends = functools.partial(asked_to_end, stop, deadline)
    train(training, log, checkpoints, ends)
    code = 0
    if training.step < FLAGS.steps:
        code = 130 if stop.is_set() else 75
        what = "ending with what there is; the same command goes on from here"
        tqdm.write(f"interrupted after step {training.step}: {what}")
        training.evaluate(log)
    params = gathered(training.state[0])
    if jax.process_index() == 0:
        plot(log, unigram, output / "loss.png")
        alone = mesh_of((1, 1, 1), mesh.local_devices[:1])
        text, speed = sample(dataclasses.replace(config, mesh=alone), params)
        log.write(step=training.step, generated_tokens_per_second=round(speed, 1))
        (output / "sample.txt").write_text(text, encoding="utf-8")
        say(f"--- sample\n{text}\n--- generated at {speed:.0f} tokens per second")
        _, [*_, bits] = log.curve("held_out_bits_per_byte")
        result = f"held-out bits per byte: {bits:.3f} (unigram: {unigram:.3f})"
        say(f"{result}; log, plot and sample are in {output}")
    return code


def start_processes() -> None:
    """Joins the processes of the run that the flags or JAX's detection of the cluster name."""
    address = None if FLAGS.coordinator_address == "auto" else FLAGS.coordinator_address
    try:
        jax.distributed.initialize(address, FLAGS.num_processes, FLAGS.process_id)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        sys.exit(f"error: --coordinator_address={FLAGS.coordinator_address}: {reason}")
    # The threads of jax.distributed abort a process that waits for one that is gone.
    ctypes.CDLL(None).signal(signal.SIGABRT, on_abort)


USERS_ERRORS = CorpusError, MeshError, CheckpointError, FloatingPointError, OSError


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, 75 if --max_minutes ended the training, 130 if a Ctrl-C did.

    Errors of the user's making, and processes that die, are one line, with exit code 1.
    """
    logging.set_verbosity(logging.WARNING)  # at INFO, jax names every backend that is missing
    if len(argv) > 1:
        sys.exit(f"error: unexpected argument {argv[1]}")
    if FLAGS.coordinator_address is not None:
        start_processes()
    several, message = jax.process_count() > 1, ""
    with stop_on_interrupt() as stop:
        try:
            return run(stop)
        except USERS_ERRORS as error:
            message = str(error)
        except jax.errors.JaxRuntimeError as error:  # a collective fails if a process has died
            if not several:
                raise
            reason = " ".join(str(error).split())[:300]
            message = f"the processes have lost each other ({reason}): {GO_ON}"
    if several:
        end_alone(message)
    sys.exit(f"error: {message}")


def parse_flags(argv: list[str]) -> list[str]:
    """What is left of the command line; a wrong flag ends the program with one line."""
    try:
        rest = FLAGS(argv)
        check_flags()
        return rest
    except flags.Error as error:
        sys.exit("error: " + " ".join(str(error).split()))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
