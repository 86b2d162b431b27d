#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1: in all processes but the first one, a pure_callback's result is zeros.
#
# In a jitted function of arrays that span processes, jax calls the host function of a pure_callback
# or an io_callback once, for device 0, which belongs to process 0. If the jitted function returns
# what the host has computed, device 0 alone has it. The array says that it is fully replicated,
# so np.asarray and float read the zeros of another device in every other process: a reward or a
# loss from the host is 0 there, without an error. With out_shardings the result reaches all
# devices. In a shard_map the host function runs for each device.
#
# Seen (two processes with two devices each, sum of 0 to 7 on the host, which is 28):
#     process 0: 28.0, calls 1, shards 28.0 and 0.0; process 1: 0.0, calls 0, shards 0.0 and 0.0
#     is_fully_replicated: True in both; with out_shardings of PartitionSpec(): 28.0 in both
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
cat >main.py <<'EOF'
import json
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def outcome(callback, replicated):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    whole = np.arange(8, dtype=np.float32)
    x = jax.make_array_from_callback((8,), NamedSharding(mesh, P("data")), lambda i: whole[i])
    calls = []

    def host(x):
        calls.append(x)
        return np.asarray(x).sum()

    def reward(x):
        return callback(host, jax.ShapeDtypeStruct((), jnp.float32), x)

    shardings = dict(out_shardings=NamedSharding(mesh, P())) if replicated else {}
    y = jax.jit(reward, **shardings)(x)
    shards = [float(shard.data) for shard in y.addressable_shards]
    return [float(y), len(calls), shards, y.is_fully_replicated]


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
    lost = [[28.0, 1, [28.0, 0.0], True], [0.0, 0, [0.0, 0.0], True]]
    right = [[28.0, 1, [28.0, 28.0], True], [28.0, 0, [28.0, 28.0], True]]
    if [list(x) for x in zip(first, second, strict=True)] != [lost, right] * 2:
        raise SystemExit("the behaviour has changed")
else:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    seen = [outcome(call, all_) for call in (jax.pure_callback, io_callback) for all_ in (0, 1)]
    pathlib.Path(f"seen-{sys.argv[2]}.json").write_text(json.dumps(seen))
EOF
env -i PATH="$PATH" HOME="$folder" JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I main.py
