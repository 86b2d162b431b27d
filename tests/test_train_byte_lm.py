"""benchmarks/train_byte_lm.py, byte_lm.py, byte_corpus.py: the split of the text, the model, whole
runs, their end and what follows."""

import functools
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

pytest.importorskip("flax")
pytest.importorskip("optax")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")
from flax import nnx

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
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
)
TINY |= dict(learning_rate=2e-2, warmup_steps=2)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def import_from_benchmarks(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module(name)


corpus, byte_lm = map(import_from_benchmarks, ("byte_corpus", "byte_lm"))


@pytest.fixture(scope="module")
def lm():
    """The script as a module.

    Other scripts may have flags of the same names: those are put aside, and its own are withdrawn
    at the end.
    """
    others = {
        name: flags.FLAGS[name]
        for name in flags.FLAGS
        if flags.FLAGS.find_module_defining_flag(name).split(".")[0] != "absl"
    }
    for name in others:
        delattr(flags.FLAGS, name)
    before = set(flags.FLAGS)
    module = import_from_benchmarks("train_byte_lm")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    yield module
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)
    for name, flag in others.items():
        flags.FLAGS[name] = flag
    del sys.modules["train_byte_lm"]


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """Files whose bytes follow each other in a fixed order: easy to predict from the byte before,
    hard from frequencies."""
    folder = tmp_path_factory.mktemp("text")
    for n in range(20):
        (folder / f"{n}.txt").write_bytes(bytes(range(97, 123)) * 40)
    return folder


def read_log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder):
    return [line["loss"] for line in read_log(folder) if "loss" in line]


# ---------------- the text


def test_split_is_by_files(tmp_path):
    for n in range(45):
        file = tmp_path / f"folder{n % 3}" / f"{n}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"<{n}>" * 9)
    parts = [
        set(part.tobytes().decode().replace(">", "<").split("<")) - {"", "\n"}
        for part in corpus.read_corpus(tmp_path, 4)
    ]
    assert [len(part) for part in parts] == [43, 2]
    assert parts[0] | parts[1] == {str(n) for n in range(45)}


@pytest.mark.slow
def test_split_of_the_standard_library():
    files = corpus.corpus_files(None)
    train, held_out = corpus.split_files(list(files))
    assert len(held_out) == len(files) // corpus.HELD_OUT_SHARE > 5
    assert set(train) | set(held_out) == set(files)
    assert not set(train) & set(held_out)
    assert not [
        name
        for name in files
        if {"site-packages", "test"} & set(name.split("/")) or not name.endswith(".py")
    ]


def test_split_does_not_depend_on_the_order():
    names = [f"{n}.py" for n in range(100)]
    assert corpus.split_files(names) == corpus.split_files(names[::-1])
    assert corpus.split_files(["a", "b"])[0] != corpus.split_files(["a", "b"])[1]


def test_split_of_a_single_file(tmp_path):
    (tmp_path / "book").write_bytes(bytes(range(200)))
    train, held_out = corpus.read_corpus(tmp_path / "book", 4)
    assert (train.tobytes(), held_out.tobytes()) == (bytes(range(190)), bytes(range(190, 200)))


def test_windows_are_the_text():
    text = np.arange(10, dtype=np.uint8)
    np.testing.assert_array_equal(
        corpus.windows(text, np.array([0, 6]), 3), [[0, 1, 2, 3], [6, 7, 8, 9]]
    )


def test_unigram_bits():
    text = np.repeat(np.arange(4, dtype=np.uint8), 100_000)
    assert corpus.unigram_bits(text, text) == pytest.approx(
        2.0, abs=252 / 4e5 / np.log(2) * 1.01
    )  # add-one: mass 252/4e5 elsewhere


# ---------------- the model


@pytest.fixture(scope="module")
def model():
    """Two small layers with open input gates, so that much of the logits comes from the states."""
    model = byte_lm.ByteLM(
        byte_lm.ModelConfig(layers=2, embedding_dim=32, heads=2, qk_dim=16, mlp_dim=48), nnx.Rngs(3)
    )
    for block in model.blocks:
        block.mlstm.input_gate.bias[...] = jnp.zeros(2)
    return model


