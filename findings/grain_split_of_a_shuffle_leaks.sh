#!/usr/bin/env bash
# grain 0.2.18: a training split of a shuffled data set reads the validation records from the second
# epoch on.
#
# shuffled[:8] and shuffled[8:] are disjoint. repeat() draws a new shuffle for each epoch, also for
# one in front of the slice, and cuts the slice out of the new one. So the first epoch is right, all
# records are trained on after a few, and the validation loss is one of records that were trained
# on. The documentation says that a slice contains only the elements with its indices, that repeat
# repeats the elements of the data set, and that it seeds shuffles anew; a user takes that for the
# order. A slice before the shuffle keeps the split, and so does repeat(reseed_each_epoch=False).
# It is issue 1200 of grain.
#
# Seen, ten records, shuffled, the first eight repeated three times:
#     shuffle, slice, repeat: the second epoch reads both validation records, the third one of them
#     slice, shuffle, repeat: no epoch reads any
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

shuffled = grain.MapDataset.range(10).shuffle(seed=0)
validation = {int(record) for record in shuffled[8:]}


def leaked(training, validation):  # per epoch
    records = [int(record) for record in training]
    return [sorted(validation & {*records[n : n + 8]}) for n in (0, 8, 16)]


split = leaked(shuffled[:8].repeat(3), validation)
same_order = leaked(shuffled[:8].repeat(3, reseed_each_epoch=False), validation)
cut_before = leaked(grain.MapDataset.range(10)[:8].shuffle(seed=0).repeat(3), {8, 9})
print(validation, split, same_order, cut_before)
if split[0] or not (split[1] and split[2]) or any(same_order + cut_before):
    raise SystemExit("the behaviour has changed")
EOF
