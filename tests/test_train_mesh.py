"""train_byte_lm.py on several devices and in several processes: the same curve as on one device."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FLAGS = dict(layers=1, embedding_dim=16, heads=4, seq_len=32, batch_size=4, steps=50, eval_every=50, eval_batches=1, sample_length=4)
FLAGS |= dict(learning_rate=2e-2, warmup_steps=10)
# Each argument is a mesh, or several with > between them: the run on the first is ended half-way and goes on with the next one.
PROGRAM = """
import sys
from absl import flags
from absl.testing import flagsaver
import train_byte_lm as lm
flags.FLAGS(["", *sys.argv[1].split()])
never = lm.asked_to_end
for case in sys.argv[2:]:
    for mesh in case.split(">"):
        lm.asked_to_end = lambda stop, deadline, step: step == 25 and not case.endswith(mesh)
        with flagsaver.flagsaver(mesh=mesh, output_dir=f"{flags.FLAGS.output_dir}/{case}"):
            print(lm.main([""]))
"""
MESHES = ["data:4,tensor:2", "data:2,tensor:4"]


def environment(devices):
    paths = [str(BENCHMARKS), *filter(None, sys.path)]
    settings = dict(
        JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(devices), JAX_DISABLE_MOST_OPTIMIZATIONS="1", PYTHONPATH=os.pathsep.join(paths)
    )
    return os.environ | settings


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text"
    text.write_bytes(bytes(range(97, 123)) * 400)
    return [f"--{name}={x}" for name, x in FLAGS.items()] + [f"--corpus={text}"]


@pytest.fixture(scope="module")
def output(arguments, tmp_path_factory):
    """A folder with the output folders of one device and of all meshes, run by one process with eight devices."""
    folder = tmp_path_factory.mktemp("output")
    flags = " ".join([*arguments, f"--output_dir={folder}"])
    command = [sys.executable, "-W", "error", "-c", PROGRAM, flags, "", *MESHES, ">".join(MESHES)]
    process = subprocess.run(command, env=environment(8), capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return folder


def curves(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [[line[name] for line in lines if name in line] for name in ("loss", "held_out_bits_per_byte")]


def assert_same_curve(folder, single):
    for curve, expected in zip(curves(folder), curves(single), strict=True):
        np.testing.assert_allclose(curve, expected, rtol=1e-3)  # what the training job promises after 50 steps


@pytest.mark.slow
def test_single_device_learns(output):
    losses, [_] = curves(output)
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_has_the_curve_of_a_single_device(output, mesh):
    assert_same_curve(output / mesh, output)


@pytest.mark.slow
def test_checkpoint_goes_on_with_another_mesh(output):
    assert_same_curve(output / ">".join(MESHES), output)
    assert sorted(path.name for path in (output / ">".join(MESHES) / "checkpoints").iterdir()) == ["25", "50"]


@pytest.mark.slow
def test_processes_have_the_curve_of_a_single_device(output, arguments, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    common = [*arguments, f"--output_dir={tmp_path}", "--mesh=data:2,tensor:2", f"--coordinator_address={address}", "--num_processes=2"]
    command = [sys.executable, "-W", "error", BENCHMARKS / "train_byte_lm.py", *common]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(2))
    processes = [subprocess.Popen([*command, f"--process_id={n}"], **pipes) for n in range(2)]
    try:
        (first, error), (second, _) = (process.communicate(timeout=300) for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], error
    assert_same_curve(tmp_path, output)
    assert "held-out bits per byte" in first.splitlines()[-1]
    assert "held-out" not in second
