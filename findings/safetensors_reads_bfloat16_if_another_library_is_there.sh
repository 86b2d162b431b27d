#!/usr/bin/env bash
# safetensors 0.8.0: whether NumPy can read a bfloat16 file depends on an unrelated import.
#
# safe_open(file, "np") fails on bfloat16 in a process that has not imported ml_dtypes, and succeeds
# once it has (or jax, which imports it): the reader of a checkpoint works in the trainer and fails
# in the tool beside it. load, of bytes, fails in both, even on what safetensors.flax.save has just
# written; float8, which ml_dtypes has too, is read by neither.
#
# Seen, of the same bfloat16 file:
#     safe_open without the import: TypeError: data type 'bfloat16' not understood
#     safe_open with the import: bfloat16
#     load: KeyError: 'BF16' in both
#     safe_open of float8_e4m3fn, with the import: AttributeError: module 'numpy' has no attribute
#         'float8_e4m3fn'
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
import json
import struct
import subprocess
import sys
from pathlib import Path

for dtype, size in (("BF16", 2), ("F8_E4M3", 1)):
    field = dict(dtype=dtype, shape=[2], data_offsets=[0, 2 * size])
    header = json.dumps(dict(w=field)).encode()
    data = b"\x80\x3f" * size
    Path(dtype).write_bytes(struct.pack("<Q", len(header)) + header + data)
READ = """
import sys
if sys.argv[1] == "ml_dtypes":
    import ml_dtypes
from safetensors import safe_open
from safetensors.numpy import load
try:
    if sys.argv[3] == "load":
        w = load(open(sys.argv[2], "rb").read())["w"]
    else:
        with safe_open(sys.argv[2], "np") as file:
            w = file.get_tensor("w")
    print(w.dtype.name)
except Exception as error:
    print(type(error).__name__ + ":", error)
"""


def outcome(*arguments):
    run = [sys.executable, "-I", "-c", READ, *arguments]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()


cases = {
    ("none", "BF16", "safe_open"): "TypeError",
    ("ml_dtypes", "BF16", "safe_open"): "bfloat16",
    ("none", "BF16", "load"): "KeyError",
    ("ml_dtypes", "BF16", "load"): "KeyError",
    ("ml_dtypes", "F8_E4M3", "safe_open"): "AttributeError",
}
changed = False
for case, expected in cases.items():
    text = outcome(*case)
    print(*case, "->", text)
    changed |= not text.startswith(expected)
if changed:
    raise SystemExit("the behaviour has changed")
EOF
