#!/usr/bin/env bash
# xlstm 2.0.6: xLSTMLarge in mode "train" runs only if it is also asked for its last states.
#
# mode="train" and return_last_states=False are the defaults of xLSTMLargeConfig. The layer unpacks
# two results of a kernel that returns one, so the default configuration (with kernels that a CPU
# has) cannot be called; nor can "train_with_padding", which refuses return_last_states=True.
#
# Seen (torch 2.13.0, mlstm_kernels 2.0.6, CPU):
#     train, False: ValueError: not enough values to unpack (expected 2, got 1)
#     train, True: logits and states
#     train_with_padding, False: the same ValueError
#     train_with_padding, True: ValueError: return_last_states=True is not supported
#     inference, False and True: logits; logits and states
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    torch==2.13.0 xlstm==2.0.6 mlstm_kernels==2.0.6 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -I - <<'EOF'
import torch
from xlstm.xlstm_large.model import xLSTMLarge, xLSTMLargeConfig

kernels = dict(
    chunkwise_kernel="chunkwise--native_autograd",
    sequence_kernel="native_sequence__native",
    step_kernel="native",
)
sizes = dict(embedding_dim=128, num_heads=2, num_blocks=1, vocab_size=64)


def outcome(mode, last):
    config = xLSTMLargeConfig(**sizes, **kernels, mode=mode, return_last_states=last)
    try:
        xLSTMLarge(config)(torch.arange(64)[None])
        return "runs"
    except ValueError as error:
        return f"ValueError: {error}"


default = xLSTMLargeConfig(**sizes)
seen = {}
for mode in ("train", "train_with_padding", "inference"):
    for last in (False, True):
        seen[mode, last] = outcome(mode, last)
        print(mode, last, seen[mode, last])
runs = [case for case, result in seen.items() if result == "runs"]
if runs != [("train", True), ("inference", False), ("inference", True)]:
    raise SystemExit("the behaviour has changed")
if (default.mode, default.return_last_states) != ("train", False):
    raise SystemExit("the defaults have changed")
EOF
