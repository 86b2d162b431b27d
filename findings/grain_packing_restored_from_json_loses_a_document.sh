#!/usr/bin/env bash
# grain 0.2.18: ConcatThenSplitIterDataset, restored by grain's own checkpoint handler, leaves a
# document out and shifts all rows behind it, in silence.
#
# The state of the iterator says by the tuple (-1, -1) that no document is left over from the last
# row. CheckpointSave writes the state as JSON, which makes a list of the tuple. The restored
# iterator compares it with the tuple, takes the next document for a remainder, and cuts it to
# [-1:-1], which is empty. It happens in the first row, and behind each row that ends with a
# document: always, if the lengths divide that of the row. set_state(get_state()) without JSON is
# right, and so is FirstFitPackIterDataset.
#
# Seen (orbax-checkpoint 0.12.8), documents 1 to 6 of 4 tokens in rows of 8, saved after one row:
#     without a restart: 3 3 3 3 4 4 4 4, 5 5 5 5 6 6 6 6
#     restored: 4 4 4 4 5 5 5 5, 6 6 6 6 0 0 0 0: document 3 is missing
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 grain==0.2.18 \
    orbax-checkpoint==0.12.8
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import tempfile

import grain
import numpy as np
import orbax.checkpoint as ocp
from grain.checkpoint import CheckpointRestore, CheckpointSave
from grain.experimental import ConcatThenSplitIterDataset, FirstFitPackIterDataset

documents = [dict(tokens=np.full(4, number)) for number in range(1, 7)]
numbers = grain.MapDataset.source(documents).to_iter_dataset()
packed = {
    "concat": ConcatThenSplitIterDataset(numbers, length_struct=dict(tokens=8)),
    "first fit": FirstFitPackIterDataset(numbers, length_struct=dict(tokens=8), num_packing_bins=1),
}


def rest(iterator):  # the documents of each row
    return [row["tokens"][::4].tolist() for row in iterator]


seen = {}
for name, dataset in packed.items():
    iterator, copy, restored = iter(dataset), iter(dataset), iter(dataset)
    next(iterator)
    copy.set_state(iterator.get_state())
    with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=CheckpointSave(iterator))
        manager.wait_until_finished()
        manager.restore(1, args=CheckpointRestore(restored))
    seen[name] = rest(iterator), rest(copy), rest(restored)
    print(name, *seen[name], sep="; ")
right, wrong = [[3, 4], [5, 6]], [[4, 5], [6, 0]]
if seen != {"concat": (right, right, wrong), "first fit": (right, right, right)}:
    raise SystemExit("the behaviour has changed")
EOF
