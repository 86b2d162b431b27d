#!/usr/bin/env bash
# grain 0.2.18: one epoch of WindowShuffleMapDataset reads some records twice and others never.
#
# The documentation promises a one-to-one mapping of indices within a window. The last window of an
# epoch is as long as the others, so it reaches into the next epoch, and an index behind the end
# wraps around to a record at the start. A window longer than the data set does so for most of its
# records. The length is right, and there is no warning. shuffle() and WindowShuffleIterDataset read
# each record once.
#
# Seen, ten records, one epoch, seed 0:
#     window of 4: 1 twice, 9 never
#     window of 100: 9 four times, and four records never
#     window of 5, which divides 10: each record once
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 grain==0.2.18
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import grain
from grain.experimental import WindowShuffleIterDataset, WindowShuffleMapDataset

records = grain.MapDataset.range(10)
read = {}
for window in (4, 5, 100):
    shuffled = WindowShuffleMapDataset(records, window_size=window, seed=0)
    read[window] = [int(record) for record in shuffled]
    print(window, read[window], "never:", {*range(10)} - {*read[window]})
streams = records.to_iter_dataset()
once = [records.shuffle(seed=0), WindowShuffleIterDataset(streams, window_size=4, seed=0)]
others_read_all = all(sorted(map(int, dataset)) == [*range(10)] for dataset in (*once, read[5]))
as_seen = sorted(read[4]) == [0, 1, 1, 2, 3, 4, 5, 6, 7, 8] and len({*read[100]}) == 6
if not as_seen or not others_read_all:
    raise SystemExit("the behaviour has changed")
EOF
