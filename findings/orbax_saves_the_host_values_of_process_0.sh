#!/usr/bin/env bash
# orbax-checkpoint 0.12.8: JSON, NumPy arrays and the random state of process 1 are not saved.
#
# In a job of several processes each one calls CheckpointManager.save with its own items, and save
# returns True in all of them. Sharded jax arrays are written by all processes, everything else by
# process 0 alone. After a restart all processes have its values: a loader whose state is the index
# of its next row reads the rows of process 0 in each of them, and random numbers are those of
# process 0. Items under names with jax.process_index() do not help: those of process 1 are not in
# the checkpoint, and nothing says so. (Restoring them is not done here: process 1 raises a
# KeyError, and process 0 waits for it.)
#
# Seen (two processes; next_index is 3 and 4, NumPy's seed is 0 and 1, rows are 0, 1 and 10, 11):
#     restored in both: next_index 3, the random state of seed 0, rows 0 and 1
#     items of the checkpoint: loader, loader_0, random, tree; no loader_1
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
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def save_and_restore(rank):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    whole = np.arange(4, dtype=np.float32)
    x = jax.make_array_from_callback((4,), NamedSharding(mesh, P("data")), lambda i: whole[i])
    np.random.seed(rank)
    state = ocp.args.JsonSave(dict(next_index=3 + rank))
    items = dict(
        tree=ocp.args.StandardSave(dict(x=x, rows=np.arange(2) + 10 * rank)),
        random=ocp.args.NumpyRandomKeySave(np.random.get_state()),
        loader=state,
    )
    items[f"loader_{rank}"] = state
    like = dict(
        tree=ocp.args.StandardRestore(dict(x=x, rows=np.zeros(2, int))),
        random=ocp.args.NumpyRandomKeyRestore(),
        loader=ocp.args.JsonRestore(),
    )
    with ocp.CheckpointManager(pathlib.Path("checkpoints").absolute()) as manager:
        saved = manager.save(1, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
        restored = manager.restore(1, args=ocp.args.Composite(**like))
    np.random.set_state(restored.random)
    return dict(
        saved=saved,
        loader=restored.loader,
        rows=restored.tree["rows"].tolist(),
        random=np.random.rand(),
    )


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
    seen = run_both()
    items = sorted(x.name for x in pathlib.Path("checkpoints/1").iterdir() if x.is_dir())
    print(*seen, items, sep="\n")
    draw = np.random.RandomState(0).rand()
    of_process_0 = dict(saved=True, loader=dict(next_index=3), rows=[0, 1], random=draw)
    if seen != [of_process_0] * 2 or items != ["loader", "loader_0", "random", "tree"]:
        raise SystemExit("the behaviour has changed")
else:
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    seen = save_and_restore(int(sys.argv[2]))
    pathlib.Path(f"seen-{sys.argv[2]}.json").write_text(json.dumps(seen))
EOF
env -i PATH="$PATH" HOME="$folder" JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I main.py
