#!/usr/bin/env bash
# grain 0.2.18: with drop_remainder=False, one epoch over several shards leaves records out.
#
# ShardOptions(drop_remainder=False) says that the records which do not divide evenly are kept.
# IndexSampler gives 10 records to 3 shards as 4, 3 and 3, but ends each of them after 10 // 3, so
# the fourth record of the first shard is read in no process. With two epochs that shard reads
# 0, 1, 2, 3, 0, 1; with shuffle=True another record is left out.
#
# Seen (worker_count=0):
#     [0, 1, 2], [4, 5, 6], [7, 8, 9]: record 3 is missing. One shard reads all ten.
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
from grain.python import DataLoader, IndexSampler, ShardOptions


class Records:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return int(index)


def epoch(shards):
    loaders = []
    for shard in range(shards):
        options = ShardOptions(shard, shards, drop_remainder=False)
        sampler = IndexSampler(10, shard_options=options, num_epochs=1, seed=0)
        loaders.append(DataLoader(data_source=Records(), sampler=sampler, worker_count=0))
    return [list(loader) for loader in loaders]


print(epoch(1), epoch(3))
if epoch(1) != [list(range(10))] or epoch(3) != [[0, 1, 2], [4, 5, 6], [7, 8, 9]]:
    raise SystemExit("the behaviour has changed")
EOF
