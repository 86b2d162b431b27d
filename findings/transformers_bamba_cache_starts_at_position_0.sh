#!/usr/bin/env bash
# transformers 5.24.0: a call of Bamba with a cache gives its tokens positions from zero on.
#
# Without position_ids, models of this library count positions from the length of their cache. Bamba
# counts from zero in each call: the Mamba-2 layers continue, and the attention layers rotate new
# queries and keys by positions that the first tokens have. A prompt that is read in pieces,
# documents behind a shared prefix, and a decoding loop that calls the model get other logits,
# without a message. generate passes position_ids, which are optional in forward. Pass them with a
# cache: position_ids=torch.arange(past, past + tokens.shape[1])[None].
#
# Seen (CPU, torch 2.13.0), 32 tokens, then 16 with the cache: the largest error of their logits, in
# standard deviations, and how many of the likeliest tokens differ
#     16 at once 0.79, 14%; one by one 1.7, 25%
#     with position_ids 2e-06, 0%; Falcon-H1 without them 4e-06, 0%
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
"$folder/venv/bin/python" -I - <<'EOF' 2>log || { cat log; exit 1; }
import torch
from transformers import BambaConfig, BambaForCausalLM, FalconH1Config, FalconH1ForCausalLM

torch.set_grad_enabled(False)
sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=4, intermediate_size=64)
heads = dict(num_attention_heads=4, num_key_value_heads=2, mamba_n_heads=8, mamba_d_head=8)
groups = dict(mamba_n_groups=2, mamba_d_state=16)
bamba = BambaConfig(**sizes, **heads, **groups, attn_layer_indices=[1, 3])
falcon = FalconH1Config(**sizes, **heads, **groups, mamba_d_ssm=64, head_dim=8)


def model_of(kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.normal_(0, 0.2)
    return model


def difference(model, size, positions=False):
    """The error of 16 logits after 32 tokens, in calls of this size, and the tokens that differ."""
    tokens = torch.randint(3, 64, (8, 48), generator=torch.Generator().manual_seed(1))
    expected = model(tokens, use_cache=False).logits[:, 32:]
    cache = model(tokens[:, :32], use_cache=True).cache
    pieces = []
    for start in range(32, 48, size):
        options = dict(cache=cache, use_cache=True)
        if positions:
            options["position_ids"] = torch.arange(start, start + size)[None]
        pieces.append(model(tokens[:, start : start + size], **options).logits)
    logits = torch.cat(pieces, dim=1)
    error = ((logits - expected).abs().max() / expected.std()).item()
    return error, (logits.argmax(-1) != expected.argmax(-1)).float().mean().item()


model = model_of(BambaForCausalLM, bamba)
seen = difference(model, 16), difference(model, 1)
correct = difference(model, 16, True), difference(model, 1, True)
other = difference(model_of(FalconH1ForCausalLM, falcon), 1)
print("Bamba, 16 at once and one by one:", *(f"{error:.2g}, {n:.0%};" for error, n in seen))
print("with position_ids:", *(f"{error:.1g}" for error, _ in correct), f"Falcon-H1: {other[0]:.1g}")
if max(error for error, _ in (*correct, other)) > 1e-4:
    raise SystemExit("position_ids do not help, or Falcon-H1 has the same error")
if min(error for error, _ in seen) < 0.1:
    raise SystemExit("the behaviour has changed")
EOF
