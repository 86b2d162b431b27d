r"""Trains a byte-level xLSTM language model on text: mlstm_chunkwise in a whole training job.

    python examples/train_byte_lm.py      # the Python standard library: two minutes on two cores
    python examples/train_byte_lm.py --corpus=FOLDER_OR_FILE --embedding_dim=512 --layers=8 \
        --seq_len=2048 --dtype=bfloat16

On a GPU it runs the Triton kernels, unless MLSTM_PALLAS_BACKEND names another backend. The model
is in xlstm_model.py. The output folder gets log.jsonl (the configuration, then a line for each
logged step and each evaluation), loss.png, sample.txt and checkpoints/, which has the last two.

Ctrl-C, SIGTERM or a terminal that is closed (SIGHUP, unless nohup ignores it) ends the training
early: a checkpoint, an evaluation, sample and plot follow, and the exit code is 130, 143 or 129. A
second Ctrl-C or SIGTERM, half a second later or more, kills. --max_minutes ends it alike, with exit
code 75, and so does a stdout or stderr that cannot be written, with exit code 1. However a run has
ended, the same command continues it from its last checkpoint, along the same curve. A finished run
is not trained again; --noresume starts over. A second run in the output folder of a running one is
refused.

On several devices the batch, the heads and the steps of a sequence may be split, each over an axis
of a mesh:

    python examples/train_byte_lm.py --mesh=data:2,tensor:2,sequence:2
    python examples/train_byte_lm.py --mesh=data:4 --coordinator_address=HOST:PORT \
        --num_processes=2 --process_id=0  # and 1

Several processes (jax.distributed) share the output folder; the first one writes log, plot and
sample. A signal to one of them ends all. If one dies, the others end too, within two minutes and
with exit code 1, as after any error but wrong flags and files, which have exit code 2.
"""

import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import command
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import flags
from byte_corpus import VOCABULARY, UserError, read_corpus, unigram_bits
from byte_lm import Model, cast, cross_entropy, initial_params, matrices, train_step
from byte_lm_mesh import make_mesh, parse_mesh, shard
from jax.experimental import multihost_utils
from matplotlib.figure import Figure
from numpy.lib.stride_tricks import sliding_window_view
from tqdm import tqdm
from xlstm_model import NO_TOKEN, Config, Params, Sampling, decode, not_finite, prefill

FLAGS = flags.FlagValues()
for name, default, least, about in (
    ("layers", 2, 1, "Blocks of an mLSTM layer and an MLP."),
    ("embedding_dim", 128, 1, "Width of the residual stream."),
    ("heads", 4, 1, "mLSTM heads; embedding_dim is an even multiple."),
    ("seq_len", 256, 1, "Bytes in a sequence."),
    ("batch_size", 8, 1, "Sequences in a step."),
    ("steps", 1000, 1, "Training steps."),
    ("seed", 0, 0, "Seed for the weights, the batches and the sample."),
    ("log_every", 10, 1, "Steps between log lines."),
    ("eval_every", 100, 1, "Steps between evaluations."),
    ("eval_batches", 32, 1, "Batches of held-out text in an evaluation."),
    ("checkpoint_every", 100, 0, "Steps between checkpoints; 0: only one, at the end."),
    ("num_processes", None, 1, "Number of processes."),
    ("process_id", None, 0, "Number of this process, from 0."),
    ("sample_length", 400, 1, "Bytes to generate."),
):
    flags.DEFINE_integer(name, default, about, least, 2**32 - 1, flag_values=FLAGS)
for name, default, about in (
    ("learning_rate", 4e-3, "Peak learning rate."),
    ("max_minutes", None, "End after so many minutes, with a checkpoint."),
    ("temperature", 0.8, "Temperature of the sampling; 0 takes the likeliest byte."),
):
    flags.DEFINE_float(name, default, about, 0.0, flag_values=FLAGS)