@nnx.jit
def forward(model, tokens, states):
    return model(tokens, states)


def logits_tolerance(logits, terms):
    """Rounding of about 20 sums in a row (ten a block), each of at most ``terms`` float32 terms,
    relative to the largest logit."""
    return 20 * terms * float(jnp.finfo(jnp.float32).eps) * float(jnp.max(jnp.abs(logits)))


@pytest.mark.slow
def test_states_continue_the_full_pass(model):
    S, prompt = 24, 9
    tokens = jax.random.randint(jax.random.key(0), (2, S), 0, 256)
    full, none = forward(model, tokens, None)
    assert none == [None, None]
    part, states = forward(model, tokens[:, :prompt], model.initial_states(2))
    parts, forgetful = [part], None
    for t in range(prompt, S):
        forgetful, _ = forward(model, tokens[:, t : t + 1], model.initial_states(2))
        part, states = forward(model, tokens[:, t : t + 1], states)
        parts.append(part)
    tolerance = logits_tolerance(full, terms=48)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full, rtol=0, atol=tolerance)
    assert (
        float(jnp.max(jnp.abs(forgetful - full[:, -1:]))) > 100 * tolerance
    )  # the states matter to the last byte


def test_generation_is_greedy_at_temperature_0(model):
    prompt = jnp.asarray([[100, 101, 102]])
    text = byte_lm.generate(model, prompt, jax.random.key(0), length=12, temperature=0.0)
    logits, _ = forward(model, jnp.concatenate([prompt, text], axis=1), None)
    np.testing.assert_array_equal(text, jnp.argmax(logits, -1)[:, 2:-1])


@pytest.mark.slow
def test_generation_follows_the_key_at_a_temperature(model):
    prompt = jnp.asarray([[100, 101, 102]])
    first, again, other = (
        byte_lm.generate(model, prompt, jax.random.key(seed), length=12, temperature=1.0).tolist()
        for seed in (0, 0, 1)
    )
    assert first == again != other


# ---------------- whole runs


@pytest.fixture(scope="module")
def output(lm, text_folder, tmp_path_factory):
    """The output folder of a small run."""
    folder = tmp_path_factory.mktemp("output") / "new" / "folder"
    with flagsaver.flagsaver(**TINY, corpus=str(text_folder), output_dir=str(folder)):
        assert lm.main(["train_byte_lm.py"]) == 0
    return folder


def test_log(output):
    first, *lines = read_log(output)
    assert first["flags"]["seq_len"] == 32
    assert {"device", "jax", "parameters"} <= set(first)
    assert [line["step"] for line in lines if "loss" in line] == [10, 20, 30, 40, 50]
    assert [line["step"] for line in lines if "held_out_bits_per_byte" in line] == [25, 50]
    assert all(line["tokens_per_second"] > 0 for line in lines if "loss" in line)
    assert lines[-1]["generated_tokens_per_second"] > 0


def test_training_learns(output):
    first, *_, last, _ = read_log(output)
    assert first["unigram_bits_per_byte"] == pytest.approx(np.log2(26), abs=0.1)
    assert last["held_out_bits_per_byte"] < 0.7 * first["unigram_bits_per_byte"]
    assert losses(output)[-1] < 0.7 * losses(output)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "same"), [(0, True), (1, False)])
def test_seed_decides_the_curve(lm, text_folder, output, tmp_path, seed, same):
    with flagsaver.flagsaver(**TINY, corpus=str(text_folder), seed=seed):
        train_text, held_out = corpus.read_corpus(text_folder, TINY["seq_len"])
        checkpoints = lm.Checkpoints(tmp_path / "checkpoints")
        training = lm.Training(lm.model_config(), train_text)
        lm.train(
            training, held_out, lm.Log(tmp_path / "log.jsonl"), checkpoints, lambda step: False
        )
        checkpoints.close()
    assert (losses(tmp_path) == losses(output)) is same


