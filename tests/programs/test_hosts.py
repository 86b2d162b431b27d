"""Two processes with two CPU devices each run the program of docs/hosts.md, the checkpoints of
docs/training.md, and the functions of the package that read values on the host.

As a script it is one of the processes, and runs one of its functions.
"""

import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
import traceback
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mlstm_pallas

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
SECONDS = 600  # 50 on two idle cores


def initialize():
    """As the page does."""
    numbers = int(os.environ["PROCESSES"]), int(os.environ["PROCESS"])
    jax.distributed.initialize(os.environ["COORDINATOR"], *numbers)
    return jax.make_mesh((jax.device_count(),), ("devices",), axis_types=(AxisType.Auto,))


def check_a_restore_in_other_processes(folder, restore):
    """It is refused in each process. The file has a state of one more process."""
    [path] = Path(folder).glob("*/loaders/metadata")
    states = json.loads(path.read_text())
    process_allgather(np.int32(0))
    if jax.process_index() == 0:
        path.write_text(json.dumps([*states, states[0]]))
    process_allgather(np.int32(0))
    with pytest.raises(ValueError, match="has the loaders of 3 processes"):
        restore()


def page():
    space = {}
    exec("\n".join(re.findall("```python\n(.*?)```", PAGE.read_text(), re.S)), space)
    from oracle import collectives

    x = types.SimpleNamespace(**space)
    index, first = jax.process_index(), x.batch(x.Loader())
    assert (jax.process_count(), jax.device_count()) == (2, 4)
    counts = collectives(x.step.lower(x.initial(), first).compile())
    assert counts.keys() == {"all-reduce"}
    counts = collectives(x.split.lower(x.x).compile())
    assert counts.keys() == {"all-reduce", "collective-permute"}

    rows = [np.random.default_rng(n).normal(size=(64, 2, 16)) for n in (0, 2, 1, 3)]
    rows = np.stack(rows).astype(np.float32)
    assert np.array_equal(process_allgather(first, tiled=True), rows)
    alone = x.step(jax.tree.map(np.asarray, x.initial()), rows)  # on one device
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, (x.weights, x.loss), alone)
    q = x.whole
    whole = mlstm_pallas.mlstm_chunkwise(q, q, q, q[..., 0], q[..., 1] + 3, layout="BTNH")
    close(process_allgather(x.h, tiled=True), whole, atol=1e-4)

    assert x.again.get_state() == dict(next_index=4 + index)
    for actual, expected in zip(*map(jax.tree.leaves, (x.restored, x.weights)), strict=True):
        assert actual.sharding == expected.sharding
        assert np.array_equal(actual, expected)
    check_a_restore_in_other_processes(x.folder, lambda: x.restore(x.folder, x.weights, x.Loader()))


def training():
    """The loaders' states are texts of different lengths."""
    initialize()
    import test_fsdp

    space = {}
    exec(test_fsdp.definitions(), space)
    x = types.SimpleNamespace(**space)
    folder, state = os.environ["CHECKPOINTS"], dict(next_index=10**4 ** jax.process_index())
    mesh, loader = x.fsdp_mesh((2, 2)), x.Loader()
    saved = jax.jit(x.initial, out_shardings=x.shardings_of(mesh))()
    loader.set_state(state)
    x.save(folder, saved, loader)
    other, loader = x.fsdp_mesh((1, 4)), x.Loader()
    restored = x.restore(folder, other, loader)
    assert loader.get_state() == state
    for actual, expected in zip(*map(jax.tree.leaves, (restored, saved)), strict=True):
        assert actual.sharding == x.sharding_of(other, actual)
        assert np.array_equal(*process_allgather((actual, expected), tiled=True))
    check_a_restore_in_other_processes(folder, lambda: x.restore(folder, mesh, loader))