command.check_temperature(FLAGS)
for name, default, about in (
    ("corpus", None, "Folder or file to learn; none: the Python standard library's sources."),
    ("output_dir", "runs/byte_lm", "Folder for log.jsonl, loss.png, sample.txt, checkpoints/."),
    ("prompt", "def ", "Start of the sample."),
    ("mesh", "", "Devices along axes, such as data:2,tensor:1,sequence:4; one left out has 1."),
    ("coordinator_address", None, "HOST:PORT of the first of several processes; auto: JAX detects "
     "this, num_processes and process_id (Slurm, MPI, clouds)."),
):  # fmt: skip
    flags.DEFINE_string(name, default, about, flag_values=FLAGS)
for kind, *definition in (
    ("enum", "dtype", "float32", ["float32", "bfloat16"], "Type of products and activations."),
    ("bool", "resume", True, "Continue from the last checkpoint; else remove all there."),
):
    getattr(flags, f"DEFINE_{kind}")(*definition, flag_values=FLAGS)
LOG, PLOT, SAMPLE = "log.jsonl", "loss.png", "sample.txt"
WRITTEN = LOG, PLOT, SAMPLE, f".{PLOT}", f".{SAMPLE}", "checkpoints"  # in the output folder
# A run continues from a checkpoint with the same values of these; devices, backend, logging and
# sampling may change.
DECIDE_ON_THE_CURVE = (
    *("layers", "embedding_dim", "heads", "dtype", "seed"),
    *("seq_len", "batch_size", "steps", "learning_rate"),
)


def check_flags() -> None:
    """Raises UserError at the first wrong value or combination."""
    with command.naming("mesh"):
        data, tensor, sequence = parse_mesh(FLAGS.mesh).values()
    processes = FLAGS.coordinator_address, FLAGS.num_processes, FLAGS.process_id
    address, *_ = processes
    together = address == "auto" or len({x is None for x in processes}) == 1
    has_port = address in (None, "auto") or address.rpartition(":")[2].isdecimal()
    for holds, message in (
        (
            FLAGS.embedding_dim % (2 * FLAGS.heads) == 0,
            "--embedding_dim must be an even multiple of --heads",
        ),
        (FLAGS.batch_size % data == 0, "--batch_size must be a multiple of data in --mesh"),
        (FLAGS.heads % tensor == 0, "--heads must be a multiple of tensor in --mesh"),
        (FLAGS.seq_len % sequence == 0, "--seq_len must be a multiple of sequence in --mesh"),
        (together, "--coordinator_address, --num_processes and --process_id belong together"),
        (has_port, f"--coordinator_address={address}, expected HOST:PORT or auto"),
    ):
        if not holds:
            raise UserError(message)


def make_optimizer() -> optax.GradientTransformation:
    """AdamW with weight decay on the matrices alone, behind gradient clipping.

    The learning rate warms up linearly for a twentieth of the steps, then follows a cosine down to
    a tenth of the peak.
    """
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
        self._path = Path(os.devnull) if jax.process_index() else path
        self._path.write_text("")
        for line in lines:
            self.write(**line)

    def write(self, **line: Any) -> None:
        self.lines.append({"seconds": round(time.perf_counter() - self._started, 3)} | line)
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps(self.lines[-1]), file=file)

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """The steps that have a value of this name, and the values."""
        lines = [line for line in self.lines if name in line]
        return [line["step"] for line in lines], [line[name] for line in lines]


