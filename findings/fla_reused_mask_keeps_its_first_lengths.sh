#!/usr/bin/env bash
# flash-linear-attention 0.6.0: a mask or cu_seqlens that is written in place keeps the lengths of
# its first batch.
#
# The helpers for padded and packed sequences, which layers and operations call, remember their
# last four results, and recognize an argument by its object, not by its contents. With a buffer
# that is reused for each batch, as for CUDA graphs or pinned memory, all batches are unpadded and
# split like the first one: tokens are left out, padding is read, and documents run into each other.
# The docstrings of the layers and helpers do not say so. Pass a new tensor for each batch
# (mask.clone()), or set FLA_DISABLE_TENSOR_CACHE=1 before the import.
#
# Seen (torch 2.13.0, CPU), a mask for 8 and 3 tokens, and then for 2 and 6:
#     cu_seqlens [0, 8, 11], and again [0, 8, 11]; of a copy [0, 2, 8]
#     3 of 8 tokens left out, 6 of padding read
#     position_ids of cu_seqlens [0, 5, 8], which were [0, 2, 8]: 0 1 0 1 2 3 4 5
#     with FLA_DISABLE_TENSOR_CACHE=1: none of this
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    flash-linear-attention==0.6.0 fla-core==0.6.0 torch==2.13.0 triton==3.7.1 \
    transformers==5.24.0 einops==0.8.2 numpy==2.4.6
cd "$folder"
cat >batches.py <<'EOF'
import sys

import torch
from fla.layers.utils import repad_hidden_states, unpad_hidden_states
from fla.ops.utils import prepare_position_ids

x = torch.arange(1, 17.0).view(2, 8, 1)
mask = torch.zeros(2, 8, dtype=torch.bool)


def unpadded(mask):
    packed, indices, cu_seqlens = unpad_hidden_states(x, None, mask, 8)
    read = repad_hidden_states(packed, indices, 2, 8)[..., 0] != 0
    return cu_seqlens.tolist(), int((mask & ~read).sum()), int((read & ~mask).sum())


seen = []
for lengths in ((8, 3), (2, 6)):
    mask.copy_(torch.arange(8) < torch.tensor(lengths)[:, None])
    seen.append(unpadded(mask))
print("in place:", *seen, "a copy:", unpadded(mask.clone()))
cu_seqlens = torch.tensor([0, 2, 8])
prepare_position_ids(cu_seqlens)
cu_seqlens.copy_(torch.tensor([0, 5, 8]))
positions = prepare_position_ids(cu_seqlens).tolist()
print("positions:", positions)
first, second = ([0, 8, 11], 0, 0), ([0, 2, 8], 0, 0)
assert seen[0] == first
assert unpadded(mask.clone()) == second
if sys.argv[1] == "cached":
    same = seen[1] == ([0, 8, 11], 3, 6) and positions == [0, 1, 0, 1, 2, 3, 4, 5]
else:
    same = seen[1] == second and positions == [0, 1, 2, 3, 4, 0, 1, 2]
if not same:
    raise SystemExit("the behaviour has changed")
EOF
"$folder/venv/bin/python" -I -W ignore batches.py cached
FLA_DISABLE_TENSOR_CACHE=1 "$folder/venv/bin/python" -I -W ignore batches.py uncached