def test_bfloat16_reaches_the_mlstm():
    config = byte_lm.ModelConfig(
        layers=1, embedding_dim=16, heads=2, qk_dim=16, mlp_dim=16, dtype="bfloat16"
    )
    layer = byte_lm.MLSTMLayer(config, nnx.Rngs(0))
    jaxpr = str(jax.make_jaxpr(lambda x: layer(x, None)[0])(jnp.ones((1, 16, 16))))
    assert "bf16[1,2,16,8]" in jaxpr


# ---------------- how runs go on


def curve(folder):
    """The log without what depends on the clock and the folder."""
    differ = {"seconds", "tokens_per_second", "generated_tokens_per_second", "flags"}
    return [
        {name: x for name, x in line.items() if name not in differ} for line in read_log(folder)
    ]


@pytest.fixture(scope="module")
def interrupted(lm, text_folder, tmp_path_factory):
    """The output folder of a run that --max_minutes ended after 13 steps; its last checkpoints are
    of steps 10 and 13."""
    folder, deadline = tmp_path_factory.mktemp("interrupted"), lm.asked_to_end
    with (
        pytest.MonkeyPatch.context() as patch,
        flagsaver.flagsaver(
            **TINY, corpus=str(text_folder), output_dir=str(folder), checkpoint_every=5
        ),
    ):
        patch.setattr(
            lm,
            "asked_to_end",
            lambda stop, until, step: deadline(stop, 0.0 if step == 13 else until, step),
        )
        assert lm.main(["train_byte_lm.py"]) == 75
    return folder


def go_on(lm, text_folder, folder, **changed):
    """The exit code of the same command once more."""
    with flagsaver.flagsaver(
        **TINY | dict(corpus=str(text_folder), output_dir=str(folder)) | changed
    ):
        return lm.main(["train_byte_lm.py"])


def test_interrupted_run_has_its_marks(interrupted):
    assert [line["step"] for line in read_log(interrupted) if "step" in line] == [10, 13, 13, 13]
    assert [line.get("interrupted", False) for line in read_log(interrupted)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert (interrupted / "loss.png").exists()
    assert sorted(path.name for path in (interrupted / "checkpoints").iterdir()) == ["10", "13"]


@pytest.mark.slow
def test_interrupted_run_goes_on_along_the_curve(lm, text_folder, output, interrupted, tmp_path):
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "log.jsonl").open("a") as file:  # what a kill after the checkpoint leaves
        file.write(json.dumps(dict(step=20, loss=0.0, seconds=1e3)) + '\n{"step": 30, "lo')
    assert go_on(lm, text_folder, tmp_path) == 0
    assert curve(tmp_path) == curve(output)
    assert (tmp_path / "sample.txt").read_text() == (output / "sample.txt").read_text()
    seconds = [line["seconds"] for line in read_log(tmp_path)]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_finished_run_is_not_trained_again(lm, text_folder, output, tmp_path, capsys):
    shutil.copytree(output, tmp_path, dirs_exist_ok=True)
    assert go_on(lm, text_folder, tmp_path) == 0
    assert (tmp_path / "log.jsonl").read_text() == (output / "log.jsonl").read_text()
    out = capsys.readouterr().out
    assert "going on after step 50 of 50" in out
    assert f"held-out bits per byte: {read_log(output)[-2]['held_out_bits_per_byte']:.3f}" in out


@pytest.mark.slow
def test_noresume_starts_over(lm, text_folder, interrupted, tmp_path):
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    assert go_on(lm, text_folder, tmp_path, resume=False, seed=1, max_minutes=0.0) == 75
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
    assert [line["step"] for line in read_log(tmp_path)[1:]] == [1, 1, 1]


@pytest.mark.parametrize("changed", [dict(layers=2), dict(seed=1)], ids=str)
def test_changed_flags_do_not_fit(lm, text_folder, interrupted, changed):
    [(name, x)] = changed.items()
    message = error_of(functools.partial(go_on, lm, text_folder, interrupted, **changed))
    assert f"a run with --{name}={TINY.get(name, 0)} cannot go on with --{name}={x}: " in message
    assert str(interrupted / "checkpoints" / "13") in message