class Training:
    """Parameters, text to learn and held-out text (bytes,), and all that a step changes.

    It starts from the last checkpoint in the output folder, if there is one. If that run has
    finished, with its sample, there is nothing else in it.

    Raises:
      UserError: the checkpoint cannot be read, or belongs to another training.
    """

    def __init__(self, model: Model, text: np.ndarray, held_out: np.ndarray, output: Path):
        self.model, self.text = model, text
        # All sequences of a text with the byte after each, (len(text) - seq_len, seq_len + 1).
        self.sequences, self.held_out = (
            sliding_window_view(x, FLAGS.seq_len + 1) for x in (text, held_out)
        )
        self.optimizer = make_optimizer()
        self.step = 0
        self.rng = np.random.default_rng(FLAGS.seed)  # draws the batches
        self.losses: list[jax.Array | float] = []  # since the last step that log_every divides
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        folder = (output / "checkpoints").absolute()
        self.checkpoints = ocp.CheckpointManager(folder, options=options)
        if not FLAGS.resume:
            for step in self.checkpoints.all_steps():
                self.checkpoints.delete(step)
        last = self.checkpoints.latest_step()
        lines = self.restore(last) if last else []
        self.finished = last == FLAGS.steps and (output / SAMPLE).exists()
        if self.finished:
            again = "--noresume starts over, another --output_dir keeps this run"
            say(f"the run in {output} is finished after step {last}: {again}")
            return
        params = initial_params(model.config, jax.random.key(FLAGS.seed))
        self.state = shard((params, self.optimizer.init(params)), model.mesh)
        if last:
            self.state = self.read(last, state=ocp.args.StandardRestore(self.state))
            if names := not_finite(self.state):
                raise UserError(f"the checkpoint {folder / str(last)}: {names[0]} is not finite")
            say(f"going on after step {last} of {FLAGS.steps} with {folder / str(last)}")
        self.log = Log(output / LOG, lines)

    def advance(self) -> None:
        """One step."""
        batch = self.sequences[self.rng.integers(len(self.sequences), size=FLAGS.batch_size)]
        self.state, loss = train_step(self.model, self.optimizer, self.state, batch)
        # On CPUs the collectives of two programs under way would wait for each other's threads.
        several = self.model.mesh.size > 1
        self.losses.append(jax.block_until_ready(loss) if several else loss)
        self.step += 1

    def finite_losses(self) -> list[float]:
        """The losses as numbers, which are waited for; raises FloatingPointError."""
        self.losses = [float(loss) for loss in jax.device_get(self.losses)]
        if wrong := [loss for loss in self.losses if not math.isfinite(loss)]:
            self.fail(f"the loss is {wrong[0]}")
        return self.losses

    def fail(self, problem: str) -> NoReturn:
        message = f"{problem} by step {self.step}"
        self.log.write(step=self.step, error=message)
        raise FloatingPointError(message)

    def log_losses(self, steps: int, since: float, bar: tqdm) -> None:
        """Writes the mean loss, and the speed of the last steps, since a time.

        The speed of the first line counts the compilation.
        """
        losses = self.finite_losses()  # waits for the steps, before the clock is read
        speed = steps * FLAGS.batch_size * FLAGS.seq_len / (time.perf_counter() - since)
        loss = sum(losses) / len(losses)
        values = dict(loss=loss, train_bits_per_byte=loss / math.log(2))
        self.log.write(step=self.step, **values, tokens_per_second=round(speed, 1))
        bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{speed:.0f}")
        self.losses = []

    def evaluate(self) -> None:
        """Logs the bits per byte of the same sequences, spread evenly over the held-out text."""
        count = FLAGS.eval_batches * FLAGS.batch_size
        starts = np.linspace(0, len(self.held_out) - 1, count).astype(int)
        batches = (self.held_out[x] for x in np.split(starts, FLAGS.eval_batches))
        nats = [float(cross_entropy(self.model, self.state[0], batch)) for batch in batches]
        bits = float(np.mean(nats)) / math.log(2)
        if not math.isfinite(bits):
            self.fail(f"the loss of held-out text is {bits}")
        self.log.write(step=self.step, held_out_bits_per_byte=bits)
        say(f"step {self.step}: {bits:.3f} held-out bits per byte")

    def save(self) -> None:
        """Writes a checkpoint, which gets its name when it is complete.

        Raises:
          FloatingPointError: a loss or the state is not finite.
          OSError: it cannot be written.
        """
        if names := not_finite(self.state):
            self.fail(f"{names[0]} of the state is not finite")
        settings = {name: FLAGS[name].value for name in DECIDE_ON_THE_CURVE}
        progress = dict(
            settings=settings,
            text=zlib.crc32(self.text),
            rng=self.rng.bit_generator.state,
            losses=self.finite_losses(),
            log=self.log.lines,
        )
        # A run is finished if it has a sample, which may be of an earlier end.
        if self.step == FLAGS.steps:
            (self.checkpoints.directory.parent / SAMPLE).unlink(missing_ok=True)
        items = dict(state=ocp.args.StandardSave(self.state), progress=ocp.args.JsonSave(progress))
        try:
            self.checkpoints.save(self.step, args=ocp.args.Composite(**items))
        except Exception as error:  # tensorstore raises ValueError where the disk is full
            reason = " ".join(str(error).split())[:300]
            path = self.checkpoints.directory / str(self.step)
            raise OSError(f"the checkpoint {path} cannot be written: {reason}") from None

    def read(self, step: int, **item: Any) -> Any:
        """One item of a checkpoint."""
        try:
            [value] = self.checkpoints.restore(step, args=ocp.args.Composite(**item)).values()
            return value
        except Exception as error:  # orbax raises this type itself if it cannot read an array
            reason = " ".join(str(error).split())[:300]
            path = self.checkpoints.directory / str(step)
            raise UserError(f"the checkpoint {path} cannot be read: {reason}") from None

    def restore(self, step: int) -> list[dict[str, Any]]:
        """Goes back to all but the state of a checkpoint; returns the lines of its log."""
        path = self.checkpoints.directory / str(step)
        progress = self.read(step, progress=ocp.args.JsonRestore())
        otherwise = f"give another --output_dir, or --noresume to lose {path}"
        for name, before in progress["settings"].items():
            if before != FLAGS[name].value:
                change = f"--{name}={before} cannot go on with --{name}={FLAGS[name].value}"
                raise UserError(f"a run with {change}: {otherwise}")
        if progress["text"] != zlib.crc32(self.text):
            raise UserError(f"a run cannot go on with other text in --corpus: {otherwise}")
        self.step, self.losses = step, progress["losses"]
        self.rng.bit_generator.state = progress["rng"]
        return progress["log"]


