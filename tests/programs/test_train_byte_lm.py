"""examples/train_byte_lm.py, byte_lm.py, byte_corpus.py: the split of the text, the model, whole
runs, their end and what follows."""

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import byte_corpus as corpus
import byte_lm
import command
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_byte_lm as lm
from benchmark_runs import Device, assert_row, error_of, parse, records, run
from oracle import assert_close
from xlstm_model import Config

TINY = dict(
    layers=1,
    embedding_dim=16,
    heads=2,
    seq_len=32,
    batch_size=4,
    steps=50,
    eval_every=25,
    eval_batches=2,
    sample_length=8,
    learning_rate=2e-2,
)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def text_folder(tmp_path_factory):
    """The corpus of TINY. Its text is files whose bytes follow each other in a fixed order: easy to
    predict from the byte before, hard from frequencies."""
    folder = tmp_path_factory.mktemp("text")
    for n in range(20):
        (folder / f"{n}.txt").write_bytes(bytes(range(97, 123)) * 40)
    with mock.patch.dict(TINY, corpus=folder):
        yield folder


def arguments(folder, **changed):
    """Those of a run with this output folder, which are TINY but for what is changed."""
    options = TINY | dict(output_dir=folder) | changed
    return [f"--{name}={x}" for name, x in options.items()]


def train(folder, **changed):
    """The exit code of a run, or of the same command once more."""
    return run(lm, *arguments(folder, **changed))


def read_log(folder, name=""):
    """The lines, or those values that have this name."""
    lines = records(folder / "log.jsonl")
    return [line[name] for line in lines if name in line] if name else lines


# ---------------- the text


@pytest.mark.parametrize("folder", ["runs", "."])
def test_what_a_run_writes_is_no_text_of_the_next_one(folder, tmp_path):
    """The output folder is in the corpus, or is the corpus."""
    (tmp_path / "text.txt").write_text("text " * 9)
    before = b"".join(corpus.read_corpus(tmp_path, 1, []))
    written = [tmp_path / folder / name for name in lm.WRITTEN]
    (written[-1] / "10").mkdir(parents=True)
    for path in (*written[:-1], written[-1] / "10" / "data"):
        path.write_text("other " * 9)
    assert before == b"".join(corpus.read_corpus(tmp_path, 1, written))


def test_a_twentieth_is_held_out(tmp_path):
    """Of the files, or of a single one its end."""
    for name in range(45):
        (tmp_path / f"{name}.txt").write_text(f"<{name}>" * 9)
    parts = corpus.read_corpus(tmp_path, 4)
    train, held_out = ({*re.findall(r"\d+", part.tobytes().decode())} for part in parts)
    assert (len(train), len(held_out), len(train | held_out)) == (42, 3, 45)
    for size, train in ((20, 19), (39, 38), (40, 38)):
        (tmp_path / "x").write_bytes(data := bytes(range(size)))
        assert [*map(bytes, corpus.read_corpus(tmp_path / "x", 0))] == [data[:train], data[train:]]


def test_files_of_a_corpus(tmp_path, monkeypatch):
    """By default those of the standard library that are everywhere, in Python. A file with several
    names is there once, and links that lead nowhere or up are not."""
    names = "a.py", "a.txt", "test/a.py", "site-packages/a.py", "b/tester/a.py"
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(tmp_path))
    assert corpus.corpus_files(None) == [tmp_path / "a.py", tmp_path / "b/tester/a.py"]
    before = corpus.corpus_files(tmp_path)
    assert len(before) == len(names)
    for name, target in {"0": "a.py", "b/up": "..", "no": "such"}.items():  # sorted, "0" is first
        (tmp_path / name).symlink_to(target)
    (tmp_path / "hard").hardlink_to(tmp_path / "a.py")
    assert corpus.corpus_files(tmp_path) == before


# ---------------- the model


def test_the_model_that_generates_is_the_one_that_is_trained():
    """Greedily; with open input gates, so that much of the logits comes from the states."""
    config = Config(256, 32, num_blocks=2, num_heads=2)
    params = byte_lm.initial_params(config, jax.random.key(3))
    for p in params["blocks"]:
        p["gate_bias"] *= jnp.array([0.0, 1.0])
    parse(lm, "--temperature=0", "--sample_length=12")
    text, _ = lm.sample(config, params)
    tokens, trained = np.array([[*b"\n\n", *text]]), byte_lm.Model(config, lm.make_mesh(""))
    logits = np.asarray(byte_lm.logits_of(trained, params, tokens))[0, -13:-1]
    chosen = np.take_along_axis(logits, tokens[0, -12:, None], axis=-1)
    assert_close(chosen[:, 0], np.max(logits, axis=-1), 1e-5)


