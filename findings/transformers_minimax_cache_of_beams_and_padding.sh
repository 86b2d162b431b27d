#!/usr/bin/env bash
# transformers 5.24.0: beam search of MiniMax follows the wrong states, and padded prompts continue
# with other text if its first layer is linear.
#
# MiniMaxCache keeps the states of linear attention beside the layers of the cache that generate
# knows. Beam search reorders these layers only, so after the first change of beams each one goes on
# from the linear states of another. The length of the cache is that of its first layer, which is 0
# if that layer is linear, as in MiniMax-Text-01. generate then builds the mask of each step from
# the wrong length, and rows with padding attend to the wrong tokens; a direct call with the cache
# starts at position 0 again. Nothing fails. Pass use_cache=False for beams and padded batches.
#
# Seen (CPU, torch 2.13.0), how many of 16 texts are the same with and without a cache, four layers:
#     first layer linear: greedy 16, greedy with padding in 8 of 16 prompts 8, four beams 1
#     first layer attention: greedy 16, greedy with padding 16, four beams 1
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
from transformers import MiniMaxConfig, MiniMaxForCausalLM

torch.set_grad_enabled(False)


def model_of(*layer_types):
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, head_dim=8, block_size=8)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    experts = dict(num_local_experts=2, num_experts_per_tok=1)
    layers = dict(num_hidden_layers=len(layer_types), layer_types=list(layer_types))
    model = MiniMaxForCausalLM(MiniMaxConfig(**sizes, **heads, **experts, **layers)).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(0, 0.15)
    return model


def equal_texts(model, padding=0, **options):
    """How many of 16 texts do not depend on the cache; every other prompt has padding."""
    equal = 0
    for number in range(8):
        torch.manual_seed(number)
        prompts = torch.randint(3, 64, (2, 10))
        mask = torch.ones_like(prompts)
        prompts[0, :padding] = mask[0, :padding] = 0
        options.update(attention_mask=mask, pad_token_id=0, eos_token_id=None)
        options.update(max_new_tokens=12, do_sample=False)
        with_cache = model.generate(prompts, **options)
        equal += (with_cache == model.generate(prompts, use_cache=False, **options)).all(1).sum()
    return int(equal)


def counts(*layer_types):
    model = model_of(*layer_types)
    seen = equal_texts(model), equal_texts(model, padding=4), equal_texts(model, num_beams=4)
    print(layer_types[0], "first: greedy, padded, beams", seen)
    return seen


linear, attention = "linear_attention", "full_attention"
linear_first = counts(linear, linear, linear, attention)
attention_first = counts(attention, linear, attention, linear)
if linear_first[0] != 16 or attention_first[:2] != (16, 16):
    raise SystemExit("greedy texts depend on the cache, too")
if linear_first[1] > 12 or max(linear_first[2], attention_first[2]) > 12:
    raise SystemExit("the behaviour has changed")
EOF
