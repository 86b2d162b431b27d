#!/usr/bin/env bash
# transformers 5.24.0: xLSTM's cache has other head dimensions than the model if these are small.
#
# The layers have heads of hidden_size * qk_dim_factor / num_heads for queries and keys. The cache
# rounds hidden_size * qk_dim_factor, over all heads, up to a multiple of 64 and then divides it, so
# a small model (for tests, or of a few million parameters) runs without a cache and fails with
# one. use_cache is on by default, so its first call fails.
#
# Seen (torch 2.13.0, CPU), hidden_size 64 with 1 head and qk_dim_factor 0.5:
#     use_cache=False: logits
#     use_cache=True: ValueError: matC_old has wrong shape, got torch.Size([1, 1, 64, 64])
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

torch.manual_seed(0)
ids = torch.arange(1, 9)[None]


def outcome(hidden_size, use_cache):
    sizes = dict(vocab_size=64, hidden_size=hidden_size, num_blocks=1, num_heads=1, chunk_size=16)
    model = xLSTMForCausalLM(xLSTMConfig(**sizes)).eval()
    try:
        with torch.no_grad():
            model(ids, use_cache=use_cache)
        return "runs"
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


for case in ((128, False), (128, True), (64, False), (64, True)):
    print("hidden_size %d, use_cache %s:" % case, outcome(*case))
if outcome(128, True) != "runs" or outcome(64, False) != "runs":
    raise SystemExit("a call fails that ran")
if outcome(64, True) == "runs":
    raise SystemExit("the behaviour has changed")
EOF
