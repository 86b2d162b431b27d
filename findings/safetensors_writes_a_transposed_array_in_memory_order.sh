#!/usr/bin/env bash
# safetensors 0.8.0: safetensors.numpy writes w.T with the shape of w.T and the numbers of w.
#
# Weights are transposed on their way between PyTorch and JAX, and w.T in NumPy is a view. save and
# save_file write the memory as it lies, so the file has the right name, shape and dtype and the
# wrong numbers; a step of a slice and np.asfortranarray do the same. safetensors.torch refuses such
# tensors. np.ascontiguousarray mends it.
#
# Seen: [[0, 3], [1, 4], [2, 5]] is read back as [[0, 1], [2, 3], [4, 5]]
# Upstream: safetensors/safetensors#825 (open in November 2026; 0.7.0 is right).
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    safetensors==0.8.0 numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
"$folder/venv/bin/python" -I - <<'EOF'
import numpy as np
from safetensors.numpy import load, save

w = np.arange(6.0).reshape(2, 3)
read = load(save(dict(w=w.T)))["w"]
contiguous = load(save(dict(w=np.ascontiguousarray(w.T))))["w"]
print(w.T.tolist(), "->", read.tolist())
if (contiguous != w.T).any():
    raise SystemExit("a contiguous array is wrong, too")
if read.shape != (3, 2) or (read != w.reshape(3, 2)).any():
    raise SystemExit("the behaviour has changed")
EOF