def checks():
    """MLSTM_PALLAS_CHECKS=1: each process raises, eagerly, and under jit if the mesh is set."""
    os.environ["MLSTM_PALLAS_CHECKS"] = "1"
    mesh = initialize()
    rings(mesh)
    spread = functools.partial(global_array, mesh)
    x, gate = spread(np.ones((4, 32, 2, 16), np.float32)), spread(np.ones((4, 32, 2), np.float32))
    call = functools.partial(mlstm_pallas.mlstm_chunkwise, layout="BTNH")
    in_jit, right = jax.jit(call), np.int32([10, 32, 0, 20])

    def on_mesh(*arrays, **keywords):
        with jax.set_mesh(mesh):
            return in_jit(*arrays, **keywords)

    for run in call, on_mesh:
        h = run(x, x, x, gate, gate, sequence_lengths=spread(right))
        zero = np.all(process_allgather(h, tiled=True) == 0, axis=(2, 3))
        assert np.array_equal(zero, np.arange(32) >= right[:, None])
        for wrong in (0, 3):  # of each process
            lengths = right.copy()
            lengths[wrong] = 33
            text = ""
            try:
                h = run(x, x, x, gate, gate, sequence_lengths=spread(lengths))
                jax.block_until_ready(h)
                jax.effects_barrier()
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                text = str(error)
            assert f"sequence_lengths[{wrong}] is 33, expected 0 to S = 32" in text
    # At its end jax raises the error once more, and the processes would not end as usual. Process 0
    # is the last one, because others end with it.
    process_allgather(np.int32(0))
    sys.stdout.flush()
    time.sleep(5 * (jax.process_index() == 0))
    os._exit(0)


def rings(mesh):
    """States of all processes become rings of all processes, eagerly and under jit."""
    spread = functools.partial(global_array, mesh)
    states = [spread(np.ones((4, 2, 16, 16)[:n], np.float32)) for n in (4, 3, 2)]
    q, gate = spread(np.ones((4, 2, 16), np.float32)), spread(np.ones((4, 2), np.float32))
    expected = mlstm_pallas.mlstm_recurrent_step(q, q, q, gate, gate, *states)[0]
    make = functools.partial(mlstm_pallas.mlstm_ring_states, dtype="float32")
    for run in make, jax.jit(make):
        made = run(*states)
        for x in jax.tree.leaves(made):
            assert x.sharding.device_set == states[0].sharding.device_set
        h = jax.jit(mlstm_pallas.mlstm_ring_step)(q, q, q, gate, gate, made)[0]
        both = process_allgather((h, expected), tiled=True)
        np.testing.assert_allclose(*both, rtol=1e-5)


def global_array(mesh, x):
    """Split by its first axis; each process adds its part."""
    part = np.split(x, jax.process_count())[jax.process_index()]
    sharding = NamedSharding(mesh, P("devices"))
    return jax.make_array_from_process_local_data(sharding, part, x.shape)


@pytest.mark.slow
@pytest.mark.parametrize("run", [page, training, checks])
def test_two_processes(run, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = dict(
        PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
        JAX_PLATFORMS="cpu",
        JAX_NUM_CPU_DEVICES="2",
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
        COORDINATOR=address,
        PROCESSES="2",
        CHECKPOINTS=str(tmp_path / "checkpoints"),
        no_proxy="127.0.0.1",
    )
    texts, processes = [tmp_path / f"{n}.txt" for n in range(2)], []
    try:
        for n, path in enumerate(texts):
            with path.open("w") as file:
                process = subprocess.Popen(
                    [sys.executable, __file__, run.__name__],
                    env=os.environ | settings | dict(PROCESS=str(n)),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            processes.append(process)
        end = time.monotonic() + SECONDS
        while {None} <= {x.poll() for x in processes} <= {None, 0} and time.monotonic() < end:
            time.sleep(0.1)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join(path.read_text()[-4000:] for path in texts)


if __name__ == "__main__":
    try:
        {x.__name__: x for x in (page, training, checks)}[sys.argv[1]]()
    except BaseException:  # the other process waits for one that ends as usual
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
