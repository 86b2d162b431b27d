#!/usr/bin/env bash
# jax 0.10.2: one_hot of uint8 has two ones if there are more than 256 classes.
#
# The documentation says that the element at the index is set to one. The classes are counted in the
# dtype of the indices, so class 256 is 0 again, and byte 0 is in both. A byte-level model has 256
# bytes and a few special tokens: as labels, its first bytes also train the special tokens, and as
# inputs, they add the embeddings of these. The same happens to int8, and to uint16 with more than
# 65,536 classes. Cast the indices to int32 first. Indexing a table with uint8 is right, and so are
# the losses of optax with integer labels.
#
# Seen (CPU; also jax 0.12.0.1), the places of ones with 259 classes:
#     uint8 [0 2 3]: 0 and 256, 2 and 258, 3
#     int32 [0 2 3]: 0, 2, 3
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
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import jax
import numpy as np

seen = {}
for dtype in (np.uint8, np.int32):
    rows = jax.nn.one_hot(np.array([0, 2, 3], dtype), 259)
    seen[dtype.__name__] = [np.flatnonzero(row).tolist() for row in rows]
wide = jax.nn.one_hot(np.array([1], np.uint16), 70_000)
seen["uint16"] = np.flatnonzero(wide[0]).tolist()
print(seen)
if seen["int32"] != [[0], [2], [3]]:
    raise SystemExit("one_hot of int32 is not right, either")
if seen["uint8"] != [[0, 256], [2, 258], [3]] or seen["uint16"] != [1, 65537]:
    raise SystemExit("the behaviour has changed")
EOF
