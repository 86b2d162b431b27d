#!/usr/bin/env bash
# transformers 5.24.0: xLSTMForCausalLM accepts an attention_mask and ignores it.
#
# A user who pads a batch of prompts on the left, as transformers' own generation asks for, expects
# the mask to keep the padding out. The recurrence reads the padding as tokens: the logits with a
# mask are those without one, and differ from the logits of the unpadded prompt. Nothing warns.
#
# Seen (torch 2.13.0, CPU), largest difference of the last logits:
#     padded with a mask, and padded without one: 0.0
#     padded with a mask, and not padded: 0.19, where the logits are of size 2.2
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
sizes = dict(vocab_size=64, hidden_size=128, num_blocks=1, num_heads=2, chunk_size=16)
model = xLSTMForCausalLM(xLSTMConfig(**sizes)).eval()
prompt = torch.arange(1, 9)[None]
padded = torch.cat([torch.ones_like(prompt), prompt], 1)
mask = torch.cat([torch.zeros_like(prompt), torch.ones_like(prompt)], 1)


def last(ids, **options):
    with torch.no_grad():
        return model(ids, use_cache=False, **options).logits[:, -1]


ignored = (last(padded, attention_mask=mask) - last(padded)).abs().max().item()
wrong = (last(padded, attention_mask=mask) - last(prompt)).abs().max().item()
print(f"mask or no mask: {ignored:.2g}; padded or not: {wrong:.2g}")
if ignored != 0 or wrong < 0.01:
    raise SystemExit("the behaviour has changed")
EOF