def test_changed_text_does_not_fit(lm, text_folder, interrupted, tmp_path):
    shutil.copytree(text_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "0.txt").write_bytes(b"x" * 1040)
    assert "cannot go on with other text in --corpus" in error_of(
        functools.partial(go_on, lm, tmp_path, interrupted)
    )


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("arrays", Path.unlink),
        ("arrays", flip_a_bit),
        ("rest", lambda path: os.truncate(path, path.stat().st_size // 2)),
    ],
    ids=["arrays-gone", "arrays-flip", "rest-cut"],
)
def test_damaged_checkpoint(lm, text_folder, interrupted, tmp_path, capfd, part, damage):
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    checkpoint = tmp_path / "checkpoints" / "13"
    arrays = max(checkpoint.glob("state/ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)
    damage(arrays if part == "arrays" else checkpoint / "progress" / "metadata")
    assert f"the checkpoint {checkpoint} is damaged: " in error_of(
        functools.partial(go_on, lm, text_folder, tmp_path)
    )
    assert "Traceback" not in capfd.readouterr().err
    assert read_log(tmp_path) == read_log(interrupted)


# ---------------- several devices


def assert_same_curve(folder, single):
    for name in ("loss", "held_out_bits_per_byte"):
        curve, expected = (
            [line[name] for line in read_log(output) if name in line] for output in (folder, single)
        )
        np.testing.assert_allclose(
            curve, expected, rtol=1e-3
        )  # what the job promises of its first 50 steps in float32


@pytest.mark.slow
def test_mesh_has_the_curve_of_a_single_device(lm, text_folder, output, tmp_path):
    if jax.device_count() < 8:
        pytest.skip("too few devices")
    assert go_on(lm, text_folder, tmp_path, mesh="data:2,tensor:2,sequence:2") == 0
    assert_same_curve(tmp_path, output)
    assert read_log(tmp_path)[0]["devices"] == 8


@pytest.mark.slow
@pytest.mark.gpu_multi
@pytest.mark.parametrize("mesh", ["data:2", "sequence:2"])
def test_mesh_of_gpus_has_the_curve_of_a_single_one(lm, text_folder, tmp_path, mesh):
    assert go_on(lm, text_folder, tmp_path / "single") == 0
    assert go_on(lm, text_folder, tmp_path / "mesh", mesh=mesh) == 0
    assert_same_curve(tmp_path / "mesh", tmp_path / "single")
    assert read_log(tmp_path / "mesh")[0]["devices"] == 2


@pytest.mark.slow
def test_checkpoint_goes_on_with_another_mesh(lm, text_folder, output, interrupted, tmp_path):
    if jax.device_count() < 8:
        pytest.skip("too few devices")
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    assert go_on(lm, text_folder, tmp_path, mesh="data:4,sequence:2") == 0
    assert_same_curve(tmp_path, output)


@pytest.mark.slow
def test_processes_have_the_curve_of_a_single_device(text_folder, output, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    common = [
        f"--corpus={text_folder}",
        f"--output_dir={tmp_path}",
        "--mesh=data:2",
        f"--coordinator_address={address}",
    ]
    processes = [
        start(*common, "--num_processes=2", f"--process_id={n}", JAX_NUM_CPU_DEVICES="1")
        for n in range(2)
    ]
    try:
        (first, error), (second, _) = (process.communicate(timeout=300) for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], error
    assert_same_curve(tmp_path, output)
    assert "held-out bits per byte" in first.splitlines()[-1]
    assert "held-out" not in second


# ---------------- how runs end


def error_of(call, *args):
    with pytest.raises(SystemExit) as caught:
        call(*args)
    assert isinstance(
        caught.value.code, str
    )  # sys.exit prints it on stderr and takes 1 as the exit code
    assert caught.value.code.startswith("error: ")
    assert "\n" not in caught.value.code
    return caught.value.code


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({}, "missing", "No such file"),
        ({}, "", "has no text"),
        ({"book": b"x" * 400}, "book", "20 bytes of held-out text, fewer than the 33"),
    ],
)
def test_unusable_corpus(lm, tmp_path, files, source, message):
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    with flagsaver.flagsaver(
        **TINY, corpus=str(tmp_path / source), output_dir=str(tmp_path / "output")
    ):
        assert message in error_of(lm.main, ["train_byte_lm.py"])
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--heads=3", "embedding_dim must be a multiple of heads"),
        ("--qk_dim_factor=nan", "qk_dim_factor"),
        ("--steps=-1", "steps"),
        ("--chunk_size=48", "power of two"),
        ("--dtype=float16", "dtype"),
        ("--mesh=data:0", "mesh"),
        ("--mesh=data:3", "batch_size must be a multiple of data in mesh"),
        ("--num_processes=2", "coordinator_address, num_processes and process_id belong together"),
        ("--no_such_flag", "no_such_flag"),
    ],
)
def test_impossible_flags(lm, argument, message):
    with flagsaver.flagsaver():
        assert message in error_of(lm.parse_flags, ["train_byte_lm.py", *argument.split()])


