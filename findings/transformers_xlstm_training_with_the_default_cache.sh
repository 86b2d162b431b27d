#!/usr/bin/env bash
# transformers 5.24.0: the loss of an xLSTM in training mode has no gradient with default options.
#
# model.train() and model(ids, labels=ids).loss.backward() is how every causal model of the library
# is trained. xLSTM's use_cache stays on in training mode; the states of the cache are then
# overwritten in place, and the backward pass is refused. use_cache=False mends it.
#
# Seen (torch 2.13.0, CPU):
#     default: RuntimeError: one of the variables needed for gradient computation has been modified
#         by an inplace operation
#     use_cache=False: every parameter has a gradient
# Upstream: huggingface/transformers#47013, with a pull request, #47046 (open in November 2026).
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    torch==2.13.0 transformers==5.24.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -I - <<'EOF'
import torch
from transformers import xLSTMConfig, xLSTMForCausalLM


def outcome(**options):
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=128, num_blocks=1, num_heads=2, chunk_size=16)
    model = xLSTMForCausalLM(xLSTMConfig(**sizes)).train()
    ids = torch.arange(32)[None]
    loss = model(ids, labels=ids, **options).loss
    try:
        loss.backward()
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "gradients" if all(p.grad is not None for p in model.parameters()) else "some"


default, without = outcome(), outcome(use_cache=False)
print("default:", default[:120])
print("use_cache=False:", without)
if "inplace operation" not in default or without != "gradients":
    raise SystemExit("the behaviour has changed")
EOF