def test_the_learning_rate_rises_for_a_twentieth_and_falls_to_a_tenth():
    """AdamW makes an update of the rate from gradients that do not change; larger ones are clipped
    to the same norm. Matrices also decay by a tenth of it."""
    parse(lm, "--steps=40", "--learning_rate=3.0")
    optimizer, steps, rates = lm.make_optimizer(), np.arange(41), []
    params = dict(qkvo=jnp.full(1, 2.0), norm=jnp.full(1, 2.0))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in steps:
        gradients = {name: x * 1e3 ** (step % 2) for name, x in params.items()}
        updates, state = update(gradients, state, params)
        rates.append([-float(updates[name][0]) for name in ("norm", "qkvo")])
    falling = 0.3 + 2.7 * (1 + np.cos(np.pi * (steps - 2) / 38)) / 2
    expected = np.where(steps < 2, 3.0 * steps / 2, falling)[:, None] * [1, 1.2]
    np.testing.assert_allclose(rates, expected, rtol=1e-4, atol=1e-6)


# ---------------- whole runs


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The output folder of a run."""
    folder = tmp_path_factory.mktemp("output") / "new" / "folder"
    assert train(folder) == 0
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The output folder of a run that a SIGTERM ended after 13 steps; its last checkpoints are of
    steps 10 and 13."""

    def interrupt(stop, until, step, asked_to_end=lm.asked_to_end):
        if step == 13:
            signal.raise_signal(signal.SIGTERM)
        return asked_to_end(stop, until, step)

    folder = tmp_path_factory.mktemp("interrupted")
    with mock.patch.object(lm, "asked_to_end", interrupt):
        assert train(folder, checkpoint_every=5) == 143
    return folder


@pytest.fixture
def copied(interrupted, tmp_path):
    return shutil.copytree(interrupted, tmp_path / "copied")


def test_interrupted_run_has_learned(interrupted):
    first, _, evaluation, _ = read_log(interrupted)
    assert {"flags", "device", "jax", "parameters"} <= {*first}
    assert read_log(interrupted, "step") == [10, 13, 13]
    assert first["unigram_bits_per_byte"] == pytest.approx(np.log2(26), abs=0.1)
    assert evaluation["held_out_bits_per_byte"] < 0.7 * first["unigram_bits_per_byte"]
    assert {*os.listdir(interrupted)} >= {"loss.png", "sample.txt"}
    assert {*os.listdir(interrupted / "checkpoints")} == {"10", "13"}


def curve(folder):
    """The log without what depends on the clock and the folder."""
    differ = "seconds", "tokens_per_second", "generated_tokens_per_second", "flags"
    return [line | dict.fromkeys(differ) for line in read_log(folder)]


def test_interrupted_run_goes_on_along_the_curve(output, copied, capsys):
    with (copied / "log.jsonl").open("a") as file:  # what a kill after the checkpoint leaves
        file.write(json.dumps(dict(step=20, loss=0.0, seconds=1e3)) + '\n{"step": 30, "lo')
    (copied / "checkpoints" / "20.orbax-checkpoint-tmp").mkdir()  # what a kill within one leaves
    assert train(copied) == 0
    assert {*os.listdir(copied / "checkpoints")} == {"13", "50"}
    assert read_log(output, "step") == [10, 20, 25, 30, 40, 50, 50, 50]
    assert curve(copied) == curve(output)
    assert (copied / "sample.txt").read_text() == (output / "sample.txt").read_text()
    before = read_log(copied)
    assert read_log(copied, "seconds") == sorted(read_log(copied, "seconds"))
    capsys.readouterr()
    assert train(copied) == 0
    assert f"the run in {copied} is finished after step 50: --nores" in capsys.readouterr().out
    assert read_log(copied) == before


def test_noresume_starts_over(copied):
    assert train(copied, resume=False, seed=1, max_minutes=0.0) == 75
    assert os.listdir(copied / "checkpoints") == ["1"]
    assert read_log(copied, "step") == [1, 1]


