#!/usr/bin/env bash
# transformers 5.24.0: Mamba, Falcon Mamba, Jamba and Zamba restart their recurrent state when a
# call reads two or more tokens after a cache.
#
# The docstring of Mamba's forward says that, with a cache, the model returns the output for both
# inputs together. A call with one token does that. A call with more tokens scans them from a state
# of zeros: only the last three tokens of the cache are seen, by the convolution, and the new state
# replaces the old one. A prompt that is read in pieces, a new turn of a conversation, and the
# documents behind a shared prefix lose what came before, without an error. generate passes a Jamba
# such pieces for prefill_chunk_size, too. Mamba-2 and its hybrids continue from the state. Read the
# whole text at once, or one token at a time.
#
# Seen (CPU, torch 2.13.0), the largest error of the logits of the last of 24 tokens of a Mamba, in
# standard deviations of the logits:
#     12 tokens, then 12 at once: 1.5, the same bits if the state is set to zeros in between
#     12 tokens, then 12 one by one: 3e-06
# and how many of 8 prompts a Jamba continues as it does without prefill_chunk_size=8: 1
# Upstream: huggingface/transformers#46032 (closed), the same of Mamba-2.
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
from transformers import JambaConfig, JambaForCausalLM, MambaConfig, MambaForCausalLM

torch.set_grad_enabled(False)
sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=4)


def model_of(kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "A_log" not in name:
            weight.normal_(0, 0.3)
    return model


def last_logits(*pieces, zero_states=False):
    cache = None
    for piece in pieces:
        if cache is not None and zero_states:
            for layer in cache.layers:
                layer.recurrent_states[0].zero_()
        outputs = mamba(piece, cache=cache, use_cache=True)
        cache = outputs.cache
    return outputs.logits[:, -1]


mamba = model_of(MambaForCausalLM, MambaConfig(**sizes, state_size=8))
tokens = torch.randint(3, 64, (1, 24))
first, second = tokens.split(12, dim=1)
expected = last_logits(tokens)
pieces = last_logits(first, second)
forgotten = torch.equal(pieces, last_logits(first, second, zero_states=True))
one_by_one = last_logits(first, *second.split(1, dim=1))
errors = [((x - expected).abs().max() / expected.std()).item() for x in (pieces, one_by_one)]
print("Mamba, pieces and one by one", errors, "without the state", forgotten)

layers = dict(intermediate_size=64, attn_layer_period=2, attn_layer_offset=1)
heads = dict(num_attention_heads=4, num_key_value_heads=2)
jamba = model_of(
    JambaForCausalLM, JambaConfig(**sizes, **layers, **heads, num_experts=1, mamba_dt_rank=4)
)
options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
equal = 0
for prompt in torch.randint(3, 64, (8, 1, 24)):
    options["attention_mask"] = torch.ones_like(prompt)
    text = jamba.generate(prompt, **options)
    equal += torch.equal(text, jamba.generate(prompt, **options, prefill_chunk_size=8))
print("Jamba, equal texts", equal, "of 8")
if errors[1] > 1e-4:
    raise SystemExit("one token at a time has other logits, too")
if errors[0] < 0.1 or not forgotten or equal == 8:
    raise SystemExit("the behaviour has changed")
EOF