def test_mesh_of_more_devices_than_there_are(lm, text_folder, tmp_path):
    size = 2 * jax.device_count()
    with flagsaver.flagsaver(
        **TINY | dict(batch_size=size),
        corpus=str(text_folder),
        output_dir=str(tmp_path / "output"),
        mesh=f"data:{size}",
    ):
        message = error_of(lm.main, ["train_byte_lm.py"])
    assert f"--mesh=data:{size} has {size} devices, there are {size // 2}" in message
    assert not (tmp_path / "output").exists()


def test_triton_needs_a_gpu(lm):
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    with flagsaver.flagsaver(backend="triton"):
        assert "needs a GPU" in error_of(lm.main, ["train_byte_lm.py"])


@pytest.mark.slow
def test_loss_that_is_not_finite(lm, text_folder, tmp_path):
    with flagsaver.flagsaver(
        **TINY | dict(learning_rate=float("inf")), corpus=str(text_folder), output_dir=str(tmp_path)
    ):
        assert "the loss is nan by step 10" in error_of(lm.main, ["train_byte_lm.py"])
    assert read_log(tmp_path)[-1]["error"] == "the loss is nan by step 10"


def start(*arguments, **settings):
    settings |= dict(
        PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
        JAX_PLATFORMS="cpu",
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
    )
    command = [
        sys.executable,
        BENCHMARKS / "train_byte_lm.py",
        *(f"--{name}={x}" for name, x in TINY.items()),
        *arguments,
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | settings,
    )


@pytest.mark.slow
def test_killed_run_goes_on_along_the_curve(lm, text_folder, output, tmp_path):
    process = start(f"--corpus={text_folder}", f"--output_dir={tmp_path}", "--checkpoint_every=1")
    try:
        until = time.monotonic() + 120
        while not list(tmp_path.glob("checkpoints/[0-9]*")) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        process.kill()
    process.communicate()
    assert len(losses(tmp_path)) < len(losses(output))
    assert go_on(lm, text_folder, tmp_path) == 0
    assert curve(tmp_path) == curve(output)


@pytest.mark.slow
def test_interrupt(text_folder, tmp_path):
    process = start(
        f"--corpus={text_folder}",
        f"--output_dir={tmp_path}",
        "--steps=1000000",
        "--eval_every=1000000",
    )
    try:
        until = time.monotonic() + 120
        while (
            not ((tmp_path / "log.jsonl").exists() and losses(tmp_path))
            and time.monotonic() < until
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "interrupted after step" in stdout
    assert "held-out bits per byte: " in stdout.splitlines()[-1]
    assert read_log(tmp_path)[-2]["held_out_bits_per_byte"] > 0
    assert (tmp_path / "loss.png").exists()
    assert (tmp_path / "sample.txt").exists()