def train(training: Training, ends: Callable[[int], bool]) -> None:
    """Trains to the last step, or to one at which ``ends`` says yes.

    Raises:
      FloatingPointError: the loss is not finite.
    """
    steps, quiet, early = FLAGS.steps, jax.process_index() > 0, False
    with tqdm(total=steps, initial=training.step, unit="step", disable=quiet) as bar:
        since, done = time.perf_counter(), training.step
        while training.step < steps and not early:
            training.advance()
            bar.update()
            step = training.step
            early = step < steps and ends(step)
            every = FLAGS.log_every, FLAGS.eval_every, FLAGS.checkpoint_every
            logs, evaluates, saves = (step == steps or (x and step % x == 0) for x in every)
            if logs:
                training.log_losses(step - done, since, bar)
            if evaluates:
                training.evaluate()
            if saves or early:
                training.save()
            if logs or evaluates or saves:
                since, done = time.perf_counter(), step


def sample(config: Config, params: Params) -> tuple[bytes, float]:
    """The prompt and what the model makes of it after an empty line, and bytes per second.

    The time counts reading the prompt, and not compiling.
    """
    prompt, sampling = os.fsencode(FLAGS.prompt), Sampling(FLAGS.temperature)
    tokens, key = np.array([[*b"\n\n", *prompt]]), jax.random.key(FLAGS.seed)
    for _ in range(2):
        start = time.perf_counter()
        _, states = prefill(config, params, tokens[:, :-1], np.array([len(prompt) + 1]))
        loop = config, sampling, FLAGS.sample_length, params, states, tokens[:, -1], key, 0
        generated = np.asarray(decode(*loop)[-1])[:, 0]
    speed = FLAGS.sample_length / (time.perf_counter() - start)
    if NO_TOKEN in generated:
        raise FloatingPointError("the logits of the sample are not finite")
    return prompt + bytes(generated.tolist()), speed


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


@dataclasses.dataclass
class Stop:
    signal: int = 0  # 0: go on
    unprinted: OSError | None = None  # why text for stdout or stderr was lost