def test_a_run_does_not_go_on_with_what_does_not_fit(text_folder, interrupted, copied, tmp_path):
    """Nor in the folder of a run."""
    with command.open_alone("output_dir", interrupted / lm.LOG):
        message = error_of(train, interrupted)
    assert message == f"train_byte_lm: --output_dir: another run is writing {interrupted / lm.LOG}"
    checkpoint = interrupted / "checkpoints" / "13"
    message = error_of(train, interrupted, layers=2)
    assert "a run with --layers=1 cannot go on with --layers=2: " in message
    assert str(checkpoint) in message
    other = shutil.copytree(text_folder, tmp_path / "other")
    (other / "1.txt").write_bytes(b"x" * 1040)
    message = error_of(train, interrupted, corpus=other)
    assert "cannot go on with other text in --corpus" in message
    for item in ("progress/metadata", "state/_METADATA"):
        damaged = copied / "checkpoints" / "13" / item
        damaged.write_bytes(damaged.read_bytes()[:99])
        message = error_of(train, copied)
        assert f"the checkpoint {copied}/checkpoints/13 cannot be read: " in message
        shutil.copy(checkpoint / item, damaged)
    assert read_log(copied) == read_log(interrupted)


@pytest.fixture
def training(tmp_path):
    """Without a model and a text."""
    parse(lm, *arguments(""))
    training = object.__new__(lm.Training)
    checkpoints = mock.Mock(directory=tmp_path / "checkpoints")
    vars(training).update(step=7, losses=[], log=mock.Mock(lines=[]), checkpoints=checkpoints)
    vars(training).update(text=np.zeros(3, np.uint8), rng=np.random.default_rng(0), model=None)
    vars(training).update(state=[jnp.ones(3)], held_out=np.arange(71.0)[:, None])
    return training


def test_figures_of_steps_and_evaluations(training, monkeypatch):
    """A step takes a second and has a loss of its number, a batch of an evaluation 50 seconds."""
    device = Device(monkeypatch, lm)

    def advance():
        device.now += 1.0
        training.losses.append(float(training.step))
        training.step += 1

    def cross_entropy(model, params, batch):
        device.now += 50.0
        return batch.mean()

    monkeypatch.setattr(lm, "cross_entropy", cross_entropy)
    vars(training).update(step=0, advance=advance, save=mock.Mock())
    lm.train(training, lambda step: False)
    lines = [call.kwargs for call in training.log.write.call_args_list]
    losses, bits = (
        [line for line in lines if x in line] for x in ("loss", "held_out_bits_per_byte")
    )
    for loss, line in zip((4.5, 14.5, 24.5, 34.5, 44.5), losses, strict=True):
        figures = dict(train_bits_per_byte=loss / np.log(2), tokens_per_second=128.0)
        assert_row(line, loss=loss, **figures)
    assert_row(bits[1], held_out_bits_per_byte=35 / np.log(2))


def test_a_state_that_is_not_finite_or_cannot_be_written_ends_the_training(training, monkeypatch):
    """So does a loss of held-out text, in each case with the checkpoint before it."""
    save = training.checkpoints.save
    save.side_effect = ValueError("No space\nleft")
    with pytest.raises(OSError, match=r"^the checkpoint .*/7 cannot be written: No space left"):
        training.save()
    training.state = dict(weights=jnp.ones(3), moments=[jnp.array([1.0, -jnp.inf])]), 3
    with pytest.raises(FloatingPointError, match=r"^0.moments.0 of the state is not finite by"):
        training.save()
    monkeypatch.setattr(lm, "cross_entropy", lambda *_: jnp.nan)
    with pytest.raises(FloatingPointError, match=r"^the loss of held-out text is .* by step 7"):
        training.evaluate()
    save.assert_called_once()
    assert all({*call.kwargs} == {"step", "error"} for call in training.log.write.call_args_list)


def test_a_run_is_not_finished_with_the_sample_of_an_earlier_end(training, tmp_path):
    """It is killed between the last checkpoint and its sample, or while that is written."""
    path = tmp_path / lm.SAMPLE
    for step, exists in ((49, True), (50, False)):
        path.touch()
        training.step = step
        training.save()
        assert path.exists() == exists

    def half(other):
        other.write_text("sec")
        raise OSError("No space left")

    with pytest.raises(OSError, match="No space"):
        lm.write_whole(path, half)
    assert {x.name for x in tmp_path.iterdir()} <= {*lm.WRITTEN} - {lm.SAMPLE}


def test_loss_that_is_not_finite(tmp_path):
    message = "the loss is nan by step 10"
    assert message in error_of(train, tmp_path, code=1, learning_rate=float("inf"))
    assert read_log(tmp_path, "error") == [message]
    assert read_log(tmp_path, "flags")[0]["learning_rate"] == "inf"
    assert "Infinity" not in (tmp_path / lm.LOG).read_text()


# ---------------- several devices and processes


