#!/usr/bin/env bash
# grain 0.2.18: each worker reads all of a memory-mapped corpus, and keeps two copies of it.
#
# An np.memmap is the usual source of token rows, because a program reads only the rows that it
# asks for. mp_prefetch and DataLoader pickle the source for each worker, and the pickle of a memory
# map has its contents instead of its path. A worker starts when it has received all of them, and a
# corpus of 100 GB takes 200 GB of memory per worker. The documentation asks that a source can be
# pickled, which a memory map can. Use a class that keeps the path and opens the map in the worker.
#
# Seen (numpy 2.4.6, Linux), private memory of a worker for a corpus of 200 MiB, in MiB:
#     np.memmap 482, pickled 200; a class with the path 82, pickled 0
#
# Needs Linux and Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this
# is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 grain==0.2.18 \
    cloudpickle==3.1.3 absl-py==2.5.1
cd "$folder"
cat > main.py <<'EOF'  # a file, because workers import the main module
from pathlib import Path

import cloudpickle
import grain
import numpy as np
from absl import flags

SHAPE = (100 * 1024, 1024)


class Rows:
    def __init__(self, path):
        self.path, self.rows = path, None

    def __len__(self):
        return SHAPE[0]

    def __getitem__(self, index):
        if self.rows is None:
            self.rows = np.memmap(self.path, np.uint16, "r", shape=SHAPE)
        return self.rows[index]


def private_memory(row):
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1024


def measured(source):
    rows = grain.MapDataset.source(source)
    options = grain.MultiprocessingOptions(num_workers=1)
    worker = iter(rows.map(private_memory).to_iter_dataset().mp_prefetch(options))
    seen = len(cloudpickle.dumps(rows)) / 1024**2, [next(worker) for _ in range(1000)][-1]
    worker.close()
    print(type(source).__name__, *(f"{size:.0f} MiB" for size in seen))
    return seen


if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()  # without it, grain 0.2.18 refuses workers
    memory_map = np.memmap("tokens", np.uint16, "w+", shape=SHAPE)
    pickled, mapped = measured(memory_map)
    small, opened = measured(Rows("tokens"))
    if pickled < 200 or small > 1 or mapped - opened < 300:
        raise SystemExit("the behaviour has changed")
EOF
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" main.py
