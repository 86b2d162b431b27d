#!/usr/bin/env bash
# transformers 5.24.0: xLSTMConfig(num_blocks=2) is initialised and cached as 32 layers.
#
# num_blocks is documented as the number of blocks, or num_hidden_layers if it is None, and the
# model has that many. num_hidden_layers stays at its default of 32, without a check. New weights
# are scaled by 1 / num_hidden_layers, so out_proj and proj_down begin 16 times too small with 2
# blocks. The cache has num_hidden_layers states, so it takes 16 times the memory, and more than 32
# blocks fail with a KeyError. Passing num_hidden_layers alone, or both, is right.
#
# Seen (torch 2.13.0, CPU), standard deviations of out_proj and proj_down, states in the cache:
#     num_blocks=2: 2 blocks, 0.00556, 0.00319, 32 states
#     num_hidden_layers=2: 2 blocks, 0.0889, 0.051, 2 states
#     num_blocks=40: KeyError: 32
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


def model_of(**depth):
    torch.manual_seed(0)
    config = xLSTMConfig(vocab_size=64, hidden_size=128, num_heads=2, **depth)
    model = xLSTMForCausalLM(config).eval()
    with torch.no_grad():
        cache = model(torch.ones(1, 4, dtype=torch.long)).cache
    block = model.backbone.blocks[0]
    weights = block.mlstm_layer.out_proj.weight, block.ffn.proj_down.weight
    stds = [weight.std().item() for weight in weights]
    print(depth, len(model.backbone.blocks), *(f"{std:.3g}" for std in stds), len(cache.rnn_state))
    return len(model.backbone.blocks), stds, len(cache.rnn_state)


blocks, stds, states = model_of(num_blocks=2)
expected_blocks, expected_stds, expected_states = model_of(num_hidden_layers=2)
try:
    model_of(num_blocks=40)
    fails = False
except KeyError as error:
    print("num_blocks 40: KeyError:", error)
    fails = True
if expected_blocks != 2 or expected_states != 2:
    raise SystemExit("num_hidden_layers does not set the number of blocks")
ratios = [expected / std for expected, std in zip(expected_stds, stds)]
if blocks != 2 or states != 32 or min(ratios) < 10 or not fails:
    raise SystemExit("the behaviour has changed")
EOF