def assert_same_curve(folder, single):
    """As the job promises of its first 50 steps in float32."""
    for name in ("loss", "held_out_bits_per_byte"):
        expected = read_log(single, name)
        assert read_log(folder, name)[-len(expected) :] == pytest.approx(expected, rel=1e-3)


def test_a_run_goes_on_along_the_curve_on_a_mesh(output, copied):
    if jax.device_count() < 8:
        pytest.skip("too few devices")
    assert train(copied, mesh="data:2,tensor:2,sequence:2") == 0
    assert_same_curve(copied, output)


SETTINGS = dict(PYTHONPATH=os.pathsep.join(filter(None, sys.path)), JAX_PLATFORMS="cpu")


def end_of_processes(folder, end=lambda *_: None):
    """Exit codes and what two processes printed; ``end`` gets them once they have logged a loss."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    options = dict(mesh="data:2", num_processes=2, coordinator_address=address)
    command = [sys.executable, lm.__file__, *arguments(folder, **options)]
    settings = SETTINGS | dict(JAX_DISABLE_MOST_OPTIMIZATIONS="1", JAX_NUM_CPU_DEVICES="1")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [
        subprocess.Popen([*command, f"--process_id={n}"], env=os.environ | settings, **pipes)
        for n in range(2)
    ]
    (folder / "log.jsonl").touch()
    before, until = len(read_log(folder, "loss")), time.monotonic() + 300
    try:
        while len(read_log(folder, "loss")) == before and time.monotonic() < until:
            time.sleep(0.02)
        end(*processes)
        printed = [process.communicate(timeout=300) for process in processes]
        return [process.returncode for process in processes], *printed
    finally:
        for process in processes:
            process.kill()


def test_processes_end_together_and_have_the_curve_of_a_single_device(output, tmp_path):
    end = functools.partial(end_of_processes, tmp_path)
    codes, *printed = end(lambda first, second: second.send_signal(signal.SIGTERM))
    assert codes == [143, 143], printed
    assert all("the same command goes on from here" in stdout for stdout, _ in printed)
    codes, (_, error), _ = end(lambda first, second: second.kill())
    assert codes == [1, -signal.SIGKILL], error
    assert error.endswith("the same commands go on from the last checkpoint\n")
    codes, (first, error), (second, _) = end()
    assert codes == [0, 0], error
    assert "going on after step" in first
    assert_same_curve(tmp_path, output)
    assert "held-out bits per byte" in first.splitlines()[-1]
    assert "held-out" not in second


# ---------------- how runs end


@pytest.fixture
def without_nohup():
    """SIGHUP ends this process and those that it starts, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


# The training waits in a call that runs no Python, as those of a compiler.
BUSY = """
import hashlib, train_byte_lm
with train_byte_lm.stop_on_signals() as stop:
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


@pytest.mark.usefixtures("without_nohup")
@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP, signal.SIGINT)],
)
def test_a_second_signal_ends_at_once(first, second):
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], env=os.environ | SETTINGS, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(first)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.send_signal(second)
        try:
            assert process.wait(timeout=10) == -second
        finally:
            process.kill()


@pytest.mark.usefixtures("without_nohup")
def test_the_first_signal_decides_on_the_exit_code(monkeypatch):
    """Handlers are those of before afterwards. A hangup after another signal does not kill, and one
    that is ignored stays so, as nohup has it."""
    monkeypatch.setattr(lm, "SAME_SIGNAL", 0.0)
    before = [*map(signal.getsignal, lm.SIGNALS)]
    for first in lm.SIGNALS:
        with lm.stop_on_signals() as stop:
            assert not lm.asked_to_end(stop, np.inf, 1)
            for number in (first, signal.SIGHUP):
                signal.raise_signal(number)
                time.sleep(0.01)
            assert lm.asked_to_end(stop, np.inf, 2)
            assert stop.signal == first
        assert [*map(signal.getsignal, lm.SIGNALS)] == before
    monkeypatch.setattr(lm, "SAME_SIGNAL", 60.0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with lm.stop_on_signals() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.signal
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # at once, as shells do
            signal.raise_signal(number)
        assert stop.signal == signal.SIGTERM


def test_text_that_is_lost_ends_a_run_with_a_checkpoint(tmp_path, monkeypatch):
    """As where the reader of stdout and of stderr ends."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", file)
        assert train(tmp_path) == 1
    assert {*os.listdir(tmp_path)} >= {"loss.png", "sample.txt"}
    assert os.listdir(tmp_path / "checkpoints") == ["1"]
