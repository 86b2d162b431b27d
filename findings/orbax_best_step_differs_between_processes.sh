#!/usr/bin/env bash
# orbax-checkpoint 0.12.8: with best_fn, processes name other best steps, which may be deleted.
#
# Each process of a job calls CheckpointManager.save with its metrics. If they are those of its own
# part of the validation data, process 0 deletes checkpoints by its own metrics, and every other
# process keeps a list by its own: its best_step() and all_steps() name checkpoints that are no
# longer there, and leave out those that are. The documentation does not ask for equal metrics, and
# nothing compares them. Equal metrics, or a reload() before each question, are right.
#
# Seen (two processes, max_to_keep=2, losses 3, 1, 2, 4 in process 0 and 1, 3, 4, 2 in process 1):
#     on disk: steps 1 and 2
#     process 0: all_steps() [1, 2], best_step() 1; process 1: [0, 3], 0, of which none exists
#     process 1 after reload(): [1, 2]; equal metrics: [1, 2] and 1 in both
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 orbax-checkpoint==0.12.8
cd "$folder"
cat >main.py <<'EOF'
import json
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LOSSES = [3.0, 1.0, 2.0, 4.0], [1.0, 3.0, 4.0, 2.0]


def steps_of(name, losses):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.jit(lambda: jnp.ones(4), out_shardings=NamedSharding(mesh, P("data")))()
    folder = pathlib.Path(name).absolute()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, best_mode="min", best_fn=lambda metrics: metrics["loss"]
    )
    with ocp.CheckpointManager(folder, options=options) as manager:
        for step, loss in enumerate(losses):
            manager.save(step, args=ocp.args.StandardSave(dict(x=x)), metrics=dict(loss=loss))
            manager.wait_until_finished()
        sync_global_devices(name)
        seen = dict(all_steps=sorted(manager.all_steps()), best_step=manager.best_step())
        manager.reload()
        seen["reloaded"] = sorted(manager.all_steps())
    seen["disk"] = sorted(int(x.name) for x in folder.iterdir() if x.name.isdigit())
    return seen


def run_both():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{listener.getsockname()[1]}"
    start = [sys.executable, "-I", __file__, coordinator]
    ranks = [subprocess.Popen([*start, n], stdout=subprocess.DEVNULL) for n in "01"]
    try:
        if [rank.wait(timeout=300) for rank in ranks] != [0, 0]:
            raise SystemExit("a process has failed")
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(pathlib.Path(f"seen-{n}.json").read_text()) for n in "01"]


if len(sys.argv) == 1:
    first, second = run_both()
    print("process 0:", *first, "process 1:", *second, sep="\n")
    right = dict(all_steps=[1, 2], best_step=1, reloaded=[1, 2], disk=[1, 2])
    stale = dict(all_steps=[0, 3], best_step=0, reloaded=[1, 2], disk=[1, 2])
    if first != [right, right] or second != [stale, right]:
        raise SystemExit("the behaviour has changed")
else:
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    seen = [steps_of("own", LOSSES[int(sys.argv[2])]), steps_of("equal", LOSSES[0])]
    pathlib.Path(f"seen-{sys.argv[2]}.json").write_text(json.dumps(seen))
EOF
env -i PATH="$PATH" HOME="$folder" JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I main.py