class Output:
    """stdout or stderr; text that it cannot take is lost, and ``stop`` knows.

    The reader of a pipe may have ended with the same Ctrl-C, a terminal is closed.
    """

    def __init__(self, file: TextIO, stop: Stop):
        self._file, self._stop = file, stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._stop.unprinted = error
            command.can_flush(self._file)

    def flush(self) -> None:
        """Each text is flushed when it is written."""


SIGHUP = getattr(signal, "SIGHUP", None)  # Windows has none
SIGNALS = (signal.SIGINT, signal.SIGTERM, *filter(None, [SIGHUP]))
LIBC = ctypes.CDLL(None if os.name == "posix" else "ucrtbase")
SAME_SIGNAL = 0.5  # seconds in which timeout and others send one signal more than once


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Yields what the first signal sets; a later Ctrl-C or SIGTERM kills the process.

    A thread waits for that one, because Python runs no handler while XLA compiles. A SIGHUP that
    is ignored stays so. It does not kill, because a shell repeats that of its terminal.
    """
    stop, (reader, writer) = Stop(), socket.socketpair()
    writer.setblocking(False)

    def first(number: int, _: Any) -> None:
        stop.signal = stop.signal or number

    def kill_at_the_second() -> None:
        since = math.inf
        while number := reader.recv(1):  # until the training has ended
            now = time.monotonic()
            if now > since + SAME_SIGNAL and number[0] != SIGHUP:
                LIBC.signal(number[0], None)  # to the default
                os.kill(os.getpid(), number[0])
            since = min(since, now)

    ignored = SIGHUP and signal.getsignal(SIGHUP) == signal.SIG_IGN
    handlers = {x: signal.signal(x, first) for x in SIGNALS if not (ignored and x == SIGHUP)}
    previous, thread = (
        signal.set_wakeup_fd(writer.fileno()),
        threading.Thread(target=kill_at_the_second),
    )
    thread.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(previous)
        for x, handler in handlers.items():
            signal.signal(x, handler)
        writer.close()
        thread.join()
        reader.close()


def asked_to_end(stop: Stop, deadline: float, step: int) -> bool:
    """Whether to end after this step, because of a signal, lost text or --max_minutes.

    Several processes agree on it at the steps that log: a signal to one sets ``stop`` in all.
    """
    asked = np.asarray([stop.signal, time.monotonic() > deadline or stop.unprinted is not None])
    if jax.process_count() > 1:
        if step % FLAGS.log_every:
            return False
        asked = multihost_utils.process_allgather(asked).max(axis=0)
    stop.signal = stop.signal or int(asked[0])
    return bool(asked.any())


GO_ON = "when all processes have ended, the same commands go on from the last checkpoint"


def end_alone(message: str, code: int = 1) -> NoReturn:
    """Ends one of several processes.

    At a normal exit jax.distributed would wait for the others, and abort after a minute.
    """
    os.write(2, f"\ntrain_byte_lm: {message}\n".encode(errors="backslashreplace"))
    os._exit(code)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def on_abort(_: int) -> None:
    end_alone(f"this process was aborted, as above or because another one has died: {GO_ON}")


def say(text: str) -> None:
    """Prints above the progress bar, in the first process."""
    if jax.process_index() == 0:
        tqdm.write(command.printable(text))


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """What ``write`` writes to a path gets this one when it is complete."""
    write(temporary := path.with_name(f".{path.name}"))
    temporary.replace(path)


def run(stop: Stop, files: contextlib.ExitStack) -> int:
    """The whole job, from the corpus to the plot; returns the exit code."""
    minutes = math.inf if FLAGS.max_minutes is None else FLAGS.max_minutes
    deadline = time.monotonic() + 60 * minutes
    mesh, output = make_mesh(FLAGS.mesh), Path(FLAGS.output_dir)
    with command.naming("corpus"):
        corpus, written = (
            Path(FLAGS.corpus) if FLAGS.corpus else None,
            map(output.joinpath, WRITTEN),
        )
        text, held_out = read_corpus(corpus, FLAGS.seq_len, written)
    sizes = VOCABULARY, FLAGS.embedding_dim, FLAGS.layers, FLAGS.heads
    config = Config(*sizes, ffn_proj_factor=2.0, ffn_round_up_to_multiple_of=1)
    unigram = unigram_bits(text, held_out)
    with command.naming("output_dir"):
        output.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        files.enter_context(command.open_alone("output_dir", output / LOG))
    training = Training(Model(config, mesh, FLAGS.dtype), text, held_out, output)
    if training.finished:
        return 0
    log, parameters = training.log, sum(x.size for x in jax.tree.leaves(training.state[0]))
    device = jax.devices()[0].device_kind
    texts = f"{len(text):,} bytes to learn, {len(held_out):,} held out"
    say(f"{parameters:,} parameters, {texts}, on {mesh.size} x {device}")
    if not log.lines:
        values = FLAGS.flag_values_dict()
        log.write(
            # JSON has no infinity, which two flags may be.
            flags={name: str(x) if x == math.inf else x for name, x in values.items()},
            device=device,
            devices=mesh.size,
            parameters=parameters,
            train_bytes=len(text),
            held_out_bytes=len(held_out),
            jax=jax.__version__,
            unigram_bits_per_byte=unigram,
        )
    train(training, functools.partial(asked_to_end, stop, deadline))
    code = 0
    if training.step < FLAGS.steps:
        code = 128 + stop.signal if stop.signal else 75
        what = "ending with what there is; the same command goes on from here"
        tqdm.write(f"interrupted after step {training.step}: {what}")
        training.evaluate()
    params = multihost_utils.process_allgather(training.state[0], tiled=True)
    if jax.process_index() == 0:
        write_whole(output / PLOT, functools.partial(plot, log, unigram))
        params = jax.device_put(cast(params, FLAGS.dtype), mesh.local_devices[0])
        generated, speed = sample(config, params)
        text = generated.decode(errors="backslashreplace")
        log.write(step=training.step, generated_tokens_per_second=round(speed, 1))
        data = text.encode()
        write_whole(output / SAMPLE, lambda path: path.write_bytes(data))
        say(f"--- sample\n{text}\n--- generated at {speed:.0f} tokens per second")
        _, [*_, bits] = log.curve("held_out_bits_per_byte")
        result = f"held-out bits per byte: {bits:.3f} (unigram: {unigram:.3f})"
        say(f"{result}; log, plot and sample are in {output}")
    if stop.unprinted and not stop.signal:
        raise OSError(f"cannot write to stdout or stderr: {stop.unprinted}")
    return code


def start_processes() -> None:
    """Joins the processes of the run that the flags or JAX's detection of the cluster name."""
    address = None if FLAGS.coordinator_address == "auto" else FLAGS.coordinator_address
    try:
        jax.distributed.initialize(address, FLAGS.num_processes, FLAGS.process_id)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--coordinator_address={address}: {reason}") from None
    # The threads of jax.distributed abort a process that waits for one that is gone.
    LIBC.signal(signal.SIGABRT, on_abort)


def start(_: flags.FlagValues) -> int:
    """Returns the exit code: 0, 75 if --max_minutes ended the training, 128 + that of a signal.

    A loss that is not finite, lost text and processes that die are one line, with exit code 1.

    Raises:
      UserError, command.RequestError: a single process cannot do what the flags ask for.
    """
    check_flags()
    if FLAGS.coordinator_address is not None:
        start_processes()
    code = 1
    with stop_on_signals() as stop, contextlib.ExitStack() as files:
        files.enter_context(contextlib.redirect_stdout(Output(sys.stdout, stop)))
        files.enter_context(contextlib.redirect_stderr(Output(sys.stderr, stop)))
        try:
            return run(stop, files)
        except (UserError, command.RequestError, FloatingPointError, OSError) as error:
            if jax.process_count() == 1:
                raise
            code, message = 2 if isinstance(error, ValueError) else 1, str(error)
        except jax.errors.JaxRuntimeError as error:  # a collective fails if a process has died
            if jax.process_count() == 1:
                raise
            reason = " ".join(str(error).split())[:300]
            message = f"the processes have lost each other ({reason}): {GO_ON}"
    end_alone(message, code)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    return command.run(argv, FLAGS, start, UserError, __doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
