#!/usr/bin/env bash
# jax 0.10.2 and 0.12.0.1: process_allgather and broadcast_one_to_all drop half of 64-bit numbers.
#
# multihost_utils exchanges numbers between the processes of a job and says that it returns NumPy
# arrays. With several processes the numbers travel as jax arrays, which have 32 bits unless
# jax_enable_x64 is set: of a count of five billion tokens, a seed or a file offset the lower 32
# bits arrive in every process, without a warning. assert_equal compares what has travelled with
# what has not, so it raises for an equal 0.1 in both processes and prints two equal numbers. With
# one process the first two return the number itself, so a test in one process passes.
#
# Seen (both processes pass the same number):
#     5_000_000_000: process_allgather 705032704, broadcast_one_to_all 705032704
#     assert_equal(0.1): AssertionError: . Expected: [0.1 0.1]; got: 0.1.
#     one process, or two with jax_enable_x64: 5_000_000_000 twice, assert_equal passes
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
from jax.experimental import multihost_utils

TOKENS = 5_000_000_000


def exchange():
    try:
        multihost_utils.assert_equal(0.1)
        text = "passes"
    except AssertionError as error:
        text = str(error)
    gathered = multihost_utils.process_allgather(TOKENS).tolist()
    return gathered, int(multihost_utils.broadcast_one_to_all(TOKENS)), text


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
    print("one process:", exchange(), "two processes:", first, sep="\n")
    modulo = [[TOKENS % 2**32] * 2, TOKENS % 2**32, ". Expected: [0.1 0.1]; got: 0.1."]
    whole = [[TOKENS] * 2, TOKENS, "passes"]
    if exchange() != ([TOKENS], TOKENS, "passes") or not first == second == [modulo, whole]:
        raise SystemExit("the behaviour has changed")
else:
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    seen = [exchange()]
    jax.config.update("jax_enable_x64", True)
    seen.append(exchange())
    pathlib.Path(f"seen-{sys.argv[2]}.json").write_text(json.dumps(seen))
EOF
env -i PATH="$PATH" HOME="$folder" JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I main.py
